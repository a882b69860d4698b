"PyTorch's settings for fp32 precision are restored, whichever way they were set."

import re

import pytest, torch
from torch import backends

from fastxtend_amp.devices.fp32_settings import (
    DEFAULTS,
    FP32_SETTINGS,
    FULL_PRECISION,
    TF32_SETTINGS,
    fp32_settings,
    get_fp32_setting,
    set_fp32_setting,
    settings_note,
)


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
    for key in FP32_SETTINGS:
        if get_fp32_setting(*key) != before[key]:
            set_fp32_setting(*key, DEFAULTS.get(key, 'none'))
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
            if 'cudnn' in old:
                with backends.cudnn.flags(deterministic=True):  # reads it, as a model of a user may
                    pass
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
