"`tune=True`: kinds of modules are tried in fp32, each as one more contestant of the alternating rounds."
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial

import torch
from fastcore.foundation import L
from torch import nn
from torch.nn.modules.conv import _ConvNd

from ..devices.cost import wait_for
from ..precisions.matching import is_depthwise, is_grouped
from .comparison import pays, shown_speed, speed_up
from .compat import is_compiled
from .measuring import ROUNDS, Run, train_round
from .tensors import tensors

_GAIN = 1.02            # smallest speed-up from a kind in fp32 that is worth an argument
_SHARE = .015           # of a step: kinds that need less of it are not tried


def kind_of(module: nn.Module): # For `fp32_modules`
    "Return the kind of a module, its class or a predicate; None for linear layers and convolutions without groups."
    if isinstance(module, nn.Linear) or (isinstance(module, _ConvNd) and module.groups == 1): return None
    return next((kind for kind in (is_depthwise, is_grouped) if kind(module)), type(module))


def kinds_to_try(runs: list[Run]) -> list:
    """Return the kinds of modules to try in fp32, the most expensive first.

    None are tried without a native precision, and in compiled models, which call no hooks.

    Source: github.com/NVIDIA/apex/issues/712, github.com/tensorflow/tensorflow/issues/41715.
    """
    low = _tunable(runs)
    if not low or is_compiled(runs[0].setting.learn.model): return []
    seconds = _seconds_by_kind(low[0])
    return [kind for kind, t in seconds.most_common() if kind and t > _SHARE * seconds.total()]


def _seconds_by_kind(run):
    """Return how long the modules of each kind take in one batch, forward and backward.

    Each module's backward pass runs as soon as its forward pass has: a backward hook would fail where an output is
    changed in place.
    """
    device, seconds = run.setting.device, Counter[object]()
    def note(sign, module, inputs, output=()):
        ends = [t for t in (*tensors(inputs), *module.parameters()) if t.requires_grad]
        if outs := [t for t in tensors(output) if t.requires_grad]:
            torch.autograd.grad(outs, ends, [*map(torch.ones_like, outs)], retain_graph=True, allow_unused=True)
        wait_for(device)
        seconds[kind_of(module)] += sign * time.perf_counter()
    probe = Run(run.setting, run.precision, run.name)
    with ExitStack() as own:
        probe.copy(own)
        model = probe.learn.model
        in_fp32 = {m for kept in run.precision.kept_in_fp32(model).values() for m in kept.modules()}
        for m in {*model.modules()} - in_fp32 - {model}:
            if [*m.children()]: continue
            m.register_forward_pre_hook(partial(note, -1))
            m.register_forward_hook(partial(note, 1))
        try: probe.run_forward()
        except Exception: seconds.clear()                        # hooks break the model
    return seconds


def tune(
    runs: list[Run], # fp32 first; the fastest precision is added with each kind that pays
    kinds: list, # As `kinds_to_try` returns
    copies: ExitStack, # Holds the copies of `runs`
    n: int, # Number of steps that are compared
) -> str: # What was tried, and what was not
    """Try kinds of modules in fp32: a kind that pays stays there, and the next is tried with it.

    Speed is that of whole steps, with casts and backward passes.
    """
    base, low = runs[0], _tunable(runs)
    if not (kinds and low): return ''
    best = plain = max(low, key=lambda r: r.speed_up(base)[0] * 1.05 ** (r.name == 'bf16'))
    titles, tried = [k.__name__.removeprefix('is_') for k in kinds], []
    for kind, title in zip(kinds, titles):
        if _steps_left(base, best, n) < n + 2: break             # a copy and a warm-up besides
        spec = [*L(best.precision.fp32_modules), kind]
        precision = best.precision.like(fp32_modules=spec if spec[1:] else kind)
        run = Run(base.setting, precision, f'{best.name}, {title} in fp32')
        with ExitStack() as own:
            is_kept, gain = _compete(base, best, run, own, n)
            tried.append(f"{title} {run.note or shown_speed(*gain)}{', kept' * is_kept}")
            if not is_kept: continue
            copies.enter_context(own.pop_all())
        runs.append(run)
        best = run
    found = f"Kinds of modules tried in fp32, with the speed-up over {plain.name} alone: {'; '.join(tried)}."
    more = f" Not tried, as the time was over: {', '.join(titles[len(tried):])}."
    return (found * bool(tried) + more * (len(tried) < len(titles))).strip()


def _tunable(runs):
    return [r for r in runs if r.precision.dtype and not (r.compiled or r.failed)
            and r.precision.support(r.setting.device).status == 'native']


def _steps_left(base, best, n): # In fp32, in the best precision and in one to try, before fp32 with other seeds
    seconds = base.setting.left - base.setting.n_seeds * n * base.pace
    return seconds / (base.pace + 2 * best.pace)


def _compete(base, best, run, own, n):
    "Train in fp32, the best precision so far and the one to try; return whether that pays, and its speed-up."
    size, gain, paid = max(1, (n - 2) // ROUNDS), speed_up([]), None
    with run.failures_noted():
        run.copy(own)
        run.train(range(1))                                      # a warm-up
    while not run.note and (done := len(run.losses)) < 2 * n:
        gain = run.speed_up(best)
        paid = pays(*gain[1:], _GAIN)
        is_sure = paid and done >= n and pays(*run.speed_up(base)[1:]) is not None
        if is_sure or paid is False or _steps_left(base, best, n) < size: break
        train_round([base, best, run], range(done, done + size))
    return bool(paid) and not run.note and len(run.losses) >= n, gain
