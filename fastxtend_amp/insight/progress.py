"A progress bar for what takes up to a number of seconds."
from __future__ import annotations

import math, time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastai.callback import progress
from fastai.learner import Learner
from fastcore.basics import noop

__all__ = ['progress_bar']


@contextmanager
def progress_bar(
    learn: Learner, # Shows none without fastai's `ProgressCallback`, as under `learn.no_bar()`
    seconds: float, # Length of the bar
) -> Iterator[Callable[[str], None]]: # To call now and then, with what is under way
    "Show a bar as a fit does, in a terminal or a notebook, until the end of the context."
    if 'progress' not in vars(learn): return (yield noop)
    start, total = time.monotonic(), math.ceil(seconds)
    bar = progress.progress_bar(range(total), leave=False)
    def show(what):
        bar.comment, now = what, min(int(time.monotonic() - start), total - 1)   # a full bar would end
        if now > bar.last_v: bar.update(now)                     # once a second
    bar.update(0)
    try: yield show
    finally: bar.on_iter_end()
