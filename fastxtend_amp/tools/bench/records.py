"Turns what was measured on one model into plain records with ratios."
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .measuring import ModelBenchmark, Result

__all__ = ['NOISY', 'RATIOS', 'noisy', 'quartiles', 'records']

NOISY = .05                                # a ratio whose median is less certain than this part of it is marked
RATIOS = ('vs_fp32', 'vs_plain_loop', 'vs_autocast', 'forward_backward_vs_fp32')

Ratios = dict[int, float]                  # by round


def noisy(
    ratio: Sequence[float] | None, # Its quartiles
    pairs: int, # How many values they come from
) -> bool:
    """Whether the median is uncertain by more than `NOISY` either way, or comes from a single block.

    Its 95 % interval, as notches of box plots show it: 1.57 (q3 - q1) / sqrt(n). Source: McGill, Tukey and Larsen,
    Variations of Box Plots, The American Statistician 32 (1978).
    """
    if ratio is None: return False
    low, median, high = ratio
    return 1.57 * (high - low) / math.sqrt(max(pairs, 1)) > NOISY * median or low == high


def quartiles(values: Iterable[float]) -> list[float] | None:
    "The quartiles, the median among them; None if there are no values."
    values = list(values)
    return [float(q) for q in np.quantile(values, (.25, .5, .75))] if values else None


def _median(values: Iterable[float]) -> float | None:
    values = list(values)
    return _number(float(np.median(values))) if values else None


def _number(x: float) -> float | None: return None if math.isnan(x) else x


def _speedups(result: Result | None, base: Result | None, parts: slice = slice(0, 1)) -> Ratios:
    "How many times faster `result` is than `base`, by round; `parts` of step, forward and backward."
    if result is None or base is None: return {}
    common = [k for k in result.blocks if k in base.blocks]
    return {k: base.blocks[k][parts].sum() / result.blocks[k][parts].sum() for k in common}


def records(match: ModelBenchmark) -> list[dict[str, Any]]:
    "A plain record for each contestant in each mode."
    return [_record(match, result) for result in match.results]


def _record(match: ModelBenchmark, result: Result) -> dict[str, Any]:
    c, mode = result.contestant, result.mode
    def find(name, mode):
        named = (r for r in match.results if (r.contestant.name, r.contestant.opt) == (name, c.opt))
        return next((r for r in named if r.mode is mode), None)
    base = next((r for r in match.results if r.mode is None and r.baseline == result.baseline), None)
    plain, plain_fp32 = find('plain loop', mode), find('plain loop', None)
    if plain is not None and plain.runs_in != result.runs_in: plain = None   # fastai's own where it stays in fp32
    autocast = find('fastxtend_amp', mode) if c.name.startswith('to_half_weights') else None

    speedup, of_plain = _speedups(result, base), _speedups(plain, plain_fp32)
    vs_plain = {k: speedup[k] / of_plain[k] for k in speedup if k in of_plain}
    ratios = {'vs_fp32': speedup if mode else {},
              'forward_backward_vs_fp32': _speedups(result, base, slice(1, 3)) if mode else {},
              'vs_plain_loop': vs_plain if mode and c.name != 'plain loop' else {},
              'vs_autocast': _speedups(result, autocast)}
    def beyond_fp32(r, r32, what): return getattr(r, what) - getattr(r32, what) if r and r32 else math.nan
    ops = beyond_fp32(result, base, 'ops') - beyond_fp32(plain, plain_fp32, 'ops')
    parts = np.array(list(result.blocks.values())).reshape(-1, 3).T
    stays_in_fp32 = mode is not None and result.runs_in == 'float32' and result.blocks

    record: dict[str, Any] = dict(
        model=match.name, contestant=result.name, framework=c.framework, optimizer=c.opt,
        mode=mode.value if mode else 'fp32', support=match.support[mode].status, runs_in=result.runs_in,
        blocks=len(result.blocks),
        ms=_median(parts[0]), forward_ms=_median(parts[1]), backward_ms=_median(parts[2]),
        **{key: quartiles(values.values()) for key, values in ratios.items()},
        syncs=_number(result.syncs), syncs_beyond_fp32=_number(beyond_fp32(result, base, 'syncs')),
        ops=_number(result.ops), ops_beyond_plain_loop=_number(ops),
        page_faults=_median(result.faults.values()), peak_mb=_number(result.peak / 2**20),
        skipped_one_fit=result.skips and result.skips[0], skipped_two_fits=result.skips and result.skips[1],
        skipped_auto=result.skips_auto,
        note=f'never leaves fp32 on {match.device.type}' if stays_in_fp32 else result.note)
    pairs = {key: len(values) for key, values in ratios.items()}
    return {**record, 'pairs': pairs, 'noisy': [key for key in RATIOS if noisy(record[key], pairs[key])]}
