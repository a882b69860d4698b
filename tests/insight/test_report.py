"The precision report: its table, notes and text, and what it does not change."

import math, re

import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import flop_registry

from fastxtend_amp.compat import traits_of, without_modes
from fastxtend_amp.insight import report as room
from fastxtend_amp.insight.values import relative_error
from fastxtend_amp.insight.report_result import PrecisionReport
from fastxtend_amp.precisions import BF16
from helpers import At, Attentive, Data, learner, loaders, mlp, set_support
from models import SAFE, Act, Times, far_from_0, inner, large, layers, report_on, rows
from states import blurred


# -- the table


def test_the_row_of_a_module_that_overflows():
    report = learner(Attentive()).precision_report()
    assert report.table.query('flagged')[['precision', 'module']].values.tolist() == [['fp16', 'attn']]
    assert [*report.table.groupby('precision')['module'].last()] == ['loss function'] * 2
    row = rows(report, 'fp16').loc['attn']
    assert row['largest'] > 65504 and row['headroom'] == pytest.approx(65504 / row['largest'], rel=0.01)
    assert row['error'] == math.inf and row['format'] == 'fp16'
    assert math.isnan(rows(report, 'fp16').loc['head.2', 'error'])
    assert not rows(report, 'bf16')['error'].isna().any()


def test_the_row_of_a_module_that_gets_only_nan():
    large = lambda h: (h * 0 + 300).square()
    row = rows(report_on(layers(Act(lambda h: h + large(h) - large(h)), nn.ReLU())), 'fp16').loc['2']
    assert row['format'] == 'fp16' and row[['headroom', 'error']].isna().all()


@pytest.mark.parametrize('precision,dtype', [('bf16', torch.bfloat16), ('fp16', torch.float16)])
def test_errors_and_gradients_are_those_of_a_direct_comparison(precision, dtype):
    learn = learner(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)), loaders(bs=8))
    x, y = next(iter(learn.dls.train))
    relative = lambda a, b: float((a.float() - b).norm() / b.norm())
    layer, head = learn.model
    with torch.no_grad():
        exact = layer(x)
        with torch.autocast('cpu', dtype=dtype):
            first = layer(x)
            second = head(first)
        errors = relative(first, exact), relative(second, head(first.float()))
        grad = 2 * (head(exact) - y) / len(y)
    table = rows(learn.precision_report(precision), precision)
    assert list(table.loc[['0', '1'], 'error']) == pytest.approx(errors)
    largest = max(float(t.abs().max()) for t in (x, layer.weight, layer.bias, exact))  # autocast's casts included
    assert table.loc['0', 'headroom'] == pytest.approx(torch.finfo(dtype).max / largest)
    assert list(table['format']) == [precision, precision, 'fp32'] and table.loc['loss function', 'headroom'] > 1e30
    gradients = grad, grad.sum(0), (grad[..., None] * exact[:, None]).sum(0)  # of output, bias and weight
    assert table.loc['1', 'grad'] == pytest.approx(max(float(g.abs().max()) for g in gradients), rel=1e-4)


def test_the_share_of_gradients_that_are_0():
    learn = learner(nn.Linear(6, 1, bias=False), loaders(bs=24), lambda p, y: F.mse_loss(p, y) * 5e-12)
    x, y = next(iter(learn.dls.train))
    lost = (1e-11 * (learn.model(x).detach() - y) / len(y) * 65536).half() == 0
    share = rows(learn.precision_report('fp16'), 'fp16')['underflow']['(model)']
    assert 0 < lost.sum() < len(y) and share == pytest.approx(float(lost.sum()) / (len(y) + 6), abs=0.05)


def test_a_formula_of_pytorchs_that_fails_is_not_the_models_fault(monkeypatch):
    def fails(*args, **kwargs):
        raise AssertionError

    monkeypatch.setitem(flop_registry, torch.ops.aten.addmm, fails)
    traits_of.cache_clear()
    assert learner(mlp()).precision_report('bf16').verdicts['bf16'].verdict == SAFE
    traits_of.cache_clear()


def test_sizes_and_errors_of_values():
    for size in (1e-30, 1.0, 1e30):  # whose squares exceed the range of fp32
        got, expected = torch.tensor([1.1, 2.0]) * size, torch.tensor([1.0, 2.0]) * size
        assert relative_error(got, expected) == pytest.approx(0.1 / math.sqrt(5), rel=1e-4)


def test_the_largest_value_of_a_loss_is_not_the_number_of_samples():
    x, y = torch.randn(32, 6), torch.arange(32) % 3
    dls = loaders(train=Data(x, y), bs=32)
    report = learner(nn.Linear(6, 3), dls, nn.CrossEntropyLoss()).precision_report('bf16')
    assert 0 < rows(report, 'bf16').loc['loss function', 'largest'] < 10


# -- notes


normalizes = lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1))
INPUTS = {  # precision, model, factor of the inputs, note
    'large': ('fp16', lambda: layers(nn.ReLU()), 4e4, 'The inputs reach 8.46e+04. Normalize them first.'),
    'large, but they do no harm': ('bf16', normalizes, 4e4, ''),
}


@pytest.mark.parametrize('name', INPUTS)
def test_a_note_on_inputs(name):
    precision, make, factor, note = INPUTS[name]
    report = report_on(make(), precision, dls=large(factor))
    assert [n for n in report.notes if n.startswith('The inputs')] == [note] * bool(note)
    assert bool(report.fp32_modules) == bool(note)


@pytest.mark.parametrize('call', [lambda l: l.precision_report('bf16'), lambda l: l.compare_precision([], n_steps=1)])
def test_a_note_on_frozen_weights(call):
    learn = learner()
    assert not any('frozen' in note for note in call(learn).notes)
    learn.model[0].requires_grad_(False)
    assert sum('2 of 6 weight tensors are frozen' in note for note in call(learn).notes) == 1


def test_precisions_that_round_further_are_found_by_their_own_method(monkeypatch):
    "A report knows no precision by its name: one of 4 bits, made here, is reported on."

    def forward(layer, input):
        x = input.bfloat16().clone()
        with without_modes(), torch.no_grad():  # a recording sees only the copy
            x.sign_()
        return F.linear(x, layer.weight, layer.bias)

    def simulated_forwards(self, model):
        return dict.fromkeys({'1'} - {*self.kept_in_fp32(model)}, forward)

    monkeypatch.setattr(BF16, 'simulated_forwards', simulated_forwards)
    report = report_on(layers(nn.Linear(8, 8)), 'bf16')
    assert report.verdicts['bf16'].modules == ['1'] and "the error of '1'" in report.verdicts['bf16'].reason
    assert "bf16: the rounding of '1' was simulated; no BF16 kernel was run." in report.notes


def test_an_emulated_precision_makes_it_look_at_fewer_samples(monkeypatch):
    set_support(monkeypatch, lambda name: 'emulated' if name == 'fp16' else 'native')
    monkeypatch.setattr(room, 'EMULATED_WORK', 0.0)
    for precisions, expected in (('bf16', {24}), (('bf16', 'fp16'), {24, 2})):
        sizes = []
        report = learner(
            layers(Act(lambda x: (sizes.append(len(x)), x)[1]), nn.BatchNorm1d(8)), loaders(48, 24)
        ).precision_report(precisions)
        cut = [note for note in report.notes if note.startswith('fp16: looked at only 2 of these samples, ')]
        assert set(sizes) == expected and bool(cut) == (2 in sizes)
        assert not any('Predictions' in note and 'in fp16' in note for note in report.notes)
        assert str(report.verdicts['bf16']).startswith('bf16: safe so far. Next: `learn.to_bf16()`\n')
        assert 'rounding' in report.verdicts['bf16'].reason
    reason = report.verdicts['fp16'].reason
    assert 'rounding' not in reason and 'loss scales' not in reason
    assert 'Next, where fp16 is native (this device emulates it, usually more slowly than fp32): `learn.to_fp16' in str(
        report.verdicts['fp16']
    )


def test_a_batch_that_begins_with_time_is_not_cut(monkeypatch):
    set_support(monkeypatch, lambda name: 'emulated')
    monkeypatch.setattr(room, 'EMULATED_WORK', 0.0)
    sizes, last = set(), Act(lambda h: (sizes.add(h.shape), h[-1])[1])
    dls = loaders(train=[(torch.randn(9, 4, 6), torch.randn(4, 1))] * 2, bs=None)
    report = learner(nn.Sequential(nn.Linear(6, 1), last), dls).precision_report()
    assert sizes == {(9, 4, 1)} and 'of 4 samples each' in str(report)


def test_a_batch_of_pictures_has_as_many_samples_as_pictures():
    "Each has its own number of boxes."
    x, boxes = torch.randn(4, 6), [torch.randn(n, 4) for n in (2, 3, 1, 3)]
    loss = lambda p, y: p.square().mean() + 0 * sum(b.sum() for b in y)
    report = learner(dls=loaders(train=[(x, boxes)] * 2, bs=None), loss_func=loss).precision_report('bf16')
    assert 'of 4 samples each' in str(report)


# -- how it is shown


PRINTED = {
    'report': lambda: learner(Attentive(), cbs=At('after_epoch', print)).precision_report(['fp16', 'bf16'], 2),
    'report_safe': lambda: learner().precision_report('bf16'),
    'report_simulated': lambda: report_on(
        inner(lambda h: h / h.abs().clamp(min=1e-8)), ('bf16', 'fp16'), 'cuda', loaders(24, 24)
    ),
}


@pytest.mark.parametrize('name', PRINTED)
def test_the_printed_report(name, expected, monkeypatch):
    set_support(monkeypatch, lambda name: 'native')
    report = PRINTED[name]()
    said = '\n'.join([*map(str, report.verdicts.values()), *report.notes])
    text, *others = repr(report).split('\n\n')
    assert ' '.join(text.split()) == ' '.join(said.split())
    assert blurred('\n'.join([said, *others[::2], ''])) == expected(name)
    html = report._repr_html_()
    assert all(f'{v.precision}: {v.verdict}' in html for v in report.verdicts.values())
    assert ('class="dataframe"' in html) == any(v.modules for v in report.verdicts.values())


def test_the_columns_are_documented():
    report = learner().precision_report('bf16')
    named = re.findall(r"^ *\| (`.+?) \|", PrecisionReport.__doc__, re.M)
    assert sorted(re.findall(r"`(\w+)`", " ".join(named))) == sorted(report.table.columns)


def test_time_that_is_over_leaves_what_is_known(clock):
    slow = [Act(lambda h: (clock.sleep(1), h)[1]) for _ in range(10)]
    learn = learner(nn.Sequential(nn.Linear(6, 6), *slow, nn.Linear(6, 1)))
    report = learn.precision_report(max_seconds=150.0)  # a trace needs 20, gradients 120; a part of them says nothing
    bf16, fp16 = report.verdicts.values()
    assert bf16.verdict == SAFE and fp16.verdict == 'not known' and '`max_seconds=150`' in fp16.reason
    assert fp16.call == "learn.precision_report('fp16', max_seconds=1500)" and set(report.table['precision']) == {
        'bf16'
    }
    bf16, fp16 = learn.precision_report(max_seconds=30.0).verdicts.values()
    over = 'the time limit (`max_seconds=30`) was reached before'
    known = rf'no module has an error above 0.\d\d%; {re.escape(over)} gradients were compared'
    assert bf16.verdict == fp16.verdict == 'not known' and fp16.reason == f'{over} modules were looked at'
    assert re.fullmatch(known, bf16.reason)
    (fp16,) = learner(nn.Sequential(Attentive(), *slow[:2])).precision_report('fp16', max_seconds=7.0).verdicts.values()
    assert fp16.verdict == 'not known' and fp16.flagged == fp16.modules == ['0.attn'], fp16
    assert re.fullmatch(r"values in '0.attn' reach .* was reached before (it was known what helps)", fp16.reason)
    far = nn.Sequential(far_from_0(), *slow[:2])
    (bf16,) = learner(far).precision_report('bf16', max_seconds=30.0).verdicts.values()
    assert re.search('standard errors .* reached before it was known what helps', bf16.reason), bf16
    report = learn.precision_report(max_seconds=5.0)
    assert {v.verdict for v in report.verdicts.values()} == {'not known'} and not len(report.table) and report.plot()
    again = learn.precision_report('fp16', max_seconds=5.0, device='cuda').verdicts['fp16'].call
    assert again == "learn.precision_report('fp16', max_seconds=50, device='cuda')"


def test_tiny_gradients_get_a_scale_that_can_be_passed():
    learn = learner(loss_func=lambda p, y: (p - y).square().mean() * 1e-30)
    verdict = learn.precision_report('fp16').verdicts['fp16']
    eval(verdict.call, {'learn': learn})
    learn.fit(1)
    assert 2**50 < verdict.init_scale <= 2**62 and not any(learn.mixed_precision.skips)


# -- settings, and what it does not change


class Rounds(nn.Linear):
    "Multiplies as a CPU with AMX does if the setting is bf16, and cancels."

    def forward(self, x):
        f = super().forward
        if torch.backends.mkldnn.matmul.fp32_precision == 'bf16':
            f = lambda x: super(Rounds, self).forward(x.bfloat16().to(x.dtype))
        return f(x + 3000) - f(torch.full_like(x, 3000))


def test_it_computes_fp32_in_full_precision():
    torch.set_float32_matmul_precision('medium')
    try:
        assert report_on(layers(Rounds(8, 8)), 'bf16').fp32_modules == ['1']
        assert torch.backends.mkldnn.matmul.fp32_precision == 'bf16'
    finally:
        torch.set_float32_matmul_precision('highest')
        for place in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
            place.fp32_precision = 'none'


def test_it_looks_at_the_given_data():
    learn, seen = learner(), []
    model = nn.Sequential(Act(lambda x: (seen.append(x), x)[1]), nn.Linear(6, 1))
    assert learner(model).precision_report('bf16', dl=learn.dls.valid).verdicts['bf16'].verdict == SAFE
    assert torch.equal(seen[0], learn.dls.valid.one_batch()[0])


def test_a_loader_that_gives_its_batches_once():
    once = (batch for batch in loaders().train)
    assert learner().precision_report('bf16', dl=once).verdicts['bf16'].verdict == SAFE
    with pytest.raises(ValueError, match='precision_report needs at least one batch'):
        learner().precision_report('bf16', dl=once)
    with pytest.raises(ValueError, match='dl=5 cannot be used'):
        learner().precision_report('bf16', dl=5)


def test_anomaly_detection_is_off_in_a_report():
    make = lambda: learner(layers(Act(lambda h: Times.apply(h, 1e4))))
    expected = str(make().precision_report('fp16'))
    with torch.autograd.detect_anomaly():
        assert str(make().precision_report('fp16')) == expected and 'init_scale' in expected
