"""Optimizers for `Learner(opt_func=...)`: torch's fused ones, and those with Kahan summation for bf16 weights.

At the end: which optimizers skip a step on the device.
"""
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fastai.optimizer import OptimWrapper, pytorch_hp_map
from torch import nn

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
    cls = FUSED.get(str(optimizer), optimizer)
    if cls not in FUSED.values():
        raise ValueError(f"optimizer={optimizer!r} cannot be used: fused supports {', '.join(FUSED)} or torch's class "
                         "of that name, such as torch.optim.AdamW.\nfastai's Adam decays weights as torch's AdamW "
                         'does. Give other optimizers to `Learner(opt_func=...)` itself.')
    if not hypers.pop('fused', True):
        raise ValueError('fused=False cannot be used: `fused` always returns a fused optimizer.')
    inspect.signature(cls).bind_partial(None, None, fused=True, **hypers)   # `params` and `lr`, which fastai gives
    return partial(OptimWrapper, opt=partial(cls, fused=True, **hypers))


def kahan(
    opt: str | type[torch.optim.Optimizer] = 'AdamW', # The name of one of optimi's optimizers, or its class
    **kwargs # Its arguments
) -> Callable[..., OptimWrapper]: # For `Learner(opt_func=...)`
    """Return an optimizer with Kahan summation that fastai can schedule, for `to_half_weights(master_weights=False)`.

    Needs the package torch-optimi 0.3. Its Triton kernels are used on GPUs only.

    Raises `ValueError` for other optimizers, `TypeError` for arguments that `opt` does not have, and `ImportError`
    without torch-optimi.

    Source: https://optimi.benjaminwarner.dev/kahan_summation.
    """
    try: import optimi
    except ImportError as e: raise ImportError("kahan needs optimi: `pip install torch-optimi`.") from e
    cls: Any = getattr(optimi, opt, None) if isinstance(opt, str) else opt
    if not (isinstance(cls, type) and cls.__module__.startswith('optimi.')):
        raise ValueError(f"opt={opt!r} is not one of optimi's optimizers. Use one of those at "
                         "https://optimi.benjaminwarner.dev/optimizers, such as 'AdamW'.")
    inspect.signature(cls).bind_partial(None, **kwargs)          # raises `TypeError` for other arguments
    # optimi looks at the parameters that have gradients in the first step: without any it uses Triton
    triton = None if torch.cuda.is_available() or torch.xpu.is_available() else False
    hp_map = {**pytorch_hp_map, 'beta1': 'mom', 'beta2': 'sqr_mom'}
    kwargs = {'kahan_sum': True, 'triton': triton, **kwargs}
    return partial(OptimWrapper, opt=partial(cls, **kwargs), hp_map=hp_map)


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
    if type(opt) not in FUSED.values() or not getattr(opt, '_step_supports_amp_scaling', False): return None
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
