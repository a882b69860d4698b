"The functions of `torch.cuda`, or of `torch.sim`, for simulated devices."
from __future__ import annotations

import contextlib, types

import torch

from .clock import Event, Stream, _index, current, options, wait
from .cpp import current_index, exchange_index
from .memory import Block
from .own_kernels import (get_rng_state, get_rng_state_all, manual_seed, manual_seed_all, set_rng_state,
                          set_rng_state_all)

_MODES = ['default', 'warn', 'error']


class device:
    "As `torch.cuda.device`: a context in which another device is the current one."
    def __init__(self, device): self.index = _index(device)
    def __enter__(self): self.before = exchange_index(self.index)
    def __exit__(self, *args): exchange_index(self.before)


def set_device(device): exchange_index(_index(device))
def synchronize(device=None): wait('sync', 'synchronize', _index(device))
def set_sync_debug_mode(mode): current.sync_mode = mode if mode in _MODES else _MODES[mode]
def get_sync_debug_mode(): return _MODES.index(current.sync_mode)
def memory_now(device=None): return Block.now
def memory_peak(device=None): return Block.peak
def reset_peak(device=None): Block.peak = Block.now
def current_stream(device=None): return Stream(device)


def properties(device=None):
    major, minor = options.capability
    return types.SimpleNamespace(
        name='simulated', major=major, minor=minor, total_memory=2**34, multi_processor_count=1
    )


def functions() -> dict:
    "By their names in the module."
    yes, nothing = lambda *args: True, lambda *args: None
    return dict(
        is_available=yes, is_initialized=yes, init=nothing, _lazy_init=nothing, _is_in_bad_fork=lambda: False,
        device_count=lambda: options.n_devices, current_device=current_index, set_device=set_device, device=device,
        _exchange_device=exchange_index, _maybe_exchange_device=exchange_index, synchronize=synchronize,
        Event=Event, Stream=Stream, current_stream=current_stream, default_stream=current_stream,
        stream=lambda s: contextlib.nullcontext(), is_current_stream_capturing=lambda: False,
        get_device_name=lambda d=None: 'simulated', get_device_capability=lambda d=None: options.capability,
        get_device_properties=properties, is_bf16_supported=lambda including_emulation=True: options.bf16,
        get_amp_supported_dtype=lambda: options.amp_dtypes,
        manual_seed=manual_seed, manual_seed_all=manual_seed_all, seed=lambda: manual_seed(torch.seed()),
        seed_all=lambda: manual_seed_all(torch.seed()), get_rng_state=get_rng_state, set_rng_state=set_rng_state,
        get_rng_state_all=get_rng_state_all, set_rng_state_all=set_rng_state_all,
        memory_allocated=memory_now, max_memory_allocated=memory_peak, reset_peak_memory_stats=reset_peak,
        memory_reserved=memory_now, max_memory_reserved=memory_peak, empty_cache=nothing,
        set_sync_debug_mode=set_sync_debug_mode, get_sync_debug_mode=get_sync_debug_mode)
