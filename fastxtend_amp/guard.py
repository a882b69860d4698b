"What must be undone, whatever ends a batch or a fit?"
from __future__ import annotations

import functools
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

_call = type(torch.autocast_increment_nesting).__call__


def _nesting() -> int:
    "How many autocast contexts are entered: there is no getter. Up and down run in C alone, where no signal handler can."
    return [*map(_call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))][1]


class AutocastState:
    """autocast's state in this thread for one type of device, as it is when this is built.

    `restore` may be interrupted at any point and called again.
    """
    def __init__(self, device_type: str):
        self.device_type, self.nesting = device_type, _nesting()
        self.enabled, self.dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        self.cache = torch.is_autocast_cache_enabled()

    def restore(self) -> None:
        "Put the state back and forget the cast weights, which the optimizer's step makes stale."
        extra = _nesting() - self.nesting
        for _ in range(extra): torch.autocast_decrement_nesting()
        for _ in range(-extra): torch.autocast_increment_nesting()
        torch.set_autocast_enabled(self.device_type, self.enabled)
        torch.set_autocast_dtype(self.device_type, self.dtype)
        torch.set_autocast_cache_enabled(self.cache)
        torch.clear_autocast_cache()


@lru_cache
def cache_loses_gradients() -> bool:
    """Whether autocast's weight cache hands a weight that was cast under `no_grad` to code that needs its gradient.

    PyTorch 2.9 does, 2.13 does not.
    """
    weight, x = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1)
    with torch.autocast('cpu', dtype=torch.bfloat16, cache_enabled=True), torch.enable_grad():
        with torch.no_grad(): F.linear(x, weight)
        return not F.linear(x, weight).requires_grad


def _clearing(method: Callable) -> Callable:
    @functools.wraps(method)
    def inner(*args):
        result = method(*args)
        if torch.is_grad_enabled(): torch.clear_autocast_cache()
        return result
    return inner


class GradModeSwitches:
    """Forgets the cast weights whenever gradients are switched back on inside a batch, where PyTorch needs that.

    The cache stays in use otherwise. While entered, the methods of PyTorch's four grad-mode classes are replaced.
    """
    _places: ClassVar = [(c, n) for c in (torch.no_grad, torch.enable_grad, torch.inference_mode, torch.set_grad_enabled)
                         for n in ('__enter__', '__exit__')] + [(torch.set_grad_enabled, '__init__')]
    _originals: ClassVar = [c.__dict__.get(n) for c, n in _places]

    @classmethod
    def watch(cls) -> None:
        for (c, n), method in zip(cls._places, cls._originals):
            if method is not None: setattr(c, n, _clearing(method))

    @classmethod
    def unwatch(cls) -> None:
        for (c, n), method in zip(cls._places, cls._originals):
            if method is not None: setattr(c, n, method)


class LoopGuard:
    """Wraps `learn.one_batch` and `learn._with_events`, on that learner alone, from `install` to `remove`.

    fastai's events cannot clean up after an exception: `after_batch` and `after_fit` do not run, and an interrupt can
    strike between any two lines, also in an event of ours. The guard's clean-up runs twice and can be repeated, so that
    one interrupt, wherever it strikes, leaves one complete run of it. All of it can be pickled and deep-copied with the
    learner.
    """
    _names = ('one_batch', '_with_events')

    def __init__(self, owner: Any):
        self.owner, self.learn, self.running = owner, None, False
        self.inner: dict[str, Any] = {}                          # what the wrappers stand on; None where the class's own method is meant

    # A copy made inside the loop is not inside one itself.
    def __getstate__(self): return {**self.__dict__, 'running': False}

    def install(self, learn: Any) -> None:
        "Start to guard `learn`; nothing happens if that is done already."
        self.learn = learn
        for name in self._names:
            if name in self.inner: continue
            self.inner[name] = learn.__dict__.get(name)          # somebody else's wrapper, usually None
            learn.__dict__[name] = getattr(self, name)

    def remove(self) -> None:
        "Give the learner its own methods back; a wrapper put around ours since then stays, and ours passes through."
        for name in self._names:
            if name not in self.inner or self.learn.__dict__.get(name) != getattr(self, name): continue
            previous = self.inner.pop(name)
            if previous is None: del self.learn.__dict__[name]
            else: self.learn.__dict__[name] = previous

    def _inner(self, name): return self.inner.get(name) or getattr(type(self.learn), name).__get__(self.learn)

    def one_batch(self, *args, **kwargs):
        "`learn.one_batch`, after which autocast is as it was before and no gradient is left scaled by accident."
        inner, batch = self._inner('one_batch'), self.owner._enter_batch()
        if batch is None: return inner(*args, **kwargs)
        try:
            try:
                if batch.watched: GradModeSwitches.watch()
                inner(*args, **kwargs)
            except BaseException as e: self.owner._leave_batch(batch, e); raise
            else: self.owner._leave_batch(batch, None)
        except BaseException as e: self.owner._leave_batch(batch, e); raise

    def _with_events(self, f, event_type, *args, **kwargs):
        "`learn._with_events`, which tells how far a step came and ends the owner's fit when an exception ends fastai's."
        inner, outermost = self._inner('_with_events'), not self.running
        if event_type == 'fit': return inner(f, event_type, *args, **kwargs)   # a fit after one that died outside our sight
        if event_type == 'step': f = functools.partial(self._step, f)
        grad_mode = torch.is_grad_enabled()
        try:
            try:
                self.running = True
                inner(f, event_type, *args, **kwargs)
                if event_type == 'step': self.owner.scaling.settle()
            finally: self.running = not outermost
        except BaseException as e:
            self.running = not outermost
            torch.set_grad_enabled(grad_mode)                    # an interrupt in fastai's `no_grad` would leave it off
            if outermost: self.owner._left_loop(event_type, e)
            raise

    def _step(self, step):
        self.owner._step(step)
        self.owner.scaling.stepped = True
