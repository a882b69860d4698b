"""Build environments of the versions that settings.ini allows, run the tests in each, and print the matrix as markdown.

    python tests/matrix.py FOLDER [ROW ...] [--tests FILE ...]

All rows if none is given, and all tests. Needs pyenv's or the system's pythonX.Y, and 6 to 8 GB for each environment;
one that already exists in FOLDER is reused. The row 'xla' runs on XLA's CPU device unless PJRT_DEVICE in the
environment says otherwise; torch_xla has wheels only for Linux, each for one version of torch.
"""

import argparse, configparser, os, re, shutil, subprocess, sys, time
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONFIG = configparser.ConfigParser(delimiters=['='])
CONFIG.read(ROOT / 'settings.ini', encoding='utf-8')
DEV = CONFIG['DEFAULT']['dev_requirements'].split()
OLDEST, NEWEST = (
    ['torch==2.9.0', 'torchvision==0.24.0', 'fastai==2.8.12', 'fastcore==2.2.22'],
    ['torch', 'torchvision', 'fastai', 'fastcore'],
)
ROWS: dict[str, tuple[str, list[str], dict[str, str]]] = {  # name: Python, what to install, environment variables
    'oldest': ('3.10', OLDEST, {}),
    'newest': ('3.11', NEWEST, {}),
    'newest-3.12': ('3.12', NEWEST, {}),
    'newest-3.13': ('3.13', NEWEST, {}),
    'xla': ('3.11', [*OLDEST[:3], 'fastcore', 'torch_xla==2.9.0'], {'PJRT_DEVICE': 'CPU'}),
}


def interpreter(version: str) -> str | None:
    "The path of this Python, from the system or from pyenv."
    found = sorted(
        Path.home().glob(f'.pyenv/versions/{version}.*/bin/python')
    )  # pyenv's own command of that name may not run
    return str(found[-1]) if found else shutil.which(f'python{version}')


def build(folder: Path, version: str, packages: list[str]) -> Path:
    "The Python of an environment with `packages` and this project in it."
    python = folder / 'bin' / 'python'
    if not python.exists():
        base = interpreter(version)
        if base is None:
            raise SystemExit(f'There is no Python {version} here: install it, with pyenv for instance.')
        subprocess.run([base, '-m', 'venv', folder], check=True)
        subprocess.run([python, '-m', 'pip', 'install', '-q', *packages, *DEV], check=True)
        subprocess.run([python, '-m', 'pip', 'install', '-q', '--no-deps', '-e', ROOT], check=True)
    return python


def versions(python: Path) -> list[str]:
    code = (
        "import platform; from importlib.metadata import version as v; "
        "print(platform.python_version(), v('torch').split('+')[0], v('fastai'), v('fastcore'), sep='|')"
    )
    return subprocess.run([python, '-c', code], capture_output=True, text=True, check=True).stdout.strip().split('|')


def run(python: Path, variables: dict[str, str], tests: list[str]) -> tuple[str, float]:
    "Return the last line of pytest's output, and the minutes that it needed."
    start = time.time()
    args = ['-n', '2', '--dist', 'loadfile', '-W', 'ignore', '--tb=short', '-p', 'no:cacheprovider', '-o', 'addopts=']
    out = subprocess.run(
        [python, '-m', 'pytest', *args, *tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**variables, **os.environ, 'PYTHONDONTWRITEBYTECODE': '1'},
    ).stdout
    found = re.findall(r'^=* ?(.*(?:passed|failed|error).*) in [\d.]+s', out, re.M)
    if not found or re.search('failed|error', found[-1]):
        print(out[-5000:], file=sys.stderr)
    return (found[-1] if found else 'did not finish'), (time.time() - start) / 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path)
    parser.add_argument('rows', nargs='*', choices=[*ROWS, []], default=[])
    parser.add_argument('--tests', nargs='+', default=[])
    args = parser.parse_args()
    print('| environment | Python | torch | fastai | fastcore | tests | minutes |\n|---|---|---|---|---|---|---|')
    for name in args.rows or ROWS:
        version, packages, variables = ROWS[name]
        python = build(args.folder.resolve() / name, version, packages)
        told, minutes = run(python, variables, args.tests)
        print('|', ' | '.join([name, *versions(python), told, f'{minutes:.1f}']), '|', flush=True)


if __name__ == '__main__':
    main()
