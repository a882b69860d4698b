"Training with half-precision weights and fp32 masters, as fastai v1's `to_fp16` did."
from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn

from ..callback import MixedPrecision
from ..common import is_dtensor
from ..convert import HALF
from ..fp32_modules import unwrapped
from ..guard import cache_loses_gradients
from ..mode import AMPMode
from .flat_masters import FlatMasters
from .kept_casts import KeptCasts
from .no_masters import LoweredWeights
from .optimizers import optimizer_name, sparse_trouble

__all__ = ['HalfWeights']


class HalfWeights(MixedPrecision):
    """Half-precision weights with fp32 masters, on top of autocast: the same operations, and the same numbers.

    The model's parameters are the fp32 masters that the optimizer steps on; their half-precision copies are autocast's
    own casts. Loss scaling, skipped steps, history and diagnosis are `MixedPrecision`'s.

    With `cast_once=True` and `GradientAccumulation` the batches of a step share one cast of each weight. That gives the
    same numbers as long as, from a step's first batch to the step, no weight used under autocast changes, nothing runs
    under an autocast that is not this callback's, and each batch uses weights as the epoch's first did. Weights of the
    model that are written in place or get other memory are noticed and cast again. Under DDP, in compiled code and
    with PyTorch 2.9, whose autocast runs here without its cache, each batch casts anew.

    Without masters some of the model's weights are bf16 while it is trained: call it under autocast there.

    Source: Micikevicius et al., Mixed Precision Training, https://arxiv.org/abs/1710.03740, section 3.1.
    """
    def __init__(self,
        dtype: str | AMPMode | torch.dtype = AMPMode.BF16, # The weights' precision: 'bf16' or 'fp16'
        loss_scale: float | None = None, # A static loss scale; dynamic scaling if None (fp16)
        flat_master: bool = False, # Whether the optimizer steps on few flat tensors, unless it takes all at once anyway
        master_weights: bool = True, # Whether there are fp32 masters; else the optimizer steps on half weights
        fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules, predicates
        *,
        cast_once: bool = False, # Cast once a step while gradients accumulate? Then no weight may change in between
        on_overflow: str = 'warn', # When training goes wrong: 'warn', 'raise' (`FloatingPointError`) or 'ignore'
        max_skips: int = 16, # Skipped steps in a row after which training counts as going wrong (fp16)
    ):
        arguments = {k: v for k, v in locals().items() if k not in ('self', '__class__')}
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
        self._arguments = {**arguments, 'dtype': mode.value}
        self.dtype, self.flat_master, self.master_weights = mode.dtype, flat_master, master_weights
        self.cast_once = cast_once
        self._lowered: LoweredWeights | None = None  # without masters, from a fit's first training to its end
        self._casts, self._flat = KeptCasts(cast_once), FlatMasters()

    def _call(self, arguments): return 'to_half_weights', {k: v for k, v in arguments.items() if k != 'amp_mode'}

    takes_init_scale = False

    # -- the events of fastai's loop

    def before_train(self):
        super().before_train()
        self._lower()
        self._casts.start(None)

    def before_validate(self):
        "Without masters weights are fp32 in a validation."
        if self._lowered is not None: self._lowered.raise_()

    def before_batch(self):
        "Enter autocast, with the casts of the batch before if they are still right."
        super().before_batch()
        if self.learn.training: self._lower()
        in_loop = self._batch is not None and not self._batch.loose   # one of the user's own may step unseen
        self._casts.begin(self.learn, in_loop and self.learn.training and not cache_loses_gradients())

    def after_loss(self):
        if self.learn.training: self._casts.check(self.learn.__dict__.get('loss_grad'))
        super().after_loss()

    def before_step(self):
        "Forget the casts, also if the step is skipped: then `zero_grad` still runs."
        self._casts.forget()
        super().before_step()

    def after_train(self):
        super().after_train()
        self._casts.start(False)
        if self._lowered is None: return
        self._lowered.raise_()
        self._lowered.warn()

    # -- how that is done

    def _lower(self):
        if self.master_weights: return
        if self._lowered is None:
            self._lowered = LoweredWeights(self.learn, self.fit_device.type, self.dtype)
        self._lowered.lower()

    def _keeps_casts(self): return self._casts.kept is not None

    def _check_training(self):
        check_model(self.learn.model, self.learn.opt)
        super()._check_training()
        if self.flat_master: FlatMasters.check(self.learn.opt)
        if not self.master_weights and isinstance(self.learn.model, nn.parallel.DistributedDataParallel):
            raise ValueError("master_weights=False cannot be used with DistributedDataParallel, which would not "
                             "reduce the gradients of weights that change their dtype. Use `learn.to_half_weights()`, "
                             "with masters.")

    def _step(self, step):
        if self._lowered is not None: self._lowered.step(step)
        elif self.flat_master: self._flat.step(self.learn.model, self.learn.opt, step)
        else: super()._step(step)

    def _close(self, **kwargs):
        try: self._restore()
        finally: self._restore()  # one of them is complete, wherever an interrupt strikes
        super()._close(**kwargs)

    def _restore(self):
        "Leave the model with its fp32 parameters, each in memory of its own."
        if self._lowered is not None: self._lowered.raise_()
        self._lowered = None
        self._flat.close()
        self._casts.start(False)


def check_model(
    model: nn.Module, # The learner's model
    opt: Any, # The learner's optimizer
) -> None:
    "Raise a `ValueError` that names what cannot be trained with half-precision weights, and what to use instead."
    for path, module in unwrapped(model).named_modules():
        for name, p in module.named_parameters(recurse=False):
            where = f"parameter '{path + '.' if path else ''}{name}'"
            if is_dtensor(p):
                raise ValueError(f"to_half_weights cannot be used with FSDP2: {where} is a DTensor, spread over "
                                 "processes.\n"
                                 "Use `learn.to_bf16()`, or `fully_shard`'s own "
                                 "`MixedPrecisionPolicy(param_dtype=torch.bfloat16)`.")
            if p.dtype in HALF and p.requires_grad:
                raise ValueError(f"to_half_weights: {where} is {p.dtype} already, so it can have no fp32 master. "
                                 "Call `learn.model.float()` first.")
            if getattr(module, 'sparse', False) and p.requires_grad and (why := sparse_trouble(opt)):
                raise ValueError(f"to_half_weights: {where} has sparse gradients, which this {optimizer_name(opt)} "
                                 f"cannot take ({why}). Use an optimizer that can, such as SGD without momentum, or "
                                 "`sparse=False`.")


HalfWeights.__signature__ = inspect.signature(partial(HalfWeights.__init__, None))  # type: ignore[arg-type]
