"Arguments of earlier libraries and versions, and what to write instead: for the error that they get."
from __future__ import annotations

from collections.abc import Iterable

__all__ = ['FORMER', 'refuse_former']

FORMER = {
    'dynamic': "leave it out. Scaling is dynamic but with a static scale: `learn.to_fp16(loss_scale=512)`.",
    'max_noskip': "write `growth_interval=`, the number of steps without a skip after which the scale grows.",
    'scale_wait': "write `growth_interval=`, the number of steps without a skip after which the scale grows.",
    'div_factor': "write `growth_factor=` and `backoff_factor=`.",
    'max_scale': "write `init_scale=` for the scale to start from.",
    'max_loss_scale': "write `init_scale=` for the scale to start from.",
    'clip': "add fastai's callback, which sees unscaled gradients: `learn.add_cb(GradientClip(1.))`.",
    'flat_master': "autocast has no master weights. For those write `learn.to_half_weights('fp16', flat_master=True)`.",
    'keep_fp32': "write `fp32_modules=`.",
    'patience': "write `max_skips=`.",
    'budget': "write `max_seconds=`.",
}


def refuse_former(
    call: str, # The call that got them, for the message: 'to_fp16'
    names: Iterable[str], # Names of the arguments given
    known: Iterable[str] = (), # Names that the call takes, which are never refused
) -> None:
    "Raise a `TypeError` that says what to write instead of an argument that earlier libraries or versions had."
    for name in names:
        if name not in FORMER or name in known: continue
        raise TypeError(f"{call}() has no argument '{name}': {FORMER[name]}")
