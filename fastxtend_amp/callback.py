"""`MixedPrecision`: the callback that runs fastai's training loop under autocast and scales the loss in fp16.

In a batch: `before_batch` enters autocast, `after_loss` exits it, `before_backward` scales the loss, `before_step`
unscales the gradients, `after_step` updates the scale. `_with_events` closes what an exception leaves open.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from fastai.callback import fp16
from fastai.callback.core import CancelStepException
from fastai.learner import Learner
from fastai.torch_core import ismin_torch
from fastcore.basics import noop
from torch import nn
from torch.amp import GradScaler

from .checks import check_data_parallel, check_layers, check_overflow_args, check_training
from .common import model_device, training_device, warn_user
from .compat import AutocastState
from .convert import is_half, to_fp32
from .fp32_modules import Fp32Modules, covers, qualified_names
from .mode import AMPMode, autocast_available, check_supported, fastest_native
from .optimizers import place_state
from .scaling import LossScaling

__all__ = ['FP16_ARGUMENTS', 'PRECISION_CALLBACKS', 'MixedPrecision', 'precision_callback']

PRECISION_CALLBACKS = (fp16.MixedPrecision, fp16.ModelToHalf, fp16.NonNativeMixedPrecision)
# Until PyTorch 2.13 autocast's cache gives a weight that was cast under `no_grad` to code that needs its gradient.
_USE_CACHE = ismin_torch('2.13')
FP16_ARGUMENTS = ('init_scale', 'growth_factor', 'backoff_factor', 'growth_interval', 'enabled', 'loss_scale', 'scaler')


class _Loop:
    "The open scopes of one learner's loop; a callback that replaces another takes them over."
    def __init__(self):
        self.depth, self.in_batch = 0, False
        self.takes_plain_step = False                            # fastai's own `_step` comes in this scope
        self.stack = ExitStack()                                 # of the innermost scope: what its events have entered


class MixedPrecision(fp16.MixedPrecision):
    """Mixed precision training with PyTorch's automatic mixed precision, on the device the model is on.

    autocast covers the forward pass and the loss, in training and validation. Predictions reach the loss, the metrics
    and `get_preds` in fp32, and the loss is fp32. In fp16 a `GradScaler` scales the loss; gradients are unscaled before
    any `before_step` callback of a higher order runs, and a step with non-finite gradients is skipped whole: by a
    `CancelStepException`, or, without waiting for the device, by torch's fused Adam, AdamW and SGD in an
    `OptimWrapper`. In that case `after_cancel_step` does not fire; `skipped` is right in both.

    Raises `TypeError` or `ValueError` at construction for an unknown mode or an unusable argument, and `ValueError`
    when `fit` starts if the device cannot run the mode, if parameters to be trained are fp16 already, or if the
    optimizer needs a closure.

    Source: https://docs.pytorch.org/docs/stable/amp.html; loss scaling: Micikevicius et al., Mixed Precision Training,
    https://arxiv.org/abs/1710.03740.
    """
    name = 'mixed_precision'  # also of subclasses: by this name fastai's `load_learner` finds what to take off
    order = 10  # after TrainEvalCallback (-10) moves the model; between GradientAccumulation (6) and GradientClip (11)
    watch_class: Callable | None = None  # notices training that goes wrong; set by the package `insight`
    _learn: Any = None
    run = True

    def __init__(self,
        amp_mode: str | AMPMode | torch.dtype = AMPMode.FP16, # 'fp16', 'bf16', or 'auto': the fastest native one
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
    ):
        self.arguments = {k: v for k, v in locals().items() if k != 'self'}   # by name, defaults included
        auto = isinstance(amp_mode, str) and amp_mode.lower() == 'auto'
        self.mode = None if auto else AMPMode(amp_mode)          # the resolved one; None for fp32
        self.amp_mode: str | AMPMode = self.mode or 'auto'
        self._scaling = LossScaling(init_scale, growth_factor, backoff_factor, growth_interval, enabled, loss_scale,
                                    scaler)
        if scaler is not None and self.amp_mode is AMPMode.BF16:
            raise ValueError(f"scaler={scaler!r} cannot be used with amp_mode='bf16', which needs no loss scaling.\n"
                             "Leave it out, or take 'fp16' or 'auto'.")
        check_overflow_args(on_overflow, max_skips)
        self.on_overflow, self.max_skips = on_overflow, int(max_skips)
        self._fp32_modules = Fp32Modules(fp32_modules)
        self._reset()

    def _reset(self) -> None:
        "Begin outside of every scope."
        self.device: torch.device | None = None                  # of the fit under way; None outside
        self._loop = _Loop()
        self._replacement: tuple | None = None                   # what `replace` is called with when the batch ends
        self._training_is_checked = False                        # in the fit under way
        self._watch: Any = None                                  # notices that the fit under way goes wrong
        self._has_trained = False                                # this callback, in any fit

    # fastai would look up each name on the learner and its model, and warn if it is there; these names are our own.
    def __setattr__(self, name, value): object.__setattr__(self, name, value)

    def __getstate__(self) -> dict[str, Any]:                    # a copy made in the middle of a fit is outside one
        return {k: v for k, v in self.__dict__.items() if k not in ('device', '_loop', '_replacement', '_watch')}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

    def __repr__(self):
        took = self.mode.value if self.mode else 'fp32'
        auto = f"'auto': {took}" if self.mode or self._has_trained else "'auto'"
        scale = '' if self.scale is None else f', scale={self.scale:g}'
        return f"{type(self).__name__}({auto if self.amp_mode == 'auto' else repr(took)}{scale})"

    # -- what a user reads

    @property
    def scale(self) -> float | None:
        "The loss scale now; None without loss scaling. Waits for the device that the scale is on."
        return self.state_dict().get('scale')
    @property
    def scales(self) -> list[float]:
        "The loss scale used at each attempted optimizer step since the callback was added, `lr_find`'s steps left out."
        return self._scaling.scales
    @property
    def skips(self) -> list[bool]:
        "For each entry of `scales`, True if that step was skipped because a gradient was not finite."
        return self._scaling.skips
    @property
    def n_skipped(self) -> int:
        "The number of skipped steps."
        return sum(self.skips)
    @property
    def skipped(self) -> bool:
        """True if the last step of the present fit was skipped; known to `before_step` callbacks of a higher order.

        Waits for the device if the device decided.
        """
        return bool(self._scaling.found_inf)
    @property
    def skips_in_a_row(self) -> int:
        "The number of skipped steps in a row up to now in this fit, as far as the host knows: never waits."
        return self._scaling.skips_in_a_row
    @property
    def fp32_module_names(self) -> list[str]:
        "Names of the modules that are kept in fp32, as `fp32_modules` matches them in the learner's model."
        return [] if self._learn is None else list(self._fp32_modules.check(self._learn.model))

    @contextmanager
    def amp_context(self) -> Iterator[None]:
        "Run what is inside in this callback's precision, on the device that training uses."
        device = self.device or training_device(self.learn)
        mode = self.mode if self.device else self._decide(device)
        with self._fp32_modules.kept(self.learn.model), self._autocast(device, mode): yield

    def check_modules(self,
        model: nn.Module, # The model that this callback is to train
    ) -> None:
        "Raise the errors of `fp32_modules` that adding this callback to a learner of `model` would raise."
        self._fp32_modules.check(model)

    # -- what a checkpoint holds

    @property
    def needs_loss_scaling(self) -> bool:
        "True if training scales the loss: if the mode, decided now if need be, is fp16."
        mode = self.mode
        if mode is None and self._learn is not None: mode = self._decide(training_device(self._learn))
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
        opt = None if self._learn is None else self._learn.opt
        if state != {} and self.needs_loss_scaling: self._scaling.load_state_dict(state, opt)

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
                      "Give each learner another one: `learn.to_fp16()` or `learn.to_bf16()`.")
        self._refuse_others(learn)
        self._fp32_modules.check(learn.model)
        self._learn = learn
        learn.__dict__['_with_events'] = self._with_events

    def _refuse_others(self, learn: Learner) -> None:
        others = [cb for cb in learn.cbs if isinstance(cb, PRECISION_CALLBACKS) and cb is not self]
        if others:
            raise ValueError(f"The learner has several precision callbacks: {[self, *others]}.\n"
                             "Keep one: `learn.to_fp32()` removes them all, and `learn.to_fp16()` or "
                             "`learn.to_bf16()` replaces them.")

    def _detach(self) -> None:
        if self._loop.in_batch:
            raise RuntimeError("A precision callback cannot be removed in the middle of a batch.\n"
                               "Call `learn.to_fp32()`, `to_fp16()` or `to_bf16()`, which take effect at its end, or "
                               "remove it at `after_batch`, `before_epoch`, `before_train`, `after_train` or "
                               "`after_epoch`.")
        self._loop.stack.close()
        self._end_fit()
        self._fp32_modules.take_off()                            # also in a fit that goes on in another precision
        for name in ('_with_events', 'scaler'): self._learn.__dict__.pop(name, None)
        self._learn = None

    def replace(self,
        learn: Learner, # The learner that this callback is on
        cb: MixedPrecision | None, # The precision callback to use from now on; None for fp32
    ) -> None:
        "Have `cb` take this callback's place on the learner: now, or when the batch under way has ended."
        self._replacement = (learn, cb) if self._loop.in_batch else None
        if self._loop.in_batch: return
        loop, self._loop = self._loop, _Loop()
        learn.remove_cb(self)
        if cb is None: return
        learn.add_cb(cb)
        cb._loop = loop

    # -- the scopes of fastai's loop: a fit, an epoch, its training and validation, a batch, its backward pass and step

    def _with_events(self, f: Callable, event_type: str, ex: type[Exception], final: Callable = noop) -> None:
        "Run the learner's own `_with_events`; when the outermost scope ends, nothing is left open, however it ends."
        if self._loop.depth: return self._scope(f, event_type, ex, final)
        learn, device_type = self._learn, training_device(self._learn).type
        # An interrupt between two lines of `torch.autocast.__enter__` leaves what no `__exit__` mends.
        restored: Any = AutocastState(device_type) if autocast_available(device_type) else nullcontext()
        ends_fit = event_type in ('fit', 'epoch', 'train', 'validate')   # a user's own loop of batches goes on
        if ends_fit: self._end_fit()                             # one that such a loop left open
        with restored, self._fp32_modules.kept(learn.model):
            try:
                self._scope(f, event_type, ex, final)
                if ends_fit: (precision_callback(learn) or self)._end_fit()   # another one may have replaced this
            except BaseException:
                (precision_callback(learn) or self)._end_fit(failed=True)
                raise

    def _scope(self, f: Callable, event_type: str, ex: type[Exception], final: Callable) -> None:
        "Run fastai's `_with_events` with a stack for the contexts that events inside enter."
        learn, loop = self._learn, self._loop
        outer, is_step = vars(loop).copy(), event_type == 'step'
        try:
            loop.stack, loop.depth, loop.in_batch = ExitStack(), loop.depth + 1, loop.in_batch or event_type == 'batch'
            loop.takes_plain_step = is_step and getattr(f, '__func__', None) is Learner._step
            run = partial(self._step, f) if is_step else f
            with loop.stack: type(learn)._with_events(learn, run, event_type, ex, final)
            if is_step and type(learn)._do_grad_opt is Learner._do_grad_opt: self._scaling.expect_zero_grad()
        finally:
            vars(loop).update(outer)
            if self._replacement and not loop.in_batch: self.replace(*self._replacement)

    def _step(self, step: Callable[[], object]) -> None:
        "Take the optimizer's step; a subclass may do something around it."
        self._scaling.step(step)

    # -- a fit

    def _decide(self, device: torch.device) -> AMPMode | None:
        "Return the mode on `device`; None for fp32. Raises a `ValueError` if it does not run there."
        if self.amp_mode == 'auto': return fastest_native(device)
        mode = AMPMode(self.amp_mode)
        check_supported(mode, device)
        return mode

    def _begin_fit(self) -> None:
        "Begin a fit, unless one is under way: decide the precision, check that the model runs in it, make the scaler."
        if self.device is not None: return
        learn = self._learn
        self._refuse_others(learn)                               # fastai's own may have been added since
        device = model_device(learn.model, training_device(learn))
        self.mode = mode = self._decide(device)
        if mode is not None: self._check_model(mode, device)
        scaled = mode is not None and mode.needs_loss_scaling
        self.device, learn.scaler = device, self._scaling.start(device.type, scaled, lambda: learn.opt)
        self._fp32_modules.put_on(learn.model)
        self._training_is_checked = False
        watched = mode is not None and self.on_overflow != 'ignore' and 'lr_finder' not in vars(learn)
        if watched and self.watch_class is not None: self._watch = self.watch_class(self)

    def _end_fit(self, failed: bool = False) -> None:
        "End the fit under way: keep scale and history; unscale the gradients of an unfinished accumulation."
        if self.device is None: return
        learn, watch = self._learn, self._watch
        if not self._fp32_modules.depth: self._fp32_modules.take_off()
        message = self._scaling.end(learn.opt, learn.model, failed, keep='lr_finder' not in vars(learn),
                                    argument='init_scale' if 'init_scale' in self.arguments else 'loss_scale')
        learn.scaler = self._watch = self.device = None          # last: an interrupt before this ends the fit anew
        said = watch is not None and watch.has_warned            # one message for one cause
        if message and not said and self.on_overflow != 'ignore': warn_user(message)

    def _check_model(self, mode: AMPMode, device: torch.device) -> None:
        model, kept = self._learn.model, self.fp32_module_names
        check_layers(mode, device, qualified_names(model), partial(covers, kept))
        check_data_parallel(mode, model, kept)

    def _check_training(self) -> None:
        "Check what only training needs, once in a fit; put the optimizer's state where the parameters are."
        self._training_is_checked = True
        check_training(self._learn, self.mode, self._scaling.on, warn_of_mode=not self._has_trained)
        if self._learn.opt is not None: place_state(self._learn.opt)

    def _autocast(self, device: torch.device, mode: AMPMode | None) -> AbstractContextManager:
        if mode is None: return nullcontext()
        return torch.autocast(device.type, dtype=mode.dtype, cache_enabled=_USE_CACHE)

    # -- the events of fastai's loop

    def __call__(self, event_name: str) -> None:
        "Call the event's method, then the watch's; without `Callback`'s look-ups, which each batch has eight times."
        if self._learn is None: return                           # taken off by a callback before this one
        event = getattr(type(self), event_name, None)
        if event is not None and self.run: event(self)
        if (look := getattr(self._watch, event_name, None)) is not None: look()
        if event_name == 'after_fit': self.run = True

    def before_fit(self):
        "Begin the fit; raise before a batch is drawn if the precision cannot be used."
        if self._loop.depth: self._begin_fit()
        else: self._end_fit()                                    # `validate()` alone: its first batch begins the fit

    def before_train(self):
        "Check what only training needs."
        self._begin_fit()                                        # if added during a fit
        self._fp32_modules.put_on(self.learn.model)              # a callback may have exchanged a module
        if not self._training_is_checked: self._check_training()

    def before_batch(self):
        "Enter autocast."
        self._begin_fit()
        learn = self.learn
        if self.mode is not None and learn.model is not self._fp32_modules.model:    # exchanged in the fit
            try: self._fp32_modules.put_on(learn.model)
            except ValueError as e:
                if learn.training: raise
                warn_user(f'{e}\nThe model that is validated keeps no modules in fp32.')
        has_optimizer = learn.opt is not None                    # unlike a copy that is only looked at
        if learn.training and has_optimizer and not self._training_is_checked: self._check_training()
        if not self._loop.depth: self._loop.stack.close()        # a loop of events alone, whose last batch failed
        if self.mode is None: return
        torch.clear_autocast_cache()                             # an autocast around the fit keeps casts of old weights
        self._loop.stack.enter_context(self._autocast(self.device, self.mode))

    def after_pred(self):
        "Give the loss and the metrics fp32."
        if self.mode is not None: self.learn.pred = to_fp32(self.learn.pred)

    def after_loss(self):
        "Exit autocast; record and back-propagate the loss in fp32."
        self._loop.stack.close()
        if self.mode is None: return
        for name in ('loss_grad', 'loss') if len(self.learn.yb) else ():     # else an earlier batch's
            value = self.learn.__dict__.get(name)
            if torch.is_tensor(value) and is_half(value): setattr(self.learn, name, value.float())

    def before_backward(self):
        "Scale the loss."
        if self._scaling.on: self.learn.loss_grad = self._scaling.scale(self.learn.loss_grad, self.learn.opt)

    def before_step(self):
        "Unscale the gradients; hold the step back if one is not finite, unless the optimizer skips on the device."
        if not self._scaling.on: return
        self._scaling.unscale(self.learn.opt, may_skip_on_device=self._loop.takes_plain_step)
        if self._scaling.held_back: raise CancelStepException()

    def after_cancel_step(self):
        "Leave the scale alone if another callback called the step off."
        if not self._scaling.held_back: self._scaling.cancel()

    def after_step(self):
        "Let the scale grow or back off."
        self._scaling.update()

    def after_cancel_batch(self):
        "Exit autocast before callbacks of a higher order run; a step that was under way is called off."
        self._loop.stack.close()
        self._scaling.cancel()

    def after_batch(self):
        "Exit autocast if an event was left out; say which modules to keep in fp32 were not used."
        self._loop.stack.close()
        self._loop.in_batch = False                              # from here on a callback can be replaced at once
        if self._has_trained or not self.learn.training: return
        self._has_trained = True
        for name, parent in self._fp32_modules.never_called().items():
            warn_user(f"fp32_modules: '{name}' was not called in the first batch. If it never is, keeping it does "
                      "nothing: the module around it may use its weights directly, as MultiheadAttention does with "
                      f"out_proj.\nKeep '{parent}' instead.")

    def after_train(self):
        "Read what the device decided in this epoch: fastai's Recorder waits for it here anyway."
        self._scaling.read()

    def after_fit(self):
        "End the fit, unless this is the event of a `validate()` inside it."
        if self._loop.depth < 2: self._end_fit()


def precision_callback(
    learn: Learner,
) -> MixedPrecision | None:
    "Return the learner's precision callback; None in plain fp32."
    return next((cb for cb in learn.cbs if isinstance(cb, MixedPrecision)), None)


# `delegates` put fastai's own signature on the base class, where `inspect.signature` would find it first.
MixedPrecision.__signature__ = inspect.signature(partial(MixedPrecision.__init__, None))  # type: ignore
