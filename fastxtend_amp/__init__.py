"Mixed precision for fastai. Importing it adds `to_amp`, `to_fp16`, `to_bf16` and other methods to `Learner`."
import warnings as _warnings

with _warnings.catch_warnings():           # PyTorch deprecates what fastai's own imports call
    _warnings.filterwarnings('ignore', message='.*torch.jit')
    import fastai.learner as _fastai

from importlib.util import find_spec as _find_spec

from .precisions import AMPMode
from .precisions.half_weights import HalfWeights, kahan
from .precisions.matching import is_depthwise, is_grouped
from .training.callback import MixedPrecision
from .training import checkpoint as _checkpoint, learner as _learner
from .training.optimizers import fused
from .devices import sharded as _sharded
from .insight import PrecisionComparison, PrecisionReport, loss_scale, skipped_steps
from .tools.memory import keep_freed_memory
from .tools.support import precision_support

if _find_spec('torch_xla') is not None: from .devices import xla as _xla   # users may import it later

__all__ = ['AMPMode', 'HalfWeights', 'MixedPrecision', 'PrecisionComparison', 'PrecisionReport', 'fused',
           'is_depthwise', 'is_grouped', 'kahan', 'keep_freed_memory', 'loss_scale', 'precision_support',
           'skipped_steps']


def __getattr__(name):
    if name == '__version__':  # settings.ini is its one home; the installed package's metadata repeats it
        from importlib.metadata import version
        return version(__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
