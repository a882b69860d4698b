"""Comparisons: each precision trains as in a fit of its own, in alternating rounds; what is clearly slower leaves them.

`to_amp(measure=True)` selects the fastest whose loss matches fp32.
"""

import copy, math, pickle, warnings

import numpy as np
import pandas as pd
import pytest, torch
from fastai.callback.core import Callback, CancelEpochException, CancelFitException, CancelTrainException
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import SGD
from torch import nn

from fastxtend_amp import PrecisionComparison, is_depthwise, is_grouped
from fastxtend_amp.insight import rounds
from fastxtend_amp.insight import run as run_room
from fastxtend_amp.insight.calls import Call, advised, like_own, own_precision
from fastxtend_amp.insight.recommendation import recommend, tolerance
from fastxtend_amp.precisions import BF16, FP16, Precision, find_precision
from fastxtend_amp.training.loop import precision_callback
from helpers import OPTIMIZERS, At, Attentive, dataset, learner, linear, loaders, mlp, params, set_support
from states import ASK, Act, Costs, Gives, InStep, Unpacks, bits, fills, rich, shuffled

LOW = ('bf16', 'fp16')  # named, as CPUs may emulate both
SPEED = ['speed-up low', 'speed-up', 'speed-up high']


@pytest.fixture(autouse=True)
def support(monkeypatch, sleeps):
    "bf16 and fp16 are native unless a test says more; nothing depends on the machine's speed."
    return lambda **more: set_support(
        monkeypatch, lambda name: {**dict.fromkeys(LOW, 'native'), **more}.get(name, 'unsupported')
    )


@pytest.fixture(autouse=True)
def native(support):
    support()
    torch.manual_seed(0)


def losses_of(learn, n_epoch, *args):
    "Train it by `fit`; return the loss of each step."
    seen = []
    learn.fit(n_epoch, *args, cbs=At('after_batch', lambda l: seen.append(l.loss.item()) if l.training else None))
    return seen


# -- what is trained


@pytest.mark.parametrize('name, opt', [('bf16', 'adam'), ('fp16', 'adam'), ('fp16', 'fused adamw')])
def test_each_precision_trains_as_in_a_fit_of_its_own(name, opt):
    alone, low = (learner(opt_func=OPTIMIZERS[opt]) for _ in range(2))
    getattr(low, f'to_{name}')()
    r = learner(opt_func=OPTIMIZERS[opt]).compare_precision([name], n_steps=12, n_seeds=0, lr=0.01)
    assert r.losses == {'fp32': losses_of(alone, 2, 0.01), name: losses_of(low, 2, 0.01)}
    assert name == 'bf16' or r.table['final scale']['fp16'] == low.mixed_precision.scale
    tails = {n: np.mean(l[-2:]) for n, l in r.losses.items()}  # the last fifth
    assert r.table['loss'].to_dict() == tails
    assert r.table['loss difference'][name] == tails[name] - tails['fp32']


@pytest.mark.parametrize('own', ['to_half_weights', 'to_bf16', 'to_fp32'])
def test_each_row_runs_in_the_precision_it_names_with_its_settings_of_the_process(own, support):
    support(tf32='native')
    seen, matmul = set(), torch.backends.cuda.matmul
    name = lambda l: precision_callback(l) and l.mixed_precision.precision.name
    note = lambda l: seen.add((name(l), matmul.fp32_precision, l.pred.dtype))
    before, half, full = matmul.fp32_precision, torch.bfloat16, torch.float32
    learn = learner(linear(), cbs=[InStep('after_pred', note, 5), InStep('after_backward', note)])
    r = getattr(learn, own)().compare_precision(['bf16', 'half_weights', 'tf32'], n_steps=8, n_seeds=1)
    low = {(name, before, dtype) for name in ('bf16', 'half_weights') for dtype in (half, full)}
    assert seen == {(None, before, full), ('tf32', 'tf32', full), *low}
    assert r.table['loss'].notna().all()


def test_a_row_trains_for_n_steps_and_writes_no_file(tmp_path):
    steps = []
    cbs = [InStep('after_pred', lambda l: steps.append(l.training)), SaveModelCallback()]
    r = learner(cbs=cbs, path=tmp_path).compare_precision(LOW, n_steps=8, n_seeds=1)
    assert steps == [True] * (4 * 8) and not list(tmp_path.rglob('*')) and len(r.seed_losses[0]) == 8


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
    monkeypatch.setattr(rounds, '_BYTES', 350)  # a batch is 4 * 7 * 4 = 112 bytes
    r = learner().compare_precision('bf16', n_steps=8, n_seeds=0)
    plain = learner()
    plain.dls.train.n = 16
    assert r.losses['fp32'] == losses_of(plain, 2)


# -- what a copy sees


class Schedule(Callback):
    "Divides by the number of epochs, as pruning does; accumulates from `before_train` on, as fastxtend's callback."

    run_on_copy = True

    def before_fit(self):
        seen.append(1 / self.n_epoch)

    def before_train(self):
        seen.append(self.n_iter)
        self.weights = torch.rand(1)

    def after_loss(self):
        self.learn.loss_grad = self.learn.loss_grad + self.weights.item()


seen = []


def test_a_copy_begins_one_fit_of_one_epoch_with_the_same_random_numbers():
    r = learner(cbs=Schedule()).compare_precision(['half_weights', 'bf16'], n_steps=12, n_seeds=0)
    assert seen == [1.0, 12] * 3 and len({*r.table['loss']}) > 1 and (r.table['loss difference'].abs() < 0.05).all()


@pytest.mark.parametrize('error', [CancelFitException, CancelEpochException, CancelTrainException])
@pytest.mark.parametrize('event', ['before_batch', 'after_loss', 'after_step'])
def test_a_callback_that_ends_a_fit_early_ends_a_batch(error, event):
    def ends(l):
        if l.training and l.iter % 2 == 0:
            raise error()

    learn = learner(cbs=InStep(event, ends))
    assert all(ask(learn) is not None for ask in ASK.values())


class Once(torch.utils.data.IterableDataset):
    "Can be iterated once."

    def __init__(self):
        self.rows = iter(zip(*dataset().tensors))

    def __iter__(self):
        return self.rows


def once():
    loader = DataLoader(Once(), bs=4, device=torch.device('cpu'))
    return learner(dls=DataLoaders(loader, loader, device=torch.device('cpu')))


def test_a_loader_that_can_be_iterated_once():
    learn = once()
    assert (learn.compare_precision('bf16', n_steps=12, n_seeds=0).table['steps'] == 12).all()
    with pytest.raises(ValueError, match='(?s)needs at least one batch, .*used only once'):
        learn.compare_precision('bf16')


# -- errors


def test_an_error_in_low_precision_is_a_result_and_the_learner_is_not_modified(support):
    def breaks(l):
        if precision_callback(l) and l.iter == 3:
            raise ZeroDivisionError('now')

    learn = rich()
    support(fp16='unsupported')
    learn.add_cb(InStep('after_loss', breaks))
    before = bits(learn)
    r = learn.compare_precision(LOW, n_steps=8, n_seeds=1)
    assert bits(learn) == before and r.recommended == 'fp32' and r.plot() is not None
    assert r.table['note'].to_dict() == {
        'fp32': '',
        'bf16': 'ZeroDivisionError: now',
        'fp16': "ValueError: fp16 does not run on device 'cpu': for this test",
    }
    assert list(r.table['steps']) == [8, 3, 0] and {*r.table['support'][1:]} == {'failed'}


def out_of_memory(l):
    if precision_callback(l):
        raise torch.OutOfMemoryError('all copies are in memory at once')


def frozen(model):
    return model.requires_grad_(False)


def spoiled(model):
    model[3].weight.data[0, 0] = math.nan
    return model


class Huge(nn.ReLU):
    def __deepcopy__(self, memo):
        raise torch.OutOfMemoryError('a copy does not fit')


WITHOUT_DATA = Learner(DataLoaders(), mlp(), nn.MSELoss())
ERRORS = {
    'steps': lambda: learner().compare_precision(n_steps=0),
    'time': lambda: learner().compare_precision(max_seconds=0),
    'more than time to choose': lambda: learner().to_amp(measure=True, fp32_modules='0', max_skips=9),
    'mode': lambda: learner().compare_precision('fp4'),
    'no data': lambda: WITHOUT_DATA.compare_precision(),
    'no data for a report': lambda: WITHOUT_DATA.precision_report(),
    'no batches for a report': lambda: learner().precision_report(dl=[]),
    'no modes': lambda: learner().precision_report(()),
    'modes without autocast': lambda: learner().precision_report(['bf16', 'tf32']),
    'another device': lambda: learner().precision_report(device='xpu'),
    'no loss scales to plot': lambda: learner().to_fp16().mixed_precision.plot_scales(),
    'frozen': lambda: learner(frozen(mlp())).compare_precision(),
    'lazy': lambda: learner(nn.LazyLinear(1)).compare_precision(),
    'NaN': lambda: learner(spoiled(mlp())).to_amp(measure=True),
    'in a fit': lambda: learner().fit(1, cbs=At('after_epoch', lambda l: l.compare_precision())),
    'fp32 fails': lambda: learner(nn.Linear(5, 1)).compare_precision(LOW),  # the data has six columns
    'memory of a copy': lambda: learner(nn.Sequential(linear(), Huge())).precision_report(),
    'memory': lambda: learner(cbs=InStep('before_batch', out_of_memory)).compare_precision(LOW, n_steps=4),
}


def test_errors(expected):
    texts = []
    for name, call in ERRORS.items():
        with pytest.raises(Exception) as error:
            call()
        texts.append(f'# {name}\n{error.typename}: {error.value}\n')
    assert '\n'.join(texts) == expected('insight_errors')


def test_no_warning_of_what_happens_to_a_copy():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        shadows = InStep('before_batch', lambda l: setattr(l.in_step, 'lr', 0))  # as a GAN's callbacks do
        r = learner(Attentive(), cbs=shadows).to_fp16(on_overflow='raise', max_skips=2)
        r = r.compare_precision('fp16', n_steps=8, n_seeds=0)
    assert r.table['skipped']['fp16'] == 8 and r.table['note']['fp16'] == ''


# -- speed and time


def convs(groups=1):
    "Convolutions of six channels, the second one in groups."
    pictures = Act(lambda x: x[..., None, None])
    return nn.Sequential(
        pictures, nn.Conv2d(6, 6, 2, padding=1), nn.Conv2d(6, 6, 2, groups=groups), nn.Flatten(), linear()
    )


def speeds_of(bf16, fp32_last=1.0, bf16_last=1.0, depthwise=1.0, depthwise_last=1.0, step=0.1):
    "As measured on a CPU with native bf16."
    last, kept = ', channels last', 'bf16, depthwise in fp32'
    speeds = {'bf16': bf16, f'fp32{last}': fp32_last, f'bf16{last}': bf16_last}
    return {**speeds, kept: depthwise, kept + last: depthwise_last}, dict(step=step, noise=0.05)


TIMED = {  # speed-ups; arguments of `Costs`; arguments of the comparison; the model
    'fp16 is far slower': (dict(bf16=1.5, fp16=0.01), {}, dict(max_seconds=60)),
    'fp16 is slower': (dict(bf16=1.15, fp16=0.8), dict(noise=0.1), dict(max_seconds=60)),
    'both are far slower': (dict(bf16=0.1, fp16=0.05), {}, dict(max_seconds=60)),
    'noisy, as fast': ({}, dict(noise=0.1), dict(precisions='bf16')),
    'no time': ({}, {}, dict(precisions='bf16', max_seconds=1e-9)),
    'many steps': (dict(bf16=1.5), dict(step=0.02), dict(precisions='bf16', n_steps=2000, max_seconds=3)),
    'steps of 6 seconds': (dict(bf16=1.89), dict(step=6), dict(precisions='bf16', n_steps=40, max_seconds=60)),
    'undecided, with steps of 2 seconds': (
        dict(bf16=0.8),
        dict(step=2.0, noise=0.3),
        dict(precisions='bf16', n_steps=50, max_seconds=60),
    ),
    'nothing else': ({}, {}, dict(precisions='fp32')),
    'no interval': (dict(bf16=2.0), {}, dict(n_steps=6)),
    'no limit': (dict(bf16=2.0), {}, dict(max_seconds=math.inf)),
    'ResNet-18': (*speeds_of(1.72, 1.11, 2.01), {}, convs()),
    'EfficientNet': (*speeds_of(0.96, 1.25, 1.04, 1.03), {}, convs(6)),
    'MobileNet': (*speeds_of(1.03, 1.2, 0.97, 1.14, 1.37), {}, convs(6)),
    'in channels last already': (*speeds_of(1.72), {}, convs().to(memory_format=torch.channels_last)),
    'without time for all': (*speeds_of(1.03, 1.2, 0.97, 1.14, 1.37, step=2), {'max_seconds': 60}, convs(6)),
    'with time for the fastest': (*speeds_of(1.03, 1.2, 0.97, 1.14, 1.37, step=2), {'max_seconds': 40}, convs(6)),
}


@pytest.mark.filterwarnings('error')  # as a mean of no losses gives
def test_rounds(expected, sleeps):
    "What is recommended, after how many steps and rounds, and in which time; what is far slower is dropped."
    texts = []
    for name, (speeds, costs, kwargs, *model) in TIMED.items():
        start, kwargs = sleeps.now, {'precisions': LOW, 'n_steps': 16, 'max_seconds': 1000, **kwargs}
        kwargs |= {'precisions': 'bf16'} if model else {}
        r = learner(*model, cbs=Costs(speeds, **costs)).compare_precision(**kwargs)
        seconds = sleeps.now - start
        assert seconds <= kwargs['max_seconds'] + max(1, 4.1 * costs.get('step', 0))
        table = r.table[['steps', 'rounds', 'speed-up', 'note']].assign(loss=r.table['loss'].notna())
        rows = [f'# {name}: {r.recommended}: {r.reason}', f'{seconds:.1f} s, other seeds: {len(r.seed_losses)}']
        texts += [*rows, table.to_string(float_format='%.2f'), '']
    assert '\n'.join(texts) == expected('comparison_rounds')


def test_rounds_alternate_and_none_always_follows_the_same():
    r = learner(cbs=Costs(dict(bf16=2.0, fp16=2.0))).compare_precision(LOW, n_steps=9, n_seeds=0)
    forth = ['fp32', *LOW]
    assert Costs.trained[:27] == forth + [name for i in range(8) for name in forth[:: (-1) ** i]]
    assert (r.table['rounds'] == 8).all()  # the first one is a warm-up


def test_the_peak_of_an_accelerator_is_what_a_step_adds(monkeypatch):
    "Replaces PyTorch's counters, as this test has no accelerator."
    assert 'peak MB' not in repr(learner().compare_precision('bf16', n_steps=7, n_seeds=0))
    monkeypatch.setattr(run_room, 'allocated', lambda device, peak=False: 7e6 if peak else 5e6)
    assert (learner().compare_precision('bf16', n_steps=7, n_seeds=0).table['peak MB'] == 2).all()


# -- the recommendation


def table_of(**rows):
    base = {'support': 'native', 'steps': 50, 'rounds': 8, 'ms per step': 100.0, **dict.fromkeys(SPEED, 1.0)}
    base |= {'loss': 1.0, 'loss difference': 0.0, 'skipped': 0, 'weights moved': 1.0, 'note': ''}
    faster = base | {'speed-up low': 1.9, 'speed-up': 2.0, 'speed-up high': 2.1}
    table = pd.DataFrame({'fp32': base, **{name: faster | changes for name, changes in rows.items()}}).T
    table['loss'] += table['loss difference']
    return table


def speeds(*values):
    return dict(zip(SPEED, values))


NAN = math.nan
ROWS = [
    dict(bf16={}, fp16={}),
    dict(bf16={}, fp16=speeds(2.9, 3.0, 3.1)),
    dict(bf16=speeds(2.0, 2.04, 2.1), fp16=speeds(2.1, 2.13, 2.2)),
    dict(tf32=speeds(2.0, 2.04, 2.1), fp16=speeds(2.1, 2.13, 2.2)),
    {'bf16, Conv in fp32': speeds(2.0, 2.04, 2.1), 'fp16': speeds(2.1, 2.13, 2.2)},
    dict(bf16={}, fp16={**speeds(2.9, 3.0, 3.1), 'loss difference': 0.2}),
    dict(bf16={'loss difference': 0.1}),
    dict(fp16={'skipped': 25}),
    dict(fp16={'skipped': 26}),
    dict(fp16={'weights moved': 0.09}),
    dict(bf16=speeds(1.02, 1.03, 1.05)),
    dict(bf16=speeds(1.05, 1.06, 1.07)),
    dict(fp32={'loss difference': NAN}),
    dict(fp32={'weights moved': NAN}, bf16={}),
    dict(bf16={'support': 'failed', 'note': 'KeyError: 1', 'loss': NAN}),
    dict(bf16={}, fp16={'note': 'dropped', 'loss difference': NAN, **speeds(NAN, 0.01, NAN)}),
    {'bf16': {}, 'bf16, channels last': {'note': 'dropped', 'loss difference': NAN, **speeds(2.2, 2.3, 2.4)}},
]


def test_recommendations(expected):
    tolerated = tolerance([1.0], [1.05, 0.95, 1.02], 1)  # fp32 trained four times: a loss up to .11 higher matches
    texts = []
    for rows in ROWS:
        best, reason = recommend(table_of(**rows), tolerated)
        changes = '; '.join(f'{name} {changes}' for name, changes in rows.items())
        texts.append(f'# {changes}\n{best}: {reason}\n')
    assert '\n'.join(texts) == expected('recommendations')


@pytest.mark.parametrize(
    'losses, seeds, n_last, amount',
    [
        ([1.0], [1.1], 1, 7.7 * 0.1 / 2**0.5),
        ([1.0], [1.1, NAN], 1, 7.7 * 0.1 / 2**0.5),
        ([1.0], [1.0], 1, 0.01),  # 1% of the loss
        ([16.0, 1e-5], [1e-5], 1, 0.016),  # a thousandth of what it fell by
        ([100.2, 100.0], [100.0], 1, 0.1),  # half of its range
        ([1.02, 0.99, 0.99], [], 3, 0.1),  # a tenth, as nothing shows the spread
    ],
)
def test_the_loss_that_is_tolerated(losses, seeds, n_last, amount):
    assert tolerance(losses, seeds, n_last)[0] == pytest.approx(amount, rel=1e-2)


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_apply_converts_format_and_optimizer(opt):
    "In the middle of a training: fused optimizers step through memory, whatever its order is."
    row, found = 'bf16, channels last', []
    for is_applied in (False, True):
        torch.manual_seed(0)
        learn = learner(convs(), opt_func=OPTIMIZERS[opt]).to_bf16()
        learn.fit(2)
        if is_applied:
            r = learn.compare_precision(n_steps=7, n_seeds=0, max_seconds=1000)
            assert r.calls[row] == 'learn.to_bf16().to_channelslast()'
            assert r.calls['fp32, channels last'] == 'learn.to_fp32().to_channelslast(use_amp=False)'
            assert r.apply(learn, row).channels_last and not learn.model[1].weight.is_contiguous()
        learn.fit(2)
        found.append(params(learn))
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(*found))


def test_text_and_plot(expected):
    import matplotlib.pyplot as plt

    table = table_of(bf16=speeds(11.0, 12.34, 13.0), fp16={'note': 'KeyError: 1', 'support': 'failed', 'loss': NAN})
    losses, learn = {'fp32': [2.0, 1.0], 'bf16': [2.0, 1.1], 'fp16': [2.0, NAN]}, learner()
    r = PrecisionComparison(
        table,
        losses,
        [[2.0, 0.9]] * 2,
        'bf16',
        'Why.',
        ['A note.'],
        {name: Call(like_own(learn, find_precision(name))) for name in losses},
    )
    assert f'{r!r}\n' == expected('comparison')
    with pytest.raises(ValueError, match=r"precision='tf32' cannot be used: .* one of \['fp32', 'bf16', 'fp16'"):
        r.apply(learn, 'tf32')
    assert '<table' in r._repr_html_() and '<code>learn.to_bf16()</code>' in r._repr_html_()
    curves, bars = r.plot()
    assert [t.get_text() for t in curves.get_legend().get_texts()] == ['fp32, other seeds', *losses]
    assert len(curves.lines) == 2 + 3 and [t.get_text() for t in bars.texts] == ['1.00', '12.34', '2.00']
    plt.close('all')


# -- `to_amp(measure=True)`


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


def test_without_a_native_precision_there_is_nothing_to_measure(support, capsys):
    support(bf16='emulated', fp16='emulated')
    learn = learner(cbs=Costs(dict(bf16=2.0))).to_bf16()
    learn.to_amp(measure=True)
    assert precision_callback(learn) is None and learn.precision_decision.recommended == 'fp32'
    assert 'Selected: fp32. Nothing else was compared. This device runs nothing else' in capsys.readouterr().out
    assert "learn.compare_precision('bf16')" in learn.compare_precision().notes[0]


@pytest.mark.parametrize('factor, words', [(1.0, ''), (0.0, 'its weights moved only 0%')])
def test_a_precision_whose_gradients_vanish_is_not_chosen(factor, words):
    "Beside a large constant in the loss, which hides that nothing trains."

    def spoil(l):
        if precision_callback(l):
            torch._foreach_mul_([p.grad for p in l.model.parameters()], factor)

    loss = lambda p, y: nn.functional.mse_loss(p, y) + 100.0
    cbs = [Costs(dict(bf16=2.0)), InStep('after_backward', spoil, 5)]
    r = learner(linear(), loss_func=loss, opt_func=SGD, lr=0.01, cbs=cbs).compare_precision('bf16')
    assert r.recommended == ('fp32' if words else 'bf16') and words in r.reason, r


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


# -- the call that a report or comparison recommends

HALF = 'learn.to_half_weights('


@pytest.mark.parametrize(
    'own, name, written',
    [
        (lambda l: l.to_fp16(init_scale=8.0, max_skips=3), 'bf16', 'learn.to_bf16(max_skips=3)'),
        (lambda l: l.to_fp16(loss_scale=8.0), 'half_weights', f'{HALF})'),
        (lambda l: l.to_half_weights('fp16', 8.0), 'half_weights', f"{HALF}amp_mode='fp16', loss_scale=8.0)"),
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


def test_depthwise_and_grouped_convolutions():
    depthwise = [nn.Conv2d(8, 16, 3, groups=8), nn.ConvTranspose1d(8, 8, 3, groups=8)]
    grouped, others = [nn.Conv2d(8, 8, 3, groups=2)], [nn.Conv2d(1, 8, 3), nn.LayerNorm(8)]
    for of_type, found in ((is_depthwise, depthwise), (is_grouped, grouped)):
        assert [*filter(of_type, depthwise + grouped + others)] == found
        assert pickle.loads(pickle.dumps(of_type)) is copy.deepcopy(of_type) is of_type
    own = type('Embedding', (nn.Module,), {})  # not that of nn
    call = "learn.to_bf16(fp32_modules=[is_depthwise, nn.LayerNorm, Embedding, 'a'])"
    assert repr(BF16(fp32_modules=[is_depthwise, nn.LayerNorm, own, 'a'])) == call
