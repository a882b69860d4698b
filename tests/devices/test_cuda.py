"What only an NVIDIA GPU can show: synchronizations, memory, CUDA graphs. test_accelerator.py runs there as well."

import warnings

import pytest, torch
from torch import nn

from helpers import OPTIMIZERS, At, Data, learner, loaders, output_dtypes
from training.rows import net

pytestmark = pytest.mark.cuda
HALVES = pytest.mark.parametrize('precision', ['fp16', 'bf16'])


def build(precision, model=None, opt='adam', rows=48, **kwargs):
    learn = learner(model, loaders(rows, device=torch.device('cuda', 0), **kwargs), opt_func=OPTIMIZERS[opt])
    return getattr(learn, f'to_{precision}')(**(dict(init_scale=256.0) if precision == 'fp16' else {}))


@pytest.mark.parametrize('opt, syncs', [('adam', 1), ('fused adamw', 0)])
def test_host_syncs_as_a_difference_to_fp32(opt, syncs):
    def count(precision):
        learn, counts = build(precision, opt=opt), []
        learn.fit(1, 0.01)

        def begin(l):
            if l.training:
                torch.cuda.set_sync_debug_mode('warn'), counts.append(len(caught))

        def end(l):
            counts.append(len(caught)), torch.cuda.set_sync_debug_mode('default')

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter('always')
            learn.fit(1, 0.01, cbs=[At('after_pred', begin, -100), At('after_step', end, 100)])
        return counts[-1] - counts[-2]

    assert count('fp16') - count('fp32') == syncs


@HALVES
def test_a_step_needs_less_memory_than_in_fp32(precision):
    "Activations dominate: 8 layers of 1,024 on a batch of 4,096 rows."

    def peak(precision):
        torch.manual_seed(0)
        layers, x = [m for _ in range(8) for m in (nn.Linear(1024, 1024), nn.Tanh())], torch.randn(4096, 1024)
        train, valid = Data(x, x[:, :1]), Data(x[:8], x[:8, :1])
        learn = build(precision, nn.Sequential(*layers, nn.Linear(1024, 1)), train=train, valid=valid, bs=4096)
        learn.fit(1, 1e-4)
        torch.cuda.reset_peak_memory_stats()
        learn.fit(1, 1e-4)
        return torch.cuda.max_memory_allocated()

    assert peak(precision) < 0.8 * peak('fp32')


@HALVES
def test_cuda_graphs(precision):
    eager, graphs = (build(precision, net()) for _ in range(2))
    graphs.model = torch.compile(graphs.model, mode='reduce-overhead')
    for learn in (eager, graphs):
        learn.fit(4, 0.01)
    assert torch.allclose(*(torch.stack(learn.recorder.losses) for learn in (graphs, eager)), rtol=0.05)


def test_data_parallel_computes_in_fp16():
    learn = build('fp16', nn.DataParallel(net().cuda()))
    dtypes = output_dtypes(learn, learn.model.module[0])
    learn.fit(1, 0.01)
    assert {*dtypes} == {torch.float16}
