"What does low precision cost and gain here, beside fp32, fastai's own callback, a hand-written loop, and the peers?"
from __future__ import annotations

import argparse, contextlib, importlib, importlib.util, json, math, os, platform, sys, time, warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from fastai.callback import fp16
from fastai.callback.core import Callback, CancelValidException
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import Adam, OptimWrapper
from fastcore.basics import noop
from fastprogress.fastprogress import progress_bar
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ...callback import MixedPrecision
from ...half_weights.callback import HalfWeights, bytes_per_parameter, kahan
from ...mode import AMPMode, Support, cpu_features, autocast_available, mode_support
from ...scaling import DEFAULTS, LossScaling

BLOCK = .4              # seconds that a block of steps may take: big models get fewer steps in each
BUDGET = 20             # seconds for the timed blocks of all contestants of one mode on one model; for an emulated mode it is strict
NOISY = .1              # a ratio whose quartiles lie further apart than this part of it tells nothing
SCALE = 1024.           # loss scale of the timed steps: low enough that none is skipped
SETTLE = 2.**20         # loss scale to start from when skipped steps are counted, so that there are some
SETTLE_STEPS = 24
LR = 1e-4
SLOW = 300              # milliseconds; of a longer step fewer are counted


# -- models

class Encoder(nn.Module):
    "A transformer encoder over tokens, shape (n, length), with a classifier on the mean."
    def __init__(self, vocab, d, heads, layers):
        super().__init__()
        self.emb, self.head = nn.Embedding(vocab, d), nn.Linear(d, 10)
        layer = nn.TransformerEncoderLayer(d, heads, 4 * d, dropout=0., batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    def forward(self, x): return self.head(self.layers(self.emb(x)).mean(1))


class LanguageModel(nn.Module):
    "Two LSTM layers over tokens, shape (n, length), that predict the next one."
    def __init__(self, vocab, d):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, d), nn.LSTM(d, d, 2, batch_first=True), nn.Linear(d, vocab)
    def forward(self, x): return self.head(self.rnn(self.emb(x))[0])


def _mlp(width, depth):
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())), nn.Linear(width, 10))


class Model(NamedTuple):
    "A network to train, and the batches for it."
    build: Callable[[bool], tuple[nn.Module, int, Callable]]      # told whether the device is an accelerator: network, batch size, inputs for n
    channels_last: bool = False


def _xresnet(big):
    from fastai.vision.models.xresnet import xresnet18
    return xresnet18(n_out=10), 256 if big else 16, lambda n: torch.randn(n, 3, 64, 64)


def _transformer(big):
    vocab, d, layers, length = (8000, 1024, 8, 256) if big else (1000, 256, 3, 64)
    return Encoder(vocab, d, d // 64, layers), 64 if big else 16, lambda n: torch.randint(vocab, (n, length))


def _lstm(big):
    vocab, d, length = (8000, 1024, 70) if big else (1000, 256, 32)
    return LanguageModel(vocab, d), 64 if big else 16, lambda n: torch.randint(vocab, (n, length))


def _dense(width, depth, bs, big_depth=None):
    return lambda big: (_mlp(width, big_depth if big and big_depth else depth), bs, lambda n: torch.randn(n, width))


# Weights of 64 MB: blocks over 32 MB glibc gives back and asks for anew in each step, whatever else the process holds; smaller ones
# only where a process trains a single model, as a user's does and this one does not.
def _wide(bs): return _dense(4096, 1, bs, big_depth=4)


MODELS = {
    'xresnet18': Model(_xresnet), 'xresnet18-cl': Model(_xresnet, channels_last=True), 'transformer': Model(_transformer), 'lstm': Model(_lstm),
    'wide-64': Model(_wide(64)), 'wide-256': Model(_wide(256)), 'wide-1024': Model(_wide(1024)),
    'deep': Model(_dense(64, 32, 64)), 'tiny': Model(_dense(32, 1, 16)),
}
_WHAT = {
    'xresnet18': 'fastai xresnet18 at 64x64', 'xresnet18-cl': 'the same, channels last', 'transformer': 'transformer encoder',
    'lstm': 'LSTM language model', 'wide-64': 'wide MLP, batch 64', 'wide-256': 'wide MLP, batch 256', 'wide-1024': 'wide MLP, batch 1024',
    'deep': 'deep narrow MLP (32 layers of 64)', 'tiny': 'tiny MLP (the overhead)',
}


def _page_faults() -> float:
    "How often this process was given a page of memory since it began; not a number where the system does not tell."
    try: import resource
    except ImportError: return math.nan                          # Windows
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Clock:
    """Gives out `warm` and `n` batches and takes the time of the latter: at each batch, before and after each backward pass, and at the end.

    Every contestant draws its batches here, so that the same stretch is timed in all of them; CUDA is timed by events.
    """
    def __init__(self, device: torch.device, batches: list[tuple]):
        self.device, self.data, self.n, self.warm = device, batches, 0, 0
        self.marks: list[Any] = []                               # seconds, or CUDA events
        self.faults = math.nan                                   # page faults per step
    def __len__(self): return self.warm + self.n
    def to(self, device): return self

    def mark(self) -> None:
        if self.device.type == 'cuda':
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else: self.marks.append(time.perf_counter())

    def __iter__(self) -> Iterator[tuple]:
        for i in range(self.warm + self.n):
            if i <= self.warm: self.marks, faults = [], _page_faults()
            self.mark()
            yield self.data[i % len(self.data)]
        self.mark()
        self.faults = (_page_faults() - faults) / self.n

    def backward(self, f: Callable) -> None:
        self.mark(); f(); self.mark()

    def times(self) -> np.ndarray:
        "Milliseconds per step: all of it, forward, backward."
        m = self.marks
        if self.device.type == 'cuda':
            torch.cuda.synchronize(self.device)
            ms = lambda a, b: a.elapsed_time(b)
        else: ms = lambda a, b: (b - a) * 1000
        parts = [(ms(m[i], m[i + 1]), ms(m[i + 1], m[i + 2])) for i in range(0, len(m) - 1, 3)]
        return np.array([ms(m[0], m[-1]), *np.sum(parts, 0)]) / self.n


class Task(NamedTuple):
    "What all contestants on one model share."
    model: Callable[[], nn.Module]     # a new one, from the same seed
    clock: Clock
    device: torch.device


# -- contestants: each builder returns the function that trains for as many steps as the clock gives out

class Run(NamedTuple):
    "One contestant, ready to train."
    steps: Callable[[], Any]           # train on `task.clock`
    model: nn.Module
    skipped: Callable[[], int] | None = None   # steps skipped so far
    learn: Learner | None = None


LOSS = CrossEntropyLossFlat()
FUSED = partial(torch.optim.AdamW, fused=True)
OPTIMIZERS = {'Adam': Adam, 'fused AdamW': partial(OptimWrapper, opt=FUSED)}


def _learner(task, opt_func, model=None, clock=None):
    class Quiet(Callback):
        def before_validate(self): raise CancelValidException
    dls = DataLoaders(clock or task.clock, clock or task.clock, device=task.device)
    learn = Learner(dls, task.model() if model is None else model, loss_func=LOSS, opt_func=opt_func, lr=LR, cbs=Quiet())
    learn.remove_cbs([cb for cb in learn.cbs if isinstance(cb, ProgressCallback)])
    learn.logger = noop
    return learn


def _fastai(task: Task, mode: AMPMode | None, opt: str, scale: float, cb: Callable = MixedPrecision) -> Run:
    "A fastai learner; each block of steps is a fit."
    learn = _learner(task, OPTIMIZERS[opt])
    own = cb is not MixedPrecision                               # fastai's own
    if mode is not None: learn.add_cb(cb(mode.value, **({'init_scale': scale} if mode is AMPMode.FP16 else {})))
    backward, step = learn._backward, learn._step
    counts: Counter[str] = Counter()
    def count_batch(): counts['batch'] += 1; task.clock.backward(backward)
    def count_step(): counts['step'] += 1; step()
    learn._backward = count_batch
    if own: learn._step = count_step
    skipped = (lambda: counts['batch'] - counts['step']) if own else (lambda: learn.mixed_precision.n_skipped)
    return Run(lambda: learn.fit(1), learn.model, skipped if mode else None, learn)


def _half(task: Task, mode: AMPMode, opt: str, scale: float, flat: bool = False) -> Run:
    "A fastai learner with half-precision weights and fp32 masters; the loss scale is static."
    learn = _learner(task, OPTIMIZERS[opt])
    learn.add_cb(HalfWeights(mode, scale if mode is AMPMode.FP16 else None, flat))
    backward = learn._backward
    learn._backward = lambda: task.clock.backward(backward)
    return Run(lambda: learn.fit(1), learn.model, None, learn)


def _by_hand(task: Task, mode: AMPMode | None, opt: str, scale: float) -> Run:
    "The loop that PyTorch's documentation shows."
    model = task.model()
    if opt == 'Adam':                                            # with the learner's exemptions from weight decay
        learn = _learner(task, Adam, model); learn.create_opt(); learn.opt.set_hypers(wd=learn.opt.hypers[0]['wd'])
        optimizer = learn.opt
    else: optimizer = FUSED(model.parameters(), lr=LR)
    scaler, scales = torch.amp.GradScaler(task.device.type, enabled=mode is AMPMode.FP16, init_scale=scale), []
    context = partial(torch.autocast, task.device.type, dtype=mode.dtype if mode else None, enabled=mode is not None)
    def steps():
        model.train()
        for xb, yb in task.clock:
            with context():
                pred = model(xb)
                loss = LOSS(pred.float() if mode else pred, yb)
            loss = scaler.scale(loss)
            task.clock.backward(loss.backward)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if watch: scales.append(scaler.get_scale())
    watch = scale == SETTLE
    skipped = lambda: sum(b < a for a, b in zip([scale, *scales], scales))
    return Run(steps, model, skipped if mode is AMPMode.FP16 else None)


class Unavailable(Exception): "This contestant cannot run here; the message says why."


def _loop(task, model, ready, backward) -> Run:
    "The loop that Fabric's and Accelerate's documentation show, on the `ready` network and optimizer."
    wrapped, optimizer = ready
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
    precision: Any = f'{mode.value.removeprefix("fp")}-mixed' if mode else '32-true'
    plugins = []
    if mode is AMPMode.FP16 and task.device.type == 'cuda':
        from lightning_fabric.plugins.precision import MixedPrecision as Plugin
        plugins, precision = [Plugin('16-mixed', task.device.type, torch.amp.GradScaler(task.device.type, init_scale=scale))], None
    fabric = Fabric(accelerator=task.device.type, devices=[task.device.index or 0] if task.device.type == 'cuda' else 1, precision=precision, plugins=plugins)
    if precision and fabric._precision.precision != precision: raise Unavailable(f'Fabric takes {fabric._precision.precision} instead')
    model = task.model()
    return _loop(task, model, fabric.setup(model, FUSED(model.parameters(), lr=LR)), fabric.backward)


def _accelerate(task: Task, mode: AMPMode | None, opt: str, scale: float) -> Run:
    "Hugging Face Accelerate."
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import GradScalerKwargs
    AcceleratorState._reset_state(True)                          # it allows one precision in a process, and settles it when it prepares
    accelerator = Accelerator(cpu=task.device.type == 'cpu', mixed_precision=mode.value if mode else 'no', kwargs_handlers=[GradScalerKwargs(init_scale=scale)])
    if accelerator.device.type != task.device.type: raise Unavailable(f'Accelerate takes {accelerator.device}')
    if mode is AMPMode.FP16 and accelerator.scaler is None: raise Unavailable(f'Accelerate does not scale the loss on {task.device.type}')
    model = task.model()
    return _loop(task, model, accelerator.prepare(model, FUSED(model.parameters(), lr=LR)), accelerator.backward)


class Contestant(NamedTuple):
    "A way to train. Its ratios are to the fp32 run of the same `framework` and `opt`."
    name: str
    build: Callable[..., Run]          # takes task, mode (None for fp32), opt, scale
    framework: str
    opt: str
    module: str | None = None          # left out where this cannot be imported
    fp32: bool = True                  # does it run fp32, too?


# A further way to train is one more line here; the fp32 run of a framework comes before those compared with it.
CONTESTANTS = [
    Contestant('by hand', _by_hand, 'by hand', 'Adam'),
    Contestant('by hand', _by_hand, 'by hand', 'fused AdamW'),
    Contestant('fastxtend_amp', _fastai, 'fastai', 'Adam'),
    Contestant('fastxtend_amp', _fastai, 'fastai', 'fused AdamW'),
    *(Contestant(name, partial(_half, flat=flat), 'fastai', opt, fp32=False)
      for name, flat in (('to_half_weights', False), ('to_half_weights, flat', True)) for opt in ('Adam', 'fused AdamW')),
    Contestant("fastai's own", partial(_fastai, cb=fp16.MixedPrecision), 'fastai', 'Adam', fp32=False),
    Contestant("fastai's own", partial(_fastai, cb=fp16.MixedPrecision), 'fastai', 'fused AdamW', fp32=False),
    Contestant('Fabric', _fabric, 'Fabric', 'fused AdamW', 'lightning_fabric'),
    Contestant('Accelerate', _accelerate, 'Accelerate', 'fused AdamW', 'accelerate'),
]


def _importable(name):
    try: return importlib.util.find_spec(name) is not None and importlib.import_module(name) is not None
    except ImportError: return False


# -- measuring

@dataclass
class Row:
    "One contestant on one model in one mode: what runs, and what was measured."
    contestant: Contestant
    mode: AMPMode | None
    run: Run | None = None
    note: str = ''
    ms: float = math.nan          # of the second step, to plan by
    blocks: dict[int, np.ndarray] = field(default_factory=dict)   # by round: milliseconds of step, forward, backward
    runs_in: str = '-'
    syncs: float = math.nan
    ops: float = math.nan
    peak: float = math.nan
    faults: dict[int, float] = field(default_factory=dict)        # by round: page faults per step
    skips: tuple[int, int] | None = None

    @property
    def key(self): return self.contestant.framework, self.contestant.opt


def _ops(f):
    with profile(activities=[ProfilerActivity.CPU]) as p: f()
    return Counter(e.name for e in p.events() if e.name.startswith('aten::'))


def _first_dtype(model, f):
    "The dtype of the first matrix product's output while `f` runs."
    seen = []
    def hook(m, i, o): seen.append(str((o[0] if isinstance(o, tuple) else o).dtype).removeprefix('torch.'))
    hooks = [m.register_forward_hook(hook) for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d, nn.LSTM))]
    try: f()
    finally:
        for h in hooks: h.remove()
    return seen[0] if seen else '-'


def _reason(e): return (str(e) or type(e).__name__).strip().splitlines()[0].partition('. ')[0][:110]


class Match:
    "All contestants on one model."
    def __init__(self, name: str, modes: Sequence[AMPMode], device: torch.device):
        spec = MODELS[name]
        torch.manual_seed(0)
        net, self.bs, inputs = spec.build(device.type != 'cpu')
        self.name, self.device, self.format = name, device, 'channels last' if spec.channels_last else 'contiguous'
        like = dict(memory_format=torch.channels_last) if spec.channels_last else {}
        def model():
            torch.manual_seed(0)
            return spec.build(device.type != 'cpu')[0].to(device, **like)
        def batch():
            x = inputs(self.bs)
            y = x.roll(-1, 1) if name == 'lstm' else torch.randint(10, (self.bs,))
            return x.to(device, **like) if x.is_floating_point() else x.to(device), y.to(device)
        self.n_params = sum(p.numel() for p in net.parameters())
        self.task = Task(model, Clock(device, [batch() for _ in range(2)]), device)
        self.support = {m: mode_support(m, device) if m else Support('native', 'fp32') for m in (None, *modes)}
        self.rows = [Row(c, m) for m in (None, *modes) for c in CONTESTANTS
                     if (m or c.fp32) and (c.module is None or _importable(c.module))]

    def _emulated(self, mode): return self.support[mode].status == 'emulated'

    def block(self, row: Row, n: int, warm: int = 0) -> np.ndarray: # Milliseconds per step: all, forward, backward
        "Train `row`'s contestant, which was built, for `n` steps after `warm` ones that do not count: a fit's first step builds what the others use."
        assert row.run is not None
        self.task.clock.n, self.task.clock.warm = n, warm
        row.run.steps()
        return self.task.clock.times()

    def _seconds_in(self, mode):
        "About how long a step takes in an emulated mode, by parts of a batch that grow while they are quick; a reason instead if it does not run."
        model, (xb, yb) = self.task.model(), self.task.clock.data[0]
        for part in (16, 4, 1):
            n = max(2, len(xb) // part)
            start = time.perf_counter()
            try:
                with torch.autocast(self.device.type, dtype=mode.dtype): loss = LOSS(model(xb[:n]).float(), yb[:n])
                loss.backward()
            except RuntimeError as e: return _reason(e)
            seconds = time.perf_counter() - start
            if seconds > 1: break
        return seconds * self.bs / n

    def prepare(self) -> Iterator[Row]:
        "Build each contestant, warm it up, and count; yields after each."
        for mode in self.support:
            rows = [r for r in self.rows if r.mode is mode]
            why, brief, all_of_them = '', False, True
            if self.support[mode].status == 'unsupported': why = self.support[mode].why
            elif self._emulated(mode):
                seconds = self._seconds_in(mode)
                if isinstance(seconds, str): why = seconds
                elif seconds * len(rows) > BUDGET / 4:
                    why, brief = f'left out: emulated here, a step takes about {seconds:.0f} s', seconds < BUDGET / 2
                    all_of_them = seconds * len(rows) < BUDGET
            for row in rows:
                row.note = why
                if not why or (brief and (all_of_them or row.contestant.opt == 'Adam')): self._prepare(row, brief)
                yield row

    def _prepare(self, row, brief=False):
        "With `brief` the second step is all that is measured: the first one builds the optimizer's state."
        try:
            cuda = self.device.type == 'cuda'
            before = torch.cuda.memory_allocated(self.device) if cuda else 0
            row.run, first = row.contestant.build(self.task, row.mode, row.contestant.opt, SCALE), []
            row.runs_in = _first_dtype(row.run.model, lambda: first.append(self.block(row, 1, warm=int(brief))))
            if brief: row.blocks[0], row.faults[0], row.note = first[0], self.task.clock.faults, 'its second step, no more: emulated'; return
            row.ms = self.block(row, 1)[0]
            n = 1 if row.ms > SLOW else 2
            if cuda:
                own, start = torch.cuda.memory_allocated(self.device) - before, torch.cuda.memory_allocated(self.device)
                torch.cuda.reset_peak_memory_stats(self.device)
            # What a fit costs beside its steps is in both and cancels.
            once, more = _ops(lambda: self.block(row, 1)), _ops(lambda: self.block(row, 1 + n))
            if cuda: row.peak = own + torch.cuda.max_memory_allocated(self.device) - start
            row.ops = (more.total() - once.total()) / n
            row.syncs = (more['aten::_local_scalar_dense'] - once['aten::_local_scalar_dense']) / n
        except Exception as e: row.run, row.note = None, _reason(e)   # a peer may fail in any way; the table says how

    def plan(self, steps: int, repeats: int) -> list[tuple[int, Row, int]]: # Round, contestant, steps
        "Who trains when: in rounds, each begun by the next contestant; emulated modes leave when their time is up."
        ready = [r for r in self.rows if r.run is not None and not r.blocks]
        if not ready: return []
        n = {id(r): min(steps, max(1, int(BLOCK * 1000 / r.ms))) for r in ready}
        rounds = {}
        for mode in self.support:
            mine = [r for r in ready if r.mode is mode]
            fits = int(BUDGET * 1000 / max(sum(r.ms * (n[id(r)] + 1) for r in mine), 1e-9))
            for row in mine: rounds[id(row)] = min(repeats, max(1 if self._emulated(mode) else 3, fits))
        turns = [(k, row, n[id(row)]) for k in range(repeats) for row in ready[k % len(ready):] + ready[:k % len(ready)] if k < rounds[id(row)]]
        for row in ready:
            if rounds[id(row)] < repeats: row.note = f'{rounds[id(row)]} of {repeats} blocks'
        return turns

    def play(self, turn: tuple[int, Row, int]) -> None:
        k, row, n = turn
        if row.run is None: return
        try: row.blocks[k], row.faults[k] = self.block(row, n, warm=1), self.task.clock.faults
        except Exception as e: row.run, row.note = None, _reason(e)

    def settle(self, row: Row) -> None:
        "Count the steps skipped until the loss scale settles, in one fit and in two."
        ms = np.median([b[0] for b in row.blocks.values()]) if row.blocks else math.inf
        if row.mode is not AMPMode.FP16 or row.run is None or row.run.skipped is None or ms * 2 * SETTLE_STEPS > BUDGET * 250: return
        if row.runs_in != 'float16' or row.note.startswith('its second'): return
        fresh = row.contestant.build(self.task, row.mode, row.contestant.opt, SETTLE)
        def skipped():
            self.task.clock.n, self.task.clock.warm = SETTLE_STEPS, 0
            fresh.steps()
            return fresh.skipped()
        row.skips = skipped(), skipped()

    def release(self) -> None:
        "Let go of the networks."
        for row in self.rows: row.run = None

    # -- what came out

    def _find(self, framework, opt, mode):
        return next((r for r in self.rows if r.mode is mode and r.contestant.name == framework and r.contestant.opt == opt), None)

    def _speedups(self, row, part=slice(0, 1)):
        "How many times faster than the same framework's fp32, round by round."
        base = next((r for r in self.rows if r.mode is None and r.key == row.key), None)
        if base is None: return {}
        return {k: base.blocks[k][part].sum() / b[part].sum() for k, b in row.blocks.items() if k in base.blocks}

    def records(self) -> list[dict]:
        "A plain record for each contestant."
        return [self._record(r) for r in self.rows]

    def _record(self, row):
        c, mode = row.contestant, row.mode
        base = next((r for r in self.rows if r.mode is None and r.key == row.key), None)
        hand, hand32 = self._find('by hand', c.opt, mode), self._find('by hand', c.opt, None)
        speed, both = self._speedups(row), self._speedups(row, slice(1, 3))
        by_hand = self._speedups(hand) if hand else {}
        ms = np.array(list(row.blocks.values())).reshape(-1, 3)
        med = lambda x: float(np.median(x)) if len(x) else None
        num = lambda x: None if x != x else x
        quart = lambda d: [float(q) for q in np.quantile(list(d.values()), (.25, .5, .75))] if d else None
        auto = self._find('fastxtend_amp', c.opt, mode) if c.name.startswith('to_half_weights') else None
        over = {k: auto.blocks[k][0] / b[0] for k, b in row.blocks.items() if k in auto.blocks} if auto else {}
        relative = {k: speed[k] / by_hand[k] for k in speed if k in by_hand} if hand and hand.runs_in == row.runs_in else {}
        extra = lambda what: (getattr(row, what) - getattr(base, what)) if base is not None else math.nan
        beyond = lambda: extra('ops') - (hand.ops - hand32.ops) if hand and hand32 and hand.runs_in == row.runs_in else math.nan
        out = dict(model=self.name, contestant=c.name if mode or c.framework != 'fastai' else 'fastai loop', framework=c.framework, optimizer=c.opt,
                   mode=mode.value if mode else 'fp32', support=self.support[mode].status if mode else 'native', runs_in=row.runs_in,
                   ms=med(ms[:, 0]), forward_ms=med(ms[:, 1]), backward_ms=med(ms[:, 2]), blocks=len(ms),
                   vs_fp32=quart(speed) if mode else None, forward_backward_vs_fp32=quart(both) if mode else None,
                   vs_by_hand=quart(relative) if mode and c.name != 'by hand' else None, vs_autocast=quart(over),
                   host_syncs=num(row.syncs), host_syncs_beyond_fp32=num(extra('syncs')), aten_ops=num(row.ops), aten_ops_beyond_by_hand=num(beyond()),
                   page_faults=num(med([*row.faults.values()])) if row.faults else None, peak_mb=num(row.peak / 2**20),
                   skipped_one_fit=row.skips and row.skips[0], skipped_two_fits=row.skips and row.skips[1], note=row.note)
        if mode and row.runs_in == 'float32' and row.blocks: out['note'] = f'never leaves fp32 on {self.device.type}'
        return {**out, 'noisy': [k for k in ('vs_fp32', 'vs_by_hand', 'vs_autocast', 'forward_backward_vs_fp32') if noisy(out[k])]}


def noisy(quartiles: Sequence[float] | None) -> bool:
    "Do the quartiles lie further apart than `NOISY` times the median, or does one block not tell?"
    return quartiles is not None and (quartiles[2] - quartiles[0] > NOISY * quartiles[1] or quartiles[0] == quartiles[2])


# -- the callback's own time, and unscaling

class Meter:
    "Adds up the time spent in some functions but not in others that they call, lap by lap."
    def __init__(self): self.total, self.on, self.last, self.laps = 0., False, 0., []
    def _switch(self, on):
        now = time.perf_counter()
        if self.on: self.total += now - self.last
        before, self.on, self.last = self.on, on, now
        return before
    def wrap(self, f, on):
        def inner(*args, **kwargs):
            before = self._switch(on)
            try: return f(*args, **kwargs)
            finally: self._switch(before)
        return inner
    def lap(self, f):
        def inner(): self.laps.append(self.total); f()
        return inner


@contextlib.contextmanager
def _fastai_on(device):
    "fastai's callback names CUDA; for its time it is pointed at `device`."
    before = fp16.autocast, fp16.GradScaler
    fp16.autocast, fp16.GradScaler = (lambda d, **k: torch.autocast(device.type, **k)), (lambda d, **k: torch.amp.GradScaler(device.type, **k))
    try: yield
    finally: fp16.autocast, fp16.GradScaler = before


def event_times(modes: Sequence[AMPMode], device: torch.device, steps: int = 80, repeats: int = 9) -> list[dict]:
    "Median microseconds per step in the callback's events and in what it wraps the loop in, ours and fastai's, on the tiny MLP with one thread."
    task, meters, runs, threads = Match('tiny', [], device).task, {}, {}, torch.get_num_threads()

    def timed(cls, meter):
        class Timed(cls):
            __call__ = meter.wrap(cls.__call__, True)            # a plain function, so it binds
            name = 'mixed_precision'
        return Timed

    def watch_guard(learn, meter):
        guard = learn.mixed_precision._guard
        for name in guard._names:
            guard.inner[name] = meter.wrap(getattr(type(learn), name).__get__(learn), False)
            learn.__dict__[name] = meter.wrap(getattr(guard, name), True)
    class Watch(Callback):
        order = 50
        def before_train(self): watch_guard(self.learn, self.meter)
        def after_train(self):
            for name in self.mixed_precision._guard._names:      # as the guard left them, so that it can take itself off
                self.mixed_precision._guard.inner[name] = None
                self.learn.__dict__[name] = getattr(self.mixed_precision._guard, name)

    torch.set_num_threads(1)
    try:
        with _fastai_on(device), warnings.catch_warnings():
            warnings.simplefilter('ignore')
            for mode in modes:
                if mode_support(mode, device).status == 'unsupported': continue
                for name, cls in (('fastxtend_amp', MixedPrecision), ("fastai's own", fp16.MixedPrecision)):
                    meter = meters[mode, name] = Meter()
                    run = runs[mode, name] = _fastai(task, mode, 'Adam', SCALE, timed(cls, meter) if name == "fastai's own" else MixedPrecision)
                    learn: Any = run.learn
                    if name == 'fastxtend_amp':
                        learn.mixed_precision.__class__ = timed(MixedPrecision, meter)
                        watch = Watch(); watch.meter = meter
                        learn.add_cb(watch)
                    learn._backward = meter.lap(learn._backward)
                    task.clock.n = 5
                    run.steps()
            order = list(runs)
            found: dict[Any, list[float]] = {k: [] for k in runs}
            for i in range(repeats):
                for key in order[i % len(order):] + order[:i % len(order)]:
                    meters[key].laps, task.clock.n = [], steps
                    runs[key].steps()
                    found[key].append(np.median(np.diff(meters[key].laps)) * 1e6)   # a median sheds the steps that were interrupted
    finally: torch.set_num_threads(threads)
    rows = []
    for mode in dict.fromkeys(m for m, _ in runs):
        ours, theirs = np.array(found[mode, 'fastxtend_amp']), np.array(found[mode, "fastai's own"])
        rows.append(dict(mode=mode.value, ours_us=float(np.median(ours)), fastai_us=float(np.median(theirs)),
                         ratio=[float(q) for q in np.quantile(ours / theirs, (.25, .5, .75))]))
    return rows


def unscaling(device: torch.device, sizes: Sequence[int] = (10, 100, 1000, 10000), repeats: int = 5) -> list[dict]:
    "Aten calls and host milliseconds to unscale the gradients of so many parameter tensors, of one element each."
    def one(n):
        params = [nn.Parameter(torch.zeros(1, device=device)) for _ in range(n)]
        for p in params: p.grad = torch.ones(1, device=device)
        opt, scaling, times = Adam(params, lr=LR), LossScaling(**{**DEFAULTS, 'init_scale': SCALE}, enabled=True), []
        scaling.start(device.type, True)
        for _ in range(repeats + 1):
            scaling.scale(torch.ones(1, device=device))
            start = time.perf_counter()
            scaling.unscale(opt)
            times.append((time.perf_counter() - start) * 1000)
            scaling.update()
        scaling.scale(torch.ones(1, device=device))
        return dict(parameters=n, aten_calls=_ops(lambda: scaling.unscale(opt)).total(), host_ms=float(np.median(times[1:])))
    return [one(n) for n in sizes]


def memory(device: torch.device, mode: AMPMode = AMPMode.BF16) -> list[dict]:
    "Bytes that training holds for each parameter of an MLP, by what they are for, counted in the second step."
    if mode_support(mode, device).status == 'unsupported': return []
    def model():
        torch.manual_seed(0)
        return _mlp(256, 2).to(device)
    task = Task(model, Clock(device, [(torch.randn(16, 256, device=device), torch.zeros(16, dtype=torch.long, device=device))]), device)
    adamw = partial(OptimWrapper, opt=torch.optim.AdamW)
    def count_bytes(name, *cbs, opt_func=adamw):
        class Count(Callback):
            order = 11
            def after_step(self): found.update(bytes_per_parameter(self.learn))
        found: dict[str, Any] = dict(training=name)
        task.clock.n = 2
        _learner(task, opt_func).add_cbs([*cbs, Count()]).fit(1)
        return found
    rows = [count_bytes('fp32'), count_bytes(f'autocast ({mode.value})', MixedPrecision(mode)), count_bytes('to_half_weights', HalfWeights(mode)),
            count_bytes('to_half_weights, flat', HalfWeights(mode, flat_master=True)), count_bytes('to_half_weights, no masters', HalfWeights(mode, master_weights=False))]
    if _importable('optimi'): rows.append(count_bytes('to_half_weights, no masters, Kahan', HalfWeights(mode, master_weights=False), opt_func=kahan('AdamW')))
    return rows


# -- the whole

def _version(name):
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return None


def machine(device: torch.device) -> dict[str, Any]:
    "What the figures depend on."
    cpu = platform.processor() or platform.machine()
    info = Path('/proc/cpuinfo')
    if info.exists():
        cpu = next((l.partition(':')[2].strip() for l in info.read_text(errors='replace').splitlines() if l.startswith('model name')), cpu)
    load = ' '.join(f'{x:.1f}' for x in os.getloadavg()) if hasattr(os, 'getloadavg') else None
    out = dict(system=platform.platform(), cpu=cpu, cores=os.cpu_count(), threads=torch.get_num_threads(), load_average=load,
               instruction_sets=sorted(f for f in cpu_features() if f.startswith(('avx', 'amx', 'asimd', 'sve', 'bf16'))), device=str(device),
               python=platform.python_version(), torch=torch.__version__)
    if device.type == 'cuda': out['gpu'], out['cuda'], out['tf32'] = torch.cuda.get_device_name(device), torch.version.cuda, False
    names = ('fastai', 'fastcore', 'fastxtend_amp', 'lightning-fabric', 'accelerate')
    return {**out, **{n: _version(n) for n in names}}


@contextlib.contextmanager
def _no_tf32():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try: yield
    finally: torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def bench(
    models: Sequence[str] = tuple(MODELS), # Names from `MODELS`
    modes: Sequence[str | AMPMode] = ('bf16', 'fp16'), # Beside fp32
    device: str | torch.device | None = None, # CUDA if there is one, else the CPU
    steps: int = 10, # Steps in a block, at most: a block takes no more than about `BLOCK` seconds
    repeats: int = 9, # Blocks for each contestant
) -> dict[str, Any]: # Plain values: machine, settings, models, rows, events, unscaling
    "Time and count all contestants on `models`, in one process and interleaved."
    device, wanted = torch.device(device or ('cuda' if torch.cuda.is_available() else 'cpu')), [AMPMode(m) for m in modes]
    out: dict[str, Any] = dict(
        machine=machine(device), settings=dict(steps=steps, repeats=repeats, modes=[m.value for m in wanted], noisy_above=NOISY, scale=SCALE,
                                               settle_scale=SETTLE, settle_steps=SETTLE_STEPS),
        support={m.value: list(mode_support(m, device)) for m in wanted}, models=[], rows=[], events=[], unscaling=[], memory=[])
    with _no_tf32(), warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):   # the report alone goes to stdout
        warnings.simplefilter('ignore')                          # the table says what is emulated, and what never leaves fp32
        for name in models:
            match = Match(name, wanted, device)
            out['models'].append(dict(name=name, what=_WHAT.get(name, name), batch_size=match.bs, memory_format=match.format, parameters=match.n_params))
            print(f'\n{name}')
            for _ in progress_bar(match.prepare(), total=len(match.rows), leave=False): pass
            turns = match.plan(steps, repeats)
            for turn in progress_bar(turns, total=len(turns), leave=False): match.play(turn)
            for row in match.rows: match.settle(row)
            out['rows'] += match.records()
            match.release()
        if 'tiny' in models and wanted: out['events'] = event_times(wanted, device, repeats=max(3, repeats))
        if AMPMode.FP16 in wanted: out['unscaling'] = unscaling(device)
        if wanted: out['memory'] = memory(device)
    return out


# -- the report

def _ratio(q): return '' if q is None else f"{'~' if noisy(q) else ''}{q[1]:.2f} ({q[0]:.2f}-{q[2]:.2f})"
def _number(x, form): return '' if x is None or x != x else format(x, form)
def _indented(table): return '\n'.join('    ' + l.rstrip() for l in table.to_string(index=False).splitlines())


_PACKAGES = ('python', 'torch', 'cuda', 'fastai', 'fastcore', 'fastxtend_amp', 'lightning-fabric', 'accelerate')


def tables(result: dict[str, Any]) -> str:
    "What `bench` found, as text that is Markdown, too."
    m, s = result['machine'], result['settings']
    packages, threads = ', '.join(f'{k} {m[k]}' for k in _PACKAGES if m.get(k)), f"{m['threads']} thread{'s' * (m['threads'] != 1)}"
    lines = ['# fastxtend_amp benchmark', '', f"- Command: `{result.get('command', '')}`",
             f"- Machine: {m['cpu']}, {m['cores']} cores ({', '.join(m['instruction_sets'])}), {threads}, load average {m['load_average']}; {m['system']}",
             f"- Device: {m['device']}" + (f" ({m['gpu']}), TF32 off" if 'gpu' in m else ''), f'- Versions: {packages}']
    for mode, (status, why) in result['support'].items(): lines.append(f'- {mode}: {status} here ({why})')
    lines += ['', f"ms: median over up to {s['repeats']} blocks of steps, contestants taking turns. 'x fp32': times faster than fp32 in the same framework",
              "with the same optimizer, the median of paired blocks with its quartiles. 'x hand': that ratio over the hand-written loop's own, so that the",
              "loop's own cost cancels. 'x autocast': times faster than fastxtend_amp's autocast with the same optimizer. 'f+b x fp32': forward and",
              "backward alone. 'syncs': host syncs per step beyond fp32; 'faults': pages of memory that the system handed out per step; 'ops': aten",
              "operations per step; '+ops': those beyond the hand-written loop's.",
              f"'skips': steps skipped until a loss scale begun at {s['settle_scale']:,.0f} settles, in one fit and in two.",
              f"~: the quartiles lie further apart than {s['noisy_above']:.0%} of the median, or one block was all: too noisy to tell."]
    for model in result['models']:
        what = f"{model['what']}, batch size {model['batch_size']}, {model['memory_format']}, {model['parameters']:,} parameters"
        lines += ['', f"## {model['name']}: {what}", '']
        rows = [r for r in result['rows'] if r['model'] == model['name']]
        absent = {m: notes.pop() for m in s['modes'] if len(notes := {r['note'] for r in rows if r['mode'] == m and not r['blocks']}) == 1
                  and not any(r['blocks'] for r in rows if r['mode'] == m)}
        lines.append(_indented(pd.DataFrame([{
            'mode': r['mode'], 'contestant': r['contestant'], 'optimizer': r['optimizer'], 'runs in': r['runs_in'], 'ms': _number(r['ms'], ',.2f'),
            'forward': _number(r['forward_ms'], ',.2f'), 'backward': _number(r['backward_ms'], ',.2f'), 'x fp32': _ratio(r['vs_fp32']),
            'x hand': _ratio(r['vs_by_hand']), 'x autocast': _ratio(r['vs_autocast']),
            'f+b x fp32': _ratio(r['forward_backward_vs_fp32']), 'syncs': _number(r['host_syncs_beyond_fp32'], '.3g'),
            'ops': _number(r['aten_ops'], ',.4g'), '+ops': _number(r['aten_ops_beyond_by_hand'], '.4g'),
            **({'peak MB': _number(r['peak_mb'], ',.0f')} if 'gpu' in m else {'faults': _number(r['page_faults'], ',.0f')}),
            'skips': '' if r['skipped_one_fit'] is None else f"{r['skipped_one_fit']}, {r['skipped_two_fits']}", 'note': r['note']}
            for r in rows if r['mode'] not in absent])))
        lines += ['', *(f'{mode}: {note}.' for mode, note in absent.items())] if absent else []
        mine = [r for r in rows if r['vs_fp32'] and r['blocks'] > 1]
        bad = sum(noisy(r['vs_fp32']) for r in mine)
        if bad * 2 > len(mine) > 0: lines += ['', f'The machine was too noisy here to tell: {bad} of {len(mine)} ratios to fp32 are marked ~.']
    if result['events']:
        lines += ['', "## Time in the callback's events, and in what it wraps the loop in", '',
                  "Microseconds per step on the tiny MLP, one thread. For this comparison alone fastai's callback, which names CUDA, is pointed at",
                  'this device.', '']
        lines.append(_indented(pd.DataFrame([{'mode': r['mode'], 'fastxtend_amp': f"{r['ours_us']:.0f}", "fastai's own": f"{r['fastai_us']:.0f}",
                                              'ratio': _ratio(r['ratio'])} for r in result['events']])))
    if result['unscaling']:
        lines += ['', '## Unscaling', '', _indented(pd.DataFrame([{'parameter tensors': f"{r['parameters']:,}", 'aten calls': r['aten_calls'],
                                                                   'host ms': f"{r['host_ms']:.2f}"} for r in result['unscaling']]))]
    if result.get('memory'):
        lines += ['', '## Bytes for each parameter', '', 'AdamW, counted from the tensors there are after a step; the cast cache lives as long as a batch.', '',
                  _indented(pd.DataFrame([{k: v if isinstance(v, str) else f'{v:.1f}' for k, v in r.items()} for r in result['memory']]))]
    return '\n'.join(lines) + '\n'


_COLORS = {'by hand': '#4c566a', 'fastxtend_amp': '#2a78b8', 'to_half_weights': '#17a2a2', 'to_half_weights, flat': '#b8325e', "fastai's own": '#d1701f',
           'Fabric': '#5a9e4b', 'Accelerate': '#8a5aa8'}


def plot(result: dict[str, Any], file: str | Path) -> None:
    "Write a PNG to `file`: how many times faster than fp32 each contestant is on each model, with quartiles."
    from matplotlib.figure import Figure
    rows = [r for r in result['rows'] if r['vs_fp32']]
    names = [m['name'] for m in result['models'] if any(r['model'] == m['name'] for r in rows)] or [m['name'] for m in result['models']]
    modes = [m for m in result['settings']['modes'] if any(r['mode'] == m for r in rows)] or result['settings']['modes'][:1]
    kinds = list(dict.fromkeys((r['contestant'], r['optimizer']) for r in rows))
    figure = Figure(figsize=(13, max(2.5, 1 + (.065 * len(kinds) + .12) * len(names)) * max(1, len(modes))), layout='constrained')
    for axes, mode in zip(figure.subplots(max(1, len(modes)), 2, squeeze=False, sharey='row'), modes):
        for ax, key, title in zip(axes, ('vs_fp32', 'forward_backward_vs_fp32'), ('whole step', 'forward and backward')):
            for i, (kind, opt) in enumerate(kinds):
                mine = [r for r in rows if (r['contestant'], r['optimizer'], r['mode']) == (kind, opt, mode)]
                if not mine: continue
                q = np.array([r[key] for r in mine])
                y = [names.index(r['model']) + (i - (len(kinds) - 1) / 2) * .8 / len(kinds) for r in mine]
                ax.errorbar(q[:, 1], y, xerr=[q[:, 1] - q[:, 0], q[:, 2] - q[:, 1]], fmt='o' if opt == 'Adam' else 's', ms=4.5, lw=1, color=_COLORS.get(kind),
                            mfc=_COLORS.get(kind) if opt == 'Adam' else 'white', label=f'{kind}, {opt}')
            ax.axvline(1, color='k', lw=.8)
            for i in range(1, len(names)): ax.axhline(i - .5, color='#ddd', lw=.8)
            ax.set_xscale('log', base=2)
            ax.xaxis.set_major_formatter(lambda x, _: f'{x:g}')
            ax.set(title=f"{mode} ({result['support'][mode][0]}): {title}", xlabel='times faster than fp32 (median, quartiles)', yticks=range(len(names)),
                   yticklabels=names, ylim=(len(names) - .5, -.5))
            if (ax.get_xlim()[1] / ax.get_xlim()[0]) < 2: ax.set_xlim(.5, 2)
    handles, labels = max((ax.get_legend_handles_labels() for ax in figure.axes), key=lambda h: len(h[0]), default=([], []))
    if handles: figure.legend(handles, labels, loc='outside lower center', ncols=4)
    m = result['machine']
    missing = [x['name'] for x in result['models'] if x['name'] not in names]
    left_out = f"; no ratio for {', '.join(missing)}: see the table" if missing else ''
    figure.suptitle(f"{m.get('gpu', m['cpu'])}, {m['threads']} thread{'s' * (m['threads'] != 1)}, torch {m['torch']}{left_out}", fontsize=10)
    figure.savefig(file, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
    "The console script `fastxtend_amp_bench`."
    parser = argparse.ArgumentParser(prog='fastxtend_amp_bench', description=(
        "Time training steps in fp32, bf16 and fp16: this package, fastai's own callback, a hand-written loop, and Lightning Fabric and Accelerate "
        'where they are installed. The report goes to standard output, the progress to standard error.'))
    parser.add_argument('--device', metavar='D', help="torch device, such as 'cpu' or 'cuda:0' (default: CUDA if there is one)")
    parser.add_argument('--models', nargs='+', default=list(MODELS), metavar='M', help=f"which models (default: all): {', '.join(MODELS)}")
    parser.add_argument('--modes', nargs='+', default=['bf16', 'fp16'], metavar='M', help='which modes beside fp32 (default: bf16 fp16)')
    parser.add_argument('--steps', type=int, default=10, metavar='N', help='steps in a block, at most; big models get fewer (default %(default)s)')
    parser.add_argument('--repeats', type=int, default=9, metavar='N', help='blocks for each contestant (default %(default)s)')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write every figure to this file')
    parser.add_argument('--plot', type=Path, metavar='FILE', help='write a PNG of the ratios to fp32 to this file')
    args = parser.parse_args(argv)
    for name in ('steps', 'repeats'):
        if getattr(args, name) < 1: parser.error(f'--{name} {getattr(args, name)}: at least 1 is needed')
    for name in args.models:
        if name not in MODELS: parser.error(f"--models {name}: there is no such model; there are {', '.join(MODELS)}")
    try: modes = list(dict.fromkeys(AMPMode(m) for m in args.modes))
    except ValueError: parser.error(f"--modes {' '.join(args.modes)}: only bf16 and fp16 are modes; fp32 always runs")
    for name in ('json', 'plot'):
        file = getattr(args, name)
        if file is not None and not file.parent.is_dir(): parser.error(f'--{name} {file}: there is no folder {file.parent}')
    try: device = torch.device(args.device or ('cuda' if torch.cuda.is_available() else 'cpu')); torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as e: parser.error(f'--device {args.device}: {str(e).splitlines()[0]}')
    if not autocast_available(device.type): parser.error(f'--device {device}: PyTorch has no autocast for it; try cpu')
    result = bench(list(dict.fromkeys(args.models)), modes, device, args.steps, args.repeats)
    threads = os.environ.get('OMP_NUM_THREADS')
    result['command'] = ' '.join([*([f'OMP_NUM_THREADS={threads}'] if threads else []), 'fastxtend_amp_bench', *(sys.argv[1:] if argv is None else argv)])
    print(tables(result))
    if args.json: args.json.write_text(json.dumps(result, indent=1) + '\n', encoding='utf-8')
    if args.plot: plot(result, args.plot)
