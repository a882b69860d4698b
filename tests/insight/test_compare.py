import math, random, sys, threading, warnings
from functools import partial

import numpy as np
import pandas as pd
import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.mixup import CutMix, MixUp
from fastai.callback.rnn import rnn_cbs
from fastai.callback.tracker import EarlyStoppingCallback, SaveModelCallback
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.text.models.awdlstm import AWD_LSTM
from fastai.text.models.core import LinearDecoder, SequentialRNN
from torch import nn

from fastxtend_amp import PrecisionComparison
from fastxtend_amp.insight.recommend import recommend
from helpers import (OPTIMIZERS, At, Attentive, Data, handwritten, learner, loaders, mlp, opt_state, params, same,
                     same_state)
from states import bits, language_model, rich, shuffled


def seeded(*args, **kwargs):
    random.seed(0); np.random.seed(0); torch.manual_seed(0)
    return learner(*args, **kwargs)


def said(r):
    "What it prints, in one line."
    return ' '.join(repr(r).split())


def test_table_and_texts():
    r = seeded().compare_precision(n_steps=10, n_seeds=2)
    assert isinstance(r, PrecisionComparison) and list(r.table.index) == ['fp32', 'bf16', 'fp16']
    t = r.table
    assert list(t['steps']) == [10] * 3 and (t['samples/s'] > 0).all() and t['speed-up']['fp32'] == 1
    assert (t['speed-up q1'] <= t['speed-up']).all() and (t['speed-up'] <= t['speed-up q3']).all()
    assert [len(l) for l in r.losses.values()] == [10] * 3 and [len(l) for l in r.seed_losses] == [10] * 2
    tails = {n: np.mean(l[-2:]) for n, l in r.losses.items()}
    assert t['loss'].to_dict() == pytest.approx(tails)
    assert t['loss difference'].to_dict() == pytest.approx({n: v - tails['fp32'] for n, v in tails.items()})
    assert t['seed spread'].iloc[0] == pytest.approx(np.std([tails['fp32'], *(np.mean(l[-2:]) for l in r.seed_losses)],
                                                            ddof=1))
    assert np.isnan(t['final scale'][['fp32', 'bf16']]).all()
    assert t['final scale']['fp16'] == 65536 / 2 ** t['skipped']['fp16']
    assert r.recommended in t.index and said(r).startswith(f'Recommended: {r.recommended}. {r.reason} ')
    assert max(map(len, repr(r).splitlines())) <= 120
    assert '<table' in r._repr_html_() and r.reason.split('`')[0].split('<')[0].split("'")[0] in r._repr_html_()


@pytest.mark.parametrize('opt', ['adam', 'fused adamw', 'sgd'])
@pytest.mark.parametrize('mode', ['bf16', 'fp16'])
def test_each_mode_trains_as_a_loop_of_its_own_would(mode, opt):
    r = seeded(opt_func=OPTIMIZERS[opt]).compare_precision([mode], n_steps=12, n_seeds=0, lr=.01)
    _, _, scaler, losses = handwritten(mode, OPTIMIZERS[opt], n_epoch=2, lr=.01)
    assert r.losses[mode] == losses                              # the batches come again when an epoch is over
    if mode == 'fp16': assert r.table['final scale']['fp16'] == scaler.get_scale()
    plain = seeded(opt_func=OPTIMIZERS[opt])
    seen = []
    plain.fit(2, .01, cbs=At('after_batch', lambda l: seen.append(l.loss.item()) if l.training else None))
    assert r.losses['fp32'] == seen


def wrapped_and_reparametrized():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)),
                          nn.utils.spectral_norm(nn.Linear(8, 1)))
    learn = learner(torch.compile(model, backend='eager'), shuffled())
    learn.fit(1)
    return learn


@pytest.mark.parametrize('make', [rich, partial(rich, 'adam', fit=False), language_model, wrapped_and_reparametrized],
                         ids=['after a fit', 'before any', 'awd_lstm', 'compiled, with weight and spectral norm'])
def test_learner_is_as_it_was(make):
    learn = make()
    before = bits(learn)
    learn.compare_precision(n_steps=6, n_seeds=1)
    after = bits(learn)
    for key in before: assert after[key] == before[key], key


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
    assert a.recorder.losses == b.recorder.losses and a.mixed_precision.scales == b.mixed_precision.scales


@pytest.mark.parametrize('error', [KeyboardInterrupt, ZeroDivisionError])
def test_interrupted_in_the_middle(error):
    class Breaks(Callback):                                      # in low precision
        def after_loss(self):
            if torch.is_autocast_enabled('cpu') or self.learn.pred.dtype is not torch.float32 or self.learn.precision:
                raise error('now')
    learn = rich()
    learn.add_cb(Breaks())
    before = bits(learn)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt): learn.compare_precision(n_steps=8, n_seeds=0)
    else:                                                        # one mode fails, the others are compared
        r = learn.compare_precision(n_steps=8, n_seeds=0)
        assert 'failed' in list(r.table['support']) and 'ZeroDivisionError' in ' '.join(r.table['note'])
    after = bits(learn)
    for key in before: assert after[key] == before[key], key


def test_error_of_the_model_itself_is_raised():
    learn = seeded(nn.Sequential(nn.Linear(5, 1)))               # the data has six columns
    with pytest.raises(RuntimeError, match='mat1 and mat2'): learn.compare_precision(n_steps=4)


def test_a_model_that_needs_callbacks_that_take_no_part():
    "A GAN before its first fit does not know whether it is generator or critic."
    from fastai.vision.gan import FixedGANSwitcher, GANLearner
    generator, critic = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)), nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 1))
    learn = GANLearner.wgan(loaders(), generator, critic, switcher=FixedGANSwitcher(1, 2), show_img=False)
    learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ == 'ProgressCallback'])
    learn.logger = lambda row: None
    with pytest.raises(ValueError, match='(?s)does not run.*mat1 and mat2.*took no part: gan_trainer.*after a fit'):
        learn.compare_precision('bf16', n_steps=4)
    learn.fit(1, .01)
    assert list(learn.compare_precision('bf16', n_steps=4, n_seeds=0).table['steps']) == [4, 4]


def test_mode_that_pytorch_refuses_gets_a_row():
    class Refuses(nn.Linear):
        def forward(self, x):
            if torch.is_autocast_enabled('cpu') and torch.get_autocast_dtype('cpu') is torch.float16:
                raise RuntimeError('could not create a primitive\nmore')
            return super().forward(x)
    r = seeded(nn.Sequential(Refuses(6, 1))).compare_precision(n_steps=4, n_seeds=1)
    row = r.table.loc['fp16']
    assert row['support'] == 'failed' and row['note'] == 'RuntimeError: could not create a primitive'
    assert row['steps'] == 0
    assert list(r.table['steps']) == [4, 4, 0] and row['note'] in said(r)
    assert 'fp16: does not run here' in r.reason + repr(r)


def test_unsupported_mode_gets_a_row(monkeypatch):
    from fastxtend_amp import mode
    from fastxtend_amp.insight import compare
    refuse = lambda m, d: mode.Support('unsupported', 'no such unit') if m == 'fp16' else mode.mode_support(m, d)
    monkeypatch.setattr(compare, 'mode_support', refuse)
    r = seeded().compare_precision(n_steps=4, n_seeds=0)
    assert r.table['support']['fp16'] == 'unsupported' and r.table['note']['fp16'] == 'no such unit'
    assert r.table['steps']['bf16'] == 4
    assert r.plot()[1] is not None


def test_lstm_and_callbacks_of_rnns():
    torch.manual_seed(0)
    rnn = AWD_LSTM(20, 6, 8, 2)
    model = SequentialRNN(rnn, LinearDecoder(20, 6, .1, tie_encoder=rnn.encoder))
    make = lambda: DataLoader(Data(torch.randint(0, 20, (16, 5)), torch.randint(0, 20, (16, 5))), bs=4, num_workers=0,
                              device=torch.device('cpu'))
    loss = lambda pred, y: nn.functional.cross_entropy(pred.flatten(0, 1), y.flatten())
    learn = learner(model, DataLoaders(make(), make(), device=torch.device('cpu')), loss, cbs=rnn_cbs(2., 1.))
    learn.fit(1)
    before = bits(learn)
    r = learn.compare_precision(n_steps=4, n_seeds=1)
    assert r.table['steps']['fp32'] == 4 and np.isfinite(r.table['loss']['fp32'])
    for name in ('bf16', 'fp16'):                                # oneDNN has no half-precision LSTM on some CPUs
        row = r.table.loc[name]
        if row['support'] == 'failed':
            assert row['note'] and row['note'] in said(r) and f'{name}: does not run here' in r.reason
        else: assert row['steps'] == 4 and np.isfinite(row['loss'])
    after = bits(learn)
    for key in before: assert after[key] == before[key], key


def test_emulated_mode_is_cut_short(monkeypatch):
    from fastxtend_amp import mode
    from fastxtend_amp.insight import compare
    monkeypatch.setattr(compare, 'mode_support', lambda m, d: mode.Support('emulated',
                                                                           'so that there is a max_seconds'))
    r = seeded().compare_precision(['bf16'], n_steps=16, n_seeds=0, max_seconds=1e-9)
    assert r.table['steps'].to_dict() == {'fp32': 1, 'bf16': 1}
    assert 'cut short after 1 of 16 steps' in r.table['note']['bf16']
    assert r.table['loss difference']['bf16'] == pytest.approx(r.losses['bf16'][0] - r.losses['fp32'][0])
    assert r.table['speed-up']['bf16'] > 0


class Logs(Callback):
    def __init__(self): self.calls = 0
    def before_fit(self): sys.modules[__name__].events.append('before_fit')
    def after_batch(self): sys.modules[__name__].events.append('after_batch')
    def after_epoch(self): sys.modules[__name__].events.append('after_epoch')


class Shapes(Callback):
    def after_pred(self): sys.modules[__name__].events.append(self.learn.training)


events = []


def test_who_takes_part(tmp_path):
    events.clear()
    clip, shapes = GradientClip(1e-3), Shapes()
    learn = seeded(cbs=[Logs(), shapes, clip, SaveModelCallback(), EarlyStoppingCallback()], path=tmp_path)
    printed = []
    learn.logger = printed.append
    r = learn.compare_precision(n_steps=4, n_seeds=1)
    assert events == [True] * 16 and not printed and not list(tmp_path.rglob('*.pth'))   # four trainings of four steps
    clipped = seeded(cbs=GradientClip(1e-3))
    seen = []
    clipped.fit(1, cbs=At('after_batch', lambda l: seen.append(l.loss.item()) if l.training else None))
    assert r.losses['fp32'] == seen[:4]
    events.clear()
    other = learn.compare_precision(n_steps=4, n_seeds=0, cbs=[learn.cbs[0]])
    assert not events and other.losses['fp32'] != r.losses['fp32'][:3]
    with pytest.raises(ValueError, match="not among the learner's callbacks"):
        learn.compare_precision(cbs=[GradientClip()])


def images():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(16, 3, 8, 8, generator=g)
    make = lambda: DataLoader(Data(x, torch.arange(16) % 3), bs=4, shuffle=True, num_workers=0,
                              device=torch.device('cpu'))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(4, 3))
    from fastai.losses import CrossEntropyLossFlat
    return model, DataLoaders(make(), make(), device=torch.device('cpu')), CrossEntropyLossFlat(), x


@pytest.mark.parametrize('make', [MixUp, CutMix, lambda: GradientAccumulation(8)],
                         ids=['mixup', 'cutmix', 'accumulation'])
def test_callbacks_that_change_the_batch_or_the_loss(make):
    model, dls, loss, x = images()
    data = x.clone()
    learn = seeded(model, dls, loss, cbs=make())
    r = learn.compare_precision(n_steps=8, n_seeds=1)
    # the same mixtures in each mode
    assert r.table['loss difference'].abs().max() < .1 and (r.table['steps'] == 8).all()
    assert torch.equal(x, data) and learn.loss_func is loss
    learn.fit(1)


def test_precision_of_the_learner_is_the_template():
    learn = seeded().to_fp16(loss_scale=32.)
    cb = learn.mixed_precision
    r = learn.compare_precision(n_steps=4, n_seeds=0)
    assert r.table['final scale']['fp16'] == 32 and learn.mixed_precision is cb and cb.learn is learn
    assert cb.scales == []
    learn.to_fp16(init_scale=1024., growth_interval=2)
    learn.fit(1)
    n, scale = len(learn.mixed_precision.scales), learn.mixed_precision.scaling.scaler.get_scale()
    r = learn.compare_precision(['fp16'], n_steps=4, n_seeds=0)
    assert r.table['final scale']['fp16'] == scale * 4 and len(learn.mixed_precision.scales) == n
    assert learn.mixed_precision.scaling.scaler.get_scale() == scale


@pytest.mark.parametrize('kwargs, match', [
    (dict(modes=('fp32', 'int8')), 'int8'), (dict(modes='fp8'), 'fp8'), (dict(n_steps=0), 'n_steps=0'),
    (dict(n_steps=2.5), 'n_steps=2.5'),
    (dict(n_seeds=-1), 'n_seeds'), (dict(max_seconds=0), 'max_seconds')])
def test_bad_arguments(kwargs, match):
    with pytest.raises(ValueError, match=match): seeded().compare_precision(**kwargs)


def test_no_training_batches():
    dls = loaders(n=24)
    dls.train.drop_last, dls.train.bs = True, 64
    learn = seeded(dls=dls)
    before = bits(learn)
    with pytest.raises(ValueError, match='gives no batches'): learn.compare_precision(n_steps=4)
    assert bits(learn) == before


def test_modes_by_other_names():
    assert list(seeded().compare_precision('bf16-mixed', n_steps=2, n_seeds=0).table.index) == ['fp32', 'bf16']
    assert list(seeded().compare_precision([torch.float32, 'FP32'], n_steps=1, n_seeds=0).table.index) == ['fp32']


def test_few_kept_batches(monkeypatch):
    from fastxtend_amp.insight import batches
    assert batches.LIMIT == 512 * 2**20
    monkeypatch.setattr(batches, 'LIMIT', 400)                   # a batch is 4 * 7 * 4 = 112 bytes
    r = seeded().compare_precision(['bf16'], n_steps=6, n_seeds=0)
    assert r.table['steps']['fp32'] == 6 and 'The steps took 3 batches in turn' in said(r)


def test_progress_is_shown_unless_switched_off(capsys):
    learn = seeded(progress=True)
    with learn.no_bar(): learn.compare_precision(n_steps=2, n_seeds=0)
    assert not capsys.readouterr().out
    learn.compare_precision(n_steps=2, n_seeds=0)
    shown = capsys.readouterr().out
    assert '100' in shown and 'at most 60 s' in shown and shown.index('0.00%') < shown.index('compare_precision: about')


def test_the_bar_is_taken_away_after_an_error(capsys):
    learn = seeded(nn.Sequential(nn.Linear(5, 1)), progress=True)          # the data has six columns
    with pytest.raises(RuntimeError): learn.compare_precision(n_steps=2, n_seeds=0)
    assert capsys.readouterr().out.endswith('\r')


def test_same_numbers_each_time():
    learn = seeded(dls=shuffled())
    a, b = (learn.compare_precision(n_steps=8, n_seeds=2) for _ in range(2))
    assert a.losses == b.losses and a.seed_losses == b.seed_losses
    assert a.losses['fp32'] != a.seed_losses[0] != a.seed_losses[1]


def test_plot():
    import matplotlib.pyplot as plt
    r = seeded().compare_precision(n_steps=6, n_seeds=2)
    curves, bars, times = r.plot()
    assert [l.get_label() for l in curves.get_lines()] == ['fp32', 'bf16', 'fp16'] and len(bars.patches) == 3
    labels = [f'{m}\n(emulated)' if r.table['support'][m] == 'emulated' else m for m in ('fp16', 'bf16', 'fp32')]
    assert [t.get_text() for t in bars.get_yticklabels()] == labels
    axs = plt.subplots(1, 3)[1]
    assert r.plot(axs) is axs
    plt.close('all')


def rows(**modes):
    base = dict(support='native', steps=50, **{'samples/s': 100., 'speed-up': 1., 'speed-up q1': 1., 'speed-up q3': 1.,
                                               'peak memory': 1000.,
                'loss': 1., 'loss difference': 0., 'seed spread': .05, 'final scale': float('nan')}, skipped=0, note='')
    table = {'fp32': base}
    for name, changes in modes.items():
        row = {**base, 'speed-up': 2., 'speed-up q1': 1.9, 'speed-up q3': 2.1, **changes}
        row['loss'] = 1 + row['loss difference']
        table[name] = row
    return pd.DataFrame(table.values(), index=list(table))


@pytest.mark.parametrize('modes, best, said', [
    (dict(bf16={}, fp16={}), 'bf16', 'fp16 is about as fast but needs loss scaling'),
    (dict(bf16={}, fp16={'speed-up': 3.}), 'fp16', "3.00 times fp32's speed"),
    (dict(bf16={}, fp16={'speed-up': 3., 'loss difference': .2}), 'bf16', 'its loss is 0.2 above'),
    (dict(bf16={}, fp16={'speed-up': 3., 'loss difference': float('nan')}), 'bf16', 'its loss is not finite'),
    (dict(bf16={}, fp16={'speed-up': 3., 'final scale': .5}), 'bf16', 'below 1 the model does not fit fp16'),
    (dict(bf16={}, fp16={'speed-up': 3., 'skipped': 26}), 'bf16', 'it skipped 26 of 50 steps'),
    (dict(bf16={'speed-up': .7, 'speed-up q1': .6}), 'fp32', 'wide layers'),
    (dict(bf16={'speed-up': .3, 'speed-up q1': .2, 'support': 'emulated'}), 'fp32', 'the device only emulates it'),
    (dict(bf16={'speed-up': 1.02}), 'fp32', 'no faster than fp32'),
    (dict(bf16={'speed-up': 1.2, 'speed-up q1': .8}), 'fp32', 'not reliably faster'),
    (dict(bf16={'speed-up': 1.02, 'peak memory': 600.}), 'fp32', '40% less memory'),
    (dict(bf16={'peak memory': 600.}), 'bf16', 'with 40% less memory'),
    (dict(bf16={'support': 'unsupported', 'speed-up': float('nan'), 'loss difference': float('nan')}), 'fp32',
     'does not run here'),
    ({}, 'fp32', 'Nothing else')])
def test_recommendation(modes, best, said):
    recommended, reason = recommend(rows(**modes))
    assert recommended == best and said in reason
    if best != 'fp32': assert f'`learn.to_{best}()`' in reason


def test_memory_is_no_reason_for_a_mode_that_trains_worse():
    assert 'less memory' not in recommend(rows(bf16={'loss difference': .2, 'peak memory': 600.}))[1]


def test_recommendation_when_fp32_itself_diverges():
    table = rows(bf16={})
    table.loc['fp32', 'loss'] = float('inf')
    assert recommend(table)[0] == 'fp32' and 'nothing can be compared' in recommend(table)[1]


def test_batches_without_targets():
    learn = seeded()
    learn.dls.n_inp = 2
    with pytest.raises(ValueError, match='no targets'):
        seeded(nn.Bilinear(6, 1, 1), learn.dls).compare_precision(n_steps=2)


def test_a_training_that_diverges_is_drawn_and_told():
    r = seeded(nn.Sequential(Overflows(6, 1))).compare_precision(['fp16'], n_steps=6, n_seeds=1)
    assert np.isnan(r.losses['fp16']).all() and np.isfinite(r.losses['fp32']).all() and r.table['skipped']['fp16'] == 6
    assert r.recommended == 'fp32' and 'fp16: its loss is not finite' in r.reason
    labels = [l.get_label() for l in r.plot()[0].get_lines()]
    assert labels == ['fp32', 'fp16 (not finite from step 1)']


class Overflows(nn.Linear):
    def forward(self, x):
        big = (super().forward(x).abs() + 1) * 1e5               # beyond fp16 in each batch
        return (big - big.detach()) / 1e5 + super().forward(x)


@pytest.mark.cuda
def test_on_an_nvidia_gpu():
    device = torch.device('cuda')
    learn = seeded(mlp().cuda(), loaders(n=48).to(device), opt_func=OPTIMIZERS['fused adamw'])
    learn.fit(1)
    state, rng = [p.clone() for p in params(learn)], torch.cuda.get_rng_state()
    r = learn.compare_precision(n_steps=16, n_seeds=1)
    assert same(params(learn), state) and torch.equal(torch.cuda.get_rng_state(), rng)
    assert (r.table['steps'] == 16).all() and (r.table['peak memory'] > 0).all() and 'peak MiB' in repr(r)


def test_modules_kept_in_fp32_are_kept_in_the_comparison_and_afterwards():
    from fastxtend_amp.fp32_modules import Fp32Forward
    learn = learner(Attentive()).to_fp16(init_scale=1024., fp32_modules='attn')
    forward = learn.model.attn.forward
    r = learn.compare_precision(('fp32', 'fp16'), n_steps=4)
    assert r.table['skipped']['fp16'] == 0 and math.isfinite(r.table['loss']['fp16'])
    assert learn.model.attn.forward is forward
    plain = learner(Attentive()).to_fp16().compare_precision(('fp32', 'fp16'), n_steps=4)
    assert plain.table['skipped']['fp16'] == 4 and isinstance(forward, Fp32Forward)


# -- rows and calls



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


def test_half_weights_have_rows_of_their_own():
    r = seeded().compare_precision(('fp32', 'bf16', 'half weights', 'half_weights fp16'), n_steps=3, n_seeds=0)
    assert list(r.table.index) == ['fp32', 'bf16', 'half weights', 'half weights fp16']
    assert (r.table['steps'] == 3).all()
    assert r.calls['half weights'] == "learn.to_half_weights(dtype='bf16')" and r.losses['half weights'] != r.losses['fp32']


def test_calls_keep_what_the_learner_has():
    learn = learner(Attentive()).to_fp16(init_scale=1024., fp32_modules='attn', max_skips=5)
    r = learn.compare_precision(n_steps=2, n_seeds=0)
    for name in ('bf16', 'fp16'):
        assert "fp32_modules=['attn']" in r.calls[name] and 'max_skips=5' in r.calls[name], r.calls
    assert 'init_scale=1024' in r.calls['fp16'] and 'on_overflow' not in r.calls['fp16']
    assert learn.precision.on_overflow == 'warn'
    table = rows(bf16={}, fp16={'speed-up': 3.})
    assert recommend(table, r.calls)[1].endswith(f"Next: `{r.calls['fp16']}`.")


@pytest.mark.parametrize('mode', ['fp32', 'bf16', 'fp16', 'half weights'])
@pytest.mark.parametrize('own', ['fp16', 'half weights', None])
def test_apply(mode, own):
    from fastxtend_amp import HalfWeights
    learn = seeded(Attentive())
    if own == 'fp16': learn.to_fp16(init_scale=256., fp32_modules='attn')
    if own == 'half weights': learn.to_half_weights(fp32_modules='attn')
    r = learn.compare_precision(('bf16', 'fp16', 'half weights'), n_steps=1, n_seeds=0)
    r.recommended = mode
    assert r.apply() is learn
    cb = learn.precision
    if mode == 'fp32': assert cb is None
    else:
        assert cb.amp_mode == ('bf16' if mode == 'half weights' else mode)
        assert isinstance(cb, HalfWeights) == (mode == 'half weights')
        if own is not None: assert ('attn' in repr(cb.as_call())), cb.as_call()
    learn.fit(1)
    with pytest.raises(ValueError, match="mode='fp8'.*was not compared"): r.apply(mode='fp8')


def test_what_becomes_of_the_copies_is_in_the_table_and_no_warning():
    learn = seeded(Attentive(), cbs=GradientAccumulation(64)).to_fp16()
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        r = learn.compare_precision(n_steps=3, n_seeds=0)
        r = seeded(Attentive()).compare_precision(n_steps=3, n_seeds=0)
    assert r.table['skipped']['fp16'] == 3


def test_steps_in_the_place_of_modes():
    with pytest.raises(ValueError, match='modes=20 cannot be used.*Did you mean n_steps=20'):
        seeded().compare_precision(20)
    with pytest.raises(ValueError, match="modes='fp61'.*not a precision(.|\n)*'fp32'"):
        seeded().compare_precision(('fp32', 'fp61'))


def test_a_mode_that_fails_shows_the_reason_itself(monkeypatch):
    from fastxtend_amp import mode
    monkeypatch.setattr(mode, 'refused_layer', lambda kind, m: 'no kernel' if m == 'fp16' else None)
    learn = language_model()
    r = learn.compare_precision(('bf16', 'fp16'), n_steps=2, n_seeds=0)
    assert r.table['support']['fp16'] == 'failed'
    assert r.table['note']['fp16'].startswith('fp16 does not run on this CPU for ')
    assert 'Exception' not in repr(r)


# -- how long it takes

def slow(clock):
    class Slow(nn.Linear):
        def forward(self, x):
            clock.sleep(.02)
            return super().forward(x)
    return nn.Sequential(Slow(6, 1))


def test_all_of_it_ends_in_max_seconds(clock):
    r = seeded(slow(clock)).compare_precision(n_steps=2000, max_seconds=2)
    assert clock.now < 3
    steps = r.table['steps']
    assert 3 <= steps.min() and steps['fp32'] < 2000 and 'cut short after' in r.table['note']['fp32']
    assert not r.table['loss'].isna().any()
    assert r.table['speed-up'].notna().all() and 'there was no time (`max_seconds=2`)' in said(r)


def test_an_emulated_mode_sees_fewer_samples_and_says_so(monkeypatch):
    from fastxtend_amp import mode
    from fastxtend_amp.insight import compare
    sizes = []
    class Sizes(nn.Linear):
        def forward(self, x):
            sizes.append((torch.is_autocast_enabled('cpu'), len(x)))
            return super().forward(x)
    monkeypatch.setattr(compare, 'mode_support', lambda m, d: mode.Support('emulated', 'for this test'))
    r = seeded(nn.Sequential(Sizes(6, 1)), loaders(n=192, bs=64)).compare_precision('bf16', n_steps=6, n_seeds=0)
    assert set(sizes) == {(True, 8), (False, 8), (False, 64)}
    assert '8 of the 64 samples of each batch' in r.table['note']['bf16']
    assert abs(r.table['loss difference']['bf16']) < .02 and r.table['steps'].to_dict() == {'fp32': 6, 'bf16': 6}
    assert r.plot()[0].get_lines()[1].get_label() == 'bf16 (on 8 samples a step)'


# -- no side effect

def test_what_a_logger_wrote_meanwhile_is_kept():
    class Logger(Callback):
        def __init__(self): self.entries, self.lock = [], threading.Lock()
        def before_fit(self): raise AssertionError('a logger takes no part')
    logger = Logger()
    class Writes(nn.Linear):
        def forward(self, x):
            logger.entries.append(len(logger.entries))
            return super().forward(x)
    learn = seeded(nn.Sequential(Writes(6, 1)), cbs=logger)
    learn.compare_precision(n_steps=6, n_seeds=1)
    assert logger.entries == list(range(len(logger.entries))) and len(logger.entries) >= 4 * 6 and logger in learn.cbs


def test_callbacks_that_take_part_are_copies_and_share_what_cannot_be_copied():
    class Counts(Callback):
        def __init__(self): self.n, self.calls, self.lock = 0, [], threading.Lock()
        def after_loss(self):
            with self.lock: self.n += 1; self.calls.append(self.n)
    cb = Counts()
    learn = seeded(cbs=cb)
    learn.compare_precision(n_steps=2, n_seeds=0)
    assert cb.n == 0 and cb.calls == [] and cb.learn is learn and learn.counts is cb
    learn.fit(1)
    assert cb.n == 8


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


# -- where the time goes

def test_where_the_time_of_a_step_goes(clock):
    class Sleeps(Callback):
        def before_step(self): clock.sleep(.01)
    r = seeded(slow(clock), cbs=Sleeps()).compare_precision('bf16', n_steps=8, n_seeds=0)
    row = r.table.loc['bf16']
    step = 4 / row['samples/s']
    assert .02 <= row['forward'] < .03 and .01 <= row['optimizer'] < .02 and row['backward'] < .01 and row['rest'] < .01
    assert sum(row[k] for k in ('forward', 'backward', 'optimizer', 'rest')) == pytest.approx(step, rel=.2)
    assert 'The forward pass takes' in said(r) and f'% of the {r.recommended} step' in said(r)


@pytest.mark.parametrize('opt,call', [('adam', 'fused(torch.optim.AdamW)'), ('adamw', 'fused(torch.optim.AdamW)'),
                                      ('sgd', 'fused(torch.optim.SGD)'),
                                      ('torch sgd', 'fused(torch.optim.SGD)'), ('fused adamw', None)])
def test_a_fused_optimizer_is_named_where_it_would_help(opt, call):
    notes = remarks(OPTIMIZERS[opt], forward=.1, backward=.2, optimizer=.6, rest=.1)
    assert 'The optimizer takes 60% of the bf16 step.' in notes
    assert (f'`opt_func={call}`' in notes) if call else 'fused' not in notes
    assert 'fused' not in remarks(OPTIMIZERS[opt], forward=.3, backward=.3, optimizer=.3, rest=.1)


def test_the_fused_optimizer_is_named_before_the_first_fit_too(clock):
    class Sleeps(Callback):
        def before_step(self): clock.sleep(.01)
    learn = seeded(opt_func=OPTIMIZERS['adam'], cbs=Sleeps())
    assert learn.opt is None
    assert '`opt_func=fused(torch.optim.AdamW)`' in repr(learn.compare_precision('bf16', n_steps=4, n_seeds=0))


def remarks(opt_func=OPTIMIZERS['sgd'], copy_seconds=0., faults=0., data=0., **phases):
    from types import SimpleNamespace
    from fastxtend_amp.insight.recommend import fused_name, notes_on
    table = rows(bf16={})
    for name, value in dict(data=data, forward=.3, backward=.3, optimizer=.1, rest=.3,
                            **{'page faults': faults}).items():
        table[name] = value
    for name, value in phases.items(): table[name] = value
    learn = seeded(opt_func=opt_func)
    learn.create_opt()
    return ' '.join(notes_on(table, 'bf16', SimpleNamespace(size=4, seconds=data or 1e-9, copy_seconds=copy_seconds),
                             fused_name(learn.opt), torch.device('cpu')))


def test_data_and_memory_that_hold_a_step_back():
    assert 'data' not in remarks(data=.2)
    assert 'The data take 50% of the time of a bf16 step, most of it loading them' in remarks(data=1.)
    assert 'copying them to the device' in remarks(data=1., copy_seconds=.8)
    assert 'keep_freed_memory' not in remarks(faults=900.)
    assert 'asks the system for memory 32,771 times (page faults)' in remarks(faults=32771.)


def test_labels_of_the_plot_lie_inside_its_axes():
    import matplotlib.pyplot as plt
    r = seeded().compare_precision(n_steps=8, n_seeds=1)
    r.table.loc['bf16', ['speed-up', 'speed-up q1', 'speed-up q3']] = 12.34, 11., 13.
    axs = r.plot()
    figure = axs[0].figure
    figure.canvas.draw()
    for ax in axs:
        inside = ax.get_window_extent()
        for text in ax.texts:
            box = text.get_window_extent()
            assert inside.x0 <= box.x0 and box.x1 <= inside.x1, text.get_text()
            assert inside.y0 <= box.y0 and box.y1 <= inside.y1, text.get_text()
        legend = ax.get_legend()
        if legend is not None:
            assert legend.get_window_extent().x1 <= figure.bbox.x1 and legend.get_window_extent().y0 >= 0
    plt.close('all')
