"""Writes the generated parts of the pages, each between two comment marks: `python nbs/generate.py`.

The pages are plain Markdown, so that they can also be read where the repository is hosted. `nbs/figures.py` makes the
tables of speeds from the stored runs, `nbs/api_pages.py` the reference from signatures and docstrings.
"""
from __future__ import annotations

import re, sys
from collections.abc import Callable
from pathlib import Path

NBS = Path(__file__).resolve().parent
sys.path[:0] = [str(NBS), str(NBS.parent)]
import api_pages, figures  # noqa: E402

MARKED = re.compile(r'(<!-- generated: (?P<part>[\w ]+) -->\n).*?(<!-- end -->)', re.S)
FENCED = re.compile(r'^```.*?^```', re.S | re.M)
HEADING = re.compile(r'^(#{2,3}) (.+)$', re.M)


def anchor(heading: str) -> str:
    "Return the anchor of a heading, as code hosts and MyST make it."
    return re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-')


def contents(page: str) -> str:
    "Return links to the sections of a page: those without subsections in one list, the others with theirs in a line."
    lines: list[str] = []
    for marks, heading in HEADING.findall(FENCED.sub('', page)):
        link = f'[{heading}](#{anchor(heading)})'
        if marks == '##': lines.append(f'- {link}')
        else: lines[-1] += (' · ' if lines[-1].count('](#') > 1 else ': ') + link
    return '\n'.join(lines)


PARTS: dict[str, Callable[[str], str]] = {       # by the name in the mark; each gets the text of its page
    'contents': contents,
    'speeds': lambda page: figures.speeds(),
    'predictions': lambda page: figures.predictions(),
    'api learner': lambda page: api_pages.learner_part(),
    'api training': lambda page: api_pages.training_part(),
    'api insight': lambda page: api_pages.insight_part(),
}


def generated(page: str) -> str:
    "Return the text of a page with its generated parts written again."
    def written(m: re.Match) -> str: return f'{m[1]}\n{PARTS[m["part"]](page).strip()}\n\n{m[3]}'
    for _ in range(2): page = MARKED.sub(written, page)     # twice: the contents list headings that are generated
    return page


def texts() -> dict[str, str]:
    "Return each text that this script writes, by its path under `nbs`."
    pages = {f.name: f.read_text(encoding='utf-8') for f in sorted(NBS.glob('*.md'))}
    return {name: generated(text) for name, text in pages.items() if MARKED.search(text)} | figures.reports()


def main() -> None:
    for name, text in texts().items(): (NBS / name).write_text(text, encoding='utf-8')


if __name__ == '__main__': main()
