"Failed training: what is noticed, what the message says, and that the search for the cause changes nothing."

import math, warnings

import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.mixup import MixUp
from fastai.callback.schedule import *  # noqa: F403  patches lr_find
from fastai.callback.training import GradientAccumulation
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from torch import nn
from torch.nn import functional as F

from fastxtend_amp import kahan
from fastxtend_amp.training import callback
from fastxtend_amp.insight.watch import Watch
from helpers import (
    OPTIMIZERS,
    At,
    Attentive,
    Data,
    autocast_state,
    dataset,
    learner,
    linear,
    loaders,
    mlp,
    opt_state,
    params,
    same,
    same_state,
    told,
)
from states import Act, Gives, Times, Unpacks, lora


def said(learn, n=1, lr=0.01):
    "Return all warnings while `learn` fits `n` epochs."
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        learn.fit(n, lr)
    return [str(w.message) for w in found if issubclass(w.category, UserWarning) and 'emulated' not in str(w.message)]


def alarms(learn, n=1, lr=0.01):
    return [m for m in said(learn, n, lr) if 'failed' in m]


class OnceInf(nn.Module):
    "Return infinity in low precision in the n-th call."

    def __init__(self, when):
        super().__init__()
        self.when, self.n = when, 0

    def forward(self, x):
        self.n += 1
        return x * (math.inf if self.n == self.when and torch.is_autocast_enabled('cpu') else 1)


def steep(factor):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), Act(lambda h: Times.apply(h, factor)), nn.Linear(8, 1))


def bad_data():
    data = dataset()
    data.tensors[0][7, 2] = math.nan
    return learner(dls=loaders(train=data))


def log_of_negative():
    return learner(nn.Sequential(nn.Linear(6, 2), Act(lambda h: h.sum(1, keepdim=True).log())))


# -- what is found


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_the_module_that_overflows_is_named(opt):
    messages = alarms(learner(Attentive(), opt_func=OPTIMIZERS[opt]).to_fp16())
    assert len(messages) == 1 and messages[0].count('\n') == 2
    assert [line.partition(' ')[0] for line in messages[0].splitlines()] == ['fp16', 'Keep', 'Re-running']
    for words in (
        'the loss is nan',
        'Re-running that batch with the same random numbers',
        "values in 'attn' reach",
        "above fp16's 65,504",
        "Keep 'attn' in fp32: `learn.to_fp16(init_scale=4096, fp32_modules=['attn'])`",
    ):
        assert words in messages[0], messages[0]


def test_a_batch_that_callbacks_have_prepared_is_run_as_it_is_and_its_output_unpacked():
    data = Data(dataset().tensors[0], torch.arange(24) % 3)
    torch.manual_seed(0)
    model = Gives(nn.Sequential(Attentive(), nn.Linear(1, 3)))
    message = alarms(
        learner(model, loaders(24, 8, data, data), CrossEntropyLossFlat(), cbs=[MixUp(), Unpacks()]).to_fp16()
    )[0]
    assert "fp32_modules=['net.0.attn']" in message, message


class Loud(nn.Module):
    def __init__(self, half=False):
        super().__init__()
        torch.manual_seed(0)
        self.emb, self.head, self.half = nn.Linear(6, 8), nn.Linear(8, 1), half

    def forward(self, x):
        x = self.emb(x)
        return self.head((x.half() if self.half and torch.is_autocast_enabled('cpu') else x) * 1e6 / 1e6)


def test_the_models_own_forward():
    message = alarms(learner(Loud()).to_fp16())[0]
    assert (
        "values in the model's own `forward` reach" in message
        and "(with 'emb' in fp32 this does not happen)" in message
    )
    assert "Keep 'emb' in fp32: `learn.to_fp16(" in message and '(model)' not in message
    assert alarms(learner(Loud()).to_fp16(fp32_modules=['emb'])) == []
    message = alarms(learner(Loud(half=True)).to_fp16())[0]
    assert "with torch.autocast(x.device.type, enabled=False)" in message and '`learn.to_' in message


def test_a_backward_pass_that_overflows():
    "The forward pass is harmless, but in fp16 a gradient multiplied by 1e9 in the backward pass overflows."
    message = alarms(learner(steep(1e9)).to_fp16(init_scale=1024.0, max_skips=8), 2)[0]
    assert 'in fp16 the loss or a gradient is not finite' in message and 'fp32_modules=' in message
    call = message.rpartition('`')[0].rpartition('`')[2]
    learn = learner(steep(1e9))
    exec(call, {'learn': learn})
    assert alarms(learn, 2) == []


@pytest.mark.parametrize('kwargs', [dict(init_scale=2.0**20, max_skips=3), dict(loss_scale=2.0**18, max_skips=4)])
def test_a_loss_scale_that_is_too_large(kwargs):
    learn = learner(loss_func=lambda p, y: F.mse_loss(p, y) * 300).to_fp16(**kwargs)
    message = alarms(learn)[0]
    assert f"{kwargs['max_skips']} steps in a row were skipped" in message
    assert 'is too large: gradients overflow in fp16, and at' in message and 'Start lower: `learn.to_fp16(' in message
    call = message.rpartition('`')[0].rpartition('`')[2]
    again = learner(loss_func=learn.loss_func)
    exec(call, {'learn': again})
    assert again.precision.scale < learn.precision.scale and said(again) == [] and again.precision.n_skipped == 0


@pytest.mark.parametrize('which', [0, 1])
def test_bad_data_is_told_apart(which):
    data = dataset()
    data.tensors[which][7, 0] = math.inf
    messages = said(learner(dls=loaders(train=data)).to_bf16())
    assert (
        len(messages) == 1
        and f'the batch itself is not finite: 1 of {(24, 4)[which]} values of its tensor of' in messages[0]
        and 'Look at the data; no precision can train on it.' in messages[0]
    )


@pytest.mark.parametrize('mode', ['to_fp16', 'to_bf16'])
def test_what_is_no_matter_of_precision_is_said_once(mode):
    messages = said(getattr(log_of_negative(), mode)())
    assert len(messages) == 1 and messages[0].count('\n') == 2
    assert "not finite in fp32 either, first in '1', so precision is not the cause" in messages[0]
    assert (
        'Look at the learning rate, the loss function and the data' in messages[0]
        and 'precision_report' not in messages[0]
    )


def test_weights_that_are_lost():
    model = mlp()
    model[0].weight.data.fill_(math.nan)
    message = alarms(learner(model).to_bf16())[0]
    assert "1 of 6 weight tensors are NaN or inf; the first is '0.weight', so the batch cannot be run again" in message
    assert 'checkpoint' not in message and 'Load weights that are finite, or build the model again' in message


def test_a_fault_that_does_not_come_back_is_said_not_to():
    for to, kwargs in (
        ('to_bf16', {}),
        ('to_half_weights', dict(master_weights=False)),
    ):  # whose weights are bf16 in the fit
        learn = getattr(learner(nn.Sequential(nn.Linear(6, 1), OnceInf(3)), opt_func=kahan()), to)(**kwargs)
        assert 'this time loss and gradients are finite in bf16' in alarms(learn)[0]


# -- a run that diverges


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
@pytest.mark.parametrize('opt,lr', [('sgd', 10.0), ('sgd', 100.0), ('adam', 100.0)])
def test_a_learning_rate_far_too_high_is_named_first(opt, lr, mode):
    learn = learner(opt_func=OPTIMIZERS[opt])
    getattr(learn, f'to_{mode}')(max_skips=4)
    messages = alarms(learn, 4, lr)
    assert len(messages) == 1 or mode == 'bf16' and opt == 'adam'  # which keeps the loss finite, as in fp32
    for message in messages:
        assert 'The run diverges' in message and 'the loss went from 0.92' in message, message
        assert f'Lower the learning rate first, {lr:g} at this step' in message and 'fp32_modules' not in message, (
            message
        )


def test_a_loss_that_has_not_grown_is_not_said_to_have():
    "The step of the first batch leads to a loss of inf in the second."
    learn = learner(linear(), loss_func=lambda p, y: F.mse_loss(p, y) * 1e6, opt_func=OPTIMIZERS['sgd']).to_bf16()
    message = alarms(learn, lr=1e12)[0]
    assert '-fold since the start of the fit.' in message and 'the loss went' not in message, message


def test_a_loss_below_0_that_falls_is_no_divergence():
    def loss(pred, y):
        mse = F.mse_loss(pred, y)
        return mse - mse.detach() + (0.7 if learn.train_iter else -0.004) * -1

    learn = learner(Attentive(gain=1.0), loss_func=loss).to_fp16(init_scale=1024.0)
    learn.add_cb(At('after_batch', lambda l: setattr(l.model.attn, 'gain', 800.0 if l.train_iter > 2 else 1.0)))
    message = alarms(learn, lr=0.1)[0]
    assert "fp32_modules=['attn']" in message and 'diverges' not in message, message


def test_a_first_loss_that_happens_to_be_small_is_no_divergence():
    data, model = dataset(), Attentive(gain=1.0)
    data.tensors[1][:4] = model(data.tensors[0][:4]).detach()  # the first batch is predicted already
    learn = learner(model, loaders(train=data), opt_func=OPTIMIZERS['sgd']).to_fp16(init_scale=1024.0)
    learn.add_cb(At('after_batch', lambda l: setattr(l.model.attn, 'gain', 800.0 if l.train_iter > 2 else 1.0)))
    message = alarms(learn)[0]
    assert "fp32_modules=['attn']" in message and 'diverges' not in message, message


# -- the advice is right


@pytest.mark.parametrize('kept', ['emb', ['emb'], nn.Embedding], ids=str)
def test_advice_keeps_what_is_there(kept):
    model = Attentive()
    model.other = nn.Embedding(2, 2)
    message = alarms(learner(model).to_fp16(fp32_modules=kept, max_skips=7, init_scale=1024.0))[0]
    first = 'other' if kept is nn.Embedding else 'emb'
    assert f"fp32_modules=['{first}', 'attn']" in message and 'max_skips=7' in message, message


def test_where_no_loss_scale_helps_modules_are_kept():
    class Between(nn.Module):
        "The gradient grows between two modules, in the backward pass of no module."

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 1)

        def forward(self, x):
            return self.b(Times.apply(self.a(x), 1e12))

    message = alarms(learner(Between()).to_fp16(init_scale=4.0, max_skips=4))[0]
    assert '4 steps in a row were skipped' in message and "Keep 'a' in fp32" in message
    learn = learner(Between())
    exec(message.rpartition('`')[0].rpartition('`')[2], {'learn': learn})
    assert alarms(learn) == []


# -- when it searches for the cause, and when not


def test_ordinary_first_skips_raise_no_alarm():
    learn = learner(loss_func=lambda p, y: F.mse_loss(p, y) * 30).to_fp16(init_scale=2.0**18)
    assert alarms(learn, 3) == [] and 3 < learn.mixed_precision.n_skipped < 16


def test_once_a_fit_and_again_in_the_next():
    learn = learner(Attentive()).to_fp16()
    assert len(said(learn, 2)) == 1 and len(said(learn)) == 1


def test_lr_find_is_left_alone():
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        learner(Attentive()).to_fp16().lr_find(num_it=6, show_plot=False, suggest_funcs=())
    assert not [w for w in found if 'failed' in str(w.message)]


def predicts(learn):
    return learn.get_preds()


def predicts_without_targets(learn):
    dl = learn.dls.valid.new(Data(learn.dls.valid_ds.tensors[0]))
    dl.n_inp = 1
    return learn.get_preds(dl=dl)


def loud_in_half(p, y):
    return F.mse_loss(p, y) * (math.inf if torch.is_autocast_enabled('cpu') else 1.0)


@pytest.mark.parametrize('run', [Learner.validate, predicts, predicts_without_targets])
@pytest.mark.parametrize('mode', ['to_fp16', 'to_bf16'])
def test_validation_and_predictions_that_are_not_finite(run, mode):
    "Each time they are computed, and also if they are finite in training."
    learn = getattr(learner(Attentive()), mode)()
    expected = ['fp16: a loss or a prediction in validation is NaN or inf.'] * (mode == 'to_fp16')
    for _ in range(2):
        assert [w.splitlines()[0] for w in told(lambda: run(learn), 'in validation')] == expected
    if expected:
        assert 'learn.precision_report(dl=learn.dls.valid)' in told(lambda: run(learn))[0]
        with pytest.raises(FloatingPointError, match='in validation is NaN or inf'):
            run(learner(Attentive()).to_fp16(on_overflow='raise'))
    assert told(lambda: run(learner(Attentive()).to_fp32()), 'validation') == []
    assert told(lambda: run(learner(Attentive()).to_fp16(on_overflow='ignore')), 'validation') == []


def test_a_validation_loss_that_is_not_finite_where_predictions_are():
    assert len(told(learner(loss_func=loud_in_half).to_bf16().validate, 'in validation is NaN or inf')) == 1
    masked = nn.Sequential(nn.Linear(6, 1), Act(lambda h: h.masked_fill(h < 0, -math.inf)))
    assert told(lambda: predicts_without_targets(learner(masked).to_fp16()), 'validation') == []


def test_a_run_that_diverges_is_told_of_the_learning_rate_first():
    "Its losses are finite in training, but not in validation."
    linear = nn.Linear(6, 1)
    valid = Data(torch.full((8, 6), 1e36), torch.zeros(8, 1))
    learn = learner(linear, loaders(valid=valid), loss_func=nn.L1Loss(), lr=1e4, opt_func=OPTIMIZERS['sgd'])
    said = told(lambda: learn.to_bf16().fit(1), 'in validation')
    assert len(said) == 1 and 'The run diverges: ' in said[0] and 'Lower the learning rate first' in said[0], said
    assert 'precision_report' not in said[0]


def test_ignore_says_nothing_and_raise_stops():
    assert said(learner(Attentive()).to_fp16(on_overflow='ignore')) == []
    state = autocast_state()
    for mode, model in (('to_fp16', Attentive()), ('to_bf16', nn.Sequential(nn.Linear(6, 1), OnceInf(1)))):
        learn = getattr(learner(model), mode)(on_overflow='raise')
        before = params(learn)
        with pytest.raises(FloatingPointError, match='failed'):
            learn.fit(1)
        assert same(before, params(learn)) and learn.precision.fit is None and autocast_state() == state


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_a_frozen_base_in_half_precision(dtype):
    loud = lora(dtype, lambda h: (h * 1e38 * 1e38).square() if torch.is_autocast_enabled('cpu') else h)
    assert "Keep '1' in fp32: `learn.to_bf16(fp32_modules=['1'])`" in said(learner(loud).to_bf16())[0]


class FromTheModel(Learner):
    "A learner whose model gives the loss; its batches have no targets."

    def _do_one_batch(self):
        self.pred = self.model(*self.xb)
        self('after_pred')
        self.loss_grad = self.model[0](self.xb[0]).mean() * self.factor  # autocast returns it in bf16
        if self.sets_both:
            self.loss = self.loss_grad.clone()
        self('after_loss')
        if self.training:
            self._do_grad_opt()


@pytest.mark.parametrize('sets_both', [True, False])
def test_a_loss_of_the_models_own_is_fp32_and_watched(sets_both):
    class TakesTwo(nn.Sequential):
        def forward(self, x, _):
            return super().forward(x)

    dls, dtypes = loaders(), set()
    dls.n_inp = dls.train.n_inp = dls.valid.n_inp = 2  # there are no targets
    learn = learner(TakesTwo(linear()), dls, cls=FromTheModel).to_bf16()
    learn.sets_both, learn.factor = sets_both, 1.0
    learn.add_cb(At('after_loss', lambda l: dtypes.add(l.loss_grad.dtype), 20))
    assert not told(lambda: learn.fit(1, 1e-3), 'failed') and dtypes == {torch.float32}
    learn.factor = float('nan')
    assert len(told(lambda: learn.fit(1, 0.0), 'the loss is nan')) == 1


class OnDevice(Watch):
    "As on an accelerator: values on the device are not read."

    @property
    def notes(self):
        if (notes := super().notes) is not None:
            notes.on_cpu = False
        return notes


@pytest.mark.parametrize('loss', [True, False])
def test_on_a_device_the_losses_of_the_recorder_and_the_skips_that_are_known_tell(monkeypatch, loss):
    monkeypatch.setattr(callback, 'WATCHERS', [OnDevice])
    learn = learner(Attentive() if loss else steep(1e12)).to_fp16(init_scale=16.0, max_skips=4)
    messages = alarms(learn)
    assert (
        len(messages) == 1 and ('the loss is nan (batch 1' if loss else '4 steps in a row were skipped') in messages[0]
    )
    again = 'Re-running that batch' if loss else 'Re-running the current batch, not the one in which it began'
    assert again in messages[0]
    assert ("in 'attn'" if loss else 'a gradient is not finite') in messages[0]


def test_on_a_device_the_batch_before_is_looked_at(monkeypatch):
    monkeypatch.setattr(callback, 'WATCHERS', [OnDevice])
    message = alarms(bad_data().to_bf16())[0]
    assert '(batch 2)' in message and 'The batch itself is not finite: 1 of 24 values' in message


def test_a_cause_that_cannot_be_looked_for():
    class Shut(Callback):
        run_on_copy = True

        def __deepcopy__(self, memo):
            raise RuntimeError('shut')

        def after_step(self):
            pass

    message = alarms(learner(Attentive(), cbs=Shut()).to_fp16())[0]
    assert message.count('\n') == 2 and 'precision_report' not in message  # which would fail as well
    assert 'again, ValueError: This learner cannot be copied' in message
    assert '\nIf it is a callback, set its attribute `run_on_copy = False`' in message


# -- the rerun changes nothing


@pytest.mark.parametrize('acc', [None, 8])
@pytest.mark.parametrize('opt', ['adam', 'fused adamw', 'torch sgd'])
def test_training_goes_on_as_if_nobody_had_looked(opt, acc):
    "A model with dropout and batch norm whose third call overflows: with and without the diagnosis the same bits."

    def train(on_overflow):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), OnceInf(3), nn.Linear(8, 1))
        learn = learner(model, opt_func=OPTIMIZERS[opt], cbs=[GradientAccumulation(acc)] if acc else None)
        learn.to_fp16(init_scale=1024.0, on_overflow=on_overflow)
        torch.manual_seed(1)
        return learn, alarms(learn, 2)

    (asked, messages), (plain, none) = train('warn'), train('ignore')
    assert len(messages) == 1 and not none
    assert same(params(asked), params(plain)) and same_state(opt_state(asked.opt), opt_state(plain.opt))
    assert same(list(asked.model.buffers()), list(plain.model.buffers())) and asked.model[3].n == plain.model[3].n
    losses = asked.recorder.losses, plain.recorder.losses
    assert all(torch.equal(a, b) or (a != a and b != b) for a, b in zip(*losses))
    assert asked.mixed_precision.scales == plain.mixed_precision.scales


def test_the_rerun_uses_the_same_random_draws():
    "The overflow depends on what dropout kept."

    class Picky(nn.Module):
        def forward(self, x):
            return x * (1e30 if torch.is_autocast_enabled('cpu') and bool((x[0, :4] != 0).all()) else 1)

    torch.manual_seed(0)
    learn = learner(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), Picky(), nn.Linear(8, 1))).to_fp16()
    torch.manual_seed(5)
    assert "in '2'" in alarms(learn, 10)[0]


def test_with_several_processes_nothing_is_run_again(monkeypatch):
    monkeypatch.setattr('fastxtend_amp.insight.diagnosis.several_processes', lambda: True)
    message = alarms(learner(Attentive()).to_fp16())[0]
    assert 'the batch is not run again' in message and '`learn.precision_report()` in one process' in message
    assert 'The batch itself is not finite' in alarms(bad_data().to_bf16())[0]


@pytest.mark.parametrize('factor, scaling, n', [(1e-9, False, 1), (1.0, False, 0), (1e-9, True, 0)])
def test_gradients_that_underflow_without_loss_scaling_are_said_once(factor, scaling, n):
    loss = lambda pred, y: nn.functional.mse_loss(pred, y) * factor
    learn = learner(loss_func=loss).to_fp16(enabled=scaling)
    assert len(told(lambda: learn.fit(3, 0.01), 'they underflow')) == n
