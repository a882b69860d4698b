"Every use of a name that PyTorch, fastai, fastcore or torch_xla do not document: one function each, with what happens without it."
from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

__all__: list[str] = []

# -- autocast


# -- loss scaling and optimizers


# -- modules


# -- half_weights

def copy_all(
    into: list[torch.Tensor], # All on one device
    values: list[torch.Tensor], # Of the same shapes, in any dtype
) -> None:
    """Copy each of `values` into the tensor at its place in `into`, in one launch on an accelerator.

    `torch._foreach_copy_`, which torch.optim uses (seen in 2.9 to 2.15); without it, one copy each.
    """
    copy_each = getattr(torch, '_foreach_copy_', None)
    if copy_each is not None: copy_each(into, values)
    else:
        for t, value in zip(into, values): t.copy_(value)


def held_elsewhere(
    t: torch.Tensor, # A tensor that nobody but the caller should hold
) -> bool:
    """Whether something else holds the memory of `t`, such as a graph whose backward pass is still to come.

    `torch._C._storage_Use_Count`, which counts this call's own storage object, too (seen in 2.9 to 2.15). Without it
    False, and a backward pass through an overwritten tensor ends in autograd's error about in-place operations.
    """
    count = getattr(torch._C, '_storage_Use_Count', None)
    return count is not None and count(t.untyped_storage()._cdata) > 2


def in_function_transform() -> bool:
    """Whether a transform of `torch.func` (grad, vmap, ...) is under way, whose tensors must not outlive it.

    `torch._C._are_functorch_transforms_active`, which `torch.autograd.Function.apply` asks (seen in 2.9 to 2.15);
    without it False.
    """
    ask = getattr(torch._C, '_are_functorch_transforms_active', None)
    return ask is not None and ask()


def is_compiled(module: nn.Module) -> bool:
    """Whether `torch.compile` stands on `module`, around it or in place.

    Its wrapper has `_orig_mod`, `nn.Module.compile` sets `_compiled_call_impl` (seen in 2.9 to 2.15); without both it
    is False.
    """
    return '_orig_mod' in module._modules or getattr(module, '_compiled_call_impl', None) is not None


class CastWatch(TorchDispatchMode):
    """Notes the casts that are made of `params` while it is entered.

    A subclass of `torch.utils._python_dispatch.TorchDispatchMode`, which PyTorch's notes on extending it describe, and
    `StorageWeakRef` of torch.multiprocessing.reductions (seen in 2.9 to 2.15); the import fails where they are gone.
    """
    def __init__(self,
        params: Iterable[torch.Tensor], # The parameters
    ):
        super().__init__()
        self.params = {p.data_ptr() for p in params}
        self.made: list[tuple[StorageWeakRef, int]] = []         # each cast's memory, and its bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.params:
            self.made.append((StorageWeakRef(out.untyped_storage()), out.untyped_storage().nbytes()))
        return out

    def alive(self) -> int:
        "Bytes of those casts that something still holds."
        return sum(size for ref, size in self.made if not ref.expired())


# -- insight


# -- devices


# -- tools
