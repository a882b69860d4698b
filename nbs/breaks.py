"Sphinx extension: long names in code, such as those of tests, may break after an underscore."
from docutils import nodes

LONG = 24


def allow_breaks(app, doctree, docname):
    if app.builder.format != 'html': return
    for code in list(doctree.findall(nodes.literal)):
        parts = code.astext().split('_')
        if len(code.astext()) < LONG or len(parts) == 1 or len(code.children) != 1: continue
        code.children = []
        for part in parts[:-1]: code += [nodes.Text(f'{part}_'), nodes.raw('', '<wbr>', format='html')]
        code += nodes.Text(parts[-1])


def setup(app):
    app.connect('doctree-resolved', allow_breaks)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
