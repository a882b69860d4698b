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

from ..messages import is_users
from ..precisions import Precision
from ..tensors import HALF, half_to_float, map_tensors
from .values import (address, all_finite, is_plain, largest_value, merged, n_nan_or_inf, readable, relative_error,
                     tensors)

_FP32_NOISE = 2.**-23   # relative; where fp32 itself would lose a tenth, an error is noise
# Operators that only move values, which are recorded where they were computed.
_MOVES = {'clone', '_to_copy', 'copy_', 'cat', 'stack', 'detach', 'lift_fresh'}
_CASTS = {'_to_copy', 'copy_', 'add', 'sub', 'mul', 'div'}       # of whole numbers
_COUNTS = 'nll_loss_forward', 'nll_loss2d_forward'              # their second result is the sum of the samples' weights


@dataclass
class ModuleRecord:
    "Record of one module: of its own operators, not those of modules inside; over all calls and batches."
    name: str
    type: str
    largest = 0.                                                 # absolute finite result; of the twin, if there is one
    largest_half = 0.                                            # the same, of 16-bit results only
    is_half = False                                              # whether it has any
    is_after = False                                             # whether NaN or inf came in
    failed = False                                               # whether NaN or inf first appears in it
    error = math.nan                                             # of its own arithmetic, relative; the largest
    merged: Sequence[float] = ()                                 # two whole numbers that leave it as one
    # Constants that become 0, 1 or inf: line of code, operator and value; True if they keep values away from that.
    constants: dict[tuple[str, str, float], bool] = field(default_factory=dict)
    grad = 0.                                                    # largest absolute, of its outputs and own parameters
    grad_sum = 0.                                                # of the absolute values of all these gradients
    n_grads = 0                                                  # that are finite and not 0
    n_zeros = 0                                                  # that are 0
    work = 0                                                     # in fp32, the same on each machine
    half_line = ''                                               # of code that multiplies in 16 bits in the fp32 run,
    has_fp32_product = False                                     # and whether other code multiplies in fp32
    undone_line = ''                                             # of a product in 16 bits of inputs cast to fp32


class Twins(dict):
    "fp32 twins of tensors. By address: a tensor there, and the fp32 copy of its memory, which its views share."
    def of(self, t):
        "Return the twin of `t`; None if `t` is exact."
        _, memory = self.get(address(t), (t, None))
        return memory if memory is None else memory.as_strided(t.shape, t.stride(), t.storage_offset())

    def exact(self, t):
        "Return the twin of `t`, or an exact `t` in fp32."
        twin = self.of(t)
        return half_to_float(t) if twin is None else twin

    def keep(self, t, exact):
        "Keep `exact` as the twin of `t`, unless `t` has no address."
        if not address(t) or t.shape != exact.shape: return
        if self.of(t) is None:                                   # of all that shares this memory
            memory = t.new_empty(0).set_(t.untyped_storage())
            self[address(t)] = t, memory.to(exact.dtype, copy=True)
        self.of(t).copy_(exact)

    def forget(self, x):
        "Drop the twins of all tensors in `x`, which was overwritten."
        for t in readable(x): self.pop(address(t), None)


@dataclass
class Frame:
    "A running call of a module."
    record: ModuleRecord
    kind: type[Precision]
    fp32: ModuleRecord                                           # of the run in fp32; empty if it did not run there
    twins: Twins = field(default_factory=Twins)
    # By address: what `.float()` gave, also cast back; what is computed from whole numbers that fell together.
    floats: dict = field(default_factory=dict)
    merged: dict = field(default_factory=dict)

    def run(self, call):
        "Run an operator of the module, and record what it shows."
        constants = self.record.constants
        lost = [(users_line(), call.op.name, c) for c in call.lost_constants()]
        for key in lost: constants.setdefault(key, False)
        if call.op.makes_nothing: return call.run()
        exact = self._in_fp32(call)
        was_finite = exact is None and all(map(all_finite, call.inputs))         # before it writes into one
        out = call.run()
        if not self.kind.dtype: self.record.work += call.work(out)
        self._record_product(call, out)
        self._record_merged(call, out)
        outs = readable(out)[:1] if call.op.name in _COUNTS else readable(out)
        for o, value in zip(outs, readable(exact) or outs):
            self._record_size(call, o, value)
            for key in lost: constants[key] |= call.needs(key[-1], o, value)
            if n_nan_or_inf(o) and not self.fp32.failed: self._record_failure(o, value, was_finite)
        return out

    def _in_fp32(self, call):
        "Return the result in fp32; None if nothing has been rounded yet, or if it cannot be compared."
        twins = self.twins
        rounds = call.is_cast or call.has_half or any(twins.of(t) is not None for t in call.inputs)
        if not self.kind.dtype or not rounds or call.op.draws: return None
        exact = (lambda t: twins.exact(t).clone()) if call.op.writes else twins.exact
        # An error of subclasses of tensors that cannot be read, or of operators that are 16-bit only.
        with suppress(Exception), torch.no_grad():
            device = tensors(call.args)[0].device
            args, kwargs = map_tensors(exact, (call.args, call.kwargs))
            if kwargs.get('dtype') in HALF: kwargs['dtype'] = torch.float32
            with torch.autocast(device.type, enabled=False): return call.func(*args, **kwargs)

    def _record_size(self, call, out, exact): # `exact`: `out`, in fp32 if known
        "Record the size of a result, and keep its twin."
        record = self.record
        if call.is_cast or call.op.name not in _MOVES:
            largest = largest_value(exact)
            record.largest = max(record.largest, largest)
            if out.dtype in HALF: record.largest_half, record.is_half = max(record.largest_half, largest), True
        # Rounding errors of what is exactly 0 in fp32 would be 100%.
        if exact is not out and self.fp32.largest: self.twins.keep(out, exact)
        else: self.twins.forget(out)                             # it may be overwritten

    def _record_failure(self, out, exact, was_finite):
        "Record NaN or inf, which came in, or is new: where the result in fp32 is finite, and more than a mask."
        is_new = was_finite if exact is out else largest_value(exact) > 0 and n_nan_or_inf(out[exact.isfinite()]) > 0
        self.record.failed |= is_new
        self.record.is_after |= not is_new

    def _record_product(self, call, out):
        "Record the line of a product in 16 bits that the fp32 run should not have, or that undoes a cast to fp32."
        if call.op.name == '_to_copy' and call.inputs:
            was = call.inputs[0]
            is_float = call.has_half and out.dtype is torch.float32
            if is_float or address(was) in self.floats: self.floats[address(out)] = out
        elif call.op.flops and not call.has_half: self.record.has_fp32_product = True
        elif call.op.flops:
            if not self.kind.dtype: self.record.half_line = users_line() or 'in PyTorch'
            elif any(t.dtype in HALF and address(t) in self.floats for t in call.inputs):
                self.record.undone_line = users_line() or 'PyTorch'

    def _record_merged(self, call, out):
        "Follow whole numbers that fall together in 16 bits through what is computed from them."
        numbers = [*map(self._merged_in, call.inputs)]
        if call.op.name in _CASTS:
            numbers += [merged(t, out.dtype) for t in tensors(call.args) if is_plain(t)]
        if numbers := next(filter(None, numbers), None):
            for o in readable(out): self.merged[address(o)] = numbers, o

    def _merged_in(self, t): return self.merged.get(address(t), [()])[0]

    def compare(self, t):
        "Record the error of a tensor that leaves the module, or enters one inside."
        if not self.fp32.merged: self.record.merged = self._merged_in(t) or self.record.merged
        if not self.kind.dtype: return
        t = t.detach()
        error = relative_error(t, self.twins.exact(t))
        if error * _FP32_NOISE < .1 * torch.finfo(self.kind.dtype).eps:
            self.record.error = max(error, self.record.error)    # in this order, as that may be nan


def users_line() -> str: # 'norm.py:33'
    "Return the line that runs now in the user's code or in a library; '' if PyTorch's modules are all that runs."
    frame: Any = sys._getframe()
    while frame.f_globals.get('__name__') != 'fastai.learner':
        if is_users(frame): return f'{Path(frame.f_code.co_filename).name}:{frame.f_lineno}'
        frame = frame.f_back
    return ''
