"The methods of `Learner`: `to_fp16`, `to_bf16` and one for each other precision, `to_amp`, `to_fp32` and others."
from __future__ import annotations

import inspect, sys
from collections.abc import Callable, Iterable, Iterator
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
from ..precisions import PRECISIONS, AMPMode, Precision, each_precision, parameters_of
from .callback import CALLBACK_PARAMETERS, MixedPrecision, automatic_parameters, precision_callback
from .loop import PRECISION_CALLBACKS, in_batch, set_callback

__all__ = ['set_precision']

measure_and_choose: Any = None  # for `to_amp(measure=True)`; set by the package `insight`


def set_precision(
    learn: Learner,
    cb: MixedPrecision | None, # Built, and so checked, before anything is removed; None for fp32
) -> Learner: # The learner
    "Make `cb` the learner's only precision callback; in the middle of a batch, from its end on."
    if cb is not None: cb.precision.check(learn.model)
    return set_callback(learn, cb)


class _CurrentPrecision:
    "The learner's precision callback, a `MixedPrecision`; None in plain fp32."
    def __get__(self, learn: Learner | None, kind: type | None = None) -> Any:
        "Return it; of the class this descriptor."
        if learn is None: return self
        if 'precision' in vars(learn): return vars(learn)['precision']
        # fastai looks up each name that a user's callback sets on itself, and warns if the learner has it.
        if sys._getframe(1).f_globals.get('__name__') == 'fastai.callback.core': raise AttributeError('precision')
        return precision_callback(learn)
    def __set__(self, learn: Learner, value: Any) -> None:
        "Set a user's callback of this name, as fastai's `add_cb` does. Raises `AttributeError` for anything else."
        if getattr(value, 'name', None) != 'precision':
            raise AttributeError(f"learn.precision = {value!r}: it cannot be assigned.\n"
                                 "Write `learn.to_bf16()`, `to_fp16()`, `to_amp()` or `to_fp32()`.")
        vars(learn)['precision'] = value
    def __delete__(self, learn: Learner) -> None:
        "Delete what `__set__` set."
        vars(learn).pop('precision', None)


Learner.precision = _CurrentPrecision()


# -- one method for each precision

def _add_method(cls: type[Precision]) -> None:
    "Give `Learner` the method `to_<name>`, with the signature and the documented arguments of `cls`."
    name, parameters = f'to_{cls.name}', {**parameters_of(cls), **CALLBACK_PARAMETERS}

    def method(self: Learner, *args: Any, **kwargs: Any) -> Learner:
        refuse_unknown(name, parameters, kwargs)
        if args and not any(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters_of(cls).values()):
            raise TypeError(f'{name}({args[0]!r}): its arguments are given by name, such as `fp32_modules=`.\n'
                            'To let the device decide the precision call `learn.to_amp()`.')
        options = {option: kwargs.pop(option) for option in CALLBACK_PARAMETERS if option in kwargs}
        return set_precision(self, MixedPrecision(cls(*args, **kwargs), **options))

    own = [inspect.Parameter('self', inspect.Parameter.POSITIONAL_OR_KEYWORD), *parameters.values()]
    method.__signature__ = inspect.Signature(own, return_annotation=Learner)   # type: ignore[attr-defined]
    vars(method)['__delwrap__'] = cls.__init__                   # where fastcore's `docments` looks
    method.__name__, method.__qualname__, method.__module__ = name, f'Learner.{name}', __name__
    method.__doc__ = cls.__doc__
    setattr(Learner, name, method)
    _document(method, parameters, MixedPrecision.__init__, cls.__init__)


def _document(
    function: Any, # A method of the learner or a class, whose docstring gets a list of its arguments, for `help`
    parameters: Iterable[str], # Their names
    *sources: Callable, # Functions with the meaning of the arguments in comments; a later one overrides
) -> None:
    texts = {name: text for source in sources for name, text in docments(source).items() if text}
    lines = [f'  {name}: {texts[name]}' for name in parameters if name in texts]
    if not inspect.isclass(function): lines.append('Returns the learner.')
    function.__doc__ = '\n'.join([inspect.cleandoc(function.__doc__ or ''), '', 'Arguments:', *lines])


each_precision(_add_method)


def _any_precision(**kwargs): "A function with the arguments of `MixedPrecision`, for `delegates`."
_any_precision.__signature__ = inspect.signature(MixedPrecision)   # type: ignore[attr-defined]

@patch
@delegates(_any_precision, but=[name for name in inspect.signature(MixedPrecision).parameters
                                if name not in {**automatic_parameters(), **CALLBACK_PARAMETERS}])
def to_amp(self: Learner, *args,
    measure: bool = False, # Time each precision on real batches, and pick the fastest one whose loss matches fp32
    max_seconds: float = 60., # Time limit of measuring
    **kwargs
) -> Learner: # The learner
    """Train in the precision that the model's device runs natively: bf16, otherwise fp16, otherwise fp32.

    The choice depends only on the device. Small models may still be faster in fp32: `measure=True` finds out. It tries
    the precisions on copies of the learner, prints the decision, and keeps the details in `learn.precision_decision`.
    Other arguments are those of `to_bf16` and `to_fp16`. Raises `RuntimeError` for `measure=True` in distributed runs.
    """
    if args:
        raise TypeError(f"to_amp({args[0]!r}): to_amp chooses the precision itself.\nTo choose one yourself, call "
                        "`learn.to_bf16()` or `learn.to_fp16()`; to measure all of them `learn.to_amp(measure=True)`.")
    if not isinstance(measure, bool):
        raise TypeError(f"to_amp(measure={measure!r}): measure is True or False.\nFor a precision of your choice call "
                        "`learn.to_bf16()` or `learn.to_fp16()`.")
    known = inspect.signature(Learner.to_amp).parameters
    refuse_unknown('to_amp', [n for n in known if n not in ('self', 'args')], kwargs)
    if not measure and max_seconds != 60:
        raise ValueError(f"to_amp(max_seconds={max_seconds!r}) applies only with measure=True.\nCall "
                         "`to_amp(measure=True, max_seconds=...)`, or leave it out.")
    if not measure: return set_precision(self, MixedPrecision('auto', **kwargs))
    if kwargs:
        raise ValueError(f"to_amp(measure=True) cannot be combined with {', '.join(kwargs)}: it chooses the arguments "
                         "itself.\nUse the call that it prints, and add to that.")
    measure_and_choose(self, max_seconds)
    return self


@patch
def to_fp32(self: Learner) -> Learner: # The learner
    "Train in plain float32: removes every precision callback, fastai's own included."
    return set_precision(self, None)


@patch
@contextmanager
def precision_as(self: Learner,
    precision: str | AMPMode | torch.dtype | Precision | MixedPrecision, # 'fp32', 'bf16' ..., or a callback
) -> Iterator[Learner]: # The learner
    """Temporarily use another precision: `with learn.precision_as('fp32'): learn.validate()`.

    The learner's own precision, with its loss scale and history, is restored on exit. Raises `RuntimeError` in the
    middle of a batch.
    """
    if in_batch(self):
        raise RuntimeError('precision_as() cannot be used in the middle of a batch. Call it between batches, as in '
                           '`after_epoch`.')
    is_fp32 = precision is torch.float32 or str(precision).lower() == 'fp32'
    before = next((cb for cb in self.cbs if isinstance(cb, PRECISION_CALLBACKS)), None)
    new = None if is_fp32 else precision if isinstance(precision, MixedPrecision) else MixedPrecision(precision)
    try: yield set_precision(self, new)
    finally: set_callback(self, before)


@patch
@delegates(_any_precision)
def to_channelslast(self: Learner,
    use_amp: bool = True, # Also train in mixed precision; False keeps the learner's precision
    *args, **kwargs
) -> Learner: # The learner
    """Train in the channels last memory format, and in mixed precision.

    Precision arguments (such as `amp_mode='bf16'`) replace the current precision. Without any, an fp32 learner switches
    to fp16. Raises `ValueError` for precision arguments with `use_amp=False`.
    """
    known = inspect.signature(Learner.to_channelslast).parameters
    refuse_unknown('to_channelslast', [n for n in known if n not in ('self', 'args')], kwargs)
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
    """Context manager: autocast as in `fit`, for calling the model yourself. No effect in fp32.

    `with learn.amp_context(): learn.model(x)` works inside and outside of `fit`.
    """
    cb = precision_callback(self)
    return nullcontext() if cb is None else cb.amp_context()


_sources: Any = [*(cls.__init__ for cls in reversed(PRECISIONS.values())), MixedPrecision.__init__]
for _function in MixedPrecision, Learner.to_amp, Learner.to_channelslast:
    _names = [name for name in inspect.signature(_function).parameters if name != 'args']
    _document(_function, _names, *_sources, _function)
