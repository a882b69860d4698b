"The precisions that a comparison tries: names, which of them are worth a try, and how a learner is set to one."
from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass
from typing import Any

import torch
from fastai.learner import Learner

from ..callback import MixedPrecision, precision_callback
from ..mode import AMPMode, mode_support, training_device

__all__ = ['PrecisionChoice', 'choices_from', 'default_choices', 'use_choice']

HALF_WEIGHTS = 'half weights'
_ALLOWED = "'fp32', 'bf16', 'fp16', 'half weights' (bf16), 'half weights fp16', or a list of these"


@dataclass(frozen=True)
class PrecisionChoice:
    "One precision that a learner can be set to: fp32, autocast, or half-precision weights."
    mode: AMPMode | None = None # None for fp32
    half_weights: bool = False # Whether the weights are in `mode`'s dtype, as `to_half_weights` has it
    fp32_modules: tuple[str, ...] = () # Modules kept in fp32 besides those that the learner keeps

    @property
    def name(self) -> str:
        "The name in the comparison's table: 'fp32', 'bf16', 'fp16', 'half weights', 'half weights fp16'."
        if self.mode is None: return 'fp32'
        if not self.half_weights: return self.mode.value
        return HALF_WEIGHTS if self.mode is AMPMode.BF16 else f'{HALF_WEIGHTS} {self.mode.value}'


def choices_from(
    modes: Any, # Names, modes, dtypes or choices, one or several
) -> list[PrecisionChoice]: # fp32, the measure, first; each once
    "Return the precisions that `modes` names. Raises `ValueError` for one that is none."
    if isinstance(modes, int) and not isinstance(modes, bool):
        raise ValueError(f'modes={modes!r} cannot be used: modes names the precisions to compare. '
                         f'Did you mean n_steps={modes}?\n'
                         f'Allowed: {_ALLOWED}.')
    one = isinstance(modes, (str, torch.dtype, PrecisionChoice)) or not hasattr(modes, '__iter__')
    return list(dict.fromkeys([PrecisionChoice(), *map(_choice, [modes] if one else modes)]))


def _choice(name: Any) -> PrecisionChoice:
    if isinstance(name, PrecisionChoice): return name
    plain = name.lower().replace('_', ' ').strip() if isinstance(name, str) and not isinstance(name, AMPMode) else name
    if plain in ('fp32', torch.float32): return PrecisionChoice()
    half = isinstance(plain, str) and plain.startswith(HALF_WEIGHTS)
    try: return PrecisionChoice(AMPMode(plain.removeprefix(HALF_WEIGHTS).strip() or 'bf16' if half else plain), half)
    except ValueError:
        raise ValueError(f'modes={name!r} cannot be used: it is not a precision.\nAllowed: {_ALLOWED}.') from None


def default_choices(learn: Learner) -> list[PrecisionChoice]:
    """Return fp32, and autocast in each mode that the learner's device does natively.

    Half-precision weights, too, if the learner has them: without more arguments they are autocast's casts.
    """
    native = [m for m in (AMPMode.BF16, AMPMode.FP16) if mode_support(m, training_device(learn)).status == 'native']
    kinds = [False, True] if _call_of(precision_callback(learn))[0] == 'to_half_weights' else [False]
    return [PrecisionChoice(), *(PrecisionChoice(m, half) for half in kinds for m in native)]


def use_choice(
    learn: Learner, # The learner, outside a fit
    choice: PrecisionChoice,
) -> MixedPrecision | None: # Its precision callback now
    """Have `learn` train in this precision, by the call that a user would make.

    The arguments of its precision callback stay, as far as the new one has them, and the loss scale; a `GradScaler` of
    the user's own only where the callback itself can stay.
    """
    if choice.mode is None:
        learn.to_fp32()
        return None
    old = precision_callback(learn)
    kept, state = ([], {}) if old is None else (old.fp32_module_names, old.state_dict())
    method = 'to_half_weights' if choice.half_weights else f'to_{choice.mode.value}'
    old_method, arguments = _call_of(old)
    if old is not None and (method, choice.mode) == (old_method, old.mode) and {*choice.fp32_modules} <= {*kept}:
        return old
    allowed = set(inspect.signature(getattr(Learner, method)).parameters)
    # of half-precision weights fp16 needs masters, and bf16 has no loss scale
    if choice.half_weights: allowed -= {'master_weights' if choice.mode.needs_loss_scaling else 'loss_scale'}
    arguments = {k: v for k, v in arguments.items() if k in allowed}
    if choice.half_weights: arguments['dtype'] = choice.mode.value
    if choice.fp32_modules: arguments['fp32_modules'] = list(dict.fromkeys([*kept, *choice.fp32_modules]))
    getattr(learn, method)(**arguments)
    cb = precision_callback(learn)
    if state and cb is not None: cb.load_state_dict(state)       # as fp16 to fp16; nothing in bf16
    return cb


def _call_of(cb: MixedPrecision | None) -> tuple[str, dict[str, Any]]:
    "Return the method of the learner that makes such a callback, and its arguments, but for objects."
    if cb is None: return '', {}
    call: Any = ast.parse(cb.as_call(), mode='eval').body
    arguments = {k.arg: k.value for k in call.keywords if isinstance(k.value, (ast.Constant, ast.List, ast.UnaryOp))}
    return call.func.attr, {name: ast.literal_eval(value) for name, value in arguments.items()}
