"Decisions that differ from fp32: sorting, top-k, comparisons and indices. They flag a module if the loss shows it."

import pytest, torch

from held_out import inner
from helpers import learner, loaders


def close(h):
    "Values around 1,000 that bf16 rounds to multiples of 4."
    return h.sum(-1, keepdim=True) + 1000 + torch.linspace(0, 2, 32)


def flips(values):
    "A function that chooses one of these values at the largest of close numbers."
    return lambda h: h + values[close(h).to(h.dtype).argmax(-1, keepdim=True)].to(h.dtype)


ALIKE, FAR = torch.full((32,), 0.5), torch.linspace(0, 5, 32)
CHOICES = {
    'argmax': lambda h: close(h).to(h.dtype).argmax(-1),
    'top-k': lambda h: close(h).to(h.dtype).topk(4).indices.float().mean(-1).long(),
    'sorting': lambda h: close(h).to(h.dtype).argsort(-1, descending=True)[:, 0],
    'comparison': lambda h: (close(h).to(h.dtype) > close(h).to(h.dtype).mean(-1, keepdim=True)).sum(-1) % 32,
}


@pytest.mark.parametrize('device', (None, 'cuda'))
@pytest.mark.parametrize('name', CHOICES)
def test_they_flag_if_the_loss_differs(name, device):
    for values, flagged in ((ALIKE, []), (FAR, ['1'])):
        torch.manual_seed(0)
        f = lambda h: h + values[CHOICES[name](h)][:, None].to(h.dtype)
        report = learner(inner(f), loaders(64, 64)).precision_report('bf16', device=device)
        verdict = report.verdicts['bf16']
        assert verdict.modules == flagged, verdict
        assert "of the decisions (comparisons, sorting, top-k) in '1' differ" in verdict.reason
        assert ('and with them the loss by' in verdict.reason) == bool(flagged)
        assert ('which the loss does not show' in verdict.reason) == (not flagged)
        assert report.table.set_index('module')['error']['1'] < 0.1


def test_the_gradient_shows_them():
    "With several batches, their mean gradient."
    torch.manual_seed(0)
    target = lambda p, y: (p - y - 1000).square().mean()  # the loss hardly differs
    learn = learner(inner(flips(FAR * 4 - 10)), loaders(64, 8), loss_func=target)
    verdict = learn.precision_report('bf16').verdicts['bf16']
    assert verdict.verdict == 'gradient differs' and verdict.modules == ['1'], verdict
    assert 'which the loss does not show' in verdict.reason
