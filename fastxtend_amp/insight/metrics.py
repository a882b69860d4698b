"Metrics for fastai's table and loggers: the loss scale, and the skipped steps of an epoch."
from __future__ import annotations

from typing import Any

from fastai.learner import Learner, Metric

from ..training.callback import MixedPrecision
from ..training.loop import precision_callback


class PrecisionMetric(Metric):
    """A value of the learner's precision callback at the end of an epoch; 0 without one.

    A subclass is a metric: `Learner(metrics=[accuracy, loss_scale])` gives each learner an object of its own. Whatever
    shows fastai's metrics shows it: the table, `CSVLogger`, `TensorBoardCallback`, `WandbCallback`.
    """
    cb: MixedPrecision | None = None
    def accumulate(self, learn: Learner) -> None: self.cb = precision_callback(learn)   # read once, at the end

    def read(self, cb: MixedPrecision) -> Any:
        "Return the value; None counts as 0."

    @property
    def value(self) -> float: return 0 if self.cb is None else self.read(self.cb) or 0


class loss_scale(PrecisionMetric):
    "The loss scale at the end of the epoch, as a metric; 0 in bf16 and fp32."
    def read(self, cb: MixedPrecision) -> float | None: return cb.scale


class skipped_steps(PrecisionMetric):
    "The number of the epoch's steps that were skipped because a gradient was not finite, as a metric."
    def read(self, cb: MixedPrecision) -> int: return sum(cb.history.skips(cb.epoch_start))
