"Sphinx extension: long names in code may break after an underscore, a dot, an equals sign or an opening bracket."
import re
from html import escape, unescape

IN_TEXT, IN_TABLE = 24, 12                     # shorter code is not broken; a table's columns are narrow on a phone
PLACE = re.compile(r'''(?<=[_=])(?=\w)|(?<=\w\.)(?<!learn\.)(?=[^\W\d])(?!py$)    # not in a number, nor after `learn.`
                       |(?<=[\w=][(=])(?=['"\[\w][^)]{3})''', re.VERBOSE)             # no bracket is left alone
TABLE = re.compile(r'(<table.*?</table>)', re.DOTALL)
CODE = re.compile(r'<code class="[^"]*literal[^"]*">.*?</code>', re.DOTALL)
WORD = re.compile(r'(?<=<span class="pre">)[^<]+')


def allow_breaks(app, pagename, templatename, context, doctree):
    "Break code in the page, when its words have been indexed for the search."
    def broken(code, shortest):
        if len(unescape(re.sub('<.*?>', '', code))) <= shortest: return code
        return WORD.sub(lambda m: '<wbr>'.join(escape(part) for part in PLACE.split(unescape(m[0]))), code)
    parts = TABLE.split(context.get('body') or '')               # every second one is a table
    parts[::2] = [CODE.sub(lambda m: broken(m[0], IN_TEXT), part) for part in parts[::2]]
    parts[1::2] = [CODE.sub(lambda m: broken(m[0], IN_TABLE), part) for part in parts[1::2]]
    if 'body' in context: context['body'] = ''.join(parts)


def setup(app):
    app.connect('html-page-context', allow_breaks)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
