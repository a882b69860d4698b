"`Learner.precision_report`: which precision a model survives, where it does not, and what to do about it."
from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import Any

import pandas as pd
import torch
from fastai.learner import Learner
from torch import nn

from ..callback import precision_callback
from ..checks import check_count, check_seconds
from ..common import first_line, random_state_kept
from ..convert import HALF, map_tensors
from ..fp32_modules import qualified_names, unwrapped
from ..mode import AMPMode, mode_support, training_device
from .advice import as_html, fastest_mode, precision_call
from .copies import check_learner, left_out, loader_like
from .progress import Progress, TimeIsUp
from .trace import LOSS, Seen, Trace, trace
from .values import largest_value, not_finite_data, tensors
from .verdict import Judge, Verdict, some

__all__ = ['PrecisionReport', 'report']

INIT_SCALE = 65536.   # the loss scale of a learner that has none yet
EMULATED_WORK = 4e9   # floating-point operations of an emulated training step; a core does about so many in a second
FEWEST = 2            # samples, for batch normalization


class PrecisionReport:
    """The findings of `Learner.precision_report`.

    `verdicts`: a `Verdict` for each mode. `fp32_modules`: names for `MixedPrecision(fp32_modules=...)`; for one mode
    alone, `verdicts[mode].modules`. `table`: a row for each mode and module, in order of execution. `worst(n)`: the
    rows to look at first. `plot()`. `notes`: what was looked at, and what was left out.

    The columns of `table` are those of a run with nothing kept in fp32:

    | column | meaning | unit |
    |---|---|---|
    | `mode` | the precision | 'bf16', 'fp16' |
    | `module` | name; '(model)' is the model's own forward | |
    | `type` | class of the module | |
    | `params` | parameters, those of modules inside too | count |
    | `output` | dtypes of the outputs in the mode | |
    | `largest` | largest absolute value in the module, in fp32: results of its own operators and outputs | value |
    | `headroom` | maximum of the mode's format over the largest value that is in that format | ratio |
    | `non-finite` | output values that are not finite where fp32 is | share, 0 to 1 |
    | `own error` | of the module's own arithmetic, from fp32 on the same inputs | relative, 1 is 100 % |
    | `total error` | of its outputs, from the model in fp32, on 4,096 evenly spaced values | relative, 1 is 100 % |
    | `grad` | largest absolute gradient of outputs and own parameters, in fp32, unscaled | value |
    | `grad lost` | non-zero gradient values that underflow to 0 in the mode without loss scaling | share, 0 to 1 |
    | `trouble` | whether the verdict names the module | bool |

    Large negative values that are far from all others, as attention masks are, count nowhere.
    """
    def __init__(self,
        table: pd.DataFrame,
        verdicts: dict[str, Verdict], # By the name of the mode
        not_called: list[str], # Modules that the batches did not reach
        notes: Iterable[str] = (), # On what was looked at, and what was left out
    ):
        self.table, self.verdicts, self.not_called, self.notes = table, verdicts, not_called, list(notes)

    @property
    def fp32_modules(self) -> list[str]:
        "The modules to keep in fp32, for any of the modes that work then."
        works = ('keep modules in fp32', 'safe, but close', 'cannot run')
        return [*dict.fromkeys(m for v in self.verdicts.values() if v.verdict in works for m in v.modules)]

    def worst(self,
        n: int | None = 10, # How many rows for each mode; None for all
        mode: str | AMPMode | None = None, # One mode alone
    ) -> pd.DataFrame:
        "Return the rows to look at first: modules in trouble, then those with the least headroom or the largest error."
        table = self.table if mode is None else self.table[self.table['mode'] == AMPMode(mode).value]
        badness = table['own error'].fillna(0).clip(upper=1e3) + table['non-finite'].fillna(0) + 1 / table['headroom']
        order = table.assign(_badness=badness).sort_values(['trouble', '_badness'], ascending=False, kind='stable')
        first = order.drop(columns='_badness').groupby('mode', sort=False).head(n or len(table))
        return first.sort_values('mode', kind='stable')

    def plot(self,
        axs = None, # Two matplotlib axes to draw on; new ones if None
    ): # The two matplotlib axes
        """Plot the modules from first to last: the largest value in each against each format's range, and the errors.

        Modules in trouble are red and named, those that do not run in a mode grey.
        """
        from .report_plot import plot_report
        return plot_report(self.table, self.verdicts, axs)

    def _remarks(self):
        never = [f'Never called: {some(self.not_called)}.'] if self.not_called else []
        return self.notes + never

    def _shown(self):
        for mode in self.verdicts:
            n = int((self.table['mode'] == mode).sum())
            if not n: continue
            rows = self.worst(10, mode)
            more = f' of {n}' if n > len(rows) else ''
            title = f'{mode}: the {len(rows)} modules to look at first{more}; all columns and rows: `report.table`'
            yield title, _short(rows)

    def __repr__(self):
        tables = [f'{title}\n{rows.to_string(index=False)}' for title, rows in self._shown()]
        return '\n\n'.join(['\n'.join([*map(str, self.verdicts.values()), *self._remarks()]), *tables])

    def _repr_html_(self):
        verdicts = [f'<b>{as_html(v.headline)}</b><br>{as_html(v.sentence)}' for v in self.verdicts.values()]
        items = ''.join(f'<li>{text}</li>' for text in [*verdicts, *map(as_html, self._remarks())])
        tables = [f'<p>{as_html(title)}</p>{rows.to_html(index=False)}' for title, rows in self._shown()]
        return f'<ul>{items}</ul>' + ''.join(tables)


def _short(table: pd.DataFrame) -> pd.DataFrame:
    "Return the eight columns that are printed."
    def number(x): return '-' if pd.isna(x) else f'{x:.3g}'
    def percent(x): return number(x) if pd.isna(x) or x == 0 else f'{x:.2%}' if x >= 1e-4 else '<0.01%'
    out = table[['module', 'type']].copy()
    out['largest'] = [number(x) for x in table['largest']]
    out['headroom'] = ['>1,000' if x > 1000 else number(x) for x in table['headroom']]
    for c in ('non-finite', 'own error', 'total error'): out[c] = [percent(x) for x in table[c]]
    out['trouble'] = ['<--' if t else '' for t in table['trouble']]
    return out


def report(
    learn: Learner,
    modes: Iterable[str | AMPMode] = ('bf16', 'fp16'),
    n_batches: int = 1,
    dl: Any = None,
    max_seconds: float = 60.,
) -> PrecisionReport:
    "Report on a learner; see `Learner.precision_report`."
    modes = check_modes(modes)
    check_count('n_batches', n_batches, 1, ', such as 1')
    check_seconds(max_seconds)
    check_learner(learn, 'precision_report')
    _refuse_half(unwrapped(learn.model))
    progress = Progress(learn, float(max_seconds))
    try:
        batches = _drawn(learn.dls.train if dl is None else dl, n_batches)
        progress.expect((2 + len(modes)) * len(batches) * sum(1 for _ in learn.model.modules()))
        return _Report(learn, batches, progress).on(modes, n_batches)
    finally: progress.close()


class _Report:
    "The traces of one report."
    def __init__(self, learn: Learner, batches: list, progress: Progress):
        self.learn, self.batches, self.progress = learn, batches, progress
        self.model, self.device, self.whole = unwrapped(learn.model), training_device(learn), n_samples(batches[0])
        cb = precision_callback(learn)
        self.scale = (cb and cb.scale) or INIT_SCALE
        self.fp32: Trace | None = None                           # of the whole batches
        self.low: dict[AMPMode, tuple[Trace, Trace]] = {}        # with nothing kept in fp32; its reference
        self.samples: dict[AMPMode, int] = {}                    # that an emulated mode looks at

    def on(self, modes: list[AMPMode], n_batches: int) -> PrecisionReport:
        verdicts: dict[AMPMode, Verdict] = {}
        try:
            self.fp32 = self._in_fp32(self.batches)
            for mode in modes: verdicts[mode] = self._verdict(mode, self.fp32)
        except TimeIsUp: verdicts |= {mode: self._not_known(mode) for mode in modes if mode not in verdicts}
        failed = {m for m, v in verdicts.items() if v.verdict in ('do not use', 'cannot run')}
        for v in verdicts.values(): v.call = v.call or precision_call(self.learn, fastest_mode(self.device, failed))
        rows = [_row(mode, s, self.low[mode][1], v, mode not in self.samples)
                for mode, v in verdicts.items() for s in self._rows(mode)]
        by_name = {m.value: v for m, v in verdicts.items()}
        table = pd.DataFrame(rows, columns=_COLUMNS)
        return PrecisionReport(table, by_name, self._never_called(), self._notes(n_batches))

    def _verdict(self, mode: AMPMode, fp32: Trace) -> Verdict:
        support, batches = mode_support(mode, self.device), self.batches
        if support.status == 'unsupported': return Verdict(mode.value, 'cannot run', support.why, '')
        few = int(self.whole * EMULATED_WORK / max(3 * fp32.work, 1))
        if support.status == 'emulated' and max(few, FEWEST) < self.whole:
            self.samples[mode] = few = max(few, FEWEST)
            batches = [first_samples(b, few) for b in batches]
            fp32 = self._in_fp32(batches)
        def run(keep, scale):
            found = trace(self.learn, batches, mode, keep, scale, reference=fp32, tick=self.progress.tick_in_time)
            if not found.error: self.low.setdefault(mode, (found, fp32))
            return found
        xb, yb = zip(*(_split(self.learn, b) for b in batches))
        judge = Judge(mode, self.model, self.device, run, fp32, self.scale if mode.needs_loss_scaling else 1.,
                      partial(precision_call, self.learn, mode), not_finite_data(xb, yb),
                      max(map(largest_value, tensors(xb)), default=0.), is_whole=mode not in self.samples)
        return judge.verdict()

    def _in_fp32(self, batches) -> Trace:
        try: return trace(self.learn, batches, tick=self.progress.tick_in_time)
        except torch.OutOfMemoryError: raise
        except Exception as e:
            missing = left_out(self.learn)
            hint = f' These callbacks took no part: {", ".join(missing)}.' if missing else ''
            raise ValueError(f'The model does not run on its first batch, in fp32: {first_line(e)}.{hint}\n'
                             'Give batches that it trains on: `precision_report(dl=...)`.') from e

    def _not_known(self, mode) -> Verdict:
        limit, trouble = self.progress.max_seconds, self.low[mode][0].failures() if mode in self.low else []
        reason = f'`max_seconds={limit:g}` was over before a verdict was found'
        if trouble: reason += f'; in trouble so far: {some(trouble)}'
        again = f"learn.precision_report('{mode.value}', max_seconds={10 * limit:g})"
        return Verdict(mode.value, 'not known', reason, again, trouble=trouble)

    def _rows(self, mode) -> list[Seen]:
        "Return the modules that compute something, in the order in which they end, and the loss function."
        if mode not in self.low: return []
        modules = dict(qualified_names(self.model))
        seen = [s for s in self.low[mode][0].seen.values() if s.calls]
        loss = [s for s in seen if s.name == LOSS]
        return [s for s in seen if s.name != LOSS and (s.computes or not list(modules[s.name].children()))] + loss

    def _never_called(self) -> list[str]:
        if self.fp32 is None: return []
        leaves = [(n, m) for n, m in qualified_names(self.model) if not list(m.children())]
        called = {id(m) for n, m in leaves if n in self.fp32.seen or isinstance(m, torch.jit.ScriptModule)}
        return [n for n, m in leaves if id(m) not in called]

    def _notes(self, n_batches) -> list[str]:
        n = len(self.batches)
        notes = [f"Looked at {n} batch{'es' * (n > 1)} of {self.whole} samples, with the weights as they are now: "
                 'after some training others may be in trouble.']
        if n < n_batches: notes.append(f'There were only {n} of {n_batches} batches.')
        notes += [f'{m.value} is emulated here: the report looked at {few} of {self.whole} samples in it, and leaves '
                  'out the total error, which normalization makes large with few samples.'
                  for m, few in self.samples.items()]
        if missing := left_out(self.learn): notes.append(f'Callbacks that took no part: {some(missing, 8)}.')
        return notes


_COLUMNS = ['mode', 'module', 'type', 'params', 'output', 'largest', 'headroom', 'non-finite', 'own error',
            'total error', 'grad', 'grad lost', 'trouble']


def _row(mode: AMPMode, s: Seen, fp32: Trace, verdict: Verdict, is_whole: bool) -> dict[str, Any]:
    ref, info = fp32.seen.get(s.name, s), torch.finfo(mode.dtype)
    largest, limit = (s.half, info.max) if s.half else (ref.largest, torch.finfo(torch.float32).max)
    in_half = s.dtypes & set(HALF)
    return dict(zip(_COLUMNS, [
        mode.value, s.name, s.type, s.params, '+'.join(sorted(str(d).removeprefix('torch.') for d in s.dtypes)),
        ref.largest, limit / largest if largest else math.inf, s.non_finite / s.values if s.values else math.nan,
        s.error, s.total if is_whole else math.nan, ref.grads.largest or math.nan,
        ref.grads.share_below(info.tiny * info.eps) if in_half or not ref.grads.largest else 0.,
        s.name in verdict.modules + verdict.trouble]))


# -- batches

def _drawn(dl: Any, n: int) -> list:
    with random_state_kept(): found = [*islice(loader_like(dl), n)]
    if found: return found
    raise ValueError('precision_report needs at least one batch, but the DataLoader gave none.\n'
                     'Give another one as dl=...')


def _split(learn, batch) -> tuple: # Inputs and targets
    if not isinstance(batch, (tuple, list)): return batch, ()
    n = getattr(learn.dls, 'n_inp', max(1, len(batch) - 1))
    return batch[:n], batch[n:]


def n_samples(batch: Any) -> int:
    "Return the length of the first tensor that has one; 1 if there is none."
    return next((len(t) for t in tensors(batch, floating=False) if t.ndim), 1)


def first_samples(batch: Any, n: int) -> Any:
    "Return the first `n` samples of a batch; what is not as long as the batch stays whole."
    whole = n_samples(batch)
    return map_tensors(lambda t: t[:n].clone() if t.ndim and len(t) == whole and n < whole else t, batch)


# -- refusals

def check_modes(modes: Any) -> list[AMPMode]:
    "Return the modes to examine, each once; fp32, the measure, may be among them."
    found = []
    for m in [modes] if isinstance(modes, (str, torch.dtype)) else list(modes):
        if m is torch.float32 or (isinstance(m, str) and m.lower() == 'fp32'): continue
        try: found.append(AMPMode(m))
        except ValueError:
            raise ValueError(f"modes={modes!r} cannot be used: {m!r} is not a precision. Allowed: 'bf16' and 'fp16'; "
                             "fp32 is what they are compared with.") from None
    if not found: raise ValueError(f"modes={modes!r} cannot be used: name at least one of 'bf16' and 'fp16'.")
    return [*dict.fromkeys(found)]


def _refuse_half(model: nn.Module):
    half = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.dtype in HALF]
    if not half: return
    kind = 'fp16' if half[0][1].dtype is torch.float16 else 'bf16'
    raise ValueError(f"precision_report needs fp32 parameters, as mixed precision does, but {len(half)} to be trained "
                     f"are {kind}, such as '{half[0][0]}'. Call `learn.model.float()` first: autocast itself casts "
                     "what can run in low precision.")
