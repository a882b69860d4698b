"Conversion of the tensors in nested predictions and inputs: half precision to fp32."
from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from fastcore.foundation import L

from .compat import tree_map

HALF = (torch.float16, torch.bfloat16)


def is_half(t: torch.Tensor) -> bool:
    "Return whether `t` is fp16 or bf16."
    with torch._C.DisableTorchFunctionSubclass(): return t.dtype in HALF       # 7 us for fastai's subclass


def half_to_float(t: torch.Tensor) -> torch.Tensor:
    "Return `t` in fp32 if it is fp16 or bf16; else `t` itself."
    return t.float() if is_half(t) else t


def to_fp32(
    x: Any, # A tensor, or tensors in containers; see `map_tensors`
) -> Any: # The same in fp32, of the same type
    """Turn every fp16 or bf16 tensor in `x` into fp32; other tensors, and the containers' types, stay.

    fastai's `to_float` also turns fp64 into fp32 and dict subclasses into dicts, and fails on None and strings.
    """
    return map_tensors(half_to_float, x)


def map_tensors(
    f: Callable[[torch.Tensor], torch.Tensor],
    x: Any, # A tensor, or tensors in lists, tuples, mappings and dataclasses, nested
) -> Any: # `x` itself, or a copy of the same type
    """Return `x` with `f` applied to every tensor in it.

    Looks into what PyTorch's pytree knows (its own outputs, and those that libraries register with it), mappings,
    dataclasses and fastai's `L`; returns anything else unchanged.
    """
    return f(x) if isinstance(x, torch.Tensor) else tree_map(partial(_map_leaf, f), x)


def _map_leaf(f: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    "Return a leaf of a pytree with `f` applied to it, or to the tensors in it."
    if isinstance(x, torch.Tensor): return f(x)
    if isinstance(x, Mapping): parts = list(x.items())
    elif isinstance(x, (L, list, tuple)): parts = list(enumerate(x))     # subclasses, which are leaves
    elif is_dataclass(x) and not isinstance(x, type): parts = [(o.name, getattr(x, o.name)) for o in fields(x)]
    else: return x
    changes = [(key, new) for key, value in parts if (new := map_tensors(f, value)) is not value]
    if not changes: return x
    if isinstance(x, tuple):
        new = tuple.__new__(type(x), map_tensors(f, list(x)))
        if hasattr(x, '__dict__'): vars(new).update(vars(x))
        return new
    if isinstance(x, L): result = x.copy()
    elif isinstance(x, Mapping) and not isinstance(x, dict) and not hasattr(x, '__copy__'):
        result = copy.deepcopy(x, {id(value): value for _, value in parts})   # a shallow copy may share the items
    else: result = copy.copy(x)
    for key, new in changes:
        if is_dataclass(x): object.__setattr__(result, key, new)  # it may be frozen
        else: result[key] = new
    return result
