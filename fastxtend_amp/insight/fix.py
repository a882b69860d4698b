"`on_overflow='fix'`: in training the remedy of the diagnosis is applied; evaluation repeats failed batches in fp32."
from contextlib import suppress
from typing import NamedTuple

import torch

from ..messages import warn_user
from ..tensors import map_tensors
from ..training.callback import MixedPrecision
from .candidates import advised, call
from .copies import copied_learner, several_processes
from .diagnosis import Alarm, diagnose
from .random_states import random_state, set_random_state
from .tensors import has_finite_results, tensors


class Fix(NamedTuple):
    "A change that `on_overflow='fix'` made in a fit."
    step: int # Training batch of the fit, from 1; the change applies from the next one on
    precision: str # The one that failed
    call: str # Starts a training with the change


def fix(
    cb: MixedPrecision,
    alarm: Alarm, # It was diagnosed
) -> bool: # False without a remedy, and if the user's own change waits already
    "Apply the remedy when the batch ends, in the same callback: history, optimizer and loss scale continue."
    learn = cb.learn
    if not alarm.remedy or cb.waiting: return False
    new = advised(learn, *alarm.remedy).like()                   # not the fp32 that all share
    said = call(learn, new)

    def switch():
        "Close the fit, which the next batch opens again; drop the gradients and the mean loss, which may be NaN."
        cb.close(failed=True)
        learn.opt.zero_grad()
        if recorder := vars(learn).get('recorder'): recorder.smooth_loss.reset()
        *_, init_scale = alarm.remedy
        if not init_scale: new.load_state_dict(cb.state_dict())
        cb.precision = new

    cb.at_batch_end(switch)
    cb.fixes.append(Fix(alarm.step, alarm.kind.name, said))
    print(f'{alarm.happened} The next batches train with `{said}`.')
    return True


class Mend:
    """Runs batches of `validate`, `get_preds`, `predict` and `tta` again in fp32, with `on_overflow='fix'`.

    If loss and predictions are finite in fp32, they count, in metrics as well; otherwise nothing changes. Nor does it
    for a model that keeps state from batch to batch: it would count this one twice. One warning at the end says how
    many there were, and why.
    """
    n_mended = 0                                                 # of this call, or this epoch of a fit
    keeps_state: bool | None = None                              # the model; asked at its first bad batch
    cause = ''                                                   # of the first, with the call to make

    def __init__(self, cb: MixedPrecision): self.cb = cb

    def before_epoch(self): self.n_mended, self.keeps_state = 0, None        # once for `tta`, with several validations

    def after_loss(self):
        "Look at predictions and loss; autocast is off already."
        cb, learn = self.cb, self.cb.learn
        if learn.training or several_processes(): return         # where a model would wait for the others
        if not cb.fit.precision.dtype or has_finite_results(learn): return
        if self.keeps_state is None: self.keeps_state = _keeps_state(learn)
        if self.keeps_state: return
        low = {name: vars(learn).get(name) for name in ('pred', 'loss', 'loss_grad')}
        with suppress(Exception): self._run_in_fp32()            # an error of a model with 16-bit weights, for example
        if not has_finite_results(learn): return vars(learn).update(low)
        self.n_mended += 1
        if self.n_mended > 1: return
        batch = learn.xb, learn.yb
        alarm = Alarm('a batch is not finite', cb.precision.kind, learn.scaler.get_scale(), 0, batch, random_state())
        self.cause = diagnose(learn, alarm, '')

    def _run_in_fp32(self):
        learn = self.cb.learn
        learn.pred = learn.model(*learn.xb)
        learn('after_pred')
        if not len(learn.yb): return
        learn.loss_grad = learn.loss_func(learn.pred, *learn.yb)
        learn.loss = learn.loss_grad.clone()

    def after_epoch(self):
        "Say how many batches were mended."
        n, self.n_mended = self.n_mended, 0
        if not n: return
        batches = 'batch' if n == 1 else 'batches'
        warn_user(f'{self.cb.precision.kind.name}: {n:,} {batches} of a validation or prediction had NaN or inf in 16 '
                  f'bits, and were re-run in fp32; the fp32 results are used.\n{self.cause}')
    after_fit = after_epoch                                      # `tta` ends with it


def _keeps_state(learn): # In the middle of a batch
    "Return whether results or buffers of a copy of the model are others when it runs a second time."
    state = random_state()
    with suppress(Exception), copied_learner(learn) as copy, torch.no_grad():
        def run():
            set_random_state(state)
            pred = copy.model(*map_tensors(torch.clone, learn.xb))
            return [t.nan_to_num() for t in tensors((pred, [*copy.model.buffers()]))]
        return not all(map(torch.equal, run(), run()))
    return False


def mend(cb: MixedPrecision) -> Mend | None:
    "Return the watcher of a precision callback that fixes what fails; None for another."
    return Mend(cb) if cb.on_overflow == 'fix' else None
