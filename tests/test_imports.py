"The direction of imports, and the effects of importing the package on fastai and torch."

import ast, subprocess, sys
from pathlib import Path

import pytest

from fastxtend_amp.training import callback, checkpoint
from fastxtend_amp.tools import memory
from helpers import *

PACKAGE = Path(fastxtend_amp.__file__).parent
ROOMS = {f.name for f in PACKAGE.iterdir() if f.is_dir() and not f.name.startswith('_')}
CORE = sorted(f for f in PACKAGE.glob('*.py') if f.stem != '__init__')


def imported(file):
    "Return the package's modules that `file` imports, also inside functions, by their names within the package."
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield (node.module or node.names[0].name).split('.')[0]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module]
            assert not any(n.startswith('fastxtend_amp') for n in names), (file, names)


def test_the_core_imports_no_room_and_has_no_cycles():
    assert ROOMS >= {'insight', 'devices', 'tools'}
    names, done = {f.stem: set(imported(f)) for f in CORE}, set()
    assert not {(file, name) for file, found in names.items() for name in found & ROOMS}

    def visit(name, path):
        assert name not in path, path
        for other in names.get(name, ()) if name not in done else ():
            visit(other, (*path, name))
        done.add(name)

    for name in names:
        visit(name, ())


def test_the_core_trains_without_the_rooms(monkeypatch):
    def trained():
        learn = learner().to_fp16(init_scale=2.0**20)
        learn.fit(2)
        return params(learn), learn.precision.scales

    watched = trained()
    monkeypatch.setattr(callback, 'WATCHERS', [])
    monkeypatch.setattr(checkpoint, 'FORMATS', [])
    alone = trained()
    assert same(watched[0], alone[0]) and watched[1] == alone[1]


LATE = '''
import functools, tempfile, torch, fastai.learner
from fastai.vision.all import *
from fastai.text.all import *
# As another library that wraps fastai's functions.
def wrapped(f): return functools.wraps(f)(lambda *args, **kwargs: f(*args, **kwargs))
for name in ('save_model', 'load_model'): setattr(fastai.learner, name, wrapped(getattr(fastai.learner, name)))
classes = [Learner, TextLearner, Callback, DataLoaders, fastai.optimizer.Optimizer, OptimWrapper, torch.autocast,
    torch.no_grad,
           torch.nn.Module, torch.amp.GradScaler, torch.optim.Optimizer]
spaces = [*classes, torch, torch.serialization, fastai.learner, fastai.text.learner]
before = [dict(vars(s)) for s in spaces]
names = ('fit', 'one_batch', '__enter__', 'validate', 'get_preds')
own = {n: getattr(Learner, n).__code__ for n in names}
import fastxtend_amp, sys
for s, b in zip(spaces, before):
    for name, value in vars(s).items():
        if b.get(name) is not value and not name.startswith('__abc'): print(getattr(s, '__name__', s) + '.' + name)
ds = [(torch.randn(4), torch.randn(1)) for _ in range(8)]
path = tempfile.mkdtemp()
dls = DataLoaders.from_dsets(ds, ds, bs=4, device='cpu', num_workers=0)
learn = Learner(dls, nn.Linear(4, 1), loss_func=MSELossFlat(), path=path)
def plain(): return all(getattr(Learner, n).__code__ is c and n not in learn.__dict__ for n, c in own.items())
assert plain() and not torch.is_autocast_enabled('cpu') and 'torch_xla' not in sys.modules
learn.to_fp16(init_scale=512.); learn.create_opt()
assert torch.load(learn.save('a'), weights_only=False)['opt']['grad_scaler']['scale'] == 512.
learn.to_fp16().load('a')
assert learn.precision.scale == 512. and Learner.to_channelslast.__module__ == 'fastxtend_amp.training.learner'
learn.to_fp32()
assert plain()

import resource
def page_faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def faults():                                                    # of four tensors of 64 MB, one after the other
    before = page_faults()
    for _ in range(4): torch.empty(2**24).fill_(1)
    return page_faults() - before
faults()
before = faults()
said = fastxtend_amp.keep_freed_memory()
faults()
print('MEMORY', before, min(faults() for _ in range(3)), said)   # other blocks may be freed in between
'''
REPLACED = {'Learner.save', 'Learner.load', 'TextLearner.load', 'Learner.export', 'Learner._with_events'} | {
    'fastai.learner.save_model'
}
ADDED = {f'Learner.to_{name}' for name in PRECISIONS} | {
    f'Learner.{n}'
    for n in (
        *('_scopes', 'amp_context', 'mixed_precision', 'precision', 'precision_as'),  # the core's
        *('to_amp', 'to_channelslast', 'to_fp32'),
        *('compare_precision', 'precision_decision', 'precision_report'),  # and those of `insight/`
    )
}


@pytest.fixture(scope='module')
def late():
    "Return what `LATE` prints; `LATE` itself asserts that a learner without precision runs fastai's own code."
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', LATE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition('MEMORY')


def test_importing_adds_methods_and_replaces_five(late):
    assert {
        name for name in late[0].split() if not name.startswith('Learner._orig_')
    } == REPLACED | ADDED  # `patch` keeps fastai's there


@pytest.mark.skipif(memory._nothing_to_do() is not None, reason='needs Linux with glibc')
def test_freed_memory_is_kept_from_the_call_on(late):
    before, after, said = late[2].split(maxsplit=2)
    assert float(before) > 4 * 2**26 / 2**21  # pages of 2 MB at most: importing changes nothing
    assert float(after) < 10 and 'up to 1,024 MB are reused' in said
