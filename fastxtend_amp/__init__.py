"Mixed precision for fastai that is real on every device. Importing this patches `Learner.to_fp16`, `to_bf16` and the like."
from .callback import MixedPrecision
from .mode import AMPMode, precision_support
from . import learner as _learner  # patches Learner

__version__ = '0.1.0'
__all__ = ['AMPMode', 'MixedPrecision', 'precision_support']
