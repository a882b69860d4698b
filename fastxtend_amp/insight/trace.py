"""One batch of a copied learner's training loop, in fp32 or in a lower precision, with notes on each module.

Module hooks keep a stack of the modules that are running, and a dispatch mode sees each operator: its results belong
to the innermost module, the model itself included, or to the loss function. In a lower precision an operator is run
in fp32, too, on fp32 twins of its inputs. The twins of a module are its own: it begins with what it is given, and goes
on with what modules inside return. So its error is that of its own arithmetic, wherever the error becomes visible: in
its outputs, or in what it passes to a module inside.
"""
from __future__ import annotations

import math, sys, traceback, warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from fastai.callback.core import Callback, CancelBatchException
from fastai.learner import Learner
from fastcore.basics import noop
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..callback import MixedPrecision
from ..common import RandomState, first_line, set_random_state
from ..compat import in_function_transform, next_node, operator, running_node, unwatched
from ..convert import HALF, half_to_float, map_tensors
from ..fp32_modules import qualified_names
from ..mode import AMPMode
from .copies import copied_learner
from .values import Histogram, ends, largest_value, relative_error, tensors

__all__ = ['LOSS', 'Seen', 'Trace', 'trace']

LOSS = 'loss function'  # its name among the modules; callbacks after the forward pass count to it
SAMPLE = 4096           # values of an output that are compared with the fp32 trace, evenly spaced
_FP32_NOISE = 2.**-23   # relative; where fp32 itself would lose a tenth, an error is that of noise
# Operators that only move or make tensors: a module that runs no others computes nothing itself.
_MOVES = frozenset(('clone', '_to_copy', 'copy_', 'cat', 'stack', 'new_zeros', 'zeros', 'zeros_like', 'fill_', 'zero_',
                    'detach', 'detach_', 'ones', 'full', 'arange', 'lift_fresh', 'scalar_tensor'))
_EMPTY = frozenset(('empty', 'empty_like', 'empty_strided', 'new_empty', 'new_empty_strided'))


@dataclass
class Seen:
    "Notes on one module: on its own operators, not on those of modules inside; all calls and batches together."
    name: str
    type: str
    params: int                                                  # its own and those of modules inside
    calls: int = 0
    ended: int = 0                                               # operators before its first call ended
    computes: bool = False                                       # it has operators of its own
    dtypes: set = field(default_factory=set)                     # of its outputs
    largest: float = 0.                                          # absolute finite result or output
    half: float = 0.                                             # of those in half precision, as they are in fp32
    failed: int | None = None                                    # the first operator where finite numbers end, counted
    failed_backward: int | None = None
    masked: int | None = None                                    # the first where only -inf begins, which may be a mask
    error: float = 0.                                            # of its own arithmetic, relative; the largest
    values: int = 0                                              # in its outputs
    non_finite: int = 0                                          # of these, where fp32 is finite
    total: float = math.nan                                      # error of its outputs from those of the fp32 trace
    samples: list = field(default_factory=list)                  # of its outputs
    grads: Histogram = field(default_factory=Histogram)          # of its outputs and its own parameters


class _Frame:
    "One call of a module under way, and the fp32 twins of tensors that its operators have made."
    def __init__(self, seen: Seen, module: Any = None):
        self.seen, self.module = seen, module
        self.twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}    # by address: a tensor there, the fp32 memory

    def twin(self, t: torch.Tensor) -> torch.Tensor | None:
        "Return the fp32 twin of `t`, which shares memory with the twins of its views; None if it is exact."
        found = self.twins.get(_address(t))
        if found is None or found[0].element_size() != t.element_size(): return None
        return found[1].as_strided(t.shape, t.stride(), t.storage_offset())

    def keep(self, t: torch.Tensor, wide: torch.Tensor) -> None:
        "Note `wide` as the twin of `t`, unless they are equal or `t` has no memory that can be looked up."
        address = _address(t)
        if not address or t.shape != wide.shape: return
        if address not in self.twins and bool((wide == t).all()): return
        memory = wide.new_empty(t.untyped_storage().nbytes() // t.element_size())
        memory.as_strided(t.shape, t.stride(), t.storage_offset()).copy_(wide)
        self.twins[address] = t, memory

    def wide(self, t: torch.Tensor) -> torch.Tensor:
        twin = self.twin(t)
        return half_to_float(t) if twin is None else twin


def _address(t: torch.Tensor) -> int:
    plain = t.layout is torch.strided and t.device.type not in ('xla', 'meta')
    return t.untyped_storage().data_ptr() if plain else 0


class Trace(TorchDispatchMode):
    """Notes on some batches in one precision; beside those in fp32, `reference`, for a lower one.

    `seen`: the modules, in the order in which their first calls end, and the loss function.
    """
    def __init__(self,
        mode: AMPMode | None = None, # fp32 if None
        reference: Trace | None = None,
        tick: Callable[[], Any] = noop, # Called at each module; may raise
    ):
        super().__init__()
        self.mode, self.reference, self.tick = mode, reference, tick
        self.seen: dict[str, Seen] = {}
        self.loss_is_finite = self.grads_are_finite = True
        self.error: str | None = None                            # why it ended: the first line of an exception
        self.failed_in: str | None = None                        # the module that raised it; None outside of any
        self.work = 0                                            # floating-point operations of the forward pass
        self._n = 0                                              # operators so far
        self._frames: list[_Frame] = []
        self._started: list[tuple[int, Seen]] = []               # the autograd nodes from this number on are its
        self._backward = False

    def failures(self) -> list[str]:
        "The modules where finite numbers end in the forward pass, the first first."
        found = {n: s.failed for n, s in self.seen.items() if s.failed is not None}
        if found or not self.loss_is_finite:
            found = {n: s.masked for n, s in self.seen.items() if s.masked is not None} | found
        return sorted(found, key=lambda n: found[n] or 0)

    def backward_failures(self) -> list[str]:
        "The modules in whose backward pass finite numbers end, the first first."
        found = {n: s.failed_backward for n, s in self.seen.items() if s.failed_backward is not None}
        return sorted(found, key=lambda n: found[n] or 0)

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        "Note what `model` does inside."
        names: dict[nn.Module, str] = {}
        self._owners: dict[nn.Parameter, list[Seen]] = {}
        with ExitStack() as stack:
            for name, m in qualified_names(model):
                if m in names or isinstance(m, torch.jit.ScriptModule): continue  # which takes no hooks from Python
                names[m] = name
                # First of all hooks, so that what others make of the inputs is the module's own doing.
                enter = m.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True, prepend=True)
                leave = m.register_forward_hook(self._leave, with_kwargs=True, always_call=True)
                for hook in (enter, leave): stack.callback(hook.remove)
            stack.enter_context(self)
            yield

    def begin(self) -> None:
        "Begin a batch."
        self._note(LOSS, None)
        self._frames, self._backward = [], False

    def end_forward(self, loss: torch.Tensor) -> None:
        "Note the loss, which is not scaled yet."
        with unwatched():
            self.loss_is_finite &= _finite(loss)
            seen = self._note(LOSS, None)
            seen.calls += 1
            seen.dtypes.add(loss.dtype)
            if self._frames: self._compare(self._frames[0], loss)
        self._backward = True

    def end_backward(self, model: nn.Module) -> None:
        "Look at the gradients of the parameters."
        with unwatched():
            for name, m in qualified_names(model):
                for p in m.parameters(recurse=False):
                    if p.grad is None: continue
                    g = p.grad.coalesce().values() if p.grad.is_sparse else p.grad
                    self.grads_are_finite &= _finite(g)
                    if name in self.seen: self.seen[name].grads.add(g)

    # -- modules

    def _note(self, name, module):
        if name not in self.seen:
            params = sum(p.numel() for p in module.parameters()) if module is not None else 0
            self.seen[name] = Seen(name, type(module).__name__ if module is not None else 'function', params)
        return self.seen[name]

    def _enter(self, name, module, args, kwargs):
        self.tick()
        with unwatched():
            if not self._frames: self._push(_Frame(self._note(LOSS, None)))
            if not self._backward and not in_function_transform():              # vmap's tensors cannot be looked at
                for t in tensors((args, kwargs)): self._compare(self._frames[-1], t)
            self._push(_Frame(self._note(name, module), module))

    def _push(self, frame):
        self._frames.append(frame)
        self._started.append((next_node(), frame.seen))

    def _leave(self, module, args, kwargs, output):
        if not any(f.module is module for f in self._frames): return
        with unwatched():
            while (frame := self._frames.pop()).module is not module: pass   # an exception ended those inside
            self._started.append((next_node(), self._frames[-1].seen))
            if output is None: return                            # an exception, or nothing to look at
            outputs, seen = [] if in_function_transform() else tensors(output), frame.seen
            for out in outputs:
                if self.reference is None and out.requires_grad and out.grad_fn is not None:
                    out.register_hook(partial(self._gradient, seen))
            if self._backward: return                            # a checkpoint, whose first run was looked at
            if seen.calls == 0: self.seen[seen.name], seen.ended = self.seen.pop(seen.name), self._n
            seen.calls += 1
            for out in outputs: self._output(frame, out.detach())

    def _output(self, frame, out):
        seen = frame.seen
        seen.dtypes.add(out.dtype)
        seen.values += out.numel()
        self._compare(frame, out, is_output=True)
        seen.largest = max(seen.largest, largest_value(out))
        flat = out.reshape(-1)
        n = min(len(flat), SAMPLE)
        sample = flat[torch.arange(n, device=flat.device) * len(flat) // n].float() if n else flat.float()
        seen.samples.append(sample)
        other = self.reference.seen.get(seen.name) if self.reference is not None else None
        if other is None or len(other.samples) < len(seen.samples): return
        expected = other.samples[len(seen.samples) - 1]
        if expected.shape == sample.shape: seen.total = float(np.fmax(seen.total, relative_error(sample, expected)))

    def _compare(self, frame, t, is_output=False):
        "Note the error of a tensor that leaves a module, or enters one inside."
        t = t.detach()
        twin = frame.twin(t)
        if twin is None: return
        error = relative_error(t, twin)
        eps = torch.finfo(self.mode.dtype).eps if self.mode else 1.
        if error * _FP32_NOISE < .1 * eps: frame.seen.error = max(frame.seen.error, error)
        if is_output: frame.seen.non_finite += int((~t.isfinite() & twin.isfinite()).sum())

    def _gradient(self, seen, g):
        if not self._backward: return                            # the model's own, such as forces from an energy
        with unwatched(): seen.grads.add(g)

    # -- operators

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, op = kwargs or {}, operator(func)
        if op.draws: return _draw(func, op, args, kwargs)
        if not self._frames or op.is_view or op.name in _EMPTY: return func(*args, **kwargs)
        if self._backward: return self._in_backward(func, args, kwargs)
        return self._in_forward(func, op, args, kwargs)

    def _in_forward(self, func, op, args, kwargs):
        frame = self._frames[-1]
        seen, inputs = frame.seen, tensors((args, kwargs))
        is_cast = op.name == '_to_copy' and kwargs.get('dtype') in HALF
        seen.computes |= op.name not in _MOVES
        self._n += 1
        low = self.mode is not None and (is_cast or any(t.dtype in HALF or frame.twin(t) is not None for t in inputs))
        began_finite = not op.writes or all(map(_finite, inputs))
        wide = self._widely(func, op, args, kwargs, frame) if low else None
        out = func(*args, **kwargs)
        if self.mode is None: self._count(func, args, kwargs, out)
        outs, wides = tensors(out), tensors(wide)
        if len(outs) != len(wides): wides = [None] * len(outs)
        for o, w in zip(outs, wides):
            o = o.detach()
            if op.name not in _MOVES or is_cast:
                largest = largest_value(o if w is None else w)
                seen.largest = max(seen.largest, largest)
                if o.dtype in HALF: seen.half = max(seen.half, largest)
            if w is not None and not op.writes: frame.keep(o, w)
            if not _finite(o): self._not_finite(seen, o, w, began_finite and all(map(_finite, inputs)))
        return out

    def _widely(self, func, op, args, kwargs, frame):
        "Return what the operator gives in fp32 on the twins of its inputs; None if it does not run so."
        if op.writes:
            for t in tensors(args[:1]):
                if frame.twin(t) is None and _address(t): _twin_in_place(frame, t)
        device_type = next((t.device.type for t in tensors((args, kwargs))), 'cpu')
        try:
            with torch.no_grad(), torch.autocast(device_type, enabled=False):
                return func(*map_tensors(frame.wide, args), **map_tensors(frame.wide, _in_fp32(kwargs)))
        except RuntimeError: return None                         # such as flash attention, which runs in half alone

    def _not_finite(self, seen, out, wide, began_finite):
        lost = ~out.isfinite() & wide.isfinite() if wide is not None else None
        if lost is not None and bool(lost.any()):
            if not bool((out[lost] == -torch.inf).all()): return self._fail(seen)
            seen.masked = seen.masked or self._n
        elif began_finite and ends(out): self._fail(seen)

    def _fail(self, seen):
        "Note that finite numbers end in this module, unless they do so in fp32."
        in_fp32 = self.reference.seen.get(seen.name) if self.reference is not None else None
        if in_fp32 is None or in_fp32.failed is None: seen.failed = seen.failed or max(1, self._n)

    def _in_backward(self, func, args, kwargs):
        out = func(*args, **kwargs)
        self._n += 1
        node = running_node()
        if node is None or all(map(_finite, tensors(out))) or not all(map(_finite, tensors((args, kwargs)))): return out
        at = bisect_right(self._started, node, key=lambda s: s[0]) - 1
        if at >= 0: self._started[at][1].failed_backward = self._started[at][1].failed_backward or self._n
        return out

    def _count(self, func, args, kwargs, out):
        from torch.utils.flop_counter import flop_registry
        formula = flop_registry.get(getattr(func, 'overloadpacket', None))
        if formula is not None: self.work += formula(*args, **kwargs, out_val=out)


def _draw(func, op, args, kwargs):
    "Draw random numbers in fp32 whatever dtype they are wanted in: the same in every precision."
    x = args[0] if args else None
    like = x.dtype if isinstance(x, torch.Tensor) else None
    wanted = kwargs.get('dtype') or like
    if wanted not in HALF or op.name.startswith('_'): return func(*args, **kwargs)   # such as attention with dropout
    out = func(*map_tensors(half_to_float, args), **_in_fp32(kwargs))
    if op.writes: return x.copy_(out)
    return map_tensors(lambda t: t.to(wanted) if t.dtype is torch.float32 else t, out)


def _finite(t): return bool(t.isfinite().all())


def _twin_in_place(frame, t):
    whole = t.detach().as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    frame.twins[_address(t)] = t, half_to_float(whole).clone()


def _in_fp32(kwargs):
    return {k: torch.float32 if isinstance(v, torch.dtype) and v in HALF else v for k, v in kwargs.items()}


class _Ends(Callback):
    "Ends the parts of a batch for a trace, and the batch after its backward pass."
    order = 1000                                                 # after all others
    def __init__(self, trace: Trace): self.trace = trace
    def after_loss(self):
        if len(self.learn.yb): self.trace.end_forward(self.learn.loss_grad)
    def after_backward(self):
        self.trace.end_backward(self.learn.model)
        raise CancelBatchException


def trace(
    learn: Learner, # Nothing in it changes
    batches: Sequence[Any], # As a DataLoader gives them; inputs and targets of the batch under way if `in_fit`
    mode: AMPMode | None = None, # fp32 if None
    keep: Sequence[str] = (), # Modules kept in fp32
    scale: float = 1., # The loss scale, for fp16
    *,
    reference: Trace | None = None, # In fp32, of the same batches
    tick: Callable[[], Any] = noop,
    in_fit: bool = False, # Whether `learn` is in the middle of a batch
    random_state: RandomState | None = None, # To begin with; the present one if None
) -> Trace:
    "Run batches forward and backward in a copy of `learn`, in its own loop with its callbacks; no step is taken."
    found = Trace(mode, reference, tick)
    with copied_learner(learn) as copy, _as_written(), warnings.catch_warnings():
        warnings.simplefilter('ignore')                          # of a fit, such as that the mode is emulated
        if mode is not None: _set_precision(copy, mode, keep, scale)
        copy.add_cb(_Ends(found))
        if random_state is not None: set_random_state(random_state)
        if not in_fit: _begin_fit(copy)
        with found.hooked(copy.model):
            for i, batch in enumerate(batches):
                found.begin()
                batch = map_tensors(torch.clone, batch)          # the model may write into it
                try: _run_again(copy, *batch) if in_fit else copy.one_batch(i, batch)
                except torch.OutOfMemoryError: raise
                except (RuntimeError, TypeError, ValueError) as e:
                    if mode is None: raise
                    found.error, found.failed_in = first_line(e).partition('. ')[0], _innermost(e, copy.model)
                    return found
    return found


def _innermost(error: BaseException, model: nn.Module) -> str | None:
    "Return the name of the innermost module whose forward was running when `error` was raised; None outside of any."
    names = {id(m): name for name, m in reversed([*qualified_names(model)])}
    running = [id(frame.f_locals.get('self')) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((names[i] for i in reversed(running) if i in names), None)


def _as_written() -> AbstractContextManager:
    "Return a context in which compiled modules run as they were written: hooks would not fire in a compiled graph."
    return torch.compiler.set_stance('force_eager') if 'torch._dynamo' in sys.modules else nullcontext()


def _set_precision(copy, mode, keep, scale):
    arguments: dict[str, Any] = {'fp32_modules': list(keep)} if keep else {}
    if mode.needs_loss_scaling: arguments['init_scale'] = scale
    getattr(copy, f'to_{mode.value}')(on_overflow='ignore', **arguments)


def _begin_fit(copy):
    copy.create_opt()
    copy.n_epoch, copy.epoch, copy.n_iter, copy.dl = 1, 0, 1, copy.dls.train
    for event in ('before_fit', 'before_epoch', 'before_train'): copy(event)


def _run_again(copy, xb, yb):
    "Run a batch whose inputs and targets callbacks have prepared already."
    copy.xb, copy.yb = xb, yb
    for cb in copy.cbs:
        if not isinstance(cb, MixedPrecision): cb.before_batch = noop
    copy._with_events(copy._do_one_batch, 'batch', CancelBatchException)
