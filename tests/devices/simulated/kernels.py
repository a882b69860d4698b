"What runs for an operator on a simulated device: the CPU's kernel, on the same memory."
from __future__ import annotations

import contextlib, functools, os

import torch

from .clock import current, options, timelines, wait
from .memory import CPU, Tensor, here, host, memory_of, on_device, plain, set_strided, storage_on, tensor_on
from .own_kernels import CALLS, ONLY_CUDA, OWN, random_state

# The host waits for the number of their results.
_SHAPE = {'nonzero', 'nonzero.out', 'masked_select', 'masked_select.out', '_unique', '_unique2', 'unique_dim', 'histc',
          'unique_consecutive', 'unique_dim_consecutive', 'bincount', 'histc.out', 'equal', 'repeat_interleave.Tensor'}
# May be given CPU tensors beside the device's.
_MIXED = (
    'index',
    '_index_put',
    '_unsafe_index',
    'copy_',
    'set_',
    '_pack_padded',
    '_fused_adam_.tensor_lr',
    'masked_fill',
    '_fused_adamw_.tensor_lr',
    '_fused_sgd_.tensor_lr',
    'where',
)
# Only about sizes and strides: the CPU's kernels do not look at the memory.
_META = ('as_strided', 'view', '_reshape_alias', 'unfold', 'set_.source_Storage_storage_offset', 'set_.source_Storage',
         'set_.source_Tensor', 'set_', 'view_as_real', 'view_as_complex')
_SKIP = (
    '_nested',
    '_sparse',
    'sparse',
    'nested',
    '_to_sparse',
    '_coalesce',
    '_cudnn_init_dropout_state',
    'q_',
    'quantize',
    '_quantize',
    '_make_per',
    'to_padded',
    '_amp_foreach_dummy',
)
_libraries: list = []


class _Call:
    "One call under way: the device tensors that it was given, each with the CPU tensor that stands for it."
    def __init__(self, name): self.name, self.pairs, self.on_cpu, self.device = name, [], False, None

    def down(self, a):
        "`a`, with CPU tensors for the device's."
        if isinstance(a, Tensor):
            if a.device.type == 'cpu':
                if a.dim(): self.on_cpu = True
                return a
            self._check(a)
            h = host(a)
            self.pairs.append((a, h))
            return h
        if type(a) in (list, tuple): return type(a)(map(self.down, a))
        if isinstance(a, (list, tuple)): return [self.down(x) for x in a]
        return a

    def _check(self, a):
        if self.device is None: self.device = a.device
        elif a.device != self.device and a.dim():
            raise RuntimeError('Expected all tensors to be on the same device, but found at least two devices, '
                               f'{self.device} and {a.device}! (aten::{self.name})')

    def up(self, r):
        "`r`, with device tensors for the CPU's: the ones that were given, views of them, or new ones."
        if isinstance(r, Tensor):
            if r.device.type != 'cpu': return r
            for t, h in self.pairs:
                if r is h: return t
            for t, h in self.pairs:
                if h.untyped_storage()._cdata == r.untyped_storage()._cdata:
                    return tensor_on(t.untyped_storage(), r.dtype, r.size(), r.stride(), r.storage_offset())
            return on_device(r, self.device)
        if isinstance(r, list): return [self.up(x) for x in r]
        return tuple(self.up(x) for x in r) if isinstance(r, tuple) else r

    def follow(self):
        "`out=` and changes in place may have resized what stands for a device tensor."
        for t, h in self.pairs:
            m = memory_of(t)
            own = h.untyped_storage()._cdata == m._cdata and m.data_ptr() == t.untyped_storage().data_ptr()
            if own and h.shape == t.shape: continue
            storage = t.untyped_storage() if own else storage_on(h.untyped_storage(), t.device)
            set_strided(t, storage, h.shape, h.stride(), h.storage_offset())


def _masks(name, args):
    "Does this operator have to count the elements of a boolean mask?"
    index = args[1] if len(args) > 1 else ()
    if not any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in index): return False
    value = args[2] if len(args) > 2 else None
    return not ('index_put' in name and isinstance(value, Tensor) and value.numel() == 1)


def kernel(op, name):
    "The function that runs for `op` on the device."
    mixed, shape = name.startswith(_MIXED), name in _SHAPE
    indexed = name.startswith(('index.', 'index_put', '_index_put', '_unsafe_index'))
    random = torch.Tag.nondeterministic_seeded in op.tags
    has_device = any(a.name == 'device' for a in op._schema.arguments)
    returns = len(op._schema.returns) > 0
    wants_tensor = [str(a.type) == 'Tensor' for a in op._schema.arguments]

    def run(*args, **kwargs):
        if name in options.missing or name.partition('.')[0] in options.missing:
            raise NotImplementedError(
                f"The operator 'aten::{name}' is not currently implemented for the {here.kind} device."
            )
        with plain():
            call = _Call(name)
            # Python's numbers come as such where C++ has wrapped them in tensors.
            args = tuple(torch.tensor(a) if w and isinstance(a, (int, float)) else a for a, w in zip(args, wants_tensor))
            low, klow = [call.down(a) for a in args], {k: call.down(v) for k, v in kwargs.items()}
            if call.on_cpu and not mixed and call.pairs:
                raise RuntimeError('Expected all tensors to be on the same device, but found at least two devices, '
                                   f'{call.device} and cpu! (aten::{name})')
            if call.device is None: call.device = _resolved(kwargs.get('device'))
            index = call.device.index
            timelines[index].issue()
            if has_device and 'device' in klow: klow['device'] = torch.device('cpu')
            if 'pin_memory' in klow: klow['pin_memory'] = False
            if shape or (indexed and _masks(name, args)): wait('shape', name, index)
            if options.ignores_found_inf and name.startswith('_fused_'): klow.pop('found_inf', None)
            with random_state(index) if random else contextlib.nullcontext(): out = run_on_cpu(op, low, klow)
            call.follow()
            return call.up(out) if returns else None
    run.__name__ = 'sim_' + name.replace('.', '_')
    return run


def _resolved(device):
    device = torch.device(here.kind) if device is None else torch.device(device)
    return device if device.index is not None else torch.device(device.type, current.index())


def run_on_cpu(op, args, kwargs):
    "The CPU's kernel; where a GPU has one for half precision and the CPU has not, in fp32."
    own = CALLS.get(op.__name__.removesuffix('.default'))
    if own is not None: return own(op, *args, **kwargs)
    try: return op(*args, **kwargs)
    except RuntimeError as e:
        if not any(s in str(e) for s in ('not implemented for', 'expected scalar type', 'mixed dtype')): raise
        return _in_fp32(op, args, kwargs, e)


def _in_fp32(op, args, kwargs, error):
    halves: list = []
    def wide(a):
        if isinstance(a, Tensor) and a.dtype in (torch.float16, torch.bfloat16):
            halves.append((a, a.float()))
            return halves[-1][1]
        if isinstance(a, (list, tuple)): return [wide(x) for x in a]
        return torch.float32 if a in (torch.float16, torch.bfloat16) else a
    args, kwargs = [wide(a) for a in args], {k: wide(v) for k, v in kwargs.items()}
    if not halves: raise error
    out, dtype = op(*args, **kwargs), halves[0][0].dtype
    for a, w in halves: a.copy_(w)
    def narrow(r):
        if isinstance(r, (list, tuple)): return tuple(narrow(x) for x in r)
        if not isinstance(r, Tensor): return r
        return next((a for a, w in halves if r is w), r.to(dtype) if r.dtype is torch.float32 else r)
    return narrow(out)


def register(key):
    "Give the dispatch key 'CUDA' or 'PrivateUse1' a kernel for each operator that the CPU, or CUDA, has one for."
    library = torch.library.Library('aten', 'IMPL')
    _libraries.append(library)
    names = set(torch._C._dispatch_get_registrations_for_dispatch_key('CPU'))
    if key == 'CUDA': names |= set(torch._C._dispatch_get_registrations_for_dispatch_key('CUDA'))
    with _quiet():
        for namespace, _, name in sorted(n.partition('::') for n in names):
            base, _, overload = name.partition('.')
            op = getattr(getattr(torch.ops.aten, base, None), overload or 'default', None)
            if namespace != 'aten' or name in OWN or name.startswith(_SKIP) or op is None: continue
            library.impl(name, functools.partial(op.redispatch, CPU) if name in _META else kernel(op, name), key)
        own = {**OWN, **(ONLY_CUDA if key == 'CUDA' else {})}
        for name, function in own.items():
            if function is not None: library.impl(name, function, key)
        # Composite operators that choose by device which library to use.
        for name in ('convolution', 'convolution_backward'):
            library.impl(name, kernel(getattr(torch.ops.aten, name).default, name), key)
        library.impl('scaled_dot_product_attention', OWN['scaled_dot_product_attention'], f'Autograd{key}')


@contextlib.contextmanager
def _quiet():
    "Without C++'s one warning about overriding kernels."
    stderr, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try: yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(null)
