"""Page faults and time per step of the benchmark's models under settings of glibc's malloc.

Each model, precision, optimizer and setting has a process of its own. Faults can be counted on a busy machine; times
need a quiet one, or one thread and `--cpu-time`. For another allocator preload it and take the setting 'as it is'.
"""
from __future__ import annotations

import argparse, ctypes, os, time, warnings
from multiprocessing import get_context

import numpy as np
import pandas as pd
import torch

from fastxtend_amp import AMPMode
from fastxtend_amp.tools.bench.contestants import OPTIMIZERS, fastai_loop
from fastxtend_amp.tools.bench.measuring import SCALE, ModelBenchmark
from fastxtend_amp.tools.bench.models import MODELS
from fastxtend_amp.tools.memory import keep_freed_memory

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -2, -3, -4, -8   # of <malloc.h>
MB, NEVER = 2**20, -1

SETTINGS = {
    'as it is': {},
    'keep_freed_memory': None,
    'no trimming': {TRIM_THRESHOLD: NEVER},
    'mmap 32 MB, no trimming': {MMAP_THRESHOLD: 32 * MB, TRIM_THRESHOLD: NEVER},
    'mmap 128 MB, no trimming': {MMAP_THRESHOLD: 128 * MB, TRIM_THRESHOLD: NEVER},
    'mmap 1 GB, no trimming': {MMAP_THRESHOLD: 1024 * MB, TRIM_THRESHOLD: NEVER},
    'mmap 1 GB, trim 1 GB': {MMAP_THRESHOLD: 1024 * MB, TRIM_THRESHOLD: 1024 * MB},
    'mmap 1 GB, no trimming, top pad 64 MB': {MMAP_THRESHOLD: 1024 * MB, TRIM_THRESHOLD: NEVER, TOP_PAD: 64 * MB},
    'mmap 1 GB, no trimming, one arena': {MMAP_THRESHOLD: 1024 * MB, TRIM_THRESHOLD: NEVER, ARENA_MAX: 1},
    'no mmap, no trimming': {MMAP_MAX: 0, TRIM_THRESHOLD: NEVER},
}


def resident() -> float: # MB
    "The memory that this process holds."
    with open('/proc/self/statm') as f: return int(f.read().split()[1]) * os.sysconf('SC_PAGE_SIZE') / MB


def measure(model: str, mode: str, opt: str, setting: str, args, queue) -> None:
    "Train in this process and put page faults and milliseconds per step into `queue`."
    warnings.simplefilter('ignore')
    mallopt = ctypes.CDLL(None).mallopt
    options = SETTINGS[setting]
    if options is None: keep_freed_memory()
    refused = [name for name, value in (options or {}).items() if not mallopt(name, value)]
    task = ModelBenchmark(model, [], torch.device('cpu')).task
    run = fastai_loop(task, None if mode == 'fp32' else AMPMode(mode), opt, SCALE)
    clock = task.clock
    clock.n, clock.warm = args.steps, args.warm
    if args.cpu_time: clock.mark = lambda: clock.marks.append(time.process_time())
    run.steps()
    step, forward, backward = np.median(clock.steps(), 0)
    queue.put(dict(model=model, mode=mode, optimizer=opt, setting=setting + ' (refused)' * bool(refused),
                   faults=clock.faults, ms=step, forward=forward, backward=backward, fastest=clock.steps()[:, 0].min(),
                   resident_mb=resident()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--models', nargs='+', default=list(MODELS))
    parser.add_argument('--modes', nargs='+', default=['fp32', 'bf16'])
    parser.add_argument('--optimizers', nargs='+', default=list(OPTIMIZERS))
    parser.add_argument('--settings', nargs='+', default=list(SETTINGS))
    parser.add_argument('--warm', type=int, default=4, help='steps before the counted ones')
    parser.add_argument('--steps', type=int, default=6, help='steps that are counted')
    parser.add_argument('--cpu-time', action='store_true', help='milliseconds of CPU time instead of time')
    parser.add_argument('--json', help='write every figure to this file')
    args = parser.parse_args()
    processes, rows = get_context('fork'), []                    # forking is safe: nothing has run in parallel here
    for model, mode, opt in ((m, p, o) for m in args.models for p in args.modes for o in args.optimizers):
        for setting in args.settings:
            queue = processes.SimpleQueue()
            child = processes.Process(target=measure, args=(model, mode, opt, setting, args, queue))
            child.start()
            child.join()
            if child.exitcode: raise SystemExit(f'{model}, {mode}, {opt}, {setting}: exit code {child.exitcode}')
            rows.append(queue.get())
        mine = pd.DataFrame(rows[-len(args.settings):])
        print(mine.round(1).to_string(index=False), flush=True)
    if args.json: pd.DataFrame(rows).to_json(args.json, orient='records', indent=1)


if __name__ == '__main__': main()
