"`on_overflow='fix'`: what is applied, that training continues, and that it ends where fp32 does."

import math

import numpy as np, pytest, torch
from fastai.callback.progress import CSVLogger
from fastai.callback.training import GradientAccumulation
from torch import nn
from torch.nn import functional as F

from cases import CASES
from fastxtend_amp.devices import facts
from fastxtend_amp.insight import diagnosis, watch
from fastxtend_amp.training.current import precision_callback
from helpers import (
    DEVICE,
    OPTIMIZERS,
    At,
    Attentive,
    Data,
    dataset,
    finite,
    learner,
    left_on,
    loaders,
    opt_state,
    params,
    same,
)
from helpers import told
from models import Act

SEEDS = range(3)
LATE = 1 if DEVICE.type == 'cpu' else 2  # batches after which the loss of a batch is known


@pytest.fixture(autouse=True)
def both_are_native(monkeypatch):
    "Pose as a newer CPU, so that the next precision after fp16 is the same on each machine."
    monkeypatch.setattr(facts, 'cpu_features', lambda: frozenset({'bf16', 'fphp'}))


class Growing(nn.Module):
    "A residual stream whose branch outgrows the range of fp16 in the middle of a fit."

    def __init__(self, seed):
        torch.manual_seed(seed)
        super().__init__()
        self.inp, self.g, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)
        self.register_buffer('step', torch.zeros(()))

    def forward(self, x):
        h = self.inp(x).relu()
        if self.training:
            self.step += 1
        gain = 100 * 1.3 ** self.step.clamp(max=50)
        return self.out(h + self.g(h * gain) / gain)


class Narrow(nn.Module):
    "The logarithm of a difference that 16 bits round to 0; `module` says whether a module of its own computes it."

    def __init__(self, seed, module=False):
        torch.manual_seed(seed)
        super().__init__()
        self.near = nn.Linear(1, 1)
        self.module, self.norm, self.out = module, nn.BatchNorm1d(6), nn.Linear(7, 1)
        nn.init.ones_(self.near.weight).requires_grad_(False)
        nn.init.ones_(self.near.bias).requires_grad_(False)

    def forward(self, x):
        gap = x[:, :1].abs()
        near = self.near(gap) if self.module else F.linear(gap, self.near.weight, self.near.bias)
        return self.out(torch.cat([(near - 1).log(), self.norm(x)], 1))


def narrow_from(batch, n=96):
    "Data whose first column is too small for 16 bits from this batch of 4 on."
    data = dataset(n)
    data.tensors[0][:, 0] = data.tensors[0][:, 0].abs() + 0.5
    data.tensors[0][4 * batch :, 0] = 2.0**-12
    return loaders(bs=4, train=data, valid=data)


def far():
    "Data whose targets are in the hundreds."
    x, y = dataset(96).tensors
    return loaders(bs=4, train=Data(x, 400 + y), valid=Data(x, 400 + y))


def steep(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))


# name: model by seed, data, precision, epochs, learning rate
RUNS = {
    'grows': (Growing, lambda: loaders(96), {}, 4, 0.02),
    'loss scale too high': (steep, far, {'loss_scale': 2.0**16}, 10, 0.1),
    'fp32 only': (Narrow, lambda: narrow_from(0), {}, 4, 0.02),
}


def trained(make, dls, kwargs, n_epoch, lr, seed, on_overflow):
    learn = learner(make(seed), dls(), lr=lr, wd=0.0)
    if on_overflow:
        learn.to_fp16(on_overflow=on_overflow, **kwargs)
    told(lambda: learn.fit(n_epoch))
    return learn


@pytest.mark.parametrize('what', RUNS)
def test_training_ends_where_fp32_does(what):
    "Within the spread of fp32 over its seeds, in runs where 'warn' skips most steps."
    fp32 = [trained(*RUNS[what], seed, None).validate()[0] for seed in SEEDS]
    for seed in SEEDS:
        warned, fixed = (trained(*RUNS[what], seed, how) for how in ('warn', 'fix'))
        n = len(warned.mixed_precision.skips)
        assert sum(warned.mixed_precision.skips) > n / 2
        assert fixed.validate()[0] < 2 * max(fp32) - min(fp32)
        # The loss scale is lowered after 16 skipped steps; before that, the first one searches for a scale that fits.
        assert 1 <= len(fixed.mixed_precision.fixes) <= 3 and sum(fixed.mixed_precision.skips) <= 17
        assert fixed.mixed_precision.fit is None and not left_on(fixed.to_fp32())


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
@pytest.mark.parametrize(
    'precision, kwargs, lost',
    [('fp16', {}, 2), ('fp16', {'loss_scale': 512.0}, 1), ('bf16', {'skip_nonfinite': True}, 1)],
)
def test_a_gradient_that_is_infinite_at_any_loss_scale(precision, kwargs, lost, opt):
    "Of half of the batches, whose steps would be skipped for good."

    def fits(on_overflow):
        learn = CASES['ArcFace'].learner(8)
        learn.opt_func = OPTIMIZERS[opt]
        getattr(learn, f'to_{precision}')(on_overflow=on_overflow, **kwargs)
        with learn.no_logging():
            learn.fit(2, 1e-3)
        return learn.mixed_precision

    cb = fits('fix')
    assert cb.fp32_module_names == ['arc'] and sum(cb.skips) == lost
    with pytest.raises(FloatingPointError, match='a gradient is not finite'):
        fits('raise')


class Center(nn.Module):
    "Subtracts a mean over batches, which an overflow makes infinite."

    def __init__(self):
        super().__init__()
        self.register_buffer('mean', torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.detach().float().mean(0), 0.1)
        return x - self.mean


def test_a_buffer_that_the_failed_batch_has_spoiled_is_not_the_cause():
    torch.manual_seed(0)
    loud = Act(lambda h: h * 2.0**17)
    learn = learner(nn.Sequential(nn.Linear(6, 8), loud, Center(), nn.LayerNorm(8), nn.Linear(8, 1)))
    learn.to_fp16(on_overflow='fix').fit(1)
    (fix,) = learn.mixed_precision.fixes
    assert "fp32_modules=['1'" in fix.call and sum(learn.mixed_precision.skips) == 1


def test_what_was_done_is_printed_and_kept_and_the_call_starts_with_it(capsys):
    learn = trained(*RUNS['grows'], 0, 'fix')
    (fix,) = learn.mixed_precision.fixes
    what, cause, call = capsys.readouterr().out.splitlines()
    assert 'the loss is nan' in what and call == f'The next batches train with `{fix.call}`.'
    assert (
        "keeping 'g', 'inp' in fp32" in cause
        and f'batch {fix.step}, ' in what
        and fix.precision == 'fp16'
        and "on_overflow='fix'" in fix.call
    )
    again = learner(Growing(0), loaders(96))
    eval(fix.call, {'learn': again})
    again.fit(4, 0.02)
    assert not again.mixed_precision.fixes and sum(again.mixed_precision.skips) < sum(learn.mixed_precision.skips)
    assert learn.mixed_precision.fp32_module_names == again.mixed_precision.fp32_module_names != []


def test_history_optimizer_scale_and_the_loss_of_the_epoch_continue(tmp_path):
    logger = CSVLogger(tmp_path / 'history.csv')  # holds an open file, which cannot be copied
    learn, seen = learner(Growing(0), loaders(96), cbs=logger), []
    learn.to_fp16(on_overflow='fix', init_scale=64.0, growth_interval=7)
    cb = learn.mixed_precision
    note = lambda l: l.training and seen.append((id(l.opt), cb.scale, len(cb.skips)))
    learn.add_cb(At('after_batch', note, 70)).fit(2, 0.02)
    (fix,), (opts, scales, lengths) = cb.fixes, zip(*seen)
    assert learn.mixed_precision is cb and lengths == (*range(1, 49),) and cb.skips.index(True) == fix.step - 1
    assert len({*opts}) == 1 and next(iter(learn.opt.state.values()))['step'] == 48 - sum(cb.skips)
    assert scales[fix.step] == scales[fix.step - 1] / LATE
    assert cb.state_dict()['growth_interval'] == 7 and cb.precision.arguments['growth_interval'] == 7
    assert np.isfinite(learn.recorder.values).all() and np.isnan(learn.recorder.losses).sum() == LATE


@pytest.mark.parametrize('precision', ['bf16', 'fp16'])
@pytest.mark.parametrize('opt', ['adam', 'fused adamw', 'torch sgd'])
@pytest.mark.parametrize('n_acc', [4, 8])
def test_the_batch_that_failed_is_not_trained_on_and_the_next_one_is(precision, opt, n_acc):
    learn, seen = learner(Narrow(0, module=True), narrow_from(4), opt_func=OPTIMIZERS[opt]), []
    getattr(learn, f'to_{precision}')(on_overflow='fix')
    learn.add_cbs([GradientAccumulation(n_acc)] if n_acc > 4 else [])
    note = lambda l: l.training and seen.append((params(l), opt_state(l.opt), l.model.norm.running_mean.clone()))
    learn.add_cb(At('after_batch', note, 70))
    learn.fit(1, 0.01)
    (fix,) = learn.mixed_precision.fixes
    assert fix.step == 5 and "fp32_modules=['near']" in fix.call and fix.precision == precision
    assert same(seen[4][0], seen[3][0]) and same(seen[4][1], seen[3][1])
    assert not same(seen[-1][0], seen[4][0]) and finite(learn) and all(mean.isfinite().all() for *_, mean in seen)
    assert not learn.mixed_precision.skips[5 * 4 // n_acc + 1 :].count(True)


def test_the_next_precisions_that_the_device_has_and_fp32_at_last(capsys):
    learn = learner(Narrow(0), narrow_from(4)).to_fp16(on_overflow='fix')
    learn.fit(1, 0.01)
    assert learn.mixed_precision.fixes == [
        (5, 'fp16', "learn.to_bf16(on_overflow='fix')"),
        (5 + LATE, 'bf16', 'learn.to_fp32()'),
    ]
    assert capsys.readouterr().out.count('The next') == 2 and learn.mixed_precision.amp_mode is None and finite(learn)
    assert not told(lambda: learn.fit(1, 0.01), 'fp32') and len(learn.mixed_precision.fixes) == 2


class Layers(nn.Module):
    "One layer after the other outgrows fp16."

    def __init__(self, n=4):
        torch.manual_seed(0)
        super().__init__()
        self.layers, self.out, self.step = nn.ModuleList(nn.Linear(6, 6) for _ in range(n)), nn.Linear(6, 1), 0

    def forward(self, x):
        self.step += self.training
        for i, layer in enumerate(self.layers):
            gain = 1e6 if self.step > 3 * (i + 1) else 1.0
            x = x + layer(x * gain).float() / gain
        return self.out(x)


def test_each_layer_that_fails_in_a_fit_is_kept_in_fp32():
    "Also after a validation inside of it, from which fastai counts batches again."
    learn = learner(Layers(), loaders(72)).to_fp16(on_overflow='fix', init_scale=16.0)
    on = lambda l: (l.validate(), l.model.train(), setattr(l, 'training', True))
    validation = At('after_batch', lambda l: l.train_iter == 11 and on(l), 70)
    warned = told(lambda: learn.fit(1, 0.001, cbs=validation), 'failed')
    assert [f.step for f in learn.mixed_precision.fixes] == [4, 7, 10, 2] and not warned
    learn.fit(1, 0.001)
    assert len(learn.mixed_precision.fixes) == 4 and sum(learn.mixed_precision.skips) == 4 * LATE


def test_what_has_no_remedy_is_warned_of():
    data = dataset()
    data.tensors[0][7, 2] = float('nan')
    learn = learner(dls=loaders(train=data)).to_bf16(on_overflow='fix')
    assert len(told(lambda: learn.fit(1, 0.01), 'the batch itself is not finite')) == 1
    assert (
        not learn.mixed_precision.fixes and finite(learn) and learn.mixed_precision.skips == [False, True, *[False] * 4]
    )


def test_a_loss_that_was_infinite_once_is_not_blamed_on_the_loss_scale():
    calls = []

    def once(p, y):
        calls.append(y)
        return F.mse_loss(p, y) * (math.inf if len(calls) == 2 else 1)

    learn = learner(loss_func=once).to_fp16(init_scale=2.0**40, on_overflow='fix')
    assert told(lambda: learn.fit(1, 0.01), 'this time the failure does not occur in fp16')
    assert not learn.mixed_precision.fixes


def test_with_several_processes_it_says_so_and_warns(monkeypatch):
    for module in (watch, diagnosis):
        monkeypatch.setattr(module, 'several_processes', lambda: True)
    learn = learner(Narrow(0), narrow_from(4)).to_bf16(on_overflow='fix')
    words = told(lambda: learn.fit(2, 0.01))
    assert sum('only warns in distributed runs' in w for w in words) == 1 and 'only warns' in words[0]
    assert sum('failed' in w for w in words) == 1 and not learn.mixed_precision.fixes


def test_with_data_parallel_it_warns_of_a_change_that_cannot_be_made():
    model = nn.DataParallel(Attentive())
    model.device_ids, model.forward = [0, 1], model.module.forward  # as with two GPUs
    learn = learner(model).to_fp16(on_overflow='fix')
    assert "'attn'" in ' '.join(told(lambda: learn.fit(1))) and not learn.mixed_precision.fixes


def test_a_users_own_switch_in_the_same_batch_counts():
    for event in 'before_batch', 'after_batch':
        learn = learner(Narrow(0), narrow_from(4)).to_bf16(on_overflow='fix')
        learn.add_cb(At(event, lambda l: l.training and l.iter == 4 and l.to_fp32(), 70))
        told(lambda: learn.fit(1, 0.01))
        assert precision_callback(learn) is None and not left_on(learn), event


class Large(nn.Module):
    "Has values above 65,504 in evaluation, and from call `n` on in training as well."

    def __init__(self, n):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.n, self.calls = nn.Linear(6, 8), nn.Linear(8, 1), n, 0

    def forward(self, x):
        self.calls += self.training
        factor = 1e6 if not self.training or self.calls >= self.n else 1.0
        return self.head(self.body(x) * factor / factor)


@pytest.mark.parametrize('on_overflow', ['warn', 'fix'])
def test_training_that_fails_after_a_validation_that_did_is_still_noticed(on_overflow):
    learn = learner(Large(15)).to_fp16(init_scale=256.0, on_overflow=on_overflow, fp32_modules='head')
    warned = told(lambda: learn.fit(4, 0.01))  # fails in the third epoch
    if on_overflow == 'fix':
        assert [fix.step for fix in learn.mixed_precision.fixes] == [15] and finite(learn)
        assert sum(learn.mixed_precision.skips) <= 1
    else:
        assert [' in validation is NaN' in w for w in warned if 'NaN' in w or 'failed' in w] == [True, False]


def test_the_report_that_a_failed_validation_advises_names_the_module():
    "Also if other predictions are masked."
    masked = Act(lambda h: torch.cat([h, torch.full_like(h, -math.inf)], 1))
    learn = learner(nn.Sequential(Large(100), masked), loss_func=lambda p, y: F.mse_loss(p[:, :1], y))
    (warning,) = told(learn.to_fp16(init_scale=256.0, on_overflow='fix', fp32_modules='0.head').validate)
    assert '`learn.precision_report(dl=learn.dls.valid)`' in warning and 'mends only training' in warning
    verdict = learn.precision_report('fp16', dl=learn.dls.valid).verdicts['fp16']
    assert verdict.modules == ['0'] and verdict.verdict == 'keep modules in fp32'
