"The loss scale and skipped steps: as metrics for fastai's table and loggers, and as a plot."
import pandas as pd
from fastai.learner import Learner, Metric
from fastcore.basics import patch

from .callback import MixedPrecision
from .current import precision_callback
from .history import StepHistory


class PrecisionMetric(Metric):
    """A value of the learner's precision callback at the end of an epoch; 0 without one.

    A subclass is a metric: `Learner(metrics=[accuracy, LossScaleMetric])` gives each learner an object of its own.
    Whatever shows fastai's metrics shows it: the table, `CSVLogger`, `TensorBoardCallback`, `WandbCallback`.
    """
    cb: MixedPrecision | None = None
    def accumulate(self, learn: Learner) -> None: self.cb = precision_callback(learn)   # read once, at the end


class LossScaleMetric(PrecisionMetric):
    "The loss scale at the end of the epoch, as a metric; 0 without loss scaling."
    @property
    def value(self) -> float:
        scale = getattr(self.cb, 'scale', None) or 0
        return int(scale) if scale == int(scale) else scale      # shorter in fastai's table


class SkippedStepsMetric(PrecisionMetric):
    "The number of skipped steps in the epoch, as a metric."
    @property
    def value(self) -> int:
        history = self.cb.history if self.cb else StepHistory()
        return sum(history.read().skips[history.epoch_start:])


@patch
def plot_scales(self: MixedPrecision,
    ax = None, # The matplotlib axes to draw on; new ones if None
): # The matplotlib axes
    """Plot the loss scale by step, with skipped steps marked.

    Raises `ValueError` if no step was made with a loss scale.
    """
    if not self.scales:
        raise ValueError('plot_scales has nothing to plot: no optimizer step was made with a loss scale.\n'
                         'Train in fp16 first; bf16 and fp32 need no loss scaling.')
    scales = pd.Series(self.scales)
    columns = {'loss scale': scales, f'skipped steps ({sum(self.skips):,})': scales.where(self.skips)}
    ax = pd.DataFrame(columns).plot(
        ax=ax, style=['-', 'rx'], drawstyle='steps-post', xlabel='optimizer step', ylabel='loss scale',
        title='Loss scale in training')
    ax.set_yscale('log', base=2)
    return ax
