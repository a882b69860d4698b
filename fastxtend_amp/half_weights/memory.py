"How many bytes training holds for each parameter."
from __future__ import annotations

import copy

import torch
from fastai.learner import Learner

from ..callback import MixedPrecision, precision_callback
from ..common import random_state_kept
from ..compat import CastWatch
from ..fp32_modules import unwrapped
from .optimizers import state_of

__all__ = ['bytes_per_parameter']


def bytes_per_parameter(
    learn: Learner, # A learner in the middle of a fit, with gradients
) -> dict[str, float]: # weights, gradients, optimizer state, casts; bytes for each of the model's numbers
    """What training holds for each parameter, counted from the tensors there are; to be called before or after a step.

    Casts to half precision live as long as a batch, or as several that share them: for their size the model runs
    forward once more on the batch at hand.
    """
    params, cb = [*learn.model.parameters()], precision_callback(learn)
    state = [v for s in state_of(learn.opt).values() for v in s.values() if isinstance(v, torch.Tensor)]
    n = sum(p.numel() for p in params)
    def size(tensors):
        storages = {(t.device, t.untyped_storage().data_ptr()): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values()) / n
    return {'weights': size(params), 'gradients': size([p.grad for p in params if p.grad is not None]),
            'optimizer state': size(state), 'casts': 0. if cb is None else _cast_cache(learn, cb) / n}


def _cast_cache(learn: Learner, cb: MixedPrecision) -> int:
    "Bytes of the weights' casts that are left after a forward pass, which autocast's cache alone can hold."
    model = copy.deepcopy(unwrapped(learn.model))  # no effect on buffers or on what else a model remembers
    with random_state_kept(cb.fit_device), cb.context(), CastWatch(model.parameters()) as casts:
        model(*learn.xb)
        return casts.alive()
