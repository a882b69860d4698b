"Notices during a fit that training goes wrong, and warns or raises with the cause."
from __future__ import annotations

import math, warnings
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist

from ..common import RandomState, first_line, random_state
from ..compat import host_value
from ..devices.xla import run_graph
from ..observer import OBSERVERS, PrecisionObserver
from ..scaling import GradStage, StaticGradScaler
from .diagnosis import Alarm, diagnose, several_processes
from .growth import Sizes

__all__ = ['OverflowWatch']


def _recorded(learn) -> list:
    "The smoothed losses that fastai's Recorder has fetched, in main memory."
    return vars(learn.__dict__.get('recorder', learn)).get('losses', ())


@dataclass
class _Fit:
    "What lasts for one fit."
    in_place: bool                           # the loss is in main memory
    agrees: bool                             # all processes raise together
    sizes: Sizes | None = None               # of weights and loss at the start
    random_state: RandomState | None = None  # before the last training batch
    skips: int = 0                           # in a row, as far as the host knows
    n_recorded: int = 0                      # losses that the Recorder held before the batch
    last_loss: float = math.nan              # the last finite one
    pending: str | None = None               # what this process will raise once all know


class OverflowWatch(PrecisionObserver):
    """Notices, for one callback, that training goes wrong, and says once a fit where.

    While all goes well it costs no operator and no GPU synchronization in a step: in main memory the loss and the
    device's flag are read in place; on an accelerator the loss that fastai's Recorder has fetched anyway, and the flags
    of many steps when they have come. The sizes of the weights are taken once, before the first training batch.

    With `on_overflow='raise'` and several processes they raise together, at the same batch: that takes one all-reduce
    of a single number for each training batch, which on an accelerator the host waits for.
    """
    def __init__(self, cb: Any):
        super().__init__(cb)
        self.on, self.fit = False, _Fit(True, False)

    def fit_started(self) -> None:
        cb = cast(Any, self.cb)                                  # whose fit is under way: it has a device
        self.on = cb.fit_mode is not None and cb.on_overflow != 'ignore' and not cb.finds_lr
        self.fit = _Fit(cb.fit_device.type == 'cpu', self.on and cb.on_overflow == 'raise' and several_processes())

    def batch_started(self) -> None:
        learn = self.cb.learn
        if not self.on or not learn.training: return
        self.fit.random_state = random_state(self.cb.fit_device)
        if self.fit.sizes is None: self._take_sizes(on_xla=self.cb.fit_device.type == 'xla')
        if not self.fit.in_place: self.fit.n_recorded = len(_recorded(learn))

    def _take_sizes(self, on_xla: bool) -> None:
        if on_xla: run_graph()                                   # the first batch of each fit would be compiled anew
        self.fit.sizes = Sizes(self.cb.learn.model)
        if on_xla: run_graph()

    def loss_computed(self) -> None:
        "Look at the loss before anything is made of it, where that is free or where all processes must know."
        learn, fit = self.cb.learn, self.fit
        if not learn.training or fit.sizes is None: return
        loss = host_value(learn.loss) if fit.in_place else None
        if fit.sizes.loss is None: fit.sizes.loss = learn.loss.detach() if loss is None else loss
        if self.on: self._check_loss(loss)
        if fit.agrees: self._agree(learn.loss)

    def step_decided(self) -> None:
        "After the gradients were unscaled: was the step held back, and is it one too many?"
        s, learn = self.cb.scaling, self.cb.learn
        if not self.on or s.stage is not GradStage.UNSCALED: return
        skipped = host_value(s.found_inf) if isinstance(s.found_inf, torch.Tensor) else s.held_back
        if skipped is None: return                               # only the device knows
        self.fit.skips = self.fit.skips + 1 if skipped else 0
        if not skipped: return
        # An accelerator's loss and scale are not read here: that would wait for it. `batch_ended` sees the loss.
        if self._check_loss(host_value(learn.loss) if self.fit.in_place else None): return
        scale = s.history.current_scale
        if self.fit.skips >= self.cb.max_skips: self._alarm(f'{self.fit.skips} steps in a row were skipped')
        elif isinstance(s.scaler, StaticGradScaler) or scale is None: return
        elif scale * s.scaler.get_backoff_factor() < 1: self._alarm('the loss scale falls below 1')

    def batch_ended(self) -> None:
        "On an accelerator: look at what has come to the host by now."
        if self.fit.in_place or not self.on or self.fit.random_state is None: return
        n = self.cb.scaling.history.arrived_skips()
        if n >= self.cb.max_skips: return self._alarm(f'{n} steps in a row were skipped', same=False)
        losses = _recorded(self.cb.learn)
        if len(losses) > self.fit.n_recorded: self._check_loss(host_value(losses[-1]))

    def epoch_ended(self) -> None:
        "At the end of an epoch the host knows all."
        n = self.cb.max_skips
        if self.on:
            skips = self.cb.scaling.history.skips[-n:]
            unknown = len(skips) == n and skips.all() and self.fit.skips < n
            if unknown: self._alarm(f'the last {n} steps were skipped', same=False)
        if self.fit.agrees: self._agree()

    def _check_loss(self, loss: float | None) -> bool:
        if loss is None: return False
        if math.isfinite(loss):
            self.fit.last_loss = loss
            return False
        self._alarm(f'the loss is {loss}')
        return True

    def _alarm(self, what: str, same: bool = True) -> None:
        "Say what happened, where it began and what to try: once a fit."
        cb, fit, self.on = cast(Any, self.cb), self.fit, False
        step = getattr(cb.learn, 'train_iter', 0) + 1
        alarm = Alarm(what, cb.fit_mode, cb.scaling.scaler.get_scale(), step, fit.random_state if same else None)
        try:
            if fit.sizes: alarm.growth = fit.sizes.growth(cb.learn.model, fit.last_loss)
            with cb.diagnosing(): message = diagnose(cb.learn, alarm)
        except Exception as e:
            message = (f'{alarm.happened}\nLooking for the cause failed ({type(e).__name__}: {first_line(e)}).\n'
                       'Try `learn.precision_report()`.')
        if fit.agrees: fit.pending = message
        elif cb.on_overflow == 'raise': raise FloatingPointError(message)
        else: warnings.warn(message)

    def _agree(self, loss: torch.Tensor | None = None) -> None:
        "Raise in every process if one of them has something to say."
        fit, rank = self.fit, dist.get_rank()
        found = torch.full((), 0. if fit.pending is None else rank + 1., device=self.cb.fit_device)
        if loss is not None and not fit.in_place: found = found.maximum((~loss.detach().isfinite()).any() * (rank + 1.))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        if not (worst := int(found)): return
        fit.agrees = False
        if fit.pending is None and worst == rank + 1: self._alarm('the loss is not finite')
        mode, other = cast(Any, self.cb).fit_mode.value, worst - 1
        raise FloatingPointError(fit.pending or f'{mode} training goes wrong on rank {other}.\n'
                                 f'Every rank stops at this batch; what happened is in the message of rank {other}.\n'
                                 'This rank found nothing by itself.')


OBSERVERS.append(OverflowWatch)
