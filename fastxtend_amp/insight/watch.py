"The watch over a fit: it notices that training goes wrong, and warns or raises with the cause."
from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ..common import warn_user
from .copies import RandomState, random_state
from .diagnosis import Alarm, diagnose

__all__ = ['Watch']

_FAR = 100.     # times the loss or the weights' norm at the start, from which a run diverges
_MOVED = 1.01   # times the weights' norm at the start, from which the weights have moved


class Watch:
    """The watch over one fit of a precision callback: it notices that training goes wrong, and says once why.

    The callback calls the methods that have an event's name, each after its own. While all goes well nothing here
    waits for an accelerator: it reads the losses that fastai's Recorder has fetched, and the skips the host knows of.

    With several processes each looks at its own loss; an exception in one ends the job under `torchrun`.
    """
    def __init__(self,
        cb: Any, # A `MixedPrecision` whose fit has begun
    ):
        self.cb, self.has_warned = cb, False
        self.in_place = cb.device.type == 'cpu'                  # reading a number waits for nothing
        self.weights: torch.Tensor | None = None                 # their norm at the start
        self.first_loss: torch.Tensor | None = None
        self.last_loss = math.nan                                # the last finite one
        self.random_state: RandomState | None = None             # before the batch
        self.before: tuple | None = None                         # on an accelerator: the last batch
        self.n_recorded = 0                                      # losses of the Recorder that were looked at

    def before_batch(self) -> None:
        "Note the random state, and once the size of the weights."
        learn = self.cb.learn
        if self.has_warned or not learn.training: return
        self.random_state = random_state()
        if self.weights is None and self.cb.device.type != 'xla':        # which would compile the first batch twice
            self.weights = _norm(learn.model)

    def after_loss(self) -> None:
        "Look at the loss before anything is made of it; on an accelerator at that of the batch before."
        learn = self.cb.learn
        if not learn.training or not len(learn.yb): return
        loss = learn.loss.detach()
        if self.first_loss is None: self.first_loss = loss.mean()
        if self.in_place: self._check_loss(float(loss.mean()))
        else:
            self._check_recorded()
            self.before = learn.xb, learn.yb, self.random_state

    def after_step(self) -> None:
        "Count skipped steps in a row, and see whether the loss scale falls below 1."
        n, cb = self.cb.skips_in_a_row, self.cb
        if n >= cb.max_skips: self._alarm(f'{n} steps in a row were skipped', skipped=True)
        elif n and self.in_place and cb.scale < 1 <= cb.scales[-1]:
            self._alarm('the loss scale falls below 1', skipped=True)

    def after_train(self) -> None:
        "Look again at the end of an epoch, when the host knows all."
        self.after_step()
        self._check_recorded()

    def _check_recorded(self) -> None:
        recorder = vars(self.cb.learn).get('recorder')
        losses = getattr(recorder, 'losses', [])
        if self.in_place or len(losses) <= self.n_recorded: return
        self.n_recorded = len(losses)
        self._check_loss(float(losses[-1]), self.before)

    def _check_loss(self, loss: float, batch: tuple | None = None) -> None:
        if math.isfinite(loss): self.last_loss = loss
        else: self._alarm(f'the loss is {loss}', batch=batch)

    def _alarm(self,
        what: str,
        skipped: bool = False, # Whether it is about skipped steps, which an accelerator may have known for long
        batch: tuple | None = None, # That batch: inputs, targets and random state; the one under way if None
    ) -> None:
        "Say what happened, where it began and what to try: once a fit."
        if self.has_warned: return
        cb, self.has_warned = self.cb, True
        scale = cb.learn.scaler.get_scale()
        if skipped and cb.arguments['loss_scale'] is None: scale /= cb.learn.scaler.get_backoff_factor()   # of the step
        xb, yb, state = batch or (cb.learn.xb, cb.learn.yb, self.random_state)
        step = getattr(cb.learn, 'train_iter', 0) + (batch is None)
        alarm = Alarm(what, cb.mode, scale, step, xb, yb, state if self.in_place or not skipped else None)
        try:
            alarm.divergence = self._divergence()
            message = diagnose(cb.learn, alarm)
        except Exception as e:
            said = '\n'.join(str(e).splitlines()[:2])            # of a refusal: what is wrong, and the way out
            message = f'{alarm.happened}\nThe batch could not be run again, {type(e).__name__}: {said}'
        if cb.on_overflow == 'raise': raise FloatingPointError(message)
        warn_user(message)

    def _divergence(self) -> str:
        """Describe how far weights and loss have grown since the start, if either has a hundredfold; '' otherwise.

        A loss that grew without the weights was small by chance. This waits for the device.
        """
        if self.weights is None or self.first_loss is None: return ''
        first, weights = float(self.first_loss), float(_norm(self.cb.learn.model) / self.weights)
        far = 0 < _FAR * abs(first) < self.last_loss and not weights < _MOVED
        if not (far or _FAR < weights < math.inf): return ''
        words = f'the weights are {weights:.3g} times as large as at the start of the fit'
        if not self.last_loss > 1.5 * abs(first): return words
        loss = f'the loss went from {first:.3g} to {self.last_loss:.3g}'
        return f'{words}, and {loss}' if 1.5 < weights < math.inf else loss


def _norm(model: nn.Module) -> torch.Tensor:
    """Return the norm of this process's trainable weights, on their device.

    Wrapper subclasses, such as quantized weights, are left out: they need not have an operator for it.
    """
    weights = [p.detach() for p in model.parameters() if p.requires_grad]
    weights = [w.to_local() if hasattr(w, 'to_local') else w for w in weights]
    weights = [w for w in weights if type(w).__torch_dispatch__ is torch.Tensor.__torch_dispatch__]
    norms = [torch.linalg.vector_norm((w.abs() if w.is_complex() else w).float()) for w in weights]
    return torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms])) if norms else torch.zeros(())
