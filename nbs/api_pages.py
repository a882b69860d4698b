"Sphinx extension: the directive `api`, which writes reference entries from the code."
import inspect
import re
from ast import literal_eval
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path

from fastai.learner import Learner
from fastcore.docments import docments
from sphinx.util.docutils import SphinxDirective

import fastxtend_amp
from fastxtend_amp import HalfWeights, MixedPrecision

from api_examples import EXAMPLES

PACKAGE = Path(fastxtend_amp.__file__).parent
FIRST = ['to_fp16', 'to_bf16', 'to_tf32', 'to_fp8', 'to_amp', 'to_fp32', 'precision', 'precision_report',
         'compare_precision', 'precision_as', 'precision_decision', 'to_half_weights']
ELSEWHERE = {'Verdict': 'insight.verdict', 'PrecisionChoice': 'insight.precisions'}  # public, and not in `__all__`
NOT_LISTED = {'name', 'learn', 'amp_context', 'check_modules', 'replace', 'skips_in_a_row', 'needs_loss_scaling',
              'fp32_module_names',
              'arguments', 'mode_on', 'open_fit', 'take_step', 'end_step', 'training'}    # for the package itself
RETURNED = {'PrecisionReport', 'Verdict', 'PrecisionComparison', 'PrecisionChoice'}            # by methods
ATTRIBUTES = {'mode': "The precision, such as 'bf16'", 'verdict': 'What the report says', 'reason': 'Why'}
EVENT = re.compile(r'(before|after)_\w+')


# -- what the code says

def is_ours(obj):
    "Return whether `obj` is written in the package."
    return (getattr(obj, '__module__', None) or '').partition('.')[0] == 'fastxtend_amp'


def is_property(obj):
    "Return whether `obj` is read as an attribute: a property, or `Learner.precision`."
    return isinstance(obj, (property, type(vars(Learner)['precision'])))


def function_of(obj): return inspect.unwrap(getattr(obj, 'fget', type(obj).__get__) if is_property(obj) else obj)


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
    if name in ELSEWHERE: return getattr(import_module(f'fastxtend_amp.{ELSEWHERE[name]}'), name)
    return getattr(fastxtend_amp, name)


def members(cls):
    "Return methods and properties of `cls` that users call, without those of a base class that has an entry."
    found, listed = {}, [base for base in cls.__mro__[1:] if base.__name__ in fastxtend_amp.__all__]
    for base in reversed(cls.__mro__):
        if is_ours(base) and not any(issubclass(other, base) for other in listed):
            found |= {n: m for n, m in vars(base).items() if is_property(m) or inspect.isfunction(m)}
    return {n: m for n, m in found.items()
            if not n.startswith('_') and n not in NOT_LISTED and not EVENT.fullmatch(n) and inspect.getdoc(m)}


def described_elsewhere(f):
    "Return the function or class whose arguments a method of `Learner` passes on; None without one."
    return getattr(f, '__delwrap__', None) if inspect.isfunction(f) else None


def arguments(f):
    "Return name, type, default and meaning of the arguments that `f` itself has, without those that it passes on."
    meanings, other = docments(f, args_kwargs=True), described_elsewhere(f)
    theirs = inspect.signature(other).parameters if other else {}
    found = []
    for name, p in inspect.signature(f).parameters.items():
        if name in ('self', 'args', 'kwargs') or name in theirs: continue
        kind = p.annotation if isinstance(p.annotation, str) else inspect.formatannotation(p.annotation)
        kind = '' if p.annotation is p.empty else re.sub(r'(\w+\.)+(?=[A-Z])', '', kind)
        meaning = ' '.join((meanings.get(name) or '').split())
        stars = '**' if p.kind is p.VAR_KEYWORD else ''
        found.append((stars + name, '' if kind == 'Any' else kind, default_text(p.default), meaning))
    return found


def default_text(default):
    if default is inspect.Parameter.empty: return ''
    if isinstance(default, Enum): default = default.value
    return getattr(default, '__name__', None) or repr(default)


# -- as Markdown

def code(text): return f'`{text}`' if text else ''
def cell(text): return text.replace('|', '\\|')


def typed(meaning, kind, default=''):
    "Return a meaning with its type, unless the default shows it."
    is_shown = not kind or (default and type(parsed(default)).__name__ == kind)
    return cell(meaning if is_shown else f'{meaning} ({code(kind)})')


def parsed(default):
    try: return literal_eval(default)
    except ValueError: return default


def attributes(cls):
    "Return the fields of a dataclass as a table; empty for another class."
    if not is_dataclass(cls): return ''
    rows = [f'| `{name}` | {typed(meaning or ATTRIBUTES[name], kind)} |' for name, kind, _, meaning in arguments(cls)]
    return '\n'.join(['| attribute | meaning |', '|---|---|', *rows])


def table(obj):
    "Return the arguments of `obj` as a table, empty without any; their defaults are in its signature."
    if getattr(obj, '__name__', '') in RETURNED: return attributes(obj)
    theirs = arguments(MixedPrecision) if obj is HalfWeights else []
    rows = [f'| `{name}` | {typed(meaning, kind, default)} |' for name, kind, default, meaning in arguments(obj)
            if (name, kind, default, meaning) not in theirs]
    same = [f'`{a[0]}`' for a in arguments(obj) if a in theirs]
    more = f'\n\n{", ".join(same)}: as in [`MixedPrecision`](#MixedPrecision).' if same else ''
    return '\n'.join(['| argument | meaning |', '|---|---|', *rows]) + more if rows else ''


def passed_on(obj):
    "Return a sentence for arguments that are described elsewhere."
    to = described_elsewhere(obj)
    if to is None: return ''
    name = to.__qualname__.removesuffix('.__init__')
    return f'More arguments: those of [`{name}`](#{name}){" but those for fp16" if obj.__name__ == "to_bf16" else ""}.'


def signature_text(obj):
    "Return the names and defaults of an object's own arguments."
    shown = [name + (f'={default}' if default else '') for name, _, default, _ in arguments(obj)]
    return f"({', '.join([*shown, *(['...'] if described_elsewhere(obj) else [])])})"


def text_of(obj):
    "Return the docstring as Markdown, with addresses as links."
    return re.sub(r'(?<![<(])(https?://[^\s,;>]*[^\s,;>.:])', r'<\1>', inspect.getdoc(obj) or '')


def example(name):
    return f'```python\n{EXAMPLES[name].strip()}\n```' if name in EXAMPLES else ''


def source_link(obj):
    "Return a link to the line of `obj` on the page with its module's source."
    f = function_of(obj)
    if not is_ours(f): return ''
    return f'<a class="source-link" href="source/{f.__module__}.html#L{inspect.getsourcelines(f)[1]}">source</a>'


def entry(kind, name, obj, fence, inside='', key=''):
    "Return an entry: signature, a link to the source, docstring, example, arguments."
    is_function = not is_property(obj)
    head = name + signature_text(obj) if is_function and name not in RETURNED else name
    parts = [f'{fence}{{py:{kind}}} {head}', f'{source_link(obj)} {text_of(obj)}', example(key or name)]
    if is_function: parts += [table(obj), passed_on(obj)]
    return '\n\n'.join([*filter(None, parts), inside, fence])


def enumeration(name, obj, fence):
    "Return an entry for an enum: its members, no arguments."
    lines = '\n'.join(f'- `{name}.{m.name}`: `{m.value!r}`' for m in obj)
    parts = [f'{fence}{{py:class}} {name}(value)', f'{source_link(obj)} {text_of(obj)}', example(name), lines, fence]
    return '\n\n'.join(filter(None, parts))


def markdown(name):
    "Return the entry of a public name, with the methods of a class inside."
    obj = public(name)
    if inspect.isfunction(obj): return entry('function', name, obj, '::::')
    if hasattr(obj, '__members__'): return enumeration(name, obj, '::::')
    if not inspect.isclass(obj): return '\n\n'.join((f'::::{{py:data}} {name}', text_of(obj), example(name), '::::'))
    kind = {True: 'property', False: 'method'}
    inner = [entry(kind[is_property(m)], n, m, '::::', key=f'{name}.{n}') for n, m in members(obj).items()]
    return entry('class', name, obj, ':::::', '\n\n'.join(inner))


def learner_entry(name, f):
    return entry('property' if is_property(f) else 'method', f'Learner.{name}', f, '::::')


def summary():
    "Return a table with the first sentence about each public name, or its first clause if that is long."
    named = {f'Learner.{n}': f for n, f in learner_methods().items()}
    named |= {n: public(n) for n in [*fastxtend_amp.__all__, *ELSEWHERE]}
    def first(obj):
        sentence = re.split(r'(?<=\w)[.:;](?=\s|$)', inspect.getdoc(obj).split('\n\n')[0])[0]
        sentence = sentence.rstrip('.')
        clause = sentence.partition(', ')[0]
        return clause if len(clause.split()) > 8 and not sentence.endswith('as a metric') else sentence
    rows = [f'| [`{n.removeprefix("Learner.")}`](#{n}) | {cell(" ".join(first(obj).split()))} |'
            for n, obj in named.items()]
    return '\n'.join(['| name | meaning |', '|---|---|', *rows])


class Api(SphinxDirective):
    """Entries for public names: `Learner` means the methods added to it, `others` the names that are left over.

    `summary` is a table of all.
    """
    required_arguments, final_argument_whitespace = 1, True

    def run(self):
        done = self.env.metadata.setdefault('api names', {})
        listed = done.setdefault(self.env.docname, set())
        texts = []
        for name in self.arguments[0].split():
            if name == 'Learner':
                texts += [learner_entry(n, f) for n, f in learner_methods().items()]
                continue
            if name == 'summary':
                texts.append(summary())
                continue
            names = sorted(set(fastxtend_amp.__all__) - listed) if name == 'others' else [name]
            listed.update(names)
            texts += [markdown(n) for n in names]
        for module in sorted(PACKAGE.rglob('*.py')): self.env.note_dependency(str(module))
        return self.parse_text_to_nodes('\n\n'.join(texts))


# -- pages with the source

def source_pages(app):
    "Yield a page for each module with its source; line 12 has the anchor L12."
    if app.builder.name != 'html': return
    for file in sorted(PACKAGE.rglob('*.py')):
        parts = file.relative_to(PACKAGE.parent).with_suffix('').parts
        name, text = '.'.join(parts).removesuffix('.__init__'), file.read_text(encoding='utf-8')
        lines = app.builder.highlighter.highlight_block(text, 'python', linenos=False).split('\n')
        lines[0] = lines[0].replace('<pre>', '<pre><span id="L1"></span>')
        numbered = [lines[0], *(f'<span id="L{n}"></span>{line}' for n, line in enumerate(lines[1:], 2))]
        yield f'source/{name}', {'title': name, 'body': f'<h1>{name}</h1>' + '\n'.join(numbered)}, 'page.html'


def forget(app, env, docname): env.metadata.get('api names', {}).pop(docname, None)


def setup(app):
    app.add_directive('api', Api)
    app.connect('html-collect-pages', source_pages)
    app.connect('env-purge-doc', forget)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
