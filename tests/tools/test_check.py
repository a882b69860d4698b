"The console script `fastxtend_amp_check`: what it prints, and that it fails where something is wrong."
import pandas as pd
import pytest, torch
from fastai.learner import Learner
from sklearn import datasets
from sklearn.utils import Bunch

from fastxtend_amp import AMPMode, MixedPrecision
from fastxtend_amp.tools import check, demo
from helpers import *

@pytest.fixture
def short(monkeypatch):
    "One epoch of eleven small batches, of fp32 and fp16."
    digits = datasets.load_digits()
    monkeypatch.setattr(datasets, 'load_digits', lambda: Bunch(images=digits.images[:220], target=digits.target[:220]))
    monkeypatch.setattr(demo, 'BATCH_SIZE', 16)
    monkeypatch.setattr(check, 'EPOCHS', 1)
    monkeypatch.setattr(check, 'PRECISIONS', {'fp32': None, 'fp16': AMPMode.FP16})


def failed(results): return {(r.precision, r.what) for r in results if r.passed is False}


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
    monkeypatch.setattr(torch.amp.GradScaler, 'step', lambda self, opt, *args: opt.step())
    assert ('fp16', 'skips a step, Adam') in failed(check.check('cpu'))


def test_autocast_left_on_after_an_exception(monkeypatch, short):
    fit = Learner.fit
    def leaks(self, *args, **kwargs):
        try: fit(self, *args, **kwargs)
        except InterruptedError:
            torch.set_autocast_enabled('cpu', True)
            raise
    monkeypatch.setattr(Learner, 'fit', leaks)
    try: found = failed(check.check('cpu'))
    finally: torch.set_autocast_enabled('cpu', False)
    assert ('fp16', 'after an exception') in found


def test_an_error_is_a_failed_check(monkeypatch, short):
    def broken(self, *args, **kwargs): raise OSError('no space left')
    monkeypatch.setattr(Learner, 'save', broken)
    results = check.check('cpu')
    assert {what for _, what in failed(results)} == {'save and load'}
    assert 'FAILED   fp32         save and load             OSError: no space left' in check.report(results, 'cpu')


def test_a_precision_that_the_device_has_not(monkeypatch):
    support = pd.DataFrame({'mode': ['bf16', 'fp16'], 'support': 'unsupported', 'why': 'the test says so'})
    monkeypatch.setattr(check, 'EPOCHS', 1)
    monkeypatch.setattr(check, 'precision_support', lambda device: support)
    results = check.check('cpu')
    assert [r.passed for r in results] == [True, True, None, None, None] and not failed(results)
    assert (results[0].precision, results[0].what) == ('fp32', 'fp32 reference')
    assert 'left out fp16' in check.report(results, 'cpu') and 'All 2 checks passed' in check.report(results, 'cpu')


@pytest.mark.parametrize('device', ['gpu', 'meta'])
def test_bad_input(device, capsys):
    with pytest.raises(SystemExit): check.main(['--device', device])
    assert f'--device {device}' in capsys.readouterr().err
