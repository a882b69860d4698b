"""Comparisons: each precision trains as in a fit of its own, in alternating rounds; what is clearly slower leaves them.

`to_amp(measure=True)` selects the fastest whose loss matches fp32.
"""

import math, time
from functools import partial

import numpy as np
import pandas as pd
import pytest, torch
from fastai.callback.core import CancelEpochException, CancelFitException, CancelTrainException
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import SGD
from torch import nn

from fastxtend_amp import is_depthwise, is_grouped
from fastxtend_amp.insight.choices import Choice, own_precision
from fastxtend_amp.insight.recommendation import recommend, tolerance
from fastxtend_amp.precisions import BF16, FP16, Precision, find_precision
from fastxtend_amp.training.current import precision_callback
from helpers import OPTIMIZERS, At, Attentive, dataset, errors_of, learner, linear, loaders, mlp, params, set_support
from states import ASK, Act, Costs, Gives, InStep, Unpacks, bits, fills, rich, shuffled

LOW = ('bf16', 'fp16')  # named, as CPUs may emulate both
NAN = math.nan


@pytest.fixture(autouse=True)
def support(monkeypatch, sleeps):
    "bf16 and fp16 are native unless a test says more; nothing depends on the machine's speed."

    def set_to(**more):
        set_support(monkeypatch, lambda name: {**dict.fromkeys(LOW, 'native'), **more}.get(name, 'unsupported'))

    set_to()
    torch.manual_seed(0)
    return set_to


def losses_of(learn, n_epoch, *args):
    "Train it by `fit`; return the loss of each step."
    seen = []
    learn.fit(n_epoch, *args, cbs=At('after_batch', lambda l: l.training and seen.append(l.loss.item())))
    return seen


# -- what is trained


@pytest.mark.parametrize('name, opt', [('bf16', 'adam'), ('fp16', 'adam'), ('fp16', 'fused adamw')])
def test_each_precision_trains_as_in_a_fit_of_its_own(name, opt):
    alone, low = (learner(opt_func=OPTIMIZERS[opt]) for _ in range(2))
    getattr(low, f'to_{name}')()
    r = learner(opt_func=OPTIMIZERS[opt]).compare_precision([name], n_steps=12, n_seeds=0, lr=0.01)
    assert r.losses == {'fp32': losses_of(alone, 2, 0.01), name: losses_of(low, 2, 0.01)}
    assert name == 'bf16' or r.table['final scale']['fp16'] == low.mixed_precision.scale
    found = r.table['loss']
    assert found.to_dict() == {n: np.mean(losses[-2:]) for n, losses in r.losses.items()}  # of the last fifth
    assert (r.table['loss difference'] == found - found['fp32']).all()


@pytest.mark.parametrize('own', ['to_fp16', 'to_bf16', 'to_fp32'])
def test_each_row_runs_in_the_precision_it_names_with_its_settings_of_the_process(own, support):
    support(tf32='native')
    seen, matmul = set(), torch.backends.cuda.matmul
    before = matmul.fp32_precision
    note = lambda l: seen.add((own_precision(l).name, matmul.fp32_precision, l.pred.dtype))
    learn = getattr(learner(linear(), cbs=InStep('after_pred', note, 5)), own)()
    learn.compare_precision([*LOW, 'tf32'], n_steps=8, n_seeds=1)
    low = {('bf16', before, torch.bfloat16), ('fp16', before, torch.float16)}
    assert seen == {('fp32', before, torch.float32), ('tf32', 'tf32', torch.float32), *low}


def test_random_numbers_go_on_from_round_to_round_and_batches_are_clones():
    "Dropout, a callback that writes into the batch, and gradients of several batches."
    x, losses = loaders().train_ds.tensors[0].clone(), []
    for run in (lambda l: l.compare_precision('bf16', n_steps=6, n_seeds=0).losses['fp32'], lambda l: losses_of(l, 1)):
        cbs = [InStep('before_batch', lambda l: l.xb[0].mul_(2)), GradientAccumulation(8)]
        learn = learner(Attentive(gain=1.0, drop=0.5), cbs=cbs)
        torch.manual_seed(1)
        losses.append(run(learn))
        assert torch.equal(learn.dls.train_ds.tensors[0], x)
    assert losses[0] == losses[1]


def test_the_same_numbers_each_time_and_others_from_other_seeds():
    learn = learner(dls=shuffled())
    a, b = (learn.compare_precision(LOW, n_steps=8, n_seeds=2) for _ in range(2))
    assert a.losses == b.losses and a.seed_losses == b.seed_losses
    assert len({*map(str, [a.losses['fp32'], *a.seed_losses])}) == 3


def test_few_kept_batches(monkeypatch):
    monkeypatch.setattr('fastxtend_amp.insight.compare._BYTES', 350)  # a batch is 4 * 7 * 4 = 112 bytes
    r = learner().compare_precision('bf16', n_steps=8, n_seeds=0)
    plain = learner()
    plain.dls.train.n = 16
    assert r.losses['fp32'] == losses_of(plain, 2)


# -- what a copy sees


def test_a_copy_begins_one_fit_of_one_epoch_with_the_same_random_numbers():
    "Callbacks divide by the number of epochs, as pruning does, or begin in `before_train`, as fastxtend's do."
    seen = []
    begun = InStep('before_fit', lambda l: seen.append(1 / l.n_epoch))
    trains = InStep('before_train', lambda l: seen.extend([l.n_iter, torch.rand(1)]))
    learner(cbs=[begun, trains]).compare_precision('bf16', n_steps=12, n_seeds=0)
    assert seen == [1.0, 12, seen[2]] * 2


@pytest.mark.parametrize('error', [CancelFitException, CancelEpochException, CancelTrainException])
@pytest.mark.parametrize('event', ['before_batch', 'after_loss', 'after_step'])
def test_a_callback_that_ends_a_fit_early_ends_a_batch(error, event):
    def ends(l):
        if l.training and l.iter % 2 == 0:
            raise error()

    learn = learner(cbs=InStep(event, ends))
    assert all(ask(learn) is not None for ask in ASK.values())


def test_a_loader_that_can_be_iterated_once():
    learn = learner(dls=loaders(train=zip(*dataset().tensors)))
    assert (learn.compare_precision('bf16', n_steps=12, n_seeds=0).table['steps'] == 12).all()
    with pytest.raises(ValueError, match='(?s)needs at least one batch, .*used only once'):
        learn.compare_precision('bf16')


# -- errors


def with_phase(value):
    model = linear()
    model.phase = nn.Parameter(torch.tensor([value]))
    return model


def ends(l):
    raise CancelFitException


def out_of_memory(l):
    if precision_callback(l):
        raise torch.OutOfMemoryError('all copies are in memory at once')


class Huge(nn.ReLU):
    def __deepcopy__(self, memo):
        raise torch.OutOfMemoryError('a copy does not fit')


ERRORS = {
    'steps': lambda: learner().compare_precision(n_steps=0),
    'time': lambda: learner().compare_precision(max_seconds=0),
    'more than time to choose': lambda: learner().to_amp(measure=True, fp32_modules='0', max_skips=9),
    'no data': lambda: Learner(DataLoaders(), mlp(), nn.MSELoss()).compare_precision(),
    'no batches for a report': lambda: learner().precision_report(dl=[]),
    'no precisions': lambda: learner().precision_report(()),
    'precisions without autocast': lambda: learner().precision_report(['bf16', 'tf32']),
    'another device': lambda: learner().precision_report(device='xpu'),
    'no loss scales to plot': lambda: learner().to_fp16().mixed_precision.plot_scales(),
    'float64': lambda: learner(mlp().double()).precision_report(),
    'TorchScript': lambda: learner(torch.jit.script(mlp())).precision_report(),
    'frozen': lambda: learner(mlp().requires_grad_(False)).compare_precision(),
    'lazy': lambda: learner(nn.LazyLinear(1)).compare_precision(),
    'NaN': lambda: learner(linear().apply(lambda m: m.weight.data.fill_(NAN))).to_amp(measure=True),
    'complex NaN': lambda: learner(with_phase(complex(NAN, 0))).precision_report(),
    'a fit that ends before it begins': lambda: learner(cbs=InStep('before_fit', ends)).precision_report(),
    'in a fit': lambda: learner().fit(1, cbs=At('after_epoch', lambda l: l.compare_precision())),
    'fp32 fails': lambda: learner(nn.Linear(5, 1)).compare_precision(LOW),  # the data has six columns
    'memory of a copy': lambda: learner(nn.Sequential(linear(), Huge())).precision_report(),
    'memory': lambda: learner(cbs=InStep('before_batch', out_of_memory)).compare_precision(LOW, n_steps=4),
}


def test_errors(expected):
    assert errors_of(ERRORS) == expected('insight_errors')


@pytest.mark.filterwarnings('error')
def test_no_warning_of_what_happens_to_a_copy():
    shadows = InStep('before_batch', lambda l: setattr(l.in_step, 'lr', 0))  # as a GAN's callbacks do
    learn = learner(Attentive(), cbs=shadows).to_fp16(on_overflow='raise', max_skips=2)
    table = learn.compare_precision('fp16', n_steps=8, n_seeds=0).table
    assert table['skipped']['fp16'] == 8 and table['note']['fp16'] == ''


# -- speed and time


def convs(groups=1):
    "Convolutions of six channels, the second one in groups."
    pictures = Act(lambda x: x[..., None, None])
    return nn.Sequential(
        pictures, nn.Conv2d(6, 6, 2, padding=1), nn.Conv2d(6, 6, 2, groups=groups), nn.Flatten(), linear()
    )


class Breaks(nn.Linear):
    "Its output in fp16 is changed by `f`."

    def __init__(self, f):
        super().__init__(6, 1)
        self.f = f

    def forward(self, x):
        out = super().forward(x)
        return self.f(out) if out.dtype is torch.float16 else out


def measured(*speeds, step=0.1):
    "As on a CPU with native bf16."
    names = [
        'bf16',
        'fp32, channels last',
        'bf16, channels last',
        'bf16, depthwise in fp32',
        'bf16, depthwise in fp32, channels last',
    ]
    return dict(zip(names, speeds)), dict(step=step, noise=0.05)


MOBILENET = 1.03, 1.2, 0.97, 1.14, 1.37
torch.manual_seed(0)  # for the weights of these models
TIMED = {  # speed-ups; arguments of `Costs`; arguments of the comparison; the model
    'fp16 is far slower': (dict(bf16=1.5, fp16=0.01), {}, dict(max_seconds=60)),
    'fp16 is slower': (dict(bf16=1.15, fp16=0.8), dict(noise=0.1), dict(max_seconds=60)),
    'both are far slower': (dict(bf16=0.1, fp16=0.05), {}, dict(max_seconds=60)),
    'no time': ({}, {}, dict(precisions='bf16', max_seconds=1e-9)),
    'many steps': (dict(bf16=1.5), dict(step=0.02), dict(precisions='bf16', n_steps=2000, max_seconds=3)),
    'undecided, with steps of 2 seconds': (
        dict(bf16=0.8),
        dict(step=2.0, noise=0.3),
        dict(precisions='bf16', n_steps=50, max_seconds=60),
    ),
    'few steps': (dict(bf16=2.0), {}, dict(n_steps=2)),
    'no limit': (dict(bf16=2.0), {}, dict(max_seconds=math.inf)),
    'ResNet-18': (*measured(1.72, 1.11, 2.01), {}, convs()),
    'MobileNet': (*measured(*MOBILENET), {}, convs(6)),
    'in channels last already': (*measured(1.72), {}, convs().to(memory_format=torch.channels_last)),
    'without time for all': (*measured(*MOBILENET, step=2), {'max_seconds': 60}, convs(6)),
    'with time for the fastest': (*measured(*MOBILENET, step=2), {'max_seconds': 40}, convs(6)),
    'fp16 and TF32 do not run': (dict(bf16=2.0), {}, {'precisions': [*LOW, 'tf32']}, Breaks(fills)),
}


@pytest.mark.filterwarnings('error')  # as a mean of no losses gives
def test_rounds(expected, sleeps):
    "What is recommended, after how many steps and rounds, and in which time; what is far slower is dropped."
    texts = []
    for name, (speeds, costs, kwargs, *model) in TIMED.items():
        start, given = sleeps.now, dict(precisions='bf16' if model else LOW, n_steps=16, max_seconds=1000)
        r = learner(*model, cbs=Costs(speeds, **costs)).compare_precision(**{**given, **kwargs})
        table = r.table[['steps', 'rounds', 'speed-up', 'note']].assign(loss=r.table['loss'].notna())
        seconds = f'{sleeps.now - start:.1f} s, other seeds: {len(r.seed_losses)}'
        texts += [f'# {name}: {r.recommended}: {r.reason}', seconds, table.to_string(float_format='%.2f'), '']
    assert '\n'.join(texts) == expected('comparison_rounds')


def test_what_a_fit_does_once_is_not_timed_in_each_round(sleeps, monkeypatch):
    monkeypatch.setattr(BF16, 'prepare', lambda precision, learn: time.sleep(1))
    r = learner(cbs=Costs(dict(bf16=2.0))).compare_precision('bf16', n_steps=16, max_seconds=1000)
    assert r.table['speed-up']['bf16'] == pytest.approx(2, rel=0.01)


def test_rounds_alternate_and_none_always_follows_the_same():
    learner(cbs=Costs(dict(bf16=2.0, fp16=2.0))).compare_precision(LOW, n_steps=9, n_seeds=0)
    forth = ['fp32', *LOW]
    assert Costs.trained[:27] == forth + (forth + forth[::-1]) * 4  # after a warm-up


def test_the_peak_of_an_accelerator_is_what_a_step_adds(monkeypatch):
    "Replaces PyTorch's counters, as this test has no accelerator."
    allocated = lambda device, peak=False: 7e6 if peak else 5e6
    monkeypatch.setattr('fastxtend_amp.insight.trial.allocated', allocated)
    assert (learner().compare_precision('bf16', n_steps=7, n_seeds=0).table['peak MB'] == 2).all()


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
        assert cb is None and type(precision) is Precision or precision == cb.precision is not precision
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
    assert own_precision(learn) == call.precision


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
