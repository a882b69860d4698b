"Arguments as code, for the calls that are printed."
import inspect
from typing import Any

from fastcore.foundation import L
from torch import nn


def as_code(arguments: dict[str, Any]) -> str:
    "Return arguments as code; an object that has no form as code gets the argument's name."
    return ', '.join(f'{name}={_value(value, name)}' for name, value in arguments.items())


def _value(value: Any, name: str) -> str:
    if isinstance(value, str): return repr(value)                # may have a '<' in it
    if isinstance(value, (list, tuple, set, L)): return f"[{', '.join(_value(v, name) for v in value)}]"
    if isinstance(value, type):
        is_torchs = getattr(nn, value.__name__, None) is value
        return f'nn.{value.__name__}' if is_torchs else value.__name__
    code = value.__name__ if inspect.isfunction(value) else repr(value)
    return name if '<' in code or isinstance(value, nn.Module) else code
