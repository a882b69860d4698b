"`fused`, torch's fused optimizers as an `opt_func` for fastai; steps skipped on the device; placing a state."
from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fastai.optimizer import OptimWrapper
from torch import nn

from ..common import refuse_unknown
from ..compat import skips_by_flag
from ..convert import map_tensors

FUSED: dict[Any, Any] = {'Adam': torch.optim.Adam, 'AdamW': torch.optim.AdamW, 'SGD': torch.optim.SGD}
_OURS = ('params', 'lr', 'fused', 'foreach', 'differentiable')   # set by fastai, by `fused`, or at odds with it


def fused(
    optimizer: str | type[torch.optim.Optimizer], # 'Adam', 'AdamW' or 'SGD', or torch's class of that name
    **hypers: Any # Its arguments by torch's names, such as `betas`, `eps`, `momentum`, `weight_decay`
) -> Callable[..., OptimWrapper]: # For `Learner(opt_func=...)`; can be pickled
    """Return torch's fused `optimizer` for fastai: `Learner(..., opt_func=fused('AdamW'))`.

    One kernel updates all parameters, where fastai's own optimizers launch several for each. In fp16 it also skips
    steps on the device, without a GPU synchronization. fastai's schedules find the hyper-parameters by their names:
    `lr`, `mom`, `sqr_mom`, `wd`.

    It differs from fastai's `Adam` in two ways. The defaults are torch's: `fused('AdamW', betas=(.9, .99), eps=1e-5)`
    uses fastai's. Weight decay applies to all parameters, normalization layers and biases included.

    Raises `ValueError` for other optimizers, and `TypeError` for arguments that `optimizer` does not have or that
    fastai sets, such as `lr`. On a device without the fused kernel PyTorch raises `RuntimeError` in the first step.

    Source: https://docs.pytorch.org/docs/stable/optim.html
    """
    cls = FUSED.get(optimizer, optimizer)
    if cls not in FUSED.values():
        raise ValueError(f"optimizer={optimizer!r} cannot be used: fused supports {', '.join(FUSED)} or torch's class "
                         "of that name, such as torch.optim.AdamW.\nfastai's Adam decays weights as torch's AdamW "
                         'does. Give other optimizers to `Learner(opt_func=...)` itself.')
    refuse_unknown('fused', [name for name in inspect.signature(cls).parameters if name not in _OURS], hypers)
    return partial(OptimWrapper, opt=partial(cls, fused=True, **hypers))


def place_state(
    opt: Any, # An optimizer of fastai or torch, or one around it: `OptimWrapper`, `Lookahead`
) -> None:
    """Move the optimizer's state to the device of its parameters.

    A loaded state is on the device that the file was read to; fastai moves the model when a fit starts.
    """
    while hasattr(opt, 'opt'): opt = opt.opt
    tensors = [(p, t) for p, state in opt.state.items() for t in state.values() if isinstance(t, torch.Tensor)]
    # Single numbers may stay on the CPU: the number of steps, and what NAdam keeps.
    if all(t.device == p.device for p, t in tensors if t.dim()): return
    if isinstance(opt, torch.optim.Optimizer): return opt.load_state_dict(opt.state_dict())   # places it itself
    for p, state in opt.state.items():                           # fastai also keeps an entry for `nn.LSTM.bias`, a bool
        if torch.is_tensor(p): opt.state[p] = map_tensors(partial(torch.Tensor.to, device=p.device), state)

# -- optimizers that skip a step on the device

class FlaggedStep:
    "The step of torch's fused Adam, AdamW or SGD, which has no effect if the flag `found_inf` is 1."
    def __init__(self, opt: Any): self.opt = opt
    def mark(self, found_inf: torch.Tensor) -> None: self.opt.grad_scale, self.opt.found_inf = None, found_inf
    def unmark(self) -> None:
        for name in ('grad_scale', 'found_inf'): vars(self.opt).pop(name, None)


def _fused(opt: Any, params: list[nn.Parameter]) -> FlaggedStep | None:
    """Return the step of `opt` if it is torch's fused optimizer and a skipped step would leave no trace; else None.

    A skipped first step would create the optimizer's state, and fused SGD would leave its momentum uninitialised
    (PyTorch 2.13). MPS has had kernels that ignore the flag (github.com/pytorch/pytorch/pull/186360).
    """
    if type(opt) not in FUSED.values() or not skips_by_flag(opt): return None
    if len({p.device for p in params}) > 1 or params[0].device.type == 'mps': return None
    has_state = all(map(opt.state.get, params))
    is_plain_sgd = all(group.get('momentum') == 0 for group in opt.param_groups)
    return FlaggedStep(opt) if has_state or is_plain_sgd else None


# Each gets torch's optimizer and the parameters with gradients, and returns a `FlaggedStep` or None.
DEVICE_SKIPS: list[Callable[[Any, list[nn.Parameter]], Any]] = [_fused]


def flagged_step(opt: Any, params: list[nn.Parameter]) -> FlaggedStep | None:
    "Return what skips a step of the learner's optimizer on the device; None if the host has to."
    found = [find(opt.opt, params) for find in DEVICE_SKIPS] if type(opt) is OptimWrapper else []
    return next(filter(None, found), None)
