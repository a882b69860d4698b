"The result of a comparison: table, recommendation and plot."
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from fastai.learner import Learner

from ..messages import check_argument
from ..precisions import Precision
from .candidates import switch
from .shown import Shown

_SPEED = ['speed-up', 'speed-up low', 'speed-up high']
_WORTH = 1.05           # smallest speed-up that is recommended
FEWEST_ROUNDS = 6      # for an interval
_WIDTH = 2.2            # of the interval; 1.57 for a single look
COMPILE = '; learn.model.compile()'    # the end of a call that also compiles
_MOVES = .1             # of the distance in fp32: a precision whose weights move less does not train
# One-sided 95% prediction interval for one more training, by the number n of trainings: t * sqrt(1 + 1 / n).
_INTERVAL = {2: 7.7, 3: 3.4}     # 2.6 for four or more


@dataclass(repr=False, eq=False)
class PrecisionComparison(Shown):
    """The result of `Learner.compare_precision`.

    In `table`, nan means that there is no such figure, as of a precision that ended early.

    | column of `table` | meaning |
    |---|---|
    | `support` | how the device runs the precision: 'native' or 'emulated'; 'failed' after an error |
    | `steps`, `rounds` | number of training steps, and of the rounds in which they were timed alongside fp32 |
    | `ms per step` | median time in fp32; for other precisions, that time divided by the speed-up |
    | `speed-up`, `speed-up low`, `speed-up high` | speed relative to fp32: median of the rounds, 95% interval |
    | `loss`, `loss difference` | mean of the last steps, and its difference from fp32 |
    | `skipped` | number of skipped steps |
    | `final scale` | the loss scale at the end |
    | `activations MB` | what autograd keeps for the backward pass: inputs, activations, casts of weights |
    | `peak MB` | the most that a step allocates on an accelerator; nan on a CPU |
    | `weights moved` | distance from the initial to the final weights per step, relative to fp32 |
    | `compile s` | seconds of the first step of a compiled model, which compiles it; nan for others |
    | `note` | why a precision did not run, or was dropped from the rounds |
    """
    table: pd.DataFrame # One row per precision
    losses: dict[str, list[float]] # The loss of each step, by precision
    seed_losses: list[list[float]] # The loss of each step, by additional fp32 training
    recommended: str # The precision to use
    reason: str # Why, and how certain that is
    calls: dict[str, str] # The call that selects each precision
    notes: list[str] # How the comparison was made, and what limits it
    precisions: dict[str, Precision] # What `apply` sets, by row of the table

    def apply(self,
        learn: Learner, # The learner that was compared, or one like it
        precision: str | None = None, # A row of the table; the recommended one if None
    ) -> Learner: # The learner
        "Switch the learner to the recommended precision. `fp32_modules` and its other arguments are kept."
        row = precision or self.recommended
        check_argument('precision', row, self.precisions.__contains__, f'one of {[*self.precisions]}')
        new = self.precisions[row]
        if new.kind is Precision: learn.to_fp32()
        else: switch(learn, new)
        if self.calls[row].endswith(COMPILE): learn.model.compile()
        return learn

    def _parts(self):
        yield f'Recommended: {self.recommended}. {self.reason}\nNext: `{self.calls[self.recommended]}`'
        table = self.table.drop(columns=['rounds', 'speed-up low', 'speed-up high', 'weights moved', 'note'])
        table['speed-up'] = [shown_speed(*row) for row in self.table[_SPEED].values]
        yield table.dropna(axis=1, how='all')
        why = [f'{name}: {note}' for name, note in self.table['note'].items() if note]
        yield '\n'.join(why + self.notes)

    def plot(self): # The two matplotlib axes
        "Plot the speed of each precision and all loss curves, including those of fp32 with other seeds."
        import matplotlib.pyplot as plt
        figure, (curves, bars) = plt.subplots(2, figsize=(6, 6), layout='constrained')
        figure.get_layout_engine().set(h_pad=.12)
        colors = [precision.color for precision in self.precisions.values()]
        # '_' hides all but one from the legend.
        seeds = {'_' * i + 'fp32, other seeds': losses for i, losses in enumerate(self.seed_losses)}
        values = pd.DataFrame.from_dict(seeds | self.losses, orient='index', dtype=float).T
        smooth = values.ewm(alpha=.2).mean().where(np.isfinite(values))      # nan where a loss is not finite
        smooth.plot(ax=curves, color=['#b4bdcc'] * len(seeds) + colors, xlabel='step', ylabel='loss',
                    title='Training loss (smoothed)')
        curves.get_lines()[len(seeds)].set_linewidth(4)          # fp32, seen under the others
        curves.xaxis.get_major_locator().set_params(integer=True)
        curves.legend()
        self.table['speed-up'].plot.barh(ax=bars, color=colors, xlabel='steps per second, fp32 = 1', ylabel='',
                                         title=f'Recommended: {self.recommended}')
        bars.bar_label(bars.containers[0], fmt='{:.2f}', padding=6)
        bars.margins(x=.15)
        bars.invert_yaxis()
        return curves, bars


# -- the recommendation

def speed_up(
    ratios: Sequence[float], # Time in fp32 divided by that in the other precision, by round
) -> tuple[float, float, float]: # The ends are nan before the sixth round
    """Return the median of the ratios and its interval, 2.2 (q3 - q1) / sqrt(n) to both sides of the logarithms.

    The 95% notches of box plots have 1.57, for a single look: McGill, Tukey and Larsen, Variations of Box Plots, The
    American Statistician 32 (1978). With a look after each round from the sixth on, 2.2 accepts a precision that is as
    fast as fp32 in 2 to 10% of simulated comparisons (`nbs/benchmarks/choice.py`).
    """
    n = len(ratios)
    logs = np.log(ratios or [math.nan])
    q1, mid, q3 = np.exp(np.quantile(logs, (.25, .5, .75)))
    times = (q3 / q1) ** (_WIDTH / math.sqrt(n)) if n >= FEWEST_ROUNDS else math.nan
    return mid, mid / times, mid * times


def pays(low: float, high: float, worth: float = _WORTH) -> bool | None:
    "Return whether a speed-up in this interval pays; None if that is undecided."
    return True if low > worth else False if high <= worth else None


def tolerance(
    losses: Sequence[float], # Of each step in fp32
    seeds: Sequence[float], # Mean of the last steps in runs with other seeds
    n_last: int, # Number of last steps
) -> tuple[float, str]: # It, and what it is
    """Return the amount by which the loss of another precision may lie above the fp32 loss.

    It is the largest of three: what one more fp32 training could differ by; 1% of the loss, but at most half of the
    range of the fp32 losses; and a thousandth of the distance from the first loss to the last. If fp32 was trained only
    once, the first is a tenth of the loss, at most half of that range, or two standard deviations of the last steps.
    """
    last, n = losses[-n_last:], 1 + len(seeds)
    loss = float(np.mean(last))
    half_way = float(np.ptp(losses)) / 2 if len(losses) > n_last else math.inf      # a loss may have any constant in it
    if seeds:
        spread = _INTERVAL.get(n, 2.6) * float(np.std([loss, *seeds], ddof=1))
        why = f'the spread of {n} fp32 training runs'
    else:
        spread = max(min(abs(loss) / 10, half_way), 2 * float(np.std(last)))
        why = 'a wide tolerance (fp32 was trained only once)'
    return max((spread, why), (min(abs(loss) / 100, half_way), '1% of the fp32 loss'),
               (abs(losses[0] - loss) / 1000, 'a thousandth of the distance from the first fp32 loss to the last'))


def recommend(
    table: pd.DataFrame, # As `PrecisionComparison.table`
    tolerated: tuple[float, str], # What `tolerance` returns
    seconds: float = 60., # Time that was spent, for advice on more
) -> tuple[str, str]: # The precision, and why
    """Return the fastest precision that pays and whose loss matches fp32.

    It pays if the interval of its speed-up lies above 1.05. Its loss matches fp32 if the mean of the last steps is
    finite and within the tolerance, at most half of the steps were skipped, and the weights moved. If bf16, by itself
    or with kinds of modules in fp32, is within 5% of the fastest it wins, as it needs no loss scaling.
    """
    if not math.isfinite(table['loss']['fp32']):
        return 'fp32', 'The fp32 loss is not finite: check the data, the loss function and the learning rate.'
    if math.isnan(table['weights moved']['fp32']):
        return 'fp32', ('The weights did not move in fp32: use a larger `n_steps`, or check the learning rate, '
                        'whether batches have targets, and whether `splitter` returns parameters of the model.')
    against = {name: _against(row, tolerated, seconds) for name, row in table.drop('fp32').iterrows()}
    bad = ' '.join(f'{name}{found}.' for name, found in against.items() if found)
    speed = table['speed-up'][[name for name, found in against.items() if not found]]
    if speed.empty: return 'fp32', bad or 'Nothing else was compared.'
    unscaled = speed[speed.index.str.fullmatch('bf16(, .*)?')]   # with kinds of modules in fp32
    best = (unscaled if unscaled.max() * 1.05 >= speed.max() else speed).idxmax()
    return best, f'Speed-up {shown_speed(*table.loc[best, _SPEED])}; its loss is within {tolerated[1]}. {bad}'.rstrip()


def _against(row, tolerated, seconds):
    "Return what speaks against a precision, to follow its name; '' if nothing does."
    if row['support'] == 'failed': return ': does not run'
    n, rounds, skipped, moved, more = row[['steps', 'rounds', 'skipped', 'weights moved', 'loss difference']]
    speed, low, high = row[_SPEED]
    slow = f': speed-up {shown_speed(speed, low, high)}, below {_WORTH}'
    if row['note']: return slow                                  # it was dropped
    if not math.isfinite(row['loss']): return ': its loss is not finite'
    if skipped > n / 2:                                          # a skipped step is faster, and keeps the loss
        return (f': it skipped {skipped:,.0f} of {n:,} steps, so its loss and speed mean little: use a larger '
                '`n_steps`, or call `learn.precision_report()`')
    if moved < _MOVES:
        return f': its weights moved only {moved:.0%} of the distance in fp32: its gradients vanish'
    if more > tolerated[0]:
        return ': its loss is {:.2g} above that of fp32; the limit is {:.2g}, {}'.format(more, *tolerated)
    if (paid := pays(low, high)) is not None: return '' if paid else slow
    factor = min(10, ((high - speed) / max(abs(speed - _WORTH), 1e-9)) ** 2)
    if rounds < FEWEST_ROUNDS: factor = (FEWEST_ROUNDS + 2) / (rounds + 1)
    minutes = math.ceil(factor * seconds / 60)
    looks = f'{speed:.2f}x faster' if speed > 1 else f'slower ({speed:.2f}x)'
    interval = 'unknown' if math.isnan(low) else f'{low:.2f} to {high:.2f}'
    return (f' looks {looks}, but this is not certain (interval: {interval}). Measure for {minutes} '
            f"minute{'s' * (minutes > 1)} to decide")


def shown_speed(speed: float, low: float, high: float) -> str: # '1.16 (1.02 to 1.31)'; '-' for what is not known
    "Return a speed-up and its interval as text."
    if math.isnan(low): return '-' if math.isnan(speed) else f'{speed:.2f}'
    return f'{speed:.2f} ({low:.2f} to {high:.2f})'
