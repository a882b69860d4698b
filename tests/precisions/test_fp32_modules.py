"Modules kept in fp32: which ones, what they compute in, and for how long."

import copy, pickle, re
from contextlib import nullcontext
from functools import partial

import pytest, torch
from fastai.callback.core import Callback
from fastcore.foundation import L
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from fastxtend_amp import MixedPrecision
from fastxtend_amp.precisions.matching import qualified_names
from helpers import At, Attentive, finite, is_outside_a_fit, learner, mlp, output_dtypes, params, replaced, same
from helpers import told
from training.rows import BF16, FP32, Shared, lazy


class Notes(nn.Linear):
    "A linear layer that records the dtype of its product."

    seen = None

    def forward(self, x):
        out = super().forward(x)
        self.seen = out.dtype
        return out


def noting():
    torch.manual_seed(0)
    return nn.Sequential(Notes(6, 8), nn.Sequential(Notes(8, 8), nn.ReLU()), Notes(8, 1))


def seen(model):
    return [m.seen for m in model.modules() if isinstance(m, Notes)]


def kept(model, spec):
    return learner(model, cbs=MixedPrecision('bf16', fp32_modules=spec)).mixed_precision.fp32_module_names


MIDDLE = [BF16, FP32, BF16]  # `seen` with the second layer in fp32

# -- which


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


def test_a_name_with_the_signs_of_wildcards_means_itself():
    assert kept(nn.ModuleDict({'a[0]': nn.Linear(1, 1), 'a0': nn.Linear(1, 1)}), 'a[0]') == ['a[0]', 'a0']


def test_modules_themselves_lists_and_names_inside_wrappers():
    model = Attentive()
    assert kept(model, model.attn) == ['attn']
    model.empty = nn.ModuleList()
    for nothing in (Attentive().attn, 'empty'):
        with pytest.raises(ValueError, match='matches no module'):
            kept(model, nothing)
    for outer in (torch.compile(model, backend='eager'), nn.DataParallel(model)):
        assert kept(outer, 'attn') == ['attn']
    model.attn = torch.compile(model.attn, backend='eager')
    assert kept(model, 'attn.q') == ['attn.q'] and kept(model, 'attn') == kept(model, model.attn) == ['attn']
    assert [name for name, _ in qualified_names(model)].count('attn') == 1
    lists = nn.Module()
    lists.layers = nn.ModuleList([nn.Linear(6, 6), nn.ModuleList([nn.Linear(6, 6)])])
    for spec in ('layers', nn.ModuleList):
        assert kept(lists, spec) == ['layers.0', 'layers.1.0']
    own = nn.Sequential(nn.Module())
    own[0].forward = lambda x: x  # on the instance
    assert kept(own, '0') == ['0']


# -- in what


def test_nested_inputs_keywords_and_exceptions():
    class Inner(nn.Linear):
        def forward(self, xs, *, more):
            self.seen = [xs['a'][0].dtype, more.dtype, torch.is_autocast_enabled('cpu')]
            if self.fail:
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
        with pytest.raises(KeyError) if learn.model[1].fail else nullcontext():
            learn.fit(1)
        assert learn.model[1].seen == [FP32, FP32, False] and learn.model.after


def test_what_a_module_adds_to_a_list_is_kept():
    "As a router adds its loss."

    class Router(nn.Linear):
        def forward(self, x, losses):
            out = super().forward(x)
            losses.append(out.mean())
            return out

    class Net(nn.Sequential):
        def forward(self, x):
            self.losses = []
            return self[1](self[0](x), self.losses)

    learn = learner(Net(nn.Linear(6, 4), Router(4, 1))).to_bf16(fp32_modules='1')
    learn.fit(1)
    assert [t.dtype for t in learn.model.losses] == [FP32]


def test_other_kinds_of_modules():
    "TorchScript's, lazy ones, one in two places, one with a parametrization, one with a forward on the instance."
    weight_norm, own = mlp(), mlp()
    scripted = nn.Sequential(copy.deepcopy(torch.jit.script(nn.Linear(6, 6))), nn.Linear(6, 1))  # as from a file
    parametrizations.weight_norm(weight_norm[0])
    own[0].forward = given = partial(nn.Linear.forward, own[0])
    for model, spec in ((scripted, '0'), (lazy(), '0'), (Shared(), ['a', 'b']), (weight_norm, '0'), (own, '0')):
        module, dtypes = next(model.children()), set()
        learn = learner(model).to_bf16(fp32_modules=spec)
        learn.fit(1, cbs=At('after_pred', lambda l: dtypes.add(module(l.x).dtype), 0))
        assert dtypes == {FP32} and finite(learn)
    assert vars(own[0])['forward'] is given


def test_a_module_that_never_runs_is_named():
    class Net(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x)[0][:, :1]

    build = lambda: nn.Sequential(Net(6, 2))
    for spec, words in (('0.out_proj', "(?s)'0.out_proj'.*'0'"), ('0', '')):
        said = told(lambda: learner(build()).to_bf16(fp32_modules=spec).fit(1), "'0")
        assert bool(said) is bool(words) and re.search(words, ''.join(said))


# -- how long


def test_only_in_a_fit_a_validation_or_amp_context():
    learn, found = learner(Attentive()).to_bf16(fp32_modules=['attn', nn.LayerNorm]), []
    for event in ('after_pred', 'after_batch', 'after_validate'):
        learn.add_cb(At(event, lambda l: found.append(replaced(l.model)), 40))
    for call in (lambda: learn.fit(1), learn.validate, learn.get_preds):
        call()
        assert found and all(names == ['attn', 'norm'] for names in found) and replaced(learn.model) == []
        found.clear()
    with torch.no_grad(), learn.amp_context():
        assert replaced(learn.model) == ['attn', 'norm']
    assert replaced(learn.model) == []

    def in_context(l):
        with l.amp_context():
            assert replaced(l.model) == ['attn', 'norm']

    learn.fit(1, cbs=At('before_fit', in_context, 20))


def test_each_learner_on_a_model_has_its_own():
    first = learner(noting()).to_bf16(fp32_modules='1')
    first.fit(1)
    other = learner(first.model)
    for change, expected in (
        (lambda: first.to_bf16(fp32_modules=['0']), [FP32, BF16, BF16]),
        (other.to_bf16, [BF16] * 3),
        (lambda: other.to_bf16(fp32_modules='2'), [BF16, BF16, FP32]),
        (other.to_fp32, [FP32] * 3),
    ):
        change().get_preds()
        assert seen(first.model) == expected and replaced(first.model) == []
    assert first.mixed_precision.fp32_module_names == ['0']
    dtypes = output_dtypes(first)
    first.fit(2, cbs=At('before_epoch', lambda l: l.epoch and l.to_bf16()))
    assert dtypes == [FP32] * 6 + [BF16] * 6


class WrapsForward(Callback):
    "Wraps a module's forward until the end of a fit, as activation checkpointing and loggers do."

    own = None

    def __init__(self, event, order):
        self.order, self.calls = order, 0
        setattr(self, event, self.wrap)

    def wrap(self):
        if self.own:
            return
        self.module = self.learn.model[0]
        self.own = own = self.module.forward

        def forward(x):
            self.calls += 1
            return own(x)

        self.module.forward = forward

    def after_fit(self):
        if self.own:
            self.module.forward, self.own = self.own, None


@pytest.mark.parametrize('event, order, n', [('before_fit', 9, 28), ('before_fit', 20, 28), ('before_train', 20, 24)])
def test_a_callback_that_wraps_the_forward(event, order, n):
    "The last one wraps the forward that computes in fp32, and puts it back when the fit has ended."
    learn, plain = (learner(cbs=cb).to_bf16(fp32_modules='0') for cb in (WrapsForward(event, order), None))
    for l in (learn, plain):
        l.fit(2, 0.01)
        l.validate()
        l.get_preds()
        l.fit(1, 0.01)
    assert learn.wraps_forward.calls == n and same(params(learn), params(plain))
    kept = []
    learn.fit(1, 0.01, cbs=At('after_pred', lambda l: kept.append(l.model[0].forward)))
    with torch.autocast('cpu', BF16):
        assert kept[0](torch.ones(2, 6)).dtype is BF16  # a forward of a fit is a plain one after it
    dtypes = output_dtypes(learn.to_bf16())
    learn.fit(1)
    assert {*dtypes} == {BF16}


def average(l):
    l.own = l.model
    l.model = copy.deepcopy(l.model)


def wrapped_average(l):
    "In which the module has another name."
    l.own = l.model
    l.model = AveragedModel(l.model)


def give_back(l):
    l.model = l.own


def test_models_and_modules_that_are_exchanged():
    learn, left = learner(noting()).to_bf16(fp32_modules='1'), []
    learn.model, learn.opt = noting(), None
    learn.fit(1)
    assert seen(learn.model) == MIDDLE
    learn.fit(1, cbs=At('before_fit', lambda l: l.model.__setitem__(1, nn.Sequential(Notes(8, 8))), 40))
    assert seen(learn.model) == MIDDLE and replaced(learn.model) == []
    cbs = lambda f: [At('before_validate', f, 11), At('after_validate', give_back, 11)]
    look = At('after_validate', lambda l: left.append(replaced(l.own)))
    learn.fit(1, cbs=[*cbs(average), look])
    assert left == [[]] and seen(learn.model) == MIDDLE and replaced(learn.model) == []
    with pytest.raises(ValueError, match="'1' matches no module"):
        learn.fit(1, cbs=cbs(wrapped_average))
    give_back(learn)
    assert is_outside_a_fit(learn)
    in_batch = [At('after_step', wrapped_average), At('after_batch', lambda l: l.training and give_back(l), 90)]
    learn.fit(1, cbs=in_batch)
    assert seen(learn.model) == MIDDLE and replaced(learn.model) == []


@pytest.mark.parametrize('clone', [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=['deepcopy', 'pickle'])
def test_copies_compute_with_their_own_weights(clone):
    "Also one made in a fit, which is a plain model; that of a learner keeps what the learner keeps."
    learn = learner(noting()).to_bf16(fp32_modules='1')
    with learn.amp_context():
        inside = clone(learn.model)
    twin, x = clone(learn), torch.ones(2, 6)
    with torch.no_grad(), torch.autocast('cpu', dtype=BF16):
        [p.zero_() for p in learn.model.parameters()]
        assert inside(x).any() and not learn.model(x).any() and seen(inside) == [BF16] * 3
    twin.fit(1)
    assert seen(twin.model) == MIDDLE and replaced(twin.model) == []
