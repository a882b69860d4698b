"FP8: linear layers compute as torchao's, and the model is a plain one afterwards; rows.py has it in other loops."

import copy
from functools import partial

import pytest, torch
from fastai.learner import load_learner
from torch import nn

from fastxtend_amp import AMPMode, precision_support
from fastxtend_amp.insight.values import relative_error
from fastxtend_amp.precisions import fastest_native, fp8
from fastxtend_amp.training.current import precision_callback
from helpers import At, is_outside_a_fit, learner, loaders, params, python, replaced, same, told
from training.rows import BF16, FP32, in_torchao, make, wide

pytestmark = pytest.mark.torchao
BODY = ['1', '2']  # layers of `wide` that can compute in FP8


def profiled(f):
    with torch.profiler.profile() as found:
        f()
    return {e.key for e in found.key_averages()}


def in_fp8(learn, f):
    return 'aten::_scaled_mm' in profiled(f)


def fp8_layers(l):
    return [n for n in replaced(l.model) if n not in l.mixed_precision.fp32_module_names]


def is_plain(learn):
    kinds = {type(m).__module__.partition('.')[0] for m in learn.model.modules()}
    return is_outside_a_fit(learn) and kinds <= {'torch', 'rows', 'training'}


def test_a_fit_changes_neither_model_nor_parameters():
    "The numbers are those of torchao's own conversion: tests/training/test_equality.py."
    learn, bf16 = (learner(wide(), loaders(48, 16)) for _ in range(2))
    before = list(learn.model.parameters())
    assert in_fp8(learn, lambda: learn.to_fp8().fit(2, 0.01))
    bf16.to_bf16().fit(2, 0.01)
    assert not same(params(learn), params(bf16)) and is_plain(learn)
    assert all(p is q and p.dtype is FP32 for p, q in zip(learn.model.parameters(), before))
    assert learn.mixed_precision.amp_mode is AMPMode.FP8 and learn.mixed_precision.state_dict() == {}


def not_square(m):
    return isinstance(m, nn.Linear) and m.in_features != m.out_features


class Own(nn.Linear):
    "torchao converts it as well, and would leave out what a subclass does."


def others():
    "A subclass, a layer with a parametrization, and one that computes in FP8."
    body = Own(16, 16), nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), nn.Linear(16, 16)
    return nn.Sequential(nn.Linear(6, 16), *body, nn.Linear(16, 1))


@pytest.mark.parametrize(
    'model, kwargs, expected',
    [
        (wide, {}, BODY),
        (wide, {'modules': ['2', '4']}, ['2']),
        (wide, {'modules': not_square}, ['2']),
        (wide, {'modules': nn.Linear, 'fp32_modules': '1'}, ['2']),
        (wide, {'min_size': 32}, ['1']),
        (others, {}, ['3']),
    ],
)
def test_which_layers_compute_in_it(model, kwargs, expected):
    learn, seen = learner(model()).to_fp8(**kwargs), []
    learn.fit(1, cbs=At('after_pred', lambda l: seen.append(fp8_layers(l)), 20))
    assert seen == [expected] * 8 and is_outside_a_fit(learn)


def test_outside_training():
    "A validation, predictions, `amp_context` compute in FP8; the model itself does not, nor a copy made in a fit."
    learn, x, copies = learner(wide()).to_fp8(), torch.ones(16, 6), []
    plain = learn.model(x)
    for f in (learn.validate, learn.get_preds):
        assert in_fp8(learn, f)
    with learn.amp_context():
        low = learn.model(x)
    assert low.dtype is BF16 and torch.equal(learn.model(x), plain)
    learn.fit(1, cbs=At('after_train', lambda l: copies.append(copy.deepcopy(l.model)), 20))
    with torch.autocast('cpu', BF16):
        assert not in_fp8(learn, lambda: copies[0](x)) and is_plain(learn)
    twin = learner(copies[0]).to_fp8()
    assert in_fp8(twin, lambda: twin.fit(1)) and is_plain(twin)
    for b in learn.dls.train:  # a loop of one's own
        learn.model.train()
        learn.training, learn.dl = True, learn.dls.train
        assert in_fp8(learn, lambda: learn.one_batch(0, b)) and not in_fp8(learn, lambda: learn.model(x))


WITHOUT = '''
import sys
sys.modules['torchao'] = None
import torch
from fastai.learner import load_learner
from helpers import learner
from training.rows import wide
path = {path!r}
for learn in (learner(wide(), path=path).load('model'), load_learner(path + '/export.pkl')):
    assert torch.equal(learn.model(torch.ones(2, 6)), torch.load(path + '/expected.pt'))
try: learner(wide()).to_fp8()
except ImportError as e: print(e)
'''


def test_files_load_without_torchao(tmp_path):
    learn = learner(wide(), path=tmp_path).to_fp8(modules='1')
    learn.fit(1)
    learn.save('model')
    told(lambda: learn.export('export.pkl'))
    torch.save(learn.model(torch.ones(2, 6)), tmp_path / 'expected.pt')
    done = python('-c', WITHOUT.format(path=str(tmp_path)))
    assert 'pip install torchao' in done.stdout, done.stderr
    assert precision_callback(load_learner(tmp_path / 'export.pkl')) is None


@pytest.mark.parametrize('how', ['wrapped', 'in place', pytest.param('inductor', marks=pytest.mark.slow)])
def test_compiled(how):
    torch._dynamo.reset()  # PyTorch compiles a function eight times in a process
    backend = 'inductor' if how == 'inductor' else 'aot_eager'
    learn, theirs = (make('fp32', 'wide', dls=loaders(48, 16)) for _ in range(2))
    theirs.model = torch.compile(in_torchao(theirs.model), backend=backend)
    if how == 'in place':
        learn.model.compile(backend=backend)
    else:
        learn.model = torch.compile(learn.model, backend=backend)
    theirs.to_bf16().fit(2, 0.01)
    assert in_fp8(learn, lambda: learn.to_fp8().fit(2, 0.01)) and learn.mixed_precision.fit is None
    assert same(params(learn), params(theirs))
    torch._dynamo.utils.counters.clear()
    learn.fit(1, 0.01)
    assert not torch._dynamo.utils.counters['stats']  # nothing is compiled again


def test_what_cannot_be():
    for call, said in {
        lambda: learner(wide()).to_fp8(modules='boby'): "modules='boby' matches no module",
        lambda: learner(wide()).to_fp8(modules='4'): "(?s)modules='4' leaves no linear layer.*16.*to_bf16",
        lambda: learner().to_fp8(): 'leaves no linear layer',
        lambda: learner(wide()).to_fp8(fp32_modules='*'): 'leaves no linear layer',
    }.items():
        with pytest.raises(ValueError, match=said):
            call()
    with pytest.raises(TypeError, match='modules=3 cannot be used'):
        learner(wide()).to_fp8(modules=3)
    table = precision_support('cpu').set_index('precision')
    assert table.support['fp8'] == 'emulated' and '8.9' in table.why['fp8']
    said = told(lambda: learner(wide()).to_fp8().fit(2), 'fp8 is emulated')
    assert len(said) == 1 and '8.9' in said[0] and fastest_native(torch.device('cpu')) != 'fp8'


# -- in reports and comparisons


def test_the_report_rounds_as_torchao_does():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    layer = nn.Linear(64, 48)
    x = torch.randn(32, 64).bfloat16().float().requires_grad_()  # which torchao casts to bf16 only on a GPU
    theirs = convert_to_float8_training(copy.deepcopy(layer), config=Float8LinearConfig(emulate=True))
    weight = torch.randn(32, 48) * torch.logspace(-4, 0, 48)

    def run(layer):
        x.grad = None
        with torch.autocast('cpu', BF16):
            out = layer(x)
        (out.float() * weight).sum().backward()
        return [t.detach().clone() for t in (out, x.grad, layer.weight.grad, layer.bias.grad)]

    theirs, plain = run(theirs), run(copy.deepcopy(layer))
    layer.forward = partial(fp8.rounded_linear, layer)
    for ours, expected, bf16 in zip(run(layer), theirs, plain):
        assert relative_error(ours, expected) < 0.1 * max(relative_error(bf16, expected), 0.05)


class Apart(nn.Module):
    "A layer that is called by keyword, and one that the model keeps out of autocast."

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = self.a(input=x)
        with torch.autocast(x.device.type, enabled=False):
            return self.b(x.float())


def test_a_report_on_layers_outside_autocast_and_called_by_keyword():
    learn = learner(nn.Sequential(nn.Linear(6, 16), Apart(), nn.Linear(16, 1)))
    (verdict,) = learn.precision_report('fp8').verdicts.values()
    assert verdict.verdict == 'safe so far', verdict


def test_a_report_and_a_comparison():
    learn = learner(wide()).to_fp8(modules='1', fp32_modules='4')
    report, before = learn.precision_report(['fp8', 'bf16']), params(learn)
    assert (
        "fp8: the rounding of '1' was simulated" in ' '.join(report.notes)
        and report.verdicts['fp8'].verdict == 'safe so far'
    )
    found = learn.compare_precision(['bf16', 'fp8'], 6, n_seeds=0)
    assert found.losses['fp8'] != found.losses['bf16'] and same(params(learn), before) and is_plain(learn)
    assert found.calls['fp8'] == "learn.to_fp8(fp32_modules=['4'], modules=['1'])"
    (none,) = learner().precision_report(['fp8']).verdicts.values()
    assert none.verdict == 'cannot run' and 'leaves no linear layer' in none.reason
