"Precision modes (`AMPMode`), and which of them a device runs natively, emulates or does not run."
from __future__ import annotations

import platform, re, sys, warnings
from collections.abc import Iterable
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from .common import first_line
from .compat import AutocastState, get_fp32_setting
from .fp32_settings import FP32_SETTINGS, TF32

__all__ = ['AMPMode', 'precision_support']

_ALIASES = {'16-mixed': 'fp16', 'float16': 'fp16', 'half': 'fp16', torch.float16: 'fp16',
            'bf16-mixed': 'bf16', 'bfloat16': 'bf16', torch.bfloat16: 'bf16'}


class AMPMode(str, Enum):
    """Precisions below fp32: autocast's fp16 and bf16; TF32, whose tensors are fp32; FP8 for linear layers in bf16.

    `AMPMode(value)` also takes Lightning's names ('16-mixed', 'bf16-mixed'), the torch dtypes and their names
    ('float16', 'half', 'bfloat16'), any letter case, and members of fastai's own `AMPMode`; anything else is a
    `ValueError`.
    """
    FP16 = 'fp16'
    BF16 = 'bf16'
    TF32 = 'tf32'
    FP8 = 'fp8'

    @classmethod
    def _missing_(cls, value):
        name = value.value if isinstance(value, Enum) else value # a member of fastai's own AMPMode
        if isinstance(name, str): name = name.lower()
        if isinstance(name, (str, torch.dtype)): name = _ALIASES.get(name, name)
        for member in cls:
            if member.value == name: return member
        raise ValueError(f"amp_mode={value!r} cannot be used.\n"
                         "Allowed: 'fp16' (or 'float16', 'half', '16-mixed', torch.float16), 'bf16' (or 'bfloat16', "
                         "'bf16-mixed', torch.bfloat16), 'tf32' and 'fp8', in any letter case; `MixedPrecision` also "
                         "takes 'auto'.\n"
                         "For plain fp32 use `learn.to_fp32()`, or 'fp32' in `precision_as`.")

    @property
    def dtype(self) -> Any:
        "The dtype that autocast runs eligible operators in; None for TF32, which needs no autocast."
        return _DTYPES.get(self, torch.bfloat16)

    @property
    def needs_loss_scaling(self) -> bool:
        "True if gradients underflow without loss scaling: fp16 has 5 bits of exponent; bf16 has fp32's 8."
        return self is AMPMode.FP16


_DTYPES = {AMPMode.FP16: torch.float16, AMPMode.TF32: None}


class Support(NamedTuple):
    "Support of a mode by a device: 'native', 'emulated' (it works, slower than native) or 'unsupported', and why."
    status: str
    why: str


def _native(ok: bool, yes: str, no: str) -> Support:
    return Support('native', yes) if ok else Support('emulated', no)


@lru_cache
def cpu_features() -> frozenset[str]:
    "Return the lower-case names of this CPU's instruction sets, by PyTorch (2.11) and by the system."
    features = {k.lower() for k, v in getattr(torch.cpu, 'get_capabilities', dict)().items() if v is True}
    cpuinfo = Path('/proc/cpuinfo')
    if cpuinfo.exists(): features |= {*cpuinfo.read_text(errors='replace').lower().split()}
    if sys.platform == 'darwin' and platform.machine() == 'arm64': features.add('fphp')
    return frozenset(features)


_CPU_FEATURES = {
    AMPMode.BF16: {'avx512_bf16', 'amx_bf16', 'bf16'},
    AMPMode.FP16: {'avx512_fp16', 'amx_fp16', 'asimdhp', 'fphp'},
}


def _cpu(mode: AMPMode, device: torch.device) -> Support:
    found = ', '.join(sorted(_CPU_FEATURES[mode] & cpu_features()))
    return _native(bool(found), f'the CPU has {found}', f'the CPU has no {mode.value} arithmetic')


_NO_TF32 = Support('unsupported', 'only NVIDIA GPUs from compute capability 8.0 on have TF32')
_NO_TENSOR_CORES = re.compile(r'GTX 16\d\d|\b(T|MX)\d{3,4}\b')   # of capability 7.5, as Quadro T2000, T600, MX450


def _cuda(mode: AMPMode, device: torch.device) -> Support:
    if not torch.cuda.is_available(): return Support('unsupported', 'PyTorch finds no CUDA device')
    if torch.version.hip: return _NO_TF32 if mode is AMPMode.TF32 else Support('native', 'ROCm')
    major, minor = torch.cuda.get_device_capability(device)
    capability = f'compute capability {major}.{minor}'
    if mode is AMPMode.TF32:
        if major < 8: return Support('unsupported', f'{capability}: TF32 needs 8.0')
        by_default = [name for name in TF32 if get_fp32_setting(*FP32_SETTINGS[name][:2]) == 'tf32']
        also = f"; training in fp32 has it now in {' and '.join(by_default)}" if by_default else ''
        return Support('native', f'{capability}, tensor cores{also}')
    if mode is AMPMode.FP16:
        if (major, minor) < (5, 3): return Support('emulated', f'{capability}: fp16 arithmetic needs 5.3')
        # CUDA C++ Programming Guide, arithmetic instructions: 2 results per clock and multiprocessor, 128 in fp32.
        if (major, minor) == (6, 1): return Support('emulated', f"{capability}: fp16 arithmetic at 1/64 of fp32's rate")
        if (major, minor) == (7, 5) and _NO_TENSOR_CORES.search(torch.cuda.get_device_name(device)):
            return Support('emulated', f'{capability} without tensor cores: fp16 gives NaN in many models')
        return Support('native', capability + (', tensor cores' if major >= 7 else ', no tensor cores'))
    # `is_bf16_supported` counts emulation as support, so it cannot tell the two apart below 8.0.
    if major >= 8: return Support('native', capability + ', tensor cores')
    if torch.cuda.is_bf16_supported(): return Support('emulated', f'{capability}: bf16 arithmetic needs 8.0')
    return Support('unsupported', f'{capability}: bf16 needs 8.0')


def _fp8(device: torch.device) -> Support:
    bf16 = mode_support(AMPMode.BF16, device)
    if bf16.status == 'unsupported': return bf16
    nvidia = device.type == 'cuda' and not torch.version.hip
    has = nvidia and torch.cuda.get_device_capability(device) >= (8, 9)
    return _native(has, bf16.why, 'NVIDIA GPUs from compute capability 8.9 on have FP8 arithmetic')


def _mps(mode: AMPMode, device: torch.device) -> Support:
    if not torch.backends.mps.is_available(): return Support('unsupported', 'PyTorch finds no Metal device')
    return Support('native', 'Metal' if mode is AMPMode.FP16 else 'Metal; newer chips gain from bf16, an M1 does not')


def _xpu(mode: AMPMode, device: torch.device) -> Support:
    if not torch.xpu.is_available(): return Support('unsupported', 'PyTorch finds no Intel GPU')
    capability = torch.xpu.get_device_capability(device)
    if mode is AMPMode.FP16 and not capability.get('has_fp64', True):
        return Support('unsupported', "GradScaler needs float64, which this Intel GPU does not have")
    has = capability.get('has_fp16' if mode is AMPMode.FP16 else 'has_bfloat16_conversions', True)
    return _native(bool(has), 'Intel GPU', f'this Intel GPU has no {mode.value} arithmetic')


def _xla(mode: AMPMode, device: torch.device) -> Support:
    if 'torch_xla' not in sys.modules: return Support('unsupported', 'torch_xla is not imported')
    import torch_xla.runtime as xr
    kind = xr.device_type()
    if kind == 'TPU': return _native(mode is AMPMode.BF16, 'TPU', 'a TPU computes in bf16 and fp32')
    return _native(kind in ('CUDA', 'ROCM'), f'XLA on {kind}', f'XLA on {kind}')


_RULES = {'cpu': _cpu, 'cuda': _cuda, 'mps': _mps, 'xpu': _xpu, 'xla': _xla}


def autocast_available(device_type: str) -> bool:
    "Return whether PyTorch has an autocast for this type of device; False, too, for types that it does not know."
    try: return torch.amp.is_autocast_available(device_type)
    except RuntimeError: return False


def mode_support(mode: AMPMode, device: torch.device) -> Support:
    """Return how `device` runs `mode`.

    CUDA by compute capability (NVIDIA's CUDA C++ programming guide), CPUs by their instruction sets; for the rest,
    what PyTorch's autocast says when it is built.
    """
    if mode is AMPMode.TF32: return _cuda(mode, device) if device.type == 'cuda' else _NO_TF32
    if mode is AMPMode.FP8: return _fp8(device)
    if not autocast_available(device.type):
        return Support('unsupported', f'PyTorch has no autocast for {device.type} devices')
    rule = _RULES.get(device.type)
    support = rule(mode, device) if rule else Support('native', 'as its backend says')
    if support.status == 'unsupported' or device.type == 'cuda': return support
    refusal = _autocast_refusal(mode, device.type)
    return support if refusal is None else Support('unsupported', refusal)


def _autocast_refusal(mode: AMPMode, device_type: str) -> str | None:
    "Return what PyTorch says if its autocast does not take the dtype of `mode` on this type of device; else None."
    with warnings.catch_warnings(record=True) as caught:         # it refuses by a warning and stays off, or by an error
        warnings.simplefilter('always')
        try:
            with AutocastState(device_type), torch.autocast(device_type, dtype=mode.dtype):
                if torch.is_autocast_enabled(device_type): return None
        except (RuntimeError, AssertionError) as e: return first_line(e)
    return ' '.join(str(w.message).splitlines()[0] for w in caught)


def _devices() -> list[torch.device]:
    "Return this machine's devices, XLA's if torch_xla is imported."
    kind = torch.accelerator.current_accelerator()
    found = [f'{kind.type}:{i}' for i in range(torch.accelerator.device_count())] if kind is not None else []
    return [torch.device(d) for d in ['cpu', *found, *(['xla'] if 'torch_xla' in sys.modules else [])]]


_ROWS = AMPMode.BF16, AMPMode.FP16, AMPMode.TF32, AMPMode.FP8


def precision_support(
    device: str | torch.device | None = None, # The device to ask about; this machine's devices if None
) -> pd.DataFrame: # One row per device and mode; columns device, mode, support, why
    """Return which precisions run natively, emulated, or not at all.

    `support` is 'native', 'emulated' (it works, usually slower than fp32) or 'unsupported'; `why` is the reason. A name
    that PyTorch does not know is a `ValueError`.
    """
    try: devices = _devices() if device is None else [torch.device(device)]
    except (RuntimeError, TypeError) as e:
        raise ValueError(f"device={device!r} is not a torch device, such as 'cpu' or 'cuda:0'.\n"
                         f"Leave it out to see all devices. PyTorch says: {first_line(e)}.") from e
    rows = [(str(d), m.value, *mode_support(m, d)) for d in devices for m in _ROWS]
    return pd.DataFrame(rows, columns=['device', 'mode', 'support', 'why'])


def fastest_native(
    device: torch.device,
    failed: Iterable[AMPMode] = (), # Modes that do not work for a model
) -> AMPMode | None:
    "Return the fastest mode that `device` does natively: bf16 (no loss scaling), then fp16; None where fp32 is."
    left = (m for m in (AMPMode.BF16, AMPMode.FP16) if m not in failed)
    return next((m for m in left if mode_support(m, device).status == 'native'), None)


def check_supported(mode: AMPMode, device: torch.device) -> None:
    "Raise a `ValueError` that names device, mode and what would work if `device` cannot run `mode`."
    support = mode_support(mode, device)
    if support.status != 'unsupported': return
    raise ValueError(f"{mode.value} mixed precision does not run on device '{device}': {support.why}.\n"
                     f"What works there: `{faster_call(mode, device)}`.")


def emulation_warning(mode: AMPMode, device: torch.device) -> str | None:
    "Return a warning for a `device` that only emulates `mode`, with a faster call; None if it is native."
    support = mode_support(mode, device)
    if support.status != 'emulated': return None
    return (f"{mode.value} is emulated on device '{device}' ({support.why}): usually slower than fp32, with large "
            f"layers many times slower.\nThe faster choice there is `{faster_call(mode, device)}`; "
            f"`learn.compare_precision('{mode.value}')` measures it.")


def faster_call(mode: AMPMode, device: torch.device) -> str:
    "Return the call for the fastest precision that `device` does natively, but for `mode`."
    faster = fastest_native(device, [mode])
    return f'learn.to_{faster.value}()' if faster else 'learn.to_fp32()'
