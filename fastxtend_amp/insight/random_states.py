"The states of the process's random number generators: they are read, set and restored."
import random, threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

Generators = list[tuple[Callable, Callable]]                     # functions that set and get the state of each
RandomState = list[tuple[Callable, Any]]                         # functions that set a generator, and what they set


def torch_generators() -> Generators:
    "Return functions that set and get the states of PyTorch's global generators, without synchronizing."
    pairs: Generators = [(torch.set_rng_state, torch.default_generator.get_state)]
    device = torch.get_device_module()                           # the accelerator's, if there is one
    # Reading the state of an accelerator that is not in use yet would start it.
    if not getattr(device, 'is_initialized', lambda: True)(): return pairs
    for name in ('rng_state_all', 'rng_state'):
        get_state = getattr(device, f'get_{name}', None)
        if get_state: return [*pairs, (getattr(device, f'set_{name}'), get_state)]
    return pairs


def random_state(
    generators: Generators | None = None, # The global ones of Python, NumPy and PyTorch if None
) -> RandomState:
    "Return the states of the generators, for `set_random_state`."
    of_python: Generators = [(random.setstate, random.getstate), (np.random.set_state, np.random.get_state)]
    return [(set_state, get_state()) for set_state, get_state in generators or of_python + torch_generators()]


def set_random_state(state: RandomState) -> None:
    "Restore a state from `random_state`."
    for set_state, value in state: set_state(value)


_one_at_a_time = threading.RLock()                               # random states and warnings belong to the process


@contextmanager
def random_state_kept() -> Iterator[None]:
    "Restore the states of the random number generators on exit. Other threads wait until then."
    with _one_at_a_time:
        state = random_state()
        try: yield
        finally: set_random_state(state)
