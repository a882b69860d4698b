"Resuming in a new process: when the file is loaded the model is still on the CPU, as a user's is before the first fit."
import pytest, torch
from fastai.optimizer import Lookahead

from helpers import *

OPTS = {**OPTIMIZERS, 'lookahead': lambda params, **kwargs: Lookahead(Adam(params, **kwargs), k=3)}
MODES = {
    'bf16': lambda learn: learn.to_bf16(),
    'fp16': lambda learn: learn.to_fp16(init_scale=2. ** 20, growth_interval=3),
    'flat masters': lambda learn: learn.to_half_weights(flat_master=True),
}


def new(opt, path, seed=0):
    "A learner whose model is on the CPU, on data for the device."
    return learner(mlp(seed), loaders(n=48), opt_func=OPTS[opt], path=path)


def assert_alike(a, b):
    assert same(params(a), params(b)) and same_state(opt_state(a.opt), opt_state(b.opt))
    assert a.precision.state_dict() == b.precision.state_dict()


CASES = [(m, o) for o in ('sgd', 'adam', 'adamw', 'fused adamw', 'lookahead') for m in MODES
         if m != 'flat masters' or o in ('adam', 'adamw')]


@pytest.mark.parametrize('mode, opt', CASES)
def test_exact_resume_in_a_new_process(mode, opt, tmp_path, device):
    straight = MODES[mode](new(opt, tmp_path))
    straight.fit(1, .01)
    straight.save('half way')
    straight.fit(1, .01)
    second = MODES[mode](new(opt, tmp_path, seed=1)).load('half way')
    assert {p.device.type for p in second.model.parameters()} == {'cpu'}
    second.fit(1, .01)
    assert {p.device for p in second.model.parameters()} == {device}
    assert_alike(straight, second)


@pytest.mark.parametrize('opt', ['adam', 'adamw', 'fused adamw'])
def test_precision_set_after_the_load(opt, tmp_path, device):
    straight = new(opt, tmp_path).to_bf16()
    straight.fit(1, .01)
    straight.save('half way')
    straight.fit(1, .01)
    second = new(opt, tmp_path, seed=1).load('half way').to_bf16()
    second.fit(1, .01)
    assert_alike(straight, second)


def test_state_that_an_optimizer_keeps_elsewhere_stays_there(device):
    "PyTorch keeps counts and products of NAdam on the CPU; a second fit is no reason to move them."
    learn = learner(dls=loaders(n=48), opt_func=partial(OptimWrapper, opt=torch.optim.NAdam)).to_bf16()
    for _ in range(2):
        learn.fit(1, .01)
        kept = opt_state(learn.opt)
        assert {s['mu_product'].device.type for s in kept} == {'cpu'} and {s['exp_avg'].device for s in kept} == {device}
