"""The recording of batches: hooks keep a stack of the running modules, and a dispatch mode sees each operator.

An operator belongs to the innermost running module, or to the loss function if none is running.
"""
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..compat import TorchDispatchMode, in_function_transform, without_modes
from ..precisions import Precision
from ..precisions.matching import qualified_names
from .display import BACKWARD, LOSS
from .observers import ModuleRecord
from .operations import Operation, RunningModule
from .values import all_finite, is_plain, readable


class Recording(TorchDispatchMode):
    """The record of some batches in one precision, each from its forward pass to its gradients.

    If an exception ends it, `failed_in` is where it was raised:

        ''                 before the first batch, such as in `before_fit`
        LOSS               in a batch, until there is a loss
        'callback `X`'     instead of LOSS, if fastai names a callback
        BACKWARD           after the loss
        name of a module   instead of LOSS or BACKWARD, if it left one: the innermost
        ROOT               in a validation without hooks
    """
    not_finite = ''                                              # 'loss'; 'gradient' if all losses are finite
    has_gradients = False                                        # whether a backward pass ended as in fastai's loop
    validates = False                                            # whether validation gives finite results
    raised = ''                                                  # text of the exception that ended it
    failed_in = ''                                               # see above

    def __init__(self,
        precision: Precision,
        reference: Any = None, # The recording in fp32; an empty recording needs none
    ):
        super().__init__()
        self.precision, self.reference = precision, reference
        # Modules in the order in which their last calls finish, then the loss function.
        self.modules = dict[str, ModuleRecord]()
        self.losses = list[float]()                              # of the batches that gave one
        self.predictions = list[torch.Tensor]()                  # in validation
        self.random_state = torch.get_rng_state()                # after the validation
        self.unreadable = dict[str, None]()                      # modules whose values could not be read

    @contextmanager
    def of_batch(self, model: nn.Module) -> Iterator[None]:
        "Record a batch of `model` in this context."
        self.stack = list[RunningModule]()                       # the loss function first
        self.in_backward, self.failed_in = False, LOSS
        with ExitStack() as stack:
            for name, m in qualified_names(model):
                if isinstance(m, torch.jit.ScriptModule): continue       # has no hooks from Python
                # Before all other hooks, whose operators then belong to the module.
                enter = m.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True, prepend=True)
                stack.enter_context(enter)
                stack.enter_context(m.register_forward_hook(self._leave, always_call=True))
            stack.enter_context(self)
            yield
        if self.stack: self.modules[LOSS] = self.modules.pop(LOSS)               # the last
        self.stack = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.in_backward or not self.stack: return func(*args, **kwargs)
        if in_function_transform():
            self.unreadable[self.stack[-1].record.name] = None
            return func(*args, **kwargs)
        op = Operation(func, args, kwargs)
        out = self.stack[-1].run(op)
        if op.traits.writes:
            for caller in self.stack[:-1]: caller.twins.forget(out)              # for them it counts as exact
        return out

    # -- the forward pass

    def _enter(self, name, module, args, kwargs):
        with without_modes():
            if not self.stack: self._push(LOSS, 'function')      # what runs between model and backward pass
            if in_function_transform(): self.unreadable[name] = None
            elif not self.in_backward:
                for t in readable((args, kwargs)): self.stack[-1].compare(t)
            self._push(name, type(module).__name__)

    def _push(self, name, class_name):
        reference = self.reference.modules.get(name, ModuleRecord(name, class_name))
        record = self.modules.setdefault(name, ModuleRecord(name, class_name, reference))
        self.stack.append(RunningModule(record, self.precision, sys.exc_info()[1]))

    def _leave(self, module, args, output):
        with without_modes():
            ended = self.stack.pop()
            name = ended.record.name
            # The innermost module that an exception leaves has raised it.
            is_failing = output is None and sys.exc_info()[1] is not ended.handled
            if is_failing and self.failed_in in (LOSS, BACKWARD): self.failed_in = name
            outputs = [] if in_function_transform() else readable(output)
            for out in outputs:
                # The gradient of a single number, as of the loss that a model returns, is the loss scale itself.
                if not out.requires_grad or out.numel() == 1: continue
                out.register_hook(partial(self._record_gradient, ended.record))
            if self.in_backward: return                          # a checkpoint; its first run was recorded
            self.modules[name] = self.modules.pop(name)          # after the modules inside
            for out in outputs: ended.compare(out)

    def record_loss(self, loss: torch.Tensor) -> None: # Not scaled yet
        "Record the loss. From here on no operator is recorded."
        self.in_backward, self.failed_in = True, BACKWARD
        self.losses.append(float(loss.detach().float().mean()))
        if not all_finite(loss): self.not_finite = 'loss'
        if self.stack: self.stack[0].compare(loss)

    # -- the backward pass

    def record_gradients(self, model: nn.Module) -> None:
        "Record the gradients of the parameters."
        self.has_gradients = True
        for name, m in qualified_names(model):
            for p in m.parameters(recurse=False):
                if p.grad is None or not is_plain(g := p.grad.to_dense()): continue
                if not all_finite(g): self.not_finite = self.not_finite or 'gradient'
                if name in self.modules: self._record_gradient(self.modules[name], g)

    def _record_gradient(self, record, g):
        "Record the gradient of an output or a parameter."
        if not self.in_backward: return                          # the model's own, such as forces from an energy
        g = g.detach().abs().float()
        if not all_finite(g): g = g[g.isfinite()]
        n = int(g.count_nonzero())
        record.n_zeros += g.numel() - n
        if not n: return
        record.grad = max(record.grad, float(g.max()))
        record.grad_sum += float(g.sum())
        record.n_grads += n
