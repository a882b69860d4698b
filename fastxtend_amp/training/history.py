"The history of optimizer steps: their loss scales, which were skipped, and the scale of the next."
from __future__ import annotations

from itertools import islice, takewhile
from typing import Any

import torch

_READ_EVERY = 512  # steps between two reads


class StepHistory:
    """The loss scale of each attempted optimizer step, whether it was skipped, and the scale of the next one.

    The device may decide what is skipped, and the host knows what it has read. Every method reads, but `add` only
    once in 512 steps.
    """
    fit_start = epoch_start = 0                                  # steps before the newest fit, and before its epoch
    highest_good = 0.                                            # scale of a step of the fit that was not skipped
    next_scale: Any = None                                       # a tensor, 0-dim, which does not change
    known_scale: float                                           # the newest one that the host knows

    def __init__(self):
        self.scales, self.skips = list[float](), list[bool]()    # of the steps that were read
        self.unread = list[tuple[torch.Tensor, Any]]()           # the same of later ones, maybe on the device

    def __getstate__(self) -> dict[str, Any]: return {**vars(self.read()), 'next_scale': None}

    def begin_fit(self,
        next_scale: torch.Tensor, # Of the first step
        known_scale: float, # The same on the host
    ) -> None:
        "Forget the good scales of earlier fits, and start from this scale."
        self.fit_start, self.highest_good = len(self.read().scales), 0.
        self.next_scale, self.known_scale = next_scale, known_scale

    def add(self,
        skipped: bool | torch.Tensor, # A flag, 0-dim: 1 if the step was skipped
        next_scale: torch.Tensor, # Of the step after this one
    ) -> None:
        "Add a step. Synchronizes with an accelerator once in 512 steps."
        self.unread.append((self.next_scale, skipped))
        self.next_scale = next_scale
        if len(self.unread) == _READ_EVERY: self.read()

    def read(self) -> StepHistory: # Itself
        "Move what is unread to the host; this synchronizes with the device, once."
        if self.unread:
            # One tensor to read: minus means skipped.
            signed = [scale if skipped is False else scale * (1 - 2 * skipped) for scale, skipped in self.unread]
            *signed, self.known_scale = torch.stack([*signed, self.next_scale]).tolist()
            self.scales += map(abs, signed)
            self.skips += (scale < 0 for scale in signed)
            self.highest_good = max(self.highest_good, *signed)
            self.unread = []
        return self

    def skips_in_a_row(self) -> int:
        "Return how many of the fit's newest steps were skipped."
        skips = self.read().skips
        return sum(takewhile(bool, islice(reversed(skips), len(skips) - self.fit_start)))

    def forget_fit(self) -> None:
        "Remove the steps of the fit."
        del self.read().scales[self.fit_start:], self.skips[self.fit_start:]
