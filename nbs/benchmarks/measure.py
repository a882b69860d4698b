"Times contestants in turns, counts what they do, and turns both into plain records."
from __future__ import annotations

import math, os, platform, sys, time, warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastxtend_amp import precision_support

from .contestants import Contestant, Task, Train
from .models import MODELS

STEPS, BLOCK_SECONDS = 10, .4              # of a block, at most: large models get fewer steps in each
NOISY = .05                                # a ratio whose median is less certain than this part of it is marked
PACKAGES = ('fastai', 'fastcore', 'fastxtend_amp', 'lightning', 'lightning-fabric', 'accelerate')


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

    def __len__(self) -> int: return self.n + 1

    def __iter__(self) -> Iterator[tuple]:
        for i in range(len(self)):
            if i == 1: faults, start = _page_faults(), self._now()
            yield self.data[i % len(self.data)]
        self.ms = (self._now() - start) * 1000 / self.n
        self.faults = (_page_faults() - faults) / self.n

    def _now(self) -> float:
        if self.device.type != 'cpu': torch.accelerator.synchronize(self.device)
        return time.perf_counter()


def _page_faults() -> float:
    "Return how many pages of memory the system has given to this process so far; nan on Windows."
    try: import resource
    except ImportError: return math.nan
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


@dataclass
class Entry:
    "A contestant with one optimizer in one mode, and what was measured of it."
    contestant: Contestant
    opt: str
    mode: str
    train: Train | None = None                                   # None where it cannot run
    note: str = ''
    step: float = math.nan                                       # milliseconds of a step, to plan by
    ms: list[float] = field(default_factory=list)                # of a step, by round
    faults: list[float] = field(default_factory=list)            # page faults of a step, by round
    runs_in: str = '-'                                           # dtype of the first layer's output
    syncs: float = math.nan                                      # synchronizations per step; nan on the CPU


# -- counting

class _Count(TorchDispatchMode):
    "Counts reads of an accelerator's tensors: the host waits for each. Main memory is read without waiting."
    syncs = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.syncs += func is torch.ops.aten._local_scalar_dense.default and args[0].device.type != 'cpu'
        return func(*args, **(kwargs or {}))


def _syncs(train: Train) -> int:
    with _Count() as count: train()
    return count.syncs


def _runs_in(train: Train) -> str:
    "Train; return the dtype in which the first linear, convolution or LSTM layer gives its output."
    seen: list[str] = []
    def note(module, args, out):
        if isinstance(module, (nn.Linear, nn.Conv2d, nn.LSTM)):
            seen.append(str((out[0] if isinstance(out, tuple) else out).dtype).removeprefix('torch.'))
    hook = nn.modules.module.register_module_forward_hook(note)
    try: train()
    finally: hook.remove()
    return seen[0]


def _prepare(entry: Entry, task: Task) -> None:
    "Build a contestant, warm it up and count; where it fails, in any way, the table says how."
    batches: Any = task.batches
    try:
        batches.n = 1
        train = entry.contestant.build(task, entry.mode, entry.opt)
        entry.runs_in = _runs_in(train)
        train()
        entry.step = batches.ms
        if task.device.type != 'cpu':
            once, batches.n = _syncs(train), 3                   # what a fit counts beside its steps cancels
            entry.syncs = (_syncs(train) - once) / 2
        entry.train = train
    except Exception as e: entry.note = (str(e).strip() or type(e).__name__).splitlines()[0].partition('. ')[0][:110]


# -- timing

def measure(task: Task, entries: list[Entry], rounds: int) -> None:
    "Count, then time in rounds: each entry trains a block of steps in each round, and each round begins with another."
    for entry in entries: _prepare(entry, task)
    ready, batches = [e for e in entries if e.train], task.batches
    for k in range(rounds if ready else 0):
        first = k % len(ready)
        for entry in ready[first:] + ready[:first]:
            batches.n = min(STEPS, max(1, int(BLOCK_SECONDS * 1000 / entry.step)))
            entry.train()
            entry.ms.append(batches.ms)
            entry.faults.append(batches.faults)


# -- records

def quartiles(values: Iterable[float]) -> list[float] | None:
    "Return the quartiles, the median among them; None if there are no values."
    values = list(values)
    return [round(float(q), 4) for q in np.quantile(values, (.25, .5, .75))] if values else None


def notch(quartiles: Sequence[float], blocks: int) -> float:
    """Return half of the median's 95% interval, as notches of box plots show it: 1.57 (q3 - q1) / sqrt(n).

    Source: McGill, Tukey and Larsen, Variations of Box Plots, The American Statistician 32 (1978).
    """
    return 1.57 * (quartiles[2] - quartiles[0]) / math.sqrt(blocks)


def noisy(quartiles: Sequence[float], blocks: int) -> bool:
    "Return whether the median is uncertain by more than `NOISY` either way, or comes from a single block."
    return blocks < 2 or notch(quartiles, blocks) > NOISY * quartiles[1]


def _median(values: list[float]) -> float | None:
    return round(float(np.median(values)), 4) if values and not math.isnan(values[0]) else None


def _speedups(entry: Entry, base: Entry | None) -> list[float]: # By round
    return [b / a for a, b in zip(entry.ms, base.ms)] if base else []


def records(entries: list[Entry], model: str) -> list[dict[str, Any]]:
    "Return a plain record for each: medians, and quartiles of the ratios of blocks in the same round."
    plain = {(e.mode, e.opt): e for e in entries if e.contestant.name == 'plain loop'}
    bases = {(e.contestant.framework, e.opt): e for e in entries if e.mode == 'fp32'}
    def record(e):
        base, beside, low = bases.get((e.contestant.framework, e.opt)), plain.get((e.mode, e.opt)), e.mode != 'fp32'
        speedups, plains = _speedups(e, base) if low else [], []
        # fastai's own can stay in fp32, where the plain loop does not.
        if beside and beside is not e and beside.runs_in == e.runs_in: plains = _speedups(beside, plain['fp32', e.opt])
        note = 'never leaves fp32 here' if low and e.runs_in == 'float32' else e.note
        return dict(model=model, contestant=e.contestant.name, optimizer=e.opt, mode=e.mode, runs_in=e.runs_in,
                    blocks=len(e.ms), ms=_median(e.ms), vs_fp32=quartiles(speedups),
                    vs_plain_loop=quartiles(a / b for a, b in zip(speedups, plains)),
                    syncs=_median([e.syncs - base.syncs]) if base else None, page_faults=_median(e.faults), note=note)
    return [record(e) for e in entries]


def machine(device: torch.device) -> dict[str, Any]:
    "Return what the figures depend on: processor, threads, load, device, versions."
    info = Path('/proc/cpuinfo')
    lines = info.read_text(errors='replace').splitlines() if info.exists() else []
    names = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
    load = ' '.join(f'{x:.1f}' for x in os.getloadavg()) if hasattr(os, 'getloadavg') else None
    gpu = dict(gpu=torch.cuda.get_device_name(device), cuda=torch.version.cuda) if device.type == 'cuda' else {}
    def version(name):
        try: return metadata.version(name)
        except metadata.PackageNotFoundError: return None
    return dict(system=platform.platform(), cpu=(names or [platform.processor() or platform.machine()])[0],
                cores=os.cpu_count(), threads=torch.get_num_threads(), load_average=load,
                capability=torch.backends.cpu.get_cpu_capability(), device=str(device), **gpu,
                python=platform.python_version(), torch=torch.__version__, **{name: version(name) for name in PACKAGES})


def bench(
    models: Sequence[str], # Names from `MODELS`
    modes: Sequence[str], # Beside fp32
    device: torch.device,
    rounds: int, # Blocks of each contestant
    contestants: Sequence[Contestant],
    optimizers: Sequence[str],
) -> dict[str, Any]: # Plain values, the input of `tables` and `plot`
    "Measure contestants on each model, in one process, in turns."
    support = {r.precision: [r.support, r.why] for r in precision_support(device).itertuples() if r.precision in modes}
    out: dict[str, Any] = dict(machine=machine(device), support=support, models=[], rows=[])
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')                          # the report says what is emulated
        for name in models:
            print(name, file=sys.stderr, flush=True)
            model, measured = MODELS[name](device.type != 'cpu'), [
                Entry(c, opt, mode) for mode in ('fp32', *modes) for c in contestants if mode in c.modes
                for opt in c.optimizers if opt in optimizers]
            data, size = [model.batch(device) for _ in range(2)], sum(p.numel() for p in model.net().parameters())
            measure(Task(partial(model.build, device), Batches(device, data), device), measured, rounds)
            out['models'].append(dict(name=name, what=model.title, batch_size=len(data[0][0]), parameters=size))
            out['rows'] += records(measured, name)
    return out
