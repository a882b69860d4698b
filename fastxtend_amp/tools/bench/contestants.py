"The ways to train that the benchmark compares. Each builder returns what trains on the clock's batches."
from __future__ import annotations

import importlib, importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from fastai.callback import fp16
from fastai.callback.core import Callback, CancelValidException
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam
from fastcore.basics import noop
from torch import nn

from ...callback import MixedPrecision
from ...half_weights import HalfWeights
from ...mode import AMPMode
from ...optimizers import fused
from .clock import Clock

__all__ = ['CONTESTANTS', 'CONTESTANT_NAMES', 'LOSS', 'OPTIMIZERS', 'Contestant', 'FastaisOwn', 'Run', 'Task',
           'Unavailable', 'check_contestants', 'fastai_loop', 'importable', 'quiet_learner']

LR = 1e-4
LOSS = CrossEntropyLossFlat()
OPTIMIZERS = {'Adam': Adam, 'fused AdamW': fused(torch.optim.AdamW)}


class Task(NamedTuple):
    "What all contestants on one model share."
    model: Callable[[], nn.Module]         # builds the network, always from the same seed
    clock: Clock
    device: torch.device


class Run(NamedTuple):
    "A contestant that is ready to train."
    steps: Callable[[], Any]               # train on `task.clock`
    model: nn.Module
    skipped: Callable[[], int] | None = None  # steps skipped so far
    learn: Learner | None = None


class Unavailable(Exception): "This contestant cannot run here; the message says why."


# -- fastai's loop

class _NoValidation(Callback):
    def before_validate(self): raise CancelValidException


class _BeforeBackward(Callback):
    order = 1000                           # the last to hear of it: right before the backward pass
    def __init__(self, clock): self.clock = clock
    def before_backward(self): self.clock.mark()


class _AfterBackward(Callback):
    order = -1000                          # the first to hear of it
    def __init__(self, clock): self.clock = clock
    def after_backward(self): self.clock.mark()


class FastaisOwn(fp16.MixedPrecision):
    "Counts the steps that it skips, by `CancelStepException`; a callback more would take time in each step."
    n_skipped = 0
    def after_cancel_step(self): self.n_skipped += 1


def quiet_learner(
    task: Task,
    opt_func: Callable,
    model: nn.Module | None = None, # A new one if None
) -> Learner: # Without progress bar, epoch table and validation
    "A learner whose training data are the clock's batches; one `fit(1)` trains on as many as the clock gives out."
    dls = DataLoaders(task.clock, task.clock, device=task.device)
    model = task.model() if model is None else model
    learn = Learner(dls, model, loss_func=LOSS, opt_func=opt_func, lr=LR, cbs=_NoValidation())
    learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, ProgressCallback)])
    learn.logger = noop
    return learn


def fastai_loop(
    task: Task,
    mode: AMPMode | None, # None: fp32
    opt: str, # A name from `OPTIMIZERS`
    scale: float | str, # Loss scale to start with, in fp16
    cb: Any = MixedPrecision, # The precision callback: this package's or fastai's own
) -> Run:
    "A fastai learner; each block of steps is a fit."
    learn = quiet_learner(task, OPTIMIZERS[opt]).add_cbs([_BeforeBackward(task.clock), _AfterBackward(task.clock)])
    if mode is None: return Run(lambda: learn.fit(1), learn.model, None, learn)
    precision = cb(mode.value, **({'init_scale': scale} if mode is AMPMode.FP16 else {}))
    learn.add_cb(precision)
    return Run(lambda: learn.fit(1), learn.model, lambda: precision.n_skipped, learn)


def _half_weights(task: Task, mode: AMPMode, opt: str, scale: float, flat: bool = False) -> Run:
    "A fastai learner with half-precision weights and fp32 masters; the loss scale is static."
    loss_scale = scale if mode is AMPMode.FP16 else None
    learn = quiet_learner(task, OPTIMIZERS[opt]).add_cbs([_BeforeBackward(task.clock), _AfterBackward(task.clock)])
    learn.add_cb(HalfWeights(mode, loss_scale=loss_scale, flat_master=flat))
    return Run(lambda: learn.fit(1), learn.model, None, learn)


# -- plain loops

def _fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def _fastai_optimizer(task: Task, model: nn.Module) -> Any:
    "The optimizer that a learner creates, with its exemptions from weight decay."
    learn = quiet_learner(task, Adam, model)
    learn.create_opt()
    learn.opt.set_hypers(wd=learn.opt.hypers[0]['wd'])
    return learn.opt


def _steps_taken(optimizer: Any) -> int:
    "How many steps an Adam has taken, read from its state: skipped ones are not in it."
    return max((int(state['step']) for state in optimizer.state.values() if 'step' in state), default=0)


def _plain_loop(task: Task, mode: AMPMode | None, opt: str, scale: float) -> Run:
    "The loop that PyTorch's documentation shows."
    model, n_batches = task.model(), 0
    optimizer = _fastai_optimizer(task, model) if opt == 'Adam' else _fused_adamw(model)
    scaler = torch.amp.GradScaler(task.device.type, enabled=mode is AMPMode.FP16, init_scale=scale)
    dtype = mode.dtype if mode else None
    def steps():
        nonlocal n_batches
        model.train()
        for xb, yb in task.clock:
            with torch.autocast(task.device.type, dtype=dtype, enabled=mode is not None):
                pred = model(xb)
                loss = LOSS(pred.float() if mode else pred, yb)
            loss = scaler.scale(loss)
            task.clock.backward(loss.backward)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        n_batches += len(task.clock)
    return Run(steps, model, lambda: n_batches - _steps_taken(optimizer))


def _framework_loop(task: Task, model: nn.Module, prepared: tuple, backward: Callable) -> Run:
    "The loop that Fabric's and Accelerate's documentation show, on the network and optimizer that they `prepared`."
    wrapped, optimizer = prepared
    def steps():
        wrapped.train()
        for xb, yb in task.clock:
            loss = LOSS(wrapped(xb), yb)
            task.clock.backward(partial(backward, loss))
            optimizer.step()
            optimizer.zero_grad()
    return Run(steps, model)


def _fabric(task: Task, mode: AMPMode | None, opt: str, scale: float) -> Run:
    "Lightning Fabric."
    from lightning_fabric import Fabric
    on_cuda = task.device.type == 'cuda'
    precision: Any = f'{mode.value.removeprefix("fp")}-mixed' if mode else '32-true'
    how: dict[str, Any] = dict(precision=precision)
    if mode is AMPMode.FP16 and on_cuda:
        from lightning_fabric.plugins.precision import MixedPrecision as Plugin
        how = dict(plugins=[Plugin('16-mixed', 'cuda', torch.amp.GradScaler('cuda', init_scale=scale))])
    fabric = Fabric(accelerator=task.device.type, devices=[task.device.index or 0] if on_cuda else 1, **how)
    taken = fabric.strategy.precision.precision
    if taken != precision: raise Unavailable(f'Fabric takes {taken} instead')
    model = task.model()
    return _framework_loop(task, model, fabric.setup(model, _fused_adamw(model)), fabric.backward)


def _accelerate(task: Task, mode: AMPMode | None, opt: str, scale: float) -> Run:
    "Hugging Face Accelerate."
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import GradScalerKwargs
    AcceleratorState._reset_state(True)    # it allows one precision in a process
    accelerator = Accelerator(cpu=task.device.type == 'cpu', mixed_precision=mode.value if mode else 'no',
                              kwargs_handlers=[GradScalerKwargs(init_scale=scale)])
    kind = task.device.type
    if accelerator.device.type != kind: raise Unavailable(f'Accelerate takes {accelerator.device}')
    if mode is AMPMode.FP16 and accelerator.scaler is None:
        raise Unavailable(f'Accelerate does not scale the loss on {kind}')
    model = task.model()
    return _framework_loop(task, model, accelerator.prepare(model, _fused_adamw(model)), accelerator.backward)


# -- the list

class Contestant(NamedTuple):
    "A way to train. Its ratios are to the fp32 run of the same `framework` and `opt`."
    name: str
    build: Callable[..., Run]              # takes task, mode (None for fp32), opt, scale
    framework: str
    opt: str
    module: str | None = None              # left out where this cannot be imported
    fp32: bool = True                      # whether it runs fp32, too


def _with_both(name: str, build: Callable[..., Run], framework: str, fp32: bool = True) -> list[Contestant]:
    return [Contestant(name, build, framework, opt, fp32=fp32) for opt in OPTIMIZERS]


# One more way to train is one more line. The fp32 run of a framework comes before those that are compared with it.
CONTESTANTS = [
    *_with_both('plain loop', _plain_loop, 'plain loop'),
    *_with_both('fastxtend_amp', fastai_loop, 'fastai'),
    *_with_both('to_half_weights', _half_weights, 'fastai', fp32=False),
    Contestant('to_half_weights, flat', partial(_half_weights, flat=True), 'fastai', 'Adam', fp32=False),
    *_with_both("fastai's own", partial(fastai_loop, cb=FastaisOwn), 'fastai', fp32=False),
    Contestant('Fabric', _fabric, 'Fabric', 'fused AdamW', 'lightning_fabric'),
    Contestant('Accelerate', _accelerate, 'Accelerate', 'fused AdamW', 'accelerate'),
]


# As the report calls them: fastai's loop without a precision callback runs in fp32 alone.
CONTESTANT_NAMES = ['fastai loop', *dict.fromkeys(c.name for c in CONTESTANTS)]


def check_contestants(
    names: Sequence[str], # Some of `CONTESTANT_NAMES`
) -> None:
    "Raise a `ValueError` that says which of these cannot be measured here."
    if isinstance(names, str) or not names:
        raise ValueError(f'contestants={names!r} cannot be used: give a list of names, such as {CONTESTANT_NAMES[:2]}.')
    for name in names:
        if name not in CONTESTANT_NAMES:
            raise ValueError(f"contestants: there is no {name!r}; there are {', '.join(map(repr, CONTESTANT_NAMES))}.")
        module = next((c.module for c in CONTESTANTS if c.name == name), None)
        if module and not importable(module):
            raise ValueError(f'contestants: {name!r} needs {module}, which is not here. Install it or leave it out.')


def importable(name: str) -> bool:
    "Whether a package is there and imports."
    try: return importlib.util.find_spec(name) is not None and importlib.import_module(name) is not None
    except ImportError: return False
