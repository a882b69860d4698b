"Every use of a name that PyTorch, fastai, fastcore or torch_xla do not document: one function each, with what happens without it."
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch

__all__: list[str] = []

# -- autocast


# -- loss scaling and optimizers


# -- modules


# -- half_weights


# -- insight

class Operator(NamedTuple):
    "What is known of one of PyTorch's operators."
    call: Callable # Runs it
    name: str # Without namespace: 'addmm'
    draws: bool # Does it draw random numbers?
    is_view: bool # Does it give another view of the same memory?
    changes_input: bool # Does it write into its first argument?


@lru_cache(maxsize=None)
def _operator(func: Any) -> Operator:
    "Relies on `OpOverload._schema` and `.tags` (PyTorch 1.13)."
    returned = [r.alias_info for r in func._schema.returns]
    return Operator(func, func._schema.name.rpartition('::')[2], torch.Tag.nondeterministic_seeded in func.tags,
                    any(a is not None and not a.is_write for a in returned), func._schema.is_mutable)


def watch_operators(
    handle: Callable[[Operator, tuple, dict], Any], # Called in place of each operator; gives its result
) -> AbstractContextManager:
    """Every operator that this thread runs inside, below autograd and autocast, goes through `handle`; not its own ones.

    Relies on `torch.utils._python_dispatch.TorchDispatchMode` (PyTorch 1.12). Where that is gone nothing is seen of
    operators: the report knows the modules' outputs alone, and dropout masks may differ between precisions.
    """
    try: from torch.utils._python_dispatch import TorchDispatchMode
    except ImportError: return nullcontext()
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return handle(_operator(func), args, kwargs or {})
    return Watch()


def operators_unwatched() -> AbstractContextManager:
    """What runs inside is not seen by `watch_operators`.

    Relies on `torch.utils._python_dispatch._disable_current_modes` (PyTorch 2.0). Where that is gone `handle` sees
    operators that run inside, too, which takes time and changes nothing.
    """
    try: from torch.utils._python_dispatch import _disable_current_modes
    except ImportError: return nullcontext()
    return _disable_current_modes()


@contextmanager
def no_reentrant_checkpoints() -> Iterator[None]:
    """Reentrant activation checkpoints (`use_reentrant=True`) work as `use_reentrant=False` does, in the whole process.

    The reentrant kind runs its modules without a graph, so that nothing inside gets a gradient that could be looked at,
    and refuses `torch.autograd.grad`. Relies on `torch.utils.checkpoint.CheckpointFunction`, the autograd function
    behind it (PyTorch 0.4). Where that is gone such checkpoints stay as they are, and gradients inside are unknown.
    """
    from torch.utils import checkpoint
    function = getattr(checkpoint, 'CheckpointFunction', None)
    if function is None:
        yield
        return
    def apply(run, preserve_rng_state, *args):
        return checkpoint.checkpoint(run, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
    own = function.__dict__.get('apply')
    function.apply = apply
    try: yield
    finally:
        if own is None: del function.apply
        else: function.apply = own


# -- devices


# -- tools
