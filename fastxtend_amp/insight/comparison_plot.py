"The plot of a comparison: loss curves, speeds, and where the time of a step goes."
from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from ..common import PRECISION_COLORS
from .phases import PHASES

__all__ = ['plot_comparison']

_PHASE_COLORS = {'data': '#b48ead', 'forward': '#88c0d0', 'backward': '#5e81ac', 'optimizer': '#ebcb8b',
                 'rest': '#d8dee9'}
_STYLES = ('-', '--', ':', '-.', (0, (1, 3)), (0, (5, 1)))


def plot_comparison(
    table: pd.DataFrame, # As `PrecisionComparison.table`
    losses: dict[str, list[float]], # By row
    seed_losses: list[list[float]],
    recommended: str,
    axs: Any = None, # As many matplotlib axes as it draws on; new ones if None
): # Those axes
    "See `PrecisionComparison.plot`."
    import matplotlib.pyplot as plt
    drawn = {n: table['measure'][n] for n in table.index if losses[n]}
    measures = list(dict.fromkeys(drawn.values()))               # fp32, and fp32 on fewer samples
    if axs is None:                                              # as wide as a page: the words stay legible
        figure = plt.figure(figsize=(9, 6), layout='constrained')
        top = ['fp32', measures[-1]]
        axs = list(figure.subplot_mosaic([top, ['speeds', 'times']]).values())
    *curves, speeds, times = axs
    for ax, measure in zip(curves, measures):
        _draw_curves(ax, {n: losses[n] for n in drawn if drawn[n] == measure}, seed_losses if measure == 'fp32' else [])
    _draw_speeds(speeds, table.iloc[::-1], recommended)
    _draw_times(times, table[table['forward'].notna()].iloc[::-1])
    for ax in axs: ax.spines[['top', 'right']].set_visible(False)
    return axs


def _color(name: str) -> str:
    name = name.partition(',')[0]
    return PRECISION_COLORS[name if name in PRECISION_COLORS else 'half weights']


def _smooth(values): return np.where(np.isfinite(values), pd.Series(values, dtype=float).ewm(alpha=.2).mean(), np.nan)


def _draw_curves(ax, losses, seed_losses):
    base = next(iter(losses.values()))
    if seed_losses:
        seeds = np.array([_smooth(l) for l in [base, *seed_losses]])
        ax.fill_between(range(1, len(base) + 1), seeds.min(0), seeds.max(0), color='#d8dee9', lw=0,
                        label=f'fp32, range of {len(seeds)} seeds')
    for (name, values), style in zip(losses.items(), _STYLES):
        finite, drawn = np.isfinite(values), _smooth(values)
        if not finite.all(): label = f'{name} (not finite from step {finite.argmin() + 1})'
        else: label = f'{name} (cut short)' if len(values) < len(base) else name
        marker = 'o' if len(values) == 1 else None
        ax.plot(range(1, len(drawn) + 1), drawn, linestyle=style, color=_color(name), lw=2, label=label, marker=marker)
    ax.set(title='Training loss (smoothed)', xlabel='step', ylabel='loss')
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(loc='upper center', bbox_to_anchor=(.5, -.16), ncols=2, frameon=False, fontsize=8)


def _names(table): # With what makes them slow
    return [f'{n}\n(emulated)' if s == 'emulated' else n for n, s in table['support'].items()]


def _draw_speeds(ax, table, recommended):
    at, widest = range(len(table)), max(1., table['speed-up q3'].max())
    ax.barh(at, table['speed-up'].fillna(0), color=[_color(n) for n in table.index], height=.6)
    for i, (_, row) in enumerate(table.iterrows()):
        if row['speed-up'] != row['speed-up']:
            why = row['support'] if row['support'] in ('unsupported', 'failed') else 'not measured'
            ax.text(.03 * widest, i, why, va='center', color='#555')
            continue
        low, high = row['speed-up'] - row['speed-up q1'], row['speed-up q3'] - row['speed-up']
        if low + high > 0: ax.errorbar(row['speed-up'], i, xerr=[[low], [high]], color='black', capsize=3, lw=1)
        ax.text(row['speed-up q3'] + .04 * widest, i, f"{row['speed-up']:.2f}x", va='center', backgroundcolor='white')
    ax.axvline(1, color='black', lw=.8, ls=':', zorder=0)
    ax.set_yticks(at, _names(table))
    ax.set(title=f'Speed; recommended: {recommended}', xlabel='samples per second, fp32 on the same samples = 1')
    ax.set_xlim(0, widest * 1.4)


def _draw_times(ax, table):
    "Draw the milliseconds of a step, stacked; a part of 8 % or more carries its share."
    ax.set(title='Where the time of a step goes', xlabel='milliseconds per step')
    if not len(table):
        ax.text(.5, .5, 'not measured on this device,\nor in so few steps', ha='center', va='center', color='#555',
                transform=ax.transAxes)
        ax.set(xticks=[], yticks=[])
        return
    times = table[['data', *PHASES, 'rest']] * 1000
    total, left = times.sum(axis=1), np.zeros(len(table))
    for phase, values in times.items():
        ax.barh(range(len(table)), values, left=left, color=_PHASE_COLORS[phase], height=.6, label=phase)
        for i, (v, l, t) in enumerate(zip(values, left, total)):
            if v > .08 * total.max(): ax.text(l + v / 2, i, f'{v / t:.0%}', ha='center', va='center', fontsize=8)
        left = left + values.to_numpy()
    ax.set_yticks(range(len(table)), _names(table))
    ax.set_xlim(0, total.max() * 1.02)
    ax.legend(frameon=False, fontsize=8, ncols=5, loc='upper right', bbox_to_anchor=(1., -.2), handlelength=1,
              columnspacing=.8, handletextpad=.3)
