"""Loss scaling in a fit, on the public protocol of `torch.amp.GradScaler`.

    before a batch      gradients *= scale, unless they are scaled already              `start`
    before backward     loss *= scale                                                   `scale_loss`
    before a step       gradients /= scale; is one of them not finite?                  `unscale`
    the step            The host skips it (`HostStep`), or the device (`DeviceStep`).
    after the step      The scale grows or backs off.                                   `update`
                        If another callback cancelled the step, the scale stays.        `cancel`
    after the fit       gradients /= scale                                              `end`
"""
from __future__ import annotations

from collections import defaultdict
from enum import Enum
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from ..compat import around_backward
from ..learners import gradient_params
from .buffers import Buffers
from .early_changes import EarlyChanges
from .low_scale import LowScale, largest_gradient
from .steps import DeviceStep, HostStep, skips_on_device

if TYPE_CHECKING: from .callback import MixedPrecision


class Gradients(Enum):
    """The present state of the gradients, and what changes it.

        BETWEEN_STEPS   `start` (each training batch)              SCALED
        SCALED          `unscale`                                  IN_STEP
        IN_STEP         a backward pass begins, `end_pass`         IN_PASS, IN_STEP
        IN_STEP         `update`, `cancel`                         BETWEEN_STEPS
    """
    BETWEEN_STEPS = 'unscaled, as after `zero_grad`'
    SCALED = 'times the scale: backward passes add to them'
    IN_STEP = 'unscaled, in a step that is under way'
    IN_PASS = 'times the scale again, while another backward pass of that step runs'


_IN_STEP = Gradients.IN_STEP, Gradients.IN_PASS


class Scaling:
    """The loss scaling of one fit.

    Gradients that an earlier fit has accumulated are scaled at the start. At the end those that are left are unscaled;
    they are zeroed if one is not finite, or if the fit failed after its first batch began.
    """
    def __init__(self, scaler: Any, cb: MixedPrecision, device: torch.device): # `scaler`: a `GradScaler`
        state = scaler.state_dict()
        self.scaler, self.device, self.learn, self.history = scaler, device, cb.learn, cb.history
        self.before_lr_find = state if 'lr_finder' in vars(self.learn) else {}
        self.buffers = Buffers()
        # The scale, which scaling puts on the device.
        self.history.begin_fit(scaler.scale(torch.ones((), device=device)), state['scale'])
        self.low_scale = LowScale(scaler, self.history, cb.precision.first_scale)
        # The step.
        self.has_begun = False                                   # whether there was a training batch
        self.gradients = Gradients.BETWEEN_STEPS
        self.step: Any = HostStep()                              # the newest one, or a `DeviceStep`, under way or not
        self.passes: list[Any] = []                              # of the step under way: see `_divide`
        self.early_changes = None if state['scale'] == 1 else EarlyChanges(cb.learn)   # until the first step

    # -- a step

    def start(self) -> None:
        """Scale accumulated gradients, so that the next backward pass can add to them.

        fastai's `zero_grad` leaves zeros, which are multiplied as well: 8 bytes of memory traffic per parameter.
        """
        self.has_begun = True
        if self.gradients is Gradients.SCALED: return
        self.cancel()                                            # a step that an exception or a cancelled batch left
        self._multiply()
        self.gradients = Gradients.SCALED

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        "Return the loss (fp32) times the scale. During a step gradients are scaled while its backward pass runs."
        if self.gradients not in _IN_STEP:
            self.start()
            return self.scaler.scale(loss)
        self.end_pass()                                          # of a backward pass that failed
        loss = self.scaler.scale(loss)
        around_backward(loss, self._begin_pass, self.end_pass)
        return loss

    def _begin_pass(self) -> None:
        if self.gradients is Gradients.IN_STEP: self._multiply() # once for several losses
        self.gradients = Gradients.IN_PASS

    def end_pass(self) -> None:
        "Unscale the gradients after another backward pass in a step; if that failed, before the optimizer's step."
        if self.gradients is not Gradients.IN_PASS: return
        self._divide(gradient_params(self.learn.opt))
        self.gradients = Gradients.IN_STEP

    def unscale(self) -> None:
        "Divide the gradients by the scale, in place, and find out whether one is not finite."
        self.step = HostStep()
        if self.gradients is not Gradients.SCALED or not (params := gradient_params(self.learn.opt)): return
        if self.early_changes: self.early_changes.warn()
        self.early_changes = None
        is_low = self.history.known_scale < self.low_scale.threshold     # the host raises such a scale
        if not is_low and skips_on_device(self.learn.opt, params): self.step = DeviceStep(self.learn.opt.opt)
        self.gradients = Gradients.IN_STEP
        self._divide(params)
        # Before anybody clips.
        if is_low and not self.step.found_inf: self.step.largest = largest_gradient(params)

    def _multiply(self) -> None:
        grads = defaultdict(list)
        for p in gradient_params(self.learn.opt): grads[p.grad.device].append(p.grad)
        for device, alike in grads.items(): torch._foreach_mul_(alike, self.scaler._scale.to(device))

    def _divide(self, params: list[Any]) -> None:
        # `GradScaler` divides once for each optimizer, so each pass is one: an object with `param_groups` is enough.
        self.passes.append(SimpleNamespace(param_groups=[{'params': params}]))
        self.scaler.unscale_(self.passes[-1])
        found = [flag for p in self.passes for flag in self.scaler._found_inf_per_device(p).values()]   # since 1.6
        self.step.decide(found)

    def update(self) -> None:
        "Record the step, taken or skipped, and let the scale grow or back off unless it is static."
        if self.gradients not in _IN_STEP:                       # no gradients, or another callback cancelled it
            self.step = HostStep()
            return
        self._end_step()
        step = self.step
        self.buffers.update(step.found_inf)
        self.history.add(step.found_inf, self.scaler._scale.to(self.device, copy=True))
        if step.host_skips or step.largest is not None: self.low_scale.raise_scale(step.largest)

    def cancel(self) -> None:
        "End a step that another callback cancelled: scale and growth tracker stay."
        if self.gradients in _IN_STEP: self._end_step(self.scaler.get_scale())

    def _end_step(self, new_scale: float | None = None) -> None: # As in `GradScaler.update`: None grows or backs off
        self.end_pass()
        self.scaler.update(new_scale)
        self.step = self.step.end(self.scaler)
        self.passes, self.gradients = [], Gradients.BETWEEN_STEPS

    # -- the end of the fit

    def end(self, failed: bool) -> None:
        "Unscale the gradients that are left, or zero them if one is not finite; after `lr_find`, forget its steps."
        failed &= self.has_begun                                 # until then they are those of an earlier fit
        if self.gradients is Gradients.SCALED: self.unscale()
        if failed or self.step.found_inf:
            self.buffers.update(True)
            self.learn.opt.zero_grad()
        self.cancel()
        if self.before_lr_find:
            self.scaler.load_state_dict(self.before_lr_find)
            self.history.forget_fit()
