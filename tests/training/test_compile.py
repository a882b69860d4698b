"Models under `torch.compile`: how often they are compiled, and that forward and backward are those of eager mode."

import shutil

import pytest, torch
from fastai.callback import core
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._functorch import config

from helpers import At, loaders, mlp, plain_grads, same
from rows import BF16, EXTRA, FP16, FP32, TO, To, find, make, seen_in_steps


class GradModes(nn.Sequential):
    "Switches gradients off and on in its forward pass, which the callback must notice in PyTorch 2.9."

    def forward(self, x):
        with torch.no_grad():
            size = self[0](x).abs().mean()
        return super().forward(x) + size


class Hot(nn.Linear):
    "Values of 9e5, in the backward pass as well: in fp16 it overflows, unless it is in fp32."

    def forward(self, x):
        return super().forward(x * 3e5) / 3e5


class OwnRegion(nn.Sequential):
    "Switches autocast off around its second layer by itself."

    def forward(self, x):
        x = self[0](x)
        with torch.autocast('cpu', enabled=False):
            x = self[1](x.float())
        return self[2](x)


def hot(cls=nn.Sequential):
    torch.manual_seed(0)
    return cls(nn.Linear(6, 8), Hot(8, 8), nn.Linear(8, 1))


EXTRA.update({'grad modes': lambda: GradModes(*mlp()), 'hot': hot, 'own region': lambda: hot(OwnRegion)})
EXTRA['hot in fp32'] = To('fp16', dict(fp32_modules='1', init_scale=2.0**14))
EXTRA['fp16 high'] = To('fp16', dict(init_scale=2.0**14))


@pytest.fixture(autouse=True)
def clean():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def build(to, how=None, model='mlp', backend='aot_eager', **kwargs):
    "A learner, with the counter of its compiled model, the compilations after each epoch, the dtypes of predictions."
    learn = make(to, model, **kwargs)
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
    'to, how, model, n',
    [  # 26: the last batch of an epoch is smaller
        ('bf16', 'wrapped', 'mlp', 24),
        ('fp16', 'in place', 'grad modes', 24),
        ('fp16', 'wrapped', 'mlp', 26),
        ('bf16', 'in place', 'grad modes', 26),
    ],
)
def test_compiled_once_for_training_and_once_for_validation(to, how, model, n):
    "As often as in fp32 where batches differ in size, without graph breaks, with the uncompiled model's results."
    learn, eager, plain = (build(t, h, model, dls=loaders(n)) for t, h in ((to, how), (to, None), ('fp32', how)))
    for l in (learn, eager, plain)[: 2 if n == 24 else 3]:
        torch._dynamo.reset()
        l.fit(2, 0.01)
        l.validate()
        l.get_preds()
        l.fit(1, 0.01)
    frames = learn.compiled.frame_count
    assert frames == (2 if n == 24 else plain.compiled.frame_count) and frames in (2, 3)
    assert set(learn.after_epochs) == {frames}  # validate and get_preds have epochs as well
    assert not counters['graph_break'] and learn.dtypes == {find(TO, to).dtype}
    close(learn, eager)
    torch.testing.assert_close(learn.get_preds()[0], eager.get_preds()[0], rtol=2e-2, atol=2e-2)
    assert learn.mixed_precision.scales == eager.mixed_precision.scales


def test_each_precision_is_compiled_once():
    "Also after a fit that an exception ended. PyTorch 2.9 does not compile a plain nn.Sequential in place."
    learn = build('bf16', 'wrapped')
    with pytest.raises(ZeroDivisionError):
        learn.fit(1, 0.01, cbs=At('after_pred', lambda l: 1 / 0, 20))
    for to, frames in (('bf16', 2), ('fp32', 4), ('fp16', 6), ('bf16', 6), ('fp32', 6), ('fp16', 6)):
        TO[to](learn).fit(1, 0.01)
        assert learn.compiled.frame_count == frames
    assert learn.dtypes == {BF16, FP16, FP32}


def test_amp_context_in_a_fit_compiles_nothing_again():
    "Modules are in fp32 already."
    learn = build('hot in fp32', 'in place', 'hot')

    def predict(l):
        with torch.no_grad(), l.amp_context():
            l.model(*l.xb)

    learn.fit(2, 0.01, cbs=At('after_batch', lambda l: l.training or predict(l), 80))
    assert learn.compiled.frame_count == 2


# -- the backward pass


@pytest.mark.parametrize('model, to', [('hot', 'hot in fp32'), ('own region', 'fp16 high'), ('own region', 'bf16')])
def test_gradients_of_fp32_regions_are_those_of_eager_mode(model, to):
    found = {}
    for how in (None, 'wrapped', 'in place'):
        learn = build(to, how, model)
        found[how] = seen_in_steps(learn, plain_grads, 20)
        learn.fit(2, 1e-3)
        assert sum(learn.mixed_precision.skips) == 0
    assert len(found[None]) == 12
    for how in ('wrapped', 'in place'):
        assert all(same(a, b) for a, b in zip(found[None], found[how], strict=True))


@pytest.mark.parametrize('exc', [None, KeyboardInterrupt, core.CancelFitException])
def test_the_compilers_setting_is_restored(exc):
    for how in ('in place', None):
        seen = []

        def look(l):
            seen.append(config.backward_pass_autocast)
            if exc:
                raise exc

        learn = build('bf16', how, backend='eager', cbs=[At('after_pred', look, 20)])
        with config.patch(backward_pass_autocast='same_as_forward'):
            try:
                learn.fit(1)
            except KeyboardInterrupt:
                pass
            assert {*seen} == {'off'} and config.backward_pass_autocast == 'same_as_forward'


# -- with inductor, which compiles C++

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ('g++', 'clang++', 'c++'))), reason='inductor needs a C++ compiler, and there is none'
)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize('model, to', [('mlp', 'bf16'), ('hot', 'hot in fp32')])
def test_inductor(model, to):
    # Without its caches: in PyTorch 2.9 their key ignores autocast's dtype, and a graph for validation is used
    # in the wrong one.
    with torch._inductor.config.patch(force_disable_caches=True, compile_threads=1):  # more would start processes
        learn, eager = build(to, 'wrapped', model, backend='inductor'), build(to, None, model)
        for l in (learn, eager):
            l.fit(2, 1e-3)
    assert learn.compiled.frame_count == 2 and set(learn.after_epochs) == {2} and sum(learn.mixed_precision.skips) == 0
    close(learn, eager, 1e-2)
