"The batches that the report looks at: within a limit of memory, and fewer samples where a mode is emulated."
from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.torch_core import to_device
from fastcore.xtras import ReindexCollection

from ..compat import split_batch
from ..convert import map_tensors
from .statistics import tensors

__all__ = ['MAX_BYTES', 'data_unchanged', 'draw_batches', 'first_samples', 'n_samples', 'not_finite_data']

MAX_BYTES = 512 * 2 ** 20  # of batches that are held

Batch = tuple[tuple, tuple]


def draw_batches(
    learn: Learner,
    dl: Any, # The DataLoader
    n: int, # How many batches
) -> list[Batch]: # Inputs and targets of each, on the learner's device; fewer than `n` where 512 MB hold no more
    "The first batches of `dl` in plain tensors; a single one that is too large is cut to its first samples."
    if type(dl).__name__ == 'DistributedDL': dl = dl.dl          # which waits for all processes when it starts
    found: list[Batch] = []
    left = MAX_BYTES
    for batch in islice(_split(learn, dl), n):
        size = _bytes(batch)
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


def _bytes(batch): return sum(t.numel() * t.element_size() for t in tensors(batch, floating=False))


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


@contextmanager
def data_unchanged(*dls: Any) -> Iterator[None]:
    "Drawing batches moves the generators of fastai's DataLoaders and shuffles what they hold: put that back."
    found = [(dl, dict(vars(dl)), dl.rng.getstate()) for dl in dls if isinstance(dl, DataLoader) and hasattr(dl, 'rng')]
    shuffled = [o for _, attributes, _ in found for o in attributes.values() if isinstance(o, ReindexCollection)]
    orders = [(o.idxs, list(o.idxs)) for o in shuffled]
    try: yield
    finally:
        for dl, attributes, state in found:
            vars(dl).update(attributes)
            dl.rng.setstate(state)
        for idxs, order in orders:
            for i, value in enumerate(order): idxs[i] = value
