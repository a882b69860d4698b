"Forwards that replace those of modules. For modules kept in fp32, they turn autocast off."
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from ..compat import tree_leaves
from ..learners import model_device
from ..tensors import half_to_float, is_half, map_tensors


class Forward:
    """A forward that replaces a module's own while `active`; subclasses define `run`, which becomes `module.forward`.

    It is not a hook, so `torch.compile` traces through it. Callbacks that wrapped it in a fit, and copies of the module
    made in one, may call it after the fit: it then runs the plain forward.
    """
    run: Callable

    def __init__(self, module: nn.Module):
        remove_forwards(module)                                  # of a copy made in a fit
        self.module, self.active = module, True
        _ = module.forward                                       # TorchScript puts it on the instance when it is read
        self.before = vars(module).get('forward')                # on the instance; None if there is only the class's

    def __getstate__(self) -> dict[str, Any]: return {**vars(self), 'active': False}

    @property
    def plain(self) -> Callable: # Made at each call: before PyTorch 2.14 Dynamo guards a stored method by its id
        return self.before or partial(type(self.module).forward, self.module)


def forward_of(module: nn.Module) -> Any:
    "Return the object whose method was set as `module.forward`, such as a `Forward`; None if there is none."
    return getattr(vars(module).get('forward'), '__self__', None)


def remove_forwards(model: nn.Module) -> None:
    "Remove the forwards that are left in a model copied during a fit; those of a fit that is open stay."
    for module in model.modules():
        forward = forward_of(module)
        if isinstance(forward, Forward) and not forward.active: _restore(module, forward)


def _restore(module: nn.Module, forward: Forward) -> None:
    del vars(module)['forward']
    if forward.before: vars(module)['forward'] = forward.before


@contextmanager
def replaced_forwards(modules: dict[str, nn.Module], cls: type[Forward]) -> Iterator[None]:
    "Replace the forwards of modules."
    forwards = [cls(m) for m in modules.values()]
    try:
        for forward in forwards: vars(forward.module)['forward'] = forward.run
        yield
    finally:
        for forward in forwards:
            forward.active = False
            if forward_of(forward.module) is forward: _restore(forward.module, forward)   # nobody has wrapped it


class Fp32Forward(Forward):
    "The forward of `module` with autocast off, and with 16-bit inputs as fp32."
    called = False # Whether it ran in this fit

    def run(self, *args, **kwargs) -> Any:
        if not self.active: return self.plain(*args, **kwargs)
        self.called = True
        args = tuple(map(_in_fp32, args))
        kwargs = {name: _in_fp32(x) for name, x in kwargs.items()}
        inputs = (t.device for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor))
        device_type = model_device(self.module, next(inputs, 'cpu')).type
        with torch.autocast(device_type, enabled=False): return self.plain(*args, **kwargs)


def _in_fp32(x):
    "Return `x` with its 16-bit tensors in fp32; without any, `x` itself, as the module may add to a list."
    half = []
    def convert(t):
        if is_half(t): half.append(t)
        return half_to_float(t)
    new = map_tensors(convert, x)
    return new if half else x
