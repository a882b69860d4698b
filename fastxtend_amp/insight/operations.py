"""The operations of modules: each operator of a module runs in 16 bits, and beside it in fp32.

The difference of both (`twins.py`) is measured on the outputs of a module, and on what it passes to modules inside.
Each operator is then shown to the observers, each of which looks for one thing and writes it into the record.
"""
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ..compat import traits_of
from ..precisions import Precision
from ..tensors import HALF, map_tensors
from .observers import OBSERVERS, ModuleRecord
from .twins import Followed, Twins
from .values import all_finite, readable, relative_error, tensors_in

_FP32_NOISE = 2.**-23   # relative rounding of fp32
_COUNTS = 'nll_loss_forward', 'nll_loss2d_forward'      # their second result is the sum of the samples' weights


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
        # Fused attention draws only for its dropout, its one argument that is a float.
        is_drawing = 'attention' not in self.name or any(type(a) is float and a for a in args)
        self.draws = self.traits.draws and is_drawing

    def run(self, twin): # What it gives in fp32; None if that is the same
        "Run it, and keep what it gave."
        self.is_exact = twin is None
        self.was_finite = self.is_exact and all(map(all_finite, self.inputs))    # before it writes into one
        self.out = self.func(*self.args, **self.kwargs)
        outs = readable(self.out)[:1] if self.name in _COUNTS else readable(self.out)
        self.results = [*zip(outs, outs if self.is_exact else readable(twin))]


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
        "Return the result for the twins of the inputs; None if nothing has been rounded, or it cannot be compared."
        def fp32(t):
            twin = self.twins.fp32(t)
            return twin.clone() if op.traits.writes else twin

        rounds = op.is_cast or op.has_half or self.twins.include(op.inputs)
        if not self.precision.dtype or not rounds or op.draws: return None
        # It fails for tensor subclasses without this operator, and for operators that exist only in 16 bits.
        with suppress(Exception), torch.no_grad():
            device = tensors_in(op.args)[0].device
            args, kwargs = map_tensors(fp32, (op.args, op.kwargs))
            if kwargs.get('dtype') in HALF: kwargs['dtype'] = torch.float32
            with torch.autocast(device.type, enabled=False): return op.func(*args, **kwargs)

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
