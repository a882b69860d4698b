"Failed training: what is noticed, what the message says, and that the search for the cause changes nothing."

import math, re

import fastai.callback.schedule  # noqa: F401  patches Learner
import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.mixup import MixUp
from fastai.callback.training import GradientAccumulation
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from torch import nn
from torch.nn import functional as F

from cases import CASES
from fastxtend_amp import kahan
from fastxtend_amp.insight import diagnosis
from fastxtend_amp.insight.watch import FailureWatcher
from fastxtend_amp.training import callback
from helpers import (
    OPTIMIZERS,
    At,
    Attentive,
    Data,
    dataset,
    learner,
    linear,
    loaders,
    mlp,
    opt_state,
    params,
    same,
    set_support,
    told,
)
from models import Act, Gives, Times, Unpacks, layers, lora
from states import EVALUATIONS, blurred


def said(learn, n=1, lr=0.01):
    "Return all warnings while `learn` fits `n` epochs."
    return [words for words in told(lambda: learn.fit(n, lr)) if 'emulated' not in words]


class OnceInf(nn.Module):
    "Return infinity in low precision in the n-th call."

    def __init__(self, when):
        super().__init__()
        self.when, self.n = when, 0

    def forward(self, x):
        self.n += 1
        return x * (math.inf if self.n == self.when and torch.is_autocast_enabled('cpu') else 1)


def steep(factor):
    return layers(Act(lambda h: Times.apply(h, factor)))


def spoiled(which, value):
    "A learner with a value that is not finite in its data."
    data = dataset()
    data.tensors[which][7, 0] = value
    return learner(dls=loaders(train=data))


def lost():
    model = mlp()
    model[0].weight.data.fill_(math.nan)
    return model


def mixes():
    "Batches that callbacks have prepared, and outputs that one unpacks."
    data = Data(dataset().tensors[0], torch.arange(24) % 3)
    torch.manual_seed(0)
    model = Gives(nn.Sequential(Attentive(), nn.Linear(1, 3)))
    return learner(model, loaders(24, 8, data, data), CrossEntropyLossFlat(), cbs=[MixUp(), Unpacks()])


def grows(after=2, **kwargs):
    "Attention that overflows after some batches."
    turn = At('after_batch', lambda l: setattr(l.model.attn, 'gain', 800.0 if l.train_iter > after else 1.0))
    return learner(Attentive(gain=1.0), cbs=turn, **kwargs)


def below_0():
    def loss(pred, y):
        mse = F.mse_loss(pred, y)
        return mse - mse.detach() + (-0.7 if learn.train_iter else 0.004)

    learn = grows(loss_func=loss)
    return learn


def near_0_at_first():
    "As with PPO, whose first loss is 0 up to rounding; the weights grow by a fifth."

    def loss(pred, y):
        return F.mse_loss(pred, y) * (1 if learn.train_iter else 1e-4)

    learn = grows(36, loss_func=loss, opt_func=OPTIMIZERS['sgd'])
    return learn.add_cb(At('after_step', lambda l: [p.data.mul_(1.005) for p in l.model.parameters()]))


def small_at_first():
    "The first batch is predicted already."
    data = dataset()
    data.tensors[1][:4] = Attentive(gain=1.0)(data.tensors[0][:4]).detach()
    return grows(dls=loaders(train=data), opt_func=OPTIMIZERS['sgd'])


def with_embedding():
    model = Attentive()
    model.other = nn.Embedding(2, 2)
    return model


def picky(h):
    "Overflow depending on what dropout kept."
    return h * (1e30 if torch.is_autocast_enabled('cpu') and bool((h[0, :4] != 0).all()) else 1)


class Shut(Callback):
    "Cannot be copied."

    run_on_copy = True

    def __deepcopy__(self, memo):
        raise RuntimeError('shut')


def times(factor, **kwargs):
    return learner(loss_func=lambda p, y: F.mse_loss(p, y) * factor, **kwargs)


def far_in_validation():
    valid = Data(torch.full((8, 6), 1e36), torch.zeros(8, 1))
    return learner(linear(), loaders(valid=valid), nn.L1Loss(), opt_func=OPTIMIZERS['sgd'])


FP16, BF16 = 'learn.to_fp16()', 'learn.to_bf16()'
by_sgd = lambda: learner(opt_func=OPTIMIZERS['sgd'])
once_inf = lambda: learner(nn.Sequential(nn.Linear(6, 1), OnceInf(3)), opt_func=kahan())
inf_in_low = lambda h: (h * 1e38 * 1e38).square() if torch.is_autocast_enabled('cpu') else h
FAILS = {  # what makes the learner or its model, the call, epochs, learning rate
    'attention': (Attentive, FP16, 2),
    'MixUp, and a dictionary': (mixes, FP16),
    'a draw of dropout': (lambda: layers(nn.Dropout(0.5), Act(picky)), FP16, 10),
    'backward pass': (lambda: steep(1e12), 'learn.to_fp16(init_scale=1024.0, max_skips=8)', 2),
    'loss scale': (lambda: times(300), 'learn.to_fp16(init_scale=2.0**20, max_skips=3)'),
    'static loss scale': (lambda: times(300), 'learn.to_fp16(loss_scale=2.0**18, max_skips=4)'),
    'infinite at any scale': (lambda: CASES['ArcFace'].learner(8), FP16, 8, 1e-3),
    'scales far below 1': (lambda: times(1e8), 'learn.to_fp16(max_skips=40)', 8, 0.0),
    'no scale is low enough': (lambda: times(1e12), 'learn.to_fp16(max_skips=40)', 3, 0.0),
    'inputs': (lambda: spoiled(0, math.inf), BF16),
    'targets': (lambda: spoiled(1, math.nan), BF16),
    'in fp32 as well': (lambda: layers(Act(lambda h: (-h.square()).log())), FP16),
    'lost weights': (lost, BF16),
    'does not come back': (once_inf, BF16),
    'with weights that are bf16 in the fit': (once_inf, 'learn.to_bf16(master_weights=False)'),
    'a learning rate far too high, sgd, fp16': (by_sgd, 'learn.to_fp16(max_skips=4)', 4, 100.0),
    'a learning rate far too high, sgd, bf16': (by_sgd, 'learn.to_bf16(max_skips=4)', 4, 100.0),
    'in the second batch': (lambda: times(1e6, model=linear(), opt_func=OPTIMIZERS['sgd']), BF16, 1, 1e12),
    'in validation': (far_in_validation, BF16, 1, 1e4),
    'a loss below 0 that falls is no divergence': (below_0, 'learn.to_fp16(init_scale=1024.0)', 1, 0.1),
    'nor is a first loss that is small by chance': (small_at_first, 'learn.to_fp16(init_scale=1024.0)'),
    'nor are losses after a first one near 0': (near_0_at_first, 'learn.to_fp16(init_scale=1024.0)', 8, 0.0),
    'modules in fp32 stay': (with_embedding, 'learn.to_fp16(fp32_modules=nn.Embedding, max_skips=7)'),
    'a frozen base in bf16': (lambda: lora(torch.bfloat16, inf_in_low), BF16),
    'cannot be copied': (lambda: learner(Attentive(), cbs=Shut()), FP16),
}  # fmt: skip
ON_DEVICE = {
    'the loss': (Attentive, 'learn.to_fp16(init_scale=16.0)'),
    'skipped steps': (lambda: steep(1e12), 'learn.to_fp16(init_scale=16.0, max_skips=4)'),
    'the batch before': (lambda: spoiled(0, math.nan), BF16),
}
SEVERAL = {'attention': FAILS['attention'], 'inputs': FAILS['inputs']}


def started(make, call):
    made = make()
    learn = learner(made) if isinstance(made, nn.Module) else made
    exec(call, {'learn': learn, 'nn': nn})
    torch.manual_seed(5)
    return learn


def messages_of(cases):
    "Return what is said in each case; a training by the advice is said nothing of."
    for name, (make, call, *fit) in cases.items():
        learn = started(make, call)
        words = said(learn, *fit)
        yield '\n'.join([f'# {name}: {call}, {sum(learn.mixed_precision.skips)} steps skipped', *words, ''])
        if advice := re.search(r'`(learn\.to_.+?)`', ''.join(words)):
            assert not [w for w in said(started(make, advice[1]), *fit) if 'failed' in w], (name, advice[1])


class OnDevice(FailureWatcher):
    "As on an accelerator: values on the device are not read."

    def before_batch(self):
        super().before_batch()
        if self.observations:
            self.observations.on_cpu = False


@pytest.mark.parametrize('name, cases', [('', FAILS), ('_on_device', ON_DEVICE), ('_several_processes', SEVERAL)])
def test_messages_and_what_their_advice_leads_to(name, cases, expected, monkeypatch):
    set_support(monkeypatch, lambda name: 'native')
    if cases is ON_DEVICE:
        monkeypatch.setattr(callback, 'WATCHERS', [OnDevice])
    if cases is SEVERAL:
        monkeypatch.setattr(diagnosis, 'several_processes', lambda: True)
    assert blurred('\n'.join(messages_of(cases))) == expected(f'diagnosis{name}')


# -- when it searches for the cause, and when not


def finds_lr(learn, **kwargs):
    return learn.lr_find(num_it=6, show_plot=False, suggest_funcs=(), **kwargs)


def test_lr_find_fails_at_the_first_loss_or_diverges():
    "Its first learning rate is too small to diverge."
    learn = learner(Attentive()).to_fp16()
    (message,) = told(lambda: finds_lr(learn), 'fp16 training failed: the loss is nan (batch 1, ')
    assert "Keep 'attn' in fp32" in message
    with pytest.raises(FloatingPointError):
        finds_lr(learner(Attentive()).to_fp16(on_overflow='raise'))
    fixed = learner(Attentive()).to_fp16(on_overflow='fix')
    finds_lr(fixed)
    assert fixed.mixed_precision.fp32_module_names == ['attn'] and math.isfinite(fixed.recorder.losses[-1])
    assert not told(lambda: finds_lr(learner().to_bf16(), start_lr=1.0, end_lr=1e30, stop_div=False), 'failed')


@pytest.mark.parametrize('name', EVALUATIONS)
def test_validation_and_predictions_that_are_not_finite(name):
    "Each time they are computed, and also if they are finite in training."
    evaluate, learn = EVALUATIONS[name], learner(Attentive()).to_fp16()
    for _ in range(2):
        (message,) = told(lambda: evaluate(learn), 'in validation')
        assert message.startswith(
            'fp16: a loss or a prediction in validation is NaN or inf.\nEvaluate in fp32: `with learn.precision_as'
        )
    with pytest.raises(FloatingPointError, match='in validation is NaN or inf'):
        evaluate(learner(Attentive()).to_fp16(on_overflow='raise'))
    for is_silent in (lambda: learn.to_fp16(on_overflow='ignore'), learn.to_bf16, learn.to_fp32):
        is_silent()
        assert told(lambda: evaluate(learn), 'validation') == []


def test_a_validation_loss_that_is_not_finite_where_predictions_are():
    loud_in_half = lambda p, y: F.mse_loss(p, y) * (math.inf if torch.is_autocast_enabled('cpu') else 1.0)
    assert len(told(learner(loss_func=loud_in_half).to_bf16().validate, 'in validation is NaN or inf')) == 1
    masked = learner(nn.Sequential(nn.Linear(6, 1), Act(lambda h: h.masked_fill(h < 0, -math.inf)))).to_fp16()
    assert told(lambda: EVALUATIONS['get_preds without targets'](masked), 'validation') == []


@pytest.mark.parametrize('to, make', [('to_fp16', Attentive), ('to_bf16', lambda: layers(Act(inf_in_low)))])
def test_raise_stops_before_the_step(to, make):
    learn = getattr(learner(make()), to)(on_overflow='raise')
    before = params(learn)
    with pytest.raises(FloatingPointError, match='failed'):
        learn.fit(1)
    assert same(before, params(learn)) and learn.mixed_precision.fit is None


class FromTheModel(Learner):
    "A learner whose model gives the loss; its batches have no targets."

    factor = 1.0

    def _do_one_batch(self):
        self.pred = self.model(*self.xb[:1])
        self('after_pred')
        self.loss_grad = self.model(self.xb[0]).mean() * self.factor  # autocast returns it in bf16
        self('after_loss')
        if self.training:
            self._do_grad_opt()


def test_a_loss_of_the_models_own_is_watched():
    dls = loaders()
    dls.n_inp = dls.train.n_inp = dls.valid.n_inp = 2  # there are no targets
    learn = learner(linear(), dls, cls=FromTheModel).to_bf16()
    assert not said(learn, lr=1e-3)
    learn.factor = math.nan
    assert 'the loss is nan' in said(learn, lr=0.0)[0]


# -- the rerun changes nothing


@pytest.mark.parametrize('acc', [4, 8])
@pytest.mark.parametrize('opt', ['adam', 'fused adamw', 'torch sgd'])
def test_training_goes_on_as_if_nobody_had_looked(opt, acc):
    "A model with dropout and batch norm whose third call overflows: with and without the diagnosis the same bits."

    def train(on_overflow):
        model = layers(nn.BatchNorm1d(8), nn.Dropout(0.3), OnceInf(3))
        learn = learner(model, opt_func=OPTIMIZERS[opt], cbs=GradientAccumulation(acc))
        learn.to_fp16(init_scale=1024.0, on_overflow=on_overflow)
        torch.manual_seed(1)
        assert len(said(learn, 2)) == (on_overflow == 'warn')
        losses = [*map(str, learn.recorder.losses)]
        return losses, learn.mixed_precision.scales, model[3].n, model.state_dict(), opt_state(learn.opt)

    assert same(train('warn'), train('ignore'))
