"""Loss scaling in a fit, on the public protocol of `torch.amp.GradScaler`, and the history of its steps.

    scale the loss of each batch                        `scale_loss`
    unscale the gradients; is one of them not finite?   `unscale`
    step, or skip the step                              on the host, or in a fused optimizer on the device
    let the scale grow or back off                      `update`; `cancel` if another callback cancelled the step
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice, repeat, takewhile
from operator import lt
from types import SimpleNamespace
from typing import Any

import torch
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper
from torch import nn
from torch.amp import GradScaler
from torch.nn.parameter import is_lazy

from ..common import is_dtensor, optimizer_params, warn_user
from ..compat import found_infs_of, skips_by_flag
from ..precisions.scalers import DynamicScaler, UnitScaler
from .optimizers import FUSED

_READ_EVERY = 512  # steps between two reads of the history


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
        self.unread.append(-scale if skipped is True else scale)
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
        return map(lt, islice(self.read(), start, None), repeat(0))   # negative steps


class Scaling:
    """The loss scaling of one fit.

    Gradients are scaled from the first batch to `unscale`, and after `update`, when fastai zeroes them. What an earlier
    fit has accumulated is scaled at the start; what this one leaves is unscaled at its end, as fp32 leaves it. It is
    zeroed after an exception, and if a gradient is not finite.
    """
    def __init__(self, scaler: GradScaler, learn: Learner, device: torch.device, history: StepHistory):
        self.scaler, self.learn, self.history = scaler, learn, history
        self.one = torch.ones((), device=device)
        self.first_step = len(history.read())                    # in the history
        self.found_inf: bool | torch.Tensor = False              # of the newest step: a gradient was not finite
        self.has_started = self.has_scaled = False               # gradients are multiplied by the scale, or zero
        self._probe: Any = None                                  # the optimizer for `unscale_`; None after `update`
        self._flagged: Any = None                                # the `FlaggedStep` of a step that the device decides
        self._is_low = False                                     # skipped steps have lowered the scale below 1
        self._vanished = False                                   # all gradients of this step underflowed
        self.skips_in_a_row = 0                                  # up to now, as far as the host knows
        self._buffers: _Buffers | None = None
        self._before = scaler.state_dict() if 'lr_finder' in vars(learn) else None   # to restore

    def watch_buffers(self, model: nn.Module) -> None:
        "Keep the values of the model's buffers, such as BatchNorm's statistics, for a step that will be skipped."
        plain = (b for b in model.buffers() if not (is_lazy(b) or is_dtensor(b)))
        floating = [b.data for b in plain if b.is_floating_point()]   # autograd does not count these writes
        self._buffers = _Buffers(floating) if floating else None

    @property
    def buffer_note(self) -> str: # '' without buffers
        "A sentence for warnings: buffers that a skipped step restored."
        restored = "Any NaN or inf in buffers, such as BatchNorm's statistics, was replaced by the last finite value."
        return restored if self._buffers else ''

    # -- a step

    def _scale(self) -> torch.Tensor:
        "Return the scale as a new tensor on the device."
        return GradScaler.scale(self.scaler, self.one)

    def start(self) -> None:
        "Scale what is in the gradients, so that a loss scaled by anybody can be added."
        if self.has_scaled: return
        self._multiply_grads(self._scale())
        self.has_started = self.has_scaled = True

    def scale_loss(self, loss: Any) -> Any: # A tensor, or several
        "Return the loss (fp32) times the scale."
        self.start()
        return self.scaler.scale(loss)

    def unscale(self, may_flag: bool = True) -> None:
        "Divide the gradients by the scale, in place, and find out whether one is not finite."
        if self._probe is not None: self.cancel()                # a step that an exception left unfinished
        opt = self.learn.opt
        params: list[Any] = [p for p in optimizer_params(opt) if p.grad is not None]
        if not self.has_scaled or not params: return
        finds = DEVICE_SKIPS if may_flag and type(opt) is OptimWrapper else ()
        flagged = next((step for find in finds if (step := find(opt.opt, params)) is not None), None)
        self._probe = SimpleNamespace(param_groups=[{'params': params}])
        self.scaler.unscale_(self._probe)
        self.has_scaled = False
        found_infs = found_infs_of(self.scaler, self._probe)
        if flagged is None: self.found_inf = any(map(bool, found_infs))   # synchronizes, once for each device
        else:
            self._flagged, self.found_inf = flagged, found_infs[0]
            flagged.mark(self.found_inf)
        if self._is_low and not self.found_inf: self._vanished = not any(p.grad.abs().sum() for p in params)

    def update(self) -> None:
        "Record a step, taken or skipped, and let the scale grow or back off unless it is static."
        if self._probe is None:                                  # another callback cancelled the step
            self.found_inf = False
            return
        if isinstance(self.found_inf, bool) or self.found_inf.device.type == 'cpu':   # which does not synchronize
            self.found_inf = bool(self.found_inf)
            self.skips_in_a_row = self.skips_in_a_row + 1 if self.found_inf else 0
        if self._buffers: self._buffers.after_step(self.found_inf)
        self.history.add(self._scale(), self.found_inf)
        if self.found_inf is True and self.one.device.type == 'cpu': self.read()   # does not synchronize there
        self.scaler.update()
        # fastai's own loop zeroes the gradients next; `start` scales what another loop leaves.
        self.has_scaled = type(self.learn)._do_grad_opt is Learner._do_grad_opt
        if self._vanished: self._restart()
        self._close_step()

    def read(self) -> None:
        "Look at what the device decided; this synchronizes."
        last = self.history.read()[-1:]
        self._is_low = isinstance(self.scaler, DynamicScaler) and any(abs(step) < 1 for step in last)
        self.skips_in_a_row = sum(takewhile(bool, reversed([*self.history.skips(self.first_step)])))

    def cancel(self) -> None:
        "Keep scale and growth tracker: the step was cancelled."
        if self._probe is None: return
        self.scaler.update(self.scaler.get_scale())
        self.found_inf = False
        self._close_step()

    def _close_step(self) -> None:
        if self._flagged is not None: self._flagged.unmark()
        self._probe, self._flagged, self._vanished = None, None, False

    def _restart(self) -> None:
        "Start from the first scale again: all gradients are 0 at this one."
        scaler: Any = self.scaler                                # a `DynamicScaler`
        scaler.update(scaler.first_scale)
        self._is_low = False
        low = abs(self.history.read()[-1])
        warn_user(f'Skipped steps had lowered the loss scale to {low:.2g}, where all gradients underflow. It restarts '
                  f'from {self.scaler.get_scale():g}.')

    # -- gradients

    def follow(self, factor: float) -> None:
        "Multiply scaled gradients by `factor`, by which the scale was changed."
        if self.has_scaled: self._multiply_grads(torch.tensor(factor))

    def _multiply_grads(self, factor: torch.Tensor) -> None:
        "Multiply the gradients of the learner's optimizer."
        for p in optimizer_params(self.learn.opt):
            if p.grad is not None: p.grad.mul_(factor.to(p.grad.device))

    # -- the end of the fit

    def end(self, failed: bool) -> None:
        "Unscale or zero the gradients that are left; after `lr_find`, forget its steps."
        self.cancel()
        if failed and self._buffers: self._buffers.after_step(True)   # in a batch that may have overflowed
        if self.has_started and not isinstance(self.scaler, UnitScaler):
            self.unscale(may_flag=False)
            if self.learn.opt is not None and (failed or self.found_inf): self.learn.opt.zero_grad()
            self.cancel()
            # Gradients outside the optimizer are still scaled.
            for p in {*self.learn.model.parameters()}.difference(optimizer_params(self.learn.opt)): p.grad = None
        self.has_scaled = False
        if self._before is not None:                             # `lr_find` restores the scale
            self.scaler.load_state_dict(self._before)
            del self.history.read()[self.first_step:]
        self.history.read()

    def skip_message(self) -> str:
        "Return a warning if most of the fit's steps were skipped; '' otherwise."
        n, skipped = len(self.history.read()) - self.first_step, sum(self.history.skips(self.first_step))
        if 2 * skipped <= n or 'lr_finder' in vars(self.learn): return ''
        scale = self.scaler.get_scale()
        head = f'{skipped} of the {n} optimizer steps of this fit were skipped: gradients were not finite.'
        if skipped == n: head += ' Nothing was learned.'
        if self.buffer_note: head += f'\n{self.buffer_note}'
        advice = '`learn.precision_report()` names the modules that overflow.'
        if scale > 1:
            head += f'\nThe loss scale is {scale:g} now.'
            advice += f' If it finds none, start with a loss scale of {scale if skipped < n else max(scale / 64, 1):g}.'
        return f'{head}\n{advice}'


class _Buffers:
    """Buffers of a model, and their values after the last good step.

    A batch that overflows would leave NaN in BatchNorm's running statistics, although its step is skipped. After a
    skipped step, elements that are not finite are restored to their last finite values; others are never changed.
    """
    def __init__(self, buffers: list[torch.Tensor]): self.now, self.good = buffers, [b.clone() for b in buffers]

    def after_step(self, found_inf: bool | torch.Tensor) -> None:
        "Note the values after a good step; repair them after a skipped one. Never synchronizes."
        if found_inf is False: return torch._foreach_copy_(self.good, self.now)
        device = self.now[0].device
        flat, good = (torch.cat([t.flatten().to(device) for t in ts]) for ts in (self.now, self.good))
        keep = flat.isfinite() if found_inf is True else flat.isfinite() | (found_inf.to(device) == 0)
        parts = torch.where(keep, flat, good).split([t.numel() for t in self.now])
        parts = [part.view(t.shape) for part, t in zip(parts, self.now)]
        for tensors in (self.now, self.good): torch._foreach_copy_(tensors, parts)


# -- optimizers that skip a step on the device

class FlaggedStep:
    "The step of torch's fused Adam, AdamW or SGD, which has no effect if the flag `found_inf` is 1."
    def __init__(self, opt: Any): self.opt = opt
    def mark(self, found_inf: torch.Tensor) -> None: self.opt.grad_scale, self.opt.found_inf = None, found_inf
    def unmark(self) -> None:
        for name in ('grad_scale', 'found_inf'): vars(self.opt).pop(name, None)


def _fused(opt: Any, params: list[nn.Parameter]) -> FlaggedStep | None:
    """Return the step of `opt` if it is torch's fused optimizer and a skipped step would leave no trace; else None.

    A skipped first step would create the optimizer's state, and fused SGD would leave its momentum uninitialised
    (PyTorch 2.13). MPS has had kernels that ignore the flag (github.com/pytorch/pytorch/pull/186360).
    """
    if type(opt) not in FUSED.values() or not skips_by_flag(opt): return None
    if len({p.device for p in params}) > 1 or params[0].device.type == 'mps': return None
    has_state = all(map(opt.state.get, params))
    is_plain_sgd = all(group.get('momentum') == 0 for group in opt.param_groups)
    return FlaggedStep(opt) if has_state or is_plain_sgd else None


# Each gets torch's optimizer and the parameters with gradients, and returns a `FlaggedStep` or None.
DEVICE_SKIPS: list[Callable[[Any, list[nn.Parameter]], Any]] = [_fused]
