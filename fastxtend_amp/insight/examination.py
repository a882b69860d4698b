"The passes of one report: fp32 first, then each mode, each from the same state of the model and the random generators."
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..common import first_line, random_state_kept
from ..convert import map_tensors
from ..fp32_modules import ROOT, kept_in_fp32, qualified_names
from ..mode import AMPMode, mode_support
from .samples import first_samples, n_samples
from .progress import Progress, TimeIsUp
from .restore import ModuleState, modules_in
from .run import Outcome, Task
from .tracer import Seen, Tracer
from .verdicts import Judge, Verdict

__all__ = ['Examination']

EMULATED_WORK = 4e9   # floating-point operations of a training step that is emulated; a core does about so many in a second
FEWEST = 2            # samples, for batch normalization


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
        self.task, self.batches, self.device, self.scale, self.progress, self.call = task, batches, device, scale, progress, call
        self.fp32: Tracer | None = None                          # the pass over all samples
        self.tracers: dict[AMPMode, Tracer] = {}                 # the pass of each mode with nothing kept
        self.samples: dict[AMPMode, int] = {}                    # that an emulated mode looks at
        self._few: dict[int, tuple[list, Tracer]] = {}           # by the number of samples
        self._latest: Tracer | None = None
        self._state: ModuleState | None = None

    def examine(self, modes: list[AMPMode]) -> dict[AMPMode, Verdict]:
        "The verdict on each mode, as far as the time allows."
        verdicts: dict[AMPMode, Verdict] = {}
        try:
            self._look_ahead(modes)
            self.fp32 = self._pass(None, self.batches)
            for mode in modes: verdicts[mode] = self._examine(mode)
        except TimeIsUp: pass
        for mode in modes: verdicts.setdefault(mode, self._not_known(mode))
        return {m: verdicts[m] for m in modes}

    # -- passes

    def trace(self, mode: AMPMode, keep: list[str], scale: float) -> Tracer:
        "The batches in `mode` with the modules `keep` in fp32."
        batches, reference = self._for(mode)
        return self._pass(mode, batches, keep, scale, reference)

    def outcomes(self, mode: AMPMode, keep: list[str], scale: float) -> list[Outcome]:
        "What comes of each batch with the modules `keep` in fp32, without looking inside."
        with kept_in_fp32(self.task.model, keep): return [self._undone(self.task.outcome, *b, mode, scale) for b in self._for(mode)[0]]

    def _pass(self, mode, batches, keep=(), scale=1., reference=None, only=None) -> Tracer:
        tracer = Tracer(*self.task[:2], mode, reference, scale, self.task.after_pred, ranges=self.fp32, only=only, tick=self.progress.tick)
        self._latest = tracer
        if mode is not None and not keep: self.tracers.setdefault(mode, tracer)
        try:
            with kept_in_fp32(self.task.model, list(keep)):
                for batch in batches: self._undone(tracer.run, *batch)
            return tracer
        except torch.OutOfMemoryError:
            if mode is None: raise
        names = sorted(self._computing if only is None else only)
        if len(names) < 2: raise torch.OutOfMemoryError("precision_report ran out of memory, with one module at a time as well. Give it smaller batches "
                                                        "(`dl=learn.dls.train.new(bs=...)`).")
        halves = [set(names[::2]), set(names[1::2])]             # fewer modules at a time
        first, second = (self._pass(mode, batches, keep, scale, reference, half) for half in halves)
        for name in halves[1] & first.seen.keys(): first.seen[name].take_comparison(second.seen[name])
        return first

    @property
    def _computing(self): return {n for n, m in qualified_names(self.task.model) if self.fp32.selected(m, n)}

    def _undone(self, run: Callable, xb: tuple, yb: tuple, *args: Any) -> Any:
        "Run on copies of a batch, which a model may change in place; model and random generators are put back."
        if self._state is None: self._state = ModuleState([self.task.model, *modules_in(self.task.loss_func)])
        xb, yb = map_tensors(torch.clone, (xb, yb))
        with random_state_kept(self.device, everything=True):
            try: return run(xb, yb, *args)
            finally:
                with torch.no_grad(): self._state.restore()

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
        "Run one batch to see what it takes, choose how many samples emulated modes look at, and say how long all will take."
        xb, yb = self.batches[0]
        n, n_batches, start = n_samples(self.batches[0]), len(self.batches), time.perf_counter()
        with FlopCounterMode(display=False) as counter: self._undone(self.task.forward, xb, yb)
        step, flops = 3 * (time.perf_counter() - start), 3 * counter.get_total_flops()
        modules = sum(1 for _ in self.task.model.modules())
        seconds, words = (2 * step + .001 * modules) * n_batches, []
        for mode in modes:
            status = mode_support(mode, self.device).status
            if status == 'emulated' and flops * n_batches > EMULATED_WORK and n > FEWEST:
                self.samples[mode] = max(FEWEST, min(n, int(n * EMULATED_WORK / flops / n_batches)))
            few = self.samples.get(mode, n)
            if status == 'emulated': seconds += 2 * few / n * flops * n_batches / EMULATED_WORK
            if status != 'unsupported': seconds += (4 * step * few / n + .002 * modules) * n_batches
            words.append(mode.value + (f' (emulated: {few} of {n} samples)' if few < n else ''))
        self.progress.expect(modules * n_batches * (1 + len(modes) + len(self.samples)))
        self.progress.say(f"precision_report: about {max(1, round(seconds))} s for {' and '.join(words)}", f'about {max(1, round(seconds))} s')

    def _not_known(self, mode):
        seen = self.tracers[mode].seen if mode in self.tracers else {}
        limit = self.progress.max_seconds
        reason = f'`max_seconds={limit:g}` was over ' + (f'after {len(seen)} of its modules' if seen else 'before it was looked at')
        more = f"learn.precision_report('{mode.value}', max_seconds={10 * limit:g})"
        return Verdict(mode.value, 'not known', reason, more, [n for n in self.tracers[mode].trouble if n in seen] if seen else [])

    # -- one mode

    def _examine(self, mode) -> Verdict:
        support = mode_support(mode, self.device)
        if support.status == 'unsupported': return Verdict(mode.value, 'cannot run', support.why, '')
        scale = self.scale if mode.needs_loss_scaling else 1.
        refused: list[str] = []
        reason = ''
        modules = dict(qualified_names(self.task.model))
        while True:
            try:
                tracer = self.trace(mode, refused, scale)
                break
            except torch.OutOfMemoryError: raise
            except (RuntimeError, TypeError, ValueError) as e:
                name = self._latest.failed_in
                failed = modules.get(name)
                reason = reason or self._refusal(mode, name, failed, e)
                more = [n for n, m in modules.items() if failed is not None and type(m) is type(failed) and n not in refused]
                if not more or name == ROOT: return Verdict(mode.value, 'cannot run', reason, '')
                refused += more                                  # such as an LSTM on some CPUs: do the other modules run?
        self.tracers[mode] = tracer
        verdict = Judge(self, tracer, refused).verdict()
        if refused:
            kinds = ', '.join(dict.fromkeys(type(modules[n]).__name__ for n in refused))
            verdict.reason = f'{reason}. With {kinds} in fp32, `{verdict.call}`: {verdict.reason}' if verdict.call else f'{reason}. {verdict.reason}'
            verdict.verdict = 'cannot run'
        return verdict

    def _refusal(self, mode: AMPMode, name: str | None, failed: nn.Module | None, error: Exception) -> str:
        kind = type(failed).__name__ if failed is not None else 'function'
        where = f" for '{name}' ({kind})" if name else ''
        return f'{mode.value} does not run on this {self.device.type.upper()}{where}: PyTorch says: {first_line(error).partition(". ")[0]}'


def rows_of(examination: Examination, mode: AMPMode) -> list[Seen]:
    "The modules of a mode's pass that compute something, and the loss function."
    modules = {}
    for name, m in qualified_names(examination.task.model): modules.setdefault(name, m)
    return [s for s in examination.tracers[mode].seen.values() if s.name not in modules or examination.fp32.selected(modules[s.name], s.name)]
