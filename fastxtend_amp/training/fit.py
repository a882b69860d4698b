"`Fit`: what a precision has open on a learner in one fit or validation."
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from fastai.callback.core import CancelStepException
from torch import nn
from torch.amp import GradScaler

from ..messages import warn_user
from ..precisions import Precision
from ..precisions.fp16 import static_scaler
from .scaling import Scaling

if TYPE_CHECKING: from .callback import MixedPrecision


class Fit(ExitStack):
    "The contexts and the loss scaling of one fit or validation; `end` exits them in reverse order."
    model: Any = None                                            # the one that `model_contexts` are open for
    scaling: Scaling | None = None                               # None without loss scaling
    observations: Any = None                                     # of a `FailureWatcher`, as they end with the fit

    def __init__(self,
        cb: 'MixedPrecision',
        device: torch.device, # Of the model
        trains: bool, # Whether there may be training batches
    ):
        super().__init__()
        self.precision, self.learn = precision, learn = cb.precision, cb.learn
        self.device, self.trains = device, trains
        self.loss_func = learn.loss_func                         # before MixUp puts another in its place
        precision.check_device(device)
        precision.check(learn.model)
        if trains:
            precision.prepare(learn)                             # before a distributed trainer wraps the model
        support = precision.support(device)
        if support.status == 'emulated':
            warn_user(f"{precision.name} is emulated on device '{device}' ({support.why}): it is usually slower than "
                      'fp32.\nCall `learn.to_amp()`, which selects only what the device accelerates; '
                      f"`learn.compare_precision('{precision.name}')` measures it.", learn)      # once
        self.model_contexts = self.enter_context(ExitStack())    # those of the precision's `around_fit`
        scaler = precision.scaler(device)
        skips = precision.skip_nonfinite or (cb.on_overflow == 'fix' and type(precision) is not Precision)
        if skips and scaler is None: scaler = static_scaler(device.type, 1.)
        if scaler is not None: self.scaling = Scaling(scaler, cb, device)
        learn.scaler = scaler or GradScaler('cpu', enabled=False)

    def use_model(self) -> None:
        "Enter what the precision names, at the first batch and for each other model that the learner gets."
        learn, precision, old = self.learn, self.precision, self.model
        if learn.model is old: return
        if precision.dtype: check_parallel(precision, learn.model)
        self.model_contexts.close()
        for context in precision.around_fit(learn.model): self.model_contexts.enter_context(context)
        self.model = learn.model
        if not self.trains: return
        if old is None:
            precision.prepare(learn)                             # again: `before_fit` may have set model or optimizer
            for context in precision.around_training(learn): self.enter_context(context)
        if self.scaling:
            check_real(learn.model)
            self.scaling.buffers.follow(learn.model, self.loss_func, learn.loss_func)

    def run_backward(self, backward: Callable[[], object]) -> None:
        "Run a backward pass of fastai's loop."
        backward()
        if self.scaling and self.scaling.early_changes: self.scaling.early_changes.note()

    def run_step(self, step: Callable[[], object]) -> None:
        "Run the optimizer's step, unless a backward pass of another callback in this step was not finite."
        if self.scaling:
            self.scaling.end_pass()
            if self.scaling.step.host_skips: raise CancelStepException
        self.precision.step(self.learn, step)

    def end(self, failed: bool) -> None:
        "Exit all contexts. With loss scaling, a failure in training zeroes the gradients."
        vars(self.learn).pop('scaler', None)
        try:
            if self.scaling: self.scaling.end(failed)
        finally: self.close()


def check_real(model: nn.Module) -> None:
    "Raise a `ValueError` if a trainable parameter is complex."
    names = [name for name, p in model.named_parameters() if p.requires_grad and p.is_complex()]
    if not names: return
    raise ValueError(f"Gradients of complex parameters, such as '{names[0]}', cannot be scaled, nor their steps "
                     "skipped: PyTorch's GradScaler does not support them.\nUse `learn.to_bf16()`, without "
                     "skip_nonfinite and on_overflow='fix'.")


def check_parallel(precision: Precision, model: nn.Module) -> None:
    """Raise a `ValueError` if threads of `nn.DataParallel` would not compute in a precision with autocast.

    They know that autocast is on, but not its dtype: they use the default, fp16. A replica is a shallow copy, whose
    modules would run the forward of the original.
    """
    parallel = [m for m in model.modules() if isinstance(m, nn.DataParallel)]
    is_split = any(len(m.device_ids) > 1 for m in parallel)
    if is_split and (precision.dtype is not torch.float16 or precision.kept_in_fp32(model)):
        raise ValueError('nn.DataParallel supports only fp16 without fp32_modules: its replicas would not compute as '
                         f'`{precision!r}` says.\nUse DistributedDataParallel, or `learn.to_fp16()`.')
