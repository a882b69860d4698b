"`precision_report` without a learner: its errors, and what it leaves as it was. tests/test_recipes.py has loops."

import torch
from torch import nn
from torch.nn import functional as F

from fastxtend_amp import precision_report
from helpers import dataset, errors_of, linear, loaders, mlp

WRONG = {
    'a learner': lambda: precision_report('a learner'),
    'a number': lambda: precision_report(linear(), 5, F.mse_loss),
    'no batch': lambda: precision_report(linear(), [], F.mse_loss),
    'tuples, but no loss_func': lambda: precision_report(linear(), loaders().train),
    'dicts, and a loss_func': lambda: precision_report(linear(), [{}], F.mse_loss),
    'a tensor': lambda: precision_report(linear(), [torch.randn(4, 6)], F.mse_loss),
    'no target, in the second': lambda: precision_report(linear(), [*loaders().train][:1] + [(1,)], F.mse_loss),
    'a class': lambda: precision_report(linear(), loaders().train, nn.MSELoss),
    'no labels': lambda: precision_report(linear(), [{'input': torch.randn(4, 6)}]),
}


def test_wrong_batches_and_losses(expected):
    assert errors_of(WRONG) == expected('any_loop')


def test_16_bit_weights_and_inputs_are_compared_as_fp32_and_the_order_of_batches_stays():
    loader = torch.utils.data.DataLoader(dataset(), batch_size=4, shuffle=True)
    model, batches = mlp().bfloat16(), ((x.bfloat16(), y.bfloat16()) for x, y in loader)
    state = torch.get_rng_state()
    report = precision_report(model, batches, F.mse_loss, precisions='bf16')
    verdict = report.verdicts['bf16']
    assert sum('call `model.float()`' in note for note in report.notes) == 1
    assert verdict.verdict == 'safe so far' and verdict.prediction_error > 0
    assert torch.equal(state, torch.get_rng_state())


def small_loss(pred, target):
    return F.mse_loss(pred, target) * 1e-3


class ReturnsLoss(nn.Linear):
    def forward(self, input, labels):
        return {'loss': small_loss(super().forward(input), labels)[None]}  # of shape (1,), as with nn.DataParallel


def test_a_model_that_returns_its_loss_has_the_loss_scales_that_it_has_with_a_loss_function():
    model, like, batches = ReturnsLoss(6, 1), linear(), [*loaders().train]
    like.load_state_dict(model.state_dict())
    verdicts = [
        precision_report(model, [dict(zip(('input', 'labels'), b)) for b in batches], precisions='fp16').verdicts,
        precision_report(like, batches, small_loss, precisions='fp16').verdicts,
    ]
    assert verdicts[0]['fp16'].scale_range == verdicts[1]['fp16'].scale_range is not None


class FrozenNorm(nn.Module):
    "Called with a dict, and by itself with a tensor. In training mode its BatchNorm would normalize the batch."

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.lin, self.norm = nn.Linear(6, 1), nn.BatchNorm1d(1)
        self.norm.running_var.fill_(1e-14)
        self.norm.eval().eps = 1e-14

    def forward(self, x, labels=None):
        return {'loss': F.l1_loss(self(x), labels)} if labels is not None else self.norm(self.lin(x))


def test_modules_in_eval_mode_stay_in_it_unless_the_whole_model_is():
    for model, bs, modules in (FrozenNorm(), 1, ['norm']), (FrozenNorm().eval(), 4, []):
        batches = [{'x': x, 'labels': y} for x, y in loaders(bs=bs).train]
        verdict = precision_report(model, batches, precisions='fp16').verdicts['fp16']
        assert verdict.modules == modules and verdict.scale_range, verdict


def test_hooks_of_the_model_get_its_arguments_by_name():
    model, names = ReturnsLoss(6, 1), set()
    model.register_forward_pre_hook(lambda module, args, kwargs: names.add((len(args), *kwargs)), with_kwargs=True)
    precision_report(model, [dict(zip(('input', 'labels'), batch)) for batch in loaders().train], precisions='bf16')
    assert names == {(0, 'input', 'labels')}
