"The training batches of a comparison: drawn once, kept on the device, and the dataloader left as it was."
from __future__ import annotations

import random, time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from fastai.learner import Learner
from fastai.torch_core import to_device

from ..common import random_state_kept
from ..convert import map_tensors
from .statistics import tensors

__all__ = ['Batches', 'batch_bytes', 'order_kept', 'own_dl']

LIMIT = 2**29       # bytes of batches that are held; further steps take the same ones again


class Batches:
    """Some training batches of a learner, on its model's device.

    `seconds`: how long the dataloader takes for one, `copy_seconds` of that to bring it to the device (both medians).
    Raises `ValueError` for a dataloader without batches.
    """
    def __init__(self,
        learn: Learner, # Its `dls.train` is drawn from, and left as it was
        n: int, # How many batches are wanted
        device: torch.device, # Where they are put
        max_seconds: float, # Drawing ends after this long, with at least one batch
        wait: Callable[[], Any], # Waits for the device
    ):
        self.all: list[Any] = []
        self.device, self.bytes = device, 0
        dl = own_dl(learn.dls.train)
        times: list[float] = []
        with order_kept(dl), random_state_kept(everything=True):
            start = time.perf_counter()
            while len(self.all) < n:
                before = len(self.all)
                self._draw(dl, n, start + max_seconds, wait, times)
                if len(self.all) == before and not before:
                    raise ValueError("The learner's training dataloader (`learn.dls.train`) gives no batches, so there "
                                     "is nothing to train on.\n"
                                     "With `drop_last=True` its dataset may be smaller than one batch.")
                if len(self.all) == before or self._full or time.perf_counter() > start + max_seconds: break
        self.seconds = float(np.median(times[1:] or times))
        self.copy_seconds = self._copying(wait)

    def _draw(self, dl, n, end, wait, times):
        then = time.perf_counter()
        for b in dl:
            b = to_device(b, self.device)
            wait()
            times.append(time.perf_counter() - then)
            self.all.append(b)
            self.bytes += batch_bytes(b)
            if len(self.all) == n or self._full or time.perf_counter() > end: break
            then = time.perf_counter()

    @property
    def _full(self) -> bool:
        "Would another batch, with the copies that a turn works on, go beyond the limit?"
        return self.bytes * (1 + 1 / len(self.all)) * 1.125 > LIMIT

    def _copying(self, wait) -> float:
        if self.device.type == 'cpu': return 0.
        host = to_device(self.all[0], 'cpu')
        times = []
        for _ in range(3):
            start = time.perf_counter()
            to_device(host, self.device)
            wait()
            times.append(time.perf_counter() - start)
        return float(np.median(times))

    def __len__(self) -> int: return len(self.all)

    @property
    def size(self) -> int:
        "Samples in the first batch."
        return len(tensors(self.all[0], floating=False)[0])

    def get(self,
        i: int, # Number of the step
        n: int | None = None, # How many samples of the batch; all if None
    ) -> Any:
        "A copy of the batch for step `i`, since callbacks such as CutMix write into it."
        b = self.all[i % len(self.all)]
        return map_tensors(lambda t: (t if n is None else t[:n]).clone(), b)

    @property
    def can_be_cut(self) -> bool:
        "Do all tensors of a batch have the samples as their first dimension?"
        return all(t.dim() > 0 and len(t) == self.size for t in tensors(self.all[0], floating=False))


def own_dl(dl: Any) -> Any:
    "The DataLoader inside a `DistributedDL`, which waits for all processes when it starts; any other as it is."
    return dl.dl if type(dl).__name__ == 'DistributedDL' else dl


def batch_bytes(batch: Any) -> int:
    "What the tensors in a batch take."
    return sum(t.numel() * t.element_size() for t in tensors(batch, floating=False))


@contextmanager
def order_kept(
    dl: Any, # fastai's or PyTorch's DataLoader
) -> Iterator[None]:
    "Draw from `dl` inside; at the end it gives the batches that it would have given, in their order."
    undo: list[Callable[[], Any]] = []
    owners = [dl, *(getattr(dl, n, None) for n in ('sampler', 'batch_sampler') if n in getattr(dl, '__dict__', {}))]
    for owner in [o for o in owners if hasattr(o, '__dict__')]:
        content = dict(vars(owner))
        undo.append(partial(_reset, owner, content))
        for value in content.values(): undo += _order_of(value)
    try: yield
    finally:
        for f in undo: f()


def _reset(owner, content):
    vars(owner).clear()
    vars(owner).update(content)


def _order_of(value) -> list[Callable[[], Any]]:
    "What puts the order of the samples back, where `value`, an attribute of a dataloader, decides it."
    if isinstance(value, random.Random): return [partial(value.setstate, value.getstate())]
    if isinstance(value, torch.Generator): return [partial(value.set_state, value.get_state())]
    order: Any = vars(value).get('idxs') if hasattr(value, '__dict__') else None     # fastai's ReindexCollection
    return [partial(_refill, order, list(order))] if hasattr(order, '__setitem__') else []


def _refill(order, content):
    for i, value in enumerate(content): order[i] = value
