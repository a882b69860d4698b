"Where the time of a training step goes: forward, backward, optimizer, the rest; and page faults."
from __future__ import annotations

import math, time
from itertools import pairwise
from typing import Any

import torch
from fastai.callback.core import Callback
from fastai.learner import Learner

__all__ = ['PHASES', 'StepClock', 'page_faults']

PHASES = ('forward', 'backward', 'optimizer')


class _Marks(Callback):
    "Notes the time at some of fastai's events, before all other callbacks or after all."
    def __init__(self, clock, order, names):
        self.order = order
        for event, name in names.items(): setattr(self, event, lambda name=name: clock.marks.append((name, clock.now())))


class StepClock:
    """Times the phases of training steps on one learner.

    The forward pass ends with the loss; the optimizer's phase holds unscaling, clipping, the step, the update of the
    loss scale and `zero_grad`. On CUDA and XPU events are recorded in the device's queue, so that nothing waits; on
    other accelerators nothing is measured.
    """
    def __init__(self):
        self.marks: list[tuple[str, Any]] = []
        self.sums, self.seconds, self.n, self.event = dict.fromkeys(PHASES, 0.), 0., 0, None

    def watch(self, learn: Learner, device: torch.device) -> None:
        "Measure the training steps of `learn` from now on."
        if device.type not in ('cpu', 'cuda', 'xpu'): return
        if device.type != 'cpu': self.event = torch.get_device_module(device.type).Event
        learn.add_cb(_Marks(self, 1000, {'before_batch': 'forward', 'before_backward': 'backward'}))
        ends = {'after_loss': '', 'after_backward': '', 'before_step': 'optimizer', 'after_batch': ''}
        learn.add_cb(_Marks(self, -1000, ends))

    def now(self) -> Any:
        "Return the time: seconds, or a recorded event."
        if self.event is None: return time.perf_counter()
        event = self.event(enable_timing=True)
        event.record()
        return event

    def read(self, warm: bool, seconds: float, n: int) -> None:
        "Add up what was marked in `n` steps that took `seconds`; the device must have finished. Dropped unless `warm`."
        marks, self.marks = self.marks, []
        if not warm or not marks: return
        self.seconds, self.n = self.seconds + seconds, self.n + n
        for (name, start), (_, end) in pairwise(marks):
            if name: self.sums[name] += end - start if self.event is None else start.elapsed_time(end) / 1000

    def per_step(self) -> dict[str, float]: # Seconds of each phase and of the rest; nan where nothing was measured
        "Return the time of one step, by phase."
        if not self.n: return dict.fromkeys((*PHASES, 'rest'), math.nan)
        phases = {k: v / self.n for k, v in self.sums.items()}
        return {**phases, 'rest': max(0., self.seconds / self.n - sum(phases.values()))}


def page_faults() -> int:
    "Return how many pages this process has asked the system for so far; 0 where that is not counted."
    try: import resource
    except ImportError: return 0                                 # Windows
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
