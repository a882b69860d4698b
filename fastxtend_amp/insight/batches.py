"Batches on a copy of a learner: the fit they are part of, and runs forward and backward in which no step is taken."
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from fastai.callback.core import (Callback, CancelBatchException, CancelEpochException, CancelFitException,
                                  CancelTrainException)
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastcore.basics import noop

from ..devices.fp32_settings import FULL_PRECISION, fp32_settings
from ..learners import newest_loss
from ..precisions import Precision, find_precision
from ..precisions.matching import qualified_names
from ..tensors import map_tensors
from ..training.callback import MixedPrecision
from ..training.current import precision_callback
from .choices import Choice
from .copies import copied_learner

_ENDS = CancelFitException, CancelEpochException, CancelTrainException   # exceptions that end a fit, or a part of it


def loader_like(
    dl: DataLoader, # fastai's, or PyTorch's
) -> DataLoader: # Another one on the same dataset
    """Return a copy of `dl` with the same dataset, so that drawing batches does not change the order of `dl`.

    A `DistributedDL` would wait for all processes, so the loader inside is used. A loader that cannot be copied is
    returned as is.
    """
    if type(dl).__name__ == 'DistributedDL': dl = dl.dl
    dataset = getattr(dl, 'dataset', None)
    try: return deepcopy(dl, {id(dataset): dataset})
    except Exception: return dl


def begin_fit(
    copy: Learner,
    n_iter: int, # Batches in its epoch
    lr: float | slice | None = None, # The learner's own if None
) -> None:
    "Begin a fit of one epoch as `Learner.fit` does, up to its first batch."
    if copy.wd is not None: copy.opt.set_hypers(wd=copy.wd)
    copy.opt.set_hypers(lr=copy.lr if lr is None else lr)
    copy.n_epoch, copy.epoch, copy.n_iter, copy.dl = 1, 0, n_iter, copy.dls.train
    try: copy(['before_fit', 'before_epoch', 'before_train'])
    except _ENDS as e: raise ValueError(f'A callback ends the fit before its first batch ({type(e).__name__}).') from e


def run_batch(copy: Learner, i: int, batch: Any) -> None:
    "Run a clone of a batch. A callback that ends a fit or an epoch early, which `fit` handles, ends the batch."
    batch = map_tensors(torch.clone, batch)                      # CutMix and some models write into it
    with suppress(*_ENDS): copy.one_batch(i, batch)


# -- a copy for runs without steps

@contextmanager
def running_copy(
    learn: Learner, # Nothing in it changes
    precision: Precision,
    in_batch: bool = False, # Whether `learn` is in the middle of a batch; otherwise a fit of the copy begins
) -> Iterator[Learner]: # In training, its batches need a `BackwardOnly`
    "Copy `learn` in a precision. Compiled modules run uncompiled, as hooks do not fire in a compiled graph."
    # fp16 or bf16 of this package, which any device runs: FP8 becomes bf16, and `simulated_forwards` round further.
    of_dtype = find_precision(precision.dtype or torch.float32)
    scaling = {'init_scale': precision.first_scale} if of_dtype.scales_loss else {}
    in_dtype = of_dtype(fp32_modules=precision.fp32_modules, **scaling)
    with (copied_learner(learn, Choice(in_dtype)) as copy, torch.compiler.set_stance('force_eager'),
          fp32_settings(FULL_PRECISION)):
        modules = dict(qualified_names(copy.model))
        for name, forward in precision.simulated_forwards(copy.model).items():
            vars(modules[name])['forward'] = partial(forward, modules[name])
        if in_batch:                                             # it is split, and callbacks have prepared it
            def split(batch): copy.iter, (copy.xb, copy.yb) = learn.iter, batch
            copy._split = split
            for cb in copy.cbs:
                if not isinstance(cb, MixedPrecision): cb.before_batch = noop
        else:
            begin_fit(copy, 1)
            if cb := precision_callback(copy): cb.ready_fit()    # its errors are not those of a module
        yield copy


class BackwardOnly(Callback):
    "Ends each batch with its backward pass: its gradients are read, and no step is taken."
    order = 1000                                                 # after all others

    def __init__(self,
        read_gradients: Callable, # Called with the model; `gradients` is what it returned
        read_loss: Callable = noop, # Called with the loss
    ):
        self.read_gradients, self.read_loss = read_gradients, read_loss

    def before_batch(self):
        vars(self.learn).pop('loss_grad', None)                  # of the batch before

    def after_loss(self):
        loss = newest_loss(self.learn)                           # without targets a callback may set it
        if loss is not None: self.read_loss(loss)

    def after_backward(self):
        self.gradients = self.read_gradients(self.learn.model)
        self.learn.model.zero_grad()
        raise CancelBatchException
