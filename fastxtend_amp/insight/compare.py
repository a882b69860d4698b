"The comparison: trains copies of one learner in several precisions, a few steps each in turn, timed."
from __future__ import annotations

import math, random, time, warnings
from contextlib import ExitStack
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

import numpy as np
import pandas as pd
import torch
from fastai.learner import Learner
from fastai.torch_core import set_seed, to_device

from ..callback import precision_callback
from ..common import training_device
from ..convert import map_tensors
from ..mode import AMPMode, mode_support
from ..scaling import optimizer_params
from .comparison import PrecisionComparison, Tolerance, recommend
from .copies import (
    RandomState,
    begin_fit,
    check_learner,
    copied_learner,
    left_out,
    loader_like,
    random_state,
    random_state_kept,
    set_random_state,
    tensors,
)
from .precisions import PrecisionChoice, call_for, choices_from, default_choices, use_choice
from .progress import Progress, check_above_0, check_count

__all__ = ['compare']

LIMIT = 2**29           # bytes of batches that are held; further steps take the same ones again
_TURNS = 7              # that each mode gets after the first step, which warms up
# Warnings of copies; the last is fastai's of a GAN's callbacks.
_OF_COPIES = ('.*emulated', 'No optimizer step was taken', 'The gradients of an accumulation', 'You are shadowing')


def compare(learn: Learner, modes: Any, n_steps: int, lr: float | slice | None, n_seeds: int,
            max_seconds: float) -> PrecisionComparison:
    "See `Learner.compare_precision`."
    choices = default_choices(learn) if modes is None else choices_from(modes)
    check_count('n_steps', n_steps, 1)
    check_count('n_seeds', n_seeds, 0)
    check_above_0('max_seconds', max_seconds, '60')
    if lr is not None and not isinstance(lr, slice): check_above_0('lr', lr, '1e-3, or a slice of two')
    check_learner(learn, 'compare_precision')
    if len(choices) == 1: n_steps = 1                            # fp32 alone has nothing to be compared with
    progress = Progress(learn, n_steps + n_seeds, max_seconds)
    try:
        with random_state_kept(), warnings.catch_warnings():
            for said in _OF_COPIES: warnings.filterwarnings('ignore', message=said)   # the table says so
            return _Comparison(learn, n_steps, lr, n_seeds, progress).run(choices)
    finally: progress.close()


@dataclass
class Run:
    "One training: its precision, the copy that trains in it, and what was measured."
    choice: PrecisionChoice
    support: str = 'native' # 'emulated', 'unsupported' or 'failed'
    note: str = ''
    learn: Learner | None = None # The copy, while it trains
    random_state: RandomState = field(default_factory=list) # Where the copy's random draws go on
    losses: list[float] = field(default_factory=list) # Of each step
    times: list[float] = field(default_factory=list) # Seconds of a step in each turn
    skipped: int = 0
    scale: float = math.nan # The loss scale at the end

    @property
    def timed(self) -> list[float]: return self.times[1:] or self.times or [math.nan]   # the first turn warms up
    @property
    def pace(self) -> float: return float(np.median(self.timed))


class _Comparison:
    "The work behind `compare`."
    def __init__(self, learn, n_steps, lr, n_seeds, progress):
        self.learn, self.n_steps, self.lr, self.n_seeds, self.progress = learn, n_steps, lr, n_seeds, progress
        self.device, self.runs, self.seeds = training_device(learn), list[Run](), list[Run]()
        self.batches, self.random_state = _draw(learn, n_steps, self.device, progress), random_state(everything=True)

    def run(self, choices: list[PrecisionChoice]) -> PrecisionComparison:
        for choice in choices:
            status, why = mode_support(choice.mode, self.device) if choice.mode else ('native', '')
            self.runs.append(Run(choice, status, why if status == 'unsupported' else ''))
        self.base = self.runs[0]
        with ExitStack() as copies: self._train_in_turns(copies)
        self.n = len(self.base.losses)
        self.n_last = max(1, min(10, self.n // 5))               # the loss is the mean of so many last steps
        while len(self.seeds) < self.n_seeds and (not self.seeds or self.progress.left > self.n * self.base.pace):
            self._train_seed(1 + len(self.seeds))
        return self._result()

    def _train_in_turns(self, copies):
        "Train all, a few steps each in turn, while the time left is enough for the next turn of all and for a seed."
        for run in self.runs:
            if run.support != 'unsupported': self._try(run, self._begin, run, copies)
        done, size = 0, 1                                        # the second step shows how long one takes
        while done < self.n_steps:
            steps = range(done, min(done + size, self.n_steps))
            # Forth and back, so that no mode always comes after the same one.
            for run in self._training[::(-1) ** len(self.base.times)]: self._try(run, self._train, run, steps)
            done = steps.stop
            self.progress.update(done)
            pace, seed = sum(r.pace for r in self._training), self.base.pace * bool(self.n_seeds)
            if done == 2:
                feasible = self.progress.left / (pace + seed)
                size = max(1, math.ceil(min(self.n_steps - done, feasible) / _TURNS))
            if self.progress.left < size * pace + (done + size) * seed: break
        for run in self._training: self._end(run)

    @property
    def _training(self): return [r for r in self.runs if r.learn is not None]

    def _try(self, run, f, *args):
        "Call `f`. An error in low precision is a result; in fp32, and when memory ends, it is the user's to see."
        try: f(*args)
        except Exception as e:
            if run is self.base or isinstance(e, torch.OutOfMemoryError): raise
            said = shorten(str(e).rpartition(':\n\t')[2], 400, placeholder=' …')   # the last line has the way out
            run.learn, run.support, run.note = None, 'failed', f'{type(e).__name__}: {said}'

    def _begin(self, run, copies, seed=None):
        "Copy the learner, ready for its first step; the copy is removed with `copies`."
        copy = copies.enter_context(copied_learner(self.learn, optimizer=True, precision=True))
        cb = use_choice(copy, run.choice)
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
        begin_fit(copy, self.n_steps)
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
        run.times.append((time.perf_counter() - start) / len(losses))
        run.losses += map(float, losses)
        run.random_state = random_state(everything=True)

    def _end(self, run):
        for event in ('after_train', 'after_fit'): run.learn(event)
        if cb := precision_callback(run.learn): run.scale, run.skipped = cb.scale or math.nan, cb.n_skipped
        run.learn = None

    def _train_seed(self, seed):
        "Train fp32 again, with another order of the batches but for the last ones, and other random draws."
        run, early = Run(PrecisionChoice()), self.n - self.n_last
        with ExitStack() as copies:
            self._begin(run, copies, seed)
            self._train(run, [*random.Random(seed).sample(range(early), early), *range(early, self.n)])
            self._end(run)
        self.seeds.append(run)
        self.progress.update(self.n_steps + seed)

    # -- the result

    def _result(self):
        table = pd.DataFrame(map(self._row, self.runs)).set_index('mode')
        tolerance = Tolerance(self.base.losses[-self.n_last:], list(map(self._loss, self.seeds)))
        recommended, reason = recommend(table, tolerance)
        if len(self.runs) == 1:
            bf16, fp16 = (mode_support(m, self.device).status for m in (AMPMode.BF16, AMPMode.FP16))
            reason = 'Nothing else was compared.'
            if not bf16 == fp16 == 'native':
                reason += (f' On this device bf16 is {bf16} and fp16 is {fp16}: '
                           "`learn.compare_precision(['bf16', 'fp16'])` compares them all the same.")
        choices = {r.choice.name: r.choice for r in self.runs}
        calls = {name: str(call_for(self.learn, choice)) for name, choice in choices.items()}
        return PrecisionComparison(table, {r.choice.name: r.losses for r in self.runs}, [r.losses for r in self.seeds],
                                   recommended, reason, calls, self._notes(tolerance), choices)

    def _loss(self, run): # nan for a mode that failed
        return float(np.mean(run.losses[-self.n_last:])) if len(run.losses) == self.n else math.nan

    def _row(self, run):
        low, mid, high = np.percentile([b / a for a, b in zip(run.timed, self.base.timed)], (25, 50, 75))
        loss = self._loss(run)
        return {'mode': run.choice.name, 'support': run.support, 'steps': len(run.losses), 'turns': len(run.times),
                'ms per step': 1000 * run.pace, 'speed-up': mid, 'speed-up q1': low, 'speed-up q3': high,
                'loss': loss, 'loss difference': loss - self._loss(self.base), 'skipped': run.skipped,
                'final scale': run.scale, 'note': run.note}

    def _notes(self, tolerance):
        n_seeds = len(self.seeds)
        seeds = f' and {n_seeds} of {self.n_seeds} seeds' * bool(self.n_seeds)
        about = (f'; its standard deviation over {n_seeds + 1} fp32 trainings that differ in the order of batches and '
                 f'in random draws is {tolerance.spread:.2g}') if tolerance.spread > 0 else ''
        notes = [f'Loss: mean of the last {self.n_last} of {self.n} training steps on {self.device}{about}.']
        if self.n < self.n_steps or n_seeds < self.n_seeds:
            notes.append(f'There was time for {self.n} of {self.n_steps} steps{seeds} '
                         f'(`max_seconds={self.progress.max_seconds:g}`).')
        if len(self.batches) < self.n: notes.append(f'The steps took {len(self.batches)} batches in turn.')
        if left := left_out(self.learn): notes.append(f"These callbacks took no part: {', '.join(left)}.")
        return notes


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
