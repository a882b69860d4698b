"What is documented is there, and what is there is documented."
import ast, configparser, importlib, importlib.util, inspect, json, os, re, subprocess, sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat, pytest
from fastai.torch_core import base_doc
from fastcore.docments import docments

import fastxtend_amp
from fastxtend_amp import HalfWeights, MixedPrecision, PrecisionComparison, PrecisionReport
from fastxtend_amp.docs_text import HEADING, add_arguments, arguments, description, learner_methods, returned
from fastxtend_amp.refused_names import FORMER
from helpers import learner

ROOT = Path(__file__).parent.parent
NBS = ROOT / 'nbs'
MODULES = sorted((ROOT / 'fastxtend_amp').rglob('*.py'))
TESTS = {f.name: f.read_text() for f in (ROOT / 'tests').rglob('*.py')}
ADDED = learner_methods()
METHODS = {n: f for n, f in ADDED.items() if inspect.isfunction(f)}
README = (ROOT / 'README.md').read_text()


def markdown():
    "Each page that people read, by name."
    yield from ((f.name, f.read_text()) for f in [ROOT / 'README.md', ROOT / 'CHANGELOG.md', *sorted(NBS.glob('*.md'))])
    for f in sorted(NBS.glob('*.ipynb')): yield f.name, '\n'.join(c.source for c in nbformat.read(f, 4).cells if c.cell_type == 'markdown')


# -- docstrings

@pytest.mark.parametrize('file', MODULES, ids=lambda f: str(f.relative_to(ROOT / 'fastxtend_amp')))
def test_modules_say_what_they_are_and_public_things_have_docstrings(file):
    tree = ast.parse(file.read_text())
    first = (ast.get_docstring(tree) or '').split('\n')[0]
    assert len(first) > 20 and '?' not in first, first
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith('_'): continue
        assert ast.get_docstring(node) or len(node.body) == 1, f'{file.name}: {node.name}'


@pytest.mark.parametrize('cls', [MixedPrecision, HalfWeights, PrecisionReport, PrecisionComparison])
def test_public_methods_say_what_they_do(cls):
    own = {n: m for c in cls.__mro__ if c.__module__.startswith('fastxtend_amp') for n, m in vars(c).items() if not n.startswith('_')}
    for name, method in own.items():
        f = method.fget if isinstance(method, property) else method
        if inspect.isfunction(f) and name not in ('learn', 'training') and not re.fullmatch('(before|after)_.*', name):
            assert inspect.getdoc(f), f'{cls.__name__}.{name}'


def test_every_argument_has_a_meaning_and_is_shown():
    public = [getattr(fastxtend_amp, n) for n in fastxtend_amp.__all__]
    called = [f for f in public if inspect.isfunction(f)] + [MixedPrecision.__init__, HalfWeights.__init__] + list(METHODS.values())
    assert len(METHODS) >= 9 and 'precision' in ADDED
    for f in called:
        meanings = docments(f, args_kwargs=True)
        for name in inspect.signature(f).parameters:
            assert name == 'self' or meanings[name], f'{f.__qualname__}: {name}'
    for cls in (MixedPrecision, HalfWeights):                  # tab completion reads the class's signature
        assert list(inspect.signature(cls).parameters) == list(inspect.signature(cls.__init__).parameters)[1:]


@pytest.mark.parametrize('f', [*METHODS.values(), MixedPrecision, HalfWeights, fastxtend_amp.precision_support], ids=lambda f: f.__qualname__)
def test_help_and_doc_show_the_meaning_of_each_argument(f, capsys):
    for show in (help, base_doc):                                # the latter is fastai's `doc` without nbdev
        show(f)
        shown = ' '.join(re.sub(r'^ *\|', '', capsys.readouterr().out, flags=re.M).split())
        for a in arguments(f): assert f'{a.name} (' in shown and a.meaning in shown, a.name
    assert description(f) and HEADING not in description(f)


def test_arguments_are_added_once_and_read_from_the_code():
    def f(x: int, # What comes in
        y: str = 'a', # Its name
    ) -> bool: # Whether it fits
        "Try it."
    for _ in range(2): add_arguments([f])
    assert f.__doc__ == "Try it.\n\nArguments:\n    x (int): What comes in\n    y (str, default 'a'): Its name\n\nReturns:\n    Whether it fits"
    assert description(f) == 'Try it.' and returned(f) == 'Whether it fits'


@pytest.mark.parametrize('call,name,near', [
    ('to_fp16', 'init_scal', 'did you mean `init_scale=`?'), ('to_half_weights', 'master_weigths', 'did you mean `master_weights=`?'),
    ('to_amp', 'mesure', 'did you mean `measure=`?'), ('to_bf16', 'init_scale', 'there are fp32_modules, on_overflow, max_skips.')])
def test_a_misspelt_argument_is_told_its_name(call, name, near):
    learn = learner().to_fp16()
    with pytest.raises(TypeError, match=re.escape(f"{call}() has no argument '{name}': {near}")): getattr(learn, call)(**{name: 1})
    assert learn.precision.mode == 'fp16'                        # and nothing was removed


@pytest.mark.parametrize('call', ['to_fp16', 'to_bf16', 'to_amp', 'to_half_weights'])
@pytest.mark.parametrize('name', FORMER)
def test_arguments_of_earlier_libraries_say_what_to_write(call, name):
    if call == 'to_half_weights' and name == 'flat_master': return   # it has that one
    learn = learner()
    with pytest.raises(TypeError, match=f'{call}.*no argument .{name}.: ') as e: getattr(learn, call)(**{name: 1})
    assert learn.precision is None
    written = re.findall(r'`(\w+)=`', str(e.value))
    known = {n for f in METHODS.values() for n in inspect.signature(f).parameters}
    assert set(written) <= known | {'cbs'}, written              # what it proposes is there


def test_other_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match='nonsense'): learner().to_fp16(nonsense=1)


# -- pages

@pytest.mark.parametrize('name,text', markdown(), ids=lambda x: x if len(x) < 60 else '')
def test_what_is_named_is_there(name, text):
    for test in re.findall(r'`(test_\w+)`', text): assert any(f'def {test}(' in code for code in TESTS.values()), test
    for file in re.findall(r'`(?:[\w/]*/)?(test_\w+\.py|matrix\.py|quality\.py|applications\.py)`', text): assert file in TESTS, file
    folder = ROOT if name in ('README.md', 'CHANGELOG.md') else NBS
    for target in re.findall(r'\]\(([^)#:]+)(?:#[^)]*)?\)', text): assert (folder / target).exists(), target
    if name == 'CHANGELOG.md': text = text[:text.index('\n## 0.1.0')]   # what earlier versions had need not be there
    for module, attr in re.findall(r'`fastxtend_amp\.(\w+)(?:\.(\w+))?', text):
        found = getattr(fastxtend_amp, module, None) or importlib.import_module(f'fastxtend_amp.{module}')
        assert not attr or hasattr(found, attr), f'{module}.{attr}'
    for method, given in re.findall(r'(?<!_)(to_(?:fp16|bf16|amp|fp32|half_weights|channelslast)|precision_report|compare_precision)\(([^()]*)\)', text):
        names = set(inspect.signature(METHODS[method]).parameters)
        assert set(re.findall(r'(\w+)=', given)) <= names, f'{method}({given})'
    for name in re.findall(r'`learn\.precision\.(\w+)', text): assert hasattr(MixedPrecision, name), name


@pytest.fixture(scope='session')
def page(tmp_path_factory):
    "The web page, built as the README says, strictly."
    if importlib.util.find_spec('myst_nb') is None: pytest.skip('needs Sphinx, MyST-NB and Furo, of the extra docs')
    out = tmp_path_factory.mktemp('page')
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))}
    command = re.search(r'^python -m (sphinx -W.*) nbs/_build/html$', README, re.M)[1].split()
    done = subprocess.run([sys.executable, '-m', *command, out], capture_output=True, text=True, cwd=ROOT, env=env)
    assert done.returncode == 0, done.stderr
    return out


class Page(HTMLParser):
    "Names that can be linked to, links, and what is loaded."
    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.loaded = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        if a.get('id'): self.ids.add(a['id'])
        if tag == 'a' and a.get('href'): self.links.append(a['href'])
        if tag in ('script', 'img') and a.get('src'): self.loaded.append(a['src'])
        if tag == 'link' and a.get('rel') in ('stylesheet', 'preload', 'icon'): self.loaded.append(a['href'])


def test_page_is_whole(page):
    "Every internal link leads somewhere, its anchor too, and nothing is loaded from elsewhere."
    pages = {f: Page(f.read_text()) for f in page.rglob('*.html')}
    assert len(pages) > 20
    for file, p in pages.items():
        for target in p.links:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc: continue
            other = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            assert other.exists(), f'{file.name}: {target}'
            if parts.fragment and other in pages: assert unquote(parts.fragment) in pages[other].ids, f'{file.name}: {target}'
        for target in p.loaded:
            assert not urlsplit(target).netloc and (target.startswith('data:') or (file.parent / urlsplit(target).path).exists()), target
    for sheet in page.rglob('*.css'): assert not re.search(r'url\(\s*[\'"]?(https?:)?//|@import', sheet.read_text()), sheet


def test_page_has_every_public_name_with_its_arguments(page):
    text, ids = (page / 'api.html').read_text(), Page((page / 'api.html').read_text()).ids
    for name in [*fastxtend_amp.__all__, *(f'Learner.{n}' for n in ADDED)]: assert name in ids, name
    plain = re.sub(r'\s+', ' ', re.sub(r'<[^>]+>', '', text))
    for f in [*METHODS.values(), MixedPrecision, HalfWeights]:
        for a in arguments(f): assert a.name in plain
    assert 'Loss scale to start from' in plain
    for link in re.findall(r'href="(source/[^"#]+)', text): assert (page / link).exists()


def test_every_command_is_described():
    settings = configparser.ConfigParser(delimiters=['='])
    settings.read(ROOT / 'settings.ini')
    commands = [s.partition('=')[0] for s in settings['DEFAULT']['console_scripts'].split()]
    assert commands and all(f'| `{c}` |' in (NBS / 'api.md').read_text() for c in commands)


def test_page_can_be_searched(page):
    index = (page / 'searchindex.js').read_text()
    titles = json.loads(index.removeprefix('Search.setIndex(').removesuffix(')'))['titles']
    for title in ('API', 'First run', 'When training goes wrong', 'Which precision?', 'Coming from another library'): assert title in titles
    assert all(name in index for name in fastxtend_amp.__all__)


# -- the README

def test_readme_is_short_and_has_its_commands():
    assert len(README.splitlines()) <= 120 and len(README.split()) <= 750
    assert re.search(r'^pip install -e .*pytest', README, re.M)
    assert re.search(r'^python -m sphinx -W', README, re.M)


def test_it_is_installed_from_a_clone():
    "The package is not on PyPI, and no address of it is registered."
    for text in (README, (NBS / 'install.md').read_text()):
        assert '\npip install .\n' in text and 'not on PyPI' in text
        assert not re.search(r'^pip install (git\+|fastxtend_amp)', text, re.M)
    for name in ('README.md', 'settings.ini', 'setup.py', 'nbs/install.md', 'nbs/conf.py'):
        assert not re.search(r'https?://\S*fastxtend', (ROOT / name).read_text()), name


SNIPPET = """
import sys, warnings; warnings.simplefilter('ignore')
import torch; torch.set_num_threads(1)
from PIL import Image
from sklearn.datasets import load_digits
from fastai.data import external
from pathlib import Path
import torchvision.models as models
folder, data = Path(sys.argv[1]), load_digits()
for kind, samples in (('train', range(0, 160)), ('valid', range(160, 200))):       # as MNIST_SAMPLE lies on the disk
    for i in samples:
        (folder / kind / str(data.target[i] % 2)).mkdir(parents=True, exist_ok=True)
        Image.fromarray((data.images[i] * 15).astype('uint8')).resize((28, 28)).convert('RGB').save(folder / kind / str(data.target[i] % 2) / f'{i}.png')
external.untar_data = lambda url: folder                                           # no network
models.ResNet18_Weights.DEFAULT.get_state_dict.__func__                            # what is replaced is still there
models.ResNet18_Weights.get_state_dict = lambda self, *args, **kwargs: models.resnet18().state_dict()
"""


def test_readme_snippet_runs_as_it_stands(tmp_path):
    snippet = next(code for code in re.findall(r'```python\n(.*?)```', README, re.S) if 'vision_learner' in code)
    (tmp_path / 'data').mkdir()
    code = SNIPPET + snippet.replace('from fastxtend_amp', 'untar_data = external.untar_data\nfrom fastxtend_amp', 1)
    code += "\nassert learn.final_record[-1] >= 0 and (folder / 'model.pkl').stat().st_size"
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))}
    done = subprocess.run([sys.executable, '-c', code, tmp_path / 'data'], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr[-2000:]


# -- figures

def test_tables_are_those_of_the_runs():
    guarantees, quality = (NBS / 'guarantees.md').read_text(), (NBS / 'half_quality.md').read_text()
    table = guarantees[guarantees.index('| | fp32 (smallest'):guarantees.index('## Versions')]
    values = re.findall(r'\d\.\d{4}', table)
    assert len(values) > 10 and all(v in quality for v in values)
    for page in ('applications.md', 'matrix.md'):                # shown from these files
        assert page in guarantees and '<!-- table -->' in (NBS / page).read_text()


def test_speeds_of_the_readme_are_those_of_the_run():
    run = json.loads((NBS / 'benchmarks' / 'native_bf16.json').read_text())
    speed = {r['model']: r['vs_fp32'][1] for r in run['rows'] if r['contestant'] == 'fastxtend_amp' and r['optimizer'] == 'fused AdamW' and r['mode'] == 'bf16'}
    shown = ' '.join(README[README.index('## What it brings'):README.index('## Will this model survive?')].split())
    assert f"{max(speed.values()):.1f} times" in shown and f"xresnet18 {speed['xresnet18']:.1f} times" in shown
    assert max(speed, key=speed.get).startswith('wide') and max(speed['deep'], speed['tiny']) < 1
    for part in (run['machine']['cpu'], f"torch {run['machine']['torch'].split('+')[0]}", f"fastxtend_amp {run['machine']['fastxtend_amp']}"): assert part in shown
