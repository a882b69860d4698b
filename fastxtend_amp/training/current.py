"The one precision callback of a learner: it is found, set and exchanged."
from functools import partial
from typing import Any

from fastai.callback import fp16
from fastai.learner import Learner

from .callback import MixedPrecision

PRECISION_CALLBACKS = (fp16.MixedPrecision, fp16.ModelToHalf, fp16.NonNativeMixedPrecision)   # fastai's and ours


def precision_callback(learn: Learner) -> Any: # A `MixedPrecision`
    "Return the learner's precision callback; None in plain fp32."
    cb = vars(learn).get(MixedPrecision.name)                    # where fastai keeps callbacks by name
    if isinstance(cb, MixedPrecision): return cb
    return next((cb for cb in learn.cbs if isinstance(cb, MixedPrecision)), None)


def set_precision(
    learn: Learner,
    cb: MixedPrecision | None, # None for fp32. Building it has checked its arguments
) -> Learner: # The learner
    "Make `cb` the learner's only precision callback, in a batch when that ends."
    if cb is not None: cb.precision.check(learn.model)
    old = precision_callback(learn)
    if old is None: exchange(learn, cb)
    else: old.at_batch_end(partial(exchange, learn, cb))
    return learn


def exchange(learn: Learner, cb: MixedPrecision | None) -> None:
    "Make `cb` the learner's only precision callback now, without checking the model."
    old = precision_callback(learn)
    if cb is not None and old: cb.parts = old.parts
    learn.remove_cbs(PRECISION_CALLBACKS)
    if cb is not None: learn.add_cb(cb)
