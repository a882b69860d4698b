"`to_amp(measure=True)`: the fastest precision whose loss matches fp32; only the learner's precision changes."

import math, re, time, warnings

import numpy as np
import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.training import GradientAccumulation
from fastai.optimizer import SGD
from torch import nn

from fastxtend_amp import AMPMode
from fastxtend_amp.precisions import HalfWeights
from fastxtend_amp.insight.comparison import tolerance
from fastxtend_amp.insight.candidates import advised, call, candidates, switch, with_advice
from helpers import Attentive, Data, learner, loaders, set_support
from states import Act, Gives, InStep, Times, Unpacks, bits, fills, rich


class Costs(Callback):
    "Each step lasts .1 seconds of the test's clock, divided by the speed-up of its precision."

    run_on_copy = True

    def __init__(self, speeds, swing=0.0):
        self.speeds, self.swing = speeds, swing

    def before_batch(self):
        cb = self.learn.precision
        half = ['half_weights'] if cb is not None and isinstance(cb.precision, HalfWeights) else []
        name = ' '.join([*half, *([] if cb is None or half and cb.mode == 'bf16' else [cb.mode])]) or 'fp32'
        swing = 1 + self.swing * (self.learn.iter // 6 % 2) if cb else 1
        time.sleep(0.1 * swing / self.speeds.get(name, 1.0))


def _support(name):
    return 'native' if name in ('bf16', 'fp16') else 'unsupported'


@pytest.fixture(autouse=True)
def native(monkeypatch, sleeps):
    set_support(monkeypatch, _support)


def costing(speeds, model=None, **kwargs):
    return learner(model, cbs=Costs(speeds), **kwargs)


@pytest.mark.parametrize(
    'speeds, chosen',
    [
        ({'bf16': 2.0}, 'bf16'),
        ({'bf16': 2.0, 'half_weights': 2.08}, 'bf16'),
        ({'bf16': 0.7, 'fp16': 0.7, 'half_weights': 1.5, 'half_weights fp16': 0.7}, 'half_weights'),
        ({'bf16': 0.7, 'fp16': 0.7, 'half_weights': 0.7}, 'fp32'),
        ({'fp16': 3.0}, 'fp16'),
        ({}, 'fp32'),
    ],
)
def test_takes_the_fastest(speeds, chosen, capsys):
    learn = costing(speeds)
    learn.add_cb(GradientAccumulation(8))
    has_half = any('half' in name for name in speeds)
    if has_half:
        learn.to_half_weights()
    assert learn.to_amp(measure=True) is learn
    decision, cb = learn.precision_decision, learn.precision
    assert decision.recommended == chosen
    tried = ['fp32', 'bf16', 'fp16'] + ['half_weights', 'half_weights fp16'] * has_half
    assert list(decision.table.index) == tried  # half weights only if the learner has them
    if chosen == 'fp32':
        assert cb is None
    else:
        precision = decision.precisions[chosen]
        assert precision == cb.precision is not precision and decision.calls[chosen] == repr(precision)
        assert isinstance(cb and cb.precision, HalfWeights) == chosen.startswith('half')
    said = capsys.readouterr().out
    assert (
        said.startswith(f'Selected: {chosen}. ')
        and said.count('\n') == 1
        and f'Without measuring: `{decision.calls[chosen]}`.' in said
    )
    if chosen == 'fp16':
        assert 'Speed-up 3.00 (3.00 to 3.00); its loss is within' in said
    learn.fit(1)


@pytest.mark.parametrize('max_seconds', [60.0, 300.0])
def test_a_gain_that_is_sure_is_taken_however_wide_its_spread(max_seconds, capsys):
    "In every second step, low precision needs 1.5x the time of the other steps: speed-ups of 1.5, 1.0 and between."
    learn = learner(cbs=Costs({'bf16': 1.5, 'fp16': 1.5}, swing=0.5))
    learn.to_amp(measure=True, max_seconds=max_seconds)
    assert learn.precision.mode == 'bf16'


def test_more_time_decides_what_little_did_not_and_the_time_is_the_one_given(capsys, sleeps):
    "In about every second round, low precision needs twice the time of the other rounds, and is still faster."
    for max_seconds, chosen in ((10.0, 'fp32'), (300.0, 'bf16')):
        start = sleeps.now
        learn = learner(cbs=Costs({'bf16': 1.6, 'fp16': 0.5}, swing=0.9)).to_amp(measure=True, max_seconds=max_seconds)
        assert learn.precision_decision.recommended == chosen, learn.precision_decision
        assert sleeps.now - start < max_seconds + 1


@pytest.mark.parametrize(
    'max_seconds, factor, chosen', [(60.0, 1.003, 'bf16'), (9.0, 1.003, 'bf16'), (60.0, 3.0, 'fp32')]
)
def test_a_loss_is_refused_for_what_seeds_do_not_show_and_not_for_noise(max_seconds, factor, chosen):
    "Two calls on one learner give the same answer, also where the time limit ends the comparison."

    class Worse(Callback):
        def after_loss(self):
            if self.learn.precision:
                self.learn.loss = self.learn.loss * factor

    learn = costing({'bf16': 1.6, 'fp16': 1.6})
    learn.add_cb(Worse())
    for _ in range(2):
        learn.to_amp(measure=True, max_seconds=max_seconds)
        decision = learn.precision_decision
        assert decision.recommended == chosen and (len(decision.losses['fp32']) == 40) == (max_seconds == 60.0)
        assert len(decision.seed_losses) == 3
        assert ('was enough for 40 of 40 steps' in repr(decision)) == (max_seconds == 60.0)
        assert "1% of the fp32 loss" in decision.reason or 'the spread of 4 fp32 trainings' in decision.reason
        learn.to_fp32()


def trained(scale, worse=0.0, loss=nn.functional.mse_loss):
    "The decision for a linear regression without noise, from a loss of about `scale`; low precision trains `worse`."

    class Perturbs(Callback):
        run_on_copy = True

        def after_step(self):
            if worse and self.learn.precision:
                with torch.no_grad():
                    for p in self.learn.model.parameters():
                        p.mul_(1 - worse)

    torch.manual_seed(0)
    x = torch.randn(160, 6)
    dls = loaders(train=Data(x, scale**0.5 * (x[:, :1] * 2 - x[:, 1:2])), bs=16)
    learn = costing({'bf16': 2.0, 'fp16': 2.0}, nn.Linear(6, 1), dls=dls, loss_func=loss, opt_func=SGD, lr=0.1)
    learn.add_cb(Perturbs())
    return learn.to_amp(measure=True).precision_decision


@pytest.mark.parametrize(
    'loss, level', [(0.0, 0), (-0.35, 0.35), (0.004, 0.01)], ids=['to nothing', 'below zero', 'near zero']
)
def test_losses_near_zero_and_below_are_judged_as_others(loss, level):
    "A regression without noise, and the same loss minus a constant: a precision that trains worse is not selected."
    shifted = lambda p, y: nn.functional.mse_loss(p, y) + loss
    good, bad = trained(1.0, loss=shifted), trained(1.0, worse=0.05, loss=shifted)
    last = good.table['loss']['fp32']
    assert abs(last - loss) < 0.05 and good.recommended == 'bf16', good
    assert bad.recommended == 'fp32' and "above that of fp32; the limit is" in bad.reason, bad


def test_modules_that_must_stay_in_fp32_do_in_a_model_whose_output_a_callback_unpacks():
    learn = costing({'fp16': 3.0}, Gives(Attentive())).to_fp16(max_skips=7)
    learn.add_cb(Unpacks())
    learn.to_amp(measure=True)
    decision = learn.precision_decision
    assert decision.recommended == 'fp16' and decision.precisions['fp16'].fp32_modules == ['net.attn']
    assert 'net.attn' in decision.calls['fp16']
    assert learn.precision.fp32_module_names == ['net.attn'] and learn.precision.max_skips == 7
    assert learn.precision.scale == 4096  # as the report advises
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        learn.fit(2)
    assert not [w for w in found if 'failed' in str(w.message)] and learn.precision.n_skipped == 0


@pytest.mark.parametrize(
    'breaks, words',
    [
        (lambda h: h * math.inf, 'the loss or a gradient is not finite'),
        (fills, "the model's own `forward` does not run"),
    ],
    ids=['do not use', 'cannot run'],
)
def test_a_mode_that_the_report_refuses_is_not_tried_and_said(breaks, words):
    class Breaks(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return breaks(out) if out.dtype is torch.float16 else out

    learn = costing({'bf16': 2.0, 'fp16': 9.0}, Breaks(6, 1)).to_amp(measure=True)
    decision = learn.precision_decision
    assert list(decision.table.index) == ['fp32', 'bf16'] and learn.precision.mode == 'bf16'
    assert decision.notes[0].startswith(f'fp16: {words}')


def test_fp32_that_fails_itself_is_named():
    learn = learner(nn.Sequential(nn.Linear(6, 1), Act(lambda h: (-h.abs()).log()))).to_amp(measure=True)
    reason = learn.precision_decision.reason
    assert learn.precision is None and reason.startswith("The fp32 loss is not finite: check the data")
    assert learn.precision_decision.notes[0].startswith("bf16: the loss is not finite in fp32 either, first in '1'")
    assert list(learn.precision_decision.table['steps']) == [1]  # there is nothing to compare fp32 with


def test_the_learner_is_as_it_was_interrupted_or_but_for_the_callback():
    def stop(l):
        if interrupts and l.iter == 3:
            raise KeyboardInterrupt

    interrupts, learn = True, rich()
    learn.add_cbs([Costs({'bf16': 3.0}), InStep('after_step', stop)])
    before = bits(learn)
    with pytest.raises(KeyboardInterrupt):
        learn.to_amp(measure=True)
    assert bits(learn) == before and learn.precision_decision is None
    interrupts = False
    learn.to_amp(measure=True)
    after = bits(learn)
    assert learn.precision.mode == 'bf16'
    for key in ('grads', 'metrics', 'dls', 'rng', 'autocast', 'opt', 'lists'):
        assert after[key] == before[key], key


def test_bad_seconds_are_refused_and_lose_nothing():
    learn = learner().to_bf16()
    with pytest.raises(ValueError, match='max_seconds=-1 cannot be used'):
        learn.to_amp(measure=True, max_seconds=-1)
    assert learn.precision.mode == 'bf16'


# -- slow steps


class Sleeps(nn.Linear):
    "Takes so many seconds in fp32, and fewer under autocast."

    def __init__(self, seconds, speed_up):
        super().__init__(6, 1)
        self.seconds, self.speed_up = seconds, speed_up

    def forward(self, x):
        time.sleep(self.seconds / (self.speed_up if torch.is_autocast_enabled('cpu') else 1))
        return super().forward(x)


@pytest.fixture
def bf16_only(monkeypatch):
    set_support(monkeypatch, lambda name: 'native' if name == 'bf16' else 'unsupported')


@pytest.mark.parametrize('seconds', [0.3, 1, 3])
@pytest.mark.parametrize('speed_up, chosen', [(1.0, 'fp32'), (1.15, 'bf16'), (1.5, 'bf16'), (1.89, 'bf16')])
def test_slow_models_are_decided_within_the_time(seconds, speed_up, chosen, bf16_only, sleeps, capsys):
    learn = learner(Sleeps(seconds, speed_up)).to_amp(measure=True)
    decision = learn.precision_decision
    assert decision.recommended == chosen and decision.table['rounds']['bf16'] >= 6 and sleeps.now < 61
    assert decision.table['speed-up']['bf16'] == pytest.approx(speed_up, rel=1e-3)
    n, seeds, line = len(decision.losses['fp32']), len(decision.seed_losses), capsys.readouterr().out
    assert seeds == (3 if seconds < 3 else 0) and n >= 7
    if chosen == 'bf16':
        assert ('a wide tolerance (fp32 was trained only once)' in line) == (seeds == 0)
    assert f'`max_seconds=60` was enough for {n} of 40 steps, and for fp32 with {seeds} of 3 other seeds.' in line


@pytest.mark.parametrize('speed_up', [1.0, 1.89])
def test_what_needs_more_time_says_how_many_seconds_and_they_are_enough(speed_up, bf16_only, sleeps):
    learn = learner(Sleeps(6, speed_up)).to_amp(measure=True)
    reason = learn.precision_decision.reason
    assert learn.precision is None and sleeps.now < 61
    seconds = 60 * int(re.search(r'not certain \(- to -\)\. Measure for (\d) minutes to decide\.', reason)[1])
    learn.to_amp(measure=True, max_seconds=seconds)
    assert learn.precision_decision.table['rounds']['bf16'] >= 6
    assert (learn.precision is not None) == (speed_up > 1) and 'not certain' not in learn.precision_decision.reason


def test_the_line_tells_what_limits_the_result(bf16_only, sleeps, capsys):
    "A slow loader, few steps, a compiled model."

    class Slow(Data):
        def __getitem__(self, i):
            time.sleep(0.25)  # 1 second a batch
            return super().__getitem__(i)

    learn = learner(torch.compile(Sleeps(1, 2.0), backend='eager'), loaders(train=Slow(*loaders().train_ds.tensors)))
    learn.to_amp(measure=True)
    line = capsys.readouterr().out
    assert 'a whole fit in bf16 is about 1.33x faster, not 2.00x.' in line and line.count('\n') == 1
    assert re.search(r'`max_seconds=60` was enough for \d+ of 40 steps, and for fp32 with \d of 3 other seeds', line)
    assert 'The compiled model was compared uncompiled; `compare_precision(compile=True)` compares both.' in line
    assert all(note in line for note in learn.precision_decision.notes)


# -- a loss that shows no difference


@pytest.mark.parametrize('constant, lr', [(100.0, 0.1), (0.0, 1e-5), (100.0, 1e-5)])
@pytest.mark.parametrize('vanish', [True, False])
def test_gradients_that_vanish_are_seen_where_the_loss_hides_it(constant, lr, vanish, bf16_only, sleeps):
    class Vanishes(nn.Linear):
        def forward(self, x):
            low = torch.is_autocast_enabled('cpu')
            time.sleep(0.05 if low else 0.1)
            return Times.apply(super().forward(x), 0.0 if low and vanish and self.training else 1.0)

    torch.manual_seed(0)
    x = torch.randn(160, 6)
    loss = lambda p, y: nn.functional.cross_entropy(p, y) + constant
    dls = loaders(train=Data(x, (x[:, 0] > 0).long()), bs=16)
    learn = learner(nn.Sequential(Vanishes(6, 2)), dls, loss, opt_func=SGD, lr=lr)
    comparison = learn.compare_precision('bf16')
    assert comparison.recommended == ('fp32' if vanish else 'bf16'), comparison
    if vanish:
        assert 'its weights moved only 0% of the distance in fp32: its gradients vanish' in comparison.reason


def test_a_constant_in_the_loss_does_not_widen_what_is_tolerated():
    "Half of the gradient is lost: the loss falls half as far as in fp32."
    fp32 = [100.7 - 0.01 * i for i in range(40)]
    seeds = [np.mean(fp32[-8:]) + d for d in (-0.002, 0.002, 0.001)]
    assert tolerance(fp32, seeds, 8)[0] < 0.5 * (fp32[0] - fp32[-1]) + 0.01
    assert tolerance(fp32, [], 8)[0] < 0.5 * (fp32[0] - fp32[-1]) + 0.1


@pytest.mark.parametrize(
    'own, name, call_of_it',
    [
        (lambda l: l.to_fp16(init_scale=8.0, max_skips=3), 'bf16', 'learn.to_bf16(max_skips=3)'),
        (lambda l: l.to_fp16(init_scale=8.0), 'fp16', 'learn.to_fp16(init_scale=8.0)'),
        (
            lambda l: l.to_fp16(loss_scale=8.0),
            'half_weights fp16',
            "learn.to_half_weights(amp_mode='fp16', loss_scale=8.0)",
        ),
        (lambda l: l.to_half_weights('fp16', loss_scale=8.0), 'half_weights', 'learn.to_half_weights()'),
        (
            lambda l: l.to_half_weights(master_weights=False),
            'half_weights fp16',
            "learn.to_half_weights(amp_mode='fp16')",
        ),
        (lambda l: l.to_half_weights(fp32_modules=nn.BatchNorm1d), 'bf16', "learn.to_bf16(fp32_modules=['1'])"),
        (lambda l: l.to_bf16(skip_nonfinite=True, on_overflow='raise'), 'fp32', 'learn.to_fp32()'),
        (
            lambda l: l.to_bf16(skip_nonfinite=True, on_overflow='raise'),
            'bf16',
            "learn.to_bf16(skip_nonfinite=True, on_overflow='raise')",
        ),
    ],
)
def test_a_precision_has_the_arguments_of_the_learners_own_that_it_accepts(own, name, call_of_it):
    learn = own(learner())
    precision = candidates(learn, name)[-1]
    assert call(learn, precision) == call_of_it
    cb = switch(learn, precision)
    assert cb is learn.precision and (cb is None or cb.precision == precision)


def test_the_loss_scale_stays_unless_the_precision_has_another():
    learn = learner().to_fp16(scaler=torch.amp.GradScaler('cpu', init_scale=64.0, growth_interval=2))
    learn.fit(1)
    scale = learn.precision.scale
    fp16 = candidates(learn, 'fp16')[-1]
    assert scale != 64.0 and switch(learn, with_advice(fp16, ['0'])).scale == scale
    assert with_advice(fp16, (), 4.0).changed == {'init_scale': 4.0}  # instead of the user's own scaler
    static = advised(learner().to_fp16(loss_scale=8.0), AMPMode.FP16, init_scale=4.0)
    assert repr(static) == 'learn.to_fp16(loss_scale=4.0)'
    learn = learner()  # from the report, for the decision
    assert switch(learn, advised(learn, AMPMode.FP16, init_scale=4.0)).scale == 4.0
    assert repr(candidates(learn, 'fp16')[-1]) == 'learn.to_fp16(init_scale=4.0)'


def test_a_report_runs_the_precision_that_it_prints():
    "With the arguments of the learner's own, where the class is the same."
    seen = []
    learn = learner(cbs=InStep('after_pred', lambda l: seen.append(l.precision and l.precision.precision)))
    learn.to_bf16(skip_nonfinite=True, fp32_modules='0')
    report = learn.precision_report('bf16')
    assert {*map(repr, filter(None, seen))} == {"learn.to_bf16(fp32_modules=['0'], skip_nonfinite=True)"}
    assert report.verdicts['bf16'].call == repr(seen[-1])
