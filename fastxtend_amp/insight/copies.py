"A copy of a learner to run on the side, and what it holds."
import tempfile, warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from fastai.callback.core import Callback
from fastai.learner import Learner
from fastcore.basics import noop
from torch import nn
from torch.overrides import TorchFunctionMode

from ..compat import COMPILED_NAME, uncompiled
from ..devices.facts import autocast_available
from ..learners import inner_optimizer, training_device
from ..messages import first_line
from ..precisions.matching import unwrapped
from ..training.current import precision_callback
from .choices import Choice
from .copied_callbacks import note_of_left_out, runs_on_copy
from .random_states import random_state_kept


@contextmanager
def copied_learner(
    learn: Learner, # Nothing in it changes
    choice: Choice, # What the copy trains in
    optimizer: bool = False, # Whether to copy the optimizer with its state; otherwise the copy has a new one
) -> Iterator[Learner]: # A learner of the same class; its `path` is a folder that is removed at the end
    """Context manager: a copy of `learn`, to train or examine and throw away.

    Data loaders and their datasets are shared; everything else is a deep copy. The model is the one inside
    `torch.compile` and DistributedDataParallel, so a copy does not communicate with other processes. In a precision
    without autocast all 16-bit weights become fp32. `save`, `load` and `export` of a copy do nothing. Gradients are
    enabled, autocast and warnings are disabled, and the random states of Python, NumPy and torch are restored on exit.
    Only one thread at a time can have a copy.

    Raises `ValueError` if the learner cannot be copied, with the name of the part.
    """
    device = training_device(learn).type
    no_autocast: Any = torch.autocast(device, enabled=False) if autocast_available(device) else nullcontext()
    with (random_state_kept(), tempfile.TemporaryDirectory() as folder, torch.inference_mode(False),
          torch.enable_grad(), no_autocast, warnings.catch_warnings(),
          torch.autograd.set_detect_anomaly(False)):             # an overflow is looked at, or skipped
        warnings.simplefilter('ignore')                          # for example, that a precision is emulated
        new = _copy(learn, optimizer)
        new.path, new.model_dir = Path(folder), 'models'
        grads = [(p, p.grad) for p in learn.model.parameters()]
        try:
            # A loss function with a penalty on `learn.model`, which is not copied, adds gradients to the learner's own.
            learn.model.zero_grad()
            # A user's own GradScaler is copied; a diagnosis would run copies of the copy.
            deepcopy(choice).apply(new, on_overflow='ignore')
            if not new.opt: new.create_opt()                     # callbacks may read it
            yield new
        except Exception as e:
            for note in note_of_left_out(learn):
                if hasattr(e, 'add_note'): e.add_note(note)      # Python 3.11
            raise
        finally:
            for p, grad in grads: p.grad = grad
            if cb := precision_callback(new): cb.close()         # the fit that batches have opened
            vars(new).clear()                                    # callbacks refer to the copy: free it without `gc`


# Attributes of a copy. The learner's may have an open file, as CSVLogger's `logger` does; callbacks may use a scaler.
_SILENT = dict(scaler=torch.amp.GradScaler('cpu', enabled=False), logger=noop, save=noop, load=noop, export=noop,
               loaded_precision={})


def _copy(learn, optimizer):
    new, cbs = object.__new__(type(learn)), learn.cbs.filter(runs_on_copy)
    loaders = [*getattr(learn.dls, 'loaders', ()), vars(learn).get('dl')]
    shared = learn.lock, learn.dls, *loaders, *(getattr(dl, 'dataset', None) for dl in loaders)
    memo = {id(o): o for o in shared} | {id(learn): new}

    def add(name, part):
        "Copy a part, except for what parts before it share."
        try:
            with _Detached(): vars(new)[name] = _copied(part, memo)
        except torch.OutOfMemoryError: raise
        except Exception as e:
            raise ValueError(f'This learner cannot be copied: copying `{name}` failed ({first_line(e)}). Only '
                             'copies are run.\n'
                             'If it is a callback, set its attribute `run_on_copy = False`. '
                             'Anything else needs a `__deepcopy__`, or a place outside of model and learner.') from e

    add('model', unwrapped(learn.model))                         # first: others share it
    memo[id(learn.model)] = new.model                            # instead of what wraps it
    parts = {cb.name: cb for cb in cbs}                          # by themselves, as an error names the part
    parts |= {name: o for name, o in vars(learn).items() if not isinstance(o, Callback)}
    parts |= {'cbs': cbs, 'opt': learn.opt if optimizer else None, **_SILENT}
    if 'recorder' in vars(learn):                                # other callbacks read what it has recorded
        parts['recorder'] = SimpleNamespace(**vars(learn.recorder))
    for name, part in parts.items(): add(name, part)
    if new.opt:                                                  # copying leaves out flags, such as `fused`
        for name, flag in vars(inner_optimizer(learn.opt)).items():
            if isinstance(flag, (int, float)): vars(inner_optimizer(new.opt)).setdefault(name, flag)
    for m in new.model.modules():
        if hasattr(m, COMPILED_NAME): continue                   # a compiled module knows how to be copied
        for owner in (vars(m), m._forward_pre_hooks, m._forward_hooks, m._backward_pre_hooks, m._backward_hooks):
            for key, function in [*owner.items()]:               # a compiled one would run the original
                if isinstance(function, FunctionType): owner[key] = _copied(uncompiled(function), memo)
        # One that waits for no other process.
        if isinstance(m, nn.SyncBatchNorm): vars(m)['forward'] = MethodType(nn.BatchNorm1d.forward, m)
    return new


def _copied(x, memo):
    """Deep-copy `x`. Of a function, which may replace a method or be a hook, copy the model in its closure as well.

    Anything else in a closure is shared, because hooks and callbacks may refer to it.
    """
    if not isinstance(x, FunctionType) or not x.__closure__ or uncompiled(x) is not x: return deepcopy(x, memo)
    if id(x) in memo: return memo[id(x)]                         # it may refer to itself
    cells = tuple(CellType() for _ in x.__closure__)
    new = memo[id(x)] = FunctionType(x.__code__, x.__globals__, x.__name__, x.__defaults__, cells)
    new.__kwdefaults__ = x.__kwdefaults__
    vars(new).update(vars(x))
    for cell, old in zip(cells, x.__closure__):
        if old == CellType(): continue                           # it is empty
        value = old.cell_contents
        of = getattr(value, '__self__', value)                   # of a method
        cell.cell_contents = _copied(value, memo) if isinstance(of, (nn.Module, Learner, FunctionType)) else value
    return new


class _Detached(TorchFunctionMode):
    "Copies tensors without their graph. PyTorch cannot copy those with a graph, which modules and callbacks may keep."
    def __torch_function__(self, func, types, args=(), kwargs=None):
        has_graph = func is torch.Tensor.__deepcopy__ and not args[0].is_leaf
        return args[0].detach().clone() if has_graph else func(*args, **(kwargs or {}))
