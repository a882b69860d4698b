"`fused`: torch's fused optimizers under fastai's schedules."

import pickle

import fastai.callback.schedule  # noqa: F401  patches Learner
import pytest
from fastai.learner import load_learner
from fastai.torch_core import params as params_of
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastxtend_amp import fused
from rows import *


@pytest.mark.parametrize(
    'cls, to', [(torch.optim.Adam, 'fp16'), (torch.optim.AdamW, 'fp32'), (torch.optim.SGD, 'fp16')]
)
def test_trains_bit_for_bit_as_the_wrapped_optimizer(cls, to):
    "One cycle, so that fastai's schedules find learning rate and momentum, under step hooks as loggers register them."

    def train(opt_func):
        learn, steps = TO[to](learner(opt_func=opt_func)), []
        learn.create_opt()
        note = lambda opt, args, kwargs: steps.append(opt is learn.opt.opt)
        handles = [learn.opt.opt.register_step_pre_hook(note), register_optimizer_step_pre_hook(note)]
        learn.fit_one_cycle(2, 0.01)
        for h in handles:
            h.remove()
        assert steps.count(True) == 2 * 12
        return learn

    given = dict(momentum=0.9) if cls is torch.optim.SGD else {}
    wrapped = train(partial(OptimWrapper, opt=partial(cls, fused=True, **given)))
    for ours in (train(fused(cls, **given)), train(fused(cls.__name__, **given))):
        assert differences(result(ours), result(wrapped)) == []
    hypers = ours.opt.hypers[0]
    assert hypers['mom'] > 0.94 and hypers['lr'] < 1e-3  # where one cycle ends


def test_with_fastais_defaults_it_is_fastais_adam():
    def net():  # without a norm: the gradient of a bias before one is rounding error
        return nn.Sequential(mlp()[0], nn.ReLU(), nn.Linear(8, 1))

    ours = learner(net(), opt_func=fused('AdamW', betas=(0.9, 0.99), eps=1e-5, weight_decay=0.0))
    theirs = learner(net(), opt_func=Adam, wd=0.0)
    for learn in (ours, theirs):
        learn.fit_one_cycle(3, 0.01)
    for p, q in zip(params(ours), params(theirs)):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_groups_freezing_and_learning_rates_of_their_own():
    learn = learner(opt_func=fused('AdamW'), splitter=lambda m: [params_of(m[0]), params_of(m[1:])])
    before = params(learn)
    learn.freeze()
    learn.fit(1, 0.01)
    assert same(params(learn)[:2], before[:2]) and not same(params(learn)[2:], before[2:])
    learn.fine_tune(1, 0.01)
    rates = [h['lr'] for h in learn.opt.hypers]
    assert not same(params(learn)[:2], before[:2]) and rates[1] / rates[0] == pytest.approx(100, rel=0.01)


def test_can_be_pickled_copied_and_exported(tmp_path):
    learn = learner(opt_func=pickle.loads(pickle.dumps(fused('SGD', momentum=0.9))), path=tmp_path)
    learn.fit(1, 0.01)
    twin = copy.deepcopy(learn)
    for l in (learn, twin):
        l.fit(1, 0.01)
    assert same(params(learn), params(twin))
    learn.export('model.pkl')
    assert same(params(load_learner(tmp_path / 'model.pkl')), params(learn))


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


def test_the_state_of_a_model_with_an_lstm_is_loaded(tmp_path):
    "fastai keeps an entry for `nn.LSTM.bias`, a bool, beside those of the parameters."
    learn, other = (
        learner(nn.Sequential(Recurrent(6, 1)), path=tmp_path).to_bf16(fp32_modules=nn.LSTM) for _ in range(2)
    )
    learn.fit(1, 0.01)
    learn.save('a')
    other.load('a')
    for l in (learn, other):
        l.fit(1, 0.01)
    assert any(isinstance(p, bool) for p in learn.opt.state) and same(params(learn), params(other))
