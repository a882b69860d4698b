"Checks that the precision callback makes of its arguments, of a model and of an optimizer; each raises a clear error."
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import lru_cache
from numbers import Integral

import torch
from fastai.learner import Learner
from fastai.optimizer import Optimizer, OptimWrapper
from torch import nn

from .common import first_line, training_device, warn_user
from .compat import AutocastState, backward_without_autocast, is_compiled
from .convert import is_half
from .mode import AMPMode, emulation_warning, faster_call
from .scaling import is_number, optimizer_params

__all__ = ['ON_OVERFLOW', 'check_compiled', 'check_data_parallel', 'check_layers', 'check_overflow_args',
           'check_training', 'half_parameters_of']

ON_OVERFLOW = ('warn', 'raise', 'ignore')


def check_overflow_args(on_overflow: str, max_skips: int, skip_nonfinite: bool) -> None:
    "Raise a `ValueError` that names the argument that cannot be used."
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

    Raises a `ValueError` if the loss cannot be scaled: fp16 parameters, or an optimizer that needs a closure. Warns of
    other parameters in half precision, and of parameters outside the optimizer, whose gradients stay scaled.
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
    if scaled and _needs_closure(learn.opt):
        raise ValueError(f"{type(getattr(learn.opt, 'opt', learn.opt)).__name__} needs a closure for its step, which "
                         "neither GradScaler nor fastai's training loop gives it, in any precision.\n"
                         "Use another optimizer.")
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


def check_data_parallel(
    mode: AMPMode,
    model: nn.Module, # The model to train
    fp32_modules: list[str], # Names of the modules to keep in fp32
) -> None:
    """Raise a `ValueError` if `nn.DataParallel` could not compute in `mode`, or keep modules in fp32.

    `nn.DataParallel` passes on to its threads that autocast is on, but not its dtype: they take the default, fp16.
    A replica is a shallow copy, whose modules would run the forward of the original.
    """
    if mode is AMPMode.TF32 or (mode is AMPMode.FP16 and not fp32_modules): return
    if not any(isinstance(m, nn.DataParallel) and len(m.device_ids or ()) > 1 for m in model.modules()): return
    what, without = ('fp32_modules', ' without fp32_modules') if mode is AMPMode.FP16 else (mode.value, '')
    raise ValueError(f"{what} cannot be used with nn.DataParallel, whose replicas would not compute in it.\n"
                     f"Use DistributedDataParallel, or `learn.to_fp16()`{without}.")


@lru_cache
def refused_layer(kind: type[nn.Module], mode: AMPMode) -> str | None:
    """Return what PyTorch says when the CPU cannot run a recurrent layer of this kind in `mode`; None if it can.

    oneDNN, which runs LSTMs on CPUs, has no kernel for fp16, or on CPUs without AVX512 for bf16. Found by trying.
    """
    autocast = torch.autocast('cpu', dtype=mode.dtype)
    with torch.random.fork_rng(devices=[]), AutocastState('cpu'), torch.inference_mode(False), autocast:
        try: kind(2, 2, device='cpu')(torch.zeros(1, 1, 2, device='cpu'))[0].float().sum().backward()
        except RuntimeError as e: return first_line(e)
    return None


def check_layers(
    mode: AMPMode,
    device: torch.device,
    modules: Iterable[tuple[str, nn.Module]], # With their names
    is_kept: Callable[[str], bool], # Whether the module of this name is kept in fp32
) -> None:
    "Raise a `ValueError` that names layer, reason and ways out if a recurrent layer cannot run in `mode`."
    if device.type != 'cpu': return
    for name, m in modules:
        kind = next((k for k in (nn.LSTM, nn.GRU, nn.RNN) if isinstance(m, k)), None)
        if kind is None or is_kept(name) or (why := refused_layer(kind, mode)) is None: continue
        raise ValueError(f"{mode.value} does not run on this CPU for '{name}' ({kind.__name__}).\n"
                         f"PyTorch says: {why}.\n"
                         f"Keep such layers in fp32, `learn.to_{mode.value}(fp32_modules=nn.{kind.__name__})`, or "
                         f"train with `{faster_call(mode, device)}`.")


def _needs_closure(opt: Optimizer | OptimWrapper) -> bool:
    step = getattr(opt, 'opt', opt).step
    closure = inspect.signature(step).parameters.get('closure')
    return closure is not None and closure.default is inspect.Parameter.empty


def check_compiled(
    model: nn.Module, # The model to train
    fp32_modules: list[str], # Names of the modules to keep in fp32
) -> None:
    "Raise a `ValueError` if modules cannot be kept in fp32 because this PyTorch compiles their backward pass in half."
    if fp32_modules and is_compiled(model) and backward_without_autocast() is None:
        raise ValueError(f"fp32_modules={fp32_modules!r} cannot be kept in a compiled model: this PyTorch "
                         f"({torch.__version__}) compiles their backward pass in half precision.\nTrain it uncompiled, "
                         "or with another version of PyTorch (2.9 and 2.15 are known to work).")
