"16-bit weights as fastai v1 had them: fp32 master weights, flat ones, and training without them."
from __future__ import annotations

import copy, inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from fastai import optimizer as rules
from fastai.learner import Learner
from fastai.optimizer import Optimizer, OptimWrapper, pytorch_hp_map
from fastcore.foundation import L
from torch import nn
from torch.amp import GradScaler

from ..learners import is_sharded, optimizer_params
from .base import AMPMode, Precision, Support, find_precision
from .bf16 import BF16
from .fp16 import FP16
from .matching import covers, qualified_names

LOWERED = ('bf16', 'fp16')  # the precisions that weights can have


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
        if name not in LOWERED:
            raise ValueError(f"amp_mode={amp_mode!r} cannot be used: weights are 'bf16' or 'fp16'.\n"
                             f'Without 16-bit weights call `learn.to_{name}()`.')
        if name == 'bf16' and loss_scale is not None:
            raise ValueError(f"loss_scale={loss_scale!r} cannot be used with amp_mode='bf16', which needs no loss "
                             "scaling. Leave it out, or use amp_mode='fp16'.")
        if not master_weights and flat_master:
            raise ValueError('flat_master=True cannot be used with master_weights=False: there are no master weights '
                             'to join. Leave one of them out.')
        if not master_weights and name == 'fp16':
            raise ValueError("master_weights=False cannot be used with amp_mode='fp16', whose gradients must be "
                             "unscaled in fp32. Use amp_mode='bf16', or leave out `master_weights=False`.")
        self.autocast: Precision = BF16() if name == 'bf16' else FP16(loss_scale=loss_scale)
        self.state_key, self.first_scale = self.autocast.state_key, self.autocast.first_scale
        vars(self)['support'] = self.autocast.support            # a class method
        self.dtype, self.flat_master, self.master_weights = self.autocast.dtype, flat_master, master_weights
        self.lowered = _Lowered()

    # What autocast in the weights' precision does.
    @property
    def kind(self) -> type[Precision]: return self.autocast.kind
    def scaler(self, device: torch.device) -> GradScaler | None: return self.autocast.scaler(device)
    def state_dict(self) -> dict[str, Any]: return self.autocast.state_dict()
    def load_state_dict(self, state: dict[str, Any] | None) -> None: self.autocast.load_state_dict(state)
    @classmethod
    def support(cls, device: torch.device) -> Support: return BF16.support(device)

    def prepare(self, learn: Learner) -> None:
        if self.master_weights: super().prepare(learn)

    def around_training(self, learn: Learner) -> list[Any]:
        if self.flat_master:
            _check_flat_master(learn.model, learn.opt)
            return [_own_memory(learn.model)]
        if self.master_weights: return []
        _check_no_masters(learn.model, learn.opt)
        allowed = _weights_to_lower(learn.model, self.kept_in_fp32(learn.model))
        params = [p for p in optimizer_params(learn.opt) if p in allowed and p.requires_grad]
        return [self.lowered.of(learn.opt, params)]

    def step(self, learn: Learner, step: Callable[[], object]) -> None:
        if self.flat_master: _check_elementwise(learn.opt)       # which a callback may have exchanged
        around = _flat(learn.opt) if self.flat_master else nullcontext() if self.master_weights else \
            self.lowered.stepping(learn.opt)
        with around: step()


@contextmanager
def _own_memory(model: nn.Module):
    "Give each parameter its own memory at the end: one that is saved alone would be saved with all others."
    try: yield
    finally:
        for p in model.parameters(): p.data = p.data.clone()


def _optimizer_name(opt: Optimizer | OptimWrapper) -> str:
    "Return the name of `opt` for a user, such as 'AdamW'; fastai's own share one class, so the last rule gives theirs."
    if type(opt) is Optimizer: return _rules(opt)[-1].__name__.removesuffix('_step').title()
    return type(opt.opt if isinstance(opt, OptimWrapper) else opt).__name__


def _rules(opt: Optimizer) -> list[Callable]:
    return [getattr(rule, 'func', rule) for rule in opt.cbs]     # some are partial


# -- flat master weights

_ELEMENTWISE = {rules.weight_decay, rules.l2_reg, rules.average_grad, rules.average_sqr_grad, rules.step_stat,
                rules.sgd_step, rules.momentum_step, rules.rms_prop_step, rules.adam_step, rules.radam_step,
                rules.qhadam_step}


def _refuse_flat(what: str) -> None:
    raise ValueError(f"flat_master=True cannot be used with {what}.\nLeave flat_master out. For a faster step on a "
                     "CPU or GPU build the learner with `opt_func=fused('AdamW')`.")


def _check_elementwise(opt: Optimizer | OptimWrapper) -> None:
    if type(opt) is Optimizer and 'step' not in vars(opt) and {*_rules(opt)} <= _ELEMENTWISE: return
    _refuse_flat(f"{_optimizer_name(opt)}, which is not one of fastai's own element-wise optimizers with a plain step")


def _check_flat_master(
    model: nn.Module, # The learner's model
    opt: Optimizer | OptimWrapper, # The learner's
) -> None:
    "Raise a `ValueError` that names an optimizer or a parameter that `flat_master` does not support."
    _check_elementwise(opt)
    names = {p: f"parameter '{name}'" for name, p in model.named_parameters()}
    embeddings = (m for m in model.modules() if getattr(m, 'sparse', False))
    sparse = {p for m in embeddings for p in m.parameters(recurse=False)}
    addresses = {0}                                              # 0 is that of DTensors and of tensors on XLA devices
    for p in (p for params in opt.param_lists for p in params):
        for unfit, why in ((p in sparse, 'has sparse gradients'), (not p.is_contiguous(), 'is not contiguous'),
                           (p.numel() > 0 and p.data_ptr() in addresses, 'is shared, sharded or on an XLA device')):
            if unfit: _refuse_flat(f"{names.get(p, 'a parameter')}, which {why}")
        addresses.add(p.data_ptr())


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


# -- without fp32 master weights

_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d,
         nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _check_no_masters(
    model: nn.Module, # The learner's model
    opt: Optimizer | OptimWrapper, # The learner's
) -> None:
    "Raise a `ValueError` that names a model or an optimizer that needs fp32 master weights."
    ddp = any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules())
    if ddp or is_sharded(model):
        raise ValueError(f"master_weights=False cannot be used with {'DistributedDataParallel' if ddp else 'FSDP2'}, "
                         "which reduces gradients in the dtype that the weights had when the model was wrapped.\n"
                         "Use `learn.to_bf16()`, or with FSDP2 `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`.")
    inner = getattr(opt, 'opt', None)
    packages = {cls.__module__.partition('.')[0] for cls in type(inner).__mro__}
    groups = getattr(inner, 'param_groups', [])
    if 'optimi' in packages and all(g.get('kahan_sum') is not False for g in groups): return
    if 'torchao' in packages and getattr(inner, 'bf16_stochastic_round', False): return
    raise ValueError(f"master_weights=False cannot be used with {_optimizer_name(opt)}, which does not compensate for "
                     "rounding: small updates of bf16 weights are lost.\nBuild the learner with "
                     "`opt_func=kahan('AdamW')` or with torchao's stochastic rounding, or leave out "
                     "`master_weights=False`.")


def _weights_to_lower(
    model: nn.Module, # As it is or wrapped
    in_fp32: Collection[str], # Names of the modules that are kept in fp32
) -> set[nn.Parameter]:
    "Return the fp32 weights and biases that autocast casts in linear layers and convolutions, without shared ones."
    places = list(qualified_names(model))
    uses = Counter(p for _, m in places for p in m.parameters(recurse=False))
    layers = (m for name, m in places if type(m) in _CAST and not covers(in_fp32, name))
    return {p for m in layers for name, p in m.named_parameters(recurse=False)
            if name in ('weight', 'bias')                        # not what a weight is computed from, as `weight_orig`
            and uses[p] == 1 and p.dtype is torch.float32}


class _Lowered:
    """Context in which parameters, their gradients and the optimizer's state are bf16; afterwards they are fp32.

    A weight is the sum of the parameter and its Kahan compensation, also in files saved during a fit. Until the
    optimizer has taken a step, and so has a compensation, the rest that rounding took is kept here: training that ends
    before that changes nothing. A copy that is made meanwhile is in fp32.
    """
    def __init__(self):
        self.opt: Any = None
        self.rest: dict[nn.Parameter, torch.Tensor | None] = {}  # what rounding took; empty outside

    def __deepcopy__(self, memo: dict) -> _Lowered:
        new = memo[id(self)] = _Lowered()
        new.opt, new.rest = copy.deepcopy((self.opt, self.rest), memo)
        new.__exit__()
        return new

    def of(self, opt: Any, params: list[nn.Parameter]) -> _Lowered:
        self.opt, self.rest = opt, dict.fromkeys(params)
        return self

    def __enter__(self) -> None:
        for p in self.rest: self._convert(p, torch.bfloat16)

    def __exit__(self, *args: object) -> None:
        for p in self.rest: self._convert(p, torch.float32)
        self.opt, self.rest = None, {}                           # last: an interrupt before this converts them again

    @contextmanager
    def stepping(self, opt: Any):
        "Add what is kept of a parameter to the compensation that its first step creates."
        self.opt = opt                                           # which a callback may have exchanged
        yield
        for p, rest in self.rest.items():
            if rest is None or not (state := self._state(p)): continue
            if 'kahan_comp' in state: state['kahan_comp'].add_(rest)
            self.rest[p] = None

    def _state(self, p: nn.Parameter) -> dict[str, Any]:
        return getattr(getattr(self.opt, 'opt', None), 'state', {}).get(p, {})
    def _convert(self, p: nn.Parameter, dtype: torch.dtype) -> None:
        state = self._state(p)
        for k, v in state.items():                               # step counts and quantized states stay
            converts = type(v) is torch.Tensor and v.dim() and v.is_floating_point()
            if converts: state[k] = v.to(dtype)
        place: Any = state if 'kahan_comp' in state else {} if state else self.rest
        name, kind = ('kahan_comp', dtype) if place is state else (p, torch.float32)
        before, rest = p.data.float(), place.get(name)           # None after steps in fp32
        rest = torch.zeros_like(before) if rest is None else rest.float()
        exact = before + rest
        data, rest = exact.to(dtype), rest - (exact - before)    # and what the sum has rounded away
        rest = (exact - data) + rest
        p.data, place[name] = data, rest.to(kind)                # at once, whatever interrupts
        if p.grad is not None: p.grad = p.grad.to(dtype)


def kahan(
    opt: str | type[torch.optim.Optimizer] = 'AdamW', # The name of one of optimi's optimizers, or its class
    **kwargs # Its arguments
) -> Callable[..., OptimWrapper]: # For `Learner(opt_func=...)`
    """Return an optimizer with Kahan summation that fastai can schedule, for `to_half_weights(master_weights=False)`.

    Needs the package torch-optimi 0.3. Its Triton kernels are used on GPUs only.

    Raises `ValueError` for other optimizers, `TypeError` for arguments that `opt` does not have, and `ImportError`
    without torch-optimi.

    Source: https://optimi.benjaminwarner.dev/kahan_summation.
    """
    try: import optimi
    except ImportError as e: raise ImportError("kahan needs optimi: `pip install torch-optimi`.") from e
    cls: Any = getattr(optimi, opt, None) if isinstance(opt, str) else opt
    if not (isinstance(cls, type) and cls.__module__.startswith('optimi.')):
        raise ValueError(f"opt={opt!r} is not one of optimi's optimizers. Use one of those at "
                         "https://optimi.benjaminwarner.dev/optimizers, such as 'AdamW'.")
    inspect.signature(cls).bind_partial(None, **kwargs)          # raises `TypeError` for other arguments
    # optimi looks at the parameters that have gradients in the first step: without any it uses Triton
    triton = None if torch.cuda.is_available() or torch.xpu.is_available() else False
    hp_map = {**pytorch_hp_map, 'beta1': 'mom', 'beta2': 'sqr_mom'}
    kwargs = {'kahan_sum': True, 'triton': triton, **kwargs}
    return partial(OptimWrapper, opt=partial(cls, **kwargs), hp_map=hp_map)
