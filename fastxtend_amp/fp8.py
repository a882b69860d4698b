"FP8 (float8): linear layers that compute in it within bf16 autocast, by torchao; model and files stay plain."
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from .fp32_modules import ROOT, Fp32Forward, Fp32Modules, covers, match_modules, qualified_names
from .mode import AMPMode, mode_support

__all__ = ['Fp8Modules', 'fp8_layers']

_SIDES = 16  # the number by which FP8's kernels need both sides of a weight to be divisible


def fp8_layers(
    model: nn.Module, # The model, as it is or compiled or wrapped for data parallelism
    spec: Any, # The modules whose linear layers take part, as in `match_modules`; None for all
    in_fp32: Iterable[str], # Names of modules kept in fp32
) -> dict[str, nn.Linear]: # By name
    "Return the linear layers that can compute in FP8; raise a `ValueError` for none."
    asked = [ROOT] if spec is None else match_modules(model, spec, 'modules')
    found = {name: m for name, m in qualified_names(model) if covers(asked, name) and not covers(in_fp32, name)
             and type(m) is nn.Linear and 'weight' in m._parameters and not any(n % _SIDES for n in m.weight.shape)}
    if found: return found
    raise ValueError(f"fp8 cannot be used: modules={spec!r} leaves no linear layer whose weight has two sides "
                     f"divisible by {_SIDES}.\nName other modules, keep fewer in fp32, or use `learn.to_bf16()`.")


class Fp8Forward(Fp32Forward):
    "The forward of a linear layer in FP8: that of torchao's `Float8Linear`, with the layer's own parameters."
    def __init__(self, name: str, module: Any):
        super().__init__(name, module)
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        device = module.weight.device
        emulate = device.type != 'cpu' and mode_support(AMPMode.FP8, device).status != 'native'
        # An epoch's last batch may have any length; zeros that fill it up change no number.
        self.linear: Any = convert_to_float8_training(
            module, config=Float8LinearConfig(pad_inner_dim=True, emulate=emulate))
        self.linear._parameters = module._parameters             # a parameter may be exchanged

    def __call__(self, *args, **kwargs) -> Any:
        if self.on and self.own is None: return self.linear(*args, **kwargs)
        return self.plain(*args, **kwargs)


class Fp8Modules(Fp32Modules):
    "The linear layers that `spec` means, to compute in FP8, without those that are kept in fp32."
    forward = Fp8Forward

    def __init__(self, spec: Any, in_fp32: Fp32Modules):
        super().__init__(spec, 'modules')
        self.in_fp32 = in_fp32
        try: import torchao.float8                               # noqa: F401  torchao 0.18 fails with torch 2.9
        except ImportError as e:
            raise ImportError(f'fp8 needs torch 2.11 and torchao: `pip install torchao`. Importing torchao: {e}.\n'
                              'Without it call `learn.to_bf16()`.') from e

    def __getstate__(self) -> dict[str, Any]: return {**super().__getstate__(), 'in_fp32': self.in_fp32}

    def check(self, model: nn.Module) -> dict[str, nn.Module]: # The layers, by name
        "Return the layers; raise what `fp8_layers` does."
        return {**fp8_layers(model, self.spec, self.in_fp32.check(model))}
