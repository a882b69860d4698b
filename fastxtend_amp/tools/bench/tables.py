"The benchmark's report, as text that is also Markdown."
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from .records import NOISY, noisy

__all__ = ['tables']

_PACKAGES = ('python', 'torch', 'cuda', 'fastai', 'fastcore', 'fastxtend_amp', 'lightning-fabric', 'accelerate')
_RATIOS = {'x fp32': 'vs_fp32', 'x plain': 'vs_plain_loop', 'x autocast': 'vs_autocast',
           'f+b x fp32': 'forward_backward_vs_fp32'}
_COLUMNS = """\
- ms: milliseconds per step, the median over up to {repeats} blocks of steps; the contestants take turns.
- x fp32: times faster than fp32 in the same framework with the same optimizer; median over pairs of blocks, quartiles.
- x plain: that ratio divided by the plain PyTorch loop's own, so that the cost of the framework's loop cancels.
- x autocast: times faster than fastxtend_amp's autocast with the same optimizer.
- f+b x fp32: times faster than fp32 in forward and backward pass alone.
- syncs: GPU synchronizations per step beyond fp32's.
- ops: aten operations per step; +ops: those beyond the plain PyTorch loop's.
- faults: pages of memory that the system handed to the process per step.
- skips: steps skipped until a loss scale that starts at {settle_scale:,.0f} fits, in one fit and in two;
  auto: in one fit with `init_scale='auto'`.
- ~: too noisy to tell: the median's 95 % interval, 1.57 (q3 - q1) / sqrt(pairs), is wider than {noisy:.0%} either
  way, or there was one pair."""


def tables(
    figures: dict[str, Any], # From `bench` or `read_figures`
) -> str:
    "What was measured, as text."
    parts = [_head(figures), *_models(figures)]
    parts += [section(figures) for section in (_callback, _unscaling, _memory, _accumulation)]
    return '\n\n'.join(part for part in parts if part) + '\n'


def _number(x: float | None, form: str) -> str: return '' if x is None or x != x else format(x, form)


def _ratio(quartiles: list[float] | None, pairs: int) -> str:
    if quartiles is None: return ''
    low, median, high = quartiles
    return f"{'~' if noisy(quartiles, pairs) else ''}{median:.2f} ({low:.2f}-{high:.2f})"


def _table(rows: list[dict[str, Any]]) -> str:
    "Aligned columns, without empty ones, indented as Markdown's code is."
    if not rows: return ''
    table = pd.DataFrame(rows)
    table = table.loc[:, (table != '').any()]
    return '\n'.join('    ' + line.rstrip() for line in table.to_string(index=False).splitlines())


def _title(figures: dict[str, Any]) -> str:
    "What tells this run from others, such as 'Benchmark on cpu: bf16 native'."
    modes = ', '.join(f'{mode} {status}' for mode, (status, _) in figures['support'].items())
    kept = ', freed memory kept' if figures['settings'].get('keep_memory') else ''
    return f"Benchmark on {figures['machine']['device']}: {modes}{kept}"


def _head(figures: dict[str, Any]) -> str:
    m, settings = figures['machine'], figures['settings']
    gpu = f" ({m['gpu']}), TF32 {'on' if m['tf32'] else 'off'}" if 'gpu' in m else ''
    threads = f"{m['threads']} thread{'s' * (m['threads'] != 1)}"
    lines = [f'# {_title(figures)}', '', f"- Command: `{figures.get('command', '')}`",
             f"- Machine: {m['cpu']}, {m['cores']} cores ({', '.join(m['instruction_sets'])}), {threads}, "
             f"load average {m['load_average']}; {m['system']}",
             f"- Device: {m['device']}{gpu}",
             f"- Versions: {', '.join(f'{name} {m[name]}' for name in _PACKAGES if m.get(name))}"]
    lines += [f'- {mode}: {status} here ({why})' for mode, (status, why) in figures['support'].items()]
    if settings.get('keep_memory'): lines.append(f"- Memory: {settings['keep_memory']}")
    if figures.get('note'): lines.append(f"- Note: {figures['note']}")   # added to a stored run by hand
    return '\n'.join([*lines, '', _COLUMNS.format(**settings, noisy=NOISY)])


# -- a table for each model

def _models(figures: dict[str, Any]) -> Iterator[str]:
    for model in figures['models']:
        rows = [r for r in figures['rows'] if r['model'] == model['name']]
        absent = _absent(rows)
        yield (f"## {model['name']}: {model['what']}, batch size {model['batch_size']}, {model['memory_format']}, "
               f"{model['parameters']:,} parameters")
        yield _table([_row(r, 'gpu' in figures['machine']) for r in rows if r['mode'] not in absent])
        yield '\n'.join(f'{mode}: {why}.' for mode, why in absent.items())
        timed = [r for r in rows if r['vs_fp32'] and r['blocks'] > 1]
        bad = sum(noisy(r['vs_fp32'], _pairs(r, 'vs_fp32')) for r in timed)
        if bad * 2 > len(timed):
            yield f'The machine was too noisy here to tell: {bad} of {len(timed)} ratios to fp32 are marked ~.'


def _absent(rows: list[dict[str, Any]]) -> dict[str, str]:
    "The modes in which no contestant was timed, all for one reason; with the reason."
    absent = {}
    for mode in dict.fromkeys(r['mode'] for r in rows):
        mine = [r for r in rows if r['mode'] == mode]
        notes = {r['note'] for r in mine}
        if len(notes) == 1 and not any(r['blocks'] for r in mine): absent[mode] = notes.pop()
    return absent


def _pairs(r: dict[str, Any], key: str) -> int:
    "How many pairs of blocks a ratio comes from; older runs do not say."
    return r['pairs'][key] if 'pairs' in r else r['blocks']


def _row(r: dict[str, Any], gpu: bool) -> dict[str, str]:
    memory = {'peak MB': _number(r['peak_mb'], ',.0f')} if gpu else {'faults': _number(r['page_faults'], ',.0f')}
    skips = '' if r['skipped_one_fit'] is None else f"{r['skipped_one_fit']}, {r['skipped_two_fits']}"
    if r.get('skipped_auto') is not None: skips += f"; auto {r['skipped_auto']}"   # since version 0.2.0
    return {'mode': r['mode'], 'contestant': r['contestant'], 'optimizer': r['optimizer'], 'runs in': r['runs_in'],
            'ms': _number(r['ms'], ',.2f'),
            'forward': _number(r['forward_ms'], ',.2f'), 'backward': _number(r['backward_ms'], ',.2f'),
                        **{title: _ratio(r[key], _pairs(r, key)) for title, key in _RATIOS.items()},
            'syncs': _number(r['syncs_beyond_fp32'], '.3g'),
            'ops': _number(r['ops'], ',.4g'), '+ops': _number(r['ops_beyond_plain_loop'], '.4g'), **memory,
            'skips': skips, 'note': r['note']}


# -- what the callback costs

def _section(title: str, text: str, rows: list[dict[str, Any]]) -> str:
    return '\n\n'.join(part for part in (f'## {title}', text, _table(rows)) if part) if rows else ''


def _callback(figures: dict[str, Any]) -> str:
    rows, blocks = [], max(3, figures['settings']['repeats'])
    for r in figures['events']:
        row = {'mode': r['mode'], 'fastxtend_amp': f"{r['ours_us']:.0f}", "fastai's own": f"{r['fastai_us']:.0f}",
               'ratio': _ratio(r['ratio'], blocks)}
        if 'step_us' in r:                                       # since version 0.2.0
            step = {kind: f'{us:.0f}' for kind, us in r['step_us'].items()}
            row |= {'step: fp32': step['fp32'], 'fastxtend_amp ': step['ours'], "fastai's own ": step['fastai'],
                    'ratio ': _ratio(r['step_ratio'], blocks)}
        rows.append(row)
    whole = 'then in the whole step.' if any('step_us' in r for r in figures['events']) else 'loop guard included.'
    return _section('The time of the callback', (
        f"Microseconds per step on the tiny MLP, one thread: in the callback's events, {whole}\n"
        "For this comparison alone fastai's own callback, which names CUDA, runs autocast on this device."), rows)


def _unscaling(figures: dict[str, Any]) -> str:
    return _section('Unscaling', '', [{'parameter tensors': f"{r['parameters']:,}", 'aten calls': r['aten_calls'],
                                       'host ms': f"{r['host_ms']:.2f}"} for r in figures['unscaling']])


def _memory(figures: dict[str, Any]) -> str:
    rows = []
    for r in figures['memory']:
        sizes = {key: value for key, value in r.items() if key != 'training'}
        total = {'total': f'{sum(sizes.values()):.1f}'}
        rows.append({'training': r['training'], **{key: f'{value:.1f}' for key, value in sizes.items()}, **total})
    return _section('Bytes for each parameter', (
        'AdamW, counted from the tensors there are after a step; casts live as long as a batch.'), rows)


def _accumulation(figures: dict[str, Any]) -> str:
    return _section('Gradient accumulation', (
        'Aten operations per step of an MLP with three layers and fused AdamW, by micro-batches per step.\n'
        'autocast casts the weights in each micro-batch, with to_half_weights(cast_once=True) once a step.'), [
            {'training': r['training'], **{f'{k} micro-batches': f'{n:,.0f}' for k, n in r['ops'].items()},
             'for one more': f"{r['ops_per_micro_batch']:.1f}"} for r in figures['accumulation']])
