"The rounding of a precision on a device without it: linear layers compute on values that it can represent."
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from ..precisions.base import Rounding
from .compat import unwatched


def round_as(
    rounded: Rounding,
    layer: nn.Module, # A linear layer of a copy
) -> None:
    "Make a layer round its input, its weight and the gradient of its output, in autocast."
    vars(layer)['forward'] = partial(_linear, rounded, layer)


def _linear(rounded, layer, x):
    x = x.to(torch.get_autocast_dtype(x.device.type))
    out = F.linear(_copy(rounded, x), _copy(rounded, layer.weight))
    if out.requires_grad: out.register_hook(partial(_copy, rounded, is_gradient=True))
    return out if layer.bias is None else out + layer.bias.to(out.dtype)


def _copy(rounded, t, is_gradient=False):
    "Return `t` rounded. To autograd, and to a trace, it is a plain copy."
    copy = t.clone()
    with unwatched(), torch.no_grad(): copy.copy_(rounded(t, is_gradient))
    return copy
