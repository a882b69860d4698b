"Which precision pays off, for this model on this device?"
from __future__ import annotations

import copy, math, random, time, warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np
import pandas as pd
import torch
from fastai.callback.channelslast import ChannelsLast
from fastai.callback.core import Callback, TrainEvalCallback
from fastai.callback.mixup import MixHandler
from fastai.callback.rnn import ModelResetter, RNNCallback, RNNRegularizer
from fastai.callback.training import BnFreeze, GradientAccumulation, GradientClip
from fastai.learner import Learner
from fastai.torch_core import apply
from fastcore.foundation import L
from fastprogress.fastprogress import progress_bar

from ..callback import PRECISION_CALLBACKS, MixedPrecision
from ..mode import AMPMode, mode_support, model_device
from .tracer import tensors
from ..scaling_args import is_number as _is_number
from .snapshot import Snapshot, preserved

__all__ = ['PrecisionComparison']

# Of fastai's own callbacks those that shape a training step; MixHandler is MixUp and CutMix.
TRAINING_CALLBACKS = (TrainEvalCallback, MixHandler, GradientAccumulation, GradientClip, BnFreeze, ModelResetter, RNNCallback,
                      RNNRegularizer, ChannelsLast)
_STEP_EVENTS = ('before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_backward', 'before_step', 'after_step')
_ROUNDS = 8             # turns that each mode gets; the first warms up
_KEEP = 2**30           # bytes of batches that are kept; further steps take the same ones again
_WORTH = 1.05           # speed-up below which a mode does not pay
_COLORS = {'fp32': '#4c566a', 'bf16': '#2a78b8', 'fp16': '#d1701f'}


@dataclass
class _Mode:
    "One precision: where its training stands, and what was measured."
    mode: AMPMode | None
    support: str
    note: str = ''
    state: Snapshot | None = None
    cb: MixedPrecision | None = None
    n_before: int = 0             # steps that the callback's history held already
    losses: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)             # samples per second in each turn
    seconds: float = 0.
    peak: float = math.nan        # bytes
    done: bool = False

    @property
    def name(self): return self.mode.value if self.mode else 'fp32'


class PrecisionComparison:
    """Precisions side by side on one learner; the result of `Learner.compare_precision`.

    `table`: a DataFrame with a row for each mode: how the device runs it, steps trained, samples per second (median over
    the turns), speed-up over fp32 (median of the ratios within each turn, and their quartiles), peak memory in bytes
    (CUDA: of a training that is alone on the device), the mean loss of the last steps, its difference from fp32's on the
    same steps, the standard deviation of that loss between fp32 trainings with other seeds, skipped steps, the loss
    scale at the end, and a note. `losses`: the loss of each step by mode; `seed_losses`: those of fp32 with other seeds.
    `recommended` is one mode, `reason` says why.
    """
    def __init__(self, table: pd.DataFrame, losses: dict[str, list[float]], seed_losses: list[list[float]], device: str,
                 recommended: str, reason: str, notes: list[str]):
        self.table, self.losses, self.seed_losses, self.device = table, losses, seed_losses, device
        self.recommended, self.reason, self.notes = recommended, reason, notes

    def _shown(self):
        "The table for people: fewer columns, rounded."
        t, text = self.table, lambda f, values: ['-' if v != v else f(v) for v in values]
        shown = pd.DataFrame({'support': t['support'], 'steps': t['steps']}, index=t.index)
        shown['samples/s'] = text(lambda v: f'{v:,.0f}' if v >= 10 else f'{v:.2g}', t['samples/s'])
        shown['speed-up'] = ['-' if s != s else f'{s:.2f}' + (f' ({l:.2f} to {h:.2f})' if l < h else '')
                             for s, l, h in zip(t['speed-up'], t['speed-up q1'], t['speed-up q3'])]
        if t['peak memory'].notna().any(): shown['peak MiB'] = text(lambda v: f'{v / 2**20:,.0f}', t['peak memory'])
        shown['loss'] = text('{:.4g}'.format, t['loss'])
        shown['from fp32'] = ['-' if v != v else '0' if name == 'fp32' else f'{v:+.2g}' for name, v in t['loss difference'].items()]
        shown['seed spread'] = text('{:.2g}'.format, t['seed spread'])
        shown['skipped'] = t['skipped']
        shown['final scale'] = text('{:,g}'.format, t['final scale'])
        return shown

    def _lines(self):
        notes = [f'{name}: {note}' for name, note in self.table['note'].items() if note]
        return [f'Recommended: {self.recommended}. {self.reason}', *notes, *self.notes]

    def __repr__(self) -> str:
        return '\n'.join([f'Precisions on {self.device}', self._shown().rename_axis(None).to_string(), '', *self._lines()])

    def _repr_html_(self) -> str:
        from html import escape
        first, *rest = map(escape, self._lines())
        return f'<p>Precisions on {escape(self.device)}</p>{self._shown().to_html()}<p><b>{first}</b></p>' + ''.join(f'<p>{l}</p>' for l in rest)

    def plot(self,
        axs: Sequence | None = None, # Two matplotlib axes to draw on; new ones if None
    ): # The two matplotlib axes
        "The loss curves, between which other seeds lie in grey, and the speed of each mode against fp32."
        import matplotlib.pyplot as plt
        if axs is None: axs = plt.subplots(1, 2, figsize=(11, 4), layout='constrained', width_ratios=(3, 2))[1]
        curves, bars = axs
        names = [n for n in self.losses if self.losses[n]]
        def smooth(values): return np.where(np.isfinite(values), pd.Series(values, dtype=float).ewm(alpha=.2).mean(), np.nan)
        if len(self.seed_losses):
            seeds = np.array([smooth(l) for l in [self.losses['fp32'], *self.seed_losses]])
            curves.fill_between(range(1, seeds.shape[1] + 1), seeds.min(0), seeds.max(0), color='#d8dee9',
                                label=f'fp32, range of {len(seeds)} seeds', lw=0)
        for name, style in zip(names, ('-', '--', ':')):
            values, finite = smooth(self.losses[name]), np.isfinite(self.losses[name])
            short = 0 < len(values) < len(self.losses['fp32'])
            label = f'{name} (not finite from step {finite.argmin() + 1})' if not finite.all() else f'{name} (cut short)' if short else name
            dot = 'o' if len(values) == len(self.losses['fp32']) == 1 else None
            curves.plot(range(1, len(values) + 1), values, style, color=_COLORS[name], lw=2, label=label, marker=dot)
            if short and finite.all(): curves.plot(len(values), values[-1], '|', color=_COLORS[name], ms=14, mew=2)
        curves.set(title='Training loss (smoothed)', xlabel='step', ylabel='loss')
        curves.legend(frameon=False)
        table = self.table.iloc[::-1]
        bars.barh(table.index, table['speed-up'].fillna(0), color=[_COLORS[n] for n in table.index], height=.6)
        widest = max(1., table['speed-up'].max(), table['speed-up q3'].max())
        for i, (_, row) in enumerate(table.iterrows()):
            if row['speed-up'] != row['speed-up']:
                bars.text(.02 * widest, i, row['support'] if row['support'] in ('unsupported', 'failed') else 'not measured', va='center', color='#555')
                continue
            low, high = row['speed-up'] - row['speed-up q1'], row['speed-up q3'] - row['speed-up']
            if low + high > 0: bars.errorbar(row['speed-up'], i, xerr=[[low], [high]], color='black', capsize=3, lw=1)
            bars.text(row['speed-up q3'] + .03 * widest, i, f"{row['speed-up']:.2f}x" + (' (emulated)' if row['support'] == 'emulated' else ''), va='center')
        bars.axvline(1, color='black', lw=.8, ls=':')
        bars.set(title=f'Speed against fp32; recommended: {self.recommended}', xlabel='samples per second, fp32 = 1', xlim=(0, widest * 1.35))
        for ax in axs: ax.spines[['top', 'right']].set_visible(False)
        return axs


def compare(learn: Learner, modes: Any, n_steps: int, *, lr: Any = None, n_seeds: int = 3, max_seconds: float = 20.,
            cbs: Sequence[Callback] | None = None) -> PrecisionComparison:
    "`Learner.compare_precision`."
    modes = _modes(modes)
    _check('n_steps', n_steps, _is_number(n_steps, Integral) and n_steps >= 1, 'an integer of at least 1, such as 50')
    _check('n_seeds', n_seeds, _is_number(n_seeds, Integral) and n_seeds >= 0, 'an integer of at least 0, such as 3')
    _check('max_seconds', max_seconds, _is_number(max_seconds) and max_seconds > 0, 'a number of seconds above 0, such as 20.')
    if cbs is not None and (strangers := [cb for cb in cbs if cb not in list(learn.cbs)]):
        raise ValueError(f"cbs={list(cbs)!r} cannot be used: {strangers} {'is' if len(strangers) == 1 else 'are'} not among the learner's "
                         "callbacks. Pass some of `learn.cbs`.")
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        raise RuntimeError("compare_precision runs in one process. Call it before training is distributed, on one device.")
    if _guarded(learn): raise RuntimeError("compare_precision cannot run inside a fit. Call it before or after.")
    with preserved(learn, training=True, host=True), warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='.*is emulated on device.*')   # the table says so
        return _Comparison(learn, modes, n_steps, lr, n_seeds, max_seconds, cbs).run()


def _check(name, value, ok, allowed):
    if not ok: raise ValueError(f"{name}={value!r} cannot be used: {name} must be {allowed}.")


def _modes(modes) -> list[AMPMode | None]:
    "The modes to run, fp32 (None) first, each once."
    modes = [modes] if isinstance(modes, (str, torch.dtype)) else list(modes)
    return list(dict.fromkeys([None] + [None if m is torch.float32 or (isinstance(m, str) and m.lower() == 'fp32') else AMPMode(m) for m in modes]))


def _guarded(learn): return any(isinstance(cb, MixedPrecision) and cb._guard.running for cb in learn.cbs)


def _takes_part(cb: Callback) -> bool:
    "Does `cb` shape a training step? See `Learner.compare_precision` for the rule."
    if isinstance(cb, PRECISION_CALLBACKS): return False
    if isinstance(cb, TRAINING_CALLBACKS): return True
    return not type(cb).__module__.startswith('fastai.') and any(hasattr(type(cb), e) or e in vars(cb) for e in _STEP_EVENTS)


class _Comparison:
    "The work behind `compare`: everything here happens inside `preserved`."
    def __init__(self, learn, modes, n_steps, lr, n_seeds, max_seconds, cbs):
        self.learn, self.n_steps, self.lr, self.n_seeds, self.max_seconds = learn, n_steps, lr, n_seeds, max_seconds
        self.device = model_device(learn.model, getattr(learn.dls, 'device', None) or torch.device('cpu'))
        supports = [(m, *(mode_support(m, self.device) if m else ('native', ''))) for m in modes]
        self.runs = [_Mode(m, status, why if status == 'unsupported' else '', done=status == 'unsupported') for m, status, why in supports]
        self.template = next((cb for cb in learn.cbs if isinstance(cb, MixedPrecision)), None)
        chosen = lambda cb: _takes_part(cb) if cbs is None else isinstance(cb, TrainEvalCallback) or any(cb is o for o in cbs)
        self.cbs = [cb for cb in learn.cbs if chosen(cb) and not isinstance(cb, PRECISION_CALLBACKS)]
        self.last = max(1, min(10, n_steps // 5))                # the loss is the mean of so many last steps
        self.bar = None

    def run(self) -> PrecisionComparison:
        learn = self.learn
        show = hasattr(learn, 'progress') and learn.create_mbar  # not inside `learn.no_bar()`
        if show:
            self.bar, self.at = progress_bar(range(self.n_steps * (sum(not r.done for r in self.runs) + self.n_seeds)), leave=False), 0
            self.bar.update(0)
        self._draw()
        self._prepare()
        start = Snapshot(learn, training=True, host=True)
        for run in self.runs:
            if not run.done: self._try(run, self._begin, run, start)
        size = math.ceil(self.n_steps / _ROUNDS)
        for i, first in enumerate(range(0, self.n_steps, size)):
            # fp32 is the first of all, so that an error of the model itself is told apart; then each starts a round in turn.
            k = i % len(self.runs)
            for run in self.runs[k:] + self.runs[:k]:
                if not run.done: self._try(run, self._turn, run, range(first, min(first + size, self.n_steps)))
        for run in self.runs:
            if run.state is not None: self._end(run)
        seed_losses = [self._seeded(seed, start) for seed in range(1, self.n_seeds + 1)]
        if show: self.bar.on_iter_end()
        return self._report(seed_losses)

    def _draw(self):
        "Draw the batches, and see how fast the dataloader gives them."
        dl, self.batches, size, times = self.learn.dls.train, [], 0, []
        while len(self.batches) < self.n_steps:
            n, then = len(self.batches), time.perf_counter()
            for b in dl:
                b = self.learn._set_device(b)
                self.batches.append(b)
                self._wait()
                times.append(time.perf_counter() - then)
                size += sum(t.numel() * t.element_size() for t in tensors(b, floating=False))
                if len(self.batches) == self.n_steps or size > _KEEP: break
                then = time.perf_counter()
            if len(self.batches) == n:
                raise ValueError("The learner's training dataloader (`learn.dls.train`) gives no batches, so there is nothing to train on. With "
                                 "`drop_last=True` its dataset may be smaller than one batch.")
            if size > _KEEP: break
        self.load_seconds = float(np.median(times[1:] or times))

    def _batch(self, i):
        "A copy of the i-th batch, since callbacks such as CutMix write into it."
        return apply(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, self.batches[i % len(self.batches)])

    def _prepare(self):
        "What all modes have in common: the callbacks, the optimizer, and the start of a fit."
        learn = self.learn
        for cb in [o for o in learn.cbs if isinstance(o, PRECISION_CALLBACKS)]: learn.remove_cb(cb)
        learn.cbs = L(self.cbs)
        if not learn.opt: learn.create_opt()
        if learn.wd is not None: learn.opt.set_hypers(wd=learn.wd)
        learn.opt.set_hypers(lr=learn.lr if self.lr is None else self.lr)
        learn.n_epoch, learn.epoch, learn.n_iter, learn.dl = 1, 0, self.n_steps, learn.dls.train

    def _events(self, *names):
        for name in names: self.learn(name)

    def _begin(self, run, start):
        start.restore()
        if run.mode is not None:
            run.cb = self._precision(run.mode)
            self.learn.add_cb(run.cb)
            run.n_before = run.cb.scaling.history.n
        self._events('before_fit', 'before_epoch', 'before_train')
        run.state = Snapshot(self.learn, training=True, host=True)

    def _precision(self, mode):
        "The learner's own precision callback in this mode, scale and arguments included; one with defaults if it has none."
        if self.template is None: return MixedPrecision(mode, on_overflow='ignore')
        shared = {id(o): o for m in self.learn.model.modules() for o in (m, *m.parameters(recurse=False))}
        cb = copy.deepcopy(self.template, {id(self.learn): None, **shared})
        cb.amp_mode = cb._mode = mode
        cb.on_overflow = 'ignore'                                # a rerun would disturb the times; the table shows what it would tell
        return cb

    def _try(self, run, f, *args):
        "An error in low precision is a result; in fp32 it is the user's to see."
        try: f(*args)
        except Exception as e:
            if run.mode is None: raise
            run.done, run.support, run.state = True, 'failed', None
            run.note = 'it ran out of memory' if isinstance(e, torch.OutOfMemoryError) else f"{type(e).__name__}: {(str(e).strip() or '?').splitlines()[0]}"

    def _turn(self, run, steps):
        "Train `steps` in this mode, timed; bringing its state in and out is not."
        learn, losses, n = self.learn, [], 0
        run.state.restore()
        run.state = None                                         # freed before the steps, not after
        batches = [self._batch(i) for i in steps]
        own = _bytes(learn)
        cuda = self.device.type == 'cuda'
        self._wait()
        if cuda: torch.cuda.reset_peak_memory_stats(self.device)
        before, start = torch.cuda.memory_allocated(self.device) if cuda else 0, time.perf_counter()
        for i, b in zip(steps, batches):
            learn.one_batch(i, b)
            if not len(learn.yb): raise ValueError("The learner's training batches have no targets, so there is no loss to compare. Does "
                                                   "`learn.dls.n_inp` leave one?")
            losses.append(learn.loss.detach())
            n += len(tensors(b, floating=False)[0])
            if run.support == 'emulated' and run.seconds + time.perf_counter() - start > self.max_seconds: run.done = True
            self._tick(run.name)
            if run.done: break
        self._wait()
        seconds = time.perf_counter() - start
        if cuda: run.peak = max(torch.cuda.max_memory_allocated(self.device) - before + own, 0 if run.peak != run.peak else run.peak)
        run.seconds += seconds
        run.speeds.append(n / seconds)
        run.losses += [float(l) for l in losses]
        run.state = Snapshot(learn, training=True, host=True)
        if run.done and len(run.losses) < self.n_steps:
            run.note = f'cut short after {len(run.losses)} of {self.n_steps} steps and {run.seconds:.0f} s (`max_seconds={self.max_seconds:g}`)'

    def _end(self, run):
        run.state.restore()
        self._events('after_train', 'after_fit')
        run.state = None

    def _seeded(self, seed, start) -> list[float]:
        "fp32 again, with another order of the batches but for the last ones, and other random draws: the loss of each step."
        learn, losses, rng = self.learn, [], random.Random(seed)
        start.restore()
        random.seed(seed); np.random.seed(seed); torch.manual_seed(seed)
        head = range(self.n_steps - self.last)
        order = [*rng.sample(head, len(head)), *range(self.n_steps - self.last, self.n_steps)]
        self._events('before_fit', 'before_epoch', 'before_train')
        for i, j in enumerate(order):
            learn.one_batch(i, self._batch(j))
            losses.append(learn.loss.detach())
            self._tick(f'fp32, seed {seed}')
        self._events('after_train', 'after_fit')
        return [float(l) for l in losses]

    def _tick(self, comment):
        if self.bar is None: return
        self.at += 1
        self.bar.comment = comment
        self.bar.update(min(self.at, self.bar.total))

    def _wait(self):
        "Let the device finish, so that the clock sees its work."
        if self.device.type == 'xla':
            import torch_xla.core.xla_model as xm
            xm.mark_step()
            xm.wait_device_ops()
        elif self.device.type != 'cpu': torch.get_device_module(self.device.type).synchronize()

    # -- what came of it

    def _report(self, seed_losses):
        base, rows = self.runs[0], []
        spread = float(np.std([_tail(l, self.last) for l in [base.losses, *seed_losses]], ddof=1)) if seed_losses else math.nan
        for run in self.runs:
            n, ratios = len(run.losses), [a / b for a, b in zip(_timed(run.speeds), _timed(base.speeds[:len(run.speeds)]))]
            low, mid, high = np.percentile(ratios, (25, 50, 75)) if ratios else [math.nan] * 3
            last, scaled = min(self.last, n), run.cb is not None and run.mode.needs_loss_scaling and n > 0
            skips = run.cb.scaling.history.skips[run.n_before:] if scaled else ()
            rows.append({
                'mode': run.name, 'support': run.support, 'steps': n,
                'samples/s': float(np.median(_timed(run.speeds))) if run.speeds else math.nan,
                'speed-up': mid, 'speed-up q1': low, 'speed-up q3': high, 'peak memory': run.peak, 'loss': _tail(run.losses, last),
                'loss difference': _tail(run.losses, last) - _tail(base.losses[:n], last), 'seed spread': spread, 'skipped': int(sum(skips)),
                'final scale': run.cb.scaling.state_dict().get('scale', math.nan) if scaled else math.nan, 'note': run.note})
        table = pd.DataFrame(rows).set_index('mode')
        recommended, reason = recommend(table)
        return PrecisionComparison(table, {r.name: r.losses for r in self.runs}, seed_losses, _device_name(self.device), recommended, reason,
                                   self._notes(table, recommended))

    def _notes(self, table, recommended):
        notes = [f'Loss: mean of the last {self.last} of {self.n_steps} training steps' + (f'; seed spread: its standard deviation over '
                 f'{self.n_seeds + 1} fp32 trainings that differ in the order of batches and in random draws.' if self.n_seeds else '.')]
        if len(self.batches) < self.n_steps: notes.append(f'The steps took {len(self.batches)} batches in turn: more would not have fitted in 1 GiB.')
        cold = [r.name for r in self.runs if len(r.speeds) == 1]
        if cold: notes.append(f"The speed of {' and '.join(cold)} includes the first steps, which are slow; a larger `n_steps` leaves them out.")
        n, speed = len(tensors(self.batches[0], floating=False)[0]), table['samples/s'][recommended]
        if n / self.load_seconds < speed:
            notes.append(f'The dataloader gives {n / self.load_seconds:,.0f} samples/s, fewer than {recommended} trains: it may limit training in any '
                         'precision.')
        return notes


def _timed(speeds): return speeds[1:] or speeds                  # the first turn warms up
def _tail(losses, n): return float(np.mean(losses[-n:])) if n and losses else math.nan


def _bytes(learn) -> int:
    "What parameters, buffers, gradients and the optimizer's state take on the model's device."
    inner = getattr(learn.opt, 'opt', learn.opt)
    states = [learn.opt.state, inner.state] if inner is not learn.opt else [inner.state]
    held = [t for s in states for d in s.values() for t in (d.values() if isinstance(d, dict) else ())]
    held += [t for p in learn.model.parameters() for t in (p, p.grad)] + list(learn.model.buffers())
    each_once = {id(t): t for t in held if isinstance(t, torch.Tensor) and t.device.type != 'cpu'}
    return sum(t.numel() * t.element_size() for t in each_once.values())


def _device_name(device: torch.device) -> str:
    if device.type == 'cuda': return f'{device} ({torch.cuda.get_device_name(device)})'
    n = torch.get_num_threads()
    return f"{device} ({n} thread{'s' * (n != 1)})" if device.type == 'cpu' else str(device)


def recommend(
    table: pd.DataFrame, # As `PrecisionComparison.table`
) -> tuple[str, str]: # The mode, and why
    """One mode: the fastest that pays and trains as fp32 does.

    It pays if the median speed-up is 1.05 or more and three turns of four were faster than fp32. It trains as fp32 does
    if the mean of the last losses is finite and above fp32's by no more than two standard deviations between seeds, or
    1 % where that is more, and the loss scale has not fallen below 1. Of two equally fast (5 %) bf16 is taken, which needs no loss scaling.
    """
    base, others = table.loc['fp32'], [n for n in table.index if n != 'fp32']
    if not others: return 'fp32', 'Nothing else was asked for.'
    if not math.isfinite(base['loss']): return 'fp32', "Its own loss is not finite, so nothing can be compared: look at data, model and learning rate first."
    tolerance = np.nanmax([2 * base['seed spread'], .01 * abs(base['loss'])])
    def against(row):
        "What speaks against a mode, as a list."
        if row['support'] in ('unsupported', 'failed'): return ['does not run here']
        found = []
        if not math.isfinite(row['loss']): found.append('its loss is not finite')
        elif row['loss difference'] > tolerance:
            skips = f" ({row['skipped']} of {row['steps']} steps were skipped; a larger `n_steps` tells whether that is all)" if row['skipped'] else ''
            found.append(f"its loss is {row['loss difference']:.2g} above fp32's, more than {tolerance:.2g}{skips}")
        if row['final scale'] < 1: found.append(f"its loss scale fell to {row['final scale']:.2g}: below 1 the model does not fit fp16")
        if row['speed-up'] < _WORTH or row['speed-up q1'] <= 1:
            how = 'slower than fp32' if row['speed-up'] < .95 else 'no faster than fp32' if row['speed-up'] < _WORTH else 'not reliably faster than fp32'
            found.append(f"{how} here ({row['speed-up']:.2f} times its speed)" + (': the device only emulates it' if row['support'] == 'emulated' else ''))
        return found
    verdicts = {n: against(table.loc[n]) for n in others}
    good, bad = [n for n in others if not verdicts[n]], '; '.join(f"{n}: {', and '.join(v)}" for n, v in verdicts.items() if v)
    if not good:
        hint = ''
        if any(table['support'][n] == 'native' and table['speed-up'][n] < _WORTH for n in others):
            hint = " Low precision gains on wide layers and large batches; here its casts cost what it saves."
        saving = {n: 1 - table['peak memory'][n] / base['peak memory'] for n in others if len(verdicts[n]) == 1 and table['speed-up'][n] > .95}
        saving = {n: s for n, s in saving.items() if s >= .2}
        if saving: hint += f" {max(saving, key=lambda n: saving[n])} would take {max(saving.values()):.0%} less memory at about the same speed."
        return 'fp32', f'{bad}.{hint}'
    fastest = max(table['speed-up'][n] for n in good)
    best = 'bf16' if 'bf16' in good and table['speed-up']['bf16'] * 1.05 >= fastest else max(good, key=lambda n: table['speed-up'][n])
    row, equal = table.loc[best], [n for n in good if n != best and table['speed-up'][n] * 1.05 >= fastest]
    why = f"{row['speed-up']:.2f} times fp32's speed, and a loss no further above fp32's than {tolerance:.2g}"
    if row['peak memory'] < .95 * base['peak memory']: why += f", with {1 - row['peak memory'] / base['peak memory']:.0%} less memory"
    if equal: why += f"; {equal[0]} is about as fast" + (' but needs loss scaling' if best == 'bf16' else '')
    return best, f"{why}{f' ({bad})' if bad else ''}. Next: `learn.to_{best}()`."
