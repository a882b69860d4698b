"Diagnosis of training that fails in 16 bits: the current batch is run again on a copy to find the cause."
from dataclasses import dataclass
from functools import partial

import torch
from fastai.learner import Learner

from ..precisions import Precision, fastest_native
from ..training.loop import precision_callback
from .candidates import advised, call
from .copies import lost_weights, several_processes
from .judge import Judge, not_finite_data, wrong_in_fp32
from .random_states import RandomState
from .trace import trace
from .verdict import named

_BAD = 'Check the data: no precision can train on these values'
ODD = 'a gradient is not finite, and the loss scale is not the cause'         # said only if the rerun proves it


@dataclass
class Alarm:
    "A sign that training failed, and the step it was seen in."
    what: str
    kind: type[Precision]
    scale: float                             # the loss scale
    step: int                                # training batch of the fit, from 1
    batch: tuple                             # its inputs and targets
    random_state: RandomState                # before it
    remedy: tuple = ()                       # what helps, if anything does: precision, modules in fp32, loss scale

    @property
    def happened(self) -> str:
        "The first line of the message."
        scale = f', loss scale {self.scale:,.9g}' if self.kind.scales_loss else ''
        return f'{self.kind.name} training failed: {self.what} (batch {self.step:,}{scale}).'


def diagnose(
    learn: Learner, # With a precision callback, in the middle of a batch
    alarm: Alarm,
    divergence: str, # How far weights and loss have grown, if it is far
) -> str: # Two lines: what to try, and where it began; '' if a step was skipped because the loss scale is too large
    """Find where finite numbers end, and what helps. The learner is not changed.

    A compiled model is run uncompiled. With several processes nothing is run again: loss functions gather and models
    synchronize, and a process that ran alone would leave the others waiting.
    """
    if alarm.what == ODD and (divergence or several_processes()): return ''
    try: cause, remedy = _cause(learn, alarm, divergence)
    except Exception as e:
        return '' if alarm.what == ODD else f'The batch could not be run again, {type(e).__name__}: {e}'
    return remedy and '\n'.join(f'{line[0].upper()}{line[1:]}.' for line in (remedy, cause))


def _cause(learn, alarm, divergence):
    if divergence:
        rate = max(h['lr'] for h in learn.opt.hypers)
        return (f'the run diverges: {divergence}',
                f'Lower the learning rate first, {rate:g} at this step: more precision would not help. '
                '`learn.lr_find()` suggests one; `cbs=GradientClip(1.)` limits what one batch can do')
    lost, bad = lost_weights(learn.model), not_finite_data(alarm.batch)
    if lost or several_processes():
        if bad: return bad, f'{_BAD}, unless the loss ignores them'
        if lost: return (f'{lost}, so the batch cannot be run again',
                         'Load weights that are finite, or build the model again, then call `learn.precision_report()`')
        return ('in distributed runs the batch is not run again',
                'Call `learn.precision_report()` in one process, before the model is distributed')
    where, remedy = _run_again(learn, alarm, bad)
    return f'Re-running that batch with the same random numbers: {where}', remedy


def _run_again(
    learn,
    alarm,
    bad, # What is not finite in the batch itself
):
    "Run the batch forward and backward, in fp32 and in the precision; return where it began, and what to try, if any."
    cb, kind = precision_callback(learn), alarm.kind
    again = partial(trace, learn, [alarm.batch], state=alarm.random_state)
    fp32 = again()
    if wrong := wrong_in_fp32(fp32, alarm.batch):
        return wrong, _BAD if bad else 'Look at the learning rate, the loss function and the data'
    if not kind.dtype:                                           # TF32 on the device, which nothing simulates
        alarm.remedy = Precision, (), None
        return 'loss and gradients are finite in fp32', 'Use another precision: `learn.to_fp32()`'
    largest = max(s.grad for s in fp32.seen.values()) * alarm.scale
    if alarm.what == ODD and largest > torch.finfo(kind.dtype).max: return '', ''
    judge = Judge(learn, kind, partial(again, kind, fp32=fp32), alarm.scale)
    verdict = judge.verdict()
    if not verdict.call:
        failed = [kind.name, *(fix.precision for fix in cb.fixes)]
        alarm.remedy = fastest_native(cb.fit.device, failed), (), None
        other = call(learn, advised(learn, *alarm.remedy))
        return verdict.reason, f'Use another precision: `{other}`'
    if alarm.what == ODD and not verdict.modules: return '', ''
    if not verdict.modules and judge.scale == alarm.scale:
        return (f'this time loss and gradients are finite in {kind.name}',
                'Call `learn.precision_report()`: it also names modules close to overflow')
    alarm.remedy = kind, verdict.modules, verdict.init_scale
    if verdict.modules:
        return verdict.reason, f"Keep {', '.join(map(named, verdict.modules))} in fp32: `{verdict.call}`"
    return (f'the loss scale of {alarm.scale:,.9g} is too large: gradients overflow in {kind.name}, and at '
            f'{judge.scale:,.9g} they do not'), f'Start lower: `{verdict.call}`'
