"What each operator does inside the modules of a traced model: how large its results are, and where finite numbers end."
from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from ..compat import Operator
from ..convert import HALF, map_tensors
from .statistics import Seen, all_finite, holds_nan_or_inf, largest_value, tensors

__all__ = ['Call', 'OperatorStatistics']

# Operators that only move or make tensors: a container that runs no others computes nothing itself.
_MOVES = frozenset(('clone', '_to_copy', 'copy_', 'cat', 'stack', 'empty', 'empty_like', 'empty_strided', 'new_empty',
                    'new_zeros', 'zeros', 'zeros_like', 'fill_', 'zero_', 'detach', 'detach_', 'ones', 'full', 'arange',
                    'lift_fresh', 'scalar_tensor'))
_CAST = '_to_copy'


class Call:
    "One call of a module under way."
    def __init__(self, seen: Seen, module: Any, parent: Call | None):
        self.seen, self.module, self.parent, self.expected = seen, module, parent, None
        self.grad_out: list[bool] = []                           # was each gradient finite? In the order they came
        self.grad_in: list[bool] = []
        self.counts: Counter = Counter()                         # of operators so far, by name


class OperatorStatistics:
    """Handles the operators of one pass, for `compat.watch_operators`.

    Notes in the innermost module that is running how large its operators' results are, and whether one of them leaves
    finite numbers where the same operator in fp32 does not. Makes random draws in fp32 whatever the dtype they are
    wanted in, so that dropout masks are the same in every precision.
    """
    def __init__(self,
        running: Callable[[], Call | None], # The innermost call under way; None where nothing is to be noted
        low: bool, # Whether the pass runs in low precision
        reference: dict[str, Seen], # What the fp32 pass saw
    ):
        self.running, self.low, self.reference = running, low, reference
        self.computing: set[str] = set()                         # modules that compute something themselves
        self.overflows: list[str] = []                           # modules where inf or NaN begins
        self.negative: list[str] = []                            # where only -inf begins, which may be a mask

    def __call__(self, op: Operator, args: tuple, kwargs: dict) -> Any:
        if op.draws: return draw_in_fp32(op, args, kwargs)
        call = self.running()
        is_cast = self.low and op.name == _CAST and kwargs.get('dtype') in HALF
        if call is None or op.is_view or (op.name in _MOVES and not is_cast): return op.call(*args, **kwargs)
        if not is_cast: self.computing.add(call.seen.name)
        inputs = self._before(op, args)
        out = op.call(*args, **kwargs)
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if not isinstance(first, torch.Tensor) or not first.is_floating_point() or not first.numel(): return out
        key = op.name, call.counts[op.name]
        call.counts[op.name] += 1
        if not self.low: self._in_fp32(call.seen, key, first, inputs)
        elif first.dtype in HALF: self._in_half(call.seen, key, first, op, inputs, kwargs)
        return out

    def _before(self, op, args):
        "The arguments as they are before the operator, which may write into one."
        if not op.changes_input: return args
        return tuple(a.clone() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)

    def _in_fp32(self, seen, key, result, args):
        largest = largest_value(result)
        seen.inside = max(seen.inside, largest)
        seen.operators[key] = max(seen.operators.get(key, 0.), largest)
        if seen.name in self.overflows or not holds_nan_or_inf(result): return
        if not any(map(holds_nan_or_inf, tensors(args))): self.overflows.append(seen.name)

    def _in_half(self, seen, key, result, op, args, kwargs):
        reference = self.reference.get(seen.name)
        expected = reference.operators.get(key) if reference is not None else None
        if expected is None: expected = largest_value(args[0] if op.name == _CAST else result)
        seen.in_half = max(seen.in_half, expected)
        if all_finite(result) or seen.name in self.overflows: return
        wide = _again_in_fp32(op, args, kwargs, result.device.type)
        lost = ~result.isfinite() if wide is None else ~result.isfinite() & wide.isfinite()
        if not lost.any(): return
        names = self.negative if bool((result[lost] == -torch.inf).all()) else self.overflows
        if seen.name not in names: names.append(seen.name)


def _again_in_fp32(op: Operator, args: tuple, kwargs: dict, device_type: str) -> torch.Tensor | None:
    "The first result of the operator on the same values in fp32; None if it does not run so."
    wide = lambda t: t.float() if t.dtype in HALF else t
    kwargs = {k: torch.float32 if v in HALF else v for k, v in kwargs.items() if k != 'out'}
    try:
        with torch.no_grad(), torch.autocast(device_type, enabled=False):
            out = op.call(*map_tensors(wide, args), **map_tensors(wide, kwargs))
    except RuntimeError: return None
    return out[0] if isinstance(out, (tuple, list)) else out


def draw_in_fp32(op: Operator, args: tuple, kwargs: dict) -> Any:
    "The result of an operator that draws random numbers, drawn in fp32."
    x: Any = args[0] if args else None
    half = isinstance(x, torch.Tensor) and x.dtype in HALF
    if half and op.name.endswith('_'):                           # bernoulli_, uniform_, normal_, exponential_ ...
        return x.copy_(op.call(torch.empty_like(x, dtype=torch.float32), *args[1:], **kwargs))
    if half and op.name == 'native_dropout':
        out, mask = op.call(x.float(), *args[1:], **kwargs)
        return out.to(x.dtype), mask
    wanted = kwargs.get('dtype') or (x.dtype if half and op.name.endswith('_like') else None)
    if wanted in HALF: return op.call(*args, **{**kwargs, 'dtype': torch.float32}).to(wanted)
    return op.call(*args, **kwargs)
