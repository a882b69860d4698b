"""Change one line of the package, and see whether a test fails: `python tests/mutations.py [WORD...] [--minutes N]`.

A block of tests/mutations.txt names a file of the package, what a user would meet, and the tests that cover it. Then
follow a line that the file has once, and a wrong one in its place. The command copies the checkout, applies one block,
runs its tests until one fails, and prints a table. A mutation that survives means that a test is missing, or that the
line is useless. First all of these tests run without a change: they must pass.

With --minutes it tries the blocks of files that changed since the last tag, on this branch or in the last commit, or
all if git does not know, until the time is over, in an order that is always the same. The tests must have passed.
"""

import math, os, re, shutil, subprocess, sys, tempfile, time
from argparse import ArgumentParser
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    why: str  # what a user would meet
    file: str  # in the package
    line: str  # text that the file has once
    change: str
    tests: str  # the files that cover it, the likeliest first


FILES = [*(ROOT / 'tests').rglob('test_*.py')]


def read(block: str) -> Mutation:
    head, *lines = block.splitlines()
    file, why, tests = re.fullmatch(r'(\S+): (.+) \[(.+)\]', head).groups()
    old, new = ('\n'.join(line[2:] for line in lines if line[0] == mark) for mark in '-+')
    return Mutation(why, file, old, new, tests)


MUTATIONS = [read(block) for block in (ROOT / 'tests' / 'mutations.txt').read_text(encoding='utf-8').split('\n\n')]


def files_of(row: Mutation) -> list[str]:
    paths = {file.stem.removeprefix('test_'): file for file in FILES}
    return [str(paths[name].relative_to(ROOT)) for name in row.tests.split()]


def killer(tests: list[str], row: Mutation | None = None) -> str:
    "Return the first test that fails in a copy of the checkout; '' if all pass."
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / 'copy'
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns('.git', '__pycache__', '*.ipynb', '*.png'))
        if row:
            file = root / 'fastxtend_amp' / row.file
            text = file.read_text(encoding='utf-8')
            if text.count(row.line) != 1:
                raise SystemExit(f'{row.line!r} occurs {text.count(row.line)} times in {row.file}')
            file.write_text(text.replace(row.line, row.change), encoding='utf-8')
        env = {**os.environ, 'PYTHONPATH': str(root), 'OMP_NUM_THREADS': '1', 'PYTHONDONTWRITEBYTECODE': '1'}
        options = ['-x', '-q', '--tb=no', '-W', 'ignore', '-p', 'no:cacheprovider']
        command = [sys.executable, '-m', 'pytest', *options, *tests]
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=3600)
    failed = [line for line in done.stdout.splitlines() if line.startswith(('FAILED', 'ERROR'))]
    return '' if done.returncode == 0 else (failed or ['does not run'])[0].partition('::')[2] or 'does not run'


def changed() -> set[str]:
    "Return the files of the package that changed since the last tag, or on this branch, or in the last commit."

    def git(*args: str) -> list[str]:
        return subprocess.run(['git', *args], cwd=ROOT / 'fastxtend_amp', capture_output=True, text=True).stdout.split()

    tags = git('describe', '--tags', '--abbrev=0')
    forks = [base for main in ('origin/HEAD', 'main') for base in git('merge-base', 'HEAD', main)]
    found = (git('diff', '--relative', '--name-only', base) for base in (*tags, *forks, 'HEAD~1'))
    return {*next(filter(None, found), (row.file for row in MUTATIONS))}


def main(words: list[str], minutes: float | None) -> None:
    rows = [row for row in MUTATIONS if not words or any(word in row.why + row.file for word in words)]
    if minutes:
        files = changed()
        rows = sorted((row for row in rows if row.file in files), key=lambda row: crc32(row.why.encode()))
    elif broken := killer(sorted({test for row in rows for test in files_of(row)})):
        sys.exit(f'without a change this fails: {broken}')
    survived, n, until = 0, 0, time.monotonic() + 60 * (minutes or math.inf)
    for n, row in enumerate(rows, 1):
        start, found = time.time(), killer(files_of(row), row)
        survived += not found
        told = f'killed by {found[:60]}' if found else 'SURVIVED'
        print(f'{row.file:26} {row.why[:60]:60} {time.time() - start:4.0f} s  {told}', flush=True)
        if time.monotonic() > until:
            break
    print(f'{n - survived} of {n} killed; {len(rows) - n} were not tried')
    sys.exit(bool(survived))


if __name__ == '__main__':
    parser = ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('words', nargs='*')
    parser.add_argument('--minutes', type=float)
    main(**vars(parser.parse_args()))
