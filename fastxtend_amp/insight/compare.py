"The comparison: trains copies of one learner in several precisions, a few steps each in turn, timed."
from __future__ import annotations

import math, random, time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from fastai.learner import Learner
from fastai.torch_core import set_seed, to_device
from fastcore.basics import noop, patch

from ..training.callback import precision_callback
from ..common import first_line, several_processes, training_device
from ..compat import is_compiled
from ..convert import HALF, map_tensors
from ..devices.cost import allocated, page_faults, wait_for
from ..precisions.matching import unwrapped
from ..precisions.fp32_settings import settings_note
from ..precisions import AMPMode
from ..common import optimizer_params
from .comparison import FEWEST_TURNS, PrecisionComparison, Tolerance, pays, recommend, speed_up
from .copies import (
    RandomState,
    check_learner,
    copied_learner,
    is_plain,
    left_out,
    loader_like,
    no_batches,
    random_state,
    random_state_kept,
    set_random_state,
    tensors,
)
from .precisions import PrecisionChoice, call_for, choices_from, default_choices, use_choice
from .progress import progress_bar
from .arguments import check_above_0, check_count, known_arguments

LIMIT = 2**29           # bytes of batches that are held; further steps take the same ones again
_TURNS = 7              # that `n_steps` are divided into, after the first two of one step
_FOR_SEEDS = .4         # of the time, at most
_CONSIDERABLE = .1      # of fp32's step: drawing a batch that takes as long is worth a word
_MANY_FAULTS = 1000     # page faults in a step, which are worth a word
_FAULT = 1.4e-6         # seconds that one takes, as measured on an AMD EPYC


@patch
@known_arguments
def compare_precision(self: Learner,
    modes: str | AMPMode | Iterable[str | AMPMode] | None = None, # To compare with fp32; the native ones if None
    n_steps: int = 50, # Training batches after which the losses are compared; the speed may need more
    *,
    lr: float | slice | None = None, # Learning rate; the learner's own if None
    n_seeds: int = 3, # How often fp32 is repeated with another order of the batches and other random draws
    max_seconds: float = 60., # Seconds after which it ends, with what it knows by then; compiling does not count
    compile: bool = False, # Whether to compare each precision compiled as well, by `Module.compile`
) -> PrecisionComparison: # `table`, `plot()`, `recommended`, `reason` and `apply()`; shows itself in a notebook
    """Train a copy of the learner in each precision, from its present state, on the same batches, and recommend one.

    The learner, its loggers and its recorder stay as they are. Drawing batches runs the dataset, as fastai's
    `one_batch()` does, and moves its random generators on. All copies are in memory at once, and up to 512 MB of
    batches. The modes take turns, a few steps each, so that other work on the machine slows all of them; only the
    training steps are timed. Turns go on after `n_steps` until the 95 % interval of the median speed-up is above 1.05,
    or below, or the time ends; with several processes they end with `n_steps`. After the six turns that an interval
    needs, time is set aside for the seeds. Where it is short, the losses are compared after fewer steps, and with fewer
    seeds or none. Each mode also validates one batch, and one more shows the memory.

    A mode that the device does not run gets a row with the reason. A step is never broken off: in a mode that the
    device only emulates one step of a large model may take long. Half-precision weights are compared if they are named
    ('half weights', 'half weights fp16') or if the learner has them.

    A copy has the precision callback's arguments, those of fastai's callbacks that shape a training step (mixup and
    cutmix, gradient accumulation and clipping, RNN, batch-norm and GAN callbacks, channels last), and your callbacks
    whose source changes the step: assigns to a batch, prediction, loss or gradient, works in place
    (`clip_grad_norm_`), runs a backward pass, or cancels a batch. Trackers only read, and are left out, as are
    recorder, progress bars, schedulers, callbacks that save or stop, metrics and `after_epoch`. A callback's attribute
    `run_on_copy`, True or False, overrules this. A copy saves nothing; its `path` is a temporary folder.

    With several processes each compares by itself: the model is the one inside `torch.compile` and
    DistributedDataParallel, and SyncBatchNorm takes this process's statistics. If the loss function communicates, all
    processes must call this method.

    Raises `ValueError` for an unknown mode, for unusable numbers, for a learner that cannot be copied, for parameters
    that are in half precision, sharded (FSDP), NaN or inf, without training batches, and for batches that give no loss;
    `RuntimeError` inside a fit.

    Source of the interval: McGill, Tukey and Larsen, Variations of Box Plots, The American Statistician 32 (1978), made
    wider for looking after each turn.
    """
    choices = default_choices(self) if modes is None else choices_from(modes)
    check_count('n_steps', n_steps, 1)
    check_count('n_seeds', n_seeds, 0)
    if lr is not None and not isinstance(lr, slice): check_above_0('lr', lr, '1e-3, or a slice of two')
    if compile: choices = [c for choice in choices for c in (choice, replace(choice, compiled=True))]
    return Comparison(self, 'compare_precision', max_seconds, n_steps, n_seeds, lr).run(choices)


@dataclass(eq=False)
class Run:
    "One training: its precision, the copy that trains in it, and what was measured."
    choice: PrecisionChoice
    support: str = 'native' # 'emulated', 'unsupported' or 'failed'
    note: str = ''
    learn: Learner | None = None # The copy, while it trains
    random_state: RandomState = field(default_factory=list) # Where the copy's random draws go on
    losses: list[float] = field(default_factory=list) # Of each step
    times: list[float] = field(default_factory=list) # Seconds of a step in each turn, the first of which warms up
    skipped: int = 0
    scale: float = math.nan # The loss scale at the end
    activations: float = math.nan # Bytes that autograd keeps for the backward pass
    peak: float = math.nan # Bytes on an accelerator that a step takes for itself
    moved: float = math.nan # Distance that the weights moved
    compiling: float = math.nan # Seconds of a compiled model's first step
    faults: list[float] = field(default_factory=list) # Page faults of a step in each turn

    @property
    def runs(self) -> bool: return self.support not in ('unsupported', 'failed')

    @property
    def pace(self) -> float: return float(np.median(self.times[1:] or self.times or [math.nan]))

    def ratios(self, base: Run) -> list[float]:
        "Return `base`'s time over this run's in each turn that both took, but for the first."
        found = [b / a for a, b in zip(self.times, base.times)]
        return found[1:] or found


@dataclass(eq=False)
class Comparison:
    "The work behind `compare_precision` and `to_amp(measure=True)`; its time begins when it is built."
    learn: Learner
    method: str # That runs it
    max_seconds: float
    n_steps: int = 40
    n_seeds: int = 3
    lr: float | slice | None = None

    def __post_init__(self):
        check_above_0('max_seconds', self.max_seconds, '60')
        check_learner(self.learn, self.method)
        if half := [n for n, p in self.learn.model.named_parameters() if p.dtype in HALF]:
            raise ValueError(f"{self.method} compares with training in fp32, but {len(half)} parameters are in half "
                             f"precision, such as '{half[0]}'.\nCall `learn.to_bf16()` to train the model as it is, or "
                             '`learn.model.float()` to compare.')
        self.end, self.device = time.monotonic() + self.max_seconds, training_device(self.learn)
        self.runs, self.seeds = list[Run](), list[Run]()
        self.validates = self.method == 'compare_precision'      # the report of the other does

    def _draw(self):
        "Draw a batch for each step, as many as come in a quarter of the time and fit into 512 MB; time them."
        self.batches, size, dl = list[Any](), 0, loader_like(self.learn.dls.train)
        clock = [time.perf_counter()]
        for b in (b for _ in range(self.n_steps) for b in dl):   # the batches come again when an epoch is over
            self.batches.append(to_device(b, self.device))
            self.tick('batches')
            clock.append(time.perf_counter())
            size += sum(t.numel() * t.element_size() for t in tensors(b, floating=False))
            if len(self.batches) == self.n_steps or size > LIMIT or clock[-1] - clock[0] > self.max_seconds / 4: break
        if not self.batches: raise no_batches(self.method)
        # The mean without the first batch, for which workers start, unless there is no other.
        self.loading = float(np.mean(np.diff(clock)[1:] if len(clock) > 2 else np.diff(clock)))

    def run(self, choices: list[PrecisionChoice]) -> PrecisionComparison:
        with random_state_kept(), progress_bar(self.learn, self._left) as self.tick: return self._run(choices)

    def _run(self, choices):
        if len(choices) == 1: self.n_steps = 1                   # fp32 alone has nothing to be compared with
        self._draw()
        self.random_state = random_state()
        for choice in choices:
            status, why = choice.mode.support(self.device) if choice.mode else ('native', '')
            self.runs.append(Run(choice, status, why if status == 'unsupported' else ''))
        self.base = self.runs[0]
        self._in_fits([r for r in self.runs if r.runs], self._train_in_turns)
        # The loss is judged after as many steps as all have taken, and as the seeds have time for, unless too few.
        done = [len(r.losses) for r in self.runs if r.runs]
        time_for = .9 * self._left / (self.n_seeds * self.base.pace) if self.n_seeds else math.inf
        self.n = int(min(*done, self.n_steps, time_for if time_for > FEWEST_TURNS else math.inf))
        self.n_last = max(1, min(10, self.n // 5))               # the loss is the mean of so many last steps
        while len(self.seeds) < self.n_seeds and self._left > self.n * self.base.pace:
            self._train_seed(1 + len(self.seeds))
        return self._result()

    @property
    def _left(self): return self.end - time.monotonic()

    # -- fits and turns

    def _in_fits(self, runs: list[Run], train: Callable[[], None], seed: int | None = None) -> None:
        "Begin a fit of a copy for each run, and call `train` inside all of them: what a fit enters is entered once."
        if not runs: return train()
        run, *others = runs
        def inside():
            copy('before_epoch')
            if self.validates and run in self.runs: self._validate(copy, run)
            copy.n_iter, copy.dl = self.n_steps, copy.dls.train
            copy('before_train')
            run.learn, run.random_state = copy, random_state()
            self._in_fits(others, train)
            if run.learn is not None: self._end(run)
        try:
            with copied_learner(self.learn, optimizer=True) as copy:
                self._prepare(copy, run.choice, seed)
                copy._with_events(inside, 'fit', ())             # a cancelled fit is an error here
            return
        except Exception as e:
            if run.random_state: raise                           # it had begun
            self._failed(run, e)
        self._in_fits(others, train)

    def _prepare(self, copy, choice, seed):
        "Have the copy train in this precision, from the state that all copies begin with."
        cb = use_choice(copy, choice)
        if cb is not None: cb.on_overflow = 'ignore'             # a diagnosis would disturb the times
        set_random_state(self.random_state)
        if seed is not None: set_seed(seed)
        if not copy.opt: copy.create_opt()
        if {*optimizer_params(copy.opt)}.isdisjoint(copy.model.parameters()):
            raise ValueError("compare_precision trains copies, and a copy's optimizer has none of its model's "
                             'parameters: `splitter` or `opt_func` takes them from elsewhere.\nTake them from the '
                             'model that `splitter` is given.')
        lr, wd = copy.lr if self.lr is None else self.lr, {} if copy.wd is None else {'wd': copy.wd}
        copy.opt.set_hypers(lr=lr, **wd)
        copy.n_epoch, copy.epoch = 1, 0

    def _validate(self, copy, run):
        "Run a batch as in validation, where a mode may break that trains; if fp32 breaks, no mode is tried."
        try:
            with random_state_kept(): copy._do_epoch_validate(dl=[self._batch(0)])
        except Exception as e:
            if run is not self.base: raise type(e)(f'{first_line(e)} (in validation)') from e
            self.validates = False

    def _failed(self, run, e):
        "Note the error of a low precision, which is a result; in fp32, and when memory ends, it is the user's to see."
        if run.choice == PrecisionChoice() or isinstance(e, torch.OutOfMemoryError): raise e
        run.learn, run.support, run.note = None, 'failed', f'{type(e).__name__}: {first_line(e)}'

    def _train_in_turns(self):
        "Train `n_steps` of each in turns; go on until all are decided, or no time is left, but for the seeds."
        size = 1                                                 # in two turns: the second shows how long a step takes
        while due := self._due():
            done = len(self.base.losses)
            stop = done + size if done >= self.n_steps else min(done + size, self.n_steps)
            # Forth and back, so that no mode always comes after the same one.
            for run in due[::(-1) ** len(self.base.times)]:
                try: self._train(run, range(done, stop))
                except Exception as e: self._failed(run, e)
            pace, seeds = sum(r.pace for r in self._training), self.n_seeds * self.base.pace
            if stop == 2:
                size = max(1, int(min(self.n_steps, self._left / (pace + seeds)) - 2) // _TURNS)
            needed = size * pace
            if all(len(r.ratios(self.base)) >= FEWEST_TURNS for r in self._training):   # one step more: the memory
                needed += pace + min(seeds * min(stop + size, self.n_steps), _FOR_SEEDS * self.max_seconds)
            if self._left < needed: break

    @property
    def _training(self): return [r for r in self.runs if r.learn is not None]

    def _due(self):
        "Return the runs that need another turn, fp32 always among them."
        if len(self.base.losses) < self.n_steps: return self._training
        low = [r for r in self._training[1:] if pays(*speed_up(r.ratios(self.base))[1:]) is None]
        return [self.base, *low] if low and not several_processes() else []

    def _train(self, run, steps):
        "Train on the batches of these steps, timed."
        set_random_state(run.random_state)
        wait_for(self.device)
        before, faults = allocated(self.device), page_faults()
        start = time.perf_counter()
        losses = [self._step(run, i, step) for i, step in enumerate(steps, len(run.losses))]
        wait_for(self.device)
        seconds = (time.perf_counter() - start) / len(losses)
        if run.choice.compiled and not run.times:                # this step has compiled the model
            run.compiling, self.end, seconds = seconds, self.end + seconds, self.base.pace
        run.times.append(seconds)
        run.faults.append((page_faults() - faults) / len(losses))
        run.peak = allocated(self.device, peak=True) - before
        run.losses += map(float, losses)
        run.random_state = random_state()
        self.tick(run.choice.name)

    def _batch(self, step): # A copy: callbacks such as CutMix write into it
        return map_tensors(torch.Tensor.clone, self.batches[step % len(self.batches)])

    def _step(self, run, i, step):
        before = vars(run.learn).get('loss_grad')
        run.learn.one_batch(i, self._batch(step))
        if not len(run.learn.yb) and vars(run.learn).get('loss_grad') is before:
            raise ValueError('There is no loss to compare: the training batches have no targets, and without targets '
                             'fastai computes no loss and takes no step.\nIf `learn.dls.n_inp` counts the targets as '
                             'inputs, lower it. If the model computes the loss itself, give its inputs as targets, '
                             'too, by a callback with `self.learn.yb = self.xb` in `before_batch`, and a `loss_func` '
                             "that takes the loss out of the model's output.")
        return run.learn.loss.detach()

    def _end(self, run):
        "Note what only the end of a training shows, and what a mode keeps in memory."
        run.learn('after_train')
        if cb := precision_callback(run.learn): run.scale, run.skipped = cb.scale or math.nan, cb.n_skipped
        pairs = zip(unwrapped(self.learn.model).parameters(), run.learn.model.parameters())
        run.moved = math.hypot(*(float((q.data - p.data.to(q)).norm()) for p, q in pairs if is_plain(q)))
        # A compiled model would be compiled again for it.
        if run in self.runs and not run.choice.compiled and run.pace < self._left + self.max_seconds / 50:
            try: run.activations = self._activations(run)
            except Exception: pass                               # it trains, but not watched: nan
        run.learn = None

    def _activations(self, run):
        "Run a batch without the backward pass, and return the bytes that autograd keeps for it, each storage once."
        kept = dict[int, int]()
        def note(t):
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t.detach()                                    # `t` itself would keep its graph, and for ever
        run.learn._do_grad_opt = noop
        with torch.autograd.graph.saved_tensors_hooks(note, noop): self._step(run, len(run.losses), 0)
        own = {t.untyped_storage().data_ptr() for t in (*run.learn.model.parameters(), *run.learn.model.buffers())}
        return sum(size for place, size in kept.items() if place not in own)

    def _train_seed(self, seed):
        "Train fp32 again, with another order of the batches but for the last ones, and other random draws."
        run, early = Run(PrecisionChoice()), self.n - self.n_last
        steps = [*random.Random(seed).sample(range(early), early), *range(early, self.n)]
        self._in_fits([run], lambda: self._train(run, steps), seed)
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
        return float(np.mean(run.losses[self.n - self.n_last:self.n])) if run.runs else math.nan

    def _row(self, run):
        ratios = run.ratios(self.base)
        mid, low, high = speed_up(ratios)
        loss = self._loss(run)
        return {'mode': run.choice.name, 'support': run.support, 'steps': len(run.losses), 'turns': len(ratios),
                'ms per step': 1000 * self.base.pace / mid, 'speed-up': mid, 'speed-up low': low, 'speed-up high': high,
                'loss': loss, 'loss difference': loss - self._loss(self.base), 'skipped': run.skipped,
                'final scale': run.scale, 'activations MB': run.activations / 1e6, 'peak MB': run.peak / 1e6,
                'weights moved': run.moved / max(1, len(run.losses)),
                'compile s': run.compiling, 'note': run.note}

    def _notes(self):
        notes = [f'Loss: mean of training steps {self.n - self.n_last + 1} to {self.n} on {self.device}.',
                 *left_out(self.learn)]
        if settings := settings_note(): notes.append(f'{settings}; this is what is called fp32 here.')
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
            found.append(f'Page faults of freshly allocated memory: {faults:,.0f} in a step of {name}, which may take '
                         f'up to {min(.99, faults * _FAULT / pace):.0%} of it. Call `keep_freed_memory()`, which '
                         'avoids them, and compare again.')
        return found

    def _on_a_fit(self, table, recommended):
        "Say what a whole fit gains, where drawing the batches takes a considerable part of a step."
        step, low = (table['ms per step'][name] / 1000 for name in ('fp32', recommended))
        if recommended == 'fp32' or self.loading < _CONSIDERABLE * step: return []
        # Workers draw the next batches while the model trains.
        dl = self.learn.dls.train
        together = max if getattr(dl, 'fake_l', dl).num_workers else float.__add__
        gain = together(self.loading, step) / together(self.loading, low)
        return [f"Drawing a batch takes {1000 * self.loading:.3g} ms beside fp32's step of {1000 * step:.3g}: a fit in "
                f'{recommended} is about {gain:.2f} times as fast, not {step / low:.2f}.']

