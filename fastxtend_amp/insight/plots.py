"The figure of the precision report: the size of values and the errors, module by module."
from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..common import PRECISION_COLORS
from .tracer import IMPRECISE

if TYPE_CHECKING: from .report import PrecisionReport

__all__ = ['plot_report']

TICKS = 30            # modules that are named on the axis
NAMED = 6             # modules in trouble that are named above the figure, too
SMALL = 1e-4          # errors below this are drawn here
_RED = '#c0392b'


def plot_report(
    report: PrecisionReport,
    axs: Sequence | None = None, # Two matplotlib axes to draw on; new ones if None
) -> Any: # The two matplotlib axes
    "Draw the largest value in each module, and below it the errors."
    import matplotlib.pyplot as plt
    names = list(dict.fromkeys(report.table['module']))
    places = {n: i for i, n in enumerate(names)}
    rows = report.table[report.table['trouble'].astype(bool)]
    trouble = rows.groupby('module', sort=False)['mode'].agg(', '.join).to_dict()
    width, own = min(max(7.5, 3 + len(names) * .25), 10), axs is None   # legible on a page
    if axs is None:
        axs = plt.subplots(2, 1, sharex=True, layout='constrained', figsize=(width, 7), height_ratios=(3, 2))[1]
    sizes, errors = axs
    _draw_sizes(sizes, report, places, trouble)
    _draw_errors(errors, report, places)
    for ax in axs:
        for name in trouble: ax.axvspan(places[name] - .5, places[name] + .5, color=_RED, alpha=.12, lw=0, zorder=0)
        ax.set_xlim(-.7, len(names) - .3)
        ax.grid(alpha=.25)
        ax.spines[['top', 'right']].set_visible(False)
    _name(sizes, trouble, places)
    _ticks(errors, names, trouble)
    errors.set_xlabel('modules, from first to last')
    if own:
        verdicts = ';  '.join(f'{v.mode}: {v.verdict}' for v in report.verdicts.values())
        sizes.figure.suptitle(verdicts, fontsize=12, fontweight='bold')
        sizes.figure.legend(loc='outside lower center', ncols=3 if width > 9 else 2, frameon=False, fontsize=9)
    else:
        for ax in axs: ax.legend(loc='upper left', bbox_to_anchor=(1.15, 1), frameon=False, fontsize=9)
    return axs


def _draw_sizes(ax, report, places, trouble):
    first = report.table.drop_duplicates('module')
    largest = first[['largest', 'inside']].max(axis=1)
    x = first['module'].map(places)
    shown = largest > 0
    ax.plot(x[shown], largest[shown], '-', color='#9aa4b2', lw=1, zorder=2)
    fine = shown & ~first['module'].isin(trouble)
    words = 'largest value in the module (fp32)'
    ax.plot(x[fine], largest[fine], 'o', ms=4, color=PRECISION_COLORS['fp32'], label=words, zorder=3)
    bad = shown & first['module'].isin(trouble)
    if bad.any(): ax.plot(x[bad], largest[bad], 'o', ms=7, color=_RED, label='module in trouble', zorder=4)
    ax.set_yscale('log')
    ax.set_ylabel('absolute value')
    low, high = (largest[shown].min(), largest[shown].max()) if shown.any() else (1., 1.)
    if 'fp16' in report.verdicts:
        info = torch.finfo(torch.float16)
        low, high = min(low, info.tiny), max(high, info.max)
        ax.axhline(info.max, color=PRECISION_COLORS['fp16'], ls='--', lw=1.2)
        ax.axhline(info.tiny, color=PRECISION_COLORS['fp16'], ls=':', lw=1.2)
        ax.axhspan(info.max, info.max * 1e30, color=PRECISION_COLORS['fp16'], alpha=.08, lw=0, zorder=0)
        _label_right(ax, info.max, "fp16's ceiling\n65,504: inf above")
        _label_right(ax, info.tiny, "fp16's floor\n6e-05: digits lost below")
    ax.set_ylim(low / 5, high * 8)
    longest = max((len(n) + len(m) for n, m in _named(trouble, places).items()), default=0)
    ax.set_title('Does it fit? The largest value in each module', loc='left', fontsize=11, pad=8 + 2.7 * longest)


def _draw_errors(ax, report, places):
    top, room = 1., 2
    for i, (mode, verdict) in enumerate(report.verdicts.items()):
        rows, color = report.table[report.table['mode'] == mode], PRECISION_COLORS[mode]
        if not len(rows): continue
        x = rows['module'].map(places).to_numpy()
        total, own = (rows[c].to_numpy(dtype=float) for c in ('total error', 'own error'))
        lost = np.flatnonzero(rows['non-finite'].to_numpy(dtype=float) > 0)
        before_end = np.arange(len(rows)) < (lost[0] if len(lost) else len(rows))
        drawn = np.isfinite(total) & before_end
        at, line = list(x[drawn]), list(np.clip(total[drawn], SMALL, None))
        if len(lost):                                            # on to the mark
            at, line = [*at, x[lost[0]]], [*line, line[-1] if line else SMALL]
            room = 30                                            # for words above the lines
            _mark_end(ax, at[-1], line[-1], f'{mode}: not finite from here', color, i, len(places))
        kept = ' (red modules in fp32)' if verdict.verdict == 'cannot run' else ''
        ax.plot(at, line, '-', lw=1.6, color=color, label=f'{mode}: total error{kept}', zorder=2)
        dots = np.isfinite(own) & (own > SMALL) & before_end
        words = f"{mode}: the module's own error"
        ax.plot(x[dots], own[dots], 'o', ms=4, mfc='white', color=color, label=words, zorder=3)
        top = max([top, *line])
    ax.axhline(IMPRECISE, color='grey', ls='--', lw=1)
    _label_right(ax, IMPRECISE, '0.1 (10%): kept\nin fp32 above')
    ax.set_yscale('log')
    ax.set_ylim(SMALL / 1.5, top * room)
    ax.yaxis.set_major_formatter(lambda y, _: _percent(y))
    ax.set_ylabel('relative error')
    ax.set_title('How far from fp32?', loc='left', fontsize=11)


def _mark_end(ax, x, y, text, color, i, n):
    "A mark where numbers stop being finite, and words above the lines."
    left = x > .6 * n
    ax.plot([x], [y], 'X', ms=9, color=color, mec='white', zorder=5)
    line = {'arrowstyle': '-', 'color': color, 'lw': .8, 'relpos': (float(left), .5)}
    ax.annotate(f'{text} ' if left else f' {text}', (x, y), xytext=(x, .96 - .11 * i), va='top', color=color,
                fontsize=9, textcoords=('data', 'axes fraction'), ha='right' if left else 'left', arrowprops=line)


def _percent(y):
    if y >= .01: return f'{y:.0%}'
    return f'{y:.1%}' if y > SMALL else f'≤ {SMALL:.2%}'


def _label_right(ax, y, text):
    "Words beside the axes, at the height of a line."
    ax.annotate(text, (1, y), xycoords=('axes fraction', 'data'), xytext=(5, 0), textcoords='offset points',
                va='center', fontsize=8, color='#444')


def _name(ax, trouble, places):
    "The names of the first modules in trouble above the axes, slanted so that neighbours do not meet."
    gap, at = .045 * max(len(places), 12), -1e9
    for name, modes in _named(trouble, places).items():
        at = max(at + gap, places[name])
        ax.annotate(f'{name} ({modes})', (at, 1.02), xycoords=('data', 'axes fraction'), rotation=25,
                    rotation_mode='anchor', ha='left', va='bottom', color=_RED, fontsize=8)


def _named(trouble, places): return {n: trouble[n] for n in sorted(trouble, key=places.get)[:NAMED]}


def _ticks(ax, names, trouble):
    at = _chosen(names, trouble)
    ax.set_xticks(at, [_short(names[i]) for i in at], rotation=90, fontsize=8)
    for i, label in zip(at, ax.get_xticklabels()):
        if names[i] in trouble: label.set_color(_RED)


def _chosen(names, trouble) -> list[int]:
    "The places that get a name: those in trouble, then others evenly, none too near to another."
    if len(names) <= TICKS: return list(range(len(names)))
    gap = len(names) / TICKS
    found: list[int] = []
    for i in [*(i for i, n in enumerate(names) if n in trouble), *(round(k * gap) for k in range(TICKS))]:
        if i < len(names) and all(abs(i - j) >= .8 * gap for j in found): found.append(i)
    return sorted(found)[:TICKS]


def _short(name: str, n: int = 30) -> str:
    "A long name without its middle."
    return name if len(name) <= n else f'{name[:n // 2 - 2]}...{name[-n // 2 + 1:]}'
