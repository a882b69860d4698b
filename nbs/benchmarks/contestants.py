"The ways to train that the benchmark compares. One more way is one more line in `CONTESTANTS`."
from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from fastai.callback import fp16
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam
from fastcore.basics import noop
from torch import nn

from fastxtend_amp import fused
from fastxtend_amp.insight.choices import CHANNELS_LAST

LR, LOSS = 1e-4, CrossEntropyLossFlat()
TUNE_SECONDS, TUNE_BATCHES = 60., 8         # for `fastxtend_amp, tuned`, before it is timed
SCALE = 1024.                              # loss scale in fp16: low enough that no step is skipped
DTYPES = {'bf16': torch.bfloat16, 'fp16': torch.float16}
ADAM, FUSED = 'Adam', 'fused AdamW'        # fastai's own, and torch's


class Task(NamedTuple):
    "What all contestants on one model share."
    model: Callable[[], nn.Module]         # builds the network, the same each time
    batches: Iterable[tuple]               # a data loader
    device: torch.device


Train = Callable[[], Any]                  # trains on `task.batches`; a contestant builds one of task, mode, optimizer


# -- fastai's loop: each block of steps is a fit

def learner(task: Task, opt: str, model: nn.Module | None = None) -> Learner:
    "Return a silent learner without validation; one `fit(1)` trains on as many batches as there are."
    learn = Learner(DataLoaders(task.batches, []), model or task.model(), loss_func=LOSS, lr=LR,
                    opt_func=Adam if opt == ADAM else fused(torch.optim.AdamW))
    learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, ProgressCallback)])
    learn.logger = noop
    return learn


def _fastai(task: Task, mode: str, opt: str, prepare: Callable[[Learner, str], Any] = noop) -> Train:
    learn = learner(task, opt)
    prepare(learn, mode)
    return partial(learn.fit, 1)


def _ours(learn: Learner, mode: str) -> None: learn.to_fp16(init_scale=SCALE) if mode == 'fp16' else learn.to_bf16()


def _tuned(learn: Learner, mode: str) -> None:
    "Measure which kinds of modules to keep in fp32, on batches like those that are timed; nothing else is chosen."
    batches = learn.dls.train
    timed, batches.n = batches.n, TUNE_BATCHES
    _ours(learn, mode)
    found = learn.compare_precision(mode, n_seeds=0, max_seconds=TUNE_SECONDS)
    rows = [name for name, choice in found.choices.items()
            if choice.precision.name == mode and CHANNELS_LAST not in choice.changes]
    found.apply(learn, max(rows, key=lambda name: found.table['speed-up'][name]))
    batches.n = timed


def _fastais_own(learn: Learner, mode: str) -> None:
    learn.add_cb(fp16.MixedPrecision(mode, **({'init_scale': SCALE} if mode == 'fp16' else {})))


# -- plain loops

def _optimizer(task: Task, model: nn.Module, opt: str = FUSED) -> Any:
    if opt == FUSED: return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    learn = learner(task, opt, model)      # with a learner's exemptions from weight decay
    learn.create_opt()
    return learn.opt


def _plain_loop(task: Task, mode: str, opt: str) -> Train:
    "The loop that PyTorch's documentation shows."
    model, low = task.model(), mode != 'fp32'
    optimizer = _optimizer(task, model, opt)
    scaler = torch.amp.GradScaler(task.device.type, enabled=mode == 'fp16', init_scale=SCALE)
    def train():
        model.train()
        for xb, yb in task.batches:
            with torch.autocast(task.device.type, dtype=DTYPES.get(mode), enabled=low):
                pred = model(xb)
                loss = LOSS(pred.float() if low else pred, yb)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return train


def _framework_loop(task: Task, setup: Callable[..., Any], backward: Callable) -> Train:
    "The loop that Fabric's and Accelerate's documentation show. In fp16 both begin with a loss scale of 65,536."
    model = task.model()
    model, optimizer = setup(model, _optimizer(task, model))
    def train():
        model.train()
        for xb, yb in task.batches:
            backward(LOSS(model(xb), yb))
            optimizer.step()
            optimizer.zero_grad()
    return train


def _fabric(task: Task, mode: str, opt: str) -> Train:
    from lightning_fabric import Fabric
    precision = {'fp32': '32-true', 'bf16': 'bf16-mixed', 'fp16': '16-mixed'}[mode]
    fabric = Fabric(accelerator=task.device.type, devices=1, precision=precision)
    return _framework_loop(task, fabric.setup, fabric.backward)


def _accelerate(task: Task, mode: str, opt: str) -> Train:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    AcceleratorState._reset_state(True)    # it allows one precision in a process
    accelerator = Accelerator(cpu=task.device.type == 'cpu', mixed_precision='no' if mode == 'fp32' else mode)
    return _framework_loop(task, accelerator.prepare, accelerator.backward)


# -- the list

class Contestant(NamedTuple):
    "A way to train. Its ratios are to the fp32 run of the same framework and optimizer."
    name: str
    framework: str
    build: Callable[..., Train]            # of task, mode, optimizer; raises if it cannot run or is not installed
    modes: tuple[str, ...] = ('fp32', 'bf16', 'fp16')
    optimizers: tuple[str, ...] = (ADAM, FUSED)


LOW = ('bf16', 'fp16')
CONTESTANTS = [
    Contestant('plain loop', 'plain loop', _plain_loop),
    Contestant('fastai loop', 'fastai', _fastai, ('fp32',)),
    Contestant("fastai's own", 'fastai', partial(_fastai, prepare=_fastais_own), LOW),
    Contestant('fastxtend_amp', 'fastai', partial(_fastai, prepare=_ours), LOW),
    Contestant('fastxtend_amp, tuned', 'fastai', partial(_fastai, prepare=_tuned), LOW),
    Contestant('Fabric', 'Fabric', _fabric, optimizers=(FUSED,)),
    Contestant('Accelerate', 'Accelerate', _accelerate, optimizers=(FUSED,)),
]
