"The console script `fastxtend_amp_demo`, as a user runs it."
import os, subprocess, sys
from pathlib import Path

import pandas as pd
import pytest

from fastxtend_amp.tools import demo

ROOT = Path(__file__).parents[2]
DEMO = """
from fastxtend_amp.tools import demo
demo.EMULATED_SECONDS = 0
demo.main(['--epochs', '1', '--out', 'picture.png'])
"""


@pytest.fixture(scope='module')
def shown(tmp_path_factory):
    "A demo of one epoch in a process of its own: its lines on standard output, on standard error, and its picture."
    folder = tmp_path_factory.mktemp('demo')
    env = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
    done = subprocess.run([sys.executable, '-c', DEMO], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr, folder / 'picture.png'


def test_a_file_gets_lines_and_no_warning(shown):
    out, err, picture = shown
    assert not err and not any('\r' in line or 'Warning' in line for line in out)
    assert out[0].startswith('bf16 is ') and max(map(len, out[:-1])) < 120
    assert out[-1] == f'Losses and speeds: {picture.resolve()}' and picture.read_bytes()[:4] == b'\x89PNG'


def test_each_precision_has_a_line_for_each_epoch_and_a_row(shown):
    out, _, _ = shown
    assert any(line.startswith('epoch 1, fp32: loss ') for line in out)
    table = [line.split() for line in out[-5:-2]]
    assert [row[0] for row in table] == ['fp32', 'bf16', 'fp16'] and ' '.join(table[0][4:]).endswith(')')


def test_precisions_take_turns_in_the_same_schedule(monkeypatch, capsys):
    "Natively, as far as the demo knows: nothing stops early, whatever the machine's speed."
    support = pd.DataFrame({'mode': ['bf16', 'fp16'], 'support': ['native', 'unsupported'], 'why': ['a test', 'a test']})
    monkeypatch.setattr(demo, 'precision_support', lambda device: support)
    monkeypatch.setattr(demo, 'SECONDS', 1e9)
    monkeypatch.setattr(demo, 'digits', few)
    learners = demo.run(2)
    lines = [line.split(':')[0] for line in capsys.readouterr().out.splitlines()]
    assert lines[2:] == ['epoch 1, fp32', 'epoch 1, bf16', 'epoch 2, bf16', 'epoch 2, fp32'] and 'unsupported' in lines[1]
    fp32, bf16 = (learn.turns for learn in learners.values())
    assert len(fp32.losses) == len(bf16.losses) == 6 and len(fp32.speeds) == 2 and not bf16.stopped
    assert fp32.losses[0] == pytest.approx(bf16.losses[0], rel=.02)
    last = [learn.opt.hypers[0]['lr'] for learn in learners.values()]
    assert last[0] == last[1] == pytest.approx(demo.Turns(2, False).schedule(5 / 6))


def few(device): # Three batches, as `digits` gives 22
    from fastai.data.core import DataLoaders
    dls = demo_digits(device, size=8)
    train = [dls.train_ds[i] for i in range(3 * demo.BATCH_SIZE)]
    return DataLoaders.from_dsets(train, train[:8], bs=demo.BATCH_SIZE, num_workers=0, device=device)


demo_digits = demo.digits


def test_an_emulated_precision_stops_early_and_says_so(monkeypatch, capsys, tmp_path):
    support = pd.DataFrame({'mode': ['bf16'], 'support': ['emulated'], 'why': 'the CPU has no bf16 arithmetic'})
    monkeypatch.setattr(demo, 'precision_support', lambda device: support)
    monkeypatch.setattr(demo, 'EMULATED_SECONDS', 0)
    monkeypatch.setattr(demo, 'SECONDS', 1e9)
    monkeypatch.setattr(demo, 'digits', few)
    learners = demo.run(2)
    out = capsys.readouterr().out
    assert 'bf16 is emulated on this device (the CPU has no bf16 arithmetic); expect it to be slow.' in out
    assert 'stopped to save time after 0.3 of 2 epochs' in out and 'epoch 2, bf16' not in out
    assert [learn.turns.done for learn in learners.values()] == [2, 1 / 3]
    demo.plot(learners, tmp_path / 'picture.png')
    row = demo.row('bf16', learners['bf16'], learners['fp32'].turns)
    assert row['epochs'] == '0.3' and row['valid loss'] == '-' and row['times as fast as fp32'] == 'too slow to time'


@pytest.mark.parametrize('ratios,emulated,said', [
    ([1.4, 1.41, 1.42], False, '1.41 (1.40 to 1.42)'), ([.8, .8, .8], False, '0.80 (0.80 to 0.80)'),
    ([.7, 1.2, 8.7], False, '1.20 (0.95 to 4.95), too noisy to tell'), ([1.4, 1.4], False, '1.40 (1.40 to 1.40), too noisy to tell'),
    ([.1], True, '0.10 (0.10 to 0.10), emulated here'), ([], True, 'too slow to time')])
def test_verdict(ratios, emulated, said): assert demo.verdict(ratios, emulated) == said


@pytest.mark.parametrize('args,message', [
    (['--epochs', '0'], '--epochs 0'), (['--device', 'gpu'], '--device gpu'),
    (['--out', 'no/such/f.png'], 'no folder'), (['--device', 'meta'], 'no autocast')])
def test_bad_input(args, message, capsys):
    with pytest.raises(SystemExit): demo.main(args)
    assert message in capsys.readouterr().err
