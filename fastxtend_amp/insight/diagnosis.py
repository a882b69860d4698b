"Diagnosis of training that goes wrong in low precision: the batch under way is run again on a copy to find the cause."
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from fastai.learner import Learner
from torch import nn

from ..callback import precision_callback
from ..fp32_modules import unwrapped
from ..mode import AMPMode, model_device, training_device
from .copies import RandomState, several_processes
from .precisions import precision_call
from .trace import Trace, trace
from .values import not_finite_data
from .verdict import Judge, fastest_mode, lost_weights, named

__all__ = ['Alarm', 'Growth', 'diagnose']

_FAR, _MOVED = 100., 1.01  # times the weights' norm or the loss at the start: a run diverges; the weights have moved


@dataclass
class Growth:
    "The change of weights and loss since the start of the fit; nan for what is not known."
    weights: float  # times their norm at the start
    first_loss: float
    last_loss: float # the last one that was finite

    @property
    def diverges(self) -> bool:
        "True if weights or loss have grown a hundredfold; a loss that grew without the weights was small by chance."
        loss = abs(self.last_loss) / abs(self.first_loss) if self.first_loss else math.nan
        return self.weights > _FAR or (loss > _FAR and not self.weights < _MOVED)

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
    return '\n'.join([alarm.happened, *(f'{line[0].upper()}{line[1:]}.' for line in _cause(learn, alarm))])


def _cause(learn: Learner, alarm: Alarm) -> tuple[str, str]:
    model = unwrapped(learn.model)
    if bad := not_finite_data((alarm.xb, alarm.yb)): return bad, 'Look at the data; no precision can train on it'
    if several_processes(): return _from_one_rank(model, alarm)
    if lost := lost_weights(model): return _lost(learn, lost, alarm)
    where, remedy = _run_again(learn, model, alarm)
    again = 'That batch, run again with the same random draws' if alarm.random_state is not None else \
            'The batch under way, not the one it began with, run again'
    return f'{again}: {where}', remedy


def _lost(learn, lost, alarm):
    if alarm.diverges: return f'{lost} ({alarm.growth})', _lower_rate(learn)
    if alarm.step == 1:
        return f'{lost}, and were so before training began', 'Build the model anew, or load other weights'
    again = 'Load the last checkpoint, then call `learn.precision_report()`'
    return f'{lost}, so the batch cannot be run again as it was', again


def _run_again(learn: Learner, model: nn.Module, alarm: Alarm) -> tuple[str, str]:
    "Run the batch forward and backward, in fp32 and in the mode; return where it began, and what to try."
    cb, mode, diverges = precision_callback(learn), alarm.mode, f'the run diverges: {alarm.growth}'
    kept = cb.fp32_module_names if cb is not None else []
    again = partial(trace, learn, [(alarm.xb, alarm.yb)], in_fit=True, random_state=alarm.random_state)
    fp32 = again()
    run = partial(again, mode, reference=fp32)
    judge = Judge(mode, model, model_device(model, training_device(learn)), run, fp32, alarm.scale,
                  partial(precision_call, learn, mode), kept)
    if wrong := judge.wrong_in_fp32():
        if alarm.diverges: return f'{wrong}, and {diverges}', _lower_rate(learn)
        return wrong, 'Look at the learning rate, the loss function and the data'
    low = run(kept, alarm.scale)
    if alarm.diverges: return diverges, _lower_rate(learn)
    if low.loss_is_finite and low.grads_are_finite:
        return f'this batch is finite in {mode.value}, forward and backward', '`learn.precision_report()` looks closer'
    verdict = judge.verdict()
    if verdict.call and not verdict.modules and verdict.scales:
        where = (f'the loss scale of {alarm.scale:,.9g} is too large: gradients overflow in {mode.value}, and at '
                 f'{verdict.scales[1]:,.9g} they do not')
        return where, f'Start lower: `{verdict.call}`'
    name, where = _first_failure(low, fp32, alarm)
    if not verdict.call:
        other = precision_call(learn, fastest_mode(judge.device, [mode]))
        return where, f'{verdict.reason}; or take another precision: `{other}`'
    what = 'it' if verdict.modules == [name] else ', '.join(map(named, verdict.modules))
    if name and name not in verdict.modules: what += ', which comes before,'
    return where, f'Keep {what} in fp32: `{verdict.call}`'


def _first_failure(low: Trace, fp32: Trace, alarm: Alarm) -> tuple[str, str]:
    "Return the first module where finite numbers end, '' if none is known, and a clause on it."
    mode, limit = alarm.mode.value, torch.finfo(alarm.mode.dtype).max
    for name in low.failures():
        seen = fp32.seen.get(name, low.seen[name])
        story = f'numbers stop being finite in {named(name)}'
        return name, story + (f': values inside it reach {seen.largest:,.4g} in fp32; {mode} ends at {limit:,.5g}'
                              if seen.largest > limit else '')
    what = 'a gradient' if low.loss_is_finite else 'the loss'
    return '', f'{what} is not finite in {mode}, and finite in fp32'


def _from_one_rank(model: nn.Module, alarm: Alarm) -> tuple[str, str]:
    "Return what this process knows without the others."
    lost = lost_weights(model) or 'the weights are finite'
    where = f'on rank {torch.distributed.get_rank()} {lost}'
    if alarm.diverges: return f'{where}; the run diverges: {alarm.growth}', 'Lower the learning rate first'
    return where, ('With several processes the batch is not run again. Call `learn.precision_report()` in one process, '
                   'before the model is distributed')


def _lower_rate(learn) -> str:
    rates = [h['lr'] for h in learn.opt.hypers] if learn.opt is not None else []
    now = f', {max(rates):g} at this step' if rates else ''
    return (f'Lower the learning rate first{now}: more precision would not help. `learn.lr_find()` suggests one; '
            '`cbs=GradientClip(1.)` limits what one batch can do')
