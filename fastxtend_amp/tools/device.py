"The argument `--device` of the commands."
from __future__ import annotations

import argparse

import torch

from ..common import first_line
from ..mode import autocast_available

__all__ = ['usable_device']


def usable_device(
    parser: argparse.ArgumentParser, # Ends the process with a message if the device cannot be used
    name: str | None, # What the user gave
    default: str | torch.device, # Taken if that is None
) -> torch.device:
    "The device that `--device` means, on which a tensor can be made and autocast exists."
    try:
        device = torch.device(name or default)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as e: parser.error(f'--device {name}: {first_line(e)}')
    if not autocast_available(device.type): parser.error(f'--device {device}: PyTorch has no autocast for it; try cpu')
    return device
