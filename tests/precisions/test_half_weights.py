"16-bit weights: with master weights the numbers of autocast, flat or not; without them, bf16 weights in a fit."

import copy
from functools import partial

import pytest, torch
from fastai.callback.training import GradientAccumulation
from fastai.learner import Learner
from fastai.optimizer import SGD, Adam, Lamb, OptimWrapper, QHAdam, RAdam, RMSProp
from torch import nn
from torch.nn.utils import prune

from fastxtend_amp import kahan
from helpers import At, errors_of, finite, is_outside_a_fit, learner, linear, loaders, mlp, opt_state, params, same
from training.rows import BF16, OPTS, differences, end_state, third_batch, wide

FLAT, NONE = dict(flat_master=True), dict(master_weights=False)


def after(learn):
    learn.fit(1, 0.01)
    return learn


def alike(a, b):
    return differences(end_state(a), end_state(b)) == []


# -- with master weights, flat; tests/training/rows.py has them in other loops


class InStep(Learner):
    "Raises an error in its fourth step, when the optimizer's is over."

    fails = True

    def _step(self):
        super()._step()
        assert not (self.fails and self.train_iter == 3)


@pytest.mark.parametrize(
    'opt', [SGD, partial(SGD, mom=0.9, decouple_wd=False), Adam, partial(RMSProp, mom=0.9), RAdam, QHAdam]
)
def test_fastais_optimizers_step_the_same_on_flat_masters(opt):
    "Groups, weight decay that spares some weights, gradients that are kept, an exception in a step, fp32 afterwards."

    def run(**arguments):
        model = nn.Sequential(*mlp(), nn.Linear(1, 1))
        model[0].weight.data = model[0].weight.data.t().contiguous().t()  # in another order in memory
        groups = lambda m: [[*m[:2].parameters()], [*m[2:].parameters()]]
        learn = learner(model, opt_func=opt, wd=0.1, splitter=groups, cls=InStep).to_bf16(**arguments)
        with pytest.raises(AssertionError):
            after(learn)
        learn.fails, state = False, opt_state(learn.opt)
        for trains in (False, True):  # this weight makes fewer steps than the other one of its group
            model[4].weight.requires_grad_(trains).grad = None
            learn.fit(1, slice(1e-3, 1e-2))
        return after(learn.to_fp32()), state

    (a, in_step), (b, flat) = run(), run(**FLAT)
    assert alike(a, b) and same(in_step, flat)


# -- without master weights


GIVEN, LOWERED = ['0.weight', '0.bias'], ['1.bias', '2.bias', '5.weight', '5.bias']  # of `zoo`


def zoo():
    "A layer that is 16-bit by the user, one with the weight of an embedding, a pruned one, one to freeze, others."
    torch.manual_seed(0)
    own, tied, pruned = nn.Linear(6, 6).bfloat16(), nn.Linear(6, 16), nn.Linear(16, 6)
    tied.embedding = nn.Embedding(16, 6)
    tied.embedding.weight = tied.weight
    prune.l1_unstructured(pruned, 'weight', 0.5)
    conv = nn.Unflatten(1, (6, 1)), nn.Conv1d(6, 6, 1), nn.Flatten()
    return nn.Sequential(own, tied, pruned, nn.Linear(6, 6), *conv, nn.BatchNorm1d(6), nn.Linear(6, 1))


def halves(learn):
    "Return the names of bf16 parameters, and whether each gradient and state has the dtype of its parameter."
    named, state = dict(learn.model.named_parameters()), learn.opt.opt.state
    pairs = [(p, t) for p in named.values() for t in (p.grad, *state[p].values()) if torch.is_tensor(t)]
    agree = all(t.dtype is p.dtype for p, t in pairs if t.dim() and t.is_floating_point())
    return [name for name, p in named.items() if p.dtype is BF16], agree


class RoundsAtRandom(torch.optim.AdamW):
    bf16_stochastic_round = True  # as torchao's


@pytest.mark.parametrize('opt', [OPTS['kahan'], partial(OptimWrapper, opt=RoundsAtRandom)])
def test_which_weights_are_bf16_in_a_fit(opt):
    "Gradients and state included, except torchao's count; afterwards all are fp32, except the user's own 16-bit ones."
    seen, look = [], lambda l: seen.append(halves(l))
    cbs = [At('after_step', look, 11), At('after_validate', look, 11), GradientAccumulation(13)]
    learn = learner(zoo(), opt_func=opt, wd=0.1, cbs=cbs).to_bf16(**NONE, fp32_modules='8')
    learn.create_opt()
    learn.model[3].requires_grad_(False)
    count = torch.tensor(257.0)  # 256 in bf16
    for _ in range(2):
        after(learn)
        assert halves(learn) == (GIVEN, True)
        state = learn.opt.opt.state[learn.model[5].weight]
        assert state.setdefault('count', count) == 257
    assert seen == [(GIVEN + LOWERED, True)] * 4


@pytest.mark.parametrize('lr', [0.0, 1e-4, 3e-9])
def test_small_updates_are_kept_in_a_fit_and_from_fit_to_fit(lr):
    "Half a unit below 1 is 2e-3 in bf16, and 3e-8 in fp32; a fit takes 6 steps."
    learn = learner(linear(), opt_func=kahan('SGD', weight_decay=0.0))
    if lr:
        learn.fit(1, 0.0)  # in fp32, for which optimi would not make the compensation by itself
    learn.model.weight.data.fill_(1.0 + 1e-3 * (lr == 0))  # which rounding would take away
    before = params(learn)[0]
    learn.add_cb(At('before_step', lambda l: l.model.weight.grad.fill_(1.0), order=12))
    for n in (10, *[1] * 10):
        learn.to_bf16(**NONE).fit(n, lr)
    assert torch.allclose(learn.model.weight, before - 120 * lr, rtol=0, atol=20 * lr or 1e-5)


@pytest.mark.parametrize('n, model', [(24, mlp), (4, mlp), (8, wide)])  # 4: a file is saved right after the first step
def test_files_and_copies_made_in_a_fit(n, model, tmp_path):
    "A file resumes exactly; a copy has exact fp32 weights."
    make = lambda: learner(model(), opt_func=OPTS['kahan'], wd=0.1, dls=loaders(n), path=tmp_path).to_bf16(**NONE)
    copies, straight, resumed = [], make(), make()
    keep = lambda l: (l.save(str(l.epoch)), copies.append(copy.deepcopy(l)))
    straight.fit(3, 0.01, cbs=At('after_epoch', keep, 70))
    resumed.load('0').fit(2, 0.01)
    twin = copies[-1].remove_cb(At)
    assert alike(straight, resumed) and same(params(twin), params(straight))
    after(twin).to_fp32()
    assert finite(after(twin))


@pytest.mark.parametrize('event', ['after_epoch', 'after_batch'])
def test_a_file_loaded_in_a_fit_is_loaded_exactly(event, tmp_path):
    "Not the file plus the rounding errors of other weights, also where training goes on."
    best, learn = (learner(mlp(seed), opt_func=kahan('SGD'), path=tmp_path) for seed in (1, 0))
    best.fit(1, 1e-6)
    best.save('best')
    [p.data.mul_(300.0) for p in learn.model.parameters()]  # with a large compensation
    last = event == 'after_epoch'
    load = lambda l: (last or third_batch(l)) and l.load('best', with_opt=last)
    learn.to_bf16(**NONE).fit(1, 1e-6, cbs=At(event, load, 80))
    torch.testing.assert_close(params(learn), params(best), rtol=0, atol=1e-3 * (not last))


def test_the_state_of_an_optimizer_made_in_a_fit_is_fp32_afterwards():
    reset = lambda l: third_batch(l) and l.create_opt()
    learn = learner(opt_func=kahan('AdamW'), cbs=At('before_batch', reset)).to_bf16(**NONE)
    assert finite(after(after(learn).to_fp32()))  # its step raises an error on bf16 state


# -- what does not fit; tests/devices/test_distributed.py has models in several processes


def with_own_step(*args, **kwargs):
    opt = Adam(*args, **kwargs)
    opt.step = opt.step
    return opt


REFUSED = {  # name: arguments, and those of a learner; the errors of `fit` are in tests/expected/half_weights.txt
    'flat, lamb': (FLAT, dict(opt_func=Lamb)),
    'flat, own step': (FLAT, dict(opt_func=with_own_step)),
    'flat, sparse gradients': (FLAT, dict(model=nn.Sequential(nn.Linear(6, 1), nn.Embedding(2, 1, sparse=True)))),
    'flat, in two groups': (FLAT, dict(splitter=lambda m: [[*m.parameters()], [m[0].bias]])),
    'no masters, without summation': (NONE, dict(opt_func=kahan('AdamW', kahan_sum=False))),
}


def test_optimizers_and_parameters_that_do_not_fit(expected):
    "The error comes before callbacks change the learner, as MixUp does with the loss when a fit begins."
    begun, fits = [], {}
    for name, (arguments, given) in REFUSED.items():
        learn = learner(**given).to_bf16(**arguments)
        fits[name] = partial(learn.fit, 1, cbs=At('before_fit', begun.append, -20))
    assert errors_of(fits) == expected('half_weights') and begun == []


def test_an_optimizer_that_a_callback_sets_when_the_fit_begins_does_not_fit():
    exchange = lambda l: setattr(l, 'opt_func', Lamb) or l.create_opt()
    learn = learner().to_bf16(**FLAT)
    with pytest.raises(ValueError, match='cannot be used with Lamb'):
        learn.fit(1, cbs=At('before_fit', exchange))
    assert is_outside_a_fit(learn)


def test_fastais_arguments():
    cb = learner().to_half_weights('fp16', 512.0, True, True, '1').mixed_precision
    assert repr(cb.precision) == "learn.to_fp16(loss_scale=512.0, fp32_modules='1', flat_master=True)"
    cb = learner().to_half_weights(**NONE, max_skips=3).mixed_precision
    assert repr(cb.precision) == 'learn.to_bf16(master_weights=False)' and cb.max_skips == 3
