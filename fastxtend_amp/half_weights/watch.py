"Whether a model's code uses weights besides their modules' own forward."
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..compat import tensors_in

__all__ = ['WeightWatch']

# Attributes that give a weight's values away, which others do not; and methods that do not.
_VALUES = {'data', 'T', 'mT', 'H', 'mH', 'real', 'imag'}
_METADATA = {'size', 'dim', 'numel', 'nelement', 'stride', 'data_ptr', 'element_size', 'storage_offset',
             'is_contiguous', 'is_floating_point', 'is_complex', 'get_device', 'requires_grad_', '__len__', '__hash__',
             'register_hook',
             'register_post_accumulate_grad_hook'}
_PROBE = torch.zeros(())


class WeightWatch(TorchFunctionMode):
    """Notes which of some weights are used while it is entered, but not while `own` is True.

    What a model does with a weight besides calling its module (writing into it, also by `.data`; handing it to another
    function; a penalty on it in the loss) must meet the master, as under autocast; so such weights have no copies.
    """
    def __init__(self, weights: Iterable[torch.Tensor]):
        super().__init__()
        self.by_id = {id(w): w for w in weights}
        self.used: set[int] = set()                              # ids of weights
        self.own = self.awake = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.awake = True
        if not self.own and not _is_harmless(func):
            # Without gradients a weight may be read, as a momentum encoder's update does; written is what comes first.
            given = (args, kwargs) if torch.is_grad_enabled() else (args[:1], (kwargs or {}).get('out'))
            self.used.update(id(t) for t in tensors_in(given) if id(t) in self.by_id)
        return func(*args, **(kwargs or {}))

    def leave(self) -> None:
        "Exit if it is entered; may be called again, after an interrupt too."
        self.awake = False
        _PROBE.dim()                                             # seen if it is entered
        if self.awake: self.__exit__(None, None, None)


def _is_harmless(func: Any) -> bool:
    name = getattr(func, '__name__', '')
    if name == '__get__': return getattr(func.__self__, '__name__', '') not in _VALUES
    return name in _METADATA
