"`insight` in two processes: diagnosis, comparison and choice; run by `distributed_worker.py`."
import warnings

import torch
import torch.distributed as dist
from torch import nn

from distributed_worker import net, sharded
from helpers import *

BAD = 2                                                          # in this batch rank 1 alone sees what is not finite


def gathering_loss(pred, y):
    "As contrastive losses do: every process waits for the predictions of the others."
    parts = [torch.zeros_like(pred) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, pred.detach().contiguous())
    return nn.functional.mse_loss(pred, y) + 0. * sum(p.mean() for p in parts if p.isfinite().all())


def spoil(learn):
    if learn.training and dist.get_rank() == 1 and learn.train_iter == BAD: learn.xb = (learn.xb[0] * 1e7,)


def build(model=None, loss_func=gathering_loss, cbs=(), **args):
    learn = learner(model or net(), loaders(train=dataset(48), valid=dataset(48)), loss_func,
                    cbs=[At('before_batch', spoil, 20), *cbs])
    learn.seen = []
    learn.add_cb(At('before_batch', lambda l: l.seen.append(l.train_iter) if l.training else None, 30))
    return learn.to_fp16(init_scale=256., **args)


def fit_ddp(learn):
    with learn.distrib_ctx(sync_bn=False, cpu=True): learn.fit(1, .01)


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
def fsdp_warns(): return outcome(build(sharded(net())), fit)


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


SECTIONS = (ddp_warns, fsdp_warns, one_rank_compares, all_compare_wrapped, choice_is_refused)
