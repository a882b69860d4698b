"The measured choice: the fastest precision for a learner, found by trying each on its own batches."
from __future__ import annotations

import time
from dataclasses import replace
from weakref import WeakKeyDictionary

from fastai.learner import Learner
from fastcore.basics import patch

from ..common import several_processes
from .compare import Comparison
from .comparison import PrecisionComparison
from .precisions import PrecisionChoice, default_choices

__all__ = ['measure_and_choose']

_FOR_REPORT = .3    # of the time
# By learner, whose own attributes go into `export`.
decisions: WeakKeyDictionary[Learner, PrecisionComparison] = WeakKeyDictionary()


def measure_and_choose(
    learn: Learner, # Has the chosen precision afterwards
    max_seconds: float = 60., # For all of it
) -> None:
    """Set the fastest precision that trains as fp32 does, measured on the learner's own batches from its present state.

    fp32, TF32, bf16 and fp16 are tried as far as the device does them natively, and half-precision weights, too, if the
    learner has them; with the modules kept in fp32 that `precision_report` names. Copies are trained: whatever
    interrupts this leaves the learner as it was. `learn.precision_decision` is the comparison.

    Raises `ValueError` for `max_seconds` not above 0, and where `compare_precision` or
    `precision_report` do; `RuntimeError` inside a fit and in several processes.
    """
    comparing = Comparison(learn, 'to_amp(measure=True)', max_seconds)
    if several_processes():
        raise RuntimeError('to_amp(measure=True) cannot run in several processes, where each would measure and choose '
                           'for itself.\nCall it in one process, and the call that it prints in all of them.')
    start = time.perf_counter()
    choices, refused = _with_modules_kept(learn, default_choices(learn), max_seconds)
    comparison = comparing.run(choices)
    comparison.reason = '; '.join([comparison.reason.rstrip('.'), *refused]) + '.'
    comparison.apply(learn)
    decisions[learn] = comparison
    said = ' '.join([comparison.reason, *comparison.caveats])
    print(f'Chosen: {comparison.recommended}. {said} Measured in {time.perf_counter() - start:.0f} s. The '
          f'same without measuring: `{comparison.calls[comparison.recommended]}`.')


def _with_modules_kept(learn, choices, max_seconds) -> tuple[list[PrecisionChoice], list[str]]:
    "Return the choices that may work, with the modules that they need in fp32; and what the report said of the rest."
    low = [c for c in choices if c.mode and c.mode.dtype]
    if not low: return choices, []
    verdicts = learn.precision_report([c.mode for c in low], max_seconds=_FOR_REPORT * max_seconds).verdicts
    found, refused = [c for c in choices if c not in low], []
    for c in low:
        v = verdicts[c.mode.value]
        if v.call and v.verdict not in ('do not use', 'cannot run'):
            found.append(replace(c, fp32_modules=tuple(v.modules), init_scale=v.init_scale))
        else: refused.append(f'{c.name}: {v.reason}')
    return found, refused


@patch(as_prop=True)
def precision_decision(self: Learner) -> PrecisionComparison | None:
    "The comparison by which `to_amp(measure=True)` last chose: `recommended`, `reason`, `calls`; None if not asked."
    return decisions.get(self)
