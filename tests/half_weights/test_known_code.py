"Casts are kept between the batches of a step only where no code runs that is not known, wherever a user's function sits."
from functools import partial, update_wrapper, wraps

import pytest, torch
from fastai.callback.hook import Hook, HookCallback
from fastai.callback.mixup import MixUp
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation
from fastai.layers import Lambda
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper
from torch import nn

from fastxtend_amp.half_weights import kept_casts
from fastxtend_amp.half_weights.kept_casts import KeptCasts
from helpers import *

pytestmark = pytest.mark.filterwarnings('ignore:.*emulated.*', 'ignore:.*enable_nested_tensor.*')


@pytest.fixture
def kept(monkeypatch):
    "Whether casts are kept, for each batch."
    noted, begin = [], KeptCasts.begin
    def look(self, learn):
        begin(self, learn)
        noted.append(self.kept is not None)
    monkeypatch.setattr(KeptCasts, 'begin', look)
    return noted


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))


def shrink(learn):
    "What no version counter tells of."
    if learn.__dict__.get('training'): learn.model[0].weight.data.mul_(.98)


def then(f, learn):
    "`f`, after `shrink`."
    def g(*args, **kwargs):
        shrink(learn)
        return f(*args, **kwargs)
    return g


class Hooks(HookCallback):
    def hook(self, m, i, o): shrink(self.learn)


class Loss(nn.Module):
    y_int = True                                                 # as MixUp asks
    def __init__(self, learn): super().__init__(); self.learn, self.reduction = [learn], 'mean'
    def forward(self, pred, y):
        shrink(self.learn[0])
        return nn.functional.mse_loss(pred.float(), y, reduction=self.reduction)


def in_a_lambda(l): l.model = nn.Sequential(*l.model, Lambda(lambda x: (shrink(l), x)[1]))
def in_fastais_hook(l): l.hook = Hook(l.model[1], lambda m, i, o: shrink(l))
def in_a_hook_callback(l): l.add_cb(Hooks(modules=[l.model[1]]))
def in_the_loss_behind_mixup(l): l.loss_func = Loss(l); l.add_cb(MixUp(.4))
def in_the_losss_hook(l): l.loss_func = nn.MSELoss(); l.loss_func.register_forward_hook(lambda *args: shrink(l))
def in_a_scheduler(l): l.add_cb(ParamScheduler({'lr': lambda pos: (shrink(l), .01)[1]}))
def in_a_wrapped_method(l): l._do_one_batch = wraps(l._do_one_batch)(then(l._do_one_batch, l))
def in_after_step(l): l.add_cb(At('after_step', shrink, 70))
def in_the_forward_of_one(l):
    forward = l.model[0].forward
    l.model[0].forward = update_wrapper(partial(lambda m, x: (shrink(l), forward(x))[1], l.model[0]), forward)
def in_an_activation(l):
    l.model = nn.Sequential(nn.Linear(6, 8), layer := nn.TransformerEncoderLayer(8, 2, 8, 0., batch_first=True), nn.Linear(8, 1))
    layer.activation = lambda x: (shrink(l), x.relu())[1]


@pytest.mark.parametrize('where', [
    in_a_lambda, in_fastais_hook, in_a_hook_callback, in_the_loss_behind_mixup, in_the_losss_hook, in_a_scheduler,
    in_a_wrapped_method, in_after_step, in_the_forward_of_one, in_an_activation])
def test_a_users_function(where, kept):
    def run(to):
        learn = learner(net(), cbs=GradientAccumulation(8), opt_func=OPTIMIZERS['adam'])
        torch.manual_seed(1)
        where(learn)
        getattr(learn, to)().fit(2, .01)
        return learn
    a, b = run('to_bf16'), run('to_half_weights')
    assert same(params(a), params(b)) and a.recorder.values == b.recorder.values and (kept or NO_COPIES) and not any(kept)


@pytest.mark.parametrize('when', ['before', 'after'])
@pytest.mark.parametrize('name', ['one_batch', '_with_events', '_do_grad_opt', '_set_device', '_split', '_call_one'])
def test_a_method_that_a_learner_is_given(name, when, kept):
    "Also before `to_half_weights()`, whose own method then stands in front of it."
    learn = learner(net(), cbs=GradientAccumulation(8))
    if when == 'after': learn.to_half_weights()
    setattr(learn, name, then(getattr(learn, name), learn))
    if when == 'before': learn.to_half_weights()
    learn.fit(1, .01)
    assert (kept or NO_COPIES) and not any(kept)


@pytest.mark.parametrize('cls,name', [(Learner, '_do_grad_opt'), (Learner, '_call_one'), (nn.Tanh, 'forward'), (GradientAccumulation, 'after_loss')])
def test_a_method_that_a_class_is_given(cls, name, kept, monkeypatch):
    inner = getattr(cls, name)
    monkeypatch.setattr(cls, name, lambda self, *args, **kwargs: inner(self, *args, **kwargs))
    learner(net(), cbs=GradientAccumulation(8)).to_half_weights().fit(1, .01)
    assert (kept or NO_COPIES) and not any(kept)


def test_a_hook_on_all_modules(kept):
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try: learner(net(), cbs=GradientAccumulation(8)).to_half_weights().fit(1, .01)
    finally: handle.remove()
    assert (kept or NO_COPIES) and not any(kept)


def test_an_optimizer_that_writes_in_zero_grad():
    "Which runs after a skipped step, too."
    class Shrinks(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            for g in self.param_groups:
                for p in g['params']: p.data.mul_(.9)
            super().zero_grad(set_to_none)
    def run(to, **kwargs):
        learn = learner(net(), opt_func=partial(OptimWrapper, opt=Shrinks), cbs=GradientAccumulation(8))
        getattr(learn, to)(**kwargs)
        learn.precision.scaling._fp16_scaler = torch.amp.GradScaler('cpu', init_scale=2.**40)
        learn.fit(2, .01)
        return learn
    assert same(*map(params, (run('to_fp16'), run('to_half_weights', dtype='fp16'))))


@needs_copies
@pytest.mark.parametrize('cbs', [[], [MixUp]])
@pytest.mark.parametrize('fit', ['fit', 'fit_one_cycle'])
def test_known_code(cbs, fit, kept):
    "A loss of fastai's, its callbacks and schedules; a function that prepares data is no part of it."
    from fastai.losses import MSELossFlat
    learn = learner(net(), loss_func=MSELossFlat(), cbs=[GradientAccumulation(8), *(cb() for cb in cbs)], progress=True,
                    splitter=lambda m: [[*m[:2].parameters()], [*m[2:].parameters()]])
    learn.dls.train.after_batch = lambda b: b
    getattr(learn.to_half_weights(), fit)(1, .01)
    assert all(kept)


def models():
    import torchvision
    from fastai.tabular.model import TabularModel
    from fastai.text.models.awdlstm import AWD_LSTM
    from fastai.vision.learner import create_body
    from fastai.vision.models.unet import DynamicUnet
    from fastai.vision.models.xresnet import xresnet18
    resnet = torchvision.models.resnet18()
    return {'resnet': resnet, 'xresnet': xresnet18(n_out=10), 'vit': torchvision.models.vit_b_32(), 'text': AWD_LSTM(10, 8, 6, 2),
            'tabular': TabularModel([(3, 2)], 2, 1, [4]), 'unet': DynamicUnet(create_body(resnet, cut=-2), 3, (32, 32), self_attention=True)}


def test_known_models():
    from fastai.losses import CrossEntropyLossFlat
    for name, model in models().items():
        assert kept_casts._runs_known_code(learner(model, loss_func=CrossEntropyLossFlat()).to_half_weights()), name
