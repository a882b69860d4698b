"The parts of a learner: device, optimizer and parameters, newest loss, and states that a file left for precisions."
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from fastai.learner import Learner
from fastai.optimizer import Optimizer, OptimWrapper
from fastai.torch_core import default_device
from torch import nn


def model_device(model: nn.Module, default: torch.device | str) -> torch.device:
    "Return the device of `model`'s first parameter or buffer, else `default`."
    tensor = next(chain(model.parameters(), model.buffers()), None)
    return torch.device(default) if tensor is None else tensor.device


def training_device(learn: Learner) -> torch.device:
    """Return the device to which fastai moves the model when a fit starts: its DataLoaders', else the default one.

    It stays on its own device if the DataLoaders have None as theirs.
    """
    try: device = learn.dls.device
    except AttributeError: device = default_device()             # DataLoaders of PyTorch
    except IndexError: device = None                             # an empty DataLoaders raises it for any attribute
    return model_device(learn.model, 'cpu') if device is None else torch.device(device)


def optimizer_params(opt: Optimizer | OptimWrapper | None) -> list[nn.Parameter]:
    "Return the parameters of `opt`, each once; none for None."
    if opt is None: return []
    by_id = {id(p): p for params in opt.param_lists for p in params}
    return [*by_id.values()]


def gradient_params(opt: Optimizer | OptimWrapper | None) -> list[Any]: # Their `grad` is a tensor
    "Return the parameters of `opt` that have gradients."
    return [p for p in optimizer_params(opt) if p.grad is not None]


def inner_optimizer(opt: Any) -> Any: # Of fastai or torch, or one around it, as `Lookahead` is; None for None
    "Return the optimizer that holds the state."
    while hasattr(opt, 'opt'): opt = opt.opt
    return opt


def optimizer_rules(opt: Optimizer) -> list[Callable]:
    "Return the rules of one of fastai's own optimizers."
    return [getattr(rule, 'func', rule) for rule in opt.cbs]     # some are partial


def optimizer_name(opt: Optimizer | OptimWrapper) -> str:
    "Return the name of `opt` for a user, such as 'AdamW'. Those of fastai share a class; their last rule has the name."
    if type(opt) is Optimizer: return optimizer_rules(opt)[-1].__name__.removesuffix('_step').title()
    return type(opt.opt if isinstance(opt, OptimWrapper) else opt).__name__


def newest_loss(learn: Learner) -> torch.Tensor | None:
    "Return the newest loss. It may be that of an earlier batch, as fastai computes none without targets."
    loss = vars(learn).get('loss_grad')                          # `learn.loss_grad` would look at the model as well
    return loss if isinstance(loss, torch.Tensor) else None


def loaded_states(learn: Learner) -> dict[str, Any]: # By `Precision.state_key`
    "Return the states that `learn.load` has read for precisions that were not set; setting one removes its state."
    return vars(learn).get('loaded_precision', {})


def is_dtensor(t: object) -> bool:
    "Return whether `t` is a DTensor, as FSDP2's `fully_shard` makes of parameters."
    return hasattr(t, 'full_tensor')


def is_sharded(model: nn.Module) -> bool:
    "Return whether a model is sharded by FSDP2, which may leave its parameters whole after a validation."
    if any(hasattr(m, 'unshard') for m in model.modules()): return True
    return any(map(is_dtensor, model.parameters()))


def several_processes() -> bool:
    "Return whether this process trains together with others."
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
