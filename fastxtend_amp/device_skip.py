"Which optimizers skip a step by themselves, told by a flag on the device, so that the host need not wait for it."
from __future__ import annotations

from typing import Any

import torch
from fastai.optimizer import OptimWrapper
from torch import nn

from .compat import honours_found_inf, is_syncfree, supports_found_inf, syncfree_state

__all__ = ['skips_on_device']

# What each optimizer keeps for a parameter once it has stepped on it.
_STATE: dict[type, str] = {torch.optim.Adam: 'exp_avg', torch.optim.AdamW: 'exp_avg',
                           torch.optim.SGD: 'momentum_buffer'}
_NOTHING: dict[str, Any] = {}


def skips_on_device(
    opt: Any, # fastai's `Optimizer` or `OptimWrapper`
    params: list[nn.Parameter], # Its parameters
) -> bool:
    """Can `opt` skip a step by itself, told by a `found_inf` on the device, with no effect at all?

    torch's fused Adam, AdamW and SGD inside an `OptimWrapper` can, once their state is there: a first step that is
    skipped would create it, and fused SGD would leave its momentum uninitialised (seen with PyTorch 2.13). torch_xla's
    sync-free ones can, unless their state was made by steps without a `found_inf`. Wrappers with counters of their own,
    such as Lookahead, would count the step. Whether the kernel really skips is tried once on each device.
    """
    inner: Any = opt.opt if type(opt) is OptimWrapper else None
    if is_syncfree(inner):                                       # a `step` of somebody else's on the instance stays
        if 'step' in inner.__dict__: return False
        return all(not (s := inner.state.get(p)) or syncfree_state(inner, s) for p in params)
    if type(inner) not in _STATE or not supports_found_inf(inner): return False
    if not isinstance(inner, torch.optim.SGD) or any(g['momentum'] for g in inner.param_groups):
        key, state = _STATE[type(inner)], inner.state
        if not all(p.grad is None or state.get(p, _NOTHING).get(key) is not None for p in params): return False
    devices = {p.device for p in params}
    kind: Any = type(inner)
    return all(honours_found_inf(kind, device, (('fused', True),)) for device in devices)
