"Measuring of one training: the batches that all trainings share, and the losses, times and memory of each."
from __future__ import annotations

import math, time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from fastai.learner import Learner
from fastai.torch_core import to_device
from fastcore.basics import noop

from ..devices.cost import allocated, wait_for
from ..learners import training_device
from ..messages import check_bool, check_integer, first_line
from ..precisions import Precision
from ..precisions.matching import unwrapped
from ..tensors import map_tensors
from ..training.loop import precision_callback
from .candidates import FP32
from .comparison import speed_up
from .copies import begin_fit, check_above_0, check_learner, copied_learner, loader_like
from .random_states import random_state, set_random_state
from .tensors import address, is_plain, tensors

ROUNDS = 7              # into which `n_steps` are divided, after two rounds of one step
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
    compile: bool = False # Whether each precision is also compared compiled
    tune: bool = False # Whether kinds of modules are tried in fp32
    tick: Callable = noop # Called with what is running
    batches: Sequence = () # Steps beyond their number reuse them

    def __post_init__(self):
        check_above_0(max_seconds=self.max_seconds)
        check_integer(1, n_steps=self.n_steps)
        check_integer(0, n_seeds=self.n_seeds)
        check_bool(compile=self.compile, tune=self.tune)
        lrs = [self.lr.start, self.lr.stop] if isinstance(self.lr, slice) else [self.lr]
        for lr in lrs if self.lr is not None else (): check_above_0(lr=lr or self.lr)
        self.end = time.monotonic() + self.max_seconds
        check_learner(self.learn, self.method)
        self.device = training_device(self.learn)

    @property
    def left(self) -> float:
        "The seconds that are left."
        return self.end - time.monotonic()


def training_batches(setting: Setting) -> list:
    "Return a batch for each step, as many as fit into a quarter of the time and into 512 MB."
    dl, found, size = loader_like(setting.learn.dls.train), [], 0
    for b in (b for _ in range(setting.n_steps) for b in dl):    # from the first again when an epoch is over
        found.append(to_device(b, setting.device))
        setting.tick('batches')
        size += sum(t.nbytes for t in tensors(b))
        if len(found) == setting.n_steps or size > LIMIT or setting.left < .75 * setting.max_seconds: break
    return found


def last_fifth(n: int) -> int:
    "Return how many of `n` steps count for the loss."
    return max(1, n // 5)


@dataclass
class Run:
    "One training: its precision, the copy that trains in it, and the measurements."
    setting: Setting
    precision: Precision
    name: str # In the table
    compiled: bool = False # Whether the copy is compiled, by `Module.compile`
    note = '' # Why it has left the rounds: an error, or it is slower than fp32
    failed = False # Whether it was an error

    def __post_init__(self):
        self.random_state = random_state()                       # of the copy, between its rounds
        self.losses = list[float]()                              # of each step
        self.times = dict[int, float]()                          # seconds per step, by round
        self.measured = dict.fromkeys(_MEASURED, math.nan)

    @property
    def pace(self) -> float: # nan before the second round
        "The median of the seconds per step."
        return np.median([*self.times.values()] or [math.nan])

    def speed_up(self, base: Run) -> tuple[float, float, float]:
        "Return the median of the time of `base` divided by that of this run, in the rounds of both, and its interval."
        return speed_up([base.times[n] / t for n, t in self.times.items() if n in base.times])

    def loss(self, n: int) -> float: # nan if it has left the rounds
        "Return the mean loss of the last fifth of the first `n` steps, which all that are left have trained for."
        return math.nan if self.note else float(np.mean(self.losses[n - last_fifth(n):n]))

    @contextmanager
    def failures_noted(self) -> Iterator[None]:
        "Note the error of a low precision, which is a result; raise an error in fp32, and when memory runs out."
        try: yield
        except Exception as e:
            if (self.precision == FP32 and not self.compiled) or isinstance(e, torch.OutOfMemoryError): raise
            self.failed, self.note = True, f'{type(e).__name__}: {first_line(e)}'

    def copy(self, copies: ExitStack) -> None:
        "Make a copy of the learner in its precision, in the state that all copies start from."
        self.learn = copies.enter_context(copied_learner(self.setting.learn, self.precision, optimizer=True))
        if self.compiled: self.learn.model.compile()
        set_random_state(self.random_state)
        self.learn.fit(0, self.setting.lr)                       # creates the optimizer, or sets its hyper-parameters

    def train(self, steps: Iterable[int], n_round: int = 0) -> None: # 0 for a warm-up
        "Train on the batches of these steps, and time it."
        set_random_state(self.random_state)
        self._begin()
        # As fastai calls the training part of an epoch, but cancelling it is an error. At its end all is closed that
        # the precision has opened: the settings of TF32 hold for every model.
        self.learn._with_events(partial(self._train_and_time, steps, n_round), 'train', ())
        self.random_state = random_state()

    def run_forward(self) -> None:
        "Run a training batch without its backward pass."
        self._begin()
        self.learn._do_grad_opt = noop
        self.learn._with_events(partial(self._step, len(self.losses), 0), 'train', ())

    def _begin(self):
        if not self.losses: begin_fit(self.learn, self.setting.n_steps)

    def _train_and_time(self, steps, n_round):
        device = self.setting.device
        wait_for(device)
        before, start = allocated(device), time.perf_counter()
        losses = [self._step(i, step) for i, step in enumerate(steps, len(self.losses))]
        wait_for(device)
        seconds = (time.perf_counter() - start) / len(losses)
        if n_round: self.times[n_round] = seconds
        if self.compiled and not self.losses:
            self.measured['compile s'] = seconds
            self.setting.end += seconds                    # which does not count
        self.measured['peak MB'] = (allocated(device, peak=True) - before) / 1e6
        self.losses += map(float, losses)

    def _step(self, i, step):
        batch = self.setting.batches[step % len(self.setting.batches)]
        self.learn.one_batch(i, map_tensors(torch.clone, batch))         # CutMix writes into it
        return self.learn.loss.detach()

    def finish(self) -> None:
        "Record what only the end of a training shows."
        if cb := precision_callback(self.learn):
            self.measured |= {'skipped': sum(cb.skips), 'final scale': cb.scale or math.nan}
        before = unwrapped(self.setting.learn.model).parameters()
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
        with torch.autograd.graph.saved_tensors_hooks(note, noop): self.run_forward()
        self.measured['activations MB'] = sum(kept.values()) / 1e6


# -- several

def running(runs: list[Run]) -> list[Run]:
    "Return the runs that are still in the rounds."
    return [r for r in runs if not r.note]


def train_round(
    runs: list[Run], # fp32 first
    steps: range,
) -> None:
    "Train on the same batches in each precision, back and forth, so that none always follows the same one."
    base, *_ = runs
    n_round = len(base.losses)                                   # the first is a warm-up
    for run in runs[::-1] if len(base.times) % 2 else runs:
        run.setting.tick(run.name)
        with run.failures_noted(): run.train(steps, n_round)
