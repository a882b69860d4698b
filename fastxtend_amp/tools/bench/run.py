"Runs the whole benchmark; reads and writes its figures."
from __future__ import annotations

import contextlib, json, os, platform, sys, warnings
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from fastprogress.fastprogress import progress_bar

from ...mode import AMPMode, mode_support
from ..memory import keep_freed_memory
from .contestants import check_contestants
from .costs import accumulation, callback_times, memory, unscaling
from .measuring import MODE_SECONDS, SCALE, SKIP_SCALE, SKIP_STEPS, ModelBenchmark
from .models import MODELS
from .records import records

__all__ = ['bench', 'machine', 'read_figures']

_PACKAGES = ('fastai', 'fastcore', 'fastxtend_amp', 'lightning-fabric', 'accelerate')


def _version(name: str) -> str | None:
    try: return metadata.version(name)
    except metadata.PackageNotFoundError: return None


def _cpu_name() -> str:
    info = Path('/proc/cpuinfo')
    lines = info.read_text(errors='replace').splitlines() if info.exists() else []
    names = [line.partition(':')[2].strip() for line in lines if line.startswith('model name')]
    return names[0] if names else platform.processor() or platform.machine()


def machine(device: torch.device) -> dict[str, Any]:
    "What the figures depend on: processor, threads, load, device, versions."
    load = ' '.join(f'{x:.1f}' for x in os.getloadavg()) if hasattr(os, 'getloadavg') else None
    out = dict(system=platform.platform(), cpu=_cpu_name(), cores=os.cpu_count(), threads=torch.get_num_threads(),
               load_average=load, instruction_sets=[torch.backends.cpu.get_cpu_capability()], device=str(device),
               python=platform.python_version(), torch=torch.__version__)
    if device.type == 'cuda': out |= dict(gpu=torch.cuda.get_device_name(device), cuda=torch.version.cuda, tf32=False)
    return out | {name: _version(name) for name in _PACKAGES}


@contextlib.contextmanager
def _no_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try: yield
    finally: torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def bench(
    models: Sequence[str] = tuple(MODELS), # Names from `MODELS`
    modes: Sequence[str | AMPMode] = ('bf16', 'fp16'), # Beside fp32
    device: str | torch.device | None = None, # CUDA if there is one, else the CPU
    steps: int = 10, # Steps in a block, at most: large models get fewer
    repeats: int = 9, # Blocks for each contestant
    keep_memory: bool = False, # Whether to call `keep_freed_memory` first
    contestants: Sequence[str] | None = None, # Only these, as the report calls them, and their times alone
    seconds: float = MODE_SECONDS, # For the timed blocks of all contestants in a mode on a model
) -> dict[str, Any]: # Plain values, as `tables` and `plot` take them
    """Time and count contestants on `models`, in one process, taking turns.

    On a machine that others use, too, few contestants, few steps in a block and many blocks tell small differences.
    """
    if contestants is not None: check_contestants(contestants)
    device = torch.device(device or ('cuda' if torch.cuda.is_available() else 'cpu'))
    wanted = [AMPMode(m) for m in modes]
    kept = keep_freed_memory() if keep_memory else None
    settings = dict(steps=steps, repeats=repeats, seconds=seconds, modes=[m.value for m in wanted], scale=SCALE,
                    settle_scale=SKIP_SCALE, settle_steps=SKIP_STEPS, keep_memory=kept)
    out: dict[str, Any] = dict(machine=machine(device), settings=settings, models=[], rows=[],
                               support={m.value: list(mode_support(m, device)) for m in wanted})
    # Only the report goes to standard output.
    with _no_tf32(), warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter('ignore')                          # the report says what is emulated
        for name in models:
            _bench_model(ModelBenchmark(name, wanted, device, contestants, seconds), steps, repeats, out)
        out |= dict(events=[], unscaling=[], memory=[], accumulation=[])
        if contestants is not None: return out
        out['events'] = callback_times(wanted, device, repeats=max(3, repeats)) if 'tiny' in models else []
        out['unscaling'] = unscaling(device) if AMPMode.FP16 in wanted else []
        out['memory'] = memory(device) if wanted else []
        out['accumulation'] = accumulation(device) if wanted else []
    return out


def _bench_model(match: ModelBenchmark, steps: int, repeats: int, out: dict[str, Any]) -> None:
    "Measure one model and add its figures to `out`."
    print(f'\n{match.name}')
    for _ in progress_bar(match.prepare(), total=len(match.results), leave=False): pass
    turns = match.plan(steps, repeats)
    for turn in progress_bar(turns, total=len(turns), leave=False): match.run_block(turn)
    for result in match.results: match.count_skips(result)
    out['models'].append(dict(name=match.name, what=MODELS[match.name].title, batch_size=match.batch_size,
                              memory_format=match.format, parameters=match.n_params))
    out['rows'] += records(match)
    match.release()


# -- stored runs

_OLD_KEYS = {'vs_by_hand': 'vs_plain_loop', 'host_syncs': 'syncs', 'host_syncs_beyond_fp32': 'syncs_beyond_fp32',
             'aten_ops': 'ops', 'aten_ops_beyond_by_hand': 'ops_beyond_plain_loop'}
_OLD_NAMES = {'by hand': 'plain loop', 'to_half': 'to_half_weights', **{
    f'to_half, {kind}': f'to_half_weights, {kind}' for kind in ('flat', 'no masters', 'no masters, Kahan')}}


def read_figures(
    file: str | Path, # JSON that the benchmark wrote, also version 0.1.0's
) -> dict[str, Any]: # As `bench` returns them
    "The figures of a stored run, under today's names."
    figures = json.loads(Path(file).read_text(encoding='utf-8'))
    def renamed(record):
        named = {_OLD_KEYS.get(key, key): value for key, value in record.items()}
        for key in ('contestant', 'framework', 'training'):
            if key in named: named[key] = _OLD_NAMES.get(named[key], named[key])
        if 'noisy' in named: named['noisy'] = [_OLD_KEYS.get(key, key) for key in named['noisy']]
        return named
    for part in ('rows', 'memory'): figures[part] = [renamed(record) for record in figures.get(part, [])]
    return {'events': [], 'unscaling': [], 'accumulation': [], **figures}
