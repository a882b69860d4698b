"The argument `--device` of the commands."
import argparse

import torch

from ..devices.facts import autocast_available
from ..messages import first_line


def add_device(parser: argparse.ArgumentParser) -> None:
    "Add the argument `--device` to a command."
    parser.add_argument('--device', metavar='D',
                        help="torch device, for example 'cpu' or 'cuda:0' (default: the accelerator, if any)")


def usable_device(
    parser: argparse.ArgumentParser, # Exits with a message if the device cannot be used
    name: str | None, # As given; the accelerator that PyTorch finds, or the CPU, if None
) -> torch.device:
    "Return the device that `--device` names, after checking that it works and that PyTorch has an autocast for it."
    wanted = name or torch.accelerator.current_accelerator(check_available=True) or 'cpu'
    try:
        if str(wanted).startswith('xla'): import torch_xla  # noqa: F401  registers the device
        device = torch.device('cpu' if str(wanted).startswith('cpu:') else wanted)     # 'cpu:1' is the CPU as well
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, ImportError) as e: parser.error(f'--device {wanted}: {first_line(e)}')
    if not autocast_available(device.type): parser.error(f'--device {device}: PyTorch has no autocast for it; try cpu')
    return device
