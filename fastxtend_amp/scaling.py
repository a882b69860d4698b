"Loss scaling: a `GradScaler` for each fit, whether gradients are scaled, and the history of the steps."
from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from itertools import takewhile
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from fastai.optimizer import Optimizer, OptimWrapper
from fastcore.basics import noop
from torch import nn
from torch.amp import GradScaler

from .compat import found_inf_of, skips_by_flag
from .optimizers import FUSED

__all__ = ['SKIPPING', 'LossScaling', 'check_scaler_state', 'is_number', 'optimizer_params']

DEFAULTS = dict(init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True)
LARGEST = float(np.finfo(np.float32).max)
STATE_KEYS = ('scale', 'growth_factor', 'backoff_factor', 'growth_interval', '_growth_tracker')
READ_EVERY = 512                                                 # steps between two reads of the history


class CopyableGradScaler(GradScaler):
    """PyTorch's `GradScaler`, of which a copy can be made in the middle of a step: it is as before that step.

    `before_scale` is called with each loss that is to be scaled, also by a user's code as `learn.scaler`.
    """
    before_scale: Callable[[Any], object] = staticmethod(noop)

    def scale(self, outputs: Any) -> Any:
        self.before_scale(outputs)
        return super().scale(outputs)

    def __reduce__(self): return _same_scaler, (self.state_dict(),)


def _same_scaler(state: dict[str, float]) -> CopyableGradScaler:
    scaler = CopyableGradScaler('cpu', enabled=bool(state))
    scaler.load_state_dict(state)
    return scaler


class _Probe:
    "Stands in for the optimizer in `GradScaler.step`, which calls `step` only if every gradient is finite."
    def __init__(self, params: list[nn.Parameter]): self.param_groups, self.stepped = [{'params': params}], False
    def step(self) -> None: self.stepped = True


def optimizer_params(opt: Optimizer | OptimWrapper | None) -> list[nn.Parameter]:
    "Return the parameters of `opt`; none for None."
    return [] if opt is None else [p for params in opt.param_lists for p in params]


class LossScaling:
    """The loss scaling of one callback: none, dynamic or static, on the public methods of `torch.amp.GradScaler`.

    Each fit has a new scaler, which begins with the state that the fit before ended with; a `scaler` that the user gave
    serves every fit. Without loss scaling the scaler is a disabled `GradScaler`.

    A step: `scale` the loss of each batch; `unscale` the gradients, which finds out whether one is not finite; `step`
    unless the host held the step back; `update`, or `cancel` if something else called the step off.
    """
    def __init__(self, init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int,
                 enabled: bool, loss_scale: float | None = None, scaler: GradScaler | None = None):
        self.settings: dict[str, Any] = dict(
            init_scale=init_scale, growth_factor=growth_factor, backoff_factor=backoff_factor,
            growth_interval=growth_interval, enabled=enabled)
        _check_arguments(self.settings, loss_scale, scaler)
        if loss_scale is not None: self.settings['init_scale'] = float(loss_scale)
        self.static = loss_scale and float(loss_scale)           # the scale that neither grows nor shrinks, or None
        self.given = scaler
        self.state: dict[str, float] | None = None               # of the scaler after the last fit, or as loaded
        self._scales, self._skips = array('f'), array('b')       # of each attempted step of all fits
        self._reset()

    def _reset(self) -> None:
        "Begin outside a fit."
        self.scaler = GradScaler('cpu', enabled=False)           # of the fit under way
        self.skips_in_a_row = 0                                  # of this fit, as far as the host knows
        self._one: Any = None                                    # 1 on the loss's device; None before the first loss
        self.grads_are_scaled = False                            # those in `.grad` now; see `expect_zero_grad`
        self.found_inf: bool | torch.Tensor = False              # of the last step; a tensor if the device skips it
        self._pending: Any = None                                # what `unscale_` was called with, until `update`
        self._unread: list[tuple] = []                           # scale and found_inf of the newest steps

    def __getstate__(self) -> dict[str, Any]:
        "Return the state of a copy, which is outside a fit."
        self.read()
        kept = ('settings', 'static', 'given', '_scales', '_skips')
        return {**{k: self.__dict__[k] for k in kept}, 'state': self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    # -- a fit

    @property
    def on(self) -> bool:
        "True if the fit under way scales its loss."
        return self.scaler.is_enabled()

    @property
    def held_back(self) -> bool:
        "True if the last step must not be taken, as the host knows: a gradient was not finite."
        return self.found_inf is True

    def start(self,
        device_type: str, # Type of the device that the loss will be on
        scaled: bool, # Whether the mode needs loss scaling
        opt: Callable[[], Any] = noop, # Returns the learner's optimizer
    ) -> GradScaler: # The scaler of this fit
        "Begin a fit with the state of the last one."
        self._reset()
        self.scaler = self._new_scaler(device_type) if scaled else GradScaler(device_type, enabled=False)
        def before_scale(loss):
            if self._pending is None: self._scale_true_grads(loss, opt())
        if isinstance(self.scaler, CopyableGradScaler): self.scaler.before_scale = before_scale
        self._n_before, self._state_before = len(self._scales), self.scaler.state_dict()
        return self.scaler

    def _new_scaler(self, device_type: str) -> GradScaler:
        if self.given is not None: return self.given
        scaler = CopyableGradScaler(device_type, **self.settings)
        scaler.load_state_dict(self.state or scaler.state_dict())
        return scaler

    def end(self,
        opt: Optimizer | OptimWrapper | None,
        model: nn.Module,
        failed: bool = False, # Whether an exception ended the fit
        keep: bool = True, # Whether scale and history go on in the next fit; not after `lr_find`
        argument: str = 'init_scale', # The one that lowers a dynamic scale, for the message
    ) -> str | None: # What to warn of
        """End the fit: keep scale and history, and leave true gradients of an unfinished accumulation, as in fp32.

        After an exception gradients are zeroed, because part of them may be scaled.
        """
        if not self.on: return None
        self.cancel()
        message = self._end_gradients(opt, model, failed) if self._one is not None else None
        self.read()
        message = message or self._skip_message('loss_scale' if self.static else argument)
        if keep: self.state = self.scaler.state_dict()
        else:
            self.scaler.load_state_dict(self._state_before)      # of the user's own, which serves every fit
            for history in (self._scales, self._skips): del history[self._n_before:]
        self._reset()
        return message if keep and not failed else None

    def _end_gradients(self, opt: Optimizer | OptimWrapper | None, model: nn.Module, failed: bool) -> str | None:
        message = None
        if not failed:
            self.unscale(opt, may_skip_on_device=False)
            self.cancel()
            if self.found_inf:
                message = ("The gradients of an accumulation that the end of the fit left unfinished are not finite; "
                           f"they were dropped.\nThe loss scale is {self.scaler.get_scale():g}.")
        if (failed or message) and opt is not None: opt.zero_grad()
        # Gradients outside the optimizer are still scaled.
        for p in {*model.parameters()}.difference(optimizer_params(opt)): p.grad = None
        return message

    def _skip_message(self, argument: str) -> str | None:
        skips = self._skips[self._n_before:]
        n, skipped, scale = len(skips), sum(skips), self.scaler.get_scale()
        if 2 * skipped <= n: return None
        remedy = 'Look where it overflows: `learn.precision_report()`.'
        if skipped == n:
            head = (f"No optimizer step was taken in this fit: all {n} were skipped, because gradients were not "
                    "finite. Nothing was learned.")
            if scale > 1: remedy += f' If it finds nothing, start lower: `{argument}={max(scale / 2 ** 6, 1.):g}`.'
            if scale >= 1 and not self.static: remedy += ' Or train longer, so that the scale can fall.'
        else:
            head = f"{skipped} of the {n} optimizer steps of this fit were skipped: gradients were not finite."
            if scale > 1: remedy += f' If it finds nothing, start a new training with `{argument}={scale:g}`.'
        return f'{head}\nThe loss scale is {scale:g} now.\n{remedy}'

    # -- a step

    def scale(self, loss: torch.Tensor, opt: Optimizer | OptimWrapper) -> torch.Tensor:
        "Return the loss (fp32) times the scale; true gradients that `.grad` holds already are scaled, too."
        if not self.on: return loss
        self._scale_true_grads(loss, opt)
        return self.scaler.scale(loss)

    def _scale_true_grads(self, loss: Any, opt: Optimizer | OptimWrapper | None) -> None:
        "Scale the gradients that `.grad` holds, unless a loss was scaled since they were unscaled."
        if self.grads_are_scaled: return
        if self._one is None:                                    # a user's may be several losses
            like = loss if isinstance(loss, torch.Tensor) else next(iter(optimizer_params(opt)), torch.empty(0))
            self._one = torch.ones((), device=like.device)
        self.grads_are_scaled = True
        self._multiply_grads(opt, self.scaler.scale(self._one))

    def unscale(self, opt: Optimizer | OptimWrapper, may_skip_on_device: bool = True) -> None:
        """Divide the gradients of `opt` by the scale, in place.

        Afterwards `found_inf` is True if the step must not be taken, or a tensor by which `step` skips on the device.
        """
        self.cancel()                                            # of a step that an exception left unfinished
        params, self.found_inf = optimizer_params(opt), False
        if not self.grads_are_scaled or all(p.grad is None for p in params): return
        is_plain = type(opt) is OptimWrapper and 'step' not in vars(opt)
        inner = opt.opt if may_skip_on_device and is_plain else None
        on_device = next((found for find in SKIPPING if (found := find(inner, params)) is not None), None)
        self._pending = _Probe(params) if on_device is None else on_device
        self.scaler.unscale_(self._pending)
        self.grads_are_scaled = False
        if on_device is not None: self.found_inf = found_inf_of(self.scaler, on_device)
        else:
            self.scaler.step(self._pending)                     # waits for the device, once
            self.found_inf = not self._pending.stepped

    def step(self,
        step: Callable[[], object], # Takes the optimizer's step
    ) -> None:
        "Take the step, or the optimizer's own that skips on the device."
        if self._pending is None or isinstance(self.found_inf, bool): step()
        else: self.scaler.step(self._pending)

    def update(self) -> None:
        "Record a step, taken or skipped, and let the scale grow or back off unless it is static."
        if self._pending is None: return
        self._record()
        self.scaler.update(self.static)
        self._pending = None

    def cancel(self) -> None:
        "Leave scale and growth tracker as they are: the step was called off."
        if self._pending is None: return
        self.scaler.update(self.scaler.get_scale())
        self._pending = None

    def expect_zero_grad(self) -> None:
        "Note that `zero_grad` comes next: zeros count as scaled, so that the next loss need not scale them."
        self.grads_are_scaled = self._one is not None

    def _multiply_grads(self, opt: Optimizer | OptimWrapper | None, factor: torch.Tensor) -> None:
        for p in optimizer_params(opt):
            if p.grad is not None: p.grad.mul_(factor.to(p.grad.device))

    # -- the history

    def _record(self) -> None:
        found_inf = self.found_inf
        if isinstance(found_inf, bool) or found_inf.device.type == 'cpu':    # reading it waits for nothing
            found_inf = bool(found_inf)
            self.skips_in_a_row = self.skips_in_a_row + 1 if found_inf else 0
        scale = self.scaler.scale(self._one)                     # as another tensor: its own is changed in place
        self._unread.append((scale, found_inf))
        if len(self._unread) == READ_EVERY: self.read()

    def read(self) -> None:
        "Bring the entries that are still on the device to the host; this waits for it."
        if not self._unread: return
        tensors = [t for entry in self._unread for t in entry if torch.is_tensor(t)]
        values, unread, self._unread = iter(torch.stack(tensors).tolist()), self._unread, []    # waits once
        for _, found_inf in unread:
            self._scales.append(next(values))
            self._skips.append(found_inf if isinstance(found_inf, bool) else next(values) > 0)
        self.skips_in_a_row = sum(takewhile(bool, reversed(self._skips[self._n_before:])))

    @property
    def scales(self) -> list[float]:
        "The scale of each attempted step."
        self.read()
        return self._scales.tolist()

    @property
    def skips(self) -> list[bool]:
        "For each attempted step, True if it was skipped."
        self.read()
        return [*map(bool, self._skips)]

    # -- what is kept

    def state_dict(self) -> dict[str, float]:
        "Return scale, growth tracker, factors and interval as plain numbers; empty with `enabled=False`."
        return (self.scaler if self.on else self._new_scaler('cpu')).state_dict()

    def load_state_dict(self,
        state: Mapping[str, float] | None, # What `state_dict` gave; None for the scale that the arguments ask for
        opt: Optimizer | OptimWrapper | None = None, # Whose gradients may be scaled
    ) -> None:
        """Go on from `state`, and bring scaled gradients of `opt` to the new scale.

        A static scale and `enabled=False` stay. Raises `ValueError` for a state that no `GradScaler` could have given.
        """
        if self.static or not self.settings['enabled'] or (state is None and self.given is not None): return
        if state is None: state = GradScaler('cpu', **self.settings).state_dict()
        check_scaler_state(state)
        scaler = self.scaler if self.on else self._new_scaler('cpu')
        before = scaler.get_scale()
        scaler.load_state_dict(dict(state))
        self.state = scaler.state_dict()
        if self.grads_are_scaled: self._multiply_grads(opt, torch.tensor(scaler.get_scale() / before))


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
