"`on_overflow='fix'` in evaluation: a batch that is not finite in 16 bits runs again in fp32."
from __future__ import annotations

from typing import Any

from ..common import warn_user
from .copies import random_state
from .diagnosis import Alarm, diagnose
from .tensors import readable


class Mend:
    """Runs batches of `validate`, `get_preds`, `predict` and `tta` again in fp32, with `on_overflow='fix'`.

    If loss and predictions are finite in fp32, they count, in metrics as well; otherwise nothing changes. One warning
    at the end says how many there were, and why.
    """
    n_mended = 0                                                 # of this validation
    cause = ''                                                   # of the first, with the call to make

    def __init__(self, cb: Any): self.cb = cb                    # a `MixedPrecision`

    def before_validate(self): self.n_mended, self.cause = 0, ''

    def after_loss(self):
        "Look at predictions and loss; autocast is off already."
        cb, learn = self.cb, self.cb.learn
        if cb.on_overflow != 'fix' or learn.training or not cb.fit.precision.dtype or _is_finite(learn): return
        low = {name: vars(learn).get(name) for name in ('pred', 'loss', 'loss_grad')}
        try: self._run_in_fp32()
        except Exception: vars(learn).update(low)                # as a model with 16-bit weights raises
        if not _is_finite(learn): return vars(learn).update(low)
        self.n_mended += 1
        if self.n_mended > 1: return
        batch = learn.xb, learn.yb
        alarm = Alarm('a batch is not finite', cb.mode, learn.scaler.get_scale(), 0, batch, random_state())
        _, _, self.cause = diagnose(learn, alarm, '').partition('\n')

    def _run_in_fp32(self):
        learn = self.cb.learn
        learn.pred = learn.model(*learn.xb)
        learn('after_pred')
        if not len(learn.yb): return
        learn.loss_grad = learn.loss_func(learn.pred, *learn.yb)
        learn.loss = learn.loss_grad.clone()

    def after_validate(self):
        "Say how many batches were mended."
        if not self.n_mended: return
        batches = f'{self.n_mended:,} batch{"es" * (self.n_mended > 1)}'
        warn_user(f'{self.cb.mode.value}: {batches} of a validation or prediction had NaN or inf in 16 bits, and ran '
                  f'again in fp32, whose results count.\n{self.cause}')


def mend(cb: Any) -> Mend | None:
    "Return the watcher of a precision callback that fixes what fails; None for another."
    return Mend(cb) if cb.on_overflow == 'fix' else None


def _is_finite(learn):
    loss = vars(learn).get('loss') if len(learn.yb) else None
    return all(t.isfinite().all() for t in readable((learn.pred, loss)))
