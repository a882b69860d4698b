"Small helpers that several files share: devices, DTensors, processes, errors and warnings."
from __future__ import annotations

import inspect, sys, warnings
from itertools import chain
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from fastai.learner import Learner
from torch import nn

__all__ = ['first_line', 'is_dtensor', 'is_sharded', 'loaders_device', 'model_device', 'several_processes',
           'training_device', 'type_name', 'warn_user']


def first_line(error: BaseException, limit: int = 200) -> str:
    "Return what an exception says, in one line; its type's name where it says nothing."
    lines = str(error).rpartition(':\n\t')[2].strip().splitlines()   # without fastai's line on the callback
    return shorten(lines[0], limit, placeholder=' …').rstrip('.: ') if lines else type(error).__name__


def model_device(model: nn.Module, default: torch.device | str) -> torch.device:
    "Return the device of `model`'s first parameter or buffer, else `default`."
    tensor = next(chain(model.parameters(), model.buffers()), None)
    return torch.device(default) if tensor is None else tensor.device


def training_device(learn: Learner) -> torch.device:
    """Return the device that `learn.fit` will use: its DataLoaders', to which fastai moves the model when a fit starts.

    The model's own device if the DataLoaders name none.
    """
    device = loaders_device(learn)
    return model_device(learn.model, 'cpu') if device is None else torch.device(device)


def loaders_device(learn: Learner) -> torch.device | str | int | None: # As the user gave it
    "Return the device that the learner's DataLoaders name; None if they name none."
    try: return getattr(learn.dls, 'device', None)
    except IndexError: return None                               # what an empty DataLoaders raises for any name


def is_dtensor(t: object) -> bool:
    "Return whether `t` is a DTensor, as FSDP2's `fully_shard` makes of parameters."
    module: Any = sys.modules.get('torch.distributed.tensor')    # imported by whoever made a DTensor, and not before
    return module is not None and isinstance(t, module.DTensor)


def is_sharded(model: nn.Module) -> bool:
    "Return whether a model has DTensors; those of FSDP2 may be whole tensors between a validation and the next use."
    fsdp: Any = sys.modules.get('torch.distributed.fsdp')
    if fsdp is not None and any(isinstance(m, fsdp.FSDPModule) for m in model.modules()): return True
    return any(map(is_dtensor, model.parameters()))


def several_processes() -> bool:
    "Return whether this process trains together with others."
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


_NOT_THE_USERS = ('fastxtend_amp', 'fastai', 'fastcore', 'torch', 'contextlib')


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    "Warn at the user's own line: the innermost one that is not in this package, fastai, fastcore or PyTorch."
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get('__name__', '').partition('.')[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=max(level, 1))


def type_name(kind: type) -> str:
    "Return the name of a class as it is written in code: `nn.LayerNorm` for PyTorch's modules."
    return f'nn.{kind.__name__}' if kind.__module__.startswith('torch.nn') else kind.__name__
