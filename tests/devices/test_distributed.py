"Two real processes over gloo: DistributedDataParallel through fastai's `distrib_ctx`, FSDP2, and the room `insight`."
import importlib.util, os, re, subprocess, sys
from pathlib import Path

import pytest, torch

from helpers import *

if importlib.util.find_spec('torch_xla') is not None:
    pytest.skip('Accelerate takes the XLA device where torch_xla is installed', allow_module_level=True)

import distributed_worker as worker
from distributed_insight import BAD
from distributed_worker import BS, N, SHARDED_FILES, TWO, build, in_global_batches

HERE = Path(__file__).parent


def launch(path):
    "The results of both ranks."
    folders = [str(HERE.parent.parent), str(HERE.parent), str(HERE), os.environ.get('PYTHONPATH', '')]
    env = {**os.environ, 'WORLD_SIZE': '2', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': '29500',   # Accelerate wants them
           'ACCELERATE_USE_CPU': '1', 'OMP_NUM_THREADS': '1', 'PYTHONPATH': os.pathsep.join(folders)}
    done = subprocess.run([sys.executable, worker.__file__, str(path)], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-5000:]
    return [torch.load(path/f'{r}.pt', weights_only=False) for r in range(2)]


@pytest.fixture(scope='module')
def job(tmp_path_factory):
    "What both ranks saw, the folder of their files, and the learners whose files they read."
    path, plain = tmp_path_factory.mktemp('job'), {}
    for opt in SHARDED_FILES:
        learn = build('plain', 'fp16', opt, path=path, init_scale=512., growth_interval=4)
        learn.fit(1, .01)
        learn.save(f'plain {opt}')
        plain[opt] = learn
    other = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 1))
    build('plain', 'fp16', model=other, path=path).save('other shape', with_opt=False)
    damaged = torch.load(path/'models'/'plain adam.pth', weights_only=False)
    damaged['opt']['grad_scaler']['scale'] = -1.
    torch.save(damaged, path/'models'/'damaged.pth')
    return launch(path), path, plain


@pytest.fixture
def ranks(job): return lambda *key: [r[key if len(key) > 1 else key[0]] for r in job[0]]


KINDS = pytest.mark.parametrize('kind', ['ddp', 'fsdp'])
OPTS = pytest.mark.parametrize('opt', TWO)                       # the host skips a step, or the device


def assert_same(a, b):
    "Scale, skips and, tensor by tensor, the parameters are the same on both ranks after every batch."
    assert len(a['seen']) == len(b['seen']) > 0
    for x, y in zip(a['seen'], b['seen']):
        assert x['scale'] == y['scale'] and x['skipped'] == y['skipped'] and same(x['params'], y['params'])
    assert [a[k] for k in ('scales', 'state')] == [b[k] for k in ('scales', 'state')] and same(a['params'], b['params'])
    assert all(p.isfinite().all() for p in a['params'])


# -- every step

# A gradient of one batch differs by 1e-7, 4e-4 and 2e-3 (relative); these are the differences after 12 steps.
@pytest.mark.parametrize('mode,rounding', [('fp32', 1e-6), ('fp16', 1e-3), ('bf16', 8e-3)])
@KINDS
def test_n_steps_equal_a_single_process_on_the_same_global_batches(kind, mode, rounding, ranks):
    a, b = ranks('steps', kind, mode)
    data = in_global_batches(dataset(N))
    single = build('plain', mode, 'torch sgd', dls=loaders(bs=2 * BS, train=data, valid=data))
    single.fit(2, .01)
    start = [p.detach() for p in worker.net().parameters()]
    moved = lambda ps: torch.cat([(p - s).flatten() for p, s in zip(ps, start)])
    expected = moved(params(single))
    assert len(a['seen']) == len(single.seen) == 12 and expected.norm() > .1
    assert (moved(a['params']) - expected).norm() / expected.norm() < rounding
    assert_same(a, b)
    assert a['scales'] == (None if mode == 'fp32' else single.precision.scales)
    assert a['dtypes'] == b['dtypes'] == {dict(fp32=torch.float32, fp16=torch.float16, bf16=torch.bfloat16)[mode]}
    assert a['types'] == {dict(ddp='DistributedDataParallel', fsdp='FSDPSequential')[kind]}


def test_to_distributed(ranks):
    a, b = ranks('to_distributed', 'ddp', 'bf16')
    assert a['dtypes'] == b['dtypes'] == {torch.bfloat16} and a['types'] == {'DistributedDataParallel'}
    assert_same(a, b)


@KINDS
def test_fp32_modules(kind, ranks):
    a, b = ranks('fp32_modules', kind, '2')
    assert_same(a, b)
    assert a['layers'] == b['layers'] == [torch.bfloat16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize('kind,opt', [('ddp', 'adam'), ('fsdp', 'fused adamw')])
def test_another_precision_from_fit_to_fit(kind, opt, ranks):
    a, b = ranks('switch', kind, opt)
    assert_same(a, b)
    assert a['of_fits'] == b['of_fits'] == [{torch.bfloat16}, {torch.float16}, {torch.float32}, {torch.float16}]
    assert len(a['seen']) == 24 and a['scales'] == [256., 256., 256., 512., 512., 512.]
    assert not any(same(x['params'], y['params']) for x, y in zip(a['seen'], a['seen'][1:]))


# -- one rank alone has a non-finite gradient

@pytest.mark.parametrize('section,kind', [('overflow', 'ddp'), ('overflow', 'fsdp'), ('one_shard', 'fsdp')])
@OPTS
def test_overflow_on_one_rank_skips_the_step_on_all(section, kind, opt, ranks):
    a, b = ranks(section, kind, opt)
    assert_same(a, b)
    assert a['skips'] == [True, False, True, False, True, False] and a['scales'] == [256., 128., 128., 64., 64., 32.]
    start = [p.detach() for p in worker.net().parameters()]
    for before, now in zip([dict(params=start), *a['seen']], a['seen']):
        assert same(before['params'], now['params']) == now['skipped']


@pytest.mark.parametrize('kind,opt', [('ddp', 'adam'), ('fsdp', 'fused adamw')])
def test_gradient_accumulation_and_clipping(kind, opt, ranks):
    a, b = ranks('accumulate', kind, opt)
    assert_same(a, b)
    assert a['scales'] == [256., 256., 128.]
    moved = [not same(x['params'], y['params']) for x, y in zip(a['seen'], a['seen'][1:])]
    assert moved == [True, False, False, False, True]            # the overflow is in the first batch of the second step


# -- save and load

@pytest.mark.parametrize('kind,opt', [*(('ddp', o) for o in TWO), *(('fsdp', o) for o in SHARDED_FILES)])
def test_all_ranks_save_and_load(kind, opt, ranks):
    both = ranks('checkpoint', kind, opt)
    for r in both:
        assert r['state']['scale'] == 128. and r['loaded'][0] == r['state']
        assert same(r['loaded'][1], r['params']) and same(r['alone'], r['params'])
        straight, resumed = r['on']
        assert same(straight['params'], resumed['params']) and straight['state'] == resumed['state']
        assert not same(straight['params'], r['params'])
    assert_same(*(r['on'][1] for r in both))


@KINDS
def test_save_model_callback(kind, ranks):
    a, b = ranks('save_model_callback', kind, 'adam')
    assert_same(a, b)
    assert same(a['params'], a['seen'][5]['params'])             # the first epoch's are back
    assert not same(a['params'], a['seen'][-1]['params']) and a['state']['scale'] == a['scales'][6]


@pytest.mark.parametrize('opt', SHARDED_FILES)
def test_a_single_process_goes_on_from_the_file_of_a_sharded_learner(opt, job):
    results, path, _ = job
    saved = results[0]['checkpoint', 'fsdp', opt]
    learn = build('plain', 'fp16', opt, path=path, init_scale=2.).load(f'fsdp {opt}')
    assert same(params(learn), saved['params']) and learn.precision.state_dict() == saved['state']
    for p, state in zip(params(learn), opt_state(learn.opt)):
        assert {v.shape for v in state.values() if isinstance(v, torch.Tensor) and v.ndim} == {p.shape}
    learn.fit(1, .01)
    assert all(p.isfinite().all() for p in params(learn)) and not same(params(learn), saved['params'])
    alone = build('plain', 'fp32', path=path).load(f'fsdp {opt} alone', with_opt=False)
    assert same(params(alone), saved['params'])


@pytest.mark.parametrize('opt', SHARDED_FILES)
def test_a_sharded_learner_goes_on_from_the_file_of_a_single_process(opt, job):
    results, _, plain = job
    a, b = (r['reads_plain_file', 'fsdp', opt] for r in results)
    assert same(a['loaded'], params(plain[opt])) and same(b['loaded'], params(plain[opt]))
    assert_same(a, b)
    assert a['scales'][0] == plain[opt].precision.state_dict()['scale'] == 4096.


def test_bad_files_are_refused_on_every_rank(ranks):
    for found in ranks('bad_files', 'fsdp', 'adam'):
        (damaged, untouched), (other, _) = found['damaged'], found['other shape']
        assert "'scale' is -1.0" in damaged and untouched and 'size mismatch' in other


def test_an_exception_on_one_rank_ends_both_and_leaves_nothing(ranks):
    zero, one = both = ranks('raises', 'ddp', 'fp16')
    assert 'rank 1' in one['error'] and 'RuntimeError' in zero['error'], (zero['error'], one['error'])
    for r in both: assert r['after'] == r['before'] and not (r['device'] or r['grads'])


# -- insight

@KINDS
def test_a_warning_on_one_rank_runs_nothing_again_and_nobody_waits(kind, ranks):
    zero, one = ranks(f'{kind}_warns')
    n = 6 if kind == 'ddp' else 12                               # under `fully_shard` each rank draws all data here
    assert all(s['batches'] == list(range(n)) and s['error'] is None for s in (zero, one))
    assert zero['said'] == [] and len(one['said']) == 1
    message = one['said'][0]
    assert re.match(rf'fp16 training goes wrong: the loss is (inf|nan) \(batch {BAD + 1}, loss scale 256\)', message)
    assert 'With several processes the batch is not run again' in message and message.count('\n') == 2
    assert '`learn.precision_report()` in one process' in message and 'run again with' not in message


def test_the_comparison_waits_for_nobody(ranks):
    assert ranks('one_rank_compares') == [None, {'fp32': 4, 'bf16': 4}]
    for rank, seen in enumerate(ranks('all_compare_wrapped')):
        assert seen == ({'fp32': 4 + rank, 'bf16': 4 + rank}, 'DistributedDataParallel')


def test_the_measured_choice_is_refused_on_every_rank(ranks):
    assert all(said.startswith('to_amp(measure=True) cannot run in several processes') for said in ranks('choice_is_refused'))
