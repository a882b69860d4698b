"`on_overflow='fix'` in evaluation: what is not finite in 16 bits runs again in fp32."

import math, pytest, torch
from helpers import learner, params, told
from torch import nn


class Large(nn.Module):
    "Has values above 65,504 in evaluation, and from call `n` on in training as well."

    def __init__(self, n=math.inf, factor=1e6):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.n, self.calls, self.factor = nn.Linear(6, 8), nn.Linear(8, 1), n, 0, factor

    def forward(self, x):
        self.calls += self.training
        factor = self.factor if not self.training or self.calls >= self.n else 1.0
        return self.head(self.body(x) * factor / factor)


def mean_abs(pred, y):
    return (pred - y).abs().mean()


def large(on_overflow='fix', **kwargs):
    learn = learner(Large(**kwargs), metrics=mean_abs)
    return learn.to_fp16(init_scale=256.0, on_overflow=on_overflow, fp32_modules='head')


EVALUATIONS = {
    'validate': lambda l: l.validate(),
    'get_preds': lambda l: l.get_preds()[0],
    'get_preds without targets': lambda l: l.get_preds(dl=[b[:1] for b in l.dls.valid], with_loss=False)[0],
    'of the training set': lambda l: l.validate(0),
}


@pytest.mark.parametrize('name', EVALUATIONS)
def test_results_are_those_of_fp32_with_one_warning(name):
    learn, evaluate, found = large(), EVALUATIONS[name], []
    warned = told(lambda: found.append(evaluate(learn)))
    with learn.precision_as('fp32'):
        expected = evaluate(learn)
    assert torch.equal(torch.as_tensor(found[0]), torch.as_tensor(expected))
    assert len(warned) == 1 and 'again in fp32' in warned[0]
    assert name.endswith('targets') or "fp32_modules=['head', 'body']" in warned[0]


def in_16_bits(learn):
    learn.model.head.bfloat16().requires_grad_(False)
    return learn.to_fp16(on_overflow='fix')


STAY = {
    'without fix': lambda: large('warn'),
    'not finite in fp32 either': lambda: large(factor=1e39),
    'does not run in fp32': lambda: in_16_bits(large()),
}


@pytest.mark.parametrize('make', STAY.values(), ids=STAY)
def test_what_stays_as_it_is_with_one_warning(make):
    learn, found = make(), []
    (warning,) = told(lambda: found.append(learn.validate()))
    assert 'in validation is NaN or inf' in warning and not all(map(math.isfinite, found[0]))


@pytest.mark.parametrize('on_overflow', ['warn', 'fix'])
def test_training_that_fails_after_such_a_validation_is_still_noticed(on_overflow):
    learn = large(on_overflow, n=9)  # in the second epoch
    warned = told(lambda: learn.fit(3, 0.01))
    if on_overflow == 'fix':
        assert [fix.step for fix in learn.precision.fixes] == [9] and all(p.isfinite().all() for p in params(learn))
        assert learn.precision.n_skipped <= 1
    else:
        assert [' in validation is NaN' in w for w in warned if 'NaN' in w or 'failed' in w] == [True, False]
