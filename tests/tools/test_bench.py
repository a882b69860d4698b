"The benchmark's counted figures, its report and chart, and what it says to bad arguments; never its times."
import copy, importlib.util, json, math, subprocess, sys, time
from pathlib import Path

import pytest, torch

from fastxtend_amp import AMPMode
from fastxtend_amp.common import PRECISION_COLORS
from fastxtend_amp.mode import Support
from fastxtend_amp.tools.bench import bench, costs, main, measuring, plot, read_figures, records, tables
from fastxtend_amp.tools.bench.clock import Clock, page_faults
from fastxtend_amp.tools.bench.contestants import CONTESTANTS, LOSS, OPTIMIZERS, Contestant, FastaisOwn, fastai_loop
from fastxtend_amp.tools.bench.measuring import MODE_SECONDS, ModelBenchmark
from fastxtend_amp.tools.bench.models import MODELS

NBS = Path(__file__).parents[2] / 'nbs'
CPU = torch.device('cpu')
PEERS = ('lightning_fabric', 'accelerate')
not_with_xla = pytest.mark.skipif(importlib.util.find_spec('torch_xla') is not None, reason=(
    "where torch_xla is installed, fastai's own callback fails in bf16, and Accelerate takes the XLA device"))

CODE = """
import sys
sys.modules.update(dict.fromkeys(['lightning_fabric', 'accelerate']))
import torch
from fastxtend_amp.tools.bench import costs, main, models
torch.set_num_threads(1)
models.MODELS['tiny'] = models.Model(models._mlp(8, 1, 4), 'tiny')
costs.callback_times.__defaults__ = (6, 3)
costs.unscaling.__defaults__ = ((10, 1000), 2)
folder = sys.argv[1]
main(['--device', 'cpu', '--models', 'tiny', '--steps', '2', '--repeats', '2', '--keep-memory',
      '--json', folder + '/b.json', '--plot', folder + '/b.png'])
"""


@pytest.fixture(scope='module')
def report(tmp_path_factory):
    "One tiny run through the command, in a process where no peer can be imported: its report, figures and chart."
    folder = tmp_path_factory.mktemp('bench')
    command = [sys.executable, '-W', 'ignore', '-c', CODE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads((folder / 'b.json').read_text()), folder / 'b.png'


def rows(report, mode, **which):
    return [r for r in report[1]['rows'] if r['mode'] == mode and all(r[k] == v for k, v in which.items())]


# -- what is counted

@not_with_xla
def test_runs_without_peers_and_every_contestant_runs(report):
    out = report[1]
    names = {'plain loop', 'fastai loop', 'fastxtend_amp', 'to_half_weights', 'to_half_weights, flat', "fastai's own"}
    assert {r['contestant'] for r in out['rows']} == names
    assert len(out['rows']) == 4 + 9 + 9 and all(r['blocks'] == 2 and r['ms'] > 0 for r in out['rows'])
    assert {r['note'] for r in out['rows']} <= {'', 'never leaves fp32 on cpu'}


@not_with_xla
def test_what_each_contestant_runs_in(report):
    assert {r['runs_in'] for r in rows(report, 'fp32')} == {'float32'}
    for mode, dtype in (('bf16', 'bfloat16'), ('fp16', 'float16')):
        for name in ('plain loop', 'fastxtend_amp'):
            assert {r['runs_in'] for r in rows(report, mode, contestant=name)} == {dtype}
        if torch.cuda.is_available(): continue
        assert {r['runs_in'] for r in rows(report, mode, contestant="fastai's own")} == {'float32'}


def test_counted_figures(report):
    ours = {(mode, opt): rows(report, mode, contestant='fastxtend_amp', optimizer=opt)[0]
            for mode in ('bf16', 'fp16') for opt in OPTIMIZERS}
    syncs = {key: r['syncs_beyond_fp32'] for key, r in ours.items()}
    assert syncs == {('bf16', 'Adam'): 0, ('bf16', 'fused AdamW'): 0, ('fp16', 'Adam'): 1, ('fp16', 'fused AdamW'): 0}
    assert all(ours[mode, 'Adam']['ops_beyond_plain_loop'] == 0 for mode in ('bf16', 'fp16'))
    assert all(r['ops_beyond_plain_loop'] <= 0 and r['ops'] > 0 for r in ours.values())


def test_bytes_for_each_parameter_are_counted_and_summed(report):
    table = {r['training']: [round(v, 1) for v in list(r.values())[1:]] for r in report[1]['memory']}
    assert table['fp32'] == [4, 4, 8, 0] and table['autocast (bf16)'] == [4, 4, 8, 2]
    assert table['to_half_weights'] == [4, 4, 8, 2] == table['to_half_weights, flat']
    assert table['to_half_weights, no masters'] == [2, 2, 4, 0]
    assert table['to_half_weights, no masters, Kahan'] == [2, 2, 6, 0]
    section = report[0][report[0].index('## Bytes for each parameter'):]
    totals = {' '.join(line.split()[:-5]): line.split()[-1] for line in section.splitlines() if line[-2:] == '.0'}
    assert totals['fp32'] == '16.0' and totals['autocast (bf16)'] == '18.0'
    assert totals['to_half_weights, no masters'] == '8.0'


def test_accumulation_copies_the_weights_once_a_step(report):
    "A further micro-batch costs autocast the casts of three weights and three biases more than half-precision weights."
    ops = {r['training']: r['ops'] for r in report[1]['accumulation']}
    more = {r['training']: r['ops_per_micro_batch'] for r in report[1]['accumulation']}
    assert set(ops['fp32']) == {'4', '8'} and all(o['8'] > o['4'] for o in ops.values())
    assert more['fp32'] < more['to_half_weights, cast_once'] < more['autocast (bf16)']
    assert more['autocast (bf16)'] == (ops['autocast (bf16)']['8'] - ops['autocast (bf16)']['4']) / 4
    assert 'Gradient accumulation' in report[0]


def test_skipped_steps_of_one_fit_and_of_two(report):
    def skips(name):
        mine = rows(report, 'fp16', contestant=name)
        return {r['optimizer']: (r['skipped_one_fit'], r['skipped_two_fits']) for r in mine}
    assert skips('fastxtend_amp') == skips('plain loop')
    assert all(one == two > 0 for one, two in skips('fastxtend_amp').values())   # the scale is kept from fit to fit
    assert {r['skipped_auto'] for r in rows(report, 'fp16', contestant='fastxtend_amp')} == {0} and '; auto 0' in report[0]


def test_fastai_forgets_its_scale_from_fit_to_fit():
    match = ModelBenchmark('tiny', [], CPU)
    match.task.clock.n = 8
    with costs._fastai_on(CPU):
        run = fastai_loop(match.task, AMPMode.FP16, 'Adam', 2.**24, FastaisOwn)
        run.steps()
        once = run.skipped()
        run.steps()
    assert 0 < once < run.skipped()


def test_calls_to_unscale_are_the_same_for_any_number_of_parameters(report):
    calls = report[1]['unscaling']
    assert [c['parameters'] for c in calls] == [10, 1000]
    assert calls[0]['aten_calls'] == calls[1]['aten_calls'] > 0


def test_page_faults_are_counted():
    if math.isnan(page_faults()): pytest.skip('this system does not tell of page faults')
    clock = Clock(CPU, [()])
    clock.n = 2
    for _ in clock: torch.zeros(2**26)                           # 256 MB, which no allocator keeps
    assert clock.faults > 100                                    # of 2 MB at most


# -- how it is measured

@not_with_xla
def test_ratios_are_quartiles_of_paired_blocks(report):
    for r in report[1]['rows']:
        q = r['vs_fp32']
        assert (q is None) == (r['mode'] == 'fp32') and (q is None or q == sorted(q))
        no_plain_loop = r['mode'] == 'fp32' or r['contestant'] == 'plain loop' or r['runs_in'] == 'float32'
        assert (r['vs_plain_loop'] is None) == no_plain_loop
        assert (r['vs_autocast'] is None) != r['contestant'].startswith('to_half_weights')
        assert set(r['noisy']) <= set(records.RATIOS)


def test_the_first_step_of_a_block_does_not_count():
    clock = Clock(CPU, [(i,) for i in range(2)])
    clock.n, clock.warm = 3, 1
    took, ended = [], []
    for x, in clock:
        clock.backward(lambda: took.append(x))
        ended.append(time.perf_counter())
    assert len(clock) == 4 and took == [0, 1, 0, 1]
    assert len(clock.marks) == 3 * 3 + 1 and ended[0] <= clock.marks[0] <= ended[1]
    step, forward, backward = clock.times()
    assert clock.steps().shape == (3, 3) and step >= forward + backward > 0


@pytest.mark.parametrize('quartiles,blocks,expected', [
    (None, 7, False), ([.98, 1., 1.02], 7, False), ([.9, 1., 1.02], 7, True), ([.9, 1., 1.02], 100, False),
    ([1., 1., 1.], 1, True)])
def test_noise_criterion(quartiles, blocks, expected):
    "Many blocks make up for a machine that others use, too."
    assert records.noisy(quartiles, blocks) == expected


def test_a_ratio_is_as_certain_as_it_has_pairs():
    "fp32 may have fewer blocks than a mode."
    match = ModelBenchmark('tiny', [AMPMode.BF16], CPU, ['fastai loop', 'fastxtend_amp'])
    fp32, bf16 = (next(r for r in match.results if r.mode is m) for m in (None, AMPMode.BF16))
    fp32.blocks = {k: torch.tensor([ms, 1., 1.]).numpy() for k, ms in enumerate((2., 2.2, 2.4))}
    bf16.blocks = {k: torch.ones(3).numpy() for k in range(100)}
    record = records.records(match)[2]
    assert record['blocks'] == 100 and record['pairs']['vs_fp32'] == 3 and 'vs_fp32' in record['noisy']
    assert not records.noisy(record['vs_fp32'], 100)


def test_few_contestants_in_many_blocks():
    "What tells a small difference on a busy machine; without fp32 there is no ratio to it."
    out = bench(['tiny'], ['bf16'], 'cpu', steps=1, repeats=5, contestants=['fastxtend_amp', 'to_half_weights'], seconds=9)
    assert {(r['contestant'], r['mode'], r['blocks']) for r in out['rows']} == {
        ('fastxtend_amp', 'bf16', 5), ('to_half_weights', 'bf16', 5)}
    assert [r['vs_fp32'] for r in out['rows']] == [None] * 4 and len([r for r in out['rows'] if r['vs_autocast']]) == 2
    assert not out['memory'] and 'to_half_weights' in tables(out) and 'Bytes' not in tables(out)
    for wrong in ('to_half_weights', [], ['half']):
        with pytest.raises(ValueError, match='contestants'): bench(contestants=wrong)
    match = ModelBenchmark('tiny', [AMPMode.BF16], CPU, ['plain loop', 'fastai loop'], 1e-9)
    assert [(r.name, r.mode) for r in match.results] == [
        ('plain loop', None)] * 2 + [('fastai loop', None)] * 2 + [('plain loop', AMPMode.BF16)] * 2
    for r in match.results: r.run, r.ms = object(), 1.
    assert len(match.plan(10, 9)) == 3 * len(match.results)      # three blocks at least


def test_turns_are_rotated_and_emulated_modes_leave_early():
    match = ModelBenchmark('tiny', [AMPMode.BF16], CPU)
    for r in match.results: r.run, r.ms = object(), 1. if r.mode is None else 9000.
    match._emulated = lambda mode: mode is not None
    turns = match.plan(10, 4)
    firsts = [next(r for k, r, _ in turns if k == i) for i in range(4)]
    assert firsts == match.results[:4] and all(n == (10 if r.mode is None else 1) for _, r, n in turns)
    assert {k for k, r, _ in turns if r.mode is None} == {0, 1, 2, 3} and {k for k, r, _ in turns if r.mode} == {0}


def test_a_contestant_that_fails_is_reported_with_the_reason(monkeypatch):
    def fails(*args, **kwargs): raise RuntimeError('no such primitive\nmore')
    monkeypatch.setattr(measuring, 'CONTESTANTS', [CONTESTANTS[0], Contestant('new', fails, 'new', 'Adam')])
    out = bench(['tiny'], [], 'cpu', steps=1, repeats=1)
    assert [(r['contestant'], r['note']) for r in out['rows']] == [('plain loop', ''), ('new', 'no such primitive')]


@not_with_xla
def test_unsupported_and_slow_modes_are_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(measuring, 'MODE_SECONDS', 1e-9)
    monkeypatch.setattr(measuring, 'mode_support', lambda mode, device: Support('emulated', 'slow'))
    match = ModelBenchmark('tiny', [AMPMode.BF16], CPU)
    list(match.prepare())
    assert all(r.note.startswith('left out: emulated here') and r.run is None for r in match.results if r.mode)
    assert all(r.run for r in match.results if r.mode is None)


@pytest.mark.parametrize('seconds,optimizers', [(MODE_SECONDS / 3, {'Adam'}), (MODE_SECONDS / 25, {*OPTIMIZERS})])
def test_of_a_slow_mode_the_second_step_is_measured(monkeypatch, seconds, optimizers):
    match = ModelBenchmark('tiny', [AMPMode.BF16], CPU)
    monkeypatch.setattr(match, '_seconds_per_step', lambda mode: seconds)
    monkeypatch.setattr(match, '_emulated', lambda mode: mode is not None)
    list(match.prepare())
    timed = [r for r in match.results if r.mode and r.blocks]
    assert {r.contestant.opt for r in timed} == optimizers
    assert all(list(r.blocks) == [0] and r.note.startswith('its second step') for r in timed)
    assert not {id(r) for r in timed} & {id(r) for _, r, _ in match.plan(1, 2)}


@pytest.mark.parametrize('name', [n for n in MODELS if n not in ('wide-256', 'wide-1024')])
def test_models_take_their_batches(name):
    match = ModelBenchmark(name, [], CPU)
    x, y = match.task.clock.data[0]
    with torch.no_grad(): loss = LOSS(match.task.model()(x[:2]), y[:2])
    channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    assert loss.isfinite() and len(x) == match.batch_size and (match.format == 'channels last') == channels_last


@not_with_xla
@pytest.mark.parametrize('name', PEERS)
def test_peers_take_part_where_they_are_installed(name):
    pytest.importorskip(name)
    match = ModelBenchmark('tiny', [], CPU)
    result = next(r for r in match.results if r.contestant.module == name)
    match._prepare(result)
    assert result.note == '' and result.runs_in == 'float32' and result.ops > 0


# -- the report, the chart and stored runs

def test_report_records_what_the_figures_depend_on(report):
    text, out, png = report
    m = out['machine']
    for word in (m['cpu'], f"torch {torch.__version__}", '1 thread,', 'batch size 4', 'contiguous', 'too noisy',
                 "fastai's own callback, which names CUDA", 'fastxtend_amp_bench --device cpu --models tiny',
                 f"- Memory: {out['settings']['keep_memory']}"): assert word in text
    assert [e['mode'] for e in out['events']] == ['bf16', 'fp16'] and png.read_bytes()[:4] == b'\x89PNG'
    assert all(f"- {mode}: {status}" in text for mode, (status, why) in out['support'].items())


def test_the_callback_is_timed_in_its_events_and_as_a_whole_step(report):
    for record in report[1]['events']:
        step = record['step_us']
        assert 0 < record['ours_us'] < step['ours'] and 0 < record['fastai_us'] < step['fastai'] and step['fp32'] > 0


RUNS = ['benchmark_native_bf16', 'benchmark_cpu', 'benchmark_half_weights', 'benchmark_half_weights_kept_memory']


@pytest.mark.parametrize('run', RUNS)
def test_stored_tables_are_those_of_the_stored_figures(run, capsys):
    main(['--from-json', str(NBS / f'{run}.json')])
    text = capsys.readouterr().out
    assert text == (NBS / f'{run}.md').read_text()
    assert 'to_half_weights, flat' in text and 'to_half,' not in text and 'by hand' not in text


def test_reading_a_stored_run_changes_no_figure():
    raw = json.loads((NBS / 'benchmark_native_bf16.json').read_text())
    read = read_figures(NBS / 'benchmark_native_bf16.json')
    assert len(read['rows']) == len(raw['rows']) and read['machine'] == raw['machine']
    for old, new in zip(raw['rows'], read['rows']): assert list(old.values())[6:-1] == list(new.values())[6:-1]
    assert [list(r.values())[1:] for r in read['memory']] == [list(r.values())[1:] for r in raw['memory']]


def drawn(figures, monkeypatch, tmp_path):
    "The chart's figure, which `plot` would only save."
    from matplotlib.figure import Figure
    kept, save = [], Figure.savefig
    monkeypatch.setattr(Figure, 'savefig', lambda self, *a, **k: (kept.append(self), save(self, *a, **k)))
    plot(figures, tmp_path / 'chart.png')
    return kept[0]


def test_the_chart_shows_what_this_package_gains(monkeypatch, tmp_path):
    figures = read_figures(NBS / 'benchmark_native_bf16.json')
    figure = drawn(figures, monkeypatch, tmp_path)
    ax, = figure.axes
    mine = {(r['model'], r['optimizer']): r['vs_fp32'][1] for r in figures['rows']
            if r['contestant'] == 'fastxtend_amp' and r['mode'] == 'bf16'}
    assert sorted(round(bar.get_x() + bar.get_width(), 6) for bar in ax.patches if bar.get_width() > 0) == sorted(
        round(x, 6) for x in mine.values() if x > 1)
    assert len(ax.patches) == len(mine) == 18 and len(ax.get_yticks()) == 9
    assert 'bf16 is faster than fp32 on 7 of 9 models, up to 3.2 times' in figure.get_suptitle()
    from matplotlib.colors import to_rgba
    assert to_rgba(PRECISION_COLORS['bf16']) in {bar.get_facecolor() for bar in ax.patches}


def test_no_text_of_the_chart_lies_over_its_bars(monkeypatch, tmp_path):
    for run in ('benchmark_native_bf16', 'benchmark_cpu'):
        figure = drawn(read_figures(NBS / f'{run}.json'), monkeypatch, tmp_path)
        figure.draw_without_rendering()
        ax, = figure.axes
        bars = [bar.get_window_extent() for bar in ax.patches]
        inside = figure.bbox
        for text in ax.texts + figure.texts + figure.legends[0].get_texts() + [figure.legends[0].get_title()]:
            box = text.get_window_extent()
            assert not any(box.overlaps(bar) for bar in bars), text.get_text()
            assert inside.x0 <= box.x0 and box.x1 <= inside.x1, text.get_text()


def test_a_chart_without_figures_says_so(monkeypatch, tmp_path):
    figures = copy.deepcopy(read_figures(NBS / 'benchmark_native_bf16.json'))
    figures['rows'] = [r for r in figures['rows'] if r['mode'] == 'fp32']
    assert 'Nothing was measured beside fp32' in drawn(figures, monkeypatch, tmp_path).get_suptitle()
    assert 'bf16' in tables(figures)


@pytest.mark.parametrize('args,message', [
    (['--steps', '0'], '--steps 0: at least 1'), (['--repeats', '-1'], '--repeats -1: at least 1'),
    (['--models', 'resnet'], 'there is no such model; there are xresnet18'),
    (['--seconds', 'nan'], '--seconds nan: more than 0'),
    (['--seconds', '1e308'], 'at most 86400'),
    (['--contestants', 'fastai'], "--contestants: there is no 'fastai'; there are 'fastai loop', 'plain loop'"),
    (['--contestants', 'fastxtend_amp', '--plot', 'x.png'], "--plot draws 'fastxtend_amp' beside 'fastai loop'"),
    (['--modes', 'fp8'], 'only bf16 and fp16'), (['--device', 'toaster'], '--device toaster'),
    (['--json', 'nowhere/x.json'], 'there is no folder nowhere'),
    (['--plot', 'nowhere/x.png'], 'there is no folder nowhere'),
    (['--from-json', 'nowhere.json'], '--from-json nowhere.json'),
    (['--from-json', __file__], 'no figures of this benchmark')])
def test_bad_arguments(args, message, capsys):
    with pytest.raises(SystemExit): main(['--device', 'cpu', *args] if args[0] != '--device' else args)
    assert message in capsys.readouterr().err
