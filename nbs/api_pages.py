"Makes reference entries from signatures, docments and docstrings, as Markdown; `generate.py` puts them into `api.md`."
import inspect
import re
from enum import Enum
from importlib import import_module
from pathlib import Path

from fastai.learner import Learner
from fastcore.docments import docments

import fastxtend_amp
from fastxtend_amp.precisions import PRECISIONS, Precision

from api_examples import EXAMPLES

PACKAGE = Path(fastxtend_amp.__file__).parent
FIRST = ['to_amp', 'to_bf16', 'to_fp16', 'to_fp32', 'to_tf32', 'to_fp8', 'to_half_weights', 'to_channelslast',
         'precision', 'precision_as', 'amp_context', 'precision_report', 'compare_precision', 'precision_decision']
ELSEWHERE = {'Verdict': 'insight.verdict', 'PrecisionChoice': 'insight.precisions'}  # public, and not in `__all__`
BASE = 'precisions.Precision'                                    # also public; `precision` is a method's anchor
INSIGHT = ['PrecisionReport', 'Verdict', 'PrecisionComparison', 'PrecisionChoice']   # returned by methods
NOT_LISTED = {'learn', 'amp_context', 'needs_loss_scaling', 'arguments', 'open', 'close', 'refuse_others',
              'state_key',                                       # of the package only
              'accumulate', 'read', 'value'}                     # of metrics, for fastai
EVENT = re.compile(r'(before|after)_\w+')


# -- what the code says

def is_ours(obj):
    "Return whether `obj` is written in the package."
    return (getattr(obj, '__module__', None) or '').partition('.')[0] == 'fastxtend_amp'


def is_property(obj): return isinstance(obj, property)


def function_of(obj): return inspect.unwrap(obj.fget if is_property(obj) else obj)


def learner_methods():
    "Return what the package adds to `Learner`, by name; what most readers look for comes first."
    found = {}
    for name, member in vars(Learner).items():
        f = function_of(member)
        is_added = inspect.isfunction(f) and is_ours(f) and not hasattr(f, '__wrapped__')
        if is_added and f.__doc__ and not name.startswith('_'): found[name] = member
    return dict(sorted(found.items(), key=lambda item: FIRST.index(item[0]) if item[0] in FIRST else len(FIRST)))


def public(name):
    "Return a public object by its name."
    if name == BASE: return Precision
    if name in ELSEWHERE: return getattr(import_module(f'fastxtend_amp.{ELSEWHERE[name]}'), name)
    return getattr(fastxtend_amp, name)


def members(cls):
    "Return methods and properties of `cls` that users call, without those of a base class that has an entry."
    if issubclass(cls, Precision) and cls is not Precision: return {}     # it overrides what `Precision` describes
    found, listed = {}, [base for base in cls.__mro__[1:] if base.__name__ in fastxtend_amp.__all__]
    for base in reversed(cls.__mro__):
        if is_ours(base) and not any(issubclass(other, base) for other in listed):
            found |= {n: m for n, m in vars(base).items() if is_property(m) or inspect.isfunction(m)}
    return {n: m for n, m in found.items()
            if not n.startswith('_') and n not in NOT_LISTED and not EVENT.fullmatch(n) and inspect.getdoc(m)}


def meaning(name):
    "Return what an argument of several calls means; what few precisions have, with their names."
    if text := docments(fastxtend_amp.MixedPrecision.__init__).get(name): return text
    texts = {cls.name: text for cls in PRECISIONS.values() if (text := docments(cls.__init__).get(name))}
    text = next(iter(texts.values()), '')
    return f'{text} ({", ".join(texts)})' if texts and len(texts) < 3 and '(' not in text else text


def arguments(f):
    "Return name, type, default and meaning of each argument of `f`; what other calls share is described where it is."
    meanings, found = docments(f, args_kwargs=True), []
    for name, p in inspect.signature(f).parameters.items():
        if name == 'self' or (p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and not meanings.get(name)): continue
        kind = p.annotation if isinstance(p.annotation, str) else inspect.formatannotation(p.annotation)
        kind = '' if p.annotation is p.empty else re.sub(r'(\w+\.)+(?=[A-Z])', '', kind)
        text = ' '.join((meanings.get(name) or meaning(name)).split())
        stars = '**' if p.kind is p.VAR_KEYWORD else ''
        found.append((stars + name, kind, default_text(p.default), text))
    return found


def default_text(default):
    if default is inspect.Parameter.empty: return ''
    if isinstance(default, Enum): default = default.value
    return getattr(default, '__name__', None) or repr(default)


# -- as Markdown

def cell(text): return text.replace('|', '\\|')


def table(obj):
    "Return the arguments of `obj`, or the attributes of what a method returns, as a table; empty without any."
    is_returned = getattr(obj, '__name__', '') in INSIGHT
    rows = []
    for name, kind, default, text in arguments(obj):
        typed = ' = '.join(filter(None, (kind, '' if is_returned else default)))
        rows.append(f'| `{name}` | {cell(f"`{typed}`") if typed else ""} | {cell(text)} |')
    head = '| attribute | type | meaning |' if is_returned else '| argument | type = default | meaning |'
    has_meanings = any(text for *_, text in arguments(obj))
    return '\n'.join([head, '|---|---|---|', *rows]) if has_meanings else ''


def text_of(obj):
    "Return the docstring as Markdown, with addresses as links, without the arguments that a table has."
    doc = (inspect.getdoc(obj) or '').partition('\n\nArguments:\n')[0]
    return re.sub(r'(?<![<(])(https?://[^\s,;>]*[^\s,;>.:])', r'<\1>', doc)


def example(name): return f'```python\n{EXAMPLES[name].strip()}\n```' if name in EXAMPLES else ''


def source_link(obj):
    "Return a link to the file that `obj` is written in."
    f = function_of(obj)
    if not is_ours(f): return ''
    f = vars(f).get('__delwrap__', f)                            # `to_fp16` and others are made from a class
    file = Path(import_module(f.__module__).__file__)
    return f'[source](../fastxtend_amp/{file.relative_to(PACKAGE).as_posix()})'


def entry(name, obj, level=3, key=''):
    "Return an entry: heading, docstring, example, arguments, a link to the source; a class with its members."
    has_arguments = not is_property(obj) and (inspect.isfunction(obj) or inspect.isclass(obj))
    parts = [f'{"#" * level} {name}', text_of(obj), example(key or name)]
    if hasattr(obj, '__members__'): parts.append('\n'.join(f'- `{name}.{m.name}`: `{m.value!r}`' for m in obj))
    elif has_arguments: parts.append(table(obj))
    parts.append(source_link(obj))
    if obj is Precision:
        fields = re.findall(r'^    (\w+): [^#]* # (.+)$', inspect.getsource(obj), re.M)
        methods = {'support': obj.support.__func__, **members(obj)}
        rows = [f'| `{n}` | {cell(text)} |' for n, text in fields]
        rows += [f'| `{n}` | {cell(" ".join(text_of(m).split()))} |' for n, m in methods.items()]
        parts.insert(-1, '\n'.join(['| attribute or method | what it does |', '|---|---|', *rows]))
    elif inspect.isclass(obj) and not hasattr(obj, '__members__'):
        parts += [entry(f'{name}.{n}', m, level + 1) for n, m in members(obj).items()]
    return '\n\n'.join(filter(None, parts))


def learner_part():
    "Return the entries of the methods that the package adds to `Learner`."
    return '\n\n'.join(entry(name, f, key=f'Learner.{name}') for name, f in learner_methods().items())


def training_part():
    "Return the entries of the public names that `insight_part` does not have."
    first = ['MixedPrecision', 'HalfWeights', BASE, 'AMPMode', 'precision_support']
    names = [*first, *sorted({*fastxtend_amp.__all__} - {*first, *INSIGHT}, key=str.lower)]
    return '\n\n'.join(entry(name, public(name)) for name in names)


def insight_part():
    "Return the entries of what reports and comparisons return."
    return '\n\n'.join(entry(name, public(name)) for name in INSIGHT)
