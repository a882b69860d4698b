"A progress bar with a time limit, and the checks of numbers."
from __future__ import annotations

import time
from numbers import Integral
from typing import Any

from fastai.learner import Learner
from fastprogress.fastprogress import progress_bar

from ..scaling import is_number

__all__ = ['Progress', 'TimeIsUp', 'check_above_0', 'check_count']


class TimeIsUp(Exception):
    "The time limit is over."


class Progress:
    """fastai's progress bar, shown from when this is built, and a limit in seconds from then on.

    Nothing is shown inside `learn.no_bar()` and for learners without fastai's `ProgressCallback`.
    """
    def __init__(self, learn: Learner, total: int, max_seconds: float):
        self.max_seconds, self.end, self.bar = max_seconds, time.monotonic() + max_seconds, None
        if not (hasattr(learn, 'progress') and learn.create_mbar): return
        self.bar = progress_bar(range(total), leave=False)
        self.bar.comment = f'at most {max_seconds:.0f} s'
        self.bar.update(0)

    @property
    def left(self) -> float: return self.end - time.monotonic()

    def update(self, done: int) -> None:
        if self.bar is not None: self.bar.update(done)

    def close(self) -> None:
        "Take the bar away."
        if self.bar is not None: self.bar.on_iter_end()


def check_count(
    name: str, # The argument's name
    value: Any,
    at_least: int,
) -> None:
    "Raise a `ValueError` unless `value` is an integer of `at_least` or more."
    if not is_number(value, Integral) or value < at_least:
        raise ValueError(f'{name}={value!r} cannot be used: {name} must be an integer of at least {at_least}.')


def check_above_0(
    name: str, # The argument's name
    value: Any,
    example: str,
) -> None:
    "Raise a `ValueError` unless `value` is a number above 0."
    if not is_number(value) or not value > 0:
        raise ValueError(f'{name}={value!r} cannot be used: {name} must be a number above 0, such as {example}.')
