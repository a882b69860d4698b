"Diagnosis and comparison in two and in four real processes over gloo: nobody waits for one that went another way."
import importlib.util, os, re, socket, subprocess, sys, time
from pathlib import Path

import pytest, torch

from processes_worker import BAD

HERE = Path(__file__).parent


def launch(n, path, seconds=900):
    "What each rank saw. The first one that fails ends all: it would leave the others waiting."
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    env = {**os.environ, 'WORLD_SIZE': str(n), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port),
           'ACCELERATE_USE_CPU': '1', 'OMP_NUM_THREADS': '1',
           'PYTHONPATH': os.pathsep.join([str(HERE.parent.parent), str(HERE.parent), str(HERE),
                                          os.environ.get('PYTHONPATH', '')])}
    logs = [open(path/f'{r}.log', 'w+') for r in range(n)]
    processes = [subprocess.Popen([sys.executable, str(HERE/'processes_worker.py'), str(path)],
                                  env={**env, 'RANK': str(r), 'LOCAL_RANK': str(r)},
                                  stdout=log, stderr=subprocess.STDOUT) for r, log in enumerate(logs)]
    end = time.monotonic() + seconds
    try:
        while any(p.poll() is None for p in processes) and not any(p.poll() for p in processes):
            if time.monotonic() > end: break
            time.sleep(.1)
    finally:
        for p in processes: p.kill()
        for p in processes: p.wait()
    said = [(log.seek(0), log.read()[-3000:], log.close())[1] for log in logs]
    assert [p.returncode for p in processes] == [0] * n, '\n'.join(said)
    return [torch.load(path/f'{r}.pt', weights_only=False) for r in range(n)]


@pytest.fixture(scope='module', params=[2, 4])
def ranks(request, tmp_path_factory):
    if importlib.util.find_spec('torch_xla'):
        pytest.skip('Accelerate takes the XLA device where torch_xla is installed')
    return launch(request.param, tmp_path_factory.mktemp(f'processes{request.param}'))


@pytest.mark.parametrize('kind', ['ddp', 'fsdp'])
def test_a_warning_on_one_rank_runs_nothing_again_and_nobody_waits(ranks, kind):
    seen = [r[f'{kind}_warns'] for r in ranks]
    n = 6 if kind == 'ddp' else 6 * len(ranks)                   # under `fully_shard` each rank draws all data here
    assert all(s['batches'] == list(range(n)) and s['error'] is None for s in seen)
    assert [len(s['said']) for s in seen] == [int(rank == 1) for rank in range(len(ranks))]
    message = seen[1]['said'][0]
    assert re.match(rf'fp16 training goes wrong: the loss is (inf|nan) \(batch {BAD + 1}, loss scale 256\)', message)
    assert 'On rank 1 the weights are finite' in message and message.count('\n') == 2
    assert '`learn.precision_report()` in one process' in message and 'run again with' not in message


@pytest.mark.parametrize('kind', ['ddp', 'fsdp'])
def test_raise_reaches_every_rank_at_the_same_batch(ranks, kind):
    seen = [r[f'{kind}_raises'] for r in ranks]
    assert all(s['batches'] == list(range(BAD + 1)) for s in seen)
    for rank, s in enumerate(seen):
        assert ('the loss is ' if rank == 1 else 'fp16 training goes wrong on rank 1') in s['error'], s


def test_the_comparison_waits_for_nobody(ranks):
    n = len(ranks)
    assert [r['one_rank_compares'] for r in ranks] == [{'fp32': 4,
                                                        'bf16': 4} if rank == 1 else None for rank in range(n)]
    for rank, r in enumerate(ranks):
        assert r['all_compare_wrapped'] == ({'fp32': 4 + rank, 'bf16': 4 + rank}, 'DistributedDataParallel')


def test_the_measured_choice_is_refused_on_every_rank(ranks):
    assert all(r['choice_is_refused'].startswith('to_amp(measure=True) cannot run in several processes') for r in ranks)
