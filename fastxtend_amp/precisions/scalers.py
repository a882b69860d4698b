"The `GradScaler`s of this package, dynamic and static, and the checks of their arguments and states."
from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch
from torch.amp import GradScaler

from ..common import check_flag, is_number

_LOWEST = 2.**-24  # fp16's smallest number; a dynamic scale that fell to 0 would let NaN pass as 0 * inf
_LARGEST = torch.finfo(torch.float32).max


class CopyableScaler(GradScaler):
    "A `GradScaler` that can be copied in the middle of a step; the copy is on the CPU and knows nothing of that step."
    def __init__(self, device: str, init_scale: float, **settings: Any):
        super().__init__(device, init_scale, **settings)
        self.first_scale = float(init_scale)                     # `load_state_dict` changes `_init_scale`

    def on(self, device: str) -> CopyableScaler:
        "Return a scaler for this type of device, in the same state."
        new = type(self)(device, self.first_scale)
        new.load_state_dict(self.state_dict())
        return new

    def __reduce__(self):
        return partial(type(self), 'cpu', self.first_scale, enabled=self.is_enabled()), (), self.state_dict()
    def __setstate__(self, state: dict[str, Any]) -> None: self.load_state_dict(state)


class DynamicScaler(CopyableScaler):
    "PyTorch's `GradScaler` with a smallest scale, 2**-24, below which no step could succeed."
    def update(self, new_scale: Any = None) -> None:
        "Let the scale grow or back off, or set it to `new_scale`."
        super().update(new_scale)
        scale: Any = self._scale                                 # no public method changes it in place
        scale.clamp_(min=_LOWEST)


class StaticScaler(CopyableScaler):
    "A `GradScaler` whose scale never changes: it skips steps whose gradients are not finite."
    def update(self, new_scale: Any = None) -> None:
        "Keep the scale."
        super().update(self.first_scale)


class UnitScaler(StaticScaler):
    "A `GradScaler` whose scale is always 1: it changes no finite number."


# Arguments of `GradScaler` by name, with their defaults.
SCALING = {name: p.default for name, p in inspect.signature(GradScaler).parameters.items() if name != 'device'}
_BOUNDS = {  # both excluded; a scale is an fp32 number
    'init_scale': (Real, _LOWEST, _LARGEST),
    'growth_factor': (Real, 1, _LARGEST),
    'backoff_factor': (Real, 0, 1),
    'growth_interval': (Integral, 0, _LARGEST),
    'loss_scale': (Real, _LOWEST, _LARGEST),
}
_KINDS = {Real: 'a number', Integral: 'an integer'}


def check_scaling_arguments(
    **given: Any # The arguments of `GradScaler`, `loss_scale` and `scaler`
) -> None:
    "Raise a `ValueError` (`TypeError` for `scaler`) that names the first argument that cannot be used."
    for name, (kind, low, high) in _BOUNDS.items():
        value, default = given[name], SCALING.get(name)          # None for a loss scale
        if value is default or (is_number(value, kind) and low < value < high): continue
        raise ValueError(f'{name}={value!r} cannot be used: it must be {_KINDS[kind]} above {low:g} and below '
                         f'{high:g}, or the default, {default}.')
    check_flag('enabled', given['enabled'])
    if not isinstance(scaler := given['scaler'], (GradScaler, type(None))):
        raise TypeError(f'scaler={scaler!r} cannot be used: scaler must be a torch.amp.GradScaler, or None.')
    changed = {name: value for name, value in given.items() if value != SCALING.get(name)}
    if len(changed) > 1 and {'loss_scale', 'scaler'} & {*changed}:
        raise ValueError(f"{', '.join(f'{k}={v!r}' for k, v in changed.items())} cannot be combined: each of them sets "
                         'the loss scale. Keep one.')


def check_scaler_state(state: Any) -> None:
    "Raise a `ValueError` that names the first number of a `GradScaler.state_dict` that is missing or cannot be used."
    kinds = {'scale': Real, 'growth_factor': Real, 'backoff_factor': Real, 'growth_interval': Integral,
             '_growth_tracker': Integral}
    for key, kind in kinds.items():
        value: Any = state.get(key) if isinstance(state, Mapping) else None
        if is_number(value, kind) and 0 <= value <= _LARGEST: continue   # version 0.4 let the scale fall to 0
        raise ValueError(f'The loss scale cannot be loaded: {key!r} is {value!r}, not {_KINDS[kind]} from 0 to '
                         f'{_LARGEST:g}. Nothing was loaded.\n`learn.load(..., with_opt=False)` loads only the model.')
