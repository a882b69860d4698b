"`fused`: torch's fused optimizers under fastai's schedules, and what it refuses."
import copy, pickle

import pytest, torch
from fastai.callback.schedule import *
from fastai.learner import load_learner
from fastai.torch_core import params as params_of
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastxtend_amp import fused
from helpers import *

FUSED = [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD]
CLASSES = pytest.mark.parametrize('cls', FUSED, ids=lambda c: c.__name__)


@CLASSES
@pytest.mark.parametrize('mode', [None, 'bf16', 'fp16'])
def test_trains_bit_for_bit_as_the_wrapped_optimizer(cls, mode):
    "One cycle, so that fastai's schedules have found the learning rate and the momentum."
    def train(opt_func):
        learn = learner(opt_func=opt_func)
        if mode: getattr(learn, f'to_{mode}')()
        learn.fit_one_cycle(2, .01)
        return learn
    given = dict(momentum=.9) if cls is torch.optim.SGD else {}
    ours, wrapped = train(fused(cls, **given)), train(partial(OptimWrapper, opt=partial(cls, fused=True, **given)))
    assert same(params(ours), params(wrapped)) and same_state(opt_state(ours.opt), opt_state(wrapped.opt))
    assert not same(params(ours), params(learner())) and all(g['fused'] for g in ours.opt.opt.param_groups)
    hypers = ours.opt.hypers[0]
    assert hypers['mom'] > .94 and hypers['lr'] < 1e-3           # where one cycle ends


def test_with_fastais_defaults_it_is_fastais_adam():
    as_fastai = fused(torch.optim.AdamW, betas=(.9, .99), eps=1e-5, weight_decay=0.)
    # Without a norm: the gradient of a bias before one is rounding error.
    def model(): return nn.Sequential(mlp()[0], nn.ReLU(), nn.Linear(8, 1))
    ours, theirs = learner(model(), opt_func=as_fastai), learner(model(), opt_func=Adam, wd=0.)
    for learn in (ours, theirs): learn.fit_one_cycle(3, .01)
    for p, q in zip(params(ours), params(theirs)): torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_groups_freezing_and_learning_rates_of_their_own():
    split = lambda m: [params_of(m[0]), params_of(m[1:])]
    learn = learner(opt_func=fused(torch.optim.AdamW), splitter=split)
    before = params(learn)
    learn.freeze()
    learn.fit(1, .01)
    assert same(params(learn)[:2], before[:2]) and not same(params(learn)[2:], before[2:])
    learn.fine_tune(1, .01)
    assert not same(params(learn)[:2], before[:2])
    rates = [h['lr'] for h in learn.opt.hypers]
    assert rates[1] / rates[0] == pytest.approx(100, rel=.01)


def test_in_fp16_a_step_is_skipped_on_the_device():
    learn = learner(opt_func=fused(torch.optim.AdamW), cbs=At('after_backward', _spoil_second_gradient, 5))
    learn.to_fp16(init_scale=256.)
    learn.fit(1, .01)
    assert learn.precision.n_skipped == 1 and all(p.isfinite().all() for p in params(learn))


def _spoil_second_gradient(learn):
    if learn.train_iter == 1: next(learn.model.parameters()).grad.view(-1)[0] = float('inf')


@CLASSES
def test_takes_a_name_too(cls):
    by_name, by_class = (learner(opt_func=fused(opt, weight_decay=.1)) for opt in (cls.__name__, cls))
    for learn in (by_name, by_class): learn.fit(1, .01)
    assert type(by_name.opt.opt) is cls and same(params(by_name), params(by_class))


@CLASSES
@pytest.mark.parametrize('mode', [None, 'bf16', 'fp16'])
def test_with_step_hooks_of_others(cls, mode):
    "As loggers and gradient monitors register them: on this optimizer, and on all of a process."
    def train(opt_func):
        learn = learner(opt_func=opt_func)
        if mode: getattr(learn, f'to_{mode}')()
        learn.create_opt()
        steps = []
        def note(opt, args, kwargs): steps.append(opt is learn.opt.opt)
        handles = [learn.opt.opt.register_step_pre_hook(note), register_optimizer_step_pre_hook(note)]
        learn.fit(1, .01)
        for h in handles: h.remove()
        return params(learn), steps.count(True)
    ours, wrapped = train(fused(cls)), train(partial(OptimWrapper, opt=partial(cls, fused=True)))
    assert same(ours[0], wrapped[0]) and ours[1] == wrapped[1] == 2 * 6


def test_can_be_pickled_copied_and_exported(tmp_path):
    opt_func = fused(torch.optim.SGD, momentum=.9)
    learn = learner(opt_func=pickle.loads(pickle.dumps(opt_func)))
    learn.path = tmp_path
    learn.fit(1, .01)
    twin = copy.deepcopy(learn)
    for l in (learn, twin): l.fit(1, .01)
    assert same(params(learn), params(twin))
    learn.export('model.pkl')
    assert same(params(load_learner(tmp_path / 'model.pkl')), params(learn))


@pytest.mark.parametrize('make,words', [
    (lambda: fused(torch.optim.RMSprop), ('RMSprop', 'torch.optim.AdamW')),
    (lambda: fused(Adam), ('fastai.optimizer.Adam', "fastai's Adam decays weights as torch's AdamW does")),
    (lambda: fused('Adamw'), ("'Adamw'", 'torch.optim.AdamW')),
    (lambda: fused(torch.optim.SGD([torch.zeros(1)])), ('an instance of torch.optim.sgd.SGD',)),
    (lambda: fused(torch.optim.AdamW, lr=.1), ('AdamW, lr=0.1', 'Learner')),
    (lambda: fused(torch.optim.AdamW, fused=False), ('fused=False', 'Leave it out')),
    (lambda: fused(torch.optim.AdamW, foreach=True), ('foreach=True', 'Leave it out'))])
def test_refuses_by_name(make, words):
    with pytest.raises(ValueError) as e: make()
    for word in words: assert word in str(e.value)


def test_unknown_arguments_are_refused_at_the_call():
    with pytest.raises(TypeError, match=r"wd=0.1.*no such argument(.|\n)*weight_decay"): fused(torch.optim.AdamW, wd=.1)


@CLASSES
def test_a_device_without_the_kernel_is_named(cls):
    meta = nn.Parameter(torch.zeros(1, device='meta'))
    meta.grad = torch.zeros(1, device='meta')
    opt = fused(cls)([meta], lr=.1)
    with pytest.raises(RuntimeError, match='`fused=True` requires(.|\n)*meta'): opt.step()
