import math

import pytest, torch
from fastai.callback.core import Callback
from fastai.callback.rnn import rnn_cbs
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.losses import CrossEntropyLossFlat
from fastai.text.models.awdlstm import AWD_LSTM
from fastai.text.models.core import LinearDecoder, SequentialRNN
from torch import nn
from torch.nn import functional as F

from fastxtend_amp import AMPMode, PrecisionReport
from fastxtend_amp.insight.report import short_table
from fastxtend_amp.mode import fastest_native
from helpers import Attentive, Data, autocast_state, dataset, learner, loaders, params, same


def rows(report, mode): return report.table[report.table['mode'] == mode].set_index('module')


def language_model(bptt=5, bs=2, vocab=11):
    torch.manual_seed(0)
    encoder = AWD_LSTM(vocab, 6, 8, 2, hidden_p=.1, embed_p=.1, input_p=.1, weight_p=.2)
    model = SequentialRNN(encoder, LinearDecoder(vocab, 6, .1, tie_encoder=encoder.encoder))
    x = torch.randint(0, vocab, (6, bptt), generator=torch.Generator().manual_seed(0))
    make = lambda: DataLoader(Data(x, x.roll(-1, 1)), bs=bs, num_workers=0, device=torch.device('cpu'))
    dls = DataLoaders(make(), make(), device=torch.device('cpu'))
    return learner(model, dls, CrossEntropyLossFlat(), cbs=rnn_cbs())


# -- trouble is found where it is, and the remedy works

def test_the_module_that_overflows_is_named_and_no_other():
    learn = learner(Attentive())
    report = learn.precision_report()
    assert isinstance(report, PrecisionReport) and report.fp32_modules == ['attn']
    trouble = report.table.query('trouble')
    assert list(zip(trouble['mode'], trouble['module'])) == [('fp16', 'attn')]
    verdict = report.verdicts['fp16']
    assert verdict.verdict == 'keep modules in fp32' and verdict.modules == ['attn']
    assert "fp32_modules=['attn']" in verdict.call
    assert '65,504' in verdict.reason and report.verdicts['bf16'].verdict == 'safe'
    row = rows(report, 'fp16').loc['attn']
    assert row['inside'] > 65504 > row['largest'] and row['non-finite'] == 1


def test_the_remedy_reaches_the_loss_of_fp32_where_plain_fp16_fails():
    def train(**kwargs):
        learn = learner(Attentive())
        kept = {k: v for k, v in kwargs.items() if k != 'plain'}
        if kwargs: learn.to_fp16(init_scale=1024., on_overflow='ignore', **kept)
        start = params(learn)
        learn.fit(6, .02)
        return float(learn.recorder.losses[-1]), same(start, params(learn))
    names = learner(Attentive()).precision_report().fp32_modules
    (fp32, _), (plain, unmoved), (kept, moved_not) = train(), train(plain=True), train(fp32_modules=names)
    assert unmoved and math.isnan(plain)                         # every step skipped
    assert not moved_not and kept == pytest.approx(fp32, rel=.02)


def test_multihead_attention_is_named_for_the_product_inside_it():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.emb, self.head = nn.Linear(1, 8), nn.Linear(8, 1)
            self.att = nn.MultiheadAttention(8, 2, batch_first=True)
            with torch.no_grad(): self.att.in_proj_weight[:16] *= 1500
        def forward(self, x):
            x = self.emb(x[..., None])
            return self.head(self.att(x, x, x, need_weights=True)[0]).mean(1)
    report = learner(Net()).precision_report('fp16')
    assert report.verdicts['fp16'].modules == ['att'] and report.not_called == ['att.out_proj']


def test_masks_of_minus_infinity_are_no_trouble():
    class Masked(nn.Linear):
        def forward(self, x): return super().forward(x).masked_fill(torch.tensor([False, True, False]), -math.inf)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.scores, self.out = Masked(6, 3), nn.Linear(3, 1)
        def forward(self, x): return self.out(self.scores(x).softmax(-1))
    report = learner(Net()).precision_report()
    assert not report.table['trouble'].any() and {v.verdict for v in report.verdicts.values()} == {'safe'}


def test_trouble_behind_trouble_is_found_too():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Attentive(), nn.Sequential(nn.Linear(1, 8), Squared(), nn.Linear(8, 1))
        def forward(self, x): return self.second(self.first(x))
    class Squared(nn.Module):
        def forward(self, x): return (x * 500 + 300).mul(x * 500 + 300).sqrt() / 500
    assert learner(Net()).precision_report('fp16').fp32_modules == ['first.attn', 'second.1']


def test_the_loss_function_is_a_row_and_gets_fp32():
    report = learner().precision_report('bf16')
    last = report.table.iloc[-1]
    assert (last['module'], last['inputs'], last['output']) == ('loss function', 'float32', 'float32')


# -- the verdicts

def test_a_mode_that_pytorch_cannot_run_gets_its_reason():
    learn = language_model()
    report = learn.precision_report()
    for mode, verdict in report.verdicts.items():
        if verdict.verdict.startswith('safe'): continue          # this CPU runs LSTMs in that mode
        reason = f"{mode} does not run on this CPU for '0.rnns.0.module' (LSTM): PyTorch says: "
        assert verdict.verdict == 'cannot run' and verdict.reason.startswith(reason)
        assert verdict.modules == ['0.rnns.0.module', '0.rnns.1.module'] == report.fp32_modules
        assert f'learn.to_{mode}(fp32_modules=' in verdict.reason
        fastest = fastest_native(torch.device('cpu'))
        assert verdict.call == ('learn.to_bf16()' if fastest is AMPMode.BF16 and mode != 'bf16' else verdict.call)
        getattr(learn, f'to_{mode}')(fp32_modules=verdict.modules).fit(1)
        assert math.isfinite(learn.recorder.losses[-1])


def test_a_loss_that_cannot_run_is_no_modules_fault():
    def loss(p, y):
        if torch.is_autocast_enabled('cpu'): raise RuntimeError('not in low precision')
        return F.mse_loss(p, y)
    verdict = learner(loss_func=loss).precision_report('bf16').verdicts['bf16']
    assert (verdict.verdict, verdict.call, verdict.modules) == ('cannot run', 'learn.to_fp32()', [])
    assert 'not in low precision' in verdict.reason


def test_not_finite_in_fp32_either():
    class Log(nn.Module):
        def forward(self, x): return x.sum(1, keepdim=True).log()
    report = learner(nn.Sequential(nn.Linear(6, 1), Log())).precision_report()
    assert all(v.verdict == 'do not use' and 'fp32' in v.reason for v in report.verdicts.values())
    assert not report.fp32_modules
    data = dataset()
    data.tensors[0][2, 1] = math.nan
    reason = learner(dls=loaders(train=data)).precision_report('bf16').verdicts['bf16'].reason
    assert reason == 'the batch itself is not finite: 1 of 24 values of an input of shape (4, 6) are NaN or inf'


def test_the_range_of_loss_scales():
    "A loss so small that fp16 gradients underflow unscaled, and one so large that they overflow with the usual scale."
    for factor, low, high in ((1e-7, 2 ** 6, 2 ** 40), (1e4, 1, 2 ** 4)):
        report = learner(loss_func=lambda p, y, f=factor: F.mse_loss(p, y) * f).precision_report('fp16')
        verdict = report.verdicts['fp16']
        assert verdict.verdict == ('safe with loss scaling' if factor < 1 else 'safe'), verdict
        assert verdict.scales[0] >= low if factor < 1 else verdict.scales[0] == 1
        assert math.log2(verdict.scales[1]).is_integer() and (verdict.scales[1] <= high)
        grads = rows(report, 'fp16')['grad'].drop('loss function')
        assert grads.max() * verdict.scales[1] <= 65504 < grads.max() * verdict.scales[1] * 4
    assert verdict.call == f'learn.to_fp16(init_scale={verdict.scales[1]:.0f})'


def test_gradient_underflow_is_counted():
    "Gradients of the output are 2 (p - y) / n; the factor puts some below half of fp16's smallest number, 2^-24."
    factor = 2. ** -22
    learn = learner(nn.Linear(6, 1, bias=False), loaders(bs=24), loss_func=lambda p, y: F.mse_loss(p, y) * factor)
    x, y = next(iter(learn.dls.train))
    p = learn.model(x).detach()
    grad = 2 * (p - y) / len(y) * factor
    weight = (grad * x).sum(0)
    values = torch.cat([grad.flatten(), weight]).abs()
    row = rows(learn.precision_report('fp16'), 'fp16').loc['(model)']
    assert row['grad'] == pytest.approx(float(values.max()), rel=1e-5)
    assert row['grad lost'] == pytest.approx(float((values < 2. ** -24).float().mean()), abs=1e-6)
    assert 0 < row['grad lost'] < 1
    assert row['grad lost scaled'] == 0


# -- what is measured

@pytest.mark.parametrize('mode,dtype', [('bf16', torch.bfloat16), ('fp16', torch.float16)])
def test_errors_are_those_of_a_direct_comparison(mode, dtype):
    learn = learner(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1)), loaders(bs=8))
    x, _ = next(iter(learn.dls.train))
    relative = lambda a, b: float((a.float() - b).norm() / b.norm())
    with torch.no_grad():
        exact = learn.model[0](x)
        with torch.autocast('cpu', dtype=dtype): first = learn.model[0](x); second = learn.model[1](first)
        own = relative(second, learn.model[1](first.float()))
        total = relative(second, learn.model[1](exact))
    table = rows(learn.precision_report(mode), mode)
    assert table.loc['0', 'own error'] == pytest.approx(relative(first, exact))
    assert table.loc['0', 'total error'] == pytest.approx(relative(first, exact))
    assert table.loc['1', 'own error'] == pytest.approx(own) and table.loc['1', 'total error'] == pytest.approx(total)
    name = str(dtype).removeprefix('torch.')
    assert list(table.loc['1', ['inputs', 'output', 'weights']]) == [name, name, 'float32']
    assert table.loc['0', 'largest'] == pytest.approx(float(exact.abs().max()))
    cast = (x, learn.model[0].weight, learn.model[0].bias)       # by autocast
    inside = max(float(t.abs().max()) for t in (*cast, exact))
    assert table.loc['0', 'headroom'] == pytest.approx(torch.finfo(dtype).max / inside)


def test_dropout_draws_the_same_masks_in_every_precision():
    table = learner(nn.Sequential(nn.Linear(6, 64), nn.Dropout(.5), nn.Linear(64, 1))).precision_report().table
    assert table['total error'].max() < .05 and len(table) == 8


def test_subnormal_and_flushed_values():
    class Small(nn.Module):
        def forward(self, x): return x @ torch.tensor([[2e-6, 1e-9, 1.]] + [[0.] * 3] * 5)
    class Net(nn.Module):
        def __init__(self): super().__init__(); self.small, self.out = Small(), nn.Linear(3, 1)
        def forward(self, x): return self.out(self.small(x))
    row = rows(learner(Net(), loaders(bs=24)).precision_report('fp16'), 'fp16').loc['small']
    assert row['flushed'] == pytest.approx(1 / 3, abs=.02) and row['subnormal'] >= 1 / 3 - .02


def test_several_batches_count_together():
    one, three = (learner().precision_report('bf16', n_batches=n).table.set_index('module') for n in (1, 3))
    assert (one['calls'] == 1).all() and (three['calls'] == 3).all() and (three['largest'] >= one['largest']).all()
    assert three['total error'].max() < .1
    report = learner(Attentive()).precision_report('fp16', n_batches=3)     # what is kept is kept for each
    assert report.verdicts['fp16'].verdict == 'keep modules in fp32' and report.fp32_modules == ['attn']


# -- all kinds of models

def test_shared_in_place_frozen_nested_and_uncalled_modules():
    class Inner(nn.Module):
        def __init__(self): super().__init__(); self.lin = nn.Linear(8, 8)
        def forward(self, x): return {'a': (self.lin(x), 3), 'b': None}
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.emb, self.inner, self.act = nn.Linear(6, 8), Inner(), nn.ReLU(inplace=True)
            self.spare, self.head = nn.Linear(2, 2), nn.Linear(8, 1)
            self.alias = self.emb
            self.emb.requires_grad_(False)
        def forward(self, x):
            x = self.act(self.emb(x) + self.alias(x))
            x = self.act(self.inner(x)['a'][0])
            return self.head(x)
    report = learner(Net()).precision_report()
    table = rows(report, 'bf16')
    assert list(table.index) == ['emb', 'act', 'inner.lin', 'head', '(model)', 'loss function']
    assert report.not_called == ['spare']
    assert table.loc['emb', 'calls'] == 2 == table.loc['act', 'calls'] and table['total error'].max() < .05
    assert set(v.verdict for v in report.verdicts.values()) == {'safe'}


def test_compiled_and_wrapped_models_have_clean_names():
    plain = learner().precision_report('bf16').table
    whole, parts = learner(), learner()
    whole.model = torch.compile(whole.model, backend='eager')
    parts.model[0] = torch.compile(parts.model[0], backend='eager')
    parallel = learner()
    parallel.model = nn.DataParallel(parallel.model)
    inplace = learner()
    inplace.model.compile(backend='eager')
    for learn in (whole, parts, parallel, inplace): assert learn.precision_report('bf16').table.equals(plain)


def test_transposed_recurrent_and_tied_models():
    table = rows(language_model().precision_report('bf16'), 'bf16')
    assert table.loc['0.rnns.0.module', 'type'] == 'LSTM' and '1.decoder' in table.index
    assert table['total error'].max() < .1


def test_batches_without_targets():
    class Pairs(nn.Module):
        def __init__(self): super().__init__(); self.lin = nn.Linear(7, 1)
        def forward(self, x, y): return self.lin(torch.cat((x, y), 1))
    dls = loaders()
    dls.n_inp = 2
    report = learner(Pairs(), dls).precision_report()
    assert {v.verdict for v in report.verdicts.values()} == {'safe'} and report.table['grad'].isna().all()


def test_a_learner_with_half_precision_weights():
    learn = learner().to_half_weights('bf16')
    before = params(learn)
    assert learn.precision_report('bf16').verdicts['bf16'].verdict == 'safe' and same(before, params(learn))
    learn.fit(1)
    assert learn.precision_report('bf16').verdicts['bf16'].verdict == 'safe'


# -- the learner stays as it was

def whole_state(learn):
    state = {n: t.clone() for n, t in learn.model.state_dict().items()}
    grads = [None if p.grad is None else (id(p.grad), p.grad.clone()) for p in learn.model.parameters()]
    modes = [m.training for m in learn.model.modules()]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in learn.model.modules()]
    names = [sorted(vars(m)) for m in learn.model.modules()]
    rest = modes, hooks, names, list(learn.cbs), sorted(vars(learn)), autocast_state(), torch.is_grad_enabled()
    return state, grads, rest, torch.get_rng_state()


def assert_same_state(a, b):
    assert a[0].keys() == b[0].keys() and all(torch.equal(a[0][k], b[0][k]) for k in a[0])
    assert all(x is y is None or (x[0] == y[0] and torch.equal(x[1], y[1])) for x, y in zip(a[1], b[1]))
    assert a[2] == b[2] and torch.equal(a[3], b[3])


class Loud(Callback):
    def __getattribute__(self, name):
        if name.startswith(('before_', 'after_')): raise AssertionError(f'{name} fired')
        return super().__getattribute__(name)


@pytest.mark.parametrize('grads', ['none', 'some'])
def test_the_learner_stays_as_it_was(grads):
    learn = learner(Attentive(drop=.3)).to_fp16()
    learn.fit(1)
    if grads == 'some': learn.model.emb(torch.ones(1, 1)).sum().backward()
    learn.model.norm.eval()
    before, scale, rng = whole_state(learn), learn.mixed_precision.scaling.state_dict(), learn.dls.train.rng.getstate()
    learn.precision_report(n_batches=2)
    assert_same_state(before, whole_state(learn))
    assert learn.mixed_precision.scaling.state_dict() == scale and learn.dls.train.rng.getstate() == rng


@pytest.mark.parametrize('error', [KeyError, KeyboardInterrupt])
@pytest.mark.parametrize('when', [1, 2, 4])
def test_also_after_an_exception_in_the_middle(error, when):
    calls = []
    class Fails(nn.Module):
        def forward(self, x):
            calls.append(1)
            if len(calls) == when: raise error('in the middle')
            return x + 1
    learn = learner(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), Fails(), nn.Linear(8, 1)))
    before = whole_state(learn)
    # An error of the very first pass is raised from one that says what it may be due to.
    kind = ValueError if when == 1 and error is KeyError else error
    with pytest.raises(kind, match='in the middle'): learn.precision_report()
    assert_same_state(before, whole_state(learn))


def test_a_hidden_state_outside_the_buffers_stays():
    learn = language_model()
    learn.fit(1)
    learn.model[0](torch.zeros(2, 3, dtype=torch.long))
    hidden = [[(id(t), t.clone()) for t in h] for h in learn.model[0].hidden]
    learn.precision_report('bf16')
    after = learn.model[0].hidden
    assert all(i == id(b) and torch.equal(t, b) for h, g in zip(hidden, after) for (i, t), b in zip(h, g))


def test_callbacks_do_not_fire_and_training_goes_on_as_without_it():
    asked, plain = learner(Attentive(drop=.3)).to_bf16(), learner(Attentive(drop=.3)).to_bf16()
    fired = []
    class Counts(Callback):
        def before_batch(self): fired.append('batch')
        def after_pred(self): fired.append('pred')
        def before_fit(self): fired.append('fit')
    asked.add_cb(Counts())
    torch.manual_seed(1)
    asked.precision_report()
    assert not fired
    asked.fit(2)
    torch.manual_seed(1)
    plain.fit(2)
    assert same(params(asked), params(plain))


def test_modules_kept_already_are_asked_about_like_the_rest_and_stay_kept():
    learn = learner(Attentive()).to_fp16(fp32_modules='attn')
    kept = learn.model.attn.forward
    assert learn.precision_report('fp16').fp32_modules == ['attn'] and learn.model.attn.forward is kept


# -- how it is shown

def test_repr_is_short_for_many_modules():
    torch.manual_seed(0)
    layers = [m for _ in range(250) for m in (nn.Linear(6, 6, bias=False), nn.Identity())]
    for m in layers[::2]: nn.init.eye_(m.weight)
    report = learner(nn.Sequential(*layers, nn.Linear(6, 1))).precision_report('bf16')
    text = repr(report)
    assert len(report.table) == 502 and len(text.splitlines()) < 20 and max(map(len, text.splitlines())) <= 120
    assert 'of 502' in text and 'report.table' in text and '<table' in report._repr_html_()
    assert len(report.worst(None)) == 502 and len(report.worst(3)) == 3
    assert len(report.plot()[0].get_lines()) >= 1


def test_the_printed_report_begins_with_verdict_and_call_and_has_eight_columns():
    report = learner(Attentive()).precision_report('fp16')
    first, second, *_ = repr(report).splitlines()
    assert first == "fp16: keep modules in fp32. Next: `learn.to_fp16(fp32_modules=['attn'])`"
    assert second.startswith("    Inside 'attn' values reach")
    html = report._repr_html_()
    assert '<b>fp16: keep modules in fp32. Next: <code>' in html and '</b><br>Inside' in html
    columns = ['module', 'type', 'largest', 'headroom', 'non-finite', 'own error', 'total error', 'trouble']
    assert list(short_table(report.table).columns) == columns


def test_headroom_beyond_a_thousand_is_not_spelled_out():
    report = learner().precision_report()
    assert set(short_table(report.table)['headroom']) == {'>1,000'} and report.table['headroom'].max() > 1e30


def test_bad_arguments():
    learn = learner()
    with pytest.raises(ValueError, match=r"modes=\('bf16', 'fp8'\) cannot be used: 'fp8' is not a precision. "):
        learn.precision_report(('bf16', 'fp8'))
    for n in (0, 1.5, True):
        with pytest.raises(ValueError, match='n_batches'): learn.precision_report(n_batches=n)
    with pytest.raises(ValueError, match='at least one of'): learn.precision_report(())
    for seconds in (0, -1., 'long', True):
        with pytest.raises(ValueError, match='max_seconds=.* a number of seconds above 0'):
            learn.precision_report(max_seconds=seconds)
    assert list(learn.precision_report(('fp32', torch.bfloat16)).verdicts) == ['bf16']       # fp32 is always there
    with pytest.raises(ValueError, match='at least one batch'): learn.precision_report(dl=[])
    assert learn.precision_report('bf16', dl=learn.dls.valid).table['total error'].max() < .1


def test_a_large_copy_is_announced(monkeypatch, capsys):
    from fastxtend_amp.insight import report
    monkeypatch.setattr(report, 'LARGE', 10)
    learner().precision_report('bf16')
    assert 'copies of parameters and buffers and gradients will take' in capsys.readouterr().out
    monkeypatch.undo()
    learner().precision_report('bf16')
    assert not capsys.readouterr().out


def test_under_ddp_each_process_looks_for_itself(tmp_path):
    "One of two processes asks alone, with SyncBatchNorm in the model, and does not wait for the other."
    code = '''
import sys, torch, torch.distributed as dist; sys.path.insert(0, 'tests')
from helpers import *
from torch.nn.parallel import DistributedDataParallel
rank = int(sys.argv[2])
dist.init_process_group('gloo', init_method='file://' + sys.argv[1], rank=rank, world_size=2)
wrapped, synced, plain = learner(), learner(), learner()
wrapped.model = DistributedDataParallel(wrapped.model)
synced.model = nn.SyncBatchNorm.convert_sync_batchnorm(synced.model)
if rank == 0:
    a, b, expected = (l.precision_report('bf16').table.drop(columns='type') for l in (wrapped, synced, plain))
    print(a.equals(expected), b.equals(expected), all(p.grad is None for p in wrapped.model.parameters()))
dist.barrier()
dist.destroy_process_group()
'''
    import subprocess, sys
    from pathlib import Path
    command = [sys.executable, '-W', 'ignore', '-c', code, tmp_path / 'init']
    root, pipes = Path(__file__).parent.parent.parent, {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE}
    run = lambda rank: subprocess.Popen([*command, str(rank)], cwd=root, **pipes, text=True)
    processes = [run(0), run(1)]
    (out, err), _ = [p.communicate(timeout=900) for p in processes]
    assert out.split()[-3:] == ['True', 'True', 'True'], out + err


def test_a_distributed_dataloader_does_not_wait_for_other_processes():
    from fastai.distributed import DistributedDL
    learn = learner()
    expected = learn.precision_report('bf16').table
    distributed = DistributedDL(learn.dls.train, rank=0, world_size=2)
    assert learn.precision_report('bf16', dl=distributed).table.equals(expected)
