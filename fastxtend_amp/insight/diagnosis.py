"Re-runs a failed batch on a copy, to find the cause, and makes the change that helps, with `on_overflow='fix'`."
from typing import NamedTuple

from fastai.learner import Learner

from ..learners import several_processes
from ..precisions import Precision, fastest_native
from ..training.callback import MixedPrecision
from ..training.current import precision_callback
from ..training.fit import check_parallel
from .choices import Choice
from .display import named
from .evidence import not_finite_data
from .judge import Judge
from .random_states import RandomState
from .requirements import weights_not_finite
from .sample import Sample

_BAD = 'Check the data: no precision can train on these values'


class Alarm(NamedTuple):
    "A sign that training failed, and the step it was seen in."
    what: str
    cls: type[Precision]
    scale: float                             # the loss scale
    step: int                                # training batch of the fit, from 1
    batch: tuple                             # its inputs and targets
    random_state: RandomState                # before it
    is_unexplained: bool = False             # whether it is a skipped step that the loss scale may not explain

    @property
    def happened(self) -> str:
        "The first line of the message."
        scale = f', loss scale {self.scale:,.9g}' if self.cls.scales_loss else ''
        return f'{self.cls.name} training failed: {self.what} (batch {self.step:,}{scale}).'


class Diagnosis(NamedTuple):
    "The cause of a failure, and what to try."
    to_try: str
    cause: str
    next: Choice | None = None               # what 'fix' changes to; None if nothing helps
    init_scale: float | None = None          # None: the present one

    def __str__(self): return '\n'.join(f'{line[0].upper()}{line[1:]}.' for line in (self.to_try, self.cause))


def diagnose(
    learn: Learner, # With a precision callback, in the middle of a batch
    alarm: Alarm,
    divergence: str, # How far weights and loss have grown, if it is far
) -> Diagnosis | None: # None if a step was skipped because the loss scale is too large
    """Find where finite numbers end, and what helps. The learner is not changed.

    A compiled model is run uncompiled. With several processes nothing is run again: loss functions gather and models
    synchronize, and a process that ran alone would leave the others waiting.
    """
    if alarm.is_unexplained and (divergence or several_processes()): return None
    if divergence:
        rate = max(h['lr'] for h in learn.opt.hypers)
        return Diagnosis(f'Lower the learning rate first, {rate:g} at this step: more precision would not help. '
                         '`learn.lr_find()` suggests one; `cbs=GradientClip(1.)` limits what one batch can do',
                         f'the run diverges: {divergence}')
    bad_weights, bad_data = weights_not_finite(learn.model), not_finite_data(alarm.batch)
    if bad_data and (bad_weights or several_processes()):
        return Diagnosis(f'{_BAD}, unless the loss ignores them', bad_data)
    if bad_weights:
        return Diagnosis('Load weights that are finite, or build the model again, then call '
                         '`learn.precision_report()`', f'{bad_weights}, so the batch cannot be run again')
    if several_processes():
        return Diagnosis('Call `learn.precision_report()` in one process, before the model is distributed',
                         'in distributed runs the batch is not run again')
    try: found = _rerun(learn, alarm, bad_data)
    except Exception as e:
        if alarm.is_unexplained: return None
        return Diagnosis('The batch could not be run again', f'{type(e).__name__}: {str(e).rstrip(".")}')
    return found and found._replace(cause=f"Re-running that batch, with PyTorch's random state restored: {found.cause}")


def _rerun(
    learn,
    alarm,
    bad_data, # What is not finite in the batch itself
):
    "Run the batch forward and backward, in fp32 and in the precision."
    cb, cls = precision_callback(learn), alarm.cls
    sample = Sample(learn, [alarm.batch], alarm.random_state)
    if sample.fault:
        return Diagnosis(_BAD if bad_data else 'Check the learning rate, the loss function and the data', sample.fault)
    if not cls.dtype:                                            # TF32 on the device, which nothing simulates
        return Diagnosis('Use another precision: `learn.to_fp32()`', 'loss and gradients are finite in fp32',
                         Choice(Precision()))
    judge = Judge(cls, sample, alarm.scale)
    verdict = judge.verdict()
    if not verdict.next:
        failed = [cls.name, *(made.precision for made in cb.fixes)]
        other = Choice.for_learner(learn, fastest_native(cb.fit.device, failed))
        return Diagnosis(f'Use another precision: `{other}`', verdict.reason, other)
    if verdict.modules:
        names = ', '.join(map(named, verdict.modules))
        return Diagnosis(f'Keep {names} in fp32: `{verdict.call}`', verdict.reason, verdict.next, verdict.init_scale)
    if alarm.is_unexplained: return None
    if judge.scale == alarm.scale or alarm.what.startswith('the loss is'):       # no scale makes it NaN or inf
        return Diagnosis('Call `learn.precision_report()`: it also names modules close to overflow',
                         f'this time the failure does not occur in {cls.name}')
    return Diagnosis(f'Start lower: `{verdict.call}`',
                     f'the loss scale of {alarm.scale:,.9g} is too large: gradients overflow in {cls.name}, and at '
                     f'{judge.scale:,.9g} they do not', verdict.next, verdict.init_scale)


# -- on_overflow='fix'

class Fix(NamedTuple):
    "A change that `on_overflow='fix'` made in a fit."
    step: int # Training batch of the fit, from 1; the change applies from the next one on
    precision: str # The one that failed
    call: str # Starts a training with the change


def apply_fix(
    cb: MixedPrecision,
    alarm: Alarm,
    diagnosis: Diagnosis, # Of the alarm
) -> bool: # False if nothing helps, if the user's own change waits already, or with nn.DataParallel
    "Make the change when the batch ends, in the same callback: history, optimizer and loss scale continue."
    learn, following = cb.learn, diagnosis.next
    if not following or cb.waiting: return False
    new = following.precision
    try: check_parallel(new, learn.model)
    except ValueError: return False                              # only a warning

    def switch():
        "Close the fit, which the next batch opens again; drop the gradients and the mean loss, which may be NaN."
        cb.close(failed=True)
        learn.opt.zero_grad()
        if recorder := vars(learn).get('recorder'): recorder.smooth_loss.reset()
        if not diagnosis.init_scale: new.load_state_dict(cb.state_dict())
        cb.precision = new

    cb.at_batch_end(switch)
    cb.fixes.append(Fix(alarm.step, alarm.cls.name, str(following)))
    print(f'{alarm.happened}\n{diagnosis.cause}.\nThe next batches train with `{following}`.')
    return True
