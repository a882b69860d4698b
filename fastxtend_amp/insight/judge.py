"The search for a verdict: what to keep in fp32 and the loss scale, tried before they are recommended."
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fastcore.basics import noop

from ..messages import first_line
from ..precisions import Precision
from ..precisions.matching import ROOT, covers, qualified_names
from .calls import advised, own_precision
from .display import some
from .evidence import CLOSE, MARGIN, NO_AUTOCAST, harm, loss_scales, prediction_error
from .recording import Recording
from .records import named
from .report_result import Verdict
from .sample import GradientDistance, Sample, gradient_distance

_LOWEST_SCALE = 2.**-12 # that is recommended
_NEAR = .25             # distance of the mean gradient that modules kept in fp32 should reach
_FAR = .5               # distance from which models trained worse than in fp32
_NOT_FINITE = 'the loss or a gradient is not finite'


class NotKnown(Exception):
    "The reason why no verdict can be reached, and the call that may reach it."


@dataclass
class Judge:
    """The search for the verdict on a precision.

        run the batches in the precision
        flag modules that raise an error, overflow or round too much
        keep them in fp32, or lower the loss scale, and run again, until nothing is flagged
        compare the mean gradient of several batches with that in fp32
        if the gradient of another batch is finite only in fp32, begin again with that batch as well

    For example, of a model whose attention overflows in fp16:

        run 1, nothing kept in fp32    the loss is NaN; `harm` flags 'attn', with values of 2.42e+06
        run 2, 'attn' kept in fp32     all is finite; scales up to 65,536 work, and 4,096 leaves a margin
        6 batches, 'attn', 4,096       the mean gradient is 0.0006 standard errors from that in fp32
        verdict                        keep modules in fp32: `to_fp16(init_scale=4096, fp32_modules=['attn'])`
    """
    kind: type[Precision]
    sample: Sample
    first_scale: float # The loss scale to start from
    batches: Sequence = () # Batches whose gradients are compared; if empty, the distance is unknown
    before_run: Callable = noop # Called before each run; may raise `NotKnown`

    def __post_init__(self):
        self.learn = self.sample.learn
        self.modules = dict(qualified_names(self.learn.model))
        self.kept = [*own_precision(self.learn).kept_in_fp32(self.learn.model)]
        self.distance: GradientDistance | None = None            # as measured first, for the notes
        self._begin(self.sample)

    def _begin(self, sample):
        self.sample, self.keep, self.scale = sample, self.kept, self.first_scale
        self.reasons = dict[str, str]()                          # why a module is flagged, by its name
        self.runs = list[Recording]()

    def verdict(self) -> Verdict: # Its `call` is empty if another precision has to be used
        "Search until nothing is flagged, or nothing helps."
        while not self.sample.wrong:
            low = self._run(self.keep)
            harmed = harm(low, self.keep, self.learn.model)
            for name, why in harmed.items(): self.reasons.setdefault(name, why)
            if harmed or low.error or low.not_finite:
                if self._remedy(low, harmed): continue
                return self._nothing_helps(low)
            scales, init_scale = self._scales(low)
            distance = self._distance(self.keep, init_scale or self.first_scale)
            seen = self.sample.batches
            other = [batch for batch in distance.lost if all(batch is not s for s in seen)]
            if not other: return self._conclude(low, scales, init_scale, distance.ratio)
            self._begin(replace(self.sample, batches=[*seen, other[0]]))
        return self._say('not known', self.sample.wrong)

    def _run(self, keep):
        self.before_run()
        self.runs.append(self.sample.run(self.kind, keep, self.scale))
        return self.runs[-1]

    def _say(self, verdict, reason, **fields):
        return Verdict(self.kind.name, verdict, reason, flagged=[*self.reasons], **fields)

    # -- what has to be in fp32

    def _remedy(self, low, harmed):
        "First lower the loss scale, then keep flagged modules, then any that help; False if there is nothing left."
        is_backward = low.not_finite == 'gradient' and not (harmed or low.error)
        if is_backward and self.kind.scales_loss and self._lower_scale(low): return True
        new = [*filter(self._can_be_kept, harmed)]
        if not new: new = self._tried(low, next(iter(harmed), None), is_backward)
        if new and is_backward: self.scale = self.first_scale    # it was not the scale that failed
        self.keep = [*self.keep, *new]
        return bool(new)

    def _lower_scale(self, low):
        "Lower the loss scale, if gradients do not underflow at the lower one; return whether it was lowered."
        least, most = loss_scales(low)
        lower = most if _LOWEST_SCALE <= most < self.scale else self.scale / MARGIN
        if lower < max(least, _LOWEST_SCALE): return False
        self.scale = lower
        return True

    def _can_be_kept(self, name): return name in self.modules and name != ROOT and not covers(self.keep, name)

    def _helping(self, low, helps):
        "Return few modules that help if they are kept in fp32 as well, and all that could be kept, from last to first."
        around = {n.rpartition('.')[0] for n in low.modules}     # parents of others, which may compute nothing
        computing = [n for n, m in low.modules.items() if m.largest or n not in around]
        tried = [*filter(self._can_be_kept, reversed(computing))]
        return smallest(tried, lambda names: helps([*self.keep, *names])), tried

    def _tried(self, low, name, is_backward):
        """Return modules that help in fp32 if the flagged one cannot be kept there, or if none is flagged.

        Autocast cannot be turned off for the model's own `forward` or the loss function, but both compute in fp32 on
        fp32 inputs. A module in fp32 may fail because its inputs were rounded. An error or overflow in the backward
        pass flags no module.
        """
        wrong = ('loss', 'gradient') if is_backward else ('loss',)
        def helps(keep):
            run = self._run(keep)
            return not run.error and run.not_finite not in wrong and name not in harm(run, self.keep, self.learn.model)
        names, _ = self._helping(low, helps)
        if not names: return []
        helped = f' (keeping {some(map(named, names))} in fp32 prevents this)'
        if name in self.reasons: self.reasons[name] += helped
        else: self.reasons |= dict.fromkeys(names, f'in {self.kind.name} {_NOT_FINITE}{helped}')
        return names

    def _nothing_helps(self, low):
        reason = some(self.reasons.values()) or low.error or _NOT_FINITE
        if low.error: return self._say('cannot run', reason)
        reason += ', and no module in fp32 changes that'
        if self.reasons.keys() - self.modules.keys() or ROOT in self.reasons:
            reason += f'. Compute it in fp32: inside {NO_AUTOCAST}, on `.float()` inputs'
        return self._say('do not use', reason)

    # -- nothing is flagged any more

    def _scales(self, low):
        "Return the range of loss scales, by what was computed and tried, and where to start if the first is outside."
        is_trained = any(m.grad for m in low.reference.modules.values())         # not in evaluation
        if not is_trained or not self.kind.scales_loss or self.sample.is_cut: return None, None
        least, most = loss_scales(low)
        most = self.scale if self.scale < self.first_scale else max(most, self.scale)
        least = min(least, most)
        if least <= self.first_scale <= most / CLOSE: return (least, most), None
        scale = max(least, most / MARGIN)
        return (least, most), int(scale) if scale >= 1 else scale

    def _distance(self, keep, scale):
        "Return how far the precision moves the mean gradient; its `ratio` is nan if that is unknown."
        if not self.batches: return GradientDistance(math.nan)
        self.before_run()
        try: distance = gradient_distance(self.learn, self.batches, self.kind, keep, scale)
        except Exception as e: distance = GradientDistance(math.nan, error=first_line(e))
        self.distance = self.distance or distance
        return distance

    def _conclude(self, low, scales, init_scale, ratio):
        errors = [m.error for m in low.modules.values() if m.error > 0]
        why = f'no module has an error above {max(errors):.2%}' if errors else 'nothing was flagged'
        verdict = 'safe with loss scaling' if scales and scales[0] > 1 else 'safe so far'
        if self.reasons: verdict, why = 'keep modules in fp32', some(dict.fromkeys(self.reasons.values()), '; ')
        if scales:
            margin = f', and {init_scale:,.9g} leaves a margin' if init_scale and init_scale < scales[1] else ''
            why += f'; loss scales from {scales[0]:,.9g} to {scales[1]:,.9g} work{margin}'
        names, moves = self._moved(ratio, low, init_scale or self.first_scale)
        modules = [n for n in [*self.keep, *names] if n not in self.kept]
        following = str(advised(self.learn, self.kind, modules, init_scale))
        if ratio >= _FAR:
            verdict = 'gradient differs'
            if not names: following = f"learn.compare_precision('{self.kind.name}')"
        return self._say(verdict, why + moves, call=following, modules=modules, scale_range=scales,
                         init_scale=init_scale, error=prediction_error(low))

    def _moved(self, ratio, low, scale): # `ratio`: nan if unknown
        "Return the modules that bring a mean gradient near to that in fp32, and how far it is, for the reason."
        if math.isnan(ratio): return [], ''
        moves = f'; rounding shifts the mean gradient by {ratio:.2g} standard errors ({_FAR} or more may matter)'
        if ratio < _FAR: return [], moves
        if ratio == math.inf: moves = '; gradients of some batches are finite only in fp32'
        names, tried = self._helping(low, lambda keep: self._distance(keep, scale).ratio < _NEAR)
        helps = some(map(named, names)) or 'no module that was tried'
        if len(names) > 1 and names == tried: names, helps = [], 'only all modules'
        self.reasons |= dict.fromkeys(names, '')
        return names, (f'{moves}; with {helps} in fp32, it is below {_NEAR}. This is a warning sign, not a proof: '
                       'some such models train as well as in fp32')


def smallest(names: list[str], helps: Callable) -> list[str]:
    "Return few of `names` that still help, by bisection; [] if none do."
    if not names or not helps(names): return []
    half = len(names) // 2
    parts = (smallest(part, helps) for part in (names[:half], names[half:]) if half)
    return next(filter(None, parts), names)
