"""Skipped steps and losses in fp16 by the loss scale to start from. The figures of nbs/how_it_works.md:

    python tests/tools/first_scales.py
"""
from __future__ import annotations

import sys, warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / 'half_weights'))

import fastai.callback.schedule  # noqa: F401  patches fit_one_cycle
import torch
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from quality import TASKS
from torch.utils.data import TensorDataset

import fastxtend_amp  # noqa: F401  patches Learner

SCALES = {'65,536 (default)': 65536., '1,048,576': 2.**20, "'auto'": 'auto'}


def train(task: str, scale: float | str | None, steps: int) -> tuple: # First scale, skipped steps, last smoothed loss
    "The first `steps` steps of a one-cycle schedule with fused AdamW; in fp32 if `scale` is None."
    x, y, model, _, lr = TASKS[task]()
    torch.manual_seed(0)
    dl = DataLoader(TensorDataset(x[:steps * 50], y[:steps * 50]), bs=50, num_workers=0, device='cpu')
    learn = Learner(DataLoaders(dl, dl, device='cpu'), model(), loss_func=CrossEntropyLossFlat(),
                    opt_func=fastxtend_amp.fused(torch.optim.AdamW))
    if scale is not None: learn.to_fp16(init_scale=scale)
    with warnings.catch_warnings(), learn.no_bar(), learn.no_logging():
        warnings.simplefilter('ignore')
        learn.fit_one_cycle(1, lr)
    cb, loss = learn.precision, float(learn.recorder.losses[-1])
    return ('', '', loss) if cb is None else (f'{cb.scales[0]:,.0f}', cb.n_skipped, loss)


if __name__ == '__main__':
    torch.set_num_threads(1)
    for task, steps in (('digits', 28), ('language model', 12)):
        print(f'\n| {task}, {steps} steps | first scale | skipped steps | loss at the end |\n|---|---|---|---|')
        for name, scale in {'fp32': None, **SCALES}.items():
            first, skipped, loss = train(task, scale, steps)
            print(f'| {name} | {first} | {skipped} | {loss:.4f} |', flush=True)
