"""Loss scaling: a `GradScaler` for each fit, whether gradients are scaled, and the history of the steps.

`LossScaling` belongs to a callback and lasts over all of its fits; `FitScaling` belongs to one fit.
"""
from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from itertools import takewhile
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from fastai.learner import Learner
from fastai.optimizer import Optimizer, OptimWrapper
from torch import nn
from torch.amp import GradScaler

from .compat import found_inf_of, skips_by_flag
from .mode import AMPMode
from .optimizers import FUSED

__all__ = ['SKIPPING', 'LossScaling', 'UnitScaler', 'check_scaler_state', 'is_number', 'optimizer_params']

DEFAULTS = dict(init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True)
LARGEST = float(np.finfo(np.float32).max)
STATE_KEYS = ('scale', 'growth_factor', 'backoff_factor', 'growth_interval', '_growth_tracker')
READ_EVERY = 512                                                 # steps between two reads of the history


class NotingGradScaler(GradScaler):
    """PyTorch's `GradScaler`, which notes that a loss was scaled, also by a user's code as `learn.scaler`.

    A copy that is made in the middle of a step has no trace of that step.
    """
    grads_scaled = False                                         # each gradient is multiplied by the scale, or zero

    def scale(self, outputs: Any) -> Any:
        self.grads_scaled = True
        return super().scale(outputs)

    def __reduce__(self): return _same_scaler, (self.state_dict(),)


class UnitScaler(NotingGradScaler):
    "A scaler whose scale is always 1: it skips steps whose gradients are not finite, and changes no finite number."
    def __init__(self, device_type: str): super().__init__(device_type, init_scale=1.)
    def update(self, new_scale: Any = None) -> None: super().update(1.)


def _same_scaler(state: dict[str, float]) -> NotingGradScaler:
    scaler = NotingGradScaler('cpu', enabled=bool(state))
    scaler.load_state_dict(state)
    return scaler


class _Probe:
    "Stands in for the optimizer in `GradScaler.step`, which calls `step` only if every gradient is finite."
    def __init__(self, params: list[nn.Parameter]): self.param_groups, self.stepped = [{'params': params}], False
    def step(self) -> None: self.stepped = True


def optimizer_params(opt: Optimizer | OptimWrapper | None) -> list[nn.Parameter]:
    "Return the parameters of `opt`, each once; none for None."
    return [] if opt is None else [*dict.fromkeys(p for params in opt.param_lists for p in params)]


class StepHistory:
    "The loss scale of each attempted optimizer step, and whether it was skipped; new entries may be on the device."
    def __init__(self):
        self._scales, self._skips = array('f'), array('b')
        self._unread: list[tuple] = []                           # scale and flag of the newest steps

    def __len__(self) -> int: return len(self._skips) + len(self._unread)

    def add(self,
        scale: torch.Tensor, # 0-dim
        skipped: bool | torch.Tensor, # A flag, 0-dim: 1 if the step was skipped
    ) -> None:
        "Note a step; this waits for the device once in 512 steps."
        self._unread.append((scale, skipped))
        if len(self._unread) == READ_EVERY: self.read()

    def read(self) -> None:
        "Bring the entries that are still on the device to the host; this waits for it."
        if not self._unread: return
        tensors = [t for entry in self._unread for t in entry if torch.is_tensor(t)]
        values, unread, self._unread = iter(torch.stack(tensors).tolist()), self._unread, []    # waits once
        for _, skipped in unread:
            self._scales.append(next(values))
            self._skips.append(skipped if isinstance(skipped, bool) else next(values) > 0)

    def forget(self, n: int) -> None:
        "Keep the first `n` steps alone."
        self.read()
        del self._scales[n:], self._skips[n:]

    def skips(self, start: int = 0) -> list[bool]:
        "Return for each step from `start` on whether it was skipped."
        self.read()
        return [*map(bool, self._skips[start:])]

    def scales(self) -> list[float]:
        "Return the loss scale of each step."
        self.read()
        return self._scales.tolist()


class NoScaling:
    "The loss scaling of a fit that scales nothing, as a context; and of no fit."
    found_inf, held_back, skips_in_a_row, scaler = False, False, 0, None

    def __init__(self, learn: Any = None): self.learn = learn    # None outside of a fit
    def __enter__(self) -> NoScaling:
        self.learn.scaler = GradScaler('cpu', enabled=False)     # as fastai users expect it
        return self
    def __exit__(self, *args: object) -> None: self.learn.scaler = None
    def skip_message(self) -> str: return ''
    def scale_loss(self, loss: Any) -> Any: return loss
    def step(self, step: Callable[[], object]) -> None: step()
    def unscale(self, may_skip_on_device: bool = True) -> None: pass
    def follow(self, factor: float) -> None: pass
    def nothing(self) -> None: pass
    update = cancel = expect_zeros = read = nothing


NO_SCALING = NoScaling()


class LossScaling:
    """The loss scaling of one callback: its arguments, the scale between two fits, and the history of all steps.

    Each fit has a new scaler, which begins with the state that the fit before ended with; a `scaler` that the user gave
    serves every fit.
    """
    def __init__(self, init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int,
                 enabled: bool, loss_scale: float | None = None, scaler: GradScaler | None = None):
        self.settings: dict[str, Any] = dict(
            init_scale=init_scale, growth_factor=growth_factor, backoff_factor=backoff_factor,
            growth_interval=growth_interval, enabled=enabled)
        _check_arguments(self.settings, loss_scale, scaler)
        self.static = None if loss_scale is None else float(loss_scale)   # the scale that neither grows nor shrinks
        if self.static is not None: self.settings['init_scale'] = self.static
        self.given = scaler
        self.state: dict[str, float] | None = None               # of the scaler after the last fit, or as loaded
        self.history = StepHistory()
        self.fit: Any = NO_SCALING                               # `FitScaling` of the open fit

    def __getstate__(self) -> dict[str, Any]:
        "Return the state of a copy, which is outside a fit."
        self.history.read()
        return {**vars(self), 'state': self.state_dict(), 'fit': NO_SCALING}

    def scaler_for(self, device_type: str) -> GradScaler:
        "Return the user's scaler, or a new one in the present state."
        if self.given is not None: return self.given
        scaler = NotingGradScaler(device_type, **self.settings)
        scaler.load_state_dict(self.state or scaler.state_dict())
        return scaler

    def begin(self,
        learn: Learner,
        device: torch.device, # The device of the loss
        mode: AMPMode | None, # None for fp32
        skip_nonfinite: bool, # Whether bf16 skips steps whose gradients are not finite
    ) -> FitScaling | NoScaling: # To enter
        "Return the loss scaling of a fit that begins."
        scaler = None
        if mode is not None and mode.needs_loss_scaling: scaler = self.scaler_for(device.type)
        elif mode is not None and skip_nonfinite: scaler = UnitScaler(device.type)
        if scaler is None or not scaler.is_enabled(): return NoScaling(learn)
        return FitScaling(self, learn, device, scaler)

    def state_dict(self) -> dict[str, float]:
        "Return scale, growth tracker, factors and interval as plain numbers; empty with `enabled=False`."
        return (self.fit.scaler or self.scaler_for('cpu')).state_dict()

    def load_state_dict(self,
        state: Mapping[str, float] | None, # What `state_dict` gave; None for the scale that the arguments ask for
    ) -> None:
        """Go on from `state`, and bring scaled gradients to the new scale.

        A static scale and `enabled=False` stay. Raises `ValueError` for a state that no `GradScaler` could have given.
        """
        if self.static is not None or not self.settings['enabled'] or (state is None and self.given is not None): return
        if state is None: state = GradScaler('cpu', **self.settings).state_dict()
        check_scaler_state(state)
        scaler = self.fit.scaler or self.scaler_for('cpu')
        before = scaler.get_scale()
        scaler.load_state_dict(dict(state))
        self.state = scaler.state_dict()
        self.fit.follow(scaler.get_scale() / before)


class FitScaling:
    """The loss scaling of one fit, on the public methods of `torch.amp.GradScaler`; a context.

    A step: `scale_loss` for each batch; `unscale` the gradients, which finds out whether one is not finite; the
    optimizer's step, unless the host held it back; `update`, or `cancel` if something else called the step off.

    At the end scale and history are kept, and gradients of an unfinished accumulation are unscaled, as fp32 leaves
    them. They are zeroed if one is not finite, and after an exception, because part of them may be scaled.
    """
    def __init__(self,
        owner: LossScaling,
        learn: Learner,
        device: torch.device, # The device of the loss
        scaler: Any, # A `GradScaler`; a user's own has no `grads_scaled` yet
    ):
        self.owner, self.learn, self.scaler = owner, learn, scaler
        self.is_unit = isinstance(scaler, UnitScaler)            # its scale is not kept
        self.one = torch.ones((), device=device)
        self.was_used = False                                    # a loss was scaled in this fit
        self.found_inf: bool | torch.Tensor = False              # the last step's flag: a gradient was not finite
        self.device_skips = False                                # the optimizer skips that step on the device
        self.skips_in_a_row = 0                                  # as far as the host knows
        self._pending: Any = None                                # what `unscale_` was called with, until `update`
        self.first_step, self._state_before = len(owner.history), self.scaler.state_dict()

    @property
    def held_back(self) -> bool:
        "True if the last step must not be taken, as the host knows: a gradient was not finite."
        return not self.device_skips and bool(self.found_inf)   # in this order: the flag may be on the device

    def __enter__(self) -> FitScaling:
        self.owner.fit, self.learn.scaler = self, self.scaler
        self.scaler.grads_scaled = False
        return self

    def __exit__(self, error: type[BaseException] | None, *args: object) -> None:
        if self.owner.fit is not self: return
        self.cancel()
        if not self.is_unit and (self.was_used or self.scaler.grads_scaled): self._end_gradients(error is not None)
        if 'lr_finder' in vars(self.learn):                      # `lr_find` leaves all as it was
            self.scaler.load_state_dict(self._state_before)      # of the user's own, which serves every fit
            self.owner.history.forget(self.first_step)
        if not self.is_unit: self.owner.state = self.scaler.state_dict()
        self.learn.scaler, self.owner.fit = None, NO_SCALING     # last: after an interrupt it is ended again

    def _end_gradients(self, failed: bool) -> None:
        opt = self.learn.opt
        if not failed:
            self.unscale(may_skip_on_device=False)
            self.cancel()
        if (failed or self.found_inf) and opt is not None: opt.zero_grad()
        # Gradients outside the optimizer are still scaled.
        for p in {*self.learn.model.parameters()}.difference(optimizer_params(opt)): p.grad = None

    def skip_message(self) -> str:
        "Return a warning if most of the fit's steps were skipped; '' otherwise."
        skips = self.owner.history.skips(self.first_step)
        n, skipped, scale = len(skips), sum(skips), self.scaler.get_scale()
        if 2 * skipped <= n or 'lr_finder' in vars(self.learn): return ''
        head = f'{skipped} of the {n} optimizer steps of this fit were skipped: gradients were not finite.'
        if skipped == n: head += ' Nothing was learned.'
        remedy = '`learn.precision_report()` names the modules that overflow.'
        if scale > 1:
            head += f'\nThe loss scale is {scale:g} now.'
            remedy += f' If it finds none, start with a loss scale of {scale if skipped < n else max(scale / 64, 1):g}.'
        return f'{head}\n{remedy}'

    # -- a step

    def _device_scale(self) -> torch.Tensor:
        "Return the scale as a new tensor on the device, which does not count as scaling a loss."
        return GradScaler.scale(self.scaler, self.one)

    def scale_loss(self, loss: Any) -> Any: # A tensor, or several
        "Return the loss (fp32) times the scale; gradients that an accumulation of an earlier fit left are scaled, too."
        self.was_used = True
        if not self.scaler.grads_scaled: self._multiply_grads(self._device_scale())
        self.scaler.grads_scaled = True                          # a user's own scaler does not note it
        return self.scaler.scale(loss)

    def unscale(self, may_skip_on_device: bool = True) -> None:
        """Divide the gradients of the learner's optimizer by the scale, in place, and set `found_inf`.

        Afterwards `device_skips` says whether the optimizer skips on the device, or the host has to hold the step back.
        """
        self.cancel()                                            # of a step that an exception left unfinished
        opt = self.learn.opt
        params, self.found_inf, self.device_skips = optimizer_params(opt), False, False
        if not self.scaler.grads_scaled or all(p.grad is None for p in params): return
        is_plain = type(opt) is OptimWrapper and 'step' not in vars(opt)
        inner = opt.opt if may_skip_on_device and is_plain else None
        skipping = next((found for find in SKIPPING if (found := find(inner, params)) is not None), None)
        self._pending = _Probe(params) if skipping is None else skipping
        self.scaler.unscale_(self._pending)
        self.scaler.grads_scaled, self.device_skips = False, skipping is not None
        if self.device_skips: self.found_inf = found_inf_of(self.scaler, self._pending)
        else:
            self.scaler.step(self._pending)                     # waits for the device, once
            self.found_inf = not self._pending.stepped

    def step(self,
        step: Callable[[], object], # Takes the optimizer's step
    ) -> None:
        "Take the step, or the optimizer's own that skips on the device."
        if self.device_skips and self._pending is not None: self.scaler.step(self._pending)
        else: step()

    def expect_zeros(self) -> None:
        "Count the gradients as scaled, since they are zeroed next: the next loss need not scale them first."
        self.scaler.grads_scaled = self.was_used

    def update(self) -> None:
        "Record a step, taken or skipped, and let the scale grow or back off unless it is static."
        if self._pending is None: return
        if torch.is_tensor(self.found_inf) and self.found_inf.device.type == 'cpu':
            self.found_inf = bool(self.found_inf)                # which waits for nothing
        if isinstance(self.found_inf, bool): self.skips_in_a_row = self.skips_in_a_row + 1 if self.found_inf else 0
        self.owner.history.add(self._device_scale(), self.found_inf)
        self.scaler.update(self.owner.static)
        self._pending = None

    def cancel(self) -> None:
        "Leave scale and growth tracker alone: the step was called off."
        if self._pending is None: return
        self.scaler.update(self.scaler.get_scale())
        self._pending = None

    def read(self) -> None:
        "Count the skips in a row from the history; this waits for the device."
        skips = self.owner.history.skips(self.first_step)
        self.skips_in_a_row = sum(takewhile(bool, reversed(skips)))

    def follow(self, factor: float) -> None:
        "Multiply scaled gradients by `factor`, by which the scale was changed."
        if self.scaler.grads_scaled: self._multiply_grads(torch.tensor(factor))

    def _multiply_grads(self, factor: torch.Tensor) -> None:
        for p in optimizer_params(self.learn.opt):
            if p.grad is not None: p.grad.mul_(factor.to(p.grad.device))


def _fused(opt: Any, params: list[nn.Parameter]) -> Any:
    """Return `opt` if it is torch's fused Adam, AdamW or SGD, which skips a step with no effect at all; else None.

    A skipped step has no effect once the optimizer's state exists: a skipped first step would create it, and fused SGD
    would leave its momentum uninitialised (PyTorch 2.13). MPS has had kernels that ignore the flag
    (github.com/pytorch/pytorch/pull/186360).
    """
    if type(opt) not in FUSED.values() or not skips_by_flag(opt): return None
    if len({p.device for p in params}) > 1 or params[0].device.type == 'mps': return None
    has_state = all(opt.state.get(p) for p in params if p.grad is not None)
    return opt if has_state or all(group.get('momentum') == 0 for group in opt.param_groups) else None   # plain SGD


# Each takes torch's optimizer and its parameters. Where the device skips a step by a flag, it returns what is given to
# `GradScaler.step` in the optimizer's place, else None. `devices/` adds one.
SKIPPING: list[Callable[[Any, list[nn.Parameter]], Any]] = [_fused]


# -- checks of what a user gives

def is_number(x: object, kind: type = Real) -> bool:
    "Return whether `x` is a number of this kind, and not a bool."
    return isinstance(x, kind) and not isinstance(x, (bool, np.bool_))


def _check_arguments(settings: dict[str, Any], loss_scale: float | None, scaler: object) -> None:
    "Raise a `ValueError` (`TypeError` for a `scaler` that is none) that names the first argument that cannot be used."
    def finite(x): return is_number(x) and abs(x) <= LARGEST
    def positive(x): return finite(x) and np.float32(x) > 0      # the scale is held in fp32
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
    clash = chosen[1:] + [f'{k}={v!r}' for k, v in given.items() if v != DEFAULTS.get(k, v)]
    if chosen and clash:
        raise ValueError(f"{chosen[0]} cannot be combined with {', '.join(clash)}: each decides the loss scale in its "
                         "own way. Keep one of them.")


def check_scaler_state(
    state: Any, # From a file, or from the user
    where: str = 'state', # Where it is from, for the message
    then: str = 'Give what `state_dict()` gave.', # The way out, for the message
) -> None:
    "Raise a `ValueError` that says what is wrong if `state` is not one that `GradScaler.state_dict` could have given."
    def refuse(what):
        raise ValueError(f"The loss scale in {where} cannot be used: {what}. Nothing was loaded.\n{then}")
    if not isinstance(state, Mapping): refuse(f'it is a {type(state).__name__}, not a dict')
    for key in STATE_KEYS:
        if key not in state: refuse(f'{key!r} is missing')
        value = state[key]
        if not is_number(value): refuse(f'{key!r} is {value!r}, not a number')
        if not abs(value) <= LARGEST: refuse(f'{key!r} is {value!r}, not finite in fp32')
        whole = key in ('_growth_tracker', 'growth_interval')
        if whole and not isinstance(value, Integral): refuse(f'{key!r} is {value!r}, not an integer')
        if value < 0 or (value == 0 and key != '_growth_tracker'): refuse(f'{key!r} is {value!r}, not above 0')
