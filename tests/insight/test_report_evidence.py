"What a report takes for evidence, and when it says that it does not know."

import itertools, math, re
from collections import OrderedDict

import pytest, torch
from fastai.callback.core import Callback, CancelBatchException, CancelFitException
from fastai.learner import Learner
from torch import nn
from torch.nn import functional as F

from fastxtend_amp.insight import report as room
from helpers import Data, learner, loaders, mlp, set_support
from models import SAFE, Act, Directional, InStep, Mapped, layers, report_on, trained


def far_from_0():
    torch.manual_seed(0)
    return learner(nn.Sequential(nn.Linear(6, 8), Act(lambda h: h.tanh() + 30), nn.Linear(8, 1)))


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


class Late(nn.Linear):
    "Fails in 16 bits, but not on the first batch."

    def forward(self, x):
        out = super().forward(x)
        assert x.max() < 3 or out.dtype == torch.float32, 'a value that has to be exact'
        return out


CALLS = itertools.count(1)


def grows(h):
    return h * next(CALLS)


in_half = lambda factor: learner(nn.Sequential(Half(factor), nn.Linear(32, 1)))
whole_batch = lambda: learner(mlp(), loaders(48, 24), Pairs())
unseen = 'Inside a transform .* cannot be read. Not compared with fp32: .*'
EVIDENCE = {  # a learner, and what the report on bf16 says
    'NaN where fp32 is finite': (
        faces,
        r"keep modules in fp32.*modules=\['arc'\].* in \d of 6 batches only fp32 gave finite gradients at first",
    ),
    'a batch that is lost in fp32 as well, when it runs again': (
        lambda: learner(nn.Sequential(Third(6, 1))),
        'bf16: not known.*not finite in fp32 either.* in 1 of 5 batches only fp32 gave finite gradients at first',
    ),
    'an error in a later batch': (
        lambda: learner(nn.Sequential(Late(6, 1))),
        r"keep modules in fp32.*modules=\['0'\].*'0' does not run in bf16: a value that has to be exact.* at first",
    ),
    'an autocast of its own': (
        lambda: in_half(1),
        r"The reference is not fp32: '0' \(test_\w+.py:\d+\) computes in 16 bits, by an autocast",
    ),
    'and few products in fp32': (
        lambda: learner(nn.Sequential(Half(1), nn.Linear(32, 6), Half(1), nn.AdaptiveAvgPool1d(1))),
        r"bf16: not known\.\s+'0' \(test_\w+.py:\d+\), '2' .* compute in 16 bits.* no fp32 run to compare with",
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
        lambda: learner(layers(Act(grows))),
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


# -- in validation


class Trains(nn.Linear):
    "Cannot validate, not even in fp32."

    def forward(self, x):
        return super().forward(x) if self.training else [x]


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
