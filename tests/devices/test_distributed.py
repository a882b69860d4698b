"Two real processes over gloo: DistributedDataParallel through fastai's `distrib_ctx`, FSDP2, and the room `insight`."

import importlib.util, os, re, subprocess, sys
from pathlib import Path

import pytest, torch

from helpers import *

if importlib.util.find_spec('torch_xla') is not None:
    pytest.skip('Accelerate takes the XLA device where torch_xla is installed', allow_module_level=True)

import distributed_worker as worker
from distributed_worker import BAD, BS, N, TWO, build, in_global_batches

HERE = Path(__file__).parent


def launch(path):
    "Return the results of both ranks."
    folders = [str(HERE.parent.parent), str(HERE.parent), str(HERE), os.environ.get('PYTHONPATH', '')]
    env = {
        **os.environ,
        'WORLD_SIZE': '2',
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': '29500',  # Accelerate wants them
        'ACCELERATE_USE_CPU': '1',
        'OMP_NUM_THREADS': '1',
        'PYTHONPATH': os.pathsep.join(folders),
    }
    done = subprocess.run(
        [sys.executable, worker.__file__, str(path)], env=env, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [torch.load(path / f'{r}.pt', weights_only=False) for r in range(2)]


@pytest.fixture(scope='module')
def job(tmp_path_factory):
    "What both ranks saw, the folder of their files, and the learners whose files they read."
    path, plain = tmp_path_factory.mktemp('job'), {}
    for opt in TWO:
        plain[opt] = build('plain', 'fp16', opt, path=path, init_scale=512.0, growth_interval=4)
        plain[opt].fit(1, 0.01)
        plain[opt].save(f'plain {opt}')
    return launch(path), path, plain


@pytest.fixture
def ranks(job):
    return lambda *key: [r[key] for r in job[0]]


KINDS = pytest.mark.parametrize('kind', ['ddp', 'fsdp'])
OPTS = pytest.mark.parametrize('opt', TWO)


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
    single.fit(2, 0.01)
    start = [p.detach() for p in worker.net().parameters()]
    moved = lambda ps: torch.cat([(p - s).flatten() for p, s in zip(ps, start)])
    expected = moved(params(single))
    assert len(a['seen']) == len(single.seen) == 12 and expected.norm() > 0.1
    assert (moved(a['params']) - expected).norm() / expected.norm() < rounding
    assert_same(a, b)
    assert a['scales'] == (None if mode == 'fp32' else single.precision.scales)
    assert a['dtypes'] == b['dtypes'] == {dict(fp32=torch.float32, fp16=torch.float16, bf16=torch.bfloat16)[mode]}
    assert a['types'] == {dict(ddp='DistributedDataParallel', fsdp='FSDPSequential')[kind]}


@KINDS
def test_fp32_modules(kind, ranks):
    a, b = ranks('fp32_modules', kind, '2')
    assert_same(a, b)
    assert a['layers'] == b['layers'] == [torch.bfloat16, torch.bfloat16, torch.float32]


# -- only one rank has a non-finite gradient


@pytest.mark.parametrize('section,kind', [('overflow', 'ddp'), ('overflow', 'fsdp'), ('one_shard', 'fsdp')])
@OPTS
def test_overflow_on_one_rank_skips_the_step_on_all(section, kind, opt, ranks):
    a, b = ranks(section, kind, opt)
    assert_same(a, b)
    assert a['skips'] == [True, False, True, False, True, False] and a['scales'] == [
        256.0,
        128.0,
        128.0,
        64.0,
        64.0,
        32.0,
    ]
    start = [p.detach() for p in worker.net().parameters()]
    for before, now in zip([dict(params=start), *a['seen']], a['seen']):
        assert same(before['params'], now['params']) == now['skipped']


@pytest.mark.parametrize('kind,opt', [('ddp', 'adam'), ('fsdp', 'fused adamw')])
def test_gradient_accumulation_and_clipping(kind, opt, ranks):
    a, b = ranks('accumulate', kind, opt)
    assert_same(a, b)
    assert a['scales'] == [256.0, 256.0, 128.0]
    moved = [not same(x['params'], y['params']) for x, y in zip(a['seen'], a['seen'][1:])]
    assert moved == [True, False, False, False, True]  # the overflow is in the first batch of the second step


# -- save and load


@KINDS
@OPTS
def test_all_ranks_save_and_load(kind, opt, ranks):
    both = ranks('checkpoint', kind, opt)
    for r in both:
        assert r['state']['scale'] == 128.0 and r['loaded'][0] == r['state']
        assert same(r['loaded'][1], r['params']) and same(r['alone'], r['params'])
        straight, resumed = r['on']
        assert same(straight['params'], resumed['params']) and straight['state'] == resumed['state']
        assert not same(straight['params'], r['params'])
    assert_same(*(r['on'][1] for r in both))


@OPTS
def test_a_single_process_goes_on_from_the_file_of_a_sharded_learner(opt, job):
    results, path, _ = job
    saved = results[0]['checkpoint', 'fsdp', opt]
    learn = build('plain', 'fp16', opt, path=path, init_scale=2.0).load(f'fsdp {opt}')
    assert same(params(learn), saved['params']) and learn.precision.state_dict() == saved['state']
    for p, state in zip(params(learn), opt_state(learn.opt)):
        assert {v.shape for v in state.values() if isinstance(v, torch.Tensor) and v.ndim} == {p.shape}
    learn.fit(1, 0.01)
    assert all(p.isfinite().all() for p in params(learn)) and not same(params(learn), saved['params'])
    alone = build('plain', 'fp32', path=path).load(f'fsdp {opt} alone', with_opt=False)
    assert same(params(alone), saved['params'])


@OPTS
def test_a_sharded_learner_goes_on_from_the_file_of_a_single_process(opt, job):
    results, _, plain = job
    a, b = (r['reads_plain_file', 'fsdp', opt] for r in results)
    assert same(a['loaded'], params(plain[opt])) and same(b['loaded'], params(plain[opt]))
    assert_same(a, b)
    assert a['scales'][0] == plain[opt].precision.state_dict()['scale'] == 4096.0


def test_an_exception_on_one_rank_ends_both_and_leaves_nothing(ranks):
    zero, one = both = ranks('raises', 'ddp', 'fp16')
    assert 'rank 1' in one['error'] and 'RuntimeError' in zero['error'], (zero['error'], one['error'])
    for r in both:
        assert r['after'] == r['before'] and not (r['fit'] or r['grads'])


# -- insight


@KINDS
def test_a_warning_on_one_rank_runs_nothing_again_and_nobody_waits(kind, ranks):
    zero, one = ranks('warns', kind, 'fp16')
    assert zero == dict(said=[], n_batches=6) and one['n_batches'] == 6 and len(one['said']) == 1
    message = one['said'][0]
    assert re.match(rf'fp16 training failed: the loss is (inf|nan) \(batch {BAD + 1}, loss scale 256\)', message)
    assert 'In distributed runs the batch is not run again' in message and message.count('\n') == 3
    assert '`learn.precision_report()` in one process' in message and 'Re-running' not in message


def test_nothing_is_fixed_with_several_processes_which_the_start_of_the_fit_says(ranks):
    both = ranks('fixes', 'ddp', 'fp16')
    said = [[message for message in r['said'] if 'is emulated' not in message] for r in both]
    assert all(messages[0].startswith("on_overflow='fix' only warns in distributed runs") for messages in said)
    assert [len(messages) for messages in said] == [1, 2] and 'fp16 training failed' in said[1][1]
    for r in both:
        assert (r['n_batches'], r['fixes'], r['mode']) == (6, [], 'fp16')


def test_a_comparison_waits_for_nobody_and_the_measured_choice_is_refused(ranks):
    both = ranks('compares', 'ddp', 'bf16')
    assert [r['steps'] for r in both] == [[], 2 * [{'fp32': 4, 'bf16': 4}]]
    for r in both:
        assert r['refusal'].startswith('to_amp(measure=True) is not available in distributed runs')
        assert r['model'] == 'DistributedDataParallel'
