"The comparison: trains copies of one learner in several precisions, a few steps each in turn, timed."
from __future__ import annotations

import math, random, re, time, warnings, weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from fastai.callback.core import Callback
from fastai.learner import Learner
from fastai.torch_core import set_seed, to_device

from ..callback import precision_callback
from ..common import first_line
from ..convert import map_tensors, tensors
from ..mode import mode_support, training_device
from .comparison import PrecisionComparison, Tolerance, recommend
from .copies import (
    check_learner,
    copied_learner,
    left_out,
    loader_like,
    random_state,
    random_state_kept,
    set_random_state,
)
from .precisions import PrecisionChoice, call_for, choices_from, use_choice
from .progress import Progress, TimeIsUp, check_count, check_seconds

__all__ = ['compare']

LIMIT = 2**29           # bytes of batches that are held; further steps take the same ones again
_TURNS = 7              # that each mode gets after the first step, which warms up
_EMULATED = .2          # of the time, for an emulated mode
_OF_COPIES = ('.*emulated', 'No optimizer step was taken', 'The gradients of an accumulation')    # warnings


def compare(learn: Learner, modes: Any, n_steps: int, lr: Any, n_seeds: int, max_seconds: float,
            cbs: Sequence[Callback] | None) -> PrecisionComparison:
    "See `Learner.compare_precision`."
    choices = choices_from(modes)
    check_count('n_steps', n_steps, 1, ', such as 50')
    check_count('n_seeds', n_seeds, 0, ', such as 3')
    check_seconds(max_seconds)
    if cbs is not None and (strangers := [cb for cb in cbs if cb not in list(learn.cbs)]):
        raise ValueError(f"cbs={list(cbs)!r} cannot be used: not among the learner's callbacks are {strangers}.\n"
                         'Pass some of `learn.cbs`.')
    check_learner(learn, 'compare_precision')
    progress = Progress(learn, float(max_seconds))
    try:
        with random_state_kept(), warnings.catch_warnings():
            for said in _OF_COPIES: warnings.filterwarnings('ignore', message=said)   # the table says so
            return _Comparison(learn, n_steps, lr, n_seeds, cbs, progress).run(choices)
    finally: progress.close()


@dataclass
class Run:
    "One training: its precision, the copy that trains in it, and what was measured."
    choice: PrecisionChoice
    support: str = 'native' # 'emulated', 'unsupported' or 'failed'
    note: str = ''
    call: str = '' # The call that trains in it
    learn: Any = None # The copy, while it trains
    random_state: Any = None # Where the copy's random draws go on
    losses: list[float] = field(default_factory=list) # Of each step
    times: list[float] = field(default_factory=list) # Seconds of a step in each turn
    seconds: float = 0. # Of all turns
    skipped: int = 0
    scale: float = math.nan # The loss scale at the end

    @property
    def pace(self) -> float: return float(np.median(self.times[1:] or self.times))   # the first turn warms up


class _Comparison:
    "The work behind `compare`."
    def __init__(self, learn, n_steps, lr, n_seeds, cbs, progress):
        self.learn, self.n_steps, self.lr, self.n_seeds, self.cbs = learn, n_steps, lr, n_seeds, cbs
        self.progress, self.device, self.seeds = progress, training_device(learn), list[Run]()
        self.batches, self.random_state = _draw(learn, n_steps, self.device, progress), random_state(everything=True)
        self.runs, self.share = list[Run](), _EMULATED * progress.max_seconds

    def run(self, choices: list[PrecisionChoice]) -> PrecisionComparison:
        for choice in choices:
            status, why = mode_support(choice.mode, self.device) if choice.mode else ('native', '')
            self.runs.append(Run(choice, status, why if status == 'unsupported' else '', f'learn.to_{choice.name}()'))
        self.base = self.runs[0]
        with ExitStack() as copies: self._train_in_turns(copies)
        self.n = len(self.base.losses)
        self.n_last = max(1, min(10, self.n // 5))               # the loss is the mean of so many last steps
        while len(self.seeds) < self.n_seeds and (not self.seeds or self.progress.left > self.n * self.base.pace):
            self._train_seed(1 + len(self.seeds))
        return self._result()

    def _train_in_turns(self, copies):
        """Train all, a few steps each in turn, as long as the time left is enough for the next turns and a seed.

        So all train the same number of steps, but for an emulated mode, which ends when its share of the time is over.
        """
        for run in self.runs:
            if run.support != 'unsupported': self._try(run, self._start, run, copies)
        size, steps = 1, range(1, min(2, self.n_steps))          # the second step tells how long one takes
        while steps:
            for run in self._training:
                if run.support == 'emulated' and run.seconds + len(steps) * run.pace > self.share: self._end(run)
            pace, seed = sum(r.pace for r in self._training), self.base.pace * bool(self.n_seeds)
            if self.progress.left < len(steps) * pace + steps.stop * seed: break
            for run in self._training[::(-1) ** len(self.base.times)]: self._try(run, self._train, run, steps)
            if steps == range(1, 2):
                feasible = self.progress.left / (pace + seed)
                size = max(1, math.ceil(min(self.n_steps - 2, feasible) / _TURNS))
                self.progress.expect((self.n_steps - 2) // size + self.n_seeds)
            self.progress.tick()
            steps = range(steps.stop, min(steps.stop + size, self.n_steps))
        for run in self._training: self._end(run)

    @property
    def _training(self): return [r for r in self.runs if r.learn is not None]

    def _try(self, run, f, *args):
        "Call `f`. An error in low precision is a result; in fp32, and when memory ends, it is the user's to see."
        try: f(*args)
        except TimeIsUp: run.learn, run.skipped = None, 0
        except Exception as e:
            if run is self.base or isinstance(e, torch.OutOfMemoryError): raise
            run.learn, run.support, run.skipped, run.note = None, 'failed', 0, _reason_of(e)

    def _start(self, run, copies):
        "Train the first step, which warms up; in an emulated mode it may take more time than there is."
        self._begin(run, copies)
        with _limited(self.share) if run.support == 'emulated' else nullcontext():
            self._train(run, range(1))

    def _begin(self, run, copies, seed=None):
        "Copy the learner, ready for its first step; the copy is removed with `copies`."
        copy = copies.enter_context(copied_learner(self.learn, self.cbs, optimizer=True, precision=True))
        if (cb := use_choice(copy, run.choice)) is not None:
            run.call, run.skipped = str(call_for(copy, run.choice)), -cb.n_skipped
            cb.on_overflow = 'ignore'                            # a diagnosis would disturb the times; the table tells
        set_random_state(self.random_state)
        if seed is not None: set_seed(seed)
        if not copy.opt: copy.create_opt()
        lr, wd = copy.lr if self.lr is None else self.lr, {} if copy.wd is None else {'wd': copy.wd}
        copy.opt.set_hypers(lr=lr, **wd)
        copy.n_epoch, copy.epoch, copy.n_iter, copy.dl = 1, 0, self.n_steps, copy.dls.train
        for event in ('before_fit', 'before_epoch', 'before_train'): copy(event)
        run.learn, run.random_state = copy, random_state(everything=True)

    def _train(self, run, steps):
        "Train on the batches of these steps, timed."
        losses = []
        set_random_state(run.random_state)
        wait_for(self.device)
        start = time.perf_counter()
        for i, step in enumerate(steps, len(run.losses)):
            # a copy of the batch: callbacks such as CutMix write into it
            run.learn.one_batch(i, map_tensors(torch.Tensor.clone, self.batches[step % len(self.batches)]))
            if not len(run.learn.yb):
                raise ValueError("The learner's training batches have no targets, so there is no loss to compare. Does "
                                 "`learn.dls.n_inp` leave one?")
            losses.append(run.learn.loss.detach())
        wait_for(self.device)
        seconds = time.perf_counter() - start
        run.seconds += seconds
        run.times.append(seconds / len(losses))
        run.losses += map(float, losses)
        run.random_state = random_state(everything=True)

    def _end(self, run):
        for event in ('after_train', 'after_fit'): run.learn(event)
        if cb := precision_callback(run.learn):
            run.scale, run.skipped = cb.scale or math.nan, run.skipped + cb.n_skipped
        run.learn = None

    def _train_seed(self, seed):
        "Train fp32 again, with another order of the batches but for the last ones, and other random draws."
        run, early = Run(PrecisionChoice()), self.n - self.n_last
        with ExitStack() as copies:
            self._begin(run, copies, seed)
            self._train(run, [*random.Random(seed).sample(range(early), early), *range(early, self.n)])
            self._end(run)
        self.seeds.append(run)
        self.progress.tick()

    # -- what came of it

    def _result(self):
        tolerance = Tolerance(self.base.losses[-self.n_last:], [self._loss(r) for r in self.seeds])
        table = pd.DataFrame(map(self._row, self.runs)).set_index('mode')
        calls = {r.choice.name: r.call for r in self.runs}
        return PrecisionComparison(
            table, {r.choice.name: r.losses for r in self.runs}, [r.losses for r in self.seeds],
            str(self.device), *recommend(table, tolerance, calls), calls, self._notes(tolerance.spread),
            {r.choice.name: r.choice for r in self.runs}, weakref.ref(self.learn))

    def _loss(self, run): # nan for a training that saw fewer batches than fp32's
        return float(np.mean(run.losses[-self.n_last:])) if len(run.losses) == self.n else math.nan

    def _row(self, run):
        times, measure = (r.times[1:] or r.times or [math.nan] for r in (run, self.base))
        low, mid, high = np.percentile([b / a for a, b in zip(times, measure)], (25, 50, 75))
        n, loss = len(run.losses), self._loss(run)
        if run.support == 'emulated' and n < self.n:
            run.note = (f'cut short after {n} of {self.n} steps, so its loss is not compared: an emulated mode has '
                        f'{_EMULATED:.0%} of the time')
        return {'mode': run.choice.name, 'support': run.support, 'steps': n, 'turns': len(run.times),
                'ms per step': 1000 * np.median(times), 'speed-up': mid, 'speed-up q1': low, 'speed-up q3': high,
                'loss': loss, 'loss difference': loss - self._loss(self.base), 'skipped': run.skipped,
                'final scale': run.scale, 'note': run.note}

    def _notes(self, spread):
        n_seeds, limit = len(self.seeds), f'(`max_seconds={self.progress.max_seconds:g}`).'
        about = (f'; its standard deviation over {n_seeds + 1} fp32 trainings that differ in the order of batches and '
                 f'in random draws is {spread:.2g}') if n_seeds else ''
        notes = [f'Loss: mean of the last {self.n_last} of {self.n} training steps{about}.']
        if self.n < self.n_steps: notes.append(f'There was time for {self.n} of {self.n_steps} steps {limit}')
        if n_seeds < self.n_seeds: notes.append(f'There was time for {n_seeds} of {self.n_seeds} seeds {limit}')
        if len(self.batches) < self.n: notes.append(f'The steps took {len(self.batches)} batches in turn.')
        if left := left_out(self.learn, self.cbs): notes.append(f"These callbacks took no part: {', '.join(left)}.")
        return notes


def _limited(seconds: float) -> AbstractContextManager:
    "Return a context that raises `TimeIsUp` after so many seconds, at the next tensor that autograd saves or takes."
    end = time.monotonic() + seconds
    def check(t):
        if time.monotonic() > end: raise TimeIsUp
        return t
    return torch.autograd.graph.saved_tensors_hooks(check, check)


def _draw(learn: Learner, n: int, device: torch.device, progress: Progress) -> list[Any]:
    "Draw `n` training batches, as many as come in a quarter of the time and fit into 512 MB; `ValueError` for none."
    found, dl, size = list[Any](), loader_like(learn.dls.train), 0
    for b in (b for _ in range(n) for b in dl):                  # the batches come again when an epoch is over
        found.append(to_device(b, device))
        size += sum(t.numel() * t.element_size() for t in tensors(b, floating=False))
        if len(found) == n or size > LIMIT or progress.left < .75 * progress.max_seconds: break
    if not found:
        raise ValueError("The learner's training dataloader (`learn.dls.train`) gives no batches, so there is nothing "
                         "to train on.\nWith `drop_last=True` its dataset may be smaller than one batch.")
    return found


def wait_for(device: torch.device) -> None:
    "Let the device finish, so that the clock sees its work."
    if device.type == 'xla':
        import torch_xla.core.xla_model as xm
        xm.mark_step()
        xm.wait_device_ops()
    elif device.type != 'cpu': torch.accelerator.synchronize(device)


def _reason_of(error: Exception) -> str:
    "Return what went wrong, without the event that fastai names before it."
    text = re.sub(r'(Exception occur+ed in `[^`]*` when calling event `[^`]*`:\s*)+', '', str(error))
    line = first_line(ValueError(text), 400)
    return line if isinstance(error, ValueError) else f'{type(error).__name__}: {line}'
