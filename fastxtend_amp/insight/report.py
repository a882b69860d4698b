"`Learner.precision_report`: which precision a model survives, where it does not, and what to do about it."
from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import pandas as pd
import torch
from fastai.learner import Learner
from torch import nn

from ..callback import precision_callback
from ..checks import check_count, check_seconds
from ..convert import HALF
from ..fp32_modules import Fp32Forward, unwrapped
from ..mode import AMPMode, model_device
from .advice import as_html, fastest_mode, kept_modules, precision_call
from .batches import order_kept, own_dl
from .examination import Examination, rows_of
from .progress import Progress
from .restore import modes_kept, run_undone
from .run import Task, after_pred, check_model, local_statistics
from .samples import draw_batches, n_samples
from .statistics import Seen, tensors
from .verdicts import Verdict, some

__all__ = ['PrecisionReport', 'Verdict']

LARGE = 2 ** 30       # bytes of copies from which on the report says so first
INIT_SCALE = 65536.   # the loss scale of a learner that has none yet


class PrecisionReport:
    """What `Learner.precision_report` found.

    - `verdicts`: a `Verdict` for each mode;
    - `fp32_modules`: names to hand to `MixedPrecision(fp32_modules=...)`; for one mode alone, `verdicts[mode].modules`;
    - `table`: a row for each mode and module, in order of execution;
    - `worst(n)`: the rows to look at first; `plot()`; `notes`: what was left out.

    Columns of `table`: `calls`; `inputs`, `output`, `weights`: the dtypes they really had; `largest`: the largest
    absolute output in fp32; `inside`: the same for the result of any operator of its own; `headroom`: the maximum of
    the mode's format over the largest value anywhere inside the module that is in that format; `non-finite`,
    `subnormal`, `flushed`: shares of its output values that are not finite where fp32 is, that are subnormal, and that
    became 0 where fp32 is below the normal range; `own error`: of its output, relative to fp32 on the same inputs;
    `total error`: relative to the fp32 model's, on 4,096 evenly spaced values of each output; `grad`: the largest
    absolute gradient of its outputs and weights, in fp32, unscaled; `grad lost`, `grad lost scaled`: shares of the
    non-zero gradient values that underflow to 0 in the mode, without loss scaling and at the learner's current scale;
    `trouble`: is it among the modules concerned? Large negative values that stand apart from all others, as attention
    masks do, count nowhere.
    """
    def __init__(self,
        table: pd.DataFrame,
        verdicts: dict[str, Verdict], # By the name of the mode
        not_called: list[str], # Modules that the batches did not reach
        scale: float, # The loss scale that `grad lost scaled` is for
        notes: Iterable[str] = (), # What was left out
    ):
        self.table, self.verdicts, self.not_called, self.scale = table, verdicts, not_called, scale
        self.notes = list(notes)

    @property
    def fp32_modules(self) -> list[str]:
        "The modules to keep in fp32, for any of the modes that work then."
        works = ('keep modules in fp32', 'safe, but close', 'cannot run')
        return list(dict.fromkeys(m for v in self.verdicts.values() if v.verdict in works for m in v.modules))

    def worst(self,
        n: int | None = 10, # How many rows for each mode; None for all
        mode: str | AMPMode | None = None, # One mode alone
    ) -> pd.DataFrame:
        "The rows to look at first: modules in trouble, then those with the least headroom or the largest own error."
        table = self.table if mode is None else self.table[self.table['mode'] == AMPMode(mode).value]
        errors, closeness = table['own error'].fillna(0).clip(upper=1e3), (1 / table['headroom']).fillna(0)
        badness = errors + closeness + table['non-finite'].fillna(0)
        order = table.assign(_badness=badness).sort_values(['trouble', '_badness'], ascending=False, kind='stable')
        first = order.drop(columns='_badness').groupby('mode', sort=False).head(n or len(table))
        return first.sort_values('mode', kind='stable')

    def plot(self,
        axs = None, # Two matplotlib axes to draw on; new ones if None
    ): # The two matplotlib axes
        """Plot the modules from first to last: the largest value in each against each format's range, and the errors.

        Modules in trouble are red and named; a line that ends where numbers stop being finite says so.
        """
        from .plots import plot_report
        return plot_report(self, axs)

    def _remarks(self):
        never = [f'Never called: {some(self.not_called)}.'] if self.not_called else []
        return never + self.notes

    def _shown(self):
        for mode in self.verdicts:
            n = int((self.table['mode'] == mode).sum())
            if not n: continue
            rows = self.worst(10, mode)
            more = f' of {n}' if n > len(rows) else ''
            title = f'{mode}: the {len(rows)} modules to look at first{more}; all columns and rows: `report.table`'
            yield title, short_table(rows)

    def __repr__(self):
        tables = [f'{title}\n{rows.to_string(index=False)}' for title, rows in self._shown()]
        return '\n\n'.join(['\n'.join([*map(str, self.verdicts.values()), *self._remarks()]), *tables])

    def _repr_html_(self):
        verdicts = [f'<b>{as_html(v.headline)}</b><br>{as_html(v.sentence)}' for v in self.verdicts.values()]
        items = ''.join(f'<li>{text}</li>' for text in [*verdicts, *map(as_html, self._remarks())])
        tables = [f'<p>{as_html(title)}</p>{rows.to_html(index=False)}' for title, rows in self._shown()]
        return f'<ul>{items}</ul>' + ''.join(tables)


def short_table(table: pd.DataFrame) -> pd.DataFrame:
    "The eight columns that are printed."
    def number(x): return '-' if pd.isna(x) else f'{x:.3g}'
    def percent(x):
        if pd.isna(x) or math.isinf(x) or x == 0: return number(x)
        return f'{x:.2%}' if x >= 1e-4 else '<0.01%'
    out = table[['module', 'type']].copy()
    out['largest'] = [number(x) for x in table[['largest', 'inside']].max(axis=1)]
    out['headroom'] = ['>1,000' if x > 1000 else number(x) for x in table['headroom']]
    for c in ('non-finite', 'own error', 'total error'): out[c] = [percent(x) for x in table[c]]
    out['trouble'] = ['<--' if t else '' for t in table['trouble']]
    return out


@modes_kept
def report(
    learn: Learner,
    modes: Iterable[str | AMPMode] = ('bf16', 'fp16'),
    n_batches: int = 1,
    dl: Any = None,
    max_seconds: float = 60.,
) -> PrecisionReport:
    "See `Learner.precision_report`."
    modes = check_modes(modes)
    check_count('n_batches', n_batches, 1, ', such as 1')
    check_seconds(max_seconds)
    check_model(learn.model, 'precision_report')
    model, dl = unwrapped(learn.model), own_dl(learn.dls.train if dl is None else dl)
    _refuse_half(model)
    progress = Progress(learn, float(max_seconds))
    try:
        device = model_device(model, torch.device('cpu'))
        if device.type == 'xla': _read_once(model)
        with run_undone(learn.model, learn.loss_func, device), order_kept(dl):
            _announce(model)
            return _examined(learn, model, modes, n_batches, dl, progress)
    finally: progress.close()


def _examined(learn, model, modes, n_batches, dl, progress):
    call = partial(precision_call, learn, kept=kept_modules(model))
    batches = draw_batches(learn, dl, n_batches)
    device = next((t.device for t in tensors(batches[0], floating=False)), model_device(model, torch.device('cpu')))
    before = model_device(model, device)
    kept = [m.forward for m in model.modules() if isinstance(m.__dict__.get('forward'), Fp32Forward)]
    task = Task(model, learn.loss_func, after_pred(learn))
    examination = Examination(task, batches, device, current_scale(learn), progress, call)
    try:
        if before != device: model.to(device)
        model.train()
        for forward in kept: forward.remove()                    # what is kept already is asked about like the rest
        with local_statistics(model): verdicts = examination.examine(modes)
    finally:
        if before != device: model.to(before)
    _advise(verdicts, device, call)
    return _assembled(examination, verdicts, n_batches)


def _read_once(model):
    """Read all parameters and buffers on the host.

    torch_xla 2.9 reuses the memory of a parameter that the optimizer has changed; operators that are watched still look
    for it there, until it has been read.
    """
    for t in (*model.parameters(), *model.buffers()): t.sum().item()


def _advise(verdicts, device, call):
    "A mode that does not work leads to the fastest that does."
    failed = {m for m, v in verdicts.items() if v.verdict in ('do not use', 'cannot run')}
    for verdict in verdicts.values():
        other = fastest_mode(device, failed)
        if not verdict.call or (verdict.verdict == 'cannot run' and other is not None): verdict.call = call(other)


def _assembled(examination, verdicts, n_batches) -> PrecisionReport:
    rows = [_row(examination, m, s, v) for m, v in verdicts.items() for s in rows_of(examination, m)]
    table = pd.DataFrame(rows, columns=_COLUMNS)
    n, whole = len(examination.batches), n_samples(examination.batches[0])
    notes = [f'{m.value} is emulated here: the report looked at {few} of {whole} samples in it.'
             for m, few in examination.samples.items()]
    if n < n_batches:
        notes.append(f'The report looked at {n} of {n_batches} batches: there were no more, or more than 512 MB.')
    by_name = {m.value: v for m, v in verdicts.items()}
    return PrecisionReport(table, by_name, examination.never_called(), examination.scale, notes)


_COLUMNS = ['mode', 'module', 'type', 'params', 'calls', 'inputs', 'output', 'weights', 'largest', 'inside', 'headroom',
            'non-finite', 'subnormal', 'flushed', 'own error', 'total error', 'grad', 'grad lost', 'grad lost scaled',
            'trouble']


def _row(examination: Examination, mode: AMPMode, s: Seen, verdict: Verdict) -> dict[str, Any]:
    ref = examination.fp32.seen.get(s.name, Seen(s.name, s.type, s.params))
    in_half = bool(s.outputs & set(HALF))
    info = torch.finfo(mode.dtype)
    largest, limit = (s.in_half, info.max) if s.in_half else (ref.largest, torch.finfo(torch.float32).max)
    def share(n): return n / s.values if s.values else math.nan
    def lost(scale):
        if in_half: return ref.grads.share_below(info.tiny * info.eps / scale)
        return 0. if ref.grads.largest else math.nan
    return {
        'mode': mode.value, 'module': s.name, 'type': s.type, 'params': s.params, 'calls': s.calls,
        'inputs': _dtypes(s.inputs), 'output': _dtypes(s.outputs), 'weights': _dtypes(s.weights),
        'largest': ref.largest, 'inside': ref.inside, 'headroom': limit / largest if largest else math.inf,
        'non-finite': share(s.non_finite), 'subnormal': share(s.subnormal), 'flushed': share(s.flushed),
        'own error': s.own if s.compared else math.nan, 'total error': s.total if s.total_error.size > 0 else math.nan,
        'grad': ref.grads.largest or math.nan, 'grad lost': lost(1.),
        'grad lost scaled': lost(examination.scale if mode.needs_loss_scaling else 1.),
        'trouble': s.name in verdict.modules}


def _dtypes(dtypes): return '+'.join(sorted(str(d).removeprefix('torch.') for d in dtypes))


def current_scale(learn: Learner) -> float:
    "The learner's loss scale; the default first one where it has none."
    cb = precision_callback(learn)
    state = cb.scaling.state_dict() if cb is not None else {}
    return float(state.get('scale') or INIT_SCALE)


def check_modes(modes: Any) -> list[AMPMode]:
    "The modes to examine, each once; fp32, the measure, may be among them."
    found = []
    for m in [modes] if isinstance(modes, (str, torch.dtype)) else list(modes):
        if m is torch.float32 or (isinstance(m, str) and m.lower() == 'fp32'): continue
        try: found.append(AMPMode(m))
        except ValueError:
            raise ValueError(f"modes={modes!r} cannot be used: {m!r} is not a precision. Allowed: 'bf16' and 'fp16'; "
                             "fp32 is what they are compared with.") from None
    if not found: raise ValueError(f"modes={modes!r} cannot be used: name at least one of 'bf16' and 'fp16'.")
    return list(dict.fromkeys(found))


def _refuse_half(model: nn.Module):
    half = [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.dtype in HALF]
    if not half: return
    kind = 'fp16' if half[0][1].dtype is torch.float16 else 'bf16'
    raise ValueError(f"precision_report needs fp32 parameters, as mixed precision does, but {len(half)} to be trained "
                     f"are {kind}, such as '{half[0][0]}'. Call `learn.model.float()` first: autocast itself casts "
                     "what can run in low precision.")


def _announce(model):
    copies = sum(t.numel() * t.element_size() for t in [*model.buffers(), *model.parameters()])
    gradients = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    if copies + gradients <= LARGE: return
    size = f'{(copies + gradients) / 2**30:.1f} GiB'
    print(f'precision_report: copies of parameters and buffers and gradients will take {size}, besides what a training '
          'step takes.')
