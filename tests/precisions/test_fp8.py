"FP8: linear layers converted as torchao does, and a plain model afterwards; on a CPU, with PyTorch's own kernels."

import copy, subprocess, sys
from pathlib import Path

import fastai.callback.schedule  # noqa: F401  patches Learner
import pytest, torch
from fastai.learner import load_learner

from fastxtend_amp.precisions import fastest_native, fp8
from fastxtend_amp.precisions.fp32_modules import forward_of
from fastxtend_amp import AMPMode, precision_support
from fastxtend_amp.insight.rounding import round_as
from fastxtend_amp.insight.operators import relative_error
import helpers
from helpers import *

pytestmark = pytest.mark.torchao


class Net(nn.Module):
    "A layer that has too few inputs, two that can, one twice, one too narrow."

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.inp, self.head = nn.Linear(6, 32), nn.Linear(16, 1)
        self.body = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 16, bias=False)])

    def forward(self, x):
        x = self.body[0](self.inp(x).relu()).relu()
        return self.head(self.body[1](self.body[0](x)).relu())


def net_learner(**kwargs):
    return learner(Net(), **kwargs)


def in_fp8(learn):
    return [n for n, m in learn.model.named_modules() if isinstance(forward_of(m), fp8.Fp8Forward)]


def seen_in(learn, **fit):
    "The layers in FP8 in each batch of a fit."
    seen = []
    learn.fit(1, cbs=At('after_pred', lambda l: seen.append(in_fp8(l)), 20), **fit)
    return seen


def is_plain(learn):
    return is_outside_a_fit(learn) and {type(m).__module__ for m in learn.model.modules()} <= {
        'torch.nn.modules.linear',
        'torch.nn.modules.container',
        __name__,
    }


def with_torchao(n_epoch, opt_func, dls=None, compiled=lambda model: model):
    "Train as torchao's documentation shows, under bf16 autocast."
    from torchao.float8 import convert_to_float8_training

    learn = net_learner(opt_func=opt_func, dls=dls)
    learn.create_opt()
    learn.opt.set_hypers(lr=0.01)
    model = compiled(convert_to_float8_training(learn.model, module_filter_fn=lambda m, name: 'body' in name))
    for _ in range(n_epoch):
        for xb, yb in learn.dls.train:
            with torch.autocast('cpu', torch.bfloat16):
                loss = nn.functional.mse_loss(model(xb).float(), yb)
            loss.backward()
            learn.opt.step()
            learn.opt.zero_grad()
    return [p.detach() for p in model.parameters()]


def profiled(f):
    with torch.profiler.profile() as found:
        f()
    return {e.key for e in found.key_averages()}


@pytest.mark.parametrize('opt', ['sgd', 'adam', 'fused adamw'])
@pytest.mark.parametrize('bs', [16, 5])
def test_bit_for_bit_as_torchaos_own_conversion(opt, bs):
    make = lambda: loaders(48, bs)
    learn, bf16 = (net_learner(opt_func=OPTIMIZERS[opt], dls=make()) for _ in range(2))
    params_before = list(learn.model.parameters())
    ran = profiled(lambda: learn.to_fp8().fit(2, 0.01))
    bf16.to_bf16().fit(2, 0.01)
    assert 'aten::_scaled_mm' in ran and same(params(learn), with_torchao(2, OPTIMIZERS[opt], make()))
    assert not same(params(learn), params(bf16)) and is_plain(learn)
    assert all(p is q and p.dtype is torch.float32 for p, q in zip(learn.model.parameters(), params_before))
    assert learn.precision.mode is AMPMode.FP8 and repr(learn.precision) == "MixedPrecision('fp8')"
    assert learn.precision.state_dict() == {}


BODY = ['body.0', 'body.1']


@pytest.mark.parametrize(
    'kwargs, expected',
    [
        ({}, BODY),
        ({'modules': 'body'}, BODY),
        ({'modules': ['body.1', 'head']}, ['body.1']),
        ({'modules': lambda m: isinstance(m, nn.Linear) and m.bias is not None}, ['body.0']),
        ({'modules': nn.Linear, 'fp32_modules': 'body.0'}, ['body.1']),
        ({'fp32_modules': 'body.1'}, ['body.0']),
    ],
)
def test_which_layers_take_part(kwargs, expected):
    learn = net_learner().to_fp8(**kwargs)
    assert seen_in(learn) == [expected] * 8 and is_plain(learn)
    learn = learner(nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 1))).to_fp8()
    twice = nn.Linear(16, 16)
    learn.model = nn.Sequential(nn.Linear(6, 16), twice, twice, nn.Linear(16, 1))
    learn.create_opt()
    assert seen_in(learn)[0] == ['1'] and is_plain(learn)


def test_other_layers_of_the_same_type_stay_as_they_are():
    class Own(nn.Linear):
        pass

    weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(16, 16))
    attention, plain = nn.MultiheadAttention(16, 2), nn.Linear(16, 16)
    model = nn.Sequential(Own(16, 16), weight_norm, attention, plain)
    assert [*fp8.FP8().find_layers(model)] == ['3']
    assert [*fp8.FP8().find_layers(plain)] == ['(model)']


def test_what_cannot_be_is_refused_at_once(monkeypatch):
    for call, said in {
        lambda: net_learner().to_fp8(modules='boby'): "(?s)modules='boby' matches no module.*: body,",
        lambda: net_learner().to_fp8(modules='head'): "(?s)modules='head' leaves no linear layer.*16.*to_bf16",
        lambda: learner().to_fp8(): 'leaves no linear layer',
        lambda: net_learner().to_fp8(fp32_modules='*'): 'leaves no linear layer',
        lambda: MixedPrecision('bf16', modules='body'): "modules='body' cannot be used with amp_mode='bf16'",
        lambda: net_learner().to_half_weights('fp8'): '(?s)fp8.*to_fp8',
    }.items():
        with pytest.raises(ValueError, match=said):
            call()
    with pytest.raises(TypeError, match='modules=3 cannot be used'):
        net_learner().to_fp8(modules=3)
    with pytest.raises(TypeError, match="to_fp8.. has no argument 'layers'"):
        net_learner().to_fp8(layers='body')
    for method in ('to_bf16', 'to_fp16', 'to_amp'):
        with pytest.raises(TypeError, match="no argument 'modules'"):
            getattr(net_learner(), method)(modules='body')
    monkeypatch.setitem(sys.modules, 'torchao.float8', None)
    with pytest.raises(ImportError, match='(?s)pip install torchao.*to_bf16'):
        net_learner().to_fp8()


@pytest.mark.parametrize('event', ['before_train', 'after_pred', 'after_backward', 'after_step', 'before_validate'])
@pytest.mark.parametrize('error', [InterruptedError, KeyboardInterrupt])
def test_the_model_is_plain_after_an_exception(event, error):
    def fail(l):
        assert in_fp8(l) == BODY
        raise error('here')

    learn = net_learner().to_fp8()
    with pytest.raises(error):
        learn.fit(1, cbs=At(event, fail, 20))
    assert is_plain(learn)
    learn.fit(1)
    assert is_plain(learn) and finite(learn)


def test_outside_training():
    "A validation, predictions, `amp_context`, `lr_find` compute in FP8; the model itself does not."
    learn, x = net_learner().to_fp8(), torch.ones(16, 6)
    plain = learn.model(x)
    assert 'aten::_scaled_mm' in profiled(learn.validate) and 'aten::_scaled_mm' in profiled(learn.get_preds)
    with learn.amp_context():
        low = learn.model(x)
        assert in_fp8(learn) == BODY
    assert low.dtype is torch.bfloat16 and torch.equal(learn.model(x), plain)
    before = params(learn)
    learn.lr_find(num_it=3, show_plot=False, suggest_funcs=None)
    assert same(params(learn), before) and is_plain(learn)


def test_switches_exchanged_models_and_validations_in_a_fit():
    learn = net_learner().to_bf16()
    to = lambda i, f: At('before_batch', lambda l: l.training and l.iter == i and f(l))
    assert seen_in(learn.to_fp8()) == [BODY] * 8
    seen = []
    learn.fit(1, cbs=[to(2, lambda l: l.to_bf16()), At('after_pred', lambda l: seen.append(in_fp8(l)), 20)])
    assert seen == [BODY] * 3 + [[]] * 5 and is_plain(learn)
    learn.to_fp8()
    model, other = learn.model, copy.deepcopy(learn.model)

    def exchange(l):
        l.validate()
        l.model = other

    seen = seen_in(learn.to_fp8(), wd=0)
    learn.fit(1, cbs=At('after_train', exchange, 20))
    assert learn.model is other and is_plain(learn)
    learn.model = model
    assert is_plain(learn)


def test_copies_and_exports_from_inside_a_fit_are_plain(tmp_path):
    learn, copies = net_learner(path=tmp_path).to_fp8(), []
    learn.fit(1, cbs=At('after_train', lambda l: (l.validate(), copies.append(copy.deepcopy(l.model))), 20))
    x = torch.ones(16, 6)
    assert 'aten::_scaled_mm' not in profiled(lambda: copies[0](x)) and type(copies[0].body[0]) is nn.Linear


def test_files_load_without_torchao(tmp_path):
    learn = net_learner(path=tmp_path).to_fp8(modules='body')
    learn.fit(1)
    learn.save('model')
    learn.export('export.pkl')
    torch.save(learn.model(torch.ones(2, 6)), tmp_path / 'expected.pt')
    script = f"""
import sys; sys.modules['torchao'] = None
sys.path[:0] = {[str(Path(helpers.__file__).parent), str(Path(__file__).parent)]!r}
import torch
from pathlib import Path
from fastai.learner import load_learner
from test_fp8 import net_learner
path = Path({str(tmp_path)!r})
for learn in (net_learner(path=path).load('model'), load_learner(path/'export.pkl')):
    assert torch.equal(learn.model(torch.ones(2, 6)), torch.load(path/'expected.pt'))
try: net_learner().to_fp8()
except ImportError as e: assert 'pip install torchao' in str(e)
else: raise AssertionError
"""
    done = subprocess.run([sys.executable, '-W', 'ignore', '-c', script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert load_learner(tmp_path / 'export.pkl').precision is None


@pytest.mark.parametrize(
    'how, backend',
    [('model', 'aot_eager'), ('in place', 'aot_eager'), pytest.param('model', 'inductor', marks=pytest.mark.slow)],
)
def test_compiled(how, backend):
    learn, compiled = net_learner(dls=loaders(48, 16), opt_func=SGD), partial(torch.compile, backend=backend)
    if how == 'model':
        learn.model = compiled(learn.model)
    else:
        learn.model.compile(backend=backend)
    ran = profiled(lambda: learn.to_fp8().fit(2, 0.01))
    assert not in_fp8(learn) and learn.precision.fit is None and 'aten::_scaled_mm' in ran
    assert same(params(learn), with_torchao(2, SGD, loaders(48, 16), compiled))
    torch._dynamo.utils.counters.clear()
    learn.fit(1, 0.01)
    assert not torch._dynamo.utils.counters['stats']  # nothing is compiled again


# -- devices, report, comparison


def test_where_it_is_emulated_one_warning_says_so():
    table = precision_support('cpu').set_index('mode')
    assert table.support['fp8'] == 'emulated' and '8.9' in table.why['fp8']
    said = told(lambda: net_learner().to_fp8().fit(2), 'fp8 is emulated')
    assert len(said) == 1 and '8.9' in said[0] and 'fp8' not in [fastest_native(torch.device('cpu'))]


def test_the_report_rounds_as_torchao_does():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    layer = nn.Linear(64, 48)
    x = torch.randn(32, 64).bfloat16().float().requires_grad_()  # which torchao casts to bf16 only on a GPU
    theirs = convert_to_float8_training(copy.deepcopy(layer), config=Float8LinearConfig(emulate=True))
    weight = torch.randn(32, 48) * torch.logspace(-4, 0, 48)

    def run(layer):
        x.grad = None
        with torch.autocast('cpu', torch.bfloat16):
            out = layer(x)
        (out.float() * weight).sum().backward()
        return out, x.grad, layer.weight.grad, layer.bias.grad

    theirs = run(theirs)
    plain = [t.detach().clone() for t in run(copy.deepcopy(layer))]
    round_as(fp8.rounded, layer)
    for ours, expected, bf16 in zip(run(layer), theirs, plain):
        assert relative_error(ours, expected) < 0.1 * max(relative_error(bf16, expected), 0.05)


class Outlier(nn.Module):
    "One feature is a million times larger than all others, and has no weight."

    def forward(self, x):
        return torch.cat([x[:, :1] * 1e6, x[:, 1:]], 1)


def test_the_report_finds_what_only_fp8_breaks():
    def verdicts(*more):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), Outlier(), nn.Linear(16, 16), nn.ReLU(), *more, nn.Linear(16, 1))
        model[2].weight.data[:, 0] = 0
        learn = learner(model)
        found = learn.precision_report(['bf16', 'fp8']).verdicts
        assert found['bf16'].verdict == 'safe so far' and "error of '2'" in found['fp8'].reason
        exec(found['fp8'].call, {'learn': learn})
        return found

    found = verdicts(nn.Linear(16, 16))['fp8']
    assert found.verdict == 'keep modules in fp32' and found.modules == ['2']
    assert found.call == "learn.to_fp8(fp32_modules=['2'])"
    found = verdicts()['fp8']
    assert found.verdict == 'cannot run' and found.call in ('learn.to_bf16()', 'learn.to_fp32()')  # no layer is left
    safe = net_learner().precision_report(['bf16', 'fp8'])
    errors = safe.table.groupby('mode')['error'].max()
    assert safe.verdicts['fp8'].verdict == 'safe so far' and 0.01 < errors['fp8'] < 0.1 > 5 * errors['bf16']


def test_the_report_names_the_layers():
    found = net_learner().precision_report(['fp8', 'bf16'])
    (note,) = [n for n in found.notes if 'FP8' in n]
    assert [*found.verdicts] == ['fp8', 'bf16'] and "'body.0', 'body.1' would compute in FP8" in note
    found = net_learner().to_fp8(fp32_modules='body.0').precision_report('fp8')
    assert any("fp8: 'body.1' would compute" in n for n in found.notes)
    small = nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 1))
    found = learner(small).to_fp8(min_size=64).precision_report('fp8')
    assert any("fp8: '2' would compute" in n for n in found.notes)
    none = learner().precision_report('fp8').verdicts['fp8']
    assert none.verdict == 'cannot run' and 'leaves no linear layer' in none.reason
    assert not any('FP8' in n for n in net_learner().precision_report('bf16').notes)


def test_a_row_of_the_comparison():
    learn = net_learner()
    before = params(learn)
    found = learn.compare_precision(['bf16', 'fp8'], 6, n_seeds=0)
    assert list(found.table.index) == ['fp32', 'bf16', 'fp8'] and found.table.support['fp8'] == 'emulated'
    assert found.losses['fp8'] != found.losses['bf16'] and same(params(learn), before) and not in_fp8(learn)
    assert found.calls['fp8'] == 'learn.to_fp8()'
    found.plot()
    found.apply(learn, 'fp8')
    assert learn.precision.mode is AMPMode.FP8
    learn.to_fp8(modules='body.1', fp32_modules='head')
    found = learn.compare_precision(['fp8'], 2, n_seeds=0)
    assert found.calls['fp8'] == "learn.to_fp8(fp32_modules=['head'], modules=['body.1'])"
    failed = learner().compare_precision(['fp8'], 2, n_seeds=0).table
    assert failed.support['fp8'] == 'failed' and 'linear layer' in failed.note['fp8']


def test_training_that_goes_wrong_is_diagnosed_as_in_bf16():
    class Wrong(nn.Module):
        def forward(self, x):
            return x.bfloat16().mul(1e38).mul(1e3).float().mul(0.0) if torch.is_autocast_enabled('cpu') else x

    torch.manual_seed(0)
    learn = learner(nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 16), Wrong(), nn.Linear(16, 1))).to_fp8()
    (said,) = told(lambda: learn.fit(1), 'training failed')
    assert said.startswith('fp8 training failed') and "fp32: `learn.to_fp8(fp32_modules=['2'])`" in said
    assert is_outside_a_fit(learn)
