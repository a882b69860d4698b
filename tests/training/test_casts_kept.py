"Casts kept during a validation: predictions are equal bit for bit, and each weight is cast once."

import copy
from contextlib import contextmanager

import pytest, torch
from fastai.torch_core import ismin_torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastxtend_amp.precisions import base
from helpers import *

N_BATCHES = 4
AT_ONCE = 1 if ismin_torch('2.13') else N_BATCHES  # casts of a weight in a validation; older ones cast in each batch
on_a_cpu = pytest.mark.skipif(DEVICE.type != 'cpu', reason="the simulated device's autocast keeps no casts")


@contextmanager
def cast_in_each_batch(learn):
    "As other libraries do: autocast's cache is cleared before each batch."
    clear = At('before_batch', lambda l: torch.clear_autocast_cache(), 70)
    with learn.added_cbs(clear):
        yield


class Casts(TorchDispatchMode):
    "Counts the casts to 16 bits of these tensors, by name."

    def __init__(self, model):
        super().__init__()
        self.names, self.count = {p.data_ptr(): n for n, p in model.named_parameters()}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and kwargs.get('dtype') in (torch.bfloat16, torch.float16):
            if name := self.names.get(args[0].data_ptr()):
                self.count[name] = self.count.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def counted(learn, f):
    with Casts(learn.model) as casts:
        f()
    return casts.count


def made(mode='bf16', model=None, **kwargs):
    data = dataset(4 * N_BATCHES, seed=1)
    learn = learner(model, loaders(valid=data), cbs=mixed(mode, **kwargs), opt_func=OPTIMIZERS['adamw'])
    learn.fit(1, 0.01)
    return learn


def preds(learn):
    return learn.get_preds()[0]


def validated(learn):
    return torch.tensor(learn.validate())


def inside_a_fit(learn):
    "The losses of the validations of a fit, in which the weights change between them."
    twin = copy.deepcopy(learn)
    twin.fit(3, 0.01)
    return torch.tensor(twin.recorder.values)


def from_an_event(learn):
    "Predictions in the middle of a training batch: their casts must not be used after its step."
    twin, found = copy.deepcopy(learn), []
    twin.add_cb(At('after_step', lambda l: found.append(preds(l)), 70))
    twin.fit(1, 0.01)
    return torch.stack(found)


def one_by_one(learn):
    rows = dataset(4 * N_BATCHES, seed=1).tensors[0]
    with learn.no_bar(), learn.no_logging():
        return torch.cat([learn.get_preds(dl=[(rows[i : i + 1],)])[0] for i in range(4)])


WAYS = [preds, validated, inside_a_fit, from_an_event, one_by_one]


@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('kept', [None, '3'])
def test_predictions_are_those_without(way, mode, kept):
    learn = made(mode, fp32_modules=kept)
    with cast_in_each_batch(learn):
        expected = way(learn)
    assert torch.equal(way(learn), expected)


def test_predict_and_tta():
    from fastai.data.block import CategoryBlock, DataBlock
    from fastai.data.transforms import RandomSplitter
    from fastai.vision.augment import aug_transforms
    from fastai.vision.core import PILImage
    from fastai.vision.data import ImageBlock
    import numpy as np

    block = DataBlock(
        (ImageBlock, CategoryBlock),
        get_x=lambda i: PILImage.create(np.full((8, 8, 3), 20 * i, dtype=np.uint8)),
        get_y=lambda i: 'ab'[i % 2],
        splitter=RandomSplitter(0.5, seed=0),
        batch_tfms=aug_transforms(size=8, max_warp=0),
    )
    dls = block.dataloaders(range(8), bs=1, num_workers=0, device=torch.device('cpu'))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    learn = learner(model, dls, loss_func=nn.CrossEntropyLoss()).to_bf16()

    def found():
        torch.manual_seed(0)
        with learn.no_bar():
            return torch.cat([learn.tta()[0], learn.predict(0)[2][None]])

    with cast_in_each_batch(learn):
        expected = found()
    assert torch.equal(found(), expected)
    passes = 5  # over the data
    assert len(dls.valid) == N_BATCHES and counted(learn, learn.tta)['0.weight'] == passes * AT_ONCE
    assert counted(learn, lambda: learn.predict(0))['0.weight'] == 1


@on_a_cpu
def test_each_weight_is_cast_once():
    learn = made()
    once = dict.fromkeys(['0.weight', '0.bias', '3.weight', '3.bias'], AT_ONCE)
    for f in (learn.get_preds, learn.validate):
        assert counted(learn, f) == once
    with cast_in_each_batch(learn):
        assert counted(learn, learn.get_preds) == dict.fromkeys(once, N_BATCHES)
    assert counted(made(fp32_modules='3'), lambda: None) == {}
    kept = made(fp32_modules='3')
    assert counted(kept, kept.get_preds) == dict.fromkeys(['0.weight', '0.bias'], AT_ONCE)


@on_a_cpu
def test_without_autocasts_cache_each_batch_casts_and_predictions_are_equal(monkeypatch):
    "As before PyTorch 2.13, where the cache stays off."
    learn = made()
    expected = preds(learn)
    monkeypatch.setattr(base, '_CACHE', False)
    assert set(counted(learn, learn.get_preds).values()) == {N_BATCHES}
    assert torch.equal(preds(learn), expected)


@on_a_cpu
def test_frozen_parameters_are_cast_as_often_as_without():
    "autocast's cache holds only weights that need a gradient."
    learn = made()
    learn.model[0].requires_grad_(False)
    expected = {'0.weight': N_BATCHES, '0.bias': N_BATCHES, '3.weight': AT_ONCE, '3.bias': AT_ONCE}
    assert counted(learn, learn.get_preds) == expected


def change_by_copy(l):
    with torch.no_grad():
        weight = next(l.model.parameters())
        weight.copy_(weight * 2)


def change_by_a_step(l):
    "With torch's optimizer: fastai's own optimizers write into `.data`, which cannot be noticed."
    for p in l.model.parameters():
        p.grad = torch.ones_like(p)
    l.opt.step()
    l.opt.zero_grad()


def exchange(l):
    "As an average of the weights does."
    l.model = copy.deepcopy(l.model)
    with torch.no_grad():
        for p in l.model.parameters():
            p.mul_(2)


def load(l):
    l.model.load_state_dict({k: v * 2 for k, v in l.model.state_dict().items()})


@pytest.mark.parametrize('change', [change_by_copy, change_by_a_step, exchange, load])
def test_weights_that_change_between_two_batches_are_cast_again(change):
    def found(clear):
        learn = made()
        if clear:
            learn.add_cb(At('before_batch', lambda l: torch.clear_autocast_cache(), 70))
        changed = At('after_batch', lambda l: l.iter == 1 and not l.training and change(l), 60)
        with learn.added_cbs(changed):
            return preds(learn)

    plain = preds(made())
    assert torch.equal(found(False), found(True)) and not torch.equal(found(False)[8:], plain[8:])
    assert torch.equal(found(False)[:8], plain[:8])


def test_an_averaged_model_for_the_validation_only():
    "Swapped before the validation and back after it, in each epoch of a fit."

    def run(clear):
        learn = made()
        average, own = copy.deepcopy(learn.model), learn.model
        with torch.no_grad():
            for p in average.parameters():
                p.mul_(0.5)
        learn.add_cbs([At('before_validate', lambda l: setattr(l, 'model', average), 5)])
        learn.add_cbs([At('after_validate', lambda l: setattr(l, 'model', own), 5)])
        if clear:
            learn.add_cb(At('before_batch', lambda l: torch.clear_autocast_cache(), 70))
        learn.fit(2, 0.01)
        return torch.tensor(learn.recorder.values), params(learn)

    (values, weights), (expected, other) = run(False), run(True)
    assert torch.equal(values, expected) and same(weights, other)


class NeedsGrad(nn.Module):
    "Differentiates in its forward pass, also in a validation."

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.energy = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            grad = torch.autograd.grad(self.energy(x).sum(), x, create_graph=self.training)[0]
        return self.energy(x) + grad.float().sum(1, keepdim=True)


@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_grad_mode_enabled_inside(mode):
    learn = made(mode, NeedsGrad())
    with cast_in_each_batch(learn):
        expected = preds(learn)
    assert torch.equal(preds(learn), expected)
    enabled = At('before_batch', lambda l: torch.set_grad_enabled(True), 5)
    disabled = At('after_batch', lambda l: l.training or torch.set_grad_enabled(False), 5)
    with learn.added_cbs([enabled, disabled]):
        assert torch.equal(preds(learn), expected)
        learn.fit(1, 0.01)
    assert finite(learn)


def test_the_users_own_autocast_around():
    learn, before = made(), autocast_state()
    expected = preds(learn)
    with torch.autocast(DEVICE.type, torch.bfloat16), torch.no_grad():
        around = autocast_state()
        learn.model(torch.ones(2, 6, device=DEVICE))  # keeps casts of these weights
        change_by_copy(learn)
        changed = preds(learn)
        assert autocast_state() == around and not torch.equal(changed, expected)
    assert autocast_state() == before and torch.equal(preds(learn), changed)


def test_autocast_is_off_between_batches_and_after_an_exception():
    states = []

    def note(l):
        states.append(torch.is_autocast_enabled(DEVICE.type))

    def fail(l):
        raise KeyboardInterrupt

    learn, before = made(), autocast_state()
    learn.add_cbs([At('before_validate', note, 70), At('after_batch', note, 70), At('after_validate', note, 70)])
    learn.validate()
    assert states == [False] * (N_BATCHES + 2) and autocast_state() == before
    with pytest.raises(KeyboardInterrupt), learn.added_cbs(At('after_pred', fail, 70)):
        learn.validate()
    assert autocast_state() == before and is_outside_a_fit(learn)


@pytest.mark.slow
def test_compiled():
    torch._dynamo.reset()
    learn = made()
    learn.model = torch.compile(learn.model, backend='aot_eager')
    with cast_in_each_batch(learn):
        expected = preds(learn)
    assert torch.equal(preds(learn), expected)
    change_by_copy(learn)
    assert not torch.equal(preds(learn), expected)
