"`MixedPrecision`: the callback that runs fastai's training loop under autocast and scales the loss in fp16."
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from fastai.callback import fp16
from fastai.callback.core import CancelStepException
from fastcore.xtras import modify_exception
from torch import nn
from torch.amp import GradScaler

from .advice import call_text
from .checkpoint import place_state
from .checks import check_overflow_args
from .convert import is_half, to_fp32
from .fp32_modules import Fp32Modules
from .guard import LoopGuard
from .lifecycle import CANCEL_EXCEPTIONS, PRECISION_CALLBACKS, Lifecycle
from .mode import AMPMode, training_device
from .observer import OBSERVERS
from .scale_history import plot_scales
from .scaling import LossScaling

__all__ = ['PRECISION_CALLBACKS', 'MixedPrecision', 'precision_callback']

_EVERY_BATCH = frozenset(('before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward',
                          'before_step', 'after_step', 'after_batch'))
_BF16_ARGUMENTS = ('fp32_modules', 'on_overflow', 'max_skips')


class MixedPrecision(Lifecycle, fp16.MixedPrecision):
    """Mixed precision training with PyTorch's automatic mixed precision, on the device the model is on.

    autocast covers the forward pass and the loss, in training and validation. Predictions reach the loss, the metrics
    and `get_preds` in fp32, and the loss is fp32. In fp16 a `GradScaler` scales the loss; gradients are unscaled before
    any `before_step` callback of a higher order runs, and a step with non-finite gradients is skipped whole: by a
    `CancelStepException`, or, without waiting for the device, by torch's fused Adam, AdamW and SGD in an
    `OptimWrapper`. In that case `after_cancel_step` does not fire; `skipped` tells in both.

    Raises `ValueError` at construction for an unknown mode or an unusable scaling argument, and when `fit` starts if
    the device cannot run the mode, if parameters to be trained are fp16 already, or if the optimizer needs a closure.

    Source: https://docs.pytorch.org/docs/stable/amp.html; loss scaling: Micikevicius et al., Mixed Precision Training,
    https://arxiv.org/abs/1710.03740.
    """
    name = 'mixed_precision'  # also of subclasses: by this name fastai's `load_learner` finds what to take off
    order = 10  # after TrainEvalCallback (-10) moves the model; between GradientAccumulation (6) and GradientClip (11)

    def __init__(self,
        amp_mode: str | AMPMode | torch.dtype = AMPMode.FP16, # 'fp16', 'bf16', or 'auto': the fastest native one
        init_scale: float | str = 65536.0, # Loss scale to start from; 'auto': found with the first batch (fp16)
        growth_factor: float = 2.0, # The scale is multiplied by this after `growth_interval` steps (fp16)
        backoff_factor: float = 0.5, # The scale is multiplied by this after a skipped step (fp16)
        growth_interval: int = 2000, # Steps in a row without a skip after which the scale grows (fp16)
        enabled: bool = True, # Whether to scale the loss at all (fp16)
        *,
        loss_scale: float | None = None, # A static loss scale, which never grows or shrinks; fastai v1 used 512 (fp16)
        scaler: GradScaler | None = None, # A `torch.amp.GradScaler` of your own to use instead (fp16)
        fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules, predicates
        on_overflow: str = 'warn', # When training goes wrong: 'warn', 'raise' (`FloatingPointError`) or 'ignore'
        max_skips: int = 16, # Skipped steps in a row after which training counts as going wrong (fp16)
    ):
        self._arguments = {k: v for k, v in locals().items() if k not in ('self', '__class__')}
        auto = isinstance(amp_mode, str) and amp_mode.lower() == 'auto'
        self._mode: AMPMode | None = None if auto else AMPMode(amp_mode)
        self.amp_mode = 'auto' if auto else AMPMode(amp_mode)
        self._scaling = LossScaling(init_scale, growth_factor, backoff_factor, growth_interval, enabled, loss_scale,
                                    scaler)
        if scaler is not None and self.amp_mode is AMPMode.BF16:
            raise ValueError(f"scaler={scaler!r} cannot be used with amp_mode='bf16', which needs no loss scaling.\n"
                             "Leave it out, or take 'fp16' or 'auto'.")
        check_overflow_args(on_overflow, max_skips)
        self.on_overflow, self.max_skips = on_overflow, int(max_skips)
        self._fp32_modules, self._guard = Fp32Modules(fp32_modules), LoopGuard(self)
        self.observers = [observer(self) for observer in OBSERVERS]

    # fastai would look up each name on the learner and its model, and warn if it is there; these names are our own.
    def __setattr__(self, name, value): object.__setattr__(self, name, value)
    def __dir__(self): return object.__dir__(self)
    def __getstate__(self): return {**self.__dict__, '_batch': None}   # a copy made inside a batch is not inside one

    def __repr__(self):
        scale = '' if self.scale is None else f', scale={self.scale:g}'
        return f"{type(self).__name__}('{getattr(self.amp_mode, 'value', self.amp_mode)}'{scale})"

    # `Callback` asks at every event, and would find it by way of `__getattr__`, which takes longer than most events do.
    @property
    def training(self): return self._learn.training  # type: ignore[override]

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
        state = self.state_dict()
        return float(state['scale']) if 'scale' in state else None
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
        "Was the last step skipped? Known from `before_step` of a higher order on, in `after_step` and `after_batch`."
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
        "A new autocast context in this callback's precision, for the device that training uses; none in fp32."
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
        "The call on the learner that sets this precision, with the arguments that are not defaults, and `changes`."
        kept = {'fp32_modules': self.fp32_module_names} if self.fp32_module_names else {}
        method, arguments = self._call({**self._arguments, 'amp_mode': self.amp_mode, **kept, **changes})
        return call_text(method, arguments, {k: p.default for k, p in inspect.signature(type(self)).parameters.items()})

    def _call(self, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        "The learner's method that makes such a callback, and those of its `arguments` that it takes."
        mode = arguments.pop('amp_mode')
        if isinstance(mode, str) and mode.lower() == 'auto': return 'to_amp', arguments
        mode = AMPMode(mode)
        if mode is AMPMode.BF16: arguments = {k: v for k, v in arguments.items() if k in _BF16_ARGUMENTS}
        return f'to_{mode.value}', arguments

    # -- what a checkpoint holds

    @property
    def scales_loss(self) -> bool:
        "Does training scale the loss: is the mode, decided now if need be, fp16?"
        mode = self._mode
        if mode is None and self.amp_mode == 'auto' and self.learn is not None:
            mode = self._decide(training_device(self.learn))
        return mode is not None and mode.needs_loss_scaling

    def state_dict(self) -> dict[str, Any]: # Plain numbers: scale, its rules and its growth tracker
        """The state of the loss scaling, as `GradScaler.state_dict`, at any time.

        Empty in bf16 and fp32, and with `init_scale='auto'` before the first step.
        """
        open_still = self._scaling.undecided and not self._scaling.history.n
        return self._scaling.state_dict() if self.scales_loss and not open_still else {}

    def load_state_dict(self,
        state: dict[str, Any], # What `state_dict` gave
    ) -> None:
        """Go on from `state`, before, during or after a fit; a static scale and `enabled=False` stay as they are.

        Raises `ValueError` for a state that no `GradScaler` could have given, and changes nothing then.
        """
        opt = None if self._learn is None else self._learn.opt
        if state and self.scales_loss: self._scaling.load_state_dict(state, opt)

    @contextmanager
    def diagnosing(self) -> Iterator[None]:
        "The model as it is outside a batch, inside; for observers that run it."
        later = None if self._batch is None else self._batch.later_standing
        if later is not None: later.remove()
        try: yield
        finally:
            if later is not None: later.install(later.nesting)

    # -- the events of fastai's loop

    def __call__(self, event_name: str) -> Any:
        "As `Callback`'s, without its look-ups where they cannot matter: these events come with every batch."
        if self.learn is None: return None  # taken off by a callback before this one, in the same event
        always = self.run and self.run_train and self.run_valid
        if event_name not in _EVERY_BATCH or not always: return super().__call__(event_name)
        try: return getattr(self, event_name)()
        except CANCEL_EXCEPTIONS: raise
        except Exception as e:
            said = e.args[0] if e.args else ''
            where = f'Exception occured in `{type(self).__name__}` when calling event `{event_name}`'
            raise modify_exception(e, f'{where}:\n\t{said}', replace=True)  # noqa: B904  with fastai's words

    def before_fit(self):
        "Decide the precision and get the scaler ready; raise before a batch is drawn if that cannot be done."
        if self._guard.running: return                           # validate() or get_preds() called from inside a fit
        self._close(finished=True)                               # a custom loop, or a fit that validates in `after_fit`
        self._open()

    def before_train(self):
        "Check what only training needs."
        if self._fit is None: self._open()                       # an `after_fit` of a validation inside `before_fit`
        self._fp32_modules.apply(self.learn.model)               # a callback may have exchanged a module
        if self.learn.opt is not None: place_state(self.learn.opt)   # loaded, maybe, before the model was moved
        if not self._fit.checked: self._check_training()

    def before_batch(self):
        "Enter autocast."
        if self._fit is None: self._open()                       # added in the middle of a fit, or no fit at all
        if self._batch is not None and self._batch.loose: self._leave_batch(self._batch, None)   # an exception ended it
        if self._batch is None or self._batch.began: self._enter_batch(loose=True)   # a loop that calls events alone
        fit, batch = self._fit, self._batch
        if batch is None: return
        batch.began = True
        if fit.mode is None: return
        self._tell('batch_started')
        if batch.outer is None and not self._keeps_casts():
            torch.clear_autocast_cache()                         # a context around the fit may be of another dtype
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
        for name in ('loss_grad', 'loss') if len(self.learn.yb) else ():
            value = self.learn.__dict__.get(name)
            if isinstance(value, torch.Tensor) and is_half(value): setattr(self.learn, name, value.float())
        self._tell('loss_computed')

    def before_backward(self):
        "Scale the loss."
        if not self._active: return
        self._scaling.begin(self.learn.loss_grad, self.learn.opt, self.learn.model)
        self.learn.loss_grad = self._scaling.scale(self.learn.loss_grad, self.learn.opt)

    def after_backward(self): pass  # so that `Callback.__getattr__` does not look for it on the learner in each batch

    def before_step(self):
        "Unscale the gradients; hold the step back if one is not finite, unless the optimizer does so on the device."
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
        if batch.later is not None: batch.later.remove()
        batch.done = True
        if batch.loose: self._leave_batch(batch, None)

    def after_fit(self):
        "Leave nothing behind but the scale, its history, and unscaled gradients of an unfinished accumulation."
        if not self._guard.running: self._close(finished=True)


def precision_callback(learn: Any) -> MixedPrecision | None: # None in plain fp32
    "Return the precision callback of `learn`, whatever else is called `learn.precision`."
    return next((cb for cb in learn.cbs if isinstance(cb, MixedPrecision)), None)


# `delegates` put fastai's own signature on the base class, where `inspect.signature` would find it first.
MixedPrecision.__signature__ = inspect.signature(partial(MixedPrecision.__init__, None))  # type: ignore[arg-type]
