"`Learner.compare_precision`: trains copies of a learner in several precisions, in alternating rounds, and times them."
from __future__ import annotations

import math, random, time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from fastai.learner import Learner
from fastai.torch_core import set_seed, to_device
from fastcore.basics import noop, patch
from torch import nn

from ..common import first_line, several_processes, training_device
from ..compat import is_compiled
from ..convert import HALF, map_tensors
from ..devices.cost import allocated, page_faults, wait_for
from ..precisions import AMPMode
from ..precisions.fp32_settings import settings_note
from ..precisions.matching import unwrapped
from ..training.loop import precision_callback
from .arguments import check_above_0, check_count, known_arguments
from .comparison import FEWEST_ROUNDS, PrecisionComparison, pays, recommend, speed_up, tolerance
from .copies import (RandomState, begin_fit, check_learner, copied_learner, is_plain, left_out, loader_like, no_batches,
                     one_at_a_time, random_state, random_state_kept, set_random_state, tensors)
from .precisions import PrecisionChoice, call_for, choices_from, default_choices, use_choice
from .progress import progress_bar

LIMIT = 2**29           # bytes of batches to hold; further steps reuse them
_ROUNDS = 7             # into which `n_steps` are divided, after two rounds of one step
_CONSIDERABLE = .1      # share of an fp32 step from which the time for loading a batch is mentioned
_MANY_FAULTS = 1000     # page faults per step that are mentioned
# Seconds per page fault: a step of an MLP (width 2048, batch size 256, bf16) with 22,496 faults took 115 ms, and 84 ms
# without them, by `keep_freed_memory`.
_FAULT = 1.4e-6
# Columns of the table that are measured on the way
_MEASURED = 'skipped', 'final scale', 'activations MB', 'peak MB', 'weights moved', 'compile s'


@patch
@known_arguments
def compare_precision(self: Learner,
    modes: str | AMPMode | Iterable[str | AMPMode] | None = None, # To compare with fp32; None for all native ones
    n_steps: int = 50, # Training steps after which the losses are compared; timing may need more
    *,
    lr: float | slice | None = None, # Learning rate; the learner's own if None
    n_seeds: int = 3, # How often to repeat fp32 with other seeds, to see how much its loss varies
    max_seconds: float = 60., # Time limit; compiling does not count
    compile: bool = False, # Also compare each precision compiled, by `Module.compile`
) -> PrecisionComparison: # `table`, `plot()`, `recommended`, `reason` and `apply()`; displays itself in a notebook
    """Train copies of the learner side by side, and recommend the fastest precision whose loss matches fp32.

    Precisions are timed in alternating rounds on the same batches, so that background load affects all alike. After
    `n_steps`, rounds continue until each 95% interval is clearly above or below 1.05, or `max_seconds` is over.
    The learner is not modified. All copies are in memory at once.

    Copies include callbacks that affect a training step (mixup, gradient accumulation, gradient clipping) and leave out
    recorders, schedulers, trackers and callbacks that save or stop. A callback's attribute `run_on_copy`, True or
    False, overrules this.

    Interval: McGill, Tukey and Larsen, Variations of Box Plots, The American Statistician 32 (1978), widened for
    repeated looks.

    Raises:

    - `ValueError` if `modes` has an unknown precision
    - `ValueError` if another argument is out of range
    - `ValueError` if a parameter is 16-bit, sharded (FSDP), NaN or inf, or if all are frozen
    - `ValueError` if the learner cannot be copied
    - `ValueError` if there are no training batches, or if they give no loss
    - `RuntimeError` if it is called inside a fit
    - any error of the model in fp32
    """
    choices = default_choices(self) if modes is None else choices_from(modes)
    check_count('n_steps', n_steps, 1)
    check_count('n_seeds', n_seeds, 0)
    if lr is not None and not isinstance(lr, slice): check_above_0('lr', lr, '1e-3, or a slice of two')
    if compile: choices = [c for choice in choices for c in (choice, replace(choice, compiled=True))]
    return Comparison(self, 'compare_precision', max_seconds, n_steps, n_seeds, lr).run(choices)


@dataclass
class Run:
    "One training: its precision, the copy that trains in it, and the measurements."
    choice: PrecisionChoice
    support: str = 'native' # 'emulated', or 'failed' after an error
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

    def train(self, batches: Iterable[Any], device: torch.device) -> None:
        "Train on these batches, and time it."
        set_random_state(self.random_state)
        # As fastai calls the training part of an epoch, but cancelling it is an error. At its end all is closed that
        # the precision has opened: the settings of TF32 hold for every model.
        self.learn._with_events(partial(self._train_and_time, batches, device), 'train', ())
        self.random_state = random_state()

    def _train_and_time(self, batches, device):
        wait_for(device)
        before, faults = allocated(device), page_faults()
        start = time.perf_counter()
        losses = [self._step(i, b) for i, b in enumerate(batches, len(self.losses))]
        wait_for(device)
        seconds = (time.perf_counter() - start) / len(losses)
        if self.losses: self.times.append(seconds)
        elif self.choice.compiled: self.measured['compile s'] = seconds
        self.faults = (page_faults() - faults) / len(losses)
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

    def finish(self, model: nn.Module) -> None:
        "Record what only the end of a training shows; `model` has the weights from its start."
        if cb := precision_callback(self.learn):
            self.measured |= {'skipped': cb.n_skipped, 'final scale': cb.scale or math.nan}
        pairs = zip(unwrapped(model).parameters(), self.learn.model.parameters())
        moved = math.hypot(*(torch.dist(q.data, p.data.to(q)) for p, q in pairs if is_plain(q)))
        self.measured['weights moved'] = moved / len(self.losses)

    def count_activations(self, batch: Any) -> None:
        "Run a batch without its backward pass; count the bytes that autograd keeps for it, each storage once."
        model = self.learn.model
        kept = {t.untyped_storage().data_ptr(): 0 for t in (*model.parameters(), *model.buffers())}
        def note(t):
            kept.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes())
            return t.detach()                                    # keeping `t` itself would leak its graph
        self.learn._do_grad_opt = noop
        with torch.autograd.graph.saved_tensors_hooks(note, noop):
            self.learn._with_events(partial(self._step, len(self.losses), batch), 'train', ())
        self.measured['activations MB'] = sum(kept.values()) / 1e6


@dataclass
class Comparison:
    "The work behind `compare_precision` and `to_amp(measure=True)`; the time starts when it is created."
    learn: Learner
    method: str # Its name, for messages
    max_seconds: float
    n_steps: int = 40
    n_seeds: int = 3
    lr: float | slice | None = None

    def __post_init__(self):
        check_above_0('max_seconds', self.max_seconds, '60')
        check_learner(self.learn, self.method)
        if any(p.dtype in HALF for p in self.learn.model.parameters()):
            raise ValueError(f'{self.method} compares with fp32 training, but this model has 16-bit parameters.\nCall '
                             '`learn.model.float()` to compare, or `learn.to_bf16()` to train it without comparing.')
        self.end = time.monotonic() + self.max_seconds
        self.device = training_device(self.learn)
        self.seeds = list[Run]()
        self.validates = self.method == 'compare_precision'      # `to_amp` calls the report, which validates

    def run(self, choices: list[PrecisionChoice]) -> PrecisionComparison:
        with one_at_a_time, random_state_kept(), progress_bar(self.learn, self._left) as self.tick:
            if len(choices) == 1: self.n_steps = 1               # there is nothing to compare fp32 with
            self.n = self.n_steps                                # whose losses are compared; fewer if time is short
            self._draw()
            self.runs = [Run(c, c.mode.support(self.device).status if c.mode else 'native') for c in choices]
            self.base = self.runs[0]
            with ExitStack() as copies:
                for run in self._training:
                    try: self._begin(run, copies)
                    except Exception as e: self._failed(run, e)
                self._train_in_rounds()
                for run in reversed(self._training):             # fp32 last: it is slow where time is short
                    run.finish(self.learn.model)
                    if run.choice.compiled or run.pace > self._left: continue   # it would be compiled again
                    with suppress(Exception): run.count_activations(self._batch(0))   # nan if hooks break the model
            self.n = min(self.n, *(len(r.losses) for r in self._training))
            self.n_last = max(1, self.n // 5)                    # steps at the end whose mean is the loss
            while len(self.seeds) < self.n_seeds and self._left > self.n * self.base.pace: self._train_seed()
            return self._result()

    @property
    def _left(self): return self.end - time.monotonic()

    @property
    def _training(self): return [r for r in self.runs if not r.note]

    def _draw(self):
        "Draw and time one batch per step, as many as fit into a quarter of the time and into 512 MB."
        dl = loader_like(self.learn.dls.train)
        self.batches, size = list[Any](), 0
        clock = [time.perf_counter()]
        for b in (b for _ in range(self.n_steps) for b in dl):   # from the first again when an epoch is over
            self.batches.append(to_device(b, self.device))
            self.tick('batches')
            clock.append(time.perf_counter())
            size += sum(t.nbytes for t in tensors(b, floating=False))
            if len(self.batches) == self.n_steps or size > LIMIT or clock[-1] - clock[0] > self.max_seconds / 4: break
        if not self.batches: raise no_batches(self.method)
        # The mean without the first batch, which starts the workers, unless it is the only one.
        self.loading = np.diff(clock[1:] if len(clock) > 2 else clock).mean()

    def _batch(self, step): # A copy, as CutMix writes into it
        return map_tensors(torch.clone, self.batches[step % len(self.batches)])

    # -- copies and rounds

    def _begin(self, run, copies):
        "Have a copy of the learner begin a fit, in its precision and in the state that all copies start from."
        run.learn = copy = copies.enter_context(copied_learner(self.learn, optimizer=True))
        if cb := use_choice(copy, run.choice): cb.on_overflow = 'ignore'   # a diagnosis would disturb the times
        set_random_state(run.random_state)
        copy.fit(0, self.lr)                                     # creates the optimizer, or sets its hyper-parameters
        if self.validates and not self.base.losses:              # where a precision that trains may fail
            try: copy.validate(dl=[self._batch(0)])
            except Exception as e:
                if run is not self.base: raise type(e)(f'{first_line(e)} (in validation)') from e
                self.validates = False                           # fp32 fails there as well
        begin_fit(copy, self.n_steps, train=False)

    def _failed(self, run, e):
        "Record the error of a low precision, which is a result; raise an error in fp32, and when memory runs out."
        if run.choice == PrecisionChoice() or isinstance(e, torch.OutOfMemoryError): raise e
        run.support, run.note = 'failed', f'{type(e).__name__}: {first_line(e)}'

    def _train_in_rounds(self):
        "Train `n` steps in rounds; continue until all is decided, or only the time for the seeds is left."
        size = 1                                                 # after the warm-up a step shows how long it takes
        while due := self._due():
            done = len(self.base.losses)
            # Back and forth, so that no precision always follows the same one.
            if len(self.base.times) % 2: due.reverse()
            for run in due: self._train(run, range(done, done + size))
            n_rounds = len(self.base.times)
            pace = sum(r.pace for r in self._training)
            seeds = self.n_seeds * self.base.pace
            if n_rounds == 1:
                fitting = int(.9 * self._left / (pace + seeds))
                self.n = min(self.n_steps, max(FEWEST_ROUNDS + 1, fitting))
                size = max(1, (self.n - 2) // _ROUNDS)
            afterwards = pace + seeds * self.n                   # one step shows the memory
            if self._left < size * pace + afterwards * (n_rounds >= FEWEST_ROUNDS): break

    def _due(self):
        "Return the runs that need another round, fp32 always included."
        if len(self.base.losses) < self.n: return self._training
        low = [r for r in self._training[1:] if pays(*speed_up(r.ratios(self.base))[1:]) is None]
        return [self.base, *low] if low and not several_processes() else []

    def _train(self, run, steps):
        try:
            run.train(map(self._batch, steps), self.device)
            if run.choice.compiled and not run.times: self.end += run.measured['compile s']
        except Exception as e: self._failed(run, e)
        self.tick(run.choice.name)

    def _train_seed(self):
        "Train fp32 again with another seed and another order of the batches, except for the last ones."
        seed, early = 1 + len(self.seeds), self.n - self.n_last
        set_seed(seed)
        run = Run(PrecisionChoice())
        with ExitStack() as copies:
            self._begin(run, copies)
            self._train(run, [*random.Random(seed).sample(range(early), early), *range(early, self.n)])
        self.seeds.append(run)

    # -- the result

    def _result(self):
        choices = {r.choice.name: r.choice for r in self.runs}
        table = pd.DataFrame(map(self._row, self.runs), index=[*choices])
        table['weights moved'] /= table['weights moved']['fp32']
        tolerated = tolerance(self.base.losses[:self.n], list(map(self._loss, self.seeds)), self.n_last)
        recommended, reason = recommend(table, tolerated, self.max_seconds - min(0, self._left))
        calls = {name: f"{call_for(self.learn, choice)}{'; learn.model.compile()' if choice.compiled else ''}"
                 for name, choice in choices.items()}
        losses = {r.choice.name: r.losses[:self.n] for r in self.runs}
        step, low = table['ms per step'][['fp32', recommended]] / 1000
        notes = self._notes(step, low, recommended)
        return PrecisionComparison(table, losses, [r.losses for r in self.seeds], recommended, reason, calls, notes,
                                   choices)

    def _loss(self, run): # nan for a mode that failed
        return math.nan if run.note else np.mean(run.losses[self.n - self.n_last:self.n])

    def _row(self, run):
        ratios = run.ratios(self.base)
        loss = self._loss(run)
        mid, low, high = speed_up(ratios)
        return {'support': run.support, 'steps': len(run.losses), 'rounds': len(ratios),
                'ms per step': 1000 * self.base.pace / mid, 'speed-up': mid, 'speed-up low': low, 'speed-up high': high,
                'loss': loss, 'loss difference': loss - self._loss(self.base), **run.measured, 'note': run.note}

    def _notes(self, step, low, recommended):
        found = []
        if recommended != 'fp32' and self.loading > _CONSIDERABLE * step:
            dl = self.learn.dls.train                            # its workers draw batches while the model trains
            together = max if getattr(dl, 'fake_l', dl).num_workers else float.__add__
            gain = together(self.loading, step) / together(self.loading, low)
            found.append(f'Loading a batch takes {1000 * self.loading:.3g} ms, and a step in fp32 {1000 * step:.3g} '
                         f'ms, so a whole fit in {recommended} is about {gain:.2f}x faster, not {step / low:.2f}x.')
        if is_compiled(self.learn.model):
            found.append('The compiled model was compared uncompiled; `compare_precision(compile=True)` compares both.')
        faults, pace, name = max((r.faults, r.pace, r.choice.name) for r in self.runs)
        if self.device.type == 'cpu' and faults > _MANY_FAULTS:
            found.append(f'A step in {name} has {faults:,.0f} page faults from freshly allocated memory, which may '
                         f'take up to {min(99, 100 * faults * _FAULT / pace):.2g}% of its time. Call '
                         '`keep_freed_memory()` to avoid them, and compare again.')
        found += [f'`max_seconds={self.max_seconds:g}` was enough for {self.n} of {self.n_steps} steps and '
                  f'{len(self.seeds)} of {self.n_seeds} seeds. Loss: mean of the last fifth of the steps.',
                  *left_out(self.learn)]
        if settings := settings_note(): found.append(f'{settings}. fp32 was measured with this setting.')
        return found
