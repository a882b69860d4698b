"The core's methods of `Learner`: `to_fp16`, `to_bf16`, `to_tf32`, `to_fp8`, `to_amp`, `to_fp32` and others."
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from difflib import get_close_matches
from inspect import signature
from typing import Any

import torch
# channelslast patches `Learner.to_channelslast`: imported here so that it cannot do so after us.
from fastai.callback.channelslast import ChannelsLast
from fastai.learner import Learner
from fastcore.basics import patch
from fastcore.meta import delegates

from .callback import FP16_ARGUMENTS, MixedPrecision, precision_callback
from .loop import PRECISION_CALLBACKS, loop_of
from .mode import AMPMode

__all__ = ['refuse_unknown', 'set_precision']


FORMER = {  # arguments of fastai v1, of fastai's non-native fp16, and of earlier versions of this package
    'dynamic': "leave it out. Scaling is dynamic unless you give a static scale: `learn.to_fp16(loss_scale=512)`.",
    'max_noskip': "write `growth_interval=`, the number of steps without a skip after which the scale grows.",
    'div_factor': "write `growth_factor=` and `backoff_factor=`.",
    'max_scale': "write `init_scale=` for the scale to start from.",
    'max_loss_scale': "write `init_scale=` for the scale to start from.",
    'clip': "add fastai's callback, which sees unscaled gradients: `learn.add_cb(GradientClip(1.))`.",
    'clip_grad': "add fastai's callback, which sees unscaled gradients: `learn.add_cb(GradientClip(1.))`.",
    'keep_fp32': "write `fp32_modules=`.",
    'patience': "write `max_skips=`.",
    'budget': "write `max_seconds=`.",
    'cast_once': "leave it out. autocast casts each weight once in a batch.",
    'dtype': "write `amp_mode=`, as in `learn.to_half_weights(amp_mode='fp16')`, or call `learn.to_fp16()`.",
    'flat_master': "autocast has no master weights. For those write `learn.to_half_weights('fp16', flat_master=True)`.",
}


measure_and_choose: Any = None  # for `to_amp(measure=True)`; set by the package `insight`


def refuse_unknown(
    method: Callable, # Such as `Learner.to_fp16`
    names: Iterable[str], # Names of the arguments that it got
) -> None:
    "Raise a `TypeError` for an argument that `method` does not have, with what to write instead."
    known = [n for n in signature(method).parameters if n not in ('self', 'args')]
    for name in names:
        if name in known: continue
        near = get_close_matches(name, known, 1)
        instead = FORMER.get(name) or (f'did you mean `{near[0]}=`?' if near else f"there are {', '.join(known)}.")
        raise TypeError(f"{method.__name__}() has no argument '{name}': {instead}")


def set_precision(
    learn: Learner,
    cb: MixedPrecision | None, # Built, and so checked, before anything is removed; None for fp32
) -> Learner: # The learner
    "Leave `cb` as the learner's only precision callback; called in the middle of a batch, at its end."
    if cb is not None: cb.check_modules(learn.model)
    loop_of(learn).use(cb)
    return learn


class _Precision:                                                # no property: a user's callback may have this name
    "The learner's precision callback, a `MixedPrecision`; None in plain fp32."
    def __get__(self, learn: Learner | None, kind: type | None = None) -> Any:
        "Return it; of the class this descriptor."
        if learn is None: return self
        return vars(learn)['precision'] if 'precision' in vars(learn) else precision_callback(learn)
    def __set__(self, learn: Learner, value: Any) -> None:
        "Set a user's callback of this name, as fastai's `add_cb` does; refuse anything else."
        if getattr(value, 'name', None) != 'precision':
            raise AttributeError(f"learn.precision = {value!r}: a precision is not assigned.\n"
                                 "Write `learn.to_bf16()`, `to_fp16()`, `to_amp()` or `to_fp32()`.")
        vars(learn)['precision'] = value
    def __delete__(self, learn: Learner) -> None:
        "Delete what `__set__` set."
        vars(learn).pop('precision', None)


Learner.precision = _Precision()


@patch
@delegates(MixedPrecision, but=['amp_mode', 'modules'])
def to_fp16(self: Learner, *args, **kwargs) -> Learner: # The learner
    "Train in float16 mixed precision; replaces any other precision callback."
    refuse_unknown(Learner.to_fp16, kwargs)
    return set_precision(self, MixedPrecision(AMPMode.FP16, *args, **kwargs))


@patch
@delegates(MixedPrecision, but=['amp_mode', 'modules', *FP16_ARGUMENTS])
def to_bf16(self: Learner, *args, **kwargs) -> Learner: # The learner
    "Train in bfloat16 mixed precision, which needs no loss scaling; replaces any other precision callback."
    refuse_unknown(Learner.to_bf16, kwargs)
    if args:
        raise TypeError(f"to_bf16({args[0]!r}): bf16 has no loss scale, and all arguments are given by name, such as "
                        "`fp32_modules=`.\nTo have the precision chosen by the device call `learn.to_amp()`.")
    return set_precision(self, MixedPrecision(AMPMode.BF16, **kwargs))


@patch
@delegates(MixedPrecision, but=['amp_mode', *FP16_ARGUMENTS])
def to_fp8(self: Learner, **kwargs) -> Learner: # The learner
    """Train in bf16 mixed precision with linear layers in FP8, by torchao, on NVIDIA GPUs of capability 8.9 or newer.

    A layer takes part if both sides of its weight are divisible by 16. It computes in FP8 in fits, validations and
    `amp_context()`: weights, optimizer and files are those of the plain model, and load without torchao. What is gained
    depends on large layers, and on `torch.compile`: try `learn.compare_precision(['bf16', 'fp8'])`.

    Raises `ImportError` without torchao 0.18, and `ValueError` for a model without such layers.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, https://arxiv.org/abs/2209.05433;
    https://github.com/pytorch/ao/tree/main/torchao/float8.
    """
    refuse_unknown(Learner.to_fp8, kwargs)
    return set_precision(self, MixedPrecision(AMPMode.FP8, **kwargs))


@patch
def to_tf32(self: Learner) -> Learner: # The learner
    """Train in fp32 with matrix products and convolutions in TF32, on NVIDIA GPUs of capability 8.0 or newer.

    TF32 has fp32's range and fp16's precision: for models that do not train in half precision. The tensors are fp32.
    """
    return set_precision(self, MixedPrecision(AMPMode.TF32))


@patch
@delegates(MixedPrecision, but=['amp_mode', 'modules'])
def to_amp(self: Learner, *args,
    measure: bool = False, # Try the precisions on the learner's batches, and take the fastest that trains as fp32 does
    max_seconds: float = 60., # Time limit of measuring
    **kwargs
) -> Learner: # The learner
    """Train in the precision that the model's device does natively: bf16, then fp16, else fp32.

    This cannot know whether this model gains from it: small layers may train faster in fp32 all the same. With
    `measure=True` all precisions that the device does natively, and half-precision weights if the learner has them, are
    tried on copies of the learner; one line says what was taken and why, and `learn.precision_decision` is what was
    measured. Raises `RuntimeError` in several processes.
    """
    refuse_unknown(Learner.to_amp, kwargs)
    if args:
        raise TypeError(f"to_amp({args[0]!r}): to_amp chooses the precision itself.\nFor one of your choice call "
                        "`learn.to_bf16()` or `learn.to_fp16()`; to have all measured `learn.to_amp(measure=True)`.")
    if not isinstance(measure, bool):
        raise TypeError(f"to_amp(measure={measure!r}): measure is True or False.\nFor a precision of your choice call "
                        "`learn.to_bf16()` or `learn.to_fp16()`.")
    if not measure and max_seconds != 60:
        raise ValueError(f"to_amp(max_seconds={max_seconds!r}) applies with measure=True only.\nCall "
                         "`to_amp(measure=True, max_seconds=...)`, or leave it out.")
    if not measure: return set_precision(self, MixedPrecision('auto', **kwargs))
    if kwargs:
        raise ValueError(f"to_amp(measure=True) cannot be combined with {', '.join(kwargs)}: it chooses the arguments "
                         "itself.\nTake the call that it prints, and add to that.")
    measure_and_choose(self, max_seconds)
    return self


@patch
def to_fp32(self: Learner) -> Learner: # The learner
    "Train in plain float32: removes every precision callback, fastai's own included."
    return set_precision(self, None)


@patch
@contextmanager
def precision_as(self: Learner,
    precision: str | AMPMode | torch.dtype | MixedPrecision, # 'fp32', 'bf16' ..., or a callback
) -> Iterator[Learner]: # The learner
    """Run what is inside in another precision: `with learn.precision_as('fp32'): learn.validate()`.

    Loss scale, history and kept modules of the learner's own are afterwards as they were. Raises `RuntimeError` in the
    middle of a batch.
    """
    loop, is_fp32 = loop_of(self), precision is torch.float32 or str(precision).lower() == 'fp32'
    if loop.in_batch:
        raise RuntimeError('precision_as() cannot be used in the middle of a batch. Call it between batches, as in '
                           '`after_epoch`.')
    before = next((cb for cb in self.cbs if isinstance(cb, PRECISION_CALLBACKS)), None)
    new = None if is_fp32 else precision if isinstance(precision, MixedPrecision) else MixedPrecision(precision)
    try: yield set_precision(self, new)
    finally: loop_of(self).use(before)


@patch
@delegates(MixedPrecision)
def to_channelslast(self: Learner,
    use_amp: bool = True, # Whether to train in mixed precision, too; False leaves the learner's precision alone
    *args, **kwargs
) -> Learner: # The learner
    """Train in the channels last memory format, and in mixed precision.

    With precision arguments they replace any other precision callback; without, a learner in plain fp32 gets fp16.
    Raises `ValueError` for precision arguments with `use_amp=False`.
    """
    refuse_unknown(Learner.to_channelslast, kwargs)
    if not isinstance(use_amp, bool):
        raise TypeError(f"to_channelslast({use_amp!r}): the first argument, use_amp, is True or False.\n"
                        "Write `to_channelslast(amp_mode='bf16')` for a precision.")
    if (args or kwargs) and not use_amp:
        given = ', '.join([*map(repr, args), *(f'{k}={v!r}' for k, v in kwargs.items())])
        raise ValueError(f"to_channelslast(use_amp=False) cannot be combined with {given}, which sets a precision.\n"
                         "Write `to_channelslast(amp_mode='bf16')` for both, or `to_channelslast(False)`.")
    has_precision = any(isinstance(o, PRECISION_CALLBACKS) for o in self.cbs)
    if args or kwargs or (use_amp and not has_precision): set_precision(self, MixedPrecision(*args, **kwargs))
    if not any(isinstance(o, ChannelsLast) for o in self.cbs): self.add_cb(ChannelsLast())
    return self


@patch
def amp_context(self: Learner) -> AbstractContextManager: # To enter with `with`; a new one for each use
    """Run code outside the training loop in the learner's precision: `with learn.amp_context(): learn.model(x)`.

    Enters autocast for the device that `fit` uses; does nothing in fp32. Works inside and outside `fit`.
    """
    cb = precision_callback(self)
    return nullcontext() if cb is None else cb.amp_context()
