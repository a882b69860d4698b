"The speed-up of one precision over another, with its interval, from rounds in which both trained in turn."
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

WORTH = 1.05            # smallest speed-up that is recommended
FEWEST_ROUNDS = 6       # for an interval
COLUMNS = ['speed-up', 'speed-up low', 'speed-up high']          # of a table that holds a `Speed`
_HOPELESS = .5          # speed-up after which one round is enough
_WIDTH = 2.2            # of the interval; 1.57 for a single look


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

        The 95% notches of box plots have 1.57, for a single look (source: see `compare_precision`). With a look after
        each round from the sixth on, 2.2 accepts a precision that is as fast as fp32 in 2 to 10% of simulated
        comparisons (`nbs/benchmarks/choice.py`).
        """
        n = len(ratios)
        logs = np.log(ratios or [math.nan])
        q1, mid, q3 = np.exp(np.quantile(logs, (.25, .5, .75)))
        if n < FEWEST_ROUNDS: return cls(mid)
        factor = (q3 / q1) ** (_WIDTH / math.sqrt(n))
        return cls(mid, mid / factor, mid * factor)

    @property
    def pays(self) -> bool: return self.low > WORTH
    @property
    def is_undecided(self) -> bool: return not (self.pays or self.high <= WORTH)
    @property
    def is_slower(self) -> bool: return self.high < 1 or self.mid < _HOPELESS

    def __str__(self): # '1.16 (1.02 to 1.31)'; '-' for what is not known
        if math.isnan(self.low): return '-' if math.isnan(self.mid) else f'{self.mid:.2f}'
        return f'{self.mid:.2f} ({self.low:.2f} to {self.high:.2f})'
