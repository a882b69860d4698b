"Small helpers that several files share: random states, colours of precisions, DTensors, errors and warnings."
from __future__ import annotations

import inspect, random, sys, warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

__all__ = ['PRECISION_COLORS', 'first_line', 'is_dtensor', 'random_state', 'random_state_kept',
           'set_random_state', 'several_processes', 'type_name', 'warn_user']

# One colour for a precision in every plot.
PRECISION_COLORS = {'fp32': '#4c566a', 'bf16': '#2a78b8', 'fp16': '#d1701f', 'half weights': '#17a2a2'}

RandomState = list[tuple[Callable, Any]]


def random_state(
    everything: bool = False, # Whether Python's and NumPy's generators belong to it, besides torch's
) -> RandomState: # Pairs: the function that sets a generator, and its state
    "Return the state of the global random number generators, for `set_random_state`; does not wait for a device."
    states: RandomState = [(torch.set_rng_state, torch.get_rng_state())]
    if everything: states += [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state())]
    if not torch.accelerator.is_available(): return states
    module: Any = torch.get_device_module(torch.accelerator.current_accelerator())
    if not getattr(module, 'is_initialized', lambda: True)(): return states    # asking does not start it
    which = 'rng_state_all' if hasattr(module, 'get_rng_state_all') else 'rng_state'
    get = getattr(module, f'get_{which}', None)
    if get is not None: states.append((getattr(module, f'set_{which}'), get()))
    return states


def set_random_state(state: RandomState) -> None:
    "Put the generators back to what `random_state` gave."
    for set_state, value in state: set_state(value)


@contextmanager
def random_state_kept() -> Iterator[None]:
    "Put the random number generators of torch, Python and NumPy back at the end."
    state = random_state(everything=True)
    try: yield
    finally: set_random_state(state)


def first_line(error: BaseException, limit: int = 200) -> str:
    "Return what an exception says, in one line; its type's name where it says nothing."
    lines = str(error).strip().splitlines()
    return lines[0][:limit].rstrip('.: ') if lines else type(error).__name__


def several_processes() -> bool:
    "Return whether this process trains together with others."
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def is_dtensor(t: Any) -> bool:
    "Return whether `t` is a DTensor, as FSDP2's `fully_shard` makes of parameters."
    module: Any = sys.modules.get('torch.distributed.tensor')    # imported by whoever made a DTensor, and not before
    return module is not None and isinstance(t, module.DTensor)


_NOT_THE_USERS = ('fastxtend_amp', 'fastai', 'fastcore', 'torch', 'contextlib')


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    "Warn at the user's own line: the innermost one that is not in this package, fastai, fastcore or PyTorch."
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get('__name__', '').partition('.')[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=max(level, 1))


def type_name(kind: type) -> str:
    "Return the name of a class as it is written in code: `nn.LayerNorm` for PyTorch's modules."
    return f'nn.{kind.__name__}' if kind.__module__.startswith('torch.nn') else kind.__name__
