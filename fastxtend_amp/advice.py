"Advice as a call that can be pasted: the method of the learner, with the arguments that differ from their defaults."
from __future__ import annotations

from typing import Any

__all__ = ['call_text']


def call_text(
    method: str, # Name of a method of the learner
    arguments: dict[str, Any], # All of its arguments, by name
    defaults: dict[str, Any], # Their defaults
) -> str: # Such as "learn.to_fp16(init_scale=1024.0)"
    "The call of `method` with those `arguments` that are not the defaults."
    differ = {name: value for name, value in arguments.items() if not _same(value, defaults.get(name))}
    given = [f'{name}={_written(value, name)}' for name, value in differ.items()]
    return f"learn.{method}({', '.join(given)})"


def _same(a: Any, b: Any) -> bool: return a is b or (type(a) is type(b) and a == b)


def _written(value: Any, name: str = '') -> str:
    "`value` as it would be written in a call; an object that cannot be written as `name`."
    if isinstance(value, (list, tuple)): return '[' + ', '.join(map(_written, value)) + ']'
    if isinstance(value, type):
        return f'nn.{value.__name__}' if value.__module__.startswith('torch.nn') else value.__name__
    text = getattr(value, '__name__', None) or repr(value)
    return name or '...' if text.startswith('<') else text
