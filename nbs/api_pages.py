"""Makes reference entries from signatures, docments and docstrings, as Markdown; `generate.py` puts them into pages.

What several calls share is described once. `help(...)` shows the whole docstring, with sources and errors.
"""
import inspect
import re
from collections import Counter
from enum import Enum
from pathlib import Path
from textwrap import fill

from fastai.learner import Learner
from fastcore.docments import docments

import fastxtend_amp
from api_examples import EXAMPLES
from fastxtend_amp.insight.report_result import Verdict
from fastxtend_amp.precisions import PRECISIONS

HERE = Path(__file__).parent
LOOP = 'precision_report without a learner'                      # `fastxtend_amp.precision_report`
PAGES = {                                                        # each with the names it describes, in this order
    'api_methods': ['to_amp', 'to_bf16', 'to_fp16', 'to_fp32', 'to_tf32', 'to_fp8', 'to_half_weights', 'precision_as',
                    'amp_context'],
    'api_reports': ['precision_report', 'compare_precision', 'precision_decision', LOOP, 'PrecisionReport', 'Verdict',
                    'PrecisionComparison'],
    'api_callback': ['MixedPrecision', 'AMPMode', 'LossScaleMetric', 'SkippedStepsMetric'],
    'api_helpers': ['fused', 'kahan', 'is_depthwise', 'is_grouped', 'precision_support']}
PAGE_OF = {name: page for page, names in PAGES.items() for name in names}
INSIGHT = ['PrecisionReport', 'Verdict', 'PrecisionComparison']  # returned by methods
LISTED = {'column of `table`': 'Columns of `table`', '`verdict`': 'Values of `verdict`'}   # heads of lists
WHOLE = {'to_amp', 'to_fp32', 'amp_context'}                     # shown with all paragraphs
MEMBERS = {'fp32_module_names', 'scale', 'scales', 'skips', 'skipped', 'state_dict', 'load_state_dict', 'scale_loss',
           'plot_scales', 'fp32_modules', 'call', 'calls', 'plot', 'apply'}  # of classes; the others are ours
FOR_HELP = re.compile(r'Raises|Source|Interval|In `table`')      # paragraphs that only `help` shows


# -- what the code says

def is_ours(obj):
    "Return whether `obj` is written in the package."
    return (getattr(obj, '__module__', None) or '').partition('.')[0] == 'fastxtend_amp'


def is_property(obj): return isinstance(obj, property)


def function_of(obj): return inspect.unwrap(obj.fget if is_property(obj) else obj)


def learner_methods():
    "Return what the package adds to `Learner`, by name."
    found = {}
    for name, member in vars(Learner).items():
        f = function_of(member)
        is_added = inspect.isfunction(f) and is_ours(f) and not hasattr(f, '__wrapped__')
        if is_added and f.__doc__ and not name.startswith('_'): found[name] = member
    return found


def described():
    "Return all that users call, by the heading of its entry."
    names = {name: getattr(fastxtend_amp, name) for name in fastxtend_amp.__all__}
    return names | {LOOP: names['precision_report'], 'Verdict': Verdict} | learner_methods()


def members(cls):
    "Return methods and properties of `cls` that users call, without those of a base class that has an entry."
    found, listed = {}, [base for base in cls.__mro__[1:] if base.__name__ in fastxtend_amp.__all__]
    for base in reversed(cls.__mro__):
        if is_ours(base) and not any(issubclass(other, base) for other in listed):
            found |= {n: m for n, m in vars(base).items() if is_property(m) or inspect.isfunction(m)}
    return {n: m for n, m in found.items()
            if not n.startswith('_') and inspect.getdoc(m)}


def meaning(name):
    "Return what an argument means that a method accepts for a precision."
    texts = (docments(f.__init__).get(name) for f in (fastxtend_amp.MixedPrecision, *PRECISIONS.values()))
    return next(filter(None, texts), '')


def arguments(f):
    "Return name, type, default and meaning of each argument of `f`."
    meanings, found = docments(f, args_kwargs=True), []
    for name, p in inspect.signature(f).parameters.items():
        if name == 'self' or (p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and not meanings.get(name)): continue
        kind = type_text(p.annotation)
        text = ' '.join((meanings.get(name) or meaning(name)).split())
        stars = {p.VAR_POSITIONAL: '*', p.VAR_KEYWORD: '**'}.get(p.kind, '')
        found.append((stars + name, kind, default_text(p.default), text))
    return found


def type_text(annotation):
    "Return an annotation without modules and spaces; '' if it says nothing."
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r'(\w+\.)+(?=\w)', '', text).replace(' | ', '|')
    return '' if text in ('_empty', 'Any', 'None') or text.startswith(('Iterator', 'AbstractContext')) else text


def default_text(default):
    if default is inspect.Parameter.empty: return ''
    if isinstance(default, Enum): default = default.value
    return getattr(default, '__name__', None) or repr(default)


def shared():
    "Return the arguments that several `to_...` methods have in common: (name, type, default) and meaning."
    rows = [row for name, f in learner_methods().items() if name.startswith('to_') for row in arguments(f)]
    counted = Counter(row[:3] for row in rows)
    return {key: next(row[3] for row in rows if row[:3] == key) for key, n in counted.items() if n > 1}


# -- as Markdown

def line(name, default, text):
    "Return an argument with its default, or an attribute."
    return f'- `{name}{"=" * bool(default)}{default}`: {text}'


def argument_lines(obj):
    "Return a list of the arguments of `obj` that are not shared, or attributes of what a method returns."
    if getattr(obj, '__name__', '') in INSIGHT:
        return '\n'.join(['Attributes:\n', *(line(n, '', text) for n, *_, text in arguments(obj) if text)])
    common, above = shared(), set[str]()
    if obj is fastxtend_amp.precision_report:
        above = {n for n, *_ in arguments(learner_methods()['precision_report'])}
    lines = [line(n, '', text) for n, kind, default, text in arguments(obj)
             if text and (n, kind, default) not in common and n not in above]
    return '\n'.join(lines) + '\n\nThe others are [as above](#precision_report).' * bool(above)


def signature_line(name, obj):
    "Return a call with types and defaults, as fastai writes them, and what it returns."
    names = []
    for n, p in inspect.signature(obj).parameters.items():
        if n == 'self': continue
        if p.kind is p.KEYWORD_ONLY and not any(found.startswith('*') for found in names): names.append('*')
        kind, default = type_text(p.annotation), default_text(p.default)
        if p.kind is p.VAR_POSITIONAL: names.append('*' + n)
        else: names.append('**' * (p.kind is p.VAR_KEYWORD) + n + ':' * bool(kind) + kind
                           + '=' * bool(default) + default)
    kind = type_text(inspect.signature(obj).return_annotation)
    returned = f' -> {kind}' if kind.isidentifier() and kind != 'Learner' else ''
    call = f'`{name}({", ".join(names)}){returned}`'             # a browser breaks it where the window ends
    return fill(call, 120, break_long_words=False, break_on_hyphens=False)


def text_of(obj):
    "Return the first paragraph of the docstring, or all, as Markdown; `help` shows the rest."
    doc = (inspect.getdoc(obj) or '').partition('\n\nArguments:\n')[0]
    parts = [part for part in doc.split('\n\n') if not FOR_HELP.match(part)]
    if inspect.isclass(obj) and obj.__name__ in INSIGHT: return '\n\n'.join(map(as_list, parts))
    return '\n\n'.join(parts) if getattr(obj, '__name__', '') in WHOLE else parts[0]


def as_list(part):
    "Return a table of a docstring as a list of its first two columns; other paragraphs as they are."
    if not part.startswith('|'): return part
    (head, *_), _, *rows = [row.strip('| ').split(' | ') for row in part.splitlines()]
    return '\n'.join([f'{LISTED.get(head, head)}:\n', *(f'- {name}: {text}' for name, text, *_ in rows)])


def member_line(name, obj):
    "Return a method or property of a class as an item of a list; a method with its arguments."
    found = [] if is_property(obj) else arguments(obj)
    given = ', '.join(n + '=' * bool(default) + default for n, _, default, _ in found)
    given = '' if is_property(obj) else f'({given})'
    return f'- `{name}{given}`: {" ".join(inspect.getdoc(obj).partition(chr(10) * 2)[0].split())}'


def entry(name, obj):
    "Return an entry: heading, signature, docstring, example, arguments, and members of a class."
    first, _, rest = text_of(obj).partition('\n\n')
    parts = [f'## {name}', first, f'```python\n{EXAMPLES[name].strip()}\n```', rest]
    if hasattr(obj, '__members__'): parts.append(', '.join(f'`{name}.{m.name}`' for m in obj))
    elif not is_property(obj) and (inspect.isfunction(obj) or inspect.isclass(obj)):
        found = members(obj) if inspect.isclass(obj) else {}
        lines = '\n'.join(member_line(n, m) for n, m in found.items() if n in MEMBERS)
        explained = any(text for *_, text in arguments(obj))
        if name not in INSIGHT and explained: parts.insert(1, signature_line(name.split()[0], obj))
        named = name in INSIGHT or not lines                     # what a method returns has such a line already
        parts.append((argument_lines(obj) + ('\n' if named else '\n\nAttributes:\n\n') + lines).strip())
    return '\n\n'.join(filter(None, parts))


def address(name):
    "Return where in the manual an entry is."
    return f'{PAGE_OF[name]}.md#{name.lower().replace(" ", "-")}'


def page(name):
    "Return the entries of a page."
    return '\n\n'.join(entry(n, described()[n]) for n in PAGES[name])


def names_part():
    "Return the list of pages, each with its entries."
    lines = []
    for name, entries in PAGES.items():
        title = (HERE / f'{name}.md').read_text(encoding='utf-8').partition('\n')[0].removeprefix('# API: ')
        lines.append(f'- [{title.capitalize()}]({name}.md): ' + ', '.join(f'[`{e}`]({address(e)})' for e in entries))
    return '\n'.join(lines)


def shared_part():
    "Return the list of shared arguments."
    return '\n'.join(line(name, default, text) for (name, _, default), text in shared().items())
