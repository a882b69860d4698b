"""Records of modules: each operator of a module runs in 16 bits, and beside it in fp32.

The fp32 result is the twin of the 16-bit one, and the next operator in fp32 reads the twins of its inputs. A module has
twins only for the results of its own operators; its inputs, and the outputs of modules inside, count as exact. So the
error of a module is that of its own arithmetic, measured on its outputs and on what it passes to modules inside.
"""
import math, sys
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
    reference: Any = None                                        # its record in the fp32 run; empty without one
    largest = 0.                                                 # absolute finite result, in fp32 if that is known
    largest_half = 0.                                            # the same of 16-bit results only
    is_half = False                                              # whether it has 16-bit results
    is_after = False                                             # whether NaN or inf came in
    failed = False                                               # whether NaN or inf first appears in it
    error = math.nan                                             # largest relative error of its own arithmetic
    merged = ''                                                  # two whole numbers that become equal in it
    shows_merged = False                                         # whether its results depend on such numbers
    # By line of code, operator and value: constants that become 0, 1 or inf, and whether results need them.
    constants: dict[tuple[str, str, float], bool] = field(default_factory=dict)
    grad = 0.                                                    # largest absolute gradient of outputs and parameters
    grad_sum = 0.                                                # sum of the absolute values of these gradients
    n_grads = 0                                                  # how many are finite and not 0
    n_zeros = 0                                                  # how many are 0
    work = 0                                                     # the same on each machine
    has_product = False                                          # whether it multiplies matrices
    half_line = ''                                               # line of a 16-bit product in the fp32 run
    undone_line = ''                                             # line of a 16-bit product of inputs cast to fp32


def named(name: str) -> str:
    "Return the name of a module, or of what else failed, for a message."
    own = {ROOT: "the model's own `forward`", LOSS: 'the loss function', BACKWARD: 'the backward pass'}
    return name if name.startswith('callback `') else own.get(name, f"'{name}'")


class Operation:
    "A call of one of PyTorch's operators."
    def __init__(self, func, args, kwargs):
        self.func, self.traits, self.args, self.kwargs = func, traits_of(func), args, kwargs
        self.name, self.inputs = self.traits.name, readable((args, kwargs))
        self.has_half = any(t.dtype in HALF for t in self.inputs)
        self.is_cast = self.name == '_to_copy' and kwargs.get('dtype') in HALF

    def run(self): return self.func(*self.args, **self.kwargs)

    def reads(self, known): # Tensors by their address
        "Return whether one of these tensors is an input."
        return any(address(t) in known for t in self.inputs)

    def run_in_fp32(self, twins):
        "Return the result for the twins of the inputs; None if there is an error."
        def fp32(t):
            twin = twins.fp32(t)
            return twin.clone() if self.traits.writes else twin

        # It fails for tensor subclasses without this operator, and for operators that exist only in 16 bits.
        with suppress(Exception), torch.no_grad():
            device = tensors(self.args)[0].device
            args, kwargs = map_tensors(fp32, (self.args, self.kwargs))
            if kwargs.get('dtype') in HALF: kwargs['dtype'] = torch.float32
            with torch.autocast(device.type, enabled=False): return self.func(*args, **kwargs)

    def work(self, out):
        "Return how much work it was: floating-point operations of products, and the size of the result."
        count = self.traits.flops
        flops = count(*self.args, **self.kwargs, out_val=out) if count else 0
        return flops + _WORK_PER_NUMBER * sum(t.numel() for t in tensors(out))

    def lost_constants(self):
        "Return the constants that 16 bits round to 0, 1, -1, inf or -inf, with line and operator."
        dtypes = (t.dtype for t in self.inputs if t.ndim)
        dtype = self.kwargs.get('dtype') or next(dtypes, None)
        if dtype not in HALF or self.name.rstrip('_') not in _CONSTANTS: return []
        def is_lost(constant):
            near = as_dtype(constant, dtype)
            return near != constant and abs(near) in (0, 1, math.inf)

        lost = filter(is_lost, map(_constant, self.args))
        return [(users_line(), self.name, constant) for constant in lost]

    def needs(self, constant, out, fp32): # `fp32`: `out`, in fp32 if known
        "Return whether results depend on a lost constant: it bounds some, or is added to values near 0."
        limit = as_dtype(constant, out.dtype)
        operators = ('clamp',) if abs(limit) == 1 else ('add', 'clamp') if limit == 0 < constant else ()
        if not self.name.startswith(operators): return False
        # A constant that becomes 0 matters beside values below the normal numbers of fp16.
        is_near = (fp32 - limit).abs() < max(1.01 * abs(constant - limit), FP16_NORMAL)
        return bool(is_near.any())


def _constant(x): # 0 for what is none
    if type(x) in (int, float): return x
    is_constant = torch.is_tensor(x) and not x.ndim and not x.requires_grad      # PyTorch makes one of a number
    return float(f'{float(x):.7g}') if is_constant else 0


@dataclass
class Frame:
    "A running call of a module, with what is known of the tensors in it."
    record: ModuleRecord
    precision: Precision
    twins: Twins = field(default_factory=Twins)
    floats: dict = field(default_factory=dict)                   # by address: what `.float()` gave, also cast back
    merged: dict = field(default_factory=dict)                   # by address: whole numbers that fell together

    def run(self, operation):
        "Run an operator of the module, and record what it shows."
        record = self.record
        lost = operation.lost_constants()                        # before it runs, as it may raise an error
        for constant in lost: record.constants.setdefault(constant, False)
        if operation.traits.makes_nothing: return operation.run()
        twin = self._twin(operation)
        was_finite = twin is None and all(map(all_finite, operation.inputs))     # before it writes into one
        out = operation.run()
        record.work += operation.work(out)
        self._record_product(operation, out)
        self._record_merged(operation, out)
        outs = readable(out)[:1] if operation.name in _COUNTS else readable(out)
        for o, fp32 in zip(outs, readable(twin) or outs):        # itself where nothing has been rounded
            if operation.is_cast or operation.name not in _COPIES: self._record_size(o, fp32)
            for constant in lost: record.constants[constant] |= operation.needs(constant[-1], o, fp32)
            if n_nan_or_inf(o) and not record.reference.failed: self._record_failure(o, fp32, was_finite)
            # Rounding errors of what is exactly 0 in fp32 would be 100%.
            if fp32 is not o and record.reference.largest: self.twins.keep(o, fp32)
            else: self.twins.forget(o)                           # it may be overwritten
        return out

    def _twin(self, operation):
        "Return the result in fp32; None if nothing has been rounded yet, or if it cannot be compared."
        rounds = operation.is_cast or operation.has_half or operation.reads(self.twins)
        if not self.precision.dtype or not rounds or operation.traits.draws: return None
        return operation.run_in_fp32(self.twins)

    def _record_size(self, out, fp32): # `fp32`: `out`, in fp32 if known
        record, largest = self.record, largest_value(fp32)
        record.largest = max(record.largest, largest)
        if out.dtype in HALF: record.largest_half, record.is_half = max(record.largest_half, largest), True

    def _record_failure(self, out, fp32, was_finite):
        "Record whether NaN or inf began here, as the result in fp32 is finite and more than a mask, or came in."
        if fp32 is out: is_new = was_finite
        else: is_new = largest_value(fp32) > 0 and n_nan_or_inf(out[fp32.isfinite()]) > 0
        self.record.failed |= is_new
        self.record.is_after |= not is_new

    def _record_product(self, operation, out):
        "Record the line of a 16-bit product in the fp32 run, and of one whose inputs were cast to fp32."
        record, has_half, was_float = self.record, operation.has_half, operation.reads(self.floats)
        if operation.name == '_to_copy' and (was_float or (has_half and out.dtype is torch.float32)):
            if a := address(out): self.floats[a] = out               # 0 is not one
        if not operation.traits.flops: return
        record.has_product = True
        if has_half and not self.precision.dtype: record.half_line = users_line() or 'in PyTorch'
        elif has_half and was_float: record.undone_line = users_line() or 'PyTorch'

    def _record_merged(self, operation, out):
        "Follow whole numbers that fall together in 16 bits through what is computed from them."
        if self.record.reference.merged: return                  # some do so in fp32 as well
        cast = tensors(operation.args) if operation.name in _CASTS else []
        pairs = (merged(t, out.dtype) for t in cast if is_plain(t))
        found = next(filter(None, pairs), '')
        self.record.merged = found or self.record.merged
        if not (found or operation.reads(self.merged)): return
        self.merged |= {a: o for o in readable(out) if (a := address(o))}

    def compare(self, t):
        "Record the error of a tensor that leaves the module, or enters one inside."
        self.record.shows_merged |= address(t) in self.merged
        if not self.precision.dtype: return
        t = t.detach()
        error = relative_error(t, self.twins.fp32(t))
        # Where fp32 itself would lose a tenth of the value, an error is noise.
        if error * _FP32_NOISE < .1 * torch.finfo(self.precision.dtype).eps:
            self.record.error = max(error, self.record.error)    # in this order, as the record may be nan


def users_line() -> str: # 'norm.py:33'
    "Return the line that runs now in the user's code or in a library; '' if PyTorch's modules are all that runs."
    frame: Any = sys._getframe()
    while frame.f_globals.get('__name__') != 'fastai.learner':
        if is_users(frame): return f'{Path(frame.f_code.co_filename).name}:{frame.f_lineno}'
        frame = frame.f_back
    return ''
