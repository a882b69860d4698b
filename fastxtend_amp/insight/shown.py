"Base class of results that display themselves, as text and in notebooks."
import re
from functools import partial
from html import escape
from textwrap import fill

_wrapped = partial(fill, width=118, break_long_words=False, break_on_hyphens=False)   # a browser wraps by itself


def _number(x: float) -> str: # '0.0296', '70,641', '6.67e+38'
    return f'{x:,.0f}' if 1000 <= abs(x) < 1e9 else f'{x:.3g}'


_FORMAT = {'float_format': _number, 'na_rep': '-'}


class Shown:
    "A result made of sentences and tables; a subclass gives them by `_parts`."
    def __repr__(self):
        def text(part):
            if not isinstance(part, str): return part.to_string(**_FORMAT)
            return '\n'.join(map(_wrapped, part.split('\n')))
        return '\n\n'.join(map(text, self._parts()))

    def _repr_html_(self):
        def html(text): return re.sub('`([^`]+)`', r'<code>\1</code>', escape(text))
        return ''.join(f'<p style="white-space: pre-wrap">{html(p)}</p>' if isinstance(p, str) else
                       p.to_html(**_FORMAT) for p in self._parts())
