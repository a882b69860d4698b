"`to_amp(measure=True)`: the fastest precision whose loss matches fp32; only the learner's precision changes."

import copy, math, pickle

import pytest, torch
from fastai.learner import load_learner
from fastai.optimizer import SGD
from torch import nn

from fastxtend_amp.insight.calls import Call, advised, like_own, own_precision
from fastxtend_amp import is_depthwise, is_grouped
from fastxtend_amp.precisions import BF16, FP16, Precision, find_precision
from helpers import Attentive, Data, learner, loaders, mlp, precision_callback, set_support
from states import Act, Costs, Gives, InStep, Unpacks, bits, fills, rich


@pytest.fixture(autouse=True)
def native(monkeypatch, sleeps):
    set_support(monkeypatch, lambda name: 'native' if name in ('bf16', 'fp16') else 'unsupported')


class Breaks(nn.Linear):
    "Its output in fp16 is changed by `f`."

    def __init__(self, f):
        super().__init__(6, 1)
        self.f = f

    def forward(self, x):
        out = super().forward(x)
        return self.f(out) if out.dtype is torch.float16 else out


CHOICES = {  # speed-ups, and what makes the learner
    'bf16': (dict(bf16=2.0), learner),
    'fp16': (dict(fp16=3.0), learner),
    'nothing is faster': ({}, learner),
    '16-bit weights': (dict(bf16=2.0), lambda **kw: learner(**kw).to_half_weights()),
    'fp16 overflows': (dict(bf16=2.0, fp16=9.0), lambda **kw: learner(Breaks(lambda h: h * math.inf), **kw)),
    'fp16 does not run': (dict(bf16=2.0, fp16=9.0), lambda **kw: learner(Breaks(fills), **kw)),
    'fp32 is not finite': ({}, lambda **kw: learner(nn.Sequential(nn.Linear(6, 1), Act(torch.log)), **kw)),
    'no weight is trained': ({}, lambda **kw: learner(model := mlp(), splitter=lambda _: [*model.parameters()], **kw)),
    'compiled': (
        dict(bf16=2.0),
        lambda **kw: learner(nn.Sequential(torch.compile(nn.Linear(6, 1), backend='eager')), **kw),
    ),
}


def test_what_is_chosen_and_printed(expected, capsys):
    texts = []
    for name, (speeds, make) in CHOICES.items():
        torch.manual_seed(0)
        learn = make(cbs=Costs(speeds, step=0.097))  # a round number would be on the edge of one more step
        assert learn.to_amp(measure=True) is learn
        decision, cb = learn.precision_decision, precision_callback(learn)
        precision = decision.rows[decision.recommended].precision
        assert cb is None and precision.kind is Precision or precision == cb.precision is not precision
        texts.append(f"# {name}: {', '.join(decision.table.index)}\n{capsys.readouterr().out}")
    assert '\n'.join(texts) == expected('measured_choice')


def test_without_a_native_precision_there_is_nothing_to_measure(monkeypatch, capsys):
    learn = learner(cbs=Costs(dict(bf16=2.0)))
    assert learn.to_amp(measure=True).precision_decision
    set_support(monkeypatch, lambda name: 'emulated')
    capsys.readouterr()
    learn.to_amp(measure=True)
    assert precision_callback(learn) is None and learn.precision_decision.recommended == 'fp32'
    assert 'Selected: fp32. Nothing else was compared. This device runs nothing else' in capsys.readouterr().out
    alone = learn.compare_precision()
    assert alone.recommended == 'fp32' and "learn.compare_precision('bf16')" in alone.notes[0]


def test_more_time_decides_what_little_did_not(sleeps):
    for max_seconds, chosen in ((9.0, 'fp32'), (300.0, 'bf16')):
        start, learn = sleeps.now, learner(cbs=Costs(dict(bf16=1.3, fp16=0.5), noise=0.5))
        learn.to_amp(measure=True, max_seconds=max_seconds)
        assert learn.precision_decision.recommended == chosen, learn.precision_decision
        assert sleeps.now - start < max_seconds + 1


SPOILED = {  # in low precision: at an event, what happens; a constant in the loss; what is said of it
    'nothing': ('after_step', 1.0, 0.0, ''),
    'nothing, loss below 0': ('after_step', 1.0, -0.35, ''),
    'weights shrink': ('after_step', 0.95, 0.0, 'above that of fp32'),
    'weights shrink, loss below 0': ('after_step', 0.95, -0.35, 'above that of fp32'),
    'gradients vanish, a large loss': ('after_backward', 0.0, 100.0, 'its weights moved only 0%'),
}


@pytest.mark.parametrize('event, factor, constant, words', SPOILED.values(), ids=SPOILED)
def test_a_precision_that_trains_worse_is_not_chosen(event, factor, constant, words):
    "A linear regression without noise, whose loss falls to a constant."

    def spoil(l):
        if precision_callback(l):
            torch._foreach_mul_([p.data if event == 'after_step' else p.grad for p in l.model.parameters()], factor)

    x = torch.randn(160, 6, generator=torch.Generator().manual_seed(0))
    dls = loaders(train=Data(x, x[:, :1] * 2 - x[:, 1:2]), bs=16)
    loss = lambda p, y: nn.functional.mse_loss(p, y) + constant
    cbs = [Costs(dict(bf16=2.0)), InStep(event, spoil, 5)]
    found = learner(nn.Linear(6, 1), dls, loss, opt_func=SGD, lr=0.1, cbs=cbs).compare_precision('bf16')
    assert found.recommended == ('fp32' if words else 'bf16') and words in found.reason, found


def test_modules_that_must_stay_in_fp32_do_in_a_model_whose_output_a_callback_unpacks():
    learn = learner(Gives(Attentive()), cbs=[Costs(dict(fp16=3.0)), Unpacks()]).to_fp16(max_skips=7)
    learn.to_amp(measure=True)
    decision, cb = learn.precision_decision, precision_callback(learn)
    assert decision.calls['fp16'] == "learn.to_fp16(init_scale=4096, fp32_modules=['net.attn'], max_skips=7)"
    assert cb.amp_mode == 'fp16' and cb.fp32_module_names == ['net.attn'] and cb.max_skips == 7 and cb.scale == 4096
    learn.fit(2)
    assert sum(cb.skips) == 0


def test_the_learner_is_not_modified_but_for_its_precision():
    def stop(l):
        if interrupts and l.iter == 3:
            raise KeyboardInterrupt

    interrupts, learn = True, rich()
    learn.add_cbs([Costs(dict(bf16=3.0)), InStep('after_step', stop)])
    before = bits(learn)
    with pytest.raises(KeyboardInterrupt):
        learn.to_amp(measure=True)
    assert bits(learn) == before and learn.precision_decision is None
    interrupts = False
    after = bits(learn.to_amp(measure=True))
    assert learn.mixed_precision.amp_mode == 'bf16'
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {'cbs', 'mixed_precision', 'precision_decision'}


# -- the precisions that are compared

HALF = 'learn.to_half_weights('


@pytest.mark.parametrize(
    'own, name, written',
    [
        (lambda l: l.to_fp16(init_scale=8.0, max_skips=3), 'bf16', 'learn.to_bf16(max_skips=3)'),
        (lambda l: l.to_fp16(init_scale=8.0), 'fp16', 'learn.to_fp16(init_scale=8.0)'),
        (lambda l: l.to_fp16(loss_scale=8.0), 'half_weights', f'{HALF})'),
        (lambda l: l.to_half_weights('fp16', 8.0), 'half_weights', f"{HALF}amp_mode='fp16', loss_scale=8.0)"),
        (lambda l: l.to_half_weights(master_weights=False), 'half_weights', f'{HALF}master_weights=False)'),
        (lambda l: l.to_half_weights(fp32_modules=nn.BatchNorm1d), 'bf16', "learn.to_bf16(fp32_modules=['1'])"),
        (lambda l: l.to_bf16(on_overflow='raise'), 'fp32', 'learn.to_fp32()'),
        (lambda l: l.to_bf16(on_overflow='raise'), 'bf16', "learn.to_bf16(on_overflow='raise')"),
    ],
)
def test_a_precision_has_the_arguments_of_the_learners_own_that_it_accepts(own, name, written):
    learn = own(learner())
    call = Call.of(learn, like_own(learn, find_precision(name)))
    assert str(call) == written
    call.apply(learn)
    assert own_precision(learn) == call.precision


def test_the_advised_loss_scale_replaces_that_of_the_learner():
    scaler = torch.amp.GradScaler('cpu', init_scale=64.0, growth_interval=1)
    scaled, before = learner().to_fp16(scaler=scaler), scaler.state_dict()
    assert scaled.compare_precision('fp16', n_steps=3).table['final scale']['fp16'] > 64
    assert scaler.state_dict() == before
    assert like_own(scaled, FP16, (), 4.0).changed == {'init_scale': 4.0}  # instead of the user's own scaler
    assert like_own(scaled, FP16, ['0']).changed.keys() == {'scaler', 'fp32_modules'}
    static = advised(learner().to_fp16(loss_scale=8.0), FP16, init_scale=4.0)
    assert str(static) == 'learn.to_fp16(loss_scale=4.0)'


def test_a_report_runs_the_precision_that_it_prints():
    seen = set()
    learn = learner(
        cbs=InStep('after_pred', lambda l: seen.add(repr(precision_callback(l) and l.mixed_precision.precision)))
    )
    learn.to_bf16(skip_nonfinite=True, fp32_modules='0')
    printed = learn.precision_report('bf16').verdicts['bf16'].call
    assert seen == {'None', printed} and printed == "learn.to_bf16(fp32_modules=['0'], skip_nonfinite=True)"


def test_depthwise_and_grouped_convolutions(tmp_path):
    "The predicates print as their names, and can be copied, pickled and exported."
    depthwise = [nn.Conv2d(8, 16, 3, groups=8), nn.ConvTranspose1d(8, 8, 3, groups=8)]
    grouped, others = [nn.Conv2d(8, 8, 3, groups=2)], [nn.Conv2d(1, 8, 3), nn.LayerNorm(8)]
    for kind, found in ((is_depthwise, depthwise), (is_grouped, grouped)):
        assert [*filter(kind, depthwise + grouped + others)] == found
        assert pickle.loads(pickle.dumps(kind)) is copy.deepcopy(kind) is kind
    own = type('Embedding', (nn.Module,), {})  # not that of nn
    call = "learn.to_bf16(fp32_modules=[is_depthwise, nn.LayerNorm, Embedding, 'a'])"
    assert repr(BF16(fp32_modules=[is_depthwise, nn.LayerNorm, own, 'a'])) == call
    model = nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Conv1d(6, 6, 1, groups=6), nn.Flatten(), nn.Linear(6, 1))
    learn = learner(model, path=tmp_path).to_bf16(fp32_modules=is_depthwise)
    learn.fit(1)
    learn.export()
    assert load_learner(tmp_path / 'export.pkl').model[1].groups == 6
