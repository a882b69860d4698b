"Models that autocast runs, small, from (n, 6) to (n, 1): what half-precision weights must leave as it is."
import copy, sys

import pytest, torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from helpers import mlp


class CountCasts(TorchDispatchMode):
    "How often a trained parameter is cast to another dtype while `model` is trained, and the casts' memory."
    def __init__(self, model):
        super().__init__()
        self.n, self.made, self.model = 0, [], model

    def in_forward(self):
        "Enter it in training forward passes alone: not every operator that runs in evaluation can be looked at."
        def start(m, args):
            if m.training: self.__enter__()
        def stop(m, args, out):
            if m.training: self.__exit__(None, None, None)
        self.model.register_forward_pre_hook(start)
        self.model.register_forward_hook(stop, always_call=True)   # after an exception, too
        return self

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        cast = func is torch.ops.aten._to_copy.default and isinstance(args[0], nn.Parameter) and args[0].requires_grad
        if cast and self.model.training:
            self.n += 1
            self.made.append(StorageWeakRef(out.untyped_storage()))
        return out


class Sequence(nn.Module):
    "Six numbers as a sequence of vectors, (n, 6, 8), through `body`."
    def __init__(self, body, call=lambda body, x: body(x)):
        super().__init__()
        self.up, self.body, self.head, self.call = nn.Linear(1, 8), body, nn.Linear(8, 1), call
    def forward(self, x):
        y = self.call(self.body, self.up(x[..., None]))
        return self.head((y[0] if isinstance(y, tuple) else y).mean(1))


class Image(nn.Module):
    "The numbers again and again as an input of `shape`."
    def __init__(self, body, *shape): super().__init__(); self.body, self.shape = body, shape
    def forward(self, x):
        n = torch.Size(self.shape).numel()
        return self.body(x.repeat(1, n // 6).view(-1, *self.shape)).flatten(1).mean(1, keepdim=True)


class Layers(nn.Module):
    "Two layers and a function of model and input."
    def __init__(self, f, **more):
        super().__init__()
        self.a, self.b, self.head, self.f = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 1), f
        for name, m in more.items(): setattr(self, name, m)
    def forward(self, x): return self.head(self.f(self, x))


class QKNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.q_norm, self.k_norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.RMSNorm(8), nn.RMSNorm(8)
    def forward(self, x): return F.scaled_dot_product_attention(self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.bottom = nn.Conv2d(2, 8, 3, stride=2, padding=1), nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(6, 1, 1)
    def forward(self, x): return self.out(torch.cat([self.up(self.bottom(self.down(x))), x], 1))


def momentum(m, x):
    with torch.no_grad():
        for p, q in zip(m.a.parameters(), m.slow.parameters()): q.mul_(.9).add_(p, alpha=.1)
    return m.a(x) + m.slow(x)


def penalty(m, x):
    if not m.training: return m.a(x)
    x = x.clone().requires_grad_()
    y = torch.tanh(m.a(x))
    slope, = torch.autograd.grad(y.float().sum(), x, create_graph=True)
    return m.b(y) + slope.square()


def kept_by_hand(m, x):
    y = m.a(x)
    with torch.autocast('cpu', enabled=False): return m.a(y.float())


def looking_aside(m, x):
    with torch.no_grad(): t = m.a(x + 1)
    return m.a(m.a(x)) + t


def again(m, x, reentrant):
    x = x.clone().requires_grad_()
    for _ in range(2): x = checkpoint(lambda x: torch.tanh(m.a(x)), x, use_reentrant=reentrant)
    return m.a(x)


def used_in_fp32_too(m, x):
    "One weight gets five gradients, one of them by way of its cast."
    w = m.a.weight
    return m.a(x) + (w * 1.3).sin().sum() + .1 * (w * .7).cos().sum() + .3 * (w ** 3).sum() + F.linear(x, w * 1.1)


def clamped(m, x):
    m.b.weight.data.clamp_(0)
    return m.b(torch.relu(m.a(x)))


def tied():
    m = Layers(lambda m, x: m.b(torch.tanh(m.a(x))))
    m.b.weight = m.a.weight
    return m


def tied_embedding():
    m = Layers(lambda m, x: m.logits(m.emb(tokens(x)).mean(1))[:, :6], emb=nn.Embedding(16, 6), logits=nn.Linear(6, 16))
    m.logits.weight = m.emb.weight
    return m


def slow():
    m = Layers(momentum)
    m.slow = copy.deepcopy(m.a).requires_grad_(False)
    return m


def pruned():
    m = Layers(lambda m, x: m.a(x))
    prune.l1_unstructured(m.a, 'weight', .5)
    return m


def normed(norm):
    m = Layers(lambda m, x: m.b(torch.tanh(m.a(x))))
    norm(m.a)
    return m


def hooked():
    m = Layers(lambda m, x: m.b(torch.tanh(m.a(x))))
    m.a.weight.register_hook(lambda g: g * 2)
    m.b.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    m.b.register_forward_hook(lambda m, args, out: out * 1.5)
    return m


def tokens(x): return (x.abs() * 8).long().clamp(max=15)
def attention(**kwargs): return nn.MultiheadAttention(8, 2, batch_first=True, **kwargs)
def encoder(**kwargs): return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0., batch_first=True, **kwargs), 2, enable_nested_tensor=False)


MODELS = {
    'mlp': mlp,
    'convolutions': lambda: Image(nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 2)), 2, 6, 6),
    'channels last': lambda: Image(nn.Sequential(nn.Conv2d(2, 8, 3), nn.ReLU(), nn.Conv2d(8, 1, 2)), 2, 6, 6).to(memory_format=torch.channels_last),
    '1d': lambda: Image(nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.ConvTranspose1d(4, 2, 2)), 2, 12),
    '3d': lambda: Image(nn.Sequential(nn.Conv3d(1, 4, 2), nn.ReLU(), nn.ConvTranspose3d(4, 2, 2)), 1, 6, 6, 6),
    'U-Net': lambda: Image(UNet(), 2, 6, 6),
    'bilinear': lambda: Layers(lambda m, x: m.c(x, x), c=nn.Bilinear(6, 6, 6)),
    'attention': lambda: Sequence(attention(), lambda b, x: b(x, x, x)),
    'attention without its weights': lambda: Sequence(attention(), lambda b, x: b(query=x, key=x, value=x, need_weights=False)),
    'attention on another sequence': lambda: Sequence(attention(), lambda b, x: b(x, x + 1, x + 1)),
    'attention on three, twice': lambda: Sequence(attention(), lambda b, x: b(b(x, x + 1, value=x + 2)[0], x, x)),
    'attention on itself and another': lambda: Sequence(attention(), lambda b, x: b(b(x, x, x)[0], x, x)),
    'attention of other sizes': lambda: Sequence(attention(kdim=8, vdim=4), lambda b, x: b(b(x, x, x[..., :4])[0], x, x[..., :4])),
    'attention with bias_k': lambda: Sequence(attention(add_bias_kv=True), lambda b, x: b(x, x, x)),
    'transformer': lambda: Sequence(encoder()),
    'transformer, norm first': lambda: Sequence(encoder(norm_first=True)),
    'RMSNorm on queries': lambda: Sequence(QKNorm()),
    'LSTM': lambda: Sequence(nn.LSTM(8, 8, batch_first=True)),
    'GRU': lambda: Sequence(nn.GRU(8, 8, batch_first=True)),
    'RNN': lambda: Sequence(nn.RNN(8, 8, batch_first=True)),
    'spectral_norm': lambda: normed(spectral_norm),
    'parametrized spectral_norm': lambda: normed(parametrizations.spectral_norm),
    'weight_norm': lambda: normed(weight_norm),
    'parametrized weight_norm': lambda: normed(parametrizations.weight_norm),
    'pruned': pruned,
    'hooks': hooked,
    'tied': tied,
    'tied to an embedding': tied_embedding,
    'max_norm': lambda: Layers(lambda m, x: m.a(m.emb(tokens(x)).mean(1)), emb=nn.Embedding(16, 6, max_norm=.1)),
    'momentum encoder': slow,
    'large inputs': lambda: Layers(lambda m, x: m.a(m.norm(x * 2e5)), norm=nn.BatchNorm1d(6)),
    'a product with a buffer': lambda: Layers(lambda m, x: m.a(x) @ m.norm.running_var.diag(), norm=nn.BatchNorm1d(6)),
    'called twice': lambda: Layers(lambda m, x: m.a(torch.tanh(m.a(x)))),
    'called five times': lambda: Layers(lambda m, x: m.a(m.a(m.a(m.a(m.a(x)))))),
    'weights used directly': lambda: Layers(lambda m, x: F.linear(torch.tanh(m.a(x)), m.a.weight)),
    'weights used in fp32, too': lambda: Layers(used_in_fp32_too),
    'weights written in forward': lambda: Layers(clamped),
    'checkpointing, reentrant': lambda: Layers(lambda m, x: again(m, x, True)),
    'checkpointing': lambda: Layers(lambda m, x: again(m, x, False)),
    'gradient penalty': lambda: Layers(penalty),
    'fp32 by hand': lambda: Layers(kept_by_hand),
    'no_grad in between': lambda: Layers(looking_aside),
    'vmap': lambda: Layers(lambda m, x: torch.vmap(m.a)(x)),
    'functional_call': lambda: Layers(lambda m, x: torch.func.functional_call(m.a, {n: p * 2 for n, p in m.a.named_parameters()}, (x,))),
}


def build(name):
    "The model of this name, with the same weights at each call."
    if name == 'GRU' and 'torch_xla' in sys.modules: pytest.skip("torch_xla, once imported, fails at a GRU on the CPU")
    torch.manual_seed(0)
    return MODELS[name]()
