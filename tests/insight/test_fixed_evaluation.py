"`on_overflow='fix'` in evaluation: what is not finite in 16 bits runs re-run in fp32."

import math

import numpy as np, pytest, torch
from fastai.data.block import CategoryBlock, DataBlock
from fastai.data.transforms import IndexSplitter
from fastai.torch_core import set_seed
from fastai.vision.augment import aug_transforms
from fastai.vision.core import PILImageBW
from fastai.vision.data import ImageBlock
from helpers import At, learner, params, told
from states import EVALUATIONS, Act
from torch import nn

from fastxtend_amp.insight import diagnosis, watch


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


@pytest.mark.parametrize('name', EVALUATIONS)
def test_results_are_those_of_fp32_with_one_warning(name):
    learn, evaluate, found = large(), EVALUATIONS[name], []
    warned = told(lambda: found.append(evaluate(learn)))
    with learn.precision_as('fp32'):
        expected = evaluate(learn)
    assert torch.equal(torch.as_tensor(found[0]), torch.as_tensor(expected))
    assert len(warned) == 1 and 're-run in fp32' in warned[0] and "fp32_modules=['head', 'body']" in warned[0]


class Beyond(nn.Module):
    "Has values above the largest number of a dtype, on inputs of this dtype only."

    def __init__(self, dtype, factor):
        super().__init__()
        self.dtype, self.factor = dtype, factor

    def forward(self, x):
        return x * self.factor / self.factor if x.dtype == self.dtype else x


BEYOND = {'fp16': (torch.float16, 1e9), 'bf16': (torch.bfloat16, 1e39)}
OF_IMAGES = {  # with the number of batches
    'get_preds': (2, lambda l, image: l.get_preds()[0]),
    'predict': (1, lambda l, image: l.predict(image)[2]),
    'tta': (6, lambda l, image: l.tta(n=2)[0]),
}


@pytest.mark.parametrize('mode', BEYOND)
@pytest.mark.parametrize('name', OF_IMAGES)
def test_predictions_of_images(name, mode):
    torch.manual_seed(0)
    images, (n, evaluate) = np.random.default_rng(0).integers(0, 256, (6, 8, 8), dtype=np.uint8), OF_IMAGES[name]
    block = DataBlock(
        (ImageBlock(PILImageBW), CategoryBlock),
        get_x=lambda i: images[i],
        get_y=lambda i: str(i % 2),
        splitter=IndexSplitter([3, 4, 5]),
        batch_tfms=aug_transforms(size=8),
    )
    dls = block.dataloaders(range(6), bs=2, num_workers=0, device=torch.device('cpu'))
    model = nn.Sequential(nn.Conv2d(1, 4, 3), Beyond(*BEYOND[mode]), nn.Flatten(), nn.Linear(144, 2))
    learn, found = getattr(learner(model, dls, nn.CrossEntropyLoss()), f'to_{mode}')(on_overflow='fix'), []

    def run():
        set_seed(1)
        found.append(evaluate(learn, PILImageBW.create(images[0])))

    (warning,) = told(run)
    assert warning.startswith(f'{mode}: {n} batch') and "fp32_modules=['1']" in warning and 'scale' not in warning
    with learn.precision_as('fp32'):
        assert told(run) == []
    assert torch.equal(*found)


def test_several_processes_rerun_nothing_wherever_the_learner_was_made(monkeypatch):
    "In `distrib_ctx` the processes are known only after `to_fp16`; a model may wait for those whose batch is finite."
    learn = large()
    for module in diagnosis, watch:
        monkeypatch.setattr(module, 'several_processes', lambda: True)
    (warning,) = told(lambda: learn.validate())
    assert 're-run in fp32' not in warning


def test_masked_logits_are_no_failure():
    calls = []
    masks = Act(lambda h: calls.append(h) or torch.full_like(h, -math.inf))
    learn = learner(nn.Sequential(nn.Linear(6, 1), masks), loss_func=lambda p, y: y.mean()).to_bf16(on_overflow='fix')
    assert learn.get_preds()[0].isneginf().all() and len(calls) == len(learn.dls.valid)


class Recurrent(Large):
    "Starts each batch from what the one before has left."

    last = 0.0

    def forward(self, x):
        out = super().forward(x) + self.last
        self.last = out.detach().nan_to_num().clamp(-1, 1)
        return out


class Counts(Large):
    "Counts its batches in a buffer, which changes no result."

    def __init__(self):
        super().__init__()
        self.register_buffer('n_calls', torch.zeros(()))

    def forward(self, x):
        self.n_calls += 1
        return super().forward(x)


@pytest.mark.parametrize(
    'make, word', [(Recurrent, 'unless the model keeps state'), (Counts, 're-run in fp32; the fp32 results are used')]
)
def test_a_model_that_keeps_state_runs_each_batch_once(make, word):
    model, calls = make(), []
    note = At('after_pred', lambda l: calls.append(l.pred.shape))
    (warning,) = told(lambda: learner(model, cbs=note).to_fp16(on_overflow='fix').validate(), 'fp16')
    assert word in warning and len(calls) == 2 and getattr(model, 'n_calls', 2) == 2


class LossFails(nn.MSELoss):
    "Does not run in fp32, as `Large` gives predictions without NaN there."

    def forward(self, p, y):
        assert not p.isfinite().all(), 'fp32'
        return y.mean()


STAY = {
    'without fix': lambda: large('warn'),
    'not finite in fp32 either': lambda: large(factor=1e39),
    'its loss fails in fp32': lambda: learner(Large(), loss_func=LossFails()).to_fp16(on_overflow='fix'),
}


@pytest.mark.parametrize('make', STAY.values(), ids=STAY)
def test_what_stays_as_it_is_with_one_warning(make):
    (warning,) = told(make().get_preds)
    assert 'in validation is NaN or inf' in warning and 're-run' not in warning


@pytest.mark.parametrize('on_overflow', ['warn', 'fix'])
def test_training_that_fails_after_such_a_validation_is_still_noticed(on_overflow):
    learn = large(on_overflow, n=15)  # in the third epoch
    warned = told(lambda: learn.fit(4, 0.01))
    if on_overflow == 'fix':
        assert [fix.step for fix in learn.mixed_precision.fixes] == [15] and all(
            p.isfinite().all() for p in params(learn)
        )
        assert sum(learn.mixed_precision.skips) <= 1
    else:
        assert [' in validation is NaN' in w for w in warned if 'NaN' in w or 'failed' in w] == [True, False]
