"Progress bars, as in fastai's fits: hidden with `no_bar`, removed at the end."

from contextlib import nullcontext

import fastai.callback.progress  # noqa: F401  gives new learners a bar
import pytest
from torch import nn

from fastxtend_amp.insight import display as room
from fastxtend_amp.insight.display import progress_bar
from helpers import learner, set_support
from models import InStep
from states import ASK

each_call = pytest.mark.parametrize('name', ASK)


@pytest.fixture
def terminal(monkeypatch):
    "What pytest captures counts as a terminal."
    monkeypatch.setattr(room, '_is_interactive', lambda: True)


@pytest.fixture
def slow(monkeypatch, sleeps):
    "Makes a learner whose steps last .7 seconds."
    set_support(monkeypatch, lambda name: 'native' if name == 'bf16' else 'unsupported')
    wait = InStep('before_batch', lambda l: sleeps.sleep(0.7))
    return lambda progress: learner(nn.Linear(6, 1), cbs=wait, progress=progress)


@each_call
def test_a_terminal_shows_a_bar_that_is_gone_in_the_end(name, slow, terminal, capsys):
    learn = slow(True)
    ASK[name](learn)
    out = capsys.readouterr().out
    *_, last = bars = [part for part in out.split('\r') if '|' in part]
    assert len(bars) > 1 and bars[0].lstrip().startswith('|-') and ('fp32]' in out or 'bf16]' in out)
    rest = out[out.rindex(last) + len(last) :]
    assert rest.startswith('\r' + ' ' * (len(last) - 1))
    assert [l for l in rest.split('\r')[-1].splitlines() if l.strip() and not l.startswith('Selected')] == []
    learn.fit(1)
    assert 'Epoch 1/1' in capsys.readouterr().out  # its own bar


@each_call
@pytest.mark.parametrize('place', ['a file', 'no_bar', 'without fastai\'s'])
def test_no_bar(name, place, slow, monkeypatch, capsys):
    monkeypatch.setattr(room, '_is_interactive', lambda: place != 'a file')
    learn = slow(place != "without fastai's")
    with learn.no_bar() if place == 'no_bar' else nullcontext():
        ASK[name](learn)
    out = capsys.readouterr().out
    assert '\r' not in out and out.count('\n') == (name == 'choice')


def test_the_bar_is_the_time_and_ends_with_an_error(clock, terminal, capsys):
    with pytest.raises(ZeroDivisionError), progress_bar(learner(progress=True), 20.0) as show:
        clock.sleep(10)
        show('bf16')
        clock.sleep(100)  # longer than planned
        show('fp16')
        1 / 0
    parts = [part.strip() for part in capsys.readouterr().out.split('\r')]
    assert any('50.00% [10/20 00:10<00:10... bf16]' in p for p in parts) and any('[19/20' in p for p in parts)
    assert parts[-1] == parts[-2] == ''


def test_a_bar_without_a_time_limit(clock, terminal, capsys):
    with progress_bar(learner(progress=True), float('inf')) as show:
        clock.sleep(36)
        show('fp32')
    assert '36/3600' in capsys.readouterr().out
