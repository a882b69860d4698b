"16-bit weights as fastai v1 had them: fp32 master weights, also flat ones, and `bf16_weights.py` without any."
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from fastai import optimizer as rules
from fastai.learner import Learner
from fastai.optimizer import Optimizer
from fastcore.foundation import L
from torch import nn

from ..learners import is_sharded, optimizer_name, optimizer_rules
from ..messages import check_bool
from .base import PRECISIONS, AMPMode, Precision, Support, find_precision, written
from .bf16 import BF16
from .bf16_weights import BF16Weights
from .fp16 import FP16


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
    def __init__(self,
        amp_mode: str | AMPMode | torch.dtype = 'bf16', # Precision of the weights: 'bf16' or 'fp16'
        loss_scale: float | None = None, # Fixed loss scale; None for dynamic scaling (fp16)
        flat_master: bool = False, # Join the master weights into a few large tensors
        master_weights: bool = True, # Keep fp32 master weights; False trains bf16 weights
        fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules or predicates
    ):
        super().__init__(fp32_modules)
        check_bool(flat_master=flat_master, master_weights=master_weights)
        weights, kept = find_precision(amp_mode), dict(fp32_modules=fp32_modules)
        if weights not in (BF16, FP16):
            raise ValueError(f"amp_mode={amp_mode!r} cannot be used: weights are 'bf16' or 'fp16'.\n"
                             f'Without 16-bit weights call `learn.to_{weights.name}()`.')
        is_bf16 = weights is BF16
        if (is_bf16 and loss_scale is not None) or (not master_weights and (flat_master or not is_bf16)):
            raise ValueError(f"{written(self.changed)} cannot be used: loss_scale needs amp_mode='fp16', as bf16 "
                             "needs no loss scaling; flat_master and amp_mode='fp16' need master weights.")
        self.of_weights: Precision = FP16(loss_scale=loss_scale, **kept)
        if is_bf16: self.of_weights = BF16(**kept) if master_weights else BF16Weights(**kept)
        # An object is the precision of its weights in all but the methods below, which are for flat master weights.
        same = ['dtype', 'support', 'prepare', 'scaler', 'first_scale', 'state_key', 'state_dict', 'load_state_dict']
        if not flat_master: same += ['check_training', 'around_training', 'step']
        for attribute in same: setattr(self, attribute, getattr(self.of_weights, attribute))

    @classmethod
    def support(cls, device: torch.device) -> Support: return BF16.support(device)     # with the default arguments

    @property
    def kind(self) -> type[Precision]: return PRECISIONS[self.of_weights.name]

    def check_training(self, learn: Learner) -> None: _check_flat(learn)

    def step(self, learn: Learner, step: Callable[[], object]) -> None:
        with flat_parameters(learn.opt): step()


# -- flat master weights

_ELEMENTWISE = {rules.weight_decay, rules.l2_reg, rules.average_grad, rules.average_sqr_grad, rules.step_stat,
                rules.sgd_step, rules.momentum_step, rules.rms_prop_step, rules.adam_step, rules.radam_step,
                rules.qhadam_step}


def _check_flat(learn: Learner) -> None:
    "Raise a `ValueError` if its optimizer would step differently on flat parameters."
    opt, why = learn.opt, ''
    is_plain = type(opt) is Optimizer and 'step' not in vars(opt) and {*optimizer_rules(opt)} <= _ELEMENTWISE
    params = [*chain.from_iterable(opt.param_lists)]
    if not is_plain: why = f'{optimizer_name(opt)}: it needs an element-wise optimizer of fastai with a plain step'
    elif len({*params}) < len(params): why = 'a parameter in two groups'
    elif is_sharded(learn.model): why = 'FSDP2'
    if why:
        raise ValueError(f'flat_master=True cannot be used with {why}.\nLeave flat_master out. For a faster step on a '
                         "CPU or GPU build the learner with `opt_func=fused('AdamW')`.")


@contextmanager
def flat_parameters(opt: Optimizer) -> Iterator[None]:
    """Give `opt` one flat parameter for all parameters of a group that have the same dtype, device and state.

    "The same state" means tensors of the same names, and the same numbers. At the end values are copied back.
    """
    lists, states = opt.param_lists, opt.state
    alike: dict[tuple, list[nn.Parameter]] = defaultdict(list)
    for group, params in enumerate(lists):
        for p in (p for p in params if p.grad is not None):
            numbers = {k: None if torch.is_tensor(v) else v for k, v in states[p].items()}
            key = group, p.dtype, p.device, *sorted(numbers.items())
            alike[key].append(p)
    flat_lists, flat_states = L(L() for _ in lists), {}
    for (group, *_), params in alike.items():
        flat = nn.Parameter(_joined(p.data for p in params))
        flat.grad = _joined(p.grad for p in params)
        flat_states[flat] = {k: _joined(states[p][k] for p in params) if torch.is_tensor(v) else v
                             for k, v in states[params[0]].items()}
        flat_lists[group].append(flat)
    try:
        opt.param_lists, opt.state = flat_lists, flat_states
        yield
    finally:
        opt.param_lists, opt.state = lists, states
        for params, (flat, state) in zip(alike.values(), flat_states.items()):
            torch._foreach_copy_([p.data for p in params], _parts(flat.data, params))
            grads: Any = [p.grad for p in params]
            torch._foreach_copy_(grads, _parts(flat.grad, params))
            for k, v in state.items():
                for p, part in zip(params, _parts(v, params) if torch.is_tensor(v) else [v] * len(params)):
                    states[p][k] = part


def _joined(tensors: Iterable[Any]) -> torch.Tensor: return torch.cat([t.flatten() for t in tensors])


def _parts(flat: Any, params: list[nn.Parameter]) -> list[torch.Tensor]:
    "Return the parts of `flat` in the shapes of `params`."
    return [part.view(p.shape) for part, p in zip(flat.split([p.numel() for p in params]), params)]
