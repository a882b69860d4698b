"16-bit weights as fastai v1 had them: fp32 master weights, also flat ones, and `bf16_weights.py` without any."
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any
from unittest.mock import patch

import torch
from fastai import optimizer
from fastai.learner import Learner
from torch import nn

from ..learners import is_sharded, optimizer_name, optimizer_rules
from ..messages import check_bool
from .base import AMPMode, Precision, find_precision, written
from .bf16 import BF16
from .bf16_weights import BF16Weights, check_bf16_weights
from .fp16 import FP16

# What is answered by the precision that autocast computes in.
_OF_AUTOCAST = ('dtype', 'support', 'scales_loss', 'first_scale', 'scaler', 'state_key', 'state_dict',
                'load_state_dict')


class HalfWeights(Precision):
    """Train with 16-bit weights and fp32 master weights: the same numbers as `to_bf16` or `to_fp16`.

    Replaces the learner's current precision. Use it for the arguments of fastai v1's `to_fp16(loss_scale,
    flat_master)`, or to train without master weights. The model's parameters are the master weights, and autocast
    makes their 16-bit copies.

    With `master_weights=False`, the weights and biases of `nn.Linear` and of convolutions are bf16 during a fit, and so
    are their gradients and optimizer state: about 10 bytes per parameter instead of 18 in linear and convolutional
    networks. During a fit, call the model inside `learn.amp_context()`.

    When `fit` starts, raises `ValueError` for `master_weights=False` with an optimizer that does not compensate for
    rounding, and for `flat_master=True` with anything but fastai's own element-wise optimizers on plain parameters.

    Source: Micikevicius et al., Mixed Precision Training, https://arxiv.org/abs/1710.03740, section 3.1.
    """
    name, color, in_tables = 'half_weights', '#17a2a2', False
    bf16_weights: Any = None                                     # in a fit without master weights

    def __init__(self,
        amp_mode: str | AMPMode | torch.dtype = 'bf16', # Precision of the weights: 'bf16' or 'fp16'
        loss_scale: float | None = None, # Fixed loss scale; None for dynamic scaling (fp16)
        flat_master: bool = False, # Join the master weights into a few large tensors
        master_weights: bool = True, # Keep fp32 master weights; False trains bf16 weights
        fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules or predicates
    ):
        check_bool(flat_master=flat_master, master_weights=master_weights)
        super().__init__(fp32_modules)
        cls = find_precision(amp_mode)
        if cls not in (BF16, FP16):
            raise ValueError(f"amp_mode={amp_mode!r} cannot be used: weights are 'bf16' or 'fp16'.\n"
                             f'Without 16-bit weights call `learn.to_{cls.name}()`.')
        if (cls is BF16 and loss_scale is not None) or (not master_weights and (flat_master or cls is FP16)):
            raise ValueError(f"{written(self.changed)} cannot be used: loss_scale needs amp_mode='fp16', as bf16 "
                             "needs no loss scaling; flat_master and amp_mode='fp16' need master weights.")
        self.flat_master, self.master_weights = flat_master, master_weights
        self.autocast = FP16(loss_scale=loss_scale) if cls is FP16 else BF16()
        # On the instance, where they come before those of the class.
        for name in _OF_AUTOCAST: setattr(self, name, getattr(self.autocast, name))

    @property
    def kind(self) -> type[Precision]: return type(self.autocast)

    def prepare(self, learn: Learner) -> None:
        if self.master_weights: super().prepare(learn)           # otherwise 16-bit weights stay what they are

    def check_training(self, learn: Learner) -> None:
        if self.flat_master: _check_flat(learn)
        if not self.master_weights: check_bf16_weights(learn)

    def around_training(self, learn: Learner) -> list[Any]:
        if self.master_weights: return []
        self.bf16_weights = BF16Weights(learn, self.kept_in_fp32(learn.model))
        return [self.bf16_weights]

    def step(self, learn: Learner, step: Callable[[], object]) -> None:
        if self.flat_master: _flat_step(learn, step)
        else: step()
        if self.bf16_weights: self.bf16_weights.after_step()


# -- flat master weights

_ELEMENTWISE = {optimizer.weight_decay, optimizer.l2_reg, optimizer.average_grad, optimizer.average_sqr_grad,
                optimizer.step_stat, optimizer.sgd_step, optimizer.momentum_step, optimizer.rms_prop_step,
                optimizer.adam_step, optimizer.radam_step, optimizer.qhadam_step}


def _check_flat(learn: Learner) -> None:
    "Raise a `ValueError` if its optimizer would step differently on flat parameters."
    opt, why = learn.opt, ''
    is_plain = type(opt) is optimizer.Optimizer and 'step' not in vars(opt)
    params = [*chain.from_iterable(opt.param_lists)]
    if not (is_plain and {*optimizer_rules(opt)} <= _ELEMENTWISE):
        why = f'{optimizer_name(opt)}: it needs an element-wise optimizer of fastai with a plain step'
    elif len({*params}) < len(params): why = 'a parameter in two groups'
    elif is_sharded(learn.model): why = 'FSDP2'
    if why:
        raise ValueError(f'flat_master=True cannot be used with {why}.\nLeave flat_master out. For a faster step on a '
                         "CPU or GPU build the learner with `opt_func=fused('AdamW')`.")


def _flat_step(learn: Learner, step: Callable[[], object]) -> None:
    """Run a step with one flat parameter in place of those of a group that have the same dtype, device and state.

    "The same state" means tensors of the same names, and the same numbers. Afterwards values are copied back. The step
    is fastai's, which here gets the flat rows, and puts their states into a dict that is dropped:

        for p,pg,state,hyper in self.all_params(with_grad=True):
            for cb in self.cbs: state = _update(state, cb(p, **{**state, **hyper}))
            self.state[p] = state
    """
    alike: dict[tuple, list[Any]] = defaultdict(list)
    for row in learn.opt.all_params(with_grad=True):             # a parameter, its group, state and hyper-parameters
        p, _, state, hypers = row
        numbers = {name: None if torch.is_tensor(x) else x for name, x in state.items()}
        key = id(hypers), p.dtype, p.device, *sorted(numbers.items())
        alike[key].append(row)
    flat = [_joined(rows) for rows in alike.values()]
    try:
        with patch.multiple(learn.opt, all_params=lambda **kwargs: flat, state={}): step()
    finally:
        for row, rows in zip(flat, alike.values()): _copy_back(row, rows)


def _joined(rows: list[Any]) -> tuple:
    "Return one row in place of those, with copies of their tensors joined."
    def join(tensors: Any) -> Any: return torch.cat([t.flatten() for t in tensors])
    params, (group, *_), states, (hypers, *_) = zip(*rows)
    flat = nn.Parameter(join(p.data for p in params))
    flat.grad = join(p.grad for p in params)
    state = dict(states[0])
    for name, x in state.items():
        if torch.is_tensor(x): state[name] = join(s[name] for s in states)
    return flat, group, state, hypers


def _copy_back(row: tuple, rows: list[Any]) -> None:
    "Copy parameter, gradient and state of a joined row to those that it stands for."
    (flat, _, state, _), (params, _, states, _) = row, zip(*rows)
    sizes = [p.numel() for p in params]
    def parts(t: Any) -> list:
        return [part.view_as(p) for part, p in zip(t.split(sizes), params)]
    torch._foreach_copy_([p.data for p in params], parts(flat.data))
    torch._foreach_copy_([p.grad for p in params], parts(flat.grad))
    for name, x in state.items():
        values = parts(x) if torch.is_tensor(x) else repeat(x)
        for s, value in zip(states, values): s[name] = value
