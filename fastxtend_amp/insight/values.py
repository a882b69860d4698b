"Tensors and their values: which can be read, sizes, errors, NaN and inf."
import math

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..compat import tree_leaves

_MASK_FROM = 1e3        # absolute value from which negative values may be an attention mask
_MASK_GAP = 64          # least factor between a mask and all other values


# -- tensors

def tensors_in(
    x: object, # Nested to any depth
) -> list[torch.Tensor]:
    "Return the tensors in `x`."
    return [t for t in tree_leaves(x) if isinstance(t, torch.Tensor)]


def n_items(
    batch: object,
) -> int: # 1 without a tensor that has a length
    """Return the number of items of a batch: the length of its first tensor.

    A target that is a tensor comes first, as inputs may begin with time.
    """
    targets = batch[-1:] if isinstance(batch, (tuple, list)) and torch.is_tensor(batch[-1]) else ()
    return next((len(t) for t in tensors_in((targets, batch)) if t.ndim), 1)


def readable(x: object) -> list[torch.Tensor]:
    "Return the tensors of floating point in `x` that can be read."
    return [t for t in tensors_in(x) if t.is_floating_point() and is_plain(t)]


def is_plain(t: torch.Tensor) -> bool:
    "Return whether `t` can be read. Sparse, nested, meta and 8-bit tensors, and subclasses, may lack operators."
    is_dense = t.layout is torch.strided and not (t.is_nested or t.is_meta) and t.element_size() > 1
    return is_dense and type(t).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def readable_weights(model: nn.Module) -> dict[str, torch.Tensor]: # By name
    "Return the weights that can be read: of a sharded one the part of this process; not those of lazy modules."
    local = {name: p.to_local() if hasattr(p, 'to_local') else p
             for name, p in model.named_parameters() if not is_lazy(p)}
    return {name: p for name, p in local.items() if is_plain(p)}


# -- NaN and inf

def all_finite(t: torch.Tensor) -> bool:
    "Return whether no value is NaN or inf."
    if t.is_complex(): t = t.abs()
    if not t.numel() or not t.is_floating_point(): return True
    ends = torch.stack(torch.aminmax(t))                         # faster than to look at each value
    return bool(ends.isfinite().all())


def n_nan_or_inf(t: torch.Tensor) -> int:
    "Return how many values are NaN or +inf; -inf may be a mask."
    return 0 if all_finite(t) else int((t.isnan() | t.isposinf()).sum())


# -- sizes and errors, in fp32, as MPS has no float64

def largest_value(t: torch.Tensor) -> float:
    """Return the largest absolute finite value; 0 if there is none.

    Attention masks are ignored: negative values far from all others, and tensors of one or two distinct values.
    """
    if not all_finite(t): t = t[t.isfinite()]
    if not t.numel(): return 0.
    low, high = map(float, torch.aminmax(t))
    largest = max(-low, high)
    if largest < _MASK_FROM: return largest
    if t.numel() > 2 >= len(t.unique()): return 0.
    rest = t[t > low / 4]
    others = float(rest.abs().max()) if rest.numel() else math.inf
    return others if others * _MASK_GAP < -low else largest


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float: # nan without a value other than 0
    "Return the norm of the difference over that of `expected`, of the values that are finite in both."
    both = got.isfinite() & expected.isfinite()
    got, expected = got[both].float(), expected[both].float()
    # Divided by their largest value, the squares of both stay in the range of fp32.
    if not (unit := largest_value(expected)): return math.nan
    return float(((got - expected) / unit).norm() / (expected / unit).norm())
