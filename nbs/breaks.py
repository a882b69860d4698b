"""Sphinx extension: what narrow screens need.

Code in a sentence may break after a dot, an equals sign or an opening bracket, but not inside a name. Lines of code
know how far they are indented, so that what does not fit goes on below, indented further; long expressions in them may
also break, and a comment beside code moves up to it. Cells of wide tables know the heads of their columns, for a style
sheet that shows each row as a list.
"""
import re
from html import escape, unescape

IN_TEXT, IN_TABLE = 24, 12                     # shorter code is not broken; a table's columns are narrow on a phone
PLACE = re.compile(r'''(?<=\w=)(?=\w)|(?<=\w\.)(?<!learn\.)(?=[^\W\d])(?!py$)   # not in a number, nor after `learn.`
                       |(?<=[\w=][(=])(?=['"\[\w][^)]{3})|(?<=\w\[)(?=['"])''', re.VERBOSE)   # no bracket is left alone
TABLE = re.compile(r'(<table.*?</table>)', re.DOTALL)
CODE = re.compile(r'<code class="[^"]*literal[^"]*">.*?</code>', re.DOTALL)
WIDE = 4                                       # columns
ROW, CELL = re.compile(r'<tr.*?</tr>', re.DOTALL), re.compile(r'<t([dh])(?= |>)(.*?)</t\1>', re.DOTALL)
BLOCK = re.compile(r'(?<=<div class="highlight"><pre>)(<span></span>)?(.*?)\n?(?=</pre>)', re.DOTALL)
INDENT, DEEPEST = re.compile('((?:<[^>]*>)*)( *)'), 16
GAP = re.compile(r'(?<=\S  )( +)(?=<span class="c1">)')         # before a comment beside code
WORD = re.compile(r'(?<=<span class="pre">)[^<]+')
EXPRESSION, IN_IT = re.compile(r'\S{25,}'), re.compile(r'(?<=\w\()(?=.)|(?<=[\w)\]])(?=\.[^\W\d])')
LETTER = re.compile(r'<[^>]*>|&#?\w+;|.')                       # or a tag


def allow_breaks(app, pagename, templatename, context, doctree):
    "Break code in the page, when its words have been indexed for the search."
    def broken(code, shortest):
        if len(unescape(re.sub('<.*?>', '', code))) <= shortest: return code
        return WORD.sub(lambda m: '<wbr>'.join(escape(part) for part in PLACE.split(unescape(m[0]))), code)
    parts = TABLE.split(context.get('body') or '')               # every second one is a table
    parts[::2] = [CODE.sub(lambda m: broken(m[0], IN_TEXT), part) for part in parts[::2]]
    parts[1::2] = [CODE.sub(lambda m: broken(m[0], IN_TABLE), part) for part in parts[1::2]]
    is_run = pagename.startswith('benchmarks/')
    def shown(table):                                            # columns of figures are read side by side
        return table if is_run and table.count('<th class="head">') < 2 else labelled(table)
    parts[1::2] = map(shown, parts[1::2])
    if 'body' in context: context['body'] = BLOCK.sub(hanging, ''.join(parts))


def hanging(block):
    "Return a block of code with each line in a span that knows its indent, and the indent in a span of its own."
    def line(text):
        text = GAP.sub(r'<span class="indent">\1</span>', text)
        tags, spaces = INDENT.match(text).groups()
        text = f'{tags}<span class="indent">{spaces}</span>{text[len(tags + spaces):]}'
        return f'<span class="line" style="--indent: {min(len(spaces), DEEPEST)}ch">{breakable(text)}\n</span>'
    return ''.join(map(line, block[2].split('\n')))


def breakable(line):
    "Return a line of code in which long expressions may break before a dot or after an opening bracket."
    plain = unescape(re.sub('<.*?>', '', line))
    places = {long.start() + m.start() for long in EXPRESSION.finditer(plain) for m in IN_IT.finditer(long[0])}
    parts, n = [], 0
    for part in LETTER.findall(line):
        if part[0] != '<':
            if n in places: parts.append('<wbr>')
            n += 1
        parts.append(part)
    return ''.join(parts)


def labelled(table):
    "Return a table of `WIDE` or more columns with the head of its column in each cell."
    cells = (m[2].partition('>')[2] for m in CELL.finditer(ROW.search(table)[0]))
    heads = [escape(re.sub(r'<.*?>|\s+', ' ', cell).strip()) for cell in cells]
    if len(heads) < WIDE: return table
    def row(match):
        names = iter(heads)
        return CELL.sub(lambda m: f'<t{m[1]} data-head="{next(names, "")}"{m[2]}</t{m[1]}>', match[0])
    return ROW.sub(row, table.replace('class="docutils', 'class="wide-table docutils', 1))


def setup(app):
    app.connect('html-page-context', allow_breaks)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
