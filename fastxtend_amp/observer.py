"Observer interface: how the diagnosis and the device rooms watch a precision callback without being imported by it."
from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ['OBSERVERS', 'ON_ATTACH', 'ON_MEASURE', 'PrecisionObserver']


class PrecisionObserver:
    """Watches one `MixedPrecision` callback; each method does nothing here.

    A subclass in `OBSERVERS` is built for every precision callback when it is. Observers may read the callback and the
    learner and may raise; they must not change numbers.
    """
    def __init__(self, cb: Any): self.cb = cb                    # a `MixedPrecision`

    def fit_started(self) -> None: "A fit, or a validation outside one, begins; mode and device are known."
    def batch_started(self) -> None: "A batch begins, in training or validation, before its forward pass."
    def loss_computed(self) -> None: "The loss of a batch is there, in fp32, before it is scaled."
    def step_decided(self) -> None: "The gradients are unscaled; `cb.scaling` knows whether the step is held back."
    def batch_ended(self) -> None: "A training batch ended without an exception."
    def epoch_ended(self) -> None: "The training part of an epoch ended; what the device decided has been read."
    def fit_ended(self) -> None: "The fit ended, also by an exception; called again if it was interrupted."


OBSERVERS: list[type[PrecisionObserver]] = []

# Called with the learner and a number of seconds by `to_amp(measure=True)`; the last in the list sets the precision.
ON_MEASURE: list[Callable[[Any, float], Any]] = []

# Called with the learner whenever a precision callback is put on one, and by `to_fp32()`.
ON_ATTACH: list[Callable[[Any], None]] = []
