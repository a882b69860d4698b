"The console script `fastxtend_amp_demo`: trains on handwritten digits in fp32, bf16 and fp16, and compares."
from __future__ import annotations

import argparse, time, warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from fastai.callback.core import Callback
from fastai.callback.schedule import *  # noqa: F403  patches fit_one_cycle
from fastai.callback.training import ShortEpochCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.metrics import accuracy
from fastai.torch_core import set_seed
from torch import nn
from torch.utils.data import TensorDataset

from ..callback import MixedPrecision
from ..common import PRECISION_COLORS
from ..mode import AMPMode, Support, mode_support
from .device import usable_device

__all__ = ['digits', 'learner', 'main', 'network', 'plot', 'run']

EMULATED_SECONDS = 40   # that training in an emulated mode may take; it is shortened beyond that
BATCH_SIZE, N_BATCHES = 64, 22


def digits(device: torch.device, size: int = 32) -> DataLoaders:
    "scikit-learn's 1,797 handwritten digits as float images, shape (n, 1, size, size); every fifth is for validation."
    from sklearn.datasets import load_digits
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None]
    x = nn.functional.interpolate(images, size=size, mode='bilinear') / 8 - 1
    y, held_out = torch.tensor(data.target), torch.arange(len(x)) % 5 == 0
    train, valid = TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])
    make = partial(DataLoader, num_workers=0, device=device)
    return DataLoaders(make(train, bs=BATCH_SIZE, shuffle=True, drop_last=True), make(valid, bs=2 * BATCH_SIZE),
                       device=device)


def network() -> nn.Module:
    """A convolutional network for (n, 1, 32, 32) images and ten classes.

    Wide enough that most of a step is convolution, so that low precision pays off where the device does it natively.
    """
    def block(i, o): return [nn.Conv2d(i, o, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*block(1, 64), *block(64, 128), *block(128, 256),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


class Stopwatch(Callback):
    "Times the training batches, the first two of a fit left out, and notes the dtype that the first convolution gives."
    order, run_valid = 100, False
    def before_fit(self):
        self.times, self.dtype, self.start = [], None, None
        conv = next(m for m in self.model.modules() if isinstance(m, nn.Conv2d))
        self.hook = conv.register_forward_hook(lambda m, i, o: setattr(self, 'dtype', o.dtype))
    def before_train(self): self.start = None
    def after_batch(self):
        if self.dls.device.type == 'cuda': torch.cuda.synchronize(self.dls.device)
        now = time.perf_counter()
        if self.start is not None: self.times.append((now - self.start) / len(self.yb[0]))
        self.start = now
    def after_fit(self): self.hook.remove()
    @property
    def samples_per_second(self): return 1 / pd.Series(self.times).median()


def learner(device: torch.device, seed: int, mode: AMPMode | None) -> Learner:
    "The demo's learner, the same from the same seed whatever the mode."
    set_seed(seed, reproducible=True)
    learn = Learner(digits(device), network(), loss_func=CrossEntropyLossFlat(), metrics=accuracy, cbs=Stopwatch())
    return learn if mode is None else learn.add_cb(MixedPrecision(mode))


# -- training in each mode

def _seconds_per_batch(device: torch.device, seed: int, mode: AMPMode) -> float:
    learn = learner(device, seed, mode)
    with learn.no_bar(), learn.no_logging(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn.fit(1, cbs=ShortEpochCallback(pct=.15, short_valid=True))
    return BATCH_SIZE / learn.stopwatch.samples_per_second


def _how_long(device: torch.device, seed: int, mode: AMPMode, epochs: int) -> tuple[int, float]:
    "How many of `epochs`, and what part of each, an emulated mode trains in `EMULATED_SECONDS`."
    seconds = N_BATCHES * _seconds_per_batch(device, seed, mode)
    return max(1, min(epochs, int(EMULATED_SECONDS / seconds))), min(1., EMULATED_SECONDS / seconds)


def _announce(name: str, support: Support, device: torch.device, epochs: int, of: int, part: float) -> None:
    print(f'\n{name}')
    if support.status != 'emulated': return
    print(f'This device ({device}) only emulates {name}: {support.why}. Results are right, but it is slow.')
    if part < 1: print(f'To save time it trains {part:.0%} of one epoch.')
    elif epochs < of: print(f'To save time it trains {epochs} of {of} epochs.')


def _train(device: torch.device, seed: int, mode: AMPMode | None, epochs: int) -> tuple[dict[str, Any], Learner]:
    "Train in `mode`, which `device` can run: the table's row, and the learner."
    name, n, part = mode.value if mode else 'fp32', epochs, 1.
    support = mode_support(mode, device) if mode else Support('native', '')
    if mode and support.status == 'emulated': n, part = _how_long(device, seed, mode, epochs)
    _announce(name, support, device, n, epochs, part)
    learn = learner(device, seed, mode)
    with warnings.catch_warnings():
        warnings.filterwarnings('ignore', message='.*is emulated.*')   # it has been announced
        learn.fit_one_cycle(n, 1e-2, cbs=[ShortEpochCallback(pct=part, short_valid=False)] if part < 1 else [])
    valid_loss, acc = learn.final_record[-2:]
    cb = learn.precision
    scales = cb.scales if cb else []
    row = {'mode': name, 'support': support.status, 'first conv': str(learn.stopwatch.dtype).removeprefix('torch.'),
           'epochs': n, 'valid loss': valid_loss, 'accuracy': acc, 'samples/s': learn.stopwatch.samples_per_second,
           'skipped steps': cb.n_skipped if cb else 0, 'final scale': scales[-1] if scales else float('nan')}
    return row, learn


def run(
    epochs: int = 8, # Epochs of `fit_one_cycle` for each mode
    device: str | torch.device | None = None, # The device; CUDA if there is one, else the CPU
    seed: int = 42, # Seed for weights and order of the data, the same for each mode
) -> tuple[pd.DataFrame, dict[str, Learner]]: # A table with a row for each mode, and the trained learners by mode
    "Train on the digits once in each mode that `device` can run; an emulated mode gets fewer epochs if it is slow."
    device = torch.device(device or ('cuda' if torch.cuda.is_available() else 'cpu'))
    rows, learners = [], {}
    for mode in (None, AMPMode.BF16, AMPMode.FP16):
        support = mode_support(mode, device) if mode else Support('native', '')
        if mode and support.status == 'unsupported':
            print(f'\n{mode.value} does not run on this device ({device}): {support.why}. It is left out.')
            continue
        row, learn = _train(device, seed, mode, epochs)
        rows.append(row)
        learners[row['mode']] = learn
    table = pd.DataFrame(rows)
    table.insert(7, 'ratio to fp32', table['samples/s'] / table['samples/s'][0])
    return table, learners


# -- what is shown

def plot(
    learners: dict[str, Learner], # Trained ones by mode, from `run`
    file: str | Path, # The PNG to write
) -> None:
    "Write a PNG with the loss curves of all modes and the loss scale of fp16."
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 4), layout='constrained')
    curves, scale = figure.subplots(1, 2)
    for (name, learn), style in zip(learners.items(), ('-', '--', ':')):
        losses = [float(loss) for loss in learn.recorder.losses]
        curves.plot(losses, style, label=name, color=PRECISION_COLORS[name], lw=2)
    curves.set(title='Training loss (smoothed)', xlabel='batch', ylabel='cross entropy')
    curves.legend()
    if 'fp16' in learners: learners['fp16'].precision.plot_scales(scale)
    else: scale.text(.5, .5, 'fp16 does not run on this device', ha='center', transform=scale.transAxes)
    scale.set_title('fp16 loss scale')
    figure.savefig(file, dpi=110)


_FORMATS = {'valid loss': '{:.4f}', 'accuracy': '{:.4f}', 'samples/s': '{:,.0f}', 'ratio to fp32': '{:.2f}',
            'final scale': '{:,.0f}'}


def _format(table: pd.DataFrame) -> str:
    def cells(column): return ['-' if pd.isna(v) else _FORMATS[column].format(v) for v in table[column]]
    return table.assign(**{column: cells(column) for column in _FORMATS}).to_string(index=False)


def _verdict(row: pd.Series) -> str:
    "What the table says about one mode, in a sentence."
    ratio = row['ratio to fp32']
    speed = f"{row['mode']} trained {ratio:.2f} times as fast as fp32"
    if row['support'] == 'emulated': return f'{speed}: this device only emulates it.'
    return f'{speed}.' if ratio > 1.05 else f'{speed}: it does not pay off for this network on this device.'


def main(
    argv: Sequence[str] | None = None, # Arguments; the command line's if None
) -> None:
    "Train, print the table and write the picture."
    parser = argparse.ArgumentParser(prog='fastxtend_amp_demo', description=(
        'Train a convolutional network on 1,797 real handwritten digits in fp32, bf16 and fp16, and compare.'))
    add = parser.add_argument
    add('--epochs', type=int, default=8, metavar='N', help='epochs for each mode (default %(default)s)')
    add('--device', metavar='D', help="torch device, such as 'cpu' or 'cuda:0' (default: CUDA if there is one)")
    add('--out', type=Path, default=Path('fastxtend_amp_demo.png'), metavar='FILE',
        help='the PNG to write (default %(default)s)')
    add('--seed', type=int, default=42, metavar='N', help='random seed (default %(default)s)')
    args = parser.parse_args(argv)
    if args.epochs < 1: parser.error(f'--epochs {args.epochs}: at least 1 is needed')
    if not args.out.parent.is_dir(): parser.error(f'--out {args.out}: there is no folder {args.out.parent}')
    device = usable_device(parser, args.device, 'cuda' if torch.cuda.is_available() else 'cpu')
    table, learners = run(args.epochs, device, args.seed)
    plot(learners, args.out)
    print(f'\n{_format(table)}\n')
    for _, row in table[1:].iterrows(): print(_verdict(row))
    print('Each trained once, one after the other. On a busy machine measure with `fastxtend_amp_bench`.')
    print(f'Loss curves and loss scale: {args.out.resolve()}')
