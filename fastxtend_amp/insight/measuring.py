"Measuring of one training: the batches that all trainings share, and the losses, times and memory of each."
from __future__ import annotations

import math, time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from fastai.learner import Learner
from fastai.torch_core import to_device
from fastcore.basics import noop

from ..common import HALF, map_tensors, training_device
from ..devices.cost import allocated, page_faults, wait_for
from ..devices.facts import first_line
from ..precisions.matching import unwrapped
from ..training.loop import precision_callback
from .arguments import check_above_0
from .copies import (RandomState, begin_fit, check_learner, copied_learner, loader_like, no_batches, random_state,
                     set_random_state)
from .precisions import PrecisionChoice, use_choice
from .tensors import is_plain, tensors

LIMIT = 2**29           # bytes of batches to hold; further steps reuse them
# Columns of the table that are measured on the way
_MEASURED = 'skipped', 'final scale', 'activations MB', 'peak MB', 'weights moved', 'compile s'


@dataclass
class Setting:
    "The arguments of a comparison; its time starts when this is created."
    learn: Learner # Only copies of it are trained
    method: str # The method that was called, for messages
    max_seconds: float
    n_steps: int = 40
    n_seeds: int = 3
    lr: float | slice | None = None # The learner's own if None

    def __post_init__(self):
        check_above_0('max_seconds', self.max_seconds, '60')
        self.end = time.monotonic() + self.max_seconds
        check_learner(self.learn, self.method)
        if any(p.dtype in HALF for p in self.learn.model.parameters()):
            raise ValueError(f'{self.method} compares with fp32 training, but this model has 16-bit parameters.\nCall '
                             '`learn.model.float()` to compare, or `learn.to_bf16()` to train it without comparing.')
        self.device = training_device(self.learn)

    @property
    def left(self) -> float:
        "The seconds that are left."
        return self.end - time.monotonic()


class Batches:
    "One training batch per step, as many as fit into a quarter of the time and into 512 MB; further steps reuse them."
    def __init__(self, setting: Setting, tick: Callable[[str], None]):
        dl, seconds = loader_like(setting.learn.dls.train), setting.max_seconds / 4
        self.kept, size, clock = list[Any](), 0, [time.perf_counter()]
        for b in (b for _ in range(setting.n_steps) for b in dl):        # from the first again when an epoch is over
            self.kept.append(to_device(b, setting.device))
            tick('batches')
            clock.append(time.perf_counter())
            size += sum(t.nbytes for t in tensors(b))
            if len(self.kept) == setting.n_steps or size > LIMIT or clock[-1] - clock[0] > seconds: break
        if not self.kept: raise no_batches(setting.method)
        # The mean time of a batch without the first one, which starts the workers, unless it is the only one.
        self.loading = np.diff(clock[1:] if len(clock) > 2 else clock).mean()

    def __getitem__(self, step): # A copy, as CutMix writes into it
        return map_tensors(torch.clone, self.kept[step % len(self.kept)])


def last_fifth(n: int) -> int:
    "Return how many of `n` steps count for the loss."
    return max(1, n // 5)


@dataclass
class Run:
    "One training: its precision, the copy that trains in it, and the measurements."
    setting: Setting
    batches: Batches
    choice: PrecisionChoice
    note: str = '' # Why it does not run; '' if it does
    learn: Any = None # The copy, while it trains
    random_state: RandomState = field(default_factory=random_state) # Of the copy, between its rounds
    losses: list[float] = field(default_factory=list) # Of each step
    times: list[float] = field(default_factory=list) # Seconds per step in each round but the first, a warm-up
    faults: float = 0. # Page faults per step in the last round
    measured: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_MEASURED, math.nan))

    @property
    def pace(self) -> float: # nan before the second round
        "The median of the seconds per step."
        return np.median(self.times or [math.nan])

    def ratios(self, base: Run) -> list[float]:
        "Return the time of `base` divided by that of this run, for each round of both."
        return [b / a for a, b in zip(self.times, base.times)]

    def loss(self, n: int) -> float: # nan if it failed
        "Return the mean loss of the last fifth of the first `n` steps."
        return math.nan if self.note else float(np.mean(self.losses[:n][-last_fifth(n):]))

    @contextmanager
    def failures_noted(self, where: str = '') -> Iterator[None]:
        "Note the error of a low precision, which is a result; raise an error in fp32, and when memory runs out."
        try: yield
        except Exception as e:
            if self.choice == PrecisionChoice() or isinstance(e, torch.OutOfMemoryError): raise
            self.note = f'{type(e).__name__}: {first_line(e)}{where}'

    def copy(self, copies: ExitStack) -> None:
        "Make a copy of the learner in its precision, in the state that all copies start from."
        self.learn = copies.enter_context(copied_learner(self.setting.learn, optimizer=True))
        if cb := use_choice(self.learn, self.choice): cb.on_overflow = 'ignore'   # a diagnosis would disturb the times
        set_random_state(self.random_state)
        self.learn.fit(0, self.setting.lr)                       # creates the optimizer, or sets its hyper-parameters

    def train(self, steps: Iterable[int]) -> None:
        "Train on the batches of these steps, and time it."
        set_random_state(self.random_state)
        if not self.losses: begin_fit(self.learn, self.setting.n_steps)
        # As fastai calls the training part of an epoch, but cancelling it is an error. At its end all is closed that
        # the precision has opened: the settings of TF32 hold for every model.
        self.learn._with_events(partial(self._train_and_time, steps), 'train', ())
        self.random_state = random_state()

    def _train_and_time(self, steps):
        device = self.setting.device
        wait_for(device)
        before, faults = allocated(device), page_faults(device)
        start = time.perf_counter()
        losses = [self._step(i, self.batches[step]) for i, step in enumerate(steps, len(self.losses))]
        wait_for(device)
        seconds = (time.perf_counter() - start) / len(losses)
        if self.losses: self.times.append(seconds)
        elif self.choice.compiled:
            self.measured['compile s'] = seconds
            self.setting.end += seconds                    # which does not count
        self.faults = (page_faults(device) - faults) / len(losses)
        self.measured['peak MB'] = (allocated(device, peak=True) - before) / 1e6
        self.losses += map(float, losses)

    def _step(self, i, batch):
        before = self.learn.loss
        self.learn.one_batch(i, batch)
        if self.learn.loss is before:
            raise ValueError('There is no loss to compare: the training batches have no targets, so fastai computes '
                             'no loss and takes no step.\nIf `learn.dls.n_inp` counts the targets as inputs, lower '
                             'it. If the model returns the loss, add a callback that sets `self.learn.yb = self.xb` '
                             "in `before_batch`, and a `loss_func` that reads the loss from the model's output.")
        return self.learn.loss.detach()

    def finish(self) -> None:
        "Record what only the end of a training shows."
        if cb := precision_callback(self.learn):
            self.measured |= {'skipped': cb.n_skipped, 'final scale': cb.scale or math.nan}
        pairs = zip(unwrapped(self.setting.learn.model).parameters(), self.learn.model.parameters())
        moved = math.hypot(*(torch.dist(q.data, p.data.to(q)) for p, q in pairs if is_plain(q)))
        self.measured['weights moved'] = moved / len(self.losses)

    def count_activations(self) -> None:
        "Run a batch without its backward pass; count the bytes that autograd keeps for it, each storage once."
        model = self.learn.model
        kept = {t.untyped_storage().data_ptr(): 0 for t in (*model.parameters(), *model.buffers())}
        def note(t):
            kept.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes())
            return t.detach()                                    # keeping `t` itself would leak its graph
        self.learn._do_grad_opt = noop
        with torch.autograd.graph.saved_tensors_hooks(note, noop):
            self.learn._with_events(partial(self._step, len(self.losses), self.batches[0]), 'train', ())
        self.measured['activations MB'] = sum(kept.values()) / 1e6
