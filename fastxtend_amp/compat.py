"Every use of a name that PyTorch, fastai, fastcore or torch_xla do not document: one function each, with what happens without it."
from __future__ import annotations

from collections.abc import Callable

from torch import nn

__all__ = ['replace_replicate']

# -- autocast


# -- loss scaling and optimizers


# -- modules


# -- half_weights


# -- insight


# -- devices

def replace_replicate(
    parallel: nn.DataParallel, # The module whose replicas are to be changed
    replicate: Callable | None, # Called with the module and the device ids, returns the replicas; None for PyTorch's own
) -> None:
    """Have `parallel` make its replicas by `replicate`.

    Relies on `DataParallel.forward` calling `self.replicate(module, device_ids)`, a method that is public but on no page
    of the documentation; so since PyTorch 0.4, seen in 2.9 to 2.14. Where the method is gone: `RuntimeError`, because
    replicas would compute in the device's default precision.
    """
    if not hasattr(nn.DataParallel, 'replicate'):
        raise RuntimeError("nn.DataParallel has no method `replicate` in this version of PyTorch, so its replicas cannot be told the\n"
                           "precision to compute in. Use DistributedDataParallel, or `learn.to_fp32()`.")
    if replicate is None: parallel.__dict__.pop('replicate', None)
    else: parallel.__dict__['replicate'] = replicate


# -- tools
