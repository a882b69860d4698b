"Loss scaling for one callback, none, static or dynamic, on `torch.amp.GradScaler`."
from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler

from .common import warn_user
from .compat import (arm_found_inf, disarm_found_inf, forget_unscale, found_inf_flags, grads_version, has_unscaled,
                     move_scaler, scale_version)
from .device_skip import skips_on_device
from .first_scale import NoFirstScale, first_scale
from .scale_history import CONSTANT, ScaleHistory, ScaleRule
from .scaling_args import AUTO, DEFAULTS, check_scaler_state, check_scaling_args

__all__ = ['GradStage', 'LossScaling', 'StaticGradScaler', 'optimizer_params']


class StaticGradScaler(GradScaler):
    """A `GradScaler` whose scale neither grows nor shrinks, as fastai v1's `loss_scale`.

    Steps with non-finite gradients are still skipped.
    """
    def update(self, new_scale: float | torch.Tensor | None = None) -> None: forget_unscale(self)


class GradStage(IntEnum):
    "What the gradients in `.grad` are multiplied by, as `OptState` is to `GradScaler`, but across batches."
    TRUE = 0     # by nothing, and no step is under way
    SCALED = 1   # by the scale: some backward pass has run since the last step
    UNSCALED = 2 # by nothing, and the optimizer's step is to come
    SETTLED = 3  # by nothing: the step was taken, skipped or cancelled; `zero_grad` is to come


class _StepProbe:
    "Stands in for the optimizer in `GradScaler.step`, which calls `step` only when every gradient is finite."
    def __init__(self, params): self.param_groups, self.finite = [{'params': params}], False
    def step(self): self.finite = True


def optimizer_params(opt: Any) -> list[nn.Parameter]:
    "The parameters of `opt` (fastai's `Optimizer` or `OptimWrapper`); none for None."
    return [] if opt is None else [p for pl in opt.param_lists for p in pl]


class LossScaling:
    """Loss scaling for one callback: none, static or dynamic, on a `torch.amp.GradScaler`.

    It keeps the scaler from fit to fit, knows at each moment whether the gradients are scaled, and records the steps.
    Without loss scaling (bf16, fp32, `enabled=False`) the scaler is a disabled `GradScaler` and every method a no-op.
    """
    def __init__(self, init_scale, growth_factor, backoff_factor, growth_interval, enabled, loss_scale=None,
                 scaler=None):
        check_scaling_args(init_scale, growth_factor, backoff_factor, growth_interval, enabled, loss_scale, scaler)
        if scaler is None and loss_scale is not None: scaler = StaticGradScaler('cpu', init_scale=float(loss_scale))
        self.undecided = init_scale == AUTO                      # does the first loss settle the scale to start from?
        if scaler is None:                                       # its device is settled when a fit starts
            start = DEFAULTS['init_scale'] if self.undecided else init_scale
            scaler = GradScaler('cpu', float(start), float(growth_factor), float(backoff_factor),
                                int(growth_interval), bool(enabled))
        self._fp16_scaler, self._at_first = scaler, (scaler.state_dict(), self.undecided)
        self.scaler: GradScaler = GradScaler('cpu', enabled=False)   # of the fit under way
        self.history, self.stage = ScaleHistory(), GradStage.TRUE
        self.stepped = False                                     # was the optimizer's step called since `unscale`?
        self.held_back = False                                   # did the host hold the step back?
        self.found_inf: bool | torch.Tensor = False  # of the last step; a 0-dim tensor if the device decides
        self._armed_optimizer: Any = None                        # the torch optimizer that holds a `found_inf` of ours
        self._followed: Any = None                               # `scale_version` that the history accounts for
        self._used = False                                       # has this fit scaled a loss?
        self._zeroed: list | None = None                         # `grads_version` when the fit before left no gradients
        self._n_before = 0                                       # attempted steps before this fit

    # -- for one fit

    def start(
        self, device_type: str, # Type of the device that the loss will be on
        scaled: bool, # Whether the mode needs loss scaling
    ) -> GradScaler: # The scaler for this fit
        "Make the scaler ready for a fit on `device_type`; the scale and its growth tracker go with it to a new device."
        self._used, self._n_before = False, self.history.n
        if scaled:
            self.scaler = self._fp16_scaler
            move_scaler(self.scaler, device_type)
        else: self.scaler = GradScaler(device_type, enabled=False)
        return self.scaler

    def begin(self,
        loss: torch.Tensor, # The loss (fp32), on its graph, before it is scaled
        opt: Any, # fastai's `Optimizer` or `OptimWrapper`
        model: nn.Module, # The model
    ) -> None:
        "With `init_scale='auto'`: settle the scale by the first loss that is finite, before it is scaled."
        if not (self.undecided and self.scaler.is_enabled()): return
        try: scale = first_scale(loss, optimizer_params(opt), model)
        except NoFirstScale as e:
            self.undecided, start = False, self.scaler.get_scale()
            warn_user(f"init_scale='auto': the first batch cannot be tried on this model ({e}).\nThe loss scale starts "
                      f"at {start:g}, as by default; give a lower `init_scale=` if first steps are skipped.")
            return
        if scale is not None: self.load_state_dict({**self.state_dict(), 'scale': scale, '_growth_tracker': 0}, opt)

    def scale(self, loss: torch.Tensor, opt: Any = None) -> torch.Tensor:
        """The loss (fp32) times the scale; the gradients that its backward pass adds are scaled.

        At the first loss of a fit gradients that are in `.grad` already, such as those of an accumulation that the fit
        before did not finish, are multiplied by the scale, so that new ones can be added.
        """
        if not self.scaler.is_enabled(): return loss
        moved, first = self._follow(), not self._used
        self._used = True
        scaled = self.scaler.scale(loss)                         # the scaler's tensors are made here, at the first loss
        if moved: self._followed = scale_version(self.scaler)
        if first and self.stage is GradStage.TRUE:
            if self._zeroed is None or self._zeroed != grads_version(optimizer_params(opt)): self._scale_grads(opt)
        self.stage = GradStage.SCALED
        return scaled

    @property
    def skipped(self) -> bool:
        "Was the last step skipped? Waits for the device if the device decided."
        return bool(self.found_inf)

    def read(self) -> None:
        "Bring what the device decided to the host; this waits for it."
        if isinstance(self.found_inf, torch.Tensor):  # the newest flag in the history, unless that step was interrupted
            interrupted = self.stage is GradStage.UNSCALED
            self.found_inf = bool(self.found_inf) if interrupted else self.history.last
        self.history.flush()

    def unscale(self, opt: Any) -> bool: # Whether the step must be held back; never if the device decides
        "Divide the gradients of `opt` (fastai's `Optimizer` or `OptimWrapper`) by the scale, in place."
        if self.stage is not GradStage.SCALED: return False
        params = optimizer_params(opt)
        self.stepped, self.held_back, self.found_inf = False, False, False
        probe: Any = _StepProbe(params)                          # all that GradScaler uses of an optimizer
        self.scaler.unscale_(probe)
        self.stage = GradStage.UNSCALED
        flags = found_inf_flags(self.scaler, probe)
        if not flags: self.cancel()                              # no parameter has a gradient
        elif type(self.scaler).step is GradScaler.step and skips_on_device(opt, params): self._arm(opt.opt, flags)
        else:
            self.scaler.step(probe)                              # waits for the device, once, to read found_inf
            self.found_inf = self.held_back = not probe.finite
        return self.held_back

    def update(self) -> None:
        "After a step, taken or skipped: let the scale grow or back off, and record the step."
        if self.stage is not GradStage.UNSCALED: return
        if has_unscaled(self.scaler): self.scaler.update()       # not if an interrupt ended this method once before
        self.stage = GradStage.SETTLED
        self._disarm()
        self.history.record(self.found_inf)
        # None: a state was loaded since the loss was scaled. The history learns of it at the next loss.
        if self._followed is not None: self._followed = scale_version(self.scaler)

    def cancel(self) -> None:
        "The step was called off: the scale and its tracker stay as they were."
        self._forget_step()
        if self.stage is GradStage.UNSCALED: self.stage = GradStage.SETTLED

    def settle(self) -> None:
        "The step is over, in whichever way, and `zero_grad` comes next."
        if self.stage is not GradStage.TRUE: self.stage = GradStage.SETTLED

    def rescale(self, opt: Any) -> None:
        "Multiply unscaled gradients by the loss scale again, so that accumulation can go on."
        self._forget_step()
        self._scale_grads(opt)
        self.stage = GradStage.SCALED

    def drop(self, opt: Any, model: nn.Module) -> None:
        "Zero the gradients, as the step would have, so that nothing can step on scaled ones."
        if self.stage is GradStage.TRUE and not self._used: return
        if opt is not None and self.stage is not GradStage.TRUE: opt.zero_grad()
        self._end_fit(opt, model)

    def finish(self, opt: Any, model: nn.Module, lower: str = '') -> str | None: # What to warn of
        """The fit is over without an exception: leave unscaled gradients of an unfinished accumulation, as fp32 does.

        Those that are not finite are dropped. The message says so, or that no step of the fit was taken; `lower` is the
        argument that it names for a lower scale.
        """
        if not self._used: return None
        message, zeroed = None, self.stage is GradStage.TRUE
        if self.stage is GradStage.SCALED: message = self._unscale_rest(opt)
        self._end_fit(opt, model)
        self._zeroed = grads_version(optimizer_params(opt)) if zeroed else None
        return message or self._no_step_message(lower)

    def _end_fit(self, opt: Any, model: nn.Module) -> None:
        "Forget the step under way, and drop the gradients of parameters that no optimizer zeroes: they are scaled."
        self._forget_step()
        known = {id(p) for p in optimizer_params(opt)}
        for p in model.parameters():
            if id(p) not in known: p.grad = None
        self.stage, self._used = GradStage.TRUE, False

    def _unscale_rest(self, opt: Any) -> str | None:
        probe: Any = _StepProbe(optimizer_params(opt))
        self.scaler.unscale_(probe)
        if not any(bool(flag) for flag in found_inf_flags(self.scaler, probe)): return None
        opt.zero_grad()
        return ("The gradients of an accumulation that the end of the fit left unfinished are not finite; they were "
                "dropped.\n"
                f"The loss scale is {self.scaler.get_scale():g}.")

    def _no_step_message(self, lower: str) -> str | None:
        skips = self.history.skips[self._n_before:]
        if not len(skips) or not skips.all(): return None
        scale = self.scaler.get_scale()
        settle = 'Train longer, so that it can settle, or '
        if isinstance(self.scaler, StaticGradScaler) or scale < 1: settle = ''
        start = f'start lower (`{lower}={max(scale / 2 ** 6, 1.):g}`), or ' if lower and scale > 1 else ''
        remedy = f'{settle}{start}look where it overflows: `learn.precision_report()`.'
        return (f"No optimizer step was taken in this fit: all {len(skips)} were skipped, because gradients were not "
                f"finite. Nothing was learned.\nThe loss scale is {scale:g} now.\n{remedy[:1].upper()}{remedy[1:]}")

    def _scale_grads(self, opt: Any) -> None:
        "Multiply the gradients of `opt` by the scale, without waiting for the device that it is on."
        scales: dict[torch.device, torch.Tensor] = {}
        for p in optimizer_params(opt):
            if p.grad is None: continue
            if p.grad.device not in scales:
                scales[p.grad.device] = self.scaler.scale(torch.ones((), device=p.grad.device))
            p.grad.mul_(scales[p.grad.device])

    def _forget_step(self) -> None:
        self._disarm()
        forget_unscale(self.scaler)

    def _arm(self, opt: torch.optim.Optimizer, flags: list[torch.Tensor]) -> None:
        # The kernels take exactly 1 for a skip, so flags of several devices are combined by their maximum.
        flag = flags[0] if len(flags) == 1 else torch.stack([f.to(flags[0].device) for f in flags]).amax()
        self.found_inf, self._armed_optimizer = flag, opt
        arm_found_inf(opt, flag)

    def _disarm(self) -> None:
        opt, self._armed_optimizer = self._armed_optimizer, None
        if opt is not None: disarm_found_inf(opt)

    # -- what is kept

    def state_dict(self) -> dict[str, Any]:
        "The scaler's state: scale, growth tracker, factors and interval as plain numbers; empty with `enabled=False`."
        return self._fp16_scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any], opt: Any = None) -> None:
        """Take up `state` by the scaler's own rule, and bring scaled gradients of `opt` to the new scale.

        A static scale and `enabled=False` stay. Raises `ValueError` for a state that no `GradScaler` could have given.
        """
        scaler = self._fp16_scaler
        if isinstance(scaler, StaticGradScaler) or not scaler.is_enabled(): return
        check_scaler_state(state, own=self.has_own_state)
        before = scaler.get_scale()
        scaler.load_state_dict(dict(state))
        self.undecided = False
        self._followed = None
        if self.stage is not GradStage.SCALED: return
        for p in optimizer_params(opt):
            if p.grad is not None: p.grad.mul_(scaler.get_scale() / before)

    def reset(self, opt: Any = None) -> None:
        "Take up the state that this began with."
        state, undecided = self._at_first
        self.load_state_dict(state, opt)
        self.undecided = undecided

    @property
    def has_scale(self) -> bool:
        "Is the loss scaled in fp16: not with `enabled=False`?"
        return self._fp16_scaler.is_enabled()

    @property
    def has_own_state(self) -> bool:
        "Does the scaler read states of its own kind, as a subclass may?"
        return type(self._fp16_scaler).load_state_dict is not GradScaler.load_state_dict

    def snapshot(self) -> Any:
        "What `restore` needs to undo the steps from now on."
        return self.state_dict(), self.history.n, self.found_inf, self.undecided

    def restore(self, snapshot: Any) -> None:
        "Put scale, tracker and history back to `snapshot`; the gradients must not be scaled."
        state, n, self.found_inf, undecided = snapshot
        self.load_state_dict(state)
        self.undecided = undecided
        self.history.truncate(n)

    def _follow(self) -> bool:
        """Mark the scale in the history if the last step did not lead to it; says whether it did.

        That is so where somebody changed it, and at each step of a scaler whose rules are its own.
        """
        s, known = self.scaler, type(self.scaler).update is GradScaler.update
        if (known or isinstance(s, StaticGradScaler)) and self._followed == scale_version(s): return False
        rule = CONSTANT
        if known: rule = ScaleRule(s.get_growth_factor(), s.get_backoff_factor(), s.get_growth_interval())
        state = s.state_dict()
        self.history.mark(s.get_scale(), state.get('_growth_tracker', 0), rule)
        return True
