"The passes of one report: fp32 first, then each mode, each from the same state of the model and the random generators."
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from ..common import first_line, random_state_kept
from ..compat import Operator, watch_operators
from ..convert import map_tensors
from ..fp32_modules import ROOT, kept_in_fp32, qualified_names
from ..mode import AMPMode, mode_support
from .progress import Progress, TimeIsUp
from .restore import effects_undone, modules_in
from .run import Outcome, Task
from .samples import first_samples, n_samples
from .statistics import Seen
from .tracer import LOSS, Tracer
from .verdicts import Judge, Verdict

__all__ = ['Examination']

EMULATED_WORK = 4e9   # floating-point operations of an emulated training step; a core does about so many in a second
FEWEST = 2            # samples, for batch normalization


class OperationCount:
    """Counts floating-point operations, for `compat.watch_operators`, with the formulas of `FlopCounterMode`.

    `FlopCounterMode` itself hooks gradients, with which a model that calls `torch.autograd.grad` does not run.
    """
    def __init__(self): self.n = 0

    def __call__(self, op: Operator, args: tuple, kwargs: dict) -> Any:
        out = op.call(*args, **kwargs)
        formula = flop_registry.get(getattr(op.call, 'overloadpacket', None))
        if formula is not None: self.n += formula(*args, **kwargs, out_val=out)
        return out


class Examination:
    "The passes of one report over some batches; the model is in training mode, and may change."
    def __init__(self,
        task: Task,
        batches: list, # Pairs of inputs and targets, on the model's device
        device: torch.device,
        scale: float, # The loss scale to start from
        progress: Progress,
        call: Callable[..., str], # Gives the call to make for a mode, modules to keep and other arguments
    ):
        self.task, self.batches, self.device = task, batches, device
        self.scale, self.progress, self.call = scale, progress, call
        self._fp32: Tracer | None = None                         # the pass over all samples
        self.tracers: dict[AMPMode, Tracer] = {}                 # the pass of each mode with nothing kept
        self.samples: dict[AMPMode, int] = {}                    # that an emulated mode looks at
        self._few: dict[int, tuple[list, Tracer]] = {}           # by the number of samples
        self._latest: Tracer | None = None

    def examine(self, modes: list[AMPMode]) -> dict[AMPMode, Verdict]:
        "The verdict on each mode, as far as the time allows."
        verdicts: dict[AMPMode, Verdict] = {}
        try:
            self._look_ahead(modes)
            self._fp32 = self._pass(None, self.batches)
            for mode in modes: verdicts[mode] = self._examine(mode)
        except TimeIsUp: pass
        for mode in modes: verdicts.setdefault(mode, self._not_known(mode))
        return {m: verdicts[m] for m in modes}

    @property
    def fp32(self) -> Tracer:
        "The pass in fp32 over all samples."
        if self._fp32 is None: raise TimeIsUp
        return self._fp32

    def never_called(self) -> list[str]:
        "The modules without others inside that the batches did not reach."
        if self._fp32 is None: return []
        leaves = [(n, m) for n, m in qualified_names(self.task.model)
                  if not list(m.children()) and not isinstance(m, torch.jit.ScriptModule)]
        return [n for n, m in leaves if self._fp32.names[id(m)] not in self._fp32.seen]

    # -- passes

    def trace(self, mode: AMPMode, keep: list[str], scale: float) -> Tracer:
        "The batches in `mode` with the modules `keep` in fp32."
        batches, reference = self._for(mode)
        return self._pass(mode, batches, keep, scale, reference)

    def outcomes(self, mode: AMPMode, keep: list[str], scale: float) -> list[Outcome]:
        "What comes of each batch with the modules `keep` in fp32, without looking inside."
        with kept_in_fp32(self.task.model, keep):
            return [self._undone(self.task.outcome, *b, mode, scale, self.progress.check) for b in self._for(mode)[0]]

    def _pass(self, mode, batches, keep=(), scale=1., reference=None, only=None) -> Tracer:
        tracer = Tracer(self.task, mode, reference, scale, ranges=self._fp32, only=only,
                        tick=self.progress.tick_in_time)
        self._latest = tracer
        if mode is not None and not keep: self.tracers.setdefault(mode, tracer)
        try:
            with kept_in_fp32(self.task.model, list(keep)):
                for batch in batches: self._undone(tracer.run, *batch)
            return tracer
        except torch.OutOfMemoryError:
            if mode is None: raise
        names = sorted(self._computing if only is None else only)
        if len(names) < 2:
            raise torch.OutOfMemoryError("precision_report ran out of memory, with one module at a time as well. "
                                         "Give it smaller batches (`dl=learn.dls.train.new(bs=...)`).")
        halves = [set(names[::2]), set(names[1::2])]             # fewer modules at a time
        first, second = (self._pass(mode, batches, keep, scale, reference, half) for half in halves)
        for name in halves[1] & first.seen.keys(): first.seen[name].take_comparison(second.seen[name])
        return first

    @property
    def _computing(self) -> set[str]:
        return {LOSS, *(n for n, m in qualified_names(self.task.model) if self.fp32.selected(m, n))}

    def _undone(self, run: Callable, xb: tuple, yb: tuple, *args: Any) -> Any:
        "Run on copies of a batch, which a model may change in place; model and random generators are put back."
        modules = [self.task.model, *modules_in(self.task.loss_func)]
        xb, yb = map_tensors(torch.clone, (xb, yb))
        with random_state_kept(self.device, everything=True), effects_undone(modules): return run(xb, yb, *args)

    def _for(self, mode) -> tuple[list, Tracer]:
        "The batches for a mode, and the fp32 pass over them: all samples, or few where the mode is emulated."
        n = self.samples.get(mode)
        if n is None: return self.batches, self.fp32
        if n not in self._few:
            few = [first_samples(b, n) for b in self.batches]
            self._few[n] = few, self._pass(None, few)
        return self._few[n]

    # -- time

    def _look_ahead(self, modes):
        "Run one batch to see what it takes, choose how many samples emulated modes see, and say how long it will take."
        n, start = n_samples(self.batches[0]), time.perf_counter()
        counter = OperationCount()
        with watch_operators(counter):
            try: self._undone(self.task.forward, *self.batches[0])
            except torch.OutOfMemoryError: raise
            except Exception as e:
                raise ValueError('The model does not run on its first batch, in fp32 and without callbacks: '
                                 f'{first_line(e)}.\nWhere callbacks prepare model or batch, as for a GAN, call this '
                                 'after a fit, or give batches that it runs on: `precision_report(dl=...)`.') from e
        step = 3 * (time.perf_counter() - start) * len(self.batches)
        work = 3 * counter.n * len(self.batches)
        calls = sum(1 for _ in self.task.model.modules()) * len(self.batches)
        seconds, words = 2 * step + .001 * calls, []
        for mode in modes:
            status = mode_support(mode, self.device).status
            if status == 'unsupported': continue
            if status == 'emulated' and work > EMULATED_WORK and n > FEWEST:
                self.samples[mode] = max(FEWEST, min(n, int(n * EMULATED_WORK / work)))
            few = self.samples.get(mode, n)
            if status == 'emulated': seconds += 2 * few / n * work / EMULATED_WORK
            seconds += 4 * step * few / n + .002 * calls
            words.append(mode.value + (f' (emulated: {few} of {n} samples)' if few < n else ''))
        self.progress.expect(calls * (1 + len(modes) + len(self.samples)))
        about = f'about {max(1, round(seconds))} s'
        self.progress.say(f"precision_report: {about} for {' and '.join(words)}", about)

    def _not_known(self, mode) -> Verdict:
        tracer, limit = self.tracers.get(mode), self.progress.max_seconds
        trouble = tracer.trouble if tracer is not None else []
        reason = f'`max_seconds={limit:g}` was over before it was looked at'
        if tracer is not None: reason = f'`max_seconds={limit:g}` was over after {len(tracer.seen)} of its modules'
        if trouble: reason += f'; in trouble so far: {trouble}'
        again = f"learn.precision_report('{mode.value}', max_seconds={10 * limit:g})"
        return Verdict(mode.value, 'not known', reason, again, trouble)

    # -- one mode

    def _examine(self, mode) -> Verdict:
        support = mode_support(mode, self.device)
        if support.status == 'unsupported': return Verdict(mode.value, 'cannot run', support.why, '')
        tracer, refused, reason = self._runnable(mode)
        if tracer is None: return Verdict(mode.value, 'cannot run', reason, '')
        self.tracers[mode] = tracer
        verdict = Judge(self, mode, tracer, refused).verdict()
        if not refused: return verdict
        modules = dict(qualified_names(self.task.model))
        kinds = ', '.join(dict.fromkeys(type(modules[n]).__name__ for n in refused))
        remedy = f'With {kinds} in fp32, `{verdict.call}`: ' if verdict.call else ''
        verdict.verdict, verdict.reason = 'cannot run', f'{reason}. {remedy}{verdict.reason}'
        return verdict

    def _runnable(self, mode) -> tuple[Tracer | None, list[str], str]:
        "The pass in `mode`, the modules kept in fp32 that do not run in it, such as an LSTM on some CPUs, and why."
        refused: list[str] = []
        modules, reason = dict(qualified_names(self.task.model)), ''
        while True:
            try: return self.trace(mode, refused, self.scale if mode.needs_loss_scaling else 1.), refused, reason
            except torch.OutOfMemoryError: raise
            except (RuntimeError, TypeError, ValueError) as e:
                name = self._latest.failed_in if self._latest is not None else None
                kind = type(modules[name]) if name in modules else None
                reason = reason or self._refusal(mode, name, kind, e)
            more = [n for n, m in modules.items() if type(m) is kind and n not in refused]
            if not more or name == ROOT: return None, refused, reason
            refused += more

    def _refusal(self, mode: AMPMode, name: str | None, kind: type | None, error: Exception) -> str:
        where = f" for '{name}' ({kind.__name__ if kind is not None else 'function'})" if name else ''
        why = first_line(error).partition('. ')[0]
        return f'{mode.value} does not run on this {self.device.type.upper()}{where}: PyTorch says: {why}'


def rows_of(examination: Examination, mode: AMPMode) -> list[Seen]:
    "The modules of a mode's pass that compute something, and the loss function; none if there was no time for it."
    if mode not in examination.tracers: return []
    modules: dict[str, nn.Module] = {}
    for name, m in qualified_names(examination.task.model): modules.setdefault(name, m)
    seen = [s for s in examination.tracers[mode].seen.values() if s.calls]
    return [s for s in seen if s.name not in modules or examination.fp32.selected(modules[s.name], s.name)]
