"Operators inside a Learner's forward under the callback: six of each of autocast's lists; functions and losses of a user's own."
import pytest, torch
import torch.nn.functional as F
from torch.amp import custom_bwd, custom_fwd

from helpers import *

LOW, WIDE = {'fp16': torch.float16, 'bf16': torch.bfloat16}, torch.float32
MODES = pytest.mark.parametrize('mode', LOW)
DEVICES = pytest.mark.parametrize('device', ['cpu', pytest.param('cuda', marks=pytest.mark.cuda)])

# Each takes `r`, which makes random tensors of the dtype that goes in: fp32 for the first list, low for the second.
TO_LOW = {
    'conv2d': lambda r: F.conv2d(r(2, 3, 5, 5), r(4, 3, 2, 2)), 'linear': lambda r: F.linear(r(3, 4), r(5, 4), r(5)),
    'matmul': lambda r: r(3, 4) @ r(4, 3), 'bmm': lambda r: torch.bmm(r(2, 3, 4), r(2, 4, 3)),
    'addmm': lambda r: torch.addmm(r(3, 3), r(3, 4), r(4, 3)), 'prelu': lambda r: F.prelu(r(3, 4), r(1)),
}
TO_FP32 = {
    'mse_loss': lambda r: F.mse_loss(r(4), r(4)), 'cross_entropy': lambda r: F.cross_entropy(r(4, 3), torch.arange(4, device=r.device) % 3),
    'nll_loss': lambda r: F.nll_loss(r(4, 3), torch.arange(4, device=r.device) % 3), 'l1_loss': lambda r: F.l1_loss(r(4), r(4)),
    'binary_cross_entropy_with_logits': lambda r: F.binary_cross_entropy_with_logits(r(4), r(4).sigmoid()),
    'prod': lambda r: torch.prod(r(4)),
}
# Given one tensor of each dtype, or two of low precision; and what no list has.
TO_WIDEST = {'cuda': {'addcdiv': lambda r, w: torch.addcdiv(r(4), r(4), w(4)), 'dot': lambda r, w: torch.dot(r(4), w(4))},
             'cpu': {'cat': lambda r, w: torch.cat([r(3), w(3)]), 'stack': lambda r, w: torch.stack([r(3), w(3)])}}
LEFT_ALONE = {'add': (lambda r, w: r(3) + w(3), WIDE), 'relu': (lambda r, w: torch.relu(r(3)), None),
              'in place': (lambda r, w: w(3, 3).addmm_(w(3, 4), w(4, 3)), WIDE),
              'fp64': (lambda r, w: torch.mm(w(3, 4).double(), w(4, 3).double()), torch.float64)}


def maker(device, dtype):
    def r(*shape): return torch.randn(*shape, device=device).to(dtype)
    r.device = device
    return r


class Ops(nn.Module):
    "A model that calls every operator in its forward and notes what came out."
    def __init__(self, low): super().__init__(); self.last, self.low, self.seen = nn.Linear(6, 1), low, {}
    def forward(self, x):
        low, wide = maker(x.device, self.low), maker(x.device, WIDE)
        self.seen = {n: f(wide).dtype for n, f in TO_LOW.items()} | {n: f(low).dtype for n, f in TO_FP32.items()}
        for n, f in TO_WIDEST[x.device.type].items(): self.seen |= {(n, 'mixed'): f(low, wide).dtype, (n, 'low'): f(low, low).dtype}
        self.seen |= {n: f(low, wide).dtype for n, (f, _) in LEFT_ALONE.items()}
        return self.last(x)


@DEVICES
@MODES
def test_operators_of_each_list(mode, device):
    learn = learner(Ops(LOW[mode]), loaders(n=4, device=torch.device(device)), cbs=mixed(mode))
    learn.fit(1, .01)
    low = LOW[mode]
    assert learn.model.seen == {**dict.fromkeys(TO_LOW, low), **dict.fromkeys(TO_FP32, WIDE), **{n: d or low for n, (_, d) in LEFT_ALONE.items()},
                                **{(n, 'mixed'): WIDE for n in TO_WIDEST[device]}, **{(n, 'low'): low for n in TO_WIDEST[device]}}


# -- autograd functions of a user's own

def function(device, **cast):
    "x * w with its own backward pass, and what each of the two saw: dtypes, autocast on or off."
    saw = {}
    def note(where, *ts): saw[where] = ({t.dtype for t in ts}, torch.is_autocast_enabled(device))
    class Linear(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=device, **cast)
        def forward(ctx, x, w):
            note('forward', x, w)
            ctx.save_for_backward(x, w)
            return x.mm(w.t())
        @staticmethod
        @custom_bwd(device_type=device)
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            out = g.mm(w), g.t().mm(x)
            note('backward', *out)
            return out
    return Linear, saw


class WithFunction(nn.Module):
    def __init__(self, f):
        super().__init__()
        torch.manual_seed(0)
        self.f, self.first, self.weight = f, nn.Linear(6, 8), nn.Parameter(torch.randn(1, 8) / 3)
    def forward(self, x): return self.f.apply(torch.relu(self.first(x)), self.weight)


class Plain:
    apply = staticmethod(lambda x, w: x.mm(w.t()))


def fit_with(f, mode, device):
    learn = learner(WithFunction(f), loaders(device=torch.device(device)), cbs=mixed(mode), opt_func=OPTIMIZERS['sgd'])
    learn.fit(1, .01)
    return params(learn)


@DEVICES
@MODES
def test_custom_fwd_and_bwd_run_under_the_same_autocast(mode, device):
    f, saw = function(device)
    for p, q in zip(fit_with(f, mode, device), fit_with(Plain, mode, device)): torch.testing.assert_close(p, q, rtol=1e-2, atol=1e-3)
    assert saw == {'forward': ({WIDE, LOW[mode]}, True), 'backward': ({LOW[mode]}, True)}
    f, saw = function(device, cast_inputs=torch.float32)         # that asks for fp32
    fit_with(f, mode, device)
    assert saw == {'forward': ({WIDE}, False), 'backward': ({WIDE}, False)}


# -- a loss that is not safe in low precision

def bce_learner(mode, loss, device):
    data = dataset(24)
    data = Data(data.tensors[0], (data.tensors[1] > 0).float())
    model = mlp() if isinstance(loss, nn.BCEWithLogitsLoss) else nn.Sequential(*mlp(), nn.Sigmoid())
    return learner(model, loaders(train=data, valid=data, device=torch.device(device)), loss, cbs=mixed(mode))


@pytest.mark.cuda
@MODES
def test_bce_loss_on_cuda_is_refused_with_pytorchs_hint(mode):
    with pytest.raises(RuntimeError, match='(?s)unsafe to autocast.*binary_cross_entropy_with_logits'): bce_learner(mode, nn.BCELoss(), 'cuda').fit(1)
    bce_learner(mode, nn.BCEWithLogitsLoss(), 'cuda').fit(1, .01)


@pytest.mark.parametrize('loss', [nn.BCELoss, nn.BCEWithLogitsLoss])
@MODES
def test_bce_loss_on_the_cpu_is_in_fp32(mode, loss):
    learn, dtypes = bce_learner(mode, loss(), 'cpu'), set()
    learn.add_cb(At('after_loss', lambda l: dtypes.add((l.pred.dtype, l.loss_grad.dtype)), 5))
    learn.fit(4, .05)
    assert dtypes == {(WIDE, WIDE)} and learn.recorder.losses[-1] < learn.recorder.losses[0]
