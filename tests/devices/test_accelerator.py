"""Training on an accelerator: the numbers of the CPU, files resumed bit for bit, errors for what a device lacks.

Runs on a simulated device with `pytest --sim=sim tests/devices/test_accelerator.py`, as test_simulated.py does, and
otherwise on XLA or an NVIDIA GPU, whose numbers may differ by a few per cent; skipped without any of them.
"""

import copy, importlib.util, os, pickle
from pathlib import Path

import pytest, torch
from torch.utils._pytree import tree_map_only
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.learner import load_learner

import helpers
from devices.simulated import is_installed, options, waits
from fastxtend_amp import precision_support
from helpers import *
from training import rows

CPU = torch.device('cpu')


OPTS = {**rows.OPTS, 'nadam': partial(OptimWrapper, opt=torch.optim.NAdam)}
SCALING = dict(init_scale=2.0**20, growth_interval=3)  # overflows at the start and whenever it has grown


@pytest.fixture(autouse=True)
def device(monkeypatch):
    "The accelerator; learners of helpers.py train on it."
    if is_installed():
        return helpers.DEVICE
    if importlib.util.find_spec('torch_xla') and os.environ.get('PJRT_DEVICE'):
        found = torch.device('xla', 0)
    elif torch.cuda.is_available():
        found = torch.device('cuda', 0)
    else:
        pytest.skip('needs an accelerator, or --sim=sim')
    monkeypatch.setattr(helpers, 'DEVICE', found)
    return found


@pytest.fixture
def sim():
    "The options of the simulated device, restored after the test."
    if not is_installed():
        pytest.skip('needs a simulated device')
    before = {**vars(options)}
    yield options
    vars(options).update(before)


def build(mode, opt='adam', device=None, seed=0, scaling=SCALING, dls=None, **kwargs):
    "A learner whose model is on the CPU, as a user's is before the first fit, on data for the device."
    device, model = device or helpers.DEVICE, mlp(seed)
    if device.type == 'xla' and 'fused' in opt:
        pytest.skip('PyTorch has no fused optimizers for XLA')
    model[0].bias = None  # it has no effect before BatchNorm, but Adam amplifies the rounding of its gradient
    learn = learner(model, dls or loaders(device=CPU), opt_func=OPTS[opt], **kwargs)
    learn.dls.to(device)
    return getattr(learn, f'to_{mode}')(**(scaling if mode == 'fp16' else {}))


def places(learn):
    return {p.device.type for p in learn.model.parameters()}


def on_cpu(learn):
    return tree_map_only(torch.Tensor, torch.Tensor.cpu, {**rows.result(learn), 'scales': []})


def assert_alike(a, b):
    "Weights, buffers, optimizer and loss scale are the same; on a real device, weights and scale nearly so."
    assert (precision_callback(a) and a.mixed_precision.state_dict()) == (
        precision_callback(b) and b.mixed_precision.state_dict()
    )
    if is_installed():
        assert rows.differences(on_cpu(a), on_cpu(b)) == []
        return
    tol = 1e-6 if places(a) == places(b) else 0.05
    for x, y in zip(params(a), params(b), strict=True):
        torch.testing.assert_close(x.cpu(), y.cpu(), rtol=tol, atol=tol)


# -- training


@pytest.mark.parametrize(
    'mode, opt',
    [('fp32', 'adam'), ('bf16', 'sgd'), ('bf16', 'fused adamw')]
    + [('fp16', opt) for opt in ('sgd', 'adam', 'adamw', 'fused adamw', 'fused sgd')],
)
def test_numbers_are_the_cpus(mode, opt, device):
    """In fp16 the scale overflows by itself, and a gradient is not finite in the first step, two in a row and the last.

    A second fit clips and accumulates.
    """
    there, here = (build(mode, opt, d, cbs=spoil_at(0, 7, 8, 11) if mode == 'fp16' else None) for d in (device, CPU))
    for learn in (there, here):
        learn.fit(2, 0.01)
    assert places(there) == {device.type} and places(here) == {'cpu'}
    curves = [torch.stack(learn.recorder.losses).cpu() for learn in (there, here)]
    assert torch.allclose(*curves, rtol=0 if is_installed() else 0.05)
    assert there.validate()[0] == pytest.approx(here.validate()[0], rel=1e-9 if is_installed() else 0.05)
    assert_alike(there, here)
    if mode == 'fp16':
        assert there.mixed_precision.scales == here.mixed_precision.scales and len(there.mixed_precision.scales) == 12
        assert sum(there.mixed_precision.skips) == sum(here.mixed_precision.skips) >= 4
    for learn in (there, here):
        learn.fit(1, 0.01, cbs=[GradientAccumulation(8), GradientClip(0.1)])
    assert_alike(there, here)


def test_fp32_modules_and_predictions(device):
    learn = learner().to_bf16(fp32_modules='3')
    seen = output_dtypes(learn, learn.model[0], learn.model[3])
    learn.fit(1, 0.01)
    assert seen == [torch.bfloat16, torch.float32] * 6 and learn.get_preds()[0].dtype is torch.float32
    with learn.amp_context():
        assert torch.is_autocast_enabled(device.type)
    assert not torch.is_autocast_enabled(device.type)


@pytest.mark.parametrize(
    'event, mode, opt',
    [
        ('after_pred', 'bf16', 'adam'),
        ('after_loss', 'fp16', 'adam'),
        ('after_backward', 'fp16', 'fused adamw'),
        ('before_step', 'fp16', 'fused adamw'),
        ('after_step', 'fp16', 'adam'),
    ],
)
def test_after_an_exception_nothing_is_left(event, mode, opt):
    learn, before = build(mode, opt, scaling=dict(init_scale=256.0)), autocast_state()
    with pytest.raises(ZeroDivisionError):
        learn.fit(1, 0.01, cbs=At(event, lambda l: 1 / (l.train_iter != 1), 11))
    assert autocast_state() == before and is_outside_a_fit(learn)
    weights = params(learn)
    learn.fit(1, 0.01)
    assert autocast_state() == before and finite(learn) and not same(params(learn), weights)


def test_a_scale_that_falls_to_0_on_the_device_lets_no_nan_pass(sim):
    "As the host learns of the skips at the end of the epoch; it starts the scale again."
    learn = build('fp16', 'fused adamw', scaling=dict(init_scale=256.0, backoff_factor=2.0**-40))
    told(lambda: learn.fit(2, 0.01, cbs=spoil_at(1, 2, 3, 4)))  # the first step creates the state
    assert learn.mixed_precision.skips == [False] + [True] * 4 + [False] * 7
    assert finite(learn) and learn.mixed_precision.scale == 256.0


# -- files and copies


@pytest.mark.parametrize(
    'mode, opt',
    [('fp32', 'adam'), ('bf16', 'fused adamw')] + [('fp16', o) for o in ('adamw', 'fused adamw', 'lookahead')],
)
def test_files_and_copies(mode, opt, tmp_path, device):
    """Training goes on in a new learner, whose model is still on the CPU, as it does without the file.

    On the device, also from the CPU and back; in the middle of a fit; in copies; as an export, on the CPU.
    """
    for first, then in ((CPU, device), (device, CPU), (device, device)):
        straight = build(mode, opt, first, path=tmp_path)
        straight.fit(1, 0.01)
        straight.save('half way')
        saved = params(straight)
        straight.fit(1, 0.01)
        second = build(mode, opt, then, seed=1, path=tmp_path).load('half way')
        twins = [pickle.loads(pickle.dumps(second)), copy.deepcopy(second)]
        for learn in (second, *(twins if first == then else [])):
            learn.fit(1, 0.01)
            assert_alike(straight, learn)
            assert places(learn) == {then.type}
    straight.export()
    exported = load_learner(tmp_path / 'export.pkl', cpu=True)
    assert places(exported) == {'cpu'} and places(straight) == {device.type}
    assert same([p.cpu() for p in params(straight)], params(exported))
    straight.fit(2, 0.01, cbs=At('after_epoch', lambda l: l.load('half way')))
    assert same(params(straight), saved)


def test_state_that_an_optimizer_keeps_elsewhere_stays_there(device):
    "PyTorch keeps counts and products of NAdam on the CPU; a second fit is no reason to move them."
    learn = build('bf16', 'nadam')
    for _ in range(2):
        learn.fit(1, 0.01)
        assert {(s['mu_product'].device.type, s['exp_avg'].device) for s in opt_state(learn.opt)} == {('cpu', device)}


# -- synchronizations: the numbers in the documentation come from here


@pytest.mark.parametrize(
    'mode, options, opt, a_step, an_epoch',
    [
        ('bf16', {}, 'adam', 0, 0),
        ('bf16', {'skip_nonfinite': True}, 'adam', 1, 1),
        ('bf16', {'skip_nonfinite': True}, 'fused adamw', 0, 1),
        *(('fp16', {'init_scale': 256.0}, opt, 1, 1) for opt in ('sgd', 'adam', 'adamw', 'torch sgd')),
        *(('fp16', {'init_scale': 256.0}, opt, 0, 1) for opt in ('fused adamw', 'fused sgd')),
    ],
)
def test_waits_beyond_fp32(mode, options, opt, a_step, an_epoch, sim):
    """Also with a skipped step, which leaves finite buffers: an input of each epoch's fourth batch is infinite.

    In the second epoch of a second fit, because the first step creates the optimizer state.
    """
    data = dataset()
    x = data.tensors[0].clone()
    x[12, 2] = float('inf')

    def trained(mode, **options):
        learn, counts = build('fp32', opt, dls=loaders(train=Data(x, data.tensors[1]), device=CPU)), []
        getattr(learn, f'to_{mode}')(**options)
        learn.fit(1, 0.01)
        with waits() as found:
            learn.add_cb(At('after_epoch', lambda l: counts.append(len(found)), 100))
            learn.fit(2, 0.01)
        return learn, counts[1] - counts[0]

    (learn, found), (_, fp32) = trained(mode, **options), trained('fp32')
    assert found - fp32 == 6 * a_step + an_epoch + a_step * bool(options)  # and the scale after a skipped step
    if options:
        assert learn.mixed_precision.skips == 3 * [i == 3 for i in range(6)]
        assert all(b.isfinite().all() for b in learn.model.buffers())


def test_the_benchmark_counts_synchronizations_beyond_fp32(device, sim, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    from nbs.benchmarks import contestants, measure

    monkeypatch.setattr(torch.accelerator, 'synchronize', lambda device: None)
    taking_part = [c for c in contestants.CONTESTANTS if c.name in ('fastai loop', 'fastxtend_amp')]
    found = measure.bench(['tiny'], ['bf16', 'fp16'], device, 1, taking_part, ['Adam', 'fused AdamW'])['rows']
    counted = {(r['mode'], r['optimizer']): r['syncs'] for r in found if r['contestant'] == 'fastxtend_amp'}
    assert counted == {('bf16', 'Adam'): 0, ('bf16', 'fused AdamW'): 0, ('fp16', 'Adam'): 1, ('fp16', 'fused AdamW'): 0}


# -- devices that lack something


@pytest.mark.parametrize('lacks, has, dtype', [('bf16', 'fp16', torch.float16), ('fp16', 'bf16', torch.bfloat16)])
def test_a_device_with_one_half_precision(lacks, has, dtype, device, sim):
    sim.amp_dtypes = [dtype]
    with pytest.raises(ValueError, match=f'(?s){lacks} .*does not run.*to_{has}'):
        build(lacks).fit(1)
    table = precision_support().set_index(['device', 'precision']).support
    assert (table[str(device), lacks], table[str(device), has], table['cpu', 'fp8']) == (
        'unsupported',
        'native',
        'emulated',
    )
    learn = build('amp')
    learn.mixed_precision.on_overflow = 'ignore'  # a look at a skipped step would run it in fp32
    seen = output_dtypes(learn)
    learn.fit(1, 0.01)
    assert {*seen} == {dtype} and not torch.is_autocast_enabled(device.type)


def test_a_device_with_neither(device, sim, monkeypatch, capsys):
    sim.amp_dtypes = []
    learn = build('amp')
    assert 'neither bf16 nor fp16' in capsys.readouterr().out
    seen = output_dtypes(learn)
    learn.fit(1)
    assert {*seen} == {torch.float32}
    with pytest.raises(ValueError, match='to_fp32'):
        build('fp16').fit(1)
    monkeypatch.delattr(torch.sim, 'get_amp_supported_dtype')  # a backend that is not complete
    table = precision_support(device).set_index('precision')
    assert table.support['bf16'] == 'unsupported' and 'sim' in table.why['bf16'], table.why['bf16']


def test_tensors_of_two_devices_do_not_come_together(device, sim):
    "What a device must do for the tests above to be meaningful."
    with pytest.raises(RuntimeError, match='Expected all tensors to be on the same device'):
        torch.ones(2, device=device) + torch.ones(2, device='cpu')


# -- two devices


@pytest.mark.parametrize(
    'opt, event', [('adam', 'after_step'), ('fused adamw', 'after_batch'), ('fused adamw', 'after_epoch')]
)
def test_after_an_interrupt_training_goes_on_on_another_device(device, opt, event, sim):
    "The history of both is read, in each epoch, by `scales`, and by a copy."

    learn = build('fp16', opt, scaling=dict(init_scale=256.0))
    with pytest.raises(ZeroDivisionError):
        learn.fit(1, cbs=At(event, lambda l: 1 / (l.train_iter < 3), 20))
    for there in (CPU, device, CPU):
        n = len(learn.mixed_precision.scales) if there is device else None
        learn.dls = loaders(device=there)
        learn.model.to(there)
        learn.create_opt()
        learn.fit(2)
        assert n is None or len(learn.mixed_precision.scales) == n + 12
    assert set(learn.mixed_precision.scales) == {256.0} and sum(learn.mixed_precision.skips) == 0
    assert copy.deepcopy(learn).mixed_precision.scales == learn.mixed_precision.scales


class OnTwo(nn.Module):
    "Its first layer is on the accelerator, the second on the CPU; `to` leaves them there."

    def __init__(self, there):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8).to(there), nn.Linear(8, 1)

    def to(self, *args, **kwargs):
        return self

    def forward(self, x):
        return self.second(self.first(x).relu().float().cpu()).to(x.device)


@pytest.mark.parametrize('spoilt', [0, 2])
@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_a_step_is_skipped_whole_in_a_model_on_two_devices(device, opt, spoilt, sim):
    seen, known = [], {}

    def spoil(l):
        if l.train_iter == 3:
            [*l.model.parameters()][spoilt].grad.view(-1)[0] = float('inf')

    cbs = [
        At('after_backward', spoil, 5),
        At('after_batch', lambda l: l.training and seen.append([p.cpu() for p in params(l)]), 20),
        # Before the step itself, unless the CPU has skipped it.
        At('before_step', lambda l: known.update({l.train_iter: bool(l.mixed_precision.skipped)}), 12),
    ]
    learn = learner(OnTwo(device), opt_func=OPTS[opt], cbs=cbs).to_fp16(init_scale=256.0)
    learn.fit(1, 0.01)
    assert learn.mixed_precision.skips == [i == 3 for i in range(6)]
    assert known.get(3, True) is True and not any(skipped for i, skipped in known.items() if i != 3)
    assert same(seen[3], seen[2]) and not same(seen[4], seen[3])
