"""Every use of a name that PyTorch, fastai, fastcore or torch_xla do not document.

One function for each, whose docstring says what it relies on, since which version, and what happens where it is gone.
`tests/test_compat.py` has a test for each, which fails with its name.
"""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

# -- autocast

_call = type(torch.autocast_increment_nesting).__call__


def autocast_nesting() -> int:
    """How many autocast contexts are entered in this thread.

    Relies on `torch.autocast_increment_nesting` and `autocast_decrement_nesting` (since 1.10): there is no getter. Both
    are called from C, by `map`, so that no signal handler can run between them. Without them importing this fails.
    """
    return [*map(_call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))][1]


class AutocastState:
    """autocast's state in this thread for one type of device, as it is when this is built; `restore` puts it back.

    Relies on the getters and setters that `torch.autocast` itself calls (`torch.set_autocast_enabled` and others, with
    a device type since 2.4). Leaving contexts in order is not enough: an interrupt can strike between two lines of
    `torch.autocast.__enter__`. Without them importing this, or the first batch, fails with an `AttributeError`.
    """
    def __init__(self, device_type: str):
        self.device_type, self.nesting = device_type, autocast_nesting()
        self.enabled, self.dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        self.cache = torch.is_autocast_cache_enabled()

    def restore(self) -> None:
        "Put the state back and forget the cast weights, which an optimizer step makes stale; can be called again."
        extra = autocast_nesting() - self.nesting
        for _ in range(extra): torch.autocast_decrement_nesting()
        for _ in range(-extra): torch.autocast_increment_nesting()
        torch.set_autocast_enabled(self.device_type, self.enabled)
        torch.set_autocast_dtype(self.device_type, self.dtype)
        torch.set_autocast_cache_enabled(self.cache)
        torch.clear_autocast_cache()


def set_autocast_dtype(device_type: str, dtype: torch.dtype) -> None:
    """Set the dtype of autocast for this thread, whether autocast is on or not.

    Relies on `torch.set_autocast_dtype` (since 2.4); without it the first batch of a `DataParallel` model fails.
    """
    torch.set_autocast_dtype(device_type, dtype)


def dtype_of(t: torch.Tensor) -> torch.dtype:
    """The dtype of `t`, read past `__torch_function__`, which takes microseconds for fastai's tensor types.

    Relies on `torch._C.DisableTorchFunctionSubclass` (since 2.0); where it is gone the attribute is read as usual.
    """
    if _PlainTensors is None: return t.dtype
    with _PlainTensors(): return t.dtype


_PlainTensors = getattr(torch._C, 'DisableTorchFunctionSubclass', None)


# -- fastai's loop

def events_method() -> str:
    """Name of the `Learner` method that runs a function between its events `before_...` and `after_...`.

    Relies on fastai 2's `_with_events(f, event_type, ex, final)`. Without it a fit that an exception ends would keep
    the callback's traces until the next one.
    """
    return '_with_events'


# -- loss scaling and optimizers

def move_scaler(scaler: GradScaler, device_type: str) -> None:
    """Have `scaler` work on another type of device from now on; scale and growth tracker go with it.

    Does what GradScaler's own `__setstate__` relies on: `_scale` and `_growth_tracker` are made anew from
    `_init_scale` and `_init_growth_tracker`, on the device of the first loss (since 1.6; `_device` since 2.3). Without
    `_device` the scaler asks for the right device itself.
    """
    if scaler.is_enabled() and scaler._scale is not None and scaler._scale.device.type != device_type:
        state = scaler.state_dict()
        scaler._init_scale, scaler._init_growth_tracker = state['scale'], state['_growth_tracker']
        scaler._scale = scaler._growth_tracker = None
    scaler._device = device_type


def found_inf_flags(scaler: GradScaler, opt: Any) -> list[torch.Tensor]:
    """The flags that `scaler.unscale_(opt)` left, one for each device: 0-dim fp32, 1 if a gradient was not finite.

    Relies on `GradScaler._found_inf_per_device` (since 1.6). Without it: `AttributeError` at the first fp16 step.
    """
    return list(scaler._found_inf_per_device(opt).values())


def has_unscaled(scaler: GradScaler) -> bool:
    """Has `scaler` unscaled gradients since its last `update`?

    Relies on `GradScaler._per_optimizer_states` (since 1.6). Without it: `AttributeError` at the first fp16 step.
    """
    return bool(scaler._per_optimizer_states)


def forget_unscale(scaler: GradScaler) -> None:
    """Take back an `unscale_` that no `update` will follow: GradScaler has no public way.

    Relies on `GradScaler._per_optimizer_states` (since 1.6). Without it: `AttributeError` at the first step called off.
    """
    if scaler.is_enabled(): scaler._per_optimizer_states.clear()


def scale_version(scaler: GradScaler) -> tuple:
    """A value that changes when somebody changes scale or rules of `scaler`, read without a GPU synchronization.

    Relies on `GradScaler._scale`, `_init_scale`, `_init_growth_tracker` and on a tensor's `_version`, which counts
    in-place changes. Where one is gone every step counts as a change, and the scale is read at each.
    """
    try:
        scale = scaler._scale
        made = None if scale is None else (id(scale), scale._version)
        start = scaler._init_scale, scaler._init_growth_tracker
    except AttributeError: return (object(),)
    rules = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    return id(scaler), made, start, rules


def grads_version(params: list[nn.Parameter]) -> list[tuple[int, int]]:
    """A value that changes when somebody changes the gradients of `params`; no operator runs.

    Relies on a tensor's `_version` (since 1.0), which counts in-place changes. Without it the value always differs.
    """
    return [(id(p.grad), getattr(p.grad, '_version', object())) for p in params if p.grad is not None]


def arm_found_inf(opt: torch.optim.Optimizer, flag: torch.Tensor) -> None:
    """Have the next steps of `opt`, a fused optimizer, do nothing if `flag` is 1; `disarm_found_inf` ends this.

    Relies on the attributes `found_inf` and `grad_scale` that `GradScaler.step` sets on fused optimizers (since 2.0),
    and on the argument `found_inf` of torch_xla's sync-free ones. `honours_found_inf` tries it before it is used.
    """
    if is_syncfree(opt): opt.__dict__['step'] = functools.partial(opt.step, found_inf=flag)
    else: opt.__dict__.update(grad_scale=None, found_inf=flag)


def disarm_found_inf(opt: torch.optim.Optimizer) -> None:
    "Take off what `arm_found_inf` put on, where it would decide the next step too."
    for name in ('grad_scale', 'found_inf', *(['step'] if is_syncfree(opt) else [])): opt.__dict__.pop(name, None)


def supports_found_inf(opt: Any) -> bool:
    """Does `opt` say that its step can be skipped by a flag on the device?

    Relies on `_step_supports_amp_scaling`, which fused optimizers set (since 2.0). Without it the host decides.
    """
    return bool(getattr(opt, '_step_supports_amp_scaling', False))


@functools.lru_cache
def honours_found_inf(kind: Any, device: torch.device, options: tuple) -> bool:
    """Does a fused optimizer of this class really skip a step on `device`? Found by two trial steps on one number.

    Makes loud what would go wrong silently: kernels that ignore `found_inf`, as those of MPS did (PyTorch issue
    186360), and a change of the attribute's name. Waits for the device, once in a process for each class and device.
    """
    p = torch.ones(1, device=device, requires_grad=True)
    try:
        trial = kind([p], lr=.5, **dict(options))
        values = []
        for flag in (0., 1.):
            p.grad = torch.ones_like(p)
            arm_found_inf(trial, torch.full((), flag, device=device))
            trial.step()
            disarm_found_inf(trial)
            values.append(float(p.detach()))
    except (RuntimeError, TypeError, ValueError): return False
    return values[0] != 1. and values[1] == values[0]


def is_syncfree(opt: Any) -> bool:
    """Is `opt` one of torch_xla's optimizers whose `step` takes a `found_inf`? torch_xla is not imported for that.

    Relies on their module's name, `torch_xla.amp.syncfree` (since 1.8). Where it is gone the host decides.
    """
    return type(opt).__module__.startswith('torch_xla.amp.syncfree')


def syncfree_state(opt: Any, state: dict[str, Any]) -> bool:
    """Was `state`, of one parameter, made by a sync-free step?

    Relies on what torch_xla 2.9's keep: Adam an empty `max_exp_avg_sq`, SGD a `step`. Otherwise the host decides.
    """
    return is_syncfree(opt) and ('step' if isinstance(opt, torch.optim.SGD) else 'max_exp_avg_sq') in state


# -- modules

def compiled_module(module: nn.Module) -> nn.Module | None:
    """The module inside what `torch.compile(module)` gave; None for any other module.

    Relies on `OptimizedModule._orig_mod` (since 2.0). Where it is gone a compiled model counts as one module.
    """
    inner = module.__dict__.get('_modules', {}).get('_orig_mod')
    return inner if isinstance(inner, nn.Module) else None


class NotScriptable:
    """Base of objects on a module's `forward` that `torch.jit.script` cannot compile: it is refused with what to do.

    Relies on `torch.jit.script` asking a module's `forward` for `__globals__` (since 1.2). Where it does not, scripting
    ends in PyTorch's own error.
    """
    def __getattr__(self, name: str) -> Any:
        if name != '__globals__': raise AttributeError(f'{type(self).__name__!r} object has no attribute {name!r}')
        raise AttributeError("torch.jit.script cannot compile a model with an object of fastxtend_amp on a module's "
                             f"forward ({type(self).__name__}).\nCall `learn.to_fp32()` before, or use `torch.export` "
                             "or "
                             "`torch.compile`.")


COMPILED_NAME = '_orig_mod'  # what `compiled_module` relies on, as a part of a module's qualified name


# -- half_weights


# -- insight


# -- devices

def replace_replicate(
    parallel: nn.DataParallel, # The module whose replicas are to be changed
    replicate: Callable | None, # Called with module and device ids, returns the replicas; None for PyTorch's own
) -> None:
    """Have `parallel` make its replicas by `replicate`.

    Relies on `DataParallel.forward` calling `self.replicate(module, device_ids)`, a public method that no page of the
    documentation names (PyTorch 2.9 to 2.14). Where it is gone: `RuntimeError`, because the replicas would compute in
    the device's default precision.
    """
    if not hasattr(nn.DataParallel, 'replicate'):
        raise RuntimeError("nn.DataParallel has no method `replicate` in this version of PyTorch.\n"
                           "Its replicas would not compute in the precision of the fit.\n"
                           "Use DistributedDataParallel, or `learn.to_fp32()`.")
    if replicate is not None: parallel.__dict__['replicate'] = replicate
    else: parallel.__dict__.pop('replicate', None)


# -- tools
