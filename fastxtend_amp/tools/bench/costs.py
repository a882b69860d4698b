"What the callback costs: its own time, calls to unscale, bytes for each parameter, operations for each micro-batch."
from __future__ import annotations

import contextlib, time, warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from fastai.callback import fp16
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastai.optimizer import Adam, OptimWrapper
from torch import nn

from ...callback import MixedPrecision
from ...half_weights import HalfWeights, bytes_per_parameter, kahan
from ...mode import AMPMode, mode_support
from .clock import Clock
from .contestants import OPTIMIZERS, Task, fastai_loop, importable, quiet_learner
from .measuring import SCALE, ModelBenchmark, count_ops
from .models import mlp
from .records import quartiles

__all__ = ['accumulation', 'callback_times', 'memory', 'unscaling']

_IN_BATCH = ('batch', 'pred', 'loss', 'backward', 'step')        # what the names of a batch's events end with


# -- the callback's own time

def _timed(cls: type, spent: list[float]) -> type:
    "`cls`, a precision callback, that adds the seconds spent in its events inside a batch to `spent[0]`."
    class Timed(cls):
        name = 'mixed_precision'
        def __call__(self, event_name):
            start = time.perf_counter()
            try: return super().__call__(event_name)
            finally:
                if event_name.endswith(_IN_BATCH): spent[0] += time.perf_counter() - start
    return Timed


@contextlib.contextmanager
def _fastai_on(device: torch.device) -> Iterator[None]:
    "Inside, fastai's own callback, which names CUDA, runs autocast on `device`."
    def autocast(_, **kwargs): return torch.autocast(device.type, **kwargs)
    def scaler(_=None, **kwargs): return torch.amp.GradScaler(device.type, **kwargs)
    before = fp16.autocast, fp16.GradScaler
    fp16.autocast, fp16.GradScaler = autocast, scaler
    try: yield
    finally: fp16.autocast, fp16.GradScaler = before


def callback_times(
    modes: Sequence[AMPMode],
    device: torch.device,
    steps: int = 80, # In a block
    repeats: int = 9, # Blocks
) -> list[dict[str, Any]]: # A record for each mode; microseconds per step
    """Time spent in the callback's events, and the whole step with it, beside fastai's own callback and fp32.

    On the tiny MLP with one thread, where little else is to be done. The whole step holds what the callback does
    outside its events, too.
    """
    task, threads = ModelBenchmark('tiny', [], device).task, torch.get_num_threads()
    modes = [m for m in modes if mode_support(m, device).status != 'unsupported']
    torch.set_num_threads(1)
    try:
        with _fastai_on(device), warnings.catch_warnings():
            warnings.simplefilter('ignore')
            ways = [_Way(task, kind, mode) for mode in modes for kind in _KINDS]
            for i in range(-1, repeats):                         # the ways take turns; the first block is not counted
                for way in ways[i:] + ways[:i]: way.block(steps, counts=i >= 0)
    finally: torch.set_num_threads(threads)
    by_mode = [{way.kind: way for way in ways if way.mode is mode} for mode in modes]
    return [_callback_record(by_kind['fp32'], by_kind['ours'], by_kind['fastai']) for by_kind in by_mode]


_KINDS: dict[str, Any] = {'fp32': None, 'ours': MixedPrecision, 'fastai': fp16.MixedPrecision}


class _Way:
    "A learner with one of the callbacks or none, and the microseconds per step that were measured of it, by block."
    def __init__(self, task: Task, kind: str, mode: AMPMode):
        self.task, self.kind, self.mode = task, kind, mode
        self.events: list[float] = []
        self.steps: list[float] = []
        self.spent = [0.]
        cls = _KINDS[kind]
        cb = _timed(cls, self.spent) if cls else None
        self.run = fastai_loop(task, mode if cb else None, 'Adam', SCALE, cb)

    def block(self, steps: int, counts: bool) -> None:
        self.task.clock.n, self.task.clock.warm, self.spent[0] = steps, 0, 0.
        self.run.steps()
        if not counts: return
        self.events.append(self.spent[0] / steps * 1e6)
        # A median leaves out the steps that were interrupted.
        self.steps.append(float(np.median(self.task.clock.steps()[:, 0])) * 1e3)


def _callback_record(fp32: _Way, ours: _Way, fastai: _Way) -> dict[str, Any]:
    return dict(mode=ours.mode.value, ours_us=float(np.median(ours.events)), fastai_us=float(np.median(fastai.events)),
                ratio=_ratios(ours.events, fastai.events), step_ratio=_ratios(ours.steps, fastai.steps),
                step_us={way.kind: float(np.median(way.steps)) for way in (fp32, ours, fastai)})


def _ratios(ours: list[float], theirs: list[float]) -> list[float] | None:
    return quartiles(a / b for a, b in zip(ours, theirs))


# -- unscaling

class _Scalars(nn.Module):
    "A network of `n` parameters of one element."
    def __init__(self, n: int):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(n))
    def forward(self, x): return x[:, :10] + torch.cat([*self.weights]).mean()


class _UnscaleCounter(MixedPrecision):
    "Counts the operations of its `before_step`, which unscales, in the second step, and times it in the others."
    name = 'mixed_precision'
    def __init__(self):
        super().__init__(AMPMode.FP16, init_scale=SCALE)
        self.ops, self.ms = [], []
    def before_step(self):
        if self.train_iter == 1:
            self.ops.append(count_ops(super().before_step).total())
            return
        start = time.perf_counter()
        super().before_step()
        self.ms.append((time.perf_counter() - start) * 1000)


def unscaling(
    device: torch.device,
    sizes: Sequence[int] = (10, 100, 1000, 10000), # Numbers of parameter tensors
    repeats: int = 5,
) -> list[dict[str, Any]]: # parameters, aten_calls, host_ms
    "Calls and host milliseconds to unscale so many gradients of one element, with fastai's Adam."
    rows = []
    for n in sizes:
        task = _mlp_task(device, partial(_Scalars, n))
        task.clock.n = repeats + 2
        cb = _UnscaleCounter()
        quiet_learner(task, Adam).add_cb(cb).fit(1)
        rows.append(dict(parameters=n, aten_calls=cb.ops[0], host_ms=float(np.median(cb.ms[1:]))))
    return rows


# -- memory and accumulation

def _mlp_task(device: torch.device, net: Callable[[], nn.Module] = partial(mlp, 256, 2)) -> Task:
    def model():
        torch.manual_seed(0)
        return net().to(device)
    batch = torch.randn(16, 256, device=device), torch.zeros(16, dtype=torch.long, device=device)
    return Task(model, Clock(device, [batch]), device)


def _ways(mode: AMPMode) -> dict[str, list[Callback]]:
    "The ways to train that hold their weights in different ways, by name, with the callbacks for it."
    return {'fp32': [], f'autocast ({mode.value})': [MixedPrecision(mode)], 'to_half_weights': [HalfWeights(mode)],
            'to_half_weights, flat': [HalfWeights(mode, flat_master=True)]}


def memory(
    device: torch.device,
    mode: AMPMode = AMPMode.BF16,
) -> list[dict[str, Any]]: # training, bytes by what they are for; empty where `mode` does not run
    "Bytes that training holds for each parameter of an MLP, by what they are for, counted in the second step."
    if mode_support(mode, device).status == 'unsupported': return []
    task = _mlp_task(device)
    class Count(Callback):
        order = 11                                               # when this package's callback has taken the step
        def __init__(self, found): self.found = found
        def after_step(self): self.found.update(bytes_per_parameter(self.learn))
    def count_bytes(name, cbs, opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)):
        found: dict[str, Any] = dict(training=name)
        task.clock.n = 2
        quiet_learner(task, opt_func).add_cbs([*cbs, Count(found)]).fit(1)
        return found
    rows = [count_bytes(name, cbs) for name, cbs in _ways(mode).items()]
    def no_masters(): return [HalfWeights(mode, master_weights=False)]
    rows.append(count_bytes('to_half_weights, no masters', no_masters()))
    if importable('optimi'):
        rows.append(count_bytes('to_half_weights, no masters, Kahan', no_masters(), kahan('AdamW')))
    return rows


def accumulation(
    device: torch.device,
    mode: AMPMode = AMPMode.BF16,
    micro_batches: tuple[int, int] = (4, 8), # For each step
) -> list[dict[str, Any]]: # training, ops by number of micro-batches, ops_per_micro_batch; empty as in `memory`
    """Aten operations per step with gradient accumulation, counted on an MLP with fused AdamW.

    autocast casts the weights in each micro-batch; with `to_half_weights(cast_once=True)` it does so once a step.
    """
    if mode_support(mode, device).status == 'unsupported': return []
    few, many = micro_batches
    rows = []
    ways = {'fp32': [], f'autocast ({mode.value})': [MixedPrecision(mode)],
            'to_half_weights, cast_once': [HalfWeights(mode, cast_once=True)]}
    for name, cbs in ways.items():
        ops = {str(k): _ops_per_step(device, cbs, k) for k in micro_batches}
        more = (ops[str(many)] - ops[str(few)]) / (many - few)
        rows.append(dict(training=name, ops=ops, ops_per_micro_batch=more))
    return rows


def _ops_per_step(device: torch.device, cbs: list[Callback], n_micro_batches: int) -> int:
    task = _mlp_task(device)
    samples = len(task.clock.data[0][0]) * n_micro_batches
    learn = quiet_learner(task, OPTIMIZERS['fused AdamW']).add_cbs([*cbs, GradientAccumulation(samples)])
    def fit(steps):
        task.clock.n = steps * n_micro_batches
        learn.fit(1)
    fit(1)
    once, twice = count_ops(lambda: fit(1)), count_ops(lambda: fit(2))   # what a fit costs beside its steps cancels
    learn.remove_cbs(cbs)
    return twice.total() - once.total()
