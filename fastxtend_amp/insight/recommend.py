"Which precision a comparison recommends, and what else holds a training step back."
from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import torch

__all__ = ['fused_name', 'notes_on', 'recommend']

_WORTH = 1.05           # speed-up below which a mode does not pay
_FAULTS = 1000          # page faults a step above which the memory allocator holds training back


def recommend(
    table: pd.DataFrame, # As `PrecisionComparison.table`
    calls: dict[str, str] | None = None, # For each mode the call that trains in it
) -> tuple[str, str]: # The mode, and why
    """One mode: the fastest that pays and trains as fp32 does.

    It pays if the median speed-up is 1.05 or more and three turns of four were faster than fp32. It trains as fp32 does
    if the mean of the last losses is finite and above fp32's by no more than two standard deviations between seeds, or
    1 % where that is more, no more than half of its steps were skipped, and the loss scale has not fallen below 1. Of
    two equally fast (5 %) bf16 is taken, which needs no loss scaling.
    """
    base, others = table.loc['fp32'], [n for n in table.index if n != 'fp32']
    if not others: return 'fp32', 'Nothing else was asked for.'
    if not math.isfinite(base['loss']):
        return 'fp32', 'Its own loss is not finite, so nothing can be compared: look at data, model and rate first.'
    tolerance = np.nanmax([2 * base['seed spread'], .01 * abs(base['loss'])])
    verdicts = {n: _against(table.loc[n], tolerance) for n in others}
    good = [n for n in others if not verdicts[n]]
    bad = '; '.join(f"{n}: {', '.join(v)}" for n, v in verdicts.items() if v)
    if not good: return 'fp32', f'{bad}.{_hint(table, verdicts)}'
    fastest = max(good, key=lambda n: table['speed-up'][n])
    equal = [n for n in good if table['speed-up'][n] * 1.05 >= table['speed-up'][fastest]]
    best = 'bf16' if 'bf16' in equal else fastest
    row = table.loc[best]
    why = f"{row['speed-up']:.2f} times fp32's speed, and a loss no further above fp32's than {tolerance:.2g}"
    if row['peak memory'] < .95 * base['peak memory']:
        why += f", with {1 - row['peak memory'] / base['peak memory']:.0%} less memory"
    rival = next((n for n in equal if n != best), None)
    if rival:
        needs_more = best == 'bf16' and rival.endswith('fp16')
        why += f'; {rival} is about as fast' + (' but needs loss scaling' if needs_more else '')
    call = (calls or {}).get(best, f'learn.to_{best}()')
    return best, f"{why}{f' ({bad})' if bad else ''}. Next: `{call}`."


def _against(row, tolerance) -> list[str]:
    "What speaks against a mode."
    if row['support'] in ('unsupported', 'failed'): return ['does not run here']
    found = []
    if not math.isfinite(row['loss']): found.append('its loss is not finite')
    elif row['skipped'] > row['steps'] / 2:                        # which takes less time, and leaves the loss alone
        found.append(f"it skipped {row['skipped']} of {row['steps']} steps, so neither its loss nor its speed tells "
                     'anything: compare with a larger `n_steps`, or see what `learn.precision_report()` finds')
    elif row['loss difference'] > tolerance:
        skips = f" ({row['skipped']} of {row['steps']} steps skipped; a larger `n_steps` tells whether that is all)"
        found.append(f"its loss is {row['loss difference']:.2g} above fp32's, more than {tolerance:.2g}" +
                     (skips if row['skipped'] else ''))
    if row['final scale'] < 1:
        found.append(f"its loss scale fell to {row['final scale']:.2g}: below 1 the model does not fit fp16")
    if row.get('turns', 2) < 2: return [*found, 'it was timed once, which includes warming up: too little to tell']
    if _pays(row): return found
    how = 'not reliably faster than fp32'
    if row['speed-up'] < .95: how = 'slower than fp32'
    elif row['speed-up'] < _WORTH: how = 'no faster than fp32'
    emulated = ': the device only emulates it' if row['support'] == 'emulated' else ''
    return [*found, f"{how} here ({row['speed-up']:.2f} times its speed){emulated}"]


def _pays(row) -> bool: return row['speed-up'] >= _WORTH and row['speed-up q1'] > 1


def _hint(table, verdicts) -> str:
    "What to know where fp32 is recommended."
    hint = ''
    if any(table['support'][n] == 'native' and table['speed-up'][n] < _WORTH for n in verdicts):
        hint = ' Low precision gains on wide layers and large batches; here its casts cost what it saves.'
    close = [n for n, v in verdicts.items() if len(v) == 1 and table['speed-up'][n] > .95 and not _pays(table.loc[n])]
    saving = {n: 1 - table['peak memory'][n] / table['peak memory']['fp32'] for n in close}
    most = max((n for n in close if saving[n] >= .2), key=lambda n: saving[n], default=None)
    if most: hint += f' {most} would take {saving[most]:.0%} less memory at about the same speed.'
    return hint


def notes_on(
    table: pd.DataFrame, # As `PrecisionComparison.table`
    recommended: str, # The mode
    batches: Any, # The `Batches` that were trained on
    fused: str | None, # What `fused_name` says of the learner's optimizer
    device: torch.device,
) -> list[str]: # Sentences
    "What holds the recommended training back besides its precision: optimizer, data, memory that comes and goes."
    found = [*_on_step(table.loc[recommended], recommended, batches, fused)]
    faults = table['page faults'].max()
    if faults > _FAULTS:
        found.append(f'A step asks the system for memory {faults:,.0f} times (page faults), which takes time in every '
                     'precision: call `fastxtend_amp.keep_freed_memory()` first, and compare again.')
    if device.type == 'cuda':
        on = torch.backends.cuda.matmul.allow_tf32
        faster = '.' if on else ': `torch.set_float32_matmul_precision("high")` would make fp32 faster, too.'
        found.append(f"TF32 was {'on' if on else 'off'} for fp32's matrix multiplications{faster}")
    return found


def _on_step(row, mode, batches, fused) -> list[str]:
    "Amdahl's law: what takes most of a step limits what any precision can gain."
    phases = {'the forward pass': row['forward'], 'the backward pass': row['backward'],
              'the optimizer': row['optimizer'], 'what is left (Python, callbacks)': row['rest']}
    step = sum(phases.values())
    if not step > 0: return []                                   # not measured
    longest, share = max(phases, key=lambda k: phases[k]), row['optimizer'] / step
    found = [f'{longest[0].upper()}{longest[1:]} takes {phases[longest] / step:.0%} of the {mode} step.']
    if share > 1 / 3 and fused:
        if longest != 'the optimizer': found.append(f'The optimizer takes {share:.0%} of the {mode} step.')
        found.append(f'A fused optimizer takes less: `opt_func=fused(torch.optim.{fused})` (fastxtend_amp.fused).')
    data = row['data'] / (row['data'] + step)
    if data > .2:
        copying = batches.copy_seconds > batches.seconds / 2
        where = 'copying them to the device (`pin_memory=True`)' if copying else 'loading them (`num_workers`)'
        found.append(f'The data take {data:.0%} of the time of a {mode} step, most of it {where}: the dataloader gives '
                     f'{batches.size / batches.seconds:,.0f} samples/s, in any precision.')
    return found


def fused_name(
    opt: Any, # fastai's `Optimizer` or `OptimWrapper`
) -> str | None:
    "The optimizer of torch.optim with a fused kernel that does what `opt` does; None if it is one, or there is none."
    inner = getattr(opt, 'opt', opt)
    if isinstance(inner, torch.optim.Optimizer):
        known = type(inner) in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)
        is_fused = any(g.get('fused') for g in inner.param_groups)
        return type(inner).__name__ if known and not is_fused else None
    steps = {getattr(cb, '__name__', '') for cb in getattr(opt, 'cbs', ())}
    if 'adam_step' in steps: return 'AdamW'
    return 'SGD' if steps & {'momentum_step', 'sgd_step'} else None
