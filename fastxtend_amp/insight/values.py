"The values of a tensor: their size, errors, NaN and inf; without float64, which MPS lacks."
import math

import torch

from ..tensors import HALF

_MASK_FROM = 1e3        # larger values may be an attention mask,
_MASK_GAP = 64          # if they are negative and all others are smaller by this factor


def rounded(number: float, dtype: torch.dtype) -> float:
    "Return `number` in a dtype."
    return float(torch.tensor(float(number)).to(dtype))


def merged(t: torch.Tensor, dtype: torch.dtype) -> list[float]:
    "Return two different whole numbers in `t` that become equal in `dtype`; tensors of images are left out."
    if dtype not in HALF or t.dtype in HALF or sum(n > 1 for n in t.shape) > 2: return []
    t = t.float()
    is_whole = (t == t.round()) & (t.abs() < 2**24)              # larger ones may be one in fp32 already
    if not is_whole.all(): return []
    t = t.unique()
    first = (t.to(dtype).diff() == 0).nonzero()[:1]
    return torch.cat([t[first], t[first + 1]]).flatten().tolist()


def all_finite(t: torch.Tensor) -> bool:
    "Return whether no value is NaN or inf."
    return bool(t.isfinite().all())


def n_nan_or_inf(t: torch.Tensor) -> int:
    "Return how many values are NaN or +inf; -inf may be a mask."
    return int((t.isnan() | t.isposinf()).sum())


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
    others = float(t[t > low / 4].abs().max()) if high > low / 4 else math.inf
    return others if others * _MASK_GAP < -low else largest


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float: # nan without a value other than 0
    "Return the norm of the difference over that of `expected`, of the values that are finite in both."
    both = got.isfinite() & expected.isfinite()
    got, expected = got[both].float(), expected[both].float()
    if not (unit := largest_value(expected)): return math.nan    # so that squares stay in the range of fp32
    return float(((got - expected) / unit).norm() / (expected / unit).norm())
