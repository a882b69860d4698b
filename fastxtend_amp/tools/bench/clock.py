"Gives out batches and times the steps of training on them."
from __future__ import annotations

import math, time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

__all__ = ['Clock', 'page_faults']


def page_faults() -> float: # Minor page faults of this process; not a number on Windows
    "How many pages of memory the system has handed to this process so far."
    try: import resource
    except ImportError: return math.nan
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Clock:
    """A data loader that gives out `warm` and `n` batches and times the steps on the last `n`.

    It notes the time at each batch, before and after each backward pass, and at the end. All contestants draw their
    batches from one clock, so that the same part of a step is timed in each. CUDA is timed with events.
    """
    def __init__(self,
        device: torch.device,
        batches: list[tuple], # Given out in turn
    ):
        self.device, self.data = device, batches
        self.n, self.warm = 0, 0
        self.marks: list[Any] = []         # seconds, or CUDA events
        self.faults = math.nan             # page faults per step

    def __len__(self) -> int: return self.warm + self.n
    def to(self, device: torch.device) -> Clock: return self

    def mark(self) -> None:
        "Note the time."
        if self.device.type == 'cuda':
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else: self.marks.append(time.perf_counter())

    def __iter__(self) -> Iterator[tuple]:
        for i in range(self.warm + self.n):
            if i <= self.warm: self.marks, faults = [], page_faults()
            self.mark()
            yield self.data[i % len(self.data)]
        self.mark()
        self.faults = (page_faults() - faults) / self.n

    def backward(self, f: Callable[[], Any]) -> None:
        "Run `f`, the backward pass."
        self.mark()
        f()
        self.mark()

    def steps(self) -> np.ndarray: # Shape (n, 3): whole step, forward, backward
        "Milliseconds of each timed step."
        if self.device.type == 'cuda':
            torch.cuda.synchronize(self.device)
            between = lambda a, b: a.elapsed_time(b)
        else: between = lambda a, b: (b - a) * 1000
        m = self.marks
        return np.array([(between(m[i], m[i + 3]), between(m[i], m[i + 1]), between(m[i + 1], m[i + 2]))
                         for i in range(0, len(m) - 1, 3)])

    def times(self) -> np.ndarray: # Whole step, forward, backward
        "Milliseconds per step, the mean."
        return self.steps().mean(0)
