"The benchmark in nbs/benchmarks: what it counts, its stored runs, its report and chart; never its times."
import json, sys
from pathlib import Path

import pytest, torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from nbs.benchmarks import measure, models, show  # noqa: E402
from nbs.benchmarks.__main__ import main  # noqa: E402
from nbs.benchmarks.contestants import CONTESTANTS  # noqa: E402

STORED = ROOT / 'nbs' / 'benchmarks'
HALF = [c.name for c in CONTESTANTS if not c.default]


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    "A real run of all contestants that are installed, on a tiny model; its figures and the stem of its files."
    stem = tmp_path_factory.mktemp('bench') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.MODELS, 'tiny', models.Model(models._mlp(8, 1, 4), 'tiny'))
        main(['--device', 'cpu', '--models', 'tiny', '--modes', 'bf16', 'fp16', '--steps', '1', '--repeats', '2',
              '--contestants', *[c.name for c in CONTESTANTS if measure.installed(c)], '--out', str(stem)])
    return json.loads(stem.with_suffix('.json').read_text()), stem


def rows(run, **which): return [r for r in run[0]['rows'] if all(r[k] == v for k, v in which.items())]


def test_every_contestant_runs_in_its_precision(run):
    assert {r['contestant'] for r in run[0]['rows']} >= {'plain loop', 'fastai loop', "fastai's own", 'fastxtend_amp', 'to_half_weights'}
    for mode, dtype in (('fp32', 'float32'), ('bf16', 'bfloat16'), ('fp16', 'float16')):
        for name in ('plain loop', 'fastxtend_amp') if mode != 'fp32' else ('plain loop', 'fastai loop'):
            assert {(r['runs_in'], r['blocks']) for r in rows(run, mode=mode, contestant=name)} == {(dtype, 2)}
    own = rows(run, contestant="fastai's own", mode='bf16')
    assert torch.cuda.is_available() or {(r['runs_in'], r['note']) for r in own} == {('float32', 'never leaves fp32 here')}


def test_synchronizations_beyond_fp32_are_counted(run):
    counted = {(r['mode'], r['optimizer']): r['syncs'] for r in rows(run, contestant='fastxtend_amp')}
    assert counted == {('bf16', 'Adam'): 0, ('bf16', 'fused AdamW'): 0, ('fp16', 'Adam'): 1, ('fp16', 'fused AdamW'): 0}


def test_bytes_for_each_parameter_are_counted(run):
    def total(name, mode='bf16', opt='fused AdamW'):
        found = rows(run, contestant=name, mode=mode, optimizer=opt)
        return round(sum(v for what, v in found[0]['bytes'].items() if what != 'optimizer state')) if found else None
    assert total('fastai loop', 'fp32') == 8 and total('fastxtend_amp') == total('plain loop') == total('to_half_weights') == 10
    assert total('to_half_weights, no masters', opt='Kahan AdamW') in (4, None)     # None without optimi


def test_ratios_are_quartiles_of_blocks_in_the_same_round(run):
    for r in run[0]['rows']:
        assert (r['vs_fp32'] is None) == (r['mode'] == 'fp32' or r['optimizer'] == 'Kahan AdamW' or not r['blocks'])
        assert (r['vs_autocast'] is None) == (r['contestant'] not in HALF or not r['blocks'])
        assert r['vs_fp32'] is None or r['vs_fp32'] == sorted(r['vs_fp32'])


def entry(name, mode, ms):
    contestant = next(c for c in CONTESTANTS if c.name == name)
    return measure.Entry(contestant, 'Adam', mode, ms=ms, faults=[0.] * len(ms), runs_in='float32' if mode == 'fp32' else 'bfloat16')


def test_a_ratio_is_to_the_frameworks_own_fp32():
    timed = [entry('plain loop', 'fp32', [4., 4., 4.]), entry('fastai loop', 'fp32', [6., 6., 6.]),
             entry('plain loop', 'bf16', [2., 2., 4.]), entry('fastxtend_amp', 'bf16', [3., 2., 6.])]
    plain, ours = measure.records(timed, 'tiny')[2:]
    assert plain['vs_fp32'] == [1.5, 2, 2] and plain['vs_plain_loop'] is None
    assert ours['vs_fp32'] == [1.5, 2, 2.5] and ours['vs_plain_loop'] == [1, 1, 1.25] and ours['ms'] == 3


def test_the_first_step_of_a_block_is_not_counted():
    batches = measure.Batches(torch.device('cpu'), [(0,), (1,)])
    batches.n = 3
    assert [x for x, in batches] == [0, 1, 0, 1] and len(batches) == 4 and batches.ms > 0


@pytest.mark.parametrize('quartiles,blocks,expected', [
    (None, 7, False), ([.98, 1., 1.02], 7, False), ([.9, 1., 1.02], 7, True), ([.9, 1., 1.02], 100, False), ([1., 1., 1.], 1, True)])
def test_noise_mark(quartiles, blocks, expected): assert measure.noisy(quartiles, blocks) == expected


# -- what is shown

def test_a_run_leaves_its_report_and_chart(run, capsys):
    figures, stem = run
    text = stem.with_suffix('.md').read_text()
    assert 'python -m nbs.benchmarks --device cpu --models tiny' in text and '## tiny: tiny, batch size 4' in text
    assert all(f'- {mode}: {support} here' in text for mode, (support, _) in figures['support'].items())
    assert stem.with_suffix('.png').read_bytes()[:4] == b'\x89PNG'


@pytest.mark.parametrize('stem', sorted(f.stem for f in STORED.glob('*.json')))
def test_stored_tables_are_those_of_the_stored_figures(stem):
    assert show.tables(json.loads((STORED / f'{stem}.json').read_text())) == (STORED / f'{stem}.md').read_text()


def test_table_chart_and_sentence_keep_the_noise_mark(monkeypatch, tmp_path):
    from matplotlib.figure import Figure
    kept, save = [], Figure.savefig
    monkeypatch.setattr(Figure, 'savefig', lambda self, *a, **k: (kept.append(self), save(self, *a, **k)))
    figures = json.loads((STORED / 'native_bf16.json').read_text())
    assert show.plot(figures, tmp_path / 'chart.png')
    ax, = kept[0].axes
    assert {t.get_text() for t in ax.texts} == {'fastxtend_amp', '3.24', '2.66', '~1.88', '~1.65', '~1.31', '1.25', '1.23', '0.72', '0.59'}
    assert '~1.31 (1.28-1.46)' in show.tables(figures)
    title = ' '.join(kept[0].get_suptitle().split())
    assert title == 'bf16: faster than fp32 on 4 of 9 models (up to 3.24 times), slower on 2, too noisy to tell on 3'
    assert {t.get_text() for t in kept[0].legends[0].get_texts()} == set(show.DOTS) <= {r['contestant'] for r in figures['rows']}


def test_nothing_is_drawn_of_a_run_without_fp32(tmp_path):
    assert not show.plot(json.loads((STORED / 'half_weights.json').read_text()), tmp_path / 'chart.png')


@pytest.mark.parametrize('args,message', [
    (['--steps', '0'], '--steps 0: more than 0'), (['--seconds', 'nan'], '--seconds nan'), (['--models', 'resnet'], "'resnet'"),
    (['--contestants', 'amp'], "'amp'"), (['--modes', 'fp8'], "'fp8'"), (['--out', 'nowhere/x'], 'no folder nowhere')])
def test_bad_arguments(args, message, capsys):
    with pytest.raises(SystemExit): main(['--device', 'cpu', *args])
    assert message in capsys.readouterr().err
