"Metrics for fastai's table and loggers: the loss scale, and the skipped steps of an epoch."
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from fastai.learner import Learner, Metric

from .callback import MixedPrecision, precision_callback

__all__ = ['PrecisionMetric', 'loss_scale', 'skipped_steps']


class PrecisionMetric(Metric):
    """A value of the learner's precision callback at the end of an epoch; 0 without one.

    Whatever shows fastai's metrics shows it: the table, `CSVLogger`, `TensorBoardCallback`, `WandbCallback`.
    """
    def __init__(self,
        name: str, # The column's; of the module's variable, too
        read: Callable[[MixedPrecision], Any], # Returns the value; None counts as 0
        doc: str, # For `help` and the manual
    ):
        self._name, self.read, self.__doc__ = name, read, doc
        self.reset()

    def __reduce__(self) -> str: return self._name               # copies and files refer to the module's variable
    def reset(self) -> None: self.learn: Callable[[], Learner | None] = lambda: None
    def accumulate(self, learn: Learner) -> None: self.learn = weakref.ref(learn)   # read once, at the end

    @property
    def value(self) -> float:
        learn = self.learn()
        cb = None if learn is None else precision_callback(learn)
        return 0 if cb is None else self.read(cb) or 0

    @property
    def name(self) -> str: return self._name


loss_scale = PrecisionMetric('loss_scale', lambda cb: cb.scale,
                             "The loss scale at the end of the epoch, as a metric; 0 in bf16 and fp32.")
skipped_steps = PrecisionMetric('skipped_steps', lambda cb: sum(cb.skips[cb.epoch_start:]),
                                "The steps of the epoch that were skipped for a non-finite gradient, as a metric.")
