"What is documented exists, and what exists is documented."

import inspect, io, json, re, subprocess, sys
from contextlib import redirect_stderr, redirect_stdout

import nbformat, pytest, torch
from fastai.callback import core, fp16

import fastxtend_amp
from fastxtend_amp.compat import autocast_restored
from helpers import ROOT, At, finite, learner, python

NBS = ROOT / 'nbs'
sys.path[:0] = [str(NBS), str(ROOT)]
import api_examples, api_pages, generate, operators, search_words  # noqa: E402
from nbs.benchmarks import show  # noqa: E402

PAGES = {f: f.read_text() for f in [*sorted(ROOT.glob('*.md')), *sorted(NBS.glob('*.md'))]}
for f in sorted(NBS.glob('*.ipynb')):
    PAGES[f] = '\n'.join(c.source for c in nbformat.read(f, 4).cells if c.cell_type == 'markdown')
README = PAGES[ROOT / 'README.md']
METHODS = api_pages.learner_methods()
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
        f = METHODS.get(name) or getattr(fastxtend_amp, name, None)
        if file.name != 'CHANGELOG.md' and inspect.isfunction(f):
            assert {*re.findall(r'(?:^|\s)(\w+)=', given)} <= {*inspect.signature(f).parameters, 'device'}, name


def test_the_website_loads_nothing_from_elsewhere_and_search_leads_to_the_answer(tmp_path, monkeypatch):
    "Built as README says, strictly: Sphinx checks its links."
    pytest.importorskip('myst_nb', reason='needs the extra docs')
    from sphinx.cmd.build import main

    said, command = io.StringIO(), re.search(r'^python -m sphinx (-W.*) nbs/_build/html$', README, re.M)[1]
    monkeypatch.chdir(ROOT)
    with redirect_stdout(said), redirect_stderr(said):
        assert main([*command.split(), str(tmp_path)]) == 0, said.getvalue()
    for file in tmp_path.rglob('*.html'):
        text = file.read_text()
        assert '<p>|' not in text, f'{file.name}: a row outside of its table'
        loaded = re.findall(r'<(?:script|img)[^>]* src="([^"]+)"|<link[^>]*stylesheet[^>]*href="([^"]+)"', text)
        assert not any(re.match('(https?:)?//', target) for pair in loaded for target in pair), file.name
        assert all(' ' in alt for alt in re.findall(r'<img [^>]*alt="([^"]+)"', text)), file.name
    index = json.loads((tmp_path / 'searchindex.js').read_text().removeprefix('Search.setIndex(').removesuffix(')'))
    for file, sections in search_words.WORDS.items():
        for word in ', '.join(sections.values()).split(', '):
            found = index['indexentries'][word.lower()]
            assert [index['docnames'][n] for n, anchor, main in found if main and anchor] == [file], word
    assert all((tmp_path / f).exists() for f in re.findall(r'\]\(([^)]+)\): \w', (tmp_path / 'llms.txt').read_text()))


def test_api_pages_have_every_public_name_with_a_meaning_of_each_argument():
    entries = api_pages.described()
    assert {*fastxtend_amp.__all__, *METHODS} <= {*api_pages.PAGE_OF} == {*entries}
    for name, obj in entries.items():
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
    "Words, without the marks of tables and lists, and without PyTorch's lists of operators; then with the benchmarks."
    files = {**PAGES, **{f: f.read_text() for f in (NBS / 'benchmarks').glob('*.md')}}
    texts = {f: re.sub(r'<!-- generated: operators -->.*', '', text, flags=re.S) for f, text in files.items()}
    words = {f: len(re.findall(r'\S*\w\S*', text)) for f, text in texts.items()}
    manual = [n for f, n in words.items() if f.name == 'README.md' or f.parent == NBS]
    assert words[ROOT / 'README.md'] <= 700 and words[ROOT / 'CHANGELOG.md'] <= 600, words
    assert sum(manual) <= 9_802 and sum(words.values()) <= 13_154, (sum(manual), sum(words.values()), words)


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


@pytest.mark.filterwarnings('ignore')
def test_what_fastai_does(monkeypatch, tmp_path):
    "Verify the fastai column of README's table; PyTorch is made to believe that there is a GPU."

    def fitted(*args, cbs=(), **kwargs):
        found = learner(cbs=[fp16.MixedPrecision(*args, **kwargs), *cbs], path=tmp_path)
        found.fit(1)
        return found

    scales, reads, item = [], [], torch.Tensor.item
    for name, value in dict(is_available=True, is_bf16_supported=True, current_device='cpu').items():
        monkeypatch.setattr(torch.cuda, name, lambda *a, value=value: value)
    monkeypatch.setattr(core, 'default_device', lambda *a: torch.device('cpu'))
    with autocast_restored('cuda'):  # with its nesting, for the tests to come
        with pytest.raises(AssertionError, match='No inf checks were recorded'):
            fitted(cbs=[fp16.MixedPrecision()])
        torch.set_autocast_enabled('cuda', False)
        log = At('after_step', lambda l: scales.append(l.scaler.get_scale()), 11)
        once = fitted(growth_interval=1, init_scale=2.0, cbs=[log])
        once.fit(1)
        once.load(once.save('a').stem).fit(1)
        assert scales[:6] == scales[6:12] == scales[12:] and scales[0] < scales[5]  # each fit and load starts again
        monkeypatch.setattr(torch.Tensor, 'item', lambda t: reads.append(t) or item(t))
        learner().fit(1)
        in_fp32 = len(reads)
        fitted()
        assert len(reads) - 2 * in_fp32 == 2 * len(once.dls.train)
        overflow = At('before_batch', lambda l: l.training and l.iter == 1 and l.xb[0].fill_(float('inf')))
        skips = fitted(init_scale=2.0, cbs=[overflow])
        assert finite(skips) and skips.model[1].running_mean.isnan().all()  # the step was skipped, and NaN stays
        with pytest.raises(ZeroDivisionError):
            fitted('bf16', cbs=[At('after_pred', lambda l: 1 / 0)])
        assert torch.is_autocast_enabled('cuda')  # stays on


@pytest.mark.parametrize('i', range(2))
def test_readme_snippets_run_as_they_stand(tmp_path, i):
    "Without a network, and the second prints what README shows."
    code, shown = re.findall(r'```python\n(.*?)```(?:\n\n```\n(.*?)```)?', README, re.S)[i]
    (tmp_path / 'model.py').write_text(code)
    done = python('model.py', cwd=tmp_path, https_proxy='http://127.0.0.1:9')
    assert done.returncode == 0, done.stderr[-2000:]
    assert ' '.join(shown.split()).rpartition(';')[0] in ' '.join(done.stdout.split()), done.stdout
    assert shown or (tmp_path / 'model.pkl').stat().st_size


def test_figures_in_the_readme_are_those_of_the_runs():
    shown, text = dict(generate.figures.rows()), ' '.join(README.split())
    for model, said in {'ResNet-50': 'a ResNet-50 at', 'ViT-Tiny': 'ViT-Tiny at', 'tiny MLP': 'a tiny MLP at'}.items():
        run = next(run['fastxtend_amp'] for title, run in shown.items() if title.startswith(model))
        assert f'{said} {show.marked(run["vs_fp32"], run["blocks"])}x' in text, model
    assert generate.figures.cases().partition(' are')[0] in text
