"`Learner.precision_report`: whether a model trains in low precision, which modules do not, and what to do."
import re, time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import torch
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastcore.basics import first, patch
from fastcore.foundation import L

from ..devices.cuda_rules import cuda_rules
from ..learners import training_device
from ..messages import check_above_0, check_argument, check_integer
from ..precisions import AMPMode, Precision, find_precision
from ..tensors import map_tensors
from .batches import loader_like
from .choices import Choice, own_precision
from .display import named, progress_bar
from .gradient import N_BATCHES
from .judge import Judge, OutOfTime
from .random_states import random_state_kept
from .report_notes import notes
from .report_result import PrecisionReport, Verdict, table_of
from .requirements import check_learner, no_batch
from .sample import Sample
from .values import n_items

# Work of the fp32 run, about half a second; emulated precisions, in which it may take a minute, get fewer samples.
EMULATED_WORK = 2e9
# Words of PyTorch's error where a CPU has no kernel but CUDA may have one. (No device has an FFT in bf16.)
_NO_KERNEL = re.compile('not implemented for|Unsupported dtype Half')


@patch
def precision_report(self: Learner,
    precisions: str | AMPMode | Iterable[str | AMPMode] = ('bf16', 'fp16'), # One or more of 'bf16', 'fp16', 'fp8'
    n_batches: int = 1, # Batches to look at; gradients are compared on up to 6
    dl: DataLoader | None = None, # Source of the batches; `learn.dls.train` if None
    max_seconds: float = 60., # Approximate limit, checked between runs; later verdicts are 'not known'
    device: str | torch.device | None = None, # 'cuda' for a GPU's autocast rules on a CPU
) -> PrecisionReport: # A `PrecisionReport`: `verdicts`, `table`, `fp32_modules`, `plot()`
    """Report whether the model trains in low precision, and which modules must stay in fp32.

    Runs a few batches through copies of the learner, in fp32 and in each precision, and compares every module. A module
    is flagged if it fails, overflows, comes within a factor of 4 of the maximum, or has an error above 10%. Flagged
    modules are kept in fp32 and the batches are re-run until nothing is flagged; then the mean gradient is compared
    with fp32.

    The verdict holds for these batches and weights: call it again after some training. `device='cuda'` applies CUDA's
    autocast rules on a CPU; the kernels, and the rules in `fit`, are those of the CPU. A compiled model runs
    uncompiled. The learner's own `fp32_modules` are kept. The learner is not modified. In distributed runs each process
    makes its own report.

    Raises:

    - `ValueError` if `precisions` has another precision, or another argument is out of range
    - `ValueError` if a parameter is sharded (FSDP), float64, NaN or inf, or if all are frozen
    - `ValueError` if the learner cannot be copied
    - `ValueError` if there is no batch
    - `RuntimeError` if it is called inside a fit
    - any error of the model in fp32
    """
    classes = L(precisions).map(find_precision)
    if not classes or any(not cls.dtype for cls in classes):
        raise ValueError(f"precisions={precisions!r} cannot be used: pass 'bf16', 'fp16', 'fp8', or a list of these.")
    check_above_0(max_seconds=max_seconds)
    check_integer(1, n_batches=n_batches)
    check_argument('dl', dl, lambda dl: dl is None or hasattr(dl, '__iter__'), 'a DataLoader or another iterable')
    own = training_device(self).type
    wanted = own if device is None else str(device).partition(':')[0]
    with_cuda_rules = own != wanted
    if with_cuda_rules and (own, wanted) != ('cpu', 'cuda'):
        raise ValueError(f'device={device!r} cannot be used: the model trains on {own}.\nLeave it out to report on '
                         "that device. On a CPU, device='cuda' applies CUDA's autocast rules.")
    check_learner(self, 'precision_report', dl)
    end, source = time.monotonic() + max_seconds, self.dls.train if dl is None else dl
    rules = cuda_rules() if with_cuda_rules else nullcontext()
    with random_state_kept(), rules, progress_bar(self, max_seconds) as show:
        with random_state_kept():                                # the runs start from the state before drawing
            drawn = [*islice(loader_like(source), max(n_batches, N_BATCHES))]
        if not drawn: raise no_batch('precision_report', dl)     # of an iterator that is already used up
        sample = Sample(self, drawn[:n_batches])
        return _Reporter(self, drawn, sample, with_cuda_rules, max_seconds, end, show).report(classes)


@dataclass
class _Reporter:
    "The work behind one report."
    learn: Learner
    drawn: list # Batches whose gradients are compared
    sample: Sample # The first of these batches, on which modules are judged
    with_cuda_rules: bool # Whether a CPU follows CUDA's autocast rules
    max_seconds: float
    end: float # The end of the time limit, by `time.monotonic`
    show: Callable # Called with the name of a precision, for a progress bar

    def report(self, classes: list[type[Precision]]) -> PrecisionReport:
        "Return the report on these precisions."
        self.judges = dict[str, Judge]()
        self.verdicts = {cls.name: self._verdict(cls) for cls in classes}
        if not self.sample.fault: self._advise_another()
        table = table_of([judge.first_run for judge in self.judges.values()], self.verdicts)
        said = notes(self.learn, self.sample, self.judges, self.verdicts, self.with_cuda_rules)
        return PrecisionReport(table, self.verdicts, [*said])

    @cached_property
    def small_sample(self) -> Sample: # `sample` if that is little work, or if the model needs whole batches
        "The first items of each batch, for emulated precisions."
        batches, modules = self.sample.batches, self.sample.reference.modules.values()
        n, work = n_items(batches[0]), sum(m.work for m in modules)
        few = max(2, int(n * EMULATED_WORK / max(work, 1)))      # batch normalization needs two
        if few >= n: return self.sample
        def first_items(t): return t[:few] if t.shape[:1] == (n,) else t
        with suppress(Exception):
            small = Sample(self.learn, map_tensors(first_items, batches), is_small=True)
            if not small.fault: return small
        return self.sample

    def _verdict(self, cls):
        if self.sample.fault: return Verdict(cls.name, 'not known', self.sample.fault)
        status, why = cls.support(training_device(self.learn))
        if status == 'unsupported': return Verdict(cls.name, 'cannot run', why)
        scale = (own_precision(self.learn).state_dict().get('scale')
                 or Choice.for_learner(self.learn, cls).precision.first_scale)
        sample = self.small_sample if status == 'emulated' else self.sample
        batches = () if sample.is_small else self.drawn[:N_BATCHES]      # gradients of few items are mostly noise
        judge = self.judges[cls.name] = Judge(cls, sample, scale, batches, self._before_run)
        verdict = judge.verdict()
        is_advised = isinstance(verdict.next, Choice)
        verdict = replace(verdict, is_emulated=status == 'emulated' and is_advised and not self.with_cuda_rules)
        lacking = first(run for run in judge.runs if self.with_cuda_rules and _NO_KERNEL.search(run.raised))
        if not lacking: return verdict
        return Verdict(cls.name, 'not known', f'this CPU has no {cls.name} kernel for {named(lacking.failed_in)}, '
                       f'which CUDA may have: {lacking.raised}')

    def _before_run(self, name, unknown):
        "Show the name of a precision; raise `OutOfTime` with what is unknown if the time limit is reached."
        self.show(name)
        if time.monotonic() <= self.end: return
        rules = ", device='cuda'" if self.with_cuda_rules else ''
        raise OutOfTime(f'the time limit (`max_seconds={self.max_seconds:g}`) was reached before {unknown}',
                        f"learn.precision_report('{name}', max_seconds={10 * self.max_seconds:g}{rules})")

    def _advise_another(self):
        "Advise another precision of this report, or fp32, where a verdict has nothing next."
        verdicts = self.verdicts.values()
        works = (v.next for v in verdicts if isinstance(v.next, Choice) and not v.is_emulated)
        other = next(works, Choice(Precision()))
        self.verdicts = {v.precision: replace(v, next=v.next or other) for v in verdicts}
