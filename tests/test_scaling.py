"Loss scaling by itself: the history against what a GradScaler did, and what of it is kept."
import numpy as np, pytest, torch
from torch import nn

from fastxtend_amp.scaling import LossScaling
from helpers import *


@pytest.mark.parametrize('growth, backoff, interval', [(2., .5, 3), (1.7, .3, 2), (1e20, .5, 1)])
def test_the_history_is_what_a_scaler_did(growth, backoff, interval):
    p, rng = nn.Parameter(torch.zeros(2)), np.random.default_rng(0)
    opt, scaling = SGD([p], lr=.1), LossScaling(3., growth, backoff, interval, True)
    plain, sgd = torch.amp.GradScaler('cpu', 3., growth, backoff, interval), torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=.1)
    scaling.start('cpu', True)
    expected, skips, row = [], [], 0
    for _ in range(100):
        skip = bool(rng.random() < .2)
        row = row + 1 if skip else 0
        p.grad = sgd.param_groups[0]['params'][0].grad = None
        for s, param in ((scaling, p), (plain, sgd.param_groups[0]['params'][0])):
            scaled = s.scale(torch.ones(()), opt) if s is scaling else s.scale(torch.ones(()))
            param.grad = torch.full((2,), float('inf') if skip else 1.) * scaled
        expected.append(plain.get_scale()); skips.append(skip)
        scaling.unscale(opt); scaling.update()
        plain.step(sgd); plain.update()
        assert scaling.state_dict() == plain.state_dict() and scaling.skips_in_a_row == row
    assert scaling.scales == expected and scaling.skips == skips


def test_what_one_fit_leaves_the_next_one_begins_with():
    scaling, opt, model = LossScaling(1024., 2., .5, 2, True), None, nn.Linear(1, 1)
    state = {**scaling.state_dict(), 'scale': 64., '_growth_tracker': 1}
    assert scaling.state_dict()['scale'] == 1024. and not scaling.on
    scaling.load_state_dict(state)
    for _ in range(2):
        assert scaling.start('cpu', True).state_dict() == state == scaling.state_dict() and scaling.on
        assert scaling.end(opt, model) is None and scaling.state_dict() == state and not scaling.on
    scaling.start('cpu', True)
    scaling.load_state_dict({**state, 'scale': 8.})
    scaling.end(opt, model)
    assert scaling.state_dict()['scale'] == 8.
    scaling.load_state_dict(None)
    assert scaling.state_dict()['scale'] == 1024. and scaling.state_dict()['_growth_tracker'] == 0


def test_gradients_are_brought_to_a_new_scale():
    scaling, p = LossScaling(1024., 2., .5, 2, True), nn.Parameter(torch.ones(2))
    opt = SGD([p], lr=.1)
    scaling.start('cpu', True)
    scaling.scale((p * 3).sum(), opt).backward()
    assert p.grad.tolist() == [3072.] * 2
    scaling.load_state_dict({**scaling.state_dict(), 'scale': 4.}, opt)
    assert p.grad.tolist() == [12.] * 2
    scaling.unscale(opt)
    assert p.grad.tolist() == [3.] * 2
    scaling.cancel()
    scaling.scale((p * 3).sum(), opt).backward()                 # true gradients, to which scaled ones are added
    assert p.grad.tolist() == [24.] * 2
