"""Two real processes over gloo: DistributedDataParallel through fastai's `distrib_ctx`, FSDP2, and the room `insight`.

As a script this file is the two processes: each runs all `SECTIONS` in turn, up to the first that fails, and writes the
errors to a file. Rank r trains on the r-th half of the data, as with fastai's DistributedDL.
"""

import datetime, importlib.util, math, os, re, sys, traceback, warnings
from contextlib import nullcontext
from pathlib import Path

import pytest, torch, torch.distributed as dist
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.distributed import DistributedDL
from torch import nn

from fastxtend_amp.training.current import precision_callback
from helpers import At, Data, autocast_state, dataset, finite, is_outside_a_fit, learner, loaders
from helpers import opt_state, output_dtypes, params, python, same, told
from training import rows

N, BS, BAD = 48, 4, 2  # 24 samples for each rank, 6 batches an epoch; the batch in which training fails


def net():
    model = rows.net()
    model.register_buffer('whole', torch.ones(1))  # which FSDP2 does not shard
    return model


def whole(learn):
    return [p.full_tensor() if hasattr(p, 'full_tensor') else p for p in params(learn)]


def build(kind, precision, opt='adam', cbs=(), dls=None, path=None, **kwargs):
    "A learner for 'ddp', 'fsdp' or, in one process, 'plain' training, which records the state after each batch."
    model, dls = net(), dls or loaders(bs=BS, train=dataset(N), valid=dataset(N))
    if kind == 'fsdp':  # as in the manual; after a validation its parameters are whole until they are used
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(model, mesh=init_device_mesh('cpu', (2,)))
        part = Data(*(t.view(2, -1, t.shape[1])[dist.get_rank()] for t in dataset(N).tensors))
        dls = loaders(bs=BS, train=part, valid=dataset(N))
    learn = learner(model, dls, cbs=list(cbs), opt_func=rows.OPTS[opt], path=path)
    scaling = dict(init_scale=256.0, growth_interval=3) if precision == 'fp16' else {}
    getattr(learn, f'to_{precision}')(**{**scaling, **kwargs})
    learn.kind, learn.seen, learn.dtypes = kind, [], output_dtypes(learn, *model)

    def look(l):
        cb = precision_callback(l)
        if l.training:
            l.seen.append((whole(l), cb and cb.scale, cb and bool(cb.skipped), type(l.model).__name__))

    return learn.add_cb(At('after_batch', look, 70))


def fit(learn, epochs=1):
    "Train; under DistributedDataParallel by fastai's own context manager."
    with learn.distrib_ctx(sync_bn=False, cpu=True) if learn.kind == 'ddp' else nullcontext():
        learn.fit(epochs, 0.01)
    return learn


def on_both(x):
    found = [None, None]
    dist.all_gather_object(found, x)
    return found


def agreed(learn):
    "Train, and compare the ranks: loss scale, skips and, tensor by tensor, parameters are equal after each batch."
    a, b = on_both(fit(learn).seen)
    assert len(a) == len(b) > 0
    for (weights, *x), (others, *y) in zip(a, b):
        assert x == y and same(weights, others) and all(p.isfinite().all() for p in weights)
    x, y = on_both(precision_callback(learn) and learn.mixed_precision.state_dict())
    assert x == y
    return learn


def bad_input(rank, *at):
    "Make these batches too large for fp16 on `rank` only: a real overflow, which DDP's averaging spreads."

    def spoil(l):
        if l.training and dist.get_rank() == rank and l.train_iter in at:
            l.xb = (l.xb[0] * 1e6,)

    return At('before_batch', spoil, 20)


def bad_shard(rank, *at):
    "Make the gradient of the part on `rank` non-finite only there, so that averaging does not spread it."

    def spoil(l):
        if dist.get_rank() == rank and l.train_iter in at:
            next(l.model.parameters()).grad.to_local().view(-1)[0] = float('inf')

    return At('after_backward', spoil, 5)


# -- training


def steps(kind, precision, path):
    "Equal a single process on the same global batches, but for rounding; in bf16 with a module in fp32."
    kept = dict(fp32_modules='2') if precision == 'bf16' else {}
    learn = agreed(build(kind, precision, 'torch sgd', **kept))
    order = torch.arange(N).view(2, -1, BS).transpose(0, 1).reshape(-1)  # what the ranks see together
    data = Data(*(t[order] for t in dataset(N).tensors))
    single = build('plain', precision, 'torch sgd', dls=loaders(bs=2 * BS, train=data, valid=data), **kept)
    single.fit(1, 0.01)
    start = params(learner(net()))
    moved, expected = (torch.cat([(p - s).flatten() for p, s in zip(whole(l), start)]) for l in (learn, single))
    # A gradient of one batch differs by 1e-7, 4e-4 and 2e-3 (relative).
    rounding = {'fp32': 1e-6, 'fp16': 1e-3, 'bf16': 8e-3}[precision]
    assert expected.norm() > 0.05 and (moved - expected).norm() / expected.norm() < rounding
    assert precision == 'fp32' or learn.mixed_precision.scales == single.mixed_precision.scales
    low = rows.TO[precision].dtype or torch.float32
    assert learn.dtypes == 6 * [low, low, torch.float32 if kept else low] and len(learn.seen) == len(single.seen) == 6
    assert {name for *_, name in learn.seen} == {dict(ddp='DistributedDataParallel', fsdp='FSDPSequential')[kind]}


def overflow(kind, opt, path):
    "On one rank: the step is skipped on all."
    spoil = bad_input if kind == 'ddp' else bad_shard
    learn = agreed(build(kind, 'fp16', opt, [spoil(1, 0, 2, 4)]))
    assert [skipped for *_, skipped, _ in learn.seen] == 3 * [True, False]
    assert learn.mixed_precision.scales == [256.0, 128.0, 128.0, 64.0, 64.0, 32.0]
    before = params(learner(net()))
    for now, _, skipped, _ in learn.seen:
        assert same(before, now) == skipped
        before = now


def low_scale(kind, opt, path):
    "A good step sets it from the gradients of all ranks."
    learn = build(kind, 'fp16', opt, [bad_input(1, 0)], init_scale=65536.0)
    learn.mixed_precision.load_state_dict({**learn.mixed_precision.state_dict(), 'scale': 1.0})
    scales = agreed(learn).mixed_precision.scales
    assert scales[:2] == [1.0, 0.5] and 1 < scales[2] < 65536


def accumulate(kind, opt, path):
    "The overflow is in the first batch of the second step."
    learn = agreed(build(kind, 'fp16', opt, [bad_input(1, 2), GradientAccumulation(2 * BS), GradientClip(0.1)]))
    assert learn.mixed_precision.scales == [256.0, 256.0, 128.0]
    moved = [not same(x, y) for (x, *_), (y, *_) in zip(learn.seen, learn.seen[1:])]
    assert moved == [True, False, False, False, True]


def second_pass(kind, opt, path):
    "In a step: its gradients are reduced before they are unscaled."

    def run(l):
        with l.amp_context():
            loss = l.loss_func(l.model(*l.xb).float(), *l.yb)
        (l.mixed_precision.scale_loss(loss) if precision_callback(l) else loss).backward()

    found = []
    for precision in ('fp32', 'fp16'):
        learn = build(kind, precision, opt, [At('before_step', run, 10.5)])
        learn.add_cb(At('before_step', lambda l: found.append(next(l.model.parameters()).grad.clone()), 11))
        fit(learn)
    for a, b in zip(found, found[len(found) // 2 :]):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)


def half_weights(kind, _, path):
    "DDP trains with flat master weights; FSDP2 does not, and neither trains without master weights."
    for opt, arguments in (('adam', dict(flat_master=True)), ('kahan', dict(master_weights=False))):
        error = pytest.raises(ValueError, match='FSDP2')
        with nullcontext() if (kind, opt) == ('ddp', 'adam') else error:
            agreed(build(kind, 'bf16', opt, **arguments))


# -- files


def checkpoint(kind, opt, path):
    "All ranks save and load; training goes on, and in a new learner. Also a file of only the model."
    spoil, name, versions = bad_input(1, 1, 2), f'{kind} {opt}', []
    learn = fit(build(kind, 'fp16', opt, [spoil], path=path))
    state, weights = learn.mixed_precision.state_dict(), whole(learn)
    learn.save(name)
    learn.save(f'{name} alone', with_opt=False)
    dist.barrier()
    saved = torch.load(path / 'models' / f'{name}.pth', weights_only=False)['model']
    assert state['scale'] == 128.0 and same([*saved.values()][1:], weights)
    new, alone = (build(kind, 'fp16', opt, path=path) for _ in range(2))
    new.model.register_load_state_dict_pre_hook(lambda *args: versions.append(args[3]))
    for p in [*new.model.parameters(), *alone.model.parameters()]:
        p.data.mul_(0.0).add_(7 + dist.get_rank())
    new.load(name, 'cpu')
    assert [saved._metadata['']] == versions == [{'version': 1}]
    assert new.mixed_precision.state_dict() == state and same(whole(new), weights)
    assert same(whole(alone.load(f'{name} alone', with_opt=False)), weights)
    learn.remove_cb(spoil)
    if kind == 'fsdp':
        with pytest.raises(RuntimeError, match='cannot write a sharded learner'):
            learn.export(path / 'model.pkl')
    fit(learn), agreed(new)
    assert same(whole(learn), whole(new)) and learn.mixed_precision.state_dict() == new.mixed_precision.state_dict()
    assert not same(whole(learn), weights)


def reads_plain_file(kind, opt, path):
    "The file was written by the process of the tests, in fp16 and without sharding."
    learn = build(kind, 'fp16', opt, path=path).load(f'plain {opt}')
    saved = torch.load(path / 'models' / f'plain {opt}.pth', weights_only=False)['model'].values()
    assert same(whole(learn), [*saved][1:]) and agreed(learn).mixed_precision.scales[0] == 4096.0


# -- insight


def warns(kind, on_overflow, path):
    "Only rank 1 sees non-finite values; nothing is run again, as the loss of each rank waits for the other's."

    def gathering_loss(pred, y):  # as contrastive losses do
        parts = [torch.zeros_like(pred) for _ in range(2)]
        dist.all_gather(parts, pred.detach().contiguous())
        return nn.functional.mse_loss(pred, y) + 0.0 * sum(p.mean() for p in parts if p.isfinite().all())

    learn, found = build(kind, 'fp16', cbs=[bad_input(1, BAD)], on_overflow=on_overflow), []
    learn.loss_func = gathering_loss
    said = [text for text in told(lambda: fit(learn)) if 'is emulated' not in text]
    if on_overflow == 'fix':
        assert said.pop(0).startswith("on_overflow='fix' only warns in distributed runs")
    assert len(learn.seen) == 6 and len(said) == dist.get_rank() and {*learn.dtypes} == {torch.float16}
    for text in said:
        assert re.match(rf'fp16 training failed: the loss is (inf|nan) \(batch {BAD + 1}, loss scale 256\)', text), text
        assert 'In distributed runs the batch is not run again' in text and 'Re-running' not in text
        assert '`learn.precision_report()` in one process' in text
    if kind == 'ddp':  # in a validation as well
        learn.add_cb(At('before_batch', lambda l: l.xb[0].mul_(1e6 ** dist.get_rank()), 20))
        with learn.distrib_ctx(sync_bn=False, cpu=True):
            said = told(lambda: found.append(learn.validate()[0]))
        assert len(said) == 1 and 'in validation is NaN or inf' in said[0] and not math.isfinite(found[0])


def compares(kind, precision, path):
    "Only rank 1 compares, with two models whose training waits for rank 0; `measure=True` raises an error on both."
    models = nn.parallel.DistributedDataParallel(net()), nn.Sequential(net(), nn.SyncBatchNorm(1))
    wrapped, _ = learners = [learner(m) for m in models]
    for learn in learners[: 2 * dist.get_rank()]:
        compared = learn.compare_precision(precision, n_steps=4, n_seeds=1)
        assert (compared.table['steps'] >= 4).all()
    with pytest.raises(RuntimeError, match=r'^to_amp\(measure=True\) is not available in distributed runs'):
        wrapped.to_amp(measure=True)
    assert type(wrapped.model).__name__ == 'DistributedDataParallel'


def raises(kind, precision, path):
    "Rank 1 raises in its third batch and ends; rank 0 gets an error from the broken connection, and does not hang."

    def stop(l):
        if dist.get_rank() == 1 and l.training and l.train_iter == 2:
            raise KeyError('rank 1')

    learn, before = build(kind, precision, cbs=[At('after_loss', stop, 20)]), autocast_state()
    with pytest.raises(Exception) as e:
        fit(learn)
    if dist.get_rank() == 1:
        assert 'rank 1' in str(e.value)
    else:
        assert isinstance(e.value, RuntimeError)
    assert autocast_state() == before and is_outside_a_fit(learn)
    assert not any(p.grad is not None and p.grad.any() for p in learn.model.parameters())


TWO, MODES = ('adam', 'fused adamw'), ('fp32', 'fp16', 'bf16')  # the CPU skips a step, or the device does
SECTIONS = [
    *((f, kind, arg) for kind in ('ddp', 'fsdp') for f, args in ((steps, MODES), (overflow, TWO)) for arg in args),
    *((checkpoint, kind, opt) for kind in ('ddp', 'fsdp') for opt in TWO),
    *((reads_plain_file, 'fsdp', opt) for opt in TWO),
    *((f, kind, 'adam') for kind in ('ddp', 'fsdp') for f in (low_scale, second_pass, half_weights)),
    *((accumulate, 'ddp', 'adam'), (accumulate, 'fsdp', 'fused adamw')),
    *((warns, 'ddp', 'warn'), (warns, 'ddp', 'fix'), (warns, 'fsdp', 'warn'), (compares, 'ddp', 'bf16')),
    (raises, 'ddp', 'fp16'),  # last: the connection is broken afterwards
]


def main(rank, path):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    warnings.simplefilter('ignore')
    dist.init_process_group('gloo', f'file://{path}/store', datetime.timedelta(seconds=60), rank=rank, world_size=2)

    def broadcast(self, t, rank):  # fastai's sends the indices through CUDA, for the sake of nccl
        t = torch.tensor(t)
        dist.broadcast(t, rank)
        return t.tolist()

    DistributedDL._broadcast = broadcast
    errors = {}
    for f, kind, arg in SECTIONS:
        try:
            f(kind, arg, path)
            errors[f.__name__, kind, arg] = ''
        except BaseException:
            errors[f.__name__, kind, arg] = traceback.format_exc()
            break
    torch.save(errors, path / f'{rank}.pt')
    os._exit(0)


@pytest.fixture(scope='module')
def job(tmp_path_factory):
    "The errors of both ranks by section, the folder of their files, and the learners whose files they read."
    if importlib.util.find_spec('torch_xla'):
        pytest.skip('Accelerate uses the XLA device where torch_xla is installed')
    path = tmp_path_factory.mktemp('job')
    for opt in TWO:
        fit(build('plain', 'fp16', opt, path=path, init_scale=512.0, growth_interval=4)).save(f'plain {opt}')
    env = dict(WORLD_SIZE='2', MASTER_ADDR='127.0.0.1', MASTER_PORT='29500')  # Accelerate wants them
    for _ in range(2):  # a rank has died in PyTorch ("double free") once in some tens of runs
        done = python(__file__, path, ACCELERATE_USE_CPU='1', **env)
        if 'terminated with signal' not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-5000:]
    return [torch.load(path / f'{r}.pt') for r in range(2)], path


@pytest.mark.parametrize('name, kind, arg', [(f.__name__, kind, arg) for f, kind, arg in SECTIONS])
def test_on_two_ranks(name, kind, arg, job):
    errors = [rank.get((name, kind, arg), 'was not run, because an earlier one failed') for rank in job[0]]
    assert errors == ['', ''], '\n'.join(errors)


@pytest.mark.parametrize('opt', TWO)
def test_one_process_reads_a_sharded_learners_file(opt, job):
    path = job[1]
    saved = torch.load(path / 'models' / f'fsdp {opt}.pth', weights_only=False)['model'].values()
    learn = build('plain', 'fp16', opt, path=path, init_scale=2.0).load(f'fsdp {opt}')
    assert same(params(learn), [*saved][1:]) and learn.mixed_precision.scale == 128.0
    for p, state in zip(params(learn), opt_state(learn.opt)):
        assert {v.shape for v in state.values() if isinstance(v, torch.Tensor) and v.ndim} == {p.shape}
    before = params(learn)
    learn.fit(1, 0.01)
    assert finite(learn) and not same(params(learn), before)


if __name__ == '__main__':
    import accelerate  # noqa: F401  here, so that it is imported once for both
    import torch.multiprocessing as mp

    torch.set_num_threads(1)
    mp.start_processes(main, (Path(sys.argv[1]),), nprocs=2, start_method='fork')  # if one fails, the other is ended
