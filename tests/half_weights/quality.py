"""Does training with half-precision weights end where fp32's does? The table of nbs/half_quality.md:

    python tests/half_weights/quality.py > nbs/half_quality.md
"""
from __future__ import annotations

import importlib.util, platform, random, statistics, time, warnings
from functools import partial
from importlib.metadata import version

import torch
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.optimizer import OptimWrapper
from torch import nn
from torch.utils.data import TensorDataset

import fastxtend_amp  # noqa: F401  patches Learner
from fastxtend_amp.half_weights import kahan

EPS = 1e-5  # of Adam; its second moments, as all of the optimizer's state, are bf16 without masters


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
    "scikit-learn's handwritten digits: inputs, targets, network, epochs, learning rate."
    from sklearn.datasets import load_digits
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32)[:1400] / 16, torch.tensor(data.target)[:1400]
    return x, y, lambda: nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10)), 10, 3e-4


def language_model():
    "Python's own documentation as characters; as `digits`."
    from pydoc_data.topics import topics
    text = ' '.join(topics[k] for k in sorted(topics))[:24_000]
    chars = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.tensor([chars[c] for c in text])
    n = (len(ids) - 1) // 32
    return ids[:n * 32].view(n, 32), ids[1:n * 32 + 1].view(n, 32), lambda: Characters(len(chars)), 8, 3e-3


TASKS = {'digits': digits, 'language model': language_model}
WAYS = {
    'fp32': lambda learn: learn,
    'masters': lambda learn: learn.to_half_weights(),
    'flat masters': lambda learn: learn.to_half_weights(flat_master=True),
    'no masters, Kahan': lambda learn: learn.to_half_weights(master_weights=False),
    'no masters, stochastic rounding': lambda learn: learn.to_half_weights(master_weights=False),
    'no masters, not compensated': lambda learn: learn.to_half_weights(master_weights=False),
}


def stochastic(name='_AdamW', **kwargs):
    "One of torchao's optimizers with stochastic rounding, for `Learner(opt_func=...)`; it wants its learning rate as a tensor, which fastai sets as a number."
    from torchao import optim
    def build(params, lr=1e-3, **more):
        opt = getattr(optim, name)(params, lr=lr, bf16_stochastic_round=True, **{**kwargs, **more})
        def as_tensors(opt, *_):
            for g in opt.param_groups: g['lr'] = torch.as_tensor(g['lr'], dtype=torch.float32)
        opt.register_step_pre_hook(as_tensors)
        return opt
    return partial(OptimWrapper, opt=build)


def final_loss(task: str, way: str, seed: int = 0) -> float:
    "fastai's smoothed training loss at the end of a fit."
    x, y, model, epochs, lr = TASKS[task]()
    torch.manual_seed(seed); random.seed(seed)
    opt = partial(OptimWrapper, opt=torch.optim.AdamW, eps=EPS)
    if way.endswith('Kahan'): opt = kahan('AdamW', betas=(.9, .999), eps=EPS)
    if way.endswith('stochastic rounding'): opt = stochastic(eps=EPS, weight_decay=.01)
    dl = DataLoader(TensorDataset(x, y), bs=50, shuffle=True, num_workers=0, device='cpu')
    learn = WAYS[way](Learner(DataLoaders(dl, dl.new(shuffle=False), device='cpu'), model(), loss_func=CrossEntropyLossFlat(), opt_func=opt))
    # torchao compiles its step, which takes minutes: here it runs as it is
    with warnings.catch_warnings(), learn.no_bar(), learn.no_logging(), torch.compiler.set_stance('force_eager'):
        warnings.simplefilter('ignore')
        learn.fit(epochs, lr)
    return learn.recorder.values[-1][0]


def main(n_seeds: int = 5) -> None:
    start = time.time()
    print("# Half-precision weights: final training loss\n\nAdamW, the same seeds for weights and order of the data in each row; mean, smallest to largest. "
          f"torch {version('torch').split('+')[0]}, fastai {version('fastai')}, torch-optimi {version('torch-optimi')}, Python {platform.python_version()}.\n")
    for task in TASKS:
        print(f'## {task}, {n_seeds} seeds\n\n| weights in bf16 | final loss | smallest to largest | beyond fp32, by seed |\n|---|---|---|---|', flush=True)
        fp32: list[float] = []
        for way in WAYS:
            if way.endswith('stochastic rounding') and importlib.util.find_spec('torchao') is None: continue
            losses = [final_loss(task, way, seed) for seed in range(n_seeds)]
            fp32 = fp32 or losses
            beyond, name = ', '.join(f'{a - b:+.4f}' for a, b in zip(losses, fp32)), way if way != 'fp32' else 'none: fp32'
            print(f'| {name} | {statistics.mean(losses):.4f} | {min(losses):.4f} to {max(losses):.4f} | {beyond} |', flush=True)
        print()
    print(f'{(time.time() - start) / 60:.0f} minutes. `python tests/half_weights/quality.py` prints this.')


if __name__ == '__main__': main()
