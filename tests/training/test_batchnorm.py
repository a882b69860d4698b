"A skipped step leaves only finite values in BatchNorm's buffers."

import copy, math

import pytest, torch
from fastai.callback.training import GradientAccumulation
from fastai.learner import load_learner

from helpers import *

# A batch can overflow in every precision whose steps may be skipped.
MODES = {'fp16': dict(init_scale=256.0), 'bf16': dict(skip_nonfinite=True)}
PRECISIONS = pytest.mark.parametrize('mode', MODES)
INF = float('inf')


def normed(seed=0):
    "BatchNorm on the inputs themselves, which shows the elements that a batch affects."
    torch.manual_seed(seed)
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1))


def overflowing(at, column=slice(None), n=6, value=INF):
    "Six batches of four, or `n`; the batches `at` have this value in one column, or in all."
    data = dataset(4 * n)
    x = data.tensors[0].clone()
    for i in at:
        x[4 * i : 4 * i + 4, column] = value
    return loaders(train=Data(x, data.tensors[1]))


def build(mode, dls, model=None, **kwargs):
    learn = learner(normed() if model is None else model, dls, lr=0.01, **kwargs)
    return getattr(learn, f'to_{mode}')(**MODES[mode], on_overflow='ignore')


def buffers(model):
    return {name: b.detach().clone() for name, b in model.named_buffers()}


def buffers_of_each_batch(learn):
    "Record the buffers before and after each training batch from now on."
    before, after = [], []
    learn.add_cb(At('before_batch', lambda l: l.training and before.append(buffers(l.model)), -5))
    learn.add_cb(At('after_batch', lambda l: l.training and after.append(buffers(l.model)), 70))
    return before, after


@PRECISIONS
@pytest.mark.parametrize('opt', ['sgd', 'adam', 'adamw', 'fused adamw', 'fused sgd'])
def test_after_a_skipped_step_all_buffers_are_finite(mode, opt):
    learn = build(mode, overflowing([3]), opt_func=OPTIMIZERS[opt])
    before, after = buffers_of_each_batch(learn)
    learn.fit(1)
    assert learn.precision.skips[3] is True
    for name in ('0.running_mean', '0.running_var'):
        assert torch.equal(after[3][name], before[3][name])  # all elements were non-finite
    assert math.isfinite(learn.validate()[0])


@PRECISIONS
@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_elements_that_stay_finite_are_not_touched(mode, opt):
    learn = build(mode, overflowing([3], column=2), opt_func=OPTIMIZERS[opt])
    before, after = buffers_of_each_batch(learn)
    expected = []

    def by_itself(l):  # what PyTorch computes from this batch
        if l.training and l.train_iter == 3:
            bn = copy.deepcopy(l.model[0])
            bn(l.xb[0])
            expected.append(buffers(bn))

    learn.add_cb(At('before_batch', by_itself, -5))
    learn.fit(1)
    others = [0, 1, 3, 4, 5]
    for name in ('running_mean', 'running_var'):
        old, new = before[3][f'0.{name}'], after[3][f'0.{name}']
        assert new[2] == old[2]
        assert torch.equal(new[others], expected[0][name][others])
        assert not torch.equal(new[others], old[others])
    assert after[3]['0.num_batches_tracked'] == 4


@PRECISIONS
def test_the_last_finite_values_are_those_of_the_last_good_step(mode):
    learn = build(mode, overflowing([2, 3, 4]))
    before, after = buffers_of_each_batch(learn)
    learn.fit(1)
    for i in (2, 3, 4):
        assert torch.equal(after[i]['0.running_var'], before[2]['0.running_var'])
    assert not torch.equal(after[5]['0.running_var'], after[4]['0.running_var'])


@PRECISIONS
def test_a_first_step_that_overflows_leaves_the_buffers_of_the_start(mode):
    learn = build(mode, overflowing([0]))
    before, after = buffers_of_each_batch(learn)
    learn.fit(1)
    assert torch.equal(after[0]['0.running_mean'], before[0]['0.running_mean'])


@PRECISIONS
def test_an_overflow_inside_an_accumulation(mode):
    learn = build(mode, overflowing([2], n=8), cbs=GradientAccumulation(16))
    learn.fit(1)
    assert learn.precision.skips == [True, False]
    assert all(b.isfinite().all() for b in learn.model.buffers())


@PRECISIONS
def test_an_overflow_in_the_second_fit(mode):
    learn = build(mode, loaders())
    learn.fit(1)
    learn.dls = overflowing([0, 1, 2, 3, 4, 5])
    after_good = buffers(learn.model)
    learn.fit(1)
    for name in ('0.running_mean', '0.running_var'):
        assert torch.equal(buffers(learn.model)[name], after_good[name])


@PRECISIONS
def test_buffers_loaded_between_two_fits_are_the_last_finite_ones(mode, tmp_path):
    learn = build(mode, loaders())
    learn.fit(1)
    learn.save('model')
    saved = buffers(learn.model)
    learn.fit(1)
    learn.load('model')
    learn.dls = overflowing([0])
    before, after = buffers_of_each_batch(learn)
    learn.fit(1)
    assert torch.equal(before[0]['0.running_var'], saved['0.running_var'])
    assert torch.equal(after[0]['0.running_var'], saved['0.running_var'])


@PRECISIONS
def test_a_model_exchanged_in_the_fit(mode):
    learn = build(mode, overflowing([4]))
    other = nn.Sequential(nn.BatchNorm1d(6), learn.model[1])  # the optimizer has the layer that both share
    other[0].running_mean.fill_(3.0)
    learn.add_cb(At('before_batch', lambda l: l.training and l.train_iter == 3 and setattr(l, 'model', other), -5))
    learn.fit(1)
    assert learn.model is other
    assert all(b.isfinite().all() for b in other.buffers())
    assert other[0].running_mean.min() > 1  # and not those of the previous model


def test_a_model_that_overflows_by_itself_in_fp16():
    "Its inputs are finite, but its products exceed 65,504."
    learn = build('fp16', overflowing([3], value=3e4), mlp())
    with torch.no_grad():
        learn.model[0].weight.fill_(1.0)
    learn.fit(1)
    assert learn.precision.skips[3] is True
    assert all(b.isfinite().all() for b in learn.model.buffers())
    assert learn.to_fp32().validate()[0] < 1e6


@PRECISIONS
def test_an_exported_model_has_no_nan(mode, tmp_path):
    learn = build(mode, overflowing([5]), path=tmp_path)
    learn.fit(1)
    told(lambda: learn.export('model.pkl'))
    loaded = load_learner(tmp_path / 'model.pkl')
    assert all(b.isfinite().all() for b in loaded.model.buffers())


@PRECISIONS
def test_buffers_that_hold_inf_on_purpose_stay(mode):
    "For example an attention mask, which was never finite."
    model = normed()
    model.register_buffer('mask', torch.tensor([0.0, -INF]))
    learn = build(mode, overflowing([3]), model)
    learn.fit(1)
    assert learn.model.mask.tolist() == [0.0, -INF]


@PRECISIONS
def test_between_good_steps_no_buffer_changes(mode):
    learn = build(mode, loaders())
    before, after = buffers_of_each_batch(learn)
    learn.fit(1)
    assert not any(learn.precision.skips)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(after, before[1:]) for name in a)


@PRECISIONS
def test_the_warning_of_skipped_steps_says_so(mode):
    learn = learner(normed(), overflowing([1, 2, 3, 4, 5]), lr=0.01)
    getattr(learn, f'to_{mode}')(**MODES[mode])
    said = ' '.join(told(lambda: learn.fit(1)))
    assert 'BatchNorm' in said or 'buffers' in said


def test_without_a_buffer_that_was_restored_the_warning_does_not_say_so():
    learn = learner(linear(), overflowing([1, 2, 3, 4, 5]), lr=0.01).to_fp16(init_scale=256.0)
    said = ' '.join(told(lambda: learn.fit(1)))
    assert sum(learn.precision.skips) == 5
    assert said
    assert 'BatchNorm' not in said
    assert 'buffers' not in said
