"""Report, comparison and diagnosis: which precision a model trains in, which is fastest, and why training failed.

The path of a verdict, each line calling those below it that are further to the right:

    report.py              draws batches, asks for a verdict on each precision, and adds notes
      judge.py             runs batches, keeps modules in fp32 or lowers the loss scale, runs again
        sample.py          runs a copy of the learner (copies.py) in a precision (calls.py)
          recording.py     knows which module runs, and catches its operators and gradients
            operations.py  runs each operator a second time, in fp32, and records the error of the module
        gradient.py        runs two copies, and compares their mean gradients
        evidence.py        reads the records: which modules 16 bits harm, and which loss scales work
    report_result.py       verdicts, tables, notes and plot

`any_loop.py` makes a learner for a report; `diagnosis.py` asks the judge about a batch that failed in a fit.
"""
from ..training import methods as _core
from ..training.callback import WATCHERS
from . import report                                             # adds `Learner.precision_report`
from .any_loop import precision_report
from .compare import PrecisionComparison, measure_and_choose
from .report_result import PrecisionReport
from .watch import ErrorNote, FailureWatcher, UnusedModules

_core.measure_and_choose = measure_and_choose
WATCHERS += [FailureWatcher, UnusedModules, ErrorNote]
