"The console script `fastxtend_amp_demo`: trains on handwritten digits in fp32, bf16 and fp16, in turns, and compares."
from __future__ import annotations

import argparse, time, warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from fastai.callback.core import Callback, CancelFitException
from fastai.callback.schedule import combined_cos
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.torch_core import set_seed
from torch import nn
from torch.utils.data import TensorDataset

from ..common import PRECISION_COLORS
from ..mode import precision_support
from .device import usable_device

__all__ = ['digits', 'main', 'plot', 'run']

SECONDS, EMULATED_SECONDS = 75, 10         # of training: in all, and in an emulated precision
BATCH_SIZE, LR = 64, 1e-2


def digits(device: torch.device, size: int = 24) -> DataLoaders:
    "Return scikit-learn's 1,797 handwritten digits as float images (n, 1, size, size); every fifth is for validation."
    from sklearn.datasets import load_digits
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None]
    x = nn.functional.interpolate(images, size=size, mode='bilinear') / 8 - 1
    y, held_out = torch.tensor(data.target), torch.arange(len(x)) % 5 == 0
    train, valid = TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])
    return DataLoaders.from_dsets(train, valid, bs=BATCH_SIZE, num_workers=0, device=device)


class Turns(Callback):
    "Trains one schedule in fits of an epoch each; notes losses and samples per second; ends a fit when time is up."
    order = 100
    def __init__(self, epochs: int, emulated: bool):
        self.epochs, self.emulated, self.stopped = epochs, emulated, False
        self.losses: list[float] = []                            # of batches
        self.speeds: list[float] = []                            # of epochs
        self.seconds = EMULATED_SECONDS if emulated else SECONDS # that are left
        self.schedule = combined_cos(.25, LR / 25, LR, LR / 1e5) # fit_one_cycle's
    def before_fit(self): self.start, self.times = time.perf_counter(), []
    def before_batch(self):
        if self.training: self.opt.set_hyper('lr', self.schedule(len(self.losses) / self.epochs / len(self.dl)))
    def after_batch(self):
        if self.training:
            self.losses.append(self.loss.item())                 # waits for the device, so that the time is right
            self.times.append(time.perf_counter())
        self.stopped = time.perf_counter() - self.start > self.seconds
        if self.stopped: raise CancelFitException
    def after_fit(self):
        self.seconds -= time.perf_counter() - self.start
        n = len(self.times) - 1                                  # the first batch warms up
        if n > 0: self.speeds.append(n * BATCH_SIZE / (self.times[-1] - self.times[0]))
    @property
    def done(self): return len(self.losses) / len(self.learn.dls.train)


def learner(device: torch.device, precision: str, turns: Turns) -> Learner:
    "Return the same learner for each precision: wide enough that most of a step is convolution."
    def block(i, o): return [nn.Conv2d(i, o, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    set_seed(42)
    net = nn.Sequential(*block(1, 64), *block(64, 128), *block(128, 256),
                        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))
    learn = Learner(digits(device), net, loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=turns)
    return learn if precision == 'fp32' else getattr(learn, f'to_{precision}')()


def run(
    epochs: int = 6, # Epochs in each precision
    device: str | torch.device = 'cpu',
) -> dict[str, Learner]: # By precision
    "Train in each precision that `device` can run, an epoch each by rotation, and print a line for each epoch."
    device, end, learners = torch.device(device), time.perf_counter() + SECONDS, {'fp32': Turns(epochs, False)}
    for r in precision_support(device).itertuples():
        slow = '; expect it to be slow' * (r.support == 'emulated')
        print(f'{r.mode} is {r.support} on this device ({r.why}){slow}.')
        if r.support != 'unsupported': learners[r.mode] = Turns(epochs, r.support == 'emulated')
    learners = {name: learner(device, name, turns) for name, turns in learners.items()}
    for k in range(epochs):
        for name, learn in [*learners.items()][k % len(learners):] + [*learners.items()][:k % len(learners)]:
            turns = learn.turns
            if turns.stopped: continue
            turns.seconds = min(turns.seconds, end - time.perf_counter())
            with learn.no_bar(), learn.no_logging(), warnings.catch_warnings():
                warnings.filterwarnings('ignore', message='.*is emulated.*')   # it has been said
                learn.fit(1)
            early = f', stopped to save time after {turns.done:.1f} of {epochs} epochs' * turns.stopped
            print(f'epoch {k + 1}, {name}: loss {turns.losses[-1]:.3f}{early}', flush=True)
    return learners


def plot(
    learners: dict[str, Learner], # From `run`
    file: str | Path, # The PNG to write
) -> None:
    "Write a PNG with the training losses, and the samples per second of each epoch."
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 4), layout='constrained')
    curves, speeds = figure.subplots(1, 2)
    for i, (name, learn) in enumerate(learners.items()):
        turns, color = learn.turns, PRECISION_COLORS[name]
        losses = pd.Series(turns.losses).ewm(alpha=.1).mean()
        early = f' (stopped after {turns.done:.1f} of {turns.epochs} epochs)' * turns.stopped
        curves.plot((losses.index + 1) / len(learn.dls.train), losses, ('-', '--', ':')[i], color=color, lw=2,
                    marker='x' * turns.stopped, markevery=[-1], label=name + early)
        speeds.plot([i] * len(turns.speeds), turns.speeds, 'o', color=color, alpha=.6)
        if turns.speeds: speeds.hlines(np.median(turns.speeds), i - .2, i + .2, color=color, lw=2)
    curves.set(title='Training loss, the same schedule for all', xlabel='epoch', ylabel='cross entropy (smoothed)')
    curves.legend()
    speeds.set(title='Samples per second (dots: epochs, line: median)', ylim=(0, None), xlim=(-.6, len(learners) - .4),
               xticks=range(len(learners)), xticklabels=list(learners))
    figure.savefig(file, dpi=110)


def row(name: str, learn: Learner, fp32: Turns) -> dict[str, str]:
    "Return a precision's row of the table."
    turns, ratios = learn.turns, [a / b for a, b in zip(learn.turns.speeds, fp32.speeds)]
    low, median, high = np.quantile(turns.speeds or [np.nan], (0, .5, 1))
    loss, acc = (f'{x:.4f}' for x in learn.final_record[-2:]) if turns.done >= 1 else '--'
    return {'precision': name, 'epochs': f'{turns.done:.1f}', 'valid loss': loss, 'accuracy': acc,
            'samples/s': f'{median:,.0f} ({low:,.0f} to {high:,.0f})',
            'times as fast as fp32': '' if name == 'fp32' else verdict(ratios, turns.emulated)}


def verdict(
    ratios: Sequence[float], # Speeds divided by fp32's, of epochs side by side
    emulated: bool = False,
) -> str:
    """Return the median with quartiles, and what to say of it.

    It is too noisy to tell where 1 lies in the median's 95 % interval, 1.57 (q3 - q1) / sqrt(n), or n is less than 3.
    """
    if not ratios: return 'too slow to time'
    low, median, high = np.quantile(ratios, (.25, .5, .75))
    unclear = len(ratios) < 3 or abs(median - 1) <= 1.57 * (high - low) / len(ratios) ** .5
    said = ', emulated here' if emulated else ', too noisy to tell' if unclear else ''
    return f'{median:.2f} ({low:.2f} to {high:.2f}){said}'


def main(
    argv: Sequence[str] | None = None, # Arguments; the command line's if None
) -> None:
    "Train, print the table and write the picture."
    parser = argparse.ArgumentParser(prog='fastxtend_amp_demo', description=(
        'Train a convolutional network on 1,797 real handwritten digits in fp32, bf16 and fp16, and compare. '
        'Takes at most two minutes.'))
    add = parser.add_argument
    add('--epochs', type=int, default=6, metavar='N', help='epochs for each precision (default %(default)s)')
    add('--device', metavar='D', help="torch device, such as 'cpu' or 'cuda:0' (default: CUDA if there is one)")
    add('--out', type=Path, default=Path('fastxtend_amp_demo.png'), metavar='FILE',
        help='the PNG to write (default %(default)s)')
    args = parser.parse_args(argv)
    if args.epochs < 1: parser.error(f'--epochs {args.epochs}: at least 1 is needed')
    if not args.out.parent.is_dir(): parser.error(f'--out {args.out}: there is no folder {args.out.parent}')
    device = usable_device(parser, args.device, 'cuda' if torch.cuda.is_available() else 'cpu')
    learners = run(args.epochs, device)
    plot(learners, args.out)
    rows = [row(name, learn, learners['fp32'].turns) for name, learn in learners.items()]
    print(f'\n{pd.DataFrame(rows).to_string(index=False)}\n\nLosses and speeds: {args.out.resolve()}')
