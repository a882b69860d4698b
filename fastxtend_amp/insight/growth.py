"Sizes of weights and loss at the start of a fit, to tell a run that diverges from a want of precision."
from __future__ import annotations

import math

import torch
from torch import nn

from .diagnosis import Growth

__all__ = ['Sizes']

class Sizes:
    """The norm of a model's weights now, and the loss of the first batch once it is set.

    On an accelerator both stay there as tensors until `growth` reads them.
    """
    def __init__(self, model: nn.Module):
        self.weights = _norm(model)
        self.loss: float | torch.Tensor | None = None

    def growth(self,
        model: nn.Module, # The same model now
        last_loss: float, # The last loss that was finite; nan if none is known
    ) -> Growth:
        "Return how they have changed since; this waits for the device."
        before, now = float(self.weights), float(_norm(model))
        first = self.loss.mean() if isinstance(self.loss, torch.Tensor) else self.loss
        if not math.isfinite(now): now = math.nan                # lost, which says nothing of how
        return Growth(now / before if before else math.nan, math.nan if first is None else float(first), last_loss)


def _norm(model: nn.Module) -> float | torch.Tensor:
    """Return the norm of this process's trainable weights, on their device; of NaN or inf where a weight is.

    A wrapper subclass, such as a quantized weight, is left out: it need not have an operator for its norm.
    """
    weights = [_local(p) for p in model.parameters() if p.requires_grad]
    dense = [_in_fp32(w.detach()) for w in weights if not _is_wrapper(w)]
    norms = [torch.linalg.vector_norm(w, dtype=torch.float32) for w in dense]
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms])) if norms else math.nan


def _is_wrapper(w: torch.Tensor) -> bool: return type(w).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _in_fp32(w: torch.Tensor) -> torch.Tensor:
    w = w.abs() if w.is_complex() else w
    return w.float() if w.dtype is torch.float64 else w


def _local(p): return p.to_local() if hasattr(p, 'to_local') else p
