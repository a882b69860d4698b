"Checks of a model and an optimizer that hold for every precision; each raises or warns with what to do."
from __future__ import annotations

from typing import Any

import torch
from fastai.learner import Learner
from torch import nn

from ..common import optimizer_params, warn_user
from ..convert import is_half
from ..precisions import Precision


def check_training(
    fit: Any, # The `Fit` that is open
    warn_of_emulation: bool, # Warn of a device without hardware for the precision
) -> None:
    """Raise a `ValueError` for parameters whose gradients cannot be unscaled.

    Warn of emulation, of 16-bit parameters, and of scaled gradients outside the optimizer.
    """
    learn: Learner = fit.learn
    trainable = {name: p for name, p in learn.model.named_parameters() if p.requires_grad}
    unscalable = [name for name, p in trainable.items() if p.dtype is torch.float16 or p.is_complex()]
    if unscalable and fit.scaling is not None:
        name = unscalable[0]
        raise ValueError(f"'{name}' is a parameter of {trainable[name].dtype}, whose gradients `GradScaler` cannot "
                         'unscale.\nIf it is fp16, call `learn.model.float()` first: autocast itself casts what can '
                         'run in 16 bits. If it is complex, use `learn.to_fp32()`, or `learn.to_bf16()` without '
                         "`skip_nonfinite` and `on_overflow='fix'`.")
    if warn_of_emulation and fit.precision.name == 'fp32':
        warn_user(f"amp_mode='auto': device '{fit.device}' runs neither bf16 nor fp16 natively, so training runs in "
                  'fp32.\n`precision_support()` says why; `learn.to_fp32()` is silent.')
    elif warn_of_emulation and (message := fit.precision.emulation_warning(fit.device)): warn_user(message)
    if half := half_parameters_of(learn.model):
        warn_user(f"{len(half):,} trainable parameters are 16-bit themselves, such as '{half[0]}': small updates to "
                  'them are rounded away.\nCall `learn.model.float()` first: autocast itself casts what can run in '
                  '16 bits.')
    stepped = {*optimizer_params(learn.opt)}
    strays = [name for name, p in trainable.items() if p not in stepped]
    if strays and fit.precision.dtype is torch.float16 and fit.scaling is not None:
        warn_user(f"{len(strays):,} trainable parameters are not in `learn.opt`, such as '{strays[0]}': in fp16 "
                  "their gradients stay multiplied by the loss scale.\nAn optimizer of your own would take far too "
                  "large steps with them. Put them into the learner's optimizer, or use `learn.to_bf16()`.")


def half_parameters_of(
    model: nn.Module, # The model to train
) -> list[str]: # Names
    "Return the parameters to be trained that are 16-bit themselves: small updates to them are rounded away."
    return [name for name, p in model.named_parameters() if p.requires_grad and is_half(p)]


def check_model(
    precision: Precision, # One with autocast
    model: nn.Module, # The model to train
) -> None:
    """Raise a `ValueError` if the model cannot compute in `precision`.

    `nn.DataParallel` tells its threads that autocast is on, but not its dtype: they use the default, fp16. A replica is
    a shallow copy, whose modules would run the forward of the original.
    """
    is_parallel = any(isinstance(m, nn.DataParallel) and len(m.device_ids or ()) > 1 for m in model.modules())
    kept = precision.kept_in_fp32(model)
    if is_parallel and (kept or precision.dtype is not torch.float16):
        what = f'{precision.name} with fp32_modules' if kept else precision.name
        raise ValueError(f'nn.DataParallel supports only fp16 without fp32_modules, not {what}: its replicas would not '
                         'compute in it.\nUse DistributedDataParallel, or `learn.to_fp16()`.')
