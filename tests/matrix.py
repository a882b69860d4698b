"""Build environments of the versions that settings.ini allows, run the tests in each, and print the matrix as markdown.

    python tests/matrix.py FOLDER [ROW ...]

All rows if none is given. Needs pyenv's or the system's pythonX.Y, and 6 to 8 GB for each environment;
one that already exists in FOLDER is reused. The row 'xla' runs on XLA's CPU device unless PJRT_DEVICE in the
environment says otherwise; torch_xla has wheels only for Linux, each for one version of torch.
"""

import configparser, os, re, shutil, subprocess, sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONFIG = configparser.ConfigParser(delimiters=['='])
CONFIG.read(ROOT / 'settings.ini', encoding='utf-8')
OLDEST = ['torch==2.9.0', 'torchvision==0.24.0', 'fastai==2.8.12', 'fastcore==2.2.22']
NEWEST = ['torch', 'torchvision', 'fastai', 'fastcore']
ROWS = {  # Python, what to install
    'oldest': ('3.10', OLDEST),
    'newest': ('3.11', NEWEST),
    'newest-3.12': ('3.12', NEWEST),
    'newest-3.13': ('3.13', NEWEST),
    'xla': ('3.11', [*OLDEST[:3], 'fastcore', 'torch_xla==2.9.0']),
}


def build(folder: Path, version: str, packages: list[str]) -> Path:
    "Return the Python of an environment with `packages` and this project in it."
    python = folder / 'bin' / 'python'
    if python.exists():
        return python
    found = sorted(Path.home().glob(f'.pyenv/versions/{version}.*/bin/python'))  # pyenv's own command may not run
    base = str(found[-1]) if found else shutil.which(f'python{version}')
    if base is None:
        raise SystemExit(f'There is no Python {version} here: install it, with pyenv for instance.')
    dev, pip = CONFIG['DEFAULT']['dev_requirements'].split(), [python, '-m', 'pip', 'install', '-q']
    for command in [base, '-m', 'venv', folder], [*pip, *packages, *dev], [*pip, '--no-deps', '-e', ROOT]:
        subprocess.run(command, check=True)
    return python


def output(*command: object, **variables: str) -> str:
    env = {**variables, **os.environ, 'PYTHONDONTWRITEBYTECODE': '1'}
    return subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, env=env).stdout


VERSIONS = (
    "import platform; from importlib.metadata import version as v; "
    "print(platform.python_version(), v('torch').split('+')[0], v('fastai'), v('fastcore'), sep=' | ')"
)


def main(folder: str, *names: str) -> None:
    print('| environment | Python | torch | fastai | fastcore | tests |\n|---|---|---|---|---|---|')
    options = '-m pytest -n 2 --dist loadfile -W ignore --tb=short -p no:cacheprovider -o addopts='.split()
    for name in names or ROWS:
        python = build(Path(folder).resolve() / name, *ROWS[name])
        out = output(python, *options, **({'PJRT_DEVICE': 'CPU'} if name == 'xla' else {}))
        told = re.findall(r'^=* ?(.*(?:passed|failed|error).*)', out, re.M) or ['did not finish']
        if re.search('failed|error|finish', told[-1]):
            print(out[-5000:], file=sys.stderr)
        print(f"| {name} | {output(python, '-c', VERSIONS).strip()} | {told[-1]} |", flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
