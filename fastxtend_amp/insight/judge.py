"The search for a verdict: what to keep in fp32 and the loss scale, tried before they are recommended."
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from fastai.learner import Learner

from ..precisions import Precision
from ..precisions.matching import ROOT, covers, qualified_names
from .candidates import advised, call, own_precision
from .notes import OTHER_HALF, other_half
from .recorder import Trace
from .tensors import readable
from .values import n_nan_or_inf, relative_error, rounded
from .verdict import Verdict, named, some

_IMPRECISE = .1         # relative error from which a module is flagged, and share of decisions that differ,
_SHOWN = .01            # if the loss differs by more than this
_LOST = .1              # of the mean absolute gradient: smaller gradients may underflow
_CLOSE = 4.             # headroom below which a module is flagged
_LOWEST_SCALE = 2.**-12 # to recommend
_SMALL, _LARGE = .25, .5        # distance of the mean gradient; models that trained worse than in fp32 were above .5
_MARGIN = 16.           # between a recommended loss scale and the highest, as later gradients may be larger
_NOT_FINITE = 'the loss or a gradient is not finite'
_DISABLED = '`with torch.autocast(x.device.type, enabled=False)`'


@dataclass
class Judge:
    "The search for the verdict on a precision, whose `call` is empty if another precision has to be used."
    learn: Learner
    kind: type[Precision]
    run: Callable # Returns the `Trace` of batches with these modules in fp32, at a loss scale
    first_scale: float # The loss scale to start from
    # Returns the distance of the mean gradient from that in fp32, as `gradient_distance` does; nan if unknown.
    distance: Callable = lambda keep, scale: math.nan
    is_cut: bool = False # Whether the batches are too small to choose a loss scale

    def __post_init__(self):
        self.modules = dict(qualified_names(self.learn.model))
        self.kept = self.keep = [*own_precision(self.learn).kept_in_fp32(self.learn.model)]
        self.scale = self.first_scale
        self.limit = torch.finfo(self.kind.dtype).max
        self.reasons = {}                                        # by module, in the order found

    def verdict(self) -> Verdict:
        "Keep modules in fp32 and lower the loss scale until nothing is flagged; return what it took."
        while True:
            low = self.run(self.keep, self.scale)
            if convert := other_half(self.learn.model, self.kind.dtype, low.error):
                return self._say('cannot run', f'{low.error}: {OTHER_HALF}', call=convert)
            found = self._failing(low) if low.error else self._concerned(low)
            self.reasons = self.reasons | found | self.reasons     # the first reason of each
            if not (found or low.error or low.not_finite): return self._works(low)
            if not self._mend(low, found): return self._nothing_helps(low)

    def _say(self, verdict, reason, **found):
        return Verdict(self.kind.name, verdict, reason, flagged=[*self.reasons], **found)

    # -- what has to be in fp32

    def _failing(self, low):
        "Return the modules of the type that fails, and why."
        if not (name := low.failed_in): return {}
        why = f'{named(name)} does not run in {self.kind.name}: {low.error}'
        for constant in low.seen[name].constants if name in low.seen else (): why += f'; {self._lost(*constant)}'
        kind = type(self.modules.get(name))
        alike = [n for n, m in self.modules.items() if type(m) is kind]
        return dict.fromkeys(alike or [name], why)

    def _concerned(self, low):
        "Return the modules to flag for their forward pass, and why, in execution order."
        found, name, decisions = {}, self.kind.name, _changed(low)
        # The loss of a few batches also jumps with tiny changes in fp32.
        if not decisions or not _loss_differs(low) or self.distance(self.keep, self.scale) < _LARGE: decisions = {}
        for n, s in low.seen.items():
            size = s.largest if s.failed else s.half
            lost = next((constant for constant, is_needed in s.constants.items() if is_needed), None)
            if s.failed and size <= self.limit:
                why = f'a value in {named(n)} is NaN or inf in {name}, but finite in fp32'
            elif s.failed or (s.half * _CLOSE > self.limit and not covers(self.keep, n)):
                above = 'above' if size > self.limit else 'close to'
                why = f"values in {named(n)} reach {size:,.3g}, {above} {name}'s {self.limit:,.5g}"
            elif lost:
                away = rounded(lost[-1], self.kind.dtype)
                why = f'{self._lost(*lost)}, so it does not keep values in {named(n)} away from {away:g}'
            elif s.merged:
                why = f'{s.merged[0]:.9g} and {s.merged[1]:.9g} become the same number in {named(n)} in {name}'
            elif s.error > _IMPRECISE: why = f'the error of {named(n)} is {min(s.error, 1):.0%} in {name}'
            elif n in decisions: why = f'{decisions[n]} differ in {name}, and with them the loss'
            else: continue
            if s.undone_line:
                why += (f'. Autocast runs the product in {s.undone_line} in {name}, although its inputs are '
                        f'`.float()`: {_DISABLED} before it keeps it in fp32')
            found[n] = why
        return found

    def _lost(self, line, operator, value):
        where = f' (`{operator}`, {line})' if line else ''
        return f'{value:.9g} is {rounded(value, self.kind.dtype):g} in {self.kind.name}{where}'

    def _mend(self, low, found):
        "Keep more modules, or lower the loss scale; return False if there is nothing left to try."
        is_backward = low.not_finite == 'gradient' and not (found or low.error)
        if is_backward and self.kind.scales_loss and self._lower_scale(low): return True
        new = [*filter(self._can_be_kept, found)] or self._tried(low, next(iter(found), None), is_backward)
        if new and is_backward: self.scale = self.first_scale    # it was not the scale that failed
        self.keep = [*self.keep, *new]
        return bool(new)

    def _lower_scale(self, low):
        "Lower the loss scale, if gradients do not underflow at the lower one; return whether it was lowered."
        least, most = self._scales(low)
        lower = most if _LOWEST_SCALE <= most < self.scale else self.scale / 16
        if lower < max(least, _LOWEST_SCALE): return False
        self.scale = lower
        return True

    def _can_be_kept(self, name): return name in self.modules and name != ROOT and not covers(self.keep, name)

    def _candidates(self, low):
        "Return the modules that can be kept in fp32 in addition, from last to first."
        around = {n.rpartition('.')[0] for n in low.seen}        # parents of others, which may compute nothing
        computing = [n for n, s in low.seen.items() if s.largest or n not in around]
        return [*filter(self._can_be_kept, reversed(computing))]

    def _tried(self, low, name, backward):
        """Return modules that help in fp32, where the flagged one cannot be kept there.

        That is the model's own `forward` or the loss function, which compute in fp32 on fp32 inputs, or a module in
        fp32 that gets rounded values. In a backward pass none is flagged.
        """
        def helps(names):
            trace = self.run([*self.keep, *names], self.scale)
            is_wrong = trace.error or trace.not_finite in ('loss', backward and 'gradient')
            return not is_wrong and name not in self._concerned(trace)
        if not (names := smallest(self._candidates(low), helps)): return []
        helped = f' (keeping {some(map(named, names))} in fp32 prevents this)'
        if name in self.reasons: self.reasons[name] += helped
        else: self.reasons |= dict.fromkeys(names, f'in {self.kind.name} {_NOT_FINITE}{helped}')
        return names

    # -- the loss scale

    def _scales(self, low):
        """Return the lowest loss scale without underflow, and the highest without overflow.

        Underflow means that of the mean gradient; modules with the smallest gradients may still lose theirs.
        """
        info = torch.finfo(self.kind.dtype)
        half = [s for n, s in low.fp32.seen.items() if s.grad and n in low.seen and low.seen[n].half]
        if not half: return 1., 2. ** 24
        most = 2. ** math.floor(math.log2(info.max / max(s.grad for s in half)))
        mean = sum(s.grad_sum for s in half) / sum(s.n_grads for s in half)
        least = 2. ** math.ceil(math.log2(info.smallest_normal * info.eps / (_LOST * mean)))
        return min(max(least, min(1., most / _MARGIN)), most), most

    def _start(self, low):
        "Return the range of loss scales, by what was computed and tried, and where to start if the first is outside."
        is_trained = any(s.grad for s in low.fp32.seen.values())         # not in evaluation
        if not is_trained or not self.kind.scales_loss or self.is_cut: return None, None
        least, most = self._scales(low)
        most = self.scale if self.scale < self.first_scale else max(most, self.scale)
        least = min(least, most)
        if least <= self.first_scale <= most / _CLOSE: return (least, most), None
        scale = max(least, most / _MARGIN)
        return (least, most), int(scale) if scale >= 1 else scale

    # -- what is reported

    def _nothing_helps(self, low):
        reason = some(self.reasons.values()) or low.error or _NOT_FINITE
        if low.error: return self._say('cannot run', reason)
        reason += ', and no module in fp32 changes that'
        if self.reasons.keys() - self.modules.keys() or ROOT in self.reasons:
            reason += f'. Compute it in fp32: inside {_DISABLED}, on `.float()` inputs'
        return self._say('do not use', reason)

    def _works(self, low):
        "Nothing is flagged any more: say what it took, and compare the mean gradient with that in fp32."
        scales, init_scale = self._start(low)
        verdict, why = 'keep modules in fp32', [some(dict.fromkeys(self.reasons.values()), '; ')]
        if not self.reasons:
            verdict = 'safe with loss scaling' if scales and scales[0] > 1 else 'safe so far'
            errors = [s.error for s in low.seen.values() if s.error > 0]
            why = [f'no module has an error above {max(errors):.2%}' if errors else 'nothing was flagged']
        if decisions := _changed(low).values():
            of = 'gradient' if _loss_differs(low) else 'loss'
            why.append(f'{some(decisions)} differ from fp32, which the {of} does not show')
        if scales:
            margin = f', and {init_scale:,.9g} leaves a margin' if init_scale and init_scale < scales[1] else ''
            why.append(f'loss scales from {scales[0]:,.9g} to {scales[1]:,.9g} work{margin}')
        distance = partial(self.distance, scale=init_scale or self.first_scale)
        far, names = distance(self.keep), []                     # nan if unknown
        moves = f'rounding moves the mean gradient by {far:.2g} of its standard error over batches'
        if far == math.inf: moves = 'gradients of some batches are finite only in fp32'
        if far < _LARGE: why.append(f'{moves}; from {_LARGE} on it may matter')
        elif far >= _LARGE:
            verdict = 'gradient differs'
            names, helps = self._nearer(low, distance)
            why.append(f'{moves}, and from {_LARGE} on it may matter; with {helps} in fp32 it is below {_SMALL}. It is '
                       'a warning sign, not a proof: some such models train as well as in fp32')
            self.reasons |= dict.fromkeys(names, '')
        modules = [n for n in [*self.keep, *names] if n not in self.kept]
        following = call(self.learn, advised(self.learn, self.kind, modules, init_scale))
        if far >= _LARGE and not names: following = f"learn.compare_precision('{self.kind.name}')"
        return self._say(verdict, '; '.join(why), call=following, modules=modules, scale_range=scales,
                         init_scale=init_scale, error=_prediction_error(low))

    def _nearer(self, low, distance):
        "Return the modules that bring the mean gradient near to that in fp32, and their names in words."
        tried = self._candidates(low)
        names = smallest(tried, lambda names: distance([*self.keep, *names]) < _SMALL)
        if len(names) > 1 and names == tried: return [], 'only all modules'
        return names, some(map(named, names)) or 'no module that was tried'


def smallest(names: list[str], helps: Callable) -> list[str]:
    "Return few of `names` that still help, by bisection; [] if none do."
    if not names or not helps(names): return []
    half = len(names) // 2
    parts = (smallest(part, helps) for part in (names[:half], names[half:]) if half)
    return next(filter(None, parts), names)


# -- what a trace shows

def wrong_in_fp32(fp32: Trace, batches: object) -> str:
    """Describe what is wrong in fp32 as well; '' if nothing is.

    NaN in the data matters only then: it may mark unknown targets, which the loss ignores.
    """
    if not fp32.losses: return 'no batch gave a loss: use batches with targets, or a model that returns the loss'
    if not fp32.not_finite: return ''
    if bad := not_finite_data(batches): return bad
    first = next((f', first in {named(n)}' for n, s in fp32.seen.items() if s.failed), '')
    if own := not_fp32(fp32): return f'the {fp32.not_finite} is not finite{first}, but the reference is not fp32: {own}'
    return f'the {fp32.not_finite} is not finite in fp32 either{first}, so precision is not the cause'


def not_fp32(fp32: Trace) -> str:
    "Describe products in 16 bits in the fp32 run; '' if there are none."
    own = [f'{named(n)} ({s.half_line})' for n, s in fp32.seen.items() if s.half_line]
    return f'{some(own)} multiplies in 16 bits, by an autocast or a cast of its own' if own else ''


def not_finite_data(batch: object) -> str: # 'the batch itself is not finite: 1 of 24 values of ...'
    "Describe which tensor of a batch has NaN or inf; '' if none has. -inf may be a mask."
    t = next(filter(n_nan_or_inf, readable(batch)), None)
    if t is None: return ''
    return (f'the batch itself is not finite: {n_nan_or_inf(t):,} of {t.numel():,} values of its tensor of shape '
            f'{tuple(t.shape)} are NaN or inf')


def _changed(low):
    "Return the modules in which many decisions differ from those in fp32, and how many."
    return {n: f'{s.changed:.0%} of the decisions (comparisons, sorting, top-k) in {named(n)}'
            for n, s in low.seen.items() if s.changed > _IMPRECISE}


def _loss_differs(low):
    loss = sum(low.fp32.losses)
    return abs(sum(low.losses) - loss) > _SHOWN * abs(loss)


def _prediction_error(low):
    "Return the relative difference of predictions from those in fp32, of the batch with the largest; nan if unknown."
    pairs = zip(low.predictions, low.fp32.predictions)
    errors = (relative_error(p, exact) for p, exact in pairs if p.shape == exact.shape)
    return max((e for e in errors if e >= 0), default=math.nan)
