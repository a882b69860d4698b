"Everybody meets fp32 masters, at all times, whatever ends a batch; and when autocast's casts of them are kept."
import copy, math, pickle
from functools import partial
from typing import Any

import pytest, torch
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation
from fastai.optimizer import SGD, Adam, OptimWrapper
from torch import nn

from fastxtend_amp import HalfWeights, MixedPrecision
from fastxtend_amp.forward import ModuleForward
from fastxtend_amp.insight import diagnosis  # noqa: F401  looks for the cause of an overflow
from test_guard import EVENTS, EXCEPTIONS, PLACES, build, caught
from half_models import CountCasts
from helpers import *
from interrupts import interrupted_before, lines_of

pytestmark = pytest.mark.filterwarnings('ignore:.*emulated.*')
HALF = {'fp16': torch.float16, 'bf16': torch.bfloat16}


def traces(learn):
    "What of this package is on the model, and which parameters are not fp32."
    model = learn.model
    return ([n for n, p in model.named_parameters() if p.dtype is not torch.float32],
            [n for n, m in model.named_modules() if isinstance(m.__dict__.get('forward'), ModuleForward) or m._forward_pre_hooks])
CLEAN = [], []


@pytest.mark.parametrize('exc', EXCEPTIONS, ids=lambda e: e.__name__)
@pytest.mark.parametrize('place,order', [*((e, o) for e in EVENTS for o in (9, 11)), *((p, 0) for p in PLACES)], ids=str)
def test_any_exception_anywhere_in_a_batch(place, order, exc, tmp_path, monkeypatch):
    monkeypatch.setattr('fastxtend_amp.half_weights.flat_masters.is_elementwise', lambda opt: True)   # the one that explodes, too
    plain, _ = build(None, place, exc, order)
    expected = caught(lambda: plain.fit(1))
    for kwargs in (dict(), dict(flat_master=True), dict(master_weights=False)):
        learn, bomb = build(HalfWeights('bf16', **kwargs), place, exc, order)
        place_of = lambda: {n: (id(p), p.data_ptr() if not kwargs else p.stride()) for n, p in learn.model.named_parameters()}
        before, parameters = autocast_state(), place_of()
        assert caught(lambda: learn.fit(1)) == expected
        assert not bomb.armed and autocast_state() == before and traces(learn) == CLEAN
        assert place_of() == parameters                          # the same objects, in place
        if kwargs: continue
        learn.path = tmp_path
        learn.export(); learn.save('a'); learn.load('a')
        again, clone, weights = pickle.loads(pickle.dumps(learn)), copy.deepcopy(learn), params(learn)
        for l in (learn, again, clone):
            l.fit(1)
            assert traces(l) == CLEAN and all(p.isfinite().all() for p in l.model.parameters()) and not same(params(l), weights)


@pytest.mark.parametrize('kwargs', [dict(), dict(flat_master=True), dict(master_weights=False)], ids=str)
@pytest.mark.filterwarnings('ignore:master_weights')
def test_an_interrupt_before_any_line(kwargs):
    "The model is its fp32 masters, and nothing is on it."
    learn, _ = build(HalfWeights('bf16', **kwargs), None, RuntimeError, 0)
    learn.dls = loaders(n=8, valid=dataset(4, seed=1))
    learn.fit(1)                                                 # what is asked once a process
    parameters, lines = [(id(p), p.stride()) for p in learn.model.parameters()], lines_of(lambda: learn.fit(1))
    assert len(lines) > 100
    for line in lines:
        assert interrupted_before(line, lambda: learn.fit(1)), line
        assert traces(learn) == CLEAN, line
        assert [(id(p), p.stride()) for p in learn.model.parameters()] == parameters
        assert not any(t._is_view() for t in learn.model.parameters()) and not torch.is_autocast_enabled('cpu')
    learn.fit(1)
    assert all(p.isfinite().all() for p in learn.model.parameters())


def test_everybody_meets_the_masters():
    seen, hooks = [], []
    learn = learner(opt_func=Adam, cbs=GradientAccumulation(8))
    def look(l=None): seen.append(({p.dtype for p in learn.model.parameters()}, {g.dtype for p in learn.model.parameters() if (g := p.grad) is not None}))
    for event in (*EVENTS, 'before_fit', 'before_epoch', 'before_train', 'before_validate', 'after_validate', 'after_epoch'):
        for order in (0, 11): learn.add_cb(At(event, look, order))
    learn.model[3].register_forward_pre_hook(lambda m, args: hooks.append((m.weight.dtype, m.bias.requires_grad)))
    learn.model[3].register_forward_hook(lambda m, args, out: hooks.append((m.weight.dtype, out.dtype is torch.bfloat16)))
    learn.to_half_weights().fit(2)
    assert set(hooks) == {(torch.float32, True)}
    assert all(p == {torch.float32} and g <= {torch.float32} for p, g in seen) and any(g for _, g in seen)


def test_inputs_are_not_touched():
    seen = []
    class Exact(nn.Module):
        def forward(self, x): seen.append((x.dtype, float(x[0, 0]))); return x
    x = torch.full((8, 6), 1000.3)
    for mode in HALF:
        learn = learner(nn.Sequential(Exact(), nn.BatchNorm1d(6), nn.Linear(6, 1)), loaders(train=Data(x, torch.zeros(8, 1)))).to_half_weights(mode)
        learn.fit(1)
    assert set(seen[:2]) == {(torch.float32, float(torch.tensor(1000.3)))} and {d for d, _ in seen} == {torch.float32}


def test_after_backward_sees_the_masters_gradients():
    "Clipping there works as it does without us."
    def clip(l): norms.append(float(nn.utils.clip_grad_norm_(l.model.parameters(), 1e-3)))
    runs = []
    for to in ('to_bf16', 'to_half_weights'):
        norms = []
        learn = learner(opt_func=SGD, cbs=At('after_backward', clip))
        getattr(learn, to)().fit(2, .1)
        runs.append((params(learn), norms))
    assert same(runs[0][0], runs[1][0]) and runs[0][1] == runs[1][1] and min(runs[1][1]) > 1e-3


def test_callbacks_replace_each_other():
    learn = learner()
    for to, cls in (('to_half_weights', HalfWeights), ('to_fp16', MixedPrecision), ('to_half_weights', HalfWeights),
                    ('to_bf16', MixedPrecision), ('to_half_weights', HalfWeights)):
        getattr(learn, to)()
        assert [type(cb) for cb in learn.cbs if isinstance(cb, MixedPrecision)] == [cls]
    assert not any(isinstance(cb, MixedPrecision) for cb in learn.to_fp32().cbs) and learn.precision is None


def test_accumulation_over_256_micro_batches_is_fp32s():
    "Of the gradients that arrive, which are bf16 products, nothing is lost in their sum; a sum in bf16 loses percents."
    sums = {}
    def grab(l): sums['half'] = l.model[0].weight.grad.clone()
    dls = loaders(train=dataset(256), bs=1)
    learn = learner(nn.Sequential(nn.Linear(6, 1)), dls, cbs=[GradientAccumulation(256)]).to_half_weights()
    weights = learn.model[0].weight.detach().clone(), learn.model[0].bias.detach().clone()
    learn.add_cb(At('before_step', grab, order=12))
    learn.fit(1, .01)
    exact, rounded = torch.zeros(1, 6, dtype=torch.float64), torch.zeros(1, 6, dtype=torch.bfloat16)
    for x, y in dls.train:
        w, b = (t.bfloat16().requires_grad_() for t in weights)
        (nn.functional.mse_loss(nn.functional.linear(x.bfloat16(), w, b).float(), y) / 256).backward()
        exact += w.grad.double()
        rounded += w.grad
    error = lambda s: float((s.double() - exact).norm() / exact.norm())
    assert error(sums['half']) < 1e-6 and error(rounded) > 5e-3


@needs_copies
def test_weights_are_cast_once_a_step():
    "If told to; else in each batch, as under autocast, and so if hooks of weights would run later than there."
    def casts(*cbs, cast_once=True, hook=False):
        model = mlp()
        if hook: model[0].weight.register_hook(lambda g: None)
        learn = learner(model, loaders(n=64), cbs=cbs).to_half_weights(cast_once=cast_once)
        with CountCasts(model) as counted: learn.fit(1, .01)
        return counted.n / 4                                     # of each of its weights
    eight = GradientAccumulation(32)                             # batches of 4 to a step; there are 16
    assert casts() == casts(eight, cast_once=False) == casts(eight, hook=True) == 16
    assert casts(eight) == casts(eight, At('after_batch', noop)) == 2


def test_no_cast_outlives_a_fit():
    "Of an unfinished window; nor of single batches without a fit."
    learn = learner(cbs=GradientAccumulation(16)).to_half_weights(cast_once=True)
    learn.fit(1, .01)
    assert learn.gradient_accumulation.count > 0
    def alone():
        learn.model.train()
        learn.training = True
        learn.one_batch(0, learn.dls.train.one_batch())
    for run in (lambda: learn.fit(1, .01), learn.validate, learn.get_preds, alone):
        run()
        x = torch.ones(2, 6)
        with torch.no_grad(): learn.model[0].weight.zero_(); learn.model[0].bias.zero_()
        with torch.autocast('cpu', dtype=torch.bfloat16): assert not learn.model[0](x).any()


@needs_copies
@pytest.mark.parametrize('cbs', [None, GradientAccumulation(8)], ids=str)
def test_casts_do_not_outlive_the_step(cbs):
    "Their memory is free for the optimizer's; without accumulation it is as soon as the graph's."
    model, held = mlp(), []
    casts = CountCasts(model)
    class Looks(torch.optim.SGD):
        def step(self, closure=None):
            held.append(sum(not ref.expired() for ref in casts.made))
            return super().step(closure)
    learn = learner(model, cbs=cbs, opt_func=partial(OptimWrapper, opt=Looks)).to_half_weights()
    with casts: learn.fit(1, .01)
    assert casts.made and set(held) == {0}


class Perturbs(torch.optim.SGD):
    "Sharpness-aware: runs the model again with other weights before it steps."
    learn: Any = None
    def step(self, closure=None):
        learn, kept = type(self).learn, [p.data.clone() for g in self.param_groups for p in g['params']]
        for g in self.param_groups:
            for p in g['params']: p.data.add_(p.grad, alpha=.5)
        learn.model.zero_grad()
        learn.loss_func(learn.model(*learn.xb), *learn.yb).backward()
        for p, k in zip((p for g in self.param_groups for p in g['params']), kept): p.data.copy_(k)
        return super().step(closure)


def test_an_optimizer_that_runs_the_model_with_other_weights():
    runs = []
    for to in ('to_bf16', 'to_half_weights'):
        learn = learner(opt_func=partial(OptimWrapper, opt=Perturbs), cbs=GradientAccumulation(8))
        Perturbs.learn = learn
        getattr(learn, to)().fit(3, .05)
        runs.append(params(learn))
    assert same(*runs)


def test_a_loop_that_calls_events_and_steps_by_itself():
    "fastai's optimizers write into `.data`, which nothing tells."
    runs = []
    for to in ('to_bf16', 'to_half_weights'):
        learn = getattr(learner(opt_func=Adam, cbs=GradientAccumulation(8)), to)()
        learn.create_opt()
        learn.n_epoch, learn.epoch, learn.training, learn.dl, learn.n_iter = 1, 0, True, learn.dls.train, 6
        for event in ('before_fit', 'before_epoch', 'before_train'): learn(event)
        for learn.iter, b in enumerate(learn.dl):
            learn._split(b)
            learn('before_batch')
            learn.pred = learn.model(*learn.xb)
            learn('after_pred')
            learn.loss_grad = learn.loss_func(learn.pred, *learn.yb)
            learn.loss = learn.loss_grad.clone()
            learn('after_loss')
            learn.loss_grad.backward()
            learn.opt.step(); learn.opt.zero_grad()
            learn('after_batch')
        for event in ('after_train', 'after_epoch', 'after_fit'): learn(event)
        runs.append(params(learn))
    assert same(*runs)


def test_a_step_below_bf16s_resolution_is_not_lost():
    learn = learner(nn.Sequential(nn.Linear(6, 1)), opt_func=SGD).to_half_weights()
    with torch.no_grad(): learn.model[0].weight.fill_(1.)
    learn.add_cb(At('before_step', lambda l: l.model[0].weight.grad.fill_(1.), order=12))
    learn.fit(10, 1e-5)                                          # 60 steps of 1e-5; bf16 has no number between 1 and 0.996
    assert torch.allclose(learn.model[0].weight, torch.full((1, 6), 1 - 60e-5), atol=1e-6)


@pytest.mark.parametrize('flat', [False, True])
@pytest.mark.parametrize('event', ['before_batch', 'after_pred', 'after_step', 'after_epoch'])
def test_copies_made_in_the_middle_of_a_fit(event, flat):
    "Of the learner, and of the model alone: nothing of this package is on them, and they go on as by themselves."
    made, models = [], []
    order = 9 if event == 'before_batch' else 11
    def make(l):
        models.append((copy.deepcopy(l.model), pickle.loads(pickle.dumps(l.model)), params(l)))
        if len(made) < 2 and event in ('before_batch', 'after_epoch'): made.append(pickle.loads(pickle.dumps(l)) if made else copy.deepcopy(l))
    class Once(Callback):
        def __reduce__(self): return Callback, ()
    once = Once(); once.order = order; setattr(once, event, lambda: make(learn))
    learn = learner(opt_func=Adam).to_half_weights(flat_master=flat).add_cb(once)
    learn.fit(2, .01)
    for a, b, weights in models:
        for m in (a, b):
            assert same([p.detach() for p in m.parameters()], weights) and {p.dtype for p in m.parameters()} == {torch.float32}
            assert not any(isinstance(f, ModuleForward) for c in m.modules() for f in c.__dict__.values())
            assert m(torch.ones(2, 6)).dtype is torch.float32
    for l in made:
        weights = params(l)
        l.fit(1, .01)
        assert not same(params(l), weights) and traces(l) == CLEAN


def test_lr_find_leaves_the_learner_as_it_was(tmp_path):
    for kwargs in (dict(dtype='fp16'), dict(flat_master=True)):
        learn = learner(opt_func=Adam, path=tmp_path).to_half_weights(**kwargs)
        before = params(learn)
        learn.lr_find(show_plot=False, num_it=10, suggest_funcs=None)
        assert same(params(learn), before) and traces(learn) == CLEAN and learn.precision.scales == []


def test_validation_before_training_decides_nothing():
    def run(first):
        learn = learner(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1)), opt_func=Adam).to_half_weights()
        if first: learn.validate(); learn.get_preds()
        torch.manual_seed(0)
        learn.fit(2, .01)
        return params(learn)
    torch.manual_seed(0); a = run(True)
    torch.manual_seed(0); b = run(False)
    assert same(a, b)


def test_kept_in_fp32():
    seen = []
    learn = learner(mlp(), opt_func=Adam).to_half_weights(fp32_modules='3')
    learn.model[3].register_forward_hook(lambda m, args, out: seen.append(out.dtype))
    kept = learner(mlp(), opt_func=Adam).to_bf16(fp32_modules='3')
    for l in (learn, kept): l.fit(2, .01)
    assert same(params(learn), params(kept)) and set(seen) == {torch.float32}


def test_diagnosis_names_the_module_and_this_method():
    learn = learner(Attentive(), opt_func=Adam).to_half_weights('fp16', on_overflow='raise')
    with pytest.raises(FloatingPointError, match=r"learn.to_half_weights\(dtype='fp16', .*fp32_modules=\['attn"): learn.fit(1)
    assert traces(learn) == CLEAN
    kept = learner(Attentive(), opt_func=Adam).to_half_weights('fp16', fp32_modules='attn', on_overflow='raise')
    kept.fit(2, .01)
    assert math.isfinite(kept.recorder.values[-1][0])


def test_as_a_call():
    learn = learner().to_half_weights()
    assert learn.precision.as_call() == "learn.to_half_weights(dtype='bf16')"
    learn.to_half_weights('fp16', 128., fp32_modules=['0', '1'], on_overflow='raise')
    assert learn.precision.as_call(fp32_modules='3') == "learn.to_half_weights(dtype='fp16', loss_scale=128.0, fp32_modules='3', on_overflow='raise')"


class Varies(nn.Module):
    "Does something between two calls of a module."
    def __init__(self, f):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head, self.gen, self.f = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1), nn.Parameter(torch.randn(36) * .1), f
    def forward(self, x): return self.head(self.f(self, x))


def frozen_between(m, x):
    y = m.a(x)
    m.a.requires_grad_(False); z = m.a(m.b(x)); m.a.requires_grad_(True)
    return y - z


def generated_weight(m, x): return m.a(x) + torch.func.functional_call(m.a, {'weight': m.gen.view(6, 6) * 1.}, (x,))


def in_inference_mode(m, x):
    with torch.inference_mode(): t = float(m.a(x).mean())
    return m.a(x) * (1 + 0 * t)


@pytest.mark.parametrize('f', [frozen_between, generated_weight, in_inference_mode])
@pytest.mark.parametrize('flat', [False, True])
def test_what_changes_between_two_calls_of_a_module_is_seen(f, flat):
    half, plain = learner(Varies(f)).to_half_weights(flat_master=flat), learner(Varies(f)).to_bf16()
    for l in (half, plain): l.fit(3, .01)
    assert same(params(half), params(plain))


def test_weights_exchanged_for_a_validation_within_an_accumulation():
    from fastai.callback.training import GradientAccumulation
    class Average(Callback):
        "An average of the weights, for validation only."
        def before_fit(self): self.mean = [p.data.clone() for p in self.model.parameters()]
        def after_step(self):
            for m, p in zip(self.mean, self.model.parameters()): m.lerp_(p.data, .1)
        def exchange(self):
            for m, p in zip(self.mean, self.model.parameters()): t = p.data.clone(); p.data.copy_(m); m.copy_(t)
        before_validate = after_validate = exchange
    def run(set_precision):
        learn = set_precision(learner(cbs=[Average(), GradientAccumulation(16)])); learn.fit(5, .01)
        return params(learn)
    assert same(run(lambda l: l.to_half_weights()), run(lambda l: l.to_bf16()))


@pytest.mark.parametrize('switch', ['run', 'run_train'])
def test_gradient_accumulation_switched_off_in_an_unfinished_window(switch):
    "It counts no more, and each batch steps."
    def off(l):
        if l.epoch == 1: setattr(l.gradient_accumulation, switch, False)
    def run(to):
        learn = getattr(learner(mlp(), loaders(n=24), opt_func=Adam, cbs=[GradientAccumulation(16), At('before_epoch', off)]), to)()
        learn.fit(3, .01)
        return learn
    a, b = run('to_half_weights'), run('to_bf16')
    assert b.gradient_accumulation.count > 0 and same(params(a), params(b)) and a.recorder.values == b.recorder.values


# -- memory that others share with a weight

def twins():
    "Of two layers each, the second has the first one's weight, as a parameter that is not trained and as a buffer."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
    model[4].weight = nn.Parameter(model[0].weight.detach(), requires_grad=False)
    del model[6].weight
    model[6].register_buffer('weight', model[2].weight.detach())
    return model


@pytest.mark.parametrize('kwargs', [{}, dict(flat_master=True), dict(master_weights=False)])
def test_memory_that_a_frozen_parameter_or_a_buffer_shares(kwargs):
    a, b = (learner(twins(), opt_func=OPTIMIZERS['adam']) for _ in range(2))
    a.to_bf16().fit(2, .01), b.to_half_weights(**kwargs).fit(2, .01)
    assert torch.equal(b.model[4].weight, b.model[0].weight) and torch.equal(b.model[6].weight, b.model[2].weight)
    assert 'master_weights' in kwargs or same(params(a), params(b))


@pytest.mark.parametrize('kwargs', [{}, dict(flat_master=True), dict(master_weights=False)])
def test_memory_that_other_processes_share(kwargs):
    model = mlp().share_memory()
    addresses = [p.data_ptr() for p in model.parameters()]
    learner(model).to_half_weights(**kwargs).fit(1)
    assert all(p.is_shared() for p in model.parameters()) and [p.data_ptr() for p in model.parameters()] == addresses


def test_without_masters_weights_are_fp32_when_training_ends():
    seen = []
    look = At('after_train', lambda l: seen.append(l.model(torch.ones(2, 6)).dtype), 70)
    learner(cbs=look).to_half_weights(master_weights=False).fit(2)
    assert seen == [torch.float32] * 2
