"""The parts of fastai's loop: what a precision opens in one is closed when it ends or fails.

fastai runs each part of its loop through `Learner._with_events`, which importing this file replaces. The precision
callback lists the parts that are open, from the outermost to the innermost, and enters its contexts in the innermost.
At the end of the outermost part the callback's fit is closed, unless it is a single batch, and autocast is restored.
A learner without a precision runs fastai's own loop.
"""
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from fastai.callback import core, fp16
from fastai.learner import Learner
from fastcore.basics import noop

from ..compat import autocast_restored, backward_without_autocast
from ..devices.facts import autocast_available
from ..learners import training_device
from ..messages import warn_user
from .callback import MixedPrecision
from .current import precision_callback

_fastais = Learner._with_events
_CANCELS = tuple(getattr(core, name) for name in core.__all__ if name.startswith('Cancel'))


class Part:
    "An open part of fastai's loop, with the contexts of a precision. An `ExitStack` would cost five calls a batch."
    def __init__(self, in_batch: bool): # Whether it is a batch, until `after_batch`
        self.in_batch, self.entered = in_batch, list[Any]()

    def enter(self, context: Any) -> None:
        context.__enter__()
        self.entered.append(context)

    def close(self) -> None:
        while self.entered: self.entered.pop().__exit__(None, None, None)


def _with_events(self: Learner, f: Callable, event_type: str, ex: type[Exception],
                 final: Callable = noop) -> None:
    "Run a part of fastai's loop."
    cb = precision_callback(self)
    if event_type in ('backward', 'step'):                       # a precision enters nothing in these
        if cb and cb.fit: f = partial(cb.fit.run_backward if event_type == 'backward' else cb.fit.run_step, f)
        return _fastais(self, f, event_type, ex, final)
    run: Any = partial(_fastais, self, f, event_type, ex, final)
    if cb and cb.parts: _run_part(cb, event_type, run)
    else: run_outermost(self, cb, event_type, run)


def _run_part(cb: MixedPrecision, event_type: str, run: Callable[[], None]) -> None:
    "Run a part of a learner with a precision. After a batch, make the change that waits for its end."
    parts, part = cb.parts, Part(event_type == 'batch')
    depth = len(parts)
    parts.append(part)
    try: run()
    finally:
        part.close()
        del parts[depth:]
    if cb.waiting: cb.do_waiting()


def run_outermost(
    learn: Learner,
    cb: MixedPrecision | None, # The learner's
    event_type: str,
    run: Callable[[], None], # Runs the part
) -> None:
    """Run the outermost part, in which a precision may be set or exchanged.

        a fit, or a validation alone    it closes what an earlier loop left open, and at its end its own
        a batch of a user's loop        what it opens stays open for the next one
        no precision                    fastai's part; each part inside counts as outermost
        one that fails                  what is open is closed, and a change that waits for a batch's end is made
    """
    if cb is None and event_type == 'fit' and learn._grab_cbs(fp16.MixedPrecision):
        warn_user("This fit uses fastai's own MixedPrecision, although fastxtend_amp is imported: fastai's name was "
                  'imported last.\nImport fastxtend_amp after fastai, or call `learn.to_fp16()`.', fp16.MixedPrecision)
    if cb and cb.learn is not learn:
        raise RuntimeError('The `MixedPrecision` callback of this learner has since been added to another learner. '
                           'Create one for each.')
    is_users_loop = event_type == 'batch'                        # over `one_batch`: all its batches belong to one fit
    try:
        if cb is None: return run()
        if not is_users_loop: cb.close()
        device = training_device(learn)
        # A precision that cannot be used raises an error here, before other callbacks change the learner.
        if event_type == 'fit' and cb.run: cb.open_fit(device, trains=True)
        restored: Any = autocast_restored(device.type) if autocast_available(device.type) else nullcontext()
        with backward_without_autocast(), restored:
            _run_part(cb, event_type, run)
        # `now` is another callback than `cb` if the precision was exchanged in this part.
        if not is_users_loop and (now := precision_callback(learn)): now.close()
    except BaseException as e:
        if cb:
            for method in cb.methods['after_failure']: method(e)
        if now := precision_callback(learn):
            now.close(failed=not isinstance(e, _CANCELS))
            now.do_waiting()
        raise


Learner._with_events = _with_events
