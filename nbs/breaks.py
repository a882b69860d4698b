"Sphinx extension: long names in code may break after an underscore, a dot, an equals sign or an opening bracket."
import re

from docutils import nodes

IN_TEXT, IN_TABLE = 24, 14                     # shorter code is not broken; a table's columns are narrow on a phone
PLACE = re.compile(r'''(?<=[_=])(?=\w)|(?<=\w\.)(?<!learn\.)(?=[^\W\d])(?!py$)    # not in a number, nor after `learn.`
                       |(?<=[\w=][(=])(?=['"\[\w][^)]{3})''', re.VERBOSE)             # no bracket is left alone


def allow_breaks(app, doctree, docname):
    if app.builder.format != 'html': return
    for code in list(doctree.findall(nodes.literal)):
        text, inside = code.astext(), code.parent
        while inside is not None and not isinstance(inside, nodes.entry): inside = inside.parent
        parts, shortest = PLACE.split(text), IN_TEXT if inside is None else IN_TABLE
        if len(text) <= shortest or len(parts) == 1 or len(code.children) != 1: continue
        code.children = []
        for part in parts[:-1]: code += [nodes.Text(part), nodes.raw('', '<wbr>', format='html')]
        code += nodes.Text(parts[-1])


def setup(app):
    app.connect('doctree-resolved', allow_breaks)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
