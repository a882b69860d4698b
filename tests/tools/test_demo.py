"The console script `fastxtend_amp_demo`, as a user runs it; test_check.py tests its argument `--device`."

import re

import pandas as pd
import pytest, torch

from fastxtend_amp.tools import demo
from helpers import learner, linear, params, python, same, set_support

LOW = ['bf16', 'fp16']
DEMO = """
from fastxtend_amp.tools import demo
demo.SECONDS, demo.BATCH_SIZE = 1, 8
demo.main(['--device', 'cpu', '--out', 'picture.png'])
"""


@pytest.mark.slow
def test_a_file_gets_lines_and_no_warning(tmp_path):
    done = python('-c', DEMO, cwd=tmp_path, PYTHONWARNINGS='')
    out, picture = done.stdout.splitlines(), tmp_path / 'picture.png'
    assert done.returncode == 0 and not done.stderr and '\r' not in done.stdout and 'Warning' not in done.stdout
    assert out[0].startswith('bf16 is ') and max(map(len, out[:-1])) <= 120
    assert out[-1] == f'Picture: {picture.resolve()}' and picture.read_bytes()[:4] == b'\x89PNG'


@pytest.mark.parametrize('native', [['bf16'], ['bf16', 'fp16'], []])
def test_native_precisions_train_and_others_do_not(native, monkeypatch, tmp_path, capsys):
    support = lambda name: 'native' if name in [*native, 'fp8'] else 'emulated' if name in LOW else 'unsupported'
    rows = [{'precision': name, 'support': support(name), 'why': 'for this test'} for name in [*LOW, 'fp8']]
    monkeypatch.setattr(demo, 'precision_support', lambda device: pd.DataFrame(rows))
    monkeypatch.setattr(demo, 'STEPS', 4)
    set_support(monkeypatch, support)
    made = demo.learner(torch.device('cpu'))
    assert same(params(made), params(demo.learner(torch.device('cpu'))))  # the same each time
    monkeypatch.setattr(demo, 'learner', lambda device: learner(linear(), lr=0.01))
    demo.main(['--device', 'cpu', '--out', str(tmp_path / 'f.png'), '--max-seconds', '10'])
    out = capsys.readouterr().out
    assert out.startswith(f'bf16 is {support("bf16")} on this device (for this test).\nfp16 is {support("fp16")} ')
    assert max(map(len, out.splitlines()[:-1])) <= 120 and ': `learn.to_' in ' '.join(out.split())
    assert [name for name in LOW if re.search(rf'\n{name} +(native|dropped) ', out)] == native  # slow on a busy machine
    assert ('This device runs no 16-bit precision natively' in out) == (not native)
    assert (tmp_path / 'f.png').read_bytes()[:4] == b'\x89PNG'


@pytest.mark.parametrize(
    'args, message',
    [
        (['--out', 'no/such/f.png'], '--out no/such/f.png: it must be a file in a writable folder'),
        (['--out', '.'], '--out .: it must be a file in a writable folder'),
        (['--max-seconds', '0'], '--max-seconds 0: it must be above 0'),
    ],
)
def test_bad_input(args, message, capsys):
    with pytest.raises(SystemExit):
        demo.main(args)
    assert message in capsys.readouterr().err
