"The precisions to try on a learner: copies of its own with its arguments, or others with those that they accept."
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from fastai.learner import Learner
from fastcore.foundation import L

from ..learners import training_device
from ..precisions import PRECISIONS, Precision, find_precision
from ..precisions.base import written
from ..precisions.matching import match_modules
from ..training.callback import MixedPrecision
from ..training.learner import set_precision
from ..training.loop import precision_callback

FP32 = Precision()
_DEFAULTS = {'on_overflow': 'warn', 'max_skips': 16}


def own_precision(learn: Learner) -> Precision:
    "Return the learner's precision; plain fp32 without a precision callback."
    return getattr(precision_callback(learn), 'precision', FP32)


def like_own(
    learn: Learner,
    cls: type[Precision],
    fp32_modules: Iterable[str] = (), # Modules to keep in fp32 besides those of the learner
    init_scale: float | None = None, # First loss scale; the learner's own if None
) -> Precision:
    """Return a precision of this class with those of the arguments of the learner's own that it accepts, and advice.

    Modules are given by their names, which mean the same in a copy of the learner.
    """
    if cls is Precision: return FP32
    new = cls()
    for name, value in own_precision(learn).changed.items():
        if name not in new.arguments: continue
        if name.endswith('modules'): value = [*match_modules(learn.model, value, name)]
        with suppress(ValueError): new = new.like(**{name: value})   # bf16 weights, for example, have no loss scale
    changes: dict[str, Any] = {}
    names = [*dict.fromkeys([*L(new.fp32_modules), *fp32_modules])]
    if names: changes['fp32_modules'] = names
    if init_scale and new.kind.scales_loss:
        is_fixed = new.changed.get('loss_scale') or 'init_scale' not in new.arguments
        changes['loss_scale' if is_fixed else 'init_scale'] = init_scale
        if 'scaler' in new.changed: changes['scaler'] = None     # which has its own scale
    return new.like(**changes)


def advised(
    learn: Learner,
    kind: type[Precision],
    fp32_modules: Iterable[str] = (), # Modules to keep in fp32 besides those of the learner
    init_scale: float | None = None, # First loss scale; the learner's own if None
) -> Precision: # With the arguments of the learner's own, and of its class if that computes in `kind`
    "Return the precision to train in: of this kind, with what a report advises."
    own = own_precision(learn)
    return like_own(learn, type(own) if own.kind is kind else kind, fp32_modules, init_scale)


def call(
    learn: Learner,
    precision: Precision,
) -> str: # learn.to_fp16(init_scale=1024, fp32_modules=['inp', 'head'], on_overflow='fix')
    "Return the call that selects a precision, with the options of the learner's precision callback."
    options = _options(learn) if precision.kind is not Precision else {}
    return f'learn.to_{precision.name}({written(precision.changed | options)})'


def _options(learn): # What was changed of the learner's precision callback, besides its precision
    cb = precision_callback(learn)
    return {name: getattr(cb, name) for name, default in _DEFAULTS.items()
            if getattr(cb, name, default) != default}


def switch(
    learn: Learner, # The learner, outside a fit
    precision: Precision, # Not used itself, as a precision belongs to one callback
    **options: Any # Of its precision callback, instead of the learner's own
) -> None:
    "Switch `learn` to this precision, as a user would; its loss scale starts again."
    options = _options(learn) | options
    set_precision(learn, None if precision.kind is Precision else MixedPrecision(precision.like(), **options))


# -- by name

def precisions_named(
    names: Any, # Names or dtypes, one or several
) -> list[type[Precision]]:
    "Return the precisions with these names. Raises `ValueError` for an unknown one."
    return [find_precision(name) for name in L(names)]


def candidates(
    learn: Learner,
    names: Any = None, # Names or dtypes, one or several; None for what the device runs natively
) -> list[Precision]: # fp32 first, each once
    """Return the precisions to compare, with the learner's arguments.

    By default these are the ones that the device runs natively without another package. 16-bit weights compute as
    autocast does, so they are compared only if they are named.
    """
    if names is None:
        device = training_device(learn)
        classes = [cls for cls in PRECISIONS.values()
                   if cls.in_tables and not cls.package and cls.support(device).status == 'native']
    else: classes = precisions_named(names)
    return [*dict.fromkeys([FP32, *(like_own(learn, cls) for cls in classes)])]
