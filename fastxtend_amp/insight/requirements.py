"Requirements of reports and comparisons on a learner: finite fp32 weights, a batch, and no fit under way."
import inspect
from traceback import walk_stack
from typing import Any

import torch
from fastai.learner import Learner
from torch import nn

from ..learners import is_sharded
from .values import all_finite, readable_weights


def check_learner(
    learn: Learner,
    method: str, # The method that was called, for messages
    dl: Any = None, # Source of the batches; `learn.dls.train` if None
) -> None:
    "Raise a `RuntimeError` inside a fit; a `ValueError` without data, or if parameters are sharded, NaN or inf."
    fit = inspect.unwrap(Learner.fit).__code__
    frames = (f for f, _ in walk_stack(None))
    if any(f.f_code is fit and f.f_locals.get('self') is learn for f in frames):
        raise RuntimeError(f'{method} cannot run inside a fit. Call it before or afterwards.')
    if not any(p.requires_grad for p in learn.model.parameters()):
        raise ValueError(f'{method} needs trainable parameters, but all parameters of this model are frozen.\n'
                         'First call `requires_grad_()` on a module, or `learn.unfreeze()`.')
    if double := [name for name, p in learn.model.named_parameters() if p.dtype is torch.float64]:
        raise ValueError(f"{method} does not support float64: '{double[0]}' would stay in it, in autocast as well.\n"
                         'Convert the model with `.float()`.')
    if any(isinstance(m, torch.jit.ScriptModule) and [*m.parameters()] for m in learn.model.modules()):
        raise ValueError(f'{method} does not support TorchScript modules with weights, whose copies do not train.\n'
                         'Use the original module instead of the scripted or traced one.')
    if is_sharded(learn.model):
        raise ValueError(f'{method} does not support models with sharded parameters (FSDP).\n'
                         'Call it before `fully_shard`.')
    if bad := weights_not_finite(learn.model):
        raise ValueError(f'{method} cannot run this model: {bad}.\nLoad other weights, or create the model again.')
    if dl is None and not getattr(learn.dls, 'loaders', True): raise no_batch(method)


def note_of_frozen(learn: Learner) -> list[str]: # One sentence or none
    "Say how many weights are frozen, whose gradients nobody looks at."
    trains = [p.requires_grad for p in learn.model.parameters()]
    return [f'{trains.count(False):,} of {len(trains):,} weight tensors are frozen. If you train them later, as '
            '`fine_tune` does, unfreeze them first.'] if not all(trains) else []


def no_batch(method: str, dl: Any = None) -> ValueError:
    "Return the error of a method whose source has no batch."
    return ValueError(f"{method} needs at least one batch, but {'`learn.dls.train`' if dl is None else repr(dl)} has "
                      'none.\nA learner from `load_learner` has no data: set `learn.dls`. With `drop_last=True` the '
                      'dataset may be smaller than a batch. An iterator can be used only once.')


def weights_not_finite(model: nn.Module) -> str: # "2 of 4 weight tensors are NaN or inf; the first is '0.weight'"
    "Describe which weights are NaN or inf, among the shards of this process; '' if none is."
    weights = readable_weights(model)
    bad = [name for name, p in weights.items() if not all_finite(p)]
    return f"{len(bad):,} of {len(weights):,} weight tensors are NaN or inf; the first is '{bad[0]}'" if bad else ''
