import random
from functools import partial

import numpy as np
import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.rnn import rnn_cbs
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import AvgMetric
from fastai.optimizer import Adam
from fastai.text.models.awdlstm import AWD_LSTM
from fastai.text.models.core import LinearDecoder, SequentialRNN
from torch import nn

from fastxtend_amp.insight.snapshot import Snapshot, preserved
from helpers import OPTIMIZERS, At, Data, autocast_state, dataset, learner, mlp, opt_state, params, same, same_state


class Memory(nn.Module):
    "Holds tensors outside its buffers, in every kind of container."
    def __init__(self):
        super().__init__()
        self.register_buffer('seen', torch.zeros(3))
        self.plain, self.n, self.kept = torch.ones(2), 0, {'a': [torch.zeros(1), (torch.ones(1), {'b': torch.ones(2)})], 'calls': []}
        self.wide = torch.zeros(1).expand(4)
    def forward(self, x):
        self.seen += 1; self.plain = self.plain * 2; self.n += 1; self.new = x
        self.kept['a'][0] += 1; self.kept['a'][1][1]['b'].mul_(3); self.kept['calls'].append(self.n); self.kept['c'] = x
        self.wide[0] += 1
        return x


def shuffled(seed=0):
    make = lambda ds, shuffle: DataLoader(ds, bs=4, shuffle=shuffle, num_workers=0, device=torch.device('cpu'))
    return DataLoaders(make(dataset(24), True), make(dataset(8, seed=1), False), device=torch.device('cpu'))


def rich(opt='fused adamw', fit=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), Memory(), nn.Dropout(.5), nn.ReLU(), nn.Linear(8, 1))
    learn = learner(model, shuffled(), opt_func=OPTIMIZERS[opt], metrics=AvgMetric(nn.functional.l1_loss)).to_fp16(init_scale=2.**14, growth_interval=3)
    if fit:
        learn.fit(1, .01)
        list(model.parameters())[0].grad = torch.full((8, 6), .25)
        list(model.parameters())[1].grad = None
        model[1].eval(); list(model.parameters())[-1].requires_grad_(False)
    return learn


def language_model():
    torch.manual_seed(0)
    rnn = AWD_LSTM(20, 6, 8, 2, hidden_p=.1, input_p=.1, embed_p=.1, weight_p=.2)
    model = SequentialRNN(rnn, LinearDecoder(20, 6, .1, tie_encoder=rnn.encoder))
    make = lambda: DataLoader(Data(torch.randint(0, 20, (16, 5)), torch.randint(0, 20, (16, 5))), bs=4, num_workers=0, device=torch.device('cpu'))
    loss = lambda pred, y: nn.functional.cross_entropy(pred.flatten(0, 1), y.flatten())
    learn = learner(model, DataLoaders(make(), make(), device=torch.device('cpu')), loss, cbs=rnn_cbs(), opt_func=Adam)
    learn.fit(1, .01)
    model.train(); model(torch.randint(0, 20, (4, 5)))            # something in `hidden`
    return learn


def bits(learn, optimizer=True):
    "Everything the test can name, as plain comparable values with the identity and memory of each tensor."
    def tensor(t):
        if t is None: return None
        values = bytes(t.detach().contiguous().view(torch.uint8).numpy()) if t.numel() and t.dim() else t.detach().tolist()
        return id(t), t.data_ptr(), t.dtype, tuple(t.shape), t.requires_grad, values
    def plain(o, depth=0):
        if isinstance(o, torch.Tensor): return tensor(o)
        if isinstance(o, dict): return [(k if isinstance(k, (str, int)) else id(k), plain(v, depth + 1)) for k, v in o.items()]
        if isinstance(o, (list, tuple)): return [type(o).__name__, id(o) if isinstance(o, list) else 0, *[plain(v, depth + 1) for v in o]]
        if isinstance(o, random.Random): return id(o), o.getstate()
        if isinstance(o, (int, float, str, bool, type(None), bytes, bytearray)): return o if o == o else 'nan'
        return id(o)
    model = learn.model
    state = {
        'modules': [(n, id(m), m.training, plain(m.__dict__)) for n, m in model.named_modules()],
        'grads': [(n, tensor(p), tensor(p.grad)) for n, p in model.named_parameters()],
        'learn': plain(learn.__dict__), 'cbs': [(id(c), plain(c.__dict__)) for c in learn.cbs],
        'metrics': [plain(m.__dict__) for m in learn.metrics],
        'dls': [plain(d.__dict__) for d in learn.dls.loaders],
        'rng': (random.getstate(), np.random.get_state()[2:], np.random.get_state()[1].tolist(), bytes(torch.get_rng_state().numpy())),
        'autocast': (autocast_state(), torch.is_grad_enabled())}
    if hasattr(learn, 'mixed_precision'):
        s = learn.mixed_precision.scaling
        state['scaling'] = [plain({k: v for k, v in s.__dict__.items()}), plain(s.history.__dict__), plain(s._fp16_scaler.__dict__)]
    if optimizer and learn.opt is not None:
        inner = getattr(learn.opt, 'opt', learn.opt)
        state['opt'] = [plain(learn.opt.__dict__), plain(inner.__dict__), plain(dict(inner.state)), [dict(h) for h in learn.opt.hypers]]
        state['lists'] = [[id(p) for p in pl] for pl in learn.opt.param_lists]
    return {k: repr(v) for k, v in state.items()}


def disturb(learn):
    "Train, validate and rearrange everything."
    model = learn.model
    learn.fit(2, .1)
    for m in model.modules():
        m.training = not m.training
        m.register_forward_hook(lambda *a: None)
        for k, b in m._buffers.items():
            if b is not None and b.is_floating_point(): b.add_(1)
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(i % 2 == 0)
        p.grad = None if i % 3 == 0 else torch.full_like(p, float('nan'))
    p.register_hook(lambda g: g) if p.requires_grad else None
    next(iter(learn.dls.train)); random.random(); np.random.rand(); torch.rand(3)
    learn.add_cb(At('after_batch', lambda l: None)); learn.cbs.items.reverse()
    learn.something, learn.n_epoch, learn.xb = 1, 77, (torch.ones(1),)
    torch.set_grad_enabled(False)
    torch.set_autocast_enabled('cpu', True)


@pytest.mark.parametrize('make', [rich, partial(rich, 'adam'), partial(rich, 'fused sgd'), language_model],
                         ids=['fused adamw', 'fastai adam', 'fused sgd', 'awd_lstm'])
@pytest.mark.parametrize('error', [None, ValueError, KeyboardInterrupt, torch.OutOfMemoryError])
def test_everything_is_back_bit_for_bit_and_in_place(make, error):
    learn = make()
    before = bits(learn)
    class Done(BaseException): pass
    with pytest.raises(error or Done):
        with preserved(learn, training=True):
            disturb(learn)
            assert bits(learn)['modules'] != before['modules'] and bits(learn)['rng'] != before['rng']
            raise (error or Done)('in the middle')
    after = bits(learn)
    for key in before: assert after[key] == before[key], key


def test_exception_inside_a_batch():
    learn = rich()
    before = bits(learn)
    boom = At('after_loss', lambda l: 1 / 0 if l.iter == 2 else None, order=99)
    with pytest.raises(ZeroDivisionError):
        with preserved(learn, training=True): learn.fit(1, .1, cbs=boom)
    after = bits(learn)
    for key in before: assert after[key] == before[key], key


@pytest.mark.parametrize('make', [rich, language_model], ids=['batch norm', 'awd_lstm'])
def test_without_training_only_parameters_and_optimizer_are_left_alone(make):
    learn = make()
    before = bits(learn)
    with preserved(learn) as snapshot:
        learn.model.train()
        for p in learn.model.parameters(): p.grad = torch.ones_like(p)
        x, y = next(iter(learn.dls.train))
        learn.loss_func(learn.model(x)[0] if make is language_model else learn.model(x), y)
        for m in learn.model.modules(): m.register_forward_pre_hook(lambda *a: None)
        copied = [o.t for o in snapshot._tensors if o.values is not None]
        assert not any(isinstance(t, nn.Parameter) for t in copied) and copied
    after = bits(learn)
    for key in before: assert after[key] == before[key], key


def test_optimizer_that_was_not_there_is_not_there_again():
    learn = rich(fit=False)
    before = bits(learn)
    with preserved(learn, training=True): learn.fit(1, .1)
    assert learn.opt is None and bits(learn) == before


@pytest.mark.parametrize('opt', ['fused adamw', 'adam', 'fused sgd'])
def test_training_goes_on_as_if_nothing_had_happened(opt):
    def run(disturbed):
        random.seed(0); np.random.seed(0)
        learn = rich(opt)
        learn.model.train(); [p.requires_grad_(True) for p in learn.model.parameters()]
        if disturbed:
            with preserved(learn, training=True): disturb(learn)
        learn.fit(2, .02)
        return learn
    a, b = run(False), run(True)
    assert same(params(a), params(b)) and same_state(opt_state(a.opt), opt_state(b.opt))
    assert a.recorder.losses == b.recorder.losses and a.mixed_precision.scales == b.mixed_precision.scales
    assert [*map(str, a.recorder.values)] == [*map(str, b.recorder.values)]


def test_memory_moved_by_the_model_is_given_back():
    learn = learner(mlp())
    before = bits(learn)
    with preserved(learn, training=True): learn.model.double()
    assert bits(learn) == before and next(learn.model.parameters()).dtype is torch.float32


def test_states_can_be_swapped():
    learn = rich()
    start = Snapshot(learn, training=True, host=True)
    learn.fit(1, .1)
    one, one_bits = Snapshot(learn, training=True, host=True), bits(learn)
    start.restore()
    learn.fit(1, .001)
    other, other_bits = Snapshot(learn, training=True, host=True), bits(learn)
    one.restore()
    assert bits(learn) == one_bits
    other.restore()
    assert bits(learn) == other_bits


class Counter:
    def __init__(self): self.history, self.total = [], torch.zeros(1)


class Counts(Callback):
    def __init__(self): self.counter, self.array, self.names = Counter(), np.zeros(3), {'x'}
    def after_batch(self): self.counter.history.append(1); self.counter.total += 1; self.array += 1; self.names.add(self.iter)


def test_state_of_the_users_own_callbacks():
    cb = Counts()
    learn = learner(cbs=cb)
    learn.fit(1)
    n, total = len(cb.counter.history), cb.counter.total
    with preserved(learn, training=True): learn.fit(1); assert len(cb.counter.history) > n
    assert len(cb.counter.history) == n and cb.counter.total is total and total.item() == n
    assert cb.array.tolist() == [n] * 3 and cb.names == {'x', *range(6)}


def test_data_is_not_copied():
    learn = learner()
    tensors = learn.dls.train.dataset.tensors
    snapshot = Snapshot(learn, training=True)
    kept = {id(o.t): o.values for o in snapshot._tensors}
    assert all(kept.get(id(t)) is None for t in tensors)


def test_interrupt_while_restoring(monkeypatch):
    learn = rich()
    before, restore, calls = bits(learn), Snapshot.restore, []
    def interrupted(self):
        calls.append(1)
        if len(calls) == 1:
            for undo, *args in self._undo[:20]: undo(*args)
            raise KeyboardInterrupt
        restore(self)
    monkeypatch.setattr(Snapshot, 'restore', interrupted)
    with pytest.raises(KeyboardInterrupt):
        with preserved(learn, training=True): disturb(learn)
    assert len(calls) == 2 and bits(learn) == before


def test_sparse_gradients():
    learn = learner(nn.Sequential(nn.Embedding(5, 2, sparse=True)), loss_func=lambda p, y: p.mean())
    weight = learn.model[0].weight
    learn.model(torch.tensor([1, 1, 3])).sum().backward()
    grad, values = weight.grad, weight.grad.to_dense()
    with preserved(learn): learn.model(torch.tensor([0, 2])).sum().backward(); weight.grad = weight.grad * 2
    assert weight.grad is grad and torch.equal(grad.to_dense(), values)


def test_many_samples_are_not_looked_through():
    class Listed(list): pass
    samples = Listed((torch.zeros(2), i) for i in range(5000))
    make = lambda ds: DataLoader(ds, bs=4, num_workers=0, device=torch.device('cpu'))
    learn = learner(dls=DataLoaders(make(samples), make(samples), device=torch.device('cpu')))
    assert len(Snapshot(learn)._seen) < 2000


def test_model_that_a_transform_holds_is_no_data():
    learn = learner()
    learn.dls.train.augment = learn.model
    before = bits(learn)
    with preserved(learn): learn.model.train(); learn.model(torch.randn(4, 6))
    assert bits(learn) == before


def test_order_of_the_next_batches():
    from fastai.text.data import LMDataLoader, TensorText
    def make():
        documents = [(TensorText(torch.arange(n)),) for n in (30, 25, 40, 22, 31, 28)]
        return LMDataLoader(documents, bs=2, seq_len=5, shuffle=True)
    def batches(disturbed):
        random.seed(3)
        learn = learner(dls=DataLoaders(make(), make(), device=torch.device('cpu')))
        list(learn.dls.train)
        if disturbed:
            with preserved(learn): list(learn.dls.train); random.random()
        return [b[0].tolist() for _ in range(2) for b in learn.dls.train]
    assert batches(True) == batches(False)


def test_wrapped_and_reparametrized_modules():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.utils.spectral_norm(nn.Linear(8, 1)))
    learn = learner(torch.compile(model, backend='eager'))
    learn.fit(1)
    before = bits(learn)
    with preserved(learn, training=True): learn.fit(1, .1)
    assert bits(learn) == before
    learn.fit(1)
