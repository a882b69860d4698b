"Reports and diagnoses in unusual conditions: layer scale, masked targets, tensor subclasses, settings of PyTorch."

import math, warnings

import pytest, torch
from fastai.learner import Learner
from torch import nn
from torch.nn import functional as F

from helpers import At, Attentive, Data, dataset, finite, learner, loaders
from states import Act, Times


def verdict_on(make, mode='fp16', **kwargs):
    return learner(make(), loaders(64, 16), **kwargs).precision_report(mode).verdicts[mode]


def trained(make, call, epochs=8, **kwargs):
    "Return the last losses of a fit with this call, and the number of skipped steps."
    learn = learner(make(), loaders(64, 16), **kwargs)
    exec(call, {'learn': learn})
    if learn.precision:
        learn.precision.on_overflow = 'ignore'
    with learn.no_logging():
        learn.fit(epochs, 0.01)
    return float(torch.stack(learn.recorder.losses[-4:]).mean()), learn.precision and learn.precision.n_skipped


# -- loss scales


class Block(nn.Module):
    "A residual block with layer scale, which makes the gradients inside it tiny."

    def __init__(self, gamma):
        super().__init__()
        self.a, self.b, self.gamma = nn.Linear(32, 32), nn.Linear(32, 32), nn.Parameter(torch.full((32,), gamma))

    def forward(self, x):
        return x + self.gamma * self.b(F.gelu(self.a(x)))


def scaled(gamma, loud=1.0):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 32), Block(gamma), Block(gamma), nn.Linear(32, 1), Act(lambda h: Times.apply(h, loud))
    )


def test_the_quietest_module_has_no_veto():
    make = lambda: scaled(1e-9, 100.0)
    verdict = verdict_on(make)
    assert verdict.verdict.startswith('safe'), verdict
    low, high = verdict.scale_range
    assert low < high
    (fp32, _), (fp16, skipped) = trained(make, ''), trained(make, verdict.call)
    assert skipped == 0 and fp16 == pytest.approx(fp32, rel=0.01)


def vanishing(before):
    "In its second layer gradients are 1e-12 times those of its head, and in its first one `before` times that."
    torch.manual_seed(0)
    quiet, loud = Act(lambda h: Times.apply(h, 1e-12)), Act(lambda h: Times.apply(h, before))
    return nn.Sequential(nn.Linear(6, 32), loud, nn.Linear(32, 32), quiet, nn.Linear(32, 1))


def test_gradients_that_vanish_when_it_is_tried():
    make = lambda: vanishing(1e13)
    verdict = verdict_on(make)
    assert verdict.verdict == 'gradient differs', verdict
    fp32 = trained(make, '')[0]
    assert trained(make, verdict.call)[0] == pytest.approx(fp32, rel=0.02)
    assert trained(make, 'learn.to_fp16()')[0] > 1.5 * fp32


def test_many_gradients_that_vanish_may_be_a_small_part_of_their_sum():
    "As with the layer scale of a CaiT: 9 of 10 gradients are 0 in fp16, yet training reaches the loss of fp32."
    make = lambda: vanishing(1.0)
    verdict = verdict_on(make)
    assert verdict.verdict == 'safe so far', verdict
    assert trained(make, verdict.call)[0] == pytest.approx(trained(make, '')[0], rel=0.02)


def test_a_loss_scale_that_is_too_small_to_begin_with():
    make = lambda: nn.Sequential(nn.Linear(6, 32), nn.Linear(32, 1))
    loss = lambda p, y: F.mse_loss(p, y) * 1e-9
    learn = learner(make(), loaders(64, 16), loss).to_fp16(init_scale=1.0)
    verdict = learn.precision_report('fp16').verdicts['fp16']
    assert verdict.verdict == 'safe with loss scaling' and verdict.init_scale > 1e6, verdict


def test_many_batches_do_not_add_up_their_gradients():
    data = dataset(4)
    same_batch = Data(*(t.repeat(16, 1) for t in data.tensors))
    calls = [
        learner(dls=loaders(train=same_batch)).precision_report('fp16', n_batches=n).verdicts['fp16'].call
        for n in (1, 16)
    ]
    assert calls[0] == calls[1]


def sqrt_gate(h):
    return (h.relu() * 1e-6 + 1e-10).sqrt() * 1e3  # its gradient is infinite in fp16 at any loss scale


def steep_inside(h):
    "A gradient of 1e5 between two operators of one module, which no module shows."
    return Times.apply(Times.apply(h, 1e-5) + 0, 1e5)


def test_after_modules_are_kept_the_loss_scale_is_looked_for_anew():
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 32), Act(sqrt_gate), nn.Linear(32, 1), Act(steep_inside), nn.Linear(1, 1))

    verdict = verdict_on(make)
    assert verdict.verdict == 'keep modules in fp32' and '1' in verdict.modules, verdict
    loss, skipped = trained(make, verdict.call, epochs=2)
    assert skipped == 0 and math.isfinite(loss), verdict
    plain = verdict_on(lambda: make()[:3])  # at the scale that this search ends with, gradients would vanish
    assert plain.modules == ['1'] and plain.scale_range[1] >= 2**10, plain


# -- the guard against fp32's own noise


def test_where_fp32_itself_has_lost_all_digits_an_error_is_no_finding():
    "A difference of equal numbers is rounding noise, in fp32 as well: a comparison with it shows nothing."
    noise = lambda h: h * math.pi / math.pi - h
    make = lambda: nn.Sequential(nn.Linear(6, 8), Act(noise), nn.Linear(8, 1))
    assert verdict_on(make, 'bf16').verdict == 'safe so far'


# -- masked targets


def masked_loss(p, y):
    known = y.isfinite()
    return F.mse_loss(torch.where(known, p, 0.0), torch.where(known, y, 0.0))


def partly_labelled():
    data = dataset(64)
    data.tensors[1][::3] = math.nan
    return loaders(64, 16, data)


def test_targets_that_the_loss_masks_are_not_to_blame():
    report = learner(dls=partly_labelled(), loss_func=masked_loss).precision_report()
    assert {v.verdict for v in report.verdicts.values()} == {'safe so far'}, report
    report = learner(Attentive(), partly_labelled(), masked_loss).precision_report('fp16')
    assert report.fp32_modules == ['attn'], report
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        learner(Attentive(), partly_labelled(), masked_loss).to_fp16(max_skips=2).fit(1)
    messages = [str(w.message) for w in caught if 'training failed' in str(w.message)]
    assert len(messages) == 1 and "Keep 'attn' in fp32" in messages[0] and 'Look at the data' not in messages[0]


# -- what the trace cannot look at


class Opaque(torch.Tensor):
    "A tensor that supports only multiplication."

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func not in (torch.ops.aten.mm.default, torch.ops.aten.detach.default):
            raise NotImplementedError(f'attempting to run {func}, this is not supported')
        args = [a.inner if isinstance(a, cls) else a for a in args]
        return func(*args) if func is torch.ops.aten.mm.default else cls(func(*args))


class Wraps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return torch.mm(Opaque(x.detach()), w.t())

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.to(g.dtype), g.t() @ x.to(g.dtype)


class Wrapped(nn.Linear):
    def forward(self, x):
        w = self.weight
        if torch.is_autocast_enabled('cpu'):
            x, w = (t.to(torch.get_autocast_dtype('cpu')) for t in (x, w))
        with torch.autocast('cpu', enabled=False):
            return Wraps.apply(x, w)


@torch.library.custom_op('fastxtend_amp_tests::halves', mutates_args=())
def halves(x: torch.Tensor) -> torch.Tensor:
    assert x.dtype in (torch.float16, torch.bfloat16), 'half precision alone'
    return x * 0.5


halves.register_autograd(lambda ctx, g: g * 0.5)


@pytest.mark.parametrize(
    'module,words',
    [
        (lambda: Wrapped(8, 8, bias=False), "Opaque of torch.bfloat16 in '1'"),
        (
            lambda: Act(lambda h: halves(h if h.dtype != torch.float32 else h.bfloat16()).to(h.dtype)),
            "fastxtend_amp_tests.halves.default, which does not run in fp32 in '1'",
        ),
    ],
)
def test_what_cannot_be_looked_at_is_left_alone(module, words):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), module(), nn.Linear(8, 1))

    report = learner(make(), loaders(64, 16)).precision_report()
    assert {v.verdict for v in report.verdicts.values()} == {'safe so far'}, report
    assert any(note.startswith('Not checked') and words in note for note in report.notes), report.notes
    for v in report.verdicts.values():
        assert math.isfinite(trained(make, v.call, 1)[0])


@pytest.mark.torchao
def test_linear_layers_in_8_bit_floating_point():
    from torchao import float8

    def make():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        return float8.convert_to_float8_training(model, module_filter_fn=lambda m, name: name == '2')

    report = learner(make(), loaders(64, 16)).precision_report('bf16')
    assert report.verdicts['bf16'].verdict == 'safe so far' and "in '2'" in ''.join(report.notes), report
    assert math.isfinite(trained(make, report.verdicts['bf16'].call, 1)[0])


# -- PyTorch's settings


class Rounds(nn.Linear):
    "Multiplies as a CPU with AMX does if the setting is bf16."

    def forward(self, x):
        if torch.backends.mkldnn.matmul.fp32_precision == 'bf16':
            x = x.bfloat16().to(x.dtype)
        return super().forward(x)


def cancelling():
    torch.manual_seed(0)

    class Cancels(Rounds):
        def forward(self, x):
            return super().forward(x + 3000) - super().forward(torch.full_like(x, 3000))

    return nn.Sequential(nn.Linear(6, 16), Cancels(16, 16), nn.Linear(16, 1))


@pytest.fixture
def medium():
    torch.set_float32_matmul_precision('medium')
    yield
    torch.set_float32_matmul_precision('highest')
    for place in (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        place.fp32_precision = 'none'


def test_the_report_computes_fp32_in_full_precision(medium):
    report = learner(cancelling(), loaders(64, 16)).precision_report('bf16')
    assert report.verdicts['bf16'].modules == ['1'], report
    assert torch.get_float32_matmul_precision() == 'medium' and torch.backends.mkldnn.matmul.fp32_precision == 'bf16'
    assert any("`torch.backends.mkldnn.matmul.fp32_precision` is 'bf16'" in note for note in report.notes), report.notes


def test_the_comparison_names_settings_that_are_not_the_default(medium):
    notes = learner().compare_precision('bf16', n_steps=2, n_seeds=0).notes
    assert any("`torch.backends.mkldnn.matmul.fp32_precision` is 'bf16'" in note for note in notes), notes


def test_with_the_default_settings_there_is_no_word_of_them():
    assert 'fp32_precision' not in repr(learner().precision_report('bf16'))


# -- compiled models


def test_report_and_diagnosis_name_the_module_of_a_compiled_model():
    def whole(model):
        return torch.compile(model, backend='eager')

    def in_place(model):
        model.attn.compile(backend='eager')
        return model

    for compiles in (whole, in_place):
        learn = learner(Attentive())
        learn.model = compiles(learn.model)
        assert learn.precision_report('fp16').fp32_modules == ['attn']
        with pytest.warns(UserWarning, match='(?s)Re-running that batch with the same random numbers: .*attn'):
            learn.to_fp16(max_skips=2).fit(1)


# -- losses that the model returns


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Attentive()

    def forward(self, x, y):
        return F.mse_loss(self.net(x), y)


class TakesTheModelsLoss(Learner):
    def _do_one_batch(self):
        self.pred = self.model(*self.xb)
        self('after_pred')
        self.loss_grad = self.pred
        self.loss = self.loss_grad.clone()
        self('after_loss')
        if self.training:
            self._do_grad_opt()


def test_a_loss_that_the_model_gives():
    def make():
        dls = loaders(24, 8)
        dls.n_inp = 2
        return learner(WithLoss(), dls, cls=TakesTheModelsLoss)

    report = make().precision_report()
    assert report.fp32_modules == ['net.attn'] and report.table['grad'].notna().any(), report
    assert report.verdicts['fp16'].scale_range
    learn = make()
    exec(report.verdicts['fp16'].call, {'learn': learn})
    learn.fit(1)
    assert finite(learn) and learn.precision.n_skipped == 0
    dls = loaders(24, 8)
    dls.n_inp = 2  # no targets
    losses = learner(WithLoss(), dls, cls=TakesTheModelsLoss).compare_precision('bf16', n_steps=6, n_seeds=0).losses
    assert all(len(set(l)) == 6 for l in losses.values()), losses


# -- plots


@pytest.mark.parametrize('call', ['to_bf16', 'to_fp16'])
def test_a_plot_of_no_loss_scale_is_refused(call):
    learn = getattr(learner(), call)()
    if call == 'to_bf16':
        learn.fit(1)
    with pytest.raises(ValueError, match='(?s)nothing to plot.*bf16 and fp32 need no loss scaling'):
        learn.precision.plot_scales()


def test_a_callback_with_a_backward_pass_of_its_own():
    "With `learn.scaler`, which also exists in the fp32 run of the report."
    own = lambda l: l.scaler.scale(l.loss_grad).backward(retain_graph=True)
    learn = learner(cbs=At('before_backward', own, 5)).to_fp16(init_scale=1024.0)
    learn.fit(1)
    report = learn.precision_report()
    assert {v.verdict for v in report.verdicts.values()} == {'safe so far'}, report


# -- validation


class Padded(nn.Module):
    "An encoder with a padding mask: in validation PyTorch uses another kernel, which on CPUs needs fp32."

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.emb, self.body, self.head = nn.Linear(1, 16), nn.TransformerEncoder(layer, 1), nn.Linear(16, 1)

    def forward(self, x):
        mask = torch.zeros(x.shape, dtype=torch.bool)
        mask[::2, -1] = True
        return self.head(self.body(self.emb(x[..., None]), src_key_padding_mask=mask).mean(1))


@pytest.mark.filterwarnings('ignore:.*nested tensors')
def test_a_batch_is_run_as_in_validation_too():
    def make():
        torch.manual_seed(0)
        return Padded()

    try:
        fails = not trained(make, 'learn.to_bf16()', 1)
    except RuntimeError:
        fails = True
    verdict = verdict_on(make, 'bf16')
    assert ('(in validation)' in verdict.reason) == fails == bool(verdict.modules), verdict
    assert math.isfinite(trained(make, verdict.call, 1)[0])


def test_a_model_that_cannot_validate_in_fp32_either_is_judged_by_its_training():
    class Trains(nn.Linear):
        def forward(self, x):
            return super().forward(x) if self.training else [x]

    assert verdict_on(lambda: Trains(6, 1), 'bf16').verdict == 'safe so far'


# -- complex parameters


class Spectral(nn.Linear):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(6, 1)
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.cfloat))

    def forward(self, x):
        return super().forward(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=6))


def test_gradients_that_cannot_be_unscaled_are_refused_before_training():
    learn = learner(Spectral()).to_fp16()
    with pytest.raises(ValueError, match="(?s)'filter' is a parameter of torch.complex64.*to_bf16"):
        learn.fit(1)
    report = learn.precision_report()
    assert [v.verdict for v in report.verdicts.values()] == ['safe so far', 'cannot run']
    comparison = learn.to_bf16().compare_precision(['bf16', 'fp16'], n_steps=4, n_seeds=0)
    assert [*comparison.table['support'][['fp32', 'fp16']]] == ['native', 'failed']
    assert math.isfinite(comparison.table['loss']['bf16'])
