"The benchmark's report: tables as text that is also Markdown, and a chart."
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any

import pandas as pd

from .measure import NOISY, PACKAGES, noisy, notch

WORDS = 'mode', 'contestant', 'optimizer', 'note'                # columns of words, flush left
COLUMNS = f"""\
- ms: milliseconds per step, median over blocks of steps; the contestants are timed in alternating rounds.
- x fp32: speed-up over fp32 in the same framework with the same optimizer; median over pairs of blocks, quartiles.
- x plain: this speed-up divided by that of the PyTorch loop ('plain loop'). The fixed cost of a framework
  per step pulls it towards 1 for tiny models.
- syncs: GPU synchronizations per step in addition to those in fp32; there is no such column on a CPU.
- faults: page faults per step, pages of memory that the system gave to the process.
- ~: the median's 95% interval, 1.57 (q3 - q1) / sqrt(blocks), is wider than {NOISY:.0%} either
  way, or there was one block."""


# -- tables

def tables(figures: dict[str, Any]) -> str:
    "Return the run as text; `figures` are `bench`'s, or a file's that it wrote."
    return '\n\n'.join([_head(figures), COLUMNS, *_models(figures)]) + '\n'


def _head(figures: dict[str, Any]) -> str:
    m = figures['machine']
    modes = ', '.join(f'{mode} {support}' for mode, (support, _) in figures['support'].items())
    gpu = f" ({m['gpu']}), fp32 without TF32" if 'gpu' in m else ''
    versions = ', '.join(f'{name} {m[name]}' for name in ('python', 'torch', *PACKAGES) if m.get(name))
    lines = [f"# Benchmark on {m['device']}: {modes}", '', f"- Command: `{figures['command']}`",
             f"- Machine: {m['cpu']}, {m['cores']} cores ({m['capability']}), {m['threads']} threads, load average "
             f"{m['load_average']}; {m['system']}", f"- Device: {m['device']}{gpu}", f'- Versions: {versions}']
    lines += [f'- {mode}: {support} here ({why})' for mode, (support, why) in figures['support'].items()]
    return '\n'.join(lines)


def _models(figures: dict[str, Any]) -> Iterator[str]:
    for model in figures['models']:
        size = f"batch size {model['batch_size']}, {model['parameters']:,} parameters"
        yield f"## {model['name']}: {model['what']}, {size}"
        table = pd.DataFrame([_row(r) for r in figures['rows'] if r['model'] == model['name']])
        same = {name: table[name][0] for name in table if table[name].nunique() == 1}
        yield '; '.join(f'{name}: {value}' for name, value in same.items() if value)
        yield _markdown(table.drop(columns=same))


def _markdown(table: pd.DataFrame) -> str:
    "Return a table in Markdown that is also aligned as text."
    columns = []
    for name in table:
        cells = [name, *table[name]]
        width, left = max(map(len, cells)), name in WORDS
        mark = '-' * (width + 1) + ('-' if left else ':')
        head, *rest = (f' {cell:{"<" if left else ">"}{width}} ' for cell in cells)
        columns.append([head, mark, *rest])
    return '\n'.join(f'|{"|".join(row)}|' for row in zip(*columns))


def _row(r: dict[str, Any]) -> dict[str, str]:
    def number(x, form): return '' if x is None else format(x, form)
    def ratio(q): return '' if q is None else f'{marked(q, r["blocks"])} ({q[0]:.2f}-{q[2]:.2f})'
    return {'mode': r['mode'], 'contestant': r['contestant'], 'optimizer': r['optimizer'],
            'ms': number(r['ms'], ',.2f'), 'x fp32': ratio(r['vs_fp32']), 'x plain': ratio(r['vs_plain_loop']),
            'syncs': number(r['syncs'], 'g'), 'faults': number(r['page_faults'], ',.0f'),
            'blocks': str(r['blocks']), 'note': r['note']}


def marked(quartiles: list[float], blocks: int) -> str:
    "Return the median as text, with ~ before it where it is too noisy to tell."
    return f"{'~' if noisy(quartiles, blocks) else ''}{quartiles[1]:.2f}"


# -- chart

DRAWN = {                                  # contestants with a column at the right, and its head and colour
    'plain loop': ('PyTorch\nloop', '#555'), 'fastxtend_amp': ('fastxtend\n_amp', '#2a78b8'),
    'fastxtend_amp, tuned': ('tuned', '#2e7d32')}
MARKS = ('dot: median; line: its 95% interval, hollow and ~ if wider than ±5%',
         'tuned: some kinds of layers in fp32; faster: both quartiles above 1')
OPTIMIZER = 'fused AdamW'                  # of the contestants that are drawn
Rows = list[tuple[str, dict[str, dict[str, Any]]]]   # a model's title, and its records by contestant


def by_model(figures: dict[str, Any], mode: str) -> Rows:
    "Return what is drawn of a run: models timed in `mode` with fused AdamW, the one that gains most first."
    found = []
    for model in figures['models']:
        records = {r['contestant']: r for r in figures['rows'] if r['model'] == model['name'] and r['mode'] == mode
                   and r['optimizer'] == OPTIMIZER and r['vs_fp32']}
        if 'fastxtend_amp' in records: found.append((model['what'], records))
    return sorted(found, key=lambda row: -row[1]['fastxtend_amp']['vs_fp32'][1])


def finding(mode: str, rows: Rows) -> str:
    "Return the title of a chart: how many models gain, that is with both quartiles above 1, and how much at most."
    def gains(contestant):
        ratios = [found[contestant]['vs_fp32'] for _, found in rows if contestant in found]
        return sorted(ratio[1] for ratio in ratios if ratio[0] > 1)
    plain, tuned = gains('fastxtend_amp'), gains('fastxtend_amp, tuned')
    most = f', by up to {plain[-1]:.1f}x' if plain else ''
    more = f'; in {len(tuned)} if tuned' if len(tuned) > len(plain) else ''
    return f'{mode} is faster than fp32 in {len(plain)} of {len(rows)} rows{most}{more}'


def draw(ax: Any, rows: Rows, narrow: bool = False) -> None:
    """Draw speed-ups over fp32: for each row dots at the medians with fastxtend_amp, and lines for their 95% intervals.

    A hollow dot is noisy. At the right stand the medians, with those of a PyTorch loop; a narrow chart has titles over
    rows.
    """
    beside = ax.get_yaxis_transform()
    first, width = (1.2, .28) if narrow else (1.1, .17)
    drawn = [name for name in DRAWN if any(name in found for _, found in rows)]
    def right(column, y, text, **kwargs):
        ax.text(first + width * column, y, text, transform=beside, ha='right', **kwargs)
    top = -.75 if narrow else -.5
    for column, name in enumerate(drawn):
        head, color = DRAWN[name]
        right(column, top, head, va='bottom', fontsize=9.5, color=color)
        for y, (_, found) in enumerate(rows):
            if name not in found: continue
            ratio, blocks = found[name]['vs_fp32'], found[name]['blocks']
            right(column, y, marked(ratio, blocks), color=color, va='center')
            if name == 'plain loop': continue
            half, fill = notch(ratio, blocks), 'white' if noisy(ratio, blocks) else color
            ax.plot([ratio[1] - half, ratio[1] + half], [y] * 2, color=color, lw=1.6)
            ax.plot(ratio[1], y, 'D' if 'tuned' in name else 'o', color=color, mfc=fill, ms=5)
    if narrow:                                                   # over the lines of the grid
        for y, (title, _) in enumerate(rows):
            ax.text(0, y - .42, title, transform=beside, va='center', fontsize=9, zorder=3,
                    bbox=dict(fc='white', ec='none', pad=1))
    ax.axvline(1, color='#888', lw=1, zorder=0)
    ax.set_yticks(range(len(rows)), [''] * len(rows) if narrow else [title for title, _ in rows])
    ax.tick_params(axis='y', length=0)
    ax.set_ylim(len(rows) - .5, top)
    ax.set_xlabel('speed-up over fp32 (1: equally fast)')
    ax.grid(axis='x', color='#ddd', lw=.6)
    ax.spines[['top', 'right', 'left']].set_visible(False)


def plot(panels: dict[str, Rows], file: str | Path, narrow: bool = False, dpi: int = 130, below: str = '') -> None:
    "Write a PNG with a panel for each title that has rows; none if no title has. A narrow one suits a phone."
    from matplotlib.figure import Figure
    panels = {title: rows for title, rows in panels.items() if rows}
    if not panels: return
    n = sum(map(len, panels.values()))
    size = (4.2, .5 * n + len(panels) + .9) if narrow else (9, .33 * n + len(panels) + .8)
    figure = Figure(figsize=size, layout='constrained')
    axs = figure.subplots(len(panels), squeeze=False, height_ratios=[1 + len(rows) for rows in panels.values()])[:, 0]
    for ax, (title, rows) in zip(axs, panels.items()):
        draw(ax, rows, narrow)
        lines = '\n'.join(wrap(title, 38)) if narrow else title
        ax.set_title(lines, fontweight='bold', fontsize=11, loc='left', pad=28)
    notes = *MARKS, f'whole training step, {OPTIMIZER}{below}'
    text = '\n'.join(line for note in notes for line in wrap(note, 48 if narrow else 110))
    figure.supxlabel(text, x=.01, ha='left', fontsize=9 if narrow else 10.5, color='#555')
    figure.savefig(file, dpi=dpi, bbox_inches='tight')
