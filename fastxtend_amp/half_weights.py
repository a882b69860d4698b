"Half-precision weights as fastai v1 had them: fp32 masters, flat masters, and training without masters."
from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from fastai import optimizer as rules
from fastai.learner import Learner
from fastai.optimizer import Optimizer, OptimWrapper, pytorch_hp_map
from fastcore.basics import patch
from fastcore.foundation import L
from fastcore.meta import delegates
from torch import nn

from .callback import MixedPrecision
from .common import is_dtensor
from .fp32_modules import covers, qualified_names
from .learner import refuse_unknown, set_precision
from .mode import AMPMode
from .scaling import optimizer_params

__all__ = ['HalfWeights', 'kahan']


class HalfWeights(MixedPrecision):
    """Half-precision weights with fp32 masters: trains as `to_bf16()` or `to_fp16()` do, bit for bit and as fast.

    It is there for those who know fastai v1's `to_fp16(loss_scale, flat_master)`, and for training without masters. The
    model's parameters are the fp32 masters; their half-precision copies are autocast's casts.

    With `master_weights=False` the weights and biases of `nn.Linear` and of convolutions are bf16 themselves from the
    first training to the end of the fit, with their gradients and the optimizer's state: about 10 bytes a parameter
    instead of 18. Call such a model under autocast in a fit (`learn.amp_context()`).

    When `fit` starts, raises `ValueError` for `master_weights=False` with an optimizer that does not compensate for
    rounding, and for `flat_master=True` with anything but fastai's own element-wise optimizers on plain parameters.

    Source: Micikevicius et al., Mixed Precision Training, https://arxiv.org/abs/1710.03740, section 3.1.
    """
    def __init__(self,
        dtype: str | AMPMode | torch.dtype = AMPMode.BF16, # The weights' precision: 'bf16' or 'fp16'
        loss_scale: float | None = None, # A static loss scale; dynamic scaling if None (fp16)
        flat_master: bool = False, # Whether fastai's optimizer steps on few flat parameters
        master_weights: bool = True, # Whether there are fp32 masters; else the optimizer steps on bf16 weights
        fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules, predicates
        *,
        on_overflow: str = 'warn', # When training goes wrong: 'warn', 'raise' (`FloatingPointError`) or 'ignore'
        max_skips: int = 16, # Skipped steps in a row after which training counts as going wrong (fp16)
    ):
        arguments = {k: v for k, v in locals().items() if k not in ('self', '__class__')}
        try: mode = AMPMode(dtype)
        except ValueError: raise ValueError(f"dtype={dtype!r} cannot be used: dtype must be 'bf16' or 'fp16' (or the "
                                            "torch dtypes). For plain fp32 use `learn.to_fp32()`.") from None
        if mode is AMPMode.BF16 and loss_scale is not None:
            raise ValueError(f"loss_scale={loss_scale!r} cannot be used with dtype='bf16', which needs no loss "
                             "scaling. Leave it out, or take dtype='fp16'.")
        if not master_weights and flat_master:
            raise ValueError("flat_master=True cannot be used with master_weights=False: there is no master to make "
                             "flat. Leave one of them out.")
        if not master_weights and mode is AMPMode.FP16:
            raise ValueError("master_weights=False cannot be used with dtype='fp16', whose gradients must be unscaled "
                             "in fp32. Take dtype='bf16', or keep the masters.")
        super().__init__(mode, loss_scale=loss_scale, fp32_modules=fp32_modules, on_overflow=on_overflow,
                         max_skips=max_skips)
        self._arguments = arguments
        self.dtype, self.flat_master, self.master_weights = mode.dtype, flat_master, master_weights

    def _reset(self) -> None:
        super()._reset()
        self._lowered: list[nn.Parameter] = []                   # weights that are bf16 until the fit ends

    def _call(self, arguments: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        mode = AMPMode(arguments.pop('amp_mode'))
        if mode is AMPMode.BF16: arguments['loss_scale'] = None
        return 'to_half_weights', {**arguments, 'dtype': mode.value}

    def _check_training(self) -> None:
        learn = self.learn
        if self.flat_master: _check_flat(learn.model, learn.opt)
        if not self.master_weights: _check_no_masters(learn.model, learn.opt)
        super()._check_training()
        if self.master_weights: return
        allowed = _cast_weights(learn.model, self.fp32_module_names)
        self._lowered = [p for p in optimizer_params(learn.opt) if p in allowed and p.requires_grad]
        _bring(self._lowered, learn.opt, self.dtype)

    def _step(self, step: Callable) -> None:
        run = partial(super()._step, step)
        if self.flat_master: _step_flat(self.learn.opt, run)
        else: run()

    def _close(self, failed: bool = False) -> None:
        if self.device is None: return
        if self.flat_master and self._training_is_checked: _unjoin(self.learn.opt)
        _bring(self._lowered, self.learn.opt, torch.float32)
        self._lowered = []
        super()._close(failed)


HalfWeights.__signature__ = inspect.signature(partial(HalfWeights.__init__, None))  # type: ignore[arg-type]


@patch
@delegates(HalfWeights)
def to_half_weights(self: Learner, *args, **kwargs) -> Learner: # The learner
    "Train with half-precision weights, as fastai v1's `to_fp16` did; replaces any other precision callback."
    refuse_unknown(Learner.to_half_weights, kwargs)
    return set_precision(self, HalfWeights(*args, **kwargs))


def _optimizer_name(opt: Any) -> str:
    "Return what a user calls `opt`, such as 'AdamW'; fastai's own share a class, and are named by their last step."
    if type(opt) is not Optimizer: return type(opt.opt if isinstance(opt, OptimWrapper) else opt).__name__
    return _rule(opt.cbs[-1]).__name__.removesuffix('_step').title()


def _rule(step: Any) -> Any: return getattr(step, 'func', step)  # of a `partial`


# -- flat masters

ELEMENTWISE = (rules.weight_decay, rules.l2_reg, rules.average_grad, rules.average_sqr_grad, rules.step_stat,
               rules.sgd_step, rules.momentum_step, rules.rms_prop_step, rules.adam_step, rules.radam_step,
               rules.qhadam_step)
LINE = 16  # fp32 elements of a cache line: a kernel may round differently for weights that begin elsewhere
BLOCK = 2 ** 17  # elements: the temporary tensors of a step on more do not stay in a CPU's cache


def _check_flat(
    model: nn.Module, # The learner's model
    opt: Any, # The learner's optimizer
) -> None:
    "Raise a `ValueError` that names an optimizer or a parameter that flat masters are not for."
    def refuse(what):
        raise ValueError(f"flat_master=True cannot be used with {what}.\nLeave flat_master out. For a faster step "
                         "build the learner with `opt_func=fused('AdamW')`.")
    if type(opt) is not Optimizer or 'step' in vars(opt) or any(_rule(cb) not in ELEMENTWISE for cb in opt.cbs):
        refuse(f"{_optimizer_name(opt)}, which is not one of fastai's own element-wise optimizers with a plain step")
    names = {p: f"parameter '{name}'" for name, p in model.named_parameters()}
    sparse = {p for m in model.modules() if getattr(m, 'sparse', False) for p in m.parameters(recurse=False)}
    params, end = optimizer_params(opt), 0
    for p in params:
        for unfit, why in ((is_dtensor(p), 'is a DTensor'), (p in sparse, 'has sparse gradients'),
                           (p.device.type == 'xla', 'is on an XLA device, where a step is compiled as a whole'),
                           (not p.is_contiguous(), 'is not contiguous')):
            if unfit: refuse(f"{names.get(p, 'a parameter')}, which {why}")
    for p in sorted(params, key=torch.Tensor.data_ptr):
        if p.data_ptr() < end: refuse(f"{names.get(p, 'a parameter')}, which shares memory with another")
        end = p.data_ptr() + p.nbytes


def _step_flat(
    opt: Optimizer, # One that `_check_flat` allows
    step: Callable[[], Any], # Takes its step
) -> None:
    """Take the step on flat parameters, each for parameters of one group, dtype, device and kind of state.

    A flat one begins anew after each `BLOCK` elements, and a parameter of so many remains alone. Parameters, gradients
    and state remain parts of flat tensors; what no longer is a part, is joined anew. `opt` has an entry for each
    parameter again when this returns.
    """
    lists, states = opt.param_lists, opt.state
    parts: dict[tuple, list[nn.Parameter]] = {}
    sizes: Counter = Counter()
    for group, params in enumerate(lists):
        for p in (p for p in params if p.grad is not None):
            state = sorted((k, None if isinstance(v, torch.Tensor) else v) for k, v in states[p].items())
            kind = (group, p.dtype, p.device, *state)
            block = id(p) if p.numel() >= BLOCK else sizes[kind] // BLOCK
            if p.numel() < BLOCK: sizes[kind] += p.numel()
            parts.setdefault((*kind, block), []).append(p)
    flats, flat_states, joined = L(L() for _ in lists), {}, []
    for (group, *_), params in parts.items():
        flat = nn.Parameter(_join(params, 'data', getattr, setattr))
        flat.grad = _join(params, 'grad', getattr, setattr)
        own = [states[p] for p in params]
        before = {k: _join(own, k, dict.get, dict.__setitem__) if isinstance(v, torch.Tensor) else v
                  for k, v in own[0].items()}
        flats[group].append(flat)
        flat_states[flat] = {**before}
        joined.append((params, own, before, flat_states[flat]))
    try:
        opt.param_lists, opt.state = flats, flat_states
        step()
    finally:
        opt.param_lists, opt.state = lists, states
        for params, own, before, after in joined:
            for k, v in after.items():
                if v is before.get(k): continue
                values = _split(v, params) if isinstance(v, torch.Tensor) else [v] * len(params)
                for state, value in zip(own, values): state[k] = value


def _room(t: torch.Tensor) -> int: return -(-t.numel() // LINE) * LINE


def _split(flat: torch.Tensor, like: list) -> list[torch.Tensor]:
    "Return the parts of `flat` in the shapes of `like`; not views to autograd, which could not be detached in place."
    return [part[:t.numel()].view(t.shape).data for part, t in zip(flat.split([*map(_room, like)]), like)]


def _join(owners: list, name: str, get: Callable, put: Callable) -> torch.Tensor:
    "Return the flat tensor that the owners' tensors are parts of; if they are not, make one and put its parts there."
    tensors = [get(owner, name) for owner in owners]
    first, rooms = tensors[0], [*map(_room, tensors)]
    *places, end = accumulate((room * first.element_size() for room in rooms), initial=first.data_ptr())
    memory = first.untyped_storage()
    if end <= memory.data_ptr() + memory.nbytes() and all(t.data_ptr() == at for t, at in zip(tensors, places)):
        return first.as_strided((sum(rooms),), (1,))
    flat = torch.zeros(sum(rooms), dtype=first.dtype, device=first.device)
    for owner, t, part in zip(owners, tensors, _split(flat, tensors)): put(owner, name, part.copy_(t.detach()))
    return flat


def _unjoin(opt: Any) -> None:
    "Give each parameter, its gradient and its state memory of their own."
    def own(t): return t.clone() if t.untyped_storage().nbytes() > t.nbytes else t
    for p in optimizer_params(opt):
        p.data = own(p.data)
        if p.grad is not None: p.grad = own(p.grad)
        state = opt.state.get(p, {})
        state.update({k: own(v) for k, v in state.items() if isinstance(v, torch.Tensor)})


# -- no masters

CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _check_no_masters(
    model: nn.Module, # The learner's model
    opt: Any, # The learner's optimizer
) -> None:
    "Raise a `ValueError` that names a model or an optimizer that cannot do without fp32 masters."
    spread = next((name for name, p in model.named_parameters() if is_dtensor(p)), None)
    if spread is not None:
        raise ValueError(f"master_weights=False cannot be used with FSDP2: parameter '{spread}' is a DTensor, spread "
                         "over processes.\nUse `learn.to_bf16()`, or `fully_shard`'s own "
                         "`MixedPrecisionPolicy(param_dtype=torch.bfloat16)`.")
    if any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules()):
        raise ValueError("master_weights=False cannot be used with DistributedDataParallel, which would not reduce the "
                         "gradients of weights that change their dtype.\nUse `learn.to_half_weights()`, with masters.")
    inner = getattr(opt, 'opt', None)
    package = type(inner).__module__.partition('.')[0]
    groups = getattr(inner, 'param_groups', [])
    if package == 'optimi' and all(g.get('kahan_sum') is not False for g in groups): return
    if package == 'torchao' and getattr(inner, 'bf16_stochastic_round', False): return
    raise ValueError(f"master_weights=False cannot be used with {_optimizer_name(opt)}, which does not compensate for "
                     "rounding: small updates of bf16 weights are lost.\nBuild the learner with "
                     "`opt_func=kahan('AdamW')` or with torchao's stochastic rounding, or keep the masters.")


def _cast_weights(
    model: nn.Module, # As it is or wrapped
    in_fp32: Iterable[str], # Names of the modules that are kept in fp32
) -> set[nn.Parameter]:
    """Return the fp32 weights and biases that autocast casts, of linear layers and convolutions of exact types.

    Left out are those of several modules, those computed from others, and those in modules kept in fp32.
    """
    places = list(qualified_names(model))
    kept = {m for name, m in places if covers(in_fp32, name)}
    modules = {m for _, m in places}
    uses = Counter(p for m in modules for p in m.parameters(recurse=False))
    found: set[nn.Parameter] = set()
    for m in (m for m in modules - kept if type(m) in CAST):
        own = dict(m.named_parameters(recurse=False))
        if own.keys() <= {'weight', 'bias'}: found.update(p for p in own.values() if uses[p] == 1)
    return {p for p in found if type(p) is nn.Parameter and p.dtype is torch.float32}


def _bring(
    params: list[nn.Parameter],
    opt: Any, # fastai's `OptimWrapper`
    dtype: torch.dtype,
) -> None:
    "Bring parameters, with gradients and the optimizer's state, to `dtype`; may be interrupted and called again."
    for p in params:
        grad, p.grad = p.grad, None                              # it must have its parameter's dtype
        p.data = p.data.to(dtype)
        p.grad = None if grad is None else grad.to(dtype)
        state = getattr(opt, 'opt', opt).state.get(p, {})
        for k, v in state.items():                               # step counts and quantized states stay
            if type(v) is torch.Tensor and v.dim() and v.is_floating_point(): state[k] = v.to(dtype)
        if 'kahan_comp' in state and getattr(state['kahan_comp'], 'shape', None) != p.shape:
            state['kahan_comp'] = torch.zeros_like(p, requires_grad=False)   # optimi has none after steps in fp32


def kahan(
    opt: str | type[torch.optim.Optimizer] = 'AdamW', # The name of one of optimi's optimizers, or its class
    **kwargs # Its arguments
) -> Callable[..., OptimWrapper]: # For `Learner(opt_func=...)`
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
