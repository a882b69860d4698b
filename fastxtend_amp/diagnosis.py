"Training went wrong in low precision: where did it start, and what would fix it?"
from __future__ import annotations

import ctypes, math, warnings
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from .islands import unwrapped
from .mode import AMPMode
from .probe import LOSS, Tracer, local_statistics, tensors
from .snapshot import preserved

ON_OVERFLOW = ('warn', 'raise', 'ignore')


def check_overflow_args(on_overflow: str, patience: int) -> None:
    "Raise a `ValueError` that names the argument that cannot be used."
    if on_overflow not in ON_OVERFLOW:
        raise ValueError(f"on_overflow={on_overflow!r} cannot be used: it must be 'warn', 'raise' or 'ignore'.")
    if not isinstance(patience, Integral) or isinstance(patience, bool) or patience < 1:
        raise ValueError(f"patience={patience!r} cannot be used: it must be an integer of at least 1, the number of skipped steps in a row "
                         "after which training counts as going wrong.")


def peek(t: torch.Tensor) -> float | None:
    "The value of a single fp32 number in main memory, read without an operator; None if it is elsewhere or of another kind."
    if t.device.type != 'cpu' or t.dtype is not torch.float32 or t.numel() != 1 or t.layout is not torch.strided: return None
    return ctypes.c_float.from_address(t.data_ptr()).value


@dataclass
class Diagnosis:
    "What a rerun of one batch showed."
    kind: str # 'data', 'weights', 'fp32', 'forward', 'backward' or 'not reproduced'
    text: str
    modules: list[str]


def diagnose(
    learn: Any, # The learner, possibly in the middle of a fit
    mode: AMPMode,
    scale: float, # The loss scale of the step that went wrong
    after_pred: Any,
    random_state: tuple | None = None, # What `random_state` gave before that batch's forward pass
) -> Diagnosis:
    "Run the batch at hand again, in fp32 and in `mode`, and find where finite numbers end; the learner stays as it was."
    xb, yb = learn.xb, learn.yb
    for what, batch in (('input', xb), ('target', yb)):
        for t in tensors(batch):
            bad = int((t.isnan() | (t == math.inf)).sum())
            if bad: return Diagnosis('data', f"the batch itself is not finite: {bad:,} of {t.numel():,} values of an {what} of shape {tuple(t.shape)} are NaN "
                                     "or inf. Look at the data; no precision can train on it", [])
    model = unwrapped(learn.model)
    lost = [n for n, p in model.named_parameters() if not bool(p.detach().isfinite().all())]
    if lost:
        return Diagnosis('weights', f"{len(lost)} of {len(list(model.parameters()))} weight tensors are NaN or inf by now, such as '{lost[0]}', so the batch cannot be "
                         "run again as it was. Load the last checkpoint, then call `learn.precision_report()`", lost)
    with preserved(learn), local_statistics(model):
        def run(*args):
            if random_state is not None: set_random_state(random_state)
            with preserved(learn):
                tracer = Tracer(model, learn.loss_func, *args, after_pred=after_pred)
                tracer.run(xb, yb)
            return tracer
        fp32 = run()
        if fp32.non_finite_loss or fp32.non_finite_grads:
            name = next(iter(fp32.trouble or fp32.trouble_backward), None)
            where = f", first in {_named(fp32, name)}" if name else ''
            what = 'loss' if fp32.non_finite_loss else 'gradients'
            return Diagnosis('fp32', f"the {what} of this batch are not finite in fp32 either{where}: this is not for want of precision. Look at the "
                             "learning rate, the loss function and the data", [name] if name else [])
        low = run(mode, fp32, scale)
        names, where = (low.trouble, 'forward') if low.trouble else (low.trouble_backward, 'backward')
        if names: return Diagnosis(where, _story(low, fp32, names[0], mode, where), names[:1])
    return Diagnosis('not reproduced', f"run again, this batch is finite in {mode.value}, forward and backward: `learn.precision_report()` looks closer", [])


def _named(tracer, name):
    return 'the loss function' if name == LOSS else f"module '{name}' ({tracer.seen[name].type})"


def _story(low, fp32, name, mode, where):
    largest, limit = fp32.seen[name].largest, torch.finfo(mode.dtype).max
    if where == 'backward':
        size = f"its gradients in fp32, times the loss scale {low.scale:,g}, reach {fp32.seen[name].grads.largest * low.scale:,.4g}"
        start = 'the forward pass is finite; the gradients stop being so in the backward pass of'
    else:
        size = f"its output reaches {largest:,.4g} in fp32"
        start = 'numbers stop being finite in'
    fix = (f"Compute it in fp32 inside the loss function" if name == LOSS else
           f"Keep it in fp32: `learn.to_{mode.value}(fp32_modules=['{name}'])`")
    return f"{start} {_named(low, name)}: {size}; {mode.value} ends at {limit:,.5g}. {fix}"


def random_state(device: torch.device) -> tuple:
    "torch's random state on the CPU and on `device`, read without waiting."
    module = getattr(torch, device.type, None) if device.type not in ('cpu', 'xla') else None
    return torch.get_rng_state(), (device, module.get_rng_state(device)) if hasattr(module, 'get_rng_state') else None


def set_random_state(state: tuple) -> None:
    "Put torch's random state back to what `random_state` gave."
    cpu, other = state
    torch.set_rng_state(cpu)
    if other is not None: getattr(torch, other[0].type).set_rng_state(other[1], other[0])
