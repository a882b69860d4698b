"What is documented is there, and what is there is documented."
import ast, importlib, inspect, re
from pathlib import Path

import nbformat, pytest
from fastai.learner import Learner
from fastcore.docments import docments

import fastxtend_amp
from fastxtend_amp import HalfWeights, MixedPrecision, PrecisionComparison, PrecisionReport

ROOT = Path(__file__).parent.parent
MODULES = sorted(f for f in (ROOT / 'fastxtend_amp').glob('*.py'))
TESTS = {f.name: f.read_text() for f in (ROOT / 'tests').glob('*.py')}
ADDED = {n: f for n, f in vars(Learner).items() if getattr(inspect.unwrap(f), '__module__', '') == 'fastxtend_amp.learner'}


def markdown():
    "Each page that people read, by name."
    yield from ((f.name, f.read_text()) for f in [ROOT / 'README.md', ROOT / 'CHANGELOG.md', *(ROOT / 'nbs').glob('*.md')])
    for f in (ROOT / 'nbs').glob('*.ipynb'):
        yield f.name, '\n'.join(c.source for c in nbformat.read(f, 4).cells if c.cell_type == 'markdown')


@pytest.mark.parametrize('file', MODULES, ids=lambda f: f.stem)
def test_modules_open_with_their_question_and_public_things_have_docstrings(file):
    tree = ast.parse(file.read_text())
    assert '?' in ast.get_docstring(tree) or file.stem == '__init__'
    for node in tree.body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith('_'): continue
        assert ast.get_docstring(node) or len(node.body) == 1, f'{file.name}: {node.name}'


@pytest.mark.parametrize('cls', [MixedPrecision, HalfWeights, PrecisionReport, PrecisionComparison])
def test_public_methods_say_what_they_do(cls):
    own = {n: m for c in cls.__mro__ if c.__module__.startswith('fastxtend_amp') for n, m in vars(c).items() if not n.startswith('_')}
    for name, method in own.items():
        f = method.fget if isinstance(method, property) else method
        if inspect.isfunction(f) and name not in ('learn', 'training'):
            assert inspect.getdoc(f) or name in ('after_backward', 'before_validate', 'before_train', 'after_train'), f'{cls.__name__}.{name}'


def test_every_argument_has_a_meaning_and_is_shown():
    public = [getattr(fastxtend_amp, n) for n in fastxtend_amp.__all__]
    called = [f for f in public if inspect.isfunction(f)] + [MixedPrecision.__init__, HalfWeights.__init__] + list(ADDED.values())
    assert len(ADDED) == 9
    for f in called:
        meanings = docments(f)
        for name in inspect.signature(f).parameters:
            assert name == 'self' or meanings[name], f'{f.__qualname__}: {name}'
    for cls in (MixedPrecision, HalfWeights):                  # tab completion reads the class's signature
        assert list(inspect.signature(cls).parameters) == list(inspect.signature(cls.__init__).parameters)[1:]


@pytest.mark.parametrize('name,text', markdown(), ids=lambda x: x if len(x) < 40 else '')
def test_what_is_named_is_there(name, text):
    for test in re.findall(r'`(test_\w+)`', text): assert any(f'def {test}(' in code for code in TESTS.values()), test
    for file in re.findall(r'`(?:tests/)?(test_\w+\.py|matrix\.py|quality\.py|applications\.py)`', text): assert file in TESTS, file
    folder = ROOT if name in ('README.md', 'CHANGELOG.md') else ROOT / 'nbs'
    for target in re.findall(r'\]\(([^)#:]+)\)', text): assert (folder / target).exists(), target
    for module, attr in re.findall(r'`fastxtend_amp\.(\w+)(?:\.(\w+))?', text):
        found = importlib.import_module(f'fastxtend_amp.{module}') if (ROOT / 'fastxtend_amp' / f'{module}.py').exists() else getattr(fastxtend_amp, module)
        assert not attr or hasattr(found, attr), f'{module}.{attr}'
    for method, given in re.findall(r'learn\.(\w+)\(([^()]*)\)', text):
        if method not in ADDED: continue
        names = set(inspect.signature(ADDED[method]).parameters)
        assert set(re.findall(r'(\w+)=', given)) <= names, f'{method}({given})'


def test_the_manual_has_an_example_of_every_public_name():
    cells = nbformat.read(ROOT / 'nbs' / '01_mixed_precision.ipynb', 4).cells
    code = '\n'.join(c.source for c in cells if c.cell_type == 'code')
    for name in [*fastxtend_amp.__all__, *ADDED]: assert re.search(rf'\b{name}\b', code), name


def test_tables_of_the_readme_are_those_of_the_runs():
    readme = (ROOT / 'README.md').read_text()
    for line in (ROOT / 'nbs' / 'applications.md').read_text().splitlines():
        if line.startswith('|'): assert line in readme, line
    quality = (ROOT / 'nbs' / 'half_quality.md').read_text()
    for value in re.findall(r'\d\.\d{4}', readme[readme.index('| | fp32 (smallest'):readme.index('## Where it runs')]): assert value in quality, value


def test_matrix_of_the_readme_is_that_of_the_runs():
    rows = [l for l in (ROOT / 'nbs' / 'matrix.md').read_text().splitlines() if l.startswith('|')]
    assert len(rows) > 4 and all(row in (ROOT / 'README.md').read_text() for row in rows)
