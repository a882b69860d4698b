"Report, comparison and diagnosis: which precision a model trains in, which one pays, and why training failed."
from ..training import methods as _core
from ..training.callback import WATCHERS
from . import make_report                                        # adds `Learner.precision_report`
from .any_loop import precision_report
from .compare import measure_and_choose
from .comparison import PrecisionComparison
from .diagnosis import fixed_evaluation
from .notes import ErrorNote, UnusedModules
from .report import PrecisionReport
from .watch import Watch

_core.measure_and_choose = measure_and_choose
WATCHERS += [Watch, fixed_evaluation, UnusedModules, ErrorNote]
