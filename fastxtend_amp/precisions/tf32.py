"TF32: fp32 tensors whose matrix products and convolutions run on tensor cores, with 10 bits of mantissa."
from typing import Any

import torch
from torch import nn

from ..devices import facts
from ..devices.fp32_settings import TF32_SETTINGS, fp32_settings
from .base import Precision
from .support import Support

_NEEDS = Support('unsupported', 'TF32 needs an NVIDIA GPU of compute capability 8.0 or higher, or an AMD MI300')


class TF32(Precision):
    """Train in fp32 with matrix products and convolutions in TF32.

    It runs on NVIDIA GPUs of compute capability 8.0 or newer, and on AMD's MI300. TF32 has the range of fp32 and the 10
    mantissa bits of fp16: use it for models that do not train in 16 bits. Tensors stay fp32. By default PyTorch already
    uses TF32 in cuDNN's convolutions and recurrent layers, so only matrix products change.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#tf32-on-ampere.
    """
    name, color = 'tf32', '#5d8a3c'

    def __init__(self): super().__init__()

    @classmethod
    def support(cls, device: torch.device) -> Support:
        if device.type != 'cuda': return _NEEDS
        if why := facts.missing(device): return Support('unsupported', why)
        if amd := facts.amd_architecture(device):
            return Support('native', f'ROCm {amd}') if amd in ('gfx940', 'gfx941', 'gfx942') else _NEEDS
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8: return Support('unsupported', f'compute capability {major}.{minor}: TF32 needs 8.0')
        return Support('native', f'compute capability {major}.{minor}, tensor cores')

    def around_fit(self, model: nn.Module) -> list[Any]: return [fp32_settings(TF32_SETTINGS)]
