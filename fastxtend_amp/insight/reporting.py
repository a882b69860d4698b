"`Learner.precision_report`: whether a model trains in low precision, which modules do not, and what to do."
import math, re, time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice

import pandas as pd
import torch
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastcore.basics import patch

from ..devices.cuda_rules import cuda_rules
from ..learners import training_device
from ..messages import check_argument, check_integer, first_line
from ..precisions import PRECISIONS, AMPMode, Precision, fastest_native
from ..tensors import map_tensors
from .candidates import advised, call, own_precision, precisions_named
from .copied_callbacks import note_of_left_out
from .copies import check_above_0, check_learner, loader_like, no_batch
from .gradient import N_BATCHES, GradientDistance, gradient_distance
from .judge import Judge, not_fp32, wrong_in_fp32
from .progress import progress_bar
from .random_states import random_state_kept
from .recorder import LOSS, Trace
from .report import Constant, PrecisionReport, Row
from .tensors import n_items, readable, tensors
from .trace import trace
from .values import largest_value, rounded
from .verdict import Verdict, named, some

EMULATED_WORK = 5e9    # in fp32, about a second; the same work may take a minute in an emulated precision
# In errors of PyTorch, where it lacks a CPU's kernel that CUDA may have. No FFT is in bf16.
_NO_KERNEL = re.compile('not implemented for|Unsupported dtype Half')
_LARGE = 1e3           # inputs from which a note says that they are
_GROWS = 1.5           # from layer to layer
_DETERMINISTIC = 1e-3  # relative difference of losses, below that of most models on a GPU


@patch
def precision_report(self: Learner,
    precisions: str | AMPMode | Iterable[str | AMPMode] = ('bf16', 'fp16'), # One or more of 'bf16', 'fp16', 'fp8'
    n_batches: int = 1, # Number of batches to look at; gradients are compared on up to 6
    dl: DataLoader | None = None, # Source of the batches, fastai's or PyTorch's; `learn.dls.train` if None
    max_seconds: float = 60., # Time after which no further run starts; precisions without a verdict get 'not known'
    device: str | torch.device | None = None, # 'cuda' for CUDA's autocast rules on a CPU; the learner's device if None
) -> PrecisionReport: # A `PrecisionReport`: `verdicts`, `table`, `fp32_modules`, `plot()`
    """Report whether the model trains in low precision, and which modules have to stay in fp32.

    Runs a few batches through copies of the learner, in fp32 and in each precision, and compares every module. A module
    is flagged if it fails, overflows, comes within a factor of 4 of the maximum, or has an error above 10%. Flagged
    modules are kept in fp32 and the batches are re-run until nothing is flagged; then the mean gradient is compared
    with fp32.

    The verdict holds for these batches and weights: call it again after some training. `device='cuda'` applies CUDA's
    autocast rules on a CPU; the kernels are those of the CPU. A compiled model runs uncompiled. The learner is not
    modified. In distributed runs each process makes its own report.

    Raises:

    - `ValueError` if `precisions` has another precision, or another argument is out of range
    - `ValueError` if a parameter is sharded (FSDP), NaN or inf, or if all are frozen
    - `ValueError` if the learner cannot be copied
    - `ValueError` if there is no batch
    - `RuntimeError` if it is called inside a fit
    - any error of the model in fp32
    """
    asked = precisions_named(precisions)
    if not asked or any(not cls.dtype for cls in asked):
        raise ValueError(f"precisions={precisions!r} cannot be used: give 'bf16', 'fp16', 'fp8', or a list of these.")
    check_above_0(max_seconds=max_seconds)
    check_integer(1, n_batches=n_batches)
    check_argument('dl', dl, lambda dl: dl is None or hasattr(dl, '__iter__'), 'a DataLoader or another iterable')
    own = training_device(self).type
    kind = own if device is None else str(device).partition(':')[0]
    simulated = own != kind
    if simulated and (own, kind) != ('cpu', 'cuda'):
        raise ValueError(f'device={device!r} cannot be used: this learner trains on {own}.\nLeave it out to report on '
                         "that device. On a CPU, device='cuda' applies CUDA's autocast rules.")
    check_learner(self, 'precision_report', dl)
    dl = self.dls.train if dl is None else dl
    with random_state_kept(), cuda_rules() if simulated else nullcontext(), progress_bar(self, max_seconds) as tick:
        with random_state_kept(): drawn = [*islice(loader_like(dl), max(n_batches, N_BATCHES))]
        if not drawn: raise no_batch('precision_report', dl)     # of a loader that gives its batches once
        return _Report(self, max_seconds, simulated, tick, drawn, n_batches).on(asked)


class _NotKnown(Exception):
    "The reason why no verdict can be reached, and the call that may reach it."


class _FiniteOnlyInFp32(Exception):
    "The batch that has shown a gradient which is finite only in fp32, while modules were judged on others."


@dataclass
class _Sample:
    "Batches that modules are judged on."
    batches: list
    fp32: Trace
    wrong: str                                                   # in fp32 as well; '' if nothing is
    is_cut: bool = False                                         # whether they have only the first of their items


@dataclass
class _Report:
    "The work behind one report."
    learn: Learner
    max_seconds: float
    simulated: bool                                              # whether a CPU follows CUDA's autocast rules
    tick: Callable                                               # updates the progress bar
    drawn: list                                                  # batches for gradients
    n_batches: int                                               # the first of them, for modules

    def __post_init__(self):
        self.until = time.monotonic() + self.max_seconds
        self.device = training_device(self.learn)
        self.low = dict[type[Precision], Trace]()                # the first that completed in each precision
        self.gradients = dict[str, GradientDistance]()           # the first of each precision
        self.not_compared = ''                                   # why not all were
        self.constants = dict[tuple, None]()                     # that are lost

    def on(self, kinds: list[type[Precision]]) -> PrecisionReport:
        self.emulated = [k.name for k in kinds if k.support(self.device).status == 'emulated']
        batches = self.drawn[:self.n_batches]
        try: self.whole = self._look(batches)
        except Exception as e:
            if all(trace(self.learn, batches, k).error for k in kinds): raise
            why = f'the model runs only in 16 bits, so it cannot be compared with fp32: {first_line(e)}'
            self.whole = _Sample(batches, Trace(), why)
        wrong = self.whole.wrong
        verdicts = {k.name: Verdict(k.name, 'not known', wrong) if wrong else self._verdict(k) for k in kinds}
        if not wrong: self._call_another(verdicts)
        for name, v in verdicts.items():
            if name in self.emulated and not self.simulated and f'.to_{name}(' in v.call:
                v.reason += f'; train where {name} is native, as this device emulates it'
        flagged = [n for v in verdicts.values() for n in v.flagged]
        constants = [Constant(name, line, operator, x, rounded(x, torch.float16), rounded(x, torch.bfloat16),
                              name in flagged) for name, line, operator, x in self.constants]
        return PrecisionReport(pd.DataFrame(self._rows(verdicts), columns=Row._fields), verdicts,
                               [*self._causes(flagged), *self._notes(verdicts), *note_of_left_out(self.learn)],
                               pd.DataFrame(constants, columns=Constant._fields))

    # -- what is run

    def _look(self, batches, is_cut=False):
        "Run batches in fp32."
        fp32 = trace(self.learn, batches)
        return _Sample(batches, fp32, wrong_in_fp32(fp32, batches), is_cut)

    @cached_property
    def cut(self) -> _Sample: # The whole one where that is little work, and where the model needs whole batches
        "The first items of each batch, for emulated precisions."
        n = n_items(self.whole.batches[0])
        few = max(2, int(n * EMULATED_WORK / max(self.whole.fp32.work, 1)))      # batch normalization needs two
        if few >= n: return self.whole
        with suppress(Exception):
            batches = map_tensors(lambda t: t[:few] if t.shape[:1] == (n,) else t, self.whole.batches)
            if not (sample := self._look(batches, is_cut=True)).wrong: return sample
        return self.whole

    def _verdict(self, kind):
        status, why = kind.support(self.device)
        if status == 'unsupported': return Verdict(kind.name, 'cannot run', why)
        scale = own_precision(self.learn).state_dict().get('scale') or advised(self.learn, kind).first_scale
        sample = self.cut if kind.name in self.emulated else self.whole
        while not sample.wrong:
            run, distance = partial(self._run, kind, sample), partial(self._distance, kind, sample)
            try: return Judge(self.learn, kind, run, scale, distance, sample.is_cut).verdict()
            except _NotKnown as e: return Verdict(kind.name, 'not known', *e.args)
            except _FiniteOnlyInFp32 as e: sample = self._look([*sample.batches, *e.args])
            self.low.pop(kind, None)
        return Verdict(kind.name, 'not known', sample.wrong)

    def _check_time(self, kind):
        if time.monotonic() > self.until:
            raise _NotKnown(f'the time limit was reached, `max_seconds={self.max_seconds:g}`',
                            f"learn.precision_report('{kind.name}', max_seconds={10 * self.max_seconds:g})")

    def _run(self, kind, sample, keep, scale):
        self._check_time(kind)
        self.tick(kind.name)
        found = trace(self.learn, sample.batches, kind, keep, scale, fp32=sample.fp32)
        for s in found.seen.values():
            self.constants |= {(s.name, *constant): None for constant in s.constants}
        if self.simulated and _NO_KERNEL.search(found.error):
            raise _NotKnown(f'this CPU has no {kind.name} kernel for {named(found.failed_in)}, '
                            f'which CUDA may have: {found.error}')
        if not found.error: self.low.setdefault(kind, found)
        return found

    def _distance(self, kind, sample, keep, scale):
        if sample.is_cut: return math.nan                        # of few items it says little
        def in_time():
            for batch in self.drawn[:N_BATCHES]:
                self._check_time(kind)
                yield batch
        self.tick(f'{kind.name}, gradients')
        try: found = gradient_distance(self.learn, in_time(), kind, keep, scale)
        except _NotKnown: raise
        except Exception as e:
            self.not_compared = f'{kind.name}: {first_line(e)}'
            return math.nan
        self.gradients.setdefault(kind.name, found)
        for i in found.lost:
            if not any(self.drawn[i] is batch for batch in sample.batches): raise _FiniteOnlyInFp32(self.drawn[i])
        return found.ratio

    def _call_another(self, verdicts):
        "Give verdicts without a call that of the fastest precision that works."
        failed = [m for m, v in verdicts.items() if not v.call]
        left = (PRECISIONS[name] for name in ('bf16', 'fp16') if name not in failed)
        other = next(left, Precision) if self.simulated else fastest_native(self.device, failed)
        made = verdicts[other.name].call if other.name in verdicts else call(self.learn, advised(self.learn, other))
        for m in failed: verdicts[m].call = made

    # -- what is reported

    def _rows(self, verdicts):
        for kind, low in self.low.items():
            for s in sorted(low.seen.values(), key=lambda s: s.name == LOSS):   # modules of a validation may follow it
                fp32, is_flagged = low.fp32.seen.get(s.name, s), s.name in verdicts[kind.name].flagged
                if not (fp32.largest or is_flagged): continue    # it computes nothing
                headroom = torch.finfo(kind.dtype).max / s.half if s.half else math.inf
                if s.is_after and s.is_half and not s.failed: headroom = math.nan
                yield Row(kind.name, s.name, s.type, flagged=is_flagged, headroom=headroom,
                          format=kind.name if s.is_half else 'fp32',
                          largest=fp32.largest or s.largest,
                          error=math.inf if s.failed else s.error,
                          grad=fp32.grad or math.nan,
                          underflow=max(s.n_zeros - fp32.n_zeros, 0) / max(fp32.n_grads, 1))

    def _causes(self, flagged):
        "Describe inputs that are large, and values that grow from layer to layer of a sequence up to a flagged one."
        sizes = (largest_value(t) for b in self.whole.batches for t in readable(tensors(b)[:-1]))
        largest = max(sizes, default=0.)
        if flagged and largest > _LARGE: yield f'The inputs reach {largest:,.3g}. Normalize them first.'
        notes, runs = {}, {}
        for n, s in self.whole.fp32.seen.items():
            parent, _, number = n.rpartition('.')
            if not number.isdigit() or not s.largest: continue   # it computes nothing
            run = runs.setdefault(parent, [])
            if run and s.largest < _GROWS * run[-1].largest: run.clear()
            run.append(s)
            if len(run) > 3 and n in flagged:
                rate = (s.largest / run[0].largest) ** (1 / (len(run) - 1))
                notes[parent] = f'Values grow {rate:.2g}x a layer from `{run[1].name}` on.'
        yield from notes.values()

    def _notes(self, verdicts):
        "Say how far predictions are from those in fp32, and what was looked at."
        fp32 = self.whole.fp32
        errors = {v.precision: v.error for v in verdicts.values() if v.error >= 0}
        nearest = f'; {min(errors, key=errors.get)} is nearer' if len(errors) > 1 else ''
        said = ', '.join(f'{_percent(error)} in {name}' for name, error in errors.items())
        if errors: yield f'Predictions differ from those in fp32 by {said}{nearest}.'
        if own := not_fp32(fp32): yield f'The reference is not fp32: {own}.'
        if fp32.unseen:
            yield ('Inside a transform (vmap, forward-mode AD) values cannot be read. Not compared with fp32: '
                   f'{some(map(named, fp32.unseen))}.')
        for kind in self.low:
            if not (layers := advised(self.learn, kind).rounding(self.learn.model)): continue
            names = some(map(named, layers))
            yield f'{kind.name}: the rounding of {names} was simulated; no {kind.name.upper()} kernel was run.'
        yield from self._looked_at()
        for name, found in self.gradients.items():
            if not found.lost: continue
            yield (f'{name}: the gradients of {found.n} of {found.n + len(found.lost)} batches were finite at first; '
                   'modules were judged on one of the other batches as well.')
        losses = next((found.losses[:1] for found in self.gradients.values()), [])
        for loss, again in zip(fp32.losses, losses):
            if abs(loss - again) > _DETERMINISTIC * abs(loss):
                yield (f'The model is not deterministic: two runs of one batch in fp32 have losses of {loss:.4g} and '
                       f'{again:.4g}. All figures here include such differences.')
        if self.simulated:
            yield ("Computed on this CPU with CUDA's autocast rules. GPU kernels were not run; they may round "
                   'differently or be missing.')
        if self.not_compared: yield f'Not all gradients were compared with fp32: {self.not_compared}.'

    def _looked_at(self):
        n, whole = self.n_batches, n_items(self.drawn[0])
        n_gradients = max((found.n for found in self.gradients.values()), default=0)
        batches = '1 batch' if n == 1 else f'{n:,} batches'
        yield (f'Looked at {batches} for the modules and {n_gradients} for the gradient, of {whole:,} samples each. '
               'Other batches (`n_batches`) and later weights may flag other modules.')
        if self.whole.wrong or not self.emulated or not self.cut.is_cut: return
        yield (f'To save time, looked at {n_items(self.cut.batches[0]):,} of these samples and at no gradients in '
               f'{" and ".join(self.emulated)}, which this device emulates.')


def _percent(x): return f'{100 * x:.2g}%'
