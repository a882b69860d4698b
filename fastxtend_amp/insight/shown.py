"Base class of results that display themselves, as text and in notebooks."
import re
from html import escape
from textwrap import fill

_FORMAT = {'float_format': '{:,.5g}'.format, 'na_rep': '-'}


class Shown:
    "A result made of sentences and tables; a subclass gives them by `_parts`."
    def __repr__(self):
        def text(part): return _wrapped(part) if isinstance(part, str) else part.to_string(**_FORMAT)
        return '\n\n'.join(map(text, self._parts()))

    def _repr_html_(self):
        def html(text): return re.sub('`([^`]+)`', r'<code>\1</code>', escape(text))
        return ''.join(f'<p style="white-space: pre-wrap">{html(p)}</p>' if isinstance(p, str) else
                       p.to_html(**_FORMAT) for p in self._parts())


def _wrapped(text): # for a terminal; a browser wraps by itself
    lines = text.split('\n')
    return '\n'.join(fill(line, 118, break_long_words=False, break_on_hyphens=False) for line in lines)
