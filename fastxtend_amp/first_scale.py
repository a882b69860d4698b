"The first loss scale, found with the first training batch: `init_scale='auto'`."
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .common import first_line, is_dtensor, random_state_kept

__all__ = ['HIGHEST', 'ROOM', 'NoFirstScale', 'first_scale']

HIGHEST = 24   # exponent of the largest scale to begin with: 2^24
ROOM = 3       # gradients may become 2^3 times larger before the first step is skipped


class NoFirstScale(Exception): "The first batch cannot be tried on this model; the message says why."


def first_scale(
    loss: torch.Tensor, # The loss, fp32, on its graph; not scaled
    params: list[nn.Parameter], # What the optimizer steps on
    model: nn.Module, # The model, whose buffers a backward pass may change
) -> float | None: # A power of two from 1 to 2^24; None if the loss is not finite or reaches no parameter
    """The largest loss scale at which gradients 8 times as large as those of `loss` would still be finite.

    Tries up to five backward passes and waits for the device in each. `.grad`, the graph, buffers and random states are
    left as they were; ranks of `DistributedDataParallel` agree on the smallest. Raises `NoFirstScale` where the graph
    cannot be walked twice or belongs to sharded parameters.
    """
    params = [p for p in params if p.requires_grad]
    if any(map(is_dtensor, params)): raise NoFirstScale('its parameters are spread over processes')
    buffers = [(b, b.clone()) for b in model.buffers()]
    with random_state_kept(loss.device):
        try: exponent = _largest(loss, params)
        except RuntimeError as e: raise NoFirstScale(first_line(e)) from e
        finally:
            for b, before in buffers: b.data.copy_(before)       # autograd, which may have saved it, sees no change
    if isinstance(model, nn.parallel.DistributedDataParallel):
        exponent = _smallest(exponent, loss.device, model.process_group)
    return None if exponent is None else 2. ** exponent


def _largest(loss: torch.Tensor, params: list[nn.Parameter]) -> int | None:
    "The largest exponent, from 0 to `HIGHEST`, that leaves `ROOM`; 0 where none does; None where there is no gradient."
    if not loss.isfinite().all(): return None
    low, above = 0, HIGHEST + 1
    while above - low > 1:
        exponent = (low + above) // 2
        grads = torch.autograd.grad(loss * 2. ** (exponent + ROOM), params, torch.ones_like(loss), retain_graph=True,
                                    allow_unused=True)
        if not (found := [g for g in grads if g is not None]): return None
        if all(bool(ok) for ok in [_values(g).isfinite().all() for g in found]): low = exponent
        else: above = exponent
    return low


def _values(grad: torch.Tensor) -> torch.Tensor: return grad.coalesce().values() if grad.is_sparse else grad


def _smallest(exponent: int | None, device: torch.device, group: Any) -> int | None:
    "The smallest of all ranks' exponents; None if a rank has none."
    found = torch.tensor(-1 if exponent is None else exponent, device=device)
    dist.all_reduce(found, dist.ReduceOp.MIN, group)
    return None if found < 0 else int(found)
