"Training without fp32 masters: the weights themselves, and the optimizer's state for them, in bf16."
from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from types import MethodType

import torch
from fastai.learner import Learner
from torch import nn

from ..convert import is_half
from ..fp32_modules import Fp32Forward, unwrapped
from .optimizers import compensates, fills_its_memory, memory_of, optimizer_name, state_of

__all__ = ['LoweredWeights']

WATCHED = 8                                                      # steps in which lost updates are counted

# How many sizes such a module is made with, and the dimensions of its input.
_SIZES: dict[type[nn.Module], tuple[int, int]] = {
    nn.Linear: (2, 2), nn.MultiheadAttention: (2, 3), nn.Conv1d: (3, 3), nn.Conv2d: (3, 4), nn.Conv3d: (3, 5),
    nn.ConvTranspose1d: (3, 3), nn.ConvTranspose2d: (3, 4), nn.ConvTranspose3d: (3, 5),
}
_OWN_FORWARD = {kind: kind.forward for kind in _SIZES}           # a library may have replaced one since then
_CAST = {'weight', 'bias', 'in_proj_weight', 'in_proj_bias', 'q_proj_weight', 'k_proj_weight', 'v_proj_weight'}


class LoweredWeights:
    """The weights that autocast would cast, in bf16 themselves while a model is trained.

    bf16 numbers are fp32 numbers, so raising them for a validation and lowering them again changes nothing.
    """
    def __init__(self,
        learn: Learner, # Whose model it is, and whose optimizer, which may be exchanged
        device_type: str, # Type of the device that autocast is on for
        dtype: torch.dtype, # autocast's dtype
    ):
        self.params, self.dtype, self.learn = weights_to_lower(learn.model, device_type, dtype), dtype, learn
        self.low = False
        self.to_watch = 0 if compensates(learn.opt) else WATCHED  # steps whose lost updates are still to be counted
        self.counts: list[torch.Tensor] = []  # on the device: weights that have a gradient, and did not move

    def lower(self) -> None:
        "Bring trained weights to bf16, and their state, which may have come from training in fp32 or from a file."
        if self.low: return
        self.low = True
        for p in self.params:
            if p.requires_grad: self._bring(p, self.dtype)

    def raise_(self) -> None:
        "Bring them back to fp32; may be interrupted and called again."
        for p in self.params: self._bring(p, torch.float32)
        self.low = False

    def _bring(self, p, dtype):
        if p.dtype is not dtype or (p.grad is not None and p.grad.dtype is not dtype):
            grad, p.grad = p.grad, None
            p.data = p.data.to(dtype)
            if grad is not None: p.grad = grad.to(dtype)
        state = state_of(self.learn.opt).get(p, {})
        if dtype is self.dtype and 'kahan_comp' in state and getattr(state['kahan_comp'], 'shape', None) != p.shape:
            state['kahan_comp'] = torch.zeros_like(p, requires_grad=False)   # optimi has none for what it met in fp32
        for k, v in state.items():                               # step counts and quantized states stay as they are
            if type(v) is not torch.Tensor or not (v.dim() or dtype is torch.float32): continue
            if is_half(v) or v.dtype is torch.float32: state[k] = v.to(dtype)

    def step(self,
        step: Callable, # Takes the step
    ) -> None:
        "`step()`; of the first ones, count the weights with a gradient that they leave where they are."
        self.low = False                                         # a validation, a callback may have raised some
        self.lower()
        params = [p for p in self.params if p.grad is not None] if self.to_watch else []
        before = [(p, p.detach().clone(), p.grad.ne(0)) for p in params]  # type: ignore[union-attr]
        step()
        for p, old, had in before: self.counts.append(torch.stack([had.sum(), (had & (p.detach() == old)).sum()]))
        if before: self.to_watch -= 1
        if before and not self.to_watch: self.warn()

    def warn(self) -> None:
        "After the first steps: tell which share of the weights they left where they were; waits for the device, once."
        n, counts, self.to_watch, self.counts = WATCHED - self.to_watch, self.counts, 0, []
        if not counts: return
        total, unmoved = torch.stack([c.to(counts[0].device) for c in counts]).sum(0).tolist()
        warnings.warn(f"master_weights=False with {optimizer_name(self.learn.opt)}, which does not compensate for "
                      f"rounding: small updates are lost. In the first {n} steps {unmoved / max(total, 1):.0%} of the "
                      "weights with a gradient did not move. Use an optimizer with Kahan summation "
                      "(`fastxtend_amp.kahan`) or stochastic rounding, or keep the masters.")


def weights_to_lower(
    model: nn.Module, # The model, as it is or wrapped
    device_type: str, # Type of the device that autocast is on for
    dtype: torch.dtype, # autocast's dtype
) -> list[nn.Parameter]:
    """The fp32 parameters of `model` that autocast would cast to `dtype`, inside their module's own forward.

    Modules of exact types, whose class's own forward is in use, without parametrizations and weight hooks. Recurrent
    layers are left out: PyTorch wants their weights in their inputs' dtype. So are `nn.Bilinear`, whose weights
    autocast does not cast, weights that several modules share, and modules inside one that is kept in fp32.
    """
    modules = [*unwrapped(model).modules()]
    owners = Counter(memory_of(t) for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False)))
    in_fp32 = {m for kept in modules if isinstance(kept.__dict__.get('forward'), Fp32Forward) for m in kept.modules()}
    found: list[nn.Parameter] = []
    for module in modules:
        if module in in_fp32 or type(module) not in _SIZES or not _own_forward(module): continue
        if not autocast_casts(type(module), device_type, dtype): continue   # type: ignore[arg-type]
        params = dict(module.named_parameters(recurse=False))
        if not params.keys() <= _CAST | {'bias_k', 'bias_v'}: continue   # a weight is computed from others
        if isinstance(module, nn.MultiheadAttention): params.update(module.out_proj.named_parameters(recurse=False))
        found += [p for name, p in params.items() if name in _CAST and name not in module.__dict__]
    found = [p for p in found if type(p) is nn.Parameter and p.dtype is torch.float32 and p.device.type == device_type]
    return [p for p in found if owners[memory_of(p)] == 1 and fills_its_memory(p)]


def _own_forward(module: nn.Module) -> bool:
    own, kind = module.__dict__.get('forward'), type(module)
    plain = own is None or own == MethodType(kind.forward, module)   # as a copied model has it
    return plain and kind.forward is _OWN_FORWARD[kind]


@lru_cache
def autocast_casts(
    kind: type[nn.Module], # One of those in the table
    device_type: str, # Type of the device
    dtype: torch.dtype, # autocast's dtype
) -> bool:
    "Whether autocast casts the weights of such a module there: then fp32 inputs give an output in `dtype`."
    sizes, dims = _SIZES[kind]
    try:
        module = nn.utils.skip_init(kind, *[1] * sizes, device=device_type)
        x = torch.zeros([1] * dims, device=device_type)
        with torch.no_grad(), torch.autocast(device_type, dtype=dtype):
            out = module(x, x, x)[0] if kind is nn.MultiheadAttention else module(x)
    except RuntimeError: return False                            # it will say so itself when the model gets there
    return out.dtype is dtype
