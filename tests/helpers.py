"Small real learners, and what several tests ask of them."

from __future__ import annotations

import os, re, subprocess, sys, warnings

import pytest, torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import SGD, Adam, OptimWrapper
from fastcore.basics import noop
from functools import cache, partial
from pathlib import Path
from torch import nn
from torch.utils.data import TensorDataset

import fastxtend_amp  # noqa: F401  patches Learner
from fastxtend_amp import MixedPrecision
from fastxtend_amp.precisions import PRECISIONS, Support

ROOT = Path(__file__).parents[1]
DEVICE = torch.device('cpu')  # where learners train; `pytest --sim=sim` puts a simulated device here (conftest.py)


class Data(TensorDataset):
    def new_empty(self):
        return Data(*(t[:0] for t in self.tensors))


def dataset(n=24, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    return Data(x, x[:, :1] * 2 - x[:, 1:2] + 0.1 * torch.randn(n, 1, generator=g))


def loaders(n=24, bs=4, train=None, valid=None, device=None):
    device = device or DEVICE
    make = lambda ds: DataLoader(ds, bs=bs, shuffle=False, num_workers=0, device=device)
    return DataLoaders(make(train or dataset(n)), make(valid or dataset(8, seed=1)), device=device)


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))


class Attention(nn.Module):
    "Attention whose products exceed 65,504 with a large `gain` before they are scaled down: fine in fp32 only."

    def __init__(self, d=8, gain=800.0):
        super().__init__()
        self.q, self.k, self.v, self.gain = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d), gain

    def forward(self, x):
        scores = (self.q(x) * self.gain) @ (self.k(x) * self.gain).transpose(-1, -2)
        return (scores / self.gain**2).softmax(-1) @ self.v(x)


class Attentive(nn.Module):
    "From (n, 6) to (n, 1); its `attn` overflows in fp16 unless `gain` is small."

    def __init__(self, gain=800.0, drop=0.0, seed=0):
        torch.manual_seed(seed)
        super().__init__()
        self.emb, self.attn, self.norm, self.drop = (
            nn.Linear(1, 8),
            Attention(8, gain),
            nn.LayerNorm(8),
            nn.Dropout(drop),
        )
        self.head = nn.Sequential(nn.Linear(48, 8), nn.ReLU(inplace=True), nn.Linear(8, 1))

    def forward(self, x):
        x = self.emb(x[..., None])
        return self.head(self.norm(x + self.drop(self.attn(x))).flatten(1))


def learner(model=None, dls=None, loss_func=None, cls=Learner, cbs=None, progress=False, **kwargs):
    dls, model = dls or loaders(), mlp() if model is None else model
    if getattr(dls.device, 'type', 'cpu') == 'xla':
        model.to(dls.device)  # other devices' models are on the CPU until the first fit, as a user's model is
    learn = cls(dls, model, loss_func=loss_func or nn.MSELoss(), cbs=cbs, **kwargs)
    if not progress:
        learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ == 'ProgressCallback'])
    learn.logger = noop
    return learn


def params(learn):
    return [p.detach().clone() for p in learn.model.parameters()]


def same(a, b):
    "Return whether two values are equal: tensors bit for bit, also in lists and dicts."
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


def finite(learn):
    return all(p.isfinite().all() for p in params(learn))


@cache
def plain_names():
    learn = learner()
    learn.fit(1)
    return {*vars(learn)}


def replaced(model):
    "Return the names of modules whose forward is not that of their class."
    return [n for n, m in model.named_modules() if 'forward' in vars(m)]


def left_on(learn):
    "Return the attributes that no plain learner has, without callbacks, and those in `replaced`."
    names = {name for name in vars(learn) if name != 'loaded_precision' or learn.loaded_precision}
    return [*names - plain_names() - {cb.name for cb in learn.cbs}, *replaced(learn.model)]


def is_outside_a_fit(learn):
    "Return whether the precision callback of `learn` has closed everything that it opened."
    return learn.mixed_precision.fit is None and vars(learn).get('scaler') is None and not replaced(learn.model)


def opt_state(opt):
    "Return the whole state of an optimizer, as a list of plain values and tensors, in a fixed order."
    inner = getattr(opt, 'opt', None)
    if isinstance(inner, torch.optim.Optimizer):
        states = [inner.state[p] for g in inner.param_groups for p in g['params']]
    else:
        states = [opt.state[p] for p, *_ in opt.all_params()]
    return [{k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in sorted(s.items())} for s in states]


def autocast_state():
    nesting = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    kind = DEVICE.type
    return (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled(), nesting)


def mixed(precision, **kwargs):
    "Return the precision callback of `precision`, in fp16 with a loss scale at which these models do not overflow."
    return MixedPrecision(precision, **({'init_scale': 256.0, **kwargs} if precision == 'fp16' else kwargs))


def told(f, word=''):
    "Return the texts of the warnings from `f()` that contain this word."
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        f()
    return [str(w.message) for w in caught if word in str(w.message)]


def errors_of(calls, *args):
    "Return the error of each call, by its name, as tests/expected has them."
    lines = []
    for name, call in calls.items():
        with pytest.raises(Exception) as error:
            call(*args)
        lines += [f'# {name}', f'{error.typename}: {error.value}', '']
    return '\n'.join(lines)


def set_support(monkeypatch, status, why='for this test'):
    "Make the device support each precision as `status(name)` says: 'native', 'emulated' or 'unsupported'."
    for name, cls in PRECISIONS.items():
        said = classmethod(lambda cls, device, name=name: Support(status(name), why))
        monkeypatch.setattr(cls, 'support', said)


def spoil_at(*steps):
    "A callback that makes one gradient infinite in these training batches."

    def spoil(l):
        if l.train_iter in steps:
            next(l.model.parameters()).grad.view(-1)[0] = float('inf')

    return At('after_backward', spoil, 5)


def plain_grads(learn):
    return [None if p.grad is None else p.grad.clone() for p in learn.model.parameters()]


def output_dtypes(learn, *modules):
    "Record the output dtypes of these modules of `learn` in training from now on; of the first one by default."
    found = []
    for m in modules or [learn.model[0]]:
        m.register_forward_hook(lambda m, i, o: found.append(o.dtype) if m.training else None)
    return found


def linear():
    torch.manual_seed(0)
    return nn.Linear(6, 1)


def python(*args, cwd=None, **env):
    "Run Python in a process of its own, which finds the package and these helpers; return the finished process."
    kept = {k: v for k, v in os.environ.items() if not k.startswith('PYTEST_')}
    paths = os.pathsep.join([str(ROOT), str(ROOT / 'tests'), os.environ.get('PYTHONPATH', '')])
    env = {**kept, 'PYTHONPATH': paths, 'OMP_NUM_THREADS': '1', 'PYTHONWARNINGS': 'ignore', **env}
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env)


def assert_passes(*options):
    "Run tests in a process of their own: all pass, and none is skipped."
    done = python('-m', 'pytest', '-p', 'no:cacheprovider', '-p', 'no:xdist', '--tb=short', *options, cwd=ROOT)
    passed = done.returncode == 0 and re.search(r'\d passed', done.stdout) and not re.search(r'\d skipped', done.stdout)
    assert passed, done.stdout[-8000:] + done.stderr[-2000:]


class At(Callback):
    "Call `f(learn)` at one event, before or after the precision callback by `order`. Can be pickled if `f` can."

    run_on_copy = False  # most record what a fit does

    def __init__(self, event, f, order=0):
        self.order, self.f = order, f
        setattr(self, event, self._run)

    def _run(self):
        self.f(self.learn)


OPTIMIZERS = {
    'sgd': partial(SGD, mom=0.9),
    'adam': Adam,
    'adamw': partial(OptimWrapper, opt=torch.optim.AdamW),
    'fused adamw': partial(OptimWrapper, opt=partial(torch.optim.AdamW, fused=True)),
    'torch sgd': partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=0.9)),
    'fused sgd': partial(OptimWrapper, opt=partial(torch.optim.SGD, momentum=0.9, fused=True)),
}
