"`Learner.compare_precision` and `to_amp(measure=True)`: copies train side by side in each precision."
import math, random, time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from fastai.learner import Learner
from fastai.torch_core import set_seed, to_device
from fastcore.basics import patch
from fastcore.foundation import L

from ..compat import is_compiled
from ..devices.fp32_settings import settings_note
from ..learners import several_processes, training_device
from ..messages import check_above_0, check_integer
from ..precisions import find_precision
from .batches import loader_like
from .choices import Choice, native_precisions, to_compare
from .comparison_result import PrecisionComparison
from .copied_callbacks import note_of_left_out
from .display import progress_bar
from .random_states import random_state_kept
from .recommendation import last_fifth, recommend, tolerance
from .requirements import check_learner, no_batch, note_of_frozen
from .rounds import Rounds
from .speed import COLUMNS, Speed
from .trial import Trial
from .values import tensors_in

N_STEPS, N_SEEDS = 50, 3        # defaults
_FOR_REPORT = .3                # share of `max_seconds` for the report of `to_amp`
_FOR_BATCHES = .25              # share of the rest for drawing batches
_BYTES = 2**29                  # of batches to hold; further steps reuse them
_NOTHING_NATIVE = ("This device runs nothing else natively. To compare what it emulates, name it: "
                   "`learn.compare_precision('bf16')`.")


# -- the methods

@patch
def compare_precision(self: Learner,
    precisions: Any = None, # One or several; None: bf16, fp16, TF32 where native
    n_steps: int = N_STEPS, # Steps whose losses are compared; timing may need more
    *,
    lr: float | slice | None = None, # Learning rate; the learner's own if None
    n_seeds: int = N_SEEDS, # Repetitions of fp32 with other seeds
    max_seconds: float = 60., # Time limit, approximate
) -> PrecisionComparison: # A `PrecisionComparison`: `table`, `plot()`, `recommended`, `reason`, `apply()`
    """Train copies of the learner side by side, and recommend the fastest precision whose loss matches fp32.

    Models with 2-d convolutions are also compared in channels last. The first 16-bit precision that the device runs
    natively is also compared with depthwise or grouped convolutions in fp32, if the model has such layers.

    All are timed in alternating rounds on the same batches, so that background load affects all alike. After `n_steps`,
    rounds continue as long as one may be more than 5% faster than fp32 and than the fastest one, or until
    `max_seconds` are over. What is clearly slower than fp32 is dropped, as is a format or a choice of layers that is
    clearly slower than the fastest row. The learner is not modified. A copy for each row, and batches of up to 512 MB,
    are in memory at once.

    Copies include fastai's callbacks that affect a training step (mixup, gradient accumulation, gradient clipping) and
    your own, and leave out trackers, recorders and savers, which are recognized by class name. A callback's
    attribute `run_on_copy`, True or False, overrules this.

    Interval: McGill, Tukey and Larsen, Variations of Box Plots, The American Statistician 32 (1978), widened for
    repeated looks.

    Raises:

    - `ValueError` if `precisions` has an unknown precision
    - `ValueError` if `n_steps`, `lr`, `n_seeds` or `max_seconds` cannot be used
    - `ValueError` if a parameter is sharded (FSDP), float64, NaN or inf, or if all are frozen
    - `ValueError` if the learner cannot be copied
    - `ValueError` if there are no training batches
    - `RuntimeError` if it is called inside a fit
    - any error of the model in fp32
    """
    plan = Plan(self, 'compare_precision', max_seconds, n_steps, n_seeds, lr)
    classes = native_precisions(self) if precisions is None else L(precisions).map(find_precision)
    return plan.compare(to_compare(self, [Choice.for_learner(self, cls) for cls in classes]))


def measure_and_choose(
    learn: Learner, # Switched to the selected precision
    max_seconds: float, # Time limit for report and comparison
) -> None:
    """Time what the device runs natively on real batches, and switch the learner to what is recommended.

    16-bit precisions keep those modules in fp32 that `precision_report` names. Only copies are trained. Prints the
    decision; details are in `learn.precision_decision`.

    Raises what `compare_precision` raises, and `RuntimeError` in distributed runs.
    """
    plan = Plan(learn, 'to_amp(measure=True)', max_seconds)
    if several_processes():
        raise RuntimeError('to_amp(measure=True) is not available in distributed runs, as each process could choose '
                           'another precision.\nRun it in one process, then use the call that it prints in every '
                           'process.')
    classes = native_precisions(learn)
    low = [cls.name for cls in classes if cls.dtype]
    verdicts = learn.precision_report(low, max_seconds=_FOR_REPORT * max_seconds).verdicts if low else {}
    choices, notes = [], []
    for cls in classes:
        v = verdicts.get(cls.name)
        if v is None: choices.append(Choice.for_learner(learn, cls))
        elif v.verdict in ('do not use', 'cannot run') or not v.call: notes.append(f'{cls.name}: {v.reason}.')
        else: choices.append(Choice.for_learner(learn, cls, v.modules, v.init_scale))
    result = plan.compare(to_compare(learn, choices))
    result.notes[:0] = notes
    result.apply(learn)
    vars(learn)['precision_decision'] = result                   # which `export` leaves out
    print(f'Selected: {result.recommended}.', result.reason, *result.notes,
          f'To select it again, call `{result.calls[result.recommended]}`.')


@patch(as_prop=True)
def precision_decision(self: Learner) -> PrecisionComparison | None:
    "The comparison of the last `to_amp(measure=True)`, if there was one."
    return vars(self).get('precision_decision')


# -- the comparison

@dataclass
class Plan:
    """The arguments of a comparison, checked, with its time limit, which begins now.

    `max_seconds` is for batches, then rounds, then fp32 with other seeds; before all of them, `to_amp` makes a report.
    """
    learn: Learner # Only copies of it are trained
    method: str # The method that was called, for messages
    max_seconds: float
    n_steps: int = N_STEPS
    n_seeds: int = N_SEEDS
    lr: float | slice | None = None # The learner's own if None

    def __post_init__(self):
        check_above_0(max_seconds=self.max_seconds)
        check_integer(1, n_steps=self.n_steps)
        check_integer(0, n_seeds=self.n_seeds)
        if self.lr is not None: check_above_0(lr=getattr(self.lr, 'stop', self.lr))
        self.max_seconds = min(self.max_seconds, 1e9)            # `math.inf`: no limit
        self.end = time.monotonic() + self.max_seconds
        check_learner(self.learn, self.method)

    def compare(self, choices: dict[str, Choice]) -> PrecisionComparison: # By row, fp32 first
        "Train in all of them, in fp32 with other seeds as well, and return what that shows."
        if len(choices) == 1: self.n_steps = 1                   # there is nothing to compare fp32 with
        seeds = list[Trial]()
        with random_state_kept(), progress_bar(self.learn, self.max_seconds) as show, ExitStack() as copies:
            batches = self._batches(show)
            arguments = batches, self.n_steps, self.lr, copies
            trials = {name: Trial(self.learn, choice, *arguments) for name, choice in choices.items()}
            rounds = Rounds(trials, self.n_steps, self.n_seeds, self.end, show)
            rounds.train()
            for trial in rounds.staying: trial.measure_end()
            copies.close()
            for seed in range(1, 1 + self.n_seeds):
                if not rounds.left > rounds.n_compared * rounds.base.pace: break         # it may be nan
                show('fp32')
                seeds.append(self._with_seed(seed, rounds))
        return self._result(rounds, seeds, choices)

    def _batches(self, show):
        "Return a batch for each step, as far as time and memory reach."
        dl, drawn, size = loader_like(self.learn.dls.train), [], 0
        end = time.monotonic() + _FOR_BATCHES * (self.end - time.monotonic())
        for b in (b for _ in range(self.n_steps) for b in dl):   # from the first again when an epoch is over
            drawn.append(to_device(b, training_device(self.learn)))
            show('batches')
            size += sum(t.nbytes for t in tensors_in(b))
            if len(drawn) == self.n_steps or size > _BYTES or time.monotonic() > end: break
        if not drawn: raise no_batch(self.method)                # of a dataset that can be iterated only once
        return drawn

    def _with_seed(self, seed, rounds):
        "Train in fp32 with another seed and another order of the batches, except for the last ones."
        set_seed(seed)
        n_first = rounds.n_compared - last_fifth(rounds.n_compared)
        with ExitStack() as copies:
            trial = replace(rounds.base, copies=copies)
            first = random.sample(range(n_first), n_first)
            trial.train([*first, *range(n_first, rounds.n_compared)])
        return trial

    def _result(self, rounds, seeds, choices):
        n, base, trials = rounds.n_compared, rounds.base, rounds.trials
        rows = [_row(trial, base, n) for trial in trials.values()]
        table = pd.DataFrame(rows, index=[*trials])
        tolerated = tolerance(base.losses[:n], [trial.loss(n) for trial in seeds])
        burdens = {name: (c.precision.scales_loss, len(c.changes)) for name, c in choices.items()}
        seconds = self.max_seconds - min(0, rounds.left)
        recommended, reason = recommend(table, tolerated, burdens, seconds)
        notes = note_of_frozen(self.learn) + note_of_left_out(self.learn)
        if len(trials) > 1:
            notes[:0] = [f'Losses: mean of the last fifth of {n:,} steps. fp32 was repeated with {len(seeds)} of '
                         f'{self.n_seeds} other seeds.']
        elif not native_precisions(self.learn): notes[:0] = [_NOTHING_NATIVE]
        if is_compiled(self.learn.model): notes.append('The compiled model was compared uncompiled.')
        if settings := settings_note(): notes.append(f'{settings}. fp32 was measured with this setting.')
        losses = {name: trial.losses[:n] for name, trial in trials.items()}
        seed_losses = [trial.losses for trial in seeds]
        return PrecisionComparison(table, losses, seed_losses, recommended, reason, notes, choices)


def _row(trial, base, n): # Its columns, which `PrecisionComparison` documents
    speed = Speed(math.nan) if trial.status else trial.speed_up(base)  # the others ran in other rounds as well
    loss = trial.loss(n)
    support = trial.status or trial.choice.precision.support(trial.device).status
    return {'support': support, 'steps': len(trial.losses), 'rounds': len(trial.times),
            'ms per step': 1000 * base.pace / speed.mid, **dict(zip(COLUMNS, speed)),
            'loss': loss, 'loss difference': loss - base.loss(n),
            'skipped': trial.skipped, 'final scale': trial.scale, 'peak MB': trial.peak / 1e6,
            'weights moved': trial.moved / (base.moved or math.nan), 'note': trial.reason}
