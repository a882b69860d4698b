"The recommendation of a comparison: whether a precision is clearly faster, and trains as well as fp32."
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from .display import some
from .speed import COLUMNS, WORTH, Speed

# One-sided 95% prediction interval for one more training, by the number n of trainings: t * sqrt(1 + 1 / n).
_INTERVAL = {2: 7.7, 3: 3.4}     # 2.6 for four or more
_LEAST_MOVED = .1       # of the distance in fp32: a precision whose weights move less does not train


# -- does it train as well

def last_fifth(n: int) -> int:
    "Return how many of `n` steps count for the loss."
    return max(1, n // 5)


def tolerance(
    losses: Sequence[float], # Of each step in fp32
    seeds: Sequence[float], # Mean of the last fifth in runs with other seeds; NaN and inf do not count
) -> tuple[float, str]: # It, and what it is
    """Return the amount by which the loss of another precision may lie above the fp32 loss.

    It is the largest of three: what one more fp32 training could differ by; 1% of the loss, but at most half of the
    range of the fp32 losses; and a thousandth of the distance from the first loss to the last. If fp32 was trained only
    once, the first is a tenth of the loss, at most half of that range, or two standard deviations of the last steps.
    """
    seeds = [*filter(math.isfinite, seeds)]
    last, n = losses[-last_fifth(len(losses)):], 1 + len(seeds)
    loss = float(np.mean(last))
    half_range = float(np.ptp(losses)) / 2 if len(losses) > 1 else math.inf   # a loss may have any constant in it
    if seeds:
        spread = _INTERVAL.get(n, 2.6) * float(np.std([loss, *seeds], ddof=1))
        why = f'the spread of {n} fp32 training runs'
    else:
        spread = max(min(abs(loss) / 10, half_range), 2 * float(np.std(last)))
        why = 'a wide tolerance (fp32 was trained only once)'
    return max((spread, why), (min(abs(loss) / 100, half_range), '1% of the fp32 loss'),
               (abs(losses[0] - loss) / 1000, 'a thousandth of the distance from the first fp32 loss to the last'))


# -- the recommendation

def recommend(
    table: pd.DataFrame, # As `PrecisionComparison.table`
    tolerated: tuple[float, str], # What `tolerance` returns
    burdens: Mapping[str, tuple[bool, int]], # By row: whether it scales the loss, and how many `Choice.changes`
    seconds: float = 60., # The time limit, or the time spent if that was longer
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
    dropped = [*table.index[table['support'] == 'dropped']]
    others = table.drop(['fp32', *dropped])
    speeds = {name: Speed(*speed) for name, *speed in others[COLUMNS].itertuples()}
    faults = {name: _fault(row, tolerated) for name, row in others.iterrows()}
    good = {name: speed.mid for name, speed in speeds.items() if speed.pays and not faults[name]}
    close = [name for name, speed in good.items() if speed * WORTH >= max(good.values())]

    best = min(close, key=lambda name: (burdens[name], -good[name]), default='fp32')
    sentences = [f'Speed-up {speeds[best]}; its loss is within {tolerated[1]}.'] if good else []
    for name, fault in faults.items():
        why = fault or _slowness(speeds[name], best, good.get(best, 1.), seconds)
        if why: sentences.append(f'{name}{why}.')
    if dropped: sentences.append(f'Dropped early: {some(map(repr, dropped))}.')
    return best, ' '.join(sentences) or 'Nothing else was compared.'


def _fault(row, tolerated):
    "Return why a row cannot be recommended whatever its speed, to follow its name; '' if nothing speaks against it."
    if row['support'] == 'failed': return f" does not run ({row['note']})"
    n, skipped, moved, more = row[['steps', 'skipped', 'weights moved', 'loss difference']]
    if not math.isfinite(row['loss']): return ': its loss is not finite'
    if skipped > n / 2:                                          # a skipped step is faster, and keeps the loss
        return (f': it skipped {skipped:,.0f} of {n:,} steps, so its loss and speed cannot be compared: use a larger '
                '`n_steps`, or call `learn.precision_report()`')
    if moved < _LEAST_MOVED:
        return f': its weights moved only {moved:.0%} of the distance in fp32: its gradients vanish'
    if more > tolerated[0]:
        return ': its loss is {:.2g} above that of fp32; the limit is {:.2g}, {}'.format(more, *tolerated)
    return ''


def _slowness(speed, best, fastest, seconds):
    "Return why another row is the best one, to follow the name of this one; '' if it pays, but less."
    if speed.pays: return f': speed-up {speed}, within 5% of {best}' if speed.mid > fastest else ''
    if speed.high <= fastest * WORTH: return f': speed-up {speed}, not 5% faster than {best}'
    more = 60 * math.ceil(4 * seconds / 60)                      # it halves the interval
    return f': speed-up {speed}, not certain yet. Use `max_seconds={more}` to decide'
