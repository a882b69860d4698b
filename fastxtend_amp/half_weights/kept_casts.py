"autocast's half-precision casts of the weights, kept from one batch of a step to the next."
from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastai.learner import Learner
from torch import nn

from ..compat import has_hooks, is_uninitialized, tensor_version

__all__ = ['KeptCasts']

# Whose code is known to use no weights but the model's, and to write into none unseen between the batches of a step.
LOOP = 'fastai.', 'fastxtend_amp.'
CALLBACKS = 'fastai.callback.', 'fastai.learner.', 'fastxtend_amp.'
MODULES = 'torch.nn.', 'fastai.', 'torchvision.', 'timm.', 'fastxtend_amp.'

_LOOP_METHODS = 'all_batches', 'one_batch', '_do_one_batch', '_backward', '_step'
_EVENTS = ('before_batch', 'after_pred', 'after_loss', 'before_backward', 'after_cancel_backward', 'after_backward',
           'before_step', 'after_cancel_batch', 'after_batch', '__call__')
_HOOKS = '_forward_pre_hooks', '_forward_hooks', '_backward_pre_hooks', '_backward_hooks'


class KeptCasts:
    """Tells whether autocast's casts of a model's weights can serve the next batch of a step, too.

    autocast casts a weight where a batch first uses it, and forgets all casts with the batch. Here they stay while
    gradients accumulate, if only code that is known to leave weights alone runs until the step: of fastai's loop and
    callbacks, and modules and losses of PyTorch, fastai, torchvision and timm. A weight's version counter and its
    address still tell of what is written in place, and of other memory.
    """
    def __init__(self, usable: bool | None = False): # Are casts kept at all? None: to be found out in the first batch
        self.kept: Any = None                                    # what the weights look like whose casts are kept
        self.usable, self.graph_seen = usable, False

    def begin(self,
        learn: Learner, # At the start of a training batch
    ) -> None:
        "Forget the casts of weights that have changed."
        if self.usable is None: self.usable = _runs_known_code(learn)
        cbs = list(learn.cbs)
        accumulates = self.usable and any(isinstance(cb, GradientAccumulation) for cb in cbs)
        look = _look(learn.model) if accumulates and all(map(_leaves_weights_alone, cbs)) else None
        if look != self.kept: self.forget()
        self.kept = look

    def check(self,
        loss: Any, # With its graph
    ) -> None:
        """Before the first back-propagation: is the sum of each weight's gradients the same with casts that are kept?

        Their nodes are older than the rest of a graph, so that their gradients are added last: of three or more, in
        another order.
        """
        if self.kept is None or self.graph_seen: return
        self.graph_seen = True
        leaves = _gradients_by_leaf(loss)
        weights = {p for p, *_ in self.kept}
        if max(leaves.values(), default=0) > 2 or not leaves.keys() <= weights:
            self.usable = False
            self.forget()

    def forget(self) -> None:
        "Have each weight cast anew when it is next used."
        self.kept = None
        torch.clear_autocast_cache()


def _look(model: nn.Module) -> list[tuple] | None: # None for weights that have no shape yet
    weights = [p for p in model.parameters() if p.requires_grad]
    if any(map(is_uninitialized, weights)): return None
    return [(id(p), tensor_version(p), p.data_ptr()) for p in weights]


def _gradients_by_leaf(loss: Any) -> Counter: # By id
    "How many gradients are added up for each leaf of the graph."
    edges: Counter = Counter()
    nodes = [loss.grad_fn] if getattr(loss, 'grad_fn', None) is not None else []
    for node in nodes:                                           # the list grows
        for after, _ in node.next_functions:
            if after is None: continue
            if not edges[after]: nodes.append(after)
            edges[after] += 1
    return Counter({id(node.variable): n for node, n in edges.items() if hasattr(node, 'variable')})


def _is_from(code: Any, places: tuple[str, ...]) -> bool:
    return f"{getattr(code, '__module__', None) or ''}.".startswith(places)


def _runs_known_code(learn: Learner) -> bool:
    "Do loop, model and loss consist of known code, and do no other hooks stand on modules or weights?"
    loss, modules = learn.loss_func, [*learn.model.modules()]
    hooks = [hook for m in modules for kind in _HOOKS for hook in getattr(m, kind).values()]
    forwards = [m.__dict__['forward'] for m in modules if 'forward' in m.__dict__]
    code = [*modules, *hooks, *forwards, getattr(loss, 'func', loss)]
    return (all(_is_from(method, LOOP) for method in [learn, *(getattr(learn, name) for name in _LOOP_METHODS)])
            and all(_is_from(c, MODULES) for c in code) and _is_from(loss, (*MODULES, 'functools.'))
            and not any(map(has_hooks, learn.model.parameters())))


def _leaves_weights_alone(cb: Callback) -> bool:
    events = [vars(place)[name] for place in (cb, *type(cb).__mro__) for name in _EVENTS if name in vars(place)]
    return all(_is_from(event, CALLBACKS) for event in events)       # on `cb` itself, too: `Callback(after_batch=f)`
