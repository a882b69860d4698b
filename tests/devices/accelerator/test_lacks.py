"Devices that lack something, simulated: training is right, or refused when `fit` starts; report and diagnosis work."
import pytest, torch

from devices.simulated import is_installed
from fastxtend_amp import precision_support
from helpers import *

pytestmark = [pytest.mark.skipif(not is_installed(), reason='needs a simulated device'),
              pytest.mark.filterwarnings('ignore:master_weights=False with')]

LACKS = {
    'float64': dict(float64=False),
    'frexp': dict(missing={'frexp'}),
    'both, as MPS': dict(float64=False, missing={'frexp'}),
}


@pytest.fixture
def lacks(sim, request):
    vars(sim).update(LACKS[request.param])
    return request.param


def spoil(learn):
    "One gradient that is not finite, in the third and the sixth step."
    if learn.iter in (2, 5): next(learn.model.parameters()).grad.view(-1)[0].fill_(float('inf'))


def trained(mode, opt, device=None):
    "Losses, scales and skips of a fit with two steps that are to be skipped, on `device` or the simulated one."
    learn = PRECISIONS[mode](learner(mlp(), loaders(n=48, device=device), opt_func=OPTIMIZERS[opt]))
    if 'fp16' in mode: learn.add_cb(At('after_backward', spoil, 100))
    learn.fit(1, .01)
    losses = [float(l) for l in learn.recorder.losses]
    return losses if learn.precision is None else (losses, learn.precision.scales, learn.precision.n_skipped)


every = pytest.mark.parametrize('lacks', LACKS, indirect=True)
CPU = torch.device('cpu')


@every
@pytest.mark.parametrize('opt', ['sgd', 'adam', 'fused adamw'])
@pytest.mark.parametrize('mode', PRECISIONS)
def test_training(mode, opt, lacks):
    "The CPU's numbers; fp16 may be refused for want of float64, as GradScaler does without on devices named mps alone."
    try: found = trained(mode, opt)
    except ValueError as e:
        assert 'fp16' in mode and 'float64' in lacks + 'float64' * ('MPS' in lacks) and 'float64' in str(e)
        return
    assert found == trained(mode, opt, CPU)


@every
def test_report(lacks):
    report = learner(Attentive(), loaders(n=48)).precision_report(('bf16', 'fp16'))
    assert report.fp32_modules == ['attn'] and 'attn' in str(report)


@every
def test_diagnosis(lacks):
    learn = learner(Attentive(), loaders(n=48), opt_func=OPTIMIZERS['fused adamw']).to_fp16()
    if 'float64' in lacks or 'MPS' in lacks:                     # GradScaler does without on devices named mps alone
        with pytest.raises(ValueError, match='float64'): learn.fit(1, .01)
        return
    with pytest.warns(UserWarning, match="module 'attn'"): learn.fit(1, .01)


@every
def test_comparison(lacks):
    table = learner(mlp(), loaders(n=48)).compare_precision(n_steps=8, n_seeds=1).table.loc[['fp32', 'bf16']]
    assert list(table['steps']) == [8, 8] and table['loss'].notna().all(), table['note']


@pytest.mark.parametrize('mode,opt', [('fp16', 'adam'), ('fp16', 'fused adamw'), ('half fp16', 'sgd')])
def test_fp16_where_gradscaler_needs_float64_and_the_device_has_none(mode, opt, sim):
    "As on Intel's Arc A: refused when `fit` starts, with what works there; before a step."
    sim.float64, sim.name = False, 'arc'
    learn, steps = PRECISIONS[mode](learner(mlp(), loaders(n=48), opt_func=OPTIMIZERS[opt])), []
    learn.add_cb(At('before_step', steps.append, -100))
    with pytest.raises(ValueError, match='(?s)float64.*to_bf16'): learn.fit(1, .01)
    assert not steps


@pytest.mark.parametrize('opt', ['fused adamw', 'fused sgd'])
@pytest.mark.parametrize('mode', ['fp16', 'half fp16'])
def test_fused_kernels_that_ignore_found_inf(mode, opt, sim):
    "As those of MPS did in some versions of PyTorch: the host has to hold the step back."
    sim.ignores_found_inf = True
    found = trained(mode, opt)
    assert found == trained(mode, opt, CPU) and found[2] == 2


# -- precisions that the device has not

def only(sim, device, dtype):
    "Let the device do this half precision alone."
    sim.amp_dtypes, sim.bf16 = [dtype], dtype is torch.bfloat16
    if device.type == 'cuda' and dtype is torch.float16: sim.capability = (6, 0)


@pytest.mark.parametrize(
    'call', [lambda l: l.to_bf16(), lambda l: l.to_half_weights()], ids=['to_bf16', 'to_half_weights']
)
def test_no_bf16(call, device, sim):
    only(sim, device, torch.float16)
    with pytest.raises(ValueError, match='(?s)bf16 .*does not run.*to_fp16'): call(learner(mlp(), loaders())).fit(1)
    assert dict(zip(*precision_support(device)[['mode', 'support']].values.T)) == {
        'bf16': 'unsupported',
        'fp16': 'native',
    }
    assert trained('fp16', 'adam') == trained('fp16', 'adam', CPU)
    learn = learner(mlp(), loaders()).to_amp()
    learn.fit(1, .01)
    assert learn.precision.mode == 'fp16'


@pytest.mark.parametrize(
    'call', [lambda l: l.to_fp16(), lambda l: l.to_half_weights('fp16')], ids=['to_fp16', 'to_half_weights']
)
def test_no_fp16(call, device, sim):
    if device.type == 'cuda': pytest.skip('every CUDA device has fp16')
    only(sim, device, torch.bfloat16)
    with pytest.raises(ValueError, match='(?s)fp16 .*does not run.*to_bf16'): call(learner(mlp(), loaders())).fit(1)
    assert trained('bf16', 'adam') == trained('bf16', 'adam', CPU)
    learn = learner(mlp(), loaders()).to_amp()
    learn.fit(1, .01)
    assert learn.precision.mode == 'bf16'


def test_neither(device, sim):
    "A device whose autocast takes no dtype at all: plain fp32, and `to_amp` says so."
    if device.type == 'cuda': pytest.skip('every CUDA device has fp16')
    sim.amp_dtypes = []
    with pytest.warns(UserWarning, match='neither bf16 nor fp16'): learner(mlp(), loaders()).to_amp().fit(1)
    with pytest.raises(ValueError, match='to_fp32'): learner(mlp(), loaders()).to_fp16().fit(1)


@pytest.mark.filterwarnings('default:.*is emulated on device.*')
def test_compute_capability_7_5(device, sim):
    "A T4: bf16 runs emulated, with a warning that names fp16."
    if device.type != 'cuda': pytest.skip('CUDA')
    sim.capability = (7, 5)
    with pytest.warns(UserWarning, match='(?s)bf16 is emulated.*7.5.*to_fp16'):
        assert trained('bf16', 'adam') == trained('bf16', 'adam', CPU)
    learn = learner(mlp(), loaders()).to_amp()
    learn.fit(1)
    assert learn.precision.mode == 'fp16' and list(precision_support(device).support) == ['emulated', 'native']


def test_the_table_of_a_device(device, sim):
    "One without float64 and frexp is told apart by what it does, not by its name."
    sim.float64, sim.missing = False, {'frexp'}
    assert list(precision_support(device).support) == ['native', 'native']
