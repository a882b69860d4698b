"16-bit weights: with master weights the numbers of autocast; flat master weights; no master weights in a fit."

import copy
from functools import partial
from inspect import signature

import pytest, torch
from fastai.callback.core import CancelBatchException, CancelFitException
from fastai.callback.schedule import *
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.optimizer import SGD, Adam, Lamb, OptimWrapper, QHAdam, RAdam, RMSProp, ranger
from fastai.torch_core import trainable_params
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from fastxtend_amp import HalfWeights, kahan
from fastxtend_amp.insight.candidates import advised
from fastxtend_amp import AMPMode
from helpers import *
from interrupts import interrupted_before, lines_of

pytestmark = pytest.mark.filterwarnings('ignore:.*emulated.*', 'ignore:.*enable_nested_tensor.*')
FASTAI = {
    'sgd': SGD,
    'momentum': partial(SGD, mom=0.9),
    'l2': partial(SGD, mom=0.9, decouple_wd=False),
    'adam': Adam,
    'rms_prop': partial(RMSProp, mom=0.9),
    'radam': RAdam,
    'qhadam': QHAdam,
}


def two_groups(m):
    return [[*m[:2].parameters()], [*m[2:].parameters()]]


def trained(
    to='to_half_weights', opt=Adam, model=None, cbs=None, n_epoch=2, splitter=trainable_params, tmp=None, **kwargs
):
    learn = learner(model, opt_func=opt, cbs=cbs, wd=0.1, splitter=splitter, path=tmp)
    getattr(learn, to)(**kwargs).fit(n_epoch, 0.01)
    return learn


def equal(a, b):
    assert same(params(a), params(b)) and same([*a.model.buffers()], [*b.model.buffers()])
    assert same_state(opt_state(a.opt), opt_state(b.opt)) and repr(a.recorder.values) == repr(b.recorder.values)
    return True


def in_memory_of_their_own(learn):
    return all(p.untyped_storage().nbytes() == p.nbytes for p in learn.model.parameters())


def is_fp32(learn):
    return all(p.dtype is torch.float32 and p.isfinite().all() for p in learn.model.parameters())


# -- a model


class Zoo(nn.Module):
    "Weights that autocast casts inside their layer's own forward, and others; from (n, 6) to (n, 1)."

    given = ['own.weight', 'own.bias']  # bf16 by the user
    lowered = [
        'tied.bias',
        'pruned.bias',
        *(
            f'{layer}.{name}'
            for layer in ('conv', 'up', 'enc.linear1', 'enc.linear2', 'head')
            for name in ('weight', 'bias')
        ),
    ]

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.own, self.emb, self.tied = nn.Linear(6, 6).bfloat16(), nn.Embedding(16, 6), nn.Linear(6, 16)
        self.normed, self.pruned = parametrizations.weight_norm(nn.Linear(16, 6)), nn.Linear(6, 6)
        self.conv, self.up = nn.Conv2d(1, 2, 2), nn.ConvTranspose2d(2, 1, 2)
        self.enc, self.norm, self.head = (
            nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True),
            nn.BatchNorm1d(6),
            nn.Linear(6, 1),
        )
        self.tied.weight = self.emb.weight
        prune.l1_unstructured(self.pruned, 'weight', 0.5)

    def forward(self, x):
        x = self.own(x) + self.normed(self.tied(self.emb((x.abs() * 8).long().clamp(max=15)).mean(1)))
        x = x + self.up(self.conv(self.pruned(x).view(-1, 1, 2, 3))).flatten(1)
        x = self.norm(self.enc(x[:, None])[:, 0])
        return self.head(x) + F.linear(x, self.head.weight * 1.1)


# -- with master weights


def test_bf16_trains_as_under_autocast():
    bf16, plain, flat = trained('to_bf16', model=Zoo()), trained(model=Zoo()), trained(model=Zoo(), flat_master=True)
    assert equal(bf16, plain) and equal(bf16, flat) and in_memory_of_their_own(flat)


def overflow(l):
    l.loss_grad = l.loss_grad * (float('inf') if l.training and l.train_iter % 3 == 1 else 1.0)


@pytest.mark.parametrize('flat', [False, True])
@pytest.mark.parametrize(
    'scale,cbs',
    [({}, [At('before_backward', overflow)]), ({'loss_scale': 512.0}, [GradientAccumulation(8), GradientClip(0.05)])],
)
def test_fp16_trains_as_under_autocast(flat, scale, cbs):
    "With skipped steps; with a fixed loss scale, accumulation and clipping."
    fp16, ours = trained('to_fp16', cbs=cbs, **scale), trained(amp_mode='fp16', flat_master=flat, cbs=cbs, **scale)
    assert equal(fp16, ours) and fp16.precision.scales == ours.precision.scales
    assert ours.precision.state_dict() == fp16.precision.state_dict()
    assert len(ours.precision.scales) == 6 if scale else ours.precision.n_skipped >= 4


# -- flat master weights


@pytest.mark.parametrize('opt', FASTAI)
def test_fastais_optimizers_step_the_same_on_flat_masters(opt):
    "Groups, frozen ones, weight decay that spares some parameters, schedules, and fp32 afterwards."

    def run(flat):
        learn = learner(opt_func=FASTAI[opt], splitter=two_groups, wd=0.1, cbs=GradientClip(0.5)).to_half_weights(
            flat_master=flat
        )
        learn.create_opt()
        learn.freeze()
        learn.fit(1, 0.01)
        learn.unfreeze()
        learn.fit_one_cycle(2, slice(1e-3, 1e-2))
        assert in_memory_of_their_own(learn)
        learn.to_fp32().fit(1, 0.01)
        return learn

    equal(run(False), run(True))


class InStep(Learner):
    "Calls `look(learn)` when a step has been taken, still inside it."

    def _step(self):
        super()._step()
        self.look(self)


def test_only_the_optimizers_step_has_flat_parameters():
    seen, entries = [], set()
    look = At('after_step', lambda l: entries.add((*map(len, l.opt.param_lists), len(l.opt.state))), 11)
    learn = learner(cls=InStep, opt_func=Adam, splitter=two_groups, cbs=look, wd_bn_bias=True)
    learn.look = lambda l: seen.append([[p.numel() for p in pl] for pl in l.opt.param_lists])
    learn.to_half_weights(flat_master=True).fit(2, 0.01)
    assert seen == [[[56, 16], [9]]] * 12 and entries == {
        (4, 2, 6)
    }  # the state of batch norm differs: it also trains when frozen


def test_a_parameter_without_elements():
    "As fastai's tabular models have without continuous columns."

    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.empty = mlp(), nn.ParameterList(torch.empty(0) for _ in range(2))

        def forward(self, x):
            return self.net(x) + sum(p.sum() for p in self.empty)

    assert equal(trained('to_bf16', model=Skips()), trained(model=Skips(), flat_master=True))


def new_gradients(l):
    for p in l.model.parameters():
        p.grad = (p.grad * 2).t().contiguous().t().data  # of the same values in another order in memory


def new_weights(l):
    for p in [*l.model.parameters()][:3]:
        p.data = p.data * 0.9  # only the first of two that were joined


def loaded(l):
    l.opt.load_state_dict(copy.deepcopy(l.opt.state_dict()))


def reordered(l):
    l.opt.param_lists[0] = l.opt.param_lists[0][::-1]


def frozen(l):
    l.model[0].requires_grad_(False).zero_grad()


def decaying(l):
    l.opt.state[l.model[0].weight]['do_wd'] = True  # False for the bias


@pytest.mark.parametrize('change', [new_gradients, new_weights, loaded, reordered, frozen, decaying])
def test_what_a_callback_replaces_is_joined_anew(change):
    event = 'before_step' if change is new_gradients else 'after_batch'
    cbs = At(event, lambda l: change(l) if l.training and l.train_iter == 3 else None, 40)
    a, b = trained('to_bf16', cbs=cbs, splitter=two_groups), trained(cbs=cbs, splitter=two_groups, flat_master=True)
    assert equal(a, b) and in_memory_of_their_own(b)


def test_an_exception_in_the_step_leaves_weights_and_state_of_whole_steps():
    def run(to, **kwargs):
        learn = getattr(learner(cls=InStep, opt_func=Adam), to)(**kwargs)
        learn.look = lambda l: 1 / (l.train_iter != 3)
        with pytest.raises(ZeroDivisionError):
            learn.fit(1, 0.01)
        state, learn.look = opt_state(learn.opt), noop
        learn.fit(1, 0.01)
        return learn, state

    (a, before_a), (b, before_b) = run('to_bf16'), run('to_half_weights', flat_master=True)
    assert equal(a, b) and same_state(before_a, before_b) and in_memory_of_their_own(b)


# -- checkpoints and copies

BOTH = pytest.mark.parametrize(
    'kwargs,opt',
    [(dict(flat_master=True), Adam), (dict(master_weights=False), kahan())],
    ids=['flat', 'without masters'],
)


@BOTH
def test_files_lr_find_and_copies(tmp_path, kwargs, opt):
    "A file saved within a fit can be loaded in the same fit, and in plain fp32; files and copies continue alike."
    seen = []

    def look(l):
        if not l.training or l.train_iter not in (3, 5):
            return
        l.save('mid') if l.train_iter == 3 else l.load('mid')
        seen.append((params(l), opt_state(l.opt)))

    a = trained(opt=opt, cbs=At('after_batch', look, 20), n_epoch=1, tmp=tmp_path, **kwargs)
    a.remove_cb(At).save('end')
    weights, ((saved, state), (loaded, loaded_state)) = params(a), seen
    assert same(saved, loaded) and same_state(state, loaded_state)
    plain, b = (learner(opt_func=opt, path=tmp_path, wd=0.1) for _ in range(2))
    plain.load('mid'), b.to_half_weights(**kwargs).load('end')
    assert same(params(plain), [p.float() for p in saved])
    twin = copy.deepcopy(a)
    a.lr_find(show_plot=False, num_it=8, suggest_funcs=None)
    assert same(params(a), weights)
    for l in (plain, a, b, twin):
        l.fit(1, 0.01)
    assert is_fp32(plain) and all(
        same(params(a), params(l)) and same_state(opt_state(a.opt), opt_state(l.opt)) for l in (b, twin)
    )


# -- without master weights


def without(model=None, opt=None, **kwargs):
    return learner(model, opt_func=opt or kahan(), **kwargs).to_half_weights(master_weights=False)


def halves(learn):
    return [n for n, p in learn.model.named_parameters() if p.dtype is torch.bfloat16]


def dtypes_agree(learn):
    "Whether gradients and state have the dtype of their parameter."
    state = learn.opt.opt.state
    return all(
        t.dtype is p.dtype
        for p in learn.model.parameters()
        for t in (p.grad, *state[p].values())
        if torch.is_tensor(t) and t.dim() and t.is_floating_point()
    )


def test_which_weights_are_bf16_in_a_fit():
    "Gradients and state included, except torchao's count; afterwards all are fp32, except the user's own 16-bit ones."
    seen = []

    def look(l):
        seen.append((halves(l), dtypes_agree(l)))

    learn = without(Zoo(), cbs=[At('after_step', look, 11), At('after_validate', look, 11)])
    before, weights, count = [*learn.model.parameters()], params(learn), torch.tensor(257.0)  # 256 in bf16
    for _ in range(2):
        learn.fit(1, 0.01)
        assert halves(learn) == Zoo.given and dtypes_agree(learn)
        learn.opt.opt.state[learn.model.head.weight].setdefault('count', count)
    assert (
        seen == [(Zoo.given + Zoo.lowered, True)] * 14 and learn.opt.opt.state[learn.model.head.weight]['count'] == 257
    )
    assert all(p is q for p, q in zip(learn.model.parameters(), before)) and not same(params(learn), weights)


@pytest.mark.parametrize('kept,expected', [('0', ['3.weight', '3.bias']), ('(model)', [])])
def test_modules_kept_in_fp32_keep_their_weights(kept, expected):
    "Also in a compiled model, whose modules have other names."
    seen = []
    learn = learner(
        torch.compile(mlp(), backend='eager'),
        opt_func=kahan(),
        cbs=At('after_step', lambda l: seen.append(halves(l)), 11),
    )
    learn.to_half_weights(master_weights=False, fp32_modules=kept).fit(1, 0.01)
    assert seen == [[f'_orig_mod.{name}' for name in expected]] * 6 and not halves(learn)


def test_frozen_weights_are_not_rounded():
    learn = without(splitter=two_groups)
    for _ in range(2):
        with torch.no_grad():
            frozen = learn.model[0].weight.mul_(1.001).clone()  # no bf16 numbers
        learn.freeze()
        learn.fit(1, 0.01)
        assert torch.equal(learn.model[0].weight, frozen) and not torch.equal(frozen, frozen.bfloat16().float())
        learn.unfreeze()
        learn.fit(1, 0.01)  # optimi would use Triton for a group without gradients
        assert not torch.equal(learn.model[0].weight, frozen) and is_fp32(learn)


@pytest.mark.parametrize(
    'event,exc',
    [
        ('after_pred', RuntimeError),
        ('before_step', CancelFitException),
        ('before_step', KeyboardInterrupt),
        ('after_step', CancelBatchException),
        ('before_validate', KeyboardInterrupt),
        ('after_fit', RuntimeError),
    ],
)
@BOTH
def test_any_exception_leaves_fp32_weights(kwargs, opt, event, exc):
    def strike(l):
        if getattr(l, 'train_iter', 0) != 2:
            raise exc('struck')

    learn = learner(opt_func=opt, cbs=At(event, strike, 11)).to_half_weights(**kwargs)
    try:
        learn.fit(2, 0.01)
    except exc:
        pass
    assert is_fp32(learn) and in_memory_of_their_own(learn)
    assert all(p.grad is None or p.grad.dtype is torch.float32 for p in learn.model.parameters())
    learn.remove_cb(learn.at).fit(1, 0.01)
    assert is_fp32(learn)


def test_an_interrupt_at_any_line_leaves_weights_of_whole_steps():
    "Kahan's compensation is neither lost nor added twice."

    def fit(l):
        l.fit(1, 0.01)

    learn = without()
    fit(learn)

    def stop(l):
        raise CancelFitException

    done, one_step = copy.deepcopy(learn), copy.deepcopy(learn)
    fit(done)
    one_step.fit(1, 0.01, cbs=At('after_batch', stop))
    twin = copy.deepcopy(learn)
    for line in lines_of(lambda: fit(twin)):
        if not line[0].endswith('half_weights.py'):
            continue
        other = copy.deepcopy(learn)
        assert interrupted_before(line, lambda: fit(other)) and is_fp32(other)
        assert any(same(params(other), params(l)) for l in (learn, one_step, done))


def test_one_optimizer_goes_on_in_every_precision():
    learn, without_masters = learner(opt_func=kahan()), dict(master_weights=False)
    for to, kwargs in (
        ('to_fp32', {}),
        ('to_half_weights', without_masters),
        ('to_bf16', {}),
        ('to_half_weights', without_masters),
        ('to_half_weights', {}),
        ('to_fp32', {}),
    ):
        weights = params(learn)
        getattr(learn, to)(**kwargs).fit(1, 0.01)
        assert is_fp32(learn) and not same(params(learn), weights)


def test_a_learner_that_leaves_and_a_copy_made_in_a_fit_are_fp32():
    copies = []

    def leave(l):
        copies.extend(copy.deepcopy(l) for _ in range(2))
        l.to_fp32()

    learn = without(cbs=At('after_validate', leave))
    learn.fit(2, 0.01)
    assert is_fp32(learn) and learn.precision is None
    goes_on, in_fp32 = (l.remove_cb(At) for l in copies[:2])
    in_fp32.to_fp32()
    for l in (goes_on, in_fp32):
        l.fit(1, 0.01)
        assert is_fp32(l)


def test_kahan_summation_keeps_small_updates_in_a_fit_and_from_fit_to_fit():
    learn = learner(linear(), opt_func=kahan('SGD', weight_decay=0.0))
    learn.fit(1, 0.0)  # in fp32, for which optimi would not make it by itself
    with torch.no_grad():
        learn.model.weight.fill_(1.0)
    learn.add_cb(At('before_step', lambda l: l.model.weight.grad.fill_(1.0), order=12))
    learn.to_half_weights(master_weights=False).fit(10, 1e-4)
    for _ in range(10):
        learn.fit(1, 1e-4)  # 6 steps of 1e-4; half a unit of bf16 below 1 is 2e-3
    assert torch.allclose(learn.model.weight, torch.full((1, 6), 1 - 120e-4), atol=1e-4)


def test_a_file_from_within_a_fit_resumes_it_exactly(tmp_path):
    straight, resumed = (
        without(path=tmp_path, cbs=At('after_epoch', lambda l: l.save(str(l.epoch)), 70)),
        without(path=tmp_path),
    )
    straight.fit(3, 0.01)
    resumed.load('1').fit(1, 0.01)
    assert same(params(straight), params(resumed)) and same_state(opt_state(straight.opt), opt_state(resumed.opt))


def test_kahan_takes_optimis_optimizers_and_schedules_their_momentum():
    import optimi

    by_class, by_name = (without(opt=kahan(opt)) for opt in (optimi.AdamW, 'AdamW'))
    for learn in (by_class, by_name):
        learn.fit_one_cycle(1, 0.01)
    assert same(params(by_class), params(by_name)) and len(set(by_name.recorder.hps['mom'])) > 1
    for opt in (torch.optim.AdamW, Adam, 'SGDW', 'optimi', None):
        with pytest.raises(ValueError, match="not one of optimi's optimizers. Use one of those"):
            kahan(opt)
    with pytest.raises(TypeError, match=r"AdamW\(\) has no argument 'bogus'"):
        kahan('AdamW', weight_decay=0.1, bogus=1)


# -- arguments and errors


@pytest.mark.parametrize(
    'kwargs,text',
    [
        (dict(loss_scale=512.0), "loss_scale=512.0 cannot be used with amp_mode='bf16'"),
        (dict(amp_mode='fp16', loss_scale=0.0), 'loss_scale=0.0'),
        (dict(flat_master=True, master_weights=False), 'flat_master=True cannot be used with master_weights=False'),
        (dict(amp_mode='fp16', master_weights=False), "master_weights=False cannot be used with amp_mode='fp16'"),
    ],
)
def test_bad_arguments_are_named(kwargs, text):
    learn = learner().to_fp16()
    with pytest.raises(ValueError) as e:
        learn.to_half_weights(**kwargs)
    assert text in str(e.value) and learn.precision.mode == 'fp16'


def with_own_step():
    learn = learner(opt_func=Adam)
    learn.create_opt()
    learn.opt.step = learn.opt.step
    return learn


SPARSE, CHANNELS_LAST = (
    nn.Embedding(16, 6, sparse=True),
    nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last),
)  # never run
FLAT, NONE = (
    (dict(flat_master=True), "fused('AdamW')"),
    (dict(master_weights=False), "kahan('AdamW')"),
)  # arguments, remedy


@pytest.mark.parametrize(
    'how,what,make',
    [
        (FLAT, 'Lamb', lambda: learner(opt_func=Lamb)),
        (FLAT, 'Lookahead', lambda: learner(opt_func=ranger)),
        (FLAT, 'AdamW', lambda: learner(opt_func=OPTIMIZERS['adamw'])),
        (FLAT, 'Adam, which is not .* with a plain step', with_own_step),
        (FLAT, "parameter 'weight', which has sparse gradients", lambda: learner(SPARSE, opt_func=SGD)),
        (
            FLAT,
            "parameter '0.bias', which is shared",
            lambda: learner(splitter=lambda m: [[*m.parameters()], [m[0].bias]]),
        ),
        (FLAT, "parameter 'weight', which is not contiguous", lambda: learner(CHANNELS_LAST)),
        (NONE, 'Adam, ', lambda: learner(opt_func=Adam)),
        (NONE, 'AdamW, ', lambda: learner(opt_func=OPTIMIZERS['adamw'])),
        (NONE, 'Lookahead, ', lambda: learner(opt_func=ranger)),
        (NONE, 'AdamW, ', lambda: learner(opt_func=kahan('AdamW', kahan_sum=False))),
    ],
)
def test_optimizers_and_parameters_that_are_refused(how, what, make):
    (kwargs, remedy), learn = how, make()
    (argument, value), before, places = (
        [*kwargs.items()][0],
        params(learn),
        [p.data_ptr() for p in learn.model.parameters()],
    )
    learn.to_half_weights(**kwargs)
    with pytest.raises(ValueError, match=f'{argument}={value} cannot be used with {what}') as e:
        learn.fit(1, reset_opt=False)
    assert f'opt_func={remedy}' in str(e.value) and same(params(learn), before) and not halves(learn)
    assert [p.data_ptr() for p in learn.model.parameters()] == places


@pytest.mark.parametrize(
    'kwargs,before,then',
    [(dict(flat_master=True), Adam, OPTIMIZERS['fused adamw']), (dict(master_weights=False), kahan('AdamW'), Adam)],
)
def test_an_optimizer_that_is_exchanged_in_a_fit_leaves_no_half_weights(kwargs, before, then):
    def exchange(l):
        l.opt = then(l.splitter(l.model), lr=0.01)

    learn = learner(opt_func=before, cbs=At('after_batch', exchange)).to_half_weights(**kwargs)
    if 'flat_master' in kwargs:
        with pytest.raises(ValueError, match='flat_master=True cannot be used with AdamW'):
            learn.fit(1, 0.01)
    else:
        learn.fit(1, 0.01)
    assert is_fp32(learn) and not torch.is_autocast_enabled('cpu')
    learn.remove_cb(At)
    learn.to_bf16().fit(1, 0.01)


@pytest.mark.torchao
def test_stochastic_rounding_is_taken():
    from torchao import optim

    def build(params, lr):
        opt = optim._AdamW(params, lr=lr, bf16_stochastic_round=True)

        def as_tensors(opt, *_):  # torchao needs tensors, but fastai sets numbers
            for g in opt.param_groups:
                g['lr'] = torch.as_tensor(g['lr'], dtype=torch.float32)

        opt.register_step_pre_hook(as_tensors)
        return opt

    learn = without(opt=partial(OptimWrapper, opt=build))
    weights = params(learn)
    with torch.compiler.set_stance('force_eager'):
        learn.fit(1, 1e-3)  # torchao compiles its step, which needs minutes
    assert is_fp32(learn) and not same(params(learn), weights)


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_several_processes(one_process):
    "DDP trains with master weights, also flat ones; without them DDP and FSDP2 raise an error."
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def ddp():
        return nn.parallel.DistributedDataParallel(mlp())

    bf16, plain, flat = trained('to_bf16', model=ddp()), trained(model=ddp()), trained(model=ddp(), flat_master=True)
    assert equal(bf16, plain) and equal(bf16, flat)
    with pytest.raises(ValueError, match='master_weights=False cannot be used with DistributedDataParallel'):
        without(ddp()).fit(1)

    def sharded():
        return fully_shard(mlp(), mesh=init_device_mesh('cpu', (1,)))

    with pytest.raises(ValueError, match=r"with FSDP2(.|\n)*`learn.to_bf16\(\)`"):
        without(sharded()).fit(1)
    with pytest.raises(
        ValueError, match="flat_master=True cannot be used with parameter '0.weight', which is shared, sharded"
    ):
        trained(model=sharded(), flat_master=True)


def test_what_help_shows_and_a_report_advises():
    assert {'flat_master', 'master_weights'} < {*signature(HalfWeights).parameters}
    learn = learner().to_half_weights('fp16', 512.0, flat_master=True, fp32_modules='0')
    call = repr(advised(learn, AMPMode.FP16))
    assert call == "learn.to_half_weights(amp_mode='fp16', loss_scale=512.0, flat_master=True, fp32_modules=['0'])"
    assert repr(advised(learn, AMPMode.BF16)) == "learn.to_half_weights(flat_master=True, fp32_modules=['0'])"
