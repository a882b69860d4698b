"The batches that the report looks at: within a limit of memory, and fewer samples where a mode is emulated."
from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from fastai.learner import Learner
from fastai.torch_core import to_device

from ..compat import split_batch
from ..convert import map_tensors
from .batches import batch_bytes
from .statistics import tensors

__all__ = ['MAX_BYTES', 'draw_batches', 'first_samples', 'n_samples', 'not_finite_data']

MAX_BYTES = 512 * 2 ** 20  # of batches that are held

Batch = tuple[tuple, tuple]


def draw_batches(
    learn: Learner,
    dl: Any, # The DataLoader, as `own_dl` gives it
    n: int, # How many batches
) -> list[Batch]: # Inputs and targets of each, on the learner's device; fewer than `n` where 512 MB hold no more
    "The first batches of `dl` in plain tensors; a single one that is too large is cut to its first samples."
    found: list[Batch] = []
    left = MAX_BYTES
    for batch in islice(_split(learn, dl), n):
        size = batch_bytes(batch)
        if size > left and found: break
        if size > left: batch = first_samples(batch, max(1, n_samples(batch) * left // size))
        left -= size
        found.append(batch)
    if not found:
        raise ValueError("precision_report needs at least one batch, but the DataLoader gave none: hand it another as "
                         "dl=...")
    return found


def _split(learn, dl) -> Iterator[Batch]:
    plain = lambda t: t.as_subclass(torch.Tensor)                # as fastai's CastToTensor
    for b in dl:
        xb, yb = split_batch(learn, to_device(b, getattr(learn.dls, 'device', None) or 'cpu'))
        yield map_tensors(plain, xb), map_tensors(plain, yb)


def n_samples(batch: Batch) -> int:
    "The length of the first tensor that has one; 1 if there is none."
    return next((len(t) for t in tensors(batch, floating=False) if t.ndim), 1)


def first_samples(batch: Batch, n: int) -> Batch:
    "The first `n` samples of a batch; what is not as long as the batch stays whole."
    whole = n_samples(batch)
    return map_tensors(lambda t: t[:n].clone() if t.ndim and len(t) == whole and n < whole else t, batch)


def not_finite_data(xb: Any, yb: Any) -> str: # Such as 'the batch itself is not finite: 1 of 24 values of ...'
    "What in a batch is NaN or inf; '' if nothing is. -inf may be a mask."
    for what, part in (('an input', xb), ('a target', yb)):
        for t in tensors(part):
            bad = int((t.isnan() | (t == math.inf)).sum())
            if bad: return (f'the batch itself is not finite: {bad:,} of {t.numel():,} values of {what} of shape '
                            f'{tuple(t.shape)} are NaN or inf')
    return ''
