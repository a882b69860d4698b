"What a precision callback opens and closes: a fit, a batch in it, and its place on a learner."
from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
from fastai.callback import fp16
from fastai.callback.core import (CancelBackwardException, CancelBatchException, CancelEpochException,
                                  CancelFitException, CancelStepException, CancelTrainException, CancelValidException)
from torch import nn

from .checks import check_float64, check_fp16_training, half_parameters_of, strays_of
from .common import warn_user
from .compat import AutocastState, exit_autocast
from .convert import release_graphs
from .fp32_modules import Fp32Modules, unwrapped
from .guard import Batch, LaterForwards, LoopGuard, cache_loses_gradients
from .mode import (AMPMode, autocast_available, check_layers, check_supported, emulation_warning, fastest_native,
                   model_device, training_device)
from .observer import ON_ATTACH, PrecisionObserver
from .scaling import GradStage, LossScaling, StaticGradScaler

__all__ = ['CANCEL_EXCEPTIONS', 'PRECISION_CALLBACKS', 'Fit', 'Lifecycle', 'precision_callback_of']

PRECISION_CALLBACKS = (fp16.MixedPrecision, fp16.ModelToHalf, fp16.NonNativeMixedPrecision)
CANCEL_EXCEPTIONS = (CancelBackwardException, CancelBatchException, CancelEpochException, CancelFitException,
                     CancelStepException, CancelTrainException, CancelValidException)
_attached: WeakSet = WeakSet()                                   # callbacks that are on a learner
_attaching = threading.Lock()
_warned_of_emulation: WeakKeyDictionary = WeakKeyDictionary()    # the modes, by learner


@dataclass
class Fit:
    "What lasts from `before_fit` to `after_fit`."
    device: torch.device
    mode: AMPMode | None
    checked: bool = False         # were the checks made that only training needs?
    tried: bool = False           # has a training batch been through?
    before_lr_find: Any = None    # what to restore, because the fit is lr_find's
    later: LaterForwards | None = None


class Lifecycle:
    """The part of `MixedPrecision` that opens and closes: its place on a learner, a fit, and each batch.

    What is opened is closed whatever ends it: `guard.py` calls `_leave_batch` after every batch and `_close` when an
    exception ends a fit. Both can be interrupted and called again.
    """
    amp_mode: str | AMPMode
    observers: list[PrecisionObserver]
    _mode: AMPMode | None
    _scaling: LossScaling
    _fp32_modules: Fp32Modules
    _guard: LoopGuard
    _learn: Any = None                                           # the learner that this callback is on
    _fit: Fit | None = None                                      # under way
    _batch: Batch | None = None                                  # under way
    _replacement: list | None = None                             # what takes this callback's place after the batch

    takes_init_scale = True                                      # is the scale to start from an argument?

    @property
    def _lower_argument(self) -> str:
        "The argument that lowers the loss scale; '' if there is none."
        if isinstance(self._scaling.scaler, StaticGradScaler): return 'loss_scale'
        return 'init_scale' if self.takes_init_scale else ''

    # -- on a learner

    @property
    def learn(self): return self._learn
    @learn.setter
    def learn(self, learn):                                      # set by `add_cb`, and to None by `remove_cb`
        if learn is None:
            if self._learn is not None: self._detach()
            return
        if learn is self._learn and any(cb is self for cb in learn.cbs):
            raise ValueError(f'{self!r} is on this learner already, and would run twice in each batch.\n'
                             'Leave it out of `cbs`.')
        if self._learn is not None and learn is not self._learn:
            self._learn.cbs = self._learn.cbs.copy()             # `Learner(cbs=learn.cbs)` goes through the old list
            self._learn.remove_cb(self)
            warn_user("A precision callback moved from one learner to another: the first trains in fp32 from now on.\n"
                      "Give each learner one of its own: `learn.to_fp16()` or `learn.to_bf16()`.")
        self._fp32_modules.apply(learn.model)                    # first: it may raise
        self._learn = learn
        self._guard.install(learn)
        self._attach()
        for attached in ON_ATTACH: attached(learn)

    def _attach(self) -> None:
        with _attaching: _attached.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:       # a copied or unpickled callback is on its learner, too
        self.__dict__.update(state)
        if self._learn is not None: self._attach()

    def _detach(self) -> None:
        if self.in_batch:
            raise RuntimeError("A precision callback cannot be removed in the middle of a batch.\n"
                               "Call `learn.to_fp32()`, `to_fp16()` or `to_bf16()`, which take effect at its end, or "
                               "remove it at `after_batch`, `before_epoch`, `before_train`, `after_train` or "
                               "`after_epoch`.")
        self._exit_autocast()                                    # a batch that was cancelled may be on it still
        self._close(finished=True)
        self._fp32_modules.remove()
        self._guard.remove()
        self._learn.__dict__.pop('scaler', None)
        self._learn = None
        with _attaching: _attached.discard(self)

    def replace_after_batch(self,
        cb: Any, # The precision callback to add; None for fp32
    ) -> None:
        "Have `cb` take this callback's place when the batch under way has ended."
        self._replacement = [] if cb is None else [cb]

    def _replace(self, callbacks: list) -> None:
        self._replacement, learn = None, self._learn
        learn.remove_cb(self)
        learn.add_cbs(callbacks)

    # -- what an observer reads

    @property
    def fit_mode(self) -> AMPMode | None:
        "The precision of the fit under way; None in fp32 and outside a fit."
        return None if self._fit is None else self._fit.mode
    @property
    def fit_device(self) -> torch.device | None:
        "The device of the fit under way; None outside a fit."
        return None if self._fit is None else self._fit.device
    @property
    def finds_lr(self) -> bool:
        "Is the fit under way `lr_find`'s, which goes wrong on purpose?"
        return self._fit is not None and self._fit.before_lr_find is not None
    @property
    def in_batch(self) -> bool:
        "Is a batch under way, from before its `before_batch` to its `after_batch`?"
        return self._batch is not None and not self._batch.done
    @property
    def _active(self): return self.fit_mode is not None and self._batch is not None and self._batch.began

    def _tell(self, event: str) -> None:
        "Call this method of each observer."
        for observer in self.observers: getattr(observer, event)()

    # -- a fit

    def _decide(self, device: torch.device) -> AMPMode | None:
        "The mode on `device`; None for fp32. Raises a `ValueError` if it does not run there."
        if self.amp_mode == 'auto': return fastest_native(device) if autocast_available(device.type) else None
        mode = AMPMode(self.amp_mode)
        if not autocast_available(device.type):
            raise ValueError(f"amp_mode='{mode.value}' cannot be used on device '{device}': PyTorch has no autocast "
                             f"for {device.type} devices.\n"
                             "What works there: `to_fp32()`.")
        check_supported(mode, device)
        return mode

    def _open(self) -> None:
        "Begin a fit: decide the precision and get the scaler ready."
        learn = self._learn
        others = [cb for cb in learn.cbs if isinstance(cb, PRECISION_CALLBACKS) and cb is not self]
        if others:
            raise ValueError(f"The learner has several precision callbacks: {[self, *others]}.\n"
                             "Keep one: `learn.to_fp32()` removes them all, and `learn.to_fp16()` or "
                             "`learn.to_bf16()` replaces them.")
        device = model_device(learn.model, training_device(learn))
        self._mode = mode = self._decide(device)
        self._fp32_modules.apply(learn.model)                    # it may be another model by now
        if mode is not None: check_layers(mode, device, unwrapped(learn.model), self._fp32_modules.covers)
        scaled = mode is not None and mode.needs_loss_scaling
        if scaled and self._scaling.has_scale: check_float64(device)
        self._fit = Fit(device, mode)
        scaler = self._scaling.start(device.type, scaled)
        if 'lr_finder' in learn.__dict__: self._fit.before_lr_find = self._scaling.snapshot()
        cache_loses_gradients()                                  # asked here, so that no batch is interrupted in it
        self._tell('fit_started')
        learn.scaler = scaler

    def _check_training(self) -> None:
        "Check and say what only training needs."
        fit = cast(Fit, self._fit)
        fit.checked = True
        if fit.mode is not None: self._warn_of_emulation(fit.mode, fit.device)
        else: warn_user(f"amp_mode='auto': device '{fit.device}' does neither bf16 nor fp16 natively, so training "
                        "runs in fp32.\n"
                        "`precision_support()` says why; `learn.to_fp32()` is silent.")
        scaled = self._scaling.scaler.is_enabled()
        if scaled: check_fp16_training(self._learn.model, self._learn.opt)
        if half := half_parameters_of(self._learn.model):
            warn_user(f"{len(half)} parameters to be trained are in half precision themselves, such as '{half[0]}': "
                      "small updates to them are rounded away.\n"
                      "Call `learn.model.float()` first: autocast itself casts what can run in half precision.")
        if not scaled: return
        if strays := strays_of(self._learn.model, self._learn.opt):
            warn_user(f"{len(strays)} parameters to be trained are not in `learn.opt`, such as '{strays[0]}': in fp16 "
                      "their gradients stay multiplied by the loss scale.\nAn optimizer of your own for them would "
                      "step far too far. Put them into the learner's, or use `learn.to_bf16()`.")

    def _warn_of_emulation(self, mode: AMPMode, device: torch.device) -> None:
        "Once for a learner and mode."
        message, told = emulation_warning(mode, device), _warned_of_emulation.setdefault(self._learn, set())
        if message is None or mode in told: return
        told.add(mode)
        warn_user(message)

    def _left_loop(self, event_type: str, error: BaseException) -> None:
        "Called by the guard when `error` leaves the loop: end the fit here if fastai will not call `after_fit`."
        if not isinstance(error, CancelFitException if event_type == 'epoch' else CANCEL_EXCEPTIONS): self._close()

    def _close(self, finished: bool = False) -> None:
        "End the fit: undo what `_open` did; scaled gradients are dropped unless it is `finished`. May be repeated."
        learn, fit, warning = self._learn, self._fit, None
        if learn is None: return
        if not self._guard.running: self._batch = None
        if fit is not None: self._tell('fit_ended')
        if finished: warning = self._scaling.finish(learn.opt, learn.model, self._lower_argument)
        self._scaling.drop(learn.opt, learn.model)
        self._scaling.read()
        if fit is not None and fit.before_lr_find is not None:
            self._scaling.restore(fit.before_lr_find)
            warning = None
        if not self._guard.running: release_graphs(learn)
        if 'scaler' in learn.__dict__: learn.scaler = None
        self._fit = None
        if warning: warn_user(warning)

    # -- a batch

    def _autocast(self, device: torch.device, mode: AMPMode) -> Any:
        return torch.autocast(device.type, dtype=mode.dtype, cache_enabled=not cache_loses_gradients())

    def _exit_autocast(self) -> None:
        batch = self._batch
        if batch is None or batch.autocast is None: return
        context, batch.autocast = batch.autocast, None
        exit_autocast(context, self._keeps_casts())

    def _keeps_casts(self) -> bool:
        "Are autocast's casts of weights to serve the next batch, too?"
        return False

    def _guard_later_forwards(self) -> None:
        batch, model, fit = cast(Batch, self._batch), self._learn.model, cast(Fit, self._fit)
        if batch.later is not None or not isinstance(model, nn.Module) or fit.mode is None: return
        outer = batch.later_standing
        if outer is not None and outer.module is model: return   # of the batch around; twice, it would call itself
        if fit.later is None or fit.later.module is not model:   # one for a fit, so that nothing is compiled again
            fit.later = LaterForwards(model, fit.device.type, fit.mode.dtype, not cache_loses_gradients())
        batch.later = fit.later
        batch.later.install(batch.autocast_state.nesting)

    def _enter_batch(self, loose: bool = False) -> Batch | None:
        "Before a batch, called by the guard: what `_leave_batch` needs, None if there is no autocast to guard."
        device_type = self._fit.device.type if self._fit else training_device(self._learn).type
        if not autocast_available(device_type): return None
        self._batch = Batch(AutocastState(device_type), self._learn.training, self._batch, loose=loose)
        return self._batch

    def _batch_is_done(self) -> None:
        "Called by the guard: all of a batch but its last events is over."
        if self._batch is not None: self._batch.done = True

    def _leave_batch(self, batch: Batch, error: BaseException | None) -> None:
        "Called by the guard when a batch ended, by `error` or None; may be called twice."
        batch.done = True
        if batch.later is not None: batch.later.remove()
        batch.autocast_state.restore(keep_casts=error is None and self._keeps_casts())
        self._batch = batch.outer
        if self._learn is None: return
        if error is None and batch.training and self._fit is not None:
            if not self._fit.tried: self._check_fp32_modules(self._fit)
            self._tell('batch_ended')
        if self._fit is not None: self._settle_gradients(batch, error)
        broken = error is not None and not isinstance(error, CANCEL_EXCEPTIONS)
        if broken and self._batch is None: release_graphs(self._learn)
        if self._batch is None and self._replacement is not None: self._replace(self._replacement)

    def _settle_gradients(self, batch: Batch, error: BaseException | None) -> None:
        scaling, opt = self._scaling, self._learn.opt
        if scaling.stage is GradStage.TRUE or not batch.training: return
        if scaling.stage is GradStage.UNSCALED and (scaling.stepped or scaling.held_back): scaling.update()
        if error is not None and not isinstance(error, CANCEL_EXCEPTIONS): scaling.drop(opt, self._learn.model)
        elif scaling.stage is GradStage.SCALED: pass             # accumulating
        elif batch.cancelled or error is not None: scaling.rescale(opt)  # later batches add to them
        else: scaling.stage = GradStage.TRUE                     # the loop has zeroed them

    def _check_fp32_modules(self, fit: Fit) -> None:
        fit.tried = True
        for name, parent in self._fp32_modules.never_called().items():
            warn_user(f"fp32_modules: '{name}' was not called in the first batch, so keeping it in fp32 does nothing: "
                      "the module around it may use its weights directly, as MultiheadAttention does with out_proj.\n"
                      f"Keep '{parent}' instead.")

    def _step(self, step: Any) -> None:
        "Called by the guard in place of the learner's `_step`."
        step()


def precision_callback_of(model: Any, opt: Any) -> Any: # A `MixedPrecision`, or None
    "The precision callback of the learner that trains `model` with `opt`, which `Learner.save` and `load` hand on."
    def trains(learn): # which may be half built, as a copy is that failed
        return learn is not None and getattr(learn, 'model', None) is model and getattr(learn, 'opt', None) is opt
    with _attaching: callbacks = list(_attached)
    return next((cb for cb in callbacks if trains(cb.learn)), None)
