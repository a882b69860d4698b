"The precisions that a comparison tries: their names, how the device runs them, and the callback for each."
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from fastai.learner import Learner

from ..callback import MixedPrecision, precision_callback
from ..fp32_modules import Fp32Modules
from ..learner import set_precision
from ..mode import AMPMode, mode_support, training_device
from ..scaling import StaticGradScaler

__all__ = ['PrecisionChoice', 'choices_from', 'default_choices', 'use_choice']

HALF_WEIGHTS = 'half weights'
_ALLOWED = "'fp32', 'bf16', 'fp16', 'half weights' (bf16), 'half weights fp16', or a list of these"


@dataclass(frozen=True)
class PrecisionChoice:
    "One precision: fp32 (`mode` None), autocast in `mode`, or half-precision weights of that dtype."
    mode: AMPMode | None = None
    half_weights: bool = False
    fp32_modules: tuple[str, ...] = ()       # kept in fp32 besides those that the learner keeps

    @property
    def name(self) -> str:
        "As in the comparison's table: 'fp32', 'bf16', 'fp16', 'half weights', 'half weights fp16'."
        if self.mode is None: return 'fp32'
        if not self.half_weights: return self.mode.value
        return HALF_WEIGHTS if self.mode is AMPMode.BF16 else f'{HALF_WEIGHTS} {self.mode.value}'


def choices_from(
    modes: Any, # Names, modes, dtypes or choices, one or several
    arg: str = 'modes', # The argument's name in errors
) -> list[PrecisionChoice]: # fp32, the measure, first; each once
    "The precisions that `modes` names. Raises `ValueError` for one that is none."
    if isinstance(modes, int) and not isinstance(modes, bool):
        raise ValueError(f"{arg}={modes!r} cannot be used: {arg} names the precisions to compare. "
                         f"Did you mean n_steps={modes}?\n"
                         f"Allowed: {_ALLOWED}.")
    one = isinstance(modes, (str, torch.dtype, PrecisionChoice)) or not hasattr(modes, '__iter__')
    return list(dict.fromkeys([PrecisionChoice(), *(_choice(m, arg) for m in ([modes] if one else modes))]))


def _choice(name, arg):
    if isinstance(name, PrecisionChoice): return name
    plain = name.lower().replace('_', ' ').strip() if isinstance(name, str) and not isinstance(name, AMPMode) else name
    if plain in ('fp32', torch.float32): return PrecisionChoice()
    try:
        if isinstance(plain, str) and plain.startswith(HALF_WEIGHTS):
            return PrecisionChoice(AMPMode(plain.removeprefix(HALF_WEIGHTS).strip() or 'bf16'), half_weights=True)
        return PrecisionChoice(AMPMode(plain))
    except ValueError:
        raise ValueError(f"{arg}={name!r} cannot be used: it is not a precision.\nAllowed: {_ALLOWED}.") from None


def default_choices(
    learn: Learner,
) -> list[PrecisionChoice]:
    """fp32, and autocast in each mode that the learner's device does natively.

    Half-precision weights, too, if the learner has them, with its arguments: by themselves they are autocast's casts.
    """
    device, kinds = training_device(learn), [False]
    if _is_half_weights(precision_callback(learn)): kinds.append(True)
    native = [m for m in (AMPMode.BF16, AMPMode.FP16) if mode_support(m, device).status == 'native']
    return [PrecisionChoice(), *(PrecisionChoice(m, half_weights=half) for half in kinds for m in native)]


def use_choice(
    learn: Learner, # The learner, outside a fit
    choice: PrecisionChoice,
) -> MixedPrecision | None: # Its precision callback now
    """Have `learn` train in this precision.

    Modules kept in fp32 and the other arguments of its precision callback stay, as far as the new one has them; where
    it is of the same kind, it is the same callback, loss scale included.
    """
    own = precision_callback(learn)
    if choice.mode is None: cb = None
    elif own is not None and _is_same_kind(own, choice):
        cb = own
        cb.amp_mode = cb._mode = choice.mode
    else: cb = _another(own, choice)
    if cb is not None and choice.fp32_modules:
        kept = cb._fp32_modules.check(learn.model)
        set_precision(learn, None)                               # lets the modules go that it keeps now
        cb._fp32_modules = Fp32Modules(list(dict.fromkeys([*kept, *choice.fp32_modules])))
    set_precision(learn, cb)
    return cb


def _is_same_kind(cb, choice) -> bool:
    if not choice.half_weights: return not _is_half_weights(cb)
    return _is_half_weights(cb) and cb.dtype is choice.mode.dtype


def _is_half_weights(cb) -> bool:
    from ..half_weights import HalfWeights                       # that room may use this one
    return isinstance(cb, HalfWeights)


def _another(own, choice):
    "A callback of another kind than `own`, with what arguments they share."
    from ..half_weights import HalfWeights
    shared: dict[str, Any] = {}
    if own is not None:
        scaler = own.scaling._fp16_scaler
        shared = dict(fp32_modules=own._fp32_modules.spec, on_overflow=own.on_overflow, max_skips=own.max_skips)
        is_static = choice.mode.needs_loss_scaling and isinstance(scaler, StaticGradScaler)
        if is_static: shared['loss_scale'] = scaler.get_scale()
    if not choice.half_weights: return MixedPrecision(choice.mode, **shared)
    if own is not None and _is_half_weights(own): shared |= {k: getattr(own, k) for k in ('flat_master', 'cast_once')}
    return HalfWeights(choice.mode, **shared)
