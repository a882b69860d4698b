"""Twins: 16-bit tensors, each with its value in fp32; and other tensors that are followed from operator to operator.

The fp32 result of an operator is the twin of the 16-bit one, and the next operator in fp32 reads the twins of its
inputs. A module has twins only for the results of its own operators; its inputs, and the outputs of modules inside,
count as exact. So the error of a module is that of its own arithmetic.
"""
import torch

from ..tensors import half_to_float
from .values import readable


def address(t: torch.Tensor) -> int: # 0 if it has none
    "Return the address of the memory that `t` shares with its views."
    return t.untyped_storage().data_ptr() if t.layout is torch.strided and t.device.type != 'xla' else 0


class _ByAddress(dict):
    "Tensors by the address of their memory, which views share. They are kept alive, so that no other gets an address."
    def include(self, ts): return any(address(t) in self for t in ts)

    def forget(self, x):
        "Drop the tensors in `x`, which were overwritten."
        for t in readable(x): self.pop(address(t), None)


class Followed(_ByAddress):
    "Tensors to recognize, with their views."
    def add(self, x):
        for t in readable(x):
            if a := address(t): self[a] = t


class Twins(_ByAddress):
    "Tensors, each with an fp32 copy of its memory."
    def fp32(self, t):
        "Return the twin of `t`; without one `t` in fp32."
        if not self.include([t]): return half_to_float(t)
        _, memory = self[address(t)]
        return memory.as_strided(t.shape, t.stride(), t.storage_offset())

    def keep(self, t, twin):
        "Keep a twin of `t`, unless `t` has no address."
        a = address(t)
        if not a or t.shape != twin.shape: return
        if a not in self:                                        # a copy of all the memory, for views of it
            memory = t.new_empty(0).set_(t.untyped_storage())
            self[a] = t, memory.to(twin.dtype, copy=True)
        self.fp32(t).copy_(twin)
