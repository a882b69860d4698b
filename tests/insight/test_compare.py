"Comparisons: each precision trains as in a PyTorch loop, and the recommendation states its uncertainty."

import gc, math, mmap, random, re, sys, time, warnings
from functools import partialmethod
from inspect import signature
from pathlib import Path

import numpy as np
import pandas as pd
import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.tracker import SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner, load_learner
from fastai.losses import CrossEntropyLossFlat
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from fastxtend_amp import PrecisionComparison
from fastxtend_amp.precisions import HalfWeights
from fastxtend_amp.insight import measuring
from fastxtend_amp.insight.comparison import recommend, speed_up, tolerance
from fastxtend_amp.insight.candidates import candidates, name_of
from helpers import OPTIMIZERS, At, Attentive, Data, handwritten, learner, loaders, mlp, params, same, set_support
from states import Act, InStep, bits, rich, shuffled


LOW = ('bf16', 'fp16')  # named, as CPUs may emulate both
pytestmark = pytest.mark.usefixtures('sleeps')  # nothing depends on the machine's speed


def seeded(*args, **kwargs):
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return learner(*args, **kwargs)


def said(r):
    "Return what it prints, in one line."
    return ' '.join(repr(r).split())


@pytest.fixture
def support(monkeypatch):
    "Set how the device supports each mode."

    def runs(status, why='for this test'):
        native = dict.fromkeys(('fp32', 'bf16', 'fp16'), 'native')
        set_support(monkeypatch, lambda name: {**native, **status}.get(name, 'unsupported'), why)

    return runs


# -- what is trained


def test_table_and_texts(support):
    support({})
    r = seeded().compare_precision(LOW, n_steps=10, n_seeds=2)
    assert isinstance(r, PrecisionComparison) and list(r.table.index) == ['fp32', 'bf16', 'fp16']
    t = r.table
    assert list(t['steps']) == [10] * 3 and (t['ms per step'] > 0).all() and t['speed-up']['fp32'] == 1
    assert (t['speed-up low'] <= t['speed-up']).all() and (t['speed-up'] <= t['speed-up high']).all()
    assert [len(l) for l in r.losses.values()] == [10] * 3 and [len(l) for l in r.seed_losses] == [10] * 2
    tails = {n: np.mean(l[-2:]) for n, l in r.losses.items()}
    assert t['loss'].to_dict() == pytest.approx(tails)
    assert t['loss difference'].to_dict() == pytest.approx({n: v - tails['fp32'] for n, v in tails.items()})
    assert (
        '`max_seconds=60` was enough for 10 of 10 steps, and for fp32 with 2 of 2 other seeds. Loss: mean of the '
        'last fifth of the steps.' in said(r)
    )
    assert np.isnan(t['final scale'][['fp32', 'bf16']]).all()
    assert t['final scale']['fp16'] == 65536 / 2 ** t['skipped']['fp16']
    assert r.recommended in t.index and said(r).startswith(
        f'Recommended: {r.recommended}. {r.reason} Next: `{r.calls[r.recommended]}` '
    )
    assert max(map(len, repr(r).splitlines())) <= 120 and '<table' in r._repr_html_()
    assert re.search(r'\nfp32 .* 1 \(reference\)', repr(r))
    assert 'fp32_precision' not in repr(r)  # with PyTorch's default settings


@pytest.mark.parametrize('name, opt', [('bf16', 'adam'), ('fp16', 'adam'), ('fp16', 'fused adamw')])
def test_each_mode_trains_as_a_loop_of_its_own_would(name, opt):
    r = seeded(opt_func=OPTIMIZERS[opt]).compare_precision([name], n_steps=12, n_seeds=0, lr=0.01)
    _, _, scaler, losses = handwritten(name, OPTIMIZERS[opt], n_epoch=2, lr=0.01)
    assert r.losses[name] == losses  # the batches repeat when an epoch is over
    if name == 'fp16':
        assert r.table['final scale']['fp16'] == scaler.get_scale()
    plain, seen = seeded(opt_func=OPTIMIZERS[opt]), []
    plain.fit(2, 0.01, cbs=At('after_batch', lambda l: seen.append(l.loss.item()) if l.training else None))
    assert r.losses['fp32'] == seen


@pytest.mark.parametrize('own', ['half_weights', 'bf16', None])
def test_each_row_runs_in_the_precision_it_names(own, monkeypatch):
    "Shown by the dtypes of the weight inside the layer's forward and of its output."
    fp32, bf16, linear, seen = torch.float32, torch.bfloat16, nn.functional.linear, []

    def recorded(x, weight, bias=None):
        out = linear(x, weight, bias)
        seen.append((weight.dtype, out.dtype))
        return out

    monkeypatch.setattr(nn.functional, 'linear', recorded)
    expected = {'fp32': (fp32, fp32), 'bf16': (fp32, bf16), 'half_weights': (fp32, bf16)}
    for name in expected:
        learn = seeded(nn.Sequential(nn.Linear(6, 1)))
        if own == 'half_weights':
            learn.to_half_weights('bf16')
        if own == 'bf16':
            learn.to_bf16()
        seen.clear()
        r = learn.compare_precision(name, n_steps=3, n_seeds=0)
        assert list(r.table.index) == list(dict.fromkeys(['fp32', name])) and r.table['note'][name] == ''
        assert set(seen) == {expected['fp32'], expected[name]} and not r.table['loss'].isna().any()


def test_settings_of_the_process_hold_for_the_row_that_sets_them(support):
    support({'tf32': 'native'})
    seen = set()

    def note(learn):
        name = learn.precision.mode.value if learn.precision else 'fp32'
        seen.add((name, torch.backends.cuda.matmul.fp32_precision))

    learn = seeded(cbs=[InStep('after_pred', note), InStep('after_backward', note)])
    before = torch.backends.cuda.matmul.fp32_precision
    learn.compare_precision(['bf16', 'tf32'], n_steps=8, n_seeds=1)
    assert seen == {('fp32', before), ('bf16', before), ('tf32', 'tf32')}


def test_precision_of_the_learner_is_the_template():
    learn = seeded().to_fp16(loss_scale=32.0)
    assert learn.compare_precision(LOW, n_steps=8, n_seeds=0).table['final scale']['fp16'] == 32
    learn.to_fp16(init_scale=32.0, growth_interval=2)
    learn.fit(1)
    scale = learn.precision.scale  # which grows four times in eight steps
    r = learn.compare_precision('fp16', n_steps=8, n_seeds=0)
    assert r.table['final scale']['fp16'] == scale * 16 and r.table['skipped']['fp16'] == 0
    for kept, skipped in (('attn', 0), (None, 8)):
        learn = learner(Attentive()).to_fp16(init_scale=1024.0, fp32_modules=kept)
        assert learn.compare_precision('fp16', n_steps=8).table['skipped']['fp16'] == skipped


def test_who_takes_part(tmp_path):
    events = []
    logs, shapes = (
        kind(event, lambda l, event=event: events.append(event))
        for kind, event in ((At, 'after_batch'), (InStep, 'after_pred'))
    )
    learn = seeded(cbs=[logs, shapes, GradientClip(1e-3), SaveModelCallback()], path=tmp_path)
    r = learn.compare_precision(LOW, n_steps=8, n_seeds=1)
    assert not list(tmp_path.rglob('*'))
    # Four trainings of eight steps; in each precision one batch of validation, and one for the memory.
    assert events == ['after_pred'] * (4 * 8 + 3 + 3)
    assert 'Callbacks left out: at. If the training step needs one' in said(r)
    clipped, seen = seeded(cbs=GradientClip(1e-3)), []
    clipped.fit(1, cbs=At('after_batch', lambda l: seen.append(l.loss.item()) if l.training else None))
    assert r.losses['fp32'][:6] == seen


@pytest.mark.parametrize(
    'make', [MixUp, CutMix, lambda: GradientAccumulation(8)], ids=['mixup', 'cutmix', 'accumulation']
)
def test_callbacks_that_change_the_batch_or_the_loss(make):
    x = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    dl = lambda: DataLoader(
        Data(x, torch.arange(16) % 3), bs=4, shuffle=True, num_workers=0, device=torch.device('cpu')
    )
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    data, loss = x.clone(), CrossEntropyLossFlat()
    learn = seeded(model, DataLoaders(dl(), dl(), device=torch.device('cpu')), loss, cbs=make())
    r = learn.compare_precision(LOW, n_steps=8, n_seeds=1)
    assert r.table['loss difference'].abs().max() < 0.1 and (r.table['steps'] == 8).all()  # the same mixtures in each
    assert torch.equal(x, data) and learn.loss_func is loss
    learn.fit(1)


# -- no side effects


def test_an_error_in_low_precision_is_a_result_and_the_learner_as_it_was():
    class Breaks(Callback):
        run_on_copy = True

        def after_loss(self):
            if self.learn.precision and self.learn.iter == 3:
                raise ZeroDivisionError('now')

    learn = rich()
    learn.add_cb(Breaks())
    before = bits(learn)
    r = learn.compare_precision(LOW, n_steps=8, n_seeds=1)
    assert list(r.table['support']) == ['native', 'failed', 'failed'] and list(r.table['steps']) == [8, 3, 3]
    assert r.table['note']['bf16'] == 'ZeroDivisionError: now' and 'bf16: does not run' in r.reason
    assert r.recommended == 'fp32' and r.plot() is not None and bits(learn) == before


def test_what_becomes_of_the_copies_is_in_the_table_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        shadows = InStep('before_batch', lambda l: setattr(l.in_step, 'lr', 0))  # as a GAN's callbacks do
        seeded(Attentive(), cbs=[GradientAccumulation(64), shadows]).to_fp16().compare_precision(
            LOW, n_steps=3, n_seeds=0
        )
        r = seeded(Attentive()).compare_precision(LOW, n_steps=8, n_seeds=0)
    assert r.table['skipped']['fp16'] == 8


# -- what raises an error, and what gets a row


@pytest.mark.parametrize(
    'kwargs, match',
    [
        (dict(n_steps=2.5), 'n_steps=2.5'),
        (dict(n_seeds=-1), 'n_seeds=-1'),
        (dict(max_seconds=0), 'max_seconds=0'),
        (dict(lr=-1), 'lr=-1 cannot be used: lr must be a number above 0'),
        (dict(lr='1e-3'), "lr='1e-3'"),
    ],
)
def test_bad_arguments(kwargs, match):
    with pytest.raises(ValueError, match=match):
        seeded().compare_precision(**kwargs)


def test_batches_without_targets_need_a_loss_from_elsewhere():
    dls = loaders(train=Data(*loaders().train_ds.tensors[:1]))
    with pytest.raises(ValueError, match='the training batches have no targets.*(?s:.)*self.learn.yb = self.xb'):
        seeded(dls=dls).compare_precision(LOW, n_steps=4)
    own = InStep('before_batch', lambda l: setattr(l, 'yb', l.xb))
    r = seeded(dls=dls, loss_func=lambda p, y: (p - y[:, :1]).square().mean(), cbs=own).compare_precision(
        LOW, n_steps=20, n_seeds=0
    )
    assert all(np.isfinite(l).all() and l[-1] < l[0] for l in r.losses.values())


def test_what_fails_in_fp32_and_memory_that_ends_are_the_users_to_see():
    with pytest.raises(RuntimeError, match='mat1 and mat2'):  # the data has six columns
        learner(nn.Sequential(nn.Linear(5, 1))).compare_precision(LOW, n_steps=4)

    def out_of_memory(learn):
        if learn.precision:
            raise torch.OutOfMemoryError('all copies are in memory at once')

    with pytest.raises(torch.OutOfMemoryError):
        learner(cbs=InStep('before_batch', out_of_memory)).compare_precision(LOW, n_steps=4)


def test_a_mode_that_does_not_run_gets_a_row_with_the_reason(support):
    support({'bf16': 'unsupported'}, 'no such unit')

    def refuses(h):
        if h.dtype is torch.float16:
            raise NotImplementedError('no kernel')
        return h

    r = learner(nn.Sequential(nn.Linear(6, 1), Act(refuses))).compare_precision(LOW, n_steps=2, n_seeds=0)
    assert list(r.table['steps']) == [2, 0, 0] and list(r.table['support']) == ['native', 'failed', 'failed']
    assert "bf16: ValueError: bf16 mixed precision does not run on device 'cpu': no such unit fp16: NotImpl" in said(r)
    assert r.reason == 'bf16: does not run. fp16: does not run.' and 'Exception' not in repr(r)


def test_modes_by_other_names():
    def names(modes):
        return [name_of(p) for p in candidates(seeded(), modes)]

    assert names('bf16-mixed') == ['fp32', 'bf16'] and names([torch.float32, 'fp32']) == ['fp32']
    assert names(['half weights fp16', 'half_weights']) == ['fp32', 'half_weights fp16', 'half_weights']
    assert names(['half_weights bf16', 'half weights']) == ['fp32', 'half_weights']


def test_a_training_that_diverges_is_named():
    class Overflows(nn.Linear):
        def forward(self, x):
            return (super().forward(x).abs() + 1) * 1e5 / 1e5  # above the largest fp16 number in each batch

    r = seeded(nn.Sequential(Overflows(6, 1))).compare_precision('fp16', n_steps=8, n_seeds=1)
    assert (
        not np.isfinite(r.losses['fp16']).any()
        and np.isfinite(r.losses['fp32']).all()
        and r.table['skipped']['fp16'] == 8
    )
    assert r.recommended == 'fp32' and 'fp16: its loss is not finite' in r.reason and r.plot() is not None


def test_fp32_that_fails_itself_is_named():
    r = seeded(nn.Sequential(nn.Linear(6, 1), Act(torch.log))).compare_precision('bf16', n_steps=2, n_seeds=1)
    assert r.recommended == 'fp32' and r.reason.startswith("The fp32 loss is not finite: check")


# -- speed


class Sleeps(Callback):
    "Steps of .1 seconds, shorter by the speed-up in low precision, with noise of this standard deviation."

    run_on_copy = True

    taken, draws = [], random.Random()  # of all copies

    def __init__(self, speed_up, noise=0.0):
        self.speed_up, self.noise = speed_up, noise
        self.draws.seed(0)

    def before_batch(self):
        low = self.learn.precision is not None
        if not self.learn.training:
            return
        self.taken.append(self.learn.precision.mode if low else 'fp32')
        time.sleep(0.1 / (self.speed_up if low else 1) * np.exp(self.noise * self.draws.gauss(0, 1)))


def test_the_interval_is_one_of_ratios():
    "The interval is of the logarithms: it is above 0, and that of the inverse ratios is the inverse."
    ratios = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2]
    mid, low, high = speed_up(ratios)
    assert 0 < low < mid < high
    inverse = speed_up([1 / r for r in ratios])
    assert inverse == pytest.approx((1 / mid, 1 / high, 1 / low), rel=1e-3)


@pytest.mark.parametrize('gain, recommended', [(1.15, 'bf16'), (1.0, 'fp32')])
def test_rounds_go_on_until_it_is_decided_whether_it_pays(support, sleeps, gain, recommended):
    support({})
    learn = seeded(cbs=Sleeps(gain, noise=0.4))
    r = learn.compare_precision('bf16', n_steps=16, n_seeds=0, max_seconds=1000)
    assert r.recommended == recommended and r.table['rounds']['bf16'] > 16 and sleeps.now < 500
    low, high = r.table.loc['bf16', ['speed-up low', 'speed-up high']]
    assert low < gain < high and (low > 1.05 or high < 1.05)


def test_what_is_not_decided_when_time_ends_is_not_taken_and_said(support, sleeps):
    support({})
    swings = InStep('before_batch', lambda l: time.sleep((0.07, 0.09, 0.12)[l.iter % 3] if l.precision else 0.1))
    r = seeded(cbs=swings).compare_precision('bf16', n_steps=8, n_seeds=0, max_seconds=6)
    assert 5 < sleeps.now < 6.3 and r.recommended == 'fp32'
    assert re.search(r'bf16 looks .*, but this is not certain .*\. Measure for \d minutes? to decide\.', r.reason)


def test_the_table_has_one_estimate(support):
    support({})
    r = seeded(cbs=Sleeps(1.5, noise=0.3)).compare_precision(LOW, n_steps=30, n_seeds=0)
    ms, found = r.table['ms per step'], r.table['speed-up']
    assert (ms['fp32'] / ms).to_dict() == pytest.approx(found.to_dict()) and found['bf16'] != found['fp16']
    assert (r.table['speed-up low'] > 0).all()
    assert [bar.get_width() for bar in r.plot()[1].patches] == pytest.approx(list(found))
    assert f'{found[r.recommended]:.2f} (' in r.reason


def test_the_rule_is_right_as_often_as_it_says(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    from nbs.benchmarks.choice import turns_until_decided

    rng = np.random.default_rng(0)
    for true, at_least, at_most in ((1.5, 1.0, 1.0), (2.0, 1.0, 1.0), (1.0, 0.0, 0.1), (0.9, 0.0, 0.05)):
        found = [turns_until_decided(rng, true, 0.2, 40) for _ in range(100)]
        assert at_least <= np.mean([decided is True for decided, _ in found]) <= at_most, true
        assert min(n for _, n in found) == 6


def test_rounds_alternate_and_none_always_follows_the_same(support):
    support({})
    Sleeps.taken.clear()
    r = seeded(cbs=Sleeps(2.0)).compare_precision(LOW, n_steps=9, n_seeds=0)
    forth = ['fp32', *LOW]
    assert (
        Sleeps.taken[:27] == forth + [name for i in range(8) for name in forth[:: (-1) ** i]]
        and r.table['rounds']['bf16'] == 8
    )


def test_modules_kept_in_fp32_are_matched_in_each_round_and_not_for_each_step(support, sleeps):
    support({})
    asked = []
    learn = seeded(Attentive(gain=1.0), cbs=Sleeps(2.0)).to_bf16(
        fp32_modules=lambda m: asked.append(m) or isinstance(m, nn.LayerNorm)
    )
    counts = []
    for n_steps in (9, 93):
        asked.clear()
        r = learn.compare_precision('bf16', n_steps=n_steps, n_seeds=0, max_seconds=1000)
        assert r.table['rounds']['bf16'] == 8 and r.table['steps']['bf16'] == n_steps
        counts.append(len(asked))
    assert counts[0] == counts[1]


@pytest.mark.parametrize('seconds, gain', [(0.05, 1.5), (0.005, None)])
def test_what_a_whole_fit_gains_is_said_where_loading_takes_long(support, seconds, gain):
    "Steps of .1 and .05 seconds."
    support({})

    class Slow(Data):
        def __getitem__(self, i):
            time.sleep(seconds / 4)
            return super().__getitem__(i)

    slow = Slow(*loaders().train_ds.tensors)
    r = seeded(dls=loaders(train=slow), cbs=Sleeps(2.0)).compare_precision('bf16', n_steps=8, n_seeds=0)
    line = (
        'Loading a batch takes 50 ms, and a step in fp32 100 ms, so a whole fit in bf16 is about 1.50x faster, '
        'not 2.00x.'
    )
    assert r.recommended == 'bf16' and (line in said(r)) == (gain is not None) and ('Loading' in said(r)) == bool(gain)


# -- memory


def test_activations_are_those_counted_by_hand(support):
    """Batch 4, Linear(6, 8), ReLU, Linear(8, 1), mean squared error.

    Autograd keeps the input, ReLU's output, which is the second layer's input, and prediction and target. bf16 keeps
    casts of inputs and weights instead; that of the first weight is not needed, as its input has no gradient.
    """
    support({})
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    r = seeded(model).compare_precision('bf16', n_steps=8, n_seeds=0)
    fp32, bf16 = 1e6 * r.table['activations MB']
    assert fp32 == 4 * (4 * 6 + 4 * 8 + 4 + 4) and bf16 == 2 * (4 * 6 + 4 * 8 + 8) + 4 * (4 + 4)
    assert np.isnan(r.table['peak MB']).all() and 'peak' not in repr(r)


def test_activations_of_checkpoints_are_those_kept_after_the_forward_pass(support):
    support({})

    class Deep(nn.Module):
        def __init__(self, how):
            super().__init__()
            self.how, self.first, self.last = how, nn.Linear(6, 8), nn.Linear(8, 1)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8)) for _ in range(8))

        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = layer(x) if self.how is None else checkpoint(layer, x, use_reentrant=self.how)
            return self.last(x)

    plain, new, old = (
        seeded(Deep(how)).compare_precision('bf16', n_steps=7, n_seeds=0).table['activations MB']['fp32']
        for how in (None, False, True)
    )
    assert new < 0.4 * plain and old < 0.4 * plain


def test_the_peak_of_an_accelerator_is_what_a_step_adds(support, monkeypatch):
    "Replaces PyTorch's counters, as this test has no accelerator."
    support({})
    monkeypatch.setattr(measuring, 'allocated', lambda device, peak=False: 7e6 if peak else 5e6)
    r = seeded().compare_precision('bf16', n_steps=7, n_seeds=0)
    assert (r.table['peak MB'] == 2).all() and 'peak MB' in repr(r)
    monkeypatch.undo()
    for device in ('mps', 'cpu'):
        assert all(np.isnan(measuring.allocated(torch.device(device), peak)) for peak in (False, True))


def test_a_model_that_refuses_to_be_watched_is_compared(support):
    support({})

    class Gradient(nn.Linear):
        def forward(self, x):
            return super().forward(x) + torch.func.grad(lambda z: z.square().sum())(x).mean()

    r = seeded(Gradient(6, 1)).compare_precision('bf16', n_steps=7, n_seeds=0)
    assert np.isnan(r.table['activations MB']).all() and (r.table['steps'] == 7).all()


def live_mb():
    "Without the FakeTensors that compiling in other tests may have left: they have no memory."
    gc.collect()
    found = {}
    for o in gc.get_objects():
        if torch.is_tensor(o) and not isinstance(o, FakeTensor):
            found[o.untyped_storage().data_ptr()] = o.untyped_storage().nbytes()
    return sum(found.values()) / 1e6


def test_no_comparison_keeps_memory():
    "Sigmoids keep their results for the backward pass: 16 of half a MB."
    layers = (m for _ in range(16) for m in (nn.Linear(64, 64), nn.Sigmoid()))
    x = torch.randn(4096, 64)
    dls = loaders(train=Data(x, x[:, :1]), bs=2048)
    learn, live = seeded(nn.Sequential(*layers, nn.Linear(64, 1)), dls), []
    for _ in range(5):
        learn.compare_precision('bf16', n_steps=2, n_seeds=0)
        live.append(live_mb())
    assert max(live) - min(live) < 0.1, live


# -- page faults


@pytest.mark.parametrize('faults, said_so', [(1000, False), (22_496, True)])
def test_page_faults_are_counted_and_said(support, monkeypatch, faults, said_so):
    "Each step has as many faults as the test says, on the test's counter."
    support({})
    counted = [0]
    monkeypatch.setattr(measuring, 'page_faults', lambda device: counted[0])

    class Faults(Sleeps):
        def before_batch(self):
            super().before_batch()
            counted[0] += faults

    r = seeded(cbs=Faults(2.0)).compare_precision('bf16', n_steps=8, n_seeds=0)
    line = 'A step has up to 22,496 page faults from freshly allocated memory. Call'
    assert ('page faults' in said(r)) == (line in said(r)) == ('`keep_freed_memory()`' in said(r)) == said_so


@pytest.mark.skipif(sys.platform != 'linux', reason='looks at the counter of Linux')
def test_page_faults_are_those_of_this_process():
    cpu = torch.device('cpu')
    before = measuring.page_faults(cpu)
    mmap.mmap(-1, 4096 * 500).write(bytes(4096 * 500))
    assert 500 <= measuring.page_faults(cpu) - before < 5000


# -- compiled


@pytest.fixture
def eager_backend(monkeypatch):
    "`Module.compile()` with Dynamo only, whose graphs run eagerly: no C++ compiler is needed."
    monkeypatch.setattr(nn.Module, 'compile', partialmethod(nn.Module.compile, backend='eager'))
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_each_precision_compiled(support, sleeps, eager_backend):
    support({})
    compiling = []

    class Net(nn.Linear):
        def forward(self, x):
            compiling.append(torch.compiler.is_compiling())
            return super().forward(x)

    class Costs(Sleeps):
        "The first step of a compiled copy needs 40 seconds, all others half the time of an uncompiled one."

        def before_batch(self):
            super().before_batch()
            if self.learn.training and self.learn.model._compiled_call_impl:
                time.sleep(40 if self.learn.iter == 0 else -0.5 * 0.1 / (self.speed_up if self.learn.precision else 1))

    learn = seeded(Net(6, 1), cbs=Costs(1.2))
    r = learn.compare_precision('bf16', n_steps=20, n_seeds=1, max_seconds=30, compile=True)
    t = r.table
    assert list(t.index) == ['fp32', 'fp32 compiled', 'bf16', 'bf16 compiled']
    assert t['speed-up'].to_dict() == pytest.approx(dict(zip(t.index, (1, 2, 1.2, 2.4))), rel=1e-3)
    assert (t['steps'] == 20).all() and 80 < sleeps.now < 111  # compiling does not count as time
    assert t['compile s'].dropna().to_dict() == pytest.approx({'fp32 compiled': 40, 'bf16 compiled': 40}, abs=0.2)
    assert r.losses['fp32 compiled'] == pytest.approx(r.losses['fp32'], rel=1e-4)
    assert r.recommended == 'bf16 compiled' and r.calls['bf16 compiled'] == 'learn.to_bf16(); learn.model.compile()'
    assert r.calls['fp32 compiled'] == 'learn.to_fp32(); learn.model.compile()' and True in compiling
    assert learn.model._compiled_call_impl is None and r.plot() is not None and 'compile s' in repr(r)
    assert 'compile s' not in repr(seeded().compare_precision('bf16', n_steps=2, n_seeds=0))
    r.apply(learn)
    assert learn.model._compiled_call_impl is not None and learn.precision.mode == 'bf16'


def test_a_model_that_does_not_compile_gets_rows_with_the_reason(support, monkeypatch):
    support({})

    def no_compiler(self):
        raise RuntimeError('no C++ compiler')

    monkeypatch.setattr(nn.Module, 'compile', no_compiler)
    r = seeded().compare_precision('bf16', n_steps=7, n_seeds=1, compile=True)
    assert list(r.table['support']) == ['native', 'failed', 'native', 'failed']
    assert 'fp32 compiled: RuntimeError: no C++ compiler' in said(r)


def compiled_in_place():
    model = mlp()
    model.compile(backend='eager')
    return model


@pytest.mark.parametrize(
    'make',
    [
        lambda: torch.compile(mlp(), backend='eager'),
        compiled_in_place,
        lambda: nn.Sequential(torch.compile(nn.Linear(6, 8), backend='eager'), nn.Linear(8, 1)),
    ],
    ids=['wrapped', 'in place', 'a part'],
)
def test_compiled_learners_are_compared(support, make):
    support({})
    learn = seeded(make())
    learn.fit(1)
    r = learn.compare_precision('bf16', n_steps=7, n_seeds=1)
    assert (r.table['steps'] == 7).all() and np.isfinite(r.table['loss']).all()
    assert 'The compiled model was compared uncompiled' in said(r)


# -- validation


class Pads(nn.Linear):
    "An fp32 padding mask that only evaluation uses, in place, on a result in low precision."

    def __init__(self, breaks=torch.bfloat16):
        super().__init__(6, 1)
        self.breaks = breaks

    def forward(self, x):
        out = super().forward(x)
        if not self.training and out.dtype in (self.breaks, torch.float32 if self.breaks is None else None):
            raise RuntimeError('expected mask of dtype float')
        return out


def test_a_mode_that_breaks_in_validation_is_not_recommended(support):
    support({})
    learn = seeded(Pads(), cbs=Sleeps(2.0))
    before = bits(learn)
    r = learn.compare_precision(LOW, n_steps=8, n_seeds=0)
    assert r.table['note']['bf16'] == 'RuntimeError: expected mask of dtype float (in validation)'
    assert list(r.table['support']) == ['native', 'failed', 'native'] and r.recommended == 'fp16'
    assert bits(learn) == before
    both = seeded(Pads(None), cbs=Sleeps(2.0)).compare_precision('bf16', n_steps=8, n_seeds=0)
    assert both.recommended == 'bf16'  # which fails where fp32 fails


# -- calls


def test_what_was_given_is_named():
    "The messages are short: no tensors, and no internal Python error."
    learn = seeded()
    for call, kind, words in (
        (lambda: learn.precision_report(n_batch=3), TypeError, "unexpected keyword argument 'n_batch'"),
        (lambda: learn.compare_precision(seeds=3), TypeError, "unexpected keyword argument 'seeds'"),
        (lambda: learn.compare_precision(learn.dls.train), ValueError, 'modes=<fastai.data.load.DataLoader object'),
        (lambda: learn.compare_precision([torch.rand(9, 9)]), ValueError, r'modes=tensor\(\[\['),
        (lambda: learn.precision_report(learn.dls.train), ValueError, 'modes=<fastai.data.load.DataLoader object'),
    ):
        with pytest.raises(kind, match=words) as error:
            call()
        assert len(str(error.value)) < 400, error.value
    assert 'n_seeds' in signature(type(learn).compare_precision).parameters


@pytest.mark.parametrize(
    'call, name',
    [
        (lambda l: l.precision_report(), 'precision_report'),
        (lambda l: l.compare_precision(), 'compare_precision'),
        (lambda l: l.to_amp(measure=True), 'to_amp(measure=True)'),
    ],
)
def test_learners_without_data_are_told_so(call, name, tmp_path):
    seeded().export(tmp_path / 'learner.pkl')
    words = f'{name} needs at least one batch, but `learn.dls.train` has none.\nA learner from `load_learner` has no'
    for learn in (load_learner(tmp_path / 'learner.pkl'), Learner(DataLoaders(), mlp(), nn.MSELoss())):
        with pytest.raises(ValueError, match=re.escape(words)):
            call(learn)


@pytest.mark.parametrize('call', [lambda l: l.compare_precision(), lambda l: l.to_amp(measure=True)])
def test_a_frozen_base_in_half_precision_is_refused_at_the_call(call):
    model = nn.Sequential(nn.Linear(6, 8).bfloat16().requires_grad_(False), nn.Linear(8, 1))
    words = 'compares with fp32 training, but this model has 16-bit parameters.\n.*learn.to_bf16'
    with pytest.raises(ValueError, match=words):
        call(seeded(model))


def test_apply_makes_the_call_that_keeps_what_the_learner_has():
    learn = seeded(Attentive(gain=1.0)).to_fp16(init_scale=256.0, fp32_modules='attn', on_overflow='raise')
    r = learn.compare_precision([*LOW, 'half_weights'], n_steps=1, n_seeds=0)
    for name, call in {
        'fp16': "learn.to_fp16(init_scale=256.0, fp32_modules=['attn'], on_overflow='raise')",
        'bf16': "learn.to_bf16(fp32_modules=['attn'], on_overflow='raise')",
        'half_weights': "learn.to_half_weights(fp32_modules=['attn'], on_overflow='raise')",
    }.items():
        assert r.calls[name] == call and r.apply(learn, name) is learn
    assert isinstance(learn.precision.precision, HalfWeights)
    r.apply(learn)
    assert r.recommended == 'fp32' and learn.precision is None
    with pytest.raises(ValueError, match="mode='fp8' cannot be used: it was not compared"):
        r.apply(learn, 'fp8')


# -- time


def test_all_of_it_ends_in_max_seconds_and_the_loss_is_judged_where_all_seeds_have_time(support, sleeps):
    support({})
    start = sleeps.now
    r = seeded(cbs=InStep('before_batch', lambda l: time.sleep(0.02))).compare_precision(
        'bf16', n_steps=2000, max_seconds=3
    )
    assert 2.5 < sleeps.now - start < 3.1
    n = len(r.losses['fp32'])
    assert 15 < n < 2000 and (r.table['steps'] > n).all() and [len(l) for l in r.seed_losses] == [n] * 3
    assert f'`max_seconds=3` was enough for {n:,} of 2,000 steps, and for fp32 with 3 of 3 other seeds.' in said(r)


def test_a_warm_up_and_one_step_of_each_are_trained_in_no_time(support):
    support({})
    r = seeded().compare_precision('bf16', n_steps=16, max_seconds=1e-9)
    assert r.table['steps'].to_dict() == {'fp32': 2, 'bf16': 2} and r.seed_losses == []
    assert r.recommended == 'fp32'
    assert r.reason.startswith('bf16 looks ')
    assert r.reason.endswith(', but this is not certain (- to -). Measure for 1 minute to decide.')


def test_few_kept_batches(monkeypatch):
    monkeypatch.setattr(measuring, 'LIMIT', 350)  # a batch is 4 * 7 * 4 = 112 bytes
    r = seeded().compare_precision('bf16', n_steps=8, n_seeds=0)
    plain, seen = seeded(), []
    plain.dls.train.n = 16
    plain.fit(2, cbs=At('after_batch', lambda l: seen.append(l.loss.item()) if l.training else None))
    assert r.losses['fp32'] == seen


def test_by_default_what_the_device_does_natively_is_compared(support):
    support({'fp16': 'emulated'})
    assert list(seeded().compare_precision(n_steps=2, n_seeds=0).table.index) == ['fp32', 'bf16']
    half = seeded().to_half_weights().compare_precision(n_steps=2, n_seeds=0)
    assert list(half.table.index) == ['fp32', 'bf16', 'half_weights']
    support({'bf16': 'emulated', 'fp16': 'unsupported'})
    r = seeded().compare_precision(n_steps=2, n_seeds=0)
    assert list(r.table.index) == ['fp32'] and r.recommended == 'fp32' and r.table['steps']['fp32'] == 1
    assert r.reason == 'Nothing else was compared.'
    r = seeded(cbs=GradientAccumulation(64)).compare_precision(n_steps=2, n_seeds=0)  # whose weights do not move
    assert r.reason == 'Nothing else was compared.'


def test_an_emulated_mode_that_is_named_trains_as_every_other(support, sleeps):
    "The rounds, steps and time limit are those of all."
    support({'bf16': 'emulated'})
    start = sleeps.now
    slow = InStep('before_batch', lambda l: time.sleep(0.5 if l.precision else 0.02))
    r = seeded(cbs=slow).compare_precision('bf16', n_steps=36, n_seeds=1, max_seconds=10)
    assert sleeps.now - start < 10.6 and r.table['support']['bf16'] == 'emulated'
    steps = r.table['steps']
    assert 13 < steps['fp32'] == steps['bf16'] < 20 and np.isfinite(r.table['loss']['bf16'])
    assert r.recommended == 'fp32' and r.reason.endswith('below 1.05.')


def test_same_numbers_each_time():
    learn = seeded(dls=shuffled())
    a, b = (learn.compare_precision(LOW, n_steps=8, n_seeds=2) for _ in range(2))
    assert a.losses == b.losses and a.seed_losses == b.seed_losses
    assert a.losses['fp32'] != a.seed_losses[0] != a.seed_losses[1]


# -- the recommendation


def table_of(**modes):
    base = {
        'support': 'native',
        'steps': 50,
        'rounds': 8,
        'ms per step': 100.0,
        'speed-up': 1.0,
        'speed-up low': 1.0,
        'speed-up high': 1.0,
        'loss': 1.0,
        'loss difference': 0.0,
        'skipped': 0,
        'final scale': float('nan'),
        'weights moved': 1.0,
        'note': '',
    }
    table = {'fp32': base}
    for name, changes in modes.items():
        table[name] = {**base, 'speed-up': 2.0, 'speed-up low': 1.9, 'speed-up high': 2.1, **changes}
        table[name]['loss'] = 1 + table[name]['loss difference']
    return pd.DataFrame(table.values(), index=list(table))


def speeds(low, mid, high):
    return {'speed-up low': low, 'speed-up': mid, 'speed-up high': high}


SEEDS = tolerance([1.0], [1.05, 0.95, 1.02], 1)  # fp32 trained four times: a loss up to .11 higher matches fp32


@pytest.mark.parametrize(
    'modes, best, text',
    [
        (dict(bf16={}, fp16={}), 'bf16', 'its loss is within the spread of 4 fp32 trainings.'),
        (dict(bf16=speeds(1.22, 1.3, 1.35)), 'bf16', 'Speed-up 1.30 (1.22 to 1.35); its loss is within'),
        (dict(bf16={}, fp16=speeds(2.9, 3.0, 3.1)), 'fp16', 'Speed-up 3.00 (2.90 to 3.10); '),
        (dict(bf16=speeds(1.51, 1.69, 2.7)), 'bf16', '1.69 (1.51 to 2.70)'),  # a wide interval above 1.05
        (
            dict(bf16={}, fp16={**speeds(2.9, 3.0, 3.1), 'loss difference': 0.2}),
            'bf16',
            'its loss is 0.2 above that of fp32; the limit is 0.11, the spread of 4 fp32 trainings',
        ),
        (dict(fp16={'loss difference': float('nan')}), 'fp32', 'its loss is not finite'),
        (dict(fp16={'skipped': 26}), 'fp32', 'it skipped 26 of 50 steps'),
        (dict(bf16=speeds(0.68, 0.7, 0.72)), 'fp32', 'bf16: speed-up 0.70 (0.68 to 0.72), below 1.05.'),
        (dict(bf16={**speeds(0.2, 0.3, 0.4), 'support': 'emulated'}), 'fp32', 'below 1.05'),
        (dict(bf16=speeds(1.02, 1.03, 1.04)), 'fp32', 'below 1.05'),
        (
            dict(bf16=speeds(0.96, 1.15, 1.34)),
            'fp32',
            'bf16 looks 1.15x faster, but this is not certain (0.96 to 1.34). Measure for 4 minutes to decide.',
        ),
        (
            dict(bf16={'rounds': 5, **speeds(math.nan, 2.0, math.nan)}),
            'fp32',
            'bf16 looks 2.00x faster, but this is not certain (- to -). Measure for 2 minutes to decide.',
        ),
        (dict(bf16={'support': 'failed', 'loss difference': float('nan')}), 'fp32', 'does not run'),
    ],
)
def test_recommendation(modes, best, text):
    table = table_of(**modes)
    recommended, reason = recommend(table, SEEDS)
    assert recommended == best and text in reason


def test_without_a_second_training_of_fp32_only_a_wide_tolerance_refuses():
    alone = tolerance([1.02, 0.99, 0.99], [], 3)
    for difference, best in ((0.02, 'bf16'), (0.09, 'bf16'), (0.2, 'fp32')):
        found, reason = recommend(table_of(bf16={'loss difference': difference}), alone)
        assert found == best and 'a wide tolerance (fp32 was trained only once)' in reason
    assert tolerance([0.1, 3.0, 0.1], [], 3)[0] > 1


def test_the_more_trainings_of_fp32_the_less_is_tolerated_down_to_what_counts_at_all():
    two, three, four = (tolerance([1.0], [1.1, 1.05, 0.95][:n], 1)[0] for n in (1, 2, 3))
    assert two > three > four
    for losses, least in (([1.0], 0.01), ([-0.35], 0.0035), ([16.0, 1e-5], 0.016), ([2.0, -0.01], 0.00201)):
        assert tolerance(losses, [losses[-1] + 1e-6, losses[-1] - 1e-6, losses[-1]], 1)[0] == pytest.approx(least)


def test_plot(support):
    import matplotlib.pyplot as plt

    support({'fp16': 'emulated'})
    r = seeded().compare_precision(LOW, n_steps=8, n_seeds=2)
    r.table.loc['bf16', ['speed-up', 'speed-up low', 'speed-up high']] = 12.34, 11.0, 13.0
    curves, bars = r.plot()
    assert [t.get_text() for t in curves.get_legend().get_texts()] == ['fp32, other seeds', 'fp32', 'bf16', 'fp16']
    assert len(curves.get_lines()) == 2 + 3 and len(bars.patches) == 3  # two other seeds
    assert [t.get_text() for t in bars.get_yticklabels()] == ['fp32', 'bf16', 'fp16']
    assert [t.get_text() for t in bars.texts][:2] == ['1 (reference)', '12.34 (11.00 to 13.00)']
    curves.figure.canvas.draw()
    inside, boxes = bars.get_window_extent(), [t.get_window_extent() for t in bars.texts]
    assert len(boxes) == 3 and all(inside.x0 <= b.x0 and b.x1 <= inside.x1 for b in boxes)
    assert curves.get_legend().get_window_extent().y0 >= 0
    plt.close('all')


@pytest.mark.cuda
def test_on_an_nvidia_gpu():
    device = torch.device('cuda')
    learn = seeded(mlp().cuda(), loaders(n=48).to(device), opt_func=OPTIMIZERS['fused adamw'])
    learn.fit(1)
    state, rng = [p.clone() for p in params(learn)], torch.cuda.get_rng_state()
    r = learn.compare_precision(LOW, n_steps=16, n_seeds=1)
    assert same(params(learn), state) and torch.equal(torch.cuda.get_rng_state(), rng)
    assert (r.table['steps'] >= 16).all() and (r.table['peak MB'] > 0).all()
