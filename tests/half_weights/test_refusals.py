"What cannot be trained with half-precision weights is named, with what to use instead; and two processes."
import subprocess, sys
from functools import partial
from pathlib import Path

import pytest, torch
from fastai.optimizer import SGD, Adam, OptimWrapper
from torch import nn

from helpers import *

pytestmark = pytest.mark.filterwarnings('ignore:.*emulated.*')
TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize('kwargs,text', [(dict(dtype='fp8'), "dtype='fp8'"), (dict(dtype='bf16', loss_scale=512.), "loss_scale=512.0"),
                                         (dict(fp32_modules='nowhere'), "fp32_modules='nowhere'")])
def test_bad_arguments_are_named(kwargs, text):
    learn = learner().to_fp16()
    with pytest.raises(ValueError) as e: learn.to_half_weights(**kwargs)
    assert text in str(e.value) and learn.precision.mode == 'fp16'


def test_weights_that_are_half_already():
    learn = learner(nn.Sequential(nn.Linear(6, 1).bfloat16())).to_half_weights()
    with pytest.raises(ValueError, match="parameter '0.weight' is torch.bfloat16 already"): learn.fit(1)


def test_data_parallel_on_one_device():
    "Where it calls the model itself; with replicas: devices/test_replicas.py."
    one, bare = (learner(m, opt_func=Adam).to_half_weights() for m in (nn.DataParallel(mlp()), mlp()))
    for learn in (one, bare): learn.fit(1, .01)
    assert same(params(one), params(bare))


class Tokens(nn.Module):
    def __init__(self, sparse): torch.manual_seed(0); super().__init__(); self.emb, self.head = nn.Embedding(16, 6, sparse=sparse), nn.Linear(6, 1)
    def forward(self, x): return self.head(self.emb((x[:, 0].abs() * 8).long().clamp(max=15)))


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
def test_sparse_embeddings_where_the_optimizer_takes_them(mode):
    for opt in (SGD, partial(OptimWrapper, opt=torch.optim.SGD)):
        learns = [learner(Tokens(True), opt_func=opt) for _ in range(3)]
        getattr(learns[0], f'to_{mode}')().fit(1, .01)
        for l, flat in zip(learns[1:], (False, True)):
            l.to_half_weights(mode, flat_master=flat).fit(1, .01)
            assert same(params(learns[0]), params(l))
    for opt in (Adam, partial(OptimWrapper, opt=torch.optim.AdamW)):
        learn = learner(Tokens(True), opt_func=opt).to_half_weights(mode)
        with pytest.raises(ValueError, match="parameter 'emb.weight' has sparse gradients"): learn.fit(1)


def test_torchscript_and_lazy_modules_run_as_under_autocast():
    def script(): torch.manual_seed(0); return nn.Sequential(torch.jit.script(nn.Linear(6, 4)), nn.Linear(4, 1))
    def lazy(): torch.manual_seed(0); return nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 1))
    for model in (script, lazy):
        a, b = (learner(model(), opt_func=Adam) for _ in range(2))
        if model is lazy:
            for l in (a, b): torch.manual_seed(1); l.model(l.dls.one_batch()[0])
        a.to_bf16().fit(2, .01)
        b.to_half_weights().fit(2, .01)
        assert same(params(a), params(b))


# -- several processes

WORKER = """
import sys; sys.path[:0] = [{tests!r}]
from helpers import *
import torch.distributed as dist
torch.set_num_threads(1)
rank = int(sys.argv[1])
dist.init_process_group('gloo', init_method='file://{path}/store', rank=rank, world_size=2)
class Wrap(Callback):
    order = 11
    def before_fit(self): self.learn.model = nn.parallel.DistributedDataParallel(self.learn.model)
    def after_fit(self): self.learn.model = self.learn.model.module
from fastai.callback.training import GradientAccumulation
results = []
for to, kwargs in {ways!r}:
    torch.manual_seed(rank)                                      # DDP hands out rank 0's
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    learn = learner(model, loaders(train=dataset(24, seed=rank)), opt_func=Adam, cbs=[Wrap(), GradientAccumulation(8)])
    getattr(learn, to)(**kwargs).fit(1, .01)
    results.append(params(learn))
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
model = fully_shard(nn.Sequential(nn.Linear(6, 1)), mesh=init_device_mesh('cpu', (2,)))
try: learner(model, opt_func=OPTIMIZERS['adamw']).to_half_weights().fit(1)
except ValueError as e: results.append(str(e))
try: learner(nn.parallel.DistributedDataParallel(mlp())).to_half_weights(master_weights=False).fit(1)
except ValueError as e: results.append(str(e))
torch.save(results, '{path}/' + str(rank))
dist.destroy_process_group()
"""


def test_two_processes(tmp_path):
    "DDP reduces the same gradients as under autocast; FSDP2 is refused by name, and DDP without masters."
    ways = [('to_bf16', {}), ('to_half_weights', dict(cast_once=True)), ('to_half_weights', dict(flat_master=True)),
            ('to_fp16', dict(loss_scale=128.)), ('to_half_weights', dict(dtype='fp16', loss_scale=128.))]
    code = WORKER.format(tests=str(TESTS), path=str(tmp_path), ways=ways)
    children = [subprocess.Popen([sys.executable, '-W', 'ignore', '-c', code, str(rank)], stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    try:
        for child in children: assert child.wait(120) == 0, child.stderr.read()[-2000:]
    finally:
        for child in children: child.kill(); child.communicate()
    (bf16, half, flat, fp16, half16, fsdp, ddp), other = (torch.load(tmp_path / str(rank)) for rank in (0, 1))
    assert same(bf16, half) and same(bf16, flat) and same(fp16, half16) and not same(bf16, fp16)
    assert all(same(a, b) for a, b in zip((bf16, half, flat, fp16, half16), other))
    assert "FSDP2: parameter '0.weight' is a DTensor" in fsdp and 'MixedPrecisionPolicy' in fsdp and '`learn.to_bf16()`' in fsdp
    assert 'master_weights=False cannot be used with DistributedDataParallel' in ddp
