"Optimizers for `Learner(opt_func=...)`: torch's fused ones, and those with Kahan summation for bf16 weights."
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fastai.optimizer import OptimWrapper, pytorch_hp_map

FUSED = {name: getattr(torch.optim, name) for name in ('Adam', 'AdamW', 'SGD')}


def fused(
    optimizer: str | type[torch.optim.Optimizer], # 'Adam', 'AdamW' or 'SGD', or torch's class
    **hypers: Any # Its arguments by torch's names, such as `betas`
) -> Callable[..., OptimWrapper]: # For `Learner(opt_func=...)`; can be pickled
    """Return torch's fused `optimizer` for fastai.

    One kernel updates all parameters, where fastai's own optimizers launch several for each. In fp16 it also skips
    steps on the device, without a GPU synchronization. fastai's schedules find the hyper-parameters by their names:
    `lr`, `mom`, `sqr_mom`, `wd`.

    It differs from fastai's `Adam` in two ways. The defaults are torch's: `fused('AdamW', betas=(.9, .99), eps=1e-5)`
    uses fastai's. Weight decay applies to all parameters, normalization layers and biases included.

    Raises `ValueError` for other optimizers, and `TypeError` for arguments that `optimizer` does not have or that are
    set already: `params`, `lr` and `fused`. On a device without the fused kernel PyTorch raises `RuntimeError` in the
    first step.

    Source: https://docs.pytorch.org/docs/stable/optim.html
    """
    cls = FUSED.get(str(optimizer), optimizer)
    if cls not in FUSED.values():
        raise ValueError(f"optimizer={optimizer!r} cannot be used: fused supports {', '.join(FUSED)} or torch's class "
                         "of that name, such as torch.optim.AdamW.\nfastai's Adam decays weights as torch's AdamW "
                         'does. Pass other optimizers to `Learner(opt_func=...)` directly.')
    inspect.signature(cls).bind_partial(None, None, fused=True, **hypers)   # `params` and `lr`, which fastai gives
    return partial(OptimWrapper, opt=partial(cls, fused=True, **hypers))


def kahan(
    optimizer: str | type[torch.optim.Optimizer] = 'AdamW', # A class of optimi, or its name
    **hypers: Any # Its arguments
) -> Callable[..., OptimWrapper]: # For `Learner(opt_func=...)`
    """Return an optimizer with Kahan summation that fastai can schedule, for `to_bf16(master_weights=False)`.

    Needs the package torch-optimi 0.3. Its Triton kernels are used on GPUs only.

    Raises `ValueError` for other names, `TypeError` for other classes, for `lr` and for arguments that the class does
    not have, and `ImportError` without torch-optimi.

    Source: https://optimi.benjaminwarner.dev/kahan_summation.
    """
    try: import optimi
    except ImportError as e: raise ImportError("kahan needs optimi: `pip install torch-optimi`.") from e
    cls: Any = getattr(optimi, optimizer, None) if isinstance(optimizer, str) else optimizer
    if not isinstance(cls, type):                                # optimi also has functions, such as `adamw`
        raise ValueError(f"optimizer={optimizer!r} is not one of optimi's optimizers, such as 'AdamW'; see "
                         'https://optimi.benjaminwarner.dev/optimizers.')
    # optimi looks at the parameters that have gradients in the first step: without any it uses Triton
    triton = None if torch.cuda.is_available() or torch.xpu.is_available() else False
    hypers = {'kahan_sum': True, 'triton': triton, **hypers}
    inspect.signature(cls).bind_partial(None, None, **hypers)    # raises `TypeError`, also for torch's optimizers
    hp_map = {**pytorch_hp_map, 'beta1': 'mom', 'beta2': 'sqr_mom'}
    return partial(OptimWrapper, opt=partial(cls, **hypers), hp_map=hp_map)
