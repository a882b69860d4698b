"Checks of what a user gives to loss scaling: arguments, and the state of a scaler."
from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

import numpy as np
from torch.amp import GradScaler

__all__ = ['AUTO', 'DEFAULTS', 'check_scaler_state', 'check_scaling_args', 'is_number']

DEFAULTS = dict(init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)
AUTO = 'auto'                                                    # as `init_scale`: found with the first batch
LARGEST = float(np.finfo(np.float32).max)
STATE_KEYS = ('scale', 'growth_factor', 'backoff_factor', 'growth_interval', '_growth_tracker')


def is_number(x: Any, kind: type = Real) -> bool:
    "Is `x` a number of this kind, and not a bool?"
    return isinstance(x, kind) and not isinstance(x, (bool, np.bool_))


def check_scaling_args(
    init_scale: float | str, growth_factor: float, backoff_factor: float, growth_interval: int, enabled: bool,
    loss_scale: float | None, scaler: GradScaler | None,
) -> None:
    "Raise a `ValueError` (`TypeError` for a `scaler` that is none) that names the first argument that cannot be used."
    def check(ok, name, value, allowed):
        if not ok: raise ValueError(f"{name}={value!r} cannot be used: {name} must be {allowed}.")
    def finite(x): return is_number(x) and abs(x) <= LARGEST
    def positive(x): return finite(x) and np.float32(x) > 0      # the scale is held in fp32
    auto = isinstance(init_scale, str) and init_scale == AUTO
    check(auto or positive(init_scale), 'init_scale', init_scale,
          f"a finite number above 0, such as {DEFAULTS['init_scale']}, or 'auto'")
    check(finite(growth_factor) and growth_factor > 1, 'growth_factor', growth_factor,
          'a finite number above 1, such as 2.0')
    check(positive(backoff_factor) and backoff_factor < 1, 'backoff_factor', backoff_factor,
          'a number between 0 and 1, both excluded, such as 0.5')
    check(is_number(growth_interval, Integral) and growth_interval > 0, 'growth_interval', growth_interval,
          'an integer above 0, such as 2000')
    check(loss_scale is None or positive(loss_scale), 'loss_scale', loss_scale,
          'a finite number above 0, such as 512.0, or None')
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler={scaler!r} cannot be used: scaler must be a torch.amp.GradScaler (or a subclass), or "
                        "None.")
    if auto and not enabled:
        raise ValueError("init_scale='auto' cannot be combined with enabled=False, which scales no loss.\n"
                         "Leave one of them out.")
    chosen = [n for n, v in (('loss_scale', loss_scale), ('scaler', scaler)) if v is not None]
    given = dict(init_scale=init_scale, growth_factor=growth_factor, backoff_factor=backoff_factor,
                 growth_interval=growth_interval)
    clash = chosen[1:] + [f'{k}={v!r}' for k, v in given.items() if v != DEFAULTS[k]]
    if not enabled: clash.append('enabled=False')
    if chosen and clash:
        raise ValueError(f"{chosen[0]} cannot be combined with {', '.join(clash)}: each settles the loss scale in its "
                         "own way. Keep one of them.")


def check_scaler_state(
    state: Any, # What a file held, or a user gave
    where: str = 'state', # Where it comes from, for the message
    own: bool = False, # Whether it is for a scaler that reads states of its own kind: then it only has to be a dict
    then: str = 'Give what `state_dict()` gave.', # What to do about it
) -> None:
    "Raise a `ValueError` that says what is wrong if `state` is not one that `GradScaler.state_dict` could have given."
    def refuse(what):
        raise ValueError(f"The loss scaler's state in {where} cannot be used: {what}. Nothing was loaded.\n{then}")
    if not isinstance(state, Mapping): refuse(f'it is a {type(state).__name__}, not a dict')
    for key in () if own else STATE_KEYS:
        if key not in state: refuse(f'{key!r} is missing')
        value = state[key]
        if not is_number(value): refuse(f'{key!r} is {value!r}, not a number')
        may_be_0, whole = key == '_growth_tracker', key in ('_growth_tracker', 'growth_interval')
        if not abs(value) <= LARGEST: refuse(f'{key!r} is {value!r}, not finite in fp32')
        if whole and value != int(value): refuse(f'{key!r} is {value!r}, not a whole number')
        if value < 0 or (value == 0 and not may_be_0): refuse(f'{key!r} is {value!r}, not above 0')
