"The plot of a comparison: loss curves, speeds, and where the time of a step goes."
from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from ..common import PRECISION_COLORS
from .phases import PHASES

__all__ = ['plot_comparison']

_PHASE_COLORS = '#b48ead', '#88c0d0', '#5e81ac', '#ebcb8b', '#d8dee9'   # data, forward, backward, optimizer, rest
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


def _color(name: str) -> str: return PRECISION_COLORS.get(name.partition(',')[0], PRECISION_COLORS['half weights'])


def _smooth(values: list[float]) -> pd.Series: # From step 1 on; nan where a loss is not finite
    losses = pd.Series(values, index=range(1, len(values) + 1), dtype=float)
    return losses.ewm(alpha=.2).mean().where(np.isfinite(losses))


def _draw_curves(ax, losses, seed_losses):
    base = next(iter(losses.values()))
    if seed_losses:
        seeds = pd.DataFrame([_smooth(l) for l in [base, *seed_losses]])
        ax.fill_between(seeds.columns, seeds.min(), seeds.max(), color='#d8dee9', lw=0,
                        label=f'fp32, range of {len(seeds)} seeds')
    for (name, values), style in zip(losses.items(), _STYLES):
        finite, label = np.isfinite(values), name
        if not finite.all(): label += f' (not finite from step {finite.argmin() + 1})'
        elif len(values) < len(base): label += ' (cut short)'
        marker = 'o' if len(values) == 1 else None
        ax.plot(_smooth(values), linestyle=style, color=_color(name), lw=2, label=label, marker=marker)
    ax.set(title='Training loss (smoothed)', xlabel='step', ylabel='loss')
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(loc='upper center', bbox_to_anchor=(.5, -.22), ncols=2, frameon=False, fontsize=8)


def _draw_speeds(ax, table, recommended):
    speed, low, high = (table[f'speed-up{q}'] for q in ('', ' q1', ' q3'))
    widest = max(1., high.max())
    ax.barh(_names(table), speed.fillna(0), xerr=[(speed - low).fillna(0), (high - speed).fillna(0)], capsize=3,
            color=[_color(n) for n in table.index], height=.6, error_kw={'lw': 1})
    why = table['support'].where(table['support'].isin(['unsupported', 'failed']), 'not measured')
    for i, (s, end, w) in enumerate(zip(speed, high.fillna(0), why)):
        ax.text(end + .04 * widest, i, f'{s:.2f}x' if s == s else w, va='center')
    ax.axvline(1, color='black', lw=.8, ls=':', zorder=0)
    ax.set(title=f'Speed; recommended: {recommended}', xlabel='samples per second, fp32 on the same samples = 1')
    ax.set_xlim(0, widest * 1.4)


def _draw_times(ax, table):
    "Draw the milliseconds of a step, stacked; a part of 8 % or more carries its share."
    ax.set(title='Where the time of a step goes', xlabel='milliseconds per step')
    if not len(table):
        ax.text(.5, .5, 'not measured on this device,\nor in so few steps', ha='center', va='center', color='#555',
                transform=ax.transAxes)
        return ax.set(xticks=[], yticks=[])
    times = table[['data', *PHASES, 'rest']] * 1000
    total, left = times.sum(axis=1), 0.
    for phase, color in zip(times, _PHASE_COLORS):
        bars = ax.barh(_names(table), times[phase], left=left, color=color, height=.6, label=phase)
        shares = [f'{t / n:.0%}' if t > .08 * total.max() else '' for t, n in zip(times[phase], total)]
        ax.bar_label(bars, shares, label_type='center', fontsize=8)
        left = left + times[phase]
    ax.legend(frameon=False, fontsize=8, ncols=5, loc='upper right', bbox_to_anchor=(1., -.2), handlelength=1,
              columnspacing=.8, handletextpad=.3)


def _names(table: pd.DataFrame) -> list[str]: # With what makes them slow
    return [f'{n}\n(emulated)' if s == 'emulated' else n for n, s in table['support'].items()]
