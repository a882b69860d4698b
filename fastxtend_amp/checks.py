"Checks that the precision callback makes of its arguments, of a model and of an optimizer; each raises a clear error."
from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from fastai.learner import Learner
from torch import nn
from torch.amp import GradScaler

from .common import training_device, warn_user
from .compat import BackwardWithoutAutocast, is_compiled
from .convert import is_half
from .mode import AMPMode, emulation_warning
from .scaling import is_number, optimizer_params

__all__ = ['ON_OVERFLOW', 'check_arguments', 'check_model', 'check_training', 'half_parameters_of']

ON_OVERFLOW = ('warn', 'raise', 'ignore')


def check_arguments(
    mode: AMPMode | None, # None for 'auto'
    scaler: GradScaler | None,
    fp32_modules: Any,
    modules: Any,
    on_overflow: str,
    max_skips: int,
    skip_nonfinite: bool,
) -> None:
    "Raise a `ValueError` that names the argument of `MixedPrecision` that cannot be used."
    if scaler is not None and mode is AMPMode.BF16:
        raise ValueError(f"scaler={scaler!r} cannot be used with amp_mode='bf16', which needs no loss scaling.\n"
                         "Leave it out, or take 'fp16' or 'auto'.")
    if fp32_modules is not None and mode is AMPMode.TF32:
        raise ValueError(f"fp32_modules={fp32_modules!r} cannot be used with amp_mode='tf32', which holds for the "
                         "whole process.\nLeave it out, or take 'bf16'.")
    if modules is not None and mode is not AMPMode.FP8:
        raise ValueError(f"modules={modules!r} is for fp8 only.\nLeave it out, or call `learn.to_fp8`.")
    if on_overflow not in ON_OVERFLOW:
        raise ValueError(f"on_overflow={on_overflow!r} cannot be used: it must be 'warn', 'raise' or 'ignore'.")
    if not is_number(max_skips, Integral) or max_skips < 1:
        raise ValueError(f"max_skips={max_skips!r} cannot be used: max_skips must be an integer of at least 1, the "
                         "number of skipped steps in a row after which training counts as going wrong.")
    if not isinstance(skip_nonfinite, bool):
        raise ValueError(f'skip_nonfinite={skip_nonfinite!r} cannot be used: it must be True or False.')


def check_training(
    learn: Learner,
    mode: AMPMode | None, # None for fp32
    scaled: bool, # Whether the loss is scaled
    warn_of_mode: bool, # Whether to warn where the device has no native arithmetic for the mode
) -> None:
    """Check what only training needs.

    Raises a `ValueError` for fp16 and complex parameters, whose gradients cannot be unscaled. Warns of other parameters
    in half precision, and of parameters outside the optimizer, whose gradients stay scaled.
    """
    device = training_device(learn)
    if mode is None:
        warn_user(f"amp_mode='auto': device '{device}' does neither bf16 nor fp16 natively, so training runs in "
                  "fp32.\n`precision_support()` says why; `learn.to_fp32()` is silent.")
    elif warn_of_mode and (message := emulation_warning(mode, device)): warn_user(message)
    trained = [(name, p) for name, p in learn.model.named_parameters() if p.requires_grad]
    fp16 = [name for name, p in trained if p.dtype is torch.float16]
    if scaled and fp16:
        raise ValueError(f"fp16 mixed precision needs fp32 parameters, but {len(fp16)} to be trained are fp16, such as "
                         f"'{fp16[0]}'.\nCall `learn.model.float()` first: autocast itself casts what can run in fp16.")
    if scaled and (complex_ := [name for name, p in trained if p.is_complex()]):
        raise ValueError(f"'{complex_[0]}' is a complex parameter, whose gradients `GradScaler` cannot unscale.\n"
                         'Use `learn.to_bf16()`, or `learn.to_fp32()`.')
    if half := half_parameters_of(learn.model):
        warn_user(f"{len(half)} parameters to be trained are in half precision themselves, such as '{half[0]}': "
                  "small updates to them are rounded away.\n"
                  "Call `learn.model.float()` first: autocast itself casts what can run in half precision.")
    stepped = {id(p) for p in optimizer_params(learn.opt)}
    if scaled and (strays := [name for name, p in trained if id(p) not in stepped]):
        warn_user(f"{len(strays)} parameters to be trained are not in `learn.opt`, such as '{strays[0]}': in fp16 "
                  "their gradients stay multiplied by the loss scale.\nAn optimizer of your own for them would "
                  "step far too far. Put them into the learner's, or use `learn.to_bf16()`.")


def half_parameters_of(
    model: nn.Module, # The model to train
) -> list[str]: # Names
    "Return the parameters to be trained that are in half precision themselves: small updates to them are rounded away."
    return [name for name, p in model.named_parameters() if p.requires_grad and is_half(p)]


def check_model(
    mode: AMPMode,
    model: nn.Module, # The model to train
    fp32_modules: list[str], # Names of the modules to keep in fp32
) -> None:
    """Raise a `ValueError` if the model cannot compute in `mode`, or cannot keep modules in fp32.

    `nn.DataParallel` passes on to its threads that autocast is on, but not its dtype: they take the default, fp16.
    A replica is a shallow copy, whose modules would run the forward of the original. Compiled models need a setting
    that not every PyTorch has.
    """
    is_parallel = any(isinstance(m, nn.DataParallel) and len(m.device_ids or ()) > 1 for m in model.modules())
    if is_parallel and mode is not AMPMode.TF32 and (mode is not AMPMode.FP16 or fp32_modules):
        what, without = ('fp32_modules', ' without fp32_modules') if mode is AMPMode.FP16 else (mode.value, '')
        raise ValueError(f"{what} cannot be used with nn.DataParallel, whose replicas would not compute in it.\n"
                         f"Use DistributedDataParallel, or `learn.to_fp16()`{without}.")
    if fp32_modules and is_compiled(model) and not BackwardWithoutAutocast().is_available:
        raise ValueError(f"fp32_modules={fp32_modules!r} cannot be kept in a compiled model: this PyTorch "
                         f"({torch.__version__}) compiles their backward pass in half precision.\nTrain it uncompiled, "
                         "or with another version of PyTorch (2.9 and 2.15 are known to work).")
