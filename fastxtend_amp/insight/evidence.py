"""The evidence in recorded batches, as sentences, numbers and tables.

What is wrong in fp32, which modules 16 bits harm and why, and the loss scales that work.
"""
import math
from collections.abc import Mapping

import pandas as pd
import torch
from torch import nn

from ..precisions.matching import covers, qualified_names
from .display import some
from .recording import Recording
from .records import LOSS, named
from .report_result import Verdict
from .values import as_dtype, n_nan_or_inf, readable, relative_error

CLOSE = 4.              # headroom below which a module is flagged
MARGIN = 16.            # between a recommended loss scale and the highest, as later gradients may be larger
_IMPRECISE = .1         # relative error from which a module is flagged
_NEGLIGIBLE = .1        # of the mean absolute gradient: smaller gradients may underflow
NO_AUTOCAST = '`with torch.autocast(x.device.type, enabled=False)`'


# -- in fp32

def wrong_in_reference(reference: Recording, batches: object) -> str:
    """Describe what is wrong with the run in fp32; '' if nothing is.

    NaN in the data is reported only if the loss or a gradient is not finite, as losses may ignore targets that are NaN.
    """
    if not reference.losses: return 'no batch gave a loss: use batches with targets, or a model that returns the loss'
    modules, own = reference.modules.items(), not_fp32(reference)
    if not reference.not_finite:
        in_16 = sum(bool(m.half_line) for _, m in modules)
        in_fp32 = sum(m.has_fp32_product and not m.half_line for _, m in modules)
        return '' if in_16 <= in_fp32 else f'{own}, so there is no fp32 run to compare with'
    if bad := not_finite_data(batches): return bad
    first = next((f', first in {named(n)}' for n, m in modules if m.failed), '')
    if own: return f'the {reference.not_finite} is not finite{first}, but the reference is not fp32: {own}'
    return f'the {reference.not_finite} is not finite in fp32 either{first}, so precision is not the cause'


def not_fp32(reference: Recording) -> str:
    "Describe what multiplies in 16 bits in the fp32 run, or computes in 16 bits if that fails; '' for nothing."
    own = [named(n) + (f' ({m.half_line})' if m.half_line else '') for n, m in reference.modules.items()
           if m.half_line or (m.is_half and reference.not_finite)]
    verb = 'computes' if len(own) == 1 else 'compute'
    return f'{some(own)} {verb} in 16 bits, by an autocast or a cast in the code' if own else ''


def not_finite_data(batch: object) -> str: # 'the batch itself is not finite: 1 of 24 values of ...'
    "Describe which tensor of a batch has NaN or inf; '' if none has. -inf may be a mask."
    t = next(filter(n_nan_or_inf, readable(batch)), None)
    if t is None: return ''
    return (f'the batch itself is not finite: {n_nan_or_inf(t):,} of {t.numel():,} values of its tensor of shape '
            f'{tuple(t.shape)} are NaN or inf')


# -- in 16 bits

def harm( # By module, in execution order; for an error all modules of the type that raised it
    low: Recording,
    keep: list[str], # Modules in fp32, which cannot be kept there again for being close to overflow
    model: nn.Module,
) -> dict[str, str]:
    "Return which modules 16 bits harm in the forward pass, and how."
    if low.error: return _failing(low, model)
    harmed = {}
    for n, m in low.modules.items():
        if not (why := _harm_to(m, low.kind, covers(keep, n))): continue
        if m.undone_line:
            why += (f'. Autocast runs the product in {m.undone_line} in {low.kind.name}, although its inputs are '
                    f'`.float()`: {NO_AUTOCAST} before it keeps it in fp32')
        harmed[n] = why
    return harmed


def _harm_to(m, kind, is_kept):
    "Describe what 16 bits do to a module; '' for nothing."
    name, where, limit = kind.name, named(m.name), torch.finfo(kind.dtype).max
    size = m.largest if m.failed else m.largest_half
    lost = next((constant for constant, is_needed in m.constants.items() if is_needed), None)
    if m.failed and size <= limit: return f'a value in {where} is NaN or inf in {name}, but finite in fp32'
    if m.failed or (size * CLOSE > limit and not is_kept):
        above = 'above' if size > limit else 'close to'
        return f"values in {where} reach {size:,.3g}, {above} {name}'s {limit:,.5g}"
    if lost:
        away = as_dtype(lost[-1], kind.dtype)
        return f'{_rounding_of(kind, *lost)}, so it does not keep values in {where} away from {away:g}'
    if m.merged:
        return f'{m.merged[0]:.9g} and {m.merged[1]:.9g} become the same number in {where} in {name}'
    return f'the error of {where} is {min(m.error, 1):.0%} in {name}' if m.error > _IMPRECISE else ''


def _rounding_of(kind, line, operator, constant):
    where = f' (`{operator}`, {line})' if line else ''
    return f'{constant:.9g} is {as_dtype(constant, kind.dtype):g} in {kind.name}{where}'


def _failing(low, model):
    if not (name := low.failed_in): return {}
    why = f'{named(name)} does not run in {low.kind.name}: {low.error}'
    constants = low.modules[name].constants if name in low.modules else ()
    why = '; '.join([why, *(_rounding_of(low.kind, *constant) for constant in constants)])
    modules = dict(qualified_names(model))
    alike = [n for n, m in modules.items() if type(m) is type(modules.get(name))]
    return dict.fromkeys(alike or [name], why)


def equal_numbers(low: Recording) -> str: # "257 and 258 in 'gate'"
    "Describe whole numbers that become equal in modules; '' if none do."
    pairs = ((n, m.merged_inside) for n, m in low.modules.items() if m.merged_inside)
    return some(f'{a:.9g} and {b:.9g} in {named(n)}' for n, (a, b) in pairs)


def loss_scales(low: Recording) -> tuple[float, float]:
    """Return the lowest loss scale without underflow, and the highest without overflow.

    Underflow means that of the mean gradient; modules with the smallest gradients may still lose theirs.
    """
    info = torch.finfo(low.kind.dtype or torch.float32)
    in_half = {n for n, m in low.modules.items() if m.largest_half}
    half = [m for n, m in low.reference.modules.items() if m.grad and n in in_half]
    if not half: return 1., 2. ** 24
    most = 2. ** math.floor(math.log2(info.max / max(m.grad for m in half)))
    mean = sum(m.grad_sum for m in half) / sum(m.n_grads for m in half)
    least = 2. ** math.ceil(math.log2(info.smallest_normal * info.eps / (_NEGLIGIBLE * mean)))
    low_enough = min(1., most / MARGIN)                          # 1 will do if it leaves a margin
    return min(max(least, low_enough), most), most


def prediction_error(low: Recording) -> float: # nan if unknown
    "Return the relative difference of predictions from those in fp32, of the batch with the largest."
    pairs = zip(low.predictions, low.reference.predictions)
    errors = (relative_error(p, exact) for p, exact in pairs if p.shape == exact.shape)
    return max((e for e in errors if e >= 0), default=math.nan)


# -- the table, whose columns `PrecisionReport` documents

_COLUMNS = 'precision module type format largest headroom error grad underflow flagged'.split()


Runs = Mapping[str, list[Recording]]                             # by precision


def table_of(runs: Runs, verdicts: Mapping[str, Verdict]) -> pd.DataFrame:
    "Return the table of modules, from the first run of each precision that has no error."
    first = (low for recordings in runs.values() for low in [r for r in recordings if not r.error][:1])
    rows = (row for low in first for row in _rows(low, verdicts[low.kind.name].flagged))
    return pd.DataFrame(rows, columns=_COLUMNS)


def _rows(low, flagged):
    name, limit = low.kind.name, torch.finfo(low.kind.dtype).max
    for m in sorted(low.modules.values(), key=lambda m: m.name == LOSS):         # those of a validation may follow it
        in_fp32, is_flagged = low.reference.modules.get(m.name, m), m.name in flagged
        if not (in_fp32.largest or is_flagged): continue         # it computes nothing
        format, largest = name if m.is_half else 'fp32', in_fp32.largest or m.largest
        headroom = limit / m.largest_half if m.largest_half else math.inf
        if m.is_after and m.is_half and not m.failed: headroom = math.nan
        error, grad = math.inf if m.failed else m.error, in_fp32.grad or math.nan
        underflow = max(m.n_zeros - in_fp32.n_zeros, 0) / max(in_fp32.n_grads, 1)
        yield name, m.name, m.type, format, largest, headroom, error, grad, underflow, is_flagged
