"float16: 10 bits of mantissa, but only 5 of exponent, so the loss is scaled to keep gradients from underflowing."
from __future__ import annotations

import re
from typing import Any, ClassVar

import torch
from torch.amp import GradScaler

from ..common import warn_user
from ..devices import facts
from .base import Precision, Support, cpu_support, xla_support
from .scalers import CopyableScaler, DynamicScaler, StaticScaler, check_scaler_state, check_scaling_arguments

_NO_TENSOR_CORES = re.compile(r'GTX 16\d\d|\b(T|MX)\d{3,4}\b')   # of capability 7.5: Quadro T2000, T600, MX450


def _cuda(device: torch.device) -> Support:
    amd = facts.amd_architecture(device)
    if amd is not None: return Support('native', f'ROCm {amd}'.strip())
    capability = facts.cuda_capability(device)
    words = 'compute capability {}.{}'.format(*capability)
    if capability < (5, 3): return Support('emulated', f'{words}: fp16 arithmetic needs 5.3')
    # 2 results per clock and multiprocessor where fp32 has 128.
    if capability == (6, 1): return Support('emulated', f'{words}: fp16 arithmetic at 1/64 of the fp32 rate')
    if capability == (7, 5) and _NO_TENSOR_CORES.search(facts.gpu_name(device)):
        return Support('emulated', f'{words} without tensor cores: fp16 gives NaN in many models')
    return Support('native', words + (', tensor cores' if capability >= (7, 0) else ', no tensor cores'))


def _xpu(device: torch.device) -> Support:
    if facts.xpu_capability(device).get('has_fp64', True): return Support('native', 'Intel GPU')
    return Support('unsupported', 'GradScaler needs float64, which this Intel GPU does not have')


class FP16(Precision):
    """Train with float16 autocast and dynamic loss scaling. Replaces the learner's current precision.

    Steps whose gradients are not finite are skipped. The loss scale is kept from fit to fit, and through `save` and
    `load`. If bad data has driven it below 1, the next fit restarts from `init_scale`.

    Source: Micikevicius et al., Mixed Precision Training, https://arxiv.org/abs/1710.03740;
    https://docs.pytorch.org/docs/stable/amp.html. Devices: NVIDIA's CUDA C++ Programming Guide.
    """
    name, dtype, color, automatic = 'fp16', torch.float16, '#d1701f', True
    state_key = 'grad_scaler'                                    # as version 0.1 named it
    rules: ClassVar = dict(
        cpu=lambda device: cpu_support('fp16', 'avx512_fp16', 'amx_fp16', 'asimdhp', 'fphp'), cuda=_cuda,
        mps=lambda device: Support('native', 'Metal'), xpu=_xpu, xla=lambda device: xla_support('CUDA', 'ROCM'))

    def __init__(self,
        init_scale: float = 65536.0, # Loss scale to start from
        growth_factor: float = 2.0, # Multiplies the scale after `growth_interval` steps without a skip
        backoff_factor: float = 0.5, # Multiplies the scale after a skipped step
        growth_interval: int = 2000, # Number of consecutive steps without a skip after which the scale grows
        enabled: bool = True, # Scale the loss; False trains without loss scaling
        *,
        loss_scale: float | None = None, # Fixed loss scale; None for dynamic scaling
        scaler: GradScaler | None = None, # Your own `torch.amp.GradScaler`, instead of the arguments above
        fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules or predicates
    ):
        super().__init__(fp32_modules)
        settings = dict(init_scale=init_scale, growth_factor=growth_factor, backoff_factor=backoff_factor,
                        growth_interval=growth_interval, enabled=enabled)
        check_scaling_arguments(**settings, loss_scale=loss_scale, scaler=scaler)
        own = DynamicScaler('cpu', **settings) if loss_scale is None else StaticScaler('cpu', loss_scale)
        self._scaler = scaler or own                             # in its newest state
        self.first_state = self._scaler.state_dict()             # empty if it is not enabled

    def scaler(self, device: torch.device) -> GradScaler | None:
        "Return a scaler on `device` that continues from the newest state; the user's own as it is."
        if not self.first_state: return None
        if isinstance(self._scaler, CopyableScaler): self._scaler = self._scaler.on(device.type)
        first, now = self.first_state['scale'], self._scaler.state_dict()
        if now['scale'] < 1 <= first:
            warn_user(f"The loss scale had fallen to {now['scale']:.2g}, where gradients underflow. It restarts from "
                      f'{first:,.9g}.')
            self._scaler.load_state_dict({**now, 'scale': first, '_growth_tracker': 0})
        return self._scaler

    def state_dict(self) -> dict[str, Any]:
        "Return the state of the loss scaling, as `GradScaler.state_dict`; empty with `enabled=False`."
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from `state`; None resets to the arguments. Ignored with a fixed loss scale or `enabled=False`.

        Raises `ValueError` for a state that no `GradScaler` could have returned, and then changes nothing.
        """
        if state == {} or not self.first_state or isinstance(self._scaler, StaticScaler): return
        if state is None: state = self.first_state
        check_scaler_state(state)
        self._scaler.load_state_dict(dict(state))
