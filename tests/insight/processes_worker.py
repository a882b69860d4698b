"One of several processes, started by `test_processes.py`; what it sees goes into a file for the tests to judge."
import datetime, sys, warnings
from pathlib import Path

import torch
import torch.distributed as dist
from fastai.distributed import DistributedDL
from torch import nn

from helpers import *

# the batch in which rank 1 alone sees something not finite
BAD = 2


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def gathering_loss(pred, y):
    "As contrastive losses do: every process waits for the predictions of the others."
    parts = [torch.zeros_like(pred) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, pred.detach().contiguous())
    return nn.functional.mse_loss(pred, y) + 0. * sum(p.mean() for p in parts if p.isfinite().all())


def spoil(learn):
    if learn.training and dist.get_rank() == 1 and learn.train_iter == BAD: learn.xb = (learn.xb[0] * 1e7,)


def build(model=None, loss_func=gathering_loss, cbs=(), **args):
    n = dist.get_world_size() * 24
    learn = learner(model or net(), loaders(train=dataset(n), valid=dataset(n)), loss_func,
                    cbs=[At('before_batch', spoil, 20), *cbs])
    learn.seen = []
    learn.add_cb(At('before_batch', lambda l: l.seen.append(l.train_iter) if l.training else None, 30))
    return learn.to_fp16(init_scale=256., **args)


def fit_ddp(learn):
    with learn.distrib_ctx(sync_bn=False, cpu=True): learn.fit(1, .01)


def sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh, model = init_device_mesh('cpu', (dist.get_world_size(),)), net()
    for layer in (model[0], model[2], model): fully_shard(layer, mesh=mesh)
    return model


def fit(learn): learn.fit(1, .01)


def outcome(learn, run):
    "What was raised or said, and the batches that were begun."
    error = None
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        try: run(learn)
        except FloatingPointError as e: error = str(e)
    return dict(error=error, said=[str(w.message) for w in found if 'goes wrong' in str(w.message)], batches=learn.seen)


def ddp_warns(): return outcome(build(), fit_ddp)
def ddp_raises(): return outcome(build(on_overflow='raise'), fit_ddp)
def fsdp_warns(): return outcome(build(sharded()), fit)
def fsdp_raises(): return outcome(build(sharded(), on_overflow='raise'), fit)


def one_rank_compares():
    "Rank 1 alone asks; the others go on."
    if dist.get_rank() != 1: return None
    learn = learner(nn.Sequential(nn.Linear(6, 4), nn.SyncBatchNorm(4), nn.Linear(4, 1)))
    return learn.compare_precision('bf16', n_steps=4, n_seeds=1).table['steps'].to_dict()


def all_compare_wrapped():
    learn = learner(nn.parallel.DistributedDataParallel(net()))
    table = learn.compare_precision('bf16', n_steps=4 + dist.get_rank(), n_seeds=dist.get_rank()).table
    return table['steps'].to_dict(), type(learn.model).__name__


def choice_is_refused():
    try: learner(nn.parallel.DistributedDataParallel(net())).to_amp(measure=True)
    except RuntimeError as e: return str(e)


SCENARIOS = (ddp_warns, ddp_raises, fsdp_warns, fsdp_raises, one_rank_compares, all_compare_wrapped,
             choice_is_refused)


def main(path):
    torch.set_num_threads(1)
    dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=40))
    # fastai sends the indices through CUDA, for the sake of nccl.
    def broadcast(self, t, rank): t = torch.tensor(t); dist.broadcast(t, rank); return t.tolist()
    DistributedDL._broadcast = broadcast
    results = {}
    for f in SCENARIOS:
        results[f.__name__] = f()
        dist.barrier()
    torch.save(results, Path(path)/f'{dist.get_rank()}.pt')
    dist.destroy_process_group()


if __name__ == '__main__': main(*sys.argv[1:])
