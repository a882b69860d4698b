"""Kinds of modules, for `fp32_modules`: convolutions by their groups, as low precision makes some kernels slower.

On CPUs with native bf16, depthwise convolutions are slower in bf16 than in fp32: `learn.to_bf16(fp32_modules=
is_depthwise)`. `learn.to_amp(measure=True)` finds out which kinds these are on a device.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd


class Kind:
    "A predicate on convolutions, for `fp32_modules`: it prints as its name, and can be pickled."
    def __init__(self,
        name: str, # Of the global variable in this file
        test: Callable[[Any], bool], # Called with a convolution
        doc: str,
    ):
        self.__name__, self.test, self.__doc__ = name, test, doc
    def __call__(self, module: nn.Module) -> bool: return isinstance(module, _ConvNd) and self.test(module)
    def __repr__(self) -> str: return self.__name__
    def __reduce__(self) -> str: return self.__name__                # pickled by name, and copied as itself


is_depthwise = Kind('is_depthwise', lambda m: m.groups == m.in_channels > 1,
                    "Whether a module is a depthwise convolution: one group for each input channel.")
is_grouped = Kind('is_grouped', lambda m: 1 < m.groups < m.in_channels,
                  "Whether a module is a convolution with groups of several channels, as in ResNeXt.")
is_ungrouped = Kind('is_ungrouped', lambda m: m.groups == 1, "Whether a module is a convolution without groups.")

KINDS = is_depthwise, is_grouped, is_ungrouped


def kind_of(module: nn.Module) -> Kind | type[nn.Module]: # For `fp32_modules`
    "Return the kind of a module: its class, and for convolutions their groups."
    return next((kind for kind in KINDS if kind(module)), type(module))
