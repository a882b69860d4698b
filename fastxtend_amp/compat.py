"""PyTorch's undocumented names that the core uses.

Each docstring says what is relied on, since which version, and what happens where it is gone. `tests/test_compat.py`
has a test for each.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.utils._pytree import tree_leaves, tree_map  # noqa: F401  since 1.8; torch.compile traces through them

COMPILED_NAME = '_orig_mod'  # of the module inside what `torch.compile(module)` gives; since 2.0
_call = type(torch.autocast_increment_nesting).__call__


class AutocastState:
    """Context that restores this thread's autocast state, for one type of device, and grad mode at its end.

    Relies on the getters and setters that `torch.autocast` calls itself (with a device type since 2.4), and on
    `torch.autocast_increment_nesting` (since 1.10), as there is no getter. A `KeyboardInterrupt` between two lines of
    `torch.autocast.__enter__` leaves state that no `__exit__` restores. Without these names the first fit fails.
    """
    def __init__(self, device_type: str):
        self.nesting = self._nesting()
        self.settings = (
            (torch.set_autocast_enabled, device_type, torch.is_autocast_enabled(device_type)),
            (torch.set_autocast_dtype, device_type, torch.get_autocast_dtype(device_type)),
            (torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()),
            (torch.set_grad_enabled, torch.is_grad_enabled()))

    @staticmethod
    def _nesting() -> int:
        # Both are called from C, by `map`, so that no signal handler runs between them.
        return [*map(_call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))][1]

    def __enter__(self) -> None: pass
    def __exit__(self, *args) -> None:
        extra = self._nesting() - self.nesting
        for _ in range(extra): torch.autocast_decrement_nesting()
        for _ in range(-extra): torch.autocast_increment_nesting()
        torch.clear_autocast_cache()
        for setter, *values in self.settings: setter(*values)


def compiled_module(module: nn.Module) -> nn.Module | None:
    """Return the module inside what `torch.compile(module)` gave; None for any other module.

    Relies on `OptimizedModule._orig_mod` (since 2.0); without it a compiled model counts as one module.
    """
    inner = getattr(module, COMPILED_NAME, None)
    return inner if isinstance(inner, nn.Module) else None


def is_compiled(model: nn.Module) -> bool:
    """Return whether `torch.compile` compiles `model` or a module in it.

    Relies on `OptimizedModule._orig_mod` (since 2.0) and `Module._compiled_call_impl` (2.2), which `Module.compile`
    sets. A function that a model compiles for itself is not seen.
    """
    return any(compiled_module(m) is not None or getattr(m, '_compiled_call_impl', None) for m in model.modules())


class BackwardWithoutAutocast:
    """Context in which models are compiled with the backward pass that they have uncompiled; it may exit twice.

    AOTAutograd traces the backward pass under the autocast of the whole forward pass, so regions with autocast off get
    half-precision products there. Relies on `torch._functorch.config.backward_pass_autocast` (seen in 2.9 and 2.15).
    Without it the first batch of a compiled model fails.
    """
    def __init__(self):
        from torch._functorch import config
        self.config, self.before = config, config.backward_pass_autocast
    def __enter__(self) -> None: self.config.backward_pass_autocast = 'off'
    def __exit__(self, *args: object) -> None: self.config.backward_pass_autocast = self.before


def skips_by_flag(opt: Any) -> bool:
    """Return whether `GradScaler.step` calls `opt.step` with the flag by which the device skips the step.

    Relies on `_step_supports_amp_scaling` of optimizers (since 1.11); without it the host reads the flag at each step.
    """
    return getattr(opt, '_step_supports_amp_scaling', False)


def found_infs_of(scaler: GradScaler, opt: Any) -> list[torch.Tensor]:
    """Return the flags that `scaler.unscale_(opt)` left, one per device: 0-dim fp32, 1 if a gradient is not finite.

    Relies on `GradScaler._found_inf_per_device` (since 1.6); without it the first step with loss scaling fails.
    """
    return [*scaler._found_inf_per_device(opt).values()]


def get_fp32_setting(backend: str, op: str) -> str: # 'ieee', 'tf32', 'bf16', or 'none'
    """Return the setting `fp32_precision` of a backend and an operation ('cuda', 'matmul'); 'none' if it is not set.

    Relies on `torch._C._get_fp32_precision_getter` (since 2.9), which the documented attributes call: assigning to that
    of `torch.backends.mkldnn` sets the generic one. Without it and its setter: `AttributeError`.
    """
    return torch._C._get_fp32_precision_getter(backend, op)


def set_fp32_setting(backend: str, op: str, value: str) -> None:
    "Set what `get_fp32_setting` returns."
    torch._C._set_fp32_precision_setter(backend, op, value)
