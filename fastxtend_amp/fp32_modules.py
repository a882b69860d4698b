"Which modules stay in fp32, and how?"
from __future__ import annotations

import difflib, fnmatch
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fastcore.foundation import L
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from .convert import is_half, to_fp32

__all__ = ['Fp32Forward', 'Fp32Modules', 'match_modules']

ROOT = '(model)'  # the name of the model itself among its modules
_LISTS = (list, tuple, set, frozenset, L)


def unwrapped(model: nn.Module) -> nn.Module:
    "The model inside `torch.compile`, `DistributedDataParallel` and `DataParallel`."
    while True:
        if isinstance(inner := getattr(model, '_orig_mod', None), nn.Module): model = inner
        elif isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)): model = model.module
        else: return model


def qualified_names(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    "Each place of the unwrapped model's tree and the module there, without what `torch.compile` puts into names."
    for name, module in unwrapped(model).named_modules(remove_duplicate=False):
        if name.endswith('_orig_mod'): continue                  # the compiled wrapper around it has the name
        yield '.'.join(part for part in name.split('.') if part != '_orig_mod') or ROOT, unwrapped(module)


def match_modules(
    model: nn.Module, # The model, as it is or compiled or wrapped for data parallelism
    spec: Any, # Names with wildcards ('head.*'), module types, modules, predicates on a module, or a list of these
    arg: str = 'fp32_modules', # The argument's name in errors
) -> dict[str, nn.Module]: # The matched modules by name, in the model's order; one inside a matched one is left out
    """The modules of `model` that `spec` means; `'(model)'` is the name of the whole.

    A module without a forward (`nn.ModuleList`, `nn.ModuleDict`) means the modules in it.

    Raises `ValueError` for a part of `spec` that matches nothing, with near names, and `TypeError` for one of another kind.
    """
    places, found = list(qualified_names(model)), {}
    for part in spec if isinstance(spec, _LISTS) else [spec]:
        test = _test(part, arg)
        hits = {name: m for name, m in places if test(name, m)}
        if not hits: raise ValueError(f"{arg}={part!r} matches no module of the model. {_near(part, places)} `learn.model.named_modules()` "
                                   "gives all names.")
        found.update(hits)
    holders = [name for name, m in found.items() if _only_holds(m)]
    found.update((name, m) for name, m in places if any(_inside(name, holder) for holder in holders))
    order = [(name, m) for name, m in places if name in found and not _only_holds(m)]
    found = dict(order)
    return {name: m for name, m in order if not any(_inside(name, other) for other in found)}


def _only_holds(m): return getattr(type(m), 'forward', None) is nn.Module.forward and 'forward' not in vars(m) and bool(m._modules)


def _inside(name, other): return name != other and (other == ROOT or name.startswith(other + '.'))


def _test(part, arg) -> Callable[[str, nn.Module], bool]:
    if isinstance(part, str): return lambda name, m: fnmatch.fnmatchcase(name, part)
    if isinstance(part, nn.Module):
        part = unwrapped(part)
        return lambda name, m: m is part
    if isinstance(part, type) and issubclass(part, nn.Module): return lambda name, m: isinstance(m, part)
    if callable(part) and not isinstance(part, type): return lambda name, m: bool(part(m))
    raise TypeError(f"{arg}={part!r} cannot be used: give names with wildcards such as 'head.*', module types such as nn.LayerNorm, modules of "
                    "the model, functions that take a module, or a list of these.")


def _near(part, places):
    if isinstance(part, str):
        names = [name for name, _ in places]
        near = difflib.get_close_matches(part, names, 4, .5) or [n for n in names if part.strip('*.').split('.')[0] in n][:4] or names[1:5]
        return f"Near names: {', '.join(map(repr, near))}." if near else 'The model has no modules inside.'
    kinds = sorted({type(m).__name__ for _, m in places})
    return f"It has modules of these types: {', '.join(kinds[:12])}{', ...' if len(kinds) > 12 else ''}."


class Fp32Forward:
    """Stands on a module as its own `forward`: the same forward with autocast off and half-precision inputs as fp32.

    An object that holds the module, and not a closure or a hook: so a pickled or copied module gets a copy that holds
    the copied module, and `torch.compile` traces through it.
    """
    def __init__(self, module: nn.Module):
        self.module, self.inner, self.called = module, module.__dict__.get('forward'), False

    def __call__(self, *args, **kwargs):
        self.called = True
        # `torch.compile` does not trace `to_fp32` into nested containers; pytree knows the built-in ones
        if torch.compiler.is_compiling(): args, kwargs = tree_map_only(torch.Tensor, _float, (args, kwargs))
        else: args, kwargs = to_fp32(args), to_fp32(kwargs)
        device_type = _device_type(args, kwargs, self.module)
        if not torch.is_autocast_enabled(device_type): return self._forward(*args, **kwargs)
        with torch.autocast(device_type, enabled=False): return self._forward(*args, **kwargs)

    def _forward(self, *args, **kwargs):
        return type(self.module).forward(self.module, *args, **kwargs) if self.inner is None else self.inner(*args, **kwargs)

    def onto(self, module: nn.Module) -> None:
        "Do for `module`, a shallow copy, what this one does for the module it was copied from."
        module.forward = f = type(self)(module)
        f.inner, f.called = self.inner, self.called

    def remove(self) -> None:
        "Give the module the forward back that it had."
        if self.module.__dict__.get('forward') is not self: return
        if self.inner is None: del self.module.forward
        else: self.module.forward = self.inner


def _float(t): return t.float() if is_half(t) else t


def _device_type(args, kwargs, module) -> str:
    p = next(module.parameters(), None)                          # first: lengths and the like may stay on the CPU
    if p is not None: return p.device.type
    types = [x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    return next((t for t in types if t != 'cpu'), 'cpu')


class Fp32Modules:
    "The modules of one model that are kept in fp32."
    def __init__(self, spec: Any, arg: str = 'fp32_modules'):
        self.spec, self.arg = spec, arg
        self.forwards: dict[str, Fp32Forward] = {}               # by the module's name
        for part in spec if isinstance(spec, _LISTS) else () if spec is None else [spec]: _test(part, arg)

    def check(self, model: nn.Module) -> dict[str, nn.Module]:
        "The modules that `apply` would keep; raises what `match_modules` does."
        if self.spec is None or (isinstance(self.spec, _LISTS) and not self.spec): return {}
        modules = match_modules(model, self.spec, self.arg)
        for name, m in modules.items():
            if isinstance(m, torch.jit.ScriptModule):
                raise ValueError(f"{self.arg}: module '{name}' is a TorchScript module, whose forward cannot be replaced. Keep the module around it.")
        return modules

    def apply(self, model: nn.Module) -> None:
        "Keep them in fp32 from now on; those that are kept already stay as they are, so that nothing is compiled again."
        modules = self.check(model)
        for name, f in list(self.forwards.items()):
            if modules.get(name) is not f.module: self.forwards.pop(name).remove()
        for name, m in modules.items():
            own = m.__dict__.get('forward')
            if not isinstance(own, Fp32Forward): m.forward = own = Fp32Forward(m)
            self.forwards[name] = own

    def remove(self) -> None:
        "Let all of them go."
        for f in self.forwards.values(): f.remove()
        self.forwards = {}

    def covers(self, name: str) -> bool:
        "Is the module of this name kept, itself or with one around it?"
        return any(name == kept or _inside(name, kept) for kept in self.forwards)

    def never_called(self) -> dict[str, str]:
        "Kept modules whose forward never ran, each with the module around it; their parents may use their weights directly."
        return {name: name.rpartition('.')[0] or ROOT for name, f in self.forwards.items() if not f.called}


@contextmanager
def kept_in_fp32(model: nn.Module, spec: Any) -> Iterator[None]:
    "Keep the modules that `spec` means in fp32 inside."
    fp32_modules, before = Fp32Modules(spec), {id(m): m.__dict__.get('forward') for m in unwrapped(model).modules()}
    fp32_modules.apply(model)
    try: yield
    finally:
        for f in fp32_modules.forwards.values():
            if before[id(f.module)] is not f: f.remove()         # the others are the learner's own
