"Report, comparison and diagnosis: which precision a model survives, where training goes wrong, and what pays off."
from .compare import PrecisionComparison
from .report import PrecisionReport
from . import diagnosis as _diagnosis, learner as _learner

__all__ = ['PrecisionComparison', 'PrecisionReport']
