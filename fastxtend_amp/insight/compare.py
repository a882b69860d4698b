"`Learner.compare_precision`: trains copies of a learner in several precisions, in alternating rounds, and times them."
from __future__ import annotations

import math, random, time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
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

from ..training.callback import precision_callback
from ..common import first_line, optimizer_params, several_processes, training_device
from ..compat import is_compiled
from ..convert import HALF, map_tensors
from ..devices.cost import allocated, page_faults, wait_for
from ..precisions.matching import unwrapped
from ..precisions.fp32_settings import settings_note
from ..precisions import AMPMode
from .comparison import FEWEST_ROUNDS, PrecisionComparison, Tolerance, pays, recommend, speed_up
from .copies import (
    RandomState,
    check_learner,
    copied_learner,
    is_plain,
    left_out,
    loader_like,
    no_batches,
    one_at_a_time,
    random_state,
    random_state_kept,
    set_random_state,
    tensors,
)
from .precisions import PrecisionChoice, call_for, choices_from, default_choices, use_choice
from .progress import progress_bar
from .arguments import check_above_0, check_count, known_arguments

LIMIT = 2**29           # bytes of batches to hold; further steps reuse them
_ROUNDS = 7             # into which `n_steps` are divided, after two rounds of one step
_FOR_SEEDS = .4         # of the time, at most
_CONSIDERABLE = .1      # share of an fp32 step from which the time for loading a batch is mentioned
_MANY_FAULTS = 1000     # page faults per step that are mentioned
# Seconds per page fault: a step of an MLP (width 2048, batch size 256, bf16) with 22,496 faults took 115 ms, and 84 ms
# without them, by `keep_freed_memory`.
_FAULT = 1.4e-6


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


@dataclass(eq=False)
class Run:
    "One training: its precision, the copy that trains in it, and the measurements."
    choice: PrecisionChoice
    support: str = 'native' # 'emulated', 'unsupported' or 'failed'
    note: str = '' # Why it does not run; '' if it does
    learn: Any = None # The copy, while it trains
    random_state: RandomState = field(default_factory=list) # Of the copy, between its rounds
    losses: list[float] = field(default_factory=list) # Of each step
    times: list[float] = field(default_factory=list) # Seconds per step in each round; the first is a warm-up
    skipped: int = 0
    scale: float = math.nan # The loss scale at the end
    activations: float = math.nan # Bytes that autograd keeps for the backward pass
    peak: float = math.nan # Bytes that a step allocates on an accelerator
    moved: float = math.nan # Distance of the weights from the start
    compiling: float = math.nan # Seconds of a compiled model's first step
    faults: list[float] = field(default_factory=list) # Page faults per step in each round

    @property
    def pace(self) -> float: return float(np.median(self.times[1:] or self.times or [math.nan]))

    def ratios(self, base: Run) -> list[float]:
        "Return the time of `base` divided by that of this run, for each round of both except the first."
        found = [b / a for a, b in zip(self.times, base.times)]
        return found[1:] or found

    def train(self, batches: Iterable[Any], device: torch.device) -> None:
        "Train on these batches, and time it."
        set_random_state(self.random_state)
        self._in_training(partial(self._train_and_time, batches, device))
        self.random_state = random_state()

    def _in_training(self, f):
        """Call `f` as fastai calls the training part of an epoch; to cancel it is an error.

        At its end all is closed that the precision has opened: the settings of TF32 hold for every model.
        """
        self.learn._with_events(f, 'train', ())

    def _train_and_time(self, batches, device):
        wait_for(device)
        before, faults = allocated(device), page_faults()
        start = time.perf_counter()
        losses = [self._step(i, b) for i, b in enumerate(batches, len(self.losses))]
        wait_for(device)
        self.times.append((time.perf_counter() - start) / len(losses))
        self.faults.append((page_faults() - faults) / len(losses))
        self.peak = allocated(device, peak=True) - before
        self.losses += map(float, losses)

    def _step(self, i, batch):
        before = vars(self.learn).get('loss_grad')
        self.learn.one_batch(i, batch)
        if not len(self.learn.yb) and vars(self.learn).get('loss_grad') is before:
            raise ValueError('There is no loss to compare: the training batches have no targets, so fastai computes '
                             'no loss and takes no step.\nIf `learn.dls.n_inp` counts the targets as inputs, lower '
                             'it. If the model returns the loss, add a callback that sets `self.learn.yb = self.xb` '
                             "in `before_batch`, and a `loss_func` that reads the loss from the model's output.")
        return self.learn.loss.detach()

    def finish(self, model: nn.Module) -> None:
        "Record what only the end of a training shows; `model` has the weights from its start."
        if cb := precision_callback(self.learn): self.scale, self.skipped = cb.scale or math.nan, cb.n_skipped
        pairs = zip(unwrapped(model).parameters(), self.learn.model.parameters())
        self.moved = math.hypot(*(float((q.data - p.data.to(q)).norm()) for p, q in pairs if is_plain(q)))

    def count_activations(self, batch: Any) -> None:
        "Run a batch without its backward pass; count the bytes that autograd keeps for it, each storage once."
        kept = dict[int, int]()
        def note(t):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t.detach()                                    # keeping `t` itself would leak its graph
        self.learn._do_grad_opt = noop
        with torch.autograd.graph.saved_tensors_hooks(note, noop):
            self._in_training(partial(self._step, len(self.losses), batch))
        own = {t.untyped_storage().data_ptr() for t in (*self.learn.model.parameters(), *self.learn.model.buffers())}
        self.activations = sum(size for place, size in kept.items() if place not in own)


@dataclass(eq=False)
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
        if half := [n for n, p in self.learn.model.named_parameters() if p.dtype in HALF]:
            raise ValueError(f"{self.method} compares with fp32 training, but {len(half)} parameters are 16-bit; the "
                             f"first is '{half[0]}'.\nCall `learn.model.float()` to compare, or `learn.to_bf16()` to "
                             'train the model without comparing.')
        self.end, self.device = time.monotonic() + self.max_seconds, training_device(self.learn)
        self.runs, self.seeds = list[Run](), list[Run]()
        self.validates = self.method == 'compare_precision'      # `to_amp` calls the report, which validates

    def _draw(self):
        "Draw and time one batch per step, as many as fit into a quarter of the time and into 512 MB."
        self.batches, size, dl = list[Any](), 0, loader_like(self.learn.dls.train)
        clock = [time.perf_counter()]
        for b in (b for _ in range(self.n_steps) for b in dl):   # from the first again when an epoch is over
            self.batches.append(to_device(b, self.device))
            self.tick('batches')
            clock.append(time.perf_counter())
            size += sum(t.numel() * t.element_size() for t in tensors(b, floating=False))
            if len(self.batches) == self.n_steps or size > LIMIT or clock[-1] - clock[0] > self.max_seconds / 4: break
        if not self.batches: raise no_batches(self.method)
        # The mean without the first batch, which starts the workers, unless it is the only one.
        self.loading = float(np.mean(np.diff(clock)[1:] if len(clock) > 2 else np.diff(clock)))

    def run(self, choices: list[PrecisionChoice]) -> PrecisionComparison:
        with one_at_a_time, random_state_kept(), progress_bar(self.learn, self._left) as self.tick:
            if len(choices) == 1: self.n_steps = 1               # there is nothing to compare fp32 with
            self._draw()
            self.random_state = random_state()
            for choice in choices:
                status, why = choice.mode.support(self.device) if choice.mode else ('native', '')
                self.runs.append(Run(choice, status, why if status == 'unsupported' else ''))
            self.base = self.runs[0]
            with self._copies([r for r in self.runs if not r.note]):
                self._train_in_rounds()
                for run in reversed(self._training): self._end(run)   # fp32 last: it is slow where time is short
            # Compare losses after the steps that all runs have taken; after fewer if the seeds need it, unless too few.
            done = [len(r.losses) for r in self.runs if not r.note]
            time_for = .9 * self._left / (self.n_seeds * self.base.pace) if self.n_seeds else math.inf
            self.n = int(min(*done, self.n_steps, time_for if time_for > FEWEST_ROUNDS else math.inf))
            self.n_last = max(1, min(10, self.n // 5))           # steps at the end whose mean is the loss
            while len(self.seeds) < self.n_seeds and self._left > self.n * self.base.pace:
                self._train_seed(1 + len(self.seeds))
            return self._result()

    @property
    def _left(self): return self.end - time.monotonic()

    # -- copies and rounds

    @contextmanager
    def _copies(self, runs: list[Run], seed: int | None = None) -> Iterator[None]:
        "Have a copy for each run that works in its precision."
        with ExitStack() as stack:
            for run in runs:
                try: self._begin(stack.enter_context(copied_learner(self.learn, optimizer=True)), run, seed)
                except Exception as e: self._failed(run, e)
            yield

    def _begin(self, copy, run, seed):
        "Put the copy into its precision and into the state that all copies start from."
        cb = use_choice(copy, run.choice)
        if cb is not None: cb.on_overflow = 'ignore'             # a diagnosis would disturb the times
        set_random_state(self.random_state)
        if seed is not None: set_seed(seed)
        if not copy.opt: copy.create_opt()
        if {*optimizer_params(copy.opt)}.isdisjoint(copy.model.parameters()):
            raise ValueError("compare_precision trains copies, but a copy's optimizer has none of its model's "
                             'parameters: `splitter` or `opt_func` gets them from elsewhere.\nUse the parameters of '
                             'the model that `splitter` is called with.')
        lr, wd = copy.lr if self.lr is None else self.lr, {} if copy.wd is None else {'wd': copy.wd}
        copy.opt.set_hypers(lr=lr, **wd)
        copy.n_epoch, copy.epoch = 1, 0
        for event in ('before_fit', 'before_epoch'): copy(event)
        if self.validates and seed is None: self._validate(copy, run)
        copy.n_iter, copy.dl = self.n_steps, copy.dls.train
        run.learn, run.random_state = copy, random_state()

    def _validate(self, copy, run):
        "Run a batch as in validation, where a precision that trains may fail; not after fp32 has failed there."
        try:
            with random_state_kept(): copy._do_epoch_validate(dl=[self._batch(0)])
        except Exception as e:
            if run is not self.base: raise type(e)(f'{first_line(e)} (in validation)') from e
            self.validates = False

    def _failed(self, run, e):
        "Record the error of a low precision, which is a result; raise an error in fp32, and when memory runs out."
        if run.choice == PrecisionChoice() or isinstance(e, torch.OutOfMemoryError): raise e
        run.learn, run.support, run.note = None, 'failed', f'{type(e).__name__}: {first_line(e)}'

    def _train_in_rounds(self):
        "Train `n_steps` in rounds; continue until all are decided, or only the time for the seeds is left."
        size = 1                                                 # for two rounds; the second shows a step's time
        while due := self._due():
            done = len(self.base.losses)
            stop = done + size if done >= self.n_steps else min(done + size, self.n_steps)
            # Back and forth, so that no precision always follows the same one.
            for run in due[::(-1) ** len(self.base.times)]:
                try: self._train(run, range(done, stop))
                except Exception as e: self._failed(run, e)
            pace, seeds = sum(r.pace for r in self._training), self.n_seeds * self.base.pace
            if stop == 2:
                size = max(1, int(min(self.n_steps, self._left / (pace + seeds)) - 2) // _ROUNDS)
            needed = size * pace
            if all(len(r.ratios(self.base)) >= FEWEST_ROUNDS for r in self._training):   # one more step: the memory
                needed += pace + min(seeds * min(stop + size, self.n_steps), _FOR_SEEDS * self.max_seconds)
            if self._left < needed: break

    @property
    def _training(self): return [r for r in self.runs if r.learn is not None]

    def _due(self):
        "Return the runs that need another round, fp32 always included."
        if len(self.base.losses) < self.n_steps: return self._training
        low = [r for r in self._training[1:] if pays(*speed_up(r.ratios(self.base))[1:]) is None]
        return [self.base, *low] if low and not several_processes() else []

    def _train(self, run, steps):
        run.train(map(self._batch, steps), self.device)
        if run.choice.compiled and len(run.times) == 1:          # this step compiled the model
            run.compiling, run.times[0] = run.times[0], self.base.pace
            self.end += run.compiling
        self.tick(run.choice.name)

    def _batch(self, step): # A copy, as CutMix writes into it
        return map_tensors(torch.Tensor.clone, self.batches[step % len(self.batches)])

    def _end(self, run):
        run.finish(self.learn.model)
        # A compiled model would be compiled again.
        if run.choice.compiled or run.pace > self._left + self.max_seconds / 50: return
        try: run.count_activations(self._batch(0))
        except Exception: pass                                   # it trains, but not with these hooks: nan

    def _train_seed(self, seed):
        "Train fp32 again with another seed and another order of the batches, except for the last ones."
        run, early = Run(PrecisionChoice()), self.n - self.n_last
        steps = [*random.Random(seed).sample(range(early), early), *range(early, self.n)]
        with self._copies([run], seed): self._train(run, steps)
        self.seeds.append(run)

    # -- the result

    def _result(self):
        table = pd.DataFrame(map(self._row, self.runs)).set_index('mode')
        table['weights moved'] /= table['weights moved']['fp32']
        tolerance = Tolerance(self.base.losses[:self.n], list(map(self._loss, self.seeds)), self.n_last)
        recommended, reason = recommend(table, tolerance, self.max_seconds - min(0, self._left))
        choices = {r.choice.name: r.choice for r in self.runs}
        calls = {name: f"{call_for(self.learn, choice)}{'; learn.model.compile()' * choice.compiled}"
                 for name, choice in choices.items()}
        losses = {r.choice.name: r.losses[:self.n] for r in self.runs}
        return PrecisionComparison(table, losses, [r.losses for r in self.seeds], recommended, reason, calls,
                                   self._notes(), choices, self._caveats(table, recommended))

    def _loss(self, run): # nan for a mode that failed
        return float(np.mean(run.losses[self.n - self.n_last:self.n])) if not run.note else math.nan

    def _row(self, run):
        ratios = run.ratios(self.base)
        mid, low, high = speed_up(ratios)
        loss = self._loss(run)
        return {'mode': run.choice.name, 'support': run.support, 'steps': len(run.losses), 'rounds': len(ratios),
                'ms per step': 1000 * self.base.pace / mid, 'speed-up': mid, 'speed-up low': low, 'speed-up high': high,
                'loss': loss, 'loss difference': loss - self._loss(self.base), 'skipped': run.skipped,
                'final scale': run.scale, 'activations MB': run.activations / 1e6, 'peak MB': run.peak / 1e6,
                'weights moved': run.moved / max(1, len(run.losses)),
                'compile s': run.compiling, 'note': run.note}

    def _notes(self):
        first, last = self.n - self.n_last + 1, self.n
        steps = f'mean of training steps {first} to {last}' if first < last else f'training step {last}'
        notes = [f'Loss: {steps} on {self.device}.', *left_out(self.learn)]
        if settings := settings_note(): notes.append(f'{settings}. fp32 was measured with this setting.')
        return notes

    def _caveats(self, table, recommended):
        found = self._on_a_fit(table, recommended)
        if self.n < self.n_steps or len(self.seeds) < self.n_seeds:
            found.append(f'There was time for {self.n} of {self.n_steps} steps and {len(self.seeds)} of {self.n_seeds} '
                         f'seeds (`max_seconds={self.max_seconds:g}`).')
        if is_compiled(self.learn.model):
            found.append('The compiled model was compared uncompiled; `compare_precision(compile=True)` compares both.')
        faults, pace, name = max((np.median(r.faults or [0]), r.pace, r.choice.name) for r in self.runs)
        if self.device.type == 'cpu' and faults > _MANY_FAULTS:
            share = min(.99, max(.01, faults * _FAULT / pace))
            found.append(f'A step in {name} has {faults:,.0f} page faults from freshly allocated memory, which may '
                         f'take up to {share:.0%} of its time. Call `keep_freed_memory()` '
                         'to avoid them, and compare again.')
        return found

    def _on_a_fit(self, table, recommended):
        "Give the speed-up of a whole fit, where loading the batches takes a considerable part of a step."
        step, low = (table['ms per step'][name] / 1000 for name in ('fp32', recommended))
        if recommended == 'fp32' or self.loading < _CONSIDERABLE * step: return []
        # Workers draw the next batches while the model trains.
        dl = self.learn.dls.train
        together = max if getattr(dl, 'fake_l', dl).num_workers else float.__add__
        gain = together(self.loading, step) / together(self.loading, low)
        return [f'Loading a batch takes {1000 * self.loading:.3g} ms, and a step in fp32 {1000 * step:.3g} ms, so a '
                f'whole fit in {recommended} is about {gain:.2f}x faster, not {step / low:.2f}x.']

