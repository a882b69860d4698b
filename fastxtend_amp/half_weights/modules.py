"Which weights autocast casts inside their module's own forward, and which models cannot have half-precision weights."
from __future__ import annotations

from collections import Counter
from functools import lru_cache
from types import MethodType
from typing import Any

import torch
from torch import nn

from ..common import is_dtensor
from ..convert import HALF
from ..fp32_modules import Fp32Forward, unwrapped
from .optimizers import sparse_trouble

__all__ = ['check_model', 'weights_to_lower']

# Arguments of the smallest such module, and the shape of an input to it.
_SMALLEST: dict[type[nn.Module], tuple[tuple, tuple]] = {
    nn.Linear: ((1, 1), (1, 1)), nn.MultiheadAttention: ((1, 1), (1, 1, 1)),
    nn.Conv1d: ((1, 1, 1), (1, 1, 1)), nn.ConvTranspose1d: ((1, 1, 1), (1, 1, 1)),
    nn.Conv2d: ((1, 1, 1), (1, 1, 1, 1)), nn.ConvTranspose2d: ((1, 1, 1), (1, 1, 1, 1)),
    nn.Conv3d: ((1, 1, 1), (1, 1, 1, 1, 1)), nn.ConvTranspose3d: ((1, 1, 1), (1, 1, 1, 1, 1)),
}
_OWN_FORWARD = {kind: kind.forward for kind in _SMALLEST}        # a library may have replaced one since then
_CAST = {'weight', 'bias', 'in_proj_weight', 'in_proj_bias', 'q_proj_weight', 'k_proj_weight', 'v_proj_weight'}


def weights_to_lower(
    model: nn.Module, # The model, as it is or wrapped
    device_type: str, # Type of the device that autocast is on for
    dtype: torch.dtype, # autocast's dtype
) -> list[nn.Parameter]:
    """The fp32 parameters of `model` that autocast would cast to `dtype`, inside their module's own forward.

    Modules of exact types, whose class's own forward is in use, without parametrizations and weight hooks. Recurrent
    layers are left out: PyTorch wants their weights in their inputs' dtype. So are `nn.Bilinear`, whose weights
    autocast does not cast, weights that several modules share, and modules inside one that is kept in fp32.
    """
    modules = [*unwrapped(model).modules()]
    owners = Counter(p for m in modules for p in m.parameters(recurse=False))
    in_fp32 = {m for kept in modules if isinstance(kept.__dict__.get('forward'), Fp32Forward) for m in kept.modules()}
    found: list[nn.Parameter] = []
    for module in modules:
        if module in in_fp32 or type(module) not in _SMALLEST or not _own_forward(module): continue
        if not autocast_casts(type(module), device_type, dtype): continue   # type: ignore[arg-type]
        params = dict(module.named_parameters(recurse=False))
        if not params.keys() <= _CAST | {'bias_k', 'bias_v'}: continue   # a weight is computed from others
        if isinstance(module, nn.MultiheadAttention): params.update(module.out_proj.named_parameters(recurse=False))
        found += [p for name, p in params.items() if name in _CAST and name not in module.__dict__ and owners[p] == 1]
    return [p for p in found if type(p) is nn.Parameter and p.dtype is torch.float32 and p.device.type == device_type]


def _own_forward(module: nn.Module) -> bool:
    own, kind = module.__dict__.get('forward'), type(module)
    plain = own is None or own == MethodType(kind.forward, module)   # as a copied model has it
    return plain and kind.forward is _OWN_FORWARD[kind]


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
