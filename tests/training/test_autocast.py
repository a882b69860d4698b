"What runs in which dtype."

from collections import OrderedDict, namedtuple
from contextlib import nullcontext
from functools import partial

import pytest, torch
from fastai.learner import Learner
from fastai.torch_core import TensorImage
from fastcore.basics import AttrDict, fastuple, noop
from fastcore.foundation import L
from torch import nn
from torch.nn.utils import parametrizations

from helpers import At, autocast_state, finite, learner, mixed, mlp, params, same, told
from rows import BF16, FP16, FP32, TO, differences, end_state, make, over_batches, process

MODES = pytest.mark.parametrize('to', ['fp16', 'bf16'])


@MODES
def test_what_runs_in_low_precision(to):
    dtype, seen = TO[to].dtype, set()

    def loss(pred, targ):
        seen.add(('pred', pred.dtype, torch.is_autocast_enabled('cpu')))
        return (pred.T @ targ).mean()  # a loss that multiplies matrices

    def note(l):
        seen.add(('loss', l.loss.dtype, l.loss_grad.dtype, torch.is_autocast_enabled('cpu')))

    learn = make(to, loss_func=loss, cbs=[At(event, note, 40) for event in ('after_batch', 'before_backward')])
    learn.model[0].register_forward_hook(lambda m, i, o: seen.add(('layer', o.dtype, m.training)))
    learn.fit(1, 0.01)
    expected = {('pred', FP32, True), ('layer', dtype, True), ('layer', dtype, False), ('loss', FP32, FP32, False)}
    assert seen == expected and learn.get_preds()[0].dtype == FP32 and len(learn.validate()) == 1


Pair = namedtuple('Pair', 'a b')


class Own(tuple):
    def __new__(cls, values, more):
        new = super().__new__(cls, values)
        new.more = more
        return new


class OwnList(list):
    def __init__(self, values, more):
        super().__init__(values)
        self.more = more


PACKED = {  # how a prediction is packed, and the prediction in it
    'dict': (lambda y: dict(logits=y), lambda o: o['logits']),
    'ordered dict': (lambda y: OrderedDict(logits=y), lambda o: o['logits']),
    'list': (lambda y: [y, None], lambda o: o[0]),
    'named tuple': (lambda y: Pair([y], ('text', 3)), lambda o: o.a[0]),
    'L': (lambda y: L(y, None), lambda o: o[0]),
    'fastuple': (lambda y: fastuple(y, None), lambda o: o[0]),
    'attributes': (lambda y: AttrDict(logits=[y]), lambda o: o.logits[0]),
    'a tuple of its own': (lambda y: Own((y, None), 1), lambda o: o[0]),
    'a list of its own': (lambda y: OwnList([y, None], 1), lambda o: o[0]),
    "torch's": (lambda y: y.max(1, keepdim=True), lambda o: o.values),
    "fastai's": (TensorImage, lambda o: o),
}


@pytest.mark.parametrize('kind', PACKED)
def test_predictions_keep_their_structure(kind):
    "The loss gets 16-bit tensors in fp32 and everything else unchanged; the output of the model is not modified."
    pack, get = PACKED[kind]
    rest, given = (torch.ones(1).double(), torch.tensor([1]), object(), {1, 2}, None), []

    class Model(nn.Linear):
        def forward(self, x):
            given.append(pack(super().forward(x)))
            return given[-1], *rest

    def loss(pred, targ):
        assert (
            type(pred[0]) is type(pack(targ))
            and getattr(pred[0], 'more', 0) == getattr(pack(targ), 'more', 0)
            and all(a is b for a, b in zip(pred[1:], rest, strict=True))
        )
        assert get(pred[0]).dtype == FP32 and get(given[-1]).dtype == BF16
        return nn.functional.mse_loss(get(pred[0]).as_subclass(torch.Tensor), targ)

    learn = learner(Model(6, 1), loss_func=loss).to_bf16()
    before = params(learn)
    learn.fit(1, 0.01)
    assert not same(params(learn), before)


@MODES
def test_callbacks_can_enter_autocast_in_a_fit(to):
    "As fastai's own callback lets them: one that compiles or allocates before the first batch."
    learn, seen, before = make(to), [], process()

    def predict(l):
        with (outer := l.mixed_precision.autocast), l.mixed_precision.autocast as inner:
            assert inner is not outer
            seen.append(l.model(torch.ones(2, 6)).dtype)

    learn.fit(1, cbs=[At('before_fit', predict, 11), At('after_epoch', predict)])
    assert seen == [TO[to].dtype] * 2 and process() == before and learn.mixed_precision.autocast is None


def test_inside_the_users_own_autocast():
    "A fit uses the weights of each batch, and the user's context is the same afterwards."

    def run(around, before=False):
        learn = make('bf16', 'conv')
        with around:
            state = autocast_state()
            if before:
                learn.model(torch.ones(2, 6))  # autocast keeps casts of these weights
            learn.fit(2, 0.05)
            assert autocast_state() == state
        return params(learn)

    autocast = partial(torch.autocast, 'cpu')
    assert same(run(autocast(BF16)), run(nullcontext())) and same(run(autocast(FP16), True), run(autocast(FP16)))


def test_a_users_setting_of_autocasts_cache_counts():
    seen = set()
    torch.set_autocast_cache_enabled(False)
    try:
        make('bf16', cbs=[At('after_pred', lambda l: seen.add(torch.is_autocast_cache_enabled()), 20)]).fit(1)
        assert seen == {False} and not torch.is_autocast_cache_enabled()
    finally:
        torch.set_autocast_cache_enabled(True)


@MODES
@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_16_bit_parameters_that_are_trained_become_fp32(to, opt):
    "With their gradients, optimizer and buffers, as if they had been converted before; a frozen layer stays."

    def build(as_fp32):
        learn = make(to, 'frozen', opt=opt)
        learn.model.to(BF16)
        learn.create_opt()
        for p in learn.model.parameters():
            p.grad = torch.ones_like(p) if p.requires_grad else None
        learn.opt.step()
        if as_fp32:
            for i in (0, 2, 4):
                learn.model[i].float()
            for state in getattr(learn.opt, 'opt', learn.opt).state.values():
                state.update({k: v.float() for k, v in state.items() if torch.is_tensor(v)})
        return learn

    learn, wanted, before = build(False), build(True), process()
    said = told(lambda: learn.fit(2, 0.01), '16-bit')
    wanted.fit(2, 0.01)
    assert len(said) == 1 and "'0.weight'" in said[0] and learn.model[1].weight.dtype is BF16
    assert differences(end_state(learn), end_state(wanted)) == [] and process() == before
    assert not told(lambda: learn.fit(1), '16-bit')
    learn.to_fp32().fit(1)  # the frozen layer as well
    assert {p.dtype for p in params(learn)} == {FP32}


def test_16_bit_buffers_of_a_parametrization():
    model = mlp()
    parametrizations.spectral_norm(model[0])
    learn = learner(model.to(BF16)).to_bf16()
    assert told(lambda: learn.fit(1), '16-bit') and finite(learn)


def test_16_bit_parameters_in_a_loop_over_one_batch():
    learn = learner(mlp().to(BF16)).to_bf16()
    assert told(lambda: over_batches(learn, 1), '16-bit') and {p.dtype for p in params(learn)} == {FP32}


def test_parameters_made_under_inference_mode():
    with torch.inference_mode():
        model = mlp()
    learn = learner(model).to_bf16()
    assert torch.tensor(learn.validate()).isfinite().all() and learn.get_preds()[0].dtype is FP32


@pytest.mark.parametrize('to, more, words', [('bf16', {}, 'bf16'), ('fp16', dict(fp32_modules='3'), 'fp32_modules')])
def test_data_parallel_that_would_not_compute_in_it(to, more, words):
    model = nn.DataParallel(mlp())
    model.device_ids = [0, 1]  # as with two GPUs
    with pytest.raises(ValueError, match=f'(?s)nn.DataParallel supports only fp16.*{words}'):
        learner(model, cbs=mixed(to, **more)).fit(1)


class OwnEvents(Learner):
    "Whose loop opens no parts."

    def _with_events(self, f, event_type, ex, final=noop):
        try:
            self(f'before_{event_type}')
            f()
        except ex:
            self(f'after_cancel_{event_type}')
        self(f'after_{event_type}')
        final()


def test_a_loop_without_fastais_says_that_it_trains_in_fp32():
    learn = learner(cls=OwnEvents).to_bf16()
    (said,) = told(lambda: learn.fit(2), 'This batch runs in fp32')
    assert '`_with_events` or `one_batch`' in said
