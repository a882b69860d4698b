"Nothing lost: the loss scale through fits, files, processes, interrupts, exports and copies."
import copy, gc, os, pickle, signal, subprocess, sys, threading, warnings
from pathlib import Path

import fastai.learner, pytest, torch
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner, load_learner
from torch import nn

from fastxtend_amp import MixedPrecision
from fastxtend_amp.checkpoint import KEY
from helpers import *

HERE = Path(__file__).parent
SCALING = dict(init_scale=2.**20, growth_interval=3)             # overflows at the start and whenever it has grown
BLOCK = "import sys; sys.modules['fastxtend_amp'] = None; "       # any import of the package fails


def python(code, cwd=HERE, check=True):
    out = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, cwd=cwd)
    assert not check or out.returncode == 0, out.stderr
    return out.stdout


def trained(tmp_path, mode='fp16', n=2, opt='adam', **kwargs):
    learn = learner(path=tmp_path, opt_func=OPTIMIZERS[opt])
    if mode == 'fp16': learn.to_fp16(**(kwargs or SCALING))
    if mode == 'bf16': learn.to_bf16()
    if n: learn.fit(n, .01)
    return learn


def state(learn): return learn.mixed_precision.state_dict()
def everything(learn): return params(learn), [b.clone() for b in learn.model.buffers()], opt_state(learn.opt), state(learn)
def same_everything(a, b): return same(a[0], b[0]) and same(a[1], b[1]) and same_state(a[2], b[2]) and a[3] == b[3]


# -- across fits

def test_scale_and_tracker_carry_over_between_fits(tmp_path):
    once, twice = trained(tmp_path, n=4), trained(tmp_path, n=2)
    between = state(twice)
    assert 0 < between['_growth_tracker'] and between['scale'] != 2.**20
    twice.fit(2, .01)
    assert state(once) == state(twice) and once.mixed_precision.scales == twice.mixed_precision.scales and same(params(once), params(twice))
    assert state(twice.to_fp16(**SCALING))['scale'] == 2.**20 and twice.mixed_precision.scales == []


def test_ctrl_c_in_lr_find(tmp_path):
    learn = trained(tmp_path)
    before, scales = state(learn), learn.mixed_precision.scales
    def interrupt(l):
        if l.train_iter == 7: raise KeyboardInterrupt
    cb = At('after_backward', interrupt, 20); learn.add_cb(cb)
    with pytest.raises(KeyboardInterrupt): learn.lr_find(num_it=30, start_lr=1., end_lr=1e3, stop_div=False, show_plot=False, suggest_funcs=())
    learn.remove_cb(cb)
    first = []
    learn.add_cb(At('before_backward', lambda l: first.append(l.scaler.state_dict()), 5))
    assert state(learn) == before and learn.mixed_precision.scales == scales
    learn.fit(1, .01)
    assert first[0] == before


# -- in the checkpoint

@pytest.mark.parametrize('opt', ['adam', 'sgd', 'adamw', 'fused adamw'])
def test_saved_and_loaded_in_the_same_file(tmp_path, opt):
    learn = trained(tmp_path, opt=opt)
    file = learn.save('a')
    assert file == tmp_path / 'models' / 'a.pth' and [f.name for f in file.parent.iterdir()] == ['a.pth']
    saved = torch.load(file, weights_only=False)
    assert set(saved) == {'model', 'opt'} and saved['opt'][KEY] == state(learn) and all(type(v) in (int, float) for v in saved['opt'][KEY].values())
    assert KEY not in learn.opt.state_dict()
    other = trained(tmp_path, n=0, opt=opt, init_scale=8., growth_factor=4., backoff_factor=.25, growth_interval=7).load('a')
    assert same_everything(everything(learn), everything(other))
    learn.fit(1, .01); other.fit(1, .01)
    assert same_everything(everything(learn), everything(other))


def test_callback_api(tmp_path):
    learn, seen = trained(tmp_path), []
    s = state(learn)
    new = MixedPrecision('fp16'); new.load_state_dict(s)
    assert new.state_dict() == s == pickle.loads(pickle.dumps(new)).state_dict()
    other = learner(cbs=new)
    wanted = {**s, 'scale': 32., '_growth_tracker': 2}
    def during(l):
        if l.iter == 3: l.mixed_precision.load_state_dict(wanted)
        seen.append(l.mixed_precision.state_dict())
    other.add_cb(At('before_batch', lambda l: l.training and during(l)))
    other.fit(1, .01)
    assert seen[0] == s and seen[3] == wanted and other.mixed_precision.scales[3] == 32.
    for mode in ('bf16', 'auto'):
        cb = MixedPrecision(mode); cb.load_state_dict(s); assert cb.state_dict() == {}


def test_loading_in_the_middle_of_an_accumulation():
    def run(change):
        learn = learner(nn.Sequential(*[m for m in mlp() if not isinstance(m, nn.BatchNorm1d)]),
                        cbs=[MixedPrecision('fp16', init_scale=256.), GradientAccumulation(12)])
        if change: learn.add_cb(At('before_batch', lambda l: l.training and l.iter == 2 and l.mixed_precision.load_state_dict({**state(l), 'scale': 1024.})))
        learn.fit(1, .01)
        return params(learn)
    for a, b in zip(run(False), run(True)): torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize('event, order, n_before', [('after_backward', 5, 4), ('before_step', 20, 4), ('after_batch', 5, 4), ('before_batch', 5, 3)])
def test_the_history_follows_a_scale_that_is_loaded_in_the_middle_of_a_step(event, order, n_before):
    learn = learner().to_fp16(init_scale=1024.)
    def load(l):
        if l.training and l.iter == 3: l.precision.load_state_dict({**l.precision.state_dict(), 'scale': 256.})
    learn.fit(1, cbs=At(event, load, order))
    assert learn.precision.scale == 256.
    assert learn.precision.scales == [1024.] * n_before + [256.] * (6 - n_before)


def test_static_disabled_and_own_scalers(tmp_path):
    trained(tmp_path).save('a')
    static = trained(tmp_path, n=0, loss_scale=512.).load('a'); static.fit(1, .01)
    assert set(static.mixed_precision.scales) == {512.}
    off = trained(tmp_path, n=1, enabled=False).load('a'); off.fit(1, .01)
    assert off.mixed_precision.scales == [] and KEY not in torch.load(off.save('off'), weights_only=False)['opt']
    class Own(torch.amp.GradScaler):
        loaded = None
        def load_state_dict(self, state): self.loaded = state; super().load_state_dict(state)
    own = Own('cpu')
    trained(tmp_path, n=0, scaler=own).load('a')
    assert own.loaded == torch.load(tmp_path / 'models/a.pth', weights_only=False)['opt'][KEY] == own.state_dict()


def test_files_of_others(tmp_path):
    for mode in ('fp32', 'bf16'):
        with warnings.catch_warnings():
            warnings.filterwarnings('error', category=UserWarning)
            warnings.filterwarnings('ignore', message='.*emulated.*')
            trained(tmp_path, mode).save(mode)
            assert KEY not in torch.load(tmp_path / f'models/{mode}.pth', weights_only=False)['opt']
            learn = trained(tmp_path); learn.load(mode)
        assert state(learn)['scale'] == 2.**20 and state(learn)['_growth_tracker'] == 0
    fp16 = trained(tmp_path); fp16.save('fp16')
    for mode in ('fp32', 'bf16'):
        learn = trained(tmp_path, mode)
        with pytest.warns(UserWarning, match=r'to_fp16\(\)` before') as record: learn.load('fp16')
        assert sum('to_fp16' in str(w.message) for w in record) == 1
        assert same(params(learn), params(fp16)) and same_state(opt_state(learn.opt), opt_state(fp16.opt))
        learn.fit(1, .01)


def test_without_the_optimizer(tmp_path):
    learn = trained(tmp_path); before = state(learn)
    learn.save('with'); learn.save('without', with_opt=False)
    assert set(torch.load(tmp_path / 'models/without.pth')) == set(learn.model.state_dict())
    other = trained(tmp_path, n=1); at = state(other)
    with warnings.catch_warnings(): warnings.filterwarnings('error', category=UserWarning); other.load('with', with_opt=False)
    assert state(other) == at != before
    with pytest.warns(UserWarning, match="doesn't contain an optimizer state"): other.load('without')
    assert state(other) == at


def test_plain_fastai_reads_the_file(tmp_path):
    for opt in ('adam', 'fused adamw'): trained(tmp_path, opt=opt).save(opt.replace(' ', '_'))
    code = BLOCK + f'''
import warnings, torch
from functools import partial
from pathlib import Path
from fastai.learner import Learner
from fastai.optimizer import Adam, OptimWrapper
from fastai.data.core import DataLoaders
from torch import nn
class Data(list): pass
for name, opt in (('adam', Adam), ('fused_adamw', partial(OptimWrapper, opt=partial(torch.optim.AdamW, fused=True)))):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    learn = Learner(DataLoaders([], []), model, loss_func=nn.MSELoss(), opt_func=opt, path=Path({str(tmp_path)!r}))
    with warnings.catch_warnings():
        warnings.filterwarnings('error', category=UserWarning)
        learn.load(name, weights_only=True)
    state = learn.opt.opt.state if name != 'adam' else learn.opt.state
    assert len(state) == 6 and float(next(iter(state.values()))['step']) > 0, state
print('read')'''
    assert 'read' in python(code)


# -- damaged

DAMAGE = {'a list': lambda s: [1], 'a text': lambda s: 'scale', 'no scale': lambda s: {k: v for k, v in s.items() if k != 'scale'},
          'no tracker': lambda s: {k: v for k, v in s.items() if k != '_growth_tracker'}, 'negative': lambda s: {**s, 'scale': -2.},
          'zero': lambda s: {**s, 'scale': 0.}, 'nan': lambda s: {**s, 'scale': float('nan')}, 'inf': lambda s: {**s, 'scale': float('inf')},
          'text': lambda s: {**s, 'scale': '8'}, 'flag': lambda s: {**s, 'scale': True},
          'empty': lambda s: {}, 'tensor': lambda s: {**s, 'scale': torch.ones(2)}}


@pytest.mark.parametrize('damage', DAMAGE)
def test_damaged_state_is_refused_before_anything_is_touched(tmp_path, damage):
    file = trained(tmp_path).save('a')
    saved = torch.load(file, weights_only=False)
    saved['opt'][KEY] = DAMAGE[damage](saved['opt'][KEY]); torch.save(saved, file)
    learn = trained(tmp_path, n=1); before = everything(learn)
    with pytest.raises(ValueError, match='scaler.*a.pth.*Nothing was loaded'): learn.load('a')
    assert same_everything(everything(learn), before)
    learn.load('a', with_opt=False)
    assert state(learn) == before[3]


def test_weights_only_and_file_objects(tmp_path):
    learn = trained(tmp_path, opt='adamw'); file = learn.save('a')
    other = trained(tmp_path, n=0, opt='adamw')
    with open(file, 'rb') as f: other.load(f, weights_only=True)
    assert same_everything(everything(learn), everything(other))
    with open(tmp_path / 'b.pth', 'wb') as f: learn.save(f)
    assert same_everything(everything(trained(tmp_path, n=0, opt='adamw').load(tmp_path / 'b')), everything(learn))
    class Evil:
        def __reduce__(self): return (os.putenv, ('EVIL', '1'))
    saved = torch.load(file, weights_only=False); saved['opt']['evil'] = Evil(); torch.save(saved, file)
    with pytest.raises(pickle.UnpicklingError, match='[Ww]eights'): other.load('a', weights_only=True)


# -- never a torn file

def test_full_disk_keeps_the_old_file(tmp_path, monkeypatch):
    learn = trained(tmp_path); file = learn.save('a'); old = file.read_bytes()
    real = torch.save
    def full(obj, f, *args, **kwargs):
        f.write(b'x' * 100); raise OSError(28, 'No space left on device')
    monkeypatch.setattr(torch, 'save', full)
    with pytest.raises(OSError, match='No space'): learn.save('a')
    assert file.read_bytes() == old and [f.name for f in file.parent.iterdir()] == ['a.pth'] and torch.save is full
    monkeypatch.undo(); assert torch.save is real
    learn.fit(1); learn.save('a'); assert file.read_bytes() != old


def test_write_that_really_fails_in_the_middle(tmp_path):
    resource = pytest.importorskip('resource')                    # a limit on the size of files: as a disk that is full
    learn = trained(tmp_path); file = learn.save('a'); old = file.read_bytes()
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) // 2, limits[1]))
        with pytest.raises((OSError, RuntimeError)): learn.save('a')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert file.read_bytes() == old and [f.name for f in file.parent.iterdir()] == ['a.pth']
    other = trained(tmp_path, n=0).load('a'); assert same_everything(everything(other), everything(learn))


CHILD = '''
import io, os, shutil, signal, sys; sys.path.insert(0, {here!r})
from helpers import *
from pathlib import Path
learn = learner(path=Path({path!r})).to_fp16(init_scale=2.**10)
learn.fit(1, .01)
shutil.copy(learn.save('a'), {path!r})
learn.fit(1, .01)

def die(): os.kill(os.getpid(), signal.SIGKILL)

def half_of_it(state, file, *args, save=torch.save, **kwargs):
    memory = io.BytesIO()
    save(state, memory, *args, **kwargs)
    file = file if hasattr(file, 'write') else open(file, 'wb')
    file.write(memory.getvalue()[:len(memory.getvalue()) // 2])
    file.flush()
    die()

if {half!r}: torch.save = half_of_it
else: sys.addaudithook(lambda event, args: die() if event == 'os.rename' else None)
learn.save('a')
'''


@pytest.mark.parametrize('half', [True, False], ids=['half written', 'before it has its name'])
def test_killed_while_saving(tmp_path, half):
    code = CHILD.format(here=str(HERE), path=str(tmp_path), half=half)
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    file = tmp_path / 'models' / 'a.pth'
    assert file.read_bytes() == (tmp_path / 'a.pth').read_bytes()
    learn = learner(path=tmp_path).to_fp16(init_scale=1.).load('a')
    assert state(learn)['scale'] == 2.**10
    learn.fit(1, .01); learn.save('a'); learn.load('a')


# -- subclasses

class Super(Learner):
    def save(self, file, *args, **kwargs): return super().save(f'sub_{file}', *args, **kwargs)
    def load(self, file, *args, **kwargs): return super().load(f'sub_{file}', *args, **kwargs)


class Direct(Learner):
    "Calls fastai's functions itself."
    def save(self, file): fastai.learner.save_model(self.path / f'{file}.own', self.model, self.opt)
    def load(self, file):
        if self.opt is None: self.create_opt()
        fastai.learner.load_model(self.path / f'{file}.own', self.model, self.opt)
        return self


@pytest.mark.parametrize('cls', [Super, Direct])
def test_subclasses(tmp_path, cls):
    make = lambda: learner(cls=cls, path=tmp_path).to_fp16(**SCALING)
    learn = make(); learn.fit(2, .01); learn.save('a')
    other = make(); other.load('a')
    assert same_everything(everything(learn), everything(other))
    with pytest.warns(UserWarning, match='before'): learner(cls=cls, path=tmp_path).load('a')
    (file,) = [f for f in tmp_path.rglob('*a.*')]
    s = torch.load(file, weights_only=False); s['opt'][KEY]['scale'] = -1.; torch.save(s, file)
    with pytest.raises(ValueError, match='scale'): other.load('a')


def test_a_learner_that_writes_files_of_its_own_stores_the_scale_by_the_callback(tmp_path):
    learn, other = trained(tmp_path), trained(tmp_path, n=0)
    torch.save({'mine': learn.precision.state_dict()}, tmp_path / 'own')
    other.precision.load_state_dict(torch.load(tmp_path / 'own')['mine'])
    assert state(other) == state(learn)


@pytest.mark.parametrize('damage', DAMAGE)
def test_load_state_dict_refuses_what_a_damaged_file_is_refused_for(tmp_path, damage):
    learn = trained(tmp_path); before = state(learn)
    if damage == 'empty': return learn.precision.load_state_dict({})     # what bf16's callback gives: nothing to take up
    with pytest.raises(ValueError, match='Nothing was loaded'): learn.precision.load_state_dict(DAMAGE[damage](before))
    assert state(learn) == before


def test_two_threads_that_save_and_load_at_once(tmp_path):
    before = torch.save, torch.load, fastai.learner.save_model, fastai.learner.load_model
    learners = [trained(tmp_path / str(i), init_scale=2.**(8 + i), growth_interval=10**6) for i in range(2)]
    files, errors = [[], []], []
    def work(i):
        try:
            for k in range(40): files[i].append(learners[i].save(f'f{k}')); learners[i].load(f'f{k}')
        except BaseException as e: errors.append(e)
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not errors and (torch.save, torch.load, fastai.learner.save_model, fastai.learner.load_model) == before
    for i in range(2):
        assert len(files[i]) == 40
        for f in files[i]: assert torch.load(f, weights_only=False)['opt'][KEY]['scale'] == 2.**(8 + i)
        assert state(learners[i])['scale'] == 2.**(8 + i)


def test_text_learner(tmp_path):
    from fastai.text.learner import TextLearner
    make = lambda: learner(nn.Sequential(mlp()), cls=TextLearner, path=tmp_path).to_fp16(**SCALING)
    learn = make(); learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ in ('ModelResetter', 'RNNCallback', 'RNNRegularizer')])
    learn.fit(2, .01); learn.save('a')
    other = make(); other.load('a')
    assert same_everything(everything(learn), everything(other))


# -- resume in another process

RESUME = '''
import sys; sys.path.insert(0, {here!r})
from test_checkpoint import *
torch.set_num_threads(1)  # as in this process: the order of sums depends on it
for opt in {opts!r}:
    learn = trained(Path({path!r}), n=0, opt=opt).load(opt); losses = []
    learn.add_cb(At('after_batch', lambda l: l.training and losses.append(l.loss.item()), 40))
    learn.fit(2, .01)
    torch.save((*everything(learn), losses, learn.mixed_precision.n_skipped), Path({path!r}) / f'{{opt}}.result')
'''


def test_exact_resume_in_a_new_process(tmp_path):
    opts, expected = ['adam', 'sgd', 'adamw', 'fused adamw'], {}
    for opt in opts:
        learn, losses = trained(tmp_path, opt=opt), []
        assert learn.mixed_precision.n_skipped
        learn.save(opt); n = learn.mixed_precision.n_skipped
        learn.add_cb(At('after_batch', lambda l: l.training and losses.append(l.loss.item()), 40))
        learn.fit(2, .01)
        expected[opt] = everything(learn), losses, learn.mixed_precision.n_skipped - n
    python(RESUME.format(here=str(HERE), opts=opts, path=str(tmp_path)))
    for opt in opts:
        *found, losses, n_skipped = torch.load(tmp_path / f'{opt}.result', weights_only=False)
        assert same_everything(found, expected[opt][0]) and losses == expected[opt][1] and n_skipped == expected[opt][2] > 0


# -- export

def test_export_without_the_package(tmp_path):
    from fastai.callback import fp16
    x, expected = torch.randn(3, 6), {}
    for how in ('to_fp32', 'interrupted', 'removed by fastai', 'fused'):
        learn = trained(tmp_path, n=1)
        if how == 'fused':
            learn.opt_func = fastxtend_amp.fused(torch.optim.AdamW, betas=(.9, .99))
            learn.create_opt()
        if how == 'interrupted':
            def interrupt(l): raise KeyboardInterrupt
            cb = At('before_step', interrupt, 20); learn.add_cb(cb)
            with pytest.raises(KeyboardInterrupt): learn.fit(1)
            learn.remove_cb(cb)
        learn.remove_cb(fp16.MixedPrecision) if how == 'removed by fastai' else learn.to_fp32()
        learn.dls = type(learn.dls)()                            # this test module's dataset cannot be imported there either
        learn.dls.new_empty = None
        learn.dls = Empty()
        learn.export(f'{how}.pkl'); expected[how] = learn.model.eval()(x)
    torch.save((x, expected), tmp_path / 'expected')
    assert python(BLOCK + f'''
import sys; sys.path.insert(0, {str(HERE)!r}); sys.modules['helpers'] = sys.modules['test_checkpoint'] = None
import torch
from pathlib import Path
from fastai.learner import load_learner
x, expected = torch.load(Path({str(tmp_path)!r}) / 'expected', weights_only=False)
for how, y in expected.items():
    learn = load_learner(Path({str(tmp_path)!r}) / f'{{how}}.pkl')
    assert torch.equal(learn.model.eval()(x), y)
print('loaded', len(expected))''', check=True) == 'loaded 4\n'


class Empty(DataLoaders):
    "Stands in for the data in an export; gives a DataLoaders of fastai's own, without any."
    def __init__(self): super().__init__()
    def new_empty(self): return DataLoaders()


@pytest.mark.parametrize('set_precision', ['to_fp16', 'to_bf16', 'to_half_weights'])
def test_export_with_precision_on_warns_and_loads_on_the_cpu_without(tmp_path, set_precision):
    learn = getattr(learner(path=tmp_path), set_precision)()
    with pytest.warns(UserWarning, match=r'needs fastxtend_amp.*\n.*to_fp32\(\)'): learn.export()
    with warnings.catch_warnings(): warnings.simplefilter('ignore'); loaded = load_learner(tmp_path / 'export.pkl')
    assert loaded.precision is None and not hasattr(loaded, 'mixed_precision') and 'one_batch' not in loaded.__dict__


@pytest.mark.parametrize('cpu', [True, False])
def test_export_with_precision_on(tmp_path, cpu):
    learn = trained(tmp_path, n=1)
    b = next(iter(learn.dls.valid))
    low = learn.get_preds(dl=[b])[0]
    learn.export()
    s = state(learn)
    with warnings.catch_warnings(): warnings.simplefilter('ignore'); loaded = load_learner(tmp_path / 'export.pkl', cpu=cpu)
    loaded.remove_cbs([]); preds = loaded.get_preds(dl=[b])[0]
    if cpu: assert not hasattr(loaded, 'mixed_precision') and torch.equal(preds, learn.to_fp32().get_preds(dl=[b])[0])
    else: assert state(loaded) == s and torch.equal(preds, low)


# -- copies

@pytest.mark.parametrize('how', [copy.deepcopy, lambda l: pickle.loads(pickle.dumps(l))], ids=['deepcopy', 'pickle'])
def test_copies_keep_the_state_and_share_none(tmp_path, how):
    learn = trained(tmp_path)
    twin = how(learn)
    cb, other = learn.mixed_precision, twin.mixed_precision
    assert state(learn) == state(twin) and cb.scales == other.scales and other.learn is twin and other is not cb
    assert cb.scaling.scaler is not other.scaling.scaler and cb.scaling.history is not other.scaling.history
    before, n = state(learn), len(cb.scales)
    learn.save('x'); twin.fit(2, .01)
    assert state(learn) == before and len(cb.scales) == n and len(other.scales) == n + 12
    learn.fit(2, .01)
    assert state(learn) == state(twin) and same(params(learn), params(twin))


@pytest.mark.parametrize('event', ['after_epoch', 'before_batch'])
def test_copies_made_in_the_middle_of_a_fit(tmp_path, event):
    learn, copies = trained(tmp_path, n=1), []
    learn.add_cb(At(event, Copier(copies), 40))
    learn.fit(1, .01)
    for twin in (pickle.loads(copies[-1][0]), copies[-1][1]):
        twin.remove_cbs([cb for cb in twin.cbs if isinstance(cb, At)])
        assert state(twin) == state(learn) and same(params(twin), params(learn))
        before = autocast_state(); twin.fit(1, .01); assert autocast_state() == before
        assert twin.one_batch.__self__ is twin.mixed_precision._guard is not learn.mixed_precision._guard


class Copier:
    "Copies the learner when called, and is itself copied without the copies."
    def __init__(self, copies): self.copies = copies
    def __call__(self, learn):
        graph = 'loss_grad' in learn.__dict__ and learn.loss_grad.grad_fn is not None     # fastai's; nothing can deep-copy that
        if not graph: self.copies.append((pickle.dumps(learn), copy.deepcopy(learn)))
    def __getstate__(self): return {'copies': []}


# -- toggling

def test_toggling_leaves_no_trace(tmp_path):
    def run(modes):
        learn = learner()
        for m in modes: getattr(learn, m)().fit(1, .01)
        return learn.to_fp32()
    plain, toggled = run(['to_fp32'] * 4), run(['to_fp16', 'to_bf16', 'to_fp32', 'to_fp16'])
    assert plain.__dict__.keys() == toggled.__dict__.keys() and [type(c) for c in plain.cbs] == [type(c) for c in toggled.cbs]
    assert plain.opt.__dict__.keys() == toggled.opt.__dict__.keys()
    for a, b in zip(plain.model.modules(), toggled.model.modules()):
        assert a.__dict__.keys() == b.__dict__.keys() and not b._forward_hooks and not b._forward_pre_hooks
    for a, b in zip(plain.model.parameters(), toggled.model.parameters()): assert (a.grad is None) == (b.grad is None) and not b._backward_hooks


def test_memory_does_not_grow_over_a_hundred_toggles():
    learn = learner()
    def toggle(n):
        for i in range(n): learn.to_fp16(init_scale=256.); (i % 10 == 0) and learn.fit(1); learn.to_bf16(); learn.to_fp32()
        gc.collect()
        return len(gc.get_objects())
    toggle(20)
    before, after = toggle(20), toggle(100)
    assert after - before < 300


# -- found by review

@pytest.mark.parametrize('how', [copy.deepcopy, lambda l: pickle.loads(pickle.dumps(l))], ids=['deepcopy', 'pickle'])
def test_a_copied_learner_saves_and_loads_its_scale(tmp_path, how):
    twin = how(trained(tmp_path))
    file = twin.save('a')
    assert torch.load(file, weights_only=False)['opt'][KEY] == state(twin)
    with warnings.catch_warnings():
        warnings.filterwarnings('error', message='The file holds')
        other = how(trained(tmp_path, n=0)).load('a')
    assert state(other) == state(twin)


def test_two_threads_that_save_to_one_name(tmp_path):
    learners, errors = [trained(tmp_path) for _ in range(2)], []
    def work(learn):
        try:
            for _ in range(20): learn.save('same')
        except BaseException as e: errors.append(e)
    threads = [threading.Thread(target=work, args=(l,)) for l in learners]
    for t in threads: t.start()
    for t in threads: t.join()
    assert not errors and trained(tmp_path, n=0).load('same')


def test_the_mode_of_a_file_is_kept(tmp_path):
    file = trained(tmp_path).save('a')
    file.chmod(0o600)
    trained(tmp_path).save('a')
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize('wrong', [dict(scale=1e39), dict(growth_interval=2.5), dict(_growth_tracker=.5)])
def test_numbers_that_a_scaler_cannot_hold_are_refused(tmp_path, wrong):
    learn = trained(tmp_path); before = state(learn)
    with pytest.raises(ValueError, match='Nothing was loaded'): learn.precision.load_state_dict({**before, **wrong})
    assert state(learn) == before


@pytest.mark.parametrize('scale', [1e39, 1e300, 10 ** 400], ids=['1e39', '1e300', 'int'])
def test_scales_beyond_fp32_are_refused_without_a_warning_of_numpys(scale):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        with pytest.raises(ValueError, match='init_scale=1'): learner().to_fp16(init_scale=scale)


def test_saving_while_a_half_built_copy_of_another_learner_is_about(tmp_path):
    "As one is after a deep copy that failed."
    broken = Learner.__new__(Learner)
    learn = learner(path=tmp_path).to_bf16()
    copied = copy.copy(learn.precision)
    copied.__dict__['_learn'] = broken
    copied._attach()
    plain = learner(path=tmp_path)
    start = params(plain)
    plain.save('x')
    with torch.no_grad(): [p.zero_() for p in plain.model.parameters()]  # noqa: B018
    assert same(params(plain.load('x')), start)
