"The precision report: the modules it flags, each verdict and its text, what it shows, and what it does not change."

import inspect, math, random, re

import pytest, torch
from fastai.callback.core import Callback, CancelBatchException
from fastai.callback.mixup import MixUp
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint
from torchvision import models

from fastxtend_amp import PrecisionReport
from fastxtend_amp.insight import report as room
from fastxtend_amp.insight.operators import largest_value, relative_error
from fastxtend_amp.insight import verdict as verdict_room
from fastxtend_amp.insight.verdict import Verdict
from fastxtend_amp import AMPMode
import held_out
from held_out import cancels, loud_rms
from helpers import At, Attentive, Data, dataset, learner, loaders, mlp, params, same, set_support
from states import Act, Gives, Times, Unpacks, fills, language_model, lora, loud_loss


def rows(report, mode):
    return report.table[report.table['mode'] == mode].set_index('module')


def verdict_on(model, mode='fp16', **kwargs):
    return learner(model, loaders(64, 64), **kwargs).precision_report(mode).verdicts[mode]


def trained(model, verdict, lr=1e-4, **kwargs):
    "Return skipped steps and the last loss of 4 steps with the call that a verdict advises."
    learn = learner(model, loaders(64, 64), **kwargs)
    exec(verdict.call, {'learn': learn})
    learn.precision.on_overflow = 'ignore'
    learn.fit(4, lr)
    return learn.precision.n_skipped, float(learn.recorder.losses[-1])


class Own(held_out.Own):
    def __init__(self, f):
        torch.manual_seed(0)
        super().__init__(f)


def inner(f):
    torch.manual_seed(0)
    return held_out.inner(f)


def unit(h):
    h = h * 1e-5
    return h / (h * h + 1e-12).sum(-1, keepdim=True).sqrt()  # the squares are 0 in fp16


def over_sums(h):
    return 1e5 / (-(h * 1e3).abs() * 200 - 1e3)  # the sums are -inf, which by itself may be a mask


class InNumPy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        v = x.detach().numpy() * 4
        return torch.from_numpy(v * v.dtype.type(6e4) / v.dtype.type(6e4))

    @staticmethod
    def backward(ctx, g):
        return g


# -- the right modules are flagged, and the printed call works


def test_the_module_that_overflows_is_named_and_no_other():
    report = learner(Attentive()).precision_report()
    assert isinstance(report, PrecisionReport) and report.fp32_modules == ['attn']
    trouble = report.table.query('flagged')
    assert list(zip(trouble['mode'], trouble['module'])) == [('fp16', 'attn')]
    verdict, row = report.verdicts['fp16'], rows(report, 'fp16').loc['attn']
    assert verdict.verdict == 'keep modules in fp32' and verdict.modules == ['attn'] == verdict.flagged
    assert verdict.call == "learn.to_fp16(init_scale=4096, fp32_modules=['attn'])" and '65,504' in verdict.reason
    assert report.verdicts['bf16'].verdict == 'safe so far'
    assert (
        row['largest'] > 65504
        and row['headroom'] == pytest.approx(65504 / row['largest'], rel=0.01)
        and row['error'] == math.inf
    )
    assert rows(report, 'fp16')['error'].isna()['head.2'] and not rows(report, 'bf16')['error'].isna().any()
    assert ' nan' not in repr(report).lower().replace('nan or inf', '')


def test_the_remedy_reaches_the_loss_of_fp32_where_plain_fp16_fails():
    def train(call=''):
        learn = learner(Attentive())
        exec(call, {'learn': learn})
        start = params(learn)
        learn.fit(6, 0.02)
        return float(learn.recorder.losses[-1]), same(start, params(learn))

    call = learner(Attentive()).precision_report('fp16').verdicts['fp16'].call
    (fp32, _), (kept, moved_not) = train(), train(call)
    plain, unmoved = train("learn.to_fp16(on_overflow='ignore')")
    assert unmoved and math.isnan(plain)  # every step skipped
    assert not moved_not and kept == pytest.approx(fp32, rel=0.02)


@pytest.mark.parametrize(
    'f,words',
    [
        (loud_rms, "reach .*above fp16's 65,504"),
        (cancels, 'error of .* is .*% in fp16'),
        (unit, 'is NaN or inf in fp16, but finite in fp32'),
        (over_sums, "reach .*above fp16's 65,504"),
    ],
)
def test_arithmetic_is_judged_alike_in_a_module_and_in_the_models_own_forward(f, words):
    "The module itself is kept, or the one before the model's own forward, which then computes in fp32."
    in_module, own = verdict_on(inner(f)), verdict_on(Own(f))
    assert (in_module.verdict, in_module.modules, in_module.flagged) == ('keep modules in fp32', ['1'], ['1']), (
        in_module
    )
    assert (own.verdict, own.modules, own.flagged) == ('keep modules in fp32', ['a'], ['(model)']), own
    for verdict, start in ((in_module, "'1'"), (own, "the model's own `forward`")):
        assert start in verdict.reason and re.search(words, verdict.reason), verdict
    assert "(with 'a' in fp32 this does not happen)" in own.reason and '(model)' not in own.call
    assert trained(inner(f), in_module)[0] == 0 and trained(Own(f), own)[0] == 0


@pytest.mark.filterwarnings('ignore:overflow encountered')
def test_where_no_operator_shows_the_overflow_modules_are_tried():
    verdict = verdict_on(inner(InNumPy.apply))
    assert verdict.modules == ['1'] and "with '1' in fp16 the loss or a gradient is not finite" in verdict.reason, (
        verdict
    )
    assert trained(inner(InNumPy.apply), verdict)[0] == 0


@pytest.mark.filterwarnings('ignore:overflow encountered')
def test_of_many_modules_that_help_only_together_the_parents_are_named():
    torch.manual_seed(0)
    casts = lambda h: InNumPy.apply(h.half() if torch.is_autocast_enabled('cpu') else h)
    many = lambda: nn.Sequential(*(Act(casts) for _ in range(6)))
    make = lambda: nn.Sequential(nn.Linear(6, 8), many(), nn.Linear(8, 1))
    verdict = verdict_on(make())
    assert verdict.verdict == 'keep modules in fp32' and set(verdict.modules) == {'0', '1', '2'}, verdict
    assert trained(make(), verdict)[0] == 0


class Products(Own):
    "A matrix product in the model's own forward, which autocast runs in fp16 for any input dtype."

    def forward(self, x):
        h = self.a(x) * 800
        return self.b(((h @ h.T) / 800**2).softmax(-1) @ self.a(x))


def test_own_arithmetic_that_no_module_helps_is_not_to_be_used():
    report = learner(Products(None), loaders(64, 64)).precision_report('fp16')
    verdict = report.verdicts['fp16']
    assert verdict.verdict == 'do not use' and verdict.modules == [] and verdict.flagged == ['(model)']
    assert "values in the model's own `forward` reach" in verdict.reason
    assert "with torch.autocast(x.device.type, enabled=False)" in verdict.reason and '.float()' in verdict.reason
    assert verdict.call in ('learn.to_bf16()', 'learn.to_fp32()') and rows(report, 'fp16').loc['(model)', 'flagged']


@pytest.mark.parametrize(
    'largest,verdict',
    [(1e4, 'safe so far'), (3e4, 'keep modules in fp32'), (6e4, 'keep modules in fp32'), (9e4, 'keep modules in fp32')],
)
@pytest.mark.parametrize('kind', [inner, Own])
def test_values_that_come_close_to_the_limit(kind, largest, verdict):
    def f(h):
        return h * gain / gain

    gain = 1.0
    gain = largest / max(
        float(m(dataset(64).tensors[0]).detach().abs().max()) for m in [kind(f)[0] if kind is inner else kind(f).a]
    )
    found = verdict_on(kind(f))
    assert found.verdict == verdict, found
    if verdict == 'safe so far':
        return
    assert found.modules == (['1'] if kind is inner else ['a'])
    assert ('close to' if largest < 65504 else 'above') in found.reason
    gain *= 3  # as may happen with later batches and weights
    assert trained(kind(f), found, lr=0.0)[0] == 0


def test_trouble_behind_trouble_is_found_too():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (
                Attentive(),
                nn.Sequential(nn.Linear(1, 8), Act(lambda h: (h * 500 + 300).square().sqrt() / 500), nn.Linear(8, 1)),
            )

        def forward(self, x):
            return self.second(self.first(x))

    assert learner(Net()).precision_report('fp16').fp32_modules == ['first.attn', 'second.1']


@pytest.mark.parametrize('fill', [-math.inf, -1e4, -6e4, 'min'])
def test_masks_are_no_trouble_whatever_they_are_filled_with(fill):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.q, self.k = nn.Linear(6, 8), nn.Linear(6, 8)

        def forward(self, x):
            scores = self.q(x) @ self.k(x).T
            value = torch.finfo(scores.dtype).min if fill == 'min' else fill
            return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), value).softmax(-1) @ x

    verdict = verdict_on(nn.Sequential(Masked(), nn.Linear(6, 1)))
    assert verdict.verdict == 'safe so far' and not verdict.flagged, verdict


MASKS = {
    'where min': lambda s, m: torch.where(m, s, torch.finfo(s.dtype).min),
    'where full_like': lambda s, m: torch.where(m, s, torch.full_like(s, torch.finfo(s.dtype).min)),
    'where -2.38e38': lambda s, m: torch.where(m, s, -2.38e38),
    'triu of a constant': lambda s, m: s + torch.full(s.shape, -6e4, dtype=s.dtype).triu(1),
    'minus 1e30': lambda s, m: s - 1e30 * (1 - m.to(s.dtype)),
    'minus 65,500': lambda s, m: s - 65500 * (1 - m.to(s.dtype)),
}


@pytest.mark.parametrize('name', MASKS)
def test_masks_are_no_trouble_however_they_are_made(name):
    def attends(h):
        scores = h @ h.T
        return MASKS[name](scores, torch.ones_like(scores, dtype=torch.bool).tril()).softmax(-1) @ h

    for verdict in learner(inner(attends), loaders(16, 16)).precision_report().verdicts.values():
        assert verdict.verdict == 'safe so far' and not verdict.flagged, verdict
    assert trained(inner(attends), verdict)[0] == 0


def test_a_value_that_is_large_twice_is_no_mask():
    verdict = verdict_on(inner(lambda h: h.sign() * 7e4 / 7e4))
    assert verdict.modules == ['1'], verdict


def test_what_is_0_in_fp32_has_no_error():
    "The first layer's input is a constant that LayerNorm makes 0 in fp32; in fp16 it is the smallest number."
    noise = Act(lambda h: h - h.clone() + 6e-8 * (h.dtype is torch.float16))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), noise, nn.Linear(8, 8, bias=False), nn.Linear(8, 1))
    report = learner(model).precision_report('fp16')
    assert report.verdicts['fp16'].verdict == 'safe so far' and not report.table['flagged'].any(), report


class Quantizer(nn.Module):
    "Replace each input by the nearest entry; entries are close together, and the gradient passes straight through."

    def __init__(self, far):
        super().__init__()
        torch.manual_seed(0)
        self.entries = nn.Parameter(far + torch.randn(16, 8))

    def forward(self, x):
        x = x + self.entries.mean(0)
        distances = x.square().sum(1, keepdim=True) - 2 * x @ self.entries.T + self.entries.square().sum(1)
        return x + (self.entries[distances.argmin(1)] - x).detach()


@pytest.mark.parametrize('far,verdict', [(0.0, 'safe so far'), (30.0, 'keep modules in fp32')])
def test_decisions_that_change_are_an_error(far, verdict):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), Quantizer(far), nn.LayerNorm(8), nn.Linear(8, 1))
    found = verdict_on(model, 'bf16')
    assert found.verdict == verdict and found.modules == ['1'] * (far > 0), found


@pytest.mark.parametrize(
    'f,constant',
    [
        (lambda h: ((h - h.roll(1, 0)).square() + 1e-10).sqrt(), '1e-10'),
        (lambda h: h / h.abs().clamp(min=1e-8), '1e-08'),
        (lambda h: h.abs().mul(1e-3).clamp_(min=1e-8).sqrt(), '1e-08'),
    ],
)
def test_constants_that_are_0_in_fp16(f, constant):
    verdict = learner(inner(f), loaders(64, 64)).precision_report('fp16').verdicts['fp16']
    words = f"{constant} rounds to 0 in fp16, so it does not keep values in '1' away from 0"
    assert verdict.modules == ['1'] and words in verdict.reason
    learn = learner(inner(f), loaders(256, 64, train=dataset(256)))
    exec(verdict.call, {'learn': learn})
    learn.fit(4, 1e-3)
    assert learn.precision.n_skipped == 0
    assert verdict_on(inner(f), 'bf16').verdict == 'safe so far'


@pytest.mark.parametrize('f', [lambda h: F.normalize(h, dim=-1), lambda h: h / (h.abs().sum(-1, keepdim=True) + 1e-8)])
def test_constants_beside_large_values_do_not_matter(f):
    assert verdict_on(inner(f)).verdict == 'safe so far'


def test_gradients_that_are_too_large_lower_the_loss_scale_or_keep_modules():
    verdict = verdict_on(inner(lambda h: Times.apply(h, 1e4)))
    assert (
        verdict.verdict == 'safe so far'
        and 'init_scale=' in verdict.call
        and trained(inner(lambda h: Times.apply(h, 1e4)), verdict, 1e-9)[0] == 0
    )
    # Its gradient is infinite in fp16 at any scale.
    f = lambda h: (h.relu() * 1e-6 + torch.tensor(1e-10).to(h.dtype)).sqrt() * 1e3
    verdict = verdict_on(Own(f))
    assert "with 'a' in fp16 the loss or a gradient is not finite" in verdict.reason
    assert verdict.modules == ['a'] and trained(Own(f), verdict)[0] == 0


def test_a_large_gradient_of_an_fp32_parameter_does_not_limit_the_loss_scale():
    "It is computed in fp32, in a module whose other results are fp16."

    class Gain(nn.Linear):
        def __init__(self):
            torch.manual_seed(0)
            super().__init__(6, 1)
            self.gain = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return super().forward(x).float() * Times.apply(self.gain, 1e12)

    verdict = verdict_on(Gain())
    assert verdict.verdict == 'safe so far' and verdict.scale_range[1] == 4096, verdict  # 65,536 is too much
    assert trained(Gain(), verdict)[0] == 0


def test_another_batch_may_have_larger_gradients():
    data = dataset()
    data.tensors[1][4:8] *= 1e4  # the second
    for n_batches, skipped in ((1, 1), (2, 0)):
        learn = learner(dls=loaders(train=data))
        exec(learn.precision_report('fp16', n_batches=n_batches).verdicts['fp16'].call, {'learn': learn})
        learn.fit(1, 0.0)
        assert learn.precision.n_skipped == skipped


# -- the verdicts and their texts


@pytest.mark.parametrize(
    'factor,word,scales', [(1e-7, 'safe with loss scaling', (2**6, 2**40)), (1e4, 'safe so far', (2**-4, 2**4))]
)
def test_the_range_of_loss_scales(factor, word, scales):
    report = learner(loss_func=lambda p, y: F.mse_loss(p, y) * factor).precision_report('fp16')
    verdict = report.verdicts['fp16']
    low, high = verdict.scale_range
    assert verdict.verdict == word and low >= scales[0] and high <= scales[1] and math.log2(high).is_integer(), verdict
    grads = rows(report, 'fp16')['grad'].drop('loss function')
    assert grads.max() * high <= 65504 < grads.max() * high * 4
    assert f'loss scales from {low:,.9g} to {high:,.9g} work' in verdict.reason and ('init_scale' in verdict.call) == (
        high < 4 * 65536
    )


@pytest.mark.parametrize('log', [torch.log, torch.log_], ids=['a new tensor', 'in place'])
def test_what_is_not_finite_in_fp32_either_or_in_the_data(log):
    model = nn.Sequential(nn.Linear(6, 1), Act(lambda h: log(-h.square())))
    for verdict in learner(model).precision_report().verdicts.values():
        assert str(verdict) == (
            f"{verdict.mode}: not known.\n    the loss is not finite in fp32 either, first in '1', "
            'so precision is not the cause'
        )
    data = dataset()
    data.tensors[0][2, 1] = math.nan
    reason = learner(dls=loaders(train=data)).precision_report('bf16').verdicts['bf16'].reason
    assert reason == 'the batch itself is not finite: 1 of 24 values of its tensor of shape (4, 6) are NaN or inf'


def test_inputs_above_the_limit_are_named():
    data = Data(dataset().tensors[0] * 1e5, dataset().tensors[1])
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    verdict = learner(model, loaders(train=data)).precision_report('fp16').verdicts['fp16']
    assert verdict.modules == ['0'] and "values in '0' reach 2.12e+05, above fp16's 65,504" in verdict.reason


def test_a_loss_function_that_overflows():
    verdict = verdict_on(mlp(), loss_func=loud_loss)
    assert verdict.verdict == 'do not use' and verdict.flagged == ['loss function']
    assert 'in the loss function' in verdict.reason and "torch.autocast(x.device.type, enabled=False)" in verdict.reason


def runs_lstms(mode):
    try:
        with torch.autocast('cpu', dtype=AMPMode(mode).dtype):
            nn.LSTM(2, 2)(torch.zeros(1, 1, 2))[0].float().sum().backward()
    except RuntimeError:
        return False
    return True


def test_layers_that_the_device_has_no_kernel_for_are_kept_in_fp32():
    learn = language_model().to_bf16(fp32_modules=nn.LSTM)  # already
    assert learn.precision_report('bf16').verdicts['bf16'].verdict == 'safe so far'
    for mode, verdict in language_model().precision_report().verdicts.items():
        if runs_lstms(mode):
            continue
        assert verdict.verdict == 'keep modules in fp32' and verdict.modules == ['0.rnns.0.module', '0.rnns.1.module']
        assert (
            verdict.reason.startswith(f"'0.rnns.0.module' does not run in {mode}: ")
            and 'torch.finfo' not in verdict.reason
        )
        learn = language_model()
        exec(verdict.call, {'learn': learn})
        learn.fit(1)


def scatters(h):
    return torch.zeros(h.shape).index_put((torch.arange(len(h)),), h)


@pytest.mark.parametrize('f', [fills, scatters])
def test_code_that_half_precision_breaks_is_not_the_devices_fault(f, monkeypatch):
    monkeypatch.setattr('fastxtend_amp.devices.facts.cpu_features', frozenset)  # else the advice may be bf16
    verdict, own = (
        verdict_on(inner(f)),
        verdict_on(Own(lambda h: f(h.half() if torch.is_autocast_enabled('cpu') else h))),
    )
    assert verdict.verdict == 'keep modules in fp32' and verdict.modules == ['1'] and 'this CPU' not in verdict.reason
    assert (
        verdict.reason.startswith("'1' does not run in fp16: ")
        and 'create tensors with `dtype=x.dtype`' in verdict.reason
    )
    assert "fp32_modules=['1'])" in verdict.call and trained(inner(f), verdict)[0] == 0
    assert own.verdict == 'cannot run' and own.reason.startswith("the model's own `forward` does not run in fp16")
    assert own.call in ('learn.to_bf16()', 'learn.to_fp32()') and not own.modules


def test_an_error_of_any_type_is_a_modules():
    def checks(h):
        assert h.dtype == torch.float32
        return h

    verdict = verdict_on(inner(checks))
    assert verdict.modules == ['1'] and "'1' does not run in fp16: " in verdict.reason


def test_many_modules_in_trouble_one_after_the_other():
    class Block(nn.Linear):
        def forward(self, x):
            return x + super().forward(x) * 1e6 / 1e6

    verdict = verdict_on(nn.Sequential(*(Block(6, 6) for _ in range(15)), nn.Linear(6, 1)))
    assert verdict.verdict == 'keep modules in fp32' and verdict.modules == [str(i) for i in range(15)]


def test_operators_that_may_draw_random_numbers_are_looked_at():
    "For example fused attention, which is not also run in fp32 for comparison."
    attends = Act(lambda h: (h := h.view(-1, 1, 2, 3), F.scaled_dot_product_attention(h, h, h).flatten(1))[1])
    report = learner(nn.Sequential(nn.Linear(6, 6), attends, nn.Linear(6, 1))).precision_report('bf16')
    assert rows(report, 'bf16').loc['1', 'largest'] > 0


def test_a_mode_that_the_device_does_not_support(monkeypatch):
    set_support(monkeypatch, lambda name: 'unsupported', 'it is too old')
    verdict = learner().precision_report('bf16').verdicts['bf16']
    assert (verdict.verdict, verdict.reason) == ('cannot run', 'it is too old')


def test_a_mode_that_does_not_work_leads_to_the_fastest_that_does(monkeypatch):
    for native, call in ((('bf16',), 'learn.to_bf16()'), ((), 'learn.to_fp32()'), (('fp16',), 'learn.to_fp32()')):
        set_support(monkeypatch, lambda name: 'native' if name in native else 'emulated')
        assert verdict_on(Products(None)).call == call

    class Needs(Products):
        def forward(self, x):
            return super().forward(self.f(x))

    learn = learner(Needs(nn.Sequential(nn.Linear(6, 6), Act(cancels))), loaders(64, 64))
    set_support(monkeypatch, lambda name: 'native')
    assert {v.call for v in learn.precision_report().verdicts.values()} == {"learn.to_bf16(fp32_modules=['f.1'])"}


def test_time_that_is_over_leaves_what_is_known(clock):
    learn = learner(
        nn.Sequential(nn.Linear(6, 6), *[Act(lambda h: (clock.sleep(1), h)[1]) for _ in range(10)], nn.Linear(6, 1))
    )
    report = learn.precision_report(max_seconds=35.0)  # training and validation need 20
    bf16, fp16 = report.verdicts.values()
    assert bf16.verdict == 'safe so far' and fp16.verdict == 'not known' and '`max_seconds=35`' in fp16.reason
    assert fp16.call == "learn.precision_report('fp16', max_seconds=350)" and set(report.table['mode']) == {'bf16'}
    report = learn.precision_report(max_seconds=5.0)
    assert {v.verdict for v in report.verdicts.values()} == {'not known'} and not len(report.table) and report.plot()


def test_the_verdicts_are_documented():
    def first_cells(cls):
        return [line.split('|')[1].strip(" `'") for line in cls.__doc__.splitlines() if line.strip().startswith('|')][
            2:
        ]

    said = r"(?:_say\(|verdict = |Verdict\([\w.]+, )'([a-z\d ]+)'"
    assert {*first_cells(Verdict)} == {*re.findall(said, ''.join(map(inspect.getsource, (room, verdict_room))))}
    assert first_cells(PrecisionReport) == list(learner().precision_report('bf16').table.columns)


# -- the figures


@pytest.mark.parametrize('mode,dtype', [('bf16', torch.bfloat16), ('fp16', torch.float16)])
def test_errors_are_those_of_a_direct_comparison(mode, dtype):
    learn = learner(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)), loaders(bs=8))
    x, _ = next(iter(learn.dls.train))
    relative = lambda a, b: float((a.float() - b).norm() / b.norm())
    with torch.no_grad():
        exact = learn.model[0](x)
        with torch.autocast('cpu', dtype=dtype):
            first = learn.model[0](x)
            second = learn.model[1](first)
        errors = relative(first, exact), relative(second, learn.model[1](first.float()))
    table = rows(learn.precision_report(mode), mode)
    assert list(table.loc[['0', '1'], 'error']) == pytest.approx(errors)
    largest = max(
        float(t.abs().max()) for t in (x, learn.model[0].weight, learn.model[0].bias, exact)
    )  # autocast's casts included
    assert table.loc['0', 'headroom'] == pytest.approx(torch.finfo(dtype).max / largest)
    assert list(table['format']) == [mode, mode, 'fp32'] and table.loc['loss function', 'headroom'] > 1e30


def test_gradients():
    learn = learner(nn.Linear(6, 1, bias=False), loaders(bs=24))
    x, y = next(iter(learn.dls.train))
    grad = 2 * (learn.model(x).detach() - y) / len(y)  # of the output
    values = torch.cat([grad.flatten(), (grad * x).sum(0)]).abs()
    assert rows(learn.precision_report('fp16'), 'fp16').loc['(model)', 'grad'] == pytest.approx(
        float(values.max()), rel=1e-5
    )


def test_sizes_and_errors_of_values():
    for size in (1e-30, 1.0, 1e30):  # whose squares exceed the range of fp32
        got, expected = torch.tensor([1.1, 2.0]) * size, torch.tensor([1.0, 2.0]) * size
        assert relative_error(got, expected) == pytest.approx(0.1 / math.sqrt(5), rel=1e-4)
    scores = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for fill in (-math.inf, -1e4, -3e38):
        assert largest_value(scores.masked_fill(scores > 1, fill)) == float(scores[scores <= 1].abs().max())
    assert largest_value(torch.tensor([-6e4, -1e3, 2.0])) == 6e4 and largest_value(torch.empty(0)) == 0


class UNet(nn.Module):
    "The lowest of its three levels is one pixel: two samples are all that the BatchNorm there sees of a channel."

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()

        def block(n_in, n):
            return nn.Sequential(nn.Conv2d(n_in, n, 3, padding=1), nn.BatchNorm2d(n), nn.ReLU())

        self.down, self.low, self.up, self.head = block(3, 4), block(4, 8), block(12, 4), nn.Conv2d(4, 1, 1)

    def forward(self, x):
        down = self.down(x)
        low = F.interpolate(self.low(F.max_pool2d(down, 4)), scale_factor=4)
        return self.head(self.up(torch.cat([down, low], 1)))


def test_what_normalization_makes_of_two_samples_is_no_error_of_the_model():
    "The samples are so close that bf16 has few digits of their difference, which BatchNorm amplifies."
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1, 3, 4, 4, generator=g) + 0.02 * torch.randn(2, 3, 4, 4, generator=g)
    learn = learner(UNet(), loaders(2, 2, Data(x, x[:, :1]), Data(x, x[:, :1])))
    inside = F.max_pool2d(learn.model.down(x), 4)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        low = learn.model.low(inside)
    assert relative_error(low, learn.model.low(inside)) > 0.2
    report = learn.precision_report('bf16')
    assert report.verdicts['bf16'].verdict == 'safe so far' and report.table['error'].max() < 0.02


# -- every model that trains can be reported on


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.spare, self.act, self.head = (
            nn.Linear(6, 6),
            nn.Linear(6, 6),
            nn.Linear(2, 2),
            nn.ReLU(inplace=True),
            nn.Linear(6, 1),
        )
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.head(self.act(self.b(self.act(self.a(self.a(x))))))


class Residual(nn.Module):
    "A sum in the model's own forward that a module overwrites in place, as in ResNets."

    def __init__(self):
        super().__init__()
        self.a, self.act = nn.Linear(6, 6), nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.a(x)
        return self.act(self.a(x) + x)[:, :1]


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.head = nn.GRU(3, 4, batch_first=True), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.gru(x.view(-1, 2, 3))[0][:, -1])


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1), nn.Linear(6, 1))

    def forward(self, x):
        return checkpoint.checkpoint(self.inner, self.first(x), use_reentrant=True)


class Force(nn.Module):
    "Computes gradients itself."

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad((self.energy(x).float() * 1e4).sum(), x, create_graph=True)[0][:, :1] / 1e4


class Named(Data):
    def __getitem__(self, i):
        return dict(zip('xy', super().__getitem__(i)))

    def new_empty(self):
        return Named(*(t[:0] for t in self.tensors))


class Splits(Learner):
    def _split(self, b):
        self.xb, self.yb = (b['x'],), (b['y'],)


def compiled():
    learn = learner()
    learn.model = torch.compile(learn.model, backend='eager')
    return learn


def mapped():
    class Mapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 1)

        def forward(self, x):
            return torch.func.vmap(self.inner)(x)

    return learner(Mapped())


def classes(**kwargs):
    data = Data(dataset().tensors[0], torch.arange(24) % 3)
    return learner(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
        loaders(24, 8, data, data),
        CrossEntropyLossFlat(),
        **kwargs,
    )


MODELS = {
    'a scripted module': lambda: learner(nn.Sequential(nn.Linear(6, 8), torch.jit.script(nn.ReLU()), nn.Linear(8, 1))),
    'unpacked by a callback': lambda: learner(Gives(mlp()), cbs=Unpacks()),
    'MixUp': lambda: classes(cbs=MixUp()),
    'dictionaries as batches': lambda: learner(
        dls=loaders(24, 4, Named(*dataset().tensors), Named(*dataset().tensors)), cls=Splits
    ),
    'tied, in place, called twice': lambda: learner(Tied()),
    'compiled': compiled,
    'checkpoints': lambda: learner(Checkpointed()),
    'own gradients': lambda: learner(Force()),
    'vmap': mapped,
    'two samples in BatchNorm': lambda: learner(dls=loaders(bs=2)),
    'a sum that ReLU writes over': lambda: learner(Residual()),
    'recurrent': lambda: learner(Recurrent()),
    'spectral norm': lambda: learner(nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 1))),
}


@pytest.mark.parametrize('name', MODELS)
def test_what_trains_can_be_reported_on(name):
    torch.manual_seed(0)
    learn = MODELS[name]()
    report = learn.precision_report()
    assert {v.verdict for v in report.verdicts.values()} == {'safe so far'} and '0.00%' not in repr(report), report
    assert report.table['error'].max() < 0.05
    assert (report.table['grad'].dropna() > 0).all() and report.table['grad'].notna().any()
    learn.fit(1)


@pytest.mark.filterwarnings('ignore')
@pytest.mark.parametrize('name', ['resnet18', 'mobilenet_v3_small'])
def test_torchvisions_models_are_safe_in_bf16(name):
    "With 8 images: batch normalization of 4 values amplifies any rounding, and the gradient differs."
    torch.manual_seed(0)
    data = Data(torch.randn(16, 3, 64, 64), torch.arange(16) % 3)
    learn = learner(
        getattr(models, name)(num_classes=3), loaders(bs=8, train=data, valid=data), loss_func=nn.CrossEntropyLoss()
    )
    report = learn.precision_report('bf16')
    assert report.verdicts['bf16'].verdict == 'safe so far' and report.table['error'].max() < 0.01, report


def test_names():
    assert list(rows(learner(Tied()).precision_report('bf16'), 'bf16').index) == [
        'a',
        'b',
        'act',
        'head',
        'loss function',
    ]
    assert rows(compiled().precision_report('bf16'), 'bf16').equals(rows(learner().precision_report('bf16'), 'bf16'))


class Cancels(Callback):
    def before_batch(self):
        raise CancelBatchException


def test_batches_that_give_no_loss():
    dls = loaders()
    dls.n_inp = 2
    for learn in (learner(nn.Bilinear(6, 1, 1), dls), learner(cbs=Cancels())):
        for verdict in learn.precision_report().verdicts.values():
            assert verdict.verdict == 'not known' and not verdict.call and not verdict.scale_range, verdict
            assert verdict.reason.startswith('no batch gave a loss')


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_a_frozen_base_in_half_precision(dtype):
    "The report equals that of the same weights in fp32."
    report = learner(lora(dtype)).precision_report()
    whole = lora(dtype)
    for p in whole.parameters():
        p.data = p.data.float()
    expected = learner(whole).precision_report()
    assert [(v.verdict, v.call) for v in report.verdicts.values()] == [
        (v.verdict, v.call) for v in expected.verdicts.values()
    ]
    assert torch.allclose(
        torch.tensor(report.table['largest'].values), torch.tensor(expected.table['largest'].values), rtol=1e-6
    )


# -- what it looked at, and what it does not change


def test_it_says_what_it_looked_at():
    learn = learner(cbs=At('after_epoch', lambda l: None))
    report = learn.precision_report('bf16', n_batches=2)
    assert report.notes == [
        'Looked at 2 batches of 4 samples, and at the gradients of 6, with the current weights. Other batches '
        '(`n_batches`) and later weights may flag other modules.',
        *['bf16: emulated on this device, usually slower than fp32.']
        * (AMPMode.BF16.support(torch.device('cpu')).status == 'emulated'),
        'The targets are continuous: the closer the predictions come to them, the more rounding matters. '
        'Ask again late in training.',
        'Callbacks left out: at. If the training step needs one of them, set its attribute `run_on_copy = True`.',
    ]
    assert report.notes[-1] in repr(report) and 'Looked at 2 batches of 4 samples' in report._repr_html_()
    seen = []
    valid = learner(nn.Sequential(Act(lambda x: (seen.append(x), x)[1]), nn.Linear(6, 1))).precision_report(
        'bf16', dl=learn.dls.valid
    )
    assert torch.equal(seen[0], learn.dls.valid.one_batch()[0]) and valid.verdicts['bf16'].verdict == 'safe so far'
    with torch.no_grad():
        learn.model[0].weight *= 1e6  # as training may
    assert learn.precision_report('fp16').verdicts['fp16'].modules == ['0']


def test_integers_that_are_cast_to_16_bits_can_be_compared():
    layer = Act(lambda x: x + (x > 0).long().to(torch.bfloat16))
    report = learner(nn.Sequential(layer, nn.Linear(6, 1))).precision_report('bf16')
    assert not [note for note in report.notes if note.startswith('Not checked')], report.notes


def test_an_emulated_mode_makes_it_look_at_fewer_samples(monkeypatch):
    set_support(monkeypatch, lambda name: 'emulated' if name == 'fp16' else 'native')
    monkeypatch.setattr(room, 'EMULATED_TIME', 0.0)
    for modes, expected in (('bf16', {24}), (('bf16', 'fp16'), {24, 2})):
        sizes = []
        model = nn.Sequential(
            nn.Linear(6, 8), Act(lambda x: (sizes.append(len(x)), x)[1]), nn.BatchNorm1d(8), nn.Linear(8, 1)
        )
        report = learner(model, loaders(24, 24)).precision_report(modes)
        assert set(sizes) == expected and ('Of 24 samples only the first 2 were run' in repr(report)) == (2 in sizes)


def test_training_goes_on_as_without_it_and_callbacks_of_the_learner_do_not_fire():
    def train(ask):
        torch.manual_seed(1)
        random.seed(1)
        learn, fired = learner(Attentive(drop=0.3)).to_bf16(), []
        learn.dls.train.shuffle = True
        learn.add_cb(At('before_batch', lambda l: fired.append(l is learn)))
        for _ in range(2):
            if ask:
                learn.precision_report('bf16', n_batches=2)
            learn.fit(1)
        return params(learn), fired.count(True)

    (asked, n), (plain, m) = train(True), train(False)
    assert same(asked, plain) and n == m


def test_advice_keeps_what_is_there():
    learn = learner(Attentive()).to_fp16(fp32_modules=['head'], max_skips=5)
    call = learn.precision_report('fp16').verdicts['fp16'].call
    assert call.startswith('learn.to_fp16(') and "fp32_modules=['head', 'attn']" in call and 'max_skips=5' in call
    assert "fp32_modules=['head']" in learn.precision_report('bf16').verdicts['bf16'].call
    exec(call, {'learn': learn})
    assert sorted(learn.precision.fp32_module_names) == ['attn', 'head'] and learn.precision.max_skips == 5
    scaler = torch.amp.GradScaler('cpu', init_scale=2.0**60)  # which an advised `init_scale` replaces
    exec(
        learner().to_fp16(scaler=scaler).precision_report('fp16').verdicts['fp16'].call,
        {'learn': learn, 'scaler': scaler},
    )
    assert learn.precision.arguments['init_scale'] < 2**60


# -- how it is shown, and which arguments raise an error


def test_the_printed_report():
    report = learner(Attentive()).precision_report(['fp16', 'bf16'])
    first, second, *_ = repr(report).splitlines()
    assert 'bf16: safe so far' in repr(report) and 'bf16: 10 of' not in repr(report)  # its modules are in `table`
    assert first == "fp16: keep modules in fp32. Next: `learn.to_fp16(init_scale=4096, fp32_modules=['attn'])`"
    assert second.startswith("    values in 'attn' reach") and 'the 10 most critical of 11 modules' in repr(report)
    assert re.search(r'flagged\nattn ', repr(report))
    html = report._repr_html_()
    assert 'fp16: keep modules in fp32. Next: <code>learn.' in html and '<table' in html and 'class="dataframe"' in html


@pytest.mark.parametrize(
    'call,kind,words',
    [
        (lambda l: l.precision_report(('bf16', 'fp4')), ValueError, r"(?s)modes='fp4' cannot be used.*'bf16', 'fp16'"),
        (lambda l: l.precision_report(()), ValueError, r"modes=\(\) cannot be used: give 'bf16', 'fp16'"),
        (lambda l: l.precision_report('half weights'), ValueError, "cannot be used: give 'bf16', 'fp16'"),
        (lambda l: l.precision_report(['bf16', 'tf32']), ValueError, "cannot be used: give 'bf16', 'fp16'"),
        (lambda l: l.precision_report(None), ValueError, 'modes=None cannot be used'),
        (lambda l: l.precision_report(n_batches=0), ValueError, 'n_batches=0'),
        (lambda l: l.precision_report(max_seconds=0), ValueError, 'max_seconds=0'),
        (lambda l: l.precision_report(dl=[]), ValueError, '(?s)at least one batch.*dl='),
        (lambda l: l.precision_report(dl=5), ValueError, 'dl=5 cannot be used: dl must be a DataLoader'),
        (
            lambda l: learner(mlp().half()).precision_report(),
            ValueError,
            r"(?s)6 trainable ones .*'0.weight'.*learn\.model\.float",
        ),
        (lambda l: learner(nn.Linear(3, 1)).precision_report(), RuntimeError, 'mat1 and mat2'),
        (
            lambda l: learner(mlp().requires_grad_(False)).precision_report(),
            ValueError,
            r'(?s)precision_report needs trainable parameters.*frozen.*learn\.unfreeze\(\)',
        ),
    ],
)
def test_what_cannot_be_reported_on_is_refused(call, kind, words):
    with pytest.raises(kind, match=words):
        call(learner())
