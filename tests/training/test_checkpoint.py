"The loss scale is kept through fits, files, processes, exports and copies."

import copy, gc, os, pickle, signal, subprocess, sys, time, weakref
from itertools import product
from pathlib import Path

import pytest, torch
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import load_learner
from fastai.text.learner import TextLearner

from helpers import *

HERE = Path(__file__).parents[1]
SCALING = dict(init_scale=2.0**20, growth_interval=3)  # overflows at the start and whenever it has grown
KEY = 'grad_scaler'  # of the state in the file, among the optimizer's


def python(code, **kwargs):
    return subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, cwd=HERE, **kwargs
    )


def trained(path, mode='fp16', n=2, opt='adam', **kwargs):
    learn = learner(path=path, opt_func=OPTIMIZERS[opt])
    if mode != 'fp32':
        getattr(learn, f'to_{mode}')(**((kwargs or SCALING) if mode == 'fp16' else {}))
    if n:
        learn.fit(n, 0.01)
    return learn


def state(learn):
    return learn.precision.state_dict()


def in_file(file):
    return torch.load(file, weights_only=False)


def everything(learn):
    return params(learn), [b.clone() for b in learn.model.buffers()], opt_state(learn.opt), state(learn)


def same_everything(a, b):
    return same(a[0], b[0]) and same(a[1], b[1]) and same_state(a[2], b[2]) and a[3] == b[3]


def equal(learn, other):
    "Return whether two learners are the same, bit for bit, now and after another epoch."
    now = same_everything(everything(learn), everything(other))
    for l in (learn, other):
        l.fit(1, 0.01)
    return now and same_everything(everything(learn), everything(other))


def interrupted(learn, event, error=KeyboardInterrupt):
    "`learn` after a fit that ends at `event`."

    def stop(l):
        raise error

    stopping = At(event, stop, 20)
    with pytest.raises(error):
        learn.add_cb(stopping).fit(1)
    return learn.remove_cb(stopping)


# -- across fits


def test_scale_and_tracker_carry_over_between_fits(tmp_path):
    once, twice = trained(tmp_path, n=4), trained(tmp_path)
    between = state(twice)
    assert 0 < between['_growth_tracker'] and between['scale'] != 2.0**20
    twice.fit(2, 0.01)
    assert (
        state(once) == state(twice)
        and once.precision.scales == twice.precision.scales
        and same(params(once), params(twice))
    )
    assert state(twice.to_fp16(**SCALING))['scale'] == 2.0**20 and twice.precision.scales == []


def test_a_state_taken_up_before_and_in_a_fit(tmp_path):
    s, seen, new = state(trained(tmp_path)), [], MixedPrecision('fp16')
    new.load_state_dict(s)
    assert new.state_dict() == s == pickle.loads(pickle.dumps(new)).state_dict()
    learn, wanted = learner(cbs=new), {**s, 'scale': 32.0, '_growth_tracker': 2}

    def during(l):
        if l.iter == 3:
            new.load_state_dict(wanted)
        seen.append(state(l))

    learn.add_cb(At('before_batch', lambda l: l.training and during(l)))
    learn.fit(1, 0.01)
    assert seen[0] == s and seen[3] == wanted and new.scales[3] == 32.0
    bf16 = MixedPrecision('bf16')
    bf16.load_state_dict(s)
    assert bf16.state_dict() == {}


def test_a_state_taken_up_in_the_middle_of_an_accumulation():
    "Gradients that are already scaled are converted to the new scale."

    def run(change):
        learn = learner(linear(), cbs=[mixed('fp16'), GradientAccumulation(12)])

        def load(l):
            l.precision.load_state_dict({**state(l), 'scale': 1024.0})

        if change:
            learn.add_cb(At('before_batch', lambda l: l.training and l.iter == 2 and load(l)))
        learn.fit(1, 0.01)
        return params(learn)

    for a, b in zip(run(False), run(True)):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3)


# -- in files


@pytest.mark.parametrize('opt', ['adam', 'sgd', 'fused adamw'])
def test_saved_and_loaded_in_the_same_file(tmp_path, opt):
    learn = trained(tmp_path, opt=opt)
    file = learn.save('a')
    assert file == tmp_path / 'models' / 'a.pth' and [f.name for f in file.parent.iterdir()] == ['a.pth']
    saved = in_file(file)
    assert set(saved) == {'model', 'opt'} and saved['opt'][KEY] == state(learn)
    assert all(type(v) in (int, float) for v in saved['opt'][KEY].values()) and KEY not in learn.opt.state_dict()
    assert equal(learn, trained(tmp_path, n=0, opt=opt, init_scale=8.0, growth_factor=4.0, growth_interval=7).load('a'))


def test_a_file_holds_the_scale_of_the_learner_that_saves_it(tmp_path):
    "Learners that share model and optimizer, for example a plain one and an fp16 one."
    first = trained(tmp_path, init_scale=512.0)
    plain, second = (learner(first.model, path=tmp_path) for _ in range(2))
    plain.opt = second.opt = first.opt
    second.to_fp16(init_scale=8.0)
    assert KEY not in in_file(plain.save('a'))['opt']
    for learn, scale in ((first, 512.0), (second, 8.0), (first, 512.0)):
        assert in_file(learn.save('a'))['opt'][KEY]['scale'] == scale
    first.load('a')
    assert (first.precision.scale, second.precision.scale, plain.precision) == (512.0, 8.0, None)


def test_static_disabled_and_own_scalers(tmp_path):
    trained(tmp_path).save('a')
    static = trained(tmp_path, n=0, loss_scale=512.0).load('a')
    static.fit(1, 0.01)
    assert set(static.precision.scales) == {512.0}
    off = trained(tmp_path, n=1, enabled=False).load('a')
    assert off.precision.scales == [] and KEY not in in_file(off.save('off'))['opt']
    own = torch.amp.GradScaler('cpu')
    trained(tmp_path, n=0, scaler=own).load('a')
    assert own.state_dict() == in_file(tmp_path / 'models/a.pth')['opt'][KEY]


def test_files_of_other_precisions(tmp_path):
    for mode in ('fp32', 'bf16'):
        assert KEY not in in_file(trained(tmp_path, mode).save(mode))['opt']
        learn = trained(tmp_path)
        assert (
            not told(lambda: learn.load(mode), 'The file')
            and state(learn)['scale'] == 2.0**20
            and state(learn)['_growth_tracker'] == 0
        )
    fp16 = trained(tmp_path)
    fp16.save('fp16')
    for mode in ('fp32', 'bf16'):
        learn = trained(tmp_path, mode)
        assert not told(lambda: learn.load('fp16'), 'The file')
        assert same(params(learn), params(fp16)) and same_state(opt_state(learn.opt), opt_state(fp16.opt))
        learn.fit(1, 0.01)


def test_without_the_optimizer(tmp_path):
    learn = trained(tmp_path)
    learn.save('with')
    learn.save('without', with_opt=False)
    assert set(torch.load(tmp_path / 'models/without.pth')) == set(learn.model.state_dict())
    other = trained(tmp_path, n=1)
    before = state(other)
    assert not told(lambda: other.load('with', with_opt=False), 'The file') and state(other) == before != state(learn)
    with pytest.warns(UserWarning, match='optimizer state'):
        other.load('without')
    assert state(other) == before
    text = learner(cls=TextLearner, path=tmp_path).to_fp16(init_scale=8.0)
    text.load('with', with_opt=False)
    assert same(params(text), params(learn)) and state(text)['scale'] == 8.0
    assert not any('grad_avg' in s for s in text.opt.state.values())


def test_weights_only_and_file_objects(tmp_path):
    learn, other = trained(tmp_path), trained(tmp_path, n=0)
    with open(learn.save('a'), 'rb') as f:
        other.load(f, weights_only=True)
    assert same_everything(everything(learn), everything(other))
    with open(tmp_path / 'b.pth', 'wb') as f:
        learn.save(f)
    assert equal(learn, trained(tmp_path, n=0).load(tmp_path / 'b'))


class Super(Learner):
    def save(self, file, *args, **kwargs):
        return super().save(f'sub_{file}', *args, **kwargs)

    def load(self, file, *args, **kwargs):
        return super().load(f'sub_{file}', *args, **kwargs)


@pytest.mark.parametrize('cls', [Super, TextLearner])
def test_subclasses(tmp_path, cls):
    def make():
        learn = learner(nn.Sequential(mlp()), cls=cls, path=tmp_path).to_fp16(**SCALING)
        return learn.remove_cbs(
            [cb for cb in learn.cbs if type(cb).__name__ in ('ModelResetter', 'RNNCallback', 'RNNRegularizer')]
        )

    learn = make()
    learn.fit(2, 0.01)
    file = learn.save('a')
    assert file.stem == ('sub_a' if cls is Super else 'a')
    assert equal(learn, make().load('a'))


# -- damaged

DAMAGE = (
    [lambda s: [1], lambda s: {k: v for k, v in s.items() if k != 'scale'}]
    + [lambda s, v=value: {**s, 'scale': v} for value in (-2.0, float('nan'), 1e39, '8', True, torch.ones(2))]
    + [lambda s, v=value: {**s, 'growth_interval': v} for value in (2.5, 2000.0)]
)


def test_a_damaged_state_is_refused_before_anything_is_touched(tmp_path):
    file, learn = trained(tmp_path).save('a'), trained(tmp_path, n=1)
    saved, before = in_file(file), everything(learn)
    for damage in DAMAGE:
        broken = damage(saved['opt'][KEY])
        torch.save({**saved, 'opt': {**saved['opt'], KEY: broken}}, file)
        for load in (lambda: learn.load('a'), lambda: learn.precision.load_state_dict(broken)):
            with pytest.raises(ValueError, match='The loss scale cannot be loaded.*Nothing was loaded'):
                load()
        assert same_everything(everything(learn), before)
    learn.load('a', with_opt=False)
    assert state(learn) == before[3]


def test_a_file_of_another_model_leaves_the_loss_scale(tmp_path):
    trained(tmp_path).save('a')
    other = learner(linear(), path=tmp_path).to_fp16(init_scale=8.0)
    before = state(other)
    with pytest.raises(RuntimeError, match='Missing key'):
        other.load('a')
    assert state(other) == before


def test_a_full_disk_keeps_the_old_file(tmp_path, monkeypatch):
    learn = trained(tmp_path)
    file = learn.save('a')
    file.chmod(0o600)
    old = file.read_bytes()

    def full(obj, f, *args, **kwargs):
        f.write(b'x' * 100)
        raise OSError(28, 'No space left on device')

    with monkeypatch.context() as m:
        m.setattr(torch, 'save', full)
        with pytest.raises(OSError, match='No space'):
            learn.save('a')
    assert file.read_bytes() == old and [f.name for f in file.parent.iterdir()] == ['a.pth']
    learn.fit(1)
    learn.save('a')
    assert file.read_bytes() != old and file.stat().st_mode & 0o777 == 0o600


def test_two_that_save_under_one_name_at_once(tmp_path, monkeypatch):
    first, second, save = trained(tmp_path), trained(tmp_path, n=3), torch.save

    def meanwhile(obj, f, *args, **kwargs):
        f.write(b'x')
        f.seek(0)
        with monkeypatch.context() as m:
            m.setattr(torch, 'save', save)
            second.save('a')
        save(obj, f, *args, **kwargs)

    with monkeypatch.context() as m:
        m.setattr(torch, 'save', meanwhile)
        file = first.save('a')
    assert [f.name for f in file.parent.iterdir()] == ['a.pth']
    assert same_everything(everything(trained(tmp_path, n=0).load('a')), everything(first))


def test_only_what_was_left_more_than_an_hour_ago_is_removed(tmp_path):
    learn = trained(tmp_path, n=0)
    folder, ages = learn.save('a').parent, {'old': 61, 'new': 59}
    left = {(name, age): folder / f'.{name}.pth.{i:032}.part' for i, (name, age) in enumerate(product('ab', ages))}
    for (_, age), file in left.items():
        file.write_bytes(b'x')
        os.utime(file, (time.time() - 60 * ages[age],) * 2)
    learn.save('a')
    assert {*folder.iterdir()} == {folder / 'a.pth', *left.values()} - {left['a', 'old']}


PROCESSES = '''
import io, os, shutil, signal, sys; sys.path[:0] = [{here!r}, {here!r} + '/training']
from test_checkpoint import *
path = Path({path!r})
torch.set_num_threads(1)  # as in the test's process: the order of sums depends on it
for opt in {opts!r}:
    learn, losses = trained(path, n=0, opt=opt).load(opt), []
    learn.add_cb(At('after_batch', lambda l: l.training and losses.append(l.loss.item()), 40))
    learn.fit(2, .01)
    torch.save((*everything(learn), losses, learn.precision.n_skipped), path / (opt + '.result'))

def half_of_it(obj, file, *args, save=torch.save, **kwargs):     # killed while the file is half written
    memory = io.BytesIO()
    save(obj, memory, *args, **kwargs)
    file.write(memory.getvalue()[:len(memory.getvalue()) // 2]); file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
shutil.copy(learn.save('killed'), path)
learn.fit(1, .01)
torch.save = half_of_it
learn.save('killed')
'''


def test_exact_resume_in_a_new_process_which_is_killed_while_it_saves(tmp_path):
    opts, expected = ['sgd', 'fused adamw', 'adam'], {}
    for opt in opts:
        learn, losses = trained(tmp_path, opt=opt), []
        learn.save(opt)
        n = learn.precision.n_skipped
        learn.add_cb(At('after_batch', lambda l: l.training and losses.append(l.loss.item()), 40))
        learn.fit(2, 0.01)
        expected[opt] = everything(learn), losses, learn.precision.n_skipped - n
    done = python(PROCESSES.format(here=str(HERE), opts=opts, path=str(tmp_path)))
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    for opt in opts:
        *found, losses, n_skipped = in_file(tmp_path / f'{opt}.result')
        assert same_everything(found, expected[opt][0]) and (losses, n_skipped) == expected[opt][1:] and n_skipped > 0
    assert (tmp_path / 'models' / 'killed.pth').read_bytes() == (tmp_path / 'killed.pth').read_bytes()
    learn = trained(tmp_path, n=0, init_scale=1.0).load('killed')
    assert same_everything(everything(learn), expected['adam'][0])


def contents(folder):
    return {f.relative_to(folder): f.read_bytes() for f in folder.rglob('*') if f.is_file()}


@pytest.mark.parametrize('place', ['best', '../best', 'absolute'])
def test_a_comparison_overwrites_no_file_that_callbacks_save_and_export(tmp_path, place):
    file, folders = str(tmp_path / 'best') if place == 'absolute' else place, []

    def keep_and_go_back(l):
        folders.append(l.save(file).parent)
        l.load(file)

    class Exports(Callback):
        run_on_copy = True

        def before_fit(self):
            self.learn.export(fname=tmp_path / 'model.pkl')

    saves = At('after_step', keep_and_go_back, 20)
    saves.run_on_copy = True
    learn = learner(path=tmp_path, cbs=[saves, Exports()])
    learn.fit(1, 0.01)
    before, in_fit = contents(tmp_path), len(folders)
    learn.compare_precision('bf16', n_steps=3, n_seeds=1)
    assert contents(tmp_path) == before and len(before) == 2
    assert len(folders) > in_fit


# -- without the package


class Empty(DataLoaders):
    "Replaces the data in an export; returns one of fastai's DataLoaders without data."

    def __init__(self):
        super().__init__()

    def new_empty(self):
        return DataLoaders()


WITHOUT = '''
import sys
for name in ('fastxtend_amp', 'helpers', 'test_checkpoint'): sys.modules[name] = None  # cannot be imported
import torch, warnings
from functools import partial
from pathlib import Path
from fastai.basics import *
from fastai.learner import load_learner
path = Path({path!r})
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


@pytest.mark.parametrize('mode', ['fp32', 'bf16'])
def test_after_an_export_the_optimizer_is_that_of_the_current_model(tmp_path, mode):
    "fastai's export creates it again, also for a model that a callback has exchanged."
    learn = getattr(learner(path=tmp_path), f'to_{mode}')()
    learn.fit(1, 0.01)
    learn.model = copy.deepcopy(learn.model)
    told(lambda: learn.export('model.pkl'))
    before = params(learn)
    learn.fit(1, 0.01)
    assert not same(before, params(learn))


def test_files_exports_and_models_are_read_without_the_package(tmp_path):
    for opt in ('adam', 'fused adamw'):
        trained(tmp_path, opt=opt).save(opt)
    x, expected = torch.randn(3, 6), {}
    for how in ('to_fp32', 'interrupted', 'removed', 'model'):
        learn = learner(path=tmp_path, opt_func=fastxtend_amp.fused(torch.optim.AdamW)).to_fp16(
            fp32_modules='0', init_scale=8.0
        )
        learn.fit(1, 0.01)
        if how == 'interrupted':
            interrupted(learn, 'before_step')
        expected[how] = learn.model.eval()(x)
        if how == 'model':  # with its precision, and modules kept in fp32
            torch.save(learn.model, tmp_path / 'model.pt')
            continue
        learn.remove_cb(learn.precision) if how == 'removed' else learn.to_fp32()
        learn.dls = Empty()
        learn.export(f'{how}.pkl')
    torch.save((x, expected), tmp_path / 'expected')
    done = python(WITHOUT.format(path=str(tmp_path)))
    assert done.stdout == 'read 4\n', done.stderr[-2000:]


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_export_with_a_precision_writes_fp32_that_loads_without_the_package(tmp_path, mode):
    "The learner itself keeps its precision."
    learn = trained(tmp_path, mode, n=1)
    b, before, cb = next(iter(learn.dls.valid)), state(learn), learn.precision
    learn.export()
    assert learn.precision is cb and state(learn) == before
    assert b'fastxtend_amp' not in (tmp_path / 'export.pkl').read_bytes()
    for cpu in (True, False):
        loaded = load_learner(tmp_path / 'export.pkl', cpu=cpu)
        assert loaded.precision is None and not left_on(loaded)
        with learn.precision_as('fp32'):
            assert torch.equal(loaded.get_preds(dl=[b])[0], learn.get_preds(dl=[b])[0])


# -- copies


@pytest.mark.parametrize('how', [copy.deepcopy, lambda l: pickle.loads(pickle.dumps(l))], ids=['deepcopy', 'pickle'])
def test_copies_keep_the_state_and_share_none(tmp_path, how):
    learn = trained(tmp_path)
    twin, before = how(learn), state(learn)
    assert state(twin) == before and twin.precision.scales == learn.precision.scales and twin.precision.learn is twin
    twin.fit(2, 0.01)
    assert state(learn) == before and len(learn.precision.scales) == 12 and len(twin.precision.scales) == 24
    learn.fit(2, 0.01)
    assert same_everything(everything(learn), everything(twin))


@pytest.mark.parametrize(
    'event, opt',
    [
        ('before_batch', 'adam'),
        ('after_backward', 'adam'),
        ('before_step', 'adam'),
        ('before_step', 'fused adamw'),
        ('after_step', 'fused adamw'),
    ],
)
def test_copies_made_in_the_middle_of_a_fit_are_outside_one(tmp_path, event, opt):
    "`before_step` is between unscaling and update; with a fused optimizer, the device then decides about the step."
    learn, copies = trained(tmp_path, n=1, opt=opt), []

    def keep(l):
        if not l.training:
            return
        vars(l).update(
            {k: t.detach() for k in ('pred', 'loss', 'loss_grad') if isinstance(t := vars(l).get(k), torch.Tensor)}
        )  # no graph
        copies.append((params(l), state(l), copy.deepcopy(l)))

    learn.add_cb(At(event, keep, 40)).fit(1, 0.01)
    weights, scale, twin = copies[-1]
    assert same(params(twin), weights) and state(twin) == scale and twin.precision.fit is None
    before = autocast_state()
    twin.remove_cb(At).fit(1, 0.01)
    assert autocast_state() == before and finite(twin) and not same(params(twin), weights)


def test_toggling_leaves_no_trace():
    "On the learner, its optimizer and its model, after fits and after one that was interrupted."
    learn = learner()
    for call in ('to_fp16', 'to_bf16', 'to_fp32', 'to_fp16'):
        getattr(learn, call)().fit(1, 0.01)
    callback = weakref.ref(interrupted(learn.to_bf16(fp32_modules='0'), 'after_backward').precision)
    learn.to_fp32()
    gc.collect()
    assert callback() is None and not left_on(learn) and b'fastxtend_amp' not in pickle.dumps(learn)


def test_a_state_loaded_before_the_device_is_known_counts():
    s = MixedPrecision('fp16', init_scale=8.0).state_dict()
    cb = MixedPrecision('auto')
    cb.load_state_dict(s)
    assert cb.precision.made['fp16'].state_dict() == s and cb.precision.made['bf16'].state_dict() == {}


def test_a_scaler_is_copied_with_its_state_and_first_scale_in_the_middle_of_a_step():
    learn, copies = learner().to_fp16(init_scale=8.0, growth_interval=2), []
    learn.fit(1, cbs=At('before_step', lambda l: copies.append(copy.deepcopy(l.precision.precision)), 20))
    assert [c.state_dict()['scale'] for c in copies] == learn.precision.scales and learn.precision.scale > 8.0
    assert all(c.first_state['scale'] == 8.0 for c in copies)
