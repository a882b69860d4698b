"`on_overflow='fix'`: the remedy that the diagnosis has tried is applied, and training continues."
from __future__ import annotations

from typing import Any, NamedTuple

from ..training.loop import at_batch_end
from .precisions import precision_call

_MOST = 3  # fixes in one fit


class Fix(NamedTuple):
    "A change that `on_overflow='fix'` made in a fit."
    step: int # Training batch of the fit, from 1; the change applies from the next one on
    precision: str # The one that failed
    call: str # Starts a training with the change


def fix(
    cb: Any, # The `MixedPrecision`
    alarm: Any, # An `Alarm` that was diagnosed
) -> bool: # False without a remedy, and after three fixes in this fit
    "Apply the remedy when the batch ends, in the same callback: history, optimizer and loss scale continue."
    learn = cb.learn
    scopes = learn._scopes
    if not alarm.remedy or scopes.n_fixes == _MOST: return False
    scopes.n_fixes += 1
    call = precision_call(learn, *alarm.remedy)

    def switch():
        "Close the fit, which the next batch opens again; drop the gradients and the mean loss, which may be NaN."
        cb.close(failed=True)
        learn.opt.zero_grad()
        if recorder := vars(learn).get('recorder'): recorder.smooth_loss.reset()
        new = call.precision.from_arguments(call.arguments)
        mode, _, init_scale = alarm.remedy
        if mode == cb.mode and not init_scale: new.load_state_dict(cb.state_dict())
        cb.precision = cb.current = new

    at_batch_end(learn, switch)
    cb.fixes.append(Fix(alarm.step, alarm.mode.value, str(call)))
    print(f'{alarm.happened} Training continues with `{call}`.')
    return True
