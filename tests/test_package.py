"What an installation is, and that the order of imports does not matter."
import configparser, importlib, os, shutil, subprocess, sys, zipfile
from importlib import metadata
from pathlib import Path

import pytest

import fastxtend_amp

ROOT = Path(__file__).parent.parent
SETTINGS = configparser.ConfigParser(delimiters=['='])
SETTINGS.read(ROOT / 'settings.ini')
VERSION = SETTINGS['DEFAULT']['version']


def python(code): return subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, check=True).stdout.strip()


SHOW = '; print(Learner.to_bf16.__module__, Learner.to_channelslast.__module__)'


@pytest.mark.parametrize('imports', ['import fastxtend_amp; from fastai.vision.all import *', 'from fastai.vision.all import *; import fastxtend_amp',
                                     'import fastxtend_amp; from fastai.learner import Learner'])
def test_order_of_imports(imports): assert python(imports + SHOW) == 'fastxtend_amp.learner fastxtend_amp.learner'


def test_star_import():
    names = python('from fastxtend_amp import *; print(sorted(n for n in dir() if not n.startswith("__")))')
    assert names == str(sorted(fastxtend_amp.__all__))
    assert python('from fastai.vision.all import *; from fastxtend_amp import *; print(MixedPrecision.__module__)') == 'fastxtend_amp.callback'


def test_importing_leaves_torch_alone():
    told = python('import torch; a = (torch.no_grad.__exit__, torch.autocast.__enter__); import fastxtend_amp, sys; '
                  'print(a == (torch.no_grad.__exit__, torch.autocast.__enter__), "torch_xla" in sys.modules, torch.is_autocast_enabled("cpu"))')
    assert told == 'True False False'


def test_settings_are_the_one_home():
    cfg = SETTINGS['DEFAULT']
    import fastxtend_amp
    assert fastxtend_amp.__version__ == cfg['version'] == metadata.version(cfg['lib_name'])
    requires = metadata.requires(cfg['lib_name'])
    plain = {r.split('>')[0] for r in requires if 'extra' not in r}
    assert plain == {'torch', 'fastai', 'fastcore'} == {r.split('>')[0] for r in cfg['requirements'].split()}
    for script in cfg['console_scripts'].split():
        name, _, target = script.partition('=')
        module, _, function = target.partition(':')
        assert callable(getattr(importlib.import_module(module), function)), script
    assert any(e.name == 'fastxtend_amp_demo' for e in metadata.distribution(cfg['lib_name']).entry_points)


def test_setup_works_from_any_folder(tmp_path):
    out = subprocess.run([sys.executable, ROOT / 'setup.py', '--version'], capture_output=True, text=True, cwd=tmp_path)
    assert out.stdout.split()[-1] == VERSION, out.stderr


SMOKE = """
import sys, warnings; warnings.simplefilter('ignore')
import torch, fastxtend_amp
from fastai.basics import *
assert fastxtend_amp.__file__.startswith(sys.argv[1]), fastxtend_amp.__file__
ds = [(torch.randn(4), torch.randn(1)) for _ in range(8)]
learn = Learner(DataLoaders.from_dsets(ds, ds, bs=4, device='cpu', num_workers=0), nn.Linear(4, 1), loss_func=MSELossFlat()).to_bf16()
with learn.no_bar(), learn.no_logging(): learn.fit(1)
print(fastxtend_amp.__version__, len(learn.recorder.losses))
"""


def test_wheel_and_sdist(tmp_path):
    "The wheel holds the package and nothing else; the sdist builds it again, and what comes out trains."
    source, dist, target, empty = (tmp_path / n for n in ('source', 'dist', 'target', 'empty'))
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns('.git', '.venv', 'venv', '*.egg-info', '__pycache__', 'models', 'build', 'dist', '.*cache*'))
    empty.mkdir()
    def run(*args, cwd=source, **env):
        out = subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=cwd, env={**os.environ, **env})
        assert out.returncode == 0, out.stdout + out.stderr
        return out.stdout
    offline = ('--no-deps', '--no-build-isolation', '--no-index', '--disable-pip-version-check', '-q')
    run('setup.py', '-q', 'sdist', '-d', dist)
    sdist, = dist.glob('*.tar.gz')
    run('-m', 'pip', 'wheel', *offline, '-w', dist, sdist)       # built from the sdist alone
    wheel, = dist.glob('*.whl')
    names = zipfile.ZipFile(wheel).namelist()
    modules = {str(f.relative_to(ROOT)) for f in (ROOT / 'fastxtend_amp').rglob('*.py')} | {'fastxtend_amp/py.typed'}
    assert {n for n in names if '.dist-info/' not in n} == modules
    described = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith('/METADATA'))).decode()
    assert 'Classifier: Typing :: Typed' in described and 'URL: ' not in described
    run('-m', 'pip', 'install', *offline, '--target', target, wheel)
    assert run('-c', SMOKE, target, cwd=empty, PYTHONPATH=str(target)).split() == [VERSION, '2']
    assert {f.name for f in (target / 'bin').iterdir()} == {'fastxtend_amp_check', 'fastxtend_amp_demo'}
