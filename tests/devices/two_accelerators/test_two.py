"Two devices of one type: a model on the one that is not current, and a model on both."
import pytest, torch
from torch import nn

from devices.simulated import options, waits
from helpers import *

CPU = torch.device('cpu')
MODES = {name: to for name, to in PRECISIONS.items() if name != 'no masters'}
OPTS = ['sgd', 'adam', 'adamw', 'fused adamw', 'fused sgd']


@pytest.fixture
def devices():
    import helpers
    first = helpers.DEVICE
    yield first, torch.device(first.type, 1)
    torch.get_device_module(first).set_device(0)
    options.lag = 100


def spoil(learn):
    if learn.iter in (3, 4): next(learn.model.parameters()).grad.view(-1)[0].fill_(float('inf'))


def result(learn):
    return (
        [float(l) for l in learn.recorder.losses],
        None if learn.precision is None else learn.precision.scales,
        [p.tolist() for p in params(learn)],
    )


class Parallel(nn.Module):
    "Two layers on the first device, two on the second; the loss is on the second."
    def __init__(self, first, second):
        super().__init__()
        whole = mlp()
        self.front, self.back = whole[:2].to(first), whole[2:].to(second)
    def forward(self, x):
        p = next(self.back.parameters())
        return self.back(self.front(x).to(p.device))


class OnBoth(Callback):
    "Targets go to where the predictions are; the model stays where it is."
    def before_batch(self):
        if not self.learn.yb: return
        self.learn.yb = tuple(y.to(next(self.learn.model.back.parameters()).device) for y in self.learn.yb)


def parallel(first, second, opt):
    model = Parallel(first, second)
    model.to = lambda *args, **kwargs: model             # fastai would bring all of it to one device
    return learner(model, loaders(n=48, device=first), opt_func=OPTIMIZERS[opt], cbs=OnBoth())


@pytest.mark.parametrize('opt', OPTS)
@pytest.mark.parametrize('mode', MODES)
def test_on_a_device_that_is_not_current(mode, opt, devices):
    "The current device is 0, model and data are on 1; the CPU's numbers, and nothing is made on 0."
    def run(device):
        learn = MODES[mode](learner(mlp(), loaders(n=48, device=device), opt_func=OPTIMIZERS[opt]))
        if 'fp16' in mode: learn.add_cb(At('after_backward', spoil, 100))
        learn.fit(1, .01)
        return result(learn)
    assert run(devices[1]) == run(CPU)


@pytest.mark.parametrize('lag', [0, 30, 100, 2000])
def test_flags_on_their_way_from_a_device_that_is_not_current(lag, devices, monkeypatch):
    "The event has to be recorded where the copy is."
    options.lag = lag
    def always(learn): next(learn.model.parameters()).grad.view(-1)[0].fill_(float('inf'))

    learn = learner(mlp(), loaders(n=96, device=devices[1]), opt_func=OPTIMIZERS['fused sgd']).to_fp16(
        max_skips=8, loss_scale=64.0
    )
    learn.fit(1, .01)
    history, polled = learn.precision.scaling.history, []
    monkeypatch.setattr(type(history), '_chunk', 4)
    learn.remove_cb(learn.recorder)                      # it reads the loss of each batch, and the host waits for that
    poll = type(history).arrived_skips
    monkeypatch.setattr(type(history), 'arrived_skips', lambda self: polled.append(poll(self)) or polled[-1])
    learn.add_cb(At('after_backward', lambda l: l.iter % 2 and always(l), 100))
    learn.fit(1, .01)
    assert set(polled) <= {0, 1} and learn.precision.n_skipped == 12


@pytest.mark.parametrize('opt', OPTS)
@pytest.mark.parametrize('mode', MODES)
@pytest.mark.parametrize('current', [0, 1])
def test_model_on_both(mode, opt, current, devices):
    "Model parallel; a step is skipped whole, also where a gradient of one device alone is not finite."
    def run(first, second):
        learn = MODES[mode](parallel(first, second, opt))
        if 'fp16' in mode: learn.add_cb(At('after_backward', spoil, 100))
        learn.fit(1, .01)
        return result(learn)
    torch.get_device_module(devices[0]).set_device(current)
    assert run(*devices) == run(CPU, CPU)


def test_waits_of_a_model_on_both(devices):
    "fp16 with a fused optimizer: none in a step."
    def count(learn):
        learn.fit(1, .01)
        with waits() as found: learn.fit(1, .01)
        return len(found)

    plain, fp16 = (
        count(parallel(*devices, 'fused adamw')),
        count(parallel(*devices, 'fused adamw').to_fp16(init_scale=256.0)),
    )
    assert fp16 - plain <= 1


@pytest.mark.parametrize('mode', ['fp16', 'half weights', 'flat masters'])
def test_checkpoint_of_a_model_on_both(mode, devices, tmp_path):
    "With torch's optimizers: fastai's own load all of their state onto one device, in fp32 too."
    def new(): return MODES[mode](parallel(*devices, 'fused adamw'))
    straight, first, second = new(), new(), new()
    for l in (straight, first, second): l.path = tmp_path
    straight.fit(2, .01)
    first.fit(1, .01)
    first.save('half way')
    second.load('half way')
    second.fit(1, .01)
    assert straight.precision.state_dict() == second.precision.state_dict()
    assert [p.device for p in second.model.parameters()] == [p.device for p in straight.model.parameters()] and same(
        params(straight), params(second)
    )


def test_random_draws_of_the_device_that_is_not_current(devices):
    "Dropout draws from device 1's state; the diagnosis and the report put it back."
    module = torch.get_device_module(devices[0])
    learn = learner(Attentive(drop=.5), loaders(n=48, device=devices[1]))
    before = [module.get_rng_state(d) for d in devices]
    learn.precision_report()
    assert all(torch.equal(module.get_rng_state(d), state) for d, state in zip(devices, before))
    with pytest.warns(UserWarning, match="module 'attn'"): learn.to_fp16().fit(1, .01)


def test_the_comparison_waits_for_the_models_device(devices):
    "And not for the current one."
    learn = learner(mlp(), loaders(n=48, device=devices[1]))
    from devices.simulated.clock import timelines
    finished = []
    module = torch.get_device_module(devices[0])
    synchronize = module.synchronize
    def watched(device=None):
        synchronize(device)
        finished.append(timelines[1].done >= timelines[1].last)
    module.synchronize = watched
    try: learn.compare_precision(n_steps=8, n_seeds=0)
    finally: module.synchronize = synchronize
    assert finished and all(finished)
