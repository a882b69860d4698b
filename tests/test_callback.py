"The callback in fastai's loop: the same numbers as a hand-written loop, and what each event promises."
import pickle, warnings
from collections import OrderedDict, namedtuple

import pytest, torch
from fastai.callback import fp16
from fastai.callback.core import CancelBatchException, CancelStepException
from fastai.callback.training import GradientAccumulation, GradientClip
from torch import nn

from fastxtend_amp import AMPMode, MixedPrecision
from helpers import *

SCALING = dict(init_scale=2.**20, growth_interval=3)  # overflows at the start, and again each time it has grown


def on(mode, **kwargs): return MixedPrecision(mode, **(SCALING if mode == 'fp16' else {}), **kwargs)


@pytest.mark.parametrize('accumulate_and_clip', [(None, None), (8, None), (None, .5), (8, .5)], ids=str)
@pytest.mark.parametrize('opt', OPTIMIZERS)
@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_same_numbers_as_a_handwritten_loop(mode, opt, accumulate_and_clip):
    n_acc, clip = accumulate_and_clip
    cbs = ([GradientAccumulation(n_acc)] if n_acc else []) + ([GradientClip(clip)] if clip else [])
    learn = learner(opt_func=OPTIMIZERS[opt], cbs=[on(mode), *cbs])
    losses = []
    learn.add_cb(At('after_batch', lambda l: l.training and losses.append(l.loss.item()), order=40))
    learn.fit(3, .01)
    model, opt, scaler, expected = handwritten(mode, OPTIMIZERS[opt], 3, .01, n_acc, clip, **(SCALING if mode == 'fp16' else {}))
    assert losses == expected
    assert same(params(learn), list(model.parameters())) and same_state(opt_state(learn.opt), opt_state(opt))
    cb = learn.mixed_precision
    if mode == 'bf16': assert (cb.scales, cb.n_skipped, cb.skipped) == ([], 0, False)
    else:
        assert 0 < cb.n_skipped < len(cb.scales) == (9 if n_acc else 18)
        assert cb.scaling.scaler.get_scale() == scaler.get_scale() and cb.scaling.scaler._get_growth_tracker() == scaler._get_growth_tracker()


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_forward_and_loss_run_in_low_precision_in_training_and_validation(mode):
    dtype, seen = AMPMode(mode).dtype, []
    class Loss(nn.Module):
        def forward(self, pred, targ):
            seen.append(('pred', pred.dtype, torch.is_autocast_enabled('cpu')))
            return (pred.T @ targ).mean()                                # a loss that multiplies matrices
    learn = learner(loss_func=Loss(), cbs=MixedPrecision(mode, **(dict(init_scale=8.) if mode == 'fp16' else {})))
    for layer in (learn.model[0], learn.model[3]): layer.register_forward_hook(lambda m, i, o: seen.append(('layer', o.dtype, m.training)))
    for when in ('after_batch', 'before_backward'):
        learn.add_cb(At(when, lambda l: seen.append(('loss', l.loss.dtype, l.loss_grad.dtype, torch.is_autocast_enabled('cpu'))), order=40))
    learn.fit(1, .01)
    assert set(seen) == {('pred', torch.float32, True), ('layer', dtype, True), ('layer', dtype, False),
                         ('loss', torch.float32, torch.float32, False)}
    assert learn.get_preds()[0].dtype == torch.float32


Pair = namedtuple('Pair', 'a b')
class Output(OrderedDict):
    "A model output as Hugging Face's: a mapping whose items are attributes too."
    def __setitem__(self, k, v): super().__setitem__(k, v); super().__setattr__(k, v)


def test_predictions_keep_their_structure():
    class Model(nn.Module):
        def __init__(self): super().__init__(); self.lin = nn.Linear(6, 1)
        def forward(self, x):
            y = self.lin(x)
            out = Output()
            out['logits'], out['extra'] = y, Pair([y, None], ('text', 3, y.double()))
            return out
    seen = []
    def loss(pred, targ): seen.append(pred); return nn.functional.mse_loss(pred['logits'], targ)
    learner(Model(), loss_func=loss).to_bf16().fit(1)
    for out in seen:
        assert type(out) is Output and out.logits is out['logits'] and out.logits.dtype == torch.float32
        assert type(out['extra']) is Pair and out['extra'].a[0].dtype == torch.float32 and out['extra'].a[1] is None
        assert out['extra'].b[:2] == ('text', 3) and out['extra'].b[2].dtype == torch.float64


@pytest.mark.parametrize('opt', OPTIMIZERS)
def test_a_skipped_step_changes_nothing(opt):
    learn, states = learner(opt_func=OPTIMIZERS[opt]).to_fp16(init_scale=1e30), []
    def remember(l): states.append((params(l), opt_state(l.opt), l.mixed_precision.skipped))
    learn.add_cbs([At('before_backward', remember, 40), At('after_step', remember, 5), At('after_batch', lambda l: l.training and remember(l), 70)])
    learn.fit(1, .01)
    cb = learn.mixed_precision
    assert cb.n_skipped == len(cb.scales) == 6 and cb.scales[:2] == [float(torch.tensor(1e30)), float(torch.tensor(.5e30))]
    for before, *after in zip(*[iter(states)] * 3):
        for p, s, skipped in after: assert skipped and same(before[0], p) and same_state(before[1], s)


def test_clipping_sees_true_gradients():
    norms = {}
    for name in ('fp32', 'fp16'):
        for fused in (False, True):
            learn = learner(cbs=MixedPrecision('fp16', init_scale=1024.) if name == 'fp16' else None, opt_func=OPTIMIZERS['fused adamw' if fused else 'adamw'])
            found = norms.setdefault((name, fused), [])
            learn.add_cb(At('before_step', lambda l: found.append(nn.utils.get_total_norm([p.grad for p in l.model.parameters()]).item()), 11))
            learn.fit(1, 1e-4)
    for fused in (False, True): assert norms['fp16', fused] == pytest.approx(norms['fp32', fused], rel=.02)


def linear():
    torch.manual_seed(0)
    return nn.Linear(6, 1)


def true_grads(learn): return [None if p.grad is None else p.grad.clone() for p in learn.model.parameters()]
def largest_grad(learn): return max(p.grad.abs().max().item() for p in learn.model.parameters() if p.grad is not None)
def no_grads(learn): return all(g is None or not g.any() for g in true_grads(learn))


def left_accumulating(**kwargs):
    "A learner after a fit that ended in the middle of an accumulation."
    learn = learner(cbs=[MixedPrecision('fp16', init_scale=1024.), GradientAccumulation(1000)], **kwargs)
    learn.fit(1, .01)
    return learn


def grads_after_an_unfinished_accumulation(cb, n_fits=1):
    learn = learner(linear(), cbs=[cb, GradientAccumulation(1000)] if cb else GradientAccumulation(1000))
    for _ in range(n_fits): learn.fit(1, .01)
    return learn, true_grads(learn)


@pytest.mark.parametrize('n_fits', [1, 2])
@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_an_unfinished_accumulation_is_kept_unscaled(mode, n_fits):
    _, expected = grads_after_an_unfinished_accumulation(None, n_fits)
    _, found = grads_after_an_unfinished_accumulation(MixedPrecision(mode, init_scale=1024.), n_fits)
    for a, b in zip(expected, found): torch.testing.assert_close(b, a, rtol=.05, atol=.05)


def test_an_accumulation_goes_on_in_another_precision():
    learn, grads = grads_after_an_unfinished_accumulation(MixedPrecision('fp16', init_scale=1024.))
    learn.to_fp32().fit(1, .01)
    for a, b in zip(grads_after_an_unfinished_accumulation(None, 2)[1], true_grads(learn)):
        torch.testing.assert_close(b, a, rtol=.05, atol=.05)


def test_gradients_of_the_users_own_backward_between_two_fits_are_added_as_in_fp32():
    def run(cb):
        learn = learner(linear(), cbs=[*([cb] if cb else []), GradientAccumulation(1000)], lr=.01)
        for _ in range(2):
            x, y = next(iter(learn.dls.train))
            nn.functional.mse_loss(learn.model(x), y).backward()
            learn.fit(1)
        return true_grads(learn)
    for a, b in zip(run(None), run(MixedPrecision('fp16', init_scale=1024.))): torch.testing.assert_close(b, a, rtol=.05, atol=.05)


def test_an_unfinished_accumulation_that_is_not_finite_is_dropped_with_a_warning():
    learn = learner(linear(), cbs=[MixedPrecision('fp16', init_scale=1e30), GradientAccumulation(1000)])
    with pytest.warns(UserWarning, match='unfinished are not finite; they were dropped'): learn.fit(1, .01)
    assert no_grads(learn)


def test_a_fit_that_took_no_step_says_so():
    learn = learner().to_fp16(init_scale=1e30)
    before = params(learn)
    with pytest.warns(UserWarning, match='No optimizer step was taken in this fit: all 6 were skipped') as told: learn.fit(1, .01)
    assert sum('No optimizer step' in str(w.message) for w in told) == 1 and 'init_scale=' in str(told[-1].message)
    assert same(params(learn)[:2], before[:2])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        learner().to_fp16(init_scale=2.**18).fit(2, .01)         # some are skipped, some are taken
    assert not [w for w in told if 'No optimizer step' in str(w.message)]


@pytest.mark.parametrize('how', ['next fit', 'to_fp32', 'to_bf16', 'remove_cb', 'removed by fastai'])
def test_scaled_gradients_never_reach_another_step(how):
    learn = learner(cbs=[MixedPrecision('fp16', init_scale=1024.), GradientAccumulation(1000)])
    class Stop(Exception): pass
    def stop(l): raise Stop('here')
    learn.add_cb(At('before_validate', stop)); at = learn.cbs[-1]
    cb = learn.mixed_precision
    cb._close = lambda *_, **__: None                             # as if it had been interrupted, too
    with pytest.raises(Stop): learn.fit(1, .01)
    del cb._close
    scaled = largest_grad(learn)
    learn.remove_cbs([at, learn.gradient_accumulation])
    if how == 'next fit':
        seen = []
        learn.add_cb(At('before_batch', lambda l: seen.append(largest_grad(l)), -5)); learn.fit(1, .01)
        assert seen[0] < scaled / 500                            # unscaled, as an unfinished accumulation is
        return
    {'to_fp32': learn.to_fp32, 'to_bf16': learn.to_bf16, 'remove_cb': lambda: learn.remove_cb(cb),
     'removed by fastai': lambda: learn.remove_cb(fp16.MixedPrecision)}[how]()
    assert 0 < largest_grad(learn) < scaled / 500


def test_cancel_step_by_another_callback():
    learn = learner().to_fp16(init_scale=1024., growth_interval=4)
    def cancel(l):
        if l.iter % 2: raise CancelStepException
    learn.add_cb(At('before_step', cancel, order=20))
    trackers, grads = [], []
    learn.add_cb(At('after_batch', lambda l: l.training and (trackers.append(l.scaler._get_growth_tracker()), grads.append(no_grads(l))), 40))
    learn.fit(1, .01)
    assert trackers == [1, 1, 2, 2, 3, 3] and all(grads) and learn.mixed_precision.scales == [1024.] * 3


def test_cancel_batch_after_unscaling_accumulates_as_in_fp32():
    def run(cb):
        learn, grads = learner(linear(), cbs=cb), []
        def further(l):
            grads.append([p.grad.clone() for p in l.model.parameters()])
            if l.iter % 3 != 2: raise CancelBatchException
        learn.add_cb(At('before_step', further, order=20))
        learn.fit(1, .01)
        return grads, params(learn)
    (fp32, p32), (half, p16) = run(None), run(MixedPrecision('fp16', init_scale=1024.))
    for a, b in zip(fp32, half):
        for x, y in zip(a, b): torch.testing.assert_close(x, y, rtol=.01, atol=.01)
    for x, y in zip(p32, p16): torch.testing.assert_close(x, y, rtol=.01, atol=1e-3)


def test_step_without_gradients_passes_through():
    class Frozen(nn.Module):
        def __init__(self): super().__init__(); self.used, self.unused = nn.Linear(6, 1), nn.Linear(6, 1)
        def forward(self, x): return self.used(x)
    learn = learner(Frozen(), splitter=lambda m: [list(m.unused.parameters())]).to_fp16()
    learn.fit(1, .01)
    assert learn.mixed_precision.scales == [] and learn.mixed_precision.scaling.scaler.get_scale() == 65536.
    assert all(p.grad is None for p in learn.model.used.parameters())      # scaled, and no optimizer would ever zero them


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
@pytest.mark.parametrize('call', ['validate', 'get_preds', 'predict'])
@pytest.mark.parametrize('event', ['after_epoch', 'before_epoch', 'after_validate', 'before_fit', 'after_fit'])
def test_inside_a_fit(mode, call, event):
    class Item:
        busy = False
        def __call__(self, l):
            if not self.busy: self.busy = True; self.run(l); self.busy = False
        def run(self, l):
            scaler = l.scaler if event not in ('before_fit', 'after_fit') else None
            {'validate': l.validate, 'get_preds': l.get_preds, 'predict': lambda: l.get_preds(dl=[b])}[call]()
            if scaler is not None: assert l.scaler is scaler
    b = next(iter(loaders().train))
    def run(extra):
        learn, dtypes = learner(cbs=on(mode)), set()
        learn.model[0].register_forward_hook(lambda m, i, o: dtypes.add(o.dtype))
        if extra: learn.add_cb(At(event, Item(), order=40 if event != 'after_fit' else 5))
        learn.fit(2, .01)
        assert dtypes == {AMPMode(mode).dtype}
        return params(learn), learn.mixed_precision.scales, learn.scaler
    plain, nested = run(False), run(True)
    assert same(plain[0], nested[0]) and plain[1:] == nested[1:]


def test_validation_inside_a_batch_keeps_autocast_on():
    learn, seen = learner().to_bf16(), []
    def validate(l):
        keep = l.training, l.xb, l.yb, l.pred, l.dl, l.iter
        l.get_preds(dl=[next(iter(l.dls.valid))], inner=True)
        l.training, l.xb, l.yb, l.pred, l.dl, l.iter = keep
        l.model.train(l.training)
        seen.append(torch.is_autocast_enabled('cpu'))
    cb = At('after_pred', lambda l: l.training and validate(l), order=40)
    learn.add_cb(cb)
    learn.fit(1, .01)
    assert seen == [True] * 6 and autocast_state()[0] is False


@pytest.mark.parametrize('to', [('to_bf16', {}), ('to_fp16', dict(init_scale=256.)), ('to_half_weights', {})], ids=lambda to: to[0])
@pytest.mark.parametrize('call', ['validate', 'get_preds', '_do_epoch_validate'])
@pytest.mark.parametrize('event', ['after_backward', 'before_step', 'after_step', 'after_batch'])
def test_validation_inside_a_batch_after_the_loss(event, call, to):
    "It changes nothing; later forward passes of the batch are in low precision still, and in fp32 after the fit."
    def run(extra):
        learn, dtypes, outputs = getattr(learner(), to[0])(**to[1]), [], []
        learn.model[0].register_forward_hook(lambda m, i, o: dtypes.append(o.dtype))
        def validate(l):
            if not l.training: return
            kept = {k: v for k, v in vars(l).items() if k in ('xb', 'yb', 'pred', 'loss', 'loss_grad', 'iter', 'n_iter', 'dl')}
            if extra: getattr(l, call)()
            vars(l).update(kept, training=True)
            with torch.no_grad(): outputs.append(l.model.eval()(l.xb[0]))
            l.model.train()
        learn.add_cb(At(event, validate, order=40))
        learn.fit(2, .01)
        assert len(outputs) == 12 and {o.dtype for o in outputs} == {torch.float32} and 'forward' not in learn.model.__dict__
        low = {'to_fp16': torch.float16}.get(to[0], torch.bfloat16)
        assert set(dtypes) == ({low} if event != 'after_batch' else {low, torch.float32})
        assert learn.model(torch.ones(2, 6)).dtype == dtypes[-1] == torch.float32
        return params(learn), outputs
    plain, nested = run(False), run(True)
    assert same(plain[0], nested[0]) and same(plain[1], nested[1])


def test_switching_precision_in_the_middle_of_a_fit():
    learn, dtypes = learner(), []
    learn.model[0].register_forward_hook(lambda m, i, o: dtypes.append(o.dtype) if m.training else None)
    switch = {1: lambda l: l.to_bf16(), 3: lambda l: l.to_fp16(init_scale=256.), 4: lambda l: l.to_fp32()}
    learn.add_cb(At('after_batch', lambda l: l.training and switch.get(l.iter, noop)(l), order=40))
    learn.fit(1, .01)
    f32, bf16, f16 = torch.float32, torch.bfloat16, torch.float16
    assert dtypes == [f32, f32, bf16, bf16, f16, f32] and autocast_state()[0] is False
    assert 'one_batch' not in learn.__dict__ and 'scaler' not in learn.__dict__


def test_removed_in_the_middle_of_a_batch():
    learn = learner().to_bf16()
    learn.add_cb(At('after_pred', lambda l: l.to_fp32(), order=40))
    learn.fit(1, .01)
    assert autocast_state()[0] is False and not hasattr(learn, 'mixed_precision')


def test_static_scale_and_no_scaling():
    learn = learner().to_fp16(loss_scale=2.**30); learn.fit(2, .01)
    cb = learn.mixed_precision
    assert set(cb.scales) == {2.**30} and cb.n_skipped == len(cb.scales) == 12
    learn = learner().to_fp16(loss_scale=512.); learn.fit(2, .01)
    assert set(learn.mixed_precision.scales) == {512.} and learn.mixed_precision.n_skipped == 0
    learn, seen = learner(cbs=MixedPrecision('fp16', enabled=False)), []
    learn.add_cb(At('before_step', lambda l: seen.append(l.scaler.is_enabled()), 40)); learn.fit(1, .01)
    assert not any(seen) and learn.mixed_precision.scales == []


def test_scaler_of_the_user():
    class Slow(torch.amp.GradScaler):
        def update(self, new_scale=None): super().update(self.get_scale() / 4 if new_scale is None else new_scale)
    scaler = Slow('cpu', init_scale=1024.)
    learn, seen = learner().to_fp16(scaler=scaler), []
    learn.add_cb(At('before_step', lambda l: seen.append(l.scaler.get_scale()), 40))
    learn.fit(1, .01)
    assert learn.mixed_precision.scaling.scaler is scaler and learn.mixed_precision.scales == seen == [1024. / 4**i for i in range(6)]


def test_scales_follow_changes_from_outside():
    learn, seen = learner().to_fp16(init_scale=64., growth_interval=2, growth_factor=1.7, backoff_factor=.3), []
    def change(l):
        if l.iter == 2: l.scaler.update(2.**40)                  # overflows
        if l.iter == 4: l.scaler.load_state_dict({**l.scaler.state_dict(), 'scale': 3., '_growth_tracker': 1})
    learn.add_cbs([At('after_batch', lambda l: l.training and l.epoch == 0 and change(l), 40),
                   At('before_backward', lambda l: seen.append(l.scaler.get_scale()), 5)])
    learn.fit(3, .01)
    seen[0] = 64.                                                # not yet on the device at the first loss
    assert learn.mixed_precision.scales == seen and learn.mixed_precision.n_skipped > 0


def test_lr_find_leaves_scale_and_history_alone():
    from fastai.callback.schedule import LRFinder  # noqa: F401  patches lr_find
    learn = learner(path='.').to_fp16(init_scale=2.**20, growth_interval=3)
    import tempfile
    with tempfile.TemporaryDirectory() as d:
        learn.path = __import__('pathlib').Path(d)
        learn.fit(1, .01)
        cb = learn.mixed_precision
        before = cb.scales, cb.scaling.scaler.state_dict(), cb.skipped
        learn.lr_find(show_plot=False, num_it=60, start_lr=1e-2, end_lr=30., stop_div=False)
        assert (cb.scales, cb.scaling.scaler.state_dict(), cb.skipped) == before
        learn.fit(1, .01)
        assert len(cb.scales) == 12


def test_plot_scales():
    import matplotlib.pyplot as plt
    learn = learner().to_fp16(**SCALING); learn.fit(2, .01)
    ax, cb = learn.mixed_precision.plot_scales(), learn.mixed_precision
    assert list(ax.lines[0].get_ydata()) == cb.scales and len(ax.lines[1].get_xdata()) == cb.n_skipped
    assert ax.get_title() == 'Loss scale in training' and MixedPrecision('bf16').plot_scales().texts
    plt.close('all')


def test_gradients_survive_a_forward_under_no_grad():
    class Twice(nn.Module):
        def __init__(self, how): super().__init__(); self.lin, self.out, self.how = nn.Linear(6, 4), nn.Linear(4, 1), how
        def forward(self, x):
            with self.how(): target = self.lin(x).mean()
            @torch.no_grad()
            def again(): return self.out(self.lin(x))
            again()
            with torch.no_grad():
                with torch.enable_grad(): y = self.lin(x)
            torch.set_grad_enabled(False); self.out(y); torch.set_grad_enabled(True)
            return self.out(y) + 0 * float(target)
    for how in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        learn, grads = learner(Twice(how)).to_bf16(), []
        learn.add_cb(At('after_backward', lambda l: grads.append([p.grad is not None and bool(p.grad.any()) for p in l.model.parameters()]), 40))
        learn.fit(1, .01)
        assert all(all(g) for g in grads) and len(grads) == 6
    assert 'inner' not in torch.no_grad.__exit__.__qualname__


def test_weight_cache_is_used_where_it_is_sound():
    from torch.utils._python_dispatch import TorchDispatchMode
    casts = []
    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default and args[0].shape == (6, 6): casts.append(1)
            return func(*args, **(kwargs or {}))
    class Shared(nn.Module):
        def __init__(self): super().__init__(); self.lin, self.out = nn.Linear(6, 6), nn.Linear(6, 1)
        def forward(self, x):
            with Count(): return self.out(self.lin(self.lin(self.lin(x))))
    learn = learner(Shared()).to_bf16(); learn.remove_cb(learn.recorder)
    learn.dls.train.bs  # bs 4: no activation has the weight's shape
    with learn.no_logging(): learn.dl = None
    learn.fit(1, .01)
    from fastxtend_amp.guard import cache_loses_gradients
    once = 3 if cache_loses_gradients() else 1                   # PyTorch 2.9 runs without the cache: once for each use
    assert len(casts) == once * (6 + 2)                          # once a batch, in training and validation


def test_fit_inside_the_users_own_autocast_does_not_use_stale_weights():
    def run(ctx):
        learn = learner(linear()).to_bf16()
        with ctx: learn.fit(2, .05)
        return learn.recorder.losses
    inside = run(torch.autocast('cpu', dtype=torch.bfloat16))
    assert [float(l) for l in inside] == pytest.approx([float(l) for l in run(torch.autocast('cpu', enabled=False))], rel=.02)
    assert autocast_state() == (False, torch.bfloat16, True, 0)


@pytest.mark.parametrize('to', ['to_bf16', 'to_half_weights'])
def test_fit_inside_the_users_own_autocast_of_another_dtype_that_ran_the_model(to):
    def run(before):
        learn = getattr(learner(linear()), to)()
        with torch.autocast('cpu', dtype=torch.float16):
            if before: learn.model(torch.ones(2, 6))
            learn.fit(2, .05)
        return params(learn)
    assert same(run(True), run(False))


def test_drop_in():
    cb = MixedPrecision()
    assert isinstance(cb, fp16.MixedPrecision) and cb.name == 'mixed_precision' and cb.order == 10
    assert cb.amp_mode is AMPMode.FP16 is cb.mode


def test_no_shadowing_warning():
    class Model(nn.Sequential): mode, scales, scaler, skipped, autocast = range(5)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        for m in ('to_fp16', 'to_bf16'): getattr(learner(Model(nn.Linear(6, 1))), m)().fit(1)
    assert not [w for w in told if 'shadowing' in str(w.message)]


def test_parameters_in_fp16_are_refused_before_a_batch_is_drawn():
    learn, drawn = learner(mlp().half()).to_fp16(), []
    learn.add_cb(At('before_batch', drawn.append, -50))
    with pytest.raises(ValueError, match=r"model\.float\(\)"): learn.fit(1)
    assert not drawn and learn.mixed_precision._fit is None
    learn.model.float(); learn.fit(1)


def test_closure_optimizer_is_refused_in_fp16_only():
    from functools import partial
    lbfgs = partial(OptimWrapper, opt=torch.optim.LBFGS)
    with pytest.raises(ValueError, match='LBFGS needs a closure'): learner(opt_func=lbfgs).to_fp16().fit(1)
    with pytest.raises(TypeError, match='closure'): learner(opt_func=lbfgs).to_bf16().fit(1)        # as in fp32


def test_two_precision_callbacks_are_refused():
    learn = learner().to_bf16()
    with pytest.raises(ValueError, match='several precision callbacks'): learn.fit(1, cbs=MixedPrecision('fp16'))
    learn.fit(1)


def test_temporary_callback():
    learn, dtypes = learner(), set()
    learn.model[0].register_forward_hook(lambda m, i, o: dtypes.add(o.dtype))
    learn.fit(1, cbs=MixedPrecision('bf16'))
    assert dtypes == {torch.bfloat16} and not {'one_batch', '_with_events', 'scaler', 'mixed_precision'} & set(learn.__dict__)


def test_scale_survives_a_change_of_device():
    cb = MixedPrecision('fp16', init_scale=2.**20)
    learn = learner(cbs=cb); learn.fit(1, .01)
    state = cb.scaling.scaler.state_dict()
    assert state['scale'] < 2.**20
    for device_type in ('cuda', 'cpu'):
        assert cb.scaling.start(device_type, True).state_dict() == state and cb.scaling.scaler._device == device_type
    again = pickle.loads(pickle.dumps(learn))
    assert again.mixed_precision.scaling.scaler.state_dict() == state
    n = len(cb.scales); again.fit(1, .01)
    assert again.mixed_precision.scales[n] == state['scale'] and len(cb.scales) == n
