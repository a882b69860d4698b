"MXFP8: bf16 autocast whose linear layers compute in 8 bits with a scale for each 32 numbers, by torchao's prototype."
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from ..devices import facts
from .base import Rounding, Support
from .fp8 import FP8, Fp8Forward

_BLOCK = 32  # numbers with one scale


def rounded(t: torch.Tensor, is_gradient: bool) -> torch.Tensor:
    "Return `t` rounded to e4m3 in blocks of its last dimension, each scaled by a power of two (rounded up)."
    blocks = t.float().unflatten(-1, (-1, _BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    e4m3 = torch.float8_e4m3fn
    scale = (largest / torch.finfo(e4m3).max).clamp(min=2.**-127)
    scale = scale.log2().ceil().exp2()
    return ((blocks / scale).to(e4m3).float() * scale).view(t.shape)


class MxForward(Fp8Forward):
    "The forward of a linear layer in MXFP8, under autocast: torchao's product, with rows of zeros up to a whole block."
    def __init__(self, module: Any): super(Fp8Forward, self).__init__(module)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
        from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
        weight: Any = self.module.weight
        is_native = MXFP8.support(weight.device).status == 'native'
        recipe = MXFP8TrainingRecipe.MXFP8_RCEIL if is_native else MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL
        config = MXFP8TrainingOpConfig.from_recipe(recipe)
        rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
        whole = pad(rows, (0, 0, 0, -len(rows) % _BLOCK))
        out = _to_mxfp8_then_scaled_mm(whole, weight.to(torch.bfloat16), config.kernel_preference,
                                       config.scale_calculation_mode, config.wgrad_with_hp)
        out = out[:len(rows)].view(*x.shape[:-1], -1)
        return out if self.module.bias is None else out + self.module.bias.to(out.dtype)


class MXFP8(FP8):
    """Train with bf16 autocast and with linear layers in MXFP8, by torchao's prototype; native on NVIDIA's Blackwell.

    A layer computes in MXFP8 if both sides of its weight are divisible by 32. Weights, optimizer and files are those of
    the plain model.

    Raises `ImportError` without torchao 0.18, and `ValueError` for a model without such layers.

    Source: OCP Microscaling Formats (MX) Specification 1.0, 2023; torchao's `MXFP8TrainingRecipe`.
    """
    name, color, in_tables, sides, forward = 'mxfp8', '#b0568f', False, _BLOCK, MxForward

    @classmethod
    def support(cls, device: torch.device) -> Support:
        fp8 = FP8.support(device)
        is_blackwell = fp8.status == 'native' and facts.cuda_capability(device) >= (10, 0)
        if is_blackwell or fp8.status == 'unsupported': return fp8
        return Support('emulated', 'MXFP8 arithmetic needs an NVIDIA GPU of compute capability 10.0 or higher')

    def rounding(self, model: nn.Module) -> dict[str, Rounding]:
        return dict.fromkeys(self.find_layers(model), rounded)
