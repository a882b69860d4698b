"The watch over a fit: it notices that training failed, and warns or raises with the cause."
import math

import torch
from torch import nn

from ..messages import warn_user
from ..precisions import Precision
from .copies import several_processes
from .diagnosis import ODD, Alarm, diagnose, fix
from .random_states import torch_generators
from .values import readable, readable_weights

_FAR = 100.     # times the loss or the weights' norm at the start, from which a run diverges
_MOST_FIXES = 3  # in one fit
_MOVED = 1.01   # times the weights' norm at the start, from which the weights have moved


class Notes:
    "Notes of the watch on one fit."
    weights = None                                               # their norm at the start
    first_loss = None
    last_loss = math.nan                                         # the last finite one
    random_state = ()                                            # before the batch under way
    batch = None                                                 # the newest: number, tensors, random state
    has_said = False                                             # that a validation is not finite
    n_odd = 0                                                    # skipped steps that the loss scale may not explain

    def __init__(self, on_cpu):
        self.on_cpu = on_cpu                                     # where reading a number waits for nothing
        self.generators = torch_generators()


class Watch:
    """The watch over the fits of a precision callback: it notices that training failed, and says once why.

    While all goes well nothing here waits for an accelerator: it reads the losses that fastai's Recorder has fetched,
    and the skips that the host knows of.

    With several processes each looks at its own loss; an exception in one ends the job under `torchrun`.
    """
    def __init__(self, cb): # A `MixedPrecision`, which calls the events after its own
        self.cb, self.n_fixes = cb, 0                            # in this fit

    def before_fit(self):
        if len(self.cb.parts) < 2: self.n_fixes = 0             # not at the event of a validation inside a fit

    @property
    def notes(self):
        "The `Notes` on the open fit; None if it is not watched, or has been warned of."
        return self.cb.fit and self.cb.fit.watched

    def after_open(self):
        "Watch a fit that has been opened."
        fit = self.cb.fit
        if fit.precision.kind is Precision or self.cb.on_overflow == 'ignore': return
        fit.watched = Notes(fit.device.type == 'cpu')

    def before_train(self):
        "Warn at the start of a distributed fit that 'fix' only warns."
        if self.cb.on_overflow == 'fix' and several_processes() and not self.cb.learn.train_iter:
            warn_user("on_overflow='fix' only warns in distributed runs: it looks for the cause in a single process.")

    def before_batch(self):
        "Note the random state, and once the size of the weights."
        notes, learn = self.cb.fit.watched, self.cb.learn
        if notes is None or not learn.training: return
        notes.random_state = [(set_state, get_state()) for set_state, get_state in notes.generators]
        # XLA would compile the norm into the first batch.
        if notes.weights is None and self.cb.fit.device.type != 'xla': notes.weights = _norm(learn.model)

    def after_loss(self):
        "Check the loss before its backward pass; on an accelerator that of the batch before."
        notes, learn = self.cb.fit.watched, self.cb.learn
        if notes is None or not learn.training: return
        if not notes.on_cpu: self._check_recorded()
        notes.batch = getattr(learn, 'train_iter', 0) + 1, (learn.xb, learn.yb), notes.random_state
        # Without targets fastai leaves the loss of an earlier batch; a learner's own loop may set one all the same.
        loss = vars(learn).get('loss_grad')
        if not isinstance(loss, torch.Tensor): return
        if notes.first_loss is not None and not notes.on_cpu: return
        with torch._C.DisableTorchFunctionSubclass():            # fastai's class would take ten times as long
            if notes.first_loss is None or loss.dim(): loss = loss.detach().mean()
            if notes.first_loss is None: notes.first_loss = loss
            if notes.on_cpu: self._check_loss(notes, loss.item())

    def after_step(self):
        "Count skipped steps in a row; look at the 1st, 2nd, 4th, ... that the loss scale may not explain."
        fit = self.cb.fit
        if not (fit and fit.scaling and fit.scaling.skips_in_a_row and fit.watched and fit.watched.batch): return
        notes, scaling = fit.watched, fit.scaling
        if scaling.skips_in_a_row >= self.cb.max_skips:
            return self._alarm(f'{scaling.skips_in_a_row:,} steps in a row were skipped', skipped=True)
        if not scaling.is_skip_odd: return
        notes.n_odd += 1
        if notes.n_odd.bit_count() == 1: self._alarm(ODD, skipped=True)

    def after_train(self):
        "Look again at the end of an epoch, when the host knows all."
        self.after_step()
        self._check_recorded()

    def after_validate(self):
        "Say that a loss or predictions of a validation are NaN or inf; fastai has them on the CPU already."
        notes, learn = self.notes, self.cb.learn
        recorder, gather = map(vars(learn).get, ('recorder', 'gather_preds'))
        seen = readable((recorder and vars(recorder.loss).get('total'), gather and gather.preds))
        if notes is None or notes.has_said or all((t < math.inf).all() for t in seen): return
        advice = ("Evaluate in fp32: `with learn.precision_as('fp32')`. If that is finite, `on_overflow='fix'` does so "
                  'for each such batch, and names the modules to keep in fp32; unless the model keeps state from batch '
                  'to batch.')
        if far := _divergence(notes, learn.model): advice = f'The run diverges: {far}. Lower the learning rate first.'
        notes.has_said = True
        self._say(f'{self.cb.fit.precision.name}: a loss or a prediction in validation is NaN or inf.\n{advice}')

    def _check_recorded(self):
        "Look at the loss that the Recorder has read, off the CPU; in distributed runs it is the mean of all processes."
        recorder, notes = vars(self.cb.learn).get('recorder'), self.notes
        losses = getattr(recorder, 'losses', [])
        if losses and notes and notes.batch and not notes.on_cpu: self._check_loss(notes, float(losses[-1]))

    def _check_loss(self, notes, loss):
        if not math.isfinite(loss): return self._alarm(f'the loss is {loss}')
        notes.last_loss = loss
        if 'lr_finder' in vars(self.cb.learn): self.cb.fit.watched = None          # it ends where training fails

    def _alarm(self,
        what,
        skipped=False, # Whether it is about the newest step, whose scale is known
    ):
        "Say what happened, what to try and where it began: once a fit."
        learn, notes, cb = self.cb.learn, self.notes, self.cb
        scale = cb.scales[-1] if skipped else learn.scaler.get_scale()      # of the step itself
        alarm = Alarm(what, cb.precision.kind, scale, *notes.batch)
        found = diagnose(learn, alarm, _divergence(notes, learn.model))
        if not found: return                                     # the loss scale explains it
        message = f'{alarm.happened}\n{found}'
        cb.fit.has_warned, cb.fit.watched = True, None             # first: between batches `fix` closes the fit
        if cb.on_overflow != 'fix' or self.n_fixes == _MOST_FIXES or not fix(cb, alarm): return self._say(message)
        self.n_fixes += 1

    def _say(self, message):
        if self.cb.on_overflow == 'raise': raise FloatingPointError(message)
        warn_user(message)


def _divergence(notes, model):
    """Describe how far weights and loss have grown since the start, if either has a hundredfold; '' otherwise.

    A loss that grew without the weights was small by chance. This waits for the device.
    """
    if notes.weights is None or notes.first_loss is None: return ''
    first, weights = float(notes.first_loss), float(_norm(model) / notes.weights)
    far = 0 < _FAR * abs(first) < notes.last_loss and not weights < _MOVED
    if not (far or _FAR < weights < math.inf): return ''
    return (f'since the start of the fit, the loss went from {first:.3g} to {notes.last_loss:.3g}, and the norm of the '
            f'weights grew {weights:.3g}-fold')


def _norm(model):
    "Return the norm of this process's trainable weights, on their device."
    return nn.utils.get_total_norm(p for p in readable_weights(model).values() if p.requires_grad)
