"`fused`, torch's fused optimizers as an `opt_func` for fastai; the place of an optimizer's state."
from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fastai.optimizer import Optimizer, OptimWrapper

from ..common import refuse_unknown
from ..compat import tree_leaves
from ..convert import map_tensors

__all__ = ['fused', 'place_state']

FUSED = {'Adam': torch.optim.Adam, 'AdamW': torch.optim.AdamW, 'SGD': torch.optim.SGD}
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
    cls: Any = FUSED.get(optimizer) if isinstance(optimizer, str) else optimizer
    if cls not in FUSED.values():
        names = ', '.join(map(repr, FUSED))
        name = getattr(optimizer, '__qualname__', None) or repr(optimizer).splitlines()[0]
        raise ValueError(f"optimizer={name} cannot be used: fused supports {names} or torch's class of that name, "
                         "such as torch.optim.AdamW.\nfastai's Adam decays weights as torch's AdamW does. Give other "
                         'optimizers to `Learner(opt_func=...)` itself.')
    refuse_unknown('fused', [name for name in inspect.signature(cls).parameters if name not in _OURS], hypers)
    return partial(OptimWrapper, opt=partial(cls, fused=True, **hypers))


def place_state(
    opt: Optimizer | OptimWrapper, # `Lookahead` is an `Optimizer`
) -> None:
    """Move the optimizer's state to the device of its parameters, and step counts to where the optimizer needs them.

    A loaded state is on the device that the file was read to; fastai moves the model when a fit starts.
    """
    inner = opt
    while hasattr(inner, 'opt'): inner = inner.opt
    groups = inner.param_groups if isinstance(inner, torch.optim.Optimizer) else []
    on_host = {p for g in groups if not (g.get('capturable') or g.get('fused')) for p in g['params']}
    for p, state in getattr(inner, 'state', {}).items():
        if not isinstance(p, torch.Tensor): continue
        others = tree_leaves([value for key, value in state.items() if key != 'step'])
        tensors = [t for t in others if isinstance(t, torch.Tensor)]
        # Single numbers stay: NAdam keeps one on the CPU.
        if all(t.device == p.device or (p.dim() and not t.dim()) for t in tensors): continue
        for key, value in state.items():
            host = key == 'step' and p in on_host
            state[key] = map_tensors(partial(torch.Tensor.to, device='cpu' if host else p.device), value)
