"What is documented exists, and what exists is documented."

import ast, configparser, importlib, importlib.util, inspect, io, json, os, re, subprocess, sys, warnings
from contextlib import redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path

import nbformat, pytest, torch
from fastai.callback import core, fp16
from fastai.callback.core import Callback
from fastai.learner import Learner

import fastxtend_amp
from fastxtend_amp import MixedPrecision, precision_support
from fastxtend_amp.compat import autocast_restored
from helpers import At, finite, learner

ROOT = Path(__file__).parent.parent
NBS = ROOT / 'nbs'
sys.path[:0] = [str(NBS), str(ROOT)]
import api_examples, api_pages, generate, operators, search_words  # noqa: E402
from nbs.benchmarks import show  # noqa: E402

MODULES = sorted((ROOT / 'fastxtend_amp').rglob('*.py'))
TESTS = {f.name: f.read_text() for f in (ROOT / 'tests').rglob('*.py')}
README = (ROOT / 'README.md').read_text()
SETTINGS = configparser.ConfigParser(delimiters=['='])
SETTINGS.read(ROOT / 'settings.ini')
CFG = SETTINGS['DEFAULT']


ADDED = api_pages.learner_methods()
METHODS = {n: f for n, f in ADDED.items() if inspect.isfunction(f)}


def markdown():
    "Each page that people read, by name."
    yield from ((f.name, f.read_text()) for f in [*sorted(ROOT.glob('*.md')), *sorted(NBS.glob('*.md'))])
    for f in sorted(NBS.glob('*.ipynb')):
        yield f.name, '\n'.join(c.source for c in nbformat.read(f, 4).cells if c.cell_type == 'markdown')


# -- docstrings


@pytest.mark.parametrize('file', MODULES, ids=lambda f: str(f.relative_to(ROOT / 'fastxtend_amp')))
def test_modules_say_what_they_are_and_public_things_have_docstrings(file):
    tree = ast.parse(file.read_text())
    first = (ast.get_docstring(tree) or '').split('\n')[0]
    assert len(first) > 20 and '?' not in first, first
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith('_'):
            continue
        assert ast.get_docstring(node) or len(node.body) == 1, f'{file.name}: {node.name}'


# -- pages


@pytest.mark.parametrize('name,text', markdown(), ids=lambda x: x if len(x) < 60 else '')
def test_what_is_named_is_there(name, text):
    for test in re.findall(r'\b(test_\w+)\b(?!\.)', text):
        assert any(f'def {test}(' in code for code in TESTS.values()), test
    for file in re.findall(r'`(?:[\w/]*/)?(test_\w+\.py)`', text):
        assert file in TESTS, file
    folder = ROOT if (ROOT / name).exists() else NBS
    for target in re.findall(r'\]\(([^)#:]+)(?:#[^)]*)?\)', text):
        assert (folder / target).exists(), target
    if name == 'CHANGELOG.md':
        return  # what earlier versions had need not exist
    for module, attr in re.findall(r'`fastxtend_amp\.(\w+)(?:\.(\w+))?', text):
        found = getattr(fastxtend_amp, module, None) or importlib.import_module(f'fastxtend_amp.{module}')
        assert not attr or hasattr(found, attr), f'{module}.{attr}'
    for method, given in re.findall(
        r'(?<!_)(to_(?:fp16|bf16|tf32|fp8|amp|fp32|half_weights|channelslast)|'
        r'precision_(?:report|as)|compare_precision)\(([^()]*)\)',
        text,
    ):
        names = set(inspect.signature(METHODS.get(method) or getattr(Learner, method)).parameters)
        names |= {*inspect.signature(getattr(fastxtend_amp, method, len)).parameters}
        assert set(re.findall(r'(?:^|\s)(\w+)(?::[^=,]*)?=', given)) <= names, f'{method}({given})'
    for attr in re.findall(r'`learn\.precision\.(\w+)', text):
        assert hasattr(MixedPrecision, attr), attr
    for file in re.findall(r'^\| .* \| `(\w+(?:\.py|/))` \|$', text, re.M):
        assert (ROOT / 'fastxtend_amp' / file).exists(), file
    for code in re.findall(r'```python\n(.*?)```', text, re.S):
        compile(code, name, 'exec')


@pytest.fixture(scope='session')
def page(tmp_path_factory):
    "The web page, built as the README says, strictly."
    if importlib.util.find_spec('myst_nb') is None:
        pytest.skip('needs Sphinx, MyST-NB and Furo, of the extra docs')
    out = tmp_path_factory.mktemp('page')
    from sphinx.cmd.build import main

    command = re.search(r'^python -m sphinx (-W.*) nbs/_build/html$', README, re.M)[1].split()
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said), pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert main([*command, str(out)]) == 0, said.getvalue()
    return out


class Page(HTMLParser):
    "What a page loads, and its descriptions of pictures."

    def __init__(self, text):
        super().__init__()
        self.loaded, self.described = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        if tag in ('script', 'img') and a.get('src'):
            self.loaded.append(a['src'])
        if tag == 'img':
            self.described.append(a.get('alt', ''))
        if tag == 'link' and a.get('rel') in ('stylesheet', 'preload', 'icon'):
            self.loaded.append(a['href'])


def test_page_is_whole(page):
    "Nothing is loaded from elsewhere, pictures are described; Sphinx has checked the other links."
    for file in page.rglob('*.html'):
        text = file.read_text()
        p = Page(text)
        assert '<p>|' not in text, f'{file.name}: a row outside of its table'
        assert all(' ' in alt and not alt.endswith('.png') for alt in p.described), file.name
        for target in p.loaded:
            assert target.startswith('data:') or (file.parent / target.partition('?')[0]).exists(), target
    for sheet in page.rglob('*.css'):
        assert not re.search(r'url\(\s*[\'"]?(https?:)?//|@import', sheet.read_text()), sheet


API = {name: (NBS / f'{name}.md').read_text() for name in api_pages.PAGES}


def test_api_pages_have_every_public_name_with_a_meaning_of_each_argument():
    parts = re.split(r'^## (.+)$', '\n'.join(API.values()), flags=re.M)
    found = dict(zip(parts[1::2], parts[2::2]))
    assert api_pages.described().keys() == api_pages.PAGE_OF.keys() and len(METHODS) >= 9
    for name, f in {**METHODS, 'MixedPrecision': MixedPrecision, 'precision_support': precision_support}.items():
        for argument in {*inspect.signature(f).parameters} - {'self', 'args', 'kwargs'} if name in found else ():
            entry = found['Shared arguments'] + found[name]
            assert re.search(rf"^- `{argument}(=[^`]*)?`: [\w']", entry, re.M), f'{name}: {argument}'
    assert '`init_scale=' in found['Shared arguments'] and '`init_scale`' not in found['to_bf16']
    commands = [s.partition('=')[0] for s in CFG['console_scripts'].split()]
    assert commands and all(f'- `{c} [' in found['Commands'] for c in commands)


@pytest.mark.parametrize('name', api_examples.EXAMPLES)
@pytest.mark.filterwarnings('ignore')
def test_examples_of_the_api_print_what_they_say(name, capsys, request):
    for word, package in {'kahan': 'optimi', 'to_fp8': 'torchao'}.items():
        if name == word:
            pytest.importorskip(package)
    code = api_examples.EXAMPLES[name]
    torch.manual_seed(0)
    setup = re.search(r'```python\n(.*?)```', (NBS / 'api.md').read_text(), re.S)[1]
    exec(setup + code, {})
    printed = capsys.readouterr().out
    assert all(text in printed.splitlines() for text in re.findall(r'\bprint\(.*\)  # (.+)', code)), printed


# -- claims


@pytest.mark.filterwarnings('ignore')
def test_what_fastai_does_where_it_finds_cuda(monkeypatch, tmp_path):
    "Verify the fastai column of README's table; PyTorch is made to believe that there is a GPU."
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda *a: True)
    monkeypatch.setattr(torch.cuda, 'current_device', lambda: 'cpu')
    monkeypatch.setattr(core, 'default_device', lambda *a: torch.device('cpu'))
    scales, reads, item = [], [], torch.Tensor.item

    class Scales(Callback):
        order = 11

        def after_step(self):
            scales.append(self.learn.scaler.get_scale())

    class Fails(Callback):
        def after_pred(self):
            raise RuntimeError('on purpose')

    def fitted(learn, **kwargs):
        with learn.no_bar(), learn.no_logging():
            learn.fit(1, **kwargs)
        return learn

    with autocast_restored('cuda'):  # with its nesting, for the tests to come
        twice = learner(cbs=[fp16.MixedPrecision(), fp16.MixedPrecision()])
        with pytest.raises(AssertionError, match='No inf checks were recorded'):
            fitted(twice)
        torch.set_autocast_enabled('cuda', False)
        once, other = (learner(cbs=fp16.MixedPrecision(growth_interval=1, init_scale=2.0)) for _ in range(2))
        once.path = other.path = tmp_path
        for learn in (once, once, other):
            fitted(learn, cbs=Scales())
            if learn is once:
                once.save('a')
                other.load('a')
        first, second, third = zip(*[iter(scales)] * (len(scales) // 3))
        assert first == second == third and first[0] < first[-1]  # starts again at each fit and load
        monkeypatch.setattr(torch.Tensor, 'item', lambda t: reads.append(t) or item(t))
        fitted(learner())
        in_fp32 = len(reads)
        low = fitted(learner(cbs=fp16.MixedPrecision()))
        assert len(reads) - 2 * in_fp32 == 2 * len(low.dls.train)
        overflow = At('before_batch', lambda l: l.xb[0].fill_(float('inf')) if l.training and l.iter == 1 else None)
        skips = fitted(learner(cbs=[fp16.MixedPrecision(init_scale=2.0), overflow]))
        assert finite(skips) and skips.model[1].running_mean.isnan().all()  # the step was skipped, and NaN stays
        with pytest.raises(RuntimeError, match='on purpose'):
            fitted(learner(cbs=fp16.MixedPrecision('bf16')), cbs=Fails())
        assert torch.is_autocast_enabled('cuda')  # stays on


def test_what_fastai_does_outside_cuda():
    dtypes = []
    learn = learner(cbs=fp16.MixedPrecision('bf16'))
    learn.model[0].register_forward_hook(lambda m, i, o: dtypes.append(o.dtype))
    with warnings.catch_warnings(record=True) as caught, learn.no_bar(), learn.no_logging():
        warnings.simplefilter('always')
        learn.fit(1)
    assert set(dtypes) == {torch.float32} and any('CUDA is not available' in str(w.message) for w in caught)


# -- the README


def test_it_is_installed_from_a_clone():
    "The package is not on PyPI, and no address of it is registered."
    for text in (README, (NBS / 'start.md').read_text()):
        assert re.search(r'^pip install \.$', text, re.M) and 'not on PyPI' in text
        assert not re.search(r'^pip install (git\+|fastxtend_amp)', text, re.M)
    for name in ('README.md', 'settings.ini', 'setup.py', 'nbs/start.md', 'nbs/conf.py'):
        assert not re.search(r'https?://\S*fastxtend(?!\.benjamin)', (ROOT / name).read_text()), name


def test_the_manual_is_short():
    "Words, without the marks of tables and lists."
    others = {'operators.md', 'CHANGELOG.md', 'CONTRIBUTING.md', 'SECURITY.md', *(f'{name}.md' for name in API)}
    pages = {name: len(re.findall(r'\S*\w\S*', text)) for name, text in markdown() if name not in others}
    assert pages['README.md'] <= 700 and sum(pages.values()) <= 9_200, pages


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


# -- what is generated


def test_generated_parts_are_those_of_the_code_and_of_the_runs():
    "Reports, API entries and cases; charts depend on the fonts of a machine."
    for file, text in generate.texts().items():
        if file.stem == 'operators' and f'PyTorch {operators.VERSION}.' not in file.read_text():
            continue  # lists differ by version
        assert file.read_text() == text, f'{file.name}: run `python nbs/generate.py`'


def test_pictures_are_there_and_shown():
    "README has a picture for dark pages; the website shows those with twice as many pixels, and narrow ones on phones."
    shown = {part.split()[0] for s in re.findall(r'(?:src|srcset)="([^"]+)"', README) for part in s.split(',')}
    assert len(shown) == 4 and all((ROOT / f).exists() for f in shown)
    assert all(' ' in alt for alt in re.findall(r'<img [^>]*alt="([^"]*)"', README))
    stems = {stem for _, text in markdown() for stem in re.findall(r'\]\((\w+)\.png\)', text)}
    on_pages = {f'{stem}{kind}.png' for stem in stems for kind in ('', '_2x', '_narrow_2x')}
    assert {f.name for f in NBS.glob('*.png')} <= on_pages | {Path(f).name for f in shown}


def test_speeds_in_the_readme_are_those_of_the_runs():
    shown = {title: run['fastxtend_amp'] for title, run in generate.figures.rows()}
    text = ' '.join(README.split())
    for model, said in {'ResNet-50': 'a ResNet-50 by', 'ViT-Tiny': 'ViT-Tiny by', 'tiny MLP': 'a tiny MLP to'}.items():
        run = next(run for title, run in shown.items() if title.startswith(model))
        assert f'{said} {show.marked(run["vs_fp32"], run["blocks"])}x' in text, model


def test_pages_are_plain_markdown():
    "They are also read where the repository is hosted: no directives, no roles, and links that lead somewhere there."
    for name, text in markdown():
        folder = ROOT if (ROOT / name).exists() else NBS
        prose = re.sub(r'^```.*?^```', '', text, flags=re.S | re.M)
        assert not re.search(r'^(```|:::+)\{|\{\w+\}`|^:\w+:', text, re.M), name
        for path, fragment in re.findall(r'\]\((?!https?:)([^)#]*)#([^)]+)\)', prose):
            target = folder / path if path else folder / name
            assert fragment in anchors(target), f'{name}: {path}#{fragment}'


def anchors(file):
    "The anchors that a code host gives to the headings of a page."
    text = file.read_text() if file.suffix == '.md' else dict(markdown())[file.name]
    headings = re.findall(r'^#+ (.+)$', re.sub(r'^```.*?^```', '', text, flags=re.S | re.M), re.M)
    return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


def test_the_website_has_an_overview_for_language_models(page):
    links = re.findall(r'^- \[[^]]+\]\(([^)]+)\): \w', (page / 'llms.txt').read_text(), re.M)
    assert len(links) == len([*NBS.glob('*.md'), *NBS.glob('*.ipynb')]) - 1  # without the index
    assert all((page / link).exists() for link in links)


def search_index(page):
    return json.loads((page / 'searchindex.js').read_text().removeprefix('Search.setIndex(').removesuffix(')'))


def test_search_leads_to_the_section_that_answers(page):
    index = search_index(page)
    for file, sections in search_words.WORDS.items():
        for word in ', '.join(sections.values()).split(', '):
            found = index['indexentries'][word.lower()]
            assert [index['docnames'][n] for n, anchor, is_main in found if is_main and anchor] == [file], word
