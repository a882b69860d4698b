"The history of optimizer steps: their loss scales, and which were skipped."
from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch

_READ_EVERY = 512  # steps between two reads


class StepHistory(list):
    "The loss scale of each attempted optimizer step, negative if it was skipped. `read` adds the newest."
    epoch_start = 0                                              # steps in the history when the epoch began

    def __init__(self): self.unread = list[torch.Tensor]()       # may be on the device

    def __getstate__(self) -> dict[str, Any]: return vars(self.read())

    def add(self,
        scale: torch.Tensor, # 0-dim; it does not change
        skipped: bool | torch.Tensor, # A flag, 0-dim: 1 if the step was skipped
    ) -> None:
        "Add a step. Synchronizes with an accelerator once in 512 steps."
        self.unread.append(scale if skipped is False else scale * (1 - 2 * skipped))
        if len(self.unread) == _READ_EVERY: self.read()

    def read(self) -> StepHistory: # Itself
        "Move pending entries to the host; this synchronizes with the device."
        if self.unread: self += torch.stack(self.unread).tolist()
        self.unread = []
        return self

    def skips(self, start: int = 0) -> Iterator[bool]:
        "Iterate over the steps from `start` on: whether each was skipped."
        return (scale < 0 for scale in islice(self.read(), start, None))
