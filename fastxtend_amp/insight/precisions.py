"The precisions of a learner: their names, which of them to compare, and the call that selects one."
from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from fastai.learner import Learner

from ..training.callback import MixedPrecision, precision_callback
from ..common import training_device
from ..precisions.half_weights import LOWERED, HalfWeights
from ..precisions import PRECISIONS, AMPMode, Precision

__all__ = ['PrecisionChoice', 'call_for', 'choices_from', 'default_choices', 'precision_call', 'use_choice']

HALF_WEIGHTS = 'half weights'


@dataclass(frozen=True)
class PrecisionChoice:
    "One precision that a learner can be set to: fp32, autocast, or 16-bit weights."
    mode: AMPMode | None = None # The mode; None for fp32
    half_weights: bool = False # Whether the weights are 16-bit, as after `to_half_weights`
    fp32_modules: tuple[str, ...] = () # Modules to keep in fp32, besides those of the learner
    init_scale: float | None = None # Initial loss scale; that of the learner if None (fp16)
    compiled: bool = False # Whether the model is compiled, by `Module.compile`

    @property
    def name(self) -> str:
        "The name in the comparison's table: 'fp32', 'bf16', 'half weights', 'half weights fp16', 'bf16 compiled' ..."
        name = 'fp32' if self.mode is None else self.mode.value
        if self.half_weights: name = HALF_WEIGHTS if self.mode is AMPMode.BF16 else f'{HALF_WEIGHTS} {name}'
        return name + ' compiled' * self.compiled

    @property
    def color(self) -> str:
        "The colour in every plot."
        return HalfWeights.color if self.half_weights else PRECISIONS.get(self.mode or '', Precision).color


def choices_from(
    modes: Any, # Names, modes, dtypes or choices, one or several
) -> list[PrecisionChoice]: # fp32 first, each once
    "Return the precisions that `modes` names. Raises `ValueError` for an unknown one."
    one = isinstance(modes, (str, torch.dtype, PrecisionChoice)) or not hasattr(modes, '__iter__') or \
        hasattr(modes, 'dataset')                                # a DataLoader by mistake
    return list(dict.fromkeys([PrecisionChoice(), *map(_choice, [modes] if one else modes)]))


def _choice(name: Any) -> PrecisionChoice:
    if isinstance(name, PrecisionChoice): return name
    if name in ('fp32', torch.float32): return PrecisionChoice()
    half = isinstance(name, str) and name.startswith(HALF_WEIGHTS)
    try:
        mode = AMPMode(name.removeprefix(HALF_WEIGHTS).strip() or 'bf16' if half else name)
        if not half or mode.value in LOWERED: return PrecisionChoice(mode, half)
    except ValueError: pass
    names = ', '.join(repr(n) for n, cls in PRECISIONS.items() if cls is not HalfWeights)
    raise ValueError(f"modes={shorten(repr(name), 100)} cannot be used.\nAllowed: 'fp32', {names}, 'half weights' "
                     "(bf16), 'half weights fp16', or a list of these.")


def _has_half_weights(learn: Learner) -> bool:
    cb = precision_callback(learn)
    return cb is not None and isinstance(cb.precision, HalfWeights)


def default_choices(learn: Learner) -> list[PrecisionChoice]:
    """Return fp32, and the precisions that the device runs natively without another package.

    Half-precision weights are included only if the learner has them: by default they compute as autocast does.
    """
    tried = [AMPMode(name) for name, cls in PRECISIONS.items() if cls.in_tables and not cls.package]
    native = [m for m in tried if m.support(training_device(learn)).status == 'native']
    half = [m for m in native if m.value in LOWERED] if _has_half_weights(learn) else []
    return [PrecisionChoice(), *map(PrecisionChoice, native), *(PrecisionChoice(m, True) for m in half)]


class Call(NamedTuple):
    "A call that selects a precision, with all arguments that differ from the defaults; `str` formats it."
    method: str # Of the learner
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"learn.{self.method}({', '.join(f'{k}={_written(v, k)}' for k, v in self.arguments.items())})"


def _written(value: object, name: str) -> str:
    "Return `value` as code; an object without such a form as `name`."
    text = repr(value.value if isinstance(value, AMPMode) else value)
    return name if text.startswith('<') else text


def call_for(
    learn: Learner,
    choice: PrecisionChoice,
) -> Call:
    "Return the call for `choice`, with the arguments of the learner's precision callback that it accepts."
    if choice.mode is None: return Call('to_fp32', {})
    method, cb = 'to_half_weights' if choice.half_weights else f'to_{choice.mode.value}', precision_callback(learn)
    arguments = {} if cb is None else {**cb.arguments, 'fp32_modules': cb.fp32_module_names}
    parameters = dict(inspect.signature(getattr(Learner, method)).parameters)
    if choice.half_weights:                                      # fp16 needs master weights, bf16 no loss scale
        del parameters['master_weights' if choice.mode.needs_loss_scaling else 'loss_scale']
    if choice.init_scale:
        name = 'loss_scale' if choice.half_weights or arguments.get('loss_scale') else 'init_scale'
        arguments |= {name: choice.init_scale, 'scaler': None}   # which has its own scale
    names = list(dict.fromkeys([*arguments.get('fp32_modules', ()), *choice.fp32_modules])) or None
    arguments |= {'amp_mode': choice.mode, 'fp32_modules': names}
    return Call(method, {name: arguments[name] for name, p in parameters.items()
                         if name in arguments and arguments[name] != p.default})


def precision_call(
    learn: Learner,
    mode: AMPMode | None, # None for fp32
    fp32_modules: Iterable[str] = (), # Modules to keep in fp32 besides those that are
    init_scale: float | None = None, # First loss scale; the callback's if None
) -> Call: # As text: learn.to_fp16(init_scale=1024, fp32_modules=['inp', 'head'])
    "Return the call for `mode` that keeps what the learner's precision callback has."
    return call_for(learn, PrecisionChoice(mode, _has_half_weights(learn), tuple(fp32_modules), init_scale))


def use_choice(
    learn: Learner, # The learner, outside a fit
    choice: PrecisionChoice,
) -> MixedPrecision | None: # Its precision callback now
    "Switch `learn` to this precision, as a user would; its loss scale is kept unless `choice` has another."
    old, call = precision_callback(learn), call_for(learn, choice)
    state = {} if old is None or choice.init_scale else old.state_dict()
    getattr(learn, call.method)(**call.arguments)
    if choice.compiled: learn.model.compile()
    cb = precision_callback(learn)
    if state and cb is not None: cb.load_state_dict(state)       # from fp16 to fp16; bf16 has none
    return cb
