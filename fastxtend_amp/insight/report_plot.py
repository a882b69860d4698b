"The figure of the precision report: the size of values and the errors, module by module."
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd
import torch

from ..common import PRECISION_COLORS
from .verdict import IMPRECISE, Verdict

__all__ = ['plot_report']

TICKS = 30            # modules that are named on the axis
SMALL, LARGE = 1e-4, 10.                                         # errors beyond are drawn at the edge
FINE, TROUBLE, REFUSED = ((PRECISION_COLORS['fp32'], 'largest value in the module (fp32)'),
                          ('#c0392b', 'module in trouble'), ('#8a929c', 'module that does not run'))


def plot_report(
    table: pd.DataFrame, # As `PrecisionReport.table`
    verdicts: Mapping[str, Verdict], # By the name of the mode
) -> Any: # The two matplotlib axes
    "Draw the largest value in each module, and below it the errors."
    import matplotlib.pyplot as plt
    names = list(dict.fromkeys(table['module']))
    width = min(max(7.5, 3 + len(names) * .25), 10)              # legible on a page
    figure, axs = plt.subplots(2, 1, sharex=True, layout='constrained', figsize=(width, 7), height_ratios=(3, 2))
    marks = {row.module: REFUSED if verdicts[row.mode].verdict == 'cannot run' else TROUBLE
             for row in table.itertuples() if row.trouble}
    table = table.assign(x=table['module'].map(names.index))
    _draw_sizes(axs[0], table.drop_duplicates('module'), 'fp16' in verdicts, marks)
    _draw_errors(axs[1], table)
    for ax in axs:
        for name, (color, _) in marks.items():
            ax.axvspan(names.index(name) - .5, names.index(name) + .5, color=color, alpha=.12, lw=0, zorder=0)
        ax.set(xlim=(-.7, len(names) - .3), yscale='log')
        ax.grid(alpha=.25)
        ax.spines[['top', 'right']].set_visible(False)
    _name(axs[1], names, marks)
    figure.suptitle(';  '.join(f'{v.mode}: {v.verdict}' for v in verdicts.values()), fontsize=12, fontweight='bold')
    if names: figure.legend(loc='outside lower center', ncols=2, frameon=False, fontsize=9)
    return axs


def _draw_sizes(ax, rows, with_fp16, marks):
    rows = rows[rows['largest'] > 0]
    kinds = [marks.get(name, FINE) for name in rows['module']]
    ax.plot(rows['x'], rows['largest'], '-', color='#9aa4b2', lw=1, zorder=2)
    for kind in dict.fromkeys(kinds):
        of = rows[[k == kind for k in kinds]]
        ax.plot(of['x'], of['largest'], 'o', ms=4 if kind is FINE else 7, color=kind[0], label=kind[1], zorder=3)
    limits = [*rows['largest']] or [1.]
    if with_fp16:
        info, color = torch.finfo(torch.float16), PRECISION_COLORS['fp16']
        ax.axhspan(info.max, info.max * 1e30, color=color, alpha=.08, lw=0, zorder=0)
        _draw_limit(ax, info.max, "fp16's ceiling\n65,504: inf above", color)
        _draw_limit(ax, info.tiny, "fp16's floor\n6e-05: digits lost below", color)
        limits += [info.max, info.tiny]
    ax.set(ylabel='absolute value', ylim=(min(limits) / 5, max(limits) * 8))
    ax.set_title('Does it fit? The largest value in each module', loc='left', fontsize=11)


def _draw_errors(ax, table):
    for mode, rows in table.dropna(subset='error').groupby('mode', sort=False):
        ax.plot(rows['x'], rows['error'].clip(SMALL, LARGE), '.-', lw=1.2, color=PRECISION_COLORS[mode],
                label=f"{mode}: error of the module's arithmetic")
        lost = rows[rows['error'] == float('inf')]
        if len(lost): ax.plot(lost['x'], [LARGE] * len(lost), 'X', ms=9, color=PRECISION_COLORS[mode], mec='white',
                              label=f'{mode}: not finite from here', zorder=5)
    _draw_limit(ax, IMPRECISE, '0.1 (10%): kept\nin fp32 above', 'grey')
    ax.set(ylabel='relative error', ylim=(SMALL / 1.5, LARGE * 2), xlabel='modules, from first to last')
    ax.set_title('How far from fp32?', loc='left', fontsize=11)


def _draw_limit(ax, y, text, color):
    "Draw a line at a height, and what it is beside the axes."
    ax.axhline(y, color=color, ls='--', lw=1.2)
    ax.annotate(text, (1, y), xycoords=('axes fraction', 'data'), xytext=(5, 0), textcoords='offset points',
                va='center', fontsize=8, color='#444')


def _name(ax, names, marks):
    "Write the names of the modules in trouble below the axis, and those of others evenly, none too near to another."
    gap, at = max(1., len(names) / TICKS), list[int]()
    for i in [*(i for i, n in enumerate(names) if n in marks), *range(len(names))]:
        if all(abs(i - j) >= .8 * gap for j in at): at.append(i)
    labels = [n if len(n) <= 30 else f'{n[:13]}...{n[-14:]}' for n in (names[i] for i in at)]
    for i, tick in zip(at, ax.set_xticks(at, labels, rotation=90, fontsize=8)):
        if names[i] in marks: tick.label1.set_color(marks[names[i]][0])
