"`tune=True`: kinds of modules are tried in fp32, each as one more contestant of the alternating rounds."
from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from fastcore.foundation import L
from torch import nn

from ..devices.cost import wait_for
from ..precisions.kinds import is_depthwise, is_grouped, is_ungrouped, kind_of
from .comparison import FEWEST_ROUNDS, pays, shown_speed, speed_up
from .compat import is_compiled
from .measuring import ROUNDS, Run, running, train_round, validate

_GAIN = 1.02            # smallest speed-up from a kind in fp32 that is worth an argument
_SHARE = .005           # of a step: kinds whose forward passes need less are not tried
# What is slow in 16 bits on many devices comes first, and what 16 bits are for comes last.
_ORDER: Any = {is_depthwise: 0, is_grouped: 1, is_ungrouped: 3, nn.Linear: 3}


def kinds_to_try(runs: list[Run], pace: float) -> list[Any]: # `pace`: seconds of a step in all runs
    """Return the kinds of modules to try in fp32: depthwise and grouped convolutions, then others by their costs.

    None are tried without a native precision, without time, and in compiled models that are compared uncompiled.
    """
    setting, seconds = runs[0].setting, Counter[Any]()
    plain = next((r for r in _tunable(runs) if not r.compiled), None)   # compiled modules call no hooks
    is_short = setting.left < 2 * pace * (FEWEST_ROUNDS + 2)
    if plain is None or is_short or (is_compiled(setting.learn.model) and not setting.compile): return []
    with suppress(Exception): _time_forwards(plain, seconds)     # nothing if hooks break the model
    model = plain.learn.model
    inside = {m for kept in plain.precision.kept_in_fp32(model).values() for m in kept.modules()}
    free = {kind_of(m) for m in model.modules() if m not in inside} - {kind_of(model)}
    kinds = [kind for kind in free if seconds[kind] > _SHARE * plain.pace]
    return sorted(kinds, key=lambda kind: (_ORDER.get(kind, 2), -seconds[kind]))


def tune(
    runs: list[Run], # fp32 first; the fastest precision is added with each kind that pays
    copies: ExitStack, # Holds the copies of `runs`
    n: int, # Number of steps that are compared
    tick: Callable[[str], None],
) -> str: # What was tried, and what was not
    """Try kinds of modules in fp32: a kind that pays stays there, and the next is tried with it.

    Speed is that of whole steps, with casts and backward passes.
    """
    base, setting, low = runs[0], runs[0].setting, _tunable(runs)
    if not (setting.kinds and low): return ''
    best = plain = max(low, key=lambda r: speed_up(r.ratios(base))[0] * 1.05 ** (r.name == 'bf16'))
    titles, tried, in_fp32 = [k.__name__.removeprefix('is_') for k in setting.kinds], list[str](), list[str]()
    for kind, title in zip(setting.kinds, titles):
        if _steps_left(base, best, n) < n + 2: break             # a copy and a warm-up besides
        spec = [*L(best.precision.arguments['fp32_modules']), kind]
        run = Run(setting, base.batches, best.precision.like(fp32_modules=spec if spec[1:] else kind), plain.compiled,
                  f"{plain.name}, {' and '.join([*in_fp32, title])} in fp32")
        with ExitStack() as own:
            gain = _compete(base, best, run, own, n, tick)
            is_kept = pays(*gain[1:], _GAIN) is True and not run.note and len(run.losses) >= n
            tried.append(f"{title} {run.note or shown_speed(*gain)}{', kept' * is_kept}")
            if not is_kept: continue
            copies.enter_context(own.pop_all())
            runs.append(run)
            in_fp32.append(title)
            best = run
    found = f"Kinds of modules tried in fp32, and how much faster {plain.name} is with them: {'; '.join(tried)}."
    more = f"Not tried, as the time was over: {', '.join(titles[len(tried):])}."
    return ' '.join([found] * bool(tried) + [more] * (len(tried) < len(titles)))


def _tunable(runs):
    device = runs[0].setting.device
    return [r for r in running(runs) if r.precision.dtype and r.precision.support(device).status == 'native']


def _steps_left(base, best, n): # In fp32, in the best precision and in one to try, before fp32 with other seeds
    return (base.setting.left - base.setting.n_seeds * n * base.pace) / (base.pace + 2 * best.pace)


def _compete(base, best, run, own, n, tick):
    "Train in fp32, in the best precision so far and in the one to try, until it is decided; return its gain."
    size, gain = max(1, (n - 2) // ROUNDS), speed_up([])
    with run.failures_noted():
        run.copy(own)
        run.train(range(1))                                      # a warm-up
    while not run.note and (done := len(run.losses)) < 2 * n:
        gain = speed_up(run.ratios(best))
        paid = pays(*gain[1:], _GAIN)
        is_sure = paid and done >= n and pays(*speed_up(run.ratios(base))[1:]) is not None
        if is_sure or paid is False or _steps_left(base, best, n) < size: break
        train_round([base, best, run], range(done, done + size), tick)
    if base.setting.method == 'compare_precision' and not run.note: validate([base, run])
    return gain


def _time_forwards(run, found):
    "Add up the seconds of the forward passes in a validation batch, by kind of module."
    def note(sign, module, *_):
        wait_for(run.setting.device)
        found[kind_of(module)] += sign * time.perf_counter()
    with ExitStack() as hooks:
        for m in run.learn.model.modules():
            if not m._parameters and any(True for _ in m.children()): continue
            hooks.enter_context(m.register_forward_pre_hook(partial(note, -1)))
            hooks.enter_context(m.register_forward_hook(partial(note, 1)))
        run.learn.validate(dl=[run.batches[0]])
