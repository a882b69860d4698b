"Rounds, in which all rows of a comparison train in turn, until the fastest is decided."
import time
from collections.abc import Callable
from dataclasses import dataclass

from .speed import FEWEST_ROUNDS
from .trial import Trial

_FEWEST = 7                     # rounds at least, into which `n_steps` are divided
_LONGEST = .1                   # seconds of a round in fp32; longer ones are divided


@dataclass
class Rounds:
    """Alternating rounds, so that background load affects all trials alike.

        train all for `n_steps`; drop what is clearly slower
        go on as long as one of them may be the fastest
    """
    trials: dict[str, Trial] # By row, fp32 first
    n_steps: int # Steps whose losses are compared
    n_seeds: int # Trainings in fp32 that follow, for which time is left
    end: float # Of the time limit, by `time.monotonic`
    show: Callable[[str], object] # Called with what runs, for a progress bar

    def train(self) -> None:
        """Train in rounds until all is decided, or only the time for other seeds is left.

        The first two rounds have one step: a warm-up, and one that shows how long a step takes.
        """
        base, size = self.base, 1
        while self.is_due() and self._has_time(size):
            trials, done = self.staying, len(base.losses)
            # Back and forth, so that none always follows the same one.
            for trial in trials[::-1] if len(base.times) % 2 else trials:
                self.show(trial.name)
                trial.train(range(done, done + size))
            self.drop_slow()
            if len(base.times) == 1:
                size = max(1, min((self.n_steps - 2) // _FEWEST, round(_LONGEST / base.pace)))

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
            rival = self.fastest if trial.choice.changes else self.base
            if trial.speed_up(rival).is_slower: trial.drop(rival)
        missing = FEWEST_ROUNDS - len(self.base.times)
        for trial in (ranked := self._ranked())[:-1]:
            if missing > 0 and trial.choice.changes and not self._has_time(missing):
                trial.drop(ranked[-1], ' for lack of time')

    def _ranked(self): # The slowest first
        return sorted(self.staying[1:], key=lambda trial: trial.speed_up(self.base))

    # -- time and steps

    @property
    def left(self) -> float:
        "The seconds that are left."
        return self.end - time.monotonic()

    @property
    def n_compared(self) -> int:
        "The number of steps whose losses are compared."
        return min(self.n_steps, len(self.base.losses))

    def is_due(self) -> bool:
        "Return whether all need another round."
        return len(self.base.losses) < self.n_steps or bool(self.undecided)

    def _has_time(self, size):
        """Return whether there is time for `size` more steps. True before a step is timed.

        After six rounds, time for other seeds is reserved: for one while a row is undecided, otherwise for all.
        """
        base, seconds = self.base, size * sum(trial.pace for trial in self.staying)
        if len(base.times) >= FEWEST_ROUNDS:
            n_seeds = min(1, self.n_seeds) if self.undecided else self.n_seeds
            seconds += n_seeds * min(self.n_steps, len(base.losses) + size) * base.pace
        return not self.left < seconds
