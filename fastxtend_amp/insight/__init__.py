"Report, comparison and diagnosis: which precision a model survives, where training goes wrong, and what pays off."
from ..callback import MixedPrecision
from .comparison import PrecisionComparison
from .report import PrecisionReport
from .watch import Watch
from . import learner as _learner

__all__ = ['PrecisionComparison', 'PrecisionReport']

MixedPrecision.watch_class = Watch
