"What goes through each module of a model, in fp32 and in lower precision, on the same batch and random draws."
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from fastcore.basics import noop
from torch import nn

from ..common import random_state_kept
from ..compat import in_function_transform, operators_unwatched, watch_operators
from ..convert import HALF, map_tensors, to_fp32
from ..fp32_modules import ROOT, qualified_names
from ..mode import AMPMode
from .operators import Call, OperatorStatistics
from .restore import effects_undone, modules_in
from .run import Task, plain_pass, scalar
from .statistics import Seen, all_finite, largest_value, tensors

__all__ = ['IMPRECISE', 'LOSS', 'Tracer']

LOSS = 'loss function'  # its name among the modules
IMPRECISE = .1          # a module whose own error is above this is in trouble


class Tracer:
    """One pass over some batches: in fp32 if `mode` is None, else under autocast, beside the fp32 pass `reference`.

    While a batch runs, each module has two hooks, and each operator is seen. In a lower precision each leaf, and each
    container that computes something itself, is first run in fp32 on the inputs it got, with the same random draws; its
    buffers and attributes are put back.
    """
    def __init__(self,
        task: Task,
        mode: AMPMode | None = None,
        reference: Tracer | None = None, # The fp32 pass over the same batches
        scale: float = 1., # The loss scale for the backward pass
        *,
        ranges: Tracer | None = None, # The fp32 pass that tells how large values are; `reference` if None
        only: set[str] | None = None, # The modules that are run in fp32 as well; all that compute something if None
        tick: Callable[[], None] = noop, # Called at each module; may raise
    ):
        self.task, self.mode, self.reference, self.scale = task, mode, reference, scale
        self.only, self.tick = only, tick
        self.names: dict[int, str] = {}
        for name, m in qualified_names(task.model): self.names.setdefault(id(m), name)
        self.seen: dict[str, Seen] = {}                          # in the order in which modules end their first call
        self.trouble_backward: list[str] = []                    # innermost modules where finite gradients end
        self.failed_in: str | None = None                        # where an exception came from
        self.non_finite_loss = self.non_finite_grads = False
        known = ranges or reference
        self.operators = OperatorStatistics(self._running, mode is not None, known.seen if known is not None else {})
        self.stack: list[Call] = []
        self._calls: list[Call] = []
        self._silent = self._in_backward = False

    @property
    def trouble(self) -> list[str]:
        "The innermost modules where finite numbers end in the forward pass, in order of execution."
        hidden = [n for n in self.operators.negative if self._is_wrong(n)]
        found = dict.fromkeys([*self.operators.overflows, *hidden])
        # A divisor that underflows to 0 makes infinities in fp32 as well: no operator shows them, their module does.
        lost = [n for n, s in self.seen.items() if s.non_finite and not any(_is_within(o, n) for o in found)]
        found |= dict.fromkeys(n for n in lost if not any(o != n and _is_within(o, n) for o in lost))
        return [n for n in self.seen if n in found] + [n for n in found if n not in self.seen]

    @property
    def computing(self) -> set[str]:
        "Modules that compute something themselves."
        return self.operators.computing if self.reference is None else self.reference.computing

    def selected(self, module: nn.Module, name: str) -> bool:
        "Whether the module computes something itself: it is a leaf, or was seen to."
        return not any(True for _ in module.children()) or name in self.computing

    # -- one batch

    def run(self, xb: tuple, yb: tuple, backward: bool = True) -> None:
        "Forward and backward on one batch; gradients go nowhere but into the statistics."
        self._calls, self.stack, self._in_backward = [], [], False
        device_type = self.task.device_type(xb)
        with plain_pass(device_type):
            try:
                with self._hooks(), plain_pass(device_type, self.mode), watch_operators(self.operators):
                    pred = to_fp32(self.task.after_pred(self.task.model(*xb)))
                    if not yb: return
                    loss = scalar(self._loss(pred, yb))
            except Exception:
                if self.stack: self.failed_in = self.stack[-1].seen.name
                raise
            finally: self.stack = []
            self.non_finite_loss |= not bool(loss.isfinite())
            if backward:
                self._in_backward = True
                with watch_operators(self.operators):            # for the draws of what is computed again
                    grads = self.task.gradients(loss * self.scale)
                self._backward(grads)

    def _backward(self, grads):
        finite = {}
        for p, g in grads:
            finite[id(p)] = all_finite(g)
            for name in self._owners.get(id(p), ()):
                if name in self.seen: self.seen[name].grads.add(g)
        self.non_finite_grads |= not all(finite.values())
        started = []
        for call in self._calls:
            own = [finite[id(p)] for p in _own_parameters(call.module) if id(p) in finite]
            if call.grad_out and all(call.grad_out) and not (all(call.grad_in) and all(own)): started.append(call)
        around = {id(a) for call in started for a in _ancestors(call)}
        for call in reversed(started):
            name = call.seen.name
            if id(call) not in around and name not in self.trouble_backward: self.trouble_backward.append(name)

    # -- modules

    def _running(self) -> Call | None: return self.stack[-1] if self.stack and not self._silent else None

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        self._owners: dict[int, list[str]] = {}
        with ExitStack() as stack:
            for m in [m for m in self.task.model.modules() if id(m) in self.names]:     # not `torch.compile`'s wrappers
                if isinstance(m, torch.jit.ScriptModule): continue                # which takes no hooks from Python
                for p in m.parameters(recurse=False): self._owners.setdefault(id(p), []).append(self.names[id(m)])
                # First of all hooks: what others make of the inputs they make of those of the fp32 run, too.
                stack.callback(m.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True).remove)
                stack.callback(m.register_forward_hook(self._leave, with_kwargs=True).remove)
            yield

    def _enter(self, module, args, kwargs):
        if self._silent: return
        self.tick()
        name = self.names[id(module)]
        if in_function_transform():                              # vmap's tensors cannot be looked at
            self._note(name, module, type(module).__name__)
            return
        with _Silence(self):
            call = self._open(name, module, type(module).__name__, (args, kwargs))
            if self._compared(name, module): call.expected = self._in_fp32(module, [module], args, kwargs)
        self.stack.append(call)

    def _leave(self, module, args, kwargs, output):
        if self._silent: return
        at = next((i for i, call in reversed([*enumerate(self.stack)]) if call.module is module), None)
        if at is None: return
        call = self.stack[at]
        del self.stack[at:]                                      # those inside that an exception ended, too
        with _Silence(self): self._close(call, output)

    def _compared(self, name, module):
        if self.mode is None or (self.only is not None and name not in self.only): return False
        return name == LOSS or self.selected(module, name)

    def _note(self, name, module, kind):
        if name not in self.seen:
            params = module.parameters() if isinstance(module, nn.Module) else ()
            self.seen[name] = Seen(name, kind, sum(p.numel() for p in params))
        return self.seen[name]

    def _open(self, name, module, kind, inputs):
        seen = self._note(name, module, kind)
        seen.weights |= {p.dtype for p in _own_parameters(module)}
        call = Call(seen, module, self.stack[-1] if self.stack else None)
        for t in tensors(inputs):
            seen.inputs.add(t.dtype)
            if t.requires_grad and not t.is_leaf: t.register_hook(lambda g: self._gradient_of_input(call, g))
        return call

    def _in_fp32(self, function, modules, args, kwargs):
        "What `function` gives in fp32 on copies of the same inputs; None if it does not run in fp32."
        device = next((t.device for t in tensors((args, kwargs))), torch.device('cpu'))
        with (random_state_kept(device), effects_undone(modules), torch.no_grad(),
              torch.autocast(device.type, enabled=False)):
            copy = WideCopies()
            try: return map_tensors(torch.clone, function(*map_tensors(copy, args), **map_tensors(copy, kwargs)))
            except torch.OutOfMemoryError: raise
            except Exception: return None                        # such as inputs that only low precision makes

    def _close(self, call, output):
        seen = call.seen
        if seen.calls == 0: self.seen[seen.name] = self.seen.pop(seen.name)      # in the order of endings
        seen.calls += 1
        self._calls.append(call)
        outs, expected = tensors(output), tensors(call.expected)
        compare = len(outs) == len(expected) and all(o.shape == e.shape for o, e in zip(outs, expected))
        for i, out in enumerate(outs):
            seen.outputs.add(out.dtype)
            if out.requires_grad and out.grad_fn is not None: out.register_hook(lambda g: self._gradient(call, g))
            values = out.detach()
            if values.numel(): self._output(seen, values, expected[i] if compare else None)
        call.expected = None

    def _gradient(self, call, g):
        if not self._in_backward: return                         # the model's own, such as forces from an energy
        with operators_unwatched():
            call.grad_out.append(all_finite(g))
            call.seen.grads.add(g)

    def _gradient_of_input(self, call, g):
        if not self._in_backward: return
        with operators_unwatched(): call.grad_in.append(all_finite(g))

    def _output(self, seen, values, expected):
        finite = all_finite(values)
        seen.values += values.numel()
        seen.largest = max(seen.largest, largest_value(values))
        other = self.reference.seen.get(seen.name) if self.reference is not None else None
        if self.reference is None or other is not None: seen.sample(values, other)
        if expected is not None: seen.compare(values, finite, expected)

    def _is_wrong(self, name):
        "Whether the output of the module, or of one around it, differs from what it is in fp32."
        around = [s for n, s in self.seen.items() if _is_within(name, n)]
        return self.non_finite_loss or any(s.non_finite or s.own > IMPRECISE for s in around)

    def _loss(self, pred, yb):
        f, args = self.task.loss_func, (pred, *yb)
        kind = type(f).__name__ if not hasattr(f, '__name__') else f.__name__
        with _Silence(self):
            call = self._open(LOSS, f, kind, args)
            if self._compared(LOSS, f): call.expected = self._in_fp32(f, modules_in(f), args, {})
        self.stack.append(call)
        loss = f(*args)
        with _Silence(self): self._close(self.stack.pop(), loss)
        return loss


def _own_parameters(module: Any) -> Iterator[nn.Parameter]:
    return module.parameters(recurse=False) if isinstance(module, nn.Module) else iter(())


class _Silence:
    "What runs inside is not the model's own doing."
    def __init__(self, tracer: Tracer): self.tracer, self.unwatched = tracer, operators_unwatched()
    def __enter__(self):
        self.tracer._silent = True
        self.unwatched.__enter__()
    def __exit__(self, *error):
        self.unwatched.__exit__(*error)
        self.tracer._silent = False


class WideCopies:
    "Copies tensors, in fp32 what is in half precision, with what fastai's `SequentialEx` hangs on them as attributes."
    def __init__(self): self.copies: dict[int, torch.Tensor] = {}

    def __call__(self, t: torch.Tensor) -> torch.Tensor:
        if id(t) in self.copies: return self.copies[id(t)]       # `orig` of its first input is the input itself
        self.copies[id(t)] = new = (t.detach().float() if t.dtype in HALF else t.detach()).clone()
        for name, value in vars(t).items(): setattr(new, name, map_tensors(self, value))
        return new


def _is_within(name: str, other: str) -> bool:
    return name == other or name.startswith(other + '.') or (other == ROOT and name != LOSS)


def _ancestors(call):
    while (call := call.parent) is not None: yield call
