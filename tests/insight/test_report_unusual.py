"The report on models and learners that do unusual things: hooks, transforms, scripts, batches of their own."
import warnings

import pytest, torch
from fastai.learner import Learner
from torch import nn

from insight.test_report import rows
from helpers import At, Attentive, Data, dataset, learner, loaders, params, same


# -- hooks, transforms and scripts of the user's own

def test_hooks_that_change_inputs_run_once_as_in_training():
    "spectral_norm's makes one power iteration a call; running the module in fp32 beside it must not be another."
    torch.manual_seed(0)
    normed = nn.utils.spectral_norm(nn.Linear(6, 6))
    model = nn.Sequential(normed, nn.Linear(6, 1))
    model[1].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    report = learner(model).precision_report()
    assert report.table['own error'].max() < .05 and not report.fp32_modules


def test_an_exception_that_the_model_catches_shifts_no_name():
    class Refuses(nn.Linear):
        def forward(self, x): raise KeyError('no')
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.a, self.b = Refuses(6, 6), nn.Linear(6, 1)
        def forward(self, x):
            try: return self.a(x)
            except KeyError: return self.b(x).exp()
    table = rows(learner(Net()).precision_report('bf16'), 'bf16')
    assert table.loc['b', 'largest'] < 5 and 'a' not in table.index


def test_gradients_that_the_model_takes_itself_are_not_those_of_the_loss():
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.energy = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
        def forward(self, x):
            x = x.detach().requires_grad_()
            energy = self.energy(x).float() * 1e4
            return torch.autograd.grad(energy.sum(), x, create_graph=True)[0][:, :1] / 1e6
    verdict = learner(Force()).precision_report('fp16').verdicts['fp16']
    assert verdict.verdict.startswith('safe') and verdict.scales[1] >= 2 ** 12, verdict


def test_modules_inside_vmap_and_torchscript_count_to_the_module_around_them():
    class Mapped(nn.Module):
        def __init__(self): super().__init__(); self.inner = nn.Linear(6, 1)
        def forward(self, x): return torch.func.vmap(self.inner)(x)
    report = learner(Mapped()).precision_report()
    assert list(rows(report, 'bf16').index) == ['(model)', 'loss function'] and not report.fp32_modules
    assert not report.not_called
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        scripted = torch.jit.script(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    learn = learner(nn.Sequential(scripted, nn.Linear(6, 1)))
    report, after = learn.precision_report('bf16'), learn.model[0][1].running_mean
    assert list(rows(report, 'bf16').index) == ['1', '(model)', 'loss function'] and not report.not_called
    assert torch.equal(after, torch.zeros(6))


def test_complex_weights_and_spectra():
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weight, self.out = nn.Parameter(torch.randn(4, dtype=torch.cfloat)), nn.Linear(6, 1)
        def forward(self, x): return self.out(torch.fft.irfft(torch.fft.rfft(x) * self.weight, n=6))
    learn = learner(Spectral())
    with warnings.catch_warnings():
        warnings.simplefilter('error')                           # such as of a discarded imaginary part
        row = rows(learn.precision_report('bf16'), 'bf16').loc['(model)']
    (x, y), = [next(iter(learn.dls.train))]
    learn.loss_func(learn.model(x), y).backward()
    assert row['grad'] >= float(learn.model.weight.grad.abs().max()) * .999


def test_a_learner_that_splits_its_batches_itself():
    class Named(Data):
        def __getitem__(self, i): return dict(zip('xy', super().__getitem__(i)))
        def new_empty(self): return Named(*(t[:0] for t in self.tensors))
    class Mine(Learner):
        def _split(self, b): self.xb, self.yb = (b['x'],), (b['y'],)
    data = Named(*dataset().tensors)
    expected, found = learner(), learner(dls=loaders(24, 4, data, data), cls=Mine)
    before = vars(found).keys()
    assert found.precision_report('bf16').table.equals(expected.precision_report('bf16').table)
    assert vars(found).keys() == before


def test_lazy_modules_are_to_be_built_first():
    learn = learner(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 1)))
    with pytest.raises(ValueError, match="'0.weight'.*not built yet(?s:.*)learn.model.*one_batch"):
        learn.precision_report()
    learn.model(*learn.dls.one_batch()[:1])
    assert learn.precision_report('bf16').verdicts['bf16'].verdict == 'safe'


def test_predictions_far_from_fp32_are_explained():
    "Batch normalization over two values gives 1 and -1: which of them is a matter of the smallest difference."
    torch.manual_seed(0)
    x = torch.randn(1, 6).expand(2, 6) + 1e-4 * torch.randn(2, 6)
    data = Data(x.clone(), torch.zeros(2, 1))
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, eps=1e-12), nn.Linear(8, 1, bias=False))
    verdict = learner(model, loaders(2, 2, data, data)).precision_report('bf16').verdicts['bf16']
    assert verdict.verdict == 'safe' and 'no module by itself loses more than' in verdict.reason, verdict
    assert 'batch normalization' in verdict.reason
    plain = learner().precision_report('bf16').verdicts['bf16']
    assert 'by itself' not in plain.reason


@pytest.mark.parametrize('event', ['before_batch', 'after_pred'])
def test_inside_a_batch_under_autocast_of_another_dtype(event):
    "autocast's weight cache holds casts to bf16 there."
    found = []
    learn = learner(Attentive()).to_bf16()
    learn.add_cb(At(event, lambda l: found.append(l.precision_report('fp16')) if not found else None, 30))
    learn.fit(1)
    assert found[0].verdicts['fp16'].verdict == 'keep modules in fp32' and found[0].fp32_modules == ['attn']
    plain = learner(Attentive()).to_bf16()
    plain.fit(1)
    assert same(params(learn), params(plain))
