"What a comparison recommends, what `to_amp(measure=True)` selects, and the call that they print."

import math
from functools import partial

import pandas as pd
import pytest, torch
from fastai.optimizer import SGD
from torch import nn

from fastxtend_amp import is_depthwise, is_grouped
from fastxtend_amp.insight.choices import Choice, own_precision
from fastxtend_amp.insight.recommendation import recommend, tolerance
from fastxtend_amp.precisions import BF16, FP16, Precision, find_precision
from fastxtend_amp.training.current import precision_callback
from helpers import OPTIMIZERS, Attentive, learner, linear, mlp, params
from models import Act, Breaks, Costs, Gives, InStep, Unpacks, convs, fills
from states import bits, rich

LOW = ('bf16', 'fp16')  # named, as CPUs may emulate both
NAN = math.nan

pytestmark = pytest.mark.usefixtures('support')


# -- the recommendation


def table_of(**rows):
    base = {'support': 'native', 'steps': 50, 'loss': 1.0, 'loss difference': 0.0, 'skipped': 0, 'weights moved': 1.0}
    base |= {'note': '', **speeds(1.0, 1.0, 1.0)}
    faster = base | speeds(1.9, 2.0, 2.1)
    table = pd.DataFrame({'fp32': base, **{name: faster | changes for name, changes in rows.items()}}).T
    table['loss'] += table['loss difference']
    return table


def speeds(*values):
    return dict(zip(['speed-up low', 'speed-up', 'speed-up high'], values))


ROWS = [
    dict(bf16={}, fp16=speeds(2.9, 3.0, 3.1)),
    {'bf16, Conv in fp32': speeds(2.0, 2.04, 2.1), 'fp16': speeds(2.1, 2.13, 2.2)},
    dict(bf16={}, fp16={**speeds(2.9, 3.0, 3.1), 'loss difference': 0.2}),
    dict(bf16={'loss difference': 0.1}),
    dict(fp16={'skipped': 25}),
    dict(fp16=speeds(1.93, 2.03, 2.13), bf16={}),
    dict(fp16={'skipped': 26}),
    dict(bf16=speeds(1.02, 1.03, 1.05)),
    dict(bf16=speeds(1.05, 1.06, 1.07)),
    dict(fp16=speeds(0.17, 0.5, 1.48)),
    {'bf16': {}, 'bf16, channels last': {'support': 'dropped', 'loss difference': NAN, **speeds(2.2, 2.3, 2.4)}},
]


def test_recommendations(expected):
    tolerated = tolerance([1.0], [1.05, 0.95, 1.02])  # fp32 trained four times: a loss up to .11 higher matches
    texts = []
    for rows in ROWS:
        changes = {name: (name == 'fp16', name.count(',')) for name in rows}
        best, reason = recommend(table_of(**rows), tolerated, changes)
        texts.append(f'# {rows}\n{best}: {reason}\n')
    assert '\n'.join(texts) == expected('recommendations')


@pytest.mark.parametrize(
    'losses, seeds, amount',
    [
        ([1.0], [1.1, NAN], 7.7 * 0.1 / 2**0.5),
        ([1.0], [1.0], 0.01),  # 1% of the loss
        ([16.0, 1e-5], [1e-5], 0.016),  # a thousandth of what it fell by
        ([100.2, 100.0], [100.0], 0.1),  # half of its range
        ([1.0], [], 0.1),  # a tenth, as nothing shows the spread
    ],
)
def test_the_loss_that_is_tolerated(losses, seeds, amount):
    assert tolerance(losses, seeds)[0] == pytest.approx(amount, rel=1e-2)


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_channels_last_also_converts_the_optimizer(opt):
    "In the middle of a training: fused optimizers step through memory, whatever its order is."
    row, found = 'bf16, channels last', []
    for by in ('nothing', 'apply', "fastai's method"):
        torch.manual_seed(0)
        learn = learner(convs(), opt_func=OPTIMIZERS[opt]).to_bf16()
        learn.fit(2)
        if by == "fastai's method":
            learn.to_channelslast()
        if by == 'apply':
            r = learn.compare_precision(n_steps=7, n_seeds=0, max_seconds=1000)
            assert r.calls[row] == 'learn.to_bf16().to_channelslast()'
            assert r.calls['fp32, channels last'] == 'learn.to_fp32().to_channelslast(use_amp=False)'
            assert r.apply(learn, row).channels_last
        learn.fit(2)
        assert learn.model[1].weight.is_contiguous() == (by == 'nothing')
        found.append(params(learn))
    for converted in found[1:]:
        torch.testing.assert_close(converted, found[0], rtol=1e-5, atol=1e-3)


def test_text_and_plot(expected, support):
    import matplotlib.pyplot as plt

    support(tf32='native')
    always_1 = lambda p, y: 1 + p.mean() - p.mean().detach()  # on any machine, and yet it has a gradient
    learn = learner(Breaks(fills), loss_func=always_1, cbs=Costs(dict(bf16=12.34, tf32=0.1)))
    r = learn.compare_precision([*LOW, 'tf32'], n_steps=8)
    assert f'{r!r}\n' == expected('comparison')
    assert '<code>learn.to_bf16()</code>' in r._repr_html_()
    with pytest.raises(ValueError, match=r"precision='fp8' cannot be used: .* one of \['fp32', 'bf16', 'fp16'"):
        r.apply(learn, 'fp8')
    curves, bars = r.plot()
    assert [t.get_text() for t in curves.get_legend().get_texts()] == ['fp32, other seeds', *r.losses]
    assert len(curves.lines) == 7 and [t.get_text() for t in bars.texts] == ['1.00', '12.34', '-', '-']
    plt.close('all')


# -- `to_amp(measure=True)`


CHOICES = {  # speed-ups, the model, arguments of the learner
    'bf16': (dict(bf16=2.0), mlp),
    'fp16': (dict(fp16=3.0), mlp),
    'nothing is faster': ({}, mlp),
    'fp16 overflows': (dict(bf16=2.0, fp16=9.0), lambda: Breaks(lambda h: h * math.inf)),
    'fp16 does not run': (dict(bf16=2.0, fp16=9.0), lambda: Breaks(fills)),
    'fp32 is not finite': ({}, lambda: nn.Sequential(nn.Linear(6, 1), Act(torch.log))),
    'no weight is trained': ({}, mlp, dict(splitter=lambda _: [*mlp().parameters()])),
    'compiled': (dict(bf16=2.0), lambda: nn.Sequential(torch.compile(nn.Linear(6, 1), backend='eager'))),
}


def test_what_is_chosen_and_printed(expected, capsys):
    texts = []
    for name, (speeds, make, *more) in CHOICES.items():
        torch.manual_seed(0)
        costs = Costs(speeds, step=0.097)  # a round number would be on the edge of one more step
        learn = learner(make(), cbs=costs, **dict(*more))
        assert learn.to_amp(measure=True) is learn
        decision, cb = learn.precision_decision, precision_callback(learn)
        precision = decision.choices[decision.recommended].precision
        if type(precision) is Precision:
            assert cb is None
        else:
            assert repr(precision) == repr(cb.precision) and cb.precision is not precision
        texts.append(f"# {name}: {', '.join(decision.table.index)}\n{capsys.readouterr().out}")
    assert '\n'.join(texts) == expected('measured_choice')


def test_without_a_native_precision_there_is_nothing_to_measure(support, capsys):
    support(bf16='emulated', fp16='emulated')
    learn = learner().to_bf16().to_amp(measure=True)
    assert precision_callback(learn) is None
    assert 'Selected: fp32. Nothing else was compared. This device runs nothing else' in capsys.readouterr().out
    assert "learn.compare_precision('bf16')" in learn.compare_precision().notes[0]


def test_a_precision_whose_gradients_vanish_is_not_chosen():
    "Beside a large constant in the loss, which hides that nothing trains."

    def vanish(l):
        if precision_callback(l):
            torch._foreach_zero_([p.grad for p in l.model.parameters()])

    loss = lambda p, y: nn.functional.mse_loss(p, y) + 100.0
    cbs = [Costs(dict(bf16=2.0)), InStep('after_backward', vanish, 5)]
    r = learner(linear(), loss_func=loss, opt_func=SGD, lr=0.01, cbs=cbs).compare_precision('bf16')
    assert r.recommended == 'fp32' and 'its weights moved only 0%' in r.reason


def test_modules_that_must_stay_in_fp32_do_in_a_model_whose_output_a_callback_unpacks():
    learn = learner(Gives(Attentive()), cbs=[Costs(dict(fp16=3.0)), Unpacks()]).to_fp16(max_skips=7)
    learn.to_amp(measure=True)
    calls, cb = learn.precision_decision.calls, learn.mixed_precision
    assert calls['fp16'] == "learn.to_fp16(init_scale=4096, fp32_modules=['net.attn'], max_skips=7)"
    assert cb.fp32_module_names == ['net.attn'] and cb.max_skips == 7
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
    assert bits(learn) == before
    interrupts = False
    after = bits(learn.to_amp(measure=True))
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {'cbs', 'mixed_precision', 'precision_decision'}


# -- the call that a report or comparison recommends


@pytest.mark.parametrize(
    'own, name, written',
    [
        ('learn.to_fp16(init_scale=8.0, max_skips=3)', 'bf16', 'learn.to_bf16(max_skips=3)'),
        ('learn.to_fp16(loss_scale=8.0, flat_master=True)', 'bf16', 'learn.to_bf16(flat_master=True)'),
        (
            'learn.to_bf16(master_weights=False, fp32_modules=nn.BatchNorm1d)',
            'fp16',
            "learn.to_fp16(fp32_modules=['1'])",
        ),
        ("learn.to_bf16(on_overflow='raise')", 'fp32', 'learn.to_fp32()'),
    ],
)
def test_a_precision_has_the_arguments_of_the_learners_own_that_it_accepts(own, name, written):
    learn = learner()
    exec(own, {'learn': learn, 'nn': nn})
    call = Choice.for_learner(learn, find_precision(name))
    assert str(call) == written
    call.apply(learn)
    assert repr(own_precision(learn)) == repr(call.precision)


def test_the_advised_loss_scale_replaces_that_of_the_learner():
    scaler = torch.amp.GradScaler('cpu', init_scale=64.0, growth_interval=1)
    scaled, before = learner().to_fp16(scaler=scaler), scaler.state_dict()
    assert scaled.compare_precision('fp16', n_steps=3).table['final scale']['fp16'] > 64
    assert scaler.state_dict() == before
    assert Choice.for_learner(scaled, FP16, ['0']).precision.changed.keys() == {'scaler', 'fp32_modules'}
    advised = lambda learn: str(Choice.for_learner(learn, FP16, (), 4.0))
    assert advised(scaled) == 'learn.to_fp16(init_scale=4.0)'  # instead of the user's own scaler
    assert advised(learner().to_fp16(loss_scale=8.0)) == 'learn.to_fp16(loss_scale=4.0)'
    assert advised(learner().to_fp16(enabled=False)) == 'learn.to_fp16(init_scale=4.0)'


def test_a_report_on_bf16_weights_sees_their_rounding():
    a, b = (learner().to_bf16(master_weights=given).precision_report('bf16') for given in (True, False))
    assert a.table['error'].tolist() == b.table['error'].tolist()


def test_a_report_runs_the_modules_in_fp32_that_it_prints():
    "The other arguments concern steps, which it does not take."
    seen = set()
    learn = learner(cbs=InStep('after_pred', lambda l: seen.add(repr(own_precision(l)))))
    learn.to_bf16(skip_nonfinite=True, fp32_modules='0')
    printed = learn.precision_report('bf16').verdicts['bf16'].call
    assert seen == {'learn.to_fp32()', "learn.to_bf16(fp32_modules=['0'])"}
    assert printed == "learn.to_bf16(fp32_modules=['0'], skip_nonfinite=True)"


def test_depthwise_and_grouped_convolutions():
    depthwise = [nn.Conv2d(8, 16, 3, groups=8), nn.ConvTranspose1d(8, 8, 3, groups=8)]
    layers = [*depthwise, nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(1, 8, 3), nn.LayerNorm(8)]
    assert [*filter(is_depthwise, layers)] == depthwise and [*filter(is_grouped, layers)] == [layers[2]]
    own = type('Embedding', (nn.Module,), {})  # not that of nn
    call = "learn.to_bf16(fp32_modules=[is_depthwise, nn.LayerNorm, Embedding, 'a'])"
    assert repr(BF16(fp32_modules=[is_depthwise, nn.LayerNorm, own, 'a'])) == call
    assert repr(BF16(fp32_modules=partial(is_depthwise))) == 'learn.to_bf16(fp32_modules=fp32_modules)'
    assert repr(BF16(fp32_modules=['<mask>'])) == "learn.to_bf16(fp32_modules=['<mask>'])"
