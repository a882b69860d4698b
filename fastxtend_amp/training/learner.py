"The methods of `Learner`: `to_fp16`, `to_bf16` and one for each other precision, `to_amp`, `to_fp32` and others."
from __future__ import annotations

import inspect, sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
# channelslast patches `Learner.to_channelslast`: imported here so that it cannot do so after us.
from fastai.callback.channelslast import ChannelsLast
from fastai.learner import Learner
from fastcore.basics import patch
from fastcore.docments import docments
from fastcore.meta import delegates

from ..common import refuse_unknown
from ..precisions import Precision, each_precision, parameters_of
from .callback import CALLBACK_PARAMETERS, MixedPrecision, parameters_of_all
from .loop import in_batch, precision_callback, precision_callbacks, set_callback

measure_and_choose: Any = None  # for `to_amp(measure=True)`; set by the package `insight`


def set_precision(
    learn: Learner,
    cb: MixedPrecision | None, # Built, and so checked, before anything is removed; None for fp32
) -> Learner: # The learner
    "Make `cb` the learner's only precision callback; in the middle of a batch, when that ends."
    if cb: cb.precision.check(learn.model)
    return set_callback(learn, cb)


@patch(as_prop=True)
def precision(self: Learner) -> Any:
    "The learner's precision callback, a `MixedPrecision`; None in plain fp32."
    # fastai looks up each name that a user's callback sets on itself, and warns if the learner has it.
    if sys._getframe(1).f_globals.get('__name__') == 'fastai.callback.core': raise AttributeError('precision')
    return precision_callback(self)


@patch(set_prop=True, nm='precision')
def _refuse_assignment(self: Learner, value: Any) -> None:
    "Raise an `AttributeError`: also for a callback that fastai would name `precision` after its class."
    raise AttributeError(f'learn.precision = {value!r}: it cannot be assigned.\nCall `learn.to_bf16()`, `to_fp16()`, '
                         '`to_amp()` or `to_fp32()`; give a callback of your own another name.')


# -- one method for each precision

def documented(method: Any) -> Any: # The method
    "Add a list of the arguments to a method's docstring, for `help`, from the comments beside them."
    own, shared = docments(method), docments(MixedPrecision.__init__)
    names = [*inspect.signature(method).parameters][1:]          # without `self`
    lines = [f"  {name}: {own[name] or shared.get(name, '')}" for name in names]
    result = f"Returns: {own.get('return') or 'The learner'}."
    method.__doc__ = '\n'.join([inspect.cleandoc(method.__doc__), '', 'Arguments:', *lines, result])
    return method


def _add_method(cls: type[Precision]) -> None:
    "Give `Learner` the method `to_<name>`, with the signature and the documented arguments of `cls`."
    name, parameters = f'to_{cls.name}', {**parameters_of(cls), **CALLBACK_PARAMETERS}

    def method(self: Learner, *args: Any, **kwargs: Any) -> Learner:
        refuse_unknown(name, parameters, kwargs)
        options = {option: kwargs.pop(option) for option in CALLBACK_PARAMETERS if option in kwargs}
        return set_precision(self, MixedPrecision(cls(*args, **kwargs), **options))

    signature = inspect.signature(method)
    vars(method).update(
        __signature__=signature.replace(parameters=[signature.parameters['self'], *parameters.values()]),
        __delwrap__=cls.__init__)                                # where fastcore's `docments` looks
    method.__name__, method.__qualname__, method.__doc__ = name, f'Learner.{name}', cls.__doc__
    setattr(Learner, name, documented(method))


each_precision(_add_method)


@patch
@documented
@delegates(Learner.to_fp16)
def to_amp(self: Learner, *,
    measure: bool = False, # Time each precision on real batches, and pick the fastest one whose loss matches fp32
    max_seconds: float = 60., # Time limit of measuring
    **kwargs
) -> Learner: # The learner
    """Train in the precision that the model's device runs natively: bf16, otherwise fp16, otherwise fp32.

    The choice depends only on the device; small models may still be faster in fp32. It accepts the arguments of
    `to_fp16`, and `skip_nonfinite` of `to_bf16`.

    With `measure=True`, it times bf16, fp16 and TF32, where they are native, on copies of the learner, and selects the
    fastest of them, or fp32. It prints the decision, and stores the details in `learn.precision_decision`.
    `max_seconds` is then the only other argument, and distributed runs raise `RuntimeError`.
    """
    if measure and kwargs:
        raise TypeError(f"to_amp(measure=True) has only the argument 'max_seconds', not {', '.join(map(repr, kwargs))}."
                        '\nLeave it out, or leave out `measure=True`.')
    if not measure and max_seconds != 60:
        raise ValueError(f'to_amp(max_seconds={max_seconds!r}) applies only with measure=True.')
    if measure:
        measure_and_choose(self, max_seconds)
        return self
    refuse_unknown('to_amp', {**parameters_of_all(only_automatic=True), **CALLBACK_PARAMETERS}, kwargs)
    return set_precision(self, MixedPrecision('auto', **kwargs))


@patch
def to_fp32(self: Learner) -> Learner: # The learner
    "Train in plain float32: removes every precision callback, fastai's own included."
    return set_precision(self, None)


@patch
@contextmanager
def precision_as(self: Learner,
    precision: str | torch.dtype | Precision | MixedPrecision, # 'fp32', 'bf16' ..., or a callback
) -> Iterator[Learner]: # The learner
    """Temporarily use another precision: `with learn.precision_as('fp32'): learn.validate()`.

    The learner's own precision, with its loss scale and history, is restored on exit. Raises `RuntimeError` in the
    middle of a batch.
    """
    if in_batch(self):
        raise RuntimeError('precision_as() cannot be used in the middle of a batch. Call it between batches, as in '
                           '`after_epoch`.')
    before = next(iter(precision_callbacks(self)), None)        # `learn.mixed_precision` may be the model's attribute
    if str(precision).lower() in ('fp32', 'torch.float32'): new = None
    else: new = precision if isinstance(precision, MixedPrecision) else MixedPrecision(precision)
    try: yield set_precision(self, new)
    finally: set_callback(self, before)


@patch
@documented
@delegates(Learner.to_fp16)
def to_channelslast(self: Learner,
    use_amp: bool = True, # Also train in mixed precision; False keeps the learner's precision
    amp_mode: str | torch.dtype | Precision | None = None, # None keeps the learner's precision; if it is fp32: fp16
    **kwargs
) -> Learner: # The learner
    """Train in the channels last memory format, and in mixed precision.

    Arguments for a precision (such as `amp_mode='bf16'`) replace the current one. Without any, the learner keeps its
    precision, or switches from fp32 to fp16, as in fastai. The list has the arguments of fp16; other precisions have
    their own. Raises `ValueError` for arguments of a precision with `use_amp=False`.
    """
    if amp_mode: kwargs['amp_mode'] = amp_mode
    if use_amp not in (True, False) or (kwargs and not use_amp):
        raise ValueError(f"to_channelslast(use_amp={use_amp!r}, **{kwargs}): use_amp is True or False, and with False "
                         "there are no arguments for a precision.\nWrite `to_channelslast(amp_mode='bf16')`.")
    if kwargs or (use_amp and not precision_callbacks(self)): set_precision(self, MixedPrecision(**kwargs))
    if 'channels_last' not in vars(self): self.add_cb(ChannelsLast())
    return self


@patch
def amp_context(self: Learner) -> AbstractContextManager: # To enter with `with`; a new one for each use
    """Context manager: autocast as in `fit`, for calling the model yourself. No effect in fp32.

    `with learn.amp_context(): learn.model(x)` works inside and outside of `fit`.
    """
    cb = precision_callback(self)
    return cb.amp_context() if cb else nullcontext()
