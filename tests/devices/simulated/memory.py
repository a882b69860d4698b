"""Tensors of a simulated device: ordinary ones, whose storage says 'cuda:0' and lies in the memory of a CPU storage.

So `.data`, views, version counters, `data_ptr` and changes in place work as on a device. The CPU storage is kept on the
device's storage as `_memory`; a storage that C++ made gets one when it is first asked for.
"""
from __future__ import annotations

import ctypes, functools, sys, types

import torch
from torch.utils import dlpack

from .clock import options

here = types.SimpleNamespace(kind=None)              # the simulated device type; set by `install`
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
plain = torch._C.DisableTorchFunction
Tensor = torch.Tensor
_as_strided = torch.ops.aten.set_.source_Storage_storage_offset
_pinned: dict = {}                                   # addresses of pinned memory


class Block:
    "Counts the bytes of one storage as long as it lives."
    now = peak = 0
    def __init__(self, n):
        self.n = n
        Block.now += n
        Block.peak = max(Block.peak, Block.now)
    def __del__(self): Block.now -= self.n


def storage_on(memory, device):
    "The storage on `device` that lies in `memory`, a CPU storage."
    n = memory.nbytes()
    s = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), device, n)
    s._memory, s._block = memory, Block(n)
    return s


def memory_of(t):
    "The CPU storage in which the device tensor `t` lies."
    s = t.untyped_storage()
    m = s.__dict__.get('_memory')
    if m is None:
        m = torch._C._construct_storage_from_data_pointer(s.data_ptr(), torch.device('cpu'), s.nbytes())
        s._memory = m
    return m


def tensor_on(storage, dtype, size, stride, offset):
    "The tensor of `storage`'s device with these strides."
    if not options.float64 and dtype in (torch.float64, torch.complex128) and not _in_scaler():
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64. "
                        "Please use float32 instead.")
    if here.kind == 'cuda':
        about = dict(dtype=dtype, size=tuple(size), stride=tuple(stride), storage_offset=offset, device=storage.device)
        return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(about, storage)
    return set_strided(_empty(dtype, storage.device.index), storage, size, stride, offset)


_capsule = ctypes.pythonapi.PyCapsule_GetPointer
_capsule.restype, _capsule.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


@functools.lru_cache
def _empty_elsewhere(dtype, index):
    "By way of DLPack, whose device type 12 is PrivateUse1: torch itself makes its tensors on device 0 alone."
    capsule = dlpack.to_dlpack(torch.empty(0, dtype=dtype))
    (ctypes.c_int32 * 2).from_address(_capsule(capsule, b'dltensor') + 8)[:] = [12, index]
    return torch._C._from_dlpack(capsule)


def _empty(dtype, index):
    if index == 0: return torch._C._acc.create_empty_tensor((0,), dtype)
    return torch.ops.aten.alias.default.redispatch(CPU, _empty_elsewhere(dtype, index))


def set_strided(t, storage, size, stride, offset):
    "Let `t` be a view of `storage`, in place."
    return _as_strided.redispatch(CPU, t, storage, offset, tuple(size), tuple(stride))


def _in_scaler():
    "GradScaler takes the reciprocal of its scale in fp64, but not on MPS."
    f = sys._getframe(1) if options.name == 'mps' else None
    while f is not None and not f.f_code.co_filename.endswith('grad_scaler.py'): f = f.f_back
    return f is not None


def host(t):
    "A CPU tensor in the same memory: the simulation's own view, for which nobody waits."
    return torch.empty(0, dtype=t.dtype).set_(memory_of(t), t.storage_offset(), t.size(), t.stride())


def on_device(r, device):
    "A tensor of `device` in the memory of `r`, a CPU tensor."
    return tensor_on(storage_on(r.untyped_storage(), device), r.dtype, r.size(), r.stride(), r.storage_offset())


def is_pinned(t):
    with plain(): return t.device.type == 'cpu' and t.untyped_storage().data_ptr() in _pinned


def address_is_pinned(at): return at in _pinned


class _Unpin:
    def __init__(self, at): self.at = at
    def __del__(self): _pinned.pop(self.at, None)


def pinned(t):
    "Call `t`'s memory pinned."
    with plain():
        s = t.untyped_storage()
        _pinned[s.data_ptr()] = True
        s._pinned = _Unpin(s.data_ptr())
    return t


def replace_storages():
    "Let torch copy, pickle and pin: what it does to storages in machine code knows no memory of ours."
    clone = torch.storage._StorageBase.clone

    def cloned(self):
        return storage_on(self._memory.clone(), self.device) if self.device.type == here.kind else clone(self)
    torch.storage._StorageBase.clone = cloned

    def tag(obj): return str(obj.device) if obj.device.type == here.kind else None
    def back(obj, location):
        if location.partition(':')[0] != here.kind: return None
        device = torch.device(location)
        memory = torch.UntypedStorage(obj.nbytes())
        memory.copy_(obj if obj.device.type == 'cpu' else obj._memory)
        return storage_on(memory, device if device.index is not None else torch.device(device.type, 0))
    torch.serialization.register_package(1, tag, back)

    empty = torch.empty
    @functools.wraps(empty)
    def with_pinned(*args, pin_memory=False, **kwargs):
        t = empty(*args, **kwargs)
        return pinned(t) if pin_memory else t
    torch.empty = with_pinned
    Tensor.pin_memory = lambda self, device=None: pinned(self.clone())
    Tensor.is_pinned = lambda self, device=None: is_pinned(self)
