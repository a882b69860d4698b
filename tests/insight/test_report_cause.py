"The report's verdicts: the right module, the margin, what is tried first, and calls that keep what is there."
import math

import pytest, torch
from torch import nn

from fastxtend_amp.insight import statistics
from fastxtend_amp.insight.advice import kept_modules
from fastxtend_amp.mode import Support
from helpers import Attentive, dataset, learner, loaders, mlp


class Scaled(nn.Module):
    "Scales its input, and the output back, so that fp32 is fine."
    def __init__(self, gain, d=8): super().__init__(); self.lin, self.gain = nn.Linear(d, d), gain
    def forward(self, x): return self.lin(x * self.gain) / self.gain


class GainFirst(nn.Module):
    "Attention whose gain lies before the projections."
    def __init__(self, gain, d=8):
        super().__init__()
        self.q, self.k, self.v, self.gain = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d), gain
    def forward(self, x):
        x, loud = x[None], x[None] * self.gain
        return (((self.q(loud) / self.gain) @ (self.k(loud) / self.gain).transpose(-1, -2)).softmax(-1) @ self.v(x))[0]


class Net(nn.Module):
    def __init__(self, mid, act, seed=0):
        torch.manual_seed(seed)
        super().__init__()
        self.emb, self.mid, self.act, self.head = nn.Linear(6, 8), mid(), act, nn.Linear(8, 1)
    def forward(self, x): return self.head(self.act(self.mid(self.emb(x))))


def trained(model, verdict=None, bs=64, lr=1e-4, **kwargs):
    "Skipped steps of 4 steps in fp16, with what a verdict advises."
    learn = learner(model, loaders(64, bs))
    if verdict is not None: exec(verdict.call, {'learn': learn})
    else: learn.to_fp16(**kwargs)
    learn.precision.on_overflow = 'ignore'
    learn.fit(4, lr)
    return learn.precision.n_skipped, float(learn.recorder.losses[-1])


def verdict_on(model): return learner(model, loaders(64, 64)).precision_report('fp16').verdicts['fp16']


# -- partial overflow

@pytest.mark.parametrize('seed', [0, 3])
@pytest.mark.parametrize('gain', [9e4, 11e4, 13e4])
@pytest.mark.parametrize('kind,act', [(Scaled, nn.ReLU()), (Scaled, nn.LayerNorm(8)), (GainFirst, nn.ReLU())])
def test_partial_overflow_is_found_and_the_advice_trains_without_a_skip(kind, act, gain, seed):
    make = lambda: Net(lambda: kind(gain), act, seed)
    verdict = verdict_on(make())
    assert verdict.verdict == 'keep modules in fp32' and verdict.modules == ['mid'], verdict
    skipped, loss = trained(make(), verdict)
    assert skipped == 0 and math.isfinite(loss)


class Unit(nn.Module):
    "Divides by a length that is 0 in fp16, where the squares of small values underflow."
    def forward(self, x):
        x = x * 1e-5
        return x / (x * x + 1e-12).sum(-1, keepdim=True).sqrt()


def test_a_divisor_that_underflows_is_traced_to_its_module():
    make = lambda: Net(Unit, nn.ReLU())
    verdict = verdict_on(make())
    assert verdict.modules == ['mid'] and "inside 'mid' fp16 is not finite" in verdict.reason, verdict
    assert trained(make(), verdict)[0] == 0


# -- margin

def near(largest):
    "A layer inside which values reach `largest` on the report's batch; its output is small."
    class Near(nn.Linear):
        gain = 1.
        def forward(self, x): return (super().forward(x) * self.gain) / self.gain
    torch.manual_seed(0)
    layer = Near(8, 8)
    model = nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 1))
    with torch.no_grad(): layer.gain = largest / float(layer(model[0](dataset(64).tensors[0])).abs().max())
    return model


@pytest.mark.parametrize('largest,verdict', [(1e4, 'safe'), (3e4, 'safe, but close'), (6e4, 'safe, but close'),
                                             (9e4, 'keep modules in fp32')])
def test_headroom_counts_the_largest_value_inside(largest, verdict):
    report = learner(near(largest), loaders(64, 64)).precision_report('fp16')
    found = report.verdicts['fp16']
    row = report.table.set_index('module').loc['1']
    assert found.verdict == verdict and row['largest'] < 10
    assert row['headroom'] == pytest.approx(65504 / largest, rel=.01)
    if verdict == 'safe': return
    assert found.modules == ['1'] == report.fp32_modules and found.call == "learn.to_fp16(fp32_modules=['1'])"
    assert "'1'" in found.reason and row['trouble']
    def louder():
        model = near(largest)
        model[1].gain *= 3                                       # as later batches and weights may be
        return model
    assert trained(louder(), found)[0] == 0 and trained(louder(), lr=0.)[0] == 4


def test_masks_are_no_trouble_whatever_they_are_filled_with():
    class Masked(nn.Module):
        def __init__(self, fill): super().__init__(); self.q, self.k, self.fill = nn.Linear(8, 8), nn.Linear(8, 8), fill
        def forward(self, x):
            scores = self.q(x) @ self.k(x).T
            fill = torch.finfo(scores.dtype).min if self.fill is None else self.fill
            return (scores + torch.ones_like(scores).triu(1) * fill).softmax(-1) @ x
    for fill in (-1e4, -6e4, None):
        verdict = verdict_on(Net(lambda fill=fill: Masked(fill), nn.ReLU()))
        assert verdict.verdict == 'safe' and not verdict.modules, verdict


# -- what no operator shows is tried

class _InNumPy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        values = x.detach().numpy()
        gain = values.dtype.type(6e4)
        return torch.from_numpy(values * gain / gain)
    @staticmethod
    def backward(ctx, g): return g


class InNumPy(nn.Module):
    def __init__(self): super().__init__(); self.lin = nn.Linear(8, 8)
    def forward(self, x): return _InNumPy.apply(self.lin(x) * 4)


@pytest.mark.filterwarnings('ignore:overflow encountered')
def test_modules_are_tried_one_by_one_and_in_pairs():
    "PyTorch sees no operator here; the products overflow in NumPy."
    class Two(nn.Module):
        def __init__(self): super().__init__(); self.a, self.b = InNumPy(), InNumPy()
        def forward(self, x): return self.a(x) + self.b(x)
    for mid, modules in ((InNumPy, {'mid'}), (Two, {'mid', 'mid.a', 'mid.b'})):
        verdict = verdict_on(Net(mid, nn.ReLU()))
        assert verdict.verdict == 'keep modules in fp32' and set(verdict.modules) <= modules, verdict
        assert trained(Net(mid, nn.ReLU()), verdict)[0] == 0


class NeedsAGraph(InNumPy):
    "Cannot be compared with fp32, which is run without a graph: trying it is the only way to find it."
    def forward(self, x):
        if self.training and not torch.is_grad_enabled(): raise RuntimeError('needs a graph')
        return super().forward(x)


@pytest.mark.filterwarnings('ignore:overflow encountered')
def test_a_pair_of_modules_is_found_where_none_is_enough():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.emb, self.a, self.b, self.head = nn.Linear(6, 8), NeedsAGraph(), NeedsAGraph(), nn.Linear(8, 1)
        def forward(self, x): return self.head(self.b(self.a(self.emb(x))).relu())
    verdict = verdict_on(Two())
    assert verdict.verdict == 'keep modules in fp32' and set(verdict.modules) == {'a', 'b'}, verdict
    assert "with 'a' in fp16 the loss or a gradient is not finite" in verdict.reason and 'loses' not in verdict.reason
    assert trained(Two(), verdict)[0] == 0


def overflows_in_fp16(p, y):
    "A loss function that squares 300 in fp16."
    in_fp16 = torch.is_autocast_enabled('cpu') and torch.get_autocast_dtype('cpu') is torch.float16
    return ((p.half() * 0 + 300).square().float() + p if in_fp16 else (p - y).square()).mean()


def test_do_not_use_says_what_was_tried():
    verdict = learner(loss_func=overflows_in_fp16).precision_report('fp16').verdicts['fp16']
    assert verdict.verdict == 'do not use' and 'the loss is not finite, whatever is kept in fp32' in verdict.reason
    assert 'tried, one by one and in pairs' in verdict.reason and 'It begins in the loss function' in verdict.reason


def test_gradients_that_are_too_large_lower_the_loss_scale_first():
    class Louder(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, g): return (g * 4096) / 4096           # inside the backward pass, where no figure looks
    class Backward(nn.Module):
        def __init__(self): super().__init__(); self.lin = nn.Linear(8, 8)
        def forward(self, x): return Louder.apply(self.lin(x))
    verdict = verdict_on(Net(Backward, nn.ReLU()))
    assert verdict.verdict.startswith('safe') and 'init_scale=' in verdict.call and not verdict.modules, verdict
    assert trained(Net(Backward, nn.ReLU()), verdict)[0] == 0


# -- advice

def test_advice_keeps_what_is_there():
    learn = learner(Attentive()).to_fp16(fp32_modules=['head'], max_skips=5)
    call = learn.precision_report('fp16').verdicts['fp16'].call
    assert call.startswith('learn.to_fp16(') and "fp32_modules=['head', 'attn']" in call and 'max_skips=5' in call
    assert "fp32_modules=['head']" in learn.precision_report('bf16').verdicts['bf16'].call
    exec(call, {'learn': learn})
    assert kept_modules(learn.model) == ['attn', 'head'] and learn.precision.max_skips == 5


def test_a_mode_that_does_not_work_leads_to_the_fastest_that_does(monkeypatch):
    def call(native):
        support = lambda mode, device: Support('native' if mode.value in native else 'emulated', '')
        for module in ('examination', 'advice'):
            monkeypatch.setattr(f'fastxtend_amp.insight.{module}.mode_support', support)
        return learner(loss_func=overflows_in_fp16).precision_report('fp16').verdicts['fp16'].call
    assert call(('bf16',)) == 'learn.to_bf16()'
    assert call(()) == 'learn.to_fp32()' == call(('fp16',))


@pytest.mark.parametrize('dtype,name', [(torch.float16, 'fp16'), (torch.bfloat16, 'bf16')])
def test_a_model_in_half_precision_gets_the_message_of_fit(dtype, name):
    message = f"needs fp32 parameters, .* 6 to be trained are {name}, such as '0.weight'.*learn.model.float"
    with pytest.raises(ValueError, match=message):
        learner(mlp().to(dtype)).precision_report()


# -- statistics

def test_histograms_count_every_power_of_two():
    values = torch.tensor([0., -0., 1., 1.5, -2., 2. ** -24, 2. ** -30, 1e-42, 65504., math.inf, -math.inf, math.nan])
    h = statistics.Histogram()
    h.add(values)
    nonzero = values[values.isfinite() & (values != 0)].abs()
    for threshold in (2. ** -140, 2. ** -30, 2. ** -24, 2. ** -23, 1., 2., 4., 2. ** 16, 2. ** 17):
        below = float((nonzero < threshold).float().mean())
        assert h.share_below(threshold) == pytest.approx(below) or threshold < 2. ** -126
    assert h.largest == 65504. and not h.finite
    assert h.mass_below(2. ** 15) == pytest.approx(4.5 / 65508, rel=1.)                      # an estimate


def test_differences_beyond_the_squares_of_fp32():
    for size in (1e-30, 1., 1e30):
        d = statistics.Difference()
        d.add(torch.tensor([1.1, 2.]) * size, torch.tensor([1., 2.]) * size)
        assert d.relative == pytest.approx(.1 / math.sqrt(5), rel=1e-4)
    assert statistics.Difference(1., 0.).relative == math.inf and statistics.Difference().relative == 0


def test_the_largest_value_leaves_masks_out():
    scores = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for fill in (-math.inf, -1e4, -3e38):
        assert statistics.largest_value(scores.masked_fill(scores > 1, fill)) == float(scores[scores <= 1].abs().max())
    assert statistics.largest_value(scores * 1e4) == float((scores * 1e4).abs().max())
    assert statistics.largest_value(torch.tensor([-6e4, -1e3, 2.])) == 6e4
    assert statistics.largest_value(torch.empty(0)) == 0


def test_figures_need_neither_float64_nor_frexp(monkeypatch):
    "As on MPS."
    from contextlib import nullcontext
    from torch.utils._python_dispatch import TorchDispatchMode
    expected = learner(Attentive()).precision_report()
    class No64(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            assert 'frexp' not in str(func) and not (isinstance(out, torch.Tensor) and out.dtype is torch.float64), func
            return out
    monkeypatch.setattr('fastxtend_amp.insight.tracer.operators_unwatched', nullcontext)
    with No64(): report = learner(Attentive()).precision_report()
    assert report.table.equals(expected.table) and report.verdicts == expected.verdicts


# -- the model's own forward

class Loud(nn.Module):
    "Its own forward multiplies far and back again what `emb` gives, or, with `gradient`, so does its backward pass."
    def __init__(self, gain=1e5): super().__init__(); torch.manual_seed(0); self.emb, self.head, self.gain = nn.Linear(6, 8), nn.Linear(8, 1), gain
    def forward(self, x): return self.head(self.emb(x) * self.gain / self.gain)


def test_the_model_itself_is_never_what_to_keep():
    "The module before it is: then its own operators compute in fp32."
    found = verdict_on(Loud())
    assert found.verdict == 'keep modules in fp32' and found.modules == ['emb'], found
    assert trained(Loud(), found)[0] == 0


def test_where_nothing_but_the_models_own_forward_overflows_it_says_so():
    class Own(Loud):
        def forward(self, x):
            x = self.emb(x)
            return self.head((x.half() if torch.is_autocast_enabled('cpu') else x) * self.gain / self.gain)
    found = verdict_on(Own())
    assert found.verdict == 'do not use' and "begins in the model's own `forward`: compute it in fp32 there" in found.reason


def test_close_values_in_the_models_own_forward():
    model = Loud()
    model.gain = 4e4 / float(model.emb(dataset(64).tensors[0]).abs().max())
    found = verdict_on(model)
    assert found.verdict == 'safe, but close' and "values inside the model's own `forward` come to 1/1.6" in found.reason
    assert '(model)' not in found.call


def test_a_loss_scale_below_1_is_found():
    class Steeper(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, g): return g * 1e6
    class Steep(Net):
        def forward(self, x): return self.head(Steeper.apply(self.act(self.mid(self.emb(x)))))
    found = verdict_on(Steep(lambda: nn.Linear(8, 8), nn.ReLU()))
    low, high = found.scales
    assert low <= high < 1 and f'init_scale={high}' in found.call, found
    assert trained(Steep(lambda: nn.Linear(8, 8), nn.ReLU()), found, lr=1e-9)[0] == 0


def test_a_model_that_does_not_run_on_its_batch_as_it_is():
    class Prepared(nn.Module):
        def __init__(self): super().__init__(); self.lin = nn.Linear(3, 1)
        def forward(self, x): return self.lin(x)
    with pytest.raises(ValueError, match='(?s)does not run on its first batch.*mat1 and mat2.*after a fit.*precision_report'):
        learner(Prepared()).precision_report()


def test_calls_are_set_as_code_in_a_notebook():
    html = learner().precision_report('fp16')._repr_html_()
    assert '<code>learn.to_fp16()</code>' in html and '`' not in html
