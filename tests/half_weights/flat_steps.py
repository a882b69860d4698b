"""How long the optimizer's step takes with flat masters, beside masters per tensor. The table of nbs/flat_masters.md:

    OMP_NUM_THREADS=2 python tests/half_weights/flat_steps.py > nbs/flat_masters.md

The benchmark's models train in bf16 with fastai's Adam and memory as it comes; it needs a CPU with native bf16.
"""
from __future__ import annotations

import argparse, contextlib, sys, time, warnings

import numpy as np
import torch
from fastai.callback.core import Callback

from fastxtend_amp.mode import AMPMode
from fastxtend_amp.tools.bench.measuring import ModelBenchmark
from fastxtend_amp.tools.bench.models import MODELS
from fastxtend_amp.tools.bench.run import machine

TEXT = """# Flat masters: the time of the optimizer's step

`to_half_weights(flat_master=True)` changes what the optimizer steps on, and nothing else in a batch. Here is its step
alone, in milliseconds, with fastai's Adam, bf16 and glibc's memory as it comes. Where a model's weights are large,
they stay by themselves, and the step is the same; where they are many and small, it is faster.

- Machine: {cpu}, {cores} cores ({sets}), {threads} threads, load average {load}
- Versions: python {python}, torch {torch}, fastai {fastai}, fastxtend_amp {fastxtend_amp}
- Each round has a fit of {steps} steps per tensor and one flat, in one process, by turns; a fit counts with its median
  step without the first. times: per tensor divided by flat, the median over the rounds, and quartiles.

| model | parameters | stepped on, flat | per tensor, ms | flat, ms | times | rounds |
|---|--:|--:|--:|--:|--:|--:|"""

END = """
Command: `OMP_NUM_THREADS=2 python tests/half_weights/flat_steps.py --seconds {seconds:.0f}`. On wide and tiny networks nothing is
joined, which takes four parameters: the same work both ways, so what those rows differ by is the machine's noise, and a
look at each parameter. Whole training steps are in
[the benchmark](benchmark_half_weights.md)."""


class StepTimer(Callback):
    "Milliseconds from the first callback's `before_step` to the last one's `after_step`."
    order = -2000
    def __init__(self): self.ms = []
    def before_step(self): self.start = time.perf_counter()

    class End(Callback):
        order = 2000
        def __init__(self, timer): self.timer = timer
        def after_step(self): self.timer.ms.append((time.perf_counter() - self.timer.start) * 1000)


def runs(match):
    "The two ways to train, ready, each with its timer."
    for name in ('to_half_weights', 'to_half_weights, flat'):
        c = next(r.contestant for r in match.results if (r.contestant.name, r.contestant.opt) == (name, 'Adam'))
        run, timer = c.build(match.task, AMPMode.BF16, c.opt, 1.), StepTimer()
        run.learn.add_cbs([timer, StepTimer.End(timer)])
        yield run, timer


def fit(match, run, timer, steps):
    "The median step of a fit, without its first."
    timer.ms.clear()
    match.task.clock.n, match.task.clock.warm = steps, 1
    run.steps()
    return float(np.median(timer.ms[2:]))


def row(name, seconds, steps):
    match = ModelBenchmark(name, [AMPMode.BF16], torch.device('cpu'))
    both, pairs = list(runs(match)), []
    for run, timer in both: fit(match, run, timer, 3)            # the first fit builds the optimizer's state
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        turn = both if len(pairs) % 2 else both[::-1]
        ms = {id(run): fit(match, run, timer, steps) for run, timer in turn}
        pairs.append([ms[id(run)] for run, _ in both])
    flat = next(cb for cb in both[1][0].learn.cbs if hasattr(cb, '_flat'))
    seen = []
    step = flat._flat.step
    def counting(model, opt, f): step(model, opt, lambda: (seen.append(sum(map(len, opt.param_lists))), f()))
    flat._flat.step = counting
    fit(match, *both[1], 1)
    n = len(list(both[1][0].model.parameters()))
    per_tensor, flats = np.array(pairs).T
    low, middle, high = np.percentile(per_tensor / flats, [25, 50, 75])
    return (f'| {name} | {n} | {seen[-1]} | {np.median(per_tensor):.2f} | {np.median(flats):.2f} '
            f'| {middle:.2f} ({low:.2f}-{high:.2f}) | {len(pairs)} |')


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--models', nargs='+', default=list(MODELS), metavar='M')
    parser.add_argument('--seconds', type=float, default=40, help='for each model')
    parser.add_argument('--steps', type=int, default=4, help='in a fit')
    args = parser.parse_args()
    warnings.simplefilter('ignore')
    facts = machine(torch.device('cpu'))
    print(TEXT.format(**facts, sets=', '.join(facts['instruction_sets']), load=facts['load_average'], steps=args.steps))
    for name in args.models:
        with contextlib.redirect_stdout(sys.stderr): line = row(name, args.seconds, args.steps)
        print(line, flush=True)
    print(END.format(seconds=args.seconds))


if __name__ == '__main__': main()
