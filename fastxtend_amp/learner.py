"What does a user call?"
from contextlib import AbstractContextManager, nullcontext

import torch
# channelslast patches `Learner.to_channelslast`: imported here so that it cannot do so after us.
from fastai.callback.channelslast import ChannelsLast
from fastai.learner import Learner
from fastcore.basics import patch
from torch.amp import GradScaler

from .callback import PRECISION_CALLBACKS, MixedPrecision
from .mode import AMPMode

__all__ = []


def _replace_precision(learn: Learner, cb: MixedPrecision | None) -> Learner:
    "Leave `cb` as the learner's only precision callback; it was built, and so checked, before anything is removed."
    for old in [o for o in learn.cbs if isinstance(o, PRECISION_CALLBACKS)]: learn.remove_cb(old)
    return learn if cb is None else learn.add_cb(cb)


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
) -> Learner: # The learner
    "Train in float16 mixed precision; replaces any other precision callback."
    return _replace_precision(self, MixedPrecision(AMPMode.FP16, init_scale, growth_factor, backoff_factor, growth_interval,
                                                   enabled, loss_scale=loss_scale, scaler=scaler))


@patch
def to_bf16(self: Learner) -> Learner: # The learner
    "Train in bfloat16 mixed precision, which needs no loss scaling; replaces any other precision callback."
    return _replace_precision(self, MixedPrecision(AMPMode.BF16))


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
) -> Learner: # The learner
    "Train in the fastest precision that the model's device does natively: bf16, then fp16, else fp32."
    return _replace_precision(self, MixedPrecision('auto', init_scale, growth_factor, backoff_factor, growth_interval,
                                                   enabled, loss_scale=loss_scale, scaler=scaler))


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
) -> Learner: # The learner
    "Train in the channels last memory format, and in mixed precision (fp16 unless told otherwise)."
    has_precision = any(isinstance(o, PRECISION_CALLBACKS) for o in self.cbs)
    cbs = [] if any(isinstance(o, ChannelsLast) for o in self.cbs) else [ChannelsLast()]
    if use_amp and not has_precision:
        cbs.append(MixedPrecision(amp_mode, init_scale, growth_factor, backoff_factor, growth_interval, enabled,
                                  loss_scale=loss_scale, scaler=scaler))
    return self.add_cbs(cbs)


@patch
def amp_context(self: Learner) -> AbstractContextManager: # To enter with `with`; a new one for each use
    """The learner's precision for code outside the training loop: `with learn.amp_context(): learn.model(x)`.

    autocast for the device the model is on; does nothing in fp32. Works inside and outside `fit`.
    """
    cb = next((o for o in self.cbs if isinstance(o, MixedPrecision)), None)
    return nullcontext() if cb is None else cb.context()
