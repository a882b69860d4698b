"The mean gradient in low precision compared with the noise between batches: the figure, and the verdict."

import re

import pytest, torch
from fastai.callback.core import CancelBatchException
from torch import nn
from torch.nn import functional as F

from fastxtend_amp.insight.choices import Choice
from fastxtend_amp.insight.gradient import gradient_distance
from fastxtend_amp.precisions import find_precision
from helpers import Data, dataset, learner, loaders, mlp
from models import Act, InStep, Scales, far_from_0


def by_hand(model, dls, dtype, n=6):
    "The ratio, from all gradients at once and in fp64."
    grads = []
    for xb, yb in list(dls.train)[:n]:
        for low in False, True:
            model.zero_grad()
            with torch.autocast('cpu', dtype, enabled=low):
                pred = model(xb)
            F.mse_loss(pred.float(), yb).backward()
            grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
    g, d = torch.stack(grads[::2]), torch.stack(grads[1::2]) - torch.stack(grads[::2])
    return float(d.mean(0).norm() / (g.var(0).sum() / n).sqrt())


def distance(learn, name='bf16', keep=(), scale=1.0, n=6):
    precision = Choice.for_learner(learn, find_precision(name), keep, scale).precision
    return gradient_distance(learn, [*learn.dls.train][:n], precision).ratio


@pytest.mark.parametrize('make', [mlp, far_from_0, lambda: nn.Sequential(mlp(), nn.Dropout(0.0))])
@pytest.mark.parametrize('precision, dtype, scale', [('bf16', torch.bfloat16, 1.0), ('fp16', torch.float16, 256.0)])
def test_the_figure_is_that_of_all_gradients_at_once(make, precision, dtype, scale):
    learn = learner(make())
    expected = by_hand(make(), learn.dls, dtype)
    assert distance(learn, precision, scale=scale) == pytest.approx(expected, rel=0.05, abs=0.005)


def test_random_draws_are_the_same_in_both_precisions():
    "Dropout, with a mask of its own for each batch; in fp32 and the same model on the other side nothing differs."
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 1))
    assert distance(learner(model)) < 0.05
    assert distance(learner(model), keep=['(model)']) == 0


@pytest.mark.parametrize('in_validation', [True, False])
def test_noise_that_16_bits_draw_differently_is_no_rounding(in_validation):
    "As `randn_like` on a CPU, where the number of values is no multiple of 16."
    noise = Act(lambda h: h + 0.3 * torch.randn_like(h) if h.requires_grad or in_validation else h)
    report = learner(nn.Sequential(nn.Linear(6, 11), noise, nn.Dropout(0.5), nn.Linear(11, 1))).precision_report('bf16')
    assert report.verdicts['bf16'].verdict == 'safe so far' and ('Predictions differ' in str(report)) != in_validation
    assert any('draws other random numbers' in note for note in report.notes)


@pytest.mark.parametrize('first', [0, 1])
def test_batches_that_a_callback_cancels_do_not_count(first):
    def cancel(learn):
        if learn.training and learn.iter % 2 == first:
            raise CancelBatchException

    learn = learner(cbs=InStep('before_batch', cancel))
    found = gradient_distance(learn, [*learn.dls.train], Choice.for_learner(learn, find_precision('bf16')).precision)
    assert found.n == 3 and found.ratio < 1


@pytest.mark.parametrize('make, name', [(far_from_0, '0'), (lambda: nn.Sequential(Scales(far_from_0())), '0.net.0')])
def test_what_adds_up_behind_modules_that_are_all_right_is_seen_and_the_module_that_helps_is_tried(make, name):
    report = learner(make()).precision_report('bf16')
    verdict = report.verdicts['bf16']
    assert verdict.verdict == 'gradient differs' and verdict.modules == verdict.flagged == [name] == report.fp32_modules
    assert verdict.call == f"learn.to_bf16(fp32_modules=['{name}'])"
    words = rf"mean gradient by .* standard errors \(0.5 or more may matter\); with '{name}' in fp32, it is below 0.25"
    assert re.search(words, verdict.reason) and report.table['error'].max() < 0.01  # no module shows it
    learn = learner(make())
    exec(verdict.call, {'learn': learn})
    kept = learn.precision_report('bf16').verdicts['bf16']
    assert kept.verdict == 'safe so far' and kept.call == verdict.call


class Far(nn.Module):
    def __init__(self, *lost, n=2):
        super().__init__()
        self.far, self.lost = nn.ModuleList(far_from_0()[0] for _ in range(n)), nn.ModuleList(lost)

    def forward(self, x):
        h = sum((layer(x) - 1000).tanh() for layer in self.far).mean(1, keepdim=True)
        return h + sum(m(self.far[0](x) - 1004).mean() for m in self.lost)


class InOwnForward(Far):
    def forward(self, x):
        return (self.far[0](x) @ torch.eye(32) - 1000).tanh().mean(1, keepdim=True)


@pytest.mark.parametrize(
    'make, kept, words',
    [
        (Far, [], 'only with all modules in fp32 is it'),
        (lambda: Far(Act(lambda h: h.tanh().clamp(-0.9999, 0.98).atanh())), ['lost.0'], 'only with all modules'),
        (InOwnForward, [], 'no module that was tried in fp32 brings it'),
    ],
)
def test_what_no_modules_or_only_all_would_change_has_to_be_trained_to_know(make, kept, words):
    "Those that are kept for another reason are in the call."
    verdict = learner(make()).precision_report('bf16').verdicts['bf16']
    assert verdict.verdict == 'gradient differs' and words in verdict.reason
    call = f'learn.to_bf16(fp32_modules={kept})' if kept else "learn.compare_precision('bf16')"
    assert verdict.call == call and verdict.modules == kept


@pytest.mark.parametrize('n, spread, differs', [(6, 1.0, False), (6, 0.3, True), (4, 1.0, True)])
def test_a_shift_that_is_spread_over_many_modules_is_a_verdict_only_if_it_is_large(n, spread, differs):
    "Of 12 modules n are the cause; the more alike batches are, the more standard errors it is: 2, 6."
    x, y = (t.repeat(6, 1) for t in dataset(4).tensors)
    data = Data(x + dataset(seed=1).tensors[0] * spread, y)
    model = nn.Sequential(Far(n=n), *[nn.Identity()] * (12 - n))
    verdict = learner(model, loaders(train=data)).precision_report('bf16').verdicts['bf16']
    assert (verdict.verdict == 'gradient differs') == differs
    assert len(verdict.modules) == (n if n == 4 else 0)
    assert ('no small group of modules was found' in verdict.reason) == (n > 4)


@pytest.mark.parametrize(
    'n, batch, note',  # one batch; a batch of one sample, for which BatchNorm raises an error
    [(64, 64, 'fewer than two different gradients were found'), (9, 4, 'more than 1 value per channel')],
)
def test_a_gradient_that_is_unknown_leaves_the_verdict_and_says_why(n, batch, note):
    report = learner(dls=loaders(n, batch)).precision_report('bf16', dl=torch.utils.data.DataLoader(dataset(n), batch))
    assert report.verdicts['bf16'].verdict == 'safe so far' and any(note in n for n in report.notes)
    assert 'gradient' not in report.verdicts['bf16'].reason
