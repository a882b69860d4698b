"Without masters: bf16 weights while a model is trained, fp32 at all other times."
from functools import partial

import pytest, torch
from fastai.callback.schedule import *
from fastai.optimizer import SGD, Adam, OptimWrapper
from torch import nn

from fastxtend_amp.half_weights import bytes_per_parameter, kahan
from fastxtend_amp.half_weights.optimizers import compensates, state_of
from helpers import *
from half_models import MODELS, build
from quality import final_loss, stochastic

pytestmark = pytest.mark.filterwarnings('ignore:master_weights=False', 'ignore:.*weight_norm.*', 'ignore:.*enable_nested_tensor.*')
OPTS = {'adam': Adam, 'sgd': partial(SGD, mom=.9), 'adamw': OPTIMIZERS['adamw'], 'fused adamw': OPTIMIZERS['fused adamw'], 'kahan': kahan('AdamW')}


def without(opt='adam', model=None, **kwargs):
    return learner(model, opt_func=OPTS.get(opt, opt), **kwargs).to_half_weights(master_weights=False)


def floating(learn):
    tensors = [v for s in state_of(learn.opt).values() for v in s.values() if isinstance(v, torch.Tensor)]
    return {v.dtype for v in tensors if v.dim() and v.is_floating_point()}


@pytest.mark.parametrize('name', [n for n in MODELS if n != 'fp32 by hand'])   # whose code wants fp32 weights
def test_each_model(name):
    "Those that autocast runs, in validation too; weights that are not lowered are fp32."
    seen = []
    learn = without('kahan', build(name))
    learn.add_cb(At('after_step', lambda l: seen.append([p.dtype for p in l.model.parameters()].count(torch.bfloat16)), 11))
    learn.fit(2, .01)
    assert min(seen) == max(seen) > 0 and all(p.dtype is torch.float32 and p.isfinite().all() for p in learn.model.parameters())


def test_where_weights_and_state_are_bf16():
    seen = {}
    def look(event): return At(event, lambda l: seen.setdefault((event, l.training), ([str(p.dtype) for p in l.model.parameters()], floating(l))), 11)
    learn = without('adam', cbs=[look(e) for e in ('after_pred', 'after_step', 'before_validate', 'after_epoch')])
    learn.fit(2)
    low, norm, fp32 = 'torch.bfloat16', 'torch.float32', ['torch.float32'] * 6
    assert seen['after_step', True] == ([low, low, norm, norm, low, low], {torch.bfloat16, torch.float32})
    assert seen['after_pred', False][0] == fp32 and seen['after_epoch', False] == (fp32, {torch.float32})
    assert floating(learn) == {torch.float32}


def test_small_updates_are_lost_and_it_says_so():
    learn = learner(opt_func=SGD).to_half_weights(master_weights=False)
    parameters = [*learn.model.parameters()]
    with pytest.warns(UserWarning, match=r'which does not compensate.*\d+% of the weights with a gradient did not move'): learn.fit(2, 1e-5)
    assert all(a is b for a, b in zip(parameters, learn.model.parameters()))
    for bad in (dict(flat_master=True), dict(dtype='fp16')):
        with pytest.raises(ValueError, match='master_weights=False'): learn.to_half_weights(master_weights=False, **bad)


OPTS['adafactor'] = partial(OptimWrapper, opt=torch.optim.Adafactor)   # whose state is of other shapes than the weights


@pytest.mark.parametrize('opt', OPTS)
def test_switching_from_and_to_fp32(opt):
    "In one learner, with its optimizer's state: each goes on in its own dtype."
    learn = learner(opt_func=OPTS[opt])
    for to, kwargs in (('to_fp32', {}), ('to_half_weights', dict(master_weights=False)), ('to_bf16', {}), ('to_half_weights', dict(master_weights=False)),
                       ('to_half_weights', {}), ('to_fp32', {})):
        weights = params(learn)
        getattr(learn, to)(**kwargs).fit(1, .01)
        assert floating(learn) <= {torch.float32} and not same(params(learn), weights) and all(p.isfinite().all() for p in params(learn))


@pytest.mark.parametrize('opt', OPTS)
def test_exact_resume(opt, tmp_path):
    "From a file of a finished fit, and from one saved inside, with what is trained in bf16."
    learn = without(opt, path=tmp_path)
    learn.fit(1, .01); learn.save('a'); learn.fit(1, .01)
    other = without(opt, path=tmp_path)
    other.create_opt(); other.load('a'); other.fit(1, .01)
    assert same(params(learn), params(other)) and same_state(opt_state(learn.opt), opt_state(other.opt))
    def save(l):
        if l.train_iter == 3: l.save('mid')
    def back(l):
        if l.train_iter == 5: l.load('mid')
    inside = without(opt, path=tmp_path, cbs=[At('after_batch', save, 20), At('after_batch', back, 21)])
    inside.fit(1, .01)
    assert floating(inside) <= {torch.float32} and all(p.isfinite().all() for p in params(inside))
    plain = learner(opt_func=OPTS[opt], path=tmp_path)
    plain.create_opt(); plain.load('mid'); plain.fit(1, .01)
    assert all(p.dtype is torch.float32 and p.isfinite().all() for p in plain.model.parameters())


@pytest.mark.parametrize('opt', ['adam', 'adamw', 'kahan'])
def test_lr_find_between_two_fits(opt, tmp_path):
    learn, twin = (without(opt, path=tmp_path) for _ in range(2))
    for l in (learn, twin):
        l.fit(1, .01)
        weights = params(l)
        if l is learn: l.lr_find(show_plot=False, num_it=8, suggest_funcs=None)
        assert same(params(l), weights)
        l.fit(1, .01)
    assert same(params(learn), params(twin)) and same_state(opt_state(learn.opt), opt_state(twin.opt))


def test_frozen_weights_are_not_rounded():
    learn = learner(opt_func=Adam, splitter=lambda m: [[*m[:2].parameters()], [*m[2:].parameters()]]).to_half_weights(master_weights=False)
    learn.create_opt(); learn.freeze()
    before = learn.model[0].weight.detach().clone()
    learn.fit(1, .01)
    assert torch.equal(learn.model[0].weight, before) and not torch.equal(before, before.bfloat16().float())
    learn.unfreeze(); learn.fit(1, .01)
    assert not torch.equal(learn.model[0].weight, before)


def test_kahan_summation_keeps_small_updates(recwarn):
    learn = without(kahan('SGD', weight_decay=0.), nn.Sequential(nn.Linear(6, 1)))
    with torch.no_grad(): learn.model[0].weight.fill_(1.)
    learn.add_cb(At('before_step', lambda l: l.model[0].weight.grad.fill_(1.), order=12))
    learn.fit(20, 1e-4)                                          # 120 steps of 1e-4
    assert torch.allclose(learn.model[0].weight, torch.full((1, 6), 1 - 120e-4), atol=2e-3)
    assert not [w for w in recwarn if 'did not move' in str(w.message)]
    one_cycle = without('kahan')
    one_cycle.fit_one_cycle(2, .01)
    assert len(set(one_cycle.recorder.hps['mom'])) > 1


def test_kahan_where_only_some_layers_train():
    "As `fine_tune` does first: on a CPU no driver of Triton's is asked for, also where the package is there."
    learn = without('kahan', splitter=lambda m: [[*m[0].parameters()], [*m[1:].parameters()]])
    frozen, before = learn.model[0].weight.detach().clone(), params(learn)
    learn.freeze(); learn.fit(1, .01)
    assert torch.equal(learn.model[0].weight, frozen) and not same(params(learn), before)
    learn.fine_tune(1, .01)
    assert not torch.equal(learn.model[0].weight, frozen) and all(p.isfinite().all() for p in params(learn))


def test_kahan_takes_optimis_optimizers_alone():
    import optimi
    by_class, by_name = (without(kahan(opt)) for opt in (optimi.AdamW, 'AdamW'))
    for learn in (by_class, by_name): learn.fit(1, .01)
    assert same(params(by_class), params(by_name))
    for opt in (torch.optim.AdamW, Adam, 'SGDW', 'optimi', None):
        with pytest.raises(ValueError, match="not one of optimi's optimizers. Take one of Adam, AdamW"): kahan(opt)


def test_stochastic_rounding_counts(recwarn):
    pytest.importorskip('torchao')
    for name in ('_AdamW', 'AdamW8bit'):
        learn = without(stochastic(name))
        learn.create_opt()
        assert compensates(learn.opt)
        with torch.compiler.set_stance('force_eager'): learn.fit_one_cycle(3, 1e-4)   # torchao compiles its step, which takes minutes
        assert len(set(learn.recorder.hps['lr'])) > 1 and not [w for w in recwarn if 'did not move' in str(w.message)]


@needs_copies
def test_bytes_per_parameter():
    def measure(to):
        rows = []
        learn = learner(nn.Sequential(nn.Linear(6, 512, bias=False), nn.Linear(512, 1, bias=False)), opt_func=partial(OptimWrapper, opt=torch.optim.AdamW))
        learn.add_cb(At('after_step', lambda l: rows.append(bytes_per_parameter(l)), order=11))
        to(learn).fit(1)
        return [round(v, 1) for v in rows[-1].values()]
    assert measure(lambda l: l) == [4, 4, 8, 0]
    assert measure(lambda l: l.to_bf16()) == [4, 4, 8, 2]
    assert measure(lambda l: l.to_half_weights()) == [4, 4, 8, 2]
    assert measure(lambda l: l.to_half_weights(flat_master=True)) == [4, 4, 8, 2]
    assert measure(lambda l: l.to_half_weights(master_weights=False)) == [2, 2, 4, 0]


def test_trains_as_in_fp32():
    fp32 = [final_loss('digits', 'fp32', seed) for seed in range(2)]
    spread = max(fp32) - min(fp32)
    assert abs(final_loss('digits', 'no masters, Kahan') - fp32[0]) < spread < final_loss('digits', 'no masters, not compensated') - max(fp32)


def new_optimizer(l): l.create_opt()
def new_data(l):
    for p in l.model.parameters(): p.data = p.data.float()
def whole_model(l): l.model.float()
def state_in_fp32(l):
    for s in state_of(l.opt).values(): s.update({k: v.float() for k, v in s.items() if isinstance(v, torch.Tensor)})


@pytest.mark.parametrize('change', [new_optimizer, new_data, whole_model, state_in_fp32])
@pytest.mark.parametrize('opt', ['adam', 'adamw', 'sgd'])
def test_what_callbacks_put_in_its_place_in_a_fit(opt, change):
    "It is brought to bf16 at the next step, and to fp32 at the end, with gradients and state."
    seen = set()
    cbs = [At('after_batch', lambda l: l.training and l.train_iter == 3 and change(l), 40),
           At('after_step', lambda l: l.train_iter > 3 and seen.update([l.model[0].weight.dtype, *(v.dtype for v in state_of(l.opt)[l.model[0].weight].values() if isinstance(v, torch.Tensor) and v.dim())]), 11)]
    learn = learner(opt_func=OPTIMIZERS[opt], cbs=cbs).to_half_weights(master_weights=False)
    learn.fit(1, .01)
    assert seen == {torch.bfloat16} and set(floating(learn)) == {torch.float32}
    assert all(p.dtype is torch.float32 and (p.grad is None or p.grad.dtype is torch.float32) for p in learn.model.parameters())
    learn.to_fp32().fit(1, .01)
