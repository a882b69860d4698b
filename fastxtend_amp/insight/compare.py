"Runs a comparison: trains copies of one learner in several precisions, in turns, and times them."
from __future__ import annotations

import math, random, re, tempfile, time, warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from fastai.callback.core import Callback, TrainEvalCallback
from fastai.learner import Learner

from ..callback import PRECISION_CALLBACKS, precision_callback
from ..checks import check_count, check_seconds
from ..common import first_line, random_state, random_state_kept, set_random_state
from ..mode import mode_support, training_device
from .advice import precision_call
from .batches import Batches
from .choices import PrecisionChoice, choices_from, use_choice
from .comparison import PrecisionComparison, build_comparison
from .memory import free_memory, learner_bytes
from .phases import StepClock, page_faults
from .progress import Progress
from .recommend import fused_name
from .restore import modes_kept
from .run import check_model, refuse_in_fit
from .statistics import tensors
from .trial import runs_in_steps, takes_part, trial_learner

__all__ = ['compare']

_OF_COPIES = ('.*emulated', 'No optimizer step was taken', 'The gradients of an accumulation')    # warnings
_TURNS = 7              # that each mode gets after the first step, which warms up
_FEW = 8                # an emulated mode sees one sample in so many, and 4 at least


class Run:
    "One precision: the learner that trains in it, and what was measured."
    def __init__(self,
        choice: PrecisionChoice,
        support: str, # 'native', 'emulated', 'unsupported' or 'failed'
        note: str = '',
        samples: int | None = None, # How many of each batch it sees; all if None
        hidden: bool = False, # Whether it is left out of the table
    ):
        self.choice, self.support, self.note, self.samples, self.hidden = choice, support, note, samples, hidden
        self.name = choice.name
        self.measure: Run = self                                 # the fp32 run on the same samples
        self.trial: Any = None                                   # the learner
        self.cb: Any = None                                      # its precision callback
        self.call = f'learn.to_{self.name}()'
        self.random_state: Any = None
        self.clock = StepClock()
        self.n_before = 0                                        # steps that the callback's history held already
        self.losses: list[float] = []
        self.speeds: list[float] = []                            # samples per second in each turn
        self.seconds, self.faults, self.peak = 0., 0, math.nan   # peak: bytes
        self.done = support == 'unsupported'


@modes_kept
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
    check_model(learn.model, 'compare_precision')
    refuse_in_fit(learn, 'compare_precision')
    # Open files in it must not keep it from being removed: not on Windows.
    folder = tempfile.TemporaryDirectory(prefix='compare_precision_', ignore_cleanup_errors=True)
    with folder, _globals_kept(), warnings.catch_warnings():   # of copies: the table says so
        for said in _OF_COPIES: warnings.filterwarnings('ignore', message=said)
        return _Comparison(learn, choices, n_steps, lr, n_seeds, max_seconds, cbs, folder.name).run()


@contextmanager
def _globals_kept() -> Iterator[None]:
    "The random states and the grad mode, all that training a copy changes outside of it."
    grad_mode = torch.is_grad_enabled()
    try:
        with random_state_kept(everything=True), torch.enable_grad(): yield
    finally: torch.set_grad_enabled(grad_mode)


class _Comparison:
    "The work behind `compare`."
    def __init__(self, learn, choices, n_steps, lr, n_seeds, max_seconds, cbs, folder):
        self.start = time.perf_counter()
        self.learn, self.n_steps, self.lr, self.n_seeds, self.max_seconds = learn, n_steps, lr, n_seeds, max_seconds
        self.end, self.folder = self.start + max_seconds, folder
        self.device = training_device(learn)
        asked = {id(cb) for cb in cbs or ()}
        if cbs is None: self.cbs = [cb for cb in learn.cbs if takes_part(cb)]
        else: self.cbs = [cb for cb in learn.cbs if isinstance(cb, TrainEvalCallback) or id(cb) in asked]
        self.progress, self.told = Progress(learn, float(max_seconds)), False
        self.fused_name: str | None = None                       # of the optimizer that would take less time
        self.seed_losses: list[list[float]] = []
        supports = [(c, *(mode_support(c.mode, self.device) if c.mode else ('native', ''))) for c in choices]
        self.runs = [Run(c, status, why if status == 'unsupported' else '') for c, status, why in supports]

    def run(self) -> PrecisionComparison:
        try: self._train()
        finally: self.progress.close()
        return build_comparison(self)

    def _train(self):
        self.batches = Batches(self.learn, self.n_steps, self.device, self.max_seconds / 4, self._wait)
        self._look_at_fewer()
        self.progress.expect(self.n_steps * (sum(not r.done for r in self.runs) + self.n_seeds))
        for group in self._groups():
            for run in group: self._try(run, self._begin, run)
            for run in group: self._try(run, self._turn, run, range(1))
            self._say_how_long()
            size = self._turn_size(group)
            for i, first in enumerate(range(1, self.n_steps, size)):
                k, steps = i % len(group), range(first, min(first + size, self.n_steps))
                for run in group[k:] + group[:k]:                # each starts a round in turn
                    self._try(run, self._turn, run, steps)
            for run in group: self._finish(run)
        for seed in range(1, self.n_seeds + 1): self._seeded(seed)

    # -- what is planned

    def _look_at_fewer(self):
        "An emulated mode gets a part of each batch, and fp32 trains on that part once more to be its measure."
        n, slow = self.batches.size, [r for r in self.runs if r.support == 'emulated']
        few = max(4, n // _FEW)
        for r in self.runs: r.measure = self.runs[0]
        if not slow or few >= n or not self.batches.can_be_cut: return
        measure = Run(PrecisionChoice(), 'native', samples=few, hidden=True)
        for r in slow:
            r.samples, r.measure = few, measure
            r.note = f'emulated, so it saw {few} of the {n} samples of each batch; compared to fp32 on the same samples'
        self.runs.insert(1, measure)

    def _groups(self) -> list[list[Run]]:
        "The runs that take turns: all of them if their copies fit into memory side by side, else one at a time."
        n, need = len(self.runs), learner_bytes(self.learn, everywhere=True)
        return [self.runs] if need * (n + 1) < free_memory(self.device) / 2 else [[r] for r in self.runs]

    def _turn_size(self, group) -> int:
        "Steps in a turn: so many that each run gets several turns, also if the time ends before the steps do."
        per_step = sum(r.seconds / max(1, len(r.losses)) for r in group)
        feasible = max(0., self.end - time.perf_counter()) / max(per_step, 1e-9)
        return max(1, math.ceil(min(self.n_steps - 1, feasible) / _TURNS))

    def _say_how_long(self):
        if self.told: return
        self.told = True
        per_step = sum(r.seconds / max(1, len(r.losses)) for r in self.runs) + self.n_seeds * self.runs[0].seconds
        seconds = time.perf_counter() - self.start + per_step * self.n_steps
        limit = f' (`max_seconds={self.max_seconds:g}`)' if seconds > self.max_seconds else ''
        self.progress.say(f'compare_precision: about {min(seconds, self.max_seconds):.0f} s{limit}')

    # -- one precision

    def _try(self, run, f, *args):
        "An error in low precision is a result; in fp32 it is the user's to see."
        if run.done: return
        try: f(*args)
        except Exception as e:
            if run.choice.mode is None:
                self._explain(run, e)
                raise
            run.done, run.support, run.trial = True, 'failed', None
            run.note = 'it ran out of memory' if isinstance(e, torch.OutOfMemoryError) else reason_of(e)

    def _explain(self, run, error):
        "Raise a `ValueError` that names the callbacks without which the model may not run."
        left_out = [cb.name for cb in self.learn.cbs if cb not in self.cbs and runs_in_steps(cb)
                    and not isinstance(cb, PRECISION_CALLBACKS)]
        if run.losses or not left_out or isinstance(error, (ValueError, torch.OutOfMemoryError)): return
        raise ValueError(f"The model does not run on its first batch in fp32: {reason_of(error)}.\n"
                         f"These callbacks took no part: {', '.join(left_out)}.\n"
                         "Where one prepares model or batch, as for a GAN, call this after a fit, or name it in "
                         "`compare_precision(cbs=[...])`.") from error

    def _begin(self, run):
        "A copy of the learner, ready for its first step."
        run.trial = trial = trial_learner(self.learn, self.cbs, self.folder)
        own = precision_callback(self.learn)
        run.cb = use_choice(trial, run.choice)
        if run.cb is not None:
            if own is not None: run.cb.on_overflow = own.on_overflow
            run.call = precision_call(trial, run.choice.mode)
            run.cb.on_overflow = 'ignore'                        # a rerun would disturb the times; the table tells
            run.n_before = run.cb.scaling.history.n
        with random_state_kept(everything=True):
            self._begin_fit(trial)
            run.random_state = random_state(everything=True)
        self.fused_name = fused_name(trial.opt)
        run.clock.watch(trial, self.device)

    def _begin_fit(self, trial):
        if not trial.opt: trial.create_opt()
        if trial.wd is not None: trial.opt.set_hypers(wd=trial.wd)
        trial.opt.set_hypers(lr=trial.lr if self.lr is None else self.lr)
        trial.n_epoch, trial.epoch, trial.n_iter, trial.dl = 1, 0, self.n_steps, trial.dls.train
        for event in ('before_fit', 'before_epoch', 'before_train'): trial(event)

    def _turn(self, run, steps):
        "Train `steps` in this precision, timed; bringing its random state in and out is not."
        if self._is_over(run) and run.losses: return
        set_random_state(run.random_state)
        batches = [self.batches.get(i, run.samples) for i in steps]
        trial, losses, n, own = run.trial, [], 0, learner_bytes(run.trial)
        cuda = self.device.type == 'cuda'
        self._wait()
        if cuda: torch.cuda.reset_peak_memory_stats(self.device)
        before, faults = torch.cuda.memory_allocated(self.device) if cuda else 0, page_faults()
        then = time.perf_counter()
        for i, b in zip(steps, batches):
            trial.one_batch(i, b)
            if not len(trial.yb):
                raise ValueError("The learner's training batches have no targets, so there is no loss to compare. Does "
                                 "`learn.dls.n_inp` leave one?")
            losses.append(trial.loss.detach())
            n += len(tensors(b, floating=False)[0])
            self.progress.tick(run.name)
            if self._is_over(run, time.perf_counter() - then): break
        self._wait()
        seconds = time.perf_counter() - then
        if cuda: run.peak = np.nanmax([torch.cuda.max_memory_allocated(self.device) - before + own, run.peak])
        run.clock.read(warm=run.speeds != [], seconds=seconds, n=len(losses))
        if run.speeds: run.faults += page_faults() - faults
        run.seconds += seconds
        run.speeds.append(n / seconds)
        run.losses += [float(l) for l in losses]
        run.random_state = random_state(everything=True)

    def _is_over(self, run, seconds=0.) -> bool:
        "Is the time up: for the trainings altogether, or for a mode that is emulated?"
        now = time.perf_counter()
        if now > self.end - (.2 * self.max_seconds if self.n_seeds else 0): return True
        emulated = sum(r.support == 'emulated' for r in self.runs)
        return run.support == 'emulated' and run.seconds + seconds > .4 * self.max_seconds / emulated

    def _finish(self, run):
        if len(run.losses) < self.n_steps and run.support not in ('failed', 'unsupported'):
            cut = f'cut short after {len(run.losses)} of {self.n_steps} steps (`max_seconds={self.max_seconds:g}`)'
            run.note = f'{run.note}; {cut}' if run.note else cut
        if run.trial is None: return
        set_random_state(run.random_state)
        for event in ('after_train', 'after_fit'): run.trial(event)
        run.trial = None

    def _seeded(self, seed):
        "fp32 again, with another order of the batches but for the last ones, and other random draws."
        base = self.runs[0]
        n = len(base.losses)
        if time.perf_counter() + base.seconds > self.end: return
        trial, losses = trial_learner(self.learn, self.cbs, self.folder), []
        rng, head = random.Random(seed), range(n - self.n_last)
        random.seed(seed); np.random.seed(seed); torch.manual_seed(seed)
        use_choice(trial, base.choice)
        self._begin_fit(trial)
        for i, j in enumerate([*rng.sample(head, len(head)), *range(len(head), n)]):
            trial.one_batch(i, self.batches.get(j))
            losses.append(trial.loss.detach())
            self.progress.tick(f'fp32, seed {seed}')
            if time.perf_counter() > self.end: return
        for event in ('after_train', 'after_fit'): trial(event)
        self.seed_losses.append([float(l) for l in losses])

    @property
    def n_last(self) -> int:
        "The loss of a training is the mean of so many last steps."
        return max(1, min(10, len(self.runs[0].losses) // 5))

    def _wait(self):
        "Let the device finish, so that the clock sees its work."
        if self.device.type == 'xla':
            import torch_xla.core.xla_model as xm
            xm.mark_step()
            xm.wait_device_ops()
        elif self.device.type == 'mps': torch.mps.synchronize()
        elif self.device.type != 'cpu': torch.get_device_module(self.device).synchronize(self.device)


def reason_of(error: BaseException) -> str:
    "What went wrong, without the event that fastai names before it."
    text = str(error)
    wrapper = re.compile(r'Exception occur+ed in `[^`]*` when calling event `[^`]*`:\s*')
    while (found := wrapper.match(text)): text = text[found.end():]
    line = first_line(type(error)(text) if text != str(error) else error, 400)
    return line if isinstance(error, ValueError) else f'{type(error).__name__}: {line}'
