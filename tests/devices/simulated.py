"""A simulated accelerator of type 'sim' in main memory: no GPU, no driver, no compiler.

    device = install()               # once a process, before its first backward pass

It is registered as a backend written in Python (`torch.utils.backend_registration`, 2.13 and newer).
Each operator runs as the CPU's kernel on the same memory, and raises if tensors of several devices come together.
`with waits() as w` lists the operators that synchronize with the device. `options` says what it can do.

It cannot show speed, the numerics of real kernels, streams, allocators, graphs or `torch.compile`.
"""

from __future__ import annotations

import contextlib, types

import torch
from torch.utils._pytree import tree_map

options = types.SimpleNamespace(amp_dtypes=[torch.bfloat16, torch.float16])
CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_LOW = ('linear', 'addmm', 'matmul', 'mm', 'bmm', 'conv2d')  # autocast's lists: what the tests' models need
_FP32 = ('mse_loss', 'cross_entropy_loss', 'layer_norm')
_WAITS = ('_local_scalar_dense', 'nonzero', 'masked_select', 'equal')
_libraries: list = []  # operators are registered as long as these live
_recorders: list[list[str]] = []


def is_installed() -> bool:
    return bool(_libraries)


@contextlib.contextmanager
def waits():
    "Yield a list that fills with the operators that synchronize."
    found: list[str] = []
    _recorders.append(found)
    try:
        yield found
    finally:
        _recorders.remove(found)


# -- tensors whose storage says 'sim' and is in the memory of a CPU storage


def _is_here(x) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == 'sim'


def _storage_on_device(memory):
    s = torch._C._construct_storage_from_data_pointer(memory.data_ptr(), torch.device('sim', 0), memory.nbytes())
    s._memory = memory
    return s


def _memory(storage):
    if '_memory' not in storage.__dict__:  # made by C++
        cpu = torch.device('cpu')
        storage._memory = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), cpu, storage.nbytes())
    return storage._memory


def _set(t, storage, like):
    set_ = torch.ops.aten.set_.source_Storage_storage_offset
    return set_.redispatch(CPU, t, storage, like.storage_offset(), like.size(), like.stride())


def _down(t):
    "Return a CPU tensor in the memory of the device tensor `t`."
    return torch.empty(0, dtype=t.dtype).set_(_memory(t.untyped_storage()), t.storage_offset(), t.size(), t.stride())


def _up(r, storage=None):
    "Return the device tensor in the memory of the CPU tensor `r`."
    empty = torch._C._acc.create_empty_tensor((0,), r.dtype)
    return _set(empty, storage or _storage_on_device(r.untyped_storage()), r)


# -- operators


def _run(op, *args, **kwargs):
    "Run `op` by the CPU's kernel."
    name, pairs, elsewhere = op.overloadpacket.__name__, [], []
    if name == 'set_':
        return op.redispatch(CPU, *args, **kwargs)  # no look at the memory

    def down(a):
        if not isinstance(a, torch.Tensor):
            return torch.device('cpu') if isinstance(a, torch.device) else a
        if not _is_here(a):
            if a.dim():
                elsewhere.append(a)
            return a
        pairs.append((a, _down(a)))
        return pairs[-1][1]

    low, named = tree_map(down, (args, kwargs))
    if pairs and elsewhere and name != '_copy_from':
        raise RuntimeError(f'Expected all tensors to be on the same device, but found at least two devices ({name})')
    if name in _WAITS or (name == '_copy_from' and len(pairs) == 1):
        for r in _recorders:
            r.append(name)
    if name == '_copy_from':  # what `copy_` calls for such devices
        low[1].copy_(low[0])
        return args[1]
    out = op(*low, **named)
    for t, h in pairs:  # `out=` and changes in place may have resized them
        if h.shape != t.shape:
            _set(t, _storage_on_device(h.untyped_storage()), h)

    def up(r):
        if not isinstance(r, torch.Tensor):
            return r
        for t, h in pairs:
            if r is h:
                return t
        of = [t for t, h in pairs if h.untyped_storage()._cdata == r.untyped_storage()._cdata]
        return _up(r, of[0].untyped_storage() if of else None)  # a view, or a new tensor

    return tree_map(up, out)


def _casting(op, dtype_of):
    "Return the operator for autocast, which casts its tensors first."
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def cast(a, dtype):
        return a.to(dtype) if _is_here(a) and a.is_floating_point() else a

    def run(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(key):
            return op(*[cast(a, dtype_of()) for a in args], **kwargs)

    return run


def _move_modules_in_place() -> None:
    "Make `Module.to` keep its parameters when it moves them, as it does with CUDA; by default it creates new ones."
    to, set_swap = torch.nn.Module.to, torch.__future__.set_swap_module_params_on_conversion

    def in_place(self, *args, **kwargs):
        device = torch._C._nn._parse_to(*args, **kwargs)[0]
        set_swap(device is not None and any(p.device.type != device.type for p in self.parameters()))
        try:
            return to(self, *args, **kwargs)
        finally:
            set_swap(False)

    torch.nn.Module.to = in_place


def _move_tensors_at_once() -> None:
    "Make `Tensor.to` block: the device has no pinned memory, which `non_blocking=True` needs."
    to = torch.Tensor.to

    def blocking(self, *args, **kwargs):
        if _is_here(self):
            kwargs.pop('non_blocking', None)
        return to(self, *args, **kwargs)

    torch.Tensor.to = blocking


def install() -> torch.device:
    "Make the device and return it."
    from torch.utils import backend_registration

    module = types.ModuleType('torch.sim')
    vars(module).update(
        is_available=lambda: True,
        device_count=lambda: 1,
        manual_seed_all=lambda seed: None,
        get_rng_state=lambda *args: torch.ByteTensor(),
        set_rng_state=lambda *args: None,
        get_amp_supported_dtype=lambda: options.amp_dtypes,
    )
    backend_registration._setup_privateuseone_for_python_backend('sim', backend_module=module)
    kernels, autocast = (torch.library.Library('_', 'IMPL') for _ in range(2))
    kernels.fallback(_run, 'PrivateUse1')
    autocast.fallback(torch.library.fallthrough_kernel, 'AutocastPrivateUse1')
    of_aten = torch.library.Library('aten', 'IMPL', 'AutocastPrivateUse1')
    for name in _LOW + _FP32:
        dtype = (lambda: torch.get_autocast_dtype('sim')) if name in _LOW else lambda: torch.float32
        of_aten.impl(name, _casting(getattr(torch.ops.aten, name).default, dtype))
    _libraries.extend((kernels, autocast, of_aten))
    _move_modules_in_place()
    _move_tensors_at_once()
    clone = torch.storage._StorageBase.clone

    def cloned(self):
        return _storage_on_device(_memory(self).clone()) if self.device.type == 'sim' else clone(self)

    torch.storage._StorageBase.clone = cloned

    def back(obj, location):
        if location.partition(':')[0] != 'sim':
            return None
        memory = torch.UntypedStorage(obj.nbytes())
        memory.copy_(obj if obj.device.type == 'cpu' else _memory(obj))
        return _storage_on_device(memory)

    torch.serialization.register_package(1, lambda obj: 'sim' if obj.device.type == 'sim' else None, back)
    return torch.device('sim', 0)
