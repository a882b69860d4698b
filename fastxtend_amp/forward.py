"An object that stands on one module as its own `forward`: the base of what changes how a module computes."
from __future__ import annotations

import copy, operator
from types import MethodType
from typing import Any

from torch import nn

from .compat import NotScriptable

__all__ = ['ModuleForward']


class ModuleForward(NotScriptable):
    """Stands on `module` as its own `forward`; a subclass says in `__call__` what it does around `run`.

    An object that holds the module, and not a hook or a closure: it can be pickled and deep-copied with the module, and
    `torch.compile` traces through it. With `transient` True a copied or pickled module gets the forward underneath
    instead, so that nothing of this package is in the copy.
    """
    transient = False

    def __init__(self, module: nn.Module): self.module, self.inner = module, module.__dict__.get('forward')

    def __call__(self, *args, **kwargs) -> Any: return self.run(*args, **kwargs)

    def run(self, *args, **kwargs) -> Any:
        "The module's forward underneath this object."
        if self.inner is None: return type(self.module).forward(self.module, *args, **kwargs)
        return self.inner(*args, **kwargs)

    def install(self) -> None:
        "Put this object on the module."
        self.module.__dict__['forward'] = self

    def remove(self) -> None:
        "Give the module back the forward that it had; another object put over this one since then stays."
        above, top = None, self.module.__dict__.get('forward')
        while top is not self and isinstance(top, ModuleForward): above, top = top, top.inner
        if top is not self: return
        if above is not None: above.inner = self.inner
        elif self.inner is None: del self.module.__dict__['forward']
        else: self.module.__dict__['forward'] = self.inner

    def __deepcopy__(self, memo: dict) -> Any:
        module = copy.deepcopy(self.module, memo)
        inner = copy.deepcopy(self.inner, memo)
        if self.transient: return inner or MethodType(type(module).forward, module)
        new = copy.copy(self)
        new.module, new.inner = module, inner
        return new

    def __copy__(self) -> ModuleForward:
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not self.transient: return super().__reduce_ex__(protocol)
        if self.inner is None: return getattr, (self.module, 'forward')   # of the class: the module has no state yet
        return operator.getitem, ((self.inner,), 0)
