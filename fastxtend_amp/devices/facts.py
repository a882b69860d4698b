"Facts about devices, from PyTorch, drivers and the operating system; each precision's file has its own rule on them."
import platform, subprocess, sys, threading, warnings
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..compat import autocast_restored
from ..messages import first_line


@lru_cache
def cpu_features() -> frozenset[str]: # Such as 'avx512_bf16' and 'amx_bf16' on x86, 'bf16' and 'fphp' on ARM
    "Return the lower-case names of this CPU's instruction sets, from PyTorch (2.11) and the operating system."
    capabilities: dict[str, Any] = getattr(torch.cpu, 'get_capabilities', dict)()
    features = {name.lower() for name, value in capabilities.items() if value is True}
    cpuinfo = Path('/proc/cpuinfo')
    if cpuinfo.exists(): features |= {*cpuinfo.read_text(errors='replace').lower().split()}
    if sys.platform == 'darwin' and platform.machine() == 'arm64': features.add('fphp')
    return frozenset(features)


def amd_architecture(device: torch.device) -> str: # Such as 'gfx942' for an MI300X; '' on NVIDIA
    "Return the architecture of an AMD GPU, PyTorch's `gcnArchName` without its flags."
    if not torch.version.hip: return ''
    return torch.cuda.get_device_properties(device).gcnArchName.partition(':')[0]


@lru_cache
def apple_chip() -> str: # Such as 'Apple M1 Pro'; '' if the system does not say
    "Return the name of a Mac's chip."
    command = ['sysctl', '-n', 'machdep.cpu.brand_string']
    try: return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError: return ''


def xla_hardware() -> str: # Such as 'TPU', 'CUDA' or 'CPU'
    "Return the hardware that torch_xla uses."
    import torch_xla.runtime as xr
    return xr.device_type()


def missing(device: torch.device) -> str: # Such as 'PyTorch finds no CUDA device'; '' if it is there
    "Return why this process cannot use this device."
    gpus = {'cuda': 'CUDA device', 'mps': 'Metal device', 'xpu': 'Intel GPU'}
    if device.type in gpus and not torch.get_device_module(device).is_available():
        return f'PyTorch finds no {gpus[device.type]}'
    if device.type == 'xla' and 'torch_xla' not in sys.modules: return 'torch_xla is not imported'
    alike = [d for d in all_devices() if d.type == device.type and d.index is not None]
    if alike and device.index is not None and device not in alike:
        return f"PyTorch finds only {', '.join(map(str, alike))}"
    return ''


def all_devices() -> list[torch.device]:
    "Return this machine's devices, and XLA's if torch_xla is imported."
    gpu = torch.accelerator.current_accelerator()
    found = [f'{gpu.type}:{i}' for i in range(torch.accelerator.device_count())] if gpu is not None else []
    if 'torch_xla' in sys.modules: found.append('xla')
    return [torch.device(name) for name in ['cpu', *found]]


def autocast_available(device_type: str) -> bool:
    "Return whether PyTorch has an autocast for this type of device; False for types that it does not know."
    try: return torch.amp.is_autocast_available(device_type)
    except RuntimeError: return False


_lock = threading.Lock()                                         # `catch_warnings` changes the whole process


def autocast_refusal(device_type: str, dtype: torch.dtype) -> str: # '' if it is supported
    "Return why PyTorch's autocast does not support `dtype` on this type of device."
    if not autocast_available(device_type): return f'PyTorch has no autocast for {device_type} devices'
    if device_type in ('cuda', 'cpu'): return ''                 # autocast accepts both 16-bit dtypes there
    with _lock, warnings.catch_warnings(record=True) as caught:  # it warns and stays off, or raises an error
        warnings.simplefilter('always')
        try:
            with autocast_restored(device_type), torch.autocast(device_type, dtype=dtype):
                if torch.is_autocast_enabled(device_type): return ''
        except (RuntimeError, AssertionError) as e: return first_line(e)
    return ' '.join(str(w.message).splitlines()[0] for w in caught) or 'its autocast stays off'
