"""One of two or four processes, started by `test_distributed.py`; what it sees goes into a file for the tests to judge.

Global batches: rank r trains on the r-th part of the data, as fastai's DistributedDL has it, so a single process sees
the same batches in the order of `in_global_batches`.
"""
import datetime, os, sys, warnings
from pathlib import Path

import torch
import torch.distributed as dist
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.distributed import DistributedDL
from fastai.optimizer import ranger
from torch import nn

from fastxtend_amp import MixedPrecision
from helpers import *

N, BS = 48, 4                                                    # for two ranks: 24 samples each, 6 batches an epoch


def net(): torch.manual_seed(0); return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))


def in_global_batches(data, ranks=2):
    "`data` in the order in which a single process with batches of `ranks * BS` sees what the ranks see together."
    order = torch.arange(N).view(ranks, -1, BS).transpose(0, 1).reshape(-1)
    return Data(*(t[order] for t in data.tensors))


def part(data): return Data(*(t.view(dist.get_world_size(), -1, t.shape[1])[dist.get_rank()] for t in data.tensors))


class NoSync(Callback):
    "DDP's `no_sync`, or its counterpart in FSDP2, for all but the last of `n` batches that make a step."
    order = 0
    def __init__(self, n): self.n, self.ctx = n, None
    def before_batch(self):
        if not self.training: return
        last = self.train_iter % self.n == self.n - 1
        if hasattr(self.model, 'set_requires_gradient_sync'): self.model.set_requires_gradient_sync(last)
        elif not last:
            self.ctx = self.model.no_sync()
            self.ctx.__enter__()
    def _exit(self):
        if self.ctx is not None: self.ctx.__exit__(None, None, None)
        self.ctx = None
    def after_batch(self): self._exit()
    def after_cancel_batch(self): self._exit()


def whole(t): return (t.full_tensor() if hasattr(t, 'full_tensor') else t).detach().clone()


OPTIMIZERS = {**OPTIMIZERS, 'ranger': ranger}


def whole_params(learn): return [whole(p) for p in learn.model.parameters()]
def own_part(t): return t.to_local() if hasattr(t, 'to_local') else t


def build(mode, opt, cbs=(), dls=None, model=None, path=None, **kwargs):
    precision = [] if mode == 'fp32' else [MixedPrecision(mode, **kwargs)]
    dls = dls or loaders(dataset(N), BS, dataset(N))
    learn = learner(model or net(), dls, cbs=[*precision, *cbs], opt_func=OPTIMIZERS[opt], path=path)
    learn.seen, learn.dtypes, learn.types = [], set(), set()
    learn.model[0].register_forward_hook(lambda m, i, o: learn.dtypes.add(o.dtype))
    def look(l):
        l.types.add(type(l.model).__name__)
        if not l.training: return
        cb = l.precision                                         # another one after a switch
        l.seen.append(dict(params=whole_params(l), scale=cb and l.scaler.get_scale(), skipped=cb and cb.skipped))
    return learn.add_cb(At('after_batch', look, 70))


def result(learn):
    cb = learn.precision
    return dict(seen=learn.seen, dtypes=learn.dtypes, types=learn.types, after=type(learn.model).__name__,
                params=whole_params(learn),
                scales=cb and cb.scales, skips=cb and cb.scaling.history.skips.tolist(), state=cb and cb.state_dict(),
                losses=[float(l) for l in learn.recorder.losses])


def bad_input(rank, at): # The rank, and in which batches
    "On `rank` alone these batches are too large for fp16: an overflow of the real kind, which DDP's averaging spreads."
    def spoil(l):
        if l.training and dist.get_rank() == rank and l.train_iter in at: l.xb = (l.xb[0] * 1e6,)
    return At('before_batch', spoil, 20)


def bad_shard(rank, at):
    "On `rank` alone the gradient of the part that it holds is not finite, as no averaging could spread it."
    def spoil(l):
        if dist.get_rank() != rank or l.train_iter not in at: return
        next(l.model.parameters()).grad.to_local().view(-1)[0] = float('inf')
    return At('after_backward', spoil, 5)


FP16 = dict(init_scale=256., growth_interval=3)


# -- DistributedDataParallel, by fastai's own context manager

def ddp(learn, epochs=1):
    with learn.distrib_ctx(sync_bn=False, cpu=True): learn.fit(epochs, .01)
    return learn


def ddp_steps(mode, path): return result(ddp(build(mode, 'torch sgd', **(FP16 if mode == 'fp16' else {})), 2))
def ddp_overflow(opt, path): return result(ddp(build('fp16', opt, [bad_input(1, {0, 2, 4})], **FP16)))
def accumulating(): return [bad_input(1, {2}), GradientAccumulation(2 * BS)]
def ddp_accumulate(opt, path): return result(ddp(build('fp16', opt, accumulating(), **FP16)))
def ddp_no_sync(opt, path): return result(ddp(build('fp16', opt, [*accumulating(), NoSync(2)], **FP16)))
def ddp_clip(opt, path): return result(ddp(build('fp16', opt, [bad_input(1, {2}), GradientClip(.1)], **FP16)))


def ddp_to_distributed(mode, path):
    learn = build(mode, 'sgd').to_distributed(sync_bn=False, cpu=True)
    learn.fit(1, .01)
    return result(learn.detach_distributed())


def checkpoint(make, train, path, name):
    "Train, save, train on; and the same from the file in a fresh learner. `rank 0 saves` is fastai's own rule."
    learn = train(make([bad_input(1, {1, 2})]))
    state, params = learn.precision.state_dict(), [whole(p) for p in learn.model.parameters()]
    learn.save(name)
    fresh = make([])
    with torch.no_grad():
        for p in fresh.model.parameters(): p.mul_(0.).add_(7 + dist.get_rank())
    fresh.load(name)
    loaded = dict(state=fresh.precision.state_dict(), params=[whole(p) for p in fresh.model.parameters()])
    learn.remove_cb(next(cb for cb in learn.cbs if getattr(cb, 'f', None) and 'bad_input' in cb.f.__qualname__))
    return dict(state=state, params=params, loaded=loaded, on=[result(train(o))['params'] for o in (learn, fresh)],
                scales=[o.precision.state_dict() for o in (learn, fresh)])


def ddp_checkpoint(opt, path):
    return checkpoint(lambda cbs: build('fp16', opt, cbs, path=path, **FP16), ddp, path, f'ddp {opt}')


def keep_best(path, name):
    "SaveModelCallback, made to find the first epoch the best."
    from fastai.callback.tracker import SaveModelCallback
    return [SaveModelCallback(comp=lambda value, best: best == -float('inf'), fname=name, with_opt=True)]


def ddp_save_model_callback(opt, path):
    return result(ddp(build('fp16', opt, keep_best(path, 'ddp best'), path=path, **FP16), 2))


class Branches(nn.Module):
    "The layer `other` has no gradient in a batch whose first input is negative."
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.other, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 1)
    def __getitem__(self, i): return self.a                      # the layer that `build` watches
    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.head(h + self.other(h) if x.view(-1)[0] > 0 else h)


def ddp_unused_parameters(opt, path):
    from accelerate import DistributedDataParallelKwargs
    learn = build('fp16', opt, [bad_input(1, {2})], model=Branches(), **FP16)
    handlers = [DistributedDataParallelKwargs(find_unused_parameters=True)]
    with learn.distrib_ctx(sync_bn=False, cpu=True, kwargs_handlers=handlers): learn.fit(1, .01)
    return result(learn)


class Backward(torch.autograd.Function):
    "`f()` runs in each backward pass, which changes nothing."
    @staticmethod
    def forward(ctx, x, f): ctx.f = f; return x.clone()
    @staticmethod
    def backward(ctx, grad): ctx.f(); return grad.clone(), None


class InBackward(nn.Module):
    def __init__(self, f): super().__init__(); self.f = f
    def forward(self, x): return Backward.apply(x, self.f)


def fail_once():
    "On rank 1 alone, in the first backward pass of all."
    passes.append(1)
    if dist.get_rank() == 1 and len(passes) == 1: raise MemoryError('there is no room on rank 1')


passes = []
BACKWARD = {'waits for the others': lambda: dist.all_reduce(torch.ones(2)), 'fails on one rank': fail_once}


def larger_on_rank_1(l):
    if l.training and dist.get_rank() == 1: l.yb = (l.yb[0] * 300,)
def infinite_on_rank_1(l):
    if l.training and dist.get_rank() == 1 and l.train_iter == 0: l.xb = (l.xb[0] * float('inf'),)


def ddp_first_scale(kind, path):
    from accelerate import DistributedDataParallelKwargs
    model, cbs = net(), [At('before_batch', larger_on_rank_1, 20)]
    if kind in BACKWARD: model.append(InBackward(BACKWARD[kind]))
    if kind == 'infinite on one rank': cbs.append(At('before_batch', infinite_on_rank_1, 21))
    learn = build('fp16', 'torch sgd', cbs, model=model, init_scale='auto', on_overflow='ignore')
    handlers = [DistributedDataParallelKwargs(static_graph=kind == 'static graph')]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        with learn.distrib_ctx(sync_bn=False, cpu=True, kwargs_handlers=handlers): learn.fit(1, 1e-5)
    return dict(result(learn), said=[str(w.message) for w in found if 'cannot be tried' in str(w.message)])


def ddp_fp32_modules(name, path):
    learn, dtypes = build('bf16', 'torch sgd', fp32_modules=name), []
    for m in learn.model: m.register_forward_hook(lambda m, i, o: dtypes.append(o.dtype))
    return dict(result(ddp(learn)), layers=dtypes[:3])


def switching(learn, fit):
    "Four fits, each in another precision than the one before."
    modes = []
    for mode in ('bf16', 'fp16', 'fp32', 'fp16'):
        getattr(learn, f'to_{mode}')(**(FP16 if mode == 'fp16' else {}))
        learn.dtypes.clear()
        fit(learn)
        modes.append((mode, set(learn.dtypes)))
    return dict(result(learn), modes=modes)


def ddp_switch(opt, path):
    learn = build('fp32', opt)
    with learn.distrib_ctx(sync_bn=False, cpu=True): return switching(learn, fit)


def left_behind(learn):
    "What an exception must not leave."
    grads = [own_part(p.grad) for p in learn.model.parameters() if p.grad is not None]
    return dict(autocast=autocast_state(), mode=learn.precision.fit_mode, scaler=vars(learn).get('scaler'),
                has_grads=any(bool(g.any()) for g in grads))


def raises(wrap, learn):
    "Rank 1 raises in its third batch, and ends; rank 0 meets the broken connection, and no hang."
    before = autocast_state()
    def stop(l):
        if dist.get_rank() == 1 and l.training and l.train_iter == 2: raise KeyError('rank 1')
    learn.add_cb(At('after_loss', stop, 20))
    try: wrap(learn)
    except Exception as e: return dict(error=f'{type(e).__name__}: {e}', before=before, **left_behind(learn))


def ddp_raises(mode, path): return raises(ddp, build(mode, 'sgd', **(FP16 if mode == 'fp16' else {})))
def fsdp_raises(mode, path): return raises(fit, fsdp(mode, 'sgd', **(FP16 if mode == 'fp16' else {})))


# -- FSDP2

def fsdp(mode, opt, cbs=(), path=None, **scaling):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    mesh, model = init_device_mesh('cpu', (dist.get_world_size(),)), net()
    for layer in (model[0], model[2], model): fully_shard(layer, mesh=mesh)
    return build(mode, opt, cbs, loaders(bs=BS, train=part(dataset(N)), valid=dataset(N)), model, path, **scaling)


def fit(learn, epochs=1): learn.fit(epochs, .01); return learn


def fsdp_steps(mode, path): return result(fit(fsdp(mode, 'torch sgd', **(FP16 if mode == 'fp16' else {})), 2))
def fsdp_overflow(opt, path): return result(fit(fsdp('fp16', opt, [bad_input(1, {0, 2, 4})], **FP16)))
def fsdp_one_shard(opt, path): return result(fit(fsdp('fp16', opt, [bad_shard(1, {0, 2, 4})], **FP16)))
def fsdp_accumulate(opt, path): return result(fit(fsdp('fp16', opt, accumulating(), **FP16)))
def fsdp_no_sync(opt, path): return result(fit(fsdp('fp16', opt, [*accumulating(), NoSync(2)], **FP16)))


def fsdp_first_scale(opt, path):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter('always')
        out = result(fit(fsdp('fp16', opt, init_scale='auto')))
    return dict(out, said=[str(w.message) for w in found if 'cannot be tried' in str(w.message)])


def fsdp_fp32_modules(name, path):
    learn, dtypes = fsdp('bf16', 'torch sgd', fp32_modules=name), []
    for m in learn.model: m.register_forward_hook(lambda m, i, o: dtypes.append(o.dtype))
    return dict(result(fit(learn)), layers=dtypes[:3])


def fsdp_switch(opt, path): return switching(fsdp('fp32', opt), fit)


def fsdp_checkpoint(opt, path):
    out = checkpoint(lambda cbs: fsdp('fp16', opt, cbs, path, **FP16), fit, path, f'fsdp {opt}')
    learn = fsdp('bf16', opt, path=path)
    learn.save(f'fsdp {opt} model', with_opt=False)              # the model alone
    with torch.no_grad():
        for p in learn.model.parameters(): p.zero_()
    learn.load(f'fsdp {opt} model', with_opt=False)
    return {**out, 'model alone': [whole(p) for p in learn.model.parameters()]}


def fsdp_save_model_callback(opt, path):
    return result(fit(fsdp('fp16', opt, keep_best(path, 'fsdp best'), path, **FP16), 2))


def fsdp_reads_plain_file(opt, path):
    "The tests' own process has written this file, in fp16 without any sharding."
    learn = fsdp('fp16', opt, path=path, **FP16).load(f'plain {opt}')
    loaded = [whole(p) for p in learn.model.parameters()]
    return dict(loaded=loaded, **result(fit(learn)))


def fsdp_bad_files(opt, path):
    learn, errors, untouched = fsdp('fp16', opt, path=path, **FP16), {}, {}
    before = [whole(p) for p in learn.model.parameters()]
    for name in ('damaged', 'other shape'):
        try: learn.load(name)
        except Exception as e: errors[name] = f'{type(e).__name__}: {e}'
        untouched[name] = same(before, [whole(p) for p in learn.model.parameters()])
    return dict(errors=errors, untouched=untouched)


MODES, OPTS = ('fp32', 'fp16', 'bf16'), ('sgd', 'adam', 'adamw', 'fused adamw', 'fused sgd')
SHARDED_OPTS = OPTS[:-1]                                         # PyTorch 2.15 cannot shard fused SGD, in fp32 either
CHECKPOINT_OPTS = (*SHARDED_OPTS, 'ranger')                      # Lookahead keeps weights of its own
FP32_MODULES = ('0', '2', '(model)')
FIRST_SCALES = ('plain', 'waits for the others', 'fails on one rank', 'infinite on one rank', 'static graph')
SCENARIOS = {
    'ddp': [(ddp_steps, MODES), (ddp_to_distributed, ('bf16',)), (ddp_overflow, OPTS), (ddp_accumulate, OPTS),
            (ddp_no_sync, OPTS), (ddp_clip, ('sgd', 'fused adamw')), (ddp_checkpoint, OPTS),
            (ddp_save_model_callback, ('adam',)), (ddp_unused_parameters, ('sgd', 'fused adamw')),
            (ddp_fp32_modules, FP32_MODULES), (ddp_switch, ('adam', 'fused adamw')),
            (ddp_first_scale, FIRST_SCALES)],
    'fsdp': [(fsdp_steps, MODES), (fsdp_overflow, SHARDED_OPTS), (fsdp_one_shard, SHARDED_OPTS),
             (fsdp_accumulate, SHARDED_OPTS), (fsdp_no_sync, SHARDED_OPTS), (fsdp_checkpoint, CHECKPOINT_OPTS),
             (fsdp_reads_plain_file, CHECKPOINT_OPTS), (fsdp_save_model_callback, ('adam',)), (fsdp_bad_files, ('sgd',)),
             (fsdp_fp32_modules, FP32_MODULES), (fsdp_first_scale, ('adam',)), (fsdp_switch, ('adam', 'fused adamw'))],
    'four_ddp': [(ddp_steps, ('bf16',)), (ddp_overflow, ('adam', 'fused adamw')), (ddp_checkpoint, ('adam',))],
    'four_fsdp': [(fsdp_steps, ('bf16',)), (fsdp_overflow, ('adam', 'fused adamw')),
                  (fsdp_checkpoint, ('adam', 'ranger')), (fsdp_reads_plain_file, ('adam', 'ranger'))],
    **{f'{f.__name__} {mode}': [(f, (mode,))] for f in (ddp_raises, fsdp_raises) for mode in ('fp16', 'bf16')}}


def main(group, path):
    torch.set_num_threads(1)
    warnings.simplefilter('ignore')
    dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=60))
    # fastai sends the indices through CUDA, for the sake of nccl.
    def broadcast(self, t, rank): t = torch.tensor(t); dist.broadcast(t, rank); return t.tolist()
    DistributedDL._broadcast = broadcast
    results = {(f.__name__, arg): f(arg, Path(path)) for f, args in SCENARIOS[group] for arg in args}
    torch.save(results, Path(path)/f'{group}{dist.get_rank()}.pt')
    if 'raises' in group: os._exit(0)                            # the other rank can take part in nothing any more
    dist.barrier()
    dist.destroy_process_group()


if __name__ == '__main__': main(*sys.argv[1:])
