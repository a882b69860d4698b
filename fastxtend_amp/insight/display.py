"Display of results as text and HTML, and lists in sentences."
import re
from collections.abc import Iterable
from html import escape
from textwrap import fill

MANY = 4                # modules or reasons that a sentence names; it counts the others


def some(words: Iterable[str], between: str = ', ') -> str:
    "Join the first words, and say how many more there are."
    words = [*words]
    return between.join(words[:MANY]) + (f' and {len(words) - MANY} more' if len(words) > MANY else '')


def _wrapped(line): # A browser wraps by itself
    indent = line[:len(line) - len(line.lstrip())]
    return fill(line, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _number(x): # '0.0296', '70,641', '6.67e+38'
    return f'{x:,.0f}' if 1000 <= abs(x) < 1e9 else f'{x:.3g}'


_FORMAT = {'float_format': _number, 'na_rep': '-'}


class Shown:
    "A result made of sentences and tables, which the `_parts` of a subclass yields."
    def __repr__(self):
        def text(part):
            if not isinstance(part, str): return part.to_string(**_FORMAT)
            return '\n'.join(map(_wrapped, part.split('\n')))
        return '\n\n'.join(map(text, self._parts()))

    def _repr_html_(self):
        def html(text): return re.sub('`([^`]+)`', r'<code>\1</code>', escape(text))
        return ''.join(f'<p style="white-space: pre-wrap">{html(p)}</p>' if isinstance(p, str) else
                       p.to_html(**_FORMAT) for p in self._parts())
