"The mean gradient of several batches in a precision, compared with that in fp32."
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from fastai.learner import Learner

from ..messages import first_line
from ..precisions import Precision
from .batches import BackwardOnly, run_batch, running_copy
from .random_states import random_state, set_random_state
from .values import all_finite

N_BATCHES = 6  # K, batches whose gradients are compared


@dataclass
class GradientDistance:
    "The distance by which a precision moves the mean gradient."
    ratio: float = math.inf                                      # inf if a gradient is finite only in fp32
    n: int = 0                                                   # batches whose gradients are finite in both
    only_in_fp32: list = field(default_factory=list)             # batches whose gradients are finite only in fp32
    losses: list[float] = field(default_factory=list)            # in fp32
    unknown: str = ''                                            # why there is no ratio
    raised: str = ''                                             # the error of the precision, if there is one


def _gradient(model):
    "Return the gradient of all trainable parameters as one vector."
    def grad(p): return torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
    return torch.cat([grad(p).flatten() for p in model.parameters() if p.requires_grad])


def gradient_distance(
    learn: Learner, # Nothing in it changes
    batches: Iterable, # As a DataLoader gives them
    precision: Precision,
) -> GradientDistance:
    """Measure by how many standard errors of the mean gradient a precision moves it, at fixed weights.

    K batches run forward and backward in two copies of `learn`, with its callbacks and the same random draws:

        g_k    gradient of batch k in fp32
        h_k    gradient of batch k in the precision
        shift  |mean(h - g)|: what rounding adds to the mean gradient, its random part included
        noise  rms(g - mean(g)) / sqrt(K): how uncertain the mean gradient is anyway, with K - 1 in the rms
        ratio  shift / noise

    A ratio far below 1 is lost in the noise between batches; one far above 1 is the gradient of another loss. Rounding
    that is only random makes the error of the mean gradient sqrt(1 + ratio**2) times as large.

    Raises `ValueError` if fewer than two batches give a gradient or all are equal, or if the model draws other random
    numbers in the precision, and any error of the model.
    """
    distance, start = GradientDistance(), random_state()
    g = BackwardOnly(_gradient, lambda loss: distance.losses.append(float(loss.detach())))
    h = BackwardOnly(_gradient)
    mean: Any = 0.                                               # of g_k and h_k - g_k, by Welford's algorithm
    squares = 0.                                                 # of the distances of g_k from their mean
    with running_copy(learn, Precision()) as reference:
        set_random_state(start)                                  # callbacks may draw weights when a fit begins
        with running_copy(learn, precision) as low:
            scale = low.mixed_precision.scale or 1.              # without loss scaling
            reference.add_cb(g)
            low.add_cb(h)
            for i, batch in enumerate(batches):
                state = random_state()
                g.gradients = h.gradients = None                 # a callback may cancel the batch
                run_batch(reference, i, batch)
                drawn = torch.get_rng_state()
                set_random_state(state)
                try: run_batch(low, i, batch)
                except torch.OutOfMemoryError: raise
                except Exception as e:                           # a recording has run this operator in fp32
                    distance.raised = first_line(e)
                    distance.only_in_fp32.append(batch)
                    return distance
                if not torch.equal(torch.get_rng_state(), drawn):        # CPUs do, for noise in 16 bits
                    raise ValueError('the model draws other random numbers in 16 bits than in fp32')
                if g.gradients is None or h.gradients is None or not all_finite(g.gradients): continue
                if not all_finite(h.gradients):
                    distance.only_in_fp32.append(batch)
                    continue
                distance.n += 1
                change = torch.stack([g.gradients, h.gradients / scale - g.gradients]) - mean
                mean += change / distance.n
                squares += float(change[0].norm()) ** 2 * (1 - 1 / distance.n)
    if distance.only_in_fp32: return distance
    if not squares: raise ValueError('fewer than two different gradients were found')
    noise = math.sqrt(squares / (distance.n - 1) / distance.n)
    distance.ratio = float(mean[1].norm()) / noise
    return distance
