"Flat fp32 master weights, as fastai v1 had them: the parameters of a step joined into a few large tensors."
from collections import defaultdict
from collections.abc import Callable
from itertools import repeat
from typing import Any
from unittest.mock import patch

import torch
from fastai import optimizer
from fastai.learner import Learner
from torch import nn

from ..learners import is_sharded, optimizer_name, optimizer_params, optimizer_rules

_ELEMENTWISE = {optimizer.weight_decay, optimizer.l2_reg, optimizer.average_grad, optimizer.average_sqr_grad,
                optimizer.step_stat, optimizer.sgd_step, optimizer.momentum_step, optimizer.rms_prop_step,
                optimizer.adam_step, optimizer.radam_step, optimizer.qhadam_step}


def check_flat(learn: Learner) -> None:
    "Raise a `ValueError` if its optimizer would step differently on flat parameters."
    opt = learn.opt
    is_plain = type(opt) is optimizer.Optimizer and 'step' not in vars(opt)
    if not (is_plain and {*optimizer_rules(opt)} <= _ELEMENTWISE):
        why = f'{optimizer_name(opt)}: it needs an element-wise optimizer of fastai with a plain step'
    elif len(optimizer_params(opt)) < sum(map(len, opt.param_lists)): why = 'a parameter in two groups'
    elif is_sharded(learn.model): why = 'FSDP2'
    elif any(isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse for m in learn.model.modules()):
        why = 'sparse gradients'
    else: return
    raise ValueError(f'flat_master=True cannot be used with {why}.\nLeave flat_master out. For a faster step on a '
                     "CPU or GPU build the learner with `opt_func=fused('AdamW')`.")


def flat_step(learn: Learner, step: Callable[[], object]) -> None:
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
    def join(tensors): return torch.cat([t.flatten() for t in tensors])
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
    def parts(t): return [part.view_as(p) for part, p in zip(t.split(sizes), params)]
    torch._foreach_copy_([p.data for p in params], parts(flat.data))
    torch._foreach_copy_([p.grad for p in params], parts(flat.grad))
    for name, x in state.items():
        values = parts(x) if torch.is_tensor(x) else repeat(x)
        for s, value in zip(states, values): s[name] = value
