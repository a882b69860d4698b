"The watcher of a fit: it reports why training failed, as a warning or an error."
import math
from contextlib import nullcontext
from statistics import median_low
from typing import Any

from fastai.learner import Learner
from torch import nn

from ..compat import without_subclasses
from ..learners import newest_loss, several_processes
from ..messages import warn_user
from ..precisions import Precision
from ..training.callback import Watcher
from .diagnosis import Alarm, apply_fix, diagnose
from .random_states import random_state, torch_generators
from .values import readable, readable_weights

_FAR = 100.     # times the usual loss, or the weights' norm at the start, from which a run diverges
_MOVED = 1.1    # times the weights' norm at the start, from which they may explain such a loss
_MANY = 32      # losses; by then a run that diverges at the start has failed
_UNEXPLAINED = 'a gradient is not finite, and the loss scale is not the cause'        # said only if the rerun proves it


class Observations:
    "Observations of one fit, until a failure is reported."
    weights = None                                               # their norm at the start
    last_loss = math.nan                                         # the last finite one
    random_state = ()                                            # before the batch under way
    batch: Any = None                                            # the newest: number, tensors, random state
    scale: Any = 1.                                              # its loss scale
    said_validation = False                                      # that one is not finite
    n_unexplained = 0                                            # skipped steps that the loss scale may not explain

    def __init__(self, on_cpu):
        self.on_cpu = on_cpu                                     # where reading a number waits for nothing
        self.generators = torch_generators()

    def divergence(self, learn: Learner) -> str:
        """Describe how far weights and loss have grown in the fit, if either has grown 100-fold; '' otherwise.

        The usual loss is the first, which may be near 0 by chance, or the median of many; fastai's Recorder has
        smoothed them. This waits for the device.
        """
        if self.weights is None: return ''
        recorder = vars(learn).get('recorder')
        losses = [abs(float(loss)) for loss in getattr(recorder, 'losses', ())]
        losses = [*filter(math.isfinite, losses)] or [math.inf]
        usual = median_low(losses) if len(losses) > _MANY else losses[0]
        last, weights = self.last_loss, float(_norm(learn.model) / self.weights)
        far = 0 < _FAR * usual < last and not weights < _MOVED
        if not (far or _FAR < weights < math.inf): return ''
        return (f'in this fit, the loss went from {usual:.3g} to {last:.3g}, and the norm of the weights grew '
                f'{weights:.3g}-fold')


class FailureWatcher(Watcher):
    """Detects failed training, and reports the cause, once per fit.

    While all goes well nothing here waits for an accelerator: it reads the losses that fastai's Recorder has fetched,
    and the skips that the host knows of.

    With several processes each looks at its own loss; an exception in one ends the job under `torchrun`.
    """
    @property
    def observations(self):
        "The `Observations` of the open fit, kept there; None if nothing is to be reported, or something has been."
        return self.cb.fit.observations if self.cb.fit and self.cb.on_overflow != 'ignore' else None

    def after_open(self):
        "Begin the observations of a fit."
        fit = self.cb.fit
        if type(fit.precision) is not Precision: fit.observations = Observations(fit.device.type == 'cpu')

    def before_train(self):
        "Warn, once for a learner, that 'fix' only warns in distributed fits."
        if self.cb.on_overflow == 'fix' and several_processes():
            warn_user("on_overflow='fix' only warns in distributed runs: it looks for the cause in a single process.",
                      self.cb.learn)

    def before_batch(self):
        "Keep the random state, and once the size of the weights."
        observed, learn = self.observations, self.cb.learn
        if not observed or not learn.training: return
        observed.random_state = random_state(observed.generators)
        # XLA would compile the norm into the first batch.
        if observed.weights is None and self.cb.fit.device.type != 'xla': observed.weights = _norm(learn.model)

    def after_loss(self):
        "Check the loss before its backward pass; on an accelerator that of the batch before."
        observed, learn = self.observations, self.cb.learn
        if not observed or not learn.training: return
        self._check_recorded()
        observed.batch = getattr(learn, 'train_iter', 0) + 1, (learn.xb, learn.yb), observed.random_state
        if self.cb.fit.scaling: observed.scale = self.cb.history.next_scale
        if not observed.on_cpu or (loss := newest_loss(learn)) is None: return
        with without_subclasses():
            value = (loss.detach().mean() if loss.dim() else loss).item()
        self._check_loss(observed, value)

    def after_step(self):
        "Count skipped steps in a row; look at the 1st, 2nd, 4th, ... that the loss scale may not explain."
        observed, history = self.observations, self.cb.history
        if not (observed and observed.batch and (scaling := self.cb.fit.scaling)): return
        # What the device has decided is known once it has been read.
        if history.unread and not scaling.step.host_skips: return
        if not (n := history.skips_in_a_row()): return
        scale = history.scales[-1]
        if n >= self.cb.max_skips: return self._alarm(f'{n:,} steps in a row were skipped')
        # A scale of 1, or below that of a good step of this fit, has not caused it.
        if scale > max(1, history.highest_good * scaling.scaler.get_backoff_factor()): return
        observed.n_unexplained += 1
        if observed.n_unexplained.bit_count() == 1: self._alarm(_UNEXPLAINED, is_unexplained=True)

    def after_train(self):
        "Look at the skips that the device has decided, and at its losses: fastai's Recorder synchronizes here anyway."
        scaling = self.observations and self.cb.fit.scaling
        if scaling and not scaling.step.host_skips:
            self.cb.history.read()
            self.after_step()
        self._check_recorded()

    def before_close(self):
        "Warn if most of the fit's steps were skipped, unless a failure has been reported."
        if not (self.observations and (scaling := self.cb.fit.scaling)): return
        history, scaler = self.cb.history, scaling.scaler
        skips = history.read().skips[history.fit_start:]
        n, skipped = len(skips), sum(skips)
        if 2 * skipped <= n: return
        text = (f'{skipped:,} of the {n:,} optimizer steps of this fit were skipped: gradients were not finite.\n'
                '`learn.precision_report()` names the modules that overflow.')
        if scaler.get_backoff_factor() < 1 and 'scaler' not in self.cb.precision.changed:
            advice = f'pass `init_scale={scaler.get_scale():.12g}`.'
            if skipped == n: advice = 'go on: each skipped step lowers the loss scale.'
            text += f' If it finds none, {advice}'
        warn_user(text)

    def after_validate(self):
        "Say that a loss or predictions of a validation are NaN or inf; fastai has them on the CPU already."
        observed, learn = self.observations, self.cb.learn
        if not observed or observed.said_validation: return
        recorder, gather = map(vars(learn).get, ('recorder', 'gather_preds'))
        results = readable((recorder and vars(recorder.loss).get('total'), gather and gather.preds))
        if all((t < math.inf).all() for t in results): return
        advice = ("Evaluate in fp32: `with learn.precision_as('fp32')`. If that is finite, "
                  '`learn.precision_report(dl=learn.dls.valid)` names modules to keep in fp32.')
        if far := observed.divergence(learn): advice = f'The run diverges: {far}. Lower the learning rate first.'
        if self.cb.on_overflow == 'fix': advice += " `on_overflow='fix'` mends only training."
        observed.said_validation = True
        self._warn_or_raise(f'{self.cb.fit.precision.name}: a loss or a prediction in validation is NaN or inf.\n'
                            f'{advice}')

    def _check_recorded(self):
        "Look at the loss that the Recorder has read, off the CPU; in distributed runs it is the mean of all processes."
        observed = self.observations
        if not observed or observed.on_cpu or not observed.batch: return
        losses = getattr(vars(self.cb.learn).get('recorder'), 'losses', ())
        if losses: self._check_loss(observed, float(losses[-1]))

    def _check_loss(self, observed, loss):
        if not math.isfinite(loss): return self._alarm(f'the loss is {loss}')
        observed.last_loss = loss
        if 'lr_finder' in vars(self.cb.learn): self.cb.fit.observations = None   # it diverges on purpose

    def _alarm(self, what, is_unexplained=False):
        "Say what happened, what to try and where it began: once a fit."
        learn, observed, cb = self.cb.learn, self.observations, self.cb
        alarm = Alarm(what, type(cb.precision), float(observed.scale), *observed.batch, is_unexplained)
        with cb.fit.scaling.buffers.repaired() if cb.fit.scaling else nullcontext():
            diagnosis = diagnose(learn, alarm, observed.divergence(learn))
        if not diagnosis: return                                 # the loss scale explains it
        cb.fit.observations = None                               # first: a fix may close the fit
        if cb.on_overflow == 'fix' and apply_fix(cb, alarm, diagnosis): return
        self._warn_or_raise(f'{alarm.happened}\n{diagnosis}')

    def _warn_or_raise(self, message):
        if self.cb.on_overflow == 'raise': raise FloatingPointError(message)
        warn_user(message)


def _norm(model):
    "Return the norm of this process's trainable weights, on their device."
    return nn.utils.get_total_norm(p for p in readable_weights(model).values() if p.requires_grad)
