"autocast's half-precision casts of the weights, kept from one batch of a step to the next."
from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from fastai.callback.training import GradientAccumulation
from fastai.learner import Learner
from torch import nn

from ..compat import has_hooks, is_uninitialized, tensor_version

__all__ = ['KeptCasts']

# Whose code is known to use no weights but the model's, and to write into none unseen between the batches of a step.
KNOWN = {'torch', 'torchvision', 'timm', 'fastai', 'fastcore', 'fastxtend_amp', *sys.stdlib_module_names}


class KeptCasts:
    """Tells whether autocast's casts of a model's weights can serve the next batch of a step, too.

    autocast casts a weight where a batch first uses it, and forgets all casts with the batch. Here they stay while
    gradients accumulate, if model, loss, callbacks and learner run only code that is known to leave weights alone until
    the step: PyTorch's, torchvision's, timm's and fastai's. A weight's version counter and its address still tell of
    what is written in place, and of other memory.
    """
    def __init__(self, usable: bool | None = False): # Are casts kept at all? None: to be found out in the first batch
        self.kept: Any = None                                    # what the weights look like whose casts are kept
        self.usable, self.graph_seen = usable, False

    def begin(self,
        learn: Learner, # At the start of a training batch
    ) -> None:
        "Forget the casts of weights that have changed."
        if self.usable is None:                                  # DDP would reduce nothing before the last gradient
            accumulates = any(isinstance(cb, GradientAccumulation) for cb in learn.cbs)
            in_parallel = isinstance(learn.model, nn.parallel.DistributedDataParallel)
            self.usable = accumulates and not in_parallel and _runs_known_code(learn)
        look = _look(learn.model) if self.usable else None
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
        if _most_gradients(loss) > 2:
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


def _most_gradients(loss: Any) -> int:
    "How many gradients are added up for a leaf of the graph, at most."
    edges: Counter = Counter()
    nodes = [loss.grad_fn] if getattr(loss, 'grad_fn', None) is not None else []
    for node in nodes:                                           # the list grows
        for after, _ in node.next_functions:
            if after is None: continue
            if not edges[after]: nodes.append(after)
            edges[after] += 1
    return max((n for node, n in edges.items() if hasattr(node, 'variable')), default=0)


def _runs_known_code(learn: Learner) -> bool:
    "Is all code known that runs in the batches of a step, but for the data's and the metrics'?"
    replaced = [v for name, v in vars(learn).items() if hasattr(Learner, name)]
    everywhere = [v for name, v in vars(nn.modules.module).items() if name.startswith('_global_')]   # hooks
    code = [learn, *_code_in([learn.model, learn.loss_func, *learn.cbs, replaced, everywhere])]
    kinds = {kind for c in code for kind in type(c).__mro__}
    code += [f for kind in kinds for f in vars(kind).values() if isinstance(f, FunctionType)]
    return all(map(_is_known, code)) and not any(map(has_hooks, learn.model.parameters()))


def _is_known(code: Any) -> bool:
    "By where a function was written, whatever `functools.wraps` says; by its class for another object."
    home = code.__globals__.get('__name__') if isinstance(code, FunctionType) else type(code).__module__
    return str(home).partition('.')[0] in KNOWN


def _code_in(roots: Iterable) -> Iterator:
    "What can be called of `roots` and of what is in their attributes, containers and closures."
    found, seen = [*roots], {}
    for o in found:                                              # the list grows
        if id(o) in seen or isinstance(o, (type, Learner)): continue
        seen[id(o)] = o                                          # kept alive, so that no other object gets its id
        if isinstance(o, (list, tuple, set)): found += o
        elif isinstance(o, Mapping): found += o.values()
        elif callable(o):
            yield o
            if isinstance(o, partial): found += o.func, o.args, o.keywords
            elif isinstance(o, MethodType):
                yield o.__self__
                found += o.__func__, getattr(o.__self__, '__dict__', None)
            elif isinstance(o, FunctionType): found += [c.cell_contents for c in o.__closure__ or () if c != CellType()]
            else: found.append(getattr(o, '__dict__', None))
