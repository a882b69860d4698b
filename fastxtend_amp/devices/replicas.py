"The precision of `DataParallel`'s replicas, each of which runs in a thread of its own."
from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ..compat import replace_replicate
from ..forward import ModuleForward
from ..fp32_modules import Fp32Forward
from ..observer import OBSERVERS, PrecisionObserver

__all__ = ['Replicas']


class ReplicaAutocast(ModuleForward):
    """Runs a replica under autocast in the fit's dtype, where autocast was on in the thread that made the replica.

    autocast's dtype belongs to a thread. `torch.nn.parallel.parallel_apply` tells its threads only that autocast is on,
    so that they would take the device's default: fp16 on CUDA, and for a model in bf16 without a loss scale.
    """
    def __init__(self, module: nn.Module, device_type: str, dtype: torch.dtype):
        super().__init__(module)
        self.device_type, self.dtype, self.enabled = device_type, dtype, torch.is_autocast_enabled(device_type)

    def __call__(self, *args, **kwargs) -> Any:
        if not self.enabled: return self.run(*args, **kwargs)
        with torch.autocast(self.device_type, dtype=self.dtype): return self.run(*args, **kwargs)


class ReplicasInPrecision:
    """Stands on a `DataParallel` module as its `replicate`: the replicas run in the precision of the fit.

    A replica is a shallow copy, so that an object on a module's forward (`fp32_modules`, half-precision weights) would
    run with the weights of the original; the replica gets one of its own. Can be pickled and copied with the module.
    """
    def __init__(self, parallel: nn.DataParallel, device_type: str, dtype: torch.dtype):
        self.parallel, self.device_type, self.dtype = parallel, device_type, dtype

    def __call__(self, *args, **kwargs) -> list[nn.Module]:
        replicas = type(self.parallel).replicate(self.parallel, *args, **kwargs)
        for replica in replicas:
            for m in replica.modules(): _give_own_forwards(m)
            ReplicaAutocast(replica, self.device_type, self.dtype).install()
        return replicas


def _give_own_forwards(module: nn.Module) -> None:
    "Give `module`, if it is a shallow copy, its own copies of the objects on the original's forward."
    forward, ours = module.__dict__.get('forward'), []
    while isinstance(forward, ModuleForward) and forward.module is not module:
        ours.append(forward)
        forward = forward.inner
    for original in reversed(ours):
        if isinstance(original, Fp32Forward): original.called = True   # by way of its replica
        own = copy.copy(original)
        own.module, own.inner = module, forward
        own.install()
        forward = own


class Replicas(PrecisionObserver):
    "Has the replicas of every `DataParallel` in the model run in the callback's precision during a fit."
    def __init__(self, cb: Any):
        super().__init__(cb)
        self.parallels: list[nn.DataParallel] = []

    def fit_started(self) -> None:
        mode, device = self.cb.fit_mode, self.cb.fit_device
        if mode is None: return
        self.parallels = [m for m in self.cb.learn.model.modules() if isinstance(m, nn.DataParallel)]
        for m in self.parallels: replace_replicate(m, ReplicasInPrecision(m, device.type, mode.dtype))

    def fit_ended(self) -> None:
        for m in self.parallels: replace_replicate(m, None)
        self.parallels = []


OBSERVERS.append(Replicas)
