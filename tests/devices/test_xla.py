"""On an XLA device: a learner trains as on the CPU, one graph a batch, and its files work.

On XLA's CPU device: `python tests/matrix.py FOLDER xla`.
"""

import importlib.util, operator, os, pickle, subprocess, sys
from types import SimpleNamespace

import pytest, torch
from fastai.callback import schedule  # noqa: F401  fit_one_cycle, lr_find
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.transforms import Normalize
from fastai.learner import load_learner
from fastai.optimizer import ranger
from fastai.text.models.awdlstm import WeightDropout

from fastxtend_amp import precision_support
from helpers import *

XLA = bool(importlib.util.find_spec('torch_xla') and os.environ.get('PJRT_DEVICE'))
MODES = pytest.mark.parametrize('mode', ['fp32', 'bf16', 'fp16'])
TOLERANCE = {'fp32': 1e-4, 'bf16': 0.03, 'fp16': 0.003}
OPTS = {**OPTIMIZERS, 'ranger': ranger}


@pytest.fixture
def device():
    if not XLA:
        pytest.skip('needs torch_xla, and PJRT_DEVICE=CPU in the environment: see tests/matrix.py')
    import torch_xla

    return torch_xla.device()


@pytest.fixture
def counted(device):
    "Count what a function makes torch_xla do: compilations, scalar reads, transfers to the CPU, graphs run."
    import torch_xla.debug.metrics as met

    names = dict(compiled='UncachedCompile', read='aten::_local_scalar_dense', synced='MarkStep')

    def now():
        counts = {k: met.counter_value(n) or 0 for k, n in names.items()}
        return {**counts, 'fetched': (met.metric_data('TransferFromDeviceTime') or [0])[0]}

    def count(f):
        before = now()
        f()
        return SimpleNamespace(**{k: v - before[k] for k, v in now().items()})

    return count


def syncfree(name):
    import torch_xla.amp.syncfree as sf

    return partial(OptimWrapper, opt=partial(getattr(sf, name), **({'momentum': 0.9} if name == 'SGD' else {})))


def opt_func(name):
    return syncfree(name[10:]) if name.startswith('sync-free ') else OPTS[name]


def build(device, mode='fp32', **kwargs):
    learn = learner(**{'dls': loaders(n=32), **kwargs})
    learn.dls.to(device)
    return getattr(learn, f'to_{mode}')(**({'init_scale': 256.0} if mode == 'fp16' else {}))


def smooth(seed=0):
    "A model with small rounding errors: Adam would amplify those of a bias before batch norm, so it has none."
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def host(learn):
    return [p.detach().cpu().clone() for p in learn.model.parameters()]


def places(learn):
    return {p.device.type for p in learn.model.parameters()}


def curve(learn):
    return torch.stack([t.cpu() for t in learn.recorder.losses])


def close(a, b, tol):
    return all(torch.allclose(x.cpu(), y.cpu(), atol=tol, rtol=tol) for x, y in zip(a, b, strict=True))


def ours(learn):
    return [cb for cb in learn.cbs if type(cb).__name__ == 'XLADevice']


def python(code, **env):
    return subprocess.run(
        [sys.executable, '-W', 'default', '-c', code],
        capture_output=True,
        text=True,
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path), **env},
    )


# -- learners elsewhere


@pytest.mark.skipif(not XLA, reason='there is no torch_xla to import')
def test_torch_xla_is_not_imported_for_other_devices():
    out = python(
        "import sys; from helpers import *; learn = learner()\n"
        "for mode in ('fp32', 'bf16', 'fp16', 'amp'): getattr(learn, f'to_{mode}')().fit(1)\n"
        "print('torch_xla' in sys.modules, [cb for cb in learn.cbs if 'XLA' in type(cb).__name__])"
    )
    assert out.stdout.split('\n')[-2] == 'False []', out.stderr


def test_a_learner_on_the_cpu_trains_and_exports_as_before(device, tmp_path):
    learn = learner(path=tmp_path)
    learn.fit(1, 0.01)
    learn.validate()
    learn.export()
    assert not ours(learn) and places(learn) == {'cpu'}
    assert same(params(load_learner(tmp_path / 'export.pkl')), params(learn))


# -- training


@pytest.mark.parametrize('mode,opt', [('fp32', 'adam'), ('bf16', 'adamw'), ('fp16', 'adam'), ('fp16', 'torch sgd')])
def test_loss_curves_follow_the_cpu(mode, opt, device):
    xla, cpu = (build(d, mode, model=smooth(), opt_func=OPTS[opt]) for d in (device, 'cpu'))
    start = host(xla)
    for learn in (xla, cpu):
        learn.fit_one_cycle(3, 0.02)
    assert places(xla) == {'xla'} and not any(map(torch.equal, host(xla), start))
    assert close([curve(xla)], [curve(cpu)], TOLERANCE[mode])
    a, b = list(xla.recorder.values[-1]), list(cpu.recorder.values[-1])
    assert a == pytest.approx(b, abs=TOLERANCE[mode], rel=TOLERANCE[mode])
    assert xla.validate()[0] == pytest.approx(a[1], rel=1e-5)
    if mode == 'fp16':
        assert xla.precision.scales == cpu.precision.scales


@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_low_precision_is_there_inside_and_nowhere_afterwards(mode, device):
    def state():
        return torch.is_autocast_enabled('xla'), torch.get_autocast_dtype('xla'), autocast_state()

    def stop(l):
        raise KeyboardInterrupt

    learn, seen, before = build(device, mode), set(), state()

    def look(m, x, y):
        seen.add((y.dtype, y.device.type, torch.is_autocast_enabled('xla')))

    learn.model[0].register_forward_hook(look)
    with pytest.raises(KeyboardInterrupt):
        learn.fit(1, cbs=At('after_pred', stop, 5))
    assert state() == before
    learn.fit(1)
    assert seen == {(learn.precision.mode.dtype, 'xla', True)} and state() == before
    assert learn.get_preds()[0].dtype is torch.float32


def test_skipped_steps_and_accumulation(device):
    xla, cpu = (
        build(d, 'fp16', model=smooth(), cbs=[GradientAccumulation(8), GradientClip(0.5), spoil_at(1, 5)])
        for d in (device, 'cpu')
    )
    for learn in (xla, cpu):
        learn.fit(2, 0.02)
    assert xla.precision.scales == cpu.precision.scales and xla.precision.n_skipped == cpu.precision.n_skipped == 2
    assert close(params(xla), params(cpu), 0.01)


def test_precision_support_and_warning(device):
    table = precision_support('xla').set_index('mode').support
    if os.environ['PJRT_DEVICE'] == 'CPU':
        assert dict(table) == {'bf16': 'emulated', 'fp16': 'emulated', 'tf32': 'unsupported', 'fp8': 'emulated'}
    assert 'xla' in set(precision_support().device)
    with pytest.warns(UserWarning, match="bf16 is emulated on device 'xla:0'"):
        build(device, 'bf16').fit(1)


def test_one_callback_in_every_mode_and_for_validation_alone(device):
    learn = build(device, 'fp16')
    assert not ours(learn)
    learn.validate()
    for mode in ('bf16', 'fp32', 'amp', 'fp32'):
        start = host(learn)
        getattr(learn, f'to_{mode}')().fit(1, 0.1)
        learn.get_preds()
        assert len(ours(learn)) == 1 and not same(host(learn), start)


# -- moving with the state of the optimizer


@pytest.mark.parametrize('mode,opt', [('fp32', 'sgd'), ('fp16', 'adam'), ('fp32', 'adamw'), ('fp32', 'ranger')])
def test_refits_from_cpu_to_xla_and_back_keep_parameters_and_state(mode, opt, device):
    moving, staying = (build('cpu', mode, model=smooth(), opt_func=OPTS[opt]) for _ in range(2))
    objects, tol = list(moving.model.parameters()), 1e-4 if mode == 'fp32' else 0.01
    for i, where in enumerate(('cpu', device, 'cpu')):
        moving.dls.to(where)
        for learn in (moving, staying):
            learn.fit(1, 0.01)
        assert all(p.device == torch.device(where) for p in objects)
        if mode == 'fp16':
            assert moving.precision.state_dict()['_growth_tracker'] == 8 * (i + 1)
    held = [p for pl in moving.opt.param_lists for p in pl]
    assert all(a is b is c for a, b, c in zip(objects, moving.model.parameters(), held, strict=True))
    assert close(params(moving), params(staying), tol)
    for a, b in zip(opt_state(moving.opt), opt_state(staying.opt)):
        assert a.keys() == b.keys()
        for k in a:
            assert close([a[k]], [b[k]], 10 * tol) if isinstance(a[k], torch.Tensor) else a[k] == b[k]


def test_moving_after_an_interrupt_and_with_a_graph_that_is_kept(device):
    def stop(l):
        raise KeyboardInterrupt

    learn = build('cpu', 'bf16')
    with pytest.raises(KeyboardInterrupt):
        learn.fit(1, cbs=At('before_backward', stop))
    learn.dls.to(device)
    learn.fit(1)
    assert places(learn) == {'xla'}
    learn = build('cpu', 'bf16')
    kept = learn.model(torch.randn(4, 6)).sum()
    learn.dls.to(device)
    message = "(?s)cannot be moved to 'xla:0' in place.*graph of a kept loss"
    with pytest.raises(RuntimeError, match=message):
        learn.fit(1)
    del kept
    learn.fit(1)
    assert places(learn) == {'xla'} and not torch.__future__.get_swap_module_params_on_conversion()


class Recurrent(nn.Module):
    def __init__(self, wrap=lambda m: m):
        torch.manual_seed(0)
        super().__init__()
        self.rnn, self.head = wrap(nn.LSTM(1, 4, batch_first=True)), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.rnn(x[..., None])[0][:, -1])


def tied():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1))
    model[1].weight = model[0].weight
    return model


MODELS = {
    'tied': tied,
    'lstm': Recurrent,
    'weight dropout': lambda: Recurrent(lambda m: WeightDropout(m, 1e-9)),
    'weight norm': lambda: nn.Sequential(nn.utils.weight_norm(smooth()[0]), *smooth()[1:]),
}


@pytest.mark.parametrize('model', MODELS)
def test_models_whose_weights_are_more_than_parameters(model, device, tmp_path):
    "fastai's optimizers have a state for a recurrent layer's `bias`, which is True; weight norm keeps a graph."
    moving, staying = (learner(MODELS[model](), loaders(n=16), path=tmp_path) for _ in range(2))
    objects = [*moving.model.parameters()]
    for where in (device, 'cpu', device):
        moving.dls.to(where)
        for learn in (moving, staying):
            learn.fit(1, 0.01)
        moving.export()  # from the CPU, and back
        assert {p.device for p in objects} == {torch.device(where)}
    assert all(map(operator.is_, objects, moving.model.parameters())) and close(params(moving), params(staying), 1e-4)


def test_an_optimizer_that_holds_other_parameters(device):
    learn = build('cpu')
    learn.create_opt()
    learn.model.to(device)
    learn.dls.to(device)
    with pytest.raises(RuntimeError, match="(?s)none of the model's parameters.*learn.create_opt"):
        learn.fit(1)
    learn.create_opt()
    start = host(learn)
    learn.fit(1, 0.1)
    assert not same(host(learn), start)


def test_a_device_that_came_too_late(device):
    out = python(
        "import torch; torch.ones(1, requires_grad=True).sum().backward(); from helpers import *; "
        "learn = learner(); learn.dls.to('xla'); import torch_xla; learn.fit(1)"
    )
    assert 'RuntimeError' in out.stderr and 'torch_xla.device()' in out.stderr.strip().split('\n')[-1], out.stderr


# -- one graph a batch


@MODES
def test_one_sync_per_batch_before_the_loss_is_read(mode, device, monkeypatch):
    import torch_xla

    calls, seen, sync = [], [], torch_xla.sync
    monkeypatch.setattr(torch_xla, 'sync', lambda *a, **k: (calls.append(1), sync(*a, **k)))
    build(device, mode, cbs=At('after_batch', lambda l: seen.append(len(calls)), 12)).fit(2)
    assert seen == list(range(1, 2 * (8 + 2) + 1)) and len(calls) == seen[-1]  # 8 training and 2 validation batches


@pytest.mark.parametrize('mode,opt,reads', [('bf16', 'adam', 0), ('fp16', 'adam', 1), ('fp16', 'sync-free Adam', 0)])
def test_nothing_is_compiled_after_two_fits_and_fp16_alone_reads(mode, opt, reads, counted, device):
    def of_two_epochs(mode):  # one learner at a time: a graph holds what is put off in all
        learn = build(device, mode, opt_func=opt_func(opt))
        for _ in range(2):
            learn.fit(2, 0.01), learn.get_preds()
        a, b = (counted(lambda n=n: (learn.fit(n, 0.01), learn.get_preds())) for n in (4, 2))
        assert a.compiled == b.compiled == 0
        return a.read - b.read, a.fetched - b.fetched, a.synced - b.synced

    read, fetched, synced = (a - b for a, b in zip(of_two_epochs(mode), of_two_epochs('fp32')))
    assert (read, synced) == (reads * 16, 0)
    assert fetched == reads * 16 + 2 * (mode == 'fp16')  # the history, once an epoch


# -- torch_xla's sync-free optimizers


@pytest.mark.parametrize('name,skips', [('SGD', (0, 1)), ('Adam', (3, 6))])
def test_sync_free_optimizers_skip_as_the_host_would(name, skips, device, tmp_path):
    "From the first step on; with a state of steps without a flag, as those in fp32; with one from a file."
    kwargs = {'momentum': 0.9} if name == 'SGD' else {}
    seen = []
    for func in (syncfree(name), partial(OptimWrapper, opt=partial(getattr(torch.optim, name), **kwargs))):
        cancelled, weights = [], []
        cbs = [
            spoil_at(*skips),
            At('after_cancel_step', lambda l: cancelled.append(1), 20),
            At('after_batch', lambda l: l.training and weights.append(host(l)), 70),
        ]
        learn = build(device, model=smooth(), opt_func=func, path=tmp_path)
        for mode in ('fp16', 'fp32', 'fp16', 'fp16'):
            getattr(learn, f'to_{mode}')(**(dict(init_scale=256.0) if mode == 'fp16' else {}))
            learn.fit(1, 0.01, cbs=cbs if mode == 'fp16' else None, reset_opt=mode == 'fp32')
            assert mode == 'fp32' or learn.precision.skips == [i in skips for i in range(8)]
            learn.save('a')
            learn.load('a')
        seen.append((weights, len(cancelled)))
    (by_device, none), (by_host, n) = seen
    assert (none, n) == (0, 3 * len(skips)) and len(by_device) == 24
    for a, b in zip(by_device, by_host):
        assert close(a, b, 1e-4)
    for i in set(skips) - {0}:
        assert same(by_device[i], by_device[i - 1])


# -- files


@pytest.mark.parametrize('mode,opt', [('fp32', 'adam'), ('bf16', 'adamw'), ('fp16', 'ranger')])
def test_save_and_load(mode, opt, device, tmp_path):
    "Also in the middle of a fit."
    make = lambda d: build(d, mode, model=smooth(), opt_func=OPTS[opt], path=tmp_path)
    learn = make(device)
    learn.fit(1, 0.01)
    learn.save('a')
    saved = host(learn)
    state = torch.load(tmp_path / 'models' / 'a.pth', weights_only=False)
    assert all(t.device.type == 'cpu' for t in state['model'].values())
    learn.fit(1, 0.01)
    after = host(learn)
    learn.fit(2, 0.01, cbs=At('after_epoch', lambda l: l.load('a')))
    assert same(host(learn), saved)
    fresh = make(device)
    fresh.load('a')  # before the model is on the device
    cpu = make('cpu').load('a')
    assert same(params(cpu), saved)
    for l in (learn, fresh, cpu):
        l.fit(1, 0.01)
    for l, tol in ((learn, 1e-6), (fresh, 1e-6), (cpu, 0.03)):  # graphs are compiled again, and may round differently
        assert close(params(l), after, tol)
    if mode == 'fp16':
        assert fresh.precision.state_dict() == learn.precision.state_dict()


def test_export_and_pickle(device, tmp_path):
    learn = build(device, 'bf16', path=tmp_path)
    learn.fit(1, 0.01)
    learn.export()
    preds, start, state = learn.get_preds()[0], host(learn), opt_state(learn.opt)
    assert places(learn) == {'xla'} and learn.dls.device == device and len(ours(learn)) == 1
    loaded = load_learner(tmp_path / 'export.pkl')
    assert same(params(loaded), start) and not ours(loaded) and loaded.dls.device.type == 'cpu'
    assert torch.allclose(loaded.model.eval()(learn.dls.valid_ds.tensors[0]), preds, atol=TOLERANCE['bf16'])
    twin = pickle.loads(pickle.dumps(learn))
    for l in (twin, learn):
        l.fit(1, 0.01)
    assert same(host(twin), host(learn)) and len(ours(twin)) == 1
    assert not same(host(learn), start) and state[0]['sqr_avg'].device.type == 'xla'


def test_an_exported_file_loads_where_there_is_no_torch_xla(device, tmp_path):
    normalize = Normalize.from_stats([0.0], [1.0], cuda=False)  # its tensors move with the loaders
    dls = DataLoaders.from_dsets(dataset(8), dataset(8), bs=4, num_workers=0, after_batch=normalize)
    learn = build(device, 'bf16', path=tmp_path, dls=dls)
    learn.fit(1)
    assert normalize.mean.device == device
    learn.to_fp32().export()
    out = python(
        "import sys; sys.modules.update(torch_xla=None, fastxtend_amp=None); "
        "import warnings; warnings.simplefilter('ignore'); "
        "sys.modules['helpers'] = type(sys)('helpers'); from torch.utils.data import TensorDataset; "
        "sys.modules['helpers'].Data = type('Data', (TensorDataset,), {}); from fastcore.basics import noop; "
        f"from fastai.learner import load_learner; learn = load_learner(r'{tmp_path / 'export.pkl'}'); "
        "print(next(learn.model.parameters()).device)",
        TORCH_DEVICE_BACKEND_AUTOLOAD='0',
    )
    assert out.stdout.strip() == 'cpu', out.stderr[-2000:]


# -- several replicas, as far as one device can show them: the order of calls


@pytest.mark.parametrize('mode,n_acc', [('fp32', None), ('bf16', None), ('fp16', None), ('fp16', 8)])
def test_gradients_are_reduced_before_they_are_unscaled(mode, n_acc, device, monkeypatch):
    import torch_xla.core.xla_model as xm, torch_xla.runtime as xr

    calls, seen, scaled, unscaled = [], set(), [], []

    def reduce(kind, gradients, scale, **kwargs):
        calls.append('reduce')
        seen.add((kind, scale, len(gradients)))
        scaled.append(gradients[0].cpu())
        for g in gradients:
            g.mul_(2 * scale)  # two replicas with equal gradients

    monkeypatch.setattr(xm, 'all_reduce', reduce)
    cbs = lambda: [
        At('after_backward', lambda l: calls.append('backward'), -20),
        At('before_step', lambda l: unscaled.append(l.model[0].weight.grad.cpu()), 20),
        At('after_step', lambda l: calls.append('step'), -30),
        *([GradientAccumulation(n_acc)] if n_acc else []),
    ]
    one = build(device, mode, model=smooth(), cbs=cbs())
    one.fit(1, 0.01)
    assert 'reduce' not in calls
    for l in (calls, unscaled):
        l.clear()
    monkeypatch.setattr(xr, 'world_size', lambda: 2)
    two = build(device, mode, model=smooth(), cbs=cbs())
    two.fit(1, 0.01)
    assert calls == (['backward'] * (n_acc // 4 if n_acc else 1) + ['reduce', 'step']) * (4 if n_acc else 8)
    assert seen == {('sum', 0.5, 4)} and close(params(one), params(two), 1e-5)
    for a, b in zip(scaled, unscaled, strict=True):
        assert torch.allclose(a / (256.0 if mode == 'fp16' else 1.0), b)
