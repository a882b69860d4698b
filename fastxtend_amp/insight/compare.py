"`Learner.compare_precision`: trains copies of a learner in several precisions, in alternating rounds, and times them."
import random
from contextlib import ExitStack, suppress
from typing import Any

import pandas as pd
from fastai.learner import Learner
from fastai.torch_core import set_seed
from fastcore.basics import patch

from ..devices.fp32_settings import settings_note
from ..precisions import Precision
from .candidates import FP32, call, candidates
from .comparison import COMPILE, FEWEST_ROUNDS, PrecisionComparison, pays, recommend, tolerance
from .compat import is_compiled
from .copied_callbacks import note_of_left_out
from .copies import several_processes
from .measuring import ROUNDS, Run, Setting, last_fifth, running, train_round, training_batches
from .progress import progress_bar
from .random_states import random_state_kept
from .tune import kinds_to_try, tune

_KINDS = 3              # trainings in all precisions, whose time is left for kinds of modules
_HOPELESS = .5          # speed-up after which one round is enough

@patch
def compare_precision(self: Learner,
    precisions: Any = None, # Names such as 'bf16', 'half_weights', one or several; None: bf16, fp16, TF32 where native
    n_steps: int = 50, # Training steps after which the losses are compared; timing may need more
    *,
    lr: float | slice | None = None, # Learning rate; the learner's own if None
    n_seeds: int = 3, # How often to repeat fp32 with other seeds, to see how much its loss varies
    max_seconds: float = 60., # Time limit, approximate for slow models; compiling does not count
    compile: bool = False, # Also compare each precision compiled, by `Module.compile`
    tune: bool = False, # Also try the fastest one with kinds of modules in fp32, such as depthwise convolutions
) -> PrecisionComparison: # A `PrecisionComparison`: `table`, `plot()`, `recommended`, `reason`, `apply()`
    """Train copies of the learner side by side, and recommend the fastest precision whose loss matches fp32.

    Precisions are timed in alternating rounds on the same batches, so that background load affects all alike. After
    `n_steps`, rounds continue until each 95% interval is clearly above or below 1.05, or `max_seconds` is over.
    A precision that is clearly slower than fp32 is dropped from the rounds, unless it is the fastest of those compared
    with fp32. The learner is not modified. All copies are in memory at once.

    With `tune=True`, the fastest precision that the device runs natively also competes with one kind of modules after
    another in fp32, the most expensive first: depthwise and grouped convolutions, and classes of modules except linear
    layers. A kind is kept if the interval of its speed-up lies above 1.02. The result is a row such as 'bf16, depthwise
    in fp32', whose call is `learn.to_bf16(fp32_modules=is_depthwise)`. Compiled models are not tuned.

    Copies include fastai's callbacks that affect a training step (mixup, gradient accumulation, gradient clipping) and
    your own, and leave out trackers, recorders and savers, which they know by their classes' names. A callback's
    attribute `run_on_copy`, True or False, overrules this.

    Interval: McGill, Tukey and Larsen, Variations of Box Plots, The American Statistician 32 (1978), widened for
    repeated looks.

    Raises:

    - `ValueError` if `precisions` has an unknown precision
    - `ValueError` if `n_steps` or `max_seconds` is out of range
    - `ValueError` if a parameter is sharded (FSDP), NaN or inf, or if all are frozen
    - `ValueError` if the learner cannot be copied
    - `ValueError` if there are no training batches
    - `RuntimeError` if it is called inside a fit
    - any error of the model in fp32
    """
    compared = candidates(self, precisions)
    found = compare(Setting(self, 'compare_precision', max_seconds, n_steps, n_seeds, lr, compile, tune), compared)
    if precisions is None and len(compared) == 1:
        found.notes[:0] = ["This device runs nothing else natively. To compare what it emulates, name it: "
                           "`learn.compare_precision('bf16')`."]
    return found


def compare(setting: Setting, precisions: list[Precision]) -> PrecisionComparison:
    "Train side by side in all precisions, fp32 first, then in fp32 with other seeds; return what that shows."
    if len(precisions) == 1 and not setting.compile: setting.n_steps = 1   # there is nothing to compare fp32 with
    with (random_state_kept(), progress_bar(setting.learn, setting.left) as setting.tick, ExitStack() as copies):
        setting.batches = training_batches(setting)
        forms = [False, True] if setting.compile else [False]
        runs = [Run(setting, p, p.name + ' compiled' * compiled, compiled) for p in precisions for compiled in forms]
        for run in runs:
            with run.failures_noted(): run.copy(copies)
        n, kinds = _train_in_rounds(setting, runs)
        tuned = tune(runs, kinds, copies, n)
        for run in reversed(running(runs)):                      # fp32 last: it is slow where time is short
            run.finish()
            if run.compiled or run.pace > setting.left: continue         # it would be compiled again
            with suppress(Exception): run.count_activations()                # nan if hooks break the model
        copies.close()
        seeds = list[Run]()
        while len(seeds) < setting.n_seeds and setting.left > n * runs[0].pace:
            setting.tick('fp32')
            seeds.append(_train_with_seed(setting, 1 + len(seeds), n))
    return _result(setting, runs, seeds, n, tuned)


# -- the trainings

def _train_in_rounds(setting, runs): # Returns how many steps are compared, and the kinds of modules to try in fp32
    """Train all precisions for a few steps, round by round, until all is decided or only the time for others is left.

    Others are fp32 with other seeds, and kinds of modules in fp32. The first two rounds have one step each: a warm-up,
    and one that shows how long a step takes. From that follows how many steps fit into the time.
    """
    base, n, size, kinds = runs[0], setting.n_steps, 1, []
    while due := _due(runs, n):
        done = len(base.losses)
        train_round(due, range(done, done + size))
        _drop_slow(runs)
        n_rounds, pace = len(base.times), sum(r.pace for r in running(runs))
        if n_rounds == 1 and setting.tune: kinds = kinds_to_try(runs)
        others = setting.n_seeds * base.pace + _KINDS * pace * bool(kinds)
        if n_rounds == 1:
            fitting = int(.9 * setting.left / (pace + others))
            n = min(setting.n_steps, max(FEWEST_ROUNDS + 1, fitting))
            size = max(1, (n - 2) // ROUNDS)
        afterwards = pace + others * n                           # one step shows the memory
        if setting.left < size * pace + afterwards * (n_rounds >= FEWEST_ROUNDS): break
    return min(n, *(len(r.losses) for r in running(runs))), kinds


def _due(runs, n):
    "Return the runs that need another round, fp32 always included."
    base, *low = running(runs)
    if len(base.losses) < n: return [base, *low]
    undecided = [r for r in low if pays(*r.speed_up(base)[1:]) is None]
    return [base, *undecided] if undecided and not several_processes() else []


def _drop_slow(runs):
    "Drop what is clearly slower than fp32 from further rounds, except the fastest, so that the others have the time."
    base, *low = running(runs)
    for run in sorted(low, key=lambda r: r.speed_up(base))[:-1]:
        mid, _, high = run.speed_up(base)
        if mid < _HOPELESS or high < 1:
            run.note = f'slower than fp32, so it was dropped after {len(run.losses)} steps.'


def _train_with_seed(setting, seed, n):
    "Train in fp32 with another seed and another order of the batches, except for the last ones."
    set_seed(seed)
    run, n_first = Run(setting, FP32, ''), n - last_fifth(n)
    with ExitStack() as copies:
        run.copy(copies)
        run.train([*random.sample(range(n_first), n_first), *range(n_first, n)])
    return run


# -- the result

def _result(setting, runs, seeds, n, tuned): # `n`: steps that are compared
    learn = setting.learn
    rows = {r.name: _row(r, runs[0], n) for r in runs}
    table = pd.DataFrame(rows).T.infer_objects()
    table['weights moved'] /= table['weights moved']['fp32']
    losses = {r.name: r.losses[:n] for r in runs}
    tolerated = tolerance(losses['fp32'], [r.loss(n) for r in seeds], last_fifth(n))
    recommended, reason = recommend(table, tolerated, setting.max_seconds - min(0, setting.left))
    calls = {r.name: call(learn, r.precision) + COMPILE * r.compiled for r in runs}
    limit = f'`max_seconds={setting.max_seconds:g}`'
    repeated = f' {limit} left no time to repeat fp32.' if setting.n_seeds else ''
    if seeds:
        most = f', the most in {limit}' if len(seeds) < setting.n_seeds else ''
        repeated = f' fp32 was repeated with {len(seeds)} other seed{"s" * (len(seeds) > 1)}{most}.'
    looked_at = f'Losses: mean of the last fifth of {n:,} steps (`n_steps={setting.n_steps}`).{repeated}'
    notes = [tuned, looked_at if len(runs) > 1 else '', *note_of_left_out(learn)]
    if is_compiled(learn.model):
        notes.append('The compiled model was compared uncompiled; `compare_precision(compile=True)` compares both.')
    if settings := settings_note(): notes.append(f'{settings}. fp32 was measured with this setting.')
    return PrecisionComparison(table, losses, [r.losses for r in seeds], recommended, reason, calls,
                               [*filter(None, notes)], {r.name: r.precision for r in runs})


def _row(run, base, n):
    mid, low, high = run.speed_up(base)
    support = 'failed' if run.failed else run.precision.support(run.setting.device).status
    return {'support': support, 'steps': len(run.losses), 'rounds': len(run.times),
            'ms per step': 1000 * base.pace / mid, 'speed-up': mid, 'speed-up low': low, 'speed-up high': high,
            'loss': run.loss(n), 'loss difference': run.loss(n) - base.loss(n),
            **run.measured, 'note': run.note}
