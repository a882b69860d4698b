import copy, pickle, subprocess, sys, warnings
from functools import partial

import pytest, torch
from fastai.learner import load_learner
from fastcore.foundation import L
from torch import nn

from fastxtend_amp import MixedPrecision
from fastxtend_amp.fp32_modules import Fp32Forward, Fp32Modules, match_modules
from helpers import Attentive, learner, mlp, opt_state, params, same, same_state


def kept(model): return [n for n, m in model.named_modules() if isinstance(m.__dict__.get('forward'), Fp32Forward)]


class Notes(nn.Linear):
    "A linear layer that notes the dtype of its input and of its product."
    def forward(self, x):
        out = super().forward(x)
        self.seen = (x.dtype, out.dtype)
        return out


def noting(): torch.manual_seed(0); return nn.Sequential(Notes(6, 8), nn.Sequential(Notes(8, 8), nn.ReLU()), Notes(8, 1))


# -- matching

@pytest.mark.parametrize('spec,names', [
    ('attn', ['attn']), ('head.*', ['head.0', 'head.1', 'head.2']), (nn.LayerNorm, ['norm']), (['emb', nn.LayerNorm], ['emb', 'norm']),
    (lambda m: isinstance(m, nn.Linear) and m.out_features == 1, ['head.2']), (('head', 'head.0', 'attn.*'), ['attn.q', 'attn.k', 'attn.v', 'head']),
    ('(model)', ['(model)']), ('*', ['(model)']), ({'norm'}, ['norm']), (L('norm', 'emb'), ['emb', 'norm']),
])
def test_what_can_be_named(spec, names):
    assert list(match_modules(Attentive(), spec)) == names


@pytest.mark.parametrize('spec', ['layers', 'layers*', nn.ModuleList])
def test_a_list_of_modules_means_the_modules_in_it(spec):
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.layers, self.out = nn.ModuleList([Notes(6, 6), nn.ModuleList([Notes(6, 6)])]), Notes(6, 1)
        def forward(self, x): return self.out(self.layers[1][0](self.layers[0](x)))
    learn = learner(Net()).to_bf16(fp32_modules=spec)
    learn.fit(1)
    assert kept(learn.model) == ['layers.0', 'layers.1.0']
    assert [m.seen[1] for m in (learn.model.layers[0], learn.model.layers[1][0], learn.model.out)] == [torch.float32, torch.float32, torch.bfloat16]


def test_modules_of_the_model_can_be_named_themselves():
    model = Attentive()
    assert match_modules(model, model.attn) == {'attn': model.attn}
    with pytest.raises(ValueError, match='matches no module'): match_modules(model, Attentive().attn)


def test_names_are_those_of_the_model_inside():
    model = torch.compile(Attentive(), backend='eager')
    assert list(match_modules(model, 'head.*')) == ['head.0', 'head.1', 'head.2']
    assert list(match_modules(nn.DataParallel(Attentive()), 'attn')) == ['attn']
    inner = Attentive()
    inner.attn = torch.compile(inner.attn, backend='eager')
    assert match_modules(inner, 'attn.q') == {'attn.q': inner.attn._orig_mod.q} and match_modules(inner, 'attn') == {'attn': inner.attn._orig_mod}


@pytest.mark.parametrize('spec,error,words', [
    ('atn', ValueError, ["'atn'", "'attn'"]), ('head.7', ValueError, ["'head.7'", "'head.0'"]), (nn.Conv2d, ValueError, ['Conv2d', 'LayerNorm']),
    (lambda m: False, ValueError, ['matches no module']), (['attn', 'nope'], ValueError, ["'nope'"]), (3, TypeError, ['fp32_modules=3', 'head.*']),
    (int, TypeError, ['int']),
])
def test_what_matches_nothing_is_refused_where_it_is_said(spec, error, words):
    learn = learner(Attentive()).to_bf16()
    before = list(learn.cbs)
    for call in (partial(learn.to_fp16, fp32_modules=spec), partial(learn.to_bf16, fp32_modules=spec), partial(learn.to_amp, fp32_modules=spec),
                 lambda: learner(Attentive(), cbs=MixedPrecision('bf16', fp32_modules=spec))):
        with pytest.raises(error) as e: call()
        assert all(w in str(e.value) for w in words), str(e.value)
    assert list(learn.cbs) == before and not kept(learn.model)


# -- what it does

@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_kept_modules_compute_in_fp32_whatever_is_in_them(mode):
    learn = learner(noting())
    getattr(learn, f'to_{mode}')(fp32_modules='1').fit(1)
    half = torch.bfloat16 if mode == 'bf16' else torch.float16
    assert learn.model[0].seen == (torch.float32, half)
    assert learn.model[1][0].seen == (torch.float32, torch.float32)
    assert learn.model[2].seen == (torch.float32, half)


@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_with_all_modules_kept_training_is_fp32_bit_for_bit(mode):
    plain, low = learner(), learner()
    getattr(low, f'to_{mode}')(fp32_modules='*', **({'enabled': False} if mode == 'fp16' else {}))
    for learn in (plain, low): learn.fit(2)
    assert same(params(plain), params(low)) and same_state(opt_state(plain.opt), opt_state(low.opt))


def test_nested_inputs_keywords_and_exceptions():
    class Inner(nn.Linear):
        def forward(self, xs, *, more):
            self.seen = [xs['a'][0].dtype, more.dtype, torch.is_autocast_enabled('cpu')]
            if self.fail: raise KeyError('inside')
            return {'out': super().forward(xs['a'][0] + more)}
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.emb, self.inner = nn.Linear(6, 4), Inner(4, 1)
        def forward(self, x):
            x = self.emb(x)
            try: return self.inner({'a': (x, 'text')}, more=x)['out']
            finally: self.after = torch.is_autocast_enabled('cpu')
    learn = learner(Net()).to_bf16(fp32_modules='inner')
    learn.model.inner.fail = False
    learn.fit(1)
    assert learn.model.inner.seen == [torch.float32, torch.float32, False] and learn.model.after
    learn.model.inner.fail = True
    with pytest.raises(KeyError): learn.fit(1)
    assert learn.model.after and not torch.is_autocast_enabled('cpu')


def test_shared_modules_and_shared_weights():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.c, self.out = Notes(6, 6), Notes(6, 6), None, nn.Linear(6, 1)
            self.c, self.b.weight = self.a, self.a.weight
        def forward(self, x): return self.out(self.c(self.b(self.a(x))))
    learn = learner(Net()).to_bf16(fp32_modules='c')
    learn.fit(1)
    assert kept(learn.model) == ['a'] and learn.model.a.seen[1] is torch.float32 and learn.model.b.seen[1] is torch.bfloat16
    learn.to_fp32()
    assert not kept(learn.model) and 'forward' not in vars(learn.model.a)


def test_outside_autocast_it_changes_nothing():
    model = mlp()
    x = torch.randn(4, 6)
    expected = model.eval()(x)
    Fp32Modules('*').apply(model)
    assert torch.equal(model(x), expected) and model(x.bfloat16()).dtype is torch.float32


def test_the_device_is_that_of_the_weights_not_of_the_first_input():
    class Padded(nn.Module):
        def __init__(self): super().__init__(); self.inner = nn.Linear(6, 1)
        def forward(self, lengths, x): return self.inner(x)
    model = Padded()
    Fp32Modules('(model)').apply(model)
    with torch.autocast('cpu', dtype=torch.bfloat16): assert model(torch.ones(2, device='meta'), torch.randn(2, 6)).dtype is torch.float32


# -- how long it lasts

def test_gone_after_to_fp32_and_replaced_with_the_callback():
    learn = learner(Attentive()).to_fp16(fp32_modules='attn')
    assert kept(learn.model) == ['attn']
    assert kept(learn.to_bf16(fp32_modules='norm').model) == ['norm']
    assert kept(learn.to_fp16().model) == []
    learn.to_bf16(fp32_modules='attn').remove_cb(MixedPrecision)
    assert kept(learn.model) == [] and 'forward' not in vars(learn.model.attn)
    learn.add_cb(MixedPrecision('bf16', fp32_modules='head'))
    assert kept(learn.to_fp32().model) == []


def test_what_was_kept_before_stays_kept():
    learn = learner(Attentive()).to_bf16(fp32_modules='attn')
    with kept_in_fp32(learn.model, ['attn', 'norm']): assert kept(learn.model) == ['attn', 'norm']
    assert kept(learn.model) == ['attn']


def test_a_callback_that_could_not_be_added_belongs_to_no_learner():
    cb = MixedPrecision('bf16', fp32_modules='attn')
    with pytest.raises(ValueError): learner().add_cb(cb)
    assert cb.learn is None and kept(learner(Attentive(), cbs=cb).model) == ['attn']


def test_a_forward_of_ones_own_on_the_instance_is_used_and_given_back():
    learn, calls = learner(Attentive()), []
    own = learn.model.attn.forward = lambda x: (calls.append(x.dtype), x)[1]
    learn.to_bf16(fp32_modules='attn').fit(1)
    assert set(calls) == {torch.float32}
    assert learn.to_fp32().model.attn.forward is own


def test_another_model_and_new_modules_are_kept_when_the_fit_starts():
    learn = learner(noting()).to_bf16(fp32_modules='1')
    old, learn.model = learn.model, noting()
    learn.create_opt(); learn.fit(1)
    assert learn.model[1][0].seen[1] is torch.float32 and not kept(old)
    learn.model[1] = nn.Sequential(Notes(8, 8))
    learn.create_opt(); learn.fit(1)
    assert learn.model[1][0].seen[1] is torch.float32
    forward = learn.model[1].forward
    learn.fit(1)
    assert learn.model[1].forward is forward                     # so that nothing is compiled again


@pytest.mark.parametrize('how', ['deepcopy', 'pickle'])
def test_a_copy_runs_its_own_weights(how):
    learn = learner(Attentive(gain=1.)).to_bf16(fp32_modules='attn')
    learn.fit(1)
    clone = copy.deepcopy if how == 'deepcopy' else (lambda o: pickle.loads(pickle.dumps(o)))
    model, attn = clone(learn.model), clone(learn.model.attn)
    with torch.no_grad(): learn.model.attn.v.weight.zero_(); learn.model.attn.v.bias.zero_()
    x = torch.randn(2, 6, 8)
    assert kept(model) == ['attn'] and model.attn.forward.module is model.attn and attn.forward.module is attn
    assert model.attn(x).abs().sum() > 0 and attn(x).abs().sum() > 0 and learn.model.attn(x).abs().sum() == 0


def test_exported_and_copied_learners_keep_it_and_can_let_go(tmp_path):
    learn = learner(Attentive()).to_bf16(fp32_modules='attn')
    learn.fit(1)
    learn.path = tmp_path
    learn.export('e.pkl')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        loaded = load_learner(tmp_path / 'e.pkl', cpu=False)
        assert not kept(load_learner(tmp_path / 'e.pkl').model)  # for inference on the CPU fastai calls `to_fp32`
    for other in (loaded, copy.deepcopy(learn)):
        assert kept(other.model) == ['attn'] and other.model.attn.forward.module is other.model.attn
        assert not kept(other.to_fp32().model)
    assert kept(learn.model) == ['attn']


def test_checkpoints_do_not_mind(tmp_path):
    learn, other = learner(Attentive(), path=tmp_path).to_bf16(fp32_modules='attn'), learner(Attentive(seed=1), path=tmp_path)
    learn.fit(1)
    learn.save('a')
    other.load('a')
    assert same(params(learn), params(other)) and not kept(other.model)


# -- with what else there is

def test_compiles_in_one_graph():
    from torch._dynamo.testing import CompileCounter
    count = CompileCounter()
    learn = learner(Attentive(gain=1.)).to_bf16(fp32_modules=['attn', 'norm'])
    eager = copy.deepcopy(learn)
    learn.model = torch.compile(learn.model, backend=count, fullgraph=True)
    learn.fit(2)
    eager.fit(2)
    graphs = count.frame_count
    learn.fit(1)
    eager.fit(1)
    assert 1 <= graphs <= 4 and count.frame_count == graphs      # training and validation, whole and last batch
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(params(learn), params(eager)))
    torch._dynamo.reset()


@pytest.mark.parametrize('pack', [lambda x: {'a': x, 'b': x}, lambda x: [x, x], lambda x: (x, {'b': x})])
def test_nested_inputs_compile_in_one_graph(pack):
    class Product(nn.Module):
        def forward(self, xs): a, b = xs.values() if isinstance(xs, dict) else xs; return a @ (b['b'] if isinstance(b, dict) else b).mT
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.emb, self.product = nn.Linear(6, 4), Product()
        def forward(self, x): return self.product(pack(self.emb(x)))
    model = Net()
    Fp32Modules('product').apply(model)
    with torch.autocast('cpu', dtype=torch.bfloat16): out = torch.compile(model, backend='eager', fullgraph=True)(torch.randn(3, 6))
    assert out.dtype is torch.float32
    torch._dynamo.reset()


def test_trains_under_ddp():
    code = '''
import sys, torch, torch.distributed as dist; sys.path.insert(0, 'tests')
from helpers import *
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group('gloo', init_method='file://' + sys.argv[1], rank=0, world_size=1)
plain, wrapped = (learner(Attentive(gain=1.)).to_bf16(fp32_modules='attn') for _ in range(2))
wrapped.model = DistributedDataParallel(wrapped.model)
for learn in (plain, wrapped): learn.fit(2)
print(same(params(plain), params(wrapped)), type(wrapped.model.module.attn.forward).__name__)
dist.destroy_process_group()
'''
    import tempfile
    from pathlib import Path
    with tempfile.TemporaryDirectory() as d:
        out = subprocess.run([sys.executable, '-W', 'ignore', '-c', code, f'{d}/init'], capture_output=True, text=True, timeout=900,
                             cwd=Path(__file__).parent.parent)
    assert out.stdout.split()[-2:] == ['True', 'Fp32Forward'], out.stderr


@pytest.mark.parametrize('how', ['trace', 'fx', 'export', 'script'])
def test_other_ways_to_capture_a_model(how):
    learn, x = learner().to_bf16(fp32_modules='3'), torch.randn(4, 6)
    learn.fit(1)
    model = learn.model.eval()
    if how == 'script':
        with pytest.raises(AttributeError, match='(?s)torch.jit.script cannot.*Fp32Forward.*to_fp32'): torch.jit.script(model)
        assert torch.jit.script(learn.to_fp32().model)(x).dtype == torch.float32
        return
    capture = {'trace': lambda: torch.jit.trace(model, x), 'fx': lambda: torch.fx.symbolic_trace(model),
               'export': lambda: torch.export.export(model, (x,)).module()}[how]
    assert torch.equal(capture()(x), model(x))
    if how != 'export': return
    with torch.no_grad(), torch.autocast('cpu', dtype=torch.bfloat16):   # captured with the precision that is on
        assert capture()(x).dtype == model(x).dtype == torch.float32


def test_a_module_whose_forward_never_runs_is_told_with_its_parent():
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.emb, self.att, self.head = nn.Linear(1, 8), nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 1)
        def forward(self, x): x = self.emb(x[..., None]); return self.head(self.att(x, x, x)[0]).mean(1)
    learn = learner(Net()).to_bf16(fp32_modules='att.out_proj')
    with pytest.warns(UserWarning, match="(?s)'att.out_proj' was not called.*Keep 'att' instead"): learn.fit(1)
    learn = learner(Net()).to_bf16(fp32_modules='att')
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter('always')
        learn.fit(2)
    assert not [w for w in told if 'was not called' in str(w.message)]
