"`Learner.precision_report`: whether a model trains in low precision, which modules do not, and what to do."
import math, re, time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice

import pandas as pd
import torch
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.torch_core import find_bs
from fastcore.basics import patch

from ..devices.cuda_rules import cuda_rules
from ..learners import training_device
from ..messages import check_integer, first_line
from ..precisions import PRECISIONS, AMPMode, Precision, fastest_native
from ..precisions.fp16 import FP16
from ..tensors import HALF, map_tensors
from .candidates import advised, call, own_precision, precisions_named
from .copied_callbacks import left_out, note_of_left_out
from .copies import check_above_0, check_learner, loader_like
from .gradient import N_BATCHES, gradient_distance
from .operators import largest_value, rounded
from .progress import progress_bar
from .random_states import random_state_kept
from .recorder import LOSS, Trace
from .shown import Shown
from .tensors import readable, tensors
from .trace import trace
from .verdict import Judge, Verdict, named, some, wrong_in_fp32

EMULATED_TIME = 1.     # CPU seconds in fp32; the same work may take a minute in an emulated precision
# In errors of PyTorch, where it lacks a CPU's kernel that CUDA may have. No FFT is in bf16.
_NO_KERNEL = re.compile('not implemented for|Unsupported dtype Half')
_COLUMNS = ['precision', 'module', 'type', 'format', 'largest', 'headroom', 'error', 'grad', 'underflow', 'flagged']
_CONSTANTS = ['module', 'line', 'operator', 'constant', 'fp16', 'bf16', 'flagged']
_LARGE = 1e3           # inputs from which a note says that they are
_GROWS = 1.5           # from layer to layer


@dataclass(repr=False, eq=False)
class PrecisionReport(Shown):
    """The result of `Learner.precision_report`.

    `table` has one row per precision and module, in execution order, of the first run without an error. In that run,
    only your own `fp32_modules`, and modules that raise an error in 16 bits, compute in fp32.

    | column of `table` | meaning | unit |
    |---|---|---|
    | `precision` | the precision | its name, such as 'bf16' |
    | `module` | '(model)' is the model's own `forward` | name |
    | `type` | class of the module | name |
    | `format` | `precision`, or 'fp32' if no result is 16-bit; `headroom` is then inf | name |
    | `largest` | largest absolute value that the module computes, in fp32 | value |
    | `headroom` | its largest number divided by the largest 16-bit result or input; nan if NaN came in | ratio |
    | `error` | relative error of its own arithmetic, on the inputs it got; inf on overflow, nan if unknown | ratio |
    | `grad` | largest absolute gradient of its outputs and parameters, in fp32 without loss scaling | value |
    | `underflow` | share of these gradients that are 0 in the precision, with the loss scale, but not in fp32 | ratio |
    | `flagged` | whether the module is flagged | bool |

    Columns of `constants`: `module`, `line` ('norm.py:33'), `operator`, `constant`, its values in `fp16` and `bf16`,
    `flagged`.

    `largest` ignores likely attention masks: outlying large negative values, and tensors of one or two distinct values.
    """
    table: pd.DataFrame # One row per precision and module
    verdicts: dict[str, Verdict] # By precision
    notes: list[str] # Causes besides modules, what was looked at, and what was left out
    constants: pd.DataFrame # One row per constant in the code that becomes 0, 1, -1 or infinity in 16 bits

    @property
    def fp32_modules(self) -> list[str]:
        "All modules that the verdicts keep in fp32, for `learn.to_amp(fp32_modules=...)`."
        return [*dict.fromkeys(m for v in self.verdicts.values() for m in v.modules)]

    def plot(self): # The matplotlib axes
        """Plot the largest value in each module against the range of fp16; bf16 has the range of fp32.

        Flagged modules are red, those in fp32 hollow. Only flagged modules and those with the largest values are drawn,
        30 at most, in execution order.
        """
        import matplotlib.pyplot as plt
        modules = self.table.groupby('module', sort=False)[['largest', 'flagged']].max().reset_index()
        rows = modules.sort_values(['flagged', 'largest'])[-30:].sort_index()
        _, ax = plt.subplots(layout='constrained', figsize=(8, 2 + len(rows) / 5))
        colors = rows['flagged'].map({True: '#c0392b', False: '#4c566a'})
        in_fp32 = (self.table['format'] == 'fp32').groupby(self.table['module']).all()[rows['module']]
        ax.scatter(rows['largest'], rows['module'], edgecolors=colors, c=colors.where(~in_fp32.values, 'none'))
        if 'fp16' in self.verdicts:
            ax.axvline(65504, color=FP16.color, label='largest fp16 number, 65,504: inf above')
            ax.axvline(6.1e-5, color=FP16.color, ls=':', label='smallest normal fp16 number: digits lost below')
            ax.figure.legend(loc='outside lower center')
        ax.set(xscale='log', xlabel='largest absolute value in fp32; red: flagged, hollow: in fp32')
        ax.invert_yaxis()
        titles = [f'{v.precision}: {v.verdict}'.replace('modules', some(v.modules)) for v in self.verdicts.values()]
        ax.figure.suptitle('\n'.join(titles), wrap=True)
        return ax

    def _parts(self):
        yield '\n'.join([*map(str, self.verdicts.values()), *self.notes])
        for name, table in self.table.groupby('precision', sort=False):
            if self.verdicts[name].verdict.startswith('safe'): continue              # see `table`
            rows = table.sort_values(['flagged', 'error'], ascending=False)[:10]
            yield f'{name}: the {len(rows)} most critical of {len(table)} modules; `report.table` has all'
            yield rows.drop(columns=['precision', 'grad', 'underflow']).set_index('module').rename_axis(None)


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
        work = _Report(self, max_seconds, simulated, tick, drawn, drawn[:n_batches])
        return work.on(asked)


class _NotKnown(Exception):
    "The reason why no verdict can be reached, and the call that may reach it."


@dataclass
class _Report:
    "The work behind one report."
    learn: Learner
    max_seconds: float
    simulated: bool                                              # whether a CPU follows CUDA's autocast rules
    tick: Callable                                               # updates the progress bar
    drawn: list                                                  # batches for gradients
    batches: list                                                # the first of them, for modules
    n_gradients = 0                                              # batches whose gradients were compared
    not_compared = ''                                            # why not all were

    def __post_init__(self):
        self.low = dict[type[Precision], Trace]()               # the first that completed in each precision
        self.constants = dict[tuple, None]()                     # that are lost

    def on(self, kinds: list[type[Precision]]) -> PrecisionReport:
        self.until, start = time.monotonic() + self.max_seconds, time.process_time()
        device = training_device(self.learn)
        self.emulated = [k.name for k in kinds if k.support(device).status == 'emulated']
        wrong, whole = self._trace_fp32(kinds), find_bs(self.batches[0])
        seconds = max(time.process_time() - start, EMULATED_TIME)
        few = max(2, int(whole * EMULATED_TIME / seconds))       # batch normalization needs two
        self.is_cut = bool(self.emulated) and few < whole
        if self.is_cut:
            self.batches = map_tensors(lambda t: t[:few] if t.shape[:1] == (whole,) else t, self.batches)
            wrong = self._trace_fp32(kinds)
        verdicts = {k.name: Verdict(k.name, 'not known', wrong) if wrong else self._verdict(k) for k in kinds}
        for verdict in verdicts.values():
            verdict.left_out = left_out(self.learn)
            verdict.emulated = verdict.precision in self.emulated and not self.simulated
        if not wrong: self._call_another(verdicts, device)
        flagged = [n for v in verdicts.values() for n in v.flagged]
        constants = [(name, *place, number, *(rounded(number, dtype) for dtype in HALF), name in flagged)
                     for name, *place, number in self.constants]
        return PrecisionReport(pd.DataFrame(self._rows(verdicts), columns=_COLUMNS), verdicts,
                               [*self._causes(flagged), *self._notes(), *note_of_left_out(self.learn)],
                               pd.DataFrame(constants, columns=_CONSTANTS))

    def _trace_fp32(self, kinds):
        "Run the batches in fp32; return what is wrong there, '' if nothing is."
        try: self.fp32 = trace(self.learn, self.batches)
        except Exception as e:
            if all(trace(self.learn, self.batches, k).error for k in kinds): raise
            self.fp32 = Trace()
            return f'the model runs only in 16 bits, so it cannot be compared with fp32: {first_line(e)}'
        return wrong_in_fp32(self.fp32, self.batches)

    def _verdict(self, kind):
        status, why = kind.support(training_device(self.learn))
        if status == 'unsupported': return Verdict(kind.name, 'cannot run', why)
        scale = own_precision(self.learn).state_dict().get('scale') or advised(self.learn, kind).first_scale
        run, distance = partial(self._run, kind), partial(self._distance, kind)
        try: return Judge(self.learn, kind, run, scale, distance, self.is_cut and kind.name in self.emulated).verdict()
        except _NotKnown as e: return Verdict(kind.name, 'not known', *e.args)

    def _call_another(self, verdicts, device):
        "Give verdicts without a call that of the fastest precision that works."
        failed = [m for m, v in verdicts.items() if not v.call]
        left = (PRECISIONS[name] for name in ('bf16', 'fp16') if name not in failed)
        other = next(left, Precision) if self.simulated else fastest_native(device, failed)
        made = verdicts[other.name].call if other.name in verdicts else call(self.learn, advised(self.learn, other))
        for m in failed: verdicts[m].call = made

    def _run(self, kind, keep, scale):
        if time.monotonic() > self.until:
            raise _NotKnown(f'the time limit was reached, `max_seconds={self.max_seconds:g}`',
                            f"learn.precision_report('{kind.name}', max_seconds={10 * self.max_seconds:g})")
        self.tick(kind.name)
        found = trace(self.learn, self.batches, kind, keep, scale, fp32=self.fp32)
        for s in found.seen.values():
            self.constants |= {(s.name, *constant): None for constant in s.constants}
        if self.simulated and _NO_KERNEL.search(found.error):
            raise _NotKnown(f'this CPU has no {kind.name} kernel for {named(found.failed_in)}, '
                            f'which CUDA may have: {found.error}')
        if not found.error: self.low.setdefault(kind, found)
        return found

    def _distance(self, kind, keep, scale):
        if self.is_cut and kind.name in self.emulated: return math.nan        # of few samples it says little
        self.tick(f'{kind.name}, gradients')
        try:
            distance, self.n_gradients = gradient_distance(self.learn, self.drawn, kind, keep, scale, self.until)
            return distance
        except Exception as e: self.not_compared = f'{kind.name}: {first_line(e)}'
        return math.nan

    def _rows(self, verdicts):
        for kind, low in self.low.items():
            for s in sorted(low.seen.values(), key=lambda s: s.name == LOSS):   # modules of a validation may follow it
                fp32, is_flagged = self.fp32.seen.get(s.name, s), s.name in verdicts[kind.name].flagged
                if not (fp32.largest or is_flagged): continue    # it computes nothing
                headroom = torch.finfo(kind.dtype).max / s.half if s.half else math.inf
                if s.is_after and s.is_half and not s.failed: headroom = math.nan
                error = math.inf if s.failed else s.error
                underflow = max(s.n_zeros - fp32.n_zeros, 0) / max(fp32.n_grads, 1)
                dtype = kind.name if s.is_half else 'fp32'
                yield (kind.name, s.name, s.type, dtype, fp32.largest or s.largest, headroom, error,
                       fp32.grad or math.nan, underflow, is_flagged)

    def _causes(self, flagged):
        "Describe inputs that are large, and values that grow from layer to layer of a sequence up to a flagged one."
        sizes = (largest_value(t) for b in self.batches for t in readable(tensors(b)[:-1]))
        largest = max(sizes, default=0.)
        if flagged and largest > _LARGE: yield f'The inputs reach {largest:,.3g}. Normalize them first.'
        notes, runs = {}, {}
        for n, s in self.fp32.seen.items():
            parent, _, number = n.rpartition('.')
            if not number.isdigit(): continue
            run = runs.setdefault(parent, [])
            if run and s.largest < _GROWS * run[-1].largest: run.clear()
            run.append(s)
            if len(run) > 3 and n in flagged:
                rate = (s.largest / run[0].largest) ** (1 / (len(run) - 1))
                notes[parent] = f'Values grow {rate:.2g}x a layer from `{run[1].name}` on.'
        yield from notes.values()

    def _notes(self):
        "Say what was looked at."
        for kind in self.low:
            if not (layers := advised(self.learn, kind).rounding(self.learn.model)): continue
            names = some(map(named, layers))
            yield f'{kind.name}: the rounding of {names} was simulated; no {kind.name.upper()} kernel was run.'
        few, whole = find_bs(self.batches[0]), find_bs(self.drawn[0])
        n, names = len(self.batches), ' and '.join(self.emulated)
        batches = f'{n:,} batch{"es" * (n > 1)}'
        what = f'Looked at {batches} for the modules and {self.n_gradients} for the gradient, of {few:,} samples each'
        if self.is_cut:
            what = f'To save time, looked at {few:,} of {whole:,} samples of {batches}, and at no gradients in {names}'
        yield f'{what}. Other batches (`n_batches`) and later weights may flag other modules.'
        if self.simulated:
            yield ("Computed on this CPU with CUDA's autocast rules. GPU kernels were not run; they may round "
                   'differently or be missing.')
        if self.not_compared: yield f'Not all gradients were compared with fp32: {self.not_compared}.'
