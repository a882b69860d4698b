"Progress bars in a terminal and in a notebook, as in fastai's fits: hidden with `no_bar`, removed at the end."

import pytest
from fastai.callback import progress as fastai_progress
from fastprogress import fastprogress
from torch import nn

from fastxtend_amp.insight.progress import progress_bar
from helpers import learner, set_support
from states import InStep


@pytest.fixture(autouse=True)
def native(monkeypatch):
    set_support(monkeypatch, lambda name: 'native' if name == 'bf16' else 'unsupported')


CALLS = {
    'report': lambda l: l.precision_report('bf16', max_seconds=20),
    'comparison': lambda l: l.compare_precision('bf16', n_steps=4, n_seeds=1, max_seconds=5),
    'choice': lambda l: l.to_amp(measure=True, max_seconds=9),
}


def slept(clock, **kwargs):
    "A learner whose steps last .7 seconds."
    return learner(nn.Linear(6, 1), cbs=InStep('before_batch', lambda l: clock.sleep(0.7)), **kwargs)


@pytest.mark.parametrize('name', CALLS)
def test_a_terminal_shows_a_bar_that_is_gone_in_the_end(name, sleeps, capsys):
    CALLS[name](slept(sleeps, progress=True))
    out = capsys.readouterr().out
    bars = [part for part in out.split('\r') if '|' in part]
    assert len(bars) > 1 and bars[0].lstrip().startswith('|-') and ('fp32]' in out or 'bf16]' in out)
    last = next(part for part in reversed(out.split('\r')) if part.strip('\n'))
    rest = out[out.rindex(bars[-1]) + len(bars[-1]) :]
    assert rest.startswith('\r' + ' ' * (len(bars[-1]) - 1)) and 'Selected' in last or last.isspace()


@pytest.mark.parametrize('name', CALLS)
@pytest.mark.parametrize('how', ['no_bar', 'no callback'])
def test_no_bar(name, how, sleeps, capsys):
    learn = slept(sleeps, progress=how == 'no_bar')
    if how == 'no_bar':
        with learn.no_bar():
            CALLS[name](learn)
    else:
        CALLS[name](learn)
    out = capsys.readouterr().out
    assert '\r' not in out and (out == '' or name == 'choice' and out.count('\n') == 1)


class Shown:
    "Replaces IPython's display handles."

    handles = []

    def __init__(self, content):
        self.contents = [content]
        self.handles.append(self)

    def update(self, content):
        self.contents.append(content)


@pytest.mark.parametrize('name', CALLS)
def test_a_notebook_shows_a_bar_that_is_gone_in_the_end(name, sleeps, monkeypatch):
    display = pytest.importorskip('IPython.display')
    monkeypatch.setattr(fastai_progress, 'progress_bar', fastprogress.NBProgressBar)
    monkeypatch.setattr(display, 'display', lambda content, display_id=None: Shown(content))
    monkeypatch.setattr(fastprogress, 'show_styles', lambda: None)
    Shown.handles.clear()
    CALLS[name](slept(sleeps, progress=True))
    assert len(Shown.handles) == (2 if name == 'choice' else 1)  # the report of `to_amp(measure=True)` has its own
    for handle in Shown.handles:
        assert len(handle.contents) > 2 and handle.contents[-1].data == ''


def test_the_bar_is_the_time_and_ends_with_an_error(clock, capsys):
    learn = learner(progress=True)
    with pytest.raises(ZeroDivisionError), progress_bar(learn, 20.0) as tick:
        clock.sleep(10)
        tick('bf16')
        clock.sleep(100)  # longer than planned
        tick('fp16')
        1 / 0
    parts = [part.strip() for part in capsys.readouterr().out.split('\r')]
    assert any('50.00% [10/20 00:10<00:10... bf16]' in p for p in parts) and any('[19/20' in p for p in parts)
    assert parts[-1] == parts[-2] == ''


def test_a_learner_trains_with_its_own_bar_afterwards(capsys):
    learn = learner(progress=True)
    learn.compare_precision('bf16', n_steps=2, n_seeds=0)
    capsys.readouterr()
    learn.fit(1)
    assert 'Epoch 1/1' in capsys.readouterr().out
