"What does a user call?"
import functools
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
# channelslast patches `Learner.to_channelslast`: imported here so that it cannot do so after us.
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.core import Callback
from fastai.learner import Learner
from fastcore.basics import patch
from torch.amp import GradScaler

from .callback import PRECISION_CALLBACKS, MixedPrecision
from .compare import PrecisionComparison, compare
from .half import HalfPrecision
from .mode import AMPMode
from .report import PrecisionReport, report

__all__ = []


def _replace_precision(learn: Learner, cb: MixedPrecision | None) -> Learner:
    "Leave `cb` as the learner's only precision callback; it was built, and so checked, before anything is removed."
    if cb is not None: cb.check_modules(learn.model)
    for old in [o for o in learn.cbs if isinstance(o, PRECISION_CALLBACKS)]: learn.remove_cb(old)
    return learn if cb is None else learn.add_cb(cb)


def _close_after_exceptions(fit):
    "`fit`, after which nothing of a precision callback is left on the learner, also if `before_fit` or `after_fit` was interrupted."
    @functools.wraps(fit)
    def inner(self, *args, **kwargs):
        try: return fit(self, *args, **kwargs)
        except BaseException:
            for cb in self.cbs:
                if isinstance(cb, MixedPrecision) and not cb._guard.running: cb._close()
            raise
    inner._closes = True
    return inner


if not hasattr(Learner.fit, '_closes'): Learner.fit = _close_after_exceptions(Learner.fit)


@patch
def to_fp16(self: Learner,
    init_scale: float = 65536.0, # Loss scale to start from
    growth_factor: float = 2.0, # The scale is multiplied by this after `growth_interval` steps without a skip
    backoff_factor: float = 0.5, # The scale is multiplied by this after a skipped step
    growth_interval: int = 2000, # Steps without a skip after which the scale grows
    enabled: bool = True, # Whether to scale the loss at all
    *,
    loss_scale: float | None = None, # A static loss scale instead, which never grows or shrinks; fastai v1 used 512
    scaler: GradScaler | None = None, # A ready `torch.amp.GradScaler`, or an instance of a subclass, to use instead
    fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules, predicates, or a list of these
    on_overflow: str = 'warn', # When training goes wrong: 'warn', 'raise' (`FloatingPointError`) or 'ignore'; the batch is run again to find where
    patience: int = 16, # Skipped steps in a row after which training counts as going wrong (fp16)
) -> Learner: # The learner
    "Train in float16 mixed precision; replaces any other precision callback."
    return _replace_precision(self, MixedPrecision(AMPMode.FP16, init_scale, growth_factor, backoff_factor, growth_interval,
                                                   enabled, loss_scale=loss_scale, scaler=scaler, fp32_modules=fp32_modules,
                                                   on_overflow=on_overflow, patience=patience))


@patch
def to_bf16(self: Learner,
    *,
    fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules, predicates, or a list of these
    on_overflow: str = 'warn', # When training goes wrong: 'warn', 'raise' (`FloatingPointError`) or 'ignore'; the batch is run again to find where
    patience: int = 16, # Skipped steps in a row after which training counts as going wrong; bf16 skips none
) -> Learner: # The learner
    "Train in bfloat16 mixed precision, which needs no loss scaling; replaces any other precision callback."
    return _replace_precision(self, MixedPrecision(AMPMode.BF16, fp32_modules=fp32_modules, on_overflow=on_overflow, patience=patience))


@patch
def to_amp(self: Learner,
    init_scale: float = 65536.0, # Loss scale to start from, if it comes to fp16; so are the others
    growth_factor: float = 2.0, # The scale is multiplied by this after `growth_interval` steps without a skip
    backoff_factor: float = 0.5, # The scale is multiplied by this after a skipped step
    growth_interval: int = 2000, # Steps without a skip after which the scale grows
    enabled: bool = True, # Whether to scale the loss at all
    *,
    loss_scale: float | None = None, # A static loss scale instead, which never grows or shrinks
    scaler: GradScaler | None = None, # A ready `torch.amp.GradScaler`, or an instance of a subclass, to use instead
    fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules, predicates, or a list of these
    on_overflow: str = 'warn', # When training goes wrong: 'warn', 'raise' (`FloatingPointError`) or 'ignore'; the batch is run again to find where
    patience: int = 16, # Skipped steps in a row after which training counts as going wrong (fp16)
) -> Learner: # The learner
    "Train in the fastest precision that the model's device does natively: bf16, then fp16, else fp32."
    return _replace_precision(self, MixedPrecision('auto', init_scale, growth_factor, backoff_factor, growth_interval,
                                                   enabled, loss_scale=loss_scale, scaler=scaler, fp32_modules=fp32_modules,
                                                   on_overflow=on_overflow, patience=patience))


@patch
def to_half(self: Learner,
    dtype: str | AMPMode | torch.dtype = AMPMode.BF16, # The weights' precision: 'bf16' or 'fp16'
    loss_scale: float | None = None, # A static loss scale, such as fastai v1's 512; dynamic scaling if None (fp16)
    flat_master: bool = False, # Whether the optimizer steps on few flat tensors instead of one for each parameter
    master_weights: bool = True, # Whether there are fp32 masters; without, the optimizer steps on half-precision weights
    keep_fp32: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules, predicates, or a list of these
    *,
    on_overflow: str = 'warn', # When training goes wrong: 'warn', 'raise' (`FloatingPointError`) or 'ignore'; the batch is run again to find where
    patience: int = 16, # Skipped steps in a row after which training counts as going wrong (fp16)
) -> Learner: # The learner
    "Train with half-precision weights and fp32 masters, as fastai v1's `to_fp16` did; replaces any other precision callback."
    return _replace_precision(self, HalfPrecision(dtype, loss_scale, flat_master, master_weights, keep_fp32, on_overflow=on_overflow,
                                                  patience=patience))


@patch
def to_fp32(self: Learner) -> Learner: # The learner
    "Train in plain float32: removes every precision callback, fastai's own included."
    return _replace_precision(self, None)


@patch
def to_channelslast(self: Learner,
    use_amp: bool = True, # Add `MixedPrecision`, if the learner has no precision callback yet
    amp_mode: str | AMPMode | torch.dtype = AMPMode.FP16, # The precision to add, as in `MixedPrecision`
    init_scale: float = 65536.0, # Loss scale to start from (fp16)
    growth_factor: float = 2.0, # The scale is multiplied by this after `growth_interval` steps without a skip (fp16)
    backoff_factor: float = 0.5, # The scale is multiplied by this after a skipped step (fp16)
    growth_interval: int = 2000, # Steps without a skip after which the scale grows (fp16)
    enabled: bool = True, # Whether to scale the loss at all (fp16)
    *,
    loss_scale: float | None = None, # A static loss scale instead (fp16)
    scaler: GradScaler | None = None, # A ready `torch.amp.GradScaler` to use instead (fp16)
    fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules, predicates, or a list of these
    on_overflow: str = 'warn', # When training goes wrong: 'warn', 'raise' (`FloatingPointError`) or 'ignore'; the batch is run again to find where
    patience: int = 16, # Skipped steps in a row after which training counts as going wrong (fp16)
) -> Learner: # The learner
    "Train in the channels last memory format, and in mixed precision (fp16 unless told otherwise)."
    has_precision = any(isinstance(o, PRECISION_CALLBACKS) for o in self.cbs)
    cbs = [] if any(isinstance(o, ChannelsLast) for o in self.cbs) else [ChannelsLast()]
    if use_amp and not has_precision:
        cbs.append(MixedPrecision(amp_mode, init_scale, growth_factor, backoff_factor, growth_interval, enabled,
                                  loss_scale=loss_scale, scaler=scaler, fp32_modules=fp32_modules, on_overflow=on_overflow, patience=patience))
    return self.add_cbs(cbs)


@patch
def amp_context(self: Learner) -> AbstractContextManager: # To enter with `with`; a new one for each use
    """The learner's precision for code outside the training loop: `with learn.amp_context(): learn.model(x)`.

    autocast for the device the model is on; does nothing in fp32. Works inside and outside `fit`.
    """
    cb = next((o for o in self.cbs if isinstance(o, MixedPrecision)), None)
    return nullcontext() if cb is None else cb.context()


@patch
def compare_precision(self: Learner,
    modes: Sequence[str | AMPMode | torch.dtype] = ('fp32', 'bf16', 'fp16'), # The precisions; fp32, the measure, is always among them
    n_steps: int = 50, # Training batches for each mode
    *,
    lr: float | slice | None = None, # Learning rate; the learner's own if None
    n_seeds: int = 3, # How often fp32 is repeated with another order of the batches and other random draws
    budget: float = 20., # Seconds after which an emulated mode is cut short
    cbs: Sequence[Callback] | None = None, # The learner's callbacks that take part; those that shape the training step if None
) -> PrecisionComparison: # `table`, `plot()`, `recommended` and `reason`; shows itself in a notebook
    """Train `n_steps` in each precision, from the learner's present state on the same batches, and put everything back.

    The modes take turns, a few steps each, so that whatever else the machine does slows all of them; only the training
    steps are timed, not the loading of data. A mode that the device does not run gets a row with the reason.

    What takes part: of fastai's callbacks those that shape a training step (mixup and cutmix, gradient accumulation and
    clipping, RNN and batch-norm callbacks, channels last), of others those with an event from `before_batch` to
    `after_step`. Loggers, the recorder, progress bars, schedulers, and what saves or stops do not; nor do metrics,
    validation and `after_epoch`.

    Raises `ValueError` for an unknown mode, for unusable numbers, and for a learner without training batches.
    """
    return compare(self, modes, n_steps, lr=lr, n_seeds=n_seeds, budget=budget, cbs=cbs)


@patch
def precision_report(self: Learner,
    modes: Iterable[str | AMPMode] = ('bf16', 'fp16'), # The precisions to ask about
    n_batches: int = 1, # How many batches to look at
    dl: Any = None, # The DataLoader to take them from; the training set's if None
) -> PrecisionReport: # `verdicts`, `table`, `fp32_modules`, `plot()`; shows itself in a notebook
    """Does the model survive low precision, and if not, where? Asked before training, on real batches.

    Runs forward and backward on training batches in fp32 and in each mode, in training mode, and looks into each module;
    modules that leave finite numbers, or lose more than a tenth, are kept in fp32 and the batches run again, until the
    verdict is known to hold. The learner stays as it was, bit for bit, and its callbacks do not fire (what RNNCallback
    does to predictions is done). A model wrapped for data parallelism is run unwrapped, each process on its own batches,
    without communication; a compiled one is run as it was written.

    Raises `ValueError` for an unknown mode, `n_batches` below 1, no batches, and sharded parameters (FSDP).
    """
    return report(self, modes, n_batches, dl)
