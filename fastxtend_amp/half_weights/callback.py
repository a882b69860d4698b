"Training with half-precision weights and fp32 masters, as fastai v1's `to_fp16` did."
from __future__ import annotations

import inspect
from typing import Any

import torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from torch import nn

from ..callback import MixedPrecision
from ..mode import AMPMode
from .copies import WeightCopies
from .flat_masters import FlatMasters
from .modules import check_model
from .no_masters import LoweredWeights

__all__ = ['HalfWeights']

# Events between two batches of one step, and whose callbacks are known to leave the weights alone in them.
_BETWEEN = ('before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_cancel_backward', 'after_backward',
            'before_step', 'after_cancel_batch', 'after_batch')
_LEAVE_WEIGHTS = ('fastai.callback.', 'fastai.learner', 'fastxtend_amp.')


class HalfWeights(MixedPrecision):
    """Half-precision weights with fp32 masters, on top of autocast: the same numbers, with fewer casts.

    The model's parameters stay fp32: they are the masters that the optimizer steps on. autocast is on around the
    forward pass and the loss, as in `MixedPrecision`; but where it would cast a module's weights in each batch, that
    module finds half-precision copies inside its own forward, rewritten once for each step; in each batch, where a
    callback that is not fastai's could change weights in between. Nobody else meets a copy: gradients arrive on the
    masters, in fp32, and a model, a callback or a checkpoint sees fp32 parameters at all times.
    What a hook or a transform of the data writes into a weight's `.data` between two batches of a step is not seen.
    Linear layers, convolutions and attention have copies, if nothing else uses their weights; all other modules run
    as under autocast. The first batches of a fit are watched for that, without copies. autocast does all casts with
    `torch.compile`, and with PyTorch 2.9, where it keeps none; on a CPU, where its casts are as fast, in modules with
    fewer than 65,536 weights and in training without `GradientAccumulation`.

    While a batch is under way no other thread may run the model: it would meet the copies.

    Loss scaling, skipped steps, history and diagnosis are `MixedPrecision`'s.

    Source: Micikevicius et al., Mixed Precision Training, https://arxiv.org/abs/1710.03740, section 3.1.
    """
    def __init__(self,
        dtype: str | AMPMode | torch.dtype = AMPMode.BF16, # The weights' precision: 'bf16' or 'fp16'
        loss_scale: float | None = None, # A static loss scale; dynamic scaling if None (fp16)
        flat_master: bool = False, # Whether the optimizer steps on few flat tensors, unless it takes all at once anyway
        master_weights: bool = True, # Whether there are fp32 masters; else the optimizer steps on half weights
        fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules, predicates
        *,
        on_overflow: str = 'warn', # When training goes wrong: 'warn', 'raise' (`FloatingPointError`) or 'ignore'
        max_skips: int = 16, # Skipped steps in a row after which training counts as going wrong (fp16)
    ):
        try: mode = AMPMode(dtype)
        except ValueError: raise ValueError(f"dtype={dtype!r} cannot be used: dtype must be 'bf16' or 'fp16' (or the "
                                            "torch dtypes). For plain fp32 use `learn.to_fp32()`.") from None
        if mode is AMPMode.BF16 and loss_scale is not None:
            raise ValueError(f"loss_scale={loss_scale!r} cannot be used with dtype='bf16', which needs no loss "
                             "scaling. Leave it out, or take dtype='fp16'.")
        if not master_weights and flat_master:
            raise ValueError("flat_master=True cannot be used with master_weights=False: there is no master to make "
                             "flat. Leave one of them out.")
        if not master_weights and mode is AMPMode.FP16:
            raise ValueError("master_weights=False cannot be used with dtype='fp16', whose gradients must be unscaled "
                             "in fp32. Take dtype='bf16', or keep the masters.")
        super().__init__(mode, loss_scale=loss_scale, fp32_modules=fp32_modules, on_overflow=on_overflow,
                         max_skips=max_skips)
        self.dtype, self.flat_master, self.master_weights = mode.dtype, flat_master, master_weights
        self._asked_for = dict(dtype=mode.value, loss_scale=loss_scale, flat_master=flat_master,
                               master_weights=master_weights, fp32_modules=fp32_modules, on_overflow=on_overflow,
                               max_skips=max_skips)
        self._copies: WeightCopies | None = None                 # from the first training of a fit to its end
        self._lowered: LoweredWeights | None = None              # instead, without masters
        self._flat = FlatMasters()

    def as_call(self,
        **changes # Arguments to change
    ) -> str:
        "The `learn.to_half_weights(...)` call that makes a callback like this one, with `changes`."
        dtype, *given = [(k, v) for k, v in {**self._asked_for, **changes}.items()]
        defaults = inspect.signature(HalfWeights).parameters
        shown = [repr(dtype[1]), *(f'{k}={v!r}' for k, v in given if v != defaults[k].default)]
        return f"learn.to_half_weights({', '.join(shown)})"

    # A copy of the learner starts without copies of weights; theirs were made for this model.
    def __getstate__(self): return {**self.__dict__, '_copies': None}

    takes_init_scale = False

    # -- the events of fastai's loop

    def before_train(self):
        super().before_train()
        self._ready()
        self._rewrite_copies()

    def before_validate(self):
        "An epoch's or another validation: weights may have been exchanged for it; without masters they are fp32 in it."
        self._rewrite_copies()
        if self._lowered is not None: self._lowered.raise_()

    def after_validate(self):
        "Weights that were exchanged for the validation have come back."
        self._rewrite_copies()

    def before_batch(self):
        "Enter autocast; from here on modules take their copies."
        super().before_batch()
        if self.learn.training: self._ready()
        if self._copies is None: return
        if self.learn.training and not any(getattr(cb, 'count', 0) for cb in self._accumulating): self._copies.rewrite()
        self._copies.enter(self.learn.training, self._copies_are_kept())

    def after_loss(self):
        self._leave_copies()
        super().after_loss()

    def after_cancel_batch(self):
        self._leave_copies()
        super().after_cancel_batch()

    def after_batch(self):
        self._leave_copies()
        super().after_batch()

    def before_step(self):
        super().before_step()
        if self._lowered is not None: self._lowered.before_step()

    def after_step(self):
        super().after_step()
        if self._lowered is not None: self._lowered.after_step()

    def after_train(self):
        super().after_train()
        if self._lowered is not None: self._lowered.warn()

    # -- how that is done

    @property
    def _accumulating(self) -> list[GradientAccumulation]:
        "What has several batches make one step, in which the weights stay as they are for certain."
        found = [cb for cb in self.learn.cbs if isinstance(cb, GradientAccumulation) and cb.run and cb.run_train]
        return found if found and self._undisturbed else []

    @property
    def _undisturbed(self) -> bool:
        "Does nobody's code run between two batches? What it writes into a weight by `.data` could not be seen."
        known = type(self.learn).__module__.startswith('fastai.')
        return known and not any(map(_may_write_weights, list(self.learn.cbs)))

    def _ready(self):
        "Have copies, or lowered weights, of the model that is trained."
        model, device_type = self.learn.model, self.fit_device.type
        if not self.master_weights:
            if self._lowered is None: self._lowered = LoweredWeights(model, self.learn.opt, device_type, self.dtype)
            self._lowered.lower()
        elif self._copies is None or not self._copies.fits(model):
            if self._copies is not None: self._copies.remove()
            self._copies = WeightCopies(model, device_type, self.dtype)
            self._copies.install()

    def _rewrite_copies(self):
        if self._copies is not None: self._copies.rewrite()

    def _leave_copies(self):
        if self._copies is not None: self._copies.leave(self._copies_are_kept())

    def _copies_are_kept(self):
        "Will what this batch has copied serve others, too?"
        return bool(self._accumulating) if self.learn.training else self._undisturbed

    def _check_training(self):
        check_model(self.learn.model, self.learn.opt)
        super()._check_training()
        if self.flat_master: FlatMasters.check(self.learn.opt)
        if not self.master_weights and isinstance(self.learn.model, nn.parallel.DistributedDataParallel):
            raise ValueError("master_weights=False cannot be used with DistributedDataParallel, which would not "
                             "reduce the gradients of weights that change their dtype. Use `learn.to_half_weights()`, "
                             "with masters.")

    def _step(self, step):
        if self.flat_master: self._flat.step(self.learn.opt, step)
        else: super()._step(step)
        self._rewrite_copies()

    def _leave_batch(self, batch, error):
        "Also after an interrupt inside a module's forward."
        if self._copies is not None:
            self._copies.leave()
            if error is not None: self._copies.uncover()
        super()._leave_batch(batch, error)

    def _close(self, **kwargs):
        try: self._restore()
        finally: self._restore()  # one of them is complete, wherever an interrupt strikes
        super()._close(**kwargs)

    def _restore(self):
        "Leave the model with its fp32 parameters, each in memory of its own, and nothing else."
        if self._copies is not None: self._copies.remove()
        if self._lowered is not None: self._lowered.raise_()
        self._copies = self._lowered = None
        self._flat.close()


def _may_write_weights(cb: Any) -> bool:
    if any(event in vars(cb) for event in _BETWEEN): return True     # somebody's, as in `Callback(after_batch=f)`
    if type(cb).__module__.startswith(_LEAVE_WEIGHTS): return False
    return type(cb).__call__ is not Callback.__call__ or any(hasattr(type(cb), event) for event in _BETWEEN)


HalfWeights.__signature__ = inspect.signature(HalfWeights.__init__).replace(
    parameters=list(inspect.signature(HalfWeights.__init__).parameters.values())[1:])
