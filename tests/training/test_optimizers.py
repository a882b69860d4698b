"`fused`: torch's fused optimizers under fastai's schedules, and its errors."

import copy, pickle

import pytest, torch
from fastai.callback.schedule import *
from fastai.learner import load_learner
from fastai.torch_core import params as params_of
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastxtend_amp import fused
from fastxtend_amp.training.optimizers import place_state
from helpers import *


@pytest.mark.parametrize(
    'cls, mode', [(torch.optim.Adam, 'fp16'), (torch.optim.AdamW, None), (torch.optim.SGD, 'fp16')]
)
def test_trains_bit_for_bit_as_the_wrapped_optimizer(cls, mode):
    "One cycle, so that fastai's schedules find learning rate and momentum, under step hooks as loggers register them."

    def train(opt_func):
        learn, steps = learner(opt_func=opt_func, cbs=mixed(mode) if mode else None), []
        learn.create_opt()

        def note(opt, args, kwargs):
            steps.append(opt is learn.opt.opt)

        handles = [learn.opt.opt.register_step_pre_hook(note), register_optimizer_step_pre_hook(note)]
        learn.fit_one_cycle(2, 0.01)
        for h in handles:
            h.remove()
        assert steps.count(True) == 2 * 12
        return learn

    given = dict(momentum=0.9) if cls is torch.optim.SGD else {}
    ours, by_name = train(fused(cls, **given)), train(fused(cls.__name__, **given))
    wrapped = train(partial(OptimWrapper, opt=partial(cls, fused=True, **given)))
    for learn in (by_name, wrapped):
        assert same(params(ours), params(learn)) and same_state(opt_state(ours.opt), opt_state(learn.opt))
    hypers = ours.opt.hypers[0]
    assert hypers['mom'] > 0.94 and hypers['lr'] < 1e-3  # where one cycle ends


def test_with_fastais_defaults_it_is_fastais_adam():
    def model():
        return nn.Sequential(
            mlp()[0], nn.ReLU(), nn.Linear(8, 1)
        )  # without a norm: the gradient of a bias before one is rounding error

    ours = learner(model(), opt_func=fused('AdamW', betas=(0.9, 0.99), eps=1e-5, weight_decay=0.0))
    theirs = learner(model(), opt_func=Adam, wd=0.0)
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


@pytest.mark.parametrize(
    'args, kwargs, error, words',
    [
        (torch.optim.RMSprop, {}, ValueError, 'RMSprop.*torch.optim.AdamW'),
        ('Adamw', {}, ValueError, "'Adamw'.*torch.optim.AdamW"),
        (Adam, {}, ValueError, "optimizer=<function Adam .*fastai's Adam decays weights as torch's AdamW does"),
        (torch.optim.SGD([torch.zeros(1)]), {}, ValueError, 'optimizer=SGD .*cannot be used'),
        ('AdamW', dict(lr=0.1), TypeError, "no argument 'lr': give .*Learner"),
        ('AdamW', dict(foreach=True), TypeError, "no argument 'foreach': there are betas, "),
        ('AdamW', dict(wd=0.1), TypeError, "no argument 'wd': write `weight_decay=`"),
    ],
)
def test_refuses_by_name(args, kwargs, error, words):
    with pytest.raises(error, match='(?s)' + words):
        fused(args, **kwargs)


def test_a_device_without_the_kernel_is_pytorchs_to_name():
    meta = nn.Parameter(torch.zeros(1, device='meta'))
    meta.grad = torch.zeros(1, device='meta')
    with pytest.raises(RuntimeError, match='(?s)`fused=True` requires.*meta'):
        fused('SGD')([meta], lr=0.1).step()


class Recurrent(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0]


def test_the_state_moves_to_the_parameters_of_a_model_with_an_lstm():
    "fastai keeps an entry for `nn.LSTM.bias`, a bool, beside those of the parameters."
    learn = learner(nn.Sequential(Recurrent(6, 1)))
    learn.fit(1, 0.01)
    bias = {p: state for p, state in learn.opt.state.items() if isinstance(p, bool)}
    weight = torch.empty(4, 6, device='meta')
    learn.opt.state = {**bias, weight: {'grad_avg': torch.ones(4, 6)}}
    place_state(learn.opt)
    assert bias and learn.opt.state[weight]['grad_avg'].device == weight.device
