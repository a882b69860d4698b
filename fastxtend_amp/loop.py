"The scopes of a learner's training loop, and the fit that is open in them: what is entered is left, however it ends."
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

from fastai.callback import fp16
from fastai.learner import Learner
from fastcore.basics import noop

from .common import model_device, training_device
from .compat import AutocastState
from .mode import autocast_available

__all__ = ['PRECISION_CALLBACKS', 'Fit', 'Loop', 'loop_of']

PRECISION_CALLBACKS = (fp16.MixedPrecision, fp16.ModelToHalf, fp16.NonNativeMixedPrecision)
_WHOLE = ('fit', 'epoch', 'train', 'validate')  # an outermost scope of these kinds ends the fit; a batch does not
_HALF_WORDS = ('Half', 'BFloat16', 'dtype', 'scalar type')  # in errors of code that takes fp32 alone


class Fit:
    """One fit, or one validation, in a precision: what was decided for it, and the contexts that last until it ends.

    The contexts are left in reverse order. Each `__exit__` may be called again, and after an `__enter__` that an
    interrupt ended: so a second call of `close` finishes what an interrupt left.
    """
    def __init__(self, learn: Learner, cb: Any): # `cb`: a `MixedPrecision`
        self.learn, self.cb = learn, cb
        self.device = model_device(learn.model, training_device(learn))
        self.mode = cb.mode_on(self.device)                      # None for fp32
        self.contexts: list[Any] = []
        self.around: list[Any] = []                              # those of them that computing takes, with `add(model)`
        self.model: Any = None                                   # the one that they are for
        self.is_compiled = False                                 # that model, or a part of it
        self.is_training = False                                 # training was checked, and its contexts are entered
        self.has_warned = False                                  # of what goes wrong: one message for one cause
        self.notes: dict[type, Any] = {}                         # of companions, by their class

    def enter(self, context: Any) -> Any:
        "Enter `context` until the fit ends; return what its `__enter__` does."
        self.contexts.append(context)                            # first: an interrupt inside `__enter__` is undone
        return context.__enter__()

    def close(self, error: type[BaseException] | None = None) -> None:
        "Leave all contexts, also if one raises."
        with ExitStack() as stack:
            for context in self.contexts: stack.callback(context.__exit__, error, None, None)


class Scope(NamedTuple):
    "One run of `_with_events` that has not ended."
    kind: str # 'fit', 'epoch', 'train', 'validate', 'batch', 'backward' or 'step'
    stack: ExitStack # Contexts that events inside have entered


class Loop:
    """Wraps `learn._with_events` while the learner has a precision callback: the open scopes, and the open fit.

    The outermost scope restores autocast's state and grad mode at its end. It also ends the fit, unless it is a batch
    by itself: a loop of the user's own over `one_batch` is one fit, until the next fit, validation or precision.
    """
    def __init__(self, learn: Learner):
        self.learn, self.scopes = learn, list[Scope]()
        self.fit: Fit | None = None
        self.waiting: list[Any] = []                             # the callback to use when the batch has ended
        self.wrapped = vars(learn).get('_with_events')           # a wrapper of somebody else's

    def __getstate__(self) -> dict[str, Any]:                    # a copy is outside of every scope
        return {**vars(self), 'scopes': [], 'fit': None, 'waiting': []}

    def __call__(self, f: Callable, event_type: str, ex: type[Exception], final: Callable = noop) -> None:
        "Run the learner's `_with_events`; when the outermost scope ends, nothing is left open."
        if self.scopes: return self._scope(f, event_type, ex, final)
        if event_type in _WHOLE: self.close()                    # a fit that single batches left open
        device_type = training_device(self.learn).type
        # An interrupt between two lines of `torch.autocast.__enter__` leaves what no `__exit__` mends.
        state: Any = AutocastState(device_type) if autocast_available(device_type) else nullcontext()
        with state:
            try:
                self._scope(f, event_type, ex, final)
                if event_type in _WHOLE: self.close()
            except BaseException as e:
                self._explain(e)
                self.scopes.clear()
                self.close(type(e))
                raise
            finally:
                if not self._is_used: self._unwrap()

    def _scope(self, f: Callable, event_type: str, ex: type[Exception], final: Callable) -> None:
        "Run a scope with a stack for the contexts that events inside enter."
        depth, learn = len(self.scopes), self.learn
        with_events = self.wrapped or partial(type(learn)._with_events, learn)
        try:
            with ExitStack() as stack:
                self.scopes.append(Scope(event_type, stack))
                with_events(f, event_type, ex, final)
        finally:
            del self.scopes[depth:]
            if self.waiting and not self.in_batch: self._exchange()

    def _explain(self, error: BaseException) -> None:
        "Add to an error about dtypes that the report names the module."
        is_low = self.fit is not None and self.fit.mode is not None
        if is_low and isinstance(error, RuntimeError) and any(word in str(error) for word in _HALF_WORDS):
            if hasattr(error, 'add_note'):                       # Python 3.11
                error.add_note('If the model trains in fp32: `learn.precision_report()` names the module that does '
                               'not run in low precision, and the call that keeps it in fp32.')

    # -- the fit

    def open(self, cb: Any) -> Fit: # The fit that is open now
        "Begin a fit in the precision of `cb`, unless one is open."
        if self.fit is None:
            self.fit = Fit(self.learn, cb)
            cb.open_fit(self.fit)
        return self.fit

    def close(self, error: type[BaseException] | None = None) -> None:
        "End the fit, if one is open."
        if self.fit is None: return
        self.fit.close(error)
        self.fit = None                                          # last: an interrupt before this closes it anew

    def enter(self, context: AbstractContextManager) -> None:
        "Enter `context` in the innermost scope, which leaves it at its end if nothing does before."
        if not self.scopes:
            raise RuntimeError("A batch's events were called outside of `Learner.one_batch`: autocast would stay on.\n"
                               'Call `learn.one_batch(i, batch)`, or take events by hand without a precision and '
                               'run the model inside `learn.amp_context()`.')
        self.scopes[-1].stack.enter_context(context)

    def leave(self) -> None:
        "Leave what was entered in the innermost scope."
        if self.scopes: self.scopes[-1].stack.close()

    # -- the precision callback

    @property
    def in_batch(self) -> bool:
        "True in a batch, where a precision cannot be exchanged."
        return any(scope.kind == 'batch' for scope in self.scopes)

    def use(self, cb: Any) -> None: # A `MixedPrecision`; None for fp32
        "Have `cb` as the learner's only precision callback: now, or when the batch that is open has ended."
        self.waiting = [cb]
        if not self.in_batch: self._exchange()

    def _exchange(self) -> None:
        learn, (cb,) = self.learn, self.waiting
        try:
            learn.remove_cbs([c for c in learn.cbs if isinstance(c, PRECISION_CALLBACKS)])
            if cb is not None: learn.add_cb(cb)
        finally:
            self.waiting = []
            loop = vars(learn).get('_with_events')
            if isinstance(loop, Loop) and not loop.scopes and not loop._is_used: loop._unwrap()   # interrupted

    def detach(self) -> None:
        "End the fit; outside of every scope give the learner its own loop back."
        self.close()
        if not self.scopes: self._unwrap()

    @property
    def _is_used(self) -> bool: return any(vars(cb).get('_loop') is self for cb in self.learn.cbs)

    def _unwrap(self) -> None:
        attributes = vars(self.learn)
        attributes.pop('scaler', None)
        if attributes.get('_with_events') is not self: return    # somebody has wrapped this
        del attributes['_with_events']
        if self.wrapped is not None: attributes['_with_events'] = self.wrapped


def loop_of(
    learn: Learner,
) -> Loop: # The one that wraps its `_with_events`; a new one if none does
    "Return the learner's loop."
    loops = [vars(cb).get('_loop') for cb in learn.cbs]          # the callback has it where somebody has wrapped it
    loop = next(filter(None, loops), vars(learn).get('_with_events'))
    if not isinstance(loop, Loop): loop = vars(learn)['_with_events'] = Loop(learn)
    return loop
