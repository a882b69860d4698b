"float16: 10 bits of mantissa, but only 5 of exponent, so the loss is scaled to keep gradients from underflowing."
import re
from operator import index
from typing import Any, ClassVar

import torch
from torch.amp import GradScaler

from ..devices import facts
from ..messages import check_argument, check_bool, check_integer, warn_user
from ..tensors import FP16_SMALLEST
from .base import Precision, defaults_of
from .support import Support, cpu_support, xla_support

_LARGEST = torch.finfo(torch.float32).max  # which the scale is stored in
_NO_TENSOR_CORES = re.compile(r'GTX 16\d\d|\b(T|MX)\d{3,4}\b')   # of capability 7.5: Quadro T2000, T600, MX450


def _cuda(device: torch.device) -> Support:
    if amd := facts.amd_architecture(device): return Support('native', f'ROCm {amd}')
    capability = torch.cuda.get_device_capability(device)
    words = 'compute capability {}.{}'.format(*capability)
    if capability < (5, 3): return Support('emulated', f'{words}: fp16 arithmetic needs 5.3')
    # 2 results per clock and multiprocessor where fp32 has 128.
    if capability == (6, 1): return Support('emulated', f'{words}: fp16 arithmetic at 1/64 of the fp32 rate')
    if capability == (7, 5) and _NO_TENSOR_CORES.search(torch.cuda.get_device_name(device)):
        return Support('emulated', f'{words} without tensor cores: fp16 gives NaN in many models')
    return Support('native', words + (', tensor cores' if capability >= (7, 0) else ', no tensor cores'))


def _xpu(device: torch.device) -> Support:
    if torch.xpu.get_device_capability(device).get('has_fp64', True): return Support('native', 'Intel GPU')
    return Support('unsupported', 'GradScaler needs float64, which this Intel GPU does not have')


def _is_scale(x: Any) -> bool: return FP16_SMALLEST <= x <= _LARGEST
def _is_scaler(x: Any) -> bool:
    return x is None or (isinstance(x, GradScaler) and x.is_enabled() and _is_scale(x.get_scale()))
def _is_state(x: Any) -> bool:
    return 0 <= x.get('scale') <= _LARGEST and index(x.get('_growth_tracker')) >= 0


def static_scaler(device: str, scale: float) -> GradScaler:
    "Return a `GradScaler` whose scale never changes: it only skips steps whose gradients are not finite."
    scaler = GradScaler(device, scale)
    scaler.set_growth_factor(1.)
    scaler.set_backoff_factor(1.)
    return scaler


class FP16(Precision):
    """Train with float16 autocast and dynamic loss scaling, which skips steps whose gradients are not finite.

    The loss scale is kept from fit to fit, and through `save` and `load`. If bad data has driven it below 1, the next
    good step sets it again, from its gradients. Change a `scaler` of your own between fits only: in a fit, `scales`
    would not show it.

    Raises `ValueError` or `TypeError` for arguments that cannot be used, and `ValueError` if `fp32_modules` matches no
    module. `fit` raises `ValueError` if the device does not support fp16, and for `flat_master=True` with anything but
    fastai's own element-wise optimizers on plain parameters.

    Source: Micikevicius et al., Mixed Precision Training, https://arxiv.org/abs/1710.03740;
    https://docs.pytorch.org/docs/stable/amp.html. Devices: NVIDIA's CUDA C++ Programming Guide.
    """
    name, dtype, color, automatic = 'fp16', torch.float16, '#d1701f', True
    scales_loss = True
    state_key = 'grad_scaler'                                    # as version 0.1 named it
    # Not AVX512-FP16: in PyTorch 2.14 it makes a training step of a ResNet 125 times slower than fp32.
    rules: ClassVar = dict(
        cpu=lambda device: cpu_support('fp16', 'asimdhp', 'fphp'), cuda=_cuda,
        mps=lambda device: Support('native', 'Metal'), xpu=_xpu, xla=lambda device: xla_support('CUDA', 'ROCM'))

    def __init__(self,
        init_scale: float = 65536.0, # First loss scale
        growth_factor: float = 2.0, # Multiplies the scale where it grows
        backoff_factor: float = 0.5, # Multiplies the scale after a skipped step
        growth_interval: int = 2000, # Steps without a skip after which the scale grows
        enabled: bool = True, # False trains without loss scaling
        *,
        loss_scale: float | None = None, # Fixed loss scale; None for dynamic scaling
        scaler: GradScaler | None = None, # Your own `torch.amp.GradScaler`
        fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules or predicates
        flat_master: bool = False, # Join the master weights into a few large tensors
    ):
        super().__init__(fp32_modules)
        check_bool(enabled=enabled, flat_master=flat_master)
        scales = f'a number from 2**-24 to {_LARGEST:.2g}'
        check_argument('init_scale', init_scale, _is_scale, scales)
        if loss_scale is not None: check_argument('loss_scale', loss_scale, _is_scale, scales)
        check_argument('growth_factor', growth_factor, lambda x: 1 < x <= _LARGEST, 'above 1')
        check_argument('backoff_factor', backoff_factor, lambda x: 0 < x < 1, 'between 0 and 1')
        check_integer(1, growth_interval=growth_interval)
        check_argument('scaler', scaler, _is_scaler,
                       "an enabled `torch.amp.GradScaler`, such as `GradScaler('cpu')` on a CPU, with a finite scale")
        of_scaling = defaults_of(FP16).keys() - {'fp32_modules', 'flat_master'}
        given = [name for name in self.changed if name in of_scaling]
        if len(given) > 1 and {'enabled', 'loss_scale', 'scaler'} & {*given}:
            raise ValueError(f'{" and ".join(given)} cannot be combined. Pass only one of them.')
        self.flat_master = flat_master
        if loss_scale is not None: scaler = static_scaler('cpu', loss_scale)
        self.newest_scaler = scaler or GradScaler('cpu', float(init_scale), growth_factor, backoff_factor,
                                                  growth_interval, enabled)
        self.first_state = self.newest_scaler.state_dict()       # empty if it is not enabled
        self.first_scale = self.first_state.get('scale', 1.)

    def scaler(self, device: torch.device) -> GradScaler | None:
        "Return a scaler on `device` that continues from the newest state; a user's own scaler itself."
        if not self.first_state: return None
        if 'scaler' not in self.changed:
            state, self.newest_scaler = self.newest_scaler.state_dict(), GradScaler(device.type)
            self.newest_scaler.load_state_dict(state)            # its factors as well
        return self.newest_scaler

    def state_dict(self) -> dict[str, Any]:
        "Return the state of the loss scaling, as `GradScaler.state_dict`; empty with `enabled=False`."
        return self.newest_scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from the scale and the growth tracker in `state`; None resets them. The arguments stay.

        Ignored with a fixed loss scale or `enabled=False`, with a warning if the scale in `state` differs. A
        scale below 2**-24, the smallest number of fp16, is replaced by the first one; version 0.4 could save 0. Raises
        `ValueError` for a state that is not complete, and for a scale that is not finite or below 0.
        """
        if state is None: state = self.first_state
        if not state: return
        check_argument('state', state, _is_state, 'what `state_dict` returned, with a finite scale')
        scale = state['scale']
        if 'loss_scale' in self.changed or not self.first_state:
            if scale != self.first_scale:
                warn_user(f'The loaded loss scale of {scale:,.9g} is not used: it is fixed at {self.first_scale:,.9g}.')
            return
        if scale < FP16_SMALLEST: scale = self.first_scale
        tracker = min(state['_growth_tracker'], self.newest_scaler.get_growth_interval() - 1)
        new = {**self.newest_scaler.state_dict(), 'scale': scale, '_growth_tracker': tracker}
        self.newest_scaler.load_state_dict(new)
