"Replaces the forwards of modules: those of modules kept in fp32 turn autocast off."
from __future__ import annotations

import copy, threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..common import model_device, warn_user
from ..compat import tree_leaves
from ..convert import half_to_float, map_tensors
from .matching import ROOT


class Forward:
    """A forward that replaces a module's own while a context is open; subclasses define `run`.

    `run` becomes the module's `forward`. It is not a hook, so `torch.compile` traces through it, and it is a method, so
    the next fit compiles nothing again. All learners that use the module share it. A callback that has wrapped it may
    call it after the end, when `on` is False. Copies of the module have the forward that it replaced.
    """
    run: Callable

    def __init__(self, module: nn.Module):
        self.module, self.on, self.users = module, False, set[Replaced]()
        _ = module.forward                                       # TorchScript puts it on the instance when it is read
        self.before = {k: v for k, v in vars(module).items() if k == 'forward'}   # a forward on the instance

    @property
    def plain(self) -> Callable: # Not kept: before PyTorch 2.14 Dynamo guards a kept method by its id
        return self.before.get('forward') or partial(type(self.module).forward, self.module)

    def put_on(self, user: Replaced) -> None:
        self.users.add(user)
        if not self.on:
            vars(self.module).update(forward=self.run, __reduce_ex__=self._reduce, __deepcopy__=self._deepcopy)
        self.on = True

    def take_off(self, user: Replaced) -> None:
        "Restore the module's forward, unless another context still uses this one."
        self.users.discard(user)
        if self.users: return
        if forward_of(self.module) is self: self._remove()
        self.on = False

    def _remove(self) -> None:
        for name in ('__reduce_ex__', '__deepcopy__'): vars(self.module).pop(name, None)
        vars(self.module).update(self.before)                    # `forward` last, for a second call after an interrupt
        if not self.before: vars(self.module).pop('forward', None)

    def _without(self, copy_module: Callable[[], Any]) -> Any:
        "Return what a function returns while the module has the forward that it had before."
        attributes = vars(self.module)
        try:
            # Another dict, because the state that `__reduce_ex__` returns is the dict itself.
            object.__setattr__(self.module, '__dict__', {**attributes})
            self._remove()
            return copy_module()
        finally: object.__setattr__(self.module, '__dict__', attributes)

    def _reduce(self, protocol: Any) -> Any: # As `copy.copy` and `pickle` ask the module itself
        return self._without(lambda: self.module.__reduce_ex__(protocol))
    def _deepcopy(self, memo: dict) -> nn.Module: # As `copy.deepcopy` asks
        return self._without(lambda: copy.deepcopy(self.module, memo))


def forward_of(module: nn.Module) -> Any:
    "Return the `Forward` that has replaced the module's own; None, or the object of another method, without one."
    return getattr(vars(module).get('forward'), '__self__', None)


_lock = threading.RLock()                                        # learners in several threads may share a model


class Replaced:
    "Context in which forwards of a model are replaced; several contexts may replace the same ones."
    def __init__(self,
        find: Callable[[nn.Module], dict[str, nn.Module]], # Returns the modules of a model by name
        kind: type[Forward], # What replaces their forwards
        model: nn.Module,
    ):
        self.find, self.kind, self.model, self.forwards = find, kind, model, dict[nn.Module, Forward]()

    def __enter__(self) -> None: self.add(self.model)

    def add(self, model: nn.Module) -> None:
        "Also replace the forwards in `model`; those that are replaced already stay."
        with _lock:
            for m in self.find(model).values():
                if m in self.forwards: continue
                there = forward_of(m)                            # another learner's
                self.forwards[m] = there if type(there) is self.kind else self.kind(m)
                self.forwards[m].put_on(self)                    # after it is noted: an interrupt here is undone

    def __exit__(self, *args: object) -> None:
        with _lock:
            for forward in reversed(self.forwards.values()): forward.take_off(self)


# -- modules kept in fp32

class Fp32Forward(Forward):
    "The forward of `module` with autocast off, and with 16-bit inputs as fp32."
    called = False

    def run(self, *args, **kwargs) -> Any:
        if not self.on: return self.plain(*args, **kwargs)
        self.called = True
        args, kwargs = map_tensors(half_to_float, (args, kwargs))
        inputs = (t.device for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        device_type = model_device(self.module, next(inputs, 'cpu')).type
        with torch.autocast(device_type, enabled=False): return self.plain(*args, **kwargs)


def warn_of_unused(
    kept: dict[str, nn.Module], # Modules kept in fp32, by name
) -> None:
    "Warn of modules whose forward never ran: the module around them may use their weights directly."
    for name, m in kept.items():
        if getattr(forward_of(m), 'called', True): continue
        warn_user(f"fp32_modules: '{name}' was not called in the first batch. If it never is, keeping it does nothing: "
                  'the module around it may use its weights directly, as MultiheadAttention does with out_proj.\n'
                  f"Keep '{name.rpartition('.')[0] or ROOT}' instead.")
