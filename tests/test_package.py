"The installed package; lint and types, as configured in pyproject.toml."

import configparser, importlib, importlib.util, os, shutil, subprocess, sys, zipfile
from importlib import metadata
from pathlib import Path

import pytest

import fastxtend_amp

ROOT = Path(__file__).parent.parent
SETTINGS = configparser.ConfigParser(delimiters=['='])
SETTINGS.read(ROOT / 'settings.ini')
CFG = SETTINGS['DEFAULT']


def run(*args, cwd=ROOT, **env):
    out = subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=cwd, env={**os.environ, **env})
    assert out.returncode == 0, out.stdout + out.stderr
    return out.stdout


def test_settings_are_the_one_home():
    assert fastxtend_amp.__version__ == CFG['version'] == metadata.version(CFG['lib_name'])
    plain = {r.split('>')[0] for r in metadata.requires(CFG['lib_name']) if 'extra' not in r}
    assert plain == {'torch', 'fastai', 'fastcore'} == {r.split('>')[0] for r in CFG['requirements'].split()}
    for script in CFG['console_scripts'].split():
        module, _, function = script.partition('=')[2].partition(':')
        assert callable(getattr(importlib.import_module(module), function)), script


SMOKE = """
from fastxtend_amp import *                                      # before fastai
names = sorted(n for n in dir() if not n.startswith('__'))
import sys, torch, fastxtend_amp
from fastai.vision.all import *
from fastai.callback.all import *
assert fastxtend_amp.__file__.startswith(sys.argv[1]), fastxtend_amp.__file__
assert names == sorted(fastxtend_amp.__all__), names
for f in (Learner.to_bf16, Learner.to_channelslast, Learner.to_fp16):
    assert f.__module__ == 'fastxtend_amp.training.learner'
from fastxtend_amp import *
assert MixedPrecision.__module__ == 'fastxtend_amp.training.callback'
ds = [(torch.randn(4), torch.randn(1)) for _ in range(8)]
dls = DataLoaders.from_dsets(ds, ds, bs=4, device='cpu', num_workers=0)
learn = Learner(dls, nn.Linear(4, 1), loss_func=MSELossFlat()).to_bf16()
with learn.no_bar(), learn.no_logging(): learn.fit(1)
print(fastxtend_amp.__version__, len(learn.recorder.losses))
"""


def test_wheel_and_sdist(tmp_path):
    "The wheel contains only the package; the sdist builds it again; it trains, also if imported before fastai."
    source, dist, target, empty = (tmp_path / n for n in ('source', 'dist', 'target', 'empty'))
    unwanted = ('.git', '.venv', 'venv', '*.egg-info', '__pycache__', 'models', 'build', 'dist', '.*cache*')
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*unwanted))
    empty.mkdir()
    offline = ('--no-deps', '--no-build-isolation', '--no-index', '--disable-pip-version-check', '-q')
    assert run(source / 'setup.py', '--version', cwd=empty).split()[-1] == CFG['version']  # from any folder
    run('setup.py', '-q', 'sdist', '-d', dist, cwd=source)
    (sdist,) = dist.glob('*.tar.gz')
    run('-m', 'pip', 'wheel', *offline, '-w', dist, sdist, cwd=source)  # built from the sdist only
    (wheel,) = dist.glob('*.whl')
    names = zipfile.ZipFile(wheel).namelist()
    modules = {str(f.relative_to(ROOT)) for f in (ROOT / 'fastxtend_amp').rglob('*.py')} | {'fastxtend_amp/py.typed'}
    assert {n for n in names if '.dist-info/' not in n} == modules
    described = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith('/METADATA'))).decode()
    assert 'Classifier: Typing :: Typed' in described and 'URL: ' not in described
    run('-m', 'pip', 'install', *offline, '--target', target, wheel, cwd=source)
    assert run('-W', 'ignore', '-c', SMOKE, target, cwd=empty, PYTHONPATH=str(target)).split() == [CFG['version'], '2']
    assert {f.name for f in (target / 'bin').iterdir()} == {s.partition('=')[0] for s in CFG['console_scripts'].split()}


@pytest.mark.parametrize('command', ['ruff check', 'ruff format --check tests', 'mypy'])
def test_clean(command):
    "With the tools' caches, which git ignores: a second run takes a second."
    tool, *arguments = command.split()
    if importlib.util.find_spec(tool) is None:
        pytest.skip(f'needs {tool}, of the extra dev')
    done = subprocess.run([sys.executable, '-m', tool, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
