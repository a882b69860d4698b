"The console script, as a user runs it."
import subprocess, sys

import pytest

from fastxtend_amp.tools import demo


def test_demo(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(demo, 'BUDGET', 1)                        # emulated modes are cut short
    demo.main(['--epochs', '2', '--out', str(tmp_path / 'demo.png'), '--seed', '3'])
    out = capsys.readouterr().out
    table = [l.split() for l in out.splitlines() if len(l.split()) == 10 and l.split()[1] in ('native', 'emulated')]
    assert [(r[0], r[2]) for r in table] == [('fp32', 'float32'), ('bf16', 'bfloat16'), ('fp16', 'float16')]
    assert table[0][6:8] != ['-', '-'] and table[0][7] == '1.00' and table[2][9] != '-'
    assert (tmp_path / 'demo.png').read_bytes()[:4] == b'\x89PNG'


@pytest.mark.parametrize('args,message', [(['--epochs', '0'], '--epochs 0'), (['--device', 'gpu'], '--device gpu'), (['--out', 'no/such/f.png'], 'no folder'),
                                          (['--device', 'meta'], 'no autocast')])
def test_bad_input(args, message, capsys):
    with pytest.raises(SystemExit): demo.main(args)
    assert message in capsys.readouterr().err


def test_help():
    assert '--epochs' in subprocess.run([sys.executable, '-c', 'from fastxtend_amp.tools.demo import main; main(["--help"])'], capture_output=True, text=True).stdout
