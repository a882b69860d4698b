"Files: training goes on bit for bit, plain fastai reads them, and an old file is replaced only by a complete one."

import copy, signal

import fastai.callback.schedule  # noqa: F401  `lr_find`
import pytest, torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner, load_learner
from fastai.text.learner import TextLearner
from torch import nn

import fastxtend_amp
from fastxtend_amp import MixedPrecision
from fastxtend_amp.training.current import precision_callback
from helpers import At, finite, is_outside_a_fit, learner, left_on, mlp, params, python, replaced, same, told
from rows import FP32, TO, differences, end_state, make, third_batch

KEY = 'grad_scaler'  # of the state in the file, among the optimizer's


def after_fits(to, path, n=2, opt=None, **kwargs):
    learn = make(to, opt=opt, path=path, **kwargs)
    learn.create_opt()
    learn.fit(n, 0.01)
    return learn


def in_file(file):
    return torch.load(file, weights_only=False)


def goes_on_alike(learn, other):
    "Return whether two learners are equal bit for bit, now and after another epoch; history and losses aside."
    found = []
    for _ in range(2):
        found += differences({**end_state(learn), 'scales': []}, {**end_state(other), 'scales': []})
        for l in (learn, other):
            l.fit(1, 0.01)
    return found == []


# -- saved and loaded

SAME = [('overflowing', 'adam'), ('overflowing', 'fused adamw'), ('odd factors', 'sgd'), ('own scaler', 'adamw')]
SAME += [('bf16', 'adam'), ('skipping', 'fused sgd'), ('static', 'sgd'), ('flat', 'adam'), ('no masters', 'kahan')]
SAME += [('fp32', 'adam'), ('flat fp16', 'sgd'), ('unscaled', 'adam')]


@pytest.mark.parametrize('to, opt', SAME)
def test_training_goes_on_from_a_file(to, opt, tmp_path):
    learn, new = after_fits(to, tmp_path, opt=opt), make(to, opt=opt, path=tmp_path)
    file = learn.save('a')
    content, state = in_file(file), learn.mixed_precision.state_dict() if precision_callback(learn) else {}
    assert file == tmp_path / 'models' / 'a.pth' and [f.name for f in file.parent.iterdir()] == ['a.pth']
    assert {*content} == {'model', 'opt'} and content['opt'].get(KEY, {}) == state and KEY not in learn.opt.state_dict()
    assert all(type(v) in (int, float) for v in state.values())
    assert new.load('a') is new and goes_on_alike(learn, new)


def saved_by(cls, path):
    "A function that builds a learner, and one of them that has saved 'with' its optimizer and 'without'."

    def build():
        learn = TO['overflowing'](learner(nn.Sequential(mlp()), cls=cls, path=path))
        names = ('ModelResetter', 'RNNCallback', 'RNNRegularizer')
        return learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ in names])

    learn = build()
    learn.fit(2, 0.01)
    learn.save('with')
    learn.save('without', with_opt=False)
    return build, learn


LOADS = [lambda l: l.load('with', with_opt=False), lambda l: l.load('without')]


@pytest.mark.parametrize(
    'cls, load',
    [*((c, f) for c in (Learner, TextLearner) for f in LOADS), (TextLearner, lambda l: l.load('with', False))],
)
def test_without_the_optimizer(cls, load, tmp_path):
    build, learn = saved_by(cls, tmp_path)
    assert in_file(tmp_path / 'models/without.pth').keys() == learn.model.state_dict().keys()
    other, fresh = build(), build().mixed_precision.state_dict()
    told(lambda: load(other))
    assert same(params(other), params(learn)) and other.mixed_precision.state_dict() == fresh
    assert not other.opt or not any('grad_avg' in s for s in other.opt.state.values())


def test_weights_only_and_file_objects(tmp_path):
    learn, other = after_fits('overflowing', tmp_path), make('overflowing', path=tmp_path)
    with open(learn.save('a'), 'rb') as f:
        other.load(f, weights_only=True)
    with open(tmp_path / 'b.pth', 'wb') as f:
        learn.save(f)
    last = make('overflowing').load(tmp_path / 'b')
    assert differences(end_state(last), {**end_state(learn), 'scales': []}) == [] and goes_on_alike(learn, other)


@pytest.mark.parametrize('to', ['fp16', 'bf16', 'flat', 'no masters'])
def test_a_file_that_is_loaded_in_a_fit(to, tmp_path):
    best = after_fits(to, tmp_path)
    best.save('a')
    for event in ('after_batch', 'after_train', 'after_epoch'):
        learn = after_fits(to, tmp_path)
        load = At(event, lambda l: l.load('a') if event != 'after_batch' or third_batch(l) else None, 70)
        learn.fit(1, 0.01, cbs=load)
        assert finite(learn) and is_outside_a_fit(learn) and {p.dtype for p in params(learn)} == {FP32}
        assert same(params(learn), params(best)) is (event != 'after_batch')


# -- files that are damaged or not complete


@pytest.mark.parametrize('to', ['bf16', 'fp16'])
def test_a_full_disk_keeps_the_old_file(to, tmp_path, monkeypatch):
    "A file that is replaced keeps its mode, and a link its target."
    learn = after_fits(to, tmp_path)
    file = learn.save('a')
    old = file.read_bytes()

    def full(obj, f, *args, **kwargs):
        f.write_bytes(b'x' * 100)
        raise OSError(28, 'No space left on device')

    with monkeypatch.context() as m:
        m.setattr(torch, 'save', full)
        with pytest.raises(OSError, match='No space'):
            learn.save('a')
    assert file.read_bytes() == old and [f.name for f in file.parent.iterdir()] == ['a.pth']
    learn.fit(1)
    file.chmod(0o600)
    learn.save('a')
    assert file.read_bytes() != old and file.stat().st_mode & 0o777 == 0o600
    link = tmp_path / 'link.pth'
    link.symlink_to(file)  # to a larger disk
    learn.save(tmp_path / 'link')
    assert link.is_symlink()


RESUMED = [('overflowing', 'sgd'), ('overflowing', 'fused adamw'), ('bf16', 'adam'), ('overflowing', 'adamw')]
RESUME = '''
import os, shutil, signal, sys, torch
from pathlib import Path
from training.rows import end_state, make
path = Path(sys.argv[1])
for to, opt in eval(sys.argv[2]):
    learn = make(to, opt=opt, path=path).load(opt)
    learn.fit(2, 0.01)
    torch.save(end_state(learn), path / f'{opt}.result')

def half_of_it(obj, file, *args, save=torch.save, **kwargs):
    save(obj, file, *args, **kwargs)
    os.truncate(file, file.stat().st_size // 2)
    os.kill(os.getpid(), signal.SIGKILL)

shutil.copy(learn.save('killed'), path)
learn.fit(1, 0.01)
torch.save = half_of_it
learn.save('killed')
'''


def test_a_new_process_resumes_and_is_killed_while_saving(tmp_path):
    expected = {}
    for to, opt in RESUMED:
        learn = after_fits(to, tmp_path, opt=opt)
        learn.save(opt)
        n = len(learn.mixed_precision.scales)
        learn.fit(2, 0.01)
        expected[opt] = end_state(learn)
        expected[opt]['scales'] = expected[opt]['scales'][n:]
    done = python('-c', RESUME, tmp_path, RESUMED)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    for opt, wanted in expected.items():
        assert differences(in_file(tmp_path / f'{opt}.result'), wanted) == []
    assert (tmp_path / 'models' / 'killed.pth').read_bytes() == (tmp_path / 'killed.pth').read_bytes()
    assert make('overflowing', opt='adamw', path=tmp_path).load('killed')


# -- without the package


class Empty(DataLoaders):
    "Replaces the data in an export; returns one of fastai's DataLoaders without data."

    def __init__(self):
        super().__init__()

    def new_empty(self):
        return DataLoaders()


WITHOUT = '''
import sys, warnings, torch
for name in ('fastxtend_amp', 'helpers', 'rows', 'test_checkpoint'): sys.modules[name] = None  # cannot be imported
from functools import partial
from pathlib import Path
from fastai.basics import *
from fastai.learner import load_learner
path = Path(sys.argv[1])
for name, opt in (('adam', Adam), ('fused adamw', partial(OptimWrapper, opt=partial(torch.optim.AdamW, fused=True)))):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    learn = Learner(DataLoaders([], []), model, loss_func=nn.MSELoss(), opt_func=opt, path=path)
    with warnings.catch_warnings():
        warnings.filterwarnings('error', category=UserWarning)
        learn.load(name, weights_only=True)
    states = learn.opt.opt.state if name != 'adam' else learn.opt.state
    assert len(states) == 6 and float(next(iter(states.values()))['step']) > 0, states
x, expected = torch.load(path / 'expected', weights_only=False)
for how, y in expected.items():
    if how == 'model': model = torch.load(path / 'model.pt', weights_only=False)
    else: model = load_learner(path / (how + '.pkl')).model
    assert torch.equal(model.eval()(x), y), how
print('read', len(expected))
'''


def test_files_exports_and_models_are_read_without_the_package(tmp_path):
    for opt in ('adam', 'fused adamw'):
        after_fits('overflowing', tmp_path, opt=opt).save(opt)
    x, expected = torch.randn(3, 6), {}
    for how in ('fp16', 'after an exception', 'model'):
        learn = learner(path=tmp_path, opt_func=fastxtend_amp.fused(torch.optim.AdamW))
        learn.to_fp16(fp32_modules='0', init_scale=8.0).fit(1, 0.01)
        if how == 'after an exception':
            with pytest.raises(ZeroDivisionError):
                learn.fit(1, cbs=At('before_step', lambda l: 1 / 0, 20))
        expected[how] = learn.model.eval()(x)
        if how == 'model':  # with its precision, and modules kept in fp32
            torch.save(learn.model, tmp_path / 'model.pt')
            continue
        learn.dls = Empty()
        told(lambda: learn.export(f'{how}.pkl'))
    torch.save((x, expected), tmp_path / 'expected')
    done = python('-c', WITHOUT, tmp_path)
    assert done.stdout == 'read 3\n', done.stderr[-2000:]


@pytest.mark.parametrize('change', [{'scale': float('inf')}, {'_growth_tracker': None}], ids=str)
def test_a_damaged_loss_scale_raises_after_the_optimizer_is_loaded(change, tmp_path):
    learn, new = after_fits('overflowing', tmp_path), make('overflowing', path=tmp_path)
    content = in_file(file := learn.save('a'))
    content['opt'][KEY] |= change
    torch.save(content, file)
    with pytest.raises(ValueError, match='state=.* cannot be used'):
        new.load('a')
    new.mixed_precision.load_state_dict(learn.mixed_precision.state_dict())
    assert goes_on_alike(learn, new)


@pytest.mark.parametrize('first', ['fp32', 'bf16'])
def test_a_file_that_is_loaded_before_fp16_is_set(first, tmp_path):
    "Also after `save` and `lr_find` in between. A scale that is given counts more than the file, with one warning."
    learn = after_fits('overflowing', tmp_path)
    learn.save('a')
    state = learn.mixed_precision.state_dict()

    def loaded(to=first):
        make(to, path=tmp_path).load('a').save('b')
        new = make(to, path=tmp_path).load('b')
        new.lr_find(num_it=4, show_plot=False, suggest_funcs=())
        with new.precision_as('fp16'):
            new.validate()
        return new

    other = loaded()
    assert not told(lambda: other.to_fp16(growth_interval=3), 'scale') and other.mixed_precision.state_dict() == state
    assert goes_on_alike(learn, other)
    for given in (dict(init_scale=4.0), dict(loss_scale=2.0), dict(scaler=torch.amp.GradScaler('cpu', 8.0))):
        other.to_fp32().load('a')
        assert len(told(lambda: other.to_fp16(**given), 'loaded loss scale of 8,192 is not used')) == 1
        assert other.mixed_precision.scale in (2.0, 4.0, 8.0)
    assert len(told(lambda: make('static', path=tmp_path).load('a'), 'is not used')) == 1
    after_fits('fp32', tmp_path).save('plain')
    assert not told(lambda: other.to_fp32().load('a').load('plain').to_fp16(), 'scale')
    assert other.mixed_precision.scale == 65536
    with other.to_fp32().load('a').precision_as('bf16'):
        other.load('plain')
    assert other.to_fp16().mixed_precision.scale == 65536


def test_a_file_saved_in_another_precision_for_a_while_has_the_scale(tmp_path):
    learn = after_fits('overflowing', tmp_path)
    scale = learn.mixed_precision.scale
    with pytest.raises(ValueError), learn.precision_as(MixedPrecision('bf16', fp32_modules='no module')):
        pass
    assert learn.mixed_precision.scale == scale != 65536
    with learn.precision_as('fp32'):
        learn.save('a')
    given = make('fp16', path=tmp_path).to_fp16(init_scale=4.0)
    given.save('weights', with_opt=False)
    for precision in ('fp32', 'fp16'):
        given.to_fp16(init_scale=4.0)
        with given.precision_as(precision):
            given.load('a').load('weights')  # a file of weights keeps the scale
        assert given.mixed_precision.scale == learn.mixed_precision.scale
    assert make('overflowing', path=tmp_path).load('a').mixed_precision.scale == learn.mixed_precision.scale


def test_a_model_copied_in_a_fit_is_exported_plain(tmp_path):
    "As an average of weights that takes the model's place afterwards."
    for end in (lambda l: l.to_fp32(), lambda l: told(lambda: l.export('model.pkl'))):
        learn, copies = make('bf16', path=tmp_path).to_bf16(fp32_modules='0'), []
        learn.fit(1, cbs=At('after_train', lambda l: copies.append(copy.deepcopy(l.model)), 20))
        learn.model = copies[0]
        assert replaced(learn.model) == ['0']
        end(learn)
        assert replaced(learn.model) == []


@pytest.mark.parametrize('event', [None, 'after_batch', 'after_epoch'])
@pytest.mark.parametrize('to', ['fp16', 'bf16', 'flat'])
def test_an_export_is_in_fp32(to, event, tmp_path):
    "Also in the middle of a fit."
    learn, files = after_fits(to, tmp_path, metrics=[nn.functional.l1_loss, fastxtend_amp.LossScaleMetric]), []

    def export(l):
        if event != 'after_batch' or third_batch(l):
            told(lambda: l.export('model.pkl'))
            files.append(params(l))

    cb, state = learn.mixed_precision, learn.mixed_precision.state_dict()
    if event:
        learn.fit(1, 0.01, cbs=At(event, export, 60))
    else:
        export(learn)
        assert cb.state_dict() == state
    assert learn.mixed_precision is cb and len(learn.metrics) == 2 and is_outside_a_fit(learn)
    assert b'fastxtend_amp' not in (tmp_path / 'model.pkl').read_bytes()
    for cpu in (True, False):
        loaded = load_learner(tmp_path / 'model.pkl', cpu=cpu)
        assert precision_callback(loaded) is None and left_on(loaded) == [] and same(params(loaded), files[0])
    learn.fit(1, 0.01)
    assert finite(learn) and not same(params(learn), files[0])


# -- patches by other libraries, which were there before

PATCHED = '''
import fastai.learner as fl, fastai.text.learner as ft, tempfile
called = []
def patch(cls, name):
    original = getattr(cls, name)
    def other(self, *args, **kwargs):
        called.append(name)
        return original(self, *args, **kwargs)
    setattr(cls, name, other)
for name in ('save', 'load', 'export', '_step'): patch(fl.Learner, name)
from helpers import loaders
from training.rows import make
for to in ('fp32', 'bf16', 'fp16'):
    learn = make(to, path=tempfile.mkdtemp(), dls=loaders(4))
    learn.fit(1)
    learn.save('model')
    learn.load('model')
    learn.export('model.pkl')
print(*called)
'''


def test_patches_that_were_there_before_are_called_once():
    done = python('-c', PATCHED)
    assert done.stdout.splitlines()[-1].split() == ['_step', 'save', 'load', 'export'] * 3, done.stderr[-3000:]
