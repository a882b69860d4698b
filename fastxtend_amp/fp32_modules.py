"Modules kept in fp32: matching by name, type, module or predicate, and the forward that turns autocast off."
from __future__ import annotations

import difflib, fnmatch
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fastcore.foundation import L
from torch import nn

from .compat import COMPILED_NAME, compiled_module, map_tensors_traced, tensors_in
from .convert import half_to_float, to_fp32
from .forward import ModuleForward

__all__ = ['Fp32Forward', 'Fp32Modules', 'match_modules']

ROOT = '(model)'  # the name of the model itself among its modules
_LISTS = (list, tuple, set, frozenset, L)


def unwrapped(model: nn.Module) -> nn.Module:
    "The model inside `torch.compile`, `DistributedDataParallel` and `DataParallel`."
    while True:
        if (inner := compiled_module(model)) is not None: model = inner
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)): model = model.module
        else: return model


def qualified_names(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    "Each place of the unwrapped model's tree and the module there, without what `torch.compile` puts into names."
    for name, module in unwrapped(model).named_modules(remove_duplicate=False):
        if name.endswith(COMPILED_NAME): continue                  # the compiled wrapper around it has the name
        yield '.'.join(part for part in name.split('.') if part != COMPILED_NAME) or ROOT, unwrapped(module)


def match_modules(
    model: nn.Module, # The model, as it is or compiled or wrapped for data parallelism
    spec: Any, # Names with wildcards ('head.*'), module types, modules, predicates on a module, or a list of these
) -> dict[str, nn.Module]: # The matched modules by name, in the model's order; one inside a matched one is left out
    """The modules of `model` that `spec` means; `'(model)'` is the name of the whole.

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
    holders = [name for name, m in found.items() if _only_holds(m)]
    found.update((name, m) for name, m in places if any(_inside(name, holder) for holder in holders))
    found = {name: m for name, m in places if name in found and not _only_holds(m)}   # in the model's order
    return {name: m for name, m in found.items() if not any(_inside(name, other) for other in found)}


def _parts(spec: Any) -> list:
    "`spec` as a list."
    if spec is None: return []
    return list(spec) if isinstance(spec, _LISTS) else [spec]


def _only_holds(m: nn.Module) -> bool:
    "Is `m` a container without a forward of its own, such as `nn.ModuleList`?"
    has_forward = getattr(type(m), 'forward', None) is not nn.Module.forward or 'forward' in vars(m)
    return not has_forward and any(True for _ in m.children())


def _inside(name: str, other: str) -> bool: return name != other and (other == ROOT or name.startswith(other + '.'))


def _test(part: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(part, str): return lambda name, m: fnmatch.fnmatchcase(name, part)
    if isinstance(part, nn.Module):
        part = unwrapped(part)
        return lambda name, m: m is part
    if isinstance(part, type) and issubclass(part, nn.Module): return lambda name, m: isinstance(m, part)
    if callable(part) and not isinstance(part, type): return lambda name, m: bool(part(m))
    raise TypeError(f"fp32_modules={part!r} cannot be used.\n"
                    "Give names with wildcards such as 'head.*', module types such as nn.LayerNorm, modules of the "
                    "model, functions that take a module, or a list of these.")


def _near(part: Any, places: list[tuple[str, nn.Module]]) -> str:
    "What the model has that is near to `part`, for an error."
    if isinstance(part, str):
        names = [name for name, _ in places]
        same_start = [n for n in names if part.strip('*.').split('.')[0] in n]
        near = difflib.get_close_matches(part, names, 4, .5) or same_start[:4] or names[1:5]
        return f"Near names: {', '.join(map(repr, near))}." if near else 'The model has no modules inside.'
    kinds = sorted({type(m).__name__ for _, m in places})
    return f"It has modules of these types: {', '.join(kinds[:12])}{', ...' if len(kinds) > 12 else ''}."


class Fp32Forward(ModuleForward):
    "Runs a module's forward with autocast off, and with half-precision inputs as fp32."
    def __init__(self, module: nn.Module):
        super().__init__(module)
        self.called = False                                      # has the module's forward run since?

    def __call__(self, *args, **kwargs) -> Any:
        self.called = True
        # `torch.compile` does not trace `to_fp32` into nested containers; pytree knows the built-in ones
        if torch.compiler.is_compiling(): args, kwargs = map_tensors_traced(half_to_float, (args, kwargs))
        else: args, kwargs = to_fp32(args), to_fp32(kwargs)
        device_type = _device_type(args, kwargs, self.module)
        # An exported program has to switch it off even if it is off now: it may be on where the program runs.
        needless = not torch.is_autocast_enabled(device_type) and not torch.compiler.is_exporting()
        if needless: return self.run(*args, **kwargs)
        with torch.autocast(device_type, enabled=False): return self.run(*args, **kwargs)


def _device_type(args, kwargs, module) -> str:
    p = next(module.parameters(), None)                          # first: lengths and the like may stay on the CPU
    if p is not None: return p.device.type
    types = [t.device.type for t in tensors_in((args, kwargs))]
    return next((t for t in types if t != 'cpu'), 'cpu')


class Fp32Modules:
    "The modules of one model that are kept in fp32."
    def __init__(self, spec: Any): # As in `match_modules`; None for no module
        self.spec = spec
        self.forwards: dict[str, Fp32Forward] = {}               # by the module's name
        for part in _parts(spec): _test(part)

    def check(self, model: nn.Module) -> dict[str, nn.Module]:
        "The modules that `apply` would keep; raises what `match_modules` does."
        if not _parts(self.spec): return {}
        modules = match_modules(model, self.spec)
        for name, m in modules.items():
            if isinstance(m, torch.jit.ScriptModule):
                raise ValueError(f"fp32_modules: module '{name}' is a TorchScript module, whose forward cannot be "
                                 "replaced.\nKeep the module around it.")
        return modules

    def apply(self, model: nn.Module) -> None:
        "Keep them in fp32 from now on; those kept already stay as they are, so that nothing is compiled again."
        modules = self.check(model)
        for name, f in list(self.forwards.items()):
            if modules.get(name) is not f.module: self.forwards.pop(name).remove()
        for name, m in modules.items():
            own = m.__dict__.get('forward')
            if not isinstance(own, Fp32Forward):
                own = Fp32Forward(m)
                own.install()
            self.forwards[name] = own

    def remove(self) -> None:
        "Let all of them go."
        for f in self.forwards.values(): f.remove()
        self.forwards = {}

    def covers(self, name: str) -> bool:
        "Is the module of this name kept, itself or with one around it?"
        return any(name == kept or _inside(name, kept) for kept in self.forwards)

    def never_called(self) -> dict[str, str]:
        "Kept modules whose forward never ran, each with the module around it, which may use its weights directly."
        return {name: name.rpartition('.')[0] or ROOT for name, f in self.forwards.items() if not f.called}


@contextmanager
def kept_in_fp32(model: nn.Module, spec: Any) -> Iterator[None]:
    "Keep the modules that `spec` means in fp32 inside."
    kept, before = Fp32Modules(spec), {id(m): m.__dict__.get('forward') for m in unwrapped(model).modules()}
    kept.apply(model)
    try: yield
    finally:
        for f in kept.forwards.values():
            if before[id(f.module)] is not f: f.remove()         # the others are the learner's own
