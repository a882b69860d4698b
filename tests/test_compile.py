"Models under `torch.compile`: how often they are compiled, and what comes out."
import shutil

import pytest, torch
from fastai.callback.training import GradientAccumulation, GradientClip
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from fastxtend_amp import AMPMode
from helpers import *

HOW = pytest.mark.parametrize('mode, how', [('bf16', 'in place'), ('fp16', 'wrapped')])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
    def forward(self, x):
        with torch.no_grad(): size = self.first(x).abs().mean()   # gradients off and on inside
        return self.last(torch.relu(self.norm(self.first(x)))) + size


@pytest.fixture(autouse=True)
def clean():
    torch._dynamo.reset(); counters.clear()
    yield
    torch._dynamo.reset(); counters.clear()


def build(mode, how=None, model=Net, backend='aot_eager', n=24, cbs=(), **scaling):
    "A learner with the counter behind its compiled model, and the compilations after each epoch and the dtypes of its predictions."
    cbs = [*([] if mode == 'fp32' else [mixed(mode, **scaling)]), *cbs]
    learn = learner(model(), loaders(n=n), cbs=cbs, opt_func=OPTIMIZERS['torch sgd'])
    learn.compiled, learn.after_epochs, learn.dtypes = CompileCounterWithBackend(backend), [], set()
    if how == 'wrapped': learn.model = torch.compile(learn.model, backend=learn.compiled)
    elif how == 'in place': learn.model.compile(backend=learn.compiled)
    learn.add_cb(At('after_epoch', lambda l: l.after_epochs.append(l.compiled.frame_count), 90))
    return learn.add_cb(At('after_pred', lambda l: l.dtypes.add(l.pred.dtype), 5))


def close(a, b, tol=1e-3):
    for p, q in zip(params(a), params(b)): torch.testing.assert_close(p, q, rtol=tol, atol=tol)


@pytest.mark.parametrize('n', [24, 26])                          # 26: the last batch of an epoch is smaller
@HOW
def test_compiled_as_often_as_in_fp32_and_gives_what_the_uncompiled_model_gives(mode, how, n):
    learn, plain, eager = build(mode, how, n=n), build('fp32', how, n=n), build(mode, n=n)
    for l in (learn, plain, eager):
        torch._dynamo.reset()
        l.fit(2, .01); l.validate(); preds = l.get_preds()[0]; l.fit(1, .01)
        assert preds.dtype is torch.float32
    assert learn.after_epochs == plain.after_epochs and len(set(learn.after_epochs)) == 1   # validate and get_preds have epochs too
    assert learn.compiled.frame_count in (2, 3) and (n == 26 or learn.compiled.frame_count == 2)
    assert learn.compiled.op_count > 0 and not counters['graph_break'] and learn.dtypes == {AMPMode(mode).dtype}
    close(learn, eager)
    assert learn.precision.scales == eager.precision.scales


def test_skips_growth_accumulation_exceptions_and_validation_inside_a_fit_compile_nothing_anew():
    def spoil(l):
        if l.train_iter == 2: next(l.model.parameters()).grad.view(-1)[0] = float('inf')
    cbs = lambda: [At('after_backward', spoil, 5), GradientAccumulation(8), GradientClip(.5),
                   At('after_batch', lambda l: l.training and l.train_iter == 6 and l.validate(), 80)]
    learn, eager = build('fp16', 'wrapped', cbs=cbs(), growth_interval=2), build('fp16', cbs=cbs(), growth_interval=2)
    for l in (learn, eager): l.fit(3, .01)
    assert learn.compiled.frame_count == 2 and len(set(learn.precision.scales)) > 1 and learn.precision.n_skipped > 0
    assert learn.precision.scales == eager.precision.scales
    close(learn, eager)
    def stop(l): raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt): learn.fit(1, .01, cbs=At('after_pred', stop, 20))
    learn.fit(1, .01)
    assert learn.compiled.frame_count == 2 and autocast_state()[0] is False


@pytest.mark.parametrize('how', ['in place', 'wrapped'])
def test_each_precision_is_compiled_once_however_often_it_is_switched(how):
    learn, counts = build('bf16', how), []
    for to in (learn.to_bf16, learn.to_fp32, learn.to_fp16, learn.to_bf16, learn.to_fp32, learn.to_fp16):
        to().fit(1, .01)
        counts.append(learn.compiled.frame_count)
    assert counts == [2, 4, 6, 6, 6, 6] and learn.dtypes == {torch.bfloat16, torch.float16, torch.float32}


def test_amp_context_with_a_compiled_function():
    learn = build('bf16')
    learn.fit(1, .01)
    f, x = torch.compile(learn.model, backend=learn.compiled), torch.randn(4, 6)
    for _ in range(3):
        with learn.amp_context(), torch.no_grad(): assert f(x).dtype is torch.bfloat16
    assert learn.compiled.frame_count == 1 and f(x).dtype is torch.float32


def test_sequential_compiled_in_place_is_as_in_fp32():
    "PyTorch 2.9 compiles nothing then, 2.15 does; the model trains either way. `torch.compile(model)` is compiled in both."
    counts = {}
    for mode in ('bf16', 'fp32'):
        torch._dynamo.reset()
        learn, eager = build(mode, 'in place', mlp), build(mode, None, mlp)
        for l in (learn, eager): l.fit(2, .01)
        counts[mode] = learn.compiled.frame_count
        close(learn, eager)
    assert counts['bf16'] == counts['fp32']


def test_save_and_load(tmp_path):
    learn, fresh = build('fp16', 'wrapped'), build('fp16', 'wrapped')
    learn.path = fresh.path = tmp_path
    learn.fit(1, .01); learn.save('compiled'); fresh.load('compiled')
    assert same(params(fresh), params(learn)) and fresh.precision.state_dict() == learn.precision.state_dict()
    for l in (learn, fresh): l.fit(1, .01)
    assert same(params(fresh), params(learn))


@pytest.mark.slow                                                # it compiles C++
@pytest.mark.skipif(not any(map(shutil.which, ('g++', 'clang++', 'c++'))), reason='inductor needs a C++ compiler, and there is none')
def test_inductor():
    # Without its caches: in PyTorch 2.9 their key leaves autocast's dtype out, and a graph for validation is served in the wrong one.
    with torch._inductor.config.patch(force_disable_caches=True):
        learn, eager = build('bf16', 'wrapped', backend='inductor'), build('bf16')
        for l in (learn, eager): l.fit(2, .01)
    assert learn.compiled.frame_count == 2 and set(learn.after_epochs) == {2} and learn.dtypes == {torch.bfloat16}
    close(learn, eager, 1e-2)
