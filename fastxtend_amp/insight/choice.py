"`to_amp(measure=True)`: times each precision on real batches and applies the fastest."
from fastai.learner import Learner
from fastcore.basics import patch

from .candidates import candidates, like_own
from .compare import compare
from .comparison import PrecisionComparison
from .copies import several_processes
from .measuring import Setting

_FOR_REPORT = .3    # share of the time


def measure_and_choose(
    learn: Learner, # Switched to the selected precision
    max_seconds: float = 60., # Time limit for report and comparison
) -> None:
    """Time each precision on real batches, and switch the learner to the fastest one whose loss matches fp32.

    Compares the precisions that the device runs natively, with the modules in fp32 that `precision_report` names, and
    the fastest of them with kinds of modules in fp32 that it makes slower. Only copies are trained. Prints the
    decision; details are in `learn.precision_decision`.

    Raises what `compare_precision` raises, and `RuntimeError` in distributed runs.
    """
    setting = Setting(learn, 'to_amp(measure=True)', max_seconds, tune=True)
    if several_processes():
        raise RuntimeError('to_amp(measure=True) is not available in distributed runs, as each process could choose '
                           'another precision.\nRun it in one process, then use the call that it prints in every '
                           'process.')
    precisions = candidates(learn)
    if len(precisions) == 1:                                     # fp32 alone
        vars(learn).pop('precision_decision', None)
        learn.to_amp()                                           # which says why
        return
    low = [p.name for p in precisions if p.dtype]
    verdicts = learn.precision_report(low, max_seconds=_FOR_REPORT * max_seconds).verdicts if low else {}
    compared, notes = [], []
    for p in precisions:
        v = verdicts.get(p.name)
        if not v: compared.append(p)
        elif v.call and v.verdict not in ('do not use', 'cannot run'):
            compared.append(like_own(learn, type(p), v.modules, v.init_scale))
        else: notes.append(f'{p.name}: {v.reason}.')
    comparison = compare(setting, compared)
    comparison.notes[:0] = notes
    comparison.apply(learn)
    vars(learn)['precision_decision'] = comparison               # which `export` leaves out
    best = comparison.recommended
    print(f'Selected: {best}.', comparison.reason, *comparison.notes,
          f'Next time, call `{comparison.calls[best]}` instead of measuring.')


@patch(as_prop=True)
def precision_decision(self: Learner) -> PrecisionComparison | None:
    "The comparison of the last `to_amp(measure=True)`: `recommended`, `reason`, `calls`; None without one."
    return vars(self).get('precision_decision')
