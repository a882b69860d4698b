"Progress bars in a terminal and in a notebook, as in fastai's fits: hidden with `no_bar`, removed at the end."

from contextlib import nullcontext

import pytest
from fastai.callback import progress as fastai_progress
from fastprogress import fastprogress
from torch import nn

from fastxtend_amp.insight.progress import progress_bar
from helpers import learner, set_support
from states import InStep

CALLS = {
    'report': lambda l: l.precision_report('bf16', max_seconds=20),
    'comparison': lambda l: l.compare_precision('bf16', n_steps=4, n_seeds=1, max_seconds=5),
    'choice': lambda l: l.to_amp(measure=True, max_seconds=9),
}
each_call = pytest.mark.parametrize('name', CALLS)


@pytest.fixture
def slow(monkeypatch, sleeps):
    "Makes a learner whose steps last .7 seconds."
    set_support(monkeypatch, lambda name: 'native' if name == 'bf16' else 'unsupported')
    wait = InStep('before_batch', lambda l: sleeps.sleep(0.7))
    return lambda progress: learner(nn.Linear(6, 1), cbs=wait, progress=progress)


@each_call
def test_a_terminal_shows_a_bar_that_is_gone_in_the_end(name, slow, capsys):
    learn = slow(True)
    CALLS[name](learn)
    out = capsys.readouterr().out
    *_, last = bars = [part for part in out.split('\r') if '|' in part]
    assert len(bars) > 1 and bars[0].lstrip().startswith('|-') and ('fp32]' in out or 'bf16]' in out)
    rest = out[out.rindex(last) + len(last) :]
    assert rest.startswith('\r' + ' ' * (len(last) - 1))
    assert [l for l in rest.split('\r')[-1].splitlines() if l.strip() and not l.startswith('Selected')] == []
    learn.fit(1)
    assert 'Epoch 1/1' in capsys.readouterr().out  # its own bar


@each_call
@pytest.mark.parametrize('progress', [True, False])
def test_no_bar(name, progress, slow, capsys):
    learn = slow(progress)
    with learn.no_bar() if progress else nullcontext():
        CALLS[name](learn)
    out = capsys.readouterr().out
    assert '\r' not in out and out.count('\n') == (name == 'choice')


class Shown:
    "Replaces IPython's display handles."

    handles = []

    def __init__(self, content, display_id=None):
        self.contents = [content]
        self.handles.append(self)

    def update(self, content):
        self.contents.append(content)


@each_call
def test_a_notebook_shows_a_bar_that_is_gone_in_the_end(name, slow, monkeypatch):
    display = pytest.importorskip('IPython.display')
    monkeypatch.setattr(fastai_progress, 'progress_bar', fastprogress.NBProgressBar)
    monkeypatch.setattr(display, 'display', Shown)
    monkeypatch.setattr(fastprogress, 'show_styles', lambda: None)
    Shown.handles.clear()
    CALLS[name](slow(True))
    assert len(Shown.handles) == (2 if name == 'choice' else 1)  # the report of `to_amp(measure=True)` has its own
    assert all(len(h.contents) > 2 and h.contents[-1].data == '' for h in Shown.handles)


def test_the_bar_is_the_time_and_ends_with_an_error(clock, capsys):
    with pytest.raises(ZeroDivisionError), progress_bar(learner(progress=True), 20.0) as tick:
        clock.sleep(10)
        tick('bf16')
        clock.sleep(100)  # longer than planned
        tick('fp16')
        1 / 0
    parts = [part.strip() for part in capsys.readouterr().out.split('\r')]
    assert any('50.00% [10/20 00:10<00:10... bf16]' in p for p in parts) and any('[19/20' in p for p in parts)
    assert parts[-1] == parts[-2] == ''
