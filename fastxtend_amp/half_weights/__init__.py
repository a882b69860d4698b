"Half-precision weights with fp32 masters, on top of `MixedPrecision`."
from .callback import HalfWeights
from .memory import bytes_per_parameter
from .optimizers import kahan
from . import learner as _learner

__all__ = ['HalfWeights', 'bytes_per_parameter', 'kahan']
