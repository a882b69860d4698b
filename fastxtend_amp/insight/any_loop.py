"`precision_report` without a learner: the report for a training loop of one's own."
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from torch import nn

from ..learners import model_device
from ..messages import check_argument
from ..precisions.as_code import as_code
from ..precisions.matching import qualified_names, unwrapped
from ..tensors import half_to_float, is_half, map_tensors
from .choices import Choice
from .gradient import N_BATCHES
from .random_states import random_state_kept
from .report_result import PrecisionReport

_DICTS = ("Without `loss_func` each has to be a dict of the model's arguments.\nFor tuples of inputs and a target, "
          'pass `loss_func`.')
_TUPLES = ('With `loss_func` each has to be a tuple or a list of inputs and a target, as in `[(x, y)]`.\nFor dicts, '
           'leave `loss_func` out: the model returns the loss.')


def precision_report(
    model: nn.Module, # Trains; modules in eval mode stay in it; trainable 16-bit weights and inputs count as fp32
    batches: Iterable = (), # Tuples of inputs and a target, or dicts of the model's arguments
    loss_func: Callable | None = None, # Gives a number, as a tensor, for output and target; None for dicts
    *,
    precisions: Any = ('bf16', 'fp16'), # One or more of 'bf16', 'fp16', 'fp8'
    n_batches: int = 1, # Batches to look at; gradients are compared on up to 6
    max_seconds: float = 60., # Approximate limit; later verdicts are 'not known'
    device: str | torch.device | None = None, # 'cuda' for a GPU's autocast rules on a CPU
) -> PrecisionReport: # Calls in it are a precision with its arguments: 'fp16, init_scale=1024'
    """Report whether a model trains in low precision, without a learner.

    Works as `Learner.precision_report`, and raises the same errors. The model is not modified and stays on its device.
    With dicts, it is called as `model(**batch)`, as models of Hugging Face are, and its output has to have a `loss`.

    Raises `TypeError` for other batches, and `ValueError` if there are none, if the output has no loss, or for another
    model.
    """
    check_argument('model', model, lambda m: isinstance(m, nn.Module),
                   'a torch.nn.Module. With a Learner, call `learn.precision_report()`')
    check_argument('batches', batches, lambda b: isinstance(b, Iterable), 'an iterable, such as a DataLoader or a list')
    check_argument('loss_func', loss_func, lambda f: f is None or (callable(f) and not isinstance(f, type)),
                   'a function, or an object such as `nn.MSELoss()`')
    with random_state_kept(): drawn = [*islice(batches, max(n_batches, N_BATCHES))]
    if not drawn: raise ValueError(f'batches={batches!r} gave no batch. An iterator can be used only once.')
    by_name = loss_func is None
    drawn = map_tensors(half_to_float, [_checked(batch, i, by_name) for i, batch in enumerate(drawn)])
    dls = DataLoaders(drawn, drawn)
    dls._device = model_device(model, 'cpu')                     # lists have none
    def inputs(module, args, kwargs): # Turns the learner's `model(batch)` into `model(**batch)`; copies keep this hook
        is_batch = len(args) == 1 and isinstance(args[0], dict) and not kwargs
        return ((), args[0]) if is_batch else None
    with ExitStack() as stack:
        if by_name:                                              # first, as hooks of the model read its arguments
            stack.enter_context(unwrapped(model).register_forward_pre_hook(inputs, with_kwargs=True, prepend=True))
        learn = Learner(dls, model, _loss if by_name else loss_func, cbs=_Modes(model))
        report = learn.precision_report(dl=drawn, n_batches=n_batches, precisions=precisions, max_seconds=max_seconds,
                                        device=device)
    if any(p.requires_grad and is_half(p) for p in model.parameters()):
        report.notes.append('Trainable 16-bit weights were treated as fp32: call `model.float()` before training.')
    for name, verdict in report.verdicts.items():
        report.verdicts[name] = replace(verdict, next=_arguments(verdict.next))
    return report


class _Modes(Callback):
    "Keeps modules in eval mode, such as a frozen BatchNorm, as loops do; a model that is in it as a whole trains."
    order, run_on_copy = -9, True                                # after fastai's TrainEvalCallback

    def __init__(self, model: nn.Module):
        self.modes = [m.training for _, m in qualified_names(model)] if model.training else []

    def before_train(self):
        of_copy = (m for _, m in qualified_names(self.learn.model))
        for m, mode in zip(of_copy, self.modes): m.training = mode


def _arguments(following): # 'fp16, init_scale=1024': a loop has no learner to call
    if not isinstance(following, Choice): return ''
    precision = following.precision
    return f'{precision.name}, {as_code(precision.changed)}'.removesuffix(', ')


def _checked(batch, i, by_name): # The i-th batch as a learner has it: inputs and a target
    # A learner then calls `model(dict)`, which the hook turns into `model(**dict)`, and `_loss(output, ())`.
    if by_name and isinstance(batch, Mapping): return dict(batch), ()
    size = len(batch) if isinstance(batch, (tuple, list)) else 0
    if not by_name and size > 1: return tuple(batch)             # of a named tuple as well
    what = type(batch).__name__ + (f' of length {size}' if size else '')
    raise TypeError(f'batches: batch {i} cannot be used ({what}). {_DICTS if by_name else _TUPLES}')


def _loss(output, _):
    loss = output.get('loss') if isinstance(output, Mapping) else getattr(output, 'loss', None)
    if torch.is_tensor(loss): return loss
    raise ValueError(f"The output of the model, a {type(output).__name__}, has no 'loss'.\nReturn one, add the targets "
                     "to the dicts (as 'labels'), or pass tuples of inputs and a target, and `loss_func`.")
