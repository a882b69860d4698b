"`on_overflow='fix'`: the remedy that the diagnosis has tried is applied, and training continues."
from __future__ import annotations

from typing import Any, NamedTuple

from .candidates import advised, call


class Fix(NamedTuple):
    "A change that `on_overflow='fix'` made in a fit."
    step: int # Training batch of the fit, from 1; the change applies from the next one on
    precision: str # The one that failed
    call: str # Starts a training with the change


def fix(
    cb: Any, # The `MixedPrecision`
    alarm: Any, # An `Alarm` that was diagnosed
) -> bool: # False without a remedy
    "Apply the remedy when the batch ends, in the same callback: history, optimizer and loss scale continue."
    learn = cb.learn
    if not alarm.remedy: return False
    new = advised(learn, *alarm.remedy)
    said = call(learn, new)

    def switch():
        "Close the fit, which the next batch opens again; drop the gradients and the mean loss, which may be NaN."
        cb.close(failed=True)
        learn.opt.zero_grad()
        if recorder := vars(learn).get('recorder'): recorder.smooth_loss.reset()
        mode, _, init_scale = alarm.remedy
        if mode == cb.mode and not init_scale: new.load_state_dict(cb.state_dict())
        cb.precision = new

    cb.at_batch_end(switch)
    cb.fixes.append(Fix(alarm.step, alarm.mode.value, said))
    print(f'{alarm.happened} Training continues with `{said}`.')
    return True
