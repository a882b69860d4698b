"What goes through each module of a model, in fp32 and in a lower precision, on the same batch and the same random draws?"
from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from fastai.callback.rnn import RNNCallback
from fastai.learner import Learner
from fastai.torch_core import is_listy
from fastcore.basics import noop
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..convert import HALF, map_tensors, to_fp32
from ..fp32_modules import qualified_names
from ..mode import AMPMode

LOSS = 'loss function'  # its name among the modules
SAMPLE = 4096           # values of an output that are kept to compare with another pass, evenly spaced


def tensors(x: Any, floating: bool = True) -> list[torch.Tensor]:
    "The tensors in `x`, nested at will; with `floating` those of floating point alone."
    found: list[torch.Tensor] = []
    def note(t):
        if not floating or t.is_floating_point(): found.append(t)
        return t
    map_tensors(note, x)
    return found


class Histogram:
    """How large the non-zero values of some tensors are, in powers of two: enough to tell how many of them would underflow
    or overflow in any format at any loss scale."""
    _lowest, _bins = -160, 320

    def __init__(self): self.counts, self.largest, self.finite = torch.zeros(self._bins, dtype=torch.int64), 0., True

    def add(self, t: torch.Tensor) -> None:
        "Count the values of `t`; those that are not finite only set `finite` to False."
        t = t.detach().float().flatten()
        ok = t.isfinite()
        t = t[ok & (t != 0)]
        self.finite &= bool(ok.all())
        if not len(t): return
        exponents = torch.frexp(t).exponent.long() - self._lowest    # |x| is in [2^(e-1), 2^e)
        self.counts += torch.bincount(exponents, minlength=self._bins).cpu()
        self.largest = max(self.largest, float(t.abs().max()))

    def share_below(self, threshold: float) -> float: # 0 to 1; nan if there is no value
        "The share of the non-zero values that are smaller than `threshold`, a power of two."
        n = int(self.counts.sum())
        return float(self.counts[:self._bin(threshold)].sum()) / n if n else math.nan

    def mass_below(self, threshold: float) -> float:
        "The share of the values' absolute sum that is in values smaller than `threshold`, a power of two; estimated from the bins."
        sums = self.counts.double() * torch.exp2(torch.arange(self._bins, dtype=torch.float64) + self._lowest - .415)
        return float(sums[:self._bin(threshold)].sum() / sums.sum()) if sums.sum() else 0.

    def _bin(self, threshold): return min(max(math.floor(math.log2(threshold)) + 1 - self._lowest, 0), self._bins)


@dataclass
class Seen:
    "What one module did, all its calls and all batches of a pass together."
    name: str
    type: str
    params: int                                                  # its own and its children's
    calls: int = 0
    inputs: set = field(default_factory=set)                     # dtypes
    outputs: set = field(default_factory=set)
    weights: set = field(default_factory=set)                    # of its own parameters
    largest: float = 0.                                          # absolute finite output
    inside: float = 0.                                           # and result of any operator of its own; in fp32 passes only
    values: int = 0                                              # floating-point values in its outputs
    non_finite: int = 0                                          # of these, where fp32 on the same inputs is finite
    subnormal: int = 0
    flushed: int = 0                                             # 0 where fp32 is a number too small for the format
    own_error: list = field(default_factory=lambda: [0., 0.])    # squared: of the difference to fp32 on the same inputs, of that
    total_error: list = field(default_factory=lambda: [0., 0.])  # the same to the fp32 pass, on the sample
    grads: Histogram = field(default_factory=Histogram)          # of its outputs and its own parameters
    samples: list = field(default_factory=list)                  # of each call's outputs, in the last batch

    @staticmethod
    def _relative(error): return math.sqrt(error[0] / error[1]) if error[1] > 0 else (math.inf if error[0] > 0 else 0.)
    @property
    def own(self) -> float: return self._relative(self.own_error)
    @property
    def total(self) -> float: return self._relative(self.total_error)


class _Frame:
    "One call under way."
    def __init__(self, seen, module, parent):
        self.seen, self.module, self.parent, self.expected, self.child_bad, self.clean_inputs = seen, module, parent, None, False, True
        self.grad_out, self.grad_in = [], []                     # was each gradient finite? In the order they came


_MOVES = {'clone', '_to_copy', 'copy_', 'cat', 'stack', 'empty', 'empty_like', 'empty_strided', 'new_empty', 'new_zeros', 'zeros', 'zeros_like',
          'fill_', 'zero_', 'detach_', 'ones', 'full', 'arange', 'lift_fresh', 'scalar_tensor'}


class _Operators(TorchDispatchMode):
    """Sees each operator that runs: notes which module computes something itself, and makes random draws in fp32, whatever
    the dtype they are wanted in, so that dropout masks are the same in every precision."""
    def __init__(self, tracer): super().__init__(); self.tracer = tracer

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags: return self._draw(func, args, kwargs)
        stack = self.tracer.stack
        if stack and not self.tracer.silent and func._schema.name.removeprefix('aten::') not in _MOVES:
            is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
            if not is_view:
                self.tracer.computing.add(stack[-1].seen.name)
                return self._measured(func(*args, **kwargs), stack[-1].seen)
        return func(*args, **kwargs)

    def _measured(self, out, seen):
        "A product inside a module may be far larger than what the module gives back."
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if self.tracer.mode is None and isinstance(first, torch.Tensor) and first.is_floating_point() and first.numel():
            values = first.detach().abs()
            values = values[values.isfinite()]
            if values.numel(): seen.inside = max(seen.inside, float(values.max()))
        return out

    @staticmethod
    def _draw(func, args, kwargs):
        x, name = args[0] if args else None, func._schema.name
        half = isinstance(x, torch.Tensor) and x.dtype in HALF
        if half and name.endswith('_'):                          # bernoulli_, uniform_, normal_, exponential_ ...
            return x.copy_(func(torch.empty_like(x, dtype=torch.float32), *args[1:], **kwargs))
        if half and name == 'aten::native_dropout':
            out, mask = func(x.float(), *args[1:], **kwargs)
            return out.to(x.dtype), mask
        wanted = kwargs.get('dtype') or (x.dtype if half and name.endswith('_like') else None)
        if wanted in HALF: return func(*args, **{**kwargs, 'dtype': torch.float32}).to(wanted)
        return func(*args, **kwargs)


class Tracer:
    """One pass over some batches: in fp32 if `mode` is None, else under autocast in `mode`, compared with the fp32 pass `reference`.

    While a batch runs, each module has two hooks. In a lower precision each leaf, and each container that was seen to
    compute something itself, is first run in fp32 on the inputs it got, with the same random draws; its buffers and
    other state are put back.
    """
    def __init__(self,
        model: nn.Module, # The model, not wrapped
        loss_func: Callable, # As on the learner
        mode: AMPMode | None = None,
        reference: Tracer | None = None, # The fp32 pass over the same batches
        scale: float = 1., # The loss scale for the backward pass
        after_pred: Callable[[Any], Any] = noop, # What becomes of the model's output before the loss
    ):
        self.model, self.loss_func, self.mode, self.reference, self.scale = model, loss_func, mode, reference, scale
        self.after_pred = after_pred
        self.names: dict[int, str] = {}
        for name, m in qualified_names(model): self.names.setdefault(id(m), name)
        self.computing: set[str] = set() if reference is None else reference.computing
        self.seen: dict[str, Seen] = {}                          # in the order in which modules end their first call
        self.trouble: list[str] = []                             # innermost modules that leave finite numbers in the forward pass
        self.trouble_backward: list[str] = []                    # and in the backward pass
        self.failed_in: str | None = None                        # where an exception came from
        self.non_finite_loss = self.non_finite_grads = False
        self.stack: list[Any] = []
        self._frames: list[Any] = []
        self._order: list[Any] = []
        self.silent = False

    # -- one batch

    def run(self, xb: tuple, yb: tuple, backward: bool = True) -> None:
        "Forward and backward on one batch; gradients go nowhere but into the statistics."
        device_type = next((t.device.type for t in tensors(xb)), None) or next((p.device.type for p in self.model.parameters()), 'cpu')
        self._frames, self.stack = [], []
        for s in self.seen.values(): s.samples = []
        autocast = nullcontext() if self.mode is None else torch.autocast(device_type, dtype=self.mode.dtype)
        with torch.autocast(device_type, enabled=False), torch.enable_grad(), self._hooks(), _eager(), autocast:
            try:
                with _Operators(self): pred = self.model(*xb)
                pred = to_fp32(self.after_pred(pred))
                if yb: loss = self._loss(pred, yb)
            except Exception:
                if self.stack: self.failed_in = self.stack[-1].seen.name
                raise
        if not yb: return
        if loss.dtype in HALF: loss = loss.float()
        loss = loss.mean()                                       # a scalar already, unless the loss function does not reduce
        self.non_finite_loss |= not bool(loss.isfinite())
        if backward and loss.requires_grad: self._backward(loss)

    def _backward(self, loss):
        params = [p for p in self.model.parameters() if p.requires_grad]
        if not params: return
        grads = torch.autograd.grad(loss * self.scale, params, allow_unused=True)
        finite = {}
        for p, g in zip(params, grads):
            if g is None: continue
            g = g.coalesce().values() if g.is_sparse else g
            finite[id(p)] = bool(g.isfinite().all())
            for frame_name in self._owners.get(id(p), ()):
                if frame_name in self.seen: self.seen[frame_name].grads.add(g)
        self.non_finite_grads |= not all(finite.values())
        started = []
        for f in self._frames:
            own = [finite[id(p)] for p in f.module.parameters(recurse=False) if id(p) in finite] if isinstance(f.module, nn.Module) else []
            if f.grad_out and all(f.grad_out) and not (all(f.grad_in) and all(own)): started.append(f)
        inner = [f for f in started if not any(f is a for g in started if g is not f for a in _ancestors(g))]
        self._add(self.trouble_backward, [f.seen.name for f in reversed(inner)])

    @staticmethod
    def _add(names, new): names.extend(n for n in dict.fromkeys(new) if n not in names)

    # -- hooks

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        self._owners: dict[int, list[str]] = {}
        with ExitStack() as stack:
            for m in [m for m in self.model.modules() if id(m) in self.names]:     # not `torch.compile`'s wrappers
                for p in m.parameters(recurse=False): self._owners.setdefault(id(p), []).append(self.names[id(m)])
                for handle in (m.register_forward_pre_hook(self._enter, with_kwargs=True),
                               m.register_forward_hook(self._leave, with_kwargs=True)): stack.callback(handle.remove)
            yield

    def selected(self, module: nn.Module, name: str) -> bool:
        "Does the module compute something itself: is it a leaf, or was it seen to?"
        return not any(True for _ in module.children()) or name in self.computing

    def _enter(self, module, args, kwargs):
        if self.silent: return
        name = self.names[id(module)]
        with self._silence():
            frame = self._open(name, module, type(module).__name__, (args, kwargs))
            if self.mode is not None and self.selected(module, name): frame.expected = self._in_fp32(module, (module,), args, kwargs)
        self.stack.append(frame)

    @contextmanager
    def _silence(self):
        "What runs inside is ours, not the model's."
        self.silent = True
        try: yield
        finally: self.silent = False

    def _open(self, name, module, kind, inputs):
        if name not in self.seen:
            of = list(module.parameters()) if isinstance(module, nn.Module) else []
            self.seen[name] = Seen(name, kind, sum(p.numel() for p in of))
        seen = self.seen[name]
        if isinstance(module, nn.Module): seen.weights |= {p.dtype for p in module.parameters(recurse=False)}
        frame = _Frame(seen, module, self.stack[-1] if self.stack else None)
        for t in tensors(inputs):
            seen.inputs.add(t.dtype)
            if t.numel(): frame.clean_inputs &= not bool((t.isnan() | (t == math.inf)).any())
            if t.requires_grad and not t.is_leaf: t.register_hook(lambda g, f=frame: f.grad_in.append(bool(g.isfinite().all())))
        return frame

    def _in_fp32(self, call, modules, args, kwargs):
        "What `call` gives in fp32 on copies of the same inputs; nothing else changes. None if it cannot run in fp32."
        copy = lambda t: (t.detach().float() if t.dtype in HALF else t.detach()).clone()
        device_type = next((t.device.type for t in tensors((args, kwargs))), 'cpu')
        with random_state_kept(device_type), effects_undone(modules), torch.no_grad(), torch.autocast(device_type, enabled=False):
            return map_tensors(lambda t: t.clone(), call(*map_tensors(copy, args), **map_tensors(copy, kwargs)))

    def _leave(self, module, args, kwargs, output):
        if self.silent: return
        with self._silence(): self._close(self.stack.pop(), output)

    def _close(self, frame, output):
        seen = frame.seen
        self.seen[seen.name] = self.seen.pop(seen.name) if seen.calls == 0 else seen     # in the order of endings
        seen.calls += 1
        self._frames.append(frame)
        outs = tensors(output)
        expected = tensors(frame.expected) if frame.expected is not None else []
        compare = len(outs) == len(expected) and all(o.shape == e.shape for o, e in zip(outs, expected))
        bad = 0
        for i, o in enumerate(outs):
            seen.outputs.add(o.dtype)
            if o.requires_grad and o.grad_fn is not None:
                o.register_hook(lambda g, f=frame: (f.grad_out.append(bool(g.isfinite().all())), f.seen.grads.add(g)) and None)
            values = o.detach()
            if not values.numel(): continue
            finite = values.isfinite()
            seen.values += values.numel()
            if finite.any(): seen.largest = max(seen.largest, float(values[finite].abs().max()))
            self._sample(seen, values)
            if compare: bad += self._compare(seen, values, finite, expected[i])
        frame.expected = None
        if self.mode is None: bad = sum(int((o.isnan() | (o == math.inf)).sum()) for o in outs)      # in fp32: what is wrong in any precision
        if bad and not frame.child_bad and frame.clean_inputs: self._add(self.trouble, [seen.name])
        if frame.parent is not None: frame.parent.child_bad |= frame.child_bad or bool(bad)

    def _compare(self, seen, values, finite, expected):
        usable, wide = expected.isfinite(), values.float()
        bad = int((~finite & usable).sum())
        seen.non_finite += bad
        if values.dtype in HALF:
            tiny = torch.finfo(values.dtype).tiny
            small = wide.abs() < tiny
            seen.subnormal += int((small & (wide != 0)).sum())
            seen.flushed += int(((wide == 0) & (expected != 0) & (expected.abs() < tiny)).sum())
        both = finite & usable
        _accumulate(seen.own_error, wide[both], expected[both])
        return bad

    def _sample(self, seen, values):
        flat = values.reshape(-1)
        n = len(flat)
        at = torch.arange(min(n, SAMPLE), device=flat.device) * n // min(n, SAMPLE)
        sample = flat[at].float()
        seen.samples.append(sample)
        if self.reference is None: return
        others = self.reference.seen.get(seen.name)
        k = len(seen.samples) - 1
        if others is None or k >= len(others.samples) or others.samples[k].shape != sample.shape: return
        both = sample.isfinite() & others.samples[k].isfinite()
        _accumulate(seen.total_error, sample[both], others.samples[k][both])

    def _loss(self, pred, yb):
        f, args = self.loss_func, (pred, *yb)
        kind = type(f).__name__ if not hasattr(f, '__name__') else f.__name__
        self.stack.append(self._open(LOSS, f, kind, args))
        if self.mode is not None:
            modules = tuple(m for m in (f, getattr(f, 'func', None)) if isinstance(m, nn.Module))
            self.stack[-1].expected = self._in_fp32(f, modules, args, {})
        with _Operators(self): loss = f(*args)
        self._close(self.stack.pop(), loss)
        return loss


def _ancestors(frame):
    while (frame := frame.parent) is not None: yield frame


def _accumulate(error, got, expected):
    error[0] += float((got.double() - expected.double()).square().sum())
    error[1] += float(expected.double().square().sum())


def _eager():
    "Run what was compiled in place as it was written: hooks would not fire inside a compiled graph."
    return torch.compiler.set_stance('force_eager') if hasattr(torch.compiler, 'set_stance') else nullcontext()


def after_pred(learn: Learner) -> Callable[[Any], Any]:
    "What `learn`'s callbacks make of the model's output before the loss: RNNCallback passes on the last of its first entry."
    if not any(isinstance(cb, RNNCallback) for cb in learn.cbs): return noop
    return lambda pred: pred[0][-1] if is_listy(pred[0]) else pred[0]


@contextmanager
def effects_undone(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Run `modules` inside without effect on their buffers and on what else they remember, such as a hidden state.

    Parameters and gradients must be left alone.
    """
    kept: list[tuple[Any, Any]] = []
    tensors_kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    def keep(t):
        if not isinstance(t, nn.Parameter): tensors_kept.append((t, t.detach().clone()))
        return t
    for m in (m for root in modules for m in root.modules()):
        kept.append((vars(m), dict(vars(m))))
        for value in vars(m).values():
            if isinstance(value, (dict, list)): kept.append((value, value.copy()))
        state = {k: v for k, v in vars(m).items() if k not in ('_parameters', '_modules')}
        map_tensors(keep, state)
    try: yield
    finally:
        for container, content in kept:
            if isinstance(container, dict): container.clear(); container.update(content)
            else: container[:] = content
        with torch.no_grad():
            for t, values in tensors_kept: t.data.copy_(values)       # not a change that a graph would mind


@contextmanager
def random_state_kept(device_type: str) -> Iterator[None]:
    "Put torch's random state, on the CPU and on this type of device, back at the end."
    module: Any = getattr(torch, device_type, None)
    devices = range(module.device_count()) if device_type != 'cpu' and hasattr(module, 'device_count') else []
    with torch.random.fork_rng(devices, device_type=device_type if devices else 'cuda'): yield


class local_statistics:
    "SyncBatchNorm computes with this process's own statistics inside: its ranks need not take part together."
    def __init__(self, model): self.layers = [m for m in model.modules() if isinstance(m, nn.SyncBatchNorm) and 'forward' not in m.__dict__]
    def __enter__(self):
        for m in self.layers: m.forward = lambda x, m=m: nn.functional.batch_norm(
            x, m.running_mean, m.running_var, m.weight, m.bias, m.training or m.running_mean is None, m.momentum or 0., m.eps)
    def __exit__(self, *args):
        for m in self.layers: m.__dict__.pop('forward', None)
