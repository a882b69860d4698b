"""Predictions in bf16 over fp32: `python -m nbs.benchmarks.predictions`, by model and batch size.

Each loop is compared with itself in fp32: fastai's `get_preds` with fastxtend_amp, a PyTorch loop under autocast, and
one with Accelerate. They alternate, one block each per round; a ratio is to the fp32 block of the same round.
"""
from __future__ import annotations

import argparse, os, shlex, sys, time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fastcore.basics import noop

from fastxtend_amp.devices.fp32_settings import FULL_PRECISION, fp32_settings
from fastxtend_amp.tools.arguments import usable_device

from .contestants import Task, learner
from .measure import machine, quartiles
from .models import MODELS, Model
from .show import marked

BATCHES, BLOCK_SECONDS = 8, .2             # of one call; of a block, at least: fast models are called several times
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def _fastai(task: Task, mode: str) -> Callable[[], Any]:
    learn = learner(task, 'Adam')
    if mode == 'bf16': learn.to_bf16()
    return partial(learn.get_preds, dl=task.batches, act=noop, reorder=False)


def _loop(model: torch.nn.Module, task: Task, mode: str) -> list[torch.Tensor]:
    model.eval()
    found = []
    with torch.no_grad():
        for xb, _ in task.batches:
            with torch.autocast(task.device.type, torch.bfloat16, enabled=mode == 'bf16'): pred = model(xb)
            found.append(pred.float().cpu())
    return found


def _plain(task: Task, mode: str) -> Callable[[], Any]: return partial(_loop, task.model(), task, mode)


def _accelerate(task: Task, mode: str) -> Callable[[], Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    AcceleratorState._reset_state(True)    # it allows one precision in a process
    accelerator = Accelerator(cpu=task.device.type == 'cpu', mixed_precision='no' if mode == 'fp32' else mode)
    return partial(_loop, accelerator.prepare_model(task.model(), evaluation_mode=True), task, 'as prepared')


LOOPS = {'fastxtend_amp': _fastai, 'PyTorch loop': _plain, 'Accelerate': _accelerate}


def batches_of(model: Model, n: int, device: torch.device) -> Batches:
    "Return batches of `n` samples, drawn as the benchmark of training draws its own."
    torch.manual_seed(0)
    def batch():
        parts = [model.batch(device)]
        while sum(len(x) for x, _ in parts) < n: parts.append(model.batch(device))
        return tuple(torch.cat(tensors)[:n] for tensors in zip(*parts))
    return [batch() for _ in range(BATCHES)]


def _seconds(call: Callable[[], Any], n: int = 1) -> float:
    start = time.perf_counter()
    for _ in range(n): call()
    return (time.perf_counter() - start) / n


def measure(
    model: Model,
    n: int, # Samples in a batch
    device: torch.device,
    rounds: int,
    loops: Sequence[str] = tuple(LOOPS),
) -> tuple[float, dict[str, list[float]]]: # Milliseconds of a batch in fp32 in the first loop; quartiles of ratios
    "Time each loop in fp32 and bf16, in turns."
    task = Task(partial(model.build, device), batches_of(model, n, device), device)
    calls = {(name, mode): LOOPS[name](task, mode) for name in loops for mode in ('fp32', 'bf16')}
    for call in calls.values(): call()
    repeats = {key: max(1, round(BLOCK_SECONDS / _seconds(call))) for key, call in calls.items()}
    order, found = list(calls), {key: list[float]() for key in calls}
    for k in range(rounds):
        first = k % len(order)
        for key in order[first:] + order[:first]: found[key].append(_seconds(calls[key], repeats[key]))
    ratios = {name: quartiles(a / b for a, b in zip(found[name, 'fp32'], found[name, 'bf16'])) for name in loops}
    return quartiles(1000 * s / BATCHES for s in found[order[0]])[1], ratios   # type: ignore[index, return-value]


def main(argv: Sequence[str] | None = None) -> None:
    "Print a table in Markdown, a row as soon as it is measured."
    parser = argparse.ArgumentParser(prog='python -m nbs.benchmarks.predictions', description=(
        f'Time predictions on {BATCHES} batches in bf16 over fp32, as the median over alternating blocks.'))
    add = parser.add_argument
    add('--device', metavar='D', help='torch device (default: the accelerator, if there is one)')
    add('--models', nargs='+', default=list(MODELS), choices=MODELS, metavar='M', help=f"of {', '.join(MODELS)}")
    add('--sizes', nargs='+', type=int, default=[1, 8, 64], metavar='N', help='batch sizes (default 1 8 64)')
    add('--loops', nargs='+', default=list(LOOPS), choices=LOOPS, metavar='L', help=f"of {', '.join(LOOPS)}")
    add('--rounds', type=int, default=15, metavar='N', help='blocks of each loop (default %(default)s)')
    add('--out', type=Path, metavar='FILE', help='also write the table to this file')
    args = parser.parse_args(argv)
    if args.rounds < 1 or min(args.sizes) < 1: parser.error('--rounds and --sizes: at least 1 is needed')
    if args.out and not os.access(args.out.parent, os.W_OK):
        parser.error(f'--out {args.out}: there is no folder {args.out.parent} that can be written to')
    device, lines = usable_device(parser, args.device), list[str]()

    def say(line: str = '') -> None:
        lines.append(line)
        print(line, flush=True)
        if args.out: args.out.write_text('\n'.join(lines) + '\n', encoding='utf-8')

    m = machine(device)
    say(f"# Predictions on {m['device']}: bf16 over fp32 in the same loop")
    say()
    say(f"- Command: `{shlex.join(['python', '-m', 'nbs.benchmarks.predictions', *(argv or sys.argv[1:])])}`")
    say(f"- Machine: {m['cpu']}, {m['cores']} cores ({m['capability']}), {m['threads']} threads, load average "
        f"{m['load_average']}; {m.get('gpu', m['system'])}")
    say(f"- Versions: torch {m['torch']}, fastai {m['fastai']}, accelerate {m['accelerate']}")
    say(f'- {args.rounds} blocks in turns; median and quartiles; ~: the 95% interval is wider than 5% either way')
    say()
    say(f"| model | batch | fp32, ms a batch | {' | '.join(args.loops)} |")
    say(f"|---|--:|--:|{'--:|' * len(args.loops)}")
    with fp32_settings(FULL_PRECISION):
        for name in args.models:
            model = MODELS[name](device.type != 'cpu')
            for n in args.sizes:
                ms, ratios = measure(model, n, device, args.rounds, args.loops)
                cells = [f'{marked(q, args.rounds)} ({q[0]:.2f}-{q[2]:.2f})' for q in ratios.values()]
                say(f"| {name} | {n} | {ms:,.2f} | {' | '.join(cells)} |")


if __name__ == '__main__': main()
