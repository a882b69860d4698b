"Metrics for fastai's table and loggers: the loss scale, the skipped steps of an epoch, and the norm of the gradients."
from __future__ import annotations

from typing import Any

from fastai.learner import Learner, Metric
from torch.nn.utils import get_total_norm

from ..common import is_dtensor, optimizer_params
from .callback import WATCHERS, MixedPrecision
from .loop import precision_callback


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


class gradient_norm(PrecisionMetric):
    """The norm of the gradients of the epoch's last step, unscaled and before clipping, as a metric; 0 in plain fp32.

    Skipped steps do not count; if a fused optimizer skips a step on the GPU, the norm is NaN or inf.
    """
    def read(self, cb: MixedPrecision) -> float: return float(cb.gradient_norm)


class _GradientNorm:
    "Computes what `gradient_norm` shows, on the device, in each step of a learner with that metric."
    def __init__(self, cb: MixedPrecision): self.cb = cb

    def before_step(self):
        learn = self.cb.learn
        if gradient_norm not in map(type, learn.metrics): return
        norm = get_total_norm(p.grad for p in optimizer_params(learn.opt) if p.grad is not None)
        self.cb.gradient_norm = norm.full_tensor() if is_dtensor(norm) else norm


WATCHERS.append(_GradientNorm)
