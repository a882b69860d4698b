"Mixed precision for fastai on every device that can; importing it adds `to_fp16`, `to_bf16` and more to `Learner`."
import warnings as _warnings

with _warnings.catch_warnings():           # PyTorch deprecates what fastai's own imports call
    _warnings.filterwarnings('ignore', message='.*torch.jit')
    import fastai.learner as _fastai

from .mode import AMPMode, precision_support
from .callback import MixedPrecision
from . import checkpoint as _checkpoint, devices as _devices, learner as _learner
from .half_weights import HalfWeights, kahan
from .metrics import loss_scale, skipped_steps
from .insight import PrecisionComparison, PrecisionReport
from .optimizers import fused
from .tools.memory import keep_freed_memory

__all__ = ['AMPMode', 'HalfWeights', 'MixedPrecision', 'PrecisionComparison', 'PrecisionReport', 'fused', 'kahan',
           'keep_freed_memory', 'loss_scale', 'precision_support', 'skipped_steps']


def __getattr__(name):
    if name == '__version__':  # settings.ini is its one home; the installed package's metadata repeats it
        from importlib.metadata import version
        return version(__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
