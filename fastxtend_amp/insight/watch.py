"Notices during a fit that training goes wrong, and warns or raises with the cause."
from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from ..common import RandomState, first_line, random_state, several_processes, warn_user
from ..compat import host_value
from .diagnosis import Alarm, diagnose
from .growth import Sizes

__all__ = ['Watch']


def _recorded(learn: Any) -> list:
    "Return the smoothed losses that fastai's Recorder has fetched, in main memory."
    return vars(learn.__dict__.get('recorder', learn)).get('losses', ())


class Watch:
    """Watches one fit for the precision callback, which calls the method of an event after its own; warns once.

    While all goes well it costs no GPU synchronization in a step: on an accelerator it reads the loss that fastai's
    Recorder has fetched, and the skipped steps that the host knows. The norm of the weights is taken once, before the
    first training batch.

    With `on_overflow='raise'` and several processes they raise together, at the same batch: that takes one all-reduce
    of a single number for each training batch, which on an accelerator the host waits for.
    """
    def __init__(self, cb: Any): # The `MixedPrecision`, whose fit has begun
        self.cb, self.on_host = cb, cb.device.type == 'cpu'
        self.has_warned = False
        self.agrees = cb.on_overflow == 'raise' and several_processes()
        self.sizes: Sizes | None = None                          # of weights and loss at the start
        self.random_state: RandomState | None = None             # before the training batch under way
        self.skips = 0                                           # in a row, as far as the host knows
        self.n_recorded = 0                                      # losses that the Recorder held before the batch
        self.last_loss = math.nan                                # the last finite one
        self.pending: str | None = None                          # what this process will raise once all know

    def before_batch(self) -> None:
        learn = self.cb.learn
        if self.has_warned or not learn.training: return
        self.random_state = random_state(self.cb.device)
        if self.sizes is None: self.sizes = Sizes(learn.model)
        self.n_recorded = len(_recorded(learn))

    def after_loss(self) -> None:
        "Look at the loss where that is free, or where all processes must know."
        learn = self.cb.learn
        if not learn.training or self.sizes is None: return
        loss = host_value(learn.loss) if self.on_host else None
        if self.sizes.loss is None: self.sizes.loss = learn.loss.detach() if loss is None else loss
        self._check_loss(loss)
        if self.agrees: self._agree(learn.loss)

    def after_step(self) -> None: self._check_skips()

    def after_batch(self) -> None:
        "On an accelerator, look at the loss that the Recorder fetched in this batch or the one before."
        losses = _recorded(self.cb.learn)
        if not self.on_host and self.cb.learn.training and len(losses) > self.n_recorded:
            self._check_loss(host_value(losses[-1]))

    def after_train(self) -> None:
        "Look at the skips that have been read at the end of the epoch."
        self._check_skips()
        if self.agrees: self._agree()

    def _check_skips(self) -> None:
        n, before = self.cb.skips_in_a_row, self.skips
        self.skips = n
        if self.has_warned or n <= before: return
        same = n == before + 1                                   # it is the batch under way that was skipped
        if n >= self.cb.max_skips: self._alarm(f'{n} steps in a row were skipped', same)
        elif same and not self.cb.static_scale and self.cb.scale < 1: self._alarm('the loss scale falls below 1')

    def _check_loss(self, loss: float | None) -> None:
        if loss is None or self.has_warned: return
        if math.isfinite(loss): self.last_loss = loss
        else: self._alarm(f'the loss is {loss}')

    def _alarm(self, what: str, same: bool = True) -> None:
        "Say what happened, where it began and what to try: once a fit."
        cb, self.has_warned = self.cb, True
        step, scale = getattr(cb.learn, 'train_iter', 0) + 1, cb.scale or 1.
        if self.skips and cb.scales: scale = cb.scales[-1]       # of the step that was skipped
        alarm = Alarm(what, cb.mode, scale, step, self.random_state if same else None)
        try:
            if self.sizes: alarm.growth = self.sizes.growth(cb.learn.model, self.last_loss)
            message = diagnose(cb.learn, alarm)
        except Exception as e:
            message = (f'{alarm.happened}\nLooking for the cause failed ({type(e).__name__}: {first_line(e)}).\n'
                       'Try `learn.precision_report()`.')
        if self.agrees: self.pending = message
        elif cb.on_overflow == 'raise': raise FloatingPointError(message)
        else: warn_user(message)

    def _agree(self, loss: torch.Tensor | None = None) -> None:
        "Raise in every process if one of them has something to say."
        rank = dist.get_rank()
        found = torch.full((), 0. if self.pending is None else rank + 1., device=self.cb.device)
        if loss is not None and not self.on_host: found = found.maximum((~loss.detach().isfinite()).any() * (rank + 1.))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        if not (worst := int(found)): return
        if self.pending is None and worst == rank + 1: self._alarm('the loss is not finite')
        self.agrees = False
        other = worst - 1
        raise FloatingPointError(self.pending or f'{self.cb.mode.value} training goes wrong on rank {other}.\n'
                                 f'Every rank stops at this batch; what happened is in the message of rank {other}.\n'
                                 'This rank found nothing by itself.')
