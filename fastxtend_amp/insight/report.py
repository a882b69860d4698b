"`Learner.precision_report`: which precision a model survives, where it does not, and what to do about it."
from __future__ import annotations

import math, time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pandas as pd
import torch
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastcore.basics import patch

from ..training.callback import precision_callback
from ..training.checks import half_parameters_of
from ..common import first_line, training_device
from ..compat import is_compiled
from ..convert import map_tensors
from ..devices.cuda_rules import cuda_rules
from ..precisions.matching import ROOT, unwrapped
from ..precisions.fp32_settings import settings_note
from ..precisions.fp8 import fp8_layers
from ..precisions import AMPMode, Support, fastest_native
from .copies import check_learner, left_out, loader_like, no_batches, random_state_kept, tensors
from .precisions import color_of, precision_call
from .arguments import check_above_0, check_count, known_arguments
from .gradient import N_BATCHES, gradient_distance
from .progress import progress_bar
from .shown import Shown
from .trace import Seen, Trace, trace
from .verdict import Judge, Verdict, named, some, wrong_in_fp32

__all__ = ['PrecisionReport']

INIT_SCALE = 65536.   # the loss scale of a learner that has none yet
EMULATED_TIME = 1.    # CPU seconds in fp32: for as much work an emulated mode may take a minute
FEWEST = 2            # samples, for batch normalization
NO_KERNEL = 'not implemented for'                                # in PyTorch's error
FOR_GRADIENTS = .15   # of the time, each time that gradients are compared with those in fp32
_COLUMNS = ['mode', 'module', 'type', 'format', 'largest', 'headroom', 'error', 'grad', 'trouble']


@dataclass(repr=False, eq=False)
class PrecisionReport(Shown):
    """The findings of `Learner.precision_report`.

    `table` has a row for each mode and module that computes something itself, in order of execution. Its columns
    describe a run in which only modules that the learner keeps, or that do not run otherwise, are in fp32:

    | column | meaning | unit |
    |---|---|---|
    | `mode` | the precision | 'bf16', 'fp16' |
    | `module` | '(model)' is the model's own forward | name |
    | `type` | class of the module | name |
    | `format` | lowest precision of a result of its operators; 'fp32' also where it does not run in the mode | name |
    | `largest` | largest absolute result of the module's own operators, in fp32 | value |
    | `headroom` | the format's maximum, divided by the largest value in that format; inf in fp32 | ratio |
    | `error` | of its operators, against fp32 on the same inputs; inf where it overflows, nan after that | ratio |
    | `grad` | largest absolute gradient of outputs and own parameters, in fp32, unscaled | value |
    | `trouble` | whether the verdict names the module | bool |

    Attention masks do not count in `largest`: large negative values that are far from all others, and tensors that
    hold only one large value, or two. The `error` of comparisons and indices is the share that differs.
    """
    table: pd.DataFrame # One row for each mode and module
    verdicts: dict[str, Verdict] # By the name of the mode
    notes: list[str] # On what was looked at, and what was left out

    @property
    def fp32_modules(self) -> list[str]:
        "The modules to keep in fp32 for all modes that work then, as for `MixedPrecision(fp32_modules=...)`."
        return [*dict.fromkeys(m for v in self.verdicts.values() for m in v.modules)]

    def plot(self): # The matplotlib axes
        """Plot the largest value in each module, from first to last, against fp16's range; bf16 has that of fp32.

        Modules in trouble are red. Of many modules those to look at first are drawn.
        """
        import matplotlib.pyplot as plt
        ends = {'largest': 'max', 'headroom': 'min', 'error': 'max', 'trouble': 'max'}
        rows = _to_look_at(self.table.groupby('module', sort=False).agg(ends).reset_index(), 30).sort_index()
        _, ax = plt.subplots(layout='constrained', figsize=(8, 2 + len(rows) / 5))
        ax.scatter(rows['largest'], rows['module'], c=rows['trouble'].map({True: '#c0392b', False: '#4c566a'}))
        if 'fp16' in self.verdicts:
            for at, style, text in ((65504, '-', "fp16's ceiling, 65,504: inf above"),
                                    (6.1e-5, ':', "fp16's floor: digits lost below")):
                ax.axvline(at, color=color_of('fp16'), ls=style, label=text)
            ax.figure.legend(loc='outside lower center')
        ax.set(xscale='log', xlabel='largest absolute value (fp32); red: in trouble')
        ax.invert_yaxis()
        ax.figure.suptitle('\n'.join(f'{v.mode}: {v.verdict}' for v in self.verdicts.values()))
        return ax

    def _parts(self):
        yield '\n'.join([*map(str, self.verdicts.values()), *self.notes])
        for mode, table in self.table.groupby('mode', sort=False):
            if self.verdicts[mode].verdict.startswith('safe'): continue              # `table` has them
            rows = _to_look_at(table, 10)
            yield f'{mode}: {len(rows)} of {len(table)} modules to look at first; `report.table` has all, and more'
            yield rows.drop(columns=['mode', 'grad']).set_index('module').rename_axis(None)


def _to_look_at(table: pd.DataFrame, n: int) -> pd.DataFrame:
    "Return `n` rows: those in trouble, then those with the least headroom or largest error."
    badness = table['trouble'] * 1e3 + table['error'].fillna(0) + 1 / table['headroom']
    return table.loc[badness.sort_values(ascending=False, kind='stable').index[:n]]


@patch
@known_arguments
def precision_report(self: Learner,
    modes: str | AMPMode | Iterable[str | AMPMode] = ('bf16', 'fp16'), # The precisions to report on
    n_batches: int = 1, # How many batches to look at
    dl: DataLoader | None = None, # Gives the batches; fastai's or PyTorch's; the training set's if None
    max_seconds: float = 60., # Seconds after which the model is not run again; a verdict may then be 'not known'
    device: str | torch.device | None = None, # 'cuda' for CUDA's autocast rules on a CPU; the learner's device if None
) -> PrecisionReport: # `verdicts`, `table`, `fp32_modules`, `plot()`; shows itself in a notebook
    """Report whether the model survives low precision, and where it does not, on real batches.

    Runs batches forward and backward in copies of the learner, in its own training loop with its callbacks, in fp32 and
    in each mode, and looks into each module, the model's own `forward` and the loss function. The first batch is run
    as in validation, too, where other kernels may be called: only errors count there. Modules that do not run,
    whose values are not finite or reach a quarter of the format's maximum, or whose error is above 10 %, are kept in
    fp32, and the batches run again, until nothing is wrong. For the model's own `forward` and the loss function, which
    cannot be kept in fp32, the modules before them are tried. If a precision works then, its mean gradient over up to 6
    batches is compared with that in fp32: the reason gives how far rounding moves it, divided by how far the choice of
    batches does (`fastxtend_amp.insight.gradient`). The verdict holds for these batches and
    weights: after some training ask again. Where a mode is emulated and slow, the report takes the first samples of
    each batch alone, and says so.

    `device='cuda'` answers on a CPU for a GPU: autocast chooses the precision of each operator as it does on CUDA. The
    kernels are still those of the CPU.

    A copy has what it has in `compare_precision`, and the learner stays as it was. With several processes each reports
    by itself.

    Raises `ValueError` for an unknown mode, for another `device`, for unusable numbers, for a learner that cannot be
    copied, without batches, for parameters in half precision, sharded (FSDP), NaN or inf; `RuntimeError` inside a fit;
    and any error of the model in fp32.
    """
    asked = list(dict.fromkeys(check_modes(modes)))
    check_count('n_batches', n_batches, 1)
    check_above_0('max_seconds', max_seconds, '60')
    if dl is not None and not hasattr(dl, '__iter__'):
        raise ValueError(f'dl={dl!r} cannot be used: dl must be a DataLoader, such as `learn.dls.valid`.')
    own, kind = training_device(self).type, str(device).partition(':')[0]
    if device is not None and kind not in (own, 'cuda' if own == 'cpu' else own):
        raise ValueError(f'device={device!r} cannot be used: this learner trains on {own}. Leave it out to report on '
                         "that device; on a CPU device='cuda' reports under CUDA's autocast rules.")
    simulated = own == 'cpu' and kind == 'cuda'
    check_learner(self, 'precision_report', dl)
    if half := half_parameters_of(unwrapped(self.model)):
        raise ValueError(f"precision_report needs fp32 parameters, as mixed precision does, but {len(half)} to be "
                         f"trained are in half precision, such as '{half[0]}'. Call `learn.model.float()` first: "
                         'autocast itself casts what can run in low precision.')
    with cuda_rules() if simulated else nullcontext(), progress_bar(self, max_seconds) as tick:
        return _Report(self, max_seconds, simulated, tick).on(asked, n_batches, self.dls.train if dl is None else dl)


@dataclass(eq=False)
class _Report:
    "The traces of one report."
    learn: Learner
    max_seconds: float
    simulated: bool                                              # whether a CPU follows CUDA's autocast rules
    tick: Callable[[str], None]                                  # moves the progress bar

    def __post_init__(self):
        self.until = time.monotonic() + self.max_seconds
        self.device = training_device(self.learn)
        self.not_compared = ''                                   # why the gradients were not
        self.low: dict[AMPMode, Trace] = {}                      # the first that ran to its end

    def on(self, modes: list[AMPMode], n_batches: int, dl: DataLoader) -> PrecisionReport:
        with random_state_kept(): drawn = [*islice(loader_like(dl), max(n_batches, N_BATCHES))]
        self.batches = drawn[:n_batches]
        if not self.batches: raise no_batches('precision_report', dl)
        few = whole = n_samples(self.batches[0])
        self.fp32 = trace(self.learn, self.batches)
        if any(self._support(mode).status == 'emulated' for mode in modes):
            few = min(whole, max(FEWEST, int(whole * EMULATED_TIME / max(self.fp32.seconds, 1e-9))))
        if few < whole:
            drawn = [first_samples(b, few) for b in drawn]
            self.batches = drawn[:n_batches]
            self.fp32 = trace(self.learn, self.batches)
        self.drawn = drawn
        if wrong := wrong_in_fp32(self.fp32, self.batches):
            verdicts = {mode: Verdict(mode.value, 'not known', wrong) for mode in modes}
        else:
            verdicts = {mode: self._verdict(mode) for mode in modes}
            failed = [m for m, v in verdicts.items() if not v.call]
            other = fastest_native(self.device, failed)
            if self.simulated: other = next((m for m in (AMPMode.BF16, AMPMode.FP16) if m not in failed), None)
            call = verdicts[other].call if other in verdicts else str(precision_call(self.learn, other))
            for v in verdicts.values(): v.call = v.call or call
        rows = [self._row(mode, s, v) for mode, v in verdicts.items() if mode in self.low
                for s in self.low[mode].seen.values() if self.fp32.seen.get(s.name, s).largest or s.name in v.trouble]
        return PrecisionReport(pd.DataFrame(rows, columns=_COLUMNS), {m.value: v for m, v in verdicts.items()},
                               self._notes(few, whole))

    def _support(self, mode: AMPMode) -> Support:
        return (AMPMode.BF16 if mode is AMPMode.FP8 else mode).support(self.device)   # FP8's rounding costs little

    def _verdict(self, mode: AMPMode) -> Verdict:
        support = self._support(mode)
        if support.status == 'unsupported': return Verdict(mode.value, 'cannot run', support.why)
        cb = precision_callback(self.learn)
        if mode is AMPMode.FP8:
            spec, kept = (cb.arguments.get('modules'), cb.fp32_module_names) if cb else (None, [])
            try: self.fp8 = fp8_layers(self.learn.model, spec, kept)
            except ValueError as e: return Verdict(mode.value, 'cannot run', str(e))
        def run(keep, scale):
            if time.monotonic() > self.until: raise TimeoutError
            self.tick(mode.value)
            start = time.monotonic()
            found = trace(self.learn, self.batches, mode, keep, scale, reference=self.fp32)
            if self.simulated and NO_KERNEL in found.error:
                raise NotImplementedError(f'this CPU has no {mode.value} kernel for {named(found.failed_in or ROOT)}, '
                                          f'which CUDA may have: {found.error}')
            if not found.error: self.low.setdefault(mode, found)
            self.took = time.monotonic() - start
            return found
        def distance(keep, scale):
            self.tick(f'{mode.value}, gradients')
            share = FOR_GRADIENTS * self.max_seconds
            until = min(self.until, time.monotonic() + share)
            try:
                if self.took > share: raise TimeoutError(f'there was no time within `max_seconds={self.max_seconds:g}`')
                return gradient_distance(self.learn, self.drawn, mode, keep, scale, until)
            except Exception as e: self.not_compared = f'{mode.value}: {first_line(e)}'
            return math.nan
        try:
            return Judge(self.learn, mode, run, self.fp32, (cb and cb.scale) or INIT_SCALE, distance).verdict()
        except NotImplementedError as e: return Verdict(mode.value, 'not known', str(e))
        except TimeoutError:
            reason = f'the report ended at its time limit, `max_seconds={self.max_seconds:g}`'
            return Verdict(mode.value, 'not known', reason,
                           f"learn.precision_report('{mode.value}', max_seconds={10 * self.max_seconds:g})")

    def _row(self, mode: AMPMode, s: Seen, verdict: Verdict) -> list:
        ref = self.fp32.seen.get(s.name, s)
        error = math.inf if s.failed else s.error if s.judged else math.nan
        headroom = torch.finfo(mode.dtype).max / s.half if s.half else math.inf
        return [mode.value, s.name, s.type, mode.value if s.half else 'fp32', ref.largest, headroom, error,
                ref.grad or math.nan, s.name in verdict.trouble]

    def _notes(self, few, whole) -> list[str]:
        n = len(self.batches)
        notes = [f"Looked at {n} batch{'es' * (n > 1)} of {few} samples, with the weights as they are now: in other "
                 'batches (`n_batches`) and after some training other modules may be in trouble.']
        if emulated := [m for m in self.low if self._support(m).status == 'emulated']:
            fewer = f'; so these are the first samples of {whole}' * (few < whole)
            notes.append(f"{' and '.join(emulated)}: emulated here, which is usually slower than fp32{fewer}.")
        if unseen := {k: v for t in (self.fp32, *self.low.values()) for k, v in t.unseen.items()}:
            words = some([f'{what} in {named(name)}' for what, name in unseen.items()])
            notes.append(f'Left alone, as it cannot be looked at or compared with fp32: {words}.')
        if AMPMode.FP8 in self.low:
            notes.append(f'fp8: {some([*map(named, self.fp8)], 8)} would compute in FP8 ({len(self.fp8)} linear '
                         'layers), the rest in bf16. The report rounded as FP8 does, and ran no FP8 kernel.')
        if self.simulated:
            notes.append("Computed on this CPU under CUDA's autocast rules, which choose the precision of each "
                         "operator. A GPU's kernels, which may round differently or be missing, were not run.")
        if self.not_compared: notes.append(f'Not all gradients were compared with those in fp32: {self.not_compared}.')
        if any((t.float() % 1).any() for t in tensors(self.batches[0], floating=False)[-1:]):
            notes.append('The targets are continuous: how close predictions come to them decides how much rounding '
                         'matters. Ask again late in training.')
        if is_compiled(self.learn.model): notes.append('The compiled model was run uncompiled.')
        if settings := settings_note():
            notes.append(f'{settings}. So training in fp32, and modules kept in fp32, have errors that the report does '
                         'not know: it ran in full precision.')
        return notes + left_out(self.learn)


def n_samples(batch: Any) -> int:
    "Return the length of the first tensor that has one; 1 if there is none."
    return next((len(t) for t in tensors(batch, floating=False) if t.ndim), 1)


def first_samples(batch: Any, n: int) -> Any:
    "Return the first `n` samples of a batch; what is not as long as the batch stays whole."
    whole = n_samples(batch)
    return map_tensors(lambda t: t[:n].clone() if t.ndim and len(t) == whole else t, batch)


def check_modes(modes: str | AMPMode | Iterable[str | AMPMode]) -> list[AMPMode]:
    "Return the modes to examine."
    try:
        given = [modes] if isinstance(modes, (str, torch.dtype)) else modes
        if (found := [*map(AMPMode, given)]) and AMPMode.TF32 not in found: return found
    except (TypeError, ValueError): pass
    raise ValueError(f"modes={modes!r} cannot be used: give 'bf16', 'fp16' or 'fp8', or several; fp32 is what they "
                     'are compared with, and TF32 has its range.')
