"PyTorch's settings for fp32 precision are restored after the context, whichever way they were set."

import re

import pytest, torch
from torch import backends

from fastxtend_amp.compat import get_fp32_setting, set_fp32_setting
from fastxtend_amp.devices.fp32_settings import (
    FP32_SETTINGS,
    FULL_PRECISION,
    TF32_SETTINGS as TF32,
    fp32_settings,
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


def mkldnn_alone():
    set_fp32_setting('mkldnn', 'all', 'bf16')


def generic_and_one():
    backends.fp32_precision = 'tf32'
    backends.cudnn.rnn.fp32_precision = 'ieee'


def by_name(attribute, value):
    def set_it():
        place, _, name = attribute.rpartition('.')
        place = eval(place) if place else torch
        setattr(place, name, value)

    return set_it


WAYS = {
    'nothing': lambda: None,
    'high': lambda: torch.set_float32_matmul_precision('high'),
    'medium': lambda: torch.set_float32_matmul_precision('medium'),
    'medium, then highest': lambda: (
        torch.set_float32_matmul_precision('medium'),
        torch.set_float32_matmul_precision('highest'),
    ),
    'no tf32 in cudnn': by_name('backends.cudnn.allow_tf32', False),
    'tf32 in matmul': by_name('backends.cuda.matmul.allow_tf32', True),
    'generic': by_name('backends.fp32_precision', 'tf32'),
    'generic bf16': by_name('backends.fp32_precision', 'bf16'),
    'one': by_name('backends.mkldnn.matmul.fp32_precision', 'bf16'),
    'cudnn': by_name('backends.cudnn.fp32_precision', 'ieee'),
    'mkldnn alone': mkldnn_alone,
    'generic and one': generic_and_one,
}


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


@pytest.mark.parametrize('wanted', [FULL_PRECISION, TF32], ids=['full', 'tf32'])
@pytest.mark.parametrize('way', WAYS)
def test_each_is_put_back(way, wanted):
    WAYS[way]()
    before, old = values(), old_names()
    with pytest.raises(InterruptedError), fp32_settings(wanted):
        assert wanted.items() <= values().items()
        with fp32_settings(FULL_PRECISION):  # as a report inside
            assert set(values().values()) == {'ieee'}
        assert wanted.items() <= values().items()
        raise InterruptedError
    assert values() == before and old_names() == old
    after = own_values()
    WAYS[way]()
    follows = {n for n, v in own_values().items() if v == 'none'}
    assert {after[n] for n in follows if wanted is FULL_PRECISION} <= {'none'}  # and follows again


def test_the_settings_act_in_the_backward_pass_too():
    seen = []

    class Notes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(backends.cuda.matmul.fp32_precision)
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            seen.append(backends.cuda.matmul.fp32_precision)
            return g

    with fp32_settings(TF32):
        Notes.apply(torch.ones(1, requires_grad=True)).backward()
    assert seen == ['tf32', 'tf32'] and backends.cuda.matmul.fp32_precision == 'none'


@pytest.mark.parametrize('way', WAYS)
def test_what_pytorchs_compiler_reads_by_its_old_name_is_readable_in_tf32(way):
    WAYS[way]()
    before = old_names()
    with fp32_settings(TF32):
        assert before.keys() <= old_names().keys()
    context = fp32_settings(TF32)
    context.__exit__()  # of a fit that was interrupted before
    with context:
        pass
    context.__exit__()
    assert old_names() == before


@pytest.mark.parametrize(
    'name,expected',
    [
        ('nothing', {}),
        ('medium, then highest', {}),
        ('no tf32 in cudnn', {}),
        ('cudnn', {}),
        ('tf32 in matmul', {'cuda.matmul': 'tf32'}),
        ('medium', {'cuda.matmul': 'tf32', 'mkldnn.matmul': 'bf16'}),
        ('one', {'mkldnn.matmul': 'bf16'}),
        ('mkldnn alone', {'mkldnn': 'bf16'}),
        ('generic', {'': 'tf32'}),
        ('generic and one', {'': 'tf32'}),
    ],
)
def test_those_that_are_not_the_default_are_named(name, expected):
    WAYS[name]()
    found = dict(re.findall("`([^`]+).fp32_precision` is '(.+?)'", settings_note()))
    assert found == {f'torch.backends.{n}'.rstrip('.'): v for n, v in expected.items()}
    assert bool(settings_note()) == bool(expected)
