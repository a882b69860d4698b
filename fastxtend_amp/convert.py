"What reaches the loss and the metrics: half-precision tensors as fp32, everything else as it was."
from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from fastcore.foundation import L

HALF = (torch.float16, torch.bfloat16)


def to_fp32(
    x: Any, # A tensor, or tensors in lists, tuples, named tuples, mappings, dataclasses and objects, nested at will
) -> Any: # `x` itself where nothing changed; otherwise a copy of the same type
    """Turn every fp16 or bf16 tensor in `x` into fp32 and leave every other leaf and every container's type alone.

    fastai's `to_float` also turns fp64 into fp32 and dict subclasses into dicts, and fails on None and strings.
    """
    if isinstance(x, torch.Tensor): return x.float() if x.dtype in HALF else x
    if isinstance(x, Mapping):
        new = {k: to_fp32(v) for k, v in x.items()}
        return _copy_with(x, {k: v for k, v in new.items() if v is not x[k]}, _set_item)
    if isinstance(x, tuple):
        new = [to_fp32(o) for o in x]
        if all(a is b for a, b in zip(new, x)): return x
        return type(x)(*new) if hasattr(x, '_fields') else type(x)(new)
    if isinstance(x, L):
        new = [to_fp32(o) for o in x]
        return x if all(a is b for a, b in zip(new, x)) else x._new(new)
    if isinstance(x, list):
        new = [to_fp32(o) for o in x]
        return _copy_with(x, {i: v for i, v in enumerate(new) if v is not x[i]}, _set_item)
    if is_dataclass(x) and not isinstance(x, type): names = [f.name for f in fields(x)]
    elif _is_output_object(x): names = list(vars(x))
    else: return x
    new = {n: to_fp32(getattr(x, n)) for n in names if hasattr(x, n)}
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
