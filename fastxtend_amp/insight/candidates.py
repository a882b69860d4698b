"The precisions to try on a learner: copies of its own with its arguments, or others with those that they accept."
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from fastai.learner import Learner
from fastcore.foundation import L
from torch import nn

from ..learners import training_device
from ..precisions import PRECISIONS, Precision, find_precision
from ..precisions.base import written
from ..precisions.matching import is_depthwise, is_grouped, match_modules, unwrapped
from ..tensors import map_tensors
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
    own = own_precision(learn)
    new = own.like() if type(own) is cls else cls()
    for name, value in own.changed.items():
        if name not in new.arguments: continue
        if name.endswith('modules'): value = [*match_modules(learn.model, value, name)]
        with suppress(ValueError): new = new.like(**{name: value})   # bf16 weights, for example, have no loss scale
    changes: dict[str, Any] = {}
    names = [*dict.fromkeys([*L(new.fp32_modules), *fp32_modules])]
    if names: changes['fp32_modules'] = names
    if init_scale and new.kind.scales_loss and 'enabled' not in new.changed:
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


# -- what is compared

@dataclass(frozen=True)
class Contestant:
    "A row of a comparison: a precision, the memory format, and whether the model is compiled."
    precision: Precision
    channels_last: bool = False # Whether the format changes; otherwise it stays as it is
    compiled: bool = False
    is_variant: bool = False # Whether another row has the same precision

    def call(self, learn: Learner) -> str: # learn.to_bf16(fp32_modules=is_depthwise).to_channelslast()
        "Return the call that trains in it."
        found = call(learn, self.precision)
        if self.channels_last: found += f".to_channelslast({'' if self.precision != FP32 else 'use_amp=False'})"
        return f'{found}; learn.model.compile()' if self.compiled else found

    def apply(self, learn: Learner) -> None:
        "Make that call."
        if self.precision == FP32: learn.to_fp32()
        else: switch(learn, self.precision)
        self.prepare(learn)

    def prepare(self, learn: Learner) -> None:
        "Change only memory format and compilation."
        if self.channels_last: _to_channels_last(learn)
        if self.compiled: learn.model.compile()


BASE = Contestant(FP32)


def _to_channels_last(learn):
    """Convert the weights, and the optimizer's state with them.

    Fused optimizers step through memory, and would pair weights with the state of others.
    """
    learn.to_channelslast(use_amp=False)
    learn.model.to(memory_format=torch.channels_last)
    opt: Any = learn.opt
    while hasattr(opt, 'opt'): opt = opt.opt
    for p, state in opt.state.items() if opt else ():
        opt.state[p] = map_tensors(lambda t: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t, state)


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


def contestants(
    learn: Learner,
    precisions: Iterable[Precision], # fp32 first
    compile: bool = False, # Whether each precision is also compared compiled
) -> dict[str, Contestant]: # By row of the table, fp32 first
    """Return what to compare: each precision, and variants of those that the device runs natively.

    The first 16-bit precision also keeps depthwise or grouped convolutions in fp32, where the model has some. Models
    with 2-d convolutions are compared in channels last as well, unless they are in that format already.

    Source: github.com/NVIDIA/apex/issues/712, github.com/tensorflow/tensorflow/issues/41715.
    """
    model, device = unwrapped(learn.model), training_device(learn)
    rows = {p.name: Contestant(p) for p in precisions}
    compiled = {f'{name} compiled': replace(row, compiled=True) for name, row in rows.items() if compile}
    native = {name: row for name, row in rows.items() if row.precision.support(device).status == 'native'}
    for name, row in [(name, row) for name, row in native.items() if row.precision.dtype][:1]:
        kept = {m for root in row.precision.kept_in_fp32(model).values() for m in root.modules()}
        for kind in is_depthwise, is_grouped:
            if not any(kind(m) for m in {*model.modules()} - kept): continue
            modules = [*L(row.precision.fp32_modules), kind]
            new = row.precision.like(fp32_modules=modules if modules[1:] else kind)
            native[f"{name}, {kind.__name__.removeprefix('is_')} in fp32"] = Contestant(new, is_variant=True)
    rows |= native
    has_2d = any(isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)) for m in model.modules())
    if has_2d and not _is_channels_last(learn):
        rows |= {f'{name}, channels last': replace(row, channels_last=True, is_variant=True)
                 for name, row in native.items()}
    return rows | compiled


def _is_channels_last(learn):
    weights = (p for p in learn.model.parameters() if p.dim() == 4)
    return hasattr(learn, 'channels_last') or not all(p.is_contiguous() for p in weights)
