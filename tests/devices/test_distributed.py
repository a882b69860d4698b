"Two and four real processes over gloo: DistributedDataParallel through fastai's `distrib_ctx`, and FSDP2."
import importlib.util, os, socket, subprocess, sys, time
from pathlib import Path

import pytest, torch

import distributed_worker as worker
from distributed_worker import BS, CHECKPOINT_OPTS, FP16, FP32_MODULES, N, OPTS, SHARDED_OPTS, build, in_global_batches
from helpers import *

HERE = Path(__file__).parent


def launch(group, path, ranks=2, seconds=900):
    "The results of all ranks. A rank that fails would leave the others waiting, so the first failure ends all."
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    folders = [str(HERE.parent.parent), str(HERE.parent), str(HERE), os.environ.get('PYTHONPATH', '')]
    env = {**os.environ, 'WORLD_SIZE': str(ranks), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port),
           'ACCELERATE_USE_CPU': '1', 'OMP_NUM_THREADS': '1', 'PYTHONPATH': os.pathsep.join(folders)}
    command = [sys.executable, str(HERE/'distributed_worker.py'), group, str(path)]
    logs = [open(path/f'{group}{r}.log', 'w+') for r in range(ranks)]
    processes = [subprocess.Popen(command, env={**env, 'RANK': str(r), 'LOCAL_RANK': str(r)}, stdout=log,
                                  stderr=subprocess.STDOUT) for r, log in enumerate(logs)]
    deadline = time.monotonic() + seconds
    try:
        while time.monotonic() < deadline:
            codes = [p.poll() for p in processes]
            if any(codes) or None not in codes: break
            time.sleep(.1)
    finally:
        for p in processes: p.kill()
        for p in processes: p.wait()
    said = [(log.seek(0), log.read()[-3000:], log.close())[1] for log in logs]
    assert not any(p.returncode for p in processes), '\n'.join(said)
    return [torch.load(path/f'{group}{r}.pt', weights_only=False) for r in range(ranks)]


def skip_where_accelerate_takes_xla():
    if importlib.util.find_spec('torch_xla'): pytest.skip('Accelerate takes the XLA device where torch_xla is installed')


@pytest.fixture(scope='module')
def ddp(tmp_path_factory):
    skip_where_accelerate_takes_xla()
    path = tmp_path_factory.mktemp('ddp')
    return launch('ddp', path), path


def write_plain(path, opts):
    "Files of learners without any sharding, for the processes to read."
    plain = {}
    for opt in opts:
        learn = build('fp16', opt, path=path, init_scale=512., growth_interval=4)
        learn.fit(1, .01); learn.save(f'plain {opt}'); plain[opt] = learn
    return plain


@pytest.fixture(scope='module')
def fsdp(tmp_path_factory):
    path = tmp_path_factory.mktemp('fsdp')
    plain = write_plain(path, CHECKPOINT_OPTS)
    learn = build('fp16', 'sgd', model=nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 1)), path=path)
    learn.save('other shape', with_opt=False)
    damaged = torch.load(path/'models'/'plain sgd.pth', weights_only=False)
    damaged['opt']['grad_scaler']['scale'] = -1.
    torch.save(damaged, path/'models'/'damaged.pth')
    return launch('fsdp', path), path, plain


@pytest.fixture(scope='module')
def four_ddp(ddp, tmp_path_factory):
    path = tmp_path_factory.mktemp('four_ddp')
    return launch('four_ddp', path, 4), path


@pytest.fixture(scope='module')
def four_fsdp(tmp_path_factory):
    path = tmp_path_factory.mktemp('four_fsdp')
    plain = write_plain(path, ('adam', 'ranger'))
    return launch('four_fsdp', path, 4), path, plain


@pytest.fixture
def both(request):
    "The results of both ranks, for tests that say the same of DDP and FSDP2."
    group = request.getfixturevalue(request.param)
    return lambda name, arg: [r[f'{request.param.removeprefix("four_")}_{name}', arg] for r in group[0]]


def each(*names_and_opts):
    cases = [(g, o) for g, opts in names_and_opts for o in opts]
    return pytest.mark.parametrize('both,opt', cases, indirect=['both'], ids=[f'{g}-{o}' for g, o in cases])


BOTH = each(('ddp', OPTS), ('fsdp', SHARDED_OPTS))


def same_on_all_ranks(a, *others):
    "Scale, skips and, tensor by tensor, the parameters, after every batch."
    for b in others: same_on_two_ranks(a, b)


def same_on_two_ranks(a, b):
    assert len(a['seen']) == len(b['seen']) > 0
    for x, y in zip(a['seen'], b['seen']):
        assert x['scale'] == y['scale'] and x['skipped'] == y['skipped'] and same(x['params'], y['params'])
    assert [a[k] for k in ('scales', 'skips', 'state')] == [b[k] for k in ('scales', 'skips', 'state')]
    assert same(a['params'], b['params'])
    assert all(p.isfinite().all() for p in a['params'])


# -- every step

# A gradient of one batch differs by 1e-7, 4e-4 and 2e-3 (relative); these are the parameters' differences after 12 steps.
@pytest.mark.parametrize('mode,rounding', [('fp32', 1e-6), ('fp16', 1e-3), ('bf16', 8e-3)])
@pytest.mark.parametrize('both', ['ddp', 'fsdp'], indirect=True)
def test_n_steps_equal_a_single_process_on_the_same_global_batches(both, mode, rounding):
    a, b = both('steps', mode)
    data = in_global_batches(dataset(N))
    dls = loaders(bs=2 * BS, train=data, valid=data)
    single = build(mode, 'torch sgd', dls=dls, **(FP16 if mode == 'fp16' else {}))
    single.fit(2, .01)
    start = [p.detach() for p in worker.net().parameters()]
    moved = lambda ps: torch.cat([(p - s).flatten() for p, s in zip(ps, start)])
    expected = moved([p.detach() for p in single.model.parameters()])
    assert len(a['seen']) == len(single.seen) == 12 and expected.norm() > .1
    for r in (a, b): assert (moved(r['params']) - expected).norm() / expected.norm() < rounding
    assert same(a['params'], b['params'])
    assert a['scales'] == b['scales'] == (single.precision.scales if mode != 'fp32' else None)


@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
@pytest.mark.parametrize('both,wrapped', [('ddp', 'DistributedDataParallel'), ('fsdp', 'FSDPSequential')],
                         indirect=['both'])
def test_each_rank_computes_in_low_precision_in_a_wrapped_model(both, wrapped, mode):
    for r in both('steps', mode):
        assert r['dtypes'] == {torch.float16 if mode == 'fp16' else torch.bfloat16} and r['types'] == {wrapped}
        assert all(p.dtype is torch.float32 for p in r['params'])
        assert r['after'] == ('Sequential' if wrapped.startswith('D') else wrapped)


def test_to_distributed(ddp):
    results = [r['ddp_to_distributed', 'bf16'] for r in ddp[0]]
    for r in results: assert r['dtypes'] == {torch.bfloat16} and r['types'] == {'DistributedDataParallel'}
    same_on_all_ranks(*results)


@pytest.mark.parametrize('both', ['four_ddp', 'four_fsdp'], indirect=True)
def test_four_processes_equal_a_single_one_on_the_same_global_batches(both):
    ranks, data = both('steps', 'bf16'), in_global_batches(dataset(N), 4)
    single = build('bf16', 'torch sgd', dls=loaders(bs=4 * BS, train=data, valid=data))
    single.fit(2, .01)
    assert len(single.seen) == 6
    for r in ranks:
        for p, q in zip(r['params'], params(single)): torch.testing.assert_close(p, q, rtol=.02, atol=1e-3)
    same_on_all_ranks(*ranks)


@pytest.mark.parametrize('both', ['ddp', 'fsdp'], indirect=True)
@pytest.mark.parametrize('name', FP32_MODULES)
def test_fp32_modules(both, name):
    a, b = both('fp32_modules', name)
    same_on_all_ranks(a, b)
    kept, bf16 = torch.float32, torch.bfloat16
    assert a['layers'] == b['layers'] == {'0': [kept, kept, bf16], '2': [bf16, bf16, kept], '(model)': [kept] * 3}[name]


@each(('ddp', ['adam', 'fused adamw']), ('fsdp', ['adam', 'fused adamw']))
def test_another_precision_from_fit_to_fit(both, opt):
    a, b = both('switch', opt)
    same_on_all_ranks(a, b)
    dtypes = dict(fp32=torch.float32, bf16=torch.bfloat16, fp16=torch.float16)
    assert a['modes'] == b['modes'] == [(m, {dtypes[m]}) for m in ('bf16', 'fp16', 'fp32', 'fp16')]
    assert len(a['seen']) == 24 and a['scales'] == [256., 256., 256., 512., 512., 512.]
    assert not any(same(x['params'], y['params']) for x, y in zip(a['seen'], a['seen'][1:]))


@each(('ddp', ['sgd', 'fused adamw']))
def test_parameters_without_a_gradient_on_one_rank(both, opt):
    a, b = both('unused_parameters', opt)
    same_on_all_ranks(a, b)
    assert a['skips'] == [False, False, True, False, False, False]


# -- init_scale='auto'

@each(('ddp', worker.FIRST_SCALES))
def test_the_first_scale_is_the_smallest_of_all_ranks(both, opt):
    "Whatever a backward pass does on one of them: nobody waits, and the steps are the same."
    a, b = both('first_scale', opt)
    same_on_all_ranks(a, b)
    alone = build('fp16', 'torch sgd', dls=loaders(bs=BS, train=dataset(N)), init_scale='auto')
    alone.fit(1, 1e-5)
    tried = opt not in ('fails on one rank', 'static graph')
    why = {'fails on one rank': ['it failed in another process', 'there is no room on rank 1'],
           'static graph': ['static_graph=True'] * 2}
    for r, part in zip((a, b), why.get(opt, ['', ''])): assert [part in s for s in r['said']] == [True] * (not tried)
    first = int(opt == 'infinite on one rank')                  # which leaves it to the batch after
    if tried: assert a['scales'][first] * 128 <= alone.precision.scales[0] and not any(a['skips'][first:])
    else: assert a['scales'][0] == 65536.


def test_the_first_scale_of_a_sharded_model_is_the_default(fsdp):
    for r in fsdp[0]:
        said, = r['fsdp_first_scale', 'adam']['said']
        assert 'spread over processes' in said and r['fsdp_first_scale', 'adam']['scales'][0] == 65536.


# -- one rank alone meets a non-finite gradient

SKIPPED, SCALES = [True, False, True, False, True, False], [256., 128., 128., 64., 64., 32.]


@BOTH
def test_overflow_on_one_rank_skips_the_step_on_all(both, opt):
    a, b = both('overflow', opt)
    same_on_all_ranks(a, b)
    assert a['skips'] == SKIPPED == [s['skipped'] for s in a['seen']] and a['scales'] == SCALES
    start = [p.detach() for p in worker.net().parameters()]
    for before, now in zip([dict(params=start), *a['seen']], a['seen']):
        assert same(before['params'], now['params']) == now['skipped']


@each(('fsdp', SHARDED_OPTS))
def test_one_shard_that_is_not_finite_skips_the_step_on_all(both, opt):
    a, b = both('one_shard', opt)
    same_on_all_ranks(a, b)
    assert a['skips'] == SKIPPED and a['scales'] == SCALES


@each(('ddp', ['sgd', 'fused adamw']))
def test_gradient_clipping(both, opt):
    a, b = both('clip', opt)
    same_on_all_ranks(a, b)
    assert a['skips'] == [False, False, True, False, False, False]


@pytest.mark.parametrize('name', ['accumulate', 'no_sync'])
@BOTH
def test_gradient_accumulation(both, name, opt):
    a, b = both(name, opt)
    same_on_all_ranks(a, b)
    assert a['skips'] == [False, True, False] and a['scales'] == [256., 256., 128.]
    moved = [not same(x['params'], y['params']) for x, y in zip(a['seen'], a['seen'][1:])]
    assert moved == [True, False, False, False, True]            # the overflow is in the first batch of the second step


@BOTH
def test_no_sync_gives_what_reducing_each_batch_gives(both, opt):
    every, last = both('accumulate', opt)[0], both('no_sync', opt)[0]
    for p, q in zip(every['params'], last['params']): torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


# -- save and load

@BOTH
def test_rank_0_saves_and_every_rank_loads(both, opt):
    for r in both('checkpoint', opt):
        assert r['state']['scale'] == 128. and r['loaded']['state'] == r['state']
        assert same(r['loaded']['params'], r['params'])
        assert same(*r['on']) and r['scales'][0] == r['scales'][1] and not same(r['on'][0], r['params'])
    a, b = both('checkpoint', opt)
    assert same(a['params'], b['params']) and same(a['on'][0], b['on'][0])


@each(('fsdp', ['ranger']), ('four_ddp', ['adam']), ('four_fsdp', ['adam', 'ranger']))
def test_going_on_from_the_file_gives_the_same_parameters(both, opt):
    results = both('checkpoint', opt)
    for r in results:
        assert same(r['loaded']['params'], r['params']) and r['loaded']['state'] == r['state']
        assert r['state']['scale'] < 256.
        assert same(*r['on']) and r['scales'][0] == r['scales'][1] and not same(r['on'][0], r['params'])
        assert same(r['on'][0], results[0]['on'][0])


@each(('ddp', ['adam']), ('fsdp', ['adam']))
def test_save_model_callback(both, opt):
    a, b = both('save_model_callback', opt)
    same_on_all_ranks(a, b)
    assert same(a['params'], a['seen'][5]['params'])             # the first epoch's are back
    assert not same(a['params'], a['seen'][-1]['params'])
    assert a['state']['scale'] == a['scales'][6]


SHARDED_FILES = [*(('fsdp', o) for o in CHECKPOINT_OPTS), ('four_fsdp', 'adam'), ('four_fsdp', 'ranger')]


@pytest.mark.parametrize('group,opt', SHARDED_FILES)
def test_a_file_of_a_sharded_learner_is_whole(request, group, opt):
    results, path, _ = request.getfixturevalue(group)
    learn = build('fp16', opt, path=path, init_scale=2.).load(f'fsdp {opt}')
    saved = results[0]['fsdp_checkpoint', opt]
    assert same(params(learn), saved['params']) and learn.precision.state_dict() == saved['state']
    shapes = [[v.shape for v in s.values() if isinstance(v, torch.Tensor) and v.ndim] for s in opt_state(learn.opt)]
    assert all(shape == p.shape for p, s in zip(params(learn), shapes) for shape in s)
    assert opt == 'torch sgd' or any(shapes)
    learn.fit(1, .01)
    assert all(p.isfinite().all() for p in learn.model.parameters())


@pytest.mark.parametrize('group,opt', SHARDED_FILES)
def test_a_sharded_learner_reads_the_file_of_a_plain_one(request, group, opt):
    results, _, plain = request.getfixturevalue(group)
    ranks, learn = [r['fsdp_reads_plain_file', opt] for r in results], plain[opt]
    assert all(same(r['loaded'], params(learn)) for r in ranks)
    same_on_all_ranks(*ranks)
    assert ranks[0]['scales'][0] == learn.precision.state_dict()['scale'] == 4096.


@pytest.mark.parametrize('opt', SHARDED_OPTS)
def test_a_sharded_model_alone(fsdp, opt):
    results, path, _ = fsdp
    start = [p.detach() for p in worker.net().parameters()]
    assert all(same(r['fsdp_checkpoint', opt]['model alone'], start) for r in results)
    assert same(params(build('fp32', opt, path=path).load(f'fsdp {opt} model', with_opt=False)), start)


def test_bad_files_are_refused_on_every_rank(fsdp):
    for r in fsdp[0]:
        r = r['fsdp_bad_files', 'sgd']
        assert 'size mismatch' in r['errors']['other shape']
        assert "'scale' is -1.0" in r['errors']['damaged'] and r['untouched']['damaged']


# -- an exception on one rank

@pytest.mark.parametrize('mode', ['fp16', 'bf16'])
@pytest.mark.parametrize('kind', ['ddp', 'fsdp'])
def test_an_exception_on_one_rank_ends_both_and_leaves_nothing(kind, mode, tmp_path):
    if kind == 'ddp': skip_where_accelerate_takes_xla()
    zero, one = (r[f'{kind}_raises', mode] for r in launch(f'{kind}_raises {mode}', tmp_path))
    assert 'rank 1' in one['error'] and 'RuntimeError' in zero['error'], (zero['error'], one['error'])
    for r in (zero, one):
        assert r['autocast'] == r['before'] and r['mode'] is None and r['scaler'] is None
        assert not r['has_grads'] or mode == 'bf16'              # in bf16 they are true gradients, which fastai leaves, too
