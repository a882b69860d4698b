"What is documented exists, and what exists is documented."

import inspect, io, json, os, re, subprocess, sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import nbformat, pytest, torch
from fastai.callback import core, fp16

import fastxtend_amp
from fastxtend_amp.compat import autocast_restored
from helpers import At, finite, learner

ROOT = Path(__file__).parent.parent
NBS = ROOT / 'nbs'
sys.path[:0] = [str(NBS), str(ROOT)]
import api_examples, api_pages, generate, operators, search_words  # noqa: E402
from nbs.benchmarks import show  # noqa: E402

PAGES = {f: f.read_text() for f in [*sorted(ROOT.glob('*.md')), *sorted(NBS.glob('*.md'))]}
for f in sorted(NBS.glob('*.ipynb')):
    PAGES[f] = '\n'.join(c.source for c in nbformat.read(f, 4).cells if c.cell_type == 'markdown')
README = PAGES[ROOT / 'README.md']
METHODS = api_pages.learner_methods()


def anchors(text):
    headings = re.findall(r'^#+ (.+)$', re.sub(r'^```.*?^```', '', text, flags=re.S | re.M), re.M)
    return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


@pytest.mark.parametrize('file', PAGES, ids=lambda f: f.name)
def test_what_is_named_is_there_in_plain_markdown(file):
    "Pages are also read where the repository is hosted: no directives, and links that lead somewhere there."
    text = PAGES[file]
    assert not re.search(r'^(```|:::+)\{|\{\w+\}`|^:\w+:', text, re.M)
    for target, anchor in re.findall(
        r'\]\((?!\w+:)([^)#]*)#?([^)]*)\)', re.sub(r'^```.*?^```', '', text, flags=re.S | re.M)
    ):
        found = (file.parent / target).resolve() if target else file
        assert found.exists() and (not anchor or anchor in anchors(PAGES[found])), f'{target}#{anchor}'
    for code in re.findall(r'```python\n(.*?)```', text, re.S):
        compile(code, file.name, 'exec')
    for name, given in re.findall(r'(?<!_)\b(to_\w+|precision_\w+|compare_precision)\(([^()]*)\)', text):
        f = METHODS.get(name) or getattr(fastxtend_amp, name, None)
        if file.name != 'CHANGELOG.md' and inspect.isfunction(f):
            assert {*re.findall(r'(?:^|\s)(\w+)=', given)} <= {*inspect.signature(f).parameters, 'device'}, name


@pytest.fixture(scope='session')
def page(tmp_path_factory):
    "The website, built as README says, strictly: Sphinx checks its links."
    pytest.importorskip('myst_nb', reason='needs the extra docs')
    from sphinx.cmd.build import main

    out, said = tmp_path_factory.mktemp('page'), io.StringIO()
    command = re.search(r'^python -m sphinx (-W.*) nbs/_build/html$', README, re.M)[1].split()
    with redirect_stdout(said), redirect_stderr(said), pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert main([*command, str(out)]) == 0, said.getvalue()
    return out


def test_the_website_loads_nothing_from_elsewhere_and_search_leads_to_the_answer(page):
    for file in page.rglob('*.html'):
        text = file.read_text()
        assert '<p>|' not in text, f'{file.name}: a row outside of its table'
        loaded = re.findall(r'<(?:script|img)[^>]* src="([^"]+)"|<link[^>]*stylesheet[^>]*href="([^"]+)"', text)
        assert not any(re.match('(https?:)?//', target) for pair in loaded for target in pair), file.name
        assert all(' ' in alt for alt in re.findall(r'<img [^>]*alt="([^"]+)"', text)), file.name
    index = json.loads((page / 'searchindex.js').read_text().removeprefix('Search.setIndex(').removesuffix(')'))
    for file, sections in search_words.WORDS.items():
        for word in ', '.join(sections.values()).split(', '):
            found = index['indexentries'][word.lower()]
            assert [index['docnames'][n] for n, anchor, main in found if main and anchor] == [file], word
    assert all((page / link).exists() for link in re.findall(r'\]\(([^)]+)\): \w', (page / 'llms.txt').read_text()))


def test_api_pages_have_every_public_name_with_a_meaning_of_each_argument():
    entries = api_pages.described()
    assert {*fastxtend_amp.__all__, *METHODS} <= {*api_pages.PAGE_OF} == {*entries}
    for name, obj in entries.items():
        if inspect.isfunction(obj):
            assert all(text for n, *_, text in api_pages.arguments(obj) if n not in ('model', 'module')), name


@pytest.mark.parametrize('name', api_examples.EXAMPLES)
@pytest.mark.filterwarnings('ignore')
def test_examples_of_the_api_print_what_they_say(name, capsys):
    pytest.importorskip({'kahan': 'optimi', 'to_fp8': 'torchao'}.get(name, 'torch'))
    code = api_examples.EXAMPLES[name]
    torch.manual_seed(0)
    exec(re.search(r'```python\n(.*?)```', PAGES[NBS / 'api.md'], re.S)[1] + code, {})
    printed = capsys.readouterr().out
    assert all(text in printed.splitlines() for text in re.findall(r'\bprint\(.*\)  # (.+)', code)), printed


# -- claims


def fitted(*cbs, **kwargs):
    learn = learner(cbs=cbs)
    learn.fit(1, **kwargs)
    return learn


@pytest.mark.filterwarnings('ignore')
def test_what_fastai_does_where_it_finds_cuda(monkeypatch, tmp_path):
    "Verify the fastai column of README's table; PyTorch is made to believe that there is a GPU."
    for place, name, value in (
        (torch.cuda, 'is_available', True),
        (torch.cuda, 'is_bf16_supported', True),
        (torch.cuda, 'current_device', 'cpu'),
        (core, 'default_device', torch.device('cpu')),
    ):
        monkeypatch.setattr(place, name, lambda *a, value=value: value)
    scales, reads, item = [], [], torch.Tensor.item
    with autocast_restored('cuda'):  # with its nesting, for the tests to come
        with pytest.raises(AssertionError, match='No inf checks were recorded'):
            fitted(fp16.MixedPrecision(), fp16.MixedPrecision())
        torch.set_autocast_enabled('cuda', False)
        once = learner(path=tmp_path, cbs=fp16.MixedPrecision(growth_interval=1, init_scale=2.0))
        for change in (list, list, lambda: once.load(once.save('a').stem)):
            change()
            once.fit(1, cbs=At('after_step', lambda l: scales.append(l.scaler.get_scale()), 11))
        first, second, third = zip(*[iter(scales)] * (len(scales) // 3))
        assert first == second == third and first[0] < first[-1]  # starts again at each fit and load
        monkeypatch.setattr(torch.Tensor, 'item', lambda t: reads.append(t) or item(t))
        in_fp32 = len(fitted() and reads)
        assert len(fitted(fp16.MixedPrecision()) and reads) - 2 * in_fp32 == 2 * len(once.dls.train)
        overflow = At('before_batch', lambda l: l.training and l.iter == 1 and l.xb[0].fill_(float('inf')))
        skips = fitted(fp16.MixedPrecision(init_scale=2.0), overflow)
        assert finite(skips) and skips.model[1].running_mean.isnan().all()  # the step was skipped, and NaN stays
        with pytest.raises(ZeroDivisionError):
            fitted(fp16.MixedPrecision('bf16'), At('after_pred', lambda l: 1 / 0))
        assert torch.is_autocast_enabled('cuda')  # stays on


def test_what_fastai_does_outside_cuda():
    dtypes = []
    with pytest.warns(UserWarning, match='CUDA is not available'):
        fitted(fp16.MixedPrecision('bf16'), At('after_pred', lambda l: dtypes.append(l.pred.dtype)))
    assert set(dtypes) == {torch.float32}


def test_the_manual_is_short():
    "Words, without the marks of tables and lists."
    words = {f.name: len(re.findall(r'\S*\w\S*', text)) for f, text in PAGES.items()}
    for name in ('CONTRIBUTING.md', 'SECURITY.md', 'operators.md', *(f'{page}.md' for page in api_pages.PAGES)):
        words.pop(name)
    assert words['README.md'] <= 700 and words.pop('CHANGELOG.md') <= 600 and sum(words.values()) <= 9_000, words


def test_no_address_is_named_that_does_not_exist():
    "The package is not on PyPI; `url` in settings.ini is the only place for the project's address."
    for file in (*PAGES, *(ROOT / name for name in ('setup.py', 'CITATION.cff', 'nbs/conf.py'))):
        text = file.read_text().replace(generate.CFG['url'] or '-', '')
        assert not re.search(r'https?://\S*fastxtend(?!\.b)|^pip install (git\+|fastxtend_amp)', text, re.M), file


@pytest.mark.parametrize('i', range(2))
def test_readme_snippets_run_as_they_stand(tmp_path, i):
    "Without a network, and the second prints what README shows."
    code, shown = re.findall(r'```python\n(.*?)```(?:\n\n```\n(.*?)```)?', README, re.S)[i]
    (tmp_path / 'model.py').write_text(code)
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])}
    env |= {'OMP_NUM_THREADS': '1', 'https_proxy': 'http://127.0.0.1:9'}
    command = [sys.executable, '-W', 'ignore', 'model.py']
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ' '.join(shown.split()).rpartition(';')[0] in ' '.join(done.stdout.split()), done.stdout
    assert shown or (tmp_path / 'model.pkl').stat().st_size


def test_generated_parts_are_those_of_the_code_and_of_the_runs():
    for file, text in generate.texts().items():
        if file.stem == 'operators' and f'PyTorch {operators.VERSION}.' not in file.read_text():
            continue  # lists differ by version
        assert file.read_text() == text, f'{file.name}: run `python nbs/generate.py`'


def test_speeds_in_the_readme_are_those_of_the_runs():
    shown, text = dict(generate.figures.rows()), ' '.join(README.split())
    for model, said in {'ResNet-50': 'a ResNet-50 by', 'ViT-Tiny': 'ViT-Tiny by', 'tiny MLP': 'a tiny MLP to'}.items():
        run = next(run['fastxtend_amp'] for title, run in shown.items() if title.startswith(model))
        assert f'{said} {show.marked(run["vs_fp32"], run["blocks"])}x' in text, model
