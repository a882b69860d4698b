"TF32: a fit's operators run under PyTorch's settings for it; tests/devices/test_fp32_settings.py restores them."

import math

import pytest, torch

from fastxtend_amp import precision_support
from fastxtend_amp.devices.fp32_settings import FP32_SETTINGS, TF32_SETTINGS, fp32_settings, get_fp32_setting
from helpers import At, finite, is_outside_a_fit, learner, loaders
from training.rows import FP32, TO, net, third_batch


def values():
    return {key: get_fp32_setting(*key) for key in FP32_SETTINGS}


def noting(**kwargs):
    "A learner, and what its last layer notes, forward and backward: the dtype in TF32, otherwise False."
    learn, seen = learner(net(), **kwargs), []

    def note(module, given, out):
        in_tf32 = {values()[name] for name in TF32_SETTINGS} == {'tf32'}
        seen.append(in_tf32 and not torch.is_autocast_enabled('cpu') and out[0].dtype)

    learn.model[2].register_forward_hook(note)
    learn.model[2].register_full_backward_hook(note)
    return learn, seen


@pytest.mark.parametrize('users', [{}, {('mkldnn', 'matmul'): 'bf16', ('cuda', 'matmul'): 'tf32'}])
def test_operators_run_in_tf32_forward_and_backward(users, with_tf32):
    learn, seen = noting(dls=loaders(8))
    learn.to_tf32()
    with fp32_settings(users):
        before = values()
        learn.fit(1)
        assert seen == [FP32] * (2 * 2 + 2)  # two batches forward and backward, and two of validation
        learn.validate()
        with learn.amp_context():
            learn.model(torch.ones(1, 6))
        assert seen == [FP32] * 9 and values() == before


def test_a_validation_and_a_switch_in_a_fit(with_tf32):
    before, (learn, seen) = values(), noting()
    learn.to_tf32().fit(1, cbs=At('after_train', lambda l: l.validate(), 20))
    assert {*seen} == {FP32} and values() == before
    for start, to, dtypes in (('tf32', 'fp32', [FP32, False]), ('bf16', 'tf32', [False, FP32])):
        seen.clear()
        TO[start](learn).fit(1, cbs=At('before_batch', lambda l: third_batch(l) and TO[to](l)))
        assert seen == dtypes[:1] * 6 + dtypes[1:] * 8 and values() == before


def test_where_there_is_none_the_reason_is_given():
    table = precision_support('cpu').set_index('precision')
    assert table.support['tf32'] == 'unsupported' and 'NVIDIA' in table.why['tf32']
    learn, before = learner().to_tf32(), values()
    with pytest.raises(ValueError, match=r'(?s)tf32.*NVIDIA.*use `learn\.to_\w+\(\)`'):
        learn.fit(1)
    assert values() == before and is_outside_a_fit(learn)


@pytest.mark.parametrize('on_overflow', ['raise', 'fix'])
def test_a_loss_that_is_not_finite_in_tf32(on_overflow, with_tf32, capsys):
    "From the second batch on; its step is skipped, and what follows is fp32."
    in_tf32 = lambda: get_fp32_setting('cuda', 'matmul') == 'tf32' and learn.train_iter > 0
    learn = learner(loss_func=lambda p, y: p.square().mean() * (math.nan if in_tf32() else 1.0))
    learn.to_tf32(on_overflow=on_overflow)
    if on_overflow == 'raise':
        with pytest.raises(FloatingPointError, match='(?s)tf32 training failed.*loss is nan.*to_fp32'):
            learn.fit(1)
    else:
        learn.fit(1)
        assert 'The next batches train with `learn.to_fp32()`' in capsys.readouterr().out
        assert learn.mixed_precision.amp_mode is None
        assert learn.mixed_precision.skips == [False, True] and finite(learn)
