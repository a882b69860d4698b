"Runs a comparison: trains copies of one learner in several precisions, in turns, and times them."
from __future__ import annotations

import math, random, re, time, warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pandas as pd
import torch
from fastai.callback.core import Callback
from fastai.learner import Learner
from fastai.torch_core import to_device

from ..checks import check_count, check_seconds
from ..common import first_line, random_state, random_state_kept, set_random_state
from ..convert import map_tensors
from ..fp32_modules import unwrapped
from ..mode import mode_support, training_device
from .comparison import PrecisionComparison
from .recommend import Tolerance, recommend
from .copies import check_learner, copied_learner, left_out, loader_like
from .phases import StepClock, page_faults
from .precisions import PrecisionChoice, choices_from, use_choice
from .progress import Progress
from .remarks import fused_name, remarks_on
from .values import tensors

__all__ = ['compare']

LIMIT = 2**29       # bytes of batches that are held; further steps take the same ones again
_OF_COPIES = ('.*emulated', 'No optimizer step was taken', 'The gradients of an accumulation')    # warnings
_TURNS = 7          # that each mode gets after the first step, which warms up
_FEW = 8            # an emulated mode sees one sample in so many, and 4 at least


class Run:
    "One training: its precision, the copy that trains in it, and what was measured."
    def __init__(self, choice: PrecisionChoice, support: str = 'native', note: str = '', name: str = ''):
        self.choice, self.support, self.note, self.name = choice, support, note, name or choice.name
        self.samples: int | None = None                          # how many of each batch it sees; all if None
        self.order: Sequence[int] = ()                           # the batches; as they come if empty
        self.base: Run = self                                    # fp32 on the same samples
        self.copy: Any = None                                    # the learner
        self.cb: Any = None                                      # its precision callback
        self.call, self.random_state, self.clock = f'learn.to_{self.name}()', random_state(), StepClock()
        self.n_before = 0                                        # steps that had been skipped before
        self.losses: list[float] = []
        self.speeds: list[float] = []                            # samples per second in each turn
        self.seconds, self.faults, self.peak = 0., 0, math.nan   # peak: bytes
        self.done = support == 'unsupported'

    @property
    def per_step(self) -> float: return self.seconds / max(1, len(self.losses))


def compare(learn: Learner, modes: Any, n_steps: int, *, lr: Any = None, n_seeds: int = 3, max_seconds: float = 60.,
            cbs: Sequence[Callback] | None = None) -> PrecisionComparison:
    "See `Learner.compare_precision`."
    choices = choices_from(modes)
    check_count('n_steps', n_steps, 1, ', such as 50')
    check_count('n_seeds', n_seeds, 0, ', such as 3')
    check_seconds(max_seconds)
    if cbs is not None and (strangers := [cb for cb in cbs if cb not in list(learn.cbs)]):
        are = 'is' if len(strangers) == 1 else 'are'
        raise ValueError(f"cbs={list(cbs)!r} cannot be used: {strangers} {are} not among the learner's callbacks. "
                         "Pass some of `learn.cbs`.")
    check_learner(learn, 'compare_precision')
    with random_state_kept(everything=True), warnings.catch_warnings():
        for said in _OF_COPIES: warnings.filterwarnings('ignore', message=said)   # the table says so
        return _Comparison(learn, choices, n_steps, lr, n_seeds, max_seconds, cbs).run()


class _Comparison:
    "The work behind `compare`."
    def __init__(self, learn, choices, n_steps, lr, n_seeds, max_seconds, cbs):
        self.start = time.perf_counter()
        self.learn, self.n_steps, self.lr, self.n_seeds, self.max_seconds = learn, n_steps, lr, n_seeds, max_seconds
        self.end, self.cbs, self.device = self.start + max_seconds, cbs, training_device(learn)
        self.fused_name: str | None = None                       # of the optimizer that would take less time
        supports = [(c, *(mode_support(c.mode, self.device) if c.mode else ('native', ''))) for c in choices]
        self.runs = [Run(c, status, why if status == 'unsupported' else '') for c, status, why in supports]
        self.seeds: list[Run] = []

    def run(self) -> PrecisionComparison:
        self.progress = Progress(self.learn, float(self.max_seconds))
        try:
            self._draw()
            self._plan_emulated()
            self.progress.expect(self.n_steps * (sum(not r.done for r in self.runs) + self.n_seeds))
            for group in self._groups(): self._train(group)
            for seed in range(1, self.n_seeds + 1): self._train_seed(seed)
        finally: self.progress.close()
        return self._result()

    # -- batches

    def _draw(self):
        "Draw batches, so many as are wanted, fit and come in a quarter of the time; each step gets a copy of one."
        dl, self.batches, times, n_bytes = loader_like(self.learn.dls.train), [], [], 0
        def sizes(b): return [t.numel() * t.element_size() for t in _all_tensors(b)]
        while len(self.batches) < self.n_steps:
            n, then = len(self.batches), time.perf_counter()
            for b in dl:
                self.batches.append(to_device(b, self.device))
                self._wait()
                times.append(time.perf_counter() - then)
                n_bytes += sum(sizes(b))
                is_full = n_bytes * (1 + 1 / len(self.batches)) > LIMIT
                if len(self.batches) == self.n_steps or is_full or self._time_left() < .75 * self.max_seconds: break
                then = time.perf_counter()
            if not self.batches:
                raise ValueError("The learner's training dataloader (`learn.dls.train`) gives no batches, so there is "
                                 "nothing to train on.\n"
                                 "With `drop_last=True` its dataset may be smaller than one batch.")
            if len(self.batches) == n or is_full or self._time_left() < .75 * self.max_seconds: break
        self.data_seconds = float(np.median(times[1:] or times))
        self.n_samples = len(_all_tensors(self.batches[0])[0])

    def _batch(self, run, step):
        "A copy, since callbacks such as CutMix write into it."
        i = run.order[step] if len(run.order) else step
        return map_tensors(lambda t: t[:run.samples].clone() if t.dim() else t.clone(),
                           self.batches[i % len(self.batches)])

    # -- what is planned

    def _plan_emulated(self):
        "An emulated mode gets a part of each batch, and fp32 trains on that part once more to be its measure."
        first, slow = self.runs[0], [r for r in self.runs if r.support == 'emulated']
        for r in self.runs: r.base = first
        few, sizes = max(4, self.n_samples // _FEW), {len(t) if t.dim() else 0 for t in _all_tensors(self.batches[0])}
        if not slow or few >= self.n_samples or len(sizes) > 1: return
        measure = Run(PrecisionChoice(), name=f'fp32, {few} samples')
        for r in (measure, *slow): r.samples, r.base = few, measure
        for r in slow: r.note = (f'emulated, so it saw {few} of the {self.n_samples} samples of each batch; compared '
                                 'to fp32 on the same samples')
        self.runs = [*(r for r in self.runs if r not in slow), measure, *slow]

    def _groups(self) -> list[list[Run]]:
        "The runs that take turns: all of them, if weights, gradients and two moments of each fit beside the rest."
        if self.device.type != 'cuda': return [self.runs]
        size = sum(t.numel() * t.element_size() for t in self.learn.model.parameters())
        fits = 4 * size * (len(self.runs) + 1) < torch.cuda.mem_get_info(self.device)[0] / 2
        return [self.runs] if fits else [[r] for r in self.runs]

    def _time_left(self) -> float: return self.end - time.perf_counter()

    def _is_over(self, run, seconds=0.) -> bool:
        "Return whether the time is up: for a seed, for a mode beside one seed as long as fp32, or for emulation."
        if run in self.seeds or not self.n_seeds: reserve = 0.
        else: reserve = 1.1 * self.runs[0].seconds
        n_slow = sum(r.support == 'emulated' for r in self.runs)
        slow = run.support == 'emulated' and run.seconds + seconds > .4 * self.max_seconds / n_slow
        return slow or self._time_left() < reserve

    # -- trainings

    def _train(self, group: list[Run]):
        "Train the runs of a group in turns."
        with ExitStack() as copies:
            for run in group: self._try(run, self._begin, run, copies)
            for run in group: self._try(run, self._turn, run, range(1))
            if group[0] is self.runs[0]: self._say_how_long()
            feasible = max(0., self._time_left()) / max(sum(r.per_step for r in group), 1e-9)
            size = max(1, math.ceil(min(self.n_steps - 1, feasible) / _TURNS))
            for i, first in enumerate(range(1, self.n_steps, size)):
                k, steps = i % len(group), range(first, min(first + size, self.n_steps))
                for run in group[k:] + group[:k]: self._try(run, self._turn, run, steps)   # each starts in turn
            for run in group: self._finish(run)

    def _train_seed(self, seed):
        "fp32 again, with another order of the batches but for the last ones, and other random draws."
        base = self.runs[0]
        n, rng = len(base.losses), random.Random(seed)
        if self._time_left() < base.seconds: return
        run, head = Run(PrecisionChoice(), name=f'fp32, seed {seed}'), range(n - self.n_last)
        run.order = [*rng.sample(head, len(head)), *range(len(head), n)]
        self.seeds.append(run)
        with ExitStack() as copies:
            self._begin(run, copies, seed)
            self._turn(run, range(n))
        if len(run.losses) < n: self.seeds.remove(run)

    def _try(self, run, f, *args):
        "An error in low precision is a result; in fp32 it is the user's to see."
        if run.done: return
        try: f(*args)
        except Exception as e:
            if run.choice.mode is None:
                self._explain(run, e)
                raise
            run.done, run.support, run.copy = True, 'failed', None
            run.note = 'it ran out of memory' if isinstance(e, torch.OutOfMemoryError) else _reason_of(e)

    def _explain(self, run, error):
        "Raise a `ValueError` that names the callbacks without which the model may not run."
        names = left_out(self.learn, self.cbs)
        if run.losses or not names or isinstance(error, (ValueError, torch.OutOfMemoryError)): return
        raise ValueError(f"The model does not run on its first batch in fp32: {_reason_of(error)}.\n"
                         f"These callbacks took no part: {', '.join(names)}.\n"
                         "Where one prepares model or batch name it in `compare_precision(cbs=[...])`.") from error

    def _begin(self, run, copies, seed=None):
        "Copy the learner, ready for its first step."
        copy = run.copy = copies.enter_context(copied_learner(self.learn, self.cbs, optimizer=True))
        own = self.learn.precision
        run.cb = cb = use_choice(copy, run.choice, own)
        if cb is not None:
            run.call, run.n_before = cb.as_call(), cb.n_skipped
            cb.on_overflow = 'ignore'                            # a diagnosis would disturb the times; the table tells
        with random_state_kept(everything=True):
            if seed is not None: random.seed(seed); np.random.seed(seed); torch.manual_seed(seed)
            if not copy.opt: copy.create_opt()
            if copy.wd is not None: copy.opt.set_hypers(wd=copy.wd)
            copy.opt.set_hypers(lr=copy.lr if self.lr is None else self.lr)
            copy.n_epoch, copy.epoch, copy.n_iter, copy.dl = 1, 0, self.n_steps, copy.dls.train
            for event in ('before_fit', 'before_epoch', 'before_train'): copy(event)
            run.random_state = random_state(everything=True)
        self.fused_name = fused_name(copy.opt)
        run.clock.watch(copy, self.device)

    def _turn(self, run, steps):
        "Train `steps` in this precision, timed; bringing its random state in and out is not."
        if run.losses and self._is_over(run): return
        set_random_state(run.random_state)
        copy, losses, n, cuda = run.copy, [], 0, self.device.type == 'cuda'
        batches = [self._batch(run, i) for i in steps]
        self._wait()
        if cuda:
            held, before = _bytes_of(copy), torch.cuda.memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        faults, then = page_faults(), time.perf_counter()
        for i, b in zip(steps, batches):
            copy.one_batch(i, b)
            if not len(copy.yb):
                raise ValueError("The learner's training batches have no targets, so there is no loss to compare. Does "
                                 "`learn.dls.n_inp` leave one?")
            losses.append(copy.loss.detach())
            n += len(_all_tensors(b)[0])
            self.progress.tick(run.name)
            if self._is_over(run, time.perf_counter() - then): break
        self._wait()
        seconds = time.perf_counter() - then
        if cuda: run.peak = np.nanmax([run.peak, torch.cuda.max_memory_allocated(self.device) - before + held])
        run.clock.read(warm=run.speeds != [], seconds=seconds, n=len(losses))
        if run.speeds: run.faults += page_faults() - faults
        run.seconds += seconds
        run.speeds.append(n / seconds)
        run.losses += [float(l) for l in losses]
        run.random_state = random_state(everything=True)

    def _finish(self, run):
        "End the copy's fit, and note what the table takes from it."
        if len(run.losses) < self.n_steps and run.support not in ('failed', 'unsupported'):
            cut = f'cut short after {len(run.losses)} of {self.n_steps} steps (`max_seconds={self.max_seconds:g}`)'
            run.note = f'{run.note}; {cut}' if run.note else cut
        if run.copy is None: return
        for event in ('after_train', 'after_fit'): run.copy(event)
        run.copy = None

    # -- what came of it

    @property
    def n_last(self) -> int:
        "The loss of a training is the mean of so many last steps."
        return max(1, min(10, len(self.runs[0].losses) // 5))

    def _result(self) -> PrecisionComparison:
        base = self.runs[0]
        tolerance = Tolerance(base.losses[-self.n_last:], [_mean(r.losses, self.n_last) for r in self.seeds])
        table = pd.DataFrame([self._row(r, tolerance.spread) for r in self.runs]).set_index('mode')
        tried = [r for r in self.runs if r is base or r.choice.mode is not None]
        calls, choices = {r.name: r.call for r in tried}, {r.name: r.choice for r in tried}
        recommended, reason = recommend(table, tolerance, calls)
        notes = [*self._how_measured(tolerance), *remarks_on(table.loc[recommended], recommended, self.n_samples,
                                                             self.fused_name, self.device)]
        return PrecisionComparison(table, {r.name: r.losses for r in self.runs}, [r.losses for r in self.seeds],
                                   _device_name(self.device), recommended, reason, notes, calls, choices, self.learn)

    def _row(self, run, spread):
        n, base, warm = len(run.losses), run.base, run.speeds[1:] or run.speeds
        ratios = [a / b for a, b in zip(warm, base.speeds[1:] or base.speeds)]
        low, mid, high = np.percentile(ratios, (25, 50, 75)) if ratios else [math.nan] * 3
        scaled = run.cb is not None and run.choice.mode.needs_loss_scaling and n > 0
        own, same = run.losses[:len(base.losses)], base.losses[:n]
        last = min(self.n_last, len(own))
        return {'mode': run.name, 'support': run.support, 'measure': base.name, 'steps': n, 'turns': len(run.speeds),
                'samples': run.samples or self.n_samples, 'samples/s': float(np.median(warm)) if warm else math.nan,
                'speed-up': mid, 'speed-up q1': low, 'speed-up q3': high, 'peak memory': run.peak,
                'loss': _mean(run.losses, min(self.n_last, n)), 'loss difference': _mean(own, last) - _mean(same, last),
                'seed spread': spread, 'skipped': run.cb.n_skipped - run.n_before if scaled else 0,
                'final scale': run.cb.state_dict().get('scale', math.nan) if scaled else math.nan,
                'data': self.data_seconds, **run.clock.per_step(),
                'page faults': run.faults / run.clock.n if run.clock.n else math.nan, 'note': run.note}

    def _how_measured(self, tolerance):
        n, n_seeds = len(self.runs[0].losses), len(self.seeds)
        spread = (f'; its standard deviation over {n_seeds + 1} fp32 trainings that differ in the order of batches and '
                  f'in random draws is {tolerance.spread:.2g}') if n_seeds else ''
        notes = [f'Loss: mean of the last {self.n_last} of {n} training steps{spread}.']
        if n_seeds < self.n_seeds:
            notes.append(f'For {self.n_seeds - n_seeds} of {self.n_seeds} seeds there was no time '
                         f'(`max_seconds={self.max_seconds:g}`).')
        if len(self.batches) < n: notes.append(f'The steps took {len(self.batches)} batches in turn.')
        if cold := [r.name for r in self.runs if len(r.speeds) == 1]:
            notes.append(f"The speed of {' and '.join(cold)} is that of the first step, which is slow; a larger "
                         '`n_steps` leaves it out.')
        if unwrapped(self.learn.model) is not self.learn.model:
            notes.append('The model was run without the wrapper of `torch.compile` or data parallelism.')
        if names := left_out(self.learn, self.cbs): notes.append(f"These callbacks took no part: {', '.join(names)}.")
        return notes

    def _say_how_long(self):
        per_step = sum(r.per_step for r in self.runs) + self.n_seeds * self.runs[0].per_step
        seconds = time.perf_counter() - self.start + per_step * self.n_steps
        limit = f' (`max_seconds={self.max_seconds:g}`)' if seconds > self.max_seconds else ''
        self.progress.say(f'compare_precision: about {min(seconds, self.max_seconds):.0f} s{limit}')

    def _wait(self):
        "Let the device finish, so that the clock sees its work."
        if self.device.type == 'xla':
            import torch_xla.core.xla_model as xm
            xm.mark_step()
            xm.wait_device_ops()
        elif self.device.type != 'cpu': torch.accelerator.synchronize(self.device)


def _mean(losses: Sequence[float], n: int) -> float: return float(np.mean(losses[-n:])) if n and losses else math.nan


def _all_tensors(x: Any) -> list[torch.Tensor]: return tensors(x, floating=False)


def _bytes_of(learn: Learner) -> int:
    "Return what parameters, buffers, gradients and the optimizer's state take."
    params = list(learn.model.parameters())
    held = [*params, *(p.grad for p in params), *learn.model.buffers(), *_all_tensors(list(learn.opt.state.values()))]
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in held if t is not None}.values())


def _reason_of(error: BaseException) -> str:
    "Return what went wrong, without the event that fastai names before it."
    text = str(error)
    wrapper = re.compile(r'Exception occur+ed in `[^`]*` when calling event `[^`]*`:\s*')
    while (found := wrapper.match(text)): text = text[found.end():]
    line = first_line(ValueError(text), 400) if text else type(error).__name__
    return line if isinstance(error, ValueError) else f'{type(error).__name__}: {line}'


def _device_name(device: torch.device) -> str:
    if device.type == 'cuda': return f'{device} ({torch.cuda.get_device_name(device)})'
    n = torch.get_num_threads()
    return f"{device} ({n} thread{'s' * (n != 1)})" if device.type == 'cpu' else str(device)
