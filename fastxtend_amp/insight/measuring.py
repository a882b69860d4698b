"One training of a comparison: its losses, times and memory."
from __future__ import annotations

import math, time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from fastcore.basics import noop

from ..devices.cost import allocated, wait_for
from ..messages import first_line
from ..precisions.matching import unwrapped
from ..training.loop import precision_callback
from .candidates import BASE, Contestant
from .copies import begin_fit, copied_learner, run_batch
from .random_states import random_state, set_random_state
from .speed import Speed, last_fifth
from .values import address, is_plain


@dataclass(eq=False)
class Run:
    "A training: what it trains in, its copy of the learner, and the measurements."
    rounds: Any # The `Rounds` that it belongs to
    row: Contestant
    note = '' # Why it has left the rounds: an error, or it is slower than another
    failed = False # Whether it was an error
    compile_seconds = 0. # Which do not count
    losses: list[float] = field(default_factory=list) # Of each step
    times: dict[int, float] = field(default_factory=dict) # Seconds per step, by round
    measured: dict[str, float] = field(default_factory=dict) # Further columns of the table

    def __post_init__(self): self.random_state = random_state()  # of the copy, between its rounds

    @property
    def pace(self) -> float: # nan before the second round
        "The median of the seconds per step."
        return np.median([*self.times.values()] or [math.nan])

    def speed_up(self, other: Run) -> Speed:
        "Return how much faster than another it is, in the rounds of both."
        return Speed.of([other.times[n] / t for n, t in self.times.items() if n in other.times])

    def loss(self, n: int) -> float: # nan if it has left the rounds
        "Return the mean loss of the last fifth of the first `n` steps, which all that are left have trained for."
        return math.nan if self.note else float(np.mean(self.losses[n - last_fifth(n):n]))

    @contextmanager
    def failures_noted(self) -> Iterator[None]:
        "Note the error of a low precision, which is a result; raise an error in fp32, and when memory runs out."
        try: yield
        except Exception as e:
            if self.row == BASE or isinstance(e, torch.OutOfMemoryError): raise
            self.failed = True
            self.drop(f'{type(e).__name__}: {first_line(e)}')

    def drop(self, why: str) -> None:
        "Leave the rounds, and free the copy."
        self.note = why
        if learn := vars(self).pop('learn', None): learn.model = learn.opt = None

    def copy(self, copies: ExitStack) -> None:
        "Make a copy of the learner that trains in this row's precision and format, and begin its fit."
        learn: Any = copies.enter_context(copied_learner(self.rounds.learn, self.row.precision, optimizer=True))
        self.row.prepare(learn)
        set_random_state(self.random_state)
        if not learn.opt: learn.create_opt()                     # as `fit` does
        if learn.wd is not None: learn.opt.set_hypers(wd=learn.wd)
        learn.opt.set_hypers(lr=learn.lr if self.rounds.lr is None else self.rounds.lr)
        if cb := precision_callback(learn): cb.precision.prepare(learn)
        begin_fit(learn, self.rounds.n_steps)
        self.learn, self.random_state = learn, random_state()

    def train(self, steps: Iterable[int], n_round: int = 0) -> None: # 0 for a warm-up
        "Train on the batches of these steps, and time it."
        set_random_state(self.random_state)
        # At its end all is closed that the precision has opened: the settings of TF32 hold for every model.
        self.learn._with_events(partial(self._train_and_time, steps, n_round), 'train', ())
        self.random_state = random_state()

    def _train_and_time(self, steps, n_round):
        device = self.rounds.device
        wait_for(device)
        before, start = allocated(device), time.perf_counter()
        losses = [self._step(i, step) for i, step in enumerate(steps, len(self.losses))]
        wait_for(device)
        seconds = (time.perf_counter() - start) / len(losses)
        if n_round: self.times[n_round] = seconds
        if self.row.compiled and not self.losses: self.compile_seconds = self.measured['compile s'] = seconds
        self.measured['peak MB'] = (allocated(device, peak=True) - before) / 1e6
        self.losses += map(float, losses)

    def _step(self, i, step):
        run_batch(self.learn, i, self.rounds.batches[step % len(self.rounds.batches)])
        return vars(self.learn).get('loss', torch.tensor(math.nan)).detach()     # it may end before its loss

    def finish(self) -> None:
        "Record what only the end of a training shows."
        if cb := precision_callback(self.learn):
            self.measured |= {'skipped': sum(cb.skips), 'final scale': cb.scale or math.nan}
        before = unwrapped(self.rounds.learn.model).parameters()
        pairs = zip(before, self.learn.model.parameters())
        moved = [torch.dist(now.data, p.data.to(now)) for p, now in pairs if is_plain(now)]
        self.measured['weights moved'] = math.hypot(*moved) / len(self.losses)

    def count_activations(self) -> None:
        "Run a batch without its backward pass; count the bytes that autograd keeps for it, each storage once."
        model = self.learn.model
        kept = {address(t): 0 for t in (*model.parameters(), *model.buffers())}
        def note(t):
            kept.setdefault(address(t), t.untyped_storage().nbytes())
            return t.detach()                                    # keeping `t` itself would leak its graph
        self.learn._do_grad_opt = noop
        run = partial(self._step, len(self.losses), 0)
        with torch.autograd.graph.saved_tensors_hooks(note, noop): self.learn._with_events(run, 'train', ())
        self.measured['activations MB'] = sum(kept.values()) / 1e6
