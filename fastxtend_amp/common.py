"Small helpers that several files share: colours of precisions, DTensors, errors and warnings."
from __future__ import annotations

import inspect, sys, warnings
from typing import Any

__all__ = ['PRECISION_COLORS', 'first_line', 'is_dtensor', 'message_of', 'type_name', 'warn_user']

# One colour for a precision in every plot.
PRECISION_COLORS = {'fp32': '#4c566a', 'bf16': '#2a78b8', 'fp16': '#d1701f', 'half weights': '#17a2a2'}

def first_line(error: BaseException, limit: int = 200) -> str:
    "Return what an exception says, in one line; its type's name where it says nothing."
    lines = message_of(error).strip().splitlines()
    return lines[0][:limit].rstrip('.: ') if lines else type(error).__name__


def message_of(error: BaseException) -> str:
    "Return what an exception says, without the line on the callback that fastai puts before it."
    return str(error).rpartition(':\n\t')[2]


def is_dtensor(t: Any) -> bool:
    "Return whether `t` is a DTensor, as FSDP2's `fully_shard` makes of parameters."
    module: Any = sys.modules.get('torch.distributed.tensor')    # imported by whoever made a DTensor, and not before
    return module is not None and isinstance(t, module.DTensor)


_NOT_THE_USERS = ('fastxtend_amp', 'fastai', 'fastcore', 'torch', 'contextlib')


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    "Warn at the user's own line: the innermost one that is not in this package, fastai, fastcore or PyTorch."
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_globals.get('__name__', '').partition('.')[0] in _NOT_THE_USERS:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=max(level, 1))


def type_name(kind: type) -> str:
    "Return the name of a class as it is written in code: `nn.LayerNorm` for PyTorch's modules."
    return f'nn.{kind.__name__}' if kind.__module__.startswith('torch.nn') else kind.__name__
