"Modules kept in fp32: which ones, what they compute in, and for how long."
import copy, io, pickle
from functools import partial

import pytest, torch
import torch.distributed as dist
from fastai.learner import load_learner
from fastcore.foundation import L
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.nn.parallel import DistributedDataParallel

from fastxtend_amp.fp32_modules import match_modules
from helpers import *


class Notes(nn.Linear):
    "A linear layer that notes the dtype of its input and of its product."
    def forward(self, x):
        out = super().forward(x)
        self.seen = (x.dtype, out.dtype)
        return out


F32, BF16 = torch.float32, torch.bfloat16
def noting(): torch.manual_seed(0); return nn.Sequential(Notes(6, 8), nn.Sequential(Notes(8, 8), nn.ReLU()), Notes(8, 1))
def replaced(model): return [n for n, m in model.named_modules() if 'forward' in vars(m)]


# -- matching

@pytest.mark.parametrize('spec, names', [
    ('attn', ['attn']), ('head.*', ['head.0', 'head.1', 'head.2']), (nn.LayerNorm, ['norm']), (['emb', nn.LayerNorm], ['emb', 'norm']),
    (lambda m: isinstance(m, nn.Linear) and m.out_features == 1, ['head.2']), ({'norm'}, ['norm']), (L('norm', 'emb'), ['emb', 'norm']),
    (('head', 'head.0', 'attn.*'), ['attn.q', 'attn.k', 'attn.v', 'head']), ('(model)', ['(model)']), ('*', ['(model)'])])
def test_what_can_be_named(spec, names): assert list(match_modules(Attentive(), spec)) == names


def test_modules_themselves_and_names_inside_wrappers():
    model = Attentive()
    assert match_modules(model, model.attn) == {'attn': model.attn}
    with pytest.raises(ValueError, match='matches no module'): match_modules(model, Attentive().attn)
    for outer in (torch.compile(model, backend='eager'), nn.DataParallel(model)): assert list(match_modules(outer, 'attn')) == ['attn']
    inner, model.attn = model.attn, torch.compile(model.attn, backend='eager')
    assert match_modules(model, 'attn.q') == {'attn.q': inner.q} and match_modules(model, 'attn') == {'attn': inner}


@pytest.mark.parametrize('spec, error, words', [
    ('atn', ValueError, ["'atn'", "'attn'"]), ('head.7', ValueError, ["'head.7'", "'head.0'"]), (nn.Conv2d, ValueError, ['Conv2d', 'LayerNorm']),
    ('LayerNorm', ValueError, ['give `nn.LayerNorm` itself']), (lambda m: False, ValueError, ['matches no module']),
    (['attn', 'nope'], ValueError, ["'nope'"]), (3, TypeError, ['fp32_modules=3', 'head.*']), (int, TypeError, ['int'])])
def test_what_matches_nothing_is_refused_where_it_is_said(spec, error, words):
    learn = learner(Attentive()).to_bf16()
    before = list(learn.cbs)
    for call in (partial(learn.to_fp16, fp32_modules=spec), partial(learn.to_bf16, fp32_modules=spec),
                 partial(learn.to_amp, fp32_modules=spec), lambda: learner(Attentive(), cbs=MixedPrecision('bf16', fp32_modules=spec))):
        with pytest.raises(error) as e: call()
        assert all(w in str(e.value) for w in words), str(e.value)
    assert list(learn.cbs) == before


def test_a_torchscript_module_and_a_callback_that_could_not_be_added():
    model = nn.Sequential(torch.jit.script(nn.Linear(6, 6)), nn.Linear(6, 1))
    with pytest.raises(ValueError, match="'0' is a TorchScript module.*\nKeep the module around it"): learner(model).to_bf16(fp32_modules='0')
    cb = MixedPrecision('bf16', fp32_modules='attn')
    with pytest.raises(ValueError): learner().add_cb(cb)
    assert cb.learn is None and learner(Attentive(), cbs=cb).precision.fp32_module_names == ['attn']


# -- what they compute in

@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_kept_modules_compute_in_fp32_whatever_is_in_them(mode):
    learn = learner(noting(), cbs=mixed(mode, fp32_modules='1'))
    learn.fit(1)
    half = BF16 if mode == 'bf16' else torch.float16
    assert [m.seen for m in (learn.model[0], learn.model[1][0], learn.model[2])] == [(F32, half), (F32, F32), (F32, half)]


@pytest.mark.parametrize('spec', ['layers', nn.ModuleList])
def test_a_list_of_modules_means_the_modules_in_it(spec):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.out = nn.ModuleList([Notes(6, 6), nn.ModuleList([Notes(6, 6)])]), Notes(6, 1)
        def forward(self, x): return self.out(self.layers[1][0](self.layers[0](x)))
    learn = learner(Net()).to_bf16(fp32_modules=spec)
    learn.fit(1)
    assert learn.precision.fp32_module_names == ['layers.0', 'layers.1.0']
    assert [m.seen[1] for m in (learn.model.layers[0], learn.model.layers[1][0], learn.model.out)] == [F32, F32, BF16]


@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_with_all_modules_kept_training_is_fp32_bit_for_bit(mode):
    plain = learner()
    low = learner(cbs=MixedPrecision(mode, fp32_modules='*', enabled=False))
    for learn in (plain, low): learn.fit(2)
    assert same(params(plain), params(low)) and same_state(opt_state(plain.opt), opt_state(low.opt))


def test_nested_inputs_keywords_and_exceptions():
    class Inner(nn.Linear):
        fail = False
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
    learn.fit(1)
    assert learn.model.inner.seen == [F32, F32, False] and learn.model.after
    learn.model.inner.fail = True
    with pytest.raises(KeyError): learn.fit(1)
    assert learn.model.after and not torch.is_autocast_enabled('cpu')


def test_shared_modules_and_shared_weights():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.out = Notes(6, 6), Notes(6, 6), nn.Linear(6, 1)
            self.c, self.b.weight = self.a, self.a.weight
        def forward(self, x): return self.out(self.c(self.b(self.a(x))))
    learn = learner(Net()).to_bf16(fp32_modules='c')
    learn.fit(1)
    assert learn.model.a.seen[1] is F32 and learn.model.b.seen[1] is BF16


def test_a_module_whose_forward_never_runs_is_told_with_its_parent():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.att, self.head = nn.Linear(1, 8), nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 1)
        def forward(self, x): x = self.emb(x[..., None]); return self.head(self.att(x, x, x)[0]).mean(1)
    learn = learner(Net()).to_bf16(fp32_modules='att.out_proj')
    with pytest.warns(UserWarning, match="(?s)'att.out_proj' was not called.*Keep 'att' instead"): learn.fit(1)
    assert not told(lambda: learner(Net()).to_bf16(fp32_modules='att').fit(2), 'was not called')


# -- how long it lasts

def test_only_while_a_fit_a_validation_or_amp_context_runs():
    learn, seen = learner(Attentive()).to_bf16(fp32_modules=['attn', nn.LayerNorm]), []
    for event in ('after_pred', 'after_batch', 'after_validate'):
        learn.add_cb(At(event, lambda l: seen.append(replaced(l.model)), 40))
    for call in (lambda: learn.fit(1), learn.validate, learn.get_preds):
        call()
        assert seen and all(names == ['attn', 'norm'] for names in seen) and replaced(learn.model) == []
        seen.clear()
    with learn.amp_context():
        assert replaced(learn.model) == ['attn', 'norm']
        learn.validate()
        assert replaced(learn.model) == ['attn', 'norm']
    assert replaced(learn.model) == []


def test_a_second_learner_on_the_model_computes_in_its_own_precision():
    first = learner(noting()).to_bf16(fp32_modules='1')
    first.fit(1)
    for second, dtype in ((learner(first.model).to_bf16(), BF16), (learner(first.model), F32)):
        second.fit(1)
        assert first.model[1][0].seen[1] is dtype
    del first
    assert replaced(second.model) == []


def test_the_last_call_counts():
    learn = learner(noting()).to_bf16(fp32_modules='1')
    for change, names in ((partial(learn.to_bf16, fp32_modules=['0']), ['0']), (learn.to_fp16, []), (partial(learn.to_bf16, fp32_modules='2'), ['2'])):
        change().get_preds()
        assert learn.precision.fp32_module_names == names
        assert [n for n, m in (('0', learn.model[0]), ('1', learn.model[1][0]), ('2', learn.model[2])) if m.seen[1] is F32] == names
    learn.to_fp32().get_preds()
    assert learn.model[0].seen[1] is learn.model[2].seen[1] is F32


def test_a_forward_of_ones_own_on_the_instance_is_used_and_given_back():
    learn, calls = learner(Attentive()), []
    own = learn.model.attn.forward = lambda x: (calls.append(x.dtype), x)[1]
    learn.to_bf16(fp32_modules='attn').fit(1)
    assert set(calls) == {F32} and learn.model.attn.forward is own


def test_another_model_and_modules_exchanged_by_a_callback():
    learn = learner(noting()).to_bf16(fp32_modules='1')
    learn.model = noting()
    learn.create_opt(); learn.fit(1)
    assert learn.model[1][0].seen[1] is F32
    def exchange(l): l.model[1] = nn.Sequential(Notes(8, 8))
    learn.fit(1, cbs=At('before_fit', exchange, 40))
    assert learn.model[1][0].seen[1] is F32 and replaced(learn.model) == []


def clone(how, o): return copy.deepcopy(o) if how == 'deepcopy' else pickle.loads(pickle.dumps(o))


@pytest.mark.parametrize('how', ['deepcopy', 'pickle'])
def test_copies_run_their_own_weights_and_keep_what_the_learner_keeps(how):
    learn = learner(noting()).to_bf16(fp32_modules='1')
    with learn.amp_context(): inside, module = clone(how, learn.model), clone(how, learn.model[1])
    twin = clone(how, learn)
    with torch.no_grad(): [p.zero_() for p in learn.model.parameters()]
    with torch.no_grad(), torch.autocast('cpu', dtype=BF16):
        assert inside(torch.ones(2, 6)).any() and module(torch.ones(2, 8)).any() and not learn.model(torch.ones(2, 6)).any()
    twin.fit(1)
    assert twin.model[1][0].seen[1] is F32 and twin.precision.fp32_module_names == ['1'] and replaced(twin.model) == []
    file = io.BytesIO()
    torch.save(learn.model, file)
    assert b'fastxtend_amp' not in file.getvalue()


def test_exported_learners_keep_it(tmp_path):
    learn = learner(noting(), path=tmp_path).to_bf16(fp32_modules='1')
    learn.export('e.pkl')
    for cpu in (False, True):                                    # for inference on the CPU fastai calls `to_fp32`
        loaded = load_learner(tmp_path / 'e.pkl', cpu=cpu)
        loaded.get_preds(dl=[next(iter(learn.dls.valid))])
        assert [m.seen[1] for m in (loaded.model[0], loaded.model[1][0])] == ([F32, F32] if cpu else [BF16, F32])


# -- captured models

def test_compiled_in_one_graph_with_nested_inputs():
    class Product(nn.Module):
        def forward(self, x, xs): return x @ xs[1]['b'].mT
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.emb, self.product, self.out = nn.Linear(6, 4), Product(), nn.Linear(4, 1)
        def forward(self, x): x = self.emb(x); return self.out(self.product(x, (x, {'b': torch.eye(4)})).relu())
    torch._dynamo.reset()
    torch.manual_seed(0)
    learn, count = learner(Net()).to_bf16(fp32_modules=['product', 'emb']), CompileCounter()
    eager = copy.deepcopy(learn)
    learn.model = torch.compile(learn.model, backend=count, fullgraph=True)
    for l in (learn, eager): l.fit(2)
    graphs = count.frame_count
    for l in (learn, eager): l.fit(1)
    torch._dynamo.reset()
    assert 1 <= graphs <= 4 and count.frame_count == graphs      # training and validation, whole and last batch
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(params(learn), params(eager)))


@pytest.mark.parametrize('capture', [torch.jit.trace, lambda m, x: torch.fx.symbolic_trace(m), lambda m, x: torch.export.export(m, x).module(),
                                     lambda m, x: torch.jit.script(m)], ids=['trace', 'fx', 'export', 'script'])
def test_other_ways_to_capture_a_model_after_training(capture):
    learn, x = learner().to_bf16(fp32_modules='3'), torch.randn(4, 6)
    learn.fit(1)
    model = learn.model.eval()
    assert torch.equal(capture(model, (x,))(x), model(x))


def test_exported_with_the_precision_that_is_on():
    learn, x = learner(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))).to_bf16(fp32_modules='1'), torch.randn(4, 6)
    with torch.no_grad(), learn.amp_context(): captured = torch.export.export(learn.model.eval(), (x,)).module()
    with torch.no_grad(), learn.amp_context(): expected = learn.model(x)
    assert expected.dtype is F32
    with torch.no_grad(), torch.autocast('cpu', dtype=BF16): assert torch.equal(captured(x), expected)


def test_under_ddp():
    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    try:
        plain, wrapped = (learner(noting()).to_bf16(fp32_modules='1') for _ in range(2))
        wrapped.model = DistributedDataParallel(wrapped.model)
        for learn in (plain, wrapped): learn.fit(2)
    finally: dist.destroy_process_group()
    assert same(params(plain), params(wrapped)) and wrapped.model.module[1][0].seen[1] is F32
