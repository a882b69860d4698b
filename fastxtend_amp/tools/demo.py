"The console script `fastxtend_amp_demo`: compares fp32, bf16 and fp16 on handwritten digits."
from __future__ import annotations

import argparse, os, sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pandas as pd
import torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import set_seed
from torch import nn
from torch.utils.data import TensorDataset

import fastxtend_amp  # noqa: F401  patches Learner
from ..insight.comparison import PrecisionComparison
from ..insight.precisions import PRECISION_COLORS
from ..mode import precision_support
from .device import usable_device

__all__ = ['digits', 'main', 'plot', 'speed']

SECONDS = 75                               # for all three precisions; starting Python and drawing come on top
EPOCHS, BATCH_SIZE, LR = 7, 64, 3e-3       # seven, because a comparison takes seven turns


def digits(device: torch.device, size: int = 16) -> DataLoaders:
    "Return scikit-learn's 1,797 handwritten digits as float images (n, 1, size, size); every fifth is for validation."
    from sklearn.datasets import load_digits
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None]
    x = nn.functional.interpolate(images, size=size, mode='bilinear') / 8 - 1
    y, held_out = torch.tensor(data.target), torch.arange(len(x)) % 5 == 0
    train, valid = TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])
    return DataLoaders.from_dsets(train, valid, bs=BATCH_SIZE, num_workers=0, device=device)


def learner(device: torch.device) -> Learner:
    "Return a convolutional network, wide enough that most of a step is convolution, on the digits."
    def block(i, o): return [nn.Conv2d(i, o, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    set_seed(42)
    net = nn.Sequential(*block(1, 64), *block(64, 128), *block(128, 256),
                        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
    return Learner(digits(device), net, loss_func=CrossEntropyLossFlat())


def speed(row: pd.Series) -> str: # Of the comparison's table
    "Return samples per second, their ratio to fp32's, the range of half of the turns, and what the ratio is worth."
    if not row['steps']: return 'does not run here'
    said = f"{1000 * BATCH_SIZE / row['ms per step']:,.0f} samples/s"
    if row.name == 'fp32': return said
    low, high = row['speed-up q1'], row['speed-up q3']
    clear = row['turns'] > 3 and max(low - 1, 1 - high) > high - low   # farther from 1 than the range is wide
    worth = 'emulated here' if row['support'] == 'emulated' else '' if clear else 'too noisy to tell'
    return f"{said}, {row['speed-up']:.2f} ({low:.2f} to {high:.2f}) times fp32's{worth and ': ' + worth}"


def plot(comparison: PrecisionComparison, file: str | Path) -> None:
    "Write a PNG with the training losses and the samples per second."
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 4), layout='constrained')
    curves, speeds = figure.subplots(1, 2)
    table = comparison.table
    for (name, losses), style in zip(comparison.losses.items(), ('-', '--', ':')):
        if not losses: continue
        smooth = pd.Series(losses, index=range(1, len(losses) + 1)).ewm(alpha=.1).mean()
        curves.plot(smooth, style, color=PRECISION_COLORS[name], lw=2, label=name)
    curves.set(title='Training loss on the same batches', xlabel='step', ylabel='cross entropy (smoothed)')
    curves.legend()
    bars = speeds.barh(table.index, 1000 * BATCH_SIZE / table['ms per step'].fillna(float('inf')), height=.5,
                       color=[PRECISION_COLORS[name] for name in table.index])
    for bar, (_, row) in zip(bars, table.iterrows()):
        speeds.text(0, bar.get_y() - .06, speed(row), va='bottom')
    speeds.set(title='Samples per second', ylim=(len(table) - .5, -.6))
    for ax in (curves, speeds): ax.spines[['top', 'right']].set_visible(False)
    figure.savefig(file, dpi=110, format='png')


def main(argv: Sequence[str] | None = None) -> None:
    "Compare, print the table and write the picture."
    parser = argparse.ArgumentParser(prog='fastxtend_amp_demo', description=(
        'Train a convolutional network on 1,797 real handwritten digits in fp32, bf16 and fp16, and compare. '
        'Takes at most two minutes.'))
    parser.add_argument('--device', metavar='D',
                        help="torch device, such as 'cpu' or 'cuda:0' (default: the accelerator, if there is one)")
    parser.add_argument('--out', type=Path, default=Path('fastxtend_amp_demo.png'), metavar='FILE',
                        help='the PNG to write (default %(default)s)')
    args = parser.parse_args(argv)
    if not os.access(args.out.parent, os.W_OK):
        parser.error(f'--out {args.out}: there is no folder {args.out.parent} that can be written to')
    device = usable_device(parser, args.device)
    for r in precision_support(device).itertuples(): print(f'{r.mode} is {r.support} on this device ({r.why}).')
    print(f'fp32, bf16 and fp16 train in turns, for at most {SECONDS} seconds.\n', flush=True)
    learn = learner(device)
    with nullcontext() if sys.stdout.isatty() else learn.no_bar():
        steps = 2 + EPOCHS * len(learn.dls.train)                # two to warm up, then an epoch in each turn
        comparison = learn.compare_precision(('bf16', 'fp16'), n_steps=steps, lr=LR, n_seeds=0, max_seconds=SECONDS)
    print(comparison, end='\n\n')
    for name, row in comparison.table.iterrows(): print(f'{name}: {speed(row)}')
    plot(comparison, args.out)
    print(f'\nLosses and speeds: {args.out.resolve()}')
