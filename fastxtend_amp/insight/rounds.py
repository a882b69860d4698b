"""Copies of a learner that train side by side in alternating rounds, until what is fastest is decided.

`max_seconds` is for batches, then rounds, then fp32 with other seeds; before all of them, `to_amp` makes a report.
"""
import random, time
from contextlib import ExitStack
from dataclasses import dataclass

from fastai.learner import Learner
from fastai.torch_core import set_seed, to_device
from torch.nn.parameter import is_lazy

from ..learners import training_device
from ..messages import check_above_0, check_integer
from .calls import Call
from .copies import check_learner, loader_like, no_batch
from .display import progress_bar
from .random_states import random_state_kept
from .recommendation import FEWEST_ROUNDS, last_fifth
from .trial import Trial
from .values import tensors

N_STEPS, N_SEEDS = 50, 3        # defaults
FOR_REPORT = .3                 # share of `max_seconds` for the report of `to_amp`
_FOR_BATCHES = .25              # share of the rest for drawing batches
_BYTES = 2**29                  # of batches to hold; further steps reuse them
_FEWEST = 7                     # rounds at least, into which `n_steps` are divided
_LONGEST = .1                   # seconds of a round in fp32; longer ones are divided


@dataclass
class Rounds:
    """Trials side by side: in fp32 and in other rows.

        train all in alternating rounds, for `n_steps`; drop what is clearly slower
        go on as long as one of them may be the fastest
        train fp32 with other seeds
    """
    learn: Learner # Only copies of it are trained
    method: str # The method that was called, for messages
    max_seconds: float # From now on
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
        if lazy := [name for name, p in self.learn.model.named_parameters() if is_lazy(p)]:
            raise ValueError(f"{self.method} needs initialized weights, but '{lazy[0]}' has no shape before the first "
                             'batch.\nRun one: `learn.model(learn.dls.one_batch()[0])`.')
        self.seeds = list[Trial]()                               # fp32 with other seeds

    def compare(self, rows: dict[str, Call]) -> None: # fp32 first
        "Train in all rows."
        if len(rows) == 1: self.n_steps = 1                      # there is nothing to compare fp32 with
        with (random_state_kept(), progress_bar(self.learn, self.left) as self.tick, ExitStack() as self.copies):
            self.batches = self._batches()
            self.trials = {name: Trial(self.learn, call) for name, call in rows.items()}
            for trial in self.staying:
                with random_state_kept(), trial.error_recorded(): trial.begin(self)
            self.train()
            for trial in self.staying: trial.measure_end()
            self.copies.close()
            for seed in range(1, 1 + self.n_seeds):
                if self.left > self.n_compared * self.base.pace: self._train_with(seed)

    def _batches(self):
        "Return a batch for each step, as far as time and memory reach."
        dl, drawn, size = loader_like(self.learn.dls.train), [], 0
        for_training = (1 - _FOR_BATCHES) * self.left
        for b in (b for _ in range(self.n_steps) for b in dl):   # from the first again when an epoch is over
            drawn.append(to_device(b, training_device(self.learn)))
            self.tick('batches')
            size += sum(t.nbytes for t in tensors(b))
            if len(drawn) == self.n_steps or size > _BYTES or self.left < for_training: break
        if not drawn: raise no_batch(self.method)                # of a dataset that can be iterated only once
        return drawn

    def train(self) -> None:
        """Train in rounds until all is decided, or only the time for other seeds is left.

        The first two rounds have one step: a warm-up, and one that shows how long a step takes.
        """
        base, size = self.base, 1
        while self.is_due() and self._has_time(size):
            trials, done = self.staying, len(base.losses)
            # Back and forth, so that none always follows the same one.
            for trial in trials[::-1] if len(base.times) % 2 else trials:
                self.tick(trial.name)
                with trial.error_recorded(): trial.train(range(done, done + size))
            self.drop_slow()
            if len(base.times) == 1:
                size = max(1, min((self.n_steps - 2) // _FEWEST, round(_LONGEST / base.pace)))

    def _train_with(self, seed):
        "Train in fp32 with another seed and another order of the batches, except for the last ones."
        self.tick('fp32')
        set_seed(seed)
        trial = Trial(self.learn, self.base.call)
        n_first = self.n_compared - last_fifth(self.n_compared)
        first = random.Random(seed).sample(range(n_first), n_first)
        trial.begin(self)
        trial.train([*first, *range(n_first, self.n_compared)])
        self.copies.close()
        self.seeds.append(trial)

    # -- who is still in the rounds

    @property
    def base(self) -> Trial:
        "The one in fp32."
        return self.trials['fp32']

    @property
    def staying(self) -> list[Trial]:
        "Those that are still in the rounds, fp32 first. All of them train in each round."
        return [trial for trial in self.trials.values() if not trial.status]

    @property
    def fastest(self) -> Trial:
        "The fastest of those that clearly pay; fp32 if none does."
        paying = [trial for trial in self.staying if trial.speed_up(self.base).pays]
        return max(paying, key=lambda trial: trial.speed_up(self.base), default=self.base)

    @property
    def undecided(self) -> list[Trial]:
        "Those that may be more than 5% faster than the fastest."
        best = self.fastest
        return [trial for trial in self.staying if trial is not best and trial.speed_up(best).is_undecided]

    def drop_slow(self) -> None:
        """Drop what is clearly slower than fp32, and variants that are clearly slower than the fastest.

        The fastest one besides fp32 always stays. If six rounds do not fit into the time, the slowest variants are
        dropped as well.
        """
        for trial in self._ranked()[:-1]:
            rival = self.fastest if trial.call.changes else self.base
            if trial.speed_up(rival).is_slower: trial.drop(rival)
        missing = FEWEST_ROUNDS - len(self.base.times)
        for trial in (ranked := self._ranked())[:-1]:
            if missing > 0 and trial.call.changes and not self._has_time(missing):
                trial.drop(ranked[-1], ' for lack of time')

    def _ranked(self): # The slowest first
        return sorted(self.staying[1:], key=lambda trial: trial.speed_up(self.base))

    # -- time and steps

    @property
    def left(self) -> float:
        "The seconds that are left."
        return self.end - time.monotonic()

    @property
    def spent(self) -> float | None:
        "The time limit in seconds, or more if it was exceeded; None if more time would decide nothing."
        return None if self.is_short else self.max_seconds - min(0, self.left)

    @property
    def is_short(self) -> bool:
        "True if `n_steps` gives no interval, so that nothing is certain."
        return self.n_steps <= FEWEST_ROUNDS

    @property
    def n_compared(self) -> int:
        "The number of steps whose losses are compared."
        return min(self.n_steps, len(self.base.losses))

    def is_due(self) -> bool:
        "Return whether all need another round."
        return len(self.base.losses) < self.n_steps or bool(self.undecided and not self.is_short)

    def _has_time(self, size):
        """Return whether there is time for `size` more steps. True before a step is timed.

        After six rounds, time for other seeds is reserved: for one while a row is undecided, otherwise for all.
        """
        base, seconds = self.base, size * sum(trial.pace for trial in self.staying)
        if len(base.times) >= FEWEST_ROUNDS:
            n_seeds = min(1, self.n_seeds) if self.undecided else self.n_seeds
            seconds += n_seeds * min(self.n_steps, len(base.losses) + size) * base.pace
        return not self.left < seconds
