"Training in bf16 without fp32 master weights: weights, gradients and optimizer state are bf16 during a fit."
from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from fastai.learner import Learner
from torch import nn

from ..learners import inner_optimizer, is_sharded, optimizer_name, optimizer_params, several_processes
from .matching import covers, qualified_names

_CAST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d,
         nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def check_bf16_weights(learn: Learner) -> None:
    "Raise a `ValueError` that names a model or an optimizer that needs fp32 master weights."
    if several_processes() or is_sharded(learn.model):
        raise ValueError('master_weights=False cannot be used with DistributedDataParallel or FSDP2, which reduce '
                         'gradients in the dtype that the weights had when the model was wrapped.\n'
                         'Use `learn.to_bf16()`, or with FSDP2 `MixedPrecisionPolicy(param_dtype=torch.bfloat16)`.')
    inner: Any = getattr(learn.opt, 'opt', None)                 # of optimi or torchao
    if getattr(inner, 'bf16_stochastic_round', False): return
    groups = getattr(inner, 'param_groups', [{}])
    if all(group.get('kahan_sum', False) is not False for group in groups): return
    raise ValueError(f"master_weights=False cannot be used with {optimizer_name(learn.opt)}, which does not compensate "
                     "for rounding: small updates of bf16 weights are lost.\nBuild the learner with "
                     "`opt_func=kahan('AdamW')` or with torchao's stochastic rounding, or leave out "
                     "`master_weights=False`.")


def _weights_to_lower(
    model: nn.Module, # As it is or wrapped
    in_fp32: Collection[str], # Names of the modules that are kept in fp32
) -> set[nn.Parameter]:
    "Return the fp32 weights and biases that autocast casts in linear layers and convolutions, without shared ones."
    places = list(qualified_names(model))
    uses = Counter(p for _, m in places for p in m.parameters(recurse=False))
    layers = (m for name, m in places if type(m) in _CAST and not covers(in_fp32, name))
    return {p for m in layers for name, p in m.named_parameters(recurse=False)
            if name in ('weight', 'bias')                        # not what a weight is computed from, as `weight_orig`
            and uses[p] == 1 and p.dtype is torch.float32}


class BF16Weights:
    """Context in which parameters, their gradients and the optimizer's state are bf16; afterwards they are fp32.

    The exact weight is the parameter plus what rounding took from it:

        before the first step   `lost` has it, so a fit without a step changes nothing; a file saved then lacks it
        from then on            the optimizer has it, as `kahan_comp`
        after the fit           the parameter has it, as far as fp32 holds it

    A copy of the learner made during a fit is in fp32.
    """
    def __init__(self,
        learn: Learner,
        in_fp32: Collection[str], # Names of the modules that are kept in fp32
    ):
        allowed = _weights_to_lower(learn.model, in_fp32)
        self.opt = inner_optimizer(learn.opt)
        self.lost: dict[nn.Parameter, torch.Tensor | None] = dict.fromkeys(
            p for p in optimizer_params(learn.opt) if p in allowed and p.requires_grad)

    def __setstate__(self, state: dict[str, Any]) -> None: # Of a copy
        vars(self).update(state)
        self.__exit__()

    def __enter__(self) -> None:
        for p in self.lost: self._convert(p, torch.bfloat16)

    def after_step(self, learn: Learner) -> None:
        "Add what is kept of a parameter to the compensation that its first step has created."
        self.opt = inner_optimizer(learn.opt)                    # a callback may have created another
        for p, lost in self.lost.items():
            if lost is not None and self.opt.state.get(p): self._convert(p, torch.bfloat16)

    def __exit__(self, *args: object) -> None:
        for p in self.lost: self._convert(p, torch.float32)
        self.opt, self.lost = None, {}                           # last: an interrupt before this converts them again

    def _convert(self, p: nn.Parameter, dtype: torch.dtype) -> None:
        """Convert a parameter, its gradient and its state, and keep what rounding takes.

            `__enter__`     fp32 to bf16    the value, rounded
            `after_step`    bf16 to bf16    the value and what was lost before, rounded
            `__exit__`      bf16 to fp32    the value and what was lost before, as far as fp32 holds them

        What the new value lacks goes to `kahan_comp` if the optimizer has one, before its first step to `lost`.
        """
        state = self.opt.state.get(p, {})
        for k, v in state.items():                               # step counts and quantized states stay
            is_values = type(v) is torch.Tensor and v.dim() and v.is_floating_point()
            if is_values: state[k] = v.to(dtype)
        value: Any = p.data.float()
        before: Any = 0.                                         # what rounding has taken so far
        for part in (state.get('kahan_comp'), self.lost[p]):     # the first is None after steps in fp32
            if part is not None: before = before + part.float()
        # `__enter__` leaves `before` out: bf16 weights of a file must not change, and half a unit would round some up.
        data = (value if p.dtype is torch.float32 else value + before).to(dtype)
        lost = (value - data) + before                           # exact: Dekker's fast two-sum
        # In one statement, as an interrupt between two would lose one of them.
        if 'kahan_comp' in state:
            p.data, state['kahan_comp'], self.lost[p] = data, lost.to(dtype), None
        else: p.data, self.lost[p] = data, None if state else lost
        if p.grad is not None: p.grad = p.grad.to(dtype)
