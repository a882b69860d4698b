"What half-precision weights ask of optimizers: trial steps, and those that make up for rounding."
from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from fastai.optimizer import Optimizer, OptimWrapper, pytorch_hp_map
from torch import nn

from ..common import first_line
from ..compat import has_step_hooks

__all__ = ['compensates', 'fills_its_memory', 'is_elementwise', 'kahan', 'memory_of', 'optimizer_name',
           'sparse_trouble', 'state_of', 'stepped_as_it_is', 'trial_optimizer']


# What fastai's optimizers are made of, and classes of PyTorch and optimi. Others may treat a parameter as a whole.
ELEMENTWISE = {
    'weight_decay', 'l2_reg', 'average_grad', 'average_sqr_grad', 'step_stat', 'sgd_step', 'momentum_step', 'adam_step',
    'rms_prop_step', 'radam_step', 'qhadam_step', 'SGD', 'ASGD', 'Adam', 'AdamW', 'Adamax', 'NAdam', 'RAdam', 'Adan',
    'Adagrad', 'Adadelta', 'RMSprop', 'Rprop', 'Lion'}


def state_of(
    opt: Any, # fastai's `Optimizer` or `OptimWrapper`
) -> dict: # By parameter
    "The dictionary in which `opt` keeps its state."
    return opt.opt.state if isinstance(opt, OptimWrapper) else opt.state


def memory_of(
    t: torch.Tensor, # A parameter or buffer
) -> int:
    "Where the memory begins that `t` lies in; where that cannot be told, a number of its own."
    try: return t.untyped_storage().data_ptr() or id(t)
    except (RuntimeError, ValueError): return id(t)              # it is sparse, or not built yet


def fills_its_memory(
    p: nn.Parameter, # That may be a view of something larger
) -> bool:
    "Does the memory that `p` lies in hold nothing else, and belong to this process alone?"
    if p.device.type not in ('cpu', 'cuda'): return True         # where memory has no address to compare
    shared = p.device.type == 'cpu' and p.is_shared()            # on CUDA always
    return not shared and p.untyped_storage().nbytes() == p.numel() * p.element_size()


def stepped_as_it_is(
    opt: Any, # fastai's `Optimizer` or `OptimWrapper`
) -> bool:
    """Are joined parameters not for it?

    It takes many in one launch by itself (PyTorch's `fused=True` and `foreach=True`), or somebody has put code around
    its step, which would meet them.
    """
    inner = getattr(opt, 'opt', opt)
    if 'step' in vars(opt) or 'step' in vars(inner) or has_step_hooks(inner): return True
    return inner is not opt and any(g.get('fused') or g.get('foreach') for g in inner.param_groups)


def trial_optimizer(
    opt: Any, # fastai's `Optimizer` or `OptimWrapper`
    params: list[nn.Parameter], # What the new one is to step on
) -> Any: # A fastai optimizer, or one of torch's
    "An optimizer of `params` with the rule of `opt` and nothing in its state."
    if type(opt) is Optimizer: return Optimizer(params, opt.cbs, **opt.hypers[0])
    inner = opt.opt
    try: trial = type(inner)(params, **inner.defaults)
    except TypeError:                                            # its arguments have other names than its defaults
        trial = copy.copy(inner)
        trial.state, trial.param_groups = defaultdict(dict), [{'params': params}]
    for g in trial.param_groups: g.update({**inner.param_groups[0], 'params': params})
    return trial


def is_elementwise(
    opt: Any, # fastai's `Optimizer` or `OptimWrapper`
) -> bool:
    "Is it one of those whose step changes the same numbers alike, in one tensor or in two?"
    if type(opt) is Optimizer: rules = [getattr(cb, 'func', cb) for cb in opt.cbs]
    elif type(opt) is OptimWrapper: rules = [type(opt.opt)]
    else: return False                                           # such as Lookahead, with weights of its own
    return all(str(rule.__module__).partition('.')[0] in ('fastai', 'torch', 'optimi')
               and getattr(rule, '__name__', '') in ELEMENTWISE for rule in rules)


def sparse_trouble(
    opt: Any, # The learner's optimizer
) -> str | None:
    "What a trial step on a small sparse gradient ends with; None if it works."
    if type(opt) is not Optimizer and not isinstance(opt, OptimWrapper): return None
    p = nn.Parameter(torch.ones(3, 2))
    try:
        trial = trial_optimizer(opt, [p])
        for _ in range(2):
            p.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (3, 2), check_invariants=False)
            trial.step()
    except (RuntimeError, TypeError) as e: return first_line(e)
    return None


def compensates(
    opt: Any, # The learner's optimizer
) -> bool:
    """Whether `opt` keeps what rounding to bf16 loses.

    optimi's do by Kahan summation, unless told not to; torchao's with `bf16_stochastic_round=True` on average.
    """
    inner = getattr(opt, 'opt', opt)
    package = type(inner).__module__.partition('.')[0]
    if package == 'optimi': return all(g.get('kahan_sum') is not False for g in inner.param_groups)
    return package == 'torchao' and bool(getattr(inner, 'bf16_stochastic_round', False))


def kahan(
    opt: str | type[torch.optim.Optimizer] = 'AdamW', # The name of one of optimi's optimizers, or its class
    **kwargs # Its arguments
) -> Callable: # To hand to `Learner(opt_func=...)`
    """An optimizer with Kahan summation for `to_half_weights(master_weights=False)`, with fastai's names.

    Needs the package torch-optimi 0.3. Its Triton kernels are left out where PyTorch finds no GPU for them (`triton`).

    Raises `ValueError` for other optimizers; `ImportError` without torch-optimi.

    Source: https://optimi.benjaminwarner.dev/kahan_summation.
    """
    try: import optimi
    except ImportError as e: raise ImportError("kahan needs optimi: `pip install torch-optimi`.") from e
    known = {n: o for n, o in vars(optimi).items() if isinstance(o, type) and issubclass(o, torch.optim.Optimizer)}
    cls: Any = known.get(opt) if isinstance(opt, str) else opt
    if cls not in known.values():
        raise ValueError(f"opt={opt!r} is not one of optimi's optimizers. Take one of {', '.join(sorted(known))}.")
    # optimi decides by the parameters that have gradients in the first step; where all are frozen, for Triton
    triton = None if torch.cuda.is_available() or torch.xpu.is_available() else False
    hp_map = {**pytorch_hp_map, 'beta1': 'mom', 'beta2': 'sqr_mom'}
    return partial(OptimWrapper, opt=partial(cls, **{'kahan_sum': True, 'triton': triton, **kwargs}), hp_map=hp_map)


def optimizer_name(
    opt: Any, # fastai's `Optimizer` or `OptimWrapper`
) -> str: # Such as 'AdamW'; for fastai's own, whose class is always `Optimizer`, by its step: 'Adam'
    "What a user calls `opt`."
    if type(opt) is not Optimizer: return type(opt.opt if isinstance(opt, OptimWrapper) else opt).__name__
    step = getattr(opt.cbs[-1], 'func', opt.cbs[-1])
    return getattr(step, '__name__', 'Optimizer').removesuffix('_step').title()
