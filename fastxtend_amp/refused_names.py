"Arguments that a method does not have: misspelt ones, and those of earlier libraries, with what to write instead."
from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from inspect import signature

__all__ = ['FORMER', 'refuse_unknown']

FORMER = {
    'dynamic': "leave it out. Scaling is dynamic unless you give a static scale: `learn.to_fp16(loss_scale=512)`.",
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


def refuse_unknown(
    method: Callable, # Such as `Learner.to_fp16`
    names: Iterable[str], # Names of the arguments that it got
) -> None:
    """Raise a `TypeError` for an argument that `method` does not have.

    It says what to write instead if earlier libraries or versions had it, and else which argument has a similar name.
    """
    known = [n for n in signature(method).parameters if n != 'self']
    for name in names:
        if name in known: continue
        near = get_close_matches(name, known, 1)
        instead = FORMER.get(name) or (f'did you mean `{near[0]}=`?' if near else f"there are {', '.join(known)}.")
        raise TypeError(f"{method.__name__}() has no argument '{name}': {instead}")
