"The device of a learner, its optimizer, its parameters, and whether they are sharded."
from collections.abc import Callable
from itertools import chain

import torch
from fastai.learner import Learner
from fastai.optimizer import Optimizer, OptimWrapper
from torch import nn


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
    return [] if opt is None else [*{id(p): p for params in opt.param_lists for p in params}.values()]


def optimizer_rules(opt: Optimizer) -> list[Callable]:
    "Return the rules of one of fastai's own optimizers."
    return [getattr(rule, 'func', rule) for rule in opt.cbs]     # some are partial


def optimizer_name(opt: Optimizer | OptimWrapper) -> str:
    "Return the name of `opt` for a user, such as 'AdamW'; fastai's own share one class, so the last rule gives theirs."
    if type(opt) is Optimizer: return optimizer_rules(opt)[-1].__name__.removesuffix('_step').title()
    return type(opt.opt if isinstance(opt, OptimWrapper) else opt).__name__


def is_dtensor(t: object) -> bool:
    "Return whether `t` is a DTensor, as FSDP2's `fully_shard` makes of parameters."
    return hasattr(t, 'full_tensor')


def is_sharded(model: nn.Module) -> bool:
    "Return whether a model has DTensors; those of FSDP2 may be whole tensors between a validation and the next use."
    if any(hasattr(m, 'unshard') for m in model.modules()): return True
    return any(map(is_dtensor, model.parameters()))
