"""PyTorch's undocumented names that training and reports need; a few stand where they are used.

Each docstring says what is relied on, since which version, and what happens where it is gone. `tests/test_compat.py`
has a test for each.
"""
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._functorch import config
from torch.autograd import forward_ad
from torch.nn.modules.conv import _ConvNd as AnyConv  # noqa: F401  the base class of convolutions, seen in 2.9 to 2.15
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: F401  since 1.12
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only  # noqa: F401  since 1.13
from torch.utils.flop_counter import flop_registry

# The attribute in which `torch.compile(module)` keeps the module (2.0). Without it a compiled model is one module.
COMPILED_NAME = '_orig_mod'


@contextmanager
def autocast_restored(device_type: str) -> Iterator[None]:
    """Restore this thread's autocast state, for one type of device, and grad mode at the end.

    Relies on the getters and setters that `torch.autocast` calls itself (with a device type since 2.4), and on
    `torch.autocast_increment_nesting` (since 1.10), as there is no getter. A `KeyboardInterrupt` between two lines of
    `torch.autocast.__enter__` leaves state that no `__exit__` restores. Without these names the first fit fails.
    """
    settings = ((torch.set_autocast_enabled, device_type, torch.is_autocast_enabled(device_type)),
                (torch.set_autocast_dtype, device_type, torch.get_autocast_dtype(device_type)),
                (torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled()),
                (torch.set_grad_enabled, torch.is_grad_enabled()))
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    try: yield
    finally:
        while torch.autocast_increment_nesting() < depth: pass
        while torch.autocast_decrement_nesting() >= depth: pass
        torch.clear_autocast_cache()
        for setter, *values in settings: setter(*values)


def around_backward(
    loss: torch.Tensor,
    before: Callable[[], None],
    after: Callable[[], None],
) -> None:
    """Call `before` when a backward pass from `loss` begins, and `after` when all gradients are there.

    Relies on `queue_callback` of autograd's engine (since 0.4), as DDP and FSDP2 do, whose callbacks have to run before
    `after`. Without it a second backward pass in a step fails.
    """
    queue = torch.autograd.Variable._execution_engine.queue_callback

    def begin(grad: torch.Tensor) -> None:
        before()
        queue(lambda: queue(after))
    loss.register_hook(begin)


def is_compiled(model: nn.Module) -> bool:
    """Return whether `torch.compile` compiles `model` or a module in it.

    Relies on `Module._compiled_call_impl` (2.2), which `Module.compile` sets. A function that a model compiles for
    itself is not seen.
    """
    return any(hasattr(m, COMPILED_NAME) or getattr(m, '_compiled_call_impl', None) for m in model.modules())


def uncompiled(function: Any) -> Any:
    """Return the function inside `torch.compile(function)`; any other as is.

    Relies on `_torchdynamo_orig_callable` (seen in 2.9 to 2.15). Without it such a model cannot be examined on a copy.
    """
    return getattr(function, '_torchdynamo_orig_callable', function)


# Makes a context in which tensors of subclasses are plain ones: reading one of fastai's class takes ten times
# longer. Relies on a name of 2.0. Without it nothing can be imported.
without_subclasses = torch._C.DisableTorchFunctionSubclass

# Makes a context in which models are compiled with the backward pass that they have uncompiled: AOTAutograd traces it
# under the autocast of the whole forward pass, so regions with autocast off would get 16-bit products. Relies on
# `torch._functorch.config.backward_pass_autocast` (seen in 2.9 and 2.15). Without it the first batch fails.
backward_without_autocast = partial(config.patch, backward_pass_autocast='off')


# -- operators, as a `TorchDispatchMode` gets them

class Traits(NamedTuple):
    "The traits of one of PyTorch's operators."
    name: str # Without namespace: 'addmm'
    draws: bool # It draws random numbers
    makes_nothing: bool # It gives a view of the same memory, a constant, or uninitialized memory
    writes: bool # It writes into an argument
    flops: Callable | None # Counts the floating-point operations of a product; None for other operators


@cache
def traits_of(func: Any) -> Traits:
    """Return the traits of an operator.

    Relies on `OpOverload._schema`, `.overloadpacket` and `.tags` (1.13), and `flop_counter.flop_registry` (2.1).
    """
    name, aliases = func.overloadpacket.__name__, [r.alias_info for r in func._schema.returns]
    is_view = any(a is not None and not a.is_write for a in aliases)
    makes_nothing = is_view or name.startswith(('empty', 'full', 'new_', 'scalar_tensor'))
    draws = torch.Tag.nondeterministic_seeded in func.tags
    writes = func._schema.is_mutable or 'batch_norm' in name     # statistics, which not each such schema says
    return Traits(name, draws, makes_nothing, writes, flop_registry.get(func.overloadpacket))


def in_function_transform() -> bool:
    """Return whether a transform of `torch.func` (grad, vmap, ...) or forward-mode AD runs: nothing can be read there.

    Called inside an operator, it does not see the innermost transform, except forward-mode AD, in which reading a value
    ends the process.

    Relies on `torch._C._are_functorch_transforms_active` and `forward_ad._current_level` (seen in 2.9 to 2.15).
    """
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def without_modes() -> AbstractContextManager:
    """Return a context in which no `TorchDispatchMode` sees the operators that run.

    Relies on `torch.utils._python_dispatch._disable_current_modes` (PyTorch 2.0). Without it: `AttributeError` in the
    first run that is recorded.
    """
    return _python_dispatch._disable_current_modes()
