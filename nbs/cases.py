"""Public cases in which low precision broke training, and healthy models: the verdicts of the report, as a table.

`python nbs/cases.py` runs all, each in a process of its own, and writes the tables into `benchmarks/cases.md`; it needs
transformers and timm. `python nbs/cases.py NAME ...` prints the rows of some. Each model is built small from the
description in its thread, with random weights of a size at which the thread's values appear.
"""

import math, re, sys, warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import torch
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import fastxtend_amp  # noqa: F401  patches Learner

PAGE = Path(__file__).parent / 'benchmarks' / 'cases.md'
GITHUB = 'https://github.com/'
SAFE: list[str] = []
REGISTER = 'huggingface/transformers#20683'  # which introduced the list `_keep_in_fp32_modules`
D, LENGTH = 16, 32


@dataclass
class Case:
    """A model, what is known of it, and the modules that have to be in fp32, by precision; wildcards are allowed.

    Another verdict than 'keep modules in fp32' and 'safe ...' is expected by its name.
    """
    thread: str # 'owner/repository#number', or where else it is documented
    breaks: str
    remedy: str
    make: Callable # Gives the model
    expected: dict[str, list[str] | str]
    data: Callable = field(default=lambda: torch.randn(8, LENGTH, D))
    loss: Callable = field(default=lambda p, y: F.mse_loss(p, y))
    targets: Callable = field(default=lambda x: x.flatten(1)[:, :1])
    library: bool = False # Whether it needs transformers or timm
    n_batches: int = 6 # As many as the report compares gradients of
    rules: str | None = None # 'cuda' for what breaks only with CUDA's autocast rules

    def learner(self, n_batches: int | None = None) -> Learner: # The case's own number of batches if None
        torch.manual_seed(0)
        xs = [self.data() for _ in range(n_batches or self.n_batches)]
        data = TensorDataset(torch.cat(xs), torch.cat([*map(self.targets, xs)]))
        dl = DataLoader(data, bs=len(xs[0]), num_workers=0, device=torch.device('cpu'))
        torch.manual_seed(1)
        learn = Learner(DataLoaders(dl, dl, device=torch.device('cpu')), self.make(), self.loss, lr=1e-4)
        learn.remove_cbs([cb for cb in learn.cbs if type(cb).__name__ == 'ProgressCallback'])
        return learn

    def report(self, device: str | None = None): # With the case's own rules if None
        return self.learner().precision_report(max_seconds=600, device=device or self.rules)

    def is_right(self, verdict) -> bool:
        "Return whether a verdict names the modules that are expected, and no other."
        expected = self.expected[verdict.precision]
        if isinstance(expected, str): return verdict.verdict == expected
        named = [any(re.fullmatch(e, m) for e in expected) for m in verdict.modules]
        found = [any(re.fullmatch(e, m) for m in verdict.modules) for e in expected]
        return all(named) and all(found) and (bool(expected) or verdict.is_safe)


class Model(nn.Module):
    "An embedding, the module in question under its name, and a head."
    def __init__(self, name, module, n_in=D, n_out=D):
        super().__init__()
        self.embed, self.name = nn.Linear(n_in, D), name
        self.add_module(name, module)
        self.head = nn.Linear(n_out, 1)

    def forward(self, x):
        x = self.get_submodule(self.name)(self.embed(x))
        return self.head(x.mean(1) if x.ndim == 3 else x)


# -- values above 65,504


class FeedForward(nn.Module):
    "T5's: the last linear layer, `wo`, gives values of 1e5 and more, which the next norm makes small again."
    def __init__(self, size=3e5):
        super().__init__()
        self.wi, self.wo, self.norm = nn.Linear(D, 4 * D), nn.Linear(4 * D, D), nn.LayerNorm(D)
        with torch.no_grad(): self.wo.weight *= size

    def forward(self, x): return self.norm(self.wo(self.wi(x).relu()))


class ResidualLayer(nn.Module):
    "A layer that adds to one channel of the hidden states, before which only its own input is normalized."
    def __init__(self, size=1.2e4):
        super().__init__()
        self.norm, self.wi, self.wo = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        with torch.no_grad(): self.wo.bias[0] = size

    def forward(self, x): return x + self.wo(self.wi(self.norm(x)).relu())


class RelativeAttention(nn.Module):
    "Scores are the sum of two products, of contents and of positions, and are divided by the width only then."
    def __init__(self, gain=140.):
        super().__init__()
        self.q, self.k, self.v, self.p = (nn.Linear(D, D) for _ in range(4))
        self.place, self.gain = nn.Parameter(torch.randn(LENGTH, D)), gain

    def forward(self, x):
        q, k, p = self.q(x) * self.gain, self.k(x) * self.gain, self.p(self.place) * self.gain
        scores = (q @ k.transpose(-1, -2) + q @ p.T) / math.sqrt(D) / self.gain
        return (scores / self.gain).softmax(-1) @ self.v(x)


class SumOfKeys(nn.Module):
    "Linear attention: keys, which are positive, are summed over the sequence before the division."
    def __init__(self, gain=60.):
        super().__init__()
        self.q, self.k, self.v, self.gain = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D), gain

    def forward(self, x):
        q, k = (F.elu(f(x) * self.gain) + 1 for f in (self.q, self.k))
        z = 1 / ((q * k.sum(1, keepdim=True)).sum(-1, keepdim=True) + 1e-6)
        return q @ (k.transpose(1, 2) @ self.v(x)) * z


class PlainRMSNorm(nn.Module):
    "RMSNorm without a cast to fp32: squares of values above 256 are inf in fp16."
    def __init__(self, gain=1.):
        super().__init__()
        self.weight, self.gain = nn.Parameter(torch.ones(D)), gain

    def forward(self, x):
        x = x * self.gain
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class InstanceNorm(nn.Module):
    "Instance normalization without a cast to fp32: the variance of values around 512 is above 65,504."
    def forward(self, x):
        x = x * 512
        return (x - x.mean(1, keepdim=True)) * torch.rsqrt(x.var(1, keepdim=True) + 1e-5)


class Quantize(nn.Module):
    "A codebook's nearest entries, by squared distances; the gradient passes them by."
    def __init__(self, size):
        super().__init__()
        self.size, self.entries = size, nn.Parameter(torch.randn(D, 64))

    def forward(self, x):
        flat, entries = x * self.size, self.entries * self.size
        distances = flat.pow(2).sum(-1, keepdim=True) - 2 * flat @ entries + entries.pow(2).sum(0)
        chosen = self.entries.T[distances.argmin(-1)]
        return x + (chosen - x).detach() + ((chosen - x.detach()) ** 2).mean()


class Density(nn.Module):
    "A radiance field: entries of an encoding that have grown to 1e4 overflow in the layer before the density."
    def __init__(self):
        super().__init__()
        self.encoding = nn.Parameter(3e3 * torch.randn(D))
        self.hidden, self.density = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)
        with torch.no_grad(): self.hidden.weight /= 9; self.density.weight *= 1000

    def forward(self, x):
        density = F.softplus(self.density(self.hidden(x * self.encoding).relu()))
        return 1 - (-1e-6 * density).exp()


class Prototypes(nn.Module):
    "SwAV's loss, of features that are not normalized: a score above 4.4 gives a sum of infinity, in fp32 as well."
    def __init__(self, n=300):
        super().__init__()
        self.scores = nn.Linear(D, n, bias=False)

    def forward(self, x):
        scores = self.scores(x.mean(1) * 30)
        with torch.no_grad():
            codes = (scores / .05).exp()
            codes = codes / codes.sum()
        return -(codes * (scores / .1).log_softmax(-1)).sum(-1, keepdim=True)


# -- constants and masks that fp16 does not have


class Performer(nn.Module):
    "A kernel of exponentials, each far below 1; 1e-8 keeps their sum from 0, but not in fp16."
    def __init__(self, n=8):
        super().__init__()
        self.k, self.q, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.register_buffer('w', torch.linalg.qr(torch.randn(D, n))[0].T * math.sqrt(n))

    def features(self, x):
        half = (x * x).sum(-1, keepdim=True) / 2
        return torch.exp(x @ self.w.T - half) / math.sqrt(len(self.w))

    def forward(self, x):
        k, q = self.features(self.k(x) * 4), self.features(self.q(x) * 4)
        total = (q * k.sum(1, keepdim=True)).sum(-1, keepdim=True)
        return q @ (k.transpose(1, 2) @ self.v(x)) / (total + 1e-8)


class MinMax(nn.Module):
    "Scores are put between 0 and 1; where all are equal 1e-8 keeps the division from 0 / 0, but not in fp16."
    def forward(self, x):
        scores = (x @ x.transpose(1, 2)).diagonal(dim1=1, dim2=2)
        low, high = scores.amin(-1, keepdim=True), scores.amax(-1, keepdim=True)
        return ((scores - low) / (high - low + 1e-8))[..., :D]


class FilledAttention(nn.Module):
    "Attention whose mask is filled with a number."
    def __init__(self, fill):
        super().__init__()
        self.q, self.k, self.v, self.fill = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D), fill

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(1, 2) / math.sqrt(D)
        return self.fill(scores, torch.ones_like(scores, dtype=torch.bool).triu(1)).softmax(-1) @ self.v(x)


def dice(p, y):
    p, y = p.sigmoid(), y.expand_as(p)
    return 1 - 2 * (p * y).sum() / (p.sum() + y.sum())


class ReluAttention(nn.Module):
    "EfficientViT's attention: 1e-15 keeps the sum of the positive keys from 0, but not in fp16."
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, 2), nn.Linear(D, 2), nn.Linear(D, D)

    def forward(self, x):
        q, k = self.q(x).relu(), self.k(x).relu()
        total = (q * k.sum(1, keepdim=True)).sum(-1, keepdim=True)
        return q @ (k.transpose(1, 2) @ self.v(x)) / (total + 1e-15)


class EdgeLoss(nn.Module):
    "A graph autoencoder's loss of edges that are not there: 1e-15 keeps a log from 0, but not in fp16."
    def forward(self, x):
        a, b = x.chunk(2, -1)
        return -(1 - (30 * (a * b).sum(-1)).sigmoid() + 1e-15).log().mean(1, keepdim=True)


class SaturatedLog(nn.Module):
    "The log of what is left of a probability; a bound of 1 - 1e-4 keeps that from 0, but is 1 in 16 bits."
    def forward(self, x): return (1 - (x * 30).sigmoid().clamp(1e-4, 1 - 1e-4)).log()


class FrozenNorm(nn.Module):
    "A frozen normalization without epsilon; the variance of dead filters is 0 in fp16."
    def __init__(self):
        super().__init__()
        self.register_buffer('var', torch.ones(D))
        self.var[:2] = 1e-9

    def forward(self, x): return x * (self.var > 1e-6) * self.var.to(x.dtype).rsqrt()


class ArcMargin(nn.Module):
    "ArcFace's logits: a cosine that rounds to 1 gives the sine, sqrt(1 - cos^2), an infinite gradient."
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8, D) / 2)

    def forward(self, x):
        cos = F.linear(F.normalize(x), F.normalize(self.weight))
        return 4 * (cos * math.cos(.5) - (1 - cos * cos).sqrt() * math.sin(.5))


class Faces(nn.Module):
    "A body that starts as the identity, and ArcFace's logits."
    def __init__(self):
        super().__init__()
        self.body, self.arc = nn.Linear(D, D, bias=False), ArcMargin()
        nn.init.eye_(self.body.weight)

    def forward(self, x): return self.arc(self.body(x))


# -- digits that bf16 does not have


class FiniteScalars(nn.Module):
    "FSQ: each value is rounded to one of 4,001 levels; the gradient passes the rounding by."
    def forward(self, x):
        x = x.tanh() * 2000
        return (x + (x.round() - x).detach()) / 2000


class Keypoints(nn.Module):
    "The expected place, in pixels, of a peak in a row of 512; the target is a pixel."
    def __init__(self, n=512):
        super().__init__()
        self.scores = nn.Linear(D, n)

    def forward(self, x):
        p = self.scores(x.mean(1)).softmax(-1)
        return (p * torch.arange(p.shape[1], dtype=p.dtype)).sum(-1, keepdim=True)


class Rotary(nn.Module):
    "Angles are positions times frequencies, by a matrix product, which autocast runs in low precision."
    def __init__(self, length=LENGTH, first=0):
        super().__init__()
        self.register_buffer('frequencies', 10000. ** (-torch.arange(0, D, 2) / D))
        self.first = first

    def forward(self, x):
        at = torch.arange(x.shape[1], dtype=torch.float32)[:, None] + self.first
        angles = at @ self.frequencies[None]
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Unscaled(nn.Module):
    "A forecast is put back to the level of its series, and cast to the dtype that the layers compute in."
    def __init__(self):
        super().__init__()
        self.layer, self.unscale = nn.Linear(LENGTH, 1), Unscale()

    def forward(self, x):
        level, spread = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return self.unscale(self.layer((x - level) / spread), level, spread)


class Unscale(nn.Module):
    def forward(self, y, level, spread): return (y * spread + level).to(y.dtype)


class Forces(nn.Module):
    "Forces are the gradient of an energy, which the model computes itself."
    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(D, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            return -torch.autograd.grad(self.energy(x).float().sum(), x, create_graph=True)[0].flatten(1)


class FourierFeatures(nn.Module):
    "Coordinates in [-1, 1], as sines and cosines of high frequencies."
    def __init__(self, size=60.):
        super().__init__()
        self.register_buffer('b', torch.randn(2, D // 2) * size)

    def forward(self, x): return torch.cat([(x @ self.b).sin(), (x @ self.b).cos()], -1)


class Coordinates(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.body, self.head = FourierFeatures(), nn.Linear(D, D), nn.Linear(D, 1)

    def forward(self, x): return self.head(self.body(self.encode(x)).relu())


class Distances(nn.Module):
    "Distances to centres that are close together and far from 0, as x2 + c2 - 2xc, then a square root."
    def __init__(self, far):
        super().__init__()
        self.centres = nn.Parameter(far + torch.randn(D, D))
        self.far = far

    def forward(self, x):
        x = x + self.far
        squares = x.pow(2).sum(-1, keepdim=True) + self.centres.pow(2).sum(-1) - 2 * x @ self.centres.T
        return squares.clamp(min=1e-6).sqrt()


class Timesteps(nn.Module):
    "Adds the cosines of timesteps up to 1,000, which are cast to the dtype of the input."
    def __init__(self):
        super().__init__()
        self.register_buffer('steps', torch.arange(1000, 1000 - LENGTH, -1))

    def forward(self, x): return x + (self.steps.to(x.dtype)[:, None] / 100).cos()


class RunningMean(nn.Module):
    "The mean of 1,000 values near 1, by a sum in a loop: from 256 on bf16 cannot add 1."
    def forward(self, x):
        x, total = 1 + x / 100, torch.zeros_like(x[:, 0])
        for i in range(1000): total = total + x[:, i % LENGTH]
        return total / 1000


class Sparsemax(nn.Module):
    "Whole numbers up to 400 count how many values are kept: few, so it does not matter that bf16 rounds the others."
    def forward(self, x):
        ordered, n = x.sort(-1, descending=True).values, torch.arange(1, x.shape[-1] + 1, device=x.device).to(x.dtype)
        total = ordered.cumsum(-1) - 1
        kept = (n * ordered > total).sum(-1, keepdim=True)
        return (x - total.gather(-1, kept - 1) / kept).relu()


class Coupling(nn.Module):
    "An affine coupling layer of a normalizing flow: half of the values scale and shift the other half."
    def __init__(self, swap):
        super().__init__()
        self.net, self.swap = nn.Sequential(nn.Linear(D // 2, 32), nn.Tanh(), nn.Linear(32, D)), swap

    def forward(self, x):
        a, b = x.chunk(2, -1)
        if self.swap: a, b = b, a
        log_scale, shift = self.net(a).chunk(2, -1)
        log_scale = log_scale.tanh()
        return torch.cat([a, b * log_scale.exp() + shift], -1), log_scale.sum(-1)


class Flow(nn.Module):
    "A normalizing flow on whitened samples; its output is the negative log likelihood of each."
    def __init__(self, n=6):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(i % 2) for i in range(n))

    def forward(self, x):
        total = 0.
        for layer in self.layers:
            x, log_det = layer(x)
            total = total + log_det
        return x.pow(2).sum(-1) / 2 - total


# -- sums and layers that grow


class Smoothed(nn.Module):
    "A smoothed cross entropy: the negative log probabilities of a vocabulary are summed before they are weighted."
    def __init__(self, n=8000):
        super().__init__()
        self.logits, self.n = nn.Linear(D, n), n

    def forward(self, x):
        losses = -self.logits(x.mean(1)).log_softmax(-1)
        return .9 * losses[:, :1] + .1 / self.n * losses.sum(-1, keepdim=True)


class Doubled(nn.Linear):
    "A layer whose residual is added twice, so that hidden states double."
    def forward(self, x): return x + (x + super().forward(x))


# -- operators that exist in fp32 only, which CUDA's autocast does not cast


class Clipped(nn.Module):
    "Values are clipped at a quantile."
    def forward(self, x): return x.minimum(x.flatten(1).quantile(.95, dim=1)[:, None, None])


class Whitened(nn.Module):
    "Values times the inverse of a covariance."
    def forward(self, x): return x @ (x.transpose(1, 2) @ x + torch.eye(D, dtype=x.dtype)).inverse()


def reverse_kl(p, y, temperature=.05):
    return F.kl_div((y / temperature).log_softmax(-1), (p / temperature).softmax(-1), reduction='batchmean')


# -- models of libraries, from their configurations


def pictures(): return torch.randn(8, 3, 64, 64)             # of 2, batch normalization amplifies any rounding


def of_timm(name, **kwargs):
    def make(): return __import__('timm').create_model(name, num_classes=1, **kwargs)
    return Case('timm', '', '', make, {'bf16': SAFE, 'fp16': SAFE}, pictures, library=True)


class Logits(nn.Module):
    "The logits of a model of transformers, which gets its decoder's input as well if it has one."
    def __init__(self, model, **given):
        super().__init__()
        self.model, self.given = model, given

    def forward(self, ids):
        given = {'decoder_input_ids': ids} if self.model.config.is_encoder_decoder else {}
        return self.model(ids, **given, **self.given).logits


def of_transformers(config, model, thread='transformers', breaks='', remedy='', fp16=SAFE, change=None, **kwargs):
    def make():
        import transformers
        made = getattr(transformers, model)(getattr(transformers, config)(**kwargs))
        if change is not None: change(made)
        return Logits(made)
    return Case(thread, breaks, remedy, make, {'bf16': SAFE, 'fp16': fp16}, lambda: torch.randint(1, 60, (2, 24)),
                lambda p, y: F.cross_entropy(p.flatten(0, 1), y.flatten()), lambda x: x, library=True)


def loud_wo(model):
    "Give the layers `wo` outputs of the size that is documented for trained weights."
    with torch.no_grad():
        for name, m in model.named_modules():
            if name.endswith('.wo'): m.weight *= 1e6


SMALL_T5 = dict(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.,
                decoder_start_token_id=0)
WO = [r'model\..*\.wo']


def t5(config, model, **kwargs):
    return of_transformers(config, model, REGISTER, '`wo` gives values above 65,504', '`wo` in fp32', WO, loud_wo,
                           **SMALL_T5, **kwargs)


EXPERTS = dict(moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, num_key_value_heads=4)
SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)

CASES = {
    'T5, feed-forward': Case(
        'huggingface/transformers#9295', '`wo` gives values above 65,504', '`wo` in fp32 (#20683)',
        lambda: Model('ff', FeedForward()), {'bf16': SAFE, 'fp16': ['ff.wo']}),
    'T5, one value': Case(
        'huggingface/transformers#5651', 'one output of `wo` is just above 65,504', '`wo` in fp32 (#20683)',
        lambda: Model('ff', FeedForward(117_972.)), {'bf16': SAFE, 'fp16': ['ff.wo']}),
    'LongT5, hidden states': Case(
        'huggingface/transformers#19229', 'the sums of hidden states and feed-forward outputs overflow',
        'clamp the sums', lambda: Model('layers', nn.Sequential(*(ResidualLayer() for _ in range(6)), nn.LayerNorm(D))),
        {'bf16': SAFE, 'fp16': [r'layers\.[1-5]']}),
    'wenet, relative positions': Case(
        'wenet-e2e/wenet#891', 'the sum of two products of scores overflows', 'smaller scores, by two methods',
        lambda: Model('attention', RelativeAttention()), {'bf16': SAFE, 'fp16': ['attention']}),
    'linear attention': Case(
        'idiap/fast-transformers#32', 'the sum of the keys over the sequence overflows', 'attention in fp32',
        lambda: Model('attention', SumOfKeys()), {'bf16': SAFE, 'fp16': ['attention']}),
    'RMSNorm without a cast': Case(
        'pytorch/pytorch#134106', 'squares of values above 256 overflow', 'compute the norm in fp32',
        lambda: Model('norm', PlainRMSNorm(600.)), {'bf16': SAFE, 'fp16': ['norm']}),
    'MLX, instance norm': Case(
        'ml-explore/mlx#4228', 'the variance of a feature map overflows: the norm gives 0', 'statistics in fp32',
        lambda: Model('norm', InstanceNorm()), {'bf16': SAFE, 'fp16': ['norm']}),
    'VQ-VAE, large latents': Case(
        'rosinality/vq-vae-2-pytorch#65', 'squared distances overflow', 'the whole quantizer in fp32',
        lambda: Model('quantize', Quantize(300.)), {'bf16': SAFE, 'fp16': ['quantize']}),
    'instant-ngp, density': Case(
        'nerfstudio-project/nerfstudio#104', 'values of an encoding grow to 1e4, and the density overflows',
        'a truncated exponential in fp32', lambda: Model('field', Density()),
        {'bf16': SAFE, 'fp16': [r'field(\.density)?']}),
    'SwAV, no normalization': Case(
        'facebookresearch/swav#67', 'the sum of exponentials is infinite in fp32 as well', 'normalized features',
        Prototypes, {'bf16': 'not known', 'fp16': 'not known'}),
    'T2T-ViT, performer': Case(
        'yitu-opensource/T2T-ViT#65', '1e-8 is 0: a division by 0', 'the attention in fp32, or a larger constant',
        lambda: Model('attention', Performer()), {'bf16': SAFE, 'fp16': ['attention']}),
    'EfficientViT': Case(
        'mit-han-lab/efficientvit#110', '1e-15 is 0: 0 / 0 where no key is positive', 'q, k and v in fp32, or bf16',
        lambda: Model('attention', ReluAttention()), {'bf16': SAFE, 'fp16': ['attention']}),
    'graph autoencoder': Case(
        'pyg-team/pytorch_geometric#2106', '1e-15 is 0: a log of 0', 'a constant that fp16 has',
        lambda: Model('edges', EdgeLoss(), n_out=1), {'bf16': ['edges'], 'fp16': ['edges']}),
    'PyLate, distillation': Case(
        'lightonai/pylate#239', '1e-8 is 0: 0 / 0 where all scores are equal', 'a constant that fp16 has',
        lambda: Model('normalize', MinMax(), n_in=D), {'bf16': SAFE, 'fp16': ['normalize']},
        lambda: torch.randn(8, 1, D).expand(8, LENGTH, D).contiguous(),
        n_batches=1),                                            # its gradients in fp32 are nothing but rounding errors
    'darts, TFT': Case(
        'unit8co/darts#3081', '`masked_fill` with -1e9 raises an error', '`torch.finfo(x.dtype).min`',
        lambda: Model('attention', FilledAttention(lambda s, m: s.masked_fill(m, -1e9))),
        {'bf16': SAFE, 'fp16': ['attention']}),
    'Dice loss': Case(
        'qubvel-org/segmentation_models.pytorch#463', 'a sum over 512 x 512 pixels overflows', 'the loss in fp32, as '
        'fastxtend_amp computes it',
        lambda: nn.Conv2d(1, 1, 3, padding=1), {'bf16': SAFE, 'fp16': SAFE},
        lambda: torch.randn(2, 1, 512, 512) * torch.rand(2, 1, 1, 1), dice, lambda x: torch.ones(2, 1, 1, 1)),
    'ArcFace': Case(
        'deepinsight/insightface#2200', 'a cosine rounds to 1: its sine has an infinite gradient', 'the margin in fp32',
        Faces, {'bf16': ['arc'], 'fp16': ['arc']}, lambda: torch.eye(8, D) + torch.randn(8, D) / 100, F.cross_entropy,
        lambda x: x.argmax(1)),
    'rotary embedding': Case(
        'huggingface/transformers#29285', 'positions are rounded, and with them the angles', 'angles in fp32',
        lambda: Model('rotary', Rotary(first=4000)), {'bf16': ['rotary'], 'fp16': ['rotary']}),
    'Ideogram4, positions': Case(
        'huggingface/diffusers#13920', 'positions from 65,536 on become equal in bf16, and inf in fp16',
        'angles in fp32 (#13922)', lambda: Model('rotary', Rotary(first=65536)),
        {'bf16': ['rotary'], 'fp16': ['rotary']}),
    'Chronos, unscaling': Case(
        'amazon-science/chronos-forecasting#532', 'a forecast near 10,000 is rounded to whole tens', 'unscale in fp32',
        Unscaled, {'bf16': ['unscale'], 'fp16': SAFE},
        lambda: 1e4 + 20 * torch.randn(64, LENGTH).cumsum(-1), targets=lambda x: 2 * x[:, -1:] - x[:, -2:-1]),
    'coordinates': Case(
        'electronmicroscopy/quantem#280', 'coordinates are rounded before their sines', 'coordinates in fp32',
        Coordinates, {'bf16': ['encode'], 'fp16': SAFE}, lambda: torch.rand(64, 2) * 2 - 1),
    'distances': Case(
        'lucidrains/vector-quantize-pytorch#106', 'x² + y² - 2xy cancels, and is negative', 'distances in fp32',
        lambda: Model('distances', Distances(30.)), {'bf16': ['distances'], 'fp16': ['distances']}),
    'FSQ': Case(
        'lucidrains/vector-quantize-pytorch#144', 'levels are closer than the numbers of bf16', 'quantizer in fp32',
        lambda: Model('quantize', FiniteScalars()), {'bf16': ['quantize'], 'fp16': SAFE}),
    'key points': Case(
        'kornia/kornia#2947', 'positions are rounded to whole pixels or worse', 'coordinates in fp32',
        lambda: Keypoints(), {'bf16': ['scores'], 'fp16': SAFE}, targets=lambda x: torch.full((len(x), 1), 255.)),
    'clamp at 1 - 1e-4': Case(
        'zylo117/Yet-Another-EfficientDet-Pytorch#502', '1 - 1e-4 is 1: a log of 0', 'a larger margin, 5e-3',
        lambda: Model('log', SaturatedLog()), {'bf16': ['log'], 'fp16': ['log']}),
    'label smoothing': Case(
        'huggingface/transformers#10674', 'the sum of log probabilities of a vocabulary overflows',
        'the sum in fp32 (#10815)',
        lambda: Model('loss', Smoothed(), n_out=1), {'bf16': SAFE, 'fp16': ['loss']}),
    'Vim, doubled residual': Case(
        'hustvl/Vim#30', 'hidden states double in each layer', 'bf16, or one residual',
        lambda: Model('layers', nn.Sequential(*(Doubled(D, D) for _ in range(18)), nn.LayerNorm(D))),
        {'bf16': SAFE, 'fp16': [r'layers\.\d+']}),
    'dead filters': Case(
        'pytorch/vision#2599', 'a variance of 1e-9 is 0: 0 / 0', 'an epsilon',
        lambda: Model('norm', FrozenNorm()), {'bf16': SAFE, 'fp16': ['norm']}),
    'timesteps': Case(
        'modelscope/DiffSynth-Studio#562', 'timesteps 998 and 1000 become equal', 'timesteps in fp32',
        lambda: Model('time', Timesteps()), {'bf16': ['time'], 'fp16': SAFE}),
    'mean of 1,000': Case(
        'pytorch/xla#2425', 'a running sum stays at 256', 'sums in fp32',
        lambda: Model('mean', RunningMean()), {'bf16': ['mean'], 'fp16': SAFE}),
    'reverse KL': Case(
        'MakazhanAlpamys/Soup#719', 'probabilities are 0 in fp32 as well', 'log probabilities (#736)',
        lambda: nn.Linear(D, D), {'bf16': 'not known', 'fp16': 'not known'}, lambda: torch.randn(8, D) * 30, reverse_kl,
        lambda x: x.roll(1, 0)),
    'quantile, on CUDA': Case(
        'pytorch/pytorch#91156', '`quantile` accepts fp32 and fp64 only', '`quantile` of `.float()`',
        lambda: Model('clip', Clipped()), {'bf16': ['clip'], 'fp16': ['clip']}, rules='cuda'),
    'inverse, on CUDA': Case(
        'pytorch/pytorch#40427', '`inverse` has no 16-bit kernel', '`inverse` of `.float()`',
        lambda: Model('whiten', Whitened()), {'bf16': ['whiten'], 'fp16': ['whiten']}, rules='cuda'),
    'T5': t5('T5Config', 'T5ForConditionalGeneration'),
    'mT5': t5('MT5Config', 'MT5ForConditionalGeneration', feed_forward_proj='gated-gelu'),
    'UMT5': t5('UMT5Config', 'UMT5ForConditionalGeneration', feed_forward_proj='gated-gelu'),
    'LongT5': of_transformers(
        'LongT5Config', 'LongT5ForConditionalGeneration', 'huggingface/transformers#17978', 'masks of -1e10 are -inf: '
        'NaN where a whole row is masked', 'clamp hidden states (#19229)', [r'.*LocalSelfAttention'], **SMALL_T5),
    # healthy
    'forces, DeePMD': Case(
        'deepmodeling/deepmd-kit#4741', '', '', Forces, {'bf16': SAFE, 'fp16': SAFE}, lambda: torch.randn(64, D),
        targets=lambda x: -x.sin()),
    'flowMC, a normalizing flow': Case(
        'kazewong/flowMC#170', '', '', Flow, {'bf16': SAFE, 'fp16': SAFE}, lambda: torch.randn(64, D),
        lambda p, y: p.mean()),
    'sparsemax, 400 classes': Case(
        'deep-spin/entmax#31', '', '', lambda: Model('gate', nn.Sequential(nn.Linear(D, 400), Sparsemax()), n_out=400),
        {'bf16': SAFE, 'fp16': SAFE}),
    'mask: finfo.min': Case(
        'huggingface/transformers#17306', '', '', lambda: Model('attention', FilledAttention(
            lambda s, m: torch.where(m, torch.finfo(s.dtype).min, s))), {'bf16': SAFE, 'fp16': SAFE}),
    'mask: minus 1e30': Case(
        'NVIDIA/apex#93', '', '', lambda: Model('attention', FilledAttention(lambda s, m: s - 1e30 * m.to(s.dtype))),
        {'bf16': SAFE, 'fp16': SAFE}),
    'RMSNorm, small values': Case(
        'pytorch/pytorch#134106', '', '', lambda: Model('norm', PlainRMSNorm(1.)), {'bf16': SAFE, 'fp16': SAFE}),
    'rotary embedding, 32 positions': Case(
        'huggingface/transformers#29285', '', '', lambda: Model('rotary', Rotary()), {'bf16': SAFE, 'fp16': SAFE}),
    'BERT': of_transformers('BertConfig', 'BertForMaskedLM', **SMALL),
    'GPT-2': of_transformers('GPT2Config', 'GPT2LMHeadModel', vocab_size=64, n_embd=32, n_layer=2, n_head=4),
    'Llama': of_transformers('LlamaConfig', 'LlamaForCausalLM', **SMALL),
    'T5, random weights': of_transformers('T5Config', 'T5ForConditionalGeneration', **SMALL_T5),
    'XLNet': of_transformers('XLNetConfig', 'XLNetLMHeadModel', vocab_size=64, d_model=32, n_layer=2, n_head=4,
                             d_inner=64),
    'DeepSeek-V3': of_transformers('DeepseekV3Config', 'DeepseekV3ForCausalLM', REGISTER, **SMALL, **EXPERTS,
                                   q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
                                   v_head_dim=8, n_group=2, topk_group=1, first_k_dense_replace=1),
    'GPT-OSS': of_transformers('GptOssConfig', 'GptOssForCausalLM', REGISTER, **SMALL, head_dim=8,
                               num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2),
    'RWKV': of_transformers('RwkvConfig', 'RwkvForCausalLM', REGISTER, vocab_size=64, hidden_size=32,
                            num_hidden_layers=2, context_length=32, use_cache=False),
    **{name: of_timm(name, **kwargs) for name, kwargs in {
        'resnet18': {}, 'vit_tiny_patch16_224': {'img_size': 64}, 'convnext_atto': {}, 'mobilenetv3_small_100': {},
        'cait_xxs24_224': {'img_size': 64}, 'swinv2_cr_tiny_224': {'img_size': 64}, 'efficientvit_b0': {},
        'csatv2': {}, 'mobilenetv2_050': {}, 'fbnetc_100': {}}.items()},
}


def lost(case: Case, call: str, n: int = 8) -> int: # Of `n` steps
    "Train for some steps after a call; return how many were skipped, or had a loss that was not finite."
    learn = case.learner(1)
    exec(call, {'learn': learn})
    learn.mixed_precision.on_overflow = 'ignore'
    try:
        with learn.no_logging(): learn.fit(n)
    except RuntimeError: return n                                # it does not run in this precision
    return max(sum(learn.mixed_precision.skips), sum(not math.isfinite(l) for l in map(float, learn.recorder.losses)))


def words(v) -> str:
    "Return a verdict in a few words, with the names of its modules."
    last = sorted({m.rpartition('.')[2] for m in v.modules})
    names = ', '.join(f'`{m}`' for m in last) + f' ({len(v.modules)})' * (len(v.modules) > len(last))
    if v.is_safe: return 'safe'
    text = f'{names} in fp32' if v.verdict == 'keep modules in fp32' else f'{v.verdict}: {names}'
    return text.removesuffix(': ')


def link(name: str, case: Case) -> str:
    "Return the name as a link to the thread."
    where, _, number = case.thread.partition('#')
    return f'[{name}]({GITHUB}{where}/issues/{number})' if number else f'{name} ({case.thread})'


def alone(f: Callable, names: list[str]) -> Iterator:
    "Return what `f` gives for each case, each in a fresh process with one thread."
    quiet = dict(initializer=_start, maxtasksperchild=1)
    with get_context('spawn').Pool(1, **quiet) as pool: yield from pool.imap(f, names)


def _start():
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')


def row(name: str) -> tuple[str, int, int, tuple]: # The row, or for a healthy model the item of a list
    "Report on a case in bf16 and fp16; count right verdicts, false alarms, and steps lost without and with the call."
    case = CASES[name]
    verdicts = [*case.report().verdicts.values()]
    said, right, alarms = [], 0, 0
    for v in verdicts:
        ok = case.is_right(v)
        right, alarms = right + ok, alarms + (not ok and not case.expected[v.precision])
        said.append(words(v) if ok else f'{words(v)} (**wrong**)')
    if not case.breaks:
        others = [f'{v.precision}: {text}' for v, text in zip(verdicts, said) if not v.is_safe]
        return ', '.join([f'- {link(name, case)}', *others]), right, alarms, ()
    steps: tuple = ()
    if isinstance(case.expected['fp16'], list) and case.expected['fp16'] and not case.rules:
        call = next(v.call for v in verdicts if v.precision == 'fp16')
        steps = lost(case, 'learn.to_fp16()'), lost(case, call)
    return ' | '.join(['', link(name, case), case.breaks, case.remedy, *said, '']).strip(), right, alarms, steps


def tables(names: list[str]) -> str:
    "Return a line that sums up all cases, the table of those that break, and the list of healthy models."
    rows: dict[bool, list[str]] = {True: [], False: []}
    right = alarms = 0
    steps = []
    for name, (text, r, a, both) in zip(names, alone(row, names)):
        print(text, *both, flush=True)
        rows[bool(CASES[name].breaks)].append(text)
        right, alarms = right + r, alarms + a
        if both: steps.append(both)
    head = ['| case and thread | what breaks in fp16 or bf16 | known fix | bf16 | fp16 |', '|---|---|---|---|---|']
    lose, still = sum(plain > 0 for plain, _ in steps), sum(call > 0 for _, call in steps)
    trained = (f'{len(steps)} of the models were trained for 8 steps in fp16: {lose} lost steps, and {still} with the '
               'printed call. A step is lost if it is skipped or its loss is not finite.')
    version = torch.__version__.partition('+')[0]
    total = f'{right} of {2 * len(names)} verdicts are right, {alarms} are false alarms (PyTorch {version}, on a CPU).'
    healthy = 'Healthy models, safe in bf16 and fp16 unless another verdict is given:'
    return '\n'.join([total, '', trained, '', *head, *rows[True], '', healthy, '', *rows[False]])


def differing(name: str) -> list[str]: # Rows
    "Return the verdicts on a case that are others with CUDA's autocast rules."
    case = CASES[name]
    cpu, cuda = (case.report(d).verdicts for d in ('cpu', 'cuda'))
    rows = []
    for precision, v in cuda.items():
        own = cpu[precision]
        if words(v) == words(own): continue
        rows.append(f'| {link(name, case)} | {precision} | {words(own)} | {words(v)} |')
    return rows


def under_cuda_rules(names: list[str]) -> str:
    "Return a table of the verdicts that are others with CUDA's autocast rules, and a line that sums them up."
    found = dict(zip(names, alone(differing, names)))
    rows = [row for rows in found.values() for row in rows]
    healthy = sum(len(found[name]) for name in names if not CASES[name].breaks)
    total = f'{len(rows)} of {2 * len(names)} verdicts differ, {healthy} of them on healthy models.'
    head = ["| case and thread | precision | CPU's rules | CUDA's rules |", '|---|---|---|---|']
    return '\n'.join([total, '', *head, *rows])


def write(mark: str, text: str) -> None:
    "Write generated text into the page, between the marks."
    before, _, rest = PAGE.read_text().partition(f'<!-- {mark} -->')
    PAGE.write_text(f'{before}<!-- {mark} -->\n{text}\n<!-- end -->{rest.partition("<!-- end -->")[2]}')


if __name__ == '__main__':
    names = sys.argv[1:]
    text = tables(names or [*CASES])
    if names: sys.exit()
    write('cases', text)
    write('cuda', under_cuda_rules([*CASES]))
