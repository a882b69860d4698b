"""The evidence in recorded batches, as sentences and numbers.

What is wrong in fp32, which modules 16 bits harm and why, and the loss scales that work.
"""
import math

import torch
from fastcore.basics import first

from ..precisions.matching import covers
from .display import LOSS, named, some
from .recording import Recording
from .values import n_nan_or_inf, readable, relative_error

CLOSE = 4.              # headroom below which a module is flagged
MARGIN = 16.            # between a recommended loss scale and the highest, as later gradients may be larger
_IMPRECISE = .1         # relative error from which a module is flagged
_NEGLIGIBLE = .1        # of the mean absolute gradient: smaller gradients may underflow
_HIGHEST = 62            # power of two of a loss scale that is recommended, even if gradients are tiny
NO_AUTOCAST = '`with torch.autocast(x.device.type, enabled=False)`'


# -- in fp32

def wrong_in_reference(reference: Recording, batches: object) -> str:
    """Describe what is wrong with the run in fp32; '' if nothing is.

    NaN in the data is reported only if the loss or a gradient is not finite, as losses may ignore targets that are NaN.
    """
    if not reference.losses: return 'no batch gave a loss: use batches with targets, or a model that returns the loss'
    if not reference.has_gradients: return 'no gradient was seen: the loop of the learner has to run `after_backward`'
    modules, own = reference.modules.values(), not_fp32(reference)
    if not reference.not_finite:
        in_16 = [bool(m.half_line) for m in modules if m.has_product]
        return '' if sum(in_16) <= len(in_16) / 2 else f'{own}, so there is no fp32 run to compare with'
    if bad := not_finite_data(batches): return bad
    begins = next((f', first in {named(m.name)}' for m in modules if m.failed), '')
    if own: return f'the {reference.not_finite} is not finite{begins}, but the reference is not fp32: {own}'
    return f'the {reference.not_finite} is not finite in fp32 either{begins}, so precision is not the cause'


def not_fp32(reference: Recording) -> str:
    "Describe what multiplies in 16 bits in the fp32 run, or if that fails what computes in 16 bits; '' for nothing."
    own = [named(m.name) + (f' ({m.half_line})' if m.half_line else '') for m in reference.modules.values()
           if m.half_line or (m.is_half and reference.not_finite)]
    verb = 'computes' if len(own) == 1 else 'compute'
    return f'{some(own)} {verb} in 16 bits, by an autocast or a cast in the code' if own else ''


def not_finite_data(batch: object) -> str: # 'the batch itself is not finite: 1 of 24 values of ...'
    "Describe which tensor of a batch has NaN or inf; '' if none has. -inf may be a mask."
    t = first(readable(batch), n_nan_or_inf)
    if t is None: return ''
    return (f'the batch itself is not finite: {n_nan_or_inf(t):,} of {t.numel():,} values of its tensor of shape '
            f'{tuple(t.shape)} are NaN or inf')


# -- in 16 bits

def harm(
    run: Recording,
    certain: bool = False, # Whether to leave out what may do no harm
) -> dict[str, str]: # By module, in execution order; for an error all modules of the type that raised it
    "Return which modules 16 bits harm in the forward pass, and how."
    if run.raised: return _failing(run)
    return {m.name: fault + _undone_cast(m, run.precision) for m in run.modules.values()
            if (fault := _fault(m, run.precision, certain))}


def _undone_cast(m, precision):
    return (f'. Autocast runs the product in {m.undone_line} in {precision.name}, although its inputs are `.float()`: '
            f'{NO_AUTOCAST} before it keeps it in fp32' if m.undone_line else '')


def _fault(m, precision, certain):
    "Describe the worst that 16 bits do to a module: NaN, inf or nearly, then what rounding loses; '' for nothing."
    name, where, limit = precision.name, named(m.name), torch.finfo(precision.dtype).max
    size = m.largest if m.failed else m.largest_half
    is_close = size * (1. if certain else CLOSE) > limit and not covers(precision.fp32_modules or (), m.name)
    if m.failed and size <= limit:
        return f'a value in {where} is NaN or inf in {name}, but finite in fp32' + (f': {m.lost}' if m.lost else '')
    if m.failed or is_close:
        above = 'above' if size > limit else 'close to'
        return f"values in {where} reach {size:,.3g}, {above} {name}'s {limit:,.5g}"
    if m.lost and abs(m.lost_to) < 2 and not certain:
        return f'{m.lost}, so it does not keep values in {where} away from {m.lost_to:g}'
    if m.shows_merged: return f'{m.merged} become the same number in {where} in {name}'
    if m.name == LOSS: return ''                                 # what an error in it does, the gradient shows
    return f'the error of {where} is {min(m.error, 1):.0%} in {name}' if m.error > _IMPRECISE else ''


def _failing(run):
    if not (name := run.failed_in): return {}
    why = f'{named(name)} does not run in {run.precision.name}: {run.raised}'
    modules = run.reference.modules.values()
    types = [m.type for m in modules if m.name == name]
    alike = [m.name for m in modules if m.type in types]
    return dict.fromkeys(alike or [name], why)


def loss_scales(run: Recording) -> tuple[float, float]:
    """Return the lowest loss scale without underflow, and the highest without overflow.

    Underflow means that of the mean gradient; modules with the smallest gradients may still lose theirs.
    """
    info = torch.finfo(run.precision.dtype or torch.float32)
    half = [m.reference for m in run.modules.values() if m.largest_half and m.reference.grad]
    if not half and run.unreadable: return 1., run.precision.first_scale         # the one that it ran with
    if not half: return 1., 2.**24
    largest = max(m.grad for m in half)
    most = 2. ** min(math.floor(math.log2(info.max / largest)), _HIGHEST)
    mean = sum(m.grad_sum for m in half) / sum(m.n_grads for m in half)
    least = 2. ** math.ceil(math.log2(info.smallest_normal * info.eps / (_NEGLIGIBLE * mean)))
    low_enough = min(1., most / MARGIN)                          # 1 will do if it leaves a margin
    return min(max(least, low_enough), most), most


def prediction_error(run: Recording) -> float: # nan if unknown
    "Return the relative difference of predictions from those in fp32, of the batch with the largest."
    if not torch.equal(run.random_state, run.reference.random_state): return math.nan      # noise differs
    pairs = zip(run.predictions, run.reference.predictions)
    errors = (relative_error(p, exact) for p, exact in pairs if p.shape == exact.shape)
    return max((e for e in errors if e >= 0), default=math.nan)
