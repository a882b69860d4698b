"The first loss scale, found with the first training batch: `init_scale='auto'`."
from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .common import first_line, is_dtensor, random_state_kept
from .compat import has_static_graph
from .convert import without_repeats

__all__ = ['HIGHEST', 'ROOM', 'NoFirstScale', 'first_scale']

HIGHEST = 24   # exponent of the largest scale to begin with: 2^24
ROOM = 3       # gradients may become 2^3 times larger before the first step is skipped


class NoFirstScale(Exception): "The first batch cannot be tried on this model; the message says why."


class _Outcome(IntEnum):
    "Of a backward pass that is tried; the lowest of all processes counts."
    FAILED, NO_GRADIENT, OVERFLOW, FINITE = range(4)


def first_scale(
    loss: torch.Tensor, # The loss, fp32, on its graph; not scaled
    params: list[nn.Parameter], # What the optimizer steps on
    model: nn.Module, # The model, whose buffers a backward pass may change
) -> float | None: # A power of two from 1 to 2^24; None if the loss is not finite
    """The largest loss scale at which gradients 8 times as large as those of `loss` would still be finite.

    Tries up to five backward passes and waits for the device in each; hooks on tensors and modules run in them.
    `.grad`, the graph, buffers and random states are left as they were. Ranks of `DistributedDataParallel` make the
    same passes and agree on the smallest. Raises `NoFirstScale` where the graph cannot be walked twice or belongs to
    sharded parameters.
    """
    params = [p for p in params if p.requires_grad]
    if any(map(is_dtensor, params)): raise NoFirstScale('its parameters are spread over processes')
    parallel = next((m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel)), None)
    if parallel is not None and has_static_graph(parallel):      # which would reduce the gradients in the first pass
        raise NoFirstScale('DistributedDataParallel has static_graph=True')
    if parallel is None and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        raise NoFirstScale('several processes train without DistributedDataParallel, and must not differ')
    buffers = [(b, b.clone()) for b in (without_repeats(b.data) for b in model.buffers())]   # unseen by autograd
    with random_state_kept(loss.device, everything=True), torch.autograd.set_detect_anomaly(False):
        try: exponent = _largest(loss, params, parallel)
        finally:
            for b, before in buffers: b.copy_(before)
    return None if exponent is None else 2. ** exponent


def _largest(loss: torch.Tensor, params: list[nn.Parameter], parallel: Any) -> int | None:
    "The largest exponent, from 0 to `HIGHEST`, that leaves `ROOM`; 0 where none does; None if the loss is not finite."
    if _lowest(int(loss.isfinite().all()), loss, parallel) == 0: return None
    low, above = 0, HIGHEST + 1
    while above - low > 1:
        exponent = (low + above) // 2
        outcome, why = _tried(loss * 2. ** (exponent + ROOM), params)
        outcome = _lowest(outcome, loss, parallel)
        if outcome == _Outcome.FAILED: raise NoFirstScale(why or 'it failed in another process')
        if outcome == _Outcome.NO_GRADIENT: raise NoFirstScale("the loss reaches none of the optimizer's parameters")
        if outcome == _Outcome.FINITE: low = exponent
        else: above = exponent
    return low


def _tried(loss: torch.Tensor, params: list[nn.Parameter]) -> tuple[int, str]: # How a backward pass went; its error
    if not params: return _Outcome.NO_GRADIENT, ''
    try:
        grads = torch.autograd.grad(loss, params, torch.ones_like(loss), retain_graph=True, allow_unused=True)
        values = [g.coalesce().values() if g.is_sparse else g for g in grads if g is not None]
        if not values: return _Outcome.NO_GRADIENT, ''
        finite = all([bool(v.isfinite().all()) for v in values])
    except Exception as e: return _Outcome.FAILED, first_line(e)
    return _Outcome.FINITE if finite else _Outcome.OVERFLOW, ''


def _lowest(value: int, loss: torch.Tensor, parallel: Any) -> int:
    "The lowest `value` of all ranks, so that none of them goes another way: a backward pass may wait for the others'."
    if parallel is None: return value
    found = torch.tensor(value, device=loss.device)
    dist.all_reduce(found, dist.ReduceOp.MIN, parallel.process_group)
    return int(found)
