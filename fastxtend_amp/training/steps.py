"An optimizer step with loss scaling: who skips it if a gradient is not finite, the host or the device."
from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from fastai.optimizer import OptimWrapper
from torch import nn

from ..tensors import FP16_SMALLEST
from .optimizers import FUSED


class HostStep:
    "A step that the host skips if a gradient is not finite. To know that, it synchronizes."
    largest: float | None = None                                 # gradient, if the step is good and the scale low
    def __init__(self, found_inf: bool = False): self.found_inf = self.host_skips = found_inf

    def decide(self, flags: list[torch.Tensor]) -> None: # 1 where a backward pass found NaN or inf on a device
        "Decide whether to skip the step."
        self.found_inf = self.host_skips = any(map(bool, flags))

    def end(self, scaler: Any) -> HostStep: # A `GradScaler` that has been updated
        "Return the step as it is known from now on: itself."
        return self


class DeviceStep:
    "A step of one of torch's fused optimizers, which has no effect if `found_inf` is 1. The host does not know that."
    host_skips, largest = False, None
    found_inf = torch.zeros(())                                  # of the gradients; until `decide` unknown
    def __init__(self, optimizer: torch.optim.Optimizer): self.optimizer = optimizer

    def decide(self, flags: list[torch.Tensor]) -> None: # As in `HostStep`
        "Tell the optimizer whether to skip the step."
        self.found_inf = reduce(torch.maximum, flags)
        vars(self.optimizer)['found_inf'] = self.found_inf

    def end(self, scaler: Any) -> HostStep | DeviceStep: # As in `HostStep`
        """Remove the flag. The host reads it on a CPU, where that does not synchronize.

        At scale 0 NaN would pass, so the scale stays above 0 until the host mends it.
        """
        vars(self.optimizer).pop('found_inf', None)
        scaler._scale.clamp_(min=FP16_SMALLEST / 2)              # undocumented, since 1.6
        return HostStep(bool(self.found_inf)) if self.found_inf.device.type == 'cpu' else self


def skips_on_device(opt: Any, params: list[nn.Parameter]) -> bool: # The learner's; those with gradients
    """Return whether the next step is one of torch's fused kernels, which have no effect if `opt.opt.found_inf` is 1.

    A skipped first step would create the optimizer's state, and fused SGD would leave its momentum uninitialised
    (PyTorch 2.13). MPS has had kernels that ignore the flag (github.com/pytorch/pytorch/pull/186360).
    """
    if type(opt) is not OptimWrapper or type(opt.opt) not in FUSED.values(): return False
    if not all(group.get('fused') for group in opt.opt.param_groups): return False
    if len({p.device for p in params}) > 1 or params[0].device.type == 'mps': return False
    is_plain_sgd = all(group.get('momentum') == 0 for group in opt.opt.param_groups)
    return is_plain_sgd or all(map(opt.opt.state.get, params))
