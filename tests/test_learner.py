"What a user calls on a learner."
import inspect, itertools, warnings

import pytest, torch
from fastai.callback import fp16
from fastai.callback.channelslast import ChannelsLast
from fastai.learner import load_learner
from torch import nn

from fastxtend_amp import AMPMode, MixedPrecision
from fastxtend_amp.callback import PRECISION_CALLBACKS
from helpers import *

CALLS = {'to_fp16': 'fp16', 'to_bf16': 'bf16', 'to_amp': 'auto', 'to_fp32': None}


def precision(learn): return [cb for cb in learn.cbs if isinstance(cb, PRECISION_CALLBACKS)]


@pytest.mark.parametrize('calls', [*itertools.product(CALLS, repeat=2), ('to_fp16',) * 5], ids=','.join)
@pytest.mark.parametrize('train', [False, True])
def test_exactly_one_callback_the_last_one_asked_for(calls, train):
    learn = learner()
    for call in calls:
        assert getattr(learn, call)() is learn
        if train: learn.fit(1)
    expected = CALLS[calls[-1]]
    assert [cb.amp_mode for cb in precision(learn)] == ([expected] if expected else [])
    assert ('mixed_precision' in learn.__dict__) == bool(expected)
    if expected: assert learn.mixed_precision is precision(learn)[0]


@pytest.mark.parametrize('cbs', [[fp16.MixedPrecision()], [fp16.ModelToHalf(), fp16.NonNativeMixedPrecision.__new__(fp16.NonNativeMixedPrecision)]])
def test_fastai_callbacks_are_replaced_and_removed(cbs):
    learn = learner(cbs=cbs); learn.to_bf16()
    assert precision(learn) == [learn.mixed_precision]
    learn = learner(cbs=cbs); learn.to_fp32()
    assert precision(learn) == []


def test_bad_arguments_lose_nothing():
    learn = learner().to_bf16(); cb = learn.mixed_precision
    with pytest.raises(ValueError): learn.to_fp16(init_scale=-1)
    with pytest.raises(TypeError): learn.to_fp16(initial_scale=2.)
    with pytest.raises(ValueError): learner().to_channelslast(amp_mode='fp8')
    assert precision(learn) == [cb] and cb.learn is learn


@pytest.mark.parametrize('kwargs,named', [
    (dict(init_scale=0), 'init_scale=0'), (dict(init_scale=-1.), 'init_scale=-1.0'), (dict(init_scale=float('inf')), 'init_scale=inf'),
    (dict(init_scale=float('nan')), 'init_scale=nan'), (dict(init_scale=True), 'init_scale=True'), (dict(init_scale='1'), "init_scale='1'"),
    (dict(growth_factor=1.), 'growth_factor=1.0'), (dict(growth_factor=float('inf')), 'growth_factor=inf'), (dict(growth_factor=None), 'growth_factor=None'),
    (dict(backoff_factor=0.), 'backoff_factor=0.0'), (dict(backoff_factor=1), 'backoff_factor=1'), (dict(growth_interval=0), 'growth_interval=0'),
    (dict(growth_interval=2.5), 'growth_interval=2.5'), (dict(growth_interval=True), 'growth_interval=True'), (dict(loss_scale=0.), 'loss_scale=0.0'),
    (dict(loss_scale=float('nan')), 'loss_scale=nan'), (dict(loss_scale=True), 'loss_scale=True'),
    (dict(loss_scale=2., enabled=False), 'enabled=False'), (dict(loss_scale=2., init_scale=4.), 'init_scale=4.0'),
    (dict(loss_scale=2., scaler=torch.amp.GradScaler('cpu')), 'scaler'), (dict(scaler=torch.amp.GradScaler('cpu'), growth_interval=4), 'growth_interval=4'),
    (dict(scaler=torch.amp.GradScaler('cpu'), enabled=False), 'enabled=False')], ids=lambda x: str(x)[:40])
def test_bad_scaling_arguments(kwargs, named):
    for mode in ('fp16', 'bf16', 'auto'):
        with pytest.raises(ValueError, match=named.replace('.', r'\.')): MixedPrecision(mode, **kwargs)


def test_other_bad_arguments():
    with pytest.raises(ValueError, match="scaler=.*amp_mode='bf16'"): MixedPrecision('bf16', scaler=torch.amp.GradScaler('cpu'))
    with pytest.raises(TypeError, match='torch.amp.GradScaler'): MixedPrecision('fp16', scaler=512.)
    for wrong in ('scale', 'dynamic'):
        with pytest.raises(TypeError, match=wrong): MixedPrecision('fp16', **{wrong: 1})
    MixedPrecision('bf16', init_scale=2, growth_interval=5)      # without effect, and allowed


def test_signatures():
    expected = ['amp_mode', 'init_scale', 'growth_factor', 'backoff_factor', 'growth_interval', 'enabled', 'loss_scale', 'scaler',
                'fp32_modules', 'on_overflow', 'max_skips']
    for f, skip in ((MixedPrecision, 0), (Learner.to_fp16, 1), (Learner.to_amp, 1)):
        p = [q for q in inspect.signature(f).parameters.values() if q.name not in ('self', 'measure', 'max_seconds')]
        assert [q.name for q in p] == expected[skip:]
        assert [q.name for q in p if q.kind is q.KEYWORD_ONLY] == expected[6:]
        assert [q.default for q in p][-10:] == [65536.0, 2.0, .5, 2000, True, None, None, None, 'warn', 16]
    assert inspect.signature(MixedPrecision).parameters['amp_mode'].default == 'fp16'


def test_every_parameter_is_documented():
    from fastcore.docments import docments
    for f in (MixedPrecision, Learner.to_fp16, Learner.to_amp, Learner.to_bf16, Learner.to_channelslast, Learner.precision_report,
              Learner.compare_precision, MixedPrecision.plot_scales):
        docs = docments(f.__init__ if isinstance(f, type) else f)
        assert all(v for k, v in docs.items() if k not in ('self', 'return')), (f, docs)


def test_channelslast():
    conv = lambda: nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, 1))
    learn = learner(conv())
    assert learn.to_channelslast(amp_mode='bf16') is learn and isinstance(learn.mixed_precision, MixedPrecision)
    cb = learn.mixed_precision
    assert learn.to_channelslast() is learn and learn.mixed_precision is cb and len([c for c in learn.cbs if isinstance(c, ChannelsLast)]) == 1
    learn.fit(1)
    assert learn.model[1].weight.is_contiguous(memory_format=torch.channels_last)
    learn.to_contiguous(to_fp32=True)
    assert not precision(learn) and 'scaler' not in learn.__dict__ and not hasattr(learn, 'channels_last')
    assert not precision(learner(conv()).to_channelslast(use_amp=False))
    learn = learner(conv()).to_bf16(); cb = learn.mixed_precision; learn.to_channelslast()
    assert precision(learn) == [cb]
    assert learner(conv()).to_channelslast().mixed_precision.amp_mode == 'fp16'


def test_fit_with_channelslast():
    conv = nn.Sequential(nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, 1))
    learn = learner(conv).to_channelslast(amp_mode='bf16'); learn.fit(1); learn.fit(1)
    assert len(learn.recorder.losses) == 6


@pytest.mark.parametrize('mode', ['fp16', 'bf16', 'fp32'])
def test_amp_context(mode):
    learn, x = getattr(learner(), f'to_{mode}')(), torch.randn(2, 6)
    dtype = torch.float32 if mode == 'fp32' else AMPMode(mode).dtype
    def out(l=None):
        with torch.no_grad(), learn.amp_context(): return learn.model.eval()(x).dtype
    assert out() == dtype
    seen = []
    learn.add_cb(At('before_epoch', lambda l: seen.append(out()))); learn.fit(1)
    assert seen == [dtype] and out() == dtype and autocast_state()[0] is False


def test_removal_leaves_nothing():
    plain = learner(); plain.fit(1); plain.fit(1)
    for remove in (lambda l: l.to_fp32(), lambda l: l.remove_cb(fp16.MixedPrecision), lambda l: l.remove_cb(l.mixed_precision)):
        learn = learner().to_fp16(); learn.fit(1); remove(learn.to_bf16()); learn.fit(1)
        assert learn.__dict__.keys() == plain.__dict__.keys()
        assert [type(c) for c in learn.cbs] == [type(c) for c in plain.cbs]
        assert not learn.model._forward_hooks and not learn.model._forward_pre_hooks


def test_load_learner_on_cpu_is_fp32(tmp_path):
    learn = learner(path=tmp_path).to_bf16(); learn.fit(1); learn.export()
    with warnings.catch_warnings(): warnings.simplefilter('ignore'); loaded = load_learner(tmp_path / 'export.pkl')
    assert not precision(loaded) and not {'scaler', 'one_batch', '_with_events', 'mixed_precision'} & loaded.__dict__.keys()
    x = torch.randn(3, 6)
    assert torch.equal(loaded.model.eval()(x), learn.model.eval()(x))


def test_a_callback_that_is_added_to_a_second_learner_leaves_the_first():
    "It would otherwise hear the first one's events and work on the second's loss, gradients and optimizer."
    cb, first, second = MixedPrecision(init_scale=256.), learner(), learner()
    first.add_cb(cb)
    with pytest.warns(UserWarning, match='moved from one learner to another'): second.add_cb(cb)
    assert first.precision is None and second.precision is cb and not {'one_batch', 'mixed_precision'} & vars(first).keys()
    second.fit(1)
    alone = learner()
    for learn in (first, alone): learn.fit(1)
    assert same(params(first), params(alone)) and len(cb.scales) == 6


def test_the_same_callback_twice_on_one_learner_is_refused():
    cb = MixedPrecision('fp16', init_scale=128.)
    learn = learner(cbs=[cb])
    for add in (lambda: learn.fit(1, cbs=[cb]), lambda: learn.add_cb(cb)):
        with pytest.raises(ValueError, match='is on this learner already.*\n.*Leave it out'): add()
    assert list(learn.cbs).count(cb) == 1
    learn.fit(1)
    assert learn.precision is cb and cb.n_skipped == 0


def test_callbacks_handed_on_to_another_learner_all_arrive():
    from fastai.callback.training import GradientAccumulation, GradientClip
    with pytest.warns(UserWarning, match='moved from one learner'):
        first = learner(cbs=[MixedPrecision('bf16'), GradientClip(.1), GradientAccumulation(16)])
        other = type(first)(first.dls, mlp(), loss_func=first.loss_func, cbs=first.cbs)
    assert {type(cb).__name__ for cb in other.cbs} >= {'MixedPrecision', 'GradientClip', 'GradientAccumulation'}


def test_channels_last_takes_no_precision_in_the_place_of_use_amp():
    with pytest.raises(TypeError, match="(?s)use_amp, is True or False.*amp_mode='bf16'"): learner().to_channelslast('bf16')
    with pytest.raises(TypeError, match='did you mean `amp_mode=`'): learner().to_channelslast(amp_mod='bf16')
