"Comparisons: each precision trains as in a fit of its own, in alternating rounds; what is clearly slower leaves them."

import math, time

import numpy as np
import pytest, torch
from fastai.callback.core import CancelEpochException, CancelFitException, CancelTrainException
from fastai.callback.training import GradientAccumulation
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from torch import nn

from fastxtend_amp.insight.choices import own_precision
from fastxtend_amp.precisions import BF16
from fastxtend_amp.training.current import precision_callback
from helpers import OPTIMIZERS, At, Attentive, dataset, errors_of, learner, linear, loaders, mlp
from models import Act, Breaks, Costs, InStep, convs, fills, layers
from states import ASK, shuffled

LOW = ('bf16', 'fp16')  # named, as CPUs may emulate both

pytestmark = pytest.mark.usefixtures('support')
NAN = math.nan


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
    'fp32 fails': lambda: learner(layers(Act(lambda h: h.missing))).compare_precision(LOW),
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


def test_a_callback_that_uses_the_scaler_runs_in_fp32_as_well():
    own = lambda l: l.scaler.scale(l.loss_grad).backward(retain_graph=True)
    learn = learner(cbs=InStep('before_backward', own, 5)).to_fp16(init_scale=1024.0)
    assert learn.compare_precision('bf16', n_steps=4, n_seeds=0).losses['fp32']


def test_the_peak_of_an_accelerator_is_what_a_step_adds(monkeypatch):
    "Replaces PyTorch's counters, as this test has no accelerator."
    allocated = lambda device, peak=False: 7e6 if peak else 5e6
    monkeypatch.setattr('fastxtend_amp.insight.trial.allocated', allocated)
    assert (learner().compare_precision('bf16', n_steps=7, n_seeds=0).table['peak MB'] == 2).all()
