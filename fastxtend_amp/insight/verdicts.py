"What one mode does to a model: the search for the modules to keep in fp32, and the verdict."
from __future__ import annotations

import math, textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations, starmap
from typing import TYPE_CHECKING

import torch

from ..convert import HALF
from ..fp32_modules import ROOT, qualified_names
from ..mode import AMPMode
from .samples import not_finite_data
from .statistics import Seen
from .tracer import IMPRECISE, LOSS, Tracer

if TYPE_CHECKING: from .examination import Examination

__all__ = ['Judge', 'Verdict', 'scales_that_fit']

LOST = .01            # share of a gradient's absolute sum that may underflow before a loss scale counts as too low
ROUNDS = 6            # how often modules are added to those kept in fp32 before others are tried
CLOSE = 4.            # headroom below which a module is close to overflow
PAIRED = 8            # the candidates that are tried in pairs
ROOT_CODE = "the model's own `forward`"


@dataclass
class Verdict:
    """What one mode does to this model, and what to do.

    `verdict` is one of 'safe', 'safe with loss scaling', 'safe, but close', 'keep modules in fp32', 'do not use',
    'cannot run' and 'not known'.
    """
    mode: str
    verdict: str
    reason: str
    call: str # The next call to make; '' until all modes are known
    modules: list[str] = field(default_factory=list) # The modules concerned
    scales: tuple[float, float] | None = None # Lowest and highest loss scale without underflow or overflow (fp16)

    @property
    def headline(self) -> str:
        "The verdict, and the call to make."
        return f'{self.mode}: {self.verdict}. Next: `{self.call}`'

    @property
    def sentence(self) -> str:
        "The reason as a sentence, or several."
        is_mode = self.reason.startswith(tuple(m.value for m in AMPMode))
        text = self.reason if is_mode else self.reason[:1].upper() + self.reason[1:]
        return text if text.endswith('.') else f'{text}.'

    def __str__(self):
        indent = {'initial_indent': ' ' * 4, 'subsequent_indent': ' ' * 4}
        reason = textwrap.fill(self.sentence, 116, **indent, break_long_words=False, break_on_hyphens=False)
        return f'{self.headline}\n{reason}'


class Judge:
    "Finds the modules that one mode needs in fp32, by running the batches again with them kept."
    def __init__(self,
        examination: Examination,
        mode: AMPMode,
        tracer: Tracer, # The pass in this mode
        refused: list[str], # Modules that do not run in it, kept in fp32 already
    ):
        self.examination, self.mode, self.tracer, self.refused = examination, mode, tracer, list(refused)
        self.fp32, self.limit = examination.fp32, torch.finfo(mode.dtype).max
        self.non_finite: set[str] = set()                        # modules where finite numbers end
        self.imprecise: set[str] = set()                         # that lose more than a tenth
        self.highest = math.inf                                  # loss scale at which gradients turned out to be finite

    def verdict(self) -> Verdict:
        "The verdict, tried before it is given."
        if reason := self._wrong_in_fp32(): return self._say('do not use', reason, 'learn.to_fp32()')
        tracer, keep = self._keep_what_fails()
        if tracer.non_finite_loss or tracer.non_finite_grads:
            found = self._search(tracer)
            if found is None: return self._say('do not use', self._nothing_helps(tracer), '', keep)
            keep, scale = found
            if scale < tracer.scale: self.highest = scale
            tracer = self.examination.trace(self.mode, keep, scale)
        low, high = scales_that_fit(self.mode, tracer, self.fp32)
        high = min(high, self.highest)
        if low > high:
            reason = f'no loss scale fits: gradients underflow below {low:,.9g} and overflow above {high:,.9g}'
            return self._say('do not use', reason, '', keep, (low, high))
        failing = [m for m in keep if m not in self.refused]
        keep, close = self._keep_what_is_close(tracer, keep)
        return self._works(tracer, keep, failing, close, (low, high))

    def _say(self, verdict, reason, call, modules=(), scales=None):
        return Verdict(self.mode.value, verdict, reason, call, list(modules), scales)

    def _wrong_in_fp32(self) -> str:
        for tracer in (self.fp32, self.tracer.reference or self.fp32):
            if not (tracer.non_finite_loss or tracer.non_finite_grads): continue
            what = 'loss of these batches is' if tracer.non_finite_loss else 'gradients of these batches are'
            data = next(filter(None, starmap(not_finite_data, self.examination.batches)), '')
            return data or f'the {what} not finite in fp32 either: look at data and model first'
        return ''

    def _nothing_helps(self, tracer) -> str:
        what, n = 'loss is' if tracer.non_finite_loss else 'gradients are', len(self._candidates(tracer))
        reason = f'the {what} not finite, whatever is kept in fp32: {n} modules were tried, one by one and in pairs'
        if LOSS in tracer.trouble: reason += '. It begins in the loss function: compute it in fp32 there'
        elif ROOT in tracer.trouble: reason += f'. It begins in {ROOT_CODE}: compute it in fp32 there'
        return reason

    # -- what to keep in fp32

    def _keep_what_fails(self) -> tuple[Tracer, list[str]]:
        "Lower the loss scale where gradients are too large for it, and keep the modules in trouble until no other is."
        tracer, keep = self.tracer, list(self.refused)
        for _ in range(ROUNDS):
            self.non_finite |= set(tracer.trouble)
            new = [m for m in self._troubled(tracer) if m not in keep]
            scale = min(tracer.scale, scales_that_fit(self.mode, tracer, tracer.reference or self.fp32)[1])
            if not new and tracer.non_finite_grads and not tracer.non_finite_loss and scale == tracer.scale:
                scale = self._backed_off(tracer, keep)
                if scale == tracer.scale: new = [m for m in tracer.trouble_backward if m not in (*keep, LOSS, ROOT)]
            if not new and scale == tracer.scale: break
            keep = outermost([*keep, *new])
            tracer = self.examination.trace(self.mode, keep, scale)
        return tracer, keep

    def _backed_off(self, tracer, keep) -> float:
        "The loss scale that training would arrive at; that of `tracer` if none will do, or gradients would underflow."
        scale = min(o.scale for o in self.examination.outcomes(self.mode, keep, tracer.scale))
        if scale < scales_that_fit(self.mode, tracer, self.fp32)[0]: return tracer.scale
        self.highest = min(self.highest, scale)
        return scale

    def _troubled(self, tracer) -> list[str]:
        known = [s for s in tracer.seen.values() if s.name not in (LOSS, ROOT)]   # to keep the root is to train in fp32
        imprecise = [s.name for s in known if s.own > IMPRECISE and not s.non_finite]
        inner = [n for n in imprecise if not any(o != n and _inside(o, n) for o in imprecise)]
        self.imprecise |= set(imprecise)
        beyond = [s.name for s in known if s.in_half > self.limit]
        if tracer.reference is self.fp32: beyond = []            # else samples that were left out may overflow
        return list(dict.fromkeys([*(n for n in tracer.trouble if n not in (LOSS, ROOT)), *beyond, *inner]))

    def _search(self, tracer) -> tuple[list[str], float] | None:
        "Try modules one by one and in pairs; those that make the batches finite, and the loss scale at which they do."
        for names in _tries(self._candidates(tracer)):
            self.examination.progress.check()
            keep = list(dict.fromkeys([*self.refused, *names]))
            outcomes = self.examination.outcomes(self.mode, keep, tracer.scale)
            scale = min(o.scale for o in outcomes)
            if scale and all(o.loss_is_finite for o in outcomes): return keep, scale
        return None

    def _candidates(self, tracer) -> list[str]:
        "Modules and those around them, the suspects first."
        suspects = [n for n in (*self.non_finite, *tracer.trouble, *tracer.trouble_backward) if n not in (LOSS, ROOT)]
        names = [n for n, _ in qualified_names(self.examination.task.model) if n != ROOT]
        around = [n for s in suspects for n in names if _inside(s, n)]
        by_size = sorted(self.fp32.seen.values(), key=lambda s: -max(s.highest, s.in_half))
        called = [s.name for s in by_size if s.name not in (LOSS, ROOT)]
        return [n for n in dict.fromkeys([*suspects, *around, *called]) if n in self.fp32.seen]

    def _keep_what_is_close(self, tracer, keep) -> tuple[list[str], dict[str, float]]:
        "Keep the modules whose values come close to the format's limit, too; with their headroom."
        close: dict[str, float] = {}
        for _ in range(3):
            new = {s.name: self._headroom(s) for s in tracer.seen.values() if self._headroom(s) < CLOSE}
            new = {n: h for n, h in new.items() if n != LOSS and not any(n == k or _inside(n, k) for k in keep)}
            close |= new
            new.pop(ROOT, None)
            if not new: break
            keep = outermost([*keep, *new])                      # what they hand on may be close in the next one
            tracer = self.examination.trace(self.mode, keep, tracer.scale)
        return keep, close

    def _headroom(self, seen: Seen) -> float: return self.limit / seen.in_half if seen.in_half else math.inf

    # -- how it is said

    def _works(self, tracer, keep, failing, close, scales) -> Verdict:
        low, high = scales
        scaled = scales if self.mode.needs_loss_scaling else None
        span = f'a loss scale from {low:,.9g} to {high:,.9g}' if scaled else ''
        changes = {'init_scale': int(high) if high >= 1 else high} if scaled and high < self.examination.scale else {}
        call = self.examination.call(self.mode, keep, **changes)
        margin = self._margin({n: h for n, h in close.items() if n in keep or n == ROOT})
        if failing:
            reason, verdict = some([self._why(m) for m in failing]), 'keep modules in fp32'
        elif margin: reason, verdict = 'a few larger samples would overflow', 'safe, but close'
        elif keep: reason, verdict = 'the rest is fine', 'keep modules in fp32'
        else: reason, verdict = self._errors(tracer), 'safe with loss scaling' if scaled and low > 1 else 'safe'
        parts = (reason, margin, span) if failing else (margin, reason, span)
        return self._say(verdict, '; '.join(p for p in parts if p), call, keep, scaled)

    def _margin(self, close: dict[str, float]) -> str:
        limit = f"{self.mode.value}'s {self.limit:,.5g}"
        def where(name): return ROOT_CODE if name == ROOT else f"'{name}'"
        return some([f"values inside {where(n)} come to 1/{h:.2g} of {limit}" for n, h in close.items()], 3)

    def _errors(self, tracer) -> str:
        seen = [s for s in tracer.seen.values() if s.name != LOSS and s.total_error.known]
        if not seen: return 'nothing was computed in low precision'
        last, most = seen[-1].total, max(s.total for s in seen)
        text = f'predictions are {last:.2%} from fp32, at most {most:.2%} on the way'
        if last <= IMPRECISE: return text
        own = max(s.own for s in seen)
        return (f'{text}; no module by itself loses more than {own:.2%}: the model makes small differences large, as '
                'batch normalization does with few or similar samples')

    def _why(self, name) -> str:
        seen, limit, mode = self.fp32.seen.get(name), self.limit, self.mode.value
        if seen is not None:
            where = '' if seen.largest > limit else 'inside '
            if seen.highest > limit:
                return f"{where}'{name}' values reach {seen.highest:,.3g}, above {mode}'s {limit:,.5g}"
            if seen.grads.largest > limit:
                return f"gradients of '{name}' reach {seen.grads.largest:,.3g}, above {mode}'s {limit:,.3g}"
        if name in self.non_finite: return f"inside '{name}' {mode} is not finite"
        if name in self.imprecise: return f"inside '{name}' {mode} loses more than {IMPRECISE:.0%}"
        return f"with '{name}' in {mode} the loss or a gradient is not finite"


def _inside(name, other): return name != other and (other == ROOT or name.startswith(other + '.'))


def outermost(names: list[str]) -> list[str]:
    "The names without those of modules inside others."
    return [n for n in dict.fromkeys(names) if not any(_inside(n, o) for o in names)]


def _tries(candidates) -> Iterator[list[str]]:
    for name in candidates: yield [name]
    for pair in combinations(candidates[:PAIRED], 2): yield list(pair)


def some(words: list[str], n: int = 4) -> str:
    "The first `n` of some words, and how many more there are."
    return ', '.join(words[:n]) + (f' and {len(words) - n} more' if len(words) > n else '')


def scales_that_fit(
    mode: AMPMode,
    tracer: Tracer, # The pass in that mode
    fp32: Tracer,
) -> tuple[float, float]: # Powers of two; 1 and 1 in a mode that needs no loss scaling
    "The lowest and the highest loss scale at which gradients in the mode neither underflow nor overflow."
    if not mode.needs_loss_scaling: return 1., 1.
    info = torch.finfo(mode.dtype)
    names = [n for n, s in tracer.seen.items() if n != LOSS and s.outputs & set(HALF)]
    half = [fp32.seen[n].grads for n in names if n in fp32.seen]
    largest = max((h.largest for h in half), default=0.)
    high = 2. ** math.floor(math.log2(info.max / largest)) if largest else 2. ** 24
    smallest, low = info.tiny * info.eps, min(1., high)          # the smallest subnormal; half of it rounds to 0
    while low < 2. ** 40 and any(h.mass_below(smallest / low) > LOST for h in half): low *= 2
    return low, high
