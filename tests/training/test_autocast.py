"What runs in which dtype, and autocast's casts of the weights, which a validation keeps."

import copy
from collections import OrderedDict, namedtuple
from contextlib import nullcontext
from functools import partial

import pytest, torch
from fastai.learner import Learner
from fastai.torch_core import TensorImage, ismin_torch
from fastcore.basics import noop
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import At, autocast_state, dataset, learner, loaders, mixed, mlp, params, same, told
from rows import BF16, FP16, FP32, MODELS, OPTS, TO, Once, differences, end_state, make, over_batches, process

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
PACKED = {  # how a prediction is packed, and the prediction in it
    'dict': (lambda y: dict(logits=y), lambda o: o['logits']),
    'ordered dict': (lambda y: OrderedDict(logits=y), lambda o: o['logits']),
    'list': (lambda y: [y, None], lambda o: o[0]),
    'named tuple': (lambda y: Pair([y], ('text', 3)), lambda o: o.a[0]),
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
        assert type(pred[0]) is type(pack(targ)) and all(a is b for a, b in zip(pred[1:], rest, strict=True))
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


# -- casts kept for a validation

N_BATCHES = 4
AT_ONCE = 1 if ismin_torch('2.13') else N_BATCHES  # casts of a weight in a validation; older ones cast in each batch


def clear():
    "As other libraries do: autocast's cache is cleared before each batch."
    return At('before_batch', lambda l: torch.clear_autocast_cache(), 70)


class Casts(TorchDispatchMode):
    "Counts the casts to 16 bits of these tensors, by name."

    def __init__(self, model):
        super().__init__()
        self.names, self.count = {p.data_ptr(): n for n, p in model.named_parameters()}, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default and kwargs.get('dtype') in (BF16, FP16):
            if name := self.names.get(args[0].data_ptr()):
                self.count[name] = self.count.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def counted(learn, f):
    with Casts(learn.model) as casts:
        f()
    return casts.count


def ready(to='bf16', model='mlp', cbs=(), **kwargs):
    dls = loaders(valid=dataset(4 * N_BATCHES, seed=1))
    learn = learner(MODELS[model](), dls, cbs=[mixed(to, **kwargs), *cbs], opt_func=OPTS['adamw'])
    learn.fit(1, 0.01)
    return learn


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


def test_each_weight_is_cast_once():
    learn, once = ready(), dict.fromkeys(['0.weight', '0.bias', '3.weight', '3.bias'], AT_ONCE)
    assert counted(learn, learn.get_preds) == counted(learn, learn.validate) == once
    kept = ready(fp32_modules='3')
    assert counted(kept, kept.get_preds) == dict.fromkeys(['0.weight', '0.bias'], AT_ONCE)
    learn.model[0].requires_grad_(False)  # autocast's cache holds only weights that need a gradient
    expected = {**once, '0.weight': N_BATCHES, '0.bias': N_BATCHES}
    assert counted(learn, learn.get_preds) == expected


def by_copy(l):
    with torch.no_grad():
        [p.copy_(p * 2) for p in l.model.parameters()]


def by_a_step(l):
    "With torch's optimizer: fastai's own write into `.data`, which cannot be noticed."
    for p in l.model.parameters():
        p.grad = torch.ones_like(p)
    l.opt.step()
    l.opt.zero_grad()


def by_exchange(l):
    "As an average of the weights does."
    l.model = copy.deepcopy(l.model)
    by_copy(l)


def by_loading(l):
    l.model.load_state_dict({k: v * 2 for k, v in l.model.state_dict().items()})


def by_data(l):
    "As ensembles and averages that swap weights do."
    for p in l.model.parameters():
        p.data = p.data * 2


CHANGES = {f.__name__: f for f in (by_copy, by_a_step, by_exchange, by_loading, by_data)}
WAYS = {
    'get_preds': lambda l: l.get_preds()[0],
    'validate': lambda l: torch.tensor(l.validate()),
    'in a fit': lambda l: l.fit(3, 0.01) or torch.tensor(l.recorder.values),
    **{
        name: lambda l, f=f: l.get_preds(cbs=At('after_batch', lambda l: l.iter == 1 and not l.training and f(l), 60))[
            0
        ]
        for name, f in CHANGES.items()
    },
}


def in_a_batch(l):
    "Predictions in the middle of a training batch: their casts must not be used after its step."
    found = []
    twin = copy.deepcopy(l)
    twin.fit(1, 0.01, cbs=At('after_step', Once(lambda l: found.append(l.get_preds()[0])), 70))
    return torch.stack(found)


def averaged(l):
    "Swapped before each validation of a fit, and back after it."
    average, own = copy.deepcopy(l.model), l.model
    by_copy(l)
    before = At('before_validate', lambda l: setattr(l, 'model', average), 5)
    l.fit(2, 0.01, cbs=[before, At('after_validate', lambda l: setattr(l, 'model', own), 5)])
    return torch.tensor(l.recorder.values)


def two_validations(l):
    "In a fit and an autocast, which keeps the casts, with a change between them that no tensor shows."
    found = []

    def validate(l):
        for _ in range(2):
            found.append(l.validate()[0])
            for p in l.model.parameters():
                p.data.mul_(2)

    with torch.autocast('cpu', BF16):
        l.fit(1, 0.01, cbs=At('after_epoch', Once(validate), 70))
    return torch.tensor(found)


def grad_enabled(l):
    enable = At('before_batch', lambda l: torch.set_grad_enabled(True), 5)
    return l.get_preds(cbs=[enable, At('after_batch', lambda l: torch.set_grad_enabled(False), 5)])[0]


WAYS.update({f.__name__: f for f in (in_a_batch, averaged, two_validations, grad_enabled)})


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize(
    'to, model, kept', [('bf16', 'mlp', None), ('fp16', 'mlp', '3'), ('bf16', 'grad inside', None)]
)
def test_predictions_are_those_of_a_cast_in_each_batch(to, model, kept, way):
    learn, without = (ready(to, model, cbs, fp32_modules=kept) for cbs in ([], [clear()]))
    before = process()
    found, expected = WAYS[way](learn), WAYS[way](without)
    assert torch.equal(found, expected) and same(params(learn), params(without)) and process() == before
    if way in CHANGES:
        assert not torch.equal(found[8:], ready(to, model, fp32_modules=kept).get_preds()[0][8:])


def test_a_model_that_is_called_by_hand_in_a_validation_uses_its_present_weights():
    found = []

    def call(l):
        by_copy(l)
        with l.amp_context():
            pred = l.model(*l.xb)
        torch.clear_autocast_cache()
        with l.amp_context():
            found.append(torch.equal(pred, l.model(*l.xb)))

    ready('bf16', 'mlp').get_preds(cbs=At('after_loss', call, 20))
    assert found and all(found)


def test_a_second_call_in_a_training_batch_shares_the_casts():
    "As in nested autocasts: otherwise its gradients would be added in fp32."
    learn = ready('bf16', 'mlp')

    def call(l):
        if l.training:
            with l.amp_context():
                l.model(*l.xb)

    with Casts(learn.model) as casts:
        learn.fit(1, 0.01, cbs=At('after_pred', call, 20))
    batches = len(learn.dls.train) + AT_ONCE
    assert casts.count['0.weight'] == batches, (casts.count, batches)
