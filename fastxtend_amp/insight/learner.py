"`Learner.precision_report`, `compare_precision` and `precision_decision`, and `MixedPrecision.plot_scales`."
from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastcore.basics import patch

from ..callback import MixedPrecision
from ..mode import AMPMode
from .choice import decisions
from .compare import compare
from .comparison import PrecisionComparison
from .report import PrecisionReport, report

__all__: list[str] = []


@patch(as_prop=True)
def precision_decision(self: Learner) -> PrecisionComparison | None:
    "The comparison by which `to_amp(measure=True)` last chose: `recommended`, `reason`, `calls`; None if not asked."
    return decisions.get(self)


@patch
def compare_precision(self: Learner,
    modes: str | AMPMode | Iterable[str | AMPMode] | None = None, # To compare with fp32; the native ones if None
    n_steps: int = 50, # Training batches after which the losses are compared; the speed may need more
    *,
    lr: float | slice | None = None, # Learning rate; the learner's own if None
    n_seeds: int = 3, # How often fp32 is repeated with another order of the batches and other random draws
    max_seconds: float = 60., # Seconds after which it ends, with what it knows by then
) -> PrecisionComparison: # `table`, `plot()`, `recommended`, `reason` and `apply()`; shows itself in a notebook
    """Train a copy of the learner in each precision, from its present state, on the same batches, and recommend one.

    The learner, its loggers and its recorder stay as they are. Drawing batches runs the dataset, as fastai's
    `one_batch()` does, and moves its random generators on. All copies are in memory at once, and up to 512 MB of
    batches. The modes take turns, a few steps each, so that other work on the machine slows all of them; only the
    training steps are timed. Turns go on after `n_steps` until the 95 % interval of the median speed-up is above 1.05,
    or below, or the time ends; with several processes they end with `n_steps`. Time for the seeds is set aside first:
    where it is short, the losses are compared after fewer steps. One batch more of each shows the memory.

    A mode that the device does not run gets a row with the reason. A step is never broken off: in a mode that the
    device only emulates one step of a large model may take long. Half-precision weights are compared if they are named
    ('half weights', 'half weights fp16') or if the learner has them.

    A copy has the precision callback's arguments, those of fastai's callbacks that shape a training step (mixup and
    cutmix, gradient accumulation and clipping, RNN, batch-norm and GAN callbacks, channels last), and other callbacks
    with an event from `before_batch` to `after_step`. Recorder, progress bars, schedulers, and callbacks that save or
    stop are left out, and so are metrics, validation and `after_epoch`. A copy saves nothing; its `path` is a temporary
    folder.

    With several processes each compares by itself: the model is the one inside `torch.compile` and
    DistributedDataParallel, and SyncBatchNorm takes this process's statistics. If the loss function communicates, all
    processes must call this method.

    Raises `ValueError` for an unknown mode, for unusable numbers, for a learner that cannot be copied, for parameters
    that are sharded (FSDP), NaN or inf, without training batches, and for batches that give no loss;
    `RuntimeError` inside a fit.

    Source of the interval: McGill, Tukey and Larsen, Variations of Box Plots, The American Statistician 32 (1978), made
    wider for looking after each turn.
    """
    return compare(self, modes, n_steps, lr, n_seeds, max_seconds)


@patch
def precision_report(self: Learner,
    modes: str | AMPMode | Iterable[str | AMPMode] = ('bf16', 'fp16'), # The precisions to report on
    n_batches: int = 1, # How many batches to look at
    dl: DataLoader | None = None, # Gives the batches; fastai's or PyTorch's; the training set's if None
    max_seconds: float = 60., # Seconds after which the model is not run again; a verdict may then be 'not known'
) -> PrecisionReport: # `verdicts`, `table`, `fp32_modules`, `plot()`; shows itself in a notebook
    """Report whether the model survives low precision, and where it does not, on real batches.

    Runs batches forward and backward in copies of the learner, in its own training loop with its callbacks, in fp32 and
    in each mode, and looks into each module, the model's own `forward` and the loss function. Modules that do not run,
    whose values are not finite or reach a quarter of the format's maximum, or whose error is above 10 %, are kept in
    fp32, and the batches run again, until nothing is wrong. For the model's own `forward` and the loss function, which
    cannot be kept in fp32, the modules before them are tried. The verdict holds for these batches and weights: after
    some training ask again. Where a mode is emulated and slow, the report takes the first samples of each batch alone,
    and says so.

    A copy has what it has in `compare_precision`, and the learner stays as it was. With several processes each reports
    by itself.

    Raises `ValueError` for an unknown mode, for unusable numbers, for a learner that cannot be copied, without batches,
    for parameters in half precision, sharded (FSDP), NaN or inf; `RuntimeError` inside a fit; and any error of
    the model in fp32.
    """
    return report(self, modes, n_batches, dl, max_seconds)


@patch
def plot_scales(self: MixedPrecision,
    ax = None, # The matplotlib axes to draw on; new ones if None
): # The matplotlib axes
    "Plot the loss scale over the optimizer steps, skipped steps marked; raises `ValueError` where there is none."
    import matplotlib.pyplot as plt
    if not self.scales:
        raise ValueError('plot_scales has nothing to plot: no optimizer step was made with a loss scale.\n'
                         'Train in fp16 first; bf16 and fp32 need no loss scaling.')
    ax = ax or plt.subplots()[1]
    scales = pd.Series(self.scales)
    scales.plot(ax=ax, drawstyle='steps-post', legend=True, label='loss scale', title='Loss scale in training',
                xlabel='optimizer step', ylabel='loss scale')
    scales.where(self.skips).plot(ax=ax, style='rx', legend=True, label=f'skipped steps ({sum(self.skips)})')
    ax.set_yscale('log', base=2)
    return ax
