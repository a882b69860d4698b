"The statistics of a comparison: is a precision clearly faster, and does it train as well."
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

COLUMNS = 'speed-up', 'speed-up low', 'speed-up high'            # of a table that holds a `Speed`
WORTH = 1.05            # smallest speed-up that is recommended
FEWEST_ROUNDS = 6       # for an interval
_HOPELESS = .5          # speed-up after which one round is enough
_WIDTH = 2.2            # of the interval; 1.57 for a single look
# One-sided 95% prediction interval for one more training, by the number n of trainings: t * sqrt(1 + 1 / n).
_INTERVAL = {2: 7.7, 3: 3.4}     # 2.6 for four or more


class Speed(NamedTuple):
    "A speed-up and its 95% interval, whose ends are nan before the sixth round."
    mid: float
    low: float = math.nan
    high: float = math.nan

    @classmethod
    def of(cls,
        ratios: Sequence[float], # Time of the other divided by its own, by round
    ) -> Speed:
        """Return the median of the ratios and its interval, 2.2 (q3 - q1) / sqrt(n) to both sides of the logarithms.

        The 95% notches of box plots have 1.57, for a single look: McGill, Tukey and Larsen, Variations of Box Plots,
        The American Statistician 32 (1978). With a look after each round from the sixth on, 2.2 accepts a precision
        that is as fast as fp32 in 2 to 10% of simulated comparisons (`nbs/benchmarks/choice.py`).
        """
        n = len(ratios)
        logs = np.log(ratios or [math.nan])
        q1, mid, q3 = np.exp(np.quantile(logs, (.25, .5, .75)))
        if n < FEWEST_ROUNDS: return cls(mid)
        times = (q3 / q1) ** (_WIDTH / math.sqrt(n))
        return cls(mid, mid / times, mid * times)

    @property
    def pays(self) -> bool: return self.low > WORTH
    @property
    def loses(self) -> bool: return self.high <= WORTH
    @property
    def is_undecided(self) -> bool: return not (self.pays or self.loses)
    @property
    def is_slower(self) -> bool: return self.high < 1 or self.mid < _HOPELESS

    def __str__(self): # '1.16 (1.02 to 1.31)'; '-' for what is not known
        if math.isnan(self.low): return '-' if math.isnan(self.mid) else f'{self.mid:.2f}'
        return f'{self.mid:.2f} ({self.low:.2f} to {self.high:.2f})'


def last_fifth(n: int) -> int:
    "Return how many of `n` steps count for the loss."
    return max(1, n // 5)


def tolerance(
    losses: Sequence[float], # Of each step in fp32
    seeds: Sequence[float], # Mean of the last steps in runs with other seeds; NaN and inf do not count
    n_last: int, # Number of last steps
) -> tuple[float, str]: # It, and what it is
    """Return the amount by which the loss of another precision may lie above the fp32 loss.

    It is the largest of three: what one more fp32 training could differ by; 1% of the loss, but at most half of the
    range of the fp32 losses; and a thousandth of the distance from the first loss to the last. If fp32 was trained only
    once, the first is a tenth of the loss, at most half of that range, or two standard deviations of the last steps.
    """
    seeds = [*filter(math.isfinite, seeds)]
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


