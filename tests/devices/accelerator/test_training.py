"Training on an accelerator gives the CPU's numbers: on a simulated one bit for bit, since its kernels are the CPU's."
import pytest, torch
from fastai.callback.schedule import *  # patches lr_find
from fastai.callback.training import GradientAccumulation, GradientClip
from torch import nn

from devices.simulated import is_installed
from helpers import *

FP16 = dict(init_scale=2. ** 10, growth_interval=5)
MODES = {
    'fp32': lambda learn: learn,
    'bf16': lambda learn: learn.to_bf16(),
    'fp16': lambda learn: learn.to_fp16(**FP16),
    'half weights': lambda learn: learn.to_half_weights(),
    'half fp16': lambda learn: learn.to_half_weights('fp16', loss_scale=1024.0),
    'flat masters': lambda learn: learn.to_half_weights(flat_master=True),
    'no masters': lambda learn: learn.to_half_weights(master_weights=False),
}


def close(a, b, exact=True):
    "The same numbers; to a few per cent on a real device."
    if is_installed() and exact: return torch.equal(a, b)
    return torch.allclose(a, b, rtol=.05, atol=.05)


def train(device, mode, n_epoch=2, n=24, model=mlp, dls=None, **kwargs):
    "A learner that was trained on `device`."
    learn = MODES[mode](learner(model(), (dls or loaders)(n=n, device=torch.device(device)), **kwargs))
    learn.fit(n_epoch, .01)
    return learn


def assert_same_training(a, b, exact=True):
    "Losses, validation, parameters, loss scales and skips."
    of = lambda learn: torch.tensor(
        [float(l) for l in learn.recorder.losses] + [v for row in learn.recorder.values for v in row]
    )
    assert close(of(a), of(b), exact), (of(a), of(b))
    assert all(
        close(p.detach().cpu(), q.detach().cpu(), exact) for p, q in zip(a.model.parameters(), b.model.parameters())
    )
    if a.precision is not None:
        assert a.precision.scales == b.precision.scales and a.precision.n_skipped == b.precision.n_skipped


@pytest.mark.filterwarnings('ignore:master_weights=False with')
@pytest.mark.parametrize('opt', OPTIMIZERS)
@pytest.mark.parametrize('mode', MODES)
def test_losses_are_the_cpus(mode, opt, device):
    there = train(device, mode, opt_func=OPTIMIZERS[opt])
    assert {p.device for p in there.model.parameters()} == {device}
    # On GPUs torch takes its `foreach` implementation, which rounds otherwise.
    exact = (mode, opt) != ('no masters', 'torch sgd')
    assert_same_training(there, train('cpu', mode, opt_func=OPTIMIZERS[opt]), exact)


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
@pytest.mark.parametrize('cbs', [None, GradientAccumulation(8)], ids=['each batch', 'accumulating'])
def test_the_first_scale_is_the_cpus(cbs, opt, device):
    def run(d):
        learn = learner(mlp(), loaders(device=torch.device(d)), opt_func=OPTIMIZERS[opt], cbs=cbs)
        learn.to_fp16(init_scale='auto').fit(2, .01)
        return learn
    there = run(device)
    assert there.precision.scales[0] not in (1., 2. ** 16, 2. ** 24)
    if is_installed(): assert_same_training(there, run('cpu'))


class Recurrent(nn.Module):
    "An embedding of rounded numbers, an LSTM and a linear layer; takes (n, 6), gives (n, 1)."
    def __init__(self):
        torch.manual_seed(0)
        super().__init__()
        self.emb, self.rnn, self.out = nn.Embedding(16, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 1)
    def forward(self, x): return self.out(self.rnn(self.emb(x.mul(4).round().long().clamp(-8, 7) + 8))[0][:, -1])


def convnet():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 1),
    )


@pytest.mark.parametrize('mode', ['fp32', 'bf16', 'fp16', 'half weights'])
@pytest.mark.parametrize(
    'model,exact', [(convnet, True), (lambda: Attentive(gain=1.0), False)], ids=['convolutions', 'attention']
)
def test_networks(model, exact, mode, device):
    "On a GPU autocast keeps layer norm in fp32, on a CPU it does not."
    assert_same_training(
        train(device, mode, 1, model=model), train('cpu', mode, 1, model=model), exact or mode == 'fp32'
    )


@pytest.mark.parametrize('mode', ['bf16', 'fp16', 'half weights'])
def test_a_recurrent_network_learns(mode, device):
    "A GPU fuses the LSTM's cell, so that its rounding is another than the CPU's."
    losses = [float(l) for l in train(device, mode, 4, model=Recurrent).recorder.losses]
    assert losses == pytest.approx(
        [float(l) for l in train('cpu', 'fp32', 4, model=Recurrent).recorder.losses], rel=0.05
    )


def test_dropout_draws_from_the_devices_own_state(device):
    def losses(mode):
        torch.manual_seed(1)
        return [float(l) for l in train(device, mode, 1, model=lambda: Attentive(gain=1., drop=.5)).recorder.losses]
    assert losses('bf16') == losses('bf16') != losses('fp32')
    assert losses('bf16') == pytest.approx(losses('fp32'), rel=.05)


@pytest.mark.parametrize(
    'cbs',
    [lambda: GradientClip(0.1), lambda: GradientAccumulation(8), lambda: [GradientAccumulation(8), GradientClip(0.1)]],
    ids=['clipping', 'accumulation', 'both'],
)
@pytest.mark.parametrize('mode', ['bf16', 'fp16', 'half weights', 'half fp16', 'flat masters'])
@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_clipping_and_accumulation(opt, mode, cbs, device):
    assert_same_training(*(train(d, mode, cbs=cbs(), opt_func=OPTIMIZERS[opt]) for d in (device, 'cpu')))


def overflow_at(*steps):
    "A callback that makes one gradient infinite before these optimizer steps."
    count = iter(range(10 ** 6))
    def spoil(learn):
        if next(count) in steps: next(learn.model.parameters()).grad.view(-1)[0].fill_(float('inf'))
    return At('after_backward', spoil, order=100)


@pytest.mark.parametrize('opt', OPTIMIZERS)
@pytest.mark.parametrize('mode', ['fp16', 'half fp16'])
def test_skips_scale_and_history(mode, opt, device):
    "Skipped: the first step, two in a row, one after the scale grew, the last."
    spoiled = (0, 3, 4, 10, 11)
    there = train(device, mode, cbs=overflow_at(*spoiled), opt_func=OPTIMIZERS[opt])
    assert [i for i, s in enumerate(there.precision.scaling.history.skips) if s] == list(spoiled)
    assert there.precision.n_skipped == 5 and len(there.precision.scales) == 12
    assert_same_training(there, train('cpu', mode, cbs=overflow_at(*spoiled), opt_func=OPTIMIZERS[opt]))


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_skipped_is_right_at_each_event(opt, device):
    seen = {'before_step': [], 'after_step': [], 'after_cancel_step': [], 'after_batch': []}
    watchers = [At(e, lambda l, e=e: l.training and seen[e].append(l.precision.skipped), order=50) for e in seen]
    train(device, 'fp16', 1, cbs=[overflow_at(0, 3), *watchers], opt_func=OPTIMIZERS[opt])
    assert seen['after_batch'] == seen['after_step'] == [True, False, False, True, False, False]
    # Fused AdamW skips on the device, once it has its state.
    assert seen['after_cancel_step'] == [True] * (2 if opt == 'adam' else 1)


def test_lr_find_leaves_scale_and_history(device):
    learn = train(device, 'fp16', 1, opt_func=OPTIMIZERS['fused adamw'])
    before = learn.precision.state_dict(), learn.precision.scales, params(learn)
    learn.lr_find(num_it=8, show_plot=False, stop_div=False)
    assert (learn.precision.state_dict(), learn.precision.scales) == before[:2] and same(params(learn), before[2])


@pytest.mark.parametrize('mode', ['bf16', 'fp16', 'half weights', 'flat masters'])
def test_validate_predict_and_get_preds(mode, device):
    there, here = (train(d, mode, 1) for d in (device, 'cpu'))
    assert close(torch.tensor(there.validate()), torch.tensor(here.validate()))
    (p, y), (q, z) = there.get_preds(), here.get_preds()
    assert p.dtype is torch.float32 and close(p.cpu(), q) and close(y.cpu(), z)
    with there.amp_context(), torch.no_grad(): out = there.model(there.dls.valid.one_batch()[0])
    assert out.dtype is torch.bfloat16 or mode != 'bf16'
    assert not torch.is_autocast_enabled(device.type)


@pytest.mark.parametrize('mode', ['bf16', 'fp16', 'half weights'])
def test_fp32_modules(mode, device):
    "One module of the four in fp32, by its name."
    call = {'bf16': 'to_bf16', 'fp16': 'to_fp16', 'half weights': 'to_half_weights'}[mode]
    def run(d):
        learn, seen = learner(mlp(), loaders(device=torch.device(d))), {}
        for name in '03':
            learn.model[int(name)].register_forward_hook(lambda m, i, o, n=name: seen.setdefault(n, set()).add(o.dtype))
        getattr(learn, call)(fp32_modules='3').fit(1, .01)
        return learn, seen
    (there, seen), (here, _) = run(device), run('cpu')
    assert seen['3'] == {torch.float32} and torch.float32 not in seen['0']
    assert_same_training(there, here)
