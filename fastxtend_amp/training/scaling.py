"""Loss scaling in a fit, on the public protocol of `torch.amp.GradScaler`.

    before a batch      gradients *= scale, unless they are scaled or zero                   `start`
    before backward     loss *= scale                                                        `scale_loss`
    before a step       gradients /= scale; is one of them not finite? This opens a `Step`.  `unscale`
    the step            The host skips it, or a fused optimizer skips it on the device.
    after the step      The scale grows or backs off. This closes the `Step`.                `update`
                        If another callback cancelled the step, the scale stays.             `cancel`
    after the fit       gradients /= scale                                                   `end`
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile
from typing import Any

import torch
from fastai.learner import Learner
from torch import nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy

from ..common import is_dtensor, optimizer_params, warn_user
from ..compat import found_infs_of
from ..precisions.scalers import DynamicScaler, UnitScaler
from .optimizers import FlaggedStep, flagged_step

_READ_EVERY = 512  # steps between two reads of the history


@dataclass(eq=False)
class Step:
    "An optimizer step from `unscale` to `update` or `cancel`. To `GradScaler` it is the optimizer."
    param_groups: list[dict[str, Any]]
    flagged: FlaggedStep | None                                  # what skips it on the device; None if the host does
    has_underflowed = False                                      # all gradients are 0 because the scale is low


class Scaling:
    """The loss scaling of one fit.

    Gradients that an earlier fit has accumulated are scaled at the start. Those that this fit leaves are unscaled at
    its end, or zeroed after an exception and if one is not finite.
    """
    def __init__(self, scaler: GradScaler, learn: Learner, device: torch.device, history: StepHistory):
        self.scaler, self.learn, self.history = scaler, learn, history
        self.one = torch.ones((), device=device)
        self.first_step = len(history.read())                    # in the history
        self.before_lr_find = scaler.state_dict() if 'lr_finder' in vars(learn) else None
        self.is_scaled = False                                   # gradients are multiplied by the scale, or zero
        self.step: Any = None                                    # the `Step` that is open
        # Whether the newest step has a gradient that is not finite; a 0-dim tensor if it is skipped on the device.
        self.found_inf: bool | torch.Tensor = False
        # As far as the host knows:
        self.skips_in_a_row = 0                                  # up to the newest step
        self.is_low = False                                      # skipped steps have lowered the scale below 1
        self.buffers: Buffers | None = None

    # -- a batch

    def start(self) -> None:
        "Scale what is in the gradients, so that a loss scaled by anybody can be added."
        if self.is_scaled: return
        scale = self.scaler.scale(self.one)
        self.is_scaled = True                                    # first: after an interrupt `end` zeroes the gradients
        self.multiply_grads(scale)

    def multiply_grads(self, factor: torch.Tensor) -> None:
        "Multiply the gradients of the learner's optimizer."
        for p in optimizer_params(self.learn.opt):
            if p.grad is not None: p.grad.mul_(factor.to(p.grad.device))

    def scale_loss(self, loss: Any) -> Any: # A tensor, or several
        "Return the loss (fp32) times the scale."
        self.start()
        return self.scaler.scale(loss)

    # -- a step

    def unscale(self) -> None:
        "Divide the gradients by the scale, in place, and find out whether one is not finite."
        if self.step is not None: self.cancel()                  # an exception left it open
        opt = self.learn.opt
        params: list[Any] = [p for p in optimizer_params(opt) if p.grad is not None]
        if not self.is_scaled or not params: return
        self.step = step = Step([{'params': params}], flagged_step(opt, params))
        self.scaler.unscale_(self.step)
        self.is_scaled = False
        found_infs = found_infs_of(self.scaler, step)
        if step.flagged is None: self.found_inf = any(map(bool, found_infs))   # synchronizes, once for each device
        else:
            self.found_inf = found_infs[0]
            step.flagged.mark(self.found_inf)
        if self.is_low and not self.found_inf: step.has_underflowed = not any(p.grad.abs().sum() for p in params)

    def update(self) -> None:
        "Record the step, taken or skipped, and let the scale grow or back off unless it is static."
        step = self.step
        if step is None:                                         # another callback cancelled it
            self.found_inf = False
            return
        on_cpu = self.one.device.type == 'cpu'                   # where reading a tensor does not synchronize
        if on_cpu: self.found_inf = bool(self.found_inf)
        if isinstance(self.found_inf, bool): self.skips_in_a_row = self.skips_in_a_row + 1 if self.found_inf else 0
        if self.buffers: self.buffers.after_step(self.found_inf)
        self.history.add(self.scaler.scale(self.one), self.found_inf)
        self._close(self._restart() if step.has_underflowed else None)
        # fastai's own loop zeroes the gradients next; `start` scales what another loop leaves.
        self.is_scaled = type(self.learn)._do_grad_opt is Learner._do_grad_opt
        if on_cpu and self.found_inf: self.read()

    def cancel(self) -> None:
        "Keep scale and growth tracker: the step was cancelled."
        if self.step is not None: self._close(self.scaler.get_scale())

    def _close(self, new_scale: float | None) -> None: # None lets the scale grow or back off
        self.scaler.update(new_scale)
        if self.step.flagged is not None: self.step.flagged.unmark()
        self.step = None

    def read(self) -> None:
        "Look at what the device decided; this synchronizes."
        self.skips_in_a_row = sum(takewhile(bool, reversed([*self.history.skips(self.first_step)])))
        lowest = min(1, self.scaler.first_scale) if isinstance(self.scaler, DynamicScaler) else 0
        self.is_low = any(abs(scale) < lowest for scale in self.history[-1:])

    def _restart(self) -> float:
        "Return the scale to restart from, with a warning."
        scaler: Any = self.scaler                                # a `DynamicScaler`
        self.is_low = False
        warn_user(f'Skipped steps had lowered the loss scale to {scaler.get_scale():.2g}, where all gradients '
                  f'underflow. It restarts from {scaler.first_scale:,.9g}.')
        return scaler.first_scale

    # -- the end of the fit

    def end(self, failed: bool) -> None:
        "Unscale or zero the gradients that are left; after `lr_find`, forget its steps."
        if failed and self.buffers: self.buffers.after_step(True)   # in a batch that may have overflowed
        if (self.is_scaled or self.step) and not isinstance(self.scaler, UnitScaler):
            self.unscale()
            if self.learn.opt and (failed or self.found_inf): self.learn.opt.zero_grad()
            # Gradients outside the optimizer are still scaled.
            for p in {*self.learn.model.parameters()}.difference(optimizer_params(self.learn.opt)): p.grad = None
        self.cancel()
        if self.before_lr_find is not None:
            self.scaler.load_state_dict(self.before_lr_find)
            del self.history.read()[self.first_step:]
        self.history.read()

    # -- the model's buffers, and messages

    def watch_buffers(self, model: nn.Module) -> None:
        "Keep the values of the model's buffers, such as BatchNorm's statistics, for a step that will be skipped."
        plain = (b for b in model.buffers() if not (is_lazy(b) or is_dtensor(b)))
        floating = [b.data for b in plain if b.is_floating_point()]   # autograd does not count these writes
        self.buffers = Buffers(floating) if floating else None

    @property
    def buffer_note(self) -> str: # '' without buffers
        "A sentence for warnings: buffers that a skipped step restored."
        restored = "Any NaN or inf in buffers, such as BatchNorm's statistics, was replaced by the last finite value."
        return restored if self.buffers else ''

    def skip_message(self) -> str:
        "Return a warning if most of the fit's steps were skipped; '' otherwise."
        skips = [*self.history.skips(self.first_step)]
        n, skipped = len(skips), sum(skips)
        if 2 * skipped <= n or self.before_lr_find is not None: return ''
        scale = self.scaler.get_scale()
        text = f'{skipped:,} of the {n:,} optimizer steps of this fit were skipped: gradients were not finite.'
        if skipped == n: text += ' Nothing was learned.'
        text += '\n`learn.precision_report()` names the modules that overflow.'
        if scale > 1:
            start = scale if skipped < n else max(scale / 64, 1)
            text += f' If it finds none, start with a loss scale of {start:,.9g}; it is {scale:,.9g} now.'
        return f'{text}\n{self.buffer_note}'.rstrip()


class StepHistory(list):
    "The loss scale of each attempted optimizer step, negative if it was skipped. `read` adds the newest."
    def __init__(self): self.unread = list[torch.Tensor]()       # may be on the device

    def __getstate__(self) -> dict[str, Any]: return vars(self.read())

    def add(self,
        scale: torch.Tensor, # 0-dim
        skipped: bool | torch.Tensor, # A flag, 0-dim: 1 if the step was skipped
    ) -> None:
        "Note a step. Synchronizes with an accelerator once in 512 steps."
        if torch.is_tensor(skipped): scale = torch.where(skipped.to(scale.device) > 0, -scale, scale)
        elif skipped: scale = -scale
        self.unread.append(scale)
        if len(self.unread) == _READ_EVERY: self.read()

    def read(self) -> StepHistory: # Itself
        "Copy the steps that are still on the device to the host; this synchronizes with it."
        if not self.unread: return self
        device = self.unread[-1].device                          # an interrupt can leave entries of another one
        new = torch.stack([t.to(device) for t in self.unread]).tolist()
        self[len(self):], self.unread = new, []                  # at once, whatever interrupts
        return self

    def skips(self, start: int = 0) -> Iterator[bool]:
        "Iterate over the steps from `start` on: whether each was skipped."
        return (scale < 0 for scale in islice(self.read(), start, None))


class Buffers:
    """Buffers of a model, and their values after the last good step.

    A batch that overflows would leave NaN in BatchNorm's running statistics, although its step is skipped. After a
    skipped step, elements that are not finite are restored to their last finite values; others are never changed.
    """
    def __init__(self, buffers: list[torch.Tensor]): self.now, self.good = buffers, [b.clone() for b in buffers]

    def after_step(self, found_inf: bool | torch.Tensor) -> None:
        "Note the values after a good step; repair them after a skipped one. Never synchronizes."
        if found_inf is False:
            torch._foreach_copy_(self.good, self.now)
            return
        device = self.now[0].device
        flat, good = (torch.cat([t.flatten().to(device) for t in ts]) for ts in (self.now, self.good))
        keep = flat.isfinite()
        if torch.is_tensor(found_inf): keep |= found_inf.to(device) == 0
        parts = torch.where(keep, flat, good).split([t.numel() for t in self.now])
        parts = [part.view(t.shape) for part, t in zip(parts, self.now)]
        for tensors in (self.now, self.good): torch._foreach_copy_(tensors, parts)
