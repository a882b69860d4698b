"The console script `fastxtend_amp_demo`, as a user runs it; test_check.py tests its argument `--device`."

import pandas as pd
import pytest, torch
from fastai.learner import Learner

from fastxtend_amp.tools import demo
from helpers import learner, linear, params, python, same, set_support

DEMO = """
from fastxtend_amp.tools import demo
demo.SECONDS, demo.BATCH_SIZE = 1, 8
demo.main(['--device', 'cpu', '--out', 'picture.png'])
"""


@pytest.mark.slow
def test_a_file_gets_lines_and_no_warning(tmp_path):
    done = python('-W', 'default', '-c', DEMO, cwd=tmp_path)
    out, picture = done.stdout.splitlines(), tmp_path / 'picture.png'
    assert done.returncode == 0 and not done.stderr and '\r' not in done.stdout and 'Warning' not in done.stdout
    assert out[0].startswith('bf16 is ') and max(map(len, out[:-1])) <= 120
    assert out[-1] == f'Picture: {picture.resolve()}' and picture.read_bytes()[:4] == b'\x89PNG'


@pytest.mark.parametrize(
    'bf16, fp16, args, expected',  # the comparisons: their precisions, seeds and seconds
    [
        ('native', 'emulated', [], [(['bf16'], 3, 10)]),
        ('native', 'native', [], [(['bf16', 'fp16'], 3, 10)]),
        ('native', 'emulated', ['--emulated'], [(['bf16'], 3, 8), (['fp16'], 0, 2)]),
        ('emulated', 'emulated', ['--emulated'], [(['bf16'], 0, 1), (['fp16'], 0, 1)]),
        ('emulated', 'unsupported', [], []),
    ],
)
def test_emulated_precisions_train_if_asked_for_and_in_a_fifth_of_the_time(
    bf16, fp16, args, expected, monkeypatch, tmp_path, capsys
):
    support, given, compare = {'bf16': bf16, 'fp16': fp16, 'fp8': 'native'}, [], Learner.compare_precision
    rows = [{'precision': name, 'support': status, 'why': 'for this test'} for name, status in support.items()]

    def noted(self, modes, n_steps, n_seeds, max_seconds):
        given.append((modes, n_seeds, max_seconds))
        return compare(self, modes, 4, n_seeds=n_seeds, max_seconds=max_seconds)

    monkeypatch.setattr(demo, 'precision_support', lambda device: pd.DataFrame(rows))
    set_support(monkeypatch, lambda name: support.get(name, 'unsupported'))
    monkeypatch.setattr(demo, 'learner', lambda device: learner(linear(), lr=0.01))
    monkeypatch.setattr(Learner, 'compare_precision', noted)
    demo.main(['--device', 'cpu', '--out', str(tmp_path / 'f.png'), '--max-seconds', '10', *args])
    out = capsys.readouterr().out
    assert given == expected and max(map(len, out.splitlines()[:-1])) <= 120
    assert out.startswith(f'bf16 is {bf16} on this device (for this test).\nfp16 is {fp16} ')
    for name in ('bf16', 'fp16'):
        assert (f'\n{name}  {support[name]} ' in out) == any(name in names for names, *_ in given)
    assert not expected or 'Next: `learn.to_' in ' '.join(out.split())
    assert ('This device runs no 16-bit precision natively' in out) == (not expected)
    assert (tmp_path / 'f.png').read_bytes()[:4] == b'\x89PNG'


def test_the_model_is_the_same_each_time():
    a, b = (demo.learner(torch.device('cpu')) for _ in range(2))
    assert same(params(a), params(b))


@pytest.mark.parametrize(
    'args, message',
    [
        (['--out', 'no/such/f.png'], 'no/such is not a folder, or not writable'),
        (['--max-seconds', '0'], '--max-seconds 0: it must be above 0'),
    ],
)
def test_bad_input(args, message, capsys):
    with pytest.raises(SystemExit):
        demo.main(args)
    assert message in capsys.readouterr().err
