"A stretch of bad data must not leave a loss scale that ends later training, in this fit or the next."

import re

import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation

from helpers import *

INIT = 65536.0
RESTARTS = re.compile(r'(?is)loss scale.*(restart|starts? again|started again)')


def net():
    "A model without BatchNorm, which test_batchnorm.py tests."
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def bad_then_good(n_bad, n_good=0, bs=4):
    "Data whose first `n_bad` batches are NaN."
    data = dataset((n_bad + n_good) * bs)
    x = data.tensors[0].clone()
    x[: n_bad * bs] = float('nan')
    return loaders(train=Data(x, data.tensors[1]), bs=bs)


def fp16(n_bad, n_good=0, **kwargs):
    return learner(net(), bad_then_good(n_bad, n_good), lr=0.05).to_fp16(
        **{'max_skips': 10**6, 'on_overflow': 'ignore', **kwargs}
    )


def after_bad_data(n_bad=60, **kwargs):
    "A learner after a fit on `n_bad` batches of NaN, with good data from now on."
    learn = fp16(n_bad, **kwargs)
    learn.fit(1)
    learn.dls = loaders()
    return learn


def restarts(f):
    return [message for message in told(f) if RESTARTS.search(message)]


def loss_of(learn):
    return float(learn.validate()[0])


# -- the next fit


def test_the_next_fit_learns_and_says_that_the_scale_starts_again():
    learn, fresh = after_bad_data(), learner(net(), lr=0.05).to_fp16()
    before = params(learn)
    assert all(map(torch.equal, before, net().parameters()))  # every step was skipped
    n = len(learn.precision.scales)
    assert len(restarts(lambda: learn.fit(3))) == 1
    fresh.fit(3)
    assert learn.precision.scales[n] == INIT
    assert loss_of(learn) == loss_of(fresh)


def test_the_next_fit_starts_from_the_init_scale_that_the_user_gave():
    learn = after_bad_data(30, init_scale=256.0)
    learn.fit(1)
    assert learn.precision.scales[30] == 256.0


def test_a_scale_of_1_or_more_is_carried_over_without_a_word():
    learn = after_bad_data(3, init_scale=8.0)
    assert learn.precision.scale == 1.0
    assert not restarts(lambda: learn.fit(1))
    assert learn.precision.scales[3] == 1.0


def test_an_init_scale_below_1_is_carried_over_without_a_word():
    learn = learner(net(), lr=0.05).to_fp16(init_scale=0.5)
    assert not restarts(lambda: (learn.fit(1), learn.fit(1)))
    assert set(learn.precision.scales) == {0.5}


def test_a_static_scale_below_1_stays():
    learn = fp16(30, loss_scale=0.25)
    assert not restarts(lambda: (learn.fit(1), learn.fit(1)))
    assert set(learn.precision.scales) == {0.25}


def test_a_scaler_of_ones_own_does_not_stop_learning_in_silence():
    learn = after_bad_data(60, scaler=torch.amp.GradScaler('cpu', init_scale=1024.0))
    before = params(learn)
    said = told(lambda: learn.fit(1), 'scale')
    assert said
    assert not same(before, params(learn))


def test_lr_find_after_a_bad_stretch_finds_gradients():
    import fastai.callback.schedule  # noqa: F401  patches Learner

    learn, found = after_bad_data(), []
    learn.add_cb(At('before_step', lambda l: found.append(any(g.any() for g in plain_grads(l))), 41))
    learn.lr_find(num_it=6, show_plot=False)
    assert any(found)


# -- 0 is never reached


@pytest.mark.parametrize('backoff', [0.5, 2.0**-40])
def test_the_scale_never_reaches_0(backoff):
    learn = fp16(200, backoff_factor=backoff)
    learn.fit(1)
    assert len(learn.precision.scales) == 200
    assert min(learn.precision.scales) > 0
    assert learn.precision.scale > 0


def test_no_weight_becomes_nan_however_long_the_stretch_is():
    learn = fp16(200)
    learn.fit(1)
    assert all(learn.precision.skips)
    assert all(map(torch.equal, params(learn), net().parameters()))


@pytest.mark.parametrize('opt', ['adamw', 'fused adamw'])
def test_the_scale_never_reaches_0_where_the_optimizer_skips(opt):
    data = dataset(4 * 201)
    x = data.tensors[0].clone()
    x[4:] = float('nan')  # the first step is a good one: the optimizer has its state
    learn = learner(net(), loaders(train=Data(x, data.tensors[1])), opt_func=OPTIMIZERS[opt], lr=0.05)
    learn.to_fp16(init_scale=256.0, on_overflow='ignore')
    learn.fit(1)
    assert learn.precision.skips == [False] + [True] * 200
    assert min(learn.precision.scales) > 0
    assert finite(learn)


def test_the_documented_reset_after_a_long_stretch():
    learn = after_bad_data(200)
    learn.precision.load_state_dict(None)
    assert learn.precision.scale == INIT
    assert not restarts(lambda: learn.fit(1))


def test_a_good_file_loads_after_a_long_stretch(tmp_path):
    good = learner(net()).to_fp16(init_scale=128.0)
    good.fit(1)
    good.save(tmp_path / 'good')
    learn = after_bad_data(200)
    learn.load(tmp_path / 'good')
    assert learn.precision.scale == 128.0
    assert same(params(learn), params(good))


def test_a_file_saved_after_a_long_stretch_loads(tmp_path):
    after_bad_data(200).save(tmp_path / 'bad')
    learn = learner(net(), lr=0.05).to_fp16()
    learn.load(tmp_path / 'bad')
    start = params(learn)
    learn.fit(1)
    assert learn.precision.scales[0] == INIT
    assert not same(start, params(learn))


@pytest.mark.parametrize('scale', [0.0, 2.0**-44])
def test_a_file_whose_scale_is_below_1_loads_and_the_scale_starts_again(tmp_path, scale):
    "As 0.4.0 wrote it."
    old = learner(net()).to_fp16(init_scale=128.0)
    old.fit(1)
    file = tmp_path / 'old'
    state = torch.load(written := old.save(file), weights_only=False)
    state['opt']['grad_scaler']['scale'] = scale
    torch.save(state, written)
    learn = learner(net(), lr=0.05).to_fp16()
    said = told(lambda: (learn.load(file.with_suffix('')), learn.fit(1)))
    assert [m for m in said if RESTARTS.search(m)]
    assert learn.precision.scales[0] == INIT
    assert same(params(old), params(learner(net()).to_fp16().load(file.with_suffix(''))))


@pytest.mark.parametrize('scale', [0.0, 2.0**-44])
def test_a_state_whose_scale_is_below_1_loads_and_the_scale_starts_again(scale):
    learn = learner(net(), lr=0.05).to_fp16()
    learn.precision.load_state_dict({**learn.precision.state_dict(), 'scale': scale})
    learn.fit(1)
    assert learn.precision.scales[0] == INIT


# -- in the same fit


def test_gradients_that_have_all_underflowed_are_noticed():
    learn = fp16(60, 12)
    said = restarts(lambda: learn.fit(1))
    assert len(said) == 1
    assert max(learn.precision.scales[60:]) == INIT
    assert not all(map(torch.equal, params(learn), net().parameters()))


def test_training_after_the_stretch_goes_on_in_the_same_fit():
    learn = fp16(60, 60)
    at_start = loss_of(learn)
    learn.fit(1)
    assert loss_of(learn) < at_start / 2


def test_underflow_is_noticed_with_a_fused_optimizer():
    data = dataset(4 * 81)
    x = data.tensors[0].clone()
    x[4:240] = float('nan')
    learn = learner(net(), loaders(train=Data(x, data.tensors[1])), opt_func=OPTIMIZERS['fused adamw'], lr=0.05)
    learn.to_fp16(on_overflow='ignore')
    assert restarts(lambda: learn.fit(2))  # at the end of an epoch at the latest: steps do not synchronize
    assert max(learn.precision.scales[60:]) == INIT


def test_underflow_is_noticed_in_an_accumulation():
    learn = learner(net(), bad_then_good(120, 24), lr=0.05, cbs=GradientAccumulation(8))
    learn.to_fp16(on_overflow='ignore')
    assert len(restarts(lambda: learn.fit(1))) == 1
    assert max(learn.precision.scales[60:]) == INIT


def test_a_scale_below_1_with_gradients_stays_within_the_fit():
    learn = fp16(2, 10, init_scale=1.0)
    assert not restarts(lambda: learn.fit(1))
    assert learn.precision.scales[2:] == [0.25] * 10


def test_gradients_of_zero_at_a_scale_of_1_or_more_are_nothing_to_warn_of():
    learn = learner(net(), loss_func=lambda pred, y: (pred * 0).sum()).to_fp16(init_scale=2.0)
    assert not restarts(lambda: learn.fit(1))
    assert set(learn.precision.scales) == {2.0}


def test_underflow_is_noticed_with_a_parameter_that_is_not_used():
    model = net()
    model[0].unused = nn.Linear(2, 2)
    learn = learner(model, bad_then_good(60, 12), lr=0.05).to_fp16(on_overflow='ignore')
    assert len(restarts(lambda: learn.fit(1))) == 1


class Raises(Callback):
    "End the fit in the middle of the bad data."

    def after_batch(self):
        if self.training and self.train_iter == 59:
            raise KeyboardInterrupt


def test_after_an_interrupted_bad_stretch_the_scale_starts_again():
    learn = fp16(60)
    with pytest.raises(KeyboardInterrupt):
        learn.fit(1, cbs=Raises())
    learn.dls = loaders()
    n = len(learn.precision.scales)
    assert len(restarts(lambda: learn.fit(1))) == 1
    assert learn.precision.scales[n] == INIT


def test_a_copy_made_after_a_bad_stretch_starts_again():
    import copy

    learn = after_bad_data()
    other = copy.deepcopy(learn)
    n = len(other.precision.scales)
    assert len(restarts(lambda: other.fit(1))) == 1
    assert other.precision.scales[n] == INIT
