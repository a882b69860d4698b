"""Sphinx extension: what the website has and the plain Markdown files do not.

The list of pages, the text of the files at the top level, and `llms.txt`, an overview for language models.
"""
import re
from importlib import metadata
from pathlib import Path

from docutils import nodes
from sphinx import addnodes

import api_pages

PAGES = {
    'Start': ['start', '01_tutorial', 'coming_from'],
    'Guides': ['recipes', 'pytorch', '02_save_and_export', '03_gpus_compile_xla', 'troubleshooting'],
    'Background': ['how_it_works', 'guarantees', 'evidence'],
    'Reference': ['api', *api_pages.PAGES, 'operators', 'changelog', 'contributing']}
TOP = {'index': 'README', 'changelog': 'CHANGELOG', 'contributing': 'CONTRIBUTING'}    # files of the top level, by page
PICTURE = re.compile(r'<picture>.*?<img src="(.*?)".*?alt="(.*?)">\n</picture>', re.DOTALL)
BADGES = re.compile(r'(^!\[.*\]\(https://img\.shields\.io.*\n)+\n', re.MULTILINE)
SKIPPED = nodes.reference, nodes.title                           # whose code stays as it is
NO_TEXT = nodes.image, addnodes.download_reference               # first in a paragraph
TOCTREE = '\n```{{toctree}}\n:caption: {}\n:hidden:\n{}\n```\n'


def source_read(app, docname, content):
    "Show files of the top level; add list of pages and description to the first page; keep runs out of the search."
    if docname in TOP:                                           # which link to pages, and to each other, from the top
        text = (Path(app.srcdir).parent / f'{TOP[docname]}.md').read_text(encoding='utf-8')
        text = PICTURE.sub(r'![\2](\1)', BADGES.sub('', text)).replace('](nbs/', '](')
        content[0] = re.sub(r'\]\((\w+)\.md\)', lambda m: f']({m[1].lower()}.md)', text)
    if docname == 'index':
        description = metadata.metadata('fastxtend_amp')['Summary']
        content[0] = f'---\nhide-toc: true\nmyst:\n  html_meta:\n    description: {description}\n---\n{content[0]}'
        content[0] += ''.join(TOCTREE.format(part, '\n'.join(names)) for part, names in PAGES.items())
    if docname.startswith('benchmarks/'): content[0] = f'---\norphan: true\nnosearch: true\n---\n{content[0]}'


def link_names(app, doctree):
    "The first mention of a method or function in a section leads to its entry in the API pages."
    if not set(PAGES['Start'] + PAGES['Guides'] + PAGES['Background']) & {app.env.docname}: return
    linked = set()
    for literal in [*doctree.findall(nodes.literal)]:
        name = re.match(r'(?:learn\.)?(\w*)(?:\(.*\))?$', literal.astext())
        place = name and (name[1], id(around(literal, nodes.section)))
        if not name or name[1] not in api_pages.PAGE_OF or place in linked: continue
        if isinstance(literal.parent, SKIPPED): continue
        cell = around(literal, nodes.entry)
        if cell.parent and cell.parent.index(cell) == 0: continue        # where calls of other libraries stand
        linked.add(place)
        page, _, anchor = api_pages.address(name[1]).partition('.md')
        address = f'{page}.html{anchor.replace("_", "-")}'
        literal.replace_self(nodes.reference('', '', literal.deepcopy(), refuri=address))


def around(node, kind):
    "Return the innermost node of this kind that `node` is in; the document if there is none."
    while not isinstance(node, (kind, nodes.document)): node = node.parent
    return node


def add_narrow_charts(app, doctree):
    "A chart drawn for wide screens is followed by the one for phones; the style sheet shows one of them."
    for node in [*doctree.findall(nodes.image)]:
        wide, narrow = (node['uri'].replace('.png', f'{kind}_2x.png') for kind in ('', '_narrow'))   # the page scales
        if not (Path(app.srcdir) / narrow).exists() or narrow == node['uri']: continue
        node['uri'] = wide
        node['classes'].append('wide')
        node.parent.insert(node.parent.index(node) + 1, nodes.image(uri=narrow, alt=node['alt'], classes=['narrow']))


def add_download(app, doctree):
    "A page made from a notebook begins with a link to it."
    file = Path(app.env.doc2path(app.env.docname))
    if file.suffix != '.ipynb': return
    link = addnodes.download_reference('', 'Download this page as a notebook', reftarget=file.name)
    title = next(doctree.findall(nodes.title))
    title.parent.insert(1, nodes.paragraph('', '', link, classes=['download']))


def first_sentence(doctree):
    "Return the first sentence of a page's text."
    text = next(p.astext() for p in doctree.findall(nodes.paragraph) if not isinstance(p[0], NO_TEXT))
    return re.split(r'(?<=\.)\s', ' '.join(text.split()))[0].rstrip(':')


def write_llms_txt(app, exception):
    "Write `llms.txt` (https://llmstxt.org): each page with its first sentence, as Markdown where it is not a notebook."
    if exception or app.builder.name != 'html': return
    env, lines = app.env, [f'# {app.config.project}', '']
    lines += [f'> {first_sentence(env.get_doctree("index"))}', '']
    for part, names in PAGES.items():
        lines += [f'## {part}', '']
        for name in names:
            is_markdown = Path(env.doc2path(name)).suffix == '.md'
            address = f'_sources/{name}.md.txt' if is_markdown and name not in TOP else f'{name}.html'
            lines.append(f'- [{env.titles[name].astext()}]({address}): {first_sentence(env.get_doctree(name))}')
        lines.append('')
    (Path(app.outdir) / 'llms.txt').write_text('\n'.join(lines), encoding='utf-8')


def setup(app):
    app.connect('source-read', source_read)
    app.connect('doctree-read', add_narrow_charts, priority=400)             # before Sphinx collects files to copy
    app.connect('doctree-read', add_download, priority=400)
    app.connect('doctree-read', link_names)
    app.connect('build-finished', write_llms_txt)
    app.add_js_file('search_sections.js')
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
