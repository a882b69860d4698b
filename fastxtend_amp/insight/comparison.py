"The result of a comparison: table, recommendation and plot."
import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from fastai.learner import Learner

from ..messages import check_argument
from ..precisions import PRECISIONS, Precision
from .calls import Call
from .display import Shown
from .speed import COLUMNS, FEWEST_ROUNDS, WORTH, Speed

_MOVES = .1             # of the distance in fp32: a precision whose weights move less does not train


@dataclass(repr=False, eq=False)
class PrecisionComparison(Shown):
    """The result of `Learner.compare_precision`.

    In `table`, nan means no value, for example for a precision that was dropped early.

    | column of `table` | meaning |
    |---|---|
    | `support` | how the device runs the precision: 'native' or 'emulated'; 'failed' after an error |
    | `steps`, `rounds` | number of training steps, and of the rounds in which they were timed alongside fp32 |
    | `ms per step` | median time in fp32; for other precisions, that time divided by the speed-up |
    | `speed-up`, `speed-up low`, `speed-up high` | speed relative to fp32: median of the rounds, 95% interval |
    | `loss`, `loss difference` | mean of the last fifth of the steps, and its difference from fp32 |
    | `skipped`, `final scale` | number of skipped steps, and the loss scale at the end |
    | `activations MB` | what autograd keeps for the backward pass: inputs, activations, casts of weights |
    | `peak MB` | the most that a step allocates on an accelerator |
    | `weights moved` | distance from the initial to the final weights per step, relative to fp32 |
    | `compile s` | seconds of the first step of a compiled model |
    | `note` | why a precision did not run, or was dropped |
    """
    table: pd.DataFrame # One row per precision, memory format and choice of layers in fp32
    losses: dict[str, list[float]] # The loss of each step, by precision
    seed_losses: list[list[float]] # The loss of each step, by additional fp32 training
    recommended: str # The precision to use
    reason: str # Why, and how certain that is
    notes: list[str] # How the comparison was made, and what limits it
    rows: dict[str, Call] # What `apply` sets: `precision`, `channels_last` and `compiled`

    @property
    def calls(self) -> dict[str, str]:
        "The call that selects each precision."
        return {name: str(row) for name, row in self.rows.items()}

    def apply(self,
        learn: Learner, # The learner that was compared, or one like it
        precision: str | None = None, # A row of the table; the recommended one if None
    ) -> Learner: # The learner
        "Switch the learner to the recommended precision; its arguments, such as `fp32_modules`, are kept."
        row = precision or self.recommended
        check_argument('precision', row, self.rows.__contains__, f'one of {[*self.rows]}')
        self.rows[row].apply(learn)
        return learn

    def _parts(self):
        yield f'Recommended: {self.recommended}. {self.reason}\nNext: `{self.calls[self.recommended]}`'
        table = self.table.drop(columns=['rounds', *COLUMNS[1:], 'weights moved', 'note'])
        table['speed-up'] = [str(Speed(*row)) for row in self.table[[*COLUMNS]].values]
        yield table.dropna(axis=1, how='all')
        why = [f'{name}: {note}' for name, note in self.table['note'].items() if note]
        yield '\n'.join(why + self.notes)

    def plot(self): # The two matplotlib axes
        "Plot the speed of each precision, and all loss curves."
        import matplotlib.pyplot as plt
        _, (curves, bars) = plt.subplots(2, figsize=(6, 6), layout='constrained')
        colors = [row.precision.color for row in self.rows.values()]
        # '_' hides all but one from the legend.
        seeds = {'_' * i + 'fp32, other seeds': losses for i, losses in enumerate(self.seed_losses)}
        values = pd.DataFrame.from_dict(seeds | self.losses, orient='index', dtype=float).T
        smooth = values.ewm(alpha=.2).mean().where(np.isfinite(values))      # nan where a loss is not finite
        smooth.plot(ax=curves, color=['#b4bdcc'] * len(seeds) + colors, xlabel='step', ylabel='loss',
                    title='Training loss (smoothed)')
        curves.get_lines()[len(seeds)].set_linewidth(4)          # fp32, seen under the others
        curves.legend()
        self.table['speed-up'].plot.barh(ax=bars, color=colors, xlabel='steps per second, fp32 = 1', ylabel='',
                                         title=f'Recommended: {self.recommended}')
        bars.bar_label(bars.containers[0], fmt='{:.2f}', padding=6)
        bars.margins(x=.15)
        bars.invert_yaxis()
        return curves, bars


# -- the recommendation

def recommend(
    table: pd.DataFrame, # As `PrecisionComparison.table`
    tolerated: tuple[float, str], # What `tolerance` returns
    seconds: float = 60., # Time that was spent, for advice on more; nan if `n_steps` is too small for any interval
) -> tuple[str, str]: # The row, and why
    """Return the fastest row that pays and whose loss matches fp32.

    It pays if the interval of its speed-up lies above 1.05. Its loss matches fp32 if the mean of the last steps is
    finite and within the tolerance, at most half of the steps were skipped, and the weights moved. Within 5% of the
    fastest, a row that needs no loss scaling wins, and of those the one that changes least.
    """
    if not math.isfinite(table['loss']['fp32']):
        return 'fp32', 'The fp32 loss is not finite: check the data, the loss function and the learning rate.'
    if math.isnan(table['weights moved']['fp32']):
        return 'fp32', ('The weights did not move in fp32: use a larger `n_steps`, or check the learning rate, '
                        'whether batches have targets, and whether `splitter` returns parameters of the model.')
    others = table.drop('fp32')
    speeds = {name: Speed(*speed) for name, *speed in others[[*COLUMNS]].itertuples()}
    against = {name: _trains_worse(row, tolerated) for name, row in others.iterrows()}
    stays = [name for name, note in others['note'].items() if not (note or against[name])]
    good = {name: speeds[name].mid for name in stays if speeds[name].pays}
    close = [name for name, speed in good.items() if speed * WORTH >= max(good.values())]
    def order(name):
        kind = PRECISIONS.get(name.split(',')[0].split()[0], Precision)
        return kind.scales_loss, name.count(' '), -good[name]    # a variant has more words in its name
    best = min(close, key=order, default='fp32')
    fastest = good.get(best, 1.)
    said = [f'{name}{why}.' for name, row in others.iterrows()
            if (why := against[name] or _too_slow(speeds[name], row, seconds, fastest))]
    if best != 'fp32': said[:0] = [f'Speed-up {speeds[best]}; its loss is within {tolerated[1]}.']
    return best, ' '.join(said) or 'Nothing else was compared.'


def _trains_worse(row, tolerated):
    "Return why a row cannot be recommended whatever its speed, to follow its name; '' if nothing speaks against it."
    if row['support'] == 'failed': return ': does not run'
    if row['note']: return ''                                    # it was dropped, without a loss
    n, skipped, moved, more = row[['steps', 'skipped', 'weights moved', 'loss difference']]
    if not math.isfinite(row['loss']): return ': its loss is not finite'
    if skipped > n / 2:                                          # a skipped step is faster, and keeps the loss
        return (f': it skipped {skipped:,.0f} of {n:,} steps, so its loss and speed mean little: use a larger '
                '`n_steps`, or call `learn.precision_report()`')
    if moved < _MOVES:
        return f': its weights moved only {moved:.0%} of the distance in fp32: its gradients vanish'
    if more > tolerated[0]:
        return ': its loss is {:.2g} above that of fp32; the limit is {:.2g}, {}'.format(more, *tolerated)
    return ''


def _too_slow(speed, row, seconds, fastest):
    "Return what is to be said of a speed-up, to follow the name of its row; '' if it pays."
    if speed.pays: return ''
    if speed.loses or row['note']: return f': speed-up {speed}, below {WORTH}' if speed.mid <= WORTH else ''
    if fastest > 1 and speed.mid <= fastest * WORTH: return f': speed-up {speed}, not faster'
    said = f': speed-up {speed}, which is not certain.'
    if math.isnan(seconds): return f'{said} Use `n_steps={10 * FEWEST_ROUNDS}` to decide'
    return f'{said} Use `max_seconds={60 * math.ceil(4 * seconds / 60)}` to decide'     # it halves the interval
