"""The parts of fastai's loop: what a precision opens in one is closed when it ends or fails.

fastai runs each part of its loop through `Learner._with_events`, which importing this file replaces. The precision
callback lists the parts that are open, from the outermost to the innermost, and enters its contexts in the innermost.
At the end of the outermost part the callback's fit is closed, unless it is a single batch, and autocast is restored.
A learner without a precision runs fastai's own loop.
"""
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import lru_cache, partial
from typing import Any

from fastai.callback import fp16
from fastai.learner import Learner
from fastcore.basics import noop

from ..compat import autocast_restored
from ..devices.facts import autocast_available
from ..learners import training_device
from ..messages import warn_user
from .callback import MixedPrecision

_fastais = Learner._with_events
_PRECISIONS = (fp16.MixedPrecision, fp16.ModelToHalf, fp16.NonNativeMixedPrecision)   # fastai's and ours


def _with_events(self: Learner, f: Callable, event_type: str, ex: type[Exception],
                 final: Callable = noop) -> None:
    "Run a part of fastai's loop; what a precision opened in it is closed at its end."
    cb = precision_callback(self)
    if cb and event_type == 'step' and cb.fit: f = partial(cb.precision.step, self, f)
    run: Any = partial(_fastais, self, f, event_type, ex, final)
    is_batch = event_type == 'batch'
    if cb and cb.parts: return _run_part(self, cb.parts, is_batch, run)
    if cb: run = partial(_run_outermost, self, cb, is_batch, run)
    elif event_type == 'fit' and any(isinstance(c, fp16.MixedPrecision) for c in self.cbs): _warn_of_fastais()
    try: run()
    except BaseException as e:
        for watcher in cb.watchers if cb else (): getattr(watcher, 'after_failure', noop)(e)
        if now := precision_callback(self):                      # it may have been set or exchanged in this part
            now.close(failed=True)
            now.do_waiting()
        raise


class Part(ExitStack):
    "A part of fastai's loop that is open: what a precision enters in it is exited at its end."
    def __init__(self, is_batch: bool):
        super().__init__()
        self.is_batch = is_batch


def _run_outermost(learn: Learner, cb: MixedPrecision, is_batch: bool, run: Callable[[], None]) -> None:
    "Run the outermost part, at whose end autocast is restored."
    if not is_batch: cb.close()                                  # a user's own loop of batches has one fit for all
    cb.parts = []
    device_type = training_device(learn).type
    # A KeyboardInterrupt between two lines of `torch.autocast.__enter__` leaves state that no `__exit__` restores.
    with autocast_restored(device_type) if autocast_available(device_type) else nullcontext():
        _run_part(learn, cb.parts, is_batch, run)
    if not is_batch and (now := precision_callback(learn)): now.close()


def _run_part(learn: Learner, parts: list[Part], is_batch: bool, run: Callable[[], None]) -> None:
    "Run a part inside those that are open; when a batch has ended, do what was waiting for that."
    depth = len(parts)
    try:
        with Part(is_batch) as part:
            parts.append(part)
            run()
    finally: del parts[depth:]
    if (cb := precision_callback(learn)) and cb.waiting and not cb.in_batch: cb.do_waiting()


@lru_cache                                                       # once a process
def _warn_of_fastais() -> None:
    warn_user("This fit uses fastai's own MixedPrecision, although fastxtend_amp is imported: fastai's name was "
              'imported last.\nImport fastxtend_amp after fastai, or call `learn.to_fp16()`.')


Learner._with_events = _with_events


# -- one precision callback for a learner

def precision_callback(learn: Learner) -> Any: # A `MixedPrecision`
    "Return the learner's precision callback; None in plain fp32."
    for cb in learn.cbs:
        if isinstance(cb, MixedPrecision): return cb
    return None


def set_precision(
    learn: Learner,
    cb: MixedPrecision | None, # Built, and so checked, before anything is removed; None for fp32
) -> Learner: # The learner
    "Make `cb` the learner's only precision callback; in the middle of a batch, when that ends."
    if cb is not None: cb.precision.check(learn.model)
    old = precision_callback(learn)
    if old is None: exchange(learn, cb)
    else: old.at_batch_end(partial(exchange, learn, cb))
    return learn


def exchange(learn: Learner, cb: MixedPrecision | None) -> None:
    "Make `cb` the learner's only precision callback now, without checking the model."
    old = precision_callback(learn)
    if cb is not None and old: cb.parts = old.parts
    for kind in _PRECISIONS: learn.remove_cb(kind)
    if cb is not None: learn.add_cb(cb)
