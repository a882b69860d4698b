"Whatever goes wrong in a batch: autocast's state, the gradients and the learner afterwards."
import copy, pickle
from itertools import product

import pytest, torch
from fastai.callback import core
from torch import nn

from fastxtend_amp import MixedPrecision
from fastxtend_amp.compat import AutocastState
from helpers import *
from interrupts import interrupted_before, lines_of

EXCEPTIONS = [RuntimeError, KeyboardInterrupt, core.CancelBatchException, core.CancelFitException, core.CancelEpochException,
              core.CancelTrainException, core.CancelValidException, core.CancelStepException, core.CancelBackwardException]
EVENTS = ['before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward', 'before_step', 'after_step', 'after_batch']
PLACES = ['forward', 'loss', 'backward', 'step']
ATTRIBUTES = {'one_batch', '_with_events', 'export'}  # the guard's, on the learner as long as the callback is


class Bomb:
    "Raises `exc` at the second time it is called while armed."
    def __init__(self, exc): self.exc, self.calls, self.armed = exc.__name__, 0, True   # fastai's cannot be pickled by class
    def __call__(self, learn=None):
        self.calls += self.armed
        if self.armed and self.calls == 2:
            self.armed = False
            raise next(e for e in EXCEPTIONS if e.__name__ == self.exc)('boom')


class Model(nn.Module):
    def __init__(self, bomb, place):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.bomb, self.place = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)), bomb, place
    def forward(self, x):
        y = self.body(x)
        if self.place == 'forward' and self.training: self.bomb()
        return Explosive.apply(y, self.bomb) if self.place == 'backward' and self.training else y


class Explosive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bomb): ctx.bomb = bomb; return x.clone()
    @staticmethod
    def backward(ctx, g): ctx.bomb(); return g, None


class Loss(nn.Module):
    def __init__(self, bomb): super().__init__(); self.bomb = bomb
    def forward(self, pred, targ):
        if pred.requires_grad: self.bomb()
        return nn.functional.mse_loss(pred, targ)


class BombSGD(torch.optim.SGD):
    bomb = staticmethod(noop)
    def step(self, closure=None): self.bomb(); return super().step()


class OnlyTraining(At):
    run_valid = False


class SeesAutocast(Callback):
    "Records autocast's state in the events that end a batch, after the precision callback."
    order = 11
    def __init__(self): self.seen = []
    def after_cancel_batch(self): self.seen.append(torch.is_autocast_enabled('cpu'))
    def after_batch(self): self.seen.append(torch.is_autocast_enabled('cpu'))


def build(cb, place, exc, order):
    bomb = Bomb(exc)
    opt_func = OPTIMIZERS['sgd']
    if place == 'step': opt_func = partial(OptimWrapper, opt=BombSGD)
    learn = learner(Model(bomb, place), loss_func=Loss(bomb) if place == 'loss' else None, opt_func=opt_func, cbs=cb, lr=.01)
    learn.add_cb(SeesAutocast())
    if place == 'step': learn.create_opt(); learn.opt.opt.bomb = bomb
    if place in EVENTS: learn.add_cb(OnlyTraining(place, bomb, order))
    return learn, bomb


def caught(f):
    try: f()
    except BaseException as e: return type(e), str(e)


@pytest.mark.parametrize('exc', EXCEPTIONS, ids=lambda e: e.__name__)
@pytest.mark.parametrize('place,order', [*product(EVENTS, (9, 11)), *((p, 0) for p in PLACES)], ids=str)
def test_any_exception_anywhere_in_a_batch(place, order, exc, tmp_path):
    plain, _ = build(None, place, exc, order)
    expected, after_plain = caught(lambda: plain.fit(1)), set(plain.__dict__)
    for mode in ('fp16', 'bf16'):
        learn, bomb = build(MixedPrecision(mode, **(dict(init_scale=256.) if mode == 'fp16' else {})), place, exc, order)
        before = autocast_state()
        assert caught(lambda: learn.fit(1)) == expected
        assert not bomb.armed and autocast_state() == before
        assert set(learn.__dict__) == after_plain | {'mixed_precision', 'scaler'} | ATTRIBUTES
        assert not any(learn.sees_autocast.seen)
        if mode == 'fp16': assert learn.mixed_precision.scaling.stage in (0, 1) and not learn.mixed_precision.scaling.scaler._per_optimizer_states
        assert learn.scaler is None and learn.mixed_precision._fit is None and learn.mixed_precision._batch is None
        assert 'forward' not in learn.model.__dict__
        if mode == 'fp16' and expected is not None: assert all(p.grad is None or not p.grad.any() for p in learn.model.parameters())
        learn.path = tmp_path
        learn.export(); learn.save('a'); learn.load('a')
        again, clone = pickle.loads(pickle.dumps(learn)), copy.deepcopy(learn)
        weights = params(learn)
        left_gradients = any(p.grad is not None and p.grad.any() for p in learn.model.parameters())
        for l in (learn, again, clone):
            l.fit(1)
            assert autocast_state() == before and all(p.isfinite().all() for p in l.model.parameters())
            assert not same(params(l), weights)
        if not left_gradients: assert same(params(learn), params(clone))   # they are kept as in fp32; a copy has none


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_autocast_state_within_the_users_own_context(mode):
    learn, bomb = build(MixedPrecision(mode), 'forward', RuntimeError, 0)
    with torch.autocast('cpu', dtype=torch.float16, enabled=False, cache_enabled=False):
        before = autocast_state()
        with pytest.raises(RuntimeError, match='boom'): learn.fit(1)
        assert autocast_state() == before
        learn.fit(1)
        assert autocast_state() == before


def test_restore_can_be_repeated_and_mends_everything():
    before, state = autocast_state(), AutocastState('cpu')
    for _ in range(3): torch.autocast('cpu', dtype=torch.float16, cache_enabled=False).__enter__()
    state.restore(); assert autocast_state() == before
    torch.autocast_decrement_nesting(); state.restore(); state.restore()
    assert autocast_state() == before


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_an_interrupt_before_any_line(mode, tmp_path):
    kwargs = dict(init_scale=256.) if mode == 'fp16' else {}
    learn, _ = build(MixedPrecision(mode, **kwargs), None, RuntimeError, 0)
    learn.path, learn.dls = tmp_path, loaders(n=8, valid=dataset(4, seed=1))
    learn.fit(1)                                                 # what is asked once a process
    before, lines = autocast_state(), lines_of(lambda: learn.fit(1))
    assert len(lines) > 100
    for i, line in enumerate(lines):
        assert interrupted_before(line, lambda: learn.fit(1)), line
        assert autocast_state() == before and torch.is_grad_enabled(), line
        if i % 12: continue
        pickle.loads(pickle.dumps(learn)).fit(1); copy.deepcopy(learn).fit(1)
        learn.export(); learn.save('interrupted')
        learn.to_fp32()                                          # after which nothing of it is left
        assert not (ATTRIBUTES | {'scaler', 'mixed_precision'}) & learn.__dict__.keys()
        if mode == 'fp16': assert all(p.grad is None or p.grad.abs().max() < 50 for p in learn.model.parameters())
        learn.add_cb(MixedPrecision(mode, **kwargs))
    learn.fit(1)
    assert all(p.isfinite().all() for p in learn.model.parameters())


def test_an_interrupt_while_the_scaler_makes_its_tensors(monkeypatch):
    def half_done(self, dev):
        self._scale = torch.full((), self._init_scale, device=dev)
        raise KeyboardInterrupt
    learn = learner().to_fp16(init_scale=256.)
    with monkeypatch.context() as m:
        m.setattr(torch.amp.GradScaler, '_lazy_init_scale_growth_tracker', half_done)
        with pytest.raises(KeyboardInterrupt): learn.fit(1)
    learn.fit(1)
    assert len(learn.precision.scales) == 6 and learn.precision.scale == 256


@pytest.mark.parametrize('event', ['before_fit', 'after_fit'])
@pytest.mark.parametrize('order', [9, 11])
@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_exceptions_at_the_ends_of_a_fit(event, order, mode):
    def fail(l): raise KeyboardInterrupt
    learn = learner(cbs=[MixedPrecision(mode), At(event, fail, order)])
    for _ in (1, 2):
        with pytest.raises(KeyboardInterrupt): learn.fit(1)
        assert not learn.mixed_precision._guard.running and learn.mixed_precision._fit is None
        assert learn.__dict__.get('scaler') is None
    learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, At)])
    learn.fit(1)
    assert all(p.isfinite().all() for p in learn.model.parameters())


class Overrides(Learner):
    "A subclass whose batches do not go through `_with_events`."
    def one_batch(self, i, b):
        self.iter = i
        self._split(self._set_device(b))
        self('before_batch'); self.pred = self.model(*self.xb); self('after_pred')
        self.loss_grad = self.loss_func(self.pred, *self.yb); self.loss = self.loss_grad.clone(); self('after_loss')
        if self.training: self._do_grad_opt()
        self('after_batch')


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_subclass_that_overrides_one_batch(mode):
    scaling = dict(init_scale=2.**20) if mode == 'fp16' else {}
    results = []
    for cls in (Learner, Overrides):
        learn = learner(cls=cls, cbs=MixedPrecision(mode, **scaling)); learn.fit(2, .01)
        results.append((params(learn), learn.mixed_precision.scales))
    assert same(results[0][0], results[1][0]) and results[0][1] == results[1][1]
    bomb = Bomb(RuntimeError)
    learn = learner(Model(bomb, 'forward'), cls=Overrides, cbs=MixedPrecision(mode, **scaling))
    with pytest.raises(RuntimeError): learn.fit(1)
    assert autocast_state()[0] is False and learn.mixed_precision._fit is None
    assert not ATTRIBUTES & learn.to_fp32().__dict__.keys()


def test_a_wrapper_of_the_users_own_is_kept():
    learn, calls = learner().to_bf16(), []
    original = learn.one_batch
    learn.one_batch = lambda *a: (calls.append(1), original(*a))
    mine = learn.one_batch
    learn.fit(1)
    assert learn.one_batch is mine and len(calls) == 8
