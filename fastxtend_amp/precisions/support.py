"Support of a precision by a device, and rules for CPUs and XLA that several precisions share."
from typing import NamedTuple

from ..devices import facts


class Support(NamedTuple):
    "Support of a precision by a device: 'native', 'emulated' (it works, without hardware for it) or 'unsupported'."
    status: str
    why: str


def cpu_support(
    name: str, # Of the precision
    *instructions: str, # Names of instruction sets for it, in lower case
) -> Support:
    "Return how this CPU runs a precision: natively if it has one of the instruction sets."
    found = ', '.join(sorted({*instructions} & facts.cpu_features()))
    if found: return Support('native', f'the CPU has {found}')
    return Support('emulated', f'PyTorch has no fast {name} kernels for this CPU')


def xla_support(
    *native: str, # The hardware that has the precision: 'TPU', 'CUDA' or 'ROCM'
) -> Support:
    "Return how the hardware behind XLA runs a precision."
    hardware = facts.xla_hardware()
    return Support('native' if hardware in native else 'emulated', f'XLA on {hardware}')
