"Makes trainable 16-bit weights fp32, as mixed precision needs them; transformers 5 loads checkpoints in 16 bits."
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from ..learners import inner_optimizer, is_dtensor
from ..messages import warn_user
from ..tensors import half_to_float, is_half, map_tensors


def weights_to_fp32(
    model: nn.Module, # Its parameters stay the same objects
    opt: Any, # Its optimizer, or None
) -> None:
    """Convert trainable 16-bit parameters, their gradients and their optimizer state to fp32, with one warning.

    A second warning names the first parameter that autocast does not convert.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad and not is_dtensor(p)}
    other = [f"'{name}' is {p.dtype}" for name, p in trained.items() if p.is_complex() or p.dtype is torch.float64]
    if other:
        warn_user(f'{other[0]}: autocast does not convert float64 and complex parameters (here {len(other):,}), nor '
                  'what is computed with them.\nConvert float64 with `learn.model.float()`.', model)
    half = {name: p for name, p in trained.items() if is_half(p)}
    if not half: return
    opt = inner_optimizer(opt)
    megabytes = sum(p.nbytes for p in half.values()) / 1e6
    for p in half.values():
        p.data = p.data.float()
        if p.grad is not None: p.grad = p.grad.float()
        if opt and p in opt.state: opt.state[p] = map_tensors(half_to_float, opt.state[p])
    for m in model.modules():                                    # as BatchNorm has its statistics in the same dtype
        if not set(half.values()).isdisjoint(m.parameters(recurse=False)):
            # Those of `spectral_norm` are in a child.
            for b in m.buffers(recurse=isinstance(m, ParametrizationList)): b.data = half_to_float(b.data)
    warn_user(f"{len(half):,} trainable 16-bit parameters, the first of them '{next(iter(half))}', were converted to "
              f'fp32, which needs {megabytes:,.3g} MB more: 16-bit weights would lose small updates.\nTo train with '
              "16-bit weights, where bf16 is native, use `opt_func=kahan('AdamW')` and "
              '`learn.to_bf16(master_weights=False)`.')
