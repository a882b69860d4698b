"""Runs of batches on a copy of the learner, in its own training loop, in fp32 or lower; no step is taken.

A `Sample` records what happens in each module.
"""
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from fastai.callback.core import Callback, CancelBatchException
from fastai.learner import Learner
from fastcore.basics import noop, store_attr
from torch.nn import functional as F

from ..compat import without_modes
from ..devices.fp32_settings import FULL_PRECISION, fp32_settings
from ..learners import newest_loss
from ..messages import first_line, users_line
from ..precisions import Precision, find_precision
from ..precisions.base import Rounding
from ..precisions.matching import ROOT, qualified_names
from ..tensors import map_tensors
from ..training.callback import MixedPrecision
from .calls import Call
from .copies import begin_fit, copied_learner, run_batch
from .evidence import wrong_in_reference
from .random_states import RandomState, set_random_state
from .recording import Recording
from .operations import LOSS
from .values import has_finite_results, readable

_IN_CALLBACK = re.compile(r'occured in `(\w+)`')               # fastai's words


@dataclass
class Sample:
    "The batches that modules are judged on, with their run in fp32, the reference."
    learn: Learner # Nothing in it changes
    batches: list # As a DataLoader gives them; inside a batch, its inputs and targets
    start: RandomState | None = None # Inside a batch, the random state to start from
    is_small: bool = False # Whether only the first items of each batch are left

    def __post_init__(self):
        self.reference = Recording(Precision())                  # empty, so the first run is compared with nothing
        self.reference = self.run(Precision())
        self.wrong = wrong_in_reference(self.reference, self.batches)            # '' if nothing is

    def run(self, precision: Precision) -> Recording:
        """Run the batches forward and backward in a copy, in its own loop with its callbacks; record each module.

        Then run them as in validation, unless that fails in fp32 as well. The first validation runs without hooks, as
        some modules of PyTorch use other kernels when they have hooks. If its results are finite only in fp32, it runs
        again and is recorded.
        """
        reference, in_batch = self.reference, self.start is not None
        recording, where = Recording(precision, reference), ''
        run_one = run_prepared if in_batch else run_batch
        reader = BackwardOnly(recording.record_gradients, recording.record_loss)
        try:
            with running_copy(self.learn, precision, in_batch) as copy:
                set_random_state(self.start or [])
                for i, batch in enumerate(self.batches):
                    with recording.of_batch(copy.model), copy.added_cbs(reader): run_one(copy, i, batch)
                if in_batch or reference.error: return recording
                where, recording.failed_in = ' (in validation)', ROOT
                recording.validates = self._validates(copy, recording)
                if reference.validates and not recording.validates:
                    recording.not_finite = 'loss'
                    with recording.of_batch(copy.model): self._validates(copy, recording)
        except torch.OutOfMemoryError: raise
        except Exception as e:
            if not precision.dtype and not where: raise
            line = users_line(reversed([*walk_tb(e.__traceback__)]))
            recording.error = first_line(e) + (f' ({line})' if line else '') + where
            callback = _IN_CALLBACK.search(str(e))
            if callback and recording.failed_in == LOSS: recording.failed_in = f'callback `{callback[1]}`'
        return recording

    def _validates(self, copy, recording):
        "Run the batches as in validation; record predictions; return whether they and the losses are finite."
        finite = True
        for batch in self.batches:
            copy.pred = None                                     # a callback may cancel the batch
            copy._do_epoch_validate(dl=[map_tensors(torch.clone, batch)])
            finite &= has_finite_results(copy)
            recording.predictions += readable(copy.pred)
        return finite


def run_prepared(copy: Learner, i: int, batch: Any) -> None:
    "Run a clone of the batch that the learner is in the middle of."
    copy.xb, copy.yb = map_tensors(torch.clone, batch)           # which the model may write into
    copy._with_events(copy._do_one_batch, 'batch', CancelBatchException)


# -- the copy

@contextmanager
def running_copy(
    learn: Learner, # Nothing in it changes
    precision: Precision,
    in_batch: bool = False, # Whether `learn` is in the middle of a batch; otherwise a fit of the copy begins
) -> Iterator[Learner]: # In training, its batches need a `BackwardOnly`
    "Copy `learn` in a precision. Compiled modules run uncompiled, as hooks do not fire in a compiled graph."
    # The precision of this dtype needs neither hardware nor other packages.
    of_dtype = find_precision(precision.dtype or torch.float32)
    scaling = {'init_scale': precision.first_scale} if of_dtype.scales_loss else {}
    simulated = of_dtype(fp32_modules=precision.fp32_modules, **scaling)
    with (copied_learner(learn, Call(simulated)) as copy, torch.compiler.set_stance('force_eager'),
          fp32_settings(FULL_PRECISION)):
        modules = dict(qualified_names(copy.model))
        for name, rounding in precision.rounding(copy.model).items():
            vars(modules[name])['forward'] = partial(rounded_linear, rounding, modules[name])
        copy.create_opt()                                        # callbacks may read it
        copy.scaler = torch.amp.GradScaler('cpu', enabled=False)   # callbacks may use one, in fp32 as well
        if in_batch:                                             # callbacks have already prepared the batch
            for cb in copy.cbs:
                if not isinstance(cb, MixedPrecision): cb.before_batch = noop
        else: begin_fit(copy, 1)
        yield copy


class BackwardOnly(Callback):
    "Ends each batch with its backward pass: its gradients are read, and no step is taken."
    order = 1000                                                 # after all others

    def __init__(self,
        read_gradients: Callable, # Called with the model; `gradients` is what it returned
        read_loss: Callable = noop, # Called with the loss
    ):
        store_attr()

    def before_batch(self):
        vars(self.learn).pop('loss_grad', None)                  # of the batch before

    def after_loss(self):
        loss = newest_loss(self.learn)                           # without targets a callback may set it
        if loss is not None: self.read_loss(loss)

    def after_backward(self):
        self.gradients = self.read_gradients(self.learn.model)
        self.learn.model.zero_grad()
        raise CancelBatchException


# -- the rounding of a precision on a device without it

def rounded_linear(
    rounding: Rounding,
    layer: Any, # A linear layer
    input: torch.Tensor,
) -> torch.Tensor:
    """Return what the layer computes: in autocast its input, its weight and the gradient of the output are rounded.

    Where autocast is off, FP8 is as well.
    """
    device_type = input.device.type
    if not torch.is_autocast_enabled(device_type): return F.linear(input, layer.weight, layer.bias)
    x = input.to(torch.get_autocast_dtype(device_type))
    out = F.linear(_rounded_copy(rounding, x), _rounded_copy(rounding, layer.weight))
    if out.requires_grad: out.register_hook(partial(_rounded_copy, rounding, is_gradient=True))
    return out if layer.bias is None else out + layer.bias.to(out.dtype)


def _rounded_copy(rounding, t, is_gradient=False):
    "Return `t` rounded. To autograd, and to a recording, it is a plain copy."
    copy = t.clone()
    with without_modes(), torch.no_grad(): copy.copy_(rounding(t, is_gradient))
    return copy
