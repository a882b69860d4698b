"The precision report: its table, its text, the models that it runs, and what it does not change."

import math, os, random, re, subprocess, sys
from collections import OrderedDict
from pathlib import Path

import pytest, torch
from fastai.callback.core import Callback, CancelBatchException, CancelFitException
from fastai.learner import Learner
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint
from torch.utils.flop_counter import flop_registry

from fastxtend_amp.compat import traits_of, without_modes
from fastxtend_amp.insight import report as room
from fastxtend_amp.insight.values import relative_error
from fastxtend_amp.insight.report_result import PrecisionReport
from fastxtend_amp.precisions import BF16
from helpers import At, Attentive, Data, dataset, finite, learner, loaders, mlp, set_support
from models import inner, large, layers, report_on, trained
from states import Act, Gives, InStep, Times, Unpacks, blurred

SAFE = 'safe so far'


def rows(report, precision):
    return report.table[report.table['precision'] == precision].set_index('module')


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
    assert learner(mlp()).precision_report('bf16').verdicts['bf16'].verdict == 'safe so far'
    traits_of.cache_clear()


def test_sizes_and_errors_of_values():
    for size in (1e-30, 1.0, 1e30):  # whose squares exceed the range of fp32
        got, expected = torch.tensor([1.1, 2.0]) * size, torch.tensor([1.0, 2.0]) * size
        assert relative_error(got, expected) == pytest.approx(0.1 / math.sqrt(5), rel=1e-4)


# -- notes


def far_from_0():
    torch.manual_seed(0)
    return learner(nn.Sequential(nn.Linear(6, 8), Act(lambda h: h.tanh() + 30), nn.Linear(8, 1)))


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


# -- what is evidence


class ArcFace(nn.Linear):
    "The sine's gradient is infinite where a cosine rounds to 1, as in half of the batches here."

    def forward(self, x):
        cos = F.linear(F.normalize(x), F.normalize(self.weight))
        return 4 * (cos * math.cos(0.5) - (1 - cos * cos).sqrt() * math.sin(0.5))


def faces():
    torch.manual_seed(0)
    y = torch.arange(64) % 8
    x = F.one_hot(y, 16) + torch.linspace(0.005, 0.04, 64)[:, None] * torch.randn(64, 16)
    arc = ArcFace(16, 8, bias=False)
    arc.weight.data = torch.eye(8, 16) * 0.5
    return learner(
        nn.Sequential(OrderedDict(arc=arc)), loaders(bs=8, train=Data(x.flip(0), y.flip(0))), nn.CrossEntropyLoss()
    )


class Half(nn.Linear):
    def __init__(self, factor):
        super().__init__(6, 32)
        self.factor = factor

    def forward(self, x):
        with torch.autocast('cpu', dtype=torch.float16):
            return super().forward(x * self.factor).float() / self.factor


class Teacher(Callback):
    run_on_copy = True

    def after_pred(self):
        assert self.pred.dtype == torch.float32, 'the teacher wants fp32'


class NewHead(Callback):
    run_on_copy = True

    def before_fit(self):
        self.learn.model[3] = nn.Linear(8, 1)


class Notes(nn.Module):
    "Returns nothing."

    def forward(self, h):
        self.mean = float(h.detach().mean())


class Handles(nn.Linear):
    "Calls a module while it handles an exception, and later raises one in 16 bits."

    def __init__(self):
        super().__init__(6, 1)
        self.notes = Notes()

    def forward(self, x):
        try:
            self.unknown
        except AttributeError:
            self.notes(x)
        if torch.is_autocast_enabled('cpu'):
            raise ValueError('only fp32')
        return super().forward(x)


class Pairs(nn.Module):
    "A loss over the whole batch, whose size it knows."

    def forward(self, p, y):
        return F.cross_entropy(p @ p.T, torch.arange(24))


class Third(nn.Linear):
    "NaN in its second call, and in 16 bits in the third."

    n = 0

    def forward(self, x):
        self.n += 1
        lost = self.n == 2 or (self.n == 3 and torch.is_autocast_enabled('cpu'))
        return super().forward(x) * (math.nan if lost else 1)


class OwnLoop(Learner):
    "Without fastai's events of the backward pass."

    def _do_one_batch(self):
        self.pred = self.model(*self.xb)
        self.loss_grad = self.loss_func(self.pred, *self.yb)
        self.loss = self.loss_grad.clone()
        self('after_loss')
        if self.training:
            self.loss_grad.backward()
            self.opt.step()


def by_chance(h):
    return h * (1 + random.SystemRandom().random())


in_half = lambda factor: learner(nn.Sequential(Half(factor), nn.Linear(32, 1)))
whole_batch = lambda: learner(mlp(), loaders(48, 24), Pairs())
unseen = 'Inside a transform .* cannot be read. Not compared with fp32: .*'
EVIDENCE = {  # a learner, and what the report on bf16 says
    'NaN where fp32 is finite': (
        faces,
        r"keep modules in fp32.*modules=\['arc'\].* in \d of 6 batches a gradient was NaN or inf at first",
    ),
    'a batch that is lost in fp32 as well, when it runs again': (
        lambda: learner(nn.Sequential(Third(6, 1))),
        'bf16: not known.*not finite in fp32 either.* in 1 of 5 batches a gradient was NaN or inf at first',
    ),
    'an autocast of its own': (
        lambda: in_half(1),
        r"The reference is not fp32: '0' \(test_report.py:\d+\) computes in 16 bits, by an autocast",
    ),
    'and few products in fp32': (
        lambda: learner(nn.Sequential(Half(1), nn.Linear(32, 6), Half(1), nn.AdaptiveAvgPool1d(1))),
        r"bf16: not known\.\s+'0' \(test_report.py:\d+\), '2' .* compute in 16 bits.* no fp32 run to compare with",
    ),
    'that overflows': (lambda: in_half(1e6), "the loss is not finite.*, but the reference is not fp32: '0'"),
    'a loss in fp16': (
        lambda: learner(loss_func=lambda p, y: F.mse_loss(p.half() * 1e4, y.half())),
        'the loss is not finite, first in the loss function, but the reference is not fp32: the loss function computes '
        'in 16 bits',
    ),
    'own loop': (lambda: learner(cls=OwnLoop), 'bf16: not known.* no gradient was seen'),
    'vmap': (lambda: learner(Mapped()), unseen + "'inner'"),
    'forward-mode AD': (lambda: learner(Directional()), unseen + "the model's own `forward`, 'inner'"),
    'a callback': (lambda: learner(cbs=Teacher()), 'callback `Teacher` does not run in bf16: the teacher wants fp32'),
    'a module that returns None in an `except` block': (
        lambda: learner(Handles()),
        "the model's own `forward` does not run in bf16: only fp32",
    ),
    'random weights in before_fit': (lambda: learner(cbs=NewHead()), 'safe so far.* shifts the mean gradient by 0.0'),
    'not deterministic': (
        lambda: learner(layers(Act(by_chance))),
        r'The model is not deterministic: two runs of one batch in fp32 have losses of \S+ and \S+\.',
    ),
    'whole batches are needed': (whole_batch, 'safe so far'),
    'digits': (far_from_0, r'Predictions differ from those in fp32 by \d\S+% in bf16\.'),
    'statistics, updated once': (
        lambda: learner(nn.Sequential(nn.Linear(6, 8), Act(lambda h: h + 9), nn.BatchNorm1d(8), nn.Linear(8, 1))),
        r'Predictions differ from those in fp32 by 0\.\d+% in bf16\.',
    ),
}


@pytest.mark.parametrize('name', EVIDENCE)
def test_what_is_evidence(name, monkeypatch):
    set_support(monkeypatch, lambda _: 'emulated' if name == 'whole batches are needed' else 'native')
    monkeypatch.setattr(room, 'EMULATED_WORK', 0.0)
    make, words = EVIDENCE[name]
    torch.manual_seed(0)
    report = make().precision_report('bf16')
    said = '\n'.join([*map(str, report.verdicts.values()), *report.notes])
    assert re.search(words, said, re.S), said
    others = 'reference is not|Inside a|not determ|at first|become equal'
    assert bool(re.search(others, said)) == bool(re.search(others, words))


def test_of_a_model_that_could_not_be_looked_at_only_the_loss_scale_that_ran_is_said_to_work():
    class Ensemble(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 1)
            self.weights, self.biases = nn.Parameter(torch.randn(3, 1, 6)), nn.Parameter(torch.zeros(3, 1))

        def forward(self, x):
            call = lambda w, b: torch.func.functional_call(self.layer, dict(weight=w, bias=b), (x,))
            return torch.func.vmap(call)(self.weights, self.biases).mean(0)

    learn = learner(Ensemble()).to_fp16(init_scale=64.0)
    assert learn.precision_report('fp16').verdicts['fp16'].scale_range == (1, 64)


def test_anomaly_detection_is_off_in_a_report():
    make = lambda: learner(layers(Act(lambda h: Times.apply(h, 1e4))))
    expected = str(make().precision_report('fp16'))
    with torch.autograd.detect_anomaly():
        assert str(make().precision_report('fp16')) == expected and 'init_scale' in expected


def test_a_loader_that_gives_its_batches_once():
    once = (batch for batch in loaders().train)
    assert learner().precision_report('bf16', dl=once).verdicts['bf16'].verdict == SAFE
    with pytest.raises(ValueError, match='precision_report needs at least one batch'):
        learner().precision_report('bf16', dl=once)
    with pytest.raises(ValueError, match='dl=5 cannot be used'):
        learner().precision_report('bf16', dl=5)


# In a fresh process: reports on models, twice in a row; `rows` has them in another order in another process.
TWICE = """
import sys, torch
sys.path += ['tests', 'tests/insight']
torch.set_num_threads(1)
from test_report import RUNS, faces, whole_batch
makes = {**RUNS, 'faces': faces, 'whole': whole_batch}
for name in sys.argv[1:]:
    reports = []
    for _ in range(2):
        torch.manual_seed(0)
        reports.append(repr(makes[name]().precision_report()))
    assert reports[0] == reports[1], reports
    print(name, reports[0])
"""
MODELS = ['whole', 'faces', 'compiled', 'tied, in place, called twice', 'masked targets', 'checkpoints', 'vmap']
MODELS += ['fused attention', 'a sum that ReLU writes over', 'writes into its inputs', 'a scripted module']
MODELS += ['spectral norm']


@pytest.mark.slow
def test_a_report_is_the_same_in_each_process_and_on_a_busy_machine():
    run = lambda names: (
        subprocess.run(
            [sys.executable, '-c', TWICE, *names],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
        ).stdout
    )
    firsts = [run([name]) for name in MODELS]
    burn = [subprocess.Popen([sys.executable, '-c', 'while True: pass']) for _ in range(2 * os.cpu_count())]
    try:
        assert run(MODELS) == ''.join(firsts)
    finally:
        for process in burn:
            process.kill()


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


# -- every model that trains can be reported on


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.spare, self.act = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(2, 2), nn.ReLU(inplace=True)
        self.head, self.b.weight = nn.Linear(6, 1), self.a.weight

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


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 1)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.1))

    def forward(self, x):
        return self.head(checkpoint.checkpoint(self.inner, self.first(x), use_reentrant=True))


class Mapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 1)

    def forward(self, x):
        return torch.func.vmap(self.inner)(x)


class Directional(Mapped):
    def forward(self, x):
        out, tangent = torch.func.jvp(self.inner, (x,), (x,))
        return out + 0 * tangent


class Trains(nn.Linear):
    "Cannot validate, not even in fp32."

    def forward(self, x):
        return super().forward(x) if self.training else [x]


def compiled():
    return learner(torch.compile(mlp(), backend='eager'))


def masked():
    "Targets with NaN, which the loss leaves out."

    def loss(p, y):
        known = y.isfinite()
        return F.mse_loss(torch.where(known, p, 0.0), torch.where(known, y, 0.0))

    data = dataset(64)
    data.tensors[1][::3] = math.nan
    return learner(dls=loaders(64, 16, data), loss_func=loss)


def scales_itself():
    "A callback with a backward pass of its own, by `learn.scaler`, which also exists in the fp32 run of the report."
    own = lambda l: l.scaler.scale(l.loss_grad).backward(retain_graph=True)
    return learner(cbs=InStep('before_backward', own, 5)).to_fp16(init_scale=1024.0)


def fp8():
    from torchao import float8

    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    model = float8.convert_to_float8_training(model, module_filter_fn=lambda m, name: name == '2')
    return learner(model, loaders(64, 16))


def attends(h):
    "Fused attention, which may draw random numbers, and so is not also run in fp32."
    h = h.view(-1, 1, 2, 4)
    return F.scaled_dot_product_attention(h, h, h).flatten(1)


class Spectral(nn.Linear):
    "With complex weights, read as conjugates, and a complex number."

    def __init__(self):
        super().__init__(6, 1)
        self.spectrum = nn.Parameter(torch.ones(6, dtype=torch.complex64))

    def forward(self, x):
        return super().forward(torch.fft.ifft(torch.fft.fft(x.float()) * self.spectrum.conj() * torch.tensor(1j)).imag)


def spectral():
    return learner(Spectral())


def on_meta(h):
    "As PyTorch does for the first nested tensor of a process."
    return h * (torch.ones(8, device='meta') + 1).ndim


class Keeps(nn.Module):
    "Reads features that a hook has stored in it."

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 1)

        def keep(module, args, out):
            self.features = out

        self.body.register_forward_hook(keep)

    def forward(self, x):
        self.body(x)
        return self.head(self.features)


RUNS = {
    'complex weights': spectral,
    'a hook refers to the model': lambda: learner(Keeps()),
    'a tensor without memory': lambda: learner(layers(Act(on_meta))),
    'a scripted module': lambda: learner(layers(torch.jit.script(nn.ReLU()))),
    'unpacked by a callback': lambda: learner(Gives(mlp()), cbs=Unpacks()),
    'tied, in place, called twice': lambda: learner(Tied()),
    'compiled': compiled,
    'checkpoints': lambda: learner(Checkpointed()),
    'vmap': lambda: learner(Mapped()),
    'forward-mode AD': lambda: learner(Directional()),
    'a sum that ReLU writes over': lambda: learner(Residual()),
    'spectral norm': lambda: learner(nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 1))),
    'masked targets': masked,
    'a backward pass in a callback': scales_itself,
    'writes into its inputs': lambda: learner(nn.Sequential(Act(lambda x: x.mul_(200)), nn.Linear(6, 1))),
    'fused attention': lambda: learner(layers(Act(attends))),
    'float8': fp8,
}


@pytest.mark.parametrize(
    'make', [pytest.param(f, id=name, marks=[pytest.mark.torchao] * (f is fp8)) for name, f in RUNS.items()]
)
def test_what_trains_can_be_reported_on(make):
    torch.manual_seed(0)
    learn = make()
    report = learn.precision_report('bf16' if make in (fp8, spectral) else ('bf16', 'fp16'))
    assert {v.verdict for v in report.verdicts.values()} == {SAFE} and ' 0.00%' not in repr(report), report
    assert report.table['error'].max() < 0.05
    assert (report.table['grad'].dropna() > 0).all() and report.table['grad'].notna().any()
    learn.fit(1)
    assert finite(learn)


def test_the_largest_value_of_a_loss_is_not_the_number_of_samples():
    x, y = torch.randn(32, 6), torch.arange(32) % 3
    dls = loaders(train=Data(x, y), bs=32)
    report = learner(nn.Linear(6, 3), dls, nn.CrossEntropyLoss()).precision_report('bf16')
    assert 0 < rows(report, 'bf16').loc['loss function', 'largest'] < 10


def test_names():
    table = rows(learner(Checkpointed()).precision_report('bf16'), 'bf16')
    assert list(table.index) == ['first', 'inner.0', 'inner.1', 'head', 'loss function']
    table = rows(learner(Tied()).precision_report('bf16'), 'bf16')
    assert list(table.index) == ['a', 'b', 'act', 'head', 'loss function']
    assert rows(compiled().precision_report('bf16'), 'bf16').equals(rows(learner().precision_report('bf16'), 'bf16'))
    model = Attentive()
    model.attn.compile(backend='eager')
    for m in (torch.compile(Attentive(), backend='eager'), model):
        assert learner(m).precision_report('fp16').fp32_modules == ['attn']


def raises(error):
    def f(learn):
        raise error

    return f


def test_batches_that_give_no_loss():
    "A callback may end the batch, the epoch or the fit."
    dls = loaders()
    dls.n_inp = 2
    cancelled = (InStep('before_batch', raises(e())) for e in (CancelBatchException, CancelFitException))
    for learn in (learner(nn.Bilinear(6, 1, 1), dls), *(learner(cbs=cb) for cb in cancelled)):
        for verdict in learn.precision_report().verdicts.values():
            assert verdict.verdict == 'not known' and not verdict.call and not verdict.scale_range, verdict
            assert verdict.reason.startswith('no batch gave a loss')


class Validates(nn.Linear):
    "Has no 16-bit kernel in validation, as on CPUs encoders with a padding mask."

    def forward(self, x):
        out = super().forward(x)
        assert self.training or out.dtype is torch.float32, 'no kernel'
        return out


class Overflows(nn.Linear):
    "Overflows fp16, in validation only."

    def forward(self, x):
        large = 1 if self.training else 1e6
        return super().forward(x) * large / large


def test_batches_also_run_as_in_validation():
    assert report_on(Trains(6, 1), 'bf16').verdicts['bf16'].verdict == SAFE
    for cls, precision, reason in (Validates, 'bf16', '(in validation)'), (Overflows, 'fp16', "above fp16's 65,504"):
        verdict = report_on(layers(cls(8, 8)), precision).verdicts[precision]
        assert verdict.modules == ['1'] and reason in verdict.reason, verdict
        trained(layers(cls(8, 8)), verdict.call, 1)


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
