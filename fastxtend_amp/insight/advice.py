"The call to make next, with everything that the learner's precision callback has already."
from __future__ import annotations

import re
from html import escape

import torch
from fastai.learner import Learner
from torch import nn

from ..callback import MixedPrecision, precision_callback
from ..fp32_modules import Fp32Forward, qualified_names
from ..mode import AMPMode, mode_support

__all__ = ['as_html', 'fastest_mode', 'kept_modules', 'precision_call']


def precision_call(
    learn: Learner,
    mode: AMPMode | None, # None for fp32
    fp32_modules: list[str] | None = None, # Modules to keep in fp32 besides those that are
    *,
    kept: list[str] | None = None, # The modules that are kept now; looked for if None
    **changes, # Other arguments, instead of those that the callback has
) -> str: # 'learn.to_fp16(init_scale=1024, fp32_modules=['inp', 'head'])'
    "The call for `mode` that keeps what the learner's callback has: fp32 modules, loss scaling, on_overflow."
    if mode is None: return 'learn.to_fp32()'
    names = list(dict.fromkeys([*(kept_modules(learn.model) if kept is None else kept), *(fp32_modules or [])]))
    if names: changes['fp32_modules'] = names
    cb = precision_callback(learn)
    if cb is None: cb = MixedPrecision(mode)
    elif type(cb) is not MixedPrecision and cb.mode is not mode: # half-precision weights of another dtype
        cb = MixedPrecision(mode, on_overflow=cb.on_overflow, max_skips=cb.max_skips)
    if type(cb) is MixedPrecision: changes['amp_mode'] = mode
    static = 'loss_scale=' in cb.as_call() or not cb.takes_init_scale
    if 'init_scale' in changes and static: changes['loss_scale'] = changes.pop('init_scale')
    return cb.as_call(**changes)


def as_html(text: str) -> str:
    "`text` for a notebook: what stands between backticks as code, lines as lines."
    return re.sub('`([^`]+)`', r'<code>\1</code>', escape(text)).replace('\n', '<br>')


def kept_modules(model: nn.Module) -> list[str]:
    "The modules of a model that are kept in fp32 now."
    kept = [(n, m) for n, m in qualified_names(model) if isinstance(m.__dict__.get('forward'), Fp32Forward)]
    return list({id(m): n for n, m in kept}.values())


def fastest_mode(
    device: torch.device,
    failed: set[AMPMode], # Modes that do not work for a model
) -> AMPMode | None:
    "The fastest mode left: bf16 or fp16 where the device does it natively; None for fp32."
    left = [m for m in (AMPMode.BF16, AMPMode.FP16) if m not in failed and mode_support(m, device).status == 'native']
    return left[0] if left else None
