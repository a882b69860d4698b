"bf16 weights without fp32 master weights: files, copies and other precisions within a fit."

import copy

import pytest, torch

from fastxtend_amp import kahan
from helpers import *


def without(opt='AdamW', **kwargs):
    return learner(opt_func=kahan(opt), lr=0.01, **kwargs).to_half_weights(master_weights=False)


def exact(learn):
    "Return the weights at full precision: the parameter plus its compensation."
    state = learn.opt.opt.state
    comps = [state.get(p, {}).get('kahan_comp') for p in learn.model.parameters()]
    return [p.detach().float() + (0 if c is None else c.float()) for p, c in zip(learn.model.parameters(), comps)]


@pytest.mark.parametrize('with_opt', [True, False])
@pytest.mark.parametrize('event', ['after_epoch', 'after_train', 'after_batch'])
def test_a_file_loaded_at_the_end_of_a_fit_is_loaded_exactly(event, with_opt, tmp_path):
    best = learner(mlp(1), opt_func=kahan('AdamW'))
    best.fit(1, 0.01)
    file = best.save(tmp_path / 'best').with_suffix('')
    learn = without()

    def load(l):
        if l.epoch == 1 and (event != 'after_batch' or (l.training and l.iter == 5)):
            l.load(file, with_opt=with_opt)

    learn.fit(2, cbs=At(event, load, 80))
    for p, q in zip(params(learn), params(best)):
        assert p.dtype is torch.float32
        assert torch.equal(p, q)


@pytest.mark.parametrize('with_opt', [True, False])
def test_training_that_goes_on_after_a_load_starts_from_the_file(with_opt, tmp_path):
    "Not from the file plus the rounding errors of other weights."
    best = learner(mlp(1), opt_func=kahan('SGD'), lr=1e-6)
    best.create_opt()
    file, learn = best.save(tmp_path / 'best').with_suffix(''), without('SGD')
    with torch.no_grad():
        for p in learn.model.parameters():
            p.mul_(300.0)  # with a large compensation
    learn.add_cb(At('after_batch', lambda l: l.training and l.train_iter == 3 and l.load(file, with_opt=with_opt), 70))
    learn.fit(1, 1e-6)
    for p, q in zip(params(learn), params(best)):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-3)


def test_a_copy_made_in_a_fit_has_fp32_weights():
    learn, copies = without(), []
    learn.fit(2, cbs=At('after_validate', lambda l: copies.append((copy.deepcopy(l), exact(l))), 80))
    for other, weights in copies[:2]:  # the copies have the callback that makes more
        for p, w in zip(params(other), weights):
            assert p.dtype is torch.float32
            assert torch.equal(p, w)
        other.validate()
        other.fit(1)
        assert {p.dtype for p in params(other)} == {torch.float32}


def test_a_copys_model_computes_outside_of_the_fit():
    learn, copies = without(), []
    learn.fit(1, cbs=At('after_validate', lambda l: copies.append(copy.deepcopy(l).model), 80))
    assert copies[0](torch.ones(2, 6)).dtype is torch.float32


@pytest.mark.parametrize('opt', ['AdamW', 'SGD'])
@pytest.mark.parametrize('inside', ['fp32', 'bf16', 'fp16'])
def test_another_precision_in_between_changes_no_bit(inside, opt):
    def other(l):
        with l.precision_as(inside):
            l.validate()

    def trained(*cbs):
        learn = without(opt)
        learn.fit(3, 0.003, cbs=cbs)
        return learn

    plain = trained(At('after_train', lambda l: l.validate(), 80))
    learn = trained(At('after_train', other, 80))
    assert same(params(plain), params(learn))
    assert same_state(opt_state(plain.opt), opt_state(learn.opt))


# -- skip_nonfinite, which unscales gradients as fp16 does


class WithComplex(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.phase = nn.Linear(6, 1), nn.Parameter(torch.ones(1, dtype=torch.cfloat))

    def forward(self, x):
        return self.lin(x) * self.phase.abs()


class WithHalf(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.gain = nn.Linear(6, 1), nn.Parameter(torch.ones(1, dtype=torch.float16))

    def forward(self, x):
        return self.lin(x) * self.gain


@pytest.mark.parametrize('argument', [{'skip_nonfinite': True}, {'on_overflow': 'fix'}], ids=str)
@pytest.mark.parametrize('model, name', [(WithComplex, 'phase'), (WithHalf, 'gain')])
def test_skipping_is_refused_at_fit_for_parameters_that_cannot_be_unscaled(model, name, argument):
    learn, batches = learner(model()).to_bf16(**argument), []
    learn.add_cb(At('before_batch', lambda l: batches.append(l.iter), 20))
    with pytest.raises(ValueError, match=f"(?s)'{name}'.*`{[*argument][0]}"):
        learn.fit(1)
    assert batches == []
    assert is_outside_a_fit(learn)
    learn.to_bf16()
    told(lambda: learn.fit(1))
    assert batches


def test_skip_nonfinite_with_frozen_fp16_parameters_trains():
    model = WithHalf()
    model.gain.requires_grad_(False)
    learn = learner(model).to_bf16(skip_nonfinite=True)
    learn.fit(1)
    assert len(learn.precision.skips) == 6
