"Loops that are not fastai's own: validation inside a fit, two forwards, custom loops, switches in mid-batch, threads."
import threading

import pytest, torch
from fastai.callback import core
from fastai.callback.training import GradientAccumulation
from fastai.optimizer import Lamb
from torch import nn

from fastxtend_amp import AMPMode
from helpers import *

MODES = pytest.mark.parametrize('mode', ['fp16', 'bf16'])
BATCH = ['before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward', 'before_step', 'after_step', 'after_batch']


# -- validation inside a fit

class Once:
    "Calls `f(learn)`, and not again while that runs."
    def __init__(self, f): self.f, self.busy = f, False
    def __call__(self, learn):
        if self.busy: return
        self.busy = True
        self.f(learn)
        self.busy = False


INSIDE = [('before_fit', 'validate', 'fp16'), ('before_epoch', 'get_preds', 'fp16'), ('after_validate', 'validate', 'bf16'),
          ('after_epoch', 'validate', 'fp16'), ('after_fit', 'get_preds', 'fp16'), ('after_fit', 'validate', 'bf16')]


@pytest.mark.parametrize('event, call, mode', INSIDE)
def test_predictions_inside_a_fit_change_nothing(event, call, mode):
    def run(extra):
        learn, dtypes = learner(cbs=mixed(mode, init_scale=2.**18) if mode == 'fp16' else mixed(mode)), set()
        learn.model[0].register_forward_hook(lambda m, i, o: dtypes.add(o.dtype))
        def predict(l):
            scaler = l.scaler if event not in ('before_fit', 'after_fit') else None
            getattr(l, call)()
            assert scaler is None or l.scaler is scaler
        if extra: learn.add_cb(At(event, Once(predict), order=40 if event != 'after_fit' else 5))
        learn.fit(2, .01)
        assert dtypes == {AMPMode(mode).dtype}
        return params(learn), learn.precision.scales, learn.scaler
    plain, nested = run(False), run(True)
    assert same(plain[0], nested[0]) and plain[1:] == nested[1:]


@pytest.mark.parametrize('event, call, mode', [('after_pred', 'get_preds', 'bf16'), ('after_backward', 'validate', 'fp16'),
                                               ('before_step', 'get_preds', 'fp16'), ('after_step', 'validate', 'bf16')])
def test_validation_inside_a_batch_changes_nothing(event, call, mode):
    kept = ('xb', 'yb', 'pred', 'loss', 'loss_grad', 'iter', 'n_iter', 'dl', 'training')
    def run(extra):
        learn, on = learner(cbs=mixed(mode)), []
        def validate(l):
            if not l.training: return
            state = {k: vars(l)[k] for k in kept if k in vars(l)}
            if extra: getattr(l, call)()
            vars(l).update(state)
            l.model.train()
            on.append(torch.is_autocast_enabled('cpu'))
        learn.add_cb(At(event, validate, order=40))
        learn.fit(2, .01)
        assert on == [event == 'after_pred'] * 12 and not autocast_state()[0]
        return params(learn)
    assert same(run(False), run(True))


@MODES
def test_a_validation_in_after_fit_keeps_an_unfinished_accumulation(mode):
    def run(cb):
        learn = learner(linear(), cbs=[*([cb] if cb else []), GradientAccumulation(1000)])
        learn.add_cb(At('after_fit', Once(lambda l: l.validate()), 0))
        learn.fit(1, .01)
        return plain_grads(learn)
    for a, b in zip(run(None), run(mixed(mode))): torch.testing.assert_close(b, a, rtol=.05, atol=.05)


# -- a batch with two forward passes

class TwoSteps(Learner):
    "Sharpness-aware minimization: climbs along the gradient, takes the gradient there, steps from where it was."
    def _do_one_batch(self):
        self.pred = self.model(*self.xb); self('after_pred')
        self.loss_grad = self.loss_func(self.pred, *self.yb); self.loss = self.loss_grad.clone(); self('after_loss')
        if not self.training: return
        self('before_backward'); self._backward()
        with torch.no_grad():
            climbs = [p.grad.sign() * .05 for p in self.model.parameters()]
            for p, c in zip(self.model.parameters(), climbs): p.add_(c)
        self.opt.zero_grad()
        with self.amp_context(): pred = self.model(*self.xb)
        self.loss_grad = self.loss_func(pred.float(), *self.yb)
        self('before_backward'); self._backward()
        with torch.no_grad():
            for p, c in zip(self.model.parameters(), climbs): p.sub_(c)
        self._with_events(self._step, 'step', core.CancelStepException)
        self.opt.zero_grad()


def two_steps_by_hand(mode, n_epoch=2, lr=.01):
    learn = learner(opt_func=OPTIMIZERS['sgd']); learn.create_opt(); learn.opt.set_hypers(lr=lr)
    model, opt, scaler = learn.model, learn.opt, torch.amp.GradScaler('cpu', 256., enabled=mode == 'fp16')
    def backward(xb, yb):
        with torch.autocast('cpu', dtype=AMPMode(mode).dtype): pred = model(xb).float()
        scaler.scale(nn.functional.mse_loss(pred, yb)).backward()
    for _ in range(n_epoch):
        model.train()
        for xb, yb in learn.dls.train:
            backward(xb, yb)
            with torch.no_grad():
                climbs = [p.grad.sign() * .05 for p in model.parameters()]
                for p, c in zip(model.parameters(), climbs): p.add_(c)
            opt.zero_grad(); backward(xb, yb)
            with torch.no_grad():
                for p, c in zip(model.parameters(), climbs): p.sub_(c)
            scaler.unscale_(opt); scaler.step(opt); scaler.update(); opt.zero_grad()
    return list(model.parameters())


@MODES
def test_a_second_forward_of_a_batch_with_amp_context(mode):
    learn, dtypes, before = learner(cls=TwoSteps, opt_func=OPTIMIZERS['sgd'], cbs=mixed(mode)), [], autocast_state()
    learn.model[0].register_forward_hook(lambda m, i, o: dtypes.append((m.training, o.dtype)))
    learn.fit(2, .01)
    low = AMPMode(mode).dtype
    assert dtypes.count((True, low)) == 2 * 12 and set(dtypes) == {(True, low), (False, low)}
    assert autocast_state() == before and same(params(learn), two_steps_by_hand(mode))


def test_a_loop_that_sets_a_loss_alone():
    class Own(Learner):
        def _do_one_batch(self):
            self.pred = self.model(*self.xb); self('after_pred')
            self.loss = self.loss_func(self.pred, *self.yb); self('after_loss')
            if not self.training: return
            self.loss.backward()
            self._with_events(self._step, 'step', core.CancelStepException)
            self.opt.zero_grad()
    learn = learner(cls=Own).to_bf16()
    learn.fit(1, .01)
    assert len(learn.recorder.losses) == 6 and {l.dtype for l in learn.recorder.losses} == {torch.float32}


# -- loops without `fit`

def prepared(mode, model=None, **kwargs):
    "A learner as a loop of the user's own prepares it."
    learn = learner(model, cbs=mixed(mode, **kwargs))
    learn.create_opt()
    learn.opt.set_hypers(lr=.01, **({} if learn.wd is None else {'wd': learn.wd}))
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ in ('TrainEvalCallback', 'Recorder')])
    learn.model.train()
    learn.training, learn.dl = True, learn.dls.train
    return learn


@MODES
def test_a_loop_over_one_batch_trains_as_fit_does(mode):
    scaling = dict(init_scale=2.**18) if mode == 'fp16' else {}
    fitted, learn = learner(cbs=mixed(mode, **scaling)), prepared(mode, **scaling)
    fitted.fit(1, .01)
    for i, b in enumerate(learn.dls.train): learn.one_batch(i, b)
    assert same(params(learn), params(fitted)) and learn.precision.scales == fitted.precision.scales
    learn.to_fp32()
    assert not {'_with_events', 'scaler'} & vars(learn).keys() and max(g.abs().max() for g in plain_grads(learn) if g is not None) < 64


@MODES
def test_an_exception_in_such_a_loop(mode):
    class Fails(nn.Module):
        def __init__(self): super().__init__(); self.lin = nn.Linear(6, 1)
        def forward(self, x): self.lin(x); raise RuntimeError('boom')
    learn, before = prepared(mode, Fails()), autocast_state()
    for b in list(learn.dls.train)[:2]:
        with pytest.raises(RuntimeError, match='boom'): learn.one_batch(0, b)
        assert autocast_state() == before
    assert not {'_with_events', 'scaler'} & vars(learn.to_fp32()).keys()


def test_a_wrapper_of_the_users_own_around_one_batch_is_kept():
    learn, calls = learner().to_bf16(), []
    original = learn.one_batch
    learn.one_batch = mine = lambda *a: (calls.append(1), original(*a))
    learn.fit(1)
    assert learn.to_fp32().one_batch is mine and len(calls) == 8


# -- switching precision

SWITCHES = {'to_fp16': lambda l: l.to_fp16(init_scale=256.), 'to_bf16': lambda l: l.to_bf16(), 'to_fp32': lambda l: l.to_fp32()}
DTYPES = {'to_fp16': torch.float16, 'to_bf16': torch.bfloat16, 'to_fp32': torch.float32}


def switches():
    "Each event on both sides of the callback's order, and each switch at every third of them."
    changes = [(start, to) for start in SWITCHES for to in SWITCHES if start != to]
    for i, (event, order) in enumerate((e, o) for e in BATCH for o in (9, 40)):
        for j in (0, 3): yield *changes[(i + j) % len(changes)], event, order


@pytest.mark.parametrize('start, to, event, order', switches())
def test_a_switch_in_mid_batch_takes_effect_from_the_next(start, to, event, order):
    learn, dtypes, scaled = SWITCHES[start](learner()), [], []
    learn.model[0].register_forward_hook(lambda m, i, o: dtypes.append(o.dtype) if m.training else None)
    def switch(l):
        if l.training and l.iter == 2: SWITCHES[to](l)
    learn.add_cb(At(event, switch, order))
    learn.add_cb(At('before_step', lambda l: scaled.append(max(g.abs().max().item() for g in plain_grads(l))), 41))
    learn.fit(1, 1e-3)
    assert dtypes == [DTYPES[start]] * 3 + [DTYPES[to]] * 3
    assert max(scaled) < 64. and len(scaled) == 6                # true gradients at every step
    assert autocast_state()[0] is False and all(p.isfinite().all() for p in params(learn))


def test_several_switches_in_a_fit_and_the_last_of_a_batch_counts():
    learn, dtypes = learner(), []
    learn.model[0].register_forward_hook(lambda m, i, o: dtypes.append(o.dtype) if m.training else None)
    steps = {1: ['to_bf16'], 3: ['to_fp32', 'to_bf16', 'to_fp16'], 4: ['to_fp16', 'to_fp32']}
    for when, order in (('after_batch', 40), ('after_pred', 40)):
        dtypes.clear()
        cb = At(when, lambda l: l.training and [SWITCHES[s](l) for s in steps.get(l.iter, ())], order)
        learn.fit(1, .01, cbs=cb)
        f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
        assert dtypes == [f32, f32, bf16, bf16, f16, f32] and autocast_state()[0] is False
    assert not {'_with_events', 'scaler'} & vars(learn).keys()


def test_remove_cb_in_mid_batch_is_refused_with_what_to_do():
    learn = learner().to_fp16()
    learn.add_cb(At('before_backward', lambda l: l.remove_cb(l.mixed_precision), 40))
    with pytest.raises(RuntimeError, match='(?s)middle of a batch.*to_fp32.*take effect at its end'): learn.fit(1)
    assert learn.precision is not None and autocast_state()[0] is False


# -- threads

def test_two_learners_that_train_in_two_threads():
    def train(mode):
        learn = learner(cbs=mixed(mode))
        learn.fit(6, .01)
        return params(learn), learn.precision.scales
    alone, together, errors = {mode: train(mode) for mode in ('fp16', 'bf16')}, {}, []
    def work(mode):
        try: together[mode] = train(mode)
        except BaseException as e: errors.append(e)
    threads = [threading.Thread(target=work, args=(mode,)) for mode in alone]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not errors and all(together[mode][1] == alone[mode][1] for mode in alone)
    assert all(p.isfinite().all() for mode in alone for p in together[mode][0])


def test_a_precision_set_during_a_fit_belongs_to_that_fit():
    "Its checks are made, and it is one fit for it, also where an exception ends it outside a batch."
    learn = learner(cbs=GradientAccumulation(100)).to_fp16(init_scale=256.)
    learn.add_cb(At('before_batch', lambda l: l.to_fp16(init_scale=1024.) if l.iter == 0 else None))
    def fail(l): raise KeyboardInterrupt
    learn.add_cb(At('after_train', fail))
    with pytest.raises(KeyboardInterrupt): learn.fit(1)
    assert learn.scaler is None and not any(p.grad.any() for p in learn.model.parameters())
    learn = learner(opt_func=Lamb).to_bf16()
    learn.add_cb(At('before_batch', lambda l: l.to_half_weights(flat_master=True) if l.training and l.iter == 0 else None))
    with pytest.raises(ValueError, match='flat_master=True cannot be used with'): learn.fit(1)


@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_a_batch_by_hand_from_events_and_do_one_batch(mode):
    learn = getattr(learner(), f'to_{mode}')()
    learn.create_opt(); learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ == 'Recorder'])
    seen = []
    learn.add_cb(At('before_backward', lambda l: seen.append(float(l.loss_grad / l.loss)), 20))
    learn.training, learn.iter, learn.pct_train, learn.n_iter, learn.n_epoch, learn.train_iter = True, 0, 0., 1, 1, 0
    before = params(learn)
    learn._split(learn.dls.one_batch())
    learn('before_batch'); learn._do_one_batch(); learn('after_batch')
    assert seen == [65536. if mode == 'fp16' else 1.]
    if mode == 'bf16': assert not same(params(learn), before)
