"The benchmark in nbs/benchmarks: what it counts, its stored runs, its report and chart, but not its times."

import json, platform, shutil, subprocess, sys
from functools import partial
from pathlib import Path

import numpy as np, pytest, torch

ROOT = Path(__file__).parents[2]
STORED = ROOT / 'nbs' / 'benchmarks'
sys.path.insert(0, str(ROOT))

from nbs.benchmarks import choice, measure, models, predictions, show  # noqa: E402
from nbs.benchmarks.__main__ import main  # noqa: E402
from nbs.benchmarks.contestants import CONTESTANTS, Task  # noqa: E402

TINY = ['--device', 'cpu', '--models', 'tiny']


def test_a_run_of_all_contestants_that_are_installed(tmp_path):
    stem = tmp_path / 'run'
    main([*TINY, '--modes', 'bf16', 'fp16', '--rounds', '3', '--out', str(stem)])
    figures, text = json.loads(stem.with_suffix('.json').read_text()), stem.with_suffix('.md').read_text()
    rows = figures['rows']
    found = {(r['mode'], r['contestant']): (r['runs_in'], r['blocks']) for r in rows}
    assert {r['contestant'] for r in rows} == {c.name for c in CONTESTANTS}
    for precision, dtype in (('fp32', 'float32'), ('bf16', 'bfloat16'), ('fp16', 'float16')):
        for name in ('plain loop', 'fastxtend_amp') if precision != 'fp32' else ('plain loop', 'fastai loop'):
            assert found[precision, name] == (dtype, 3)
    own = {(r['runs_in'], r['note']) for r in rows if (r['mode'], r['contestant']) == ('bf16', "fastai's own")}
    assert torch.cuda.is_available() or own == {('float32', 'never leaves fp32 here')}
    assert all(r['page_faults'] >= 0 and r['syncs'] is None for r in rows if r['blocks'])
    assert 'python -m nbs.benchmarks --device cpu --models tiny' in text and '| tiny MLP (the overhead) | 16 |' in text
    assert all(f'- {precision}: {support} here' in text for precision, (support, _) in figures['support'].items())
    assert stem.with_suffix('.png').read_bytes()[:4] == b'\x89PNG'


def test_avx2_only_emulates_bf16():
    command = [sys.executable, '-m', 'nbs.benchmarks', '--avx2', *TINY, '--modes', 'bf16', '--rounds', '1']
    out = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    assert 'bf16: emulated here' in out and (platform.machine() != 'x86_64' or '(AVX2)' in out)


def test_a_ratio_is_to_fp32_of_the_same_round():
    def entry(name, precision, *ms):
        contestant = next(c for c in CONTESTANTS if c.name == name)
        dtype = 'float32' if precision == 'fp32' else 'bfloat16'
        syncs = 1.5 if name == 'fastxtend_amp' else 0.5
        return measure.Entry(contestant, 'Adam', precision, ms=[*ms], faults=[0.0] * 3, runs_in=dtype, syncs=syncs)

    timed = [entry('plain loop', 'fp32', 4.0, 4.0, 4.0), entry('fastai loop', 'fp32', 6.0, 6.0, 6.0)]
    timed += [entry('plain loop', 'bf16', 2.0, 2.0, 4.0), entry('fastxtend_amp', 'bf16', 3.0, 2.0, 6.0)]
    fp32, _, plain, ours = measure.records(timed, 'tiny')
    assert fp32['vs_fp32'] is None and plain['vs_fp32'] == [1.5, 2, 2] and plain['vs_plain_loop'] is None
    assert (plain['syncs'], ours['syncs']) == (0, 1)
    assert ours['vs_fp32'] == [1.5, 2, 2.5] and ours['vs_plain_loop'] == [1, 1, 1.25] and ours['ms'] == 3


def test_the_first_step_of_a_block_is_not_counted():
    batches = measure.Batches(torch.device('cpu'), [(0,), (1,)])
    batches.n = 3
    assert [x for (x,) in batches] == [0, 1, 0, 1] and len(batches) == 4 and batches.ms > 0


@pytest.mark.parametrize('low, blocks, noisy', [(0.98, 7, False), (0.9, 7, True), (0.9, 100, False), (1.0, 1, True)])
def test_noise_mark(low, blocks, noisy):
    assert measure.noisy((low, 1.0, 1.02), blocks) == noisy


@pytest.mark.parametrize('stem', sorted(f.stem for f in STORED.glob('*.json')))
def test_a_stored_run_is_shown_without_measuring(stem, tmp_path, capsys):
    shutil.copy(STORED / f'{stem}.json', tmp_path)
    main(['--show', str(tmp_path / stem)])
    assert capsys.readouterr().out == (tmp_path / f'{stem}.md').read_text() == (STORED / f'{stem}.md').read_text()
    assert (tmp_path / f'{stem}.png').read_bytes()[:4] == b'\x89PNG'


def test_the_finding_and_the_chart_without_ratios(tmp_path):
    figures = json.loads((STORED / 'native_bf16.json').read_text())
    rows = show.by_model(figures, 'bf16')
    n = sum(found['fastxtend_amp']['vs_fp32'][0] > 1 for _, found in rows)
    assert show.finding('bf16', rows).startswith(
        f'bf16 is faster than fp32 in {n} of {len(rows)} models, by up to 1.7x'
    )
    assert show.finding('bf16', rows[-1:]) == 'bf16 is faster than fp32 in 0 of 1 models'
    show.plot({'bf16': []}, tmp_path / 'chart.png')  # nothing is drawn
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    'args, message',
    [
        ('--rounds 0', '--rounds 0: at least 1'),
        ('--out nowhere/x', 'no folder nowhere'),
        ('--device gpu', '--device gpu'),
    ],
)
def test_bad_arguments(args, message, capsys):
    with pytest.raises(SystemExit):
        main(['--device', 'cpu', *args.split()])
    assert message in capsys.readouterr().err


def test_the_rule_is_right_as_often_as_it_says():
    rng = np.random.default_rng(0)
    for true, at_least, at_most in ((1.5, 1.0, 1.0), (1.0, 0.0, 0.1), (0.9, 0.0, 0.05)):
        found = [choice.turns_until_decided(rng, true, 0.2, 40) for _ in range(100)]
        assert at_least <= np.mean([decided is True for decided, _ in found]) <= at_most, true
        assert min(n for _, n in found) == 6


def test_predictions(tmp_path, capsys, monkeypatch):
    "All loops predict the same; the table has a row for each model and batch size."
    device = torch.device('cpu')
    model, found = models.MODELS['tiny'](False), {}
    task = Task(partial(model.build, device), predictions.batches_of(model, 6, device), device)
    assert [len(x) for x, _ in task.batches] == [6] * predictions.BATCHES
    for precision in ('fp32', 'bf16'):
        ours, *others = (build(task, precision)() for build in predictions.LOOPS.values())
        found[precision] = ours[0]
        assert len(others) == 2 and all(torch.equal(ours[0], torch.cat(other)) for other in others)
    assert not torch.equal(found['fp32'], found['bf16'])
    monkeypatch.setattr(predictions, 'BLOCK_SECONDS', 0.0)
    out = tmp_path / 'table.md'
    predictions.main([*TINY, '--sizes', '1', '6', '--rounds', '2', '--out', str(out)])
    assert capsys.readouterr().out == out.read_text() and out.read_text().count('\n| tiny') == 2
