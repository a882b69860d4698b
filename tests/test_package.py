"The package: its distribution, what importing it changes, the direction of imports, lint and types."

import ast, configparser, importlib, shutil, zipfile
from importlib import metadata
from pathlib import Path

import pytest

import fastxtend_amp, mutations
from fastxtend_amp.precisions import PRECISIONS
from fastxtend_amp.training import callback
from helpers import ROOT, learner, params, python, same


PACKAGE = Path(fastxtend_amp.__file__).parent
SETTINGS = configparser.ConfigParser(delimiters=['='])
SETTINGS.read(ROOT / 'settings.ini')
CFG = SETTINGS['DEFAULT']
SCRIPTS = dict(script.split('=') for script in CFG['console_scripts'].split())


def run(*args, cwd=ROOT, **env):
    done = python(*args, cwd=cwd, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# -- distribution


def test_settings_are_the_one_home():
    assert fastxtend_amp.__version__ == CFG['version'] == metadata.version(CFG['lib_name'])
    plain = {r.split('>')[0] for r in metadata.requires(CFG['lib_name']) if 'extra' not in r}
    assert plain == {'torch', 'fastai', 'fastcore'} == {r.split('>')[0] for r in CFG['requirements'].split()}
    for place in SCRIPTS.values():
        module, _, function = place.partition(':')
        assert callable(getattr(importlib.import_module(module), function)), place


SMOKE = """
from fastxtend_amp import *                                      # before fastai
names = sorted(n for n in dir() if not n.startswith('__'))
import sys, fastxtend_amp
from fastai.vision.all import *
from fastai.callback.all import *
assert fastxtend_amp.__file__.startswith(sys.argv[1]), fastxtend_amp.__file__
assert names == sorted(fastxtend_amp.__all__), names
from fastxtend_amp import *
for f in (Learner.to_bf16, MixedPrecision): assert 'fastxtend_amp' in str(f.__module__), f
ds = [(torch.randn(4), torch.randn(1)) for _ in range(8)]
learn = Learner(DataLoaders.from_dsets(ds, ds, bs=4, device='cpu', num_workers=0), nn.Linear(4, 1), nn.MSELoss())
with learn.no_bar(), learn.no_logging(): learn.to_bf16().fit(1)
print(fastxtend_amp.__version__, len(learn.recorder.losses))
"""


@pytest.mark.slow
def test_wheel_and_sdist(tmp_path):
    "The wheel contains only the package; the sdist builds it again; it trains, also if imported before fastai."
    source, dist, target, empty = (tmp_path / n for n in ('source', 'dist', 'target', 'empty'))
    unwanted = ('.git', '.venv', 'venv', '*.egg-info', '__pycache__', 'models', 'build', 'dist', '.*cache*')
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*unwanted))
    empty.mkdir()
    offline = ('--no-deps', '--no-build-isolation', '--no-index', '--disable-pip-version-check', '-q')
    assert run(source / 'setup.py', '--version', cwd=empty).split()[-1] == CFG['version']  # from any folder
    run('setup.py', '-q', 'sdist', '-d', dist, cwd=source)
    run('-m', 'pip', 'wheel', *offline, '-w', dist, *dist.glob('*.tar.gz'), cwd=source)  # built from the sdist only
    (wheel,) = dist.glob('*.whl')
    names = zipfile.ZipFile(wheel).namelist()
    modules = {str(f.relative_to(ROOT)) for f in (ROOT / 'fastxtend_amp').rglob('*.py')} | {'fastxtend_amp/py.typed'}
    assert {n for n in names if '.dist-info/' not in n} == modules
    described = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith('/METADATA'))).decode()
    assert 'Classifier: Typing :: Typed' in described and 'URL: ' not in described
    run('-m', 'pip', 'install', *offline, '--target', target, wheel, cwd=source)
    assert run('-c', SMOKE, target, cwd=empty, PYTHONPATH=str(target)).split() == [CFG['version'], '2']
    assert {f.name for f in (target / 'bin').iterdir()} == {*SCRIPTS}


@pytest.mark.parametrize(
    'command, said',
    [
        ('ruff check', 'All checks passed!'),
        ('ruff format --check tests', 'already formatted'),
        pytest.param('mypy', 'Success: no issues', marks=pytest.mark.slow),
    ],
)
def test_clean(command, said):
    "With the tools' caches, which git ignores: a second run takes a second."
    pytest.importorskip(command.split()[0], reason='needs the extra dev')
    assert said in run('-m', *command.split())


def test_mutations_change_one_place():
    for row in mutations.MUTATIONS:
        assert mutations.files_of(row)
        assert (PACKAGE / row.file).read_text(encoding='utf-8').count(row.line) == 1, row.why


# -- what importing changes

LATE = '''
import functools, tempfile, torch, fastai.learner, sys
from fastai.vision.all import *
from fastai.text.all import *
# As another library that wraps fastai's functions.
def wrapped(f): return functools.wraps(f)(lambda *args, **kwargs: f(*args, **kwargs))
for name in ('save_model', 'load_model'): setattr(fastai.learner, name, wrapped(getattr(fastai.learner, name)))
classes = [Learner, TextLearner, Callback, DataLoaders, fastai.optimizer.Optimizer, OptimWrapper, torch.autocast,
           torch.no_grad, nn.Module, torch.amp.GradScaler, torch.optim.Optimizer]
spaces = [*classes, torch, torch.serialization, fastai.learner, fastai.text.learner]
before = [dict(vars(s)) for s in spaces]
names = ('fit', 'one_batch', '__enter__', 'validate', 'get_preds')
own = {n: getattr(Learner, n).__code__ for n in names}
import fastxtend_amp
for s, b in zip(spaces, before):
    for name, value in vars(s).items():
        if b.get(name) is not value and not name.startswith('__abc'): print(getattr(s, '__name__', s) + '.' + name)
ds = [(torch.randn(4), torch.randn(1)) for _ in range(8)]
dls = DataLoaders.from_dsets(ds, ds, bs=4, device='cpu', num_workers=0)
learn = Learner(dls, nn.Linear(4, 1), loss_func=MSELossFlat(), path=tempfile.mkdtemp())
def plain(): return all(getattr(Learner, n).__code__ is c and n not in learn.__dict__ for n, c in own.items())
assert plain() and not torch.is_autocast_enabled('cpu') and 'torch_xla' not in sys.modules
learn.to_fp16(init_scale=512.); learn.create_opt()
assert torch.load(learn.save('a'), weights_only=False)['opt']['grad_scaler']['scale'] == 512.
learn.to_fp16().load('a')
assert learn.mixed_precision.scale == 512.
learn.to_fp32()
assert plain()
'''
REPLACED = {'Learner.save', 'Learner.load', 'TextLearner.load', 'Learner.export', 'Learner._with_events'}
METHODS = {'amp_context', 'precision_as', 'to_amp', 'to_fp32', 'to_half_weights'}
METHODS |= {'compare_precision', 'precision_decision', 'precision_report', *(f'to_{name}' for name in PRECISIONS)}


def test_importing_adds_methods_and_replaces_few():
    "The script asserts that a learner without precision runs fastai's own code."
    public = {n for n in run('-c', LATE).split() if '._' not in n or n == 'Learner._with_events'} - {
        'fastai.learner.save_model'
    }
    assert public - {'Learner.mixed_precision'} == REPLACED | {f'Learner.{name}' for name in METHODS}


# -- the rooms


def imported(file):
    "Return the package's rooms that `file` imports when it is imported itself."
    for node in ast.parse(file.read_text()).body:
        assert 'fastxtend_amp' not in ast.unparse(node) or not isinstance(node, ast.ImportFrom), (file, node.lineno)
        if isinstance(node, ast.ImportFrom) and node.level == 2:
            yield (node.module or node.names[0].name).partition('.')


ROOMS = ['devices', 'precisions', 'training', 'backends', 'insight', 'tools']  # as in CONTRIBUTING.md


def test_imports_go_in_one_direction():
    "A room imports only rooms before it, and none imports `backends`; the files beside them import no room."
    for i, room in enumerate(ROOMS):
        for file in (PACKAGE / room).glob('*.py'):
            found = {name for name, *_ in imported(file)} & {*ROOMS}
            assert found <= {*ROOMS[:i]} - {'backends'}, (file, found)
    for file in {*PACKAGE.glob('*.py')} - {PACKAGE / '__init__.py'}:
        assert not any(f'from .{room}' in file.read_text() for room in ROOMS), file
    assert {f.parent.name for f in PACKAGE.glob('*/__init__.py')} == {*ROOMS}


def test_the_core_trains_without_the_rooms(monkeypatch):
    def trained():
        learn = learner().to_fp16(init_scale=2.0**20)
        learn.fit(2)
        return params(learn), learn.mixed_precision.scales

    watched = trained()
    monkeypatch.setattr(callback, 'WATCHERS', [])
    alone = trained()
    assert same(watched[0], alone[0]) and watched[1] == alone[1]
