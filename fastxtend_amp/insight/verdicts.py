"What one mode does to a model: the search for the modules to keep in fp32, and the verdict."
from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING

import torch

from ..convert import HALF
from ..fp32_modules import ROOT, qualified_names
from ..mode import AMPMode
from .progress import TimeIsUp
from .tracer import IMPRECISE, LOSS, Tracer

if TYPE_CHECKING: from .examination import Examination

__all__ = ['Judge', 'Verdict', 'scales_that_fit']

LOST = .01            # share of a gradient's absolute sum that may underflow before a loss scale counts as too low
ROUNDS = 6            # how often modules are added to those kept in fp32 before others are tried
CLOSE = 4.            # headroom below which a module is close to overflow
PAIRED = 8            # the candidates that are tried in pairs


@dataclass
class Verdict:
    "What one mode does to this model, and what to do."
    mode: str
    verdict: str # 'safe', 'safe with loss scaling', 'safe, but close', 'keep modules in fp32', 'do not use', 'cannot run' or 'not known'
    reason: str
    call: str # The next call to make; '' until all modes are known
    modules: list[str] = field(default_factory=list) # The modules concerned
    scales: tuple[float, float] | None = None # Lowest and highest loss scale that neither underflows nor overflows (fp16)

    def __str__(self): return f"{self.mode}: {self.verdict}. Next: `{self.call}`" + (f'\n    {_sentence(self.reason)}' if self.reason else '')


def _sentence(text):
    is_mode = text.startswith(tuple(m.value for m in AMPMode))
    return (text if is_mode else text[:1].upper() + text[1:]) + ('' if text.endswith('.') else '.')


class Judge:
    "Finds the modules that one mode needs in fp32, by running the batches again with them kept."
    def __init__(self,
        examination: Examination,
        tracer: Tracer, # The pass in this mode
        refused: list[str], # Modules that do not run in it, kept in fp32 already
    ):
        self.examination, self.tracer, self.mode, self.refused = examination, tracer, tracer.mode, list(refused)
        self.fp32 = examination.fp32
        self.non_finite: set[str] = set()                        # modules where finite numbers end
        self.highest = math.inf                                  # the loss scale at which gradients turned out to be finite
        self.tried = 0

    def verdict(self) -> Verdict:
        "The verdict, tried before it is given."
        mode, examination = self.mode, self.examination
        for tracer in (self.fp32, self.tracer.reference):
            if not (tracer.non_finite_loss or tracer.non_finite_grads): continue
            what = 'loss of these batches is' if tracer.non_finite_loss else 'gradients of these batches are'
            return Verdict(mode.value, 'do not use', f'the {what} not finite in fp32 either: look at data and model first', 'learn.to_fp32()')
        tracer, keep = self._keep_what_fails()
        if tracer.non_finite_loss or tracer.non_finite_grads:
            found = self._search(tracer)
            if found is None:
                what = 'loss is' if tracer.non_finite_loss else 'gradients are'
                reason = f'the {what} not finite, whatever is kept in fp32: {self.tried} modules were tried, one by one and in pairs'
                if LOSS in tracer.trouble: reason += '. It begins in the loss function: compute it in fp32 there'
                return Verdict(mode.value, 'do not use', reason, '', keep)
            keep, scale = found
            if scale < tracer.scale: self.highest = scale
            tracer = examination.trace(mode, keep, scale)
        low, high = scales_that_fit(tracer, self.fp32)
        high = min(high, self.highest)
        if low > high:
            return Verdict(mode.value, 'do not use', f'no loss scale fits: gradients underflow below {low:,g} and overflow above {high:,g}', '', keep, (low, high))
        failing = [m for m in keep if m not in self.refused]
        keep, close = self._keep_what_is_close(tracer, keep)
        return self._works(tracer, keep, failing, close, (low, high))

    # -- what to keep in fp32

    def _keep_what_fails(self) -> tuple[Tracer, list[str]]:
        "Lower the loss scale where gradients are too large for it, and keep the modules in trouble until no other is."
        tracer, keep = self.tracer, list(self.refused)
        for _ in range(ROUNDS):
            self.non_finite |= set(tracer.trouble)
            new = [m for m in self._troubled(tracer) if m not in keep]
            scale = min(tracer.scale, scales_that_fit(tracer, tracer.reference)[1])
            if not new and tracer.non_finite_grads and not tracer.non_finite_loss and scale == tracer.scale:
                scale = self._backed_off(tracer, keep)
                if scale == tracer.scale: new = [m for m in tracer.trouble_backward if m not in keep and m != LOSS]
            if not new and scale == tracer.scale: break
            keep += new
            tracer = self.examination.trace(self.mode, keep, scale)
        return tracer, keep

    def _backed_off(self, tracer, keep) -> float:
        "The loss scale that training would arrive at; that of `tracer` where gradients would underflow at it, or none will do."
        outcomes = self.examination.outcomes(self.mode, keep, tracer.scale)
        if any(o.scale is None for o in outcomes): return tracer.scale
        scale = min(o.scale for o in outcomes)
        if scale < scales_that_fit(tracer, self.fp32)[0]: return tracer.scale
        self.highest = min(self.highest, scale)
        return scale

    def _troubled(self, tracer):
        known = [s for s in tracer.seen.values() if s.name != LOSS]
        imprecise = [s.name for s in known if s.own > IMPRECISE and not s.non_finite]
        inner = [n for n in imprecise if not any(o != n and _inside(o, n) for o in imprecise)]
        # samples that were left out may overflow where these do not
        beyond = [s.name for s in known if s.in_half > torch.finfo(self.mode.dtype).max] if tracer.reference is not self.fp32 else []
        return list(dict.fromkeys([*(n for n in tracer.trouble if n != LOSS), *beyond, *inner]))

    def _search(self, tracer) -> tuple[list[str], float] | None:
        "Try modules one by one and in pairs; those that make the batches finite, and the loss scale at which they do."
        candidates = self._candidates(tracer)
        for names in _tries(candidates):
            self.tried = max(self.tried, min(candidates.index(names[-1]) + 1, len(candidates)))
            self.examination.progress.check()
            keep = list(dict.fromkeys([*self.refused, *names]))
            outcomes = self.examination.outcomes(self.mode, keep, tracer.scale)
            if all(o.loss_is_finite and o.scale is not None for o in outcomes): return keep, min(o.scale for o in outcomes)
        return None

    def _candidates(self, tracer) -> list[str]:
        "Modules and those around them, the suspects first."
        suspects = [n for n in (*self.non_finite, *tracer.trouble, *tracer.trouble_backward) if n not in (LOSS, ROOT)]
        around = [n for s in suspects for n, _ in qualified_names(self.examination.task.model) if _inside(s, n) and n != ROOT]
        by_size = sorted(self.fp32.seen.values(), key=lambda s: -max(s.inside, s.largest, s.in_half))
        called = [s.name for s in by_size if s.name not in (LOSS, ROOT)]
        return [n for n in dict.fromkeys([*suspects, *around, *called]) if n in self.fp32.seen]

    def _keep_what_is_close(self, tracer, keep) -> tuple[list[str], dict[str, float]]:
        "Keep the modules whose values come close to the format's limit, too; with their headroom."
        close: dict[str, float] = {}
        for _ in range(3):
            new = {s.name: self._headroom(s) for s in tracer.seen.values() if s.name not in (LOSS, *keep) and self._headroom(s) < CLOSE}
            if not new: break
            close |= new
            keep = [*keep, *new]
            tracer = self.examination.trace(self.mode, keep, tracer.scale)   # what they hand on may be close in the next one
        return keep, close

    def _headroom(self, seen): return torch.finfo(self.mode.dtype).max / seen.in_half if seen.in_half else math.inf

    # -- how it is said

    def _works(self, tracer, keep, failing, close, scales) -> Verdict:
        mode, (low, high) = self.mode, scales
        scaled = scales if mode.needs_loss_scaling else None
        span = f'a loss scale from {low:,g} to {high:,g}' if scaled else ''
        margin = '; '.join(f"values inside '{n}' come to 1/{h:.2g} of {mode.value}'s {torch.finfo(mode.dtype).max:,.5g}" for n, h in list(close.items())[:3])
        if len(close) > 3: margin += f' and {len(close) - 3} modules more'
        changes = {'init_scale': high} if scaled and high < self.examination.scale else {}
        call = self.examination.call(mode, keep, **changes)
        def told(*parts): return '; '.join(p for p in parts if p)
        if failing:
            why = some([self._why(m) for m in failing])
            return Verdict(mode.value, 'keep modules in fp32', told(why, margin, span), call, keep, scaled)
        if close: return Verdict(mode.value, 'safe, but close', told(margin, 'a few larger samples would overflow', span), call, keep, scaled)
        if keep: return Verdict(mode.value, 'keep modules in fp32', told('the rest is fine', span), call, keep, scaled)
        verdict = 'safe with loss scaling' if scaled and low > 1 else 'safe'
        return Verdict(mode.value, verdict, told(self._errors(tracer), span), call, scales=scaled)

    def _errors(self, tracer):
        totals = [s.total for s in tracer.seen.values() if s.name != LOSS and s.total_error.known]
        return f'predictions are {totals[-1]:.2%} from fp32, at most {max(totals):.2%} on the way' if totals else 'nothing was computed in low precision'

    def _why(self, name):
        seen, limit, mode = self.fp32.seen.get(name), torch.finfo(self.mode.dtype).max, self.mode.value
        if seen is not None:
            largest = max(seen.largest, seen.inside)
            if largest > limit: return f"{'' if seen.largest > limit else 'inside '}'{name}' values reach {largest:,.3g}, above {mode}'s {limit:,.5g}"
            if seen.grads.largest > limit: return f"gradients of '{name}' reach {seen.grads.largest:,.3g}, above {mode}'s {limit:,.3g}"
        return f"inside '{name}' {mode} {'is not finite' if name in self.non_finite else f'loses more than {IMPRECISE:.0%}'}"


def _inside(name, other): return name != other and (other == ROOT or name.startswith(other + '.'))


def _tries(candidates) -> Iterator[list[str]]:
    for name in candidates: yield [name]
    for pair in combinations(candidates[:PAIRED], 2): yield list(pair)


def some(words: list[str], n: int = 4) -> str:
    "The first `n` of some words, and how many more there are."
    return ', '.join(words[:n]) + (f' and {len(words) - n} more' if len(words) > n else '')


def scales_that_fit(
    tracer: Tracer, # A pass in low precision
    fp32: Tracer,
) -> tuple[float, float]: # Powers of two; 1 and 1 in a mode that needs no loss scaling
    "The lowest and the highest loss scale at which gradients in the mode neither underflow nor overflow."
    if not tracer.mode.needs_loss_scaling: return 1., 1.
    info = torch.finfo(tracer.mode.dtype)
    half = [fp32.seen[n].grads for n, s in tracer.seen.items() if n != LOSS and s.outputs & set(HALF) and n in fp32.seen]
    largest = max((h.largest for h in half), default=0.)
    high = 2. ** math.floor(math.log2(info.max / largest)) if largest else 2. ** 24
    smallest, low = info.tiny * info.eps, 1.                     # the smallest subnormal; half of it rounds to 0
    while low < 2. ** 40 and any(h.mass_below(smallest / low) > LOST for h in half): low *= 2
    return low, high
