"bfloat16: fp32's range in 16 bits, so the loss needs no scaling."
import re
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from fastai.learner import Learner

from ..devices import facts
from ..messages import check_bool
from .base import Precision
from .bf16_weights import BF16Weights, check_bf16_weights
from .support import Support, cpu_support, xla_support


def _cuda(device: torch.device) -> Support:
    if amd := facts.amd_architecture(device):
        if re.match('gfx10', amd): return Support('unsupported', f'{amd} (RDNA 1 and 2) has no bf16 instructions')
        no_cdna = re.match('gfx9(?!08|0a|4|5)', amd)
        if no_cdna: return Support('emulated', f'{amd} has no bf16 arithmetic (CDNA GPUs do)')
        return Support('native', f'ROCm {amd}')
    major, minor = torch.cuda.get_device_capability(device)
    capability = f'compute capability {major}.{minor}'
    if major >= 8: return Support('native', capability + ', tensor cores')
    return Support('emulated', f'{capability}: bf16 arithmetic needs 8.0')


def _mps(device: torch.device) -> Support:
    chip = facts.apple_chip()
    if re.search(r'\bM[12]\b', chip): return Support('emulated', f'{chip}: the GPU has bf16 arithmetic from M3 on')
    return Support('native', f'Metal, {chip}'.rstrip(', '))


def _xpu(device: torch.device) -> Support:
    has_bf16 = torch.xpu.get_device_capability(device).get('has_bfloat16_conversions', True)
    return Support('native', 'Intel GPU') if has_bf16 else Support('emulated', 'this Intel GPU has no bf16 arithmetic')


class BF16(Precision):
    """Train with bfloat16 autocast, which needs no loss scaling.

    The model's parameters are the fp32 master weights, and autocast makes their bf16 copies. With
    `master_weights=False`, the weights and biases of `nn.Linear` and of convolutions are bf16 during a fit, and so are
    their gradients and optimizer state: about 10 bytes per parameter instead of 18 in linear and convolutional
    networks. During a fit, call the model inside `learn.amp_context()`.

    Raises `TypeError` for `fp32_modules` that cannot be used, and `ValueError` if they match no module. `fit` raises
    `ValueError` if the device does not support bf16, for `master_weights=False` with an optimizer that does not
    compensate for rounding, and for `flat_master=True` with anything but fastai's own element-wise optimizers on plain
    parameters.

    Source: https://docs.pytorch.org/docs/stable/amp.html. Devices: NVIDIA's CUDA C++ Programming Guide; AMD's
    https://rocm.docs.amd.com/en/latest/reference/precision-support.html; Apple's Metal feature set tables.
    """
    name, dtype, color, automatic = 'bf16', torch.bfloat16, '#2a78b8', True
    rules: ClassVar = dict(
        cpu=lambda device: cpu_support('bf16', 'avx512_bf16', 'amx_bf16', 'bf16'), cuda=_cuda, mps=_mps, xpu=_xpu,
        xla=lambda device: xla_support('TPU', 'CUDA', 'ROCM'))

    def __init__(self, *,
        fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules or predicates
        skip_nonfinite: bool = False, # Skip steps with non-finite gradients, as fp16 does
        master_weights: bool = True, # Keep fp32 master weights; False trains bf16 weights
        flat_master: bool = False, # Join the master weights into a few large tensors
    ):
        super().__init__(fp32_modules)
        check_bool(skip_nonfinite=skip_nonfinite, master_weights=master_weights, flat_master=flat_master)
        if flat_master and not master_weights:
            raise ValueError('flat_master=True and master_weights=False cannot be combined. Leave out one of them.')
        self.skip_nonfinite, self.master_weights, self.flat_master = skip_nonfinite, master_weights, flat_master

    def prepare(self, learn: Learner) -> None:
        if self.master_weights: super().prepare(learn)
        else: check_bf16_weights(learn)                          # 16-bit weights stay what they are

    def around_training(self, learn: Learner) -> list[Any]:
        if self.master_weights: return []
        self.bf16_weights = BF16Weights(learn, self.kept_in_fp32(learn.model))
        return [self.bf16_weights]

    def step(self, learn: Learner, step: Callable[[], object]) -> None:
        super().step(learn, step)
        if not self.master_weights: self.bf16_weights.after_step(learn)
