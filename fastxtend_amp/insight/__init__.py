"Report, comparison and diagnosis: which precision a model survives, where training goes wrong, and what pays off."
from .. import learner as _core
from ..observer import ON_MEASURE
from .choice import measure_and_choose
from .comparison import PrecisionComparison
from .report import PrecisionReport
from . import learner as _learner, watch as _watch

__all__ = ['PrecisionComparison', 'PrecisionReport']

setattr(_core, 'measure', measure_and_choose)                    # noqa: B010  for `to_amp(measure=True)`
ON_MEASURE.append(measure_and_choose)
