"Which weights can have half-precision copies: those that autocast casts inside their module's own forward."
from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from ..common import is_dtensor
from ..convert import HALF
from ..forward import ModuleForward
from ..fp32_modules import Fp32Forward, unwrapped
from .optimizers import sparse_trouble

__all__ = ['Weight', 'check_model', 'weights_to_copy']

# Arguments of the smallest such module, and the shape of an input to it.
_SMALLEST: dict[type[nn.Module], tuple[tuple, tuple]] = {
    nn.Linear: ((1, 1), (1, 1)), nn.MultiheadAttention: ((1, 1), (1, 1, 1)),
    nn.Conv1d: ((1, 1, 1), (1, 1, 1)), nn.ConvTranspose1d: ((1, 1, 1), (1, 1, 1)),
    nn.Conv2d: ((1, 1, 1), (1, 1, 1, 1)), nn.ConvTranspose2d: ((1, 1, 1), (1, 1, 1, 1)),
    nn.Conv3d: ((1, 1, 1), (1, 1, 1, 1, 1)), nn.ConvTranspose3d: ((1, 1, 1), (1, 1, 1, 1, 1)),
}
_OWN_FORWARD = {kind: kind.forward for kind in _SMALLEST}        # a library may have replaced one since then
_ATTENTION = {'in_proj_weight', 'in_proj_bias', 'q_proj_weight', 'k_proj_weight', 'v_proj_weight', 'bias_k', 'bias_v'}


class Weight(NamedTuple):
    "A parameter and where it is."
    module: nn.Module
    name: str
    param: nn.Parameter


def weights_to_copy(
    model: nn.Module, # The model, as it is or wrapped
    device_type: str, # Type of the device that autocast is on for
    dtype: torch.dtype, # autocast's dtype
) -> dict[nn.Module, list[list[Weight]]]: # By module; those in one list are used together
    """The fp32 parameters of `model` that autocast would cast to `dtype`, inside their module's own forward.

    Modules of exact types, whose class's own forward is in use, without parametrizations and weight hooks. Recurrent
    layers are left out: PyTorch wants their weights in their inputs' dtype, and for cuDNN autocast packs them into a
    buffer of its own anyway. So are `nn.Bilinear`, whose weights autocast does not cast, weights that several modules
    share, and modules inside one that is kept in fp32.
    """
    owners: dict[int, list] = {}
    for module in unwrapped(model).modules():
        for p in module.parameters(recurse=False):
            owners.setdefault(id(p), []).append(p)               # held, so that ids stay apart
    def can_have_copy(w):
        p = w.param
        plain = type(p) is nn.Parameter and p.dtype is torch.float32 and p.device.type == device_type
        return plain and len(owners[id(p)]) == 1 and w.name not in w.module.__dict__
    found = {}
    for module in _in_autocast(unwrapped(model)):
        kind = type(module)
        if kind not in _SMALLEST or not _own_forward(module): continue
        if not autocast_casts(kind, device_type, dtype): continue   # type: ignore[arg-type]
        groups = [[w for w in group if can_have_copy(w)] for group in _groups(module)]
        groups = [group for group in groups if group]
        if groups: found[module] = groups
    return found


def _in_autocast(module: nn.Module, seen: set | None = None) -> Iterator[nn.Module]:
    "`module` and those inside it, without those that are kept in fp32."
    seen = set() if seen is None else seen
    if module in seen or isinstance(module.__dict__.get('forward'), Fp32Forward): return
    seen.add(module)
    yield module
    for child in module.children(): yield from _in_autocast(child, seen)


def _own_forward(module: nn.Module) -> bool:
    own, kind = module.__dict__.get('forward'), type(module)
    if kind.forward is not _OWN_FORWARD[kind]: return False
    if own is None or isinstance(own, ModuleForward): return own is None
    return getattr(own, '__func__', None) is kind.forward and own.__self__ is module   # as a copied model has it


def _groups(module: nn.Module) -> list[list[Weight]]:
    params = dict(module.named_parameters(recurse=False))
    known = _ATTENTION if isinstance(module, nn.MultiheadAttention) else {'weight', 'bias'}
    if not params.keys() <= known: return []                     # a weight is computed from others
    def group(*names): return [Weight(module, n, params[n]) for n in names if n in params]
    if not isinstance(module, nn.MultiheadAttention): return [group('weight', 'bias')]
    # Separate projections take parts of one bias, which autocast casts one by one; bias_k and bias_v it does not cast.
    if 'in_proj_weight' in params: groups = [group('in_proj_weight', 'in_proj_bias')]
    else: groups = [group(n) for n in ('q_proj_weight', 'k_proj_weight', 'v_proj_weight')]
    out, own = module.out_proj, dict(module.out_proj.named_parameters(recurse=False))
    if not isinstance(out, nn.Linear) or not own.keys() <= {'weight', 'bias'}: return groups
    return [*groups, [Weight(out, n, p) for n, p in own.items()]]


@lru_cache
def autocast_casts(
    kind: type[nn.Module], # One of those in the table
    device_type: str, # Type of the device
    dtype: torch.dtype, # autocast's dtype
) -> bool:
    "Whether autocast casts the weights of such a module there: then fp32 inputs give an output in `dtype`."
    args, shape = _SMALLEST[kind]
    try:
        module, x = nn.utils.skip_init(kind, *args, device=device_type), torch.zeros(shape, device=device_type)
        with torch.no_grad(), torch.autocast(device_type, dtype=dtype):
            out = module(x, x, x)[0] if kind is nn.MultiheadAttention else module(x)
    except RuntimeError: return False                            # it will say so itself when the model gets there
    return out.dtype is dtype


def check_model(
    model: nn.Module, # The learner's model
    opt: Any, # The learner's optimizer
) -> None:
    "Raise a `ValueError` that names what cannot be trained with half-precision weights, and what to use instead."
    for module in model.modules():
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise ValueError(f"to_half_weights cannot be used with DataParallel on {len(module.device_ids)} devices.\n"
                             "Its replicas are made anew in each batch, and copies of their weights would be, too.\n"
                             "Use `learn.to_bf16()` with it, or DistributedDataParallel.")
    for path, module in unwrapped(model).named_modules():
        for name, p in module.named_parameters(recurse=False):
            where = f"parameter '{path + '.' if path else ''}{name}'"
            if is_dtensor(p):
                raise ValueError(f"to_half_weights cannot be used with FSDP2: {where} is a DTensor, spread over "
                                 "processes.\n"
                                 "Use `learn.to_bf16()`, or `fully_shard`'s own "
                                 "`MixedPrecisionPolicy(param_dtype=torch.bfloat16)`.")
            if p.dtype in HALF and p.requires_grad:
                raise ValueError(f"to_half_weights: {where} is {p.dtype} already, so it can have no fp32 master. "
                                 "Call `learn.model.float()` first.")
            if getattr(module, 'sparse', False) and p.requires_grad and (why := sparse_trouble(opt)):
                kind = type(getattr(opt, 'opt', opt)).__name__
                raise ValueError(f"to_half_weights: {where} has sparse gradients, which this {kind} cannot take "
                                 f"({why}). Use an optimizer that can, such as SGD without momentum, or "
                                 "`sparse=False`.")
