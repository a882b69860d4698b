"""A simulated accelerator in main memory, in pure Python: no GPU, no driver, no compiler.

    from devices.simulated import install
    device = install('cuda')         # before the first use of torch.cuda and the first backward pass; once a process

`install('cuda')`: device type 'cuda' itself, in a CUDA build of torch without a GPU. C++'s own autocast, autograd and
    composite operators run; every kernel that is registered for CUDA is replaced by the CPU's on the same memory, and
    the functions of `torch.cuda` are simulated. C++'s tables are written by ctypes, since torch has no way to register
    CUDA twice: this depends on the layout of one version (seen with PyTorch 2.14, Linux).
`install('sim')`: device type 'sim' (PrivateUse1): any other accelerator, such as MPS or XPU. Any build of PyTorch 2.13
    and newer. autocast is written here, after CUDA's lists. torch cannot `set_data` from the CPU to PrivateUse1, so
    `Module.to` is set to move parameters in place by swapping, as it does by itself with CUDA.

`with waits() as w`: a list of the moments in which the host waits for the device, each with its stack.
`options`: how far the device is behind, and what it lacks; see clock.py.

It cannot show: speed; the numerics of real kernels (fp16 products accumulate as the CPU's do); caching allocators;
several streams of one device, which are one here; CUDA graphs; Triton and `torch.compile`; NCCL.
"""
from __future__ import annotations

import warnings

import torch

__all__ = ['install', 'is_installed', 'missing_reason', 'options', 'waits']

from .clock import options, waits


def missing_reason(kind: str) -> str | None:
    "Why this PyTorch cannot simulate devices of type 'cuda' or 'sim'; None if it can."
    version = tuple(int(n) for n in torch.__version__.split('+')[0].split('.')[:2])
    if not hasattr(torch._C, '_acc'): return f'PyTorch {torch.__version__} registers no device from Python; 2.13 does'
    if kind == 'sim': return None
    if not torch.backends.cuda.is_built(): return 'this PyTorch is not a CUDA build'
    if torch.version.cuda is None: return 'this PyTorch is built for ROCm'
    if version != (2, 14): return f'the layout of C++ objects is known for PyTorch 2.14, not for {torch.__version__}'
    if not is_installed() and torch.cuda.is_available(): return 'there is a real GPU'
    return None


def is_installed() -> bool:
    "Is there a simulated device in this process?"
    from .memory import here
    return here.kind is not None


def install(kind: str = 'cuda', n_devices: int = 1) -> torch.device:
    "Make `n_devices` simulated devices of type 'cuda' or 'sim'; returns the first."
    if is_installed(): raise RuntimeError('a simulated device is installed already')
    if reason := missing_reason(kind): raise RuntimeError(f'{kind!r} cannot be simulated: {reason}')
    from . import autocast, cpp, kernels, memory, module
    memory.here.kind, options.n_devices = kind, n_devices
    module.manual_seed_all(0)
    if kind == 'cuda': _as_cuda(cpp, module, n_devices)
    else: _as_another(cpp, module, kind, n_devices)
    if kind != 'cuda':
        autocast.register()
        torch.__future__.set_swap_module_params_on_conversion(True)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        kernels.register('CUDA' if kind == 'cuda' else 'PrivateUse1')
    memory.replace_storages()
    return torch.device(kind, 0)


def _as_cuda(cpp, module, n_devices):
    cpp.fake_cuda(n_devices)
    for name, f in module.functions().items(): setattr(torch.cuda, name, f)
    torch.cuda.random.get_rng_state, torch.cuda.random.set_rng_state = module.get_rng_state, module.set_rng_state
    torch.backends.cudnn.enabled = False


def _as_another(cpp, module, kind, n_devices):
    import types
    from torch.utils import backend_registration
    backend = types.ModuleType(f'torch.{kind}')
    for name, f in module.functions().items(): setattr(backend, name, f)
    guard = cpp.guard(torch._C._autograd.DeviceType.PrivateUse1, n_devices)
    backend_registration._setup_privateuseone_for_python_backend(kind, backend_module=backend, device_guard=guard)
