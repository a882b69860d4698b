"Operators as PyTorch dispatches them: a call, the traits of its operator, and when nothing can be read."
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from torch.utils import _python_dispatch
from torch.utils.flop_counter import flop_registry

from ..tensors import HALF
from .values import readable, rounded, tensors

# Operators whose constants are added, are bounds, or become values. In other operators they act before the rounding.
_CONSTANTS = set("""add sub rsub mul clamp clamp_min clamp_max masked_fill fill full full_like new_full scatter
    scalar_tensor""".split())
_NEAR_0 = 6.1e-5        # constants that become 0 matter beside values below the smallest normal number of fp16
_PER_NUMBER = 100       # work for each number of a result, which is written and looked at; that of an operation is 1


class Operation:
    "A call of an operator."
    def __init__(self, func, args, kwargs):
        self.func, self.op, self.args, self.kwargs = func, operator(func), args, kwargs
        self.inputs = readable((args, kwargs))
        self.has_half = any(t.dtype in HALF for t in self.inputs)
        self.is_cast = self.op.name == '_to_copy' and kwargs.get('dtype') in HALF

    def run(self): return self.func(*self.args, **self.kwargs)

    def work(self, out):
        "Return how much work it was: floating-point operations of products, and the size of the result."
        flops = self.op.flops(*self.args, **self.kwargs, out_val=out) if self.op.flops else 0
        return flops + _PER_NUMBER * sum(t.numel() for t in tensors(out))

    def lost_constants(self):
        "Return the constants that 16 bits round to 0, 1, -1, inf or -inf."
        dtypes = (t.dtype for t in self.inputs if t.ndim)
        dtype = self.kwargs.get('dtype') or next(dtypes, None)
        if dtype not in HALF or self.op.name.rstrip('_') not in _CONSTANTS: return []
        near = {number: rounded(number, dtype) for number in map(_number, self.args)}
        return [number for number, r in near.items() if number != r and abs(r) in (0, 1, math.inf)]

    def needs(self, constant, out, exact): # `exact`: `out`, in fp32 if known
        "Return whether a constant bounds results, or is added to values near 0, and is lost."
        limit = rounded(constant, out.dtype)
        operators = ('clamp',) if abs(limit) == 1 else ('add', 'clamp') if limit == 0 < constant else ()
        if not self.op.name.startswith(operators): return False
        is_near = (exact - limit).abs() < max(1.01 * abs(constant - limit), _NEAR_0)
        return bool(is_near.any())


def _number(x): # 0 for what is no constant
    if type(x) in (int, float): return x
    is_constant = torch.is_tensor(x) and not x.ndim and not x.requires_grad      # PyTorch makes one of a number
    return float(f'{float(x):.7g}') if is_constant else 0


# -- undocumented names of PyTorch

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
    draws = torch.Tag.nondeterministic_seeded in func.tags
    writes = func._schema.is_mutable or 'batch_norm' in name     # statistics, which not each such schema says
    return Traits(name, draws, makes_nothing, writes, flop_registry.get(func.overloadpacket))


def in_function_transform() -> bool:
    """Return whether a transform of `torch.func` (grad, vmap, ...) or forward-mode AD runs: nothing can be read there.

    Inside an operator the innermost transform counts only if it is forward-mode AD; reading in that ends the process.

    Relies on `torch._C._are_functorch_transforms_active` and `forward_ad._current_level` (seen in 2.9 to 2.15).
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def unwatched() -> AbstractContextManager:
    """Return a context in which no `TorchDispatchMode` sees the operators that run.

    Relies on `torch.utils._python_dispatch._disable_current_modes` (PyTorch 2.0). Without it: `AttributeError` in the
    first run that is recorded.
    """
    return _python_dispatch._disable_current_modes()
