"Half weights: with masters the numbers of autocast; flat masters that nobody sees; no masters, in a fit alone."
import copy
from functools import partial

import pytest, torch
from fastai.callback.core import CancelBatchException, CancelFitException
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.optimizer import SGD, Adam, Lamb, Optimizer, OptimWrapper, QHAdam, RAdam, RMSProp, ranger
from fastai.torch_core import trainable_params
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from fastxtend_amp import kahan
from fastxtend_amp.insight.precisions import precision_call
from fastxtend_amp.mode import AMPMode
from helpers import *

pytestmark = pytest.mark.filterwarnings('ignore:.*emulated.*', 'ignore:.*enable_nested_tensor.*')
FASTAI = {'sgd': SGD, 'momentum': partial(SGD, mom=.9), 'l2': partial(SGD, mom=.9, decouple_wd=False), 'adam': Adam,
          'rms_prop': partial(RMSProp, mom=.9), 'radam': RAdam, 'qhadam': QHAdam}


def two_groups(m): return [[*m[:2].parameters()], [*m[2:].parameters()]]


def trained(to='to_half_weights', opt=Adam, model=None, cbs=None, n_epoch=2, splitter=trainable_params, tmp=None, **kwargs):
    learn = learner(model, opt_func=opt, cbs=cbs, wd=.1, splitter=splitter, path=tmp)
    getattr(learn, to)(**kwargs).fit(n_epoch, .01)
    return learn


def equal(a, b):
    assert same(params(a), params(b)) and same([*a.model.buffers()], [*b.model.buffers()])
    assert same_state(opt_state(a.opt), opt_state(b.opt)) and repr(a.recorder.values) == repr(b.recorder.values)
    return True


def in_memory_of_their_own(learn): return all(p.untyped_storage().nbytes() == p.nbytes for p in learn.model.parameters())
def is_fp32(learn): return all(p.dtype is torch.float32 and p.isfinite().all() for p in learn.model.parameters())
def state_tensors(learn): return [v for s in learn.opt.opt.state.values() for v in s.values() if isinstance(v, torch.Tensor)]


# -- models

class Layers(nn.Module):
    "Two layers and a function of model and input, from (n, 6) to (n, 1)."
    def __init__(self, f, **more):
        torch.manual_seed(0)
        super().__init__()
        self.a, self.b, self.head, self.f = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1), f
        for name, make in more.items(): setattr(self, name, make())
    def forward(self, x): return self.head(self.f(self, x))


def tied_embedding():
    m = Layers(lambda m, x: m.logits(m.emb((x.abs() * 8).long().clamp(max=15)).mean(1))[:, :6],
               emb=lambda: nn.Embedding(16, 6), logits=lambda: nn.Linear(6, 16))
    m.logits.weight = m.emb.weight
    return m


def computed(change):
    m = Layers(lambda m, x: m.b(torch.tanh(m.a(x))))
    change(m.a)
    return m


def images():
    return Layers(lambda m, x: m.up(m.conv(x.repeat(1, 6)[:, :32].view(-1, 2, 4, 4))).flatten(1)[:, :6],
                  conv=lambda: nn.Conv2d(2, 2, 2), up=lambda: nn.ConvTranspose2d(2, 2, 2))


def encoder(): return nn.TransformerEncoderLayer(6, 2, 12, 0., batch_first=True)


MODELS = {                                                       # with the number of weights and biases that can be bf16
    'mlp': (mlp, 4), 'tied to an embedding': (tied_embedding, 7),
    'pruned': (lambda: computed(lambda a: prune.l1_unstructured(a, 'weight', .5)), 5),
    'parametrized': (lambda: computed(parametrizations.weight_norm), 4),
    'convolutions': (images, 10),
    'transformer': (lambda: Layers(lambda m, x: m.enc(x[:, None] + m.a(x)[:, None])[:, 0], enc=encoder), 10),
    'weights used directly': (lambda: Layers(lambda m, x: F.linear(torch.tanh(m.a(x)), m.a.weight * 1.1)), 6),
}


# -- with masters

@pytest.mark.parametrize('name', MODELS)
def test_each_model_trains_as_under_autocast(name):
    model = MODELS[name][0]
    bf16, plain, flat = trained('to_bf16', model=model()), trained(model=model()), trained(model=model(), flat_master=True)
    assert equal(bf16, plain) and equal(bf16, flat) and in_memory_of_their_own(flat)


def overflow(l): l.loss_grad = l.loss_grad * (float('inf') if l.training and l.train_iter % 3 == 1 else 1.)


@pytest.mark.parametrize('flat', [False, True])
@pytest.mark.parametrize('scale,cbs', [({}, [At('before_backward', overflow)]), ({'loss_scale': 512.}, [GradientAccumulation(8), GradientClip(.05)])])
def test_fp16_trains_as_under_autocast(flat, scale, cbs):
    "With skipped steps; with a static scale, accumulation and clipping."
    fp16, ours = trained('to_fp16', cbs=cbs, **scale), trained(amp_mode='fp16', flat_master=flat, cbs=cbs, **scale)
    assert equal(fp16, ours) and fp16.precision.scales == ours.precision.scales
    assert ours.precision.state_dict() == fp16.precision.state_dict()
    assert len(ours.precision.scales) == 6 if scale else ours.precision.n_skipped >= 4


# -- flat masters

@pytest.mark.parametrize('opt', FASTAI)
def test_fastais_optimizers_step_the_same_on_flat_masters(opt):
    "Groups, frozen ones, weight decay that spares some parameters, schedules, and fp32 afterwards."
    def run(flat):
        learn = learner(opt_func=FASTAI[opt], splitter=two_groups, wd=.1, cbs=GradientClip(.5)).to_half_weights(flat_master=flat)
        learn.create_opt(); learn.freeze(); learn.fit(1, .01)
        learn.unfreeze(); learn.fit_one_cycle(2, slice(1e-3, 1e-2))
        assert in_memory_of_their_own(learn)
        learn.to_fp32().fit(1, .01)
        return learn
    equal(run(False), run(True))


class InStep(Learner):
    "Calls `look(learn)` when a step has been taken, still inside it."
    def _step(self): super()._step(); self.look(self)


def test_only_the_optimizers_step_has_flat_parameters():
    seen, entries = [], set()
    look = At('after_step', lambda l: entries.add((*map(len, l.opt.param_lists), len(l.opt.state))), 11)
    learn = learner(cls=InStep, opt_func=Adam, splitter=two_groups, cbs=look, wd_bn_bias=True)
    learn.look = lambda l: seen.append([[p.numel() for p in pl] for pl in l.opt.param_lists])
    learn.to_half_weights(flat_master=True).fit(2, .01)
    assert seen == [[[56, 16], [9]]] * 12 and entries == {(4, 2, 6)}   # batch norm's state differs: it trains when frozen, too


def no_gradients(l):
    for p in l.model.parameters(): p.grad = None
def new_gradients(l):
    for p in l.model.parameters(): p.grad = p.grad * 2
def new_weights(l):
    for p in [*l.model.parameters()][:2]: p.data = p.data * .9
def partly_cleared(l): l.opt.state[l.model[0].weight].clear()
def loaded(l): l.opt.load_state_dict(copy.deepcopy(l.opt.state_dict()))
def regrouped(l): l.opt.param_lists[0].append(l.opt.param_lists[1].pop(0))
def frozen(l): l.model[0].requires_grad_(False); no_gradients(l)
def no_decay(l): l.opt.state[l.model[0].weight]['do_wd'] = False
@pytest.mark.parametrize('change', [no_gradients, new_gradients, new_weights, partly_cleared, loaded, regrouped, frozen, no_decay])
def test_what_a_callback_replaces_is_joined_anew(change):
    event = 'before_step' if change is new_gradients else 'after_batch'
    cbs = At(event, lambda l: change(l) if l.training and l.train_iter == 3 else None, 40)
    a, b = trained('to_bf16', cbs=cbs, splitter=two_groups), trained(cbs=cbs, splitter=two_groups, flat_master=True)
    assert equal(a, b) and in_memory_of_their_own(b)


def test_an_exception_in_the_step_leaves_weights_and_state_of_whole_steps():
    def run(to, **kwargs):
        learn, steps = getattr(learner(cls=InStep, opt_func=Adam), to)(**kwargs), []
        def strike(l):
            steps.append(1)
            if len(steps) == 4: raise KeyboardInterrupt
        learn.look = strike
        with pytest.raises(KeyboardInterrupt): learn.fit(1, .01)
        state = opt_state(learn.opt)
        learn.fit(1, .01)
        return learn, state
    (a, before_a), (b, before_b) = run('to_bf16'), run('to_half_weights', flat_master=True)
    assert equal(a, b) and same_state(before_a, before_b) and in_memory_of_their_own(b)


# -- checkpoints and copies

BOTH = pytest.mark.parametrize('kwargs,opt', [(dict(flat_master=True), Adam), (dict(master_weights=False), kahan())],
                               ids=['flat', 'without masters'])


@BOTH
def test_saved_and_loaded_in_mid_fit(tmp_path, kwargs, opt):
    "The file goes on in plain fp32, too."
    seen = []
    def look(l):
        if not l.training or l.train_iter not in (3, 5): return
        if l.train_iter == 3: l.save('mid')
        else: l.load('mid')
        seen.append((params(l), opt_state(l.opt)))
    learn = trained(opt=opt, cbs=At('after_batch', look, 20), n_epoch=1, tmp=tmp_path, **kwargs)
    (saved, state), (loaded, loaded_state) = seen
    assert same(saved, loaded) and same_state(state, loaded_state)
    plain = learner(opt_func=opt, path=tmp_path, wd=.1)
    plain.create_opt(); plain.load('mid')
    assert same(params(plain), [p.float() for p in saved])
    plain.fit(1, .01)
    assert is_fp32(plain) and is_fp32(learn)


@BOTH
def test_files_lr_find_and_copies_between_fits(tmp_path, kwargs, opt):
    a = trained(opt=opt, n_epoch=1, tmp=tmp_path, **kwargs)
    a.save('a')
    weights = params(a)
    b = learner(opt_func=opt, path=tmp_path, wd=.1).to_half_weights(**kwargs)
    b.create_opt(); b.load('a')
    twin = copy.deepcopy(a)
    a.lr_find(show_plot=False, num_it=8, suggest_funcs=None)
    assert same(params(a), weights)
    for l in (a, b, twin): l.fit(1, .01)
    for l in (b, twin): assert same(params(a), params(l)) and same_state(opt_state(a.opt), opt_state(l.opt))


# -- without masters

def without(model=None, opt=None, **kwargs):
    return learner(model, opt_func=opt or kahan(), **kwargs).to_half_weights(master_weights=False)


def halves(learn): return [n for n, p in learn.model.named_parameters() if p.dtype is torch.bfloat16]
def state_dtypes(learn): return {t.dtype for t in state_tensors(learn) if t.dim()}


@pytest.mark.parametrize('name', MODELS)
def test_which_weights_are_bf16_in_a_fit(name):
    "Those that autocast casts inside their module's own forward; gradients and state, too; fp32 again after the fit."
    seen = []
    def look(l): seen.append((halves(l), state_dtypes(l), all(p.grad.dtype is p.dtype for p in l.model.parameters() if p.grad is not None)))
    model, n_bf16 = MODELS[name]
    learn = without(model(), cbs=[At('after_step', look, 11), At('after_validate', look, 11)])
    before, weights = [*learn.model.parameters()], params(learn)
    learn.fit(2, .01)
    assert len(seen) == 14 and all(len(n) == n_bf16 and grads for n, _, grads in seen)
    assert torch.bfloat16 in seen[0][1] and is_fp32(learn) and state_dtypes(learn) == {torch.float32}
    assert all(p is q for p, q in zip(learn.model.parameters(), before)) and not same(params(learn), weights)
    assert all(p.grad is None or p.grad.dtype is torch.float32 for p in learn.model.parameters())


@pytest.mark.parametrize('kept,expected', [('0', ['3.weight', '3.bias']), ('(model)', [])])
def test_modules_kept_in_fp32_keep_their_weights(kept, expected):
    "In a compiled model, too, whose modules have other names."
    seen = []
    learn = learner(torch.compile(mlp(), backend='eager'), opt_func=kahan(), cbs=At('after_step', lambda l: seen.append(halves(l)), 11))
    learn.to_half_weights(master_weights=False, fp32_modules=kept).fit(1, .01)
    assert seen == [[f'_orig_mod.{name}' for name in expected]] * 6 and not halves(learn)


def test_frozen_weights_are_not_rounded():
    learn = without(splitter=two_groups)
    frozen = learn.model[0].weight.detach().clone()
    learn.freeze(); learn.fit(1, .01)
    assert torch.equal(learn.model[0].weight, frozen) and not torch.equal(frozen, frozen.bfloat16().float())
    learn.unfreeze(); learn.fit(1, .01)                          # optimi would take Triton for a group that had no gradients
    assert not torch.equal(learn.model[0].weight, frozen) and is_fp32(learn)


@pytest.mark.parametrize('event,exc', [
    ('after_pred', RuntimeError), ('before_step', CancelFitException), ('before_step', KeyboardInterrupt),
    ('after_step', CancelBatchException), ('before_validate', KeyboardInterrupt), ('after_fit', RuntimeError)])
@BOTH
def test_any_exception_leaves_fp32_weights(kwargs, opt, event, exc):
    def strike(l):
        if getattr(l, 'train_iter', 0) != 2: raise exc('struck')
    learn = learner(opt_func=opt, cbs=At(event, strike, 11)).to_half_weights(**kwargs)
    try: learn.fit(2, .01)
    except exc: pass
    assert is_fp32(learn) and in_memory_of_their_own(learn)
    assert all(p.grad is None or p.grad.dtype is torch.float32 for p in learn.model.parameters())
    learn.remove_cb(learn.at)
    learn.fit(1, .01)
    assert is_fp32(learn)


def test_one_optimizer_goes_on_in_every_precision():
    learn, without_masters = learner(opt_func=kahan()), dict(master_weights=False)
    for to, kwargs in (('to_fp32', {}), ('to_half_weights', without_masters), ('to_bf16', {}),
                       ('to_half_weights', without_masters), ('to_half_weights', {}), ('to_fp32', {})):
        weights = params(learn)
        getattr(learn, to)(**kwargs).fit(1, .01)
        assert is_fp32(learn) and not same(params(learn), weights)


def test_taken_off_in_mid_fit():
    learn = without(cbs=At('after_batch', lambda l: l.to_fp32() if l.training and l.train_iter == 3 else None, 20))
    learn.fit(1, .01)
    assert is_fp32(learn) and learn.precision is None


def test_kahan_summation_keeps_small_updates():
    learn = without(linear(), kahan('SGD', weight_decay=0.))
    with torch.no_grad(): learn.model.weight.fill_(1.)
    learn.add_cb(At('before_step', lambda l: l.model.weight.grad.fill_(1.), order=12))
    learn.fit(20, 1e-4)                                          # 120 steps of 1e-4; half a unit of bf16 below 1 is 2e-3
    assert torch.allclose(learn.model.weight, torch.full((1, 6), 1 - 120e-4), atol=2e-3)


def test_small_updates_are_kept_from_fit_to_fit():
    learn = without(linear(), kahan('SGD', weight_decay=0.), cbs=At('before_step', lambda l: l.model.weight.grad.fill_(1.), order=12))
    with torch.no_grad(): learn.model.weight.fill_(1.)
    for _ in range(20): learn.fit(1, 1e-4)                       # 6e-4 a fit, which bf16 alone would lose
    assert torch.allclose(learn.model.weight, torch.full((1, 6), 1 - 120e-4), atol=1e-4)


def test_kahan_takes_optimis_optimizers_and_schedules_their_momentum():
    import optimi
    by_class, by_name = (without(opt=kahan(opt)) for opt in (optimi.AdamW, 'AdamW'))
    for learn in (by_class, by_name): learn.fit_one_cycle(1, .01)
    assert same(params(by_class), params(by_name)) and len(set(by_name.recorder.hps['mom'])) > 1
    for opt in (torch.optim.AdamW, Adam, 'SGDW', 'optimi', None):
        with pytest.raises(ValueError, match="not one of optimi's optimizers. Take one of those"): kahan(opt)


@pytest.mark.parametrize('kwargs,opt,expected', [({}, OPTIMIZERS['adamw'], 16), (dict(master_weights=False), kahan(), 10)])
def test_bytes_a_parameter(kwargs, opt, expected):
    "Of weights, gradients and the optimizer's state, inside a step; autocast's casts are 2 more with masters."
    found = []
    def count(l):
        weights = [*l.model.parameters()]
        tensors = [*weights, *(p.grad for p in weights), *state_tensors(l)]
        found.append(sum(t.nbytes for t in tensors) / sum(p.numel() for p in weights))
    model = nn.Sequential(nn.Linear(6, 512, bias=False), nn.Linear(512, 1, bias=False))
    learner(model, opt_func=opt, cbs=At('after_step', count, 11)).to_half_weights(**kwargs).fit(1)
    assert round(found[-1]) == expected


# -- arguments and refusals

@pytest.mark.parametrize('kwargs,text', [
    (dict(loss_scale=512.), "loss_scale=512.0 cannot be used with amp_mode='bf16'"),
    (dict(amp_mode='fp16', loss_scale=0.), 'loss_scale=0.0'),
    (dict(flat_master=True, master_weights=False), 'flat_master=True cannot be used with master_weights=False'),
    (dict(amp_mode='fp16', master_weights=False), "master_weights=False cannot be used with amp_mode='fp16'"),
])
def test_bad_arguments_are_named(kwargs, text):
    learn = learner().to_fp16()
    with pytest.raises(ValueError) as e: learn.to_half_weights(**kwargs)
    assert text in str(e.value) and learn.precision.mode == 'fp16'


class Tokens(nn.Module):
    def __init__(self): super().__init__(); self.emb, self.head = nn.Embedding(16, 6, sparse=True), nn.Linear(6, 1)
    def forward(self, x): return self.head(self.emb((x[:, 0].abs() * 8).long().clamp(max=15)))


def with_own_step():
    learn = learner(opt_func=Adam)
    learn.create_opt()
    learn.opt.step = learn.opt.step
    return learn


def channels_last(): return nn.Sequential(nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last), nn.Linear(1, 1))
def halved_step(p, lr, **kwargs): p.data.add_(p.grad.data, alpha=-lr / 2)


FLAT, NONE = (dict(flat_master=True), "fused('AdamW')"), (dict(master_weights=False), "kahan('AdamW')")   # arguments, remedy


@pytest.mark.parametrize('how,what,make', [
    (FLAT, 'Lamb', lambda: learner(opt_func=Lamb)), (FLAT, 'Lookahead', lambda: learner(opt_func=ranger)),
    (FLAT, 'AdamW', lambda: learner(opt_func=OPTIMIZERS['adamw'])),
    (FLAT, 'Halved', lambda: learner(opt_func=partial(Optimizer, cbs=[halved_step]))),
    (FLAT, 'Adam, which is not .* with a plain step', with_own_step),
    (FLAT, "parameter 'emb.weight', which has sparse gradients", lambda: learner(Tokens(), opt_func=SGD)),
    (FLAT, "parameter '0.bias', which is shared", lambda: learner(splitter=lambda m: [[*m.parameters()], [m[0].bias]])),
    (FLAT, "parameter '0.weight', which is not contiguous", lambda: learner(channels_last())),
    (NONE, 'Adam, ', lambda: learner(opt_func=Adam)), (NONE, 'AdamW, ', lambda: learner(opt_func=OPTIMIZERS['adamw'])),
    (NONE, 'Lookahead, ', lambda: learner(opt_func=ranger)), (NONE, 'AdamW, ', lambda: learner(opt_func=kahan('AdamW', kahan_sum=False)))])
def test_optimizers_and_parameters_that_are_refused(how, what, make):
    (kwargs, remedy), learn = how, make()
    (argument, value), before = [*kwargs.items()][0], params(learn)
    learn.to_half_weights(**kwargs)
    with pytest.raises(ValueError, match=f'{argument}={value} cannot be used with {what}') as e: learn.fit(1, reset_opt=False)
    assert f'opt_func={remedy}' in str(e.value) and same(params(learn), before) and not halves(learn)


def test_an_optimizer_that_is_exchanged_between_two_fits_is_refused():
    learn = without()
    learn.fit(1, .01)
    learn.opt = Adam(learn.model.parameters(), lr=.01)
    with pytest.raises(ValueError, match='master_weights=False cannot be used with Adam'): learn.fit(1)


@pytest.mark.parametrize('kwargs,before,then', [(dict(flat_master=True), Adam, OPTIMIZERS['fused adamw']),
                                                (dict(master_weights=False), kahan('AdamW'), Adam)])
def test_an_optimizer_that_is_exchanged_in_a_fit_leaves_no_half_weights(kwargs, before, then):
    def exchange(l): l.opt = then(l.splitter(l.model), lr=.01)
    learn = learner(opt_func=before, cbs=At('after_batch', exchange)).to_half_weights(**kwargs)
    if 'flat_master' in kwargs:
        with pytest.raises(ValueError, match='flat_master=True cannot be used with AdamW'): learn.fit(1, .01)
    else: learn.fit(1, .01)
    assert is_fp32(learn) and not torch.is_autocast_enabled('cpu')
    learn.remove_cb(At)
    learn.to_bf16().fit(1, .01)


def test_a_copy_that_is_made_in_a_fit_without_masters_is_fp32_after_its_own():
    copies = []
    learn = without(cbs=At('after_validate', lambda l: copies.append(copy.deepcopy(l))))
    learn.fit(1, .01)
    other = copies[0]
    other.remove_cb(At)
    other.fit(1, .01)
    assert is_fp32(other) and is_fp32(learn)


def test_stochastic_rounding_is_taken():
    optim = pytest.importorskip('torchao.optim')
    def build(params, lr):
        opt = optim._AdamW(params, lr=lr, bf16_stochastic_round=True)
        def as_tensors(opt, *_):                                 # torchao wants tensors, and fastai sets numbers
            for g in opt.param_groups: g['lr'] = torch.as_tensor(g['lr'], dtype=torch.float32)
        opt.register_step_pre_hook(as_tensors)
        return opt
    learn = without(opt=partial(OptimWrapper, opt=build))
    weights = params(learn)
    with torch.compiler.set_stance('force_eager'): learn.fit(1, 1e-3)   # torchao compiles its step, which takes minutes
    assert is_fp32(learn) and not same(params(learn), weights)


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_several_processes(one_process):
    "DDP trains with masters, flat ones too; without masters it is refused, and FSDP2."
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    def ddp(): return nn.parallel.DistributedDataParallel(mlp())
    bf16, plain, flat = trained('to_bf16', model=ddp()), trained(model=ddp()), trained(model=ddp(), flat_master=True)
    assert equal(bf16, plain) and equal(bf16, flat)
    with pytest.raises(ValueError, match='master_weights=False cannot be used with DistributedDataParallel'): without(ddp()).fit(1)
    def sharded(): return fully_shard(mlp(), mesh=init_device_mesh('cpu', (1,)))
    with pytest.raises(ValueError, match=r"with FSDP2(.|\n)*`learn.to_bf16\(\)`"): without(sharded()).fit(1)
    with pytest.raises(ValueError, match="flat_master=True cannot be used with parameter '0.weight', which is shared, sharded"):
        trained(model=sharded(), flat_master=True)


def test_what_a_report_advises():
    learn = learner().to_half_weights('fp16', 512., flat_master=True, fp32_modules='0')
    call = precision_call(learn, AMPMode.FP16)
    assert call == "learn.to_half_weights(amp_mode='fp16', loss_scale=512.0, flat_master=True, fp32_modules=['0'])"
    assert precision_call(learn, AMPMode.BF16) == "learn.to_half_weights(flat_master=True, fp32_modules=['0'])"
