"The verdicts as tables: arithmetic and models that are flagged, and why, and those that must not be."

import math, re

import pytest, torch
from torch import nn
from torch.nn import functional as F

from fastxtend_amp.insight.operations import Operation
from helpers import Attentive, Data, dataset, learner, linear, loaders, mlp, set_support
from models import KEEP, SAFE, STEPS, Act, Force, InNumPy, NeedsFp32, Own, Times, cancels, checks, inner, large
from models import layers, lora, loud_loss, loud_rms, over_sums, report_on, sqrt_gate, steps, trained, unit
from models import verdict_on
from states import blurred

OVERFLOWS = "reach .* above fp16's 65,504"
LINE = r'\w+\.py:\d+'


def fused(mask):
    return lambda h: F.scaled_dot_product_attention(*[h.view(-1, 1, 4, 8)] * 3, mask).flatten(1)


# Arithmetic that is flagged: precision, function, reason
FLAGGED = {
    'loud norm': ('fp16', loud_rms, OVERFLOWS),
    'cancellation': ('fp16', cancels, 'the error of .* is .*% in fp16'),
    'a norm of small values': ('fp16', unit, 'is NaN or inf in fp16, but finite in fp32'),
    'sums that are -inf': ('fp16', over_sums, OVERFLOWS),
    'close to the limit': ('fp16', lambda h: h.tanh() * 3e4 / 3e4, "reach .* close to fp16's 65,504"),
    'no mask: a large value twice': ('fp16', lambda h: h.sign() * 7e4 / 7e4, 'is NaN or inf in fp16'),
    'no operator shows it': ('fp16', InNumPy.apply, 'in fp16 the loss or a gradient is not finite'),
    'the gradient is infinite': ('fp16', sqrt_gate, '1e-10 is 0 in fp16|gradient is not finite'),
    'a backward pass that fails': (
        'fp16', NeedsFp32.apply,
        'the backward pass does not run in fp16: the gradient is not fp32',
    ),
    'code that needs fp32': ('fp16', checks, 'does not run in fp16: '),
    # constants that are lost
    'clamp': ('fp16', lambda h: h / h.abs().clamp(min=1e-8), rf'1e-08 is 0 in fp16 \(`clamp`, {LINE}\)'),
    'added': ('fp16', lambda h: ((h - h.roll(1, 0)).relu() + 1e-10).sqrt(), rf'1e-10 is 0 in fp16 \(`add`, {LINE}\)'),
    'added as a tensor': (
        'fp16', lambda h: ((h - h.roll(1, 0)).relu() + torch.tensor(1e-10)).sqrt(), '1e-10 is 0 in fp16',
    ),
    'divided by': (
        'fp16', lambda h: h.relu() / (h.relu() + 1e-8),
        rf'is NaN or inf in fp16, but finite in fp32: 1e-08 is 0 in fp16 \(`add`, {LINE}\)',
    ),
    'a mask that leaves nothing': (
        'fp16', lambda h: (h + torch.ones_like(h) * -1e9).softmax(-1),
        rf'is NaN or inf in fp16, but finite in fp32: -1e\+09 is -inf in fp16 \(`mul`, {LINE}\)',
    ),
    '-1': ('bf16', lambda h: (h * 30).tanh().clamp(-0.9999, 0.98).atanh(), '-0.9999 is -1 in bf16'),
    # whole numbers that become one
    'timesteps': ('bf16', steps(lambda t, h: t.to(h.dtype)), '960 and 962 become the same number'),
    'copied': (
        'bf16', steps(lambda t, h: torch.empty_like(h).copy_(t.expand_as(h))), '960 and 962 become the same number',
    ),
    'by autocast': (
        'bf16', steps(lambda t, h: (t.float()[:, None] @ torch.ones(1, 1)).T.to(h.dtype)), 'become the same number',
    ),
    'a fused mask, by autocast': (
        'bf16', fused(torch.full((4, 4), torch.finfo(torch.float32).min)), 'the error of .* is 100%',
    ),
    'a cast, which autocast undoes': (
        'fp16', lambda h: ((h * 800).float() @ (h * 800).float().T / 800**2).softmax(-1) @ h,
        r'Autocast runs the product in \w+.py:\d+ in fp16, although its inputs are `.float\(\)`',
    ),
}  # fmt: skip


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('device', (None, 'cuda'))
@pytest.mark.parametrize('name', FLAGGED)
def test_arithmetic_that_is_flagged(name, device):
    "The module is kept in fp32, or the one before the model's own forward, which then computes in fp32."
    precision, f, words = FLAGGED[name]
    for make, kept, flagged in (inner, '1', '1'), (Own, 'a', '(model)'):
        if make is Own and 'autocast' in name:
            break  # at its own product, whatever is in fp32
        report = report_on(make(f), precision, device)
        verdict = report.verdicts[precision]
        assert (verdict.verdict, verdict.modules) == (KEEP, [kept]), verdict
        assert re.search(words, verdict.reason) and verdict.call.startswith(f'learn.to_{precision}('), verdict
        if 'backward' not in name and 'gradient' not in words and 'not finite' not in words:
            assert verdict.flagged == [flagged] and report.fp32_modules == [kept]
            assert make is inner or "(keeping 'a' in fp32 prevents this)" in verdict.reason
            assert {*report.table['module'][report.table['flagged']]} <= {flagged}
        if not device:
            assert trained(make(f), verdict.call, 1)[1] in (None, 0)
            again = learner(make(f), loaders(64, 64))
            exec(verdict.call, {'learn': again})
            assert not again.precision_report(precision).verdicts[precision].flagged


def attends(mask):
    def f(h):
        scores = h @ h.T
        return mask(scores, torch.ones_like(scores, dtype=torch.bool).tril()).softmax(-1) @ h

    return f


def distances(h):
    "The gradient of `clamp` is 0 where its constant is lost."
    products = h @ h.T
    squares = products.diag()
    return torch.sqrt((squares[:, None] + squares - 2 * products).clamp(min=1e-12)).mean(1, keepdim=True)


@pytest.mark.parametrize('device', (None, 'cuda'), ids=('cpu rules', 'cuda rules'))
def test_a_lost_constant_that_does_no_harm_is_named_where_no_module_can_be_kept(device):
    class Net(nn.Linear):
        def forward(self, x):
            return distances(super().forward(x))

    verdict = report_on(Net(6, 8), 'fp16', device).verdicts['fp16']
    assert verdict.verdict == SAFE and verdict.flagged == ['(model)'] and not verdict.modules, verdict
    assert re.search(rf'1e-12 is 0 in fp16 \(`clamp`, {LINE}\)', verdict.reason)


def test_fused_attention_draws_only_for_dropout():
    "Which a GPU has in the operator; a CPU computes it by others."
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert [Operation(op, (*[torch.ones(1)] * 3, p), {}).draws for p in (0.0, 0.1)] == [False, True]


def beside_nothing(h):
    STEPS.to(h.dtype)[:0].clone()
    return h + h[:0].clone().sum()


# Arithmetic that no precision is blamed for
HARMLESS = {
    'mask: -inf': attends(lambda s, m: s.masked_fill(~m, -math.inf)),
    'mask: -2.38e38': attends(lambda s, m: torch.where(m, s, -2.38e38)),
    'mask: triu': attends(lambda s, m: s + torch.full(s.shape, -6e4, dtype=s.dtype).triu(1)),
    'mask: minus 1e30': attends(lambda s, m: s - 1e30 * (1 - m.to(s.dtype))),
    'mask: -1e9 by where': lambda h: torch.where(h < 0, -1e9, h).softmax(-1),
    'far from the limit, in place in fp32': lambda h: torch.zeros(h.shape).add_(h.tanh() * 1e4).to(h.dtype) / 1e4,
    'rounding noise of fp32 itself': lambda h: h * math.pi / math.pi - h,
    'constants beside large values': lambda h: h / (h.abs() + 1 + 1e-9),
    'a clamp that no value reaches': lambda h: (h / 9).sigmoid().clamp(max=1 - 1e-4),
    'ordinary rounding of constants': lambda h: h * 0.1 + 0.3,
    '0, 1 and infinity': lambda h: (h + 0.0).clamp(0.0, 1.0).masked_fill(h < 0, -math.inf).softmax(-1),
    "a norm's epsilon": lambda h: F.layer_norm(h, h.shape[-1:], eps=1e-12),
    'compared': lambda h: h * (h > 1e-9),
    'a constant in fp32': lambda h: h.float().clamp(min=1e-12),
    'whole numbers in a decision': lambda h: h * (STEPS.to(h.dtype) * h.abs() >= 0).to(h.dtype),
    'one in fp32 as well': lambda h: h + (STEPS.bfloat16().to(h.dtype) * 0.01).cos(),
    'divided before the cast': lambda h: h + (STEPS * 0.01).cos().to(h.dtype),
    'indices': lambda h: h.repeat(1, 32)[:, STEPS].gather(1, STEPS.sub(960).div(2).long().expand_as(h)),
    'beside tensors without elements, which have no address': beside_nothing,
    'pictures': lambda h: h + (torch.arange(2000).view(4, 5, 100).to(h.dtype) * 0).sum(),
}


@pytest.mark.parametrize('device', (None, 'cuda'))
@pytest.mark.parametrize('name', HARMLESS)
def test_arithmetic_that_is_not_flagged(name, device):
    report = report_on(inner(HARMLESS[name]), ('bf16', 'fp16'), device)
    for verdict in report.verdicts.values():
        assert verdict.verdict == SAFE and not verdict.modules and not verdict.flagged, verdict
    equal = "bf16: whole numbers become equal, 960 and 962 in '1'. Neither loss nor gradient shows it."
    is_noted = name.startswith(('whole numbers in', 'beside tensors'))
    assert [n for n in report.notes if 'become equal' in n] == [equal] * is_noted


# -- models


def without_digits(p, y):
    "As a contrastive loss near 0, the difference of two large numbers, whose gradient is exact."
    return ((p - y) @ torch.ones(1, 1)).square().mean().bfloat16() + 1e3 - 1e3


class Products(Own):
    "A matrix product in the model's own forward, which autocast runs in fp16 for any input dtype."

    def forward(self, x):
        x = self.f(x)
        h = self.a(x) * 800
        return self.b(((h @ h.T) / 800**2).softmax(-1) @ self.a(x))


class Block(nn.Linear):
    def forward(self, x):
        return x + super().forward(x) * 1e6 / 1e6


class Around(nn.Module):
    "Overflows in the layer inside, and then in products of its own."

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(8, 8)
        nn.init.constant_(self.inside.weight, 1e6)

    def forward(self, h):
        h = self.inside(h)
        return (h @ h.T).tanh() @ h * 1e-6


class Promotes(Own):
    "A frozen 16-bit weight that meets a layer's output in an operator that promotes, on CPUs and on CUDA."

    def __init__(self, dtype):
        super().__init__(nn.Parameter(torch.ones(32, dtype=dtype), requires_grad=False))

    def forward(self, x):
        return self.b(torch.addcmul(self.a(x), self.f, self.f))


def overflows():
    "As dropout after a layer that overflows: it divides values close to 65,504 by 0.9."
    first = nn.Linear(6, 64)
    nn.init.zeros_(first.weight)
    first.bias.data = torch.linspace(0, 1e5, 64)
    mean = Act(lambda h: h.mean(-1, keepdim=True) / 1e5)
    return nn.Sequential(first, Act(lambda h: h / 0.9), mean, nn.Linear(1, 1))


def times(factor):
    return lambda h: Times.apply(h, factor)


own_product = lambda factor: Own(lambda h: h + 1 / (h.sigmoid() @ torch.full((32, 32), factor)))
noise = Act(lambda h: h - h.clone() + 6e-8 * (h.dtype is torch.float16))
behind = lambda: nn.Sequential(nn.Linear(1, 8), Act(lambda h: (h * 500 + 300).square().sqrt() / 500), nn.Linear(8, 1))
steep = Act(lambda h: Times.apply(Times.apply(h, 1e-3) + 0, 1e3))
scaled = lambda factor: dict(loss_func=lambda p, y: F.mse_loss(p, y) * factor)
MODELS = {
    'attention': Attentive,
    'one behind another': lambda: nn.Sequential(Attentive(), behind()),
    'fifteen': lambda: nn.Sequential(*(Block(6, 6) for _ in range(15)), nn.Linear(6, 1)),
    'own products': lambda: Products(lambda x: x),
    '0 in fp32': lambda: layers(noise, nn.Linear(8, 8, bias=False)),
    'own values close to the maximum': lambda: own_product(1500.0),
    'own values above the maximum': lambda: own_product(15000.0),
    'own gradients': Force,
    'a loss without digits': mlp,
    'a sparse product': lambda: inner(lambda h: torch.sparse.mm(torch.eye(32).to_sparse(), h.float().T).T),
    'a scale looked for again': lambda: layers(Act(sqrt_gate)),
    'a large gradient between two operators': lambda: layers(steep),
    'all layers of a type that does not run': lambda: layers(Act(checks), nn.Sequential(Act(checks))),
    'a module stands for those inside': lambda: layers(nn.Sigmoid(), Around()),
    'infinite values from another module': overflows,
    'loss function': mlp,
    'small loss': mlp,
    'large loss': mlp,
    'loss of 1e9': mlp,
    'loss of 1e12': mlp,
    'large inputs': lambda: layers(nn.LayerNorm(8)),
    'log of a negative number': lambda: nn.Sequential(nn.Linear(6, 1), Act(lambda h: torch.log_(-h.square()))),
    'bf16 weights': lambda: mlp().bfloat16(),
    'fp16 weights': lambda: mlp().half(),
    'a frozen weight in bf16': lambda: Promotes(torch.bfloat16),
    'a frozen weight in fp16': lambda: Promotes(torch.float16),
}
ARGUMENTS = {  # of the learner and the report, where they are not as usual
    'loss function': dict(loss_func=loud_loss),
    'small loss': scaled(1e-7),
    'large loss': scaled(1e4),
    'loss of 1e9': scaled(1e9),
    'loss of 1e12': scaled(1e12),
    'large inputs': dict(dls=large(1e5)),
    'a loss without digits': dict(loss_func=without_digits, precision='bf16'),
    'a sparse product': dict(precision='bf16'),
    'bf16 weights': dict(precision='bf16'),
    'a frozen weight in bf16': dict(device='cuda'),
    'a frozen weight in fp16': dict(device='cuda', precision='bf16'),
}


@pytest.mark.filterwarnings('ignore')
def test_models(expected, monkeypatch):
    "What is said of each, and which modules are named; by the advice no step is skipped."
    set_support(monkeypatch, lambda name: 'native')
    texts = []
    for name, make in MODELS.items():
        kwargs = {'dls': loaders(), **ARGUMENTS.get(name, {})}
        torch.manual_seed(0)
        verdict = verdict_on(make(), **kwargs)
        texts.append(f'# {name}\n{verdict}\n')
        if verdict.verdict in (KEEP, SAFE) and not kwargs.keys() & {'loss_func', 'precision', 'device'}:
            assert trained(make(), verdict.call, 1, 1e-9, **kwargs)[1] == 0, name
    assert blurred('\n'.join(texts)) == expected('verdicts')


def test_a_call_that_leaves_no_product_in_16_bits_says_so():
    model = nn.Sequential(linear())
    model[0].weight.data *= 1e6
    report = report_on(model)
    assert (
        report.verdicts['fp16'].modules == ['0']
        and 'fp16: no product of matrices is left in fp16, so fp32 is as fast.' in report.notes
    )


def test_of_two_precisions_the_one_that_works_is_called(monkeypatch):
    for native, best in {'bf16': 'bf16', 'fp16': 'fp32', 'neither': 'fp32'}.items():
        set_support(monkeypatch, lambda name: 'native' if name == native else 'emulated')
        verdicts = report_on(Products(lambda x: x), ('bf16', 'fp16')).verdicts
        assert verdicts['fp16'].call == f'learn.to_{best}()'
    learn = learner(Products(nn.Sequential(nn.Linear(6, 6), Act(cancels))), loaders(64, 64))
    set_support(monkeypatch, lambda name: 'native')
    assert {v.call for v in learn.precision_report().verdicts.values()} == {"learn.to_bf16(fp32_modules=['f.1'])"}
    without_autocast = Own(lambda h: h * (1 / (not torch.is_autocast_enabled('cpu'))))
    verdicts = report_on(without_autocast, ('bf16', 'fp16'), 'cuda').verdicts.values()
    assert {(v.verdict, v.call) for v in verdicts} == {('cannot run', 'learn.to_fp32()')}
    set_support(monkeypatch, lambda name: 'unsupported', 'it is too old')
    verdict = learner().precision_report('bf16').verdicts['bf16']
    assert (verdict.verdict, verdict.reason) == ('cannot run', 'it is too old')


def test_another_batch_may_have_larger_gradients():
    data = dataset()
    data.tensors[1][4:8] *= 1e4  # the second
    advised = verdict_on(mlp(), dls=loaders(train=data)).call
    skipped = [trained(mlp(), call, 1, 0.0, loaders(train=data))[1] for call in ('learn.to_fp16()', advised)]
    assert skipped[0] > skipped[1] == 0, advised


# -- gradients that vanish


def vanishing(before):
    "In its second layer gradients are 1e-12 times those of its head, and in its first one `before` times that."
    torch.manual_seed(0)
    quiet, loud = Act(times(1e-12)), Act(times(before))
    return nn.Sequential(nn.Linear(6, 32), loud, nn.Linear(32, 32), quiet, nn.Linear(32, 1))


def test_gradients_that_vanish():
    "Many may be a small part of their sum, as with the layer scale of a CaiT; those that count are found by a trial."
    for before, word in (1.0, SAFE), (1e13, 'gradient differs'):
        verdict, dls = verdict_on(vanishing(before), dls=loaders(64, 16)), loaders(64, 16)
        fp32, by_advice, plain = (
            trained(vanishing(before), call, 8, 0.01, dls)[0] for call in ('', verdict.call, 'learn.to_fp16()')
        )
        assert verdict.verdict == word and by_advice == pytest.approx(fp32, rel=0.02), verdict
        assert (plain > 1.5 * fp32) == (before > 1)


def test_many_batches_do_not_add_up_their_gradients():
    same = Data(*(t.repeat(16, 1) for t in dataset(4).tensors))
    reports = (learner(dls=loaders(train=same)).precision_report('fp16', n_batches=n) for n in (1, 16))
    assert len({report.verdicts['fp16'].call for report in reports}) == 1


# -- CUDA's kernels, and weights in 16 bits


@pytest.mark.parametrize('n, fp16', [(16, []), (12, ['1'])])
def test_an_stft_in_fp16_runs_on_cuda_with_powers_of_two(n, fp16):
    amplitudes = lambda h: torch.stft(h, n, window=torch.ones(n, dtype=h.dtype), return_complex=True).abs()
    model = inner(lambda h: amplitudes(h).mean((1, 2))[:, None], 64, 1)
    verdicts = report_on(model, ('fp16', 'bf16'), 'cuda').verdicts
    assert [v.modules for v in verdicts.values()] == [fp16, ['1']], verdicts
    assert all(('cuFFT' in v.reason) == bool(v.modules) and 'MKL' not in v.reason for v in verdicts.values())


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_a_frozen_base_in_half_precision(dtype):
    "The report equals that of the same weights in fp32."
    half, whole = (learner(model).precision_report() for model in (lora(dtype), lora(dtype).float()))
    assert repr(half) == repr(whole)
