"Statistics of tensors for the report: ranges, underflow, errors; they need neither float64 nor frexp, which MPS lacks."
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from ..convert import map_tensors

__all__ = ['Difference', 'Histogram', 'Seen', 'largest_value', 'tensors']

SAMPLE = 4096           # values of an output that are kept to compare with another pass, evenly spaced
_EXPONENTS = 256        # of fp32: 0 for zero and subnormal numbers, 255 for inf and NaN
_BIAS = 127
_MASK_FROM = -1e3       # smaller values may be an attention mask,
_MASK_GAP = 64          # if all others are smaller than they by this factor


def tensors(x: Any, floating: bool = True) -> list[torch.Tensor]:
    "The tensors in `x`, nested at will; with `floating` those of floating point alone."
    found: list[torch.Tensor] = []
    def note(t):
        if not floating or t.is_floating_point(): found.append(t)
        return t
    map_tensors(note, x)
    return found


def limits(t: torch.Tensor) -> tuple[float, float]:
    "The smallest and the largest value of a tensor that is not empty; both are NaN if one value is."
    t = t.detach()
    low, high = torch.aminmax(t.abs() if t.is_complex() else t)
    return float(low), float(high)


def all_finite(t: torch.Tensor) -> bool:
    "Whether every value is finite, in one pass over the memory."
    return not t.numel() or all(map(math.isfinite, limits(t)))


def holds_nan_or_inf(t: torch.Tensor) -> bool:
    "Whether a value is NaN or +inf; -inf alone may be a mask."
    return bool(t.numel()) and not limits(t)[1] < math.inf


def largest_value(t: torch.Tensor) -> float:
    """The largest absolute finite value; 0 if there is none.

    Negative values far from all others do not count: they are what attention masks are filled with.
    """
    t = t.detach()
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


class Histogram:
    "The non-zero values of some tensors by power of two: how many would underflow in any format, at any loss scale."
    def __init__(self): self.counts, self.largest, self.finite = torch.zeros(_EXPONENTS, dtype=torch.int64), 0., True

    def add(self, t: torch.Tensor) -> None:
        "Count the values of `t`; those that are not finite only set `finite` to False."
        t = t.detach()
        t = (t.abs() if t.is_complex() else t).float().flatten()
        if not t.numel(): return
        exponents = (t.contiguous().view(torch.int32) >> 23) & (_EXPONENTS - 1)
        counts = torch.bincount(exponents, minlength=_EXPONENTS).cpu()
        not_finite, normal = int(counts[-1]), int(counts[1:-1].sum())
        counts[0] = int(t.count_nonzero()) - normal - not_finite   # without zeros
        counts[-1] = 0
        self.counts += counts
        self.finite &= not not_finite
        if not_finite: t = t[t.isfinite()]
        if t.numel(): self.largest = max(self.largest, *map(abs, limits(t)))

    def share_below(self, threshold: float) -> float: # 0 to 1; nan if there is no value
        "The share of the non-zero values that are smaller than `threshold`, a power of two."
        n = int(self.counts.sum())
        return float(self.counts[:self._bin(threshold)].sum()) / n if n else math.nan

    def mass_below(self, threshold: float) -> float:
        "The share of the absolute sum that is in values smaller than `threshold`, a power of two; estimated."
        sums = [n * 1.5 * 2. ** (i - _BIAS) for i, n in enumerate(self.counts.tolist())]
        total = sum(sums)
        return sum(sums[:self._bin(threshold)]) / total if total else 0.

    def _bin(self, threshold): return min(max(math.floor(math.log2(threshold)) + _BIAS, 0), _EXPONENTS)


@dataclass
class Difference:
    "The norm of the difference between some tensors and the expected ones, relative to the norm of the latter."
    error: float = 0.                                            # sum of squares
    size: float = 0.

    def add(self, got: torch.Tensor, expected: torch.Tensor) -> None:
        "Count finite tensors of one shape."
        expected = expected.float()
        self.error += _sum_of_squares(got.float() - expected)
        self.size += _sum_of_squares(expected)

    @property
    def known(self) -> bool:
        "Whether there was anything to compare but zeros."
        return self.error > 0 or self.size > 0

    @property
    def relative(self) -> float:
        "0 for equal tensors; inf where zeros were expected and others came."
        if self.size > 0: return math.sqrt(self.error / self.size)
        return math.inf if self.error > 0 else 0.


def _sum_of_squares(t: torch.Tensor) -> float:
    norm = float(torch.linalg.vector_norm(t))
    if 1e-15 < norm < 1e18: return norm ** 2
    largest = float(t.abs().max()) if t.numel() else 0.          # zeros, or squares outside fp32's range
    return 0. if largest == 0. else float(torch.linalg.vector_norm(t / largest)) ** 2 * largest ** 2


@dataclass
class Seen:
    "What one module did, all its calls and all batches of a pass together."
    name: str
    type: str
    params: int                                                  # its own and its children's
    calls: int = 0
    inputs: set = field(default_factory=set)                     # dtypes
    outputs: set = field(default_factory=set)
    weights: set = field(default_factory=set)                    # of its own parameters
    largest: float = 0.                                          # absolute finite output
    inside: float = 0.                                           # and result of any operator of its own
    operators: dict = field(default_factory=dict)                # largest result of each operator, by name and number
    in_half: float = 0.                                          # largest of those in half precision, as in fp32
    values: int = 0                                              # floating-point values in its outputs
    non_finite: int = 0                                          # of these, where fp32 on the same inputs is finite
    subnormal: int = 0
    flushed: int = 0                                             # 0 where fp32 is a number too small for the format
    compared: bool = False                                       # with fp32 on the same inputs
    own_error: Difference = field(default_factory=Difference)    # from fp32 on the same inputs
    total_error: Difference = field(default_factory=Difference)  # from the fp32 pass, on the sample
    grads: Histogram = field(default_factory=Histogram)          # of its outputs and its own parameters
    samples: list = field(default_factory=list)                  # of the outputs of each call, in each batch

    @property
    def highest(self) -> float: return max(self.largest, self.inside)
    @property
    def own(self) -> float: return self.own_error.relative
    @property
    def total(self) -> float: return self.total_error.relative

    def compare(self, values: torch.Tensor, finite: bool, expected: torch.Tensor) -> None:
        "Count one output against what it is in fp32 on the same inputs; `finite` says whether all its values are."
        self.compared = True
        if not finite or not all_finite(expected):
            usable, is_finite = expected.isfinite(), values.isfinite()
            self.non_finite += int((~is_finite & usable).sum())
            values, expected = values[is_finite & usable], expected[is_finite & usable]
        if values.dtype is torch.float16:                        # bf16 has fp32's exponents
            tiny, size = torch.finfo(values.dtype).tiny, values.float().abs()
            small = size < tiny
            self.subnormal += int((small & (size != 0)).sum())
            self.flushed += int(((size == 0) & (expected != 0) & (expected.abs() < tiny)).sum())
        if values.numel(): self.own_error.add(values, expected)

    def take_comparison(self, other: Seen) -> None:
        "Take what `compare` counted in another pass."
        for name in ('compared', 'own_error', 'non_finite', 'subnormal', 'flushed'):
            setattr(self, name, getattr(other, name))

    def sample(self, values: torch.Tensor, reference: Seen | None) -> None:
        "Keep some of an output, and compare it with the same call's in the pass `reference`."
        flat = values.reshape(-1)
        n = min(len(flat), SAMPLE)
        at = torch.arange(n, device=flat.device) * len(flat) // n
        sample, k = flat[at].float(), len(self.samples)
        if reference is None:
            self.samples.append(sample)
            return
        self.samples.append(None)
        if k >= len(reference.samples) or reference.samples[k].shape != sample.shape: return
        both = sample.isfinite() & reference.samples[k].isfinite()
        self.total_error.add(sample[both], reference.samples[k][both])


