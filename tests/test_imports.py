"The direction of the imports, and what importing the package does to fastai and torch."
import ast, subprocess, sys
from pathlib import Path

import pytest

import fastxtend_amp

PACKAGE = Path(fastxtend_amp.__file__).parent
ROOMS = {f.name for f in PACKAGE.iterdir() if f.is_dir() and not f.name.startswith('_')}
CORE = sorted(f for f in PACKAGE.glob('*.py') if f.stem != '__init__')


def imported(file):
    "The package's modules that `file` imports, as parts of their names below the package."
    package = ('fastxtend_amp', *file.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[:len(package) - node.level + 1] if node.level else ()
            name = (*base, *(node.module or '').split('.')) if node.module else base
            for alias in node.names: yield (*name, alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names: yield tuple(alias.name.split('.'))


@pytest.mark.parametrize('file', CORE, ids=lambda f: f.stem)
def test_the_core_imports_no_room(file):
    assert ROOMS >= {'insight', 'devices', 'tools'}
    for name in imported(file):
        if name[0] == 'fastxtend_amp' and len(name) > 1: assert name[1] not in ROOMS, name


def test_no_cycles_in_the_core():
    names = {f.stem: {n[1] for n in imported(f) if n[0] == 'fastxtend_amp' and len(n) > 2} for f in CORE}
    done = set()
    def visit(name, path):
        assert name not in path, path
        if name not in done:
            for other in names.get(name, ()): visit(other, (*path, name))
            done.add(name)
    for name in names: visit(name, ())


def python(code): return subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, check=True).stdout.split()


ADDED = {'amp_context', 'compare_precision', 'precision', 'precision_decision', 'precision_report', 'to_amp', 'to_bf16', 'to_channelslast', 'to_fp16', 'to_fp32', 'to_half_weights'}


def test_importing_adds_methods_to_the_learner_and_replaces_nothing_else():
    told = python("""
import torch, fastai.learner
from fastai.vision.all import *
from fastai.text.all import *
classes = [Learner, TextLearner, Callback, DataLoaders, fastai.optimizer.Optimizer, OptimWrapper, torch.autocast, torch.no_grad, torch.nn.Module, torch.amp.GradScaler]
spaces = [*classes, torch, torch.serialization, fastai.learner, __import__('fastai.text.learner').text.learner]
before = [dict(vars(s)) for s in spaces]
import fastxtend_amp
for s, b in zip(spaces, before):
    for name, value in vars(s).items():
        if b.get(name) is not value and not name.startswith('__abc'): print(getattr(s, '__name__', s) + '.' + name)
""")
    functions = {'fastai.learner.save_model', 'fastai.learner.load_model', 'fastai.text.learner.load_model_text'}
    kept = {t for t in told if t.startswith('Learner._orig_to_')}          # where fastcore's `patch` keeps fastai's methods
    assert set(told) - kept == functions | {f'Learner.{n}' for n in ADDED}


def test_a_learner_without_a_precision_callback_runs_fastais_own_code():
    told = python("""
from fastai.basics import *
before = {n: getattr(Learner, n).__code__ for n in ('fit', 'one_batch', 'export', '_with_events', '__enter__', 'save', 'load', 'validate')}
subclass = Learner.__init_subclass__
import fastxtend_amp
ds = [(torch.randn(4), torch.randn(1)) for _ in range(8)]
learn = Learner(DataLoaders.from_dsets(ds, ds, bs=4, device='cpu', num_workers=0), nn.Linear(4, 1), loss_func=MSELossFlat())
def own(): return all(getattr(learn, n).__func__.__code__ is c and n not in learn.__dict__ for n, c in before.items())
print(own(), Learner.__init_subclass__ == subclass)
learn.to_bf16(); print(own())
learn.to_fp32(); print(own())
""")
    assert told == ['True', 'True', 'False', 'True']


def test_trains_without_any_observer():
    told = python("""
import fastxtend_amp, warnings, torch
from fastai.basics import *
from fastxtend_amp.observer import OBSERVERS
print(sorted(o.__name__ for o in OBSERVERS))
ds = [(torch.randn(4), torch.randn(1)) for _ in range(8)]
def train():
    set_seed(0)
    learn = Learner(DataLoaders.from_dsets(ds, ds, bs=4, shuffle=False, device='cpu', num_workers=0), nn.Linear(4, 1), loss_func=MSELossFlat())
    learn.dls.train.shuffle = False
    learn.to_fp16(init_scale=2.**20)
    with learn.no_bar(), learn.no_logging(): learn.fit(2)
    return learn
watched = train()
OBSERVERS.clear()
alone = train()
print(alone.precision.observers, all(torch.equal(a, b) for a, b in zip(watched.model.parameters(), alone.model.parameters())), len(alone.precision.scales))
""")
    assert told[-3:] == ['[]', 'True', '4'] and {"'OverflowWatch',", "'Replicas']"} <= {t.lstrip('[') for t in told}


def test_xla_is_left_alone_until_it_is_in_use():
    assert python("import fastxtend_amp, sys; print('torch_xla' in sys.modules)") == ['False']


def test_the_scale_is_saved_where_another_library_wrapped_fastais_functions_before():
    told = python("""
import functools, tempfile, torch
import fastai.learner
def wrapped(f): return functools.wraps(f)(lambda *args, **kwargs: f(*args, **kwargs))
for name in ('save_model', 'load_model'): setattr(fastai.learner, name, wrapped(getattr(fastai.learner, name)))
import fastxtend_amp
from fastai.basics import *
ds = [(torch.randn(4), torch.randn(1)) for _ in range(8)]
learn = Learner(DataLoaders.from_dsets(ds, ds, bs=4, device='cpu', num_workers=0), nn.Linear(4, 1), loss_func=MSELossFlat(), path=tempfile.mkdtemp())
learn.to_fp16(init_scale=512.); learn.create_opt()
print('grad_scaler' in torch.load(learn.save('a'), weights_only=False)['opt'])
learn.to_fp16().load('a')
print(learn.precision.scale)
""")
    assert told == ['True', '512.0']
