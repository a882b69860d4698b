"Times contestants in turns, counts what they do, and turns both into plain records."
from __future__ import annotations

import contextlib, math, os, platform, sys, warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastxtend_amp import keep_freed_memory, precision_support
from fastxtend_amp import MixedPrecision

from .contestants import CONTESTANTS, Batches, Contestant, Run, Task, installed
from .models import MODELS

BLOCK_SECONDS = .4      # what a block of steps may take: large models get fewer steps in each
FEWEST_ROUNDS = 3
NOISY = .05             # a ratio whose median is less certain than this part of it is marked
PACKAGES = ('fastai', 'fastcore', 'fastxtend_amp', 'lightning-fabric', 'accelerate')


@dataclass
class Entry:
    "A contestant with one optimizer in one mode, and what was measured of it."
    contestant: Contestant
    opt: str
    mode: str
    run: Run | None = None                                       # None where it cannot run
    note: str = ''
    step: float = math.nan                                       # milliseconds of the second block's step, to plan by
    ms: list[float] = field(default_factory=list)                # of a step, by round
    faults: list[float] = field(default_factory=list)            # page faults of a step, by round
    runs_in: str = '-'                                           # dtype of the first layer's output
    syncs: float = math.nan                                      # reads of a tensor's value per step
    bytes: dict[str, float] = field(default_factory=dict)        # for each parameter, by what they are for


# -- counting

class Count(TorchDispatchMode):
    "Counts reads of a tensor's value, on a GPU synchronizations, and the bytes of parameters' casts to bf16 and fp16."
    syncs = casts = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.syncs += func is torch.ops.aten._local_scalar_dense.default
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter): self.casts += out.nbytes
        return out


def _bytes(run: Run, casts: float) -> dict[str, float]:
    "Return bytes for each parameter, in the middle of a fit: weights may have another dtype after it."
    weights, optimizer = [*run.model.parameters()], run.optimizer()
    state = [v for s in getattr(optimizer, 'opt', optimizer).state.values() for v in s.values() if torch.is_tensor(v)]
    sizes = {'weights': sum(p.nbytes for p in weights), 'gradients': sum(p.nbytes for p in weights if p.requires_grad),
             'optimizer state': sum(v.nbytes for v in state), 'casts': casts}
    return {what: round(size / sum(p.numel() for p in weights), 2) for what, size in sizes.items()}


def _runs_in(run: Run) -> str:
    "Train a block of one step; return the dtype in which the first linear, convolution or LSTM layer gives its output."
    seen: list[str] = []
    def hook(m, i, o): seen.append(str((o[0] if isinstance(o, tuple) else o).dtype).removeprefix('torch.'))
    layers = [m for m in run.model.modules() if isinstance(m, (nn.Linear, nn.Conv2d, nn.LSTM))]
    hooks = [m.register_forward_hook(hook) for m in layers]
    try: run.train()
    finally:
        for h in hooks: h.remove()
    return seen[0]


def _prepare(entry: Entry, task: Task) -> None:
    "Build a contestant, warm it up and count."
    batches = task.batches
    def counted(n):
        batches.n = n
        watch, MixedPrecision.watch_class = MixedPrecision.watch_class, None   # it reads the loss in main memory alone
        try:
            with Count() as count: run.train()
        finally: MixedPrecision.watch_class = watch
        return count
    try:
        batches.n = 1
        run = entry.run = entry.contestant.build(task, entry.mode, entry.opt)
        entry.runs_in = _runs_in(run)
        run.train()
        entry.step = batches.ms
        once, more = counted(1), counted(3)                      # what a fit costs beside its steps cancels
        entry.syncs, casts = (more.syncs - once.syncs) / 2, (more.casts - once.casts) / 2
        batches.at_end, batches.n = lambda: entry.bytes.update(_bytes(run, casts)), 1
        run.train()
    except Exception as e: _fails(entry, e)
    finally: batches.at_end = lambda: None


def _fails(entry: Entry, e: Exception) -> None: # In any way; the table says how
    entry.run, entry.note = None, (str(e).strip() or type(e).__name__).splitlines()[0].partition('. ')[0][:110]


# -- timing

def entries(
    modes: Sequence[str], # Beside fp32
    contestants: Sequence[str] | None = None, # Their names; those that run by default if None
) -> list[Entry]:
    "Return who takes part: the fp32 runs first, then those of each mode."
    def takes_part(c, mode):
        wanted = c.default if contestants is None else c.name in contestants
        return wanted and installed(c) and (c.fp32 if mode == 'fp32' else c.low)
    return [Entry(c, opt, mode) for mode in ('fp32', *modes) for c in CONTESTANTS if takes_part(c, mode)
            for opt in c.optimizers]


def make_task(
    name: str, # From `MODELS`
    device: torch.device,
) -> tuple[Task, dict[str, Any]]: # The task, and what the report says of the model
    "Return a model and its batches on `device`."
    spec, big = MODELS[name], device.type != 'cpu'
    memory: dict[str, Any] = dict(memory_format=torch.channels_last) if spec.channels_last else {}
    torch.manual_seed(0)
    setup = spec.build(big)
    def model() -> nn.Module:
        torch.manual_seed(0)
        return spec.build(big).net.to(device, **memory)
    def batch():
        x = setup.inputs(setup.batch_size)
        y = x.roll(-1, 1) if setup.next_token else torch.randint(10, (len(x),))
        return x.to(device, **(memory if x.is_floating_point() else {})), y.to(device)
    about = dict(name=name, what=spec.title, batch_size=setup.batch_size,
                 parameters=sum(p.numel() for p in setup.net.parameters()))
    return Task(model, Batches(device, [batch() for _ in range(2)]), device), about


def measure(
    task: Task,
    entries: list[Entry],
    steps: int = 10, # Steps in a block, at most
    repeats: int = 15, # Rounds, at most
    seconds: float = 40, # For all rounds; three are timed however long they take
) -> None:
    "Count, then time in rounds: each entry trains a block of steps in each round, and each round begins with another."
    for entry in entries: _prepare(entry, task)
    ready = [e for e in entries if e.run is not None]
    if not ready: return
    n = {id(e): min(steps, max(1, int(BLOCK_SECONDS * 1000 / e.step))) for e in ready}
    fits = int(seconds * 1000 / sum(e.step * (n[id(e)] + 1) for e in ready))
    for k in range(min(repeats, max(FEWEST_ROUNDS, fits))):
        first = k % len(ready)
        for entry in ready[first:] + ready[:first]: _block(entry, task.batches, n[id(entry)])


def _block(entry: Entry, batches: Batches, n: int) -> None:
    if entry.run is None: return
    batches.n = n
    try: entry.run.train()
    except Exception as e: return _fails(entry, e)
    entry.ms.append(batches.ms)
    entry.faults.append(batches.faults)


# -- records

def quartiles(values: Iterable[float]) -> list[float] | None:
    "Return the quartiles, the median among them; None if there are no values."
    values = list(values)
    return [round(float(q), 4) for q in np.quantile(values, (.25, .5, .75))] if values else None


def noisy(
    ratio: Sequence[float] | None, # Its quartiles
    blocks: int, # How many values they come from
) -> bool:
    """Return whether the median is uncertain by more than `NOISY` either way, or comes from a single block.

    Its 95 % interval, as notches of box plots show it: 1.57 (q3 - q1) / sqrt(n). Source: McGill, Tukey and Larsen,
    Variations of Box Plots, The American Statistician 32 (1978).
    """
    if ratio is None: return False
    low, median, high = ratio
    return 1.57 * (high - low) / math.sqrt(max(blocks, 1)) > NOISY * median or blocks < 2


def _median(values: list[float]) -> float | None:
    return round(float(np.median(values)), 4) if values and not math.isnan(values[0]) else None


def _speedups(entry: Entry, base: Entry | None) -> list[float]: # By round
    return [b / a for a, b in zip(entry.ms, base.ms)] if base else []


def records(
    entries: list[Entry], # Of one model
    model: str,
) -> list[dict[str, Any]]: # A plain record for each; bench's `rows`
    "Return medians, and quartiles of the ratios of blocks in the same round."
    found = {(e.contestant.name, e.opt, e.mode): e for e in entries}
    bases = {(e.contestant.framework, e.opt): e for e in entries if e.mode == 'fp32'}
    def record(e):
        c, low = e.contestant, e.mode != 'fp32'
        base = bases.get((c.framework, e.opt))
        plain = [found.get(('plain loop', e.opt, mode)) for mode in (e.mode, 'fp32')]
        autocast = found.get(('fastxtend_amp', 'fused AdamW' if e.opt == 'Kahan AdamW' else e.opt, e.mode))
        speedups, plains = _speedups(e, base) if low else [], _speedups(*plain) if plain[0] else []
        # fastai's own can stay in fp32, where the plain loop does not.
        beside_plain = c.name != 'plain loop' and plain[0] and plain[0].runs_in == e.runs_in
        fp32_only = low and e.runs_in == 'float32' and e.run is not None
        return dict(
            model=model, contestant=c.name, optimizer=e.opt, mode=e.mode, runs_in=e.runs_in, blocks=len(e.ms),
            ms=_median(e.ms), vs_fp32=quartiles(speedups),
            vs_plain_loop=quartiles(a / b for a, b in zip(speedups, plains)) if beside_plain else None,
            vs_autocast=quartiles(_speedups(e, autocast)) if 'half' in c.name else None,
            syncs=_median([e.syncs - base.syncs]) if base else None, page_faults=_median(e.faults), bytes=e.bytes,
            note='never leaves fp32 here' if fp32_only else e.note)
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
    models: Sequence[str] = tuple(MODELS), # Names from `MODELS`
    modes: Sequence[str] = ('bf16',), # Beside fp32
    device: torch.device = torch.device('cpu'),
    contestants: Sequence[str] | None = None, # Names from `CONTESTANTS`
    keep_memory: bool = False, # Whether to call `keep_freed_memory` first
    **settings: Any, # steps, repeats, seconds: as `measure` takes them
) -> dict[str, Any]: # Plain values, as `tables` and `plot` take them
    "Measure contestants on each model, in one process, in turns."
    kept = keep_freed_memory() if keep_memory else None
    support = {r.mode: [r.support, r.why] for r in precision_support(device).itertuples() if r.mode in modes}
    out: dict[str, Any] = dict(machine=machine(device), keep_memory=kept, support=support, models=[], rows=[])
    # Only the report goes to standard output. It says what is emulated.
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter('ignore')
        for name in models:
            print(name, flush=True)
            task, about = make_task(name, device)
            measured = entries(modes, contestants)
            measure(task, measured, **settings)
            out['models'].append(about)
            out['rows'] += records(measured, name)
    return out
