"""`MixedPrecision`: the callback that enters what a precision names, in fastai's loop.

    before_fit           opens a `Fit`: what the precision names around a fit
    before_train         checks what only training needs
      before_batch       enters autocast in the batch's scope
      after_loss         closes that scope
      before_backward    scales the loss
      before_step        unscales the gradients, and cancels the step if one is not finite
      after_step         updates the scale
    after_fit            closes the `Fit`

After an exception the scopes in `loop.py` close what is open.
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from fastai.callback.core import CancelStepException
from torch.amp import GradScaler

from ..common import check_count, model_device, refuse_unknown, training_device, warn_user
from ..convert import half_to_float, is_half, map_tensors
from ..precisions import PRECISIONS, AMPMode, Auto, Precision, each_precision, find_precision, parameters_of
from ..precisions.fp16 import FP16
from ..precisions.fp32_modules import Forward, Replaced, warn_of_unused
from ..precisions.scalers import SCALING
from .fit import Fit
from .loop import in_batch
from .scaling import StepHistory
from .state import PrecisionState

_ON_OVERFLOW = ('warn', 'fix', 'raise', 'ignore')
WATCHERS: list[Callable[[MixedPrecision], Any]] = []             # each makes an object with events of its own


class MixedPrecision(PrecisionState):
    """Callback that trains in a precision, with autocast and loss scaling.

    autocast covers the forward pass and its loss, in training and validation; predictions, loss and metrics are fp32.
    In fp16 a `GradScaler` scales the loss, and gradients are unscaled before `before_step` of callbacks of a higher
    order. Steps with non-finite gradients are skipped by raising `CancelStepException`; torch's fused Adam, AdamW and
    SGD skip on the GPU instead, without synchronizing and without `after_cancel_step`. `skipped` covers both.

    Raises `TypeError` or `ValueError` at construction for an argument that cannot be used, and `ValueError` when `fit`
    starts if the device, the model or the optimizer does not support the precision.

    Source: https://docs.pytorch.org/docs/stable/amp.html.
    """
    order = 10  # after TrainEvalCallback (-10) moves the model; between GradientAccumulation (6) and GradientClip (11)
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
        self.precision = _precision_from(amp_mode, *args, **kwargs)
        self.on_overflow, self.max_skips = on_overflow, max_skips
        if on_overflow not in _ON_OVERFLOW:
            raise ValueError(f'on_overflow={on_overflow!r} cannot be used: it must be one of {_ON_OVERFLOW}.')
        check_count('max_skips', max_skips, 1)
        self.current = None if isinstance(self.precision, Auto) else self.precision   # in use; None: undecided
        self.history = StepHistory()
        self.watchers = [make(self) for make in WATCHERS]
        self.all_fixes = []
        self._lasting: dict[type[Forward], Replaced] = {}        # forwards that `amp_context` left in place

    def __getstate__(self) -> dict[str, Any]:                    # a copy is outside of a fit
        return {**vars(self), 'fit': None, '_lasting': {}}

    @contextmanager
    def amp_context(self) -> Iterator[None]:
        "Run code in this precision, on the device that training uses."
        fit = self.fit or Fit(self.learn, self.precision, training_device(self.learn))
        with ExitStack() as stack:
            for context in fit.precision.around_fit(fit.model) if self.fit is None else []:
                stack.push(partial(self._leave_later, context))
                context.__enter__()
            for context in fit.batch_contexts(): stack.enter_context(context)
            yield

    def _leave_later(self, context: Any, *error: Any) -> None:
        # A backward pass outside of `amp_context` may compute activations again. For it, replaced forwards stay until
        # the next `amp_context` or fit.
        if not (torch.is_grad_enabled() and isinstance(context, Replaced)): return context.__exit__(*error)
        former = self._lasting.get(context.kind)
        self._lasting[context.kind] = context
        if former is not None: former.__exit__()

    def _leave_now(self) -> None:
        for context in self._lasting.values(): context.__exit__()
        self._lasting = {}

    def scale_loss(self,
        loss: torch.Tensor, # The loss of a backward pass of your own, fp32
    ) -> torch.Tensor: # To call `.backward()` on
        "Return `loss` times the loss scale, in a batch of a fit; without loss scaling `loss` itself."
        return loss if self._scaling is None else self._scaling.scale_loss(loss)

    # -- a fit

    def open(self) -> Fit:
        "Begin a fit: check that the model runs in the precision, and enter what lasts for the fit."
        learn = self.learn
        self.refuse_others(learn)
        self._leave_now()
        fit = Fit(learn, self.precision, model_device(learn.model, training_device(learn)))
        self.current, self.fit = fit.precision, fit              # from here on `close` undoes it
        fit.open(self.history, self.on_overflow == 'fix')
        learn.scaler = GradScaler('cpu', enabled=False) if fit.scaling is None else fit.scaling.scaler
        return fit

    def close(self, failed: bool = False) -> None:
        "End the fit that is open, if there is one; a second call finishes what an interrupt left of it."
        fit = self.fit
        self._leave_now()
        if fit is None: return
        fit.close(failed)
        fit.learn.scaler = self.fit = None

    # -- the events of fastai's loop; those of a batch run only while a fit is open

    def before_fit(self):
        "Begin the fit before the first batch is loaded, so that a precision that cannot be used raises here."
        if self.learn._scopes and self.fit is None: self.open()   # `validate()` alone begins with its first batch

    def before_train(self):
        "Check what only training needs."
        fit = self.fit or self.open()                            # it may be added during a fit
        self.epoch_start = len(self.history.read())
        fit.use_model()
        fit.open_training(warn_of_emulation=not self._has_trained)

    def before_validate(self):
        "Keep autocast's casts of the weights until the validation ends: nothing changes the weights meanwhile."
        fit = self.fit or self.open()
        fit.casts = None                                         # of an earlier validation
        if not fit.precision.dtype: return
        kind = fit.device.type                                   # the cache lives as long as any autocast is open
        same = torch.autocast(kind, enabled=torch.is_autocast_enabled(kind))
        self.learn._scopes[-1].enter_context(same)

    def before_batch(self):
        "Enter autocast."
        fit, learn = self.fit or self.open(), self.learn
        if not learn._scopes:
            raise RuntimeError("A batch's events were called outside of `Learner.one_batch`: autocast would stay on.\n"
                               'Call `learn.one_batch(i, batch)`, or call events yourself without a precision and run '
                               'the model inside `learn.amp_context()`.')
        if learn.model is not fit.model: fit.use_model()
        if learn.training and learn.opt is not None:
            fit.open_training(warn_of_emulation=not self._has_trained)
            if fit.scaling is not None: fit.scaling.start()
        fit.clear_old_casts()
        scope = learn._scopes[-1]
        scope.around_step = fit.precision.around_step
        for context in fit.batch_contexts(): scope.enter_context(context)

    def after_pred(self):
        "Give the loss and the metrics fp32."
        if self.fit.precision.dtype: self.learn.pred = map_tensors(half_to_float, self.learn.pred)

    def after_loss(self):
        "Exit autocast; record and back-propagate the loss in fp32."
        learn = self.learn
        learn._scopes[-1].close()
        if not self.fit.precision.dtype: return
        for name in 'loss', 'loss_grad':
            loss = vars(learn).get(name)                         # without targets an earlier batch's, already fp32
            if torch.is_tensor(loss) and is_half(loss): setattr(learn, name, loss.float())

    def before_backward(self):
        "Scale the loss."
        if scaling := self.fit.scaling: self.learn.loss_grad = scaling.scale_loss(self.learn.loss_grad)

    def before_step(self):
        "Unscale the gradients; cancel the step if one is not finite, unless the optimizer skips it on the device."
        scaling = self.fit.scaling
        if scaling is None: return
        scaling.unscale()
        if scaling.found_inf is True: raise CancelStepException()

    def after_cancel_step(self):
        "Keep the scale if another callback cancelled the step."
        if (scaling := self._scaling) and scaling.found_inf is not True: scaling.cancel()

    def after_step(self):
        "Record the step, and update the scale."
        if scaling := self.fit.scaling: scaling.update()

    def after_cancel_batch(self): self.learn._scopes[-1].close()   # before callbacks of a higher order run

    def after_batch(self):
        "Exit autocast if an event was left out; warn of modules kept in fp32 that were not called."
        self.learn._scopes[-1].close()
        if self._has_trained or not self.learn.training: return
        self._has_trained = True
        warn_of_unused(self.fit.precision.kept_in_fp32(self.fit.model))   # a callback may have exchanged it since

    def after_train(self):
        "Read what the device decided in this epoch: fastai's Recorder synchronizes here anyway."
        if scaling := self._scaling: scaling.read()

    def after_fit(self):
        "End the fit before callbacks of a higher order load weights; not at the event of a `validate()` inside it."
        if len(self.learn._scopes) > 1 or in_batch(self.learn): return
        is_silent = self.on_overflow == 'ignore' or self._scaling is None or self.fit.has_warned
        if not is_silent and (message := self._scaling.skip_message()): warn_user(message)
        self.close()


# -- from names and arguments to a precision

def _precision_from(amp_mode: Any, *args: Any, **kwargs: Any) -> Precision: # Arguments as `MixedPrecision` gets them
    """Return the precision that `amp_mode` names, with those of the arguments that it has.

    fastai gives `GradScaler`'s arguments to either precision, so bf16 ignores them. Raises `TypeError` for others.
    """
    if isinstance(amp_mode, Precision):
        if args or kwargs: raise TypeError(f'{amp_mode!r} is already constructed: pass these arguments to its class.')
        return amp_mode
    if len(args) > len(SCALING): raise TypeError(f'MixedPrecision has {len(SCALING) + 1} positional arguments.')
    positional = dict(zip(SCALING, args))
    if twice := [name for name in positional if name in kwargs]:
        raise TypeError(f'MixedPrecision got two values for {twice[0]!r}. Leave one out.')
    kwargs |= positional
    is_auto = isinstance(amp_mode, str) and amp_mode.lower() == 'auto'
    cls = Auto if is_auto else find_precision(amp_mode)
    name, own = ('auto', parameters_of_all(only_automatic=True)) if is_auto else (cls.name, parameters_of(cls))
    FP16.from_arguments(kwargs)                                  # checks the arguments of GradScaler
    if wrong := [arg for arg in kwargs if arg in parameters_of_all() and arg not in {**own, **SCALING}]:
        raise ValueError(f'{wrong[0]}={kwargs[wrong[0]]!r} cannot be used with amp_mode={name!r}, which has '
                         f"{', '.join(own) or 'no arguments'}.\nLeave it out, or use another precision.")
    refuse_unknown('MixedPrecision', parameters_of_all(), kwargs)
    return Auto(**kwargs) if is_auto else cls.from_arguments(kwargs)


def parameters_of_all(only_automatic: bool = False) -> dict[str, inspect.Parameter]:
    "Return the parameters of all precisions by name, or of those that `to_amp()` may select; fp16's come first."
    found: dict[str, inspect.Parameter] = {}
    for cls in PRECISIONS['fp16'], *PRECISIONS.values():
        if only_automatic and not cls.automatic: continue
        for name, p in parameters_of(cls).items(): found.setdefault(name, p)
    return {name: p for name, p in found.items() if name != 'amp_mode'}


CALLBACK_PARAMETERS = {name: p for name, p in inspect.signature(MixedPrecision.__init__).parameters.items()
                       if name in ('on_overflow', 'max_skips')}


def _sign(cls: type[Precision]) -> None:
    "Give `MixedPrecision` the parameters of all precisions. (fastai's `delegates` put its own on the base class.)"
    first = inspect.signature(MixedPrecision.__init__).parameters['amp_mode']
    rest = [p if name in SCALING else p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, p in {**parameters_of_all(), **CALLBACK_PARAMETERS}.items()]
    MixedPrecision.__signature__ = inspect.Signature([first, *rest])   # type: ignore[attr-defined]


each_precision(_sign)
