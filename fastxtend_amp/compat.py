"Every use of a name that PyTorch, fastai, fastcore or torch_xla do not document: one function each, with what happens without it."
from __future__ import annotations

import ctypes
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn

__all__: list[str] = []

# -- autocast


# -- loss scaling and optimizers


# -- modules


# -- half_weights


# -- insight


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
