"The precisions of a learner: their names, which of them to compare, and the call that selects one."
from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, NamedTuple

import torch
from fastai.learner import Learner
from fastcore.xtras import is_listy

from ..common import training_device
from ..precisions import PRECISIONS, AMPMode, Precision
from ..precisions.half_weights import LOWERED, HalfWeights
from ..training.callback import MixedPrecision
from ..training.loop import precision_callback


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
        if self.half_weights: name = 'half weights' if self.mode is AMPMode.BF16 else f'half weights {name}'
        return f'{name} compiled' if self.compiled else name

    @property
    def precision(self) -> type[Precision]:
        "The class of the precision that the learner gets."
        return HalfWeights if self.half_weights else PRECISIONS.get(self.mode or '', Precision)


# Those whose names no mode has.
_OTHERS = [PrecisionChoice(), *(PrecisionChoice(AMPMode(name), True) for name in LOWERED)]


def choices_from(
    modes: Any, # Names, modes or dtypes, one or several
) -> list[PrecisionChoice]: # fp32 first, each once
    "Return the precisions that `modes` names. Raises `ValueError` for an unknown one."
    return list(dict.fromkeys([PrecisionChoice(), *map(_choice, modes if is_listy(modes) else [modes])]))


def _choice(name):
    for choice in _OTHERS:
        if name == choice.name: return choice
    if name is torch.float32: return PrecisionChoice()
    try: return PrecisionChoice(AMPMode(name))
    except ValueError: pass
    names = ', '.join(repr(n) for n, cls in PRECISIONS.items() if cls is not HalfWeights)
    raise ValueError(f"modes={shorten(repr(name), 100)} cannot be used.\nAllowed: 'fp32', {names}, 'half weights' "
                     "(bf16), 'half weights fp16', or a list of these.")


def _has_half_weights(learn):
    return isinstance(getattr(precision_callback(learn), 'precision', None), HalfWeights)


def default_choices(learn: Learner) -> list[PrecisionChoice]:
    """Return fp32, and the precisions that the device runs natively without another package.

    Half-precision weights are included only if the learner has them: by default they compute as autocast does.
    """
    device = training_device(learn)
    native = [AMPMode(cls.name) for cls in PRECISIONS.values()
              if cls.in_tables and not cls.package and cls.support(device).status == 'native']
    half = [PrecisionChoice(m, True) for m in native if m.value in LOWERED and _has_half_weights(learn)]
    return [PrecisionChoice(), *map(PrecisionChoice, native), *half]


class Call(NamedTuple):
    "A call that selects a precision, with all arguments that differ from the defaults; `str` formats it."
    precision: type[Precision] # What the learner trains in
    arguments: dict[str, Any]

    def __str__(self) -> str:
        written = {name: repr(value) for name, value in self.arguments.items()}
        # An object that has no form as code gets the argument's name.
        arguments = (f"{name}={name if code.startswith('<') else code}" for name, code in written.items())
        return f"learn.to_{self.precision.name}({', '.join(arguments)})"


def call_for(
    learn: Learner,
    choice: PrecisionChoice,
) -> Call:
    "Return the call for `choice`, with the arguments of the learner's precision callback that it accepts."
    cb = precision_callback(learn)
    arguments = {**cb.precision.arguments, 'on_overflow': cb.on_overflow, 'max_skips': cb.max_skips} if cb else {}
    kept = [*cb.precision.kept_in_fp32(learn.model)] if cb else []
    parameters = dict(inspect.signature(getattr(Learner, f'to_{choice.precision.name}')).parameters)
    if choice.half_weights:                                      # fp16 needs master weights, bf16 no loss scale
        del parameters['loss_scale' if choice.mode is AMPMode.BF16 else 'master_weights']
    if choice.init_scale:
        name = 'loss_scale' if choice.half_weights or arguments.get('loss_scale') else 'init_scale'
        arguments |= {name: choice.init_scale, 'scaler': None}   # which has its own scale
    names = [*dict.fromkeys([*kept, *choice.fp32_modules])]
    arguments |= {'amp_mode': choice.mode and choice.mode.value, 'fp32_modules': names or None}
    return Call(choice.precision, {name: arguments[name] for name, p in parameters.items()
                                   if arguments.get(name, p.default) != p.default})


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
    getattr(learn, f'to_{call.precision.name}')(**call.arguments)
    if choice.compiled: learn.model.compile()
    cb = precision_callback(learn)
    if state and cb is not None: cb.load_state_dict(state)       # from fp16 to fp16; bf16 has none
    return cb
