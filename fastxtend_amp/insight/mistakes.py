"Watchers of a fit that explain common mistakes: a module in `fp32_modules` that is never called, and PyTorch's errors."
import re

from ..messages import warn_user
from ..precisions.forwards import forward_of
from ..precisions.matching import ROOT
from ..training.callback import Watcher

_DTYPES = 'Half|BFloat16|dtype|scalar type|ScalarType|primitive'   # in PyTorch's errors where only fp32 runs
_ANOMALY = 'returned nan values'                                 # in those of anomaly detection


class UnusedModules(Watcher):
    "Warns, after the first training batch, of modules in `fp32_modules` whose forward did not run."
    def after_loss(self) -> None:
        "Look at the modules, once, after a complete forward pass: later batches do not pass here."
        cb, fit = self.cb, self.cb.fit
        if not cb.learn.training: return
        cb.methods['after_loss'].remove(self.after_loss)
        for name, m in fit.precision.kept_in_fp32(fit.model).items():
            if getattr(forward_of(m), 'called', True): continue
            warn_user(f"fp32_modules: '{name}' was not called in the first batch. If it never is, naming it has "
                      'no effect: its parent module may use its weights directly, as MultiheadAttention does with '
                      f"out_proj.\nKeep '{name.rpartition('.')[0] or ROOT}' instead.")


class ErrorNote(Watcher):
    "Adds advice to PyTorch's dtype errors, to oneDNN's about an LSTM, and to those of anomaly detection."
    def after_failure(self, error: BaseException) -> None:
        "Add a note to `error`, with Python 3.11 or newer."
        fit = self.cb.fit
        if not (fit and fit.precision.dtype and hasattr(error, 'add_note')): return
        if re.search(_DTYPES, str(error)):
            error.add_note('If the model trains in fp32: `learn.precision_report()` names the module that does not run '
                           'in 16 bits, and prints the call that keeps it in fp32.')
        elif fit.scaling and _ANOMALY in str(error):
            error.add_note('Switch off `torch.autograd.detect_anomaly`: it raises at the first overflow, but '
                           'loss scaling skips the step.')
