"Kernels of the simulated device that the CPU has not: copies, memory, random numbers, and what only GPUs fuse."
from __future__ import annotations

import collections, contextlib

import torch

from .clock import _lock, current, options, timelines, wait
from .memory import here, host, is_pinned, on_device, plain, set_strided, storage_on, tensor_on

# -- random numbers: each device has a state of its own

_generators: collections.defaultdict = collections.defaultdict(torch.Generator)


@contextlib.contextmanager
def random_state(index):
    "Draws inside come from the device's state."
    g, own = torch.default_generator, _generators[index]
    outer = g.get_state()
    g.set_state(own.get_state())
    try: yield
    finally:
        own.set_state(g.get_state())
        g.set_state(outer)


def _index(device):
    if isinstance(device, int): return device
    index = None if device is None else torch.device(device).index
    return current.index() if index is None else index


def manual_seed(seed): _generators[current.index()].manual_seed(int(seed))
def manual_seed_all(seed):
    for i in range(options.n_devices): _generators[i].manual_seed(int(seed))
def get_rng_state(device=None): return _generators[_index(device)].get_state()
def set_rng_state(state, device=None): _generators[_index(device)].set_state(state)
def get_rng_state_all(): return [get_rng_state(i) for i in range(options.n_devices)]
def set_rng_state_all(states):
    for i, state in enumerate(states): set_rng_state(state, i)


# -- memory

def _strides(size, memory_format):
    kwargs = {} if memory_format in (None, torch.preserve_format) else {'memory_format': memory_format}
    return torch.empty(size, device='meta', **kwargs).stride()


def _nbytes(size, stride, dtype):
    n = 1 + sum((s - 1) * st for s, st in zip(size, stride)) if all(size) else 0
    return n * torch.empty(0, dtype=dtype).element_size()


def _empty_strided(size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    dtype, index = dtype or torch.get_default_dtype(), _index(device)
    timelines[index].issue()
    with plain():
        memory = torch.UntypedStorage(_nbytes(size, stride, dtype))
        return tensor_on(storage_on(memory, torch.device(here.kind, index)), dtype, size, stride, 0)


def _empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    with plain(): stride = _strides(size, memory_format)
    return _empty_strided(size, stride, dtype=dtype, device=device)


def _resize(self, size, *, memory_format=None):
    with plain():
        stride, storage = _strides(size, memory_format), self.untyped_storage()
        need = _nbytes(size, stride, self.dtype) + self.storage_offset() * self.element_size()
        if need > storage.nbytes():
            memory, n = torch.UntypedStorage(need), storage.nbytes()
            as_bytes = lambda m: torch.empty(0, dtype=torch.uint8).set_(m)[:n]
            if n: as_bytes(memory).copy_(as_bytes(storage._memory))
            storage = storage_on(memory, self.device)
        set_strided(self, storage, size, stride, self.storage_offset())
    return self


def _copy(self, src, non_blocking=False):
    if self is src: return self
    with plain():
        to, of = self.device.type, src.device.type
        index = (src if to == 'cpu' else self).device.index
        timelines[index].issue()
        if to == of: host(self).copy_(host(src))
        elif to != 'cpu':
            if not non_blocking: wait('h2d', 'copy_', index)
            host(self).copy_(src)
        elif non_blocking and is_pinned(self): _copy_late(self, host(src).clone(), timelines[index])
        else:
            wait('d2h', 'copy_', index)
            self.copy_(host(src))
    return self


def _copy_late(to, values, timeline):
    target = to.detach()
    if target.is_contiguous() and target.numel(): target.view(-1).view(torch.uint8).fill_(0xA5)   # until it arrives
    with _lock: timeline.late.append((timeline.last, lambda: target.copy_(values)))
    timeline.arrive()


def _item(self):
    wait('read', '_local_scalar_dense', self.device.index)
    with plain(): return host(self).reshape(()).tolist()


# -- the CPU's kernels with what only a GPU's do

def _softmax(op, x, dim, half_to_float): return op(x.float() if half_to_float else x, dim, False)
def _softmax_backward(op, grad, out, dim, dtype): return op(grad, out, dim, grad.dtype).to(dtype)


CALLS = {'_softmax': _softmax, '_log_softmax': _softmax,
         '_softmax_backward_data': _softmax_backward, '_log_softmax_backward_data': _softmax_backward}


def _low(*tensors): return [None if t is None else host(t).float() for t in tensors]


def _lstm_cell(igates, hgates, cx, input_bias=None, hidden_bias=None):
    with plain():
        gates, hidden, c_in, *biases = _low(igates, hgates, cx, input_bias, hidden_bias)
        gates = gates + hidden
        for b in biases: gates = gates if b is None else gates + b
        i, f, c, o = gates.chunk(4, 1)
        i, f, c, o = i.sigmoid(), f.sigmoid(), c.tanh(), o.sigmoid()
        cy = f * c_in + i * c
        out = o * cy.tanh(), cy, torch.cat([i, f, c, o], 1)
        return tuple(on_device(t.to(igates.dtype), igates.device) for t in out)


def _lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    with plain():
        gh, gc, cx, cy, w = _low(grad_hy, grad_cy, cx, cy, workspace)
        i, f, c, o = w.chunk(4, 1)
        t = cy.tanh()
        gh, gc = torch.zeros_like(cy) if gh is None else gh, torch.zeros_like(cy) if gc is None else gc
        d = gh * o * (1 - t * t) + gc
        gates = torch.cat([d * c * i * (1 - i), d * cx * f * (1 - f), d * i * (1 - c * c), gh * t * o * (1 - o)], 1)
        gates = gates.to(workspace.dtype)
        up = lambda t: on_device(t, workspace.device)
        return up(gates), up((d * f).to(gates.dtype)), up(gates.sum(0)) if has_bias else None


def _rms_norm(x, shape, weight, eps):
    with plain():
        low, dims = host(x).float(), tuple(range(-len(shape), 0))
        rstd = (low.square().mean(dims, keepdim=True) + (eps or torch.finfo(x.dtype).eps)).rsqrt()
        out = low * rstd if weight is None else low * rstd * host(weight).float()
        return on_device(out.to(x.dtype), x.device), on_device(rstd, x.device)


def _rms_norm_backward(grad, x, shape, rstd, weight, mask):
    with plain():
        (g, low), r, dims = _low(grad, x), host(rstd), tuple(range(-len(shape), 0))
        of_weight = None
        if weight is not None:
            of_weight = (g * low * r).sum(tuple(range(low.dim() - len(shape)))).to(weight.dtype)
            of_weight, g = on_device(of_weight, x.device), g * host(weight).float()
        of_x = r * (g - low * r.square() * (g * low).mean(dims, keepdim=True))
        return on_device(of_x.to(x.dtype), x.device), of_weight


def _sdpa(query, key, value, attn_mask=None, dropout_p=0., is_causal=False, *, scale=None, enable_gqa=False):
    math = torch.ops.aten._scaled_dot_product_attention_math
    return math(query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]


# By the operator's name; None: registered elsewhere, or left to C++.
OWN = {'copy_': _copy, 'resize_': _resize, 'empty.memory_format': _empty, 'empty_strided': _empty_strided,
       '_local_scalar_dense': _item, '_thnn_fused_lstm_cell': _lstm_cell,
       '_thnn_fused_lstm_cell_backward_impl': _lstm_cell_backward, 'scaled_dot_product_attention': _sdpa,
       **dict.fromkeys(('convolution', 'convolution_backward', 'record_stream', 'is_pinned', '_pin_memory', 'is_set_to',
                        '_fused_rms_norm', '_fused_rms_norm_backward'))}
ONLY_CUDA = {'_fused_rms_norm': _rms_norm, '_fused_rms_norm_backward': _rms_norm_backward}
