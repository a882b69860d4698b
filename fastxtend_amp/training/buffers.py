"The buffers of model and loss function that a skipped step must not spoil, such as BatchNorm's statistics."
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_LARGE = 2**18  # elements; a large buffer is a mask or a table


class Buffers:
    """The small floating buffers of model and loss function, and their values after the last step.

    A batch that overflows would leave NaN in BatchNorm's running statistics, although its step is skipped.
    """
    def __init__(self):
        self.owners: list[dict[str, Any]] = []                   # the buffers of each module that has some
        self.good: dict[Any, torch.Tensor] = {}                  # values by device, dtype and shape

    def follow(self, model: nn.Module, *loss_funcs: Any) -> None:
        "From now on these are the buffers of `model`, and of loss functions that are modules, with their values."
        inner = (getattr(f, 'func', f) for f in loss_funcs)      # inside fastai's `BaseLoss`
        parts = dict.fromkeys(part for part in (model, *inner) if isinstance(part, nn.Module))
        self.owners = [m._buffers for part in parts for m in part.modules() if m._buffers]
        self.update()

    def update(self, found_inf: bool | torch.Tensor = False) -> None:
        "Restore what a bad step made NaN or infinite, then remember all values. Never synchronizes."
        good, self.good = self.good, {}
        for key, buffers in self._alike().items():
            now = torch.stack(buffers)
            before = good.get(key, now)
            if found_inf is not False and before.shape == now.shape:
                keep = now.isfinite()
                if torch.is_tensor(found_inf): keep |= found_inf.to(now.device) == 0
                now = now.where(keep, before)
                torch._foreach_copy_(buffers, now.unbind())
            self.good[key] = now

    @contextmanager
    def repaired(self) -> Iterator[None]:
        "In this context, restore the values that a bad batch made NaN or infinite; a model may read them in training."
        good, saved = self.good, [(b, b.clone()) for buffers in self._alike().values() for b in buffers]
        self.update(True)
        try: yield
        finally:
            self.good = good
            for b, value in saved: b.copy_(value)

    def _alike(self) -> dict[Any, list[torch.Tensor]]:
        found = defaultdict(list)
        for buffers in self.owners:
            for b in buffers.values():
                if type(b) is not torch.Tensor or b.is_inference() or b.layout is not torch.strided: continue
                is_number = b.is_floating_point() and b.element_size() > 1   # 8-bit formats have few operators
                if not (is_number and b.is_contiguous() and b.numel() < _LARGE): continue
                found[b.device, b.dtype, b.shape].append(b.data)
        return found
