"Causes that the report says in words: kernels, backward passes, large inputs, growth, gradients that are 0."

from collections import OrderedDict

import pytest, torch
from torch import nn
from torch.nn import functional as F

from held_out import Own, inner
from helpers import Data, dataset, learner, loaders
from states import Act


def report_on(model, mode='fp16', device=None, dls=None, **kwargs):
    return learner(model, dls, **kwargs).precision_report(mode, device=device)


class NeedsFp32(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        assert g.dtype == torch.float32, 'the gradient is not fp32'
        return g


@pytest.mark.parametrize('device', (None, 'cuda'))
@pytest.mark.parametrize('kind, module', [(inner, '1'), (Own, 'a')])
def test_an_own_function_that_fails_in_its_backward_pass_is_named(kind, module, device):
    torch.manual_seed(0)
    (verdict,) = report_on(kind(NeedsFp32.apply), device=device).verdicts.values()
    assert verdict.modules == [module] and verdict.flagged == ['backward pass']
    assert verdict.reason.startswith(
        'the backward pass does not run in fp16: the gradient is not fp32, in `NeedsFp32Backward` '
        f"(with '{module}' in fp32 this does not happen)"
    )
    torch.manual_seed(0)
    learn = learner(kind(NeedsFp32.apply))
    exec(verdict.call, {'learn': learn})
    learn.fit(1)


def only_16_bits(h):
    assert h.dtype != torch.float32, 'only fp16 and bf16 are supported'
    return h.clone()


def test_a_kernel_that_accepts_only_16_bits_is_not_advised_into_fp32():
    report = report_on(inner(only_16_bits), ('bf16', 'fp16'))
    for verdict in report.verdicts.values():
        assert verdict.verdict == 'not known' and not verdict.call and not verdict.modules
        assert verdict.reason == (
            'the model runs only in 16 bits, so it cannot be compared with fp32: only fp16 and bf16 are supported'
        )
    with pytest.raises(AssertionError, match='only fp16 and bf16'):  # as nothing runs
        report_on(nn.Sequential(inner(only_16_bits), Act(lambda p: only_16_bits(p.float()))))


class Spectrum(nn.Module):
    "A layer, and the amplitudes of frequencies in its output."

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 64)

    def forward(self, x):
        h = self.a(x)
        parts = torch.stft(h, 16, window=torch.ones(16, dtype=h.dtype), return_complex=True)
        return parts.abs().mean((1, 2))[:, None]


def test_what_a_cpu_lacks_says_nothing_about_a_gpu():
    "CUDA transforms lengths that are powers of two in fp16, and nothing in bf16."
    (fp16,) = report_on(Spectrum(), device='cuda').verdicts.values()
    assert fp16.verdict == 'not known' and 'this CPU has no fp16 kernel' in fp16.reason and not fp16.modules
    (bf16,) = report_on(Spectrum(), 'bf16', 'cuda').verdicts.values()
    assert bf16.modules == ['a'] and 'does not run in bf16' in bf16.reason


def columns(factor):
    data = Data(dataset().tensors[0] * factor, dataset().tensors[1])
    return loaders(train=data, valid=data)


@pytest.mark.parametrize('factor, said', [(4e4, True), (1.0, False)])
def test_large_inputs_are_said(factor, said):
    report = report_on(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 1)), dls=columns(factor))
    assert bool(report.fp32_modules) == said
    notes = [n for n in report.notes if n.startswith('The inputs')]
    assert notes == ['The inputs reach 8.46e+04. Normalize them first.'] * said


def test_large_inputs_that_do_no_harm_are_not_said():
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 1))
    assert 'The inputs' not in repr(report_on(model, 'bf16', dls=columns(4e4)))


class Doubles(nn.Linear):
    def forward(self, x):
        return 2 * x + super().forward(x)


@pytest.mark.parametrize('device', (None, 'cuda'))
@pytest.mark.parametrize('n, said', [(18, True), (6, False)])
def test_a_residual_stream_that_grows(n, said, device):
    torch.manual_seed(0)
    layers = [*(nn.Linear(8, 8) for _ in range(3)), *(Doubles(8, 8) for _ in range(n))]
    parts = dict(inp=nn.Linear(6, 8), layers=nn.Sequential(*layers), norm=nn.LayerNorm(8), head=nn.Linear(8, 1))
    report = report_on(nn.Sequential(OrderedDict(parts)), device=device)
    notes = [note for note in report.notes if 'a layer' in note]
    assert notes == ['Values grow 2.2x a layer from `layers.3` on.'] * said


def small_loss(p, y):
    return F.mse_loss(p, y) * 1e-9


def test_the_share_of_gradients_that_are_0():
    for mode, on, share in ('fp16', False, 1.0), ('fp16', True, 0.0), ('bf16', True, 0.0):
        learn = learner(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), loss_func=small_loss)
        if not on:
            learn.to_fp16(enabled=False)
        report = learn.precision_report(mode)
        table = report.table.set_index('module')
        assert table['underflow'].drop('loss function').tolist() == pytest.approx([share] * 3, abs=0.3), report.table
        said = 'fp16: 100% of the gradients are 0, and not in fp32.'
        assert (said in report.notes) == (not on)
    assert report.verdicts['bf16'].verdict == 'safe so far'


def test_the_share_is_that_of_a_direct_comparison():
    torch.manual_seed(0)
    learn = learner(nn.Linear(6, 1, bias=False), loaders(bs=24), loss_func=lambda p, y: F.mse_loss(p, y) * 5e-12)
    x, y = next(iter(learn.dls.train))
    grad = 1e-11 * (learn.model(x).detach() - y) / len(y)
    lost = (grad * 65536).half() == 0
    assert 0 < lost.sum() < len(y)
    table = learn.precision_report('fp16').table.set_index('module')
    assert table['underflow']['(model)'] == pytest.approx(float(lost.sum()) / (len(y) + 6), abs=0.05)


def test_precisions_that_round_further_are_found_by_their_own_method(monkeypatch):
    "A report knows no precision by its name: one of 4 bits, made here, is reported on."
    from fastxtend_amp.precisions import BF16

    def rounding(cls, model, arguments, kept):
        return {n: lambda t, is_gradient: t.sign() for n, m in model.named_modules() if n == '1' and n not in kept}

    monkeypatch.setattr(BF16, 'rounding', classmethod(rounding))
    report = report_on(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)), 'bf16')
    assert report.verdicts['bf16'].modules == ['1'] and "the error of '1'" in report.verdicts['bf16'].reason
    assert any(note.startswith("bf16: '1' would compute in BF16") for note in report.notes), report.notes
