"Copies of a learner that train side by side in alternating rounds, until what is fastest is decided."
import math, random, time
from contextlib import ExitStack

import pandas as pd
from fastai.learner import Learner
from fastai.torch_core import set_seed, to_device

from ..compat import is_compiled
from ..devices.fp32_settings import settings_note
from ..learners import training_device
from ..messages import check_integer
from .calls import Call
from .comparison import PrecisionComparison, recommend
from .copies import check_above_0, check_learner, loader_like, no_batch, note_of_left_out, several_processes
from .run import Run
from .display import progress_bar
from .random_states import random_state_kept
from .speed import FEWEST_ROUNDS, last_fifth, tolerance
from .values import tensors

N_STEPS, N_SEEDS = 50, 3        # defaults
FOR_REPORT = .3                 # share of `max_seconds` for the report of `to_amp`
_FOR_BATCHES = .25              # share of the time that is left for drawing batches
_BYTES = 2**29                  # of batches to hold; further steps reuse them
_FEWEST = 7                     # rounds, at least, into which `n_steps` are divided
_LONGEST = .1                   # seconds of a round in fp32; longer rounds are divided


class Rounds:
    """Trainings of copies side by side: in fp32 and in other rows.

        train all in alternating rounds, for `n_steps`; drop what is clearly slower
        train in rounds those that may still be the fastest, and what they have to beat
        train fp32 with other seeds
    """
    def __init__(self,
        learn: Learner, # Only copies of it are trained
        method: str, # The method that was called, for messages
        max_seconds: float, # From now on
        n_steps: int = N_STEPS,
        n_seeds: int = N_SEEDS,
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
        self.learn, self.method, self.n_steps, self.n_seeds, self.lr = learn, method, n_steps, n_seeds, lr
        self.is_short = n_steps <= FEWEST_ROUNDS                 # no interval, so nothing is certain
        self.seeds = list[Run]()                                 # fp32 with other seeds

    @property
    def left(self) -> float:
        "The seconds that are left."
        return self.end - time.monotonic()

    @property
    def running(self) -> list[Run]:
        "The runs that are still in the rounds, fp32 first."
        return [run for run in self.runs.values() if not run.note]

    @property
    def fastest(self) -> Run:
        "The fastest run of those that clearly pay; fp32 if none does."
        paying = [run for run in self.running if run.speed_up(self.base).pays]
        return max(paying, key=lambda run: run.speed_up(self.base), default=self.base)

    def compared(self, rows: dict[str, Call]) -> PrecisionComparison: # fp32 first
        "Train in all rows; return what that shows."
        if len(rows) == 1: self.n_steps = 1                      # there is nothing to compare fp32 with
        with (random_state_kept(), progress_bar(self.learn, self.left) as self.tick, ExitStack() as copies):
            self.batches = self._batches()
            self.runs = {name: Run(self.learn, name, call) for name, call in rows.items()}
            for run in self.running:
                with run.failures_noted(): run.begin(copies, self.batches, self.n_steps, self.lr)
            self.train()
            for run in reversed(self.running): run.finish(self.left)     # fp32 last: it is slow where time is short
            copies.close()
            for seed in range(1, 1 + self.n_seeds):
                if self.left > self.n_steps * self.base.pace: self._train_with(seed)
        return self._result()

    def _batches(self):
        "Return a batch for each step, as far as time and memory reach."
        dl, found, size = loader_like(self.learn.dls.train), [], 0
        late = (1 - _FOR_BATCHES) * self.left
        for b in (b for _ in range(self.n_steps) for b in dl):   # from the first again when an epoch is over
            found.append(to_device(b, training_device(self.learn)))
            self.tick('batches')
            size += sum(t.nbytes for t in tensors(b))
            if len(found) == self.n_steps or size > _BYTES or self.left < late: break
        if not found: raise no_batch(self.method)                # of a dataset that can be iterated only once
        return found

    def train(self) -> None:
        """Train in rounds until all is decided, or only the time for other seeds is left.

        The first two rounds have one step: a warm-up, and one that shows how long a step takes. `n_steps` becomes the
        number of steps that are compared.
        """
        self.base = base = self.runs['fp32']
        size = 1
        while due := self.due():
            if self.left < size * _step(due) + self._following(len(base.losses) + size): break
            self._round(due, size)
            self.drop_slow()
            if len(base.times) == 1:
                longest = round(_LONGEST / base.pace)
                size = max(1, min((self.n_steps - 2) // _FEWEST, longest))
        self.n_steps = min(self.n_steps, len(base.losses))

    def _following(self, n):
        "Return the seconds that other seeds need after `n` steps, and a step of each run that shows its memory."
        if len(self.base.times) < FEWEST_ROUNDS: return 0
        return self.n_seeds * min(n, self.n_steps) * self.base.pace + _step(self.running)

    def _round(self, runs, size):
        done = len(self.base.losses)
        # Back and forth, so that none always follows the same one.
        for run in runs[::-1] if len(self.base.times) % 2 else runs:
            self.tick(run.name)
            with run.failures_noted(): run.train(range(done, done + size), done)     # the first warms up
            if not done: self.end += run.compile_seconds

    def due(self) -> list[Run]:
        "Return the runs that need another round: after `n_steps`, those that may be the fastest, and what they beat."
        if len(self.base.losses) < self.n_steps: return self.running
        if self.is_short or several_processes(): return []       # where others would wait
        best = self.fastest
        undecided = [run for run in self.running if run is not best and run.speed_up(best).is_undecided]
        return [*dict.fromkeys([self.base, best, *undecided])] if undecided else []

    def drop_slow(self) -> None:
        """Drop what is clearly slower than fp32, or, as a variant, than the fastest: the others have the time.

        The fastest besides fp32 always stays. Where there is no time for intervals, the slowest variants go.
        """
        base, *others = self.running
        others.sort(key=lambda run: run.speed_up(base))
        for run in others[:-1]:
            if run.speed_up(self.fastest if run.is_variant else base).is_slower: run.leave()
        missing = FEWEST_ROUNDS - len(base.times)
        while variants := [run for run in self.running if run.is_variant]:
            if not self.left < missing * _step(self.running): break          # nan before the second round
            max(variants, key=lambda run: run.pace).leave()

    def _train_with(self, seed):
        "Train in fp32 with another seed and another order of the batches, except for the last ones."
        self.tick('fp32')
        set_seed(seed)
        run = Run(self.learn, 'fp32', self.base.call)
        n_first = self.n_steps - last_fifth(self.n_steps)
        steps = [*random.sample(range(n_first), n_first), *range(n_first, self.n_steps)]
        with ExitStack() as copies:
            run.begin(copies, self.batches, self.n_steps, self.lr)
            run.train(steps)
        self.seeds.append(run)

    def _result(self):
        n, base, runs = self.n_steps, self.base, self.runs.items()
        table = pd.DataFrame({name: run.columns(base, n) for name, run in runs}).T.infer_objects()
        others = [run.loss(n) for run in self.seeds]
        tolerated = tolerance(base.losses[:n], others, last_fifth(n))
        seconds = math.nan if self.is_short else self.max_seconds - min(0, self.left)
        recommended, reason = recommend(table, tolerated, seconds)
        return PrecisionComparison(
            table,
            losses={name: run.losses[:n] for name, run in runs},
            seed_losses=[run.losses for run in self.seeds],
            recommended=recommended,
            reason=reason,
            notes=[*self._notes()],
            rows={name: run.call for name, run in runs})

    def _notes(self):
        "Say how losses were compared, and what limits the comparison."
        if len(self.runs) > 1:
            yield (f'Losses: mean of the last fifth of {self.n_steps:,} steps. fp32 was repeated with '
                   f'{len(self.seeds)} of {self.n_seeds} other seeds.')
        yield from note_of_left_out(self.learn)
        if is_compiled(self.learn.model):
            yield 'The compiled model was compared uncompiled; `compare_precision(compile=True)` compares both.'
        if settings := settings_note(): yield f'{settings}. fp32 was measured with this setting.'


def _step(runs): return sum(run.pace for run in runs)            # seconds
