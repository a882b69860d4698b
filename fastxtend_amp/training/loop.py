"""The scopes of fastai's loop: what a precision opens in one is closed when it ends or fails.

fastai runs each part of its loop through `Learner._with_events`, which importing this file replaces. With a precision
callback `learn._scopes` lists the parts that are open, from the outermost to the innermost.

    _with_events    opens and closes a scope for each fit, epoch, train, validate and batch
    the callback    enters autocast and other contexts in `learn._scopes[-1]`, which leaves them when it is closed
    at the end      the outermost scope closes the callback's fit, unless it is a single batch, and restores autocast
    to_bf16() ...   exchange the callback: now, or when the open batch has ended

A learner without a precision runs fastai's own loop, after one look-up of its callbacks. This file also adds the
attributes `_scopes` and `mixed_precision` to `Learner`.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

from fastai.callback import fp16
from fastai.callback.core import _inner_loop
from fastai.learner import Learner
from fastcore.basics import noop
from fastcore.foundation import L

from ..common import training_device, warn_user
from ..compat import AutocastState
from ..devices.facts import autocast_available

PRECISION_CALLBACKS = (fp16.MixedPrecision, fp16.ModelToHalf, fp16.NonNativeMixedPrecision)
_KINDS = ('fit', 'epoch', 'train', 'validate', 'batch')          # of scopes; 'backward' and 'step' have none
_LOW_WORDS = ('Half', 'BFloat16', 'dtype', 'scalar type', 'primitive')   # in PyTorch's errors where only fp32 runs


class Scope(ExitStack):
    "A part of the loop that is open, and the contexts that were entered in it."
    kind: str                                                    # 'fit', 'epoch', 'batch' ...
    around_step: Callable[[Learner], AbstractContextManager] | None = None   # in a batch: makes a context for its step


class Scopes(list):
    "The open scopes of a learner; a copy of the learner is outside of them."
    waiting: Callable[[], Any] | None = None                     # what to do when the batch has ended
    n_fixes = 0                                                  # of this fit, with on_overflow='fix'

    def do_waiting(self) -> None:
        change, self.waiting = self.waiting, None
        if change is not None: change()

    def __reduce_ex__(self, protocol): return tuple, ()


def in_batch(learn: Learner) -> bool:
    "Return whether a batch is open, in which a precision cannot be exchanged."
    return any(scope.kind == 'batch' for scope in learn._scopes)


_fastais = Learner._with_events


def _with_events(self: Learner, f: Callable, event_type: str, ex: type[Exception], final: Callable = noop) -> None:
    "Run a part of fastai's loop; what a precision opened in it is closed at its end."
    scopes: Any = self._scopes
    if event_type == 'step' and scopes and scopes[-1].around_step: f = partial(_step, scopes[-1].around_step, self, f)
    run: Any = partial(_fastais, self, f, event_type, ex, final)
    if scopes and event_type in _KINDS: return _run_scope(self, scopes, event_type, run)
    if scopes: return run()
    if cb := precision_callback(self): return _run_outermost(self, cb, event_type, run)
    try: run()
    except BaseException:
        _close(self, failed=True)                                # a precision was set in this part
        raise


def _run_outermost(learn: Learner, cb: LoopCallback, kind: str, run: Callable[[], None]) -> None:
    "Run a part as the outermost scope, at whose end nothing of the callback `cb` stays open."
    is_single_batch = kind == 'batch'                            # of the user's own loop, which has one fit for all
    if not is_single_batch: cb.close()                           # what such a loop left open
    scopes, device_type = Scopes(), training_device(learn).type
    # A KeyboardInterrupt between two lines of `torch.autocast.__enter__` leaves state that no `__exit__` restores.
    with AutocastState(device_type) if autocast_available(device_type) else nullcontext():
        try:
            vars(learn)['_scopes'] = scopes
            _run_scope(learn, scopes, kind, run)
            if not is_single_batch: _close(learn)
            vars(learn).pop('_scopes', None)
        except BaseException as e:
            vars(learn).pop('_scopes', None)
            _explain(learn, e)
            _close(learn, failed=True)
            scopes.do_waiting()
            raise


def _run_scope(learn: Learner, scopes: Scopes, kind: str, run: Callable[[], None]) -> None:
    "Run a part as the innermost scope; when a batch has ended, do what was waiting for that."
    depth, scope = len(scopes), Scope()
    scope.kind = kind
    try:
        scopes.append(scope)
        run()
    finally:
        while len(scopes) > depth:
            scopes[-1].close()
            del scopes[-1:]
    if scopes.waiting and not in_batch(learn): scopes.do_waiting()


def _step(around: Callable, learn: Learner, step: Callable[[], object]) -> None:
    with around(learn): step()


def _close(learn: Learner, failed: bool = False) -> None:
    if cb := precision_callback(learn): cb.close(failed)         # it may have been exchanged


def _explain(learn: Learner, error: BaseException) -> None:
    "Add to an error about dtypes, or oneDNN's about an LSTM, that the report names the module."
    cb = precision_callback(learn)
    is_low = cb is not None and cb.fit is not None and cb.fit.precision.dtype
    if is_low and isinstance(error, (RuntimeError, TypeError)) and any(word in str(error) for word in _LOW_WORDS):
        if hasattr(error, 'add_note'):                           # Python 3.11
            error.add_note('If the model trains in fp32: `learn.precision_report()` names the module that does not '
                           'run in 16 bits, and prints the call that keeps it in fp32.')


# -- one precision callback for a learner

def precision_callback(learn: Learner) -> Any: # A `MixedPrecision`
    "Return the learner's precision callback; None in plain fp32."
    return next((cb for cb in learn.cbs if isinstance(cb, LoopCallback) and cb.learn is learn), None)


def precision_callbacks(learn: Learner) -> list:
    "Return the learner's precision callbacks, ours and fastai's own."
    return [cb for cb in learn.cbs if isinstance(cb, PRECISION_CALLBACKS)]


def set_callback(
    learn: Learner,
    cb: Any, # A `LoopCallback`; None for fp32
) -> Learner:
    "Make `cb` the learner's only precision callback: now, or when the open batch has ended."
    at_batch_end(learn, partial(_exchange, learn, cb))
    return learn


def at_batch_end(
    learn: Learner,
    change: Callable[[], Any], # What changes the learner's precision; replaces an earlier change of the same batch
) -> None:
    "Call `change` now, or when the batch that is open has ended."
    if in_batch(learn): learn._scopes.waiting = change
    else: change()


def _exchange(learn: Learner, cb: Any) -> None:
    old = [c for c in precision_callbacks(learn) if c is not cb]
    for c in old:
        if isinstance(c, LoopCallback): c.close()
    if cb is not None and cb not in learn.cbs: cb.learn = learn
    others = [c for c in learn.cbs if c not in old and c is not cb]
    # One assignment, so that an interrupt leaves one precision or the other. `cb` goes first, so that other callbacks
    # of order 10 see true gradients.
    learn.cbs = L(others if cb is None else [cb, *others])
    for name in ('non_native_mixed_precision', 'model_to_half', 'scaler'): vars(learn).pop(name, None)
    for c in old: c.learn = None


# The attribute `learn.mixed_precision`. Without a docstring, which would make it a documented method of `Learner`.
def _mixed_precision(learn: Learner) -> Any:
    for cb in learn.cbs:
        if isinstance(cb, fp16.MixedPrecision): return cb        # ours, or fastai's own
    raise AttributeError('mixed_precision')                      # plain fp32


# fastai's `add_cb` and `remove_cb` set and delete `mixed_precision`: both do nothing.
Learner._with_events, Learner._scopes = _with_events, ()
Learner.mixed_precision = property(_mixed_precision, noop, noop)


class LoopCallback(fp16.MixedPrecision):
    "The part of a precision callback that knows which learner it belongs to; `fit` is what it has open."
    name = 'mixed_precision'                                     # also of subclasses
    run = True
    fit: Any = None
    watchers: Sequence[Any] = ()                                 # with events of their own, after this callback's

    def close(self, failed: bool = False) -> None: "End the fit that is open, if there is one."

    def __setattr__(self, name, value):
        if name == 'learn' and self.learn is not None: self._leave(self.learn, value)
        object.__setattr__(self, name, value)                    # fastai would look the name up on learner and model

    def _leave(self, former: Learner, new: Learner | None) -> None:
        "Leave the learner `former`, for `new` or for none."
        is_there = self in former.cbs
        if new is former:
            if not is_there: return
            raise ValueError(f'{self!r} is on this learner already, and would run twice in each batch.\n'
                             'Leave it out of `cbs`.')
        if is_there and in_batch(former):
            raise RuntimeError('A precision callback cannot be removed in the middle of a batch.\n'
                               'Call `learn.to_fp32()`, `to_fp16()` or `to_bf16()`, which take effect at its end, '
                               'or remove it at `before_epoch`, `before_train`, `after_train` or `after_epoch`.')
        self.close()
        vars(former).pop('scaler', None)
        former.cbs = L(cb for cb in former.cbs if cb is not self)   # a new list: `Learner(cbs=learn.cbs)` iterates it
        if new is None: return
        warn_user('A precision callback moved from one learner to another: the first trains in fp32 from now on.\n'
                  'Give each learner its own: `learn.to_fp16()` or `learn.to_bf16()`.')

    def refuse_others(self, learn: Learner) -> None:
        "Raise a `ValueError` if the learner has another precision callback, or this one twice."
        found = precision_callbacks(learn)
        if len(found) > 1:
            raise ValueError(f'The learner has several precision callbacks: {found}.\n'
                             'Keep one: `learn.to_fp32()` removes them all, and `learn.to_fp16()` or '
                             '`learn.to_bf16()` replaces them. In `fit(cbs=...)` leave it out if the learner has one.')

    def __call__(self, event_name: str) -> None:
        "Run an event here, then in the watchers, until a callback removes this one."
        runs = self.run
        if event_name in _inner_loop:
            is_open = self.fit is not None or event_name == 'before_batch'   # not if it was added within a batch
            runs = runs and is_open and (self.run_train if self.learn.training else self.run_valid)
        for part in (self, *self.watchers) if runs else ():
            # fastai would look up a missing event on the learner and its model.
            has_event = event_name in vars(part) or hasattr(type(part), event_name)
            if has_event and self.learn is not None: getattr(part, event_name)()
        if event_name == 'after_fit': self.run = True
