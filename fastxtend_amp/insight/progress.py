"A progress bar for work with a time limit."
import math, sys, time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastai.learner import Learner
from fastcore.basics import noop
from fastprogress.core import IN_NOTEBOOK

_LONGEST = 3600.  # seconds that the bar of an unlimited time shows


def _is_interactive():
    return IN_NOTEBOOK or sys.stdout.isatty()                    # in a file, a bar would be one long line


@contextmanager
def progress_bar(
    learn: Learner, # No bar without fastai's `ProgressCallback`, as in `learn.no_bar()`
    seconds: float, # The time limit, which is the length of the bar
) -> Iterator[Callable]: # To be called with what is running
    "Show a progress bar as in a fit, in a terminal or notebook, until the context ends."
    if 'progress' not in vars(learn) or not _is_interactive(): return (yield noop)
    from fastai.callback.progress import progress_bar as fastais # importing it gives every new learner a bar
    bar = fastais(range(math.ceil(min(seconds, _LONGEST))), leave=False)
    def show(what):
        bar.comment, now = what, min(int(time.time() - bar.start_t), bar.total - 1)   # a full bar would end
        if now > bar.last_v: bar.update(now)                     # once a second
    bar.update(0)
    try: yield show
    finally: bar.on_iter_end()
