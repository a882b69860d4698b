"""Runs the tests in accelerator/, and of test_cuda.py what can be, on simulated devices: each kind in a process of its own.

The simulation has to be there before torch looks for devices, so it cannot share a process with the other tests.
"""
import os, subprocess, sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from devices.simulated import missing_reason

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = sorted(p.name for p in (HERE / 'accelerator').glob('test_*.py'))
KINDS = ['cuda', 'sim']


def run(kind, tests, report, *options):
    "Run pytest on these files; the outcomes by file: names of tests that passed, were skipped, failed with their messages."
    command = [sys.executable, '-m', 'pytest', f'--sim={kind}', '-q', '-p', 'no:cacheprovider', '-p', 'no:xdist', f'--junitxml={report}', *options, *map(str, tests)]
    env = {k: v for k, v in os.environ.items() if not k.startswith('PYTEST_')} | {'OMP_NUM_THREADS': '1'}
    process = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    if not report.exists(): pytest.fail(f'no report; exit status {process.returncode}:\n{process.stdout[-3000:]}{process.stderr[-3000:]}')
    found = {}
    for case in ElementTree.parse(report).iter('testcase'):
        outcome = next((child for child in case if child.tag in ('failure', 'error', 'skipped')), None)
        kind = {'failure': 'failed', 'error': 'failed', 'skipped': 'skipped', None: 'passed'}[None if outcome is None else outcome.tag]
        text = '' if outcome is None else f": {outcome.get('message')}\n{outcome.text or ''}"
        name = case.get('classname').rpartition('.')[2] + '.py'
        found.setdefault(name, {}).setdefault(kind, []).append(f"{case.get('name')}{text}")
    return found


@pytest.fixture(scope='module')
def outcomes(tmp_path_factory):
    "A function of the kind of device: its outcomes, from one process for all files."
    known = {}
    def of(kind):
        if reason := missing_reason(kind): pytest.skip(reason)
        if kind not in known: known[kind] = run(kind, [HERE / 'accelerator' / f for f in FILES], tmp_path_factory.mktemp(kind) / 'report.xml')
        return known[kind]
    return of


@pytest.mark.parametrize('file', FILES)
@pytest.mark.parametrize('kind', KINDS)
def test_accelerator(kind, file, outcomes):
    found = outcomes(kind).get(file, {})
    assert not found.get('failed'), '\n\n'.join(found['failed'])
    assert found.get('passed')
