"Mixed precision for fastai that is real on every device. Importing this patches `Learner.to_fp16`, `to_bf16` and the like."
from .callback import MixedPrecision
from .compare import PrecisionComparison
from .half import HalfPrecision
from .mode import AMPMode, precision_support
from .report import PrecisionReport
from . import checkpoint as _checkpoint, learner as _learner, xla as _xla  # patch Learner

__all__ = ['AMPMode', 'HalfPrecision', 'MixedPrecision', 'PrecisionComparison', 'PrecisionReport', 'precision_support']


def __getattr__(name):
    if name == '__version__':  # settings.ini is its one home; the installed package's metadata repeats it
        from importlib.metadata import version
        return version(__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
