"On an NVIDIA GPU, or a simulated one (test_simulated_cuda.py)."
import warnings

import pytest, torch

from devices.simulated import is_installed
from fastxtend_amp import AMPMode, MixedPrecision, precision_support
from helpers import *

pytestmark = pytest.mark.cuda


def cuda_learner(cb, opt='adam'):
    dls = loaders(n=48).to(torch.device('cuda'))
    return learner(mlp().cuda(), dls=dls, cbs=cb, opt_func=OPTIMIZERS[opt])


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_forward_runs_in_low_precision(mode):
    learn, dtypes = cuda_learner(MixedPrecision(mode)), set()
    learn.model[0].register_forward_hook(lambda m, i, o: dtypes.add((o.dtype, o.device.type)))
    learn.fit(2, .01)
    assert dtypes == {(AMPMode(mode).dtype, 'cuda')} and not torch.is_autocast_enabled('cuda')
    assert all(p.isfinite().all() for p in learn.model.parameters())


def test_support_is_what_the_card_says():
    table = precision_support('cuda').set_index('mode').support
    assert table['bf16'] == ('native' if torch.cuda.get_device_capability()[0] >= 8 else 'emulated')
    assert table['fp16'] == 'native' and MixedPrecision('auto')._decide(torch.device('cuda')) is not None


@pytest.mark.parametrize('opt,syncs', [('adam', 1), ('fused adamw', 0)])
def test_host_syncs_as_a_difference_to_fp32(opt, syncs):
    def count(cb):
        learn = cuda_learner(cb, opt); learn.fit(1, .01)
        counts = []
        def begin(l): torch.cuda.set_sync_debug_mode('warn'); counts.append(len(caught))
        def end(l): counts.append(len(caught)); torch.cuda.set_sync_debug_mode('default')
        learn.add_cbs([At('after_pred', lambda l: l.training and begin(l), -100), At('after_step', lambda l: end(l), 100)])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            learn.fit(1, .01)
        return counts[-1] - counts[-2]
    assert count(MixedPrecision('fp16', init_scale=256.)) - count(None) == syncs


def test_scale_goes_from_cpu_to_cuda():
    cb = MixedPrecision('fp16', init_scale=2.**20)
    learn = learner(cbs=cb); learn.fit(1, .01); state = cb.state_dict()
    learn.dls.to(torch.device('cuda')); learn.opt = None
    seen = []
    learn.add_cb(At('before_backward', lambda l: seen.append(l.scaler.state_dict()), 5)); learn.fit(1, .01)
    assert seen[0] == state and cb.scaling.scaler._scale.device.type == 'cuda'


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_a_step_needs_less_memory_than_in_fp32(mode):
    "Activations dominate: 8 layers of 1,024 on a batch of 4,096 rows; smaller where a CPU does the work."
    n, rows = (32, 1024) if is_installed() else (1024, 4096)
    def peak(cb):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(m for _ in range(8) for m in (torch.nn.Linear(n, n), torch.nn.Tanh())), torch.nn.Linear(n, 1)).cuda()
        x = torch.randn(rows, n)
        dls = loaders(train=Data(x, x[:, :1]), valid=Data(x[:8], x[:8, :1]), bs=rows).to(torch.device('cuda'))
        learn = learner(model, dls, cbs=cb)
        learn.fit(1, 1e-4)
        torch.cuda.reset_peak_memory_stats()
        learn.fit(1, 1e-4)
        return torch.cuda.max_memory_allocated()
    assert peak(MixedPrecision(mode)) < .8 * peak(None)


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_channels_last(mode):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 1))
    x = torch.randn(16, 3, 16, 16)
    dls = loaders(train=Data(x, x.mean((1, 2, 3))[:, None]), valid=Data(x[:4], x[:4].mean((1, 2, 3))[:, None])).to(torch.device('cuda'))
    learn, seen = learner(model.cuda(), dls).to_channelslast(amp_mode=mode), set()
    model[0].register_forward_hook(lambda m, i, o: seen.add((o.dtype, o.is_contiguous(memory_format=torch.channels_last))))
    learn.fit(2, .01)
    assert seen == {(AMPMode(mode).dtype, True)} and torch.isfinite(torch.tensor(learn.recorder.losses)).all()


@pytest.mark.not_simulated('it has no CUDA graphs, and Triton needs a driver')
@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_cuda_graphs(mode):
    torch.manual_seed(0)
    make = lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).cuda()
    eager, graphs = (learner(make(), loaders(n=48).to(torch.device('cuda')), cbs=MixedPrecision(mode, **({'init_scale': 256.} if mode == 'fp16' else {})))
                     for _ in range(2))
    graphs.model.load_state_dict(eager.model.state_dict())
    graphs.model = torch.compile(graphs.model, mode='reduce-overhead')
    for learn in (eager, graphs): learn.fit(4, .01)
    assert [float(l) for l in graphs.recorder.losses] == pytest.approx([float(l) for l in eager.recorder.losses], rel=.05)


@pytest.mark.parametrize('opt', ['adam', 'fused adamw'])
def test_exact_resume(opt, tmp_path):
    def new(): learn = cuda_learner(MixedPrecision('fp16', init_scale=2.**14, growth_interval=3), opt); learn.path = tmp_path; return learn
    straight = new(); straight.fit(2, .01)
    first = new(); first.fit(1, .01); first.save('half way')
    second = new(); second.load('half way'); second.fit(1, .01)
    assert same(params(straight), params(second)) and same_state(opt_state(straight.opt), opt_state(second.opt))
    assert straight.mixed_precision.state_dict() == second.mixed_precision.state_dict()


@pytest.mark.parametrize('capability,emulated,said', [((7, 5), True, 'emulated'), ((6, 1), False, 'unsupported')])
def test_cards_without_bf16(capability, emulated, said, monkeypatch):
    "A newer card, told to say that it is an older one."
    monkeypatch.setattr(torch.cuda, 'get_device_capability', lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, 'is_bf16_supported', lambda *args, **kwargs: emulated)
    learn = cuda_learner(MixedPrecision('bf16'))
    if said == 'emulated':
        with pytest.warns(UserWarning, match='(?s)bf16 is emulated.*7.5.*to_fp16'): learn.fit(1, .01)
    else:
        with pytest.raises(ValueError, match='(?s)bf16 .*does not run.*needs 8.0.*to_fp16'): learn.fit(1, .01)
    assert not torch.is_autocast_enabled('cuda')


def test_the_diagnosis_names_the_module_and_the_report_agrees():
    learn = learner(Attentive().cuda(), loaders(n=48).to(torch.device('cuda')), opt_func=OPTIMIZERS['fused adamw'])
    assert learn.precision_report('fp16').fp32_modules == ['attn']
    with pytest.warns(UserWarning, match="module 'attn'"): learn.to_fp16().fit(1, .01)


def test_the_comparison_tells_peak_memory():
    table = learner(mlp().cuda(), loaders(n=48).to(torch.device('cuda'))).compare_precision(n_steps=8).table
    assert (table['peak memory'] > 0).all() and (table['steps'] == 8).all()
