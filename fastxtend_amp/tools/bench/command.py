"The console script `fastxtend_amp_bench`."
from __future__ import annotations

import argparse, json, os, shlex, sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...common import first_line
from ...mode import AMPMode
from ..device import usable_device
from .contestants import CONTESTANT_NAMES, check_contestants
from .measuring import MODE_SECONDS
from .models import MODELS
from .plot import plot
from .run import bench, read_figures
from .tables import tables

__all__ = ['main']

A_DAY = 24 * 60 * 60                                             # in seconds


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog='fastxtend_amp_bench', description=(
        "Time training steps in fp32, bf16 and fp16: this package, fastai's own callback, a plain PyTorch loop, and "
        'Lightning Fabric and Accelerate where they are installed. The report goes to standard output, the progress to '
        'standard error.'))
    add = parser.add_argument
    add('--device', metavar='D', help="torch device, such as 'cpu' or 'cuda:0' (default: CUDA if there is one)")
    add('--models', nargs='+', default=list(MODELS), metavar='M',
        help=f"which models (default: all): {', '.join(MODELS)}")
    add('--modes', nargs='+', default=['bf16', 'fp16'], metavar='M',
        help='which modes beside fp32 (default: bf16 fp16)')
    add('--steps', type=int, default=10, metavar='N',
        help='steps in a block, at most; large models get fewer (default %(default)s)')
    add('--repeats', type=int, default=9, metavar='N', help='blocks for each contestant (default %(default)s)')
    add('--seconds', type=float, default=MODE_SECONDS, metavar='S',
        help='for the blocks of all contestants in a mode on a model (default %(default)s)')
    add('--contestants', nargs='+', metavar='C', help=(
        'only these, and their times alone; ratios to fp32 need an fp32 loop among them (default: all): '
        f'{", ".join(map(repr, CONTESTANT_NAMES))}'))
    add('--keep-memory', action='store_true', help='call keep_freed_memory() first, so that page faults cost no time')
    add('--json', type=Path, metavar='FILE', help='write every figure to this file')
    add('--plot', type=Path, metavar='FILE', help='write a chart of the speed beside fp32 to this PNG')
    add('--from-json', type=Path, metavar='FILE', help='measure nothing: report and draw the figures of this file')
    return parser


def _check_run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[list[AMPMode], torch.device]:
    "The modes and the device to run on; ends the process with a message if an argument makes no sense."
    for name in ('steps', 'repeats'):
        if getattr(args, name) < 1: parser.error(f'--{name} {getattr(args, name)}: at least 1 is needed')
    if not 0 < args.seconds <= A_DAY: parser.error(f'--seconds {args.seconds}: more than 0 is needed, at most {A_DAY}')
    if args.contestants: _check_contestants(parser, args)
    for name in args.models:
        if name not in MODELS: parser.error(f"--models {name}: there is no such model; there are {', '.join(MODELS)}")
    try: modes = list(dict.fromkeys(AMPMode(m) for m in args.modes))
    except ValueError: parser.error(f"--modes {' '.join(args.modes)}: only bf16 and fp16 are modes; fp32 always runs")
    return modes, usable_device(parser, args.device, 'cuda' if torch.cuda.is_available() else 'cpu')


def _check_contestants(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    try: check_contestants(args.contestants)
    except ValueError as e: parser.error(f'--{e}')
    drawn = 'fastai loop', 'fastxtend_amp'
    if args.plot and not set(drawn) <= set(args.contestants):
        parser.error("--plot draws 'fastxtend_amp' beside 'fastai loop': name both in --contestants")


def _stored(parser: argparse.ArgumentParser, file: Path) -> dict[str, Any]:
    try: return read_figures(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        parser.error(f'--from-json {file}: these are no figures of this benchmark: {first_line(e)}')


def main(
    argv: Sequence[str] | None = None, # Arguments; the command line's if None
) -> None:
    "Run the benchmark, or report a stored run."
    parser = _parser()
    args = parser.parse_args(argv)
    for name in ('json', 'plot'):
        file = getattr(args, name)
        if file is not None and not file.parent.is_dir():
            parser.error(f'--{name} {file}: there is no folder {file.parent}')
    if args.from_json: figures = _stored(parser, args.from_json)
    else:
        modes, device = _check_run(parser, args)
        models = list(dict.fromkeys(args.models))
        figures = bench(models, modes, device, args.steps, args.repeats, args.keep_memory, args.contestants,
                        args.seconds)
        figures['command'] = _command(sys.argv[1:] if argv is None else argv)
    print(tables(figures), end='')
    if args.json: args.json.write_text(json.dumps(figures, indent=1) + '\n', encoding='utf-8')
    if args.plot: plot(figures, args.plot)


def _command(arguments: Sequence[str]) -> str:
    threads = os.environ.get('OMP_NUM_THREADS')
    return ' '.join([*([f'OMP_NUM_THREADS={threads}'] if threads else []), 'fastxtend_amp_bench',
                     *map(shlex.quote, arguments)])
