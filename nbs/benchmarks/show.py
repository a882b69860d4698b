"The benchmark's report: tables as text that is also Markdown, and a chart."
from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from .measure import NOISY, PACKAGES, noisy

RATIOS = {'x fp32': 'vs_fp32', 'x plain': 'vs_plain_loop', 'x autocast': 'vs_autocast'}
COLUMNS = f"""\
- ms: milliseconds per step, the median over blocks of steps; the contestants take turns.
- x fp32: times as fast as fp32 in the same framework with the same optimizer; median over pairs of blocks, quartiles.
- x plain: that ratio divided by the plain PyTorch loop's, so that the cost of the framework's loop cancels.
- x autocast: times as fast as fastxtend_amp's autocast with the same optimizer (Kahan AdamW: with fused AdamW).
- syncs: reads of a tensor's value per step beyond fp32's; on a GPU each is a synchronization.
- faults: pages of memory that the system gave to the process per step.
- bytes: for each parameter: weights, gradients, optimizer state and casts.
- ~: too noisy to tell: the median's 95 % interval, 1.57 (q3 - q1) / sqrt(blocks), is wider than {NOISY:.0%} either
  way, or there was one block."""


# -- tables

def tables(
    figures: dict[str, Any], # From `bench`, or from a file that it wrote
) -> str:
    "Return the run as text."
    return '\n\n'.join([_head(figures), COLUMNS, *_models(figures)]) + '\n'


def _head(figures: dict[str, Any]) -> str:
    m = figures['machine']
    modes = ', '.join(f'{mode} {support}' for mode, (support, _) in figures['support'].items())
    kept = ', freed memory kept' if figures['keep_memory'] else ''
    gpu = f" ({m['gpu']}), fp32 without TF32" if 'gpu' in m else ''
    versions = ', '.join(f'{name} {m[name]}' for name in ('python', 'torch', *PACKAGES) if m.get(name))
    lines = [f"# Benchmark on {m['device']}: {modes}{kept}", '', f"- Command: `{figures['command']}`",
             f"- Machine: {m['cpu']}, {m['cores']} cores ({m['capability']}), {m['threads']} threads, load average "
             f"{m['load_average']}; {m['system']}", f"- Device: {m['device']}{gpu}", f'- Versions: {versions}']
    lines += [f'- {mode}: {support} here ({why})' for mode, (support, why) in figures['support'].items()]
    return '\n'.join(lines + [f'- Note: {note}' for note in figures.get('notes', [])])


def _models(figures: dict[str, Any]) -> Iterator[str]:
    for model in figures['models']:
        rows = [r for r in figures['rows'] if r['model'] == model['name']]
        size = f"batch size {model['batch_size']}, {model['parameters']:,} parameters"
        yield f"## {model['name']}: {model['what']}, {size}"
        table = pd.DataFrame([_row(r) for r in rows])
        table = table.loc[:, (table != '').any()]                # without empty columns; indented as Markdown's code is
        yield '\n'.join('    ' + line.rstrip() for line in table.to_string(index=False).splitlines())
        ratios = [r for r in rows if r['vs_fp32']]
        bad = sum(noisy(r['vs_fp32'], r['blocks']) for r in ratios)
        if bad: yield f'{bad} of {len(ratios)} ratios to fp32 are too noisy to tell (~).'


def _row(r: dict[str, Any]) -> dict[str, str]:
    def number(x, form): return '' if x is None else format(x, form)
    def ratio(q): return '' if q is None else f'{marked(q, r["blocks"])} ({q[0]:.2f}-{q[2]:.2f})'
    return {'mode': r['mode'], 'contestant': r['contestant'], 'optimizer': r['optimizer'], 'runs in': r['runs_in'],
            'ms': number(r['ms'], ',.2f'), **{title: ratio(r[key]) for title, key in RATIOS.items()},
            'syncs': number(r['syncs'], 'g'), 'faults': number(r['page_faults'], ',.0f'),
            'bytes': number(sum(r['bytes'].values()) or None, '.1f'), 'blocks': str(r['blocks']), 'note': r['note']}


def marked(
    ratio: list[float], # Its quartiles
    blocks: int,
) -> str:
    "Return the median as text, with ~ before it where it is too noisy to tell."
    return f"{'~' if noisy(ratio, blocks) else ''}{ratio[1]:.2f}"


# -- chart

DOTS = {"fastai's own": ('s', '#4c566a'), 'plain loop': ('D', '#d1701f'), 'fastxtend_amp': ('o', '#2a78b8')}


def plot(
    figures: dict[str, Any], # From `bench`, or from a file that it wrote
    file: str | Path, # The PNG to write
) -> bool: # False if nothing was measured that it draws
    """Draw times as fast as fp32, a panel for each mode: for each model a dot for fastai, plain loop and this package.

    With fused AdamW where it was measured. Lines are quartiles, and hollow dots are too noisy to tell.
    """
    from matplotlib.figure import Figure
    rows = [r for r in figures['rows'] if r['vs_fp32'] and r['contestant'] in DOTS]
    opt = 'fused AdamW' if any(r['optimizer'] == 'fused AdamW' for r in rows) else 'Adam'
    rows = [r for r in rows if r['optimizer'] == opt]
    modes = list(dict.fromkeys(r['mode'] for r in rows))
    if not rows: return False
    names = {m['name']: m['what'] for m in figures['models'] if any(r['model'] == m['name'] for r in rows)}
    figure = Figure(figsize=(8, (1 + .42 * len(names)) * len(modes) + 1), layout='constrained')
    told = []
    for ax, mode in zip(figure.subplots(len(modes), squeeze=False)[:, 0], modes):
        mine = [r for r in rows if r['mode'] == mode]
        _panel(ax, mine, names, mode)
        ours = [r for r in mine if r['contestant'] == 'fastxtend_amp']
        told.append(textwrap.fill(sentence(ours, mode, figures['support'][mode][0]), 72))
    figure.suptitle('\n'.join(told), fontsize=11, fontweight='bold')
    m = figures['machine']
    where = f"{m.get('gpu', m['cpu'])}, {m['threads']} threads, torch {m['torch']}, {opt}, whole training step"
    figure.legend(*ax.get_legend_handles_labels(), loc='outside lower center', ncols=3, frameon=False,
                  title=f'{where}\nline: quartiles; hollow dot and ~: too noisy to tell', title_fontsize=8.5)
    figure.savefig(file, dpi=130)
    return True


def _panel(ax: Any, rows: list[dict[str, Any]], names: dict[str, str], mode: str) -> None:
    found = {(r['model'], r['contestant']): r for r in rows}
    def gain(name): return -max((r['vs_fp32'][1] for r in rows if r['model'] == name), default=0)
    models = sorted(names, key=gain)                             # the one that gains most first
    for y, name in enumerate(models):
        for shift, (contestant, (shape, color)) in zip((-.22, 0, .22), DOTS.items()):
            r = found.get((name, contestant))
            if r is None: continue
            low, median, high = r['vs_fp32']
            hollow = noisy(r['vs_fp32'], r['blocks'])
            ax.plot([low, high], [y + shift] * 2, color=color, lw=1.2)
            ax.plot(median, y + shift, shape, color=color, mfc='white' if hollow else color, ms=5.5)
            if contestant == 'fastxtend_amp':
                ax.text(1.02, y, marked(r['vs_fp32'], r['blocks']), transform=ax.get_yaxis_transform(), va='center')
    for contestant, (shape, color) in DOTS.items(): ax.plot([], [], shape, color=color, ms=5.5, label=contestant)
    ax.text(1.02, 1.02, 'fastxtend_amp', transform=ax.transAxes, fontsize=8)
    ax.axvline(1, color='#888', lw=1, zorder=0)
    ax.set_xscale('log', base=2)
    left, right = ax.get_xlim()
    ax.set_xticks([t for t in (.0625, .125, .25, .5, .7, 1, 1.5, 2, 3, 4, 6, 8) if left <= t <= right])
    ax.xaxis.set_major_formatter(lambda x, _: f'{x:g}')
    ax.set_yticks(range(len(models)), [names[name] for name in models])
    ax.set_ylim(len(models) - .5, -.5)
    ax.set_xlabel(f'{mode}: times as fast as fp32 in the same loop')
    ax.grid(axis='x', color='#ddd', lw=.6)
    ax.spines[['top', 'right', 'left']].set_visible(False)


def sentence(
    rows: list[dict[str, Any]], # This package's, one for each model
    mode: str,
    support: str, # 'native' or 'emulated'
) -> str:
    "Return what a run says of a mode, its noise included."
    told = [r['vs_fp32'][1] for r in rows if not noisy(r['vs_fp32'], r['blocks'])]
    faster, unclear = sum(x > 1 for x in told), len(rows) - len(told)
    most = f' (up to {max(told):.2f} times)' if faster else ''
    parts = [f'faster than fp32 on {faster} of {len(rows)} models{most}']
    if len(told) > faster: parts.append(f'slower on {len(told) - faster}')
    if unclear: parts.append(f'too noisy to tell on {unclear}')
    return f"{mode}{' (emulated)' if support == 'emulated' else ''}: {', '.join(parts)}"
