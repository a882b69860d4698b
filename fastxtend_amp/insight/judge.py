"The search for a verdict: what to keep in fp32 and the loss scale, tried before they are recommended."
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fastcore.basics import first, noop

from ..messages import first_line
from ..precisions import Precision
from ..precisions.matching import ROOT, covers, qualified_names
from ..tensors import FP16_NORMAL, FP16_SMALLEST
from .choices import Choice
from .display import LOSS, named, some
from .evidence import CLOSE, MARGIN, NO_AUTOCAST, harm, loss_scales, prediction_error
from .gradient import GradientDistance, gradient_distance
from .recording import Recording
from .report_result import Verdict
from .sample import Sample
from .search import few_that_help

_NEAR = .25             # distance of the mean gradient that modules kept in fp32 should reach
_FAR = .5               # distance that matters, unless it is spread over many modules
_CLEAR = 5.             # distance that matters even then; MobileNets have up to 2, and train
_FEW = 4                # modules that may be kept in fp32 for it
_NOT_FINITE = 'the loss or a gradient is not finite'


class OutOfTime(Exception):
    "The time limit was reached: words for it, and the call that gives more time."


@dataclass
class Judge:
    """The search for the verdict on a precision.

        until there is a verdict:
            run the batches in the precision
            flag modules that raise an error, overflow or round too much
            if a module is flagged, or the run failed:
                lower the loss scale, or keep modules in fp32, and run again
                if there is nothing left to try: 'do not use', or after an error 'cannot run';
                    but go on if all is finite, and values are only close to the maximum
            find out which loss scales work
            compare the mean gradient of several batches with that in fp32
            if no other batch has a gradient that is finite only in fp32: 'safe so far', or what else was found
            begin again, with one of these batches as well

    At the time limit the verdict is 'not known', with what was found until then.

    For example, of a model whose attention overflows in fp16:

        run 1, nothing kept in fp32    the loss is NaN; `harm` flags 'attn', with values of 2.42e+06
        run 2, 'attn' kept in fp32     all is finite; scales up to 65,536 work, and 4,096 leaves a margin
        6 batches, 'attn', 4,096       the mean gradient is 0.0006 standard errors from that in fp32
        verdict                        keep modules in fp32: `to_fp16(init_scale=4096, fp32_modules=['attn'])`
    """
    cls: type[Precision]
    sample: Sample
    present_scale: float # The learner's loss scale
    batches: Sequence = () # Batches whose gradients are compared; if empty, the distance is unknown
    before_run: Callable = noop # Called with the name of the precision, and what is unknown; may raise `OutOfTime`

    def __post_init__(self):
        self.learn = self.sample.learn
        self.modules = dict(qualified_names(self.learn.model))
        self.distance: GradientDistance | None = None            # as measured first, for the notes
        self.sentences = list[str]()                             # the reason of the verdict
        self._begin(self.sample)

    def _begin(self, sample):
        self.sample, self.scale = sample, self.present_scale
        self.keep = list[str]()                                  # modules in fp32, besides those of the user
        self.reasons = dict[str, str]()                          # why a module is flagged, by its name
        self.runs = list[Recording]()

    def verdict(self) -> Verdict: # Without `next` if another precision has to be used
        "Search until nothing is flagged, nothing helps, or the time ends."
        try: return self._search()
        except OutOfTime as e:
            words, call = e.args
            self.sentences.append(words)
            return self._verdict('not known', next=call, modules=self.keep)

    def _search(self):
        while not self.sample.fault:
            run = self._run(self.keep)
            harmed = harm(run)
            for name, why in harmed.items(): self.reasons.setdefault(name, why)
            self.sentences = [self._about_modules(run)]
            if harmed or run.raised or run.not_finite:
                if self._try_next(run, harmed): continue
                # Values that are only close to the maximum, and constants that are lost, may do no harm.
                is_harmless = not (run.raised or run.not_finite == 'loss' or harm(run, certain=True))
                if is_harmless and self._lower_scale(run): continue
                if run.not_finite or not is_harmless: return self._nothing_helps(run)
            scales, init_scale = self._scale_range(run)
            distance, seen = self._distance(self.keep, init_scale), self.sample.batches
            other = [batch for batch in distance.only_in_fp32 if all(batch is not s for s in seen)]
            if distance.raised and not other:
                self.sentences = [f'the model does not run in {self.cls.name}: {distance.raised}']
                return self._verdict('cannot run')
            ratio = distance.ratio                               # nan if it is unknown
            if ratio == math.inf: self.sentences.append('gradients of some batches are finite only in fp32')
            elif ratio >= 0:
                self.sentences.append(f'rounding shifts the mean gradient by {ratio:.2g} standard errors ({_FAR} or '
                                      'more may matter)')
            if not other: return self._conclude(run, scales, init_scale, ratio)
            self._begin(replace(self.sample, batches=[*seen, other[0]]))
        self.sentences = [self.sample.fault]
        return self._verdict('not known')

    def _run(self, keep):
        self.before_run(self.cls.name, 'it was known what helps' if self.runs else 'modules were looked at')
        precision = Choice.for_learner(self.learn, self.cls, keep, self.scale).precision
        self.runs.append(self.sample.run(precision))
        return self.runs[-1]

    def _about_modules(self, run):
        "Say why modules are flagged, why the run failed, or that all is well."
        if self.reasons: return some(dict.fromkeys(self.reasons.values()), '; ')
        if run.raised or run.not_finite: return run.raised or _NOT_FINITE
        errors = [m.error for m in run.modules.values() if m.error > 0 and m.name != LOSS]
        return f'no module has an error above {max(errors):.2%}' if errors else 'nothing was flagged'

    @property
    def first_run(self) -> Recording | None:
        "The first run that no error ended; None if there is none."
        return first(run for run in self.runs if not run.raised)

    def _verdict(self, verdict, **fields):
        reason = '; '.join(self.sentences)
        return Verdict(self.cls.name, verdict, reason, flagged=[*self.reasons], **fields)

    # -- something is flagged, or the run failed

    def _try_next(self, run, harmed):
        "Lower the loss scale, or else keep flagged modules in fp32, or else any that help; False if nothing is left."
        only_gradients = run.not_finite == 'gradient' and not (harmed or run.raised)
        if only_gradients and self._lower_scale(run): return True
        new = self._can_be_kept(harmed, run) or self._found_by_trial(run, first(harmed), only_gradients)
        if new and only_gradients: self.scale = self.present_scale    # it was not the scale that failed
        self._keep(new)
        return bool(new)

    def _keep(self, names):
        "Keep these modules in fp32 as well. A name includes the modules inside."
        names = [*self.keep, *names]
        self.keep = [name for name in names if not covers({*names} - {name}, name)]

    def _lower_scale(self, run):
        "If gradients overflow, lower the loss scale, as far as they do not underflow; return whether it was lowered."
        if not (self.cls.scales_loss and run.not_finite): return False
        least, most = loss_scales(run)
        # Where the backward pass begins: all others follow from these gradients, which must not lose digits.
        gradients = [m.reference.grad for m in run.modules.values() if m.reference.grad]
        start = gradients[-1] if gradients else 1.
        lower = most if most < self.scale else self.scale / MARGIN
        lower = max(lower, least, FP16_SMALLEST, FP16_NORMAL / start)
        if lower >= self.scale: return False
        self.scale = lower
        return True

    def _can_be_kept(self, names, run):
        "Return which modules of these names could be kept in fp32 as well."
        kept = run.precision.fp32_modules or ()
        return [n for n in names if n in self.modules and n != ROOT and not covers(kept, n)]

    def _can_be_tried(self, run):
        "Return the modules that compute something and could be kept in fp32 as well: the innermost first."
        around = {n.rpartition('.')[0] for n in run.modules}     # parents of others, which may compute nothing
        computing = [n for n, m in reversed(run.modules.items()) if m.largest or n not in around]
        return self._can_be_kept(sorted(computing, key=lambda name: -name.count('.')), run)

    def _found_by_trial(self, run, name, only_gradients):
        """Return modules that help in fp32 if the flagged one cannot be kept there, or if none is flagged.

        Autocast cannot be turned off for the model's own `forward` or the loss function, but both compute in fp32 on
        fp32 inputs. A module in fp32 may fail because its inputs were rounded. An error or overflow in the backward
        pass flags no module.
        """
        def helps(names):
            trial = self._run([*self.keep, *names])
            if trial.raised or trial.not_finite == 'loss' or (trial.not_finite and only_gradients): return False
            return name not in harm(trial)

        names = few_that_help(self._can_be_tried(run), helps)
        if not names: return []
        helped = f' (keeping {some(map(named, names))} in fp32 prevents this)'
        if name: self.reasons[name] += helped
        else: self.reasons |= dict.fromkeys(names, f'in {self.cls.name} {_NOT_FINITE}{helped}')
        return names

    def _nothing_helps(self, run):
        if run.raised: return self._verdict('cannot run')
        self.sentences[0] += ', and no module in fp32 changes that'
        if self.reasons.keys() - self.modules.keys() or ROOT in self.reasons:
            self.sentences[0] += f'. Compute it in fp32: inside {NO_AUTOCAST}, on `.float()` inputs'
        return self._verdict('do not use')

    # -- nothing is flagged any more

    def _scale_range(self, run):
        "Return the range of loss scales that work, and where to start if the first one is outside or close to its end."
        if not self.cls.scales_loss or self.sample.is_small: return None, None
        least, most = loss_scales(run)
        most = self.scale if self.scale < self.present_scale else max(most, self.scale)
        least = min(least, most)
        init_scale = None
        if not least <= self.present_scale <= most / CLOSE:
            scale = max(least, most / MARGIN, FP16_SMALLEST)
            init_scale = int(scale) if scale >= 1 else scale
        margin = f', and {init_scale:,.9g} leaves a margin' if init_scale and init_scale < most else ''
        self.sentences.append(f'loss scales from {least:,.9g} to {most:,.9g} work{margin}')
        if init_scale and init_scale < 1:
            self.sentences.append('the gradients are very large, so normalize inputs, targets or the loss')
        return (least, most), init_scale

    def _distance(self, keep, init_scale):
        "Return how far the precision moves the mean gradient; its `ratio` is nan if that is unknown."
        if not self.batches: return GradientDistance(math.nan)
        self.before_run(self.cls.name, 'it was known what helps' if self.distance else 'gradients were compared')
        precision = Choice.for_learner(self.learn, self.cls, keep, init_scale or self.present_scale).precision
        try: distance = gradient_distance(self.learn, self.batches, precision)
        # Two copies may not fit into memory; the verdict on the modules stands, and a note says what is unknown.
        except Exception as e: distance = GradientDistance(math.nan, unknown=first_line(e))
        self.distance = self.distance or distance
        return distance

    def _conclude(self, run, scales, init_scale, ratio):
        "Return the verdict of a run in which nothing is flagged, with what was found on the way."
        verdict = 'safe with loss scaling' if scales and scales[0] > 1 else 'safe so far'
        if self.keep: verdict = 'keep modules in fp32'
        if ratio >= _FAR and (self._move_nearer(run, init_scale) or ratio >= _CLEAR): verdict = 'gradient differs'
        following = Choice.for_learner(self.learn, self.cls, self.keep, init_scale)
        if verdict == 'gradient differs' and not self.keep:
            following = f"learn.compare_precision('{self.cls.name}')"
        return self._verdict(verdict, next=following, modules=self.keep, scale_range=scales, init_scale=init_scale,
                             prediction_error=prediction_error(run))

    def _move_nearer(self, run, init_scale):
        "Keep modules that in fp32 bring the mean gradient near to that in fp32; return False if these are many."
        def helps(names): return self._distance([*self.keep, *names], init_scale).ratio < _NEAR
        tried = self._can_be_tried(run)
        names = few_that_help(tried, helps)
        words = (f'with {some(map(named, names))} in fp32, it is below' if names else
                 'no module that was tried in fp32 brings it below')
        if is_spread := len(names) > _FEW:
            names, words = [], 'in fp32, no small group of modules was found to bring it below'
        elif len(tried) > 1 and all(covers(names, name) for name in tried):
            names, words = [], 'only with all modules in fp32 is it below'
        self.sentences.append(f'{words} {_NEAR}. This is a warning sign, not a proof: many such models train as well '
                              'as in fp32')
        self.reasons |= dict.fromkeys(names, '')                 # they are flagged as well
        self._keep(names)
        return not is_spread
