"""Files that released versions wrote; `tests/files/write.py` wrote them, one set for each release.

A file of `save` loads, and training goes on with the loss scale that it holds. A learner that holds a precision does
not load: an error says how to convert it.
"""

import importlib
from pathlib import Path

import pytest, torch
from fastai.learner import load_learner

from fastxtend_amp import kahan
from helpers import *

FILES = Path(__file__).parent / 'files'
CONVERT = r'(?s)fastxtend_amp 0\.3 and 0\.4.*`learn\.to_fp32\(\)`.*`learn\.export'
SCALES = {'fp16': 128.0, 'fp16_static': 64.0, 'fp16_scaler': 32.0, 'half_weights': 128.0}


def files(kind):
    found = sorted(FILES.glob(f'*/{kind}_*'))
    return pytest.mark.parametrize('file', found, ids=[f'{f.parent.name}-{f.stem}' for f in found])


def mode_of(file):
    return file.stem.partition('_')[2]


def read(f):
    "Return `f()`, without warnings about other versions."
    result = []
    told(lambda: result.append(f()))
    return result[0]


def saved_net():
    return nn.Sequential(nn.Linear(6, 1), nn.BatchNorm1d(1))


def test_each_release_has_its_files():
    folders = {f.name for f in FILES.iterdir() if f.is_dir()} - {'__pycache__'}
    assert {'0.3.0', '0.4.0'} <= folders
    for folder in folders:
        names = [f.name for f in (FILES / folder).iterdir()]
        for kind, n in (('saved_', 5), ('export_', 9), ('learner_', 4)):
            assert sum(name.startswith(kind) for name in names) >= n
    assert max(f.stat().st_size for f in FILES.rglob('*_*.p*')) < 30_000


@files('saved')
def test_a_saved_file(file):
    mode = mode_of(file)
    learn = learner(saved_net(), opt_func=kahan('SGD') if mode == 'half_weights_alone' else SGD)
    if mode == 'half_weights_alone':
        learn.to_half_weights(master_weights=False)
    elif mode.startswith('fp16'):
        learn.to_fp16()
    elif mode != 'fp32':
        getattr(learn, f'to_{mode}')()
    learn.load(file.with_suffix(''))
    state = torch.load(file, weights_only=False)
    assert same(params(learn), [state['model'][name] for name, _ in learn.model.named_parameters()])
    assert learn.precision is None or learn.precision.scale == SCALES.get(mode)
    before = params(learn)
    learn.fit(1, 0.01)
    assert finite(learn)
    assert not same(before, params(learn))


@files('saved')
def test_a_saved_file_in_a_learner_in_plain_fp32(file):
    mode = mode_of(file)
    learn = learner(saved_net(), opt_func=kahan('SGD') if mode == 'half_weights_alone' else SGD)
    learn.load(file.with_suffix(''))  # fastai's own
    learn.fit(1, 0.01)
    assert finite(learn)


def holds_a_precision(file):
    "Return whether a class of fastxtend_amp is in the file; its strings are not compressed."
    return b'fastxtend_amp' in file.read_bytes()


def test_0_4_exported_in_plain_fp32():
    found = {folder.name: [holds_a_precision(f) for f in folder.glob('export_*')] for folder in FILES.glob('0.*')}
    assert sum(found['0.3.0']) == 8
    assert not any(found['0.4.0'])


@files('export')
def test_an_exported_file(file):
    "It predicts in fp32, and trains in any precision; one that holds a precision raises an error."
    if holds_a_precision(file):
        with pytest.raises(RuntimeError, match=CONVERT):
            read(lambda: load_learner(file))
        return
    learn = read(lambda: load_learner(file))
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ == 'ProgressCallback'])
    assert {p.dtype for p in params(learn)} == {torch.float32}
    assert replaced(learn.model) == []
    learn.dls = loaders()
    dtypes = output_dtypes(learn)
    preds, _ = learn.get_preds()
    assert preds.isfinite().all()
    for call, dtype in (('to_bf16', torch.bfloat16), ('to_fp16', torch.float16), ('to_fp32', torch.float32)):
        dtypes.clear()
        read(lambda: getattr(learn, call)().fit(1, 1e-3))
        assert set(dtypes) == {dtype}
    assert finite(learn)


@files('learner')
def test_a_pickled_learner(file):
    "An error says how to convert it."
    with pytest.raises(RuntimeError, match=CONVERT):
        torch.load(file, weights_only=False)


def test_a_module_of_an_earlier_version():
    "In code that was written for it; another module that does not exist is Python's to report."
    with pytest.raises(RuntimeError, match='fastxtend_amp.callback is a module of fastxtend_amp 0.3 and 0.4'):
        importlib.import_module('fastxtend_amp.callback')
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module('fastxtend_amp.calback')
