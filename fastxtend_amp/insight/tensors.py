"The tensors in nested predictions and inputs, and which of them can be read."
from __future__ import annotations

from typing import Any

import torch

from ..compat import tree_leaves


def tensors(
    x: Any, # Nested to any depth
) -> list[torch.Tensor]:
    "Return the tensors in `x`."
    return [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]


def readable(x: Any) -> list[torch.Tensor]:
    "Return the tensors of floating point in `x` that can be read."
    return [t for t in tensors(x) if t.is_floating_point() and is_plain(t)]


def is_plain(t: torch.Tensor) -> bool:
    "Return whether `t` can be read: subclasses with their own operators, and 8-bit formats, may not support it."
    return t.element_size() > 1 and type(t).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
