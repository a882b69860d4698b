"The console script `fastxtend_amp_demo`, as a user runs it."

import os, subprocess, sys
from pathlib import Path

import pandas as pd
import pytest, torch
from torch import nn

from fastxtend_amp.insight import measuring
from fastxtend_amp.tools import demo
from helpers import learner, set_support

DEMO = """
from fastxtend_amp.tools import demo
demo.SECONDS, demo.BATCH_SIZE = 2, 8
demo.main(['--device', 'cpu', '--out', 'picture.png'])
"""


def test_a_file_gets_lines_and_no_warning(tmp_path):
    env = {**os.environ, 'PYTHONPATH': str(Path(__file__).parents[2]), 'OMP_NUM_THREADS': '1'}
    done = subprocess.run([sys.executable, '-c', DEMO], cwd=tmp_path, env=env, capture_output=True, text=True)
    out, picture = done.stdout.splitlines(), tmp_path / 'picture.png'
    assert done.returncode == 0 and not done.stderr and '\r' not in done.stdout and 'Warning' not in done.stdout
    assert out[0].startswith('bf16 is ') and max(map(len, out[:-1])) <= 120
    assert out[-1] == f'Picture: {picture.resolve()}' and picture.read_bytes()[:4] == b'\x89PNG'


@pytest.mark.parametrize(
    'bf16, fp16, args, trained, seconds',
    [
        ('native', 'emulated', [], ['bf16'], [8]),
        ('native', 'native', [], ['bf16', 'fp16'], [8]),
        ('native', 'emulated', ['--emulated'], ['bf16', 'fp16'], [8, 2]),
        ('emulated', 'emulated', ['--emulated'], ['bf16', 'fp16'], [1, 1]),
        ('emulated', 'unsupported', [], [], []),
    ],
)
def test_emulated_precisions_train_if_asked_for_and_in_a_fifth_of_the_time(
    bf16, fp16, args, trained, seconds, monkeypatch, tmp_path, capsys
):
    support, given = {'bf16': bf16, 'fp16': fp16, 'fp8': 'native'}, []
    rows = [{'mode': name, 'support': status, 'why': 'for this test'} for name, status in support.items()]
    monkeypatch.setattr(demo, 'precision_support', lambda device: pd.DataFrame(rows))
    set_support(monkeypatch, lambda name: support.get(name, 'unsupported'))
    monkeypatch.setattr(demo, 'learner', lambda device: learner(nn.Linear(6, 1), lr=0.01))
    monkeypatch.setattr(demo, 'SECONDS', 10)
    kept = measuring.Setting.__post_init__
    monkeypatch.setattr(measuring.Setting, '__post_init__', lambda self: given.append(self.max_seconds) or kept(self))
    demo.main(['--device', 'cpu', '--out', str(tmp_path / 'f.png'), *args])
    out = capsys.readouterr().out
    assert out.startswith(f'bf16 is {bf16} on this device (for this test).\nfp16 is {fp16} ')
    assert max(map(len, out.splitlines()[:-1])) <= 120
    for name in ('bf16', 'fp16'):
        assert (f'\n{name}  {support[name]} ' in out) == (name in trained)
    if seconds:
        assert given == seconds and 'Next: `learn.to_' in ' '.join(out.split())
    else:
        assert 'This device runs no 16-bit precision natively' in out and 'of modules' not in out
    assert (tmp_path / 'f.png').read_bytes()[:4] == b'\x89PNG'


def test_more_time_can_be_given(monkeypatch, tmp_path, capsys):
    rows = [{'mode': 'bf16', 'support': 'native', 'why': 'for this test'}]
    monkeypatch.setattr(demo, 'precision_support', lambda device: pd.DataFrame(rows))
    monkeypatch.setattr(demo, 'learner', lambda device: learner(nn.Linear(6, 1), lr=0.01))
    demo.main(['--device', 'cpu', '--out', str(tmp_path / 'f.png'), '--max-seconds', '5'])
    assert 'in alternating rounds, for at most 4 seconds.' in capsys.readouterr().out


def test_the_data_and_the_model_are_the_same_each_time():
    a, b = (demo.learner(torch.device('cpu')) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a.model.parameters(), b.model.parameters()))
    x, y = a.dls.train.one_batch()
    assert x.shape == (64, 1, 16, 16) and len(a.dls.train_ds) + len(a.dls.valid_ds) == 1797 and a.lr == demo.LR


@pytest.mark.parametrize(
    'args,message',
    [
        (['--device', 'gpu'], '--device gpu'),
        (['--out', 'no/such/f.png'], 'no/such is not a folder, or not writable'),
        (['--device', 'meta'], 'no autocast'),
        (['--max-seconds', '0'], '--max-seconds 0: it must be above 0'),
    ],
)
def test_bad_input(args, message, capsys):
    with pytest.raises(SystemExit):
        demo.main(args)
    assert message in capsys.readouterr().err
