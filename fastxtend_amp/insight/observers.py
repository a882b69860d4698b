"""The record of a module, and the observers that fill it: each sees the module's operators, and notes one thing.

An observer gets the running module and an operator that ran. None reads what another one notes.
"""
import math
from contextlib import suppress
from itertools import takewhile
from traceback import walk_stack
from typing import Any

import torch
from fastcore.basics import first

from ..messages import users_line
from ..tensors import FP16_NORMAL, HALF
from .values import is_plain, largest_value, n_nan_or_inf, tensors_in

_WORK_PER_NUMBER = 100  # of a result, which is written and looked at; a floating-point operation is 1
# Operators that only copy values, which are noted where they were computed.
_COPIES = {'clone', '_to_copy', 'copy_', 'cat', 'stack', 'detach', 'lift_fresh'}
# Beginnings of names of operators whose results change where a constant becomes this number.
_NEEDED_BY = {1: ('clamp',), 0: ('add', 'clamp'), math.inf: ('mul', 'where')}
_CASTS = {'_to_copy', 'copy_', 'add', 'sub', 'mul', 'div'}       # operators that may cast whole numbers


# -- the record

class ModuleRecord:
    "The record of one module: of its own operators, not those of modules inside; over all calls and batches."
    error = math.nan                                             # largest relative error of its own arithmetic
    # Work, the same on each machine.
    work = 0
    # Sizes.
    largest = 0.                                                 # absolute finite result, in fp32 if that is known
    largest_half = 0.                                            # the same of 16-bit results only
    is_half = False                                              # whether it has 16-bit results
    # NaN and inf.
    failed = False                                               # whether they first appear in it
    # Products of matrices.
    has_product = False
    half_line = ''                                               # 'net.py:33', of one in 16 bits in the fp32 run
    undone_line = ''                                             # the same of one whose `.float()` autocast undoes
    # Whole numbers.
    merged = ''                                                  # two that become equal in it
    shows_merged = False                                         # whether its results depend on such numbers
    # A constant that results need and 16 bits do not have.
    lost = ''                                                    # '1e-08 is 0 in fp16 (`clamp`, norm.py:33)'
    lost_to = 0.                                                 # what it became: 0, 1, -1 or infinite
    # Gradients of outputs and parameters.
    grad = 0.                                                    # largest absolute one
    grad_sum = 0.                                                # sum of their absolute values
    n_grads = 0                                                  # how many are finite and not 0
    n_zeros = 0                                                  # how many are 0

    def __init__(self,
        name: str, # Of the module
        type: str, # Of the module
        reference: Any = None, # Its record in the fp32 run; empty without one
    ):
        self.name, self.type, self.reference = name, type, reference


# -- sizes, NaN and products

def work(running, op):
    "Note the work: floating-point operations of products, and numbers that are written."
    count, flops = op.traits.flops, 0
    # PyTorch's formula for attention wants as many heads in the keys as in the queries (2.9).
    with suppress(AssertionError): flops = count(*op.args, **op.kwargs, out_val=op.out) if count else 0
    running.record.work += flops + _WORK_PER_NUMBER * sum(t.numel() for t in tensors_in(op.out))


def size(running, op):
    "Note the largest result."
    if op.name in _COPIES and not op.is_cast: return
    record = running.record
    for out, fp32 in op.results:
        largest = largest_value(fp32)
        record.largest = max(record.largest, largest)
        if out.dtype not in HALF: continue
        record.is_half = True
        if n_nan_or_inf(out) and _came_in(running, op): continue
        record.largest_half = max(record.largest_half, largest)


def _came_in(running, op):
    "Return whether inputs from other modules have NaN or inf. What else overflows is seen once they have none."
    is_outer = not (op.traits.writes or running.twins.include(op.inputs))
    return is_outer and any(map(n_nan_or_inf, op.inputs))


def failure(running, op):
    "Note whether NaN or inf begins here, as the result in fp32 is finite and more than a mask."
    record = running.record
    for out, fp32 in op.results:
        if record.reference.failed or not n_nan_or_inf(out): continue
        if op.is_exact: record.failed |= op.was_finite
        elif not _came_in(running, op):
            record.failed |= largest_value(fp32) > 0 and n_nan_or_inf(out[fp32.isfinite()]) > 0


def products(running, op):
    "Note products in 16 bits: in the fp32 run, and of inputs cast with `.float()`, which autocast undoes."
    record, has_half = running.record, op.has_half
    was_float = running.floats.include(op.inputs)
    if op.name == '_to_copy' and (was_float or (has_half and op.out.dtype is torch.float32)):
        running.floats.add(op.out)
    if not op.traits.flops: return
    record.has_product = True
    if has_half and not running.precision.dtype: record.half_line = _line()
    elif has_half and was_float: record.undone_line = _line()


# -- whole numbers that become equal, such as timesteps

def whole_numbers(running, op):
    "Note whole numbers that become equal in 16 bits, and follow what is computed from them to the module's outputs."
    record = running.record
    if record.reference.merged: return                           # some do so in fp32 as well
    cast = tensors_in(op.args) if op.name in _CASTS else []
    pairs = (_equal_in(op.out.dtype, t) for t in cast if is_plain(t))
    found = first(pairs, bool)
    record.merged = found or record.merged
    if found or running.merged.include(op.inputs): running.merged.add(op.out)


def _equal_in(dtype, t): # '257 and 258'
    "Return two different whole numbers in `t` that become equal in `dtype`; '' for what may be an image."
    if dtype not in HALF or t.dtype in HALF or t.squeeze().ndim > 2: return ''
    t = t.float()
    # Larger numbers may be equal in fp32 already.
    if not ((t == t.round()) & (t.abs() < 2**24)).all(): return ''
    t = t.unique()
    at = (t.to(dtype).diff() == 0).nonzero().flatten()[:1]       # of a pair that becomes equal
    return ' and '.join(f'{float(n):.9g}' for i in at for n in t[i:i + 2])


# -- constants that 16 bits round to 0, 1 or -1, such as the epsilon of a division, or to infinity, as those of masks

def constants(running, op):
    "Note a constant that is lost, and that results need: it bounds some, is added to values near 0, or masks."
    record = running.record
    for constant in filter(None, map(_constant, op.args)):
        for out, fp32 in op.results:
            if out.dtype not in HALF: continue
            limit = float(torch.tensor(float(constant)).to(out.dtype))
            if limit == constant or not op.name.startswith(_NEEDED_BY.get(abs(limit), ())): continue
            # A constant that becomes 0 matters beside values below the normal numbers of fp16.
            width = max(1.01 * abs(constant - limit), FP16_NORMAL)
            is_near = out == limit if math.isinf(limit) else (fp32 - limit).abs() < width
            if not is_near.any(): continue
            name, record.lost_to = running.precision.name, limit
            record.lost = f'{constant:.9g} is {limit:g} in {name} (`{op.name}`, {_line()})'


def _constant(x): # 0 for what is none
    if type(x) in (int, float): return x
    # PyTorch makes a tensor of a number.
    is_constant = torch.is_tensor(x) and not (x.ndim or x.requires_grad or x.is_complex())
    return float(f'{float(x):.7g}') if is_constant else 0


OBSERVERS = work, size, failure, products, whole_numbers, constants


def _line(): # 'norm.py:33'
    "Return the line that runs now in the user's code or in a library; 'PyTorch' if its modules are all that runs."
    def is_below(walked): return walked[0].f_globals.get('__name__') != 'fastai.learner'
    return users_line(takewhile(is_below, walk_stack(None))) or 'PyTorch'
