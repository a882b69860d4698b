"Figures of tensors: how large, how far from what is expected, how many underflow; without float64, which MPS lacks."
from __future__ import annotations

import math
from typing import Any

import torch

from ..convert import map_tensors

__all__ = ['Histogram', 'all_finite', 'ends', 'largest_value', 'not_finite_data', 'relative_error', 'tensors']

_EXPONENTS = 256        # of fp32: 0 for zero and subnormal numbers, 255 for inf and NaN
_BIAS = 127
_MASK_FROM = -1e3       # smaller values may be an attention mask,
_MASK_GAP = 64          # if all others are smaller than they by this factor


def tensors(
    x: Any, # Nested at will
    floating: bool = True, # Only those of floating point
) -> list[torch.Tensor]:
    "Return the tensors in `x`."
    found: list[torch.Tensor] = []
    def note(t):
        if not floating or t.is_floating_point(): found.append(t)
        return t
    map_tensors(note, x)
    return found


def all_finite(t: torch.Tensor) -> bool:
    "Return whether no value is NaN or inf."
    return bool(t.isfinite().all())


def limits(t: torch.Tensor) -> tuple[float, float]:
    "Return the smallest and the largest value of a tensor that is not empty; both are NaN if one value is."
    low, high = torch.aminmax(t.detach())
    return float(low), float(high)


def ends(t: torch.Tensor) -> bool:
    "Return whether finite numbers end in `t`: a value is NaN or +inf. -inf alone may be a mask."
    return bool(t.numel()) and not limits(t)[1] < math.inf


def largest_value(t: torch.Tensor) -> float:
    """Return the largest absolute finite value; 0 if there is none.

    Negative values far from all others do not count: they are what attention masks are filled with.
    """
    if not t.numel(): return 0.
    low, high = limits(t)
    if not (math.isfinite(low) and math.isfinite(high)):
        t = t[t.isfinite()]
        if not t.numel(): return 0.
        low, high = limits(t)
    if low < _MASK_FROM and high * _MASK_GAP < -low:
        rest = t[t > low / 4]
        if rest.numel() and limits(rest)[0] * _MASK_GAP > low: low, high = limits(rest)
    return max(abs(low), abs(high))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float: # nan without a value other than 0
    "Return the norm of the difference over that of `expected`, of the values that are finite in both."
    both = got.isfinite() & expected.isfinite()
    got, expected = got[both].float(), expected[both].float()
    if not (unit := largest_value(expected)): return math.nan    # by which squares stay in fp32's range
    return float(((got - expected) / unit).norm() / (expected / unit).norm())


class Histogram:
    "The non-zero values of some tensors by power of two: how many would underflow in any format, at any loss scale."
    def __init__(self): self.counts, self.largest = torch.zeros(_EXPONENTS, dtype=torch.int64), 0.

    def add(self, t: torch.Tensor) -> None:
        "Count the finite values of `t`."
        t = t.detach().abs().float().flatten()                   # whose sign bit is 0
        t = t[t.isfinite() & (t != 0)]
        if not t.numel(): return
        self.counts += torch.bincount(t.view(torch.int32) >> 23, minlength=_EXPONENTS).cpu()
        self.largest = max(self.largest, limits(t)[1])

    def mass_below(self, threshold: float) -> float: # 0 to 1; 0 if there is no value
        "Return the share of the absolute sum that is in values smaller than `threshold`, a power of two; estimated."
        sums = [n * 1.5 * 2. ** (i - _BIAS) for i, n in enumerate(self.counts.tolist())]
        return sum(sums[:max(int(math.log2(threshold)) + _BIAS, 0)]) / (sum(sums) or 1.)


def not_finite_data(batch: Any) -> str: # Such as 'the batch itself is not finite: 1 of 24 values of ...'
    "Describe which tensor of a batch has NaN or inf; '' if none has. -inf may be a mask."
    t = next(filter(ends, tensors(batch)), None)
    if t is None: return ''
    n = int((t.isnan() | (t == math.inf)).sum())
    return (f'the batch itself is not finite: {n:,} of {t.numel():,} values of its tensor of shape '
            f'{tuple(t.shape)} are NaN or inf')
