"Training went wrong in low precision: where did it start, and what would fix it?"
from __future__ import annotations

import ctypes, math, warnings
from dataclasses import dataclass
from typing import Any

import torch

from ..fp32_modules import unwrapped
from ..mode import AMPMode
from .tracer import LOSS, Tracer, after_pred, local_statistics, tensors
from ..observer import OBSERVERS, PrecisionObserver
from ..scaling import GradStage, StaticGradScaler
from ..devices.sharded import is_sharded
from .snapshot import preserved

KEEP = "learn.to_{mode}(fp32_modules=['{name}'])"


def peek(t: torch.Tensor) -> float | None:
    "The value of a single fp32 number in main memory, read without an operator; None if it is elsewhere or of another kind."
    with torch._C.DisableTorchFunctionSubclass():                # as in `is_half`
        if not t.is_cpu or t.dtype is not torch.float32 or t.numel() != 1 or t.layout is not torch.strided: return None
        return ctypes.c_float.from_address(t.data_ptr()).value


@dataclass
class Diagnosis:
    "What a rerun of one batch showed."
    kind: str # 'sharded', 'data', 'weights', 'fp32', 'forward', 'backward' or 'not reproduced'
    text: str
    modules: list[str]


def diagnose(
    learn: Any, # The learner, possibly in the middle of a fit
    mode: AMPMode,
    scale: float, # The loss scale of the step that went wrong
    random_state: tuple | None = None, # What `random_state` gave before that batch's forward pass
    keep: str = KEEP, # The call that keeps a module in fp32, for the advice
) -> Diagnosis:
    "Run the batch at hand again, in fp32 and in `mode`, and find where finite numbers end; the learner stays as it was."
    xb, yb, model = learn.xb, learn.yb, unwrapped(learn.model)
    if is_sharded(model):                                        # one process alone would wait for the others in the forward pass
        return Diagnosis('sharded', "the parameters are sharded over processes, so it was not run again after all. Call `learn.precision_report()` before "
                         "`fully_shard`", [])
    for what, batch in (('an input', xb), ('a target', yb)):
        for t in tensors(batch):
            bad = int((t.isnan() | (t == math.inf)).sum())
            if bad: return Diagnosis('data', f"the batch itself is not finite: {bad:,} of {t.numel():,} values of {what} of shape {tuple(t.shape)} are NaN "
                                     "or inf. Look at the data; no precision can train on it", [])
    lost = [n for n, p in model.named_parameters() if not bool(p.detach().isfinite().all())]
    if lost:
        return Diagnosis('weights', f"{len(lost)} of {len(list(model.parameters()))} weight tensors are NaN or inf by now, such as '{lost[0]}', so the "
                         "batch cannot be run again as it was. Load the last checkpoint, then call `learn.precision_report()`", lost)
    with preserved(learn), local_statistics(model):
        def run(*args):
            if random_state is not None: set_random_state(random_state)
            with preserved(learn):
                tracer = Tracer(model, learn.loss_func, *args, after_pred=after_pred(learn))
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
        if names: return Diagnosis(where, _story(low, fp32, names[0], mode, where, keep), names[:1])
    return Diagnosis('not reproduced', f"run again, this batch is finite in {mode.value}, forward and backward: `learn.precision_report()` looks closer", [])


def _named(tracer, name):
    return 'the loss function' if name == LOSS else f"module '{name}' ({tracer.seen[name].type})"


def _story(low, fp32, name, mode, where, keep):
    seen, limit = fp32.seen[name], torch.finfo(mode.dtype).max
    if where == 'backward':
        size = f"its gradients in fp32, times the loss scale {low.scale:,g}, reach {seen.grads.largest * low.scale:,.4g}"
        start = 'the forward pass is finite; the gradients stop being so in the backward pass of'
    else:
        within = seen.inside > seen.largest
        size = f"{'values inside it reach' if within else 'its output reaches'} {max(seen.inside, seen.largest):,.4g} in fp32"
        start = 'numbers stop being finite in'
    fix = ("Compute it in fp32 inside the loss function" if name == LOSS else
           f"Keep it in fp32: `{keep.format(mode=mode.value, name=name)}`")
    return f"{start} {_named(low, name)}: {size}; {mode.value} ends at {limit:,.5g}. {fix}"


def random_state(device: torch.device) -> tuple:
    "torch's random state on the CPU and on `device`, read without waiting."
    cpu = torch.default_generator.get_state()
    if device.type == 'cpu': return cpu, None                    # once a batch: every microsecond counts
    module: Any = getattr(torch, device.type, None) if device.type != 'xla' else None
    return cpu, (device, module.get_rng_state(device)) if hasattr(module, 'get_rng_state') else None


def set_random_state(state: tuple) -> None:
    "Put torch's random state back to what `random_state` gave."
    cpu, other = state
    torch.set_rng_state(cpu)
    if other is not None: getattr(torch, other[0].type).set_rng_state(other[1], other[0])


def _recorded(learn) -> list:
    "The smoothed losses that fastai's Recorder has fetched, in main memory."
    return vars(learn.__dict__.get('recorder', learn)).get('losses', ())


class OverflowWatch(PrecisionObserver):
    """Notices, for one callback, that training goes wrong, and says once a fit where.

    While all goes well it costs no operator and no wait: in main memory the loss and the device's flag are read in place;
    on an accelerator the loss that fastai's Recorder has fetched anyway, and the flags of many steps when they have come.
    """
    def __init__(self, cb: Any):
        super().__init__(cb)
        self.on, self.skips, self.n_recorded = False, 0, 0
        self.random_state: tuple | None = None                   # before the last batch
        self.in_place = True                                     # the loss is in main memory

    def fit_started(self) -> None:
        cb = self.cb
        self.on = cb.fit_mode is not None and cb.on_overflow != 'ignore' and not cb.finds_lr
        self.skips, self.n_recorded, self.random_state = 0, 0, None
        self.device = cb.fit_device
        self.in_place = self.device.type == 'cpu'

    def batch_started(self) -> None:
        learn = self.cb.learn
        if not self.on or not learn.training: return
        self.random_state = random_state(self.device)
        if not self.in_place: self.n_recorded = len(_recorded(learn))

    def loss_computed(self) -> None:
        "Look at the loss before anything is made of it, where that is free."
        if self.in_place and self.on and self.cb.learn.training: self._check_loss(peek(self.cb.learn.loss))

    def step_decided(self) -> None:
        "After the gradients were unscaled: was the step held back, and is it one too many?"
        s, learn = self.cb.scaling, self.cb.learn
        if not self.on or s.stage is not GradStage.UNSCALED: return
        skipped = peek(s.found_inf) if isinstance(s.found_inf, torch.Tensor) else s.held_back
        if skipped is None: return                               # only the device knows
        self.skips = self.skips + 1 if skipped else 0
        if not skipped: return
        loss = peek(learn.loss)
        if self._check_loss(float(learn.loss) if loss is None else loss): return     # the host has just waited anyway
        if self.skips >= self.cb.max_skips: self._alarm(f'{self.skips} steps in a row were skipped')
        elif not isinstance(s.scaler, StaticGradScaler) and s.scaler.get_scale() * s.scaler.get_backoff_factor() < 1:
            self._alarm('the loss scale falls below 1')

    def batch_ended(self) -> None:
        "On an accelerator: look at what has come to the host by now."
        if self.in_place or not self.on or self.random_state is None: return
        n = self.cb.scaling.history.arrived_skips()
        if n >= self.cb.max_skips: return self._alarm(f'{n} steps in a row were skipped', same=False)
        losses = _recorded(self.cb.learn)
        if len(losses) > self.n_recorded: self._check_loss(peek(losses[-1]))

    def epoch_ended(self) -> None:
        "At the end of an epoch the host knows all."
        if not self.on: return
        n = self.cb.max_skips
        skips = self.cb.scaling.history.skips[-n:]
        if len(skips) == n and skips.all() and self.skips < n: self._alarm(f'the last {n} steps were skipped', same=False)

    def _check_loss(self, loss: float | None) -> bool:
        if loss is None or math.isfinite(loss): return False
        self._alarm(f'the loss is {loss}')
        return True

    def _alarm(self, what: str, same: bool = True) -> None:
        cb, self.on = self.cb, False                             # once a fit
        mode, scale = cb.fit_mode, cb.scaling.scaler.get_scale()
        try:
            with cb.diagnosing(): found = diagnose(cb.learn, mode, scale, self.random_state if same else None, cb.keep_call).text
        except Exception as e: found = f"looking for the cause failed ({type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''})"
        batch = 'That batch, run again with the same random draws' if same else 'The batch at hand, not the one it began with, run again'
        message = f'{mode.value} training goes wrong: {what}. {batch}: {found}.'
        if cb.on_overflow == 'raise': raise FloatingPointError(message)
        warnings.warn(message)


OBSERVERS.append(OverflowWatch)
