"Guard around fastai's batch loop: restores autocast's state after any exception, and ends what the callback began."
from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .common import warn_user
from .compat import AutocastState, autocast_nesting, events_method, map_tensors_traced
from .convert import half_to_float, to_fp32
from .forward import ModuleForward
from .mode import autocast_available, training_device

__all__ = ['Batch', 'LaterForwards', 'LoopGuard', 'cache_loses_gradients']


@lru_cache
def cache_loses_gradients() -> bool:
    """Whether autocast's weight cache hands a weight that was cast under `no_grad` to code that needs its gradient.

    PyTorch 2.9 does, 2.13 does not. Where it does, autocast runs without its cache.
    """
    weight, x = torch.ones(1, 1, device='cpu', requires_grad=True), torch.ones(1, 1, device='cpu')
    with torch.autocast('cpu', dtype=torch.bfloat16, cache_enabled=True), torch.enable_grad():
        with torch.no_grad(): F.linear(x, weight)
        return not F.linear(x, weight).requires_grad


@dataclass
class Batch:
    "One batch under way: what to put back when it ends. Batches nest when a callback validates inside one."
    autocast_state: AutocastState
    training: bool
    outer: Batch | None           # the batch around this one
    autocast: Any = None          # the autocast context that is entered, None outside
    later: LaterForwards | None = None
    began: bool = False           # did the precision callback see its `before_batch`?
    cancelled: bool = False       # was it left with CancelBatchException?
    done: bool = False            # is all over but `after_batch`?
    loose: bool = False           # was it begun by the event alone, outside `one_batch`?

    @property
    def later_standing(self) -> LaterForwards | None:
        "What this batch, or one around it, has put on the model."
        return self.later if self.later is not None or self.outer is None else self.outer.later_standing


class LaterForwards(ModuleForward):
    """Runs the model's later forward passes in a batch under autocast, and gives their output in fp32.

    autocast ends with the loss, but a learner may run its model again in the same batch, as sharpness-aware
    minimization does. Stands on the model from then to the end of the batch; copies of the model do not have it.
    """
    transient = True

    def __init__(self,
        module: nn.Module, # The learner's model
        device_type: str, # Type of the device it is on
        dtype: torch.dtype, # autocast's
        cache_enabled: bool, # Whether autocast may keep its casts of weights
    ):
        super().__init__(module)
        self.device_type, self.dtype, self.cache_enabled, self.nesting = device_type, dtype, cache_enabled, 0

    def install(self, nesting: int = 0) -> None: # How many autocast contexts were entered before the batch
        "Put this object on the module."
        self.nesting, self.inner = nesting, self.module.__dict__.get('forward')
        super().install()

    def __call__(self, *args, **kwargs) -> Any:
        if torch.is_autocast_enabled(self.device_type): return self.run(*args, **kwargs)
        compiling = torch.compiler.is_compiling()
        switched_off = not compiling and autocast_nesting() > self.nesting        # by somebody, on purpose
        if switched_off: return self.run(*args, **kwargs)
        if not compiling: torch.clear_autocast_cache()           # weights may have changed since the loss
        with torch.autocast(self.device_type, dtype=self.dtype, cache_enabled=self.cache_enabled):
            output = self.run(*args, **kwargs)
        return map_tensors_traced(half_to_float, output) if compiling else to_fp32(output)


class LoopGuard:
    """Stands on three methods of one learner as long as its owner is on it: `one_batch`, `_with_events` and `export`.

    fastai's events cannot clean up after an exception: `after_batch` and `after_fit` do not run, and an interrupt can
    strike between any two lines, also in an event of ours. The guard's clean-up runs twice and can be repeated, so that
    one interrupt, wherever it strikes, leaves one complete run of it. All of it can be pickled and deep-copied with the
    learner.
    """
    def __init__(self, owner: Any): # A `MixedPrecision` callback
        self.owner, self.learn = owner, None
        self.running = False                                     # is the loop under way?
        self.inner: dict[str, Any] = {}                          # the methods underneath; None for the class's own

    # A copy made inside the loop is not inside one itself.
    def __getstate__(self): return {**self.__dict__, 'running': False}

    def install(self, learn: Any) -> None:
        "Start to guard `learn`; nothing happens if that is done already."
        self.learn = learn
        for name in ('one_batch', events_method(), 'export'):
            if name in self.inner: continue
            self.inner[name] = learn.__dict__.get(name)          # somebody else's wrapper, usually None
            learn.__dict__[name] = getattr(self, name)

    def remove(self) -> None:
        "Give the learner its own methods back; under a wrapper put around ours since then, ours passes through."
        for name in list(self.inner):
            if self.learn.__dict__.get(name) != getattr(self, name): continue
            previous = self.inner.pop(name)
            if previous is None: del self.learn.__dict__[name]
            else: self.learn.__dict__[name] = previous

    def _below(self, name: str) -> Callable:
        return self.inner.get(name) or getattr(type(self.learn), name).__get__(self.learn)

    def one_batch(self, *args, **kwargs) -> None:
        "`learn.one_batch`, after which autocast is as it was before and no gradient is left scaled by accident."
        below, owner = self._below('one_batch'), self.owner
        if owner.learn is not self.learn: return below(*args, **kwargs)   # it was taken off under somebody's wrapper
        batch = owner._enter_batch()
        if batch is None: return below(*args, **kwargs)
        try:
            try: below(*args, **kwargs)
            except BaseException as e: owner._leave_batch(batch, e); raise
            else: owner._leave_batch(batch, None)
        except BaseException as e: owner._leave_batch(batch, e); raise

    def export(self, *args, **kwargs) -> None:
        "`learn.export`, with a warning: the file would need this package."
        if self.owner.learn is self.learn:
            warn_user("The exported file needs fastxtend_amp wherever it is loaded, because the learner has a "
                      "precision callback.\n"
                      "Call `learn.to_fp32()` before `export` for a file that loads without it.")
        return self._below('export')(*args, **kwargs)

    def _with_events(self, f: Callable, event_type: str, *args, **kwargs) -> None:
        "`learn._with_events`; tells how far a step came, and ends the owner's fit when an exception ends fastai's."
        below, owner, outermost = self._below('_with_events'), self.owner, not self.running
        if owner.learn is not self.learn: return below(f, event_type, *args, **kwargs)
        if event_type == 'fit' and outermost: return self._fit(below, f, *args, **kwargs)
        if event_type == 'step': f = functools.partial(self._step, f)
        if event_type == 'batch': f = functools.partial(self._batch, f)
        grad_mode = torch.is_grad_enabled()
        try:
            try:
                self.running = True
                below(f, event_type, *args, **kwargs)
                if event_type == 'step': owner.scaling.settle()
            finally: self.running = not outermost
        except BaseException as e:
            self.running = not outermost
            torch.set_grad_enabled(grad_mode)                    # an interrupt in fastai's `no_grad` would leave it off
            if outermost: owner._left_loop(event_type, e)
            raise

    def _fit(self, below: Callable, *args, **kwargs) -> None:
        "A fit, `before_fit` and `after_fit` included, after which nothing is left open, also by an exception."
        device_type = training_device(self.learn).type
        state = AutocastState(device_type) if autocast_available(device_type) else None
        try:
            try: below(args[0], 'fit', *args[1:], **kwargs)
            except BaseException: self._end_fit(state); raise
        except BaseException: self._end_fit(state); raise

    def _end_fit(self, state: AutocastState | None) -> None:
        self.owner._close()
        if state is not None: state.restore()

    def _step(self, step: Callable) -> None:
        self.owner._step(step)
        self.owner.scaling.stepped = True

    def _batch(self, do_batch: Callable) -> None:
        try: do_batch()
        finally: self.owner._batch_is_done()
