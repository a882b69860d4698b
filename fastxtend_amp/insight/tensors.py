"The tensors in nested predictions and inputs, and which of them can be read."
import math

import torch
from fastai.learner import Learner
from torch import nn
from torch.nn.parameter import is_lazy

from ..compat import tree_leaves


def tensors(
    x: object, # Nested to any depth
) -> list[torch.Tensor]:
    "Return the tensors in `x`."
    return [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]


def n_items(
    batch: object,
) -> int: # 1 without a tensor that has a length
    "Return the number of items of a batch: the length of its first tensor."
    return next((len(t) for t in tensors(batch) if t.ndim), 1)


def readable(x: object) -> list[torch.Tensor]:
    "Return the tensors of floating point in `x` that can be read."
    return [t for t in tensors(x) if t.is_floating_point() and is_plain(t)]


def has_finite_results(learn: Learner) -> bool:
    "Return whether predictions and loss of the batch that `learn` ran last are finite; -inf may be a mask."
    loss = vars(learn).get('loss') if len(learn.yb) else None
    return all((t < math.inf).all() for t in readable((learn.pred, loss)))


def is_plain(t: torch.Tensor) -> bool:
    "Return whether `t` can be read: subclasses with their own operators, and 8-bit formats, may not support it."
    return t.element_size() > 1 and type(t).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def address(t: torch.Tensor) -> int: # 0 if it has none
    "Return the address of the memory that `t` shares with its views."
    return t.untyped_storage().data_ptr() if t.layout is torch.strided and t.device.type != 'xla' else 0


def readable_weights(model: nn.Module) -> dict[str, torch.Tensor]: # By name
    "Return the weights that can be read: of sharded ones the part of this process, and none that is not made yet."
    made = ((name, p) for name, p in model.named_parameters() if not is_lazy(p))
    local = {name: p.to_local() if hasattr(p, 'to_local') else p for name, p in made}
    return {name: p for name, p in local.items() if is_plain(p)}
