"Conversion of the tensors in nested predictions, targets and inputs: half precision to fp32, and off their graph."
from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from fastcore.foundation import L

from .compat import dtype_of

HALF = (torch.float16, torch.bfloat16)


def is_half(t: torch.Tensor) -> bool:
    "Is `t` fp16 or bf16?"
    return dtype_of(t) in HALF


def half_to_float(t: torch.Tensor) -> torch.Tensor:
    "`t` in fp32 if it is fp16 or bf16; else `t` itself."
    return t.float() if is_half(t) else t


def to_fp32(
    x: Any, # A tensor, or tensors in containers; see `map_tensors`
) -> Any: # `x` itself where nothing changed; otherwise a copy of the same type
    """Turn every fp16 or bf16 tensor in `x` into fp32; every other leaf and every container's type stays.

    fastai's `to_float` also turns fp64 into fp32 and dict subclasses into dicts, and fails on None and strings.
    """
    return map_tensors(half_to_float, x)


def detached(
    x: Any, # A tensor, or tensors in containers; see `map_tensors`
) -> Any: # `x` itself where nothing changed; otherwise a copy of the same type
    "Cut every tensor in `x` off its graph: others cannot be deep-copied."
    return map_tensors(lambda t: t.detach() if t.grad_fn is not None else t, x)


def release_graphs(
    learn: Any, # A learner
) -> None:
    "Take what fastai leaves on `learn` after a batch off its graph, which could not be deep-copied or moved."
    own = vars(learn)
    for name in ('xb', 'yb', 'pred', 'loss', 'loss_grad'):
        if name in own: own[name] = detached(own[name])


def map_tensors(
    f: Callable[[torch.Tensor], torch.Tensor],
    x: Any, # A tensor, or tensors in lists, tuples, mappings, dataclasses and model-output objects, nested
) -> Any: # `x` itself where nothing changed; otherwise a copy of the same type
    """`x` with `f` applied to every tensor in it, each object once.

    A model-output object is any other object with tensors among its attributes; from there on only containers are
    walked, so that pointers from node to node (parse trees, graphs) are not followed. What cannot be rebuilt from its
    parts, such as a tuple subclass with rules of its own or a read-only mapping, passes unchanged.
    """
    if isinstance(x, torch.Tensor): return f(x)
    try: return _Walk(f).convert(x)
    except RecursionError: return x                              # nested a thousand levels deep: no model's output is


class _Walk:
    "One walk over nested containers; remembers what it has met, so that shared objects stay shared and cycles end."
    def __init__(self, f: Callable[[torch.Tensor], torch.Tensor]): self.f, self.met = f, dict[int, tuple]()

    def convert(self, x: Any, in_object: bool = False) -> Any:
        if isinstance(x, torch.Tensor): return self.f(x)
        parts = _parts(x, in_object)
        if parts is None: return x
        if id(x) in self.met: return self.met[id(x)][1]
        self.met[id(x)] = x, x                                   # the object is kept alive: its id stays its own
        in_object = in_object or _is_plain(x)
        changes = {}
        for key, value in parts.items():
            new = self.convert(value, in_object)
            if new is not value: changes[key] = new
        result = _with_changes(x, parts, changes) if changes else x
        self.met[id(x)] = x, result
        return result


def _parts(x: Any, in_object: bool) -> dict[Any, Any] | None:
    "What is in `x`, by key, index or attribute; None if it is not looked into, or does not let anybody."
    try: return _look_into(x, in_object)
    except RecursionError: raise
    except Exception: return None


def _look_into(x: Any, in_object: bool) -> dict[Any, Any] | None:
    if isinstance(x, Mapping): return dict(x.items())
    if isinstance(x, (tuple, list, L)): return dict(enumerate(x))
    if is_dataclass(x) and not isinstance(x, type):
        return {o.name: getattr(x, o.name) for o in fields(x) if hasattr(x, o.name)}
    if in_object or not _is_plain(x): return None
    return dict(vars(x)) if any(map(_holds_tensor, vars(x).values())) else None


def _is_plain(x: Any) -> bool:
    "Is `x` an object with attributes, and neither a container, a function, a class nor a module?"
    if isinstance(x, (type, torch.nn.Module, Mapping, tuple, list, L)) or is_dataclass(x): return False
    return isinstance(getattr(x, '__dict__', None), dict) and not callable(x)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping): value = value.values()
    elif not isinstance(value, (tuple, list)): return isinstance(value, torch.Tensor)
    return any(isinstance(v, (torch.Tensor, Mapping, tuple, list)) for v in value)


def _with_changes(x: Any, parts: dict[Any, Any], changes: dict[Any, Any]) -> Any:
    "A copy of `x` with `changes`; `x` itself if it cannot be rebuilt from its parts."
    try:
        if isinstance(x, tuple): return _tuple_like(x, [changes.get(i, v) for i, v in parts.items()])
        new = x.copy() if isinstance(x, L) else copy.copy(x)
        for key, value in changes.items():
            if isinstance(x, (Mapping, list, L)): new[key] = value
            else: object.__setattr__(new, key, value)            # a dataclass may be frozen
        return new
    except Exception: return x                                   # a class with rules of its own; training goes on


def _tuple_like(x: tuple, values: list) -> tuple:
    "A tuple of the type of `x`, attributes included, past a `__new__` that takes other arguments."
    try: new = tuple.__new__(type(x), values)
    except TypeError: return type(x)(values)                     # PyTorch's own, such as torch.return_types.max
    if hasattr(x, '__dict__'): vars(new).update(vars(x))
    return new


def without_repeats(t: torch.Tensor) -> torch.Tensor:
    "`t` without the dimensions that repeat the same memory, into which nothing can be copied."
    if t.layout is not torch.strided: return t
    for dim, (n, stride) in enumerate(zip(t.shape, t.stride())):
        if n > 1 and stride == 0: t = t.narrow(dim, 0, 1)
    return t
