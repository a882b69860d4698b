"Models under `torch.compile`: how often they are compiled, and their results."

import shutil

import pytest, torch
from fastai.callback.training import GradientAccumulation, GradientClip
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from fastxtend_amp import AMPMode, MixedPrecision
from fastxtend_amp.compat import BackwardWithoutAutocast
from helpers import *


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


class GradModes(Net):
    "Switches gradients off and on in its forward pass, which the callback must notice in PyTorch 2.9."

    def forward(self, x):
        with torch.no_grad():
            size = self.first(x).abs().mean()
        return super().forward(x) + size


@pytest.fixture(autouse=True)
def clean():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def build(mode, how=None, model=Net, backend='aot_eager', n=24, cbs=(), opt='torch sgd', **scaling):
    "A learner, its compiled model's counter, the compilations after each epoch, its predictions' dtypes."
    scaling = {'init_scale': 256.0, **scaling} if mode == 'fp16' else {}
    learn = learner(
        model(),
        loaders(n=n),
        cbs=[*([MixedPrecision(mode, **scaling)] if mode != 'fp32' else []), *cbs],
        opt_func=OPTIMIZERS[opt],
    )
    learn.compiled, learn.after_epochs, learn.dtypes = CompileCounterWithBackend(backend), [], set()
    if how == 'wrapped':
        learn.model = torch.compile(learn.model, backend=learn.compiled)
    elif how == 'in place':
        learn.model.compile(backend=learn.compiled)
    learn.add_cb(At('after_epoch', lambda l: l.after_epochs.append(l.compiled.frame_count), 90))
    return learn.add_cb(At('after_pred', lambda l: l.dtypes.add(l.pred.dtype), 5))


def close(a, b, tol=1e-3):
    for p, q in zip(a.model.parameters(), b.model.parameters()):
        torch.testing.assert_close(p, q, rtol=tol, atol=tol)


@pytest.mark.parametrize(
    'mode, how, model, n',
    [  # 26: the last batch of an epoch is smaller
        ('bf16', 'wrapped', Net, 24),
        ('fp16', 'in place', GradModes, 24),
        ('fp16', 'wrapped', Net, 26),
        ('bf16', 'in place', GradModes, 26),
    ],
)
def test_compiled_once_for_training_and_once_for_validation(mode, how, model, n):
    "As often as in fp32 where batches differ in size, without graph breaks, with the uncompiled model's results."
    learn, eager, plain = build(mode, how, model, n=n), build(mode, None, model, n=n), build('fp32', how, model, n=n)
    for l in (learn, eager, plain)[: 2 if n == 24 else 3]:
        torch._dynamo.reset()
        l.fit(2, 0.01)
        l.validate()
        l.get_preds()
        l.fit(1, 0.01)
    frames = learn.compiled.frame_count
    assert frames == (2 if n == 24 else plain.compiled.frame_count) and frames in (2, 3)
    assert set(learn.after_epochs) == {frames}  # validate and get_preds have epochs too
    assert learn.compiled.op_count > 0 and not counters['graph_break'] and learn.dtypes == {AMPMode(mode).dtype}
    close(learn, eager)
    torch.testing.assert_close(learn.get_preds()[0], eager.get_preds()[0], rtol=2e-2, atol=2e-2)
    assert learn.precision.scales == eager.precision.scales


def test_skips_growth_accumulation_and_validation_inside_a_fit_compile_nothing_anew():
    def spoil(l):
        if l.train_iter == 2:
            next(l.model.parameters()).grad.view(-1)[0] = float('inf')

    cbs = lambda: [
        At('after_backward', spoil, 5),
        GradientAccumulation(8),
        GradientClip(0.5),
        At('after_batch', lambda l: l.training and l.train_iter == 6 and l.validate(), 80),
    ]
    learn, eager = (build('fp16', how, cbs=cbs(), growth_interval=2) for how in ('wrapped', None))
    for l in (learn, eager):
        l.fit(3, 0.01)
    cb = learn.precision
    assert (
        learn.compiled.frame_count == 2
        and cb.n_skipped > 0
        and len(set(cb.scales)) > 1
        and cb.scales == eager.precision.scales
    )
    close(learn, eager)


def test_each_precision_is_compiled_once_however_often_it_is_switched():
    "Also after a fit that an exception ended."
    learn = build('bf16', 'in place')

    def stop(l):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn.fit(1, 0.01, cbs=At('after_pred', stop, 20))
    for to, frames in (
        (learn.to_bf16, 2),
        (learn.to_fp32, 4),
        (learn.to_fp16, 6),
        (learn.to_bf16, 6),
        (learn.to_fp32, 6),
        (learn.to_fp16, 6),
    ):
        to().fit(1, 0.01)
        assert learn.compiled.frame_count == frames
    assert learn.dtypes == {torch.bfloat16, torch.float16, torch.float32}


def test_amp_context_with_a_compiled_function():
    learn = build('bf16')
    f, x = torch.compile(learn.model, backend=learn.compiled, fullgraph=True), torch.randn(4, 6)
    for _ in range(2):
        with learn.amp_context(), torch.no_grad():
            assert f(x).dtype is torch.bfloat16
    assert learn.compiled.frame_count == 1 and f(x).dtype is torch.float32


def test_half_precision_weights():
    compiled, eager = (build('fp32', how, opt='sgd').to_half_weights(flat_master=True) for how in ('wrapped', None))
    for learn in (compiled, eager):
        learn.fit(1, 0.01)
    assert compiled.compiled.frame_count and close(compiled, eager, 1e-6) is None


@pytest.mark.slow  # it compiles C++
@pytest.mark.skipif(
    not any(map(shutil.which, ('g++', 'clang++', 'c++'))), reason='inductor needs a C++ compiler, and there is none'
)
def test_inductor():
    # Without its caches: in PyTorch 2.9 their key ignores autocast's dtype, and a graph for validation is used
    # in the wrong one.
    with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1):  # more would start processes
        learn, eager = build('bf16', 'wrapped', backend='inductor'), build('bf16')
        for l in (learn, eager):
            l.fit(2, 0.01)
    assert learn.compiled.frame_count == 2 and set(learn.after_epochs) == {2} and learn.dtypes == {torch.bfloat16}
    close(learn, eager, 1e-2)


def test_an_interrupt_leaves_no_setting_of_the_compiler(monkeypatch):
    "Ctrl-C before the end of a batch's contexts, which `ExitStack` then calls no more."
    from torch._functorch import config

    before, leave, calls = config.backward_pass_autocast, BackwardWithoutAutocast.__exit__, []

    def interrupted(self, *args):
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        leave(self, *args)

    monkeypatch.setattr(BackwardWithoutAutocast, '__exit__', interrupted)
    learn = learner(cbs=mixed('bf16'))
    learn.model.compile(backend='eager')
    with pytest.raises(KeyboardInterrupt):
        learn.fit(1)
    assert config.backward_pass_autocast == before
