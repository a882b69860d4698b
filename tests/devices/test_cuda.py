"What only an NVIDIA GPU can show: synchronizations, memory, CUDA graphs. test_accelerator.py runs there as well."

import warnings

import pytest, torch

from fastxtend_amp import precision_support
from helpers import *

pytestmark = pytest.mark.cuda
HALVES = pytest.mark.parametrize('mode', ['fp16', 'bf16'])


def cuda():
    return torch.device('cuda', 0)


def build(mode, opt='adam', model=None, dls=None, **scaling):
    learn = learner(model or mlp(), dls or loaders(n=48, device=cuda()), opt_func=OPTIMIZERS[opt])
    return getattr(learn, f'to_{mode}')(**(scaling if mode == 'fp16' else {}))


def test_support_is_what_the_card_says():
    table = precision_support('cuda').set_index('mode').support
    assert table['bf16'] == ('native' if torch.cuda.get_device_capability()[0] >= 8 else 'emulated')
    learn = build('amp')
    learn.fit(1)
    assert table['fp16'] == 'native' and learn.precision.mode == ('bf16' if table['bf16'] == 'native' else 'fp16')


@pytest.mark.parametrize('opt,syncs', [('adam', 1), ('fused adamw', 0)])
def test_host_syncs_as_a_difference_to_fp32(opt, syncs):
    def count(mode):
        learn, counts = build(mode, opt, init_scale=256.0), []
        learn.fit(1, 0.01)

        def begin(l):
            if l.training:
                torch.cuda.set_sync_debug_mode('warn'), counts.append(len(caught))

        def end(l):
            counts.append(len(caught)), torch.cuda.set_sync_debug_mode('default')

        learn.add_cbs([At('after_pred', begin, -100), At('after_step', end, 100)])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            learn.fit(1, 0.01)
        return counts[-1] - counts[-2]

    assert count('fp16') - count('fp32') == syncs


@HALVES
def test_a_step_needs_less_memory_than_in_fp32(mode):
    "Activations dominate: 8 layers of 1,024 on a batch of 4,096 rows."

    def peak(mode):
        torch.manual_seed(0)
        layers = [m for _ in range(8) for m in (nn.Linear(1024, 1024), nn.Tanh())]
        x = torch.randn(4096, 1024)
        dls = loaders(train=Data(x, x[:, :1]), valid=Data(x[:8], x[:8, :1]), bs=4096, device=cuda())
        learn = build(mode, model=nn.Sequential(*layers, nn.Linear(1024, 1)), dls=dls)
        learn.fit(1, 1e-4)
        torch.cuda.reset_peak_memory_stats()
        learn.fit(1, 1e-4)
        return torch.cuda.max_memory_allocated()

    assert peak(mode) < 0.8 * peak('fp32')


@HALVES
def test_cuda_graphs(mode):
    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    eager, graphs = (build(mode, model=model(), init_scale=256.0) for _ in range(2))
    graphs.model = torch.compile(graphs.model, mode='reduce-overhead')
    losses = []
    for learn in (eager, graphs):
        learn.fit(4, 0.01)
        losses.append([float(l) for l in learn.recorder.losses])
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_data_parallel_computes_in_fp16_by_itself_and_refuses_bf16():
    dtypes = set()

    def new():
        return nn.DataParallel(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)).cuda())

    learn = build('fp16', model=new())
    learn.model.module[0].register_forward_hook(lambda m, i, o: dtypes.add(o.dtype))
    learn.fit(1, 0.01)
    assert dtypes == {torch.float16}
    with pytest.raises(ValueError, match='nn.DataParallel supports only fp16 .*not bf16'):
        build('bf16', model=new()).fit(1)
