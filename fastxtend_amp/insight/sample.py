"Batches on which modules are judged: each run is recorded module by module, beside the run in fp32."
import re
from dataclasses import dataclass
from functools import cached_property
from traceback import walk_tb

import torch
from fastai.learner import Learner

from ..messages import first_line, users_line
from ..precisions import Precision
from ..precisions.matching import ROOT
from ..tensors import map_tensors
from .batches import BackwardOnly, run_batch, running_copy
from .display import LOSS
from .evidence import wrong_in_reference
from .random_states import RandomState, set_random_state
from .recording import Recording
from .values import n_nan_or_inf, readable

_IN_CALLBACK = re.compile(r'occured in `(\w+)`')               # fastai's words


@dataclass
class Sample:
    "The batches that modules are judged on. Their run in fp32, the reference, is made when it is first read."
    learn: Learner # Nothing in it changes
    batches: list # As a DataLoader gives them; inside a batch, its inputs and targets
    start: RandomState | None = None # Inside a batch, the random state to start from
    is_small: bool = False # Whether only the first items of each batch are left

    @cached_property
    def reference(self) -> Recording:
        "The run in fp32, which is compared with nothing."
        return self._recorded(Recording(Precision(), Recording(Precision())))

    @cached_property
    def fault(self) -> str: # '' if nothing is
        "The fault of the run in fp32."
        return wrong_in_reference(self.reference, self.batches)

    def run(self, precision: Precision) -> Recording:
        "Run the batches in a precision, and record each module."
        return self._recorded(Recording(precision, self.reference))

    def _recorded(self, recording):
        """Run the batches forward and backward in a copy, in its own loop with its callbacks; record each module.

        Then run them as in validation, unless that fails in fp32 as well. The first validation runs without hooks, as
        some modules of PyTorch use other kernels when they have hooks. If its results are finite only in fp32, it runs
        again and is recorded.
        """
        precision, reference = recording.precision, recording.reference
        suffix, in_batch = '', self.start is not None
        reader = BackwardOnly(recording.record_gradients, recording.record_loss)
        try:
            with running_copy(self.learn, precision, in_batch) as copy:
                set_random_state(self.start or [])
                for i, batch in enumerate(self.batches):
                    with recording.of_batch(copy.model), copy.added_cbs(reader): run_batch(copy, i, batch)
                if in_batch or reference.raised: return recording
                suffix, recording.failed_in = ' (in validation)', ROOT
                recording.validates = self._validates(copy, recording)
                if reference.validates and not recording.validates:
                    recording.not_finite = 'loss'
                    with recording.of_batch(copy.model): self._validates(copy, recording)
        except torch.OutOfMemoryError: raise
        except Exception as e:
            if not precision.dtype and not suffix: raise
            line = users_line(reversed([*walk_tb(e.__traceback__)]))
            recording.raised = first_line(e) + (f' ({line})' if line else '') + suffix
            callback = _IN_CALLBACK.search(str(e))
            if callback and recording.failed_in == LOSS: recording.failed_in = f'callback `{callback[1]}`'
        return recording

    def _validates(self, copy, recording):
        "Run the batches as in validation; record predictions; return whether they and the losses are finite."
        finite = True
        torch.manual_seed(0)                                     # training may have drawn other numbers
        for batch in self.batches:
            copy.pred = None                                     # a callback may cancel the batch
            copy._do_epoch_validate(dl=[map_tensors(torch.clone, batch)])
            finite &= _has_finite_results(copy)
            recording.predictions += readable(copy.pred)
        recording.random_state = torch.get_rng_state()
        return finite


def _has_finite_results(learn: Learner) -> bool:
    "Return whether predictions and loss of the batch that `learn` ran last are finite; -inf may be a mask."
    loss = vars(learn).get('loss') if len(learn.yb) else None    # without targets it is that of an earlier batch
    return not any(map(n_nan_or_inf, readable((learn.pred, loss))))
