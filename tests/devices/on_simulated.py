"""Runs the tests in accelerator/ and two_accelerators/ on simulated devices, each kind in two processes of their own.

The simulation has to be there before torch looks for devices, so it cannot share a process with the other tests.
With times: `pytest --sim=cuda tests/devices/accelerator --durations=0`, and
`pytest --sim=cuda --sim-devices=2 tests/devices/two_accelerators --durations=0`.
"""
import os, subprocess, sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from devices.simulated import missing_reason

__all__ = ['FILES', 'assert_passed']

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ROOMS = {'accelerator': [], 'two_accelerators': ['--sim-devices=2']}
FILES = [f'{room}/{p.name}' for room in ROOMS for p in sorted((HERE / room).glob('test_*.py'))]


def run(kind, files, folder, *options):
    "Run pytest on these files; by file the names of tests that passed, were skipped, and failed, with their messages."
    report = folder / 'report.xml'
    command = [
        sys.executable,
        '-m',
        'pytest',
        f'--sim={kind}',
        '-q',
        '-p',
        'no:cacheprovider',
        '-p',
        'no:xdist',
        f'--junitxml={report}',
        *options,
    ]
    env = {k: v for k, v in os.environ.items() if not k.startswith('PYTEST_')} | {'OMP_NUM_THREADS': '1'}
    done = subprocess.run([*command, *map(str, files)], cwd=ROOT, env=env, capture_output=True, text=True, timeout=3600)
    if not report.exists(): pytest.fail(f'exit status {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}')
    found = {}
    for case in ElementTree.parse(report).iter('testcase'):
        child = next((c for c in case if c.tag in ('failure', 'error', 'skipped')), None)
        text = '' if child is None else f": {child.get('message')}\n{child.text or ''}"
        name = case.get('classname').rpartition('.')[2] + '.py'
        found.setdefault(name, {}).setdefault('passed' if child is None else child.tag, []).append(
            case.get('name') + text
        )
    return found


@pytest.fixture(scope='module')
def outcomes(tmp_path_factory):
    "A function of kind and room: what `run` gives, from one process for all files of the room."
    known = {}
    def of(kind, room, *more):
        if reason := missing_reason(kind): pytest.skip(reason)
        if (kind, room) not in known:
            files = [HERE / f for f in FILES if f.startswith(f'{room}/')]
            known[kind, room] = run(
                kind, [*files, *(HERE / m for m in more)], tmp_path_factory.mktemp(kind), *ROOMS[room]
            )
        return known[kind, room]
    return of


def assert_passed(found, file):
    "None of the file's tests failed, and there are some."
    of_file = found.get(Path(file).name, {})
    failed = [*of_file.get('failure', ()), *of_file.get('error', ())]
    assert not failed, '\n\n'.join(failed)
    assert of_file.get('passed'), of_file or found
