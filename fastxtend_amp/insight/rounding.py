"""The rounding of FP8 on a device without FP8: linear layers compute in bf16 on values that FP8 can represent.

As torchao's `Float8Linear` does by default, inputs and weights are rounded to e4m3 and the gradients of outputs to
e5m2, each tensor scaled by its largest absolute value (Micikevicius et al., FP8 Formats for Deep Learning,
https://arxiv.org/abs/2209.05433).
"""
from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from .compat import unwatched


def round_as_fp8(layer: nn.Module) -> None:
    "Make a layer of a copy round as FP8 does, in autocast."
    vars(layer)['forward'] = partial(_linear, layer)


def _linear(layer, x):
    x = x.to(torch.get_autocast_dtype(x.device.type))
    out = F.linear(_rounded(x), _rounded(layer.weight))
    if out.requires_grad: out.register_hook(partial(_rounded, dtype=torch.float8_e5m2))
    return out if layer.bias is None else out + layer.bias.to(out.dtype)


def _rounded(t, dtype=torch.float8_e4m3fn):
    "Return `t` rounded as in FP8. To autograd, and to a trace, it is a plain copy."
    copy = t.clone()
    with unwatched(), torch.no_grad():
        scale = torch.finfo(dtype).max / t.abs().max().float().clamp(min=1e-12)
        copy.copy_((t.float() * scale).to(dtype).float() / scale)
    return copy
