"How long the report takes, what it shows meanwhile, and how much memory it holds."
import math

import pytest, torch
from torch import nn

from fastxtend_amp.insight import examination, samples
from fastxtend_amp.insight.tracer import Tracer
from fastxtend_amp.mode import Support
from helpers import Attentive, Data, learner, loaders


@pytest.fixture
def emulated(monkeypatch):
    "Every mode counts as emulated, and any work as much."
    monkeypatch.setattr(examination, 'mode_support', lambda mode, device: Support('emulated', 'for this test'))
    monkeypatch.setattr(examination, 'EMULATED_WORK', 1.)


# -- progress

def test_a_bar_and_an_estimate_from_the_start(capsys):
    "Before the first pass is done, on a learner that shows progress."
    seen = []
    class Looks(nn.Module):
        def forward(self, x):
            seen.append(capsys.readouterr().out)
            return x
    learn = learner(nn.Sequential(nn.Linear(6, 1), Looks()), progress=True)
    learn.precision_report()
    assert '|' in seen[0] and '0' in seen[0]                     # fastprogress's bar, while the first batch runs
    assert seen[1].count('precision_report: about ') == 1 and ' s for bf16 and fp16' in seen[1]


def test_nothing_is_printed_without_fastais_progress_bar(capsys):
    learner().precision_report()
    learn = learner(progress=True)
    with learn.no_bar(): learn.precision_report()
    assert not capsys.readouterr().out


# -- the time limit

class Slow(nn.Module):
    def __init__(self, clock, seconds): super().__init__(); self.clock, self.seconds = clock, seconds
    def forward(self, x): self.clock.sleep(self.seconds); return x


def test_it_ends_in_max_seconds_with_what_it_knows(clock):
    learn = learner(nn.Sequential(nn.Linear(6, 6), *[Slow(clock, .02) for _ in range(10)], nn.Linear(6, 1)))
    report = learn.precision_report(max_seconds=.7)              # a forward pass takes .2 s, one in low precision .4 s
    assert clock.now < 1
    last = report.verdicts['fp16']
    assert last.verdict == 'not known' and '`max_seconds=0.7` was over' in last.reason
    assert last.call == "learn.precision_report('fp16', max_seconds=7)"
    whole = learn.precision_report('bf16')
    assert whole.verdicts['bf16'].verdict == 'safe'
    assert len(whole.table) > len(report.table[report.table['mode'] == 'fp16'])


def test_the_learner_stays_as_it_was_when_time_is_up(clock):
    learn = learner(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), Slow(clock, .1), nn.Linear(8, 1)))
    before = {n: t.clone() for n, t in learn.model.state_dict().items()}
    report = learn.precision_report(max_seconds=.05)
    assert {v.verdict for v in report.verdicts.values()} == {'not known'}
    assert len(report.table) == 0 and 'not known' in repr(report)
    assert all(torch.equal(t, before[n]) for n, t in learn.model.state_dict().items())
    assert not learn.model[0]._forward_hooks


def test_a_search_for_the_loss_scale_ends_in_time(clock):
    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x): return x.clone()
        @staticmethod
        def backward(ctx, g):
            clock.sleep(.2)
            return g * (math.inf if torch.is_autocast_enabled('cpu') or g.dtype is torch.float16 else 1.)
    class Steep(nn.Module):
        def __init__(self): super().__init__(); self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 1)
        def forward(self, x): return self.b(Backward.apply(self.a(x)))
    report = learner(Steep()).precision_report('fp16', max_seconds=1.)
    assert clock.now < 2 and report.verdicts['fp16'].verdict == 'not known'


# -- emulated modes

def test_an_emulated_mode_looks_at_fewer_samples_and_says_so(emulated):
    sizes = []
    class Notes(nn.Module):
        def forward(self, x): sizes.append(len(x)); return x
    learn = learner(nn.Sequential(nn.Linear(6, 1), Notes()), loaders(24, 24))
    report = learn.precision_report('fp16')
    assert set(sizes) == {24, 2}
    assert report.notes == ['fp16 is emulated here: the report looked at 2 of 24 samples in it.']
    assert report.notes[0] in repr(report) and report.verdicts['fp16'].verdict == 'safe'


def test_what_the_other_samples_hold_counts_nevertheless(emulated):
    "The largest values and the gradients are those of the whole batch in fp32."
    x = torch.ones(24, 6)
    x[10:] = 300.
    class Square(nn.Linear):
        def forward(self, x): return super().forward(x * x * x) / 1e6
    torch.manual_seed(0)
    data = Data(x, torch.zeros(24, 1))
    report = learner(nn.Sequential(Square(6, 8), nn.Linear(8, 1)), loaders(24, 24, data, data)).precision_report('fp16')
    assert report.notes and report.verdicts['fp16'].modules == ['0'] and report.table['largest'].max() > 1


# -- memory

def test_no_more_than_512_mb_of_batches(monkeypatch):
    assert samples.MAX_BYTES == 512 * 2 ** 20
    monkeypatch.setattr(samples, 'MAX_BYTES', 2 * 4 * (6 + 1) * 4)                           # of two batches
    report = learner().precision_report('bf16', n_batches=5)
    assert report.table['calls'].max() == 2 and 'looked at 2 of 5 batches' in report.notes[0]
    monkeypatch.setattr(samples, 'MAX_BYTES', 3 * 4 * (6 + 1))                               # of three samples
    sizes = []
    class Notes(nn.Module):
        def forward(self, x): sizes.append(len(x)); return x
    learner(nn.Sequential(nn.Linear(6, 1), Notes())).precision_report('bf16')
    assert set(sizes) == {3}


def full_memory(monkeypatch, at_once):
    "Running in fp32 as well succeeds for so many modules in a pass; after that the device's memory is full."
    real, count = Tracer._in_fp32, []
    def limited(self, *args):
        count.append(id(self))
        if count.count(id(self)) > at_once: raise torch.OutOfMemoryError('CUDA out of memory')
        return real(self, *args)
    monkeypatch.setattr(Tracer, '_in_fp32', limited)


def test_fewer_modules_at_a_time_where_memory_is_full(monkeypatch):
    expected = learner(Attentive()).precision_report()
    full_memory(monkeypatch, 3)
    report = learner(Attentive()).precision_report()
    assert report.table.equals(expected.table) and report.verdicts == expected.verdicts


def test_full_memory_with_one_module_is_an_error_that_says_what_to_do(monkeypatch):
    full_memory(monkeypatch, 0)
    learn = learner(Attentive())
    before = {n: t.clone() for n, t in learn.model.state_dict().items()}
    with pytest.raises(torch.OutOfMemoryError, match='one module at a time as well. Give it smaller batches'):
        learn.precision_report()
    assert all(torch.equal(t, before[n]) for n, t in learn.model.state_dict().items())
