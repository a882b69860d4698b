"""What a training batch costs the host, beside fastai's own callback: calls, operators, and the time of a tiny MLP.

`python -m nbs.benchmarks.calls` prints a Markdown table of calls and operators, which are the same on each machine.
`--rounds 40` adds the time of a batch, for which the machine has to be quiet.
"""
from __future__ import annotations

import argparse, gc, statistics, sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from fastai.callback import fp16
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders, TfmdDL
from fastai.learner import Learner
from fastai.losses import MSELossFlat
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fastxtend_amp import MixedPrecision
from fastxtend_amp.training.loop import _fastais

DTYPES = {'fp32': None, 'bf16': torch.bfloat16, 'fp16': torch.float16}
SCALING = {'fp16': dict(init_scale=1024.)}  # low enough that no step is skipped
FEW, MANY = 10, 40                          # batches of an epoch: the difference leaves out what a fit costs

Run = Callable[[], Any]                     # trains for an epoch


def learner(n: int) -> Learner: # On `n` batches, and one for validation
    torch.manual_seed(0)
    x = torch.randn(10 * n, 16)
    sets = (torch.utils.data.TensorDataset(t, torch.randn(len(t), 1)) for t in (x, x[:10]))
    dls = DataLoaders(*(TfmdDL(ds, bs=10, num_workers=0) for ds in sets))
    learn = Learner(dls, nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)), loss_func=MSELossFlat())
    learn.remove_cb(ProgressCallback)
    return learn


def ours(precision: str, n: int) -> Run:
    learn = learner(n).add_cb(MixedPrecision(precision, **SCALING.get(precision, {})))
    return partial(_silent_fit, learn)


@contextmanager
def fastais_on_cpu() -> Iterator[None]:
    "Run fastai's own callback on a CPU, without what importing fastxtend_amp replaces in fastai's loop."
    on_cpu = {name: partial(_on_cpu, getattr(torch.amp, name)) for name in ('autocast', 'GradScaler')}
    with patch.multiple(fp16, **on_cpu), patch.object(Learner, '_with_events', _fastais): yield


def fastais(precision: str, n: int) -> Run:
    learn = learner(n)
    if precision != 'fp32': learn.add_cb(fp16.MixedPrecision(precision, **SCALING.get(precision, {})))

    def run() -> None:
        with fastais_on_cpu(): _silent_fit(learn)
    return run


def pytorchs(precision: str, n: int) -> Run: # With fastai's loader and optimizer
    learn, dtype = learner(n), DTYPES[precision]
    learn.create_opt()
    model, opt, loss_func = learn.model, learn.opt, learn.loss_func
    scaler = torch.amp.GradScaler('cpu', enabled=precision == 'fp16', **SCALING.get(precision, {}))

    def run() -> None:
        for xb, yb in learn.dls.train:
            with torch.autocast('cpu', dtype, enabled=dtype is not None): loss = loss_func(model(xb), yb)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    return run


def _silent_fit(learn: Learner) -> None:
    with learn.no_logging(): learn.fit(1)


def _on_cpu(f: Callable, device: str, **kwargs: Any) -> Any: return f('cpu', **kwargs)   # fastai's callback says 'cuda'


ROWS = {('fp32', "PyTorch's loop"): pytorchs, ('fp32', 'fastai'): fastais}
for p in ('bf16', 'fp16'):
    ROWS |= {(p, "PyTorch's loop"): pytorchs, (p, "fastai's callback"): fastais, (p, 'fastxtend_amp'): ours}


# -- counting

class Operators(TorchDispatchMode):
    "Counts operators."
    n = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **(kwargs or {}))


def counted(run: Run) -> list[int]: # Calls of Python and of C functions, and operators
    "Count what an epoch costs after a first one."
    calls = {'call': 0, 'c_call': 0}
    def profile(frame: Any, event: str, arg: Any) -> None:
        if event in calls: calls[event] += 1
    run()
    gc.collect()
    gc.disable()                                                 # what it finalizes would be counted as well
    sys.setprofile(profile)
    try: run()
    finally:
        sys.setprofile(None)
        gc.enable()
    with Operators() as operators: run()
    return [*calls.values(), operators.n]


def per_batch(way: Callable[[str, int], Run], precision: str) -> list[float]:
    "Count what a batch costs."
    few, many = (counted(way(precision, n)) for n in (FEW, MANY))
    return [(b - a) / (MANY - FEW) for a, b in zip(few, many)]


def times(rounds: int) -> dict[tuple[str, str], float]: # In us, by row
    "Return the median time of a batch, of rounds in which all rows take turns."
    runs = {row: way(row[0], MANY) for row, way in ROWS.items()}
    found: dict[tuple[str, str], list[float]] = {row: [] for row in runs}
    for i in range(-1, rounds):                                  # the first one is not counted
        for row, run in runs.items():
            start = perf_counter()
            run()
            if i >= 0: found[row].append((perf_counter() - start) / MANY * 1e6)
    return {row: statistics.median(values) for row, values in found.items()}


def main(argv: list[str] | None = None) -> None:
    "Print the tables."
    parser = argparse.ArgumentParser(prog='python -m nbs.benchmarks.calls', description=__doc__.splitlines()[0])
    parser.add_argument('--rounds', type=int, default=0, metavar='N', help='rounds to time; 0 only counts (default)')
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    took = times(args.rounds) if args.rounds else {}
    print('| loop | Python calls | C calls | operators |' + ' us |' * bool(took))
    print('|---|--:|--:|--:|' + '--:|' * bool(took))
    for row, way in ROWS.items():
        cells = [f'{n:,.0f}' for n in [*per_batch(way, row[0]), *([took[row]] if took else [])]]
        print('|', ' | '.join([', '.join(row), *cells]), '|')


if __name__ == '__main__': main()
