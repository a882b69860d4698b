"The call to make next, with everything that the learner's precision callback has already."
from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

import torch
from fastai.learner import Learner

from ..callback import MixedPrecision, precision_callback
from ..mode import AMPMode, mode_support

__all__ = ['as_html', 'fastest_mode', 'precision_call']


def precision_call(
    learn: Learner,
    mode: AMPMode | None, # None for fp32
    fp32_modules: Iterable[str] = (), # Modules to keep in fp32 besides those that are
    **changes, # Other arguments, instead of those that the callback has
) -> str: # 'learn.to_fp16(init_scale=1024, fp32_modules=['inp', 'head'])'
    "Return the call for `mode` that keeps what the learner's callback has: fp32 modules, loss scaling, on_overflow."
    if mode is None: return 'learn.to_fp32()'
    cb = precision_callback(learn)
    names = [*dict.fromkeys([*(cb.fp32_module_names if cb is not None else ()), *fp32_modules])]
    if names: changes['fp32_modules'] = names
    if cb is None: cb = MixedPrecision(mode)
    elif type(cb) is not MixedPrecision and cb.mode is not mode: # half-precision weights of another dtype
        cb = MixedPrecision(mode, on_overflow=cb.on_overflow, max_skips=cb.max_skips)
    if type(cb) is MixedPrecision: changes['amp_mode'] = mode
    if 'init_scale' in changes and cb.static_scale: changes['loss_scale'] = changes.pop('init_scale')
    return cb.as_call(**changes)


def as_html(text: str) -> str:
    "Return `text` for a notebook: what is between backticks as code, lines as lines."
    return re.sub('`([^`]+)`', r'<code>\1</code>', escape(text)).replace('\n', '<br>')


def fastest_mode(
    device: torch.device,
    failed: Iterable[AMPMode] = (), # Modes that do not work for a model
) -> AMPMode | None:
    "Return the fastest mode left: bf16 or fp16 where the device does it natively; None for fp32."
    left = [m for m in (AMPMode.BF16, AMPMode.FP16) if m not in failed and mode_support(m, device).status == 'native']
    return left[0] if left else None
