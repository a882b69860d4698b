"The tests of test_accelerator.py on a simulated device, which must exist before torch looks for one."

import os, re, subprocess, sys
from pathlib import Path

import pytest

from devices.simulated import missing_reason

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(missing_reason() is not None, reason=missing_reason() or '')
def test_accelerator():
    options = ['--sim=sim', '-p', 'no:cacheprovider', '-p', 'no:xdist', '--tb=short', '-W', 'ignore']
    env = {k: v for k, v in os.environ.items() if not k.startswith('PYTEST_')} | {'OMP_NUM_THREADS': '1'}
    command = [sys.executable, '-m', 'pytest', *options, 'tests/devices/test_accelerator.py']
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and not re.search(r'\d skipped', done.stdout), done.stdout[-5000:] + done.stderr[-2000:]
