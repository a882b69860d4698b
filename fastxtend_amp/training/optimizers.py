"`fused`: torch's fused optimizers as an `opt_func` for fastai."
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fastai.optimizer import OptimWrapper

_CLASSES = torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD
FUSED: dict[Any, Any] = {cls.__name__: cls for cls in _CLASSES}


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
    inspect.signature(cls).bind_partial(None, None, fused=True, **hypers)   # `params` and `lr`, which fastai gives
    return partial(OptimWrapper, opt=partial(cls, fused=True, **hypers))
