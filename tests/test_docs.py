"What is documented exists, and what exists is documented."

import inspect, json, re, subprocess, sys

import nbformat, pytest, torch

from helpers import ROOT, python

NBS = ROOT / 'nbs'
sys.path[:0] = [str(NBS), str(ROOT)]
import api_examples, api_pages, generate, operators, search_words  # noqa: E402
from nbs.benchmarks import show  # noqa: E402

PAGES = {f: f.read_text() for f in [*sorted(ROOT.glob('*.md')), *sorted(NBS.glob('*.md'))]}
for f in sorted(NBS.glob('*.ipynb')):
    PAGES[f] = '\n'.join(c.source for c in nbformat.read(f, 4).cells if c.cell_type == 'markdown')
README, CONTRIBUTING = (PAGES[ROOT / f'{name}.md'] for name in ('README', 'CONTRIBUTING'))
ENTRIES = api_pages.described()
CODE = re.compile(r'```python\n(.*?)```', re.S)


def prose(text):
    return re.sub(r'^```.*?^```', '', text, flags=re.S | re.M)


def anchors(text):
    headings = re.findall(r'^#+ (.+)$', prose(text), re.M)
    return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


@pytest.mark.parametrize('file', PAGES, ids=lambda f: f.name)
def test_what_is_named_is_there_in_plain_markdown(file):
    "Pages are also read where the repository is hosted: no directives, and links that lead somewhere there."
    text = PAGES[file]
    assert not re.search(r'^(```|:::+)\{|\{\w+\}`|^:\w+:', text, re.M)
    for target, anchor in re.findall(r'\]\((?!\w+:)([^)#]*)#?([^)]*)\)', prose(text)):
        found = (file.parent / target).resolve() if target else file
        assert found.exists() and (not anchor or anchor in anchors(PAGES[found])), f'{target}#{anchor}'
    for code in CODE.findall(text):
        compile(code, file.name, 'exec')
    for name, given in re.findall(r'(?<!_)\b(to_\w+|precision_\w+|compare_precision)\(([^()]*)\)', text):
        if file.name != 'CHANGELOG.md' and (f := ENTRIES.get(name)):
            assert {*re.findall(r'(?:^|\s)(\w+)=', given)} <= {*inspect.signature(f).parameters, 'device'}, name


def test_the_website_loads_nothing_from_elsewhere_and_search_leads_to_the_answer(tmp_path, monkeypatch):
    "Built as CONTRIBUTING says, strictly: Sphinx checks its links."
    pytest.importorskip('myst_nb', reason='needs the extra docs')
    from sphinx.cmd.build import main

    command = re.search(r'python -m sphinx (-W.*) nbs/_build/html', CONTRIBUTING)[1]
    monkeypatch.chdir(ROOT)
    assert main([*command.split(), str(tmp_path)]) == 0
    for file in tmp_path.rglob('*.html'):
        text = file.read_text()
        assert '<p>|' not in text, f'{file.name}: a row outside of its table'
        assert not re.search(r'<(script|img|link[^>]*stylesheet)[^>]* (src|href)="(https?:)?//', text), file.name
        assert all(' ' in alt for alt in re.findall(r'<img [^>]*alt="([^"]+)"', text)), file.name
    index = json.loads((tmp_path / 'searchindex.js').read_text().removeprefix('Search.setIndex(').removesuffix(')'))
    for file, sections in search_words.WORDS.items():
        for word in ', '.join(sections.values()).split(', '):
            found = index['indexentries'][word.lower()]
            assert [index['docnames'][n] for n, anchor, main in found if main and anchor] == [file], word
    assert all((tmp_path / f).exists() for f in re.findall(r'\]\(([^)]+)\): \w', (tmp_path / 'llms.txt').read_text()))


def test_api_pages_have_every_public_name_with_a_meaning_of_each_argument():
    assert api_pages.PAGE_OF.keys() == ENTRIES.keys()
    for name, obj in ENTRIES.items():
        if inspect.isfunction(obj):
            assert all(text for n, *_, text in api_pages.arguments(obj) if n not in ('model', 'module')), name


@pytest.mark.parametrize('name', api_examples.EXAMPLES)
@pytest.mark.filterwarnings('ignore')
def test_examples_of_the_api_print_what_they_say(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip({'kahan': 'optimi', 'to_fp8': 'torchao'}.get(name, 'torch'))
    code = api_examples.EXAMPLES[name]
    torch.manual_seed(0)
    exec(CODE.findall(PAGES[NBS / 'api.md'])[0] + code, {})
    printed = capsys.readouterr().out
    assert all(text in printed.splitlines() for text in re.findall(r'\bprint\(.*\)  # (.+)', code)), printed


def test_generated_parts_are_those_of_the_code_and_of_the_runs():
    for file, text in generate.texts().items():
        if file.stem == 'operators' and f'PyTorch {operators.VERSION}.' not in file.read_text():
            continue  # lists differ by version
        assert file.read_text() == text, f'{file.name}: run `python nbs/generate.py`'


def test_the_manual_is_short():
    "Words, without the marks of tables and lists, and without PyTorch's lists of operators."
    manual = [README, *(text for f, text in PAGES.items() if f.parent == NBS)]
    benchmarks = [f.read_text() for f in (NBS / 'benchmarks').glob('*.md')]
    limits = {700: [README], 600: [PAGES[ROOT / 'CHANGELOG.md']], 9_000: manual}
    limits[13_000] = [*PAGES.values(), *benchmarks]
    for most, texts in limits.items():
        text = re.sub('<!-- generated: operators -->.*?<!-- end -->', '', ' '.join(texts), flags=re.S)
        assert len(re.findall(r'\S*\w\S*', text)) <= most


def test_no_address_is_named_that_does_not_exist():
    "The package is not on PyPI; `url` in settings.ini is the only place for the project's address."
    for file in (*PAGES, *(ROOT / name for name in ('setup.py', 'CITATION.cff', 'nbs/conf.py'))):
        text = file.read_text().replace(generate.CFG['url'] or '-', '')
        assert not re.search(r'https?://\S*fastxtend(?!\.b)|^pip install (git\+|fastxtend_amp)', text, re.M), file


# -- README


def test_continuous_integration_finds_the_test_command():
    line = re.search(r'^command=.*$', (ROOT / '.ci/run').read_text(), re.M)[0]
    said = subprocess.run(['bash', '-c', f'{line}; echo "$command"'], cwd=ROOT, capture_output=True, text=True).stdout
    assert said.startswith('pip install -e ') and '&& pytest -n 2' in said, said


def test_readme_snippets_run_as_they_stand(tmp_path):
    "Without a network, and the second prints what README shows."
    for code, shown in re.findall(r'```python\n(.*?)```(?:\n\n```\n(.*?)```)?', README, re.S):
        (tmp_path / 'model.py').write_text(code)
        done = python('model.py', cwd=tmp_path, https_proxy='http://127.0.0.1:9')
        assert done.returncode == 0, done.stderr[-2000:]
        assert ' '.join(shown.split()).rpartition(';')[0] in ' '.join(done.stdout.split()), done.stdout
    assert (tmp_path / 'model.pkl').stat().st_size


def test_figures_in_the_readme_are_those_of_the_runs():
    text, runs = ' '.join(README.split()), generate.figures.rows()
    for model in ('ResNet-50', 'ViT-Tiny', 'tiny MLP'):
        run = next(run['fastxtend_amp'] for title, run in runs if title.startswith(model))
        assert f'{model} at {show.marked(run["vs_fp32"], run["blocks"])}x' in text
    assert generate.figures.cases().partition(' are')[0] in text
