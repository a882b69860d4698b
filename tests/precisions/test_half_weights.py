"16-bit weights: with master weights the numbers of autocast; flat master weights; no master weights in a fit."

import fastai.callback.schedule  # noqa: F401  patches Learner
import pytest
from contextlib import nullcontext
from fastai.optimizer import Lamb, QHAdam, RAdam, RMSProp, ranger
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from training.rows import *

pytestmark = pytest.mark.filterwarnings('ignore:.*emulated.*', 'ignore:.*enable_nested_tensor.*', 'ignore:.*16-bit.*')
OWN = {**OPTS, 'l2': partial(SGD, mom=0.9, decouple_wd=False), 'plain sgd': SGD}
OWN.update({'rms_prop': partial(RMSProp, mom=0.9), 'radam': RAdam, 'qhadam': QHAdam, 'lamb': Lamb, 'ranger': ranger})
FLAT, NONE = dict(flat_master=True), dict(master_weights=False)


def two_groups(m):
    return [[*m[:2].parameters()], [*m[2:].parameters()]]


def built(to='half_weights', model=None, opt='adam', cls=Learner, cbs=None, splitter=None, path=None, **kwargs):
    splitter = {'splitter': splitter} if splitter else {}
    learn = learner(model, opt_func=OWN[opt], cls=cls, cbs=cbs, wd=0.1, path=path, **splitter)
    return getattr(learn, f'to_{to}')(**kwargs)


def after(learn, n=2):
    learn.fit(n, 0.01)
    return learn


def alike(*learners):
    first, *others = map(result, learners)
    return all(differences(first, other) == [] for other in others)


def in_memory_of_their_own(learn):
    return all(p.untyped_storage().nbytes() == p.nbytes for p in learn.model.parameters())


def is_fp32(learn):
    return all(p.dtype is FP32 and p.isfinite().all() for p in learn.model.parameters())


class Zoo(nn.Module):
    "Weights that autocast casts inside their layer's own forward, and others; from (n, 6) to (n, 1)."

    given = ['own.weight', 'own.bias']  # 16-bit by the user
    lowered = ['tied.bias', 'pruned.bias']
    lowered += [f'{m}.{p}' for m in ('conv', 'up', 'enc.linear1', 'enc.linear2', 'head') for p in ('weight', 'bias')]

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.own, self.emb, self.tied = nn.Linear(6, 6).bfloat16(), nn.Embedding(16, 6), nn.Linear(6, 16)
        self.normed, self.pruned = parametrizations.weight_norm(nn.Linear(16, 6)), nn.Linear(6, 6)
        self.conv, self.up = nn.Conv2d(1, 2, 2), nn.ConvTranspose2d(2, 1, 2)
        self.enc = nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True)
        self.norm, self.head, self.empty = nn.BatchNorm1d(6), nn.Linear(6, 1), nn.Parameter(torch.empty(0))
        self.tied.weight = self.emb.weight
        prune.l1_unstructured(self.pruned, 'weight', 0.5)

    def forward(self, x):
        x = self.own(x) + self.normed(self.tied(self.emb((x.abs() * 8).long().clamp(max=15)).mean(1)))
        x = x + self.up(self.conv(self.pruned(x).view(-1, 1, 2, 3))).flatten(1)
        x = self.norm(self.enc(x[:, None])[:, 0])
        return self.head(x) + F.linear(x, self.head.weight * 1.1) + self.empty.sum()


# -- with master weights


def test_trains_as_under_autocast():
    bf16, plain, flat = (
        after(built(to, Zoo(), **kw)) for to, kw in (('bf16', {}), ('half_weights', {}), ('half_weights', FLAT))
    )
    assert alike(bf16, plain, flat) and in_memory_of_their_own(flat)
    cbs = lambda: [spoil_at(1, 4), GradientClip(0.05)]
    fp16, flat = after(built('fp16', cbs=cbs())), after(built(amp_mode='fp16', cbs=cbs(), **FLAT))
    assert (
        alike(fp16, flat)
        and fp16.mixed_precision.skips == flat.mixed_precision.skips
        and sum(flat.mixed_precision.skips) >= 2
    )


@pytest.mark.parametrize('opt', ['plain sgd', 'sgd', 'l2', 'adam', 'rms_prop', 'radam', 'qhadam'])
def test_fastais_optimizers_step_the_same_on_flat_masters(opt):
    "Groups, frozen ones, weight decay that spares some parameters, schedules, `lr_find`, and fp32 afterwards."

    def run(**kwargs):
        learn = built(opt=opt, splitter=two_groups, cbs=GradientClip(0.5), **kwargs)
        learn.create_opt()
        learn.freeze()
        learn.fit(1, 0.01)
        learn.unfreeze()
        learn.fit_one_cycle(2, slice(1e-3, 1e-2))
        weights = params(learn)
        learn.lr_find(show_plot=False, num_it=8, suggest_funcs=None)
        assert in_memory_of_their_own(learn) and same(params(learn), weights)
        return after(learn.to_fp32())

    assert alike(run(), run(**FLAT))


class InStep(Learner):
    "Calls `look(learn)` when a step has been taken, still inside it."

    def _step(self):
        super()._step()
        self.look(self)


def new_gradients(l):
    for p in l.model.parameters():
        p.grad = (p.grad * 2).t().contiguous().t().data  # of the same values in another order in memory


def new_weights(l):
    for p in [*l.model.parameters()][:3]:
        p.data = p.data * 0.9  # only the first of two that were joined


def loaded(l):
    l.opt.load_state_dict(copy.deepcopy(l.opt.state_dict()))


def frozen_layer(l):
    l.model[0].requires_grad_(False).zero_grad()


def decaying(l):
    l.opt.state[l.model[0].weight]['do_wd'] = True  # False for the bias


def failing(l):
    raise core.CancelStepException


@pytest.mark.parametrize('change', [new_gradients, new_weights, loaded, frozen_layer, decaying, failing])
def test_what_a_callback_replaces_is_joined_again(change):
    event = 'before_step' if change in (new_gradients, failing) else 'after_batch'
    cbs = At(event, lambda l: third(l) and change(l), 40)
    a, b = (after(built(to, cbs=cbs, splitter=two_groups, **kw)) for to, kw in (('bf16', {}), ('half_weights', FLAT)))
    assert alike(a, b) and in_memory_of_their_own(b)


def test_an_exception_in_the_step_leaves_weights_and_state_of_whole_steps():
    def run(to, **kwargs):
        learn = built(to, cls=InStep, **kwargs)
        learn.look = lambda l: 1 / (l.train_iter != 3)
        with pytest.raises(ZeroDivisionError):
            learn.fit(1, 0.01)
        state, learn.look = opt_state(learn.opt), noop
        return after(learn), state

    (a, before_a), (b, before_b) = run('bf16'), run('half_weights', **FLAT)
    assert alike(a, b) and same(before_a, before_b) and in_memory_of_their_own(b)


# -- without master weights


def without(model=None, opt='kahan', **kwargs):
    return built(model=model, opt=opt, **NONE, **kwargs)


def halves(learn):
    return [n for n, p in learn.model.named_parameters() if p.dtype is BF16]


def dtypes_agree(learn):
    "Whether gradients and state have the dtype of their parameter."
    for p in learn.model.parameters():
        tensors = [t for t in (p.grad, *learn.opt.opt.state[p].values()) if torch.is_tensor(t) and t.dim()]
        if any(t.is_floating_point() and t.dtype is not p.dtype for t in tensors):
            return False
    return True


def exact(learn):
    "Return the weights at full precision: the parameter plus its compensation."
    state = learn.opt.opt.state
    comps = [state.get(p, {}).get('kahan_comp') for p in learn.model.parameters()]
    return [p.detach().float() + (0 if c is None else c.float()) for p, c in zip(learn.model.parameters(), comps)]


def test_which_weights_are_bf16_in_a_fit():
    "Gradients and state included, except torchao's count; afterwards all are fp32, except the user's own 16-bit ones."
    seen = []
    look = lambda l: seen.append((halves(l), dtypes_agree(l)))
    learn = without(Zoo(), cbs=[At('after_step', look, 11), At('after_validate', look, 11), GradientAccumulation(13)])
    before, count = [*learn.model.parameters()], torch.tensor(257.0)  # 256 in bf16
    for _ in range(2):
        learn.fit(1, 0.01)
        assert halves(learn) == Zoo.given and dtypes_agree(learn)
        learn.opt.opt.state[learn.model.head.weight].setdefault('count', count)
    assert seen == [(Zoo.given + Zoo.lowered, True)] * 4
    assert learn.opt.opt.state[learn.model.head.weight]['count'] == 257
    assert all(p is q for p, q in zip(learn.model.parameters(), before))


@pytest.mark.parametrize('kept, expected', [('0', ['3.weight', '3.bias']), ('(model)', [])])
def test_modules_kept_in_fp32_keep_their_weights(kept, expected):
    "Also in a compiled model, whose modules have other names."
    seen, model = [], mlp()
    model[3] = torch.compile(model[3], backend='eager')
    look = At('after_step', lambda l: seen.append([n.replace('_orig_mod.', '') for n in halves(l)]), 11)
    learn = after(without(torch.compile(model, backend='eager'), cbs=look, fp32_modules=kept), 1)
    assert seen == [expected] * 6 and not halves(learn)


def test_frozen_weights_are_not_rounded():
    "Nor are they in a fit, where a file may be saved."
    seen = []
    learn = without(splitter=two_groups, cbs=At('after_step', lambda l: seen.append(params(l)[0]), 11))
    for _ in range(2):
        with torch.no_grad():
            frozen = learn.model[0].weight.mul_(1.001).clone()  # no bf16 numbers
        learn.freeze()
        learn.fit(1, 0.01)
        assert same([*seen[-6:], learn.model[0].weight], [frozen] * 7)
        learn.unfreeze()
        learn.fit(1, 0.01)  # optimi would use Triton for a group without gradients
        assert not torch.equal(learn.model[0].weight, frozen) and is_fp32(learn)


def test_the_first_rounding_is_kept():
    learn = without(linear())
    before = params(learn)
    learn.fit(1, 0.0)
    for p, q in zip(params(learn), before):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=0)


@pytest.mark.parametrize('lr', [1e-4, 3e-9])
def test_small_updates_are_kept_in_a_fit_and_from_fit_to_fit(lr):
    "Half a unit below 1 is 2e-3 in bf16, and 3e-8 in fp32; a fit takes 6 steps."
    learn = learner(linear(), opt_func=kahan('SGD', weight_decay=0.0))
    learn.fit(1, 0.0)  # in fp32, for which optimi would not make it by itself
    with torch.no_grad():
        learn.model.weight.fill_(1.0)
    learn.add_cb(At('before_step', lambda l: l.model.weight.grad.fill_(1.0), order=12))
    learn.to_half_weights(**NONE).fit(10, lr)
    for _ in range(10):
        learn.fit(1, lr)
    assert torch.allclose(learn.model.weight, torch.full((1, 6), 1 - 120 * lr), rtol=0, atol=20 * lr)


@pytest.mark.parametrize('n', [24, 4])  # with 4 samples a file is saved right after the first step
def test_files_and_copies_made_in_a_fit(n, tmp_path):
    "A file resumes exactly; a copy, and a learner that leaves, have exact fp32 weights."
    copies = []

    def keep(l):
        l.save(str(l.epoch))
        copies.append((copy.deepcopy(l), exact(l)))

    straight, resumed = without(path=tmp_path, cbs=At('after_epoch', keep, 70)), without(path=tmp_path)
    straight.dls, resumed.dls = loaders(n), loaders(n)
    straight.fit(3, 0.01)
    resumed.load('0').fit(2, 0.01)
    assert alike(straight, resumed)
    for twin, weights in copies[:2]:
        assert same(params(twin), weights) and twin.model(torch.ones(2, 6)).dtype is FP32
        assert is_fp32(after(twin.remove_cb(At), 1)) and is_fp32(after(twin.to_fp32(), 1))
    learn = without(cbs=At('after_validate', lambda l: l.to_fp32()))
    assert is_fp32(after(learn)) and precision_callback(learn) is None


@pytest.mark.parametrize('with_opt', [True, False])
@pytest.mark.parametrize('event, tol', [('after_epoch', 0), ('after_train', 0), ('after_batch', 1e-3)])
def test_a_file_loaded_in_a_fit_is_loaded_exactly(event, tol, with_opt, tmp_path):
    "Not the file plus the rounding errors of other weights, also where training goes on."
    best, learn = (learner(mlp(seed), opt_func=kahan('SGD'), path=tmp_path) for seed in (1, 0))
    best.fit(1, 1e-6)
    best.save('best')
    with torch.no_grad():
        [p.mul_(300.0) for p in learn.model.parameters()]  # with a large compensation
    load = At(event, lambda l: (event != 'after_batch' or third(l)) and l.load('best', with_opt=with_opt), 80)
    learn.to_half_weights(**NONE).fit(1, 1e-6, cbs=load)
    for p, q in zip(params(learn), params(best)):
        torch.testing.assert_close(p, q, rtol=tol, atol=tol)


# -- what does not fit


def with_own_step():
    learn = learner(opt_func=Adam)
    learn.create_opt()
    learn.opt.step = learn.opt.step
    return learn


def channels_last():
    return nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)  # never runs


REFUSED = {  # name: arguments and a learner; the errors of `fit` are in tests/expected/half_weights.txt
    **{f'flat, {opt}': (FLAT, lambda opt=opt: learner(opt_func=OWN[opt])) for opt in ('lamb', 'ranger', 'adamw')},
    'flat, own step': (FLAT, with_own_step),
    'flat, sparse': (FLAT, lambda: learner(nn.Embedding(16, 6, sparse=True), opt_func=SGD)),
    'flat, in two groups': (FLAT, lambda: learner(splitter=lambda m: [[*m.parameters()], [m[0].bias]])),
    'flat, channels last': (FLAT, lambda: learner(channels_last())),
    **{f'no masters, {opt}': (NONE, lambda opt=opt: learner(opt_func=OWN[opt])) for opt in ('adam', 'adamw', 'ranger')},
    'no masters, without summation': (NONE, lambda: learner(opt_func=kahan('AdamW', kahan_sum=False))),
}


def test_optimizers_and_parameters_that_do_not_fit(expected):
    lines = []
    for name, (kwargs, make_one) in REFUSED.items():
        learn = make_one().to_half_weights(**kwargs)
        before, places = params(learn), [p.data_ptr() for p in learn.model.parameters()]
        begun = []  # callbacks that change the learner when a fit begins, as MixUp does with the loss
        with pytest.raises(ValueError) as e:
            learn.fit(1, reset_opt=False, cbs=At('before_fit', begun.append, -20))
        lines += [f'# {name}', str(e.value), '']
        assert begun == []
        assert same(params(learn), before) and places == [p.data_ptr() for p in learn.model.parameters()]
        assert is_outside_a_fit(learn)
    assert '\n'.join(lines) == expected('half_weights')


FLAT_ERROR = pytest.raises(ValueError, match='flat_master=True cannot be used with AdamW')


@pytest.mark.parametrize('kwargs, opt, ends', [(FLAT, 'adam', FLAT_ERROR), (NONE, 'kahan', nullcontext())])
def test_an_optimizer_that_is_exchanged_in_a_fit_leaves_no_half_weights(kwargs, opt, ends):
    exchange = At('after_batch', lambda l: third(l) and setattr(l, 'opt', OWN['adamw'](l.splitter(l.model), lr=0.01)))
    learn = built(opt=opt, **kwargs)
    with ends:
        learn.fit(1, 0.01, cbs=exchange)
    assert is_fp32(learn) and dtypes_agree(learn) and not torch.is_autocast_enabled('cpu')
    after(learn.to_bf16())


@pytest.mark.torchao
def test_stochastic_rounding():
    from torchao import optim

    class AdamW(optim._AdamW):
        def step(self, closure=None):  # torchao needs tensors, but fastai sets numbers
            for group in self.param_groups:
                group['lr'] = torch.as_tensor(group['lr'])
            return super().step(closure)

    opt = partial(AdamW, bf16_stochastic_round=True)
    learn = learner(opt_func=partial(OptimWrapper, opt=opt)).to_half_weights(**NONE)
    weights = params(learn)
    with torch.compiler.set_stance('force_eager'):
        learn.fit(1, 1e-3)  # torchao compiles its step, which needs minutes
    assert is_fp32(learn) and not same(params(learn), weights)


def test_several_processes(tmp_path):
    "DDP trains with flat master weights; without them DDP and FSDP2 raise an error."
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def ddp():
        return nn.parallel.DistributedDataParallel(mlp())

    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        assert alike(after(built('bf16', ddp())), after(built(model=ddp(), **FLAT)))
        sharded = lambda: fully_shard(mlp(), mesh=init_device_mesh('cpu', (1,)))
        for learn, words in (
            (without(ddp()), 'DistributedData'),
            (without(sharded()), 'FSDP2'),
            (built(model=sharded(), **FLAT), 'sharded'),
        ):
            with pytest.raises(ValueError, match=words):
                learn.fit(1)
    finally:
        torch.distributed.destroy_process_group()
