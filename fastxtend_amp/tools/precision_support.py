"`precision_support`: which precisions the devices of this machine run natively, emulated, or not at all."
import pandas as pd
import torch

from ..devices import facts
from ..precisions import PRECISIONS


class _Table(pd.DataFrame):
    "A table that prints all of its columns, however narrow the terminal is."
    def __repr__(self) -> str: return self.to_string(index=False)


def precision_support(
    device: str | torch.device | None = None, # All devices of this machine if None
) -> pd.DataFrame: # One row per device and precision; columns device, precision, support, why
    """Return which precisions each device runs natively, emulated, or not at all.

    `support` is 'native', 'emulated' (it works, but usually slower than fp32) or 'unsupported'; `why` is the reason.
    Raises `ValueError` for a device that PyTorch does not know.
    """
    try: devices = facts.all_devices() if device is None else [torch.device(device)]
    except (RuntimeError, TypeError) as e:
        here = ', '.join(map(str, facts.all_devices()))
        raise ValueError(f'device={device!r} cannot be used: it must be a device that PyTorch knows; this machine has '
                         f'{here}.') from e
    classes = PRECISIONS.values()
    rows = [(str(on), cls.name, *cls.support(on)) for on in devices for cls in classes]
    return _Table(rows, columns=['device', 'precision', 'support', 'why'])
