import math, warnings
from functools import partial

import pytest, torch
from fastai.callback.schedule import *  # noqa: F403  patches lr_find
from fastai.callback.training import GradientAccumulation
from torch import nn
from torch.nn import functional as F

from fastxtend_amp import MixedPrecision
from fastxtend_amp.insight import watch
from helpers import OPTIMIZERS, At, Attentive, dataset, learner, loaders, opt_state, params, same, same_state


def told(learn, n=1, **kwargs):
    "The warnings about training that goes wrong while `learn` fits `n` epochs."
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        learn.fit(n, .01, **kwargs)
    return [str(w.message) for w in found if 'goes wrong' in str(w.message)]


def watch_of(learn): return next(o for o in learn.precision.observers if isinstance(o, OverflowWatch))


def fitted(learn, n, lr):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        learn.fit(n, lr)
    return [str(w.message) for w in found if 'goes wrong' in str(w.message)]


class OnceInf(nn.Module):
    "Infinite in low precision in its n-th call."
    def __init__(self, when): super().__init__(); self.when, self.n = when, 0
    def forward(self, x):
        self.n += 1
        return x * (math.inf if self.n == self.when and torch.is_autocast_enabled('cpu') else 1)


class Steep(nn.Module):
    "Passes its input on, and back its gradient times `factor`."
    def __init__(self, factor): super().__init__(); self.factor = factor
    def forward(self, x): return Times.apply(x, self.factor)


class Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor): ctx.factor = factor; return x.clone()
    @staticmethod
    def backward(ctx, g): return g * ctx.factor, None


# -- what is found

@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_the_module_that_overflows_is_named(opt):
    messages = told(learner(Attentive(), opt_func=OPTIMIZERS[opt]).to_fp16())
    assert len(messages) == 1
    for words in ('the loss is nan', 'That batch, run again', "module 'attn' (Attention)", 'inside', '65,504',
                  "fp32_modules=['attn']"):
        assert words in messages[0], messages[0]


def test_the_same_module_as_in_the_report_and_the_remedy_silences_it():
    learn = learner(Attentive())
    names = learn.precision_report('fp16').fp32_modules
    assert f"module '{names[0]}'" in told(learn.to_fp16())[0]
    assert told(learner(Attentive()).to_fp16(fp32_modules=names), 2) == []


def test_the_loss_function_itself():
    def loss(p, y):
        p = (p.half() if torch.is_autocast_enabled('cpu') else p) * 60000 * 60000
        return p.float().mul(1e-9).sub(y).square().mean()
    message = told(learner(loss_func=loss).to_fp16())[0]
    assert 'in the loss function' in message and 'fp32_modules' not in message


def test_a_backward_pass_that_overflows():
    "The forward pass is harmless; a gradient times 1e9 on the way back is not, in fp16."
    message = told(learner(nn.Sequential(nn.Linear(6, 8), Steep(1e9), nn.Linear(8, 1))).to_fp16(init_scale=1024.), 2)[0]
    assert "backward pass of module '1' (Steep)" in message and "fp32_modules=['1']" in message


def test_bad_data_is_told_apart():
    data = dataset()
    data.tensors[0][7, 2] = math.nan
    for mode in ('to_fp16', 'to_bf16'):
        messages = told(getattr(learner(dls=loaders(train=data)), mode)())
        assert len(messages) == 1 and 'The batch itself is not finite: 1 of 24 values of an input' in messages[0]
    data = dataset()
    data.tensors[1][3] = math.inf
    assert 'of a target' in told(learner(dls=loaders(train=data)).to_bf16())[0]


def test_a_model_that_is_not_finite_in_fp32_is_told_apart():
    class Log(nn.Module):
        def forward(self, x): return x.sum(1, keepdim=True).log()
    message = told(learner(nn.Sequential(nn.Linear(6, 2), Log())).to_bf16())[0]
    assert "not finite in fp32 either, first in module '1' (Log)" in message and 'not a matter of precision' in message


def test_a_fault_that_does_not_come_back_is_said_not_to():
    message = told(learner(nn.Sequential(nn.Linear(6, 1), OnceInf(3))).to_bf16())[0]
    assert 'this batch is finite in bf16' in message


def test_weights_that_are_lost_already():
    learn = learner().to_bf16()
    learn.add_cb(At('before_batch', lambda l: l.model[0].weight.data.fill_(math.nan)))
    assert "weight tensors are NaN or inf by now, such as '0.weight'" in told(learn)[0]


# -- a run that diverges

@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
@pytest.mark.parametrize('opt,lr', [('sgd', 10.), ('sgd', 100.), ('adam', 10.), ('adam', 100.)])
def test_a_learning_rate_far_too_high_is_named_first(opt, lr, mode):
    learn = learner(opt_func=OPTIMIZERS[opt])
    getattr(learn, f'to_{mode}')(max_skips=4)
    messages = fitted(learn, 4, lr)
    assert len(messages) == 1 or mode == 'bf16' and opt == 'adam'    # which keeps the loss finite, as in fp32
    for message in messages:
        assert 'the run diverges' in message and 'the loss went from 0.92' in message, message
        assert f'Lower the learning rate first, {lr:g} at this step' in message, message
        assert 'fp32_modules' not in message, message


def test_the_module_is_named_where_nothing_has_grown():
    "A model that overflows with the weights of the start, at a learning rate that is none too high."
    message = told(learner(Attentive()).to_fp16())[0]
    assert 'learning rate' not in message and "fp32_modules=['attn']" in message


class Loud(nn.Module):
    def __init__(self, half=False): super().__init__(); torch.manual_seed(0); self.emb, self.head, self.half = nn.Linear(6, 8), nn.Linear(8, 1), half
    def forward(self, x):
        x = self.emb(x)
        return self.head((x.half() if self.half and torch.is_autocast_enabled('cpu') else x) * 1e5 / 1e5)


def test_the_models_own_forward_is_not_advised_to_be_kept():
    assert "fp32_modules=['emb']" in told(learner(Loud()).to_fp16())[0]
    message = told(learner(Loud(half=True)).to_fp16())[0]
    assert "in the model's own `forward`" in message and "with torch.autocast('cpu', enabled=False)" in message
    assert '(model)' not in message


def test_a_frozen_body_that_overflows_is_named_though_the_head_diverges():
    class Transfer(nn.Module):
        def __init__(self): super().__init__(); self.body, self.head, self.n = Attentive(gain=1.), nn.Linear(1, 1), 0
        def forward(self, x):
            self.n += 1
            self.body.attn.gain = 800. if self.n > 3 else 1.
            return self.head(self.body(x))
    model = Transfer().requires_grad_(False)
    model.head.requires_grad_(True)
    learn = learner(model, opt_func=OPTIMIZERS['sgd']).to_fp16()
    def grow(l):
        with torch.no_grad(): l.model.head.weight.mul_(20)
    learn.add_cb(At('after_batch', grow))
    message = told(learn)[0]
    assert "module 'body.attn' (Attention)" in message and "fp32_modules=['body.attn']" in message, message


def test_the_sizes_of_the_start_cost_no_synchronization_and_no_operator_in_a_step():
    learn, seen = learner().to_fp16(), []
    learn.add_cb(At('after_batch', lambda l: seen.append(watch_of(l).fit.sizes)))
    learn.fit(2)
    sizes = seen[0]
    assert isinstance(sizes.weights, float) and isinstance(sizes.loss, float) and all(s is sizes for s in seen[:6])
    assert seen[8] is sizes
    assert sizes.weights == pytest.approx(torch.cat([p.flatten() for p in learner().model.parameters()]).norm().item())


# -- what it advises

@pytest.mark.parametrize('kept', ['emb', ['emb'], nn.Linear], ids=str)
def test_advice_keeps_what_is_there(kept):
    learn = learner(Attentive()).to_fp16(fp32_modules='emb' if kept is nn.Linear else kept, max_skips=7,
                                         init_scale=1024.)
    message = told(learn)[0]
    assert "fp32_modules=['emb', 'attn']" in message and 'max_skips=7' in message, message


class Scaled(nn.Module):
    "A linear layer whose input is scaled up and whose output is scaled back; in fp16 a part of its values overflows."
    def __init__(self, gain, n=6): super().__init__(); self.inner, self.gain = nn.Linear(n, n, bias=False), gain
    def forward(self, x): return self.inner(x * self.gain) / self.gain


@pytest.mark.parametrize('gain', [30_000., 90_000., 130_000.])
@pytest.mark.parametrize('after', [nn.ReLU, lambda: nn.LayerNorm(6)], ids=['relu', 'layer norm'])
def test_partial_overflow_is_traced_to_its_module(gain, after):
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(gain), after(), nn.Linear(6, 1))
    message = told(learner(model).to_fp16())[0]
    names = message.partition('fp32_modules=')[2].partition(')')[0]
    assert names in ("['0']", "['0.inner']"), message
    assert told(learner(nn.Sequential(Scaled(gain), after(), nn.Linear(6, 1))).to_fp16(fp32_modules='0')) == []


def test_messages_have_three_lines_and_say_of_a_rerun_only_what_is_true():
    data = dataset()
    data.tensors[0][7, 2] = math.nan
    lost = learner().to_bf16()
    lost.add_cb(At('before_batch', lambda l: l.model[0].weight.data.fill_(math.nan)))
    rerun = {True: [learner(Attentive()).to_fp16(), learner(nn.Sequential(nn.Linear(6, 1), OnceInf(3))).to_bf16()],
             False: [learner(dls=loaders(train=data)).to_fp16(), lost]}
    for was, learners in rerun.items():
        for learn in learners:
            message = told(learn)[0]
            assert message.count('\n') == 2 and ('run again with' in message) == was, message


# -- when it looks, and when not

def test_ordinary_first_skips_raise_no_alarm():
    learn = learner(loss_func=lambda p, y: F.mse_loss(p, y) * 30).to_fp16(init_scale=2. ** 18)
    assert told(learn, 3) == [] and 3 < learn.mixed_precision.n_skipped < 16


@pytest.mark.parametrize('max_skips', [1, 3])
def test_patience(max_skips):
    learn = learner(loss_func=lambda p, y: F.mse_loss(p, y) * 300).to_fp16(init_scale=2. ** 20, max_skips=max_skips)
    seen = []
    learn.add_cb(At('after_batch', lambda l: seen.append(watch_of(learn).on)))
    message = told(learn)[0]
    assert f'{max_skips} steps in a row were skipped' in message and seen.count(True) == max_skips - 1
    assert 'the loss scale of' in message and 'is too large' in message and 'init_scale=' in message


def test_a_scale_below_one():
    learn = learner(nn.Sequential(nn.Linear(6, 8), Steep(1e7), nn.Linear(8, 1))).to_fp16(init_scale=4., max_skips=100)
    assert 'the loss scale falls below 1' in told(learn)[0]


def test_once_a_fit_and_again_in_the_next():
    learn = learner(Attentive()).to_fp16()
    assert len(told(learn, 2)) == 1 and len(told(learn)) == 1


def test_lr_find_and_validation_are_left_alone():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        learner(Attentive()).to_fp16().lr_find(num_it=6, show_plot=False, suggest_funcs=())
        learner(Attentive()).to_fp16().validate()
    assert not [w for w in found if 'goes wrong' in str(w.message)]


def test_ignore_and_raise():
    assert told(learner(Attentive()).to_fp16(on_overflow='ignore')) == []
    for mode, model in (('to_fp16', Attentive()), ('to_bf16', nn.Sequential(nn.Linear(6, 1), OnceInf(2)))):
        learn = getattr(learner(model), mode)(on_overflow='raise')
        before = params(learn)
        with pytest.raises(FloatingPointError, match='goes wrong'): learn.fit(1)
        assert all(p.isfinite().all() for p in params(learn)) and learn.precision.fit_device is None
    assert same(before, before) and not torch.is_autocast_enabled('cpu')


def test_bf16_is_raised_before_the_weights_are_lost():
    learn = learner(nn.Sequential(nn.Linear(6, 1), OnceInf(1))).to_bf16(on_overflow='raise')
    before = params(learn)
    with pytest.raises(FloatingPointError): learn.fit(1)
    assert same(before, params(learn))


@pytest.mark.parametrize('kwargs,words', [(dict(on_overflow='stop'), "on_overflow='stop'"),
                                          (dict(max_skips=0), 'max_skips=0'), (dict(max_skips=2.5), 'max_skips=2.5')])
def test_bad_arguments(kwargs, words):
    for call in (partial(MixedPrecision, 'fp16'), learner().to_fp16, learner().to_bf16, learner().to_amp):
        with pytest.raises(ValueError, match=words): call(**kwargs)


# -- the rerun changes nothing

@pytest.mark.parametrize('acc', [None, 8])
@pytest.mark.parametrize('opt', ['adam', 'fused adamw', 'torch sgd'])
def test_training_goes_on_as_if_nobody_had_looked(opt, acc):
    "A model with dropout and batch norm whose third call overflows: with and without the diagnosis the same bits."
    def train(on_overflow):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(.3), OnceInf(3), nn.Linear(8, 1))
        learn = learner(model, opt_func=OPTIMIZERS[opt], cbs=[GradientAccumulation(acc)] if acc else None)
        learn.to_fp16(init_scale=1024., on_overflow=on_overflow)
        torch.manual_seed(1)
        messages = told(learn, 2)
        return learn, messages
    (asked, messages), (plain, none) = train('warn'), train('ignore')
    assert len(messages) == 1 and not none
    assert same(params(asked), params(plain)) and same_state(opt_state(asked.opt), opt_state(plain.opt))
    assert same(list(asked.model.buffers()), list(plain.model.buffers())) and asked.model[3].n == plain.model[3].n
    losses = asked.recorder.losses, plain.recorder.losses
    assert losses[0] == losses[1] or all(torch.equal(a, b) or (a != a and b != b) for a, b in zip(*losses))
    assert asked.mixed_precision.scales == plain.mixed_precision.scales


def test_the_rerun_uses_the_same_random_draws():
    "The overflow depends on what dropout kept."
    class Picky(nn.Module):
        def forward(self, x):
            return x * (1e30 if torch.is_autocast_enabled('cpu') and bool((x[0, :4] != 0).all()) else 1)
    torch.manual_seed(0)
    learn = learner(nn.Sequential(nn.Linear(6, 8), nn.Dropout(.5), Picky(), nn.Linear(8, 1))).to_fp16()
    torch.manual_seed(5)
    assert "module '2' (Picky)" in told(learn, 10)[0]


# -- where only the device knows

def test_on_a_device_the_recorders_loss_tells(monkeypatch):
    learn = learner(Attentive(), opt_func=OPTIMIZERS['fused adamw']).to_fp16(init_scale=16.)
    learn.add_cb(At('before_fit', lambda l: setattr(watch_of(learn).fit, 'in_place', False), 20))
    real = watch.host_value
    def of_recorder(t): return real(t) if any(t is l for l in learn.recorder.losses[-1:]) else None
    monkeypatch.setattr(watch, 'host_value', of_recorder)
    messages = told(learn)
    assert len(messages) == 1 and 'the loss is nan' in messages[0] and "module 'attn'" in messages[0]


def stepped_already(learn):
    "With one good step behind it, a fused optimizer decides on the device."
    learn.add_cb(At('after_batch', lambda l: setattr(l.model[1], 'factor', 1e9)))


def test_on_a_device_skips_in_a_row_are_seen_when_the_epoch_ends(monkeypatch):
    class Steep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor): ctx.factor = factor; return x.clone()
        @staticmethod
        def backward(ctx, g): return g * ctx.factor, None
    class Module(nn.Module):
        factor = 1.
        def forward(self, x): return Steep.apply(x, self.factor)
    learn = learner(nn.Sequential(nn.Linear(6, 8), Module(), nn.Linear(8, 1)),
                    opt_func=OPTIMIZERS['fused adamw']).to_fp16(init_scale=16., max_skips=4)
    stepped_already(learn)
    monkeypatch.setattr(watch, 'host_value', lambda t: None)
    messages = told(learn)
    assert len(messages) == 1 and 'the last 4 steps were skipped' in messages[0]
    assert 'not the one it began with' in messages[0]
    assert "module '1' (Module)" in messages[0]


def test_flags_are_polled_without_waiting():
    from fastxtend_amp.scale_history import ScaleHistory as History, ScaleRule as _Rule
    history = History()
    history.mark(8., 0, _Rule(2., .5, 2000))
    for i in range(History._chunk): history.record(torch.tensor(float(i >= History._chunk - 20)))
    assert history.arrived_skips() == 20 and history.arrived_skips() == 0
    class Later:
        ready = False
        def query(self): return self.ready
    for i in range(History._chunk): history.record(torch.tensor(1.))
    event = Later()
    history._arriving = (history._arriving[0], event)
    assert history.arrived_skips() == 0
    event.ready = True
    assert history.arrived_skips() == History._chunk


def test_host_values_are_read_without_an_operator():
    from torch.profiler import ProfilerActivity, profile
    loss, weights = torch.ones(3, requires_grad=True).sum(), nn.Parameter(torch.ones(2, 2))
    with profile(activities=[ProfilerActivity.CPU]) as p: assert host_value(loss) == 3. and host_norm(weights) == 2.
    assert not p.key_averages() and host_value(loss.double()) is None and host_value(torch.ones(2)) is None


def test_no_hooks_while_training_goes_well():
    seen = []
    learn = learner().to_fp16()
    def hooks(l): seen.append(sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in l.model.modules()))
    learn.add_cb(At('after_batch', hooks))
    assert told(learn, 2) == [] and set(seen) == {0}


@pytest.mark.parametrize('half', [False, True])
def test_a_loss_scale_that_is_too_large_for_the_loss_itself(half):
    learn = learner()
    if half: learn.to_half_weights('fp16', loss_scale=2.**18, max_skips=4)
    else: learn.to_fp16(loss_scale=2.**18, max_skips=4)
    message = told(learn)[0]
    assert 'the loss scale of 262,144 is too large' in message and 'loss_scale=1024.0' in message and 'finite in fp16' not in message


# -- what is said holds

class Grows(nn.Module):
    "Its own forward makes the small output of `lin` large and small again."
    def __init__(self): super().__init__(); torch.manual_seed(0); self.lin, self.head = nn.Linear(6, 8), nn.Linear(8, 1)
    def forward(self, x): return self.head(self.lin(x) * 1e6 / 1e6)


def test_values_named_are_those_that_overflow():
    "Keeping the module before it helps, but the large values are not in that module."
    message = told(learner(Grows()).to_fp16())[0]
    assert "stop being finite in the model's own `forward`: values inside it reach" in message, message
    assert "Keep module 'lin' (Linear), which comes before, in fp32: `learn.to_fp16(fp32_modules=['lin'])`" in message
    reached = float(message.partition('inside it reach ')[2].partition(' in fp32')[0].replace(',', ''))
    assert reached > 65504
    assert told(learner(Grows()).to_fp16(fp32_modules=['lin'])) == []


def test_where_modules_run_inside_vmap_no_figure_is_made_up():
    class Mapped(nn.Module):
        def __init__(self): super().__init__(); self.inner = Attentive()
        def forward(self, x): return torch.func.vmap(lambda row: self.inner(row[None])[0])(x)
    message = told(learner(Mapped()).to_fp16())[0]
    assert "fp32_modules=['inner']" in message and 'reaches 0' not in message, message
    assert told(learner(Mapped()).to_fp16(fp32_modules=['inner'])) == []


class SteepBetween(nn.Module):
    "The gradient grows between two modules, in the backward pass of no module."
    def __init__(self, factor): super().__init__(); torch.manual_seed(0); self.a, self.b, self.f = nn.Linear(6, 8), nn.Linear(8, 1), factor
    def forward(self, x): return self.b(Times.apply(self.a(x), self.f))


@pytest.mark.parametrize('kwargs', [dict(init_scale=4.), dict(loss_scale=1., max_skips=3)])
def test_a_lower_loss_scale_that_is_advised_is_lower_and_was_tried(kwargs):
    message = told(learner(SteepBetween(1e7)).to_fp16(**kwargs))[0]
    assert 'is too large' in message and 'before it reaches' not in message
    call = message.partition('`')[2].partition('`')[0]
    learn = learner(SteepBetween(1e7))
    exec(call, {'learn': learn})
    assert learn.precision.scale < 1
    learn.precision.on_overflow = 'ignore'
    learn.fit(1, 1e-9)
    assert learn.precision.n_skipped == 0


def test_where_no_loss_scale_helps_none_is_advised():
    message = told(learner(SteepBetween(1e12)).to_fp16(init_scale=4.))[0]
    assert 'no loss scale' in message and 'init_scale' not in message and '`learn.precision_report()`' in message


def test_an_overflow_that_no_operator_shows_is_no_matter_of_the_loss_scale():
    from insight.test_report_cause import InNumPy, Net
    make = lambda: Net(InNumPy, nn.ReLU())
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', 'overflow encountered')
        message = told(learner(make()).to_fp16())[0]
        assert "stop being finite in module 'mid' (InNumPy)" in message and 'too large' not in message, message
        assert told(learner(make()).to_fp16(fp32_modules=['mid'])) == []


def test_a_first_loss_that_happens_to_be_small_is_no_divergence():
    data = dataset()
    torch.manual_seed(0)
    model = Attentive(gain=1.)
    data.tensors[1][:4] = model(data.tensors[0][:4]).detach()   # the first batch is predicted already
    learn = learner(model, loaders(train=data), opt_func=OPTIMIZERS['sgd']).to_fp16(init_scale=1024.)
    learn.add_cb(At('after_batch', lambda l: setattr(l.model.attn, 'gain', 800. if l.train_iter > 2 else 1.)))
    message = told(learn)[0]
    assert "fp32_modules=['attn']" in message and 'diverges' not in message, message


def test_a_divisor_that_underflows():
    from insight.test_report_cause import Net, Unit
    message = told(learner(Net(Unit, nn.ReLU())).to_fp16())[0]
    assert "stop being finite in module 'mid' (Unit).\nKeep it in fp32: " in message, message
