"A precision added by one file, bf16_again.py, appears everywhere: the tests are in seen_everywhere.py."

import os, re, subprocess, sys
from pathlib import Path

HERE = Path(__file__).parent


def test_a_precision_in_one_file_is_seen_everywhere():
    options = ['-p', 'no:cacheprovider', '-p', 'no:xdist', '--tb=short', '-W', 'ignore', '-o', 'python_files=seen_*.py']
    env = {k: v for k, v in os.environ.items() if not k.startswith('PYTEST_')} | {'OMP_NUM_THREADS': '1'}
    command = [sys.executable, '-m', 'pytest', *options, str(HERE / 'seen_everywhere.py')]
    done = subprocess.run(command, cwd=HERE.parents[1], env=env, capture_output=True, text=True)
    assert done.returncode == 0 and re.search(r'\d passed', done.stdout), done.stdout[-8000:] + done.stderr[-2000:]
    assert not re.search(r'\d skipped', done.stdout)
