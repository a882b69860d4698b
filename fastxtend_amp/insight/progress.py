"A progress bar and a time limit for report and comparison."
from __future__ import annotations

import time

from fastai.learner import Learner
from fastprogress.fastprogress import progress_bar

__all__ = ['Progress', 'TimeIsUp']


class TimeIsUp(BaseException):
    "The time limit is over. Not an `Exception`, so that no model catches it."


class Progress:
    """fastai's progress bar, shown from when this is built, and a limit in seconds from then on.

    Nothing is shown inside `learn.no_bar()` and for learners without fastai's `ProgressCallback`.
    """
    def __init__(self, learn: Learner, max_seconds: float):
        self.max_seconds, self.end = max_seconds, time.monotonic() + max_seconds
        self.done, self.bar = 0, None
        if not (hasattr(learn, 'progress') and learn.create_mbar): return
        self.bar = progress_bar(range(1), leave=False)
        self.bar.comment = f'at most {max_seconds:.0f} s'
        self.bar.update(0)

    @property
    def left(self) -> float: return self.end - time.monotonic()

    def expect(self, ticks: int) -> None:
        "Set how many more ticks are to come."
        if self.bar is not None: self.bar.total = max(1, self.done + ticks)

    def tick(self) -> None:
        "Show that one more step is done."
        self.done += 1
        if self.bar is not None: self.bar.update(min(self.done, self.bar.total))

    def tick_in_time(self) -> None:
        "Show that one more module is done; raise `TimeIsUp` when the limit is over."
        self.tick()
        if self.left < 0: raise TimeIsUp

    def close(self) -> None:
        "Take the bar away."
        if self.bar is not None: self.bar.on_iter_end()
