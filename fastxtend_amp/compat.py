"""Every use of a name that PyTorch, fastai, fastcore or torch_xla do not document.

One function for each, whose docstring says what it relies on, since which version, and what happens where it is gone.
`tests/test_compat.py` has a test for each, which fails with its name.
"""
from __future__ import annotations

import ctypes, math, sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from fastai.learner import Learner
from torch import nn
from torch.amp import GradScaler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy
from torch.utils import _python_dispatch, checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only


# -- autocast

_call = type(torch.autocast_increment_nesting).__call__


def autocast_nesting() -> int:
    """How many autocast contexts are entered in this thread.

    Relies on `torch.autocast_increment_nesting` and `autocast_decrement_nesting` (since 1.10): there is no getter. Both
    are called from C, by `map`, so that no signal handler can run between them. Without them importing this fails.
    """
    return [*map(_call, (torch.autocast_increment_nesting, torch.autocast_decrement_nesting))][1]


class AutocastState:
    """autocast's state in this thread for one type of device, as it is when this is built; `restore` puts it back.

    Relies on the getters and setters that `torch.autocast` itself calls (`torch.set_autocast_enabled` and others, with
    a device type since 2.4). Leaving contexts in order is not enough: an interrupt can strike between two lines of
    `torch.autocast.__enter__`. Without them importing this, or the first batch, fails with an `AttributeError`.
    """
    def __init__(self, device_type: str):
        self.device_type, self.nesting = device_type, autocast_nesting()
        self.enabled, self.dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
        self.cache = torch.is_autocast_cache_enabled()

    def restore(self,
        keep_casts: bool = False, # Whether the casts of weights stay, which an optimizer step makes stale
    ) -> None:
        "Put the state back; can be called again."
        extra = autocast_nesting() - self.nesting
        for _ in range(extra): torch.autocast_decrement_nesting()
        for _ in range(-extra): torch.autocast_increment_nesting()
        torch.set_autocast_enabled(self.device_type, self.enabled)
        torch.set_autocast_dtype(self.device_type, self.dtype)
        torch.set_autocast_cache_enabled(self.cache)
        if not keep_casts: torch.clear_autocast_cache()

    # As a context around `torch.autocast`, it restores the state after an exception.
    def __enter__(self) -> AutocastState: return self
    def __exit__(self, kind: Any, *args) -> None:
        if kind is not None: self.restore()


def exit_autocast(
    context: torch.autocast, # The last that was entered
    keep_casts: bool, # Whether its casts of weights stay for the next one
) -> None:
    """Exit `context`.

    Relies on `torch.autocast.__exit__` forgetting its casts where no other context is entered, which it asks of
    `torch.autocast_decrement_nesting` (since 1.10). Where it forgets them anyway, each batch casts anew.
    """
    if keep_casts: torch.autocast_increment_nesting()
    context.__exit__(None, None, None)
    if keep_casts: torch.autocast_decrement_nesting()


# -- tensors

def _past_subclasses() -> AbstractContextManager:
    """Inside, tensors are read past `__torch_function__`, which takes microseconds for fastai's tensor types.

    Relies on `torch._C.DisableTorchFunctionSubclass` (since 2.0); where it is gone tensors are read as usual.
    """
    return getattr(torch._C, 'DisableTorchFunctionSubclass', nullcontext)()


def dtype_of(t: torch.Tensor) -> torch.dtype:
    "The dtype of `t`. See `_past_subclasses`."
    with _past_subclasses(): return t.dtype


def tensor_version(t: torch.Tensor) -> Any:
    """A value that changes when `t` is changed in place, but for what writes into its `.data`.

    Relies on a tensor's `_version` (since 1.0). Where it is gone the value always differs.
    """
    return getattr(t, '_version', object())


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in built-in containers and those that PyTorch knows, such as the outputs of its modules.

    Relies on `torch.utils._pytree` (since 1.8), the only walk that `torch.compile` traces through. Without it importing
    this fails.
    """
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]


def map_tensors_traced(f: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    "`tree` with `f` applied to each of `tensors_in(tree)`, in code that `torch.compile` traces."
    return tree_map_only(torch.Tensor, f, tree)


def has_hooks(p: torch.Tensor) -> bool:
    """Do functions stand on `p` that are called with its gradient?

    Relies on `_backward_hooks` (since 0.2) and `_post_accumulate_grad_hooks` (since 2.1). Where they are gone: no.
    """
    return bool(getattr(p, '_backward_hooks', None) or getattr(p, '_post_accumulate_grad_hooks', None))


def has_step_hooks(opt: torch.optim.Optimizer) -> bool:
    """Do functions stand on `opt` that are called around its step?

    Relies on `_optimizer_step_pre_hooks` and `_optimizer_step_post_hooks` (since 2.0). Where they are gone: no.
    """
    return bool(getattr(opt, '_optimizer_step_pre_hooks', None) or getattr(opt, '_optimizer_step_post_hooks', None))


def is_uninitialized(p: torch.Tensor) -> bool:
    """Is `p` a parameter or buffer of a lazy module that has no shape yet?

    Relies on `torch.nn.parameter.is_lazy` (since 1.8). Without it importing this fails.
    """
    return is_lazy(p)


# -- fastai's loop

def events_method() -> str:
    """Name of the `Learner` method that runs a function between its events `before_...` and `after_...`.

    Relies on fastai 2's `_with_events(f, event_type, ex, final)`. Without it a fit that an exception ends would keep
    the callback's traces until the next one.
    """
    return '_with_events'


def split_batch(learn: Any, batch: Any) -> tuple: # Inputs and targets
    """`batch` as `learn` hands it to its model and to its loss function; the learner keeps the `xb` and `yb` it has.

    Relies on `Learner._split` (fastai 2.0), which a subclass may replace, setting `xb` and `yb`; where it is gone it
    fails with an `AttributeError`. By fastai's own a batch that is no tuple would be cut; here it is the only input.
    """
    if type(learn)._split is Learner._split and not isinstance(batch, (tuple, list)): batch = (batch,)
    stand_in = object.__new__(type(learn))
    stand_in.__dict__.update(vars(learn))
    stand_in._split(batch)
    return tuple(stand_in.xb), tuple(stand_in.yb)


# -- loss scaling and optimizers

def move_scaler(scaler: GradScaler, device_type: str) -> None:
    """Have `scaler` work on another type of device from now on; scale and growth tracker go with it.

    Does what GradScaler's own `__setstate__` relies on: `_scale` and `_growth_tracker` are made anew from
    `_init_scale` and `_init_growth_tracker`, on the device of the first loss (since 1.6; `_device` since 2.3). Without
    `_device` the scaler asks for the right device itself. An interrupt may have struck between the two lines in which
    the scaler makes its tensors: then it makes both anew.
    """
    if scaler.is_enabled() and scaler._growth_tracker is None: scaler._scale = None
    if scaler.is_enabled() and scaler._scale is not None and scaler._scale.device.type != device_type:
        state = scaler.state_dict()
        scaler._init_scale, scaler._init_growth_tracker = state['scale'], state['_growth_tracker']
        scaler._scale = scaler._growth_tracker = None
    scaler._device = device_type


def found_inf_flags(scaler: GradScaler, opt: Any) -> list[torch.Tensor]:
    """The flags that `scaler.unscale_(opt)` left, one for each device: 0-dim fp32, 1 if a gradient was not finite.

    Relies on `GradScaler._found_inf_per_device` (since 1.6). Without it: `AttributeError` at the first fp16 step.
    """
    return list(scaler._found_inf_per_device(opt).values())


def has_unscaled(scaler: GradScaler) -> bool:
    """Has `scaler` unscaled gradients since its last `update`?

    Relies on `GradScaler._per_optimizer_states` (since 1.6). Without it: `AttributeError` at the first fp16 step.
    """
    return bool(scaler._per_optimizer_states)


def forget_unscale(scaler: GradScaler) -> None:
    """Take back an `unscale_` that no `update` will follow: GradScaler has no public way.

    Relies on `GradScaler._per_optimizer_states` (since 1.6). Without it: `AttributeError` at the first step called off.
    """
    if scaler.is_enabled(): scaler._per_optimizer_states.clear()


def scale_version(scaler: GradScaler) -> tuple:
    """A value that changes when somebody changes scale or rules of `scaler`, read without a GPU synchronization.

    Relies on `GradScaler._scale`, `_init_scale`, `_init_growth_tracker` and on a tensor's `_version`, which counts
    in-place changes. Where one is gone every step counts as a change, and the scale is read at each.
    """
    try:
        scale = scaler._scale
        made = None if scale is None else (id(scale), scale._version)
        start = scaler._init_scale, scaler._init_growth_tracker
    except AttributeError: return (object(),)
    rules = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    return id(scaler), made, start, rules


def grads_version(params: list[nn.Parameter]) -> list[tuple[int, Any]]:
    "A value that changes when somebody changes the gradients of `params`; no operator runs. See `tensor_version`."
    return [(id(p.grad), tensor_version(p.grad)) for p in params if p.grad is not None]


def arm_found_inf(opt: torch.optim.Optimizer, flag: torch.Tensor) -> None:
    """Have the next steps of `opt`, a fused optimizer, do nothing if `flag` is 1; `disarm_found_inf` ends this.

    Relies on the attributes `found_inf` and `grad_scale` that `GradScaler.step` sets on fused optimizers (since 2.0),
    and on the argument `found_inf` of torch_xla's sync-free ones. `honours_found_inf` tries it before it is used.
    """
    if is_syncfree(opt): opt.__dict__['step'] = partial(opt.step, found_inf=flag)
    else: opt.__dict__.update(grad_scale=None, found_inf=flag)


def disarm_found_inf(opt: torch.optim.Optimizer) -> None:
    "Take off what `arm_found_inf` put on, where it would decide the next step too."
    for name in ('grad_scale', 'found_inf', *(['step'] if is_syncfree(opt) else [])): opt.__dict__.pop(name, None)


def supports_found_inf(opt: Any) -> bool:
    """Does `opt` say that its step can be skipped by a flag on the device?

    Relies on `_step_supports_amp_scaling`, which fused optimizers set (since 2.0). Without it the host decides.
    """
    return bool(getattr(opt, '_step_supports_amp_scaling', False))


@cache
def honours_found_inf(kind: Any, device: torch.device, options: tuple) -> bool:
    """Does a fused optimizer of this class really skip a step on `device`? Found by two trial steps on one number.

    Makes loud what would go wrong silently: kernels that ignore `found_inf`, as those of MPS did (PyTorch issue
    186360), and a change of the attribute's name. Waits for the device, once in a process for each class and device.
    """
    p = torch.ones(1, device=device, requires_grad=True)
    try:
        trial = kind([p], lr=.5, **dict(options))
        values = []
        for flag in (0., 1.):
            p.grad = torch.ones_like(p)
            arm_found_inf(trial, torch.full((), flag, device=device))
            trial.step()
            disarm_found_inf(trial)
            values.append(float(p.detach()))
    except (RuntimeError, TypeError, ValueError): return False
    return values[0] != 1. and values[1] == values[0]


def is_syncfree(opt: Any) -> bool:
    """Is `opt` one of torch_xla's optimizers whose `step` takes a `found_inf`? torch_xla is not imported for that.

    Relies on their module's name, `torch_xla.amp.syncfree` (since 1.8). Where it is gone the host decides.
    """
    return type(opt).__module__.startswith('torch_xla.amp.syncfree')


def syncfree_state(opt: Any, state: dict[str, Any]) -> bool:
    """Was `state`, of one parameter, made by a sync-free step?

    Relies on what torch_xla 2.9's keep: Adam an empty `max_exp_avg_sq`, SGD a `step`. Otherwise the host decides.
    """
    return is_syncfree(opt) and ('step' if isinstance(opt, torch.optim.SGD) else 'max_exp_avg_sq') in state


# -- modules

COMPILED_NAME = '_orig_mod'  # of the compiled module inside its wrapper, also in qualified names


def compiled_module(module: nn.Module) -> nn.Module | None:
    """The module inside what `torch.compile(module)` gave; None for any other module.

    Relies on `OptimizedModule._orig_mod` (since 2.0). Where it is gone a compiled model counts as one module.
    """
    inner = getattr(module, COMPILED_NAME, None)
    return inner if isinstance(inner, nn.Module) else None


class NotScriptable:
    """Base of objects on a module's `forward` that `torch.jit.script` cannot compile: it is refused with what to do.

    Relies on `torch.jit.script` asking a module's `forward` for `__globals__` (since 1.2). Where it does not, scripting
    ends in PyTorch's own error.
    """
    def __getattr__(self, name: str) -> Any:
        if name != '__globals__': raise AttributeError(f'{type(self).__name__!r} object has no attribute {name!r}')
        raise AttributeError("torch.jit.script cannot compile a model with an object of fastxtend_amp on a module's "
                             f"forward ({type(self).__name__}).\n"
                             "Call `learn.to_fp32()` before, or use `torch.export` or `torch.compile`.")


def has_static_graph(parallel: nn.parallel.DistributedDataParallel) -> bool:
    """Was `parallel` made with `static_graph=True`, with which its first backward pass, of any kind, reduces gradients?

    Relies on the attribute of that name (since 1.11). Without it the answer is False.
    """
    return bool(getattr(parallel, 'static_graph', False))


# -- half_weights

def copy_all(
    into: list[torch.Tensor], # All on one device
    values: list[torch.Tensor], # Of the same shapes, in any dtype
) -> None:
    """Copy each of `values` into the tensor at its place in `into`, in one launch on an accelerator.

    `torch._foreach_copy_`, which torch.optim uses (seen in 2.9 to 2.15); without it, one copy each.
    """
    copy_each = getattr(torch, '_foreach_copy_', None)
    if copy_each is not None: copy_each(into, values)
    else:
        for t, value in zip(into, values): t.copy_(value)


class CastWatch(TorchDispatchMode):
    """Notes the casts that are made of `params` while it is entered.

    A subclass of `torch.utils._python_dispatch.TorchDispatchMode`, which PyTorch's notes on extending it describe, and
    `StorageWeakRef` of torch.multiprocessing.reductions (seen in 2.9 to 2.15); the import fails where they are gone.
    """
    def __init__(self,
        params: Iterable[torch.Tensor], # The parameters
    ):
        super().__init__()
        self.params = {p.data_ptr() for p in params}
        self.made: list[tuple[StorageWeakRef, int]] = []         # each cast's memory, and its bytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self.params:
            self.made.append((StorageWeakRef(out.untyped_storage()), out.untyped_storage().nbytes()))
        return out

    def alive(self) -> int:
        "Bytes of those casts that something still holds."
        return sum(size for ref, size in self.made if not ref.expired())


# -- insight

def in_function_transform() -> bool:
    """Whether a transform of `torch.func` (grad, vmap, ...) is under way, whose tensors must not outlive it.

    `torch._C._are_functorch_transforms_active`, which `torch.autograd.Function.apply` asks (seen in 2.9 to 2.15);
    without it False.
    """
    ask = getattr(torch._C, '_are_functorch_transforms_active', None)
    return ask is not None and ask()


class Operator(NamedTuple):
    "What is known of one of PyTorch's operators."
    call: Callable # Runs it
    name: str # Without namespace: 'addmm'
    draws: bool # Does it draw random numbers?
    is_view: bool # Does it give another view of the same memory?
    changes_input: bool # Does it write into its first argument?


@cache
def _operator(func: Any) -> Operator:
    "Relies on `OpOverload._schema` and `.tags` (PyTorch 1.13)."
    returned = [r.alias_info for r in func._schema.returns]
    return Operator(func, func._schema.name.rpartition('::')[2], torch.Tag.nondeterministic_seeded in func.tags,
                    any(a is not None and not a.is_write for a in returned), func._schema.is_mutable)


def watch_operators(
    handle: Callable[[Operator, tuple, dict], Any], # Called in place of each operator; gives its result
) -> AbstractContextManager:
    """Every operator that this thread runs inside, below autograd and autocast, goes through `handle`, but its own.

    Relies on `torch.utils._python_dispatch.TorchDispatchMode` (PyTorch 1.12). Without it importing this fails.
    """
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return handle(_operator(func), args, kwargs or {})
        def __exit__(self, kind, *args):
            try: super().__exit__(kind, *args)
            except Exception:                                    # an interrupt in `operators_unwatched` has left it
                if kind is None: raise
    return Watch()


class EnteredModes:
    """The `TorchFunctionMode`s and `TorchDispatchMode`s that this thread is in when this is built, and the stance of
    torch.compile and the kind of activation checkpoints that the process is set to.

    Relies on `torch.overrides._get_current_function_mode_stack` (PyTorch 2.1),
    `torch.utils._python_dispatch._get_current_dispatch_mode_stack` (2.0) and `torch._dynamo.eval_frame._stance` with
    `_set_stance` (2.6). Where one is gone, what an interrupt has left entered stays so.
    """
    def __init__(self):
        self.before = [stack() for stack in self._stacks()]
        self.checkpoints, self.stance = no_reentrant_checkpoints(), self._stance()

    @staticmethod
    def _stance() -> Any: # None for the default
        stance = getattr(sys.modules.get('torch._dynamo.eval_frame'), '_stance', None)
        return None if getattr(stance, 'stance', 'default') == 'default' else stance

    @staticmethod
    def _stacks() -> list[Callable[[], list]]:
        names = '_get_current_function_mode_stack', '_get_current_dispatch_mode_stack'
        return [getattr(module, name, list) for module, name in zip((torch.overrides, _python_dispatch), names)]

    def restore(self) -> None:
        "Leave what was entered since then, enter again what was left; can be called again."
        for module, stack, before in zip((torch.overrides, _python_dispatch), self._stacks(), self.before):
            while len(stack()) > len(before):
                try: stack()[-1].__exit__(None, None, None)
                except IndexError: _python_dispatch._pop_mode()  # it was interrupted in leaving, past its own notes
            for mode in before[len(stack()):]: module._push_mode(mode)   # by an interrupt in `operators_unwatched`
        self.checkpoints.__exit__()
        if self._stance() is self.stance: return
        if self.stance is None: torch.compiler.set_stance('default')
        else: torch._dynamo.eval_frame._set_stance(self.stance)


class operators_unwatched:
    """What runs inside is not seen by `watch_operators`.

    Relies on `_len_torch_dispatch_stack`, `_pop_mode` and `_push_mode` of torch.utils._python_dispatch (seen in 2.9 to
    2.15). Where one is gone `handle` sees operators that run inside, too, which takes time and changes nothing. Not
    PyTorch's own context for this, a generator: after an interrupt it would enter the modes again at some later time.
    """
    _names = '_len_torch_dispatch_stack', '_pop_mode', '_push_mode'
    def __enter__(self) -> None:
        self.modes: list[Any] = []
        if all(hasattr(_python_dispatch, name) for name in self._names):
            while _python_dispatch._len_torch_dispatch_stack(): self.modes.append(_python_dispatch._pop_mode())

    def __exit__(self, *args) -> None:
        while self.modes: _python_dispatch._push_mode(self.modes.pop())


class no_reentrant_checkpoints:
    """Reentrant activation checkpoints (`use_reentrant=True`) work as `use_reentrant=False` does, in the whole process.

    The reentrant kind runs its modules without a graph, so that nothing inside gets a gradient that could be looked at,
    and refuses `torch.autograd.grad`. Relies on `torch.utils.checkpoint.CheckpointFunction`, the autograd function
    behind it (PyTorch 0.4). Where that is gone such checkpoints stay as they are, and gradients inside are unknown.
    `__exit__` puts back what there was when this was built; it can be called again. No generator, which after an
    interrupt would do so at some later time.
    """
    def __init__(self):
        self.function = getattr(checkpoint, 'CheckpointFunction', None)
        self.own = None if self.function is None else vars(self.function).get('apply')

    def __enter__(self) -> None:
        def apply(run, preserve_rng_state, *args):
            return checkpoint.checkpoint(run, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)
        if self.function is not None: self.function.apply = apply

    def __exit__(self, *args) -> None:
        if self.function is None or vars(self.function).get('apply') is self.own: return
        if self.own is None: del self.function.apply
        else: self.function.apply = self.own


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `module.compile()` was called, as opposed to `torch.compile(module)`.

    Relies on `nn.Module._compiled_call_impl` (since 2.2), which a deep copy leaves out; where it is gone the answer is
    False, and a copy for a comparison runs as it was written.
    """
    return getattr(module, '_compiled_call_impl', None) is not None


def host_value(t: torch.Tensor) -> float | None:
    """The value of a single fp32 number in main memory, read without an operator; None for any other tensor.

    See `_past_subclasses`.
    """
    with _past_subclasses():
        if not t.is_cpu or t.dtype is not torch.float32 or t.numel() != 1 or t.layout is not torch.strided: return None
        return ctypes.c_float.from_address(t.data_ptr()).value


def host_norm(t: torch.Tensor) -> float | None:
    """The norm of a dense fp32 tensor in main memory, read without an operator of PyTorch's; None for any other tensor.

    See `_past_subclasses`.
    """
    with _past_subclasses():
        plain = t.is_cpu and t.dtype is torch.float32 and t.layout is torch.strided
        if not plain or not t.is_contiguous(): return None
        if not (n := t.numel()): return 0.
        values = np.ctypeslib.as_array((ctypes.c_float * n).from_address(t.data_ptr()))
        with np.errstate(over='ignore', invalid='ignore'): square = float(np.dot(values, values))
        if math.isinf(square): square = float(np.dot(values.astype(np.float64), values.astype(np.float64)))
        return math.sqrt(square) if square >= 0 else math.nan


# -- devices

def replace_replicate(
    parallel: nn.DataParallel, # The module whose replicas are to be changed
    replicate: Callable | None, # Called with module and device ids, returns the replicas; None for PyTorch's own
) -> None:
    """Have `parallel` make its replicas by `replicate`.

    Relies on `DataParallel.forward` calling `self.replicate(module, device_ids)`, a public method that no page of the
    documentation names (PyTorch 2.9 to 2.14). Where it is gone: `RuntimeError`, because the replicas would compute in
    the device's default precision.
    """
    if not hasattr(nn.DataParallel, 'replicate'):
        raise RuntimeError("nn.DataParallel has no method `replicate` in this version of PyTorch.\n"
                           "Its replicas would not compute in the precision of the fit.\n"
                           "Use DistributedDataParallel, or `learn.to_fp32()`.")
    if replicate is not None: parallel.__dict__['replicate'] = replicate
    else: parallel.__dict__.pop('replicate', None)



def operator(func: Any) -> Traits:
    """Return the traits of one of PyTorch's operators, as `TorchDispatchMode` gets it.

    Relies on `OpOverload._schema` and `.tags` (PyTorch 1.13).
    """
    return _traits(func)


class Traits(NamedTuple):
    "What is known of one of PyTorch's operators."
    name: str # Without namespace: 'addmm'
    draws: bool # It draws random numbers
    is_view: bool # It gives another view of the same memory
    writes: bool # It writes into an argument


@cache
def _traits(func: Any) -> Traits:
    returned = [r.alias_info for r in func._schema.returns]
    return Traits(func._schema.name.rpartition('::')[2], torch.Tag.nondeterministic_seeded in func.tags,
                  any(a is not None and not a.is_write for a in returned), func._schema.is_mutable)


def next_node() -> int:
    """Return the number of the next node that this thread adds to the autograd graph.

    Relies on `torch._C._autograd._get_sequence_nr` (PyTorch 2.0). Without it: `AttributeError` in the first trace.
    """
    return torch._C._autograd._get_sequence_nr()


def running_node() -> int | None:
    """Return the number of the autograd node whose backward pass this thread runs; None outside of any.

    Relies on `torch._C._current_autograd_node` (2.0) and a node's `_sequence_nr` (1.13). Without them:
    `AttributeError` in the first trace.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def unwatched() -> AbstractContextManager:
    """Return a context in which no `TorchDispatchMode` sees the operators that run.

    Relies on `torch.utils._python_dispatch._disable_current_modes` (PyTorch 2.0). Without it: `AttributeError` in the
    first trace.
    """
    return _python_dispatch._disable_current_modes()
