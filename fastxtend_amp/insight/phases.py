"Times of the parts of a training step: forward, backward, optimizer, the rest; and page faults."
from __future__ import annotations

import math, time
from itertools import pairwise
from typing import Any

import torch
from fastai.callback.core import Callback

__all__ = ['PHASES', 'StepClock', 'page_faults']

PHASES = ('forward', 'backward', 'optimizer')
_BEGINS = {'before_batch': 'forward', 'after_loss': '', 'before_backward': 'backward', 'after_backward': '',
           'before_step': 'optimizer', 'after_batch': ''}


class StepClock(Callback):
    """Times the phases of training steps on the learner that it is added to.

    The forward pass ends with the loss; the optimizer's phase holds unscaling, clipping, the step, the update of the
    loss scale and `zero_grad`. On CUDA and XPU events are recorded in the device's queue, so that nothing waits; on
    other accelerators nothing is measured.
    """
    order = -1000                                                # before all others
    def __init__(self, device: torch.device):
        is_gpu, self.on = device.type in ('cuda', 'xpu'), device.type in ('cpu', 'cuda', 'xpu')
        self.event: Any = torch.get_device_module(device.type).Event if is_gpu else None
        self.marks, self.sums, self.seconds, self.n = list[tuple[str, Any]](), dict.fromkeys(PHASES, 0.), 0., 0

    def __call__(self, event_name: str) -> None:
        "Note the time at which a phase begins."
        if not self.on or event_name not in _BEGINS: return
        now: Any = self.event(enable_timing=True) if self.event else time.perf_counter()
        if self.event: now.record()
        self.marks.append((_BEGINS[event_name], now))

    def read(self, warm: bool, seconds: float, n: int) -> None:
        "Add up the phases of `n` steps that took `seconds`; the device must have finished. Dropped unless `warm`."
        marks, self.marks = self.marks, []
        if not warm or not marks: return
        self.seconds, self.n = self.seconds + seconds, self.n + n
        for (name, start), (_, end) in pairwise(marks):
            if name: self.sums[name] += start.elapsed_time(end) / 1000 if self.event else end - start

    def per_step(self) -> dict[str, float]: # Seconds of each phase and of the rest; nan where nothing was measured
        "Return the time of one step, by phase."
        phases = {k: v / self.n if self.n else math.nan for k, v in self.sums.items()}
        rest = self.seconds / self.n - sum(phases.values()) if self.n else math.nan
        return {**phases, 'rest': max(rest, 0.)}


def page_faults() -> int:
    "Return how many pages this process has asked the system for so far; 0 where that is not counted."
    try: import resource
    except ImportError: return 0                                 # Windows
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
