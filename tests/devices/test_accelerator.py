"""Training on an accelerator: the numbers of the CPU, files resumed bit for bit, errors for what a device lacks.

Runs on a simulated device with `pytest --sim=sim tests/devices/test_accelerator.py`, as test_simulated.py does, and
otherwise on XLA or an NVIDIA GPU, whose numbers may differ by a few per cent; skipped without any of them.
"""

import copy, math, pickle

import pytest, torch
from fastai.callback.training import GradientAccumulation, GradientClip
from torch import nn

import helpers
from devices.simulated import is_installed, options, waits
from fastxtend_amp.training.current import precision_callback
from helpers import At, autocast_state, dataset, finite, is_outside_a_fit, learner, loaders, mlp, opt_state
from helpers import output_dtypes, params, same, spoil_at, told
from training import rows

CPU = torch.device('cpu')
CALM = dict(init_scale=256.0)

pytestmark = pytest.mark.usefixtures('device')


@pytest.fixture
def sim():
    if not is_installed():
        pytest.skip('needs a simulated device')


def build(precision, opt='adam', device=None, options=None, model=None, **kwargs):
    "A learner whose model is on the CPU, as a user's is before the first fit, on data for the device."
    device, model = device or helpers.DEVICE, model or mlp()
    if device.type == 'xla' and 'fused' in str(opt):
        pytest.skip('PyTorch has no fused optimizers for XLA')
    learn = learner(model, **{'dls': loaders(device=CPU), 'opt_func': rows.OPTS.get(opt, opt), **kwargs})
    learn.dls.to(device)
    return getattr(learn, f'to_{precision}')(**(options or {'fp16': CALM}.get(precision, {})))


def without_bias():
    "Before BatchNorm a bias has no effect, but Adam amplifies the rounding of its gradient."
    model = mlp()
    model[0].bias = None
    return model


def places(learn):
    return {p.device.type for p in learn.model.parameters()}


def assert_alike(a, b):
    "Weights, buffers, optimizer and loss scale are the same; on a real device, weights and scale nearly so."
    states = [cb and cb.state_dict() for cb in map(precision_callback, (a, b))]
    assert states[0] == states[1]
    tol = 1e-6 if places(a) == places(b) else 0.05
    torch.testing.assert_close(params(a), params(b), check_device=False, rtol=tol, atol=tol)
    if is_installed():
        ends = [[learn.model.state_dict(), opt_state(learn.opt)] for learn in (a, b)]
        torch.testing.assert_close(*ends, check_device=False, rtol=0, atol=0)


# -- training, files and copies


@pytest.mark.parametrize(
    'precision, opt',
    [('fp32', 'adam'), ('bf16', 'sgd'), ('bf16', 'fused adamw')]
    + [('fp16', opt) for opt in ('sgd', 'adam', 'adamw', 'fused adamw', 'fused sgd', 'lookahead')],
)
def test_numbers_are_the_cpus_also_from_files_and_in_copies(precision, opt, tmp_path, device):
    """In fp16 the scale overflows by itself, and a gradient is not finite in the first step, two in a row and the last.

    In bf16 a module is kept in fp32. A second fit clips and accumulates. In a new learner, whose model is still on the
    CPU, it continues from a file as it does without: on the device, also from the CPU and back, and in copies.
    """

    def started(place):
        options = dict(fp16=rows.SCALING, bf16=dict(fp32_modules='3')).get(precision)
        return build(precision, opt, place, options, without_bias(), path=tmp_path)

    def go_on(learn):
        learn.fit(2, 0.01, cbs=[GradientAccumulation(8), GradientClip(0.1)])

    learners = {}
    for place in (device, CPU):
        learners[place] = learn = started(place)
        dtypes = output_dtypes(learn, learn.model[0], learn.model[3])
        learn.fit(2, 0.01, cbs=spoil_at(0, 7, 8, 11) if precision == 'fp16' else None)
        assert places(learn) == {place.type} and learn.get_preds()[0].dtype is torch.float32
        assert precision != 'bf16' or dtypes == 12 * [torch.bfloat16, torch.float32]
        learn.save(place.type)
    assert_alike(*learners.values())
    if precision == 'fp16':
        a, b = (learn.mixed_precision for learn in learners.values())
        assert a.scales == b.scales and a.skips == b.skips and len(a.scales) == 12 and sum(a.skips) >= 4
    for learn in learners.values():
        go_on(learn)
    for first, then in ((CPU, device), (device, CPU), (device, device)):
        second = started(then)
        [nn.init.ones_(p) for p in second.model.parameters()]
        second.load(first.type)
        twins = [pickle.loads(pickle.dumps(second)), copy.deepcopy(second)]
        for learn in (second, *(twins if first == then else [])):
            go_on(learn)
            assert_alike(learners[first], learn)
            assert places(learn) == {then.type}


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
@pytest.mark.parametrize('event', ['after_pred', 'after_loss', 'before_step', 'after_step', 'after_epoch'])
def test_training_goes_on_elsewhere_after_an_exception(event, opt, device):
    "Nothing is left open. The history of both devices is read, in each epoch, by `scales`, and by a copy."
    learn, before = build('fp16', opt), autocast_state()
    with learn.amp_context():
        assert torch.is_autocast_enabled(device.type)
    with pytest.raises(ZeroDivisionError):
        learn.fit(1, 0.01, cbs=At(event, lambda l: 1 / (l.train_iter < 3), 11))
    learn.pred = learn.loss = learn.loss_grad = None  # the simulated device cannot move what a graph refers to
    for there in (CPU, device, CPU):
        assert autocast_state() == before and is_outside_a_fit(learn)
        weights, n = params(learn), len(learn.mixed_precision.scales or [])
        learn.dls = loaders(device=there)
        learn.create_opt()
        learn.fit(2, 0.01)
        assert finite(learn) and places(learn) == {there.type}
        assert not same([p.cpu() for p in weights], [p.cpu() for p in params(learn)])
        assert learn.mixed_precision.scales == [256.0] * (n + 12) and not any(learn.mixed_precision.skips)
    assert copy.deepcopy(learn).mixed_precision.scales == learn.mixed_precision.scales


def trained(n_epoch, cb, **options):
    "Return the precision callback after a fit in which the device decides about steps."
    learn = build('fp16', 'fused adamw', options=CALM | options, cbs=cb)
    told(lambda: learn.fit(n_epoch, 0.01))
    assert finite(learn)
    return learn.mixed_precision


def test_a_scale_that_falls_to_0_starts_again(sim):
    "No NaN passes until the host learns of the skips, at the end of the epoch."
    cb = trained(2, spoil_at(1, 2, 3, 4), backoff_factor=2.0**-40)  # the first step creates the state
    assert cb.skips == [False] + [True] * 4 + [False] * 7 and cb.scale == 256.0


def test_a_loss_that_accumulation_divides_does_not_diverge(sim):
    grow = At('before_epoch', lambda l: l.epoch == 1 and [p.data.mul_(1.1) for p in l.model.parameters()])
    nan = At('after_pred', lambda l: l.training and l.train_iter == 9 and l.pred.mul_(math.nan))
    learn = build('bf16', cbs=[GradientAccumulation(4096), grow, nan])
    (said,) = told(lambda: learn.fit(2, 0.1), 'the loss is nan')
    assert 'diverges' not in said


def test_the_scale_grows_in_a_step_of_the_host_after_those_of_the_device(sim):
    "The fourth step gives a layer its first gradient, and so its state in the optimizer: the host decides."
    unfreeze = At('before_batch', lambda l: l.training and l.model[0].requires_grad_(l.iter > 2), 20)
    cb = trained(1, unfreeze, growth_interval=4)
    assert cb.scales == [256.0] * 4 + [512.0] * 2 and cb.scale == 512.0


# -- synchronizations: the numbers in the documentation come from here


def waits_of_second_epoch(learn):
    counts = []
    with waits() as found:
        learn.fit(2, 0.01, cbs=At('after_epoch', lambda l: counts.append(len(found)), 100))
    return counts[1] - counts[0]


@pytest.mark.parametrize(
    'precision, options, opt, a_step',
    [
        ('bf16', {}, 'adam', 0),
        ('bf16', {'skip_nonfinite': True}, 'adam', 1),
        ('bf16', {'skip_nonfinite': True}, 'fused adamw', 0),
        ('fp16', {'loss_scale': 0.25}, 'adam', 1),
        *(('fp16', CALM, opt, 1) for opt in ('sgd', 'adam', 'adamw', 'torch sgd')),
        *(('fp16', CALM, opt, 0) for opt in ('fused adamw', 'fused sgd')),
    ],
)
def test_synchronizations_beyond_fp32(precision, options, opt, a_step, sim):
    """Also with a skipped step, which leaves finite buffers: an input of each epoch's fourth batch is infinite.

    In the second epoch of a second fit, because the first step creates the optimizer state.
    """
    data = dataset()
    data.tensors[0][12, 2] = float('inf')

    def fits(precision, options=None):
        learn = build(precision, opt, options=options, dls=loaders(train=data, device=CPU))
        learn.fit(1, 0.01)
        return learn, waits_of_second_epoch(learn)

    (learn, found), (_, fp32) = fits(precision, options), fits('fp32')
    once = 1 + a_step if options else 0  # an epoch: the history, and the scale after a skipped step
    assert found - fp32 == 6 * a_step + once
    if options:
        assert learn.mixed_precision.skips == 3 * [i == 3 for i in range(6)]
        assert all(b.isfinite().all() for b in learn.model.buffers())


def test_skips_that_end_an_epoch(sim):
    "They cost the next one nothing, and they are noticed."
    learns = skips, _, unwatched = [build('fp16', 'fused adamw', cbs=spoil_at(*at)) for at in ([5], [], [])]
    unwatched.mixed_precision.on_overflow = 'ignore'
    assert len({*map(waits_of_second_epoch, learns)}) == 1
    assert skips.mixed_precision.skips == [i == 5 for i in range(12)]
    with pytest.raises(FloatingPointError, match='2 steps in a row were skipped'):
        trained(1, spoil_at(4, 5), max_skips=2, on_overflow='raise')


# -- devices that lack something, and models on two


@pytest.mark.parametrize('has', ['fp16', 'bf16', 'fp32'])
def test_a_device_that_lacks_a_dtype(has, device, sim, monkeypatch, capsys):
    dtype = rows.TO[has].dtype or torch.float32
    monkeypatch.setattr(options, 'amp_dtypes', [dtype])
    for name in {'bf16', 'fp16'} - {has}:
        with pytest.raises(ValueError, match=f'(?s){name} .*does not run.*to_{has}'):
            build(name).fit(1)
    learn = build('amp')
    assert ('neither bf16 nor fp16' in capsys.readouterr().out) == (has == 'fp32')
    seen = output_dtypes(learn)
    learn.fit(1, 0.01)
    assert seen[0] is dtype


class OnTwo(nn.ModuleList):
    "Layers on several devices; `to` leaves them there."

    def to(self, *args, **kwargs):
        return self

    def forward(self, x):
        return sum(layer(x.to(layer.weight.device)).float().to(x.device) for layer in self)


@pytest.mark.parametrize('order', [1, -1])
@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_a_model_on_two_devices_skips_the_whole_step(opt, order, device, sim):
    "A gradient on the first device is spoilt."
    weights = []
    model = OnTwo(nn.Linear(6, 1).to(d) for d in (device, CPU)[::order])
    look = At('after_batch', lambda l: l.training and weights.append(params(l)), 20)
    learn = build('fp16', opt, model=model, cbs=[spoil_at(3), look])
    learn.fit(1, 0.01)
    assert learn.mixed_precision.skips == [i == 3 for i in range(6)]
    assert [same(a, b) for a, b in zip(weights, weights[1:])] == learn.mixed_precision.skips[1:]
