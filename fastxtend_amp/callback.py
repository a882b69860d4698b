"""`MixedPrecision`: the callback that runs fastai's training loop under autocast and scales the loss in fp16.

In a batch: `before_batch` enters autocast, `after_loss` exits it, `before_backward` scales the loss, `before_step`
unscales the gradients, `after_step` updates the scale. `loop.py` leaves what an exception leaves open.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from fastai.callback.core import CancelStepException
from fastai.learner import Learner
from fastai.torch_core import ismin_torch
from fastcore.basics import store_attr
from torch import nn
from torch.amp import GradScaler

from .checks import check_arguments, check_model, check_training
from .common import training_device, warn_user
from .compat import BackwardWithoutAutocast, is_compiled
from .convert import is_half, to_fp32
from .fp32_modules import Fp32Context, Fp32Modules
from .fp32_settings import TF32, fp32_settings
from .fp8 import Fp8Modules
from .loop import Fit, PrecisionBase
from .mode import AMPMode, check_supported, fastest_native
from .optimizers import place_state
from .scaling import LossScaling

__all__ = ['FP16_ARGUMENTS', 'MixedPrecision', 'precision_callback']

# Until PyTorch 2.13 autocast's cache gives a weight that was cast under `no_grad` to code that needs its gradient.
_CACHE = None if ismin_torch('2.13') else False                  # None: as the user has set it
FP16_ARGUMENTS = ('init_scale', 'growth_factor', 'backoff_factor', 'growth_interval', 'enabled', 'loss_scale', 'scaler')


class MixedPrecision(PrecisionBase):
    """Mixed precision training with PyTorch's automatic mixed precision, on the device the model is on.

    autocast covers the forward pass and its loss, in training and validation; predictions, loss and metrics are fp32.
    In fp16 a `GradScaler` scales the loss; gradients are unscaled before any `before_step` callback of a higher order
    runs, and a step with non-finite gradients is skipped whole: by a `CancelStepException`, or, without waiting for
    the device, by torch's fused Adam, AdamW and SGD in an `OptimWrapper`. The latter do not fire `after_cancel_step`;
    `skipped` is right in both cases.

    Raises `TypeError` or `ValueError` at construction for an argument that cannot be used, and `ValueError` when `fit`
    starts if the device cannot run the mode, or if parameters to be trained are fp16 already.

    Source: https://docs.pytorch.org/docs/stable/amp.html; loss scaling: Micikevicius et al., Mixed Precision Training,
    https://arxiv.org/abs/1710.03740.
    """
    order = 10  # after TrainEvalCallback (-10) moves the model; between GradientAccumulation (6) and GradientClip (11)
    epoch_start = 0                                              # steps in the history when the epoch began
    _has_trained = False                                         # in any fit

    def __init__(self,
        amp_mode: str | AMPMode | torch.dtype = AMPMode.FP16, # 'fp16', 'bf16', 'tf32', 'fp8', or 'auto': by device
        init_scale: float = 65536.0, # Loss scale to start from (fp16)
        growth_factor: float = 2.0, # The scale is multiplied by this after `growth_interval` steps (fp16)
        backoff_factor: float = 0.5, # The scale is multiplied by this after a skipped step (fp16)
        growth_interval: int = 2000, # Steps in a row without a skip after which the scale grows (fp16)
        enabled: bool = True, # Whether to scale the loss at all (fp16)
        *,
        loss_scale: float | None = None, # A static loss scale, which never grows or shrinks; fastai v1 used 512 (fp16)
        scaler: GradScaler | None = None, # A `torch.amp.GradScaler` of your own to use instead (fp16)
        fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules, predicates
        on_overflow: str = 'warn', # When training goes wrong: 'warn', 'raise' (`FloatingPointError`) or 'ignore'
        max_skips: int = 16, # Skipped steps in a row after which training counts as going wrong
        skip_nonfinite: bool = False, # Whether bf16 skips steps whose gradients are not finite, as fp16 does
        modules: Any = None, # Modules whose linear layers compute in FP8, given as `fp32_modules`; all if None (fp8)
    ):
        store_attr()
        auto = isinstance(amp_mode, str) and amp_mode.lower() == 'auto'
        self.mode = None if auto else AMPMode(amp_mode)          # the resolved one; None for fp32
        self.amp_mode: str | AMPMode = self.mode or 'auto'
        self._scaling = LossScaling(init_scale, growth_factor, backoff_factor, growth_interval, enabled, loss_scale,
                                    scaler)
        check_arguments(self.mode, scaler, fp32_modules, modules, on_overflow, max_skips, skip_nonfinite)
        self._fp32_modules = self._modules = Fp32Modules(fp32_modules)
        if self.mode is AMPMode.FP8: self._modules = Fp8Modules(modules, self._fp32_modules)

    def __repr__(self):
        took = self.mode.value if self.mode else 'fp32'
        auto = f"'auto': {took}" if self.mode or self._has_trained else "'auto'"
        scale = '' if self.scale is None else f', scale={self.scale:g}'
        return f"{type(self).__name__}({auto if self.amp_mode == 'auto' else repr(took)}{scale})"

    # -- what a user reads

    @property
    def arguments(self) -> dict[str, Any]:
        "The arguments of the callback by name, defaults included."
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
    @property
    def scale(self) -> float | None:
        "The loss scale now; None without loss scaling. Waits for the device that the scale is on."
        return self.state_dict().get('scale')
    @property
    def scales(self) -> list[float]:
        "The loss scale used at each attempted optimizer step since the callback was added, `lr_find`'s steps left out."
        return self._scaling.history.scales()
    @property
    def skips(self) -> list[bool]:
        "For each entry of `scales`, True if that step was skipped because a gradient was not finite."
        return self._scaling.history.skips()
    @property
    def n_skipped(self) -> int:
        "The number of skipped steps."
        return sum(self.skips)
    @property
    def skipped(self) -> bool:
        """True if the last step of the open fit was skipped; known to `before_step` callbacks of a higher order.

        Waits for the device if the device decided.
        """
        return bool(self._scaling.fit.found_inf)
    @property
    def skips_in_a_row(self) -> int:
        "The number of skipped steps in a row up to now in this fit, as far as the host knows: never waits."
        return self._scaling.fit.skips_in_a_row
    @property
    def fp32_module_names(self) -> list[str]:
        "Names of the modules that are kept in fp32, as `fp32_modules` matches them in the learner's model."
        return [] if self._learn is None else list(self._fp32_modules.check(self._learn.model))

    @contextmanager
    def amp_context(self) -> Iterator[None]:
        "Run what is inside in this callback's precision, on the device that training uses."
        fit, model = self.fit, self.learn.model
        device = training_device(self.learn) if fit is None else fit.device
        mode = self.mode_on(device) if fit is None else fit.mode
        around = self._around_fit(mode, model) if fit is None else []
        with ExitStack() as stack:
            for context in [*around, *_around_forward(mode, device, model)]: stack.enter_context(context)
            yield

    def scale_loss(self,
        loss: torch.Tensor, # The loss of a backward pass of your own, fp32
    ) -> torch.Tensor: # To call `.backward()` on
        "Return `loss` times the loss scale, in a batch of a fit; without loss scaling `loss` itself."
        return self._scaling.fit.scale_loss(loss)

    def check_modules(self, model: nn.Module) -> None: self._modules.check(model)

    # -- what a checkpoint holds

    @property
    def needs_loss_scaling(self) -> bool:
        "True if training scales the loss: if the mode, decided now if need be, is fp16."
        mode = self.mode
        if mode is None and self._learn is not None: mode = self.mode_on(training_device(self._learn))
        return mode is not None and mode.needs_loss_scaling

    def state_dict(self) -> dict[str, float]: # Plain numbers: scale, its rules and its growth tracker
        "Return the state of the loss scaling, as `GradScaler.state_dict`, at any time; empty in bf16 and fp32."
        return self._scaling.state_dict() if self.needs_loss_scaling else {}

    def load_state_dict(self,
        state: dict[str, float] | None, # What `state_dict` gave; None for the scale that the arguments ask for
    ) -> None:
        """Go on from `state`, before, during or after a fit; a static scale and `enabled=False` stay as they are.

        Raises `ValueError` for a state that no `GradScaler` could have given, and changes nothing then.
        """
        if state != {} and self.needs_loss_scaling: self._scaling.load_state_dict(state)

    # -- a fit: each context is entered here, and left by `Fit.close`

    def mode_on(self, device: torch.device) -> AMPMode | None: # None for fp32
        "Return the mode on `device`. Raises a `ValueError` if it does not run there."
        if not isinstance(self.amp_mode, AMPMode): return fastest_native(device)
        check_supported(self.amp_mode, device)
        return self.amp_mode

    def open_fit(self, fit: Fit) -> None:
        "Check that the model runs in the precision, and enter what lasts for the fit."
        learn = fit.learn
        self._refuse_others(learn)                               # fastai's own may have been added since
        self.mode = fit.mode
        self._use_model(fit)
        if fit.mode is not None: check_model(fit.mode, fit.model, self.fp32_module_names)
        fit.around = [fit.enter(context) for context in self._around_fit(fit.mode, fit.model)]
        fit.enter(self._scaling.begin(learn, fit.device, fit.mode, self.skip_nonfinite))

    def _around_fit(self, mode: AMPMode | None, model: nn.Module) -> list[Any]:
        "Return the contexts that computing in `mode` needs around a fit; `add(model)` includes another model."
        if mode is AMPMode.TF32: return [fp32_settings(TF32)]
        if mode is None: return []
        return [Fp32Context(modules, model) for modules in dict.fromkeys([self._fp32_modules, self._modules])]

    def _open_training(self, fit: Fit) -> None:
        "Check what only training needs, once in a fit; put the optimizer's state where the parameters are."
        fit.is_training = True
        scaled = self._scaling.fit.scaler is not None and fit.mode.needs_loss_scaling
        check_training(self.learn, fit.mode, scaled, warn_of_mode=not self._has_trained)
        if self.learn.opt is not None: place_state(self.learn.opt)

    # -- the events of fastai's loop

    def before_fit(self):
        "Begin the fit; raise before a batch is drawn if the precision cannot be used."
        if self._loop.scopes: self._loop.open(self)              # `validate()` alone begins with its first batch

    def before_train(self):
        "Check what only training needs."
        fit, self.epoch_start = self._loop.open(self), len(self._scaling.history)   # it may be added during a fit
        self._use_model(fit)                                     # a callback may have exchanged a module
        if not fit.is_training: self._open_training(fit)

    def before_batch(self):
        "Enter autocast."
        fit, learn = self._loop.open(self), self.learn
        if learn.model is not fit.model: self._use_model(fit)    # exchanged in the fit
        if learn.training and learn.opt is not None and not fit.is_training: self._open_training(fit)
        torch.clear_autocast_cache()                             # an autocast around the fit keeps casts of old weights
        contexts = fit.around_forward                            # making them would take longer than all else here
        if contexts and torch.is_autocast_enabled(fit.device.type):   # a batch around this one may have entered these
            contexts = _around_forward(fit.mode, fit.device, fit.model)
        for context in contexts: self._loop.enter(context)

    def _use_model(self, fit: Fit) -> None:
        fit.model = self.learn.model
        fit.around_forward = _around_forward(fit.mode, fit.device, fit.model)
        try:
            for context in fit.around: context.add(fit.model)
        except ValueError as e:
            if self.learn.training: raise
            warn_user(f'{e}\nThe model that is validated keeps no modules in fp32.')

    def after_pred(self):
        "Give the loss and the metrics fp32."
        if self.fit is not None and self.fit.mode is not None: self.learn.pred = to_fp32(self.learn.pred)

    def after_loss(self):
        "Exit autocast; record and back-propagate the loss in fp32."
        self._loop.leave()
        if self.fit is None or self.fit.mode is None: return
        for name in ('loss_grad', 'loss'):                       # without targets an earlier batch's, fp32 already
            value = self.learn.__dict__.get(name)
            if torch.is_tensor(value) and is_half(value): setattr(self.learn, name, value.float())

    def before_backward(self):
        "Scale the loss."
        self.learn.loss_grad = self.scale_loss(self.learn.loss_grad)

    def before_step(self):
        "Unscale the gradients; hold the step back if one is not finite, unless the optimizer skips on the device."
        # A step that the learner wraps in a method of its own is not replaced.
        is_plain = getattr(self._loop.scopes[-1].body, '__func__', None) is Learner._step
        self._scaling.fit.unscale(may_skip_on_device=is_plain)
        if self._scaling.fit.held_back: raise CancelStepException()

    def take_step(self, step: Callable[[], object]) -> None:
        "Call `step`, which takes the optimizer's step, unless the optimizer skips it; subclasses may do more."
        self._scaling.fit.step(step)

    def end_step(self) -> None:
        "Note that fastai's own loop zeroes the gradients next."
        if type(self.learn)._do_grad_opt is Learner._do_grad_opt: self._scaling.fit.expect_zeros()

    def after_cancel_step(self):
        "Leave the scale alone if another callback called the step off."
        if not self._scaling.fit.held_back: self._scaling.fit.cancel()

    def after_step(self): self._scaling.fit.update()

    def after_cancel_batch(self): self._loop.leave()             # before callbacks of a higher order run

    def after_batch(self):
        "Exit autocast if an event was left out; say which modules to keep in fp32 were not used."
        self._loop.leave()
        if self._has_trained or not self.learn.training or self.fit is None: return
        self._has_trained = True
        self._fp32_modules.warn_of_unused()

    def after_train(self):
        "Read what the device decided in this epoch: fastai's Recorder waits for it here anyway."
        self._scaling.fit.read()

    def after_fit(self):
        "End the fit before callbacks of a higher order load weights; not at the event of a `validate()` inside it."
        if len(self._loop.scopes) > 1 or self._loop.in_batch: return
        is_silent = self.on_overflow == 'ignore' or self.fit is None or self.fit.has_warned
        if not is_silent and (message := self._scaling.fit.skip_message()): warn_user(message)
        self._loop.close()


def _around_forward(mode: AMPMode | None, device: torch.device, model: nn.Module) -> list[Any]:
    "Return the contexts around a forward pass and its loss."
    if mode is None or mode.dtype is None: return []
    autocast = torch.autocast(device.type, dtype=mode.dtype, cache_enabled=_CACHE)
    return [BackwardWithoutAutocast(), autocast] if is_compiled(model) else [autocast]


def precision_callback(
    learn: Learner,
) -> MixedPrecision | None:
    "Return the learner's precision callback; None in plain fp32."
    return next((cb for cb in learn.cbs if isinstance(cb, MixedPrecision)), None)


# `delegates` put fastai's own signature on the base class, where `inspect.signature` would find it first.
MixedPrecision.__signature__ = inspect.signature(partial(MixedPrecision.__init__, None))  # type: ignore
