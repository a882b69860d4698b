"The ways to train that the benchmark compares. One more way is one more line in `CONTESTANTS`."
from __future__ import annotations

import importlib.util, math, time
from collections.abc import Callable, Iterator
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

from fastxtend_amp import fused, kahan

LR, LOSS = 1e-4, CrossEntropyLossFlat()
SCALE = 1024.                              # loss scale in fp16: low enough that no step is skipped
DTYPES = {'fp32': torch.float32, 'bf16': torch.bfloat16, 'fp16': torch.float16}
OPTIMIZERS: dict[str, Callable] = {'Adam': lambda: Adam, 'fused AdamW': lambda: fused(torch.optim.AdamW),
                                   'Kahan AdamW': lambda: kahan('AdamW')}


def page_faults() -> float: # Minor page faults of this process; not a number on Windows
    "Return how many pages of memory the system has given to this process so far."
    try: import resource
    except ImportError: return math.nan
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Batches:
    """A data loader that gives one batch to warm up and `n` timed ones.

    It leaves the milliseconds and page faults of a timed step in `ms` and `faults`. All contestants on a model draw
    from the same one, so that the same part of a step is timed in each.
    """
    def __init__(self,
        device: torch.device,
        data: list[tuple], # Batches, given in turn
    ):
        self.device, self.data, self.n = device, data, 1
        self.at_end: Callable[[], Any] = noop                    # called after the last step, inside the fit

    def __len__(self) -> int: return self.n + 1
    def to(self, device: torch.device) -> Batches: return self

    def _now(self) -> float:
        if self.device.type != 'cpu': torch.accelerator.synchronize(self.device)
        return time.perf_counter()

    def __iter__(self) -> Iterator[tuple]:
        for i in range(len(self)):
            if i == 1: faults, start = page_faults(), self._now()
            yield self.data[i % len(self.data)]
        self.ms = (self._now() - start) * 1000 / self.n
        self.faults = (page_faults() - faults) / self.n
        self.at_end()


class Task(NamedTuple):
    "What all contestants on one model share."
    model: Callable[[], nn.Module]         # builds the network, always from the same seed
    batches: Batches
    device: torch.device


class Run(NamedTuple):
    "A contestant that is ready to train."
    train: Callable[[], Any]               # trains on `task.batches`
    model: nn.Module
    optimizer: Callable[[], Any]           # returns the optimizer, once it has trained


class Unavailable(Exception): "This contestant cannot run here; the message says why."


# -- fastai's loop: each block of steps is a fit

class _NoValidation(Callback):
    def before_validate(self): raise CancelValidException


def learner(task: Task, opt: str, model: nn.Module | None = None) -> Learner:
    "Return a silent learner without validation; one `fit(1)` trains on as many batches as there are."
    learn = Learner(DataLoaders(task.batches, task.batches, device=task.device), model or task.model(), loss_func=LOSS,
                    opt_func=OPTIMIZERS[opt](), lr=LR, cbs=_NoValidation())
    learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, ProgressCallback)])
    learn.logger = noop
    return learn


def _fastai(task: Task, mode: str, opt: str, prepare: Callable[[Learner, str], Any]) -> Run:
    learn = learner(task, opt)
    prepare(learn, mode)
    return Run(lambda: learn.fit(1), learn.model, lambda: learn.opt)


def _ours(learn: Learner, mode: str) -> None: learn.to_fp16(init_scale=SCALE) if mode == 'fp16' else learn.to_bf16()


def _fastais_own(learn: Learner, mode: str) -> None:
    learn.add_cb(fp16.MixedPrecision(mode, **({'init_scale': SCALE} if mode == 'fp16' else {})))


def _half_weights(learn: Learner, mode: str, **kwargs: Any) -> None:
    learn.to_half_weights(mode, loss_scale=SCALE if mode == 'fp16' else None, **kwargs)


# -- plain loops

def _fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def _fastais_adam(task: Task, model: nn.Module) -> Any: # With a learner's exemptions from weight decay
    learn = learner(task, 'Adam', model)
    learn.create_opt()
    return learn.opt


def _plain_loop(task: Task, mode: str, opt: str) -> Run:
    "The loop that PyTorch's documentation shows."
    model, low = task.model(), mode != 'fp32'
    optimizer = _fastais_adam(task, model) if opt == 'Adam' else _fused_adamw(model)
    scaler = torch.amp.GradScaler(task.device.type, enabled=mode == 'fp16', init_scale=SCALE)
    def train():
        model.train()
        for xb, yb in task.batches:
            with torch.autocast(task.device.type, dtype=DTYPES[mode] if low else None, enabled=low):
                pred = model(xb)
                loss = LOSS(pred.float() if low else pred, yb)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return Run(train, model, lambda: optimizer)


def _framework_loop(task: Task, setup: Callable[..., Any], backward: Callable) -> Run:
    "The loop that Fabric's and Accelerate's documentation show."
    model = task.model()
    original = _fused_adamw(model)
    wrapped, optimizer = setup(model, original)
    def train():
        wrapped.train()
        for xb, yb in task.batches:
            backward(LOSS(wrapped(xb), yb))
            optimizer.step()
            optimizer.zero_grad()
    return Run(train, model, lambda: original)


def _fabric(task: Task, mode: str, opt: str) -> Run:
    from lightning_fabric import Fabric
    on_cuda, precision = task.device.type == 'cuda', '32-true' if mode == 'fp32' else f'{mode.removeprefix("fp")}-mixed'
    how: dict[str, Any] = dict(precision=precision)
    if mode == 'fp16' and on_cuda:
        from lightning_fabric.plugins.precision import MixedPrecision as Plugin
        how = dict(plugins=[Plugin('16-mixed', 'cuda', torch.amp.GradScaler('cuda', init_scale=SCALE))])
    fabric = Fabric(accelerator=task.device.type, devices=[task.device.index or 0] if on_cuda else 1, **how)
    taken = fabric.strategy.precision.precision
    if taken != precision: raise Unavailable(f'Fabric takes {taken} instead')
    return _framework_loop(task, fabric.setup, fabric.backward)


def _accelerate(task: Task, mode: str, opt: str) -> Run:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import GradScalerKwargs
    AcceleratorState._reset_state(True)    # it allows one precision in a process
    accelerator = Accelerator(cpu=task.device.type == 'cpu', mixed_precision='no' if mode == 'fp32' else mode,
                              kwargs_handlers=[GradScalerKwargs(init_scale=SCALE)])
    kind = task.device.type
    if accelerator.device.type != kind: raise Unavailable(f'Accelerate takes {accelerator.device}')
    if mode == 'fp16' and accelerator.scaler is None: raise Unavailable(f'Accelerate does not scale the loss on {kind}')
    return _framework_loop(task, accelerator.prepare, accelerator.backward)


# -- the list

class Contestant(NamedTuple):
    "A way to train. Its ratios are to the fp32 run of the same framework and optimizer."
    name: str
    framework: str
    build: Callable[..., Run]              # takes task, mode, optimizer's name
    optimizers: tuple[str, ...] = ('Adam', 'fused AdamW')
    fp32: bool = False                     # it runs in fp32
    low: bool = True                       # it runs in bf16 and fp16
    module: str | None = None              # left out where this is not installed
    default: bool = True                   # it runs unless others are named


def _with(prepare: Callable, **kwargs: Any) -> Callable[..., Run]:
    return partial(_fastai, prepare=partial(prepare, **kwargs))


CONTESTANTS = [
    Contestant('plain loop', 'plain loop', _plain_loop, fp32=True),
    Contestant('fastai loop', 'fastai', _with(noop), fp32=True, low=False),
    Contestant("fastai's own", 'fastai', _with(_fastais_own)),
    Contestant('fastxtend_amp', 'fastai', _with(_ours)),
    Contestant('Fabric', 'Fabric', _fabric, ('fused AdamW',), fp32=True, module='lightning_fabric'),
    Contestant('Accelerate', 'Accelerate', _accelerate, ('fused AdamW',), fp32=True, module='accelerate'),
    Contestant('to_half_weights', 'fastai', _with(_half_weights), default=False),
    Contestant('to_half_weights, flat', 'fastai', _with(_half_weights, flat_master=True), ('Adam',), default=False),
    Contestant('to_half_weights, no masters', 'fastai', _with(_half_weights, master_weights=False), ('Kahan AdamW',),
               module='optimi', default=False),
]


def installed(c: Contestant) -> bool: return c.module is None or importlib.util.find_spec(c.module) is not None
