"The measured choice: the fastest precision for a learner, found by trying each on its own batches."
from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from fastai.learner import Learner

from ..checks import check_seconds
from ..mode import AMPMode, training_device
from .copies import check_learner
from .compare import compare
from .comparison import PrecisionComparison
from .precisions import PrecisionChoice, choices_from, default_choices, use_choice

__all__ = ['PrecisionDecision', 'decision_of', 'measure_and_choose']

_FOR_REPORT = .3    # of the time
_decisions: WeakKeyDictionary = WeakKeyDictionary()              # by learner, whose own attributes go into `export`


@dataclass
class PrecisionDecision:
    "A measured choice, and the comparison behind it."
    mode: str # A row of the comparison's table
    reason: str # One sentence
    call: str # The call that makes the same choice without measuring
    seconds: float # What it took
    comparison: PrecisionComparison
    choice: PrecisionChoice

    @property
    def table(self): return self.comparison.table
    def plot(self, axs=None): return self.comparison.plot(axs)
    def __str__(self) -> str: return (f'{self.mode}: {self.reason} Measured in {self.seconds:.0f} s. The same '
                                      f'without measuring: `{self.call}`.')


def measure_and_choose(
    learn: Learner, # Has the chosen precision afterwards
    max_seconds: float = 60., # For all of it
    *,
    modes: Any = None, # The precisions to try; those that the device does natively if None
    n_steps: int = 40, # Training batches for each
) -> None:
    """Set the fastest precision that trains as fp32 does, measured on the learner's own batches from its present state.

    fp32, bf16 and fp16 are tried as far as the device does them natively, and half-precision weights, too, if the
    learner has them; with the modules kept in fp32 that `precision_report` names. Copies are trained: whatever
    interrupts this leaves the learner as it was. With several processes each measures without the others, and all take
    what rank 0 found. `learn.precision_decision` holds the outcome, and so does `learn.precision.decision`.

    Raises `ValueError` for an unknown mode, `max_seconds` not above 0, and where `compare_precision` or
    `precision_report` do.
    """
    check_seconds(max_seconds)
    check_learner(learn, 'to_amp(measure=True)')
    start = time.perf_counter()
    choices = default_choices(learn) if modes is None else choices_from(modes)
    choices, refused = _with_modules_kept(learn, choices, max_seconds)
    left = max(max_seconds - (time.perf_counter() - start), .1)
    comparison = compare(learn, choices, n_steps, n_seeds=1, max_seconds=left)
    chosen = _of_rank_0(comparison.choices[comparison.recommended], learn)
    call = comparison.calls.get(chosen.name, f'learn.to_{chosen.name}()')
    reason = comparison.reason.partition(' Next: ')[0]
    if refused: reason = f"{reason.rstrip('.')}; {'; '.join(refused)}."
    decision = PrecisionDecision(chosen.name, reason, call, time.perf_counter() - start, comparison, chosen)
    cb = use_choice(learn, chosen)
    if cb is not None: cb.decision = decision
    _decisions[learn] = decision
    print(decision)


def decision_of(learn: Learner) -> PrecisionDecision | None:
    "Return what was last measured and chosen for `learn`."
    return _decisions.get(learn)


def _with_modules_kept(learn, choices, max_seconds) -> tuple[list[PrecisionChoice], list[str]]:
    "Return the choices that may work, with the modules that they need in fp32; and what the report said of the others."
    modes = list(dict.fromkeys(c.mode for c in choices if c.mode is not None))
    if not modes: return choices, []
    verdicts = learn.precision_report(modes, max_seconds=_FOR_REPORT * max_seconds).verdicts
    found, refused = [], []
    for c in choices:
        v = verdicts.get(c.mode.value) if c.mode is not None else None
        if v is None: found.append(c)
        elif v.verdict == 'do not use': refused.append(f'{c.name}: {v.reason}')
        else: found.append(replace(c, fp32_modules=tuple(v.modules)))
    return found, list(dict.fromkeys(refused))


def _of_rank_0(choice: PrecisionChoice, learn: Learner) -> PrecisionChoice:
    "Return rank 0's choice, in every process."
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1): return choice
    device = training_device(learn)
    told: list[Any] = [(choice.mode and choice.mode.value, choice.half_weights, choice.fp32_modules)]
    dist.broadcast_object_list(told, src=0, device=None if device.type == 'cpu' else device)
    mode, half_weights, fp32_modules = told[0]
    return PrecisionChoice(AMPMode(mode) if mode else None, half_weights, fp32_modules)
