"Errors about arguments, warnings at the user's own line, and the first line of an exception's message."
import inspect, warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from operator import index
from pathlib import Path
from textwrap import shorten
from typing import Any
from weakref import WeakKeyDictionary


def check_argument(
    name: str,
    value: Any,
    is_allowed: Callable[[Any], bool], # A `TypeError` or `AttributeError` in it counts as False
    allowed: str, # In words, for the error
) -> None:
    "Raise a `ValueError` if an argument has a value that is not allowed; True and False do not count as numbers."
    with suppress(TypeError, AttributeError):
        if not isinstance(value, bool) and is_allowed(value): return
    raise ValueError(f'{name}={value!r} cannot be used: it must be {allowed}.')


def check_bool(**values: Any) -> None: # By name
    "Raise a `ValueError` if a value is neither True nor False."
    for name, value in values.items():
        if not isinstance(value, bool): raise ValueError(f'{name}={value!r} cannot be used: it must be True or False.')


def check_integer(least: int, **values: Any) -> None: # By name
    "Raise a `ValueError` if a value is not an integer from `least` on."
    for name, value in values.items():
        check_argument(name, value, lambda n: index(n) >= least, f'an integer of at least {least}')


def check_above_0(**values: float) -> None: # By name
    "Raise a `ValueError` if a value is not above 0."
    for name, value in values.items(): check_argument(name, value, lambda x: x > 0, 'above 0')


_NOT_THE_USERS = ('fastxtend_amp', 'fastai', 'fastcore', 'torch', 'contextlib')


def package_of(code: Any) -> str: # A class, or a frame that runs
    "Return the name of the package that a class, or the code of a frame, is from."
    module = code.__module__ if isinstance(code, type) else code.f_globals.get('__name__', '')
    return module.partition('.')[0]


def is_users(code: Any) -> bool: # A class, or a frame that runs
    "Return whether code is not of this package, fastai, fastcore or PyTorch."
    return package_of(code) not in _NOT_THE_USERS


def users_line(
    frames: Iterable[tuple[Any, int]], # With their lines, as `traceback` walks them
) -> str: # 'norm.py:33'
    "Return the first line in the user's code or in a library; '' if there is none."
    lines = (f'{Path(frame.f_code.co_filename).name}:{line}' for frame, line in frames if is_users(frame))
    return next(lines, '')


_said = WeakKeyDictionary[Any, set[str]]()                       # warnings given, by what they are about


def warn_user(message: str, once_for: Any = None) -> None: # A learner, model or class to warn of only once
    "Warn at the user's own line: the innermost one that is not in this package, fastai, fastcore or PyTorch."
    if once_for is not None:
        said = _said.setdefault(once_for, set())
        if message in said: return
        said.add(message)
    frame: Any = inspect.currentframe()
    while frame.f_back and not is_users(frame): frame = frame.f_back
    # Not `warn`, which would leave out the same words at the same line: a fit in a loop fails again.
    warnings.warn_explicit(message, UserWarning, frame.f_code.co_filename, frame.f_lineno,
                           frame.f_globals.get('__name__'))


def first_line(error: BaseException) -> str:
    "Return the first line of an exception's message, or the name of its type if the message is empty."
    text = str(error).rpartition(':\n\t')[2].strip()             # without fastai's line on the callback
    line = shorten(text.partition('\n')[0], 200, placeholder=' …')
    return line.rstrip('.: ') or type(error).__name__
