"The method `Learner.to_half_weights`."
from __future__ import annotations

from fastai.learner import Learner
from fastcore.basics import patch

from ..refused_names import refuse_unknown
from ..learner import set_precision, takes_arguments_of
from .callback import HalfWeights

__all__: list[str] = []


@patch
@takes_arguments_of(HalfWeights.__init__)
def to_half_weights(self: Learner, *args, **kwargs) -> Learner: # The learner
    "Train with half-precision weights and fp32 masters, as fastai v1's `to_fp16` did; replaces any other precision."
    refuse_unknown(Learner.to_half_weights, kwargs)
    return set_precision(self, HalfWeights(*args, **kwargs))
