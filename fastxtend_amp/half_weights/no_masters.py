"Training without fp32 masters: the weights themselves, and the optimizer's state for them, in bf16."
from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from ..convert import is_half
from .modules import weights_to_lower
from .optimizers import compensates, optimizer_name, state_of

__all__ = ['LoweredWeights']

WATCHED = 8                                                      # steps in which lost updates are counted


class LoweredWeights:
    """The weights that autocast would cast, in bf16 themselves while a model is trained.

    bf16 numbers are fp32 numbers, so raising them for a validation and lowering them again changes nothing.
    """
    def __init__(self,
        model: nn.Module, # The model
        opt: Any, # fastai's `Optimizer` or `OptimWrapper`
        device_type: str, # Type of the device that autocast is on for
        dtype: torch.dtype, # autocast's dtype
    ):
        self.params, self.dtype, self.opt = weights_to_lower(model, device_type, dtype), dtype, opt
        self.low = False
        self.store: Any = None                                   # the dictionary of states that was lowered last
        self.to_watch = 0 if compensates(opt) else WATCHED        # steps whose lost updates are still to be counted
        self.before: list[tuple] = []                            # weight, its values, where its gradient is not 0
        self.counts: list[torch.Tensor] = []  # on the device: weights that have a gradient, and did not move

    def lower(self) -> None:
        "Bring trained weights to bf16, and their state, which may have come from training in fp32 or from a file."
        if self.low and state_of(self.opt) is self.store: return
        self.low = True
        for p in self.params:
            if p.requires_grad: self._bring(p, self.dtype)
        self.store = state_of(self.opt)

    def raise_(self) -> None:
        "Bring them back to fp32; may be interrupted and called again."
        for p in self.params: self._bring(p, torch.float32)
        self.low, self.store = False, None

    def _bring(self, p, dtype):
        if p.dtype is not dtype:
            grad, p.grad = p.grad, None
            p.data = p.data.to(dtype)
            if grad is not None: p.grad = grad.to(dtype)
        state = state_of(self.opt).get(p, {})
        comp = state.get('kahan_comp', p)  # optimi's, which has none for a weight that it met in fp32
        if dtype is self.dtype and (comp is None or comp.shape != p.shape):
            state['kahan_comp'] = torch.zeros_like(p, requires_grad=False)
        for k, v in state.items():                               # step counts and quantized states stay as they are
            if type(v) is not torch.Tensor or v.shape != p.shape or not v.dim(): continue
            if is_half(v) or v.dtype is torch.float32: state[k] = v.to(dtype)

    # -- does anything move?

    def before_step(self) -> None:
        "Remember the weights that have a gradient."
        if not self.to_watch: return
        low = [p for p in self.params if p.dtype is self.dtype and p.grad is not None]
        self.before = [(p, p.detach().clone(), p.grad != 0) for p in low]

    def after_step(self) -> None:
        "Count those that did not move."
        before, self.before = self.before, []
        if not before: return
        for p, old, had in before: self.counts.append(torch.stack([had.sum(), (had & (p.detach() == old)).sum()]))
        self.to_watch -= 1
        if not self.to_watch: self.warn()

    def warn(self) -> None:
        "After the first steps: tell which share of the weights they left where they were; waits for the device, once."
        n, counts, self.to_watch, self.counts = WATCHED - self.to_watch, self.counts, 0, []
        if not counts: return
        total, unmoved = torch.stack([c.to(counts[0].device) for c in counts]).sum(0).tolist()
        warnings.warn(f"master_weights=False with {optimizer_name(self.opt)}, which does not compensate for rounding: "
                      f"small updates are lost. In the first {n} steps {unmoved / max(total, 1):.0%} of the weights "
                      "with a gradient did not move. Use an optimizer with Kahan summation (`fastxtend_amp.kahan`) or "
                      "stochastic rounding, or keep the masters.")
