"What reaches the loss and the metrics? Half-precision tensors as fp32, everything else as it was."
from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from fastcore.foundation import L

HALF = (torch.float16, torch.bfloat16)


def is_half(t: torch.Tensor) -> bool:
    "Is `t` fp16 or bf16? Asked past `__torch_function__`: each attribute of a tensor of fastai's own types takes microseconds."
    with torch._C.DisableTorchFunctionSubclass(): return t.dtype in HALF


def to_fp32(
    x: Any, # A tensor, or tensors in lists, tuples, named tuples, mappings, dataclasses and objects, nested at will
) -> Any: # `x` itself where nothing changed; otherwise a copy of the same type
    """Turn every fp16 or bf16 tensor in `x` into fp32 and leave every other leaf and every container's type alone.

    fastai's `to_float` also turns fp64 into fp32 and dict subclasses into dicts, and fails on None and strings.
    """
    return map_tensors(lambda t: t.float() if is_half(t) else t, x)


def detached(
    x: Any, # As in `to_fp32`
) -> Any: # `x` itself where nothing changed; otherwise a copy of the same type
    "Cut every tensor in `x` off its graph: others cannot be deep-copied."
    return map_tensors(lambda t: t.detach() if t.grad_fn is not None else t, x)


def map_tensors(f: Callable[[torch.Tensor], torch.Tensor], x: Any) -> Any:
    "`x` with `f` applied to every tensor in it; containers in which nothing changed are not copied."
    if isinstance(x, torch.Tensor): return f(x)
    if isinstance(x, Mapping):
        changed = {k: new for k, v in x.items() if (new := map_tensors(f, v)) is not v}
        return _copy_with(x, changed, _set_item)
    if isinstance(x, (tuple, list, L)):
        new = [map_tensors(f, o) for o in x]
        if isinstance(x, list): return _copy_with(x, {i: v for i, v in enumerate(new) if v is not x[i]}, _set_item)
        if all(a is b for a, b in zip(new, x)): return x
        if isinstance(x, L): return x._new(new)
        return type(x)(*new) if hasattr(x, '_fields') else type(x)(new)
    if is_dataclass(x) and not isinstance(x, type): names = [field.name for field in fields(x)]
    elif _is_output_object(x): names = list(vars(x))
    else: return x
    new = {n: map_tensors(f, getattr(x, n)) for n in names if hasattr(x, n)}
    return _copy_with(x, {n: v for n, v in new.items() if v is not getattr(x, n)}, object.__setattr__)


def _copy_with(x, changes, assign):
    if not changes: return x
    new = copy.copy(x)
    for key, value in changes.items(): assign(new, key, value)
    return new


def _set_item(x, key, value): x[key] = value


def _is_output_object(x) -> bool:
    "A plain object that carries tensors as attributes, as model-output classes do."
    return (hasattr(x, '__dict__') and not isinstance(x, (type, torch.nn.Module)) and not callable(x)
            and any(isinstance(v, (torch.Tensor, Mapping, tuple, list)) for v in vars(x).values()))
