"Modules kept in fp32: matching by name, type, module or predicate, and the forward that turns autocast off."
from __future__ import annotations

import difflib, fnmatch
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from fastcore.foundation import L
from torch import nn

from .compat import COMPILED_NAME, compiled_module, tree_leaves
from .common import type_name
from .convert import to_fp32

__all__ = ['ROOT', 'Fp32Modules', 'covers', 'match_modules', 'qualified_names', 'unwrapped']

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
) -> dict[str, nn.Module]: # The matched modules by name, in the model's order; one inside a matched one is left out
    """Return the modules of `model` that `spec` means; `'(model)'` is the name of the whole.

    A module without a forward (`nn.ModuleList`, `nn.ModuleDict`) means the modules in it.

    Raises `ValueError`, with near names, for a part of `spec` that matches nothing, and `TypeError` for one of another
    kind.
    """
    places, found = list(qualified_names(model)), {}
    for part in _parts(spec):
        test = _test(part)
        hits = {name: m for name, m in places if test(name, m)}
        if not hits:
            raise ValueError(f"fp32_modules={part!r} matches no module of the model.\n{_near(part, places)}\n"
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


def _test(part: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(part, str): return lambda name, m: name == part or fnmatch.fnmatchcase(name, part)
    if isinstance(part, nn.Module):
        part = unwrapped(part)
        return lambda name, m: m is part
    if isinstance(part, type) and issubclass(part, nn.Module): return lambda name, m: isinstance(m, part)
    if callable(part) and not isinstance(part, type): return lambda name, m: bool(part(m))
    raise TypeError(f"fp32_modules={part!r} cannot be used.\n"
                    "Give names with wildcards such as 'head.*', module types such as nn.LayerNorm, modules of the "
                    "model, functions that take a module, or a list of these.")


def _near(part: Any, places: list[tuple[str, nn.Module]]) -> str:
    "Return what the model has that is near to `part`, for an error."
    if isinstance(part, str):
        kind = next((type(m) for _, m in places if type(m).__name__ == part), None)
        if kind is not None: return f"'{part}' is a type: give `{type_name(kind)}` itself, not its name."
        names = [name for name, _ in places]
        near = difflib.get_close_matches(part, names, 4, .5) or names[1:5]
        return f"Near names: {', '.join(map(repr, near))}."
    kinds = sorted({type(m).__name__ for _, m in places})
    return f"It has modules of these types: {', '.join(kinds[:12])}{', ...' if len(kinds) > 12 else ''}."


class Fp32Forward:
    """The forward of `module` with autocast off, and with half-precision inputs as fp32.

    An object on the module's `forward`, and not a hook: it can be copied with the module, and `torch.compile` traces
    through it.
    """
    def __init__(self, name: str, module: nn.Module):
        self.name, self.module, self.own = name, module, None    # the forward that was on the instance
        self.called = False                                      # whether the module's forward has run since

    def __reduce__(self):                                        # a copy of the module computes as the model does alone
        return partial, (self.own,) if self.own else (type(self.module).forward, self.module)

    def __call__(self, *args, **kwargs) -> Any:
        self.called = True
        run = self.own or partial(type(self.module).forward, self.module)
        args, kwargs = to_fp32(args), to_fp32(kwargs)
        device_type = _device_type(args, kwargs, self.module)
        # An exported program has to switch it off even if it is off now: it may be on where the program runs.
        needless = not torch.is_autocast_enabled(device_type) and not torch.compiler.is_exporting()
        with nullcontext() if needless else torch.autocast(device_type, enabled=False): return run(*args, **kwargs)

    def put_on(self) -> None:
        forward = self.module.__dict__.get('forward')
        if forward is self: return
        self.own, self.module.__dict__['forward'] = forward, self

    def take_off(self) -> None:
        if self.module.__dict__.get('forward') is not self: return
        if self.own is not None: self.module.__dict__['forward'] = self.own
        else: del self.module.__dict__['forward']


def _device_type(args, kwargs, module) -> str:
    p = next(module.parameters(), None)                          # first: lengths and the like may stay on the CPU
    if p is not None: return p.device.type
    types = [t.device.type for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return next((t for t in types if t != 'cpu'), 'cpu')


class Fp32Modules:
    "The modules of one model to keep in fp32 inside `kept`."
    def __init__(self, spec: Any): # As in `match_modules`; None for no module
        self.spec = spec
        self.forwards: dict[nn.Module, Fp32Forward] = {}         # kept, so that nothing is compiled anew
        self.depth = 0                                           # how many `kept` contexts are entered
        self.model: nn.Module | None = None                      # the one whose modules are kept now
        for part in _parts(spec): _test(part)

    def __getstate__(self) -> dict[str, Any]: return {'spec': self.spec, 'forwards': {}, 'depth': 0, 'model': None}

    def check(self, model: nn.Module) -> dict[str, nn.Module]: # The modules to keep, by name
        "Raise what `match_modules` does, and a `ValueError` for modules whose forward cannot be replaced."
        if not _parts(self.spec): return {}
        modules = match_modules(model, self.spec)
        for name, m in modules.items():
            if isinstance(m, torch.jit.ScriptModule):
                raise ValueError(f"fp32_modules: module '{name}' is a TorchScript module, whose forward cannot be "
                                 "replaced.\nKeep the module around it.")
        return modules

    @contextmanager
    def kept(self, model: nn.Module) -> Iterator[None]:
        "Keep the modules in fp32 inside; nested contexts share the outermost one's forwards."
        outer = self.depth
        try:
            self.depth = outer + 1
            if not outer and self.forwards:                      # else models that were exchanged stay in memory
                modules = {*model.modules()}
                self.forwards = {m: f for m, f in self.forwards.items() if m in modules}
            self.put_on(model)
            yield
            self._leave(outer)
        except BaseException:                                    # also an interrupt in `_leave`, which begins anew
            self._leave(outer)
            raise

    def _leave(self, depth: int) -> None:
        self.depth = depth
        if not depth: self.take_off()

    def put_on(self, model: nn.Module) -> None:
        "Put a forward on each module to keep; those that have theirs stay as they are."
        self.model = model
        for name, m in self.check(model).items():
            if m not in self.forwards: self.forwards[m] = Fp32Forward(name, m)
            self.forwards[m].put_on()

    def take_off(self) -> None:
        "Give the modules back the forwards that they had."
        for f in self.forwards.values(): f.take_off()
        self.model = None

    def never_called(self) -> dict[str, str]:
        "Return the kept modules whose forward never ran, each with the module around it, which may use its weights."
        return {f.name: f.name.rpartition('.')[0] or ROOT for f in self.forwards.values() if not f.called}


def covers(
    names: Iterable[str], # Of modules that are kept
    name: str, # Of a module
) -> bool:
    "Return whether the module `name` is among `names`, itself or with one around it."
    return any(name == kept or _inside(name, kept) for kept in names)
