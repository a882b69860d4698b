"autocast's half-precision casts of the weights, kept from one batch of a step to the next."
from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from fastai.callback.training import GradientAccumulation
from fastai.learner import Learner
from torch import nn
from torch.autograd.function import BackwardCFunction

from ..compat import has_hooks, is_uninitialized, tensor_version

__all__ = ['KeptCasts']


class KeptCasts:
    """Tells whether autocast's casts of a model's weights can serve the next batch of a step, too.

    autocast casts a weight where a batch first uses it, and forgets all casts with the batch. Here they stay while
    gradients accumulate. At the start of a batch a weight's version counter and its address tell of what was written
    in place, and of other memory; nothing tells of what is written into its `.data`.
    """
    def __init__(self,
        wanted: bool, # Does the user want casts to be kept?
    ):
        self.wanted = wanted
        self.kept: Any = None                                    # what the weights look like whose casts are kept
        self.usable: bool | None = False
        self.graph_seen = False

    def start(self,
        usable: bool | None, # Are casts kept from here on? None: to be found out in the first batch
    ) -> None:
        "At the start and at the end of an epoch's training."
        self.forget()
        self.usable, self.graph_seen = usable, False

    def begin(self,
        learn: Learner, # At the start of a batch
        in_step: bool, # Is it a training batch, of a loop whose steps are known?
    ) -> None:
        "Forget the casts of weights that have changed."
        if self.usable is None: self.usable = self.wanted and _can_keep(learn)
        look = _look(learn.model) if self.usable and in_step else None
        if look is None or look != self.kept: self.forget()
        self.kept = look

    def check(self,
        loss: Any, # With its graph
    ) -> None:
        """Before the first back-propagation: are gradients the same with casts that are kept?

        Not those of weights that are not the model's, which are not looked at. Nor sums of three or more: the nodes of
        kept casts are older than the rest of a graph, so that their gradients are added last. Nor what cannot be seen,
        behind an `autograd.Function`.
        """
        if self.kept is None or self.graph_seen: return
        self.graph_seen = True
        leaves = _gradients_by_leaf(loss)
        weights = {p for p, *_ in self.kept}
        if leaves is None or max(leaves.values(), default=0) > 2 or not leaves.keys() <= weights: self.start(False)

    def forget(self) -> None:
        "Have each weight cast anew when it is next used."
        self.kept = None
        if self.wanted: torch.clear_autocast_cache()


def _can_keep(learn: Learner) -> bool:
    "Not under DDP, which would start to reduce after the last gradient only, nor with hooks, whose order would change."
    if isinstance(learn.model, nn.parallel.DistributedDataParallel) or any(map(has_hooks, learn.model.parameters())):
        return False
    return any(isinstance(cb, GradientAccumulation) for cb in learn.cbs)


def _look(model: nn.Module) -> list[tuple] | None: # None for weights that have no shape yet
    weights = [p for p in model.parameters() if p.requires_grad]
    if any(map(is_uninitialized, weights)): return None
    return [(id(p), tensor_version(p), p.data_ptr()) for p in weights]


def _gradients_by_leaf(loss: Any) -> Counter | None: # By id
    "How many gradients are added up for each leaf of the graph; None if an `autograd.Function` may hide some."
    edges: Counter = Counter()
    nodes = [loss.grad_fn] if getattr(loss, 'grad_fn', None) is not None else []
    for node in nodes:                                           # the list grows
        if isinstance(node, BackwardCFunction): return None
        for after, _ in node.next_functions:
            if after is None: continue
            if not edges[after]: nodes.append(after)
            edges[after] += 1
    return Counter({id(node.variable): n for node, n in edges.items() if hasattr(node, 'variable')})
