"Which parameters have a half-precision copy, when is it in the model, and where do its gradients go?"
from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from ..convert import map_tensors
from ..fp32_modules import unwrapped

__all__ = ['NORMS', 'GradMemory', 'WeightCopies']

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class GradMemory:
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
        free = not self.lent and p.grad is None and (self.wanted or self.tensor is not None)
        dense = type(grad) is torch.Tensor and grad.layout is torch.strided
        if not free or not dense or torch.is_grad_enabled(): return grad.to(p.dtype)   # enabled: a gradient to be differentiated again
        if self.tensor is None: self.tensor = torch.empty_like(p, requires_grad=False)
        self.lent = True
        return self.tensor.copy_(grad).data                      # a tensor of its own, so that autograd need not copy it


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


class WeightCopies:
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
        self.memories = {p: GradMemory(p) for p in self.masters if has_masters}
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
