"""`MixedPrecision`: the callback that enters what a precision names, in fastai's loop.

    (`run_outermost`)    opens a `Fit`, which enters what the precision names around a fit at the first batch
    before_train         marks the epoch in the history of steps
      before_batch       enters autocast in the batch's `Part`
      after_loss         closes that
      before_backward    scales the loss
      before_step        unscales the gradients, and cancels the step if one is not finite
      after_step         updates the scale
    after_fit            closes the `Fit`

After an exception the parts in `loop.py` close what is open.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fastai.callback import fp16
from fastai.callback.core import CancelStepException, _events, _inner_loop
from fastai.learner import Learner

from ..learners import loaded_states, model_device, newest_loss, training_device
from ..messages import check_argument, check_integer, warn_user
from ..precisions import AMPMode, Precision, find_precision
from ..tensors import half_to_float, is_half, map_tensors
from .fit import Fit
from .history import StepHistory
from .scaling import Scaling

_EVENTS = (*_events, 'after_open', 'before_close', 'after_failure')    # these are ours, for watchers
_NOT_FASTAIS = ("This batch runs in fp32: the learner's class replaces a method of fastai that enters autocast, "
                '`_with_events` or `one_batch`.\nCall `super()` in it.')
_ON_OVERFLOW = ('warn', 'fix', 'raise', 'ignore')


class Watcher:
    "An object whose events run after those of a precision callback."
    def __init__(self, cb: MixedPrecision): self.cb = cb

WATCHERS = list[type[Watcher]]()                                 # each precision callback has one of each class


class MixedPrecision(fp16.MixedPrecision):
    """Callback that trains in a precision, with autocast and loss scaling.

    autocast covers the forward pass and its loss, in training and validation; predictions, loss and metrics are fp32.
    In fp16 a `GradScaler` scales the loss, and gradients are unscaled before `before_step` of callbacks of a higher
    order. Steps with non-finite gradients are skipped by raising `CancelStepException`; torch's fused Adam, AdamW and
    SGD skip on the GPU instead, without synchronizing and without `after_cancel_step`. `skipped` covers both.

    `fixes` lists the changes that `on_overflow='fix'` has made; the `call` of each starts a training with it.

    Raises `TypeError` or `ValueError` at construction for an argument that cannot be used, and `ValueError` when `fit`
    starts if the device or the model does not support the precision.

    Source: https://docs.pytorch.org/docs/stable/amp.html.
    """
    order = 10  # after TrainEvalCallback (-10) moves the model; between GradientAccumulation (6) and GradientClip (11)
    name = 'mixed_precision'                                     # also of subclasses
    run: bool                                                    # fastai's: one may switch it off until a fit ends
    fit: Any = None                                              # the `Fit` that is open
    waiting: Callable[[], Any] | None = None                     # what to do when the batch has ended
    __signature__ = None                                         # fastai's `delegates` put its own on the base class

    def __init__(self,
        amp_mode: str | AMPMode | torch.dtype | Precision = AMPMode.FP16, # A precision, or its name
        *args: Any, # Its arguments, as in `to_fp16`
        on_overflow: str = 'warn', # At NaN or inf: 'warn', 'fix', 'raise' (`FloatingPointError`) or 'ignore'
        max_skips: int = 16, # Consecutive skipped steps after which training counts as failed
        **kwargs: Any # The same, by name
    ):
        if args and isinstance(amp_mode, Precision):
            raise TypeError(f'`{amp_mode!r}` is a precision already: change its arguments by name.')
        make = amp_mode.like if isinstance(amp_mode, Precision) else find_precision(amp_mode)
        self.precision = make(*args, **kwargs).like()            # its loss scale and lists are this callback's own
        check_integer(1, max_skips=max_skips)
        all_of_us = self, *(cls(self) for cls in WATCHERS)
        self.methods = dict[str, Any]()                          # of each event: lists, in which ours is the first
        for event in _EVENTS:
            self.methods[event] = [getattr(x, event) for x in all_of_us if hasattr(type(x), event)]
        self.max_skips, self.on_overflow = max_skips, on_overflow
        self.history = StepHistory()
        self.parts = list[Any]()                                 # the `Part`s of fastai's loop that are open
        self.fixes = list[Any]()                                 # of `on_overflow='fix'`, in all fits

    def __setattr__(self, name, value):
        if name == 'on_overflow': check_argument(name, value, _ON_OVERFLOW.__contains__, f'one of {_ON_OVERFLOW}')
        if name == 'learn' and value is not self.learn:          # added, removed or moved to another learner
            if self.learn is not None: self._leave()
            if value is not None: self._join(value)
        object.__setattr__(self, name, value)                    # fastai would look each name up on learner and model

    def _leave(self) -> None:
        "Close what is open on the learner that this callback leaves."
        if self.in_batch:
            raise RuntimeError('A precision callback cannot be removed in the middle of a batch. `learn.to_fp32()` '
                               'and the other methods take effect at its end.')
        self.close()
        self.parts = []                                          # another callback may go on with the old list

    def _join(self, learn: Learner) -> None:
        "Continue from the state that `learn.load` read before this callback was added, unless a scale was passed."
        state = loaded_states(learn).pop(self.precision.state_key, None)
        if state is None: return
        given = self.precision.changed.keys() & {'init_scale', 'scaler'}
        if not given: self.precision.load_state_dict(state)
        elif self.scale != (scale := state['scale']):
            warn_user(f"The loaded loss scale of {scale:,.9g} is not used because `{', '.join(given)}` was given.")

    def __getstate__(self) -> dict[str, Any]:                    # a copy is outside of a fit
        return {**vars(self), 'fit': None, 'parts': [], 'waiting': None}
    def __repr__(self) -> str: return f'{type(self).__name__}({self.precision.name!r})'

    # -- what users and files read

    @property
    def amp_mode(self) -> AMPMode | None:
        "The precision that the model computes in; None for fp32, and for one that is not in `AMPMode`."
        return AMPMode.__members__.get(self.precision.name.upper())
    @property
    def fp32_module_names(self) -> list[str]:
        "Names of the modules kept in fp32."
        return [*self.precision.kept_in_fp32(self.learn.model)]
    @property
    def scale(self) -> float | None:
        """The current loss scale; None without loss scaling. Reading it may synchronize.

        It is 1 if steps are only skipped, with `skip_nonfinite=True` for example.
        """
        return self.state_dict().get('scale', 1. if self.scales else None)
    @property
    def scales(self) -> list[float]:
        "The loss scale at each attempted step, except in `lr_find`."
        return [*self.history.read().scales]
    @property
    def skips(self) -> list[bool]:
        "For each of `scales`, True if the step was skipped."
        return [*self.history.read().skips]
    @property
    def skipped(self) -> bool:
        "True if the open fit's latest step was skipped; known from `before_step` (order > 10) on. May synchronize."
        return bool((scaling := self._scaling) and scaling.step.found_inf)

    def state_dict(self) -> dict[str, Any]: # In fp16 scale, its rules and its growth tracker
        "Return the precision's state as plain numbers; empty in bf16 and fp32."
        return self.precision.state_dict()

    def load_state_dict(self,
        state: dict[str, Any] | None, # What `state_dict` returned; None to start from the arguments again
    ) -> None:
        "Restore a `state_dict()`, outside of a batch. Ignored with a fixed loss scale."
        if self.in_batch: raise RuntimeError('The loss scale cannot be loaded in the middle of a batch.')
        self.close()                                             # a fit that goes on opens again
        self.precision.load_state_dict(state)

    def scale_loss(self,
        loss: torch.Tensor, # The loss of a backward pass of your own, fp32
    ) -> torch.Tensor: # To call `.backward()` on
        "Return `loss` times the loss scale, in a training batch with loss scaling; otherwise `loss` itself."
        scaling = self.in_batch and self.learn.training and self._scaling
        if scaling:
            scaling.early_changes = None                         # its backward pass adds to scaled ones
            loss = scaling.scale_loss(loss)
        return loss

    # -- a fit

    @property
    def autocast(self) -> Any:
        "A new `learn.amp_context()`, for callbacks; None outside of a fit."
        return self.fit and self.learn.amp_context()
    @property
    def _scaling(self) -> Scaling | None: return self.fit and self.fit.scaling
    @property
    def in_batch(self) -> bool:
        "True while a batch is open, in which a precision cannot be exchanged."
        return any(part.in_batch for part in self.parts)

    def at_batch_end(self, change: Callable[[], Any]) -> None:
        "Call `change` now, or when the open batch ends. It replaces an earlier change that waits."
        self.waiting = change
        self.do_waiting()

    def do_waiting(self) -> None:
        "Make the change that waits, if there is one and no batch is open."
        if self.in_batch: return
        change, self.waiting = self.waiting, None
        if change: change()

    def open_fit(self,
        device: torch.device, # Of the model
        trains: bool, # Whether there may be training batches
    ) -> Fit:
        "Check learner and device, and begin a fit."
        if len(self.learn._grab_cbs(fp16.MixedPrecision)) > 1:
            raise ValueError('The learner has several precision callbacks. Keep one: `learn.to_fp16()` or another '
                             'method replaces them all.')
        self.fit = Fit(self, device, trains)
        self('after_open')
        return self.fit

    def close(self, failed: bool = False) -> None:
        "End the fit that is open, if there is one."
        fit, self.fit = self.fit, None
        if fit: fit.end(failed)

    # -- the events of fastai's loop; those of a batch run only while a part and a fit are open

    def __call__(self, event_name: str) -> None:
        "Run an event here, then in the watchers."
        if self.learn is None: return                            # removed in this event
        if event_name in _inner_loop:
            if not self.parts:
                if event_name == 'before_batch': warn_user(_NOT_FASTAIS, self.learn)   # once
                return
            if not (self.run_train if self.learn.training else self.run_valid): return
            if not self.fit and event_name != 'before_batch': return      # added in this batch
        if self.run:
            for method in [*self.methods.get(event_name, ())]: method()   # a copy, as one may remove itself
        if event_name == 'after_fit': self.run = True            # as fastai does

    def before_fit(self):
        "Replace fastai's method: `run_outermost` has opened the fit, before any callback changed the learner."

    def before_train(self):
        "Remember where the epoch begins, for `SkippedStepsMetric`."
        self.history.epoch_start = len(self.history.read().scales)

    def ready_fit(self) -> Fit:
        "Return the fit, ready for the next batch: a new one if none is open, as in loops over `one_batch`."
        fit, learn = self.fit, self.learn
        trains = learn.training and learn.opt is not None
        if fit is None or (trains and not fit.trains):
            self.close()
            fit = self.open_fit(model_device(learn.model, training_device(learn)), trains)
        fit.use_model()
        return fit

    def before_batch(self):
        "Enter autocast."
        fit = self.ready_fit()
        if fit.scaling and fit.trains and self.learn.training: fit.scaling.start()
        torch.clear_autocast_cache()                             # the weights may have changed inside a user's autocast
        for context in fit.precision.around_batch(fit.device): self.parts[-1].enter(context)

    def after_pred(self):
        "Convert predictions to fp32, for loss and metrics."
        if self.fit.precision.dtype: self.learn.pred = map_tensors(half_to_float, self.learn.pred)

    def after_loss(self):
        "Exit autocast, and convert the loss to fp32."
        self.parts[-1].close()
        loss, learn = newest_loss(self.learn), self.learn
        if loss is not None and is_half(loss):
            learn.loss, learn.loss_grad = learn.loss.float(), loss.float()

    def before_backward(self):
        "Scale the loss."
        if scaling := self.fit.scaling: self.learn.loss_grad = scaling.scale_loss(self.learn.loss_grad)

    def before_step(self):
        "Unscale the gradients; cancel the step if one is not finite, unless the optimizer skips it on the device."
        if not (scaling := self.fit.scaling): return
        scaling.unscale()
        if scaling.step.host_skips: raise CancelStepException

    def after_cancel_step(self):
        "Keep the scale if another callback cancelled a step whose gradients are finite."
        if (scaling := self._scaling) and not scaling.step.found_inf: scaling.cancel()

    def after_step(self):
        "Record the step, and update the scale."
        if scaling := self.fit.scaling: scaling.update()

    def after_batch(self):
        "Exit autocast if `after_loss` did not run. Callbacks of a higher order may now exchange the precision."
        self.parts[-1].close()
        self.parts[-1].in_batch = False
    after_cancel_batch = after_batch                             # before callbacks of a higher order run

    def after_fit(self):
        "End the fit. Callbacks of a higher order may now load weights. A validation inside the fit ends nothing."
        if self.fit is None or len(self.parts) > 1 or self.in_batch: return
        self('before_close')
        self.close()
