"`Learner.compare_precision` and `to_amp(measure=True)`, and their result."
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from fastai.learner import Learner
from fastcore.basics import patch
from fastcore.foundation import L

from ..compat import is_compiled
from ..devices.fp32_settings import settings_note
from ..learners import several_processes
from ..messages import check_argument
from ..precisions import find_precision
from .calls import Call, native_precisions, rows_of
from .copies import note_of_left_out
from .display import Shown
from .recommendation import COLUMNS, Speed, recommend, tolerance
from .rounds import FOR_REPORT, N_SEEDS, N_STEPS, Rounds

_NOTHING_NATIVE = ("This device runs nothing else natively. To compare what it emulates, name it: "
                   "`learn.compare_precision('bf16')`.")


@dataclass(repr=False, eq=False)
class PrecisionComparison(Shown):
    """The result of `Learner.compare_precision`.

    In `table`, nan means that there is no value. A dropped row has no speed, as it ran in fewer rounds than the others:
    `note` compares it with another row in these rounds.

    | column of `table` | meaning |
    |---|---|
    | `support` | 'native' or 'emulated' on this device; 'failed' after an error; 'dropped' |
    | `steps`, `rounds` | training steps, and the rounds in which they were timed |
    | `ms per step` | median in fp32; for others, that divided by the speed-up |
    | `speed-up`, `speed-up low`, `speed-up high` | speed relative to fp32: median of the rounds, 95% interval |
    | `loss`, `loss difference` | mean of the last fifth of the steps, and its difference from fp32 |
    | `peak MB` | the most that a step allocates on an accelerator |
    | `weights moved` | how far the weights moved per step, relative to fp32 |
    """
    table: pd.DataFrame # One row per precision, memory format and choice of layers in fp32
    losses: dict[str, list[float]] # The loss of each step, by row
    seed_losses: list[list[float]] # The same, of fp32 with other seeds
    recommended: str # The row to use
    reason: str # Why, and how certain that is
    notes: list[str] # How the comparison was made, and what limits it
    rows: dict[str, Call]

    @property
    def calls(self) -> dict[str, str]:
        "The call that selects each row."
        return {name: str(row) for name, row in self.rows.items()}

    def apply(self,
        learn: Learner, # The learner that was compared, or one like it
        precision: str | None = None, # A row of the table; the recommended one if None
    ) -> Learner: # The learner
        "Switch the learner to the recommended row, and keep its `fp32_modules`."
        row = precision or self.recommended
        check_argument('precision', row, self.rows.__contains__, f'one of {[*self.rows]}')
        self.rows[row].apply(learn)
        return learn

    def _parts(self):
        yield f'Recommended: {self.recommended}. {self.reason}\nNext: `{self.calls[self.recommended]}`'
        table = self.table.drop(columns=['rounds', *COLUMNS[1:], 'weights moved', 'note'])
        table['speed-up'] = [str(Speed(*row)) for row in self.table[COLUMNS].values]
        yield table.dropna(axis=1, how='all')
        dropped = self.table['note'][self.table['support'] == 'dropped'].items()     # `reason` has the errors
        yield '\n'.join([f'{name}: {note}.' for name, note in dropped] + self.notes)

    def plot(self): # The two matplotlib axes
        "Plot speeds and loss curves."
        import matplotlib.pyplot as plt
        _, (curves, bars) = plt.subplots(2, figsize=(6, 6), layout='constrained')
        colors = [row.precision.color for row in self.rows.values()]
        # '_' hides all but one from the legend.
        seeds = {'_' * i + 'fp32, other seeds': losses for i, losses in enumerate(self.seed_losses)}
        values = pd.DataFrame.from_dict(seeds | self.losses, orient='index', dtype=float).T
        smooth = values.ewm(alpha=.2).mean().where(np.isfinite(values))      # nan where a loss is not finite
        lines = ['--' if row.channels_last else '-' for row in self.rows.values()]
        smooth.plot(ax=curves, color=['#b4bdcc'] * len(seeds) + colors, style=['-'] * len(seeds) + lines,
                    xlabel='step', ylabel='loss', title='Training loss (smoothed)')
        curves.get_lines()[len(seeds)].set_linewidth(4)          # fp32, seen under the others
        curves.legend()
        self.table['speed-up'].plot.barh(ax=bars, color=colors, xlabel='steps per second, fp32 = 1', ylabel='',
                                         title=f'Recommended: {self.recommended}')
        bars.bar_label(bars.containers[0], [str(Speed(mid)) for mid in self.table['speed-up']], padding=6)
        bars.margins(x=.15)
        bars.invert_yaxis()
        return curves, bars


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
    rounds = Rounds(self, 'compare_precision', max_seconds, n_steps, n_seeds, lr)
    classes = native_precisions(self) if precisions is None else L(precisions).map(find_precision)
    result = compared(rounds, rows_of(self, [Call.from_own(self, cls) for cls in classes]))
    if precisions is None and not classes: result.notes[:0] = [_NOTHING_NATIVE]
    return result


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
    classes = native_precisions(learn)
    low = [cls.name for cls in classes if cls.dtype]
    verdicts = learn.precision_report(low, max_seconds=FOR_REPORT * max_seconds).verdicts if low else {}
    rows, notes = [], [] if classes else [_NOTHING_NATIVE]
    for cls in classes:
        v = verdicts.get(cls.name)
        if v is None: rows.append(Call.from_own(learn, cls))
        elif v.verdict in ('do not use', 'cannot run') or not v.call: notes.append(f'{cls.name}: {v.reason}.')
        else: rows.append(Call.from_own(learn, cls, v.modules, v.init_scale))
    result = compared(rounds, rows_of(learn, rows))
    result.notes[:0] = notes
    result.apply(learn)
    vars(learn)['precision_decision'] = result                   # which `export` leaves out
    print(f'Selected: {result.recommended}.', result.reason, *result.notes,
          f'Next time, call `{result.calls[result.recommended]}` instead of measuring.')


@patch(as_prop=True)
def precision_decision(self: Learner) -> PrecisionComparison | None:
    "The comparison of the last `to_amp(measure=True)`, if there was one."
    return vars(self).get('precision_decision')


# -- the result

def compared(
    rounds: Rounds,
    rows: dict[str, Call], # fp32 first
) -> PrecisionComparison:
    "Train in all rows, and return what that shows."
    rounds.compare(rows)
    n, base, trials = rounds.n_compared, rounds.base, rounds.trials
    table = pd.DataFrame([_row(trial, base, n) for trial in trials.values()], index=[*trials])
    tolerated = tolerance(base.losses[:n], [trial.loss(n) for trial in rounds.seeds])
    changes = {name: (row.precision.scales_loss, len(row.changes)) for name, row in rows.items()}
    recommended, reason = recommend(table, tolerated, changes, rounds.spent)
    return PrecisionComparison(
        table,
        losses={name: trial.losses[:n] for name, trial in trials.items()},
        seed_losses=[trial.losses for trial in rounds.seeds],
        recommended=recommended,
        reason=reason,
        notes=[*_notes(rounds)],
        rows=rows)


def _row(trial, base, n): # Its columns, which `PrecisionComparison` documents
    speed = Speed(math.nan) if trial.status else trial.speed_up(base)  # the others ran in other rounds as well
    loss = trial.loss(n)
    support = trial.status or trial.call.precision.support(trial.device).status
    return {'support': support, 'steps': len(trial.losses), 'rounds': len(trial.times),
            'ms per step': 1000 * base.pace / speed.mid, **dict(zip(COLUMNS, speed)),
            'loss': loss, 'loss difference': loss - base.loss(n),
            'skipped': trial.skipped, 'final scale': trial.scale, 'peak MB': trial.peak / 1e6,
            'weights moved': trial.moved / (base.moved or math.nan), 'note': trial.reason}


def _notes(rounds):
    "Say how losses were compared, and what limits the comparison."
    if len(rounds.trials) > 1:
        yield (f'Losses: mean of the last fifth of {rounds.n_compared:,} steps. fp32 was repeated with '
               f'{len(rounds.seeds)} of {rounds.n_seeds} other seeds.')
    yield from note_of_left_out(rounds.learn)
    if is_compiled(rounds.learn.model):
        yield 'The compiled model was compared uncompiled.'
    if settings := settings_note(): yield f'{settings}. fp32 was measured with this setting.'
