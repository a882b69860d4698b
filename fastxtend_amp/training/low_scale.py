"The loss scale that skipped steps have driven below 1, and how it rises again."
import math
from collections.abc import Iterable
from typing import Any

from ..learners import is_dtensor
from ..messages import warn_user
from ..tensors import FP16_LARGEST, FP16_SMALLEST
from .history import StepHistory

_ROOM = FP16_LARGEST / 16  # leaves room for gradients to grow 16-fold


class LowScale:
    "Detects a loss scale that skipped steps have driven below 1, and raises it."
    has_warned = False

    def __init__(self,
        scaler: Any, # A `GradScaler`
        history: StepHistory,
        first_scale: float, # Of the precision
    ):
        self.scaler, self.history, self.first_scale = scaler, history, first_scale
        self.threshold = min(1., first_scale)                # a lower one is due to skips

    def raise_scale(self,
        largest: float | None, # The largest gradient, of a good step at a low scale; None after a skipped one
    ) -> None:
        """Raise a low scale; below 2**-24, where no step is good, start again.

        After a good step the scale becomes the largest power of two at which its gradients could grow 16-fold and
        still fit fp16, but no higher than the first scale, or than the highest one of a good step of this fit:
        clip(2**floor(log2(65504 / 16 / largest)), scale, most).
        """
        scale = new = self.scaler.get_scale()
        if scale < self.threshold:
            good = self.history.read().highest_good
            most = min(self.first_scale, good) if good >= self.threshold else self.first_scale
            if scale < FP16_SMALLEST or largest == 0: new = most
            elif largest:
                fits = 2. ** math.floor(math.log2(_ROOM / largest))
                new = max(scale, min(fits, most))
        self.history.known_scale = new
        if new == scale: return
        self.scaler._scale.fill_(new)                            # in place, as fused optimizers may hold it
        self.history.next_scale = self.history.next_scale.new_tensor(new)
        if not self.has_warned:
            warn_user(f'Skipped steps had lowered the loss scale to {scale:.2g}; it has been reset to {new:,.9g}.')
        self.has_warned = True


def largest_gradient(params: Iterable[Any]) -> float: # Parameters with gradients; 0 if they have no numbers
    "Return the largest absolute gradient, of all shards. It synchronizes."
    grads = (p.grad for p in params if p.grad.numel())
    whole = (g.full_tensor() if is_dtensor(g) else g.to_dense() for g in grads)
    return max((float(g.abs().max()) for g in whole), default=0.)
