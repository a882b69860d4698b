"Whatever goes wrong in a fit: autocast's state, the gradients and the learner afterwards."
import copy, pickle

import pytest, torch
from fastai.callback import core
from torch import nn

from fastxtend_amp.compat import AutocastState
from helpers import *
from interrupts import interrupted_before, lines_of

EXCEPTIONS = [RuntimeError, KeyboardInterrupt, core.CancelBatchException, core.CancelFitException, core.CancelEpochException,
              core.CancelStepException, core.CancelBackwardException]
EVENTS = ['before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward', 'before_step', 'after_step', 'after_batch']
PLACES = [*EVENTS, 'forward', 'loss', 'backward', 'step']
MODES = pytest.mark.parametrize('mode', ['fp16', 'bf16'])


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


class OnlyTraining(At): run_valid = False


class SeesAutocast(Callback):
    "Records autocast's state in the events that end a batch, after the precision callback."
    order = 11
    def __init__(self): self.seen = []
    def after_cancel_batch(self): self.seen.append(torch.is_autocast_enabled('cpu'))
    def after_batch(self): self.seen.append(torch.is_autocast_enabled('cpu'))


def build(cb, place, exc, order):
    bomb = Bomb(exc)
    opt_func = partial(OptimWrapper, opt=BombSGD) if place == 'step' else OPTIMIZERS['sgd']
    loss = Loss(bomb) if place == 'loss' else None
    learn = learner(Model(bomb, place), loss_func=loss, opt_func=opt_func, cbs=cb, lr=.01)
    learn.add_cb(SeesAutocast())
    if place == 'step': learn.create_opt(); learn.opt.opt.bomb = bomb
    if place in EVENTS: learn.add_cb(OnlyTraining(place, bomb, order))
    return learn, bomb


def caught(f):
    try: f()
    except BaseException as e: return type(e), str(e)


def is_outside_a_fit(learn): return not learn.precision.in_fit and learn.precision.device is None and vars(learn).get('scaler') is None


@pytest.mark.parametrize('place', PLACES)
def test_any_exception_anywhere_in_a_batch(place, tmp_path):
    "Each two of place, exception, order beside the precision callback, and mode together at least once."
    for i, exc in enumerate(EXCEPTIONS, PLACES.index(place)):
        mode, order, copied = ('fp16', 'bf16')[i % 2], (9, 11)[i // 2 % 2], (copy.deepcopy, lambda l: pickle.loads(pickle.dumps(l)))[i // 3 % 2]
        plain, _ = build(None, place, exc, order)
        expected, plain_names = caught(lambda: plain.fit(1)), set(vars(plain))
        learn, bomb = build(mixed(mode), place, exc, order)
        before = autocast_state()
        assert caught(lambda: learn.fit(1)) == expected
        assert not bomb.armed and autocast_state() == before and not any(learn.sees_autocast.seen)
        assert set(vars(learn)) == plain_names | {'mixed_precision', 'scaler', '_with_events'}
        assert is_outside_a_fit(learn) and 'forward' not in vars(learn.model)
        if mode == 'fp16' and expected is not None: assert not any(g.any() for g in plain_grads(learn) if g is not None)
        learn.path = tmp_path
        learn.save('a'); learn.load('a')
        weights, left = params(learn), any(g is not None and g.any() for g in plain_grads(learn))
        clone = copied(learn)
        for l in (learn, clone):
            l.fit(1)
            assert autocast_state() == before and all(p.isfinite().all() for p in params(l)) and not same(params(l), weights)
        if not left: assert same(params(learn), params(clone))   # they are kept as in fp32; a copy has none


ENDS = [(call, event) for call, events in (('fit', 'before_fit before_epoch after_epoch after_fit'),
                                           ('validate', 'before_fit before_epoch before_validate after_epoch after_fit'),
                                           ('get_preds', 'before_fit before_epoch before_validate after_epoch after_fit'))
        for event in events.split()]


@pytest.mark.parametrize('call, event', ENDS)
def test_exceptions_around_the_batches_of_fit_validate_and_get_preds(call, event):
    def fail(l): raise KeyboardInterrupt
    for mode, order in (('fp16', 11), ('bf16', 9), ('fp16', 9)):
        learn, failing = learner(Attentive(1.), cbs=mixed(mode, fp32_modules='attn')), At(event, fail, order)
        learn.create_opt()
        before = autocast_state()
        with pytest.raises(KeyboardInterrupt): learn.add_cb(failing); getattr(learn, call)(*[1] * (call == 'fit'))
        assert autocast_state() == before and torch.is_grad_enabled()
        assert is_outside_a_fit(learn), mode
        assert not [m for m in learn.model.modules() if 'forward' in vars(m)]
        learn.remove_cb(failing).fit(1)
        assert all(p.isfinite().all() for p in params(learn))


@MODES
def test_autocast_within_the_users_own_context(mode):
    learn, _ = build(mixed(mode), 'forward', RuntimeError, 0)
    with torch.autocast('cpu', dtype=torch.float16, enabled=False, cache_enabled=False):
        before = autocast_state()
        with pytest.raises(RuntimeError, match='boom'): learn.fit(1)
        assert autocast_state() == before
        learn.fit(1)
        assert autocast_state() == before


@MODES
def test_an_interrupt_before_any_line_of_a_fit(mode):
    learn, _ = build(mixed(mode), None, RuntimeError, 0)
    learn.dls = loaders(n=8, valid=dataset(4, seed=1))
    learn.fit(1)                                                 # what is asked once in a process
    lines, changed = lines_of(lambda: learn.fit(1)), []
    assert len(lines) > 80
    for line in lines:
        with AutocastState('cpu'):                               # so that one line's fault does not hide the others'
            before = autocast_state()
            interrupted_before(line, lambda: learn.fit(1))
            if autocast_state() != before or not torch.is_grad_enabled(): changed.append(line)
    assert not changed
    learn.fit(1)
    assert is_outside_a_fit(learn) and all(p.isfinite().all() for p in params(learn))
    learn.to_fp32()
    assert not {'_with_events', 'scaler', 'mixed_precision'} & vars(learn).keys()


SWITCHES = {'to_fp16': lambda l: l.to_fp16(init_scale=256.), 'to_bf16': lambda l: l.to_bf16(fp32_modules='attn'),
            'to_fp32': lambda l: l.to_fp32()}


@pytest.mark.parametrize('start, to', [('to_fp32', 'to_fp16'), ('to_fp16', 'to_bf16'), ('to_bf16', 'to_fp32')])
def test_an_interrupted_switch_leaves_nothing_that_the_next_one_keeps(start, to):
    def make(): return SWITCHES[start](learner(Attentive(1.)))
    before, dtypes = autocast_state(), set()
    learn = make()
    for line in lines_of(lambda: SWITCHES[to](learn)):
        learn = make()
        learn.model.emb.register_forward_hook(lambda m, i, o: dtypes.add(o.dtype))
        assert interrupted_before(line, lambda: SWITCHES[to](learn)), line
        learn.to_bf16().get_preds(dl=[next(iter(learn.dls.valid))])
        assert [cb.amp_mode for cb in learn.cbs if isinstance(cb, MixedPrecision)] == ['bf16'], line
        assert dtypes == {torch.bfloat16} and autocast_state() == before, line
        learn.to_fp32()
        assert not {'_with_events', 'scaler', 'mixed_precision'} & vars(learn).keys(), line
        assert not [m for m in learn.model.modules() if 'forward' in vars(m)], line


def test_an_interrupt_while_the_scaler_makes_its_tensors(monkeypatch):
    def interrupted(self, *args): raise KeyboardInterrupt
    learn = learner().to_fp16(init_scale=256.)
    with monkeypatch.context() as m:
        m.setattr(torch.amp.GradScaler, 'scale', interrupted)
        with pytest.raises(KeyboardInterrupt): learn.fit(1)
    learn.fit(1)
    assert len(learn.precision.scales) == 6 and learn.precision.scale == 256


@pytest.mark.parametrize('how', ['next fit', 'to_fp32', 'to_bf16', 'remove_cb'])
def test_no_scaled_gradient_reaches_the_step_after_an_exception(how):
    from fastai.callback.training import GradientAccumulation
    learn = learner(linear(), cbs=[mixed('fp16'), GradientAccumulation(1000)])
    def stop(l): raise RuntimeError('here')
    stopping = At('before_validate', stop)
    learn.add_cb(stopping)
    with pytest.raises(RuntimeError): learn.fit(1, .01)
    learn.remove_cbs([stopping, learn.gradient_accumulation])
    seen = []
    learn.add_cb(At('before_step', lambda l: seen.extend(g.abs().max().item() for g in plain_grads(l)), 41))
    {'next fit': noop, 'to_fp32': lambda: learn.to_fp32(), 'to_bf16': lambda: learn.to_bf16(),
     'remove_cb': lambda: learn.remove_cb(learn.mixed_precision)}[how]()
    assert not any(g.any() for g in plain_grads(learn) if g is not None)
    learn.fit(1, .01)
    assert max(seen) < 64


class Overrides(Learner):
    "A subclass whose batches do not go through `_with_events`."
    def one_batch(self, i, b):
        self.iter = i
        self._split(self._set_device(b))
        self('before_batch'); self.pred = self.model(*self.xb); self('after_pred')
        self.loss_grad = self.loss_func(self.pred, *self.yb); self.loss = self.loss_grad.clone(); self('after_loss')
        if self.training: self._do_grad_opt()
        self('after_batch')


@MODES
def test_a_subclass_that_overrides_one_batch(mode):
    results = []
    for cls in (Learner, Overrides):
        learn = learner(cls=cls, cbs=mixed(mode, init_scale=2.**18) if mode == 'fp16' else mixed(mode))
        learn.fit(2, .01)
        results.append((params(learn), learn.precision.scales))
    assert same(results[0][0], results[1][0]) and results[0][1] == results[1][1]
    learn = learner(Model(Bomb(RuntimeError), 'forward'), cls=Overrides, cbs=mixed(mode))
    with pytest.raises(RuntimeError): learn.fit(1)
    assert autocast_state()[0] is False and is_outside_a_fit(learn)
