"autocast's half-precision casts of the weights, kept from one batch to the next."
from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from ..compat import tensor_version

__all__ = ['KeptCasts']


class KeptCasts:
    """Tells whether autocast's casts of a model's weights can serve the next batch, too.

    autocast casts a weight where a batch first uses it, and forgets all casts with the batch. They can stay as long as
    no weight changes: its version counter tells of what is written in place, its address of other memory. What the
    model's own code writes into `.data` neither tells; so the first batch of an epoch's training and of a
    validation is checked by casting the weights before and after it. That batch's graph is looked at, too: a cast that
    is kept is older than the rest of the next graph, so its gradient is added last; where a weight gets three
    gradients or more, their sum could differ in its last bit.
    """
    def __init__(self):
        self.kept: Any = None                                    # what the weights were like whose casts are kept
        self.begun: Any = None                                   # what they were like when this batch began
        self.before: list[tuple[nn.Parameter, torch.Tensor]] = []    # weights and their casts, in the first batch
        self.on, self.checked, self.unfit = False, False, False  # unfit: does the model need new casts in each batch?

    def start(self) -> None:
        "The training of an epoch or a validation begins."
        self.stop()
        self.on, self.checked = True, False

    def stop(self) -> None:
        "It ends: keep nothing."
        self.on = False
        self.forget()

    def begin(self,
        model: nn.Module, # The learner's model
        dtype: torch.dtype, # autocast's
    ) -> None:
        "At the start of a batch: forget casts of weights that have changed."
        weights = [p for p in model.parameters() if p.requires_grad]
        self.begun = [(id(p), tensor_version(p), p.data_ptr()) for p in weights]
        if self.begun != self.kept: self.forget()
        if not self.checked: self.before = [(p, p.detach().to(dtype)) for p in weights]
        self.checked = True

    def can_stay(self,
        loss: Any, # The loss to be back-propagated
    ) -> bool:
        "After the loss: may the casts that this batch has made serve the next one, unless a weight changes until then?"
        before, self.before = self.before, []
        if before:
            written = any(not torch.equal(cast, p.detach().to(cast.dtype)) for p, cast in before)
            self.unfit |= written or _most_gradients(loss) > 2
        self.kept, self.begun = None if self.unfit else self.begun, None
        return self.kept is not None

    def forget(self) -> None:
        "Have each weight cast anew when it is next used."
        if self.kept is None: return
        self.kept = None
        torch.clear_autocast_cache()


def _most_gradients(loss: Any) -> int:
    "How many gradients are added up for that weight which gets the most of them."
    edges: Counter = Counter()
    nodes = [loss.grad_fn] if getattr(loss, 'grad_fn', None) is not None else []
    for node in nodes:                                           # the list grows
        for after, _ in node.next_functions:
            if after is None: continue
            if not edges[after]: nodes.append(after)
            edges[after] += 1
    return max((n for node, n in edges.items() if hasattr(node, 'variable')), default=0)
