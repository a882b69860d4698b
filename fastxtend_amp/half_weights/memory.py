"How many bytes training holds for each parameter."
from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from fastai.learner import Learner

from ..callback import MixedPrecision
from ..common import random_state_kept
from ..compat import CastWatch
from ..fp32_modules import unwrapped
from .callback import HalfWeights
from .optimizers import state_of

__all__ = ['bytes_per_parameter']


def bytes_per_parameter(
    learn: Learner, # A learner in the middle of a fit, with gradients
) -> dict[str, float]: # weights, gradients, optimizer state, casts; bytes for each of the model's numbers
    """What training holds for each parameter, counted from the tensors there are; to be called before or after a step.

    Casts to half precision, autocast's or the copies that stand for them, live as long as a batch, or, with gradient
    accumulation, the copies as long as a step: the model runs forward once more on the batch at hand for their size.
    """
    cb: Any = learn.precision
    forwards = cb._copies.forwards if isinstance(cb, HalfWeights) and cb._copies is not None else []
    copied = {id(c.master): c.master for f in forwards if f.seen and not f.barred for c in f.all}
    params = [*learn.model.parameters()]
    state = [v for s in state_of(learn.opt).values() for v in s.values() if isinstance(v, torch.Tensor)]
    n = sum(p.numel() for p in params)
    def size(tensors):
        storages = {(t.device, t.untyped_storage().data_ptr()): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values()) / n
    copies = sum(p.numel() for p in copied.values()) * torch.float16.itemsize
    return {'weights': size(params), 'gradients': size([p.grad for p in params if p.grad is not None]),
            'optimizer state': size(state), 'casts': (copies + _cast_cache(learn, cb, copied.keys())) / n}


def _cast_cache(learn: Learner, cb: MixedPrecision | None, copied: Collection[int]) -> int:
    "Bytes of the weights' casts that are left after a forward pass, which autocast's cache alone can hold."
    if cb is None: return 0
    model = unwrapped(learn.model)
    clone = copy.deepcopy(model)  # no effect on buffers or on what else a model remembers
    cast = [q for p, q in zip(model.parameters(), clone.parameters()) if id(p) not in copied]
    with random_state_kept(cb.fit_device), cb.context(), CastWatch(cast) as casts:
        clone(*learn.xb)
        return casts.alive()
