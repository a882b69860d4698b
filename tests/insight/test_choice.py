"The measured choice: the fastest precision that trains as fp32 does, and a learner as it was but for the callback."
import warnings

import pytest, torch
from fastai.callback.training import GradientAccumulation
from torch import nn

from fastxtend_amp import HalfWeights, mode
from fastxtend_amp.insight import compare, precisions, trainings
from fastxtend_amp.insight.choice import measure_and_choose
from fastxtend_amp.insight.precisions import PrecisionChoice, use_choice
from helpers import Attentive, learner, mlp, params, same
from states import bits, rich


@pytest.fixture
def speeds(monkeypatch):
    "Replaces the speeds that are measured: samples per second by the name of the precision; others as fast as fp32."
    known, train = {}, trainings.Run.train
    def replaced(self, *args):
        train(self, *args)
        n = len(self.speeds)
        self.speeds[-1] = known.get(self.name, 100.) * (1 + .01 * (n % 3)) * (1 if self.name == 'fp32' else noise[n % 2])
    noise = known.setdefault('noise', [1., 1.])
    monkeypatch.setattr(trainings.Run, 'train', replaced)
    for module in (precisions, compare):
        monkeypatch.setattr(module, 'mode_support', lambda m, d: mode.Support('native', 'for this test'))
    return known


@pytest.mark.parametrize('known,chosen', [
    ({'bf16': 200.}, 'bf16'), ({'bf16': 200., 'half weights': 208.}, 'bf16'),
    ({'bf16': 70., 'half weights': 150.}, 'half weights'),
    ({'bf16': 70., 'fp16': 70., 'half weights': 70., 'half weights fp16': 70.}, 'fp32'), ({'fp16': 300.}, 'fp16'),
    ({}, 'fp32')])
def test_takes_the_fastest(speeds, known, chosen, capsys):
    speeds.update(known)
    learn = learner(cbs=GradientAccumulation(8))
    if 'half weights' in known: learn.to_half_weights()
    measure_and_choose(learn, n_steps=16)
    decision, cb = learn.precision_decision, learn.precision
    assert decision.mode == chosen
    tried = ['fp32', 'bf16', 'fp16'] + ['half weights', 'half weights fp16'] * ('half weights' in known)
    assert list(decision.table.index) == tried       # half weights are autocast's casts, unless the learner has more
    if chosen == 'fp32': assert cb is None
    else:
        assert cb.decision is decision and decision.choice.mode == cb.amp_mode and decision.call == cb.as_call()
        assert isinstance(cb, HalfWeights) == chosen.startswith('half')
    said = capsys.readouterr().out
    assert said.startswith(f'{chosen}: ') and said.count('\n') == 1 and 'Measured in' in said
    if chosen == 'fp16': assert '3.00, 3.00 to 3.00 times' in said and 'as 2 trainings of fp32 allow' in said
    learn.fit(1)


def test_a_gain_smaller_than_the_spread_is_not_taken_and_said(speeds, capsys):
    "bf16 is 1.4 times as fast in every second turn and 0.7 times in the others."
    speeds['noise'][:] = 1.4, .7
    for _ in range(2):
        learn = learner()
        measure_and_choose(learn, modes=('fp32', 'bf16'), n_steps=22)
        assert learn.precision is None
        assert 'fp32: bf16: not reliably faster than fp32 here (1.' in capsys.readouterr().out


@pytest.mark.parametrize('seconds', [1e-9, 60.])
def test_a_loss_is_not_refused_on_noise(speeds, seconds, monkeypatch, capsys):
    "bf16's loss is 2 % above fp32's: within what a second training shows, and within the margin without one."
    speeds.update(bf16=160.)
    monkeypatch.setattr(compare.Run, 'row', shifted(compare.Run.row))
    monkeypatch.setattr(compare._Comparison, '_train_seed', lambda *_: False)
    learn = learner()
    measure_and_choose(learn, modes=('fp32', 'bf16'), n_steps=16)
    assert learn.precision.mode == 'bf16' and 'no second training of fp32' in capsys.readouterr().out


def shifted(row):
    def f(self, *args):
        found = row(self, *args)
        if self.name == 'bf16': found['loss difference'] = .02 * self.measure.losses[-1]
        return found
    return f


def test_modules_that_must_stay_in_fp32_do(speeds):
    speeds.update(fp16=300.)
    learn = learner(Attentive()).to_fp16(init_scale=1024., max_skips=7)
    measure_and_choose(learn, modes=('fp32', 'fp16'), n_steps=16)
    decision = learn.precision_decision
    assert decision.mode == 'fp16' and decision.choice.fp32_modules == ('attn',) and 'attn' in decision.call
    assert learn.precision.fp32_module_names == ['attn'] and learn.precision.max_skips == 7
    assert learn.precision.scale == 1024.
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        learn.fit(2)
    assert not [w for w in found if 'goes wrong' in str(w.message)] and learn.precision.n_skipped == 0


def test_a_mode_that_does_not_work_is_not_chosen_however_fast(speeds):
    class Overflows(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            low = torch.is_autocast_enabled('cpu') and torch.get_autocast_dtype('cpu') is torch.float16
            return out * (float('inf') if low else 1.)
    speeds.update(fp16=900.)
    learn = learner(nn.Sequential(nn.Linear(6, 4), Overflows(4, 1)))
    measure_and_choose(learn, modes=('fp32', 'fp16'), n_steps=10)
    assert learn.precision is None or learn.precision.fp32_module_names        # kept in fp32 it works


@pytest.mark.parametrize('error', [KeyboardInterrupt, RuntimeError])
def test_interrupted_it_leaves_the_learner_as_it_was(monkeypatch, error):
    learn, turns = rich(), []
    before, train = bits(learn), trainings.Run.train
    def interrupted(self, *args):
        turns.append(self.name)
        if len(turns) == 3: raise error('now')
        train(self, *args)
    monkeypatch.setattr(trainings.Run, 'train', interrupted)
    with pytest.raises(error): measure_and_choose(learn, n_steps=8, modes='fp32')
    after = bits(learn)
    for key in before: assert after[key] == before[key], key
    assert learn.precision_decision is None


def test_but_for_the_callback_the_learner_is_as_it_was(speeds):
    speeds.update(bf16=300.)
    learn = rich()
    before = bits(learn)
    measure_and_choose(learn, n_steps=8)
    after = bits(learn)
    for key in ('grads', 'metrics', 'dls', 'rng', 'autocast', 'opt', 'lists'): assert after[key] == before[key], key


@pytest.mark.parametrize('in_place', [False, True])
def test_a_compiled_model_stays_compiled(speeds, in_place):
    speeds.update(bf16=200.)
    model = mlp()
    if in_place: model.compile(backend='eager')
    else: model = torch.compile(model, backend='eager')
    learn = learner(model)
    learn.fit(1, .01)
    before = params(learn)
    measure_and_choose(learn, modes=('fp32', 'bf16'), n_steps=4)
    assert learn.precision.mode == 'bf16' and same(params(learn), before) and learn.model is model
    learn.fit(1, .01)
    torch._dynamo.reset()


def test_to_amp_measures_when_asked(speeds, capsys):
    speeds.update(bf16=200.)
    learn = learner()
    assert learn.to_amp(measure=True) is learn and learn.precision.mode == 'bf16'
    assert learn.precision.decision.mode == 'bf16' and capsys.readouterr().out.startswith('bf16: ')
    with pytest.raises(ValueError, match='(?s)measure=True.*init_scale.*the call that it prints'):
        learn.to_amp(measure=True, init_scale=8.)
    with pytest.raises(ValueError, match='max_seconds=-1 cannot be used'): learn.to_amp(measure=True, max_seconds=-1)
    with pytest.raises(ValueError, match=r'(?s)max_seconds=9\).*measure=True'): learn.to_amp(max_seconds=9)
    with pytest.raises(TypeError, match="(?s)measure='yes'.*True or False"): learn.to_amp(measure='yes')
    with pytest.raises(TypeError, match=r'(?s)to_amp\(True\).*measure=True'): learn.to_amp(True)
    assert learn.precision.mode == 'bf16'
    assert learn.to_amp().precision.amp_mode == 'auto'


FP16, BF16 = mode.AMPMode.FP16, mode.AMPMode.BF16


@pytest.mark.parametrize('own, choice, call', [
    (None, PrecisionChoice(BF16), 'learn.to_bf16()'),
    (lambda l: l.to_fp16(init_scale=8., max_skips=3), PrecisionChoice(BF16), 'learn.to_bf16(max_skips=3)'),
    (lambda l: l.to_fp16(init_scale=8., max_skips=3), PrecisionChoice(FP16, fp32_modules=('0',)),
     "learn.to_fp16(init_scale=8.0, fp32_modules=['0'], max_skips=3)"),
    (lambda l: l.to_amp(init_scale=8.), PrecisionChoice(FP16), 'learn.to_fp16(init_scale=8.0)'),
    (lambda l: l.to_fp16(loss_scale=8.), PrecisionChoice(FP16, True), "learn.to_half_weights(dtype='fp16', loss_scale=8.0)"),
    (lambda l: l.to_half_weights('fp16', loss_scale=8.), PrecisionChoice(BF16, True), "learn.to_half_weights(dtype='bf16')"),
    (lambda l: l.to_half_weights(master_weights=False), PrecisionChoice(FP16, True), "learn.to_half_weights(dtype='fp16')"),
    (lambda l: l.to_half_weights(fp32_modules=nn.BatchNorm1d), PrecisionChoice(BF16), "learn.to_bf16(fp32_modules=['1'])"),
    (lambda l: l.to_fp16(), PrecisionChoice(), None)])
def test_a_precision_is_set_by_the_call_that_a_user_would_make(own, choice, call):
    learn = learner()
    if own: own(learn)
    cb = use_choice(learn, choice)
    assert cb is learn.precision and (call is None if cb is None else cb.as_call() == call)


def test_the_loss_scale_stays_and_so_does_a_callback_that_fits():
    learn = learner().to_fp16(scaler=torch.amp.GradScaler('cpu', init_scale=64., growth_interval=2))
    learn.fit(1)
    cb, scale = learn.precision, learn.precision.scale
    assert scale != 64. and use_choice(learn, PrecisionChoice(FP16)) is cb
    assert use_choice(learn, PrecisionChoice(FP16, fp32_modules=('0',))) is not cb and learn.precision.scale == scale
