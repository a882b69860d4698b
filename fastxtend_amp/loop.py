"The scopes of a learner's loop, and its open fit: a context that is entered in one is left when it ends, or fails."
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, NamedTuple

from fastai.callback import fp16
from fastai.callback.core import Callback
from fastai.learner import Learner
from fastcore.basics import noop
from torch import nn

from .common import model_device, training_device, warn_user
from .compat import AutocastState
from .mode import autocast_available

__all__ = ['COMPANIONS', 'PRECISION_CALLBACKS', 'Fit', 'Loop', 'PrecisionBase', 'loop_of']

COMPANIONS: list[type[Callback]] = []                            # come and go with a precision; `insight` adds one
PRECISION_CALLBACKS = (fp16.MixedPrecision, fp16.ModelToHalf, fp16.NonNativeMixedPrecision)
_WHOLE = ('fit', 'epoch', 'train', 'validate')  # kinds of scope that end the fit if they are outermost
_HALF_WORDS = ('Half', 'BFloat16', 'dtype', 'scalar type', 'primitive')   # in PyTorch's errors where fp32 alone runs


class Fit:
    """One fit, or one validation, in a precision: what was decided for it, and the contexts that last until it ends.

    The contexts are left in reverse order. Each `__exit__` can be called twice, and after an interrupted `__enter__`:
    so a second call of `close` finishes what an interrupt left.
    """
    def __init__(self, learn: Learner, cb: Any): # `cb`: a `MixedPrecision`
        self.learn, self.cb = learn, cb
        self.device = model_device(learn.model, training_device(learn))
        self.mode = cb.mode_on(self.device)                      # None for fp32
        self.contexts: list[Any] = []
        self.around: list[Any] = []                              # those of them with `add(model)`
        self.model: Any = None                                   # was given to these
        self.around_forward: list[Any] = []                      # contexts, to be entered in each batch
        self.is_training = False                                 # training was checked, and its contexts are entered
        self.has_warned = False                                  # that training goes wrong: no second warning follows
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
    body: Callable # Runs between the scope's events
    contexts: list # Entered by events inside, and not left yet


class Loop:
    """Wraps `learn._with_events` while the learner has a precision callback: the open scopes, and the open fit.

    The outermost scope restores autocast's state and grad mode at its end. It also ends the fit, unless it is a batch
    by itself: a loop of the user's own over `one_batch` is one fit, until the next fit, validation or precision.
    """
    def __init__(self, learn: Learner):
        self.learn, self.scopes = learn, list[Scope]()
        self.fit: Fit | None = None
        self.waiting: list[Any] = []                             # [cb], to use when the batch has ended; [None]: fp32
        self.wrapped = vars(learn).get('_with_events')           # a wrapper of somebody else's

    def __getstate__(self) -> dict[str, Any]:                    # a copy is outside of every scope
        return {**vars(self), 'scopes': [], 'fit': None, 'waiting': []}

    def __call__(self, f: Callable, event_type: str, ex: type[Exception], final: Callable = noop) -> None:
        "Run the learner's `_with_events`; when the outermost scope ends, nothing is left open."
        if self.scopes: return self._scope(f, event_type, ex, final)
        if event_type in _WHOLE: self.close()                    # a fit that single batches left open
        device_type = training_device(self.learn).type
        # An interrupt between two lines of `torch.autocast.__enter__` leaves what no `__exit__` repairs.
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
                if self.waiting: self._exchange()
                if not self._is_used: self._unwrap()

    def _scope(self, f: Callable, event_type: str, ex: type[Exception], final: Callable) -> None:
        "Run a scope; leave at its end what events inside have entered."
        depth, learn = len(self.scopes), self.learn
        with_events = self.wrapped or partial(type(learn)._with_events, learn)
        try:
            self.scopes.append(Scope(event_type, f, []))
            with_events(partial(self._step, f) if event_type == 'step' else f, event_type, ex, final)
            if event_type == 'step' and self.fit is not None: self.fit.cb.end_step()
        finally:
            while len(self.scopes) > depth:
                self.leave()
                del self.scopes[-1:]
        if self.waiting and not self.in_batch: self._exchange()  # after an error the outermost scope does

    def _step(self, step: Callable[[], object]) -> None:
        if self.fit is None: step()
        else: self.fit.cb.take_step(step)

    def _explain(self, error: BaseException) -> None:
        "Add to an error about dtypes, or oneDNN's about an LSTM, that the report names the module."
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
        self.fit = None                                          # last: after an interrupt it is closed again

    def enter(self, context: AbstractContextManager) -> None:
        "Enter `context` in the innermost scope, which leaves it at its end if nothing does before."
        if not self.scopes:
            raise RuntimeError("A batch's events were called outside of `Learner.one_batch`: autocast would stay on.\n"
                               'Call `learn.one_batch(i, batch)`, or take events by hand without a precision and '
                               'run the model inside `learn.amp_context()`.')
        context.__enter__()
        self.scopes[-1].contexts.append(context)

    def leave(self) -> None:
        "Leave what was entered in the innermost scope."
        contexts = self.scopes[-1].contexts if self.scopes else []
        while contexts:
            contexts[-1].__exit__(None, None, None)
            del contexts[-1]

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
            # An interrupt has kept the callback from being added.
            if isinstance(loop, Loop) and not loop.scopes and not loop._is_used: loop._unwrap()

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
    loops = [vars(cb).get('_loop') for cb in learn.cbs]          # `learn._with_events` may be somebody's wrapper of it
    loop = next(filter(None, loops), vars(learn).get('_with_events'))
    if not isinstance(loop, Loop): loop = vars(learn)['_with_events'] = Loop(learn)
    return loop


class PrecisionBase(fp16.MixedPrecision):
    "A callback that belongs to one learner, its only precision, and has that learner's loop while it does."
    run = True
    _learn: Any = None
    _loop: Any = None                                            # the learner's `Loop`
    _has_left = False                                            # the last learner

    def check_modules(self,
        model: nn.Module, # The model that this callback is to train
    ) -> None:
        "Raise the errors of `fp32_modules` and `modules` that adding this callback to a learner would raise."

    # fastai would look up each name on the learner and its model, and warn if it is there; these names are our own.
    def __setattr__(self, name, value): object.__setattr__(self, name, value)

    @property
    def name(self) -> str:
        """The learner's attribute, also of subclasses: fastai's `load_learner` takes off what has it.

        One that has left its learner has another name, because fastai deletes the attribute after `fit(cbs=...)`.
        """
        return 'former_precision' if self._has_left else 'mixed_precision'

    @property
    def fit(self) -> Fit | None:
        "The fit or validation that is open: `device`, `mode` and more; None outside."
        return None if self._loop is None else self._loop.fit

    @property
    def learn(self): return self._learn
    @learn.setter
    def learn(self, learn):                                      # set by `add_cb`, and to None by `remove_cb`
        if learn is None: return self._leave()
        if learn is self._learn and any(cb is self for cb in learn.cbs):
            raise ValueError(f'{self!r} is on this learner already, and would run twice in each batch.\n'
                             'Leave it out of `cbs`.')
        if self._learn is not None and learn is not self._learn:
            self._learn.cbs = self._learn.cbs.copy()             # `Learner(cbs=learn.cbs)` goes through the old list
            self._learn.remove_cb(self)
            warn_user("A precision callback moved from one learner to another: the first trains in fp32 from now on.\n"
                      "Give each learner another one: `learn.to_fp16()` or `learn.to_bf16()`.")
        self._refuse_others(learn)
        self.check_modules(learn.model)
        self._learn, self._loop, self._has_left = learn, loop_of(learn), False
        learn.add_cbs([kind() for kind in COMPANIONS if not any(isinstance(cb, kind) for cb in learn.cbs)])

    def _leave(self) -> None:
        "Leave the learner, which trains in fp32 from now on."
        if self._learn is None: return
        if self._loop.in_batch:
            raise RuntimeError("A precision callback cannot be removed in the middle of a batch.\n"
                               "Call `learn.to_fp32()`, `to_fp16()` or `to_bf16()`, which take effect at its end, or "
                               "remove it at `before_epoch`, `before_train`, `after_train` or `after_epoch`.")
        learn, loop = self._learn, self._loop
        loop.close()
        self._learn, self._loop, self._has_left = None, None, True
        vars(learn).pop('mixed_precision', None)
        learn.remove_cbs([cb for cb in learn.cbs if type(cb) in COMPANIONS and cb.learn is learn])
        loop.detach()

    def _refuse_others(self, learn: Learner) -> None:
        others = [cb for cb in learn.cbs if isinstance(cb, PRECISION_CALLBACKS) and cb is not self]
        if others:
            raise ValueError(f"The learner has several precision callbacks: {[self, *others]}.\n"
                             "Keep one: `learn.to_fp32()` removes them all, and `learn.to_fp16()` or "
                             "`learn.to_bf16()` replaces them.")

    def __call__(self, event_name: str) -> None:
        if self._learn is None: return                           # taken off by a callback before this one
        # fastai would look an event that is not here up on the learner and its model.
        if event_name in vars(self) or hasattr(type(self), event_name): super().__call__(event_name)

    @property
    def training(self) -> bool:
        "True in training, for which fastai asks before each event."
        return self._learn.training
