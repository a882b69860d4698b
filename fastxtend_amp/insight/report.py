"Does this model survive low precision, where does it not, and what is to be done about it? Asked before training."
from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from numbers import Integral
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from fastai.learner import Learner
from fastai.torch_core import to_device

from ..callback import MixedPrecision
from ..convert import HALF, map_tensors
from ..fp32_modules import ROOT, Fp32Forward, kept_in_fp32, qualified_names, unwrapped
from ..mode import AMPMode, mode_support, model_device
from .tracer import LOSS, Seen, Tracer, after_pred, effects_undone, local_statistics, random_state_kept, tensors
from ..scaling_args import DEFAULTS
from ..devices.sharded import is_sharded
from .snapshot import preserved

__all__ = ['PrecisionReport', 'Verdict']

IMPRECISE = .1        # a module whose own error is above this is kept in fp32
LOST = .01            # share of a gradient's absolute sum that may underflow before a loss scale counts as too low
ROUNDS = 6            # how often modules are added to those kept in fp32 before giving up
LARGE = 2 ** 30       # bytes of copies from which on the report says so first


@dataclass
class Verdict:
    "What one mode does to this model, and what to do."
    mode: str
    verdict: str # 'safe', 'safe with loss scaling', 'keep modules in fp32', 'do not use' or 'cannot run'
    reason: str
    call: str # The next call to make
    modules: list[str] = field(default_factory=list) # The modules concerned
    scales: tuple[float, float] | None = None # Lowest and highest loss scale that neither underflows nor overflows (fp16)

    def __str__(self):
        return f"{self.mode}: {self.verdict}{f' ({self.reason})' if self.reason else ''}. Next: `{self.call}`"


class PrecisionReport:
    """What `Learner.precision_report` found.

    - `verdicts`: a `Verdict` for each mode;
    - `fp32_modules`: names to hand to `MixedPrecision(fp32_modules=...)`; for one mode alone, `verdicts[mode].modules`;
    - `table`: a row for each mode and module, in order of execution;
    - `worst(n)`: the rows to look at first; `plot()`; `to_csv(file)`.

    Columns of `table`: `calls`; `inputs`, `output`, `weights`: the dtypes they really had; `largest`: the largest absolute
    output in fp32; `inside`: the same for the result of any operator of its own; `headroom`: the maximum of the output's
    format over `largest`; `non-finite`, `subnormal`, `flushed`: shares of its
    output values that are not finite where fp32 is, that are subnormal, and that became 0 where fp32 is a number below the
    format's normal range; `own error`: of its output, relative to fp32 on the same inputs; `total error`: relative to the
    fp32 model's, on 4,096 evenly spaced values of each output; `grad`: the largest absolute gradient of its outputs and
    weights, in fp32, unscaled; `grad lost`, `grad lost scaled`: shares of the non-zero gradient values that underflow to 0
    in the mode, without loss scaling and at the learner's current scale; `trouble`: is it among the modules concerned?
    """
    def __init__(self, table: pd.DataFrame, verdicts: dict[str, Verdict], not_called: list[str], scale: float):
        self.table, self.verdicts, self.not_called, self.scale = table, verdicts, not_called, scale

    @property
    def fp32_modules(self) -> list[str]:
        "The modules to keep in fp32, for any of the modes that work then."
        return list(dict.fromkeys(m for v in self.verdicts.values() if v.verdict in ('keep modules in fp32', 'cannot run') for m in v.modules))

    def worst(self,
        n: int | None = 10, # How many rows for each mode; None for all
        mode: str | AMPMode | None = None, # One mode alone
    ) -> pd.DataFrame:
        "The rows to look at first: modules in trouble, then those with the least headroom or the largest own error."
        table = self.table if mode is None else self.table[self.table['mode'] == AMPMode(mode).value]
        badness = table['own error'].fillna(0).clip(upper=1e3) + (1 / table['headroom']).fillna(0) + table['non-finite'].fillna(0)
        order = table.assign(_badness=badness).sort_values(['trouble', '_badness'], ascending=False, kind='stable')
        return order.drop(columns='_badness').groupby('mode', sort=False).head(n or len(table)).sort_values('mode', kind='stable')

    def to_csv(self, file: str | Path, **kwargs) -> None:
        "Write the whole table to `file`; `kwargs` go to pandas."
        self.table.to_csv(file, **{'index': False, **kwargs})

    def _lines(self):
        lines = [str(v) for v in self.verdicts.values()]
        if self.not_called:
            lines.append(f"Never called: {_some(self.not_called)}.")
        return lines

    def _shown(self):
        tables = []
        for mode in self.verdicts:
            rows = self.worst(10, mode) if len(self.table) else self.table
            n = int((self.table['mode'] == mode).sum()) if len(self.table) else 0
            more = f' of {n}; all of them: report.table' if n > len(rows) else ''
            if n: tables.append((f'{mode}: the {len(rows)} modules to look at first{more}', rows.drop(columns=['mode', 'calls', 'params', 'weights'])))
        return tables

    def __repr__(self):
        parts = ['\n'.join(self._lines())]
        parts += [f'{title}\n{_pretty(rows).to_string(index=False)}' for title, rows in self._shown()]
        return '\n\n'.join(parts)

    def _repr_html_(self):
        from html import escape
        items = ''.join(f'<li>{escape(l)}</li>' for l in self._lines())
        return f'<ul>{items}</ul>' + ''.join(f'<p>{escape(t)}</p>{_pretty(r).to_html(index=False)}' for t, r in self._shown())

    def plot(self,
        axs = None, # Two matplotlib axes to draw on; new ones if None
    ): # The two matplotlib axes
        """Plot the modules in order of execution: the largest output against each format's range, and the errors.

        Modules in trouble are marked and named.
        """
        import matplotlib.pyplot as plt
        table = self.table[self.table['mode'] != '']
        names = list(dict.fromkeys(table['module']))
        at = {n: i for i, n in enumerate(names)}
        if axs is None: axs = plt.subplots(2, 1, sharex=True, layout='constrained', figsize=(min(max(7, len(names) * .28), 16), 6.5))[1]
        size, error = axs
        bad = table[table['trouble']]
        first = table.drop_duplicates('module')
        size.plot([at[n] for n in first['module']], first['largest'].where(first['largest'] > 0), 'k.-', lw=.8, label='largest output, fp32')
        inside = first[first['inside'] > first['largest'] * 1.01]
        size.plot([at[n] for n in inside['module']], inside['inside'], 'kx', ms=6, label='largest value computed inside, fp32')
        for mode in self.verdicts:
            info = torch.finfo(AMPMode(mode).dtype)
            color = _COLORS[mode]
            if mode == 'fp16':
                size.axhline(info.max, color=color, ls='--', lw=1, label=f'{mode} overflows above {info.max:,.0f}')
                size.axhline(info.tiny, color=color, ls=':', lw=1, label=f'{mode} loses digits below {info.tiny:.0e}')
            rows = table[table['mode'] == mode]
            x = [at[n] for n in rows['module']]
            error.plot(x, rows['own error'].where(rows['own error'] > 0), 'o', ms=4, color=color, label=f'{mode}, own error')
            error.plot(x, rows['total error'].where(rows['total error'] > 0), '-', lw=1, color=color, alpha=.6, label=f'{mode}, error so far')
        error.axhline(IMPRECISE, color='grey', ls='--', lw=1)
        for i, (name, rows) in enumerate(bad.groupby('module', sort=False)):
            for ax in axs: ax.axvspan(at[name] - .5, at[name] + .5, color='red', alpha=.15, lw=0)
            size.annotate(f"{name} ({', '.join(rows['mode'])})", (at[name], 1), xycoords=('data', 'axes fraction'), xytext=(0, 3 + 10 * (i % 2)),
                          textcoords='offset points', ha='center', color='red', fontsize=8)
        for ax in axs: ax.set_yscale('log'); ax.grid(alpha=.3); ax.legend(fontsize=7, loc='best')
        size.set_ylabel('absolute value')
        error.set_ylabel('relative error to fp32')
        shown = names if len(names) <= 60 else [n for n in names if n in set(bad['module'])] or names[::len(names) // 30]
        error.set_xticks([at[n] for n in shown], shown, rotation=90, fontsize=7)
        error.set_xlabel('module, in order of execution')
        return axs


_COLORS = {'bf16': 'tab:blue', 'fp16': 'tab:orange'}


def _pretty(table):
    percent = lambda x: '-' if pd.isna(x) else 'inf' if math.isinf(x) else '0' if x == 0 else f'{x:.2%}' if x >= 1e-4 else '<0.01%'
    number = lambda x: '-' if pd.isna(x) else f'{x:.3g}'
    shares = ['non-finite', 'subnormal', 'flushed', 'own error', 'total error', 'grad lost', 'grad lost scaled']
    out = table.copy()
    for c in shares: out[c] = [percent(x) for x in out[c]]
    for c in ('largest', 'inside', 'headroom', 'grad'): out[c] = [number(x) for x in out[c]]
    out['trouble'] = ['<--' if t else '' for t in out['trouble']]
    return out


def report(
    learn: Learner,
    modes: Iterable[str | AMPMode] = ('bf16', 'fp16'),
    n_batches: int = 1,
    dl: Any = None,
) -> PrecisionReport:
    "See `Learner.precision_report`."
    modes = [AMPMode(m) for m in ([modes] if isinstance(modes, (str, AMPMode)) else modes)]
    if not modes: raise ValueError("modes=() cannot be used: name at least one of 'bf16' and 'fp16'.")
    if not isinstance(n_batches, Integral) or isinstance(n_batches, bool) or n_batches < 1:
        raise ValueError(f"n_batches={n_batches!r} cannot be used: it must be an integer of at least 1.")
    modes = list(dict.fromkeys(modes))
    _refuse_shards(learn.model)
    _announce(learn.model)
    with preserved(learn):
        model, batches = unwrapped(learn.model), _batches(learn, learn.dls.train if dl is None else dl, n_batches)
        device = next((t.device for t in tensors(batches[0], floating=False)), model_device(model, torch.device('cpu')))
        before = model_device(model, device)
        try:
            if before != device: model.to(device)
            for m in model.modules():                            # what is kept in fp32 already is asked about like the rest
                if isinstance(m.__dict__.get('forward'), Fp32Forward): m.forward.remove()
            with local_statistics(model): return _Examination(learn, model, batches, device).report(modes)
        finally:
            if before != device: model.to(before)


class _Examination:
    "The passes of one report."
    def __init__(self, learn, model, batches, device):
        self.model, self.batches, self.device, self.loss_func = model, batches, device, learn.loss_func
        self.after_pred = after_pred(learn)
        self.scale = current_scale(learn)

    def report(self, modes):
        self.model.train()
        self.fp32 = self._pass(Tracer(self.model, self.loss_func, after_pred=self.after_pred))
        self._selected = {name: self.fp32.selected(m, name) for name, m in qualified_names(self.model)}
        rows, verdicts = [], {}
        for mode in modes:
            tracer, verdict = self._examine(mode)
            verdicts[mode.value] = verdict
            if tracer is not None: rows += [self._row(mode, s, verdict) for s in tracer.seen.values() if s.name == LOSS or self._selected[s.name]]
        not_called = [n for n, m in qualified_names(self.model) if self.fp32.names[id(m)] not in self.fp32.seen and not list(m.children())]
        return PrecisionReport(pd.DataFrame(rows, columns=_COLUMNS), verdicts, not_called, self.scale)

    def _pass(self, tracer, keep=()):
        "All batches once, each from the same state of the model and of the random generators."
        with kept_in_fp32(self.model, list(keep)):
            for xb, yb in self.batches:
                if tracer.reference is not None and len(self.batches) > 1: self._resample(xb, yb)
                with effects_undone((self.model,)), random_state_kept(self.device.type):
                    tracer.run(_copied(xb), _copied(yb))
        return tracer

    def _resample(self, xb, yb):
        "The fp32 pass keeps the samples of one batch alone: make those of this one."
        again = Tracer(self.model, self.loss_func, after_pred=self.after_pred)
        with effects_undone((self.model,)), random_state_kept(self.device.type): again.run(_copied(xb), _copied(yb), backward=False)
        for name, seen in again.seen.items():
            if name in self.fp32.seen: self.fp32.seen[name].samples = seen.samples

    def _examine(self, mode):
        support = mode_support(mode, self.device)
        if support.status == 'unsupported': return None, Verdict(mode.value, 'cannot run', support.why, 'learn.to_fp32()')
        scale, refused, reason = self.scale if mode.needs_loss_scaling else 1., [], ''
        while True:
            tracer = Tracer(self.model, self.loss_func, mode, self.fp32, scale, self.after_pred)
            try:
                self._pass(tracer, refused)
                break
            except torch.OutOfMemoryError: raise
            except (RuntimeError, TypeError, ValueError) as e:
                reason, failed = reason or _reason(e), dict(qualified_names(self.model)).get(tracer.failed_in)
                more = [n for n, m in qualified_names(self.model) if type(m) is type(failed) and n not in refused]
                if not more or tracer.failed_in == ROOT: return None, Verdict(mode.value, 'cannot run', reason, _other(mode))
                refused += more                                  # such as an LSTM on some CPUs: do the other modules run?
        verdict = self._judge(mode, tracer, refused)
        if refused:
            kinds = ', '.join(dict.fromkeys(type(m).__name__ for n, m in qualified_names(self.model) if n in refused))
            verdict.reason = f'{reason} That was {kinds}; with it kept in fp32: {verdict.reason}'
            verdict.verdict = 'cannot run'
        return tracer, verdict

    def _judge(self, mode, tracer, refused):
        name, fp32 = mode.value, self.fp32
        if fp32.non_finite_loss or fp32.non_finite_grads:
            what = 'loss' if fp32.non_finite_loss else 'gradients'
            return Verdict(name, 'do not use', f'the {what} of these batches are not finite in fp32 either: look at data and model first',
                           'learn.to_fp32()')
        keep, self.non_finite = list(refused), set()
        for _ in range(ROUNDS):
            low, high = self._scales(tracer) if mode.needs_loss_scaling else (1., 1.)
            self.non_finite |= set(tracer.trouble)
            new, scale = [m for m in self._troubled(tracer) if m not in keep], min(tracer.scale, high)
            if not new and tracer.non_finite_grads and not tracer.non_finite_loss and scale == tracer.scale:
                new = [m for m in tracer.trouble_backward if m not in keep and m != LOSS]
            if not new and scale == tracer.scale: break
            keep += new
            tracer = self._pass(Tracer(self.model, self.loss_func, mode, self.fp32, scale, self.after_pred), keep)     # was that all?
        failed = 'loss' if tracer.non_finite_loss else 'gradients' if tracer.non_finite_grads else None
        if failed: return Verdict(name, 'do not use', f'the {failed} are not finite, whatever is kept in fp32', _other(mode), keep)
        if low > high:
            return Verdict(name, 'do not use', f'no loss scale fits: gradients underflow below {low:,g} and overflow above {high:,g}',
                           _other(mode), keep, (low, high))
        scales = (low, high) if mode.needs_loss_scaling else None
        span = f'a loss scale from {low:,g} to {high:,g}' if scales else ''
        start = f'init_scale={high:.0f}' if scales and high < self.scale else ''
        if keep:
            args = ', '.join(a for a in (start, f'fp32_modules={keep!r}') if a)
            why = _some([self._why(m, mode) for m in keep if m not in refused]) or 'the rest is fine'
            return Verdict(name, 'keep modules in fp32', f"{why}{f'; {span}' if span else ''}", f'learn.to_{name}({args})', keep, scales)
        error = max((s.total for n, s in tracer.seen.items() if n != LOSS and not math.isnan(s.total)), default=0.)
        last = next((s.total for n, s in reversed(tracer.seen.items()) if n != LOSS), 0.)
        errors = f'predictions {last:.2%} from fp32, {error:.2%} at most on the way'
        if scales and low > 1: return Verdict(name, 'safe with loss scaling', f'{span}; {errors}', f'learn.to_{name}({start})', scales=scales)
        return Verdict(name, 'safe', f"{errors}{f'; {span}' if span else ''}", f'learn.to_{name}({start})', scales=scales)

    def _troubled(self, tracer):
        imprecise = [s.name for s in tracer.seen.values() if s.own > IMPRECISE and not s.non_finite and s.name != LOSS]
        inner = [n for n in imprecise if not any(o != n and (o.startswith(n + '.') or n == ROOT) for o in imprecise)]
        return list(dict.fromkeys([*(n for n in tracer.trouble if n != LOSS), *inner]))

    def _why(self, name, mode):
        s = self.fp32.seen.get(name)
        limit = torch.finfo(mode.dtype).max
        if s is not None and max(s.largest, s.inside) > limit:
            return f"{'' if s.largest > limit else 'inside '}'{name}' values reach {max(s.largest, s.inside):,.3g}, above {mode.value}'s {limit:,.5g}"
        if s is not None and s.grads.largest > limit: return f"gradients of '{name}' reach {s.grads.largest:,.3g}, above {mode.value}'s {limit:,.3g}"
        return f"inside '{name}' {mode.value} {'is not finite' if name in self.non_finite else f'loses more than {IMPRECISE:.0%}'}"

    def _scales(self, tracer):
        "Lowest and highest power of two at which gradients in the mode neither underflow nor overflow."
        info, half = torch.finfo(tracer.mode.dtype), []
        for name, s in tracer.seen.items():
            if name != LOSS and s.outputs & set(HALF) and name in self.fp32.seen: half.append(self.fp32.seen[name].grads)
        largest = max((h.largest for h in half), default=0.)
        high = 2. ** math.floor(math.log2(info.max / largest)) if largest else 2. ** 24
        smallest = info.tiny * info.eps                          # the smallest subnormal; half of it rounds to 0
        low = 1.
        while low < 2. ** 40 and any(h.mass_below(smallest / low) > LOST for h in half): low *= 2
        return low, high

    def _row(self, mode, s, verdict):
        ref = self.fp32.seen.get(s.name, Seen(s.name, s.type, s.params))
        half = next((d for d in s.outputs if d in HALF), None)
        limit = torch.finfo(half or torch.float32).max
        share = lambda n: n / s.values if s.values else math.nan
        info = torch.finfo(mode.dtype)
        lost = lambda scale: ref.grads.share_below(info.tiny * info.eps / scale) if half is not None else (0. if ref.grads.largest else math.nan)
        compared = s.own_error[1] > 0 or s.own_error[0] > 0
        return dict(zip(_COLUMNS, (
            mode.value, s.name, s.type, s.params, s.calls, _dtypes(s.inputs), _dtypes(s.outputs), _dtypes(s.weights), ref.largest, ref.inside,
            limit / ref.largest if ref.largest else math.inf, share(s.non_finite), share(s.subnormal), share(s.flushed),
            s.own if compared else (0. if self._was_compared(s) else math.nan), s.total if s.total_error[1] > 0 else math.nan,
            ref.grads.largest or math.nan, lost(1.), lost(self.scale if mode.needs_loss_scaling else 1.), s.name in verdict.modules)))

    def _was_compared(self, s): return s.name == LOSS or s.name in self.fp32.computing


_COLUMNS = ['mode', 'module', 'type', 'params', 'calls', 'inputs', 'output', 'weights', 'largest', 'inside', 'headroom', 'non-finite', 'subnormal',
            'flushed', 'own error', 'total error', 'grad', 'grad lost', 'grad lost scaled', 'trouble']


def _dtypes(dtypes): return '+'.join(sorted(str(d).removeprefix('torch.') for d in dtypes))
def _some(words, n=4): return ', '.join(words[:n]) + (f' and {len(words) - n} more' if len(words) > n else '')
def _other(mode): return 'learn.to_bf16()' if mode is AMPMode.FP16 else 'learn.to_fp32()'
def _reason(error): return f'PyTorch says: {(str(error).strip() or type(error).__name__).splitlines()[0]}'
def _copied(x): return map_tensors(lambda t: t.clone(), x)        # a model may change its inputs in place


def current_scale(learn: Learner) -> float:
    "The learner's loss scale; the default first one where it has none."
    cb = next((cb for cb in learn.cbs if isinstance(cb, MixedPrecision)), None)
    state = cb.scaling.state_dict() if cb is not None else {}
    return float(state.get('scale', DEFAULTS['init_scale']))


def _batches(learn, dl, n) -> list[tuple[tuple, tuple]]:
    plain = lambda t: t.as_subclass(torch.Tensor)                # as fastai's CastToTensor
    found = []
    if type(dl).__name__ == 'DistributedDL': dl = dl.dl          # which waits for all processes when it starts
    for b in islice(iter(dl), n):
        b = b if isinstance(b, (tuple, list)) else (b,)
        b = to_device(b, getattr(learn.dls, 'device', None) or 'cpu')
        n_inp = getattr(learn.dls, 'n_inp', 1 if len(b) == 1 else len(b) - 1)
        found.append((map_tensors(plain, tuple(b[:n_inp])), map_tensors(plain, tuple(b[n_inp:]))))
    if not found: raise ValueError("precision_report needs at least one batch, but the DataLoader gave none: hand it another as dl=...")
    return found


def _refuse_shards(model):
    if is_sharded(model):
        raise ValueError("precision_report cannot look into a model whose parameters are sharded (FSDP). Call it before `fully_shard`.")


def _announce(model):
    copies = sum(t.numel() * t.element_size() for t in [*model.buffers(), *(p.grad for p in model.parameters() if p.grad is not None)])
    if copies > LARGE: print(f'precision_report: copies of buffers and gradients will take {copies / 2**30:.1f} GiB.')
