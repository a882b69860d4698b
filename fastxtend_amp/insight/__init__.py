"Report, comparison and diagnosis: which precision a model survives, where training goes wrong, and what pays off."
from .comparison import PrecisionComparison
from .report import PrecisionReport
from . import choice as _choice, learner as _learner, watch as _watch

__all__ = ['PrecisionComparison', 'PrecisionReport']
