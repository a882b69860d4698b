"""Files that released versions wrote; `tests/files/write.py` wrote them, one set for each release.

A file of `save` loads, and training goes on with the loss scale that it holds. An export, of 0.4 and later, is fp32.
"""

from pathlib import Path

import pytest, torch
from fastai.learner import load_learner
from fastai.optimizer import SGD
from torch import nn

from fastxtend_amp import kahan
from fastxtend_amp.training.current import precision_callback
from helpers import finite, learner, loaders, output_dtypes, params, replaced, same, told

FILES = Path(__file__).parent / 'files'
SCALES = {'fp16': 128.0, 'fp16_static': 64.0}


def files(kind):
    found = sorted(FILES.glob(f'*/{kind}_*'))
    return pytest.mark.parametrize('file', found, ids=[f'{f.parent.name}-{f.stem}' for f in found])


def test_each_release_has_its_files():
    count = lambda folder, kind: len([*(FILES / folder).glob(f'{kind}_*')])
    releases = {folder.name: (count(folder, 'saved'), count(folder, 'export')) for folder in FILES.glob('0.*')}
    assert releases == {name: (5, 11) for name in releases} | {'0.3.0': (5, 0)} and len(releases) > 2
    assert max(f.stat().st_size for f in FILES.rglob('*_*.p*')) < 30_000


@files('saved')
@pytest.mark.parametrize('plain', [False, True])
def test_a_saved_file(file, plain):
    "In a learner of its precision, and in one in plain fp32, which loads it as fastai does."
    name, alone = file.stem.partition('_')[2], 'alone' in file.stem
    to = 'fp32' if plain else 'bf16' if alone else name.partition('_')[0]
    model = nn.Sequential(nn.Linear(6, 1), nn.BatchNorm1d(1))
    learn = learner(model, opt_func=kahan('SGD') if alone else SGD)
    getattr(learn, f'to_{to}')(**dict(master_weights=False) if alone and not plain else {})
    learn.load(file.with_suffix(''))
    before, state = params(learn), torch.load(file, weights_only=False)['model']
    assert same(before, [state[name] for name, _ in learn.model.named_parameters()])
    assert precision_callback(learn) is None or learn.mixed_precision.scale == SCALES.get(name)
    learn.fit(1, 0.01)
    assert finite(learn) and not same(before, params(learn))


@files('export')
def test_an_exported_file(file):
    "It holds no class of fastxtend_amp, predicts in fp32, and trains in any precision."
    assert b'fastxtend_amp' not in file.read_bytes()
    found = []
    told(lambda: found.append(load_learner(file)))  # without warnings about other versions
    (learn,) = found
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ == 'ProgressCallback'])
    assert {p.dtype for p in params(learn)} == {torch.float32} and replaced(learn.model) == []
    learn.dls = loaders()
    dtypes = output_dtypes(learn)
    assert learn.get_preds()[0].isfinite().all()
    for call, dtype in (('to_bf16', torch.bfloat16), ('to_fp16', torch.float16), ('to_fp32', torch.float32)):
        dtypes.clear()
        told(lambda: getattr(learn, call)().fit(1, 1e-3))
        assert set(dtypes) | {torch.float32} == {dtype, torch.float32}  # a skipped step is looked at in fp32
    assert finite(learn)


def test_an_export_says_that_it_is_in_fp32(tmp_path, capsys):
    learn = learner(path=tmp_path)
    assert not told(lambda: learn.export('model.pkl'), 'fp32')
    learn.to_bf16()
    capsys.readouterr()
    learn.export('model.pkl')
    assert capsys.readouterr().out.count('Exported without ') == 1
