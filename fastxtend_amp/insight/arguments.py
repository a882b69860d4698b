"Checks of arguments that are numbers."
from __future__ import annotations

from numbers import Integral
from typing import Any

from ..common import is_number


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
