"The console script `fastxtend_amp_demo`, as a user runs it."

import os, subprocess, sys
from pathlib import Path

import pandas as pd
import pytest, torch
from matplotlib.figure import Figure

from fastxtend_amp.tools import demo

DEMO = """
from fastxtend_amp.tools import demo
demo.SECONDS, demo.BATCH_SIZE = 1, 8
demo.main(['--device', 'cpu', '--out', 'picture.png'])
"""


def test_a_file_gets_lines_and_no_warning(tmp_path):
    env = {**os.environ, 'PYTHONPATH': str(Path(__file__).parents[2]), 'OMP_NUM_THREADS': '1'}
    done = subprocess.run([sys.executable, '-c', DEMO], cwd=tmp_path, env=env, capture_output=True, text=True)
    out, picture = done.stdout.splitlines(), tmp_path / 'picture.png'
    assert done.returncode == 0 and not done.stderr and '\r' not in done.stdout and 'Warning' not in done.stdout
    assert out[0].startswith('bf16 is ') and max(map(len, out[:-1])) < 120
    assert any(line.startswith('fp32: ') and line.endswith(' samples/s') for line in out)
    assert any(line.startswith('Recommended: ') for line in out)
    assert out[-1] == f'Losses and speeds: {picture.resolve()}' and picture.read_bytes()[:4] == b'\x89PNG'


def test_the_picture_shows_each_step_and_each_speed(monkeypatch, tmp_path):
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, 'savefig', lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    learn = demo.learner(torch.device('cpu'))
    learn.model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(256, 10))
    with learn.no_bar():
        comparison = learn.compare_precision(('bf16',), n_steps=8, n_seeds=0)
    demo.plot(comparison, tmp_path / 'picture')
    assert (tmp_path / 'picture').read_bytes()[:4] == b'\x89PNG'
    curves, speeds = drawn[0].axes
    assert {line.get_label(): len(line.get_xdata()) for line in curves.lines} == {'fp32': 8, 'bf16': 8}
    assert speeds.get_title() == 'Samples per second'
    assert [t.get_text() for t in speeds.texts] == [demo.speed(row) for _, row in comparison.table.iterrows()]
    assert [bar.get_width() for bar in speeds.patches] == pytest.approx(
        [64_000 / ms for ms in comparison.table['ms per step']]
    )


@pytest.mark.parametrize(
    'turns,quartiles,support,said',
    [
        (7, (1.38, 1.4, 1.42), 'native', "640 samples/s, 1.40 (1.38 to 1.42) times fp32's"),
        (7, (0.78, 0.8, 0.82), 'native', "640 samples/s, 0.80 (0.78 to 0.82) times fp32's"),
        (7, (0.9, 1.2, 1.5), 'native', "640 samples/s, 1.20 (0.90 to 1.50) times fp32's: too noisy to tell"),
        (3, (1.4, 1.4, 1.4), 'native', "640 samples/s, 1.40 (1.40 to 1.40) times fp32's: too noisy to tell"),
        (1, (0.1, 0.1, 0.1), 'emulated', "640 samples/s, 0.10 (0.10 to 0.10) times fp32's: emulated here"),
        (0, (1, 1, 1), 'unsupported', 'does not run here'),
    ],
)
def test_speed(turns, quartiles, support, said):
    low, median, high = quartiles
    assert (
        demo.speed(
            pd.Series(
                {
                    'steps': turns,
                    'turns': turns,
                    'support': support,
                    'ms per step': 100.0,
                    'speed-up': median,
                    'speed-up q1': low,
                    'speed-up q3': high,
                },
                name='bf16',
            )
        )
        == said
    )


@pytest.mark.parametrize(
    'args,message',
    [
        (['--device', 'gpu'], '--device gpu'),
        (['--out', 'no/such/f.png'], 'no folder'),
        (['--device', 'meta'], 'no autocast'),
    ],
)
def test_bad_input(args, message, capsys):
    with pytest.raises(SystemExit):
        demo.main(args)
    assert message in capsys.readouterr().err
