"TF32: the settings under which operators run, and that they are restored."

import fastai.callback.schedule  # noqa: F401  patches Learner
import pytest, torch

from fastxtend_amp.precisions import Support, fastest_native, tf32
from fastxtend_amp import AMPMode, precision_support
from fastxtend_amp.devices.fp32_settings import TF32_SETTINGS as TF32
from fastxtend_amp.insight.candidates import candidates, name_of
from helpers import *
from test_fp32_settings import WAYS, old_names, put_back, values  # noqa: F401


@pytest.fixture
def native(monkeypatch):
    "Pose as a device with TF32: PyTorch accepts the settings on any device."
    monkeypatch.setattr(tf32, '_NEEDS', Support('native', 'as if'))


class Notes(torch.autograd.Function):
    seen: list

    @staticmethod
    def note(x):
        Notes.seen.append(
            {values()[name] for name in TF32} == {'tf32'} and not torch.is_autocast_enabled('cpu') and x.dtype
        )

    @staticmethod
    def forward(ctx, x):
        Notes.note(x)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        Notes.note(g)
        return g


class Noting(nn.Module):
    def forward(self, x):
        return Notes.apply(x)


def noting(**kwargs):
    Notes.seen = []
    return learner(nn.Sequential(nn.Linear(6, 8), Noting(), nn.Linear(8, 1)), **kwargs)


def test_operators_run_in_tf32_forward_and_backward_and_everything_is_put_back(native):
    for way in WAYS.values():
        way()
        before, old = values(), old_names()
        learn = noting(dls=loaders(8)).to_tf32()
        learn.fit(1)
        assert Notes.seen == [torch.float32] * (2 * 2 + 2)  # two batches forward and backward, and two of validation
        learn.validate()
        learn.get_preds()
        assert len(Notes.seen) == 10 and all(Notes.seen)
        with learn.amp_context():
            learn.model(torch.ones(1, 6))
        assert Notes.seen.pop() and values() == before and old_names() == old and is_outside_a_fit(learn)
        learn.model(torch.ones(1, 6))
        assert bool(Notes.seen.pop()) == ({before[name] for name in TF32} == {'tf32'})


@pytest.mark.parametrize('event', ['before_fit', 'after_pred', 'after_backward', 'before_validate', 'after_epoch'])
@pytest.mark.parametrize('error', [InterruptedError, KeyboardInterrupt])
def test_after_an_exception(native, event, error):
    def fail(l):
        raise error('here')

    learn, before = noting().to_tf32(), values()
    with pytest.raises(error):
        learn.fit(1, cbs=At(event, fail, 20))
    assert values() == before and is_outside_a_fit(learn)
    learn.fit(1)
    assert values() == before


def test_a_validation_in_a_fit_and_a_switch_in_mid_fit(native):
    before, seen = values(), []
    learn = noting().to_tf32()
    learn.fit(1, cbs=At('after_train', lambda l: (l.validate(), seen.append(values() == before)), 20))
    assert seen == [False] and all(Notes.seen) and values() == before
    Notes.seen.clear()
    learn.fit(1, cbs=At('before_batch', lambda l: l.training and l.iter == 2 and l.to_fp32()))
    assert Notes.seen == [torch.float32] * 6 + [False] * 8 and values() == before
    Notes.seen.clear()
    learn.to_bf16().fit(1, cbs=At('before_batch', lambda l: l.training and l.iter == 2 and l.to_tf32()))
    assert Notes.seen == [False] * 6 + [torch.float32] * 8 and values() == before


def test_trains_as_fp32_on_a_cpu_also_compiled(native):
    plain, learn = learner(), learner().to_tf32()
    compiled = learner()
    compiled.model = torch.compile(compiled.model, backend='aot_eager')
    for l in (plain, learn, compiled.to_tf32()):
        l.fit(2, 0.01)
        l.lr_find(num_it=3, show_plot=False, suggest_funcs=None)
    assert same(params(plain), params(learn)) and same(params(plain), params(compiled))
    assert learn.precision.mode is AMPMode.TF32 and repr(learn.precision) == "MixedPrecision('tf32')"
    assert learn.precision.state_dict() == {} and not learn.precision.scales


def test_where_there_is_none_the_reason_is_given():
    table = precision_support('cpu').set_index('mode')
    assert table.support['tf32'] == 'unsupported' and 'NVIDIA' in table.why['tf32']
    learn, before = learner().to_tf32(), values()
    with pytest.raises(ValueError, match=r'(?s)tf32.*NVIDIA.*use `learn\.to_\w+\(\)`'):
        learn.fit(1)
    assert values() == before and is_outside_a_fit(learn)
    found = learner().compare_precision('tf32', 2, n_seeds=0)
    assert found.table.support['tf32'] == 'failed' and 'NVIDIA' in found.table.note['tf32']


def test_a_row_of_the_comparison_where_it_is_native(native):
    learn = learner()
    assert [name_of(p) for p in candidates(learn)][-1] == 'tf32'
    found = learn.compare_precision(['tf32', 'bf16'], 4, n_seeds=0)
    assert found.table.support['tf32'] == 'native' and found.calls['tf32'] == 'learn.to_tf32()'
    assert found.losses['tf32'] == found.losses['fp32'] != found.losses['bf16']  # on a CPU
    found.apply(learn, 'tf32')
    assert learn.precision.mode is AMPMode.TF32
    found.plot()
    learn.to_amp(measure=True, max_seconds=3)
    assert 'tf32' in learn.precision_decision.table.index
    assert fastest_native(torch.device('cpu'), [AMPMode.BF16, AMPMode.FP16]) is None  # 'auto' does not choose it


def test_what_does_not_work_with_it():
    with pytest.raises(ValueError, match="fp32_modules='0'.*tf32"):
        MixedPrecision('tf32', fp32_modules='0')
    with pytest.raises(ValueError, match="(?s)amp_mode='tf32'.*to_tf32"):
        learner().to_half_weights('tf32')
    with pytest.raises(ValueError, match="modes='half_weights tf32'"):
        learner().compare_precision('half_weights tf32')
    with pytest.raises(ValueError, match="modes='tf32'"):
        learner().precision_report('tf32')
