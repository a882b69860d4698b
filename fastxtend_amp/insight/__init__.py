"""Report, comparison and diagnosis: which precision a model trains in, which is fastest, and why training failed.

The path of a verdict; each line uses some of those below it:

    report.py              draws batches, asks for a verdict on each precision, and adds notes
      judge.py             runs batches, keeps modules in fp32 or lowers the loss scale, runs again
        sample.py          runs its batches in a precision, beside a run in fp32
          recording.py     knows which module runs, and catches its operators and gradients
            operations.py  runs each operator a second time, in fp32 (twins.py)
            observers.py   note what is found, in the record of the module
        gradient.py        runs two copies, and compares their mean gradients
        search.py          finds a few of many modules that together help
        evidence.py        reads the records: which modules 16 bits harm, and which loss scales work
    report_notes.py        what was seen besides the verdicts
    report_result.py       verdicts, tables, notes and plot

The path of a comparison:

    compare.py             trains copies of the learner, in fp32 with other seeds as well
      rounds.py            has them train in turn, and drops what is clearly slower
        trial.py           trains one copy, and times it
      recommendation.py    decides whether one is faster (speed.py), and trains as well
    comparison_result.py   table, losses, recommendation and plot

The path of a warning in a fit:

    watch.py               notices a failure
      diagnosis.py         asks the judge about the batch that failed, and makes the change of 'fix'
    mistakes.py            explains an error of PyTorch's, and modules that were not called

`any_loop.py` makes a learner for a report. All of them use `requirements.py` (what a learner needs), `choices.py` (a
precision as a call), `copies.py` with `copied_callbacks.py`, `batches.py` (batches on copies), `random_states.py`,
`values.py` (what can be read of tensors) and `display.py`.
"""
from ..training import methods as _core
from ..training.callback import WATCHERS
from . import report                                             # adds `Learner.precision_report`
from .any_loop import precision_report
from .compare import measure_and_choose
from .comparison_result import PrecisionComparison
from .mistakes import ErrorNote, UnusedModules
from .report_result import PrecisionReport
from .watch import FailureWatcher

_core.measure_and_choose = measure_and_choose
WATCHERS += [FailureWatcher, UnusedModules, ErrorNote]
