"Small helpers that several files share: devices, parameters, warnings, random states, 16-bit tensors."
import inspect, warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from fastai.learner import Learner
from fastai.optimizer import Optimizer, OptimWrapper
from torch import nn

from .compat import tree_map_only


def model_device(model: nn.Module, default: torch.device | str) -> torch.device:
    "Return the device of `model`'s first parameter or buffer, else `default`."
    tensor = next(chain(model.parameters(), model.buffers()), None)
    return torch.device(default) if tensor is None else tensor.device


def training_device(learn: Learner) -> torch.device:
    """Return the device that `learn.fit` will use: its DataLoaders', to which fastai moves the model when a fit starts.

    The model's own device if the DataLoaders name none.
    """
    try: device = getattr(learn.dls, 'device', None)
    except IndexError: device = None                             # what an empty DataLoaders raises for any name
    return model_device(learn.model, 'cpu') if device is None else torch.device(device)


def optimizer_params(opt: Optimizer | OptimWrapper | None) -> list[nn.Parameter]:
    "Return the parameters of `opt`, each once; none for None."
    return [] if opt is None else [*dict.fromkeys(chain.from_iterable(opt.param_lists))]


def is_dtensor(t: object) -> bool:
    "Return whether `t` is a DTensor, as FSDP2's `fully_shard` makes of parameters."
    return hasattr(t, 'full_tensor')


def is_sharded(model: nn.Module) -> bool:
    "Return whether a model has DTensors; those of FSDP2 may be whole tensors between a validation and the next use."
    if any(hasattr(m, 'unshard') for m in model.modules()): return True
    return any(map(is_dtensor, model.parameters()))


def check_argument(
    name: str,
    value: Any,
    is_allowed: Callable[[Any], bool], # A `TypeError` in it, of a value of another type, counts as False
    allowed: str, # In words, for the error
) -> None:
    "Raise a `ValueError` if an argument has a value that is not allowed."
    with suppress(TypeError):
        if is_allowed(value): return
    raise ValueError(f'{name}={value!r} cannot be used: it must be {allowed}.')


_NOT_THE_USERS = ('fastxtend_amp', 'fastai', 'fastcore', 'torch', 'contextlib')


def is_users(frame: Any) -> bool:
    "Return whether a frame runs code that is not of this package, fastai, fastcore or PyTorch."
    return frame.f_globals.get('__name__', '').partition('.')[0] not in _NOT_THE_USERS


def warn_user(message: str) -> None:
    "Warn at the user's own line: the innermost one that is not in this package, fastai, fastcore or PyTorch."
    frame, level = inspect.currentframe(), 1
    while frame and not is_users(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


# -- random states

RandomState = list[tuple[Callable, Any]]                         # functions that set a generator, and its state


def torch_random_state() -> RandomState:
    "Return the state of PyTorch's global generators, without synchronizing."
    module = torch.get_device_module()                           # the accelerator's, if there is one
    found = [(torch.set_rng_state, torch.get_rng_state())]
    if not getattr(module, 'is_initialized', lambda: True)(): return found         # asking does not start it
    for name in ('rng_state_all', 'rng_state'):
        get = getattr(module, f'get_{name}', None)
        if get: return [*found, (getattr(module, f'set_{name}'), get())]
    return found


# -- tensors nested in predictions and inputs

HALF = (torch.float16, torch.bfloat16)


def is_half(t: torch.Tensor) -> bool:
    "Return whether `t` is fp16 or bf16."
    return t.dtype in HALF


def half_to_float(t: torch.Tensor) -> torch.Tensor:
    "Return `t` in fp32 if it is fp16 or bf16; else `t` itself."
    return t.float() if is_half(t) else t


def map_tensors(
    f: Callable[[torch.Tensor], torch.Tensor],
    x: Any, # A tensor, or tensors nested in what PyTorch's pytree knows
) -> Any: # `x` itself, or a copy of the same type
    "Return `x` with `f` applied to every tensor in it. (fastai's `apply` turns subclasses of dict into dicts.)"
    return tree_map_only(torch.Tensor, f, x)
