"""Times of `precision_report` and `compare_precision` on models of ordinary size, compared with a step in fp32.

`python tests/tools/report_costs.py` prints a Markdown table. It needs a quiet machine, and timm for the vision
transformer.
"""

from __future__ import annotations

import argparse, time, warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from fastai.callback.rnn import rnn_cbs
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.text.models import AWD_LSTM, get_language_model
from fastai.vision.learner import create_unet_model
from fastai.vision.models.xresnet import xresnet18
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

import fastxtend_amp  # noqa: F401  patches Learner

CE = CrossEntropyLossFlat


def learner(model, x, y, loss=None, cbs=None):
    dl = DataLoader(TensorDataset(x, y), bs=len(x), num_workers=0, device='cpu')
    return Learner(DataLoaders(dl, dl, device='cpu'), model, loss_func=loss or CE(), cbs=cbs)


def pictures(model):
    return learner(model, torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,)))


def unet():
    model = create_unet_model(xresnet18, 2, (64, 64), pretrained=False, cut=-4)
    return learner(model, torch.randn(8, 3, 64, 64), torch.randint(0, 2, (8, 64, 64)), CE(axis=1))


def vit():
    import timm

    return pictures(timm.create_model('vit_tiny_patch16_224', img_size=64, num_classes=10))


def awd_lstm():
    config = dict(
        emb_sz=100,
        n_hid=200,
        n_layers=3,
        pad_token=1,
        bidir=False,
        output_p=0.1,
        hidden_p=0.15,
        input_p=0.25,
        embed_p=0.02,
        weight_p=0.2,
        tie_weights=True,
        out_bias=True,
    )
    ids = torch.randint(0, 1000, (16, 33))
    return learner(get_language_model(AWD_LSTM, 1000, config), ids[:, :-1], ids[:, 1:], cbs=rnn_cbs())


def spectral_norm():
    conv = lambda i, o: parametrizations.spectral_norm(nn.Conv2d(i, o, 3, 2, 1))
    body = [m for i, o in ((3, 64), (64, 128), (128, 256)) for m in (conv(i, o), nn.LeakyReLU(0.2))]
    return pictures(nn.Sequential(*body, nn.Flatten(), nn.Linear(256 * 8 * 8, 10)))


def thousand():
    layers = [m for _ in range(500) for m in (nn.Linear(64, 64), nn.ReLU())]
    for m in layers[::2]:
        nn.init.eye_(m.weight)  # else nothing of the input arrives
    return learner(nn.Sequential(*layers, nn.Linear(64, 10)), torch.randn(64, 64), torch.randint(0, 10, (64,)))


class Tied(nn.Module):
    "Two layers that share a weight, the first called twice; its output is a dataclass."

    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 10)
        self.b.weight = self.a.weight

    def forward(self, x):
        return Output(self.head(self.b(self.a(self.a(x).relu())).relu()))


@dataclass
class Output:
    logits: torch.Tensor


def tied():
    return learner(Tied(), torch.randn(64, 512), torch.randint(0, 10, (64,)), lambda out, y: CE()(out.logits, y))


MODELS = {
    'xresnet18, 16 x 64x64': lambda: pictures(xresnet18(n_out=10)),
    'U-Net on xresnet18, 8 x 64x64': unet,
    'timm vit_tiny, 16 x 64x64': vit,
    'AWD_LSTM, 16 x 32 tokens': awd_lstm,
    'spectral norm, 16 x 64x64': spectral_norm,
    '1,000 modules': thousand,
    'tied, called twice, dataclass': tied,
    'compiled xresnet18': lambda: pictures(torch.compile(xresnet18(n_out=10), backend='aot_eager')),
}


def seconds(f: Callable):
    start = time.perf_counter()
    return f(), time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--models', nargs='+', default=list(MODELS))
    parser.add_argument('--modes', nargs='+', default=['bf16'])
    args = parser.parse_args()
    warnings.simplefilter('ignore')
    print(f'{torch.get_num_threads()} threads, modes {args.modes}; the comparison trains 20 steps of each, no seeds\n')
    print(
        '| model | modules | fp32 step, ms | report, s | comparison, s | verdicts | recommended |\n'
        '|---|--:|--:|--:|--:|---|---|'
    )
    for name in args.models:
        torch.manual_seed(0)
        learn = MODELS[name]()
        with learn.no_bar():
            report, of_report = seconds(lambda: learn.precision_report(args.modes, max_seconds=600))
            compared, of_comparison = seconds(
                lambda: learn.compare_precision(args.modes, n_steps=20, n_seeds=0, max_seconds=600)
            )
        step = compared.table.loc['fp32', 'ms per step']
        verdicts = ', '.join(f'{m}: {v.verdict}' for m, v in report.verdicts.items())
        print(
            f'| {name} | {len(list(learn.model.modules())):,} | {step:,.0f} | {of_report:.1f} | {of_comparison:.1f} '
            f'| {verdicts} | {compared.recommended} |',
            flush=True,
        )


if __name__ == '__main__':
    main()
