"The command `python -m nbs.benchmarks`."
from __future__ import annotations

import argparse, json, os, shlex, sys
from collections.abc import Sequence
from pathlib import Path

from fastxtend_amp import precision_support
from fastxtend_amp.devices import facts
from fastxtend_amp.devices.fp32_settings import FULL_PRECISION, fp32_settings
from fastxtend_amp.tools.arguments import usable_device

from .contestants import ADAM, CONTESTANTS, FUSED
from .measure import bench
from .models import MODELS
from .show import by_model, finding, plot, tables


def main(
    argv: Sequence[str] | None = None, # Arguments; the command line's if None
) -> None:
    "Run the benchmark, or show a stored run."
    parser = argparse.ArgumentParser(prog='python -m nbs.benchmarks', description=(
        'Time training steps in fp32, bf16 and fp16, in one process and in alternating rounds, and print a report.'))
    add = parser.add_argument
    add('--device', metavar='D', help='torch device (default: the accelerator, if there is one)')
    add('--models', nargs='+', default=list(MODELS), choices=MODELS, metavar='M', help=f"of {', '.join(MODELS)}")
    add('--modes', nargs='+', choices=('bf16', 'fp16'), metavar='M', help='bf16, fp16 (default: those that the '
        'device does natively); an emulated step can take minutes')
    names = [c.name for c in CONTESTANTS]
    add('--contestants', nargs='+', default=names, choices=names, metavar='C', help=f"of {', '.join(names)}")
    add('--optimizers', nargs='+', default=[ADAM, FUSED], choices=(ADAM, FUSED), metavar='O',
        help=f"of {ADAM} (fastai's), {FUSED} (torch's)")
    add('--avx2', action='store_true', help='use no newer instructions than AVX2, as a CPU that emulates bf16')
    add('--rounds', type=int, default=15, metavar='N', help='blocks of each contestant (default %(default)s)')
    files = parser.add_mutually_exclusive_group().add_argument
    files('--out', type=Path, metavar='STEM', help='write STEM.json, STEM.md and STEM.png')
    files('--show', type=Path, metavar='STEM', help='measure nothing: write STEM.md and STEM.png again from STEM.json')
    args = parser.parse_args(argv)
    if args.rounds < 1: parser.error(f'--rounds {args.rounds}: at least 1 is needed')
    if args.out and not os.access(args.out.parent, os.W_OK):
        parser.error(f'--out {args.out}: there is no folder {args.out.parent} that can be written to')
    if args.avx2:               # before PyTorch's first operator
        os.environ.update(ATEN_CPU_CAPABILITY='avx2', ONEDNN_MAX_CPU_ISA='AVX2')
        facts.cpu_features = lambda: frozenset({'avx2'})
    stem = args.show or args.out
    if args.show: figures = json.loads(Path(f'{stem}.json').read_text(encoding='utf-8'))
    else:
        device = usable_device(parser, args.device)
        native = [r.precision for r in precision_support(device).itertuples() if r.support == 'native']
        if not (modes := args.modes or native):
            parser.error(f'{device} does neither bf16 nor fp16 natively; --modes bf16 times its emulation')
        taking_part = [c for c in CONTESTANTS if c.name in args.contestants]
        with fp32_settings(FULL_PRECISION):
            figures = bench(args.models, modes, device, args.rounds, taking_part, args.optimizers)
        figures['command'] = shlex.join(['python', '-m', 'nbs.benchmarks', *(argv or sys.argv[1:])])
    print(tables(figures), end='')
    if not stem: return
    if args.out: Path(f'{stem}.json').write_text(json.dumps(figures, indent=1) + '\n', encoding='utf-8')
    Path(f'{stem}.md').write_text(tables(figures), encoding='utf-8')
    rows = {f'{mode} ({support})': by_model(figures, mode) for mode, (support, _) in figures['support'].items()}
    plot({finding(title, found): found for title, found in rows.items()}, Path(f'{stem}.png'))


if __name__ == '__main__': main()
