"""`MixedPrecision`: the callback that enters what a precision names, in fastai's loop.

In a batch: `before_batch` enters autocast, `after_loss` exits it, `before_backward` scales the loss, `before_step`
unscales the gradients, `after_step` updates the scale. `loop.py` closes what an exception leaves open.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from fastai.callback.core import CancelStepException
from fastai.learner import Learner
from torch import nn
from torch.amp import GradScaler

from ..common import is_number, model_device, refuse_unknown, training_device, warn_user
from ..compat import BackwardWithoutAutocast, is_compiled
from ..convert import is_half, to_fp32
from ..precisions import PRECISIONS, AMPMode, Auto, Precision, each_precision, find_precision, parameters_of
from ..precisions.fp16 import SCALING
from ..precisions.fp32_modules import Replaced
from ..precisions.scalers import UnitScaler
from .checks import check_model, check_training
from .loop import LoopCallback, in_batch, open_scopes
from .optimizers import place_state
from .scaling import Scaling, StepHistory

__all__ = ['CALLBACK_PARAMETERS', 'ON_OVERFLOW', 'WATCHERS', 'Fit', 'MixedPrecision', 'precision_callback']

ON_OVERFLOW = ('warn', 'fix', 'raise', 'ignore')
WATCHERS: list[Callable[[MixedPrecision], Any]] = []             # each makes an object with events; `insight` adds one


class Fit:
    """What is open in one fit or validation: the contexts that last until its end, and facts about it.

    The contexts are closed in reverse order. Each `__exit__` can be called twice, and after an interrupted `__enter__`,
    so a second `close` finishes what an interrupt left.
    """
    def __init__(self, learn: Learner, precision: Precision, device: torch.device):
        self.learn, self.precision, self.device = learn, precision, device
        self.model: Any = None                                   # the one that `around` was given
        self.contexts: list[Any] = []
        self.around: list[Any] = []                              # those of them with `add(model)`
        self.batch_contexts: list[Any] = []                      # around a forward pass
        self.scaling: Scaling | None = None
        self.is_training = self.has_warned = False               # training was checked; training was reported to fail
        self.casts: Any = None                                   # which weights autocast's cache holds, in a validation

    def enter(self, context: Any) -> Any:
        "Enter `context` until the fit ends."
        self.contexts.append(context)                            # first: an interrupt inside `__enter__` is undone
        context.__enter__()
        return context

    def close(self) -> None:
        "Leave all contexts, also if one raises."
        with ExitStack() as stack:
            for context in self.contexts: stack.push(context.__exit__)


class MixedPrecision(LoopCallback):
    """Trains in a precision, on the device of the learner's data.

    autocast covers the forward pass and its loss, in training and validation; predictions, loss and metrics are fp32.
    In fp16 a `GradScaler` scales the loss, and gradients are unscaled before `before_step` of callbacks of a higher
    order. Steps with non-finite gradients are skipped by raising `CancelStepException`; torch's fused Adam, AdamW and
    SGD skip on the GPU instead, without synchronizing and without `after_cancel_step`. `skipped` covers both.

    Raises `TypeError` or `ValueError` at construction for an argument that cannot be used, and `ValueError` when `fit`
    starts if the device, the model or the optimizer does not support the precision.

    Source: https://docs.pytorch.org/docs/stable/amp.html.
    """
    order = 10  # after TrainEvalCallback (-10) moves the model; between GradientAccumulation (6) and GradientClip (11)
    fixes: Any = ()                                              # what `on_overflow='fix'` changed, in all fits
    epoch_start = 0                                              # steps in the history when the epoch began
    _has_trained = False                                         # in any fit
    has_exported = False                                         # `export` has said that it writes fp32
    gradient_norm: Any = 0.                                      # of the newest step, for the metric of this name

    def __init__(self,
        amp_mode: str | AMPMode | torch.dtype | Precision = AMPMode.FP16, # A precision or its name; 'auto': by device
        *args: Any, # The first arguments of `to_fp16`, as in fastai: `init_scale`, `growth_factor` ...
        on_overflow: str = 'warn', # When training fails: 'warn', 'fix', 'raise' (`FloatingPointError`) or 'ignore'
        max_skips: int = 16, # Number of consecutive skipped steps after which training counts as failed
        **kwargs: Any # Arguments of the precision, as in `to_fp16` and the others
    ):
        self.precision = precision_from(amp_mode, *args, **kwargs)
        self.on_overflow, self.max_skips = on_overflow, max_skips
        if on_overflow not in ON_OVERFLOW:
            allowed = ', '.join(map(repr, ON_OVERFLOW))
            raise ValueError(f'on_overflow={on_overflow!r} cannot be used: it must be one of {allowed}.')
        if not is_number(max_skips, int) or max_skips < 1:
            raise ValueError(f'max_skips={max_skips!r} cannot be used: it must be an integer of at least 1, the number '
                             'of consecutive skipped steps after which training counts as failed.')
        self.current = None if isinstance(self.precision, Auto) else self.precision   # in use; None: undecided
        self.history = StepHistory()
        self.watchers = [make(self) for make in WATCHERS]
        self.fixes = []
        self._lasting: list[Replaced] = []                       # forwards that `amp_context` left in place

    def __getstate__(self) -> dict[str, Any]:                    # a copy is outside of a fit
        return {**vars(self), 'fit': None, '_lasting': []}

    def __repr__(self) -> str:
        name = repr(self.precision)
        if isinstance(self.precision, Auto) and self.current is not None: name += f': {self.current.name}'
        return f"{type(self).__name__}({name}{'' if self.scale is None else f', scale={self.scale:g}'})"

    # -- what a user reads

    @property
    def amp_mode(self) -> Any: # An `AMPMode`, or 'auto'
        "The precision that was asked for."
        return 'auto' if isinstance(self.precision, Auto) else self.precision.mode
    @property
    def mode(self) -> AMPMode | None:
        "The precision in use; None for fp32, and for 'auto' before the first fit."
        return None if self.current is None else self.current.mode
    @property
    def arguments(self) -> dict[str, Any]:
        "The arguments by name: the precision's, defaults included, and the callback's own."
        return {'amp_mode': self.amp_mode, **self.precision.arguments, 'on_overflow': self.on_overflow,
                'max_skips': self.max_skips}
    @property
    def scale(self) -> float | None:
        "The loss scale now; None without loss scaling. Synchronizes with the device that the scale is on."
        return self.state_dict().get('scale')
    @property
    def scales(self) -> list[float]:
        "The loss scale at each attempted optimizer step since the callback was added, without those of `lr_find`."
        return self.history.scales()
    @property
    def skips(self) -> list[bool]:
        "For each entry of `scales`, True if that step was skipped because a gradient was not finite."
        return self.history.skips()
    @property
    def n_skipped(self) -> int:
        "The number of skipped steps."
        return self.history.n_skipped()
    @property
    def skipped(self) -> bool:
        "Whether the most recent step was skipped. Available from `before_step` (order > 10). May synchronize."
        return self._scaling is not None and bool(self._scaling.found_inf)
    @property
    def skips_in_a_row(self) -> int:
        "The number of skipped steps in a row up to now in this fit, as far as the host knows: never synchronizes."
        return 0 if self._scaling is None else self._scaling.skips_in_a_row
    @property
    def fp32_module_names(self) -> list[str]:
        "Names of the modules kept in fp32, as `fp32_modules` matches them in the learner's model."
        return [] if self._learn is None else list(self.precision.kept.check(self._learn.model))

    @contextmanager
    def amp_context(self) -> Iterator[None]:
        "Run code in this precision, on the device that training uses."
        learn, fit = self.learn, self.fit
        device = training_device(learn) if fit is None else fit.device
        precision = self._choose(device) if fit is None else fit.precision
        with ExitStack() as stack:
            for context in precision.around_fit(learn.model) if fit is None else []:
                stack.push(partial(self._leave_later, context))
                context.__enter__()
            for context in self._new_batch_contexts(precision, device, learn.model): stack.enter_context(context)
            yield

    def _leave_later(self, context: Any, *error: Any) -> None:
        # A backward pass outside of `amp_context` may compute activations again: for it, replaced forwards stay.
        if torch.is_grad_enabled() and isinstance(context, Replaced): self._lasting.append(context)
        else: context.__exit__(*error)

    def _release(self) -> None:
        for context in self._lasting: context.__exit__()
        self._lasting = []

    def scale_loss(self,
        loss: torch.Tensor, # The loss of a backward pass of your own, fp32
    ) -> torch.Tensor: # To call `.backward()` on
        "Return `loss` times the loss scale, in a batch of a fit; without loss scaling `loss` itself."
        return loss if self._scaling is None else self._scaling.scale_loss(loss)

    # -- what a checkpoint holds

    @property
    def _resolved(self) -> Precision:
        return self.current or (self.precision if self._learn is None else self._choose(training_device(self._learn)))

    @property
    def state_key(self) -> str:
        "The key of the precision's state in a file."
        return self._resolved.state_key

    def state_dict(self) -> dict[str, Any]: # In fp16 scale, its rules and its growth tracker
        "Return the precision's state as plain numbers, at any time; empty in bf16 and fp32."
        return self._resolved.state_dict()

    def load_state_dict(self,
        state: dict[str, Any] | None, # What `state_dict` returned; None to start from the arguments again
    ) -> None:
        """Restore the precision's state, before, during or after a fit. Ignored with a fixed loss scale.

        Raises `ValueError` for a state that cannot be used, and changes nothing then.
        """
        precision, before = self._resolved, self.scale
        if isinstance(self.precision, Auto): self.current = precision
        precision.load_state_dict(state)
        if self._scaling is not None and before: self._scaling.follow((self.scale or 0) / before)

    # -- a fit

    @property
    def _scaling(self) -> Scaling | None: return None if self.fit is None else self.fit.scaling

    def _choose(self, device: torch.device) -> Precision: return self.precision.on(device)

    def open(self) -> Fit:
        "Begin a fit, unless one is open: check that the model runs in the precision, and enter what lasts for the fit."
        if self.fit is not None: return self.fit
        learn = self.learn
        self.refuse_others(learn)
        self._release()
        device = model_device(learn.model, training_device(learn))
        self.current = self._choose(device)
        fit = Fit(learn, self.current, device)
        if self.current.dtype: check_model(self.current, learn.model)
        self.fit = fit                                           # from here on `close` undoes it
        fit.around = [fit.enter(context) for context in self.current.around_fit(learn.model)]
        fit.model = learn.model
        fit.batch_contexts = self._new_batch_contexts(self.current, device, fit.model)
        scaler = self.current.scaler(device)
        if scaler is None and self.current.dtype and self.on_overflow == 'fix':
            scaler = UnitScaler(device.type, init_scale=1.)      # skips steps that are not finite
        if scaler is not None:
            fit.scaling = Scaling(scaler, learn, device, self.history)
        learn.scaler = scaler or GradScaler('cpu', enabled=False)
        return fit

    def close(self, failed: bool = False) -> None:
        "End the fit that is open, if there is one; what an interrupt left of it is finished by a second call."
        fit = self.fit
        self._release()
        if fit is None: return
        try:
            if fit.scaling is not None: fit.scaling.end(failed)
        finally:
            fit.close()
            fit.learn.scaler = self.fit = None

    def _use_model(self, fit: Fit) -> None:
        fit.model, learn = self.learn.model, self.learn
        fit.batch_contexts = self._new_batch_contexts(fit.precision, fit.device, fit.model)
        try:
            for context in fit.around: context.add(fit.model)
        except ValueError as e:
            if learn.training: raise
            warn_user(f'{e}\nThe model that is validated keeps no modules in fp32.')
        if fit.scaling is not None and learn.training: fit.scaling.watch_buffers(fit.model)

    @staticmethod
    def _new_batch_contexts(precision: Precision, device: torch.device, model: nn.Module) -> list[Any]:
        contexts = precision.around_batch(device)
        return [BackwardWithoutAutocast(), *contexts] if contexts and is_compiled(model) else contexts

    def _open_training(self, fit: Fit) -> None:
        "Check what only training needs, once in a fit; put the optimizer's state where the parameters are."
        fit.is_training, learn = True, self.learn
        fit.precision.check_training(learn)
        check_training(learn, fit, warn_of_emulation=not self._has_trained)
        if learn.opt is not None: place_state(learn.opt)
        for context in fit.precision.around_training(learn): fit.enter(context)

    # -- the events of fastai's loop

    def __call__(self, event_name: str) -> None:
        super().__call__(event_name)
        if self._learn is None: return
        for watcher in self.watchers:
            if event := getattr(watcher, event_name, None): event()

    def before_fit(self):
        "Begin the fit; raise before a batch is drawn if the precision cannot be used."
        if open_scopes(self.learn): self.open()                  # `validate()` alone begins with its first batch

    def before_train(self):
        "Check what only training needs."
        fit, self.epoch_start = self.open(), len(self.history)   # it may be added during a fit
        self._use_model(fit)                                     # a callback may have exchanged a module
        if not fit.is_training: self._open_training(fit)

    def before_validate(self):
        "Keep autocast's casts of the weights until the validation ends: nothing changes the weights meanwhile."
        fit = self.open()
        fit.casts = None                                         # of an earlier validation
        if not fit.batch_contexts: return
        kind = fit.device.type                                   # the cache lives as long as any autocast is open
        same = torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
        open_scopes(self.learn)[-1].enter(same)

    def before_batch(self):
        "Enter autocast."
        fit, learn, scopes = self.open(), self.learn, open_scopes(self.learn)
        if not scopes:
            raise RuntimeError("A batch's events were called outside of `Learner.one_batch`: autocast would stay on.\n"
                               'Call `learn.one_batch(i, batch)`, or call events by hand without a precision and run '
                               'the model inside `learn.amp_context()`.')
        if learn.model is not fit.model: self._use_model(fit)    # exchanged in the fit
        if learn.training and learn.opt is not None and not fit.is_training: self._open_training(fit)
        if learn.training and fit.scaling is not None: fit.scaling.start()
        casts = None if torch.is_grad_enabled() else (fit.model, sum(p._version for p in fit.model.parameters()))
        if casts is None or casts != fit.casts: torch.clear_autocast_cache()   # it may hold casts of old weights
        fit.casts = casts
        is_nested = sum(scope.kind == 'batch' for scope in scopes) > 1   # the batch around this one has entered these
        fresh = self._new_batch_contexts(fit.precision, fit.device, fit.model) if is_nested else fit.batch_contexts
        for context in fresh: scopes[-1].enter(context)

    def after_pred(self):
        "Give the loss and the metrics fp32."
        if self.fit is not None and self.fit.precision.dtype: self.learn.pred = to_fp32(self.learn.pred)

    def after_loss(self):
        "Exit autocast; record and back-propagate the loss in fp32."
        self._exit_autocast()
        if self.fit is None or not self.fit.precision.dtype: return
        for name in ('loss_grad', 'loss'):                       # without targets an earlier batch's, already fp32
            value = vars(self.learn).get(name)
            if torch.is_tensor(value) and is_half(value): setattr(self.learn, name, value.float())

    def _exit_autocast(self) -> None:
        if scopes := open_scopes(self.learn): scopes[-1].close()

    def before_backward(self):
        "Scale the loss."
        if self._scaling is not None: self.learn.loss_grad = self._scaling.scale_loss(self.learn.loss_grad)

    def before_step(self):
        "Unscale the gradients; hold the step back if one is not finite, unless the optimizer skips on the device."
        if self._scaling is None: return
        self._scaling.unscale()
        if self._scaling.held_back: raise CancelStepException()

    def around_step(self) -> AbstractContextManager:
        "Return a context for the optimizer's step."
        return ExitStack() if self.fit is None else self.fit.precision.around_step(self.learn)

    def after_cancel_step(self):
        "Leave the scale alone if another callback called the step off."
        if self._scaling is not None and not self._scaling.held_back: self._scaling.cancel()

    def after_step(self):
        if self._scaling is not None: self._scaling.update()

    def after_cancel_batch(self): self._exit_autocast()          # before callbacks of a higher order run

    def after_batch(self):
        "Exit autocast if an event was left out; name the modules to keep in fp32 that were not used."
        self._exit_autocast()
        if self._has_trained or not self.learn.training or self.fit is None: return
        self._has_trained = True
        self.fit.precision.kept.warn_of_unused()

    def after_train(self):
        "Read what the device decided in this epoch: fastai's Recorder synchronizes here anyway."
        if self._scaling is not None: self._scaling.read()

    def after_fit(self):
        "End the fit before callbacks of a higher order load weights; not at the event of a `validate()` inside it."
        if len(open_scopes(self.learn)) > 1 or in_batch(self.learn): return
        is_silent = self.on_overflow == 'ignore' or self._scaling is None or self.fit.has_warned
        if not is_silent and (message := self._scaling.skip_message()): warn_user(message)
        self.close()


def precision_callback(
    learn: Learner,
) -> MixedPrecision | None:
    "Return the learner's precision callback; None in plain fp32."
    return next((cb for cb in learn.cbs if isinstance(cb, MixedPrecision) and cb.learn is learn), None)


# -- from names and arguments to a precision

def precision_from(amp_mode: Any, *args: Any, **kwargs: Any) -> Precision: # Arguments as `MixedPrecision` gets them
    """Return the precision that `amp_mode` names, with those of the arguments that it has.

    fastai gives `GradScaler`'s arguments to either precision, so bf16 ignores them. Raises `TypeError` for others.
    """
    if isinstance(amp_mode, Precision):
        if args or kwargs: raise TypeError(f'{amp_mode!r} is built already: give it its arguments itself.')
        return amp_mode
    if len(args) > len(SCALING): raise TypeError(f'MixedPrecision has {len(SCALING) + 1} positional arguments.')
    kwargs |= dict(zip(SCALING, args))
    if isinstance(amp_mode, str) and amp_mode.lower() == 'auto':
        refuse_unknown('MixedPrecision', _parameters(), kwargs)
        return Auto(**kwargs)
    cls = find_precision(amp_mode)
    first = {name: value for name, value in kwargs.items() if name in parameters_of(PRECISIONS['fp16'])}
    PRECISIONS['fp16'](**first)                                  # which checks them
    if wrong := [name for name in kwargs if name in _parameters() and name not in {**parameters_of(cls), **SCALING}]:
        raise ValueError(f'{wrong[0]}={kwargs[wrong[0]]!r} cannot be used with amp_mode={cls.name!r}, which has '
                         f"{', '.join(parameters_of(cls)) or 'no arguments'}.\nLeave it out, or use another precision.")
    refuse_unknown('MixedPrecision', _parameters(), kwargs)
    if cls.name == 'half_weights': kwargs.pop('amp_mode', None)
    return cls(**{name: value for name, value in kwargs.items() if name in parameters_of(cls)})


def _parameters() -> dict[str, inspect.Parameter]:
    "Return the parameters of all precisions by name."
    found: dict[str, inspect.Parameter] = {}
    for cls in [PRECISIONS['fp16'], *PRECISIONS.values()]: found = {**parameters_of(cls), **found}
    order = [*parameters_of(PRECISIONS['fp16']), *found]
    return {name: found[name] for name in dict.fromkeys(order) if name != 'amp_mode'}


CALLBACK_PARAMETERS = {name: p for name, p in inspect.signature(MixedPrecision.__init__).parameters.items()
                       if name in ('on_overflow', 'max_skips')}


def _sign(cls: type[Precision]) -> None:
    "Give `MixedPrecision` the parameters of all precisions. (fastai's `delegates` put its own on the base class.)"
    first = inspect.signature(MixedPrecision.__init__).parameters['amp_mode']
    own = _parameters()
    by_name = {name: p for name, p in {**own, **CALLBACK_PARAMETERS}.items() if name not in SCALING}
    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in by_name.values()]
    MixedPrecision.__signature__ = inspect.Signature([first, *(own[n] for n in SCALING), *keyword])   # type: ignore


each_precision(_sign)
