"When, in fastai's training loop, does each thing happen?"
import inspect, warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from fastai.callback import fp16
from fastai.callback.core import (CancelBackwardException, CancelBatchException, CancelEpochException, CancelFitException,
                                  CancelStepException, CancelTrainException, CancelValidException)
from fastcore.xtras import modify_exception
from torch import nn
from torch.amp import GradScaler

from .convert import detached, is_half, to_fp32
from .guard import AutocastState, GradModeSwitches, LoopGuard, cache_loses_gradients
from .fp32_modules import Fp32Modules, unwrapped
from .mode import (AMPMode, autocast_available, check_layers, check_supported, emulation_warning, fastest_native, model_device)
from .observer import OBSERVERS
from .scaling import GradStage, LossScaling

__all__ = ['PRECISION_CALLBACKS', 'MixedPrecision']

PRECISION_CALLBACKS = (fp16.MixedPrecision, fp16.ModelToHalf, fp16.NonNativeMixedPrecision)
ON_OVERFLOW = ('warn', 'raise', 'ignore')
_CANCEL = (CancelBackwardException, CancelBatchException, CancelEpochException, CancelFitException, CancelStepException,
           CancelTrainException, CancelValidException)
_EVERY_BATCH = frozenset(('before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward', 'before_step', 'after_step', 'after_batch'))


@dataclass
class _Fit:
    "What lasts from `before_fit` to `after_fit`."
    device: torch.device
    mode: AMPMode | None
    autocast: Any = None          # the context that is entered in a batch, None outside
    spare: Any = None             # a context to enter next; building one takes longer than entering it
    cancelled: bool = False       # was this batch left with CancelBatchException?
    checked: bool = False         # were the checks made that only training needs?
    tried: bool = False           # has a training batch been through?
    before_lr_find: Any = None    # what to restore, because the fit is lr_find's

    # A copy made inside a batch has entered nothing.
    def __getstate__(self): return {**self.__dict__, 'autocast': None, 'spare': None}


@dataclass
class _Batch:
    "What a batch must put back; batches nest when a callback validates inside one."
    autocast_state: AutocastState
    outer: tuple                  # `autocast` and `cancelled` of the batch around it
    training: bool
    watched: bool
    inside: bool = False          # were half-precision weights in the model before it? (HalfWeights)


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
        fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules, predicates, or a list of these
        on_overflow: str = 'warn', # When training goes wrong: 'warn', 'raise' (`FloatingPointError`) or 'ignore'; the batch is run again to find where
        max_skips: int = 16, # Skipped steps in a row after which training counts as going wrong (fp16)
    ):
        auto = isinstance(amp_mode, str) and amp_mode.lower() == 'auto'
        self._mode: AMPMode | None = None if auto else AMPMode(amp_mode)
        self.amp_mode = 'auto' if auto else self._mode
        self._scaling = LossScaling(init_scale, growth_factor, backoff_factor, growth_interval, enabled, loss_scale, scaler)
        if scaler is not None and self.amp_mode is AMPMode.BF16:
            raise ValueError(f"scaler={scaler!r} cannot be used with amp_mode='bf16', which needs no loss scaling. Leave it out, "
                             "or take 'fp16' or 'auto'.")
        check_overflow_args(on_overflow, max_skips)
        self.on_overflow, self.max_skips = on_overflow, int(max_skips)
        self._fp32_modules = Fp32Modules(fp32_modules)
        self.observers = [observer(self) for observer in OBSERVERS]
        self._guard, self._fit, self._learn = LoopGuard(self), None, None

    # fastai would look up each name on the learner and its model, and warn if it is there; these names are our own.
    def __setattr__(self, name, value): object.__setattr__(self, name, value)

    @property
    def learn(self): return self.__dict__.get('_learn')
    @learn.setter
    def learn(self, learn):                                      # set by `add_cb`, and to None by `remove_cb`
        if self.learn is not None and learn is not self.learn: self._detach()
        if learn is not None: self._fp32_modules.apply(learn.model)   # first: it may raise
        self._learn = learn
        # A callback may add us in the middle of a fit: `before_batch` is too late to guard that batch.
        if learn is not None and getattr(learn, 'dl', None) is not None: self._guard.install(learn)

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

    def plot_scales(self,
        ax = None, # The matplotlib axes to draw on; new ones if None
    ): # The matplotlib axes
        "Plot the loss scale over the optimizer steps, skipped steps marked."
        import matplotlib.pyplot as plt
        if ax is None: ax = plt.subplots()[1]
        scales, skips = self.scales, self._scaling.history.skips
        ax.plot(range(len(scales)), scales, drawstyle='steps-post', label='loss scale')
        if skips.any():
            where = skips.nonzero()[0]
            ax.plot(where, [scales[i] for i in where], 'rx', label=f'skipped steps ({len(where)})')
        if scales:
            ax.set_yscale('log', base=2)
            ax.legend()
        else: ax.text(.5, .5, 'no loss scaling so far', ha='center', transform=ax.transAxes)
        ax.set(xlabel='optimizer step', ylabel='loss scale')
        return ax

    def context(self) -> AbstractContextManager:
        "A new autocast context in this callback's precision, for the device the model is on; it does nothing in fp32."
        device = self._device()
        mode = self._fit.mode if self._fit else self._decide(device)
        return nullcontext() if mode is None else torch.autocast(device.type, dtype=mode.dtype)

    def check_modules(self,
        model: nn.Module, # The model that this callback is to train
    ) -> None:
        "Raise what adding this callback to a learner of `model` would raise on account of `fp32_modules`."
        self._fp32_modules.check(model)

    # -- what a checkpoint holds

    @property
    def scales_loss(self) -> bool:
        "Does training scale the loss: is the mode, decided now if need be, fp16?"
        mode = self._mode
        if mode is None and self.amp_mode == 'auto' and self.learn is not None: mode = self._decide(self._device())
        return mode is not None and mode.needs_loss_scaling

    def state_dict(self) -> dict[str, Any]: # Plain numbers: scale, growth_factor, backoff_factor, growth_interval, _growth_tracker
        "The state of the loss scaling, as `GradScaler.state_dict`, before, during or after a fit; empty in bf16 and fp32."
        return self._scaling.state_dict() if self.scales_loss else {}

    def load_state_dict(self,
        state: dict[str, Any], # What `state_dict` gave
    ) -> None:
        "Go on from `state`, before, during or after a fit. A static scale and `enabled=False` stay as they were asked for."
        if state and self.scales_loss: self._scaling.load_state_dict(state, self.learn.opt if self.learn is not None else None)

    # -- the events of fastai's loop

    def __call__(self, event_name: str) -> Any:
        "As `Callback`'s, without its look-ups where they cannot matter: these events come with every batch."
        if event_name not in _EVERY_BATCH or not (self.run and self.run_train and self.run_valid): return super().__call__(event_name)
        try: return getattr(self, event_name)()
        except _CANCEL: raise
        except Exception as e:
            told = f'Exception occured in `{type(self).__name__}` when calling event `{event_name}`:\n\t{e.args[0] if e.args else ""}'
            raise modify_exception(e, told, replace=True)        # noqa: B904  the same exception, with fastai's words

    def before_fit(self):
        "Decide the precision and get the scaler ready; raise before a batch is drawn if that cannot be done."
        if self._guard.running: return                           # validate() or get_preds() called from inside a fit
        self._close()                                            # what a fit that died between two batches left behind
        self._open()

    def before_train(self):
        "Check what only training needs."
        if self._fit is None: self._open()                       # an `after_fit` of a validation inside `before_fit`
        if not self._fit.checked: self._check_training()

    def before_batch(self):
        "Enter autocast."
        if self._fit is None: self._open()                       # added in the middle of a fit
        fit = self._fit
        if fit.mode is None: return
        fit.autocast, fit.spare = fit.spare or self._new_context(), None
        self._tell('batch_started')
        fit.autocast.__enter__()

    def after_pred(self):
        "Give the loss and the metrics fp32."
        if self._active: self.learn.pred = to_fp32(self.learn.pred)

    def after_loss(self):
        "Exit autocast; record and back-propagate the loss in fp32."
        if not self._active: return
        self._after_forward()
        if len(self.learn.yb) and is_half(self.learn.loss_grad):
            self.learn.loss_grad, self.learn.loss = self.learn.loss_grad.float(), self.learn.loss.float()
        self._tell('loss_computed')

    def before_backward(self):
        "Scale the loss."
        self.learn.loss_grad = self._scaling.scale(self.learn.loss_grad)

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
        if self._fit is None: return
        self._fit.cancelled = True
        self._exit_autocast()

    def after_batch(self):
        "Exit autocast if an event was left out."
        if self._fit is not None: self._exit_autocast()

    def after_fit(self):
        "Leave nothing behind but the scale and its history."
        if not self._guard.running: self._close()

    # -- how that is done

    def _tell(self, event: str) -> None:
        "Call this method of each observer."
        for observer in self.observers: getattr(observer, event)()

    @property
    def finds_lr(self) -> bool:
        "Is the fit under way `lr_find`'s, which goes wrong on purpose?"
        return self._fit is not None and self._fit.before_lr_find is not None

    @property
    def fit_mode(self) -> AMPMode | None:
        "The precision of the fit under way; None in fp32 and outside a fit."
        return None if self._fit is None else self._fit.mode

    @property
    def fit_device(self) -> torch.device | None:
        "The device of the fit under way; None outside a fit."
        return None if self._fit is None else self._fit.device

    keep_call = "learn.to_{mode}(fp32_modules=['{name}'])"       # the call that keeps a module in fp32, for advice

    def as_call(self, **changes: Any) -> str:
        "The call on the learner that would recreate this callback with `changes`."
        spec, scale = self._fp32_modules.spec, self._scaling.state_dict().get('scale', 65536.)
        given = {'init_scale': scale, 'fp32_modules': spec, 'on_overflow': self.on_overflow, 'max_skips': self.max_skips}
        default = {'init_scale': 65536., 'fp32_modules': None, 'on_overflow': 'warn', 'max_skips': 16}
        mode = changes.pop('amp_mode', None) or self._mode
        args = {k: v for k, v in {**given, **changes}.items() if k not in default or v != default[k]}
        if mode is AMPMode.BF16: args.pop('init_scale', None)
        call = self.keep_call.format(mode=mode.value if mode else 'amp', name='').partition('fp32_modules=')[0]
        return (call + ', '.join(f'{k}={v!r}' for k, v in args.items())).removesuffix(', ') + ')'

    def diagnosing(self) -> AbstractContextManager:
        "What a diagnosis runs in: the model as it is outside a batch."
        return nullcontext()

    @property
    def _active(self): return self._fit is not None and self._fit.mode is not None

    def _device(self):
        return model_device(self.learn.model, getattr(self.learn.dls, 'device', None) or torch.device('cpu'))

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
            raise ValueError(f"The learner has several precision callbacks: {[self, *others]}. Keep one: `learn.to_fp32()` removes "
                             "them all, and `learn.to_fp16()` or `learn.to_bf16()` replaces them.")
        device = self._device()
        self._mode = mode = self._decide(device)
        self._fp32_modules.apply(self.learn.model)                    # it may be another model by now
        if mode is not None: self._check_layers(mode, device)
        self._fit = _Fit(device, mode)
        scaler = self._scaling.start(device.type, scaled=mode is not None and mode.needs_loss_scaling)
        if 'lr_finder' in self.learn.__dict__: self._fit.before_lr_find = self._scaling.snapshot()
        self._tell('fit_started')
        cache_loses_gradients()                                  # asked here, so that no batch is interrupted in it
        self._guard.install(self.learn)
        self.learn.scaler = scaler

    def _check_layers(self, mode, device): check_layers(mode, device, unwrapped(self.learn.model), self._fp32_modules.covers)

    def _check_training(self):
        fit, self._fit.checked = self._fit, True
        if fit.mode is None:
            warnings.warn(f"amp_mode='auto': device '{fit.device}' does neither bf16 nor fp16 natively, so training runs in fp32. "
                          "`precision_support()` says why; `learn.to_fp32()` is silent.")
        elif message := emulation_warning(fit.mode, fit.device): warnings.warn(message)
        if not self._scaling.scaler.is_enabled(): return
        half = [n for n, p in self.learn.model.named_parameters() if p.requires_grad and p.dtype is torch.float16]
        if half:
            raise ValueError(f"fp16 mixed precision needs fp32 parameters, but {len(half)} to be trained are fp16, such as '{half[0]}'. "
                             "Call `learn.model.float()` first: autocast itself casts what can run in fp16.")
        if _needs_closure(self.learn.opt):
            raise ValueError(f"{type(getattr(self.learn.opt, 'opt', self.learn.opt)).__name__} needs a closure for its step, which "
                             "GradScaler does not support. Use `learn.to_bf16()` or `learn.to_fp32()`, or another optimizer.")

    def _check_fp32_modules(self):
        self._fit.tried = True
        for name, parent in self._fp32_modules.never_called().items():
            warnings.warn(f"fp32_modules: '{name}' was not called in the first batch, so keeping it in fp32 does nothing: the module around it may "
                          f"use its weights directly, as MultiheadAttention does with out_proj. Keep '{parent}' instead.")

    def _new_context(self): return torch.autocast(self._fit.device.type, dtype=self._fit.mode.dtype)

    def _after_forward(self): self._exit_autocast()

    def _step(self, step): step()

    def _exit_autocast(self):
        fit = self._fit
        ctx, fit.autocast = fit.autocast, None
        if ctx is None: return
        ctx.__exit__(None, None, None)
        fit.spare = ctx

    def _enter_batch(self):
        "Called by the guard before a batch: what `_leave_batch` needs, None if there is no autocast to guard."
        fit, device_type = self._fit, self._fit.device.type if self._fit else self._device().type
        if (fit is None or fit.mode is None) and not autocast_available(device_type): return None
        batch = _Batch(AutocastState(device_type), (fit.autocast, fit.cancelled) if fit else (None, False),
                       self.learn.training, self.learn.training and cache_loses_gradients())
        if fit: fit.autocast, fit.cancelled = None, False
        return batch

    def _leave_batch(self, batch, error):
        "Called by the guard when a batch ended, by `error` or None; may be called twice."
        if batch.watched: GradModeSwitches.unwatch()
        batch.autocast_state.restore()
        if error is None and batch.training and self.learn is not None:
            if self._fit is not None and not self._fit.tried: self._check_fp32_modules()
            self._tell('batch_ended')
        fit, scaling = self._fit, self._scaling
        if fit is None: return
        cancelled = fit.cancelled or error is not None
        fit.autocast, fit.cancelled = batch.outer
        if scaling.stage is GradStage.TRUE or not batch.training: return
        if scaling.stage is GradStage.UNSCALED and (scaling.stepped or scaling.held_back): scaling.update()
        if error is not None and not isinstance(error, _CANCEL): scaling.drop(self.learn.opt, self.learn.model)
        elif scaling.stage is GradStage.SCALED: pass             # accumulating
        elif cancelled: scaling.rescale(self.learn.opt)          # left between `unscale` and `zero_grad`: later batches add to them
        else: scaling.stage = GradStage.TRUE                     # the loop has zeroed them

    def _left_loop(self, event_type, error):
        "Called by the guard when `error` leaves the outermost part of the loop that it sees: will `after_fit` follow?"
        if not isinstance(error, CancelFitException if event_type == 'epoch' else _CANCEL): self._close()

    def _close(self):
        "Undo what `_open` did and drop scaled gradients; may be called at any time."
        learn, fit = self.learn, self._fit
        if learn is None: return
        if fit is not None: self._exit_autocast()
        if fit is not None: self._tell('fit_ended')
        self._scaling.drop(learn.opt, learn.model)
        self._scaling.read()
        if fit is not None and fit.before_lr_find is not None: self._scaling.restore(fit.before_lr_find)
        self._guard.remove()
        for name in ('xb', 'yb', 'pred', 'loss', 'loss_grad'):   # an exception leaves them on a graph, which nothing can deep-copy
            if not self._guard.running and name in learn.__dict__: learn.__dict__[name] = detached(learn.__dict__[name])
        if 'scaler' in learn.__dict__: learn.scaler = None
        self._fit = None

    def _detach(self):
        self._close()
        self._fp32_modules.remove()
        self.learn.__dict__.pop('scaler', None)


def check_overflow_args(on_overflow: str, max_skips: int) -> None:
    "Raise a `ValueError` that names the argument that cannot be used."
    if on_overflow not in ON_OVERFLOW:
        raise ValueError(f"on_overflow={on_overflow!r} cannot be used: it must be 'warn', 'raise' or 'ignore'.")
    if not isinstance(max_skips, Integral) or isinstance(max_skips, bool) or max_skips < 1:
        raise ValueError(f"max_skips={max_skips!r} cannot be used: it must be an integer of at least 1, the number of "
                         "skipped steps in a row after which training counts as going wrong.")


def _needs_closure(opt) -> bool:
    step = getattr(opt, 'opt', opt).step
    closure = inspect.signature(step).parameters.get('closure')
    return closure is not None and closure.default is inspect.Parameter.empty


# `delegates` put fastai's own signature on the base class, where `inspect.signature` would find it first.
MixedPrecision.__signature__ = inspect.signature(MixedPrecision.__init__).replace(
    parameters=list(inspect.signature(MixedPrecision.__init__).parameters.values())[1:])
