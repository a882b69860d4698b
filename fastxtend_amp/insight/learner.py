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
    """Train a copy of the learner in each precision, for `n_steps` from its present state, on the same batches.

    The learner, its loggers and its recorder stay as they are. Drawing batches runs the dataset: its random generators
    and streams move on, as with fastai's `one_batch()`. All copies are in memory at once, and up to 512 MB of
    batches. The modes take turns of a few steps, so that other work on the machine slows all of them alike; only the
    training steps are timed. A mode that the device does not run gets a row with the reason. A step is never broken
    off: where a mode is emulated, one of a large model may take longer than `max_seconds`. Half-precision weights are
    compared if `modes` names them ('half weights', 'half weights fp16') or the learner has them.

    A copy has the precision callback's arguments; those of fastai's callbacks that shape a training step (mixup and
    cutmix, gradient accumulation and clipping, RNN, batch-norm and GAN callbacks, channels last); and of other
    callbacks those with an event from `before_batch` to `after_step`. It has no recorder, progress bar, scheduler,
    metrics or validation, and no callback that only saves or stops. It saves nothing; its `path` is a temporary folder.

    With several processes each compares by itself, without communication: on the model inside `torch.compile` and
    DistributedDataParallel, and with this process's statistics for SyncBatchNorm. All of them have to call it if the
    loss function communicates.

    Raises `ValueError` for an unknown mode, for unusable numbers, for a learner that cannot be copied, for parameters
    that are sharded (FSDP), lazy, NaN or inf, and without training batches; `RuntimeError` inside a fit.
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
    in each mode, and notes what each module, the model's own `forward` and the loss function compute. Modules that
    overflow, come close to it, are more than a tenth off fp32 or do not run are kept in fp32, and the batches run again
    until nothing is wrong. The model's own `forward` and the loss function cannot be kept: modules before them are
    tried. The verdict holds for these batches and the present weights: ask again after some training. If the device
    emulates a mode, and whole batches would take long in it, the report takes their first samples, and says so.

    The learner stays as it was; its copies and the drawing of batches are as in `compare_precision`. With several
    processes each reports by itself, without communication.

    Raises `ValueError` for an unknown mode, for unusable numbers, for a learner that cannot be copied, without batches,
    and for parameters in half precision, sharded (FSDP), lazy, NaN or inf; `RuntimeError` inside a fit; what the model
    raises in fp32.
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
