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
        for event, name in names.items(): setattr(self, event, lambda name=name: clock.mark(name))


class StepClock:
    """Times the phases of training steps on one learner.

    The forward pass ends with the loss; the optimizer's phase holds unscaling, clipping, the step, the update of the
    loss scale and `zero_grad`. On a device of which PyTorch has timed events (CUDA, XPU) they are recorded in its
    queue, so that nothing waits; on other accelerators nothing is measured.
    """
    def __init__(self):
        self.marks: list[tuple[str, Any]] = []
        self.sums = dict.fromkeys(PHASES, 0.)
        self.seconds, self.n = 0., 0                             # of all steps read, and how many
        self.measures, self.event = False, None

    def watch(self, learn: Learner, device: torch.device) -> None:
        "Measure the training steps of `learn` from now on."
        self.measures = device.type in ('cpu', 'cuda', 'xpu')
        if not self.measures: return
        self.event = None if device.type == 'cpu' else torch.get_device_module(device.type).Event
        learn.add_cb(_Marks(self, 1000, {'before_batch': 'forward', 'before_backward': 'backward'}))
        ends = {'after_loss': '', 'after_backward': '', 'before_step': 'optimizer', 'after_batch': ''}
        learn.add_cb(_Marks(self, -1000, ends))

    def mark(self, name: str) -> None:
        "A phase begins; none with ''."
        if self.event is None: return self.marks.append((name, time.perf_counter()))
        event = self.event(enable_timing=True)
        event.record()
        self.marks.append((name, event))

    def read(self, warm: bool, seconds: float, n: int) -> None:
        "Add up what was marked in `n` steps that took `seconds`; the device must have finished. Dropped unless `warm`."
        marks, self.marks = self.marks, []
        if not warm: return
        self.seconds += seconds
        self.n += n
        for (name, start), (_, end) in pairwise(marks):
            if name: self.sums[name] += end - start if self.event is None else start.elapsed_time(end) / 1000

    def per_step(self) -> dict[str, float]: # seconds of each phase and of the rest; nan where nothing was measured
        "The time of one step, by phase."
        if not self.n or not self.measures: return dict.fromkeys((*PHASES, 'rest'), math.nan)
        phases = {k: v / self.n for k, v in self.sums.items()}
        return {**phases, 'rest': max(0., self.seconds / self.n - sum(phases.values()))}


def page_faults() -> int:
    "How many pages this process has asked the system for so far; 0 where that is not counted."
    try: import resource
    except ImportError: return 0                                 # Windows
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
