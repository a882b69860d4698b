"The callback in fastai's loop: the same numbers as a hand-written loop, and what each event promises."
import re
from collections import OrderedDict, namedtuple

import pytest, torch
import torch.distributed as dist
from fastai.callback import fp16
from fastai.callback.core import CancelBatchException, CancelStepException
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation, GradientClip
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from fastxtend_amp import AMPMode
from fastxtend_amp.compat import AutocastState
from helpers import *

MODES = pytest.mark.parametrize('mode', ['fp16', 'bf16'])
SCALING = dict(init_scale=2.**20, growth_interval=3)             # overflows at the start, and each time it has grown


def pairs():
    "Each two of mode, optimizer, accumulation and clipping together at least once."
    for i, opt in enumerate(OPTIMIZERS):
        for mode, flip in (('fp16', 0), ('bf16', 1)):
            yield mode, opt, 8 if i % 2 ^ flip else None, .5 if i // 2 % 2 ^ flip else None


# -- the numbers

@pytest.mark.parametrize('mode, opt, n_acc, clip', pairs())
def test_same_numbers_as_a_handwritten_loop(mode, opt, n_acc, clip):
    scaling, losses = SCALING if mode == 'fp16' else {}, []
    cbs = ([GradientAccumulation(n_acc)] if n_acc else []) + ([GradientClip(clip)] if clip else [])
    learn = learner(opt_func=OPTIMIZERS[opt], cbs=[MixedPrecision(mode, **scaling), *cbs])
    learn.add_cb(At('after_batch', lambda l: l.training and losses.append(l.loss.item()), order=40))
    learn.fit(3, .01)
    model, opt, scaler, expected = handwritten(mode, OPTIMIZERS[opt], 3, .01, n_acc, clip, **scaling)
    assert losses == expected
    assert same(params(learn), list(model.parameters())) and same_state(opt_state(learn.opt), opt_state(opt))
    cb = learn.mixed_precision
    if mode == 'bf16': assert (cb.scales, cb.n_skipped, cb.skipped, cb.state_dict()) == ([], 0, False, {})
    else:
        assert 0 < cb.n_skipped < len(cb.scales) == (9 if n_acc else 18)
        assert cb.state_dict() == scaler.state_dict() and cb.scale == scaler.get_scale()


@MODES
def test_forward_and_loss_run_in_low_precision_and_the_rest_in_fp32(mode):
    dtype, seen = AMPMode(mode).dtype, []
    class Loss(nn.Module):
        def forward(self, pred, targ):
            seen.append(('pred', pred.dtype, torch.is_autocast_enabled('cpu')))
            return (pred.T @ targ).mean()                        # a loss that multiplies matrices
    learn = learner(loss_func=Loss(), cbs=mixed(mode, init_scale=8.) if mode == 'fp16' else mixed(mode))
    for layer in (learn.model[0], learn.model[3]):
        layer.register_forward_hook(lambda m, i, o: seen.append(('layer', o.dtype, m.training)))
    for when in ('after_batch', 'before_backward'):
        learn.add_cb(At(when, lambda l: seen.append(
            ('loss', l.loss.dtype, l.loss_grad.dtype, torch.is_autocast_enabled('cpu'))), order=40))
    learn.fit(1, .01)
    assert set(seen) == {('pred', torch.float32, True), ('layer', dtype, True), ('layer', dtype, False),
                         ('loss', torch.float32, torch.float32, False)}
    assert learn.get_preds()[0].dtype == torch.float32 and len(learn.validate()) == 1


Pair = namedtuple('Pair', 'a b')
class Output(OrderedDict):
    "A model output as Hugging Face's: a mapping whose items are attributes too."
    def __setitem__(self, k, v): super().__setitem__(k, v); super().__setattr__(k, v)


def test_predictions_keep_their_structure():
    class Model(nn.Module):
        def __init__(self): super().__init__(); self.lin = nn.Linear(6, 1)
        def forward(self, x):
            out, y = Output(), self.lin(x)
            out['logits'], out['extra'] = y, Pair([y, None], ('text', 3, y.double()))
            return out
    seen = []
    def loss(pred, targ): seen.append(pred); return nn.functional.mse_loss(pred['logits'], targ)
    learner(Model(), loss_func=loss).to_bf16().fit(1)
    for out in seen:
        assert type(out) is Output and out.logits is out['logits'] and out.logits.dtype == torch.float32
        assert type(out['extra']) is Pair and out['extra'].a[0].dtype == torch.float32 and out['extra'].a[1] is None
        assert out['extra'].b[:2] == ('text', 3) and out['extra'].b[2].dtype == torch.float64


class Quantized(TwoTensor):
    "A weight with the operators that training needs and no norm, as quantized weights are."
    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if 'vector_norm' in str(func): raise NotImplementedError(str(func))
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize('kind', [TwoTensor, Quantized])
def test_weights_that_are_wrappers_around_tensors_train_as_plain_ones(kind):
    plain, model = learner().to_bf16(), mlp()
    for m in model.modules():                                    # all of them: an operator that gets one runs twice
        for name, p in list(m.named_parameters(recurse=False)):
            setattr(m, name, nn.Parameter(kind(p.detach().clone(), p.detach().clone())))
    learn = learner(model).to_bf16()
    for l in (plain, learn): l.fit(2, .01)
    assert {type(p.data) for p in learn.model.parameters()} == {kind}
    assert same(params(plain), [p.a for p in learn.model.parameters()])


@MODES
def test_a_loss_that_is_a_dtensor(mode):
    from torch.distributed.tensor import DTensor
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, kinds = dist.init_device_mesh('cpu', (1,)), set()
        def squared(pred, target): return (pred - target).pow(2).mean()   # 2.9 has no sharding strategy for mse_loss
        def distributed(*tensors): return squared(*[DTensor.from_local(t.as_subclass(torch.Tensor), mesh) for t in tensors])
        plain, learn = (learner(loss_func=f, cbs=mixed(mode)) for f in (squared, distributed))
        learn.add_cb(At('after_loss', lambda l: kinds.add(type(l.loss)), 50))
        for l in (plain, learn): l.fit(2, .01)
    finally: dist.destroy_process_group()
    assert kinds == {DTensor} and same(params(plain), params(learn))


def test_gradients_survive_a_forward_under_no_grad():
    class Twice(nn.Module):
        def __init__(self, how): super().__init__(); self.lin, self.out, self.how = nn.Linear(6, 4), nn.Linear(4, 1), how
        def forward(self, x):
            with self.how(): target = self.out(self.lin(x)).mean()
            with torch.no_grad(), torch.enable_grad(): y = self.lin(x)
            return self.out(y) + 0 * float(target)
    for how in (torch.no_grad, torch.inference_mode):
        learn, grads = learner(Twice(how)).to_bf16(), []
        learn.add_cb(At('after_backward', lambda l: grads.append(all(g is not None and bool(g.any()) for g in plain_grads(l))), 40))
        learn.fit(1, .01)
        assert grads == [True] * 6


def test_a_fit_inside_the_users_own_autocast_uses_the_weights_of_each_batch():
    def run(context, before=False):
        learn = learner(linear()).to_bf16()
        with context:
            if before: learn.model(torch.ones(2, 6))
            learn.fit(2, .05)
        return params(learn)
    def fp16(): return torch.autocast('cpu', dtype=torch.float16)
    assert same(run(torch.autocast('cpu', dtype=torch.bfloat16)), run(torch.autocast('cpu', enabled=False)))
    assert same(run(fp16(), before=True), run(fp16()))
    assert autocast_state() == (False, torch.bfloat16, True, 0)


# -- gradients

@pytest.mark.parametrize('opt', ['adamw', 'fused adamw'])
def test_callbacks_of_an_order_above_10_see_true_gradients_in_before_step(opt):
    def norms(cb, order):
        learn, found = learner(cbs=cb, opt_func=OPTIMIZERS[opt]), []
        learn.add_cb(At('before_step', lambda l: found.append(nn.utils.get_total_norm(plain_grads(l)).item()), order))
        learn.fit(1, 1e-4)
        return found
    fp32 = norms(None, 11)
    assert norms(mixed('fp16'), 11) == pytest.approx(fp32, rel=.02)
    assert norms(mixed('fp16'), 9) == pytest.approx([256 * n for n in fp32], rel=.02)      # as with fastai's own


@pytest.mark.parametrize('opt', OPTIMIZERS)
def test_a_skipped_step_changes_nothing(opt):
    learn, states = learner(opt_func=OPTIMIZERS[opt]).to_fp16(init_scale=1e30), []
    def remember(l): states.append((params(l), opt_state(l.opt), l.mixed_precision.skipped))
    learn.add_cbs([At('before_backward', remember, 40), At('after_step', remember, 5),
                   At('after_batch', lambda l: l.training and remember(l), 70)])
    learn.fit(1, .01)
    cb = learn.mixed_precision
    assert cb.n_skipped == len(cb.scales) == 6 and cb.scales[1] == cb.scales[0] / 2
    for before, *after in zip(*[iter(states)] * 3):
        for p, s, skipped in after: assert skipped and same(before[0], p) and same_state(before[1], s)


def unfinished(cb, n_fits=1, then=noop):
    "A learner after fits that end in the middle of an accumulation."
    learn = learner(linear(), cbs=[*([cb] if cb else []), GradientAccumulation(1000)])
    for _ in range(n_fits): learn.fit(1, .01)
    then(learn)
    return learn


def own_backward(learn):
    x, y = next(iter(learn.dls.train))
    nn.functional.mse_loss(learn.model(x), y).backward()


@pytest.mark.parametrize('then', [noop, lambda l: l.fit(1, .01), lambda l: l.to_fp32().fit(1, .01), lambda l: l.to_bf16(),
                                  lambda l: (own_backward(l), l.fit(1, .01))], ids=['end', 'fit', 'to_fp32', 'to_bf16', 'own'])
def test_an_unfinished_accumulation_is_kept_as_in_fp32(then):
    for a, b in zip(plain_grads(unfinished(None, then=then)), plain_grads(unfinished(mixed('fp16'), then=then))):
        torch.testing.assert_close(b, a, rtol=.05, atol=.05)


def test_an_unfinished_accumulation_that_is_not_finite_is_dropped_with_a_warning():
    with pytest.warns(UserWarning, match='unfinished are not finite; they were dropped.\nThe loss scale is'):
        learn = unfinished(mixed('fp16', init_scale=1e30))
    assert not any(g.any() for g in plain_grads(learn) if g is not None)


def test_a_step_called_off_by_another_callback_leaves_scale_and_tracker_alone():
    learn, trackers, grads = learner().to_fp16(init_scale=1024., growth_interval=4), [], []
    def cancel(l):
        if l.iter % 2: raise CancelStepException
    def note(l):
        if not l.training: return
        trackers.append(l.scaler.state_dict()['_growth_tracker'])
        grads.append(any(g.any() for g in plain_grads(l) if g is not None))
    learn.add_cbs([At('before_step', cancel, order=20), At('after_batch', note, 40)])
    learn.fit(1, .01)
    assert trackers == [1, 1, 2, 2, 3, 3] and not any(grads) and learn.precision.scales == [1024.] * 3


def test_cancel_batch_after_unscaling_accumulates_as_in_fp32():
    def run(cb):
        learn, grads = learner(linear(), cbs=cb), []
        def further(l):
            grads.extend(plain_grads(l))
            if l.iter % 3 != 2: raise CancelBatchException
        learn.add_cb(At('before_step', further, order=20))
        learn.fit(1, .01)
        return grads + params(learn)
    for a, b in zip(run(None), run(mixed('fp16'))): torch.testing.assert_close(a, b, rtol=.01, atol=.01)


def test_parameters_outside_the_optimizer_are_told_in_fp16_and_keep_no_scaled_gradients():
    learn = learner(splitter=lambda m: [list(m[0].parameters())]).to_fp16(init_scale=256.)
    with pytest.warns(UserWarning, match="(?s)4 parameters to be trained are not in `learn.opt`, such as '1.weight'.*loss scale"):
        learn.fit(1, .01)
    assert all(p.grad is None for p in learn.model[1:].parameters())


def test_a_step_without_gradients_is_no_step():
    class Unused(nn.Module):
        def __init__(self): super().__init__(); self.used, self.unused = nn.Linear(6, 1), nn.Linear(6, 1)
        def forward(self, x): return self.used(x)
    learn = learner(Unused(), splitter=lambda m: [list(m.unused.parameters())]).to_fp16()
    learn.fit(1, .01)
    assert learn.precision.scales == [] and learn.precision.scale == 65536.


# -- the scale

@pytest.mark.parametrize('scale, skipped, words', [
    (1e30, 6, 'No optimizer step was taken in this fit: all 6 were skipped.*Train longer, .*learn.precision_report'),
    (2.**20, 5, r'5 of the 6 optimizer steps of this fit were skipped.*\n.*loss scale is 32768 now.\n.*`init_scale=32768`'),
    (2.**15, 2, None)])
def test_a_fit_that_skipped_most_steps_says_so_with_the_scale_to_start_from(scale, skipped, words):
    learn = learner().to_fp16(init_scale=scale)
    texts = told(lambda: learn.fit(1, .01), 'skipped')
    assert learn.precision.n_skipped == skipped and len(texts) == (words is not None)
    if words: assert re.search(words, texts[0], re.S), texts
    if scale == 2.**20: assert not told(lambda: learner().to_fp16(init_scale=32768.).fit(1, .01), 'skipped')


def test_static_scale_and_no_scaling():
    learn = learner().to_fp16(loss_scale=2.**30)
    texts = told(lambda: learn.fit(1, .01), 'No optimizer step')
    assert set(learn.precision.scales) == {2.**30} and learn.precision.n_skipped == 6 and learn.precision.static_scale
    assert len(texts) == 1 and '`loss_scale=1.67772e+07`' in texts[0] and 'Train longer' not in texts[0]
    learn = learner().to_fp16(loss_scale=512.)
    learn.fit(1, .01)
    assert set(learn.precision.scales) == {512.} and learn.precision.n_skipped == 0
    learn, seen = learner().to_fp16(enabled=False), []
    learn.add_cb(At('before_step', lambda l: seen.append(l.scaler.is_enabled()), 40))
    learn.fit(1, .01)
    assert not any(seen) and (learn.precision.scales, learn.precision.scale) == ([], None)


def test_a_scaler_of_the_users_own():
    class Slow(torch.amp.GradScaler):
        def update(self, new_scale=None): super().update(self.get_scale() / 4 if new_scale is None else new_scale)
    scaler, seen = Slow('cpu', init_scale=1024.), []
    learn = learner().to_fp16(scaler=scaler)
    learn.add_cb(At('before_step', lambda l: seen.append((l.scaler is scaler, l.scaler.get_scale())), 40))
    learn.fit(1, .01)
    assert seen == [(True, 1024. / 4**i) for i in range(6)] and learn.precision.scales == [scale for _, scale in seen]


def test_lr_find_leaves_scale_and_history_alone(tmp_path):
    learn = learner(path=tmp_path).to_fp16(**SCALING)
    learn.fit(1, .01)
    cb = learn.precision
    before = cb.scales, cb.state_dict(), cb.skipped
    learn.lr_find(show_plot=False, num_it=30, start_lr=1e-2, end_lr=30., stop_div=False)
    assert (cb.scales, cb.state_dict(), cb.skipped) == before
    def interrupt(l):
        if l.train_iter == 7: raise KeyboardInterrupt
    interrupting = At('after_backward', interrupt, 20)
    learn.add_cb(interrupting)
    with pytest.raises(KeyboardInterrupt): learn.lr_find(show_plot=False, num_it=30, stop_div=False, suggest_funcs=())
    assert (cb.scales, cb.state_dict()) == before[:2]
    learn.remove_cb(interrupting).fit(1, .01)
    assert len(cb.scales) == 12 and cb.scales[6] == before[1]['scale']


def test_plot_scales():
    import matplotlib.pyplot as plt
    learn = learner().to_fp16(**SCALING)
    learn.fit(2, .01)
    ax, cb = learn.precision.plot_scales(), learn.precision
    assert list(ax.lines[0].get_ydata()) == cb.scales and len(ax.lines[1].get_xdata()) == cb.n_skipped
    assert ax.get_title() == 'Loss scale in training' and MixedPrecision('bf16').plot_scales().texts
    plt.close('all')


# -- what is refused when a fit starts

def test_parameters_in_half_precision():
    learn, drawn = learner(mlp().half()).to_fp16(), []
    learn.add_cb(At('before_batch', drawn.append, -50))
    with pytest.raises(ValueError, match=r"(?s)but 6 to be trained are fp16, such as '0.weight'.*model\.float\(\)"): learn.fit(1)
    assert not drawn and learn.scaler is None
    learn.model.float()
    learn.fit(1)
    with pytest.warns(UserWarning, match=r"(?s)6 parameters .* such as '0.weight'.*rounded away.*model\.float\(\)"):
        learner(mlp().bfloat16()).to_bf16().fit(1)


def test_an_optimizer_that_needs_a_closure():
    lbfgs = partial(OptimWrapper, opt=torch.optim.LBFGS)
    with pytest.raises(ValueError, match='(?s)LBFGS needs a closure.*to_bf16'): learner(opt_func=lbfgs).to_fp16().fit(1)
    with pytest.raises(TypeError, match='closure'): learner(opt_func=lbfgs).to_bf16().fit(1)        # as in fp32


def test_two_precision_callbacks():
    learn = learner().to_bf16()
    with pytest.raises(ValueError, match=r"several precision callbacks: .*MixedPrecision\('fp16', scale=65536\)"):
        learn.fit(1, cbs=MixedPrecision('fp16'))
    def fail(l): raise RuntimeError('boom')
    learn.add_cb(At('after_pred', fail, 20))                     # what is left is as if nothing had been tried
    with AutocastState('cpu'):
        before = autocast_state()
        with pytest.raises(RuntimeError, match='boom'): learn.fit(1)
        assert autocast_state() == before


@pytest.mark.parametrize('mode, kwargs, what', [('bf16', {}, 'bf16'), ('fp16', dict(fp32_modules='3'), 'fp32_modules')])
def test_data_parallel_that_would_not_compute_in_it(mode, kwargs, what):
    model = nn.DataParallel(mlp())
    model.device_ids = [0, 1]                                    # as with two GPUs
    with pytest.raises(ValueError, match=f'{what} cannot be used with nn.DataParallel.*\nUse DistributedDataParallel'):
        learner(model, cbs=mixed(mode, **kwargs)).fit(1)


# -- in fastai

def test_it_stands_in_for_fastais_callback():
    cb = MixedPrecision()
    assert isinstance(cb, fp16.MixedPrecision) and (cb.name, cb.order) == ('mixed_precision', 10)
    assert cb.amp_mode is cb.mode is AMPMode.FP16
    class Model(nn.Sequential): mode, scales, scaler, skipped, autocast = range(5)
    assert not told(lambda: learner(Model(nn.Linear(6, 1))).to_bf16().fit(1), 'shadowing')


def test_a_callback_for_one_fit():
    learn, dtypes = learner(), set()
    learn.model[0].register_forward_hook(lambda m, i, o: dtypes.add(o.dtype))
    learn.fit(1, cbs=MixedPrecision('bf16'))
    assert dtypes == {torch.bfloat16} and not {'_with_events', 'scaler', 'mixed_precision'} & vars(learn).keys()


def test_it_lists_its_own_names_and_shows_mode_and_scale():
    learn = learner().to_fp16(init_scale=1024.)
    assert 'plot_scales' in dir(learn.precision) and 'dls' not in dir(learn.precision)
    assert repr(learn.precision) == "MixedPrecision('fp16', scale=1024)" and learn.precision.scale == 1024.
    assert repr(learner().to_bf16().precision) == "MixedPrecision('bf16')" and learner().to_bf16().precision.scale is None


def test_advice_names_every_argument_that_is_not_the_default():
    cb = learner().to_fp16(init_scale=1024., fp32_modules=nn.BatchNorm1d, max_skips=4).precision
    assert cb.as_call() == "learn.to_fp16(init_scale=1024.0, fp32_modules=['1'], max_skips=4)"
    assert cb.as_call(fp32_modules=['1', '3']) == "learn.to_fp16(init_scale=1024.0, fp32_modules=['1', '3'], max_skips=4)"
    assert cb.as_call(amp_mode='bf16') == "learn.to_bf16(fp32_modules=['1'], max_skips=4)"
    assert learner().to_amp(loss_scale=8.).precision.as_call() == 'learn.to_amp(loss_scale=8.0)'
