"The result of a comparison: its table, the recommendation and how sure it is, and the plot."
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from fastai.learner import Learner

from .precisions import PRECISION_COLORS, PrecisionChoice, use_choice
from .verdict import as_html

__all__ = ['PrecisionComparison', 'Tolerance', 'recommend']

_WORTH = 1.05           # speed-up below which a mode does not pay
_FEWEST_TURNS = 4       # the first warms up, and three are needed for a range
# One-sided 95 % prediction interval of one more training, by the number of trainings: t * sqrt(1 + 1 / n).
_INTERVAL = {2: 7.7, 3: 3.4}     # 2.6 for four; more are taken for four


@dataclass(repr=False, eq=False)
class PrecisionComparison:
    """Precisions side by side on one learner; the result of `Learner.compare_precision`.

    | column of `table` | meaning |
    |---|---|
    | `support` | how the device runs the mode: 'native', 'emulated', 'unsupported'; 'failed' after an error |
    | `steps`, `turns` | training steps, and the turns in which they were taken |
    | `ms per step` | median over the turns |
    | `speed-up`, `speed-up q1`, `speed-up q3` | times fp32's speed: median and quartiles over the turns |
    | `loss`, `loss difference` | mean of the last steps, and its distance from fp32's; nan for a mode that failed |
    | `skipped`, `final scale` | skipped steps, and the loss scale at the end |
    | `note` | why a mode did not run |
    """
    table: pd.DataFrame # One row for each mode
    losses: dict[str, list[float]] # The loss of each step, by mode
    seed_losses: list[list[float]] # The loss of each step of fp32 with other seeds
    recommended: str # The mode to take
    reason: str # Why, and how sure that is
    calls: dict[str, str] # The call that trains in each mode
    notes: list[str] # Sentences on how it was measured
    choices: dict[str, PrecisionChoice] # What `apply` sets, by mode

    def apply(self,
        learn: Learner, # The learner that was compared, or one like it
        mode: str | None = None, # A row of the table; the recommended one if None
    ) -> Learner: # The learner
        "Have the learner train in the recommended precision, with the modules in fp32 and other arguments that it had."
        mode = self.recommended if mode is None else mode
        if mode not in self.choices:
            raise ValueError(f"mode={mode!r} cannot be used: it was not compared. Take one of "
                             f"{', '.join(map(repr, self.choices))}.")
        use_choice(learn, self.choices[mode])
        return learn

    def _shown(self, render: str) -> str: # By the DataFrame's method of that name
        "Return the table for people: fewer columns, rounded."
        columns = ['support', 'steps', 'ms per step', 'speed-up', 'loss', 'loss difference', 'skipped', 'final scale']
        shown = self.table[columns].dropna(axis=1, how='all').rename_axis(None)
        shown['speed-up'] = self.table.apply(_speed, axis=1)
        return getattr(shown, render)(float_format='{:,.5g}'.format, na_rep='-')

    def _lines(self) -> list[str]:
        notes = [f'{name}: {note}' for name, note in self.table['note'].items() if note]
        return [f'Recommended: {self.recommended}. {self.reason} Next: `{self.calls[self.recommended]}`.',
                *notes, *self.notes]

    def __repr__(self) -> str:
        first, *rest = (fill(line, 118, break_long_words=False, break_on_hyphens=False) for line in self._lines())
        return '\n'.join([first, '', self._shown('to_string'), '', *rest])

    def _repr_html_(self) -> str:
        first, *rest = (f'<p>{as_html(line)}</p>' for line in self._lines())
        table = self._shown('to_html').replace('<td>', '<td style="white-space: nowrap">')
        return ''.join([first, table, *rest])

    def plot(self,
        axs: Sequence | None = None, # Two matplotlib axes to draw on; new ones if None
    ): # The matplotlib axes
        "Draw the loss curves, with the range of fp32's seeds in grey, and the speed of each mode against fp32."
        import matplotlib.pyplot as plt
        if axs is None: _, axs = plt.subplots(1, 2, figsize=(9, 3.6), layout='constrained')
        _draw_curves(axs[0], self.losses, self.seed_losses)
        _draw_speeds(axs[1], self.table.iloc[::-1], self.recommended)
        for ax in axs: ax.spines[['top', 'right']].set_visible(False)
        return axs


# -- the recommendation

class Tolerance:
    """The distance above fp32's loss that another may have: that of one more training of fp32, or 1 % if that is more.

    Where fp32 was trained once there is no spread, and only a wide margin counts: a tenth of the loss, or two standard
    deviations between its last steps.
    """
    def __init__(self,
        last: Sequence[float], # fp32's losses in the last steps
        seeds: Sequence[float], # The mean of those in trainings with other seeds
    ):
        self.loss, self.n = float(np.mean(last)), 1 + len(seeds)
        self.spread = float(np.std([self.loss, *seeds], ddof=1)) if seeds else math.nan
        if seeds: self.value = max(.01 * abs(self.loss), _INTERVAL.get(self.n, 2.6) * self.spread)
        else: self.value = max(.1 * abs(self.loss), 2 * float(np.std(last)))

    def __str__(self) -> str:
        if self.n == 1: return f'{self.value:.2g}, a wide margin, as there was no second training of fp32 to measure by'
        if self.value == .01 * abs(self.loss): return f'{self.value:.2g} (1 % of it)'
        return f'{self.value:.2g}, as {self.n} trainings of fp32 allow'


def recommend(
    table: pd.DataFrame, # As `PrecisionComparison.table`
    tolerance: Tolerance,
) -> tuple[str, str]: # The mode, and why
    """Return one mode: the fastest that pays and trains as fp32 does.

    It pays if the median speed-up is 1.05 or more, and the lower quartile is further above 1 than it is below the
    upper one. It trains as fp32 does if the mean of the last losses is finite and above fp32's by no more than the
    tolerance, and no more than half of its steps were skipped. Of two equally fast (5 %) bf16 is taken, which needs no
    loss scaling.
    """
    if not math.isfinite(tolerance.loss):
        return 'fp32', "fp32's own loss is not finite: look at the data, the loss function and the learning rate first."
    against = {name: _against(row, tolerance) for name, row in table.drop('fp32').iterrows()}
    bad = '; '.join(f"{name}: {', '.join(found)}" for name, found in against.items() if found)
    speed = table['speed-up'][[name for name, found in against.items() if not found]]
    if speed.empty: return 'fp32', f'{bad}.'
    best = 'bf16' if speed.get('bf16', 0) * 1.05 >= speed.max() else speed.idxmax()
    why = f"{_speed(table.loc[best])} times fp32's speed, and a loss no further above fp32's than {tolerance}"
    return best, f"{why}{bad and f' ({bad})'}."


def _against(row: pd.Series, tolerance: Tolerance) -> list[str]:
    "Return what speaks against a mode."
    if row['support'] in ('unsupported', 'failed'): return ['does not run here']
    found = []
    if not math.isfinite(row['loss']): found.append('its loss is not finite')
    elif row['skipped'] > row['steps'] / 2:                      # which takes less time, and leaves the loss alone
        found.append(f"it skipped {row['skipped']} of {row['steps']} steps, so its loss and speed say little: "
                     'compare with a larger `n_steps`, or see what `learn.precision_report()` finds')
    elif row['loss difference'] > tolerance.value:
        found.append(f"its loss is {row['loss difference']:.2g} above fp32's, more than {tolerance}")
    low, high = row['speed-up q1'], row['speed-up q3']
    if row['turns'] < _FEWEST_TURNS:
        found.append(f"it was timed in {row['turns']} of the {_FEWEST_TURNS} turns that a range takes")
    elif low - 1 <= high - low or row['speed-up'] < _WORTH:
        found.append(f'not reliably faster than fp32 here ({_speed(row)} times its speed)' +
                     ': the device only emulates it' * (row['support'] == 'emulated'))
    return found


def _speed(row: pd.Series) -> str:
    return '{speed-up:.2f}, {speed-up q1:.2f} to {speed-up q3:.2f}'.format(**row) if row['turns'] else '-'


# -- the plot

def _color(name: str) -> str: return PRECISION_COLORS[name.removesuffix(' fp16')]


def _smooth(values: list[float]) -> pd.Series: # From step 1 on; nan where a loss is not finite
    losses = pd.Series(values, index=range(1, len(values) + 1), dtype=float)
    return losses.ewm(alpha=.2).mean().where(np.isfinite(losses))


def _draw_curves(ax: Any, losses: dict[str, list[float]], seed_losses: list[list[float]]) -> None:
    if seed_losses:
        seeds = pd.DataFrame([_smooth(values) for values in [losses['fp32'], *seed_losses]])
        ax.fill_between(seeds.columns, seeds.min(), seeds.max(), color='#d8dee9', lw=0,
                        label=f'fp32, range of {len(seeds)} seeds')
    for (name, values), style in zip(losses.items(), ('-', '--', ':', '-.', (0, (1, 3)))):
        if values: ax.plot(_smooth(values), linestyle=style, color=_color(name), lw=2, label=name)
    ax.set(title='Training loss (smoothed)', xlabel='step', ylabel='loss')
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(loc='upper center', bbox_to_anchor=(.5, -.22), ncols=2, frameon=False, fontsize=8)


def _draw_speeds(ax: Any, table: pd.DataFrame, recommended: str) -> None:
    speed, low, high = (table[f'speed-up{q}'].fillna(0) for q in ('', ' q1', ' q3'))
    names = [f'{name}\n({s})' if s != 'native' else name for name, s in table['support'].items()]
    bars = ax.barh(names, speed, xerr=[speed - low, high - speed], capsize=3, color=list(map(_color, table.index)))
    ax.bar_label(bars, [f'{s:.2f}x' if s else 'not measured' for s in speed], padding=6)
    ax.axvline(1, color='black', lw=.8, ls=':', zorder=0)
    ax.set(title=f'Speed; recommended: {recommended}', xlabel='steps per second, fp32 = 1')
    ax.margins(x=.4)
