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
    at_least: int,
) -> None:
    "Raise a `ValueError` unless `value` is an integer and at least `at_least`."
    if not is_number(value, Integral) or value < at_least:
        raise ValueError(f'{name}={value!r} cannot be used: {name} must be an integer of at least {at_least}.')


def check_above_0(
    name: str, # The argument's name
    value: Any,
    example: str,
) -> None:
    "Raise a `ValueError` unless `value` is a number above 0."
    if not is_number(value) or not value > 0:
        raise ValueError(f'{name}={value!r} cannot be used: {name} must be a number above 0, for example {example}.')
