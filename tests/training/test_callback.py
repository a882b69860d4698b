"The callback in fastai's loop: the same numbers as a PyTorch loop, and the state at each event."

import copy, re
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest, torch
import torch.distributed as dist
from fastai.callback import fp16
from fastai.callback.core import CancelBatchException, CancelStepException
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.torch_core import TensorImage
from fastcore.foundation import L
from torch.testing._internal.two_tensor import TwoTensor

from fastxtend_amp import AMPMode
from helpers import *

MODES = pytest.mark.parametrize('mode', ['fp16', 'bf16'])
SCALING = [
    dict(init_scale=2.0**20, growth_interval=3),  # overflows at the start, and each time it has grown
    dict(init_scale=3e6, growth_factor=1.7, backoff_factor=0.3, growth_interval=2),
    dict(init_scale=2.0**18, growth_factor=4.0, growth_interval=2),
]


def pairs():
    "Each pair of mode, optimizer, accumulation and clipping at least once."
    for i, opt in enumerate(OPTIMIZERS):
        for mode, flip in (('fp16', 0), ('bf16', 1)):
            yield mode, opt, 8 if i % 2 ^ flip else None, 0.5 if i // 2 % 2 ^ flip else None, SCALING[i % 3]


# -- the numbers


class NotingScaler(torch.amp.GradScaler):
    "Record the scale of each step."

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scales = []

    def update(self, new_scale=None):
        self.scales.append(self.get_scale())
        super().update(new_scale)


@pytest.mark.parametrize('mode, opt, n_acc, clip, scaling', pairs())
def test_same_numbers_as_a_handwritten_loop(mode, opt, n_acc, clip, scaling):
    "Losses, weights, optimizer, loss scale and its history; some steps are skipped in fp16."
    scaling, losses = scaling if mode == 'fp16' else {}, []
    cbs = ([GradientAccumulation(n_acc)] if n_acc else []) + ([GradientClip(clip)] if clip else [])
    learn = learner(opt_func=OPTIMIZERS[opt], cbs=[MixedPrecision(mode, **scaling), *cbs])
    learn.add_cb(At('after_batch', lambda l: l.training and losses.append(l.loss.item()), order=40))
    learn.fit(3, 0.01)
    model, opt, scaler, expected = handwritten(
        mode, OPTIMIZERS[opt], 3, 0.01, n_acc, clip, make=NotingScaler, **scaling
    )
    assert losses == expected
    assert same(params(learn), list(model.parameters())) and same_state(opt_state(learn.opt), opt_state(opt))
    cb = learn.precision
    if mode == 'bf16':
        assert (cb.scales, cb.n_skipped, cb.skipped, cb.state_dict()) == ([], 0, False, {})
    else:
        assert (
            cb.scales == scaler.scales and len(cb.scales) == (9 if n_acc else 18) and 0 < cb.n_skipped < len(cb.scales)
        )
        assert cb.state_dict() == scaler.state_dict() and cb.scale == scaler.get_scale()


@MODES
def test_forward_and_loss_run_in_low_precision_and_the_rest_in_fp32(mode):
    dtype, seen = AMPMode(mode).dtype, set()

    def loss(pred, targ):
        seen.add(('pred', pred.dtype, torch.is_autocast_enabled('cpu')))
        return (pred.T @ targ).mean()  # a loss that multiplies matrices

    learn = learner(loss_func=loss, cbs=mixed(mode))
    learn.model[0].register_forward_hook(lambda m, i, o: seen.add(('layer', o.dtype, m.training)))
    for when in ('after_batch', 'before_backward'):
        learn.add_cb(
            At(
                when,
                lambda l: seen.add(('loss', l.loss.dtype, l.loss_grad.dtype, torch.is_autocast_enabled('cpu'))),
                40,
            )
        )
    learn.fit(1, 0.01)
    fp32 = torch.float32
    assert seen == {('pred', fp32, True), ('layer', dtype, True), ('layer', dtype, False), ('loss', fp32, fp32, False)}
    assert learn.get_preds()[0].dtype == fp32 and len(learn.validate()) == 1


class Output(OrderedDict):
    "A model output like Hugging Face's: a mapping whose items are also attributes."

    def __setitem__(self, k, v):
        super().__setitem__(k, v)
        super().__setattr__(k, v)


class Items(dict):
    "The same as a `dict`, whose `update` does not call `__setitem__`."

    def __init__(self, **items):
        for k, v in items.items():
            self[k] = v

    def __setitem__(self, k, v):
        super().__setitem__(k, v)
        setattr(self, k, v)


@dataclass(frozen=True)
class Frozen:
    logits: torch.Tensor


Pair = namedtuple('Pair', 'a b')


class Points(tuple):
    def __new__(cls, *points):
        return super().__new__(cls, points)


NESTED = {  # how a prediction is packed, and the prediction in it
    'mapping with attributes': (lambda y: Output(logits=y), lambda o: o.logits),
    'dict with attributes': (lambda y: Items(logits=y), lambda o: o.logits),
    'list': (lambda y: [y, None], lambda o: o[0]),
    'named tuple': (lambda y: Pair([y], ('text', 3)), lambda o: o.a[0]),
    'frozen dataclass': (Frozen, lambda o: o.logits),
    "fastcore's L": (lambda y: L(y, 2), lambda o: o[0]),
    "torch's": (lambda y: y.max(1, keepdim=True), lambda o: o.values),
    'tuple of its own kind': (lambda y: Points(y, y), lambda o: o[1]),
    "fastai's": (TensorImage, lambda o: o),
    'packed': (lambda y: nn.utils.rnn.pack_sequence(list(y)), lambda o: o.data),
}


@pytest.mark.parametrize('kind', NESTED)
def test_predictions_keep_their_structure(kind):
    """The loss gets 16-bit tensors in fp32 and everything else unchanged: types of containers, fp64, integers, objects.

    The output of the model is not modified.
    """
    pack, get = NESTED[kind]
    rest, given = (torch.ones(1).double(), torch.tensor([1]), object(), {1, 2}, None), []

    class Model(nn.Linear):
        def forward(self, x):
            given.append(pack(super().forward(x)))
            return given[-1], *rest

    def loss(pred, targ):
        assert type(pred[0]) is type(pack(targ)) and all(a is b for a, b in zip(pred[1:], rest, strict=True))
        assert get(pred[0]).dtype == torch.float32 and get(given[-1]).dtype == torch.bfloat16
        return nn.functional.mse_loss(get(pred[0]).as_subclass(torch.Tensor), targ)

    learn = learner(Model(6, 1), loss_func=loss).to_bf16()
    before = params(learn)
    learn.fit(1, 0.01)
    assert not same(params(learn), before)


def test_weights_that_are_wrappers_around_tensors():
    "They train like plain tensors, and a NaN loss is noticed in its batch."
    plain, model = learner().to_bf16(), mlp()
    for m in model.modules():  # all of them: an operator that gets one runs twice
        for name, p in list(m.named_parameters(recurse=False)):
            setattr(m, name, nn.Parameter(TwoTensor(p.detach().clone(), p.detach().clone())))
    learn = learner(model).to_bf16(on_overflow='raise')
    for l in (plain, learn):
        l.fit(2, 0.01)
    assert same(params(plain), [p.a for p in learn.model.parameters()])
    learn.loss_func = lambda pred, y: (pred - y).mean() * torch.nan
    with pytest.raises(FloatingPointError, match='the loss is nan'):
        learn.fit(1)
    assert learn.train_iter == 0


@MODES
def test_a_loss_that_is_a_dtensor(mode):
    from torch.distributed.tensor import DTensor

    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, kinds = dist.init_device_mesh('cpu', (1,)), set()

        def squared(pred, target):
            return (pred - target).pow(2).mean()  # 2.9 has no sharding strategy for mse_loss

        def distributed(*tensors):
            return squared(*[DTensor.from_local(t.as_subclass(torch.Tensor), mesh) for t in tensors])

        plain, learn = (learner(loss_func=f, cbs=mixed(mode)) for f in (squared, distributed))
        learn.add_cb(At('after_loss', lambda l: kinds.add(type(l.loss)), 50))
        for l in (plain, learn):
            l.fit(2, 0.01)
    finally:
        dist.destroy_process_group()
    assert kinds == {DTensor} and same(params(plain), params(learn))


def test_gradients_survive_a_forward_under_no_grad():
    class Twice(nn.Sequential):
        def forward(self, x):
            with torch.no_grad():
                target = super().forward(x).mean()
            with torch.no_grad(), torch.enable_grad():
                return super().forward(x) + 0 * target

    learn, grads = learner(Twice(nn.Linear(6, 4), nn.Linear(4, 1))).to_bf16(), []
    learn.add_cb(
        At('after_backward', lambda l: grads.append(all(g is not None and bool(g.any()) for g in plain_grads(l))), 40)
    )
    learn.fit(1, 0.01)
    assert grads == [True] * 6


def test_a_fit_inside_the_users_own_autocast_uses_the_weights_of_each_batch():
    def run(dtype, enabled=True, before=False):
        learn = learner(linear()).to_bf16()
        with torch.autocast('cpu', dtype, enabled):
            if before:
                learn.model(torch.ones(2, 6))  # autocast keeps casts of these weights
            learn.fit(2, 0.05)
        return params(learn)

    assert same(run(torch.bfloat16), run(torch.bfloat16, enabled=False))
    assert same(run(torch.float16, before=True), run(torch.float16))
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
    assert norms(mixed('fp16'), 11) == pytest.approx(fp32, rel=0.02)
    assert norms(mixed('fp16'), 9) == pytest.approx([256 * n for n in fp32], rel=0.02)  # as with fastai's own


@pytest.mark.parametrize('opt', OPTIMIZERS)
def test_a_skipped_step_changes_nothing(opt):
    learn, states = learner(opt_func=OPTIMIZERS[opt]).to_fp16(init_scale=1e30), []

    def remember(l):
        if l.training:
            states.append((params(l), opt_state(l.opt), l.precision.skipped))

    learn.add_cbs([At(event, remember, 70) for event in ('before_backward', 'after_step', 'after_batch')]).fit(1, 0.01)
    cb = learn.precision
    assert cb.n_skipped == len(cb.scales) == 6 and cb.scales[1] == cb.scales[0] / 2
    for (p, s, _), *after in zip(*[iter(states)] * 3):
        for q, t, skipped in after:
            assert skipped and same(p, q) and same_state(s, t)


def unfinished(cb, then=noop):
    "A learner after a fit that ends in the middle of an accumulation."
    learn = learner(linear(), cbs=[*([cb] if cb else []), GradientAccumulation(1000)])
    learn.fit(1, 0.01)
    then(learn)
    return learn


@pytest.mark.parametrize(
    'then',
    [noop, lambda l: l.fit(1, 0.01), lambda l: l.to_fp32().fit(1, 0.01), lambda l: l.to_bf16()],
    ids=['end', 'fit', 'to_fp32', 'to_bf16'],
)
def test_an_unfinished_accumulation_is_kept_as_in_fp32(then):
    for a, b in zip(plain_grads(unfinished(None, then)), plain_grads(unfinished(mixed('fp16'), then))):
        torch.testing.assert_close(b, a, rtol=0.05, atol=0.05)


def test_an_unfinished_accumulation_that_is_not_finite_is_zeroed():
    learn = unfinished(mixed('fp16', init_scale=1e30))
    assert not any(g.any() for g in plain_grads(learn) if g is not None)


def test_a_step_called_off_by_another_callback_leaves_scale_and_tracker_alone():
    learn, trackers, grads = learner().to_fp16(init_scale=1024.0, growth_interval=4), [], []

    def cancel(l):
        if l.iter % 2:
            raise CancelStepException

    def note(l):
        if not l.training:
            return
        trackers.append(l.precision.state_dict()['_growth_tracker'])
        grads.append(any(g.any() for g in plain_grads(l) if g is not None))

    learn.add_cbs([At('before_step', cancel, order=20), At('after_batch', note, 40)])
    learn.fit(1, 0.01)
    assert trackers == [1, 1, 2, 2, 3, 3] and not any(grads) and learn.precision.scales == [1024.0] * 3


def test_cancel_batch_after_unscaling_accumulates_as_in_fp32():
    def run(cb):
        learn, grads = learner(linear(), cbs=cb), []

        def further(l):
            grads.extend(plain_grads(l))
            if l.iter % 3 != 2:
                raise CancelBatchException

        learn.add_cb(At('before_step', further, order=20))
        learn.fit(1, 0.01)
        return grads + params(learn)

    for a, b in zip(run(None), run(mixed('fp16'))):
        torch.testing.assert_close(a, b, rtol=0.01, atol=0.01)


def test_parameters_outside_the_optimizer_are_told_in_fp16_and_keep_no_scaled_gradients():
    learn = learner(splitter=lambda m: [list(m[0].parameters())]).to_fp16(init_scale=256.0)
    with pytest.warns(UserWarning, match="(?s)4 trainable parameters.*'1.weight'.*loss scale"):
        learn.fit(1, 0.01)
    assert all(p.grad is None for p in learn.model[1:].parameters())


def test_a_step_without_gradients_is_no_step():
    unused = nn.Linear(6, 1)
    learn = learner(splitter=lambda m: [list(unused.parameters())]).to_fp16()
    learn.fit(1, 0.01)
    assert learn.precision.scales == [] and learn.precision.scale == 65536.0


# -- the scale


@pytest.mark.parametrize(
    'kwargs, skipped, words',
    [
        (
            dict(init_scale=1e30),
            6,
            '6 of the 6 optimizer steps.*Nothing was learned.*start with a loss scale of 2.4414',
        ),
        (dict(init_scale=2.0**20), 5, '5 of the 6 optimizer steps.*\n.*a loss scale of 32,768; it is 32,768 now.'),
        (dict(init_scale=2.0**15), 2, None),
        (dict(loss_scale=512.0), 0, None),
        (dict(loss_scale=2.0**30), 6, r'6 of the 6 .*start with a loss scale of 16,777,216'),
    ],
)
def test_a_fit_that_skipped_most_steps_says_so_with_the_scale_to_start_from(kwargs, skipped, words):
    learn = learner().to_fp16(**kwargs)
    texts = told(lambda: learn.fit(1, 0.01), 'skipped')
    cb = learn.precision
    assert cb.n_skipped == skipped and len(texts) == (words is not None)
    if words:
        assert re.search(words, texts[0], re.S), texts
    assert ('loss_scale' in kwargs) == (set(cb.scales) == {*kwargs.values()})


def test_the_steps_before_an_exception_are_in_the_history():
    def stop(l):
        if l.train_iter == 3:
            raise RuntimeError('stop')

    learn = learner(cbs=At('after_batch', stop)).to_fp16(init_scale=1024.0)
    with pytest.raises(RuntimeError, match='stop'):
        learn.fit(1, 0.01)
    assert (learn.precision.scales, learn.precision.skips) == ([1024.0] * 3, [False] * 3)


def test_without_scaling():
    learn, seen = learner().to_fp16(enabled=False), []
    learn.add_cb(At('before_step', lambda l: seen.append(copy.deepcopy(l.scaler).is_enabled()), 40))
    learn.fit(1, 0.01)
    assert seen == [False] * 6 and (learn.precision.scales, learn.precision.scale) == ([], None)


def test_a_scaler_of_the_users_own():
    class Slow(torch.amp.GradScaler):
        def update(self, new_scale=None):
            super().update(self.get_scale() / 4 if new_scale is None else new_scale)

    scaler, seen = Slow('cpu', init_scale=1024.0), []
    learn = learner().to_fp16(scaler=scaler)
    learn.add_cb(At('before_step', lambda l: seen.append(l.scaler), 40))
    learn.fit(1, 0.01)
    assert seen == [scaler] * 6 and learn.precision.scales == [1024.0 / 4**i for i in range(6)]


@pytest.mark.parametrize('own', [False, True])
def test_lr_find_leaves_scale_and_history_alone(tmp_path, own):
    "Also if it is interrupted, and with the user's own scaler."
    scaling = dict(scaler=torch.amp.GradScaler('cpu', **SCALING[0])) if own else SCALING[0]
    learn = learner(path=tmp_path).to_fp16(**scaling)
    learn.fit(1, 0.01)
    cb = learn.precision
    before = cb.scales, cb.state_dict(), cb.scale

    def interrupt(l):
        if l.train_iter == 7:
            raise KeyboardInterrupt

    interrupting = At('after_backward', interrupt, 20)
    learn.lr_find(show_plot=False, num_it=30, start_lr=1e-2, end_lr=30.0, stop_div=False)
    assert (cb.scales, cb.state_dict(), cb.scale) == before
    learn.add_cb(interrupting)
    with pytest.raises(KeyboardInterrupt):
        learn.lr_find(show_plot=False, num_it=30, stop_div=False, suggest_funcs=())
    assert (cb.scales, cb.state_dict(), cb.scale) == before and (not own or scaling['scaler'].get_scale() == before[2])
    learn.remove_cb(interrupting).fit(1, 0.01)
    assert len(cb.scales) == 12 and cb.scales[6] == before[2]


# -- errors when a fit starts


def test_parameters_in_half_precision():
    learn, drawn = learner(mlp().half()).to_fp16(), []
    learn.add_cb(At('before_batch', drawn.append, -50))
    with pytest.raises(ValueError, match=r"(?s)'0.weight'.*float16.*model\.float\(\)"):
        learn.fit(1)
    assert not drawn and learn.scaler is None
    learn.model.float()
    learn.fit(1)
    with pytest.warns(UserWarning, match=r"(?s)6 .*'0.weight'.*rounded.*model\.float\(\)"):
        learner(mlp().bfloat16()).to_bf16().fit(1)


def test_an_optimizer_that_needs_a_closure():
    lbfgs = partial(OptimWrapper, opt=torch.optim.LBFGS)
    for to in ('to_fp16', 'to_bf16', 'to_fp32'):
        with pytest.raises(TypeError, match='closure'):
            getattr(learner(opt_func=lbfgs), to)().fit(1)


def test_two_precision_callbacks():
    with pytest.raises(ValueError, match=r"several .*MixedPrecision\('fp16'"):
        learner().to_bf16().fit(1, cbs=MixedPrecision('fp16'))


@pytest.mark.parametrize(
    'mode, kwargs, what', [('bf16', {}, 'bf16'), ('fp16', dict(fp32_modules='3'), 'fp16 with fp32_modules')]
)
def test_data_parallel_that_would_not_compute_in_it(mode, kwargs, what):
    model = nn.DataParallel(mlp())
    model.device_ids = [0, 1]  # as with two GPUs
    with pytest.raises(
        ValueError, match=f'(?s)nn.DataParallel supports only fp16.*not {what}.*DistributedDataParallel'
    ):
        learner(model, cbs=mixed(mode, **kwargs)).fit(1)


# -- in fastai


def test_it_stands_in_for_fastais_callback():
    cb = MixedPrecision()
    assert isinstance(cb, fp16.MixedPrecision) and (cb.name, cb.order) == ('mixed_precision', 10)
    assert cb.amp_mode is cb.mode is AMPMode.FP16

    class Model(nn.Sequential):
        mode, scales, scaler, skipped, autocast = range(5)

    assert not told(lambda: learner(Model(nn.Linear(6, 1))).to_bf16().fit(1), 'shadowing')


def test_a_callback_for_one_fit():
    learn = learner()
    dtypes = output_dtypes(learn)
    learn.fit(1, cbs=MixedPrecision('bf16'))
    learn.fit(1)
    assert dtypes == [torch.bfloat16] * 6 + [torch.float32] * 6 and not left_on(learn)


def test_it_shows_mode_and_scale():
    cb = learner().to_fp16(init_scale=1024.0).precision
    assert repr(cb) == "MixedPrecision('fp16', scale=1024)" and repr(MixedPrecision('bf16')) == "MixedPrecision('bf16')"
    auto = learner().to_amp().precision
    assert repr(auto) == "MixedPrecision('auto')"
    auto.learn.fit(1)
    assert repr(auto).startswith(f"MixedPrecision('auto': {auto.mode.value if auto.mode else 'fp32'}")
