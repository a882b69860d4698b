"The verdict on one precision: what has to be kept in fp32, tried before it is said."
from __future__ import annotations

import math, textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from ..convert import HALF
from ..fp32_modules import ROOT, qualified_names
from ..mode import AMPMode, refused_layer
from .trace import LOSS, Seen, Trace

__all__ = ['IMPRECISE', 'Judge', 'Judgement', 'Verdict', 'lost_weights', 'named', 'some']

Judgement = Literal[
    'safe so far',             # nothing is wrong on the batches that were looked at, with the weights as they are now
    'safe with loss scaling',  # the same, and without loss scaling gradients would underflow
    'safe, but close',         # values come to a quarter of the format's maximum: the call keeps their modules in fp32
    'keep modules in fp32',    # some modules overflow or lose more than a tenth; with them in fp32 nothing is wrong
    'do not use',              # no modules were found that help, or fp32 fails alike
    'cannot run',              # the device has no kernel for it, or the model's code does not run in it
    'not known',               # `max_seconds` was over
]

IMPRECISE = .1        # error of a module's own arithmetic that is trouble
LOST = .01            # share of a gradient's absolute sum that may underflow before a loss scale counts as too low
CLOSE = 4.            # headroom below which a module is close to overflow
LOWEST_SCALE = 2.**-12 # that is advised
MARGIN = 16.          # by which a loss scale that is advised is below the highest: later gradients may be larger
ROUNDS = 12           # traces in which modules are added or the loss scale is lowered
TRIES = 8             # modules that are tried one by one, where none is known to be at fault
_NO_KERNEL = 'not implemented', 'not support', 'unsupported', 'primitive', 'no kernel'


@dataclass
class Verdict:
    "The effect of one precision on a model, and what to do. `verdict` is one of the seven of `Judgement`."
    mode: str
    verdict: Judgement
    reason: str
    call: str # The next call to make
    modules: list[str] = field(default_factory=list) # To keep in fp32
    scales: tuple[float, float] | None = None # Lowest and highest loss scale without underflow or overflow (fp16)
    trouble: list[str] = field(default_factory=list) # Where it shows; '(model)' is the model's own forward

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


@dataclass
class Judge:
    "Finds the verdict on a precision; `call` is empty where another precision has to be taken."
    mode: AMPMode
    model: nn.Module
    device: torch.device
    run: Callable[[list[str], float], Trace] # Traces the batches with some modules in fp32, at a loss scale
    fp32: Trace # Of the same batches
    first_scale: float # The loss scale to start from
    call: Callable[..., str] # Gives the call for modules to keep and other arguments
    data: str = '' # What is wrong with the batches themselves
    largest_input: float = 0.
    kept: Sequence[str] = () # Modules that are in fp32 to begin with
    is_whole: bool = True # Whether the batches are whole; few samples make errors large where they are normalized

    def __post_init__(self):
        self.keep, self.scale, self.highest = list(self.kept), self.first_scale, math.inf
        self.limit = torch.finfo(self.mode.dtype).max
        self.reasons: dict[str, str] = {}                        # by module, in the order in which they were found
        self.refused: list[str] = []                             # modules that do not run
        self.close: set[str] = set()                             # those of them that are near to overflow, no more

    def verdict(self) -> Verdict:
        if reason := self.wrong_in_fp32(): return self._say('do not use', reason)
        low, refusal = self._runnable()
        if low.error: return self._say('cannot run', refusal)
        verdict = self._judged(low)
        if not refusal: return verdict
        kept = verdict.call and f'With these in fp32, `{verdict.call}`: '
        return self._say('cannot run', f'{refusal}. {kept}{verdict.sentence}', verdict.call, verdict.scales)

    def wrong_in_fp32(self) -> str:
        "Describe what is wrong in fp32 as well; '' if nothing is."
        if self.data: return self.data
        if lost := lost_weights(self.model): return f'{lost}: build the model anew, or load other weights'
        fp32 = self.fp32
        if fp32.loss_is_finite and fp32.grads_are_finite: return ''
        name = next(iter(fp32.failures() or fp32.backward_failures()), None)
        what, first = 'gradients are' if fp32.loss_is_finite else 'loss is', f', first in {named(name)}' if name else ''
        return f'the {what} not finite in fp32 either{first}: this is not a matter of precision'

    def _say(self, verdict: Judgement, reason, call='', scales=None) -> Verdict:
        modules = [n for n in self.keep if n not in self.kept]
        return Verdict(self.mode.value, verdict, reason, call, modules, scales, [*self.refused, *self.reasons])

    # -- what does not run

    def _runnable(self) -> tuple[Trace, str]:
        "Keep the modules that do not run, such as an LSTM on some CPUs; the trace, and why they do not."
        modules, refusal = dict(qualified_names(self.model)), ''
        for name, m in modules.items():                          # a fit would refuse to begin
            kind: type | None = next((k for k in (nn.LSTM, nn.GRU, nn.RNN) if isinstance(m, k)), None)
            if self.device.type != 'cpu' or kind is None or not (why := refused_layer(kind, self.mode)): continue
            refusal = refusal or self._refusal(name, kind, why)
            self._keep_refused([name])
        while True:
            low = self.run(self.keep, self.scale)
            if not low.error: return low, refusal
            kind = type(modules[low.failed_in]) if low.failed_in else None
            refusal = refusal or self._refusal(low.failed_in, kind, low.error)
            more = [n for n, m in modules.items() if type(m) is kind and not self._is_kept(n)]
            if not more or low.failed_in == ROOT: return low, refusal
            self._keep_refused(more)

    def _keep_refused(self, names):
        self.refused += names
        self.keep = outermost([*self.keep, *names])

    def _refusal(self, name, kind, error) -> str:
        mode, error = self.mode.value, error.partition('. ')[0]
        where = f"'{name}' ({kind.__name__})" if kind and name != ROOT else ''
        if any(words in error.lower() for words in _NO_KERNEL):
            device = self.device.type.upper()
            return f"{mode} does not run on this {device}{' for ' * bool(where)}{where}: PyTorch says: {error}"
        where = where or named(name or LOSS)
        return (f'the code of {where} does not run in {mode}: {error}. It has to be in fp32, or written for half '
                f'precision: constants within {self.limit:,.5g}, such as `torch.finfo(x.dtype).min`, and tensors of '
                'one dtype')

    # -- what has to be in fp32

    def _judged(self, low: Trace) -> Verdict:
        for _ in range(ROUNDS):
            found = self._concerned(low)
            self.close |= {n for n in found.keys() - self.reasons.keys() if self._is_only_close(low.seen[n])}
            self.reasons = {**found, **self.reasons}
            finite = low.loss_is_finite and low.grads_are_finite
            if not found and finite and not self._no_scale_fits(low): return self._works(low)
            before = self.keep, self.scale
            self._mend(low, found)
            if before == (self.keep, self.scale): break
            low = self.run(self.keep, self.scale)
        return self._nothing_helps(low)

    def _mend(self, low: Trace, found: Iterable[str]) -> None:
        "Keep more modules, or lower the loss scale."
        new = [n for n in found if self._can_be_kept(n)]
        if not new and (found or not low.loss_is_finite): new = self._tried(low, next(iter(found), None))
        elif not new and not low.grads_are_finite: new = self._mended_backward(low)
        elif not new: new = self._loudest(low)
        self.keep = outermost([*self.keep, *new])

    def _concerned(self, low: Trace) -> dict[str, str]:
        "The modules whose forward pass is in trouble, and why; the first first."
        found = {n: self._why_not_finite(n) for n in low.failures()}
        for n, s in low.seen.items():
            if n in found: continue
            if s.error > IMPRECISE: found[n] = f'{named(n)} loses {min(s.error, 1):.0%} in {self.mode.value}'
            elif self._is_only_close(s) and not self._is_kept(n):
                found[n] = (f"values in {named(n)} come to 1/{self.limit / s.half:.2g} of {self._format}, so that a "
                            'few larger samples would overflow')
        return found

    def _is_only_close(self, s: Seen) -> bool:
        return s.failed is None and s.error <= IMPRECISE and s.half * CLOSE > self.limit

    def _why_not_finite(self, name) -> str:
        largest = self.fp32.seen[name].largest if name in self.fp32.seen else 0.
        if self.largest_input > self.limit:
            return f'the inputs reach {self.largest_input:,.3g}, above {self._format}: scale the data'
        if largest > self.limit: return f'values in {named(name)} reach {largest:,.3g}, above {self._format}'
        return f'in {named(name)} {self.mode.value} is not finite where fp32 is'

    @property
    def _format(self): return f"{self.mode.value}'s {self.limit:,.5g}"

    def _is_kept(self, name): return any(name == k or _inside(name, k) for k in self.keep)
    def _can_be_kept(self, name): return name not in (ROOT, LOSS) and not self._is_kept(name)

    def _tried(self, low: Trace, name: str | None = None, backward: bool = False) -> list[str]:
        """Return modules that help when they are in fp32, where the one that shows the trouble cannot be kept.

        That is the model's own forward or the loss function, which compute in fp32 what comes to them in fp32, or a
        module that is in fp32 and gets values that were rounded before: the modules before it are tried.
        """
        shows = low.seen[name] if name else None
        before = [s for s in low.seen.values() if self._can_be_kept(s.name) and (s.half or s.dtypes & set(HALF))]
        if shows is not None and shows.failed: before = [s for s in before if s.ended <= shows.failed]
        nearest = [s.name for s in sorted(reversed(before), key=lambda s: (-s.ended, -s.name.count('.')))]
        for names in [*([n] for n in nearest[:TRIES]), *(nearest[:n] for n in (2, 4, 8, len(nearest)))]:
            trace = self.run(outermost([*self.keep, *names]), self.scale)
            if trace.error or not _computes_in_half(trace): continue
            found = self._concerned(trace)
            if not trace.loss_is_finite or name in found or (backward and not trace.grads_are_finite): continue
            if name in self.reasons:
                self.reasons[name] += f', and not with {some([*map(named, names)])} in fp32, which come before'
            else:
                words = f'in {self.mode.value} the loss or a gradient is not finite'
                self.reasons |= {n: f'with {named(n)} {words}' for n in names}
            return names
        return []

    def _mended_backward(self, low: Trace) -> list[str]:
        "Lower the loss scale; return modules to keep where that does not help."
        least, most = scales_that_fit(self.mode, low, self.fp32)
        lower = most if most < self.scale else self.scale / 16
        if self.mode.needs_loss_scaling and lower >= max(least, LOWEST_SCALE):
            self.scale = self.highest = lower
            return []
        new = [n for n in low.backward_failures() if self._can_be_kept(n)]
        self.reasons |= {n: f'gradients in the backward pass of {named(n)} are not finite in {self.mode.value}'
                         for n in new or low.backward_failures()}
        self.scale, self.highest = min(self.first_scale, most), math.inf
        return new or self._tried(low, backward=True)

    def _no_scale_fits(self, low):
        if not self.mode.needs_loss_scaling: return False
        least, most = scales_that_fit(self.mode, low, self.fp32)
        return least * CLOSE > min(most, self.highest) or most < LOWEST_SCALE

    def _loudest(self, low) -> list[str]:
        "Return the module with the largest gradients, which leave no room for a loss scale."
        half = [n for n, s in low.seen.items() if s.dtypes & set(HALF) and n in self.fp32.seen and self._can_be_kept(n)]
        name = max(half, key=lambda n: self.fp32.seen[n].grads.largest, default=None)
        if name is None: return []
        self.scale, self.highest = self.first_scale, math.inf    # what was found with it in half precision is over
        largest = self.fp32.seen[name].grads.largest
        self.reasons[name] = f'gradients of {named(name)} reach {largest:,.3g}, and those of others underflow'
        return [name]

    # -- how it is said

    def _nothing_helps(self, low: Trace) -> Verdict:
        shows = next((n for n in self.reasons if n in (ROOT, LOSS)), None)
        least, most = scales_that_fit(self.mode, low, self.fp32)
        if shows:
            reason = (f'{self.reasons[shows]}, and no module in fp32 changes that. Compute it in fp32 there: '
                      f"`with torch.autocast('{self.device.type}', enabled=False)`, on inputs made `.float()`")
        elif not low.loss_is_finite: reason = 'the loss is not finite, whatever is kept in fp32'
        elif not low.grads_are_finite:
            reason = 'the gradients are not finite, whatever is kept in fp32, at any loss scale'
        elif self._no_scale_fits(low):
            reason = f'no loss scale fits: gradients underflow below {least:,.9g} and overflow above {most:,.9g}'
        else: reason = f'{some([*self.reasons.values()])}; keeping them in fp32 was not enough'
        return self._say('do not use', reason)

    def _works(self, low: Trace) -> Verdict:
        if self.reasons and not _computes_in_half(low):
            words = f'with these in fp32 nothing is left in {self.mode.value}'
            return self._say('do not use', f'{some([*self.reasons.values()])}; {words}')
        least, most = scales_that_fit(self.mode, low, self.fp32)
        most = min(most, self.highest)
        scaled = (least, most) if self.mode.needs_loss_scaling else None
        start = max(least, most / MARGIN)
        changes = {}
        if scaled and most < CLOSE * self.first_scale: changes['init_scale'] = int(start) if start >= 1 else start
        reasons = [*self.reasons.values()] or [self._errors(low)]
        verdict: Judgement = 'safe with loss scaling' if scaled and least > 1 else 'safe so far'
        if self.reasons: verdict = 'safe, but close' if self.close >= self.reasons.keys() else 'keep modules in fp32'
        if scaled: reasons = [*reasons[:4], f'a loss scale from {least:,.9g} to {most:,.9g}']
        call = self.call([n for n in self.keep if n not in self.kept], **changes)
        return self._say(verdict, some([*dict.fromkeys(reasons)], 5, '; '), call, scaled)

    def _errors(self, low) -> str:
        own = max((s.error for s in low.seen.values()), default=0.)
        total = low.seen[ROOT].total if ROOT in low.seen and self.is_whole else math.nan
        text = f'no module loses more than {own:.2%} by itself'
        if math.isnan(total): return text
        text = f'predictions are {total:.2%} from fp32; {text}'
        if total <= IMPRECISE: return text
        return (f'{text}: the model makes small differences large, as batch normalization does with few or similar '
                'samples')


def lost_weights(model: nn.Module) -> str: # Such as "2 of 4 weight tensors are NaN or inf, such as '0.weight'"
    "Describe which weights are NaN or inf; '' if none is."
    weights = dict(model.named_parameters())
    lost = [n for n, p in weights.items() if not bool(p.detach().isfinite().all())]
    return f"{len(lost)} of {len(weights)} weight tensors are NaN or inf, such as '{lost[0]}'" if lost else ''


def _computes_in_half(low: Trace) -> bool: return any(s.half for n, s in low.seen.items() if n != LOSS)
def _inside(name, other): return name != other and (other == ROOT or name.startswith(other + '.'))


def outermost(names: Iterable[str]) -> list[str]:
    "Return the names without those of modules inside others."
    names = [*dict.fromkeys(names)]
    return [n for n in names if not any(_inside(n, o) for o in names)]


def named(name: str, kinds: Mapping[str, str] | None = None) -> str:
    "Return how a message calls a module, with its type if `kinds` has it."
    if name in (ROOT, LOSS): return "the model's own `forward`" if name == ROOT else 'the loss function'
    return f"module '{name}' ({kinds[name]})" if kinds and name in kinds else f"'{name}'"


def some(words: list[str], n: int = 4, between: str = ', ') -> str:
    "Return the first `n` of some words, and how many more there are."
    return between.join(words[:n]) + (f' and {len(words) - n} more' if len(words) > n else '')


def scales_that_fit(
    mode: AMPMode,
    low: Trace, # In that mode
    fp32: Trace,
) -> tuple[float, float]: # Powers of two; 1 and 1 in a mode that needs no loss scaling
    "Return the lowest and the highest loss scale at which gradients in the mode neither underflow nor overflow."
    if not mode.needs_loss_scaling: return 1., 1.
    info = torch.finfo(mode.dtype)
    half = [fp32.seen[n].grads for n, s in low.seen.items() if s.dtypes & set(HALF) and n in fp32.seen]
    largest = max((h.largest for h in half), default=0.)
    most = 2. ** math.floor(math.log2(info.max / largest)) if largest else 2. ** 24
    smallest, least = info.tiny * info.eps, min(1., most)        # the smallest subnormal; half of it rounds to 0
    while least < 2. ** 40 and any(h.mass_below(smallest / least) > LOST for h in half): least *= 2
    return least, most
