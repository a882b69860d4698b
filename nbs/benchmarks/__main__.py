"The command `python -m nbs.benchmarks`."
from __future__ import annotations

import argparse, json, os, shlex, sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fastxtend_amp import precision_support

from .contestants import CONTESTANTS, installed
from .measure import bench
from .models import MODELS
from .show import plot, tables


def main(
    argv: Sequence[str] | None = None, # Arguments; the command line's if None
) -> None:
    "Run the benchmark, or show a stored run."
    names = {c.name: installed(c) for c in CONTESTANTS}
    parser = argparse.ArgumentParser(prog='python -m nbs.benchmarks', description=(
        'Time training steps in fp32, bf16 and fp16, in one process and in turns. The report goes to standard output.'))
    add = parser.add_argument
    add('--device', default='cuda' if torch.cuda.is_available() else 'cpu', help='torch device (default %(default)s)')
    add('--models', nargs='+', default=list(MODELS), choices=MODELS, metavar='M', help=f"of {', '.join(MODELS)}")
    add('--modes', nargs='+', choices=('bf16', 'fp16'), metavar='M', help='bf16, fp16 (default: those that the '
        'device does natively); an emulated step can take minutes')
    add('--contestants', nargs='+', choices=names, metavar='C', help=(
        f"of {', '.join(map(repr, names))} (default: all but the last three); 'fastai loop' gives fp32's times"))
    add('--steps', type=int, default=10, metavar='N', help='steps in a block, at most (default %(default)s)')
    add('--repeats', type=int, default=15, metavar='N', help='blocks of each contestant, at most (default %(default)s)')
    add('--seconds', type=float, default=40, metavar='S', help='for the blocks of a model (default %(default)s)')
    add('--keep-memory', action='store_true', help='call keep_freed_memory() first, so that page faults cost no time')
    add('--out', type=Path, metavar='STEM', help='write STEM.json, STEM.md and STEM.png')
    add('--show', type=Path, metavar='STEM', help='measure nothing: write STEM.md and STEM.png anew from STEM.json')
    args = parser.parse_args(argv)
    for name in ('steps', 'repeats', 'seconds'):
        if not getattr(args, name) > 0: parser.error(f'--{name} {getattr(args, name)}: more than 0 is needed')
    if args.out and not args.out.parent.is_dir(): parser.error(f'--out {args.out}: no folder {args.out.parent}')
    for name in args.contestants or []:
        if not names[name]: parser.error(f'--contestants: {name!r} needs a package that is not installed')
    stem = args.show or args.out
    if args.show: figures = json.loads(stem.with_suffix('.json').read_text(encoding='utf-8'))
    else:
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        modes, device = args.modes or _native(parser, args.device), torch.device(args.device)
        figures = bench(args.models, modes, device, args.contestants, args.keep_memory,
                        steps=args.steps, repeats=args.repeats, seconds=args.seconds)
        threads = os.environ.get('OMP_NUM_THREADS')
        command = [*([f'OMP_NUM_THREADS={threads}'] if threads else []), 'python -m nbs.benchmarks']
        figures['command'] = ' '.join(command + [shlex.quote(a) for a in argv or sys.argv[1:]])
    print(tables(figures), end='')
    if not stem: return
    if args.out: stem.with_suffix('.json').write_text(json.dumps(figures, indent=1) + '\n', encoding='utf-8')
    stem.with_suffix('.md').write_text(tables(figures), encoding='utf-8')
    plot(figures, stem.with_suffix('.png'))


def _native(parser: argparse.ArgumentParser, device: str) -> list[str]:
    native = [r.mode for r in precision_support(device).itertuples() if r.support == 'native']
    if not native: parser.error(f'{device} does neither bf16 nor fp16 natively; --modes bf16 times its emulation')
    return native


if __name__ == '__main__': main()
