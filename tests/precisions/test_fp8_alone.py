"FP8 outside of a fit: a custom loop over `one_batch` leaves the model plain."

import pytest, torch

from helpers import *

pytestmark = pytest.mark.torchao


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 1))


@pytest.mark.parametrize('fp32_modules', [None, '3'])
def test_plain_calls_of_the_model_between_batches_of_a_loop_of_ones_own(fp32_modules):
    learn, reference = learner(net()).to_fp8(fp32_modules=fp32_modules), net()
    learn.create_opt()
    learn.opt.set_hypers(lr=0.01)
    of_fit = [cb for cb in learn.cbs if type(cb).__name__ in ('TrainEvalCallback', 'Recorder')]
    x = dataset().tensors[0][:4]
    with learn.removed_cbs(of_fit):
        learn.model.train()
        learn.training, learn.dl = True, learn.dls.train
        for i, b in enumerate(learn.dls.train):
            learn.one_batch(i, b)
            reference.load_state_dict(learn.model.state_dict())
            with torch.no_grad():
                assert torch.equal(learn.model(x), reference(x))
    learn.fit(1)
    assert replaced(learn.model) == []


def test_such_a_loop_computes_in_fp8():
    fitted, learn = (learner(net()).to_fp8() for _ in range(2))
    fitted.fit(1, 0.01)
    learn.create_opt()
    learn.opt.set_hypers(lr=0.01, wd=fitted.opt.hypers[0]['wd'])
    of_fit = [cb for cb in learn.cbs if type(cb).__name__ in ('TrainEvalCallback', 'Recorder')]
    with learn.removed_cbs(of_fit):
        learn.model.train()
        learn.training, learn.dl = True, learn.dls.train
        for i, b in enumerate(learn.dls.train):
            learn.one_batch(i, b)
    assert same(params(fitted), params(learn))
