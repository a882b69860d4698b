"Adds the meaning of each argument, from the comment beside it, to docstrings: for `help` and fastai's `doc`."
from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from enum import Enum
from textwrap import fill
from typing import Any, NamedTuple

from fastai.learner import Learner
from fastcore.docments import docments

__all__ = ['Argument', 'add_arguments', 'arguments', 'description', 'document', 'learner_methods', 'returned']

HEADING = '\n\nArguments:\n'


class Argument(NamedTuple):
    "An argument as the code describes it: `type` and `default` are text, empty where there is none."
    name: str
    type: str
    default: str
    meaning: str


def _type_text(annotation: Any) -> str:
    if annotation is inspect.Parameter.empty: return ''
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r'(\w+\.)+(?=[A-Z])', '', text)               # classes without their modules


def _default_text(default: Any) -> str:
    if default is inspect.Parameter.empty: return ''
    if isinstance(default, Enum): default = default.value
    return getattr(default, '__name__', None) or repr(default)


def arguments(
    f: Callable, # A function or a class; of a class the arguments of `__init__`
) -> list[Argument]: # In the order of the signature, without `self`
    "Name, type, default and meaning of each argument of `f`, from its signature and the comments beside it."
    meanings = docments(f, args_kwargs=True)
    parameters = inspect.signature(f).parameters
    return [Argument(n, _type_text(p.annotation), _default_text(p.default), ' '.join((meanings.get(n) or '').split()))
            for n, p in parameters.items() if n != 'self']


def returned(
    f: Callable, # A function
) -> str: # Empty where the code says nothing
    "What `f` returns, from the comment beside its signature."
    return ' '.join((docments(f).get('return') or '').split())


def description(
    f: Any, # Anything with a docstring
) -> str:
    "The docstring of `f` without the arguments that `add_arguments` appended."
    return (inspect.getdoc(f) or '').partition(HEADING)[0]


def _lines(argument: Argument) -> str:
    details = [argument.type, argument.default and f'default {argument.default}']
    known = ', '.join(d for d in details if d)
    head = f'{argument.name} ({known})' if known else argument.name
    return fill(f'{head}: {argument.meaning}', width=100, initial_indent='    ', subsequent_indent='        ')


def add_arguments(
    objects: Iterable[Callable], # Functions and classes with docstrings
) -> None:
    "Append a list of the arguments and what is returned to each docstring; what has it already stays as it is."
    for f in objects:
        text = description(f)
        if not text or HEADING in (f.__doc__ or ''): continue
        known = [a for a in arguments(f) if a.meaning]
        if not known: continue
        value = '' if inspect.isclass(f) else returned(f)
        f.__doc__ = text + HEADING + '\n'.join(map(_lines, known)) + (f'\n\nReturns:\n    {value}' if value else '')


def learner_methods() -> dict[str, Any]: # Functions and properties, by name
    "What this package adds to `Learner`: public methods and properties with a docstring of their own."
    package = __name__.partition('.')[0]
    def is_ours(f): return (getattr(f, '__module__', None) or '').partition('.')[0] == package
    found = {}
    for name, member in vars(Learner).items():
        f = member.fget if isinstance(member, property) else member
        is_method = inspect.isfunction(f) and not hasattr(f, '__wrapped__')   # what wraps fastai's own is no addition
        if is_method and is_ours(f) and f.__doc__ and not name.startswith('_'): found[name] = member
    return found


def document(
    names: Iterable[str], # Public names
    namespace: dict[str, Any], # Where they are found
) -> None:
    "Append the arguments to the docstrings of public functions and classes, and of the methods added to `Learner`."
    add_arguments(o for n in names if callable(o := namespace[n]) and not hasattr(o, '__members__'))
    add_arguments(f for f in learner_methods().values() if inspect.isfunction(f))
