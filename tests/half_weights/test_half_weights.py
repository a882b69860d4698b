"Half-precision weights with fp32 masters, against loops written by hand."
import copy, math, pickle, subprocess, sys, time, warnings
from pathlib import Path
from functools import partial

import pytest, torch
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.schedule import *
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.optimizer import SGD, Adam, OptimWrapper
from torch import nn

from fastxtend_amp import HalfWeights, MixedPrecision
from fastxtend_amp.half_weights.copies import NORMS
from test_guard import ATTRIBUTES, EVENTS, EXCEPTIONS, PLACES, build, caught, interrupt_after
from helpers import *
from quality import final_loss

pytestmark = pytest.mark.filterwarnings('ignore:.*emulated.*')
HERE = Path(__file__).resolve().parent
HALF = {'fp16': torch.float16, 'bf16': torch.bfloat16}


def by_hand(dtype, opt_func, n_epoch=2, lr=.01, n_acc=None, clip=None, model=None, dls=None, kept=NORMS, **scaling):
    "The original recipe: a second model in half precision, its gradients copied to the masters, masters copied back."
    learn = learner(model, dls, opt_func=opt_func)
    masters, half = learn.model, copy.deepcopy(learn.model).train()
    for m in half.modules():
        if isinstance(m, kept): continue
        for p in m._parameters.values():
            if p is not None: p.data = p.data.to(HALF[dtype])
    def loss_of(xb, yb): return nn.functional.mse_loss(half(xb.to(HALF[dtype])).float(), yb)
    def gradients():
        for p, h in zip(masters.parameters(), half.parameters()):
            if h.grad is None: continue
            p.grad = h.grad.float() if p.grad is None else p.grad + h.grad.float()
            h.grad = None
    def weights():
        for p, h in zip(masters.parameters(), half.parameters()): h.data.copy_(p.data)
    scaler, losses = loop_by_hand(learn, dtype, loss_of, n_epoch, lr, n_acc, clip, gradients, weights, **scaling)
    for p, h in zip(masters.buffers(), half.buffers()): p.copy_(h)
    return masters, learn.opt, scaler, losses


def fitted(dtype='bf16', opt_func=SGD, n_epoch=2, lr=.01, cbs=None, model=None, dls=None, **kwargs):
    learn = learner(model, dls, opt_func=opt_func, cbs=cbs).to_half_weights(dtype, **kwargs)
    learn.fit(n_epoch, lr)
    return learn


@pytest.mark.parametrize('opt', OPTIMIZERS)
@pytest.mark.parametrize('dtype', HALF)
def test_equals_the_loop_by_hand(dtype, opt):
    learn = fitted(dtype, OPTIMIZERS[opt])
    model, o, scaler, losses = by_hand(dtype, OPTIMIZERS[opt])
    assert same(params(learn), [p.detach() for p in model.parameters()])
    assert same([*learn.model.buffers()], [*model.buffers()])
    assert same_state(opt_state(learn.opt), opt_state(o))
    assert all(p.dtype is torch.float32 for p in learn.model.parameters())


@pytest.mark.parametrize('dtype', HALF)
def test_accumulates_and_clips_the_masters_gradients(dtype):
    norms = []
    look = At('before_step', lambda l: norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in l.parameters()))), order=12)
    learn = fitted(dtype, Adam, cbs=[GradientAccumulation(8), GradientClip(.05), look])
    model, *_ = by_hand(dtype, Adam, n_acc=8, clip=.05)
    assert same(params(learn), [p.detach() for p in model.parameters()])
    assert len(norms) == 6 - learn.precision.n_skipped and max(norms) < .0501   # clipping clips


def test_fp16_skips_as_by_hand():
    learn = learner(opt_func=Adam).to_half_weights('fp16', loss_scale=None)
    cb = learn.precision
    cb.scaling._fp16_scaler = torch.amp.GradScaler('cpu', init_scale=2.**40)
    learn.fit(4, .01)
    model, _, scaler, _ = by_hand('fp16', Adam, n_epoch=4, init_scale=2.**40)
    assert 0 < cb.n_skipped < len(cb.scales) == 24 and learn.precision.state_dict() == scaler.state_dict()
    assert same(params(learn), [p.detach() for p in model.parameters()])


# -- when: outside the forward and backward pass the model is its fp32 masters

def halves(learn): return [n for n, p in learn.model.named_parameters() if p.dtype is not torch.float32]


@pytest.mark.parametrize('exc', EXCEPTIONS, ids=lambda e: e.__name__)
@pytest.mark.parametrize('place,order', [*((e, o) for e in EVENTS for o in (9, 11)), *((p, 0) for p in PLACES)], ids=str)
def test_any_exception_anywhere_in_a_batch(place, order, exc, tmp_path):
    plain, _ = build(None, place, exc, order)
    expected = caught(lambda: plain.fit(1))
    for kwargs in (dict(), dict(flat_master=True)):
        learn, bomb = build(HalfWeights('bf16', **kwargs), place, exc, order)
        place_of = lambda: {n: (id(p), p.data_ptr() if not kwargs else p.stride()) for n, p in learn.model.named_parameters()}
        before, parameters = autocast_state(), place_of()
        assert caught(lambda: learn.fit(1)) == expected
        assert not bomb.armed and autocast_state() == before and not halves(learn)
        assert place_of() == parameters                          # the same objects, in place
        assert torch.backends.mha.get_fastpath_enabled() and not any(m._forward_pre_hooks for m in learn.model.modules())
        if expected is None or expected[0] is not CancelFitException: assert not ATTRIBUTES & learn.__dict__.keys()
        learn.path = tmp_path
        learn.export(); learn.save('a'); learn.load('a')
        again, clone, weights = pickle.loads(pickle.dumps(learn)), copy.deepcopy(learn), params(learn)
        for l in (learn, again, clone):
            l.fit(1)
            assert not halves(l) and all(p.isfinite().all() for p in l.model.parameters()) and not same(params(l), weights)


@pytest.mark.parametrize('kwargs', [dict(), dict(flat_master=True), dict(master_weights=False)], ids=str)
def test_asynchronous_interrupts(kwargs):
    "A timer strikes anywhere, in our own lines too: the model is its fp32 masters, and nothing is on it."
    learn, _ = build(HalfWeights('bf16', **kwargs), None, RuntimeError, 0)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        start = time.perf_counter(); learn.fit(1); once = time.perf_counter() - start
        parameters, hits, n = [(id(p), p.stride()) for p in learn.model.parameters()], 0, 120
        for i in range(n):
            hits += interrupt_after(max(once * i / n, 1e-4), lambda: learn.fit(1))
            assert not halves(learn) and not any(m._forward_pre_hooks for m in learn.model.modules()), f'interrupt {i}'
            assert [(id(p), p.stride()) for p in learn.model.parameters()] == parameters and torch.backends.mha.get_fastpath_enabled()
            assert not any(t._is_view() for t in learn.model.parameters()) and not ATTRIBUTES & learn.__dict__.keys()
        assert hits > n // 4
        learn.fit(1)
    assert all(p.isfinite().all() for p in learn.model.parameters())


def test_half_in_forward_and_validation_and_fp32_everywhere_else():
    seen, elsewhere = [], []
    class Spy(nn.Linear):
        def forward(self, x): seen.append((self.training, x.dtype, self.weight.dtype, self.bias.dtype)); return super().forward(x)
    learn = learner(nn.Sequential(Spy(6, 4), nn.BatchNorm1d(4), Spy(4, 1)))
    for event in ('before_fit', 'before_epoch', 'before_train', 'before_step', 'after_step', 'after_batch', 'before_validate', 'after_validate', 'after_epoch'):
        learn.add_cb(At(event, lambda l: elsewhere.append([p.dtype for p in l.model.parameters()]), order=11))
    dtypes = []
    learn.add_cb(At('after_pred', lambda l: dtypes.append((l.pred.dtype, l.xb[0].dtype)), order=11))
    learn.add_cb(At('after_loss', lambda l: dtypes.append((l.loss.dtype, l.loss_grad.dtype)), order=11))
    learn.to_half_weights().fit(1)
    assert set(seen) == {(t, torch.bfloat16, torch.bfloat16, torch.bfloat16) for t in (True, False)}
    assert {d for ds in elsewhere for d in ds} == {torch.float32} and {d for ds in dtypes for d in ds} == {torch.float32}
    n = len(seen)
    preds = learn.get_preds()[0]
    learn.validate()
    assert preds.dtype is torch.float32 and set(seen[n:]) == {(False, torch.float32, torch.float32, torch.float32)}
    for _ in (1, 2):
        with learn.amp_context(): out = learn.model(learn.dls.valid.one_batch()[0])
        assert out.dtype is torch.bfloat16 and not halves(learn) and not any(m._forward_pre_hooks for m in learn.model.modules())
        learn.to_half_weights(master_weights=False)


def test_callbacks_replace_each_other():
    learn = learner()
    for to, cls in (('to_half_weights', HalfWeights), ('to_fp16', MixedPrecision), ('to_half_weights', HalfWeights),
                    ('to_bf16', MixedPrecision), ('to_half_weights', HalfWeights)):
        getattr(learn, to)()
        assert [type(cb) for cb in learn.cbs if isinstance(cb, MixedPrecision)] == [cls]
    assert not any(isinstance(cb, MixedPrecision) for cb in learn.to_fp32().cbs) and not hasattr(learn, 'precision')


@pytest.mark.parametrize('kwargs,text', [(dict(dtype='fp8'), "dtype='fp8'"), (dict(dtype='bf16', loss_scale=512.), "loss_scale=512.0"),
                                         (dict(fp32_modules='nowhere'), "fp32_modules='nowhere'")])
def test_bad_arguments_are_named(kwargs, text):
    learn = learner().to_fp16()
    with pytest.raises(ValueError) as e: learn.to_half_weights(**kwargs)
    assert text in str(e.value) and hasattr(learn, 'mixed_precision')


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


def test_a_step_below_bf16s_resolution_is_not_lost():
    learn = learner(nn.Sequential(nn.Linear(6, 1)), opt_func=SGD).to_half_weights()
    with torch.no_grad(): learn.model[0].weight.fill_(1.)
    learn.add_cb(At('before_step', lambda l: l.model[0].weight.grad.fill_(1.), order=12))
    learn.fit(10, 1e-5)                                          # 60 steps of 1e-5; bf16 has no number between 1 and 0.996
    assert torch.allclose(learn.model[0].weight, torch.full((1, 6), 1 - 60e-5), atol=1e-6)


# -- flat masters

@pytest.mark.parametrize('opt', OPTIMIZERS)
@pytest.mark.parametrize('dtype', HALF)
def test_flat_masters_equal_the_loop_by_hand(dtype, opt):
    entries = set()
    look = At('after_step', lambda l: entries.add((len(l.opt.all_params()), len(l.opt.param_lists[0]))), order=11)
    learn = fitted(dtype, OPTIMIZERS[opt], flat_master=True, cbs=[look, GradientClip(.5)])
    model, o, *_ = by_hand(dtype, OPTIMIZERS[opt], clip=.5)
    assert same(params(learn), [p.detach() for p in model.parameters()]) and same_state(opt_state(learn.opt), opt_state(o))
    assert entries == {(6, 6)}                                   # callbacks meet each parameter


def test_flat_masters_are_few():
    steps = []
    class Counts(torch.optim.SGD):
        def step(self, closure=None): steps.append([len(g['params']) for g in self.param_groups]); return super().step(closure)
    learn = learner(opt_func=partial(OptimWrapper, opt=Counts), splitter=lambda m: [[*m[:2].parameters()], [*m[2:].parameters()]]).to_half_weights(flat_master=True)
    learn.fit(1, slice(1e-4, 1e-2))
    assert {str(s) for s in steps[-6:]} == {'[3, 2]'}                # weights; biases, exempt from decay; the norm, exempt and always trained


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


@pytest.mark.parametrize('opt', ['adam', 'fused adamw', 'torch sgd'])
def test_parameters_without_gradient_are_not_stepped_in_flat_masters(opt):
    def forget(l):
        for p in l.model.parameters(): p.grad = None
    learns = [fitted(model=Branches(), opt_func=OPTIMIZERS[opt], flat_master=flat, cbs=[At('after_batch', forget, order=20)]) for flat in (False, True)]
    assert same(*map(params, learns)) and same_state(*(opt_state(l.opt) for l in learns))


def test_flat_masters_refuse_what_they_cannot_do():
    from fastai.optimizer import Lamb, Larc, ranger
    from fastxtend_amp.half_weights.callback import kahan
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
        assert same(params(learn), before) and not halves(learn)


@pytest.mark.parametrize('name', ['Adagrad', 'Adadelta', 'RMSprop', 'NAdam', 'RAdam', 'Adamax', 'ASGD', 'Rprop', 'kahan'])
def test_flat_masters_take_other_elementwise_optimizers(name):
    from fastxtend_amp.half_weights.callback import kahan
    opt = kahan('Lion') if name == 'kahan' else partial(OptimWrapper, opt=getattr(torch.optim, name))
    a, b = (fitted(opt_func=opt, flat_master=flat) for flat in (False, True))
    assert same(params(a), params(b)) and same_state(opt_state(a.opt), opt_state(b.opt))


# -- checkpoints

@pytest.mark.parametrize('flat', [False, True])
@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_saved_and_loaded_inside_fit(tmp_path, flat, opt):
    seen = {}
    def save(l):
        if l.train_iter == 3: l.save('mid'); seen['saved'] = params(l), opt_state(l.opt)
    def back(l):
        if l.train_iter == 5: l.load('mid'); seen['loaded'] = params(l), opt_state(l.opt)
    learn = learner(opt_func=OPTIMIZERS[opt], path=tmp_path, cbs=[At('after_batch', save, order=20), At('after_batch', back, order=21)])
    learn.to_half_weights(flat_master=flat).fit(1, .01)
    assert same(seen['saved'][0], seen['loaded'][0]) and same_state(seen['saved'][1], seen['loaded'][1])
    state = torch.load(tmp_path / 'models' / 'mid.pth', weights_only=False)
    assert same([v for v in state['model'].values() if v.is_floating_point()][:2], seen['saved'][0][:2])
    assert {v.dtype for v in state['model'].values()} <= {torch.float32, torch.int64}
    assert all(v.dtype is torch.float32 for s in seen['loaded'][1] for v in s.values() if isinstance(v, torch.Tensor))
    others = [learner(opt_func=OPTIMIZERS[opt], path=tmp_path) for _ in range(2)]
    for other in others: other.create_opt(); other.load('mid')
    others[1].to_half_weights(flat_master=True).to_fp32()
    for other in others: other.fit(1, .01)
    assert same(*map(params, others)) and same_state(*(opt_state(o.opt) for o in others))


@pytest.mark.parametrize('flat', [False, True])
def test_save_model_callback_keeps_the_masters(tmp_path, flat):
    kept = []
    learn = learner(opt_func=Adam, path=tmp_path, cbs=At('after_epoch', lambda l: kept.append(params(l)), order=11)).to_half_weights(flat_master=flat)
    learn.fit(2, .01, cbs=SaveModelCallback(every_epoch=True, with_opt=True))
    for i in (0, 1):
        other = learner(opt_func=Adam, path=tmp_path)
        other.create_opt(); other.load(f'model_{i}')
        assert same(params(other), kept[i]) and not halves(other)
        other.fit(1, .01)
    assert not same(*kept)


RESUME = """
import sys; sys.path[:0] = [{here!r}, {root!r}]
from test_half import *
torch.set_num_threads(1)
learn = learner(opt_func=OPTIMIZERS[{opt!r}], path={path!r}).to_half_weights({dtype!r}, flat_master={flat})
learn.create_opt(); learn.load('a'); learn.fit(1, .01); learn.save('b')
"""

@pytest.mark.parametrize('dtype,opt,flat', [('bf16', 'adam', False), ('fp16', 'adam', True), ('fp16', 'fused adamw', False)])
def test_exact_resume_in_a_new_process(tmp_path, dtype, opt, flat):
    learn = learner(opt_func=OPTIMIZERS[opt], path=tmp_path).to_half_weights(dtype, flat_master=flat)
    learn.fit(2, .01); learn.save('a'); learn.fit(1, .01)
    code = RESUME.format(here=str(HERE), root=str(HERE.parent), opt=opt, path=str(tmp_path), dtype=dtype, flat=flat)
    out = subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    expected = params(learn), opt_state(learn.opt), learn.precision.state_dict()
    learn.load('b')
    assert same(params(learn), expected[0]) and same_state(opt_state(learn.opt), expected[1]) and learn.precision.state_dict() == expected[2]


# -- models of all kinds

def test_kept_tied_frozen_and_odd_parameters():
    class Odd(nn.Module):
        def __init__(self):
            torch.manual_seed(0); super().__init__()
            self.a, self.b, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1)
            self.b.weight = self.a.weight
            self.count = nn.Parameter(torch.tensor([3]), requires_grad=False)
            self.register_buffer('shift', torch.full((6,), .001))
            self.head.bias.requires_grad_(False)
        def forward(self, x):
            seen.append((self.a.weight.dtype, self.a.weight is self.b.weight, self.head.weight.dtype, self.count.dtype, self.shift.dtype))
            return self.head(self.b(torch.tanh(self.a(x)) + self.shift))     # the buffer makes it fp32: `b` takes it all the same
    seen, model = [], Odd()
    before = model.head.bias.clone()
    learn = fitted(model=model, fp32_modules='head')
    assert [p.dtype for p in learn.model.parameters()] == [p.dtype for p in Odd().parameters()] and model.count.item() == 3
    assert set(seen) == {(torch.bfloat16, True, torch.float32, torch.int64, torch.float32)}
    assert model.a.weight is model.b.weight and torch.equal(model.head.bias, before) and not torch.equal(model.a.weight, Odd().a.weight)


def test_norms_of_all_kinds_stay_fp32():
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GroupNorm(2, 8), nn.RMSNorm(8), nn.Unflatten(1, (2, 4)), nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2),
                          nn.InstanceNorm1d(2, affine=True), nn.Flatten(), nn.Linear(8, 1))
    seen = set()
    for m in model: m.register_forward_pre_hook(lambda m, a: seen.update((type(m), p.dtype) for p in m.parameters()))
    for dtype in HALF: fitted(dtype, model=model)
    norms = {nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.BatchNorm1d, nn.InstanceNorm1d}
    assert seen == {(n, torch.float32) for n in norms} | {(m, d) for m in (nn.Linear, nn.Conv1d) for d in HALF.values()}


class Wrapped:
    def __init__(self, model): self.model = model


class Tokens(nn.Module):
    def __init__(self, sparse): torch.manual_seed(0); super().__init__(); self.emb, self.head = nn.Embedding(16, 6, sparse=sparse), nn.Linear(6, 1)
    def forward(self, x): return self.head(self.emb((x[:, 0].abs() * 8).long().clamp(max=15)))


@pytest.mark.parametrize('dtype', HALF)
def test_sparse_embeddings_where_the_optimizer_takes_them(dtype):
    for opt in (SGD, partial(OptimWrapper, opt=torch.optim.SGD)):  # a row's gradients are added in fp32, not in half
        a, b = (fitted(dtype, opt, model=Tokens(sparse), n_epoch=1) for sparse in (True, False))
        assert all(torch.allclose(x, y, atol=2e-3) for x, y in zip(params(a), params(b))) and not same(params(a), params(Wrapped(Tokens(True))))
    for opt in (Adam, partial(OptimWrapper, opt=torch.optim.AdamW)):
        learn = learner(Tokens(True), opt_func=opt).to_half_weights(dtype)
        with pytest.raises(ValueError, match="parameter 'emb.weight' has sparse gradients"): learn.fit(1)
        assert not halves(learn)
    with pytest.raises(ValueError, match='flat_master=True cannot be used with sparse'): fitted(dtype, SGD, model=Tokens(True), flat_master=True)


@pytest.mark.parametrize('model,text', [(lambda: nn.Sequential(nn.LazyLinear(1)), "parameter '0.weight' has no shape"),
                                        (lambda: nn.Sequential(nn.Linear(6, 1).bfloat16()), "parameter '0.weight' is torch.bfloat16 already"),
                                        (lambda: nn.Sequential(torch.jit.script(nn.Linear(6, 1))), "parameter '0.weight' is in a TorchScript")])
def test_refused_by_name(model, text):
    learn = learner(model()).to_half_weights()
    with pytest.raises(ValueError, match=text): learn.fit(1)


def test_transformer_layers_and_checkpointing():
    class Net(nn.Module):
        def __init__(self, again):
            torch.manual_seed(0); super().__init__()
            self.again, self.up = again, nn.Linear(1, 8)
            self.enc, self.head = nn.TransformerEncoderLayer(8, 2, 16, 0., batch_first=True), nn.Linear(8, 1)
        def forward(self, x):
            x = self.up(x[..., None])
            x = torch.utils.checkpoint.checkpoint(self.enc, x, use_reentrant=False) if self.again and self.training else self.enc(x)
            return self.head(x.mean(1))
    a, b = (fitted(opt_func=Adam, model=Net(again)) for again in (False, True))
    assert same(params(a), params(b)) and a.recorder.values[-1][1] < 10


def test_lstm_in_bf16():
    class Net(nn.Module):
        def __init__(self): torch.manual_seed(0); super().__init__(); self.rnn, self.head = nn.LSTM(1, 8, batch_first=True), nn.Linear(8, 1)
        def forward(self, x): return self.head(self.rnn(x[..., None])[0][:, -1])
    learn = learner(Net(), opt_func=Adam).to_half_weights()
    learn.fit(5, .02)
    losses = [v[0] for v in learn.recorder.values]
    assert losses[-1] < losses[0] and all(a is b for a, b in zip(learn.model.rnn._flat_weights, learn.model.rnn.parameters()))


def test_lr_find_leaves_the_learner_as_it_was(tmp_path):
    learn = learner(opt_func=Adam, path=tmp_path).to_half_weights('fp16')
    before = params(learn)
    learn.lr_find(show_plot=False, num_it=10, suggest_funcs=None)
    assert same(params(learn), before) and not halves(learn) and learn.precision.scales == []


# -- without masters

def test_without_masters_small_updates_are_lost_and_it_says_so():
    learn = learner(opt_func=SGD).to_half_weights(master_weights=False)
    parameters = [*learn.model.parameters()]
    with pytest.warns(UserWarning, match=r'which does not compensate.*\d+% of the weights with a gradient did not move'): learn.fit(2, 1e-5)
    assert not halves(learn) and all(a is b for a, b in zip(parameters, learn.model.parameters()))
    for bad in (dict(flat_master=True), dict(dtype='fp16')):
        with pytest.raises(ValueError, match='master_weights=False'): learn.to_half_weights(master_weights=False, **bad)


@pytest.mark.parametrize('flat', [False, True])
@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_gradients_keep_their_memory(opt, flat):
    "Memory given back at each step comes back from the system page by page, zeroed: that can cost more than the step."
    seen = []
    def look(l):
        sets = [(s.grad.data_ptr(), s.grad.data_ptr() + s.grad.nbytes) for s in l.precision._flat.sets]
        seen.append([p.grad.data_ptr() for p in l.model.parameters() if id(p) in {id(m) for m in l.precision._weights.masters}])
        assert not flat or all(any(a <= i < b for a, b in sets) for i in seen[-1])
    learn = fitted(opt_func=OPTIMIZERS[opt], flat_master=flat, cbs=At('after_step', look, order=11))
    assert len(seen) == 12 and seen[1:] == [seen[1]] * 11 and len(seen[0]) == 4
    assert all(p.grad is None or p.grad.untyped_storage().nbytes() == p.grad.nbytes for p in learn.model.parameters())


@pytest.mark.parametrize('flat', [False, True])
@pytest.mark.parametrize('opt', ['sgd', 'fused adamw'])
def test_gradients_of_several_losses_share_no_memory(opt, flat):
    "Multi-task training takes each loss's gradients by itself, with `autograd.grad` or by `backward` and moving `.grad` away."
    count = []
    def several(l):
        if not l.training: return
        ps = l.precision._weights.masters
        one, two = (torch.autograd.grad(l.loss_grad * k, ps, retain_graph=True) for k in (1, 2))
        taken = []
        for k in (4, 8):
            (l.loss_grad * k).backward(retain_graph=True)
            taken.append([p.grad for p in ps])
            for p in ps: p.grad = None
        for k, gs in zip((2, 4, 8), (two, *taken)): assert all(torch.equal(g, k * o) for g, o in zip(gs, one))
        count.append(len(ps))
    def run(*cbs): return params(fitted(opt_func=OPTIMIZERS[opt], flat_master=flat, cbs=cbs, model=nn.Sequential(nn.Linear(6, 1))))
    torch.manual_seed(0)
    learned = run(At('after_loss', several, order=20))
    torch.manual_seed(0)
    assert count == [2] * 12 and same(learned, run())


@pytest.mark.parametrize('flat', [False, True])
def test_another_backward_pass_leaves_gradients_that_were_put_aside(flat):
    "As when the diagnosis runs a batch again: also where gradients were there before `fit` or replaced in it, so that flat masters copied them."
    kept = []
    def replace(l):
        for p in l.model.parameters(): p.grad = p.grad.clone()
    def again(l):
        aside, before = [p.grad for p in l.model.parameters()], [p.grad.clone() for p in l.model.parameters()]
        for p in l.model.parameters(): p.grad = None
        with l.amp_context(): l.model(l.xb[0]).float().sum().backward()
        assert all(p.grad is not None for p in l.model.parameters())
        for p, g in zip(l.model.parameters(), aside): p.grad = g
        kept.append(same(aside, before))
    model = nn.Sequential(nn.Linear(6, 1))
    for p in model.parameters(): p.grad = torch.zeros_like(p)
    fitted(opt_func=SGD, flat_master=flat, model=model, cbs=[At('before_step', replace, order=12), At('after_step', again, order=11)])
    assert kept == [True] * 12


def test_kahan_summation_keeps_small_updates(recwarn):
    from fastxtend_amp.half_weights.callback import kahan
    learn = learner(nn.Sequential(nn.Linear(6, 1)), opt_func=kahan('SGD', weight_decay=0.)).to_half_weights(master_weights=False)
    with torch.no_grad(): learn.model[0].weight.fill_(1.)
    learn.add_cb(At('before_step', lambda l: l.model[0].weight.grad.fill_(1.), order=12))
    learn.fit(20, 1e-4)                                          # 120 steps of 1e-4
    assert torch.allclose(learn.model[0].weight, torch.full((1, 6), 1 - 120e-4), atol=2e-3)
    assert not [w for w in recwarn if 'did not move' in str(w.message)]
    one_cycle = learner(opt_func=kahan('AdamW')).to_half_weights(master_weights=False)
    one_cycle.fit_one_cycle(2, .01)
    assert len(set(one_cycle.recorder.hps['mom'])) > 1 and not halves(one_cycle)


def test_bytes_per_parameter():
    from fastxtend_amp.half_weights.callback import bytes_per_parameter
    def measure(to):
        rows = []
        learn = learner(nn.Sequential(nn.Linear(6, 512, bias=False), nn.Linear(512, 1, bias=False)), opt_func=partial(OptimWrapper, opt=torch.optim.AdamW))
        learn.add_cb(At('after_step', lambda l: rows.append(bytes_per_parameter(l)), order=11))
        to(learn).fit(1)
        return [round(v, 1) for v in rows[-1].values()]
    assert measure(lambda l: l) == [4, 4, 0, 8, 0]
    assert measure(lambda l: l.to_bf16()) == [4, 4, 0, 8, 2]
    assert measure(lambda l: l.to_half_weights()) == [2, 4, 4, 8, 0]
    assert measure(lambda l: l.to_half_weights(flat_master=True)) == [2, 4, 4, 8, 0]
    assert measure(lambda l: l.to_half_weights(master_weights=False)) == [2, 2, 0, 4, 0]


# -- two processes

DDP = """
import sys; sys.path[:0] = [{here!r}, {root!r}]
from test_half import *
import torch.distributed as dist
torch.set_num_threads(1)
rank = int(sys.argv[1])
dist.init_process_group('gloo', init_method='file://{path}/store', rank=rank, world_size=2)
model = two_layers(seed=rank)                                    # DDP hands out rank 0's
class Wrap(Callback):
    order = 11
    def before_fit(self): self.learn.model = nn.parallel.DistributedDataParallel(self.learn.model)
    def after_fit(self): self.learn.model = self.learn.model.module
learn = learner(model, loaders(train=dataset(24, seed=rank)), opt_func=Adam, cbs=Wrap()).to_half_weights({dtype!r}, {kwargs})
learn.fit(1, .01)
torch.save(params(learn), '{path}/' + str(rank))
dist.destroy_process_group()
"""
def two_layers(seed=0): torch.manual_seed(seed); return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


@pytest.mark.parametrize('dtype,kwargs', [('bf16', ''), ('fp16', 'loss_scale=128.'), ('bf16', 'flat_master=True')])
def test_two_processes_reduce_gradients_in_fp32(tmp_path, dtype, kwargs):
    code = DDP.format(here=str(HERE), root=str(HERE.parent), path=str(tmp_path), dtype=dtype, kwargs=kwargs)
    children = [subprocess.Popen([sys.executable, '-W', 'ignore', '-c', code, str(rank)], stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    try:
        for child in children: assert child.wait(120) == 0, child.stderr.read()[-2000:]
    finally:
        for child in children: child.kill(); child.communicate()
    learn = learner(two_layers(), opt_func=Adam)
    learn.create_opt(); learn.opt.set_hypers(lr=.01)
    scale = 128. if dtype == 'fp16' else 1.
    for batches in zip(*(loaders(train=dataset(24, seed=rank)).train for rank in (0, 1))):
        grads = []
        for x, y in batches:
            half = copy.deepcopy(learn.model).to(HALF[dtype])
            for p in half.parameters(): p.grad = None
            (nn.functional.mse_loss(half(x.to(HALF[dtype])).float(), y) * scale).backward()
            grads.append([p.grad.float() for p in half.parameters()])
        for p, *g in zip(learn.model.parameters(), *grads): p.grad = (g[0] / 2 + g[1] / 2) / scale
        learn.opt.step(); learn.opt.zero_grad()
    assert same(torch.load(tmp_path / '0'), torch.load(tmp_path / '1')) and same(torch.load(tmp_path / '0'), params(learn))


def test_diagnosis_names_the_module_and_this_method():
    learn = learner(Attentive(), opt_func=Adam).to_half_weights('fp16', on_overflow='raise')
    with pytest.raises(FloatingPointError, match=r"learn.to_half_weights\('fp16', fp32_modules=\['attn"): learn.fit(1)
    assert not halves(learn)
    kept = learner(Attentive(), opt_func=Adam).to_half_weights('fp16', fp32_modules='attn', on_overflow='raise')
    kept.fit(2, .01)
    assert math.isfinite(kept.recorder.values[-1][0])


@pytest.mark.parametrize('flat', [False, True])
@pytest.mark.parametrize('event', ['before_batch', 'after_epoch'])
def test_copies_made_in_the_middle_of_a_fit(event, flat):
    made = []
    order = 9 if event == 'before_batch' else 11
    def make(l):
        if len(made) < 2: made.append(pickle.loads(pickle.dumps(l)) if made else copy.deepcopy(l))
    class Once(Callback):
        def __reduce__(self): return Callback, ()
    once = Once(); once.order = order; setattr(once, event, lambda: make(learn))
    learn = learner(opt_func=Adam).to_half_weights(flat_master=flat).add_cb(once)
    learn.fit(1, .01)
    for l in made:
        weights = params(l)
        assert not halves(l)
        l.fit(1, .01)
        assert not same(params(l), weights) and not halves(l) and not any(m._forward_pre_hooks for m in l.model.modules())


@pytest.mark.parametrize('task,loses', [('digits', True), ('language model', False)])
def test_trains_as_in_fp32(task, loses):
    fp32 = [final_loss(task, 'fp32', seed) for seed in range(3)]
    spread = max(fp32) - min(fp32)
    assert abs(final_loss(task, 'masters') - fp32[0]) < spread / 4 and abs(final_loss(task, 'no masters, Kahan') - fp32[0]) < spread
    if loses: assert final_loss(task, 'no masters, not compensated') > max(fp32) + spread


@pytest.mark.parametrize('event', ['before_step', 'after_step', 'after_batch'])
def test_models_copied_inside_a_batch_are_the_masters(event):
    copies = []
    learn = learner(opt_func=Adam, cbs=[At(event, lambda l: copies.append((copy.deepcopy(l.model), params(l))), order=11)]).to_half_weights()
    learn.fit(1, .01)
    assert len(copies) >= 6 and all(same([p.detach() for p in m.parameters()], ps) and {p.dtype for p in ps} == {torch.float32} for m, ps in copies)
