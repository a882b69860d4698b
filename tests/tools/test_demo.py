"The console script `fastxtend_amp_demo`, as a user runs it."
import subprocess
from pathlib import Path

import pandas as pd
import pytest, torch

from fastxtend_amp.mode import Support
from fastxtend_amp.tools import demo

ROOT = Path(__file__).parents[2]


def rows(out):
    "The table's rows by mode, each a list of cells."
    table = [line.split() for line in out.splitlines() if len(line.split()) == 10]
    return {r[0]: r for r in table if r[1] in ('native', 'emulated')}


def test_demo(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, 'EMULATED_SECONDS', .5)            # emulated modes are cut short
    monkeypatch.chdir(tmp_path)
    demo.main(['--epochs', '1', '--seed', '3'])
    out = capsys.readouterr().out
    assert 'measure with `fastxtend_amp_bench`' in out
    table = rows(out)
    assert {mode: r[2] for mode, r in table.items()} == {'fp32': 'float32', 'bf16': 'bfloat16', 'fp16': 'float16'}
    assert table['fp32'][7] == '1.00' and table['fp16'][9] != '-'
    picture = tmp_path / 'fastxtend_amp_demo.png'
    assert f'Loss curves and loss scale: {picture.resolve()}' in out and picture.read_bytes()[:4] == b'\x89PNG'


def test_an_emulated_mode_is_announced_in_plain_words(capsys, monkeypatch):
    supports = {'bf16': Support('emulated', 'the CPU has no bf16 arithmetic'), 'fp16': Support('unsupported', 'no')}
    monkeypatch.setattr(demo, 'EMULATED_SECONDS', .01)
    monkeypatch.setattr(demo, 'mode_support', lambda mode, device: supports[mode.value])
    table, learners = demo.run(1, 'cpu')
    out = capsys.readouterr().out
    assert 'This device (cpu) only emulates bf16: the CPU has no bf16 arithmetic.' in out and 'but it is slow' in out
    assert 'To save time it trains' in out and 'fp16 does not run on this device (cpu): no. It is left out.' in out
    assert list(table['mode']) == ['fp32', 'bf16'] == list(learners)
    assert demo._verdict(table.iloc[1]).endswith('times as fast as fp32: this device only emulates it.')


@pytest.mark.parametrize('ratio,support,words', [(1.4, 'native', 'bf16 trained 1.40 times as fast as fp32.'),
                                                 (.8, 'native', 'does not pay off for this network on this device')])
def test_verdict(ratio, support, words):
    assert words in demo._verdict(pd.Series({'mode': 'bf16', 'support': support, 'ratio to fp32': ratio}))


def test_the_network_is_wide_enough_for_low_precision_to_matter():
    "2.4 million multiplications in convolutions for an image; with a quarter of that bf16 gained nothing."
    counted = []
    def hook(m, i, o): counted.append(o[0].numel() * m.in_channels * m.kernel_size[0] * m.kernel_size[1])
    net = demo.network()
    for m in net.modules():
        if isinstance(m, torch.nn.Conv2d): m.register_forward_hook(hook)
    assert net(torch.zeros(2, 1, 32, 32)).shape == (2, 10) and sum(counted) > 2e6


@pytest.mark.skipif(not (ROOT / '.git').exists(), reason='needs a git checkout')
def test_git_ignores_its_picture():
    assert subprocess.run(['git', 'check-ignore', '-q', 'fastxtend_amp_demo.png'], cwd=ROOT).returncode == 0


@pytest.mark.parametrize('args,message', [
    (['--epochs', '0'], '--epochs 0'), (['--device', 'gpu'], '--device gpu'),
    (['--out', 'no/such/f.png'], 'no folder'), (['--device', 'meta'], 'no autocast')])
def test_bad_input(args, message, capsys):
    with pytest.raises(SystemExit): demo.main(args)
    assert message in capsys.readouterr().err


def test_help(capsys):
    with pytest.raises(SystemExit) as e: demo.main(['--help'])
    assert e.value.code == 0 and '--epochs' in capsys.readouterr().out
