"Display of results as text and HTML, lists in sentences, and a progress bar."
import math, re, sys, time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from html import escape
from textwrap import fill

from fastai.callback import progress
from fastai.learner import Learner
from fastcore.basics import noop
from fastprogress.core import IN_NOTEBOOK

from ..precisions.matching import ROOT

LOSS = 'loss function'  # its name among the modules; includes callbacks after the forward pass
BACKWARD = 'backward pass'  # where an error comes from, after the loss
_MANY = 4               # modules or reasons that a sentence names; it counts the others
_UNLIMITED = 3600.      # seconds that a progress bar shows if there is no time limit


def named(name: str) -> str:
    "Return the name of a module, or of what else failed, for a sentence."
    own = {ROOT: "the model's own `forward`", LOSS: 'the loss function', BACKWARD: 'the backward pass'}
    return name if name.startswith('callback `') else own.get(name, f"'{name}'")


def some(words: Iterable[str], between: str = ', ') -> str:
    "Join the first words, and say how many more there are."
    words = [*words]
    return between.join(words[:_MANY]) + (f' and {len(words) - _MANY} more' if len(words) > _MANY else '')


def _wrapped(line): # A browser wraps by itself
    indent = ' ' * (len(line) - len(line.lstrip()))
    return fill(line, 118, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _number(x): # '0.0296', '70,641', '6.67e+38'
    return f'{x:,.0f}' if 999.5 <= abs(x) < 1e9 else f'{x:.3g}'


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


def _is_interactive():
    return IN_NOTEBOOK or sys.stdout.isatty()                    # in a file, a bar would be one long line


@contextmanager
def progress_bar(
    learn: Learner, # No bar without fastai's `ProgressCallback`, as in `learn.no_bar()`
    seconds: float, # The time limit, which is the length of the bar
) -> Iterator[Callable]: # To be called with what is running
    "Show a progress bar as in a fit, in a terminal or notebook, until the context ends."
    if 'progress' not in vars(learn) or not _is_interactive(): return (yield noop)
    bar = progress.progress_bar(range(math.ceil(min(seconds, _UNLIMITED))), leave=False)
    def show(what):
        bar.comment, now = what, min(int(time.time() - bar.start_t), bar.total - 1)   # a full bar would end
        if now > bar.last_v: bar.update(now)                     # once a second
    bar.update(0)
    try: yield show
    finally: bar.on_iter_end()
