"Recommendation from a comparison, how sure it is, and what else holds a training step back."
from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

__all__ = ['Tolerance', 'fused_name', 'recommend', 'remarks_on']

_FAULTS = 1000          # page faults a step above which the memory allocator holds training back
_WORTH = 1.05           # speed-up below which a mode does not pay
_TURNS = 4              # the first warms up, and three are needed for a range
# One-sided 95 % prediction interval of one more training, by the number of trainings: t * sqrt(1 + 1 / n).
_INTERVAL = {2: 7.7, 3: 3.4, 4: 2.6, 5: 2.3}


class Tolerance:
    """How far above fp32's loss another may be: as far as one more training of fp32 may, and 1 % in any case.

    Where fp32 was trained once there is no spread, and only a wide margin counts: a tenth of the loss, or two standard
    deviations between its last steps.
    """
    def __init__(self,
        last: Sequence[float], # fp32's losses in the last steps
        seeds: Sequence[float], # The mean of those in trainings with other seeds
    ):
        self.loss, self.n = float(np.mean(last)), 1 + len(seeds)
        self.spread = float(np.std([self.loss, *seeds], ddof=1)) if seeds else math.nan
        if seeds: self.value = max(.01 * abs(self.loss), _INTERVAL.get(self.n, 2.) * self.spread)
        else: self.value = max(.1 * abs(self.loss), 2 * float(np.std(last)))

    def __str__(self) -> str:
        if self.n == 1: return f'{self.value:.2g}, a wide margin, as there was no second training of fp32 to measure by'
        return f'{self.value:.2g}, as {self.n} trainings of fp32 allow'


def recommend(
    table: pd.DataFrame, # As `PrecisionComparison.table`
    tolerance: Tolerance,
    calls: dict[str, str], # For each mode the call that trains in it
) -> tuple[str, str]: # The mode, and why
    """Return one mode: the fastest that pays and trains as fp32 does.

    It pays if the median speed-up is 1.05 or more and its range over the turns (half of them) is further above 1 than
    it is wide. It trains as fp32 does if the mean of the last losses is finite and above fp32's by no more than the
    tolerance, no more than half of its steps were skipped, and the loss scale has not fallen below 1. Of two equally
    fast (5 %) bf16 is taken, which needs no loss scaling.
    """
    base, others = table.loc['fp32'], [n for n in calls if n != 'fp32']
    if not others: return 'fp32', 'Nothing else was asked for.'
    if not math.isfinite(base['loss']):
        return 'fp32', 'Its own loss is not finite, so nothing can be compared: look at data, model and rate first.'
    verdicts = {n: _against(table.loc[n], tolerance) for n in others}
    good = [n for n in others if not verdicts[n]]
    bad = '; '.join(f"{n}: {', '.join(v)}" for n, v in verdicts.items() if v)
    if not good: return 'fp32', f'{bad}.{_hint(table, verdicts)}'
    fastest = max(good, key=lambda n: table['speed-up'][n])
    equal = [n for n in good if table['speed-up'][n] * 1.05 >= table['speed-up'][fastest]]
    best = 'bf16' if 'bf16' in equal else fastest
    row = table.loc[best]
    why = f"{_speed(row)} times fp32's speed, and a loss no further above fp32's than {tolerance}"
    if (saved := _saved(table, best)) > .05: why += f', with {saved:.0%} less memory'
    if rival := next((n for n in equal if n != best), None):
        needs_more = best == 'bf16' and rival.endswith('fp16')
        why += f'; {rival} is about as fast' + (' but needs loss scaling' if needs_more else '')
    return best, f"{why}{f' ({bad})' if bad else ''}. Next: `{calls[best]}`."


def _against(row: pd.Series, tolerance: Tolerance) -> list[str]:
    "Return what speaks against a mode."
    if row['support'] in ('unsupported', 'failed'): return ['does not run here']
    found = []
    if not math.isfinite(row['loss']): found.append('its loss is not finite')
    elif row['skipped'] > row['steps'] / 2:                        # which takes less time, and leaves the loss alone
        found.append(f"it skipped {row['skipped']} of {row['steps']} steps, so neither its loss nor its speed tells "
                     'anything: compare with a larger `n_steps`, or see what `learn.precision_report()` finds')
    elif row['loss difference'] > tolerance.value:
        skips = f" ({row['skipped']} of {row['steps']} steps skipped; a larger `n_steps` tells whether that is all)"
        found.append(f"its loss is {row['loss difference']:.2g} above fp32's, more than {tolerance}" +
                     (skips if row['skipped'] else ''))
    if row['final scale'] < 1:
        found.append(f"its loss scale fell to {row['final scale']:.2g}: below 1 the model does not fit fp16")
    slow = _too_slow(row)
    return [*found, slow] if slow else found


def _too_slow(row: pd.Series) -> str:
    "Return why the speed is none to recommend; '' if it is."
    if row['turns'] < _TURNS: return f"it was timed in {row['turns']} turns: too few for a range of its speed"
    low, high, width = row['speed-up q1'], row['speed-up q3'], row['speed-up q3'] - row['speed-up q1']
    if low - 1 > width and row['speed-up'] >= _WORTH: return ''
    if 1 - high > width: how = 'slower than fp32'
    elif high < _WORTH: how = 'no faster than fp32'
    else: how = 'not reliably faster than fp32'
    emulated = ': the device only emulates it' if row['support'] == 'emulated' else ''
    return f'{how} here ({_speed(row)} times its speed){emulated}'


def _speed(row: pd.Series) -> str: return f"{row['speed-up']:.2f}, {row['speed-up q1']:.2f} to {row['speed-up q3']:.2f}"


def _saved(table: pd.DataFrame, mode: str) -> float: # nan where memory is not known
    return 1 - table['peak memory'][mode] / table['peak memory']['fp32']


def _hint(table: pd.DataFrame, verdicts: dict[str, list[str]]) -> str:
    "Return what to know where fp32 is recommended for its speed alone."
    slow = [n for n, v in verdicts.items() if v == [_too_slow(table.loc[n])]]
    hint = ' Low precision gains on wide layers and large batches.' if 'native' in table['support'][slow].values else ''
    close = {_saved(table, n): n for n in slow if table['speed-up'][n] > .95 and _saved(table, n) >= .2}
    if not close: return hint
    return f'{hint} {close[max(close)]} would take {max(close):.0%} less memory at about the same speed.'


def remarks_on(
    row: pd.Series, # Of `PrecisionComparison.table`
    fused: str | None, # What `fused_name` says of the learner's optimizer
    device: torch.device,
) -> list[str]: # Sentences
    "Return what takes most of a step, which limits what any precision can gain (Amdahl's law), and what would help."
    found = []
    phases = {'the forward pass': row['forward'], 'the backward pass': row['backward'],
              'the optimizer': row['optimizer'], 'what is left (Python, callbacks)': row['rest']}
    step = sum(phases.values())
    if step > 0:                                                 # else not measured
        longest, share = max(phases, key=lambda k: phases[k]), row['optimizer'] / step
        found.append(f'{longest[0].upper()}{longest[1:]} takes {phases[longest] / step:.0%} of the {row.name} step.')
        if share > 1 / 3 and fused:
            if longest != 'the optimizer': found.append(f'The optimizer takes {share:.0%} of the {row.name} step.')
            found.append(f'A fused optimizer takes less: `opt_func=fused(torch.optim.{fused})` (fastxtend_amp.fused).')
        if (data := row['data'] / (row['data'] + step)) > .2:
            found.append(f"The data take {data:.0%} of the time of a {row.name} step: the dataloader gives "
                         f"{row['samples'] / row['data']:,.0f} samples/s, in any precision. `num_workers` or "
                         '`pin_memory=True` may help.')
    if row['page faults'] > _FAULTS:
        found.append(f"A step asks the system for memory {row['page faults']:,.0f} times (page faults), which takes "
                     'time in every precision: call `fastxtend_amp.keep_freed_memory()` first, and compare again.')
    if device.type == 'cuda':
        on = torch.backends.cuda.matmul.allow_tf32
        faster = '.' if on else ': `torch.set_float32_matmul_precision("high")` would make fp32 faster, too.'
        found.append(f"TF32 was {'on' if on else 'off'} for fp32's matrix multiplications{faster}")
    return found


def fused_name(
    opt: Any, # fastai's `Optimizer` or `OptimWrapper`
) -> str | None:
    "Return the optimizer of torch.optim with a fused kernel that does what `opt` does; None if it is one, or none is."
    inner = getattr(opt, 'opt', opt)
    if isinstance(inner, torch.optim.Optimizer):
        known = type(inner) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
        is_fused = any(g.get('fused') for g in inner.param_groups)
        return type(inner).__name__ if known and not is_fused else None
    steps = {getattr(cb, '__name__', '') for cb in getattr(opt, 'cbs', ())}
    if 'adam_step' in steps: return 'AdamW'
    return 'SGD' if steps & {'momentum_step', 'sgd_step'} else None
