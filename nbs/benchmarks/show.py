"The benchmark's report: tables in Markdown, and a chart."
from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any

import pandas as pd

from .measure import NOISY, PACKAGES, noisy, notch

HEADS = {'plain loop': 'PyTorch loop', 'fastxtend_amp, tuned': 'tuned'}
EXPLAINED = f"""\
Speed-ups of a training step over fp32 in the same framework, with the same optimizer: medians of alternating blocks of
steps. `fp32, ms`: a step in fastai's loop. ~: the median's 95% interval is wider than {NOISY:.0%} either way."""


# -- tables

def tables(figures: dict[str, Any]) -> str:
    "Return the run as Markdown; `figures` are `bench`'s, or a file's that it wrote."
    return '\n\n'.join([_head(figures), EXPLAINED, *_tables(figures)]) + '\n'


def _head(figures: dict[str, Any]) -> str:
    m = figures['machine']
    modes = ', '.join(f'{mode} ({support})' for mode, (support, _) in figures['support'].items())
    gpu = f" ({m['gpu']}), fp32 without TF32" if 'gpu' in m else ''
    versions = ', '.join(f'{name} {m[name]}' for name in ('python', 'torch', *PACKAGES) if m.get(name))
    lines = [f"# Training steps on {m['device']}: {modes}", '', f"- Command: `{figures['command']}`",
             f"- Machine: {m['cpu']}, {m['cores']} cores ({m['capability']}), {m['threads']} threads{gpu}",
             f'- Versions: {versions}']
    lines += [f'- {mode}: {support} here ({why})' for mode, (support, why) in figures['support'].items()]
    return '\n'.join(lines)


def _tables(figures: dict[str, Any]) -> Iterator[str]:
    "Return a table for each precision and optimizer, and what its contestants noted."
    rows = pd.DataFrame(figures['rows'])
    fp32 = rows[(rows['mode'] == 'fp32') & (rows.contestant == 'fastai loop')].set_index(['model', 'optimizer']).ms
    for (mode, optimizer), found in rows[rows['mode'] != 'fp32'].groupby(['mode', 'optimizer'], sort=False):
        yield f'## {mode}, {optimizer}'
        names = [*dict.fromkeys(found.contestant)]
        heads = ['model', 'batch', 'fp32, ms', *(HEADS.get(name, name) for name in names)]
        lines = [heads, ['---', *['--:'] * (len(heads) - 1)]]
        for model in figures['models']:
            by_name = {r['contestant']: r for r in found[found.model == model['name']].to_dict('records')}
            lines.append([model['what'], str(model['batch_size']), _number(fp32.get((model['name'], optimizer))),
                          *(_ratio(by_name.get(name)) for name in names)])
        yield '\n'.join(f"| {' | '.join(line)} |" for line in lines)
        records = found.replace({'contestant': HEADS}).to_dict('records')
        said = [f"- {r['contestant']}: {r['note']}" for r in records if r['note']]
        said += [f"- {r['contestant']}: {r['syncs']:g} GPU synchronizations per step besides those in fp32"
                 for r in records if r['syncs'] is not None and not math.isnan(r['syncs'])]
        if said: yield '\n'.join(dict.fromkeys(said))


def _number(ms: float | None) -> str: return '-' if ms is None or math.isnan(ms) else f'{ms:,.1f}'


def _ratio(record: dict[str, Any] | None) -> str:
    return marked(record['vs_fp32'], record['blocks']) if record and record['vs_fp32'] else '-'


def marked(quartiles: list[float], blocks: int) -> str:
    "Return the median as text, with ~ before it where it is too noisy to tell; below 0.1 with more digits."
    median = quartiles[1]
    return ('~' if noisy(quartiles, blocks) else '') + (f'{median:.2f}' if median >= .1 else f'{median:.2g}')


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
    return f'{mode} is faster than fp32 in {len(plain)} of {len(rows)} models{most}{more}'


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
