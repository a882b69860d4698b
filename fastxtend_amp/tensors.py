"16-bit tensors, also nested in inputs and predictions, and the range of fp16."
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from fastcore.foundation import L

from .compat import tree_map_only, without_subclasses

HALF = (torch.float16, torch.bfloat16)
_FP16 = torch.finfo(torch.float16)
FP16_LARGEST, FP16_NORMAL, FP16_SMALLEST = _FP16.max, _FP16.tiny, _FP16.tiny * _FP16.eps   # 65,504, 6.1e-5, 2**-24


def is_half(t: torch.Tensor) -> bool:
    "Return whether `t` is fp16 or bf16."
    with without_subclasses(): return t.dtype in HALF


def half_to_float(t: torch.Tensor) -> torch.Tensor:
    "Return `t` in fp32 if it is fp16 or bf16; else `t` itself."
    return t.float() if is_half(t) else t


def map_tensors(
    f: Callable[[torch.Tensor], torch.Tensor],
    x: Any, # A tensor, or tensors nested in tuples, lists, dicts, their subclasses, and what PyTorch's pytree knows
) -> Any: # `x` itself, or a copy of the same type
    "Return `x` with `f` applied to every tensor in it. (fastai's `apply` turns subclasses of dict into dicts.)"
    if isinstance(x, torch.Tensor): return f(x)
    def of_leaf(x: Any) -> Any: # A tensor, or a container that pytree does not know
        if isinstance(x, torch.Tensor): return f(x)
        if isinstance(x, (tuple, list)):                         # whatever the constructor of its class needs
            values = [map_tensors(f, o) for o in x]
            new: Any = tuple.__new__(type(x), values) if isinstance(x, tuple) else list.__new__(type(x))
            if isinstance(x, list): new.extend(values)
            if hasattr(x, '__dict__'): vars(new).update(vars(x))
            return new
        new = copy(x)
        items = x.items() if isinstance(x, dict) else enumerate(x)
        for key, value in items: new[key] = map_tensors(f, value)
        return new
    return tree_map_only((torch.Tensor, dict, list, tuple, L), of_leaf, x)
