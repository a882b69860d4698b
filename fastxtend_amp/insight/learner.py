"`Learner.precision_report`, `compare_precision` and `precision_decision`, and `MixedPrecision.plot_scales`."
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
    modes: Any = None, # The precisions beside fp32, the measure; if None, those that the device does natively
    n_steps: int = 50, # Training batches for each mode
    *,
    lr: float | slice | None = None, # Learning rate; the learner's own if None
    n_seeds: int = 3, # How often fp32 is repeated with another order of the batches and other random draws
    max_seconds: float = 60., # Seconds after which it ends, with what it knows by then
) -> PrecisionComparison: # `table`, `plot()`, `recommended`, `reason` and `apply()`; shows itself in a notebook
    """Train copies of the learner for `n_steps` in each precision, from its present state on the same batches.

    The learner, its loggers and its recorder stay as they are; drawing batches runs the dataset, and what that draws
    from generators outside it moves on, as with fastai's `one_batch()`. All copies are in memory at once, and batches
    of 512 MB. The modes take turns, a few steps each, so that whatever else the machine does slows all of them; only
    the training steps are timed. A mode that the device does not run gets a row with the reason. A step is never broken
    off: in a mode that the device only emulates one step of a large model may take long. Half-precision weights are
    compared if they are named ('half weights', 'half weights fp16') or if the learner has them.

    What takes part: the precision callback's arguments, of fastai's callbacks those that shape a training step (mixup
    and cutmix, gradient accumulation and clipping, RNN, batch-norm and GAN callbacks, channels last), of others copies
    of those with an event from `before_batch` to `after_step`. Recorder, progress bars, schedulers, and what saves or
    stops do not; nor do metrics, validation and `after_epoch`. A copy saves nothing; its `path` is a temporary folder.

    With several processes each compares by itself, without communication. The model is the one inside `torch.compile`
    and DistributedDataParallel, SyncBatchNorm takes this process's statistics. A loss function that communicates must
    be called by all.

    Raises `ValueError` for an unknown mode, for unusable numbers, for a learner that cannot be copied, for sharded
    parameters (FSDP), lazy modules and without training batches; `RuntimeError` inside a fit.
    """
    return compare(self, modes, n_steps, lr, n_seeds, max_seconds)


@patch
def precision_report(self: Learner,
    modes: Iterable[str | AMPMode] = ('bf16', 'fp16'), # The precisions to ask about
    n_batches: int = 1, # How many batches to look at
    dl: Any = None, # The DataLoader to take them from; the training set's if None
    max_seconds: float = 60., # Seconds after which the model is not run again; a verdict may then be 'not known'
) -> PrecisionReport: # `verdicts`, `table`, `fp32_modules`, `plot()`; shows itself in a notebook
    """Report whether the model survives low precision, and where it does not; on real batches.

    Runs batches forward and backward in copies of the learner, in its own training loop with its callbacks, in fp32 and
    in each mode, and looks into each module, the model's own `forward` and the loss function. What leaves finite
    numbers, comes close to it, or loses more than a tenth is kept in fp32, and the batches run again, until nothing is
    wrong; where that cannot be kept, the modules before it are tried. The verdict holds for these batches and the
    weights as they are now: after some training ask again. If the device emulates one of the modes, and that would take
    long, the report looks at the first samples of each batch alone, and says so.

    The learner stays as it was; drawing batches runs the dataset, and what that draws from generators outside it moves
    on, as with fastai's `one_batch()`. What takes part is as in `compare_precision`. With several processes each
    reports by itself, without communication.

    Raises `ValueError` for an unknown mode, for unusable numbers, for a learner that cannot be copied, without batches,
    for parameters that are in half precision themselves, sharded ones (FSDP) and lazy modules; `RuntimeError` inside a
    fit; what the model raises in fp32.
    """
    return report(self, modes, n_batches, dl, max_seconds)


@patch
def plot_scales(self: MixedPrecision,
    ax = None, # The matplotlib axes to draw on; new ones if None
): # The matplotlib axes
    "Plot the loss scale over the optimizer steps, skipped steps marked."
    import matplotlib.pyplot as plt
    if ax is None: ax = plt.subplots()[1]
    scales, skipped = self.scales, [step for step, skip in enumerate(self.skips) if skip]
    ax.plot(scales, drawstyle='steps-post', label='loss scale')
    ax.plot(skipped, [scales[step] for step in skipped], 'rx', label=f'skipped steps ({len(skipped)})')
    ax.set_yscale('log', base=2)
    ax.set(title='Loss scale in training', xlabel='optimizer step', ylabel='loss scale')
    ax.legend()
    return ax
