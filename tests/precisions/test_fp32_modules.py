"Modules kept in fp32: which ones, what they compute in, and for how long."

import copy, gc, pickle, weakref

import pytest, torch
from fastcore.foundation import L
from torch.optim.swa_utils import AveragedModel
from torch._dynamo.testing import CompileCounter

from fastxtend_amp.precisions.fp32_modules import Fp32Forward, Replaced
from fastxtend_amp.precisions.matching import match_modules
from helpers import *
from interrupts import interrupted_before, lines_of


class Notes(nn.Linear):
    "A linear layer that records the dtype of its product."

    seen = None

    def forward(self, x):
        out = super().forward(x)
        self.seen = out.dtype
        return out


F32, BF16 = torch.float32, torch.bfloat16


def noting():
    torch.manual_seed(0)
    return nn.Sequential(Notes(6, 8), nn.Sequential(Notes(8, 8), nn.ReLU()), Notes(8, 1))


def seen(model):
    return [m.seen for m in model.modules() if isinstance(m, Notes)]


def kept(model, spec):
    return learner(model, cbs=MixedPrecision('bf16', fp32_modules=spec)).precision.fp32_module_names


# -- matching


@pytest.mark.parametrize(
    'spec, names',
    [
        ('attn', ['attn']),
        ('head.*', ['head.0', 'head.1', 'head.2']),
        (nn.LayerNorm, ['norm']),
        (['emb', nn.LayerNorm], ['emb', 'norm']),
        (lambda m: isinstance(m, nn.Linear) and m.out_features == 1, ['head.2']),
        ({'norm'}, ['norm']),
        (L('norm', 'emb'), ['emb', 'norm']),
        (('head', 'head.0', 'attn.*'), ['attn.q', 'attn.k', 'attn.v', 'head']),
        ('(model)', ['(model)']),
        ('*', ['(model)']),
    ],
)
def test_what_can_be_named(spec, names):
    assert kept(Attentive(), spec) == names


def test_modules_themselves_and_names_inside_wrappers():
    model = Attentive()
    assert kept(model, model.attn) == ['attn']
    with pytest.raises(ValueError, match='matches no module'):
        kept(model, Attentive().attn)
    for outer in (torch.compile(model, backend='eager'), nn.DataParallel(model)):
        assert kept(outer, 'attn') == ['attn']
    model.attn = torch.compile(model.attn, backend='eager')
    assert kept(model, 'attn.q') == ['attn.q'] and kept(model, 'attn') == kept(model, model.attn) == ['attn']


@pytest.mark.parametrize(
    'spec, error, words',
    [
        ('atn', ValueError, ["'atn'", 'Modules: attn']),
        ('head.7', ValueError, ["'head.7'", ' head.0']),
        (nn.Conv2d, ValueError, ['Conv2d', 'named_modules()']),
        ('LayerNorm', ValueError, ["'LayerNorm'", 'Give a type itself, such as `nn.LayerNorm`']),
        (lambda m: False, ValueError, ['matches no module']),
        (['attn', 'nope'], ValueError, ["'nope'"]),
        (3, TypeError, ['fp32_modules=3', 'head.*']),
        (int, TypeError, ['int']),
    ],
)
def test_what_matches_nothing_is_refused_where_it_is_said(spec, error, words):
    learn = learner(Attentive()).to_bf16()
    before = list(learn.cbs)
    for call in (learn.to_fp16, learn.to_bf16, learn.to_amp, lambda fp32_modules: kept(Attentive(), fp32_modules)):
        with pytest.raises(error) as e:
            call(fp32_modules=spec)
        assert all(w in str(e.value) for w in words), str(e.value)
    assert list(learn.cbs) == before


def test_a_torchscript_module_is_kept_in_fp32():
    model = nn.Sequential(torch.jit.script(nn.Linear(6, 6)), nn.Linear(6, 1))
    learn, dtypes, own = learner(model).to_bf16(fp32_modules='0'), [], model[0].forward
    learn.add_cb(At('after_pred', lambda l: dtypes.append(l.model[0](l.x).dtype), 0))
    learn.fit(1)
    assert set(dtypes) == {F32} and model[0].forward is own
    dtypes.clear()
    learn.to_bf16().fit(1)
    assert set(dtypes) == {BF16}


def test_a_callback_that_could_not_be_added():
    cb = MixedPrecision('bf16', fp32_modules='attn')
    with pytest.raises(ValueError, match="'attn' matches no module"):
        learner(cbs=cb).fit(1)


# -- what they compute in


@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_kept_modules_compute_in_fp32_whatever_is_in_them(mode):
    learn = learner(noting(), cbs=mixed(mode, fp32_modules='1'))
    learn.fit(1)
    half = BF16 if mode == 'bf16' else torch.float16
    assert seen(learn.model) == [half, F32, half]


def test_a_list_of_modules_means_the_modules_in_it():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6), nn.ModuleList([nn.Linear(6, 6)])])

    for spec in ('layers', nn.ModuleList):
        assert kept(Net(), spec) == ['layers.0', 'layers.1.0']


def test_a_module_with_a_forward_of_its_own_means_itself():
    model = nn.Sequential(nn.Module())
    model[0].layer = nn.Linear(6, 1)
    model[0].forward = lambda x: model[0].layer(x)
    assert kept(model, '0') == ['0']


def test_with_all_modules_kept_training_is_fp32_bit_for_bit():
    plain, low = learner(), learner().to_fp16(fp32_modules='*', enabled=False)
    for learn in (plain, low):
        learn.fit(2)
    assert same(params(plain), params(low)) and same_state(opt_state(plain.opt), opt_state(low.opt))


def test_nested_inputs_keywords_and_exceptions():
    class Inner(nn.Linear):
        def forward(self, xs, *, more):
            self.seen = [xs['a'][0].dtype, more.dtype, torch.is_autocast_enabled('cpu')]
            if self.training and self.fail:
                raise KeyError('inside')
            return {'out': super().forward(xs['a'][0] + more)}

    class Net(nn.Sequential):
        def forward(self, x):
            x = self[0](x)
            try:
                return self[1]({'a': (x, 'text')}, more=x)['out']
            finally:
                self.after = torch.is_autocast_enabled('cpu')

    learn = learner(Net(nn.Linear(6, 4), Inner(4, 1))).to_bf16(fp32_modules='1')
    for learn.model[1].fail in (False, True):
        try:
            learn.fit(1)
        except KeyError:
            pass
        assert learn.model[1].seen == [F32, F32, False] and learn.model.after
    assert not torch.is_autocast_enabled('cpu')


def test_a_module_whose_forward_never_runs_is_told_with_its_parent():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb, self.att, self.head = (
                nn.Linear(1, 8),
                nn.MultiheadAttention(8, 2, batch_first=True),
                nn.Linear(8, 1),
            )

        def forward(self, x):
            x = self.emb(x[..., None])
            return self.head(self.att(x, x, x)[0]).mean(1)

    learn = learner(Net()).to_bf16(fp32_modules='att.out_proj')
    with pytest.warns(UserWarning, match="(?s)'att.out_proj' was not called.*Keep 'att' instead"):
        learn.fit(1)
    assert not told(lambda: learner(Net()).to_bf16(fp32_modules='att').fit(2), 'was not called')


# -- how long it lasts


def test_only_while_a_fit_a_validation_or_amp_context_runs():
    learn, found = learner(Attentive()).to_bf16(fp32_modules=['attn', nn.LayerNorm]), []
    for event in ('after_pred', 'after_batch', 'after_validate'):
        learn.add_cb(At(event, lambda l: found.append(replaced(l.model)), 40))
    for call in (lambda: learn.fit(1), learn.validate, learn.get_preds):
        call()
        assert found and all(names == ['attn', 'norm'] for names in found) and replaced(learn.model) == []
        found.clear()
    with torch.no_grad(), learn.amp_context():
        learn.validate()
        assert replaced(learn.model) == ['attn', 'norm']
    assert replaced(learn.model) == []
    with learn.amp_context():
        pass
    assert replaced(learn.model) == ['attn', 'norm']  # for a backward pass that computes activations again
    assert replaced(learn.to_fp32().model) == []


def test_the_last_call_counts_and_each_learner_on_a_model_has_its_own():
    first = learner(noting()).to_bf16(fp32_modules='1')
    first.fit(1)
    other = learner(first.model)
    for change, expected in (
        (lambda: first.to_bf16(fp32_modules=['0']), [F32, BF16, BF16]),
        (other.to_bf16, [BF16] * 3),
        (lambda: other.to_bf16(fp32_modules='2'), [BF16, BF16, F32]),
        (other.to_fp32, [F32] * 3),
    ):
        change().get_preds()
        assert seen(first.model) == expected and replaced(first.model) == []
    assert first.precision.fp32_module_names == ['0']


def test_a_forward_of_ones_own_on_the_instance_is_used_and_given_back():
    learn, calls = learner(Attentive()), []
    own = learn.model.attn.forward = lambda x: (calls.append(x.dtype), x)[1]
    learn.to_bf16(fp32_modules='attn').fit(1)
    assert set(calls) == {F32} and learn.model.attn.forward is own


def test_an_interrupt_between_two_lines_leaves_no_forward_and_gives_back_ones_own():
    model = mlp()
    own = model[3].forward = lambda x: x
    before = [{**vars(m)} for m in model.modules()]

    def context():
        return Replaced(lambda model: match_modules(model, ['0', '3']), Fp32Forward, model)

    def run(opened):
        opened.__enter__()
        opened.__exit__()

    interrupted = 0
    for line in lines_of(lambda: run(context())):
        opened = context()
        interrupted += interrupted_before(line, lambda: run(opened))
        opened.__exit__()  # as the end of a fit does
        assert [{**vars(m)} for m in model.modules()] == before, line
    assert interrupted > 20 and model[3].forward is own


def test_another_model_and_modules_exchanged_by_a_callback():
    learn = learner(noting()).to_bf16(fp32_modules='1')
    learn.model = noting()
    learn.create_opt()
    learn.fit(1)
    assert seen(learn.model) == [BF16, F32, BF16]

    def exchange(l):
        l.model[1] = nn.Sequential(Notes(8, 8))

    learn.fit(1, cbs=At('before_fit', exchange, 40))
    assert seen(learn.model) == [BF16, F32, BF16] and replaced(learn.model) == []


def test_a_model_that_takes_the_other_ones_place_for_a_validation():
    class Average(Callback):
        "An exponential moving average of the weights, which is validated."

        order = 11

        def before_fit(self):
            self.average = copy.deepcopy(self.learn.model)

        def before_validate(self):
            self.own, self.learn.model = self.learn.model, self.average

        def after_validate(self):
            self.learn.model = self.own

    learn = learner(noting(), cbs=Average()).to_bf16(fp32_modules='1')
    for _ in range(2):
        learn.fit(1)
        assert seen(learn.average.average) == seen(learn.model) == [BF16, F32, BF16]
        assert replaced(learn.model) == replaced(learn.average.average) == []


def test_a_model_without_such_modules_is_validated_with_a_warning():
    learn, own = learner(noting()).to_bf16(fp32_modules='1'), []

    def exchange(l):
        own.append(l.model)
        l.model = AveragedModel(l.model)  # whose module is 'module.1'

    cbs = [At('before_validate', exchange), At('after_validate', lambda l: setattr(l, 'model', own[0]))]
    with pytest.warns(UserWarning, match="(?s)'1' matches no module.*is validated keeps no modules"):
        learn.fit(1, cbs=cbs)
    assert seen(learn.model) == [BF16, F32, BF16]


def test_a_model_exchanged_in_a_training_batch_needs_no_such_modules():
    learn, own = learner(noting()).to_bf16(fp32_modules='1'), []

    def exchange(l):
        own.append(l.model)
        l.model = AveragedModel(l.model)

    after = At('after_batch', lambda l: l.training and setattr(l, 'model', own[-1]), 90)
    learn.fit(1, cbs=[At('after_step', exchange), after])
    assert seen(learn.model) == [BF16, F32, BF16]


def test_models_that_were_exchanged_are_freed():
    learn, models = learner(noting()).to_bf16(fp32_modules='1'), []
    for _ in range(3):
        models.append(weakref.ref(learn.model[1]))
        learn.fit(1)
        learn.model, learn.opt = noting(), None
    learn.fit(1)
    gc.collect()
    assert [m() for m in models] == [None] * 3


@pytest.mark.parametrize('clone', [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=['deepcopy', 'pickle'])
def test_copies_run_their_own_weights_and_keep_what_the_learner_keeps(clone):
    learn = learner(noting()).to_bf16(fp32_modules='1')
    with learn.amp_context():
        inside, module = clone(learn.model), clone(learn.model[1])
    twin = clone(learn)
    with torch.no_grad():
        [p.zero_() for p in learn.model.parameters()]
    with torch.no_grad(), torch.autocast('cpu', dtype=BF16):
        assert (
            inside(torch.ones(2, 6)).any()
            and module(torch.ones(2, 8)).any()
            and not learn.model(torch.ones(2, 6)).any()
        )
    twin.fit(1)
    assert (
        seen(twin.model) == [BF16, F32, BF16]
        and twin.precision.fp32_module_names == ['1']
        and replaced(twin.model) == []
    )
    assert b'fastxtend_amp' not in pickle.dumps(learn.model)


# -- captured models


def test_compiled_in_one_graph_with_nested_inputs():
    class Product(nn.Module):
        def forward(self, x, xs):
            return x @ xs[1]['b'].mT

    class Net(nn.Sequential):
        def forward(self, x):
            x = self[0](x)
            return self[2](self[1](x, (x, {'b': torch.eye(4)})).relu())

    torch._dynamo.reset()
    torch.manual_seed(0)
    learn, count = (
        learner(Net(nn.Linear(6, 4), Product(), nn.Linear(4, 1))).to_bf16(fp32_modules=['0', '1']),
        CompileCounter(),
    )
    eager = copy.deepcopy(learn)
    learn.model = torch.compile(learn.model, backend=count, fullgraph=True)
    for l in (learn, eager):
        l.fit(2)
    graphs = count.frame_count
    for l in (learn, eager):
        l.fit(1)
    torch._dynamo.reset()
    assert 1 <= graphs <= 4 and count.frame_count == graphs  # training and validation, whole and last batch
    for a, b in zip(params(learn), params(eager)):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_exported_with_the_precision_that_is_on():
    learn, x = learner(noting()).to_bf16(fp32_modules='1'), torch.randn(4, 6)
    with torch.no_grad(), learn.amp_context():
        captured, expected = torch.export.export(learn.model.eval(), (x,)).module(), learn.model(x)
    with torch.no_grad(), torch.autocast('cpu', dtype=BF16):
        assert torch.equal(captured(x), expected)


class Shared(nn.Module):
    "One layer in two places of the tree, used twice in a forward pass."

    def __init__(self):
        super().__init__()
        self.a, self.c = nn.Linear(6, 6), nn.Linear(6, 1)
        self.b = self.a

    def forward(self, x):
        return self.c(self.b(self.a(x)))


@pytest.mark.parametrize('spec', [nn.Linear, ['a', 'b']])
def test_a_module_in_two_places(spec):
    learn = learner(Shared()).to_bf16(fp32_modules=spec)
    learn.fit(1)
    assert not replaced(learn.model) and not replaced(learn.to_fp32().model)


def test_a_switch_and_a_copy_in_the_middle_of_a_fit_have_their_own_modules():
    dtypes, copies = [], []
    learn = learner().to_bf16(fp32_modules='0')
    learn.model[0].register_forward_hook(lambda m, i, o: dtypes.append(o.dtype) if m.training else None)

    def switch(l):
        if l.epoch == 1:
            copies.append(copy.deepcopy(l.model))
            l.to_bf16()

    learn.fit(2, cbs=At('before_epoch', switch))
    assert dtypes == [torch.float32] * 6 + [torch.bfloat16] * 6
    with torch.autocast('cpu', torch.bfloat16):
        assert copies[0][0](torch.zeros(1, 6)).dtype is torch.bfloat16


class Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(6, 1)])

    def forward(self, x):
        return x @ self.weights[0]


def test_a_list_of_parameters_has_no_forward_and_a_warning_says_so():
    learn = learner(Listed()).to_bf16(fp32_modules='weights')
    with pytest.warns(UserWarning, match="'weights' was not called"):
        learn.fit(1)
