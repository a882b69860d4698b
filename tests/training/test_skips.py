"A skipped step leaves no trace: in weights, optimizer and buffers all is as if the batch had not been there."

import copy
from functools import partial
from itertools import product

import pytest, torch
from fastai.callback import core
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.losses import BaseLoss
from fastai.optimizer import SGD, OptimWrapper
from fastcore.foundation import L
from torch import nn

from helpers import At, Data, dataset, finite, learner, linear, loaders, mlp, params, same, spoil_at, told
from rows import EXTRA, OPTS, TO, Once, Zeroes, differences, end_state, find, largest, make, over_batches, third_batch

INF = float('inf')
MODES = ['static', 'skipping']
N = 8  # batches of four


def normed():
    "BatchNorm on the inputs themselves, which shows the elements that a batch affects."
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1))


class Mean(nn.Module):
    "With a running mean that each batch replaces by a new tensor."

    def __init__(self):
        super().__init__()
        self.register_buffer('mean', torch.zeros(6))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().float().mean(0)
        return x


EXTRA.update({'normed': normed, 'mean': lambda: nn.Sequential(Mean(), *mlp())})


def batches(bad=(), column=slice(None), value=INF, left_out=False, n=N):
    "Batches; the `bad` ones have a value that is not finite, or are left out."
    x, y = dataset(4 * n).tensors
    x, good = x.clone(), [i for i in range(n) if i not in bad]
    for i in bad:
        x[4 * i : 4 * i + 4, column] = value
    if left_out:
        x, y = (torch.cat([t[4 * i : 4 * i + 4] for i in good]) for t in (x, y))
    return loaders(train=Data(x, y))


def fitted(to, bad=(), model='normed', opt='sgd', loop='fit', cbs=(), **kwargs):
    learn = make(to, model, loop, opt, cbs, dls=batches(bad, **kwargs))
    learn.mixed_precision.on_overflow = 'ignore'
    over_batches(learn, 1) if loop == 'one_batch' else learn.fit(1, 0.01)
    return learn


def values(learn):
    "Weights, optimizer and buffers, without the count of batches."
    found = end_state(learn)
    return {**found, 'weights': [t for t in found['weights'] if t.is_floating_point()], 'scales': [], 'scale': None}


def finite_buffers(model):
    return all(b.isfinite().all() for b in model.buffers())


WITHOUT = [(opt, 'fit', bad) for opt in OPTS if opt != 'kahan' for bad in ({0}, {3}, {0, 1, 2}, {1, 4, 5, N - 1})]
LOOP_NAMES = 'one_batch', 'own _step', 'own one_batch', 'clipping'
WITHOUT += [(opt, loop, {2, 5}) for opt in ('sgd', 'fused adamw') for loop in LOOP_NAMES]


@pytest.mark.parametrize('opt, loop, bad', WITHOUT, ids=str)
def test_as_if_the_batch_had_not_been_there(opt, loop, bad):
    for to, model in product(MODES, ('normed', 'mean')):
        learn, without = (fitted(to, bad, model, opt, loop, left_out=l) for l in (False, True))
        assert differences(values(learn), values(without)) == [], (to, model)
        assert learn.mixed_precision.skips == [i in bad for i in range(N)] and sum(learn.mixed_precision.skips) == len(
            bad
        )


def test_a_gradient_alone_that_is_not_finite():
    "The forward pass was fine, so its buffers stay; without `skip_nonfinite` bf16 loses the weights."
    for to in MODES:
        learn = fitted(to, cbs=[spoil_at(2)])
        assert learn.mixed_precision.skips == [i == 2 for i in range(N)] and finite(learn)
        plain = fitted('bf16')
        assert learn.model[0].num_batches_tracked == N
        torch.testing.assert_close(learn.model[0].running_var, plain.model[0].running_var)
    assert not finite(fitted('bf16', cbs=[spoil_at(2)]))


def test_an_overflow_in_an_accumulation_skips_the_whole_step():
    for to, model in product(MODES, ('normed', 'mean')):
        learn = fitted(to, {2}, model, cbs=[GradientAccumulation(16)])
        assert learn.mixed_precision.skips == [True, False] and finite(learn) and finite_buffers(learn.model)


# -- who decides, and what is told


class Counting(torch.optim.AdamW):
    pass


WHO = {
    'adam': [0, 3],
    'fused adamw': [0],  # a skipped first step would create the state
    'a copied fused adamw': [0],
    'fused sgd': [0],
    'fused plain sgd': [],
    'a subclass': [0, 3],
    'lookahead': [0, 3],
}
EXTRA['a subclass'] = partial(OptimWrapper, opt=partial(Counting, fused=True))
EXTRA['plain sgd'] = SGD
EXTRA['a copied fused adamw'] = OPTS['fused adamw']


@pytest.mark.parametrize('opt', WHO)
def test_the_host_or_the_device_skips_a_step(opt):
    learn, fired, after, at_order_11 = make('fp16', opt=opt, cbs=[spoil_at(0, 3)]), [], [], []
    if 'copied' in opt:
        learn.create_opt()
        learn = copy.deepcopy(learn)
    learn.add_cb(At('after_cancel_step', lambda l: fired.append(l.train_iter), 20))
    learn.add_cb(At('after_step', lambda l: after.append(l.mixed_precision.skipped), 20))
    learn.add_cb(At('before_step', lambda l: at_order_11.append(l.mixed_precision.skipped), 11))
    learn.fit(1, 0.01)
    assert fired == WHO[opt] and after == [i in (0, 3) for i in range(6)] and sum(learn.mixed_precision.skips) == 2
    assert at_order_11 == [i in (0, 3) for i in range(6) if i not in WHO[opt]]


def test_skipped_is_about_the_newest_step():
    def cancel(l):
        if l.train_iter == 3:
            raise core.CancelStepException

    for opt in ('sgd', 'fused sgd'):
        learn, found = make('fp16', opt=opt, cbs=[spoil_at(2), At('before_step', cancel, 5)]), []
        learn.add_cb(At('after_batch', lambda l: l.training and found.append(bool(l.mixed_precision.skipped)), 70))
        learn.fit(1)
        assert found == [i == 2 for i in range(6)]


class TwoSteps(Zeroes):
    "A second step in each batch, with gradients that it sets itself."

    def _do_grad_opt(self):
        super()._do_grad_opt()
        for p in self.model.parameters():
            p.grad = torch.ones_like(p)
        self._with_events(self._step, 'step', core.CancelStepException)
        self.opt.zero_grad()


@pytest.mark.parametrize('opt', ['plain sgd', 'fused plain sgd'])
def test_a_step_of_ones_own_follows_a_skipped_one(opt):
    learn, moved = TO['fp16'](learner(linear(), cls=TwoSteps, opt_func=find(OPTS, opt), cbs=spoil_at(2))), []
    learn.add_cb(At('before_batch', lambda l: l.training and moved.append(params(l)), 0))
    learn.fit(1, 1.0)
    assert same(moved[3], [p - 1 for p in moved[2]])


# -- buffers


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
@pytest.mark.parametrize('to', MODES)
def test_elements_that_stay_finite_are_what_pytorch_computes(to, opt):
    learn = fitted(to, {3, 5}, opt=opt, column=2)
    own, plain, others = learn.model[0], normed()[0], [0, 1, 3, 4, 5]
    for xb, _ in learn.dls.train:
        plain(xb)
    for name in ('running_mean', 'running_var'):
        assert torch.equal(getattr(own, name)[others], getattr(plain, name)[others])
        assert getattr(own, name)[2] == getattr(fitted(to, {3, 5}, opt=opt, left_out=True).model[0], name)[2]
    assert own.num_batches_tracked == N


def test_values_that_are_not_finite_on_purpose_stay():
    for to in MODES:
        model = normed()
        model.register_buffer('mask', torch.tensor([0.0, -INF]))
        learn = TO[to](learner(model, batches({3})))
        told(lambda: learn.fit(1))
        assert learn.model.mask.tolist() == [0.0, -INF]


def test_unusual_buffers_are_left_alone():
    for to in MODES:
        model = normed()
        model.register_buffer('graph', torch.eye(3).to_sparse())
        model.register_buffer('rows', torch.eye(3).to_sparse_csr())
        model.register_buffer('expanded', torch.ones(1).expand(4))
        model.register_buffer('eight', torch.ones(4).to(torch.float8_e4m3fn))
        learn = TO[to](learner(model, batches({3})))
        told(lambda: learn.fit(1))
        assert sum(learn.mixed_precision.skips) == 1 and finite(learn)


def test_buffers_that_were_loaded_or_exchanged():
    for to in MODES:
        learn = fitted(to)
        learn.model[0].running_mean.fill_(3.0)
        learn.dls = batches({0}, n=1)
        told(lambda: learn.fit(1))
        assert learn.model[0].running_mean.tolist() == [3.0] * 6
        other = nn.Sequential(nn.BatchNorm1d(6), learn.model[1])
        other[0].running_mean.fill_(5.0)
        learn.dls = batches({4})
        exchange = At('before_batch', lambda l: l.training and l.iter == 4 and setattr(l, 'model', other), -5)
        told(lambda: learn.fit(1, cbs=exchange))
        assert finite_buffers(other) and other[0].running_mean.min() > 2
        late = lambda l: l.iter == 4 and l.model[0].register_buffer('late', torch.zeros(6))
        told(lambda: learn.fit(1, cbs=At('before_batch', late, -5)))
        assert finite(learn) and sum(learn.mixed_precision.skips) == 3


class Centred(nn.MSELoss):
    "A loss with a running mean, as DINO's has a centre."

    def __init__(self):
        super().__init__()
        self.register_buffer('centre', torch.zeros(1))

    def forward(self, pred, targ):
        self.centre.lerp_(pred.detach().mean(0), 0.1)
        return super().forward(pred - self.centre, targ)


@pytest.mark.parametrize('kind', ['module', 'in BaseLoss', 'exchanged', 'of a callback'])
def test_buffers_of_a_loss_function(kind):
    centred, exchanges = Centred(), []
    if kind == 'exchanged':  # as MixUp does
        exchanges = [At('before_train', lambda l: setattr(l, 'loss_func', l.loss_func.__call__))]
    if kind == 'of a callback':
        exchanges = [At('before_fit', lambda l: setattr(l, 'loss_func', centred))]
    loss_func = {'in BaseLoss': BaseLoss(Centred), 'of a callback': nn.MSELoss()}.get(kind, centred)
    learn = make('fp16', dls=batches({3}), loss_func=loss_func, cbs=exchanges)
    told(lambda: learn.fit(1))
    assert sum(learn.mixed_precision.skips) == 1 and finite(learn)


def test_an_exception_in_a_batch_that_overflowed():
    for to in MODES:
        learn = make(to, 'normed', dls=batches({3}), cbs=[At('after_backward', lambda l: 1 / (l.train_iter != 3), 20)])
        with pytest.raises(ZeroDivisionError):
            learn.fit(1)
        assert finite_buffers(learn.model)


def test_large_buffers_are_not_copied():
    model = normed()
    model.register_buffer('mask', torch.ones(2**20 + 1))
    fill = At('before_batch', lambda l: third_batch(l) and l.model.mask.fill_(INF))
    told(lambda: TO['static'](learner(model, batches({2}), cbs=fill)).fit(1))
    assert model.mask.isinf().all()


# -- warnings


class Clips(Callback):
    "Of fastai's default order: it sees gradients times the loss scale."

    def before_step(self):
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.01)


class ClipsLater(Clips):
    order = 11


def adds(l):
    l.mixed_precision.scale_loss(next(l.model.parameters()).square().mean()).backward()


EARLY = {
    'Clips': ('fp16', lambda: [Clips(), GradientAccumulation(4)]),
    '': ('fp16', ClipsLater),
    'adds': ('fp16', lambda: At('after_backward', adds)),
    'only reads': ('fp16', lambda: At('before_step', largest)),  # where no event tells of the backward pass
    "fastai's": ('fp16', lambda: [GradientClip(0.01), GradientAccumulation(8)]),
    'bf16': ('bf16', Clips),
    'skipping': ('skipping', Clips),
}


@pytest.mark.parametrize('name', EARLY)
def test_a_callback_that_changes_scaled_gradients_is_named_once(name):
    to, cbs = EARLY[name]
    learn = make(to, loop='own scaling' if name == 'only reads' else 'fit', cbs=[*L(cbs())])
    said = told(lambda: learn.fit(2, 0.01), 'gradients are changed')
    assert [s.partition(':')[0] for s in said] == ['Clips'] * (name == 'Clips')


def first_half():
    "Skips it, and validates after it, when fastai has to be told to train on."
    spoil = At('after_backward', lambda l: l.iter < 3 and l.model.weight.grad.fill_(INF), 5)
    on = lambda l: (l.validate(), l.model.train(), setattr(l, 'training', True))
    return [spoil, At('after_batch', Once(on, third_batch), 70)]


TOLD = {
    'all steps': lambda: make('fp16').to_fp16(init_scale=1e30),
    'most steps': lambda: make('fp16').to_fp16(init_scale=2.0**20),
    'static': lambda: learner(cbs=spoil_at(*range(5))).to_fp16(loss_scale=64.0),
    'half of the steps': lambda: learner(linear(), cbs=first_half()).to_fp16(init_scale=64.0),
    'more than half': lambda: learner(linear(), cbs=spoil_at(0, 1, 2, 5)).to_fp16(init_scale=64.0),
    'bf16': lambda: learner(cbs=spoil_at(*range(6))).to_bf16(skip_nonfinite=True),
    'ignored': lambda: learner(cbs=spoil_at(*range(6))).to_fp16(on_overflow='ignore'),
}


def test_what_a_fit_says_of_skipped_steps(expected):
    lines = []
    for name, build in TOLD.items():
        learn = build()
        lines += [f'# {name}', *told(lambda: learn.fit(1, 0.01), 'steps of this fit'), '']
    assert '\n'.join(lines) == expected('skipped_steps')
