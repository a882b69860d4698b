"The tensors in nested predictions and inputs: found, and converted, such as 16-bit ones to fp32."
from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from fastcore.foundation import L

from .compat import tree_map

HALF = (torch.float16, torch.bfloat16)


def is_half(t: torch.Tensor) -> bool:
    "Return whether `t` is fp16 or bf16."
    with torch._C.DisableTorchFunctionSubclass(): return t.dtype in HALF       # else 7 us for fastai's class


def half_to_float(t: torch.Tensor) -> torch.Tensor:
    "Return `t` in fp32 if it is fp16 or bf16; else `t` itself."
    return t.float() if is_half(t) else t


def map_tensors(
    f: Callable[[torch.Tensor], torch.Tensor],
    x: Any, # A tensor, or tensors in lists, tuples, dicts and dataclasses, nested
) -> Any: # `x` itself, or a copy of the same type
    """Return `x` with `f` applied to every tensor in it.

    Looks into what PyTorch's pytree knows (its own outputs, and those that libraries register with it), subclasses of
    tuples and dicts, dataclasses and fastai's `L`; returns anything else unchanged. (fastai's `apply` turns subclasses
    of dict into dicts, and calls `f` on everything.)
    """
    return f(x) if isinstance(x, torch.Tensor) else tree_map(partial(_map_leaf, f), x)


def _map_leaf(f: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    "Return a leaf of a pytree with `f` applied to it, or to the tensors in it."
    if isinstance(x, torch.Tensor): return f(x)
    if isinstance(x, L): return L(map_tensors(f, list(x)))
    if isinstance(x, tuple): return tuple.__new__(type(x), map_tensors(f, list(x)))
    if not isinstance(x, dict) and not is_dataclass(type(x)): return x
    new = copy.copy(x)
    if isinstance(x, dict):
        for key, value in map_tensors(f, dict(x)).items(): new[key] = value   # by its own `__setitem__`
    else:
        for field in fields(x):                                  # a dataclass may be frozen
            object.__setattr__(new, field.name, map_tensors(f, getattr(x, field.name)))
    return new


def tensors(
    x: Any, # Nested to any depth
) -> list[torch.Tensor]:
    "Return the tensors in `x`."
    found: list[torch.Tensor] = []
    def note(t):
        found.append(t)
        return t
    map_tensors(note, x)
    return found


def readable(x: Any) -> list[torch.Tensor]:
    "Return the tensors of floating point in `x` that can be read."
    return [t for t in tensors(x) if t.is_floating_point() and is_plain(t)]


def is_plain(t: torch.Tensor) -> bool:
    "Return whether `t` can be read: subclasses with their own operators, and 8-bit formats, may not support it."
    return t.element_size() > 1 and type(t).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
