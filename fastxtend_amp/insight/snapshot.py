"How is a learner put back as it was?"
from __future__ import annotations

import random, sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import numpy as np
import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner, Metric
from fastai.optimizer import Optimizer, OptimWrapper
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from ..compat import AutocastState
from ..mode import autocast_available, model_device

__all__ = ['Snapshot', 'preserved']

_OPTIMIZERS = (Optimizer, OptimWrapper, torch.optim.Optimizer)
_OF_TORCH = (nn.Module, torch.optim.Optimizer, GradScaler, LRScheduler, torch.utils.data.DataLoader, torch.utils.data.Sampler,
             torch.utils.data.Dataset)
# Objects of these are kept by reference: they hold locks, files, threads or pictures, not the state of training.
_FOREIGN = (frozenset(sys.stdlib_module_names) | {'torch', 'numpy', 'pandas', 'matplotlib', 'PIL', 'fastprogress', 'IPython', 'wandb',
            'tensorboard', 'tensorboardX', 'comet_ml', 'neptune', 'captum', 'azureml', 'torch_xla', 'spacy', 'thinc'}) - {'__main__'}
_DATA = (DataLoaders, DataLoader, torch.utils.data.DataLoader, torch.utils.data.Dataset)
_STATEFUL = (Learner, Callback, Metric, nn.Module)  # also where data refers to them, as a transform may to a model
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type)
_MANY = 1000  # data in longer containers is not looked through


def _rng_states() -> list[tuple[Callable, Any]]:
    "The global random number generators, as pairs: the function that sets one, and its state."
    states: list[tuple[Callable, Any]] = [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state()),
                                          (torch.set_rng_state, torch.get_rng_state())]
    if torch.cuda.is_initialized(): states.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    if hasattr(torch, 'xpu') and torch.xpu.is_initialized(): states.append((torch.xpu.set_rng_state_all, torch.xpu.get_rng_state_all()))
    if torch.backends.mps.is_available(): states.append((torch.mps.set_rng_state, torch.mps.get_rng_state()))
    if 'torch_xla' in sys.modules:
        import torch_xla.core.xla_model as xm
        states.append((xm.set_rng_state, xm.get_rng_state()))
    return states


def _own_values(t: torch.Tensor) -> torch.Tensor:
    "`t` outside the graph, without the dimensions that repeat the same memory, which nothing can copy into."
    if t.layout is not torch.strided: return t.detach() if t.requires_grad else t  # an alias would not share new indices
    t = t.data                                                   # a version counter of its own: no saved graph becomes stale
    for dim, (n, stride) in enumerate(zip(t.shape, t.stride())):
        if n > 1 and stride == 0: t = t.narrow(dim, 0, 1)
    return t


def _place(t: torch.Tensor) -> tuple:
    "Where `t` lies and how: `model.to(...)` changes that under the same `Parameter`."
    return (t.dtype, t.device, t.shape, t.layout) + ((t.data_ptr(), t.stride()) if t.layout is torch.strided and t.device.type not in ('xla', 'meta') else ())


class _Tensor:
    "One tensor: its memory, flags, hooks and `.grad`, and with `values` a copy of what is in it."
    _hook_dicts = ('_backward_hooks', '_post_accumulate_grad_hooks')

    def __init__(self, t: torch.Tensor, values: bool, host: bool):
        self.t, self.data, self.leaf, self.requires_grad = t, t.data, t.is_leaf, t.requires_grad
        self.grad = t.grad if t.is_leaf else None
        hooks = {n: getattr(t, n, None) for n in self._hook_dicts} if t.is_leaf else {}
        self.hooks = {n: (h, None if h is None else dict(h)) for n, h in hooks.items()}
        own = _own_values(t) if values else None
        self.values = None if own is None else own.to('cpu', copy=True) if host else own.clone()

    def restore(self) -> None:
        t = self.t
        if self.leaf and not t.is_leaf: t.detach_()
        if _place(t) != _place(self.data): t.data = self.data    # `model.to(...)` put other memory under it
        if self.values is not None: _own_values(t).copy_(self.values)
        if not self.leaf: return
        if t.requires_grad != self.requires_grad: t.requires_grad_(self.requires_grad)
        if t.grad is not self.grad: t.grad = self.grad
        for name, (hooks, content) in self.hooks.items():
            if getattr(t, name, None) is not hooks: setattr(t, name, hooks)
            if hooks is not None and content is not None: _refill(hooks, content)


def _refill(d: dict, content: dict) -> None:
    "Make `d` hold `content` again, in its order."
    d.update(content)
    for key in [k for k in d if k not in content]: del d[key]
    if list(d) != list(content):
        d.clear()
        d.update(content)


class Snapshot:
    """What a learner, its model, loss, callbacks, metrics, dataloaders and the random number generators hold.

    Found by following references from the learner: the attributes of each object, and what is in its lists, tuples,
    dicts and sets. References and plain values are kept as they are, tensors and arrays are copied. Parameters are
    copied and the optimizer is followed with `training=True` only. Data is not copied: of the datasets and dataloaders
    attributes, lists and generators are kept. Objects of the standard library, of plotting, logging and progress
    packages, and what closures hold, are left alone.

    `restore` puts all of it back in place: the same objects in the same memory. It can be called again and again, also
    after a call that was interrupted, and needs no memory on the device.
    """
    def __init__(self,
        learn: Learner, # The learner; nothing in it changes
        training: bool = False, # Whether to copy parameters and the optimizer's state too
        host: bool = False, # Whether the copies lie in the host's memory instead of on the tensors' devices
    ):
        self.training, self.host = training, host
        self._undo: list[tuple] = []                             # functions and their arguments
        self._tensors: list[_Tensor] = []
        self._seen: dict[int, Any] = {}
        self._grad_mode = torch.is_grad_enabled()
        device = model_device(learn.model, torch.device('cpu')).type
        self._autocast = AutocastState(device) if autocast_available(device) else None
        self._walk(learn)
        self._rng = _rng_states()

    def restore(self) -> None:
        "Put everything back as it was when this was built."
        for undo, *args in self._undo: undo(*args)
        for o in self._tensors: o.restore()
        if self._autocast is not None: self._autocast.restore()
        torch.set_grad_enabled(self._grad_mode)
        for set_state, state in self._rng: set_state(state)

    def _walk(self, root):
        stack = [(root, False)]
        while stack:
            o, is_data = stack.pop()
            if isinstance(o, _ATOMS): continue
            if id(o) in self._seen: continue
            self._seen[id(o)] = o                                # kept alive, so that no other object gets its id
            is_data = (is_data or isinstance(o, _DATA)) and not isinstance(o, _STATEFUL)
            # Last in, first out: what is data is marked so before a callback's reference can reach it.
            stack += [(child, is_data) for child in reversed(list(self._keep(o, is_data)))]

    def _keep(self, o, is_data):
        "Note how to put `o` itself back; return what it refers to."
        if isinstance(o, torch.Tensor):
            if isinstance(o, nn.parameter.UninitializedTensorMixin): return ()
            parameter = isinstance(o, nn.Parameter)
            self._tensors.append(_Tensor(o, not is_data and (self.training or not parameter), self.host))
            return () if is_data or not o.is_leaf else (o.grad,)
        if isinstance(o, np.ndarray):
            if not is_data and o.flags.writeable: self._undo.append((np.copyto, o, o.copy()))
            return ()
        if isinstance(o, random.Random): self._undo.append((o.setstate, o.getstate())); return ()
        if isinstance(o, torch.Generator): self._undo.append((o.set_state, o.get_state())); return ()
        if isinstance(o, np.random.Generator): self._undo.append((setattr, o.bit_generator, 'state', o.bit_generator.state)); return ()
        if isinstance(o, np.random.RandomState): self._undo.append((o.set_state, o.get_state())); return ()
        if isinstance(o, MethodType): return (o.__self__,)
        children = []
        if isinstance(o, bytearray): self._undo.append((o.__setitem__, slice(None), o[:]))
        elif isinstance(o, list):
            children = list(o)
            self._undo.append((list.__setitem__, o, slice(None), children))
        elif isinstance(o, dict):
            self._undo.append((_refill, o, dict(o)))
            children = [*o, *o.values()]
        elif isinstance(o, (set, deque)):
            children = list(o)
            self._undo += [(o.clear,), ((o.update if isinstance(o, set) else o.extend), children)]
        elif isinstance(o, (tuple, frozenset)): children = list(o)
        if is_data and len(children) > _MANY: children = []
        if not self.training and isinstance(o, _OPTIMIZERS): return ()
        if self._is_followed(o):
            self._undo += [(self._set_class, o, type(o)), (_refill, vars(o), dict(vars(o)))]
            children = [*children, *vars(o).values()]
        return children

    @staticmethod
    def _set_class(o, cls):
        if type(o) is not cls: o.__class__ = cls

    @staticmethod
    def _is_followed(o):
        if isinstance(o, _OF_TORCH): return True
        return isinstance(getattr(o, '__dict__', None), dict) and type(o).__module__.partition('.')[0] not in _FOREIGN


@contextmanager
def preserved(
    learn: Learner, # The learner
    training: bool = False, # Whether parameters and optimizer are put back too, for what trains; they are copied then
    host: bool = False, # Whether the copies lie in the host's memory instead of on the tensors' devices
) -> Iterator[Snapshot]:
    """Do anything to `learn` inside; at the end, also after any exception, it is as it was, bit for bit and in place.

    Without `training` the parameters' values and the optimizer must be left alone inside. See `Snapshot` for what is
    kept, and what is not.
    """
    before = Snapshot(learn, training, host)
    try: yield before
    finally:
        try: before.restore()
        except BaseException:                                    # an interrupt in the middle of it: once more, from the start
            before.restore()
            raise
