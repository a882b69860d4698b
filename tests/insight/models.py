"Models and callbacks that several tests of insight need, reports on them, and trainings."

import math, random, time

import torch
from fastai.callback.core import Callback
from fastcore.foundation import L
from torch import nn

from fastxtend_amp.insight.choices import own_precision
from fastxtend_amp.training.current import precision_callback
from helpers import At, Data, dataset, learner, linear, loaders

KEEP, SAFE = 'keep modules in fp32', 'safe so far'


# -- callbacks


class InStep(At):
    "Runs on copies of the learner as well."

    run_on_copy = True


class Costs(Callback):
    "Each training step lasts so long on the test's clock, divided by the speed-up of its row, with noise."

    run_on_copy = True
    trained, draws = [], random.Random()  # of all copies

    def __init__(self, speeds, step=0.1, noise=0.0):
        self.speeds, self.step, self.noise = speeds, step, noise
        self.trained.clear()
        self.draws.seed(0)

    def before_batch(self):
        if self.training:
            precision = own_precision(self.learn)
            kinds = [f'{m.__name__[3:]} in fp32' for m in L(precision.fp32_modules) if callable(m)]
            formats = ['channels last'] * hasattr(self.learn, 'channels_last')
            self.trained.append(', '.join([precision.name, *kinds, *formats]))
            noise = math.exp(self.noise * self.draws.gauss(0, 1))
            time.sleep(self.step * noise / self.speeds.get(self.trained[-1], 1.0))


# -- models and modules


class Act(nn.Module):
    "A function as a module."

    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, x):
        return self.f(x)


class Scales(nn.Module):
    "Arithmetic of its own around a model."

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x) * 2


class Gives(Scales):
    "Return a dictionary, as Hugging Face's models do; `Unpacks` extracts the prediction."

    def forward(self, x):
        return {'logits': self.net(x)}


class Unpacks(Callback):
    def after_pred(self):
        self.learn.pred = self.pred['logits']


class Times(torch.autograd.Function):
    "Return the input; multiply its gradient by `factor` in the backward pass."

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None


def fills(h):
    return h.masked_fill(h < 0, -1e9).softmax(-1)  # above the largest fp16 number


def loud_loss(p, y):
    p = p.half() if torch.is_autocast_enabled('cpu') else p
    return (p * 6e4 * 6e4).float().mul(1e-9).sub(y).square().mean()


class LoRA(nn.Module):
    "A frozen 16-bit layer beside a trainable low-rank layer in fp32."

    def __init__(self, base, dtype):
        super().__init__()
        self.base = base.to(dtype).requires_grad_(False)
        self.down, self.up = (nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False))

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def lora(dtype, f=nn.functional.gelu):
    torch.manual_seed(0)
    return nn.Sequential(LoRA(nn.Linear(6, 16), dtype), Act(f), LoRA(nn.Linear(16, 1), dtype))


def convs(groups=1):
    "Convolutions of six channels, the second one in groups."
    pictures = Act(lambda x: x[..., None, None])
    return nn.Sequential(
        pictures, nn.Conv2d(6, 6, 2, padding=1), nn.Conv2d(6, 6, 2, groups=groups), nn.Flatten(), linear()
    )


class Breaks(nn.Linear):
    "Its output in fp16 is changed by `f`."

    def __init__(self, f):
        super().__init__(6, 1)
        self.f = f

    def forward(self, x):
        out = super().forward(x)
        return self.f(out) if out.dtype is torch.float16 else out


class Own(nn.Module):
    "Two layers with arithmetic between them in the model's own forward."

    def __init__(self, f, n=32, n_mid=None):
        torch.manual_seed(0)
        super().__init__()
        self.a, self.b, self.f = nn.Linear(6, n), nn.Linear(n_mid or n, 1), f

    def forward(self, x):
        return self.b(self.f(self.a(x)))


class Force(nn.Module):
    "Computes gradients itself."

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad((self.energy(x).float() * 1e4).sum(), x, create_graph=True)[0][:, :1] / 1e4


class Mapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 1)

    def forward(self, x):
        return torch.func.vmap(self.inner)(x)


class Directional(Mapped):
    def forward(self, x):
        out, tangent = torch.func.jvp(self.inner, (x,), (x,))
        return out + 0 * tangent


def inner(f, n=32, n_mid=None):
    "`Own` with the arithmetic in a module."
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, n), Act(f), nn.Linear(n_mid or n, 1))


def layers(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, 1))


def large(factor):
    "Data with inputs that are multiplied."
    return loaders(train=Data(dataset().tensors[0] * factor, dataset().tensors[1]))


def report_on(model, precision='fp16', device=None, dls=None, **kwargs):
    return learner(model, dls or loaders(64, 64), **kwargs).precision_report(precision, device=device)


def verdict_on(model, precision='fp16', **kwargs):
    return report_on(model, precision, **kwargs).verdicts[precision]


def rows(report, precision):
    return report.table[report.table['precision'] == precision].set_index('module')


def trained(model, call='', epochs=4, lr=1e-4, dls=None, **kwargs):
    "Return the mean loss of the last four steps of a fit with this call, and the number of skipped steps."
    learn = learner(model, dls or loaders(64, 64), **kwargs)
    exec(call, {'learn': learn})
    if precision_callback(learn):
        learn.mixed_precision.on_overflow = 'ignore'
    with learn.no_logging():
        learn.fit(epochs, lr)
    return float(torch.stack(learn.recorder.losses[-4:]).mean()), precision_callback(learn) and sum(
        learn.mixed_precision.skips
    )


def rms(h):
    return h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-5)


def loud_rms(h):
    return rms(h * 400)


def cancels(h):
    return ((h + 3000) - 3000).tanh()


def unit(h):
    h = h * 1e-5
    return h / (h * h + 1e-12).sum(-1, keepdim=True).sqrt()  # the squares are 0 in fp16


def over_sums(h):
    return 1e5 / (-(h * 1e3).abs() * 200 - 1e3)  # the sums are -inf, which by itself may be a mask


def sqrt_gate(h):
    return (h.relu() * 1e-6 + torch.tensor(1e-10).to(h.dtype)).sqrt() * 1e3  # its gradient is infinite in fp16


STEPS = torch.arange(32) * 2 + 960


def steps(cast):
    "A function that adds the cosines of timesteps."
    return lambda h: h + (cast(STEPS, h) * 0.01).cos()


def checks(h):
    assert h.dtype == torch.float32
    return h


class NeedsFp32(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        assert g.dtype == torch.float32, 'the gradient is not fp32'
        return g


class InNumPy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        v = x.detach().numpy() * 4
        return torch.from_numpy(v * v.dtype.type(6e4) / v.dtype.type(6e4))

    @staticmethod
    def backward(ctx, g):
        return g


def far_from_0(offset=1000.0):
    "A layer's values around 1,000, from which the next one subtracts 1,000: bf16 rounds them to multiples of 4."
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), Act(lambda h: (h - offset).tanh()), nn.Linear(32, 1))
    nn.init.constant_(model[0].bias, offset)
    return model
