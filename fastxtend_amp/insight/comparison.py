"The result of a comparison: its table, the recommendation and how sure it is, and the plot."
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import Any

import numpy as np
import pandas as pd
from fastai.learner import Learner

from .precisions import PrecisionChoice, color_of, use_choice
from .shown import Shown

__all__ = ['FEWEST_TURNS', 'PrecisionComparison', 'Tolerance', 'pays', 'recommend', 'speed_up']

_WORTH = 1.05           # times fp32's speed: a mode above it pays
FEWEST_TURNS = 6       # that an interval takes
_WIDTH = 2.2            # of the interval; one that is looked at once would have 1.57
_MOVES = .1             # times as far as fp32's weights: a mode whose weights move less far does not train
# One-sided 95 % prediction interval of one more training, by the number of trainings: t * sqrt(1 + 1 / n).
_INTERVAL = {2: 7.7, 3: 3.4}     # 2.6 for four or more


@dataclass(repr=False, eq=False)
class PrecisionComparison(Shown):
    """Precisions side by side on one learner; the result of `Learner.compare_precision`.

    | column of `table` | meaning |
    |---|---|
    | `support` | how the device runs the mode: 'native', 'emulated', 'unsupported'; 'failed' after an error |
    | `steps`, `turns` | training steps, and timed turns in which they were taken beside fp32's |
    | `ms per step` | fp32's median over the turns; for other modes, that divided by the speed-up |
    | `speed-up`, `speed-up low`, `speed-up high` | times fp32's speed: median over the turns, and its 95 % interval |
    | `loss`, `loss difference` | mean of some steps, and its distance from fp32's; nan for a mode that failed |
    | `skipped`, `final scale` | skipped steps, and the loss scale at the end |
    | `activations MB` | kept by autograd for a step's backward pass: inputs, activations, autocast's casts of weights |
    | `peak MB` | most that a step allocates on an accelerator, besides what was allocated before; else nan |
    | `weights moved` | distance from the weights at the start, divided by the number of steps; fp32 is 1 |
    | `compile s` | seconds of the first step of a compiled model, which compiles it; nan for others |
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
    caveats: list[str] = field(default_factory=list) # Sentences on what limits the result

    def apply(self,
        learn: Learner, # The learner that was compared, or one like it
        mode: str | None = None, # A row of the table; the recommended one if None
    ) -> Learner: # The learner
        "Have the learner train in the recommended precision, with the modules in fp32 and other arguments that it had."
        mode = mode or self.recommended
        if mode not in self.choices:
            raise ValueError(f"mode={mode!r} cannot be used: it was not compared. Take one of "
                             f"{', '.join(map(repr, self.choices))}.")
        use_choice(learn, self.choices[mode])
        return learn

    def _parts(self):
        lines = [f'Recommended: {self.recommended}. {self.reason} Next: `{self.calls[self.recommended]}`.',
                 *(f'{name}: {note}' for name, note in self.table['note'].items() if note), *self.caveats, *self.notes]
        first, *rest = (fill(line, 118, break_long_words=False, break_on_hyphens=False) for line in lines)
        hidden = ['turns', 'speed-up low', 'speed-up high', 'weights moved', 'note']
        table = self.table.drop(columns=hidden).rename_axis(None)
        table['speed-up'] = self.table.apply(_speed, axis=1)
        return [first, table.dropna(axis=1, how='all'), '\n'.join(rest)]

    def plot(self): # The two matplotlib axes
        "Draw the loss curves, with the range of fp32's seeds in grey, and the speed of each mode against fp32."
        import matplotlib.pyplot as plt
        n = len(self.table)
        _, (curves, bars) = plt.subplots(2, figsize=(6, 3.4 + .3 * n), height_ratios=[7, n], layout='constrained')
        colors = [*map(color_of, self.table.index)]
        seeds = _smooth([self.losses['fp32'], *self.seed_losses])
        curves.fill_between(seeds.index, seeds.min(axis=1), seeds.max(axis=1), color='#d8dee9', lw=0,
                            label=f'fp32, range of {len(seeds.columns)} seeds')
        _smooth(self.losses.values()).set_axis([*self.losses], axis=1).plot(
            ax=curves, style=['-', '--', ':', '-.'], color=colors, title='Training loss (smoothed)', xlabel='step',
            ylabel='loss')
        curves.legend()
        drawn = bars.barh(self.table.index, self.table['speed-up'].fillna(0), color=colors)
        bars.bar_label(drawn, self.table.apply(_speed, axis=1), padding=6)
        bars.set(title=f'Speed; recommended: {self.recommended}', xlabel='steps per second, fp32 = 1')
        bars.margins(x=.9)
        bars.invert_yaxis()
        return curves, bars


def _smooth(losses: Iterable[list[float]]) -> pd.DataFrame: # nan where a loss is not finite
    values = pd.DataFrame([*losses], dtype=float).T
    return values.ewm(alpha=.2).mean().where(np.isfinite(values))


# -- the recommendation

def speed_up(
    ratios: Sequence[float], # fp32's time over a mode's, in turns that both took one after the other
) -> tuple[float, float, float]: # nan at the ends before the sixth turn
    """Return the median of the ratios, and its interval: of the logarithms 2.2 (q3 - q1) / sqrt(n) to both sides.

    The notches of box plots, of 95 %, have 1.57: McGill, Tukey and Larsen, Variations of Box Plots, The American
    Statistician 32 (1978). That is for one look. Looked at after each turn from the sixth on, 2.2 takes a mode as fast
    as fp32 for one that pays in 2 to 10 %, by simulation (`nbs/benchmarks/choice.py`).
    """
    q1, mid, q3 = map(float, np.exp(np.quantile(np.log(ratios or [math.nan]), (.25, .5, .75))))
    few = len(ratios) < FEWEST_TURNS
    times = math.nan if few else (q3 / q1) ** (_WIDTH / math.sqrt(len(ratios)))
    return mid, mid / times, mid * times


def pays(low: float, high: float) -> bool | None:
    "Return whether a speed-up in this interval is worth while; None if it is not decided."
    return True if low > _WORTH else False if high <= _WORTH else None


class Tolerance:
    """The distance by which the loss of another mode may be above fp32's.

    It is the largest of three: the distance that one more training of fp32 could have, 1 % of the loss, but no more
    than half of the range of fp32's losses, and a thousandth of the way from the first step's loss to it. Where fp32
    was trained once, a wide margin stands for the first: a tenth of the loss, no more than half of that range either,
    or two standard deviations of its last steps.
    """
    def __init__(self,
        losses: Sequence[float], # fp32's, of each step
        seeds: Sequence[float], # The mean of the last ones in trainings with other seeds
        n_last: int, # How many are the last ones
    ):
        last, n = losses[-n_last:], 1 + len(seeds)
        self.loss = float(np.mean(last))
        half_way = np.ptp(losses) / 2 if len(losses) > n_last else math.inf   # a loss may have any constant in it
        found: dict[str, Any] = {
            "1 % of fp32's": min(abs(self.loss) / 100, half_way),
            "a thousandth of the way from fp32's first loss to its last": abs(losses[0] - self.loss) / 1000}
        if seeds:
            found[f'the spread of {n} fp32 trainings'] = _INTERVAL.get(n, 2.6) * np.std([self.loss, *seeds], ddof=1)
        else: found['a wide margin, as fp32 was trained once'] = max(min(abs(self.loss) / 10, half_way),
                                                                         2 * np.std(last))
        self.value, self.why = max((float(value), why) for why, value in found.items())


def recommend(
    table: pd.DataFrame, # As `PrecisionComparison.table`
    tolerance: Tolerance,
    seconds: float = 60., # That it took, for the advice to take more
) -> tuple[str, str]: # The mode, and why
    """Return one mode: the fastest that pays and trains as fp32 does.

    It pays if the interval of its speed-up is above 1.05. It trains as fp32 does if the mean of the last losses is
    finite and above fp32's by no more than the tolerance, no more than half of its steps were skipped, and its weights
    moved. Of two
    equally fast (5 %) bf16 is taken, which needs no loss scaling.
    """
    if not math.isfinite(tolerance.loss):
        return 'fp32', "fp32's own loss is not finite: look at the data, the loss function and the learning rate first."
    against = {name: _against(row, tolerance, seconds) for name, row in table.drop('fp32').iterrows()}
    bad = '; '.join(f"{name}: {', '.join(found)}" for name, found in against.items() if found)
    speed = table['speed-up'][[name for name, found in against.items() if not found]]
    if speed.empty: return 'fp32', f"{bad or 'Nothing else was compared'}."
    best = 'bf16' if speed.get('bf16', 0) * 1.05 >= speed.max() else speed.idxmax()
    why = f"{_speed(table.loc[best])} times fp32's speed, and its loss is within {tolerance.why}"
    return best, f"{why}{bad and f' ({bad})'}."


def _against(row: pd.Series, tolerance: Tolerance, seconds: float) -> list[str]:
    "Return what speaks against a mode."
    if row['support'] in ('unsupported', 'failed'): return ['does not run here']
    found = []
    if not math.isfinite(row['loss']): found.append('its loss is not finite')
    elif row['skipped'] > row['steps'] / 2:                      # a skipped step takes less time, and leaves the loss
        found.append(f"it skipped {row['skipped']} of {row['steps']} steps, so its loss and speed say little: "
                     'compare with a larger `n_steps`, or see what `learn.precision_report()` finds')
    elif row.get('weights moved', 1) < _MOVES:
        found.append(f"its weights moved {row['weights moved']:.2g} times as far as in fp32: its gradients vanish")
    elif row['loss difference'] > tolerance.value:
        found.append(f"its loss is {row['loss difference']:.2g} above fp32's, more than {tolerance.value:.2g} "
                     f'({tolerance.why})')
    speed, paid = row['speed-up'], pays(row['speed-up low'], row['speed-up high'])
    if row['turns'] < FEWEST_TURNS:
        found.append(f"it was timed in {row['turns']} of the {FEWEST_TURNS} turns that an interval takes: raise "
                     f"`max_seconds` to {math.ceil(seconds * (FEWEST_TURNS + 2) / (row['turns'] + 1))}")
    elif paid is None:
        more = min(99, math.ceil(((row['speed-up high'] - speed) / max(abs(speed - _WORTH), 1e-9)) ** 2))
        found.append(f"undecided: {_speed(row)} times fp32's speed; about {more} times the time could show whether it "
                     f'is above {_WORTH}: `max_seconds={math.ceil(more * seconds)}`')
    elif not paid:
        found.append(f"{_speed(row)} times fp32's speed, below {_WORTH}" +
                     ': the device only emulates it' * (row['support'] == 'emulated'))
    return found


def _speed(row: pd.Series) -> str:
    said = '{speed-up:.2f}' if row['turns'] else '-'
    if row['turns'] >= FEWEST_TURNS: said += ' ({speed-up low:.2f} to {speed-up high:.2f})'
    return said.format(**row)
