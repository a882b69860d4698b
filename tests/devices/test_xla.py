"""What only XLA needs: moves in place, one graph a batch, sync-free optimizers, replicas. See also test_accelerator.py.

On XLA's CPU device: `pip install torch==2.9.0 torchvision==0.24.0 torch_xla==2.9.0`, and `PJRT_DEVICE=CPU`.
"""

import importlib.util, operator, os, subprocess, sys
from types import SimpleNamespace

import pytest, torch
from fastai.callback.training import GradientAccumulation
from fastai.data.transforms import Normalize
from fastai.optimizer import ranger
from fastai.text.models.awdlstm import WeightDropout

from fastxtend_amp import precision_support
from helpers import *

OPTS = {**OPTIMIZERS, 'ranger': ranger}


@pytest.fixture
def device():
    if not (importlib.util.find_spec('torch_xla') and os.environ.get('PJRT_DEVICE')):
        pytest.skip('needs torch_xla, and PJRT_DEVICE=CPU in the environment')
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


def sync_free(name, **kwargs):
    import torch_xla.amp.syncfree as sf

    return partial(OptimWrapper, opt=partial(getattr(sf, name), **kwargs))


def smooth():
    "A model with small rounding errors: Adam would amplify those of a bias before batch norm, so it has none."
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def build(device, model, mode='fp32', opt='adam', **kwargs):
    options = {'dls': loaders(n=32), 'opt_func': OPTS.get(opt, opt), **kwargs}
    learn = learner(model, **options)
    learn.dls.to(device)
    return getattr(learn, f'to_{mode}')(**({'init_scale': 256.0} if mode == 'fp16' else {}))


def host(learn):
    return [p.cpu() for p in params(learn)]


def places(learn):
    return {p.device.type for p in learn.model.parameters()}


def close(a, b, tol):
    return all(torch.allclose(x.cpu(), y.cpu(), atol=tol, rtol=tol) for x, y in zip(a, b, strict=True))


def ours(learn):
    return [cb for cb in learn.cbs if type(cb).__name__ == 'XLADevice']


def stop(l):
    raise KeyboardInterrupt


def python(code, **env):
    env = {**os.environ, 'PYTHONPATH': os.pathsep.join(sys.path), **env}
    return subprocess.run([sys.executable, '-W', 'default', '-c', code], capture_output=True, text=True, env=env)


def test_torch_xla_is_not_imported_for_other_devices(device):
    out = python(
        "import sys; from helpers import *; learn = learner()\n"
        "for mode in ('fp32', 'bf16', 'fp16', 'amp'): getattr(learn, f'to_{mode}')().fit(1)\n"
        "print('torch_xla' in sys.modules, [cb for cb in learn.cbs if 'XLA' in type(cb).__name__])"
    )
    assert out.stdout.split('\n')[-2] == 'False []', out.stderr


def test_precision_support(device):
    table = precision_support().set_index(['device', 'precision']).support['xla']
    if os.environ['PJRT_DEVICE'] == 'CPU':
        assert dict(table) == {'bf16': 'emulated', 'fp16': 'emulated', 'tf32': 'unsupported', 'fp8': 'emulated'}


# -- from the CPU to XLA and back


class Recurrent(nn.Module):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.rnn = WeightDropout(nn.LSTM(1, 4, batch_first=True), 1e-9)
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.rnn(x[..., None])[0][:, -1])


def tied():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1))
    model[1].weight = model[0].weight
    return model


def weight_norm():
    return nn.Sequential(nn.utils.weight_norm(smooth()[0]), *smooth()[1:])


@pytest.mark.parametrize(
    'mode, opt, model',
    [
        ('fp32', 'sgd', smooth),
        ('fp16', 'adam', smooth),
        ('fp32', 'adamw', smooth),
        ('fp32', 'ranger', smooth),
        # fastai's optimizers have a state for a recurrent layer's `bias`, which is True; weight norm keeps a graph.
        *(('fp32', 'adam', model) for model in (tied, Recurrent, weight_norm)),
    ],
)
def test_refits_keep_parameters_and_state(mode, opt, model, device, tmp_path):
    moving, staying = (build('cpu', model(), mode, opt, path=tmp_path) for _ in range(2))
    objects, tol = list(moving.model.parameters()), 1e-4 if mode == 'fp32' else 0.01
    for i, where in enumerate(map(torch.device, ('cpu', device, 'cpu', device))):
        moving.dls.to(where)
        for learn in (moving, staying):
            learn.fit(1, 0.01)
        moving.export()  # from the CPU, and back
        assert all(p.device == where for p in objects) and len(ours(moving)) == (where.type == 'xla')
        assert all(map(operator.is_, objects, moving.model.parameters()))
        if mode == 'fp16':
            assert moving.mixed_precision.state_dict()['_growth_tracker'] == 8 * (i + 1)
    held = {p for group in moving.opt.param_lists for p in group}
    assert {*objects} <= held and close(params(moving), params(staying), tol)
    for a, b in zip(opt_state(moving.opt), opt_state(staying.opt)):
        assert a.keys() == b.keys()
        for k in a:
            assert close([a[k]], [b[k]], 10 * tol) if isinstance(a[k], torch.Tensor) else a[k] == b[k]
    for mode in ('bf16', 'amp', 'fp32'):
        moving.validate()
        start = host(moving)
        getattr(moving, f'to_{mode}')().fit(1, 0.1)
        assert len(ours(moving)) == 1 and not same(host(moving), start)


def test_moving_after_an_interrupt_and_with_a_graph_that_is_kept(device):
    learn = build('cpu', smooth(), 'bf16')
    with pytest.raises(KeyboardInterrupt):
        learn.fit(1, cbs=At('before_backward', stop))
    learn.dls.to(device)
    learn.fit(1)
    assert places(learn) == {'xla'}
    learn = build('cpu', smooth(), 'bf16')
    kept = learn.model(torch.randn(4, 6)).sum()
    learn.dls.to(device)
    with pytest.raises(RuntimeError, match="(?s)cannot be moved to 'xla:0' in place.*graph of a kept loss"):
        learn.fit(1)
    del kept
    learn.fit(1)
    assert places(learn) == {'xla'} and not torch.__future__.get_swap_module_params_on_conversion()


def test_an_optimizer_that_holds_other_parameters(device):
    learn = build('cpu', smooth())
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


@pytest.mark.parametrize('mode', ['fp32', 'fp16'])
def test_one_sync_per_batch_before_the_loss_is_read(mode, device, monkeypatch):
    import torch_xla

    calls, seen, sync = [], [], torch_xla.sync
    monkeypatch.setattr(torch_xla, 'sync', lambda *a, **k: (calls.append(1), sync(*a, **k)))
    build(device, smooth(), mode, cbs=At('after_batch', lambda l: seen.append(len(calls)), 12)).fit(2)
    assert seen == list(range(1, 2 * (8 + 2) + 1)) and len(calls) == seen[-1]  # 8 training and 2 validation batches


@pytest.mark.parametrize('mode, opt, reads', [('bf16', 'adam', 0), ('fp16', 'adam', 1), ('fp16', 'sync-free', 0)])
def test_nothing_is_compiled_after_two_fits_and_only_fp16_reads(mode, opt, reads, counted, device):
    def of_two_epochs(mode):  # one learner at a time: a graph holds what is put off in all
        learn = build(device, mlp(), mode, sync_free('Adam') if opt == 'sync-free' else opt)
        for _ in range(2):
            learn.fit(2, 0.01), learn.get_preds()
        a, b = (counted(lambda n=n: (learn.fit(n, 0.01), learn.get_preds())) for n in (4, 2))
        assert a.compiled == b.compiled == 0
        return a.read - b.read, a.fetched - b.fetched, a.synced - b.synced

    read, fetched, synced = (a - b for a, b in zip(of_two_epochs(mode), of_two_epochs('fp32')))
    assert (read, synced) == (reads * 16, 0)
    assert fetched == reads * 16 + 2 * (mode == 'fp16')  # the history, once an epoch


@pytest.mark.parametrize('name, skips, options', [('SGD', (0, 1), {'momentum': 0.9}), ('Adam', (3, 6), {})])
def test_sync_free_optimizers_skip_as_the_host_would(name, skips, options, device, tmp_path):
    "From the first step on; with a state of steps without a flag, as those in fp32; with one from a file."
    seen = []
    for opt in (sync_free(name, **options), partial(OptimWrapper, opt=partial(getattr(torch.optim, name), **options))):
        cancelled, weights = [], []
        cbs = [
            spoil_at(*skips),
            At('after_cancel_step', lambda l: cancelled.append(1), 20),
            At('after_batch', lambda l: l.training and weights.append(host(l)), 70),
        ]
        learn = build(device, smooth(), opt=opt, path=tmp_path)
        for mode in ('fp16', 'fp32', 'fp16', 'fp16'):
            getattr(learn, f'to_{mode}')(**(dict(init_scale=256.0) if mode == 'fp16' else {}))
            learn.fit(1, 0.01, cbs=cbs if mode == 'fp16' else None, reset_opt=mode == 'fp32')
            assert mode == 'fp32' or learn.mixed_precision.skips == [i in skips for i in range(8)]
            learn.save('a')
            learn.load('a')
        seen.append((weights, len(cancelled)))
    (by_device, none), (by_host, n) = seen
    assert (none, n) == (0, 3 * len(skips)) and len(by_device) == 24
    assert all(close(a, b, 1e-4) for a, b in zip(by_device, by_host))
    assert all(same(by_device[i], by_device[i - 1]) for i in set(skips) - {0})


# -- files


def test_files_load_where_there_is_no_torch_xla(device, tmp_path):
    normalize = Normalize.from_stats([0.0], [1.0], cuda=False)  # its tensors move with the loaders
    dls = DataLoaders.from_dsets(dataset(8), dataset(8), bs=4, num_workers=0, after_batch=normalize)
    learn = build(device, mlp(), path=tmp_path, dls=dls)
    learn.fit(1)
    assert normalize.mean.device == device
    learn.export()
    assert places(learn) == {'xla'} and learn.dls.device == device and len(ours(learn)) == 1
    learn.to_bf16().save('a')
    states = torch.load(tmp_path / 'models' / 'a.pth', weights_only=False)['model']
    assert {t.device.type for t in states.values()} == {'cpu'}
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


# -- several replicas, as far as one device can show them


@pytest.mark.parametrize('mode, n_acc', [('fp32', None), ('fp16', None), ('fp16', 8)])
def test_gradients_are_reduced_before_they_are_unscaled(mode, n_acc, device, monkeypatch):
    import torch_xla.core.xla_model as xm, torch_xla.runtime as xr

    scaled, unscaled = [], []

    def reduce(kind, gradients, scale, **kwargs):
        scaled.append(gradients[0].cpu())
        for g in gradients:
            g.mul_(2 * scale)  # two replicas with equal gradients

    def fitted():
        cbs = [At('before_step', lambda l: unscaled.append(l.model[0].weight.grad.cpu()), 20)]
        learn = build(device, smooth(), mode, cbs=cbs + [GradientAccumulation(n_acc)] * bool(n_acc))
        learn.fit(1, 0.01)
        return learn

    monkeypatch.setattr(xm, 'all_reduce', reduce)
    one = fitted()
    assert not scaled
    unscaled.clear()
    monkeypatch.setattr(xr, 'world_size', lambda: 2)
    assert close(params(one), params(fitted()), 1e-5)
    for a, b in zip(scaled, unscaled, strict=True):
        assert torch.allclose(a / (256.0 if mode == 'fp16' else 1.0), b)
