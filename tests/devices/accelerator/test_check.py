"`fastxtend_amp_check` on an accelerator, and on one with a fault that it is there to find."
import pytest

from fastxtend_amp import AMPMode
from fastxtend_amp.tools import check
from helpers import *


@pytest.fixture(autouse=True)
def short(monkeypatch): monkeypatch.setattr(check, 'EPOCHS', 1)


def test_it_passes(device):
    results = check.check(device)
    assert not [r for r in results if not r.passed], check.report(results, device)
    assert {r.precision for r in results} == {'fp32', 'bf16', 'fp16', 'half weights'}


def test_the_accelerator_is_the_default(device): assert check._device(None).type == device.type


def test_fused_kernels_that_ignore_found_inf(device, sim, monkeypatch):
    "Found out by what the step does, whatever the package believes of the optimizer."
    from fastxtend_amp import scaling
    sim.ignores_found_inf = True
    monkeypatch.setattr(scaling, 'skips_on_device', lambda opt, params: hasattr(opt, 'opt'))
    monkeypatch.setattr(check, 'PRECISIONS', {'fp32': None, 'fp16': AMPMode.FP16})
    results = check.check(device)
    assert [(r.precision, r.what) for r in results if not r.passed] == [('fp16', 'skips a step, fused AdamW')]
    assert 'CHANGED THE WEIGHTS' in check.report(results, device)


def test_a_device_without_bf16(device, sim):
    sim.amp_dtypes, sim.bf16, sim.capability = [torch.float16], False, (6, 1)
    results = check.check(device)
    assert {r.precision for r in results if r.passed is None} == {'bf16', 'half weights'} and not [
        r for r in results if r.passed is False
    ]
