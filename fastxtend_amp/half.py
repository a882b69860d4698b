"What did fastai v1's to_fp16 do, done right? Half-precision weights in the forward and backward pass, fp32 masters everywhere else."
from __future__ import annotations

import copy, inspect, warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from fastai.learner import Learner
from fastai.optimizer import Optimizer, OptimWrapper, pytorch_hp_map
from fastcore.foundation import L
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from .callback import MixedPrecision
from .convert import HALF, map_tensors
from .diagnosis import OverflowWatch
from .islands import Islands, unwrapped
from .mode import AMPMode, model_device
from .probe import effects_undone, random_state_kept

__all__ = ['HalfPrecision', 'bytes_per_parameter', 'kahan']

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class _GradMemory:
    """Memory for one master's gradient that outlives the step, where the system would take it back and hand it out anew, page by page.

    It is lent once between two steps, to a master without a gradient, so that nobody's earlier gradient is overwritten.
    """
    def __init__(self, master: nn.Parameter):
        self.master, self.lent = master, False
        self.tensor: torch.Tensor | None = None                  # flat masters put a part of their own here
        self.wanted = master.device.type == 'cpu'                # an accelerator's allocator keeps what it frees, for activations, too

    def fp32(self, grad: torch.Tensor) -> torch.Tensor:
        "`grad` in the master's dtype."
        p = self.master
        dense = type(grad) is torch.Tensor and grad.layout is torch.strided
        if self.lent or p.grad is not None or torch.is_grad_enabled() or not dense: return grad.to(p.dtype)
        if self.tensor is None and not self.wanted: return grad.to(p.dtype)
        self.lent = True
        if self.tensor is None: self.tensor = torch.empty_like(p, requires_grad=False)
        return self.tensor.copy_(grad).data                    # a tensor of its own, so that autograd need not copy it


class _AsHalf(torch.autograd.Function):
    "The half-precision copy that stands for a master: no operator forward; backward, its gradient in the master's dtype."
    @staticmethod
    def forward(ctx, master, half, memory):
        ctx.memory = memory
        return half.detach()
    @staticmethod
    def backward(ctx, grad): return ctx.memory.fp32(grad), None, None


def _to(p: nn.Parameter, dtype: torch.dtype) -> None:
    if p.dtype is dtype: return
    grad, p.grad = p.grad, None
    p.data = p.data.to(dtype)
    if grad is not None: p.grad = grad.to(dtype)


def _refused(module, p): return isinstance(module, torch.jit.ScriptModule) or is_lazy(p)


def check_model(model: nn.Module, opt: Any) -> None:
    "Raise a `ValueError` that names a parameter that cannot have a half-precision copy, or whose gradient `opt` cannot take."
    for path, module in unwrapped(model).named_modules():
        for name, p in module._parameters.items():
            where = f"parameter '{path + '.' if path else ''}{name}'"
            if p is None: continue
            if is_lazy(p):
                raise ValueError(f"to_half: {where} has no shape yet. Call `learn.model` once on a batch before `fit`.")
            if isinstance(module, torch.jit.ScriptModule):
                raise ValueError(f"to_half: {where} is in a TorchScript module, whose weights cannot be replaced. Keep the module around it with `keep_fp32`, "
                                 "or use `learn.to_bf16()`.")
            if p.dtype in HALF and p.requires_grad:
                raise ValueError(f"to_half: {where} is {p.dtype} already, so it can have no fp32 master. Call `learn.model.float()` first.")
            if getattr(module, 'sparse', False) and p.requires_grad and (why := _sparse_trouble(opt)):
                kind = type(getattr(opt, 'opt', opt)).__name__
                raise ValueError(f"to_half: {where} has sparse gradients, which this {kind} cannot take ({why}). Use an optimizer that can, such as SGD "
                                 "without momentum, or `sparse=False`.")


def _trial(opt: Any, params: list[nn.Parameter]) -> Any:
    "An optimizer of `params` with the rule of `opt` and nothing in its state."
    if type(opt) is Optimizer: return Optimizer(params, opt.cbs, **{**opt.hypers[0], 'lr': .01})
    inner = opt.opt
    try: trial = type(inner)(params, **inner.defaults)
    except TypeError:                                            # its arguments have other names than its defaults
        trial = copy.copy(inner)
        trial.state, trial.param_groups = defaultdict(dict), [{'params': params}]
    for g in trial.param_groups: g.update({**inner.param_groups[0], 'params': params, 'lr': .01})
    return trial


def _sparse_trouble(opt) -> str | None:
    "What a trial step on a small sparse gradient ends with; None if it works."
    if type(opt) is not Optimizer and not isinstance(opt, OptimWrapper): return None
    p = nn.Parameter(torch.ones(3, 2))
    try:
        trial = _trial(opt, [p])
        for _ in range(2):
            p.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, 2), (3, 2), check_invariants=False)
            trial.step()
    except (RuntimeError, TypeError) as e: return str(e).splitlines()[0]
    return None


def _is_elementwise(opt) -> bool:
    "Do trial steps change the same numbers alike, whether they are one tensor or two?"
    device = next(p.device for pl in opt.param_lists for p in pl)
    numbers = torch.linspace(-1, 30, 10, device=device)
    def stepped(*tensors):
        params = [nn.Parameter(t.clone()) for t in tensors]
        trial = _trial(opt, params)
        for _ in range(2):
            for p in params: p.grad = p.detach().sin()
            trial.step()
        state = [(p, v) for p in params for v in trial.state.get(p, {}).values() if isinstance(v, torch.Tensor)]
        return torch.cat([p.detach().flatten() for p in params]), all(v.numel() == 1 or v.shape == p.shape for p, v in state)
    try: (two, fits), (one, _) = stepped(numbers[:6].view(3, 2), numbers[6:]), stepped(numbers)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError): return False   # it wants matrices, a closure, ...
    return fits and torch.allclose(two, one)


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, NORMS) or type(module).__name__.endswith(('RMSNorm', 'LayerNorm'))


@lru_cache
def _takes_half(kind: type, device_type: str, dtype: torch.dtype) -> bool:
    "Does PyTorch run this normalisation on half-precision inputs with fp32 weights, forward and backward?"
    rank = {nn.BatchNorm1d: 0, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3, nn.LayerNorm: 0, nn.GroupNorm: 2}.get(kind)
    if rank is None: return False
    try:
        norm = (kind(2, 2) if kind is nn.GroupNorm else kind(2)).to(device_type)
        for training in (True, False):
            out = norm.train(training)(torch.ones(2, 2, *[2] * rank, device=device_type, dtype=dtype, requires_grad=True))
            out.float().sum().backward()
        return out.dtype is dtype
    except RuntimeError: return False


def _weight(module: nn.Module) -> torch.Tensor | None:
    "The tensor that says in which dtype `module` computes: its first own floating one."
    for p in module._parameters.values():
        if p is not None and p.is_floating_point(): return p
    if 'parametrizations' not in module._modules: return None
    return next((p for p in module.get_submodule('parametrizations').parameters() if p.is_floating_point()), None)


def _like_weights(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    "A forward pre-hook: floating inputs in the dtype of the module's own weights, as autocast would have them."
    w = _weight(module)
    if w is None: return None
    dtype = w.dtype
    if not kwargs and all(isinstance(t, torch.Tensor) and (t.dtype is dtype or not t.is_floating_point()) for t in args): return None
    def cast(t): return t.to(dtype) if t.is_floating_point() and t.dtype is not dtype else t
    return map_tensors(cast, args), map_tensors(cast, kwargs) if kwargs else kwargs


class HalfWeights:
    """The half-precision copies of one model's fp32 parameters, and where in the model they go.

    The model's `Parameter`s are the masters and never change dtype or memory. Inside a batch the modules hold the copies
    in their place, as `torch.func.functional_call` would put them there; gradients flow through a copy to its master, in
    fp32. Everybody who looks at the model outside the forward and backward pass (the optimizer, gradient clipping,
    checkpoints, DDP's hooks) meets ordinary fp32 parameters.
    """
    def __init__(self,
        model: nn.Module, # The model; nothing in it changes yet
        dtype: torch.dtype, # The copies' dtype
        kept: dict[str, nn.Module], # Modules whose parameters stay in fp32; so do those of normalisation layers
        has_masters: bool = True, # Whether there are copies at all: `lower` turns the parameters themselves otherwise
    ):
        self.model, self.dtype, self.inside, self.stale = model, dtype, False, True
        self.stepped = False                                     # since gradients' memory was lent
        self.on = False                                          # whether there is training, so that the copies are wanted
        model = unwrapped(model)
        norms = [m for m in model.modules() if _is_norm(m)]
        stays = {id(p) for m in (*kept.values(), *norms) for p in m.parameters()}
        self.masters: list[nn.Parameter] = []
        self.halves: list[torch.Tensor] = []
        self.slots: list[tuple[nn.Module, str, int]] = []        # module, its parameter's name, number of the master
        places: dict[int, int] = {}
        for module in model.modules():
            for name, p in module._parameters.items():
                if p is None or p.dtype is not torch.float32 or id(p) in stays or _refused(module, p): continue
                i = places.setdefault(id(p), len(self.masters))
                if i < len(self.masters): pass                   # tied
                elif not has_masters: self.masters.append(p)
                else:
                    self.masters.append(p)
                    self.halves.append(torch.empty_like(p, dtype=dtype, requires_grad=False, memory_format=torch.preserve_format))
                if has_masters: self.slots.append((module, name, i))
        self.memories = {p: _GradMemory(p) for p in self.masters if has_masters}
        devices: dict[torch.device, list] = {}                   # PyTorch crashes on a list of tensors on several devices
        for h, p in zip(self.halves, self.masters): devices.setdefault(h.device, []).append((h, p))
        self.by_device = [*devices.values()]
        inner = {id(m) for k in kept.values() for m in k.modules()}
        self.rnns = [m for m in model.modules() if isinstance(m, nn.RNNBase) and id(m) not in inner]
        self.casting = [m for m in model.modules() if id(m) not in inner and not isinstance(m, torch.jit.ScriptModule) and _weight(m) is not None
                        and not self._mixed(m)]

    def hook(self) -> None:
        "Let modules cast their inputs from now on, until `close`."
        for m in self.casting: m.register_forward_pre_hook(_like_weights, with_kwargs=True, prepend=True)

    def _mixed(self, m): return _is_norm(m) and _takes_half(type(m), next(m.parameters()).device.type, self.dtype)

    def refresh(self) -> None:
        "Rewrite the copies from the masters."
        for pairs in self.by_device: torch._foreach_copy_([h.data for h, _ in pairs], [p.detach() for _, p in pairs])
        self.stale, self._versions = False, self._state()

    def lend(self) -> None:
        "After a step: gradients may have the memory of the last ones, unless these are still there."
        for p, memory in self.memories.items(): memory.lent = p.grad is not None
        self.stepped = False

    # What changes a master without `.data` shows here; fastai's optimizers use `.data`, and the events tell of them.
    def _state(self): return [(p._version, p.data_ptr()) for p in self.masters]

    def fits(self, model: nn.Module) -> bool:
        "Are the model and its parameters still the ones that this was built for?"
        return model is self.model and all(m._parameters.get(n) is self.masters[i] for m, n, i in self.slots)

    def enter(self) -> None:
        "Put the copies into the model."
        if self.inside: return
        if self.stale or self._versions != self._state(): self.refresh()
        self.fastpath = torch.backends.mha.get_fastpath_enabled()
        self.inside = True
        torch.backends.mha.set_fastpath_enabled(False)           # it would mix half weights with the norms' fp32 in one kernel
        grad = torch.is_grad_enabled()
        now: Any = [_AsHalf.apply(p, h, self.memories[p]) if grad and p.requires_grad else h for p, h in zip(self.masters, self.halves)]
        for module, name, i in self.slots: module._parameters[name] = now[i]
        for rnn in self.rnns: rnn._flat_weights = [getattr(rnn, n, None) for n in rnn._flat_weights_names]

    def leave(self) -> None:
        "Put the masters back; may be interrupted and called again."
        if not self.inside: return
        for module, name, i in self.slots: module._parameters[name] = self.masters[i]
        for rnn in self.rnns: rnn._flat_weights = [getattr(rnn, n, None) for n in rnn._flat_weights_names]
        torch.backends.mha.set_fastpath_enabled(self.fastpath)
        self.inside = False

    def lower(self) -> None:
        "Without masters: the parameters themselves in half precision."
        for p in self.masters: _to(p, self.dtype)

    def close(self) -> None:
        "Take everything off the model; parameters that `lower` turned are fp32 again, with the values they came to."
        self.leave()
        for p in self.masters: _to(p, torch.float32)
        for m in self.casting:                                   # looked for, since an interrupt may have struck while they were put on
            for key in [k for k, hook in m._forward_pre_hooks.items() if hook is _like_weights]:
                m._forward_pre_hooks_with_kwargs.pop(key, None)
                m._forward_pre_hooks.pop(key, None)


class FlatMasters:
    """The masters of each parameter group as few flat tensors, and the optimizer's state too; every master is a view of one.

    Only while the optimizer steps does it see the flat ones: learner, checkpoints and callbacks meet one entry for each
    parameter. Parameters share a flat tensor if group, device, weight-decay exemption, `force_train`, the state that
    is not a tensor of their shape (such as the step count) and having a gradient agree; it is built anew when that changes.
    """
    def __init__(self): self._forget()
    def _forget(self): self.sets, self.pattern, self.lists, self.opt, self.strides = [], None, None, None, {}

    @staticmethod
    def check(opt: Any) -> None:
        "Raise a `ValueError` that names an optimizer whose step is not the same for each element; found by trial steps."
        plain = type(opt) is Optimizer                           # others, such as Lookahead, have counters and weights of their own
        if (plain or isinstance(opt, OptimWrapper)) and _is_elementwise(opt): return
        name = type(opt.opt if isinstance(opt, OptimWrapper) else opt).__name__
        if plain: name = getattr(getattr(opt.cbs[-1], 'func', opt.cbs[-1]), '__name__', name).removesuffix('_step').title()
        raise ValueError(f"flat_master=True cannot be used with {name}, whose step depends on which parameter tensor an element is in. "
                         "Use `learn.to_half(flat_master=False)`, or an element-wise optimizer such as Adam or SGD.")

    @staticmethod
    def _store(opt): return opt.opt.state if isinstance(opt, OptimWrapper) else opt.state

    def _look(self, opt):
        store = self._store(opt)
        return [(id(p), p.grad is not None, p.data_ptr(), id(store.get(p)), p.requires_grad, *(opt.state.get(p, {}).get(k) for k in ('do_wd', 'force_train')))
                for pl in opt.param_lists for p in pl]

    def _build(self, opt, memories):
        store, sets = self._store(opt), {}
        for memory in memories.values(): memory.tensor = None
        for g, pl in enumerate(opt.param_lists):
            for p in pl:
                if p.grad is None: continue
                if p.grad.layout is not torch.strided:
                    raise ValueError(f"flat_master=True cannot be used with sparse gradients (a parameter of shape {tuple(p.shape)} has them). Use "
                                     "`learn.to_half(flat_master=False)`.")
                fixed, state = opt.state.get(p, {}), store.get(p, {})
                like = tuple((k, 'flat' if _like(v, p) else v.item() if isinstance(v, torch.Tensor) and v.numel() == 1 else v if not isinstance(v, torch.Tensor)
                              else _refuse(opt, k, v, p)) for k, v in sorted(state.items()))
                key = (g, p.device, p.dtype, fixed.get('do_wd'), fixed.get('force_train'), p.requires_grad, like)
                sets.setdefault(key, []).append(p)
        self.sets = [_FlatSet(key[0], ps, store, self.strides) for key, ps in sets.items()]

    def step(self, opt: Any, step: Callable, memories: dict[nn.Parameter, _GradMemory]) -> None:
        "`step()`, with the flat tensors in `opt`; from then on gradients arrive in a flat tensor, too, where `memories` can lend it."
        if self.pattern is None or self.pattern != self._look(opt): self._build(opt, memories)
        store = self._store(opt)
        self.lists, self.opt = opt.param_lists, opt
        try:
            for s in self.sets:
                s.gather(memories)
                store[s.flat] = s.state
            opt.param_lists = L(L(s.flat for s in self.sets if s.group == g) for g in range(len(self.lists)))
            step()
        finally:
            self.restore()
        for s in self.sets: s.share(store)
        self.pattern = self._look(opt)

    def restore(self) -> None:
        "Give the optimizer its own parameters back; may be interrupted and called again."
        if self.lists is None: return
        self.opt.param_lists = self.lists
        for s in self.sets:
            s.state = self._store(self.opt).pop(s.flat, s.state)
            s.flat.grad = None
        self.lists = None

    def close(self) -> None:
        "Each parameter and its state in memory of its own again."
        self.restore()
        for p, stride in self.strides.items():
            own = torch.empty_strided(p.shape, stride, dtype=p.dtype, device=p.device)
            own.copy_(p.data)
            if p.grad is not None: p.grad = p.grad.clone()
            p.data = own
        if self.opt is not None:
            store = self._store(self.opt)
            for s in self.sets:
                for p in s.params:
                    state = store.get(p, {})
                    for k, v in state.items():
                        if _like(v, p): state[k] = v.clone()
        self._forget()


class _FlatSet:
    "One flat master, the parameters that are views of it, and its state in the optimizer."
    def __init__(self, group: int, params: list[nn.Parameter], store: dict, strides: dict):
        self.group, self.params, self.sizes = group, params, [p.numel() for p in params]
        self.flat = nn.Parameter(torch.cat([p.data.reshape(-1) for p in params]))
        self.grad, self.views = torch.empty_like(self.flat.data), self.parts(self.flat.data)
        self.grads = self.parts(self.grad)
        states = [store.get(p, {}) for p in params]
        self.state = {k: torch.cat([s[k].reshape(-1) for s in states]) if _like(v, params[0]) else v.clone() if isinstance(v, torch.Tensor) else v
                      for k, v in states[0].items()}
        for p, view in zip(params, self.views):
            strides.setdefault(p, p.stride())
            p.data = view
        self.seen: dict[str, torch.Tensor] = {}

    def parts(self, flat): return [t.view(p.shape) for t, p in zip(flat.split(self.sizes), self.params)]

    def gather(self, memories: dict[nn.Parameter, _GradMemory]) -> None:
        "Bring those gradients that are elsewhere to the flat one."
        self.flat.grad = self.grad
        given = [(p, p.grad, part) for p, part in zip(self.params, self.grads) if p.grad is not None]
        if self.grad.device.type not in ('cpu', 'cuda'):         # where memory has no address to compare
            torch.cat([grad.reshape(-1) for _, grad, _ in given], out=self.grad)
            return
        apart = [x for x in given if x[1].data_ptr() != x[2].data_ptr()]
        if apart: torch._foreach_copy_([part for _, _, part in apart], [grad for _, grad, _ in apart])
        for p, _, part in apart:
            p.grad = part.data                                   # no view to autograd: the optimizer may detach it in place
            if p in memories: memories[p].tensor = part

    def share(self, store):
        "Hand each parameter its part of the state."
        states = [store.setdefault(p, {}) for p in self.params]
        for k, v in self.state.items():
            if not isinstance(v, torch.Tensor):
                for s in states: s[k] = v
            elif v.shape != self.flat.shape or v.dim() == 0:     # of its own for each parameter: an optimizer without us would count it up for each
                for s in states:
                    if k not in s: s[k] = v.clone()
                torch._foreach_copy_([s[k] for s in states], [v] * len(states))
            elif self.seen.get(k) is not v:
                for s, part in zip(states, self.parts(v)): s[k] = part
                self.seen[k] = v


def _like(v, p): return isinstance(v, torch.Tensor) and v.shape == p.shape and v.dim() > 0


def _refuse(opt, key, v, p):
    raise ValueError(f"flat_master=True cannot be used with {type(getattr(opt, 'opt', opt)).__name__}: its state '{key}' of shape {tuple(v.shape)} belongs "
                     f"to a whole parameter of shape {tuple(p.shape)}, not to its elements. Use `learn.to_half(flat_master=False)`.")


class _Moves:
    "Which share of the weights do the first steps leave where they were?"
    steps = 8
    def __init__(self): self.n, self.unmoved, self.total, self.before = 0, 0, 0, None
    def before_step(self, params): self.before = [(p, p.detach().clone(), p.grad.detach().to_dense() != 0) for p in params if p.grad is not None]
    def after_step(self, params) -> bool:
        before, self.before = self.before, None
        if before is None: return False
        for p, old, had in before:
            self.total += int(had.sum())
            self.unmoved += int((had & (p.detach() == old)).sum())
        self.n += 1
        return self.n == self.steps
    @property
    def share(self) -> float: return self.unmoved / max(self.total, 1)


def compensates(opt: Any) -> bool:
    "Does `opt` keep what rounding to half precision loses? optimi's do by Kahan summation, unless told not to."
    inner = getattr(opt, 'opt', opt)
    return type(inner).__module__.partition('.')[0] == 'optimi' and all(g.get('kahan_sum') is not False for g in inner.param_groups)


def kahan(
    opt: str = 'AdamW', # The name of one of optimi's optimizers
    **kwargs # Its arguments
) -> Callable: # To hand to `Learner(opt_func=...)`
    """An optimizer with Kahan summation for `to_half(master_weights=False)`, with the names that fastai's schedules need.

    Needs the package torch-optimi (`pip install fastxtend_amp[kahan]`). Source: https://optimi.benjaminwarner.dev/kahan_summation.
    """
    try: import optimi
    except ImportError as e: raise ImportError("kahan needs optimi: `pip install torch-optimi`.") from e
    cls = getattr(optimi, opt, None) if isinstance(opt, str) else opt
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        known = sorted(n for n, o in vars(optimi).items() if isinstance(o, type) and issubclass(o, torch.optim.Optimizer))
        raise ValueError(f"opt={opt!r} is not one of optimi's optimizers. Take one of {', '.join(known)}.")
    return partial(OptimWrapper, opt=partial(cls, **{'kahan_sum': True, **kwargs}), hp_map={**pytorch_hp_map, 'beta1': 'mom', 'beta2': 'sqr_mom'})


def bytes_per_parameter(
    learn: Learner, # A learner in the middle of a fit, with gradients
) -> dict[str, float]: # weights, gradients, masters, optimizer state, cast cache; bytes for each of the model's numbers
    """What training holds for each parameter, counted from the tensors there are, each memory once. Call it before or after a step.

    autocast's cache lives as long as a batch: for its size the model runs forward once more on the batch at hand, without effect.
    """
    cb = next((o for o in learn.cbs if isinstance(o, MixedPrecision)), None)
    half = cb if isinstance(cb, HalfPrecision) else None
    params, weights = [*learn.model.parameters()], half and half._weights
    copies = weights.halves if weights else []
    lent = [m.tensor for m in weights.memories.values() if m.tensor is not None] if weights else []
    inner = getattr(learn.opt, 'opt', learn.opt)
    state = [v for s in inner.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    n = sum(p.numel() for p in params)
    def size(tensors): return sum({(t.device, t.untyped_storage().data_ptr()): t.untyped_storage().nbytes() for t in tensors}.values()) / n
    copied = {id(p) for p in weights.masters} if weights and copies else set()
    return {'weights': size([*copies, *(p for p in params if id(p) not in copied)]),
            'gradients': size([*(p.grad for p in params if p.grad is not None), *lent]),
            'masters': size([p for p in params if id(p) in copied]), 'optimizer state': size(state), 'cast cache': _cast_cache(learn, cb) / n if cb else 0.}


class _Casts(TorchDispatchMode):
    "Remembers the copies in another dtype that are made of `params`."
    def __init__(self, params):
        super().__init__()
        self.params, self.made = {p.untyped_storage().data_ptr() for p in params}, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].untyped_storage().data_ptr() in self.params:
            self.made.append((StorageWeakRef(out.untyped_storage()), out.untyped_storage().nbytes()))
        return out


def _cast_cache(learn, cb) -> int:
    "Bytes of the weights' copies that are left when a forward pass is over and nothing but autocast's cache can hold them."
    model = unwrapped(learn.model)
    with effects_undone([model]), random_state_kept(model_device(model, 'cpu').type), cb.context(), _Casts(model.parameters()) as casts:
        model(*learn.xb)
        return sum(size for ref, size in casts.made if not ref.expired())


class _InModel:
    "The copies in the model, as a context; inside another one it does nothing."
    def __init__(self, cb): self.cb = cb
    def __enter__(self):
        self.weights = weights = self.cb._weights
        self.outer = weights.inside
        if weights.on: weights.enter()
    def __exit__(self, *exc):
        if not self.outer: self.weights.leave()


class _Watch(OverflowWatch):
    "Looks for the cause with the masters in the model."
    keep = "learn.to_half('{mode}', keep_fp32=['{name}'])"

    def _alarm(self, cb, what, same=True):
        weights = cb._weights
        inside = weights is not None and weights.inside
        if inside: weights.leave()
        try: super()._alarm(cb, what, same)
        finally:
            if inside: weights.enter()


class HalfPrecision(MixedPrecision):
    """Half-precision weights with fp32 masters: what fastai v1's `to_fp16` did, without what it lost.

    The model's parameters stay fp32: they are the masters that the optimizer steps on. During `fit`, validation in it
    included, the forward and backward pass run with half-precision copies of them, rewritten after each step, and
    floating inputs in the same dtype. Normalisation layers and `keep_fp32` stay in fp32; each module with weights casts
    what it is given to its weights' dtype, so activations may be fp32 in between. Predictions and the loss are fp32.
    Gradients are brought to fp32 as they arrive, once per batch, and accumulate there; DDP reduces them in fp32.
    Loss scaling, skipped steps, history and diagnosis are `MixedPrecision`'s.

    Source: Micikevicius et al., Mixed Precision Training, https://arxiv.org/abs/1710.03740, section 3.1.
    """
    def __init__(self,
        dtype: str | AMPMode | torch.dtype = AMPMode.BF16, # The weights' precision: 'bf16' or 'fp16'
        loss_scale: float | None = None, # A static loss scale; dynamic scaling if None (fp16)
        flat_master: bool = False, # Whether the optimizer steps on few flat tensors instead of one for each parameter
        master_weights: bool = True, # Whether there are fp32 masters; without, the optimizer steps on half-precision weights
        keep_fp32: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules, predicates, or a list of these
        *,
        on_overflow: str = 'warn', # When training goes wrong: 'warn', 'raise' (`FloatingPointError`) or 'ignore'
        patience: int = 16, # Skipped steps in a row after which training counts as going wrong (fp16)
    ):
        try: mode = AMPMode(dtype)
        except ValueError: raise ValueError(f"dtype={dtype!r} cannot be used: dtype must be 'bf16' or 'fp16' (or the torch dtypes). For plain "
                                            "fp32 use `learn.to_fp32()`.") from None
        if mode is AMPMode.BF16 and loss_scale is not None:
            raise ValueError(f"loss_scale={loss_scale!r} cannot be used with dtype='bf16', which needs no loss scaling. Leave it out, or take dtype='fp16'.")
        if not master_weights and flat_master:
            raise ValueError("flat_master=True cannot be used with master_weights=False: there is no master to make flat. Leave one of them out.")
        if not master_weights and mode is AMPMode.FP16:
            raise ValueError("master_weights=False cannot be used with dtype='fp16', whose gradients must be unscaled in fp32. Take dtype='bf16', or keep "
                             "the masters.")
        super().__init__(mode, loss_scale=loss_scale, on_overflow=on_overflow, patience=patience)
        self._islands, self._watch = Islands(keep_fp32, 'keep_fp32'), _Watch(on_overflow, patience)
        self.dtype, self.flat_master, self.master_weights = mode.dtype, flat_master, master_weights
        self._weights: HalfWeights | Any = None                  # during a fit
        self._given, self._flat, self._lowered, self._moves = None, FlatMasters(), False, None

    def context(self):
        "The half-precision copies in the model, inside and outside `fit`; see `Learner.amp_context`."
        return self._in_model()

    @contextmanager
    def _in_model(self) -> Iterator[None]:
        own = self._weights is None
        if own: self._renew(has_masters=True)
        weights = self._weights
        try:
            on, weights.on = weights.on, True
            try:
                with _InModel(self): yield
            finally: weights.on = on
        finally:
            if own:
                weights.close()
                self._weights = None

    # -- the events of fastai's loop

    def before_train(self):
        super().before_train()
        self._ready()
        self._weights.on = True
        if not self.master_weights: self._lower()
        self._changed()
    def before_validate(self): self._changed()

    def before_batch(self):
        "Put the half-precision weights into the model and bring floating inputs to their dtype."
        if self._fit is None: self._open()                       # added in the middle of a fit
        self._ready()
        if self.learn.training:
            self._weights.on = True
            if self._weights.stepped: self._weights.lend()
        if not self.master_weights and self._weights.on: self._lower()
        super().before_batch()
        if not self._weights.on: return                          # `validate` and `get_preds` outside `fit`
        dtype, xb = self.dtype, self.learn.xb
        self.learn.xb = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, xb)
        self._given = xb, self.learn.xb

    def after_pred(self):
        "Give the loss and the metrics fp32, and callbacks the inputs as they came."
        super().after_pred()
        self._inputs_back()

    def _after_forward(self):
        "The backward pass may run parts of the forward pass again (activation checkpointing)."
        if not self.learn.training: self._exit_autocast()

    def after_backward(self):
        "Put the masters back: the step is theirs."
        self._exit_autocast()

    def before_step(self):
        super().before_step()
        if self._moves is not None: self._moves.before_step(self._weights.masters)

    def after_step(self):
        super().after_step()
        self._changed()
        if self._weights is not None: self._weights.stepped = True
        if self._moves is not None and self._moves.after_step(self._weights.masters): self._warn_unmoved()

    def after_train(self):
        super().after_train()
        if self._moves is not None and self._moves.n: self._warn_unmoved()

    # -- how that is done

    def _lower(self):
        if self._lowered: return
        self._lowered, self._moves = True, None if compensates(self.learn.opt) else _Moves()
        if isinstance(self.learn.model, nn.parallel.DistributedDataParallel):
            raise ValueError("master_weights=False cannot be used with DistributedDataParallel, which would not reduce the gradients of weights that "
                             "change their dtype. Use `learn.to_half()`, with masters.")
        self._weights.lower()

    def _warn_unmoved(self):
        moves, self._moves = self._moves, None
        warnings.warn(f"master_weights=False with {type(getattr(self.learn.opt, 'opt', self.learn.opt)).__name__}, which does not compensate for rounding: "
                      f"small updates are lost. In the first {moves.n} steps {moves.share:.0%} of the weights with a gradient did not move. Use an "
                      "optimizer with Kahan summation (`fastxtend_amp.half.kahan`), or keep the masters.")

    def _changed(self):
        if self._weights is not None: self._weights.stale = True

    def _inputs_back(self):
        given, self._given = self._given, None
        if given is not None and self.learn.xb is given[1]: self.learn.xb = given[0]

    def _ready(self):
        if self._weights is None or not (self._weights.inside or self._weights.fits(self.learn.model)): self._renew()

    def _renew(self, has_masters=None):
        on = self._weights is not None and self._weights.on
        if self._weights is not None: self._weights.close()
        self._weights = HalfWeights(self.learn.model, self.dtype, self._islands.check(self.learn.model),
                                    self.master_weights if has_masters is None else has_masters)
        self._weights.on = on
        self._weights.hook()

    def _step(self, step):
        if self.flat_master: self._flat.step(self.learn.opt, step, self._weights.memories)
        else: step()

    def _check_layers(self, mode, device): pass                  # without autocast PyTorch runs LSTMs by other kernels

    def _check_training(self):
        super()._check_training()
        check_model(self.learn.model, self.learn.opt)
        if self.flat_master: FlatMasters.check(self.learn.opt)

    def _new_context(self): return _InModel(self)

    def _enter_batch(self):
        batch = super()._enter_batch()
        if batch is not None: batch.inside = self._weights is not None and self._weights.inside
        return batch

    def _leave_batch(self, batch, error):
        "Also after an interrupt in the middle of putting the weights in or out."
        if self._weights is not None and not batch.inside: self._weights.leave()
        self._inputs_back()
        super()._leave_batch(batch, error)

    def _close(self):
        if self._weights is not None: self._weights.close()
        self._weights = self._given = self._moves = None
        self._lowered = False
        self._flat.close()
        super()._close()


HalfPrecision.__signature__ = inspect.signature(HalfPrecision.__init__).replace(
    parameters=list(inspect.signature(HalfPrecision.__init__).parameters.values())[1:])
