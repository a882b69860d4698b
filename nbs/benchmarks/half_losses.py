"""Final training losses with half-precision weights, for nbs/half_quality.md: `python nbs/benchmarks/half_losses.py`.

Needs torch-optimi and scikit-learn; the row of stochastic rounding needs torchao.
"""
from __future__ import annotations

import importlib.util, random, statistics, warnings
from functools import partial

import torch
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import OptimWrapper
from torch import nn
from torch.utils.data import TensorDataset

from fastxtend_amp import kahan

EPS, SEEDS = 1e-5, 5  # Adam's eps: without masters its second moments are bf16


class Characters(nn.Module):
    "A transformer over characters, shape (n, length), that predicts the next one; its head is its embedding."
    def __init__(self, vocab: int, d: int = 32, length: int = 32):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Parameter(torch.randn(length, d) * .02)
        self.enc = nn.TransformerEncoderLayer(d, 2, 2 * d, dropout=0., batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)
        nn.init.normal_(self.emb.weight, std=.05)
        self.head.weight = self.emb.weight
        self.register_buffer('mask', torch.triu(torch.ones(length, length, dtype=torch.bool), 1))
    def forward(self, x): return self.head(self.norm(self.enc(self.emb(x) + self.pos, src_mask=self.mask)))


def digits():
    "Return scikit-learn's handwritten digits: inputs, targets, network, epochs, learning rate."
    from sklearn.datasets import load_digits
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32)[:1400] / 16, torch.tensor(data.target)[:1400]
    return x, y, lambda: nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)), 10, 3e-4


def language_model():
    "Return Python's own documentation as characters; as `digits`."
    from pydoc_data.topics import topics
    text = ' '.join(topics[k] for k in sorted(topics))[:24_000]
    chars = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.tensor([chars[c] for c in text])
    n = (len(ids) - 1) // 32
    return ids[:n * 32].view(n, 32), ids[1:n * 32 + 1].view(n, 32), lambda: Characters(len(chars)), 8, 3e-3


def stochastic(params, lr=1e-3):
    "Build torchao's AdamW with stochastic rounding, whose learning rate is a tensor; fastai sets it as a number."
    from torchao import optim
    opt = optim._AdamW(params, lr=lr, bf16_stochastic_round=True, eps=EPS, weight_decay=.01)
    def as_tensors(opt, *_):
        for g in opt.param_groups: g['lr'] = torch.as_tensor(g['lr'], dtype=torch.float32)
    opt.register_step_pre_hook(as_tensors)
    return opt


ADAMW = partial(OptimWrapper, opt=torch.optim.AdamW, eps=EPS)
NO_MASTERS = dict(master_weights=False)
WAYS = {'none: fp32': (ADAMW, None), 'masters': (ADAMW, {}),
        'no masters, Kahan': (kahan('AdamW', betas=(.9, .999), eps=EPS), NO_MASTERS),
        'no masters, stochastic rounding': (partial(OptimWrapper, opt=stochastic), NO_MASTERS)}


def final_loss(task: tuple, opt: partial, kwargs: dict | None, seed: int) -> float:
    "Return fastai's smoothed training loss at the end of a fit."
    x, y, model, epochs, lr = task
    torch.manual_seed(seed)
    random.seed(seed)
    dl = DataLoader(TensorDataset(x, y), bs=50, shuffle=True, num_workers=0, device='cpu')
    learn = Learner(DataLoaders(dl, dl.new(shuffle=False), device='cpu'), model(), CrossEntropyLossFlat(), opt_func=opt)
    if kwargs is not None: learn.to_half_weights(**kwargs)
    # torchao compiles its step, which takes minutes
    with learn.no_bar(), learn.no_logging(), torch.compiler.set_stance('force_eager'): learn.fit(epochs, lr)
    return learn.recorder.values[-1][0]


if __name__ == '__main__':
    warnings.simplefilter('ignore')
    for make in (digits, language_model):
        print(f'| {make.__name__}: weights in bf16 | final loss | smallest to largest | beyond fp32, by seed |')
        print('|---|---|---|---|')
        task, fp32 = make(), []
        for way, (opt, kwargs) in WAYS.items():
            if 'stochastic' in way and importlib.util.find_spec('torchao') is None: continue
            losses = [final_loss(task, opt, kwargs, seed) for seed in range(SEEDS)]
            fp32 = fp32 or losses
            beyond = ', '.join(f'{a - b:+.4f}' for a, b in zip(losses, fp32))
            mean, low, high = statistics.mean(losses), min(losses), max(losses)
            print(f'| {way} | {mean:.4f} | {low:.4f} to {high:.4f} | {beyond} |', flush=True)
        print()
