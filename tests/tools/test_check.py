"The console script `fastxtend_amp_check`: what it prints, and that it fails if something is broken."

import os
from importlib.util import find_spec

import pytest, torch
from fastai.learner import Learner
from sklearn import datasets
from sklearn.utils import Bunch

from fastxtend_amp import MixedPrecision
from fastxtend_amp.precisions import PRECISIONS
from fastxtend_amp.tools import check, demo
from fastxtend_amp.training.current import precision_callback
from helpers import set_support


@pytest.fixture
def short(monkeypatch):
    "One epoch of eleven small batches, of fp32 and fp16."
    digits = datasets.load_digits()
    monkeypatch.setattr(datasets, 'load_digits', lambda: Bunch(images=digits.images[:220], target=digits.target[:220]))
    monkeypatch.setattr(demo, 'BATCH_SIZE', 16)
    monkeypatch.setattr(check, 'EPOCHS', 1)
    monkeypatch.setattr(check, 'PRECISIONS', {'fp16': PRECISIONS['fp16']})


@pytest.fixture
def checked(capsys):
    "Run the command; return its exit status, the checks by how they ended, and what it printed."

    def run(device='cpu'):
        status, out = check.main(['--device', device]), capsys.readouterr().out
        rows = [(line[:9].strip(), f'{line[9:22].strip()}: {line[22:48].strip()}') for line in out.splitlines()]
        return status, {mark: [name for m, name in rows if m == mark] for mark in ('ok', 'FAILED')}, out

    return run


SKIPS = ['fp16: skips a step, Adam', 'fp16: skips a step, fused AdamW']
FP16 = ['trains as fp32', 'skips a step, Adam', 'skips a step, fused AdamW', 'save and load', 'after an exception']
ALL = ['fp32: fp32 reference', 'fp32: save and load', *(f'fp16: {name}' for name in FP16)]


def test_all_is_well_on_each_kind_of_cpu(checked, cpu, short):
    status, found, out = checked()
    assert (status, found['ok'], found['FAILED']) == (0, ALL, [])
    assert f'torch {torch.__version__}' in out and 'fastxtend_amp' in out and 'device: cpu' in out
    bf16, fp16 = ('native' if name in cpu else 'emulated' for name in ('bf16', 'fphp'))
    assert f'  bf16: {bf16} (' in out and f'  fp16: {fp16} (' in out and 'fp32_precision' not in out
    assert out.splitlines()[-1] == f'All {len(ALL)} checks passed on cpu.'


def scale_lost(patch):
    patch(MixedPrecision, 'load_state_dict', lambda self, state: None)


def weights_lost(patch):
    patch(Learner, 'load', lambda self, file: self)


def no_overflow_found(patch):
    find = torch.amp.GradScaler._unscale_grads_
    patch(
        torch.amp.GradScaler, '_unscale_grads_', lambda *args: {d: torch.zeros_like(t) for d, t in find(*args).items()}
    )


def scale_kept(patch):
    patch(torch, '_amp_update_scale_', lambda *args: None)


def no_autocast(patch):
    start = torch.autocast.__init__
    patch(
        torch.autocast,
        '__init__',
        lambda self, device_type, dtype=None, **kwargs: start(self, device_type, dtype, False),
    )


def nothing_learned(patch):
    fit = Learner.fit
    patch(Learner, 'fit', lambda self, n, lr: fit(self, n, 0.0 if precision_callback(self) else lr))


def autocast_left_on(patch):
    fit = Learner.fit

    def leaks(self, *args, **kwargs):
        try:
            fit(self, *args, **kwargs)
        except InterruptedError:
            torch.set_autocast_enabled('cpu', True)
            raise

    patch(Learner, 'fit', leaks)


def disk_full(patch):
    def broken(self, file):
        raise OSError('no space left')

    patch(Learner, 'save', broken)


def no_fp32(patch):
    fit = Learner.fit

    def broken(self, *args, **kwargs):
        if precision_callback(self) is None:
            raise RuntimeError('no kernel')
        return fit(self, *args, **kwargs)

    patch(Learner, 'fit', broken)


def another_torchvision(patch):
    def broken(name):
        raise RuntimeError('operator torchvision::nms does not exist')

    patch(check, 'import_module', broken)


@pytest.mark.parametrize(
    'broken, failed, why',
    [
        (scale_lost, ['fp16: save and load'], 'WRONG: loss scale 2,048, then 65,536'),
        (weights_lost, ['fp32: save and load', 'fp16: save and load'], 'WRONG: weights as saved'),
        (no_overflow_found, SKIPS, 'WRONG: weights finite'),
        (scale_kept, SKIPS, 'WRONG: loss scale 65,536, then 65,536'),
        (no_autocast, ['fp16: trains as fp32'], 'WRONG: computes in float32'),
        (nothing_learned, ['fp16: trains as fp32'], 'WRONG: validation loss'),
        (autocast_left_on, ['fp16: after an exception'], 'WRONG: autocast'),
        (disk_full, ['fp32: save and load', 'fp16: save and load'], 'WRONG: OSError: no space left'),
        (another_torchvision, ['any: import torchvision'], 'nms does not exist: reinstall it'),
        (no_fp32, ['fp32: fp32 reference', 'fp32: save and load', 'fp16: trains as fp32'], 'RuntimeError: no kernel'),
    ],
)
def test_what_is_broken_fails_a_check(broken, failed, why, monkeypatch, short, checked):
    broken(monkeypatch.setattr)
    try:
        status, found, out = checked()
    finally:
        torch.set_autocast_enabled('cpu', False)
    assert (status, found['FAILED'], found['ok']) == (1, failed, [name for name in ALL if name not in failed])
    assert any(why in line for line in out.splitlines() if line.startswith('FAILED'))
    last = out.splitlines()[-1]
    assert (
        f'{len(failed)} of {len({*ALL, *failed})} checks FAILED on cpu ({", ".join(failed)})' in last
        and 'into an issue' in last
    )


def test_a_precision_that_the_device_has_not(monkeypatch, checked):
    precisions = [name for name, cls in PRECISIONS.items() if not cls.package]
    set_support(monkeypatch, lambda name: 'unsupported')
    monkeypatch.setattr(check, 'EPOCHS', 1)
    status, found, out = checked()
    assert (status, found['ok'], found['FAILED']) == (0, ALL[:2], [])
    assert all(f'  {name}: unsupported (for this test)\n' in out for name in precisions)
    assert 'All 2 checks passed' in out
    assert 'accelerates no 16-bit precision: train in fp32' in out


@pytest.mark.skipif(
    not (os.environ.get('PJRT_DEVICE') and find_spec('torch_xla')), reason='needs torch_xla, and PJRT_DEVICE'
)
def test_on_xla(short, checked):
    status, found, out = checked('xla')
    assert status == 0, out


def test_unusual_fp32_settings_are_named():
    torch.backends.mkldnn.matmul.fp32_precision = 'bf16'
    try:
        assert "`torch.backends.mkldnn.matmul.fp32_precision` is 'bf16'" in check.head(torch.device('cpu'))
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = 'none'


@pytest.mark.parametrize('command', [check, demo])
@pytest.mark.parametrize('device, why', [('gpu', '--device gpu'), ('cuda:99', 'cuda:99'), ('meta', 'no autocast')])
def test_devices_that_cannot_be_used(command, device, why, capsys):
    with pytest.raises(SystemExit):
        command.main(['--device', device])
    assert why in capsys.readouterr().err
