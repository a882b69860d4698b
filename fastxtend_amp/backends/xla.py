"""Training, checkpoints and exports on XLA devices (PyTorch/XLA), in every precision and in plain fp32.

Where torch_xla is installed, importing this file wraps `TrainEvalCallback.before_fit` of fastai, which moves the model,
and `Learner.export`; on other devices the wrappers only call what they wrap. Users import torch_xla themselves, and
create the device before the first backward pass of the process. With several replicas, users start the processes, and
give each its own data and all of them the same parameters.

Source: https://docs.pytorch.org/xla/master/learn/pytorch-on-xla-devices.html.
"""
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from fastai.callback.core import Callback, TrainEvalCallback
from fastai.learner import Learner
from fastai.text.learner import TextLearner
from torch import nn

from ..learners import gradient_params, inner_optimizer, model_device, optimizer_params, training_device
from ..training.checkpoint import wrap_method
from .files import convert_files


class XLADevice(Callback):
    """Runs one XLA graph per batch, and averages gradients over the replicas before they are unscaled.

    `move` adds it on an XLA device and removes it elsewhere. All replicas skip the same steps.

    Source: https://docs.pytorch.org/xla/master/learn/api-guide.html (`xla_model.all_reduce`).
    """
    order = 9  # after GradientAccumulation (6); before MixedPrecision (10) unscales and Recorder (50) reads the loss

    def before_step(self):
        "Average the gradients."
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr
        replicas = xr.world_size()
        gradients = [p.grad for p in gradient_params(self.learn.opt)]
        if replicas > 1: xm.all_reduce(xm.REDUCE_SUM, gradients, scale=1 / replicas)

    def after_batch(self):
        "Run the graph of this batch, so that reading the loss later compiles nothing."
        import torch_xla
        torch_xla.sync()


def _uses_xla(learn: Learner) -> bool:
    return 'xla' in (model_device(learn.model, 'cpu').type, training_device(learn).type)


# -- moving a learner

def move(
    learn: Learner, # Its optimizer may exist already
    device: torch.device, # The device to move to
) -> None:
    """Move model, loss function and the optimizer's state to `device`; the parameters stay the same objects.

    `model.to` would create new parameters, while the optimizer keeps the old ones. Raises `RuntimeError` if PyTorch
    cannot move the parameters in place because something else refers to them.
    """
    both = nn.ModuleList(m for m in (learn.model, learn.loss_func) if isinstance(m, nn.Module))
    if any(t.device != device for t in (*both.parameters(), *both.buffers())):
        # Graphs refer to parameters: that of a loss that Ctrl-C left, and that of weights by weight norm.
        learn.pred = learn.loss = learn.loss_grad = None
        for m in both.modules():
            for name, t in [*vars(m).items()]:
                if torch.is_tensor(t) and not t.is_leaf: vars(m)[name] = t.detach()
        future = torch.__future__                                # without this `Module.to` creates new parameters
        swaps = future.get_swap_module_params_on_conversion()
        future.set_swap_module_params_on_conversion(True)
        try:
            both.to(device)
        except RuntimeError as e:
            raise RuntimeError(
                f"The parameters cannot be moved to '{device}' in place: {e} ({e.__cause__}).\n"
                'Something else refers to them, such as the graph of a kept loss or a compiled model: delete it, or '
                'call `model.to(device)` first and then create the learner.') from e
        finally: future.set_swap_module_params_on_conversion(swaps)
        if learn.opt is not None: _place_state(learn.opt)
    learn.remove_cb(XLADevice)
    if device.type == 'xla': learn.add_cb(XLADevice())


def _place_state(opt: Any) -> None:
    "Move the optimizer's state to the device of its parameters. Step counts of torch's optimizers stay on the CPU."
    for p, state in inner_optimizer(opt).state.items():          # fastai also keeps an entry for `nn.LSTM.bias`, a bool
        for name, x in state.items():
            is_count = not torch.is_tensor(x) or (p.dim() and not x.dim())
            if not is_count: state[name] = x.to(p.device)


def _before_fit(original: Callable, self: TrainEvalCallback) -> None:
    "Move the learner in place and check it, then call the original `before_fit` of fastai."
    learn, device = self.learn, training_device(self.learn)
    if _uses_xla(learn): move(learn, device)
    if device.type == 'xla': _check(learn, device)
    original(self)


def _check(learn: Learner, device: torch.device) -> None:
    "Raise a `RuntimeError` where nothing would be learned."
    _check_backward(device)
    held = {*optimizer_params(learn.opt)}
    if held and held.isdisjoint(learn.model.parameters()):
        raise RuntimeError("The optimizer holds none of the model's parameters.\n"
                           "`model.to` created new parameters after the optimizer was created.\n"
                           "Call `learn.create_opt()`, and move learners with `learn.dls.to(device)`.")


@lru_cache
def _check_backward(device: torch.device) -> None:
    "Raise a `RuntimeError` if no backward pass works on `device`."
    try: torch.ones(1, device=device, requires_grad=True).sum().backward()
    except RuntimeError as e:
        raise RuntimeError(f"No backward pass runs on '{device}': it must be created before the process's first one.\n"
                           "Restart Python, and create it first: `import torch_xla; torch_xla.device()`.") from e


# -- checkpoints and exports

def _export(original: Callable, self: Learner, *args: Any, **kwargs: Any) -> Any:
    "Export the learner from the CPU, so that the file can be read on every device; then move it back."
    if not _uses_xla(self): return original(self, *args, **kwargs)
    device = model_device(self.model, 'cpu')
    try:
        move(self, torch.device('cpu'))                          # `load_learner` moves the loaders itself
        return original(self, *args, **kwargs)
    finally: move(self, device)


def _load(original: Callable, self: Learner, file: Any, *args: Any, **kwargs: Any) -> Learner:
    "Call the `load` that this replaces, with the file on the CPU; the optimizer's state is moved afterwards."
    move(self, training_device(self))
    args = args[:isinstance(self, TextLearner)]                  # its `with_opt`; another learner's is the device
    original(self, file, *args, **{**kwargs, 'device': 'cpu'})
    _place_state(self.opt)
    return self


# CPU tensors, which every machine and `weights_only` loading can read.
convert_files(_uses_xla, torch.Tensor.cpu, _load)
wrap_method(TrainEvalCallback, 'before_fit', _before_fit)
wrap_method(Learner, 'export', _export)
