"n steps with half-precision weights equal n steps under autocast bit for bit, on every model that autocast runs."
from functools import partial

import pytest, torch
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.optimizer import OptimWrapper
from torch import nn

from helpers import *
from half_models import MODELS, CountCasts, Layers, build

pytestmark = pytest.mark.filterwarnings('ignore:.*emulated.*', 'ignore:.*weight_norm.*', 'ignore:.*enable_nested_tensor.*', 'ignore:You are shadowing')
MODES = ['bf16', 'fp16']
# Models that break `cast_once`'s promise; that write into weights, or use one in several ways; and those whose backward
# pass enters autocast, which forgets all casts when it is left.
BREAKS_PROMISE = 'weights written in forward', 'hooks'
CAST_ANEW = (*BREAKS_PROMISE, 'max_norm', 'weights used in fp32, too', 'gradient penalty', 'checkpointing', 'checkpointing, reentrant')


def trained(to, model, opt='fused adamw', accumulate=False, n_epoch=2, cbs=(), **kwargs):
    more = [GradientAccumulation(8), GradientClip(.05)] if accumulate else []
    learn = learner(model, opt_func=OPTIMIZERS[opt], cbs=[*more, *cbs])
    getattr(learn, to)(**kwargs).fit(n_epoch, .01)
    return learn


def equal(a, b):
    assert same(params(a), params(b)) and same([*a.model.buffers()], [*b.model.buffers()])
    assert same_state(opt_state(a.opt), opt_state(b.opt)) and repr(a.recorder.values) == repr(b.recorder.values)
    assert all(p.dtype is torch.float32 for p in b.model.parameters())


def counted(to, name, *args, **kwargs):
    casts = CountCasts(model := build(name)).in_forward()
    return trained(to, model, *args, **kwargs), casts.n


@pytest.mark.parametrize('mode,accumulate', [('bf16', False), ('bf16', True), ('fp16', True)])
@pytest.mark.parametrize('name', MODELS)
def test_each_model(name, mode, accumulate):
    "And how often its weights are cast: with two batches to a step, half as often as under autocast."
    if (name, mode) == ('LSTM', 'fp16'): pytest.skip('autocast does not run it on every CPU')
    opt = 'adam' if accumulate else 'fused adamw'
    plain, n_plain = counted(f'to_{mode}', name, opt, accumulate)
    for flat in (False, True):
        half, n_half = counted('to_half_weights', name, opt, accumulate, dtype=mode, flat_master=flat, cast_once=name not in BREAKS_PROMISE)
        equal(plain, half)
        if not accumulate or NO_COPIES or name in CAST_ANEW: assert n_half == n_plain
        elif mode == 'bf16': assert n_half == n_plain / 2
        else: assert n_half <= n_plain / 2                       # a skipped step leaves the weights as they are


@pytest.mark.parametrize('flat', [False, True])
@pytest.mark.parametrize('opt', OPTIMIZERS)
@pytest.mark.parametrize('mode', MODES)
def test_each_optimizer(mode, opt, flat):
    equal(trained(f'to_{mode}', mlp(), opt), trained('to_half_weights', mlp(), opt, dtype=mode, flat_master=flat))


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
@pytest.mark.parametrize('flat', [False, True])
def test_skipped_steps(flat, opt):
    a, b = (learner(opt_func=OPTIMIZERS[opt]) for _ in range(2))
    a.to_fp16(init_scale=2.**40)
    b.to_half_weights('fp16', flat_master=flat).precision.scaling._fp16_scaler = torch.amp.GradScaler('cpu', init_scale=2.**40)
    for learn in (a, b): learn.fit(4, .01)
    equal(a, b)
    assert 0 < a.precision.n_skipped < len(a.precision.scales) == 24
    assert b.precision.n_skipped == a.precision.n_skipped and b.precision.state_dict() == a.precision.state_dict()


@pytest.mark.parametrize('mode', MODES)
def test_a_plain_pytorch_loop(mode):
    model, opt, scaler, losses = handwritten(mode, OPTIMIZERS['adam'])
    learn = trained('to_half_weights', mlp(), 'adam', dtype=mode)
    assert same(params(learn), [p.detach() for p in model.parameters()]) and same_state(opt_state(learn.opt), opt_state(opt))


class Switched(nn.Module):
    "One layer in turn is trained, as in a GAN; which, `turn` says."
    def __init__(self): torch.manual_seed(0); super().__init__(); self.turn, self.layers = 0, nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])
    def forward(self, x): return self.layers[self.turn](x)


def switch(learn):
    if not learn.training: return
    learn.model.turn = 1 - learn.model.turn
    for i, layer in enumerate(learn.model.layers): layer.requires_grad_(i == learn.model.turn)


@pytest.mark.parametrize('mode', MODES)
def test_modules_that_take_turns(mode):
    equal(*(trained(to, Switched(), 'adam', cbs=[At('before_batch', switch)], n_epoch=4, **kw)
            for to, kw in ((f'to_{mode}', {}), ('to_half_weights', dict(dtype=mode)))))


class StartsToWrite(nn.Module):
    "Shrinks its weights in place after it has used them, from the eighth batch on."
    def __init__(self): torch.manual_seed(0); super().__init__(); self.n, self.layer = 0, nn.Linear(6, 1)
    def forward(self, x):
        y = self.layer(x)
        self.n += self.training
        with torch.no_grad():
            if self.n > 7: self.layer.weight.mul_(.9)
        return y


def test_a_model_that_starts_to_write_in_a_later_batch():
    equal(*(trained(to, StartsToWrite(), 'adam', True, 3, **kw) for to, kw in (('to_bf16', {}), ('to_half_weights', dict(cast_once=True)))))


class Teacher(nn.Module):
    "Holds the average of its weights where `parameters()` does not find it; first of all it is moved."
    def __init__(self):
        torch.manual_seed(0); super().__init__()
        self.layer, self.hidden = nn.Linear(6, 1), [nn.Linear(6, 1)]
    def forward(self, x):
        with torch.no_grad():
            for q, p in zip(self.hidden[0].parameters(), self.layer.parameters()): q.mul_(.9).add_(p, alpha=.1)
            t = self.hidden[0](x)
        return self.layer(x) + t


class Judge(nn.Module):
    "A loss that trains weights of its own."
    def __init__(self):
        torch.manual_seed(1); super().__init__()
        self.net = nn.Linear(1, 4)
        self.opt = torch.optim.SGD(self.net.parameters(), .1)
    def forward(self, pred, y):
        if pred.requires_grad:
            with torch.enable_grad(): (-self.net(pred.detach().float()).float().square().mean()).backward()
            self.opt.step(); self.opt.zero_grad()
        return nn.functional.mse_loss(pred.float(), y) + self.net(pred).float().square().mean()


def noisy():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
    for p in model.parameters(): p.register_hook(lambda g: g + torch.randn_like(g) * .1)
    return model


def shared_three_times():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    model[3] = model[5] = model[1]
    return model


@pytest.mark.parametrize('model,loss', [(Teacher, None), (mlp, Judge), (noisy, None), (shared_three_times, None)])
@pytest.mark.parametrize('flat', [False, True])
def test_weights_and_hooks_that_are_not_the_models(model, loss, flat):
    def run(to, **kwargs):
        learn = learner(model(), opt_func=OPTIMIZERS['adam'], cbs=GradientAccumulation(8), loss_func=loss and loss())
        torch.manual_seed(2)
        getattr(learn, to)(**kwargs).fit(3, .01)
        return learn
    a, b = run('to_bf16'), run('to_half_weights', flat_master=flat, cast_once=model is not Teacher)
    assert same(params(a), params(b)) and a.recorder.values == b.recorder.values


def test_an_event_put_on_a_class_of_fastai(monkeypatch):
    "As fastai's own `patch` does."
    def shrink(self):
        for p in self.learn.model.parameters(): p.data.mul_(.9)
    monkeypatch.setattr('fastai.callback.core.TrainEvalCallback.before_backward', shrink, raising=False)
    equal(*(trained(to, mlp(), 'adam', True, 3) for to in ('to_bf16', 'to_half_weights')))


def test_an_optimizers_hook_runs_the_model_inside_the_users_own_autocast():
    def run(to, **kwargs):
        learn = getattr(learner(opt_func=partial(OptimWrapper, opt=torch.optim.SGD), cbs=GradientAccumulation(8)), to)(**kwargs)
        learn.create_opt()
        def peek(*args):
            with torch.no_grad(): learn.model(torch.ones(2, 6))
        learn.opt.opt.register_step_pre_hook(peek)
        with torch.autocast('cpu', dtype=torch.bfloat16): learn.fit(2, .05, reset_opt=False)
        return learn
    assert same(*map(params, (run('to_bf16'), run('to_half_weights', cast_once=True))))


@pytest.mark.parametrize('other_memory', [False, True])
def test_weights_that_a_transform_of_the_data_changes(other_memory):
    def run(to, **kwargs):
        learn = learner(opt_func=OPTIMIZERS['adam'], cbs=GradientAccumulation(8))
        def change(b):
            for p in learn.model.parameters():
                if other_memory: p.data = p.data * .99
                else: p.detach().mul_(.99)
            return b
        learn.dls.train.after_batch = change
        getattr(learn, to)(**kwargs).fit(3, .01)
        return learn
    equal(run('to_bf16'), run('to_half_weights', cast_once=True))


def write_data(l):
    for p in l.model.parameters(): p.data.clamp_(-.2, .2)
def write_in_place(l):
    with torch.no_grad(): [p.mul_(.99) for p in l.model.parameters()]  # noqa: B018
def exchange(l):
    for p in l.model.parameters(): p.data = p.data * .99
def replace(l): l.model[0].weight.data = l.model[0].weight.data.double().float()


@pytest.mark.parametrize('write', [write_data, write_in_place, exchange, replace])
@pytest.mark.parametrize('event', ['before_batch', 'after_batch', 'before_validate', 'after_validate', 'after_step', 'before_epoch', 'before_fit'])
def test_weights_that_callbacks_change(event, write):
    "As weight clipping and averaging do, in place, by `.data`, or with other memory; after the precision callback, too."
    a, b = (trained(to, mlp(), 'adam', cbs=[At(event, write, 70)]) for to in ('to_bf16', 'to_half_weights'))
    equal(a, b)


@pytest.mark.parametrize('write', [write_data, write_in_place, exchange, replace])
@pytest.mark.parametrize('event,order', [('before_batch', 70), ('after_backward', 70), ('before_step', 0), ('after_batch', 70), ('after_cancel_batch', 70)])
def test_weights_that_callbacks_change_between_the_batches_of_one_step(event, order, write):
    "In place and with other memory also where casts are kept."
    a, b = (trained(to, mlp(), 'adam', True, 3, [At(event, write, order)], **kw)
            for to, kw in (('to_bf16', {}), ('to_half_weights', dict(cast_once=write is not write_data))))
    equal(a, b)


@pytest.mark.parametrize('order', [0, 20])
@pytest.mark.parametrize('event', ['after_backward', 'before_step', 'after_step', 'after_batch'])
def test_weights_that_change_before_a_later_forward_of_the_same_batch(event, order):
    "As in sharpness-aware minimization."
    def ascend(l):
        if not l.training: return
        write_in_place(l)
        l.loss_func(l.model(*l.xb), *l.yb).backward()
    equal(*(trained(to, mlp(), 'adam', True, 3, [At(event, ascend, order)], **kw)
            for to, kw in (('to_bf16', {}), ('to_half_weights', dict(cast_once=True)))))


class Own(torch.autograd.Function):
    "Hides what is behind it."
    @staticmethod
    def forward(ctx, x, f):
        ctx.save_for_backward(x); ctx.f = f
        return f(x)
    @staticmethod
    def backward(ctx, g):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad(): y = ctx.f(x)
        torch.autograd.backward(y, g)
        return x.grad, None


def test_gradients_that_an_autograd_function_hides():
    def f(m, x): return Own.apply(x * m.a.weight.sum(), lambda x: m.a(x) + m.a.weight.pow(2).sum() * .37 + m.a.weight.abs().sum() * .11)
    def model(): torch.manual_seed(0); return Layers(f)
    equal(*(trained(to, model(), 'adam', True, 3, **kw) for to, kw in (('to_bf16', {}), ('to_half_weights', dict(cast_once=True)))))


def test_an_optimizer_that_writes_in_zero_grad():
    "Which runs after a skipped step, too: casts are forgotten there."
    class Shrinks(torch.optim.SGD):
        def zero_grad(self, set_to_none=True):
            for g in self.param_groups:
                for p in g['params']: p.data.mul_(.9)
            super().zero_grad(set_to_none)
    def run(to, **kwargs):
        learn = learner(opt_func=partial(OptimWrapper, opt=Shrinks), cbs=GradientAccumulation(8))
        getattr(learn, to)(**kwargs)
        learn.precision.scaling._fp16_scaler = torch.amp.GradScaler('cpu', init_scale=2.**40)
        learn.fit(2, .01)
        return learn
    assert same(*map(params, (run('to_fp16'), run('to_half_weights', dtype='fp16', cast_once=True))))


def test_a_callback_that_is_given_its_event_by_name():
    def cb(): return Callback(after_batch=lambda self: [p.data.mul_(1.05) for p in self.learn.model.parameters()])
    equal(*(trained(to, mlp(), 'adam', True, 3, [cb()]) for to in ('to_bf16', 'to_half_weights')))


def test_weights_that_change_between_the_batches_of_a_validation():
    losses = []
    for to in ('to_bf16', 'to_half_weights'):
        shrink = At('after_batch', lambda l: None if l.training else write_data_smaller(l), 70)
        learn = getattr(learner(cbs=[shrink]), to)()
        learn.fit(2, .01)
        losses.append(learn.recorder.values[-1][1])              # of the validation inside the fit, where there are copies
    assert losses[0] == losses[1]


def write_data_smaller(l):
    for p in l.model.parameters(): p.data.mul_(.9)


def test_validation_in_the_middle_of_training_leaves_the_next_steps():
    def look(l):
        if not l.training or l.train_iter not in (2, 4): return
        keep = [p.data.clone() for p in l.model.parameters()]
        for p in l.model.parameters(): p.data.zero_()            # as averaged weights are put in and out
        with torch.no_grad(): l.model.eval(); zero.append(float(l.model(l.xb[0]).abs().sum())); l.model.train()
        for p, k in zip(l.model.parameters(), keep): p.data.copy_(k)
    zero = []
    a, b = (trained(to, mlp(), 'adam', cbs=[At('after_batch', look, 70)]) for to in ('to_bf16', 'to_half_weights'))
    equal(a, b)
    assert zero == [0] * 4


@pytest.mark.parametrize('mode', MODES)
def test_predictions_outside_fit(mode):
    a, b = (trained(to, mlp(), **kw) for to, kw in ((f'to_{mode}', {}), ('to_half_weights', dict(dtype=mode))))
    assert torch.equal(a.get_preds()[0], b.get_preds()[0]) and a.validate() == b.validate()
    x = a.dls.one_batch()[0]
    with a.amp_context(), b.amp_context():
        assert torch.equal(a.model(x), b.model(x)) and b.model(x).dtype is getattr(torch, dict(bf16='bfloat16', fp16='float16')[mode])


def test_gans_of_fastai():
    from fastai.vision.gan import FixedGANSwitcher, GANLearner
    from torch.nn.utils import spectral_norm
    def run(to):
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        critic = nn.Sequential(spectral_norm(nn.Linear(1, 8)), nn.LeakyReLU(), nn.Linear(8, 1))
        learn = GANLearner.wgan(loaders(), generator, critic, switcher=FixedGANSwitcher(1, 2), opt_func=OPTIMIZERS['adam'], show_img=False)
        learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ == 'ProgressCallback'])
        learn.logger = noop
        getattr(learn, to)().fit(3, .01)
        return learn
    a, b = run('to_bf16'), run('to_half_weights')
    assert same(params(a), params(b)) and not same(params(a), [p.detach() for p in run('to_fp32').model.parameters()])


def test_graphs_that_outlive_a_step():
    "The last batch's graph is used again after the weights have changed: its copies must be the old ones."
    def keep(l):
        if not l.training: return
        if kept: grads.append(torch.autograd.grad(kept.pop(), kept_x.pop())[0])
        kept_x.append(torch.ones(2, 6, requires_grad=True))
        kept.append(l.model(kept_x[-1]).float().square().sum())
    runs = []
    for to in ('to_bf16', 'to_half_weights'):
        kept, kept_x, grads = [], [], []
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
        runs.append((trained(to, model, cbs=[At('after_pred', keep, 70)]), grads))
    equal(runs[0][0], runs[1][0])
    assert len(runs[0][1]) == 11 and same(runs[0][1], runs[1][1])
