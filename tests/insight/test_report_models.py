"Every model that trains can be reported on, with the same result in each process."

import math, os, subprocess, sys
from pathlib import Path

import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint

from helpers import Attentive, dataset, finite, learner, loaders, mlp
from models import SAFE, Act, Directional, Gives, InStep, Mapped, Unpacks, layers, rows


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.spare, self.act = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(2, 2), nn.ReLU(inplace=True)
        self.head, self.b.weight = nn.Linear(6, 1), self.a.weight

    def forward(self, x):
        return self.head(self.act(self.b(self.act(self.a(self.a(x))))))


class Residual(nn.Module):
    "A sum in the model's own forward that a module overwrites in place, as in ResNets."

    def __init__(self):
        super().__init__()
        self.a, self.act = nn.Linear(6, 6), nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.a(x)
        return self.act(self.a(x) + x)[:, :1]


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 1)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1))

    def forward(self, x):
        return self.head(checkpoint.checkpoint(self.inner, self.first(x), use_reentrant=True))


def compiled():
    return learner(torch.compile(mlp(), backend='eager'))


def masked():
    "Targets with NaN, which the loss leaves out."

    def loss(p, y):
        known = y.isfinite()
        return F.mse_loss(torch.where(known, p, 0.0), torch.where(known, y, 0.0))

    data = dataset(64)
    data.tensors[1][::3] = math.nan
    return learner(dls=loaders(64, 16, data), loss_func=loss)


def scales_itself():
    "A callback with a backward pass of its own, by `learn.scaler`, which also exists in the fp32 run of the report."
    own = lambda l: l.scaler.scale(l.loss_grad).backward(retain_graph=True)
    return learner(cbs=InStep('before_backward', own, 5)).to_fp16(init_scale=1024.0)


def fp8():
    from torchao import float8

    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    model = float8.convert_to_float8_training(model, module_filter_fn=lambda m, name: name == '2')
    return learner(model, loaders(64, 16))


def attends(h):
    "Fused attention, whose operators may draw random numbers."
    h = h.view(-1, 1, 2, 4)
    return F.scaled_dot_product_attention(h, h, h).flatten(1)


class Spectral(nn.Linear):
    "With complex weights, read as conjugates, and a complex number."

    def __init__(self):
        super().__init__(6, 1)
        self.spectrum = nn.Parameter(torch.ones(6, dtype=torch.complex64))

    def forward(self, x):
        return super().forward(torch.fft.ifft(torch.fft.fft(x.float()) * self.spectrum.conj() * torch.tensor(1j)).imag)


def spectral():
    return learner(Spectral())


def on_meta(h):
    "As PyTorch does for the first nested tensor of a process."
    return h * (torch.ones(8, device='meta') + 1).ndim


class Keeps(nn.Module):
    "Reads features that a hook has stored in it."

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 1)

        def keep(module, args, out):
            self.features = out

        self.body.register_forward_hook(keep)

    def forward(self, x):
        self.body(x)
        return self.head(self.features)


RUNS = {
    'complex weights': spectral,
    'a hook refers to the model': lambda: learner(Keeps()),
    'a tensor without memory': lambda: learner(layers(Act(on_meta))),
    'a scripted module': lambda: learner(layers(torch.jit.script(nn.ReLU()))),
    'unpacked by a callback': lambda: learner(Gives(mlp()), cbs=Unpacks()),
    'tied, in place, called twice': lambda: learner(Tied()),
    'compiled': compiled,
    'checkpoints': lambda: learner(Checkpointed()),
    'vmap': lambda: learner(Mapped()),
    'forward-mode AD': lambda: learner(Directional()),
    'a sum that ReLU writes over': lambda: learner(Residual()),
    'spectral norm': lambda: learner(nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 1))),
    'masked targets': masked,
    'a backward pass in a callback': scales_itself,
    'writes into its inputs': lambda: learner(nn.Sequential(Act(lambda x: x.mul_(200)), nn.Linear(6, 1))),
    'fused attention': lambda: learner(layers(Act(attends))),
    'float8': fp8,
}


@pytest.mark.parametrize(
    'make', [pytest.param(f, id=name, marks=[pytest.mark.torchao] * (f is fp8)) for name, f in RUNS.items()]
)
def test_what_trains_can_be_reported_on(make):
    torch.manual_seed(0)
    learn = make()
    report = learn.precision_report('bf16' if make in (fp8, spectral) else ('bf16', 'fp16'))
    assert {v.verdict for v in report.verdicts.values()} == {SAFE} and ' 0.00%' not in repr(report), report
    assert report.table['error'].max() < 0.05
    assert (report.table['grad'].dropna() > 0).all() and report.table['grad'].notna().any()
    learn.fit(1)
    assert finite(learn)


def test_names():
    table = rows(learner(Checkpointed()).precision_report('bf16'), 'bf16')
    assert list(table.index) == ['first', 'inner.0', 'inner.1', 'head', 'loss function']
    table = rows(learner(Tied()).precision_report('bf16'), 'bf16')
    assert list(table.index) == ['a', 'b', 'act', 'head', 'loss function']
    assert rows(compiled().precision_report('bf16'), 'bf16').equals(rows(learner().precision_report('bf16'), 'bf16'))
    model = Attentive()
    model.attn.compile(backend='eager')
    for m in (torch.compile(Attentive(), backend='eager'), model):
        assert learner(m).precision_report('fp16').fp32_modules == ['attn']


# -- the same in each process

# In a fresh process: reports on models, twice in a row; `rows` has them in another order in another process.
TWICE = """
import sys, torch
sys.path += ['tests', 'tests/insight']
torch.set_num_threads(1)
from test_report_evidence import faces, whole_batch
from test_report_models import RUNS
makes = {**RUNS, 'faces': faces, 'whole': whole_batch}
for name in sys.argv[1:]:
    reports = []
    for _ in range(2):
        torch.manual_seed(0)
        reports.append(repr(makes[name]().precision_report()))
    assert reports[0] == reports[1], reports
    print(name, reports[0])
"""
MODELS = ['whole', 'faces', 'compiled', 'tied, in place, called twice', 'masked targets', 'checkpoints', 'vmap']
MODELS += ['fused attention', 'a sum that ReLU writes over', 'writes into its inputs', 'a scripted module']
MODELS += ['spectral norm']


@pytest.mark.slow
def test_a_report_is_the_same_in_each_process_and_on_a_busy_machine():
    run = lambda names: (
        subprocess.run(
            [sys.executable, '-c', TWICE, *names],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        ).stdout
    )
    firsts = [run([name]) for name in MODELS]
    burn = [subprocess.Popen([sys.executable, '-c', 'while True: pass']) for _ in range(2 * os.cpu_count())]
    try:
        assert run(MODELS) == ''.join(firsts)
    finally:
        for process in burn:
            process.kill()
