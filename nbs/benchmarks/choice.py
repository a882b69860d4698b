"""The measured choice, tried: `python -m nbs.benchmarks.choice` beside a stored benchmark, `--simulate` by simulation.

The simulation calls the package's own rules, with ratios and losses that are drawn: a turn's ratio is the true speed-up
times noise on both sides; a mode's loss is that of fp32's trainings, worse by some of their standard deviations.
"""
from __future__ import annotations

import argparse, io, json, warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from torch import nn

from fastxtend_amp import fused
from fastxtend_amp.insight.comparison import Tolerance, pays, speed_up
from fastxtend_amp.tools.device import usable_device

from .models import MODELS

STORED = Path(__file__).parent / 'native_bf16.json'


def turns_until_decided(
    rng: np.random.Generator,
    true: float, # Speed-up
    noise: float, # Standard deviation of the logarithm of a turn's time
    most: int, # Turns
) -> tuple[bool | None, int]: # What was decided, and after how many turns
    ratios, decided = [], None
    while decided is None and len(ratios) < most:
        ratios.append(true * np.exp(noise * (rng.standard_normal() - rng.standard_normal())))
        decided = pays(*speed_up(ratios)[1:])
    return decided, len(ratios)


def simulate(trials: int = 400, most: int = 60) -> str:
    "Return tables in Markdown: how often speeds and losses are judged rightly."
    rng = np.random.default_rng(0)
    lines = [f'Of {trials} trials with at most {most} turns:', '',
             '| noise of a turn | true speed-up | pays | does not | undecided | turns, mean |',
             '|--:|--:|--:|--:|--:|--:|']
    for noise in (.1, .2, .3):
        for true in (.9, 1., 1.15, 1.5, 2.):
            found = [turns_until_decided(rng, true, noise, most) for _ in range(trials)]
            share = Counter(decided for decided, _ in found)
            said = ' | '.join(f'{100 * share[what] / trials:.0f} %' for what in (True, False, None))
            lines.append(f'| {100 * noise:.0f} % | {true} | {said} | {np.mean([n for _, n in found]):.1f} |')
    lines += ['', f'Of {10 * trials} trials, the loss of fp32 trainings 1 with a standard deviation of 0.05:', '',
              '| seeds | standard deviations worse | taken |', '|--:|--:|--:|']
    for n_seeds in (1, 3):
        for worse in (0, 5, 10):
            taken = 0
            for _ in range(10 * trials):
                first, other, *seeds = 1 + .05 * rng.standard_normal(2 + n_seeds)
                tolerance = Tolerance([2., first], seeds, 1)
                taken += other + .05 * worse - first <= tolerance.value
            lines.append(f'| {n_seeds} | {worse} | {10 * taken / trials:.0f} % |')
    return '\n'.join(lines)


def choose(name: str, device: torch.device, max_seconds: float) -> str:
    "Return the row of one model: what was chosen, how sure, and in what time."
    model = MODELS[name](device.type != 'cpu')
    batches = [model.batch(device) for _ in range(8)]
    def loss(p, y): return nn.functional.cross_entropy(p.flatten(0, -2), y.flatten())
    dls = DataLoaders(batches, batches, device=device)
    learn = Learner(dls, model.build(device), loss, opt_func=fused('AdamW'))
    with learn.no_bar(), redirect_stdout(io.StringIO()): learn.to_amp(measure=True, max_seconds=max_seconds)
    decision = learn.precision_decision
    rows = [f'{m}: {r["speed-up"]:.2f} ({r["speed-up low"]:.2f} to {r["speed-up high"]:.2f}), {r["turns"]} turns'
            for m, r in decision.table.drop('fp32').iterrows()]
    return f"{decision.recommended} | {'; '.join(rows)}"


def main(argv: Sequence[str] | None = None) -> None:
    "Print a table."
    parser = argparse.ArgumentParser(prog='python -m nbs.benchmarks.choice', description=(
        'Have `to_amp(measure=True)` choose a precision for the models of the benchmark, several times each.'))
    add = parser.add_argument
    add('--simulate', action='store_true', help='no model: how often the rules decide rightly, by simulation')
    add('--device', metavar='D', help='torch device (default: the accelerator, if there is one)')
    add('--models', nargs='+', default=list(MODELS), choices=MODELS, metavar='M', help=f"of {', '.join(MODELS)}")
    add('--times', type=int, default=3, metavar='N', help='choices for each model (default %(default)s)')
    add('--max-seconds', type=float, default=60., metavar='S', help='for each choice (default %(default)s)')
    add('--stored', type=Path, default=STORED, metavar='JSON', help='a benchmark to show beside (default %(default)s)')
    args = parser.parse_args(argv)
    if args.simulate: return print(simulate())
    device = usable_device(parser, args.device)
    stored = {(r['model'], r['mode']): r['vs_fp32'] for r in json.loads(args.stored.read_text(encoding='utf-8'))['rows']
              if r['contestant'] == 'fastxtend_amp' and r['optimizer'] == 'fused AdamW'}
    warnings.simplefilter('ignore')
    print('| model | benchmark, bf16 | chosen | speed-up |\n|---|--:|---|---|', flush=True)
    for name in args.models:
        beside = stored.get((name, 'bf16'))
        for _ in range(args.times):
            print(f"| {name} | {beside[1] if beside else '-'} | {choose(name, device, args.max_seconds)} |", flush=True)


if __name__ == '__main__': main()
