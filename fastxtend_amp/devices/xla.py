"Training, checkpoints and exports on XLA devices (PyTorch/XLA); does nothing until torch_xla is in use."
from __future__ import annotations

import functools, os, sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from types import ModuleType
from typing import Any

import torch
from fastai.callback.core import Callback, TrainEvalCallback
from fastai.learner import Learner
from torch import nn

from ..checkpoint import ADAPTERS, StateAdapter, place_state
from ..common import put_over, warn_user
from ..convert import detached, map_tensors, release_graphs
from ..mode import loaders_device, model_device, training_device
from ..observer import ON_ATTACH
from ..scaling import optimizer_params

__all__ = ['XLADevice', 'XLAGradients', 'XLAState', 'install', 'on_xla']

_CPU = torch.device('cpu')
_BF16_VARIABLES = ('XLA_USE_BF16', 'XLA_DOWNCAST_BF16')


class XLADevice(Callback):
    """Moves the learner to its XLA device in place before a fit, and runs one XLA graph per batch.

    It is added where it is needed: when a fit, `validate` or `get_preds` starts and the `DataLoaders` or the model are
    on an XLA device (`dls.to(torch_xla.device())`), in every precision, plain fp32 included. fastai's own `model.to`
    puts new parameters into the module on XLA, so that the optimizer steps on the old ones and nothing is learnt.

    Create the device before the first backward pass of the process, also if that is on the CPU: PyTorch's autograd
    knows only the devices that existed at that time. For several replicas, start the processes and give them their own
    data and equal parameters as PyTorch/XLA describes; `XLAGradients` averages their gradients.

    Raises `RuntimeError` when a fit starts: if torch_xla is missing, if the device was created too late, if something
    other than the learner refers to the parameters so that they cannot be moved in place, or if the optimizer holds
    none of the model's parameters.

    Source: https://docs.pytorch.org/xla/master/learn/pytorch-on-xla-devices.html; moving parameters in place:
    https://docs.pytorch.org/docs/stable/future_mod.html.
    """
    order = -20  # before TrainEvalCallback (-10) moves the model, and before anything reads the loss in `after_batch`

    def before_fit(self):
        "Move model, gradients and the optimizer's state to the device that fastai will use."
        device = _fit_device(self.learn)
        if device.type == 'xla':
            install()                                            # the user may have added this callback
            _warn_of_environment()
            _check_backward(device)
        move(self.learn, device)
        if device.type == 'xla': _check_optimizer(self.learn)

    def after_batch(self):
        "Run the graph of this batch, so that reading the loss later compiles nothing."
        if _has_xla_model(self.learn): run_graph()

    def __setstate__(self, state):
        "A learner from a pickle may be exported before it is fitted."
        super().__setstate__(state)
        _install_if_needed()


class XLAGradients(Callback):
    """Averages the gradients over XLA's replicas, where there are several, before they are unscaled.

    All replicas then find the same non-finite values, skip the same steps and keep the same loss scale.

    Source: https://docs.pytorch.org/xla/master/learn/api-guide.html (`xla_model.all_reduce`).
    """
    order, run_valid = 9, False  # after GradientAccumulation (6); before MixedPrecision (10) unscales

    def before_step(self):
        "Average the gradients."
        if not _has_xla_model(self.learn): return
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr
        replicas = xr.world_size()
        gradients = [p.grad for p in optimizer_params(self.learn.opt) if p.grad is not None]
        if replicas > 1: xm.all_reduce(xm.REDUCE_SUM, gradients, scale=1 / replicas)


# -- moving a learner

def move(
    learn: Learner, # Its optimizer may exist already, and have taken steps
    device: torch.device, # The device to move to
) -> None:
    """Move model, loss function and optimizer state to `device`; the parameters stay the same objects.

    Raises `RuntimeError` if PyTorch cannot move the parameters in place because something else refers to them.
    """
    modules = [m for m in (learn.model, learn.loss_func) if isinstance(m, nn.Module)]
    if any(t.device != device for m in modules for t in _tensors(m)):
        _free_graphs(learn, modules)
        with _in_place():
            for m in modules: _move_module(m, device)
    if learn.opt is not None: place_state(learn.opt)


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]: return chain(module.parameters(), module.buffers())


def _free_graphs(learn: Learner, modules: list[nn.Module]) -> None:
    """Free the graphs that refer to the parameters, which could not be moved in place otherwise.

    These are the graph of the last batch, which an exception leaves on the learner, and those of weights that a module
    computes from others in each forward pass, as with `nn.utils.weight_norm` and fastai's `WeightDropout`.
    """
    release_graphs(learn)
    for m in chain.from_iterable(m.modules() for m in modules):
        for name, value in list(vars(m).items()):
            if isinstance(value, (torch.Tensor, list)): m.__dict__[name] = detached(value)


@contextmanager
def _in_place() -> Iterator[None]:
    "`Module.to` changes parameters in place inside, where it would otherwise put new ones into the module."
    future = torch.__future__
    before = future.get_swap_module_params_on_conversion()
    future.set_swap_module_params_on_conversion(True)
    try: yield
    finally: future.set_swap_module_params_on_conversion(before)


def _move_module(module: nn.Module, device: torch.device) -> None:
    try: module.to(device)
    except RuntimeError as e:
        if 'swap' not in str(e): raise                           # an error of another kind, such as too little memory
        raise RuntimeError(
            f"The parameters cannot be moved to '{device}' in place: {e} ({e.__cause__}).\n"
            "Something else refers to them, such as the graph of a kept loss, or a model that was compiled and used.\n"
            "Delete it, or call `model.to(device)` before that and create the learner afterwards.") from e


# -- which device

def run_graph() -> None:
    "Run what has been put off so far as a graph of its own, which other batches then need not contain."
    _torch_xla().sync()


def on_xla(learn: Learner) -> bool:
    "Whether the learner's model is on an XLA device, or fastai will move it to one."
    return _has_xla_dls(learn) or _has_xla_model(learn)


def _has_xla_dls(learn: Learner) -> bool:
    # As a string: `torch.device` would raise an error for a device that PyTorch does not know.
    return str(loaders_device(learn)).startswith('xla')


def _has_xla_model(learn: Learner) -> bool: return model_device(learn.model, _CPU).type == 'xla'


def _fit_device(learn: Learner) -> torch.device:
    "The device that fastai's `TrainEvalCallback` will move the model to."
    device = training_device(learn)
    if device.type == 'xla' and device.index is None: return _torch_xla().device()
    return device


# -- checks when a fit starts

def _torch_xla() -> ModuleType:
    try: import torch_xla
    except ImportError as e:
        raise RuntimeError("The learner's device is an XLA device, which needs the package torch_xla.\n"
                           "Install the version of torch_xla that belongs to your torch, or use another device: "
                           "`learn.dls.to('cpu')`.") from e
    return torch_xla


@functools.cache
def _check_backward(device: torch.device) -> None:
    "Raise if no backward pass works on `device`; checked once per process."
    try: torch.ones(1, device=device, requires_grad=True).sum().backward()
    except RuntimeError as e:
        if 'device_ready_queues_' not in str(e): raise           # the assertion that PyTorch fails in this case
        raise RuntimeError(
            f"No backward pass can run on '{device}': the device was created after the process's first backward pass,\n"
            "and PyTorch's autograd knows only the devices that existed then.\n"
            "Restart Python, and create the device first: `import torch_xla; torch_xla.device()`.") from e


def _check_optimizer(learn: Learner) -> None:
    "Raise if the optimizer's parameters are not the model's: nothing would be learnt."
    if learn.opt is None: return
    held = {id(p) for p in optimizer_params(learn.opt)}
    if not held or not held.isdisjoint(map(id, learn.model.parameters())): return
    raise RuntimeError("The optimizer holds none of the model's parameters.\n"
                       "`model.to` put new parameters into the model after the optimizer was created.\n"
                       "Call `learn.create_opt()`, and move learners with `learn.dls.to(device)`.")


def _warn_of_environment() -> None:
    "Warn of environment variables that override autocast, or that look as if they did."
    for name in (*_BF16_VARIABLES, 'XLA_USE_F16'):
        if os.environ.get(name, '0').lower() in ('', '0', 'false'): continue
        effect = "It has no effect. Unset it; for fp16 use `learn.to_fp16()`."
        if name in _BF16_VARIABLES:
            effect = ("It overrides autocast: every operator computes in bf16, in fp32 training as well. "
                      "Unset it and use `learn.to_bf16()`.")
        warn_user(f"The environment variable {name} is set. {effect}")


# -- checkpoints and exports

class XLAState(StateAdapter):
    "Writes tensors of XLA devices as CPU tensors, which every machine and `weights_only` loading can read."
    def applies(self, model: nn.Module) -> bool: return any(t.device.type == 'xla' for t in _tensors(model))
    def to_file(self, state: Any) -> Any: return map_tensors(torch.Tensor.cpu, state)


@contextmanager
def _on_cpu(learn: Learner) -> Iterator[None]:
    "The learner on the CPU and without the callbacks of this module, so that what is written can be read everywhere."
    device, dls_device = model_device(learn.model, _CPU), loaders_device(learn)
    with learn.removed_cbs([cb for cb in learn.cbs if isinstance(cb, (XLADevice, XLAGradients))]):
        try:
            if dls_device is not None: learn.dls.to(_CPU)
            move(learn, _CPU)
            yield
        finally:
            if dls_device is not None: learn.dls.to(dls_device)
            move(learn, device)


# -- how it gets onto a learner

def attach(
    learn: Learner, # The learner; nothing happens unless it is on an XLA device
) -> list[Callback]: # The callbacks that were added
    "Add those of `XLADevice` and `XLAGradients` that are missing."
    if not on_xla(learn): return []
    missing = [cls() for cls in (XLADevice, XLAGradients) if not any(isinstance(cb, cls) for cb in learn.cbs)]
    learn.add_cbs(missing)
    return missing


def install() -> None:
    """Have every learner trained on XLA devices move in place, and exported from the CPU; once per process.

    Two methods of fastai are replaced: `TrainEvalCallback.before_fit`, which moves the model, and `Learner.export`.
    For a learner that is not on an XLA device both do what fastai's do.
    """
    put_over(TrainEvalCallback, 'before_fit', _before_fit)
    put_over(Learner, 'export', _export)


def _install_if_needed(learn: Learner | None = None) -> None:
    if 'torch_xla' in sys.modules or (learn is not None and _has_xla_dls(learn)): install()


def _before_fit(original: Any, self: TrainEvalCallback) -> None:
    for cb in attach(self.learn):
        if isinstance(cb, XLADevice): cb.before_fit()            # this event has passed its place in the order
    original(self)


def _export(original: Any, self: Learner, *args, **kwargs) -> Any:
    if not on_xla(self): return original(self, *args, **kwargs)
    with _on_cpu(self): return original(self, *args, **kwargs)


ADAPTERS.append(XLAState())
ON_ATTACH.append(_install_if_needed)
_install_if_needed()
