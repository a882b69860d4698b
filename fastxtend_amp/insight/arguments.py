"Checks of arguments, each an error that names the argument and says what is allowed."
from __future__ import annotations

from numbers import Integral, Real
from typing import Any


def is_number(x: object, kind: type = Real) -> bool:
    "Return whether `x` is a number of this kind, and not a bool."
    return isinstance(x, kind) and not isinstance(x, bool)


def check_count(
    name: str, # The argument's name
    value: Any,
) -> None:
    "Raise a `ValueError` unless `value` is an integer of at least 1."
    if not is_number(value, Integral) or value < 1:
        raise ValueError(f'{name}={value!r} cannot be used: {name} must be an integer of at least 1.')


def check_seconds(max_seconds: Any) -> None:
    "Raise a `ValueError` unless `max_seconds` is a number above 0."
    if not is_number(max_seconds) or not max_seconds > 0:
        raise ValueError(f'max_seconds={max_seconds!r} cannot be used: max_seconds must be a number above 0, for '
                         'example 60.')
