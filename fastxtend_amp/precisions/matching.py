"Modules of a model, found by name, type, module or predicate, also in compiled and wrapped models."
from __future__ import annotations

import difflib, fnmatch
from collections.abc import Callable, Collection, Iterator
from typing import Any

from fastcore.foundation import L
from torch import nn

from ..common import type_name
from ..compat import COMPILED_NAME, compiled_module

__all__ = ['ROOT', 'covers', 'match_modules', 'parts_of', 'qualified_names', 'test_of', 'unwrapped']

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
    for part in parts_of(spec):
        test = test_of(part, argument)
        hits = {name: m for name, m in places if test(name, m)}
        if not hits:
            raise ValueError(f"{argument}={part!r} matches no module of the model.\n{_near(part, places)}\n"
                             "`learn.model.named_modules()` gives all names.")
        found.update(hits)
    holders = {name for name, m in found.items() if _only_holds(m)}
    kept = {name: m for name, m in places if (name in found or covers(holders, name)) and not _only_holds(m)}
    return {name: m for name, m in kept.items() if not any(outer in kept for outer in _around(name))}


def parts_of(spec: Any) -> list:
    "Return the single names, types, modules and predicates of `spec`."
    if spec is None: return []
    return list(spec) if isinstance(spec, _LISTS) else [spec]


def _only_holds(m: nn.Module) -> bool:
    "Return whether `m` is a container without a forward, such as `nn.ModuleList`."
    has_forward = getattr(type(m), 'forward', None) is not nn.Module.forward or 'forward' in vars(m)
    return not has_forward and any(True for _ in m.children())


def _around(name: str) -> Iterator[str]:
    "Yield the names of the modules around one, from the inside to the whole model."
    if name == ROOT: return
    while '.' in name: yield (name := name.rpartition('.')[0])
    yield ROOT


def test_of(part: Any, argument: str) -> Callable[[str, nn.Module], bool]:
    "Return a test of a module and its name for one part; raise `TypeError` for a part of another kind."
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


def covers(
    names: Collection[str], # Of modules that are kept
    name: str, # Of a module
) -> bool:
    "Return whether the module `name` is among `names`, itself or with one around it."
    return name in names or any(outer in names for outer in _around(name))
