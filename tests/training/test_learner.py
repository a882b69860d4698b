"The methods that a user calls on a learner."

import inspect

import pytest, torch
from fastai.callback import fp16
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.training import GradientAccumulation, GradientClip

from helpers import *

CALLS = {'to_fp16': 'fp16', 'to_bf16': 'bf16', 'to_amp': 'auto', 'to_fp32': None}


def precisions(learn):
    return [cb for cb in learn.cbs if isinstance(cb, (fp16.MixedPrecision, fp16.ModelToHalf))]


def modes(learn):
    return [cb.amp_mode for cb in precisions(learn)]


def conv():
    return nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, 1))


def test_exactly_one_callback_the_last_one_asked_for():
    learn = learner()
    for i, call in enumerate(
        ('to_fp16', 'to_bf16', 'to_amp', 'to_fp32', 'to_bf16', 'to_bf16', 'to_fp16', 'to_fp32', 'to_amp', 'to_fp16')
    ):
        assert getattr(learn, call)() is learn
        if i % 2:
            learn.fit(1)
        assert (
            modes(learn) == ([CALLS[call]] if CALLS[call] else [])
            and learn.precision is (precisions(learn) or [None])[0]
        )


@pytest.mark.parametrize(
    'remove', [lambda l: l.to_fp32(), lambda l: l.remove_cb(fp16.MixedPrecision), lambda l: l.remove_cb(l.precision)]
)
def test_removal_leaves_nothing(remove):
    learn = learner().to_fp16()
    learn.fit(1)
    remove(learn.to_bf16())
    assert not left_on(learn) and not precisions(learn)


def test_fastais_callbacks_are_replaced_and_removed():
    for cb in (fp16.MixedPrecision(), fp16.ModelToHalf()):
        assert modes(learner(cbs=[cb]).to_bf16()) == ['bf16'] and precisions(learner(cbs=[cb]).to_fp32()) == []


# -- arguments

BAD = [
    {name: value}
    for name, values in dict(
        init_scale=(0, -1.0, float('inf'), float('nan'), True, 'auto', 1e39, 10**400, 1e-50, torch.ones(2)),
        growth_factor=(1.0, None),
        backoff_factor=(0.0, 1),
        growth_interval=(0, 2.5, True, 2000.0),
        loss_scale=(0.0, float('nan'), True, 1e-50),  # 1e-50 is 0 in fp32
        enabled=('no', None),
        on_overflow=('stop',),
        max_skips=(0,),
    ).items()
    for value in values
]
CLASH = [
    dict(loss_scale=2.0, enabled=False),
    dict(loss_scale=2.0, init_scale=4.0),
    dict(loss_scale=2.0, scaler=torch.amp.GradScaler('cpu')),
    dict(scaler=torch.amp.GradScaler('cpu'), growth_interval=4),
    dict(scaler=torch.amp.GradScaler('cpu'), enabled=False),
]


def test_bad_arguments_are_refused_by_name_and_value_and_lose_nothing():
    learn = learner().to_bf16()
    before = list(learn.cbs)
    for kwargs in BAD + CLASH:
        name, value = list(kwargs.items())[-1]
        shown = name if name == 'scaler' else f'{name}={value!r}'
        for make in (learn.to_fp16, partial(MixedPrecision, 'auto'), partial(MixedPrecision, 'bf16')):
            with pytest.raises(ValueError) as e:
                make(**kwargs)
            assert shown in str(e.value) and ('cannot be used' in str(e.value)) is (len(kwargs) == 1), str(e.value)
    with pytest.raises(ValueError, match="init_scale='auto'.* the default"):  # a value of earlier versions
        learn.to_fp16(init_scale='auto')
    with pytest.raises(ValueError, match="scaler=.*amp_mode='bf16'"):
        MixedPrecision('bf16', scaler=torch.amp.GradScaler('cpu'))
    with pytest.raises(TypeError, match='scaler must be a torch.amp.GradScaler'):
        MixedPrecision('fp16', scaler=512.0)
    MixedPrecision('bf16', init_scale=2, growth_interval=5)  # without effect, and allowed
    assert list(learn.cbs) == before and before[-1].learn is learn


@pytest.mark.parametrize(
    'call, words',
    [
        (lambda l: l.to_fp16(initial_scale=2.0), "to_fp16.*'initial_scale'.*`init_scale=`"),
        (lambda l: l.to_fp16(dynamic=True), 'loss_scale=512'),
        (lambda l: l.to_fp16(clip=1.0), 'GradientClip'),
        (lambda l: l.to_fp16(flat_master=True), 'to_half_weights'),
        (lambda l: l.to_fp16(max_noskip=100), 'write `growth_interval=`'),
        (lambda l: l.to_bf16(clip_grad=1.0), 'GradientClip'),
        (lambda l: l.to_half_weights(dtype='fp16'), 'write `amp_mode=`'),
        (lambda l: l.to_bf16('auto'), 'too many positional arguments'),
        (lambda l: l.to_fp16(zzz=1), 'init_scale, growth_factor'),
        (lambda l: l.to_bf16(init_scale=2.0), "to_bf16.*'init_scale'"),
        (lambda l: l.to_amp('bf16'), r'to_amp\(\) takes 1 positional argument'),
        (lambda l: l.to_amp(measure=True, init_scale=2.0), "measure.*'init_scale'"),
        (lambda l: l.to_channelslast(amp_mod='bf16'), "no argument 'amp_mod'"),
        (lambda l: MixedPrecision('fp16', dynamic=1), 'dynamic'),
        (lambda l: MixedPrecision('fp16', 1024.0, init_scale=5.0), "two values for 'init_scale'"),
    ],
)
def test_unknown_and_misplaced_arguments(call, words):
    with pytest.raises(TypeError, match='(?s)' + words):
        call(learner())


def test_auto_has_only_arguments_of_precisions_that_it_may_select():
    assert 'min_size' not in inspect.signature(Learner.to_amp).parameters
    with pytest.raises(ValueError, match="min_size=16 cannot be used with amp_mode='auto', which has init_scale"):
        MixedPrecision('auto', min_size=16)


def test_signatures():
    "Each method has the arguments of its precision, with their defaults and meanings."
    own = ['on_overflow', 'max_skips']
    scaling = ['init_scale', 'growth_factor', 'backoff_factor', 'growth_interval', 'enabled']
    fp16 = [*scaling, 'loss_scale', 'scaler', 'fp32_modules']
    for f, names in (
        (Learner.to_fp16, [*fp16, *own]),
        (Learner.to_bf16, ['fp32_modules', 'skip_nonfinite', *own]),
        (Learner.to_tf32, own),
        (Learner.to_fp8, ['fp32_modules', 'modules', 'min_size', 'skip_nonfinite', *own]),
    ):
        assert [*inspect.signature(f).parameters][1:] == names
        for name in names:
            (line,) = [line for line in f.__doc__.splitlines() if line.strip().startswith(f'{name}: ')]
            assert len(line.split()) > 3, line
        assert f.__doc__.endswith('Returns: The learner.')
    defaults = [p.default for p in inspect.signature(Learner.to_fp16).parameters.values()][1:]
    assert defaults == [65536.0, 2.0, 0.5, 2000, True, None, None, None, 'warn', 16]
    assert [*inspect.signature(MixedPrecision).parameters][:8] == ['amp_mode', *fp16[:7]]


@pytest.mark.parametrize('value', ['bf16', None, MixedPrecision('bf16')], ids=str)
def test_a_precision_is_not_assigned(value):
    learn = learner().to_fp16()
    with pytest.raises(AttributeError, match=r'(?s)learn\.precision = .*`learn\.to_bf16\(\)`'):
        learn.precision = value
    assert modes(learn) == ['fp16'] and learn.precision.mode == 'fp16'


# -- channels last


@pytest.mark.parametrize('before', ['fp32', 'fp16'])
def test_to_channelslast_with_a_precision_replaces_the_one_before(before):
    learn = getattr(learner(conv()), f'to_{before}')()
    assert learn.to_channelslast(amp_mode='bf16', fp32_modules='3') is learn
    learn.fit(1)
    learn.fit(1)
    assert modes(learn) == ['bf16'] and learn.precision.fp32_module_names == ['3'] and len(learn.recorder.losses) == 6
    assert learn.model[1].weight.is_contiguous(memory_format=torch.channels_last)
    assert sum(isinstance(cb, ChannelsLast) for cb in learn.cbs) == 1
    learn.to_contiguous(to_fp32=True)
    assert not precisions(learn) and not left_on(learn) and not hasattr(learn, 'channels_last')


def test_to_channelslast_without_a_precision_keeps_the_one_there_is():
    for args in ((), (False,)):
        learn = learner().to_bf16()
        assert learn.precision is learn.to_channelslast(*args).precision
    assert modes(learner().to_channelslast()) == ['fp16'] and modes(learner().to_channelslast(False)) == []


def test_attributes_of_the_model_are_no_callbacks():
    "fastai looks up on the model what a learner does not have; `DistributedDataParallel` has `mixed_precision`."
    model = mlp()
    model.mixed_precision = model.channels_last = True
    learn = learner(model)
    with learn.precision_as('bf16'):
        assert modes(learn) == ['bf16']
    assert modes(learn) == []
    learn.to_channelslast()
    assert modes(learn) == ['fp16'] and any(isinstance(cb, ChannelsLast) for cb in learn.cbs)


@pytest.mark.parametrize(
    'call, words',
    [
        (lambda l: l.to_channelslast('bf16'), r"use_amp='bf16'.*to_channelslast\(amp_mode='bf16'\)"),
        (lambda l: l.to_channelslast(False, 'bf16'), r"use_amp=False.*'bf16'.*to_channelslast\(amp_mode='bf16'\)"),
        (lambda l: l.to_channelslast(use_amp=False, init_scale=512.0), 'use_amp=False.*init_scale'),
        pytest.param(lambda l: l.to_channelslast(amp_mode='fp8'), 'fp8', marks=pytest.mark.torchao),
        (lambda l: l.to_channelslast(amp_mode='bf16', fp32_modules='nowhere'), 'nowhere'),
    ],
)
def test_to_channelslast_with_bad_arguments_changes_nothing(call, words):
    learn = learner().to_fp16()
    before = list(learn.cbs)
    with pytest.raises(ValueError, match='(?s)' + words):
        call(learn)
    assert list(learn.cbs) == before


# -- amp_context


@pytest.mark.parametrize('mode, dtype', [('bf16', torch.bfloat16), ('fp32', torch.float32)])
def test_amp_context_inside_and_outside_a_fit(mode, dtype):
    learn, seen, before = getattr(learner(), f'to_{mode}')(), [], autocast_state()

    def out(l):
        with torch.no_grad(), learn.amp_context():
            seen.append(learn.model(torch.randn(2, 6)).dtype)

    out(learn)
    learn.add_cb(At('before_epoch', out)).fit(1)
    with pytest.raises(KeyError), learn.amp_context():
        raise KeyError
    assert seen == [dtype] * 2 and autocast_state() == before


# -- callbacks and names


def test_a_callback_added_to_a_second_learner_leaves_the_first():
    cb, first, second, alone = mixed('fp16'), learner(), learner(), learner()
    first.add_cb(cb)
    with pytest.warns(UserWarning, match='moved'):
        second.add_cb(cb)
    assert first.precision is None and second.precision is cb and not left_on(first)
    for learn in (first, second, alone):
        learn.fit(1)
    assert same(params(first), params(alone)) and len(cb.scales) == 6


def test_callbacks_given_to_another_learner_all_arrive():
    first = learner(cbs=[MixedPrecision('bf16'), GradientClip(0.1), GradientAccumulation(16)])
    with pytest.warns(UserWarning, match='moved'):
        other = Learner(first.dls, mlp(), loss_func=first.loss_func, cbs=first.cbs)
    assert {type(cb).__name__ for cb in other.cbs} >= {'MixedPrecision', 'GradientClip', 'GradientAccumulation'}


def test_the_same_callback_twice_on_one_learner_is_refused():
    cb = mixed('fp16')
    learn = learner(cbs=[cb])
    for add in (lambda: learn.fit(1, cbs=[cb]), lambda: learn.add_cb(cb)):
        with pytest.raises(ValueError, match='already'):
            add()
    assert list(learn.cbs).count(cb) == 1
    learn.fit(1)
    assert learn.precision is cb and cb.n_skipped == 0


class PrecisionCallback(Callback):
    "fastai would name it `learn.precision`."


def test_a_callback_of_the_users_cannot_be_named_precision():
    learn = learner()
    with pytest.raises(AttributeError, match='(?s)learn.precision = PrecisionCallback.*another name'):
        learn.add_cb(PrecisionCallback())
    assert learn.precision is None and not any(isinstance(cb, PrecisionCallback) for cb in learn.cbs)


@pytest.mark.parametrize('value', ['no', None, 0])
def test_skip_nonfinite_is_true_or_false(value):
    with pytest.raises(ValueError, match=f'skip_nonfinite={value!r} cannot be used: it must be True or False'):
        learner().to_bf16(skip_nonfinite=value)
