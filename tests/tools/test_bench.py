"The benchmark's counted figures, its report and chart, and what it says to bad arguments; never its times."
import importlib.util, json, math, subprocess, sys, time
from pathlib import Path

import pytest, torch
from fastai.callback import fp16

from fastxtend_amp import AMPMode
from fastxtend_amp.mode import Support
from fastxtend_amp.tools.bench import costs, main, measuring, read_figures, records, tables
from fastxtend_amp.tools.bench.clock import Clock, page_faults
from fastxtend_amp.tools.bench.contestants import CONTESTANTS, LOSS, OPTIMIZERS, Contestant, fastai_loop
from fastxtend_amp.tools.bench.measuring import MODE_SECONDS, ModelBenchmark
from fastxtend_amp.tools.bench.models import MODELS
from fastxtend_amp.tools.bench.run import bench

NBS = Path(__file__).parents[2] / 'nbs'
PEERS = ('lightning_fabric', 'accelerate')
not_with_xla = pytest.mark.skipif(importlib.util.find_spec('torch_xla') is not None, reason=(
    "where torch_xla is installed, fastai's own callback fails in bf16, and Accelerate takes the XLA device"))


@pytest.fixture(scope='module')
def report(tmp_path_factory):
    "One tiny run through the command, in a process where no peer can be imported: its report, figures and plot."
    folder = tmp_path_factory.mktemp('bench')
    code = f"""
import sys; sys.modules.update(dict.fromkeys(['lightning_fabric', 'accelerate']))
import torch; torch.set_num_threads(1)
from fastxtend_amp.tools.bench import costs, main, models
models.MODELS['tiny'] = models.Model(models._mlp(8, 1, 4), 'tiny')
costs.callback_times.__defaults__ = (6, 3)
main(['--device', 'cpu', '--models', 'tiny', '--steps', '2', '--repeats', '2', '--keep-memory',
      '--json', {str(folder / 'b.json')!r}, '--plot', {str(folder / 'b.png')!r}])"""
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads((folder / 'b.json').read_text()), folder / 'b.png'


def rows(report, mode, **which): return [r for r in report[1]['rows'] if r['mode'] == mode and all(r[k] == v for k, v in which.items())]


@not_with_xla
def test_runs_without_peers_and_every_contestant_runs(report):
    out = report[1]
    assert {r['contestant'] for r in out['rows']} == {'plain loop', 'fastai loop', 'fastxtend_amp', 'to_half_weights', 'to_half_weights, flat', "fastai's own"}
    assert len(out['rows']) == 4 + 10 + 10 and all(r['blocks'] == 2 and r['ms'] > 0 for r in out['rows'])
    assert {r['note'] for r in out['rows']} <= {'', 'never leaves fp32 on cpu'}


@not_with_xla
def test_what_each_contestant_runs_in(report):
    assert {r['runs_in'] for r in rows(report, 'fp32')} == {'float32'}
    for mode, dtype in (('bf16', 'bfloat16'), ('fp16', 'float16')):
        for name in ('plain loop', 'fastxtend_amp'): assert {r['runs_in'] for r in rows(report, mode, contestant=name)} == {dtype}
        if not torch.cuda.is_available(): assert {r['runs_in'] for r in rows(report, mode, contestant="fastai's own")} == {'float32'}


def test_counted_figures(report):
    ours = {(m, o): rows(report, m, contestant='fastxtend_amp', optimizer=o)[0] for m in ('bf16', 'fp16') for o in OPTIMIZERS}
    syncs = {k: r['syncs_beyond_fp32'] for k, r in ours.items()}
    assert syncs == {('bf16', 'Adam'): 0, ('bf16', 'fused AdamW'): 0, ('fp16', 'Adam'): 1, ('fp16', 'fused AdamW'): 0}
    assert all(ours[m, 'Adam']['ops_beyond_plain_loop'] == 0 for m in ('bf16', 'fp16'))
    assert all(r['ops_beyond_plain_loop'] <= 0 and r['ops'] > 0 for r in ours.values())


def test_bytes_for_each_parameter_are_counted(report):
    table = {r['training']: [round(v, 1) for v in list(r.values())[1:]] for r in report[1]['memory']}
    assert table['fp32'] == [4, 4, 0, 8, 0] and table['autocast (bf16)'] == [4, 4, 0, 8, 2]
    assert table['to_half_weights'] == [2, 4, 4, 8, 0] and table['to_half_weights, flat'] == [2, 4, 4, 8, 0]
    assert table['to_half_weights, no masters'] == [2, 2, 0, 4, 0] and table['to_half_weights, no masters, Kahan'] == [2, 2, 0, 6, 0]
    assert 'Bytes for each parameter' in report[0]


def test_skipped_steps_of_one_fit_and_of_two(report):
    skips = {r['optimizer']: (r['skipped_one_fit'], r['skipped_two_fits']) for r in rows(report, 'fp16', contestant='fastxtend_amp')}
    plain = {r['optimizer']: (r['skipped_one_fit'], r['skipped_two_fits']) for r in rows(report, 'fp16', contestant='plain loop')}
    assert skips == plain and all(one == two > 0 for one, two in skips.values())   # the scale is kept from fit to fit


def test_fastai_forgets_its_scale_from_fit_to_fit():
    match = ModelBenchmark('tiny', [], torch.device('cpu'))
    match.task.clock.n = 8
    with costs._fastai_on(torch.device('cpu')):
        run = fastai_loop(match.task, AMPMode.FP16, 'Adam', 2.**24, fp16.MixedPrecision)
        run.steps(); once = run.skipped()
        run.steps(); twice = run.skipped()
    assert 0 < once < twice


@not_with_xla
def test_ratios_are_quartiles_of_paired_blocks(report):
    for r in report[1]['rows']:
        q = r['vs_fp32']
        assert (q is None) == (r['mode'] == 'fp32') and (q is None or q == sorted(q))
        assert (r['vs_plain_loop'] is None) == (r['mode'] == 'fp32' or r['contestant'] == 'plain loop' or r['runs_in'] == 'float32')
        assert (r['vs_autocast'] is None) != r['contestant'].startswith('to_half_weights')
        if r['contestant'] != 'plain loop' and r['mode'] != 'fp32':
            assert set(r['noisy']) <= {'vs_fp32', 'vs_plain_loop', 'vs_autocast', 'forward_backward_vs_fp32'}


def test_the_first_step_of_a_block_does_not_count():
    clock = Clock(torch.device('cpu'), [(i,) for i in range(2)])
    clock.n, clock.warm = 3, 1
    took, ended = [], []
    for x, in clock:
        clock.backward(lambda: took.append(x))
        ended.append(time.perf_counter())
    assert len(clock) == 4 and took == [0, 1, 0, 1]
    assert len(clock.marks) == 3 * 3 + 1 and ended[0] <= clock.marks[0] <= ended[1]


def test_page_faults_are_counted():
    if math.isnan(page_faults()): pytest.skip('this system does not tell of page faults')
    clock = Clock(torch.device('cpu'), [()])
    clock.n = 2
    for _ in clock: torch.zeros(2**26)                           # 256 MB, which no allocator keeps
    assert clock.faults > 100                                    # of 2 MB at most


def test_calls_to_unscale_are_the_same_for_any_number_of_parameters(report):
    calls = report[1]['unscaling']
    assert [c['parameters'] for c in calls] == [10, 100, 1000, 10000] and len({c['aten_calls'] for c in calls}) == 1


def test_report_records_what_the_figures_depend_on(report):
    text, out, png = report
    m = out['machine']
    for word in (m['cpu'], f"torch {torch.__version__}", '1 thread,', 'batch size 4', 'contiguous', 'too noisy', "fastai's own callback, which names CUDA",
                 'fastxtend_amp_bench --device cpu --models tiny'): assert word in text
    assert [e['mode'] for e in out['events']] == ['bf16', 'fp16'] and png.read_bytes()[:4] == b'\x89PNG'
    assert all(f"- {mode}: {status}" in text for mode, (status, why) in out['support'].items())


@pytest.mark.parametrize('args,message', [
    (['--steps', '0'], '--steps 0: at least 1'), (['--repeats', '-1'], '--repeats -1: at least 1'),
    (['--models', 'resnet'], 'there is no such model; there are xresnet18'),
    (['--modes', 'fp8'], 'only bf16 and fp16'), (['--device', 'toaster'], '--device toaster'), (['--json', 'nowhere/x.json'], 'there is no folder nowhere'),
    (['--plot', 'nowhere/x.png'], 'there is no folder nowhere')])
def test_bad_arguments(args, message, capsys):
    with pytest.raises(SystemExit): main(['--device', 'cpu', *args] if args[0] != '--device' else args)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize('quartiles,expected', [(None, False), ([.98, 1., 1.02], False), ([.9, 1., 1.02], True), ([1., 1., 1.], True)])
def test_noise_criterion(quartiles, expected): assert records.noisy(quartiles) == expected


def test_turns_are_rotated_and_emulated_modes_leave_early():
    match = ModelBenchmark('tiny', [AMPMode.BF16], torch.device('cpu'))
    for row in match.results: row.run, row.ms = object(), 1. if row.mode is None else 9000.
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
    monkeypatch.setattr(measuring, 'mode_support', lambda m, d: Support('emulated', 'slow'))
    match = ModelBenchmark('tiny', [AMPMode.BF16], torch.device('cpu')); list(match.prepare())
    assert all(r.note.startswith('left out: emulated here') and r.run is None for r in match.results if r.mode)
    assert all(r.run for r in match.results if r.mode is None)


@pytest.mark.parametrize('seconds,optimizers', [(MODE_SECONDS / 3, {'Adam'}), (MODE_SECONDS / 25, {'Adam', 'fused AdamW'})])
def test_of_a_slow_mode_the_second_step_is_measured(monkeypatch, seconds, optimizers):
    match = ModelBenchmark('tiny', [AMPMode.BF16], torch.device('cpu'))
    monkeypatch.setattr(match, '_seconds_per_step', lambda mode: seconds)
    monkeypatch.setattr(match, '_emulated', lambda mode: mode is not None)
    list(match.prepare())
    told = [r for r in match.results if r.mode and r.blocks]
    assert {r.contestant.opt for r in told} == optimizers and all(list(r.blocks) == [0] and r.note.startswith('its second step') for r in told)
    assert not {id(r) for r in told} & {id(r) for _, r, _ in match.plan(1, 2)}


@pytest.mark.parametrize('name', [n for n in MODELS if n not in ('wide-256', 'wide-1024')])
def test_models_take_their_batches(name):
    match = ModelBenchmark(name, [], torch.device('cpu'))
    x, y = match.task.clock.data[0]
    with torch.no_grad(): loss = LOSS(match.task.model()(x[:2]), y[:2])
    assert loss.isfinite() and len(x) == match.batch_size and (match.format == 'channels last') == (x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last))


@not_with_xla
@pytest.mark.parametrize('name', PEERS)
def test_peers_take_part_where_they_are_installed(name):
    pytest.importorskip(name)
    match = ModelBenchmark('tiny', [], torch.device('cpu'))
    row = next(r for r in match.results if r.contestant.module == name)
    match._prepare(row)
    assert row.note == '' and row.runs_in == 'float32' and row.ops > 0
