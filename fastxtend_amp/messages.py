"Errors about arguments, warnings at the user's own line, and what an exception says in one line."
import inspect, warnings
from collections.abc import Callable
from contextlib import suppress
from textwrap import shorten
from typing import Any


def check_argument(
    name: str,
    value: Any,
    is_allowed: Callable[[Any], bool], # A `TypeError` in it, of a value of another type, counts as False
    allowed: str, # In words, for the error
) -> None:
    "Raise a `ValueError` if an argument has a value that is not allowed."
    with suppress(TypeError):
        if is_allowed(value): return
    raise ValueError(f'{name}={value!r} cannot be used: it must be {allowed}.')


_NOT_THE_USERS = ('fastxtend_amp', 'fastai', 'fastcore', 'torch', 'contextlib')


def is_users(frame: Any) -> bool:
    "Return whether a frame runs code that is not of this package, fastai, fastcore or PyTorch."
    return frame.f_globals.get('__name__', '').partition('.')[0] not in _NOT_THE_USERS


def warn_user(message: str) -> None:
    "Warn at the user's own line: the innermost one that is not in this package, fastai, fastcore or PyTorch."
    frame, level = inspect.currentframe(), 1
    while frame and not is_users(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def first_line(error: BaseException) -> str:
    "Return what an exception says, in one line; its type's name where it says nothing."
    text = str(error).rpartition(':\n\t')[2].strip()             # without fastai's line on the callback
    line = shorten(text.partition('\n')[0], 200, placeholder=' …')
    return line.rstrip('.: ') or type(error).__name__
