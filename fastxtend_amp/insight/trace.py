"""Runs batches in the training loop of a copied learner, in fp32 or a lower precision, and records each module.

Module hooks keep a stack of the running modules, and a dispatch mode sees each operator. Its results belong to the
innermost module (or the model itself) or to the loss function. In a lower precision each operator also runs in fp32, on
fp32 twins of its inputs. A module has twins only for the results of its own operators; its inputs, and the outputs of
modules inside, count as exact. So the error of a module is that of its own arithmetic, measured on its outputs and on
what it passes to modules inside.
"""
from __future__ import annotations

import math, sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from fastai.callback.core import Callback, CancelBatchException
from fastai.learner import Learner
from fastcore.basics import noop
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..common import Shared, first_line
from ..convert import HALF, half_to_float, map_tensors
from ..precisions import AMPMode
from ..precisions.fp32_settings import FULL_PRECISION, fp32_settings
from ..precisions.fp8 import fp8_layers
from ..precisions.matching import ROOT, qualified_names
from ..training.callback import MixedPrecision
from ..training.learner import set_precision
from ..training.loop import precision_callback
from .compat import in_function_transform, operator, unwatched
from .copies import begin_fit, copied_learner, is_plain, set_random_state, tensors
from .rounding import round_as_fp8

_UNCOMPILED = Shared(partial(torch.compiler.set_stance, 'force_eager'))
LOSS = 'loss function'  # its name among the modules; includes callbacks after the forward pass
_FP32_NOISE = 2.**-23   # relative; where fp32 itself would lose a tenth, an error is noise
# Operators that only move values, which are recorded where they were computed.
_MOVES = frozenset(('clone', '_to_copy', 'copy_', 'cat', 'stack', 'detach', 'lift_fresh'))
_MASK_FROM = 1e3        # larger values may be an attention mask,
_MASK_GAP = 64          # if they are negative and all others are smaller by this factor


@dataclass
class Seen:
    "Records of one module: of its own operators, not those of modules inside; over all calls and batches."
    name: str
    type: str
    largest: float = 0.                                          # absolute finite result; of the twin, if there is one
    half: float = 0.                                             # the same, of 16-bit results only
    failed: bool = False                                         # whether NaN or inf first appears in it
    error: float = math.nan                                      # of its own arithmetic, relative; the largest
    vanished: float = 0.                                         # a constant that rounds to 0, next to values near 0
    grad: float = 0.                                             # largest absolute, of its outputs and own parameters
    grad_sum: float = 0.                                         # of the absolute values of all these gradients
    n_grads: int = 0                                             # that are finite and not 0


@dataclass(eq=False)
class _Frame:
    "A running call of a module, and the fp32 twins of the results of its operators."
    seen: Seen
    # By address: a tensor there, and the fp32 copy of its memory.
    twins: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def twin(self, t: torch.Tensor) -> Any:
        "Return the fp32 twin of `t`, which shares memory with the twins of its views; None if it is exact."
        found = self.twins.get(_address(t))
        return None if found is None else found[1].as_strided(t.shape, t.stride(), t.storage_offset())

    def keep(self, t: torch.Tensor, wide: torch.Tensor) -> None:
        "Keep `wide` as the twin of `t`, unless `t` has no address."
        address = _address(t)
        if not address or t.shape != wide.shape: return
        if self.twin(t) is None:                                 # of all that shares this memory
            self.twins[address] = t, t.new_empty(0).set_(t.untyped_storage()).to(wide.dtype, copy=True)
        self.twin(t).copy_(wide)

    def wide(self, t: torch.Tensor) -> torch.Tensor:
        twin = self.twin(t)
        return half_to_float(t) if twin is None else twin


def _address(t: torch.Tensor) -> int:
    if t.layout is not torch.strided or t.device.type == 'xla': return 0         # it has none
    return t.untyped_storage().data_ptr()


class Trace(TorchDispatchMode):
    """Records of some batches in one precision; in a lower one with `reference`, the records in fp32.

    `seen`: the modules, in the order in which their last calls finish, and the loss function.
    """
    def __init__(self,
        mode: AMPMode | None = None, # fp32 if None
        reference: Trace | None = None,
    ):
        super().__init__()
        self.mode, self.reference = mode, reference
        self.seen: dict[str, Seen] = {}
        self.not_finite = ''                                     # 'loss', or 'gradient' if no loss was
        self.error = ''                                          # why it ended: the text of an exception
        self.failed_in = ''                                      # the module that raised it; '' before a batch
        self.in_fp8: dict[str, nn.Module] = {}                   # the layers that round as FP8 does
        self.unseen: set[str] = set()                            # what cannot be read, and in which module
        self._frames: list[_Frame] = []
        self.in_backward = False                                 # whether the last batch has given a loss

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        "Record what `model` does in this context."
        with ExitStack() as stack:
            for name, m in qualified_names(model):
                if isinstance(m, torch.jit.ScriptModule): continue       # without hooks from Python
                # Before all other hooks, so that what those do to the inputs is recorded for the module.
                enter = m.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True, prepend=True)
                stack.enter_context(enter)
                stack.enter_context(m.register_forward_hook(self._leave, with_kwargs=True, always_call=True))
            stack.enter_context(self)
            yield

    def begin(self) -> None:
        "Begin a batch."
        self.failed_in, self._frames, self.in_backward = LOSS, [], False

    def end_forward(self, loss: torch.Tensor) -> None:
        "Record the loss, which is not scaled yet."
        self.in_backward = True                                  # from here on no operator is recorded
        if not all_finite(loss): self.not_finite = 'loss'
        if self._frames:
            self._compare(self._frames[0], loss)
            self.seen[LOSS] = self.seen.pop(LOSS)                # the last

    def end_backward(self, model: nn.Module) -> None:
        "Record the gradients of the parameters, and clear them."
        for name, m in qualified_names(model):
            for p in m.parameters(recurse=False):
                if p.grad is None or not is_plain(p.grad): continue
                g = p.grad.to_dense()
                if not all_finite(g): self.not_finite = self.not_finite or 'gradient'
                if name in self.seen: self._gradient(self.seen[name], g)
        model.zero_grad()                                        # before the next batch adds to them

    # -- modules

    def _enter(self, name, module, args, kwargs):
        with unwatched():
            if not self._frames: self._push(LOSS, 'function')    # everything outside of the model
            if not self.in_backward and not in_function_transform():       # tensors of vmap cannot be read
                for t in tensors((args, kwargs)): self._compare(self._frames[-1], t)
            self._push(name, type(module).__name__)

    def _push(self, name, kind): self._frames.append(_Frame(self.seen.setdefault(name, Seen(name, kind))))

    def _leave(self, module, args, kwargs, output):
        with unwatched():
            frame = self._frames.pop()
            seen = frame.seen
            # The innermost module that an exception leaves has raised it.
            if self.failed_in == LOSS and output is None and sys.exc_info()[0] is not None: self.failed_in = seen.name
            outputs = [] if in_function_transform() else tensors(output)
            for out in outputs:
                if self.reference is None and out.requires_grad: out.register_hook(partial(self._gradient, seen))
            if self.in_backward: return                            # a checkpoint, whose first run was recorded
            self.seen[seen.name] = self.seen.pop(seen.name)      # after the modules inside
            for out in outputs: self._compare(frame, out)

    def _compare(self, frame, t):
        "Record the error of a tensor that leaves a module, or enters one inside."
        if self.mode is None: return
        t = t.detach()
        error = relative_error(t, frame.wide(t))
        if error * _FP32_NOISE < .1 * torch.finfo(self.mode.dtype).eps:
            frame.seen.error = max(error, frame.seen.error)      # in this order, as that may be nan

    def _gradient(self, seen, g):
        "Record the gradient of an output or a parameter."
        if not self.in_backward: return                          # of the model itself, such as forces from an energy
        g = g.detach().abs().float()
        g = g[g.isfinite() & (g != 0)]
        if not g.numel(): return
        seen.grad = max(seen.grad, float(g.max()))
        seen.grad_sum, seen.n_grads = seen.grad_sum + float(g.sum()), seen.n_grads + g.numel()

    # -- operators

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, op = kwargs or {}, operator(func)
        makes_nothing = op.is_view or op.name.startswith(('empty', 'full', 'new_', 'scalar_tensor'))   # or a constant
        if makes_nothing or self.in_backward or not self._frames: return func(*args, **kwargs)
        frame = self._frames[-1]
        seen, inputs = frame.seen, tensors((args, kwargs))
        fp32 = self.reference and self.reference.seen.get(seen.name)
        strange = [t for t in tensors((args, kwargs), floating=False) if t.is_floating_point() and not is_plain(t)]
        for t in strange: self.unseen.add(f"{type(t).__name__} of {t.dtype} in '{seen.name}'")
        is_cast = op.name == '_to_copy' and kwargs.get('dtype') in HALF
        low = self.mode is not None and (is_cast or any(t.dtype in HALF or frame.twin(t) is not None for t in inputs))
        began_finite = not op.writes or all(map(all_finite, inputs))
        wide = self._widely(func, op, args, kwargs, frame) if low and not (op.draws or strange) else None
        out = func(*args, **kwargs)
        if op.writes:                                            # exact for the callers, as outputs of modules inside
            frames = self._frames if wide is None else self._frames[:-1]
            for t in tensors(args[:1]):
                for f in frames: f.twins.pop(_address(t), None)
        # Decisions and indices: their error is the share that differs.
        if torch.is_tensor(wide) and wide.dtype in (torch.bool, torch.int64) and out.shape == wide.shape:
            seen.error = max(float((out != wide).float().mean()), seen.error)
        outs = tensors(out)
        for o, w in zip(outs, [*tensors(wide), *[None] * len(outs)]):
            value = o if w is None else w
            largest = largest_value(value)
            if op.name not in _MOVES or is_cast:
                seen.largest = max(seen.largest, largest)
                if o.dtype in HALF: seen.half = max(seen.half, largest)
            # Rounding errors of what is exactly 0 in fp32 would be 100%.
            if w is not None and (not fp32 or fp32.largest): frame.keep(o, w)
            if o.dtype is torch.float16 and op.name.startswith(('add', 'clamp')) and isinstance(args[1], float):
                # fp16 rounds the constant to 0, and loses digits of the value next to it.
                if 0 < args[1] < 2.9e-8 and value.abs().min() < 6.1e-5: seen.vanished = args[1]
            if all_finite(o) or (fp32 and fp32.failed): continue
            # -inf may be a mask.
            if w is None: seen.failed |= began_finite and (op.writes or all(map(all_finite, inputs))) and ends(o)
            elif largest: seen.failed |= ends(o[w.isfinite()])
        return out

    def _widely(self, func, op, args, kwargs, frame):
        "Return the result of the operator in fp32 on the twins of its inputs; None if it does not run in fp32."
        def wide(t): return frame.wide(t).clone() if op.writes else frame.wide(t)
        device_type = tensors((args, kwargs), floating=False)[0].device.type
        dtypes = {k: torch.float32 for k, v in kwargs.items() if isinstance(v, torch.dtype) and v in HALF}
        try:
            with torch.no_grad(), torch.autocast(device_type, enabled=False):
                return func(*map_tensors(wide, args), **{**map_tensors(wide, kwargs), **dtypes})
        except Exception:                                        # such as flash attention, which is 16-bit only
            self.unseen.add(f"{func}, which does not run in fp32 in '{frame.seen.name}'")
            return None


class _Ends(Callback):
    "Calls the trace after the forward and the backward pass, and cancels the rest of the batch."
    order = 1000                                                 # after all others
    def __init__(self, trace: Trace): self.trace = trace
    def before_batch(self): vars(self.learn).pop('loss_grad', None)          # of the batch before
    def after_loss(self):
        loss = vars(self.learn).get('loss_grad')                 # without targets a callback may set it
        if loss is not None: self.trace.end_forward(loss)
    def after_backward(self):
        self.trace.end_backward(self.learn.model)
        raise CancelBatchException


@contextmanager
def running_copy(
    learn: Learner, # Nothing in it changes
    mode: AMPMode | None, # fp32 if None
    keep: Sequence[str], # Modules kept in fp32
    scale: float, # The loss scale, for fp16
    found: Trace, # Its `end_forward` and `end_backward` are called in each batch of training
    in_fit: bool = False, # Whether `learn` is in the middle of a batch; otherwise a fit of the copy begins
) -> Iterator[Learner]:
    """Copy `learn` in a precision; a batch of the copy ends with its backward pass, and no step is taken.

    Compiled modules run uncompiled, as hooks do not fire in a compiled graph.
    """
    with copied_learner(learn) as copy, _UNCOMPILED, fp32_settings(FULL_PRECISION):
        if mode is AMPMode.FP8:
            cb = precision_callback(learn)
            found.in_fp8 = fp8_layers(copy.model, cb and cb.arguments.get('modules'), keep)
            for layer in found.in_fp8.values(): round_as_fp8(layer)
            mode = AMPMode.BF16
        if mode is None:
            set_precision(copy, None)
            copy.model._apply(half_to_float)                     # frozen weights, which autocast casts
        else: set_precision(copy, MixedPrecision(mode, init_scale=scale, fp32_modules=keep, on_overflow='ignore'))
        copy.scaler = torch.amp.GradScaler('cpu', enabled=False)   # callbacks may use it, in fp32 as well
        copy.add_cb(_Ends(found))
        if not in_fit:
            copy.create_opt()
            begin_fit(copy, 1)
        yield copy


def trace(
    learn: Learner, # Nothing in it changes
    batches: Sequence[Any], # As a DataLoader gives them; inputs and targets of the batch under way if `in_fit`
    mode: AMPMode | None = None, # fp32 if None
    keep: Sequence[str] = (), # Modules kept in fp32
    scale: float = 1., # The loss scale, for fp16
    *,
    reference: Trace | None = None, # In fp32, of the same batches
    in_fit: bool = False, # Whether `learn` is in the middle of a batch
    random_state: Any = (), # To begin with; the present one if empty
) -> Trace:
    """Run batches forward and backward in a copy of `learn`, in its own loop with its callbacks; no step is taken.

    Then the first batch runs as in validation, unless that fails in fp32 as well.
    """
    found, where = Trace(mode, reference), ''
    try:
        with running_copy(learn, mode, keep, scale, found, in_fit) as copy:
            set_random_state(random_state)
            with found.hooked(copy.model):
                for i, batch in enumerate(batches):
                    batch = map_tensors(torch.clone, batch)      # which the model may write into
                    found.begin()
                    _run_again(copy, *batch) if in_fit else copy.one_batch(i, batch)
            if in_fit or (reference and reference.error): return found
            # Without hooks, as some modules of PyTorch then use other kernels.
            where, found.failed_in = ' (in validation)', ROOT
            copy.remove_cbs(_Ends)
            copy._do_epoch_validate(dl=[map_tensors(torch.clone, batches[0])])
    except torch.OutOfMemoryError: raise
    except Exception as e:
        if mode is None and not where: raise
        found.error = first_line(e) + where
    return found


# -- numbers about tensors, without float64, which MPS lacks

def all_finite(t: torch.Tensor) -> bool:
    "Return whether no value is NaN or inf."
    return bool(t.isfinite().all())


def ends(t: torch.Tensor) -> bool:
    "Return whether a value is NaN or +inf; -inf may be a mask."
    return bool((t.isnan() | t.isposinf()).any())


def largest_value(t: torch.Tensor) -> float:
    """Return the largest absolute finite value; 0 if there is none.

    Attention masks are ignored: negative values far from all others, and tensors of one or two distinct values.
    """
    if not all_finite(t): t = t[t.isfinite()]
    if not t.numel(): return 0.
    low, high = map(float, torch.aminmax(t))
    largest = max(-low, high)
    if largest < _MASK_FROM: return largest
    if t.numel() > 2 >= len(t.unique()): return 0.
    others = float(t[t > low / 4].abs().max()) if high > low / 4 else math.inf
    return others if others * _MASK_GAP < -low else largest


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float: # nan without a value other than 0
    "Return the norm of the difference over that of `expected`, of the values that are finite in both."
    both = got.isfinite() & expected.isfinite()
    got, expected = got[both].float(), expected[both].float()
    if not (unit := largest_value(expected)): return math.nan    # so that squares stay in the range of fp32
    return float(((got - expected) / unit).norm() / (expected / unit).norm())


# -- the loop of the copy

def _run_again(copy, xb, yb):
    "Run a batch that callbacks have already prepared."
    copy.xb, copy.yb = xb, yb
    for cb in copy.cbs:
        if not isinstance(cb, MixedPrecision): cb.before_batch = noop
    copy._with_events(copy._do_one_batch, 'batch', CancelBatchException)
