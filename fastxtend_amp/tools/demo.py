"The console script `fastxtend_amp_demo`: compares the precisions of this device on handwritten digits."
import argparse, os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from fastai.data.core import DataLoaders
from fastai.layers import ConvLayer
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.torch_core import set_seed
from torch import nn
from torch.utils.data import TensorDataset

from ..insight.choices import native_precisions
from .arguments import add_device, usable_device
from .precision_support import precision_support

SECONDS = 75.                              # for training, without starting Python and plotting
STEPS, BATCH_SIZE, LR = 44, 64, 1e-3       # two epochs; the loss falls from 2.3 to about 0.1


def digits(device: torch.device, size: int = 16) -> DataLoaders:
    "Return scikit-learn's 1,797 handwritten digits as float images (n, 1, size, size); every fifth validates."
    from sklearn.datasets import load_digits
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None]
    x = nn.functional.interpolate(images, size=size, mode='bilinear') / 8 - 1
    y, held_out = torch.tensor(data.target), torch.arange(len(x)) % 5 == 0
    parts = [TensorDataset(x[part], y[part]) for part in (~held_out, held_out)]
    return DataLoaders.from_dsets(*parts, bs=BATCH_SIZE, num_workers=0, device=device)


def learner(device: torch.device) -> Learner:
    "Return a learner on the digits, with a network in which convolutions take most of a step."
    set_seed(42)
    small, large = ConvLayer(1, 64, stride=2), ConvLayer(64, 256, stride=2)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)
    net = nn.Sequential(small, large, ConvLayer(256, 256), ConvLayer(256, 256), *head)
    return Learner(digits(device), net, loss_func=CrossEntropyLossFlat(), lr=LR)


class Attention(nn.Module):
    "Attention between the rows of a picture. Its products overflow in fp16, as they are scaled down too late."
    def forward(self, x):                                        # (n, rows, features)
        return ((128 * x) @ (128 * x).mT / 128 ** 2).softmax(-1) @ x


def reader(device: torch.device) -> Learner:
    "Return a learner with a small network that reads the digits row by row."
    set_seed(42)
    layers = OrderedDict(
        rows=nn.Flatten(1, 2), embed=nn.Linear(16, 64), attention=Attention(),
        flat=nn.Flatten(), head=nn.Linear(1024, 10))
    return Learner(digits(device), nn.Sequential(layers), loss_func=CrossEntropyLossFlat(), lr=LR)


def main(argv: Sequence[str] | None = None) -> None:
    "Compare the precisions, print the result and the call to use, and save a plot."
    parser = argparse.ArgumentParser(prog='fastxtend_amp_demo', description=(
        'Train a convolutional network on 1,797 real handwritten digits in fp32 and in each precision that the device '
        'runs natively; compare speed, loss and memory. Takes at most a minute and a half by default.'))
    add_device(parser)
    parser.add_argument('--max-seconds', type=float, default=SECONDS, metavar='S',
                        help='time for training (default %(default)g)')
    parser.add_argument('--out', type=Path, default=Path('fastxtend_amp_demo.png'), metavar='FILE',
                        help='the PNG to write (default %(default)s)')
    args = parser.parse_args(argv)
    if args.out.is_dir() or not os.access(args.out.parent, os.W_OK):
        parser.error(f'--out {args.out}: it must be a file in a writable folder')
    if not args.max_seconds > 0: parser.error(f'--max-seconds {args.max_seconds:g}: it must be above 0')
    device = usable_device(parser, args.device)
    for r in precision_support(device).itertuples():
        print(f'{r.precision} is {r.support} on this device ({r.why}).')
    learn = learner(device)
    native = [cls.name for cls in native_precisions(learn)]
    result: Any
    if native:
        print(f"Training in {', '.join(['fp32', *native])}, in alternating rounds, for at most {args.max_seconds:.0f} "
              'seconds.\n', flush=True)
        result = learn.compare_precision(native, STEPS, max_seconds=args.max_seconds)
    else:
        print('This device runs no 16-bit precision natively, so 16 bits would be slower than fp32.\n'
              "Instead, `learn.precision_report(device='cuda')` of a small network with attention:\n", flush=True)
        rules = 'cuda' if device.type == 'cpu' else None
        result = reader(device).precision_report(max_seconds=args.max_seconds, device=rules)
    print(result, end='\n\n')
    import matplotlib.pyplot as plt
    plt.switch_backend('agg')                                    # no window, on any machine
    result.plot()
    plt.gcf().savefig(args.out, dpi=110, format='png')
    print(f'Picture: {args.out.resolve()}')


if __name__ == '__main__': main()
