"The methods of `Learner`: `to_fp16`, `to_bf16` and one for each other precision, `to_amp`, `to_fp32` and others."
import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from fastai.learner import Learner
from fastcore.basics import patch
from fastcore.meta import delegates

from ..compat import backward_without_autocast
from ..learners import loaded_states, training_device
from ..messages import check_argument, check_bool
from ..precisions import (PRECISIONS, AMPMode, Precision, fastest_native, find_precision, on_register,
                          parameters_of)
from ..precisions.forwards import remove_forwards
from ..precisions.weights_to_fp32 import weights_to_fp32
from ..tensors import half_to_float
from .callback import MixedPrecision
from .current import PRECISION_CALLBACKS, exchange, precision_callback, set_precision

measure_and_choose: Any = None  # for `to_amp(measure=True)`; set by the package `insight`

OPTIONS = {name: p for name, p in inspect.signature(MixedPrecision.__init__, eval_str=True).parameters.items()
            if p.kind is p.KEYWORD_ONLY}


def _add_method(cls: type[Precision]) -> None:
    """Give `Learner` the method `to_<name>`, with the arguments of `cls` and the options of `MixedPrecision`.

    Raises `ValueError` if `Learner` has another method of that name.
    """
    old, name = PRECISIONS.get(cls.name), f'to_{cls.name}'
    is_redefined = old is not None and (old.__module__, old.__qualname__) == (cls.__module__, cls.__qualname__)
    if hasattr(Learner, name) and not is_redefined:                  # a notebook's cell may run again
        raise ValueError(f'name={cls.name!r} cannot be used for {cls.__name__}: `Learner.{name}` exists already. '
                         'Choose another name.')

    def method(self: Learner, *args: Any, **kwargs: Any) -> Learner:
        return set_precision(self, MixedPrecision(cls.name, *args, **kwargs))

    first, *_ = inspect.signature(method).parameters.values()
    parameters = [first, *parameters_of(cls).values(), *OPTIONS.values()]
    signature = inspect.Signature(parameters, return_annotation=Learner)
    vars(method).update(__signature__=signature, __delwrap__=cls.__init__)   # where fastcore's `docments` looks
    method.__name__, method.__qualname__, method.__doc__ = name, f'Learner.{name}', cls.__doc__
    setattr(Learner, name, method)


for cls in PRECISIONS.values(): _add_method(cls)
on_register.append(_add_method)


@patch
@delegates(Learner.to_fp16)
@delegates(Learner.to_bf16, keep=True)
def to_amp(self: Learner, *,
    measure: bool = False, # Apply what `compare_precision` recommends, fp32 and channels last included
    max_seconds: float | None = None, # Approximate time limit of measuring; 60 if None
    **kwargs
) -> Learner: # The learner
    """Train in the precision that the model's device runs natively: bf16, otherwise fp16, otherwise fp32.

    The choice depends only on the device; small models may still be faster in fp32.

    `measure=True` accepts only `max_seconds`, and keeps the arguments of an earlier call, such as
    `learn.to_fp16(fp32_modules=...)`. Distributed runs raise `RuntimeError`.
    """
    check_bool(measure=measure)
    if measure:
        if kwargs:
            raise TypeError(f"to_amp(measure=True) accepts only `max_seconds`, not {', '.join(kwargs)}.\n"
                            'Call `learn.to_fp16(...)` or another method first; its arguments are kept.')
        measure_and_choose(self, 60. if max_seconds is None else max_seconds)
        return self
    if max_seconds is not None: raise TypeError('to_amp(): max_seconds needs measure=True.')
    device = training_device(self)
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    precision = _automatic_precision(device, **kwargs)
    cb = MixedPrecision(precision, **options)                    # this and the next line check, also for fp32
    precision.check(self.model)
    if type(precision) is Precision:
        print(f"to_amp: fp32, as '{device}' runs neither bf16 nor fp16 natively; `precision_support()` says why.")
        return self.to_fp32()
    set_precision(self, cb)
    print(f"to_amp: {precision.name}, which '{device}' runs natively ({precision.support(device).why}).")
    if unused := sorted(kwargs.keys() - precision.arguments): print(f"{precision.name} has no {', '.join(unused)}.")
    if device.type == 'cpu':
        print('Small models may be faster in fp32 on a CPU: `learn.to_amp(measure=True)` finds out.')
    return self


def _automatic_precision(
    device: torch.device,
    **arguments: Any, # Of any precision that it may select: all are checked, and the selected one gets its own
) -> Precision: # Plain fp32 if neither bf16 nor fp16 is native
    "Return the fastest precision that `device` runs natively, with those of the arguments that it has."
    built, unknown = {Precision: Precision(arguments.get('fp32_modules'))}, {*arguments}
    for cls in PRECISIONS.values():
        if not cls.automatic: continue
        accepted = arguments.keys() & parameters_of(cls)
        built[cls] = cls(**{name: arguments[name] for name in accepted})
        unknown -= accepted
    if unknown: raise TypeError(f'learn.to_amp() got an unexpected keyword argument {min(unknown)!r}')
    return built[fastest_native(device)]


# `to_tf32` has no arguments but the options.
@patch
@delegates(Learner.to_tf32)
def to_half_weights(self: Learner,
    amp_mode: str | AMPMode | torch.dtype = 'bf16', # Precision of the weights: 'bf16' or 'fp16'
    loss_scale: float | None = None, # Fixed loss scale; None for dynamic scaling (fp16)
    flat_master: bool = False, # Join the master weights into a few large tensors
    master_weights: bool = True, # Keep fp32 master weights; False trains bf16 weights
    fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules or predicates
    **kwargs
) -> Learner: # The learner
    """Call `to_bf16` or `to_fp16` with the arguments of fastai v1's `to_fp16`.

    Raises `ValueError` for another `amp_mode`, and what these methods raise.

    Source: Micikevicius et al., Mixed Precision Training, https://arxiv.org/abs/1710.03740, section 3.1.
    """
    name = find_precision(amp_mode).name
    check_argument('amp_mode', name, ('bf16', 'fp16').__contains__,
                   f"'bf16' or 'fp16'; without 16-bit weights call `learn.to_{name}()`")
    if loss_scale is not None: kwargs['loss_scale'] = loss_scale     # `to_bf16` does not have it
    if master_weights is not True: kwargs['master_weights'] = master_weights     # nor `to_fp16` this
    return getattr(self, f'to_{name}')(flat_master=flat_master, fp32_modules=fp32_modules, **kwargs)


@patch
def to_fp32(self: Learner) -> Learner: # The learner
    """Train in plain float32: removes every precision callback, fastai's own included.

    Between batches it also converts 16-bit weights, frozen ones included.
    """
    set_precision(self, None)
    if precision_callback(self) is None:                         # it is there until the batch ends
        weights_to_fp32(self.model, self.opt)                    # with the optimizer's state
        self.model._apply(half_to_float)
        remove_forwards(self.model)
    return self


@patch
@contextmanager
def precision_as(self: Learner,
    precision: str | torch.dtype | Precision | MixedPrecision, # 'fp32', 'bf16' ..., or a callback
) -> Iterator[Learner]: # The learner; to enter with `with`
    """Context manager: use another precision between two batches, then restore the learner's own with its loss scale.

    For example, `with learn.precision_as('fp32'): learn.validate()`. The history of steps is restored as well.
    """
    new = precision if isinstance(precision, MixedPrecision) else MixedPrecision(precision)
    own, states = precision_callback(self), loaded_states(self)
    loaded = {**states}
    if own is not None and own.in_batch: raise RuntimeError('precision_as() cannot be used in a batch.')
    fastais = [cb for cb in self.cbs if isinstance(cb, PRECISION_CALLBACKS) and cb is not own]
    set_precision(self, None if type(new.precision) is Precision else new)
    try:
        if own: states = self.loaded_precision = {**states, own.precision.state_key: own.state_dict()}   # for `save`
        yield self
    finally:
        if own and loaded_states(self) is not states:            # as if `load` had come afterwards
            key = own.precision.state_key
            waiting = loaded_states(self).pop(key, None)
            own.precision.load_state_dict(new.state_dict() if new.precision.state_key == key else waiting)
        exchange(self, own)                                      # without a check: the model may have been exchanged
        self.add_cbs(fastais)
        states.update(loaded)                                    # `new` may have continued from it


@patch
@contextmanager
def amp_context(self: Learner) -> Iterator[None]: # To enter with `with`; a new one for each use
    """Context manager: autocast as in `fit`, for calling the model yourself. No effect in fp32.

    With activation checkpointing, call `backward()` inside it.
    """
    cb, device = precision_callback(self), training_device(self)
    precision = cb.precision if cb else Precision()
    contexts = [backward_without_autocast()]
    if cb and cb.fit: cb.fit.use_model()
    else:
        precision.check_device(device)
        contexts += precision.around_fit(self.model)
    with ExitStack() as stack:
        for context in contexts + precision.around_batch(device): stack.enter_context(context)
        yield
