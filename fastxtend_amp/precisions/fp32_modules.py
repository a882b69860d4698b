"Replaces the forwards of modules: those of modules kept in fp32 turn autocast off."
from __future__ import annotations

import copy, threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from ..common import warn_user
from ..compat import tree_leaves
from ..convert import to_fp32
from .matching import ROOT, match_modules, parts_of, test_of

__all__ = ['Forward', 'Fp32Modules', 'Replaced', 'Replacement']


class Forward:
    """A forward that replaces a module's own while a context is open.

    An object on the module's `forward`, not a hook, so that `torch.compile` traces through it. All learners that use
    the module share it. While it is off it runs the forward that it replaced. Copies of the module have their own.
    """
    def __init__(self, name: str, module: nn.Module):
        self.name, self.module, self.own = name, module, None    # the forward that was on the instance
        self.on = self.called = False                            # whether it is in use; whether it has run
        self.is_wrapped = False                                  # another object's forward calls this one
        self.users: set[Replaced] = set()                        # contexts that have put it on

    @property
    def plain(self) -> Callable: return self.own or partial(type(self.module).forward, self.module)

    def put_on(self, user: Replaced) -> None:
        self.users.add(user)
        attributes = vars(self.module)
        if not self.on and attributes.get('forward') is not self:
            self.own = attributes.get('forward')
            attributes.update(forward=self, __reduce_ex__=self._reduce, __deepcopy__=self._deepcopy)
        self.on = True

    def take_off(self, user: Replaced) -> None:
        "Restore the module's forward, unless another context still uses this one."
        self.users.discard(user)
        if self.users: return
        if vars(self.module).get('forward') is self: vars(self.module).update(self._remove())
        elif self.on: self.is_wrapped = True
        self.on = False                                          # last: after an interrupt this is called again

    def _remove(self) -> dict[str, Any]: # What the instance had
        for name in _ATTRIBUTES: vars(self.module).pop(name, None)
        return {} if self.own is None else {'forward': self.own}

    def _reduce(self, protocol: int) -> tuple: # As `copy.copy` and `pickle` ask the module itself
        reduced: Any = type(self.module).__reduce_ex__(self.module, protocol)
        function, arguments, state, *rest = reduced
        state = {k: v for k, v in state.items() if k not in _ATTRIBUTES}
        if self.own is not None: state['forward'] = self.own
        return function, arguments, state, *rest

    def _deepcopy(self, memo: dict) -> nn.Module: # As `copy.deepcopy` asks; parametrized modules copy their attributes
        attributes = vars(self.module)
        ours = {name: attributes[name] for name in _ATTRIBUTES if name in attributes}
        try:
            attributes.update(self._remove())
            return copy.deepcopy(self.module, memo)
        finally: attributes.update(ours)


_ATTRIBUTES = ('forward', '__reduce_ex__', '__deepcopy__')


class Replacement:
    "The modules of a model that `find` returns by name, and the forwards that replace theirs."
    def __init__(self, find: Callable[[nn.Module], dict[str, nn.Module]], kind: type[Forward]):
        self.find, self.kind = find, kind
        self.forwards: dict[nn.Module, Forward] = {}             # kept, so that nothing is compiled again

    def __getstate__(self) -> dict[str, Any]: return {**vars(self), 'forwards': {}}

    def in_model(self, model: nn.Module) -> Replaced:
        "Return a context that replaces the forwards in `model`."
        return Replaced(self, model)


_lock = threading.RLock()                                        # learners in several threads may share a model


class Replaced:
    "Context in which forwards are replaced; several contexts may replace the same ones."
    def __init__(self, replacement: Replacement, model: nn.Module):
        self.replacement, self.model, self.forwards = replacement, model, dict[Forward, None]()

    def __enter__(self) -> Replaced:
        forwards = self.replacement.forwards
        if forwards:                                             # models that were exchanged would stay in memory
            there = {*self.model.modules()}
            unused = [m for m, f in forwards.items() if not f.users and (f.is_wrapped or m not in there)]
            for m in unused: del forwards[m]
        self.add(self.model)
        return self

    def add(self, model: nn.Module) -> None:
        "Also replace the forwards in `model`; those that are replaced already stay."
        forwards, kind = self.replacement.forwards, self.replacement.kind
        with _lock:
            for name, m in self.replacement.find(model).items():
                if type(there := vars(m).get('forward')) is kind: forwards[m] = there   # another learner's
                if m not in forwards: forwards[m] = kind(name, m)
                self.forwards[forwards[m]] = None                # first: an interrupt in `put_on` is undone
                forwards[m].put_on(self)

    def __exit__(self, *args: object) -> None:
        with _lock:
            for forward in reversed(self.forwards): forward.take_off(self)


# -- modules kept in fp32

class Fp32Forward(Forward):
    "The forward of `module` with autocast off, and with 16-bit inputs as fp32."
    def __call__(self, *args, **kwargs) -> Any:
        if not self.on: return self.plain(*args, **kwargs)
        self.called = True
        args, kwargs = to_fp32(args), to_fp32(kwargs)
        device_type = _device_type(args, kwargs, self.module)
        # An exported program has to turn it off even if it is off during the export: it may be on where it runs.
        needless = not torch.is_autocast_enabled(device_type) and not torch.compiler.is_exporting()
        with nullcontext() if needless else torch.autocast(device_type, enabled=False):
            return self.plain(*args, **kwargs)


def _device_type(args, kwargs, module) -> str:
    p = next(module.parameters(), None)                          # first: inputs may stay on the CPU, as lengths do
    if p is not None: return p.device.type
    types = [t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return next((t for t in types if t != 'cpu'), 'cpu')


class Fp32Modules(Replacement):
    "The modules that `spec` means, to keep in fp32 in whichever model is run."
    def __init__(self, spec: Any): # As in `match_modules`; None for no module
        super().__init__(self.check, Fp32Forward)
        self.spec = spec
        for part in parts_of(spec): test_of(part, 'fp32_modules')

    def check(self, model: nn.Module) -> dict[str, nn.Module]: # The modules to keep, by name
        "Raise what `match_modules` does, and `ValueError` for modules whose forward cannot be replaced."
        if not parts_of(self.spec): return {}
        modules = match_modules(model, self.spec)
        for name, m in modules.items():
            if isinstance(m, torch.jit.ScriptModule):
                raise ValueError(f"fp32_modules: module '{name}' is a TorchScript module, whose forward cannot be "
                                 "replaced.\nKeep the module around it.")
        return modules

    def warn_of_unused(self) -> None:
        "Warn of modules whose forward never ran: the module around them may use their weights directly."
        for f in self.forwards.values():
            if f.called: continue
            warn_user(f"fp32_modules: '{f.name}' was not called in the first batch. If it never is, keeping it does "
                      "nothing: the module around it may use its weights directly, as MultiheadAttention does with "
                      f"out_proj.\nKeep '{f.name.rpartition('.')[0] or ROOT}' instead.")
