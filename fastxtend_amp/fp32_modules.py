"Modules kept in fp32: matching by name, type, module or predicate, and the forward that turns autocast off."
from __future__ import annotations

import difflib, fnmatch
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from fastcore.foundation import L
from torch import nn

from .compat import COMPILED_NAME, compiled_module, tree_leaves
from .common import type_name, warn_user
from .convert import to_fp32

__all__ = ['ROOT', 'Fp32Context', 'Fp32Modules', 'covers', 'match_modules', 'qualified_names', 'unwrapped']

ROOT = '(model)'  # the name of the model itself among its modules
_LISTS = (list, tuple, set, frozenset, L)


def unwrapped(model: nn.Module) -> nn.Module:
    "Return the model inside `torch.compile`, `DistributedDataParallel` and `DataParallel`."
    while True:
        if (inner := compiled_module(model)) is not None: model = inner
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)): model = model.module
        else: return model


def qualified_names(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    "Yield each place of the unwrapped model's tree and the module there, without what `torch.compile` puts into names."
    for name, module in unwrapped(model).named_modules(remove_duplicate=False):
        if name.endswith(COMPILED_NAME): continue                  # the compiled wrapper around it has the name
        yield '.'.join(part for part in name.split('.') if part != COMPILED_NAME) or ROOT, unwrapped(module)


def match_modules(
    model: nn.Module, # The model, as it is or compiled or wrapped for data parallelism
    spec: Any, # Names with wildcards ('head.*'), module types, modules, predicates on a module, or a list of these
    argument: str = 'fp32_modules', # The argument that `spec` is, for errors
) -> dict[str, nn.Module]: # The matched modules by name, in the model's order; one inside a matched one is left out
    """Return the modules of `model` that `spec` means; `'(model)'` is the name of the whole.

    A module without a forward (`nn.ModuleList`, `nn.ModuleDict`) means the modules in it.

    Raises `ValueError`, with near names, for a part of `spec` that matches nothing, and `TypeError` for one of another
    kind.
    """
    places, found = list(qualified_names(model)), {}
    for part in _parts(spec):
        test = _test(part, argument)
        hits = {name: m for name, m in places if test(name, m)}
        if not hits:
            raise ValueError(f"{argument}={part!r} matches no module of the model.\n{_near(part, places)}\n"
                             "`learn.model.named_modules()` gives all names.")
        found.update(hits)
    kept = [name for name, m in found.items() if not _only_holds(m)]
    kept += [name for name, m in places if not _only_holds(m) and any(_inside(name, holder) for holder in found)]
    return {name: m for name, m in places if name in kept and not any(_inside(name, other) for other in kept)}


def _parts(spec: Any) -> list:
    if spec is None: return []
    return list(spec) if isinstance(spec, _LISTS) else [spec]


def _only_holds(m: nn.Module) -> bool:
    "Return whether `m` is a container without a forward, such as `nn.ModuleList`."
    has_forward = getattr(type(m), 'forward', None) is not nn.Module.forward or 'forward' in vars(m)
    return not has_forward and any(True for _ in m.children())


def _inside(name: str, other: str) -> bool: return name != other and (other == ROOT or name.startswith(other + '.'))


def _test(part: Any, argument: str) -> Callable[[str, nn.Module], bool]:
    if isinstance(part, str): return lambda name, m: name == part or fnmatch.fnmatchcase(name, part)
    if isinstance(part, nn.Module):
        part = unwrapped(part)
        return lambda name, m: m is part
    if isinstance(part, type) and issubclass(part, nn.Module): return lambda name, m: isinstance(m, part)
    if callable(part) and not isinstance(part, type): return lambda name, m: bool(part(m))
    raise TypeError(f"{argument}={part!r} cannot be used.\n"
                    "Give names with wildcards such as 'head.*', module types such as nn.LayerNorm, modules of the "
                    "model, functions that take a module, or a list of these.")


def _near(part: Any, places: list[tuple[str, nn.Module]]) -> str:
    "Return what the model has that is near to `part`, for an error."
    if isinstance(part, str):
        kind = next((type(m) for _, m in places if type(m).__name__ == part), None)
        if kind is not None: return f"'{part}' is a type: give `{type_name(kind)}` itself, not its name."
        names = [name for name, _ in places]
        near = difflib.get_close_matches(part, names, 4, .5) or names[1:5]
        return f"Near names: {', '.join(map(repr, near))}." if near else 'The model has no modules inside.'
    kinds = sorted({type(m).__name__ for _, m in places})
    return f"It has modules of these types: {', '.join(kinds[:12])}{', ...' if len(kinds) > 12 else ''}."


class Fp32Forward:
    """The forward of `module` with autocast off, and with half-precision inputs as fp32.

    An object on the module's `forward`, and not a hook: `torch.compile` traces through it. While it is off it runs the
    forward that was there. A copy of the module that is made meanwhile is a plain one.
    """
    def __init__(self, name: str, module: nn.Module):
        self.name, self.module, self.own = name, module, None    # the forward that was on the instance
        self.on = self.called = False                            # whether it is in use; whether it has run
        self.is_wrapped = False                                  # another object's forward calls this one
        self.users: set[Fp32Context] = set()                     # contexts that have put it on

    def __call__(self, *args, **kwargs) -> Any:
        if not self.on: return self.plain(*args, **kwargs)
        self.called = True
        args, kwargs = to_fp32(args), to_fp32(kwargs)
        device_type = _device_type(args, kwargs, self.module)
        # An exported program has to turn it off even if it is off during the export: it may be on where it runs.
        needless = not torch.is_autocast_enabled(device_type) and not torch.compiler.is_exporting()
        with nullcontext() if needless else torch.autocast(device_type, enabled=False):
            return self.plain(*args, **kwargs)

    @property
    def plain(self) -> Callable: return self.own or partial(type(self.module).forward, self.module)

    def put_on(self, user: Fp32Context) -> None:
        self.users.add(user)
        attributes = vars(self.module)
        if not self.on and attributes.get('forward') is not self:
            self.own = attributes.get('forward')
            attributes.update(forward=self, __reduce_ex__=self._reduce)
        self.on = True

    def take_off(self, user: Fp32Context) -> None:
        "Give the module back the forward that it had, unless another context keeps this one on."
        self.users.discard(user)
        if self.users: return
        self.on = False
        attributes = vars(self.module)
        self.is_wrapped = attributes.get('forward') is not self
        if self.is_wrapped: return
        del attributes['forward']
        attributes.pop('__reduce_ex__', None)
        if self.own is not None: attributes['forward'] = self.own

    def _reduce(self, protocol: int) -> tuple: # As `copy` and `pickle` ask the module itself for
        reduced: Any = type(self.module).__reduce_ex__(self.module, protocol)
        function, arguments, state, *rest = reduced
        state = {k: v for k, v in state.items() if k not in ('forward', '__reduce_ex__')}
        if self.own is not None: state['forward'] = self.own
        return function, arguments, state, *rest


def _device_type(args, kwargs, module) -> str:
    p = next(module.parameters(), None)                          # first: lengths and the like may stay on the CPU
    if p is not None: return p.device.type
    types = [t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return next((t for t in types if t != 'cpu'), 'cpu')


class Fp32Modules:
    "The modules that `spec` means, to keep in fp32 in whichever model is run."
    forward = Fp32Forward

    def __init__(self, spec: Any, argument: str = 'fp32_modules'): # As in `match_modules`; None for no module
        self.spec = spec
        self.forwards: dict[nn.Module, Fp32Forward] = {}         # kept, so that nothing is compiled anew
        for part in _parts(spec): _test(part, argument)

    def __getstate__(self) -> dict[str, Any]: return {'spec': self.spec, 'forwards': {}}

    def check(self, model: nn.Module) -> dict[str, nn.Module]: # The modules to keep, by name
        "Raise what `match_modules` does, and a `ValueError` for modules whose forward cannot be replaced."
        if not _parts(self.spec): return {}
        modules = match_modules(model, self.spec)
        for name, m in modules.items():
            if isinstance(m, torch.jit.ScriptModule):
                raise ValueError(f"fp32_modules: module '{name}' is a TorchScript module, whose forward cannot be "
                                 "replaced.\nKeep the module around it.")
        return modules

    def warn_of_unused(self) -> None:
        "Warn of kept modules whose forward never ran: the module around such a one may use its weights."
        for f in self.forwards.values():
            if f.called: continue
            warn_user(f"fp32_modules: '{f.name}' was not called in the first batch. If it never is, keeping it does "
                      "nothing: the module around it may use its weights directly, as MultiheadAttention does with "
                      f"out_proj.\nKeep '{f.name.rpartition('.')[0] or ROOT}' instead.")


class Fp32Context:
    "Keeps modules in fp32 inside; several contexts may keep the same modules."
    def __init__(self, modules: Fp32Modules, model: nn.Module):
        self.modules, self.model, self.forwards = modules, model, dict[Fp32Forward, None]()

    def __enter__(self) -> Fp32Context:
        forwards = self.modules.forwards
        if forwards:                                             # models that were exchanged would stay in memory
            there = {*self.model.modules()}
            unused = [m for m, f in forwards.items() if not f.users and (f.is_wrapped or m not in there)]
            for m in unused: del forwards[m]
        self.add(self.model)
        return self

    def add(self, model: nn.Module) -> None:
        "Keep the modules of `model`, too; those that are kept already stay as they are."
        for name, m in self.modules.check(model).items():
            forwards = self.modules.forwards
            if m not in forwards: forwards[m] = self.modules.forward(name, m)
            forward = forwards[m]
            self.forwards[forward] = None                        # first: an interrupt in `put_on` is undone
            forward.put_on(self)

    def __exit__(self, *args: object) -> None:
        for forward in reversed(self.forwards): forward.take_off(self)


def covers(
    names: Iterable[str], # Of modules that are kept
    name: str, # Of a module
) -> bool:
    "Return whether the module `name` is among `names`, itself or with one around it."
    return any(name == kept or _inside(name, kept) for kept in names)
