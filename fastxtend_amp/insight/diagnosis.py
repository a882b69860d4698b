"Diagnosis of training that goes wrong in low precision: the batch at hand is run again to find where, and what helps."
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from fastai.learner import Learner
from torch import nn

from ..callback import precision_callback
from ..common import RandomState, set_random_state
from ..fp32_modules import ROOT, kept_in_fp32, qualified_names, unwrapped
from ..mode import AMPMode
from .advice import precision_call
from .growth import Growth
from .restore import modes_kept, run_undone
from .run import Task, after_pred
from .samples import not_finite_data
from .tracer import LOSS, Tracer
from .verdicts import ROOT_CODE

__all__ = ['Alarm', 'Diagnosis', 'diagnose']

_TRIES = 4    # modules that are kept in fp32 together to see whether that is enough
_MARGIN = 16  # how far the loss scale that is advised lies below the one that was tried

_LOOK_CLOSER = '`learn.precision_report()` looks closer'


@dataclass
class Alarm:
    "What was noticed, in which step."
    what: str
    mode: AMPMode
    scale: float                             # the loss scale
    step: int                                # training batch of the fit, from 1
    random_state: RandomState | None = None  # before that batch; None if the batch at hand is a later one
    growth: Growth | None = None

    @property
    def happened(self) -> str:
        "The first line of the message."
        scale = f', loss scale {self.scale:,.9g}' if self.mode.needs_loss_scaling else ''
        return f'{self.mode.value} training goes wrong: {self.what} (batch {self.step:,}{scale}).'


@dataclass
class Diagnosis:
    "What was found."
    where: str # Where it began
    remedy: str # What to try
    was_rerun: bool = False # Whether the batch was run again to find it

    def message(self, alarm: Alarm) -> str: # Three lines
        "What happened, where it began, what to try."
        where = self.where
        if self.was_rerun:
            batch = 'That batch, run again with the same random draws' if alarm.random_state is not None else \
                    'The batch at hand, not the one it began with, run again'
            where = f'{batch}: {where}'
        else: where = where[0].upper() + where[1:]
        return f'{alarm.happened}\n{where}.\n{self.remedy}.'


@modes_kept
def diagnose(
    learn: Learner, # With a precision callback, possibly in the middle of a fit
    alarm: Alarm, # What it noticed
) -> Diagnosis:
    """Find where finite numbers end; the learner stays as it was.

    With several processes nothing is run again: loss functions gather and models synchronize, and a process that ran
    alone would leave the others waiting.
    """
    from .watch import several_processes
    model = unwrapped(learn.model)
    if bad := not_finite_data(learn.xb, learn.yb):
        return Diagnosis(bad, 'Look at the data; no precision can train on it')
    if several_processes(): return _from_one_rank(model, alarm)
    lost = _not_finite(dict(model.named_parameters()))
    growth, n = alarm.growth, len(list(model.parameters()))
    if lost:
        grown = f' ({growth})' if growth is not None and growth.diverges else ''
        remedy = _lower_rate(learn) if grown else 'Load the last checkpoint, then call `learn.precision_report()`'
        where = (f"{len(lost)} of {n} weight tensors are NaN or inf by now, such as '{lost[0]}', so "
                 f'the batch cannot be run again as it was{grown}')
        return Diagnosis(where, remedy)
    return Diagnosis(*_Rerun(learn, model, alarm).cause(), was_rerun=True)


class _Rerun:
    "The batch at hand, forward and backward, in fp32 and in low precision."
    def __init__(self, learn, model, alarm):
        self.learn, self.model, self.alarm = learn, model, alarm
        self.task = Task(model, learn.loss_func, after_pred(learn))

    @contextmanager
    def _as_then(self, keep: Sequence[str] = ()) -> Iterator[None]:
        "Inside, the model may run with the random draws of that batch, and without effect."
        learn, state = self.learn, self.alarm.random_state
        with run_undone(self.model, learn.loss_func), kept_in_fp32(self.model, list(keep)):
            if state is not None: set_random_state(state)
            yield

    def _pass(self, mode: AMPMode | None, reference: Tracer | None, scale: float, keep: Sequence[str] = ()) -> Tracer:
        tracer = Tracer(self.task, mode, reference, scale)
        with self._as_then(keep): tracer.run(self.learn.xb, self.learn.yb)
        return tracer

    def _low(self, keep=()): return self._pass(self.alarm.mode, self.fp32, self.alarm.scale, keep=keep)

    def cause(self) -> tuple[str, str]:
        "Where it began, and what to try."
        mode, growth, self.fp32 = self.alarm.mode, self.alarm.growth, self._pass(None, None, 1.)
        diverges = growth is not None and growth.diverges
        if self.fp32.non_finite_loss or self.fp32.non_finite_grads: return self._in_fp32_too(diverges)
        low = self._low()
        names, where = (low.trouble, 'forward') if low.trouble else (low.trouble_backward, 'backward')
        if diverges and not (names and self._is_frozen_up_to(low, names[0])):
            first = f'; numbers first stop being finite in {self._named(low, names[0])}, a consequence' if names else ''
            return f'the run diverges: {growth}{first}', _lower_rate(self.learn)
        if low.non_finite_loss and where == 'backward':
            return f'the loss is not finite in {mode.value}, and finite in fp32', _LOOK_CLOSER
        in_a_module = [n for n in names if where == 'forward' or n not in (LOSS, ROOT)]
        if low.non_finite_grads and not in_a_module: return self._too_large_a_scale()
        if not in_a_module:
            return f'this batch is finite in {mode.value}, forward and backward', _LOOK_CLOSER
        return self._story(low, in_a_module[0], where)

    def _in_fp32_too(self, diverges):
        fp32, growth = self.fp32, self.alarm.growth
        name = next(iter(fp32.trouble or fp32.trouble_backward), None)
        first = f', first in {self._named(fp32, name)}' if name else ''
        what = 'the loss of this batch is' if fp32.non_finite_loss else 'the gradients of this batch are'
        grown = f', and the run diverges: {growth}' if diverges else ''
        remedy = _lower_rate(self.learn) if diverges else 'Look at the learning rate, the loss function and the data'
        where = f'{what} not finite in fp32 either{first}: this is not a matter of precision{grown}'
        return where, remedy

    def _too_large_a_scale(self):
        "The gradients overflow outside any module's backward pass: the scale is lowered until they do not."
        learn, scale, mode = self.learn, self.alarm.scale, self.alarm.mode
        with self._as_then(): fits = self.task.outcome(learn.xb, learn.yb, mode, scale).scale
        if not fits:
            where = f'the forward pass is finite; gradients are not, with no loss scale from {scale:,.9g} downwards'
            return where, _LOOK_CLOSER
        where = (f'the loss scale of {scale:,.9g} is too large: gradients overflow in {mode.value}, and at {fits:,.9g} '
                 'they do not')
        return where, f'Start lower: `{precision_call(learn, mode, init_scale=fits / _MARGIN)}`'

    def _story(self, low, name, where):
        "The module where it began; what is advised was tried on this batch."
        enough, keep = self._tried(low, where, name)
        limit = torch.finfo(self.alarm.mode.dtype).max
        if name in (LOSS, ROOT) and keep and self.fp32.seen[keep[0]].highest > limit: name = keep[0]
        seen = self.fp32.seen[name]
        if where == 'backward':
            highest = seen.grads.largest * low.scale
            figure = f'its gradients, times the loss scale {low.scale:,.9g}, reach'
            start = 'the forward pass is finite; the gradients stop being so in the backward pass of'
        else:
            highest = seen.highest
            figure = 'values inside it reach' if seen.inside > seen.largest else 'its output reaches'
            start = 'numbers stop being finite in'
        story = f'{start} {self._named(low, name)}'
        if highest > limit:
            story += f': {figure} {highest:,.4g} in fp32; {self.alarm.mode.value} ends at {limit:,.5g}'
        return story, self._keeping(low, name, enough, keep)

    def _keeping(self, low, name, enough, keep) -> str:
        if not keep: return f'Compute it in fp32 there: `with torch.autocast({self._device!r}, enabled=False)`'
        what = 'it' if len(keep) == 1 else 'these'
        if name in (LOSS, ROOT): what = f'{self._named(low, keep[0])}, which comes before,'
        remedy = f'Keep {what} in fp32: `{precision_call(self.learn, self.alarm.mode, keep)}`'
        return remedy if enough else f'{remedy}; that alone was not enough here: {_LOOK_CLOSER}'

    def _tried(self, low, where, name) -> tuple[bool, list[str]]:
        "Which modules to keep in fp32, and whether this batch is finite then."
        if name in (LOSS, ROOT):                                 # a module may have overflowed in a few values before
            for candidate in self._too_large() or self._children():
                if not self._low([candidate]).non_finite_loss: return True, [candidate]
            return False, []
        keep = [name]
        while len(keep) <= _TRIES:
            tracer = self._low(keep)
            # A gradient may be too large for the loss scale alone, which then falls: no reason to keep a module.
            if not (tracer.non_finite_loss or (where == 'backward' and tracer.non_finite_grads)): return True, keep
            found = tracer.trouble or tracer.trouble_backward
            more = next((n for n in found if n not in (*keep, LOSS, ROOT)), None)
            if more is None: break
            keep.append(more)
        return False, [name]

    def _too_large(self) -> list[str]:
        limit = torch.finfo(self.alarm.mode.dtype).max
        large = [n for n, s in self.fp32.seen.items() if s.highest > limit]
        return [n for n in large if n not in (LOSS, ROOT)][:2 * _TRIES]

    def _children(self) -> list[str]:
        "The modules that hand on to the model's own `forward`, the last first."
        return [n for n in reversed(self.fp32.seen) if n not in (LOSS, ROOT) and '.' not in n][:2 * _TRIES]

    def _is_frozen_up_to(self, tracer, name) -> bool:
        "Is nothing trained in the modules called up to `name`, so that too large a step cannot have reached it?"
        if name in (LOSS, ROOT): return False
        modules = dict(qualified_names(self.model))
        called = [n for n in tracer.seen if n in modules and n != ROOT]
        before = called[:called.index(name) + 1]
        return not any(p.requires_grad for n in before for p in modules[n].parameters(recurse=n == name))

    @property
    def _device(self): return precision_callback(self.learn).fit_device.type

    def _named(self, tracer, name):
        if name == LOSS: return 'the loss function'
        return ROOT_CODE if name == ROOT else f"module '{name}' ({tracer.seen[name].type})"


def _from_one_rank(model: nn.Module, alarm: Alarm) -> Diagnosis:
    "What this process can tell without the others."
    rank = torch.distributed.get_rank()
    params = dict(model.named_parameters())
    found = [f'on rank {rank} {_some(_not_finite(params), len(params), "parameters")}',
             _some(_not_finite({n: p.grad for n, p in params.items()}), len(params), 'gradients')]
    grown = f'; the run diverges: {alarm.growth}' if alarm.growth is not None and alarm.growth.diverges else ''
    remedy = ('With several processes the batch is not run again. Call `learn.precision_report()` in one process, '
              'before the model is distributed')
    if grown: remedy = 'Lower the learning rate first'
    return Diagnosis(f"{' and '.join(found)} are not finite{grown}", remedy)


def _some(names, n, what):
    some = ', '.join([*map(repr, names[:3]), *(['...'] if len(names) > 3 else [])])
    return f'{len(names)} of {n} {what}' + (f' ({some})' if names else '')


def _not_finite(named: Mapping[str, torch.Tensor | None]) -> list[str]:
    "The names of the tensors that hold NaN or inf, in this process."
    local = {n: t.to_local() if hasattr(t, 'to_local') else t for n, t in named.items() if t is not None}
    return [n for n, t in local.items() if not bool(t.detach().isfinite().all())]


def _lower_rate(learn) -> str:
    rates = [h['lr'] for h in learn.opt.hypers] if learn.opt is not None else []
    now = f', {max(rates):g} at this step' if rates else ''
    return (f'Lower the learning rate first{now}: more precision would not help. `learn.lr_find()` suggests one; '
            '`cbs=GradientClip(1.)` limits what one batch can do')
