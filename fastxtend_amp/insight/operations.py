"""The operations of modules: each operator of a module runs in 16 bits, and beside it in fp32.

The fp32 result is the twin of the 16-bit one, and the next operator in fp32 reads the twins of its inputs. A module has
twins only for the results of its own operators; its inputs, and the outputs of modules inside, count as exact. So the
error of a module is that of its own arithmetic, measured on its outputs and on what it passes to modules inside.

Each operator is then shown to the observers, each of which looks for one thing and writes it into the record.
"""
import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ..compat import traits_of
from ..precisions import Precision
from ..precisions.matching import ROOT
from ..tensors import HALF, map_tensors
from .observers import OBSERVERS
from .values import Followed, Twins, all_finite, readable, relative_error, tensors

LOSS = 'loss function'      # its name among the modules; includes callbacks after the forward pass
BACKWARD = 'backward pass'  # where an error comes from, after the loss

_FP32_NOISE = 2.**-23   # relative rounding of fp32
_COUNTS = 'nll_loss_forward', 'nll_loss2d_forward'      # their second result is the sum of the samples' weights


@dataclass
class ModuleRecord:
    "The record of one module: of its own operators, not those of modules inside; over all calls and batches."
    name: str
    type: str
    reference: Any = None                                        # its record in the fp32 run; empty without one
    error = math.nan                                             # largest relative error of its own arithmetic
    # Work, the same on each machine.
    work = 0
    # Sizes.
    largest = 0.                                                 # absolute finite result, in fp32 if that is known
    largest_half = 0.                                            # the same of 16-bit results only
    is_of_input = False                                          # whether the largest is an input, cast to 16 bits
    is_half = False                                              # whether it has 16-bit results
    # NaN and inf.
    failed = False                                               # whether they first appear in it
    is_after = False                                             # whether they came in
    # Products of matrices.
    has_product = False
    half_line = ''                                               # 'net.py:33', of one in 16 bits in the fp32 run
    undone_line = ''                                             # the same of one whose `.float()` autocast undoes
    # Whole numbers.
    merged = ''                                                  # two that become equal in it
    shows_merged = False                                         # whether its results depend on such numbers
    # A constant that becomes 0 or 1, and that results need: what it becomes, its operator and line.
    lost = ()
    # Gradients of outputs and parameters.
    grad = 0.                                                    # largest absolute one
    grad_sum = 0.                                                # sum of their absolute values
    n_grads = 0                                                  # how many are finite and not 0
    n_zeros = 0                                                  # how many are 0


def named(name: str) -> str:
    "Return the name of a module, or of what else failed, for a message."
    own = {ROOT: "the model's own `forward`", LOSS: 'the loss function', BACKWARD: 'the backward pass'}
    return name if name.startswith('callback `') else own.get(name, f"'{name}'")


class Operation:
    "A call of one of PyTorch's operators; after `run`, what it gave as well."
    is_exact: bool                                               # whether nothing was rounded
    was_finite: bool                                             # whether its inputs were, if nothing was rounded
    out: Any
    results: list[tuple[torch.Tensor, torch.Tensor]]             # each with its value in fp32

    def __init__(self, func, args, kwargs):
        self.func, self.traits, self.args, self.kwargs = func, traits_of(func), args, kwargs
        self.name, self.inputs = self.traits.name, readable((args, kwargs))
        self.has_half = any(t.dtype in HALF for t in self.inputs)
        self.is_cast = self.name == '_to_copy' and kwargs.get('dtype') in HALF

    def run(self, twin): # What it gives in fp32; None if that is the same
        "Run it, and keep what it gave."
        self.is_exact = twin is None
        self.was_finite = self.is_exact and all(map(all_finite, self.inputs))    # before it writes into one
        self.out = self.func(*self.args, **self.kwargs)
        outs = readable(self.out)[:1] if self.name in _COUNTS else readable(self.out)
        self.results = [*zip(outs, outs if self.is_exact else readable(twin))]

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


@dataclass
class RunningModule:
    "A module that runs, with the tensors that are followed in it."
    record: ModuleRecord
    precision: Precision
    handled: BaseException | None                                # in whose `except` block it was called
    twins: Twins = field(default_factory=Twins)
    floats: Followed = field(default_factory=Followed)           # what `.float()` gave, also cast back
    merged: Followed = field(default_factory=Followed)           # what whole numbers that became equal gave

    def run(self, op):
        "Run an operator of the module, beside its twin, and show it to the observers."
        if op.traits.makes_nothing: return op.func(*op.args, **op.kwargs)
        twin = self._twin(op)                                    # first, as the operator may write into its inputs
        op.run(twin)
        for observe in OBSERVERS: observe(self, op)
        # Where the reference has only 0, or did not run the module, any rounding would be an error of 100%.
        has_no_error = op.is_exact or not self.record.reference.largest
        for out, fp32 in op.results:
            if has_no_error: self.twins.forget(out)
            else: self.twins.keep(out, fp32)
        return op.out

    def _twin(self, op):
        "Return the result in fp32; None if nothing has been rounded yet, or if it cannot be compared."
        rounds = op.is_cast or op.has_half or self.twins.include(op.inputs)
        if not self.precision.dtype or not rounds or op.traits.draws: return None
        return op.run_in_fp32(self.twins)

    def compare(self, t):
        "Record the error of a tensor that leaves the module, or enters one inside."
        self.record.shows_merged |= self.merged.include([t])
        if not self.precision.dtype: return
        t = t.detach()
        error = relative_error(t, self.twins.fp32(t))
        # Of the same arithmetic, fp32 makes an error of about this.
        in_fp32 = error / torch.finfo(self.precision.dtype).eps * _FP32_NOISE
        if not in_fp32 < .1: return                              # unknown, or noise in fp32 as well
        if not error <= self.record.error: self.record.error = error     # which is nan at first
