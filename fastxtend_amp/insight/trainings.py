"One training of a comparison: a copied learner that trains in one precision, a few steps at a time, timed."
from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from fastai.callback.core import Callback
from fastai.learner import Learner
from fastai.torch_core import to_device

from ..callback import precision_callback
from ..common import first_line, random_state, random_state_kept, set_random_state
from ..convert import map_tensors
from .copies import copied_learner, loader_like
from .phases import StepClock, page_faults
from .precisions import PrecisionChoice, use_choice
from .recommend import fused_name
from .values import tensors

__all__ = ['Batches', 'Run', 'mean_of_last']

LIMIT = 2**29       # bytes of batches that are held; further steps take the same ones again


class Batches:
    """Training batches of a learner, on its device: as many as are wanted, come before `end` and fit into 512 MB.

    `seconds`: how long the dataloader takes for one. Raises `ValueError` for a dataloader without batches.
    """
    def __init__(self,
        learn: Learner, # A loader like its `dls.train` is drawn from
        n: int, # How many are wanted
        device: torch.device,
        end: float, # By `time.perf_counter()`
    ):
        self.all: list[Any] = []
        dl, times, size = loader_like(learn.dls.train), [time.perf_counter()], 0
        for b in (b for _ in range(n) for b in dl):              # the batches come again when an epoch is over
            self.all.append(to_device(b, device))
            wait_for(device)
            times.append(time.perf_counter())
            size += sum(t.numel() * t.element_size() for t in tensors(b, floating=False))
            is_full = size * (len(self.all) + 1) > LIMIT * len(self.all)
            if len(self.all) == n or is_full or times[-1] > end: break
        if not self.all:
            raise ValueError("The learner's training dataloader (`learn.dls.train`) gives no batches, so there is "
                             "nothing to train on.\n"
                             "With `drop_last=True` its dataset may be smaller than one batch.")
        self.seconds = float(np.median(np.diff(times)))
        lengths = [len(t) if t.dim() else 0 for t in tensors(self.all[0], floating=False)]
        self.n_samples, self.can_be_cut = max(lengths), len(set(lengths)) == 1

    def get(self, i: int, n: int | None = None) -> Any:
        "Return a copy of the batch for step `i`, or of its first `n` samples: callbacks such as CutMix write into it."
        return map_tensors(lambda t: (t[:n] if n else t).clone(), self.all[i % len(self.all)])


class Run:
    "One training: its precision, the copy that trains in it, and what was measured."
    def __init__(self,
        choice: PrecisionChoice,
        support: str = 'native', # 'emulated', 'unsupported' or 'failed'
        note: str = '',
        samples: int | None = None, # How many of each batch it sees; all if None
    ):
        self.choice, self.support, self.note, self.samples = choice, support, note, samples
        self.name = choice.name if samples is None or choice.mode else f'{choice.name}, {samples} samples'
        self.call, self.measure = f'learn.to_{self.name}()', self   # measure: fp32 on the same samples
        self.learn: Any = None                                   # the copy
        self.clock: Any = None                                   # of the copy, and the name of its fused optimizer
        self.fused: str | None = None
        self.losses, self.speeds = list[float](), list[float]()  # speeds: samples per second in each turn
        self.seconds, self.faults, self.peak, self.skipped, self.scale = 0., 0, math.nan, 0, math.nan

    @property
    def can_go_on(self) -> bool: return self.support in ('native', 'emulated')

    def begin(self, learn: Learner, cbs: Sequence[Callback] | None, lr: Any, n_steps: int, device: torch.device,
              copies: ExitStack, seed: int | None = None) -> None:
        "Copy `learn`, ready for its first step; the copy is removed with `copies`."
        self.clock = StepClock(device)
        copy = self.learn = copies.enter_context(copied_learner(learn, cbs, optimizer=True))
        if (cb := use_choice(copy, self.choice, precision_callback(learn))) is not None:
            self.call, self.skipped = cb.as_call(), -cb.n_skipped
            cb.on_overflow = 'ignore'                            # a diagnosis would disturb the times; the table tells
        with random_state_kept():
            if seed is not None: random.seed(seed); np.random.seed(seed); torch.manual_seed(seed)
            if not copy.opt: copy.create_opt()
            copy.opt.set_hypers(lr=copy.lr if lr is None else lr, **({} if copy.wd is None else {'wd': copy.wd}))
            copy.n_epoch, copy.epoch, copy.n_iter, copy.dl = 1, 0, n_steps, copy.dls.train
            for event in ('before_fit', 'before_epoch', 'before_train'): copy(event)
            self.random_state = random_state(everything=True)
        self.fused = fused_name(copy.opt)
        copy.add_cb(self.clock)

    def train(self, first: int, batches: Iterable, device: torch.device, is_over: Callable[[float], bool]) -> None:
        "Train on `batches`, the steps from `first` on, timed, until `is_over` after so many seconds."
        copy, losses, n, cuda = self.learn, [], 0, device.type == 'cuda'
        set_random_state(self.random_state)
        wait_for(device)
        if cuda:
            outside = torch.cuda.memory_allocated(device) - _bytes_of(copy)
            torch.cuda.reset_peak_memory_stats(device)
        faults, start = page_faults(), time.perf_counter()
        for i, b in enumerate(batches, first):
            copy.one_batch(i, b)
            if not len(copy.yb):
                raise ValueError("The learner's training batches have no targets, so there is no loss to compare. Does "
                                 "`learn.dls.n_inp` leave one?")
            losses.append(copy.loss.detach())
            n += len(tensors(b, floating=False)[0])
            if is_over(time.perf_counter() - start): break
        wait_for(device)
        seconds = time.perf_counter() - start
        if cuda: self.peak = np.nanmax([self.peak, torch.cuda.max_memory_allocated(device) - outside])
        if self.speeds: self.faults += page_faults() - faults
        self.clock.read(warm=self.speeds != [], seconds=seconds, n=len(losses))
        self.seconds += seconds
        self.speeds.append(n / seconds)
        self.losses += map(float, losses)
        self.random_state = random_state(everything=True)

    def end(self, error: Exception | None = None) -> None:
        "End the copy's fit and let it go; an `error` is noted as the reason why this precision does not run."
        if self.learn is None: return
        if error is None:
            for event in ('after_train', 'after_fit'): self.learn(event)
            if cb := precision_callback(self.learn):
                self.scale, self.skipped = cb.scale or math.nan, self.skipped + cb.n_skipped
        else:
            self.support, self.skipped = 'failed', 0
            self.note = 'it ran out of memory' if isinstance(error, torch.OutOfMemoryError) else _reason_of(error)
            self.learn.model = self.learn.opt = None             # their memory is for the others
        self.learn = None

    def row(self, n_last: int, n_samples: int) -> dict[str, Any]:
        "Return its row of the table, but for what all rows share."
        n, base, warm = len(self.losses), self.measure, self.speeds[1:] or self.speeds     # the first step warms up
        ratios = [a / b for a, b in zip(warm, base.speeds[1:] or base.speeds)] or [math.nan]
        low, mid, high = np.percentile(ratios, (25, 50, 75))
        last = min(n_last, n, len(base.losses))
        difference = mean_of_last(self.losses[:len(base.losses)], last) - mean_of_last(base.losses[:n], last)
        return {'mode': self.name, 'support': self.support, 'measure': base.name, 'steps': n, 'turns': len(self.speeds),
                'samples': self.samples or n_samples, 'samples/s': np.median(warm) if warm else math.nan,
                'speed-up': mid, 'speed-up q1': low, 'speed-up q3': high, 'peak memory': self.peak,
                'loss': mean_of_last(self.losses, n_last), 'loss difference': difference,
                'skipped': self.skipped, 'final scale': self.scale, **(self.clock.per_step() if self.clock else {}),
                'page faults': self.faults / max(1, n), 'note': self.note}


def mean_of_last(losses: Sequence[float], n: int) -> float: # nan if there are none
    "Return the mean of the last `n` losses."
    return float(np.mean(losses[-n:])) if n and losses else math.nan


def wait_for(device: torch.device) -> None:
    "Let the device finish, so that the clock sees its work."
    if device.type == 'xla':
        import torch_xla.core.xla_model as xm
        xm.mark_step()
        xm.wait_device_ops()
    elif device.type != 'cpu': torch.accelerator.synchronize(device)


def _bytes_of(learn: Learner) -> int:
    "Return what parameters, gradients, buffers and the optimizer's state take."
    params = list(learn.model.parameters())
    held = tensors([*params, *(p.grad for p in params), *learn.model.buffers(), *learn.opt.state.values()], False)
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in held}.values())


def _reason_of(error: Exception) -> str:
    "Return what went wrong, without the event that fastai names before it."
    text = re.sub(r'(Exception occur+ed in `[^`]*` when calling event `[^`]*`:\s*)+', '', str(error))
    line = first_line(ValueError(text), 400)
    return line if isinstance(error, ValueError) else f'{type(error).__name__}: {line}'
