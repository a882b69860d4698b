"Comparisons: each precision trains as in a fit of its own, in alternating rounds; what is clearly slower leaves them."

import math, warnings
from functools import partialmethod

import numpy as np
import pandas as pd
import pytest, torch
from fastai.callback.core import Callback, CancelEpochException, CancelFitException, CancelTrainException
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from torch import nn

from fastxtend_amp import PrecisionComparison
from fastxtend_amp.insight import measuring, rounds
from fastxtend_amp.insight.calls import Call, like_own
from fastxtend_amp.insight.comparison import recommend
from fastxtend_amp.insight.speed import Speed, tolerance
from fastxtend_amp.precisions import HalfWeights, find_precision
from helpers import (
    dataset,
    OPTIMIZERS,
    At,
    Attentive,
    learner,
    linear,
    loaders,
    mlp,
    params,
    precision_callback,
    same,
    set_support,
)
from states import ASK, Act, Costs, InStep, bits, rich, shuffled

LOW = ('bf16', 'fp16')  # named, as CPUs may emulate both
FP32, BF16 = (torch.float32,) * 2, (torch.float32, torch.bfloat16)  # of weight and output
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


class Seen(nn.Linear):
    "Records the dtypes of its weight and its output."

    seen = set()

    def forward(self, x):
        out = super().forward(x)
        self.seen.add((self.weight.dtype, out.dtype))
        return out


@pytest.mark.parametrize('own', ['to_half_weights', 'to_bf16', 'to_fp32'])
@pytest.mark.parametrize('name, dtypes', [('fp32', {FP32}), ('bf16', {FP32, BF16}), ('half_weights', {FP32, BF16})])
def test_each_row_runs_in_the_precision_it_names(own, name, dtypes):
    Seen.seen.clear()
    r = getattr(learner(Seen(6, 1)), own)().compare_precision(name, n_steps=3, n_seeds=0)
    assert Seen.seen == dtypes and r.table.index[-1] == name and not r.table['loss'].isna().any()


def test_settings_of_the_process_hold_for_the_row_that_sets_them(support):
    support(tf32='native')
    seen, matmul = set(), torch.backends.cuda.matmul
    note = lambda l: seen.add((precision_callback(l) and l.mixed_precision.amp_mode.value, matmul.fp32_precision))
    before = matmul.fp32_precision
    learn = learner(cbs=[InStep('after_pred', note), InStep('after_backward', note)])
    learn.compare_precision(['bf16', 'tf32'], n_steps=8, n_seeds=1)
    assert seen == {(None, before), ('bf16', before), ('tf32', 'tf32')}


def test_who_takes_part_and_what_is_in_the_table(tmp_path):
    steps = []
    cbs = [At('after_batch', print), InStep('after_pred', lambda l: steps.append(l.training)), GradientClip(1e-3)]
    r = learner(cbs=[*cbs, SaveModelCallback()], path=tmp_path).compare_precision(LOW, n_steps=8, n_seeds=1)
    assert not list(tmp_path.rglob('*')) and 'Callbacks left out: at.' in ' '.join(r.notes)
    assert steps == [True] * (4 * 8 + 3)  # four trainings of eight steps, and in each precision one for the memory
    assert r.losses['fp32'][:6] == losses_of(learner(cbs=GradientClip(1e-3)), 1)
    assert list(r.table.index) == ['fp32', *LOW] and (r.table['steps'] == 8).all() and len(r.seed_losses[0]) == 8


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


def test_an_error_in_low_precision_is_a_result_and_the_learner_is_not_modified(support, monkeypatch):
    def breaks(l):
        if precision_callback(l) and l.iter == 3:
            raise ZeroDivisionError('now')

    def no_compiler(self):
        raise RuntimeError('no C++ compiler')

    monkeypatch.setattr(nn.Module, 'compile', no_compiler)
    learn = rich()
    support(fp16='unsupported')
    learn.add_cb(InStep('after_loss', breaks))
    before = bits(learn)
    r = learn.compare_precision(LOW, n_steps=8, n_seeds=1, compile=True)
    assert bits(learn) == before and r.recommended == 'fp32' and r.plot() is not None
    assert r.table['note'].to_dict() == {
        'fp32': '',
        'fp32 compiled': 'RuntimeError: no C++ compiler',
        'bf16': 'ZeroDivisionError: now',
        'bf16 compiled': 'RuntimeError: no C++ compiler',
        'fp16': "ValueError: fp16 does not run on device 'cpu': for this test",
        'fp16 compiled': 'RuntimeError: no C++ compiler',
    }
    assert list(r.table['steps']) == [8, 3, 0, 0, 0, 0] and {*r.table['support'][1:]} == {'failed'}


def out_of_memory(l):
    if precision_callback(l):
        raise torch.OutOfMemoryError('all copies are in memory at once')


def frozen(model):
    return model.requires_grad_(False)


def spoiled(model):
    model[3].weight.data[0, 0] = math.nan
    return model


def fitted(learn):
    learn.fit(1)
    return learn


WITHOUT_DATA = Learner(DataLoaders(), mlp(), nn.MSELoss())
ERRORS = {
    'steps': lambda: learner().compare_precision(n_steps=0),
    'time': lambda: learner().compare_precision(max_seconds=0),
    'time to choose': lambda: learner().to_bf16().to_amp(measure=True, max_seconds=-1),
    'more than time to choose': lambda: learner().to_amp(measure=True, fp32_modules='0', max_skips=9),
    'mode': lambda: learner().compare_precision('fp4'),
    'no data': lambda: WITHOUT_DATA.compare_precision(),
    'no data to choose': lambda: WITHOUT_DATA.to_amp(measure=True),
    'no data for a report': lambda: WITHOUT_DATA.precision_report(),
    'no batches for a report': lambda: learner().precision_report(dl=[]),
    'modes of a report': lambda: learner().precision_report(('bf16', 'fp4')),
    'no modes': lambda: learner().precision_report(()),
    'modes without autocast': lambda: learner().precision_report(['bf16', 'tf32']),
    'batches of a report': lambda: learner().precision_report(n_batches=0),
    'time of a report': lambda: learner().precision_report(max_seconds=0),
    'another device': lambda: learner().precision_report(device='xpu'),
    'a report on a frozen model': lambda: learner(frozen(mlp())).precision_report(),
    'fp32 fails in a report': lambda: learner(nn.Linear(5, 1)).precision_report(),
    'no loss scales to plot': lambda: learner().to_fp16().mixed_precision.plot_scales(),
    'nor in bf16': lambda: fitted(learner().to_bf16()).mixed_precision.plot_scales(),
    'frozen': lambda: learner(frozen(mlp())).compare_precision(),
    'NaN': lambda: learner(spoiled(mlp())).to_amp(measure=True),
    'in a fit': lambda: learner().fit(1, cbs=At('after_epoch', lambda l: l.compare_precision())),
    'fp32 fails': lambda: learner(nn.Linear(5, 1)).compare_precision(LOW),  # the data has six columns
    'memory': lambda: learner(cbs=InStep('before_batch', out_of_memory)).compare_precision(LOW, n_steps=4),
}


def test_16_bit_weights_are_compared_as_fp32():
    model = nn.Sequential(*mlp(), nn.Linear(1, 1)).bfloat16()
    model[4].requires_grad_(False)
    found = learner(model).compare_precision(LOW, 4, n_seeds=0)
    assert (found.table.note == '').all() and found.table.loss.notna().all()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    found.apply(learner(model), 'fp32').fit(1)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


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
    'faster': (dict(bf16=2.0, fp16=1.5), {}, {}),
    'fp16 is far slower': (dict(bf16=1.5, fp16=0.01), {}, dict(max_seconds=60)),
    'fp16 is slower': (dict(bf16=1.15, fp16=0.8), dict(noise=0.1), dict(max_seconds=60)),
    'both are far slower': (dict(bf16=0.1, fp16=0.05), {}, dict(max_seconds=60)),
    'noisy, faster': (dict(bf16=1.3), dict(noise=0.4), dict(precisions='bf16')),
    'noisy, as fast': ({}, dict(noise=0.4), dict(precisions='bf16')),
    'noisy, without time': (dict(bf16=1.15), dict(noise=0.3), dict(precisions='bf16', max_seconds=6)),
    'no time': ({}, {}, dict(precisions='bf16', max_seconds=1e-9)),
    'many steps': (dict(bf16=1.5), dict(step=0.02), dict(precisions='bf16', n_steps=2000, max_seconds=3)),
    'steps of 1 second': (dict(bf16=1.15), dict(step=1), dict(precisions='bf16', n_steps=40, max_seconds=60)),
    'steps of 6 seconds': (dict(bf16=1.89), dict(step=6), dict(precisions='bf16', n_steps=40, max_seconds=60)),
    'nothing else': ({}, {}, dict(precisions='fp32')),
    'no interval': (dict(bf16=2.0), {}, dict(n_steps=6)),
    'no limit': (dict(bf16=2.0), {}, dict(max_seconds=math.inf)),
    'ResNet-18': (*speeds_of(1.72, 1.11, 2.01), {}, convs()),
    'ResNet-50': (*speeds_of(1.7, 1.08, 1.74), {}, convs()),
    'RegNet': (*speeds_of(1.28, 1.25, 1.55), {}, convs(3)),
    'EfficientNet': (*speeds_of(0.96, 1.25, 1.04, 1.03), {}, convs(6)),
    'MobileNet': (*speeds_of(1.03, 1.2, 0.97, 1.14, 1.37), {}, convs(6)),
    'in channels last already': (*speeds_of(1.72), {}, convs().to(memory_format=torch.channels_last)),
    'without time for all': (*speeds_of(1.03, 1.2, 0.97, 1.14, 1.37, step=1.2), {'max_seconds': 60}, convs(6)),
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
        rows = [f'{name}: {r.recommended}: {r.reason}']
        for n, row in r.table.iterrows():
            loss = 'no loss' if math.isnan(row['loss']) else 'loss'
            rows.append(f"{n}: {row['steps']} steps, {row['rounds']} rounds, {loss}, speed {row['speed-up']:.2f}")
        said = f"{len(r.losses['fp32'])} steps are compared, {len(r.seed_losses)} other seeds, {seconds:.1f} s"
        texts += ['# ' + '\n'.join([*rows, said, *r.table['note'][r.table['note'] != '']]), '']
    assert '\n'.join(texts) == expected('comparison_rounds')


def test_rounds_alternate_and_none_always_follows_the_same():
    r = learner(cbs=Costs(dict(bf16=2.0, fp16=2.0))).compare_precision(LOW, n_steps=9, n_seeds=0)
    forth = ['fp32', *LOW]
    assert Costs.trained[:27] == forth + [name for i in range(8) for name in forth[:: (-1) ** i]]
    assert (r.table['rounds'] == 8).all()  # the first one is a warm-up


def test_the_interval_is_one_of_ratios():
    "The interval is of the logarithms: that of the inverse ratios is the inverse."
    ratios = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2]
    mid, low, high = Speed.of(ratios)
    assert 0 < low < mid < high and np.isnan(Speed.of(ratios[1:])[1:]).all()
    assert Speed.of([1 / r for r in ratios]) == pytest.approx((1 / mid, 1 / high, 1 / low), rel=1e-3)


# -- memory


def test_activations_are_those_counted_by_hand():
    """Batch 4, Linear(6, 8), ReLU, Linear(8, 1), mean squared error.

    Autograd keeps the input, ReLU's output, which is the second layer's input, and prediction and target. bf16 keeps
    casts of inputs and weights instead; that of the first weight is not needed, as its input has no gradient.
    """

    def kept(model):
        return 1e6 * learner(model).compare_precision('bf16', n_steps=7, n_seeds=0).table['activations MB']

    fp32, bf16 = kept(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)))
    assert fp32 == 4 * (4 * 6 + 4 * 8 + 4 + 4) and bf16 == 2 * (4 * 6 + 4 * 8 + 8) + 4 * (4 + 4)
    hooks_break = Act(lambda x: x + torch.func.grad(lambda z: z.square().sum())(x).mean())
    assert kept(nn.Sequential(nn.Linear(6, 1), hooks_break)).isna().all()


def test_the_peak_of_an_accelerator_is_what_a_step_adds(monkeypatch):
    "Replaces PyTorch's counters, as this test has no accelerator."
    assert 'peak MB' not in repr(learner().compare_precision('bf16', n_steps=7, n_seeds=0))
    monkeypatch.setattr(measuring, 'allocated', lambda device, peak=False: 7e6 if peak else 5e6)
    assert (learner().compare_precision('bf16', n_steps=7, n_seeds=0).table['peak MB'] == 2).all()


# -- compiled


def test_each_precision_compiled(sleeps, monkeypatch):
    "With Dynamo only, whose graphs run eagerly. The first step needs 40 seconds, the others half the time."
    monkeypatch.setattr(nn.Module, 'compile', partialmethod(nn.Module.compile, backend='eager'))
    torch._dynamo.reset()

    class Compiles(Costs):
        def before_batch(self):
            compiled = self.learn.model._compiled_call_impl is not None
            self.step = 40 if compiled and self.learn.iter == 0 else 0.05 if compiled else 0.1
            super().before_batch()

    learn = learner(nn.Linear(6, 1), cbs=Compiles(dict(bf16=1.25)))
    r = learn.compare_precision('bf16', n_steps=20, n_seeds=1, max_seconds=30, compile=True)
    found = r.table['speed-up'].to_dict()
    assert found == pytest.approx({'fp32': 1, 'fp32 compiled': 2, 'bf16': 1.25, 'bf16 compiled': 2.5}, rel=1e-3)
    assert (r.table['steps'] == 20).all() and 72 < sleeps.now < 103  # compiling does not count as time
    assert list(r.table['compile s'].dropna()) == pytest.approx([40, 32], abs=0.2) and 'compile s' in repr(r)
    assert r.losses['fp32 compiled'] == pytest.approx(r.losses['fp32'], rel=1e-4)
    assert r.calls['bf16 compiled'] == 'learn.to_bf16(); learn.model.compile()'
    for row, is_compiled in (('bf16', False), (None, True)):
        assert (r.apply(learn, row).model._compiled_call_impl is not None) == is_compiled
    assert r.recommended == 'bf16 compiled' and learn.mixed_precision.amp_mode == 'bf16'


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
    dict(bf16=speeds(1.22, 1.3, 1.35)),
    dict(bf16={}, fp16=speeds(2.9, 3.0, 3.1)),
    dict(bf16=speeds(2.0, 2.04, 2.1), fp16=speeds(2.1, 2.13, 2.2)),
    {'bf16, Conv in fp32': speeds(2.0, 2.04, 2.1), 'fp16': speeds(2.1, 2.13, 2.2)},
    dict(bf16=speeds(1.51, 1.69, 2.7)),
    dict(bf16={}, fp16={**speeds(2.9, 3.0, 3.1), 'loss difference': 0.2}),
    dict(bf16={'loss difference': 0.1}),
    dict(fp16={'loss difference': NAN}),
    dict(fp16={'skipped': 25}),
    dict(fp16={'skipped': 26}),
    dict(fp16={'weights moved': 0.1}),
    dict(fp16={'weights moved': 0.09}),
    dict(bf16=speeds(0.68, 0.7, 0.72)),
    dict(bf16=speeds(1.02, 1.03, 1.05)),
    dict(bf16=speeds(1.05, 1.06, 1.07)),
    dict(bf16=speeds(0.96, 1.15, 1.34)),
    dict(fp32={'loss difference': NAN}),
    dict(fp32={'weights moved': NAN}, bf16={}),
    dict(bf16={'rounds': 5, **speeds(NAN, 0.9, NAN)}),
    dict(bf16={'support': 'failed', 'loss': NAN}),
    dict(bf16={}, fp16={'note': 'dropped', 'loss difference': NAN, **speeds(NAN, 0.01, NAN)}),
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
        ([1.0], [1.1, 1.05], 1, 3.4 * 0.05),
        ([1.0], [1.1, 1.05, 0.95], 1, 2.6 * np.std([1.0, 1.1, 1.05, 0.95], ddof=1)),
        ([1.0], [1.0], 1, 0.01),  # 1% of the loss
        ([-0.35], [-0.35], 1, 0.0035),
        ([16.0, 1e-5], [1e-5], 1, 0.016),  # a thousandth of what it fell by
        ([100.2, 100.0], [100.0], 1, 0.1),  # half of its range
        ([1.02, 0.99, 0.99], [], 3, 0.1),  # a tenth, as nothing shows the spread
        ([0.1, 3.0, 0.1], [], 3, 2 * np.std([0.1, 3.0, 0.1])),
        ([100.2, 100.0], [], 1, 0.1),
    ],
)
def test_the_loss_that_is_tolerated(losses, seeds, n_last, amount):
    assert tolerance(losses, seeds, n_last)[0] == pytest.approx(amount, rel=1e-2)


def test_apply_makes_the_call_that_keeps_what_the_learner_has():
    learn = learner(Attentive(gain=1.0)).to_fp16(init_scale=256.0, fp32_modules='attn', on_overflow='raise')
    r = learn.compare_precision([*LOW, 'half_weights'], n_steps=1, n_seeds=0)
    for name, call in {
        'fp16': "learn.to_fp16(init_scale=256.0, fp32_modules=['attn'], on_overflow='raise')",
        'bf16': "learn.to_bf16(fp32_modules=['attn'], on_overflow='raise')",
        'half_weights': "learn.to_half_weights(fp32_modules=['attn'], on_overflow='raise')",
    }.items():
        assert r.calls[name] == call and r.apply(learn, name) is learn
    assert isinstance(learn.mixed_precision.precision, HalfWeights)
    assert r.recommended == 'fp32' and precision_callback(r.apply(learn)) is None
    with pytest.raises(ValueError, match=r"precision='tf32' cannot be used: .* one of \['fp32', 'bf16', 'fp16', "):
        r.apply(learn, 'tf32')


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
    assert '<table' in r._repr_html_() and '<code>learn.to_bf16()</code>' in r._repr_html_()
    curves, bars = r.plot()
    assert [t.get_text() for t in curves.get_legend().get_texts()] == ['fp32, other seeds', *losses]
    assert len(curves.lines) == 2 + 3 and [t.get_text() for t in bars.texts] == ['1.00', '12.34', '2.00']
    plt.close('all')


@pytest.mark.cuda
def test_on_an_nvidia_gpu():
    learn = learner(mlp().cuda(), loaders(n=48).to(torch.device('cuda')), opt_func=OPTIMIZERS['fused adamw'])
    state, rng = params(learn), torch.cuda.get_rng_state()
    r = learn.compare_precision(LOW, n_steps=16, n_seeds=1)
    assert same([*params(learn), torch.cuda.get_rng_state()], [*state, rng])
    assert (r.table['steps'][:2] >= 16).all() and (r.table['peak MB'] > 0).all()
