"Evidence in recorded batches: what is wrong in fp32, which modules 16 bits harm, and the loss scales that work."
import math

import torch
from torch import nn

from ..precisions.matching import covers, qualified_names
from .recording import Recording
from .report import named, some
from .values import n_nan_or_inf, readable, relative_error, rounded

CLOSE = 4.              # headroom below which a module is flagged
MARGIN = 16.            # between a recommended loss scale and the highest, as later gradients may be larger
_IMPRECISE = .1         # relative error from which a module is flagged
_LOST = .1              # of the mean absolute gradient: smaller gradients may underflow
NO_AUTOCAST = '`with torch.autocast(x.device.type, enabled=False)`'


# -- in fp32

def wrong_in_fp32(fp32: Recording, batches: object) -> str:
    """Describe what is wrong with the run in fp32; '' if nothing is.

    NaN in the data matters only then: it may mark unknown targets, which the loss ignores.
    """
    if not fp32.losses: return 'no batch gave a loss: use batches with targets, or a model that returns the loss'
    own = not_fp32(fp32)
    if not fp32.not_finite:
        in_16 = sum(bool(m.half_line) for m in fp32.modules.values())
        in_fp32 = sum(m.has_fp32_product and not m.half_line for m in fp32.modules.values())
        return '' if in_16 <= in_fp32 else f'{own}, so there is no fp32 run to compare with'
    if bad := not_finite_data(batches): return bad
    first = next((f', first in {named(n)}' for n, m in fp32.modules.items() if m.failed), '')
    if own: return f'the {fp32.not_finite} is not finite{first}, but the reference is not fp32: {own}'
    return f'the {fp32.not_finite} is not finite in fp32 either{first}, so precision is not the cause'


def not_fp32(fp32: Recording) -> str:
    "Describe products in 16 bits in the fp32 run; '' if there are none."
    own = [f'{named(n)} ({m.half_line})' for n, m in fp32.modules.items() if m.half_line]
    verb = 'multiplies' if len(own) == 1 else 'multiply'
    return f'{some(own)} {verb} in 16 bits, by an autocast or a cast in the model' if own else ''


def not_finite_data(batch: object) -> str: # 'the batch itself is not finite: 1 of 24 values of ...'
    "Describe which tensor of a batch has NaN or inf; '' if none has. -inf may be a mask."
    t = next(filter(n_nan_or_inf, readable(batch)), None)
    if t is None: return ''
    return (f'the batch itself is not finite: {n_nan_or_inf(t):,} of {t.numel():,} values of its tensor of shape '
            f'{tuple(t.shape)} are NaN or inf')


# -- in 16 bits

def flagged(
    low: Recording,
    keep: list[str], # Modules in fp32, which cannot be kept there again for being close to overflow
) -> dict[str, str]:
    "Return the modules to flag for their forward pass, and why, in execution order."
    found = {}
    for n, m in low.modules.items():
        if not (why := _harm(m, low.kind, covers(keep, n))): continue
        if m.undone_line:
            why += (f'. Autocast runs the product in {m.undone_line} in {low.kind.name}, although its inputs are '
                    f'`.float()`: {NO_AUTOCAST} before it keeps it in fp32')
        found[n] = why
    return found


def _harm(m, kind, is_kept):
    "Describe what 16 bits do to a module."
    name, where, limit = kind.name, named(m.name), torch.finfo(kind.dtype).max
    size = m.largest if m.failed else m.largest_half
    lost = next((constant for constant, is_needed in m.constants.items() if is_needed), None)
    if m.failed and size <= limit: return f'a value in {where} is NaN or inf in {name}, but finite in fp32'
    if m.failed or (size * CLOSE > limit and not is_kept):
        above = 'above' if size > limit else 'close to'
        return f"values in {where} reach {size:,.3g}, {above} {name}'s {limit:,.5g}"
    if lost:
        away = rounded(lost[-1], kind.dtype)
        return f'{_lost(kind, *lost)}, so it does not keep values in {where} away from {away:g}'
    if m.merged:
        return f'{m.merged[0]:.9g} and {m.merged[1]:.9g} become the same number in {where} in {name}'
    return f'the error of {where} is {min(m.error, 1):.0%} in {name}' if m.error > _IMPRECISE else ''


def _lost(kind, line, operator, value):
    where = f' (`{operator}`, {line})' if line else ''
    return f'{value:.9g} is {rounded(value, kind.dtype):g} in {kind.name}{where}'


def failing(
    low: Recording, # That ended with an error
    model: nn.Module,
) -> dict[str, str]:
    "Return the modules of the type that raised the error, and why."
    if not (name := low.failed_in): return {}
    why = f'{named(name)} does not run in {low.kind.name}: {low.error}'
    for constant in low.modules[name].constants if name in low.modules else (): why += f'; {_lost(low.kind, *constant)}'
    modules = dict(qualified_names(model))
    alike = [n for n, m in modules.items() if type(m) is type(modules.get(name))]
    return dict.fromkeys(alike or [name], why)


def loss_scales(low: Recording) -> tuple[float, float]:
    """Return the lowest loss scale without underflow, and the highest without overflow.

    Underflow means that of the mean gradient; modules with the smallest gradients may still lose theirs.
    """
    info = torch.finfo(low.kind.dtype or torch.float32)
    in_half = {n for n, m in low.modules.items() if m.largest_half}
    half = [m for n, m in low.fp32.modules.items() if m.grad and n in in_half]
    if not half: return 1., 2. ** 24
    most = 2. ** math.floor(math.log2(info.max / max(m.grad for m in half)))
    mean = sum(m.grad_sum for m in half) / sum(m.n_grads for m in half)
    least = 2. ** math.ceil(math.log2(info.smallest_normal * info.eps / (_LOST * mean)))
    return min(max(least, min(1., most / MARGIN)), most), most


def prediction_error(low: Recording) -> float: # nan if unknown
    "Return the relative difference of predictions from those in fp32, of the batch with the largest."
    pairs = zip(low.predictions, low.fp32.predictions)
    errors = (relative_error(p, exact) for p, exact in pairs if p.shape == exact.shape)
    return max((e for e in errors if e >= 0), default=math.nan)
