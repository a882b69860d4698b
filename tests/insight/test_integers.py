"Whole numbers that fall together in 16 bits."

import pytest, torch

from fastxtend_amp.insight.operators import merged
from held_out import Own, inner
from helpers import learner, loaders

STEPS = torch.arange(32) * 2 + 960


def steps(cast):
    "A function that adds the cosines of timesteps."
    return lambda h: h + (cast(STEPS, h) * 0.01).cos()


CASTS = {
    'to the dtype': lambda t, h: t.to(h.dtype),
    'by a product': lambda t, h: t * torch.ones_like(h),
    'copied': lambda t, h: torch.empty_like(h).copy_(t.expand_as(h)),
    'by autocast': lambda t, h: (t.float()[:, None] @ torch.ones(1, 1)).T.to(h.dtype),
}


@pytest.mark.parametrize('device', (None, 'cuda'))
@pytest.mark.parametrize('name', CASTS)
def test_timesteps_in_bf16(name, device):
    torch.manual_seed(0)
    report = learner(inner(steps(CASTS[name])), loaders(64, 64)).precision_report(device=device)
    bf16, fp16 = report.verdicts.values()
    assert bf16.modules == ['1'] == bf16.flagged and fp16.verdict == 'safe so far', report
    assert bf16.reason.startswith("960 and 962 become the same number in '1' in bf16")


def test_the_models_own_forward():
    torch.manual_seed(0)
    verdict = learner(Own(steps(CASTS['to the dtype'])), loaders(64, 64)).precision_report('bf16').verdicts['bf16']
    assert verdict.flagged == ['(model)'] and verdict.modules == ['a'], verdict


UNHARMED = {
    'small numbers': lambda h: h + torch.arange(32).to(h.dtype),
    'they fall together in fp32 as well': lambda h: h + (STEPS.bfloat16().to(h.dtype) * 0.01).cos(),
    'cast after the division': lambda h: h + (STEPS * 0.01).cos().to(h.dtype),
    'indices': lambda h: h.repeat(1, 32)[:, STEPS].gather(1, STEPS.sub(960).div(2).long().expand_as(h)),
    'a mask': lambda h: h + torch.where(STEPS > 990, -1e9, 0.0).to(h.dtype).softmax(-1),
    'equal numbers': lambda h: h + (STEPS * 0 + 1001).to(h.dtype).mul(0.001),
}


@pytest.mark.parametrize('device', (None, 'cuda'))
@pytest.mark.parametrize('name', UNHARMED)
def test_no_alarm(name, device):
    torch.manual_seed(0)
    report = learner(inner(UNHARMED[name]), loaders(64, 64)).precision_report('bf16', device=device)
    assert not report.fp32_modules, report


@pytest.mark.parametrize(
    't, pair',
    [
        (torch.tensor([1000, 998, 3]), (998, 1000)),
        (torch.tensor([1000.0, 998.0]), (998, 1000)),
        (torch.tensor([1000.5, 998.0]), None),  # not whole
        (torch.tensor([1e9, 1e9 + 64]), None),  # from 2**24 on all numbers of fp32 are whole
        (torch.tensor([True, False]), None),
        (torch.tensor([998, 1000]).bfloat16(), None),
        (torch.arange(2000).view(4, 5, 100), None),  # a picture
        (torch.tensor([]), None),
    ],
)
def test_which_numbers_fall_together(t, pair):
    assert merged(t, torch.bfloat16) == pair and merged(t, torch.float32) is None
