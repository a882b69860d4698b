"Small helpers that several files share: arguments, devices, DTensors, processes, errors and warnings."
from __future__ import annotations

import inspect, threading, warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from difflib import get_close_matches
from itertools import chain
from numbers import Integral, Real
from textwrap import shorten
from typing import Any

import torch
import torch.distributed as dist
from fastai.learner import Learner
from fastai.optimizer import Optimizer, OptimWrapper
from torch import nn


def first_line(error: BaseException) -> str:
    "Return what an exception says, in one line; its type's name where it says nothing."
    text = str(error).rpartition(':\n\t')[2].strip()             # without fastai's line on the callback
    return shorten(text.partition('\n')[0], 200, placeholder=' …').rstrip('.: ') or type(error).__name__


def is_number(x: object, kind: type = Real) -> bool:
    "Return whether `x` is a number of this kind, and not a bool."
    return isinstance(x, kind) and not isinstance(x, bool)


def check_count(
    name: str, # The argument's name
    value: Any,
    at_least: int,
) -> None:
    "Raise a `ValueError` unless `value` is an integer and at least `at_least`."
    if not is_number(value, Integral) or value < at_least:
        raise ValueError(f'{name}={value!r} cannot be used: {name} must be an integer of at least {at_least}.')


def check_above_0(
    name: str, # The argument's name
    value: Any,
    example: str,
) -> None:
    "Raise a `ValueError` unless `value` is a number above 0."
    if not is_number(value) or not value > 0:
        raise ValueError(f'{name}={value!r} cannot be used: {name} must be a number above 0, for example {example}.')


def check_flag(
    name: str, # The argument's name
    value: Any,
) -> None:
    "Raise a `ValueError` unless `value` is True or False."
    if not isinstance(value, bool): raise ValueError(f'{name}={value!r} cannot be used: it must be True or False.')


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
    return any(hasattr(m, 'unshard') for m in model.modules()) or any(map(is_dtensor, model.parameters()))


def several_processes() -> bool:
    "Return whether this process trains together with others."
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


_NOT_THE_USERS = ('fastxtend_amp', 'fastai', 'fastcore', 'torch', 'contextlib')


def warn_user(message: str) -> None:
    "Warn at the user's own line: the innermost one that is not in this package, fastai, fastcore or PyTorch."
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_globals.get('__name__', '').partition('.')[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


_FORMER = {  # arguments of fastai v1, of fastai's non-native fp16, and of other libraries
    'dynamic': "leave it out. Scaling is dynamic unless you give a fixed scale: `learn.to_fp16(loss_scale=512)`.",
    'max_noskip': "write `growth_interval=`, the number of steps without a skip after which the scale grows.",
    'div_factor': "write `growth_factor=` and `backoff_factor=`.",
    'skip_nonfinite': 'leave it out: fp16 always skips steps whose gradients are not finite.',
    'lr': "give the learning rate to `Learner` or `fit`.",
    'wd': "write `weight_decay=`, or give `wd=` to `Learner` or `fit`.",
    'flat_master': "autocast has no master weights. For those write `learn.to_half_weights('fp16', flat_master=True)`.",
    **dict.fromkeys(('max_scale', 'max_loss_scale'), 'leave it out: the scale has no upper limit.'),
    **dict.fromkeys(('clip', 'clip_grad', 'grad_clip', 'max_grad_norm', 'gradient_clip_val'),
                    "add fastai's callback, which sees unscaled gradients: `learn.add_cb(GradientClip(1.))`."),
    **dict.fromkeys(('dtype', 'amp_mode', 'mode', 'precision'), 'call `learn.to_bf16()` or `learn.to_fp16()`.'),
}


class Shared:
    "A context of the whole process: the first of its users, in any thread, enters it, and the last one leaves it."
    def __init__(self, make: Callable[[], Any]): # Returns a new context
        self.make, self.lock, self.n_users = make, threading.RLock(), 0

    def __enter__(self) -> None:
        with self.lock:
            self.n_users += 1
            try:
                if self.n_users > 1: return
                self.context = self.make()
                self.context.__enter__()
            except BaseException:                                # an interrupt, after which `with` calls no `__exit__`
                with suppress(Exception): self.__exit__()
                raise

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.n_users -= 1
            if not self.n_users: self.context.__exit__(None, None, None)


def refuse_unknown(
    function: str, # Its name, such as 'to_fp16'
    known: Iterable[str], # Names of its arguments
    names: Iterable[str], # Names of the arguments that it got
) -> None:
    "Raise a `TypeError` for an argument that a function does not have, with what to write instead."
    known = [*known]
    for name in names:
        if name in known: continue
        near = get_close_matches(name, known, 1)
        former = 'write `amp_mode=`.' if name == 'dtype' and 'amp_mode' in known else _FORMER.get(name)
        instead = former or (f'did you mean `{near[0]}=`?' if near else f"there are {', '.join(known)}.")
        raise TypeError(f"{function}() has no argument '{name}': {instead}")
