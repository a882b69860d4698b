"Flat masters: what the optimizer sees while it steps, and what nobody else does."
from functools import partial

import pytest, torch
from fastai.callback.schedule import *
from fastai.callback.training import GradientClip
from fastai.optimizer import SGD, Adam, OptimWrapper
from torch import nn

from fastxtend_amp.half_weights import flat_masters, kahan
from helpers import *

pytestmark = pytest.mark.filterwarnings('ignore:.*emulated.*')


def fitted(dtype='bf16', opt_func=SGD, n_epoch=2, lr=.01, cbs=None, model=None, dls=None, **kwargs):
    learn = learner(model, dls, opt_func=opt_func, cbs=cbs).to_half_weights(dtype, **kwargs)
    learn.fit(n_epoch, lr)
    return learn


@pytest.fixture
def known(monkeypatch): monkeypatch.setattr(flat_masters, 'is_elementwise', lambda opt: True)   # a test's own optimizer, too


class Counts(torch.optim.SGD):
    "Notes how many parameters each group has in a step, and of how many elements."
    def step(self, closure=None):
        self.seen.append([[p.numel() for p in g['params']] for g in self.param_groups])
        return super().step(closure)


def counting(seen, model, block=None, monkeypatch=None, **kwargs):
    if block: monkeypatch.setattr(flat_masters, 'BLOCK', block)
    Counts.seen = seen
    learn = learner(model, opt_func=partial(OptimWrapper, opt=Counts), **kwargs).to_half_weights(flat_master=True)
    learn.fit(1, slice(1e-4, 1e-2) if kwargs else 1e-2)
    return learn


def test_flat_masters_are_few(known):
    seen = []
    counting(seen, mlp(), splitter=lambda m: [[*m[:2].parameters()], [*m[2:].parameters()]])
    assert {str(s) for s in seen[-6:]} == {'[[96], [32]]'}       # a group each, in whole cache lines


def test_blocks_have_a_bound(monkeypatch, known):
    "A larger parameter is stepped on as it is, in its own memory; the numbers are the same."
    def model():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in [(6, 6)] * 5 + [(6, 20), (20, 1)]))
    seen, whole = [], []
    a, b = counting(seen, model(), 100, monkeypatch), counting(whole, model(), 2 ** 17, monkeypatch)
    assert sorted(seen[-1][0]) == [80, 96, 96, 120]                    # each in whole cache lines of 16; 20 goes with 36
    assert whole[-1] == [[400]] and same(params(a), params(b)) and flat_masters.BLOCK == 2 ** 17


def test_other_memory_formats_stay(known):
    "A channels-last weight keeps its layout, which decides which kernel runs."
    seen, strides = [], []
    model = nn.Sequential(nn.Unflatten(1, (2, 3, 1)), nn.Conv2d(2, 4, 1), nn.Conv2d(4, 4, (3, 1)), nn.Flatten(), nn.Linear(4, 1))
    model.to(memory_format=torch.channels_last)
    Counts.seen = seen
    learn = learner(model, opt_func=partial(OptimWrapper, opt=Counts), cbs=At('after_step', lambda l: strides.append(l.model[2].weight.stride()), 11))
    before = model[2].weight.stride()
    learn.to_half_weights(flat_master=True).fit(1)
    assert set(strides) == {before} == {model[2].weight.stride()} and not model[2].weight.is_contiguous()


def test_callbacks_meet_each_parameter():
    entries = set()
    look = At('after_step', lambda l: entries.add((len(l.opt.all_params()), len(l.opt.param_lists[0]))), order=11)
    fitted(opt_func=Adam, flat_master=True, cbs=[look, GradientClip(.5)])
    assert entries == {(6, 6)}


def test_flat_masters_freeze_and_train_groups_as_fp32():
    def run(flat):
        learn = learner(opt_func=Adam, splitter=lambda m: [[*m[:2].parameters()], [*m[2:].parameters()]], wd=.1).to_half_weights(flat_master=flat)
        learn.create_opt(); learn.freeze(); learn.fit(1, .01); learn.unfreeze(); learn.fit_one_cycle(1, slice(1e-3, 1e-2)); learn.fit(1)
        return learn
    a, b = run(False), run(True)
    assert same(params(a), params(b)) and same_state(opt_state(a.opt), opt_state(b.opt))
    a.to_fp32(), b.to_fp32()
    a.fit(2, .01), b.fit(2, .01)
    assert same(params(a), params(b)) and same_state(opt_state(a.opt), opt_state(b.opt))


class Branches(nn.Module):
    "Uses one of its two layers in turn."
    def __init__(self): torch.manual_seed(0); super().__init__(); self.n, self.layers = 0, nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 1)])
    def forward(self, x): self.n += self.training; return self.layers[self.n % 2 if self.n < 5 else 0](x)


@pytest.mark.parametrize('opt', ['adam', 'adamw', 'torch sgd'])
def test_parameters_without_gradient_are_not_stepped_in_flat_masters(opt):
    def forget(l):
        for p in l.model.parameters(): p.grad = None
    learns = [fitted(model=Branches(), opt_func=OPTIMIZERS[opt], flat_master=flat, cbs=[At('after_batch', forget, order=20)]) for flat in (False, True)]
    assert same(*map(params, learns)) and same_state(*(opt_state(l.opt) for l in learns))


def test_flat_masters_refuse_what_they_cannot_do():
    from fastai.optimizer import Lamb, Larc, ranger
    class Normed(torch.optim.SGD):                               # one that nobody has heard of
        def step(self, closure=None):
            for g in self.param_groups:
                for p in g['params']: p.data -= g['lr'] * p.grad / p.grad.norm()
    torch_s = {n: partial(OptimWrapper, opt=getattr(torch.optim, n)) for n in ('Adafactor', 'SparseAdam', 'LBFGS', 'Muon')}
    for name, opt in {'Lamb': Lamb, 'Larc': Larc, 'Lookahead': ranger, 'Normed': partial(OptimWrapper, opt=Normed), 'StableAdamW': kahan('StableAdamW'),
                      **torch_s}.items():
        learn = learner(nn.Sequential(nn.Linear(6, 1, bias=False)), opt_func=opt).to_half_weights(flat_master=True)
        before = params(learn)
        with pytest.raises(ValueError, match=f'flat_master=True cannot be used with {name}'): learn.fit(1)
        assert same(params(learn), before)


@pytest.mark.parametrize('name', ['Adagrad', 'Adadelta', 'RMSprop', 'NAdam', 'RAdam', 'Adamax', 'ASGD', 'Rprop', 'kahan'])
def test_flat_masters_take_other_elementwise_optimizers(name):
    opt = kahan('Lion') if name == 'kahan' else partial(OptimWrapper, opt=getattr(torch.optim, name))
    a, b = (fitted(opt_func=opt, flat_master=flat) for flat in (False, True))
    assert same(params(a), params(b)) and same_state(opt_state(a.opt), opt_state(b.opt))


@pytest.mark.parametrize('how', ['fused', 'foreach'])
def test_an_optimizer_that_takes_all_tensors_at_once_keeps_its_own(how):
    "Joined ones would save no launch, and cost a copy of each gradient. Told to in mid-fit, it goes on from where it is."
    opt_func = partial(OptimWrapper, opt=partial(torch.optim.AdamW, **{how: True}))
    moved = []
    def look(l): moved.append(len(l.precision._flat.moved))
    a, b = (fitted(opt_func=opt_func, cbs=cbs, flat_master=bool(cbs)) for cbs in (None, At('after_batch', look, 11)))
    assert same(params(a), params(b)) and same_state(opt_state(a.opt), opt_state(b.opt)) and set(moved) == {0}

    def tell(l):
        if l.train_iter == 3: l.opt.opt.param_groups[0][how] = True
    cbs = [At('after_step', tell, 11), At('after_batch', look, 11)]
    a, b = (fitted(opt_func=OPTIMIZERS['adamw'], cbs=cbs, flat_master=flat) for flat in (False, True))
    assert same(params(a), params(b)) and same_state(opt_state(a.opt), opt_state(b.opt)) and moved[-1] == 6


@pytest.mark.parametrize('opt', ['AdamW', 'NAdam', 'RMSprop'])
def test_an_optimizer_that_takes_all_at_once_for_a_while(opt):
    "What it has done then is in the state that joined tensors go on from."
    def tell(l): l.opt.opt.param_groups[0]['foreach'] = l.epoch == 1
    opt_func = partial(OptimWrapper, opt=getattr(torch.optim, opt))
    a, b = (fitted(opt_func=opt_func, n_epoch=3, cbs=At('before_epoch', tell, 11), flat_master=flat) for flat in (False, True))
    assert same(params(a), params(b)) and same_state(opt_state(a.opt), opt_state(b.opt))


def test_an_optimizer_that_steps_by_tensor_again_is_looked_at_then():
    "It was not at the start, where it had `foreach=True`; the step is not taken."
    def tell(l): l.opt.opt.param_groups[0]['foreach'] = l.iter < 2
    learn = learner(opt_func=partial(OptimWrapper, opt=torch.optim.Adafactor), cbs=At('before_batch', tell, 11))
    learn.iter = 0
    learn.create_opt(); tell(learn)
    with pytest.raises(ValueError, match='flat_master=True cannot be used with Adafactor'): learn.to_half_weights(flat_master=True).fit(1)
    assert learn.iter == 2


@pytest.mark.parametrize('opt', ['adam', 'adamw'])
def test_gradients_go_with_the_step_that_used_them(opt):
    "No buffer outlives zero_grad where that frees gradients; fastai's own keep theirs, joined once."
    pointers, kept = [], []
    def look(l): pointers.append(tuple(p.grad.untyped_storage().data_ptr() for p in l.model.parameters()))
    def after(l): kept.append(sum(b.flat.grad is not None for b in l.precision._flat.blocks))
    model = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 1))
    learn = fitted(opt_func=OPTIMIZERS[opt], flat_master=True, model=model, cbs=[At('after_step', look, 11), At('after_batch', after, 11)])
    assert set(kept) == {0} and len({*pointers[-1]}) <= 3
    if opt == 'adam': assert len(set(pointers)) == 1
    assert all(p.grad is None or p.grad.untyped_storage().nbytes() == p.grad.nbytes for p in learn.model.parameters())


def test_an_interrupt_while_flat_masters_are_forgotten():
    "Between any two lines; `close` is called again then, as at the next fit."
    learn = learner(opt_func=OPTIMIZERS['adam']).to_half_weights(flat_master=True)
    learn.fit(1, .01)
    class Interrupted(flat_masters.FlatMasters):
        stop = None
        def __setattr__(self, name, value):
            if name == self.stop: raise KeyboardInterrupt
            super().__setattr__(name, value)
    p = next(learn.model.parameters())
    for name in ('moved', 'blocks', 'pattern', 'lists', 'model', 'opt'):
        flat = Interrupted()
        flat.moved, flat.model, flat.opt, flat.stop = {p: (p.data_ptr(), p.shape)}, learn.model, learn.opt, name
        with pytest.raises(KeyboardInterrupt): flat.close()
        flat.stop = None
        flat.close()
        assert flat.opt is None and not flat.moved


# -- what a step meets that is not as it was

class Scalars(nn.Module):
    "Two parameters without dimensions, with equal gradients, and a tied pair by memory."
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(.5)), nn.Parameter(torch.tensor(.5))
        torch.manual_seed(0)
        self.one, self.two, self.out = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
        self.two.weight.data = self.one.weight.data
    def forward(self, x): return self.out(self.two(self.one(x))) * (self.a + self.b)


def regrouped(l):
    if l.train_iter == 3: l.opt.param_lists[0].append(l.opt.param_lists[1].pop(0))


def two_groups(m): return [[*m[:2].parameters()], [*m[2:].parameters()]]


@pytest.mark.parametrize('opt', [Adam, SGD, partial(OptimWrapper, opt=torch.optim.AdamW)], ids=['adam', 'sgd', 'adamw'])
def test_scalars_and_weights_that_share_memory(opt):
    a, b = learner(Scalars(), opt_func=opt).to_bf16(), learner(Scalars(), opt_func=opt).to_half_weights(flat_master=True)
    for l in (a, b): l.fit(1, .01); l.fit(1, .01)
    assert same(params(a), params(b)) and b.model.two.weight.data_ptr() == b.model.one.weight.data_ptr()


@pytest.mark.parametrize('opt', [Adam, SGD], ids=['adam', 'sgd'])
def test_groups_that_change_in_a_fit(opt):
    def trained(**kwargs):
        cb = At('after_batch', lambda l: l.training and regrouped(l), order=40)
        return learner(opt_func=opt, splitter=two_groups, cbs=cb, **kwargs)
    a, b = trained().to_bf16(), trained().to_half_weights(flat_master=True)
    for l in (a, b): l.fit(1, slice(1e-4, 1e-1))
    assert same(params(a), params(b))


@pytest.mark.parametrize('opt', [Adam, partial(OptimWrapper, opt=torch.optim.AdamW)], ids=['adam', 'adamw'])
@pytest.mark.parametrize('at', [1, 4])
def test_a_step_that_ends_in_an_exception_leaves_its_state(opt, at):
    def interrupted(learn):
        learn.create_opt()
        inner, n = learn.opt.step, 0
        def step(*args, **kwargs):
            nonlocal n
            inner(*args, **kwargs)
            n += 1
            if n == at: raise KeyboardInterrupt
        learn.opt.step = step
        with pytest.raises(KeyboardInterrupt): learn.fit(1, .01, reset_opt=False)
        learn.fit(1, .01)
        return learn
    a, b = interrupted(learner(opt_func=opt).to_bf16()), interrupted(learner(opt_func=opt).to_half_weights(flat_master=True))
    assert same(params(a), params(b)) and same_state(opt_state(a.opt), opt_state(b.opt))


def test_a_state_that_belongs_to_a_whole_parameter():
    "Such a parameter stays by itself."
    def trained(to, **kwargs):
        learn = learner(opt_func=Adam)
        learn.create_opt()
        for p, _, state, _ in learn.opt.all_params(): state['norms'] = torch.zeros(3)
        getattr(learn, to)(**kwargs).fit(1, .01, reset_opt=False)
        return learn
    a, b = trained('to_bf16'), trained('to_half_weights', flat_master=True)
    assert same(params(a), params(b)) and same_state(opt_state(a.opt), opt_state(b.opt))


def all_and_last(m): return [[*m.parameters()], [*m[2:].parameters()]]
def some_twice(m): return [[*m.parameters(), *m[2:].parameters()]]


@pytest.mark.parametrize('splitter', [all_and_last, some_twice])
@pytest.mark.parametrize('opt', ['sgd', 'adam'])
def test_a_parameter_that_is_listed_twice(opt, splitter):
    a, b = (learner(opt_func=OPTIMIZERS[opt], splitter=splitter) for _ in range(2))
    a.to_bf16().fit(2, .01), b.to_half_weights(flat_master=True).fit(2, .01)
    assert same(params(a), params(b))


def share_all(m): m[2].weight.data = m[0].weight.data
def share_part(m): m[2].bias.data = m[0].bias.data[:6]
def share_with_a_buffer(m): m[3].running_mean.data = m[0].bias.data[:6]


@pytest.mark.parametrize('share', [share_all, share_part, share_with_a_buffer])
@pytest.mark.parametrize('opt', ['sgd', 'adam', 'adamw'])
def test_weights_that_come_to_share_memory_in_a_fit(opt, share):
    "They share it after the fit, too."
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 1))
    def change(l):
        if l.epoch == 1: share(l.model)
    a, b = (learner(model(), opt_func=OPTIMIZERS[opt], cbs=At('before_epoch', change)) for _ in range(2))
    for l in (a.to_bf16(), b.to_half_weights(flat_master=True)): l.fit(3, .01); l.fit(2, .01)
    assert same(params(a), params(b)) and same([*a.model.buffers()], [*b.model.buffers()])
    def addresses(l): return [t.data_ptr() for t in (*l.model.parameters(), *l.model.buffers())]
    assert [addresses(a).index(p) for p in addresses(a)] == [addresses(b).index(p) for p in addresses(b)]


def zeroed(l, s): s.update({k: torch.zeros_like(v) for k, v in s.items() if isinstance(v, torch.Tensor) and v.dim()})
def moved(l, s):
    for v in s.values():
        if isinstance(v, torch.Tensor) and v.dim(): v.data = v.data * .5
def reset(l, s): s.update(step=torch.tensor(1.) if isinstance(s.get('step'), torch.Tensor) else 1) if 'step' in s else None
def written(l, s): s['step'].fill_(1) if isinstance(s.get('step'), torch.Tensor) else None
def cleared(l, s): s.clear()
def more(l, s): s['history'] = [1, 2]
def half(l, s): s.update({k: v.double() for k, v in s.items() if isinstance(v, torch.Tensor) and v.dim()}) if not hasattr(l.opt, 'opt') else None
def loaded(l, s): l.opt.load_state_dict(l.opt.state_dict())


@pytest.mark.parametrize('change', [zeroed, moved, reset, written, cleared, more, half, loaded])
@pytest.mark.parametrize('opt', ['adam', 'adamw', 'sgd'])
def test_a_state_that_a_callback_changes_in_a_fit(opt, change):
    "Of one parameter or of all; the optimizer goes on from it."
    def do(n):
        def f(l):
            if not l.training or l.train_iter not in (3, 5): return
            store = l.opt.opt.state if hasattr(l.opt, 'opt') else l.opt.state
            for p in [*l.model.parameters()][:n]: change(l, store[p])
        return At('after_batch', f, 40)
    for n in (1, 6):
        a, b = (learner(opt_func=OPTIMIZERS[opt], cbs=do(n)) for _ in range(2))
        for l in (a.to_bf16(), b.to_half_weights(flat_master=True)): l.fit(2, .01)
        assert same(params(a), params(b)) and same_state(opt_state(a.opt), opt_state(b.opt))


def norm(opt, *args):
    for g in opt.param_groups:
        for p in g['params']:
            if p.grad is not None: p.grad /= p.grad.norm() + 1


@pytest.mark.parametrize('watch', [lambda l: l.opt.opt.register_step_pre_hook(norm), lambda l: l.opt.__dict__.update(step=lambda s=l.opt.step: (norm(l.opt.opt), s()))],
                         ids=['hook', 'own step'])
def test_code_around_the_optimizers_step_meets_each_parameter(watch):
    def trained(to, **kwargs):
        learn = learner(opt_func=OPTIMIZERS['adamw'])
        learn.create_opt(); watch(learn)
        getattr(learn, to)(**kwargs).fit(2, .01, reset_opt=False)
        return learn
    a, b = trained('to_bf16'), trained('to_half_weights', flat_master=True)
    assert same(params(a), params(b)) and same_state(opt_state(a.opt), opt_state(b.opt))


@pytest.mark.parametrize('opt', ['adam', 'adamw'])
def test_gradients_with_a_graph(opt):
    def again(l):
        if l.train_iter == 3: l.loss_func(l.model(*l.xb), *l.yb).backward(create_graph=True)
    a, b = (learner(opt_func=OPTIMIZERS[opt], cbs=At('before_step', again)) for _ in range(2))
    for l in (a.to_bf16(), b.to_half_weights(flat_master=True)): l.fit(1, .01)
    assert same(params(a), params(b)) and same_state(opt_state(a.opt), opt_state(b.opt))


def test_a_weight_that_is_transposed_in_place():
    def turn(l):
        if l.train_iter == 3: l.model[0].weight.data = l.model[0].weight.data.t()
    def model(): torch.manual_seed(0); return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    a, b = (learner(model(), opt_func=OPTIMIZERS['sgd'], cbs=At('before_batch', turn)) for _ in range(2))
    for l in (a.to_bf16(), b.to_half_weights(flat_master=True)): l.fit(1, .01)
    assert same(params(a), params(b))


def test_an_interrupt_while_the_state_is_handed_back(monkeypatch):
    "It is handed back all the same: weights and state are those of whole steps."
    n, share = 0, flat_masters._Block.share
    def interrupted(block, store):
        nonlocal n
        n += 1
        if n == 5: raise KeyboardInterrupt
        share(block, store)
    monkeypatch.setattr(flat_masters._Block, 'share', interrupted)
    b = learner(opt_func=Adam).to_half_weights(flat_master=True)
    with pytest.raises(KeyboardInterrupt): b.fit(1, .01)
    steps, = {s['step'] for s in opt_state(b.opt)}
    def stop(l):
        if l.train_iter == steps - 1: raise KeyboardInterrupt
    a = learner(opt_func=Adam, cbs=At('after_step', stop, 11)).to_bf16()
    with pytest.raises(KeyboardInterrupt): a.fit(1, .01)
    assert 0 < steps < 6 and same(params(a), params(b)) and same_state(opt_state(a.opt), opt_state(b.opt))


def test_the_script_that_measured_the_step(capsys, monkeypatch):
    import flat_steps
    monkeypatch.setattr('sys.argv', ['flat_steps.py', '--models', 'tiny', '--seconds', '.1'])
    for fewest, stepped_on in ((2, 2), (4, 4)):                  # the default: too few to be joined
        monkeypatch.setattr(flat_masters, 'FEWEST', fewest)
        flat_steps.main()
        assert f'| tiny | 4 | {stepped_on} |' in capsys.readouterr().out
