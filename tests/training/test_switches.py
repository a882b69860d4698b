"Which precision is on: the last `to_*` call counts, also in the middle of a batch; contexts for a while."

from itertools import cycle

import pytest, torch
from fastai.callback import core, fp16 as fastai_fp16
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.training import GradientAccumulation
from torch import nn

from fastxtend_amp import MixedPrecision
from fastxtend_amp.precisions import FP16 as FP16Precision
from fastxtend_amp.training.current import precision_callback
from fastxtend_amp.training.fit import Fit
from helpers import At, finite, is_outside_a_fit, learner, left_on, linear, mixed, output_dtypes, replaced, set_support
from helpers import told
from rows import BATCH, BF16, FP16, FP32, TO, differences, end_state, largest, make, process, seen_in_steps
from rows import third_batch

ORDERS = [(event, order) for event in BATCH for order in (9, 40)]  # before and after the callback
SWITCHES = [(a, b) for a in ('fp32', 'bf16', 'fp16', 'flat fp16') for b in ('fp32', 'bf16', 'fp16') if a != b]


def precisions(learn):
    "The precisions of all precision callbacks, fastai's own included."
    kinds = fastai_fp16.MixedPrecision, fastai_fp16.ModelToHalf
    return [getattr(cb, 'amp_mode', None) for cb in learn.cbs if isinstance(cb, kinds)]


# -- in a fit


@pytest.mark.parametrize('event, order, start, to', [(*a, *b) for a, b in zip(ORDERS, cycle(SWITCHES))])
def test_a_switch_in_mid_batch_counts_from_the_next(event, order, start, to):
    "Gradients are true at every step."
    learn, before = make(start, opt='sgd'), process()
    dtypes, found = output_dtypes(learn), seen_in_steps(learn)
    learn.add_cb(At(event, lambda l: l.training and l.iter == 2 and TO[to](l), order))
    learn.fit(1, 1e-3)
    assert dtypes == [TO[start].dtype or FP32] * 3 + [TO[to].dtype or FP32] * 3
    assert len(found) == 6 and max(found) < 64 and process() == before and finite(learn)
    learn.fit(1, 0.01)
    assert set(dtypes[6:]) == {TO[to].dtype or FP32} and left_on(learn.to_fp32()) == []


def test_the_last_switch_of_a_batch_counts():
    learn = learner()
    dtypes, steps = output_dtypes(learn), {1: ['bf16'], 3: ['fp32', 'bf16', 'fp16'], 4: ['fp16', 'fp32']}
    learn.fit(1, 0.01, cbs=At('after_pred', lambda l: l.training and [TO[t](l) for t in steps.get(l.iter, ())], 40))
    assert dtypes == [FP32, FP32, BF16, BF16, FP16, FP32] and process()[0][0] is False and not left_on(learn)


def test_an_exception_after_a_switch_zeroes_the_gradients():
    def fail(l):
        l.to_bf16()
        raise ValueError('boom')

    learn = make('fp16', cbs=[At('after_backward', fail, 12)])
    with pytest.raises(ValueError, match='boom'):
        learn.fit(1, 0.01)
    assert largest(learn) == 0 and precisions(learn) == ['bf16'] and is_outside_a_fit(learn)


@pytest.mark.parametrize('event', ['after_pred', 'after_train', 'after_epoch'])
@pytest.mark.parametrize('start', ['fp32', 'fp16'])
def test_a_precision_set_in_a_failing_fit_is_closed(start, event):
    learn, before = make(start), process()
    switch = At('before_batch', lambda l: third_batch(l) and l.to_fp16(init_scale=256.0, fp32_modules='0'))
    with pytest.raises(ZeroDivisionError):
        learn.fit(1, cbs=[switch, At(event, lambda l: 1 / (l.iter < 4 and event == 'after_pred'), 20)])
    assert is_outside_a_fit(learn) and process() == before and largest(learn) < 64


def test_a_precision_set_in_a_fit_opens_once(monkeypatch):
    opened = []

    class Counted(Fit):
        def __init__(self, cb, *args, **kwargs):
            opened.append(cb.precision.name)
            super().__init__(cb, *args, **kwargs)

    monkeypatch.setattr('fastxtend_amp.training.callback.Fit', Counted)
    make('bf16').fit(2, 0.01, cbs=At('after_batch', lambda l: l.train_iter == 2 and l.to_fp16()))
    assert opened == ['bf16', 'fp16']


@pytest.mark.parametrize('start', ['fp32', 'fp16'])
@pytest.mark.parametrize('event', BATCH[:6])
def test_a_callback_added_or_switched_on_in_a_batch_waits_for_the_next(event, start):
    def cancel(l):
        if l.train_iter == 0:
            raise core.CancelStepException

    def switch_on(l):
        if not precision_callback(l):
            l.add_cb(mixed('fp16'))
        l.mixed_precision.run = True

    learn = learner(cbs=At('before_step', cancel, 5))
    if start == 'fp16':
        learn.add_cb(mixed('fp16'))
        learn.mixed_precision.run = False
    learn.fit(1, 0.01, cbs=At(event, switch_on))
    assert learn.mixed_precision.scales == [256.0] * 5


@pytest.mark.parametrize('order', [5, 20])
@pytest.mark.parametrize('to', ['fp32', 'bf16', 'fp16'])
def test_a_batch_cancelled_before_or_after_the_precision_sees_it(to, order):
    def cancel(l):
        if l.train_iter == 0 and l.training:
            raise core.CancelBatchException

    learn = make(to, cbs=[At('before_batch', cancel, order)])
    if to != 'fp32':
        getattr(learn, f'to_{to}')(fp32_modules=nn.Linear)
    assert not told(lambda: learn.fit(1, 0.01), 'not called')
    assert finite(learn) and is_outside_a_fit(learn) if to != 'fp32' else finite(learn)


@pytest.mark.parametrize('to', ['fp32', 'fp16'])
def test_a_cancelled_fit_keeps_its_accumulation(to):
    def cancel(l):
        if l.iter == 4:
            raise core.CancelTrainException

    switch = At('before_batch', lambda l: third_batch(l) and TO[to](l), 70)
    learn = learner(cbs=[GradientAccumulation(100), switch, At('after_batch', cancel, 70)])
    learn.fit(1, 0.01)
    assert 0 < largest(learn) < 64


@pytest.mark.parametrize('value, warns', [('ignore', False), ('warn', True)])
def test_on_overflow_can_be_changed_in_a_fit(value, warns):
    learn = learner().to_bf16(on_overflow='warn' if value == 'ignore' else 'ignore')
    change = At('before_batch', lambda l: l.iter == 1 and setattr(l.mixed_precision, 'on_overflow', value), 20)
    spoil = At('after_pred', lambda l: l.iter == 3 and l.training and setattr(l, 'pred', l.pred * float('nan')), 20)
    assert bool(told(lambda: learn.fit(1, cbs=[change, spoil]), 'training failed')) is warns


def test_callbacks_for_one_fit():
    learn = learner()
    dtypes = output_dtypes(learn)
    learn.fit(1, cbs=MixedPrecision('bf16'))
    learn.fit(1)
    assert dtypes == [BF16] * 6 + [FP32] * 6 and left_on(learn) == []
    learn.fit(1, cbs=[mixed('fp16'), At('before_batch', lambda l: third_batch(l) and l.to_bf16())])
    assert dtypes[12:] == [FP16] * 3 + [BF16] * 3 and precisions(learn) == ['bf16']


NOT_IN_A_BATCH = {
    'load': lambda l: l.load('a'),
    'export': lambda l: l.export('model.pkl'),
    'load_state_dict': lambda l: l.mixed_precision.load_state_dict(l.mixed_precision.state_dict()),
    'precision_as': lambda l: l.precision_as('fp32').__enter__(),
    'remove_cb': lambda l: l.remove_cb(l.mixed_precision),
}


@pytest.mark.parametrize('event', BATCH[1:7])
@pytest.mark.parametrize('what', NOT_IN_A_BATCH)
def test_what_is_an_error_in_a_batch(what, event):
    for to in ('fp16', 'bf16'):
        learn, before = make(to), process()
        cb = learn.mixed_precision
        with pytest.raises(RuntimeError, match='batch'):
            learn.fit(1, cbs=At(event, lambda l: l.training and NOT_IN_A_BATCH[what](l), 40))
        assert learn.mixed_precision is cb and is_outside_a_fit(learn) and process() == before


EVENTS_BY_HAND = {
    "a batch to show, as MixUp's documentation has it": 'before_fit before_train before_batch'.split(),
    "epochs of a loop, as fastai's own tests have them, and another library's event": """before_fit before_epoch
        before_train all after_train before_own before_validate all after_validate after_epoch after_fit""".split(),
}


@pytest.mark.parametrize('what', EVENTS_BY_HAND)
def test_single_events_by_hand_run_without_autocast(what, monkeypatch):
    monkeypatch.setattr(core.event, 'before_own', 'before_own', raising=False)
    for to in ('fp16', 'bf16', 'flat'):
        learn, before = make(to), process()
        learn.create_opt()
        learn._split(learn.dls.one_batch())
        learn.epoch, learn.n_epoch, learn.dl, learn.training = 0, 1, learn.dls.train, True
        for event in EVENTS_BY_HAND[what]:
            learn.all_batches() if event == 'all' else learn(event)
            assert process() == before
        learn.fit(1, 0.01)
        assert is_outside_a_fit(learn) and finite(learn)


def test_run_run_train_and_run_valid():
    "`run_valid`, `run_train` and `run`."
    for switch, expected in (('run_valid', {True: True, False: False}), ('run_train', {True: False, False: True})):
        learn, seen = make('bf16'), {}
        learn.add_cb(At('after_pred', lambda l: seen.update({l.training: torch.is_autocast_enabled('cpu')}), 20))
        setattr(learn.mixed_precision, switch, False)
        learn.fit(1)
        assert seen == expected
        learn.mixed_precision.run = False
        learn.fit(1)
        assert not any(seen.values()) and learn.mixed_precision.run
        learn.fit(1, cbs=At('after_train', lambda l: setattr(l.mixed_precision, 'run', False)))
        assert is_outside_a_fit(learn)


# -- between fits


CALLS = {'to_fp16': 'fp16', 'to_bf16': 'bf16', 'to_fp32': None, 'to_half_weights': 'bf16', 'to_tf32': 'tf32'}


def test_exactly_one_callback_the_last_one_asked_for(with_tf32):
    learn = learner()
    for i, call in enumerate([*CALLS, 'to_bf16', 'to_bf16', 'to_fp32', *reversed(CALLS)]):
        assert getattr(learn, call)() is learn
        assert precisions(learn) == [CALLS[call]] * bool(CALLS[call])
        assert precision_callback(learn) is next((cb for cb in learn.cbs if isinstance(cb, MixedPrecision)), None)
        if i % 2:
            learn.fit(1)
    assert left_on(learn.to_fp32()) == []


def test_the_learner_and_its_model_are_plain_afterwards():
    import gc, pickle, weakref

    learn = make('fp16')
    learn.fit(1)
    callback = weakref.ref(learn.to_bf16(fp32_modules='0').mixed_precision)
    learn.fit(1)
    learn.remove_cb(learn.mixed_precision)
    gc.collect()
    assert callback() is None and left_on(learn) == [] and b'fastxtend_amp' not in pickle.dumps(learn)


def test_fastais_own_callbacks_are_replaced_and_removed():
    for cb in (fastai_fp16.MixedPrecision, fastai_fp16.ModelToHalf):
        assert precisions(learner(cbs=cb()).to_bf16()) == ['bf16'] and precisions(learner(cbs=cb()).to_fp32()) == []
    cb = MixedPrecision()
    assert isinstance(cb, fastai_fp16.MixedPrecision) and (cb.name, cb.order) == ('mixed_precision', 10)


def test_two_precision_callbacks_are_an_error():
    for add in (lambda l: l.fit(1, cbs=MixedPrecision()), lambda l: (l.add_cb(MixedPrecision()), l.fit(1))):
        with pytest.raises(ValueError, match='several'):
            add(make('bf16'))


def test_one_callback_on_two_learners():
    "One learner after another works."
    cb = mixed('fp16')
    a, b = (learner(cbs=cb) for _ in range(2))
    for f in (lambda: a.fit(1), a.validate, a.get_preds):
        with pytest.raises(RuntimeError, match='added to another learner'):
            f()
    b.fit(1)
    c = learner(cbs=cb)
    c.fit(1)
    assert len(cb.scales) == 12


def test_what_is_changed_later():
    "`on_overflow`; a list that was given, without effect."

    class Big(nn.Module):
        def forward(self, x):
            return x[:, :1] if self.training else (x * 300) @ (x * 300).T.sum(1, keepdim=True) * 1e-6

    names = ['0']
    learn = learner(nn.Sequential(nn.Linear(6, 8), Big())).to_fp16(fp32_modules=names)
    names[0] = 'nothing'
    assert told(learn.validate, 'in validation') and learn.mixed_precision.precision.changed == {'fp32_modules': ['0']}
    learn.mixed_precision.on_overflow = 'ignore'
    assert told(learn.validate) == []


def test_channels_last():
    learn = make('fp32', 'conv').to_channelslast(amp_mode='bf16', fp32_modules='3')
    learn.validate()  # without an optimizer
    learn.fit(1)
    assert precisions(learn) == ['bf16'] and learn.mixed_precision.fp32_module_names == ['3']
    assert learn.model[1].weight.is_contiguous(memory_format=torch.channels_last)
    assert sum(isinstance(cb, ChannelsLast) for cb in learn.cbs) == 1
    learn.to_contiguous(to_fp32=True)
    assert precisions(learn) == [] and left_on(learn) == []
    assert precisions(make('bf16', 'conv').to_channelslast()) == ['bf16']
    assert precisions(make('fp32', 'conv').to_channelslast()) == ['fp16']


@pytest.mark.parametrize('native', [('bf16', 'fp16'), ('fp16',), ()])
def test_to_amp_is_the_first_native_one(native, monkeypatch, capsys):
    "It accepts the arguments of the others."
    set_support(monkeypatch, lambda name: 'native' if name in native else 'emulated')
    to = [*native, 'fp32'][0]
    learn = learner().to_amp(loss_scale=256.0)
    assert ('bf16 has no loss_scale.' in capsys.readouterr().out) == (to == 'bf16')
    dtypes = output_dtypes(learn)
    learn.fit(1)
    assert {*dtypes} == {TO[to].dtype or FP32}
    scales = learn.mixed_precision.scales if precision_callback(learn) else []
    assert {*scales} == ({256.0} if to == 'fp16' else set())
    with learn.amp_context():
        assert torch.is_autocast_enabled('cpu') == (to != 'fp32')
    for bad in (dict(fp32_modules='nix'), dict(growth_interval=-3)):
        with pytest.raises(ValueError):
            learner().to_amp(**bad)


# -- for a while


@pytest.mark.parametrize('to', ['fp32', 'bf16', BF16, MixedPrecision('bf16', fp32_modules='0')], ids=str)
def test_precision_as_gives_back_the_learners_own(to):
    learn, plain = (make('overflowing') for _ in range(2))
    cb, before = learn.mixed_precision, process()
    for l in (learn, plain):
        l.fit(1, 0.01)
    with learn.precision_as(to) as inside:
        assert inside is learn and precision_callback(learn) is not cb
        learn.validate()
    assert learn.mixed_precision is cb and process() == before
    for l in (learn, plain):
        l.fit(1, 0.01)
    assert differences(end_state(learn), end_state(plain)) == []


def test_precision_as_nests_and_ends_after_an_exception():
    learn = make('fp16')
    cb = learn.mixed_precision
    with pytest.raises(KeyError), learn.precision_as('bf16'):
        with learn.precision_as('fp32'):
            assert precision_callback(learn) is None
        assert precisions(learn) == ['bf16']
        raise KeyError
    assert learn.mixed_precision is cb and left_on(learn.to_fp32()) == []
    with learn.to_bf16(fp32_modules='3').precision_as('fp32'):
        learn.model = linear()  # without that module
    assert learn.mixed_precision.amp_mode == 'bf16'


def test_precision_as_that_raises_an_error_in_a_fit_changes_nothing():
    def wrong(l):
        with pytest.raises(ValueError), l.precision_as(MixedPrecision('bf16', fp32_modules='no module')):
            pass
        seen.append((len(l.mixed_precision.parts), l.mixed_precision.fit))

    seen = []
    learner().to_fp16(init_scale=256.0).fit(
        1, cbs=[At('before_epoch', lambda l: seen.append((2, l.mixed_precision.fit))), At('after_epoch', wrong, 70)]
    )
    assert seen[0] == seen[1]


def test_precision_as_gives_back_fastais_callbacks():
    learn = learner().to_non_native_fp16()
    names = [cb.name for cb in learn.cbs]
    with learn.precision_as('fp32'):
        assert [cb.name for cb in learn.cbs] != names
    assert sorted(cb.name for cb in learn.cbs) == sorted(names)


@pytest.mark.parametrize('to', ['bf16', 'fp32', 'fp16'])
def test_amp_context_inside_and_outside_a_fit(to):
    learn, seen, before = make(to), [], process()

    def predict(l):
        with torch.no_grad(), learn.amp_context():
            seen.append(learn.model(torch.ones(2, 6)).dtype)

    predict(learn)
    for event in ('before_epoch', 'after_train', 'before_validate', 'after_fit'):
        learn.fit(1, cbs=At(event, predict, 5))
    with pytest.raises(KeyError), learn.amp_context():
        raise KeyError
    assert seen == [TO[to].dtype or FP32] * 5 and process() == before and replaced(learn.model) == []


def test_one_precision_object_on_two_learners():
    precision = FP16Precision(init_scale=256.0)
    a, b = (learner(cbs=MixedPrecision(precision)) for _ in range(2))
    a.mixed_precision.load_state_dict(dict(scale=8.0, _growth_tracker=0))
    with b.precision_as(precision):
        assert (a.mixed_precision.scale, b.mixed_precision.scale, precision.first_scale) == (8.0, 256.0, 256.0)
