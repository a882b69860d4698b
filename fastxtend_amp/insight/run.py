"A batch forward and backward outside the training loop, as the report and the diagnosis run it."
from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from fastai.callback.rnn import RNNCallback
from fastai.learner import Learner
from fastai.torch_core import is_listy
from fastcore.basics import noop
from torch import nn

from ..compat import in_fit, is_uninitialized, no_reentrant_checkpoints
from ..convert import HALF, to_fp32
from ..devices.sharded import is_sharded
from ..mode import AMPMode
from .statistics import all_finite, tensors

__all__ = ['Task', 'after_pred', 'check_model', 'local_statistics', 'plain_pass', 'refuse_in_fit', 'scalar']

LOWEST_SCALE = 2.**-12  # at which a backward pass is tried; below 1 it makes gradients smaller


def after_pred(learn: Learner) -> Callable[[Any], Any]:
    "What `learn`'s callbacks make of the model's output: RNNCallback passes the last of its first entry to the loss."
    if not any(isinstance(cb, RNNCallback) for cb in learn.cbs): return noop
    return lambda pred: pred[0][-1] if is_listy(pred[0]) else pred[0]


def check_model(
    model: nn.Module, # As it is on the learner
    method: str, # The learner's method that is to run it or copies of it
) -> None:
    "Raise a `ValueError` for sharded parameters and for those of lazy modules that are not built yet."
    if is_sharded(model):
        raise ValueError(f"{method} cannot work on a model whose parameters are sharded (FSDP).\n"
                         "Call it before `fully_shard`.")
    name = next((n for n, p in model.named_parameters() if is_uninitialized(p)), None)
    if name is not None:
        raise ValueError(f"{method} cannot work on a model with lazy modules: '{name}' is not built yet.\n"
                         "Run the model once before, as in `learn.model(*learn.dls.one_batch()[:1])`.")


def refuse_in_fit(
    learn: Learner, # The learner
    call: str, # The call that is refused
) -> None:
    "Raise a `RuntimeError` inside a fit of `learn`."
    if in_fit(learn):
        raise RuntimeError(f"{call} cannot run inside a fit of its learner. Call it before or after.")


class plain_pass:
    """A forward or backward pass outside the training loop, in fp32 or under autocast in `mode`.

    What was compiled in place runs as it was written: hooks would not fire inside a compiled graph.
    No generator, which after an interrupt would leave autocast at some later time.
    """
    def __init__(self,
        device_type: str,
        mode: AMPMode | None = None, # fp32 if None
    ):
        self.device_type, self.mode, self.stack = device_type, mode, ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(torch.autocast(self.device_type, enabled=False))
            stack.enter_context(torch.enable_grad())
            if hasattr(torch.compiler, 'set_stance'): stack.enter_context(torch.compiler.set_stance('force_eager'))
            stack.enter_context(no_reentrant_checkpoints())
            if self.mode is not None:                            # without the cache: it may hold another mode's casts
                stack.enter_context(torch.autocast(self.device_type, self.mode.dtype, cache_enabled=False))
            self.stack = stack.pop_all()

    def __exit__(self, *error) -> bool | None: return self.stack.__exit__(*error)


class local_statistics:
    "SyncBatchNorm computes with this process's own statistics inside: its ranks need not take part together."
    def __init__(self, model: nn.Module):
        layers = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm)]
        self.layers = [m for m in layers if 'forward' not in m.__dict__]
    def __enter__(self):
        for m in self.layers: m.forward = partial(_batch_norm, m)
    def __exit__(self, *args):
        for m in self.layers: m.__dict__.pop('forward', None)


def _batch_norm(m: nn.SyncBatchNorm, x: torch.Tensor) -> torch.Tensor:
    mean, var, training = m.running_mean, m.running_var, m.training or m.running_mean is None
    return nn.functional.batch_norm(x, mean, var, m.weight, m.bias, training, m.momentum or 0., m.eps)


class Outcome(NamedTuple):
    "What came of running a batch."
    loss_is_finite: bool
    scale: float # The first loss scale, from that asked for downwards, at which all gradients are finite; 0 if none is


class Task(NamedTuple):
    "A model and its loss, without a learner around them."
    model: nn.Module # Unwrapped
    loss_func: Callable
    after_pred: Callable[[Any], Any] = noop # What becomes of the model's output before the loss

    def device_type(self, xb: tuple) -> str:
        "The type of device that a batch is run on."
        return next((t.device.type for t in (*tensors(xb), *self.model.parameters())), 'cpu')

    def forward(self, xb: tuple, yb: tuple, mode: AMPMode | None = None) -> torch.Tensor | None:
        "The loss of a batch, in fp32 or under autocast in `mode`; None without targets."
        with plain_pass(self.device_type(xb), mode):
            pred = to_fp32(self.after_pred(self.model(*xb)))
            return scalar(self.loss_func(pred, *yb)) if yb else None

    def gradients(self, loss: torch.Tensor, **kwargs) -> list[tuple[nn.Parameter, torch.Tensor]]:
        "The parameters that `loss` depends on, with their gradients; `.grad` stays as it is."
        params = [p for p in self.model.parameters() if p.requires_grad]
        if not params or not loss.requires_grad: return []
        before, found = [p.grad for p in params], []
        for p in params: p.grad = None
        try:
            for p, grad in zip(params, torch.autograd.grad(loss, params, allow_unused=True, **kwargs)):
                g = p.grad if grad is None else grad             # left by a function that runs its own backward pass
                if g is not None: found.append((p, g.coalesce().values() if g.is_sparse else g))
        finally:
            for p, kept in zip(params, before): p.grad = kept
        return found

    def outcome(self,
        xb: tuple, # Inputs
        yb: tuple, # Targets
        mode: AMPMode,
        scale: float, # The loss scale to start from
        check: Callable[[], Any] = noop, # Called before each backward pass; may raise
    ) -> Outcome:
        "Whether loss and gradients of a batch are finite in `mode`; the loss scale backs off as it would in training."
        loss = self.forward(xb, yb, mode)
        if loss is None: return Outcome(True, scale)
        if not bool(loss.isfinite()): return Outcome(False, 0.)
        while scale >= LOWEST_SCALE:
            check()
            grads = self.gradients(loss * scale, retain_graph=True)
            if all(all_finite(g) for _, g in grads): return Outcome(True, scale)
            scale /= 4
        return Outcome(True, 0.)


def scalar(loss: torch.Tensor) -> torch.Tensor:
    "The loss in fp32, reduced if the loss function does not."
    return (loss.float() if loss.dtype in HALF else loss).mean()
