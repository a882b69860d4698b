"History of the loss scale: which attempted optimizer steps were skipped, and the scale that each one used."
from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ['ScaleHistory', 'ScaleRule', 'plot_scales']


class ScaleRule(NamedTuple):
    "How `GradScaler.update` changes the scale, in its own arithmetic: fp32 scale, fp64 factors."
    growth: float
    backoff: float
    interval: int

    def next(self, scale: float, tracker: int, skipped: bool) -> tuple[float, int]:
        "Scale and growth tracker after a step."
        if skipped: return float(np.float32(scale * self.backoff)), 0
        if tracker + 1 < self.interval: return scale, tracker + 1
        with np.errstate(over='ignore'): grown = float(np.float32(scale * self.growth))
        return (grown if math.isfinite(grown) else scale), 0


CONSTANT = ScaleRule(1., 1., 1)


class _Mark(NamedTuple):
    "From attempted step number `step` on the scale is `scale`, its growth tracker `tracker`, and it changes by `rule`."
    step: int
    scale: float
    tracker: int
    rule: ScaleRule


class ScaleHistory:
    """Which attempted steps were skipped, and the scale that each one used.

    Keeps one bit a step (1.25 MB for 10 million steps), and four bytes for each step whose flag is still on the device.
    Scales are worked out from the bits when asked for. A mark holds the scale where it was not the outcome of the step
    before: at the start, after `load_state_dict` or `update(new_scale)`, and with a scaler of other rules.
    """
    _chunk = 4096  # flags held as single tensors before they are joined and copied to the host in the background

    def __init__(self):
        self.n = 0                                               # attempted steps
        self._bits, self._marks = bytearray(), []
        self._now = math.nan, 0, CONSTANT  # scale, tracker and rule after the steps that are known
        self._flags: list[torch.Tensor] = []                     # of the newest steps, on the device
        self._chunks: list[torch.Tensor] = []                    # joined flags of the steps before those, on the device
        self._arriving: Any = None                               # the newest chunk in host memory, and its event

    def __getstate__(self): self.flush(); return self.__dict__

    def mark(self, scale: float, tracker: int, rule: ScaleRule) -> None:
        "From the next step on the scale is `scale`, its growth tracker `tracker`, and it changes by `rule`."
        self.flush()
        scale = float(np.float32(scale))
        self._now = scale, tracker, rule
        if self._marks and self._marks[-1].step == self.n: self._marks.pop()
        last = self._marks[-1] if self._marks else None
        if last is not None and rule == CONSTANT == last.rule and scale == last.scale: return
        self._marks.append(_Mark(self.n, scale, tracker, rule))

    def record(self, skipped: bool | torch.Tensor) -> None:
        "Add an attempted step; a flag that is still on the device (0-dim, 0 or 1) is not read yet."
        if isinstance(skipped, torch.Tensor):
            self._flags.append(skipped)
            if len(self._flags) == self._chunk: self._join_flags()
        else:
            self.flush()
            self._add_bit(skipped, self.n)
        self.n += 1

    def flush(self) -> None:
        "Read the flags that are on the device; this waits for it."
        if not (self._flags or self._chunks): return
        if self._flags: self._chunks.append(torch.stack(self._flags))
        flags = torch.cat(self._chunks).tolist()
        for i, flag in enumerate(flags, self.n - len(flags)): self._add_bit(bool(flag), i)
        self._flags, self._chunks, self._arriving = [], [], None

    def arrived_skips(self) -> int:
        """The number of skipped steps in a row that the newest joined flags end with; never waits for the device.

        0 as long as these flags have not arrived in host memory, and when they were asked for before.
        """
        if self._arriving is None: return 0
        flags, event = self._arriving
        if event is not None and not event.query(): return 0
        self._arriving = None
        taken = np.flatnonzero(flags.numpy() == 0)
        return len(flags) - 1 - int(taken[-1]) if len(taken) else len(flags)

    def truncate(self, n: int) -> None:
        "Forget all but the first `n` steps."
        self.flush()
        self.n, self._marks = n, [m for m in self._marks if m.step <= n]
        del self._bits[(n + 7) // 8:]
        if n % 8: self._bits[-1] &= (1 << n % 8) - 1
        self._now = self._replay()[1]

    @property
    def last(self) -> bool:
        "Was the last step skipped?"
        self.flush()
        return bool(self.n and self._bits[-1] >> (self.n - 1) % 8 & 1)

    @property
    def current_scale(self) -> float | None:
        "The scale after the last step, worked out on the host; None while flags are still on the device."
        return None if self._flags or self._chunks else self._now[0]

    @property
    def skips(self) -> np.ndarray:
        "For each attempted step, shape (n,), bool: was it skipped?"
        self.flush()
        return np.unpackbits(np.frombuffer(bytes(self._bits), np.uint8), bitorder='little')[:self.n].astype(bool)

    @property
    def scales(self) -> list[float]:
        "For each attempted step the scale it used."
        return self._replay()[0]

    def _replay(self) -> tuple[list[float], tuple[float, int, ScaleRule]]:
        "The scale of each step, and scale, tracker and rule after the last one."
        scales, marks = [], {m.step: m for m in self._marks}
        scale, tracker, rule = math.nan, 0, CONSTANT             # the first mark lies before the first step
        for i, skipped in enumerate(self.skips.tolist()):
            if i in marks: _, scale, tracker, rule = marks[i]
            scales.append(scale)
            scale, tracker = rule.next(scale, tracker, skipped)
        if self.n in marks: _, scale, tracker, rule = marks[self.n]
        return scales, (scale, tracker, rule)

    def _add_bit(self, skipped: bool, i: int) -> None:
        scale, tracker, rule = self._now
        self._now = *rule.next(scale, tracker, skipped), rule
        if i % 8 == 0: self._bits.append(0)
        if skipped: self._bits[-1] |= 1 << i % 8

    def _join_flags(self) -> None:
        self._chunks.append(torch.stack(self._flags))
        self._flags, self._arriving = [], _copy_to_host(self._chunks[-1])


def _copy_to_host(flags: torch.Tensor) -> tuple[torch.Tensor, Any] | None:
    """Start to copy `flags` to the host: the host tensor, and the event after which it is filled (None: at once).

    None for devices without pinned memory or events, where a copy would wait.
    """
    device = flags.device
    if device.type == 'cpu': return flags, None
    module: Any = torch.get_device_module(device) if device.type != 'xla' else None
    if not all(hasattr(module, name) for name in ('Event', 'current_stream')): return None
    host = torch.empty(flags.shape, dtype=flags.dtype, device='cpu', pin_memory=True)
    host.copy_(flags, non_blocking=True)
    event = module.Event()
    event.record(module.current_stream(device))  # of the flags' own device, which need not be the current one
    return host, event


def plot_scales(history: ScaleHistory, ax: Any = None) -> Any:
    "Plot the loss scale of each attempted optimizer step on `ax` (new matplotlib axes if None); returns the axes."
    import matplotlib.pyplot as plt
    if ax is None: ax = plt.subplots()[1]
    scales, skips = history.scales, history.skips
    ax.plot(range(len(scales)), scales, drawstyle='steps-post', label='loss scale')
    if skips.any():
        where = skips.nonzero()[0]
        ax.plot(where, [scales[i] for i in where], 'rx', label=f'skipped steps ({len(where)})')
    if scales:
        ax.set_yscale('log', base=2)
        ax.legend()
    else: ax.text(.5, .5, 'no loss scaling so far', ha='center', transform=ax.transAxes)
    ax.set(title='Loss scale in training', xlabel='optimizer step', ylabel='loss scale')
    return ax
