"The figure of the precision report: the size of values and the errors, module by module."
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch

from ..common import PRECISION_COLORS
from .verdict import IMPRECISE, Verdict

__all__ = ['plot_report']

TICKS = 30            # modules that are named on the axis
SMALL = 1e-4          # errors below this are drawn here
TROUBLE, REFUSED = ('#c0392b', 'module in trouble'), ('#8a929c', 'module that does not run')


def plot_report(
    table: pd.DataFrame, # As `PrecisionReport.table`
    verdicts: Mapping[str, Verdict], # By the name of the mode
    axs: Sequence | None = None, # Two matplotlib axes to draw on; new ones if None
) -> Any: # The two matplotlib axes
    "Draw the largest value in each module, and below it the errors."
    import matplotlib.pyplot as plt
    names = list(dict.fromkeys(table['module']))
    own, width = axs is None, min(max(7.5, 3 + len(names) * .25), 10)   # legible on a page
    if axs is None:
        axs = plt.subplots(2, 1, sharex=True, layout='constrained', figsize=(width, 7), height_ratios=(3, 2))[1]
    marks = _marks(table, verdicts)
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
    figure = axs[0].figure
    title = ';  '.join(f'{v.mode}: {v.verdict}' for v in verdicts.values())
    if own: figure.suptitle(title, fontsize=12, fontweight='bold')
    if own and len(names): figure.legend(loc='outside lower center', ncols=2, frameon=False, fontsize=9)
    else:
        for ax in axs: ax.legend(frameon=False, fontsize=9)
    return axs


def _marks(table, verdicts) -> dict[str, tuple[str, str]]:
    "Return color and words for each module in trouble: grey if all that is wrong is that it does not run."
    found: dict[str, tuple[str, str]] = {}
    for name, mode in table.loc[table['trouble'].astype(bool), ['module', 'mode']].itertuples(index=False):
        refused = verdicts[mode].verdict == 'cannot run'
        found[name] = REFUSED if refused and found.get(name, REFUSED) == REFUSED else TROUBLE
    return found


def _draw_sizes(ax, rows, with_fp16, marks):
    rows = rows[rows['largest'] > 0]
    ax.plot(rows['x'], rows['largest'], '-', color='#9aa4b2', lw=1, zorder=2)
    fine = PRECISION_COLORS['fp32'], 'largest value in the module (fp32)'
    for kind in (fine, TROUBLE, REFUSED):
        of = rows[[marks.get(n, fine) == kind for n in rows['module']]]
        size = 4 if kind is fine else 7
        if len(of): ax.plot(of['x'], of['largest'], 'o', ms=size, color=kind[0], label=kind[1], zorder=3)
    limits = [*rows['largest']] or [1.]
    if with_fp16:
        info, color = torch.finfo(torch.float16), PRECISION_COLORS['fp16']
        for y, style, words in ((info.max, '--', "fp16's ceiling\n65,504: inf above"),
                                (info.tiny, ':', "fp16's floor\n6e-05: digits lost below")):
            ax.axhline(y, color=color, ls=style, lw=1.2)
            _label_right(ax, y, words)
        ax.axhspan(info.max, info.max * 1e30, color=color, alpha=.08, lw=0, zorder=0)
        limits += [info.max, info.tiny]
    ax.set(ylabel='absolute value', ylim=(min(limits) / 5, max(limits) * 8))
    ax.set_title('Does it fit? The largest value in each module', loc='left', fontsize=11)


def _draw_errors(ax, table):
    top = 1.
    for mode, rows in table.groupby('mode', sort=False):
        color, lost = PRECISION_COLORS[mode], rows[rows['non-finite'] > 0]
        before = rows[rows['x'] < lost['x'].min()] if len(lost) else rows
        line = before.dropna(subset='total error')
        errors = line['total error'].clip(lower=SMALL)
        if len(line): ax.plot(line['x'], errors, '-', lw=1.6, color=color, label=f'{mode}: total error', zorder=2)
        dots = before[before['own error'] > SMALL]
        if len(dots):
            ax.plot(dots['x'], dots['own error'], 'o', ms=4, mfc='white', color=color,
                    label=f"{mode}: the module's own error", zorder=3)
        if len(lost):
            ax.plot(lost['x'].iloc[:1], [errors.iloc[-1] if len(line) else SMALL], 'X', ms=9, color=color, mec='white',
                    label=f'{mode}: not finite from here', zorder=5)
        top = max([top, *errors, *dots['own error']])
    ax.axhline(IMPRECISE, color='grey', ls='--', lw=1)
    _label_right(ax, IMPRECISE, '0.1 (10%): kept\nin fp32 above')
    ax.set(ylabel='relative error', ylim=(SMALL / 1.5, top * 2), xlabel='modules, from first to last')
    ax.set_title('How far from fp32?', loc='left', fontsize=11)


def _label_right(ax, y, text):
    "Write beside the axes, at the height of a line."
    ax.annotate(text, (1, y), xycoords=('axes fraction', 'data'), xytext=(5, 0), textcoords='offset points',
                va='center', fontsize=8, color='#444')


def _name(ax, names, marks):
    "Write the names of the modules in trouble below the axis, and those of others evenly, none too near to another."
    gap, at = max(1., len(names) / TICKS), list[int]()
    for i in [*(i for i, n in enumerate(names) if n in marks), *range(len(names))]:
        if all(abs(i - j) >= .8 * gap for j in at): at.append(i)
    for i, label in zip(at, ax.set_xticks(at, [_short(names[i]) for i in at], rotation=90, fontsize=8)):
        if names[i] in marks: label.label1.set_color(marks[names[i]][0])


def _short(name: str, n: int = 30) -> str:
    "Return a long name without its middle."
    return name if len(name) <= n else f'{name[:n // 2 - 2]}...{name[-n // 2 + 1:]}'
