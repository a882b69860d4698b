"`Fit`: the contexts that a precision has open on a learner, from the first batch of a fit or validation to its end."
from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from fastai.learner import Learner

from ..common import warn_user
from ..compat import BackwardWithoutAutocast, is_compiled
from ..precisions import Precision
from ..precisions.fp32_modules import Replaced
from ..precisions.scalers import UnitScaler
from .checks import check_model, check_training
from .optimizers import place_state
from .scaling import Scaling, StepHistory


class Fit:
    """One fit or validation: the contexts that are open until its end, and facts about it.

    Contexts are left in reverse order. Each `__exit__` can be called twice, and after an interrupted `__enter__`, so a
    second `close` finishes what an interrupt left.
    """
    def __init__(self, learn: Learner, precision: Precision, device: torch.device):
        self.learn, self.precision, self.device = learn, precision.on(device), device
        self.model, self.is_compiled = learn.model, is_compiled(learn.model)
        # Not entered: at the end it restores what an interrupted batch has left.
        self.contexts: list[Any] = [BackwardWithoutAutocast()] if self.is_compiled else []
        self.scaling: Scaling | None = None
        self.is_training = self.has_warned = False               # training was checked; training was reported to fail
        self.casts: Any = None                                   # which weights autocast's cache holds, in a validation

    def enter(self, context: Any) -> None:
        "Enter `context` until the fit ends."
        self.contexts.append(context)                            # first: an interrupt inside `__enter__` is undone
        context.__enter__()

    def open(self,
        history: StepHistory, # To which loss scaling adds its steps
        skip_nonfinite: bool, # Skip steps that are not finite also where the loss is not scaled
    ) -> None:
        "Enter what the precision names around a fit."
        if self.precision.dtype: check_model(self.precision, self.model)
        for context in self.precision.around_fit(self.model): self.enter(context)
        scaler = self.precision.scaler(self.device)
        if scaler is None and self.precision.dtype and skip_nonfinite: scaler = UnitScaler(self.device.type, 1.)
        if scaler is not None: self.scaling = Scaling(scaler, self.learn, self.device, history)

    def use_model(self) -> None:
        "Use the learner's model, which a callback may have exchanged or changed."
        learn = self.learn
        self.model, self.is_compiled = learn.model, is_compiled(learn.model)
        try:
            for context in self.contexts:
                if isinstance(context, Replaced): context.add(self.model)
        except ValueError as e:
            if learn.training: raise
            warn_user(f'{e}\nThe model that is validated keeps no modules in fp32.')
        if self.scaling is not None and learn.training: self.scaling.watch_buffers(self.model)

    def open_training(self, warn_of_emulation: bool) -> None:
        "Check what only training needs, and move the optimizer's state to the parameters; only once."
        if self.is_training: return
        self.is_training = True
        self.precision.check_training(self.learn)
        check_training(self, warn_of_emulation)
        if self.learn.opt is not None: place_state(self.learn.opt)
        for context in self.precision.around_training(self.learn): self.enter(context)

    def clear_old_casts(self) -> None:
        "Clear autocast's cache of casts, unless it holds those of the same weights, from a validation's last batch."
        casts = None if torch.is_grad_enabled() else (self.model, sum(p._version for p in self.model.parameters()))
        if casts is None or casts != self.casts: torch.clear_autocast_cache()
        self.casts = casts

    def batch_contexts(self) -> list[AbstractContextManager]:
        "Return new contexts for a forward pass and its loss."
        contexts = self.precision.around_batch(self.device)
        return [BackwardWithoutAutocast(), *contexts] if contexts and self.is_compiled else contexts

    def close(self, failed: bool) -> None:
        "End loss scaling and leave all contexts, also if one raises."
        with ExitStack() as stack:
            for context in self.contexts: stack.push(context.__exit__)
            if self.scaling is not None: stack.callback(self.scaling.end, failed)
