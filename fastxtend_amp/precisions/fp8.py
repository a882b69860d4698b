"FP8 (float8): bf16 autocast whose linear layers compute in 8 bits, by torchao; model and files stay plain."
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..compat import without_modes
from ..devices import facts
from ..messages import check_integer
from .bf16 import BF16
from .forwards import Forward, replaced_forwards
from .matching import ROOT, covers, match_modules, qualified_names, matchers_of
from .support import Support


def rounded_linear(
    layer: Any, # A linear layer
    input: torch.Tensor,
) -> torch.Tensor:
    """Return what a layer computes in FP8: with input, weight and the gradient of the output rounded.

    They are rounded as torchao's `Float8Linear` does by default (source: see `FP8`): to e4m3, the gradient to e5m2,
    scaled by the largest absolute value. Where autocast is off, FP8 is as well.
    """
    device_type = input.device.type
    if not torch.is_autocast_enabled(device_type): return F.linear(input, layer.weight, layer.bias)
    x = input.to(torch.get_autocast_dtype(device_type))
    out = F.linear(_rounded(x), _rounded(layer.weight))
    if out.requires_grad: out.register_hook(partial(_rounded, dtype=torch.float8_e5m2))
    return out if layer.bias is None else out + layer.bias.to(out.dtype)


def _rounded(t, dtype=torch.float8_e4m3fn):
    "Return `t` rounded. To autograd, and to a recording, it is a plain copy."
    copy = t.clone()
    with without_modes(), torch.no_grad():
        scale = torch.finfo(dtype).max / t.abs().max().float().clamp(min=1e-12)
        copy.copy_((t.float() * scale).to(dtype).float() / scale)
    return copy


class Fp8Forward(Forward):
    "The forward of a linear layer in FP8, under autocast: that of torchao's `Float8Linear` on the layer's parameters."
    def __init__(self, module: Any):
        super().__init__(module)
        self.linear = self.in_8_bits(module)

    def in_8_bits(self, module: Any) -> Callable:
        "Return the layer's forward in FP8."
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        device = module.weight.device
        emulate = device.type != 'cpu' and FP8.support(device).status != 'native'
        # An epoch's last batch may have any length; padding with zeros changes no number.
        linear: Any = convert_to_float8_training(
            module, config=Float8LinearConfig(pad_inner_dim=True, emulate=emulate))
        linear._parameters = module._parameters                  # a parameter may be exchanged
        return linear

    def run(self, *args, **kwargs) -> Any:
        weight: Any = self.module.weight
        # A forward that was set on the layer itself, by a user, is called as it is.
        in_fp8 = self.active and not self.before and torch.is_autocast_enabled(weight.device.type)
        return (self.linear if in_fp8 else self.plain)(*args, **kwargs)


class FP8(BF16):
    """Train with bf16 autocast and linear layers in FP8, by torchao.

    FP8 is native on NVIDIA GPUs of capability 8.9 or newer. A layer computes in FP8 if both sides of its weight are
    divisible by 16. Weights, optimizer and files are those of the plain model, and load without torchao. Expect a
    speed-up only with large layers and `torch.compile`: `learn.compare_precision(['bf16', 'fp8'])` measures it, and
    `min_size` leaves small layers in bf16.

    Raises `ImportError` without torchao 0.18, and `ValueError` for a model without such layers.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, https://arxiv.org/abs/2209.05433;
    https://github.com/pytorch/ao/tree/main/torchao/float8.
    """
    name, color, automatic, package = 'fp8', '#8f4a9e', False, 'torchao'
    sides, forward = 16, Fp8Forward
    module_arguments = 'fp32_modules', 'modules'

    def __init__(self, *,
        fp32_modules: Any = None, # Modules kept in fp32: names with wildcards ('head.*'), types, modules or predicates
        modules: Any = None, # Modules whose linear layers run in FP8, selected like `fp32_modules`; None: all
        min_size: int = 0, # Layers with an input or output dimension below this stay in bf16
        skip_nonfinite: bool = False, # Skip steps with non-finite gradients, as fp16 does
    ):
        super().__init__(fp32_modules=fp32_modules, skip_nonfinite=skip_nonfinite)
        check_integer(0, min_size=min_size)
        self.modules, self.min_size = modules, min_size
        matchers_of(modules, 'modules')                          # raises `TypeError`

    def check(self, model: nn.Module) -> None:
        try: import torchao.float8                               # noqa: F401  torchao 0.18 fails with torch 2.9
        except ImportError as e:
            raise ImportError(f'fp8 needs torch 2.11 and torchao: `pip install torchao`. Importing torchao: {e}.\n'
                              'Without it call `learn.to_bf16()`.') from e
        self.find_layers(model)

    @classmethod
    def support(cls, device: torch.device) -> Support:
        bf16 = BF16.support(device)
        if bf16.status == 'unsupported': return bf16
        nvidia = device.type == 'cuda' and not facts.amd_architecture(device)
        if nvidia and torch.cuda.get_device_capability(device) >= (8, 9): return Support('native', bf16.why)
        return Support('emulated', 'FP8 arithmetic needs an NVIDIA GPU of compute capability 8.9 or higher')

    def simulated_forwards(self, model: nn.Module) -> dict[str, Callable]:
        return dict.fromkeys(self.find_layers(model), rounded_linear)

    def find_layers(self, model: nn.Module) -> dict[str, nn.Module]:
        "Return the linear layers that compute in FP8, by name. Raises `ValueError` if there is none."
        asked = [ROOT] if self.modules is None else match_modules(model, self.modules, 'modules')
        in_fp32, found = self.kept_in_fp32(model), dict[str, nn.Module]()
        for name, m in qualified_names(model):
            if type(m) is not nn.Linear or 'weight' not in m._parameters: continue   # one that torch computes
            fits = all(side % self.sides == 0 and side >= self.min_size for side in m.weight.shape)
            if fits and covers(asked, name) and not covers(in_fp32, name): found[name] = m
        if found: return found
        at_least = f' and of at least {self.min_size}' if self.min_size else ''
        raise ValueError(f'{self.name} cannot be used: modules={self.modules!r} leaves no linear layer whose weight '
                         f'has both sides divisible by {self.sides}{at_least}.\n'
                         'Name other modules, keep fewer in fp32, or use `learn.to_bf16()`.')

    def around_fit(self, model: nn.Module) -> list[Any]:
        return [*super().around_fit(model), replaced_forwards(self.find_layers(model), self.forward)]
