"TF32: PyTorch's settings for fp32 precision, restored whichever way they were set; operators that run under them."

import re

import fastai.callback.schedule  # noqa: F401  patches Learner
import pytest

from fastxtend_amp import AMPMode, precision_support
from fastxtend_amp.insight.candidates import candidates
from fastxtend_amp.precisions import fastest_native
from fastxtend_amp.devices.fp32_settings import (
    FP32_SETTINGS,
    FULL_PRECISION,
    TF32_SETTINGS,
    fp32_settings,
    get_fp32_setting,
    set_fp32_setting,
    settings_note,
)
from training.rows import *


def values():
    return {key: get_fp32_setting(*key) for key in FP32_SETTINGS}


def old_names():
    "Return the values of the old names, without those that raise an error."
    found = {}
    for name, read in {
        'precision': torch.get_float32_matmul_precision,
        'matmul': lambda: backends.cuda.matmul.allow_tf32,
        'cudnn': lambda: backends.cudnn.allow_tf32,
    }.items():
        try:
            found[name] = read()
        except RuntimeError:
            pass
    return found


WAYS = {  # how the settings were set before, and which of them are then not the default
    'nothing': ('', {}),
    'high': ("torch.set_float32_matmul_precision('high')", {'cuda.matmul': 'tf32', 'mkldnn.matmul': 'tf32'}),
    'medium': ("torch.set_float32_matmul_precision('medium')", {'cuda.matmul': 'tf32', 'mkldnn.matmul': 'bf16'}),
    'no tf32 in cudnn': ('backends.cudnn.allow_tf32 = False', {}),
    'tf32 in matmul': ('backends.cuda.matmul.allow_tf32 = True', {'cuda.matmul': 'tf32'}),
    'generic': ("backends.fp32_precision = 'tf32'", {'': 'tf32'}),
    'generic bf16': ("backends.fp32_precision = 'bf16'", {'': 'bf16'}),
    'one': ("backends.mkldnn.matmul.fp32_precision = 'bf16'", {'mkldnn.matmul': 'bf16'}),
    'cudnn': ("backends.cudnn.fp32_precision = 'ieee'", {}),
    'mkldnn alone': ("set_fp32_setting('mkldnn', 'all', 'bf16')", {'mkldnn': 'bf16'}),
    'generic and one': ("backends.fp32_precision = 'tf32'; backends.cudnn.rnn.fp32_precision = 'ieee'", {'': 'tf32'}),
}


def set_by(way):
    exec(WAYS[way][0])


@pytest.fixture(autouse=True)
def put_back():
    before = values()
    yield
    torch.set_float32_matmul_precision('highest')
    backends.cudnn.allow_tf32 = True  # also by its old name, which `torch.export` reads
    for key, (_, default) in FP32_SETTINGS.items():
        if get_fp32_setting(*key) != before[key]:
            set_fp32_setting(*key, default)
    assert values() == before


def own_values():
    "Each setting's own value, when none follows another."
    for backend in ('generic', 'cuda', 'mkldnn'):
        set_fp32_setting(backend, 'all', 'none')
    return values()


@pytest.mark.parametrize('wanted', [FULL_PRECISION, TF32_SETTINGS], ids=['full', 'tf32'])
@pytest.mark.parametrize('way', WAYS)
def test_each_setting_is_restored(way, wanted):
    set_by(way)
    before, old = values(), old_names()
    with pytest.raises(InterruptedError), fp32_settings(wanted):
        assert wanted.items() <= values().items()
        with fp32_settings(FULL_PRECISION):  # as a report inside
            assert set(values().values()) == {'ieee'}
        assert wanted.items() <= values().items()
        assert wanted is FULL_PRECISION or old.keys() <= old_names().keys()  # which PyTorch's compiler reads
        raise InterruptedError
    assert values() == before and old_names() == old
    found = dict(re.findall("`([^`]+).fp32_precision` is '(.+?)'", settings_note()))
    assert found == {f'torch.backends.{n}'.rstrip('.'): v for n, v in WAYS[way][1].items()}
    after = own_values()
    set_by(way)
    follows = {n for n, v in own_values().items() if v == 'none'}
    assert {after[n] for n in follows if wanted is FULL_PRECISION} <= {'none'}  # and follows again


# -- a fit


class Notes(torch.autograd.Function):
    seen: list = []

    @staticmethod
    def note(x):
        in_tf32 = {values()[name] for name in TF32_SETTINGS} == {'tf32'}
        Notes.seen.append(in_tf32 and not torch.is_autocast_enabled('cpu') and x.dtype)
        return x.clone()

    forward = staticmethod(lambda ctx, x: Notes.note(x))
    backward = staticmethod(lambda ctx, g: Notes.note(g))


class Noting(nn.Module):
    def forward(self, x):
        return Notes.apply(x)


def noting(**kwargs):
    Notes.seen.clear()
    return learner(nn.Sequential(nn.Linear(6, 8), Noting(), nn.Linear(8, 1)), **kwargs)


@pytest.mark.parametrize('way', ['nothing', 'medium', 'generic bf16', 'mkldnn alone'])
def test_operators_run_in_tf32_forward_and_backward(way, with_tf32):
    set_by(way)
    before, old = values(), old_names()
    learn = noting(dls=loaders(8)).to_tf32()
    learn.fit(1)
    assert Notes.seen == [FP32] * (2 * 2 + 2)  # two batches forward and backward, and two of validation
    learn.validate()
    with learn.amp_context():
        learn.model(torch.ones(1, 6))
    assert Notes.seen == [FP32] * 9 and values() == before and old_names() == old


def test_a_validation_in_a_fit_and_a_switch_in_mid_fit(with_tf32):
    before, seen = values(), []
    learn = noting().to_tf32()
    learn.fit(1, cbs=At('after_train', lambda l: (l.validate(), seen.append(values() == before)), 20))
    assert seen == [False] and all(Notes.seen) and values() == before
    for start, to, dtypes in (
        (Learner.to_tf32, Learner.to_fp32, [FP32, False]),
        (Learner.to_bf16, Learner.to_tf32, [False, FP32]),
    ):
        Notes.seen.clear()
        start(learn).fit(1, cbs=At('before_batch', lambda l: third(l) and to(l)))
        assert Notes.seen == dtypes[:1] * 6 + dtypes[1:] * 8 and values() == before


def test_where_there_is_none_the_reason_is_given():
    table = precision_support('cpu').set_index('mode')
    assert table.support['tf32'] == 'unsupported' and 'NVIDIA' in table.why['tf32']
    learn, before = learner().to_tf32(), values()
    with pytest.raises(ValueError, match=r'(?s)tf32.*NVIDIA.*use `learn\.to_\w+\(\)`'):
        learn.fit(1)
    assert values() == before and is_outside_a_fit(learn)
    found = learner().compare_precision('tf32', 2, n_seeds=0)
    assert found.table.support['tf32'] == 'failed' and 'NVIDIA' in found.table.note['tf32']


def test_in_a_comparison(with_tf32):
    learn = learner()
    assert [p.name for p in candidates(learn)][-1] == 'tf32'
    found = learn.compare_precision(['tf32', 'bf16'], 4, n_seeds=0)
    assert found.table.support['tf32'] == 'native' and found.calls['tf32'] == 'learn.to_tf32()'
    assert found.losses['tf32'] == found.losses['fp32'] != found.losses['bf16']  # on a CPU
    found.apply(learn, 'tf32')
    assert learn.precision.mode is AMPMode.TF32 and learn.precision.state_dict() == {}
    assert fastest_native(torch.device('cpu'), [AMPMode.BF16, AMPMode.FP16]) is None  # `to_amp` does not choose it
    for method in ('compare_precision', 'precision_report'):
        with pytest.raises(ValueError, match='tf32'):
            getattr(learn, method)('half weights tf32' if method == 'compare_precision' else 'tf32')
