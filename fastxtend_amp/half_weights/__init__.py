"Half-precision weights with fp32 masters, on top of `MixedPrecision`."
from .callback import HalfWeights, bytes_per_parameter, kahan
from . import learner as _learner

__all__ = ['HalfWeights', 'bytes_per_parameter', 'kahan']
