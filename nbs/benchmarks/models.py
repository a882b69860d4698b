"The networks that the benchmark trains, and batches for them."
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn


class Encoder(nn.Module):
    "A transformer encoder over tokens, shape (n, length), with a classifier on the mean."
    def __init__(self, vocab: int, d: int, heads: int, layers: int):
        super().__init__()
        self.emb, self.head = nn.Embedding(vocab, d), nn.Linear(d, 10)
        layer = nn.TransformerEncoderLayer(d, heads, 4 * d, dropout=0., batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    def forward(self, x): return self.head(self.layers(self.emb(x)).mean(1))


class LanguageModel(nn.Module):
    "Two LSTM layers over tokens, shape (n, length), that predict the next one."
    def __init__(self, vocab: int, d: int):
        super().__init__()
        self.emb, self.rnn, self.head = nn.Embedding(vocab, d), nn.LSTM(d, d, 2, batch_first=True), nn.Linear(d, vocab)
    def forward(self, x): return self.head(self.rnn(self.emb(x))[0])


def mlp(width: int, depth: int) -> nn.Module: # From (n, width) to (n, 10)
    "Linear layers of one width with ReLU between them, and a classifier for ten classes."
    return nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())), nn.Linear(width, 10))


class Setup(NamedTuple):
    "What is trained on one kind of device."
    net: nn.Module
    batch_size: int
    inputs: Callable[[int], torch.Tensor]  # takes n, gives a batch's inputs
    next_token: bool = False               # the targets are the inputs moved by one, else ten classes


class Model(NamedTuple):
    "An entry of `MODELS`: how to build a network and its batches, and what it is called in the report."
    build: Callable[[bool], Setup]         # takes whether the device is an accelerator: models are larger there
    title: str
    channels_last: bool = False


def _xresnet(big: bool) -> Setup:
    from fastai.vision.models.xresnet import xresnet18
    return Setup(xresnet18(n_out=10), 256 if big else 16, lambda n: torch.randn(n, 3, 64, 64))


def _transformer(big: bool) -> Setup:
    vocab, d, layers, length = (8000, 1024, 8, 256) if big else (1000, 256, 3, 64)
    return Setup(Encoder(vocab, d, d // 64, layers), 64 if big else 16, lambda n: torch.randint(vocab, (n, length)))


def _lstm(big: bool) -> Setup:
    vocab, d, length = (8000, 1024, 70) if big else (1000, 256, 32)
    inputs = lambda n: torch.randint(vocab, (n, length))
    return Setup(LanguageModel(vocab, d), 64 if big else 16, inputs, next_token=True)


def _mlp(width: int, depth: int, batch_size: int, depth_on_accelerator: int | None = None) -> Callable[[bool], Setup]:
    def build(big: bool) -> Setup:
        layers = depth_on_accelerator if big and depth_on_accelerator else depth
        return Setup(mlp(width, layers), batch_size, lambda n: torch.randn(n, width))
    return build


def _wide(batch_size: int) -> Callable[[bool], Setup]:
    # One weight of 64 MB: glibc returns freed blocks of over 32 MB to the system in any process, so that the page
    # faults of a step do not depend on what was trained before in this one.
    return _mlp(4096, 1, batch_size, depth_on_accelerator=4)


MODELS = {
    'xresnet18': Model(_xresnet, 'fastai xresnet18 at 64x64'),
    'xresnet18-cl': Model(_xresnet, 'fastai xresnet18 at 64x64, channels last', channels_last=True),
    'transformer': Model(_transformer, 'transformer encoder'),
    'lstm': Model(_lstm, 'LSTM language model'),
    'wide-64': Model(_wide(64), 'wide MLP, batch 64'),
    'wide-256': Model(_wide(256), 'wide MLP, batch 256'),
    'wide-1024': Model(_wide(1024), 'wide MLP, batch 1024'),
    'deep': Model(_mlp(64, 32, 64), 'deep narrow MLP (32 layers of 64)'),
    'tiny': Model(_mlp(32, 1, 16), 'tiny MLP (the overhead)'),
}
