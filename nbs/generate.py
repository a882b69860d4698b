"""Writes the generated parts of the pages, each between two comment marks: `python nbs/generate.py`.

The pages are plain Markdown, so that they can also be read where the repository is hosted. `nbs/figures.py` makes the
reports of stored runs and the list of cases, `nbs/api_pages.py` the reference from signatures and docstrings. What
describes the project, its address included, comes from `settings.ini`.
"""
from __future__ import annotations

import re, sys
from collections.abc import Callable
from configparser import ConfigParser
from functools import partial
from pathlib import Path

NBS = Path(__file__).resolve().parent
sys.path[:0] = [str(NBS), str(NBS.parent)]
import api_pages, figures, operators  # noqa: E402

SETTINGS = ConfigParser(delimiters=['='])
SETTINGS.read(NBS.parent / 'settings.ini', encoding='utf-8')
CFG = SETTINGS['DEFAULT']
CITATION = """cff-version: 1.2.0
message: If you use this software, please cite it.
type: software
title: {lib_name}
abstract: {description}
authors:
  - name: {author}
version: {version}
license: {license}
"""


def clone() -> str:
    "Return how a notebook installs the package: the address is that in `settings.ini`."
    return f"```\n!git clone -q {CFG['url'] or 'ADDRESS'} fastxtend_amp\n!pip install -q ./fastxtend_amp\n```"


def citation() -> str:
    "Return the citation file; with the address that `settings.ini` has."
    return CITATION.format(**CFG) + (f"repository-code: {CFG['url']}\n" if CFG['url'] else '')

MARKED = re.compile(r'(<!-- generated: (?P<part>[\w ]+) -->\n).*?(<!-- end -->)', re.S)
PARTS: dict[str, Callable[[], str]] = {          # by the name in the mark
    'cases': figures.cases,
    'api names': api_pages.names_part,
    'api shared': api_pages.shared_part,
    **{name.replace('_', ' '): partial(api_pages.page, name) for name in api_pages.PAGES},
    'operators': operators.part,
    'clone': clone,
    'report': figures.report,
}


def generated(page: str) -> str:
    "Return the text of a page with its generated parts written again."
    return MARKED.sub(lambda m: f'{m[1]}\n{PARTS[m["part"]]().strip()}\n\n{m[3]}', page)


def texts() -> dict[Path, str]:
    "Return each text that this script writes, by its file."
    pages = {f: f.read_text(encoding='utf-8') for f in [*sorted(NBS.parent.glob('*.md')), *sorted(NBS.glob('*.md'))]}
    return {f: generated(text) for f, text in pages.items() if MARKED.search(text)} \
        | figures.reports() | {NBS.parent / 'CITATION.cff': citation()}


def main() -> None:
    for file, text in texts().items(): file.write_text(text, encoding='utf-8')


if __name__ == '__main__': main()
