"""Two processes, started by `test_distributed.py`. Each writes what it sees to a file, which the tests check.

Rank r trains on the r-th half of the data, as with fastai's DistributedDL, so that a single process sees the same
batches in the order of `in_global_batches`.
"""

import datetime, os, sys, warnings
from contextlib import nullcontext
from pathlib import Path

import accelerate  # noqa: F401  here, so that it is imported once for both
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.distributed import DistributedDL
from torch import nn

from helpers import *

N, BS = 48, 4  # 24 samples for each rank, 6 batches an epoch
FP16 = dict(init_scale=256.0, growth_interval=3)


def net():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    model.register_buffer('whole', torch.ones(1))  # which FSDP2 does not shard
    return model


def in_global_batches(data):
    "`data` in the order in which a single process with batches of 2 * BS sees what the ranks see together."
    order = torch.arange(N).view(2, -1, BS).transpose(0, 1).reshape(-1)
    return Data(*(t[order] for t in data.tensors))


def whole(t):
    return (t.full_tensor() if hasattr(t, 'full_tensor') else t).detach().clone()


def whole_params(learn):
    return [whole(p) for p in learn.model.parameters()]


def sharded(model):
    "Shard `model` by FSDP2 as the manual does: after a validation its parameters are whole until they are used."
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model, mesh=init_device_mesh('cpu', (2,)))


def build(kind, mode, opt='adam', cbs=(), dls=None, path=None, **kwargs):
    "A learner for 'ddp', 'fsdp' or, in one process, 'plain' training, which records the state after each batch."
    model, dls = net(), dls or loaders(bs=BS, train=dataset(N), valid=dataset(N))
    if kind == 'fsdp':  # this rank's part of the data
        part = Data(*(t.view(2, -1, t.shape[1])[dist.get_rank()] for t in dataset(N).tensors))
        model, dls = sharded(model), loaders(bs=BS, train=part, valid=dataset(N))
    learn = learner(model, dls, cbs=list(cbs), opt_func=OPTIMIZERS[opt], path=path)
    if mode != 'fp32':
        getattr(learn, f'to_{mode}')(**({**FP16, **kwargs} if mode == 'fp16' else kwargs))
    learn.kind, learn.seen, learn.dtypes, learn.types = kind, [], set(), set()
    learn.model[0].register_forward_hook(lambda m, i, o: learn.dtypes.add(o.dtype))

    def look(l):
        l.types.add(type(l.model).__name__)
        cb = l.precision
        if l.training:
            l.seen.append(dict(params=whole_params(l), scale=cb and cb.scale, skipped=cb and cb.skipped))

    return learn.add_cb(At('after_batch', look, 70))


def fit(learn, epochs=1):
    "Train; under DistributedDataParallel by fastai's own context manager."
    with learn.distrib_ctx(sync_bn=False, cpu=True) if learn.kind == 'ddp' else nullcontext():
        learn.fit(epochs, 0.01)
    return learn


def result(learn, **more):
    cb = learn.precision
    return dict(
        seen=learn.seen,
        dtypes=learn.dtypes,
        types=learn.types,
        params=whole_params(learn),
        scales=cb and cb.scales,
        skips=[s['skipped'] for s in learn.seen],
        state=cb and cb.state_dict(),
        **more,
    )


def bad_input(rank, at):  # The rank, and in which batches
    "Make these batches too large for fp16 on `rank` only: a real overflow, which DDP's averaging spreads."

    def spoil(l):
        if l.training and dist.get_rank() == rank and l.train_iter in at:
            l.xb = (l.xb[0] * 1e6,)

    return At('before_batch', spoil, 20)


def bad_shard(rank, at):
    "Make the gradient of the part on `rank` non-finite only there, so that averaging does not spread it."

    def spoil(l):
        if dist.get_rank() != rank or l.train_iter not in at:
            return
        next(l.model.parameters()).grad.to_local().view(-1)[0] = float('inf')

    return At('after_backward', spoil, 5)


# -- the sections: each trains for 'ddp' or 'fsdp' with one argument, and returns what the tests check


def steps(kind, mode, path):
    return result(fit(build(kind, mode, 'torch sgd'), 2))


def overflow(kind, opt, path):
    return result(fit(build(kind, 'fp16', opt, [bad_input(1, {0, 2, 4})])))


def one_shard(kind, opt, path):
    return result(fit(build(kind, 'fp16', opt, [bad_shard(1, {0, 2, 4})])))


def accumulate(kind, opt, path):
    return result(fit(build(kind, 'fp16', opt, [bad_input(1, {2}), GradientAccumulation(2 * BS), GradientClip(0.1)])))


def fp32_modules(kind, name, path):
    learn, dtypes = build(kind, 'bf16', fp32_modules=name), []
    for m in learn.model:
        m.register_forward_hook(lambda m, i, o: dtypes.append(o.dtype))
    return result(fit(learn), layers=dtypes[:3])


def checkpoint(kind, opt, path):
    "Train, save, continue; then the same from the file in a new learner. Also with a file of only the model."
    spoil = bad_input(1, {1, 2})
    learn = fit(build(kind, 'fp16', opt, [spoil], path=path))
    state, params = learn.precision.state_dict(), whole_params(learn)
    learn.save(f'{kind} {opt}')
    learn.save(f'{kind} {opt} alone', with_opt=False)
    new, alone = (build(kind, 'fp16', opt, path=path) for _ in range(2))
    for l in (new, alone):
        with torch.no_grad():
            for p in l.model.parameters():
                p.mul_(0.0).add_(7 + dist.get_rank())
    new.load(f'{kind} {opt}', 'cpu')
    loaded = new.precision.state_dict(), whole_params(new)
    alone = whole_params(alone.load(f'{kind} {opt} alone', with_opt=False))
    learn.remove_cb(spoil)
    return dict(state=state, params=params, loaded=loaded, alone=alone, on=[result(fit(l)) for l in (learn, new)])


def reads_plain_file(kind, opt, path):
    "The file was written by the process of the tests, in fp16 and without sharding."
    learn = build(kind, 'fp16', opt, path=path).load(f'plain {opt}')
    return dict(loaded=whole_params(learn), **result(fit(learn)))


def raises(kind, mode, path):
    "Rank 1 raises in its third batch and ends; rank 0 gets an error from the broken connection, and does not hang."

    def stop(l):
        if dist.get_rank() == 1 and l.training and l.train_iter == 2:
            raise KeyError('rank 1')

    learn, before = build(kind, mode, cbs=[At('after_loss', stop, 20)]), autocast_state()
    try:
        fit(learn)
    except Exception as e:
        grads = any(p.grad is not None and bool(p.grad.any()) for p in learn.model.parameters())
        return dict(
            error=f'{type(e).__name__}: {e}',
            before=before,
            after=autocast_state(),
            grads=grads,
            fit=learn.precision.fit,
        )


def warns(kind, mode, path):
    "Only rank 1 sees non-finite values, and the loss of each rank waits for the predictions of the other."

    def gathering_loss(pred, y):  # as contrastive losses do
        parts = [torch.zeros_like(pred) for _ in range(2)]
        dist.all_gather(parts, pred.detach().contiguous())
        return nn.functional.mse_loss(pred, y) + 0.0 * sum(p.mean() for p in parts if p.isfinite().all())

    learn = build(kind, mode, cbs=[bad_input(1, {BAD})])
    learn.loss_func = gathering_loss
    return dict(said=told(lambda: fit(learn), 'failed'), n_batches=len(learn.seen))


def fixes(kind, mode, path):
    "With on_overflow='fix', an overflow that only rank 1 sees is not fixed; each rank warns when the fit starts."
    learn, batches = build(kind, mode, cbs=[bad_input(1, {BAD})], on_overflow='fix'), []
    learn.add_cb(At('after_batch', lambda l: batches.append(l.training), 71))
    said = told(lambda: fit(learn), '')
    return dict(said=said, n_batches=sum(batches), fixes=learn.precision.fixes, mode=learn.precision.mode.value)


def compares(kind, mode, path):
    "Only rank 1 compares, with two models whose training waits for rank 0; `measure=True` raises an error on both."
    models = nn.parallel.DistributedDataParallel(net()), nn.Sequential(net(), nn.SyncBatchNorm(1))
    wrapped, _ = learners = [learner(m) for m in models]
    steps = [
        l.compare_precision(mode, n_steps=4, n_seeds=1).table['steps'].to_dict()
        for l in learners[: 2 * dist.get_rank()]
    ]
    try:
        wrapped.to_amp(measure=True)
    except RuntimeError as e:
        return dict(steps=steps, refusal=str(e), model=type(wrapped.model).__name__)


BAD, TWO = 2, ('adam', 'fused adamw')  # the CPU skips a step, or the device does
SECTIONS = {
    'ddp': {
        steps: ('fp32', 'fp16', 'bf16'),
        overflow: TWO,
        accumulate: ('adam',),
        fp32_modules: ('2',),
        checkpoint: TWO,
        warns: ('fp16',),
        fixes: ('fp16',),
        compares: ('bf16',),
    },
    'fsdp': {
        steps: ('fp32', 'fp16', 'bf16'),
        overflow: TWO,
        one_shard: TWO,
        accumulate: ('fused adamw',),
        fp32_modules: ('2',),
        checkpoint: TWO,
        reads_plain_file: TWO,
        warns: ('fp16',),
    },
}


def main(rank, path):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    warnings.simplefilter('ignore')
    dist.init_process_group('gloo', f'file://{path}/store', datetime.timedelta(seconds=60), rank=rank, world_size=2)

    # fastai sends the indices through CUDA, for the sake of nccl.
    def broadcast(self, t, rank):
        t = torch.tensor(t)
        dist.broadcast(t, rank)
        return t.tolist()

    DistributedDL._broadcast = broadcast
    results = {
        (f.__name__, kind, arg): f(kind, arg, path)
        for kind, functions in SECTIONS.items()
        for f, args in functions.items()
        for arg in args
    }
    results['raises', 'ddp', 'fp16'] = raises('ddp', 'fp16', path)  # last: the connection is broken afterwards
    torch.save(results, path / f'{rank}.pt')
    os._exit(0)


if __name__ == '__main__':
    torch.set_num_threads(1)
    mp.start_processes(main, (Path(sys.argv[1]),), nprocs=2, start_method='fork')  # if one fails, the other is ended
