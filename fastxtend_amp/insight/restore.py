"Undo what running a model changes: buffers, attributes of modules, gradients and random states, and nothing else."
from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from typing import Any

import numpy as np
import torch
from torch import nn

from ..common import random_state_kept
from ..compat import AutocastState, EnteredModes, is_uninitialized
from ..convert import without_repeats
from ..mode import autocast_available, training_device

__all__ = ['ModuleState', 'effects_undone', 'modes_kept', 'modules_in', 'run_undone']


def modules_in(function: Any) -> list[nn.Module]:
    "The modules that calling `function` runs: itself, the one that a bound method belongs to, those in its attributes."
    if isinstance(function, nn.Module): return [function]
    if isinstance(function, partial):
        parts = (function.func, *function.args, *function.keywords.values())
        return [m for part in parts for m in modules_in(part)]
    owner = getattr(function, '__self__', None)
    if isinstance(owner, nn.Module): return [owner]
    attributes = [*getattr(owner, '__dict__', {}).values(), *getattr(function, '__dict__', {}).values()]
    return [v for v in attributes if isinstance(v, nn.Module)]   # such as `func` of fastai's losses


class ModuleState:
    """What running some modules may change in them: attributes, hooks, training flags, buffers, hidden states.

    Attributes and what is in their lists, dicts, sets and dataclasses are kept by reference, tensors in them and
    generators of random numbers by value; parameters by value too with `parameters=True`, for forwards that change them
    in place, as that of `nn.Embedding(max_norm=...)` does. Other objects that attributes refer to are left alone.
    `restore` puts the same objects back in the same memory; it can be called again after an interrupt.

    A module with lazy parameters is left out: running it for the first time builds them.
    """
    def __init__(self,
        roots: Iterable[nn.Module], # The modules; those inside them belong to it
        parameters: bool = False, # Whether the values of parameters are copied too
    ):
        self.parameters = parameters
        self._undo: list[Callable[[], Any]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]] = []
        self._seen: dict[int, Any] = {}                          # kept alive, so that no other object gets an id in it
        for module in (m for root in roots for m in root.modules()):
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            if not any(map(is_uninitialized, own)): self._keep_module(module, own)

    def restore(self) -> None:
        "Put all of it back."
        for undo in self._undo: undo()
        for tensor, data, values in self._tensors:
            if _place(tensor) != _place(data): tensor.data = data         # `model.to(...)` put other memory under it
            if values is not None: data.copy_(values)

    def _keep_module(self, module, own):
        if id(module) in self._seen: return
        self._seen[id(module)] = module
        self._undo.append(partial(_refill, vars(module), dict(vars(module))))
        for value in (*own, *vars(module).values()): self._keep(value)   # TorchScript's are not in `vars`

    def _keep(self, value):
        "Note how to put `value`, an attribute or a part of one, back."
        if isinstance(value, (type(None), bool, int, float, str, nn.Module)) or id(value) in self._seen: return
        self._seen[id(value)] = value
        if isinstance(value, torch.Tensor): self._keep_tensor(value)
        elif isinstance(value, np.ndarray) and value.flags.writeable:
            self._undo.append(partial(np.copyto, value, value.copy()))
        elif (generator := _generator_undo(value)) is not None: self._undo.append(generator)
        else: self._keep_container(value)

    def _keep_tensor(self, tensor):
        copied = self.parameters or not isinstance(tensor, nn.Parameter)
        data = without_repeats(tensor.data)                     # changing `detach()` would make a saved graph stale
        self._tensors.append((tensor, data, _copied(data) if copied and not tensor.is_inference() else None))

    def _keep_container(self, value):
        content: list[Any] = []
        if isinstance(value, dict):
            content = list(value.values())
            self._undo.append(partial(_refill, value, dict(value)))
        elif isinstance(value, list):
            content = list(value)
            self._undo.append(partial(value.__setitem__, slice(None), content))
        elif isinstance(value, (set, deque)):
            content = list(value)
            self._undo += [value.clear, partial(value.update if isinstance(value, set) else value.extend, content)]
        elif isinstance(value, tuple): content = list(value)
        elif is_dataclass(value) and not isinstance(value, type) and hasattr(value, '__dict__'):
            content = [getattr(value, f.name, None) for f in fields(value)]
            self._undo.append(partial(_refill, vars(value), dict(vars(value))))
        for part in content: self._keep(part)


class Modes:
    "The grad mode, autocast's state and the modes entered, which an interrupt may leave changed."
    def __init__(self, device: torch.device): # That autocast may be on for
        self.grad_mode, self.entered = torch.is_grad_enabled(), EnteredModes()
        self.autocast = AutocastState(device.type) if autocast_available(device.type) else None

    def restore(self) -> None:
        "Put them back; can be called again."
        self.entered.restore()
        torch.set_grad_enabled(self.grad_mode)
        if self.autocast is not None: self.autocast.restore()


def modes_kept(
    f: Callable, # Takes a learner first
) -> Callable:
    """Decorator: an exception leaves grad mode, autocast and entered modes as they were.

    No context manager: an interrupt may strike between its `__enter__` and the block it stands before, or in its
    `__exit__`. Here one that strikes in the clean-up has it run once more.
    """
    @wraps(f)
    def kept(learn, *args, **kwargs):
        modes = Modes(training_device(learn))
        try:
            try: return f(learn, *args, **kwargs)
            except BaseException: modes.restore(); raise
        except BaseException: modes.restore(); raise
    return kept


@contextmanager
def effects_undone(modules: Iterable[nn.Module]) -> Iterator[ModuleState]:
    "Run `modules` inside without effect on their buffers and attributes; parameters must be left alone."
    state = ModuleState(modules)
    try: yield state
    finally:
        with torch.no_grad(): state.restore()


@contextmanager
def run_undone(
    model: nn.Module, # The model, as it is or wrapped
    loss_func: Any = None, # The loss function; the state of modules in it is put back too
    device: torch.device | None = None, # Of the random state to keep, besides the CPU; all accelerators in use if None
) -> Iterator[None]:
    """Run `model` and `loss_func` forward and backward inside; at the end they are as they were, bit for bit.

    That is: parameters, buffers, gradients, requires_grad, hooks, attributes and training flags of the modules, and the
    random states of Python, NumPy and PyTorch. Inside, every `.grad` is None, and the old ones are put back as objects.
    Nothing else is touched: no callback, optimizer, dataset or logger.
    """
    roots = [model, *modules_in(loss_func)]
    leaves = list({id(p): p for root in roots for p in root.parameters()}.values())
    state = ModuleState(roots, parameters=True)
    flags = [(p, p.requires_grad, p.grad) for p in leaves]
    grad_mode = torch.is_grad_enabled()
    def restore():
        torch.set_grad_enabled(grad_mode)
        with torch.no_grad(): state.restore()
        for p, requires_grad, grad in flags:
            if p.requires_grad != requires_grad: p.requires_grad_(requires_grad)
            p.grad = grad
    with random_state_kept(device, everything=True):
        try:
            for p in leaves: p.grad = None
            yield
        finally:
            try: restore()
            except BaseException:                                # an interrupt in the middle of it: once more
                restore()
                raise


def _refill(target: dict, content: dict) -> None:
    "Make `target` hold `content` again, in its order; in place, since handles of hooks refer to it."
    if list(target) == list(content) and all(target[k] is v for k, v in content.items()): return
    target.clear()
    target.update(content)


def _generator_undo(value: Any) -> Callable[[], Any] | None:
    "What puts a generator of random numbers back; None for any other object."
    if isinstance(value, torch.Generator): return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random): return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState): return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, 'state', value.bit_generator.state)
    return None


def _copied(t: torch.Tensor) -> torch.Tensor | None:
    "A copy of `t`, in the host's memory where the device's is full; None for what cannot be written in place."
    if t.layout is not torch.strided: return None
    try: return t.clone()
    except torch.OutOfMemoryError: return t.to('cpu', copy=True)


def _place(t: torch.Tensor) -> tuple:
    "Where `t` lies: the same for a view of the same memory without repeats."
    at = t.data_ptr() if t.layout is torch.strided and t.device.type not in ('xla', 'meta') else None
    return t.dtype, t.device, t.layout, at
