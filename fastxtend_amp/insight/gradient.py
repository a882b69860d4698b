"""The distance by which a precision moves the mean gradient of a model, in standard errors of that gradient.

At fixed weights K = 6 batches are run forward and backward in fp32 and in the precision, with the same random draws:

    g_k    gradient of batch k in fp32
    h_k    gradient of batch k in the precision
    bias   |mean(h - g)|: what the precision adds to the mean gradient
    noise  rms(g - mean(g)) / sqrt(K): how uncertain the mean gradient is anyway, with K - 1 in the rms
    ratio  bias / noise

A ratio far below 1 is lost in the noise between batches; one far above 1 is the gradient of another loss.
"""
import math, time
from collections.abc import Sequence
from typing import Any

import torch
from fastai.learner import Learner

from ..precisions import Precision
from ..tensors import map_tensors
from .random_states import random_state, set_random_state
from .trace import BackwardOnly, running_copy

N_BATCHES = 6  # K


def _gradient(model):
    "Return the gradient of all parameters as one vector."
    def of(p): return torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
    return torch.cat([of(p).flatten() for p in model.parameters()])


def gradient_distance(
    learn: Learner, # Nothing in it changes
    batches: Sequence, # As a DataLoader gives them
    kind: type[Precision],
    keep: Sequence[str], # Modules kept in fp32
    scale: float, # The loss scale, for fp16
    until: float, # Time of `time.monotonic()` after which no further batch starts
) -> tuple[float, int]: # The ratio, nan if a gradient is not finite, and the number of batches
    """Run batches forward and backward in two copies of `learn`, with its callbacks, in fp32 and in `kind`.

    Raises `ValueError` if fewer than two batches were run or all are equal, and any error of the model.
    """
    g, h = BackwardOnly(_gradient), BackwardOnly(_gradient)
    mean: Any = 0.                                               # of g_k and h_k - g_k, by Welford's algorithm
    squares = 0.                                                 # of the distances of g_k from their mean
    with running_copy(learn, Precision, [], 1.) as fp32, running_copy(learn, kind, keep, scale) as low:
        scale = low.mixed_precision.scale or 1.                        # without loss scaling
        fp32.add_cb(g)
        low.add_cb(h)
        for n, batch in enumerate(batches[:N_BATCHES], 1):
            state = random_state()
            for copy in fp32, low:
                set_random_state(state)
                copy.one_batch(n - 1, map_tensors(torch.clone, batch))
            change = torch.stack([g.gradients, h.gradients / scale - g.gradients]) - mean
            mean += change / n
            squares += float(change[0].norm()) ** 2 * (1 - 1 / n)
            if time.monotonic() > until: break
    if n < 2 or not squares: raise ValueError('the noise between batches is unknown')
    return float(mean[1].norm()) / math.sqrt(squares / (n - 1) / n), n
