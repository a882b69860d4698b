"The argument `--device` of the commands."
from __future__ import annotations

import argparse

import torch

from ..common import first_line

__all__ = ['default_device', 'usable_device']


def default_device() -> torch.device:
    "Return the accelerator that PyTorch finds, else the CPU."
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found or torch.device('cpu')


def usable_device(
    parser: argparse.ArgumentParser, # Ends the process with a message if the device cannot be used
    name: str | None, # What the user gave; the default device if None
) -> torch.device:
    "Return the device that `--device` names; a tensor can be made on it, and PyTorch has an autocast for it."
    try:
        device = torch.device(name) if name else default_device()
        torch.zeros(1, device=device)
        has_autocast = torch.amp.is_autocast_available(device.type)
    except (RuntimeError, AssertionError) as e: parser.error(f'--device {name}: {first_line(e)}')
    if not has_autocast: parser.error(f'--device {device}: PyTorch has no autocast for it; try cpu')
    return device
