"What holds training back besides its precision: optimizer, data, memory that comes and goes."
from __future__ import annotations

from typing import Any

import pandas as pd
import torch

__all__ = ['fused_name', 'remarks_on']

_FAULTS = 1000          # page faults a step above which the memory allocator holds training back


def remarks_on(
    row: pd.Series, # Of the mode in `PrecisionComparison.table`
    mode: str,
    n_samples: int, # In a batch
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
        found.append(f'{longest[0].upper()}{longest[1:]} takes {phases[longest] / step:.0%} of the {mode} step.')
        if share > 1 / 3 and fused:
            if longest != 'the optimizer': found.append(f'The optimizer takes {share:.0%} of the {mode} step.')
            found.append(f'A fused optimizer takes less: `opt_func=fused(torch.optim.{fused})` (fastxtend_amp.fused).')
        if (data := row['data'] / (row['data'] + step)) > .2:
            found.append(f'The data take {data:.0%} of the time of a {mode} step: the dataloader gives '
                         f"{n_samples / row['data']:,.0f} samples/s, in any precision. `num_workers` or "
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
