"Modules kept in fp32 and regions without autocast in compiled models: the backward pass is that of eager mode."

import pytest, torch
from fastai.callback.core import CancelFitException
from torch._functorch import config

from helpers import *


class Hot(nn.Linear):
    "Values of 9e5, in the backward pass as well."

    def forward(self, x):
        return super().forward(x * 3e5) / 3e5


class Big(nn.Module):
    "Overflows in fp16 inside `hot`, if that is not in fp32."

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.inp, self.hot, self.out = nn.Linear(6, 8), Hot(8, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.out(self.hot(self.inp(x)))


class OwnRegion(Big):
    "Switches autocast off around `hot` by itself."

    def forward(self, x):
        x = self.inp(x)
        with torch.autocast('cpu', enabled=False):
            x = self.hot(x.float())
        return self.out(x)


@pytest.fixture(autouse=True)
def clean():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(model, backend, how, mode='fp16', n=2):
    spec = 'hot' if type(model) is Big else None
    learn = learner(
        model, cbs=MixedPrecision(mode, fp32_modules=spec, **({} if mode == 'bf16' else {'init_scale': 2**14}))
    )
    if backend and how == 'wrapped':
        learn.model = torch.compile(learn.model, backend=backend)
    elif backend:
        learn.model.compile(backend=backend)
    gradients = []
    learn.add_cb(At('before_step', lambda l: gradients.append(plain_grads(l)), 20))
    learn.fit(n, 1e-3)
    return learn, gradients


@pytest.mark.parametrize('model', [Big, OwnRegion])
@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_with_aot_eager_bit_for_bit_as_uncompiled(model, mode):
    (eager, expected), (compiled, found) = (
        trained(model(), None, '', mode),
        trained(model(), 'aot_eager', 'wrapped', mode),
    )
    assert len(expected) == len(found) == 12 and all(same(a, b) for a, b in zip(expected, found))
    assert same(params(eager), params(compiled)) and compiled.precision.n_skipped == eager.precision.n_skipped == 0


@pytest.mark.parametrize('model', [Big, OwnRegion])
def test_with_inductor_no_step_is_skipped(model):
    (eager, expected), (compiled, found) = trained(model(), None, ''), trained(model(), 'inductor', 'in place')
    assert compiled.precision.n_skipped == 0 and len(found) == len(expected)
    for a, b in zip(params(eager), params(compiled)):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


def test_the_setting_is_put_back_and_is_that_of_compiled_models_alone():
    def run(compiled, error):
        learn, seen = learner().to_bf16(), []
        if compiled:
            learn.model.compile(backend='eager')

        def look(l):
            seen.append(config.backward_pass_autocast)
            if error:
                raise error

        learn.add_cb(At('after_pred', look, 20))
        try:
            learn.fit(1)
        except KeyboardInterrupt:
            pass
        assert config.backward_pass_autocast == 'same_as_forward'
        return {*seen}

    assert run(True, None) == run(True, KeyboardInterrupt()) == run(True, CancelFitException()) == {'off'}
    assert run(False, None) == {'same_as_forward'}
