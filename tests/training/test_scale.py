"The life of the loss scale: fits, states, copies, `lr_find`, cancelled steps, and stretches of bad data."

import copy, math, pickle
from functools import partial

import fastai.callback.schedule  # noqa: F401  patches Learner
import pytest, torch
from fastai.callback import core
from fastai.callback.core import Callback
from fastai.callback.training import GradientClip
from fastai.learner import Learner
from fastcore.basics import noop
from torch import nn

from fastxtend_amp import MixedPrecision
from helpers import DEVICE, OPTIMIZERS, At, Data, dataset, finite, learner, loaders, params, same, spoil_at, told
from rows import ODD, OPTS, SCALING, differences, end_state, largest, make, net, over_batches, third_batch, trained

NAN = float('nan')


def state(learn):
    return learn.mixed_precision.state_dict()


def history(learn):
    cb = learn.mixed_precision
    return cb.scales, cb.skips, state(learn), cb.scale


def reference(**scaling):
    return torch.amp.GradScaler(DEVICE.type, **scaling)


# -- states

ROUND = [copy.deepcopy, lambda l: pickle.loads(pickle.dumps(l))]


def test_the_state_is_that_of_a_grad_scaler():
    for scaling in (SCALING, ODD, {}):
        assert state(learner().to_fp16(**scaling)) == reference(**scaling).state_dict()
        learn, scaler = trained('overflowing')[0], reference()
        scaler.load_state_dict(state(learn))
        assert scaler.get_scale() == learn.mixed_precision.scale
    assert {state(make('static'))[f'{name}_factor'] for name in ('growth', 'backoff')} == {1.0}
    for to in ('bf16', 'skipping', 'unscaled'):
        assert (state(make(to)), make(to).mixed_precision.scale) == ({}, None)


def test_a_state_is_loaded_at_any_time():
    s, seen, new = state(trained('overflowing')[0]), [], MixedPrecision('fp16')
    rules = {name: new.state_dict()[name] for name in ('growth_factor', 'backoff_factor', 'growth_interval')}
    assert s['growth_interval'] != rules['growth_interval']
    new.load_state_dict(s)
    s |= rules  # those of the call
    assert new.state_dict() == s
    learn, wanted = learner(cbs=new), {**s, 'scale': 32.0, '_growth_tracker': 2}
    load = At('after_batch', lambda l: third_batch(l) and new.load_state_dict(wanted), 70)
    learn.fit(1, 0.01, cbs=[load, At('before_batch', lambda l: l.training and seen.append(state(l)))])
    assert seen[0] == s and seen[3] == wanted and new.scales[3] == 32.0
    new.load_state_dict(None)
    assert new.state_dict() == MixedPrecision('fp16').state_dict()
    for to in ('bf16', 'static', 'unscaled'):
        other = make(to)
        before = state(other)
        other.mixed_precision.load_state_dict(s)
        assert state(other) == before


@pytest.mark.parametrize('how', ROUND, ids=['deepcopy', 'pickle'])
@pytest.mark.parametrize('to', ['overflowing', 'own scaler'])
def test_copies_have_a_state_of_their_own(to, how):
    learn = make(to)
    learn.fit(3, 0.01)
    twin, before = how(learn), history(learn)
    assert history(twin) == before and twin.mixed_precision.learn is twin
    twin.fit(2, 0.01)
    assert history(learn) == before and len(twin.mixed_precision.scales) == 30
    learn.fit(2, 0.01)
    assert differences(end_state(learn), end_state(twin)) == []


# -- steps


def test_steps_that_another_callback_cancels_are_no_attempts():
    learn, trackers = make('overflowing'), []
    learn.to_fp16(init_scale=1024.0, growth_interval=4)

    def cancel(l):
        if l.iter % 2:
            raise core.CancelStepException

    learn.add_cb(At('before_step', cancel, 20))
    learn.add_cb(At('after_batch', lambda l: l.training and trackers.append(state(l)['_growth_tracker']), 40))
    learn.fit(1, 0.01)
    assert trackers == [1, 1, 2, 2, 3, 3] and learn.mixed_precision.scales == [1024.0] * 3 and largest(learn) == 0


def test_losses_outside_of_a_training_batch_are_not_scaled():
    found = {}
    events = [name for name in core._events if name not in ('after_create', 'before_fit', 'after_fit')]
    for name in events:

        def note(l, name=name):
            loss = l.mixed_precision.scale_loss(torch.ones((), requires_grad=True))
            found.setdefault((name, l.training), float(loss))

        events[events.index(name)] = At(name, note, 20)
    learner(cbs=events).to_fp16(init_scale=8.0).fit(1)
    scaled = {name for (name, is_training), loss in found.items() if loss == 8}
    assert scaled == {
        'before_batch',
        'after_pred',
        'after_loss',
        'before_backward',
        'after_backward',
        'before_step',
        'after_step',
    } and all(is_training for (_, is_training), loss in found.items() if loss == 8)


def test_steps_without_gradients_are_no_attempts():
    learn = make('fp16', cbs=[At('before_step', lambda l: third_batch(l) and l.model.zero_grad(set_to_none=True), 5)])
    learn.fit(1, 0.01)
    assert len(learn.mixed_precision.scales) == 5 and finite(learn)
    unused = nn.Linear(6, 1)
    learn = learner(splitter=lambda m: [list(unused.parameters())]).to_fp16()
    learn.fit(1, 0.01)
    assert learn.mixed_precision.scales == [] and learn.mixed_precision.scale == 65536.0


@pytest.mark.parametrize('to', ['overflowing', 'own scaler'])
def test_lr_find_leaves_scale_and_history_alone(tmp_path, to):
    "Also if it is interrupted, and after a loop of one's own."
    learn = make(to, loop='one_batch', path=tmp_path)
    over_batches(learn, 1)
    find = partial(learn.lr_find, show_plot=False, num_it=30, stop_div=False, suggest_funcs=())
    before = history(learn)
    find(start_lr=1e-2, end_lr=30.0)
    assert history(learn) == before
    with pytest.raises(ZeroDivisionError), learn.added_cbs(At('after_backward', lambda l: 1 / (l.train_iter != 7), 20)):
        find()
    assert history(learn) == before
    learn.fit(1, 0.01)
    assert len(learn.mixed_precision.scales) == 12 and learn.mixed_precision.scales[6] == before[3]
    learn.to_fp16(loss_scale=2.0**30)  # skips each step
    assert told(find, 'steps of this fit') == []


# -- a stretch of bad data


def bad_then_good(n_bad, n_good=0, first=0):
    "Batches, of which `n_bad` are NaN, after the `first` ones."
    x, y = dataset((first + n_bad + n_good) * 4).tensors
    x = x.clone()
    x[4 * first : 4 * (first + n_bad)] = NAN
    return loaders(train=Data(x, y))


def after_bad(n_bad, n_good=0, opt='adam', first=0, **scaling):
    learn = learner(net(), bad_then_good(n_bad, n_good, first), lr=0.05, opt_func=OPTS[opt])
    learn.to_fp16(**{'on_overflow': 'ignore', **scaling})
    told(lambda: learn.fit(1))
    return learn


def loss_of(learn):
    return float(learn.validate()[0])


def loaded(learn):
    new = learner(net(), path=learn.path).to_fp16()
    return new.load(learn.save('bad').stem)


def interrupted(learn):
    "After another fit on bad data, which an exception ends."
    learn.dls = bad_then_good(12)
    with pytest.raises(ZeroDivisionError):
        learn.fit(1, cbs=At('after_batch', lambda l: 1 / (l.train_iter != 10), 70))
    return learn


THEN = {
    'fit': noop,
    'copy': copy.deepcopy,
    'load': loaded,
    'interrupted': interrupted,
    'validate': lambda l: l.validate(),
}


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
@pytest.mark.parametrize('n_bad', [3, 30, 60])
@pytest.mark.parametrize('then', THEN)
def test_training_learns_after_bad_data(then, n_bad, opt, tmp_path):
    learn = after_bad(n_bad, opt=opt, first=1)
    learn.path = tmp_path
    assert learn.mixed_precision.skips == [False] + [True] * n_bad and min(learn.mixed_precision.scales) > 0
    weights, before = params(learn), loss_of(learn)
    changed = THEN[then](learn)
    learn = changed if isinstance(changed, Learner) else learn
    assert same(params(learn), weights)
    learn.dls = loaders(n=160)
    told(lambda: learn.fit(1, 0.05))
    assert finite(learn) and loss_of(learn) < before / 2 and sum(learn.mixed_precision.skips[-40:]) < 8


@pytest.mark.parametrize('scaling', [{}, dict(backoff_factor=2.0**-40), dict(growth_interval=20)], ids=str)
@pytest.mark.parametrize('n_bad', [17, 30, 60, 200])
def test_training_learns_after_bad_data_in_the_same_fit(n_bad, scaling):
    learn = after_bad(n_bad, 60, **scaling)
    assert min(learn.mixed_precision.scales) > 0 and all(learn.mixed_precision.skips[:n_bad])
    assert loss_of(learn) < loss_of(learner(net())) / 2


@pytest.mark.parametrize('own', [False, True])
@pytest.mark.parametrize('n_bad', [17, 24, 31])
def test_a_good_step_sets_a_low_scale(n_bad, own):
    "To the largest power of two at which 16 times the largest gradient fits fp16."
    first, found = 65536.0 if own else 256.0, []
    scaling = dict(scaler=reference(init_scale=first)) if own else dict(init_scale=first)
    learn = learner(net(), bad_then_good(n_bad, 2)).to_fp16(on_overflow='ignore', **scaling)
    learn.add_cb(At('before_step', lambda l: found.append(largest(l)), 41))
    messages = told(lambda: learn.fit(1, 1e-3), 'loss scale')
    low, scale = learn.mixed_precision.scales[n_bad:]
    assert low == first / 2**n_bad and scale == min(first, 2.0 ** math.floor(math.log2(65504 / 16 / found[-2])))
    assert len(messages) == 1


def test_a_low_scale_rises_to_one_that_has_worked():
    "The largest of this fit: a first batch needs 4, then come batches of NaN, and then those that could have 1,024."
    x, y = dataset(4 * 60).tensors
    x, y = x.clone(), y * 1e-3
    y[:40], x[40:120] = 3000.0, NAN
    learn = learner(net(), loaders(train=Data(x, y))).to_fp16(init_scale=1024.0, on_overflow='ignore')
    told(lambda: learn.fit(1, 1e-6))
    cb = learn.mixed_precision
    good = [s for s, skipped in zip(cb.scales[:10], cb.skips[:10]) if not skipped]
    assert cb.skips[10:30] == [True] * 20 and 1 <= cb.scales[-1] == max(good) < 1024


def test_a_scale_lowered_in_an_epochs_last_step_rises():
    learn = learner(dls=loaders(4 * 17), cbs=spoil_at(*range(17))).to_fp16(on_overflow='ignore')
    told(lambda: learn.fit(2, 0.01))
    assert learn.mixed_precision.scales[17] == 0.5 and learn.mixed_precision.scales[18] > 1


@pytest.mark.parametrize('init_scale', [65536.0, 256.0, 1.0])
def test_a_scale_below_the_smallest_starts_again(init_scale):
    n_bad = 2 * (int(math.log2(init_scale)) + 25) + 1  # two times
    learn = learner(net(), bad_then_good(n_bad, 2)).to_fp16(init_scale=init_scale, on_overflow='ignore')
    assert len(told(lambda: learn.fit(1, 1e-3), 'loss scale')) == 1
    assert init_scale in learn.mixed_precision.scales[n_bad - 2 :] and min(learn.mixed_precision.scales) >= 2.0**-26


@pytest.mark.parametrize(
    'n_bad, kwargs', [(3, dict(init_scale=8.0)), (0, dict(init_scale=0.5)), (0, dict(loss_scale=0.25))]
)
def test_low_scales_of_the_user_stay(n_bad, kwargs):
    "Without a word."
    learn, (first,) = learner(net(), bad_then_good(n_bad, 6)).to_fp16(on_overflow='ignore', **kwargs), kwargs.values()
    assert told(lambda: learn.fit(1), 'loss scale') == []
    learn.dls = loaders()
    assert told(lambda: learn.fit(1), 'loss scale') == []
    assert set(learn.mixed_precision.scales[n_bad:]) == {first / 2**n_bad}


@pytest.mark.parametrize('factor, cbs', [(1e7, []), (1e9, []), (1e7, GradientClip(1.0))])
def test_losses_that_need_a_low_scale_train(factor, cbs):
    def loss(pred, y):
        return (pred - y).square().mean() * factor

    opt = OPTS['adam']  # whose step does not depend on the factor
    learn = learner(net(), loaders(n=640), loss, opt_func=opt, cbs=cbs).to_fp16(on_overflow='ignore')
    before = loss_of(learn)
    told(lambda: learn.fit(1, 0.01))
    assert 20 <= sum(learn.mixed_precision.skips) <= 40 and loss_of(learn) < before / 2
    scales, skips = learn.mixed_precision.scales, learn.mixed_precision.skips
    assert all(skip or b >= a for a, b, skip in zip(scales, scales[1:], skips))


class Guard(Callback):
    "Cancels steps that are not finite, as some callbacks do."

    order = 12

    def before_step(self):
        if self.learn.mixed_precision.skipped:
            raise core.CancelStepException


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_the_scale_backs_off_beside_a_guard(opt):
    learn = learner(dls=loaders(n=640), opt_func=OPTS[opt], cbs=Guard()).to_fp16(init_scale=2.0**40)
    told(lambda: learn.fit(1, 0.01))
    assert 2 < sum(learn.mixed_precision.skips) < 40 and not learn.mixed_precision.skips[-1]


@pytest.mark.parametrize('scale', [0.0, 2.0**-44])
def test_a_loaded_scale_near_0_starts_again(scale):
    "Version 0.4 wrote them to files."
    learn = learner().to_fp16()
    learn.mixed_precision.load_state_dict({**state(learn), 'scale': scale})
    told(lambda: learn.fit(2, 0.01))
    assert 1024.0 <= learn.mixed_precision.scale and not learn.mixed_precision.skips[-1]


class Sparse(nn.Module):
    "With sparse gradients, and a parameter without elements."

    def __init__(self):
        super().__init__()
        self.emb, self.none = nn.Embedding(4, 1, sparse=True), nn.Parameter(torch.empty(0))

    def forward(self, x):
        return self.emb(x[:, 0].long().clamp(0, 3)) + self.none.sum()


LOW = {
    'sparse and empty': lambda: learner(Sparse(), opt_func=OPTIMIZERS['torch sgd']),
    'zero': lambda: learner(net(), loss_func=lambda pred, y: (pred * 0).sum()),
}


@pytest.mark.parametrize('gradients', LOW)
def test_a_low_scale_is_set_again_whatever_the_gradients(gradients):
    learn = LOW[gradients]().to_fp16()
    learn.mixed_precision.load_state_dict({**state(learn), 'scale': 0.01})
    told(lambda: learn.fit(1, 0.01))
    assert learn.mixed_precision.scale > 1 and finite(learn)


def test_a_loaded_tracker_above_a_smaller_growth_interval_lets_the_scale_grow():
    learn = learner().to_fp16(init_scale=8.0, growth_interval=3)
    learn.mixed_precision.load_state_dict({'scale': 8.0, '_growth_tracker': 5})
    learn.fit(1)
    assert learn.mixed_precision.scales == [8, 16, 16, 16, 32, 32]
