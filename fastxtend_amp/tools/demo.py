"Does it work, and does it pay off here? The main job, from one command: digits in fp32, bf16 and fp16, side by side."
from __future__ import annotations

import argparse, time, warnings
from collections.abc import Sequence
from pathlib import Path

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

from .. import learner as _learner  # noqa: F401  patches Learner
from ..callback import MixedPrecision
from ..mode import AMPMode, autocast_available, mode_support

BUDGET = 40  # seconds that an emulated mode may take; beyond that it is shortened


def digits(device: torch.device, bs: int = 64) -> DataLoaders:
    "scikit-learn's 1,797 handwritten digits as float images, shape (n, 1, 32, 32); every fifth is for validation."
    from sklearn.datasets import load_digits
    data = load_digits()
    x = nn.functional.interpolate(torch.tensor(data.images, dtype=torch.float32)[:, None], size=32, mode='bilinear') / 8 - 1
    y, held_out = torch.tensor(data.target), torch.arange(len(x)) % 5 == 0
    train, valid = TensorDataset(x[~held_out], y[~held_out]), TensorDataset(x[held_out], y[held_out])
    return DataLoaders(DataLoader(train, bs=bs, shuffle=True, drop_last=True, num_workers=0, device=device),
                       DataLoader(valid, bs=2 * bs, num_workers=0, device=device), device=device)


def network() -> nn.Module:
    "A small convolutional network for (n, 1, 32, 32) images and ten classes."
    def block(i, o): return [nn.Conv2d(i, o, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU()]
    return nn.Sequential(*block(1, 16), *block(16, 32), *block(32, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


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


def _seconds_per_batch(device, seed, mode):
    learn = learner(device, seed, mode)
    with learn.no_bar(), learn.no_logging(), warnings.catch_warnings():
        warnings.simplefilter('ignore')
        learn.fit(1, cbs=ShortEpochCallback(pct=.1))
    return 64 / learn.stopwatch.samples_per_second


def run(
    epochs: int = 8, # Epochs of `fit_one_cycle` for each mode
    device: str | torch.device | None = None, # The device; CUDA if there is one, else the CPU
    seed: int = 42, # Seed for weights and order of the data, the same for each mode
) -> tuple[pd.DataFrame, dict[str, Learner]]: # A table with a row for each mode, and the trained learners by mode
    "Train the digits once per mode that `device` can run; an emulated mode that would take long gets fewer epochs."
    device = torch.device(device or ('cuda' if torch.cuda.is_available() else 'cpu'))
    rows, learners = [], {}
    for mode in (None, AMPMode.BF16, AMPMode.FP16):
        name = mode.value if mode else 'fp32'
        support, why = mode_support(mode, device) if mode else ('native', '')
        if support == 'unsupported':
            print(f'{name}: {why}; left out')
            continue
        n, short = epochs, []
        if support == 'emulated':
            per_epoch = 22 * _seconds_per_batch(device, seed, mode)
            n = max(1, min(epochs, int(BUDGET / per_epoch)))
            if per_epoch > BUDGET: short = [ShortEpochCallback(pct=BUDGET / per_epoch, short_valid=False)]
        flag = f' (emulated{f", {n} of {epochs} epochs" if n < epochs else ""}{", part of an epoch" if short else ""})' if support == 'emulated' else ''
        print(f'\n{name}{flag}')
        learn = learner(device, seed, mode)
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', message='.*is emulated.*')  # the line above and the table say so
            learn.fit_one_cycle(n, 1e-2, cbs=short)
        valid_loss, acc = learn.final_record[-2:]
        scales = learn.mixed_precision.scales if mode else []
        rows.append({'mode': name, 'support': support, 'first conv': str(learn.stopwatch.dtype).removeprefix('torch.'), 'epochs': n,
                     'valid loss': valid_loss, 'accuracy': acc, 'samples/s': learn.stopwatch.samples_per_second,
                     'skipped steps': learn.mixed_precision.n_skipped if mode else 0,
                     'final scale': learn.mixed_precision.scaling.scaler.get_scale() if scales else float('nan')})
        learners[name] = learn
    table = pd.DataFrame(rows)
    table.insert(7, 'ratio to fp32', table['samples/s'] / table['samples/s'][0])
    return table, learners


def plot(learners: dict[str, Learner], file: str | Path) -> None:
    "Write a PNG with the loss curves of all modes, and the loss scale of fp16, to `file`."
    from matplotlib.figure import Figure
    figure = Figure(figsize=(11, 4), layout='constrained')
    curves, scale = figure.subplots(1, 2)
    for (name, learn), style in zip(learners.items(), ('-', '--', ':')):
        curves.plot([float(l) for l in learn.recorder.losses], style, label=name, lw=2)
    curves.set(title='Training loss (smoothed)', xlabel='batch', ylabel='cross entropy')
    curves.legend()
    if 'fp16' in learners: learners['fp16'].mixed_precision.plot_scales(scale)
    else: scale.text(.5, .5, 'fp16 does not run on this device', ha='center', transform=scale.transAxes)
    scale.set_title('fp16 loss scale')
    figure.savefig(file, dpi=110)


def _format(table):
    formats = {'valid loss': '{:.4f}', 'accuracy': '{:.4f}', 'samples/s': '{:,.0f}', 'ratio to fp32': '{:.2f}', 'final scale': '{:,.0f}'}
    return table.assign(**{c: ['-' if v != v else f.format(v) for v in table[c]] for c, f in formats.items()}).to_string(index=False)


def main(argv: Sequence[str] | None = None) -> None:
    "The console script `fastxtend_amp_demo`."
    parser = argparse.ArgumentParser(prog='fastxtend_amp_demo', description=(
        'Train a small convolutional network on 1,797 real handwritten digits in fp32, bf16 and fp16, and compare.'))
    parser.add_argument('--epochs', type=int, default=8, metavar='N', help='epochs for each mode (default 8)')
    parser.add_argument('--device', metavar='D', help="torch device, such as 'cpu' or 'cuda:0' (default: CUDA if there is one)")
    parser.add_argument('--out', type=Path, default=Path('fastxtend_amp_demo.png'), metavar='FILE', help='the PNG to write (default %(default)s)')
    parser.add_argument('--seed', type=int, default=42, metavar='N', help='random seed (default 42)')
    args = parser.parse_args(argv)
    if args.epochs < 1: parser.error(f'--epochs {args.epochs}: at least 1 is needed')
    if not args.out.parent.is_dir(): parser.error(f'--out {args.out}: there is no folder {args.out.parent}')
    try: device = torch.device(args.device or ('cuda' if torch.cuda.is_available() else 'cpu')); torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as e: parser.error(f'--device {args.device}: {str(e).splitlines()[0]}')
    if not autocast_available(device.type): parser.error(f'--device {device}: PyTorch has no autocast for it; try cpu')
    table, learners = run(args.epochs, device, args.seed)
    plot(learners, args.out)
    print(f'\n{_format(table)}\n')
    ratios = dict(zip(table['mode'], table['ratio to fp32']))
    slower = [m for m, r in ratios.items() if m != 'fp32' and r < 1.05]
    if slower: print(f"{' and '.join(slower)} did not pay off: this network's layers are small, and low precision gains little on "
                     f"them{' where the device only emulates it' if 'emulated' in set(table['support']) else ''}.")
    print(f'Loss curves and loss scale: {args.out}')
