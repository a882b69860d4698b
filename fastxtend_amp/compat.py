"Every use of a name that PyTorch, fastai, fastcore or torch_xla do not document: one function each, with what happens without it."
from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

__all__: list[str] = []

# -- autocast


# -- loss scaling and optimizers


# -- modules


# -- half_weights


# -- insight

class Operator(NamedTuple):
    "What is known of one of PyTorch's operators."
    call: Callable # Runs it
    name: str # Without namespace: 'addmm'
    draws: bool # Does it draw random numbers?
    is_view: bool # Does it give another view of the same memory?
    changes_input: bool # Does it write into its first argument?


@lru_cache(maxsize=None)
def _operator(func: Any) -> Operator:
    "Relies on `OpOverload._schema` and `.tags` (PyTorch 1.13)."
    returned = [r.alias_info for r in func._schema.returns]
    return Operator(func, func._schema.name.rpartition('::')[2], torch.Tag.nondeterministic_seeded in func.tags,
                    any(a is not None and not a.is_write for a in returned), func._schema.is_mutable)


def watch_operators(
    handle: Callable[[Operator, tuple, dict], Any], # Called in place of each operator; gives its result
) -> AbstractContextManager:
    """Every operator that this thread runs inside, below autograd and autocast, goes through `handle`; not its own ones.

    Relies on `torch.utils._python_dispatch.TorchDispatchMode` (PyTorch 1.12). Where that is gone nothing is seen of
    operators: the report knows the modules' outputs alone, and dropout masks may differ between precisions.
    """
    try: from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError: return nullcontext()
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return handle(_operator(func), args, kwargs or {})
    return Watch()


def operators_unwatched() -> AbstractContextManager:
    """What runs inside is not seen by `watch_operators`.

    Relies on `torch.utils._python_dispatch._disable_current_modes` (PyTorch 2.0). Where that is gone `handle` sees
    operators that run inside, too, which takes time and changes nothing.
    """
    try: from torch.utils._python_dispatch import _disable_current_modes
    except ImportError: return nullcontext()
    return _disable_current_modes()


@contextmanager
def no_reentrant_checkpoints() -> Iterator[None]:
    """Reentrant activation checkpoints (`use_reentrant=True`) work as `use_reentrant=False` does, in the whole process.

    The reentrant kind runs its modules without a graph, so that nothing inside gets a gradient that could be looked at,
    and refuses `torch.autograd.grad`. Relies on `torch.utils.checkpoint.CheckpointFunction`, the autograd function
    behind it (PyTorch 0.4). Where that is gone such checkpoints stay as they are, and gradients inside are unknown.
    """
    from torch.utils import checkpoint
    function = getattr(checkpoint, 'CheckpointFunction', None)
    if function is None:
        yield
        return
    def apply(run, preserve_rng_state, *args):
        return checkpoint.checkpoint(run, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
    own = function.__dict__.get('apply')
    function.apply = apply
    try: yield
    finally:
        if own is None: del function.apply
        else: function.apply = own


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called, as opposed to `torch.compile(module)`.

    Relies on `nn.Module._compiled_call_impl` (since 2.2), which a deep copy leaves out; where it is gone the answer is
    False, and a copy for a comparison runs as it was written.
    """
    return getattr(module, '_compiled_call_impl', None) is not None


def host_value(t: torch.Tensor) -> float | None:
    """The value of a single fp32 number in main memory, read without an operator; None if it is elsewhere or of another kind.

    Relies on `torch._C.DisableTorchFunctionSubclass` (since 2.0), which saves microseconds on fastai's tensor types;
    where it is gone attributes are read by way of `__torch_function__`.
    """
    past_subclasses = getattr(torch._C, 'DisableTorchFunctionSubclass', nullcontext)
    with past_subclasses():
        if not t.is_cpu or t.dtype is not torch.float32 or t.numel() != 1 or t.layout is not torch.strided: return None
        return ctypes.c_float.from_address(t.data_ptr()).value


def host_norm(t: torch.Tensor) -> float | None:
    """The norm of a dense fp32 tensor in main memory, read without an operator of PyTorch's; None for any other tensor.

    Relies on what `host_value` relies on.
    """
    past_subclasses = getattr(torch._C, 'DisableTorchFunctionSubclass', nullcontext)
    with past_subclasses():
        if not t.is_cpu or t.dtype is not torch.float32 or t.layout is not torch.strided or not t.is_contiguous(): return None
        if not (n := t.numel()): return 0.
        values = np.ctypeslib.as_array((ctypes.c_float * n).from_address(t.data_ptr()))
        return float(np.sqrt(np.dot(values, values)))



# -- devices


# -- tools
