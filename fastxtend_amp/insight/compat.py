"PyTorch's undocumented names that the trace uses."
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils import _python_dispatch
from torch.utils.flop_counter import flop_registry

from ..compat import compiled_module


def in_function_transform() -> bool:
    """Return whether a transform of `torch.func` (grad, vmap, ...) or forward-mode AD runs: nothing can be read there.

    Inside an operator the innermost transform counts only if it is forward-mode AD; reading in that ends the process.

    Relies on `torch._C._are_functorch_transforms_active` and `forward_ad._current_level` (seen in 2.9 to 2.15).
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


class Traits(NamedTuple):
    "The traits of one of PyTorch's operators."
    name: str # Without namespace: 'addmm'
    draws: bool # It draws random numbers
    makes_nothing: bool # It gives a view of the same memory, a constant, or uninitialized memory
    writes: bool # It writes into an argument
    flops: Callable | None # Counts the floating-point operations of a product; None for other operators


@cache
def operator(func: Any) -> Traits:
    """Return the traits of one of PyTorch's operators, as `TorchDispatchMode` gets it.

    Relies on `OpOverload._schema`, `.overloadpacket` and `.tags` (1.13), and `flop_counter.flop_registry` (2.1).
    """
    name, aliases = func.overloadpacket.__name__, [r.alias_info for r in func._schema.returns]
    is_view = any(a is not None and not a.is_write for a in aliases)
    makes_nothing = is_view or name.startswith(('empty', 'full', 'new_', 'scalar_tensor'))
    return Traits(name, torch.Tag.nondeterministic_seeded in func.tags, makes_nothing, func._schema.is_mutable,
                  flop_registry.get(func.overloadpacket))


def unwatched() -> AbstractContextManager:
    """Return a context in which no `TorchDispatchMode` sees the operators that run.

    Relies on `torch.utils._python_dispatch._disable_current_modes` (PyTorch 2.0). Without it: `AttributeError` in the
    first trace.
    """
    return _python_dispatch._disable_current_modes()


def is_compiled(model: nn.Module) -> bool:
    """Return whether `torch.compile` compiles `model` or a module in it.

    Relies on `OptimizedModule._orig_mod` (since 2.0) and `Module._compiled_call_impl` (2.2), which `Module.compile`
    sets. A function that a model compiles for itself is not seen.
    """
    return any(compiled_module(m) is not None or getattr(m, '_compiled_call_impl', None) for m in model.modules())
