"""MXFP8: a precision of your own in one file. Importing it adds `learn.to_mxfp8()`, also to reports and comparisons.

Linear layers, whose sides must be divisible by 32, compute with torchao's prototype (0.18): native on NVIDIA's
Blackwell, emulated elsewhere. Reports simulate the rounding of FP8.
"""
import torch
from functools import partial
from torch.nn.functional import pad
from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
from fastxtend_amp.precisions import FP8, Support
from fastxtend_amp.precisions.fp8 import Fp8Forward

def mx_linear(layer, input):
    is_native = MXFP8.support(input.device).status == 'native'
    config = MXFP8TrainingOpConfig.from_recipe(
        MXFP8TrainingRecipe.MXFP8_RCEIL if is_native else MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL)
    rows = input.bfloat16().flatten(0, -2)
    whole = pad(rows, (0, 0, 0, -len(rows) % 32))                # blocks of 32 rows
    out = _to_mxfp8_then_scaled_mm(whole, layer.weight.bfloat16(), config.kernel_preference,
                                   config.scale_calculation_mode, config.wgrad_with_hp)
    out = out[:len(rows)].view(*input.shape[:-1], -1)
    return out if layer.bias is None else out + layer.bias.bfloat16()

class MxForward(Fp8Forward):
    def in_8_bits(self, layer): return partial(mx_linear, layer)

class MXFP8(FP8):
    "Train with bf16 autocast, and with linear layers in MXFP8."
    name, color, sides, forward = 'mxfp8', '#b0568f', 32, MxForward

    @classmethod
    def support(cls, device):
        found = FP8.support(device)
        if found.status == 'native' and torch.cuda.get_device_capability(device) < (10, 0):
            return Support('emulated', 'MXFP8 needs compute capability 10.0')
        return found
