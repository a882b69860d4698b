"Times and counts all contestants on one model, in turns."
from __future__ import annotations

import math, time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from ...common import first_line
from ...mode import AMPMode, Support, mode_support
from .clock import Clock
from .contestants import CONTESTANTS, LOSS, Contestant, Run, Task, fastai_loop, importable
from .models import MODELS

__all__ = ['BLOCK_SECONDS', 'MODE_SECONDS', 'SCALE', 'SKIP_SCALE', 'SKIP_STEPS', 'ModelBenchmark', 'Result',
           'count_ops']

BLOCK_SECONDS = .4      # what a block of steps may take: large models get fewer steps in each
MODE_SECONDS = 20       # for the timed blocks of all contestants in a mode on a model, unless told otherwise
SCALE = 1024.           # loss scale of the timed steps: low enough that none is skipped
SKIP_SCALE = 2.**20     # loss scale to start from when skipped steps are counted, so that there are some
SKIP_STEPS = 24         # steps of each of the two fits in which they are counted
LONG_STEP = 300         # milliseconds; operations are counted over one step where it takes longer, else over two


@dataclass
class Result:
    "What was measured of one contestant on one model in one mode."
    contestant: Contestant
    mode: AMPMode | None
    run: Run | None = None                                       # None where it cannot run, and when all is measured
    note: str = ''
    ms: float = math.nan                                         # of the second step, to plan by
    blocks: dict[int, np.ndarray] = field(default_factory=dict)  # by round: milliseconds of step, forward, backward
    faults: dict[int, float] = field(default_factory=dict)       # by round: page faults per step
    runs_in: str = '-'                                           # dtype of the first layer's output
    syncs: float = math.nan                                      # GPU synchronizations per step
    ops: float = math.nan                                        # aten operations per step
    peak: float = math.nan                                       # bytes
    skips: tuple[int, int] | None = None                         # skipped steps after one fit and after two
    skips_auto: int | None = None                                # in one fit with `init_scale='auto'`

    @property
    def name(self) -> str:
        "As the report calls it; without a precision callback fastai's loop is nobody's."
        return 'fastai loop' if self.contestant.framework == 'fastai' and self.mode is None else self.contestant.name

    @property
    def baseline(self) -> tuple[str, str]:
        "Framework and optimizer: the fp32 result with the same ones is what this one is compared with."
        return self.contestant.framework, self.contestant.opt


def count_ops(f: Callable[[], object]) -> Counter[str]:
    "The aten operations that `f` runs, by name."
    with profile(activities=[ProfilerActivity.CPU]) as p: f()
    return Counter(e.name for e in p.events() if e.name.startswith('aten::'))


def _first_dtype(model: nn.Module, f: Callable[[], object]) -> str:
    "The dtype of the first matrix multiplication's or convolution's output while `f` runs."
    seen: list[str] = []
    def hook(m, i, o): seen.append(str((o[0] if isinstance(o, tuple) else o).dtype).removeprefix('torch.'))
    hooks = [m.register_forward_hook(hook) for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d, nn.LSTM))]
    try: f()
    finally:
        for h in hooks: h.remove()
    return seen[0] if seen else '-'


def _reason(e: Exception) -> str: return first_line(e).partition('. ')[0][:110]


class ModelBenchmark:
    "All contestants on one model: `prepare`, then `run_block` for each turn of `plan`, then `count_skips`."
    def __init__(self,
        name: str, # From `MODELS`
        modes: Sequence[AMPMode], # Beside fp32
        device: torch.device,
        contestants: Sequence[str] | None = None, # Only these, by `Result.name`; all if None
        seconds: float | None = None, # For a mode's timed blocks, strict for an emulated one; `MODE_SECONDS` if None
    ):
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
        self.name, self.device, self.batch_size = name, device, setup.batch_size
        self.seconds = MODE_SECONDS if seconds is None else seconds
        self.format = 'channels last' if spec.channels_last else 'contiguous'
        self.n_params = sum(p.numel() for p in setup.net.parameters())
        self.task = Task(model, Clock(device, [batch() for _ in range(2)]), device)
        self.support = {m: mode_support(m, device) if m else Support('native', 'fp32') for m in (None, *modes)}
        results = [Result(c, m) for m in self.support for c in CONTESTANTS if _takes_part(c, m)]
        self.results = [r for r in results if contestants is None or r.name in contestants]

    def _emulated(self, mode: AMPMode | None) -> bool: return self.support[mode].status == 'emulated'

    def block(self, result: Result, n: int, warm: int = 0) -> np.ndarray: # Milliseconds: step, forward, backward
        "Train for `n` steps after `warm` ones that are not timed: a fit's first step builds what the others use."
        assert result.run is not None
        self.task.clock.n, self.task.clock.warm = n, warm
        result.run.steps()
        return self.task.clock.times()

    # -- before the timed blocks

    def prepare(self) -> Iterator[Result]:
        "Build each contestant, warm it up and count its operations; yields after each."
        for mode in self.support:
            results = [r for r in self.results if r.mode is mode]
            why, second_step_of = self._left_out(mode, len(results))
            for result in results:
                result.note = why
                if not why: self._prepare(result)
                elif result.contestant.opt in second_step_of: self._time_second_step(result)
                yield result

    def _left_out(self, mode: AMPMode | None, n: int) -> tuple[str, tuple[str, ...]]:
        "Why `n` contestants cannot be timed in blocks, '' if they can, and the optimizers to time two steps with."
        if self.support[mode].status == 'unsupported': return self.support[mode].why, ()
        if mode is None or not self._emulated(mode): return '', ()
        try: seconds = self._seconds_per_step(mode)
        except RuntimeError as e: return _reason(e), ()
        if seconds * n <= self.seconds / 4: return '', ()
        why = f'left out: emulated here, a step takes about {seconds:.0f} s'
        if seconds >= self.seconds / 2: return why, ()
        return why, ('Adam', 'fused AdamW') if seconds * n < self.seconds else ('Adam',)

    def _seconds_per_step(self, mode: AMPMode) -> float:
        "About how long a step takes in an emulated mode: parts of a batch are tried, larger ones while they are quick."
        model, (xb, yb) = self.task.model(), self.task.clock.data[0]
        for part in (16, 4, 1):
            n = max(2, len(xb) // part)
            start = time.perf_counter()
            with torch.autocast(self.device.type, dtype=mode.dtype): loss = LOSS(model(xb[:n]).float(), yb[:n])
            loss.backward()
            seconds = time.perf_counter() - start
            if seconds > 1: break
        return seconds * self.batch_size / n

    def _first_steps(self, result: Result, n: int, warm: int = 0) -> np.ndarray:
        "Build the contestant and train; notes the dtype it runs in."
        c, first = result.contestant, []
        result.run = c.build(self.task, result.mode, c.opt, SCALE)
        result.runs_in = _first_dtype(result.run.model, lambda: first.append(self.block(result, n, warm)))
        return first[0]

    def _time_second_step(self, result: Result) -> None:
        "The first step builds the optimizer's state, and there is no time for more than two."
        try:
            result.blocks[0] = self._first_steps(result, 1, warm=1)
            result.faults[0] = self.task.clock.faults
            result.note = 'its second step, no more: emulated'
        except Exception as e: result.run, result.note = None, _reason(e)

    def _prepare(self, result: Result) -> None:
        cuda, peak = self.device.type == 'cuda', math.nan
        try:
            before = torch.cuda.memory_allocated(self.device) if cuda else 0
            self._first_steps(result, 1)
            result.ms = self.block(result, 1)[0]
            n = 1 if result.ms > LONG_STEP else 2
            if cuda: torch.cuda.reset_peak_memory_stats(self.device)
            # What a fit costs beside its steps is in both and cancels.
            once, more = count_ops(lambda: self.block(result, 1)), count_ops(lambda: self.block(result, 1 + n))
            if cuda: peak = torch.cuda.max_memory_allocated(self.device) - before
            result.peak = peak
            result.ops = (more.total() - once.total()) / n
            result.syncs = (more['aten::_local_scalar_dense'] - once['aten::_local_scalar_dense']) / n
        except Exception as e: result.run, result.note = None, _reason(e)   # in any way; the table says how

    # -- timed blocks

    def plan(self, steps: int, repeats: int) -> list[tuple[int, Result, int]]: # Round, contestant, steps
        "Who trains when: in rounds, each begun by the next contestant; emulated modes leave when their time is up."
        ready = [r for r in self.results if r.run is not None and not r.blocks]
        n = {id(r): min(steps, max(1, int(BLOCK_SECONDS * 1000 / r.ms))) for r in ready}
        rounds = {}
        for mode in self.support:
            mine = [r for r in ready if r.mode is mode]
            fits = int(self.seconds * 1000 / max(sum(r.ms * (n[id(r)] + 1) for r in mine), 1e-9))
            for r in mine: rounds[id(r)] = min(repeats, max(1 if self._emulated(mode) else 3, fits))
        for r in ready:
            if rounds[id(r)] < repeats: r.note = f'{rounds[id(r)]} of {repeats} blocks'
        turns = []
        for k in range(repeats if ready else 0):
            first = k % len(ready)
            turns += [(k, r, n[id(r)]) for r in ready[first:] + ready[:first] if k < rounds[id(r)]]
        return turns

    def run_block(self, turn: tuple[int, Result, int]) -> None:
        "Time one turn of `plan`."
        k, result, n = turn
        if result.run is None: return
        try:
            result.blocks[k] = self.block(result, n, warm=1)
            result.faults[k] = self.task.clock.faults
        except Exception as e: result.run, result.note = None, _reason(e)

    # -- after them

    def count_skips(self, result: Result) -> None:
        "Count the steps skipped in one fit and in two, from a loss scale that is too large or 'auto'; fp16 only."
        if not self._can_count_skips(result): return
        c = result.contestant
        def fits(scale):
            run = c.build(self.task, result.mode, c.opt, scale)
            while True:
                self.task.clock.n, self.task.clock.warm = SKIP_STEPS, 0
                run.steps()
                yield run.skipped()
        fit = fits(SKIP_SCALE)
        result.skips = next(fit), next(fit)
        if c.build is fastai_loop: result.skips_auto = next(fits('auto'))

    def _can_count_skips(self, result: Result) -> bool:
        if result.mode is not AMPMode.FP16 or result.runs_in != 'float16': return False
        if result.run is None or result.run.skipped is None or 0 not in result.blocks: return False
        quick = np.median([b[0] for b in result.blocks.values()]) * 2 * SKIP_STEPS < self.seconds * 250
        return bool(quick and not math.isnan(result.ms))         # it is where only the second step was timed

    def release(self) -> None:
        "Let go of the networks."
        for result in self.results: result.run = None


def _takes_part(c: Contestant, mode: AMPMode | None) -> bool:
    return (mode is not None or c.fp32) and (c.module is None or importable(c.module))
