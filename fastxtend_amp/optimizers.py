"`fused`, torch's fused optimizers as an `opt_func` for fastai; the place of an optimizer's state."
from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fastai.optimizer import Lookahead, OptimWrapper
from fastcore.foundation import L

from .common import first_line
from .compat import syncfree_state, tree_leaves
from .convert import map_tensors

__all__ = ['fused', 'place_state']

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
_OURS = ('params', 'lr', 'fused', 'foreach', 'differentiable')   # set by fastai, by `fused`, or at odds with it


def fused(
    optimizer: type[torch.optim.Optimizer], # `torch.optim.Adam`, `torch.optim.AdamW` or `torch.optim.SGD`
    **hypers: Any # Its arguments by torch's names, such as `betas`, `eps`, `momentum`, `weight_decay`
) -> Callable[..., OptimWrapper]: # For `Learner(opt_func=...)`; can be pickled
    """torch's fused `optimizer` for fastai: `Learner(..., opt_func=fused(torch.optim.AdamW))`.

    One kernel updates all parameters, where fastai's own optimizers launch several for each. In fp16 it also skips
    steps on the device, without a GPU synchronization. fastai's schedules find the hyper-parameters by their names:
    `lr`, `mom`, `sqr_mom`, `wd`.

    It differs from fastai's `Adam` in two ways. The defaults are torch's: `fused(torch.optim.AdamW, betas=(.9, .99),
    eps=1e-5)` has fastai's. Weight decay applies to all parameters, normalization layers and biases included.

    Raises `ValueError` for other optimizers and for arguments that fastai sets; `TypeError` for arguments that
    `optimizer` does not have. Building the optimizer, or its first step if the model has moved since, raises
    `RuntimeError` where the device has no fused kernel.

    Source: https://docs.pytorch.org/docs/stable/optim.html
    """
    if not any(optimizer is known for known in FUSED):
        names = ', '.join(f'torch.optim.{known.__name__}' for known in FUSED)
        raise ValueError(f'fused({_name(optimizer)}) is not possible.\n'
                         f"Allowed: {names}; fastai's Adam decays weights as torch's AdamW does.\n"
                         'Hand any other optimizer to `Learner(opt_func=...)` itself.')
    for name in _OURS:
        if name in hypers:
            where = 'Give the learning rate to `Learner` or `fit`.' if name == 'lr' else 'Leave it out.'
            raise ValueError(f'fused({optimizer.__name__}, {name}={hypers[name]!r}): '
                             f'this argument cannot be set here. {where}')
    known = [name for name in inspect.signature(optimizer).parameters if name not in _OURS]
    for name in hypers:
        if name not in known:
            raise TypeError(f'fused({optimizer.__name__}, {name}={hypers[name]!r}): there is no such argument.\n'
                            f"Allowed: {', '.join(known)} (torch's names).")
    return partial(OptimWrapper, opt=_Fused(optimizer, hypers))


def _name(optimizer: Any) -> str:
    if hasattr(optimizer, '__qualname__'): return f'{optimizer.__module__}.{optimizer.__qualname__}'
    if isinstance(optimizer, torch.optim.Optimizer): return f'an instance of {_name(type(optimizer))}'
    return repr(optimizer)[:80]


class _Fused:
    """Builds `optimizer(params, fused=True)`; raises a `RuntimeError` where the device of `params` has no fused kernel.

    In a pickle it is a `partial` of torch's optimizer, so that an exported learner loads without this package.
    """
    def __init__(self, optimizer: Any, hypers: dict[str, Any]): self.optimizer, self.hypers = optimizer, hypers

    def __call__(self, params: Any, **kwargs: Any) -> torch.optim.Optimizer:
        opt = self.optimizer(params, fused=True, **{**self.hypers, **kwargs})
        _check_devices(opt)
        def check_once(opt, args, kwargs): # fastai moves the model when the optimizer is there already
            handle.remove()
            _check_devices(opt)
        handle = opt.register_step_pre_hook(check_once)
        return opt

    def __reduce__(self) -> Any: return partial(self.optimizer, fused=True, **self.hypers).__reduce__()


def _check_devices(opt: torch.optim.Optimizer) -> None:
    for device in {p.device for group in opt.param_groups for p in group['params']}:
        why = _trouble(type(opt), device)
        if why is None: continue
        name = type(opt).__name__
        raise RuntimeError(f"torch's fused {name} does not run on device '{device}'.\nPyTorch says: {why}.\n"
                           f'Use `opt_func=partial(OptimWrapper, opt=torch.optim.{name})` there.')


def _trouble(optimizer: Any, device: torch.device) -> str | None:
    "What PyTorch says to a fused step on one number on `device`; None if that works."
    try:
        p = torch.zeros(1, device=device, requires_grad=True)
        p.grad = torch.zeros(1, device=device)
        optimizer([p], lr=0., fused=True).step()
    except RuntimeError as e: return first_line(e)
    return None


def place_state(
    opt: Any, # fastai's `Optimizer`, `OptimWrapper` or `Lookahead`
) -> None:
    """Move what `opt` remembers to where its parameters are; step counts go where the optimizer wants them.

    A loaded state is where the file was read to, and fastai moves the model to its device when a fit starts.
    """
    inner = opt
    while hasattr(inner, 'opt'): inner = inner.opt
    groups = inner.param_groups if isinstance(inner, torch.optim.Optimizer) else []
    on_host = {p for g in groups if not (g.get('capturable') or g.get('fused')) for p in g['params']}
    for p, state in getattr(inner, 'state', {}).items():
        if not isinstance(p, torch.Tensor): continue
        def elsewhere(t): return isinstance(t, torch.Tensor) and t.device != p.device and (t.dim() or not p.dim())
        if not any(elsewhere(t) for key, value in state.items() if key != 'step' for t in tree_leaves(value)): continue
        for key, value in state.items():
            host = key == 'step' and p in on_host and not syncfree_state(inner, state)
            state[key] = map_tensors(partial(torch.Tensor.to, device='cpu' if host else p.device), value)
    if isinstance(opt, Lookahead) and opt.slow_weights is not None:
        pairs = zip(opt.slow_weights, opt.param_lists)
        opt.slow_weights = L(L(w.to(p.device) for w, p in zip(ws, ps)) for ws, ps in pairs)
