"What precision do `DataParallel`'s replicas compute in, each in a thread of its own?"
from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..fp32_modules import Fp32Forward
from ..observer import OBSERVERS, PrecisionObserver


class ReplicaDtype:
    """A forward pre-hook that sets autocast's dtype where autocast is on.

    The dtype belongs to a thread. `torch.nn.parallel.parallel_apply` tells its threads only that autocast is on, so they
    would take the device's default: on CUDA fp16, and for a model in bf16 without a loss scale. Each thread enters an
    autocast of its own around the replica, whose end undoes this. A replica is a shallow copy, so a module that is kept
    in fp32 has the forward of the original, with its weights, until it is given one of its own.
    """
    def __init__(self, device_type: str, dtype: torch.dtype): self.device_type, self.dtype = device_type, dtype
    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.is_autocast_enabled(self.device_type): torch.set_autocast_dtype(self.device_type, self.dtype)
        if not getattr(module, '_is_replica', False): return
        for m in module.modules():
            forward = m.__dict__.get('forward')
            if isinstance(forward, Fp32Forward) and forward.module is not m:
                forward.called = True                            # by way of its replica
                forward.onto(m)


class Replicas(PrecisionObserver):
    "Has the replicas of a `DataParallel` model run in the callback's precision during a fit."
    handle: Any = None

    def fit_started(self) -> None:
        model, mode = self.cb.learn.model, self.cb.fit_mode
        if mode is None or not isinstance(model, nn.DataParallel): return
        while isinstance(model, nn.DataParallel): model = model.module   # fastai wraps again after a fit that an exception ended
        self.handle = model.register_forward_pre_hook(ReplicaDtype(self.cb.fit_device.type, mode.dtype))  # `replicate` copies hooks

    def fit_ended(self) -> None:
        handle, self.handle = self.handle, None
        if handle is not None: handle.remove()


OBSERVERS.append(Replicas)
