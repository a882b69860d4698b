"Lint and types, as pyproject.toml asks for them."
import importlib.util, subprocess, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize('command', [('ruff', 'check'), ('mypy',)], ids=lambda c: c[0])
def test_clean(command):
    "With the tools' caches, which git ignores: a second run takes a second."
    if importlib.util.find_spec(command[0]) is None: pytest.skip(f'needs {command[0]}, of the extra dev')
    out = subprocess.run([sys.executable, '-m', *command], capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 0, out.stdout + out.stderr
