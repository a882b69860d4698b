"How is the loss scaled, and was the step skipped?"
from __future__ import annotations

import math
from enum import IntEnum
from functools import partial
from numbers import Integral, Real
from typing import Any, NamedTuple

import numpy as np
import torch
from fastai.optimizer import OptimWrapper
from torch import nn
from torch.amp import GradScaler

DEFAULTS = dict(init_scale=65536.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000)


class StaticGradScaler(GradScaler):
    """A `GradScaler` whose scale neither grows nor shrinks, as fastai v1's `loss_scale`.

    Steps with non-finite gradients are still skipped.
    """
    def update(self, new_scale: float | torch.Tensor | None = None) -> None: self._per_optimizer_states.clear()


def _is_number(x: Any, kind: type = Real) -> bool: return isinstance(x, kind) and not isinstance(x, (bool, np.bool_))


def check_scaling_args(
    init_scale: float, growth_factor: float, backoff_factor: float, growth_interval: int, enabled: bool,
    loss_scale: float | None, scaler: GradScaler | None,
) -> None:
    "Raise a `ValueError` (`TypeError` for a `scaler` that is none) that names the first argument that cannot be used."
    def check(ok, name, value, allowed):
        if not ok: raise ValueError(f"{name}={value!r} cannot be used: {name} must be {allowed}.")
    def finite(x): return _is_number(x) and math.isfinite(x)
    check(finite(init_scale) and init_scale > 0, 'init_scale', init_scale, f"a finite number above 0, such as {DEFAULTS['init_scale']}")
    check(finite(growth_factor) and growth_factor > 1, 'growth_factor', growth_factor, 'a finite number above 1, such as 2.0')
    check(finite(backoff_factor) and 0 < backoff_factor < 1, 'backoff_factor', backoff_factor, 'a number between 0 and 1, both excluded, such as 0.5')
    check(_is_number(growth_interval, Integral) and growth_interval > 0, 'growth_interval', growth_interval, 'an integer above 0, such as 2000')
    check(loss_scale is None or (finite(loss_scale) and loss_scale > 0), 'loss_scale', loss_scale, 'a finite number above 0, such as 512.0, or None')
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler={scaler!r} cannot be used: scaler must be a torch.amp.GradScaler (or a subclass), or None.")
    chosen = [n for n, v in (('loss_scale', loss_scale), ('scaler', scaler)) if v is not None]
    given = dict(init_scale=init_scale, growth_factor=growth_factor, backoff_factor=backoff_factor, growth_interval=growth_interval)
    clash = chosen[1:] + [f'{k}={v!r}' for k, v in given.items() if v != DEFAULTS[k]] + ([] if enabled else ['enabled=False'])
    if chosen and clash:
        raise ValueError(f"{chosen[0]} cannot be combined with {', '.join(clash)}: each settles the loss scale in its own way. "
                         f"Keep one of them.")


class _Rule(NamedTuple):
    "What `GradScaler.update` makes of the scale, in its own arithmetic: fp32 scale, fp64 factors."
    growth: float
    backoff: float
    interval: int

    def next(self, scale: float, tracker: int, skipped: bool) -> tuple[float, int]:
        if skipped: return float(np.float32(scale * self.backoff)), 0
        if tracker + 1 < self.interval: return scale, tracker + 1
        with np.errstate(over='ignore'): grown = float(np.float32(scale * self.growth))
        return (grown if math.isfinite(grown) else scale), 0


_CONSTANT = _Rule(1., 1., 1)


class History:
    """Which attempted steps were skipped, and the scale that each one used.

    One bit a step (1.25 MB for 10 million steps), and four bytes for each step since the last epoch ended whose flag is
    still on the device; the scales are worked out from the bits when asked for. Where the scale was not the outcome of
    the step before (at the start, after `load_state_dict` or `update(new_scale)`, with a scaler of other rules) a mark
    holds what it was.
    """
    _chunk = 4096  # flags held as single tensors before they are joined and set on their way to the host

    def __init__(self): self.n, self._bits, self._marks, self._flags, self._chunks, self._coming = 0, bytearray(), [], [], [], None
    def __getstate__(self): self.flush(); return self.__dict__

    def mark(self, scale: float, tracker: int, rule: _Rule) -> None:
        "From the next step on the scale is `scale`, its growth tracker `tracker`, and it changes by `rule`."
        scale = float(np.float32(scale))
        if self._marks and self._marks[-1][0] == self.n: self._marks.pop()
        if self._marks and rule == _CONSTANT and self._marks[-1][1::2] == (scale, rule): return
        self._marks.append((self.n, scale, tracker, rule))

    def record(self, skipped: bool | torch.Tensor) -> None:
        "Add an attempted step; a flag that is still on the device (0-dim, 0 or 1) is not read yet."
        if isinstance(skipped, torch.Tensor):
            self._flags.append(skipped)
            if len(self._flags) == self._chunk:
                self._chunks.append(torch.stack(self._flags))
                self._flags, self._coming = [], _on_its_way(self._chunks[-1])
        else:
            self.flush()
            self._add(skipped, self.n)
        self.n += 1

    def flush(self) -> None:
        "Read the flags that are on the device; this waits for it."
        if not (self._flags or self._chunks): return
        flags = torch.cat([*self._chunks, *([torch.stack(self._flags)] if self._flags else [])]).tolist()
        for i, flag in enumerate(flags, self.n - len(flags)): self._add(bool(flag), i)
        self._flags, self._chunks, self._coming = [], [], None

    def poll(self) -> int:
        "How many skips in a row the newest joined flags end with, once they have come to the host, and only once; else 0. Never waits."
        if self._coming is None: return 0
        flags, event = self._coming
        if event is not None and not event.query(): return 0
        self._coming = None
        taken = np.flatnonzero(flags.numpy() == 0)
        return len(flags) - 1 - int(taken[-1]) if len(taken) else len(flags)

    def _add(self, skipped, i):
        if i % 8 == 0: self._bits.append(0)
        if skipped: self._bits[-1] |= 1 << i % 8

    @property
    def last(self) -> bool:
        "Was the last step skipped?"
        self.flush()
        return bool(self.n and self._bits[-1] >> (self.n - 1) % 8 & 1)

    def truncate(self, n: int) -> None:
        "Forget all but the first `n` steps."
        self.flush()
        self.n, self._marks = n, [m for m in self._marks if m[0] <= n]
        del self._bits[(n + 7) // 8:]
        if n % 8: self._bits[-1] &= (1 << n % 8) - 1

    @property
    def skips(self) -> np.ndarray:
        "For each attempted step, shape (n,), bool: was it skipped?"
        self.flush()
        return np.unpackbits(np.frombuffer(bytes(self._bits), np.uint8), bitorder='little')[:self.n].astype(bool)

    @property
    def scales(self) -> list[float]:
        "For each attempted step the scale it used."
        skips, scales, marks = self.skips.tolist(), [], iter(self._marks)
        upcoming = next(marks, None)
        scale, tracker, rule = math.nan, 0, _CONSTANT            # the first mark lies before the first step
        for i, skipped in enumerate(skips):
            if upcoming and upcoming[0] == i: (_, scale, tracker, rule), upcoming = upcoming, next(marks, None)
            scales.append(scale)
            scale, tracker = rule.next(scale, tracker, skipped)
        return scales


def _on_its_way(flags: torch.Tensor) -> tuple[torch.Tensor, Any] | None:
    "`flags` in the host's memory, and the event after which they are there; None where there is no way not to wait."
    if flags.device.type == 'cpu': return flags, None
    if flags.device.type != 'cuda': return None
    host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
    host.copy_(flags, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event


class GradStage(IntEnum):
    "What the gradients in `.grad` are multiplied by, as `OptState` is to `GradScaler`, but across batches."
    TRUE = 0     # by nothing, and no step is under way
    SCALED = 1   # by the scale: some backward pass has run since the last step
    UNSCALED = 2 # by nothing, and the optimizer's step is to come
    SETTLED = 3  # by nothing: the step was taken, skipped or cancelled; `zero_grad` is to come


class _Probe:
    "Stands in for the optimizer in `GradScaler.step`, which calls `step` only when every gradient is finite."
    def __init__(self, params): self.param_groups, self.finite = [{'params': params}], False
    def step(self): self.finite = True


def skips_on_device(
    opt: Any, # fastai's `Optimizer` or `OptimWrapper`
    params: list[nn.Parameter], # Its parameters
) -> bool:
    """Can `opt` skip a step by itself, told by a `found_inf` on the device, with no effect at all?

    torch's fused Adam, AdamW and SGD inside an `OptimWrapper` can, once their state is there: a first step that is
    skipped would create it, and fused SGD would leave its momentum uninitialised (seen with PyTorch 2.13). torch_xla's
    sync-free ones can, unless their state was made by steps without a `found_inf`. Wrappers with counters of their own,
    such as Lookahead, would count the step.
    """
    inner: Any = opt.opt if type(opt) is OptimWrapper else None
    if is_syncfree(inner):                                       # a `step` of somebody else's on the instance stays
        return 'step' not in inner.__dict__ and all(not (s := inner.state.get(p)) or syncfree_state(inner, s) for p in params)
    if type(inner) not in _STATE or not getattr(inner, '_step_supports_amp_scaling', False): return False
    if isinstance(inner, torch.optim.SGD) and not any(g['momentum'] for g in inner.param_groups): return True
    key, state = _STATE[type(inner)], inner.state
    return all(p.grad is None or state.get(p, _NOTHING).get(key) is not None for p in params)


def is_syncfree(opt: Any) -> bool:
    "Is `opt` one of torch_xla's optimizers whose `step` takes a `found_inf`? torch_xla is not imported for that."
    return type(opt).__module__.startswith('torch_xla.amp.syncfree')


def syncfree_state(opt: Any, state: dict[str, Any]) -> bool:
    "Was `state`, of one parameter, made by a sync-free step? Their Adam keeps an empty tensor, their SGD a step count."
    return is_syncfree(opt) and ('step' if isinstance(opt, torch.optim.SGD) else 'max_exp_avg_sq') in state


# What each optimizer keeps for a parameter once it has stepped on it.
_STATE: dict[type, str] = {torch.optim.Adam: 'exp_avg', torch.optim.AdamW: 'exp_avg', torch.optim.SGD: 'momentum_buffer'}
_NOTHING: dict[str, Any] = {}


class LossScaling:
    """Loss scaling for one callback: none, static or dynamic, on a `torch.amp.GradScaler`.

    It keeps the scaler from fit to fit, knows at each moment whether the gradients are scaled, and records the steps.
    Without loss scaling (bf16, fp32, `enabled=False`) the scaler is a disabled `GradScaler` and every method a no-op.
    """
    def __init__(self, init_scale, growth_factor, backoff_factor, growth_interval, enabled, loss_scale=None, scaler=None):
        check_scaling_args(init_scale, growth_factor, backoff_factor, growth_interval, enabled, loss_scale, scaler)
        if scaler is None:                                       # its device is settled when a fit starts
            scaler = (GradScaler('cpu', float(init_scale), float(growth_factor), float(backoff_factor), int(growth_interval), bool(enabled))
                      if loss_scale is None else StaticGradScaler('cpu', init_scale=float(loss_scale)))
        self._fp16_scaler, self.initial_state = scaler, scaler.state_dict()
        self.scaler: GradScaler = GradScaler('cpu', enabled=False)
        self.history, self.stage, self.stepped, self.held_back = History(), GradStage.TRUE, False, False
        self._found_inf: bool | torch.Tensor = False             # of the last step; on the device if the device decides
        self._told: Any = None                                   # the torch optimizer that holds a `found_inf` of ours
        self._seen, self._used = None, False

    # -- for one fit

    def start(
        self, device_type: str, # Type of the device that the loss will be on
        scaled: bool, # Whether the mode needs loss scaling
    ) -> GradScaler: # The scaler for this fit
        "Make the scaler ready for a fit on `device_type`; the scale and its growth tracker go with it to a new device."
        self._used = False
        if not scaled:
            self.scaler = GradScaler(device_type, enabled=False)
            return self.scaler
        self.scaler = s = self._fp16_scaler
        if s.is_enabled() and s._scale is not None and s._scale.device.type != device_type:
            # As GradScaler's own pickling does: the tensors are made anew, on the device of the first loss.
            s._init_scale, s._init_growth_tracker = s.get_scale(), s._get_growth_tracker()
            s._scale = s._growth_tracker = None
        s._device = device_type
        return s

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        "The loss (fp32) times the scale; the gradients that its backward pass adds are scaled."
        if not self.scaler.is_enabled(): return loss
        moved = self._follow()
        self.stage, self._used = GradStage.SCALED, True
        scaled = self.scaler.scale(loss)                         # the scaler's tensors are made here, at the first loss
        if moved: self._seen = self._state_key()
        return scaled

    @property
    def found_inf(self) -> bool | torch.Tensor:
        "Was a gradient not finite in the last step? On the device, 0-dim or of one element, where the device decides."
        return self._found_inf

    @property
    def skipped(self) -> bool:
        "Was the last step skipped? Waits for the device if the device decided."
        return bool(self._found_inf)

    def read(self) -> None:
        "Bring what the device decided to the host; this waits for it."
        if isinstance(self._found_inf, torch.Tensor):            # the last flag of the history, unless that step was interrupted
            self._found_inf = bool(self.history.last if self.stage is not GradStage.UNSCALED else self._found_inf)
        self.history.flush()

    def unscale(self, opt: Any) -> bool: # Whether the step must be held back; never if the device decides
        "Divide the gradients of `opt` (fastai's `Optimizer` or `OptimWrapper`) by the scale, in place."
        if self.stage is not GradStage.SCALED: return False
        params = _params(opt)
        self.stepped, self.held_back, self._found_inf = False, False, False
        probe: Any = _Probe(params)                              # all that GradScaler uses of an optimizer
        self.scaler.unscale_(probe)
        self.stage = GradStage.UNSCALED
        found_inf = list(self.scaler._found_inf_per_device(probe).values())
        if not found_inf:                                        # no parameter has a gradient
            self.cancel()
        elif type(self.scaler).step is GradScaler.step and skips_on_device(opt, params):
            # The kernels take exactly 1 for a skip, so flags of several devices are combined by their maximum.
            self._found_inf = found_inf[0] if len(found_inf) == 1 else torch.stack([f.to(found_inf[0].device) for f in found_inf]).amax()
            self._told = opt.opt
            if is_syncfree(opt.opt): self._told.step = partial(self._told.step, found_inf=self._found_inf)
            else: self._told.grad_scale, self._told.found_inf = None, self._found_inf
        else:
            self.scaler.step(probe)                              # waits for the device, once, to read found_inf
            self._found_inf = self.held_back = not probe.finite
        return self.held_back

    def update(self) -> None:
        "After a step, taken or skipped: let the scale grow or back off, and record the step."
        if self.stage is not GradStage.UNSCALED: return
        if self.scaler._per_optimizer_states: self.scaler.update()   # empty if an interrupt ended this method once before
        self.stage = GradStage.SETTLED
        self._untell()
        self.history.record(self._found_inf)
        self._seen = self._state_key()

    def cancel(self) -> None:
        "The step was called off: the scale and its tracker stay as they were."
        self._forget_step()
        if self.stage is GradStage.UNSCALED: self.stage = GradStage.SETTLED

    def settle(self) -> None:
        "The step is over, in whichever way, and `zero_grad` comes next."
        if self.stage is not GradStage.TRUE: self.stage = GradStage.SETTLED

    def rescale(self, opt: Any) -> None:
        "Put the scale back on true gradients that later batches will add scaled ones to."
        scale = self.scaler.get_scale()
        self._forget_step()
        for p in _params(opt):
            if p.grad is not None: p.grad.mul_(scale)
        self.stage = GradStage.SCALED

    def drop(self, opt: Any, model: nn.Module) -> None:
        "Zero the gradients, as the step would have, so that nothing can step on scaled ones."
        if self.stage is GradStage.TRUE and not self._used: return
        self._forget_step()
        if opt is not None and self.stage is not GradStage.TRUE: opt.zero_grad()
        known = {id(p) for p in _params(opt)}
        for p in model.parameters():                             # those that no optimizer zeroes
            if id(p) not in known: p.grad = None
        self.stage, self._used = GradStage.TRUE, False

    def _forget_step(self):
        self._untell()
        # GradScaler has no public way to take back an `unscale_` that no `update` follows.
        if self.scaler.is_enabled(): self.scaler._per_optimizer_states.clear()

    def _untell(self):
        "Take `found_inf` off the optimizer, where it would decide the next step too."
        if self._told is None: return
        for name in ('grad_scale', 'found_inf', *(['step'] if is_syncfree(self._told) else [])): self._told.__dict__.pop(name, None)
        self._told = None

    # -- what is kept

    def state_dict(self) -> dict[str, Any]:
        "The scaler's state: scale, growth tracker, factors and interval as plain numbers; empty with `enabled=False`."
        return self._fp16_scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any], opt: Any = None) -> None:
        "Take up `state` by the scaler's own rule, and bring scaled gradients of `opt` to the new scale; a static scale stays."
        scaler = self._fp16_scaler
        if isinstance(scaler, StaticGradScaler) or not scaler.is_enabled(): return
        before = scaler.get_scale()
        scaler.load_state_dict(dict(state))
        self._seen = None
        if self.stage is not GradStage.SCALED: return
        for p in _params(opt):
            if p.grad is not None: p.grad.mul_(scaler.get_scale() / before)

    @property
    def has_own_state(self) -> bool:
        "Does the scaler read states of its own kind, as a subclass may?"
        return type(self._fp16_scaler).load_state_dict is not GradScaler.load_state_dict

    def snapshot(self) -> Any:
        "What `restore` needs to undo the steps from now on."
        return self.state_dict(), self.history.n, self._found_inf

    def restore(self, snapshot: Any) -> None:
        "Put scale, tracker and history back to `snapshot`; the gradients must not be scaled."
        state, n, self._found_inf = snapshot
        self.load_state_dict(state)
        self.history.truncate(n)

    def _state_key(self):
        "Changes when somebody else changes the scale; read on the host without waiting for the device."
        s = self.scaler
        return (id(s), None if s._scale is None else (id(s._scale), s._scale._version), s._init_scale, s._init_growth_tracker,
                s._growth_factor, s._backoff_factor, s._growth_interval)

    def _follow(self) -> bool:
        "Mark the history where the scale is not what the last step made of it; a scaler with rules of its own is asked each time."
        s, known = self.scaler, type(self.scaler).update is GradScaler.update
        if (known or isinstance(s, StaticGradScaler)) and self._seen == self._state_key(): return False
        rule = _Rule(s._growth_factor, s._backoff_factor, s._growth_interval) if known else _CONSTANT
        self.history.mark(s.get_scale(), s._get_growth_tracker(), rule)
        return True


def _params(opt): return [] if opt is None else [p for pl in opt.param_lists for p in pl]
