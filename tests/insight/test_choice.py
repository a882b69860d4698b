"The measured choice: the fastest precision that trains as fp32 does, and a learner as it was but for the callback."
import warnings

import pytest, torch
from fastai.callback.training import GradientAccumulation
from torch import nn

from fastxtend_amp import HalfWeights, mode
from fastxtend_amp.insight import choices, compare
from fastxtend_amp.insight.choice import measured_choice
from helpers import *
from states import bits, rich


@pytest.fixture
def speeds(monkeypatch):
    "Replaces the speeds that are measured: samples per second by the name of the precision; others as fast as fp32."
    known, turn = {}, compare._Comparison._turn
    def replaced(self, run, steps):
        turn(self, run, steps)
        if run.speeds: run.speeds[-1] = known.get(run.name, 100.) * (1 + .01 * (len(run.speeds) % 3))
    monkeypatch.setattr(compare._Comparison, '_turn', replaced)
    for module in (choices, compare):
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
    if 'half weights' in known: learn.to_half_weights(cast_once=True)
    decision = measured_choice(learn, n_steps=16)
    assert decision.mode == chosen and learn.precision_decision is decision
    tried = ['fp32', 'bf16', 'fp16'] + ['half weights', 'half weights fp16'] * ('half weights' in known)
    assert list(decision.table.index) == tried                   # half weights are autocast's casts, unless the learner has more
    cb = learn.precision
    if chosen == 'fp32': assert cb is None
    else:
        assert cb.decision is decision and decision.choice.mode == cb.amp_mode
        assert isinstance(cb, HalfWeights) == chosen.startswith('half') and getattr(cb, 'cast_once', True)
    said = capsys.readouterr().out
    assert said.startswith(f'{chosen}: ') and said.count('\n') == 1 and 'Measured in' in said
    learn.fit(1)


def test_modules_that_must_stay_in_fp32_do(speeds):
    speeds.update(fp16=300.)
    learn = learner(Attentive()).to_fp16(init_scale=1024., max_skips=7)
    decision = measured_choice(learn, modes=('fp32', 'fp16'), n_steps=16)
    assert decision.mode == 'fp16' and decision.choice.fp32_modules == ('attn',) and 'attn' in decision.call
    assert list(learn.precision._fp32_modules.forwards) == ['attn'] and learn.precision.max_skips == 7
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        learn.fit(2)
    assert not [w for w in found if 'goes wrong' in str(w.message)] and learn.precision.n_skipped == 0


def test_a_mode_that_does_not_work_is_not_chosen_however_fast(speeds):
    class Overflows(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return out * (float('inf') if torch.is_autocast_enabled('cpu')
                          and torch.get_autocast_dtype('cpu') is torch.float16 else 1.)
    speeds.update(fp16=900.)
    decision = measured_choice(learner(nn.Sequential(nn.Linear(6, 4), Overflows(4, 1))), modes=('fp32', 'fp16'),
                               n_steps=10)
    assert decision.mode == 'fp32' or decision.choice.fp32_modules        # kept in fp32 it works


@pytest.mark.parametrize('error', [KeyboardInterrupt, RuntimeError])
def test_interrupted_it_leaves_the_learner_as_it_was(monkeypatch, error):
    learn, turns = rich(), []
    before, turn = bits(learn), compare._Comparison._turn
    def interrupted(self, run, steps):
        turns.append(run.name)
        if len(turns) == 3: raise error('now')
        turn(self, run, steps)
    monkeypatch.setattr(compare._Comparison, '_turn', interrupted)
    monkeypatch.setattr(compare._Comparison, '_try', lambda self, run, f, *args: f(*args))
    with pytest.raises(error): measured_choice(learn, n_steps=8)
    after = bits(learn)
    for key in before: assert after[key] == before[key], key


def test_a_gain_smaller_than_the_spread_is_not_taken_and_said(speeds, capsys, monkeypatch):
    "bf16 is 1.4 times as fast in four turns of seven and 0.7 times in three."
    turn = compare._Comparison._turn
    def noisy(self, run, steps):
        turn(self, run, steps)
        if run.name != 'fp32' and run.speeds: run.speeds[-1] = 70. if len(run.speeds) % 2 else 140.
    monkeypatch.setattr(compare._Comparison, '_turn', noisy)
    for _ in range(2):
        assert measured_choice(learner(), modes=('fp32', 'bf16'), n_steps=22).mode == 'fp32'
        assert 'fp32: bf16: not reliably faster than fp32 here' in capsys.readouterr().out


@pytest.mark.parametrize('in_place', [False, True])
def test_a_compiled_model_stays_compiled(speeds, in_place):
    speeds.update(bf16=200.)
    model = mlp()
    if in_place: model.compile(backend='aot_eager')
    else: model = torch.compile(model, backend='aot_eager')
    learn = learner(model)
    learn.fit(1, .01)
    before = params(learn)
    decision = measured_choice(learn, modes=('fp32', 'bf16', 'half weights'), n_steps=4)
    assert decision.mode == 'bf16' and list(decision.table['steps']) == [4] * 3 and same(params(learn), before)
    assert learn.model is model
    learn.fit(1, .01)
    torch._dynamo.reset()


@pytest.mark.parametrize('at', [1, 4, 12, 24, 60, 100])
def test_an_interrupt_in_the_model(speeds, at):
    "While the report runs it (the first ones) and while copies are trained."
    calls = []
    class Counts(nn.Linear):
        def forward(self, x):
            calls.append(at)
            if len(calls) == at: raise KeyboardInterrupt
            return super().forward(x)
    learn = learner(nn.Sequential(Counts(6, 4), nn.Linear(4, 1)))
    learn.create_opt()
    before = bits(learn)
    with pytest.raises(KeyboardInterrupt): measured_choice(learn, n_steps=40)
    after = bits(learn)
    for key in before: assert after[key] == before[key], key
    assert learn.precision is None and learn.precision_decision is None


def test_but_for_the_callback_the_learner_is_as_it_was():
    learn = rich()
    before = bits(learn)
    measured_choice(learn, n_steps=4)
    after = bits(learn)
    for key in ('grads', 'metrics', 'dls', 'rng', 'autocast', 'opt', 'lists'): assert after[key] == before[key], key


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
    assert learn.precision.mode == 'bf16'
    assert learn.to_amp().precision.amp_mode == 'auto'
