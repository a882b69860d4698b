"What do XLA devices need?"
from __future__ import annotations

import functools, os, warnings
from contextlib import contextmanager
from types import SimpleNamespace

import torch
from fastai.callback.core import Callback
from fastai.learner import Learner
from torch import nn

from ..checkpoint import place_state
from ..convert import detached
from ..mode import model_device

__all__ = ['XLADevice', 'XLAGradients']

_OVERRIDES = ('XLA_USE_BF16', 'XLA_DOWNCAST_BF16')


class XLADevice(Callback):
    """Trains on an XLA device, in every precision: moves the learner there, and hands the device one graph per batch.

    Nothing has to be called: `fit`, `validate` and `get_preds` add this callback when the `DataLoaders` or the model
    are on an XLA device (`dls.to(torch_xla.device())`), and `to_fp32()` leaves it where it is. It is no default callback
    of fastai's, which would be on every learner of the process, and not left to `to_fp16()` and the like, since a
    learner without them needs it as much: fastai's own move replaces the parameters, so that the optimizer steps on the
    old ones and nothing is learnt.

    Create the device before the first backward pass of the process, also if that is on the CPU: PyTorch's autograd
    knows only the devices that there were at that time. Several replicas are started, and given their own data and
    equal parameters, as PyTorch/XLA describes; `XLAGradients` averages their gradients.

    Raises `RuntimeError` when `fit` starts if torch_xla is missing, if the device came too late, if something else than
    the learner holds the parameters so that they cannot be moved in place, or if the optimizer has none of them.

    Source: https://docs.pytorch.org/xla/master/learn/pytorch-on-xla-devices.html; swapping parameters:
    https://docs.pytorch.org/docs/stable/future_mod.html.
    """
    order = -20  # before TrainEvalCallback (-10) moves the model, and before anything reads the loss in `after_batch`

    def before_fit(self):
        "Move model, gradients and the optimizer's state to where fastai will want them."
        device = _target(self.learn)
        if _is_xla(device):
            _warn_of_environment()
            _check_device(device)
        move(self.learn, device)
        if _is_xla(device): _check_optimizer(self.learn)

    def after_batch(self):
        "Run the batch's graph; what reads the loss after this finds it computed, and compiles nothing."
        if _has_xla_model(self.learn): _torch_xla().sync()


class XLAGradients(Callback):
    """Averages the gradients over XLA's replicas, where there are several, before they are unscaled.

    All replicas then see the same non-finite values, skip the same steps and keep the same scale.
    """
    order, run_valid = 9, False  # after GradientAccumulation (6) let the step through, before MixedPrecision (10) unscales

    def before_step(self):
        "Average the gradients."
        if not _has_xla_model(self.learn): return
        import torch_xla.core.xla_model as xm
        groups = [{'params': list(pl)} for pl in self.learn.opt.param_lists]
        xm.reduce_gradients(SimpleNamespace(__getstate__=lambda: {'param_groups': groups}))  # it asks a torch optimizer for no more


# -- moving a learner

def move(
    learn: Learner, # Its optimizer may be there already, and have taken steps
    device: torch.device, # Where to
) -> None:
    "Move model and optimizer state to `device`; the parameters stay the same objects, whoever else holds them."
    if any(t.device != device for m in _modules(learn) for t in (*m.parameters(), *m.buffers())):
        for name in ('xb', 'yb', 'pred', 'loss', 'loss_grad'):   # an exception leaves them on a graph, which holds the parameters
            if name in learn.__dict__: learn.__dict__[name] = detached(learn.__dict__[name])
        with _swapping():
            for m in _modules(learn):
                try: m.to(device)
                except RuntimeError as e:
                    if 'swap' not in str(e): raise
                    raise RuntimeError(f"The parameters cannot be moved to '{device}' in place: {e} ({e.__cause__}). Something else holds them, "
                                       "such as the graph of a loss that was kept, or a model that was compiled and used. Let go of it, or "
                                       "move the model with `model.to(device)` before that, and create the learner after it.") from e
    if learn.opt is not None: place_state(learn.opt)


def _modules(learn): return [m for m in (learn.model, learn.loss_func) if isinstance(m, nn.Module)]


@contextmanager
def _swapping():
    "Let `Module.to` change the parameters in place, where PyTorch would put new ones into the module."
    future = torch.__future__
    before = future.get_swap_module_params_on_conversion()
    future.set_swap_module_params_on_conversion(True)
    try: yield
    finally: future.set_swap_module_params_on_conversion(before)


def _is_xla(device): return device.type == 'xla'
def _has_xla_model(learn): return _is_xla(model_device(learn.model, torch.device('cpu')))


def _dls_device(learn):
    try: return getattr(learn.dls, 'device', None)
    except IndexError: return None                               # what an empty DataLoaders raises for any name


def _target(learn) -> torch.device:
    "Where fastai's `TrainEvalCallback` will move the model."
    device = _dls_device(learn)
    if device is None: return model_device(learn.model, torch.device('cpu'))
    device = torch.device(device)
    return _torch_xla().device() if _is_xla(device) and device.index is None else device


def on_xla(learn: Learner) -> bool:
    "Is the learner's model on an XLA device, or will fastai move it there?"
    device = _dls_device(learn)
    # A string or an index is left as it is unless it has to be an XLA device: this runs at the start of each fit.
    return str(device).startswith('xla') or _has_xla_model(learn)


# -- what can be wrong

def _torch_xla():
    try: import torch_xla
    except ImportError as e:
        raise RuntimeError("The learner's device is an XLA device, which needs the package torch_xla. Install it in the version of "
                           "your torch, or take another device with `learn.dls.to('cpu')`.") from e
    return torch_xla


@functools.cache
def _check_device(device: torch.device) -> None:
    "Raise if no backward pass works on `device`; once a process is enough."
    try: torch.ones(1, device=device, requires_grad=True).sum().backward()
    except RuntimeError as e:
        if 'device_ready_queues_' not in str(e): raise           # the internal assertion's words, which nobody understands
        raise RuntimeError(f"No backward pass can run on '{device}': the device was created after this process's first backward pass, and "
                           "PyTorch's autograd knows only the devices that there were then. Restart Python, and create the device "
                           "first: `import torch_xla; torch_xla.device()`.") from e


def _check_optimizer(learn):
    "Raise if the optimizer's parameters are not the model's: nothing would be learnt."
    known = {id(p) for pl in (learn.opt.param_lists if learn.opt is not None else ()) for p in pl}
    if known and known.isdisjoint(map(id, learn.model.parameters())):
        raise RuntimeError("The optimizer holds none of the model's parameters: `model.to` put new ones into the model after the optimizer "
                           "was created. Call `learn.create_opt()`, and move learners with `learn.dls.to(device)`.")


def _warn_of_environment():
    for name in (*_OVERRIDES, 'XLA_USE_F16'):
        if os.environ.get(name, '0').lower() in ('', '0', 'false'): continue
        warnings.warn(f"The environment variable {name} is set. " + (
            "It overrides autocast: every operator computes in bf16, in fp32 training as well. Unset it and use `learn.to_bf16()`."
            if name in _OVERRIDES else "It has no effect. Unset it; for fp16 use `learn.to_fp16()`."))


# -- how it gets onto a learner

def attach(learn: Learner) -> None:
    "Add what is missing, if the learner is on an XLA device."
    if not on_xla(learn): return
    for cls in (XLADevice, XLAGradients):
        if not any(isinstance(cb, cls) for cb in learn.cbs): learn.add_cb(cls())


@contextmanager
def _on_cpu(learn):
    "The learner on the CPU, without the callbacks of this module: what is written then is for every machine."
    device, dls_device = model_device(learn.model, torch.device('cpu')), _dls_device(learn)
    with learn.removed_cbs([cb for cb in learn.cbs if isinstance(cb, (XLADevice, XLAGradients))]):
        try:
            if dls_device is not None: learn.dls.to(torch.device('cpu'))
            move(learn, torch.device('cpu'))
            yield
        finally:
            if dls_device is not None: learn.dls.to(dls_device)
            move(learn, device)


def _wrap(name, method):
    "Put `method(original, learn, ...)` in the place of `Learner.<name>`."
    original = Learner.__dict__[name]
    if getattr(original, '_fastxtend_xla', False): return
    @functools.wraps(original)
    def inner(self, *args, **kwargs): return method(original, self, *args, **kwargs)
    inner._fastxtend_xla = True
    setattr(Learner, name, inner)


def _attached(original, self, *args, **kwargs):
    attach(self)
    return original(self, *args, **kwargs)


def _exporting(original, self, *args, **kwargs):
    if not on_xla(self): return original(self, *args, **kwargs)
    with _on_cpu(self): return original(self, *args, **kwargs)


for _name in ('fit', '__enter__'): _wrap(_name, _attached)       # validate() and get_preds() enter the learner
_wrap('export', _exporting)
