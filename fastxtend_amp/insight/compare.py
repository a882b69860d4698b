"Runs a comparison: trains copies of one learner in several precisions, in turns."
from __future__ import annotations

import math, random, time, warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import pandas as pd
import torch
from fastai.callback.core import Callback
from fastai.learner import Learner

from ..checks import check_count, check_seconds
from ..common import random_state_kept
from ..fp32_modules import unwrapped
from ..mode import mode_support, training_device
from .comparison import PrecisionComparison
from .copies import check_learner, left_out
from .precisions import PrecisionChoice, choices_from
from .progress import Progress
from .recommend import Tolerance, recommend, remarks_on
from .trainings import Batches, Run, mean_of_last

__all__ = ['compare']

_OF_COPIES = ('.*emulated', 'No optimizer step was taken', 'The gradients of an accumulation')    # warnings
_TURNS = 7          # that each mode gets after the first step, which warms up
_FEW = 8            # an emulated mode sees one sample in so many, and 4 at least


def compare(learn: Learner, modes: Any, n_steps: int, *, lr: Any = None, n_seeds: int = 3, max_seconds: float = 60.,
            cbs: Sequence[Callback] | None = None) -> PrecisionComparison:
    "See `Learner.compare_precision`."
    choices, end = choices_from(modes), time.perf_counter()
    check_count('n_steps', n_steps, 1, ', such as 50')
    check_count('n_seeds', n_seeds, 0, ', such as 3')
    check_seconds(max_seconds)
    if cbs is not None and (strangers := [cb for cb in cbs if cb not in list(learn.cbs)]):
        are = 'is' if len(strangers) == 1 else 'are'
        raise ValueError(f"cbs={list(cbs)!r} cannot be used: {strangers} {are} not among the learner's callbacks. "
                         "Pass some of `learn.cbs`.")
    check_learner(learn, 'compare_precision')
    with random_state_kept(), warnings.catch_warnings(), ExitStack() as stack:
        for said in _OF_COPIES: warnings.filterwarnings('ignore', message=said)   # the table says so
        progress = Progress(learn, float(max_seconds))
        stack.callback(progress.close)
        work = _Comparison(learn, n_steps, lr, n_seeds, end, max_seconds, cbs, progress)
        return work.run(choices)


class _Comparison:
    "The work behind `compare`."
    def __init__(self, learn, n_steps, lr, n_seeds, start, max_seconds, cbs, progress):
        self.learn, self.n_steps, self.lr, self.n_seeds, self.cbs = learn, n_steps, lr, n_seeds, cbs
        self.start, self.max_seconds, self.progress, self.device = start, max_seconds, progress, training_device(learn)

    def run(self, choices: list[PrecisionChoice]) -> PrecisionComparison:
        self.batches = Batches(self.learn, self.n_steps, self.device, self.start + self.max_seconds / 4)
        self.runs, self.seeds = self._planned(choices), list[Run]()
        self.progress.expect(self.n_steps * (sum(r.can_go_on for r in self.runs) + self.n_seeds))
        for group in self._groups(): self._train_in_turns(group)
        while len(self.seeds) < self.n_seeds and self._train_seed(len(self.seeds) + 1): pass
        return self._result()

    def _planned(self, choices) -> list[Run]:
        "Return the trainings; an emulated mode sees a part of each batch, and fp32 once more the same part."
        runs, n = [], self.batches.n_samples
        few = max(4, n // _FEW) if self.batches.can_be_cut else n
        for choice in choices:
            status, why = mode_support(choice.mode, self.device) if choice.mode else ('native', '')
            runs.append(Run(choice, status, why if status == 'unsupported' else ''))
        slow = [r for r in runs if r.support == 'emulated']
        for r in runs: r.measure = runs[0]
        if not slow or few >= n: return runs
        measure = Run(PrecisionChoice(), samples=few)
        for r in slow:
            r.samples, r.measure = few, measure
            r.note = f'emulated, so it saw {few} of the {n} samples of each batch; compared to fp32 on the same samples'
        return [*(r for r in runs if r not in slow), measure, *slow]

    def _groups(self) -> list[list[Run]]:
        "Return the runs that take turns: all, if weights, gradients and two moments of each fit into half of CUDA's."
        if self.device.type != 'cuda': return [self.runs]
        size = sum(p.numel() * p.element_size() for p in self.learn.model.parameters())
        fit = 4 * size * (len(self.runs) + 1) < torch.cuda.mem_get_info(self.device)[0] / 2
        return [self.runs] if fit else [[r] for r in self.runs]

    def _train_in_turns(self, group: list[Run]) -> None:
        with ExitStack() as copies:
            for run in group: self._try(run, self._begin, run, copies)
            for run in group: self._try(run, self._turn, run, range(1))
            feasible = self._left / max(sum(r.seconds for r in group), 1e-9)
            size = max(1, math.ceil(min(self.n_steps - 1, feasible) / _TURNS))
            for i, first in enumerate(range(1, self.n_steps, size)):
                k, steps = i % len(group), range(first, min(first + size, self.n_steps))
                for run in group[k:] + group[:k]: self._try(run, self._turn, run, steps)   # each starts in turn
            for run in group:
                if run.can_go_on and len(run.losses) < self.n_steps:
                    cut = f'cut short after {len(run.losses)} of {self.n_steps} steps ({self._limit})'
                    run.note = f'{run.note}; {cut}' if run.note else cut
                run.end()

    def _try(self, run, f, *args) -> None:
        "An error in low precision is a result; in fp32 it is the user's to see."
        if not run.can_go_on: return
        try: f(*args)
        except Exception as e:
            if run.choice.mode is None: raise
            run.end(e)

    def _begin(self, run, copies, seed=None) -> None:
        run.begin(self.learn, self.cbs, self.lr, self.n_steps, self.device, copies, seed)

    def _turn(self, run, steps) -> None:
        if not run.losses or not self._is_over(run):
            batches = [self.batches.get(i, run.samples) for i in steps]
            def is_over(seconds): return self.progress.tick(run.name) or self._is_over(run, seconds)
            run.train(steps[0], batches, self.device, is_over)

    def _is_over(self, run, seconds=0.) -> bool:
        "Return whether the time is up: that of one seed is kept free, and emulated modes share two fifths of all."
        base = self.runs[0]
        reserve = 1.2 * (base.seconds + (seconds if run is base else 0.)) if self.n_seeds else 0.
        slow = [r for r in self.runs if r.support == 'emulated']
        return self._left < reserve or (run in slow and run.seconds + seconds > .4 * self.max_seconds / len(slow))

    @property
    def _left(self) -> float: return self.start + self.max_seconds - time.perf_counter()
    @property
    def _limit(self) -> str: return f'`max_seconds={self.max_seconds:g}`'

    def _train_seed(self, seed: int) -> bool: # Whether there was time
        "Train fp32 again, with another order of the batches but for the last ones, and other random draws."
        base, run = self.runs[0], Run(PrecisionChoice())
        n = len(base.losses)
        order = [*random.Random(seed).sample(range(n - self._n_last), n - self._n_last), *range(n - self._n_last, n)]
        if self._left < base.seconds: return False
        with ExitStack() as copies:
            self._begin(run, copies, seed)
            run.train(0, map(self.batches.get, order), self.device,
                      lambda _: self.progress.tick(f'fp32, seed {seed}'))
            run.end()
        self.seeds.append(run)
        return True

    # -- what came of it

    @property
    def _n_last(self) -> int:
        "The loss of a training is the mean of so many last steps."
        return max(1, min(10, len(self.runs[0].losses) // 5))

    def _result(self) -> PrecisionComparison:
        base, n = self.runs[0], self._n_last
        tolerance = Tolerance(base.losses[-n:], [mean_of_last(r.losses, n) for r in self.seeds])
        rows = [r.row(n, self.batches.n_samples) for r in self.runs]
        table = pd.DataFrame(rows).set_index('mode')
        table['data'], table['seed spread'] = self.batches.seconds, tolerance.spread
        choices = {r.name: r.choice for r in self.runs if r is base or r.choice.mode}
        calls = {r.name: r.call for r in self.runs if r.name in choices}
        recommended, reason = recommend(table, tolerance, calls)
        notes = [*self._how_measured(tolerance), *remarks_on(table.loc[recommended], base.fused, self.device)]
        return PrecisionComparison(table, {r.name: r.losses for r in self.runs}, [r.losses for r in self.seeds],
                                   _device_name(self.device), recommended, reason, notes, calls, choices, self.learn)

    def _how_measured(self, tolerance) -> list[str]:
        n, n_seeds, left = len(self.runs[0].losses), len(self.seeds), left_out(self.learn, self.cbs)
        spread = (f'; its standard deviation over {n_seeds + 1} fp32 trainings that differ in the order of batches and '
                  f'in random draws is {tolerance.spread:.2g}') if n_seeds else ''
        notes = [f'Loss: mean of the last {self._n_last} of {n} training steps{spread}.']
        if n_seeds < self.n_seeds:
            notes.append(f'For {self.n_seeds - n_seeds} of {self.n_seeds} seeds there was no time ({self._limit}).')
        if len(self.batches.all) < n: notes.append(f'The steps took {len(self.batches.all)} batches in turn.')
        if unwrapped(self.learn.model) is not self.learn.model:
            notes.append('The model ran without its wrapper (torch.compile, data parallelism).')
        if left: notes.append(f"These callbacks took no part: {', '.join(left)}.")
        return notes


def _device_name(device: torch.device) -> str:
    if device.type == 'cuda': return f'{device} ({torch.cuda.get_device_name(device)})'
    n = torch.get_num_threads()
    return f"{device} ({n} thread{'s' * (n != 1)})" if device.type == 'cpu' else str(device)
