"The benchmark in nbs/benchmarks: what it counts, its stored runs, its report and chart, but not its times."

import json, shutil, sys
from functools import partial
from pathlib import Path

import pytest, torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from nbs.benchmarks import measure, models, show  # noqa: E402
from nbs.benchmarks.__main__ import main  # noqa: E402
from nbs.benchmarks.contestants import CONTESTANTS  # noqa: E402

STORED = ROOT / 'nbs' / 'benchmarks'


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    "A real run of all contestants that are installed, on a tiny model; its figures and the stem of its files."
    stem = tmp_path_factory.mktemp('bench') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.MODELS, 'tiny', partial(models._mlp, title='tiny', width=8, depth=1, n=4))
        main(['--device', 'cpu', '--models', 'tiny', '--modes', 'bf16', 'fp16', '--rounds', '3', '--out', str(stem)])
    return json.loads(stem.with_suffix('.json').read_text()), stem


def rows(run, **which):
    return [r for r in run[0]['rows'] if all(r[k] == v for k, v in which.items())]


def test_every_contestant_runs_in_its_precision(run):
    assert {r['contestant'] for r in run[0]['rows']} == {c.name for c in CONTESTANTS}
    for mode, dtype in (('fp32', 'float32'), ('bf16', 'bfloat16'), ('fp16', 'float16')):
        for name in ('plain loop', 'fastxtend_amp') if mode != 'fp32' else ('plain loop', 'fastai loop'):
            assert {(r['runs_in'], r['blocks']) for r in rows(run, mode=mode, contestant=name)} == {(dtype, 3)}
    own = rows(run, contestant="fastai's own", mode='bf16')
    assert torch.cuda.is_available() or {(r['runs_in'], r['note']) for r in own} == {
        ('float32', 'never leaves fp32 here')
    }


def test_page_faults_are_counted_and_a_cpu_has_no_synchronizations(run):
    assert all(r['page_faults'] >= 0 and r['syncs'] is None for r in run[0]['rows'] if r['blocks'])


def entry(name, mode, ms):
    contestant = next(c for c in CONTESTANTS if c.name == name)
    return measure.Entry(
        contestant, 'Adam', mode, ms=ms, faults=[0.0] * len(ms), runs_in='float32' if mode == 'fp32' else 'bfloat16'
    )


def test_a_ratio_is_to_the_frameworks_own_fp32_in_the_same_round():
    timed = [
        entry('plain loop', 'fp32', [4.0, 4.0, 4.0]),
        entry('fastai loop', 'fp32', [6.0, 6.0, 6.0]),
        entry('plain loop', 'bf16', [2.0, 2.0, 4.0]),
        entry('fastxtend_amp', 'bf16', [3.0, 2.0, 6.0]),
    ]
    fp32, _, plain, ours = measure.records(timed, 'tiny')
    assert fp32['vs_fp32'] is None and plain['vs_fp32'] == [1.5, 2, 2] and plain['vs_plain_loop'] is None
    assert ours['vs_fp32'] == [1.5, 2, 2.5] and ours['vs_plain_loop'] == [1, 1, 1.25] and ours['ms'] == 3


def test_the_first_step_of_a_block_is_not_counted():
    batches = measure.Batches(torch.device('cpu'), [(0,), (1,)])
    batches.n = 3
    assert [x for (x,) in batches] == [0, 1, 0, 1] and len(batches) == 4 and batches.ms > 0


@pytest.mark.parametrize(
    'quartiles,blocks,expected',
    [
        ([0.98, 1.0, 1.02], 7, False),
        ([0.9, 1.0, 1.02], 7, True),
        ([0.9, 1.0, 1.02], 100, False),
        ([1.0, 1.0, 1.0], 1, True),
    ],
)
def test_noise_mark(quartiles, blocks, expected):
    assert measure.noisy(quartiles, blocks) == expected


# -- what is shown


def test_a_run_leaves_its_report_and_chart(run):
    figures, stem = run
    text = stem.with_suffix('.md').read_text()
    assert 'python -m nbs.benchmarks --device cpu --models tiny' in text and '## tiny: tiny, batch size 4' in text
    assert all(f'- {mode}: {support} here' in text for mode, (support, _) in figures['support'].items())
    assert stem.with_suffix('.png').read_bytes()[:4] == b'\x89PNG'


def test_a_stored_run_is_shown_without_measuring(tmp_path, capsys):
    shutil.copy(STORED / 'native_bf16.json', tmp_path)
    main(['--show', str(tmp_path / 'native_bf16')])
    stored = (STORED / 'native_bf16.md').read_text()
    assert capsys.readouterr().out == (tmp_path / 'native_bf16.md').read_text() == stored
    assert (tmp_path / 'native_bf16.png').read_bytes()[:4] == b'\x89PNG'


@pytest.mark.parametrize('stem', sorted(f.stem for f in STORED.glob('*.json')))
def test_stored_tables_are_those_of_the_stored_figures(stem):
    assert show.tables(json.loads((STORED / f'{stem}.json').read_text())) == (STORED / f'{stem}.md').read_text()


def test_the_chart_has_one_mark_a_row_and_the_medians_of_both_loops():
    from matplotlib.figure import Figure

    figures = json.loads((STORED / 'native_bf16_0.3.0.json').read_text())
    ax = Figure().subplots()
    show.draw(ax, show.by_model(figures, 'bf16'))
    shown = [t.get_text() for t in ax.texts]
    assert shown[-2:] == ['fastxtend_amp', 'PyTorch loop']
    medians = {
        (r['model'], r['contestant']): show.marked(r['vs_fp32'], r['blocks'])
        for r in figures['rows']
        if r['mode'] == 'bf16' and r['optimizer'] == show.OPTIMIZER and r['vs_fp32']
    }
    models = [found['fastxtend_amp']['model'] for _, found in show.by_model(figures, 'bf16')]
    assert shown[:-2] == [medians[m, c] for m in models for c in ('fastxtend_amp', 'plain loop')] and len(models) == 9
    assert ax.get_yticklabels()[0].get_text() == 'wide MLP, batch 1024' and '~0.96 (0.88-1.13)' in show.tables(figures)
    filled = [
        line.get_markerfacecolor() != 'white'
        for line in ax.lines
        if line.get_marker() == 'o' and len(line.get_xdata()) == 1
    ]
    assert filled == [False] * 7 + [True, False]


def test_the_title_is_the_finding():
    figures = json.loads((STORED / 'native_bf16_0.3.0.json').read_text())
    rows = show.by_model(figures, 'bf16')
    gain = [found for _, found in rows if found['fastxtend_amp']['vs_fp32'][0] > 1]
    assert show.finding('bf16', rows) == f'bf16 is faster than fp32 for {len(gain)} of 9 models, by up to 2.2x'
    assert show.finding('bf16', rows[-2:]) == 'bf16 is faster than fp32 for 0 of 2 models'


def test_nothing_is_drawn_of_a_run_without_ratios(tmp_path):
    show.plot(
        {'bf16': show.by_model({'models': [{'name': 'tiny', 'what': 'tiny'}], 'rows': []}, 'bf16')},
        tmp_path / 'chart.png',
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    'args,message',
    [
        (['--rounds', '0'], '--rounds 0: at least 1'),
        (['--rounds', 'x'], "'x'"),
        (['--contestants', 'me'], "'me'"),
        (['--models', 'resnet'], "'resnet'"),
        (['--modes', 'fp8'], "'fp8'"),
        (['--out', 'nowhere/x'], 'no folder nowhere'),
        (['--device', 'gpu'], '--device gpu'),
        (['--show', 'a', '--out', 'b'], 'not allowed with'),
    ],
)
def test_bad_arguments(args, message, capsys):
    with pytest.raises(SystemExit):
        main(['--device', 'cpu', *args])
    assert message in capsys.readouterr().err


# -- predictions


def test_the_table_of_predictions_has_a_row_for_each_model_and_batch_size(tmp_path, capsys, monkeypatch):
    from nbs.benchmarks import predictions

    monkeypatch.setattr(predictions, 'BLOCK_SECONDS', 0.0)
    monkeypatch.setitem(models.MODELS, 'small', partial(models._mlp, title='small', width=8, depth=1, n=4))
    out = tmp_path / 'table.md'
    predictions.main(['--device', 'cpu', '--models', 'small', '--sizes', '1', '6', '--rounds', '2', '--out', str(out)])
    text = capsys.readouterr().out
    assert text == out.read_text() and '| fastxtend_amp | PyTorch loop | Accelerate |' in text
    rows = [line.split('|')[1:3] for line in text.splitlines() if line.startswith('| small')]
    assert [(name.strip(), int(n)) for name, n in rows] == [('small', 1), ('small', 6)]


def test_all_loops_predict_the_same(monkeypatch):
    from nbs.benchmarks import predictions
    from nbs.benchmarks.contestants import Task

    model, device = models._mlp(False, 'small', 8, 1, 4), torch.device('cpu')
    task = Task(partial(model.build, device), predictions.batches_of(model, 6, device), device)
    assert [len(x) for x, _ in task.batches] == [6] * predictions.BATCHES
    found = {}
    for mode in ('fp32', 'bf16'):
        ours, plain, accelerate = (build(task, mode)() for build in predictions.LOOPS.values())
        found[mode] = ours[0]
        assert torch.equal(ours[0], torch.cat(plain)) and torch.equal(ours[0], torch.cat(accelerate))
    assert not torch.equal(found['fp32'], found['bf16'])
