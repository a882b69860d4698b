"`on_overflow='fix'`: what the diagnosis has tried is applied, and training goes on."
from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ..precisions import PRECISIONS, Precision, parameters_of
from ..training.loop import at_batch_end, open_scopes
from .precisions import call_like
from .verdict import named

__all__ = ['Fix', 'fix']

MOST = 3  # fixes in one fit


@dataclass(frozen=True)
class Fix:
    "A change that `on_overflow='fix'` made in a fit; as text, one line."
    step: int # Training batch of the fit, from 1; the change applies from the next one on
    precision: str # The one that failed
    cause: str # Where it began
    change: str # What was done
    call: str # Starts a training with it

    def __str__(self) -> str:
        return (f'{self.precision} failed in batch {self.step:,}: {self.cause}. Training continues {self.change}. '
                f'Next time start with `{self.call}`.')


def fix(
    cb: Any, # The `MixedPrecision`, in a batch
    alarm: Any, # An `Alarm` that was diagnosed
) -> bool: # False without a remedy, and after three fixes in this fit
    "Apply the remedy when the batch ends: in the same callback, so that history, optimizer and loss scale continue."
    scopes = open_scopes(cb.learn)
    if alarm.remedy is None or scopes.n_fixes == MOST: return False
    scopes.n_fixes += 1
    mode, modules, scale = alarm.remedy
    call = call_like(cb.learn, *alarm.remedy)
    cls = PRECISIONS.get(call.method.removeprefix('to_'), Precision)
    new = cls(**{name: value for name, value in call.arguments.items() if name in parameters_of(cls)})
    at_batch_end(cb.learn, partial(_switch, cb, new, scale))
    changes = [f"{', '.join(map(named, modules))} in fp32"] if modules else []
    if scale: changes.append(f'a loss scale of {scale:,.9g}')
    change = f"with {' and '.join(changes)}" if changes else f"in {mode.value if mode else 'fp32'}"
    cb.fixes.append(Fix(alarm.step, alarm.mode.value, alarm.cause, change, str(call)))
    print(cb.fixes[-1])
    return True


def _switch(cb: Any, new: Precision, scale: float | None) -> None:
    "Close the fit, which the next batch opens in `new`; drop the gradients and the mean loss, which may be NaN."
    old, recorder = cb.current, vars(cb.learn).get('recorder')
    cb.close(failed=True)
    if cb.learn.opt is not None: cb.learn.opt.zero_grad()
    if recorder is not None: recorder.smooth_loss.reset()
    if old.mode == new.mode: new.load_state_dict(old.state_dict() | ({'scale': float(scale)} if scale else {}))
    cb.precision = cb.current = new
