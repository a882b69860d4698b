"The report on all kinds of models, and what it leaves alone."
import random, time
from dataclasses import dataclass

import numpy as np
import pytest, torch
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.vision.models.unet import DynamicUnet
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils import checkpoint as checkpointing

from insight.test_report import language_model, rows
from helpers import Attentive, Data, dataset, learner, loaders, mlp


# -- models

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.b.weight = self.a.weight
    def forward(self, x): return self.head(self.b(self.a(self.a(x))).relu())


@dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple


class GivesDataclass(nn.Module):
    def __init__(self): super().__init__(); self.body, self.head = nn.Linear(6, 6), nn.Linear(6, 1)
    def forward(self, x):
        hidden = self.body(x)
        return Output(self.head(hidden), (hidden,))


def thousand():
    layers = [m for _ in range(500) for m in (nn.Linear(6, 6, bias=False), nn.Identity())]
    for m in layers[::2]: nn.init.eye_(m.weight)
    return learner(nn.Sequential(*layers, nn.Linear(6, 1)))


def unet():
    torch.manual_seed(0)
    block = lambda a, b: nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.ReLU())
    body = nn.Sequential(block(3, 4), block(4, 8), block(8, 8))
    data = Data(torch.randn(4, 3, 16, 16), torch.randint(0, 2, (4, 16, 16)))
    return learner(DynamicUnet(body, 2, (16, 16)), loaders(4, 4, data, data), CrossEntropyLossFlat(axis=1))


def vision_transformer():
    torchvision = pytest.importorskip('torchvision')
    torch.manual_seed(0)
    data = Data(torch.randn(4, 3, 16, 16), torch.randint(0, 3, (4,)))
    model = torchvision.models.VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=3)
    with torch.no_grad(): nn.init.normal_(model.heads.head.weight)
    return learner(model, loaders(4, 4, data, data), CrossEntropyLossFlat())


def timms_vision_transformer():
    pytest.importorskip('timm')
    from timm.models.vision_transformer import VisionTransformer
    torch.manual_seed(0)
    data = Data(torch.randn(4, 3, 16, 16), torch.randint(0, 3, (4,)))
    model = VisionTransformer(img_size=16, patch_size=8, num_classes=3, embed_dim=16, depth=2, num_heads=2)
    with torch.no_grad(): nn.init.normal_(model.head.weight)
    return learner(model, loaders(4, 4, data, data), CrossEntropyLossFlat())


def compiled():
    learn = learner()
    learn.model = torch.compile(learn.model, backend='eager')
    return learn


MODELS = {
    'U-Net': unet, 'vision transformer': vision_transformer, "timm's vision transformer": timms_vision_transformer,
    'AWD_LSTM': language_model, 'compiled': compiled, '1,000 modules': thousand,
    'spectral norm': lambda: learner(nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 1))),
    'old spectral norm': lambda: learner(nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 1))),
    'tied weights, called twice': lambda: learner(Tied()),
    'dataclasses': lambda: learner(GivesDataclass(), loss_func=lambda o, y: nn.functional.mse_loss(o.logits, y)),
}


@pytest.mark.parametrize('name', MODELS)
def test_models_of_all_kinds_in_little_time_and_as_they_were(name):
    torch.manual_seed(0)
    learn = MODELS[name]()
    state = {n: (t.clone(), t.data_ptr()) for n, t in learn.model.state_dict().items()}
    xb, *yb = next(iter(learn.dls.train))
    def step():
        start = time.process_time()
        pred = learn.model(xb)
        learn.loss_func(pred[0] if isinstance(pred, tuple) else pred, *yb).mean().backward()
        learn.model.zero_grad()
        return time.process_time() - start
    learn.model.eval()
    step()
    start = time.process_time()
    report = learn.precision_report('bf16')
    assert time.process_time() - start < 10 * step() + 5
    assert report.verdicts['bf16'].verdict in ('safe', 'cannot run') and report.table['total error'].max() < .2
    assert len(report.table) > 2 and report.table['own error'].notna().all()
    after = learn.model.state_dict()
    state = {n: v for n, v in state.items() if n in after}
    assert all(torch.equal(t, after[n]) and after[n].data_ptr() == place for n, (t, place) in state.items())
    assert not learn.model.training


# -- reentrant activation checkpointing

class Checkpointed(nn.Module):
    def __init__(self, inner, **kwargs): super().__init__(); self.inner, self.kwargs = inner, kwargs
    def forward(self, x):
        return checkpointing.checkpoint(self.inner, x, **self.kwargs) if self.kwargs else self.inner(x)


@pytest.mark.parametrize('first', [True, False])
@pytest.mark.parametrize('kwargs', [{'use_reentrant': True}, {'use_reentrant': True, 'preserve_rng_state': False},
                                    {'use_reentrant': False}])
def test_gradients_inside_checkpoints_are_examined(first, kwargs):
    def table(**kwargs):
        torch.manual_seed(0)
        layers = [Checkpointed(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), **kwargs), nn.Linear(6, 1)]
        return learner(nn.Sequential(*(layers if first else [nn.Linear(6, 6), *layers]))).precision_report()
    apply = checkpointing.CheckpointFunction.__dict__.get('apply')
    plain, checked = table(), table(**kwargs)
    assert checkpointing.CheckpointFunction.__dict__.get('apply') is apply
    assert checked.table.equals(plain.table) and checked.verdicts == plain.verdicts
    assert checked.table[checked.table['module'] != 'loss function']['grad'].notna().all()


def test_dropout_inside_a_checkpoint_draws_the_same_masks():
    def table(**kwargs):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(6, 64), nn.Dropout(.5), nn.Linear(64, 6))
        model = nn.Sequential(nn.Linear(6, 6), Checkpointed(inner, **kwargs), nn.Linear(6, 1))
        return learner(model).precision_report('bf16').table
    assert table(use_reentrant=True).equals(table())


def test_trouble_inside_a_checkpoint_is_found():
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.net = Checkpointed(Attentive(), use_reentrant=True)
        def forward(self, x): return self.net(x)
    report = learner(Net()).precision_report('fp16')
    assert report.fp32_modules == ['net.inner.attn']


def test_checkpoints_of_other_libraries_that_run_their_own_backward_pass():
    "Their gradients come in `.grad`, which is put back."
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, module):
            ctx.module = module
            ctx.save_for_backward(x)
            with torch.no_grad(): return module(x)
        @staticmethod
        def backward(ctx, g):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad(): out = ctx.module(x)
            torch.autograd.backward(out, g.to(out.dtype))
            return x.grad, None
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        def forward(self, x): return self.last(Own.apply(self.first(x), self.inner))
    learn = learner(Net())
    learn.model.inner(torch.ones(1, 6)).sum().backward()
    grad, values = learn.model.inner.weight.grad, learn.model.inner.weight.grad.clone()
    row = rows(learn.precision_report('bf16'), 'bf16').loc['inner']
    assert row['grad'] > 0 and learn.model.inner.weight.grad is grad and torch.equal(grad, values)


# -- side effects

def test_what_others_write_meanwhile_stays():
    "A logger's thread, say: its list can be reached from the learner."
    learn = learner()
    learn.log = []
    class Logs(nn.Module):
        def forward(self, x):
            learn.log.append(len(x))
            return x
    learn.model.append(Logs())
    learn.precision_report('bf16')
    assert len(learn.log) >= 3


def test_training_goes_on_as_without_it_also_with_shuffled_data_and_random_numbers_of_every_kind():
    class Noisy(nn.Module):
        def forward(self, x): return x + .01 * (random.random() + float(np.random.rand()) + torch.rand(()))
    def train(ask):
        torch.manual_seed(0); random.seed(0); np.random.seed(0)
        words = torch.randint(0, 9, (24, 6), generator=torch.Generator().manual_seed(0))
        data = Data(words, dataset().tensors[1])
        embedding = nn.Embedding(9, 6, max_norm=.5)
        model = nn.Sequential(embedding, nn.Flatten(), nn.Dropout(.1), Noisy(), nn.Linear(36, 1))
        learn = learner(model, loaders(24, 4, data, data)).to_bf16()
        learn.dls.train.shuffle = True
        for i in range(2):
            if ask: learn.precision_report('bf16', n_batches=2)
            learn.fit(1, .1)
        return [p.detach() for p in learn.model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(train(True), train(False)))


def test_a_subclass_of_learner_and_a_stateful_loss():
    class Mine(Learner): pass
    class Loss(nn.Module):
        def __init__(self): super().__init__(); self.register_buffer('n', torch.zeros(())); self.calls = 0
        def forward(self, p, y):
            self.n += 1
            self.calls += 1
            return (p - y).square().mean()
    loss = Loss()
    learner(mlp(), loss_func=loss, cls=Mine).precision_report()
    assert loss.n == 0 and loss.calls == 0


def test_the_text_dataloaders_order_is_put_back():
    from fastai.text.data import LMDataLoader
    items = [torch.arange(i, i + 30) % 11 for i in range(6)]
    dl = LMDataLoader(items, lens=[30] * 6, bs=2, seq_len=5, shuffle=True)
    learn = language_model()
    before = list(dl.items.idxs)
    state = dl.rng.getstate()
    learn.precision_report('bf16', dl=dl)
    assert list(dl.items.idxs) == before and dl.rng.getstate() == state
