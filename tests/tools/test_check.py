"The console script `fastxtend_amp_check`: what it prints, and that it fails if a check fails."

import os
from importlib.util import find_spec

import pandas as pd
import pytest, torch
from fastai.learner import Learner
from sklearn import datasets
from sklearn.utils import Bunch

from fastxtend_amp import MixedPrecision
from fastxtend_amp.precisions import PRECISIONS
from fastxtend_amp.tools import check, demo
from fastxtend_amp.training import scaling
from helpers import *


@pytest.fixture
def short(monkeypatch):
    "One epoch of eleven small batches, of fp32 and fp16."
    digits = datasets.load_digits()
    monkeypatch.setattr(datasets, 'load_digits', lambda: Bunch(images=digits.images[:220], target=digits.target[:220]))
    monkeypatch.setattr(demo, 'BATCH_SIZE', 16)
    monkeypatch.setattr(check, 'EPOCHS', 1)
    monkeypatch.setattr(check, 'PRECISIONS', {'fp16': PRECISIONS['fp16']})


def failed(results):
    return {(r.precision, r.what) for r in results if r.passed is False}


def test_all_is_well_on_the_cpu(capsys):
    assert check.main(['--device', 'cpu']) == 0
    out = capsys.readouterr().out
    lines = [l.split() for l in out.splitlines() if l.startswith(('ok', 'left out'))]
    assert {l[1] for l in lines} >= {'fp32', 'fp16'} and len(lines) >= 7
    assert f'torch {torch.__version__}' in out and 'fastxtend_amp' in out and 'device: cpu' in out and 'bf16: ' in out
    assert out.splitlines()[-1] == f'All {sum(l[0] == "ok" for l in lines)} checks passed on cpu.'


def test_a_loss_scale_that_is_not_restored(monkeypatch, short, capsys):
    monkeypatch.setattr(MixedPrecision, 'load_state_dict', lambda self, state: None)
    assert check.main(['--device', 'cpu']) == 1
    out = capsys.readouterr().out
    assert '1 of' in out.splitlines()[-1] and 'fp16: save and load' in out.splitlines()[-1] and 'into an issue' in out


def test_a_step_that_is_not_skipped(monkeypatch, short):
    monkeypatch.setattr(scaling, 'found_infs_of', lambda scaler, opt: [torch.zeros(())])
    assert ('fp16', 'skips a step, Adam') in failed(check.check('cpu'))


def test_autocast_left_on_after_an_exception(monkeypatch, short):
    fit = Learner.fit

    def leaks(self, *args, **kwargs):
        try:
            fit(self, *args, **kwargs)
        except InterruptedError:
            torch.set_autocast_enabled('cpu', True)
            raise

    monkeypatch.setattr(Learner, 'fit', leaks)
    try:
        found = failed(check.check('cpu'))
    finally:
        torch.set_autocast_enabled('cpu', False)
    assert ('fp16', 'after an exception') in found


def test_an_error_is_a_failed_check(monkeypatch, short, capsys):
    def broken(self, *args, **kwargs):
        raise OSError('no space left')

    monkeypatch.setattr(Learner, 'save', broken)
    assert check.main(['--device', 'cpu']) == 1
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith('FAILED')]
    assert found == [f'FAILED   {p}         save and load             OSError: no space left' for p in ('fp32', 'fp16')]


def test_nothing_trains_as_fp32_where_fp32_fails(monkeypatch, short):
    fit = Learner.fit

    def broken(self, *args, **kwargs):
        if self.precision is None:
            raise RuntimeError('no kernel')
        return fit(self, *args, **kwargs)

    monkeypatch.setattr(Learner, 'fit', broken)
    assert failed(check.check('cpu')) == {
        ('fp32', 'fp32 reference'),
        ('fp32', 'save and load'),
        ('fp16', 'trains as fp32'),
    }


def test_a_precision_that_the_device_has_not(monkeypatch, capsys):
    modes = [name for name, cls in PRECISIONS.items() if cls.in_tables and not cls.package]
    support = pd.DataFrame({'mode': modes, 'support': 'unsupported', 'why': 'the test says so'})
    monkeypatch.setattr(check, 'EPOCHS', 1)
    monkeypatch.setattr(check, 'precision_support', lambda device: support)
    assert check.main(['--device', 'cpu']) == 0
    lines = capsys.readouterr().out.splitlines()
    checked = [line for line in lines if line.startswith(('ok', 'left'))]
    assert [line[:22].split() for line in checked] == 2 * [['ok', 'fp32']] + [['left', 'out', mode] for mode in modes]
    assert 'fp32 reference' in checked[0] and lines[-1] == 'All 2 checks passed on cpu.'


@pytest.mark.skipif(
    not (os.environ.get('PJRT_DEVICE') and find_spec('torch_xla')), reason='needs torch_xla, and PJRT_DEVICE'
)
def test_on_xla(short, capsys):
    assert check.main(['--device', 'xla']) == 0, capsys.readouterr().out


def test_settings_of_fp32_that_are_not_the_default_are_named():
    assert 'fp32_precision' not in check.head(torch.device('cpu'))
    torch.backends.mkldnn.matmul.fp32_precision = 'bf16'
    try:
        assert "`torch.backends.mkldnn.matmul.fp32_precision` is 'bf16'" in check.head(torch.device('cpu'))
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = 'none'


@pytest.mark.parametrize('device', ['gpu', 'meta'])
def test_bad_input(device, capsys):
    with pytest.raises(SystemExit):
        check.main(['--device', device])
    assert f'--device {device}' in capsys.readouterr().err
