"The networks that the benchmark trains, and their batches."
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from operator import itemgetter, methodcaller
from typing import NamedTuple

import torch
from fastai.layers import Lambda
from fastai.vision.models.xresnet import xresnet18
from torch import nn
from torchvision.models import efficientnet_b0, mobilenet_v3_large, resnet34, resnet50


class Model(NamedTuple):
    "A network and its data, of the size that one kind of device trains."
    title: str
    net: Callable[[], nn.Module]
    inputs: Callable[[], torch.Tensor]     # draws those of a batch
    next_token: bool = False               # the targets are the inputs moved by one, else ten classes
    channels_last: bool = False

    def build(self, device: torch.device) -> nn.Module:
        "Return the network, the same each time."
        torch.manual_seed(0)
        return self.net().to(device, **self._format)

    def batch(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]: # Inputs and targets
        x = self.inputs()
        y = x.roll(-1, 1) if self.next_token else torch.randint(10, (len(x),))
        return x.to(device, **self._format), y.to(device)

    @property
    def _format(self) -> dict: return {'memory_format': torch.channels_last} if self.channels_last else {}


def _xresnet(big: bool, channels_last: bool = False) -> Model:
    title, n = 'fastai xresnet18 at 64x64' + ', channels last' * channels_last, 256 if big else 16
    return Model(title, partial(xresnet18, n_out=10), lambda: torch.randn(n, 3, 64, 64), channels_last=channels_last)


def _transformer(big: bool) -> Model:
    vocab, d, layers, n, length = (8000, 1024, 8, 64, 256) if big else (1000, 256, 3, 16, 64)
    def net():
        layer = nn.TransformerEncoderLayer(d, d // 64, 4 * d, dropout=0., batch_first=True, norm_first=True)
        encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        return nn.Sequential(nn.Embedding(vocab, d), encoder, Lambda(methodcaller('mean', 1)), nn.Linear(d, 10))
    return Model('transformer encoder', net, lambda: torch.randint(vocab, (n, length)))


def _lstm(big: bool) -> Model:
    vocab, d, n, length = (8000, 1024, 64, 70) if big else (1000, 256, 16, 32)
    def net():
        rnn = nn.LSTM(d, d, 2, batch_first=True)
        return nn.Sequential(nn.Embedding(vocab, d), rnn, Lambda(itemgetter(0)), nn.Linear(d, vocab))
    return Model('LSTM language model', net, lambda: torch.randint(vocab, (n, length)), next_token=True)


def _mlp(big: bool, title: str, width: int, depth: int, n: int) -> Model:
    def net():
        layers = (m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU()))
        return nn.Sequential(*layers, nn.Linear(width, 10))
    return Model(title, net, lambda: torch.randn(n, width))


def _wide(big: bool, n: int) -> Model:
    # One weight of 64 MB: glibc returns freed blocks of over 32 MB to the system in any process, so that fp32's page
    # faults do not depend on what was trained before in this one. The copies in bf16 have 32 MB: theirs do.
    return _mlp(big, f'wide MLP, batch {n}', 4096, 4 if big else 1, n)


def _pictures(big: bool, title: str, net: Callable[..., nn.Module], size: int, n: int) -> Model:
    return Model(title, partial(net, num_classes=10), lambda: torch.randn(8 * n if big else n, 3, size, size))


def _timm(big: bool, title: str, name: str, size: int, n: int) -> Model:
    import timm                            # only where its models are timed
    return _pictures(big, title, partial(timm.create_model, name), size, n)


def _in_both_formats(**models: Callable[[bool], Model]) -> dict[str, Callable[[bool], Model]]:
    "Return the models, and each again in the channels last format, as '<name>-cl'."
    def channels_last(make, big):
        model = make(big)
        return model._replace(title=f'{model.title}, channels last', channels_last=True)
    return {name.replace('_', '-') + end: form for name, make in models.items()
            for end, form in (('', make), ('-cl', partial(channels_last, make)))}


# The argument says whether the device is an accelerator: models are larger there.
MODELS: dict[str, Callable[[bool], Model]] = {
    'xresnet18': _xresnet, 'xresnet18-cl': partial(_xresnet, channels_last=True),
    'transformer': _transformer, 'lstm': _lstm,
    'wide-64': partial(_wide, n=64), 'wide-256': partial(_wide, n=256), 'wide-1024': partial(_wide, n=1024),
    'deep': partial(_mlp, title='deep narrow MLP (32 layers of 64)', width=64, depth=32, n=64),
    'tiny': partial(_mlp, title='tiny MLP (the overhead)', width=32, depth=1, n=16),
    'resnet34': partial(_pictures, title='ResNet-34 at 128x128', net=resnet34, size=128, n=16),
    'resnet50': partial(_pictures, title='ResNet-50 at 128x128', net=resnet50, size=128, n=16),
    **_in_both_formats(
        efficientnet_b0=partial(_pictures, title='EfficientNet-B0 at 128x128', net=efficientnet_b0, size=128, n=16),
        mobilenet_v3=partial(_pictures, title='MobileNetV3-Large at 128x128', net=mobilenet_v3_large, size=128, n=16)),
}
if find_spec('timm'): MODELS |= {          # of the extra bench
    'vit-tiny': partial(_timm, title='ViT-Tiny', name='vit_tiny_patch16_224', size=224, n=8),
    **_in_both_formats(
        convnext_atto=partial(_timm, title='ConvNeXt-Atto at 128x128', name='convnext_atto', size=128, n=16),
        mobilevit_s=partial(_timm, title='MobileViT-S at 128x128', name='mobilevit_s', size=128, n=8),
        ghostnet_100=partial(_timm, title='GhostNet at 128x128', name='ghostnet_100', size=128, n=16)),
}
