"The `GradScaler`s of this package, dynamic and static, and the checks of their arguments, states and models."
from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.amp import GradScaler

from ..common import is_number

__all__ = ['LOWEST', 'DynamicScaler', 'StaticScaler', 'UnitScaler', 'check_scaler_state', 'check_scaling_arguments',
           'check_unscalable']

LOWEST = 2.**-24  # fp16's smallest number; a dynamic scale that fell to 0 would let NaN pass as 0 * inf
_LARGEST = float(np.finfo(np.float32).max)


class _Scaler(GradScaler):
    "A `GradScaler` that can be copied in the middle of a step; the copy is on the CPU and knows nothing of that step."
    def __init__(self, device: str, init_scale: float, **settings: Any):
        super().__init__(device, init_scale, **settings)
        self.first_scale = float(init_scale)                     # `load_state_dict` changes `_init_scale`

    def __reduce__(self): return _copy, (type(self), self.first_scale, self.state_dict())


def _copy(kind: type[GradScaler], first_scale: float, state: dict[str, Any]) -> GradScaler:
    new = kind('cpu', first_scale, enabled=bool(state))
    new.load_state_dict(state)
    return new


class DynamicScaler(_Scaler):
    "PyTorch's `GradScaler` with a smallest scale, 2**-24, below which no step could succeed."
    def update(self, new_scale: Any = None) -> None:
        "Let the scale grow or back off, or set it to `new_scale`."
        super().update(new_scale)
        scale: Any = self._scale                                 # no public method changes it in place
        scale.clamp_(min=LOWEST)


class StaticScaler(_Scaler):
    "A `GradScaler` whose scale never changes: it skips steps whose gradients are not finite."
    def update(self, new_scale: Any = None) -> None:
        "Keep the scale."
        super().update(self.first_scale)


class UnitScaler(StaticScaler):
    "A `GradScaler` whose scale is always 1: it changes no finite number."


def check_scaling_arguments(
    settings: Mapping[str, Any], # Arguments of `GradScaler` by name
    loss_scale: float | None, # A static scale
    scaler: object, # A user's own `GradScaler`
    defaults: Mapping[str, Any], # Of `settings`
) -> None:
    "Raise a `ValueError` (`TypeError` for `scaler`) that names the first argument that cannot be used."
    def finite(x): return is_number(x) and abs(x) <= _LARGEST
    def positive(x): return finite(x) and np.float32(x) > 0      # the scale is an fp32 number
    given = {**settings, 'loss_scale': loss_scale}
    for name, can_be_used, allowed in (
        ('init_scale', positive, 'a finite number above 0, such as the default, 65536.0, which falls to what fits'),
        ('growth_factor', lambda x: finite(x) and x > 1, 'a finite number above 1, such as 2.0'),
        ('backoff_factor', lambda x: positive(x) and x < 1, 'a number between 0 and 1, both excluded, such as 0.5'),
        ('growth_interval', lambda x: is_number(x, Integral) and x > 0, 'an integer above 0, such as 2000'),
        ('enabled', lambda x: x in (True, False), 'True or False'),
        ('loss_scale', lambda x: x is None or positive(x), 'a finite number above 0, such as 512.0, or None')):
        value = given[name]
        if not can_be_used(value): raise ValueError(f"{name}={value!r} cannot be used: {name} must be {allowed}.")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler={scaler!r} cannot be used: scaler must be a torch.amp.GradScaler (or a subclass), or "
                        "None.")
    chosen = [n for n, v in (('loss_scale', loss_scale), ('scaler', scaler)) if v is not None]
    clash = chosen[1:] + [f'{k}={v!r}' for k, v in given.items() if v != defaults.get(k, v)]
    if chosen and clash:
        raise ValueError(f"{chosen[0]} cannot be combined with {', '.join(clash)}: each of them sets the loss scale. "
                         "Keep one.")


def check_scaler_state(state: Any) -> None:
    "Raise a `ValueError` that says what is wrong if no `GradScaler.state_dict` could have returned `state`."
    def fail(what): raise ValueError(f'The loss scale cannot be loaded: {what}. Nothing was loaded.\n'
                                     'Use what `state_dict()` returned.')
    if not isinstance(state, Mapping): fail(f'the state is a {type(state).__name__}, not a dict')
    for key, kind, allowed in (                                  # version 0.4 let the scale fall to 0
        ('scale', Real, 'a number from 0'), ('growth_factor', Real, 'a number above 0'),
        ('backoff_factor', Real, 'a number above 0'), ('growth_interval', Integral, 'an integer above 0'),
        ('_growth_tracker', Integral, 'an integer from 0')):
        value = state.get(key)
        in_range = is_number(value, kind) and 0 <= value <= _LARGEST and (value or 'from' in allowed)
        if not in_range: fail(f'{key!r} is {value!r}, not {allowed}')


def check_unscalable(
    model: nn.Module, # The model to train
    what: str, # What needs gradients that can be unscaled, for the message
    instead: str, # What to do instead, for the message
) -> None:
    "Raise a `ValueError` for fp16 and complex parameters, whose gradients `GradScaler` cannot unscale."
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if fp16 := [name for name, p in trained if p.dtype is torch.float16]:
        raise ValueError(f"{what} needs fp32 parameters, but {len(fp16)} to be trained are fp16, such as '{fp16[0]}'.\n"
                         "Call `learn.model.float()` first: autocast itself casts what can run in 16 bits.")
    if complex_ := [name for name, p in trained if p.is_complex()]:
        raise ValueError(f"{what}: '{complex_[0]}' is a complex parameter, whose gradients `GradScaler` cannot unscale."
                         f'\nUse `learn.to_bf16()` or `learn.to_fp32()`, or {instead}.')
