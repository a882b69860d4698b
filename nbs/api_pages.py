"Sphinx extension: the directives `api` and `files`, which write reference pages from the code."
import ast
import inspect
import re
from pathlib import Path

from sphinx.util.docutils import SphinxDirective

import fastxtend_amp
from fastxtend_amp.docs_text import arguments, description, learner_methods, returned

PACKAGE = Path(fastxtend_amp.__file__).parent
FIRST = ['to_fp16', 'to_bf16', 'to_amp', 'to_fp32', 'precision', 'precision_report', 'compare_precision',
         'to_half_weights']
NOT_LISTED = {'name', 'order', 'learn', 'training', 'keep_call'}      # of a callback: what fastai reads, not its users
EVENT = re.compile(r'(before|after)_\w+')


def module_name(obj):
    "The module of the package that `obj` is written in; empty for anything else."
    obj = obj.fget if isinstance(obj, property) else obj
    name = getattr(inspect.unwrap(obj), '__module__', None) or ''
    return name if name.partition('.')[0] == 'fastxtend_amp' else ''


def ordered_methods():
    "What the package adds to `Learner`, the calls that most readers look for first."
    found = learner_methods()
    names = sorted(found, key=lambda n: FIRST.index(n) if n in FIRST else len(FIRST))
    return {n: found[n] for n in names}


def members(cls):
    """Public methods and properties of `cls` that the package writes; not the events of fastai's loop.

    What a base class has that is listed itself stands there.
    """
    found = {}
    for base in reversed(cls.__mro__):
        is_listed_itself = base is not cls and base.__name__ in fastxtend_amp.__all__
        if is_listed_itself or not base.__module__.startswith('fastxtend_amp'): continue
        found |= {n: m for n, m in vars(base).items() if isinstance(m, property) or inspect.isfunction(m)}
    return {n: m for n, m in found.items() if is_listed(n) and description(m)}


def is_listed(name): return not (name.startswith('_') or name in NOT_LISTED or EVENT.fullmatch(name))


def source_link(obj):
    "A link to the line of `obj` on the page with its module's source."
    f = inspect.unwrap(obj.fget if isinstance(obj, property) else obj)
    line = inspect.getsourcelines(f)[1]
    return f'<a class="source-link" href="source/{f.__module__}.html#L{line}">source</a>'


def cell(text): return text.replace('|', '\\|')


def table(obj):
    "The arguments of `obj` as a table; empty without any."
    rows = [f'| `{a.name}` | {cell(a.meaning)} | {code(a.default)} | {cell(code(a.type))} |' for a in arguments(obj)]
    return '\n'.join(['| argument | meaning | default | type |', '|---|---|---|---|', *rows]) if rows else ''


def code(text): return f'`{text}`' if text else ''


def signature_text(obj):
    "Names and defaults; the types are in the table below."
    shown, bare = [], False
    for a, p in zip(arguments(obj), [p for n, p in inspect.signature(obj).parameters.items() if n != 'self']):
        if p.kind is p.KEYWORD_ONLY and not bare: shown.append('*')
        bare = bare or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        stars = {p.VAR_POSITIONAL: '*', p.VAR_KEYWORD: '**'}.get(p.kind, '')
        shown.append(f'{stars}{a.name}' + (f'={a.default}' if a.default else ''))
    return f"({', '.join(shown)})"


def text_of(obj):
    "The docstring as Markdown, with addresses as links."
    return re.sub(r'(?<![<(])(https?://[^\s,;>]*[^\s,;>.:])', r'<\1>', description(obj))


def entry(kind, name, obj, fence, inside=''):
    "One entry in Markdown: signature, docstring, arguments, what it returns, a link to its source."
    head = name if isinstance(obj, property) or kind == 'data' else name + signature_text(obj)
    parts = [f'{fence}{{py:{kind}}} {head}', text_of(obj)]
    if not isinstance(obj, property): parts.append(table(obj))
    if inspect.isfunction(obj) and (value := returned(obj)): parts.append(f'**Returns:** {value}')
    if module_name(obj): parts.append(source_link(obj))
    return '\n\n'.join([*filter(None, parts), inside, fence])


def enumeration(name, obj, fence):
    "An entry for an enum: its members, no arguments."
    lines = '\n'.join(f'- `{name}.{m.name}`: `{m.value!r}`' for m in obj)
    return f'{fence}{{py:class}} {name}(value)\n\n{text_of(obj)}\n\n{lines}\n\n{source_link(obj)}\n{fence}'


def markdown(name, obj):
    "The entry of a public name, with the methods of a class inside."
    if inspect.isfunction(obj): return entry('function', name, obj, '::::')
    if hasattr(obj, '__members__'): return enumeration(name, obj, '::::')
    kind = {True: 'property', False: 'method'}
    inner = [entry(kind[isinstance(m, property)], n, m, '::::') for n, m in members(obj).items()]
    return entry('class', name, obj, ':::::', '\n\n'.join(inner))


class Api(SphinxDirective):
    """Entries for public names; `Learner` stands for the methods added to it, `others` for the names left over.

    Nothing public can be missing, however the page is arranged.
    """
    required_arguments, final_argument_whitespace = 1, True

    def run(self):
        done = self.env.metadata.setdefault('api names', {})
        listed = done.setdefault(self.env.docname, set())
        texts = []
        for name in self.arguments[0].split():
            if name == 'Learner':
                texts += [self.learner_entry(n, f) for n, f in ordered_methods().items()]
                continue
            names = sorted(set(fastxtend_amp.__all__) - listed) if name == 'others' else [name]
            listed.update(names)
            texts += [markdown(n, getattr(fastxtend_amp, n)) for n in names]
        for module in sorted(PACKAGE.rglob('*.py')): self.env.note_dependency(str(module))
        return self.parse_text_to_nodes('\n\n'.join(texts))

    def learner_entry(self, name, f):
        kind = 'property' if isinstance(f, property) else 'method'
        return entry(kind, f'Learner.{name}', f, '::::')


class Files(SphinxDirective):
    "A table of the package's files, each with the first line of its docstring and a link to its source."
    def run(self):
        rows = []
        for name, text in modules():
            first = (ast.get_docstring(ast.parse(text)) or '').split('\n')[0]
            if name.count('.') and first: rows.append(f'| <a href="source/{name}.html">{name}</a> | {cell(first)} |')
        return self.parse_text_to_nodes('\n'.join(['| file | what it is |', '|---|---|', *rows]))


def modules():
    "Each file of the package as module name and text."
    for file in sorted(PACKAGE.rglob('*.py')):
        parts = file.relative_to(PACKAGE.parent).with_suffix('').parts
        yield '.'.join(parts).removesuffix('.__init__'), file.read_text(encoding='utf-8')


def source_pages(app):
    "A page for each module with its source; line 12 has the anchor L12."
    if app.builder.name != 'html': return
    for name, text in modules():
        lines = app.builder.highlighter.highlight_block(text, 'python', linenos=False).split('\n')
        lines[0] = lines[0].replace('<pre>', '<pre><span id="L1"></span>')
        numbered = [lines[0], *(f'<span id="L{n}"></span>{line}' for n, line in enumerate(lines[1:], 2))]
        body = f'<h1>{name}</h1>' + '\n'.join(numbered)
        yield f'source/{name}', {'title': name, 'body': body}, 'page.html'


def forget(app, env, docname): env.metadata.get('api names', {}).pop(docname, None)


def setup(app):
    app.add_directive('api', Api)
    app.add_directive('files', Files)
    app.connect('html-collect-pages', source_pages)
    app.connect('env-purge-doc', forget)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
