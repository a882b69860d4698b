"`Learner.compare_precision` and `to_amp(measure=True)`: copies of a learner train side by side, and are timed."
import math, random, time
from contextlib import ExitStack, suppress
from typing import Any

import pandas as pd
from fastai.learner import Learner
from fastai.torch_core import set_seed, to_device
from fastcore.basics import patch
from torch.nn.parameter import is_lazy

from ..compat import is_compiled
from ..devices.fp32_settings import settings_note
from ..learners import training_device
from ..messages import check_bool, check_integer
from .candidates import BASE, FP32, Contestant, candidates, contestants, like_own
from .comparison import PrecisionComparison, recommend
from .copied_callbacks import note_of_left_out
from .copies import check_above_0, check_learner, loader_like, several_processes
from .display import progress_bar
from .measuring import Run
from .random_states import random_state_kept
from .speed import FEWEST_ROUNDS, last_fifth, tolerance
from .values import tensors

_STEPS, _SEEDS = 50, 3  # defaults
_ROUNDS = 7             # into which `n_steps` are divided, after two rounds of one step
_LIMIT = 2**29          # bytes of batches to hold; further steps reuse them
_FOR_REPORT = .3        # the most of `max_seconds` that `to_amp` spends on a report,
_FOR_BATCHES = .25      # that drawing batches needs,
_PLANNED = .9           # and of what is left after two rounds, what `n_steps` and other seeds need

@patch
def compare_precision(self: Learner,
    precisions: Any = None, # Names such as 'bf16', 'half_weights', one or several; None: bf16, fp16, TF32 where native
    n_steps: int = _STEPS, # Training steps after which the losses are compared; timing may need more
    *,
    lr: float | slice | None = None, # Learning rate; the learner's own if None
    n_seeds: int = _SEEDS, # How often to repeat fp32 with other seeds, to see how much its loss varies
    max_seconds: float = 60., # Time limit, approximate for slow models; compiling does not count
    compile: bool = False, # Also compare each precision compiled, by `Module.compile`
) -> PrecisionComparison: # A `PrecisionComparison`: `table`, `plot()`, `recommended`, `reason`, `apply()`
    """Train copies of the learner side by side, and recommend the fastest precision whose loss matches fp32.

    Models with 2-d convolutions are also compared in channels last. The first 16-bit precision that the device runs
    natively is also compared with depthwise or grouped convolutions in fp32, if the model has such layers.

    All are timed in alternating rounds on the same batches, so that background load affects all alike. After `n_steps`,
    rounds continue for those that may be more than 5% faster than fp32 and than the fastest one, until that is certain
    or `max_seconds` is over. What is clearly slower than fp32 is dropped, as is a format or a choice of layers that is
    clearly slower than the fastest row. The learner is not modified. All copies are in memory at once.

    Copies include fastai's callbacks that affect a training step (mixup, gradient accumulation, gradient clipping) and
    your own, and leave out trackers, recorders and savers, which they know by their classes' names. A callback's
    attribute `run_on_copy`, True or False, overrules this.

    Interval: McGill, Tukey and Larsen, Variations of Box Plots, The American Statistician 32 (1978), widened for
    repeated looks.

    Raises:

    - `ValueError` if `precisions` has an unknown precision
    - `ValueError` if `n_steps` or `max_seconds` is out of range
    - `ValueError` if a parameter is sharded (FSDP), NaN or inf, or not initialized, or if all are frozen
    - `ValueError` if the learner cannot be copied
    - `ValueError` if there are no training batches
    - `RuntimeError` if it is called inside a fit
    - any error of the model in fp32
    """
    rounds = Rounds(self, 'compare_precision', max_seconds, n_steps, n_seeds, lr)
    check_bool(compile=compile)
    rows = contestants(self, candidates(self, precisions), compile)
    found = rounds.compared(rows)
    if precisions is None and {row.precision for row in rows.values()} == {FP32}:
        found.notes[:0] = ["This device runs nothing else natively. To compare what it emulates, name it: "
                           "`learn.compare_precision('bf16')`."]
    return found


def measure_and_choose(
    learn: Learner, # Switched to the selected precision
    max_seconds: float = 60., # Time limit for report and comparison
) -> None:
    """Time what the device runs natively on real batches, and switch the learner to what is recommended.

    16-bit precisions keep those modules in fp32 that `precision_report` names. Only copies are trained. Prints the
    decision; details are in `learn.precision_decision`.

    Raises what `compare_precision` raises, and `RuntimeError` in distributed runs.
    """
    rounds = Rounds(learn, 'to_amp(measure=True)', max_seconds)
    if several_processes():
        raise RuntimeError('to_amp(measure=True) is not available in distributed runs, as each process could choose '
                           'another precision.\nRun it in one process, then use the call that it prints in every '
                           'process.')
    precisions = candidates(learn)
    low = [p.name for p in precisions if p.dtype]
    verdicts = learn.precision_report(low, max_seconds=_FOR_REPORT * max_seconds).verdicts if low else {}
    compared, notes = [], []
    for p in precisions:
        v = verdicts.get(p.name)
        if not v: compared.append(p)
        elif v.call and v.verdict not in ('do not use', 'cannot run'):
            compared.append(like_own(learn, type(p), v.modules, v.init_scale))
        else: notes.append(f'{p.name}: {v.reason}.')
    rows = contestants(learn, compared)
    if len(rows) == 1 and not notes:                             # fp32 alone
        vars(learn).pop('precision_decision', None)
        learn.to_amp()                                           # which says why
        return
    found = rounds.compared(rows)
    found.notes[:0] = notes
    found.apply(learn)
    vars(learn)['precision_decision'] = found                    # which `export` leaves out
    print(f'Selected: {found.recommended}.', found.reason, *found.notes,
          f'Next time, call `{found.calls[found.recommended]}` instead of measuring.')


@patch(as_prop=True)
def precision_decision(self: Learner) -> PrecisionComparison | None:
    "The comparison of the last `to_amp(measure=True)`: `recommended`, `reason`, `calls`; None without one."
    return vars(self).get('precision_decision')


class Rounds:
    "Trainings of copies side by side, in alternating rounds, until all is decided or the time is over."
    def __init__(self,
        learn: Learner, # Only copies of it are trained
        method: str, # The method that was called, for messages
        max_seconds: float, # From now on
        n_steps: int = _STEPS,
        n_seeds: int = _SEEDS,
        lr: float | slice | None = None, # The learner's own if None
    ):
        check_above_0(max_seconds=max_seconds)
        check_integer(1, n_steps=n_steps)
        check_integer(0, n_seeds=n_seeds)
        for rate in (lr.start, lr.stop) if isinstance(lr, slice) else (lr,):
            if rate is not None: check_above_0(lr=rate)
        self.max_seconds = min(max_seconds, 1e9)                 # `math.inf`: no limit
        self.end = time.monotonic() + self.max_seconds
        check_learner(learn, method)
        self.device = training_device(learn)
        if lazy := [name for name, p in learn.model.named_parameters() if is_lazy(p)]:
            raise ValueError(f"{method} needs initialized weights, but '{lazy[0]}' has no shape before the first "
                             'batch.\nRun a batch first: `learn.model(*learn.dls.one_batch()[:learn.dls.n_inp])`.')
        self.learn, self.method, self.n_steps, self.n_seeds, self.lr = learn, method, n_steps, n_seeds, lr
        self.is_short = n_steps <= FEWEST_ROUNDS                 # no interval, so nothing is certain
        self.runs = dict[str, Run]()                             # by row of the table, fp32 first
        self.seeds = list[Run]()                                 # fp32 with other seeds

    @property
    def left(self) -> float:
        "The seconds that are left."
        return self.end - time.monotonic()

    @property
    def running(self) -> list[Run]:
        "The runs that are still in the rounds, fp32 first."
        return [run for run in self.runs.values() if not run.note]

    def compared(self, rows: dict[str, Contestant]) -> PrecisionComparison:
        "Train side by side in all rows, then in fp32 with other seeds; return what that shows."
        if len(rows) == 1: self.n_steps = 1                      # there is nothing to compare fp32 with
        with (random_state_kept(), progress_bar(self.learn, self.left) as self.tick, ExitStack() as copies):
            self.batches = self._batches()
            self.runs = {name: Run(self, row) for name, row in rows.items()}
            for run in self.runs.values():
                with run.failures_noted(): run.copy(copies)
            self.train()
            base, *_ = self.running
            for run in reversed(self.running):                   # fp32 last: it is slow where time is short
                run.finish()
                if run.row.compiled or run.pace > self.left: continue        # it would be compiled again
                with suppress(Exception): run.count_activations()            # nan if hooks break the model
            copies.close()
            while len(self.seeds) < self.n_seeds and self.left > self.n_steps * base.pace: self._train_with_seed(base)
        return self._result()

    def _batches(self):
        "Return a batch for each step, as far as time and memory reach."
        dl, found, size = loader_like(self.learn.dls.train), [], 0
        for b in (b for _ in range(self.n_steps) for b in dl):   # from the first again when an epoch is over
            found.append(to_device(b, self.device))
            self.tick('batches')
            size += sum(t.nbytes for t in tensors(b))
            is_late = self.left < (1 - _FOR_BATCHES) * self.max_seconds
            if len(found) == self.n_steps or size > _LIMIT or is_late: break
        if found: return found
        raise ValueError(f'{self.method} found no batch in `learn.dls.train`.\nIf its dataset can be iterated only '
                         'once, create `learn.dls` again before each call.')

    def train(self) -> None:
        """Train all, round by round, until all is decided or only the time for other seeds is left.

        The first two rounds have one step each: a warm-up, and one that shows how long a step takes. From that follows
        how many steps fit into the time; `n_steps` becomes the number of steps that are compared.
        """
        base, size = self.running[0], 1
        while due := self.due():
            seconds, done = size * sum(run.pace for run in due), len(base.losses)
            if len(base.times) >= FEWEST_ROUNDS:                 # one step shows the memory
                seconds += sum(run.pace for run in self.running) + self.n_seeds * self.n_steps * base.pace
            if self.left < seconds: break
            # Back and forth, so that none always follows the same one.
            for run in due[::-1] if len(base.times) % 2 else due:
                self.tick(run.row.precision.name)
                with run.failures_noted(): run.train(range(done, done + size), done)     # the first is a warm-up
                self.end += run.compile_seconds * (not done)
            self.drop_slow()
            if len(base.times) == 1:
                self.n_steps = min(self.n_steps, max(FEWEST_ROUNDS + 1, self._steps_that_fit()))
                size = max(1, (self.n_steps - 2) // _ROUNDS)
        self.n_steps = min(self.n_steps, *(len(run.losses) for run in self.running))

    def due(self) -> list[Run]:
        "Return the runs that need another round: after `n_steps`, those that may be the fastest, and what they beat."
        base, *others = running = self.running
        if len(base.losses) < self.n_steps: return running
        if self.is_short or several_processes(): return []       # where others would wait
        paying = [run for run in others if run.speed_up(base).pays]
        best = max(paying, key=lambda run: run.speed_up(base), default=base)
        undecided = [run for run in others if run is not best and run.speed_up(best).is_undecided]
        return [*dict.fromkeys([base, best, *undecided])] if undecided else []

    def drop_slow(self) -> None:
        """Drop what is clearly slower from further rounds, so that the others have the time.

        A precision is compared with fp32, and a variant of one with the fastest run, which always stays.
        """
        base, *others = self.running
        *slower, best = sorted(others, key=lambda run: run.speed_up(base)) or [base]
        for run in slower:
            than = max(base, best, key=lambda run: run.speed_up(base)) if run.row.is_variant else base
            if run.speed_up(than).is_slower: self._drop(run)

    def _drop(self, run):
        run.drop(f'too slow, so it was dropped after {len(run.losses)} steps.')

    def _steps_that_fit(self):
        "Return how many steps fit into the time; where that is too few, the slowest variants are dropped."
        seconds = _PLANNED * self.left
        while variants := [run for run in self.running if run.row.is_variant]:
            if seconds > (FEWEST_ROUNDS + 1) * sum(run.pace for run in self.running): break
            self._drop(max(variants, key=lambda run: run.pace))
        base, *_ = running = self.running
        return int(seconds / (sum(run.pace for run in running) + self.n_seeds * base.pace))

    def _train_with_seed(self, base):
        "Train in fp32 with another seed and another order of the batches, except for the last ones."
        self.tick('fp32')
        set_seed(1 + len(self.seeds))
        run, n, n_first = Run(self, BASE), self.n_steps, self.n_steps - last_fifth(self.n_steps)
        with ExitStack() as copies:
            run.copy(copies)
            run.train([*random.sample(range(n_first), n_first), *range(n_first, n)])
        self.seeds.append(run)

    def _result(self):
        learn, n, base = self.learn, self.n_steps, self.runs['fp32']
        table = pd.DataFrame({name: _columns(run, base, n) for name, run in self.runs.items()}).T.infer_objects()
        table['weights moved'] /= table['weights moved']['fp32']
        seconds = math.nan if self.is_short else self.max_seconds - min(0, self.left)
        tolerated = tolerance(base.losses[:n], [run.loss(n) for run in self.seeds], last_fifth(n))
        recommended, reason = recommend(table, tolerated, seconds)
        losses = f'Losses: mean of the last fifth of {n:,} steps. {self._repeated()}'
        notes = [*([losses.strip()] if len(self.runs) > 1 else []), *note_of_left_out(learn)]
        if is_compiled(learn.model):
            notes.append('The compiled model was compared uncompiled; `compare_precision(compile=True)` compares both.')
        if settings := settings_note(): notes.append(f'{settings}. fp32 was measured with this setting.')
        return PrecisionComparison(
            table, {name: run.losses[:n] for name, run in self.runs.items()}, [run.losses for run in self.seeds],
            recommended, reason, {name: run.row.call(learn) for name, run in self.runs.items()}, notes,
            {name: run.row for name, run in self.runs.items()})

    def _repeated(self):
        if not self.n_seeds: return ''
        limit, n = f'`max_seconds={self.max_seconds:g}`', len(self.seeds)
        if not n: return f'{limit} left no time to repeat fp32.'
        seeds, most = 'seed' if n == 1 else 'seeds', f', the most in {limit}' if n < self.n_seeds else ''
        return f'fp32 was repeated with {n} other {seeds}{most}.'


def _columns(run, base, n):
    "Return the row of a run in `PrecisionComparison.table`; `n` steps are compared."
    speed = run.speed_up(base)
    return {'support': 'failed' if run.failed else run.row.precision.support(run.rounds.device).status,
            'steps': len(run.losses), 'rounds': len(run.times), 'ms per step': 1000 * base.pace / speed.mid,
            'speed-up': speed.mid, 'speed-up low': speed.low, 'speed-up high': speed.high,
            'loss': run.loss(n), 'loss difference': run.loss(n) - base.loss(n),
            **dict.fromkeys(('skipped', 'final scale', 'activations MB', 'peak MB', 'weights moved', 'compile s'),
                            math.nan), **run.measured, 'note': run.note}
