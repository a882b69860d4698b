"The callback in fastai's loop: the same numbers as a hand-written loop, and what each event promises."
from collections import OrderedDict, namedtuple

import pytest, torch
from fastai.callback import fp16
from fastai.callback.core import CancelBatchException, CancelStepException
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation, GradientClip
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from fastxtend_amp import AMPMode
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
    alone, other = run(torch.autocast('cpu', enabled=False)), lambda: torch.autocast('cpu', dtype=torch.float16)
    assert same(run(torch.autocast('cpu', dtype=torch.bfloat16)), alone)
    assert same(run(other()), alone) and same(run(other(), before=True), alone)
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
    in_fp32 = {True: lambda l: None}.get(then is test_an_unfinished_accumulation_is_kept_as_in_fp32, then)
    expected = unfinished(None, then=lambda l: in_fp32(l) and None)
    if expected.precision is not None: expected = unfinished(None)
    for a, b in zip(plain_grads(expected), plain_grads(unfinished(mixed('fp16'), then=then))):
        torch.testing.assert_close(b, a, rtol=.05, atol=.05)
