"Diagnosis of training that goes wrong in low precision: the batch under way is run again on a copy to find the cause."
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from fastai.learner import Learner
from torch import nn

from ..callback import precision_callback
from ..common import RandomState, several_processes
from ..fp32_modules import unwrapped
from ..mode import AMPMode, model_device, training_device
from .advice import fastest_mode, precision_call
from .trace import Trace, trace
from .values import not_finite_data, tensors
from .verdict import Judge, lost_weights, named

__all__ = ['Alarm', 'Growth', 'diagnose']

_LOOK_CLOSER = '`learn.precision_report()` looks closer'
# Times the norm of the weights and the loss at the start, from which on a run counts as diverging.
_FAR, _BOTH, _MOVED = 100., 10., 1.01   # one of them alone; both; below this the weights hardly grew


@dataclass
class Growth:
    "The change of weights and loss since the start of the fit; nan for what is not known."
    weights: float  # times their norm at the start
    first_loss: float
    last_loss: float # the last one that was finite

    @property
    def diverges(self) -> bool:
        """True if the loss or the weights have grown a hundredfold, or both of them tenfold.

        A loss that grew while the weights hardly changed was small at the start by chance.
        """
        loss = abs(self.last_loss) / abs(self.first_loss) if self.first_loss else math.nan
        return (self.weights > _FAR or (loss > _FAR and not self.weights < _MOVED)
                or (self.weights > _BOTH and loss > _BOTH))

    def __str__(self) -> str:
        def short(x): return f'{x:,.0f}' if 100 <= abs(x) < 1e7 else f'{x:.3g}'
        parts = []
        if self.weights > 1.5:
            parts.append(f'the weights are {short(self.weights)} times as large as at the start of the fit')
        if abs(self.last_loss) > abs(self.first_loss):
            parts.append(f'the loss went from {short(self.first_loss)} to {short(self.last_loss)}')
        return ' and '.join(parts)


@dataclass
class Alarm:
    "A sign that training goes wrong, and the step it was seen in."
    what: str
    mode: AMPMode
    scale: float                             # the loss scale
    step: int                                # training batch of the fit, from 1
    xb: Sequence                             # inputs and targets of that batch, or of a later one
    yb: Sequence
    random_state: RandomState | None = None  # before that batch; None if it is a later one
    growth: Growth | None = None

    @property
    def happened(self) -> str:
        "The first line of the message."
        scale = f', loss scale {self.scale:,.9g}' if self.mode.needs_loss_scaling else ''
        return f'{self.mode.value} training goes wrong: {self.what} (batch {self.step:,}{scale}).'

    @property
    def diverges(self) -> bool: return self.growth is not None and self.growth.diverges


def diagnose(
    learn: Learner, # With a precision callback, in the middle of a batch
    alarm: Alarm,
) -> str: # Three lines: what happened, where it began, what to try
    """Find where finite numbers end, and what helps; the learner stays as it was.

    With several processes nothing is run again: loss functions gather and models synchronize, and a process that ran
    alone would leave the others waiting.
    """
    where, remedy = _cause(learn, alarm)
    return f'{alarm.happened}\n{where[0].upper()}{where[1:]}.\n{remedy}.'


def _cause(learn: Learner, alarm: Alarm) -> tuple[str, str]:
    model = unwrapped(learn.model)
    if bad := not_finite_data(alarm.xb, alarm.yb): return bad, 'Look at the data; no precision can train on it'
    if several_processes(): return _from_one_rank(model, alarm)
    if lost := lost_weights(model): return _lost(learn, lost, alarm)
    where, remedy = _Rerun(learn, model, alarm).cause()
    again = 'That batch, run again with the same random draws' if alarm.random_state is not None else \
            'The batch under way, not the one it began with, run again'
    return f'{again}: {where}', remedy


def _lost(learn, lost, alarm):
    if alarm.diverges: return f'{lost} ({alarm.growth})', _lower_rate(learn)
    if alarm.step == 1:
        return f'{lost}, and were so before training began', 'Build the model anew, or load other weights'
    again = 'Load the last checkpoint, then call `learn.precision_report()`'
    return f'{lost}, so the batch cannot be run again as it was', again


class _Rerun:
    "The batch under way, forward and backward, in fp32 and in low precision."
    def __init__(self, learn: Learner, model: nn.Module, alarm: Alarm):
        self.learn, self.alarm, self.mode = learn, alarm, alarm.mode
        self.kept = cb.fp32_module_names if (cb := precision_callback(learn)) is not None else []
        again = partial(trace, learn, [(alarm.xb, alarm.yb)], in_fit=True, random_state=alarm.random_state)
        self.fp32 = again()
        self.traces: dict[tuple, Trace] = {}                     # the first is asked for twice
        def run(keep, scale):
            key = *keep, scale
            if key not in self.traces: self.traces[key] = again(self.mode, keep, scale, reference=self.fp32)
            return self.traces[key]
        largest = max((float(t.abs().max()) for t in tensors(alarm.xb) if t.numel()), default=0.)
        self.judge = Judge(self.mode, model, model_device(model, training_device(learn)), run, self.fp32, alarm.scale,
                         partial(precision_call, learn, self.mode), largest_input=largest, kept=self.kept)

    def cause(self) -> tuple[str, str]:
        "Return where it began, and what to try."
        mode, alarm = self.mode.value, self.alarm
        if wrong := self.judge.wrong_in_fp32():
            if not alarm.diverges: return wrong, 'Look at the learning rate, the loss function and the data'
            return f'{wrong}, and the run diverges: {alarm.growth}', _lower_rate(self.learn)
        low = self.judge.run(self.kept, alarm.scale)
        names, forward = low.failures(), True
        if not names: names, forward = low.backward_failures(), False
        if alarm.diverges:
            first = f'; numbers first stop being finite in {self._named(names[0])}, a consequence' if names else ''
            return f'the run diverges: {alarm.growth}{first}', _lower_rate(self.learn)
        if low.loss_is_finite and low.grads_are_finite:
            return f'this batch is finite in {mode}, forward and backward', _LOOK_CLOSER
        verdict = self.judge.verdict()
        if verdict.call and not verdict.modules and verdict.scales:
            where = (f'the loss scale of {alarm.scale:,.9g} is too large: gradients overflow in {mode}, and at '
                     f'{verdict.scales[1]:,.9g} they do not')
            return where, f'Start lower: `{verdict.call}`'
        if not names: where = f'the loss or a gradient is not finite in {mode}, and finite in fp32'
        else: where = self._story(names[0], forward)
        if not verdict.call:
            other = precision_call(self.learn, fastest_mode(self.judge.device, [self.mode]))
            return where, f'{verdict.sentence[:-1]}; or take another precision: `{other}`'
        what = 'it' if verdict.modules == names[:1] else ', '.join(map(self._named, verdict.modules))
        if names and names[0] not in verdict.modules: what += ', which comes before,'
        return where, f'Keep {what} in fp32: `{verdict.call}`'

    def _story(self, name, forward) -> str:
        seen, limit = self.fp32.seen[name], torch.finfo(self.mode.dtype).max
        if forward:
            largest, what = seen.largest, 'values inside it reach'
            story = f'numbers stop being finite in {self._named(name)}'
        else:
            scale = self.alarm.scale
            largest, what = seen.grads.largest * scale, f'its gradients, times the loss scale {scale:,.9g}, reach'
            story = ('the forward pass is finite; the gradients stop being so in the backward pass of '
                     f'{self._named(name)}')
        if largest > limit: story += f': {what} {largest:,.4g} in fp32; {self.mode.value} ends at {limit:,.5g}'
        return story

    def _named(self, name): return named(name, {n: s.type for n, s in self.fp32.seen.items()})


def _from_one_rank(model: nn.Module, alarm: Alarm) -> tuple[str, str]:
    "Return what this process knows without the others."
    params = dict(model.named_parameters())
    def some(values: Iterable, what: str) -> str:
        lost = [n for n, t in zip(params, values) if t is not None and not bool(_local(t).isfinite().all())]
        return f'{len(lost)} of {len(params)} {what}' + (f", such as '{lost[0]}'," if lost else '')
    found = f"{some(params.values(), 'parameters')} and {some([p.grad for p in params.values()], 'gradients')}"
    where = f'on rank {torch.distributed.get_rank()} {found} are not finite'
    if alarm.diverges: return f'{where}; the run diverges: {alarm.growth}', 'Lower the learning rate first'
    return where, ('With several processes the batch is not run again. Call `learn.precision_report()` in one process, '
                   'before the model is distributed')


def _local(t): return t.detach().to_local() if hasattr(t, 'to_local') else t.detach()


def _lower_rate(learn) -> str:
    rates = [h['lr'] for h in learn.opt.hypers] if learn.opt is not None else []
    now = f', {max(rates):g} at this step' if rates else ''
    return (f'Lower the learning rate first{now}: more precision would not help. `learn.lr_find()` suggests one; '
            '`cbs=GradientClip(1.)` limits what one batch can do')
