"Loops that are not fastai's own: two forward passes, custom loops, wrappers, switches in mid-batch, threads."
import copy, pickle, threading

import pytest, torch
from torch import nn

from fastxtend_amp import AMPMode, MixedPrecision
from helpers import *


# -- a batch with two forward passes

class TwoSteps(Learner):
    "Sharpness-aware minimization: climbs along the gradient, takes the gradient there, steps from where it was."
    def _do_one_batch(self):
        super_step, self._step = self._step, noop                # the first backward pass takes no step
        try:
            self.pred = self.model(*self.xb); self('after_pred')
            self.loss_grad = self.loss_func(self.pred, *self.yb); self.loss = self.loss_grad.clone(); self('after_loss')
            if not self.training: return
            self('before_backward'); self._backward()
        finally: self._step = super_step
        params = list(self.model.parameters())
        with torch.no_grad():
            climbs = [p.grad.sign() * .05 for p in params]
            for p, c in zip(params, climbs): p.add_(c)
        self.opt.zero_grad()
        self.loss_grad = self.loss_func(self.model(*self.xb), *self.yb)
        self('before_backward'); self._backward()
        with torch.no_grad():
            for p, c in zip(params, climbs): p.sub_(c)
        self._with_events(self._step, 'step', core.CancelStepException)
        self.opt.zero_grad()


from fastai.callback import core  # noqa: E402  after the star import of helpers


def two_steps_by_hand(mode, n_epoch=2, lr=.01, scale=256.):
    learn = learner(opt_func=OPTIMIZERS['sgd']); learn.create_opt(); learn.opt.set_hypers(lr=lr)
    model, opt, scaler, dtype = learn.model, learn.opt, torch.amp.GradScaler('cpu', scale, enabled=mode == 'fp16'), AMPMode(mode).dtype
    params = list(model.parameters())
    def backward(xb, yb):
        with torch.autocast('cpu', dtype=dtype): pred = model(xb).float()
        scaler.scale(nn.functional.mse_loss(pred, yb)).backward()
    for _ in range(n_epoch):
        model.train()
        for xb, yb in learn.dls.train:
            backward(xb, yb)
            with torch.no_grad():
                climbs = [p.grad.sign() * .05 for p in params]
                for p, c in zip(params, climbs): p.add_(c)
            opt.zero_grad(); backward(xb, yb)
            with torch.no_grad():
                for p, c in zip(params, climbs): p.sub_(c)
            scaler.unscale_(opt); scaler.step(opt); scaler.update(); opt.zero_grad()
    return list(model.parameters())


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_every_forward_of_a_batch_runs_in_low_precision(mode):
    learn, dtypes, preds = learner(cls=TwoSteps, opt_func=OPTIMIZERS['sgd'], cbs=MixedPrecision(mode, init_scale=256.)), [], set()
    learn.model[0].register_forward_hook(lambda m, i, o: dtypes.append((m.training, o.dtype)))
    loss = learn.loss_func
    learn.loss_func = lambda pred, y: (preds.add(pred.dtype), loss(pred, y))[1]
    learn.add_cb(At('after_batch', lambda l: dtypes.append(torch.is_autocast_enabled('cpu')), 40))
    before = autocast_state()
    learn.fit(2, .01)
    low = AMPMode(mode).dtype
    assert dtypes.count((True, low)) == 2 * 12 and set(dtypes) == {(True, low), (False, low), False} and preds == {torch.float32}
    assert autocast_state() == before and 'forward' not in learn.model.__dict__
    assert same(params(learn), two_steps_by_hand(mode))


def test_copies_of_the_model_made_in_a_batch_are_plain():
    learn, copies = learner().to_bf16(), []
    def copy_model(l):
        if l.training: copies.append((copy.deepcopy(l.model), pickle.dumps(l.model)))
    for event in ('after_loss', 'before_step', 'after_step'): learn.add_cb(At(event, copy_model, 40))
    learn.fit(1, .01)
    x = torch.randn(3, 6)
    for twin, pickled in copies[:3]:
        assert b'fastxtend_amp' not in pickled
        for m in (twin, pickle.loads(pickled)):
            assert torch.equal(m.eval()(x), nn.Sequential(*m).eval()(x)) and m.forward.__self__ is m
    assert len(copies) == 18


# -- custom loops

@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_a_custom_loop_without_fit(mode):
    class Fails(nn.Module):
        def __init__(self): super().__init__(); self.lin = nn.Linear(6, 1)
        def forward(self, x): self.lin(x); raise RuntimeError('boom')
    learn = learner(Fails(), cbs=MixedPrecision(mode)); learn.create_opt()
    before = autocast_state()
    b = next(iter(learn.dls.train))
    for _ in range(2):
        with pytest.raises(RuntimeError, match='boom'): learn.one_batch(0, b)
        assert autocast_state() == before
    learn.to_fp32()
    assert not {'one_batch', '_with_events', 'export', 'scaler'} & learn.__dict__.keys()


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_a_custom_loop_trains_as_fit_does(mode):
    fitted = learner(cbs=MixedPrecision(mode, init_scale=2.**18)); fitted.fit(1, .01)
    learn = learner(cbs=MixedPrecision(mode, init_scale=2.**18)); learn.create_opt()
    learn.opt.set_hypers(lr=.01)
    if learn.wd is not None: learn.opt.set_hypers(wd=learn.wd)
    learn.model.train(); learn.training = True; learn.dl = learn.dls.train
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ in ('TrainEvalCallback', 'Recorder')])
    for i, b in enumerate(learn.dls.train): learn.one_batch(i, b)
    assert same(params(learn), params(fitted)) and learn.precision.scales == fitted.precision.scales


# -- wrappers

@pytest.mark.parametrize('name', ['one_batch', '_with_events'])
def test_a_wrapper_put_on_during_a_fit_outlives_the_callback(name):
    learn, calls = learner().to_bf16(), []
    def wrap(l):
        original = getattr(l, name)
        setattr(l, name, lambda *a, **k: (calls.append(1), original(*a, **k))[1])
    learn.add_cb(At('before_epoch', wrap)); learn.fit(1, .01)
    learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, At)])
    learn.to_fp32(); n = len(calls); learn.fit(1, .01)
    assert len(calls) > n > 0 and autocast_state()[0] is False
    learn.to_fp16(init_scale=256.).fit(1, .01)
    assert learn.precision.n_skipped == 0 and len(learn.precision.scales) == 6


# -- switching in the middle of a batch

SWITCHES = {'to_fp16': lambda l: l.to_fp16(init_scale=256.), 'to_bf16': lambda l: l.to_bf16(), 'to_fp32': lambda l: l.to_fp32(),
            'to_half_weights': lambda l: l.to_half_weights()}
DTYPES = {'to_fp16': torch.float16, 'to_bf16': torch.bfloat16, 'to_fp32': torch.float32, 'to_half_weights': torch.bfloat16}
EVENTS = ['before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward', 'before_step', 'after_step', 'after_batch']


@pytest.mark.parametrize('order', [9, 40])
@pytest.mark.parametrize('event', EVENTS)
@pytest.mark.parametrize('to', SWITCHES)
@pytest.mark.parametrize('start', ['to_fp32', 'to_fp16', 'to_bf16'])
def test_a_switch_in_mid_batch_takes_effect_from_the_next(start, to, event, order):
    learn, dtypes, scaled = learner(), [], []
    SWITCHES[start](learn)
    learn.model[0].register_forward_hook(lambda m, i, o: dtypes.append(o.dtype) if m.training else None)
    class Once:
        n = 0
        def __call__(self, l):
            if not l.training: return
            self.n += 1
            if self.n == 3: SWITCHES[to](l)
    learn.add_cb(At(event, Once(), order))
    learn.add_cb(At('before_step', lambda l: scaled.append(max(p.grad.abs().max().item() for p in l.model.parameters())), 41))
    learn.fit(1, 1e-3)
    assert dtypes == [DTYPES[start]] * 3 + [DTYPES[to]] * 3
    assert max(scaled) < 64. and len(scaled) == 6                # true gradients at every step
    assert autocast_state()[0] is False and all(p.isfinite().all() for p in learn.model.parameters())
    learn.fit(1, 1e-3)
    assert dtypes[6:] == [DTYPES[to]] * 6


def test_remove_cb_in_mid_batch_is_refused_with_what_to_do():
    learn = learner().to_fp16()
    learn.add_cb(At('before_backward', lambda l: l.remove_cb(l.mixed_precision), 40))
    with pytest.raises(RuntimeError, match='(?s)middle of a batch.*to_fp32.*after_batch'): learn.fit(1)
    assert learn.precision is not None and autocast_state()[0] is False


# -- threads

def test_two_learners_that_train_in_two_threads():
    def train(mode): learn = learner(cbs=MixedPrecision(mode, init_scale=2.**18)); learn.fit(6, .01); return params(learn), learn.precision.scales
    alone = {mode: train(mode) for mode in ('fp16', 'bf16')}
    together, errors = {}, []
    def work(mode):
        try: together[mode] = train(mode)
        except BaseException as e: errors.append(e)
    torch.manual_seed(0)
    threads = [threading.Thread(target=work, args=(mode,)) for mode in alone]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not errors
    for mode in alone: assert together[mode][1] == alone[mode][1]


# -- found by review

def test_the_users_own_autocast_counts_after_the_loss():
    learn, dtypes = learner().to_bf16(), []
    def teacher(l):
        with torch.no_grad(), torch.autocast('cpu', enabled=False): dtypes.append(l.model[0](l.xb[0]).dtype)
        with torch.no_grad(), torch.autocast('cpu', enabled=False): l.model(l.xb[0])
    learn.model[3].register_forward_hook(lambda m, i, o: dtypes.append((torch.is_autocast_enabled('cpu'), o.dtype)))
    learn.add_cb(At('after_loss', lambda l: l.training and teacher(l), 40))
    learn.fit(1, .01)
    assert dtypes.count((False, torch.float32)) == 6 and dtypes.count((True, torch.bfloat16)) == 6 + 2


def test_a_compiled_model_with_two_forward_passes_is_compiled_once_for_each():
    from torch._dynamo.testing import CompileCounterWithBackend
    torch._dynamo.reset()
    learn, counter = learner(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)), cls=TwoSteps, cbs=MixedPrecision('bf16')), CompileCounterWithBackend('eager')
    learn.model.compile(backend=counter)
    learn.fit(3, .01)
    assert counter.frame_count <= 3                              # first and second forward, and validation
    torch._dynamo.reset()


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_a_validation_in_after_fit_keeps_an_unfinished_accumulation(mode):
    from fastai.callback.training import GradientAccumulation
    def run(cb):
        learn = learner(nn.Linear(6, 1), cbs=[*([cb] if cb else []), GradientAccumulation(1000)])
        with torch.no_grad(): [p.fill_(.1) for p in learn.model.parameters()]
        learn.add_cb(At('after_fit', Busy(), 0))
        learn.fit(1, .01)
        return [p.grad.clone() for p in learn.model.parameters()]
    for a, b in zip(run(None), run(MixedPrecision(mode, init_scale=1024.))): torch.testing.assert_close(b, a, rtol=.05, atol=.05)


class Busy:
    now = False
    def __call__(self, learn):
        if self.now: return
        self.now = True
        learn.validate()
        self.now = False


def test_a_loop_that_sets_a_loss_alone():
    class Own(Learner):
        def _do_one_batch(self):
            self.pred = self.model(*self.xb); self('after_pred')
            self.loss = self.loss_func(self.pred, *self.yb); self('after_loss')
            if self.training: self.loss.backward(); self._with_events(self._step, 'step', core.CancelStepException); self.opt.zero_grad()
    learn = learner(cls=Own).to_bf16(); learn.fit(1, .01)
    assert len(learn.recorder.losses) == 6


def test_parameters_outside_the_optimizer_are_told_in_fp16():
    learn = learner(splitter=lambda m: [list(m[0].parameters())]).to_fp16(init_scale=256.)
    with pytest.warns(UserWarning, match="(?s)4 parameters to be trained are not in `learn.opt`, such as '1.weight'.*loss scale"): learn.fit(1, .01)
