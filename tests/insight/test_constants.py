"Constants that become 0, 1 or infinite in 16 bits: which are in the table, with which line, and which are printed."

import inspect, math

import pytest, torch
from torch import nn
from torch.nn import functional as F

from held_out import Own, inner
from helpers import learner, loaders
from states import Act

RULES = (None, 'cuda')


def report_on(f, kind=inner, mode=('bf16', 'fp16'), device=None):
    torch.manual_seed(0)
    return learner(kind(f), loaders(64, 64)).precision_report(mode, device=device)


def surely(h):
    return (h * 30).sigmoid()


# function, operator and constant in the table, its values in fp16 and bf16, the precisions that flag it
LOST = {
    'clamp away from 0': (lambda h: h / h.abs().clamp(min=1e-8), 'clamp', 1e-8, 0.0, 1e-8, ['fp16']),
    'added to small values': (lambda h: ((h - h.roll(1, 0)).relu() + 1e-10).sqrt(), 'add', 1e-10, 0, 1e-10, ['fp16']),
    'added as a tensor': (lambda h: h / (h.relu() + torch.tensor(1e-8)), 'add', 1e-8, 0.0, 1e-8, ['fp16']),
    'clamp away from 1': (
        lambda h: (1 - surely(h).clamp(1e-4, 1 - 1e-4)).log(), 'clamp', 0.9999, 1.0, 1.0, ['bf16', 'fp16']
    ),
    'clamp away from -1': (
        lambda h: (h * 30).tanh().clamp(min=-0.9999, max=0.98).atanh(), 'clamp', -0.9999, -1, -1, ['bf16', 'fp16']
    ),
    'a mask that raises an error': (
        lambda h: h.masked_fill(h < 0, -1e9).softmax(-1), 'masked_fill', -1e9, -math.inf, -1e9, ['fp16']
    ),
    'a mask': (lambda h: (h - 1e30 * (h < 0).to(h.dtype)).softmax(-1), 'mul', 1e30, math.inf, 1e30, []),
    'where': (lambda h: torch.where(h < 0, -1e9, h).softmax(-1), 'scalar_tensor', -1e9, -math.inf, -1e9, []),
    'added to large values': (lambda h: h / (h.abs() + 1 + 1e-9), 'add', 1e-9, 0.0, 1e-9, []),
    'clamp that no value reaches': (lambda h: (h / 9).sigmoid().clamp(max=1 - 1e-4), 'clamp', 0.9999, 1.0, 1.0, []),
}  # fmt: skip


@pytest.mark.parametrize('device', RULES)
@pytest.mark.parametrize('name', LOST)
def test_a_constant_that_is_lost(name, device):
    f, operator, constant, fp16, bf16, flags = LOST[name]
    report = report_on(f, device=device)
    (row,) = report.constants.to_dict('records')
    line = inspect.getsourcelines(f)[1]
    assert (row['module'], row['operator'], row['constant']) == ('1', operator, constant)
    file, _, number = row['line'].partition(':')
    assert file == 'test_constants.py' and line <= int(number) <= line + 1
    assert row['fp16'] == fp16 and row['bf16'] == pytest.approx(bf16, rel=0.01) and row['flagged'] == bool(flags)
    assert [m for m, v in report.verdicts.items() if v.flagged] == flags
    said = [note for note in report.notes if 'test_constants.py' in note]
    assert len(said) == bool(flags)
    if flags:
        value = f'{constant:.9g} is {fp16:g} in fp16' + f' and {bf16:g} in bf16' * (len(flags) > 1)
        assert said == [f"'1': {value} (`{operator}`, {row['line']})."] and said[0] in repr(report)


@pytest.mark.parametrize('name', [n for n in LOST if n.startswith('clamp away')])
def test_the_call_keeps_the_constant(name):
    f, operator, constant, limit, _, _ = LOST[name]
    verdict = report_on(f, mode='fp16').verdicts['fp16']
    assert f"rounds to {limit:g} in fp16, so it does not keep values in '1' away from {limit:g}" in verdict.reason
    torch.manual_seed(0)
    learn = learner(inner(f), loaders(64, 64))
    exec(verdict.call, {'learn': learn})
    assert not learn.precision_report('fp16').verdicts['fp16'].flagged


def test_a_constant_of_the_models_own_forward():
    report = report_on(LOST['clamp away from 1'][0], Own)
    assert list(report.constants['module']) == ['(model)'] and report.fp32_modules == ['a']
    assert "the model's own `forward`: 0.9999 is 1 in fp16" in repr(report)


NOTHING = {
    'ordinary rounding': lambda h: h * 0.1 + 0.3,
    '0, 1 and infinity': lambda h: (h + 0.0).clamp(0.0, 1.0).masked_fill(h < 0, -math.inf).softmax(-1),
    'finfo.min': lambda h: h.masked_fill(h < 0, torch.finfo(h.dtype).min).softmax(-1),
    'epsilon of a norm': lambda h: F.layer_norm(h, h.shape[-1:], eps=1e-12),
    'comparisons': lambda h: h * (h > 1e-9),
    'division': lambda h: (h / 1e9) * 1e9,
    'in fp32': lambda h: h.float().clamp(min=1e-12),
}


@pytest.mark.parametrize('device', RULES)
@pytest.mark.parametrize('name', NOTHING)
def test_what_is_no_news(name, device):
    report = report_on(NOTHING[name], mode='bf16' if name == 'division' else 'fp16', device=device)
    assert not len(report.constants) and not report.fp32_modules, report


def test_the_line_is_that_of_the_user_or_of_a_library():
    "A function of PyTorch is called in this file; modules of PyTorch, without code of others, have no line."
    report = report_on(lambda h: F.normalize(h.half() * 1e-5, dim=-1), mode='fp16', device='cuda')
    # Its norm runs in fp32 with CUDA's rules, on a CPU in fp16.
    assert report.constants.empty
    report = report_on(lambda h: F.normalize(h.half() * 1e-5, dim=-1), mode='fp16')
    assert report.constants['line'].str.startswith('test_constants.py:').all() and report.constants['flagged'].all()
    model = nn.Sequential(nn.Linear(6, 8), nn.Hardtanh(), nn.PReLU(), Act(lambda h: h + 1e-9), nn.Linear(8, 1))
    assert len(learner(model).precision_report('fp16').constants) == 1
