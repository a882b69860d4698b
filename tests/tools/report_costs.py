"""Time and memory of `precision_report` on models of ordinary size, beside a training step in fp32.

`python tests/tools/report_costs.py` prints a table. Each model has its own process. It needs Linux, a quiet machine,
and timm for the vision transformer.
"""
from __future__ import annotations

import argparse, re, time, warnings
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset

import fastxtend_amp  # noqa: F401  patches Learner
from fastxtend_amp.mode import AMPMode, mode_support

CE = CrossEntropyLossFlat


def learner(model, x, y, loss=None):
    dl = DataLoader(TensorDataset(x, y), bs=len(x), num_workers=0, device='cpu')
    return Learner(DataLoaders(dl, dl, device='cpu'), model, loss_func=loss or CE())


def pictures(model, n=16, size=64, classes=10):
    return learner(model, torch.randn(n, 3, size, size), torch.randint(0, classes, (n,)))


def xresnet():
    from fastai.vision.models.xresnet import xresnet18
    return pictures(xresnet18(n_out=10))


def unet(): # with a body of fastai's xresnet18
    from fastai.vision.learner import create_unet_model
    from fastai.vision.models.xresnet import xresnet18
    model = create_unet_model(xresnet18, 2, (64, 64), pretrained=False, cut=-4)
    return learner(model, torch.randn(8, 3, 64, 64), torch.randint(0, 2, (8, 64, 64)), CE(axis=1))


def vit():
    import timm
    return pictures(timm.create_model('vit_tiny_patch16_224', img_size=64, num_classes=10))


def awd_lstm():
    from fastai.callback.rnn import rnn_cbs
    from fastai.text.models import AWD_LSTM, get_language_model
    config = dict(emb_sz=100, n_hid=200, n_layers=3, pad_token=1, bidir=False, output_p=.1, hidden_p=.15, input_p=.25,
                  embed_p=.02, weight_p=.2, tie_weights=True, out_bias=True)
    ids = torch.randint(0, 1000, (16, 33))
    learn = learner(get_language_model(AWD_LSTM, 1000, config), ids[:, :-1], ids[:, 1:])
    return learn.add_cbs(rnn_cbs())


def spectral_norm():
    conv = lambda i, o: parametrizations.spectral_norm(nn.Conv2d(i, o, 3, 2, 1))
    body = [m for i, o in ((3, 64), (64, 128), (128, 256)) for m in (conv(i, o), nn.LeakyReLU(.2))]
    return pictures(nn.Sequential(*body, nn.Flatten(), nn.Linear(256 * 8 * 8, 10)))


def thousand():
    layers = [m for _ in range(500) for m in (nn.Linear(64, 64), nn.ReLU())]
    for m in layers[::2]: nn.init.eye_(m.weight)                 # else nothing of the input arrives
    return learner(nn.Sequential(*layers, nn.Linear(64, 10)), torch.randn(64, 64), torch.randint(0, 10, (64,)))


class Tied(nn.Module):
    "Two layers that share a weight, the first called twice; its output is a dataclass."
    def __init__(self):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 10)
        self.b.weight = self.a.weight
    def forward(self, x): return Output(self.head(self.b(self.a(self.a(x).relu())).relu()))


@dataclass
class Output: logits: torch.Tensor


def tied():
    return learner(Tied(), torch.randn(64, 512), torch.randint(0, 10, (64,)), lambda out, y: CE()(out.logits, y))


def compiled():
    learn = xresnet()
    learn.model = torch.compile(learn.model, backend='aot_eager')
    return learn


MODELS = {'xresnet18, 16 x 64x64': xresnet, 'U-Net on xresnet18, 8 x 64x64': unet, 'timm vit_tiny, 16 x 64x64': vit,
          'AWD_LSTM, 16 x 32 tokens': awd_lstm, 'spectral norm, 16 x 64x64': spectral_norm, '1,000 modules': thousand,
          'tied, called twice, dataclass': tied, 'compiled xresnet18': compiled}


def memory(field): # MB, of this process
    return int(re.search(rf'{field}:\s+(\d+)', Path('/proc/self/status').read_text())[1]) / 1024


def extra_memory(f):
    "What `f` returns, its seconds, and the memory that it takes at most beyond what was held before, in MB."
    Path('/proc/self/clear_refs').write_text('5')                # the highest value begins anew
    before, start = memory('VmRSS'), time.perf_counter()
    out = f()
    return out, time.perf_counter() - start, max(memory('VmHWM') - before, 0.)


def step(learn):
    xb, yb = next(iter(learn.dls.train))
    pred = learn.model(xb)
    learn.loss_func(pred[0] if isinstance(pred, tuple) else pred, yb).mean().backward()
    learn.opt.step()
    learn.opt.zero_grad()


def measure(name, what, modes, queue):
    "In a process of its own, so that no memory is there that something else has freed."
    warnings.simplefilter('ignore')
    torch.manual_seed(0)
    learn = MODELS[name]()
    learn.create_opt()
    learn.model.train()
    with learn.no_bar():
        if what == 'report': found, seconds, mb = extra_memory(partial(learn.precision_report, modes, max_seconds=600))
        else:
            found, _, mb = extra_memory(partial(step, learn))    # the first: the optimizer's state is part of it
            seconds = np.median([extra_memory(partial(step, learn))[1] for _ in range(5)])
    verdicts = '' if found is None else ', '.join(f'{m}: {v.verdict}' for m, v in found.verdicts.items())
    queue.put((seconds, mb, len(list(learn.model.modules())), verdicts))


PARTS = 'step', 'report'


def in_a_process(name, what, modes):
    processes = get_context('fork')
    queue = processes.SimpleQueue()
    child = processes.Process(target=measure, args=(name, what, modes, queue))
    child.start()
    child.join()
    if child.exitcode: raise SystemExit(f'{name}, {what}: exit code {child.exitcode}')
    return queue.get()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--models', nargs='+', default=list(MODELS))
    parser.add_argument('--modes', nargs='+', default=['bf16'])
    args = parser.parse_args()
    status = ', '.join(f'{m} {mode_support(AMPMode(m), torch.device("cpu")).status}' for m in args.modes)
    print(f'{status}; {torch.get_num_threads()} threads\n')
    print('| model | modules | a step | report | allowed: 10 steps + 5 s | memory of a step | of the report | verdict |')
    print('|---|---|---|---|---|---|---|---|')
    for name in args.models:
        (a_step, step_mb, *_), (report, report_mb, n, verdicts) = (in_a_process(name, what, args.modes) for what in PARTS)
        print(f'| {name} | {n:,} | {a_step * 1000:,.0f} ms | {report:.1f} s | {10 * a_step + 5:.1f} s | {step_mb:,.0f} MB '
              f'| {report_mb:,.0f} MB | {verdicts} |', flush=True)


if __name__ == '__main__': main()
