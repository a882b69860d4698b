"`MixedPrecision`: the callback that runs fastai's training loop under autocast and scales the loss in fp16."
import inspect
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from fastai.callback import fp16
from fastai.callback.core import (CancelBackwardException, CancelBatchException, CancelEpochException,
                                  CancelFitException, CancelStepException, CancelTrainException, CancelValidException)
from fastcore.xtras import modify_exception
from torch import nn
from torch.amp import GradScaler

from .checks import check_fp16_training, check_overflow_args
from .common import warn_user
from .compat import AutocastState
from .convert import detached, is_half, to_fp32
from .fp32_modules import Fp32Modules, unwrapped
from .guard import Batch, LaterForwards, LoopGuard, cache_loses_gradients
from .mode import (AMPMode, autocast_available, check_layers, check_supported, emulation_warning, fastest_native,
                   model_device, training_device)
from .observer import OBSERVERS, ON_ATTACH
from .scale_history import plot_scales
from .scaling import GradStage, LossScaling

__all__ = ['PRECISION_CALLBACKS', 'MixedPrecision', 'precision_callback_of']

PRECISION_CALLBACKS = (fp16.MixedPrecision, fp16.ModelToHalf, fp16.NonNativeMixedPrecision)
_CANCEL = (CancelBackwardException, CancelBatchException, CancelEpochException, CancelFitException, CancelStepException,
           CancelTrainException, CancelValidException)
_EVERY_BATCH = frozenset(('before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward', 'before_step',
                          'after_step', 'after_batch'))
_RESULTS = ('xb', 'yb', 'pred', 'loss', 'loss_grad')             # what fastai leaves on the learner, some of it on a graph
_attached: WeakSet = WeakSet()                                   # callbacks that are on a learner
_warned_of_emulation: WeakKeyDictionary = WeakKeyDictionary()    # the modes, by learner


@dataclass
class _Fit:
    "What lasts from `before_fit` to `after_fit`."
    device: torch.device
    mode: AMPMode | None
    checked: bool = False         # were the checks made that only training needs?
    tried: bool = False           # has a training batch been through?
    before_lr_find: Any = None    # what to restore, because the fit is lr_find's


class MixedPrecision(fp16.MixedPrecision):
    """Mixed precision training with PyTorch's automatic mixed precision, on the device the model is on.

    autocast covers the forward pass and the loss, in training and validation. Predictions reach the loss, the metrics
    and `get_preds` in fp32, and the loss is fp32. In fp16 a `GradScaler` scales the loss; gradients are unscaled before
    any `before_step` callback of a higher order runs, and a step with non-finite gradients is skipped whole: by a
    `CancelStepException`, or, without waiting for the device, by torch's fused Adam, AdamW and SGD in an `OptimWrapper`.
    In that case `after_cancel_step` does not fire; `skipped` tells in both.

    Raises `ValueError` at construction for an unknown mode or an unusable scaling argument, and when `fit` starts if
    the device cannot run the mode, if parameters to be trained are fp16 already, or if the optimizer needs a closure.

    Source: https://docs.pytorch.org/docs/stable/amp.html; loss scaling: Micikevicius et al., Mixed Precision Training,
    https://arxiv.org/abs/1710.03740.
    """
    name = 'mixed_precision'  # also of subclasses: by this name fastai's `load_learner` finds what to take off
    order = 10  # after TrainEvalCallback (-10) has moved the model; between GradientAccumulation (6) and GradientClip (11)

    def __init__(self,
        amp_mode: str | AMPMode | torch.dtype = AMPMode.FP16, # 'fp16', 'bf16', or 'auto': the fastest that the device does natively
        init_scale: float = 65536.0, # Loss scale to start from (fp16)
        growth_factor: float = 2.0, # The scale is multiplied by this after `growth_interval` steps without a skip (fp16)
        backoff_factor: float = 0.5, # The scale is multiplied by this after a skipped step (fp16)
        growth_interval: int = 2000, # Steps without a skip after which the scale grows (fp16)
        enabled: bool = True, # Whether to scale the loss at all (fp16)
        *,
        loss_scale: float | None = None, # A static loss scale instead, which never grows or shrinks; fastai v1 used 512 (fp16)
        scaler: GradScaler | None = None, # A ready `torch.amp.GradScaler`, or an instance of a subclass, to use instead (fp16)
        fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules, predicates, or a list
        on_overflow: str = 'warn', # When training goes wrong: 'warn', 'raise' (`FloatingPointError`) or 'ignore'
        max_skips: int = 16, # Skipped steps in a row after which training counts as going wrong (fp16)
    ):
        self._arguments = {k: v for k, v in locals().items() if k not in ('self', '__class__')}
        auto = isinstance(amp_mode, str) and amp_mode.lower() == 'auto'
        self._mode: AMPMode | None = None if auto else AMPMode(amp_mode)
        self.amp_mode = 'auto' if auto else self._mode
        self._scaling = LossScaling(init_scale, growth_factor, backoff_factor, growth_interval, enabled, loss_scale, scaler)
        if scaler is not None and self.amp_mode is AMPMode.BF16:
            raise ValueError(f"scaler={scaler!r} cannot be used with amp_mode='bf16', which needs no loss scaling.\n"
                             "Leave it out, or take 'fp16' or 'auto'.")
        check_overflow_args(on_overflow, max_skips)
        self.on_overflow, self.max_skips = on_overflow, int(max_skips)
        self._fp32_modules, self._guard = Fp32Modules(fp32_modules), LoopGuard(self)
        self._learn, self._fit, self._batch = None, None, None   # learner, fit and batch under way
        self._replacement: tuple | None = None                   # the callback to replace this one after the batch, or None
        self.observers = [observer(self) for observer in OBSERVERS]

    # fastai would look up each name on the learner and its model, and warn if it is there; these names are our own.
    def __setattr__(self, name, value): object.__setattr__(self, name, value)
    def __dir__(self): return object.__dir__(self)
    def __getstate__(self): return {**self.__dict__, '_batch': None}   # a copy made inside a batch is not inside one

    def __repr__(self):
        scale = '' if self.scale is None else f', scale={self.scale:g}'
        return f"{type(self).__name__}('{getattr(self.amp_mode, 'value', self.amp_mode)}'{scale})"

    @property
    def learn(self): return self.__dict__.get('_learn')
    @learn.setter
    def learn(self, learn):                                      # set by `add_cb`, and to None by `remove_cb`
        if self.learn is not None and learn is not self.learn: self._detach()
        if learn is None: return
        self._fp32_modules.apply(learn.model)                    # first: it may raise
        self._learn = learn
        self._guard.install(learn)
        _attached.add(self)
        for attached in ON_ATTACH: attached(learn)

    # `Callback` asks at every event, and would find it by way of `__getattr__`, which takes longer than most events do.
    @property
    def training(self): return self.learn.training

    # -- what a user reads

    @property
    def scaling(self) -> LossScaling:
        "The loss scaling behind this callback."
        return self._scaling
    @property
    def mode(self) -> AMPMode | None:
        "What `amp_mode` came to; None for fp32, and for 'auto' before the first fit."
        return self._mode
    @property
    def scale(self) -> float | None:
        "The loss scale now; None without loss scaling. Waits for the device that the scale is on."
        state = self.__dict__.get('_scaling') and self.state_dict()
        return float(state['scale']) if state and 'scale' in state else None
    @property
    def scales(self) -> list[float]:
        "The loss scale used at each attempted optimizer step since the callback was added, `lr_find`'s steps left out."
        return self._scaling.history.scales
    @property
    def n_skipped(self) -> int:
        "How many of these steps were skipped because a gradient was not finite."
        return int(self._scaling.history.skips.sum())
    @property
    def skipped(self) -> bool:
        "Was the last step skipped? Right from `before_step` of a higher order on, in `after_step` and in `after_batch`."
        return self._scaling.skipped
    @property
    def fp32_module_names(self) -> list[str]:
        "Names of the modules that are kept in fp32, as `fp32_modules` matched them."
        return list(self._fp32_modules.forwards)

    def plot_scales(self,
        ax = None, # The matplotlib axes to draw on; new ones if None
    ): # The matplotlib axes
        "Plot the loss scale over the optimizer steps, skipped steps marked."
        return plot_scales(self._scaling.history, ax)

    def context(self) -> AbstractContextManager:
        "A new autocast context in this callback's precision, for the device that training uses; it does nothing in fp32."
        if self._fit: device, mode = self._fit.device, self._fit.mode
        else:
            device = training_device(self.learn)
            mode = self._decide(device)
        return nullcontext() if mode is None else self._autocast(device, mode)

    def check_modules(self,
        model: nn.Module, # The model that this callback is to train
    ) -> None:
        "Raise what adding this callback to a learner of `model` would raise on account of `fp32_modules`."
        self._fp32_modules.check(model)

    def as_call(self,
        **changes # Arguments to change; `amp_mode` too
    ) -> str:
        "The call on the learner that sets this precision, for advice: arguments that are not the defaults, and `changes`."
        name, arguments, defaults = self._call()
        arguments = {**arguments, **changes}
        mode = arguments.pop('amp_mode', None)
        if mode is not None: name = 'to_amp' if mode == 'auto' else f'to_{AMPMode(mode).value}'
        if name == 'to_bf16': arguments = {k: v for k, v in arguments.items() if k in _BF16_ARGUMENTS}
        given = [f'{k}={_argument(v)}' for k, v in arguments.items() if k not in defaults or v is not defaults[k] and v != defaults[k]]
        return f"learn.{name}({', '.join(given)})"

    def _call(self) -> tuple[str, dict[str, Any], dict[str, Any]]:
        "For `as_call`: the method of the learner, its arguments with their values, and their defaults."
        defaults = {n: p.default for n, p in inspect.signature(MixedPrecision).parameters.items()}
        return 'to_fp16', {**self._arguments, 'amp_mode': self.amp_mode, **self._kept_names()}, defaults

    def _kept_names(self): return {'fp32_modules': self.fp32_module_names} if self.fp32_module_names else {}

    # -- what a checkpoint holds

    @property
    def scales_loss(self) -> bool:
        "Does training scale the loss: is the mode, decided now if need be, fp16?"
        mode = self._mode
        if mode is None and self.amp_mode == 'auto' and self.learn is not None:
            mode = self._decide(training_device(self.learn))
        return mode is not None and mode.needs_loss_scaling

    def state_dict(self) -> dict[str, Any]: # Plain numbers: scale, growth_factor, backoff_factor, growth_interval, _growth_tracker
        "The state of the loss scaling, as `GradScaler.state_dict`, before, during or after a fit; empty in bf16 and fp32."
        return self._scaling.state_dict() if self.scales_loss else {}

    def load_state_dict(self,
        state: dict[str, Any], # What `state_dict` gave
    ) -> None:
        """Go on from `state`, before, during or after a fit. A static scale and `enabled=False` stay as they were asked for.

        Raises `ValueError` for a state that no `GradScaler` could have given, and changes nothing then.
        """
        if state and self.scales_loss: self._scaling.load_state_dict(state, self.learn.opt if self.learn is not None else None)

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

    keep_call = "learn.to_{mode}(fp32_modules=['{name}'])"       # the call that keeps a module in fp32, for advice

    def diagnosing(self) -> AbstractContextManager:
        "What a diagnosis runs in: the model as it is outside a batch."
        return nullcontext()

    # -- the events of fastai's loop

    def __call__(self, event_name: str) -> Any:
        "As `Callback`'s, without its look-ups where they cannot matter: these events come with every batch."
        if self.learn is None: return None                       # taken off by a callback before this one, in the same event
        if event_name not in _EVERY_BATCH or not (self.run and self.run_train and self.run_valid): return super().__call__(event_name)
        try: return getattr(self, event_name)()
        except _CANCEL: raise
        except Exception as e:
            told = f'Exception occured in `{type(self).__name__}` when calling event `{event_name}`:\n\t{e.args[0] if e.args else ""}'
            raise modify_exception(e, told, replace=True)        # noqa: B904  the same exception, with fastai's words

    def before_fit(self):
        "Decide the precision and get the scaler ready; raise before a batch is drawn if that cannot be done."
        if self._guard.running: return                           # validate() or get_preds() called from inside a fit
        self._close()                                            # what a custom loop left open
        self._open()

    def before_train(self):
        "Check what only training needs."
        if self._fit is None: self._open()                       # an `after_fit` of a validation inside `before_fit`
        if not self._fit.checked: self._check_training()

    def before_batch(self):
        "Enter autocast."
        if self._fit is None: self._open()                       # added in the middle of a fit, or no fit at all
        if self._batch is not None and self._batch.loose: self._leave_batch(self._batch, None)   # an exception ended it
        if self._batch is None or self._batch.began: self._enter_loose_batch()
        fit, batch = self._fit, self._batch
        if batch is None: return
        batch.began = True
        if fit.mode is None: return
        self._tell('batch_started')
        batch.autocast = self._autocast(fit.device, fit.mode)
        batch.autocast.__enter__()

    def after_pred(self):
        "Give the loss and the metrics fp32."
        if self._active: self.learn.pred = to_fp32(self.learn.pred)

    def after_loss(self):
        "Exit autocast; record and back-propagate the loss in fp32."
        if not self._active: return
        self._exit_autocast()
        self._guard_later_forwards()
        if len(self.learn.yb) and is_half(self.learn.loss_grad):
            self.learn.loss_grad, self.learn.loss = self.learn.loss_grad.float(), self.learn.loss.float()
        self._tell('loss_computed')

    def before_backward(self):
        "Scale the loss."
        if self._active: self.learn.loss_grad = self._scaling.scale(self.learn.loss_grad, self.learn.opt)

    def after_backward(self): pass                               # looked for at each step, it is found sooner if it is here

    def before_step(self):
        "Unscale the gradients; hold the step back if one of them is not finite, unless the optimizer does so on the device."
        held_back = self._scaling.unscale(self.learn.opt)
        self._tell('step_decided')
        if held_back: raise CancelStepException()

    def after_cancel_step(self):
        "Another callback called the step off: leave the scale alone."
        if not self._scaling.held_back: self._scaling.cancel()

    def after_step(self):
        "Let the scale grow or back off."
        self._scaling.update()

    def after_train(self):
        "Read what the device decided in this epoch: fastai's Recorder waits for it here anyway."
        self._scaling.read()
        self._tell('epoch_ended')

    def after_cancel_batch(self):
        "Exit autocast before callbacks of a higher order run."
        if self._batch is None: return
        self._batch.cancelled = True
        self._exit_autocast()

    def after_batch(self):
        "Exit autocast if an event was left out."
        batch = self._batch
        if batch is None: return
        self._exit_autocast()
        batch.done = True
        if batch.loose: self._leave_batch(batch, None)

    def after_fit(self):
        "Leave nothing behind but the scale, its history, and unscaled gradients of an unfinished accumulation."
        if not self._guard.running: self._close(finished=True)

    # -- a fit

    @property
    def _active(self): return self._fit is not None and self._fit.mode is not None and self._batch is not None and self._batch.began

    def _tell(self, event: str) -> None:
        "Call this method of each observer."
        for observer in self.observers: getattr(observer, event)()

    def _decide(self, device):
        if not autocast_available(device.type):
            if self.amp_mode == 'auto': return None
            raise ValueError(f"amp_mode='{self.amp_mode.value}' cannot be used on device '{device}': PyTorch has no autocast "
                             f"for {device.type} devices. What works there: `to_fp32()`.")
        if self.amp_mode == 'auto': return fastest_native(device)
        check_supported(self.amp_mode, device)
        return self.amp_mode

    def _open(self):
        others = [cb for cb in self.learn.cbs if isinstance(cb, PRECISION_CALLBACKS) and cb is not self]
        if others:
            raise ValueError(f"The learner has several precision callbacks: {[self, *others]}.\nKeep one: `learn.to_fp32()` "
                             "removes them all, and `learn.to_fp16()` or `learn.to_bf16()` replaces them.")
        device = model_device(self.learn.model, training_device(self.learn))
        self._mode = mode = self._decide(device)
        self._fp32_modules.apply(self.learn.model)               # it may be another model by now
        if mode is not None: self._check_layers(mode, device)
        self._fit = _Fit(device, mode)
        scaler = self._scaling.start(device.type, scaled=mode is not None and mode.needs_loss_scaling)
        if 'lr_finder' in self.learn.__dict__: self._fit.before_lr_find = self._scaling.snapshot()
        cache_loses_gradients()                                  # asked here, so that no batch is interrupted in it
        self._tell('fit_started')
        self.learn.scaler = scaler

    def _check_layers(self, mode, device):
        check_layers(mode, device, unwrapped(self.learn.model), self._fp32_modules.covers)

    def _check_training(self):
        fit, self._fit.checked = self._fit, True
        if fit.mode is None:
            warn_user(f"amp_mode='auto': device '{fit.device}' does neither bf16 nor fp16 natively, so training runs in "
                      "fp32.\n`precision_support()` says why; `learn.to_fp32()` is silent.")
        else: self._warn_of_emulation(fit)
        if self._scaling.scaler.is_enabled(): check_fp16_training(self.learn.model, self.learn.opt)

    def _warn_of_emulation(self, fit):
        "Once for a learner and mode."
        message, told = self._emulation_warning(fit.mode, fit.device), _warned_of_emulation.setdefault(self.learn, set())
        if message is None or fit.mode in told: return
        told.add(fit.mode)
        warn_user(message)

    def _emulation_warning(self, mode, device): return emulation_warning(mode, device)

    def _check_fp32_modules(self):
        self._fit.tried = True
        for name, parent in self._fp32_modules.never_called().items():
            warn_user(f"fp32_modules: '{name}' was not called in the first batch, so keeping it in fp32 does nothing: the "
                      "module around it may use its weights directly, as MultiheadAttention does with out_proj.\n"
                      f"Keep '{parent}' instead.")

    def _left_loop(self, event_type: str, error: BaseException) -> None:
        "Called by the guard when `error` leaves the outermost part of the loop that it sees: will `after_fit` follow?"
        if not isinstance(error, CancelFitException if event_type == 'epoch' else _CANCEL): self._close()

    def _close(self, finished: bool = False) -> None:
        "End the fit: undo what `_open` did; with `finished` False drop scaled gradients, too. May be called at any time."
        learn, fit, warning = self.learn, self._fit, None
        if learn is None: return
        if not self._guard.running: self._batch = None
        if fit is not None: self._tell('fit_ended')
        if finished: warning = self._scaling.finish(learn.opt, learn.model)
        self._scaling.drop(learn.opt, learn.model)
        self._scaling.read()
        if self.finds_lr:
            self._scaling.restore(fit.before_lr_find)
            warning = None
        if not self._guard.running: self._let_go_of_graphs()
        if 'scaler' in learn.__dict__: learn.scaler = None
        self._fit = None
        if warning: warn_user(warning)

    def _let_go_of_graphs(self):
        "Take what fastai leaves on the learner off its graph: nothing could deep-copy it."
        own = self.learn.__dict__
        for name in _RESULTS:
            if name in own: own[name] = detached(own[name])

    def _detach(self):
        if self.in_batch:
            raise RuntimeError("A precision callback cannot be removed in the middle of a batch.\nCall `learn.to_fp32()`, "
                               "`to_fp16()` or `to_bf16()`, which take effect at its end, or remove it at `after_batch`, "
                               "`before_epoch`, `before_train`, `after_train` or `after_epoch`.")
        self._close()
        self._fp32_modules.remove()
        self._guard.remove()
        self.learn.__dict__.pop('scaler', None)
        self._learn, self._batch = None, None
        _attached.discard(self)

    # -- a batch

    def _autocast(self, device, mode):
        return torch.autocast(device.type, dtype=mode.dtype, cache_enabled=not cache_loses_gradients())

    def _exit_autocast(self):
        batch = self._batch
        if batch is None or batch.autocast is None: return
        context, batch.autocast = batch.autocast, None
        context.__exit__(None, None, None)

    def _guard_later_forwards(self):
        batch, model = self._batch, self.learn.model
        if batch.later is not None or not isinstance(model, nn.Module): return
        batch.later = LaterForwards(model, self._fit.device.type, self.context)
        batch.later.install()

    def _enter_batch(self) -> Batch | None:
        "Called by the guard before a batch: what `_leave_batch` needs, None if there is no autocast to guard."
        device_type = self._fit.device.type if self._fit else training_device(self.learn).type
        if not autocast_available(device_type): return None
        self._batch = Batch(AutocastState(device_type), self.learn.training, self._batch)
        return self._batch

    def _enter_loose_batch(self):
        "A loop of somebody's that calls the events without `one_batch`; `after_batch` ends the batch."
        if (batch := self._enter_batch()) is not None: batch.loose = True

    def _batch_is_done(self) -> None:
        "Called by the guard: all of a batch but its last events is over."
        if self._batch is not None: self._batch.done = True

    def _leave_batch(self, batch: Batch, error: BaseException | None) -> None:
        "Called by the guard when a batch ended, by `error` or None; may be called twice."
        batch.done = True
        if batch.later is not None: batch.later.remove()
        batch.autocast_state.restore()
        self._batch = batch.outer
        if self.learn is None: return
        if error is None and batch.training and self._fit is not None:
            if not self._fit.tried: self._check_fp32_modules()
            self._tell('batch_ended')
        if self._fit is not None: self._settle_gradients(batch, error)
        if error is not None and not isinstance(error, _CANCEL) and self._batch is None: self._let_go_of_graphs()
        if self._batch is None and self._replacement is not None: self._replace_now()

    def _settle_gradients(self, batch: Batch, error: BaseException | None) -> None:
        scaling, opt = self._scaling, self.learn.opt
        cancelled = batch.cancelled or error is not None
        if scaling.stage is GradStage.TRUE or not batch.training: return
        if scaling.stage is GradStage.UNSCALED and (scaling.stepped or scaling.held_back): scaling.update()
        if error is not None and not isinstance(error, _CANCEL): scaling.drop(opt, self.learn.model)
        elif scaling.stage is GradStage.SCALED: pass             # accumulating
        elif cancelled: scaling.rescale(opt)                     # left between `unscale` and `zero_grad`: later batches add to them
        else: scaling.stage = GradStage.TRUE                     # the loop has zeroed them

    def _step(self, step): step()

    def replace_after_batch(self,
        cb: Any, # The precision callback to add; None for fp32
    ) -> None:
        "Have `cb` take this callback's place when the batch under way has ended."
        self._replacement = (cb,)

    def _replace_now(self):
        (cb,), self._replacement, learn = self._replacement, None, self.learn
        learn.remove_cb(self)
        if cb is not None: learn.add_cb(cb)


def precision_callback_of(model: Any, opt: Any) -> MixedPrecision | None:
    "The precision callback of the learner that trains `model` with `opt`, the two that `Learner.save` and `load` hand on."
    on_model = [cb for cb in list(_attached) if cb.learn is not None and cb.learn.model is model]
    return next((cb for cb in on_model if cb.learn.opt is opt), None)


_BF16_ARGUMENTS = ('fp32_modules', 'on_overflow', 'max_skips')


def _argument(value: Any) -> str:
    "`value` as it would be written in a call."
    if isinstance(value, (list, tuple)): return '[' + ', '.join(map(_argument, value)) + ']'
    if isinstance(value, type): return f'nn.{value.__name__}' if value.__module__.startswith('torch.nn') else value.__name__
    return getattr(value, '__name__', None) or repr(value)


# `delegates` put fastai's own signature on the base class, where `inspect.signature` would find it first.
MixedPrecision.__signature__ = inspect.signature(MixedPrecision.__init__).replace(
    parameters=list(inspect.signature(MixedPrecision.__init__).parameters.values())[1:])
