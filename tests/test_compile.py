"Models under `torch.compile`: how often they are compiled, and what comes out."
import shutil

import pytest, torch
from fastai.callback.training import GradientAccumulation, GradientClip
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from fastxtend_amp import AMPMode, MixedPrecision
from helpers import *

TORCH = tuple(map(int, torch.__version__.split('.')[:2]))
HOW = pytest.mark.parametrize('how', ['wrapped', 'in place'])
MODES = pytest.mark.parametrize('mode', ['bf16', 'fp16'])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
    def forward(self, x): return self.last(torch.relu(self.norm(self.first(x))))


class GradModes(Net):
    "Switches gradients off and on inside, which is where the callback has something to watch in PyTorch 2.9."
    def forward(self, x):
        with torch.no_grad(): size = self.first(x).abs().mean()
        return super().forward(x) + size


@pytest.fixture(autouse=True)
def clean():
    torch._dynamo.reset(); counters.clear()
    yield
    torch._dynamo.reset(); counters.clear()


def build(mode, how=None, model=Net, backend='aot_eager', n=24, cbs=(), opt='torch sgd', **scaling):
    "A learner, the counter behind its compiled model, and the compilations after each epoch and the dtypes of its predictions."
    scaling = {'init_scale': 256., **scaling} if mode == 'fp16' else {}
    learn = learner(model(), loaders(n=n), cbs=[*([MixedPrecision(mode, **scaling)] if mode != 'fp32' else []), *cbs], opt_func=OPTIMIZERS[opt])
    learn.compiled, learn.after_epochs, learn.dtypes = CompileCounterWithBackend(backend), [], set()
    if how == 'wrapped': learn.model = torch.compile(learn.model, backend=learn.compiled)
    elif how == 'in place': learn.model.compile(backend=learn.compiled)
    learn.add_cb(At('after_epoch', lambda l: l.after_epochs.append(l.compiled.frame_count), 90))
    return learn.add_cb(At('after_pred', lambda l: l.dtypes.add(l.pred.dtype), 5))


def close(a, b, tol=1e-3):
    for p, q in zip(a.model.parameters(), b.model.parameters()): torch.testing.assert_close(p, q, rtol=tol, atol=tol)


@pytest.mark.parametrize('n', [24, 26])                          # 26: the last batch of an epoch is smaller
@pytest.mark.parametrize('model', [Net, GradModes])
@HOW
@MODES
def test_compiled_once_for_training_and_once_for_validation(mode, how, model, n):
    learn, plain = build(mode, how, model, n=n), build('fp32', how, model, n=n)
    for l in (learn, plain):
        torch._dynamo.reset()
        l.fit(3, .01); l.validate(); l.get_preds(); l.fit(1, .01)
    assert learn.after_epochs == plain.after_epochs and len(set(learn.after_epochs)) == 1   # validate and get_preds have epochs too
    assert learn.compiled.frame_count in (2, 3) and (n == 26 or learn.compiled.frame_count == 2)
    assert learn.compiled.op_count > 0 and not counters['graph_break'] and learn.dtypes == {AMPMode(mode).dtype}


@pytest.mark.parametrize('model', [Net, GradModes])
@HOW
@MODES
def test_gives_what_the_uncompiled_model_gives(mode, how, model):
    learn, eager = build(mode, how, model), build(mode, None, model)
    for l in (learn, eager): l.fit(2, .01)
    assert learn.compiled.frame_count == 2 and eager.compiled.frame_count == 0
    close(learn, eager)
    assert list(learn.recorder.values[-1]) == pytest.approx(list(eager.recorder.values[-1]), rel=1e-2)
    torch.testing.assert_close(learn.get_preds()[0], eager.get_preds()[0], rtol=2e-2, atol=2e-2)
    if mode == 'fp16': assert learn.mixed_precision.scales == eager.mixed_precision.scales


@HOW
def test_skips_growth_accumulation_and_validation_inside_a_fit_compile_nothing_anew(how):
    def spoil(l):
        if l.train_iter == 2: next(l.model.parameters()).grad.view(-1)[0] = float('inf')
    cbs = lambda: [At('after_backward', spoil, 5), GradientAccumulation(8), GradientClip(.5),
                   At('after_batch', lambda l: l.training and l.train_iter == 6 and l.validate(), 80)]
    learn, eager = build('fp16', how, cbs=cbs(), growth_interval=2), build('fp16', cbs=cbs(), growth_interval=2)
    for l in (learn, eager): l.fit(3, .01)
    assert learn.compiled.frame_count == 2 and len(set(learn.mixed_precision.scales)) > 1 and learn.mixed_precision.n_skipped > 0
    assert learn.mixed_precision.scales == eager.mixed_precision.scales
    close(learn, eager)


@HOW
def test_each_precision_is_compiled_once_however_often_it_is_switched(how):
    learn = build('bf16', how)
    learn.fit(1, .01); assert learn.compiled.frame_count == 2
    learn.to_fp32().fit(1, .01); assert learn.compiled.frame_count == 4
    learn.to_fp16(init_scale=256.).fit(1, .01); assert learn.compiled.frame_count == 6
    for to in (learn.to_bf16, learn.to_fp32, learn.to_fp16): to().fit(1, .01)
    assert learn.compiled.frame_count == 6 and learn.dtypes == {torch.bfloat16, torch.float16, torch.float32}


@HOW
def test_an_exception_in_a_batch_costs_no_compilation(how):
    learn = build('fp16', how)
    def stop(l):
        if l.train_iter == 2: raise KeyboardInterrupt
    stopping = At('after_pred', stop, 20)
    learn.fit(1, .01); learn.add_cb(stopping)
    with pytest.raises(KeyboardInterrupt): learn.fit(1, .01)
    learn.remove_cb(stopping); learn.fit(1, .01)
    assert learn.compiled.frame_count == 2 and autocast_state()[0] is False


def test_amp_context_with_a_compiled_function():
    learn = build('bf16', None)
    learn.fit(1, .01)
    f, x = torch.compile(learn.model, backend=learn.compiled, fullgraph=True), torch.randn(4, 6)
    for _ in range(3):
        with learn.amp_context(), torch.no_grad(): assert f(x).dtype is torch.bfloat16
    assert learn.compiled.frame_count == 1 and f(x).dtype is torch.float32


@MODES
def test_sequential_compiled_in_place_is_as_in_fp32(mode):
    "PyTorch 2.9 compiles nothing then, 2.15 does; the model trains either way. `torch.compile(model)` is compiled in both."
    counts = {}
    for m in (mode, 'fp32'):
        torch._dynamo.reset()
        learn, eager = build(m, 'in place', mlp), build(m, None, mlp)
        for l in (learn, eager): l.fit(2, .01)
        counts[m] = learn.compiled.frame_count
        close(learn, eager)
    assert counts[mode] == counts['fp32']
    assert build(mode, 'wrapped', mlp).fit(1, .01) is None
    learn = build(mode, 'wrapped', mlp); learn.fit(1, .01); assert learn.compiled.frame_count == 2


def test_half_precision_weights():
    compiled, eager = (build('fp32', how, opt='sgd').to_half_weights(flat_master=True) for how in ('wrapped', None))
    for learn in (compiled, eager): learn.fit(2, .01)
    assert close(compiled, eager, 1e-6) is None


def test_save_and_load(tmp_path):
    learn, fresh = build('fp16', 'wrapped'), build('fp16', 'wrapped')
    learn.path = fresh.path = tmp_path
    learn.fit(1, .01); learn.save('compiled'); fresh.load('compiled')
    assert same(params(fresh), params(learn)) and fresh.precision.state_dict() == learn.precision.state_dict()
    for l in (learn, fresh): l.fit(1, .01)
    assert same(params(fresh), params(learn)) and fresh.compiled.frame_count == 2


@pytest.mark.slow                                                # it compiles C++
@pytest.mark.skipif(not any(map(shutil.which, ('g++', 'clang++', 'c++'))), reason='inductor needs a C++ compiler, and there is none')
@MODES
def test_inductor(mode):
    # Without its caches: in PyTorch 2.9 their key leaves autocast's dtype out, and a graph for validation is served in the wrong one.
    with torch._inductor.config.patch(force_disable_caches=True):
        learn, eager = build(mode, 'wrapped', backend='inductor'), build(mode)
        for l in (learn, eager): l.fit(2, .01)
    assert learn.compiled.frame_count == 2 and set(learn.after_epochs) == {2} and learn.dtypes == {AMPMode(mode).dtype}
    close(learn, eager, 1e-2)
