"Mixed precision for fastai. Importing it adds `to_amp`, `to_fp16`, `to_bf16` and other methods to `Learner`."
import warnings as _warnings

with _warnings.catch_warnings():           # PyTorch deprecates what fastai's own imports call
    _warnings.filterwarnings('ignore', message='.*torch.jit')
    import fastai.learner as _fastai

from importlib.util import find_spec as _find_spec

from .precisions import AMPMode, Precision, Support
from .precisions.matching import is_depthwise, is_grouped
from .training.callback import MixedPrecision
from .training import channels_last as _channels_last, checkpoint as _checkpoint, loop as _loop, methods as _methods
from .training.metrics import LossScaleMetric, SkippedStepsMetric
from .training.optimizers import fused, kahan
from .backends import sharded as _sharded
from .insight import PrecisionComparison, PrecisionReport, precision_report
from .tools.precision_support import precision_support

if _find_spec('torch_xla') is not None: from .backends import xla as _xla   # users may import it later

# `Precision` and `Support`, for a precision of your own, are not here: fastai has a metric of the name `Precision`.
__all__ = ['AMPMode', 'LossScaleMetric', 'MixedPrecision', 'PrecisionComparison', 'PrecisionReport',
           'SkippedStepsMetric', 'fused', 'is_depthwise', 'is_grouped', 'kahan',
           'precision_report', 'precision_support']


def __getattr__(name):
    if name == '__version__':  # settings.ini is its one home; the installed package's metadata repeats it
        from importlib.metadata import version
        return version(__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
