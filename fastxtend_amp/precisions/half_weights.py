"16-bit weights as fastai v1 had them: fp32 master weights, also flat ones, and `bf16_weights.py` without any."
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from itertools import accumulate, chain
from typing import Any

import torch
from fastai import optimizer as rules
from fastai.learner import Learner
from fastai.optimizer import Optimizer, OptimWrapper
from fastcore.foundation import L
from torch import nn
from torch.amp import GradScaler

from ..learners import optimizer_name, optimizer_rules
from ..messages import check_bool
from .base import AMPMode, Precision, Support, find_precision, written
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
        flat_master: bool = False, # Join the master weights into a few large tensors: faster with many small weights
        master_weights: bool = True, # Keep fp32 master weights; False lets the optimizer step on bf16 weights
        fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules or predicates
    ):
        super().__init__(fp32_modules)
        name = find_precision(amp_mode).name
        check_bool(flat_master=flat_master, master_weights=master_weights)
        if name not in ('bf16', 'fp16'):
            raise ValueError(f"amp_mode={amp_mode!r} cannot be used: weights are 'bf16' or 'fp16'.\n"
                             f'Without 16-bit weights call `learn.to_{name}()`.')
        is_bf16 = name == 'bf16'
        if (is_bf16 and loss_scale is not None) or (not master_weights and (flat_master or not is_bf16)):
            raise ValueError(f"{written(self.changed)} cannot be used: loss_scale needs amp_mode='fp16', as bf16 "
                             "needs no loss scaling; flat_master and amp_mode='fp16' need master weights.")
        kept: Any = dict(fp32_modules=fp32_modules)
        self.autocast: Precision = FP16(loss_scale=loss_scale, **kept)
        if is_bf16: self.autocast = BF16(**kept) if master_weights else BF16Weights(**kept)
        self.state_key, self.first_scale = self.autocast.state_key, self.autocast.first_scale
        vars(self)['support'] = self.autocast.support            # a class method
        self.dtype, self.flat_master = self.autocast.dtype, flat_master

    # What autocast in the weights' precision does.
    @property
    def kind(self) -> type[Precision]: return find_precision(self.autocast.name)
    def prepare(self, learn: Learner) -> None: self.autocast.prepare(learn)
    def scaler(self, device: torch.device) -> GradScaler | None: return self.autocast.scaler(device)
    def state_dict(self) -> dict[str, Any]: return self.autocast.state_dict()
    def load_state_dict(self, state: dict[str, Any] | None) -> None: self.autocast.load_state_dict(state)
    @classmethod
    def support(cls, device: torch.device) -> Support: return BF16.support(device)

    def around_training(self, learn: Learner) -> list[Any]:
        if not self.flat_master: return self.autocast.around_training(learn)
        _check_flat_master(learn.model, learn.opt)
        return [_own_memory(learn.model)]

    def step(self, learn: Learner, step: Callable[[], object]) -> None:
        if not self.flat_master: return self.autocast.step(learn, step)
        _check_elementwise(learn.opt)                            # a callback may have exchanged it
        with _flat(learn.opt): step()


# -- flat master weights

@contextmanager
def _own_memory(model: nn.Module):
    "Give each parameter its own memory at the end: one that is saved alone would be saved with all others."
    try: yield
    finally:
        for p in model.parameters(): p.data = p.data.clone()


_ELEMENTWISE = {rules.weight_decay, rules.l2_reg, rules.average_grad, rules.average_sqr_grad, rules.step_stat,
                rules.sgd_step, rules.momentum_step, rules.rms_prop_step, rules.adam_step, rules.radam_step,
                rules.qhadam_step}


def _refuse_flat(what: str) -> None:
    raise ValueError(f"flat_master=True cannot be used with {what}.\nLeave flat_master out. For a faster step on a "
                     "CPU or GPU build the learner with `opt_func=fused('AdamW')`.")


def _check_elementwise(opt: Optimizer | OptimWrapper) -> None:
    if type(opt) is Optimizer and 'step' not in vars(opt) and {*optimizer_rules(opt)} <= _ELEMENTWISE: return
    _refuse_flat(f"{optimizer_name(opt)}, which is not one of fastai's own element-wise optimizers with a plain step")


def _check_flat_master(model: nn.Module, opt: Optimizer | OptimWrapper) -> None: # The learner's
    "Raise a `ValueError` that names an optimizer or a parameter that `flat_master` does not support."
    _check_elementwise(opt)
    names = {p: f"parameter '{name}'" for name, p in model.named_parameters()}
    sparse = {p for m in model.modules() if getattr(m, 'sparse', False) for p in m.parameters(recurse=False)}
    addresses = {0}                                              # 0 is that of DTensors and of tensors on XLA devices
    for p in chain.from_iterable(opt.param_lists):
        address = p.data_ptr() if p.numel() else None
        if p in sparse or not p.is_contiguous() or address in addresses:
            _refuse_flat(f"{names.get(p, 'a parameter')}, which is shared, sharded, not contiguous, on an XLA device, "
                         'or has sparse gradients')
        if address: addresses.add(address)


@contextmanager
def _flat(
    opt: Optimizer, # One that `_check_flat_master` allows
):
    """Give `opt` flat parameters: one for the parameters of a group that have the same dtype, device and state.

    "The same state" means tensors of the same names, and the same numbers. Parameters, gradients and state become views
    of flat tensors, and stay so until something replaces one of them; the next step then joins them again. At the end
    `opt` has an entry for each parameter again.
    """
    lists, states, is_tensor = opt.param_lists, opt.state, torch.is_tensor
    alike: dict[tuple, list[nn.Parameter]] = defaultdict(list)
    for group, params in enumerate(lists):
        for p in (p for p in params if p.grad is not None):
            kind = {k: None if is_tensor(v) else v for k, v in states[p].items()}
            key = group, p.dtype, p.device, *sorted(kind.items())
            alike[key].append(p)
    flat_lists, flat_states = L(L() for _ in lists), {}
    for (group, *_), params in alike.items():
        flat = nn.Parameter(_join(params, 'data', getattr, setattr))
        entries = [states[p] for p in params]
        flat.grad = _join(params, 'grad', getattr, setattr)
        flat_states[flat] = {k: _join(entries, k, dict.get, dict.__setitem__) if is_tensor(v) else v
                             for k, v in entries[0].items()}
        flat_lists[group].append(flat)
    try:
        opt.param_lists, opt.state = flat_lists, flat_states
        yield
    finally:
        opt.param_lists, opt.state = lists, states
        for params, state in zip(alike.values(), flat_states.values()):
            for k, v in state.items():
                if is_tensor(v) and k in states[params[0]]: continue   # the step has changed the views
                values = _split(v, params) if is_tensor(v) else [v] * len(params)
                for p, value in zip(params, values): states[p][k] = value


def _join(owners: list, name: str, get: Callable, put: Callable) -> torch.Tensor:
    "Return the flat tensor that the owners' tensors are views of, one after another; if there is none, make it."
    tensors = [get(owner, name) for owner in owners]
    offsets = accumulate((t.numel() for t in tensors), initial=tensors[0].storage_offset())
    in_order = all(t.is_contiguous() and t.storage_offset() == offset for t, offset in zip(tensors, offsets))
    if in_order and len({t.untyped_storage().data_ptr() for t in tensors}) == 1:
        return tensors[0].as_strided((sum(t.numel() for t in tensors),), (1,))
    flat = torch.cat([t.flatten() for t in tensors])
    for owner, part in zip(owners, _split(flat, tensors)): put(owner, name, part)
    return flat


def _split(flat: torch.Tensor, like: list) -> list[torch.Tensor]:
    "Return the parts of `flat` in the shapes of `like`; not views to autograd, which could not be detached in place."
    parts = flat.split([t.numel() for t in like])
    return [part.view(t.shape).data for part, t in zip(parts, like)]
