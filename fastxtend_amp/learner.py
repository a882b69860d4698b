"The core's methods of `Learner`: `to_fp16`, `to_bf16`, `to_amp`, `to_fp32`, `to_channelslast` and two more."
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from inspect import Parameter, signature
from typing import Any

# channelslast patches `Learner.to_channelslast`: imported here so that it cannot do so after us.
from fastai.callback.channelslast import ChannelsLast
from fastai.learner import Learner
from fastcore.basics import patch

from .callback import PRECISION_CALLBACKS, MixedPrecision
from .refused_names import refuse_unknown
from .mode import AMPMode
from .observer import ON_ATTACH, ON_MEASURE

__all__ = ['set_precision', 'takes_arguments_of']


def takes_arguments_of(
    to: Callable, # The function whose arguments are handed on
    but: str = '', # Names of its arguments that are not, separated by commas
) -> Callable: # A decorator for a function that ends in `*args, **kwargs`
    """Decorator: `*args, **kwargs` stand for the arguments of `to`, in signature, `help` and `doc`.

    fastcore's `delegates`, but positional arguments stay positional.
    """
    left_out = {'self', *but.replace(' ', '').split(',')}
    def decorate(f):
        variable = Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD
        own = [p for p in signature(f).parameters.values() if p.kind not in variable]
        taken = left_out | {p.name for p in own}
        shared = [p for p in signature(to).parameters.values() if p.name not in taken]
        f.__delwrap__ = to                                       # where fastcore's `docments` looks for the meanings
        f.__signature__ = signature(f).replace(parameters=sorted(own + shared, key=lambda p: p.kind))
        return f
    return decorate


def set_precision(
    learn: Learner,
    cb: MixedPrecision | None, # Built, and so checked, before anything is removed; None for fp32
) -> Learner: # The learner
    "Leave `cb` as the learner's only precision callback; called in the middle of a batch, at its end."
    if cb is not None: cb.check_modules(learn.model)
    old = [o for o in learn.cbs if isinstance(o, PRECISION_CALLBACKS)]
    busy = next((o for o in old if isinstance(o, MixedPrecision) and o.in_batch), None)
    if busy is not None:
        busy.replace_after_batch(cb)
        return learn
    for o in old: learn.remove_cb(o)
    return learn if cb is None else learn.add_cb(cb)


@patch(as_prop=True)
def precision(self: Learner) -> MixedPrecision | None:
    "The learner's precision callback; None in plain fp32."
    return next((cb for cb in self.cbs if isinstance(cb, MixedPrecision)), None)


@patch
@takes_arguments_of(MixedPrecision.__init__, but='amp_mode')
def to_fp16(self: Learner, *args, **kwargs) -> Learner: # The learner
    "Train in float16 mixed precision; replaces any other precision callback."
    refuse_unknown(Learner.to_fp16, kwargs)
    return set_precision(self, MixedPrecision(AMPMode.FP16, *args, **kwargs))


@patch
@takes_arguments_of(MixedPrecision.__init__, but='amp_mode, init_scale, growth_factor, backoff_factor, '
                                                 'growth_interval, enabled, loss_scale, scaler')
def to_bf16(self: Learner, **kwargs) -> Learner: # The learner
    "Train in bfloat16 mixed precision, which needs no loss scaling; replaces any other precision callback."
    refuse_unknown(Learner.to_bf16, kwargs)
    return set_precision(self, MixedPrecision(AMPMode.BF16, **kwargs))


@patch
@takes_arguments_of(MixedPrecision.__init__, but='amp_mode')
def to_amp(self: Learner, *args,
    measure: bool = False, # Try the precisions on the learner's own batches, and take the fastest that trains as fp32
    max_seconds: float = 60., # For measuring
    **kwargs
) -> Learner: # The learner
    """Train in the fastest precision that the model's device does natively: bf16, then fp16, else fp32.

    Looks up what the device can do. It cannot know whether this model gains from it: small layers may train faster in
    fp32 all the same. With `measure=True` fp32, bf16 and fp16 are tried instead, as far as the device does them
    natively, and half-precision weights if the learner has them, on copies of the learner; one line says what was
    taken and why. What was measured is then `learn.precision_decision`, and, unless fp32 was the fastest, which has no
    callback, `learn.precision.decision`.
    """
    refuse_unknown(Learner.to_amp, kwargs)
    if not isinstance(measure, bool):
        raise TypeError(f"to_amp(measure={measure!r}): measure is True or False.\nFor a precision of your choice call "
                        "`learn.to_bf16()` or `learn.to_fp16()`.")
    if not measure and max_seconds != 60:
        raise ValueError(f"to_amp(max_seconds={max_seconds!r}) is for measuring, which was not asked for.\nCall "
                         "`to_amp(measure=True, max_seconds=...)`, or leave it out.")
    if measure:
        if args or kwargs:
            given = ', '.join([*map(repr, args), *kwargs])
            raise ValueError(f"to_amp(measure=True) cannot be combined with {given}: it settles the arguments itself.\n"
                             "Take the call that it prints, and add to that.")
        ON_MEASURE[-1](self, max_seconds)
        return self
    if args and (isinstance(args[0], bool) or not isinstance(args[0], (int, float))):
        raise TypeError(f"to_amp({args[0]!r}): to_amp chooses the precision itself.\nFor one of your choice call "
                        "`learn.to_bf16()` or `learn.to_fp16()`; to have all measured `learn.to_amp(measure=True)`.")
    return set_precision(self, MixedPrecision('auto', *args, **kwargs))


@patch
def to_fp32(self: Learner) -> Learner: # The learner
    "Train in plain float32: removes every precision callback, fastai's own included."
    for attached in ON_ATTACH: attached(self)
    return set_precision(self, None)


@patch
@takes_arguments_of(MixedPrecision.__init__)
def to_channelslast(self: Learner,
    use_amp: bool = True, # Add `MixedPrecision`, if the learner has no precision callback yet
    *args, **kwargs
) -> Learner: # The learner
    "Train in the channels last memory format, and in mixed precision (fp16 unless told otherwise)."
    refuse_unknown(Learner.to_channelslast, kwargs)
    if not isinstance(use_amp, bool):
        raise TypeError(f"to_channelslast({use_amp!r}): the first argument, use_amp, is True or False.\n"
                        "Write `to_channelslast(amp_mode='bf16')` for a precision.")
    has_precision = any(isinstance(o, PRECISION_CALLBACKS) for o in self.cbs)
    cbs: list[Any] = [] if any(isinstance(o, ChannelsLast) for o in self.cbs) else [ChannelsLast()]
    if use_amp and not has_precision: cbs.append(MixedPrecision(*args, **kwargs))
    return self.add_cbs(cbs)


@patch
def amp_context(self: Learner) -> AbstractContextManager: # To enter with `with`; a new one for each use
    """The learner's precision for code outside the training loop: `with learn.amp_context(): learn.model(x)`.

    autocast for the device the model is on; does nothing in fp32. Works inside and outside `fit`.
    """
    return nullcontext() if self.precision is None else self.precision.context()
