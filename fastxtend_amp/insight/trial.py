"One row of a comparison in training: a copy of the learner, and its losses, times and memory."
from __future__ import annotations

import math, time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from fastai.learner import Learner

from ..devices.cost import allocated, wait_for
from ..learners import training_device
from ..messages import first_line
from ..training.current import precision_callback
from ..training.loop import run_outermost
from .batches import begin_fit, run_batch
from .choices import Choice
from .copies import copied_learner
from .random_states import random_state, set_random_state
from .recommendation import last_fifth
from .speed import Speed
from .values import is_plain


@dataclass(eq=False)
class Trial:
    "One training and its measurements. Missing measurements are nan."
    learn: Learner # Only its copy is trained
    choice: Choice # What it trains in
    batches: list # Again from the first one when they are over
    n_steps: int # Batches in the epoch that callbacks see
    lr: float | slice | None # The learner's own if None
    copies: ExitStack # Frees the copy

    status = '' # 'failed' or 'dropped' once it has left the rounds
    reason = '' # Why it has left them
    skipped = scale = peak = moved = math.nan # Steps; loss scale; bytes; distance of the weights per step

    def __post_init__(self):
        self.name, self.device = self.choice.name, training_device(self.learn)
        self.copy: Any = None                                    # of the learner, while it is in the rounds
        self.random_state = random_state()                       # of the copy, between its rounds
        self.losses = list[float]()                              # of each step
        self.times = list[float]()                               # seconds per step, of each round after a warm-up

    @property
    def pace(self) -> float: # nan before the second round
        "The median of the seconds per step."
        return np.median(self.times or [math.nan])

    def speed_up(self, other: Trial) -> Speed:
        "Return the speed-up over another, from the rounds that both ran."
        return Speed.of([others / own for own, others in zip(self.times, other.times)])

    def loss(self, n: int) -> float: # nan if it has left the rounds
        "Return the mean loss of the last fifth of the first `n` steps, which all that are left have trained for."
        if self.status: return math.nan
        return float(np.mean(self.losses[n - last_fifth(n):n]))

    # -- training

    def train(self, steps: Iterable[int]) -> None:
        """Train a round on the batches of these steps, and time it. The first one begins a fit of a copy, and warms up.

        The error of a low precision is a result, with which it leaves the rounds. An error in fp32, or when memory runs
        out, is raised.
        """
        set_random_state(self.random_state)
        try:
            if self.copy is None:
                self.copy = self.copies.enter_context(copied_learner(self.learn, self.choice, optimizer=True))
                begin_fit(self.copy, self.n_steps, self.lr)
            cb = precision_callback(self.copy)
            # It closes what the precision opened, as the settings of TF32 hold for every model.
            run_outermost(self.copy, cb, 'train', partial(self._train_and_time, steps, cb))
        except Exception as e:
            if self.name == 'fp32' or isinstance(e, torch.OutOfMemoryError): raise
            self._leave('failed', f'{type(e).__name__}: {first_line(e)}')
        self.random_state = random_state()

    def _train_and_time(self, steps, cb):
        if cb: cb.ready_fit()                                    # which a fit does once, not in each round
        wait_for(self.device)
        before, start = allocated(self.device), time.perf_counter()
        losses = []
        for i, step in enumerate(steps, len(self.losses)):
            run_batch(self.copy, i, self.batches[step % len(self.batches)])
            losses.append(self.copy.loss.detach())               # 0 if the first batch has ended before its loss
        wait_for(self.device)
        if self.losses: self.times.append((time.perf_counter() - start) / len(losses))
        self.peak = allocated(self.device, peak=True) - before
        self.losses += map(float, losses)

    def measure_end(self) -> None:
        "Measure what only the end of a training shows: skipped steps, and the distance of the weights."
        if cb := precision_callback(self.copy):
            self.skipped, self.scale = sum(cb.skips), cb.scale or math.nan
        pairs = zip(self.copy.model.parameters(), self.learn.model.parameters())
        distances = [torch.dist(now.data, p.data.to(now)) for now, p in pairs if is_plain(now)]
        self.moved = math.hypot(*distances) / len(self.losses)

    # -- leaving the rounds

    def drop(self,
        rival: Trial, # Which was faster in the same rounds; in later ones all may be slower
        why: str = '',
    ) -> None:
        "Leave the rounds as too slow."
        self._leave('dropped', f'dropped after round {len(self.times)}{why}, at {self.speed_up(rival)} times the speed '
                               f"of '{rival.name}'")

    def _leave(self, status, reason):
        self.status, self.reason, copy, self.copy = status, reason, self.copy, None
        if copy: copy.model = copy.opt = None                    # frees the memory
