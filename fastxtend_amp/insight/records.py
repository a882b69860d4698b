"""Records of modules: each operator of a module runs in 16 bits, and beside it in fp32.

The fp32 result is the twin of the 16-bit one, and the next operator in fp32 reads the twins of its inputs. A module has
twins only for the results of its own operators; its inputs, and the outputs of modules inside, count as exact. So the
error of a module is that of its own arithmetic, measured on its outputs and on what it passes to modules inside.
"""
import math, sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..compat import traits_of
from ..messages import is_users
from ..precisions import Precision
from ..precisions.matching import ROOT
from ..tensors import FP16_NORMAL, HALF, map_tensors
from .values import (Twins, address, all_finite, as_dtype, is_plain, largest_value, merged, n_nan_or_inf, readable,
                     relative_error, tensors)

LOSS = 'loss function'      # its name among the modules; includes callbacks after the forward pass
BACKWARD = 'backward pass'  # where an error comes from, after the loss

_FP32_NOISE = 2.**-23   # relative rounding of fp32
# Operators that only copy values, which are recorded where they were computed.
_COPIES = {'clone', '_to_copy', 'copy_', 'cat', 'stack', 'detach', 'lift_fresh'}
_CASTS = {'_to_copy', 'copy_', 'add', 'sub', 'mul', 'div'}       # operators that may cast whole numbers
_COUNTS = 'nll_loss_forward', 'nll_loss2d_forward'              # their second result is the sum of the samples' weights
# Operators whose constants are added, are bounds, or become values. In other operators they act before the rounding.
_CONSTANTS = set("""add sub rsub mul clamp clamp_min clamp_max masked_fill fill full full_like new_full scatter
    scalar_tensor""".split())
_WORK_PER_NUMBER = 100  # of a result, which is written and looked at; a floating-point operation is 1


@dataclass
class ModuleRecord:
    "The record of one module: of its own operators, not those of modules inside; over all calls and batches."
    name: str
    type: str
    largest = 0.                                                 # absolute finite result, in fp32 if that is known
    largest_half = 0.                                            # the same of 16-bit results only
    is_half = False                                              # whether it has 16-bit results
    is_after = False                                             # whether NaN or inf came in
    failed = False                                               # whether NaN or inf first appears in it
    error = math.nan                                             # largest relative error of its own arithmetic
    merged: Sequence[float] = ()                                 # two whole numbers that are equal in its results
    merged_inside: Sequence[float] = ()                          # two whole numbers that become equal in it
    # By line of code, operator and value: constants that become 0, 1 or inf, and whether results need them.
    constants: dict[tuple[str, str, float], bool] = field(default_factory=dict)
    grad = 0.                                                    # largest absolute gradient of outputs and parameters
    grad_sum = 0.                                                # sum of the absolute values of these gradients
    n_grads = 0                                                  # how many are finite and not 0
    n_zeros = 0                                                  # how many are 0
    work = 0                                                     # of the fp32 run, the same on each machine
    half_line = ''                                               # line of a 16-bit product in the fp32 run
    has_fp32_product = False                                     # whether it has fp32 products
    undone_line = ''                                             # line of a 16-bit product of inputs cast to fp32


def named(name: str) -> str:
    "Return the name of a module, or of what else failed, for a message."
    own = {ROOT: "the model's own `forward`", LOSS: 'the loss function', BACKWARD: 'the backward pass'}
    return name if name.startswith('callback `') else own.get(name, f"'{name}'")


class Operation:
    "A call of one of PyTorch's operators."
    def __init__(self, func, args, kwargs):
        self.func, self.traits, self.args, self.kwargs = func, traits_of(func), args, kwargs
        self.inputs = readable((args, kwargs))
        self.has_half = any(t.dtype in HALF for t in self.inputs)
        self.is_cast = self.traits.name == '_to_copy' and kwargs.get('dtype') in HALF

    def run(self): return self.func(*self.args, **self.kwargs)

    def in_fp32(self, exact): # `exact`: gives the fp32 version of an input
        "Return the result on fp32 inputs; None if there is an error."
        # It fails for tensor subclasses without this operator, and for operators that exist only in 16 bits.
        with suppress(Exception), torch.no_grad():
            device = tensors(self.args)[0].device
            args, kwargs = map_tensors(exact, (self.args, self.kwargs))
            if kwargs.get('dtype') in HALF: kwargs['dtype'] = torch.float32
            with torch.autocast(device.type, enabled=False): return self.func(*args, **kwargs)

    def work(self, out):
        "Return how much work it was: floating-point operations of products, and the size of the result."
        count = self.traits.flops
        flops = count(*self.args, **self.kwargs, out_val=out) if count else 0
        return flops + _WORK_PER_NUMBER * sum(t.numel() for t in tensors(out))

    def lost_constants(self):
        "Return the constants that 16 bits round to 0, 1, -1, inf or -inf."
        dtypes = (t.dtype for t in self.inputs if t.ndim)
        dtype = self.kwargs.get('dtype') or next(dtypes, None)
        if dtype not in HALF or self.traits.name.rstrip('_') not in _CONSTANTS: return []
        near = {number: as_dtype(number, dtype) for number in map(_constant, self.args)}
        return [number for number, r in near.items() if number != r and abs(r) in (0, 1, math.inf)]

    def needs(self, constant, out, exact): # `exact`: `out`, in fp32 if known
        "Return whether a constant bounds results, or is added to values near 0, and is lost."
        limit = as_dtype(constant, out.dtype)
        operators = ('clamp',) if abs(limit) == 1 else ('add', 'clamp') if limit == 0 < constant else ()
        if not self.traits.name.startswith(operators): return False
        # A constant that becomes 0 matters beside values below the normal numbers of fp16.
        is_near = (exact - limit).abs() < max(1.01 * abs(constant - limit), FP16_NORMAL)
        return bool(is_near.any())


def _constant(x): # 0 for what is none
    if type(x) in (int, float): return x
    is_constant = torch.is_tensor(x) and not x.ndim and not x.requires_grad      # PyTorch makes one of a number
    return float(f'{float(x):.7g}') if is_constant else 0


@dataclass
class Frame:
    "A running call of a module."
    record: ModuleRecord
    kind: type[Precision]
    reference: ModuleRecord                                      # of the run in fp32; empty if it did not run there
    twins: Twins = field(default_factory=Twins)
    floats: dict = field(default_factory=dict)                   # by address: what `.float()` gave, also cast back
    merged: dict = field(default_factory=dict)                   # by address: whole numbers that fell together

    def run(self, operation):
        "Run an operator of the module, and record what it shows."
        constants, traits = self.record.constants, operation.traits
        lost = [(users_line(), traits.name, c) for c in operation.lost_constants()]
        for key in lost: constants.setdefault(key, False)
        if traits.makes_nothing: return operation.run()
        exact = self._in_fp32(operation)
        was_finite = exact is None and all(map(all_finite, operation.inputs))    # before it writes into one
        out = operation.run()
        if not self.kind.dtype: self.record.work += operation.work(out)
        self._record_product(operation, out)
        self._record_merged(operation, out)
        outs = readable(out)[:1] if traits.name in _COUNTS else readable(out)
        for o, value in zip(outs, readable(exact) or outs):      # itself where nothing has been rounded
            self._record_size(operation, o, value)
            for key in lost: constants[key] |= operation.needs(key[-1], o, value)
            if n_nan_or_inf(o) and not self.reference.failed: self._record_failure(o, value, was_finite)
        return out

    def _in_fp32(self, operation):
        "Return the result in fp32; None if nothing has been rounded yet, or if it cannot be compared."
        twins, traits = self.twins, operation.traits
        rounds = operation.is_cast or operation.has_half or any(twins.of(t) is not None for t in operation.inputs)
        if not self.kind.dtype or not rounds or traits.draws: return None
        return operation.in_fp32((lambda t: twins.exact(t).clone()) if traits.writes else twins.exact)

    def _record_size(self, operation, out, exact): # `exact`: `out`, in fp32 if known
        "Record the size of a result, and keep its twin."
        record = self.record
        if operation.is_cast or operation.traits.name not in _COPIES:
            largest = largest_value(exact)
            record.largest = max(record.largest, largest)
            if out.dtype in HALF: record.largest_half, record.is_half = max(record.largest_half, largest), True
        # Rounding errors of what is exactly 0 in fp32 would be 100%.
        if exact is not out and self.reference.largest: self.twins.keep(out, exact)
        else: self.twins.forget(out)                             # it may be overwritten

    def _record_failure(self, out, exact, was_finite):
        "Record whether NaN or inf is new, where the result in fp32 is finite and more than a mask, or came in."
        is_new = was_finite if exact is out else largest_value(exact) > 0 and n_nan_or_inf(out[exact.isfinite()]) > 0
        self.record.failed |= is_new
        self.record.is_after |= not is_new

    def _record_product(self, operation, out):
        "Record the line of a product in 16 bits that the fp32 run should not have, or that undoes a cast to fp32."
        traits, has_half, inputs = operation.traits, operation.has_half, operation.inputs
        if traits.name == '_to_copy' and inputs:
            is_float = has_half and out.dtype is torch.float32
            if is_float or address(inputs[0]) in self.floats: self.floats[address(out)] = out
        elif traits.flops and not has_half: self.record.has_fp32_product = True
        elif traits.flops:
            if not self.kind.dtype: self.record.half_line = users_line() or 'in PyTorch'
            elif any(t.dtype in HALF and address(t) in self.floats for t in inputs):
                self.record.undone_line = users_line() or 'PyTorch'

    def _record_merged(self, operation, out):
        "Follow whole numbers that fall together in 16 bits through what is computed from them."
        numbers = [*map(self._merged_in, operation.inputs)]
        if operation.traits.name in _CASTS:
            numbers += [merged(t, out.dtype) for t in tensors(operation.args) if is_plain(t)]
        if pair := next(filter(None, numbers), None):
            if not self.reference.merged_inside: self.record.merged_inside = pair
            for o in readable(out): self.merged[address(o)] = pair, o

    def _merged_in(self, t): return self.merged.get(address(t), [()])[0]

    def compare(self, t):
        "Record the error of a tensor that leaves the module, or enters one inside."
        if not self.reference.merged: self.record.merged = self._merged_in(t) or self.record.merged
        if not self.kind.dtype: return
        t = t.detach()
        error = relative_error(t, self.twins.exact(t))
        # Where fp32 itself would lose a tenth of the value, an error is noise.
        if error * _FP32_NOISE < .1 * torch.finfo(self.kind.dtype).eps:
            self.record.error = max(error, self.record.error)    # in this order, as the record may be nan


def users_line() -> str: # 'norm.py:33'
    "Return the line that runs now in the user's code or in a library; '' if PyTorch's modules are all that runs."
    frame: Any = sys._getframe()
    while frame.f_globals.get('__name__') != 'fastai.learner':
        if is_users(frame): return f'{Path(frame.f_code.co_filename).name}:{frame.f_lineno}'
        frame = frame.f_back
    return ''
