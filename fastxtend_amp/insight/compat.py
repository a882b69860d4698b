"PyTorch's undocumented names that the trace uses."
from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils import _python_dispatch


def in_function_transform() -> bool:
    """Return whether a transform of `torch.func` (grad, vmap, ...) is running, whose tensors must not outlive it.

    Relies on `torch._C._are_functorch_transforms_active` (seen in 2.9 to 2.15).
    """
    return torch._C._are_functorch_transforms_active()


class Traits(NamedTuple):
    "The traits of one of PyTorch's operators."
    name: str # Without namespace: 'addmm'
    draws: bool # It draws random numbers
    is_view: bool # It gives another view of the same memory, by its schema
    writes: bool # It writes into an argument


@cache
def operator(func: Any) -> Traits:
    """Return the traits of one of PyTorch's operators, as `TorchDispatchMode` gets it.

    Relies on `OpOverload._schema`, `.overloadpacket` and `.tags` (1.13).
    """
    returned = [r.alias_info for r in func._schema.returns]
    return Traits(func.overloadpacket.__name__, torch.Tag.nondeterministic_seeded in func.tags,
                  any(a is not None and not a.is_write for a in returned), func._schema.is_mutable)


def unwatched() -> AbstractContextManager:
    """Return a context in which no `TorchDispatchMode` sees the operators that run.

    Relies on `torch.utils._python_dispatch._disable_current_modes` (PyTorch 2.0). Without it: `AttributeError` in the
    first trace.
    """
    return _python_dispatch._disable_current_modes()
