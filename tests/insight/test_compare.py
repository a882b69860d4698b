"Precisions side by side: each trains as it would in a plain loop, and the recommendation says how sure it is."
import random, time, warnings

import numpy as np
import pandas as pd
import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.losses import CrossEntropyLossFlat
from torch import nn

from fastxtend_amp import HalfWeights, PrecisionComparison, mode
from fastxtend_amp.insight import compare, trainings
from fastxtend_amp.insight.recommend import Tolerance, fused_name, recommend, remarks_on
from helpers import (OPTIMIZERS, At, Attentive, Data, handwritten, learner, loaders, mlp, opt_state, params, same,
                     same_state)
from states import bits, language_model, rich, shuffled


def seeded(*args, **kwargs):
    random.seed(0); np.random.seed(0); torch.manual_seed(0)
    return learner(*args, **kwargs)


def said(r):
    "What it prints, in one line."
    return ' '.join(repr(r).split())


@pytest.fixture
def support(monkeypatch):
    "Sets how the device runs each mode."
    def set_support(status, why='for this test'):
        monkeypatch.setattr(compare, 'mode_support', lambda m, d: mode.Support(status.get(m.value, 'native'), why))
    return set_support


# -- what is trained

def test_table_and_texts(support):
    support({})
    r = seeded().compare_precision(n_steps=10, n_seeds=2)
    assert isinstance(r, PrecisionComparison) and list(r.table.index) == ['fp32', 'bf16', 'fp16']
    t = r.table
    assert list(t['steps']) == [10] * 3 and (t['samples/s'] > 0).all() and t['speed-up']['fp32'] == 1
    assert (t['speed-up q1'] <= t['speed-up']).all() and (t['speed-up'] <= t['speed-up q3']).all()
    assert [len(l) for l in r.losses.values()] == [10] * 3 and [len(l) for l in r.seed_losses] == [10] * 2
    tails = {n: np.mean(l[-2:]) for n, l in r.losses.items()}
    assert t['loss'].to_dict() == pytest.approx(tails)
    assert t['loss difference'].to_dict() == pytest.approx({n: v - tails['fp32'] for n, v in tails.items()})
    seeds = [tails['fp32'], *(np.mean(l[-2:]) for l in r.seed_losses)]
    assert t['seed spread'].iloc[0] == pytest.approx(np.std(seeds, ddof=1))
    assert np.isnan(t['final scale'][['fp32', 'bf16']]).all()
    assert t['final scale']['fp16'] == 65536 / 2 ** t['skipped']['fp16']
    assert r.recommended in t.index and said(r).startswith(f'Recommended: {r.recommended}. {r.reason} ')
    assert max(map(len, repr(r).splitlines())) <= 120 and '<table' in r._repr_html_()


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
@pytest.mark.parametrize('name', ['bf16', 'fp16'])
def test_each_mode_trains_as_a_loop_of_its_own_would(name, opt):
    r = seeded(opt_func=OPTIMIZERS[opt]).compare_precision([name], n_steps=12, n_seeds=0, lr=.01)
    _, _, scaler, losses = handwritten(name, OPTIMIZERS[opt], n_epoch=2, lr=.01)
    assert r.losses[name] == losses                              # the batches come again when an epoch is over
    if name == 'fp16': assert r.table['final scale']['fp16'] == scaler.get_scale()
    plain, seen = seeded(opt_func=OPTIMIZERS[opt]), []
    plain.fit(2, .01, cbs=At('after_batch', lambda l: seen.append(l.loss.item()) if l.training else None))
    assert r.losses['fp32'] == seen


@pytest.mark.parametrize('own', ['half weights', 'bf16', None])
def test_each_row_runs_in_the_precision_it_names(own, monkeypatch):
    "By the dtypes of the weight inside the layer's forward and of its output."
    fp32, bf16, linear, seen = torch.float32, torch.bfloat16, nn.functional.linear, []
    def recorded(x, weight, bias=None):
        out = linear(x, weight, bias)
        seen.append((weight.dtype, out.dtype))
        return out
    monkeypatch.setattr(nn.functional, 'linear', recorded)
    expected = {'fp32': (fp32, fp32), 'bf16': (fp32, bf16), 'half weights': (fp32, bf16)}
    for name in expected:
        learn = seeded(nn.Sequential(nn.Linear(6, 1)))
        if own == 'half weights': learn.to_half_weights('bf16')
        if own == 'bf16': learn.to_bf16()
        seen.clear()
        r = learn.compare_precision(name, n_steps=3, n_seeds=0)
        assert list(r.table.index) == list(dict.fromkeys(['fp32', name])) and r.table['note'][name] == ''
        assert set(seen) == {expected['fp32'], expected[name]} and not r.table['loss'].isna().any()


def test_precision_of_the_learner_is_the_template():
    learn = seeded().to_fp16(loss_scale=32.)
    cb = learn.precision
    r = learn.compare_precision(n_steps=4, n_seeds=0)
    assert r.table['final scale']['fp16'] == 32 and learn.precision is cb and cb.learn is learn and cb.scales == []
    learn.to_fp16(init_scale=1024., growth_interval=2)
    learn.fit(1)
    n, scale = len(learn.precision.scales), learn.precision.scale
    r = learn.compare_precision(['fp16'], n_steps=4, n_seeds=0)
    assert r.table['final scale']['fp16'] == scale * 4 and r.table['skipped']['fp16'] == 0
    assert len(learn.precision.scales) == n and learn.precision.scale == scale


def test_modules_kept_in_fp32_are_kept_in_the_comparison():
    learn = learner(Attentive()).to_fp16(init_scale=1024., fp32_modules='attn')
    r = learn.compare_precision(('fp32', 'fp16'), n_steps=4)
    assert r.table['skipped']['fp16'] == 0 and np.isfinite(r.table['loss']['fp16'])
    plain = learner(Attentive()).to_fp16().compare_precision(('fp32', 'fp16'), n_steps=4)
    assert plain.table['skipped']['fp16'] == 4


def test_half_weights_have_rows_of_their_own():
    names = ['fp32', 'bf16', 'half weights', 'half weights fp16']
    r = seeded().compare_precision(('fp32', 'bf16', 'half weights', 'half_weights fp16'), n_steps=3, n_seeds=0)
    assert list(r.table.index) == names and (r.table['steps'] == 3).all()
    assert r.calls['half weights'] == "learn.to_half_weights(dtype='bf16')"
    assert r.losses['half weights'] != r.losses['fp32']


class Logs(Callback):
    def before_fit(self): events.append('before_fit')
    def after_batch(self): events.append('after_batch')
class Shapes(Callback):
    def after_pred(self): events.append(self.learn.training)
events = []


def test_who_takes_part(tmp_path):
    events.clear()
    learn = seeded(cbs=[Logs(), Shapes(), GradientClip(1e-3), SaveModelCallback(), EarlyStoppingCallback()],
                   path=tmp_path)
    printed = []
    learn.logger = printed.append
    r = learn.compare_precision(n_steps=4, n_seeds=1)
    assert events == [True] * 16 and not printed and not list(tmp_path.rglob('*'))       # four trainings of four steps
    assert 'These callbacks took no part: logs, save_model, early_stopping.' in said(r)
    clipped, seen = seeded(cbs=GradientClip(1e-3)), []
    clipped.fit(1, cbs=At('after_batch', lambda l: seen.append(l.loss.item()) if l.training else None))
    assert r.losses['fp32'] == seen[:4]
    events.clear()
    other = learn.compare_precision(n_steps=4, n_seeds=0, cbs=[learn.cbs[0]])
    assert not events and other.losses['fp32'] != r.losses['fp32']
    with pytest.raises(ValueError, match="not among the learner's callbacks"):
        learn.compare_precision(cbs=[GradientClip()])


@pytest.mark.parametrize('make', [MixUp, CutMix, lambda: GradientAccumulation(8)],
                         ids=['mixup', 'cutmix', 'accumulation'])
def test_callbacks_that_change_the_batch_or_the_loss(make):
    x = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    dl = lambda: DataLoader(Data(x, torch.arange(16) % 3), bs=4, shuffle=True, num_workers=0,
                            device=torch.device('cpu'))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    data, loss = x.clone(), CrossEntropyLossFlat()
    learn = seeded(model, DataLoaders(dl(), dl(), device=torch.device('cpu')), loss, cbs=make())
    r = learn.compare_precision(n_steps=8, n_seeds=1)
    assert r.table['loss difference'].abs().max() < .1 and (r.table['steps'] == 8).all()   # the same mixtures in each
    assert torch.equal(x, data) and learn.loss_func is loss
    learn.fit(1)


# -- no side effect

@pytest.mark.parametrize('make', [rich, language_model], ids=['after a fit', 'awd_lstm'])
def test_learner_is_as_it_was(make):
    learn = make()
    before = bits(learn)
    r = learn.compare_precision(n_steps=6, n_seeds=1)
    after = bits(learn)
    for key in before: assert after[key] == before[key], key
    assert list(r.table['steps'])[0] == 6


@pytest.mark.parametrize('opt', ['fused adamw', 'adam'])
def test_training_after_it_equals_training_without_it(opt):
    def run(compared):
        random.seed(0); np.random.seed(0)
        learn = rich(opt)
        learn.model.train(); [p.requires_grad_(True) for p in learn.model.parameters()]
        if compared: learn.compare_precision(n_steps=8, n_seeds=1)
        learn.fit(2, .02)
        return learn
    a, b = run(False), run(True)
    assert same(params(a), params(b)) and same_state(opt_state(a.opt), opt_state(b.opt))
    assert a.recorder.losses == b.recorder.losses and a.precision.scales == b.precision.scales


@pytest.mark.parametrize('error', [KeyboardInterrupt, ZeroDivisionError])
def test_interrupted_in_the_middle(error):
    class Breaks(Callback):                                      # in low precision
        def after_loss(self):
            if self.learn.precision: raise error('now')
    learn = rich()
    learn.add_cb(Breaks())
    before = bits(learn)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt): learn.compare_precision(n_steps=8, n_seeds=0)
    else:                                                        # each mode fails, fp32 does not
        r = learn.compare_precision(n_steps=8, n_seeds=0)
        assert list(r.table['support']) == ['native', 'failed', 'failed'] and r.recommended == 'fp32'
        assert r.table['note']['bf16'] == 'ZeroDivisionError: now' and 'bf16: does not run here' in r.reason
        assert r.plot() is not None
    after = bits(learn)
    for key in before: assert after[key] == before[key], key


def test_order_of_the_next_batches():
    from fastai.text.data import LMDataLoader, TensorText
    def make():
        documents = [(TensorText(torch.arange(n) % 20),) for n in (30, 25, 40, 22, 31, 28)]
        return LMDataLoader(documents, bs=2, seq_len=5, shuffle=True)
    def batches(compared):
        random.seed(3)
        learn = learner(nn.Sequential(nn.Embedding(20, 4), nn.Linear(4, 20)),
                        DataLoaders(make(), make(), device=torch.device('cpu')),
                        lambda p, y: nn.functional.cross_entropy(p.flatten(0, 1), y.flatten()))
        list(learn.dls.train)
        if compared: learn.compare_precision('bf16', n_steps=3, n_seeds=1)
        return [b[0].tolist() for _ in range(2) for b in learn.dls.train]
    assert batches(True) == batches(False)


def test_what_becomes_of_the_copies_is_in_the_table_and_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        seeded(Attentive(), cbs=GradientAccumulation(64)).to_fp16().compare_precision(n_steps=3, n_seeds=0)
        r = seeded(Attentive()).compare_precision(n_steps=3, n_seeds=0)
    assert r.table['skipped']['fp16'] == 3


# -- what is refused, and what gets a row

@pytest.mark.parametrize('kwargs, match', [
    (dict(modes=('fp32', 'int8')), 'int8'), (dict(modes='fp8'), 'fp8'), (dict(n_steps=0), 'n_steps=0'),
    (dict(n_steps=2.5), 'n_steps=2.5'), (dict(n_seeds=-1), 'n_seeds'), (dict(max_seconds=0), 'max_seconds'),
    (dict(modes=20), 'modes=20 cannot be used.*Did you mean n_steps=20'),
    (dict(modes=('fp32', 'fp61')), "modes='fp61'.*not a precision(.|\n)*'fp32'")])
def test_bad_arguments(kwargs, match):
    with pytest.raises(ValueError, match=match): seeded().compare_precision(**kwargs)


def test_unusable_learners():
    with pytest.raises(RuntimeError, match='mat1 and mat2'):     # the data has six columns
        learner(nn.Sequential(nn.Linear(5, 1))).compare_precision(n_steps=4)
    learn = seeded()
    learn.dls.n_inp = 2
    with pytest.raises(ValueError, match='no targets'):
        seeded(nn.Bilinear(6, 1, 1), learn.dls).compare_precision(n_steps=2)
    empty = loaders(n=24)
    empty.train.drop_last, empty.train.bs = True, 64
    with pytest.raises(ValueError, match='gives no batches'): learner(dls=empty).compare_precision(n_steps=4)
    for precise in (learner(), learner().to_bf16()):
        with pytest.raises(RuntimeError, match='compare_precision cannot run inside a fit'):
            precise.fit(1, cbs=At('after_batch', lambda l: l.compare_precision()))


def test_a_mode_that_does_not_run_gets_a_row_with_the_reason(support, monkeypatch):
    class Refuses(nn.Linear):
        def forward(self, x):
            if torch.get_autocast_dtype('cpu') is torch.float16 and torch.is_autocast_enabled('cpu'):
                raise RuntimeError('could not create a primitive\nmore')
            return super().forward(x)
    support({'bf16': 'unsupported'}, 'no such unit')
    r = seeded(nn.Sequential(Refuses(6, 1))).compare_precision(n_steps=4, n_seeds=1)
    assert list(r.table['steps']) == [4, 0, 0] and list(r.table['support']) == ['native', 'unsupported', 'failed']
    assert list(r.table['note']) == ['', 'no such unit', 'RuntimeError: could not create a primitive']
    assert 'fp16: does not run here' in r.reason and r.table['note']['fp16'] in said(r)
    monkeypatch.setattr(mode, 'refused_layer', lambda kind, m: 'no kernel' if m == 'fp16' else None)
    r = language_model().compare_precision('fp16', n_steps=2, n_seeds=0)
    assert r.table['note']['fp16'].startswith('fp16 does not run on this CPU for ') and 'Exception' not in repr(r)


def test_modes_by_other_names():
    assert list(seeded().compare_precision('bf16-mixed', n_steps=2, n_seeds=0).table.index) == ['fp32', 'bf16']
    assert list(seeded().compare_precision([torch.float32, 'FP32'], n_steps=1, n_seeds=0).table.index) == ['fp32']


def test_a_training_that_diverges_is_drawn_and_named():
    class Overflows(nn.Linear):
        def forward(self, x):
            big = (super().forward(x).abs() + 1) * 1e5           # beyond fp16 in each batch
            return (big - big.detach()) / 1e5 + super().forward(x)
    r = seeded(nn.Sequential(Overflows(6, 1))).compare_precision(['fp16'], n_steps=6, n_seeds=1)
    assert np.isnan(r.losses['fp16']).all() and np.isfinite(r.losses['fp32']).all() and r.table['skipped']['fp16'] == 6
    assert r.recommended == 'fp32' and 'fp16: its loss is not finite' in r.reason
    assert 'fp16 (not finite from step 1)' in [l.get_label() for l in r.plot()[0].get_lines()]


# -- calls

def test_calls_keep_what_the_learner_has():
    learn = learner(Attentive()).to_fp16(init_scale=1024., fp32_modules='attn', max_skips=5, on_overflow='raise')
    r = learn.compare_precision(n_steps=2, n_seeds=0)
    for name in ('bf16', 'fp16'):
        assert "fp32_modules=['attn']" in r.calls[name] and 'max_skips=5' in r.calls[name], r.calls
        assert "on_overflow='raise'" in r.calls[name]
    assert 'init_scale=1024' in r.calls['fp16'] and learn.precision.on_overflow == 'raise'


@pytest.mark.parametrize('name', ['fp32', 'bf16', 'fp16', 'half weights'])
@pytest.mark.parametrize('own', ['fp16', 'half weights', None])
def test_apply(name, own):
    learn = seeded(Attentive(gain=1.))
    if own == 'fp16': learn.to_fp16(init_scale=256., fp32_modules='attn')
    if own == 'half weights': learn.to_half_weights(fp32_modules='attn')
    r = learn.compare_precision(('bf16', 'fp16', 'half weights'), n_steps=1, n_seeds=0)
    r.recommended = name
    assert r.apply() is learn
    cb = learn.precision
    if name == 'fp32': assert cb is None
    else:
        assert cb.amp_mode == ('bf16' if name == 'half weights' else name) and cb.as_call() == r.calls[name]
        assert isinstance(cb, HalfWeights) == (name == 'half weights')
        if own is not None: assert cb.fp32_module_names == ['attn']
    learn.fit(1)
    with pytest.raises(ValueError, match="mode='fp8'.*was not compared"): r.apply(mode='fp8')


# -- time

class Slow(nn.Linear):
    "Takes 0.02 s of the test's clock, which can be copied with it."
    def forward(self, x):
        time.sleep(.02)
        return super().forward(x)


def test_all_of_it_ends_in_max_seconds_with_a_seed(clock, monkeypatch):
    monkeypatch.setattr(time, 'sleep', clock.sleep)
    start = clock.now
    r = seeded(nn.Sequential(Slow(6, 1))).compare_precision('bf16', n_steps=2000, max_seconds=3)
    assert clock.now - start < 5
    steps = r.table['steps']
    assert 3 <= steps.min() and steps['fp32'] < 2000 and 'cut short after' in r.table['note']['fp32']
    assert len(r.seed_losses) >= 1 and not r.table['seed spread'].isna().any()
    assert 'there was no time (`max_seconds=3`)' in said(r) and f'{1 + len(r.seed_losses)} fp32 trainings' in said(r)


def test_one_step_of_each_is_trained_in_no_time():
    r = seeded().compare_precision(['bf16'], n_steps=16, max_seconds=1e-9)
    assert r.table['steps'].to_dict() == {'fp32': 1, 'bf16': 1} and r.seed_losses == []
    assert 'cut short after 1 of 16 steps' in r.table['note']['bf16']
    assert r.recommended == 'fp32' and 'too few for a range of its speed' in r.reason


def test_few_kept_batches(monkeypatch):
    monkeypatch.setattr(trainings, 'LIMIT', 450)                 # a batch is 4 * 7 * 4 = 112 bytes
    r = seeded().compare_precision(['bf16'], n_steps=6, n_seeds=0)
    assert r.table['steps']['fp32'] == 6 and 'The steps took 4 batches in turn' in said(r)


def test_an_emulated_mode_sees_fewer_samples_and_stands_beside_fp32_on_the_same(support):
    sizes = []
    class Sizes(nn.Linear):
        def forward(self, x):
            sizes.append((torch.is_autocast_enabled('cpu'), len(x)))
            return super().forward(x)
    support({'bf16': 'emulated'})
    learn = seeded(nn.Sequential(Sizes(6, 1)), loaders(n=192, bs=64))
    r = learn.compare_precision(('bf16', 'fp16'), n_steps=6, n_seeds=1)
    assert set(sizes) == {(True, 8), (True, 64), (False, 8), (False, 64)}
    few = 'fp32, 8 samples'
    assert list(r.table.index) == ['fp32', 'fp16', few, 'bf16'] and list(r.table['samples']) == [64, 64, 8, 8]
    assert list(r.table['measure']) == ['fp32', 'fp32', few, few] and few not in r.calls
    assert r.table['loss difference']['bf16'] == pytest.approx(r.table['loss']['bf16'] - r.table['loss'][few])
    assert '8 of the 64 samples of each batch' in r.table['note']['bf16'] and (r.table['steps'] == 6).all()
    axs = r.plot()
    drawn = [[l.get_label() for l in ax.get_lines()] for ax in axs[:2]]
    assert len(axs) == 4 and drawn == [['fp32', 'fp16'], [few, 'bf16']]


def test_same_numbers_each_time():
    learn = seeded(dls=shuffled())
    a, b = (learn.compare_precision(n_steps=8, n_seeds=2) for _ in range(2))
    assert a.losses == b.losses and a.seed_losses == b.seed_losses
    assert a.losses['fp32'] != a.seed_losses[0] != a.seed_losses[1]


def test_where_the_time_of_a_step_goes(clock, monkeypatch):
    monkeypatch.setattr(time, 'sleep', clock.sleep)
    class Sleeps(Callback):
        def before_step(self): time.sleep(.01)
    learn = seeded(nn.Sequential(Slow(6, 1)), cbs=Sleeps(), opt_func=OPTIMIZERS['adam'])
    r = learn.compare_precision('bf16', n_steps=8, n_seeds=0)
    row = r.table.loc['bf16']
    assert .02 <= row['forward'] < .03 and .01 <= row['optimizer'] < .02 and row['backward'] < .01 and row['rest'] < .01
    assert sum(row[k] for k in ('forward', 'backward', 'optimizer', 'rest')) == pytest.approx(4 / row['samples/s'], rel=.3)
    assert 'The forward pass takes' in said(r) and f'% of the {r.recommended} step' in said(r)


def test_progress_is_shown_unless_switched_off_and_taken_away_after_an_error(capsys):
    learn = seeded(progress=True)
    with learn.no_bar(): learn.compare_precision(n_steps=2, n_seeds=0)
    assert not capsys.readouterr().out
    learn.compare_precision(n_steps=2, n_seeds=0)
    shown = capsys.readouterr().out
    assert '100' in shown and 'at most 60 s' in shown and '0.00%' in shown
    learn = seeded(nn.Sequential(nn.Linear(5, 1)), progress=True)          # the data has six columns
    with pytest.raises(RuntimeError): learn.compare_precision(n_steps=2, n_seeds=0)
    assert capsys.readouterr().out.endswith('\r')


# -- the recommendation

def table_of(**modes):
    base = {'support': 'native', 'steps': 50, 'turns': 8, 'samples': 4, 'samples/s': 100., 'speed-up': 1.,
            'speed-up q1': 1., 'speed-up q3': 1., 'peak memory': 1000., 'loss': 1., 'loss difference': 0.,
            'final scale': float('nan'), 'skipped': 0, 'note': '', 'forward': .3, 'backward': .3, 'optimizer': .1,
            'rest': .3, 'data': 0., 'page faults': 0.}
    table = {'fp32': base}
    for name, changes in modes.items():
        table[name] = {**base, 'speed-up': 2., 'speed-up q1': 1.9, 'speed-up q3': 2.1, **changes}
        table[name]['loss'] = 1 + table[name]['loss difference']
    return pd.DataFrame(table.values(), index=list(table))


def speeds(low, mid, high): return {'speed-up q1': low, 'speed-up': mid, 'speed-up q3': high}


SEEDS = Tolerance([1.], [1.05, .95, 1.02])     # fp32 trained four times: up to .11 above is as fp32


@pytest.mark.parametrize('modes, best, text', [
    (dict(bf16={}, fp16={}), 'bf16', 'fp16 is about as fast but needs loss scaling'),
    (dict(bf16=speeds(1.22, 1.3, 1.35)), 'bf16', "1.30, 1.22 to 1.35 times fp32's speed, and a loss no further above fp32's than "
                                                  '0.11, as 4 trainings of fp32 allow'),
    (dict(bf16={}, fp16=speeds(2.9, 3., 3.1)), 'fp16', "3.00, 2.90 to 3.10 times fp32's speed"),
    (dict(bf16={}, fp16={**speeds(2.9, 3., 3.1), 'loss difference': .2}), 'bf16', 'its loss is 0.2 above'),
    (dict(bf16={}, fp16={**speeds(2.9, 3., 3.1), 'loss difference': float('nan')}), 'bf16', 'its loss is not finite'),
    (dict(bf16={}, fp16={**speeds(2.9, 3., 3.1), 'final scale': .5}), 'bf16', 'below 1 the model does not fit fp16'),
    (dict(bf16={}, fp16={**speeds(2.9, 3., 3.1), 'skipped': 26}), 'bf16', 'it skipped 26 of 50 steps'),
    (dict(bf16=speeds(.68, .7, .72)), 'fp32', 'slower than fp32 here (0.70, 0.68 to 0.72 times its speed)'),
    (dict(bf16={**speeds(.2, .3, .4), 'support': 'emulated'}), 'fp32', 'the device only emulates it'),
    (dict(bf16=speeds(1.01, 1.02, 1.03)), 'fp32', 'no faster than fp32'),
    (dict(bf16=speeds(1.05, 1.2, 1.3)), 'fp32', 'not reliably faster'),
    (dict(bf16=speeds(.8, 1.1, 1.2)), 'fp32', 'not reliably faster'),
    (dict(bf16=speeds(.8, .92, 1.15)), 'fp32', 'not reliably faster'),
    (dict(bf16={'turns': 3}), 'fp32', 'timed in 3 turns: too few'),
    (dict(bf16={**speeds(1.01, 1.02, 1.03), 'peak memory': 600.}), 'fp32', '40% less memory'),
    (dict(bf16={'peak memory': 600.}), 'bf16', 'with 40% less memory'),
    (dict(bf16={'support': 'unsupported', 'loss difference': float('nan')}), 'fp32', 'does not run here'),
    ({}, 'fp32', 'Nothing else')])
def test_recommendation(modes, best, text):
    table = table_of(**modes)
    calls = {name: f'learn.to_{name}(max_skips=5)' for name in table.index}
    recommended, reason = recommend(table, SEEDS, calls)
    assert recommended == best and text in reason
    if best != 'fp32': assert reason.endswith(f'Next: `{calls[best]}`.')


def test_what_was_not_measured_is_not_asserted():
    noisy, worse = table_of(bf16=speeds(.8, .92, 1.15)), table_of(bf16={'loss difference': .2, 'peak memory': 600.})
    calls = {'fp32': 'learn.to_fp32()', 'bf16': 'learn.to_bf16()'}
    assert 'cost what' not in recommend(noisy, SEEDS, calls)[1] and 'less memory' not in recommend(worse, SEEDS, calls)[1]
    noisy.loc['fp32', 'loss'] = float('inf')
    assert recommend(noisy, SEEDS, calls)[0] == 'fp32' and 'nothing can be compared' in recommend(noisy, SEEDS, calls)[1]


def test_without_a_second_training_of_fp32_only_a_wide_margin_refuses():
    calls, alone = {'fp32': 'learn.to_fp32()', 'bf16': 'learn.to_bf16()'}, Tolerance([1.02, .99, .99], [])
    for difference, best in ((.02, 'bf16'), (.09, 'bf16'), (.2, 'fp32')):
        found, reason = recommend(table_of(bf16={'loss difference': difference}), alone, calls)
        assert found == best and 'a wide margin, as there was no second training of fp32' in reason
    assert Tolerance([.1, 3., .1], []).value > 1 and Tolerance([1.], [1.001]).value == pytest.approx(.01)
    assert Tolerance([1.], [1.1]).value > Tolerance([1.], [1.1, 1.05]).value > Tolerance([1.], [1.1, 1.05, .95]).value


@pytest.mark.parametrize('opt,call', [('adam', 'fused(torch.optim.AdamW)'), ('adamw', 'fused(torch.optim.AdamW)'),
                                      ('sgd', 'fused(torch.optim.SGD)'), ('torch sgd', 'fused(torch.optim.SGD)'),
                                      ('fused adamw', None)])
def test_a_fused_optimizer_is_named_where_it_would_help(opt, call):
    learn = seeded(opt_func=OPTIMIZERS[opt])
    learn.create_opt()
    def remarks(**changes):
        row = table_of(bf16=changes).loc['bf16']
        return ' '.join(remarks_on(row, fused_name(learn.opt), torch.device('cpu')))
    notes = remarks(forward=.1, backward=.2, optimizer=.6, rest=.1)
    assert 'The optimizer takes 60% of the bf16 step.' in notes
    assert (f'`opt_func={call}`' in notes) if call else 'fused' not in notes
    assert 'fused' not in remarks(forward=.3, backward=.3, optimizer=.3, rest=.1)


def test_data_and_memory_that_hold_a_step_back():
    def remarks(**changes): return ' '.join(remarks_on(table_of(bf16=changes).loc['bf16'], None, torch.device('cpu')))
    assert 'data' not in remarks(data=.2)
    assert 'The data take 50% of the time of a bf16 step: the dataloader gives 4 samples/s' in remarks(data=1.)
    assert 'keep_freed_memory' not in remarks(**{'page faults': 900.})
    assert 'asks the system for memory 32,771 times (page faults)' in remarks(**{'page faults': 32771.})


def test_plot(support):
    import matplotlib.pyplot as plt
    support({'fp16': 'emulated'})
    r = seeded().compare_precision(n_steps=8, n_seeds=2)         # 4 samples are too few to take a part of
    axs = plt.subplots(1, 3)[1]
    assert r.plot(axs) is axs
    r.table.loc['bf16', ['speed-up', 'speed-up q1', 'speed-up q3']] = 12.34, 11., 13.
    axs = curves, bars, times = r.plot()
    assert [l.get_label() for l in curves.get_lines()] == ['fp32', 'bf16', 'fp16'] and len(bars.patches) == 3
    assert [t.get_text() for t in bars.get_yticklabels()] == ['fp16\n(emulated)', 'bf16', 'fp32']
    figure = curves.figure
    figure.canvas.draw()
    for ax in axs:
        inside = ax.get_window_extent()
        for text in [t for t in ax.texts if t.get_text()]:
            box = text.get_window_extent()
            assert inside.x0 <= box.x0 and box.x1 <= inside.x1, text.get_text()
            assert inside.y0 <= box.y0 and box.y1 <= inside.y1, text.get_text()
        legend = ax.get_legend()
        if legend is not None:
            assert legend.get_window_extent().x1 <= figure.bbox.x1 and legend.get_window_extent().y0 >= 0
    plt.close('all')


@pytest.mark.cuda
def test_on_an_nvidia_gpu():
    device = torch.device('cuda')
    learn = seeded(mlp().cuda(), loaders(n=48).to(device), opt_func=OPTIMIZERS['fused adamw'])
    learn.fit(1)
    state, rng = [p.clone() for p in params(learn)], torch.cuda.get_rng_state()
    r = learn.compare_precision(n_steps=16, n_seeds=1)
    assert same(params(learn), state) and torch.equal(torch.cuda.get_rng_state(), rng)
    assert (r.table['steps'] == 16).all() and (r.table['peak memory'] > 0).all() and 'peak MiB' in repr(r)
