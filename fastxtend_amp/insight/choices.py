"Choices of a precision: the call that makes each, the learner's arguments that it keeps, and which are compared."
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastai.learner import Learner
from fastcore.foundation import L

from ..learners import training_device
from ..precisions import PRECISIONS, Precision
from ..precisions.as_code import as_code
from ..precisions.matching import is_depthwise, is_grouped, match_modules
from ..training.callback import MixedPrecision
from ..training.current import precision_callback, set_precision
from ..training.methods import OPTIONS

CHANNELS_LAST = 'channels last' # A change of the memory format; without it, the format stays as it is


@dataclass(frozen=True)
class Choice:
    "A choice of a precision, and possibly of the memory format. `str` is the call that makes it, `apply` makes it."
    precision: Precision
    options: dict[str, Any] = field(default_factory=dict) # Of the precision callback
    changes: tuple[str, ...] = () # What makes it a variant of its precision: ('depthwise in fp32', 'channels last')

    @classmethod
    def for_learner(cls,
        learn: Learner, # Its precision callback has the arguments and options to keep
        of: type[Precision], # What is chosen
        fp32_modules: Iterable[str] = (), # Modules to keep in fp32 besides those of the learner
        init_scale: float | None = None, # First loss scale; the learner's own if None
    ) -> Choice:
        """Return a choice that keeps those of the learner's arguments that the precision has, with what is advised.

        Modules are given by their names, which mean the same in a copy of the learner.
        """
        if of is Precision: return cls(Precision())
        own, cb = own_precision(learn), precision_callback(learn)
        new = own if type(own) is of else of()
        given = {name: value for name, value in own.changed.items() if name in new.arguments}
        for name in given.keys() & of.module_arguments:
            given[name] = [*match_modules(learn.model, given[name], name)]
        names = dict.fromkeys([*given.get('fp32_modules', ()), *fp32_modules])
        if names: given['fp32_modules'] = [*names]
        if init_scale and 'init_scale' in new.arguments:
            given['loss_scale' if 'loss_scale' in given else 'init_scale'] = init_scale
            if 'scaler' in given: given['scaler'] = None         # which has its own scale
            if 'enabled' in given: given['enabled'] = True       # without scaling there is none
        options = {name: getattr(cb, name) for name, p in OPTIONS.items()
                   if cb and getattr(cb, name) != p.default}
        return cls(new.like(**given), options)

    def __str__(self): # learn.to_bf16(fp32_modules=is_depthwise).to_channelslast()
        text = f'learn.to_{self.precision.name}({as_code(self.precision.changed | self.options)})'
        if CHANNELS_LAST not in self.changes: return text
        return f"{text}.to_channelslast({'use_amp=False' if type(self.precision) is Precision else ''})"

    @property
    def name(self) -> str: # 'bf16, depthwise in fp32, channels last'
        "Its name in a comparison."
        return ', '.join([self.precision.name, *self.changes])

    def apply(self,
        learn: Learner, # Outside a fit; its loss scale starts again
        **options: Any # Of the precision callback, instead of its own
    ) -> None:
        "Make the call that `str` shows."
        if not self.precision.dtype: learn.to_fp32()             # 16-bit weights as well
        if type(self.precision) is not Precision:
            set_precision(learn, MixedPrecision(self.precision, **self.options | options))
        if CHANNELS_LAST in self.changes: learn.to_channelslast(use_amp=False)


def own_precision(learn: Learner) -> Precision:
    "Return the learner's precision; plain fp32 without a precision callback."
    return getattr(precision_callback(learn), 'precision', Precision())


# -- what is compared

def native_precisions(learn: Learner) -> list[type[Precision]]:
    "Return what the device runs natively without another package."
    device = training_device(learn)
    return [cls for cls in PRECISIONS.values() if not cls.package and cls.support(device).status == 'native']


def to_compare(
    learn: Learner,
    choices: Sequence[Choice], # Besides fp32, in the learner's own format
) -> dict[str, Choice]: # By name, fp32 first
    """Return what to compare: each precision once, and variants of those that the device runs natively.

    The first 16-bit precision also keeps depthwise or grouped convolutions in fp32, where the model has some. Models
    with 2-d convolutions are compared in channels last as well, unless they are in that format already.

    Source: github.com/NVIDIA/apex/issues/712, github.com/tensorflow/tensorflow/issues/41715.
    """
    model, device = learn.model, training_device(learn)
    plain = [Choice(Precision()), *choices]
    native = [choice for choice in plain if choice.precision.support(device).status == 'native']
    low = next((choice for choice in native if choice.precision.dtype), None)
    with_layers = [*_with_layers(low, model)] if low else []
    kernels = [p for p in model.parameters() if p.dim() == 4]    # of 2-d convolutions
    is_channels_last = hasattr(learn, 'channels_last') or not all(p.is_contiguous() for p in kernels)
    formats = native + with_layers if kernels and not is_channels_last else []
    in_formats = [replace(choice, changes=(*choice.changes, CHANNELS_LAST)) for choice in formats]
    return {choice.name: choice for choice in plain + with_layers + in_formats}


def _with_layers(choice, model):
    "Iterate over variants that also keep depthwise or grouped convolutions in fp32, if some are not yet."
    p = choice.precision
    in_fp32 = {m for kept in p.kept_in_fp32(model).values() for m in kept.modules()}
    for of_type in is_depthwise, is_grouped:
        if not any(map(of_type, {*model.modules()} - in_fp32)): continue
        keep = [*L(p.fp32_modules), of_type] if p.fp32_modules else of_type
        words = f"{of_type.__name__.removeprefix('is_')} in fp32"
        yield replace(choice, precision=p.like(fp32_modules=keep), changes=(words,))
