"Sizes of weights and loss at the start of a fit, to tell a run that diverges from a want of precision."
from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from ..compat import host_norm
from .diagnosis import Growth

__all__ = ['Sizes']

# Times the norm of the weights and the loss at the start, from which on a run counts as diverging.
_FAR = 100.         # one of them alone
_BOTH = 10.
_MOVED = 1.01       # below this the weights hardly grew


class Sizes:
    """The norm of a model's weights now, and the loss of the first batch once it is set.

    In main memory the norm is read in place, without an operator; on an accelerator both stay there as tensors until
    `growth` reads them.
    """
    def __init__(self, model: nn.Module):
        self.weights = _norm(model)
        self.loss: float | torch.Tensor | None = None

    def growth(self,
        model: nn.Module, # The same model now
        last_loss: float, # The last loss that was finite; nan if none is known
    ) -> Growth:
        "What has become of them; this waits for the device."
        before, now = float(self.weights), float(_norm(model))
        first = self.loss.mean() if isinstance(self.loss, torch.Tensor) else self.loss
        if not math.isfinite(now): now = math.nan                # lost, which says nothing of how
        return Growth(now / before if before else math.nan, math.nan if first is None else float(first), last_loss)


def _short(x: float) -> str: return f'{x:,.0f}' if 100 <= abs(x) < 1e7 else f'{x:.3g}'


def _norm(model: nn.Module) -> float | torch.Tensor:
    "The norm of this process's trainable weights, on their device; of NaN or inf where a weight is."
    weights = [_local(p) for p in model.parameters() if p.requires_grad]
    in_place = [n for n in map(host_norm, weights) if n is not None]
    if len(in_place) == len(weights): return math.hypot(*in_place)
    norms = [torch.linalg.vector_norm(_in_fp32(w.detach()), dtype=torch.float32) for w in weights]
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))


def _in_fp32(w: torch.Tensor) -> torch.Tensor:
    w = w.abs() if w.is_complex() else w
    return w.float() if w.dtype is torch.float64 else w


def _local(p): return p.to_local() if hasattr(p, 'to_local') else p
