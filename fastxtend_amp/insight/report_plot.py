"The figure of the precision report: the size of values and the errors, module by module."
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from ..common import PRECISION_COLORS
from .verdict import IMPRECISE, Verdict

__all__ = ['plot_report']

TICKS = 30            # modules that are named on the axis
NAMED = 6             # modules in trouble that are named above the figure, too
SMALL = 1e-4          # errors below this are drawn here
_RED, _GREY = '#c0392b', '#8a929c'


def plot_report(
    table: pd.DataFrame, # As `PrecisionReport.table`
    verdicts: Mapping[str, Verdict], # By the name of the mode
    axs: Sequence | None = None, # Two matplotlib axes to draw on; new ones if None
) -> Any: # The two matplotlib axes
    "Draw the largest value in each module, and below it the errors."
    import matplotlib.pyplot as plt
    names = list(dict.fromkeys(table['module']))
    width, own = min(max(7.5, 3 + len(names) * .25), 10), axs is None   # legible on a page
    if axs is None:
        axs = plt.subplots(2, 1, sharex=True, layout='constrained', figsize=(width, 7), height_ratios=(3, 2))[1]
    sizes, errors = axs
    marks = _marks(table, verdicts)
    places = {n: i for i, n in enumerate(names)}
    _draw_sizes(sizes, table, 'fp16' in verdicts, places, marks)
    for i, mode in enumerate(verdicts): _draw_errors(errors, table[table['mode'] == mode], mode, i, places)
    _finish_errors(errors)
    for ax in axs:
        for name, (color, _) in marks.items(): ax.axvspan(places[name] - .5, places[name] + .5, color=color, alpha=.12, lw=0, zorder=0)
        ax.set_xlim(-.7, len(names) - .3)
        ax.grid(alpha=.25)
        ax.spines[['top', 'right']].set_visible(False)
    _ticks(errors, names, marks)
    errors.set_xlabel('modules, from first to last')
    if own:
        title = ';  '.join(f'{v.mode}: {v.verdict}' for v in verdicts.values())
        sizes.figure.suptitle(title, fontsize=12, fontweight='bold')
        sizes.figure.legend(loc='outside lower center', ncols=3 if width > 9 else 2, frameon=False, fontsize=9)
    else:
        for ax in axs: ax.legend(loc='upper left', bbox_to_anchor=(1.15, 1), frameon=False, fontsize=9)
    return axs


def _marks(table, verdicts) -> dict[str, tuple[str, str]]:
    "Return color and words for each module in trouble, in order: red, or grey if all that is wrong is that it does not run."
    found: dict[str, tuple[str, str]] = {}
    for name, rows in table[table['trouble'].astype(bool)].groupby('module', sort=False):
        refused = [m for m in rows['mode'] if verdicts[m].verdict == 'cannot run']
        words = [f'{m}: does not run' if m in refused else m for m in rows['mode']]
        found[str(name)] = _GREY if len(refused) == len(rows) else _RED, ', '.join(words)
    order = list(dict.fromkeys(table['module']))
    return dict(sorted(found.items(), key=lambda item: order.index(item[0])))


def _draw_sizes(ax, table, with_fp16, places, marks):
    first = table.drop_duplicates('module')
    first = first[first['largest'] > 0]
    x, largest = first['module'].map(places), first['largest']
    ax.plot(x, largest, '-', color='#9aa4b2', lw=1, zorder=2)
    kinds = {PRECISION_COLORS['fp32']: 'largest value in the module (fp32)', _RED: 'module in trouble', _GREY: 'module that does not run'}
    for color, words in kinds.items():
        of = [marks.get(n, (PRECISION_COLORS['fp32'], ''))[0] == color for n in first['module']]
        if any(of): ax.plot(x[of], largest[of], 'o', ms=4 if color == PRECISION_COLORS['fp32'] else 7, color=color, label=words, zorder=3)
    ax.set_yscale('log')
    ax.set_ylabel('absolute value')
    low, high = (largest.min(), largest.max()) if len(first) else (1., 1.)
    if with_fp16:
        info, color = torch.finfo(torch.float16), PRECISION_COLORS['fp16']
        low, high = min(low, info.tiny), max(high, info.max)
        ax.axhline(info.max, color=color, ls='--', lw=1.2)
        ax.axhline(info.tiny, color=color, ls=':', lw=1.2)
        ax.axhspan(info.max, info.max * 1e30, color=color, alpha=.08, lw=0, zorder=0)
        _label_right(ax, info.max, "fp16's ceiling\n65,504: inf above")
        _label_right(ax, info.tiny, "fp16's floor\n6e-05: digits lost below")
    ax.set_ylim(low / 5, high * 8)
    _name(ax, dict([*marks.items()][:NAMED]), places)


def _name(ax, marks, places):
    "Write the names of the first modules in trouble above the axes, slanted so that neighbours do not collide."
    gap, at = .045 * max(len(places), 12), -1e9
    texts = {n: f'{_short(n)} ({words})' for n, (_, words) in marks.items()}
    for name, text in texts.items():
        at = max(at + gap, places[name])
        left = at > .6 * len(places)                             # towards the middle, so that no name leaves the figure
        ax.annotate(text, (at, 1.02), xycoords=('data', 'axes fraction'), rotation=-25 if left else 25,
                    rotation_mode='anchor', ha='right' if left else 'left', va='bottom', color=marks[name][0], fontsize=8)
    ax.set_title('Does it fit? The largest value in each module', loc='left', fontsize=11,
                 pad=8 + 2.7 * max(map(len, texts.values()), default=0))


def _draw_errors(ax, rows, mode, i, places):
    if not len(rows): return
    x, color = rows['module'].map(places).to_numpy(), PRECISION_COLORS[mode]
    total, own = (rows[c].to_numpy(dtype=float) for c in ('total error', 'own error'))
    lost = np.flatnonzero(rows['non-finite'].to_numpy(dtype=float) > 0)
    before_end = np.arange(len(rows)) < (lost[0] if len(lost) else len(rows))
    drawn = np.isfinite(total) & before_end
    at, line = list(x[drawn]), list(np.clip(total[drawn], SMALL, None))
    if len(lost):                                                # on to the mark
        at, line = [*at, x[lost[0]]], [*line, line[-1] if line else SMALL]
        _mark_end(ax, at[-1], line[-1], f'{mode}: not finite from here', color, i, len(places))
    if at: ax.plot(at, line, '-', lw=1.6, color=color, label=f'{mode}: total error', zorder=2)
    dots = np.isfinite(own) & (own > SMALL) & before_end
    if dots.any(): ax.plot(x[dots], own[dots], 'o', ms=4, mfc='white', color=color, label=f"{mode}: the module's own error", zorder=3)


def _finish_errors(ax):
    high = [max(l.get_ydata(), default=0) for l in ax.get_lines()]
    ax.axhline(IMPRECISE, color='grey', ls='--', lw=1)
    _label_right(ax, IMPRECISE, '0.1 (10%): kept\nin fp32 above')
    ax.set_yscale('log')
    ax.set_ylim(SMALL / 1.5, max([1., *high]) * (30 if ax.texts[1:] else 2))     # with room for words above the lines
    ax.yaxis.set_major_formatter(lambda y, _: f'{y:.0%}' if y >= .01 else f'{y:.1%}' if y > SMALL else f'≤ {SMALL:.2%}')
    ax.set_ylabel('relative error')
    ax.set_title('How far from fp32?', loc='left', fontsize=11)


def _mark_end(ax, x, y, text, color, i, n):
    "Draw a mark where numbers stop being finite, and words above the lines."
    left = x > .6 * n
    ax.plot([x], [y], 'X', ms=9, color=color, mec='white', zorder=5)
    line = {'arrowstyle': '-', 'color': color, 'lw': .8, 'relpos': (float(left), .5)}
    ax.annotate(f'{text} ' if left else f' {text}', (x, y), xytext=(x, .96 - .11 * i), va='top', color=color,
                fontsize=9, textcoords=('data', 'axes fraction'), ha='right' if left else 'left', arrowprops=line)


def _label_right(ax, y, text):
    "Write beside the axes, at the height of a line."
    ax.annotate(text, (1, y), xycoords=('axes fraction', 'data'), xytext=(5, 0), textcoords='offset points',
                va='center', fontsize=8, color='#444')


def _ticks(ax, names, marks):
    at = _chosen(names, marks)
    ax.set_xticks(at, [_short(names[i]) for i in at], rotation=90, fontsize=8)
    for i, label in zip(at, ax.get_xticklabels()):
        if names[i] in marks: label.set_color(marks[names[i]][0])


def _chosen(names, marks) -> list[int]:
    "Return the places that get a name: those in trouble, then others evenly, none too near to another."
    if len(names) <= TICKS: return list(range(len(names)))
    gap = len(names) / TICKS
    found: list[int] = []
    for i in [*(i for i, n in enumerate(names) if n in marks), *(round(k * gap) for k in range(TICKS))]:
        if i < len(names) and all(abs(i - j) >= .8 * gap for j in found): found.append(i)
    return sorted(found)[:TICKS]


def _short(name: str, n: int = 30) -> str:
    "Return a long name without its middle."
    return name if len(name) <= n else f'{name[:n // 2 - 2]}...{name[-n // 2 + 1:]}'
