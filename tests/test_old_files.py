"""Files of released versions load; `tests/files/write.py` wrote them, one set for each release.

A file loads, and training continues with the loss scale that it contains.
"""

from pathlib import Path

import pytest, torch
from fastai.learner import load_learner

from fastxtend_amp import kahan
from helpers import *

FILES = Path(__file__).parent / 'files'
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


@files('export')
def test_an_exported_file(file):
    "It predicts in fp32, and trains in any precision."
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
    "It continues in the precision that it had, with its scale."
    mode = mode_of(file)
    learn = read(lambda: torch.load(file, weights_only=False))
    cb = learn.precision
    assert cb is not None
    assert cb.scale == SCALES.get(mode)
    assert len(cb.scales) == (2 if mode in SCALES else 0)
    assert cb.fp32_module_names == (['1'] if mode in ('fp16', 'bf16') else [])
    assert {p.dtype for p in params(learn)} == {torch.float32}
    dtypes, before = output_dtypes(learn), params(learn)
    learn.logger = noop
    read(lambda: learn.fit(1, 0.01))
    assert set(dtypes) == {torch.float16 if mode.startswith('fp16') else torch.bfloat16}
    assert finite(learn)
    assert not same(before, params(learn))
    assert len(cb.scales) == (4 if mode in SCALES else 0)
    learn.to_fp32().fit(1)
