"How much memory a learner's training state takes, and how much is free."
from __future__ import annotations

import math, os

import torch
from fastai.learner import Learner

__all__ = ['free_memory', 'learner_bytes']


def learner_bytes(learn: Learner, everywhere: bool = False) -> int:
    "What parameters, buffers, gradients and the optimizer's state take; those on the CPU count with `everywhere` only."
    states = [getattr(o, 'state', {}) for o in (learn.opt, getattr(learn.opt, 'opt', None)) if o is not None]
    held = [t for s in states for d in s.values() for t in (d.values() if isinstance(d, dict) else ())]
    held += [t for p in learn.model.parameters() for t in (p, p.grad)] + list(learn.model.buffers())
    each_once = {id(t): t for t in held if isinstance(t, torch.Tensor) and (everywhere or t.device.type != 'cpu')}
    return sum(t.numel() * t.element_size() for t in each_once.values())


def free_memory(
    device: torch.device,
) -> float: # Bytes; inf where there is no way to tell
    "How much memory is free on `device`."
    if device.type == 'cuda':
        try: return torch.cuda.mem_get_info(device)[0]
        except RuntimeError: return math.inf                     # a driver that does not tell
    if device.type == 'cpu' and 'SC_AVPHYS_PAGES' in getattr(os, 'sysconf_names', {}):
        return os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    return math.inf
